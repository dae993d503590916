"""Host code of walks on Hopper GPUs: sizes of tiles, strides, and which head dims they take."""

from __future__ import annotations

from typing import Any

from keraunos import frontends
from keraunos.kernels.gluon import cannot_run
from keraunos.kernels.host.arrays import Spec
from keraunos.ops.invocation import Invocation

# Tokens of a chunk. Dimensions of a tile are as few or as many as these; rows of a multiple of ROW values begin at
# multiples of 16 bytes.
CHUNK, LEAST_TILE, MOST_DIMS, ROW = 64, 64, 128, 8


def tiles_of(K: int, V: int) -> dict[str, int]:
    """The dimensions of keys and of values, and of their tiles."""
    BK, BV = (LEAST_TILE if size <= LEAST_TILE else MOST_DIMS for size in (K, V))
    return dict(K=K, V=V, BK=BK, BV=BV)


def token_strides(**arrays: Spec | None) -> dict[str, int]:
    """``stride_<name><axis>`` of arrays [B, T, heads, ...]; of a single token none, which may be anything."""
    none = 0, MOST_DIMS, 0
    return {f"stride_{name}{axis}": x.strides[i] if x and x.shape[i] > 1 else none[i]
            for name, x in arrays.items() for i, axis in enumerate("bth")}


def aligned(x: Any) -> Any:
    """The array, or a copy where copies of blocks cannot take it: rows must begin at multiples of 16 bytes."""
    return None if x is None else frontends.of(x).aligned(x)


def cannot_walk(inv: Invocation) -> str | None:
    """Why no walk on a Hopper GPU can run the call, or None."""
    if reason := cannot_run(inv):
        return reason
    K, V = inv.dims["K"], inv.dims["V"]
    dims = f"the call has K = {K}, V = {V}"
    if max(K, V) > MOST_DIMS:
        return f"takes head dims up to 128: the next larger tile of a state takes 128 registers a thread; {dims}"
    if min(K, V) <= LEAST_TILE // 2:
        return f"takes head dims over 32: most of a tile of 64 would stay empty; {dims}"
    if K % ROW or V % ROW:
        return f"takes head dims that are multiples of 8: rows must begin at multiples of 16 bytes; {dims}"
    return None
