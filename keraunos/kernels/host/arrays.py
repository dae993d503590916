"""Arrays as host code knows them: shapes, strides and dtypes, from which all else of a launch follows."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from keraunos.frontends.array_types import Array


def pow2(n: int) -> int:
    """The power of two that is n or the next above."""
    return 1 << max(int(n) - 1, 0).bit_length()


def tile(n: int) -> int:
    """The tile that holds n dimensions: the tensor cores take 16 at least."""
    return max(pow2(n), 16)


class Spec(NamedTuple):
    """The properties of an array that host code needs: hashable, so that plans are made once."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def row(self, tokens: int) -> Spec:
        """Packed tokens ``[T, ...]`` as a row ``[1, tokens, ...]`` of the same memory."""
        return Spec((1, tokens, *self.shape[1:]), (0, *self.strides), self.dtype)


def spec_of(x: Array | None) -> Spec | None:
    """The properties of an array; None for an absent one."""
    return None if x is None else Spec(tuple(x.shape), strides_of(x), dtype_of(x))


def strides_of(x: Array) -> tuple[int, ...]:
    """In values, not bytes; a JAX array is contiguous."""
    return x.stride() if hasattr(x, "stride") else contiguous(x.shape)


def contiguous(shape: Iterable[int]) -> tuple[int, ...]:
    """The strides of a contiguous array."""
    strides = [1]
    for size in reversed([*shape][1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def dtype_of(x: Array) -> str:
    """The dtype's name, such as "bfloat16"."""
    return _name(x.dtype)


@functools.cache
def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def strides_by_name(unit: int = 1, axes: str = "bth", **arrays: Spec | None) -> dict[str, int]:
    """``stride_<name><axis>`` of the axes of arrays [B, T, H, ...], in units; 0 for absent arrays."""
    return {f"stride_{name}{axis}": x.strides["bth".index(axis)] // unit if x else 0
            for name, x in arrays.items() for axis in axes}


def state_strides(states: Spec | None, name: str = "s") -> dict[str, int]:
    """``stride_<name><axis>`` of states [slots, H, K, V]; 0 where there are none."""
    return {f"stride_{name}{axis}": n for axis, n in zip("shkv", states.strides if states else (0,) * 4, strict=True)}


def unit_of(*arrays: Spec | None) -> int:
    """The largest power of two, up to 16, that divides every stride but that of the last axis."""
    return math.gcd(16, *(stride for x in arrays if x for stride in x.strides[:-1]))
