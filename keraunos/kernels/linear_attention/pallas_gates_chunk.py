"""A chunk of the walk of the gradients in shared memory, and queries and keys in two terms.

For ``pallas_gates_gradients.py``; a chunk is what ``pallas_gates.py`` says.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas_gates import _F32, _Gates, _nought, _split
from keraunos.kernels.linear_attention.pallas_program import COLUMNS, _axis, _clear, _when
from keraunos.kernels.linear_attention.pallas_tiles import _load_bf16, _Tile
from keraunos.kernels.linear_attention.pallas_vectors import _flat_rows


def _decayed(ref: Any, factors: Any, rounded: bool = False) -> list[Any]:
    """Queries or keys times factors, in two bf16 terms.

    ``rounded``: the first of them is rounded, not cut off; it is used without the second too.
    """
    x = _load_bf16(ref) * factors
    if not rounded:
        return _split(x, 2)
    # Half of the last place that is kept carries into it.
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)
    high = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), _F32)
    return [each.astype(jnp.bfloat16) for each in (high, x - high)]


class _Tiles:
    """The tiles of a chunk in shared memory, for one warpgroup of a walk ``of``.

    Each is made when it is asked for: what nobody asks for takes time to compile, too.
    """

    def __init__(self, of: Any, i: Any):
        self.at, self.of, self.i, self.slot, self.side = of.at, of, i, lax.rem(i, of.stages), lax.rem(i, 2)
        self.zero = _nought(of.at, of.walk)
        # Asked for anew: kept, it takes a register from the products of all chunks, and so does what is made of it.
        self.part = lax.axis_index(_axis("warpgroup")) + self.zero
        self.work = _Gates(
            of.at, self.part, self.zero, self.gates, of.gamma, of.walk, of.chunks.rows(i), of.dtype,
            upto=_Tile(of.at.upto_s, (self.zero,)),
        )  # fmt: skip

    q = property(lambda self: _Tile(self.at.q_s, (self.slot, self.part)))
    k = property(lambda self: _Tile(self.at.k_s, (self.side, self.part)))
    q_rest = property(lambda self: _Tile(self.at.rest_s, (self.part,)))
    k_rest = property(lambda self: _Tile(self.at.k_s, (1 - self.side, self.part)))
    v = property(lambda self: [_Tile(self.at.v_s, (w + self.zero,)) for w in range(self.of.W)])
    do = property(lambda self: [_Tile(self.at.do_s, (w + self.zero,)) for w in range(self.of.W)])
    before = property(lambda self: [_Tile(self.at.before_s, (self.part, w)) for w in range(self.of.W)])
    after = property(lambda self: [self.after_of(self.part, w) for w in range(self.of.W)])
    # The last factor of the chunk before, which is not in the state yet, and this one's.
    left = property(lambda self: self.at.factors_s.at[self.part, 2 + self.side])
    last = property(lambda self: self.at.factors_s.at[self.part, 3 - self.side])
    first = property(lambda self: self.at.factors_s.at[self.part, 0])
    kept = property(lambda self: self.at.factors_s.at[self.part, 1])
    # What the gradient of gates starts from, and what passes a strong chunk.
    border = property(lambda self: self.at.border_s.at[self.part, 1 - self.side])
    passing = property(lambda self: self.at.border_s.at[self.part, 2])
    dims = property(lambda self: pl.ds(self.part * COLUMNS, COLUMNS))
    # Whose place for the state's gradient parts of dv are taken from and left in.
    giver = property(lambda self: 1 - self.part if self.of.P > 1 else self.part)

    @property
    def gates(self) -> list[Any]:
        """Their terms."""
        return [_Tile(self.at.g_s, (self.slot, j, self.part)) for j in range(len(self.of.gs))]

    @property
    def dv_of(self) -> list[Any]:
        """Columns of dv, in blocks of 64: those that are kept come first."""
        return [self.part, 1 - self.part] if (self.of.P, self.of.W) == (2, 2) else list(range(self.of.W))

    def after_of(self, part: Any, w: Any) -> Any:
        """What a warpgroup has of the state's gradient after the chunk."""
        return _Tile(self.at.after_s, (part, w))

    def before_row(self, far: Any) -> Any:
        """``[CHUNK, CHUNK]``: the column's token is not after the row's, and as far before it at least."""
        return self.work.col <= _flat_rows(self.work.place - far)

    def after_row(self, far: Any) -> Any:
        """The same the other way."""
        return self.work.col >= _flat_rows(self.work.place + far)

    def clear_values(self) -> None:
        """Zero what neighbours hold of v and do, each warpgroup its part of it; then they meet."""
        of, at = self.of, self.of.at
        for w in range(of.W):
            tiles = self.v[w].ref, self.do[w].ref
            _when(of.part == w % of.P)(lambda tiles=tiles: _clear(tiles, self.work.first, self.work.end))
        plgpu.barrier_arrive(at.met)
        plgpu.barrier_wait(at.met)
