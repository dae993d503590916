"""The Triton kernels that are parallel over chunks: what vector gates do inside one, and the gradients of gates.

The conventions are those of ``scan.py``, which walks over sequences.
"""

import triton
import triton.language as tl

from keraunos.kernels.device.recurrence import (
    CLOSED,
    LOG2E,
    decay,
    in_turn,
    level,
    load_gamma,
    load_gate,
    locate,
    locate_chunk,
    ones_dot,
    power,
)


@triton.jit(do_not_specialize=["N"])
def decay_kernel(
    q, k, g, gamma, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_gamma_b, scale, T, N,
    qd, kd, sums, halved,
    H: tl.constexpr, K: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RG: tl.constexpr, UNIT: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, GAMMA: tl.constexpr, EXACT: tl.constexpr,
    MILD: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Work vector gates into q and k inside each chunk, so that a scan over chunks need not know them.

    ``qd = scale * q * factor``, ``kd = k / factor`` with ``factor = exp(gates from the chunk's start to the token)``;
    ``sums`` are the gates of the chunk, base 2 or, EXACT, their own. If those of any dimension sum below -MILD, factors
    may be too small for the dtype, and if they sum below -4 for each of few tokens, what cancels in their gradients may
    leave more than they are: then the chunk is ``halved``, and ``kd = k exp(gates after the token to its end)``. Walks
    token by token, two at a time. QUERIES, KEYS: which of qd and kd are wanted; one of them of a stretch of a sequence.
    """
    in_turn(OVERLAP)
    LOG: tl.constexpr = 1.0 if EXACT else LOG2E
    i_h = tl.program_id(0) % H
    i_s = tl.program_id(0) // H
    i_n, begin, length, i_c = locate(cu_seqlens, i_s, T, N, BT, PACKED, True, BN, not (QUERIES and KEYS))
    if i_c * BT >= length:
        return
    i_b = 0 if PACKED else i_n.to(tl.int64)
    base = begin + i_c * BT
    left = tl.minimum(length - i_c * BT, BT).to(tl.int32)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    p_q = q + (i_b * stride_qb + base * stride_qt + (i_h // RQ).to(tl.int64) * stride_qh) * UNIT + o_k
    p_k = k + (i_b * stride_kb + base * stride_kt + (i_h // RK).to(tl.int64) * stride_kh) * UNIT + o_k
    p_g = g + (i_b * stride_gb + base * stride_gt + (i_h // RG).to(tl.int64) * stride_gh) * UNIT + o_k
    o_d = ((i_b * T + base) * H + i_h) * K + o_k
    b_gamma = 0.0
    if GAMMA:
        b_gamma = load_gamma(gamma, i_b, i_h, stride_gamma_b, EXACT)

    b_to = tl.zeros([BK], dtype=tl.float32)
    for i in range(0, left, 2):
        for j in tl.static_range(2):
            t = (left - 1 - i - j) if REVERSE else (i + j)
            m_t = m_k & (i + j < left)
            b_g = load_gate(p_g + t * (stride_gt * UNIT), m_t, CLOSED)
            if QUERIES:
                b_q = tl.load(p_q + t * (stride_qt * UNIT), mask=m_t, other=0.0).to(tl.float32)
            if KEYS and MILD > 0:
                b_k = tl.load(p_k + t * (stride_kt * UNIT), mask=m_t, other=0.0).to(tl.float32)
            b_to += tl.where(m_t, b_g * LOG + b_gamma, 0.0)
            b_f = power(b_to, EXACT)
            o_t = o_d + t * (H * K)
            if QUERIES:
                tl.store(qd + o_t, (b_q * (b_f * scale)).to(qd.dtype.element_ty), mask=m_t)
            if KEYS and MILD > 0:
                tl.store(kd + o_t, (b_k * tl.exp2(-b_to)).to(kd.dtype.element_ty), mask=m_t)
    i_slot = i_s.to(tl.int64) * H + i_h
    tl.store(sums + i_slot * K + o_k, b_to, mask=m_k)
    strong = tl.min(tl.where(m_k, b_to, 0.0), 0) <= -tl.minimum(MILD, 4.0 * left)
    if MILD > 0:
        tl.store(halved + i_slot, strong.to(tl.int32))
    if KEYS:  # noqa: SIM102
        if strong:
            b_left = tl.zeros([BK], dtype=tl.float32)
            for i in range(left):
                t = i if REVERSE else (left - 1 - i)
                b_k = tl.load(p_k + t * (stride_kt * UNIT), mask=m_k, other=0.0).to(tl.float32)
                tl.store(kd + o_d + t * (H * K), (b_k * power(b_left, EXACT)).to(kd.dtype.element_ty), mask=m_k)
                b_left += load_gate(p_g + t * (stride_gt * UNIT), m_k, CLOSED) * LOG + b_gamma


@triton.jit(do_not_specialize=["N"])
def halving_kernel(
    q, k, g, gamma, halved, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_gamma_b, scale, T, N, WIDTH,
    intra,
    H: tl.constexpr, K: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RG: tl.constexpr, UNIT: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, GAMMA: tl.constexpr, EXACT: tl.constexpr,
    TERMS: tl.constexpr, MILD: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Pairs j <= i of chunks that are ``halved``: ``intra_ij = scale * sum_k q_ik k_jk exp(gates between j and i)``.

    At each level the pairs between the halves of a block factor at their boundary into ``exp(gates from the boundary to
    i) * exp(gates from j to the boundary)``, both at most 1, so each level is one tile ``y = (q in later halves, k in
    earlier halves) * factor`` and one product ``y y^T``; the diagonal has no decay. MILD of 0: all chunks. ``intra``
    is ``[B, T, H, WIDTH]``, of which the query's row of a pair has the pairs with its chunk.
    """
    in_turn(OVERLAP)
    LOG: tl.constexpr = 1.0 if EXACT else LOG2E
    NB: tl.constexpr = (H + BH - 1) // BH
    i_s = tl.program_id(0) // NB
    i_h0 = (tl.program_id(0) % NB) * BH
    i_n, begin, length, i_c = locate(cu_seqlens, i_s, T, N, BT, PACKED, True, BN)
    if i_c * BT >= length:
        return
    o_h = tl.arange(0, BH)
    m_strong = i_h0 + o_h < H
    if MILD > 0:
        m_strong = tl.load(halved + i_s.to(tl.int64) * H + i_h0 + o_h, mask=m_strong, other=0) != 0
        if tl.max(m_strong.to(tl.int32), 0) == 0:
            return
    i_b = 0 if PACKED else i_n.to(tl.int64)
    base = begin + i_c * BT
    left = tl.minimum(length - i_c * BT, BT).to(tl.int32)
    o_t = tl.arange(0, BT)
    m_t = o_t < left
    o_p = (BT - 1 - o_t) if REVERSE else o_t
    dtype: tl.constexpr = q.dtype.element_ty
    for i in range(BH):
        i_h = i_h0 + i
        if tl.max(tl.where(o_h == i, m_strong.to(tl.int32), 0), 0) != 0:
            p_q = q + (i_b * stride_qb + base * stride_qt + (i_h // RQ).to(tl.int64) * stride_qh) * UNIT
            p_k = k + (i_b * stride_kb + base * stride_kt + (i_h // RK).to(tl.int64) * stride_kh) * UNIT
            p_g = g + (i_b * stride_gb + base * stride_gt + (i_h // RG).to(tl.int64) * stride_gh) * UNIT
            b_gamma = 0.0
            if GAMMA:
                b_gamma = load_gamma(gamma, i_b, i_h, stride_gamma_b, EXACT) / LOG

            b_a = tl.zeros([BT, BT], dtype=tl.float32)  # [i, j]
            for i_k in range(0, K, BK):
                o_k = i_k + tl.arange(0, BK)
                m_k = m_t[:, None] & (o_k < K)[None, :]
                b_q = tl.load(p_q + o_t[:, None] * (stride_qt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
                b_k = tl.load(p_k + o_t[:, None] * (stride_kt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
                b_g = load_gate(p_g + o_t[:, None] * (stride_gt * UNIT) + o_k[None, :], m_k, CLOSED)
                if GAMMA:
                    b_g = tl.where(m_k, b_g + b_gamma, 0.0)
                b_d = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
                b_a += tl.where(o_p[:, None] == o_p[None, :], b_d[:, None], 0.0)
                m = 1
                while m < BT:
                    later, m_sum, m_pair = level(o_p, m)
                    b_y = tl.where(later[:, None], b_q.to(tl.float32), b_k.to(tl.float32))
                    b_y = (b_y * decay(ones_dot(m_sum, b_g, TERMS), EXACT)).to(dtype)  # [BT, BK]
                    b_l = tl.dot(b_y, tl.trans(b_y), input_precision=PRECISION)
                    b_a += tl.where(m_pair & later[:, None], b_l, 0.0)
                    m *= 2
            p_a = intra + ((i_b * T + base) * H + i_h) * WIDTH
            tl.store(p_a + o_t[:, None] * (H * WIDTH) + o_t[None, :], (b_a * scale).to(dtype), mask=m_t[:, None])


@triton.jit
def mild_gradients(
    b_q, b_k, b_g, b_sums, b_da, b_dq, b_dk, b_across, o_p, m_upto, scale,
    TERMS: tl.constexpr, DG_TERMS: tl.constexpr, PRECISION: tl.constexpr,
):
    """dq, dk and dg ``[BT, BK]`` with mild vector gates: q has been decayed from the chunk's start, k to it.

    ``b_da`` ``[BT, BT]`` are the gradients of pairs, without decay; ``b_dq`` and ``b_dk`` those through the states;
    ``b_across`` ``[BK]`` is what passes through the chunk.
    """
    b_p = tl.where(m_upto, b_da, 0.0).to(b_q.dtype)  # [BT (i), BT (j)]
    b_qf = b_q.to(tl.float32)
    b_across += tl.sum(b_qf * b_dq, 0)
    b_dk = tl.dot(tl.trans(b_p), b_q, b_dk * tl.exp2(b_sums)[None, :], input_precision=PRECISION)
    b_dq = tl.dot(b_p, b_k, b_dq, input_precision=PRECISION)
    # Reads of the state before the chunk minus what tokens before t read and are read for. Terms of pairs in the chunk
    # cancel but for pairs that span t: exactly, as both have the same terms.
    b_x = b_qf * b_dq - b_k.to(tl.float32) * b_dk
    b_dg = b_across[None, :] - ones_dot(o_p[:, None] > o_p[None, :], b_x, DG_TERMS + 1)
    b_to = ones_dot(m_upto, tl.maximum(b_g.to(tl.float32), CLOSED), TERMS) * LOG2E
    return b_dq * (tl.exp2(b_to) * scale), b_dk * tl.exp2(-b_to), b_dg


@triton.jit
def halved_gradients(
    b_q, b_k, b_g, b_da, b_dq, b_dk, b_across, o_p, m_upto, m_after, scale,
    BT: tl.constexpr, EXACT: tl.constexpr, TERMS: tl.constexpr, DG_TERMS: tl.constexpr, PRECISION: tl.constexpr,
):
    """dq, dk and dg ``[BT, BK]`` with any vector gates; arguments as for ``mild_gradients``.

    Pairs of tokens factor level by level, at the boundary between the halves of blocks.
    """
    b_qf = b_q.to(tl.float32)
    b_kf = b_k.to(tl.float32)
    b_gc = tl.maximum(b_g.to(tl.float32), CLOSED)
    b_dq *= decay(ones_dot(m_upto, b_gc, TERMS), EXACT) * scale
    b_dk *= decay(ones_dot(m_after, b_gc, TERMS), EXACT)
    b_dg = ones_dot(o_p[:, None] <= o_p[None, :], b_qf * b_dq, DG_TERMS)
    b_dg += ones_dot(o_p[:, None] > o_p[None, :], b_kf * b_dk, DG_TERMS)
    b_dg += b_across[None, :]
    b_d = tl.sum(tl.where(o_p[:, None] == o_p[None, :], b_da, 0.0), 1)
    b_dq += b_d[:, None] * b_kf
    b_dk += b_d[:, None] * b_qf
    # Mirrored, so that one product per level gives both dq and dk.
    b_w = tl.where(m_upto, b_da, tl.trans(b_da))
    m = 1
    while m < BT:
        later, m_sum, m_pair = level(o_p, m)
        b_e = decay(ones_dot(m_sum, b_gc, TERMS), EXACT)
        b_y = tl.where(later[:, None], b_qf, b_kf) * b_e  # [BT, BK]
        b_z = tl.dot(tl.where(m_pair, b_w, 0.0).to(b_q.dtype), b_y.to(b_q.dtype), input_precision=PRECISION)
        b_dg += ones_dot(tl.trans(m_sum.to(tl.int32)), b_y * b_z, DG_TERMS)
        b_z *= b_e
        b_dq += tl.where(later[:, None], b_z, 0.0)
        b_dk += tl.where(later[:, None], 0.0, b_z)
        m *= 2
    return b_dq, b_dk, b_dg


@triton.jit
def scalar_gradients(
    b_q, b_k, b_g, b_gamma, b_da, b_dq, b_dk, b_across, o_t, o_p, m_upto, m_after, left, scale,
    GATE: tl.constexpr, EXACT: tl.constexpr, TERMS: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):
    """dq, dk ``[BT, BK]`` and dg ``[BT]`` with one gate per token, ``b_g`` ``[BT]``, or a constant one only."""
    LOG: tl.constexpr = 1.0 if EXACT else LOG2E
    b_row = b_gamma * tl.maximum((left - o_t) if REVERSE else (o_t + 1), 0)
    b_col = b_gamma * tl.maximum(o_t if REVERSE else (left - 1 - o_t), 0)
    b_all = b_gamma * left
    b_between = b_gamma * tl.maximum(o_p[:, None] - o_p[None, :], 0)  # [BT (i), BT (j)]
    if GATE == 1:
        b_row += tl.sum(tl.where(m_upto, b_g[None, :], 0.0), 1) * LOG
        b_col += tl.sum(tl.where(m_after, b_g[None, :], 0.0), 1) * LOG
        b_all += tl.sum(b_g, 0) * LOG
        b_after = tl.where(o_p[:, None] > o_p[None, :], b_g[:, None], 0.0)  # [BT (t), BT (j)]
        b_between += ones_dot(m_upto, b_after, TERMS) * LOG
    b_pair = tl.where(m_upto, power(b_between, EXACT), 0.0)
    b_dq *= (power(b_row, EXACT) * scale)[:, None]
    b_dk *= power(b_col, EXACT)[:, None]
    b_rq = tl.sum(b_q.to(tl.float32) * b_dq, 1)  # [BT] what the token reads from before the chunk
    b_rk = tl.sum(b_k.to(tl.float32) * b_dk, 1)  # [BT] what it leaves to after the chunk
    b_da *= b_pair
    b_w = b_da.to(b_q.dtype)
    b_dq = tl.dot(b_w, b_k, b_dq, input_precision=PRECISION)
    b_dk = tl.dot(tl.trans(b_w), b_q, b_dk, input_precision=PRECISION)
    b_a = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_da  # [BT (i), BT (j)]
    # Pairs j < t <= i: the product keeps j < t, the sum over rows i >= t.
    b_m = m_after.to(tl.float32).to(b_q.dtype)
    b_x = tl.dot(b_a.to(b_q.dtype), b_m, input_precision=PRECISION) + b_rq[:, None]  # [BT (i), BT (t)]
    b_dg = tl.sum(tl.where(m_upto, b_x, 0.0), 0)
    b_dg += tl.sum(tl.where(m_after, b_rk[:, None], 0.0), 0)
    b_dg += tl.sum(b_across, 0) * power(b_all, EXACT)
    return b_dq, b_dk, b_dg


@triton.jit
def opaque(x):
    """16-bit x as something new, so that what is made of it is made after this: shared memory's copy of it, above all.

    Triton makes that where x is loaded, and so waits for x before it asks for anything else.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, True, 2)


@triton.jit(do_not_specialize=["W"])
def gradient_kernel(
    q, k, v, g, gamma, sums, do, hs, dhs, halved, dq_given, dk_given, dg_given, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_gamma_b, stride_ob, stride_ot, stride_oh, scale, T, N, L, M, F, W,
    dq, dk, dg,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr,
    RG: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr, GATE: tl.constexpr, GAMMA: tl.constexpr, EXACT: tl.constexpr, TERMS: tl.constexpr,
    DG_TERMS: tl.constexpr, MILD: tl.constexpr, HALVED: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):
    """dq, dk and dg of one chunk, for a tile of BK of the K dimensions.

    ``hs`` holds the state before each chunk and ``dhs`` the gradient of the state after it. A gate is in every pair
    that spans it, so dg_t is a sum over pairs j < t <= i: within the chunk level by level, from before the chunk
    through q and dq, to after it through k and dk, and across it through both states. All these are sums of what is
    there, never differences that cancel. With scalar or constant gates (GATE < 2) dg is one value per token and tile of
    K. MILD: q and k come from ``decay_kernel``, and chunks that are ``halved`` get nothing of use; HALVED: only these.
    L, M, F, W: as in ``locate_chunk``. ``dq_given``, ``dk_given`` and ``dg_given`` have no values that
    are read: dq, dk and dg may overwrite them.
    """
    if not HALVED:
        in_turn(OVERLAP)
    LOG: tl.constexpr = 1.0 if EXACT else LOG2E
    NK: tl.constexpr = (K + BK - 1) // BK
    NB: tl.constexpr = (H + BH - 1) // BH
    i_k = tl.program_id(0) % NK
    i_h0 = (tl.program_id(0) // NK) % NB * BH
    i_o = tl.program_id(0) // (NK * NB)
    i_n, begin, length, i_c, i_s = locate_chunk(cu_seqlens, i_o, T, N, L, M, F, W, BT, PACKED, BN)
    if HALVED:
        # What is halved was known before the launch before this one, which is the one for all chunks.
        o_h = tl.arange(0, BH)
        m_h = tl.load(halved + i_s * H + i_h0 + o_h, mask=(i_h0 + o_h < H) & (i_c * BT < length), other=0)
        in_turn(OVERLAP)
    if i_c * BT >= length:
        return
    if HALVED:  # noqa: SIM102
        if tl.max(m_h, 0) == 0:
            return
    for i in range(BH):
        i_h = i_h0 + i
        if UNIT < 16:
            # No GPU has so long an array that its heads are 2**31 units of 16 apart.
            i_h = i_h.to(tl.int64)
        run = True
        if HALVED:
            run = tl.max(tl.where(o_h == i, m_h, 0), 0) != 0
        if run:
            i_b = 0 if PACKED else i_n.to(tl.int64)
            base = begin + i_c * BT
            left = tl.minimum(length - i_c * BT, BT).to(tl.int32)
            o_t = tl.arange(0, BT)
            m_t = o_t < left
            o_p = (BT - 1 - o_t) if REVERSE else o_t
            o_k = i_k * BK + tl.arange(0, BK)
            m_k = m_t[:, None] & (o_k < K)[None, :]
            p_v = v + (i_b * stride_vb + base * stride_vt + (i_h // RV) * stride_vh) * UNIT
            p_o = do + (i_b * stride_ob + base * stride_ot + i_h * stride_oh) * UNIT
            p_q = q + (i_b * stride_qb + base * stride_qt + (i_h // RQ) * stride_qh) * UNIT
            p_k = k + (i_b * stride_kb + base * stride_kt + (i_h // RK) * stride_kh) * UNIT
            i_slot = i_s * H + i_h
            i_state = (i_o.to(tl.int64) * H + i_h) * K * V
            b_gamma = 0.0
            if GAMMA:
                b_gamma = load_gamma(gamma, i_b, i_h, stride_gamma_b, EXACT)
            UNIT_G: tl.constexpr = UNIT if GATE == 2 else 1
            if GATE > 0:
                p_g = g + (i_b * stride_gb + base * stride_gt + (i_h // RG) * stride_gh) * UNIT_G
            m_upto = o_p[:, None] >= o_p[None, :]
            m_after = o_p[:, None] < o_p[None, :]
            row = (i_b * T + base) * H + i_h
            o_d = row * K + o_t[:, None] * (H * K) + o_k[None, :]  # of dq, dk and dg

            b_q = tl.load(p_q + o_t[:, None] * (stride_qt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
            b_k = tl.load(p_k + o_t[:, None] * (stride_kt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
            if GATE == 2:
                b_sums = tl.load(sums + i_slot * K + o_k, mask=o_k < K, other=0.0)  # [BK]
                b_g = tl.load(p_g + o_t[:, None] * (stride_gt * UNIT_G) + o_k[None, :], mask=m_k, other=0.0)
                if GAMMA:
                    b_g = tl.where(m_k, b_g.to(tl.float32) + b_gamma / LOG, 0.0)
            b_da = tl.zeros([BT, BT], dtype=tl.float32)
            b_dq = tl.zeros([BT, BK], dtype=tl.float32)
            b_dk = tl.zeros([BT, BK], dtype=tl.float32)
            b_across = tl.zeros([BK], dtype=tl.float32)
            for i_v in range(0, V, BV):
                o_v = i_v + tl.arange(0, BV)
                m_v = m_t[:, None] & (o_v < V)[None, :]
                b_v = tl.load(p_v + o_t[:, None] * (stride_vt * UNIT) + o_v[None, :], mask=m_v, other=0.0)  # [BT, BV]
                b_do = tl.load(p_o + o_t[:, None] * (stride_ot * UNIT) + o_v[None, :], mask=m_v, other=0.0)  # [BT, BV]
                o_s = o_k[:, None] * V + o_v[None, :]
                m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
                b_h = tl.load(hs + i_state + o_s, mask=m_s, other=0.0)  # [BK, BV]
                b_dh = tl.load(dhs + i_state + o_s, mask=m_s, other=0.0)  # [BK, BV]
                b_da = tl.dot(b_do, tl.trans(b_v), b_da, input_precision=PRECISION)
                b_dq = tl.dot(b_do, tl.trans(b_h), b_dq, input_precision=PRECISION)
                b_dk = tl.dot(b_v, tl.trans(b_dh), b_dk, input_precision=PRECISION)
                b_across += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)
            if MILD and OVERLAP > 0:
                b_q = opaque(b_q)
                b_k = opaque(b_k)
            if not MILD:
                b_da *= scale

            if GATE == 2:
                b_across *= power(b_sums, EXACT)
                if MILD:
                    b_dq, b_dk, b_dg = mild_gradients(
                        b_q, b_k, b_g, b_sums, b_da, b_dq, b_dk, b_across, o_p, m_upto, scale,
                        TERMS, DG_TERMS, PRECISION,
                    )
                else:
                    b_dq, b_dk, b_dg = halved_gradients(
                        b_q, b_k, b_g, b_da, b_dq, b_dk, b_across, o_p, m_upto, m_after, scale,
                        BT, EXACT, TERMS, DG_TERMS, PRECISION,
                    )
                tl.store(dg + o_d, b_dg.to(dg.dtype.element_ty), mask=m_k)
            else:
                b_g = b_gamma
                if GATE == 1:
                    b_g = load_gate(p_g + o_t * (stride_gt * UNIT_G), m_t, CLOSED)  # [BT]
                b_dq, b_dk, b_dg = scalar_gradients(
                    b_q, b_k, b_g, b_gamma, b_da, b_dq, b_dk, b_across, o_t, o_p, m_upto, m_after, left, scale,
                    GATE, EXACT, TERMS, REVERSE, PRECISION,
                )
                i_kb = i_k * (1 if PACKED else N) + i_b
                tl.store(dg + (i_kb * T + base + o_t) * H + i_h, b_dg, mask=m_t)

            tl.store(dq + o_d, b_dq.to(dq.dtype.element_ty), mask=m_k)
            tl.store(dk + o_d, b_dk.to(dk.dtype.element_ty), mask=m_k)
