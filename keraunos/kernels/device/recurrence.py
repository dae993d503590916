"""Functions of recurrences in Triton: chunks of packed sequences, sums of gates, decays, launches side by side.

Every decay is ``exp2`` of a sum of gates over exactly the tokens that it spans, taken as a product with a 0/1 matrix:
no difference of cumulative sums, so nothing overflows or cancels for any gate <= 0, ``-inf`` included. Sums are to the
base 2; with float32 (EXACT) to the base of the gates: see ``power``.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
# Stands for -inf in sums of gates: 0 * CLOSED is 0, exp of it is 0, and every 16-bit format holds it exactly.
CLOSED = tl.constexpr(-16384.0)
# The log, base 2, of less than any float32 value.
NOTHING = tl.constexpr(-150.0)
# ln 2 in two parts, of which the first has few digits.
LN2 = tl.constexpr(0.693359375)
LN2_REST = tl.constexpr(-2.12194440e-4)


@triton.jit
def locate(cu_seqlens, i_s, T, N, L, PACKED: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr,
           WITHIN: tl.constexpr = False):
    """Slot -> (sequence, its first token, its length, part). Packed sequence n owns the slots from ``begin // L + n``.

    WITHIN: sequences are not packed, and ``cu_seqlens`` has the first token of each that counts, and one past the last.
    """
    if PACKED:
        i_n = i_s
        if SPLIT:
            o_n = tl.arange(0, BN)
            m_n = o_n < N - 1
            b_begin = tl.load(cu_seqlens + 1 + o_n, mask=m_n, other=0).to(tl.int64)
            i_n = tl.sum((m_n & (b_begin // L + o_n + 1 <= i_s)).to(tl.int32), 0)
        begin = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - begin
        i_g = i_s - (begin // L + i_n) if SPLIT else begin * 0
    else:
        count = tl.cdiv(T, L) if SPLIT else 1
        i_n = i_s // count
        begin = tl.full([], 0, tl.int64)
        length = begin + T
        i_g = begin + i_s % count
        if WITHIN:
            begin = tl.load(cu_seqlens).to(tl.int64)
            length = tl.maximum(tl.load(cu_seqlens + 1).to(tl.int64) - begin, 0)
    return i_n, begin, length, i_g


@triton.jit
def locate_chunk(cu_seqlens, i_o, T, N, L, M, F, W, BT, PACKED: tl.constexpr, BN: tl.constexpr):
    """Slot among the chunks of a part -> (sequence, its first token, its length, chunk, slot among all chunks).

    The part has M tokens from the F-th on of each walk (L tokens) from the W-th on. A slot for no chunk gets one beyond
    the sequence.
    """
    if PACKED:
        i_n, begin, length, i_c = locate(cu_seqlens, i_o, T, N, BT, True, True, BN)
        i_s = i_o.to(tl.int64)
    else:
        count = tl.cdiv(M, BT)
        i_n, begin, length, i_g = locate(cu_seqlens, i_o // count + W, T, N, L, False, True, 1)
        i_c = F // BT + i_o % count
        i_c = tl.where(i_c * BT < L, i_g * (L // BT) + i_c, length)
        i_s = i_n.to(tl.int64) * tl.cdiv(T, BT) + i_c
    return i_n, begin, length, i_c, i_s


@triton.jit
def upper(x):
    """The upper 8 bits of x, which bf16 holds; by their mask: arithmetic could be contracted away."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def ones_dot(m, x, TERMS: tl.constexpr):
    """``m @ x`` of a 0/1 matrix, exact to ``8 * TERMS`` bits of x: the tensor cores see x as that many bf16 parts."""
    # By way of float32: the interpreter casts only that to bf16 by value.
    m = m.to(tl.float32).to(tl.bfloat16)
    x = x.to(tl.float32)
    b_y = tl.zeros(x.shape, dtype=tl.float32)
    for _ in tl.static_range(TERMS - 1):
        b_x = upper(x)
        b_y = tl.dot(m, b_x.to(tl.bfloat16), b_y)
        x -= b_x
    return tl.dot(m, x.to(tl.bfloat16), b_y)


