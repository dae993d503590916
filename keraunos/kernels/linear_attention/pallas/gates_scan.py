"""The walk with gates per token and dimension of the key, for Hopper: outputs, and states.

Two kernels: ``scan`` (outputs) and ``states`` (the state before every chunk, or at the end of every piece, or the
gradient of it). ``gates_starts.py`` makes of those of pieces the states that segments start from.

Beside the warpgroups that hold the state, 64 columns of V each, stand others that prepare chunks, one per 64 dimensions
of the key: ``gates_program.py`` has what they do alike in both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas.gates import (
    F32,
    TILE,
    constants_s,
    decayed,
    give_back,
    meet,
    names_of,
    parts_of,
    stages_of,
    tiles_of,
)
from keraunos.kernels.linear_attention.pallas.gates_program import Program, barriers
from keraunos.kernels.linear_attention.pallas.gates_starts import named_starts, start, through
from keraunos.kernels.linear_attention.pallas.products import T, product_of, start_product, wait_for
from keraunos.kernels.linear_attention.pallas.program import (
    CHUNK,
    COLUMNS,
    LAYOUT,
    PER_ROW,
    Names,
    either_of,
    launch_kernel,
    smem,
    when,
)
from keraunos.kernels.linear_attention.pallas.registers import commit_fine, exp2_of_minus, upto_of, widened
from keraunos.kernels.linear_attention.pallas.tiles import load_bf16, load_per_row, put, store_per_row, store_tile


class Every(NamedTuple):
    """States that the gradients need.

    Attributes:
        before: ``[places of chunks, H, K, V]`` in the dtype of keys, ``before * S`` of every chunk.
        end: ``[slots, 1, H, K, V]`` float32, the state at the end of every segment.
    """

    before: Any
    end: Any


def _keep(ref: Any, index: tuple[Any, ...], state: tuple[Any, ...], columns: Any) -> None:
    for part, x in zip(parts_of(len(state) * COLUMNS), state, strict=True):
        put(ref.at[*index, part, columns], x)


def scan(q, k, v, decay, starts, *, H, walk, plan, scale, final, every, stages):
    """One walk: output ``[B, T, H, V]``, final state ``[N, H, K, V]`` or None, and what :class:`Every` has or None.

    Args:
        q, k, v: ``[B, T, heads, K]``, ``[B, T, heads, K]``, ``[B, T, heads, V]``; heads divide H; rows past T are zero.
        decay: the decay.
        starts: ``[N, H, K, V]`` float32, or ``[slots, H, K, V]`` where sequences are cut, or :class:`Pieces`; None:
            zeros.
        H: heads.
        walk, plan: how sequences are walked; of packed ones the plan.
        scale: the softmax scale.
        final, every: the final state is wanted; :class:`Every` is.
        stages: stages of the ring, at most.

    Where sequences are not packed and states not wanted this is the ``early`` order: factors are handed on before the
    chunk is there, stages given back before the output leaves, and states to start from read through shared memory. For
    others that takes longer. Tiles are moved ``unrolled`` where states are not wanted: 0.261 ms on an H200 in place of
    0.279 at B, T, H of 1, 8192, 64, and 1.82 in place of 1.91 in 32 packed sequences. Where they are it takes longer.
    """
    (B, rows, _, K), V, dtype, gs = q.shape, v.shape[-1], q.dtype, decay.gates
    W, P, shared = V // COLUMNS, K // COLUMNS, [H // x.shape[2] for x in (q, k, v)]
    N, packed = B if walk.packed is None else walk.packed, plan is not None
    early, unrolled = not (packed or every), not every
    stages = stages_of(stages, TILE * (P * (3 + len(gs)) + W), TILE * W * (2 if early else P) + TILE * W)
    state_s = tiles_of(dtype, W, P)
    if early:
        # Blocks of the state to start from pass through the place of those that queries read, which have half the size.
        state_s = plgpu.RefUnion(tiles_of(dtype, W, 2), smem(F32, W, CHUNK, COLUMNS))
    inputs = dict(q=q, k=k, v=v, **names_of(gs), gamma=decay.gamma, **named_starts(starts), plan=plan)
    outputs = dict(
        o=jax.ShapeDtypeStruct((B, rows, H, V), dtype),
        final=jax.ShapeDtypeStruct((N, H, K, V), F32) if final else None,
        **(_every(B, H, K, V, walk, dtype) if every else dict(before=None, end=None)),
    )
    scratch = dict(
        q_s=tiles_of(dtype, stages, P), k_s=tiles_of(dtype, stages, P), v_s=tiles_of(dtype, stages, W),
        # When they have been summed, gates make room for the keys of pairs.
        g_s=plgpu.RefUnion(*(tiles_of(x, stages, len(gs), P) for x in (jnp.bfloat16, jnp.float16))),
        pairs_s=tiles_of(dtype, stages, P), state_s=state_s,
        o_s=tiles_of(dtype, W), factors_s=plgpu.SMEM((stages + early, 3, P, COLUMNS), F32),
        total_s=plgpu.SMEM((P, 2, COLUMNS), F32), **constants_s(),
        **barriers(2, W, P, gs, stages),
        known=plgpu.Barrier(num_arrivals=P, num_barriers=stages + 1) if early else None,
        started=plgpu.Barrier(num_barriers=W) if early else None,
    )

    def body(indices, i_w, *refs):
        i_s, i_h = indices
        at: Any = Names(refs, inputs, outputs, scratch)
        at.g_s, at.fine_s = at.g_s
        if early:
            at.state_s, at.start_s = at.state_s
        sequence = walk.at(i_s, at.plan)
        chunks = sequence.of_segment()
        program = Program(at, walk, chunks, sequence.row, i_h, ("q", "k"), "v", shared, (W, P, gs), stages,
                          early, unrolled)

        def hold(i_w):
            out, columns = at.o_s.at[i_w], pl.ds(i_w * COLUMNS, COLUMNS)

            def before(i, state):
                # Every warp has read what was there: they met after the products of the last chunk.
                for p, x in enumerate(state):
                    store_tile(at.state_s.at[i_w, p], x.astype(dtype), unrolled)
                plgpu.commit_smem()
                if every:
                    # Has left its tiles before the output takes its own, below.
                    for p, part in enumerate(parts_of(K)):
                        target = at.before.at[chunks.place(i, 1), i_h, part, columns]
                        plgpu.copy_smem_to_gmem(at.state_s.at[i_w, p], target)

            def products(i, slot, v, state):
                reads = [x for p in range(P) for x in (at.q_s.at[slot, p], at.state_s.at[i_w, p])]
                o = start_product(*reads, *(x for p in range(P) for x in (at.pairs_s.at[slot, p], v)))
                state = tuple(start_product(T(at.k_s.at[slot, p]), v, onto=x) for p, x in enumerate(state))
                if early:
                    wait_for()
                    return state, o
                # The output leaves while the state is still worked on.
                wait_for(P)
                leave(i, o)
                wait_for()
                return (state,)

            def leave(i, o):
                # Waits until the last chunk's output has left the buffer; here the warps meet.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_tile(out, o.astype(dtype), unrolled)
                plgpu.commit_smem()
                give_back(out, at.o, (sequence.row, i_h), chunks, i, columns, packed)

            how = (through(at.start_s.at[i_w], at.started.at[i_w]),) if early else ()
            state = start(at, walk, sequence, i_s, i_h, [(dims, columns) for dims in parts_of(K)], *how)
            state = program.hold(i_w, state, before, products, leave)
            if final:
                when(sequence.is_last)(lambda: _keep(at.final, (sequence.index, i_h), state, columns))
            if every:
                _keep(at.end, (i_s, 0, i_h), state, columns)
            plgpu.wait_smem_to_gmem(0)

        def prepare(part):
            def tiles(work, slot):
                return [x.at[slot, work.part] for x in (at.q_s, at.k_s, at.pairs_s)]

            def mild(work, slot, around, fine):
                q, k, pairs = tiles(work, slot)
                # Not by the functions of tiles.py, with which it spills: these take the fewest registers.
                # For pairs, in float16: queries stay in registers.
                fine_k = at.fine_s.at[slot, 0, work.part]
                x = lax.optimization_barrier(widened(plgpu.load(q, layout=LAYOUT)) * (jnp.exp2(around) * scale))
                rounded_q = x.astype(dtype)
                q[...] = rounded_q
                fine_q = lax.optimization_barrier(x.astype(jnp.float16))
                x = widened(plgpu.load(k, layout=LAYOUT)) * exp2_of_minus(around)
                rounded_k = x.astype(dtype)
                k[...] = rounded_k
                fine_k[...] = x.astype(jnp.float16)
                fine = fine & (commit_fine(rounded_q, rounded_k) > 0)
                found = either_of(fine, lambda: product_of(fine_q, T(fine_k)), lambda: product_of(q, T(k)))
                pairs[...] = upto_of(found, dtype, walk.backward_in_time)

            def strong(work, slot, to):
                q, k, pairs = tiles(work, slot)
                store_tile(pairs, work.halve(q, k, pairs, scale), unrolled)
                store_tile(q, decayed(q, work.to(), scale, unrolled), unrolled)
                store_tile(k, decayed(k, work.left(), unrolled=unrolled), unrolled)

            program.prepare(part, mild, strong, dtype)

        program.run(i_w, hold, prepare, True)

    results = launch_kernel(
        body, inputs.values(), lanes=True, between_warps=False,
        name="gates_scan", warpgroups=W + P + 1, grid=(walk.slots(B), H),
        out_type=[x for x in outputs.values() if x is not None],
        scratch_types=[x for x in scratch.values() if x is not None],
    )
    got: Any = Names(results, outputs)
    return got.o, got.final, Every(got.before, got.end) if every else None


def _every(B: int, H: int, K: int, V: int, walk: Any, dtype: Any) -> dict[str, Any]:
    """The shapes of :class:`Every`."""
    before, end = (walk.places(B, 1), H, K, V), (walk.slots(B), 1, H, K, V)
    return Every(jax.ShapeDtypeStruct(before, dtype), jax.ShapeDtypeStruct(end, F32))._asdict()


def states(x, y, decay, starts, *, H, walk, plan, scale, every, stages):
    """The state, or with an adjoint walk its gradient, and how it got there.

    Args:
        x, y: keys and values; in an adjoint walk queries and gradients of the output.
        decay, starts, H, walk, plan: as for :func:`scan`.
        scale: the softmax scale, of queries.
        every: :class:`Every` is wanted; else the state at the end of every piece, from zero. Those of the last segment
            of a sequence, which has no successor, are then not written.
        stages: stages of the ring, at most.

    Returns:
        What :class:`Every` has; else float32 ``[slots, pieces, H, K, V]`` and ``[slots, pieces, H, K]``, the second
        the sums of the gates, base 2.
    """
    (B, _, _, K), V, dtype, gs = x.shape, y.shape[-1], x.dtype, decay.gates
    W, P, shared = V // COLUMNS, K // COLUMNS, [H // a.shape[2] for a in (x, y)]
    slots, pieces = walk.slots(B), 1 if every else walk.pieces
    stages = stages_of(stages, TILE * (P * (1 + len(gs)) + W), TILE * W * P * 2 * every)
    inputs = dict(x=x, y=y, **names_of(gs), gamma=decay.gamma, **named_starts(starts), plan=plan)
    outputs = _every(B, H, K, V, walk, dtype) if every else dict(
        end=jax.ShapeDtypeStruct((slots, pieces, H, K, V), F32), sums=jax.ShapeDtypeStruct((slots, pieces, H, K), F32)
    )
    scratch = dict(
        x_s=tiles_of(dtype, stages, P), y_s=tiles_of(dtype, stages, W), g_s=tiles_of(jnp.bfloat16, stages, len(gs), P),
        state_s=tiles_of(dtype, 2, W, P) if every else None, factors_s=plgpu.SMEM((stages, 3, P, COLUMNS), F32),
        total_s=plgpu.SMEM((P, 2, COLUMNS), F32), sums_s=plgpu.SMEM((P, COLUMNS), F32), **constants_s(),
        **barriers(1, W, P, gs, stages),
    )

    def body(indices, i_w, *refs):
        i_s, i_f, i_h = indices
        at: Any = Names(refs, inputs, outputs, scratch)
        sequence = walk.at(i_s, at.plan)
        chunks = sequence.of_segment() if every else sequence.of_piece(i_f)
        program = Program(at, walk, chunks, sequence.row, i_h, ("x",), "y", shared, (W, P, gs), stages)

        def hold(i_w):
            columns = pl.ds(i_w * COLUMNS, COLUMNS)

            def before(i, state):
                if every:
                    # Waits until the state of two chunks ago has left its buffer; here the warps meet.
                    plgpu.wait_smem_to_gmem(P, wait_read_only=True)
                    out = at.state_s.at[lax.rem(i, 2), i_w]
                    for p, x in enumerate(state):
                        store_tile(out.at[p], x.astype(dtype))
                    plgpu.commit_smem()
                    for p, part in enumerate(parts_of(K)):
                        plgpu.copy_smem_to_gmem(out.at[p], at.before.at[chunks.place(i, 1), i_h, part, columns])

            def products(i, slot, y, state):
                state = tuple(start_product(T(at.x_s.at[slot, p]), y, onto=x) for p, x in enumerate(state))
                wait_for()
                return (state,)

            state = start(at, walk, sequence, i_s, i_h, [(dims, columns) for dims in parts_of(K)])
            _keep(at.end, (i_s, i_f, i_h), program.hold(i_w, state, before, products), columns)
            plgpu.wait_smem_to_gmem(0)

        def prepare(part):
            passed = at.sums_s.at[part]
            store_per_row(passed, plgpu.layout_cast(jnp.zeros((COLUMNS,), F32), PER_ROW))
            factor = scale if walk.adjoint else 1

            def add(work):
                before = load_per_row(passed)
                # Four threads have each row: all of them have read before one writes.
                meet()
                store_per_row(passed, before + work.ends()[0])

            def mild(work, slot, around, fine):
                add(work)
                x = at.x_s.at[slot, work.part]
                decay = jnp.exp2(around) if walk.adjoint else exp2_of_minus(around)
                store_tile(x, (load_bf16(x) * (decay if factor == 1 else decay * factor)).astype(dtype))

            def strong(work, slot, to):
                add(work)
                x = at.x_s.at[slot, work.part]
                store_tile(x, decayed(x, to if walk.adjoint else work.left(), factor))

            program.prepare(part, mild, strong, dtype)
            if not every:
                at.sums[i_s, i_f, i_h, pl.ds(part * COLUMNS, COLUMNS)] = load_per_row(passed)

        program.run(i_w, hold, prepare, True if every else sequence.i_p < sequence.segments - 1)

    results = launch_kernel(
        body, inputs.values(), lanes=True, between_warps=False,
        name="gates_states", warpgroups=W + P + 1, grid=(slots, pieces, H),
        out_type=list(outputs.values()),
        scratch_types=[x for x in scratch.values() if x is not None],
    )
    return results
