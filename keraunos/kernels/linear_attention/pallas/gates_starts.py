"""With gates per token and dimension of the key, on Hopper: the state that each segment starts from.

It is made of the states of pieces, which ``gates_scan.states`` gives. Where sequences have two segments, whoever
starts from it makes it: :class:`Pieces` and :func:`start`. Where they have more, a kernel of its own does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas.gates import F32
from keraunos.kernels.linear_attention.pallas.program import (
    COLUMNS,
    LAYOUT,
    PER_ROW,
    Names,
    give_back,
    launch_kernel,
    ring,
    rows_of,
    smem,
    when,
    zeros,
)
from keraunos.kernels.linear_attention.pallas.tiles import read_from
from keraunos.kernels.linear_attention.pallas.walk import over

# Columns of a state that a program of ``combine`` has: few heads have few states, and each is walked through in order.
_COMBINED = 16


class Pieces(NamedTuple):
    """In place of the states that segments start from, where sequences have two: what the second's is made of.

    Attributes:
        local, sums: what :func:`states` gives of pieces.
        initial: ``[N, H, K, V]`` float32, the states that sequences start from, or None.
    """

    local: Any
    sums: Any
    initial: Any


def named_starts(starts: Any) -> dict[str, Any]:
    """The arrays of starts, by the names that :func:`start` knows."""
    pieces = starts if isinstance(starts, Pieces) else Pieces(None, None, starts)
    return dict(starts=pieces.initial, local=pieces.local, passed=pieces.sums)


def through(tile: Any, barrier: Any) -> Any:
    """What reads a block of a state through a tile in shared memory, of one's own; the barrier is for the copy.

    A warpgroup's loads of a state are many and short. For microseconds, what other warpgroups load and store waits
    behind them.
    """

    def read(block):
        plgpu.copy_gmem_to_smem(block, tile, barrier)
        plgpu.barrier_wait(barrier)
        found = plgpu.load(tile, layout=LAYOUT)
        # All warps have read it.
        plgpu.commit_smem()
        return found

    return read


def start(at: Any, walk: Any, sequence: Any, i_s: Any, i_h: Any, blocks: list[tuple[Any, Any]],
          read_block: Any = None) -> tuple[Any, ...]:
    """The state that a segment starts from, in blocks of 64 dimensions and 64 columns, each read by ``read_block``."""

    def read(ref, *index):
        return tuple((read_block or read_from)(ref.at[*index, i_h, *x]) for x in blocks)

    of_segment = walk.segments > 1 and at.local is None
    if at.starts is None:
        state = (zeros(COLUMNS, COLUMNS),) * len(blocks)
    else:
        state = read(at.starts, i_s if of_segment else sequence.index)
    if at.local is None:
        return state

    def add(i, state):
        # Of the segment before, whose slot is beside this one's.
        index = i_s - 1, i
        decays = (plgpu.load(at.passed.at[*index, i_h, dims], layout=PER_ROW, optimized=False) for dims, _ in blocks)
        factors = [rows_of(jnp.exp2(x), COLUMNS) for x in decays]
        return tuple(x * y + z for x, y, z in zip(state, factors, read(at.local, *index), strict=True))

    return lax.fori_loop(0, jnp.where(sequence.i_p > 0, walk.pieces, 0), add, state)


def combine(local, sums, initial, *, B, walk, cu_seqlens):
    """The state that each segment starts from, ``[slots, H, K, V]`` float32.

    ``local`` ``[slots, pieces, H, K, V]`` are the pieces' own, ``sums`` ``[slots, pieces, H, K]`` those of their gates,
    base 2. One program per head and ``64 x _COMBINED`` of the state: parallel over the state, in order over the pieces.
    """
    slots, pieces, H, K, V = local.shape
    stages = min((walk.segments - 1) * pieces, 16)
    inputs = dict(local=local, sums=sums, initial=initial, cu_seqlens=cu_seqlens)
    outputs = dict(starts=jax.ShapeDtypeStruct((slots, H, K, V), F32))
    scratch = dict(
        tiles=smem(F32, stages, COLUMNS, _COMBINED), sums_s=plgpu.SMEM((stages, COLUMNS), F32),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages), empty=plgpu.Barrier(num_barriers=stages),
    )

    def body(indices, i_w, *refs):
        i_n, i_h, i_r, i_c = indices
        at: Any = Names(refs, inputs, outputs, scratch)
        sequence = walk.of(i_n, at.cu_seqlens)
        slot0, n = sequence.place(walk.segment), sequence.segments - 1
        part = pl.ds(i_r * COLUMNS, COLUMNS), pl.ds(i_c * _COMBINED, _COMBINED)

        @when(i_w == 0)
        def _compute():
            def piece(i, state):
                slot = lax.rem(i, stages)

                @when(lax.rem(i, pieces) == 0)
                def _():
                    at.starts[slot0 + over(i, pieces), i_h, *part] = state

                plgpu.barrier_wait(at.full.at[slot])
                give_back(at.empty, i - 1, stages)
                decay = jnp.exp2(plgpu.load(at.sums_s.at[slot], layout=PER_ROW))
                return state * rows_of(decay, _COMBINED) + plgpu.load(at.tiles.at[slot], layout=LAYOUT)

            if initial is None:
                state = zeros(COLUMNS, _COMBINED)
            else:
                state = plgpu.load(at.initial.at[i_n, i_h, *part], layout=LAYOUT, optimized=False)
            at.starts[slot0 + n, i_h, *part] = lax.fori_loop(0, n * pieces, piece, state)
            give_back(at.empty, n * pieces - 1, stages)

        @when(i_w == 1)
        def _move():
            def load(i, slot, barrier):
                at_piece = slot0 + over(i, pieces), lax.rem(i, pieces), i_h
                plgpu.copy_gmem_to_smem(at.local.at[*at_piece, *part], at.tiles.at[slot], barrier)
                plgpu.copy_gmem_to_smem(at.sums.at[*at_piece, part[0]], at.sums_s.at[slot], barrier)

            ring(0, n * pieces, stages, at.full, at.empty, load)

    return launch_kernel(
        body, inputs.values(), lanes=True, between_warps=False,
        name="gates_combine", warpgroups=2, out_type=list(outputs.values()),
        grid=(B if walk.packed is None else walk.packed, H, K // COLUMNS, V // _COMBINED),
        scratch_types=list(scratch.values()),
    )[0]
