"""The walk of gradients, from the last chunk to the first, with the gradient of the state in registers.

It is kept transposed ``[V, K]``, as the state of ``walk.py``, whose names these are. With D the gradient of the state
after a chunk and P without beta:

    dU = P^T dO + (exp2(G_C - G) K) D       what is read of the chunk's U = beta E
    Z = dU + N^T beta dU                    the gradient of U, as E's other tokens read it, too
    D' = exp2(G_C) D + (scale exp2(G) Q)^T dO - (exp2(G) K)^T beta Z
    L = beta exp2(G_C - G) E D^T            the part of dK that is due to the state after the chunk

``dV = beta Z`` and L go to ``gradients.py``, which makes the other gradients, but for ``dbeta_i = E_i . Z_i``. Where
keys are alike, P, N, dU and Z have two parts.

A warpgroup has 64 of the values' dimensions; two are one partition, which is compiled once. One more makes P and L, a
warp makes what depends on gates alone and dbeta, one copies.
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

from keraunos.kernels.device.hopper import (
    add,
    describe,
    first_slot,
    load_state,
    locate,
    locate_segment,
    store_state,
    wide,
    within,
)
from keraunos.kernels.gated_delta_rule.cuda.parts import EPSILON, of_lanes, of_tokens, of_warps, read, read_known
from keraunos.kernels.gluon import copy_in, copy_out, lengths, reinterpret, thread_barrier


@gluon.jit
def place(i, count, REVERSE: gl.constexpr):
    """Where the i-th chunk of the walk lies among those of its sequence."""
    return i if REVERSE else gl.maximum(count - 1 - i, 0)


@gluon.jit
def copy(tiles, barriers, descriptors, alike, size, H: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
         REVERSE: gl.constexpr, OUTPUT: gl.constexpr):
    """A partition of one warp: copies chunks into the ring of stages, and errors when their tile is free."""
    q_s, k_s, do_s, e_s, t_s, r_s, _, _ = tiles
    full, _, empty, _, e_full, _, e_empty = barriers
    q_desc, k_desc, o_desc, e_desc, t_desc = descriptors
    BYTES: gl.constexpr = 2 * k_desc.block_type.nbytes + o_desc.block_type.nbytes + t_desc.block_type.nbytes
    REST: gl.constexpr = t_desc.block_type.nbytes
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        at = place(i, count, REVERSE)
        fine = gl.load(alike + at * H) != 0
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        arrived = full.index(slot)
        if fine:
            mbarrier.expect(arrived, BYTES + REST)
        else:
            mbarrier.expect(arrived, BYTES)
        copy_in(k_desc, [at * C, 0], arrived, k_s.index(slot))
        copy_in(q_desc, [at * C, 0], arrived, q_s.index(slot))
        copy_in(o_desc, [at * C, 0], arrived, do_s.index(slot))
        copy_in(t_desc, [at * H * 2 * C, 0], arrived, t_s.index(slot))
        if fine:
            copy_in(t_desc, [at * H * 2 * C + C, 0], arrived, r_s.index(slot))
        if OUTPUT:
            mbarrier.wait(e_empty.index(slot), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(e_full.index(slot), e_desc.block_type.nbytes)
            copy_in(e_desc, [at * C, 0], e_full.index(slot), e_s.index(slot))


@gluon.jit
def add_products(begins, state, d_s, d_full, phase, K: gl.constexpr, V: gl.constexpr):
    """Stores the sum of products of a state that the forward walk has left with its gradient, D."""
    BV: gl.constexpr = d_s.shape[0]
    BK: gl.constexpr = d_s.shape[1]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [4, 1], [1, 0])
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, ROWS))
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(0, ROWS))
    inside = within(within(o_v[:, None] >= 0, o_v[:, None], V, BV), o_k[None, :], K, BK)
    # Copied while the walkers make what is waited for.
    b_state = gl.load(state + (o_v * K)[:, None] + o_k[None, :], mask=inside, other=0.0)
    mbarrier.wait(d_full, phase)
    products = wide(b_state) * wide(d_s.load(ROWS))
    gl.store(begins, gl.sum(products.reshape([BV * BK]), 0))


@gluon.jit
def leave(tiles, barriers, late, l_desc, i, at, C: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    """L of the i-th chunk of the walk, in the place of D; ``late``: the factors of its rows."""
    k_s, _, _, e_s, _, _, _, d_s = tiles
    _, _, _, p_empty, e_full, e_read, _ = barriers
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    none = gl.zeros([C, BK], gl.float32, W)
    l_s = reinterpret(d_s, k_s.dtype, [C, BK], l_desc.layout)
    mbarrier.wait(e_full.index(i % STAGES), (i // STAGES) & 1)
    # Walkers leave D and what they need no more of P together.
    mbarrier.wait(p_empty, i & 1)
    x = warpgroup_mma(e_s.index(i % STAGES), d_s, none, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    thread_barrier()
    mbarrier.arrive(e_read, count=1)
    l_s.store((x * gl.convert_layout(late, gl.SliceLayout(1, W))[:, None]).to(k_s.dtype))
    fence_async_shared()
    thread_barrier()
    copy_out(l_desc, [at * C, 0], l_s)
    tma.store_wait(0)


@gluon.jit
def gates(vectors, barriers, inputs, known, dbeta, size, scale, H: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
          REVERSE: gl.constexpr, GATED: gl.constexpr, BETA: gl.constexpr, NORM: gl.constexpr, OUTPUT: gl.constexpr):
    """A partition of one warp: what depends on gates alone, as soon as a stage is free, and dbeta of its former chunk.

    For each stage: ``exp2(G_C - G)`` and ``-beta exp2(G)`` of keys as long as they are, ``scale exp2(G)``, beta, G, and
    ``beta exp2(G_C - G)``, with norms those of keys, too; ``exp2(G_C)``; and whether keys are alike.
    """
    factors_s, scalars_s, parts_s = vectors
    full, _, empty, _, _, _, _ = barriers
    FACTORS: gl.constexpr = 7 if NORM else 6
    EACH: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    t = gl.arange(0, C, layout=EACH)
    count = gl.cdiv(size, C)
    turns = count
    if OUTPUT and BETA:
        turns = gl.where(count > 0, count + STAGES, 0)
    for i in range(turns):
        slot = i % STAGES
        of = slot * FACTORS
        at = place(gl.minimum(i, count - 1), count, REVERSE)
        x, strength = read(inputs, at, size, C, GATED, BETA)
        of_keys, fine = read_known(known, at, H, C, NORM)
        G = gl.associative_scan(x, 0, add, reverse=REVERSE)
        total = gl.sum(x, 0)
        late = gl.exp2(gl.minimum(total - G, 0.0))
        enter = gl.exp2(G)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        if OUTPUT and BETA:  # noqa: SIM102
            if i >= STAGES:
                ended = place(i - STAGES, count, REVERSE) * C
                gl.store(dbeta + (ended + t).to(gl.int64) * H,
                         of_tokens(parts_s.index(slot)).to(dbeta.dtype.element_ty), mask=t < size - ended)
        if i < count:
            factors_s.index(of).store(late * of_keys)
            factors_s.index(of + 1).store(enter * scale)
            factors_s.index(of + 2).store(-enter * strength * of_keys)
            factors_s.index(of + 3).store(strength)
            factors_s.index(of + 4).store(G)
            factors_s.index(of + 5).store(late * strength)
            if NORM:
                factors_s.index(of + 6).store(of_keys)
            scalars_s.index(slot * 2).store(gl.full([1], 1.0, gl.float32, FLAG) * gl.exp2(total))
            scalars_s.index(slot * 2 + 1).store(gl.full([1], 1.0, gl.float32, FLAG) * fine.to(gl.float32))
            thread_barrier()
            mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def pair(tiles, vectors, barriers, l_desc, lefts, size, scale, last, before, H: gl.constexpr, C: gl.constexpr,
         K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
         REVERSE: gl.constexpr, NORM: gl.constexpr, SPLIT: gl.constexpr, NEED_G: gl.constexpr, OUTPUT: gl.constexpr):
    """A partition of one warpgroup: P of each chunk, with norms the factors of queries, L, and ``begins``."""
    q_s, k_s, _, _, _, _, p_s, d_s = tiles
    states, begins = lefts
    factors_s, scalars_s, _ = vectors
    full, ready, empty, p_empty, _, _, _ = barriers
    FACTORS: gl.constexpr = 7 if NORM else 6
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, W)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, W)
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = k_s.dtype
    rows = gl.arange(0, C, layout=OF_ROWS)[:, None]
    columns = gl.arange(0, C, layout=OF_COLUMNS)[None, :]
    seen = (columns >= rows) if REVERSE else (columns <= rows)
    none = gl.zeros([C, C], gl.float32, W)
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        of = slot * FACTORS
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        q = q_s.index(slot)
        if NORM:
            squares = warpgroup_mma(q, q.permute((1, 0)), none, use_acc=False, is_async=True)
            squares = warpgroup_mma_wait(0, deps=[squares])
            of_queries = gl.rsqrt(gl.sum(gl.where(rows == columns, squares, 0.0), 1) + EPSILON)
            factors_s.index(of + 1).store(factors_s.index(of + 1).load(OF_ROWS) * of_queries)
        a = warpgroup_mma(q, k_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        apart = factors_s.index(of + 4).load(OF_ROWS)[:, None] - factors_s.index(of + 4).load(OF_COLUMNS)[None, :]
        reach = gl.exp2(gl.where(seen, apart, -float("inf")))
        a = warpgroup_mma_wait(0, deps=[a])
        if NORM:
            reach *= factors_s.index(of + 6).load(OF_COLUMNS)[None, :]
            a *= (of_queries * scale)[:, None] * reach
        else:
            a *= reach * scale
        fine = gl.max(scalars_s.index(slot * 2 + 1).load(FLAG), 0) != 0
        late = factors_s.index(of + 5).load(OF_ROWS)
        mbarrier.wait(p_empty, (i & 1) ^ 1)
        p_s.index(0).store(a.to(dtype))
        if fine:
            p_s.index(1).store((a - wide(a.to(dtype))).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(ready.index(slot), count=1)
        mbarrier.arrive(empty.index(slot), count=1)
        if NEED_G:
            # D of the i-th chunk of the walk is that of the state after it.
            step = count - i
            within_walk = i > 0
            if SPLIT:
                step += before
                within_walk = within_walk | (last == 0)
            if within_walk & (step % GROUP == 0):
                group = (step // GROUP).to(gl.int64) * H
                add_products(begins + group, states + group * (V * K), d_s, p_empty, i & 1, K, V)
        if OUTPUT:
            leave(tiles, barriers, late, l_desc, i, place(i, count, REVERSE), C, BK, STAGES)


@gluon.jit
def multiply(tiles, vectors, barriers, dv_desc, ends, size, last, before, H: gl.constexpr, C: gl.constexpr,
             K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
             REVERSE: gl.constexpr, BETA: gl.constexpr, NORM: gl.constexpr, INIT: gl.constexpr,
             FINAL: gl.constexpr, SPLIT: gl.constexpr, NEED_G: gl.constexpr, OUTPUT: gl.constexpr):
    """A partition of a warpgroup for each 64 of the values' dimensions, for which it has the state's gradient.

    before: the chunks of the sequence before these; last: whether these are the last ones.
    """
    q_s, k_s, do_s, e_s, t_s, r_s, p_s, d_s = tiles
    factors_s, scalars_s, parts_s = vectors
    full, ready, empty, p_empty, e_full, e_read, e_empty = barriers
    WARPS: gl.constexpr = BV // 16
    dht, h0, dh0, begins = ends
    FACTORS: gl.constexpr = 7 if NORM else 6
    # A chunk's tokens are columns; so are the dimensions of keys of a state.
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    WS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BK, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, WS, 2)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, W)
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    dtype: gl.constexpr = k_s.dtype
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, WS))
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(0, WS))
    o_state = o_v[:, None] + (o_k * V)[None, :]
    none = gl.zeros([BV, C], gl.float32, W)
    state = gl.zeros([BV, BK], gl.float32, WS)
    if INIT:
        if OUTPUT:
            state = load_state(dht + o_state, o_v, o_k, V, K, BV, BK)
        else:
            ends = (o_v < gl.where(last, V, 0))[:, None] & (o_k < K)[None, :]
            state = gl.load(dht + o_state, mask=ends, other=0.0).to(gl.float32)
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        of = slot * FACTORS
        at = place(i, count, REVERSE)
        phase = (i // STAGES) & 1
        mbarrier.wait(full.index(slot), phase)
        k = k_s.index(slot)
        do = do_s.index(slot).permute((1, 0))
        b_state = state.to(dtype)
        u = warpgroup_mma(gl.convert_layout(b_state, LEFT), k.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(ready.index(slot), phase)
        z = warpgroup_mma(do, p_s.index(0), none, use_acc=False, is_async=True)
        if OUTPUT:
            # That of the chunk before, and L there, are no more needed: P is made after them.
            d_s.store(b_state)
            fence_async_shared()
            tma.store_wait(0)
        fine = gl.max(scalars_s.index(slot * 2 + 1).load(FLAG), 0) != 0
        u, z = warpgroup_mma_wait(0, deps=[u, z])
        if fine:
            z = warpgroup_mma(do, p_s.index(1), z)
        thread_barrier()
        mbarrier.arrive(p_empty, count=1)
        if OUTPUT:  # noqa: SIM102
            if i > 0:
                # dV of the chunk before has been copied out.
                mbarrier.arrive(e_empty.index((i - 1) % STAGES), count=1)
        u = u * factors_s.index(of).load(OF_TOKENS)[None, :] + z
        w = u * factors_s.index(of + 3).load(OF_TOKENS)[None, :] if BETA else u
        left = gl.convert_layout(w.to(dtype), LEFT)
        if fine:
            rest = gl.convert_layout((w - wide(w.to(dtype))).to(dtype), LEFT)
            u = warpgroup_mma(left, r_s.index(slot), u)
            u = warpgroup_mma(rest, t_s.index(slot), u)
        z = warpgroup_mma(left, t_s.index(slot), u, is_async=True)
        state = state * gl.max(scalars_s.index(slot * 2).load(FLAG), 0)
        x = wide(do.load(W)) * factors_s.index(of + 1).load(OF_TOKENS)[None, :]
        state = warpgroup_mma(gl.convert_layout(x.to(dtype), LEFT_S), q_s.index(slot), state, is_async=True)
        z = warpgroup_mma_wait(1, deps=[z])
        y = z * factors_s.index(of + 2).load(OF_TOKENS)[None, :]
        state = warpgroup_mma(gl.convert_layout(y.to(dtype), LEFT_S), k, state, is_async=True)
        if OUTPUT:
            # dV takes the place of the errors.
            own_e = e_s.index(slot).permute((1, 0))
            dv = z
            if BETA:
                mbarrier.wait(e_full.index(slot), phase)
                # Each warp has the sums over its own rows.
                parts_s.index(slot).store(of_warps(of_lanes(z * wide(own_e.load(W)))))
                dv = z * factors_s.index(of + 3).load(OF_TOKENS)[None, :]
            mbarrier.wait(e_read, i & 1)
            own_e.store(dv.to(dtype))
        state = warpgroup_mma_wait(0, deps=[state])
        if fine:
            # Made anew: there are no registers to hold it.
            y = z * factors_s.index(of + 2).load(OF_TOKENS)[None, :]
            rest = (y - wide(y.to(dtype))).to(dtype)
            state = warpgroup_mma(gl.convert_layout(rest, LEFT_S), k, state)
        fence_async_shared()
        thread_barrier()
        if OUTPUT:
            copy_out(dv_desc, [at * C, 0], e_s.index(slot))
        mbarrier.arrive(empty.index(slot), count=1)
    tma.store_wait(0)
    if FINAL:
        is_first = (before == 0) if SPLIT and OUTPUT else (size >= 0)
        store_state(dh0 + o_state, state.to(dh0.dtype.element_ty), is_first, o_v, o_k, V, K, BV, BK)
        if NEED_G:  # noqa: SIM102
            if is_first & (size > 0):
                gl.store(begins, gl.sum(gl.sum(state * load_state(h0 + o_state, o_v, o_k, V, K, BV, BK), 1), 0))


@gluon.jit(do_not_specialize=lengths("qkogb", "T", "L"))
def adjoint_kernel(
    q, k, do, g, beta, errors, near, alike, norms, states, h0, dht, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_ob, stride_ot, stride_oh,
    stride_gb, stride_gt, stride_gh, stride_bb, stride_bt, stride_bh, scale, T, L,
    dv, dbeta, dlate, dh0, begins, turns,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr,
):
    """``dv`` ``[B, T, H, V]``, ``dbeta`` ``[B, T, H]`` and ``dlate`` ``[B, T, H, K]``, L.

    A program has one head of one sequence.

    near, alike, norms: see ``prepare_kernel``; errors, states: see ``walk_kernel``. dht: gradients of final states,
    None: zeros; dh0: those of initial ones, h0. ``begins`` ``[groups, H]``: the sums of products of the states before
    every GROUP chunks with their gradients, without initial states but for the first. ``turns`` ``[slots, H]``: 0.

    SPLIT: a program walks over one segment of L tokens, from its own dht ``[segments, H, K, V]``. dv None: dh0, of the
    same shape, is what segments, but for the first, leave: the last one from dht ``[N, H, K, V]``, others from zeros.
    """
    i_h = gl.program_id(0) % H
    i_o = gl.program_id(0) // H
    OUTPUT: gl.constexpr = dv is not None
    before = 0
    if SPLIT:
        if not OUTPUT:
            i_o += i_o // (gl.cdiv(T, L) - 1) + 1
        i_n, i_b, token, size, last, before = locate_segment(cu_seqlens, i_o, T, 0, L, C, False, REVERSE)
        before = before // C
    else:
        i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, T, PACKED, False, REVERSE)
    dtype: gl.constexpr = k.dtype.element_ty
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    INIT: gl.constexpr = dht is not None
    FINAL: gl.constexpr = dh0 is not None
    GATED: gl.constexpr = g is not None
    BETA: gl.constexpr = beta is not None
    NORM: gl.constexpr = norms is not None
    NEED_G: gl.constexpr = begins is not None

    first = first_slot(i_n, token, size, T, C, PACKED) * H + i_h
    count = gl.cdiv(size, C)
    chunks = gl.maximum(count, 1)
    stride_b = T.to(gl.int64) * H
    q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, BLOCK)
    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, BLOCK)
    o_desc = describe(do, i_b, token, i_h, size, stride_ob, stride_ot, stride_oh, C, V, BV, VALUES)
    # Something else stands for what is absent, and nobody reads it.
    e_desc = o_desc
    dv_desc = o_desc
    l_desc = k_desc
    if OUTPUT:
        e_desc = describe(errors, i_b, token, i_h, size, stride_b * V, H * V, V, C, V, BV, VALUES)
        dv_desc = describe(dv, i_b, token, i_h, size, stride_b * V, H * V, V, C, V, BV, VALUES)
        l_desc = describe(dlate, i_b, token, i_h, size, stride_b * K, H * K, K, C, K, BK, BLOCK)
    t_desc = tma.make_tensor_descriptor(near + first * (2 * C * C), [((chunks - 1) * H + 1) * (2 * C), C], [C, 1],
                                        [C, C], SQUARE)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    t_s = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
    r_s = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
    p_s = gl.allocate_shared_memory(dtype, [2, C, C], SQUARE)
    e_s = k_s
    d_s = k_s
    if OUTPUT:
        e_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
        d_s = gl.allocate_shared_memory(dtype, [BV, BK], STATE)
    factors_s = gl.allocate_shared_memory(gl.float32, [(7 if NORM else 6) * STAGES, C], VECTOR)
    scalars_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1], VECTOR)
    parts_s = scalars_s
    if OUTPUT and BETA:
        parts_s = gl.allocate_shared_memory(gl.float32, [STAGES, BV // 16, C],
                                            gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    p_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    e_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    e_read = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    e_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(e_full.index(i), count=1)
        mbarrier.init(e_empty.index(i), count=1)
    mbarrier.init(p_empty, count=1)
    mbarrier.init(e_read, count=1)
    fence_async_shared()
    if turns is not None:
        each = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        for i in range(0, count, 128):
            gl.store(turns + first + (i + each).to(gl.int64) * H, 0, mask=i + each < count)

    p_dht = k
    p_dh0 = k
    p_g = k
    p_beta = k
    p_norms = near
    p_dbeta = k
    if INIT:
        i_end = i_o if OUTPUT else i_n
        p_dht = dht + (i_end.to(gl.int64) * H + i_h) * K * V
    if FINAL:
        i_first = i_n if OUTPUT else i_o
        p_dh0 = dh0 + (i_first.to(gl.int64) * H + i_h) * K * V
    if GATED:
        p_g = g + i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
    if BETA:
        p_beta = beta + i_b.to(gl.int64) * stride_bb + token * stride_bt + (i_h // RB).to(gl.int64) * stride_bh
        if OUTPUT:
            p_dbeta = dbeta + (i_b.to(gl.int64) * T + token) * H + i_h
    if NORM:
        p_norms = norms + first * C
    p_alike = alike + first
    p_h0 = k
    p_states = k
    p_begins = k
    if NEED_G:
        first_group = first_slot(i_n, token * 0 if SPLIT else token, size, T, GROUP * C, PACKED) * H + i_h
        p_states = states + first_group * (V * K)
        p_begins = begins + first_group
        if FINAL:
            p_h0 = h0 + (i_n.to(gl.int64) * H + i_h) * K * V
    tiles = (q_s, k_s, do_s, e_s, t_s, r_s, p_s, d_s)
    vectors = (factors_s, scalars_s, parts_s)
    barriers = (full, ready, empty, p_empty, e_full, e_read, e_empty)
    descriptors = (q_desc, k_desc, o_desc, e_desc, t_desc)
    inputs = (p_g, stride_gt, p_beta, stride_bt)
    known = (p_alike, p_norms)
    ends = (p_dht, p_h0, p_dh0, p_begins)
    lefts = (p_states, p_begins)
    # Two warpgroups of walkers leave the registers of a multiprocessor for as much as the pair warpgroup needs.
    WIDE: gl.constexpr = BV == 128
    gl.warp_specialize(
        [
            (pair, (tiles, vectors, barriers, l_desc, lefts, size, scale, last, before, H, C, K, V, BK, STAGES, GROUP,
                    REVERSE, NORM, SPLIT, NEED_G, OUTPUT)),
            (multiply, (tiles, vectors, barriers, dv_desc, ends, size, last, before, H, C, K, V, BK, BV, STAGES,
                        REVERSE, BETA, NORM, INIT, FINAL, SPLIT, NEED_G, OUTPUT)),
            (gates, (vectors, barriers, inputs, known, p_dbeta, size, scale, H, C, STAGES, REVERSE, GATED, BETA, NORM,
                     OUTPUT)),
            (copy, (tiles, barriers, descriptors, p_alike, size, H, C, STAGES, REVERSE, OUTPUT)),
        ],
        [8 if WIDE else 4, 1, 1],
        [192 if WIDE else 216, 24, 24],
    )
