"""Kernels that join the results of several programs: states of pieces, sums over heads that share an array or decay."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from keraunos.kernels.device.hopper import LOG2E
from keraunos.kernels.linear_attention.cuda.walk import CLOSED, natural_decay, reach


@gluon.jit
def piece(i, count, local, sums, decay, i_n, i_h, o, T, L, P, H: gl.constexpr, KV: gl.constexpr, WIDTH: gl.constexpr,
          BACKWARDS: gl.constexpr):
    """The state that the i-th piece leaves, and its decay, base 2; zeros beyond the last of ``count``."""
    pieces = gl.cdiv(T, L)
    i_p = (pieces - 1 - i) if BACKWARDS else i
    slot = (i_n.to(gl.int64) * pieces + i_p) * H + i_h
    there = i < count
    if sums is None:
        across = decay * (gl.minimum(T - i_p * L, L) * there.to(gl.int32)).to(gl.float32)
        there = there & (reach(decay, (i_p % P if BACKWARDS else P - 1 - i_p % P) * L) >= 0)
    elif WIDTH == KV:
        across = gl.load(sums + slot, mask=there, other=0.0)
    else:
        across = gl.load(sums + slot * (KV // WIDTH) + o // WIDTH, mask=(o >= 0) & there, other=0.0)
    return gl.load(local + slot * KV + o, mask=(o >= 0) & there, other=0.0), across


@gluon.jit
def enter(i, count, state, found, o, p_starts, T, L, P, H: gl.constexpr, KV: gl.constexpr,
          BACKWARDS: gl.constexpr):
    """The state after a piece, of which ``piece`` found this; the one before it goes to where a segment starts."""
    left, across = found
    pieces = gl.cdiv(T, L)
    i_p = (pieces - 1 - i) if BACKWARDS else i
    starts = ((i == 0) | (i_p % P == P - 1)) if BACKWARDS else (i_p % P == 0)
    gl.store(p_starts + (i_p // P).to(gl.int64) * (H * KV), state, mask=(o >= 0) & starts & (i < count))
    return state * gl.exp2(across) + left


@gluon.jit(do_not_specialize=["stride_gamma_b", "T", "L", "P"])
def starts_kernel(
    local, sums, gamma, h0, stride_gamma_b, T, L, P,
    starts,
    H: gl.constexpr, KV: gl.constexpr, WIDTH: gl.constexpr, BD: gl.constexpr, AT_ONCE: gl.constexpr,
    BACKWARDS: gl.constexpr,
):
    """The state that each segment starts from ``[segments, H, K, V]``, of what pieces of L tokens leave from none.

    P: pieces of a segment. sums: what the gates of each piece come to, each for WIDTH of the KV values of a state;
    gamma: constant decays. h0: the state that the first segment starts from, in the order of the walk. A program joins
    BD of the values.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([max(BD // 128, 1)], [32], [4], [0])
    i_x = gl.program_id(0) % (KV // BD)
    i_h = gl.program_id(0) // (KV // BD) % H
    i_n = gl.program_id(0) // (KV // BD * H)
    o = i_x * BD + gl.arange(0, BD, layout=LAYOUT)
    decay = gl.maximum(natural_decay(gamma, i_n, i_h, stride_gamma_b), CLOSED) * LOG2E
    if h0 is None:
        state = gl.zeros([BD], gl.float32, LAYOUT)
    else:
        state = gl.load(h0 + (i_n.to(gl.int64) * H + i_h) * KV + o).to(gl.float32)
    pieces = gl.cdiv(T, L)
    segments = gl.cdiv(pieces, P)
    count = (pieces - P) if BACKWARDS else (segments - 1) * P
    p_starts = starts + (i_n.to(gl.int64) * segments * H + i_h) * KV + o
    # A step is short: what it waits for costs more than what it does. So many wait at once.
    for i in range(0, count, AT_ONCE):
        found = ()
        for j in gl.static_range(AT_ONCE):
            x = piece(i + j, count, local, sums, decay, i_n, i_h, o, T, L, P, H, KV, WIDTH, BACKWARDS)
            found += (x,)  # type: ignore[assignment]
        for j in gl.static_range(AT_ONCE):
            state = enter(i + j, count, state, found[j], o, p_starts, T, L, P, H, KV, BACKWARDS)
    gl.store(p_starts + (segments * 0 if BACKWARDS else segments - 1).to(gl.int64) * (H * KV), state)


@gluon.jit(do_not_specialize=["M", "R"])
def sum_kernel(x, M, R, y, D: gl.constexpr, BR: gl.constexpr, BO: gl.constexpr):
    """``y[m, d] = sum_r x[m, r, d]`` of contiguous arrays, always in the same order."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    o = gl.program_id(0).to(gl.int64) * BO + gl.arange(0, BO, layout=gl.SliceLayout(0, L))
    r = gl.arange(0, BR, layout=gl.SliceLayout(1, L))
    inside = o < M.to(gl.int64) * D
    first = o // D * R * D + o % D
    sums = gl.zeros([BR, BO], gl.float32, L)
    for i in range(0, R, BR):
        there = (i + r < R)[:, None] & inside[None, :]
        sums += gl.load(x + first[None, :] + ((i + r).to(gl.int64) * D)[:, None], mask=there, other=0.0).to(gl.float32)
    gl.store(y + o, gl.sum(sums, 0).to(y.dtype.element_ty), mask=inside)
