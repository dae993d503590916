"""The Triton kernel of softmax attention's forward."""

import triton
import triton.language as tl

from keraunos.kernels.softmax_attention.shared.tiles import (
    LOG2E,
    bounds,
    kept,
    load_rows,
    moved,
    narrowed,
    power,
    reached,
    scores,
    sink_power,
    some,
    spread,
    store_rows,
    visible,
)


@triton.jit
def attend(
    acc, b_max, b_sum, b_q, b_own, o_t, ends, i_s, i_bh, k, v, key_ids, bias, mask, seed, stride_biast, stride_maskt,
    inner, unit, threshold, left, right, T, S,
    K: tl.constexpr, V: tl.constexpr, stride_kt: tl.constexpr, stride_vt: tl.constexpr, BS: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SEGMENTS: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):
    """One block of keys: the online softmax's step."""
    s0 = tl.full([], 0, tl.int64) + i_s * BS
    o_n = i_s * BS + tl.arange(0, BS)
    o_s = o_n[None, :]
    b_id = tl.load(key_ids + o_n, mask=o_n < S, other=-1) if SEGMENTS and MASKED else o_n
    b_k = load_rows(k + s0 * stride_kt, stride_kt, S - i_s * BS, BS, K, BK, MASKED)
    b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    EXACT: tl.constexpr = b_q.dtype == tl.float32
    b_bias, m_seen = visible(o_t, o_s, b_own, b_id[None, :], bias, mask, stride_biast, stride_maskt, left, right, T, S,
                             LEFT, RIGHT, SEGMENTS, BIAS, MASK, MASKED)
    b_x, _ = scores(b_x, b_bias, m_seen, inner, unit, CAP, BIAS, MASKED, EXACT)
    factor = 1.0 if BIAS else unit
    if BOUNDED:
        b_p = power(b_x * factor, EXACT)
        b_sum += tl.sum(b_p, 1)
    else:
        before = factor if EXACT else 1.0
        after = 1.0 if EXACT else factor
        b_top = tl.maximum(b_max, tl.max(b_x, 1) * before)
        b_zero = tl.where(b_top == float("-inf"), 0.0, b_top) * after
        b_p = power(b_x * factor - b_zero[:, None], EXACT)
        b_decay = power(b_max * after - b_zero, EXACT)
        b_max, b_sum, acc = b_top, b_sum * b_decay + tl.sum(b_p, 1), acc * b_decay[:, None]
    if DROPOUT:
        b_p = tl.where(kept(seed, i_bh, o_t, o_s, threshold), b_p, 0.0)
    m_some = None
    if MASK and MASKED:
        m_some = some(m_seen, 0)
    elif MASKED and (LEFT or RIGHT or SEGMENTS):
        m_some = reached(o_n, b_id, ends, left, right, LEFT, RIGHT, SEGMENTS)
    b_v = load_rows(v + s0 * stride_vt, stride_vt, S - i_s * BS, BS, V, BV, MASKED, 0, 0, m_some)
    acc = tl.dot(b_p.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
    return acc, b_max, b_sum


@triton.jit
def forward_kernel(
    q, k, v, bias, sinks, mask, flags, query_ids, key_ids, spreads, seed,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_biasb, stride_biash, stride_biast, stride_maskb, stride_maskh, stride_maskt,
    stride_flagsb, stride_sinksh, stride_queryb, stride_keyb,
    inner, unit, keep, threshold, left, right, offsets, T, S,
    o, lse,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, RM: tl.constexpr,
    RN: tl.constexpr, stride_qt: tl.constexpr, stride_kt: tl.constexpr, stride_vt: tl.constexpr, UNIT: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, SINKS: tl.constexpr,
    CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, OFFSET: tl.constexpr, BOUNDED: tl.constexpr, NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The output, and for each query the log of its sum, base 2; inf where it has none. EXACT: its top and its sum.

    Heads of arrays that query heads share: R query heads for each of keys and values, RB of the bias, RM of the mask,
    RN of the sinks. NEGATIVE: the scale is, and ``unit`` its magnitude.
    """
    NT = tl.cdiv(T, BT)
    # Of a causal call, the longest walks come first: those of all heads that share keys, which then read the same keys
    # at once, and of which, if there are few other heads, none begins late.
    i_t = NT - 1 - tl.program_id(0) // R % NT
    i_bh = tl.program_id(0) // (R * NT) * R + tl.program_id(0) % R
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    t0 = i_t * BT
    o_r = t0 + tl.arange(0, BT)
    o_t = o_r[:, None]
    q += (i_b * stride_qb + i_h.to(tl.int64) * stride_qh) * UNIT + t0.to(tl.int64) * stride_qt
    k += (i_b * stride_kb + (i_h // R).to(tl.int64) * stride_kh) * UNIT
    v += (i_b * stride_vb + (i_h // R).to(tl.int64) * stride_vh) * UNIT
    if BIAS:
        bias += i_b * stride_biasb + (i_h // RB).to(tl.int64) * stride_biash
    if MASK:
        mask += i_b * stride_maskb + (i_h // RM).to(tl.int64) * stride_maskh
    b_q = load_rows(q, stride_qt, T - t0, BT, K, BK, True)
    if NEGATIVE:
        b_q = (-b_q.to(tl.float32)).to(b_q.dtype)
    left, right = moved(left, right, offsets, i_b, OFFSET)
    lo, hi, whole_lo, whole_hi = bounds(t0, tl.minimum(t0 + BT, T) - 1, S, left, right, LEFT, RIGHT, BS)
    b_id, b_own, NS = o_r, o_t, tl.cdiv(S, BS)
    if SEGMENTS:
        key_ids += i_b * stride_keyb
        spreads += i_b * 3 * NS
        b_id = tl.load(query_ids + i_b * stride_queryb + o_r, mask=o_r < T, other=-1)
        b_own = b_id[:, None]
    if MASK:
        flags += ((i_b * stride_flagsb + i_h // RM) * NT + i_t) * NS
    if SEGMENTS or MASK:
        lo, hi, whole_lo, whole_hi = narrowed(
            lo, hi, whole_lo, whole_hi, b_id, o_r < T, spreads, NS, flags, 1, SEGMENTS, MASK, 128
        )
    lowest, highest, _ = spread(b_id, o_r < T) if SEGMENTS else (0, 0, 0)
    ends = t0, tl.minimum(t0 + BT, T) - 1, lowest, highest
    acc = tl.zeros([BT, BV], tl.float32)
    b_max, b_sum = tl.full([BT], 0.0 if BOUNDED else float("-inf"), tl.float32), tl.zeros([BT], tl.float32)
    n_whole = whole_hi - whole_lo
    for i in range(lo, hi - n_whole):
        acc, b_max, b_sum = attend(
            acc, b_max, b_sum, b_q, b_own, o_t, ends, tl.where(i < whole_lo, i, i + n_whole), i_bh, k, v, key_ids, bias,
            mask, seed, stride_biast, stride_maskt, inner, unit, threshold, left, right, T, S, K, V, stride_kt,
            stride_vt, BS, BK, BV, CAP, LEFT, RIGHT, SEGMENTS, BIAS, MASK, DROPOUT, BOUNDED, PRECISION, True,
        )
    for i in range(whole_lo, whole_hi):
        acc, b_max, b_sum = attend(
            acc, b_max, b_sum, b_q, b_own, o_t, ends, i, i_bh, k, v, key_ids, bias, mask,
            seed, stride_biast, stride_maskt, inner, unit, threshold, left, right, T, S, K, V, stride_kt, stride_vt, BS,
            BK, BV, CAP, LEFT, RIGHT, SEGMENTS, BIAS, MASK, DROPOUT, BOUNDED, PRECISION, False,
        )
    EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    b_top = b_max * (1.0 if BIAS or EXACT else unit)
    if SINKS:
        o_n = tl.arange(0, BN)
        b_sink = tl.load(sinks + (i_h // RN) * stride_sinksh + o_n, mask=o_n < SINKS, other=float("-inf"))
        b_sink = b_sink.to(tl.float32)
        # The top stays near the keys' logits, whose differences from it then lose no digits, as long as the sinks' part
        # of the sum is in range.
        b_all = tl.maximum(b_top, (tl.max(b_sink, 0) - 80.0) * (1.0 if EXACT else LOG2E))
        b_all = tl.where(b_all == float("-inf"), 0.0, b_all)
        b_decay = power(b_top - b_all, EXACT)
        b_sum = b_sum * b_decay + tl.sum(sink_power(b_sink[None, :], b_all[:, None], EXACT), 1)
        acc *= b_decay[:, None]
        b_top = b_all
    # BOUNDED, the sum of a query that sees no key may be smaller, of its sinks, and have no finite reciprocal.
    m_any = b_sum > 1e-30
    b_sum = tl.where(m_any, b_sum, 1.0)
    if EXACT:
        lse += i_bh.to(tl.int64) * 2 * T + o_r
        tl.store(lse, tl.where(m_any, b_top, float("inf")), mask=o_r < T)
        tl.store(lse + T, b_sum, mask=o_r < T)
    else:
        b_lse = tl.where(m_any, b_top + tl.log2(b_sum), float("inf"))
        tl.store(lse + i_bh.to(tl.int64) * T + o_r, b_lse, mask=o_r < T)
    o += ((i_b * T + t0) * H + i_h) * V
    store_rows(o, acc * (keep / b_sum)[:, None], H * V, T - t0, BT, V, BV)
