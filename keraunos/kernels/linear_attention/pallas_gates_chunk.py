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
from keraunos.kernels.linear_attention.pallas_program import CHUNK, COLUMNS, _axis, _clear, _rows
from keraunos.kernels.linear_attention.pallas_tiles import _load_bf16


def _decayed(ref: Any, factors: Any, rounded: bool = False) -> list[Any]:
    """Queries or keys times factors, in two bf16 terms: here, and not in the branch that uses them.

    ``rounded``: the first of them is rounded, not cut off; it is used without the second too.
    """
    x = _load_bf16(ref) * factors
    if not rounded:
        return lax.optimization_barrier(_split(x, 2))
    # Half of the last place that is kept carries into it.
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)
    high = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), _F32)
    return lax.optimization_barrier([each.astype(jnp.bfloat16) for each in (high, x - high)])


class _Tiles:
    """The tiles of a chunk in shared memory, for one warpgroup of a walk ``of``."""

    def __init__(self, of: Any, i: Any):
        at, self.of, self.slot, side = of.at, of, lax.rem(i, of.stages), lax.rem(i, 2)
        self.zero, self.i = _nought(at, of.walk), i
        # Asked for anew: kept, it takes a register from the products of all chunks, and so does what is made of it.
        self.part = part = lax.axis_index(_axis("warpgroup")) + self.zero
        self.dims = pl.ds(part * COLUMNS, COLUMNS)
        # Whose place for the state's gradient parts of dv are taken from and left in.
        self.giver = 1 - part if of.P > 1 else part
        self.dv_of = [part, 1 - part] if (of.P, of.W) == (2, 2) else list(range(of.W))
        self.q, self.q_rest = at.q_s.at[self.slot, part], at.rest_s.at[part]
        self.k, self.k_rest = at.k_s.at[side, part], at.k_s.at[1 - side, part]
        self.gates = [at.g_s.at[self.slot, j, part] for j in range(len(of.gs))]
        self.v, self.do = ([x.at[w + self.zero] for w in range(of.W)] for x in (at.v_s, at.do_s))
        self.after, self.before = ([x.at[part, w] for w in range(of.W)] for x in (at.after_s, at.before_s))
        # The last factor of the chunk before, which is not in the state yet, and this one's.
        self.first, self.kept = (at.factors_s.at[part, j] for j in range(2))
        self.left, self.last = (at.factors_s.at[part, 2 + lax.rem(i + j, 2)] for j in range(2))
        self.border, self.passing = at.border_s.at[part, lax.rem(i + 1, 2)], at.border_s.at[part, 2]
        self.work = _Gates(at, part, self.zero, self.gates, of.gamma, of.walk, of.chunks.rows(i), of.dtype)

    def before_row(self, far: Any) -> Any:
        """``[CHUNK, CHUNK]``: the column's token is not after the row's, and as far before it at least."""
        return self.work.col <= _rows(self.work.place - far, CHUNK)

    def after_row(self, far: Any) -> Any:
        """The same the other way."""
        return self.work.col >= _rows(self.work.place + far, CHUNK)

    def clear_values(self) -> None:
        """Zero what neighbours hold of v and do, each warpgroup its part of it; then they meet."""
        of, at = self.of, self.of.at
        for w in range(of.W):
            pl.when(of.part == w % of.P)(lambda w=w: _clear([self.v[w], self.do[w]], self.work.first, self.work.end))
        plgpu.barrier_arrive(at.met)
        plgpu.barrier_wait(at.met)
