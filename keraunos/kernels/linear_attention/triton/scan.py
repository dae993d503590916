"""The Triton kernels that walk over sequences; ``passes.py`` says how they and others make a forward and a backward.

Sequences are cut into chunks of BT tokens, and for the sequence split into segments, whose states come from pieces, P
to a segment. Rows of a tile are in the order of memory; ``o_p`` is their place in the order of the recurrence, so that
running backwards is index arithmetic. An adjoint run (ADJOINT) carries the gradient of the state: a token's own gate
acts after the token, not before it, and the softmax scale acts on what enters the state, not on what is read from it.

Strides of rows that are no constants come in units of UNIT, a constant: so the compiler knows that rows are aligned,
also where the front end does not tell it what numbers are multiples of, and builds the same code for every front end.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from keraunos.kernels.device.recurrence import (
    CLOSED,
    LOG2E,
    clear_rows,
    decay,
    in_turn,
    load_gamma,
    load_gate,
    locate,
    ones_dot,
    power,
    span,
)

# The log of less than any 16-bit value.
FAINT = tl.constexpr(-100.0)
# In place of the sum of a piece's gates, whose state is not written: it leaves nothing, and lets nothing pass; it has
# no tokens.
FORGOTTEN, EMPTY = tl.constexpr(-1e30), tl.constexpr(1e30)


@triton.jit
def join(b_s, b_decay, b_local):
    """The operator that joins pieces, segments and shards: the state after one, from that before it.

    b_decay: the decay over the piece; b_local: the state that it leaves from zeros.
    """
    # What is forgotten is nothing, even if it was no number.
    return tl.where(b_decay > 0, b_s, 0.0) * b_decay + b_local


@triton.jit
def reach(b_gamma, i_p, L, P, REVERSE: tl.constexpr, EXACT: tl.constexpr):
    """How many tokens back from the end of piece i_p of a segment anything is left at the segment's end.

    Below 0: not even there. Not for pieces of the segment that is walked last, which may be a short one.
    """
    n_after = (i_p if REVERSE else (P - 1 - i_p)) * L
    return span(b_gamma, EXACT) - n_after


@triton.jit
def store_total(
    total, i_s, i_h, i_v, b_total, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr
):
    """The sum of a piece's gates, one or K of them, which programs of all tiles of V have."""
    if i_v == 0:
        i_total = i_s.to(tl.int64) * H + i_h
        if GATE == 2:
            o_k = tl.arange(0, BK)
            tl.store(total + i_total * K + o_k, tl.zeros([BK], dtype=tl.float32) + b_total, mask=o_k < K)
        else:
            tl.store(total + i_total, b_total)


@triton.jit
def chunk_decay(b_gamma, o_p, left, scale_out, scale_in, ADJOINT: tl.constexpr, EXACT: tl.constexpr):
    """Constant decays of a chunk of ``left`` tokens: from its start to each ``[BT]``, from each to its end, across."""
    b_to = power(b_gamma * (o_p + (0 if ADJOINT else 1)), EXACT) * scale_out
    b_left = power(b_gamma * tl.maximum(left - o_p - (0 if ADJOINT else 1), 0), EXACT) * scale_in
    return b_to, b_left, power(b_gamma * left, EXACT)


