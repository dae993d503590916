"""The pairs within chunks with strong gates, and their gradients: added to what the walk of the gradients gave.

Pairs are made by halving, level by level, with factors of at most 1, so that all is finite and exact whatever the gates
are. It takes several times as long as a chunk with mild gates.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas_gates import _F32, _exact, _load, _names, _product, _split
from keraunos.kernels.linear_attention.pallas_program import _LAYOUT, CHUNK, COLUMNS, _rows, _zeros


def halve(of: Any, i: Any) -> None:
    """Add a chunk's pairs, where its gates are strong, for the dimensions of a warpgroup that had them so.

    ``of`` is the warpgroup's walk, which is over, and at least one of them calls this for all its chunks.
    """
    strong = [of.at.strong[of.i_s, of.i_h, p, i] > 0 for p in range(of.P)]
    some: Any = strong[0]
    own: Any = strong[0]
    if of.P > 1:
        some, own = strong[0] | strong[1], jnp.where(of.part == 0, *strong)

    @pl.when(some)
    def _():
        t = of.tiles(i, True)
        _load_values(of, t, i)
        pl.when(own)(lambda: _add(of, t, i))

        @pl.when(jnp.logical_not(own))
        def _():
            t.after[0][...] = _zeros(CHUNK, COLUMNS).astype(of.dtype)
            plgpu.commit_smem()

        of.meet()
        _add_values(of, t, i)
        plgpu.wait_smem_to_gmem(0)
        of.meet()


def _tokens(of: Any, i: Any) -> tuple[Any, Any]:
    return of.sequence.row, pl.ds(of.chunks.start(i), CHUNK)


def _load_values(of: Any, t: Any, i: Any) -> None:
    """Have v and do in shared memory, without what neighbours hold."""
    at, tokens = of.at, _tokens(of, i)

    @pl.when(t.part == 0)
    def _():
        for w, columns in enumerate(of.columns):
            source = at.v.at[*tokens, of.i_h // of.shared[2], columns]
            plgpu.copy_gmem_to_smem(source, at.v_s.at[w], at.again_v)
            plgpu.copy_gmem_to_smem(at.do.at[*tokens, of.i_h, columns], at.do_s.at[w], at.again_v)

    plgpu.barrier_wait(at.again_v)
    if of.packed:
        pl.when(t.work.n < CHUNK)(t.clear_values)


def _add(of: Any, t: Any, i: Any) -> None:
    """Add to dq, dk and dg; the pairs are left in ``after[0]``."""
    at, tokens = of.at, _tokens(of, i)

    def load(barrier, *copies):
        for source, tile, n in copies:
            plgpu.copy_gmem_to_smem(source.at[*tokens, of.i_h // n, t.dims], tile, barrier.at[t.part])
        plgpu.barrier_wait(barrier.at[t.part])

    def clear(*tiles):
        if of.packed:
            t.work.clear(*tiles)

    gates = [(getattr(at, name), x, 1) for name, x in zip(_names(of.gs), t.gates, strict=True)]
    load(at.again, (at.q, t.q, of.shared[0]), (at.k, t.k, of.shared[1]), *gates)
    clear(t.q, t.k, *t.gates)
    dq, dk, dg = _by_halving(of, t)
    q, k = (plgpu.load(x, layout=_LAYOUT) for x in (t.q, t.k))
    plgpu.commit_smem()
    load(at.again_qk, (at.dq, t.q, 1), (at.dk, t.k, 1))
    clear(t.q, t.k)
    # To before the chunk and to after it; nothing cancels.
    before, after = _load(t.q), _load(t.k) * jnp.exp2(t.work.left())
    # All warps are done with what was there.
    plgpu.commit_smem()
    t.pairs[...] = (q.astype(_F32) * before).astype(of.dtype)
    t.before[0][...] = (k.astype(_F32) * after).astype(of.dtype)
    plgpu.commit_smem()
    dg = dg + _product(t.work.upto_s.T, t.pairs, _exact(t.work.col < t.work.row), t.before[0])
    t.q[...], t.k[...] = (dq + before).astype(of.dtype), (dk + after).astype(of.dtype)
    plgpu.commit_smem()
    load(at.again_g, *((x, gate, 1) for x, gate in zip(of.dgs, t.gates, strict=True)))
    for gate, x in zip(t.gates, _split(sum(map(_load, t.gates)) + dg, len(t.gates)), strict=True):
        gate[...] = x
    plgpu.commit_smem()
    for tile, target in ((t.q, at.dq), (t.k, at.dk), *zip(t.gates, of.dgs, strict=True)):
        of.give(tile, target, t)


def _add_values(of: Any, t: Any, i: Any) -> None:
    """Add to dv, 64 columns at a time, through the pairs of all: each warpgroup to its own part of them."""
    at, tokens, barrier = of.at, _tokens(of, i), of.at.again_dv.at[t.part]

    def add(w):
        columns = pl.ds(w * COLUMNS, COLUMNS)
        plgpu.copy_gmem_to_smem(at.dv.at[*tokens, of.i_h, columns], at.v_s.at[w], barrier)
        dv = _product(*(x for p in range(of.P) for x in (at.after_s.at[p, 0].T, at.do_s.at[w])))
        plgpu.barrier_wait(barrier)
        at.v_s[w] = (_load(at.v_s.at[w]) + dv).astype(of.dtype)
        plgpu.commit_smem()
        of.give(at.v_s.at[w], at.dv, t, columns)

    pl.loop(t.part, of.W, step=of.P)(add)


def _by_halving(of: Any, t: Any) -> tuple[Any, Any, Any]:
    """The gradients of q, k and gates through the pairs within the chunk, which are left in ``after[0]``."""
    work, dtype, kept, dpairs = t.work, of.dtype, t.after[0], t.before[0]
    work.close()

    def product(a, b):
        return _product(*(x for one, other in zip(a, b, strict=True) for x in (one, other.T)))

    both = product(t.do, t.v) * of.scale
    same = _rows(jnp.sum(jnp.where(work.row == work.col, both, 0.0), 1), COLUMNS)
    both = jnp.where(work.col <= work.row, both, product(t.v, t.do) * of.scale)
    dpairs[...] = both.astype(dtype)
    kept[...] = jnp.where(work.row == work.col, _product(t.q, t.k.T) * of.scale, 0.0).astype(dtype)

    def level(n, carry):
        dq, dk, dg = carry
        m, t = lax.shift_left(jnp.int32(1), n), of.tiles(jnp.int32(0), True)
        y = jnp.where(work.later(m), _load(t.q), _load(t.k)) * work.level(m)
        # All warps are done with what was there.
        plgpu.commit_smem()
        t.pairs[...] = y.astype(dtype)
        plgpu.commit_smem()
        found = jnp.where(work.pairs(m) & work.later(m), _product(t.pairs, t.pairs.T) * of.scale, _load(kept))
        kept[...] = found.astype(dtype)
        z = _product(jnp.where(work.pairs(m), _load(dpairs), 0.0).astype(dtype), t.pairs)
        x = _load(t.pairs) * z
        # All warps are done with what was there.
        plgpu.commit_smem()
        t.pairs[...] = x.astype(dtype)
        plgpu.commit_smem()
        dg = dg + _product(_exact(work.spanned(m)), t.pairs)
        z, later = z * work.level(m), work.later(m)
        return dq + jnp.where(later, z, 0.0), dk + jnp.where(later, 0.0, z), dg

    start = same * _load(t.k), same * _load(t.q), _zeros(CHUNK, COLUMNS)
    return lax.fori_loop(0, CHUNK.bit_length() - 1, level, start)
