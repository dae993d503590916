"""The gradients of the recurrence with gates per token and dimension of the key, for Hopper: one walk against it.

A warpgroup holds 64 rows of the state's gradient and prepares what belongs to them, as ``pallas_gates.py`` says;
another moves memory. Pairs within a chunk whose gates are strong are left out of the walk and done after it, by the
kernel of ``pallas_gates_strong.py``.

A chunk takes few steps, each of many products at once, between which the warps meet: most of a warpgroup's time goes
into waiting for itself. Branches hold little, for what they need takes registers that the walk does not have.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas_gates import (
    _F32,
    _TILE,
    _across,
    _constants_s,
    _decayed,
    _factor,
    _gamma,
    _Gates,
    _give,
    _load,
    _load_parts,
    _make_constants,
    _names,
    _nought,
    _parts,
    _product,
    _run,
    _split,
    _stages,
    _tiles,
)
from keraunos.kernels.linear_attention.pallas_gates_starts import named_starts, start
from keraunos.kernels.linear_attention.pallas_program import (
    _LAYOUT,
    _PER_ROW,
    CHUNK,
    COLUMNS,
    _axis,
    _clear,
    _launch,
    _Names,
    _rows,
    _zeros,
)
from keraunos.kernels.linear_attention.pallas_walk import over


def _columns_of(ref: Any, columns: list[Any]) -> tuple[Any, ...]:
    """Part of a state ``[64, V]`` in memory, by its columns."""
    return tuple(plgpu.load(ref.at[:, x], layout=_LAYOUT, optimized=False) for x in columns)


def _sum_of_rows(xs: Any, ys: Any) -> Any:
    """``[64]``: of each row the sum of the products of x and y."""
    return jnp.sum(sum(x * y for x, y in zip(xs, ys, strict=True)), 1)


def _when(condition: Any, run: Any) -> None:
    """Run under a condition, which may be known."""
    run() if condition is True else pl.when(condition)(run)


class _Walk:
    """What the warpgroup of 64 dimensions of the key does in one program; ``at`` are the kernel's references."""

    def __init__(self, at: Any, part: Any, i_s: Any, i_h: Any, *, walk: Any, K: int, V: int, gs: Any, dtype: Any,
                 shared: list[int], scale: float, stages: int):  # fmt: skip
        self.at, self.part, self.i_s, self.i_h, self.walk, self.dtype, self.gs = at, part, i_s, i_h, walk, dtype, gs
        self.shared, self.scale, self.stages = shared, scale, stages
        self.P, self.W, self.packed = K // COLUMNS, V // COLUMNS, at.plan is not None
        self.sequence = walk.at(i_s, at.plan)
        self.chunks = self.sequence.of_segment()
        self.place = self.sequence.row, i_h
        self.gamma = _gamma(at.gamma, self.sequence.row, i_h)
        self.dims, self.columns = pl.ds(part * COLUMNS, COLUMNS), _parts(V)
        self.dgs = [getattr(at, f"d{name}") for name in _names(gs)]
        # With 128 columns of V each warpgroup gives the other its part of 64 of dv, the last here, and keeps the first;
        # with 64 the second, if there is one, gives to the first.
        alike = self.P == 1 or self.W > 1
        self.sends: Any = alike or part == 1
        self.keeps: Any = alike or part == 0

    def tiles(self, i: Any, first: bool = False) -> _Tiles:
        """Those of a chunk, in its stage or the first; anew for each step of the work, for the compiler keeps them."""
        i = i + _nought(self.at, self.walk)
        return _Tiles(self, i, i - i if first else lax.rem(i, self.stages))

    def run(self, state: tuple[Any, ...], border: Any) -> None:
        """Walk through the segment from the gradient of the state at its end."""
        at, count = self.at, self.chunks.count
        # Nobody reads it, but without it the compiler runs the products of the loop one after the other (C7514).
        at.border_s[self.part, 0] = border
        at.strong_s[self.part] = jnp.int32(0)
        state = lax.fori_loop(0, count, self.step, state)
        if self.stages > 1:
            # The walk frees a stage in the chunk after.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(count > 0)(lambda: plgpu.barrier_arrive(at.empty.at[lax.rem(count - 1, self.stages)]))

        @pl.when(self.sequence.is_last)
        def _():
            for x, value in zip(self.columns, state, strict=True):
                at.start[self.sequence.index, self.i_h, self.dims, x] = value

        # Here the warps meet.
        plgpu.wait_smem_to_gmem(0)
        at.strong[self.i_s, self.i_h, self.part, self.walk.segment] = at.strong_s[self.part]

    def step(self, i: Any, state: Any) -> Any:
        """One chunk, but for pairs within it if its gates are strong."""
        at = self.at
        t = self.tiles(i)
        plgpu.barrier_wait(at.full.at[t.slot])
        if self.packed:
            t.work.clear(t.q, t.k, *t.gates)
        mild = self.prepare(t)
        t = self.tiles(i)
        at.strong[self.i_s, self.i_h, t.part, t.i] = 1 - mild.astype(jnp.int32)
        plgpu.barrier_wait(at.full_v)
        if self.packed:
            pl.when(t.work.n < CHUNK)(t.clear_values)
        # No pairs are taken where gates are strong.
        far = jnp.where(mild, 0, CHUNK)
        to_key = self.from_later(t, state, far, i > 0)
        kept = _factor(t.kept)
        state = tuple(x * kept for x in state)

        @pl.when(jnp.logical_not(mild))
        def _():
            t.passing[...] = _sum_of_rows(map(_load, t.before), state)
            at.strong_s[t.part] = jnp.int32(1)

        plgpu.commit_smem()
        state, dk, dv = self.through_after(self.tiles(i), state, to_key)
        # All products with what is after the chunk are done: its place is free for parts of dv.
        plgpu.commit_smem()
        t = self.tiles(i)
        self.share(t, dv)
        to_query, dq = self.through_before(t, state, far)
        dq, sums = self.from_earlier(self.tiles(i), dq, to_query)
        last = _factor(t.last)
        state = tuple(x * last for x in state)
        plgpu.barrier_arrive(at.empty_v)
        # All products with q, k and gates are done.
        plgpu.commit_smem()
        t = self.tiles(i)
        dg = self.finish(t, mild, dq, dk, sums)

        def give_dv():
            for w in t.dv_of[: 1 if self.P > 1 else None]:
                self.give(at.after_s.at[t.part, w], at.dv, t, pl.ds(w * COLUMNS, COLUMNS))

        _when(self.keeps, give_dv)
        self.give(t.q, at.dq, t)
        self.give(t.k, at.dk, t)
        # All products with the terms are done.
        plgpu.commit_smem()
        t = self.tiles(i)
        for gate, x in zip(t.gates, _split(dg, len(t.gates)), strict=True):
            gate[...] = x
        plgpu.commit_smem()
        for gate, target in zip(t.gates, self.dgs, strict=True):
            self.give(gate, target, t)
        if self.stages == 1:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(at.empty.at[t.slot])
        return state

    def from_later(self, t: _Tiles, state: Any, far: Any, second: Any) -> Any:
        """``[keys, queries]`` the gradients of pairs; beside that, pairs and the state's gradient to shared memory.

        ``second``: it is not the first chunk.
        """
        at, stages = self.at, self.stages

        def products(pairs, to_key):
            plgpu.wgmma(pairs, t.q, t.k.T)
            for w in range(self.W):
                plgpu.wgmma(to_key, t.v[w], t.do[w].T)
            # What the last chunk gave has left its tiles; here the warps meet.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if stages > 1:
                pl.when(second)(lambda: plgpu.barrier_arrive(at.empty.at[lax.rem(t.i + stages - 1, stages)]))
            for w, x in enumerate(state):
                t.after[w][...] = (x * _factor(t.first)).astype(self.dtype)
            x = plgpu.wgmma_accumulator_load(pairs, wait_n=self.W)
            t.pairs[...] = jnp.where(t.before_row(far), x, 0.0).astype(self.dtype)
            return jnp.where(t.after_row(far), to_key[...], 0.0).astype(self.dtype)

        return pl.run_scoped(products, plgpu.ACC((CHUNK, CHUNK), _F32), plgpu.ACC((CHUNK, CHUNK), _F32))

    def through_after(self, t: _Tiles, state: Any, to_key: Any) -> tuple[Any, Any, Any]:
        """``(state, dk, dv)``; dv, in the order of ``t.dv_of``, is the part that goes through these dimensions."""
        at, W = self.at, self.W

        def products(refs):
            for w in range(W):
                plgpu.wgmma(refs[W], t.v[w], t.after[w].T)
            plgpu.wgmma(refs[W], to_key, t.q)
            for w in range(W):
                plgpu.wgmma(refs[w], t.q.T, t.do[w])
            for w, dv in zip(t.dv_of, refs[W + 1 :], strict=True):
                plgpu.wgmma(dv, t.pairs.T, at.do_s.at[w + t.zero])
                plgpu.wgmma(dv, t.k, at.after_s.at[t.part, w])

        found = _run(products, (*state, *(_zeros(CHUNK, COLUMNS),) * (1 + len(t.dv_of))))
        return found[:W], found[W], found[W + 1 :]

    def share(self, t: _Tiles, dv: Any) -> None:
        """Give the other warpgroup its part of dv, take one's own from it, and leave the sum in ``after``."""
        at, keeps = self.at, list(zip(t.dv_of, dv, strict=True))
        if self.P > 1:
            (w, theirs), keeps = keeps[-1], keeps[:1]

            def send():
                at.after_s[t.part, w] = theirs.astype(self.dtype)

            _when(self.sends, send)
            plgpu.barrier_arrive(at.sent)
            plgpu.barrier_wait(at.sent)

        def add():
            for w, x in keeps:
                parts = [_load(at.after_s.at[1 - t.part, w]) for _ in range(self.P - 1)]
                at.after_s[t.part, w] = sum(parts, start=x).astype(self.dtype)

        _when(self.keeps, add)

    def through_before(self, t: _Tiles, state: Any, far: Any) -> tuple[Any, Any]:
        """``[queries, keys]`` the gradients of pairs, and that of queries through the state."""

        def products(to_query, dq):
            for w in range(self.W):
                plgpu.wgmma(to_query, t.do[w], t.v[w].T)
            for w in range(self.W):
                plgpu.wgmma(dq, t.do[w], t.before[w].T)
            # The state's gradient times the state, at the chunk's start: what the gradient of gates starts from.
            t.border[...] = _sum_of_rows(map(_load, t.before), state)
            return jnp.where(t.before_row(far), to_query[...], 0.0).astype(self.dtype), dq[...]

        return pl.run_scoped(products, plgpu.ACC((CHUNK, CHUNK), _F32), plgpu.ACC((CHUNK, COLUMNS), _F32))

    def from_earlier(self, t: _Tiles, dq: Any, to_query: Any) -> tuple[Any, Any]:
        """That of queries, and the sums of gates once more."""

        def products(refs):
            dq, sums = refs
            plgpu.wgmma(dq, to_query, t.k)
            operands = t.work.operands(t.work.upto_s)
            for a, b in zip(operands[::2], operands[1::2], strict=True):
                plgpu.wgmma(sums, a, b)

        dq, sums = _run(products, (dq, _zeros(CHUNK, COLUMNS)))
        return dq, sums

    def give(self, tile: Any, ref: Any, t: _Tiles, columns: Any = None) -> None:
        """Start copying a tile to memory."""
        _give(tile, ref, self.place, self.chunks, t.i, t.dims if columns is None else columns, self.packed)

    def prepare(self, t: _Tiles) -> Any:
        """Work the gates into q and k; whether they are mild."""
        work, factors = t.work, (t.first, t.kept, t.last)
        to = work.keep(work.to())
        mild = work.is_mild()

        @pl.when(mild)
        def _():
            for target, x in zip(factors, work.factors(True), strict=True):
                target[...] = x
            around = work.around(to)
            t.q[...] = _decayed(t.q, around, self.scale)
            t.k[...] = _decayed(t.k, -around)

        @pl.when(jnp.logical_not(mild))
        def _():
            work.close()
            t.q[...] = _decayed(t.q, work.keep(work.to()), self.scale)
            t.k[...] = _decayed(t.k, work.left())
            for target, x in zip(factors, work.strong_factors(), strict=True):
                target[...] = x

        plgpu.commit_smem()
        return mild

    def finish(self, t: _Tiles, mild: Any, dq: Any, dk: Any, sums: Any) -> Any:
        """The gradient of gates; those of q and k take their tiles. The warps meet.

        It is what reads from before the chunk, less what queries up to the gate read, and what keys up to it are read
        for: what does not span a gate cancels, and exactly, as both sides have the same terms. Of strong gates it is
        what passes the chunk, and keys' gradients lack their gates: the rest is for :func:`halve`.
        """
        upto = t.work.upto_s
        around = t.work.exponents(sums, t.work.steps_to) - jnp.where(mild, _across(t.work.total.at[1]), 0.0)
        high, low = _split(_load(t.q) * dq - _load(t.k) * dk, 2)
        t.pairs[...], t.gates[0][...] = high, low
        t.q[...] = (dq * (jnp.exp2(around) * self.scale)).astype(self.dtype)
        t.k[...] = (dk * jnp.exp2(jnp.where(mild, -around, 0.0))).astype(self.dtype)
        plgpu.commit_smem()
        # Before a token: up to it, less its own.
        before = _product(upto, t.pairs, upto, t.gates[0]) - _load(t.pairs) - _load(t.gates[0])
        return jnp.where(mild, _across(t.border) - before, _across(t.passing))


