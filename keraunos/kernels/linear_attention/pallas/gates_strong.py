"""The pairs within chunks with strong gates, and their gradients: added to what the walk of the gradients gave.

Pairs are made by halving, level by level, with factors of at most 1, so that all is finite and exact whatever the gates
are. It takes several times as long as a chunk with mild gates.

A program is a single warpgroup, which has a chunk to itself: all that meets is its own warps.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas.gates import (
    F32,
    Gates,
    constants_s,
    exact,
    gamma_of,
    give_back,
    make_constants,
    names_of,
    parts_of,
    split_terms,
    tiles_of,
)
from keraunos.kernels.linear_attention.pallas.products import T, product_of
from keraunos.kernels.linear_attention.pallas.program import CHUNK, COLUMNS, Names, launch_kernel, rows_of, when, zeros
from keraunos.kernels.linear_attention.pallas.registers import widened
from keraunos.kernels.linear_attention.pallas.tiles import load_bf16, load_tile, store_tile, store_tiles
from keraunos.kernels.linear_attention.pallas.walk import over

# As many programs as there is room for at once, two per multiprocessor: most end at once.
_PROGRAMS = 264


class _Chunk:
    """One chunk, whose gates are strong in some dimensions; ``at`` are the kernel's references."""

    def __init__(self, at: Any, i: Any, i_s: Any, i_h: Any, *, walk: Any, gs: Any, shared: list[int], scale: float,
                 dtype: Any):
        self.at, self.i, self.i_h, self.gs, self.shared, self.scale, self.dtype = at, i, i_h, gs, shared, scale, dtype
        sequence = walk.at(i_s, at.plan)
        self.chunks, self.packed = sequence.of_segment(), at.plan is not None
        self.marks = i_s, i_h
        self.place, self.tokens = (sequence.row, i_h), (sequence.row, pl.ds(self.chunks.start(i), CHUNK))
        self.W, self.P = at.v_s.shape[0], at.pairs_s.shape[0]
        self.gates = [at.g_s.at[j] for j in range(len(gs))]
        self.v, self.do = ([x.at[w] for w in range(self.W)] for x in (at.v_s, at.do_s))
        gamma = gamma_of(at.gamma, *self.place)
        self.work = Gates(at, 0, 0, self.gates, gamma, walk, self.chunks.rows(i), dtype)

    def load(self, barrier: Any, *copies: Any) -> None:
        """Have parts of arrays in shared memory, without what neighbours hold."""
        for source, i_h, columns, tile in copies:
            plgpu.copy_gmem_to_smem(source.at[*self.tokens, i_h, columns], tile, barrier)
        plgpu.barrier_wait(barrier)
        if self.packed:
            self.work.clear(*(tile for *_, tile in copies))

    def give(self, tile: Any, ref: Any, columns: Any) -> None:
        """Start copying a tile to memory."""
        give_back(tile, ref, self.place, self.chunks, self.i, columns, self.packed)

    def halve(self) -> None:
        """Add its pairs, through the 64 dimensions of those parts that are strong."""
        at, columns = self.at, parts_of(self.W * COLUMNS)
        of_v = [(at.v, over(self.i_h, self.shared[2]), x, tile) for x, tile in zip(columns, self.v, strict=True)]
        self.load(at.values, *of_v, *((at.do, self.i_h, x, tile) for x, tile in zip(columns, self.do, strict=True)))

        @pl.loop(0, self.P)
        def _(p):
            own = at.strong[*self.marks, p, self.i] > 0
            when(own)(lambda: self.add(pl.ds(p * COLUMNS, COLUMNS), at.pairs_s.at[p]))

            @when(jnp.logical_not(own))
            def _():
                store_tile(at.pairs_s.at[p], zeros(CHUNK, COLUMNS).astype(self.dtype))
                plgpu.commit_smem()

        pl.loop(0, self.W)(self.add_values)

    def add_values(self, w: Any) -> None:
        """Add to 64 columns of dv, through all pairs."""
        at, tile, columns = self.at, self.at.v_s.at[w], pl.ds(w * COLUMNS, COLUMNS)
        self.load(at.dv_there, (at.dv, self.i_h, columns, tile))
        dv = product_of(*(x for p in range(self.P) for x in (T(at.pairs_s.at[p]), at.do_s.at[w])))
        store_tile(tile, (load_bf16(tile) + dv).astype(self.dtype))
        plgpu.commit_smem()
        self.give(tile, at.dv, columns)

    def add(self, dims: Any, pairs: Any) -> None:
        """Add to dq, dk and dg of 64 dimensions; their pairs are left in a tile."""
        at, work, q_s, k_s, gates = self.at, self.work, self.at.q_s, self.at.k_s, self.gates
        of_g = [(getattr(at, name), self.i_h, dims, gate) for name, gate in zip(names_of(self.gs), gates, strict=True)]
        heads = [over(self.i_h, n) for n in self.shared]
        self.load(at.inputs, (at.q, heads[0], dims, q_s), (at.k, heads[1], dims, k_s), *of_g)
        dq, dk, dg = self.by_halving(pairs)
        q, k = load_tile(q_s), load_tile(k_s)
        plgpu.commit_smem()
        self.load(at.given, (at.dq, self.i_h, dims, q_s), (at.dk, self.i_h, dims, k_s))
        # To before the chunk and to after it; nothing cancels.
        before, after = load_bf16(q_s), load_bf16(k_s) * jnp.exp2(work.left())
        # All warps are done with what was there.
        plgpu.commit_smem()
        store_tile(at.x_s, (widened(q) * before).astype(self.dtype))
        store_tile(at.dpairs_s, (widened(k) * after).astype(self.dtype))
        plgpu.commit_smem()
        dg = dg + product_of(T(work.upto_s), at.x_s, exact(work.col < work.row), at.dpairs_s)
        store_tiles((q_s, k_s), ((dq + before).astype(self.dtype), (dk + after).astype(self.dtype)))
        plgpu.commit_smem()
        dgs = [getattr(at, f"d{name}") for name in names_of(self.gs)]
        self.load(at.terms, *((x, self.i_h, dims, gate) for x, gate in zip(dgs, gates, strict=True)))
        store_tiles(gates, split_terms(sum(map(load_bf16, gates)) + dg, len(gates)))
        plgpu.commit_smem()
        for tile, target in ((q_s, at.dq), (k_s, at.dk), *zip(gates, dgs, strict=True)):
            self.give(tile, target, dims)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def by_halving(self, kept: Any) -> tuple[Any, Any, Any]:
        """The gradients of q, k and gates through the pairs within the chunk, which are left in a tile."""
        at, work, dtype = self.at, self.work, self.dtype
        q, k, x_s = at.q_s, at.k_s, at.x_s
        work.close()

        def product(a, b):
            return product_of(*(x for one, other in zip(a, b, strict=True) for x in (one, T(other))))

        def given(x):
            return (x * self.scale).astype(dtype)

        row, col = work.row, work.col
        both, other = product(self.do, self.v) * self.scale, product(self.v, self.do) * self.scale
        same = rows_of(jnp.sum(jnp.where(row == col, both, 0.0), 1), COLUMNS)
        dpairs = jnp.where(col <= row, both, other).astype(dtype)
        found = given(jnp.where(row == col, product_of(q, T(k)), 0.0))

        def level(n, carry):
            dq, dk, dg, found = carry
            m = lax.shift_left(jnp.int32(1), n)
            pairs, later, decays = work.pairs(m), work.later(m), work.level(m)
            y = work.either(q, k, m) * decays
            # All warps are done with what was there.
            plgpu.commit_smem()
            store_tile(x_s, y.astype(dtype))
            plgpu.commit_smem()
            found = jnp.where(pairs & later, given(product_of(x_s, T(x_s))), found)
            z = product_of(jnp.where(pairs, dpairs, jnp.zeros_like(dpairs)), x_s)
            x = load_bf16(x_s) * z
            # All warps are done with what was there.
            plgpu.commit_smem()
            store_tile(x_s, x.astype(dtype))
            plgpu.commit_smem()
            dg = dg + product_of(exact(work.spanned(m)), x_s)
            z = z * decays
            return dq + jnp.where(later, z, 0.0), dk + jnp.where(later, 0.0, z), dg, found

        start = same * load_bf16(k), same * load_bf16(q), zeros(CHUNK, COLUMNS), found
        dq, dk, dg, found = lax.fori_loop(0, CHUNK.bit_length() - 1, level, start)
        store_tile(kept, found)
        return dq, dk, dg


