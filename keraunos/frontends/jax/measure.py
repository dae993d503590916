"""JAX, for the tuner: inputs of its own, compiled programs, and their time."""

from __future__ import annotations

import functools
import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keraunos.frontends.jax import default_device, dtype_name

_log = logging.getLogger("keraunos")

# XLA compiles without the interpreter's lock.
COMPILE_THREADS = os.cpu_count() or 1


def elsewhere(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` for another thread: outside any trace of this one, under this one's settings."""
    x64, device = jax.config.read("jax_enable_x64"), _default()

    def call(*args: Any) -> Any:
        with jax.enable_x64(x64), jax.default_device(device):
            return fn(*args)

    return call


def array(x: np.ndarray, dtype: str, backend: str) -> jax.Array:
    """A NumPy array on a device of that kind, rounded to ``dtype``."""
    with jax.default_device(_of_kind(backend)):
        return jnp.asarray(x).astype(dtype)


def normal(shape: tuple[int, ...], dtype: str, seed: int, backend: str) -> jax.Array:
    """Random normal values on a device of that kind."""
    with jax.default_device(_of_kind(backend)):
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def _of_kind(backend: str) -> Any:
    """The default device if it is of that kind."""
    return _default() if default_device().backend == backend else jax.local_devices(backend=backend)[0]


def _default() -> Any:
    return jax.config.jax_default_device  # type: ignore[attr-defined]


def results(fn: Callable[..., Any], args: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each of the outputs of ``fn(*args)``."""
    given, call = _arrays_apart(fn, args)
    return [(x.shape, dtype_name(x)) for x in jax.tree.leaves(jax.eval_shape(call, given))]


def program(fn: Callable[..., Any], args: Sequence[Any], cotangents: Sequence[jax.Array] | None = None) -> Callable:
    """Compile ``fn(*args)``, with ``cotangents`` also its gradients.

    Returns:
        A function of no arguments that starts a run and returns ``(outputs, gradients)``: a list, and a list as long as
        ``args`` with None where there is no gradient (or None without cotangents).
    """
    given, call = _arrays_apart(fn, args)
    wanted = [i for i, x in given.items() if jnp.issubdtype(x.dtype, jnp.floating)]

    def forward(given: dict[int, jax.Array], cotangents: None) -> tuple[list[Any], None]:
        return jax.tree.leaves(call(given)), None

    def both(given: dict[int, jax.Array], cotangents: Sequence[jax.Array]) -> tuple[list[Any], dict[int, Any]]:
        floats = {i: given[i] for i in wanted}
        outputs, pull = jax.vjp(lambda floats: jax.tree.leaves(call({**given, **floats})), floats)
        return outputs, pull(list(cotangents))[0]

    compiled = jax.jit(forward if cotangents is None else both).lower(given, cotangents).compile()

    def run() -> tuple[list[Any], list[Any] | None]:
        outputs, gradients = compiled(given, cotangents)
        return outputs, gradients and [gradients.get(i) for i in range(len(args))]

    run.compiled, run.arguments = compiled, (given, cotangents)  # type: ignore[attr-defined]
    return run


def _arrays_apart(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[dict[int, jax.Array], Callable[[dict], Any]]:
    """The arrays among the arguments, and ``fn`` of these only: the others are constants."""
    given = {i: x for i, x in enumerate(args) if isinstance(x, jax.Array)}
    return given, lambda given: fn(*(given.get(i, x) for i, x in enumerate(args)))


def values(x: jax.Array) -> np.ndarray:
    """The array in the host's memory."""
    return np.asarray(x)


def clock(runs: Sequence[Callable], backend: str) -> Callable[[Callable], float]:
    """A function that gives the seconds of one of these runs: the device's own where it can tell for all of them."""
    if backend == "cpu":
        return functools.partial(_wall, times=1)
    try:
        for run in runs:
            _device(run)
        return _device
    except Exception as error:
        # CUPTI has one user at a time, and not every program launches the same kernels each time.
        _log.info("no device times from JAX (%s: %s); timing queued runs by the clock", type(error).__name__, error)
        return functools.partial(_wall, times=10)


def _device(run: Any) -> float:
    from jax.experimental.mosaic.gpu import profiler

    _, milliseconds = profiler.measure(run.compiled, iterations=10)(*run.arguments)
    return statistics.median(milliseconds) / 1e3


def _wall(run: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / times
