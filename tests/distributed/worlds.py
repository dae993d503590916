"""Worlds of processes that reach each other through gloo, or NCCL, for tests of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def run_world(
    fn: Callable, size: int, *args: Any, timeout: float = 30, backend: str = "gloo", patience: float = 200
) -> list[Any]:
    """``fn(rank, size, *args)`` in each of ``size`` processes: what they return, None of those that died.

    Processes that have answered and do not end are ended: what they wait for is not what is tested.

    Args:
        fn: a function of a test module; what it returns can be pickled.
        timeout: seconds, of the group.
        backend: "gloo", or "nccl", each process with a GPU of its own.
        patience: seconds after which a world whose ranks have not all answered is ended.

    Raises:
        TimeoutError: that was so.
        Exception: what a rank raised.
    """
    # Forked from a process that has imported what all need, and has no threads.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "keraunos.distributed.agreement", __name__])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            pipe, own = context.Pipe(duplex=False)
            world = rank, size, folder, timeout, backend
            process = context.Process(target=_rank, args=(own, fn, world, args), daemon=True)
            process.start()
            own.close()
            pipes.append(pipe)
            processes.append(process)
        end = time.monotonic() + patience
        try:
            found = [_result(pipe, rank, end) for rank, pipe in enumerate(pipes)]
            for process in processes:
                process.join(timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def _result(pipe: Any, rank: int, end: float) -> Any:
    if not pipe.poll(max(end - time.monotonic(), 0)):
        raise TimeoutError(f"rank {rank} does not answer")
    try:
        return pipe.recv()
    except EOFError:
        return None


def _rank(pipe: Any, fn: Callable, world: tuple, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    rank, size, folder, timeout, backend = world
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        found = fn(rank, size, *args)
    except Exception as error:
        found = error
    pipe.send(found)
    pipe.close()
    # None leaves while another one still needs it.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