def add_pairs(q, k, v, decay, do, strong, dq, dk, dv, terms, *, H, walk, plan, scale):
    """``[dq, dk, dv, *terms]``, to which the pairs within chunks with strong gates are added, in place.

    Args:
        q, k, v, decay, do, H, walk, plan, scale: as for ``gates_gradients.gradients``.
        strong, dq, dk, dv, terms: what that gives.
    """
    slots, _, P, _ = strong.shape
    W, dtype, gs = v.shape[-1] // COLUMNS, q.dtype, decay.gates
    options = dict(walk=walk, gs=gs, shared=[H // x.shape[2] for x in (q, k, v)], scale=scale, dtype=dtype)
    programs = max(_PROGRAMS // (slots * H), 1)
    inputs = dict(q=q, k=k, v=v, **names_of(gs), gamma=decay.gamma, do=do, strong=strong, plan=plan)
    changed = dict(dq=dq, dk=dk, dv=dv, **{f"d{name}": x for name, x in names_of(terms).items()})
    scratch = dict(
        q_s=tiles_of(dtype), k_s=tiles_of(dtype), g_s=tiles_of(jnp.bfloat16, len(gs)), x_s=tiles_of(dtype),
        v_s=tiles_of(dtype, W), do_s=tiles_of(dtype, W), dpairs_s=tiles_of(dtype), pairs_s=tiles_of(dtype, P),
        total_s=plgpu.SMEM((1, 2, COLUMNS), F32), **constants_s(),
        # What is loaded: v and do; q, k and gates; what was given of dq and dk, of dg and, 64 columns at a time, of dv.
        values=plgpu.Barrier(num_arrivals=2 * W), inputs=plgpu.Barrier(num_arrivals=2 + len(gs)),
        given=plgpu.Barrier(num_arrivals=2), terms=plgpu.Barrier(num_arrivals=len(gs)), dv_there=plgpu.Barrier(),
    )

    def body(indices, i_w, *refs):
        first, i_s, i_h = indices
        at: Any = Names(refs, inputs, changed, scratch)

        def marked(i):
            return sum(at.strong[i_s, i_h, p, i] for p in range(P)) > 0

        # After the marks of the chunks: whether there is any.
        @when(marked(walk.segment))
        def _():
            make_constants(at, walk, i_w)
            plgpu.barrier_wait(at.once)

            @pl.loop(first, walk.at(i_s, at.plan).of_segment().count, step=programs)
            def _(i):
                @when(marked(i))
                def _():
                    _Chunk(at, i, i_s, i_h, **options).halve()
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return launch_kernel(
        body, [*inputs.values(), *changed.values()], lanes=True, between_warps=False, in_place=len(changed),
        name="gates_strong", warpgroups=1, grid=(programs, slots, H), scratch_types=list(scratch.values()),
    )
