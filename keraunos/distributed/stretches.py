"""The states that devices tell each other which share a sequence: by the Triton kernels where these can run.

``kernels/linear_attention/stretches.py`` says what the functions are given, and what they make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keraunos import frontends
from keraunos.frontends import interpreter
from keraunos.frontends.array_types import Array
from keraunos.kernels import kernel_registry
from keraunos.kernels.linear_attention import stretches as plain
from keraunos.kernels.linear_attention.stretches import Stretch, Way, values_left
from keraunos.ops.invocation import Platform

__all__ = ["Stretch", "Way", "arrive", "is_for_gpu", "leave", "leave_pieces", "starts", "values_left"]


def is_for_gpu(x: Array) -> bool:
    """Whether the Triton kernels make the state that arrays like the key ``x`` leave."""
    framework = frontends.framework_of(x)
    frontend = frontends.get(framework)
    if frontend.dtype_name(x) == "float64" or (x.ndim == 4 and x.shape[-1] > 256):
        return False
    there = frontend.device_of(x).backend == "gpu" or (framework == "torch" and interpreter.ON)
    return there and frontends.cannot_launch(framework) is None


def leave(x: Stretch, start: Array | None, plan: Array, way: Way, copies: int = 1) -> Array:
    """The state and the sum of gates that a stretch leaves, flat; copies: how often, more than once only on GPUs."""
    return leave_pieces(x, start, plan, way, 0, copies)[0] if is_for_gpu(x.key) else plain.leave(x, start, plan, way)


def arrive(left: Array, start: Array | None, plan: Array, way: Way, sizes: tuple[int, ...]) -> Array:
    """The state ``[B, H, K, V]`` after the stretches before this one; ``start``, or zeros, if there are none."""
    return (_kernels()[1] if is_for_gpu(left) else plain.arrive)(left, start, plan, way, sizes)


def leave_pieces(x: Stretch, start: Array | None, plan: Array, way: Way, segment: int,
                 copies: int = 1) -> tuple[Any, ...]:
    """On a GPU: what :func:`leave` gives, and what :func:`starts` needs for segments of so many tokens.

    The latter is the states that pieces of the stretch leave, and the sums of their gates.
    """
    return _kernels()[0](x, start, plan, way, segment, copies)


def starts(left: Array, local: Array, total: Array, start: Array | None, plan: Array, way: Way, segment: int) -> Array:
    """On a GPU: what segments of this stretch start from ``[B * segments, H, K, V]``, after the stretches before it.

    Segments lie in the order of their tokens; local, total: what :func:`leave_pieces` gave.
    """
    K, V = local.shape[-2:]
    B = left.shape[1] // (way.heads * (K * V + (K if total.ndim == 3 else 1)))
    return _kernels()[1](left, start, plan, way, (B, way.heads, K, V), local, total, segment)


def _kernels() -> tuple[Callable, Callable]:
    """The functions of the platform ``triton``."""
    parts = kernel_registry.get("gla", Platform.TRITON).parts
    assert parts
    return parts
