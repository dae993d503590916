"""The Triton kernels of ``stretches.py``: what pieces of a row leave to its end, and many pieces' states as one."""

import triton
import triton.language as tl

from keraunos.kernels.device.recurrence import (
    CLOSED,
    LOG2E,
    NOTHING,
    decay,
    load_gamma,
    load_gate,
    ones_dot,
    power,
    span,
)

# The log of the decay over stretches of which one begins anew.
ANEW = tl.constexpr(-1e30)


@triton.jit
def leave_kernel(
    k, v, g, gamma, plan, local_given, total_given, seen_given,
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_gb, stride_gt, stride_gh, stride_gamma_b,
    scale, T, L, P, NEAR, SEGMENT,
    local, total, seen,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, RG: tl.constexpr,
    UNIT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, GAMMA: tl.constexpr,
    EXACT: tl.constexpr, RIGHT: tl.constexpr, INCLUSIVE: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
):
    """``sum_t exp(gates between t and the end) k_t v_t^T`` over each of P pieces of L tokens; the end is right or left.

    INCLUSIVE: the gate of token t counts too. GATE: 0 none, 1 per token, 2 per token and dimension. ``plan``: the first
    token that counts and one past the last. ``total`` has the sums of the pieces' gates, ``seen`` whether anything is
    left of a piece at the end of its segment, SEGMENT tokens of the row: if not, ``local`` is not written. All three
    have the pieces in the order of the way: the last is nearest to the end. FAR: the pieces but for the NEAR that are
    nearest, which have been done: where gates forget all that is before those, nothing is read.
    """
    LOG: tl.constexpr = 1.0 if EXACT else LOG2E
    TERMS: tl.constexpr = 3 if EXACT else 2
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_h = (tl.program_id(0) // NV) % H
    i_o = tl.program_id(0) // (NV * H)
    if GAMMA and GATE == 0:
        # Heads that forget have little to read: side by side are the pieces of one head, so that all multiprocessors
        # get as much of each, and those of heads that do not forget begin at once where these are the first.
        n_o = tl.num_programs(0) // (NV * H)
        i_h = tl.program_id(0) // (NV * n_o)
        i_o = (tl.program_id(0) // NV) % n_o
    if UNIT < 16:
        # No GPU has so long an array that its heads are 2**31 units of 16 apart.
        i_h = i_h.to(tl.int64)
    n_p = (P - NEAR) if FAR else NEAR
    i_d = i_o % n_p + (NEAR if FAR else 0)
    i_p = (P - 1 - i_d) if RIGHT else i_d
    i_b = (i_o // n_p).to(tl.int64)
    o_k = tl.arange(0, BK)
    i_slot = (i_b * P + P - 1 - i_d) * H + i_h
    if FAR:
        b_near = tl.zeros([BK], dtype=tl.float32)
        for i in range(NEAR):
            i_near = (i_b * P + P - 1 - i) * H + i_h
            if GATE == 2:
                b_near += tl.load(total + i_near * K + o_k, mask=o_k < K, other=float("-inf"))
            else:
                b_near += tl.load(total + i_near)
        if tl.max(b_near, 0) * LOG2E < NOTHING:
            if i_v == 0:
                tl.store(seen + i_slot, 0)
                if GATE == 2:
                    tl.store(total + i_slot * K + o_k, tl.zeros([BK], dtype=tl.float32), mask=o_k < K)
                else:
                    tl.store(total + i_slot, 0.0)
            return
    low, high = tl.load(plan), tl.load(plan + 1)
    begin = tl.maximum(i_p * L, low)
    end = tl.minimum(tl.minimum(i_p * L + L, T), high)
    tokens = tl.maximum(end - begin, 0)
    size = tokens
    b_gamma = 0.0
    if GAMMA:
        b_gamma = load_gamma(gamma, i_b, i_h, stride_gamma_b, EXACT)
    if GAMMA and GATE == 0:
        # Only the tokens of which anything is left at the segment's end.
        i_first = i_p * L // SEGMENT * SEGMENT
        n_after = (tl.minimum(i_first + SEGMENT, high) - end) if RIGHT else (begin - tl.maximum(i_first, low))
        n_seen = span(b_gamma, EXACT) + 1 - n_after
        size = tl.minimum(size, tl.maximum(n_seen, 0))

    o_t = tl.arange(0, BT)
    o_d = (BT - 1 - o_t) if RIGHT else o_t  # tokens away from the chunk's end that is nearer to the row's
    o_v = i_v * BV + tl.arange(0, BV)
    base = ((end - BT) if RIGHT else begin).to(tl.int64)
    p_k = k + (i_b * stride_kb + base * stride_kt + (i_h // RK) * stride_kh) * UNIT
    p_v = v + (i_b * stride_vb + base * stride_vt + (i_h // RV) * stride_vh) * UNIT
    p_k += o_t[:, None] * (stride_kt * UNIT) + o_k[None, :]
    p_v += o_t[:, None] * (stride_vt * UNIT) + o_v[None, :]
    UNIT_G: tl.constexpr = UNIT if GATE == 2 else 1
    if GATE > 0:
        p_g = g + (i_b * stride_gb + base * stride_gt + (i_h // RG) * stride_gh) * UNIT_G + o_t * (stride_gt * UNIT_G)
    nearer = (o_d[None, :] <= o_d[:, None]) if INCLUSIVE else (o_d[None, :] < o_d[:, None])  # [BT (t), BT (s)]
    step = -BT if RIGHT else BT
    b_sum = tl.zeros([BK], dtype=tl.float32)
    b_sum1 = 0.0
    b_s = tl.zeros([BV, BK], dtype=tl.float32)
    for i in range(tl.cdiv(size, BT)):
        m_t = i * BT + o_d < size
        b_k = tl.load(p_k, mask=m_t[:, None] & (o_k < K)[None, :], other=0.0)  # [BT, BK]
        b_v = tl.load(p_v, mask=m_t[:, None] & (o_v < V)[None, :], other=0.0)  # [BT, BV]
        b_w = b_gamma * (i * BT + o_d + (1 if INCLUSIVE else 0))  # [BT]
        if GATE == 1:
            b_g = load_gate(p_g, m_t, CLOSED)
            b_w += (tl.sum(tl.where(nearer, b_g[None, :], 0.0), 1) + b_sum1) * LOG
            b_sum1 += tl.sum(b_g, 0)
            p_g += step * (stride_gt * UNIT_G)
        if GATE == 2:
            b_gk = load_gate(p_g[:, None] + o_k[None, :], m_t[:, None] & (o_k < K)[None, :], CLOSED)  # [BT, BK]
            b_wk = (ones_dot(nearer, b_gk, TERMS) + b_sum[None, :]) * LOG + b_w[:, None]
            b_sum += tl.sum(b_gk, 0)
            p_g += step * (stride_gt * UNIT_G)
            b_x = b_k.to(tl.float32) * power(b_wk, EXACT)
        else:
            b_x = b_k.to(tl.float32) * power(b_w, EXACT)[:, None]
        b_s = tl.dot(tl.trans(b_v), b_x.to(k.dtype.element_ty), b_s, input_precision=PRECISION)
        p_k += step * (stride_kt * UNIT)
        p_v += step * (stride_vt * UNIT)

    there = size > 0
    p_s = local + i_slot * (K * V) + o_v[:, None] + o_k[None, :] * V
    tl.store(p_s, b_s * scale, mask=(o_v < V)[:, None] & (o_k < K)[None, :] & there)
    if i_v == 0:
        tl.store(seen + i_slot, there.to(tl.int32))
        b_all = b_gamma / LOG * tokens
        if GATE == 2:
            tl.store(total + i_slot * K + o_k, b_sum + b_all, mask=o_k < K)
        else:
            tl.store(total + i_slot, b_sum1 + b_all)


@triton.jit
def after(b_s, b_total, b_local):
    """The state ``[BK, BV]`` after one more piece or stretch, which leaves ``b_local`` and has gates of ``b_total``."""
    # A state is float32, whatever its tokens are.
    b_decay = decay(b_total, True)[:, None]
    # What is forgotten is nothing, even if it was no number.
    return tl.where(b_decay > 0, b_s * b_decay, 0.0) + b_local


@triton.jit
def merge_kernel(
    local, total, seen, start, plan, row, P, M,
    merged,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KD: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    RIGHT: tl.constexpr, START: tl.constexpr, BEFORE: tl.constexpr, COPIES: tl.constexpr,
):
    """The state that P pieces leave one after the other ``[M, K, V]``, from what ``leave_kernel`` has of each.

    The sum of all their gates follows, ``[M, KD]`` with KD of K or 1. They begin with ``start`` if ``plan`` says that
    the sequence begins among them: then nothing older passes, and the sum says so. COPIES: how often to write it all.
    BEFORE: not pieces but P stretches, from left to right, ``local`` and ``total`` rows of one array, made by a launch
    without; only those that lie before this one, of which ``plan`` says how many. If there are none, ``start``.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    i_m, M = (tl.program_id(0) // NK).to(tl.int64), tl.cast(M, tl.int64)
    o_k = (tl.program_id(0) % NK) * BK + tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    o_s = o_k[:, None] * V + o_v[None, :]
    o_d = o_k if KD > 1 else o_k * 0
    i_first = (i_m // H) * P * H + i_m % H
    if BEFORE:
        stride_local = row
        stride_total = row
        p_local = local + i_m * (K * V) + o_s
        p_total = total + M * (K * V) + i_m * KD + o_d
        n = tl.load(plan + 3)
        fresh = n == 0
    else:
        stride_local = H * K * V
        stride_total = H * KD
        p_local = local + i_first * (K * V) + o_s
        p_total = total + i_first * KD + o_d
        n = P
        fresh = tl.load(plan + 2) != 0
    b_s = tl.zeros([BK, BV], dtype=tl.float32)
    if START:
        b_s = tl.load(start + i_m * (K * V) + o_s, mask=m_s & fresh, other=0.0).to(tl.float32)
    b_sum = tl.zeros([BK], dtype=tl.float32)
    for i in tl.range(n, num_stages=4, loop_unroll_factor=4):
        i_p = i_m * 0 + (i if RIGHT or not BEFORE else (P - 1 - i))
        m_l = m_s
        if not BEFORE:
            m_l = m_s & (tl.load(seen + i_first + i_p * H) != 0)
        b_total = tl.load(p_total + i_p * stride_total, mask=o_k < K, other=0.0)  # [BK]
        b_local = tl.load(p_local + i_p * stride_local, mask=m_l, other=0.0)  # [BK, BV]
        b_s = after(b_s, b_total, b_local)
        b_sum += b_total
    b_sum = tl.where(fresh, ANEW, b_sum)
    for _ in tl.static_range(COPIES):
        tl.store(merged + i_m * (K * V) + o_s, b_s, mask=m_s)
        if not BEFORE:
            tl.store(merged + M * (K * V) + i_m * KD + o_d, b_sum, mask=(o_k < K) if KD > 1 else (o_k == 0))
            merged += M * (K * V + KD)


@triton.jit
def starts_kernel(
    left, local, total, seen, start, plan, stride_left, R, N, S, M,
    starts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KD: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    RIGHT: tl.constexpr, START: tl.constexpr,
):
    """The state that each of S segments of a stretch starts from ``[B * S, H, K, V]``.

    ``left`` is of all R stretches, as for ``merge_kernel``; ``local``, ``total`` and ``seen`` are of this one's pieces,
    N to a segment. Segments lie in the order of their tokens.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    i_m, M = (tl.program_id(0) // NK).to(tl.int64), tl.cast(M, tl.int64)
    o_k = (tl.program_id(0) % NK) * BK + tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    o_s = o_k[:, None] * V + o_v[None, :]
    o_d = o_k if KD > 1 else o_k * 0
    n = tl.load(plan + 3)
    b_s = tl.zeros([BK, BV], dtype=tl.float32)
    if START:
        b_s = tl.load(start + i_m * (K * V) + o_s, mask=m_s & (n == 0), other=0.0).to(tl.float32)
    for i in tl.range(n, num_stages=4):
        p_left = left + (i_m * 0 + (i if RIGHT else (R - 1 - i))) * stride_left
        b_total = tl.load(p_left + M * (K * V) + i_m * KD + o_d, mask=o_k < K, other=0.0)  # [BK]
        b_local = tl.load(p_left + i_m * (K * V) + o_s, mask=m_s, other=0.0)  # [BK, BV]
        b_s = after(b_s, b_total, b_local)
    p_starts = starts + ((i_m // H) * S * H + i_m % H) * (K * V) + o_s
    # Nobody needs the pieces of the segment that is walked last.
    for i in tl.range((S - 1) * N, num_stages=8):
        i_s = i_m * 0 + i // N
        i_slot = i_s if RIGHT else (S - 1 - i_s)
        tl.store(p_starts + i_slot * (H * K * V), b_s, mask=m_s & (i % N == 0))
        i_p = ((i_m // H) * S * N + i) * H + i_m % H
        m_l = m_s & (tl.load(seen + i_p) != 0)
        b_total = tl.load(total + i_p * KD + o_d, mask=o_k < K, other=0.0)
        b_local = tl.load(local + i_p * (K * V) + o_s, mask=m_l, other=0.0)
        b_s = after(b_s, b_total, b_local)
    i_last = S - 1 if RIGHT else 0
    tl.store(p_starts + i_last * (H * K * V), b_s, mask=m_s)
