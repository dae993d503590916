"""The Triton kernels that take a tile of a state through a few tokens, one after the other, in registers.

Nothing but the state's bytes matters to their speed, so a program has one tile of one head's state, all of K by BV of
V, loads it at once, and needs no other program. The steps of both families are ``advance``. The products are written as
fused ones, so that compilers cannot fuse them in one way for one token and in another for several: verify and commit
give the bits that decode gives.

The conventions are those of ``linear_attention/triton/scan.py``.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from keraunos.kernels.device.recurrence import LN2, LN2_REST, LOG2E, NOTHING, decay, locate
from keraunos.kernels.gated_delta_rule import reference

EPSILON = tl.constexpr(reference.EPSILON)


@triton.jit
def load_gates(
    p_g, p_b, m_k, b_gamma, b_rate, b_bias, lower,
    GATE: tl.constexpr, GAMMA: tl.constexpr, RAW: tl.constexpr, DELTA: tl.constexpr, RAW_BETA: tl.constexpr,
    EXACT: tl.constexpr, BK: tl.constexpr,
):
    """A token's decay ``[BK]`` and its beta.

    RAW: ``g`` is what gates are made of, 1 by softplus, 2 with a lower bound; RAW_BETA: beta is the sigmoid.
    """
    b_d = tl.zeros([BK], dtype=tl.float32)
    if GATE == 2:
        b_g = tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)
    elif GATE == 1:
        b_g = tl.load(p_g).to(tl.float32)
    if RAW == 1:
        b_g = -b_rate * softplus(b_g + b_bias, EXACT)
    elif RAW == 2:
        b_g = lower * sigmoid(b_rate * (b_g + b_bias), EXACT)
    if GATE > 0:
        b_d += b_g
    if GAMMA:
        b_d += b_gamma
    b_beta = 0.0
    if DELTA:
        b_beta = tl.load(p_b).to(tl.float32)
        if RAW_BETA:
            b_beta = sigmoid(b_beta, EXACT)
    return decay_of_step(b_d, EXACT), b_beta


@triton.jit
def decay_of_step(x, EXACT: tl.constexpr):
    """``exp(x)`` of one token's gate; EXACT: to a unit in the last place, by the series of exp up to ln 2 / 2.

    A GPU's exp2 is off by two, for the same gate always to the same side: after a thousand steps by 1e-4.
    """
    if EXACT:
        x = tl.maximum(x, NOTHING)
        n = tl.floor(tl.fma(x, LOG2E, 0.5))
        x = tl.fma(n, -LN2_REST, tl.fma(n, -LN2, x))
        y = tl.fma(x, 1.0 / 5040.0, 1.0 / 720.0)
        y = tl.fma(x, y, 1.0 / 120.0)
        y = tl.fma(x, y, 1.0 / 24.0)
        y = tl.fma(x, y, 1.0 / 6.0)
        y = tl.fma(x, y, 0.5)
        y = tl.fma(x, y, 1.0)
        return tl.fma(x, y, 1.0) * tl.exp2(n)
    return decay(x, EXACT)


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    """``1 / (1 + exp(-x))``, by the exponential of what is at most 0."""
    b_e = decay(-tl.abs(x), EXACT)
    return tl.where(x < 0, b_e, 1.0) / (1.0 + b_e)


@triton.jit
def softplus(x, EXACT: tl.constexpr):
    """``log(1 + exp(x))``; past 20 that is x, but for less than a rounding."""
    b_e = decay(-tl.abs(x), EXACT)
    # The logarithm of 1 + e as it was rounded, times what the rounding changed e by.
    b_one = 1.0 + b_e
    b_off = tl.where(b_one == 1.0, 1.0, b_one - 1.0)
    return tl.maximum(x, 0.0) + tl.where(b_one == 1.0, b_e, tl.log(b_one) * (b_e / b_off))


@triton.jit
def dot(x, y):
    """``sum(x y)`` over the first axis, of products that are rounded before they are added.

    Of two products that are added, a compiler may fuse either one, and not the same in every kernel.
    """
    return tl.sum(tl.fma(x, y, tl.zeros_like(x)), 0)


@triton.jit
def load_rows(p_q, p_k, p_v, m_k, m_v, OUTPUT: tl.constexpr, NORM: tl.constexpr):
    """A token's q ``[BK]``, k ``[BK]`` and v ``[BV]``; NORM: q and k over their lengths."""
    b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
    b_q = b_k
    if OUTPUT:
        b_q = tl.load(p_q, mask=m_k, other=0.0).to(tl.float32)
    if NORM:
        b_q /= tl.sqrt_rn(dot(b_q, b_q) + EPSILON)
        b_k /= tl.sqrt_rn(dot(b_k, b_k) + EPSILON)
    return b_q, b_k, b_v


