"""Triton kernels of the gated delta rule that are parallel over chunks of tokens: what walks read, and the gradients.

Those with gates per dimension are in ``dimension_gradients.py``.

Rows of a chunk are tokens in the order in which the recurrence meets them: with REVERSE from the last to the first.
Decays are products with 0/1 matrices, as in ``device/recurrence.py``.
"""

import triton
import triton.language as tl

from keraunos.kernels.device.recurrence import CLOSED, LOG2E, decay, level, load_gate, locate, ones_dot

# A gate that leaves nothing.
SHUT = tl.constexpr(-64.0)
# Keys are alike from this sum of squares on, of a key's decayed products with those before it, times their beta.
ALIKE = tl.constexpr(1.0)


@triton.jit
def locate_rows(cu_seqlens, i_s, T, N, L, BT, PACKED: tl.constexpr, REVERSE: tl.constexpr, SPLIT: tl.constexpr,
                BN: tl.constexpr):
    """Slot of L rows of a sequence, or without SPLIT of all -> where these are.

    Returns the sequence, its row of the batch, how many slots of it are before, the slot of the first chunk (of BT
    rows), the first row's token, and how many rows there are from that on.
    """
    i_n, begin, length, i_g = locate(cu_seqlens, i_s, T, N, L, PACKED, SPLIT, BN)
    i_b = begin * 0 if PACKED else begin * 0 + i_n
    first = i_g * L
    chunk = (begin // BT + i_n) if PACKED else (i_b * tl.cdiv(T, BT))
    token = begin + ((length - 1 - first) if REVERSE else first)
    return i_n, i_b, i_g, chunk + i_g * (L // BT), token, length - first


@triton.jit
def between(b_g, o_r, TERMS: tl.constexpr, EXACT: tl.constexpr):
    """Decays ``[BT (i), BT (j)]`` by the gates after row j up to row i; 1 where i is before j.

    EXACT: each is the sum of its own gates. Else it is the difference of two sums from the chunk's start. Gates below
    SHUT leave nothing and count as SHUT, so that these sums, and their roundings, stay small.
    """
    if EXACT:
        b_after = tl.where(o_r[:, None] > o_r[None, :], b_g[:, None], 0.0)  # [BT (t), BT (j)]
        return decay(ones_dot(o_r[:, None] >= o_r[None, :], b_after, TERMS), EXACT)
    b_sum = tl.cumsum(tl.maximum(b_g, SHUT), 0)
    return decay(tl.minimum(b_sum[:, None] - b_sum[None, :], 0.0), EXACT)


@triton.jit
def enter_decay(g, o_t, stride_gt, o_r, left, EXACT: tl.constexpr):
    """Decays ``[BT]`` from a chunk's start up to each row; g points to the gate of the first."""
    return decay(tl.cumsum(load_gate(g + o_t * stride_gt, o_r < left, CLOSED), 0), EXACT)


@triton.jit
def leave_decay(g, o_t, stride_gt, o_r, left, BT: tl.constexpr, REVERSE: tl.constexpr, EXACT: tl.constexpr):
    """Decays ``[BT]`` after each row to the end of the chunk, by the gates of later rows; g points to the first row."""
    m_next = (o_r + 1 < BT) & (o_r + 1 < left)
    b_next = load_gate(g + (o_t + (-1 if REVERSE else 1)) * stride_gt, m_next, CLOSED)
    return decay(tl.cumsum(b_next, 0, reverse=True), EXACT)


@triton.jit
def load_beta(beta, o_beta, m_t, BETA: tl.constexpr):
    """How much of each row's error is corrected: all of it without BETA, and nothing outside of the sequence."""
    if BETA:
        return tl.load(beta + o_beta, mask=m_t, other=0.0).to(tl.float32)
    return tl.where(m_t, 1.0, 0.0)


@triton.jit
def substituted(b_a, b_beta, BT: tl.constexpr, PRECISION: tl.constexpr):
    """``N = (I + A diag(beta))^-1 A`` of A ``[BT, BT]`` strictly below the diagonal.

    Blocks of 8 rows on the diagonal by substitution, row after row; then blocks of twice the size, whose lower left
    quarter is ``(I - N_22 beta) A_21 (I - beta N_11)``.
    """
    NB: tl.constexpr = BT // 8
    o_b = tl.arange(0, NB)
    own = o_b[:, None, None, None] == o_b[None, None, :, None]
    b_n = tl.sum(tl.where(own, tl.reshape(b_a, [NB, 8, NB, 8]), 0.0), 2)  # [NB, 8, 8]
    # Columns of A beta are rows here: what is read of it lies where it meets N.
    b_ba = tl.permute(b_n * tl.reshape(b_beta, [NB, 8])[:, None, :], (0, 2, 1))
    o_i = tl.arange(0, 8)
    for i in range(1, 8):
        b_row = tl.sum(tl.where(o_i[None, None, :] == i, b_ba, 0.0), 2)  # [NB, 8]
        b_row = tl.sum(b_row[:, :, None] * b_n, 1)
        b_n -= tl.where(o_i[None, :, None] == i, b_row[:, None, :], 0.0)
    b_n = tl.reshape(tl.where(own, b_n[:, :, None, :], 0.0), [BT, BT])
    o_r = tl.arange(0, BT)
    m = 8
    while m < BT:
        m_off = ((o_r[:, None] // m) ^ (o_r[None, :] // m)) == 1
        b_m = tl.where(m_off & (o_r[:, None] > o_r[None, :]), b_a, 0.0)
        b_m -= tl.dot(b_n, b_beta[:, None] * b_m, input_precision=PRECISION)
        b_n += b_m - tl.dot(b_m, b_beta[:, None] * b_n, input_precision=PRECISION)
        m *= 2
    return b_n


@triton.jit(do_not_specialize=["N"])
def prepare_kernel(
    q, k, g, beta, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_bb, stride_bt, stride_bh, scale, T, N,
    near, pairs, alike, enter, leave, qd, ke, kl,
    H: tl.constexpr, K: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RG: tl.constexpr, RB: tl.constexpr,
    UNIT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr,
    EXACT: tl.constexpr, TERMS: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    FINE: tl.constexpr, MILD: tl.constexpr,
):
    """Compute the arrays that a walk reads of each chunk and that need no state.

    ``near`` ``[1 or 2, BT, BT]``: N of ``substituted`` for the decayed products of keys, as its upper digits and the
    rest (EXACT: whole); ``alike``: whether the rest counts. ``pairs``: ``scale * decayed products of queries and
    keys``, of which a query sees its own key. MILD: gates per dimension that sum to more than minus that factor.
    ``enter`` and ``leave``: decays from the chunk's start up to a row, and after a row to the chunk's end; with gates
    per dimension (GATE 2) the decay of the whole chunk, and queries and keys are decayed here: ``qd``, ``ke``, ``kl``.
    """
    i_h = tl.program_id(0) % H
    i_s = tl.program_id(0) // H
    _, i_b, _, _, token, left = locate_rows(cu_seqlens, i_s, T, N, BT, BT, PACKED, REVERSE, True, BN)
    if left <= 0:
        return
    o_r = tl.arange(0, BT)
    o_t = -o_r if REVERSE else o_r
    m_t = o_r < left
    p_q = q + (i_b * stride_qb + token * stride_qt + (i_h // RQ).to(tl.int64) * stride_qh) * UNIT
    p_k = k + (i_b * stride_kb + token * stride_kt + (i_h // RK).to(tl.int64) * stride_kh) * UNIT
    o_g = i_b * stride_gb + token * stride_gt + (i_h // RG).to(tl.int64) * stride_gh
    o_beta = i_b * stride_bb + token * stride_bt + (i_h // RB).to(tl.int64) * stride_bh
    i_slot = i_s.to(tl.int64) * H + i_h
    row = ((i_b * T + token) * H + i_h) * K
    dtype: tl.constexpr = k.dtype.element_ty

    b_a = tl.zeros([BT, BT], dtype=tl.float32)  # [i, j]
    b_p = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = m_t[:, None] & (o_k < K)[None, :]
        b_q = tl.load(p_q + o_t[:, None] * (stride_qt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
        b_k = tl.load(p_k + o_t[:, None] * (stride_kt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
        if GATE < 2:
            b_a = tl.dot(b_k, tl.trans(b_k), b_a, input_precision=PRECISION)
            b_p = tl.dot(b_q, tl.trans(b_k), b_p, input_precision=PRECISION)
        else:
            b_g = load_gate(g + o_g + o_t[:, None] * stride_gt + o_k[None, :], m_k, CLOSED)
            b_qf = b_q.to(tl.float32)
            b_kf = b_k.to(tl.float32)
            b_p += tl.where(o_r[:, None] == o_r[None, :], tl.sum(b_qf * b_kf, 1)[:, None], 0.0)
            m_upto = o_r[:, None] >= o_r[None, :]
            b_to = ones_dot(m_upto, b_g, TERMS)
            b_enter = decay(b_to, EXACT)
            b_leave = decay(ones_dot(o_r[:, None] < o_r[None, :], b_g, TERMS), EXACT)
            if tl.min(b_to) * LOG2E > -MILD:
                # Pairs factor at the chunk's start.
                b_x = tl.trans((b_kf * tl.exp2(b_to * -LOG2E)).to(dtype))
                b_l = tl.dot((b_kf * b_enter).to(dtype), b_x, input_precision=PRECISION)
                b_a += tl.where(o_r[:, None] > o_r[None, :], b_l, 0.0)
                b_l = tl.dot((b_qf * b_enter).to(dtype), b_x, input_precision=PRECISION)
                b_p += tl.where(o_r[:, None] > o_r[None, :], b_l, 0.0)
            else:
                m = 1
                while m < BT:
                    later, m_sum, m_pair = level(o_r, m)
                    m_pair &= later[:, None]
                    b_e = decay(ones_dot(m_sum, b_g, TERMS), EXACT)
                    b_x = tl.trans((b_kf * b_e).to(dtype))
                    b_l = tl.dot((b_kf * b_e).to(dtype), b_x, input_precision=PRECISION)
                    b_a += tl.where(m_pair, b_l, 0.0)
                    b_l = tl.dot((b_qf * b_e).to(dtype), b_x, input_precision=PRECISION)
                    b_p += tl.where(m_pair, b_l, 0.0)
                    m *= 2
            o_d = row + o_t[:, None] * (H * K) + o_k[None, :]
            tl.store(qd + o_d, (b_qf * b_enter * scale).to(dtype), mask=m_k)
            tl.store(ke + o_d, (b_kf * b_enter).to(dtype), mask=m_k)
            tl.store(kl + o_d, (b_kf * b_leave).to(dtype), mask=m_k)
            tl.store(enter + i_slot * K + o_k, decay(tl.sum(b_g, 0), EXACT), mask=o_k < K)
    m_lower = o_r[:, None] > o_r[None, :]
    if GATE == 1:
        b_g1 = load_gate(g + o_g + o_t * stride_gt, m_t, CLOSED)
        b_d = between(b_g1, o_r, TERMS, EXACT)
        b_a *= b_d
        b_p *= b_d
        tl.store(enter + i_slot * BT + o_r, enter_decay(g + o_g, o_t, stride_gt, o_r, left, EXACT))
        tl.store(leave + i_slot * BT + o_r, leave_decay(g + o_g, o_t, stride_gt, o_r, left, BT, REVERSE, EXACT))
    b_p = tl.where(o_r[:, None] >= o_r[None, :], b_p * scale, 0.0)
    o_p = o_r[:, None] * BT + o_r[None, :]
    tl.store(pairs + i_slot * (BT * BT) + o_p, b_p.to(dtype))
    b_beta = load_beta(beta, o_beta + o_t * stride_bt, m_t, BETA)
    b_a = tl.where(m_lower, b_a, 0.0)
    # Where a row's key is like those before it, corrections cancel: their lower digits count, too.
    b_like = b_a * b_beta[None, :]
    is_alike = tl.max(tl.sum(b_like * b_like, 1), 0) > ALIKE
    tl.store(alike + i_slot, is_alike.to(tl.int32))
    if is_alike or EXACT:  # noqa: SIM108 - two branches, of which one runs
        b_n = substituted(b_a, b_beta, BT, FINE)
    else:
        b_n = substituted(b_a, b_beta, BT, PRECISION)
    b_hi = b_n.to(dtype)
    if EXACT:
        tl.store(near + i_slot * (BT * BT) + o_p, b_hi)
    else:
        p_n = near + i_slot * (2 * BT * BT) + o_p
        tl.store(p_n, b_hi)
        tl.store(p_n + BT * BT, (b_n - b_hi.to(tl.float32)).to(dtype))


@triton.jit(do_not_specialize=["N"])
def pairs_gradient_kernel(
    q, k, g, beta, do, errors, rights, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_bb, stride_bt, stride_bh, stride_ob, stride_ot, stride_oh, scale, T, N,
    dpairs, dkeys, dv, dbeta, dg,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RG: tl.constexpr,
    RB: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, NEED_G: tl.constexpr, EXACT: tl.constexpr, TERMS: tl.constexpr,
    DG_TERMS: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """The gradients of a chunk's pairs ``[BT (i), BT (j)]``, of values and of beta, from what two walks have left.

    ``errors`` are E, of which the corrections are ``beta E``; ``rights`` are R, of which the gradients of values are
    ``beta R``. To the pairs of keys, ``-beta R`` is what the output's gradient is to those of queries and keys;
    ``dkeys`` has them on both sides of the diagonal. With a gate per token the gradients are those of plain products,
    times the decay between the two, and ``dg`` is the part of the gates' that pairs make.
    """
    i_h = tl.program_id(0) % H
    i_s = tl.program_id(0) // H
    _, i_b, _, _, token, left = locate_rows(cu_seqlens, i_s, T, N, BT, BT, PACKED, REVERSE, True, BN)
    if left <= 0:
        return
    o_r = tl.arange(0, BT)
    o_t = -o_r if REVERSE else o_r
    m_t = o_r < left
    o_beta = i_b * stride_bb + token * stride_bt + (i_h // RB).to(tl.int64) * stride_bh
    p_do = do + (i_b * stride_ob + token * stride_ot + i_h.to(tl.int64) * stride_oh) * UNIT
    row = (i_b * T + token) * H + i_h
    dtype: tl.constexpr = do.dtype.element_ty
    b_beta = load_beta(beta, o_beta + o_t * stride_bt, m_t, BETA)
    b_w = tl.zeros([BT, BT], dtype=tl.float32)
    b_x = tl.zeros([BT, BT], dtype=tl.float32)
    b_db = tl.zeros([BT], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = m_t[:, None] & (o_v < V)[None, :]
        o_row = row * V + o_t[:, None] * (H * V) + o_v[None, :]
        b_do = tl.load(p_do + o_t[:, None] * (stride_ot * UNIT) + o_v[None, :], mask=m_v, other=0.0)  # [BT, BV]
        b_e = tl.load(errors + o_row, mask=m_v, other=0.0)
        b_r = tl.load(rights + o_row, mask=m_v, other=0.0)
        b_w = tl.dot(b_do, tl.trans(b_e), b_w, input_precision=PRECISION)
        b_x = tl.dot(b_r, tl.trans(b_e), b_x, input_precision=PRECISION)
        b_rf = b_r.to(tl.float32)
        tl.store(dv + o_row, (b_beta[:, None] * b_rf).to(dv.dtype.element_ty), mask=m_v)
        b_db += tl.sum(b_e.to(tl.float32) * b_rf, 1)
    b_w *= b_beta[None, :]
    b_x *= b_beta[:, None] * b_beta[None, :]
    if BETA:
        tl.store(dbeta + row + o_t * H, b_db.to(dbeta.dtype.element_ty), mask=m_t)
    m_lower = o_r[:, None] > o_r[None, :]
    b_w = tl.where(o_r[:, None] >= o_r[None, :], b_w * scale, 0.0)
    b_x = tl.where(m_lower, -b_x, 0.0)
    if GATE == 1:
        o_g = i_b * stride_gb + token * stride_gt + (i_h // RG).to(tl.int64) * stride_gh
        b_d = between(load_gate(g + o_g + o_t * stride_gt, m_t, CLOSED), o_r, TERMS, EXACT)
        b_w *= b_d
        b_x *= b_d
    i_p = (i_s.to(tl.int64) * H + i_h) * (BT * BT)
    tl.store(dpairs + i_p + o_r[:, None] * BT + o_r[None, :], b_w.to(dtype))
    tl.store(dkeys + i_p + o_r[:, None] * BT + o_r[None, :], b_x.to(dtype), mask=o_r[:, None] >= o_r[None, :])
    tl.store(dkeys + i_p + o_r[None, :] * BT + o_r[:, None], b_x.to(dtype), mask=m_lower)
    if NEED_G and GATE == 1:
        p_q = q + (i_b * stride_qb + token * stride_qt + (i_h // RQ).to(tl.int64) * stride_qh) * UNIT
        p_k = k + (i_b * stride_kb + token * stride_kt + (i_h // RK).to(tl.int64) * stride_kh) * UNIT
        b_qk = tl.zeros([BT, BT], dtype=tl.float32)
        b_kk = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = m_t[:, None] & (o_k < K)[None, :]
            b_q = tl.load(p_q + o_t[:, None] * (stride_qt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
            b_k = tl.load(p_k + o_t[:, None] * (stride_kt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
            b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PRECISION)
            b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PRECISION)
        # Of pairs of rows j before the gate and i from it on; the product sums over j.
        b_a = ones_dot(m_lower, tl.trans(b_qk * b_w + b_kk * b_x), DG_TERMS)  # [BT (t), BT (i)]
        b_dg = tl.sum(tl.where(o_r[:, None] <= o_r[None, :], b_a, 0.0), 1)
        tl.store(dg + row + o_t * H, b_dg, mask=m_t)


@triton.jit(do_not_specialize=["N"])
def queries_gradient_kernel(
    q, k, g, do, hs, dpairs, dg_given, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_ob, stride_ot, stride_oh, scale, T, N, ROWS,
    dq, dg,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RG: tl.constexpr,
    UNIT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    GATE: tl.constexpr, NEED_G: tl.constexpr, EXACT: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of BK dimensions of a chunk's queries, and the parts of its gates' that they make.

    A program sums over the RQ heads that share a head of queries. ``hs``: the states before chunks. The part of a gate
    per token is ``dg``'s row for these dimensions, the first of them with what is given.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % NK
    i_hq = (tl.program_id(0) // NK) % (H // RQ)
    i_s = tl.program_id(0) // (NK * (H // RQ))
    _, i_b, _, _, token, left = locate_rows(cu_seqlens, i_s, T, N, BT, BT, PACKED, REVERSE, True, BN)
    if left <= 0:
        return
    o_r = tl.arange(0, BT)
    o_t = -o_r if REVERSE else o_r
    m_t = o_r < left
    o_k = i_k * BK + tl.arange(0, BK)
    m_k = m_t[:, None] & (o_k < K)[None, :]
    p_q = q + (i_b * stride_qb + token * stride_qt + i_hq.to(tl.int64) * stride_qh) * UNIT
    b_q = tl.load(p_q + o_t[:, None] * (stride_qt * UNIT) + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    for i_r in range(RQ):
        i_h = i_hq * RQ + i_r
        o_g = i_b * stride_gb + token * stride_gt + (i_h // RG).to(tl.int64) * stride_gh
        p_do = do + (i_b * stride_ob + token * stride_ot + i_h.to(tl.int64) * stride_oh) * UNIT
        p_k = k + (i_b * stride_kb + token * stride_kt + (i_h // RK).to(tl.int64) * stride_kh) * UNIT
        i_slot = i_s.to(tl.int64) * H + i_h
        row = (i_b * T + token) * H + i_h
        b_d = tl.zeros([BT, BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            o_s = i_slot * (K * V) + o_k[:, None] * V + o_v[None, :]
            m_v = (o_v < V)[None, :]
            b_do = tl.load(p_do + o_t[:, None] * (stride_ot * UNIT) + o_v[None, :], mask=m_t[:, None] & m_v, other=0.0)
            b_h = tl.load(hs + o_s, mask=(o_k < K)[:, None] & m_v, other=0.0)  # [BK, BV]
            b_d = tl.dot(b_do, tl.trans(b_h), b_d, input_precision=PRECISION)
        b_d *= scale
        b_k = tl.load(p_k + o_t[:, None] * (stride_kt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
        b_w = tl.load(dpairs + i_slot * (BT * BT) + o_r[:, None] * BT + o_r[None, :])  # [BT (i), BT (j)]
        if GATE == 1:
            b_d *= enter_decay(g + o_g, o_t, stride_gt, o_r, left, EXACT)[:, None]
            if NEED_G:
                b_dg = tl.cumsum(tl.sum(b_q * b_d, 1), 0, reverse=True)
                b_dg += tl.load(dg_given + row + o_t * H, mask=m_t & (i_k == 0), other=0.0)
                tl.store(dg + i_k * (ROWS * H).to(tl.int64) + row + o_t * H, b_dg, mask=m_t)
        b_d = tl.dot(b_w, b_k, b_d, input_precision=PRECISION)
        b_dq += b_d
    tl.store(dq + ((i_b * T + token) * (H // RQ) + i_hq) * K + o_t[:, None] * (H // RQ * K) + o_k[None, :],
             b_dq.to(dq.dtype.element_ty), mask=m_k)


@triton.jit(do_not_specialize=["N"])
def keys_gradient_kernel(
    q, k, g, beta, errors, rights, hs, dhs, dpairs, dkeys, dg_given, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_bb, stride_bt, stride_bh, T, N, ROWS,
    dk, dg,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RG: tl.constexpr,
    RB: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, NEED_G: tl.constexpr, EXACT: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """The gradients of BK dimensions of a chunk's keys, and of its gates, added to the parts that queries have made.

    A program sums over the RK heads that share a head of keys. ``hs`` and ``dhs`` are the state before the chunk and
    the gradient of the one after it.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % NK
    i_hk = (tl.program_id(0) // NK) % (H // RK)
    i_s = tl.program_id(0) // (NK * (H // RK))
    _, i_b, _, _, token, left = locate_rows(cu_seqlens, i_s, T, N, BT, BT, PACKED, REVERSE, True, BN)
    if left <= 0:
        return
    o_r = tl.arange(0, BT)
    o_t = -o_r if REVERSE else o_r
    m_t = o_r < left
    o_k = i_k * BK + tl.arange(0, BK)
    m_k = m_t[:, None] & (o_k < K)[None, :]
    p_k = k + (i_b * stride_kb + token * stride_kt + i_hk.to(tl.int64) * stride_kh) * UNIT
    b_k = tl.load(p_k + o_t[:, None] * (stride_kt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    for i_r in range(RK):
        i_h = i_hk * RK + i_r
        o_g = i_b * stride_gb + token * stride_gt + (i_h // RG).to(tl.int64) * stride_gh
        o_beta = i_b * stride_bb + token * stride_bt + (i_h // RB).to(tl.int64) * stride_bh
        p_q = q + (i_b * stride_qb + token * stride_qt + (i_h // RQ).to(tl.int64) * stride_qh) * UNIT
        i_slot = i_s.to(tl.int64) * H + i_h
        row = (i_b * T + token) * H + i_h
        b_beta = load_beta(beta, o_beta + o_t * stride_bt, m_t, BETA)[:, None]
        b_d = tl.zeros([BT, BK], dtype=tl.float32)  # of keys that meet the state before the chunk,
        b_dl = tl.zeros([BT, BK], dtype=tl.float32)  # and of keys that change the state after it
        b_across = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = m_t[:, None] & (o_v < V)[None, :]
            o_row = row * V + o_t[:, None] * (H * V) + o_v[None, :]
            o_s = i_slot * (K * V) + o_k[:, None] * V + o_v[None, :]
            m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
            b_r = tl.load(rights + o_row, mask=m_v, other=0.0)  # [BT, BV]
            b_h = tl.load(hs + o_s, mask=m_s, other=0.0)  # [BK, BV]
            b_d = tl.dot(b_r, tl.trans(b_h), b_d, input_precision=PRECISION)
            if NEED_G:
                b_across += tl.sum(b_h.to(tl.float32) * tl.load(dhs + o_s, mask=m_s, other=0.0).to(tl.float32), 1)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = m_t[:, None] & (o_v < V)[None, :]
            o_row = row * V + o_t[:, None] * (H * V) + o_v[None, :]
            o_s = i_slot * (K * V) + o_k[:, None] * V + o_v[None, :]
            m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
            b_e = tl.load(errors + o_row, mask=m_v, other=0.0)
            b_h = tl.load(dhs + o_s, mask=m_s, other=0.0)
            b_dl = tl.dot(b_e, tl.trans(b_h), b_dl, input_precision=PRECISION)
        b_d *= -b_beta
        b_dl *= b_beta
        b_q = tl.load(p_q + o_t[:, None] * (stride_qt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
        o_p = i_slot * (BT * BT) + o_r[:, None] * BT + o_r[None, :]
        b_w = tl.trans(tl.load(dpairs + o_p))  # [BT (j), BT (i)]
        b_x = tl.load(dkeys + o_p)
        if GATE == 1:
            b_kf = b_k.to(tl.float32)
            b_enter = enter_decay(g + o_g, o_t, stride_gt, o_r, left, EXACT)
            b_d *= b_enter[:, None]
            b_dl *= leave_decay(g + o_g, o_t, stride_gt, o_r, left, BT, REVERSE, EXACT)[:, None]
            if NEED_G:
                b_later = tl.sum(b_kf * b_dl, 1)
                b_dg = tl.cumsum(tl.sum(b_kf * b_d, 1), 0, reverse=True) + tl.cumsum(b_later, 0) - b_later
                b_dg += tl.sum(b_across, 0) * tl.sum(tl.where(o_r == BT - 1, b_enter, 0.0), 0)
                p_dg = i_k * (ROWS * H).to(tl.int64) + row + o_t * H
                b_dg += tl.load(dg_given + p_dg, mask=m_t, other=0.0)
                tl.store(dg + p_dg, b_dg, mask=m_t)
        b_d = tl.dot(b_w, b_q, b_d + b_dl, input_precision=PRECISION)
        b_d = tl.dot(b_x, b_k, b_d, input_precision=PRECISION)
        b_dk += b_d
    tl.store(dk + ((i_b * T + token) * (H // RK) + i_hk) * K + o_t[:, None] * (H // RK * K) + o_k[None, :],
             b_dk.to(dk.dtype.element_ty), mask=m_k)