@triton.jit(do_not_specialize=["N", "W", "ROWS"])
def scan_kernel(
    q, k, v, g, gamma, sums, halved, intra, h0, into, cu_seqlens, pool, slots, has_initial, exports,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gt, stride_gh, stride_gamma_b,
    scale, T, N, L, P, M, F, W, ROWS,
    o, ht, hs, total,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    RQ: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, RG: tl.constexpr,
    stride_qt: tl.constexpr, stride_kt: tl.constexpr, stride_vt: tl.constexpr, UNIT: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    GATE: tl.constexpr, GAMMA: tl.constexpr, EXACT: tl.constexpr, MILD: tl.constexpr, REVERSE: tl.constexpr,
    ADJOINT: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr,
    INIT: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr, STATE_T: tl.constexpr,
    PRECISION: tl.constexpr, POOL: tl.constexpr, MAY_START: tl.constexpr, EXPORT: tl.constexpr,
    stride_ss: tl.constexpr, stride_sh: tl.constexpr, stride_sk: tl.constexpr, stride_sv: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Walk a sequence, or one segment of it, chunk by chunk, with a tile of the state in registers.

    ``o_i = sum_{j <= i} decay_ij (q_i . k_j) v_j``, for a tile of BV of the V dimensions of v. Everything is computed
    transposed, values by tokens: then the state ``[BV, BK]`` and the decayed v are left operands, which the tensor
    cores read from registers, and only the masked ``k q^T`` passes through shared memory.

    RQ, RK, RV, RG: how many heads share each head of q, k, v and g.

    GATE: 0 none, 1 per token, 2 per token and dimension of k: then q and k come from ``decay_kernel``,
    decayed from and to their chunk's start, with its ``sums``; of a chunk that is ``halved`` (MILD of 0: all), k is
    decayed to the end, and the pairs are in ``intra`` ``[B, T, H, WIDTH]``, in the rows of their queries. INIT: 0
    zeros, 1 h0 of the sequence, 2 h0 of the walk, 3 h0 of the walk's part. FINAL: 0 none, 1 ht of the sequence, 2 ht
    (and the sum of the gates, ``total``) of the piece, if anything of it is left at its segment's end, 3 ht of the
    walk, 4 as 2, of a sequence that goes on elsewhere: of the last segment too, and ``total`` is natural and complete.
    SAVE: write to hs the state before each chunk (1) or part (2). STATE_T: h0 and ht are ``[V, K]`` in memory. L:
    tokens per segment, or per piece where FINAL is 2 or 4. PART: walk only M tokens from the F-th on, of the sequences
    or segments from the W-th on; of M tokens are the parts in INIT and SAVE, too. ``into`` has no values: o may
    overwrite it.

    POOL: the states of sequences are in ``slots`` of ``pool``, which ht is; one in slot -1 gets zeros only, and so does
    what is after the last sequence in ROWS of the output. MAY_START: ``has_initial`` says which sequences have a state.
    EXPORT: ``exports`` has for each chunk the slot that the state before it is copied to, or -1; so it has for the end
    of a sequence of whole chunks.

    OVERLAP: see ``in_turn``.
    """
    in_turn(OVERLAP)
    LOG: tl.constexpr = 1.0 if EXACT else LOG2E
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_h = (tl.program_id(0) // NV) % H
    i_o = tl.program_id(0) // (NV * H)
    GOES_ON: tl.constexpr = FINAL == 4
    PIECE: tl.constexpr = FINAL == 2 or GOES_ON
    if PIECE and GAMMA and GATE == 0:
        # Heads that forget have little to read: side by side are the pieces of one head, so that all multiprocessors
        # get as much of each.
        n_o = tl.num_programs(0) // (NV * H)
        i_h = tl.program_id(0) // (NV * n_o)
        i_o = (tl.program_id(0) // NV) % n_o
    i_s = (i_o + W) if PART else i_o
    i_n, begin, length, i_g = locate(cu_seqlens, i_s, T, N, L, PACKED, SPLIT, BN, GOES_ON)
    if GOES_ON:  # noqa: SIM102
        if i_g * L >= length:
            store_total(total, i_s, i_h, i_v, EMPTY, H, K, BK, GATE)
            return
    if SPLIT:
        if i_g * L >= length and i_g > 0:
            return
        if FINAL == 2:  # noqa: SIM102
            # Nobody continues from the last segment.
            if (i_g < P) if REVERSE else ((i_g // P + 1) * P * L >= length):
                return
    if POOL:
        slot = tl.load(slots + i_n).to(tl.int64)
        o_clear = i_v * BV + tl.arange(0, BV)
        if (i_n == N - 1) & (i_g == 0):
            clear_rows(o, begin + length, ROWS, i_h, o_clear, H, V, BT, BV)
        if slot < 0:
            own = begin + (i_g * L if SPLIT else 0)
            end = tl.minimum(own + L, begin + length) if SPLIT else begin + length
            clear_rows(o, own, end, i_h, o_clear, H, V, BT, BV)
            return
    i_b = 0 if PACKED else i_n.to(tl.int64)
    first = i_g * L if SPLIT else i_g
    size = (tl.minimum(length - first, L) if SPLIT else length).to(tl.int32)
    if PART:
        first += F
        size = tl.maximum(tl.minimum(size - F, M), 0)
    b_gamma = 0.0
    if GAMMA and GATE < 2:
        b_gamma = load_gamma(gamma, i_b, i_h, stride_gamma_b, EXACT)
    if PIECE and GAMMA and GATE == 0:
        # Only the tokens count of which anything is left at the segment's end.
        n_seen = reach(b_gamma, (i_g % P).to(tl.int32), L, P, REVERSE, EXACT)
        if GOES_ON:
            if not REVERSE:
                # The last segment may be a short one.
                n_seen = tl.maximum(n_seen, span(b_gamma, EXACT) - tl.maximum(length - (i_g + 1) * L, 0))
            b_total = tl.where(n_seen < 0, FORGOTTEN, b_gamma / LOG * size)
            store_total(total, i_s, i_h, i_v, b_total, H, K, BK, GATE)
        if n_seen < 0:
            return
        unseen = tl.maximum(size - n_seen, 0) // BT * BT
        size -= unseen
        if not REVERSE:
            first += unseen
    n_c = tl.cdiv(size, BT)

    o_t = tl.arange(0, BT)
    o_p = (BT - 1 - o_t) if REVERSE else o_t
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = (o_k < K)[None, :]
    m_v = (o_v < V)[None, :]
    # Walk from the first chunk, or from the last one down. Tiles begin, or running backwards end, where chunks do.
    base = begin + first + ((size - BT) if REVERSE else 0)
    p_q = q + (i_b * stride_qb + (i_h // RQ).to(tl.int64) * stride_qh) * UNIT + base * stride_qt
    p_k = k + (i_b * stride_kb + (i_h // RK).to(tl.int64) * stride_kh) * UNIT + base * stride_kt
    p_v = v + (i_b * stride_vb + (i_h // RV).to(tl.int64) * stride_vh) * UNIT + base * stride_vt
    row = (i_b * T + base) * H + i_h  # of a contiguous [B, T, H, ...]
    if OUTPUT:
        p_o = o + row * V
    if GATE == 1:
        p_g = g + i_b * stride_gb + base * stride_gt + (i_h // RG) * stride_gh + o_t * stride_gt
    i_slot = (begin // BT + i_n) if PACKED else (i_b * tl.cdiv(T, BT))
    i_slot = (i_slot + first // BT + ((n_c - 1) if REVERSE else 0)) * H + i_h  # of the chunk
    # From the chunk's slot to that in hs, which has the chunks of a part side by side.
    walked = L if SPLIT else T
    to_own = i_slot * 0
    if (SPLIT or PART) and not PACKED:
        i_own = i_o.to(tl.int64) * tl.cdiv(M if PART else walked, BT) + ((n_c - 1) if REVERSE else 0)
        to_own = i_own * H + i_h - i_slot
    dtype: tl.constexpr = k.dtype.element_ty

    o_s = o_v[:, None] * (K if STATE_T else 1) + o_k[None, :] * (1 if STATE_T else V)
    m_s = (o_v < V)[:, None] & m_k
    if POOL:
        i_head = i_h.to(tl.int64) * stride_sh
        o_pool = o_v[:, None] * stride_sv + o_k[None, :] * stride_sk
    if POOL and INIT == 1:
        m_init = m_s
        if MAY_START:
            m_init &= tl.load(has_initial + i_n) != 0
        b_s = tl.load(pool + slot * stride_ss + i_head + o_pool, mask=m_init, other=0.0).to(tl.float32)  # [BV, BK]
    elif INIT > 0:
        i_init = (i_n if INIT == 1 else i_s).to(tl.int64)
        if INIT == 3:
            i_init = i_init * tl.cdiv(walked, M) + F // M
        i_init = i_init * H + i_h
        b_s = tl.load(h0 + i_init * K * V + o_s, mask=m_s, other=0.0).to(tl.float32)  # [BV, BK]
    else:
        b_s = tl.zeros([BV, BK], dtype=tl.float32)

    # The decays of a whole chunk: between its tokens, from its start, to its end, and across it. Adjoint runs see a
    # token's gate after the token, and scale what enters the state.
    m_pair = o_p[:, None] <= o_p[None, :]  # [BT (j), BT (i)]
    b_gap = b_gamma * tl.maximum(o_p[None, :] - o_p[:, None], 0)
    b_pair = tl.where(m_pair, power(b_gap, EXACT) * scale, 0.0)
    scale_out = 1.0 if ADJOINT else scale
    scale_in = scale if ADJOINT else 1.0
    left = tl.minimum(size - (n_c - 1) * BT if REVERSE else size, BT)
    b_to, b_left, b_all = chunk_decay(b_gamma, o_p, left, scale_out, scale_in, ADJOINT, EXACT)
    b_sum = tl.zeros([BK], dtype=tl.float32)
    b_sum1 = 0.0

    one = tl.where(T < 0, 0.0, 1.0)
    # With keys decayed to the chunk's start, the state decays after they entered it: at the start of the next step,
    # where that waits for no product, unless the final state is wanted.
    LATE: tl.constexpr = GATE == 2 and MILD > 0 and not ADJOINT
    b_due = tl.full([BK], 1.0, dtype=tl.float32)
    for i in range(n_c):
        if LATE and FINAL == 0:
            b_s *= b_due[None, :]
        # Written with i, not with the carried ``left``: the pipeline loads chunks ahead and needs their masks then.
        n_rest = size - ((n_c - 1 - i) if REVERSE else i) * BT
        m_t = o_p < n_rest
        step = -tl.minimum(n_rest, BT) if REVERSE else BT
        if SAVE == 1:
            p_s = hs + (i_slot + to_own) * K * V + o_v[:, None] + o_k[None, :] * V
            tl.store(p_s, b_s.to(hs.dtype.element_ty), mask=m_s)
        if SAVE == 2:
            n_part = M // BT
            i_c = (n_c - 1 - i) if REVERSE else i
            if ((i == 0) | ((i_c + 1) % n_part == 0)) if REVERSE else (i_c % n_part == 0):
                i_part = i_s.to(tl.int64) * tl.cdiv(walked, M) + i_c // n_part
                p_s = hs + (i_part * H + i_h) * K * V + o_v[:, None] + o_k[None, :] * V
                tl.store(p_s, b_s.to(hs.dtype.element_ty), mask=m_s)
        if EXPORT:
            target = tl.load(exports + i_slot // H).to(tl.int64)
            if target >= 0:
                tl.store(ht + target * stride_ss + i_head + o_pool, b_s.to(ht.dtype.element_ty), mask=m_s)
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
            b_to_c *= decay(b_g_to, EXACT)
            b_left_c *= decay(b_g_left, EXACT)
            b_all_c *= decay(b_g_all, EXACT)
            b_sum1 += b_g_all
            p_g += step * stride_gt
            if OUTPUT:
                if EXACT:
                    # Rows t, columns i: the gates up to i; the product with m_after keeps those after j.
                    b_between = ones_dot(m_after, tl.where(m_upto, b_g[:, None], 0.0), 3)
                else:
                    b_between = b_g_to[None, :] + (b_g_left - b_g_all)[:, None]
                b_between = tl.minimum(b_between, 0.0) * LOG + b_gap
                b_pair = tl.where(m_pair, power(b_between, EXACT) * scale, 0.0)
        if GATE == 2:
            b_sums = tl.load(sums + i_slot * K + o_k, mask=o_k < K, other=0.0)
            b_sum += b_sums
            b_decay = power(b_sums, EXACT)
            halves = True
            if MILD > 0:
                halves = tl.load(halved + i_slot) != 0

        if OUTPUT:
            if GATE == 2:
                # intra is [query's token, key's token in the chunk]; in an adjoint run the two change places.
                o_c = (o_t - BT - step) if REVERSE else o_t
                o_r = o_t * (H * WIDTH)
                o_a = (o_r[:, None] + o_c[None, :]) if ADJOINT else (o_c[:, None] + o_r[None, :])
                p_a = intra + row * WIDTH + o_a
                m_a = m_t[:, None] & m_t[None, :]
                if MILD > 0:
                    b_a = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BT (j), BT (i)]
                    b_a = tl.where(m_pair, b_a, 0.0).to(dtype)
                    if halves:
                        b_a = tl.load(p_a, mask=m_a, other=0.0)
                else:
                    b_a = tl.load(p_a, mask=m_a, other=0.0)
                b_h = b_s
                if MILD > 0 and ADJOINT:
                    b_h = tl.where(halves, b_s, b_s * b_decay[None, :])
                b_o = tl.dot(b_h.to(dtype), tl.trans(b_q), input_precision=PRECISION)  # [BV, BT]
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
            if LATE:
                if halves:
                    b_s *= b_decay[None, :]
                b_due = tl.where(halves, 1.0, b_decay)
            else:
                b_s *= b_decay[None, :]
        else:
            b_u = (b_v.to(tl.float32) * b_left_c[:, None]).to(dtype)
            b_s *= b_all_c
        b_s = tl.dot(tl.trans(b_u), b_k, b_s, input_precision=PRECISION)
        if FINAL > 0:
            # Reading the state here ends its product in this step; read only after the loop, the assembler would
            # serialize all products of the loop.
            b_s *= b_due[None, :] if LATE else one
        p_q += step * stride_qt
        p_k += step * stride_kt
        p_v += step * stride_vt
        row += step * H
        i_slot += -H if REVERSE else H
        # Only the sequence's last chunk may be shorter: the decays change once at most.
        following = BT if REVERSE else tl.maximum(tl.minimum(size - (i + 1) * BT, BT), 0)
        if following != left:
            b_to, b_left, b_all = chunk_decay(b_gamma, o_p, following, scale_out, scale_in, ADJOINT, EXACT)
        left = following

    if FINAL > 0:
        write = True
        if SPLIT and FINAL == 1:
            write = (i_g == 0) if REVERSE else ((i_g + 1) * L >= length)
        if EXPORT:
            target = tl.load(exports + i_slot // H, mask=write & (size % BT == 0), other=-1).to(tl.int64)
            if target >= 0:
                tl.store(ht + target * stride_ss + i_head + o_pool, b_s.to(ht.dtype.element_ty), mask=m_s)
        if POOL:
            tl.store(ht + slot * stride_ss + i_head + o_pool, b_s.to(ht.dtype.element_ty), mask=m_s & write)
        elif write:
            i_final = (i_n if FINAL == 1 else i_s).to(tl.int64) * H + i_h
            tl.store(ht + i_final * K * V + o_s, b_s, mask=m_s)
    if GOES_ON:
        if GATE > 0 or not GAMMA:
            b_total = b_sum / LOG if GATE == 2 else b_sum1 + b_gamma / LOG * size
            store_total(total, i_s, i_h, i_v, b_total, H, K, BK, GATE)
    elif FINAL == 2 and i_v == 0:
        i_total = i_s.to(tl.int64) * H + i_h
        if GATE == 1:
            tl.store(total + i_total, b_sum1 * LOG)
        if GATE == 2:
            tl.store(total + i_total * K + o_k, b_sum, mask=o_k < K)
    if OVERLAP // 2 % 2 == 1:
        gdc_wait()


@triton.jit(do_not_specialize=["N"])
def combine_kernel(
    local, total, gamma, h0, cu_seqlens, slots, has_initial, left, plan, stride_gamma_b, T, N, L, P, R, stride_left,
    starts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, GAMMA: tl.constexpr, EXACT: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    INIT: tl.constexpr, POOL: tl.constexpr, MAY_START: tl.constexpr,
    stride_ss: tl.constexpr, stride_sh: tl.constexpr, stride_sk: tl.constexpr, stride_sv: tl.constexpr,
    GOES_ON: tl.constexpr, COPIES: tl.constexpr, LOCAL: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Each segment's incoming state ``[slots, H, K, V]``, walking a sequence's pieces, from their own states.

    GOES_ON: R devices share each sequence, and T pieces are of the stretch that is here; L is 1. ``plan`` are four
    numbers, of which the third says whether the sequence begins in this stretch, and the fourth how many stretches are
    before it. COPIES: what the stretch leaves, so many times: its state ``[N, H, K, V]`` from zeros, or from h0 if the
    sequence begins in it, and the sum of its gates ``[N, H, K or 1]``. No COPIES: ``left`` is what all stretches leave,
    from left to right, and h0 is for the first of them. LOCAL: there are pieces.
    """
    in_turn(OVERLAP)
    NK: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % NK
    i_h = (tl.program_id(0) // NK) % H
    i_n = tl.program_id(0) // (NK * H)
    _, begin, length, _ = locate(cu_seqlens, i_n, T, N, L, PACKED, False, 1)
    i_b = 0 if PACKED else i_n.to(tl.int64)
    n_s = tl.maximum(tl.cdiv(length, L * P), 1).to(tl.int32)
    n_g = tl.cdiv(length, L).to(tl.int32)
    segment0 = (begin // (L * P) + i_n) if PACKED else i_b * n_s
    piece0 = (begin // L + i_n) if PACKED else i_b * n_g
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    o_s = o_k[:, None] * V + o_v[None, :]
    if POOL:
        slot = tl.load(slots + i_n).to(tl.int64)
        m_init = m_s & (slot >= 0)
        if MAY_START:
            m_init &= tl.load(has_initial + i_n) != 0
        p_pool = h0 + slot * stride_ss + i_h.to(tl.int64) * stride_sh
        o_pool = o_k[:, None] * stride_sk + o_v[None, :] * stride_sv
        b_s = tl.load(p_pool + o_pool, mask=m_init, other=0.0).to(tl.float32)
    elif INIT:
        m_init = m_s
        if GOES_ON:
            m_init &= (tl.load(plan + 2) != 0) if COPIES > 0 else (tl.load(plan + 3) == 0)
        b_s = tl.load(h0 + (i_n.to(tl.int64) * H + i_h) * K * V + o_s, mask=m_init, other=0.0).to(tl.float32)
    else:
        b_s = tl.zeros([BK, BV], dtype=tl.float32)
    KD: tl.constexpr = K if GATE == 2 else 1
    i_m = i_n.to(tl.int64) * H + i_h
    n_m = i_m * 0 + N * H
    o_d = o_k if GATE == 2 else o_k * 0
    if GOES_ON and COPIES == 0:
        for i in tl.range(tl.load(plan + 3), num_stages=4):
            p_left = left + (i_m * 0 + ((R - 1 - i) if REVERSE else i)) * stride_left
            b_all = tl.load(p_left + n_m * (K * V) + i_m * KD + o_d, mask=o_k < K, other=0.0)  # [BK]
            b_local = tl.load(p_left + i_m * (K * V) + o_s, mask=m_s, other=0.0)  # [BK, BV]
            b_s = join(b_s, power(b_all, True)[:, None], b_local)
    b_gamma = 0.0
    if GAMMA and GATE < 2:
        b_gamma = load_gamma(gamma, i_b, i_h, stride_gamma_b, EXACT)
    b_sum = tl.zeros([BK], dtype=tl.float32)
    # All pieces but those of the segment that is walked last: the segment, and the piece's place in it.
    i_s = (n_s - 1) if REVERSE else 0
    i_p = (n_g - 1 - i_s * P) if REVERSE else 0
    if LOCAL:
        # Nobody continues from the last segment, unless that is elsewhere.
        n = n_g if COPIES > 0 else (n_g - P) if REVERSE else (n_s - 1) * P
        # A step is short: what it waits for costs more than what it does.
        for i in tl.range(n, num_stages=4, loop_unroll_factor=4):
            i_g = (n_g - 1 - i) if REVERSE else i
            if COPIES == 0:
                enters = (i == 0) | (i_p == (P - 1 if REVERSE else 0))
                tl.store(starts + ((segment0 + i_s) * H + i_h) * K * V + o_s, b_s, mask=m_s & enters)
            i_slot = (piece0 + i_g) * H + i_h
            m_l = m_s
            if GOES_ON:
                b_all = tl.load(total + i_slot * KD + o_d, mask=o_k < K, other=0.0)  # [BK]
                m_l = m_s & (tl.abs(b_all) < EMPTY)[:, None]
                b_all = tl.where(b_all < EMPTY, b_all, 0.0)
                b_sum += b_all
                b_decay = power(b_all, True)[:, None]
            elif GATE == 2:
                b_decay = power(tl.load(total + i_slot * K + o_k, mask=o_k < K, other=0.0), EXACT)[:, None]
            else:
                b_all = b_gamma * tl.minimum(length - i_g * L, L).to(tl.float32)
                if GATE == 1:
                    b_all += tl.load(total + i_slot)
                else:
                    m_l = m_s & (reach(b_gamma, i_p, L, P, REVERSE, EXACT) >= 0)
                b_decay = power(b_all, EXACT)
            b_s = join(b_s, b_decay, tl.load(local + i_slot * K * V + o_s, mask=m_l, other=0.0))
            i_p += -1 if REVERSE else 1
            over = (i_p < 0) if REVERSE else (i_p == P)
            i_s += tl.where(over, -1 if REVERSE else 1, 0)
            i_p = tl.where(over, P - 1 if REVERSE else 0, i_p)
    if COPIES > 0:
        # Nothing older passes a beginning.
        b_sum = tl.where(tl.load(plan + 2) != 0, FORGOTTEN, b_sum)
        for _ in tl.static_range(COPIES):
            tl.store(starts + i_m * (K * V) + o_s, b_s, mask=m_s)
            tl.store(starts + n_m * (K * V) + i_m * KD + o_d, b_sum, mask=(o_k < K) if GATE == 2 else (o_k == 0))
            starts += n_m * (K * V + KD)
    else:
        i_last = 0 if REVERSE else n_s - 1
        tl.store(starts + ((segment0 + i_last) * H + i_h) * K * V + o_s, b_s, mask=m_s)
