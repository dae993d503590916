"""The Triton kernel that takes a tile of a state through a few tokens, one after the other, in registers.

Nothing but the state's bytes matters to its speed, so a program has one tile of one head's state, all of K by BV of V,
loads it at once, and needs no other program. The products are written as fused ones, so that compilers cannot fuse them
in one way for one token and in another for several: verify and commit give the bits that decode gives.

Helpers and conventions are those of ``linear_attention/triton_kernels.py``.
"""

import triton
import triton.language as tl

from keraunos.kernels.linear_attention.triton_kernels import LOG2E


@triton.jit
def load_token(
    p_q, p_k, p_v, p_g, m_k, m_v, b_gamma,
    UNIT: tl.constexpr, GATE: tl.constexpr, GAMMA: tl.constexpr, OUTPUT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A token's q ``[BK]``, k ``[BK]``, v ``[BV]`` and decay ``[BK]``."""
    b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
    b_q = b_k
    if OUTPUT:
        b_q = tl.load(p_q, mask=m_k, other=0.0).to(tl.float32)
    b_d = tl.zeros([BK], dtype=tl.float32)
    if GATE == 2:
        b_d += tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)
    if GATE == 1:
        b_d += tl.load(p_g).to(tl.float32)
    if GAMMA:
        b_d += b_gamma
    return b_q, b_k, b_v, tl.exp2(b_d * LOG2E)


@triton.jit
def advance(b_s, b_k, b_v, b_d, DECAYS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """``S = diag(d) S + k v^T``."""
    b_kk = tl.broadcast_to(b_k[:, None], [BK, BV])
    b_vv = tl.broadcast_to(b_v[None, :], [BK, BV])
    if DECAYS:
        return tl.fma(b_s, tl.broadcast_to(b_d[:, None], [BK, BV]), b_kk * b_vv)
    return tl.fma(b_kk, b_vv, b_s)


@triton.jit(do_not_specialize=["T", "N"])
def step_kernel(
    q, k, v, g, gamma, slots, counts, cu_seqlens, tokens, states, room,
    stride_qn, stride_qt, stride_qh, stride_kn, stride_kt, stride_kh, stride_vn, stride_vt, stride_vh,
    stride_gn, stride_gt, stride_gh, stride_on, stride_ot, stride_oh, scale, T, N,
    o, pool,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RK: tl.constexpr, UNIT: tl.constexpr,
    stride_ss: tl.constexpr, stride_sh: tl.constexpr, stride_sk: tl.constexpr, stride_sv: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, GATE: tl.constexpr, GAMMA: tl.constexpr,
    MANY: tl.constexpr, COUNTED: tl.constexpr, OUTPUT: tl.constexpr, STORE: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Tokens of one request, or the tokens that lead to one exported state, through a tile of BV of the V dimensions.

    OUTPUT: write ``o = scale * S^T q`` of each token; STORE: write the state back. MANY: T tokens, not one. COUNTED:
    only the first counts[n] of them. BT of 0: request n's own. Else the state belongs to ``tokens[n]``, which lies in a
    packed row: ``states`` holds the one before its chunk of BT tokens, which this brings up to the token. STREAM: tell
    the cache that states will not be read again soon.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_h = (tl.program_id(0) // NV) % H
    i_n = (tl.program_id(0) // (NV * H)).to(tl.int64)
    UNIT_G: tl.constexpr = UNIT if GATE == 2 else 1
    slot = tl.load(slots + i_n).to(tl.int64)
    first = tl.full([], 0, tl.int64)
    n_t = 1
    if MANY:
        n_t = T
    if COUNTED:
        n_t = tl.minimum(tl.load(counts + i_n).to(tl.int32), n_t)
    if BT > 0:
        # The row is one request, as far as strides are concerned.
        last = tl.load(tokens + i_n).to(tl.int64) + 1
        o_n = tl.arange(0, BN)
        b_end = tl.load(cu_seqlens + 1 + o_n, mask=o_n < N, other=2147483647).to(tl.int64)
        begin = tl.load(cu_seqlens + tl.minimum(tl.sum((b_end < last).to(tl.int32), 0), N)).to(tl.int64)
        n_t = ((last - begin) % BT).to(tl.int32)
        n_t = tl.where(last > tl.load(cu_seqlens + N).to(tl.int64), 0, n_t)
        first = last - n_t
        i_n = first * 0
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    if OUTPUT:
        p_o = o + (i_n * stride_on + i_h * stride_oh) * UNIT + o_v
    if slot < 0:
        if OUTPUT:
            for _ in range(T if MANY else 1):
                tl.store(p_o, tl.zeros([BV], dtype=o.dtype.element_ty), mask=m_v)
                p_o += stride_ot * UNIT
        return
    if COUNTED or BT > 0:  # noqa: SIM102
        if n_t <= 0:
            return

    p_q = q + (i_n * stride_qn + first * stride_qt + i_h * stride_qh) * UNIT + o_k
    p_k = k + (i_n * stride_kn + first * stride_kt + (i_h // RK) * stride_kh) * UNIT + o_k
    p_v = v + (i_n * stride_vn + first * stride_vt + (i_h // RK) * stride_vh) * UNIT + o_v
    p_g = p_k
    if GATE > 0:
        p_g = g + (i_n * stride_gn + first * stride_gt + i_h * stride_gh) * UNIT_G
    if GATE == 2:
        p_g += o_k
    b_gamma = 0.0
    if GAMMA:
        b_gamma = tl.load(gamma + i_h).to(tl.float32)
    o_s = slot * stride_ss + i_h * stride_sh + o_k[:, None] * stride_sk + o_v[None, :] * stride_sv
    m_s = m_k[:, None] & m_v[None, :]
    EVICT: tl.constexpr = "evict_first" if STREAM else ""
    b_s = tl.load(states + o_s, mask=m_s, other=0.0, eviction_policy=EVICT).to(tl.float32)  # [BK, BV]
    b_q, b_k, b_v, b_d = load_token(p_q, p_k, p_v, p_g, m_k, m_v, b_gamma, UNIT, GATE, GAMMA, OUTPUT, BK)
    DECAYS: tl.constexpr = GATE > 0 or GAMMA
    if MANY:
        for i in range(n_t):
            b_s = advance(b_s, b_k, b_v, b_d, DECAYS, BK, BV)
            b_qi = b_q
            # The next token's, while this one's output is summed.
            more = i + 1 < n_t
            p_q += tl.where(more, stride_qt * UNIT, 0)
            p_k += tl.where(more, stride_kt * UNIT, 0)
            p_v += tl.where(more, stride_vt * UNIT, 0)
            if GATE > 0:
                p_g += tl.where(more, stride_gt * UNIT_G, 0)
            b_q, b_k, b_v, b_d = load_token(p_q, p_k, p_v, p_g, m_k, m_v, b_gamma, UNIT, GATE, GAMMA, OUTPUT, BK)
            if OUTPUT:
                b_o = tl.sum(b_s * b_qi[:, None], 0) * scale
                tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
                p_o += stride_ot * UNIT
    else:
        b_s = advance(b_s, b_k, b_v, b_d, DECAYS, BK, BV)
        if OUTPUT:
            b_o = tl.sum(b_s * b_q[:, None], 0) * scale
            tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
    if STORE:
        tl.store(pool + o_s, b_s.to(pool.dtype.element_ty), mask=m_s, eviction_policy=EVICT)
