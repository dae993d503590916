"""Parts of walks over sequences in Gluon: where a program walks, descriptors of its tokens, its states.

A program walks over one sequence, or one segment of it, of one head, in chunks of tokens, of which only the one that
lies last in memory may be partial. Its descriptors are of its own tokens, so that copies read zeros after their end and
write nothing there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from keraunos.kernels.gluon import thread_barrier

LOG2E = gl.constexpr(1.4426950408889634)
# The log of less than any 16-bit value. Sums of a chunk's gates stay small enough that their differences are as good as
# 16-bit inputs if no gate is below it.
FAINT = gl.constexpr(-100.0)


@gluon.jit
def add(a, b):
    """The combination of a scan that sums."""
    return a + b


@gluon.jit
def wide(x):
    """16-bit values as float32; bfloat16 by its bits: a conversion takes the slow unit that exponentials need."""
    if x.dtype == gl.bfloat16:
        return (x.to(gl.int16, bitcast=True).to(gl.int32) << 16).to(gl.float32, bitcast=True)
    return x.to(gl.float32)


@gluon.jit
def anew(i):
    """0, for the i-th turn of a loop: what is made with it is made in each turn, not held where registers are few."""
    return i >> 30


@gluon.jit
def now(x):
    """x (16-bit values, or int32), made before the products that follow, and what is made of it after those before."""
    PACK: gl.constexpr = 32 // x.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, PACK)


@gluon.jit
def uniform(x):
    """x (an integer that was loaded), of which the compiler then knows that all threads have the same."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def longest_first(cu_seqlens, i_o, N):
    """The packed sequence that is the i_o-th in the order of lengths, of few; of many, who end together anyhow, i_o."""
    MOST: gl.constexpr = 32 * gl.num_warps()
    n = gl.arange(0, MOST, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    i_n = i_o
    if N <= MOST:
        begins = gl.load(cu_seqlens + n, mask=n < N, other=0)
        sizes = gl.load(cu_seqlens + n + 1, mask=n < N, other=0) - begins
        before = n * 0
        begin = gl.load(cu_seqlens)
        for m in range(N):
            end = gl.load(cu_seqlens + m + 1)
            size = end - begin
            before += ((size > sizes) | ((size == sizes) & (m < n))).to(gl.int32)
            begin = end
        i_n = gl.sum(gl.where((n < N) & (before == i_o), n, 0), 0)
    return i_n


@gluon.jit
def locate_walk(cu_seqlens, H: gl.constexpr, PACKED: gl.constexpr):
    """Program -> (head, walk). The longest packed sequences start first: one that starts last keeps a GPU waiting."""
    i_o = gl.program_id(0) // H
    if PACKED:
        i_o = longest_first(cu_seqlens, i_o, gl.num_programs(0) // H)
    return gl.program_id(0) % H, i_o


@gluon.jit
def locate(cu_seqlens, i_o, T, L, PACKED: gl.constexpr, SPLIT: gl.constexpr, REVERSE: gl.constexpr):
    """Walk -> (sequence, row of the batch, its first token in the row, its tokens, whether it ends the sequence)."""
    if PACKED:
        begin = gl.load(cu_seqlens + i_o).to(gl.int64)
        size = (gl.load(cu_seqlens + i_o + 1).to(gl.int64) - begin).to(gl.int32)
        return i_o, i_o * 0, begin, size, T >= 0
    if SPLIT:
        count = gl.cdiv(T, L)
        i_n = i_o // count
        i_g = i_o % count
        last = (i_g == 0) if REVERSE else (i_g == count - 1)
        return i_n, i_n, (i_g * L).to(gl.int64), gl.minimum(T - i_g * L, L), last
    return i_o, i_o, (i_o * 0).to(gl.int64), T, T >= 0


@gluon.jit
def owner(cu_seqlens, i_s, N, L):
    """The packed sequence that owns a slot for L tokens.

    Sequence n owns the slots from ``begin // L + n`` on, of which the last may stay empty.
    """
    AT_ONCE: gl.constexpr = 32 * gl.num_warps()
    each = gl.arange(0, AT_ONCE, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    i_n = i_s * 0
    for first in range(1, N, AT_ONCE):
        n = first + each
        begins = gl.load(cu_seqlens + n, mask=n < N, other=0).to(gl.int64)
        i_n += gl.sum(((n < N) & (begins // L + n <= i_s)).to(gl.int32), 0)
    return i_n


@gluon.jit
def locate_segment(cu_seqlens, i_o, T, N, L, C: gl.constexpr, PACKED: gl.constexpr, REVERSE: gl.constexpr):
    """Segment, counted in the order of the walk -> like ``locate``, and how many tokens the walk has before it.

    A segment has L tokens, which are whole chunks, but for what is walked last; a slot of packed sequences may have
    none.
    """
    if PACKED:
        i_n = owner(cu_seqlens, i_o, N, L)
        i_b = i_n * 0
        begin = gl.load(cu_seqlens + i_n).to(gl.int64)
        length = (gl.load(cu_seqlens + i_n + 1).to(gl.int64) - begin).to(gl.int32)
        before = (i_o - (begin // L + i_n)).to(gl.int32) * L
    else:
        count = gl.cdiv(T, L)
        i_n = i_o // count
        i_b = i_n
        begin = (i_n * 0).to(gl.int64)
        length = T
        before = i_o % count * L
    left = gl.cdiv(length, C) * C - before
    token = gl.maximum(left - L, 0) if REVERSE else before
    size = gl.minimum(left if REVERSE else before + L, length) - token
    return i_n, i_b, begin + token, size, before + L >= length, before


@gluon.jit
def locate_chunk(cu_seqlens, i_s, T, N, C: gl.constexpr, PACKED: gl.constexpr):
    """Slot of a chunk -> (row of the batch, its first token in the row, how many there are from that on)."""
    if PACKED:
        i_n = owner(cu_seqlens, i_s, N, C)
        begin = gl.load(cu_seqlens + i_n).to(gl.int64)
        end = gl.load(cu_seqlens + i_n + 1).to(gl.int64)
        token = begin + (i_s - (begin // C + i_n)) * C
        return i_n * 0, token, (end - token).to(gl.int32)
    count = gl.cdiv(T, C)
    first = i_s % count * C
    return i_s // count, first.to(gl.int64), T - first


@gluon.jit
def first_slot(i_n, token, size, T, L: gl.constexpr, PACKED: gl.constexpr):
    """The slot of the part of L tokens that begins with a token, of those that a sequence has; see ``locate_chunk``."""
    first = token // L + (i_n if PACKED else i_n.to(gl.int64) * gl.cdiv(T, L))
    return first * (size > 0).to(gl.int64)


@gluon.jit
def describe(x, i_b, token, i_h, size, stride_b, stride_t, stride_h, C: gl.constexpr, D: gl.constexpr,
             BD: gl.constexpr, LAYOUT: gl.constexpr):
    """A descriptor of the tokens of a walk ``[size, D]``, in blocks of C tokens and BD dimensions."""
    # A walk over no token may stand where the array has ended: what is described then is never copied.
    token = token * (size > 0).to(gl.int64)
    base = x + i_b.to(gl.int64) * stride_b + token * stride_t + i_h.to(gl.int64) * stride_h
    return tma.make_tensor_descriptor(base, [gl.maximum(size, 1), D], [stride_t, 1], [C, BD], LAYOUT)


@gluon.jit
def within(mask, o, D: gl.constexpr, BD: gl.constexpr):
    """A mask of a tile of BD dimensions without those after the array's own D; ``o`` are the tile's, broadcast."""
    if D < BD:
        mask = mask & (o < D)
    return mask


@gluon.jit
def load_state(p_state, o_r, o_c, R: gl.constexpr, D: gl.constexpr, BR: gl.constexpr, BD: gl.constexpr):
    """The values of a state at pointers ``[rows, columns]``, 0 after its own R and D of them."""
    if R == BR and D == BD:
        state = gl.load(p_state)
    else:
        mask = within((o_r >= 0)[:, None], o_r[:, None], R, BR) & within((o_c >= 0)[None, :], o_c[None, :], D, BD)
        state = gl.load(p_state, mask=mask, other=0.0)
    return state.to(gl.float32)


@gluon.jit
def store_state(p_state, state, last, o_r, o_c, R: gl.constexpr, D: gl.constexpr, BR: gl.constexpr,
                BD: gl.constexpr):
    """Stores a state at pointers, if its walk is the last of a sequence."""
    mask = within((o_r * 0 < last.to(gl.int32))[:, None], o_r[:, None], R, BR)
    gl.store(p_state, state, mask=within(mask, o_c[None, :], D, BD))


@gluon.jit
def clear(o, first, end, step, H: gl.constexpr, C: gl.constexpr, V: gl.constexpr, BV: gl.constexpr):
    """Zeros for C of a head's outputs from each ``step``-th token on, up to the ``end``."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, BV // 32], [1, 32], [4, 1], [1, 0])
    t = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, LAYOUT))
    nothing = gl.zeros([C, BV], o.dtype.element_ty, LAYOUT)
    for i in range(first, end, step):
        o_o = ((i + t).to(gl.int64) * (H * V))[:, None] + o_v[None, :]
        gl.store(o + o_o, nothing, mask=within((i + t < end)[:, None], o_v[None, :], V, BV))


@gluon.jit
def clear_padding(o, cu_seqlens, N, slot, i_o, i_h, token, size, T, H: gl.constexpr, C: gl.constexpr, V: gl.constexpr,
                  BV: gl.constexpr):
    """Zeros for what nobody else writes of a head's outputs ``[T, H, V]``: of a sequence in slot -1, and after the end.

    All walks share what is after the last of N sequences.
    """
    count = gl.num_programs(0) // H
    end = gl.load(cu_seqlens + N).to(gl.int64)
    clear(o + (end * H + i_h) * V, i_o * C, (T - end).to(gl.int32), count * C, H, C, V, BV)
    if slot < 0:
        clear(o + (token * H + i_h) * V, 0, size, C, H, C, V, BV)


@gluon.jit
def await_turn(turn, number):
    """Waits until another program tells this number."""
    at = gl.atomic_add(turn, 0, sem="acquire", scope="gpu")
    while at != number:
        at = gl.atomic_add(turn, 0, sem="acquire", scope="gpu")


@gluon.jit
def tell(turn, number, PENDING: gl.constexpr):
    """Writes whose turn has been, once all copies out but the last PENDING have arrived in memory."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    x = gl.full([1], 1, gl.int32, LINE) * number
    if PENDING == 2:
        x = gl.inline_asm_elementwise("cp.async.bulk.wait_group 2; mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)
    else:
        x = gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)
    thread_barrier()
    gl.atomic_xchg(turn, gl.max(x, 0), sem="release", scope="gpu")
