"""The gradients of the gated delta rule with gates per dimension, from what walks leave, in Triton for any platform.

Of a chunk with the state S before it and the gradient D of the state after it, ``G_i`` is for each dimension the sum of
gates up to and with token i, and G of the last token is ``G_C``. E are the errors that tokens correct, and Z what
``dV = beta Z``. With the gradients of pairs

    W_ij = scale beta_j dO_i . E_j         j before i, or i
    X_ij = -beta_i beta_j Z_i . E_j        j before i

the gradients of queries and keys are

    dQ_i = scale exp(G_i) o (S dO_i) + sum_j W_ij exp(G_i - G_j) o k_j
    dK_i = -beta_i exp(G_i) o (S Z_i) + sum_j X_ij exp(G_i - G_j) o k_j
           + beta_i exp(G_C - G_i) o (D E_i) + sum_j exp(G_j - G_i) o (W_ji q_j + X_ji k_j)

Pairs are made by factors from the chunk's middle m, ``exp(G_i - m)`` and ``exp(m - G_j)``, if these are not FAR from 1;
else only pairs of one half with the other, whose factors are not above 1, and each half is a chunk of its own in the
next step. A token's pair with itself has no gate. Each sum of gates is the product of a matrix of 0, 1 and -1 with
them, and the gradient of gates the product of its transposed with the gradient of the sum.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from keraunos.kernels.device.limits import precision
from keraunos.kernels.device.recurrence import CLOSED, LOG2E, decay, load_gate, locate, ones_dot
from keraunos.kernels.host.arrays import Spec, pow2, strides_by_name, tile, unit_of
from keraunos.kernels.host.plan import Plan, remember
from keraunos.kernels.host.sequences import Sizes

# Dimensions of K that a program takes, by the tokens of a chunk: registers hold no more. Tiles of float32 must not have
# 16: Triton 3.6 builds code for Hopper then that writes elsewhere.
_DIMENSIONS = {32: 64, 64: 32}
# The logarithm of the greatest factor of a pair: half of the dtype's exponents are left to what it multiplies.
_FAR = {"bfloat16": 55.0, "float16": 5.5, "float32": 0.0}


@triton.jit
def gates_dot(m, b_g, TERMS: tl.constexpr):
    """``m @ b_g`` of a matrix of 0, 1 and -1 with gates: 16-bit gates as they are, others as ``ones_dot``."""
    if b_g.dtype == tl.float32:
        return ones_dot(m, b_g, TERMS)
    return tl.dot(m.to(tl.float32).to(b_g.dtype), b_g)


@triton.jit
def load_rows(p_x, i_v, m_t, V: tl.constexpr, BV: tl.constexpr):
    """BV dimensions from the i_v-th on of a chunk's rows of values."""
    o_v = i_v + tl.arange(0, BV)
    return tl.load(p_x + o_v[None, :], mask=m_t[:, None] & (o_v < V)[None, :], other=0.0)


@triton.jit
def load_state(p_s, i_v, m_d, V: tl.constexpr, BV: tl.constexpr, STATE_V: tl.constexpr):
    """BV of V dimensions of a state ``[BV, BK]``, 0 beyond."""
    o_v = i_v + tl.arange(0, BV)
    return tl.load(p_s + o_v[:, None] * STATE_V, mask=(o_v < V)[:, None] & m_d, other=0.0)


@triton.jit
def rows_dot(b_x, b_e, p_x, p_e, m_t, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr):
    """The products ``[C (i), C (j)]`` of rows of values, which have been loaded up to dimension BV."""
    b_y = tl.dot(b_x, tl.trans(b_e), input_precision=PRECISION)
    for i_v in tl.range(BV, V, BV, num_stages=1):
        b_et = tl.trans(load_rows(p_e, i_v, m_t, V, BV))
        b_y = tl.dot(load_rows(p_x, i_v, m_t, V, BV), b_et, b_y, input_precision=PRECISION)
    return b_y


