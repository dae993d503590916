"""Worlds of processes that reach each other through gloo, or NCCL, for tests of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any


def run_world(
    fn: Callable, size: int, *args: Any, timeout: float = 30, backend: str = "gloo", patience: float = 200
) -> list[Any]:
    """``fn(rank, size, *args)`` in each of ``size`` processes that end after it; see :class:`World`."""
    with World(size, timeout, backend) as world:
        return world.run(fn, *args, patience=patience)


@contextlib.contextmanager
def worlds(**options: Any) -> Iterator[Callable[[int], World]]:
    """``world(size)``, one of each size for all that asks for it; ``options`` as :class:`World` has them."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda size: stack.enter_context(World(size, **options)))


class World:
    """``size`` processes that run one function after the other.

    Processes that have answered and do not end are ended: what they wait for is not what is tested.

    Args:
        size: how many.
        timeout: seconds, of the group.
        backend: "gloo", or "nccl", each process with a GPU of its own.
    """

    def __init__(self, size: int, timeout: float = 30, backend: str = "gloo"):
        # Forked from a process that has imported what all need, and has no threads.
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "keraunos.distributed.agreement", __name__])
        self.timeout = timeout
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            pipe, own = context.Pipe()
            world = rank, size, self.folder.name, timeout, backend
            process = context.Process(target=_rank, args=(own, *world), daemon=True)
            process.start()
            own.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, fn: Callable, *args: Any, patience: float = 200) -> list[Any]:
        """``fn(rank, size, *args)`` on each rank: what they return, None of those that died.

        Args:
            fn: a function of a test module; what it returns can be pickled.
            patience: seconds after which a world whose ranks have not all answered is given up.

        Raises:
            TimeoutError: that was so.
            Exception: what a rank raised.
        """
        for pipe in self.pipes:
            pipe.send((fn, args))
        end = time.monotonic() + patience
        found = [_result(pipe, rank, end) for rank, pipe in enumerate(self.pipes)]
        for result in found:
            if isinstance(result, Exception):
                raise result
        return found

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type | None, *raised: Any) -> None:
        for pipe in self.pipes:
            pipe.close()
        end = time.monotonic() + self.timeout
        for process in self.processes:
            if kind is None:
                process.join(max(end - time.monotonic(), 0))
            process.kill()
            process.join()
        self.folder.cleanup()


def _result(pipe: Any, rank: int, end: float) -> Any:
    if not pipe.poll(max(end - time.monotonic(), 0)):
        raise TimeoutError(f"rank {rank} does not answer")
    try:
        return pipe.recv()
    except EOFError:
        return None


def _rank(pipe: Any, rank: int, size: int, folder: str, timeout: float, backend: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    with contextlib.suppress(EOFError):
        while True:
            fn, args = pipe.recv()
            try:
                found = fn(rank, size, *args)
            except Exception as error:
                found = error
            pipe.send(found)
    # None leaves while another one still needs it.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
