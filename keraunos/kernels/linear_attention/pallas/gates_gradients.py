"""The gradients of the recurrence with gates per token and dimension of the key, for Hopper: one walk against it.

A warpgroup holds 64 rows of the state's gradient and prepares what belongs to them, as ``gates.py`` says;
another moves memory. Pairs within a chunk whose gates are strong are left out of the walk and done after it, by the
kernel of ``gates_strong.py``.

A chunk takes few steps, each of many products at once, between which the warps meet: most of a warpgroup's time goes
into waiting for itself. Branches hold little, for what they need takes registers that the walk does not have.

Queries and keys with their gates worked in, pairs, and the gradients of pairs are two bf16 terms each, so that rounding
them costs no accuracy; of a product of two such, three of the four products are taken. What queries lose to their first
term has a tile of its own, what keys lose that of the chunk before or after, whose keys come late.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas.gates import (
    F32,
    TILE,
    across,
    constants_s,
    factor_of,
    gamma_of,
    give_back,
    load_parts,
    make_constants,
    meet,
    names_of,
    nought,
    ones,
    parts_of,
    split_terms,
    stages_of,
    tiles_of,
)
from keraunos.kernels.linear_attention.pallas.gates_chunk import Tiles, decayed
from keraunos.kernels.linear_attention.pallas.gates_starts import named_starts, start
from keraunos.kernels.linear_attention.pallas.products import T, product_of, start_product, wait_for
from keraunos.kernels.linear_attention.pallas.program import (
    CHUNK,
    COLUMNS,
    PER_ROW,
    Names,
    either_of,
    launch_kernel,
    when,
)
from keraunos.kernels.linear_attention.pallas.tiles import (
    Tile,
    leave_in,
    load_bf16,
    load_per_row,
    put,
    read_from,
    store_per_row,
    store_tile,
    store_tiles,
    taken,
)
from keraunos.kernels.linear_attention.pallas.vectors import flat, flat_exp2, flat_sum, flat_zeros, here, unflat
from keraunos.kernels.linear_attention.pallas.walk import over


def _columns_of(ref: Any, columns: list[Any]) -> tuple[Any, ...]:
    """Part of a state ``[64, V]`` in memory, by its columns."""
    return tuple(flat(read_from(ref.at[:, x])) for x in columns)


def _sum_of_rows(xs: Any, ys: Any) -> Any:
    """``[64]``: of each row the sum of the products of x and y."""
    return flat_sum(sum(x * y for x, y in zip(xs, ys, strict=True)))


class _Walk:
    """What the warpgroup of 64 dimensions of the key does in one program; ``at`` are the kernel's references."""

    def __init__(self, at: Any, part: Any, i_s: Any, i_h: Any, *, walk: Any, K: int, V: int, gs: Any, dtype: Any,
                 shared: list[int], scale: float, stages: int):
        self.at, self.part, self.i_s, self.i_h, self.walk, self.dtype, self.gs = at, part, i_s, i_h, walk, dtype, gs
        self.shared, self.scale, self.stages = shared, scale, stages
        self.P, self.W, self.packed = K // COLUMNS, V // COLUMNS, at.plan is not None
        self.sequence = walk.at(i_s, at.plan)
        self.chunks = self.sequence.of_segment()
        self.place = self.sequence.row, i_h
        self.gamma = gamma_of(at.gamma, self.sequence.row, i_h)
        self.dims, self.columns = pl.ds(part * COLUMNS, COLUMNS), parts_of(V)
        self.dgs = [getattr(at, f"d{name}") for name in names_of(gs)]
        # With 128 columns of V each warpgroup gives the other its part of 64 of dv, the last here, and keeps the first;
        # with 64 the second, if there is one, gives to the first.
        alike = self.P == 1 or self.W > 1
        self.sends: Any = alike or part == 1
        self.keeps: Any = alike or part == 0

    def tiles(self, i: Any) -> Tiles:
        """The tiles of a chunk; anew for each step of the work, for the compiler keeps them.

        Where it needs many at once their addresses go through ordinary registers, an instruction each.
        """
        return Tiles(self, i + nought(self.at, self.walk))

    def run(self, state: tuple[Any, ...], border: Any) -> None:
        """Walk through the segment from the gradient of the state at its end."""
        at, count = self.at, self.chunks.count
        # Nobody reads it, but without it the compiler runs the products of the loop one after the other (C7514).
        store_per_row(at.border_s.at[self.part, 0], border)
        at.strong_s[self.part] = jnp.int32(0)
        t = self.tiles(jnp.int32(0))
        store_per_row(t.left, ones())
        meet()
        state = lax.fori_loop(0, count, self.step, (state, self.first_sums(t)))[0]
        state = tuple(x * factor_of(self.tiles(count).left, True) for x in state)
        if self.stages > 1:
            # The walk frees a stage in the chunk after.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            when(count > 0)(lambda: plgpu.barrier_arrive(at.empty.at[lax.rem(count - 1, self.stages)]))

        @when(self.sequence.is_last)
        def _():
            for x, value in zip(self.columns, state, strict=True):
                put(at.start.at[self.sequence.index, self.i_h, self.dims, x], unflat(value))

        # Here the warps meet.
        plgpu.wait_smem_to_gmem(0)
        at.strong[self.i_s, self.i_h, self.part, self.walk.segment] = at.strong_s[self.part]

    def await_gates(self, t: Tiles) -> None:
        """Have queries and gates of a chunk, if there is one."""

        @when(t.i < self.chunks.count)
        def _():
            plgpu.barrier_wait(self.at.full.at[t.slot])
            if self.packed:
                t.work.clear(t.q, *t.gates)
            self.at.least_s[self.part] = t.work.least()

    def first_sums(self, t: Tiles) -> Any:
        """The sums of a chunk's gates. After the last chunk, of what is there: nobody reads it."""
        self.await_gates(t)
        return product_of(*t.work.operands(t.work.upto_s))

    def step(self, i: Any, carry: Any) -> Any:
        """One chunk, but for pairs within it if its gates are strong."""
        at, (state, sums) = self.at, carry
        t = self.tiles(i)
        mild, around = self.prepare(t, sums)
        t = self.tiles(i)
        at.strong[self.i_s, self.i_h, t.part, t.i] = lax.select(mild, jnp.int32(0), jnp.int32(1))
        plgpu.barrier_wait(at.full_v)
        if self.packed:
            when(t.work.n < CHUNK)(t.clear_values)
        # No pairs are taken where gates are strong.
        far = jnp.where(mild, 0, CHUNK)
        to_key = self.from_later(t, state, far, around, i > 0)
        kept = factor_of(t.kept, True)
        state = tuple(x * kept for x in state)

        @when(jnp.logical_not(mild))
        def _():
            store_per_row(t.passing, _sum_of_rows(map(load_bf16, t.before), state))
            at.strong_s[t.part] = jnp.int32(1)

        plgpu.commit_smem()
        state, dk, dv = self.through_after(i, state, far, to_key)
        # All products with what is after the chunk are done: its place is free for parts of dv.
        plgpu.commit_smem()
        t = self.tiles(i)
        self.share(t, dv)
        dq = self.through_before(t, state, far)
        plgpu.barrier_arrive(at.empty_v)
        # All products with q and k are done.
        plgpu.commit_smem()
        t = self.tiles(i)
        own = self.leave_terms(t, dq, dk)
        plgpu.commit_smem()
        plgpu.barrier_arrive(at.empty_k)

        def give_dv():
            for w in t.dv_of[: 1 if self.P > 1 else None]:
                self.give(t.after_of(t.giver, w), at.dv, t, pl.ds(w * COLUMNS, COLUMNS))

        when(self.keeps)(give_dv)
        self.finish(self.tiles(i), mild, dq, dk, own)
        if self.stages > 1:
            self.await_gates(self.tiles(i + 1))
        plgpu.commit_smem()
        return state, self.leave(i)

    def leave(self, i: Any) -> Any:
        """Give the rest of a chunk; meanwhile the sums of the next one's gates."""

        def give():
            t = self.tiles(i)
            for tile, target in ((t.k, self.at.dk), (t.q, self.at.dq), *zip(t.gates, self.dgs, strict=True)):
                self.give(tile, target, t)

        if self.stages > 1:
            sums = self.sums_of(self.tiles(i + 1))
            give()
            wait_for()
            return sums
        give()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.at.empty.at[0])
        return self.first_sums(self.tiles(i + 1))

    def sums_of(self, t: Tiles) -> Any:
        """Start the sums of a chunk's gates."""
        return start_product(*t.work.operands(t.work.upto_s))

    def prepare(self, t: Tiles, sums: Any) -> tuple[Any, Any]:
        """Work the gates into q; whether they are mild, and what keys lose by them, base 2."""
        at, work = self.at, t.work
        to = work.exponents(sums, work.steps_to)
        work.leave_ends(to)
        # The last chunk's dv has left, but not what was given after it; here the warps meet.
        plgpu.wait_smem_to_gmem(2 + len(t.gates), wait_read_only=True)
        if self.P > 1:
            plgpu.barrier_arrive(at.left)
        mild = work.worst() >= at.least_s[self.part]

        def decay(exponents, values):
            first, kept, last = values
            left = load_per_row(t.left)
            for ref, x in ((t.first, first * left), (t.kept, kept * left), (t.last, last)):
                store_per_row(ref, x)
            store_tiles((t.q, t.q_rest), decayed(t.q, flat_exp2(exponents) * self.scale))

        def when_mild():
            around = work.around(to)
            decay(around, work.factors(True))
            return around

        def when_strong():
            work.close()
            decay(work.keep(work.to()), work.strong_factors())
            return -work.left()

        return mild, either_of(mild, when_mild, when_strong)

    def from_later(self, t: Tiles, state: Any, far: Any, around: Any, second: Any) -> Any:
        """``[keys, queries]`` the gradients of pairs; meanwhile keys are decayed and ``after`` is filled.

        ``around``: what :meth:`prepare` gives; ``second``: it is not the first chunk.
        """
        at, stages = self.at, self.stages
        to_key = start_product(*(x for w in range(self.W) for x in (t.v[w], T(t.do[w]))))
        # What the last chunk gave has left its tiles; here the warps meet.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if stages > 1:
            when(second)(lambda: plgpu.barrier_arrive(at.empty.at[lax.rem(t.i + stages - 1, stages)]))
        plgpu.barrier_wait(at.full_k)
        if self.packed:
            t.work.clear(t.k)
        store_tiles((t.k, t.k_rest), decayed(t.k, flat_exp2(around, "-"), rounded=True))
        if self.P > 1:
            plgpu.barrier_wait(at.left)
        for w, x in enumerate(state):
            store_tile(t.after[w], (x * factor_of(t.first, True)).astype(self.dtype))
        wait_for()
        return split_terms(jnp.where(t.after_row(far), to_key, 0.0), 2)

    def through_after(self, i: Any, state: Any, far: Any, to_key: Any) -> tuple[Any, Any, Any]:
        """``(state, dk, dv)``; dv, in the order of ``t.dv_of``, is the part that goes through these dimensions.

        Pairs are known while products of the state and of dk still go on, and take the registers of ``to_key``.
        """
        at, W, t = self.at, self.W, self.tiles(i)
        pairs = start_product(t.k, T(t.q), t.k, T(t.q_rest), t.k_rest, T(t.q))
        t = self.tiles(i)
        dk = start_product(to_key[0], t.q, to_key[0], t.q_rest, to_key[1], t.q)
        dk = start_product(*(x for w in range(W) for x in (t.v[w], T(t.after[w]))), onto=dk)
        t = self.tiles(i)
        state = tuple(start_product(T(t.q), t.do[w], T(t.q_rest), t.do[w], onto=x) for w, x in enumerate(state))
        wait_for(1 + W)
        t = self.tiles(i)
        high, low = split_terms(jnp.where(t.after_row(far), pairs, 0.0), 2)
        dv = tuple(
            start_product(high, do, low, do, t.k, t.after_of(t.part, w))
            for w, do in ((w, Tile(at.do_s, (w + t.zero,))) for w in t.dv_of)
        )
        wait_for()
        return state, dk, dv

    def share(self, t: Tiles, dv: Any) -> None:
        """Give the other warpgroup its part of dv, in float32, take one's own, and leave the sum where that was."""
        at, keeps = self.at, list(zip(t.dv_of, dv, strict=True))
        if self.P > 1:
            theirs, keeps = keeps[-1][1], keeps[:1]

            def send():
                leave_in(Tile(at.parts_s, (t.part,), plgpu.RefType()), theirs)

            when(self.sends)(send)
            plgpu.barrier_arrive(at.sent)
            plgpu.barrier_wait(at.sent)

        def add():
            found = [x for _, x in keeps]
            if self.P > 1:
                found[0] += taken(Tile(at.parts_s, (t.giver,), plgpu.RefType()))
                # All warps have it.
                meet()
            for (w, _), x in zip(keeps, found, strict=True):
                store_tile(t.after_of(t.giver, w), x.astype(self.dtype))

        when(self.keeps)(add)

    def through_before(self, t: Tiles, state: Any, far: Any) -> Any:
        """The gradient of queries, through the state and through pairs."""

        to_query = start_product(*(x for w in range(self.W) for x in (t.do[w], T(t.v[w]))))
        dq = start_product(*(x for w in range(self.W) for x in (t.do[w], T(t.before[w]))))
        # The state's gradient times the state, at the chunk's start: what the gradient of gates starts from.
        store_per_row(t.border, _sum_of_rows(map(load_bf16, t.before), state))
        wait_for(1)
        high, low = split_terms(jnp.where(t.before_row(far), to_query, 0.0), 2)
        dq = start_product(high, t.k, high, t.k_rest, low, t.k, onto=dq)
        wait_for()
        return dq

    def leave_terms(self, t: Tiles, dq: Any, dk: Any) -> Any:
        """Leave what the gradient of gates sums up in the places of q, in two terms; and return its negative."""
        x = (load_bf16(t.q) + load_bf16(t.q_rest)) * dq - (load_bf16(t.k) + load_bf16(t.k_rest)) * dk
        # The 16 bits that two terms have: what is taken off for the token's own is then all that it added.
        x = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFFF00), F32)
        store_tiles((t.q, t.q_rest), split_terms(x, 2))
        return -x

    def finish(self, t: Tiles, mild: Any, dq: Any, dk: Any, own: Any) -> None:
        """Leave the gradient of gates in the gates' place, those of q and k in theirs.

        It is what reads from before the chunk, less what queries up to the gate read, and what keys up to it are read
        for: what does not span a gate cancels, and exactly, as both sides have the same terms. Of strong gates it is
        what passes the chunk, and keys' gradients lack their gates: the rest is for ``add_pairs``.
        """

        # Before a token: up to it, less its own.
        before = start_product(t.work.upto_s, t.q, t.work.upto_s, t.q_rest, onto=own)
        sums = self.sums_of(t)
        wait_for()
        dg = jnp.where(mild, across(t.border, True) - before, across(t.passing, True))
        around = t.work.exponents(sums, t.work.steps_to) - jnp.where(mild, across(t.work.total.at[1], True), 0.0)
        dq = dq * (flat_exp2(around) * self.scale)
        dk = dk * flat_exp2(jnp.where(mild, around, 0.0), "-")
        found = [here(x) for x in (dq.astype(self.dtype), dk.astype(self.dtype), *split_terms(dg, len(t.gates)))]
        # All products with the terms and the gates are done.
        plgpu.commit_smem()
        store_tiles((t.q, t.k, *t.gates), found)

    def give(self, tile: Any, ref: Any, t: Tiles, columns: Any = None) -> None:
        """Start copying a tile to memory."""
        give_back(tile, ref, self.place, self.chunks, t.i, t.dims if columns is None else columns, self.packed)