@triton.jit
def advance(b_s, b_k, b_v, b_d, b_beta, DECAYS: tl.constexpr, DELTA: tl.constexpr, BK: tl.constexpr,
            BV: tl.constexpr):
    """``S = diag(d) S + k v^T``; DELTA: v is beta times what it differs by from what the decayed S has for k."""
    b_kk = tl.broadcast_to(b_k[:, None], [BK, BV])
    if DELTA:
        if DECAYS:
            b_s *= b_d[:, None]
        b_v = b_beta * (b_v - dot(b_s, b_kk))
    b_vv = tl.broadcast_to(b_v[None, :], [BK, BV])
    if DECAYS and not DELTA:
        return tl.fma(b_s, tl.broadcast_to(b_d[:, None], [BK, BV]), b_kk * b_vv)
    return tl.fma(b_kk, b_vv, b_s)


# Indices may be slices of a longer array, which begin anywhere.
@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["slots", "counts", "targets"])
def step_kernel(
    q, k, v, g, gamma, beta, A_log, dt_bias, slots, counts, targets, states, exports, into,
    stride_qn, stride_qt, stride_qh, stride_kn, stride_kt, stride_kh, stride_vn, stride_vt, stride_vh,
    stride_gn, stride_gt, stride_gh, stride_bn, stride_bt, stride_bh, stride_on, stride_ot, stride_oh, scale, lower, T,
    o, pool,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr,
    RG: tl.constexpr, RB: tl.constexpr, UNIT: tl.constexpr,
    stride_ss: tl.constexpr, stride_sh: tl.constexpr, stride_sk: tl.constexpr, stride_sv: tl.constexpr,
    stride_es: tl.constexpr, stride_eh: tl.constexpr, stride_ek: tl.constexpr, stride_ev: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, GAMMA: tl.constexpr, EXACT: tl.constexpr,
    MANY: tl.constexpr, COUNTED: tl.constexpr, OUTPUT: tl.constexpr, STORE: tl.constexpr, EXPORT: tl.constexpr,
    DELTA: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Tokens of one request, for a tile of BV of the V dimensions.

    OUTPUT: write ``o = scale * S^T q`` of each token; STORE: write the state back; EXPORT: write that after token t to
    slot targets[n, t] of another pool, or of this one, whose state has been read by then. MANY: T tokens, not one.
    COUNTED: only the first counts[n] of them. OVERLAP: the launch begins while the one before it ends.
    GAMMA: how many dimensions gamma has, ``[H]`` or ``[N, H]``; 0: there is none. DELTA: the delta rule; what it reads
    is with the functions above.
    """
    if OVERLAP > 0:
        # A step is short: that its programs are there already when the launch before it ends is a good part of it.
        gdc_wait()
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_h = (tl.program_id(0) // NV) % H
    i_n = (tl.program_id(0) // (NV * H)).to(tl.int64)
    UNIT_G: tl.constexpr = UNIT if GATE == 2 else 1
    slot = tl.load(slots + i_n).to(tl.int64)
    n_t = 1
    if MANY:
        n_t = T
    if COUNTED:
        n_t = tl.minimum(tl.load(counts + i_n).to(tl.int32), n_t)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    if OUTPUT:
        p_o = o + (i_n * stride_on + i_h.to(tl.int64) * stride_oh) * UNIT + o_v
    if slot < 0:
        if OUTPUT:
            for _ in range(T if MANY else 1):
                tl.store(p_o, tl.zeros([BV], dtype=o.dtype.element_ty), mask=m_v)
                p_o += stride_ot * UNIT
        return
    if COUNTED:  # noqa: SIM102
        if n_t <= 0:
            return

    p_q = q + (i_n * stride_qn + (i_h // RQ).to(tl.int64) * stride_qh) * UNIT + o_k
    p_k = k + (i_n * stride_kn + (i_h // RK).to(tl.int64) * stride_kh) * UNIT + o_k
    p_v = v + (i_n * stride_vn + (i_h // RV).to(tl.int64) * stride_vh) * UNIT + o_v
    p_g = p_k
    if GATE > 0:
        p_g = g + (i_n * stride_gn + (i_h // RG).to(tl.int64) * stride_gh) * UNIT_G
    if GATE == 2:
        p_g += o_k
    p_b = p_k
    if DELTA:
        p_b = beta + i_n * stride_bn + (i_h // RB).to(tl.int64) * stride_bh
    b_rate = 0.0
    b_bias = 0.0
    if RAW > 0:
        b_rate = decay(tl.load(A_log + i_h // RG).to(tl.float32), EXACT)
        if BIAS:
            if GATE == 2:
                b_bias = tl.load(dt_bias + i_h // RG * K + o_k, mask=m_k, other=0.0).to(tl.float32)
            else:
                b_bias = tl.load(dt_bias + i_h // RG).to(tl.float32)
    b_gamma = 0.0
    if GAMMA == 1:
        b_gamma = tl.load(gamma + i_h).to(tl.float32)
    if GAMMA == 2:
        b_gamma = tl.load(gamma + i_n * H + i_h).to(tl.float32)
    i_state = slot * stride_ss + i_h.to(tl.int64) * stride_sh
    o_s = o_k[:, None] * stride_sk + o_v[None, :] * stride_sv
    m_s = m_k[:, None] & m_v[None, :]
    b_s = tl.load(states + i_state + o_s, mask=m_s, other=0.0).to(tl.float32)  # [BK, BV]
    b_q, b_k, b_v = load_rows(p_q, p_k, p_v, m_k, m_v, OUTPUT, NORM)
    b_d, b_beta = load_gates(p_g, p_b, m_k, b_gamma, b_rate, b_bias, lower, GATE, GAMMA, RAW, DELTA, RAW_BETA, EXACT,
                             BK)
    DECAYS: tl.constexpr = GATE > 0 or GAMMA > 0
    if MANY:
        for i in range(n_t):
            b_s = advance(b_s, b_k, b_v, b_d, b_beta, DECAYS, DELTA, BK, BV)
            b_qi = b_q
            if EXPORT:
                target = tl.load(targets + i_n * T + i).to(tl.int64)
                p_e = exports + target * stride_es + i_h.to(tl.int64) * stride_eh
                p_e += o_k[:, None] * stride_ek + o_v[None, :] * stride_ev
                tl.store(p_e, b_s.to(exports.dtype.element_ty), mask=m_s & (target >= 0))
            # The next token's, while this one's output is summed.
            more = i + 1 < n_t
            p_q += tl.where(more, stride_qt * UNIT, 0)
            p_k += tl.where(more, stride_kt * UNIT, 0)
            p_v += tl.where(more, stride_vt * UNIT, 0)
            if GATE > 0:
                p_g += tl.where(more, stride_gt * UNIT_G, 0)
            if DELTA:
                p_b += tl.where(more, stride_bt, 0)
            b_q, b_k, b_v = load_rows(p_q, p_k, p_v, m_k, m_v, OUTPUT, NORM)
            b_d, b_beta = load_gates(p_g, p_b, m_k, b_gamma, b_rate, b_bias, lower, GATE, GAMMA, RAW, DELTA, RAW_BETA,
                                     EXACT, BK)
            if OUTPUT:
                b_o = dot(b_s, tl.broadcast_to(b_qi[:, None], [BK, BV])) * scale
                tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
                p_o += stride_ot * UNIT
    else:
        b_s = advance(b_s, b_k, b_v, b_d, b_beta, DECAYS, DELTA, BK, BV)
        if OUTPUT:
            b_o = dot(b_s, tl.broadcast_to(b_q[:, None], [BK, BV])) * scale
            tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
    if STORE:
        tl.store(pool + i_state + o_s, b_s.to(pool.dtype.element_ty), mask=m_s)


@triton.jit
def end_of(tokens, i_m, M):
    """The end of the tokens after which state m of M is exported; far away after the last of them."""
    return tl.load(tokens + i_m, mask=i_m < M, other=2147483646).to(tl.int64) + 1


@triton.jit(do_not_specialize=["N", "M"], do_not_specialize_on_alignment=["tokens", "targets"])
def plan_kernel(cu_seqlens, tokens, targets, N, M, exports, BT: tl.constexpr, BN: tl.constexpr):
    """For each chunk the first slot that a state goes to which is exported within it, or at its start; -1: none.

    A state at the end of a request of whole chunks belongs to a chunk after the last. ``tokens`` ascend.
    """
    i_s = tl.program_id(0)
    _, begin, length, i_c = locate(cu_seqlens, i_s, 0, N, BT, True, True, BN)
    start = begin + i_c * BT
    # At a request's first token the one before it has ended, and its states with it.
    least = tl.where(i_c == 0, start + 1, start)
    most = tl.minimum(start + BT - 1, begin + length)
    lower = tl.full([], 0, tl.int32)
    upper = lower + M
    while lower < upper:
        middle = (lower + upper) // 2
        before = end_of(tokens, middle, M) < least
        lower = tl.where(before, middle + 1, lower)
        upper = tl.where(before, upper, middle)
    target = tl.full([], -1, tl.int32)
    while (end_of(tokens, lower, M) <= most) & (target < 0):
        target = tl.load(targets + lower).to(tl.int32)
        lower += 1
    tl.store(exports + i_s, target)


@triton.jit
def decays_up_to(
    p_g, stride_gt, n_t, o_t, o_k, m_k, b_gamma, GATE: tl.constexpr, EXACT: tl.constexpr, BK: tl.constexpr
):
    """The decay from after each token through the n_t-th ``[BT, BK]``, and from before the first ``[BK]``."""
    m_g = o_t + 1 < n_t
    if GATE == 2:
        p_next = p_g + (o_t + 1)[:, None] * stride_gt + o_k[None, :]
        b_g = tl.load(p_next, mask=m_g[:, None] & m_k[None, :], other=0.0).to(tl.float32)  # of the next token
        b_g += tl.where(m_g, b_gamma, 0.0)[:, None]
        b_all = tl.load(p_g + o_k, mask=m_k & (n_t > 0), other=0.0).to(tl.float32) + tl.sum(b_g, 0)
        b_left = tl.cumsum(b_g, 0, reverse=True)
    else:
        b_g = tl.where(m_g, b_gamma, 0.0)
        b_all = tl.zeros([BK], dtype=tl.float32)
        if GATE == 1:
            b_g += tl.load(p_g + (o_t + 1) * stride_gt, mask=m_g, other=0.0).to(tl.float32)
            b_all += tl.load(p_g, mask=n_t > 0, other=0.0).to(tl.float32)
        b_all += tl.sum(b_g, 0)
        b_left = tl.sum(tl.where(o_t[:, None] <= o_t[None, :], b_g[None, :], 0.0), 1)[:, None]
    b_all += tl.where(n_t > 0, b_gamma, 0.0)
    return decay(b_left, EXACT), decay(b_all, EXACT)


@triton.jit(do_not_specialize=["N", "M"], do_not_specialize_on_alignment=["slots", "tokens", "targets"])
def export_kernel(
    k, v, g, gamma, beta, cu_seqlens, slots, tokens, targets, states,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh, stride_bt, stride_bh, N, M,
    pool,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, RG: tl.constexpr,
    RB: tl.constexpr, UNIT: tl.constexpr,
    stride_ss: tl.constexpr, stride_sh: tl.constexpr, stride_sk: tl.constexpr, stride_sv: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, GATE: tl.constexpr, GAMMA: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, DELTA: tl.constexpr, NORM: tl.constexpr,
):
    """The states that are exported within a chunk, from the one before it; those of the delta rule token by token.

    Program m does those of its chunk if it is the first with a target there: in its slot is the state to start from.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_h = (tl.program_id(0) // NV) % H
    i_m = tl.program_id(0) // (NV * H)
    UNIT_G: tl.constexpr = UNIT if GATE == 2 else 1
    end = end_of(tokens, i_m, M)
    slot = tl.load(targets + i_m).to(tl.int64)
    o_n = tl.arange(0, BN)
    b_end = tl.load(cu_seqlens + 1 + o_n, mask=o_n < N, other=2147483647).to(tl.int64)
    i_n = tl.sum((b_end < end).to(tl.int32), 0)
    if (slot < 0) | (end < 1) | (i_n >= N):
        return
    if tl.load(slots + i_n) < 0:
        return
    begin = tl.load(cu_seqlens + i_n).to(tl.int64)
    last = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
    start = begin + (end - begin) // BT * BT
    least = tl.where(start == begin, start + 1, start)
    most = tl.minimum(start + BT - 1, last)
    i_e = i_m - 1
    while (i_e >= 0) & (end_of(tokens, tl.maximum(i_e, 0), M) >= least):
        if tl.load(targets + i_e) >= 0:
            # Another program does them all.
            least = last + 1
        i_e -= 1
    if (least > last) | ((end == start) & (end_of(tokens, i_m + 1, M) > most)):
        # All that is asked for is there already.
        return

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    o_t = tl.arange(0, BT)
    i_hk = (i_h // RK).to(tl.int64)
    i_hv = (i_h // RV).to(tl.int64)
    p_k = k + (start * stride_kt + i_hk * stride_kh) * UNIT + o_k
    p_v = v + (start * stride_vt + i_hv * stride_vh) * UNIT + o_v
    p_g = k
    if GATE > 0:
        p_g = g + (start * stride_gt + (i_h // RG).to(tl.int64) * stride_gh) * UNIT_G
    b_gamma = 0.0
    if GAMMA:
        b_gamma = tl.load(gamma + i_h).to(tl.float32)
    i_head = i_h.to(tl.int64) * stride_sh
    o_s = o_k[:, None] * stride_sk + o_v[None, :] * stride_sv
    m_s = m_k[:, None] & m_v[None, :]
    b_s = tl.load(states + slot * stride_ss + i_head + o_s, mask=m_s, other=0.0).to(tl.float32)  # [BK, BV]
    if DELTA:
        p_b = beta + start * stride_bt + (i_h // RB).to(tl.int64) * stride_bh
        if GATE == 2:
            p_g += o_k
        while end <= most:
            for _ in range((end - start).to(tl.int32)):
                _, b_kt, b_vt = load_rows(p_k, p_k, p_v, m_k, m_v, False, NORM)
                b_d, b_beta = load_gates(p_g, p_b, m_k, b_gamma, 0.0, 0.0, 0.0, GATE, GAMMA, 0, True, False, EXACT, BK)
                b_s = advance(b_s, b_kt, b_vt, b_d, b_beta, GATE > 0 or GAMMA, True, BK, BV)
                p_k += stride_kt * UNIT
                p_v += stride_vt * UNIT
                p_g += stride_gt * UNIT_G
                p_b += stride_bt
            start = end
            slot = tl.load(targets + i_m).to(tl.int64)
            tl.store(pool + slot * stride_ss + i_head + o_s, b_s.to(pool.dtype.element_ty), mask=m_s & (slot >= 0))
            i_m += 1
            end = end_of(tokens, i_m, M)
    else:
        m_t = (start + o_t < last)[:, None]
        b_k = tl.load(p_k[None, :] + o_t[:, None] * (stride_kt * UNIT), mask=m_t & m_k[None, :], other=0.0)  # [BT, BK]
        b_v = tl.load(p_v[None, :] + o_t[:, None] * (stride_vt * UNIT), mask=m_t & m_v[None, :], other=0.0)  # [BT, BV]
        while end <= most:
            n_t = (end - start).to(tl.int32)
            b_left, b_all = decays_up_to(p_g, stride_gt * UNIT_G, n_t, o_t, o_k, m_k, b_gamma, GATE, EXACT, BK)
            b_e = tl.where(o_t[:, None] < n_t, b_k.to(tl.float32) * b_left, 0.0).to(b_k.dtype)  # [BT, BK]
            b_h = tl.dot(tl.trans(b_e), b_v, b_s * b_all[:, None], input_precision=PRECISION)
            slot = tl.load(targets + i_m).to(tl.int64)
            tl.store(pool + slot * stride_ss + i_head + o_s, b_h.to(pool.dtype.element_ty), mask=m_s & (slot >= 0))
            i_m += 1
            end = end_of(tokens, i_m, M)