@triton.jit
def state_dot(b_x, b_s, p_x, p_s, m_t, m_d, V: tl.constexpr, BV: tl.constexpr, STATE_V: tl.constexpr,
              PRECISION: tl.constexpr):
    """The product of rows of values with a state ``[C, BK]``, both of which have been loaded up to dimension BV."""
    b_y = tl.dot(b_x, b_s, input_precision=PRECISION)
    for i_v in tl.range(BV, V, BV, num_stages=1):
        b_xv = load_rows(p_x, i_v, m_t, V, BV)
        b_y = tl.dot(b_xv, load_state(p_s, i_v, m_d, V, BV, STATE_V), b_y, input_precision=PRECISION)
    return b_y


@triton.jit
def store_values(dv, o_row, b_z, b_e, b_beta, i_v, m_t, V: tl.constexpr, BV: tl.constexpr):
    """Stores BV dimensions of the gradients of values; returns their part of those of beta."""
    o_v = i_v + tl.arange(0, BV)
    b_zf = b_z.to(tl.float32)
    tl.store(dv + o_row + o_v[None, :], (b_beta * b_zf).to(dv.dtype.element_ty), mask=m_t[:, None] & (o_v < V)[None, :])
    return tl.sum(b_e.to(tl.float32) * b_zf, 1)


