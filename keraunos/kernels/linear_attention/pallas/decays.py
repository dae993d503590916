"""A scalar decay in the kernels for Hopper: how much of what is left where, within a chunk.

A token *enters* with what is left there of the state before the chunk, and *leaves* what is left of its own at the
chunk's end.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas.program import LAYOUT, PER_COLUMN, PER_ROW, columns_of, rows_of
from keraunos.kernels.linear_attention.pallas.walk import CHUNK


class Decay(NamedTuple):
    """What decays the state of a head; one of the two.

    Attributes:
        gamma: ``[H]`` or ``[B, H]``, the log of a constant decay.
        gates: ``[B, H, T]``, the log of each token's decay, base 2 and finite.
    """

    gamma: Any
    gates: Any = None


def decay_log2(gamma, row, i_h):
    """The constant decay of a head, base 2."""
    gamma = gamma[i_h] if len(gamma.shape) == 1 else gamma[row, i_h]
    # A finite stand-in for -inf, so that no steps of it are no decay: exp2 of either is 0.
    return jnp.maximum(gamma, -1e4) * math.log2(math.e)


def weights(walk, log2_decay, n, lead=0):
    """``(enter, leave)`` ``[CHUNK]`` of a chunk of n tokens: from its start to a token, from a token to its end.

    ``lead``: rows before the first token.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=PER_ROW) - lead
    to, after = (n - row, row) if walk.reverse else (row + 1, n - 1 - row)
    if walk.adjoint:
        to, after = to - 1, after + 1
    # Rows outside hold zeros, and what they give is never read: any finite weight will do for them.
    enter, leave = (jnp.exp2(log2_decay * jnp.maximum(x, 0).astype(jnp.float32)) for x in (to, after))
    return enter, leave


def steps_of(walk):
    """``[CHUNK, CHUNK]``: how many steps before the row's token the walk sees the column's."""
    row, col = (plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), d, layout=LAYOUT) for d in (0, 1))
    return (col - row if walk.reverse else row - col).astype(jnp.float32)


def gate_weights(walk, gates, sums, scale=1.0):
    """A chunk's weights with a gate per token, all gates' sum, base 2, and a function: what decays between tokens.

    Args:
        walk: the walk.
        gates: ``[CHUNK]`` per column, zero outside of the sequence.
        sums: room for ``[CHUNK]`` in shared memory; the warps meet.
        scale: factor of what the function gives, ``[CHUNK, CHUNK]``.
    """
    row, col = (plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), d, layout=LAYOUT) for d in (0, 1))
    # In the recurrence's own order: all differences below are of tokens of the same chunk.
    upto = row <= col if walk.backward_in_time else col <= row
    to_row = jnp.sum(jnp.where(upto, columns_of(gates, CHUNK), 0.0), axis=1)
    sums[...] = to_row
    plgpu.commit_smem()
    to_col = plgpu.load(sums, layout=PER_COLUMN)
    total = sums[0 if walk.backward_in_time else CHUNK - 1]
    enter, leave = jnp.exp2(to_row), jnp.exp2(total - to_row)
    if walk.adjoint:
        enter, leave = leave, enter

    def between():
        x = rows_of(to_row, CHUNK) - columns_of(to_col, CHUNK)
        return jnp.exp2(-x if walk.adjoint else x) * scale

    return enter, leave, total, between


def gates_of(ref, rows):
    """The gates of a chunk, per column; those of neighbours count as zero."""
    gates = plgpu.load(ref, layout=PER_COLUMN)
    if rows is None:
        return gates
    at = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=PER_COLUMN)
    return jnp.where((at >= rows[0]) & (at < rows[1]), gates, 0.0)
