"""The walk that makes outputs, with the state in registers.

The state of a chunk is kept transposed ``[V, K]``, so that it, and all that follows from it, is the left operand of
each product and stays in registers. With S the state before a chunk, ``G_i`` the sum of its gates up to and with token
i, base 2, and T the inverse of ``prepare.py``:

    Y = V - exp2(G) K S                     the errors before the chunk
    E = T Y                                 the errors that tokens correct
    O = scale exp2(G) Q S + P E             P_ij = scale exp2(G_i - G_j) beta_j q_i . k_j
    S' = exp2(G_C) S + (beta exp2(G_C - G) K)^T E

Where keys are alike, Y, T, E and P have two parts: corrections cancel, but not what 16 bits do not hold of them.

A warpgroup has 64 of the values' dimensions: none waits for another. One more makes P, a warp copies.
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
    FAINT,
    LOG2E,
    add,
    describe,
    load_state,
    locate,
    store_state,
    wide,
)
from keraunos.kernels.gated_delta_rule.cuda.prepare import EPSILON
from keraunos.kernels.gluon import copy_in, copy_out, lengths, thread_barrier


@gluon.jit
def copy(tiles, barriers, descriptors, alike, size, H: gl.constexpr, C: gl.constexpr, PART: gl.constexpr,
         WALKERS: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr):
    """A partition of one warp: copies chunks into the ring of stages, and the rest of T where it counts."""
    q_s, k_s, v_s, t_s, r_s, _ = tiles
    full, _, empty = barriers
    q_desc, k_desc, v_desc, t_desc = descriptors
    BYTES: gl.constexpr = 2 * k_desc.block_type.nbytes + WALKERS * v_desc.block_type.nbytes + t_desc.block_type.nbytes
    REST: gl.constexpr = t_desc.block_type.nbytes
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        at = (count - 1 - i) if REVERSE else i
        fine = gl.load(alike + at * H) != 0
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        arrived = full.index(slot)
        if fine:
            mbarrier.expect(arrived, BYTES + REST)
        else:
            mbarrier.expect(arrived, BYTES)
        copy_in(k_desc, [at * C, 0], arrived, k_s.index(slot))
        copy_in(q_desc, [at * C, 0], arrived, q_s.index(slot))
        for j in gl.static_range(WALKERS):
            copy_in(v_desc, [at * C, j * PART], arrived, v_s.index(slot * WALKERS + j))
        copy_in(t_desc, [at * H * 2 * C, 0], arrived, t_s.index(slot))
        if fine:
            copy_in(t_desc, [at * H * 2 * C + C, 0], arrived, r_s.index(slot))


@gluon.jit
def pair(tiles, vectors, barriers, inputs, size, scale, H: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
         REVERSE: gl.constexpr, GATED: gl.constexpr, BETA: gl.constexpr, NORM: gl.constexpr):
    """A partition of one warpgroup: P of each chunk, and the factors of gates that the walk needs.

    For each stage: ``exp2(G)``, ``scale exp2(G)``, ``beta exp2(G_C - G)``, of keys and queries as long as they are;
    ``exp2(G_C)``, as often as there are rows of a state; and whether keys are alike.
    """
    q_s, k_s, _, _, _, p_s = tiles
    factors_s, alike_s = vectors
    full, ready, empty = barriers
    g, stride_g, beta, stride_beta, alike, norms = inputs
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, W)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, W)
    EACH: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = k_s.dtype
    rows = gl.arange(0, C, layout=OF_ROWS)
    columns = gl.arange(0, C, layout=OF_COLUMNS)
    none = gl.zeros([C, C], gl.float32, W)
    t = gl.arange(0, C, layout=EACH)
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        at = (count - 1 - i) if REVERSE else i
        inside = t < size - at * C
        x = gl.zeros([C], gl.float32, EACH)
        if GATED:
            x = gl.load(g + (at * C + t).to(gl.int64) * stride_g, mask=inside, other=0.0).to(gl.float32)
            x = gl.where(inside, gl.maximum(x, FAINT) * LOG2E, 0.0)
        strength = gl.full([C], 1.0, gl.float32, EACH)
        if BETA:
            strength = gl.load(beta + (at * C + t).to(gl.int64) * stride_beta, mask=inside, other=0.0).to(gl.float32)
        of_keys = gl.full([C], 1.0, gl.float32, EACH)
        if NORM:
            of_keys = gl.load(norms + at * (H * C) + t)
        fine = gl.load(alike + at * H)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        q = q_s.index(slot)
        of_queries = gl.full([C], 1.0, gl.float32, EACH) * scale
        if NORM:
            squares = warpgroup_mma(q, q.permute((1, 0)), none, use_acc=False, is_async=True)
            squares = warpgroup_mma_wait(0, deps=[squares])
            squares = gl.sum(gl.where(rows[:, None] == columns[None, :], squares, 0.0), 1)
            of_queries *= gl.rsqrt(gl.convert_layout(squares, EACH) + EPSILON)
        a = warpgroup_mma(q, k_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        G = gl.associative_scan(x, 0, add, reverse=REVERSE)
        total = gl.sum(x, 0)
        strength *= of_keys
        factors_s.index(slot * 4).store(gl.exp2(G) * of_keys)
        factors_s.index(slot * 4 + 1).store(gl.exp2(G) * of_queries)
        factors_s.index(slot * 4 + 2).store(gl.exp2(gl.minimum(total - G, 0.0)) * strength)
        factors_s.index(slot * 4 + 3).store(gl.full([C], 1.0, gl.float32, EACH) * gl.exp2(total))
        alike_s.index(slot).store(gl.full([1], 1, gl.int32, FLAG) * fine)
        G_rows = gl.convert_layout(G, OF_ROWS)
        G_columns = gl.convert_layout(G, OF_COLUMNS)
        seen = (columns[None, :] >= rows[:, None]) if REVERSE else (columns[None, :] <= rows[:, None])
        reach = gl.exp2(gl.where(seen, G_rows[:, None] - G_columns[None, :], -float("inf")))
        reach *= gl.convert_layout(strength, OF_COLUMNS)[None, :]
        of_rows = gl.convert_layout(of_queries, OF_ROWS)[:, None]
        a = warpgroup_mma_wait(0, deps=[a])
        a *= of_rows * reach
        p_s.index(2 * slot).store(a.to(dtype))
        if fine != 0:
            p_s.index(2 * slot + 1).store((a - wide(a.to(dtype))).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(ready.index(slot), count=1)
        mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def multiply(tiles, vectors, barriers, goal, states, size, last, WALKER: gl.constexpr, C: gl.constexpr,
             K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, PART: gl.constexpr, WALKERS: gl.constexpr,
             STAGES: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr):
    """A partition of one warpgroup: PART of the values' dimensions, for which it has the state."""
    q_s, k_s, v_s, t_s, r_s, p_s = tiles
    factors_s, alike_s = vectors
    full, ready, empty = barriers
    o_s, o_desc = goal
    h0, ht = states
    # A chunk's tokens are columns; so are the dimensions of keys of a state.
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    WS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, WS, 2)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, W)
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = k_s.dtype
    o_v = WALKER * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, WS))
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(0, WS))
    o_state = o_v[:, None] + (o_k * V)[None, :]
    none = gl.zeros([PART, C], gl.float32, W)
    state = gl.zeros([PART, BK], gl.float32, WS)
    if INIT:
        state = load_state(h0 + o_state, o_v, o_k, V, K, WALKERS * PART, BK)
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        at = (count - 1 - i) if REVERSE else i
        phase = (i // STAGES) & 1
        mbarrier.wait(full.index(slot), phase)
        k = k_s.index(slot)
        left = gl.convert_layout(state.to(dtype), LEFT)
        y = warpgroup_mma(left, k.permute((1, 0)), none, use_acc=False, is_async=True)
        o = warpgroup_mma(left, q_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(ready.index(slot), phase)
        y, o = warpgroup_mma_wait(0, deps=[y, o])
        # Loaded no sooner: the products leave no registers for them.
        enter = factors_s.index(slot * 4).load(OF_TOKENS)[None, :]
        fine = gl.max(alike_s.index(slot).load(FLAG), 0) != 0
        v = v_s.index(slot * WALKERS + WALKER).permute((1, 0)).load(W)
        y = wide(v) - y * enter
        left = gl.convert_layout(y.to(dtype), LEFT)
        if fine:
            rest = gl.convert_layout((y - wide(y.to(dtype))).to(dtype), LEFT)
            y = warpgroup_mma(left, r_s.index(slot).permute((1, 0)), y)
            y = warpgroup_mma(rest, t_s.index(slot).permute((1, 0)), y)
        e = warpgroup_mma(left, t_s.index(slot).permute((1, 0)), y, is_async=True)
        state = state * factors_s.index(slot * 4 + 3).load(gl.SliceLayout(1, WS))[:, None]
        o = o * factors_s.index(slot * 4 + 1).load(OF_TOKENS)[None, :]
        e = warpgroup_mma_wait(0, deps=[e])
        late = e * factors_s.index(slot * 4 + 2).load(OF_TOKENS)[None, :]
        state = warpgroup_mma(gl.convert_layout(late.to(dtype), LEFT_S), k, state, is_async=True)
        o = warpgroup_mma(gl.convert_layout(e.to(dtype), LEFT), p_s.index(2 * slot).permute((1, 0)), o, is_async=True)
        tma.store_wait(0)
        state, o = warpgroup_mma_wait(0, deps=[state, o])
        if fine:
            late = e * factors_s.index(slot * 4 + 2).load(OF_TOKENS)[None, :]
            rest = (late - wide(late.to(dtype))).to(dtype)
            state = warpgroup_mma(gl.convert_layout(rest, LEFT_S), k, state, is_async=True)
            o = warpgroup_mma(gl.convert_layout(e.to(dtype), LEFT), p_s.index(2 * slot + 1).permute((1, 0)), o,
                              is_async=True)
            rest = (e - wide(e.to(dtype))).to(dtype)
            o = warpgroup_mma(gl.convert_layout(rest, LEFT), p_s.index(2 * slot).permute((1, 0)), o, is_async=True)
            state, o = warpgroup_mma_wait(0, deps=[state, o])
        o_s.permute((1, 0)).store(o.to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        copy_out(o_desc, [at * C, WALKER * PART], o_s)
    tma.store_wait(0)
    if FINAL:
        store_state(ht + o_state, state, last, o_v, o_k, V, K, WALKERS * PART, BK)


@gluon.jit(do_not_specialize=lengths("qkvgb", "T"))
def walk_kernel(
    q, k, v, g, beta, near, alike, norms, h0, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_bb, stride_bt, stride_bh, scale, T,
    o, ht,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr,
):
    """``o`` ``[B, T, H, V]`` and the final states ``ht``, of one head of one sequence for each program.

    near, alike, norms: see ``prepare_kernel``; with norms, queries and keys are divided by their lengths. h0: initial
    states. g None: no gates; beta None: ones.

    K, V: the dimensions of q and k, and of v and o, in tiles of BK and BV. RQ, RK, RV, RG, RB: how many heads
    share each of an array's.
    """
    i_h = gl.program_id(0) % H
    i_o = gl.program_id(0) // H
    i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, T, PACKED, False, REVERSE)
    PART: gl.constexpr = 64
    WALKERS: gl.constexpr = BV // PART
    dtype: gl.constexpr = k.dtype.element_ty
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PART], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    INIT: gl.constexpr = h0 is not None
    FINAL: gl.constexpr = ht is not None
    GATED: gl.constexpr = g is not None
    BETA: gl.constexpr = beta is not None
    NORM: gl.constexpr = norms is not None

    first = (token // C + i_n) if PACKED else (i_n.to(gl.int64) * gl.cdiv(T, C) + token // C)
    first = (first * (size > 0).to(gl.int64)) * H + i_h
    chunks = gl.maximum(gl.cdiv(size, C), 1)
    q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, BLOCK)
    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, BLOCK)
    v_desc = describe(v, i_b, token, i_h // RV, size, stride_vb, stride_vt, stride_vh, C, V, PART, VALUES)
    o_desc = describe(o, i_b, token, i_h, size, T.to(gl.int64) * (H * V), H * V, V, C, V, PART, VALUES)
    t_desc = tma.make_tensor_descriptor(near + first * (2 * C * C), [((chunks - 1) * H + 1) * (2 * C), C], [C, 1],
                                        [C, C], SQUARE)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    v_s = gl.allocate_shared_memory(dtype, [STAGES * WALKERS, C, PART], VALUES)
    t_s = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
    r_s = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
    p_s = gl.allocate_shared_memory(dtype, [2 * STAGES, C, C], SQUARE)
    o_s = gl.allocate_shared_memory(dtype, [WALKERS, C, PART], VALUES)
    factors_s = gl.allocate_shared_memory(gl.float32, [4 * STAGES, C], VECTOR)
    alike_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=WALKERS + 1)
    fence_async_shared()

    # Something else stands for an absent array, and nobody reads it.
    p_h0 = k
    p_ht = k
    p_g = k
    p_beta = k
    p_norms = near
    if INIT:
        p_h0 = h0 + (i_n.to(gl.int64) * H + i_h) * K * V
    if FINAL:
        p_ht = ht + (i_n.to(gl.int64) * H + i_h) * K * V
    if GATED:
        p_g = g + i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
    if BETA:
        p_beta = beta + i_b.to(gl.int64) * stride_bb + token * stride_bt + (i_h // RB).to(gl.int64) * stride_bh
    if NORM:
        p_norms = norms + first * C
    p_alike = alike + first
    tiles = (q_s, k_s, v_s, t_s, r_s, p_s)
    vectors = (factors_s, alike_s)
    barriers = (full, ready, empty)
    descriptors = (q_desc, k_desc, v_desc, t_desc)
    inputs = (p_g, stride_gt, p_beta, stride_bt, p_alike, p_norms)
    states = (p_h0, p_ht)
    if WALKERS == 2:
        gl.warp_specialize(
            [
                (multiply, (tiles, vectors, barriers, (o_s.index(0), o_desc), states, size, last, 0, C, K, V, BK,
                            PART, WALKERS, STAGES, REVERSE, INIT, FINAL)),
                (multiply, (tiles, vectors, barriers, (o_s.index(1), o_desc), states, size, last, 1, C, K, V, BK,
                            PART, WALKERS, STAGES, REVERSE, INIT, FINAL)),
                (pair, (tiles, vectors, barriers, inputs, size, scale, H, C, STAGES, REVERSE, GATED, BETA, NORM)),
                (copy, (tiles, barriers, descriptors, p_alike, size, H, C, PART, WALKERS, STAGES, REVERSE)),
            ],
            [4, 4, 1],
            [200, 88, 24],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (tiles, vectors, barriers, (o_s.index(0), o_desc), states, size, last, 0, C, K, V, BK,
                            PART, WALKERS, STAGES, REVERSE, INIT, FINAL)),
                (pair, (tiles, vectors, barriers, inputs, size, scale, H, C, STAGES, REVERSE, GATED, BETA, NORM)),
                (copy, (tiles, barriers, descriptors, p_alike, size, H, C, PART, WALKERS, STAGES, REVERSE)),
            ],
            [4, 1],
            [88, 24],
        )