def part_of_chunk(
    i_s, i_h, i_k,
    q, k, g, beta, do, errors, rights, states, dstates, norms, wanted, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_bb, stride_bt, stride_bh, stride_ob, stride_ot, stride_oh, scale, T, N,
    dq, dk, dv, dg, dbeta,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RG: tl.constexpr,
    RB: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    STATE_K: tl.constexpr, STATE_V: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr, SOME: tl.constexpr,
    NEED_G: tl.constexpr, FAR: tl.constexpr, EXACT: tl.constexpr, TERMS: tl.constexpr, DG_TERMS: tl.constexpr,
    REVERSE: tl.constexpr, FROM_FIRST: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """The gradients of one chunk and head for the i_k-th BK dimensions of keys."""
    i_n, begin, length, i_c = locate(cu_seqlens, i_s, T, N, C, PACKED, True, BN)
    i_b = begin * 0 if PACKED else begin * 0 + i_n
    first = i_c * C
    left = (length - first).to(tl.int32)
    if left <= 0:
        return
    i_slot = i_s.to(tl.int64) * H + i_h
    # Rows are tokens in the order in which the recurrence meets them.
    o_r = tl.arange(0, C)
    o_t = -o_r if REVERSE else o_r
    token = begin + first
    m_t = o_r < left
    if REVERSE:
        token = begin + (first + C - 1 if FROM_FIRST else length - 1 - first)
        m_t = (C - 1 - o_r if FROM_FIRST else o_r) < left
    least: tl.constexpr = C if REVERSE and FROM_FIRST else 1  # rows with which the first is one
    row = (i_b * T + token) * H + i_h
    p_q = q + (i_b * stride_qb + token * stride_qt + (i_h // RQ).to(tl.int64) * stride_qh) * UNIT
    p_k = k + (i_b * stride_kb + token * stride_kt + (i_h // RK).to(tl.int64) * stride_kh) * UNIT
    p_g = g + (i_b * stride_gb + token * stride_gt + (i_h // RG).to(tl.int64) * stride_gh) * UNIT
    p_do = do + (i_b * stride_ob + token * stride_ot + i_h.to(tl.int64) * stride_oh) * UNIT
    dtype: tl.constexpr = k.dtype.element_ty
    b_beta = tl.where(m_t, 1.0, 0.0)[:, None]
    if BETA:
        p_beta = beta + i_b * stride_bb + token * stride_bt + (i_h // RB).to(tl.int64) * stride_bh
        b_beta = tl.load(p_beta + o_t * stride_bt, mask=m_t, other=0.0).to(tl.float32)[:, None]
    o_row = o_t[:, None] * (H * V)
    p_do += o_t[:, None] * (stride_ot * UNIT)
    p_e = errors + row * V + o_row
    p_z = rights + row * V + o_row
    o_k = i_k * BK + tl.arange(0, BK)
    m_d = (o_k < K)[None, :]
    m_k = m_t[:, None] & m_d
    b_q = tl.load(p_q + (o_t[:, None] * (stride_qt * UNIT) + o_k[None, :]), mask=m_k, other=0.0)  # [C, BK]
    b_k = tl.load(p_k + (o_t[:, None] * (stride_kt * UNIT) + o_k[None, :]), mask=m_k, other=0.0)
    # No pair has the gate of the first row in between.
    b_g = load_gate(p_g + (o_t[:, None] * (stride_gt * UNIT) + o_k[None, :]), m_k & (o_r > 0)[:, None], CLOSED)
    b_first = load_gate(p_g + o_k[None, :], m_d & (left >= least), CLOSED)
    p_s = states + i_slot * (K * V) + o_k[None, :] * STATE_K
    p_d = dstates + i_slot * (K * V) + o_k[None, :] * STATE_K
    b_s = load_state(p_s, 0, m_d, V, BV, STATE_V)  # [BV, BK]
    b_d = load_state(p_d, 0, m_d, V, BV, STATE_V)
    b_do = load_rows(p_do, 0, m_t, V, BV)  # [C, BV]
    b_e = load_rows(p_e, 0, m_t, V, BV)
    b_z = load_rows(p_z, 0, m_t, V, BV)
    b_all = tl.sum(b_g, 0)[None, :]
    b_g = b_g.to(g.dtype.element_ty)
    if NORM:
        p_norm = norms + i_slot * (2 * C) + (C - 1 - o_r if REVERSE else o_r)
        b_q = b_q.to(tl.float32) * tl.load(p_norm)[:, None]
        b_k = b_k.to(tl.float32) * tl.load(p_norm + C)[:, None]
    if NEED_G:
        b_dg = tl.sum(b_s.to(tl.float32) * b_d.to(tl.float32), 0)[None, :]
        for i_v in tl.range(BV, V, BV, num_stages=1):
            b_sd = load_state(p_s, i_v, m_d, V, BV, STATE_V).to(tl.float32)
            b_sd *= load_state(p_d, i_v, m_d, V, BV, STATE_V).to(tl.float32)
            b_dg += tl.sum(b_sd, 0)[None, :]
        b_dg *= decay(b_first + b_all, EXACT)
    if i_k == 0:
        b_db = store_values(dv, row * V + o_row, b_z, b_e, b_beta, 0, m_t, V, BV)
        for i_v in tl.range(BV, V, BV, num_stages=1):
            b_zv = load_rows(p_z, i_v, m_t, V, BV)
            b_db += store_values(dv, row * V + o_row, b_zv, load_rows(p_e, i_v, m_t, V, BV), b_beta, i_v, m_t, V, BV)
        if BETA:
            tl.store(dbeta + row + o_t * H, b_db.to(dbeta.dtype.element_ty), mask=m_t)
    o_out = row * K + (o_t[:, None] * (H * K) + o_k[None, :])
    m_upto = o_r[:, None] >= o_r[None, :]
    m_lower = o_r[:, None] > o_r[None, :]
    m_own = o_r[:, None] == o_r[None, :]
    if EXACT:
        is_mild: tl.constexpr = False
    else:
        is_mild = tl.min(b_all) >= -2 * FAR
    if is_mild:
        # Half of the sum of gates after the first row is m.
        b_sum = gates_dot(m_upto, b_g, TERMS) * LOG2E - (0.5 * LOG2E) * b_all
        b_late = tl.exp2(b_sum)
        b_early = b_beta * tl.exp2(-b_sum)
        b_m = decay(b_first + 0.5 * b_all, False)
        b_ke = (b_k.to(tl.float32) * b_early).to(dtype)
        b_ql = (b_q.to(tl.float32) * b_late).to(dtype)
        b_w = scale * rows_dot(b_do, b_e, p_do, p_e, m_t, V, BV, PRECISION)
        b_own = tl.sum(tl.where(m_own, b_w, 0.0), 1)[:, None] * b_beta
        b_w = tl.where(m_lower, b_w, 0.0).to(dtype)
        b_y = state_dot(b_do, b_s, p_do, p_s, m_t, m_d, V, BV, STATE_V, PRECISION) * (scale * b_m)
        b_y = tl.dot(b_w, b_ke, b_y) * b_late
        b_sy = b_q.to(tl.float32) * b_y
        tl.store(dq + o_out, (b_y + b_own * b_k.to(tl.float32)).to(dq.dtype.element_ty), mask=m_k)
        b_de = tl.dot(tl.trans(b_w), b_ql)
        b_late *= -b_beta
        b_kl = (b_k.to(tl.float32) * b_late).to(dtype)
        b_x = tl.where(m_lower, rows_dot(b_z, b_e, p_z, p_e, m_t, V, BV, PRECISION), 0.0).to(dtype)
        b_y = state_dot(b_z, b_s, p_z, p_s, m_t, m_d, V, BV, STATE_V, PRECISION) * b_m
        b_dk = tl.dot(b_x, b_ke, b_y) * b_late
        b_sy += b_k.to(tl.float32) * b_dk
        b_de = tl.dot(tl.trans(b_x), b_kl, b_de)
        b_sy -= b_k.to(tl.float32) * b_early * b_de
        b_dl = state_dot(b_e, b_d, p_e, p_d, m_t, m_d, V, BV, STATE_V, PRECISION) * decay(0.5 * b_all, False)
        b_sl = b_k.to(tl.float32) * b_early * b_dl
        b_dk += b_early * (b_de + b_dl)
    else:
        b_w = scale * rows_dot(b_do, b_e, p_do, p_e, m_t, V, BV, PRECISION)
        b_own = tl.sum(tl.where(m_own, b_w, 0.0), 1)[:, None] * b_beta
        b_w = tl.where(m_lower, b_w, 0.0).to(dtype)
        b_x = tl.where(m_lower, rows_dot(b_z, b_e, p_z, p_e, m_t, V, BV, PRECISION), 0.0).to(dtype)
        b_y = decay(b_first + gates_dot(m_upto, b_g, TERMS), EXACT)
        b_dq = scale * state_dot(b_do, b_s, p_do, p_s, m_t, m_d, V, BV, STATE_V, PRECISION) * b_y
        b_sy = b_q.to(tl.float32) * b_dq
        b_dk = -b_beta * state_dot(b_z, b_s, p_z, p_s, m_t, m_d, V, BV, STATE_V, PRECISION) * b_y
        b_sy += b_k.to(tl.float32) * b_dk
        b_y = b_beta * decay(gates_dot(o_r[:, None] < o_r[None, :], b_g, TERMS), EXACT)
        b_y *= state_dot(b_e, b_d, p_e, p_d, m_t, m_d, V, BV, STATE_V, PRECISION)
        b_sl = b_k.to(tl.float32) * b_y
        b_dk += b_y
        # Pairs of one half of blocks with the other, then within the halves, until these are mild.
        size = C
        while size > 1:
            half = size // 2
            middle = (o_r & -size) + half
            m_sum = m_upto.to(tl.int32) - (o_r[None, :] < middle[:, None]).to(tl.int32)
            b_sum = gates_dot(m_sum, b_g, TERMS)
            all_mild = tl.max(tl.abs(b_sum)) <= FAR
            most = tl.where(all_mild, FAR, 0.0)
            b_late = decay(tl.minimum(b_sum, most), EXACT)
            b_early = b_beta * decay(tl.minimum(-b_sum, most), EXACT)
            apart = o_r[:, None] ^ o_r[None, :]
            m_pair = (apart < size) & (all_mild | (apart >= half))
            b_wm = tl.where(m_pair, b_w, 0.0).to(dtype)
            b_xm = tl.where(m_pair, b_x, 0.0).to(dtype)
            b_ke = (b_k.to(tl.float32) * b_early).to(dtype)
            b_ql = (b_q.to(tl.float32) * b_late).to(dtype)
            b_kl = (b_k.to(tl.float32) * b_late * -b_beta).to(dtype)
            b_y = tl.dot(b_wm, b_ke, input_precision=PRECISION) * b_late
            b_dq += b_y
            b_sy += b_q.to(tl.float32) * b_y
            b_y = tl.dot(b_xm, b_ke, input_precision=PRECISION) * b_late * -b_beta
            b_dk += b_y
            b_sy += b_k.to(tl.float32) * b_y
            b_y = tl.dot(tl.trans(b_wm), b_ql, input_precision=PRECISION)
            b_y = tl.dot(tl.trans(b_xm), b_kl, b_y, input_precision=PRECISION) * b_early
            b_dk += b_y
            b_sy -= b_k.to(tl.float32) * b_y
            size = tl.where(all_mild, 1, half)
        tl.store(dq + o_out, (b_dq + b_own * b_k.to(tl.float32)).to(dq.dtype.element_ty), mask=m_k)
    tl.store(dk + o_out, (b_dk + b_own * b_q.to(tl.float32)).to(dk.dtype.element_ty), mask=m_k)
    if NEED_G:
        # A gate decays what rows from it on read from before it, and what rows before it leave to after the chunk.
        b_dg += ones_dot(o_r[:, None] <= o_r[None, :], b_sy, TERMS)
        b_dg += ones_dot(m_lower, b_sl, DG_TERMS)
        tl.store(dg + o_out, b_dg.to(dg.dtype.element_ty), mask=m_k)


inlined = triton.jit(part_of_chunk)
# Not inlined: from a loop that it saw Triton 3.6 built accesses to memory that is not there.
called = triton.jit(noinline=True)(part_of_chunk)


@triton.jit(do_not_specialize=["N"])
def dimension_gradients_kernel(
    q, k, g, beta, do, errors, rights, states, dstates, norms, wanted, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_bb, stride_bt, stride_bh, stride_ob, stride_ot, stride_oh, scale, T, N,
    dq, dk, dv, dg, dbeta,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RQ: tl.constexpr, RK: tl.constexpr, RG: tl.constexpr,
    RB: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    STATE_K: tl.constexpr, STATE_V: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr, SOME: tl.constexpr,
    NEED_G: tl.constexpr, FAR: tl.constexpr, EXACT: tl.constexpr, TERMS: tl.constexpr, DG_TERMS: tl.constexpr,
    REVERSE: tl.constexpr, FROM_FIRST: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """The gradients of a chunk's tokens for BK dimensions of a head's keys; of values and beta with the first of them.

    ``errors`` and ``rights`` ``[B, T, H, V]`` are E and Z. ``states`` and ``dstates``, of a slot for each chunk and
    head, have strides STATE_K and STATE_V. NORM: ``norms`` ``[slots, H, 2, C]`` are one over the lengths of the queries
    and of the keys, in the order of memory, and gradients are those of vectors of length 1. FROM_FIRST: chunks are
    counted from a sequence's first token with REVERSE, too; else from the one that the recurrence meets first. SOME: of
    chunks and heads with ``wanted`` ``[slots, H]`` not 0; nothing is written for the others.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    if SOME:
        i_h = tl.program_id(0) % H
        i_s = tl.program_id(0) // H
        if tl.load(wanted + i_s.to(tl.int64) * H + i_h) == 0:
            return
        for i_k in range(0, NK):
            called(
                i_s, i_h, i_k, q, k, g, beta, do, errors, rights, states, dstates, norms, wanted, cu_seqlens,
                stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
                stride_bb, stride_bt, stride_bh, stride_ob, stride_ot, stride_oh, scale, T, N, dq, dk, dv, dg, dbeta,
                H, K, V, RQ, RK, RG, RB, UNIT, C, BK, BV, BN, STATE_K, STATE_V, BETA, NORM, SOME, NEED_G, FAR, EXACT,
                TERMS, DG_TERMS, REVERSE, FROM_FIRST, PACKED, PRECISION)
    else:
        i_k = tl.program_id(0) % NK
        i_h = tl.program_id(0) // NK % H
        i_s = tl.program_id(0) // (NK * H)
        inlined(
            i_s, i_h, i_k, q, k, g, beta, do, errors, rights, states, dstates, norms, wanted, cu_seqlens, stride_qb,
            stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh, stride_bb,
            stride_bt, stride_bh, stride_ob, stride_ot, stride_oh, scale, T, N, dq, dk, dv, dg, dbeta, H, K, V, RQ, RK,
            RG, RB, UNIT, C, BK, BV, BN, STATE_K, STATE_V, BETA, NORM, SOME, NEED_G, FAR, EXACT, TERMS, DG_TERMS,
            REVERSE, FROM_FIRST, PACKED, PRECISION)


@remember
def dimension_gradients_plan(call: Sizes, q: Spec, k: Spec, g: Spec, do: Spec, slots: int, chunk: int,
                             values_first: bool, from_first: bool, norm: bool = False, some: bool = False) -> Plan:
    """The launch of ``dimension_gradients_kernel``, whose gradients are those of each head.

    Args:
        call: the sizes, and the arrays' properties.
        q, k, g, do: the properties of the arrays of queries, keys, gates and of the output's gradient.
        slots: how many chunks there are at most, of ``chunk`` tokens, 32 or 64.
        values_first: states are [V, K], else [K, V].
        from_first, norm, some: FROM_FIRST, NORM and SOME.
    """
    (query, key, value, gates, beta), H, K, V, exact = call.specs[:5], call.H, call.K, call.V, call.dtype == "float32"
    tokens, unit, BK = (call.B, call.T, H), unit_of(q, k, g, do), _DIMENSIONS[chunk]
    numbers = strides_by_name(unit, q=q, k=k, g=g) | strides_by_name(b=beta) | strides_by_name(unit, o=do)
    numbers |= dict(scale=call.scale, T=call.T, N=call.N)
    outputs: dict[str, Any] = dict(
        dq=((*tokens, K), call.dtype_of_each(query)), dk=((*tokens, K), call.dtype_of_each(key)),
        dv=((*tokens, V), call.dtype_of_each(value)),
        dg=((*tokens, K), call.dtype_of_each(gates)) if call.opts.needs(call.specs, "g") else None,
        dbeta=None if beta is None else (tokens, call.dtype_of_each(beta)),
    )
    constants = dict(
        H=H, K=K, V=V, **call.ratios(q=q, k=k, g=g, b=beta), UNIT=unit, C=chunk, BK=BK,
        BV=min(max(tile(V), 64), 2 * chunk), BN=pow2(call.N), STATE_K=1 if values_first else V,
        STATE_V=K if values_first else 1, BETA=beta is not None, NORM=norm, SOME=some, NEED_G=outputs["dg"] is not None,
        FAR=_FAR[call.dtype], EXACT=exact, TERMS=3 if exact else 2,
        DG_TERMS={"bfloat16": 1, "float16": 2, "float32": 3}[call.dtype], REVERSE=call.reverse, FROM_FIRST=from_first,
        PACKED=call.packed, PRECISION=precision(exact),
    )
    return Plan(dimension_gradients_kernel, (slots * H * (1 if some else -(-K // BK)),), numbers, outputs, constants)
