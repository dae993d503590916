"""A chunk of the walk of the gradients in shared memory, and queries and keys in two terms.

For ``gates_gradients.py``; a chunk is what ``gates.py`` says.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas.gates import F32, Gates, nought, split_terms
from keraunos.kernels.linear_attention.pallas.program import COLUMNS, axis_of, clear_rows, when
from keraunos.kernels.linear_attention.pallas.tiles import Tile, load_bf16
from keraunos.kernels.linear_attention.pallas.vectors import flat_rows


def decayed(ref: Any, factors: Any, rounded: bool = False) -> list[Any]:
    """Queries or keys times factors, in two bf16 terms.

    ``rounded``: the first of them is rounded, not cut off; it is used without the second too.
    """
    x = load_bf16(ref) * factors
    if not rounded:
        return split_terms(x, 2)
    # Half of the last place that is kept carries into it.
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)
    high = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), F32)
    return [each.astype(jnp.bfloat16) for each in (high, x - high)]


class Tiles:
    """The tiles of a chunk in shared memory, for one warpgroup of a walk ``of``.

    Each is made when it is asked for: what nobody asks for takes time to compile, too.
    """

    def __init__(self, of: Any, i: Any):
        self.at, self.of, self.i, self.slot, self.side = of.at, of, i, lax.rem(i, of.stages), lax.rem(i, 2)
        self.zero = nought(of.at, of.walk)
        # Asked for anew: kept, it takes a register from the products of all chunks, and so does what is made of it.
        self.part = lax.axis_index(axis_of("warpgroup")) + self.zero
        self.work = Gates(
            of.at, self.part, self.zero, self.gates, of.gamma, of.walk, of.chunks.rows(i), of.dtype,
            upto=Tile(of.at.upto_s, (self.zero,)),
        )

    q = property(lambda self: Tile(self.at.q_s, (self.slot, self.part)))
    k = property(lambda self: Tile(self.at.k_s, (self.side, self.part)))
    q_rest = property(lambda self: Tile(self.at.rest_s, (self.part,)))
    k_rest = property(lambda self: Tile(self.at.k_s, (1 - self.side, self.part)))
    v = property(lambda self: [Tile(self.at.v_s, (w + self.zero,)) for w in range(self.of.W)])
    do = property(lambda self: [Tile(self.at.do_s, (w + self.zero,)) for w in range(self.of.W)])
    before = property(lambda self: [Tile(self.at.before_s, (self.part, w)) for w in range(self.of.W)])
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
        """The terms of the gates."""
        return [Tile(self.at.g_s, (self.slot, j, self.part)) for j in range(len(self.of.gs))]

    @property
    def dv_of(self) -> list[Any]:
        """Columns of dv, in blocks of 64: those that are kept come first."""
        return [self.part, 1 - self.part] if (self.of.P, self.of.W) == (2, 2) else list(range(self.of.W))

    def after_of(self, part: Any, w: Any) -> Any:
        """What a warpgroup has of the state's gradient after the chunk."""
        return Tile(self.at.after_s, (part, w))

    def before_row(self, far: Any) -> Any:
        """``[CHUNK, CHUNK]``: the column's token is not after the row's, and as far before it at least."""
        return self.work.col <= flat_rows(self.work.place - far)

    def after_row(self, far: Any) -> Any:
        """``[CHUNK, CHUNK]``: the column's token is not before the row's, and as far after it at least."""
        return self.work.col >= flat_rows(self.work.place + far)

    def clear_values(self) -> None:
        """Zero what neighbours hold of v and do, each warpgroup its part of it; then they meet."""
        of, at = self.of, self.of.at
        for w in range(of.W):
            tiles = self.v[w].ref, self.do[w].ref
            when(of.part == w % of.P)(lambda tiles=tiles: clear_rows(tiles, self.work.first, self.work.end))
        plgpu.barrier_arrive(at.met)
        plgpu.barrier_wait(at.met)
