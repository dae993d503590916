"""With a scalar decay, on Hopper: the state that each segment starts from.

Two kernels: ``local_states`` (the states that pieces of a sequence would end in if they started from zero), of the same
shape as ``scan`` in ``kernels.py``, and ``combine`` (from those, the state that each segment starts from).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas.decays import decay_log2, gate_weights, gates_of, weights
from keraunos.kernels.linear_attention.pallas.program import (
    COLUMNS,
    LAYOUT,
    REGISTERS,
    REGISTERS_MEMORY,
    Names,
    clear_rows,
    clear_shared,
    drain,
    either_of,
    fill,
    launch_kernel,
    registers_of,
    rows_of,
    smem,
    when,
    zeros,
)
from keraunos.kernels.linear_attention.pallas.walk import CHUNK, horizon, over

# Programs of ``local_states`` at most, one per multiprocessor: a prime, so that the pieces of one head, which lie some
# stride apart and are all that counts where the others forget, are spread evenly.
PROGRAMS = 131
# Pieces that ``combine`` asks for at once, of two segments and of more. Most heads of two segments have one piece or
# two, and what is asked for in vain takes its time.
AHEAD_TWO, AHEAD_MORE = 4, 8


class Piece(NamedTuple):
    """A piece of a segment, as ``local_states`` walks through it.

    Attributes:
        slot, piece, head, block: whose state it leaves: of the segment, the piece, the head, the columns.
        chunks: its chunks.
        first: the first of them of which something is left.
        decay: log, base 2, of a constant decay.
        done: chunks that the program has walked through before.
    """

    slot: Any
    piece: Any
    head: Any
    block: Any
    chunks: Any
    first: Any
    decay: Any
    done: Any


def local_states(b, c, decay, *, H, walk, plan, scale, stages, from_zero=False, last=False):
    """The state at the end of each piece, had it started from zero, times ``scale``; and the pieces' decay.

    Only of pieces that still count at the end of their segment, and not of the last segment, which has no successor:
    the others' places are not written.

    Args:
        from_zero: there are no initial states. A piece that is then all that the next segment starts from, as it is
            with most heads, is left there, and not among the pieces.
        last: of the last segment, too; all are then of the same length.

    Returns:
        ``[slots, pieces, H, K, V]``; with gates ``[slots, pieces, H]``, base 2, else None; and ``from_zero`` the states
        that segments start from, ``[slots, H, K, V]``, of those heads only, else None.
    """
    (B, _, _, K), V, dtype = b.shape, c.shape[-1], b.dtype
    W = min(V // COLUMNS, 2)
    blocks = V // (W * COLUMNS)
    split = [H // x.shape[2] for x in (b, c)]
    gated, packed = decay.gates is not None, plan is not None
    slots = walk.slots(B)
    # The last segment of a row has no successor; of packed sequences, the kernel knows which it is.
    ahead = slots if packed or last else B * (walk.segments - 1)
    heads = ahead * H * blocks
    programs = min(walk.pieces * heads, PROGRAMS)
    inputs = dict(b=b, c=c, gamma=decay.gamma, gates=decay.gates, plan=plan)
    outputs = dict(
        local=jax.ShapeDtypeStruct((slots, walk.pieces, H, K, V), jnp.float32),
        total=jax.ShapeDtypeStruct((slots, walk.pieces, H), jnp.float32) if gated else None,
        starts=jax.ShapeDtypeStruct((slots, H, K, V), jnp.float32) if from_zero else None,
    )
    scratch = dict(
        b_s=smem(dtype, stages, CHUNK, K), c_s=smem(dtype, stages, W, CHUNK, COLUMNS),
        gates_s=plgpu.SMEM((stages, CHUNK), jnp.float32) if gated else None,
        left_s=smem(dtype, 2, W, CHUNK, COLUMNS),
        to_s=plgpu.SMEM((2, W, CHUNK), jnp.float32) if gated else None,
        full=plgpu.Barrier(num_arrivals=1 + W + gated, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=W, num_barriers=stages),
        met=plgpu.Barrier(num_arrivals=W) if packed else None,
    )

    def body(indices, i_w, *refs):
        at: Any = Names(refs, inputs, outputs, scratch)

        def pieces(walk_through):
            """Call a function with each :class:`Piece` of this program that counts; return how many chunks that is."""

            def piece(n, done):
                rest, i_f = (f(indices[0] + n * programs, heads) for f in (lax.rem, lax.div))
                i_v, i_h, i_s = lax.rem(rest, blocks), lax.rem(over(rest, blocks), H), over(rest, blocks * H)
                if not packed and not last:
                    i_s += over(i_s, walk.segments - 1)
                # All heads need the last pieces: these come first.
                i_f = walk.pieces - 1 - i_f
                sequence = walk.at(i_s, at.plan)
                chunks = sequence.of_piece(i_f)
                g: Any = 0.0
                first: Any = 0
                counts = last or sequence.i_p < sequence.segments - 1
                if not gated:
                    g = decay_log2(at.gamma, sequence.row, i_h)
                    counts &= i_f >= walk.first_piece(g)
                    # From this chunk on, something is left at the end of the segment.
                    after = (walk.pieces - 1 - i_f) * (walk.segment // walk.pieces)
                    first = jnp.clip(chunks.count - 1 + after - over(horizon(g), CHUNK), 0, chunks.count)
                when(counts)(lambda: walk_through(Piece(i_s, i_f, i_h, i_v, chunks, first, g, done)))
                return done + jnp.where(counts, chunks.count - first, 0)

            mine = over(walk.pieces * heads - indices[0] + programs - 1, programs)
            return lax.fori_loop(0, mine, piece, jnp.int32(0))

        def compute(my):
            chunks, first, g = my.chunks, my.first, my.decay

            def step(i, carry):
                state, total = carry
                n_th = my.done + i - first
                slot, n = lax.rem(n_th, stages), chunks.length(i)
                limits: Any = chunks.rows(i) if packed else None
                plgpu.barrier_wait(at.full.at[slot])
                if packed:

                    @when(n < CHUNK)
                    def _():
                        clear_rows([at.c_s.at[slot, i_w]], *limits)
                        clear_shared(at.b_s.at[slot], i_w, W, at.met, *limits)

                # Two buffers, of values and of sums: when one is written again, every warp has passed the meeting point
                # of the chunk between, and so is done with the product that read it.
                half = lax.rem(n_th, 2)
                if gated:
                    to = at.to_s.at[half, i_w]
                    _, leave, across, _ = gate_weights(walk, gates_of(at.gates_s.at[slot], limits), to)
                    across = jnp.exp2(across)
                    total = total + to[0 if walk.backward_in_time else CHUNK - 1]
                else:
                    _, leave = weights(walk, g, n, limits[0] if packed else 0)
                    across = jnp.exp2(g * n.astype(jnp.float32))
                v = plgpu.load(at.c_s.at[slot, i_w], layout=LAYOUT).astype(jnp.float32)
                left = at.left_s.at[half, i_w]
                left[...] = (v * rows_of(leave, COLUMNS)).astype(dtype)
                plgpu.commit_smem()

                def write(state):
                    plgpu.wgmma(state, at.b_s.at[slot].T, left)

                state = pl.run_state(write)(plgpu.ACC.init(state * across))
                plgpu.barrier_arrive(at.empty.at[slot])
                return state, total

            state, total = lax.fori_loop(first, chunks.count, step, (zeros(K, COLUMNS), jnp.float32(0)))

            def leave(ref, *index):
                ref[*index, my.head, :, pl.ds((my.block * W + i_w) * COLUMNS, COLUMNS)] = state * scale

            def among_pieces():
                leave(at.local, my.slot, my.piece)

            if from_zero:
                either_of(walk.is_last_piece_all(g), lambda: leave(at.starts, my.slot + 1), among_pieces)
            else:
                among_pieces()
            if gated:
                at.total[my.slot, my.piece, my.head] = total

        def copy(my):
            row = my.chunks.sequence.row

            def load(i, slot, barrier):
                t = pl.ds(my.chunks.start(i), CHUNK)
                plgpu.copy_gmem_to_smem(at.b.at[row, t, over(my.head, split[0])], at.b_s.at[slot], barrier)
                for w in range(W):
                    source = at.c.at[row, t, over(my.head, split[1]), pl.ds((my.block * W + w) * COLUMNS, COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, at.c_s.at[slot, w], barrier)
                if gated:
                    plgpu.copy_gmem_to_smem(at.gates.at[row, my.head, t], at.gates_s.at[slot], barrier)

            fill(my.first, my.chunks.count, my.done, stages, at.full, at.empty, load)

        @when(i_w < W)
        def _compute():
            registers_of(W, REGISTERS, "increase")
            pieces(compute)

        @when(i_w == W)
        def _memory():
            registers_of(W, REGISTERS_MEMORY, "decrease")
            drain(pieces(copy), stages, at.empty)

    results = launch_kernel(
        body, inputs.values(), name="states", grid=(programs,), warpgroups=W + 1, between_warps=False,
        out_type=[x for x in outputs.values() if x is not None],
        scratch_types=[x for x in scratch.values() if x is not None],
    )
    got: Any = Names(results, outputs)
    return got.local, got.total, got.starts


def combine(local, total, decay, initial, starts, *, B, walk, cu_seqlens):
    """The state that each segment starts from, ``[slots, H, K, V]``, from the pieces' own and the initial one.

    ``starts``: those that :func:`local_states` gave, which are completed in place; sequences start from zero, and those
    of the first segments are not written. Parallel over the state, four values to a thread, in order over the pieces,
    whose values are asked for long before.
    """
    slots, _, H, K, V = local.shape
    rows, ahead = 512 // V, AHEAD_TWO if walk.segments == 2 else AHEAD_MORE
    layout = plgpu.Layout.WG_STRIDED((rows, V), vec_size=4)
    inputs = dict(local=local, total=total, gamma=decay.gamma, initial=initial, cu_seqlens=cu_seqlens, starts=starts)
    outputs = dict(starts=jax.ShapeDtypeStruct((slots, H, K, V), jnp.float32)) if starts is None else {}

    def body(indices, _, *refs):
        i_n, i_h, i_r = indices
        at: Any = Names(refs, inputs, outputs)
        written = int(starts is not None)
        sequence = walk.of(i_n, at.cu_seqlens)
        slot0 = sequence.place(walk.segment)
        g, first = 0.0, 0
        if total is None:
            g = decay_log2(at.gamma, sequence.row, i_h)
            first = walk.first_piece(g)
        count = walk.pieces - first
        last = sequence.segments - 1
        part = pl.ds(i_r * rows, rows)

        def load(ref):
            return plgpu.load(ref, layout=layout, optimized=False)

        def ask(place):
            """The values of a piece, and of its decay; past the last piece, of that."""
            i_p, i_f = place
            i_p = jnp.clip(i_p, 0, jnp.maximum(last - 1, 0))
            tile = load(at.local.at[slot0 + i_p, first + i_f, i_h, part])
            return tile, None if total is None else at.total[slot0 + i_p, first + i_f, i_h]

        def after(place):
            i_p, i_f = place
            ends = i_f == count - 1
            return i_p + jnp.where(ends, 1, 0), jnp.where(ends, 0, i_f + 1)

        def step(state, place, tile, passed):
            i_p, i_f = place

            @when((i_f == 0) & (i_p >= written) & (i_p < last))
            def _():
                at.starts[slot0 + i_p, i_h, part] = state

            if total is None:
                kept = jnp.exp2(g * jnp.where(i_f == 0, sequence.tokens(i_p), 0).astype(jnp.float32))
                later = (count - 1 - i_f) * (walk.segment // walk.pieces * CHUNK)
                new = state * kept + tile * jnp.exp2(g * later.astype(jnp.float32))
            else:
                new = state * jnp.exp2(passed) + tile
            return jnp.where(lax.broadcast_in_dim(i_p < last, (rows, V), []), new, state)

        def steps(_, carry):
            state, now, asked, tiles = carry
            tiles = list(tiles)
            for i in range(ahead):
                state = step(state, now, *tiles[i])
                tiles[i] = ask(asked)
                now, asked = after(now), after(asked)
            return state, now, asked, tuple(tiles)

        @when(starts is None or jnp.logical_not(walk.is_last_piece_all(g)))
        def _walk():
            if initial is None:
                state = plgpu.layout_cast(jnp.zeros((rows, V), jnp.float32), layout)
            else:
                state = load(at.initial.at[i_n, i_h, part])
            begin = jnp.int32(0), jnp.int32(0)
            asked, tiles = begin, []
            for _ in range(ahead):
                tiles.append(ask(asked))
                asked = after(asked)
            rounds = over(last * count + ahead - 1, ahead)
            state, *_ = lax.fori_loop(0, rounds, steps, (state, begin, asked, tuple(tiles)))

            @when(last >= written)
            def _last():
                at.starts[slot0 + last, i_h, part] = state

    return launch_kernel(
        body, inputs.values(), name="combine", warpgroups=1, scratch_types=[],
        grid=(B if walk.packed is None else walk.packed, H, K // rows),
        out_type=list(outputs.values()), in_place=int(starts is not None),
    )[0]
