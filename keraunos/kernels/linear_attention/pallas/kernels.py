"""The recurrence with a scalar decay, for Hopper: a warp-specialised kernel in Pallas Mosaic GPU.

Queries, keys and values give outputs: one memory warpgroup issues bulk copies into a ring of stages, compute warpgroups
use them up. ``benchmarks/results/hopper-notes.md`` draws who waits for whom; ``walk.py`` says which program does
which tokens, and ``starts.py`` has the kernels for what segments start from.

Gradients of gates and of learned decays are for bfloat16 only: where decays are strong, what a token gives to later
ones is below float16's normal numbers, and nothing else makes these gradients.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas.decays import Decay, decay_log2, gate_weights, gates_of, steps_of, weights
from keraunos.kernels.linear_attention.pallas.program import (
    COLUMNS,
    LAYOUT,
    PER_COLUMN,
    PER_ROW,
    REGISTERS,
    REGISTERS_MEMORY,
    SHARED,
    Names,
    clear_rows,
    clear_shared,
    columns_of,
    either_of,
    launch_kernel,
    registers_of,
    ring,
    rows_of,
    smem,
    store_rows,
    when,
    zeros,
)
from keraunos.kernels.linear_attention.pallas.registers import upto_of
from keraunos.kernels.linear_attention.pallas.walk import CHUNK, TILE, Walk, over

__all__ = ["CHUNK", "TILE", "Decay", "Gradient", "Walk", "scan"]

# The arrays with rows of tokens, by the names of parameters.
PER_TOKEN = ("a", "b", "c", "factor")
# Chunks from one state that the gradient of gates starts from to the next.
GROUP = 8
# How far a chunk's gates sum below 0 for each token, base 2, where their gradients are so small that the rounding of
# what a token reads of itself, which no gate touches, would show in them.
APART = 8.0


class Gradient(NamedTuple):
    """What the walk for dk leaves to the walk for dq, which makes of it the gradient of the gates.

    Attributes:
        sums: ``[places of chunks, H, K / 64, 64]`` float32: for each token the sum of k dk over 64 dimensions.
        states: ``[places of groups, H, V, K]``: the gradient, transposed, of the state before each group of chunks,
            without the mantissa of the scale.
    """

    sums: Any
    states: Any


def _split(scale):
    """``(power, mantissa)``, whose product it is: a power of two, or 0, and a factor of 1 to 2 or of -1 to -2.

    The power takes no digits from values that are rounded to 16 bits next, as the scale itself would.
    """
    mantissa, exponent = math.frexp(scale)
    return (math.ldexp(1.0, exponent - 1), 2 * mantissa) if scale else (0.0, 1.0)


class Room(NamedTuple):
    """How ``scan`` uses shared memory.

    Attributes:
        warpgroups: compute warpgroups: 64 columns of V each; heads with more have several programs.
        buffers: for outputs on their way to memory.
        alone: queries have one place of their own, which is filled again in the middle of a chunk, and no stages.
        stages: of the ring, at most.
    """

    warpgroups: int
    buffers: int
    alone: bool
    stages: int


def room(K: int, V: int, output: Any, product: bool = False) -> Room:
    """The most that fits of: two warpgroups, stages for queries, two buffers, then stages; two of these at least.

    ``product``: outputs are multiplied with one more input.
    """
    for W, alone, buffers in itertools.product((2, 1), (False, True), (2, 1)):
        queries, values = CHUNK * K * 2, CHUNK * W * COLUMNS
        rest = SHARED - K * W * COLUMNS * 2 - 2 * values - buffers * values * jnp.dtype(output).itemsize
        # What each token has one of, and two states' product, each from where a tile of 1,024 bytes may start.
        rest -= 2048 + (2048 if product else 0) + alone * queries
        stages = rest // ((2 - alone) * queries + 2 * values * (2 if product else 1))
        if V % (W * COLUMNS) == 0 and stages >= 2:
            return Room(W, buffers, alone, stages)
    raise ValueError(f"head dims of {K} and {V} need more shared memory than there is")


def scan(a, b, c, decay, starts, *, H, walk, plan, scale_in, scale_out, output, final, from_zero, transposed, stages,
         factor=None, gradient=None):
    """One walk with queries a, keys b, values c: ``(output [B, T, H, V], final state [N, H, K, V], gradient)``.

    Args:
        a, b, c: ``[B, T, heads, K]``, ``[B, T, heads, K]``, ``[B, T, heads, V]``; heads divide H; rows past T are zero.
        decay: the decay.
        starts: ``[N, H, K, V]`` float32, or ``[slots, H, K, V]`` where sequences are cut; None: zeros.
        H: heads.
        walk, plan: how sequences are walked; of packed ones the plan.
        from_zero: sequences start from zeros, and starts are there of their later segments only.
        transposed: starts are ``[..., V, K]``.
        scale_in: factor of what enters the state; scale_out: of what is read from it; outputs have both.
        output: dtype of the output; None: the queries'.
        final: the final state is wanted; else None.
        stages: stages of the ring, at most.
        factor: ``[B, T, heads, V]``, for the gradient of gates: k in the walk for dk, q in that for dq; or None.
        gradient: in the walk for dq, what the walk for dk gave.

    Returns:
        The third is None without ``factor``, a :class:`Gradient` without ``gradient``, and with both that of each
        token's gate, ``[V / 64, B, H, T]`` float32, to be summed over the first axis.
    """
    (B, rows, _, K), V, dtype = a.shape, c.shape[-1], a.dtype
    output = jnp.dtype(output or dtype)
    W, buffers, alone, most = room(K, V, output, factor is not None)
    stages = min(stages, most)
    blocks = V // (W * COLUMNS)
    N = B if walk.packed is None else walk.packed
    split = [H // x.shape[2] for x in (a, b, c)]
    # States are held without the mantissa of what enters them.
    power, mantissa = _split(scale_in)
    leave_states = factor is not None and gradient is None
    dgates = gradient is not None

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    places = [walk.places(B, n) for n in (1, GROUP)]
    inputs = dict(a=a, b=b, c=c, gamma=decay.gamma, gates=decay.gates, starts=starts, plan=plan, factor=factor,
                  sums=gradient and gradient.sums, states=gradient and gradient.states)
    outputs = dict(
        o=shape(B, rows, H, V, dtype=output),
        final=shape(N, H, K, V) if final else None,
        sums_out=shape(places[0], H, V // COLUMNS, CHUNK) if leave_states else None,
        states_out=shape(places[1], H, K, V, dtype=dtype) if leave_states else None,
        dgates=shape(V // COLUMNS, B, H, rows) if dgates else None,
    )
    gated, packed, large = decay.gates is not None, plan is not None, K > 128
    scratch = dict(
        a_s=smem(dtype, 1 if alone else stages, CHUNK, K), b_s=smem(dtype, stages, CHUNK, K),
        c_s=smem(dtype, stages, W, CHUNK, COLUMNS),
        factor_s=None if factor is None else smem(dtype, stages, W, CHUNK, COLUMNS),
        left_s=smem(dtype, W, CHUNK, COLUMNS), state_s=smem(dtype, W, K, COLUMNS),
        o_s=smem(output, buffers, W, CHUNK, COLUMNS),
        # What each token has one of: gates; their sums, what changes the gradient from one to the next, row numbers.
        gates_s=plgpu.SMEM((stages + 3 * W, CHUNK), jnp.float32) if gated or dgates or large else None,
        border_s=plgpu.SMEM((W, K), jnp.float32) if dgates else None,
        # full: one arrival per copy; the others: one per compute warpgroup.
        full=plgpu.Barrier(num_arrivals=2 - alone + W * (1 if factor is None else 2) + gated, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=W, num_barriers=stages),
        a_full=plgpu.Barrier() if alone else None, a_empty=plgpu.Barrier(num_arrivals=W) if alone else None,
        met=plgpu.Barrier(num_arrivals=W) if packed else None,
    )

    def body(indices, i_w, *refs):
        i_s, i_h, i_v = indices
        at: Any = Names(refs, inputs, outputs, scratch)
        sequence = walk.at(i_s, at.plan)
        chunks = sequence.of_segment()

        @when(i_w < W)
        def _compute():
            registers_of(W, REGISTERS, "increase")
            i_c = i_v * W + i_w
            columns = pl.ds(i_c * COLUMNS, COLUMNS)

            def start():
                start = at.starts.at[i_s if walk.segments > 1 else sequence.index, i_h]
                layout = plgpu.Layout.WGMMA_TRANSPOSED if transposed else LAYOUT
                start = start.at[columns].T if transposed else start.at[:, columns]
                start = plgpu.layout_cast(plgpu.load(start, layout=layout, optimized=False), LAYOUT)
                return start if mantissa == 1 else start * (1 / mantissa)

            # Asked for before all else.
            if starts is None:
                state = zeros(K, COLUMNS)
            elif from_zero:
                state = either_of(sequence.i_p > 0, start, lambda: zeros(K, COLUMNS))
            else:
                state = start()
            steps = None if large else steps_of(walk)

            def ahead():
                """``[CHUNK, CHUNK]``: how many steps before the row's token the walk sees the column's."""
                if steps is not None:
                    return steps
                # Made again each time: with a state this large there are no registers to keep it in.
                x = at.gates_s.at[stages + 2 * W + i_w]
                x = rows_of(plgpu.load(x, layout=PER_ROW, optimized=False), CHUNK) - columns_of(
                    plgpu.load(x, layout=PER_COLUMN), CHUNK
                )
                return -x if walk.reverse else x

            if large:
                at.gates_s[stages + 2 * W + i_w] = plgpu.broadcasted_iota(
                    jnp.int32, (CHUNK,), 0, layout=PER_ROW
                ).astype(jnp.float32)
                plgpu.commit_smem()

            g = 0.0 if gated else decay_log2(at.gamma, sequence.row, i_h)

            def between_constant(g):
                return jnp.exp2(g * ahead()) * (scale_in * scale_out)

            # 1 where tokens read themselves apart from the others, for the gradient of a learned decay.
            apart_always = None if gated or factor is None else jnp.less(g, -APART).astype(jnp.int32)
            pairs = None
            if not (gated or large):
                pairs = jnp.where(ahead() >= (0 if factor is None else apart_always), between_constant(g), 0.0)

            at.state_s[i_w] = state.astype(dtype)
            plgpu.commit_smem()

            def step(i, carry):
                state, border = carry
                slot, t, n = lax.rem(i, stages), chunks.start(i), chunks.length(i)
                limits: Any = chunks.rows(i) if packed else None
                a_t, b_t, c_t = at.a_s.at[0 if alone else slot], at.b_s.at[slot], at.c_s.at[slot, i_w]
                out = at.o_s.at[lax.rem(i, buffers), i_w]
                if not gated:
                    constant = weights(walk, g, n, limits[0] if packed else 0)
                    constant = *constant, jnp.exp2(g * n.astype(jnp.float32))
                later: Any = None
                if dgates:
                    # Needed at the end of the chunk: asked for early.
                    later = plgpu.load(at.sums.at[chunks.place(i, 1), i_h, i_c], layout=PER_ROW, optimized=False)
                plgpu.barrier_wait(at.full.at[slot])
                if alone:
                    plgpu.barrier_wait(at.a_full)
                if packed:

                    @when(n < CHUNK)
                    def _():
                        clear_rows([c_t], *limits)
                        clear_shared(b_t, i_w, W, at.met, *limits)

                def products(scores, o):
                    plgpu.wgmma(scores, a_t, b_t.T)
                    plgpu.wgmma(o, a_t, at.state_s.at[i_w])
                    # While the tensor cores do that: what of each value is left at the chunk's end.
                    apart: Any = apart_always
                    if gated:
                        gates = gates_of(at.gates_s.at[slot], limits)
                        decays = gate_weights(walk, gates, at.gates_s.at[stages + i_w], scale_in * scale_out)
                        enter, leave, total, between_gates = decays
                        if factor is not None:
                            apart = (total < -APART * n.astype(jnp.float32)).astype(jnp.int32)
                    else:
                        enter, leave, across = constant
                    v = plgpu.load(c_t, layout=LAYOUT).astype(jnp.float32)
                    at.left_s[i_w] = (v * rows_of(leave * power, COLUMNS)).astype(dtype)
                    plgpu.commit_smem()

                    def rest(state):
                        plgpu.wgmma(state, b_t.T, at.left_s.at[i_w])
                        # Of the three products, the last one or two may still be running.
                        p = plgpu.wgmma_accumulator_load(scores, wait_n=2)
                        if pairs is not None:
                            p = (p * pairs).astype(dtype)
                        else:
                            between = (
                                between_gates() if gated
                                else between_constant(decay_log2(at.gamma, sequence.row, i_h))
                            )
                            p = upto_of(p * between, dtype, walk.reverse, apart)
                        read = plgpu.wgmma_accumulator_load(o, wait_n=1)
                        if alone and factor is None:
                            plgpu.barrier_arrive(at.a_empty)

                        def last(o):
                            plgpu.wgmma(o, p, c_t)

                        # Ends with all products done.
                        read = pl.run_state(last)(
                            plgpu.ACC.init(read * rows_of(enter * (scale_out * mantissa), COLUMNS))
                        )
                        if factor is not None:
                            multiply(read)
                        else:
                            plgpu.barrier_arrive(at.empty.at[slot])
                        # Waits until the output of as many chunks ago as there are buffers has left its own. Here the
                        # warps of the warpgroup meet, all with their products done: only from now on may state_s and
                        # left_s be written again, state_s only if it is not on its way to memory itself.
                        plgpu.wait_smem_to_gmem(0 if leave_states else buffers - 1, wait_read_only=True)
                        out[...] = read.astype(output)
                        if factor is not None:
                            when(apart > 0)(lambda: add_own(out))
                            plgpu.barrier_arrive(at.empty.at[slot])
                            if alone:
                                plgpu.barrier_arrive(at.a_empty)

                    return pl.run_state(rest)(plgpu.ACC.init(state * (jnp.exp2(total) if gated else across)))

                def add_own(o):
                    """Add what tokens read of themselves to what they read of the others, in shared memory."""

                    def of(ref):
                        return plgpu.load(ref, layout=LAYOUT).astype(jnp.float32)

                    dims = [pl.ds(d, COLUMNS) for d in range(0, K, COLUMNS)]
                    own = sum(jnp.sum(of(a_t.at[:, d]) * of(b_t.at[:, d]), axis=1) for d in dims)
                    own = (own * (scale_in * scale_out)).astype(dtype).astype(jnp.float32)
                    o[...] = (of(o) + rows_of(own, COLUMNS) * of(c_t)).astype(output)

                def multiply(o):
                    """For the gradient of gates: of each token the sum of its products."""
                    x = plgpu.load(at.factor_s.at[slot, i_w], layout=LAYOUT).astype(jnp.float32)
                    x = jnp.sum(o * x, axis=1)
                    if leave_states:
                        at.sums_out[chunks.place(i, 1), i_h, i_c] = x
                        return
                    x = x - later
                    if packed:
                        row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=PER_ROW)
                        x = jnp.where((row >= limits[0]) & (row < limits[1]), x, 0.0)
                    at.gates_s[stages + W + i_w] = x

                accumulators = plgpu.ACC((CHUNK, CHUNK), jnp.float32), plgpu.ACC((CHUNK, COLUMNS), jnp.float32)
                state = pl.run_scoped(products, *accumulators)
                at.state_s[i_w] = state.astype(dtype)
                plgpu.commit_smem()
                if packed:

                    @when(n == CHUNK)
                    def _():
                        plgpu.copy_smem_to_gmem(out, at.o.at[0, pl.ds(t, CHUNK), i_h, columns])

                    # The neighbours' rows are others' to write, and a bulk copy has whole tiles of rows only.
                    @when(n < CHUNK)
                    def _():
                        mine = plgpu.load(out, layout=LAYOUT)
                        store_rows(at.o.at[0, pl.ds(t, CHUNK), i_h, columns], mine, *limits)
                else:
                    plgpu.copy_smem_to_gmem(out, at.o.at[sequence.row, pl.ds(t, CHUNK), i_h, columns])
                if dgates:
                    x = columns_of(plgpu.load(at.gates_s.at[stages + W + i_w], layout=PER_COLUMN), CHUNK)
                    dg = border - jnp.sum(jnp.where(ahead() > 0, x, 0.0), axis=1)
                    border = border - jnp.sum(x, axis=1)
                    store_rows(at.dgates.at[i_c, sequence.row, i_h, pl.ds(t, CHUNK)], dg, *chunks.rows(i))
                if leave_states:
                    # The walk for dq starts a group with this chunk.
                    @when(lax.rem(chunks.ahead(i), GROUP) == 0)
                    def _():
                        target = at.states_out.at[chunks.place(i, GROUP), i_h, :, columns]
                        plgpu.copy_smem_to_gmem(at.state_s.at[i_w], target)

                return state, border

            if dgates:

                def group(i_g, state):
                    place = chunks.place(i_g * GROUP, GROUP)
                    after = plgpu.load(at.states.at[place, i_h, :, columns], layout=LAYOUT, optimized=False)
                    at.border_s[i_w] = jnp.sum(state * after.astype(jnp.float32), axis=1) * _split(scale_out)[1]
                    plgpu.commit_smem()
                    border = plgpu.load(at.border_s.at[i_w], layout=PER_COLUMN)
                    border = jnp.sum(columns_of(border, CHUNK), axis=1)
                    last = jnp.minimum((i_g + 1) * GROUP, chunks.count)
                    return lax.fori_loop(i_g * GROUP, last, step, (state, border))[0]

                state = lax.fori_loop(0, over(chunks.count + GROUP - 1, GROUP), group, state)
            else:
                state = lax.fori_loop(0, chunks.count, lambda i, state: step(i, (state, None))[0], state)
            if final:

                @when(sequence.is_last)
                def _():
                    at.final[sequence.index, i_h, :, columns] = state if mantissa == 1 else state * mantissa

            plgpu.wait_smem_to_gmem(0)

        @when(i_w == W)
        def _memory():
            registers_of(W, REGISTERS_MEMORY, "decrease")
            head_a, head_b, head_c = (over(i_h, n) for n in split)

            def load(i, slot, barrier):
                t, row = pl.ds(chunks.start(i), CHUNK), sequence.row
                if not alone:
                    plgpu.copy_gmem_to_smem(at.a.at[row, t, head_a], at.a_s.at[slot], barrier)
                plgpu.copy_gmem_to_smem(at.b.at[row, t, head_b], at.b_s.at[slot], barrier)
                for w in range(W):
                    columns = pl.ds((i_v * W + w) * COLUMNS, COLUMNS)
                    plgpu.copy_gmem_to_smem(at.c.at[row, t, head_c, columns], at.c_s.at[slot, w], barrier)
                    if factor is not None:
                        source = at.factor.at[row, t, over(i_h, H // factor.shape[2]), columns]
                        plgpu.copy_gmem_to_smem(source, at.factor_s.at[slot, w], barrier)
                if gated:
                    plgpu.copy_gmem_to_smem(at.gates.at[row, i_h, t], at.gates_s.at[slot], barrier)
                if alone:

                    @when(i > 0)
                    def _():
                        plgpu.barrier_wait(at.a_empty)

                    plgpu.copy_gmem_to_smem(at.a.at[row, t, head_a], at.a_s.at[0], at.a_full)

            ring(0, chunks.count, stages, at.full, at.empty, load)
            if alone:

                @when(chunks.count > 0)
                def _():
                    plgpu.barrier_wait(at.a_empty)

    results = launch_kernel(
        body, inputs.values(), name="scan", grid=(walk.slots(B), H, blocks), warpgroups=W + 1, between_warps=False,
        out_type=[x for x in outputs.values() if x is not None],
        scratch_types=[x for x in scratch.values() if x is not None],
    )
    got: Any = Names(results, outputs)
    return got.o, got.final, Gradient(got.sums_out, got.states_out) if leave_states else got.dgates