def gradients(q, k, v, decay, do, before, ends, last, *, H, walk, plan, scale, stages):
    """One walk against the recurrence: ``[dq, dk, dv, gradient of the initial state, strong, *terms of dg]``.

    Pairs, the state before each chunk and the gradient of the state after it give all gradients of the chunk. A gate is
    in every pair that spans it: its gradient is a sum over those within the chunk, from before it through q and dq, to
    after it through k and dk, and across it through both states. Of a mild chunk it is, for token s,

        dg_s = dS . S at the chunk's start - sum over i < s of (q dq - k dk)_i

    where the first is made of the same rounded terms as what cancels with it: dS there is a sum with q' and do, S the
    one that dq is made with. From the chunk's end, where dS . S may be far larger, a sum would not cancel exactly.

    Args:
        q, k, v, decay, H, plan: as for ``scan``; do: ``[B, T, H, V]``, the gradients of the outputs, zero past T.
        before, last: what ``states`` gives of every chunk, and of segments.
        ends: the gradient of the state at the end of each segment, as ``starts`` are for ``scan``; None: zeros.
        walk: of the gradient; stages: of the ring of q, k and gates, at most.

    Returns:
        dq, dk, dv per query head in the dtype of q; ``[N, H, K, V]`` float32; which chunks had strong gates, for
        ``gates_strong.add_pairs``; as many bf16 terms of the gradient of the gates as there are of the gates.
    """
    (B, rows, _, K), V, dtype, gs = q.shape, v.shape[-1], q.dtype, decay.gates
    W, P, shared = V // COLUMNS, K // COLUMNS, [H // x.shape[2] for x in (q, k, v)]
    N, packed = B if walk.packed is None else walk.packed, plan is not None
    stages = stages_of(stages, TILE * P * (1 + len(gs)), TILE * (W * (2 + 2 * P) + 3 * P))

    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    inputs = dict(q=q, k=k, v=v, **names_of(gs), gamma=decay.gamma, do=do, before=before,
                  **named_starts(ends), last=None if ends is None else last, plan=plan)
    outputs = dict(
        dq=shape(B, rows, H, K), dk=shape(B, rows, H, K), dv=shape(B, rows, H, V), start=shape(N, H, K, V, dtype=F32),
        # Which chunks have strong gates, and whether one has.
        strong=shape(walk.slots(B), H, P, walk.segment + 1, dtype=jnp.int32),
        **{f"d{name}": shape(B, rows, H, K, dtype=jnp.bfloat16) for name in names_of(gs)},
    )
    after_s: Any = tiles_of(dtype, P, max(P, W))
    if P > 1:
        # Parts of dv pass through the place of the state's gradient.
        after_s = plgpu.RefUnion(after_s, plgpu.SMEM((P, CHUNK, COLUMNS), F32))
    scratch = dict(
        q_s=tiles_of(dtype, stages, P), k_s=tiles_of(dtype, 2, P), g_s=tiles_of(jnp.bfloat16, stages, len(gs), P),
        v_s=tiles_of(dtype, W), do_s=tiles_of(dtype, W), before_s=tiles_of(dtype, P, W), after_s=after_s,
        # What queries lose to their first term. Keys and what they lose take turns in two tiles.
        rest_s=tiles_of(dtype, P),
        factors_s=plgpu.SMEM((P, 4, COLUMNS), F32), total_s=plgpu.SMEM((P, 2, COLUMNS), F32),
        # What the gradient of gates starts from, of this chunk and the next in turn, and what passes a strong one.
        border_s=plgpu.SMEM((P, 3, COLUMNS), F32), strong_s=plgpu.SMEM((P,), jnp.int32),
        # The least that a chunk's gates sum to if they are mild: not in a register from one chunk to the next.
        least_s=plgpu.SMEM((P,), F32), **constants_s(),
        # full and empty, of q and gates; full_k and empty_k, of keys; full_v and empty_v, of v, do and states; met:
        # what neighbours hold of v and do is cleared; sent: parts of dv are there; left: their sum has left that place.
        full=plgpu.Barrier(num_arrivals=P * (1 + len(gs)), num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=P, num_barriers=stages),
        full_k=plgpu.Barrier(num_arrivals=P), empty_k=plgpu.Barrier(num_arrivals=P),
        full_v=plgpu.Barrier(num_arrivals=W * (2 + P)), empty_v=plgpu.Barrier(num_arrivals=P),
        met=plgpu.Barrier(num_arrivals=P) if packed else None,
        **{name: plgpu.Barrier(num_arrivals=P) if P > 1 else None for name in ("sent", "left")},
    )

    def body(indices, i_w, *refs):
        i_s, i_h = indices
        at: Any = Names(refs, inputs, outputs, scratch)
        if P > 1:
            at.after_s, at.parts_s = at.after_s

        @when(i_w < P)
        def _compute():
            if P > 1:
                plgpu.set_max_registers(240, action="increase")
            given = dict(walk=walk, K=K, V=V, gs=gs, dtype=dtype, shared=shared, scale=scale, stages=stages)
            of = _Walk(at, i_w, i_s, i_h, **given)
            make_constants(at, walk, i_w)
            plgpu.barrier_wait(at.once)
            if ends is None:
                state, border = (flat_zeros(),) * W, plgpu.layout_cast(jnp.zeros(COLUMNS, F32), PER_ROW)
            else:
                sequence = of.sequence
                found = start(at, walk, sequence, i_s, i_h, [(of.dims, columns) for columns in of.columns])
                state = tuple(map(flat, found))
                # The recurrence counts segments the other way.
                index = jnp.maximum(i_s + sequence.segments - 1 - 2 * sequence.i_p, 0)
                border = _sum_of_rows(_columns_of(at.last.at[index, 0, i_h, of.dims], of.columns), state)
            of.run(state, border)

        @when(i_w == P)
        def _move():
            if P > 1:
                plgpu.set_max_registers(24, action="decrease")
            sequence = walk.at(i_s, at.plan)
            chunks, row = sequence.of_segment(), sequence.row
            count = chunks.count

            @pl.loop(0, count)
            def _(i):
                slot, t = lax.rem(i, stages), pl.ds(chunks.start(i), CHUNK)
                when(i >= stages)(lambda: plgpu.barrier_wait(at.empty.at[slot]))
                load_parts(at, gs, ("q",), shared, row, t, i_h, slot, at.full.at[slot])
                when(i >= 1)(lambda: plgpu.barrier_wait(at.empty_v))
                for w, columns in enumerate(parts_of(V)):
                    plgpu.copy_gmem_to_smem(at.v.at[row, t, over(i_h, shared[2]), columns], at.v_s.at[w], at.full_v)
                    plgpu.copy_gmem_to_smem(at.do.at[row, t, i_h, columns], at.do_s.at[w], at.full_v)
                    for p, dims in enumerate(parts_of(K)):
                        source = at.before.at[chunks.place(i, 1), i_h, dims, columns]
                        plgpu.copy_gmem_to_smem(source, at.before_s.at[p, w], at.full_v)
                when(i >= 1)(lambda: plgpu.barrier_wait(at.empty_k))
                for p, dims in enumerate(parts_of(K)):
                    source = at.k.at[row, t, over(i_h, shared[1]), dims]
                    plgpu.copy_gmem_to_smem(source, at.k_s.at[lax.rem(i, 2), p], at.full_k)

            @pl.loop(jnp.maximum(count - stages, 0), count)
            def _(i):
                plgpu.barrier_wait(at.empty.at[lax.rem(i, stages)])

            for barrier in (at.empty_v, at.empty_k):
                when(count > 0)(lambda barrier=barrier: plgpu.barrier_wait(barrier))

    return launch_kernel(
        body, inputs.values(), lanes=True, between_warps=False,
        name="gates_gradients", warpgroups=P + 1, grid=(walk.slots(B), H),
        out_type=list(outputs.values()), scratch_types=[x for x in scratch.values() if x is not None],
    )
