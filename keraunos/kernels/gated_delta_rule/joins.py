"""The states that segments of a sequence start from, in Triton: the end of a cut, for any platform."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from keraunos.kernels.device.limits import precision
from keraunos.kernels.device.recurrence import locate
from keraunos.kernels.host.arrays import tile
from keraunos.kernels.host.plan import Plan, remember
from keraunos.kernels.host.pool import NO_POOL, Pool


@triton.jit(do_not_specialize=["N"])
def join_kernel(
    local, matrices, h0, cu_seqlens, slots, has_initial, T, N, L, starts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    INIT: tl.constexpr, ADJOINT: tl.constexpr, OWN: tl.constexpr, PRECISION: tl.constexpr, POOL: tl.constexpr,
    MAY_START: tl.constexpr, stride_ss: tl.constexpr, stride_sh: tl.constexpr, stride_sk: tl.constexpr,
    stride_sv: tl.constexpr,
):
    """The states that segments start from: ``S_(i+1) = M_i S_i + local_i``, S_0 from h0 or zeros, BV columns of them.

    ``matrices`` ``[slots, H, K, V + K]`` has a segment's M in its last K columns, and forward ``local`` in the others.
    POOL: h0 is a pool, as in a walk.
    ADJOINT: gradients of states, ``D_(i-1) = M_i^T D_i + local_i`` from the last segment, whose D is h0.
    OWN: ``local`` of the segment that comes first is from the state that it starts from, and its M is not read.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    W: tl.constexpr = V + K
    WL: tl.constexpr = V if ADJOINT else W
    i_v = tl.program_id(0) % NV
    i_h = (tl.program_id(0) // NV) % H
    i_n = tl.program_id(0) // (NV * H)
    _, begin, length, _ = locate(cu_seqlens, i_n, T, N, L, PACKED, False, 1)
    slot = (begin // L + i_n) if PACKED else (begin * 0 + i_n * tl.cdiv(T, L))
    n_g = tl.maximum(tl.cdiv(length, L), 1).to(tl.int32)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = (o_v < V)[None, :]
    for i in range(n_g):
        i_g = (n_g - 1 - i) if ADJOINT else i
        i_here = ((slot + i_g) * H + i_h) * K
        i_last = ((slot + i_g + (1 if ADJOINT else -1)) * H + i_h) * K
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = (o_k < K)[:, None]
            b_s = tl.zeros([BK, BV], dtype=tl.float32)
            if i == 0:
                if POOL:
                    o_pool = o_k[:, None] * stride_sk + o_v[None, :] * stride_sv + i_h.to(tl.int64) * stride_sh
                    m_init = m_k & m_v & (tl.load(slots + i_n) >= 0)
                    if MAY_START:
                        m_init &= tl.load(has_initial + i_n) != 0
                    p_h = h0 + tl.load(slots + i_n).to(tl.int64) * stride_ss + o_pool
                    b_s = tl.load(p_h, mask=m_init, other=0.0).to(tl.float32)
                elif INIT:
                    p_h = h0 + ((i_n.to(tl.int64) * H + i_h) * K + o_k[:, None]) * V + o_v[None, :]
                    b_s = tl.load(p_h, mask=m_k & m_v, other=0.0).to(tl.float32)
            else:
                p_l = local + (i_last + o_k[:, None]) * WL + o_v[None, :]
                b_s = tl.load(p_l, mask=m_k & m_v, other=0.0)
                most = tl.where(i == 1, 0, K) if OWN else K
                for i_c in range(0, most, BK):
                    o_c = i_c + tl.arange(0, BK)
                    m_m = m_k & (o_c < K)[None, :]
                    o_m = (o_c[None, :] * W + o_k[:, None]) if ADJOINT else (o_k[:, None] * W + o_c[None, :])
                    b_m = tl.load(matrices + i_last * W + V + o_m, mask=m_m, other=0.0)
                    p_s = starts + (i_last + o_c[:, None]) * V + o_v[None, :]
                    b_last = tl.load(p_s, mask=(o_c < K)[:, None] & m_v, other=0.0)
                    b_s = tl.dot(b_m, b_last, b_s, input_precision=PRECISION)
            tl.store(starts + (i_here + o_k[:, None]) * V + o_v[None, :], b_s, mask=m_k & m_v)
        # The next segment reads what other threads have written here.
        tl.debug_barrier()


@remember
def join_plan(call: Any, init: bool, adjoint: bool, pool: Pool | None = None, own: bool = False) -> Plan:
    """The launch of ``join_kernel`` for a call whose sequences are cut into segments of ``call.L`` tokens."""
    BV, BK = min(tile(call.V), 16), min(tile(call.K), 64)
    numbers = dict(T=call.T, N=call.N, L=call.L)
    constants = dict(H=call.H, K=call.K, V=call.V, BK=BK, BV=BV, PACKED=call.packed, INIT=init, ADJOINT=adjoint,
                     OWN=own, PRECISION=precision(True), **(pool.flags() if pool else NO_POOL))
    outputs = dict(starts=((call.segments, call.H, call.K, call.V), "float32"))
    return Plan(join_kernel, (call.N * call.H * -(-call.V // BV),), numbers, outputs, constants, 4, 2)
