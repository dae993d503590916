"""The walk of gradients with gates per token and dimension of the key, with the gradient of the state in registers.

It is the walk of ``adjoint.py`` with the factors of ``dimensions_walk.py``. With D the gradient of the state after a
chunk, and N and P without beta:

    dU = P^T dO + (K o exp2(G_C - G)) D                what is read of the chunk's U = beta E
    Z = dU + N^T beta dU                               the gradient of U, as E's other tokens read it, too
    D' = exp2(G_C) o D + (scale Q o exp2(G))^T dO - (beta K o exp2(G))^T Z

Where keys are alike, N, P, Z and both products of keys have two parts, and a chunk takes the tiles of the next stage,
too.

A warpgroup has 64 of the values' dimensions; two are one partition. One more makes the three products of queries, keys
and gates, in shared memory, a warp copies.
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

from keraunos.kernels.device.hopper import LOG2E, describe, first_slot, load_state, locate, store_state, wide
from keraunos.kernels.gated_delta_rule.cuda.adjoint import place
from keraunos.kernels.gated_delta_rule.cuda.dimensions import IS_FINE
from keraunos.kernels.gated_delta_rule.cuda.dimensions_walk import (
    BLOCKS,
    PART,
    TOKENS,
    flat,
    in_blocks,
    load_blocks,
    sums_from,
    within_blocks,
)
from keraunos.kernels.gluon import copy_in, copy_out, lengths, reinterpret, thread_barrier


@gluon.jit
def copy(tiles, barriers, descriptors, alike, size, first_value, H: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
         REVERSE: gl.constexpr):
    """A partition of one warp: copies chunks into the ring of stages.

    Gates come to where ``work_in`` puts what it makes of them; the rest of N and P, where it counts, to the next stage.
    """
    q_s, k_s, _, g_s, do_s, n_s, p_s = tiles
    full, _, empty = barriers
    q_desc, k_desc, g_desc, o_desc, n_desc, p_desc = descriptors
    SQUARES: gl.constexpr = 2 * n_desc.block_type.nbytes
    BYTES: gl.constexpr = 3 * k_desc.block_type.nbytes + o_desc.block_type.nbytes + SQUARES
    count = gl.cdiv(size, C)
    held = size < 0
    for i in range(count):
        slot = i % STAGES
        at = place(i, count, REVERSE)
        fine = gl.load(alike + at * H) == IS_FINE
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        if (i > 0) & (fine | held):
            # A chunk in two parts has two stages to itself.
            mbarrier.wait(empty.index((i - 1) % STAGES), ((i - 1) // STAGES) & 1)
        arrived = full.index(slot)
        if fine:
            more = (i + 1) % STAGES
            mbarrier.expect(arrived, BYTES + SQUARES)
            copy_in(n_desc, [at * H * 2 * C + C, 0], arrived, n_s.index(more))
            copy_in(p_desc, [at * H * 2 * C + C, 0], arrived, p_s.index(more))
        else:
            mbarrier.expect(arrived, BYTES)
        copy_in(g_desc, [at * C, 0], arrived, g_s.index(slot))
        copy_in(k_desc, [at * C, 0], arrived, k_s.index(slot))
        copy_in(q_desc, [at * C, 0], arrived, q_s.index(slot))
        copy_in(o_desc, [at * C, first_value], arrived, do_s.index(slot))
        copy_in(p_desc, [at * H * 2 * C, 0], arrived, p_s.index(slot))
        copy_in(n_desc, [at * H * 2 * C, 0], arrived, n_s.index(slot))
        held = fine


@gluon.jit
def work_in(tiles, vectors, barriers, inputs, size, scale, H: gl.constexpr, C: gl.constexpr, BK: gl.constexpr,
            STAGES: gl.constexpr, REVERSE: gl.constexpr, BETA: gl.constexpr, NORM: gl.constexpr):
    """A partition of one warpgroup: the three products of each chunk, of queries and keys as long as they are to be.

    These are ``scale Q o exp2(G)``, ``K o exp2(G_C - G)`` and ``-beta K o exp2(G)``; where keys are alike, what 16 bits
    leave of the last two goes to the next stage. For each stage also ``exp2(G_C)``; beta; and whether keys are alike.
    """
    q_s, k_s, x_s, g_s, _, _, _ = tiles
    sums_s, factors_s, decay_s, strength_s, alike_s = vectors
    full, ready, _ = barriers
    beta, stride_beta, alike, norms = inputs
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    OF_TOKENS: gl.constexpr = gl.SliceLayout(1, TOKENS)
    dtype: gl.constexpr = k_s.dtype
    t = gl.arange(0, C, layout=EACH)
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        more = (i + 1) % STAGES
        at = place(i, count, REVERSE)
        strength = gl.full([C], 1.0, gl.float32, EACH)
        if BETA:
            p_beta = beta + (at * C + t).to(gl.int64) * stride_beta
            strength = gl.load(p_beta, mask=t < size - at * C, other=0.0).to(gl.float32)
        if NORM:
            of_queries = gl.load(norms + at * (H * 2 * C) + t)
            of_keys = gl.load(norms + at * (H * 2 * C) + C + t)
        fine = (gl.load(alike + at * H) == IS_FINE).to(gl.int32)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        alike_s.index(slot).store(gl.full([1], 1, gl.int32, EACH) * fine)
        if BETA:
            strength_s.index(slot).store(strength)
        if NORM:
            factors_s.index(0).store(of_queries)
            factors_s.index(1).store(of_keys)
        for part in gl.static_range(BK // PART):
            x = in_blocks(g_s.index(slot).slice(part * PART, PART, 1).load(TOKENS))
            sums_s.index(part).store(gl.sum(x, 1))
            blocks = load_blocks(sums_s.index(part))
            total = gl.sum(blocks, 0) * LOG2E
            decay_s.index(slot).slice(part * PART, PART).store(gl.exp2(total))
            G = within_blocks(x, REVERSE) * LOG2E + sums_from(blocks, BLOCKS, 0, REVERSE)
            total = gl.convert_layout(total, gl.SliceLayout(0, gl.SliceLayout(1, G.type.layout)))
            q_c = q_s.index(slot).slice(part * PART, PART, 1)
            k_c = k_s.index(slot).slice(part * PART, PART, 1)
            late = wide(k_c.load(TOKENS)) * gl.exp2(flat(total[None, None, :] - G))
            if NORM:
                late *= factors_s.index(1).load(OF_TOKENS)[:, None]
            x_s.index(slot).slice(part * PART, PART, 1).store(late.to(dtype))
            if fine != 0:
                x_s.index(more).slice(part * PART, PART, 1).store((late - wide(late.to(dtype))).to(dtype))
            to = gl.exp2(flat(G))
            query = wide(q_c.load(TOKENS)) * to * scale
            if NORM:
                query *= factors_s.index(0).load(OF_TOKENS)[:, None]
            q_c.store(query.to(dtype))
            # Keys are loaded once more: registers are few.
            enter = -wide(k_c.load(TOKENS)) * to
            if BETA:
                enter *= strength_s.index(slot).load(OF_TOKENS)[:, None]
            if NORM:
                enter *= factors_s.index(1).load(OF_TOKENS)[:, None]
            k_c.store(enter.to(dtype))
            if fine != 0:
                k_s.index(more).slice(part * PART, PART, 1).store((enter - wide(enter.to(dtype))).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def multiply(tiles, vectors, barriers, goals, ends, size, last, first_value, C: gl.constexpr, K: gl.constexpr,
             V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, OWN: gl.constexpr, STAGES: gl.constexpr,
             REVERSE: gl.constexpr, BETA: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr):
    """A partition of a warpgroup for each 64 of the values' dimensions, for which it has the state's gradient.

    first_value: the program's first dimension of values, of which it has OWN; BV: those of all programs.
    """
    q_s, k_s, x_s, _, do_s, n_s, p_s = tiles
    _, _, decay_s, strength_s, alike_s = vectors
    _, ready, empty = barriers
    z_s, z_desc, d_s, d_desc = goals
    dht, dh0 = ends
    WARPS: gl.constexpr = OWN // 16
    # A chunk's tokens are columns; so are the dimensions of keys of a state.
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    WS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BK, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, WS, 2)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, W)
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    dtype: gl.constexpr = k_s.dtype
    o_v = first_value + gl.arange(0, OWN, layout=gl.SliceLayout(1, WS))
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(0, WS))
    o_state = o_v[:, None] + (o_k * V)[None, :]
    none = gl.zeros([OWN, C], gl.float32, W)
    state = gl.zeros([OWN, BK], gl.float32, WS)
    if INIT:
        state = load_state(dht + o_state, o_v, o_k, V, K, BV, BK)
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        more = (i + 1) % STAGES
        at = place(i, count, REVERSE)
        do = do_s.index(slot).permute((1, 0))
        b_state = state.to(dtype)
        # Who arrives there has waited for the copies.
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        left = gl.convert_layout(b_state, LEFT)
        u = warpgroup_mma(left, x_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        u = warpgroup_mma(do, p_s.index(slot), u, is_async=True)
        d_s.reshape((OWN, BK)).store(b_state)
        fence_async_shared()
        thread_barrier()
        copy_out(d_desc, [at, first_value, 0], d_s)
        fine = gl.max(alike_s.index(slot).load(FLAG), 0) != 0
        u = warpgroup_mma_wait(0, deps=[u])
        if fine:
            u = warpgroup_mma(do, p_s.index(more), u)
            u = warpgroup_mma(left, x_s.index(more).permute((1, 0)), u)
        w = u * strength_s.index(slot).load(OF_TOKENS)[None, :] if BETA else u
        left = gl.convert_layout(w.to(dtype), LEFT)
        if fine:
            rest = gl.convert_layout((w - wide(w.to(dtype))).to(dtype), LEFT)
            u = warpgroup_mma(left, n_s.index(more), u)
            u = warpgroup_mma(rest, n_s.index(slot), u)
        z = warpgroup_mma(left, n_s.index(slot), u, is_async=True)
        state = state * decay_s.index(slot).load(gl.SliceLayout(0, WS))[None, :]
        state = warpgroup_mma(do, q_s.index(slot), state, is_async=True)
        z = warpgroup_mma_wait(1, deps=[z])
        high = z.to(dtype)
        state = warpgroup_mma(gl.convert_layout(high, LEFT_S), k_s.index(slot), state, is_async=True)
        tma.store_wait(0)
        z_s.permute((1, 0)).store(high)
        state = warpgroup_mma_wait(0, deps=[state])
        if fine:
            rest = gl.convert_layout((z - wide(high)).to(dtype), LEFT_S)
            state = warpgroup_mma(gl.convert_layout(high, LEFT_S), k_s.index(more), state)
            state = warpgroup_mma(rest, k_s.index(slot), state)
        fence_async_shared()
        thread_barrier()
        # Copies out go before those into what becomes free.
        copy_out(z_desc, [at * C, first_value], z_s)
        mbarrier.arrive(empty.index(slot), count=1)
    tma.store_wait(0)
    if FINAL:
        store_state(dh0 + o_state, state.to(dh0.dtype.element_ty), last, o_v, o_k, V, K, BV, BK)


@gluon.jit(do_not_specialize=lengths("qkogb", "T"))
def adjoint_dimensions_kernel(
    q, k, do, g, beta, near, pairs, alike, norms, dht, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_ob, stride_ot, stride_oh,
    stride_gb, stride_gt, stride_gh, stride_bb, stride_bt, stride_bh, scale, T,
    du, dh0, dstates,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SHARES: gl.constexpr,
):
    """``du`` ``[B, T, H, V]``, Z, and ``dh0``.

    SHARES programs have one head of one sequence: each has as many of the values' dimensions, which need no others.

    ``dstates`` ``[slots, H, V, K]``: the gradients of the states after each chunk.

    near, pairs, alike, norms: see ``prepare_dimensions_kernel``. dht: gradients of final states, None: zeros; dh0:
    those of initial ones. beta None: ones. K, V, BK, BV, RQ, RK, RG, RB: see ``walk_dimensions_kernel``; STAGES: 2 or
    more.
    """
    i_h = gl.program_id(0) // SHARES % H
    i_o = gl.program_id(0) // (SHARES * H)
    OWN: gl.constexpr = BV // SHARES
    first_value = gl.program_id(0) % SHARES * OWN
    i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, T, PACKED, False, REVERSE)
    dtype: gl.constexpr = k.dtype.element_ty
    g_dtype: gl.constexpr = g.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    GATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], g_dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, OWN], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, OWN, BK], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    VECTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    INIT: gl.constexpr = dht is not None
    FINAL: gl.constexpr = dh0 is not None
    BETA: gl.constexpr = beta is not None
    NORM: gl.constexpr = norms is not None

    first = first_slot(i_n, token, size, T, C, PACKED) * H + i_h
    chunks = gl.maximum(gl.cdiv(size, C), 1)
    rows = ((chunks - 1) * H + 1) * (2 * C)
    q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, TILE)
    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, TILE)
    g_desc = describe(g, i_b, token, i_h // RG, size, stride_gb, stride_gt, stride_gh, C, K, BK, GATES)
    o_desc = describe(do, i_b, token, i_h, size, stride_ob, stride_ot, stride_oh, C, V, OWN, VALUES)
    z_desc = describe(du, i_b, token, i_h, size, T.to(gl.int64) * (H * V), H * V, V, C, V, OWN, VALUES)
    n_desc = tma.make_tensor_descriptor(near + first * (2 * C * C), [rows, C], [C, 1], [C, C], SQUARE)
    p_desc = tma.make_tensor_descriptor(pairs + first * (2 * C * C), [rows, C], [C, 1], [C, C], SQUARE)
    d_desc = tma.make_tensor_descriptor(dstates + first * (V * K), [chunks, V, K], [H * V * K, K, 1], [1, OWN, BK],
                                        STATE)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], TILE)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], TILE)
    x_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], TILE)
    g_s = reinterpret(x_s, g_dtype, [STAGES, C, BK], GATES)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, C, OWN], VALUES)
    n_s = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
    p_s = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
    z_s = gl.allocate_shared_memory(dtype, [C, OWN], VALUES)
    d_s = gl.allocate_shared_memory(dtype, [1, OWN, BK], STATE)
    sums_s = gl.allocate_shared_memory(gl.float32, [BK // PART, BLOCKS, PART], VECTORS)
    factors_s = gl.allocate_shared_memory(gl.float32, [2, C], VECTOR)
    decay_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
    strength_s = gl.allocate_shared_memory(gl.float32, [STAGES, C], VECTOR)
    alike_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()

    # Something else stands for what is absent, and nobody reads it.
    p_dht = k
    p_dh0 = k
    p_beta = k
    p_norms = near
    if INIT:
        p_dht = dht + (i_n.to(gl.int64) * H + i_h) * K * V
    if FINAL:
        p_dh0 = dh0 + (i_n.to(gl.int64) * H + i_h) * K * V
    if BETA:
        p_beta = beta + i_b.to(gl.int64) * stride_bb + token * stride_bt + (i_h // RB).to(gl.int64) * stride_bh
    if NORM:
        p_norms = norms + first * (2 * C)
    p_alike = alike + first
    tiles = (q_s, k_s, x_s, g_s, do_s, n_s, p_s)
    vectors = (sums_s, factors_s, decay_s, strength_s, alike_s)
    barriers = (full, ready, empty)
    descriptors = (q_desc, k_desc, g_desc, o_desc, n_desc, p_desc)
    inputs = (p_beta, stride_bt, p_alike, p_norms)
    goals = (z_s, z_desc, d_s, d_desc)
    ends = (p_dht, p_dh0)
    gl.warp_specialize(
        [
            (work_in, (tiles, vectors, barriers, inputs, size, scale, H, C, BK, STAGES, REVERSE, BETA, NORM)),
            (multiply, (tiles, vectors, barriers, goals, ends, size, last, first_value, C, K, V, BK, BV, OWN, STAGES,
                        REVERSE, BETA, INIT, FINAL)),
            (copy, (tiles, barriers, descriptors, p_alike, size, first_value, H, C, STAGES, REVERSE)),
        ],
        [8 if OWN == 128 else 4, 1],
        [192 if OWN == 128 else 200, 24],
    )
