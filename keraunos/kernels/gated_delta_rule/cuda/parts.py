"""Parts of the kernels of the gated delta rule: where they are, and what is known of a chunk."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from keraunos.kernels.device.hopper import FAINT, LOG2E, now, owner, uniform

# Added to the squares of a key or query that is to be divided by its length.
EPSILON = gl.constexpr(1e-6)


@gluon.jit
def locate_group(cu_seqlens, i_s, T, N, L, PACKED: gl.constexpr):
    """Slot of L tokens -> (sequence, its row of the batch, first token in the row, tokens; which of its slots)."""
    if PACKED:
        i_n = owner(cu_seqlens, i_s, N, L)
        begin = gl.load(cu_seqlens + i_n).to(gl.int64)
        end = gl.load(cu_seqlens + i_n + 1).to(gl.int64)
        slot = (i_s - (begin // L + i_n)).to(gl.int32)
        return i_n, i_n * 0, begin, uniform((end - begin).to(gl.int32)), uniform(slot)
    groups = gl.cdiv(T, L)
    i_n = i_s // groups
    return i_n, i_n, (i_n * 0).to(gl.int64), T, i_s % groups


@gluon.jit
def read(inputs, at, size, C: gl.constexpr, GATED: gl.constexpr, BETA: gl.constexpr):
    """A chunk's gates, base 2, and beta, each warp all of them."""
    g, stride_g, beta, stride_beta = inputs
    EACH: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    t = gl.arange(0, C, layout=EACH)
    inside = t < size - at * C
    x = gl.zeros([C], gl.float32, EACH)
    if GATED:
        x = gl.load(g + (at * C + t).to(gl.int64) * stride_g, mask=inside, other=0.0).to(gl.float32)
        x = gl.where(inside, gl.maximum(x, FAINT) * LOG2E, 0.0)
    strength = gl.full([C], 1.0, gl.float32, EACH)
    if BETA:
        strength = gl.load(beta + (at * C + t).to(gl.int64) * stride_beta, mask=inside, other=0.0).to(gl.float32)
    return x, strength


@gluon.jit
def read_known(known, at, H: gl.constexpr, C: gl.constexpr, NORM: gl.constexpr):
    """One over the lengths of a chunk's keys, by one warp, and whether they are alike."""
    alike, norms = known
    EACH: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    of_keys = gl.full([C], 1.0, gl.float32, EACH)
    if NORM:
        of_keys = gl.load(norms + at * (H * C) + gl.arange(0, C, layout=EACH))
    return of_keys, gl.load(alike + at * H)


@gluon.jit
def of_lanes(x):
    """Sums ``[warps, 8, C]`` over the rows of a tile that a thread has, of which a warp has 16."""
    return gl.sum(x.reshape([x.shape[0] // 16, 2, 8, x.shape[1]]), 1)


@gluon.constexpr_function
def halves(warps, rows):
    """The layout of ``[warps, 2, rows, 64]`` whose threads have both halves of rows, and fewer columns for it."""
    columns = [8, 16, 32]
    lanes = rows.bit_length() - 1
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], *([0, 0, 0, x] for x in columns[:lanes]), [0, 1, 0, 0]],
        [[0, 0, 0, 2], [0, 0, 0, 4], *([0, 0, 1 << j, 0] for j in range(lanes)),
         *([0, 0, 0, x] for x in columns[lanes:])],
        [[1 << j, 0, 0, 0] for j in range(warps.bit_length() - 1)], [], [warps, 2, rows, 64])


@gluon.jit
def add_halves(x):
    """The sums ``[warps, rows / 2, 64]`` of a warp's rows and those that are half of all further."""
    HALVES: gl.constexpr = halves(x.shape[0], x.shape[1] // 2)
    return gl.sum(gl.convert_layout(x.reshape(HALVES.shape), HALVES), 1)


@gluon.jit
def of_warps(x):
    """Sums ``[warps, 64]`` over the rows of a tile that a warp has, from those of its lanes.

    Pairs of lanes give each other columns for rows, three times: so 14 values move, not 48 as if each had all sums.
    """
    # Made now: else the compiler moves values ahead of the products before, where registers are few.
    x = now(x.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    return add_halves(add_halves(add_halves(x))).reshape([x.shape[0], 64])


@gluon.jit
def of_tokens(parts_s):
    """Sums over all rows of a tile from those that warps have left ``[warps, C]``, by one warp."""
    PARTS: gl.constexpr = gl.BlockedLayout([parts_s.shape[0], 2], [1, 32], [1, 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    return gl.convert_layout(gl.sum(parts_s.load(PARTS), 0), EACH)
