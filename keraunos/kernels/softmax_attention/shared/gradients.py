"""The Triton kernels of softmax attention's gradients: each weight is computed again, in every kernel that needs it.

With ``p`` the weights before the dropout, ``keep`` its factors, and ``mean`` the sum over keys of ``p dp``, which is
that of ``o do`` over dimensions::

    dv = (keep p)^T do        dp = keep (do v^T)        dx = p (dp - mean)
    dq = scale dz k           dk = scale dz^T q         dz = dx (1 - tanh^2)

No kernel adds to what another has written: who owns a row sums all of it. So the same call gives the same bits.
"""

import triton
import triton.language as tl

from keraunos.kernels.softmax_attention.shared.tiles import (
    bounds,
    kept,
    load_log,
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
def mean_kernel(
    o, do, lse, sinks, stride_dob, stride_doh, stride_sinksh, T, mean, dsinks,
    H: tl.constexpr, V: tl.constexpr, RN: tl.constexpr, stride_dot: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, SINKS: tl.constexpr,
):
    """Each query's mean ``[B, H, T]``, and of every BT queries the gradient of the sinks ``[B, H, NT, SINKS]``."""
    NT = tl.cdiv(T, BT)
    i_t, i_bh = tl.program_id(0) % NT, tl.program_id(0) // NT
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    t0 = i_t * BT
    o_t = t0 + tl.arange(0, BT)
    b_o = load_rows(o + ((i_b * T + t0) * H + i_h) * V, H * V, T - t0, BT, V, BV, True)
    p_do = do + (i_b * stride_dob + i_h.to(tl.int64) * stride_doh) * UNIT + t0.to(tl.int64) * stride_dot
    b_do = load_rows(p_do, stride_dot, T - t0, BT, V, BV, True)
    b_mean = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    row = i_bh.to(tl.int64) * T + o_t
    tl.store(mean + row, b_mean, mask=o_t < T)
    if SINKS:
        o_n = tl.arange(0, BN)
        b_sink = tl.load(sinks + (i_h // RN) * stride_sinksh + o_n, mask=o_n < SINKS, other=float("-inf"))
        EXACT: tl.constexpr = do.dtype.element_ty == tl.float32
        p_lse = lse + (i_bh.to(tl.int64) * 2 * T + o_t if EXACT else row)
        b_top, b_one = load_log(p_lse, o_t, T, 1, True, EXACT)
        b_d = tl.sum(sink_power(b_sink.to(tl.float32)[None, :], b_top, EXACT) * b_one * b_mean[:, None], 0)
        tl.store(dsinks + tl.program_id(0).to(tl.int64) * SINKS + o_n, -b_d, mask=o_n < SINKS)


@triton.jit
def sum_kernel(x, B, stride_b, stride_g, n, y, N: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """``[groups, N]``: the sums over B and over n rows of ``x[b, group, row, N]``."""
    i_g = tl.program_id(0)
    o_r, o_n = tl.arange(0, BR)[:, None], tl.arange(0, BN)
    acc = tl.zeros([BR, BN], tl.float32)
    for i_b in range(B):
        p = x + (tl.full([], 0, tl.int64) + i_b) * stride_b + i_g.to(tl.int64) * stride_g
        for first in range(0, n, BR):
            m_x = (first + o_r < n) & (o_n[None, :] < N)
            acc += tl.load(p + (first + o_r).to(tl.int64) * N + o_n[None, :], mask=m_x, other=0.0)
    tl.store(y + i_g * N + o_n, tl.sum(acc, 0).to(y.dtype.element_ty), mask=o_n < N)


@triton.jit
def to_queries(
    dq, b_q, b_do, b_top, b_one, b_mean, b_own, o_t, ends, i_s, i_bh, k, v, key_ids, bias, mask, seed, stride_biast,
    stride_maskt, inner, unit, keep, threshold, left, right, T, S,
    K: tl.constexpr, V: tl.constexpr, stride_kt: tl.constexpr, stride_vt: tl.constexpr, BS: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SEGMENTS: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the part of one block of keys to the gradient of the queries."""
    EXACT: tl.constexpr = b_q.dtype == tl.float32
    s0 = tl.full([], 0, tl.int64) + i_s * BS
    o_n = i_s * BS + tl.arange(0, BS)
    o_s = o_n[None, :]
    b_id = tl.load(key_ids + o_n, mask=o_n < S, other=-1) if SEGMENTS and MASKED else o_n
    m_some = None
    if MASK and MASKED:
        b_bias, m_seen = visible(o_t, o_s, b_own, b_id[None, :], bias, mask, stride_biast, stride_maskt, left, right, T,
                                 S, LEFT, RIGHT, SEGMENTS, BIAS, MASK, MASKED)
        m_some = some(m_seen, 0)
    elif MASKED and (LEFT or RIGHT or SEGMENTS):
        m_some = reached(o_n, b_id, ends, left, right, LEFT, RIGHT, SEGMENTS)
    b_k = load_rows(k + s0 * stride_kt, stride_kt, S - i_s * BS, BS, K, BK, MASKED, 0, 0, m_some)
    b_v = load_rows(v + s0 * stride_vt, stride_vt, S - i_s * BS, BS, V, BV, MASKED, 0, 0, m_some)
    b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    if not (MASK and MASKED):
        b_bias, m_seen = visible(o_t, o_s, b_own, b_id[None, :], bias, mask, stride_biast, stride_maskt, left, right, T,
                                 S, LEFT, RIGHT, SEGMENTS, BIAS, MASK, MASKED)
    b_x, b_tanh = scores(b_x, b_bias, m_seen, inner, unit, CAP, BIAS, MASKED, EXACT)
    b_p = power(b_x * (1.0 if BIAS else unit) - b_top, EXACT) * b_one
    if DROPOUT:
        b_dp = tl.where(kept(seed, i_bh, o_t, o_s, threshold), b_dp * keep, 0.0)
    b_dz = b_p * (b_dp - b_mean)
    if CAP:
        b_dz *= 1.0 - b_tanh * b_tanh
    return tl.dot(b_dz.to(b_k.dtype), b_k, dq, input_precision=PRECISION)


@triton.jit
def query_kernel(
    q, k, v, bias, mask, flags, query_ids, key_ids, spreads, seed, do, lse, mean,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_dob, stride_doh,
    stride_biasb, stride_biash, stride_biast, stride_maskb, stride_maskh, stride_maskt, stride_flagsb, stride_queryb,
    stride_keyb,
    scale, inner, unit, keep, threshold, left, right, offsets, T, S,
    dq,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, RM: tl.constexpr,
    stride_qt: tl.constexpr, stride_kt: tl.constexpr, stride_vt: tl.constexpr, stride_dot: tl.constexpr,
    UNIT: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, OFFSET: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr,
):
    """The gradient of BT queries, which walk over the keys as in the forward."""
    NT = tl.cdiv(T, BT)
    i_t = NT - 1 - tl.program_id(0) // R % NT
    i_bh = tl.program_id(0) // (R * NT) * R + tl.program_id(0) % R
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    t0 = i_t * BT
    o_r = t0 + tl.arange(0, BT)
    o_t = o_r[:, None]
    q += (i_b * stride_qb + i_h.to(tl.int64) * stride_qh) * UNIT + t0.to(tl.int64) * stride_qt
    do += (i_b * stride_dob + i_h.to(tl.int64) * stride_doh) * UNIT + t0.to(tl.int64) * stride_dot
    k += (i_b * stride_kb + (i_h // R).to(tl.int64) * stride_kh) * UNIT
    v += (i_b * stride_vb + (i_h // R).to(tl.int64) * stride_vh) * UNIT
    if BIAS:
        bias += i_b * stride_biasb + (i_h // RB).to(tl.int64) * stride_biash
    if MASK:
        mask += i_b * stride_maskb + (i_h // RM).to(tl.int64) * stride_maskh
    b_q = load_rows(q, stride_qt, T - t0, BT, K, BK, True)
    if NEGATIVE:
        b_q = (-b_q.to(tl.float32)).to(b_q.dtype)
    b_do = load_rows(do, stride_dot, T - t0, BT, V, BV, True)
    EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    row = i_bh.to(tl.int64) * T + o_r
    b_top, b_one = load_log(lse + (i_bh.to(tl.int64) * 2 * T + o_r if EXACT else row), o_r, T, 1, True, EXACT)
    b_mean = tl.load(mean + row, mask=o_r < T, other=0.0)[:, None]
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
    b_dq = tl.zeros([BT, BK], tl.float32)
    n_whole = whole_hi - whole_lo
    for i in range(lo, hi - n_whole):
        b_dq = to_queries(
            b_dq, b_q, b_do, b_top, b_one, b_mean, b_own, o_t, ends, tl.where(i < whole_lo, i, i + n_whole), i_bh, k, v,
            key_ids, bias, mask, seed, stride_biast, stride_maskt, inner, unit, keep, threshold, left, right, T, S, K,
            V, stride_kt, stride_vt, BS, BK, BV, CAP, LEFT, RIGHT, SEGMENTS, BIAS, MASK, DROPOUT, PRECISION, True,
        )
    for i in range(whole_lo, whole_hi):
        b_dq = to_queries(
            b_dq, b_q, b_do, b_top, b_one, b_mean, b_own, o_t, ends, i, i_bh, k, v, key_ids,
            bias, mask, seed, stride_biast, stride_maskt, inner, unit, keep, threshold, left, right, T, S, K, V,
            stride_kt, stride_vt, BS, BK, BV, CAP, LEFT, RIGHT, SEGMENTS, BIAS, MASK, DROPOUT, PRECISION, False,
        )
    store_rows(dq + ((i_b * T + t0) * H + i_h) * K, b_dq * scale, H * K, T - t0, BT, K, BK)


@triton.jit
def to_keys(
    dk, dv, b_k, b_v, b_other, o_s, i_t, i_bh, q, do, lse, mean, query_ids, bias, mask, seed, stride_biast,
    stride_maskt, inner, unit, keep, threshold, left, right, T, S,
    K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, stride_qt: tl.constexpr, stride_dot: tl.constexpr,
    stride_qn: tl.constexpr, stride_don: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the part of a block of queries, of N heads, to the gradients of keys and values (tiles: keys by queries)."""
    BQ: tl.constexpr = BT // N if N else BT
    t0 = tl.full([], 0, tl.int64) + i_t * BQ
    o_n, o_r = tl.arange(0, BT) // BQ, i_t * BQ + tl.arange(0, BT) % BQ
    o_t = o_r[None, :]
    b_id = tl.load(query_ids + o_r, mask=o_r < T, other=-1) if SEGMENTS and MASKED else o_r
    m_some = None
    if MASK and MASKED:
        b_bias, m_seen = visible(o_t, o_s, b_id[None, :], b_other, bias, mask, stride_biast, stride_maskt, left, right,
                                 T, S, LEFT, RIGHT, SEGMENTS, BIAS, MASK, MASKED)
        m_some = some(m_seen, 0)
    elif MASKED and SEGMENTS:
        m_some = b_id >= 0  # no padding
    b_q = load_rows(q + t0 * stride_qt, stride_qt, T - i_t * BQ, BT, K, BK, MASKED, N, stride_qn, m_some)
    b_do = load_rows(do + t0 * stride_dot, stride_dot, T - i_t * BQ, BT, V, BV, MASKED, N, stride_don, m_some)
    EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    b_top, b_one = load_log(lse + (o_n * ((2 if EXACT else 1) * T) + o_r), o_r, T, 0, MASKED, EXACT)
    mean += o_n * T + o_r
    b_mean = tl.load(mean, mask=o_r < T, other=0.0) if MASKED else tl.load(mean)
    b_x = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    if not (MASK and MASKED):
        b_bias, m_seen = visible(o_t, o_s, b_id[None, :], b_other, bias, mask, stride_biast, stride_maskt, left, right,
                                 T, S, LEFT, RIGHT, SEGMENTS, BIAS, MASK, MASKED)
    b_x, b_tanh = scores(b_x, b_bias, m_seen, inner, unit, CAP, BIAS, MASKED, EXACT)
    b_p = power(b_x * (1.0 if BIAS else unit) - b_top, EXACT) * b_one
    m_keep = kept(seed, i_bh + o_n[None, :], o_t, o_s, threshold) if DROPOUT else o_t
    if DV:
        b_w = tl.where(m_keep, b_p * keep, 0.0) if DROPOUT else b_p
        dv = tl.dot(b_w.to(b_do.dtype), b_do, dv, input_precision=PRECISION)
    if DK:
        if CAP:
            # Before the next product, so that fewer registers hold what waits for it.
            b_p *= 1.0 - b_tanh * b_tanh
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        if DROPOUT:
            b_dp = tl.where(m_keep, b_dp * keep, 0.0)
        b_dz = b_p * (b_dp - b_mean[None, :])
        if (MASKED or BIAS) and (DROPOUT or not DV):
            # Where the key or the value is not finite; else the kernel sees to it in the end.
            b_dz = tl.where(b_x == float("-inf"), 0.0, b_dz)
        dk = tl.dot(b_dz.to(b_q.dtype), b_q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_kernel(
    q, k, v, bias, mask, flags, query_ids, key_ids, spreads, seed, do, lse, mean,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_dob, stride_doh,
    stride_biasb, stride_biash, stride_biast, stride_maskb, stride_maskh, stride_maskt, stride_flagsb, stride_queryb,
    stride_keyb,
    scale, inner, unit, keep, threshold, left, right, offsets, T, S,
    dk, dv,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, RM: tl.constexpr,
    N: tl.constexpr, stride_qt: tl.constexpr, stride_kt: tl.constexpr, stride_vt: tl.constexpr,
    stride_dot: tl.constexpr, stride_qn: tl.constexpr, stride_don: tl.constexpr, UNIT: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, OFFSET: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr,
):
    """The gradients of BS keys and their values (DK, DV: which), which walk over the queries of the R heads in turn.

    N: a block of BT rows is of the same queries of that many heads, and the partly visible blocks of all heads come
    before the others: two loops in each head's turn need more registers than one. 0: head by head, each in two loops.
    """
    NS = tl.cdiv(S, BS)
    G: tl.constexpr = H // R
    EACH: tl.constexpr = N if N else 1
    BQ: tl.constexpr = BT // EACH
    # Of a causal call, the first keys are seen by the most queries, so their long walks begin first. The programs of a
    # head run together, unless each has many heads' walks to do and few of them fill the GPU: then those of all groups
    # do, or (N) of as few groups as fill it, so that the queries that they walk over stay in the cache.
    i_s, i_bg = tl.program_id(0) % NS, tl.program_id(0) // NS
    if N:
        BG = tl.num_programs(0) // NS
        C = tl.cdiv(256, NS)
        first = tl.program_id(0) // (C * NS) * C
        C = tl.minimum(C, BG - first)
        i_s, i_bg = (tl.program_id(0) - first * NS) // C, first + (tl.program_id(0) - first * NS) % C
    elif R > 1:
        BG = tl.num_programs(0) // NS
        i_s, i_bg = tl.program_id(0) // BG, tl.program_id(0) % BG
    i_b, i_g = (i_bg // G).to(tl.int64), i_bg % G
    s0 = i_s * BS
    o_r = s0 + tl.arange(0, BS)
    o_s = o_r[:, None]
    k += (i_b * stride_kb + i_g.to(tl.int64) * stride_kh) * UNIT + s0.to(tl.int64) * stride_kt
    v += (i_b * stride_vb + i_g.to(tl.int64) * stride_vh) * UNIT + s0.to(tl.int64) * stride_vt
    b_k = load_rows(k, stride_kt, S - s0, BS, K, BK, True, 1 if N else 0)
    if NEGATIVE:
        b_k = (-b_k.to(tl.float32)).to(b_k.dtype)
    b_v = load_rows(v, stride_vt, S - s0, BS, V, BV, True, 1 if N else 0) if DK else b_k
    left, right = moved(left, right, offsets, i_b, OFFSET)
    lo, hi, whole_lo, whole_hi = bounds(s0, tl.minimum(s0 + BS, S) - 1, T, right, left, RIGHT, LEFT, BQ)
    b_id, b_other, NT = o_r, o_s, tl.cdiv(T, BQ)
    if SEGMENTS:
        query_ids += i_b * stride_queryb
        spreads += i_b * 3 * NT
        b_id = tl.load(key_ids + i_b * stride_keyb + o_r, mask=o_r < S, other=-1)
        b_other = b_id[:, None]
        if not MASK:
            lo, hi, whole_lo, whole_hi = narrowed(
                lo, hi, whole_lo, whole_hi, b_id, o_r < S, spreads, NT, flags, 1, True, False, 128
            )
    b_dk = tl.zeros([BS, BK], tl.float32) if DK else 0.0
    b_dv = tl.zeros([BS, BV], tl.float32) if DV else 0.0
    for part in tl.static_range(2 if N else 1):
        for i_r in range(R // EACH):
            i_h = i_g * R + i_r * EACH
            i_bh = i_b * H + i_h
            p_q = q + (i_b * stride_qb + i_h.to(tl.int64) * stride_qh) * UNIT
            p_do = do + (i_b * stride_dob + i_h.to(tl.int64) * stride_doh) * UNIT
            p_lse = lse + i_bh * T * (2 if q.dtype.element_ty == tl.float32 else 1)
            p_bias, p_mask = bias, mask
            if BIAS:
                p_bias = bias + i_b * stride_biasb + (i_h // RB).to(tl.int64) * stride_biash
            first, end, whole_first, whole_end = lo, hi, whole_lo, whole_hi
            if MASK:
                p_mask = mask + i_b * stride_maskb + (i_h // RM).to(tl.int64) * stride_maskh
                p_flags = flags + (i_b * stride_flagsb + i_h // RM) * NT * NS + i_s
                first, end, whole_first, whole_end = narrowed(
                    lo, hi, whole_lo, whole_hi, b_id, o_r < S, spreads, NT, p_flags, NS, SEGMENTS, True, 128
                )
            n_whole = whole_end - whole_first
            if part == 0:
                for i in range(first, end - n_whole):
                    b_dk, b_dv = to_keys(
                        b_dk, b_dv, b_k, b_v, b_other, o_s, tl.where(i < whole_first, i, i + n_whole), i_bh, p_q,
                        p_do, p_lse, mean + i_bh * T, query_ids, p_bias, p_mask, seed, stride_biast, stride_maskt,
                        inner, unit, keep, threshold, left, right, T, S, K, V, N, stride_qt, stride_dot, stride_qn,
                        stride_don, BT, BK, BV, CAP, LEFT, RIGHT, SEGMENTS, BIAS, MASK, DROPOUT, PRECISION, DK, DV,
                        True,
                    )
            if part == 1 or not N:
                for i in range(whole_first, whole_end):
                    b_dk, b_dv = to_keys(
                        b_dk, b_dv, b_k, b_v, b_other, o_s, i, i_bh, p_q, p_do,
                        p_lse, mean + i_bh * T, query_ids, p_bias, p_mask, seed, stride_biast, stride_maskt, inner,
                        unit, keep, threshold, left, right, T, S, K, V, N, stride_qt, stride_dot, stride_qn, stride_don,
                        BT, BK, BV, CAP, LEFT, RIGHT, SEGMENTS, BIAS, MASK, DROPOUT, PRECISION, DK, DV, False,
                    )
    if DK and DV and not DROPOUT:
        # A key that no query sees has no gradient, whatever it holds.
        b_dk = tl.where(tl.max(tl.where(b_dv != 0.0, 1, 0), 1)[:, None] > 0, b_dk, 0.0)
    if DK:
        store_rows(dk + ((i_b * S + s0) * G + i_g) * K, b_dk * scale, G * K, S - s0, BS, K, BK)
    if DV:
        store_rows(dv + ((i_b * S + s0) * G + i_g) * V, b_dv, G * V, S - s0, BS, V, BV)


@triton.jit
def bias_kernel(
    q, k, v, bias, query_ids, key_ids, do, lse, mean, seed,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_dob, stride_doh,
    stride_biasb, stride_biash, stride_biast, stride_queryb, stride_keyb, inner, unit, keep, threshold, left, right,
    offsets, B, T, S,
    dbias,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, SHARED: tl.constexpr,
    stride_qt: tl.constexpr, stride_kt: tl.constexpr, stride_vt: tl.constexpr, stride_dot: tl.constexpr,
    UNIT: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    OFFSET: tl.constexpr, PRECISION: tl.constexpr,
):
    """The gradient of a tile of the bias: the sum over the RB heads (SHARED: and the batch) that share it."""
    NB: tl.constexpr = H // RB
    NS = tl.cdiv(S, BS)
    i_s = tl.program_id(0) % NS
    i_t = tl.program_id(0) // NS % tl.cdiv(T, BT)
    i_n = tl.program_id(0) // NS // tl.cdiv(T, BT)
    first, i_hb = (i_n // NB).to(tl.int64), i_n % NB
    t0, s0 = i_t * BT, i_s * BS
    o_r = t0 + tl.arange(0, BT)
    o_t, o_s = o_r[:, None], (s0 + tl.arange(0, BS))[None, :]
    bias += first * stride_biasb + i_hb.to(tl.int64) * stride_biash
    acc = tl.zeros([BT, BS], tl.float32)
    calls = (B if SHARED else 1) * RB
    if not (OFFSET and SHARED):
        left, right = moved(left, right, offsets, first, OFFSET)
        lo, hi, _, _ = bounds(t0, tl.minimum(t0 + BT, T) - 1, S, left, right, LEFT, RIGHT, BS)
        calls = tl.where((i_s >= lo) & (i_s < hi), calls, 0)
    for i in range(0, calls):
        i_b, i_h = first + i // RB, i_hb * RB + i % RB
        own_left, own_right = moved(left, right, offsets, i_b, OFFSET and SHARED)
        p_q = q + (i_b * stride_qb + i_h.to(tl.int64) * stride_qh) * UNIT + t0.to(tl.int64) * stride_qt
        p_k = k + (i_b * stride_kb + (i_h // R).to(tl.int64) * stride_kh) * UNIT + s0.to(tl.int64) * stride_kt
        p_v = v + (i_b * stride_vb + (i_h // R).to(tl.int64) * stride_vh) * UNIT + s0.to(tl.int64) * stride_vt
        p_do = do + (i_b * stride_dob + i_h.to(tl.int64) * stride_doh) * UNIT + t0.to(tl.int64) * stride_dot
        EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
        row = (i_b * H + i_h) * T + o_r
        b_top, b_one = load_log(lse + (row + (i_b * H + i_h) * T if EXACT else row), o_r, T, 1, True, EXACT)
        b_mean = tl.load(mean + row, mask=o_r < T, other=0.0)[:, None]
        b_q = load_rows(p_q, stride_qt, T - t0, BT, K, BK, True)
        b_k = load_rows(p_k, stride_kt, S - s0, BS, K, BK, True)
        b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_own, b_other = o_t, o_s
        if SEGMENTS:
            b_own = tl.load(query_ids + i_b * stride_queryb + o_t, mask=o_t < T, other=-1)
            b_other = tl.load(key_ids + i_b * stride_keyb + o_s, mask=o_s < S, other=-1)
        b_bias, m_seen = visible(o_t, o_s, b_own, b_other, bias, bias, stride_biast, stride_biast, own_left, own_right,
                                 T, S, LEFT, RIGHT, SEGMENTS, True, False, True)
        b_x, _tanh = scores(b_x, b_bias, m_seen, inner, unit, CAP, True, True, EXACT)
        b_do = load_rows(p_do, stride_dot, T - t0, BT, V, BV, True)
        b_v = load_rows(p_v, stride_vt, S - s0, BS, V, BV, True)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        if DROPOUT:
            b_dp = tl.where(kept(seed, i_b * H + i_h, o_t, o_s, threshold), b_dp * keep, 0.0)
        # A query whose output has no gradient changes nothing, whatever it holds.
        b_x = tl.where(tl.max(tl.where(b_do != 0.0, 1, 0), 1)[:, None] > 0, b_x, float("-inf"))
        acc += tl.where(b_x == float("-inf"), 0.0, power(b_x - b_top, EXACT) * b_one * (b_dp - b_mean))
    p_d = dbias + (i_n.to(tl.int64) * T + o_t) * S + o_s
    tl.store(p_d, acc.to(dbias.dtype.element_ty), mask=(o_t < T) & (o_s < S))
