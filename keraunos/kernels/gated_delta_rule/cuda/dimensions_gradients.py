"""The gradients with gates per token and dimension of the key, chunk by chunk, from what the walks have left.

With S the state before a chunk, D the gradient of the state after it, E the errors that tokens correct, Z the gradients
of these, ``G_i`` for each dimension the sum of gates up to and with token i, base 2, and H half of ``G_C``:

    W_ij = scale dO_i . E_j                 j before i
    X_ij = -beta_i Z_i . E_j                j before i
    Q'_i = scale exp2(H) o (S dO_i) + sum_j W_ij beta_j exp2(H - G_j) o k_j
    K'_i = -beta_i exp2(H) o (S Z_i) + sum_j X_ij beta_j exp2(H - G_j) o k_j
    R'_j = exp2(H) o (D E_j) + sum_i W_ij exp2(G_i - H) o q_i + sum_i X_ij exp2(G_i - H) o k_i
    dQ_i = exp2(G_i - H) o Q'_i;  dK_i = exp2(G_i - H) o K'_i + beta_i exp2(H - G_i) o R'_i
    dV = beta Z;  dbeta_i = E_i . Z_i

and, for a token's pair with itself, which has no gate, ``scale beta_i dO_i . E_i`` times the key in dQ and the query in
dK. The gradient of ``G_i`` is ``q dQ + k dK`` of what token i reads less ``k dK`` of what others read of it, where both
have the same rounded factors: so what begins and ends within a chunk cancels. A gate's gradient is the sum of those
from its token on, and of what goes through the whole chunk.

Dimensions of keys are rows here, and tokens columns, so that factors are left operands, in registers. This is for
chunks that were never left, see ``prepare_dimensions_kernel``: their factors have enough of the dtype's exponents.

A warpgroup has 64 of the keys' dimensions; two are one partition. One more makes W, X, dV and dbeta, a warp copies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from keraunos.kernels.device.hopper import LOG2E, anew, describe, first_slot, now, wide, within
from keraunos.kernels.gated_delta_rule.cuda.parts import locate_group
from keraunos.kernels.gluon import copy_in, copy_out, lengths, thread_barrier

# Chunks at a time of which there are vectors.
TURNS = gl.constexpr(2)
# Rows of a tile that the warpgroup of pairs reads at a time.
ROWS = gl.constexpr(32)


@gluon.jit
def copy(tiles, barriers, descriptors, alike, begin, end, H: gl.constexpr, C: gl.constexpr):
    """A partition of one warp: copies chunks, queries and keys once the gradients in their tiles are copied out."""
    q_s, k_s, g_s, o_s, e_s, z_s, s_s, d_s = tiles
    full, empty, k_full, k_empty, _, _, _, _ = barriers
    q_desc, k_desc, g_desc, o_desc, e_desc, z_desc, s_desc, d_desc = descriptors
    BYTES: gl.constexpr = 3 * o_desc.block_type.nbytes + 2 * s_desc.block_type.nbytes + g_desc.block_type.nbytes
    n = begin * 0
    for at in range(begin, end):
        if gl.load(alike + at * H) == 0:
            phase = (n & 1) ^ 1
            mbarrier.wait(empty, phase)
            mbarrier.expect(full, BYTES)
            copy_in(e_desc, [at * C, 0], full, e_s)
            copy_in(o_desc, [at * C, 0], full, o_s)
            copy_in(z_desc, [at * C, 0], full, z_s)
            copy_in(g_desc, [at * C, 0], full, g_s)
            copy_in(s_desc, [at, 0, 0], full, s_s)
            copy_in(d_desc, [at, 0, 0], full, d_s)
            mbarrier.wait(k_empty, phase)
            mbarrier.expect(k_full, 2 * k_desc.block_type.nbytes)
            copy_in(q_desc, [at * C, 0], k_full, q_s)
            copy_in(k_desc, [at * C, 0], k_full, k_s)
            n += 1


@gluon.jit
def pair(tiles, squares, vectors, barriers, inputs, outputs, alike, size, begin, end, scale, H: gl.constexpr,
         C: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, REVERSE: gl.constexpr,
         BETA: gl.constexpr, NORM: gl.constexpr):
    """A partition of one warpgroup: W and X of each chunk, dV and dbeta, and sums over S D for each row.

    For each turn also beta, ``scale beta_i dO_i . E_i``, and one over lengths of queries and keys.
    """
    _, _, _, o_s, e_s, z_s, s_s, d_s = tiles
    w_s, x_s = squares
    factors_s, across_s = vectors
    full, empty, _, _, f_full, w_full, w_empty, a_full = barriers
    beta, stride_beta, norms = inputs
    dv, dbeta = outputs
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, W)
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    OF_VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
    OF_STATES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = w_s.dtype
    t = gl.arange(0, C, layout=EACH)
    rows = gl.arange(0, C, layout=OF_ROWS)
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))[None, :]
    none = gl.zeros([C, C], gl.float32, W)
    n = begin * 0
    for at in range(begin, end):
        if gl.load(alike + at * H) == 0:
            turn = n % TURNS
            of = turn * 4
            strength = gl.full([C], 1.0, gl.float32, EACH)
            if BETA:
                p_beta = beta + (at * C + t).to(gl.int64) * stride_beta
                strength = gl.load(p_beta, mask=t < size - at * C, other=0.0).to(gl.float32)
            factors_s.index(of).store(strength)
            if NORM:
                for i in gl.static_range(2):
                    factors_s.index(of + 2 + i).store(gl.load(norms + at * (H * 2 * C) + i * C + t))
            thread_barrier()
            mbarrier.arrive(f_full.index(turn), count=1)
            mbarrier.wait(full, n & 1)
            w = warpgroup_mma(o_s, e_s.permute((1, 0)), none, use_acc=False, is_async=True)
            w = warpgroup_mma_wait(0, deps=[w])
            before = (columns > rows[:, None]) if REVERSE else (columns < rows[:, None])
            own = gl.sum(gl.where(rows[:, None] == columns, w, 0.0), 1) * scale
            b_w = now(gl.where(before, w * scale, 0.0).to(dtype))
            x = warpgroup_mma(z_s, e_s.permute((1, 0)), none, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(0, deps=[x])
            strength = factors_s.index(of).load(OF_ROWS)
            if BETA:
                d_strength = gl.sum(gl.where(rows[:, None] == columns, x, 0.0), 1).to(dbeta.dtype.element_ty)
                gl.store(dbeta + (at * C).to(gl.int64) * H + rows * H, d_strength, mask=rows < size - at * C)
            b_x = now(gl.where(before, x * -strength[:, None], 0.0).to(dtype))
            mbarrier.wait(w_empty, (n & 1) ^ 1)
            factors_s.index(of + 1).store(own * strength)
            w_s.store(b_w)
            x_s.store(b_x)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(w_full, count=1)
            for part in gl.static_range(C // ROWS):
                z = wide(z_s.slice(part * ROWS, ROWS, 0).load(OF_VALUES))
                z *= factors_s.index(of).slice(part * ROWS, ROWS).load(gl.SliceLayout(1, OF_VALUES))[:, None]
                o_t = part * ROWS + anew(n) + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF_VALUES))
                o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, OF_VALUES))[None, :]
                gl.store(dv + (at * C).to(gl.int64) * (H * V) + ((o_t * (H * V))[:, None] + o_v),
                         z.to(dv.dtype.element_ty), mask=within((o_t < size - at * C)[:, None], o_v, V, BV))
            across = gl.zeros([ROWS, BK], gl.float32, OF_STATES)
            for part in gl.static_range(BV // ROWS):
                s = wide(s_s.reshape((BV, BK)).slice(part * ROWS, ROWS, 0).load(OF_STATES))
                across += s * wide(d_s.reshape((BV, BK)).slice(part * ROWS, ROWS, 0).load(OF_STATES))
            across_s.index(turn).store(gl.sum(across, 0))
            thread_barrier()
            mbarrier.arrive(empty, count=1)
            mbarrier.arrive(a_full.index(turn), count=1)
            n += 1


@gluon.jit
def after(x, y, zero):
    """x, but no sooner than y is known: what is made of it takes no registers before. ``zero``: see ``anew``."""
    bits = x.to(gl.int32, bitcast=True) ^ (y.to(gl.int32, bitcast=True) & zero)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def gather(tiles, squares, vectors, sums, barriers, goals, alike, size, begin, end, scale, H: gl.constexpr,
           C: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, REVERSE: gl.constexpr,
           NORM: gl.constexpr, NEED_G: gl.constexpr, COPY_Q: gl.constexpr, COPY_K: gl.constexpr):
    """A partition of a warpgroup for each 64 of the keys' dimensions: dQ, dK and the gates' gradients."""
    q_s, k_s, g_s, o_s, e_s, z_s, s_s, d_s = tiles
    w_s, x_s = squares
    factors_s, across_s = vectors
    u_s, ones_s, y_s = sums
    full, empty, k_full, k_empty, f_full, w_full, w_empty, a_full = barriers
    dq, dk, dg = goals
    WARPS: gl.constexpr = BK // 16
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, W)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, W)
    dtype: gl.constexpr = k_s.dtype
    o_k = gl.arange(0, BK, layout=OF_ROWS)
    o_t = gl.arange(0, C, layout=OF_TOKENS)
    none = gl.zeros([BK, C], gl.float32, W)
    n = begin * 0
    ahead = gl.load(alike + begin * H)
    for at in range(begin, end):
        usual = ahead == 0
        ahead = gl.load(alike + gl.minimum(at + 1, end - 1) * H)
        if usual:
            phase = n & 1
            turn = n % TURNS
            of = turn * 4
            state = s_s.reshape((BV, BK)).permute((1, 0))
            mbarrier.wait(full, phase)
            x = warpgroup_mma(g_s.permute((1, 0)), u_s, none, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(0, deps=[x])
            half = gl.sum(gl.where(o_t[None, :] == (0 if REVERSE else C - 1), x, 0.0), 1) * (0.5 * LOG2E)
            x = x * LOG2E - half[:, None]
            mbarrier.wait(f_full.index(turn), (n // TURNS) & 1)
            mbarrier.wait(k_full, phase)
            key = wide(k_s.permute((1, 0)).load(W))
            if NORM:
                key *= factors_s.index(of + 3).load(OF_TOKENS)[None, :]
            late = gl.exp2(x)
            k_s.permute((1, 0)).store((key * late).to(dtype))
            y_s.permute((1, 0)).store((key * (gl.exp2(-x) * factors_s.index(of).load(OF_TOKENS)[None, :])).to(dtype))
            query = wide(q_s.permute((1, 0)).load(W))
            if NORM:
                query *= factors_s.index(of + 2).load(OF_TOKENS)[None, :]
            q_s.permute((1, 0)).store((query * late).to(dtype))
            a = warpgroup_mma(state, o_s.permute((1, 0)), none, use_acc=False, is_async=True)
            b = warpgroup_mma(state, z_s.permute((1, 0)), none, use_acc=False, is_async=True)
            r = warpgroup_mma(d_s.reshape((BV, BK)).permute((1, 0)), e_s.permute((1, 0)), none, use_acc=False,
                              is_async=True)
            a, b, r = warpgroup_mma_wait(0, deps=[a, b, r])
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(empty, count=1)
            through = gl.exp2(half)
            a = a * (through * scale)[:, None]
            b = b * (through[:, None] * -factors_s.index(of).load(OF_TOKENS)[None, :])
            r = r * through[:, None]
            early = y_s.permute((1, 0))
            across = gl.sum(wide(early.load(W)) * r, 1)
            mbarrier.wait(w_full, phase)
            a = warpgroup_mma(early, w_s.permute((1, 0)), a, is_async=True)
            b = warpgroup_mma(early, x_s.permute((1, 0)), b, is_async=True)
            r = warpgroup_mma(q_s.permute((1, 0)), w_s, r, is_async=True)
            r = warpgroup_mma(k_s.permute((1, 0)), x_s, r, is_async=True)
            a, b, r = warpgroup_mma_wait(0, deps=[a, b, r])
            key = wide(k_s.permute((1, 0)).load(W))
            query = wide(q_s.permute((1, 0)).load(W))
            d_sum = query * a + key * b - wide(early.load(W)) * r
            own = factors_s.index(of + 1).load(OF_TOKENS)[None, :]
            x = after(x, r, anew(n))
            late = gl.exp2(x)
            x = gl.exp2(-x)
            a = a * late + x * (own * key)
            b = b * late + x * (r * factors_s.index(of).load(OF_TOKENS)[None, :] + own * query)
            inside = within((o_t < size - at * C)[None, :], o_k[:, None], K, BK)
            row = (at * C).to(gl.int64) * (H * K)
            place = ((o_t + anew(n)) * (H * K))[None, :] + o_k[:, None]
            thread_barrier()
            if COPY_Q:
                q_s.permute((1, 0)).store(a.to(dtype))
            else:
                gl.store(dq + row + place, a, mask=inside)
            if COPY_K:
                k_s.permute((1, 0)).store(b.to(dtype))
            else:
                gl.store(dk + row + place, b, mask=inside)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(w_empty, count=1)
            if COPY_Q:
                copy_out(dq, [at * C, 0], q_s)
            if COPY_K:
                copy_out(dk, [at * C, 0], k_s)
            if NEED_G:
                mbarrier.wait(a_full.index(turn), (n // TURNS) & 1)
                across += across_s.index(turn).load(OF_ROWS) * (through * through)
                high = d_sum.to(gl.bfloat16)
                rest = (d_sum - wide(high)).to(gl.bfloat16)
                d = warpgroup_mma(gl.convert_layout(high, LEFT), ones_s.permute((1, 0)), none, use_acc=False,
                                  is_async=True)
                d = warpgroup_mma(gl.convert_layout(rest, LEFT), ones_s.permute((1, 0)), d, is_async=True)
                d = warpgroup_mma_wait(0, deps=[d])
                gl.store(dg + row + place, (d + across[:, None]).to(dg.dtype.element_ty), mask=inside)
            tma.store_wait(0)
            mbarrier.arrive(k_empty, count=1)
            n += 1


@gluon.jit(do_not_specialize=lengths("qkogb", "T", "N", "L"))
def gradients_dimensions_kernel(
    q, k, do, g, beta, errors, du, alike, norms, states, dstates, dq_given, dk_given, dv_given, dg_given, dbeta_given,
    cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_ob, stride_ot, stride_oh,
    stride_gb, stride_gt, stride_gh, stride_bb, stride_bt, stride_bh, scale, T, N, L,
    dq, dk, dv, dg, dbeta,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr,
):
    """The gradients of each head, of chunks where ``alike`` is 0: dq, dk, dg ``[B, T, H, K]``, dv and dbeta.

    The arrays that are given are those that are made. errors, du ``[B, T, H, V]``: E and Z; states, dstates
    ``[slots, H, V, K]``; alike, norms: see ``prepare_dimensions_kernel``. beta None: ones; dg None: not wanted.

    L: tokens of a program. K, V, BK, BV, RQ, RK, RG, RB: see ``walk_dimensions_kernel``.
    """
    i_h = gl.program_id(0) % H
    i_n, i_b, token, size, i_g = locate_group(cu_seqlens, gl.program_id(0) // H, T, N, L, PACKED)
    begin = i_g * (L // C)
    end = gl.minimum(begin + L // C, gl.cdiv(size, C))
    if end <= begin:
        return
    dtype: gl.constexpr = k.dtype.element_ty
    g_dtype: gl.constexpr = g.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    GATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], g_dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, BV, BK], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FILL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BETA: gl.constexpr = beta is not None
    NORM: gl.constexpr = norms is not None
    NEED_G: gl.constexpr = dg is not None
    # Gradients that are still to be summed over heads have digits for it.
    COPY_Q: gl.constexpr = dq.dtype.element_ty == dtype
    COPY_K: gl.constexpr = dk.dtype.element_ty == dtype

    first = first_slot(i_n, token, size, T, C, PACKED) * H + i_h
    row = (i_b.to(gl.int64) * T + token) * H + i_h
    stride_b = T.to(gl.int64) * H
    chunks = gl.cdiv(size, C)
    q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, TILE)
    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, TILE)
    g_desc = describe(g, i_b, token, i_h // RG, size, stride_gb, stride_gt, stride_gh, C, K, BK, GATES)
    o_desc = describe(do, i_b, token, i_h, size, stride_ob, stride_ot, stride_oh, C, V, BV, VALUES)
    e_desc = describe(errors, i_b, token, i_h, size, stride_b * V, H * V, V, C, V, BV, VALUES)
    z_desc = describe(du, i_b, token, i_h, size, stride_b * V, H * V, V, C, V, BV, VALUES)
    s_desc = tma.make_tensor_descriptor(states + first * (V * K), [chunks, V, K], [H * V * K, K, 1], [1, BV, BK], STATE)
    d_desc = tma.make_tensor_descriptor(dstates + first * (V * K), [chunks, V, K], [H * V * K, K, 1], [1, BV, BK],
                                        STATE)
    q_s = gl.allocate_shared_memory(dtype, [C, BK], TILE)
    k_s = gl.allocate_shared_memory(dtype, [C, BK], TILE)
    g_s = gl.allocate_shared_memory(g_dtype, [C, BK], GATES)
    o_s = gl.allocate_shared_memory(dtype, [C, BV], VALUES)
    e_s = gl.allocate_shared_memory(dtype, [C, BV], VALUES)
    z_s = gl.allocate_shared_memory(dtype, [C, BV], VALUES)
    s_s = gl.allocate_shared_memory(dtype, [1, BV, BK], STATE)
    d_s = gl.allocate_shared_memory(dtype, [1, BV, BK], STATE)
    w_s = gl.allocate_shared_memory(dtype, [C, C], SQUARE)
    x_s = gl.allocate_shared_memory(dtype, [C, C], SQUARE)
    y_s = gl.allocate_shared_memory(dtype, [C, BK], TILE)
    # The matrix whose product with gates is G, and the same for sums of its gradients.
    one = gl.arange(0, C, layout=gl.SliceLayout(1, FILL))[:, None]
    other = gl.arange(0, C, layout=gl.SliceLayout(0, FILL))[None, :]
    upto = gl.where((one >= other) if REVERSE else (one <= other), 1.0, 0.0)
    u_s = gl.allocate_shared_memory(g_dtype, [C, C], SQUARE, upto.to(g_dtype))
    ones_s = u_s
    if g_dtype != gl.bfloat16:
        ones_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], SQUARE, upto.to(gl.bfloat16))
    factors_s = gl.allocate_shared_memory(gl.float32, [4 * TURNS, C], VECTOR)
    across_s = gl.allocate_shared_memory(gl.float32, [TURNS, BK], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    f_full = gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER)
    w_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    w_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    a_full = gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER)
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=2)
    mbarrier.init(k_full, count=1)
    mbarrier.init(k_empty, count=1)
    mbarrier.init(w_full, count=1)
    mbarrier.init(w_empty, count=1)
    for i in gl.static_range(TURNS):
        mbarrier.init(f_full.index(i), count=1)
        mbarrier.init(a_full.index(i), count=1)
    fence_async_shared()

    # Something else stands for what is absent, and nobody reads it.
    p_beta = errors
    p_norms = errors
    p_dbeta = errors
    goal_q = errors
    goal_k = errors
    goal_g = errors
    if COPY_Q:  # noqa: SIM108 - two branches, of which one is compiled
        goal_q = describe(dq, i_b, token, i_h, size, stride_b * K, H * K, K, C, K, BK, TILE)
    else:
        goal_q = dq + row * K
    if COPY_K:  # noqa: SIM108 - likewise
        goal_k = describe(dk, i_b, token, i_h, size, stride_b * K, H * K, K, C, K, BK, TILE)
    else:
        goal_k = dk + row * K
    if BETA:
        p_beta = beta + i_b.to(gl.int64) * stride_bb + token * stride_bt + (i_h // RB).to(gl.int64) * stride_bh
        p_dbeta = dbeta + row
    if NORM:
        p_norms = norms + first * (2 * C)
    if NEED_G:
        goal_g = dg + row * K
    p_alike = alike + first
    tiles = (q_s, k_s, g_s, o_s, e_s, z_s, s_s, d_s)
    squares = (w_s, x_s)
    vectors = (factors_s, across_s)
    sums = (u_s, ones_s, y_s)
    barriers = (full, empty, k_full, k_empty, f_full, w_full, w_empty, a_full)
    descriptors = (q_desc, k_desc, g_desc, o_desc, e_desc, z_desc, s_desc, d_desc)
    inputs = (p_beta, stride_bt, p_norms)
    outputs = (dv + row * V, p_dbeta)
    goals = (goal_q, goal_k, goal_g)
    gl.warp_specialize(
        [
            (pair, (tiles, squares, vectors, barriers, inputs, outputs, p_alike, size, begin, end, scale, H, C, V, BK,
                    BV, REVERSE, BETA, NORM)),
            (gather, (tiles, squares, vectors, sums, barriers, goals, p_alike, size, begin, end, scale, H, C, K, BK, BV,
                      REVERSE, NORM, NEED_G, COPY_Q, COPY_K)),
            (copy, (tiles, barriers, descriptors, p_alike, begin, end, H, C)),
        ],
        [8 if BK == 128 else 4, 1],
        [192 if BK == 128 else 216, 24],
    )
