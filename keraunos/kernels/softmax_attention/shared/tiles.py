"""Tiles of softmax attention in Triton: which blocks they see, their logits, and the sums that queries keep.

A program holds a tile of rows and walks over the blocks of the other side that the rows may see: BT queries over blocks
of BS keys, or for the gradients of keys BS keys over blocks of BT queries. Blocks in which everything is visible have a
loop of their own, without a single comparison; what is nowhere visible is in no loop.

Logits are in units: ``b_x * unit`` is the logit, so that the scale is part of one fused multiply-add. With a cap,
``b_x`` is the hyperbolic tangent; with a bias, the unit is 1. BOUNDED: a cap keeps the logits so small that the weights
need no running maximum, and sums no rescaling. Offsets inside a tile are of 32 bits, those of tiles of 64. Strides that
are no constants come in units of UNIT, a constant, as in the linear recurrence's kernels.

Logits are base 2, which saves a multiplication for each. EXACT, of float32, they are natural: a bias or a sink of
hundreds would be rounded on the way to base 2, and what is lost is a factor of its weight. And a query's sum is kept
as a maximum ``top`` near its logits, and the sum relative to it, since the log of a sum has few digits behind the point
where it is tens. The running maximum is the rounded logit: a fused ``maximum * unit - logit`` is not 0 where nothing
but rounding is between the two, and would scale the sums at every block.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Offsets are no further from 0, so that sums with windows and places stay within 32 bits.
FAR = tl.constexpr(1 << 29)


@triton.jit
def load_rows(p, stride: tl.constexpr, left, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
              MASKED: tl.constexpr, N: tl.constexpr = 0, stride_n: tl.constexpr = 0, m_some=None):
    """``[ROWS, BD]`` from p on; zeros past ``left`` rows (where MASKED) and past D dimensions.

    N: of that many heads in turn, by offsets of 64 bits. m_some: the rows that are read, if not all; the others are 0.
    """
    o_r, o_d = tl.arange(0, ROWS)[:, None], tl.arange(0, BD)[None, :]
    SOME: tl.constexpr = m_some is not None
    m_d = o_d < D
    if SOME:
        m_d = m_d & m_some[:, None]
    if N:
        o_n, o_r = o_r // (ROWS // N), o_r % (ROWS // N)
        p_x = p + (o_n.to(tl.int64) * stride_n + o_r.to(tl.int64) * stride) + o_d
    elif BD <= 128:
        # PASS rows are what 128 threads load at once: between a thread's rows offsets are constants, so that a loop has
        # one address of each array. From one product it has one for each row, unless another array has the stride.
        # Wide heads were no faster so.
        PASS: tl.constexpr = 16384 // (BD * p.dtype.element_ty.primitive_bitwidth)
        p_x = p + (o_r % PASS * stride + o_d) + o_r // PASS * (PASS * stride)
    else:
        p_x = p + o_r * stride + o_d
    if MASKED:
        if D < BD or SOME:
            b_x = tl.load(p_x, mask=(o_r < left) & m_d, other=0.0)
        else:
            b_x = tl.load(p_x, mask=o_r < left, other=0.0)
    elif D < BD or SOME:
        b_x = tl.load(p_x, mask=m_d, other=0.0)
    else:
        b_x = tl.load(p_x)
    return b_x


@triton.jit
def store_rows(p, b_x, stride: tl.constexpr, left, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Store rows, as :func:`load_rows` loads them."""
    o_r, o_d = tl.arange(0, ROWS)[:, None], tl.arange(0, BD)[None, :]
    tl.store(p + o_r * stride + o_d, b_x.to(p.dtype.element_ty), mask=(o_r < left) & (o_d < D))


