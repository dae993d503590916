"""PyTorch, for the tuner: inputs of its own, programs that have run once, and their time; like ``jax/measure.py``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from keraunos.frontends.torch import dtype_name

# Triton's compilers are processes and C++.
COMPILE_THREADS = os.cpu_count() or 1


def elsewhere(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` for another thread: outside any trace of this one, on this one's device."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None

    def call(*args: Any) -> Any:
        if index is not None:
            torch.cuda.set_device(index)
        return fn(*args)

    return call


def array(x: np.ndarray, dtype: str, backend: str) -> torch.Tensor:
    """A NumPy array on a device of that kind, rounded to ``dtype``."""
    return torch.as_tensor(np.ascontiguousarray(x)).to(_device(backend), getattr(torch, dtype))


def normal(shape: tuple[int, ...], dtype: str, seed: int, backend: str) -> torch.Tensor:
    """Random normal values on a device of that kind."""
    device = _device(backend)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(getattr(torch, dtype))


def results(fn: Callable[..., Any], args: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each of the outputs of ``fn(*args)``."""
    return [(tuple(x.shape), dtype_name(x)) for x in _leaves(fn(*args))]


def program(fn: Callable[..., Any], args: Sequence[Any], cotangents: Sequence[Any] | None = None) -> Callable:
    """Run ``fn(*args)`` once, with ``cotangents`` also its gradients, and return that run; see there."""
    args = [
        x.detach().requires_grad_(cotangents is not None)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in args
    ]
    wanted = {i: x for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.is_floating_point()}

    def run() -> tuple[list[Any], list[Any] | None]:
        outputs = _leaves(fn(*args))
        if cotangents is None:
            return outputs, None
        found = torch.autograd.grad(outputs, list(wanted.values()), list(cotangents), allow_unused=True)
        gradients = dict(zip(wanted, found, strict=True))
        return outputs, [gradients.get(i) for i in range(len(args))]

    run()
    return run


def values(x: torch.Tensor) -> np.ndarray:
    """The tensor in the host's memory; NumPy has no bfloat16."""
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def clock(runs: Sequence[Callable], backend: str) -> Callable[[Callable], float]:
    """A function that gives the seconds of one of these runs: by events on an accelerator, by the clock on CPU."""
    if backend == "cpu":
        return _wall
    host: dict[Callable, float] = {}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def seconds(run: Callable[[], Any]) -> float:
        # The device sleeps while the host fills the queue, which takes longer than small kernels do: between the events
        # there are no gaps then. A cycle is about half a nanosecond.
        torch.cuda._sleep(int(min(1.5 * host.get(run, 0.005), 0.1) * 2e9))
        begin.record()
        start = time.perf_counter()
        for _ in range(10):
            run()
        host[run] = time.perf_counter() - start
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 10e3

    return seconds


def _wall(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _device(backend: str) -> str:
    return {"gpu": "cuda"}.get(backend, backend)


def _leaves(outputs: Any) -> list[torch.Tensor]:
    return [x for x in outputs if x is not None] if isinstance(outputs, tuple | list) else [outputs]
