"""The Triton kernels of the gated linear recurrence; ``triton.py`` says how they make a forward and a backward.

Sequences are cut into chunks of BT tokens, and for the sequence split into segments of L tokens. Rows of a tile are in
the order of memory; ``o_p`` is their place in the order of the recurrence, so that running backwards is index
arithmetic. An adjoint run (ADJOINT) carries the gradient of the state: a token's own gate acts after the token, not
before it, and the softmax scale acts on what enters the state, not on what is read from it.

Every decay is ``exp2`` of a sum of gates over exactly the tokens that it spans, taken as a product with a 0/1 matrix:
no difference of cumulative sums, so nothing overflows or cancels for any gate <= 0, ``-inf`` included.

Strides of rows that are no constants come in units of UNIT, a constant: so the compiler knows that rows are aligned,
also where the front end does not tell it what numbers are multiples of, and builds the same code for every front end.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Stands for -inf in sums of gates: 0 * CLOSED is 0, exp of it is 0, and every 16-bit format holds it exactly.
CLOSED = tl.constexpr(-16384.0)
# The log of less than any 16-bit value.
FAINT = tl.constexpr(-100.0)


@triton.jit
def locate(cu_seqlens, i_s, T, N, L, PACKED: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr):
    """Slot -> (sequence, its first token, its length, segment). Sequence n owns the slots from ``begin // L + n``."""
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
    return i_n, begin, length, i_g


@triton.jit
def ones_dot(m, x, TERMS: tl.constexpr):
    """``m @ x`` of a 0/1 matrix, exact to ``8 * TERMS`` bits of x: the tensor cores see x as that many bf16 parts."""
    # By way of float32: the interpreter casts only that to bf16 by value.
    m = m.to(tl.float32).to(tl.bfloat16)
    b_x = x.to(tl.bfloat16)
    b_y = tl.dot(m, b_x)
    for _ in tl.static_range(TERMS - 1):
        x = x.to(tl.float32) - b_x.to(tl.float32)
        b_x = x.to(tl.bfloat16)
        b_y = tl.dot(m, b_x, b_y)
    return b_y


@triton.jit
def load_gate(p_g, m_g, LOWEST: tl.constexpr):
    """Gates, at least LOWEST, 0 outside the sequence."""
    return tl.maximum(tl.load(p_g, mask=m_g, other=0.0).to(tl.float32), LOWEST)


@triton.jit
def load_gamma(gamma, i_b, i_h, stride_gamma_b):
    """The constant gate of a head, base 2; finite, so that no tokens' worth of it is 0."""
    return tl.maximum(tl.load(gamma + i_b * stride_gamma_b + i_h).to(tl.float32), CLOSED) * LOG2E


@triton.jit
def chunk_decay(
    b_gamma, o_p, left, scale_out, scale_in, BT: tl.constexpr, REVERSE: tl.constexpr, ADJOINT: tl.constexpr
):
    """Constant decays of a chunk of ``left`` tokens: from its start to each ``[BT]``, from each to its end, across it.

    Rows past the end do not count: they come last, or first when running backwards.
    """
    n_past = BT - left
    n_to = o_p + (0 if ADJOINT else 1) - (n_past if REVERSE else 0)
    n_left = BT - 1 - o_p + (1 if ADJOINT else 0) - (0 if REVERSE else n_past)
    b_to = tl.exp2(b_gamma * tl.maximum(n_to, 0)) * scale_out
    b_left = tl.exp2(b_gamma * tl.maximum(n_left, 0)) * scale_in
    return b_to, b_left, tl.exp2(b_gamma * left)


