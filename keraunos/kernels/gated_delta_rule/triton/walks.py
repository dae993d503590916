"""Triton kernels of the gated delta rule that walk over sequences, chunk by chunk, with the state in registers.

The state is kept transposed, ``[BV, BK]``: it is the left operand of every product that it takes part in.
"""

import triton
import triton.language as tl

from keraunos.kernels.device.recurrence import clear_rows
from keraunos.kernels.gated_delta_rule.triton.chunks import load_beta, locate_rows


@triton.jit
def whole_dot(x, y, acc, alike, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """``acc + x @ y``, with float32's digits of x where keys are alike: as the sum of two of y's dtype.

    Corrections of like keys cancel in the state. Their rounding errors do not.
    """
    b_x = x.to(y.dtype)
    acc = tl.dot(b_x, y, acc, input_precision=PRECISION)
    if not EXACT:  # noqa: SIM102
        if alike:
            acc = tl.dot((x - b_x.to(tl.float32)).to(y.dtype), y, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["N", "ROWS"])
def walk_kernel(
    q, k, kl, v, beta, near, pairs, alike, enter, leave, h0, into, cu_seqlens, pool, slots, has_initial, exports,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_bb, stride_bt, stride_bh, scale, T, N, L,
    ROWS,
    o, errors, hs, ht,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr,
    RV: tl.constexpr, RB: tl.constexpr, UNIT: tl.constexpr, stride_qt: tl.constexpr, stride_kt: tl.constexpr,
    stride_vt: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, EXACT: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, INIT: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr, FINAL: tl.constexpr,
    PRECISION: tl.constexpr, POOL: tl.constexpr, MAY_START: tl.constexpr, EXPORT: tl.constexpr,
    stride_ss: tl.constexpr, stride_sh: tl.constexpr, stride_sk: tl.constexpr, stride_sv: tl.constexpr,
):
    """The forward walk: outputs, and the states that are wanted.

    With S the state before a chunk: ``Y = V - enter K S``, ``E = Y - N beta Y``, ``U = beta E``, ``O = scale enter Q S
    + pairs U``, ``S' = decay S + (leave K)^T U``. SPLIT: walks are segments of L tokens. INIT: 0 from zeros, 1 from h0,
    one state for each walk. W: columns of the states; those from V on are of a segment's matrix, which takes the state
    before it to the one after: no values, from columns of one. SAVE: 0, or E is written down, and the state before each
    SAVE chunks. FINAL: 1 the states of sequences, 2 those of walks.

    POOL: the states of sequences are in ``slots`` of ``pool``, which ht is; one in slot -1 gets zeros only, and so does
    what is after the last sequence in ROWS of the output. MAY_START: ``has_initial`` says which sequences have a state.
    EXPORT: ``exports`` has for each chunk the slot that the state before it goes to as well, or -1; so it has for the
    end of a sequence of whole chunks.
    """
    NV: tl.constexpr = (W + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_h = (tl.program_id(0) // NV) % H
    i_s = tl.program_id(0) // (NV * H)
    i_n, i_b, i_g, chunk, token, left = locate_rows(cu_seqlens, i_s, T, N, L, BT, PACKED, REVERSE, SPLIT, BN)
    _, _, _, saved, _, _ = locate_rows(cu_seqlens, i_s, T, N, L, BT * (SAVE or 1), PACKED, REVERSE, SPLIT, BN)
    size = tl.minimum(left, L).to(tl.int32) if SPLIT else left.to(tl.int32)
    if POOL:
        slot = tl.load(slots + i_n).to(tl.int64)
        o_clear = i_v * BV + tl.arange(0, BV)
        if (i_n == N - 1) & (i_g == 0):
            clear_rows(o, token + left, ROWS, i_h, o_clear, H, V, BT, BV)
        if slot < 0:
            clear_rows(o, token, token + size, i_h, o_clear, H, V, BT, BV)
            return
    o_r = tl.arange(0, BT)
    o_t = -o_r if REVERSE else o_r
    step = -BT if REVERSE else BT
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = (o_k < K)[None, :]
    m_v = (o_v < V)[:, None]
    p_q = q + (i_b * stride_qb + (i_h // RQ).to(tl.int64) * stride_qh) * UNIT + token * stride_qt
    p_k = k + (i_b * stride_kb + (i_h // RK).to(tl.int64) * stride_kh) * UNIT + token * stride_kt
    p_l = kl + (i_b * stride_kb + (i_h // RK).to(tl.int64) * stride_kh) * UNIT + token * stride_kt
    p_v = v + (i_b * stride_vb + (i_h // RV).to(tl.int64) * stride_vh) * UNIT + token * stride_vt
    o_beta = i_b * stride_bb + token * stride_bt + (i_h // RB).to(tl.int64) * stride_bh
    row = ((i_b * T + token) * H + i_h) * V
    i_slot = chunk * H + i_h
    dtype: tl.constexpr = k.dtype.element_ty

    b_s = tl.zeros([BV, BK], dtype=tl.float32)
    o_pool = i_h.to(tl.int64) * stride_sh + o_k[None, :] * stride_sk + o_v[:, None] * stride_sv
    if POOL and not INIT:
        m_init = m_v & m_k
        if MAY_START:
            m_init &= tl.load(has_initial + i_n) != 0
        b_s = tl.load(pool + slot * stride_ss + o_pool, mask=m_init, other=0.0).to(tl.float32)
    if INIT:
        i_init = ((i_s if SPLIT else i_n).to(tl.int64) * H + i_h) * (K * V)
        b_s = tl.load(h0 + i_init + o_k[None, :] * V + o_v[:, None], mask=m_v & m_k, other=0.0).to(tl.float32)
    if W > V:
        b_s = tl.where((o_k[None, :] + V == o_v[:, None]) & m_k, 1.0, b_s)

    b_all = 1.0
    for i in range(tl.cdiv(tl.maximum(size, 0), BT)):
        m_t = o_r < size - i * BT
        b_k = tl.load(p_k + o_t[:, None] * stride_kt + o_k[None, :], mask=m_t[:, None] & m_k, other=0.0)  # [BT, BK]
        b_v = tl.load(p_v + o_t[None, :] * stride_vt + o_v[:, None], mask=m_t[None, :] & m_v, other=0.0)  # [BV, BT]
        b_beta = load_beta(beta, o_beta + o_t * stride_bt, m_t, BETA)
        p_n = near + i_slot * ((1 if EXACT else 2) * BT * BT) + o_r[:, None] * BT + o_r[None, :]
        b_n = tl.load(p_n)  # [BT, BT]
        alike_c = tl.load(alike + i_slot) != 0
        if EXPORT:
            target = tl.load(exports + i_slot // H).to(tl.int64)
            if target >= 0:
                tl.store(ht + target * stride_ss + o_pool, b_s.to(ht.dtype.element_ty), mask=m_v & m_k)
        b_h = b_s.to(dtype)
        b_y = tl.dot(b_h, tl.trans(b_k), input_precision=PRECISION)  # [BV, BT]
        if GATE == 1:
            b_enter = tl.load(enter + i_slot * BT + o_r)
            b_leave = tl.load(leave + i_slot * BT + o_r)
            b_all = tl.load(enter + i_slot * BT + BT - 1)
            b_y *= b_enter[None, :]
        # Rounded once: as if the values were rounded.
        b_y = (b_v.to(tl.float32) - b_y).to(dtype).to(tl.float32)
        b_w = (b_y * b_beta[None, :]).to(dtype)
        b_e = tl.dot(b_w, tl.trans(b_n), input_precision=PRECISION)
        if not EXACT:  # noqa: SIM102
            if alike_c:
                b_e = tl.dot(b_w, tl.trans(tl.load(p_n + BT * BT)), b_e, input_precision=PRECISION)
        b_e = b_y - b_e
        b_u = b_e * b_beta[None, :]
        o_row = o_t[None, :] * (H * V) + o_v[:, None]
        if SAVE:
            tl.store(errors + row + o_row, b_e.to(errors.dtype.element_ty), mask=m_t[None, :] & m_v)
            o_s = ((saved + i // SAVE) * H + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
            tl.store(hs + o_s, b_h, mask=m_v & m_k & (i % SAVE == 0))
        if OUTPUT:
            b_q = tl.load(p_q + o_t[:, None] * stride_qt + o_k[None, :], mask=m_t[:, None] & m_k, other=0.0)
            b_p = tl.load(pairs + i_slot * (BT * BT) + o_r[:, None] * BT + o_r[None, :])  # [BT, BT]
            b_o = tl.dot(b_h, tl.trans(b_q), input_precision=PRECISION)  # [BV, BT]
            if GATE < 2:
                b_o *= scale
            if GATE == 1:
                b_o *= b_enter[None, :]
            b_o = whole_dot(b_u, tl.trans(b_p), b_o, alike_c, EXACT, PRECISION)
            tl.store(o + row + o_row, b_o.to(o.dtype.element_ty), mask=m_t[None, :] & m_v)
        if GATE == 2:
            b_s *= tl.load(enter + i_slot * K + o_k, mask=o_k < K, other=0.0)[None, :]
            b_k = tl.load(p_l + o_t[:, None] * stride_kt + o_k[None, :], mask=m_t[:, None] & m_k, other=0.0)
        if GATE == 1:
            b_s *= b_all
            b_u *= b_leave[None, :]
        b_s = whole_dot(b_u, b_k, b_s, alike_c, EXACT, PRECISION)
        p_q += step * stride_qt
        p_k += step * stride_kt
        p_l += step * stride_kt
        p_v += step * stride_vt
        o_beta += step * stride_bt
        row += step * (H * V)
        i_slot += H

    if FINAL == 1:
        o_s = (i_n.to(tl.int64) * H + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
        is_end = (left <= L) & ((left > 0) | (i_g == 0))
        m_end = m_v & m_k & is_end
        if EXPORT:
            target = tl.load(exports + i_slot // H, mask=is_end & (size % BT == 0), other=-1).to(tl.int64)
            tl.store(ht + target * stride_ss + o_pool, b_s.to(ht.dtype.element_ty), mask=m_end & (target >= 0))
        if POOL:
            tl.store(ht + slot * stride_ss + o_pool, b_s.to(ht.dtype.element_ty), mask=m_end)
        else:
            tl.store(ht + o_s, b_s, mask=m_end)
    if FINAL == 2:
        o_s = (i_s.to(tl.int64) * H + i_h) * (K * W) + o_k[None, :] * W + o_v[:, None]
        tl.store(ht + o_s, b_s, mask=(o_v < W)[:, None] & m_k)


@triton.jit(do_not_specialize=["N"])
def adjoint_kernel(
    q, k, kl, do, beta, near, pairs, alike, enter, leave, dht, cu_seqlens,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_ob, stride_oh, stride_bb, stride_bt, stride_bh, scale, T, N, L,
    rights, dhs, dh0,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RB: tl.constexpr,
    UNIT: tl.constexpr, stride_qt: tl.constexpr, stride_kt: tl.constexpr, stride_ot: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, EXACT: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, INIT: tl.constexpr, SAVE: tl.constexpr,
    FINAL: tl.constexpr, PRECISION: tl.constexpr,
):
    """The backward walk, from the last chunk to the first, with D the gradient of the state after a chunk.

    ``dU = pairs^T dO + leave K D``, ``R = dU - N^T beta dU``, ``dV = beta R``, ``D' = decay D + scale (enter Q)^T dO
    - (enter K)^T dV``. INIT, FINAL as forward; SAVE: 0, or R is written down, and D after each SAVE chunks.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_h = (tl.program_id(0) // NV) % H
    i_s = tl.program_id(0) // (NV * H)
    i_n, i_b, i_g, chunk, token, left = locate_rows(cu_seqlens, i_s, T, N, L, BT, PACKED, REVERSE, SPLIT, BN)
    _, _, _, saved, _, _ = locate_rows(cu_seqlens, i_s, T, N, L, BT * (SAVE or 1), PACKED, REVERSE, SPLIT, BN)
    size = tl.minimum(left, L).to(tl.int32) if SPLIT else left.to(tl.int32)
    n_c = tl.cdiv(tl.maximum(size, 0), BT)
    o_r = tl.arange(0, BT)
    o_t = -o_r if REVERSE else o_r
    step = -BT if REVERSE else BT
    token += (n_c - 1) * step
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = (o_k < K)[None, :]
    m_v = (o_v < V)[:, None]
    p_q = q + (i_b * stride_qb + (i_h // RQ).to(tl.int64) * stride_qh) * UNIT + token * stride_qt
    p_k = k + (i_b * stride_kb + (i_h // RK).to(tl.int64) * stride_kh) * UNIT + token * stride_kt
    p_l = kl + (i_b * stride_kb + (i_h // RK).to(tl.int64) * stride_kh) * UNIT + token * stride_kt
    p_o = do + (i_b * stride_ob + i_h.to(tl.int64) * stride_oh) * UNIT + token * stride_ot
    o_beta = i_b * stride_bb + token * stride_bt + (i_h // RB).to(tl.int64) * stride_bh
    row = ((i_b * T + token) * H + i_h) * V
    i_slot = (chunk + n_c - 1) * H + i_h
    dtype: tl.constexpr = k.dtype.element_ty

    b_d = tl.zeros([BV, BK], dtype=tl.float32)
    if INIT:
        i_init = ((i_s if SPLIT else i_n).to(tl.int64) * H + i_h) * (K * V)
        b_d = tl.load(dht + i_init + o_k[None, :] * V + o_v[:, None], mask=m_v & m_k, other=0.0).to(tl.float32)

    b_all = 1.0
    for i in range(n_c):
        m_t = o_r < size - (n_c - 1 - i) * BT
        b_k = tl.load(p_k + o_t[:, None] * stride_kt + o_k[None, :], mask=m_t[:, None] & m_k, other=0.0)  # [BT, BK]
        b_q = tl.load(p_q + o_t[:, None] * stride_qt + o_k[None, :], mask=m_t[:, None] & m_k, other=0.0)  # [BT, BK]
        b_do = tl.load(p_o + o_t[None, :] * stride_ot + o_v[:, None], mask=m_t[None, :] & m_v, other=0.0)  # [BV, BT]
        b_beta = load_beta(beta, o_beta + o_t * stride_bt, m_t, BETA)
        p_n = near + i_slot * ((1 if EXACT else 2) * BT * BT) + o_r[:, None] * BT + o_r[None, :]
        b_n = tl.load(p_n)  # [BT, BT]
        alike_c = tl.load(alike + i_slot) != 0
        b_p = tl.load(pairs + i_slot * (BT * BT) + o_r[:, None] * BT + o_r[None, :])
        b_h = b_d.to(dtype)
        b_l = b_k
        if GATE == 2:
            b_l = tl.load(p_l + o_t[:, None] * stride_kt + o_k[None, :], mask=m_t[:, None] & m_k, other=0.0)
        b_du = tl.dot(b_h, tl.trans(b_l), input_precision=PRECISION)  # [BV, BT]
        if GATE == 1:
            b_enter = tl.load(enter + i_slot * BT + o_r)
            b_du *= tl.load(leave + i_slot * BT + o_r)[None, :]
            b_all = tl.load(enter + i_slot * BT + BT - 1)
        b_du = tl.dot(b_do, b_p, b_du, input_precision=PRECISION)
        # A row's gradient sums all that reads it later, of which little may be left.
        b_w = b_du * b_beta[None, :]
        b_r = whole_dot(b_w, b_n, tl.zeros([BV, BT], dtype=tl.float32), alike_c, EXACT, PRECISION)
        if not EXACT:  # noqa: SIM102
            if alike_c:
                b_r = tl.dot(b_w.to(dtype), tl.load(p_n + BT * BT), b_r, input_precision=PRECISION)
        b_r = b_du - b_r
        if SAVE:
            o_row = o_t[None, :] * (H * V) + o_v[:, None]
            tl.store(rights + row + o_row, b_r.to(rights.dtype.element_ty), mask=m_t[None, :] & m_v)
            i_c = n_c - 1 - i
            o_s = ((saved + i_c // SAVE) * H + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
            tl.store(dhs + o_s, b_h, mask=m_v & m_k & ((i_c % SAVE == SAVE - 1) | (i == 0)))
        b_dv = b_r * b_beta[None, :]
        b_do2 = b_do.to(tl.float32)
        if GATE < 2:
            b_do2 *= scale
        if GATE == 1:
            b_do2 *= b_enter[None, :]
            b_dv *= b_enter[None, :]
            b_d *= b_all
        if GATE == 2:
            b_d *= tl.load(enter + i_slot * K + o_k, mask=o_k < K, other=0.0)[None, :]
        b_d = tl.dot(b_do2.to(dtype), b_q, b_d, input_precision=PRECISION)
        b_d = whole_dot(-b_dv, b_k, b_d, alike_c, EXACT, PRECISION)
        p_q -= step * stride_qt
        p_k -= step * stride_kt
        p_l -= step * stride_kt
        p_o -= step * stride_ot
        o_beta -= step * stride_bt
        row -= step * (H * V)
        i_slot -= H

    if FINAL == 1:
        o_s = (i_n.to(tl.int64) * H + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
        tl.store(dh0 + o_s, b_d.to(dh0.dtype.element_ty), mask=m_v & m_k & (i_g == 0))
    if FINAL == 2:
        o_s = (i_s.to(tl.int64) * H + i_h) * (K * V) + o_k[None, :] * V + o_v[:, None]
        tl.store(dh0 + o_s, b_d, mask=m_v & m_k)