class _Tiles:
    """The tiles of a chunk in shared memory, for one warpgroup."""

    def __init__(self, of: _Walk, i: Any, slot: Any):
        at, self.of, self.slot = of.at, of, slot
        self.zero, self.i = _nought(at, of.walk), i
        # Asked for anew: kept, it takes a register from the products of all chunks, and so does what is made of it.
        self.part = part = lax.axis_index(_axis("warpgroup")) + self.zero
        self.dims = pl.ds(part * COLUMNS, COLUMNS)
        self.dv_of = [part, 1 - part] if (of.P, of.W) == (2, 2) else list(range(of.W))
        self.q, self.k, self.pairs = at.q_s.at[slot, part], at.k_s.at[slot, part], at.pairs_s.at[part]
        self.gates = [at.g_s.at[slot, j, part] for j in range(len(of.gs))]
        self.v, self.do = ([x.at[w + self.zero] for w in range(of.W)] for x in (at.v_s, at.do_s))
        self.after, self.before = ([x.at[part, w] for w in range(of.W)] for x in (at.after_s, at.before_s))
        self.first, self.kept, self.last = (at.factors_s.at[part, j] for j in range(3))
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
        ``pallas_gates_strong.add_pairs``; as many bf16 terms of the gradient of the gates as there are of the gates.
    """
    (B, rows, _, K), V, dtype, gs = q.shape, v.shape[-1], q.dtype, decay.gates
    W, P, shared = V // COLUMNS, K // COLUMNS, [H // x.shape[2] for x in (q, k, v)]
    N, packed = B if walk.packed is None else walk.packed, plan is not None
    stages = _stages(stages, _TILE * P * (2 + len(gs)), _TILE * (W * (2 + 2 * P) + P))

    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    inputs = dict(q=q, k=k, v=v, **_names(gs), gamma=decay.gamma, do=do, before=before,
                  **named_starts(ends), last=None if ends is None else last, plan=plan)  # fmt: skip
    outputs = dict(
        dq=shape(B, rows, H, K), dk=shape(B, rows, H, K), dv=shape(B, rows, H, V), start=shape(N, H, K, V, dtype=_F32),
        # Which chunks have strong gates, and whether one has.
        strong=shape(walk.slots(B), H, P, walk.segment + 1, dtype=jnp.int32),
        **{f"d{name}": shape(B, rows, H, K, dtype=jnp.bfloat16) for name in _names(gs)},
    )  # fmt: skip
    scratch = dict(
        q_s=_tiles(dtype, stages, P), k_s=_tiles(dtype, stages, P), g_s=_tiles(jnp.bfloat16, stages, len(gs), P),
        v_s=_tiles(dtype, W), do_s=_tiles(dtype, W), before_s=_tiles(dtype, P, W), after_s=_tiles(dtype, P, W),
        pairs_s=_tiles(dtype, P),
        factors_s=plgpu.SMEM((P, 3, COLUMNS), _F32), total_s=plgpu.SMEM((P, 2, COLUMNS), _F32),
        # What the gradient of gates starts from, of this chunk and the next in turn, and what passes a strong one.
        border_s=plgpu.SMEM((P, 3, COLUMNS), _F32), strong_s=plgpu.SMEM((P,), jnp.int32), **_constants_s(),
        # full and empty, of q, k and gates; full_v and empty_v, of v, do and states; met: what neighbours hold of v and
        # do is cleared; sent: the parts of dv are there.
        full=plgpu.Barrier(num_arrivals=P * (2 + len(gs)), num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=P, num_barriers=stages),
        full_v=plgpu.Barrier(num_arrivals=W * (2 + P)), empty_v=plgpu.Barrier(num_arrivals=P),
        met=plgpu.Barrier(num_arrivals=P) if packed else None, sent=plgpu.Barrier(num_arrivals=P) if P > 1 else None,
    )  # fmt: skip

    def body(indices, i_w, *refs):
        i_s, i_h = indices
        at: Any = _Names(refs, inputs, outputs, scratch)

        @pl.when(i_w < P)
        def _compute():
            if P > 1:
                plgpu.set_max_registers(232, action="increase")
            given = dict(walk=walk, K=K, V=V, gs=gs, dtype=dtype, shared=shared, scale=scale, stages=stages)
            of = _Walk(at, i_w, i_s, i_h, **given)
            _make_constants(at, walk, i_w)
            plgpu.barrier_wait(at.once)
            if ends is None:
                state, border = (_zeros(COLUMNS, COLUMNS),) * W, plgpu.layout_cast(jnp.zeros(COLUMNS, _F32), _PER_ROW)
            else:
                sequence = of.sequence
                state = start(at, walk, sequence, i_s, i_h, [(of.dims, columns) for columns in of.columns])
                # The recurrence counts segments the other way.
                index = jnp.maximum(i_s + sequence.segments - 1 - 2 * sequence.i_p, 0)
                border = _sum_of_rows(_columns_of(at.last.at[index, 0, i_h, of.dims], of.columns), state)
            of.run(state, border)

        @pl.when(i_w == P)
        def _move():
            if P > 1:
                plgpu.set_max_registers(40, action="decrease")
            sequence = walk.at(i_s, at.plan)
            chunks, row = sequence.of_segment(), sequence.row
            count = chunks.count

            @pl.loop(0, count)
            def _(i):
                slot, t = lax.rem(i, stages), pl.ds(chunks.start(i), CHUNK)
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(at.empty.at[slot]))
                _load_parts(at, gs, ("q", "k"), shared, row, t, i_h, slot, at.full.at[slot])
                pl.when(i >= 1)(lambda: plgpu.barrier_wait(at.empty_v))
                for w, columns in enumerate(_parts(V)):
                    plgpu.copy_gmem_to_smem(at.v.at[row, t, over(i_h, shared[2]), columns], at.v_s.at[w], at.full_v)
                    plgpu.copy_gmem_to_smem(at.do.at[row, t, i_h, columns], at.do_s.at[w], at.full_v)
                    for p, dims in enumerate(_parts(K)):
                        source = at.before.at[chunks.place(i, 1), i_h, dims, columns]
                        plgpu.copy_gmem_to_smem(source, at.before_s.at[p, w], at.full_v)

            @pl.loop(jnp.maximum(count - stages, 0), count)
            def _(i):
                plgpu.barrier_wait(at.empty.at[lax.rem(i, stages)])

            pl.when(count > 0)(lambda: plgpu.barrier_wait(at.empty_v))

    return _launch(
        body, inputs.values(), lanes=True, between_warps=False,
        name="gates_gradients", warpgroups=P + 1, grid=(walk.slots(B), H),
        out_type=list(outputs.values()), scratch_types=[x for x in scratch.values() if x is not None],
    )  # fmt: skip