@triton.jit
def scan_kernel(
    q, k, v, g, gamma, sums, halved, intra, h0, cu_seqlens,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gt, stride_gh, stride_gamma_b,
    scale, T, N, L,
    o, ht, hs, total,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr,
    stride_qt: tl.constexpr, stride_kt: tl.constexpr, stride_vt: tl.constexpr, UNIT: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    GATE: tl.constexpr, GAMMA: tl.constexpr, TERMS: tl.constexpr, MILD: tl.constexpr, REVERSE: tl.constexpr,
    ADJOINT: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, INIT: tl.constexpr, FINAL: tl.constexpr,
    OUTPUT: tl.constexpr, CHUNKS: tl.constexpr, STATE_T: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk a sequence, or one segment of it, chunk by chunk, with a tile of the state in registers.

    ``o_i = sum_{j <= i} decay_ij (q_i . k_j) v_j``, for a tile of BV of the V dimensions of v. Everything is computed
    transposed, values by tokens: then the state ``[BV, BK]`` and the decayed v are left operands, which the tensor
    cores read from registers, and only the masked ``k q^T`` passes through shared memory.

    GATE: 0 none, 1 per token ``[B, T, H]``, 2 per token and dimension of k: then q and k come from ``decay_kernel``,
    decayed to the borders of their chunk, with its ``sums``; the pairs of a chunk that is ``halved`` are in ``intra``,
    those of others come from q and k and the sums: MILD says when. INIT: 0 zeros, 1 h0 of the sequence, 2 h0 of the
    segment. FINAL: 0 none, 1 ht of the sequence, 2 ht (and the sum of the gates, ``total``) of the segment. CHUNKS:
    write the state before each chunk to hs. STATE_T: h0 and ht are ``[V, K]`` in memory.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_h = (tl.program_id(0) // NV) % H
    i_s = tl.program_id(0) // (NV * H)
    i_n, begin, length, i_g = locate(cu_seqlens, i_s, T, N, L, PACKED, SPLIT, BN)
    if SPLIT:
        if i_g * L >= length and i_g > 0:
            return
        if FINAL == 2:  # noqa: SIM102
            # Nobody continues from the last segment.
            if (i_g == 0) if REVERSE else ((i_g + 1) * L >= length):
                return
    i_b = 0 if PACKED else i_n.to(tl.int64)
    first = i_g * L if SPLIT else i_g
    size = (tl.minimum(length - first, L) if SPLIT else length).to(tl.int32)
    n_c = tl.cdiv(size, BT)

    o_t = tl.arange(0, BT)
    o_p = (BT - 1 - o_t) if REVERSE else o_t
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = (o_k < K)[None, :]
    m_v = (o_v < V)[None, :]
    # Walk from the first chunk, or from the last one down.
    skip = ((n_c - 1) * BT).to(tl.int64) if REVERSE else tl.full([], 0, tl.int64)
    step = -BT if REVERSE else BT
    base = begin + first + skip
    p_q = q + (i_b * stride_qb + (i_h // RQ).to(tl.int64) * stride_qh) * UNIT + base * stride_qt
    p_k = k + (i_b * stride_kb + (i_h // RK).to(tl.int64) * stride_kh) * UNIT + base * stride_kt
    p_v = v + (i_b * stride_vb + (i_h // RV).to(tl.int64) * stride_vh) * UNIT + base * stride_vt
    row = (i_b * T + base) * H + i_h  # of a contiguous [B, T, H, ...]
    if OUTPUT:
        p_o = o + row * V
    if GATE == 1:
        p_g = g + i_b * stride_gb + base * stride_gt + i_h * stride_gh + o_t * stride_gt
    i_slot = (begin // BT + i_n) if PACKED else (i_b * tl.cdiv(T, BT))
    i_slot = (i_slot + (first + skip) // BT) * H + i_h  # of the chunk
    dtype: tl.constexpr = k.dtype.element_ty

    o_s = o_v[:, None] * (K if STATE_T else 1) + o_k[None, :] * (1 if STATE_T else V)
    m_s = (o_v < V)[:, None] & m_k
    if INIT > 0:
        i_init = (i_n if INIT == 1 else i_s).to(tl.int64) * H + i_h
        b_s = tl.load(h0 + i_init * K * V + o_s, mask=m_s, other=0.0).to(tl.float32)  # [BV, BK]
    else:
        b_s = tl.zeros([BV, BK], dtype=tl.float32)

    # The decays of a whole chunk: between its tokens, from its start, to its end, and across it. Adjoint runs see a
    # token's gate after the token, and scale what enters the state.
    b_gamma = 0.0
    if GAMMA and GATE < 2:
        b_gamma = load_gamma(gamma, i_b, i_h, stride_gamma_b)
    m_pair = o_p[:, None] <= o_p[None, :]  # [BT (j), BT (i)]
    b_gap = b_gamma * tl.maximum(o_p[None, :] - o_p[:, None], 0)
    b_pair = tl.where(m_pair, tl.exp2(b_gap) * scale, 0.0)
    scale_out = 1.0 if ADJOINT else scale
    scale_in = scale if ADJOINT else 1.0
    left = tl.minimum(size - (n_c - 1) * BT if REVERSE else size, BT)
    b_to, b_left, b_all = chunk_decay(b_gamma, o_p, left, scale_out, scale_in, BT, REVERSE, ADJOINT)
    b_sum = tl.zeros([BK], dtype=tl.float32)
    b_sum1 = 0.0

    one = tl.where(T < 0, 0.0, 1.0)
    for i in range(n_c):
        # Written with i, not with the carried ``left``: the pipeline loads chunks ahead and needs their masks then.
        m_t = o_t < size - ((n_c - 1 - i) if REVERSE else i) * BT
        if CHUNKS:
            p_s = hs + i_slot * K * V + o_v[:, None] + o_k[None, :] * V
            tl.store(p_s, b_s.to(hs.dtype.element_ty), mask=m_s)
        b_k = tl.load(p_k + o_t[:, None] * stride_kt + o_k[None, :], mask=m_t[:, None] & m_k, other=0.0)  # [BT, BK]
        b_v = tl.load(p_v + o_t[:, None] * stride_vt + o_v[None, :], mask=m_t[:, None] & m_v, other=0.0)  # [BT, BV]
        if OUTPUT:
            b_q = tl.load(p_q + o_t[:, None] * stride_qt + o_k[None, :], mask=m_t[:, None] & m_k, other=0.0)  # [BT, BK]

        b_to_c, b_left_c, b_all_c = b_to, b_left, b_all
        if GATE == 1:
            # Differences of sums over the chunk are as good as 16-bit inputs if no gate is below FAINT.
            b_g = load_gate(p_g, m_t, CLOSED if EXACT else FAINT)  # [BT]
            m_upto = (o_p[:, None] < o_p[None, :]) if ADJOINT else (o_p[:, None] <= o_p[None, :])
            m_after = (o_p[:, None] <= o_p[None, :]) if ADJOINT else (o_p[:, None] < o_p[None, :])
            b_g_to = tl.sum(tl.where(m_upto, b_g[:, None], 0.0), 0)  # [BT (i)]
            b_g_all = tl.sum(b_g, 0)
            b_g_left = tl.sum(tl.where(m_after, b_g[None, :], 0.0), 1)  # [BT (j)]
            b_to_c *= tl.exp2(b_g_to * LOG2E)
            b_left_c *= tl.exp2(b_g_left * LOG2E)
            b_all_c *= tl.exp2(b_g_all * LOG2E)
            b_sum1 += b_g_all
            p_g += step * stride_gt
            if OUTPUT:
                if EXACT:
                    # Rows t, columns i: the gates up to i; the product with m_after keeps those after j.
                    b_between = ones_dot(m_after, tl.where(m_upto, b_g[:, None], 0.0), TERMS)
                else:
                    b_between = b_g_to[None, :] + (b_g_left - b_g_all)[:, None]
                b_between = tl.minimum(b_between, 0.0) * LOG2E + b_gap
                b_pair = tl.where(m_pair, tl.exp2(b_between) * scale, 0.0)
        if GATE == 2:
            b_sums = tl.load(sums + i_slot * K + o_k, mask=o_k < K, other=0.0)
            b_sum += b_sums

        if OUTPUT:
            if GATE == 2:
                # intra is [query's token, key's token]; in an adjoint run the two change places.
                o_a = o_t[:, None] * (BT if ADJOINT else 1) + o_t[None, :] * (1 if ADJOINT else BT)
                p_a = intra + i_slot * BT * BT + o_a
                if MILD > 0:
                    # Decayed to the chunk's start and to its end is decayed by all its gates too much.
                    b_r = (b_q.to(tl.float32) * tl.exp2(-b_sums)[None, :]).to(dtype)
                    b_a = tl.dot(b_k, tl.trans(b_r), input_precision=PRECISION)  # [BT (j), BT (i)]
                    b_a = tl.where(m_pair, b_a, 0.0).to(dtype)
                    if tl.load(halved + i_slot) != 0:
                        b_a = tl.load(p_a)
                else:
                    b_a = tl.load(p_a)
                b_o = tl.dot(b_s.to(dtype), tl.trans(b_q), input_precision=PRECISION)  # [BV, BT]
            else:
                b_a = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BT (j), BT (i)]
                b_o = tl.dot(b_s.to(dtype), tl.trans(b_q), input_precision=PRECISION)  # [BV, BT]
                b_a = (b_a * b_pair).to(dtype)
                b_o *= b_to_c[None, :]
            b_o = tl.dot(tl.trans(b_v), b_a, b_o, input_precision=PRECISION)
            o_o = o_t[None, :] * (H * V) + o_v[:, None]
            tl.store(p_o + o_o, b_o.to(o.dtype.element_ty), mask=(o_v < V)[:, None] & m_t[None, :])
            p_o += step * (H * V)
        if GATE == 2:
            b_u = b_v
            b_s *= tl.exp2(b_sums)[None, :]
        else:
            b_u = (b_v.to(tl.float32) * b_left_c[:, None]).to(dtype)
            b_s *= b_all_c
        b_s = tl.dot(tl.trans(b_u), b_k, b_s, input_precision=PRECISION)
        if FINAL > 0:
            # Reading the state here ends its product in this step; read only after the loop, the assembler would
            # serialize all products of the loop.
            b_s *= one
        p_q += step * stride_qt
        p_k += step * stride_kt
        p_v += step * stride_vt
        row += step * H
        i_slot += -H if REVERSE else H
        # Only the sequence's last chunk may be shorter: the decays change once at most.
        following = BT if REVERSE else tl.maximum(tl.minimum(size - (i + 1) * BT, BT), 0)
        if following != left:
            b_to, b_left, b_all = chunk_decay(b_gamma, o_p, following, scale_out, scale_in, BT, REVERSE, ADJOINT)
        left = following

    if FINAL > 0:
        write = True
        if SPLIT and FINAL == 1:
            write = (i_g == 0) if REVERSE else ((i_g + 1) * L >= length)
        if write:
            i_final = (i_n if FINAL == 1 else i_s).to(tl.int64) * H + i_h
            tl.store(ht + i_final * K * V + o_s, b_s, mask=m_s)
    if FINAL == 2 and i_v == 0:
        i_total = i_s.to(tl.int64) * H + i_h
        if GATE == 1:
            tl.store(total + i_total, b_sum1 * LOG2E)
        if GATE == 2:
            tl.store(total + i_total * K + o_k, b_sum, mask=o_k < K)


@triton.jit
def combine_kernel(
    local, total, gamma, h0, cu_seqlens, stride_gamma_b, T, N, L,
    starts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, GAMMA: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, INIT: tl.constexpr,
):  # fmt: skip
    """Each segment's incoming state ``[slots, H, K, V]``, walking a sequence's segments, from their own states."""
    NK: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % NK
    i_h = (tl.program_id(0) // NK) % H
    i_n = tl.program_id(0) // (NK * H)
    _, begin, length, _ = locate(cu_seqlens, i_n, T, N, L, PACKED, False, 1)
    i_b = 0 if PACKED else i_n.to(tl.int64)
    n_g = tl.maximum(tl.cdiv(length, L), 1).to(tl.int32)
    slot0 = (begin // L + i_n) if PACKED else i_b * n_g
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    o_s = o_k[:, None] * V + o_v[None, :]
    if INIT:
        b_s = tl.load(h0 + (i_n.to(tl.int64) * H + i_h) * K * V + o_s, mask=m_s, other=0.0).to(tl.float32)
    else:
        b_s = tl.zeros([BK, BV], dtype=tl.float32)
    b_gamma = 0.0
    if GAMMA and GATE < 2:
        b_gamma = load_gamma(gamma, i_b, i_h, stride_gamma_b)
    for i in range(n_g):
        i_g = (n_g - 1 - i) if REVERSE else i
        i_slot = (slot0 + i_g) * H + i_h
        tl.store(starts + i_slot * K * V + o_s, b_s, mask=m_s)
        if i < n_g - 1:
            if GATE == 2:
                b_s *= tl.exp2(tl.load(total + i_slot * K + o_k, mask=o_k < K, other=0.0))[:, None]
            else:
                b_all = b_gamma * tl.minimum(length - i_g * L, L).to(tl.float32)
                if GATE == 1:
                    b_all += tl.load(total + i_slot)
                b_s *= tl.exp2(b_all)
            b_s += tl.load(local + i_slot * K * V + o_s, mask=m_s, other=0.0)


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
def around_middle(o_p, BT: tl.constexpr):
    """``[BT, BT]`` in {-1, 0, 1}: its product with gates is their sum from the chunk's middle to a token, signed."""
    m_upto = (o_p[None, :] <= o_p[:, None]).to(tl.float32)
    m_early = (o_p[None, :] < BT // 2).to(tl.float32)
    return m_upto - m_early


@triton.jit
def decay_kernel(
    q, k, g, gamma, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_gamma_b, scale, T, N,
    qd, kd, sums, early,
    H: tl.constexpr, K: tl.constexpr, RK: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, GAMMA: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What vector gates do inside a chunk, worked into q and k, so that a scan over chunks need not know them.

    ``qd = scale * q exp(gates from the chunk's start to the token)``, ``kd = k exp(gates after the token to the chunk's
    end)``, ``sums`` the gates (base 2) of the chunk, ``early`` those of its earlier half. Walks token by token, q from
    the start and k from the end.
    """
    i_h = tl.program_id(0) % H
    i_s = tl.program_id(0) // H
    i_n, begin, length, i_c = locate(cu_seqlens, i_s, T, N, BT, PACKED, True, BN)
    if i_c * BT >= length:
        return
    i_b = 0 if PACKED else i_n.to(tl.int64)
    base = begin + i_c * BT
    left = tl.minimum(length - i_c * BT, BT).to(tl.int32)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    p_q = q + (i_b * stride_qb + base * stride_qt + i_h * stride_qh) * UNIT + o_k
    p_k = k + (i_b * stride_kb + base * stride_kt + (i_h // RK) * stride_kh) * UNIT + o_k
    p_g = g + (i_b * stride_gb + base * stride_gt + i_h * stride_gh) * UNIT + o_k
    p_d = ((i_b * T + base) * H + i_h) * K + o_k
    b_gamma = 0.0
    if GAMMA:
        b_gamma = load_gamma(gamma, i_b, i_h, stride_gamma_b)

    b_to = tl.zeros([BK], dtype=tl.float32)
    b_left = tl.zeros([BK], dtype=tl.float32)
    b_early = tl.zeros([BK], dtype=tl.float32)
    for i in range(left):
        t_q = (left - 1 - i) if REVERSE else i
        t_k = i if REVERSE else (left - 1 - i)
        b_gq = load_gate(p_g + t_q * (stride_gt * UNIT), m_k, CLOSED) * LOG2E + b_gamma
        b_gk = load_gate(p_g + t_k * (stride_gt * UNIT), m_k, CLOSED) * LOG2E + b_gamma
        b_q = tl.load(p_q + t_q * (stride_qt * UNIT), mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + t_k * (stride_kt * UNIT), mask=m_k, other=0.0).to(tl.float32)
        b_to += b_gq
        b_early += tl.where(((BT - 1 - t_q) if REVERSE else t_q) < BT // 2, b_gq, 0.0)
        tl.store(qd + p_d + t_q * (H * K), (b_q * (tl.exp2(b_to) * scale)).to(qd.dtype.element_ty), mask=m_k)
        tl.store(kd + p_d + t_k * (H * K), (b_k * tl.exp2(b_left)).to(kd.dtype.element_ty), mask=m_k)
        b_left += b_gk
    i_slot = i_s.to(tl.int64) * H + i_h
    tl.store(sums + i_slot * K + o_k, b_to, mask=m_k)
    tl.store(early + i_slot * K + o_k, b_early, mask=m_k)


@triton.jit
def halving_kernel(
    q, k, g, gamma, sums, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_gamma_b, scale, T, N,
    halved, intra,
    H: tl.constexpr, K: tl.constexpr, RK: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BS: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, GAMMA: tl.constexpr, TERMS: tl.constexpr, MILD: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The pairs of chunks with strong gates: for j <= i ``intra_ij = scale * sum_k q_ik k_jk exp(gates between j, i)``.

    Where no dimension's gates sum below -MILD (base 2) over the chunk, the chunk is left to who needs the pairs: they
    factor into factors that are neither too large nor too small for the dtype. Else by halving: at each level the pairs
    between the halves of a block factor at their boundary into ``exp(gates from the boundary to i) * exp(gates from j
    to the boundary)``, both at most 1, so each level is one tile ``y = (q in later halves, k in earlier halves) *
    factor`` and one product ``y y^T``; the diagonal has no decay. Both ways are exact.
    """
    NB: tl.constexpr = (H + BH - 1) // BH
    i_s = tl.program_id(0) // NB
    i_h0 = (tl.program_id(0) % NB) * BH
    i_n, begin, length, i_c = locate(cu_seqlens, i_s, T, N, BT, PACKED, True, BN)
    if i_c * BT >= length:
        return
    o_h = tl.arange(0, BH)
    m_strong = i_h0 + o_h < H
    if MILD > 0:
        p_sums = sums + ((i_s.to(tl.int64) * H + i_h0 + o_h) * K)[:, None] + tl.arange(0, BS)[None, :]
        b_sums = tl.load(p_sums, mask=m_strong[:, None] & (tl.arange(0, BS) < K)[None, :], other=0.0)
        b_worst = tl.min(b_sums, 1)
        tl.store(halved + i_s.to(tl.int64) * H + i_h0 + o_h, (b_worst < -MILD).to(tl.int32), mask=m_strong)
        m_strong = b_worst < -MILD
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
            p_q = q + (i_b * stride_qb + base * stride_qt + i_h * stride_qh) * UNIT
            p_k = k + (i_b * stride_kb + base * stride_kt + (i_h // RK) * stride_kh) * UNIT
            p_g = g + (i_b * stride_gb + base * stride_gt + i_h * stride_gh) * UNIT
            b_gamma = 0.0
            if GAMMA:
                b_gamma = load_gamma(gamma, i_b, i_h, stride_gamma_b) / LOG2E

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
                    b_y = (b_y * tl.exp2(ones_dot(m_sum, b_g, TERMS) * LOG2E)).to(dtype)  # [BT, BK]
                    b_l = tl.dot(b_y, tl.trans(b_y), input_precision=PRECISION)
                    b_a += tl.where(m_pair & later[:, None], b_l, 0.0)
                    m *= 2
            p_a = intra + (i_s.to(tl.int64) * H + i_h) * BT * BT
            tl.store(p_a + o_t[:, None] * BT + o_t[None, :], (b_a * scale).to(dtype))


@triton.jit
def gradient_kernel(
    q, k, v, g, gamma, sums, early, do, hs, dhs, halved, dq_mild, dk_mild, dg_mild, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_gamma_b, stride_ob, stride_ot, stride_oh, scale, T, N,
    dq, dk, dg,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, UNIT: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    GATE: tl.constexpr, GAMMA: tl.constexpr, TERMS: tl.constexpr, DG_TERMS: tl.constexpr, MILD: tl.constexpr,
    HALVED: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of one chunk, for a tile of BK of the K dimensions.

    ``hs`` holds the state before each chunk and ``dhs`` the gradient of the state after it. A gate is in every pair
    that spans it, so dg_t is a sum over pairs j < t <= i: within the chunk level by level, from before the chunk
    through q and dq, to after it through k and dk, and across it through both states. All these are sums of what is
    there, never differences that cancel. With scalar or constant gates (GATE < 2) dg is one value per token and tile of
    K.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NB: tl.constexpr = (H + BH - 1) // BH
    i_k = tl.program_id(0) % NK
    i_h0 = (tl.program_id(0) // NK) % NB * BH
    i_s = tl.program_id(0) // (NK * NB)
    i_n, begin, length, i_c = locate(cu_seqlens, i_s, T, N, BT, PACKED, True, BN)
    if i_c * BT >= length:
        return
    if HALVED:
        o_h = tl.arange(0, BH)
        m_h = tl.load(halved + i_s.to(tl.int64) * H + i_h0 + o_h, mask=i_h0 + o_h < H, other=0)
        if tl.max(m_h, 0) == 0:
            return
    for i in range(BH):
        i_h = i_h0 + i
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
            dtype: tl.constexpr = q.dtype.element_ty
            p_v = v + (i_b * stride_vb + base * stride_vt + (i_h // R) * stride_vh) * UNIT
            p_o = do + (i_b * stride_ob + base * stride_ot + i_h * stride_oh) * UNIT
            p_q = q + (i_b * stride_qb + base * stride_qt + i_h * stride_qh) * UNIT
            p_k = k + (i_b * stride_kb + base * stride_kt + (i_h // R) * stride_kh) * UNIT
            i_slot = i_s.to(tl.int64) * H + i_h
            i_state = i_slot * K * V
            b_gamma = 0.0
            if GAMMA:
                b_gamma = load_gamma(gamma, i_b, i_h, stride_gamma_b)
            UNIT_G: tl.constexpr = UNIT if GATE == 2 else 1
            if GATE > 0:
                p_g = g + (i_b * stride_gb + base * stride_gt + i_h * stride_gh) * UNIT_G
            m_upto = o_p[:, None] >= o_p[None, :]
            m_after = o_p[:, None] < o_p[None, :]
            row = (i_b * T + base) * H + i_h
            o_d = row * K + o_t[:, None] * (H * K) + o_k[None, :]  # of dq, dk and dg

            b_q = tl.load(p_q + o_t[:, None] * (stride_qt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
            b_k = tl.load(p_k + o_t[:, None] * (stride_kt * UNIT) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
            if GATE == 2:
                b_g = tl.load(p_g + o_t[:, None] * (stride_gt * UNIT_G) + o_k[None, :], mask=m_k, other=0.0)  # [BT, BK]
                if GAMMA:
                    b_g = tl.where(m_k, b_g.to(tl.float32) + b_gamma / LOG2E, 0.0)
                b_sums = tl.load(sums + i_slot * K + o_k, mask=o_k < K, other=0.0)  # [BK]
                b_early = tl.load(early + i_slot * K + o_k, mask=o_k < K, other=0.0)  # [BK]
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
            b_da *= scale

            if GATE == 2:
                b_across *= tl.exp2(b_sums)
                b_qf = b_q.to(tl.float32)
                b_kf = b_k.to(tl.float32)
                if MILD:
                    # From and to the chunk's middle.
                    b_p = tl.where(m_upto, b_da, 0.0).to(dtype)  # [BT (i), BT (j)]
                    b_e = ones_dot(around_middle(o_p, BT), b_g, TERMS) * LOG2E
                    b_qe = (b_qf * tl.exp2(b_e)).to(dtype)
                    b_ke = (b_kf * tl.exp2(-b_e)).to(dtype)
                    b_dq = tl.dot(b_p, b_ke, b_dq * (tl.exp2(b_early) * scale)[None, :], input_precision=PRECISION)
                    b_x = b_qe.to(tl.float32) * b_dq
                    b_dq *= tl.exp2(b_e)
                    b_dk *= tl.exp2(b_sums - b_early)[None, :]
                    b_across += tl.sum(b_ke.to(tl.float32) * b_dk, 0)
                    b_dk = tl.dot(tl.trans(b_p), b_qe, b_dk, input_precision=PRECISION)
                    # What pairs inside the chunk add here cancels but for those that span t: exactly, as both have
                    # the same terms.
                    b_x -= b_ke.to(tl.float32) * b_dk
                    b_dk *= tl.exp2(-b_e)
                    b_dg = ones_dot(o_p[:, None] <= o_p[None, :], b_x, DG_TERMS + 1) + b_across[None, :]
                else:
                    b_gc = tl.maximum(b_g.to(tl.float32), CLOSED)
                    b_dq *= tl.exp2(ones_dot(m_upto, b_gc, TERMS) * LOG2E) * scale
                    b_dk *= tl.exp2(ones_dot(m_after, b_gc, TERMS) * LOG2E)
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
                        b_e = tl.exp2(ones_dot(m_sum, b_gc, TERMS) * LOG2E)
                        b_y = tl.where(later[:, None], b_qf, b_kf) * b_e  # [BT, BK]
                        b_z = tl.dot(tl.where(m_pair, b_w, 0.0).to(dtype), b_y.to(dtype), input_precision=PRECISION)
                        b_dg += ones_dot(tl.trans(m_sum.to(tl.int32)), b_y * b_z, DG_TERMS)
                        b_z *= b_e
                        b_dq += tl.where(later[:, None], b_z, 0.0)
                        b_dk += tl.where(later[:, None], 0.0, b_z)
                        m *= 2
                tl.store(dg + o_d, b_dg.to(dg.dtype.element_ty), mask=m_k)
            else:
                b_row = b_gamma * tl.maximum((left - o_t) if REVERSE else (o_t + 1), 0)
                b_col = b_gamma * tl.maximum(o_t if REVERSE else (left - 1 - o_t), 0)
                b_all = b_gamma * left
                b_between = b_gamma * tl.maximum(o_p[:, None] - o_p[None, :], 0)  # [BT (i), BT (j)]
                if GATE == 1:
                    b_g = load_gate(p_g + o_t * (stride_gt * UNIT_G), m_t, CLOSED)  # [BT]
                    b_row += tl.sum(tl.where(m_upto, b_g[None, :], 0.0), 1) * LOG2E
                    b_col += tl.sum(tl.where(m_after, b_g[None, :], 0.0), 1) * LOG2E
                    b_all += tl.sum(b_g, 0) * LOG2E
                    b_after = tl.where(o_p[:, None] > o_p[None, :], b_g[:, None], 0.0)  # [BT (t), BT (j)]
                    b_between += ones_dot(m_upto, b_after, TERMS) * LOG2E
                b_pair = tl.where(m_upto, tl.exp2(b_between), 0.0)
                b_dq *= (tl.exp2(b_row) * scale)[:, None]
                b_dk *= tl.exp2(b_col)[:, None]
                b_rq = tl.sum(b_q.to(tl.float32) * b_dq, 1)  # [BT] what the token reads from before the chunk
                b_rk = tl.sum(b_k.to(tl.float32) * b_dk, 1)  # [BT] what it leaves to after the chunk
                b_da *= b_pair
                b_w = b_da.to(dtype)
                b_dq = tl.dot(b_w, b_k, b_dq, input_precision=PRECISION)
                b_dk = tl.dot(tl.trans(b_w), b_q, b_dk, input_precision=PRECISION)
                b_a = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_da  # [BT (i), BT (j)]
                # Pairs j < t <= i: the product keeps j < t, the sum over rows i >= t.
                b_m = m_after.to(tl.float32).to(dtype)
                b_x = tl.dot(b_a.to(dtype), b_m, input_precision=PRECISION) + b_rq[:, None]  # [BT (i), BT (t)]
                b_dg = tl.sum(tl.where(m_upto, b_x, 0.0), 0)
                b_dg += tl.sum(tl.where(m_after, b_rk[:, None], 0.0), 0)
                b_dg += tl.sum(b_across, 0) * tl.exp2(b_all)
                i_kb = i_k * (1 if PACKED else N) + i_b
                tl.store(dg + (i_kb * T + base + o_t) * H + i_h, b_dg, mask=m_t)

            tl.store(dq + o_d, b_dq.to(dq.dtype.element_ty), mask=m_k)
            tl.store(dk + o_d, b_dk.to(dk.dtype.element_ty), mask=m_k)


@triton.jit
def sum_kernel(x, R, D, y, UNIT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """``y[m, d] = sum_r x[m, r, d]`` of contiguous arrays, always in the same order; D in units like strides."""
    D *= UNIT
    n_d = tl.cdiv(D, BD)
    i_m = (tl.program_id(0) // n_d).to(tl.int64)
    o_d = (tl.program_id(0) % n_d) * BD + tl.arange(0, BD)
    o_r = tl.arange(0, BR)
    b_y = tl.zeros([BR, BD], dtype=tl.float32)
    for i_r in range(0, R, BR):
        m_x = (i_r + o_r < R)[:, None] & (o_d < D)[None, :]
        b_y += tl.load(x + (i_m * R + i_r + o_r[:, None]) * D + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    tl.store(y + i_m * D + o_d, tl.sum(b_y, 0).to(y.dtype.element_ty), mask=o_d < D)