@triton.jit
def load_gate(p_g, m_g, LOWEST: tl.constexpr):
    """Gates, at least LOWEST, 0 outside the sequence."""
    return tl.maximum(tl.load(p_g, mask=m_g, other=0.0).to(tl.float32), LOWEST)


@triton.jit
def load_gamma(gamma, i_b, i_h, stride_gamma_b, EXACT: tl.constexpr):
    """The constant gate of a head, base 2 (EXACT: as it is); finite, so that no tokens' worth of it is 0."""
    b_gamma = tl.maximum(tl.load(gamma + i_b * stride_gamma_b + i_h).to(tl.float32), CLOSED)
    return b_gamma if EXACT else b_gamma * LOG2E


@triton.jit
def power(x, EXACT: tl.constexpr):
    """The decay of which x is the logarithm, base 2, or EXACT the natural one, at most 0.

    A product with LOG2E would be rounded like any number of x's size: a relative error of the decay that grows with x.
    So multiples of ln 2, of which exp2 is exact, are taken off first, without an error. Products are fused by name, for
    the same bits in every kernel.
    """
    if EXACT:
        x = tl.maximum(x, NOTHING)
        n = tl.floor(tl.fma(x, LOG2E, 0.5))
        return tl.exp2(tl.fma(n, -LN2_REST, tl.fma(n, -LN2, x)) * LOG2E) * tl.exp2(n)
    return tl.exp2(x)


@triton.jit
def decay(x, EXACT: tl.constexpr):
    """``exp(x)`` of a sum of gates."""
    return power(x if EXACT else x * LOG2E, EXACT)


@triton.jit
def span(b_gamma, EXACT: tl.constexpr):
    """How many tokens of a constant gate leave anything."""
    b_gamma *= LOG2E if EXACT else 1.0
    return tl.minimum(NOTHING / tl.minimum(b_gamma, -1e-6), 1e9).to(tl.int32)


@triton.jit
def in_turn(OVERLAP: tl.constexpr):
    """Where a program begins that may share the GPU with other launches.

    OVERLAP, a sum: 1 the next launch may begin once all programs have come here; 2 this one may have begun during the
    one before, and ends after it; 4 it may have begun, and waits here for the end of the one before.
    """
    if OVERLAP // 4 % 2 == 1:
        gdc_wait()
    # Not before the wait: what begins then may rely on all that came before this launch.
    if OVERLAP % 2 == 1:
        gdc_launch_dependents()


@triton.jit
def level(o_p, m):
    """One level of halving: blocks of 2m tokens, whose later half looks back at its earlier half; m a power of two.

    Returns ``later`` ``[BT]``, which half a token is in; ``m_sum`` ``[BT, BT]``, whose gates lie between a token and
    the boundary of the halves; ``m_pair`` ``[BT, BT]``, which pairs the level covers (row looks at column or back).
    """
    later = (o_p & m) != 0
    apart = o_p[:, None] ^ o_p[None, :]
    m_sum = (apart < m) & tl.where(later[:, None], o_p[None, :] <= o_p[:, None], o_p[None, :] > o_p[:, None])
    m_pair = (apart >= m) & (apart < 2 * m)
    return later, m_sum, m_pair


@triton.jit
def clear_rows(o, begin, end, i_h, o_v, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Zeros for a tile of V of a head's rows of a contiguous ``[rows, H, V]``."""
    o_t = tl.arange(0, BT)
    for i_t in range(begin, end, BT):
        o_o = ((i_t + o_t[:, None]) * H + i_h) * V + o_v[None, :]
        m_o = (i_t + o_t < end)[:, None] & (o_v < V)[None, :]
        tl.store(o + o_o, tl.zeros([BT, BV], dtype=o.dtype.element_ty), mask=m_o)