@triton.jit
def bounds(first, last, n, before, after, BEFORE: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of n places that any of ``first`` to ``last`` sees, and in the middle those that all of them see.

    Place i sees ``i - before`` to ``i + after``, unlimited where BEFORE or AFTER is off.
    """
    lo, hi, whole_lo, whole_hi = first * 0, first * 0 + n, first * 0, first * 0 + n
    if BEFORE:
        lo, whole_lo = tl.maximum(first - before, 0), tl.maximum(last - before, 0)
    if AFTER:
        hi, whole_hi = tl.minimum(last + after + 1, n), tl.minimum(first + after + 1, n)
    lo = lo // BLOCK
    hi = tl.maximum(tl.cdiv(hi, BLOCK), lo)
    whole_lo = tl.minimum(tl.maximum(tl.cdiv(whole_lo, BLOCK), lo), hi)
    whole_hi = tl.minimum(tl.maximum(whole_hi // BLOCK, whole_lo), hi)
    return lo, hi, whole_lo, whole_hi


@triton.jit
def moved(left, right, offsets, i_b, OFFSET: tl.constexpr):
    """How far queries of a row see, counted from their numbers; with OFFSET, their places are that much further on."""
    if OFFSET:
        offset = tl.minimum(tl.maximum(tl.load(offsets + i_b), -FAR), FAR).to(tl.int32)
        left, right = left - offset, right + offset
    return left, right


@triton.jit
def spread(b_id, m_in):
    """``(lowest id that is no padding, highest, lowest of all)``; the highest is below 0 where all is padding."""
    highest = tl.max(tl.where(m_in, b_id, -1), 0)
    lowest = tl.min(tl.where(m_in & (b_id >= 0), b_id, highest), 0)
    return lowest, highest, tl.min(tl.where(m_in, b_id, highest), 0)


@triton.jit
def spread_kernel(ids, stride_b, n, NB, spreads, BLOCK: tl.constexpr):
    """:func:`spread` of every block of ids ``[B, n]``: ``[B, 3, NB]``."""
    i_b, i_n = tl.program_id(0) // NB, tl.program_id(0) % NB
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    b_id = tl.load(ids + i_b.to(tl.int64) * stride_b + o_n, mask=o_n < n, other=-1)
    lowest, highest, least = spread(b_id, o_n < n)
    p = spreads + i_b.to(tl.int64) * 3 * NB + i_n
    tl.store(p, lowest.to(spreads.dtype.element_ty))
    tl.store(p + NB, highest.to(spreads.dtype.element_ty))
    tl.store(p + 2 * NB, least.to(spreads.dtype.element_ty))


@triton.jit
def mask_kernel(mask, stride_b, stride_h, stride_t, HM, T, S, flags, BT: tl.constexpr, BS: tl.constexpr):
    """Of every block of a mask ``[B, HM, T, S]``: 0 if nothing in it is visible, 2 if everything, else 1."""
    NT, NS = tl.cdiv(T, BT), tl.cdiv(S, BS)
    i_s, i_t, i_bh = tl.program_id(0) % NS, tl.program_id(0) // NS % NT, tl.program_id(0) // NS // NT
    o_t, o_s = (i_t * BT + tl.arange(0, BT))[:, None], (i_s * BS + tl.arange(0, BS))[None, :]
    m_in = (o_t < T) & (o_s < S)
    mask += (i_bh // HM).to(tl.int64) * stride_b + (i_bh % HM).to(tl.int64) * stride_h
    b_seen = (tl.load(mask + o_t.to(tl.int64) * stride_t + o_s, mask=m_in, other=0) != 0).to(tl.int32)
    b_any = tl.max(tl.max(tl.where(m_in, b_seen, 0), 1), 0)
    b_all = tl.min(tl.min(tl.where(m_in, b_seen, 1), 1), 0)
    tl.store(flags + tl.program_id(0), (b_any + b_all).to(tl.int8))


@triton.jit
def narrowed(lo, hi, whole_lo, whole_hi, b_id, m_in, spreads, NB, flags, stride_flags, SEGMENTS: tl.constexpr,
             MASK: tl.constexpr, BC: tl.constexpr):
    """:func:`bounds` without the blocks at both ends that segments or the mask hide.

    SEGMENTS: the rows' ids are ``b_id``, the blocks' in ``spreads``. MASK: ``flags`` says what of a block is visible.
    The middle is what shows everything to all rows, if that is one run of blocks.
    """
    lowest, highest, least = spread(b_id, m_in) if SEGMENTS else (0, 0, 0)
    seen_lo, seen_hi, one_lo, one_hi, count = hi, lo, hi, lo, hi * 0
    for first in range(lo, hi, BC):
        o_n = first + tl.arange(0, BC)
        m_n = o_n < hi
        m_one = m_n & (o_n >= whole_lo) & (o_n < whole_hi)
        if SEGMENTS:
            b_low = tl.load(spreads + o_n, mask=m_n, other=0)
            b_high = tl.load(spreads + NB + o_n, mask=m_n, other=-1)
            b_least = tl.load(spreads + 2 * NB + o_n, mask=m_n, other=-1)
            m_one = m_one & (least == highest) & (highest >= 0) & (b_least == highest) & (b_high == highest)
            m_n = m_n & (b_high >= 0) & (highest >= 0) & (b_low <= highest) & (b_high >= lowest)
        if MASK:
            b_flag = tl.load(flags + o_n.to(tl.int64) * stride_flags, mask=m_n, other=0).to(tl.int32)
            m_one = m_one & (b_flag == 2)
            m_n = m_n & (b_flag > 0)
        seen_lo = tl.minimum(seen_lo, tl.min(tl.where(m_n, o_n, hi), 0))
        seen_hi = tl.maximum(seen_hi, tl.max(tl.where(m_n, o_n + 1, lo), 0))
        one_lo = tl.minimum(one_lo, tl.min(tl.where(m_one, o_n, hi), 0))
        one_hi = tl.maximum(one_hi, tl.max(tl.where(m_one, o_n + 1, lo), 0))
        count += tl.sum(m_one.to(tl.int32), 0)
    seen_hi = tl.maximum(seen_hi, seen_lo)
    one_run = (count > 0) & (count == one_hi - one_lo)
    return seen_lo, seen_hi, tl.where(one_run, one_lo, seen_lo), tl.where(one_run, one_hi, seen_lo)


@triton.jit
def tanh(b_x, CAP: tl.constexpr):
    """With CAP 1 of ``b_x``, to 2.2 ulp; else of ``b_x / (2 LOG2E)``, exact next to 1, 3: by NVIDIA's reciprocal."""
    b_y = tl.exp2(b_x * (2.0 * LOG2E) if CAP == 1 else b_x) + 1.0
    if CAP == 3:
        b_y = 1.0 - 2.0 * tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_y], tl.float32, True, 1)
    else:
        b_y = 1.0 - 2.0 / b_y
    if CAP == 1:
        # Near 0 that is a difference of nearly equal numbers, and its exponential and quotient are approximations. This
        # is the odd polynomial of least relative error there, 5e-9.
        b_x2 = b_x * b_x
        b_near = b_x + b_x * b_x2 * (-0.333332954 + b_x2 * (0.133323442 + b_x2 * (-0.0538797788 + b_x2 * (
            0.0214865892 + b_x2 * (-0.00794600652 + b_x2 * (0.00230129231 - b_x2 * 0.000358431455))))))
        b_y = tl.where(tl.abs(b_x) < 1.0, b_near, b_y)
    return b_y


@triton.jit
def power(b_x, EXACT: tl.constexpr):
    """The weight of a logit, to the logits' base."""
    return tl.exp(b_x) if EXACT else tl.exp2(b_x)


@triton.jit
def sink_power(b_sink, b_top, EXACT: tl.constexpr):
    """The weight of natural logits ``b_sink`` relative to ``b_top``, which is to the logits' base.

    EXACT: to some ulp, however far they are apart. The difference is that of both numbers and what its rounding lost;
    of its product with log2(e), the leading 12 bits of both factors make the whole part, which is then exact.
    """
    if not EXACT:
        return tl.exp2(b_sink * LOG2E - b_top)
    LEADING: tl.constexpr = 2954 / 2048
    b_sink, b_top = tl.maximum(b_sink, -1e30), tl.minimum(b_top, 1e30)
    b_x = b_sink - b_top
    b_back = b_sink - b_x
    b_lost = tl.where(b_x > -200.0, (b_sink - (b_x + b_back)) + (b_back - b_top), 0.0)
    b_x = tl.maximum(b_x, -200.0)  # the weight is 0
    b_high = (b_x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    b_rest = b_high * (LOG2E - LEADING) + (b_x - b_high + b_lost) * LOG2E
    return tl.exp2(b_high * LEADING) * tl.exp2(b_rest)


@triton.jit
def load_log(p, o_t, T, AXIS: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """``(top, factor)`` of queries, with a new axis: a weight is ``power(logit - top) factor``.

    The top is the log of a query's sum, and the factor 1, or where EXACT they are kept apart. Past T queries (where
    MASKED) the top is inf.
    """
    b_top = tl.load(p, mask=o_t < T, other=float("inf")) if MASKED else tl.load(p)
    b_one = 1.0
    if EXACT:
        b_one = tl.expand_dims(1.0 / tl.load(p + T, mask=o_t < T, other=1.0), AXIS)
    return tl.expand_dims(b_top, AXIS), b_one


@triton.jit
def mixed(x):
    """A permutation of the numbers of 32 bits; ``contract.keeps`` says how the dropout follows from it."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def kept(seed, i_bh, o_t, o_s, threshold):
    """Which weights of a tile the dropout keeps."""
    head, query = tl.load(seed).to(tl.uint32), tl.load(seed + 1).to(tl.uint32)
    row = mixed(mixed(head + i_bh.to(tl.uint32)) ^ mixed(query + o_t.to(tl.uint32)))
    return (mixed(row ^ mixed(o_s.to(tl.uint32) + 0x1E3779B9)) >> 1).to(tl.int32) >= threshold


@triton.jit
def visible(
    o_t, o_s, b_own, b_other, bias, mask, stride_biast, stride_maskt, left, right, T, S, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
):
    """``(the bias, which keys are seen)`` of a tile, where anything but a bias of -inf hides some.

    o_t, o_s, b_own, b_other: places and ids of queries and keys, with an axis of 1 so that they broadcast to the tile.
    """
    m_seen = (o_t < T) & (o_s < S)
    b_bias = 0.0
    if BIAS:
        b_bias = tl.load(bias + o_t.to(tl.int64) * stride_biast + o_s, mask=m_seen, other=0.0)
    if MASKED:
        if MASK:
            p_mask = mask + o_t.to(tl.int64) * stride_maskt + o_s
            m_seen = m_seen & (tl.load(p_mask, mask=m_seen, other=0) != 0)
        if RIGHT:
            m_seen = m_seen & (o_s <= o_t + right)
        if LEFT:
            m_seen = m_seen & (o_s >= o_t - left)
        if SEGMENTS:
            m_seen = m_seen & (b_own == b_other) & (b_own >= 0)
    return b_bias, m_seen


@triton.jit
def some(m_seen, AXIS: tl.constexpr):
    """Which rows or columns of a tile have anything that is seen: what the others hold must not reach a product."""
    return tl.max(m_seen.to(tl.int32), AXIS) > 0


@triton.jit
def reached(o_n, b_id, ends, before, after, BEFORE: tl.constexpr, AFTER: tl.constexpr, SEGMENTS: tl.constexpr):
    """:func:`some` of places ``o_n`` with ids ``b_id``, by a tile's ``ends``: its first and last row, and their ids'.

    It needs few registers, and takes ids between the lowest and the highest for ids of the tile.
    """
    first, last, lowest, highest = ends
    m_some = o_n >= 0
    if BEFORE:
        m_some = m_some & (o_n >= first - before)
    if AFTER:
        m_some = m_some & (o_n <= last + after)
    if SEGMENTS:
        m_some = m_some & (b_id >= 0) & (b_id >= lowest) & (b_id <= highest)
    return m_some


@triton.jit
def scores(b_x, b_bias, m_seen, inner, unit, CAP: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
           EXACT: tl.constexpr):
    """``(logits in units, -inf where not visible; their tanh)`` of products ``b_x`` and of :func:`visible`."""
    if CAP:
        b_x = tanh(b_x * inner, CAP)
    b_tanh = b_x
    if BIAS:
        b_x = b_x * unit + (b_bias.to(tl.float32) if EXACT else b_bias.to(tl.float32) * LOG2E)
    if MASKED:
        b_x = tl.where(m_seen, b_x, float("-inf"))
    return b_x, b_tanh
