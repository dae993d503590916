"""The walk that makes the gradients of keys and values in one pass, against the order of the recurrence."""

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

from keraunos.kernels.gluon import copy_in, copy_out, thread_barrier
from keraunos.kernels.linear_attention.cuda.walk import (
    CLOSED,
    LOG2E,
    add_gates,
    constant_pairs,
    constant_sums,
    describe,
    gated_pairs,
    group_slot,
    load_state,
    locate,
    mild_pairs,
    natural_decay,
    settled,
    store_state,
    within,
    without_own,
)


@gluon.jit
def copy(stages, barriers, descriptors, size, C: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr):
    """A partition of one warp: copies chunks into the ring of stages."""
    q_s, k_s, v_s, do_s = stages
    full, empty = barriers
    q_desc, k_desc, v_desc, do_desc = descriptors
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        row = (i if REVERSE else (count - 1 - i)) * C
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        arrived = full.index(slot)
        mbarrier.expect(arrived, 2 * q_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
        copy_in(q_desc, [row, 0], arrived, q_s.index(slot))
        copy_in(k_desc, [row, 0], arrived, k_s.index(slot))
        copy_in(v_desc, [row, 0], arrived, v_s.index(slot))
        copy_in(do_desc, [row, 0], arrived, do_s.index(slot))


@gluon.jit
def multiply(shared, goal, ends, numbers, early_s, WG: gl.constexpr, H: gl.constexpr, C: gl.constexpr, K: gl.constexpr,
             V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr,
             GATED: gl.constexpr, WIDE: gl.constexpr, DOTS: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr,
             SAVE: gl.constexpr, GROUP: gl.constexpr):
    """A partition of one warpgroup: the first makes dv, the second dk.

    Each has the gradient of half of the state in registers, and writes its half of the copy that both read. Of the
    barriers ``met`` the first says that the copy is whole, the second that it was read.
    """
    stages, barriers, gates_s, state_s, met = shared
    q_s, k_s, v_s, do_s = stages
    full, empty = barriers
    vectors_s, decays_s, strong_s = gates_s
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_s, o_desc, o = goal
    dots, states_desc, dht, dh0 = ends
    gamma, size, last, scale = numbers
    HALF: gl.constexpr = BV // 2
    # What this partition makes has so many dimensions, in a tile.
    D: gl.constexpr = V if WG == 0 else K
    BD: gl.constexpr = BV if WG == 0 else BK
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    W2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W2, 2)
    dtype: gl.constexpr = q_s.dtype
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))
    rows2 = gl.arange(0, C, layout=gl.SliceLayout(1, W2))
    # Rows are keys here and columns queries: the pairs of the recurrence that runs the other way.
    if not GATED:
        pairs = constant_pairs(gamma, rows, columns, not REVERSE) * scale
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(1, W))
    o_v = WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, W))
    o_state = (o_k * V)[:, None] + o_v[None, :]
    state = gl.zeros([BK, HALF], gl.float32, W)
    if INIT:
        state = load_state(dht + o_state, o_k, o_v, K, V, BK, BV)
    none = gl.zeros([C, C], gl.float32, W)
    nothing = gl.zeros([C, BD], gl.float32, W2)
    mine = state_s.slice(WG * HALF, HALF, 1)
    mine.store(state.to(dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(met.index(0), count=1)
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        at = i if REVERSE else (count - 1 - i)
        left = gl.minimum(size - at * C, C)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        q = q_s.index(slot)
        do = do_s.index(slot)
        if WG == 0:
            own = k_s.index(slot)
            other = q
            into = do
            factor_s = v_s.index(slot)
        else:
            own = v_s.index(slot)
            other = do
            into = q
            factor_s = k_s.index(slot)
        state = settled(state)
        a = warpgroup_mma(own, other.permute((1, 0)), none, use_acc=False, is_async=True)
        if GATED:
            to_row = vectors_s.index(3 * slot + 1).load(gl.SliceLayout(1, W))
            rest = vectors_s.index(3 * slot + 2).load(gl.SliceLayout(1, W2))
            across = decays_s.index(slot).load(gl.SliceLayout(1, W))
            strong = gl.max(strong_s.index(slot).load(FLAG), 0) != 0
        else:
            # Where there is no choice, registers suffice.
            strong = True
            total = gamma * left.to(gl.float32)
            to_row = gl.exp2(constant_sums(gamma, left, rows, REVERSE)) * scale
            rest = gl.exp2(total - constant_sums(gamma, left, rows2, REVERSE))
            across = gl.full([BK], 1.0, gl.float32, gl.SliceLayout(1, W)) * gl.exp2(total)
        half = do.slice(WG * HALF, HALF, 1).load(W).to(gl.float32) * to_row[:, None]
        early_s.store(half.to(dtype))
        fence_async_shared()
        mbarrier.wait(met.index(0), i & 1)
        if WG == 0:
            b_o = warpgroup_mma(own, state_s, nothing, use_acc=False, is_async=True)
        else:
            b_o = warpgroup_mma(own, state_s.permute((1, 0)), nothing, use_acc=False, is_async=True)
        state = state * across[:, None]
        thread_barrier()
        state = warpgroup_mma(q.permute((1, 0)), early_s, state, is_async=True)
        a, b_o = warpgroup_mma_wait(1, deps=[a, b_o])
        own_pairs = gl.zeros([C], gl.float32, gl.SliceLayout(1, W))
        if not GATED:
            a = a * pairs
        elif strong:
            G_rows = vectors_s.index(3 * slot).load(gl.SliceLayout(1, W))
            G_columns = vectors_s.index(3 * slot).load(gl.SliceLayout(0, W))
            a = gated_pairs(a * scale, -G_rows, -G_columns, rows, columns, not REVERSE)
        else:
            of_rows = vectors_s.index(3 * slot).load(gl.SliceLayout(1, W))
            of_columns = vectors_s.index(3 * slot + 1).load(gl.SliceLayout(0, W))
            a = mild_pairs(a, of_rows, of_columns, rows, columns, not REVERSE)
        if DOTS:  # noqa: SIM102
            if strong:
                a, own_pairs = without_own(a, rows, columns)
        p = gl.convert_layout(a.to(dtype), LEFT)
        b_o = b_o * rest[:, None]
        if SAVE and WG == 0:
            place = count - 1 - i
            if place % GROUP == 0:
                copy_out(states_desc, [place // GROUP * H * BK, 0], state_s)
                tma.store_wait(0)
        thread_barrier()
        mbarrier.arrive(met.index(1), count=1)
        b_o = warpgroup_mma(p, into, b_o, is_async=True)
        if not WIDE:
            tma.store_wait(0)
        state = warpgroup_mma_wait(1, deps=[state])
        mbarrier.wait(met.index(1), i & 1)
        mine.store(state.to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(met.index(0), count=1)
        b_o = warpgroup_mma_wait(0, deps=[b_o])
        if DOTS:
            dot = gl.sum(b_o * factor_s.load(W2).to(gl.float32), 1)
            gl.store(dots + (at * C + rows2).to(gl.int64) * H, dot, mask=rows2 < left)
            if strong:
                b_o += gl.convert_layout(own_pairs, gl.SliceLayout(1, W2))[:, None] * into.load(W2).to(gl.float32)
        if WIDE:
            o_d = gl.arange(0, BD, layout=gl.SliceLayout(0, W2))
            o_o = ((at * C + rows2).to(gl.int64) * (H * D))[:, None] + o_d[None, :]
            gl.store(o + o_o, b_o, mask=within((rows2 < left)[:, None], o_d[None, :], D, BD))
            thread_barrier()
            mbarrier.arrive(empty.index(slot), count=1)
        else:
            o_s.store(b_o.to(dtype))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(empty.index(slot), count=1)
            copy_out(o_desc, [at * C, 0], o_s)
    if not WIDE:
        tma.store_wait(0)
    if FINAL:
        store_state(dh0 + o_state, state, last, o_k, o_v, K, V, BK, BV)


_LENGTHS = ["stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt",
            "stride_vh", "stride_ob", "stride_ot", "stride_oh", "stride_gb", "stride_gt", "stride_gh",
            "stride_gamma_b", "T", "L"]


@gluon.jit(do_not_specialize=_LENGTHS)
def gradients_kernel(
    q, k, v, do, g, gamma, dht, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh, stride_gb, stride_gt, stride_gh, stride_gamma_b, scale, T, L,
    dk, dv, dh0, dots, states,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, GROUP: gl.constexpr,
):
    """dk and dv of one head of one sequence, or of one segment of it; what is left is the initial state's gradient.

    dht: the gradients of the states at the walks' ends. For the gradients of gates, where those are wanted: dots, the
    products of k with dk ``[B, T, H]``, without each token's pair with itself; states, the gradient of the state after
    each GROUP-th chunk, from the recurrence's first on, in whole tiles. REVERSE: of the recurrence, which is walked the
    other way. K, V: the dimensions of q and k, and of v and do, in tiles of BK and BV.
    """
    i_h = gl.program_id(0) % H
    i_o = gl.program_id(0) // H
    i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, not REVERSE)
    HALF: gl.constexpr = BV // 2
    dtype: gl.constexpr = k.dtype.element_ty
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    # Of all that has the dimensions of values, and can be cut into halves.
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, BLOCK)
    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, BLOCK)
    v_desc = describe(v, i_b, token, i_h // RV, size, stride_vb, stride_vt, stride_vh, C, V, BV, PART)
    do_desc = describe(do, i_b, token, i_h, size, stride_ob, stride_ot, stride_oh, C, V, BV, PART)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], PART)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], PART)
    early_s = gl.allocate_shared_memory(dtype, [2, C, HALF], PART)
    state_s = gl.allocate_shared_memory(dtype, [BK, BV], PART)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    met = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    GATED: gl.constexpr = g is not None
    LEARNED: gl.constexpr = dots is not None
    INIT: gl.constexpr = dht is not None
    FINAL: gl.constexpr = dh0 is not None
    WIDE_K: gl.constexpr = dk.dtype.element_ty != dtype
    WIDE_V: gl.constexpr = dv.dtype.element_ty != dtype
    of_token = (i_b.to(gl.int64) * T + token) * H + i_h
    rows_of_batch = T.to(gl.int64) * H
    # What is absent is something else, which nobody reads.
    dk_s = early_s.index(1)
    dv_s = early_s.index(0)
    dk_desc = k_desc
    dv_desc = k_desc
    p_dk = dk + of_token * K
    p_dv = dv + of_token * V
    p_dht = k
    p_dh0 = k
    p_dots = k
    states_desc = k_desc
    if not WIDE_K:
        dk_desc = describe(dk, i_b, token, i_h, size, rows_of_batch * K, H * K, K, C, K, BK, BLOCK)
        dk_s = gl.allocate_shared_memory(dtype, [C, BK], BLOCK)
    if not WIDE_V:
        dv_desc = describe(dv, i_b, token, i_h, size, rows_of_batch * V, H * V, V, C, V, BV, PART)
        dv_s = gl.allocate_shared_memory(dtype, [C, BV], PART)
    if INIT:
        p_dht = dht + (i_o.to(gl.int64) * H + i_h) * K * V
    if FINAL:
        p_dh0 = dh0 + (i_n.to(gl.int64) * H + i_h) * K * V
    if LEARNED:
        p_dots = dots + of_token
        first = group_slot(i_o, token, T, L, GROUP * C, PACKED, SPLIT)
        rows = (gl.maximum(gl.cdiv(size, GROUP * C) - 1, 0) * H + 1) * BK
        p_states = states + (first * H + i_h) * BK * BV
        states_desc = tma.make_tensor_descriptor(p_states, [rows, BV], [BV, 1], [BK, BV], PART)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2 if GATED else 1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(met.index(i), count=2)
    fence_async_shared()

    natural = natural_decay(gamma, i_b, i_h, stride_gamma_b)
    decay = gl.maximum(natural, CLOSED) * LOG2E
    gates_s = (early_s, early_s, early_s)
    if GATED:
        vectors_s = gl.allocate_shared_memory(gl.float32, [3 * STAGES, C], VECTOR)
        decays_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
        gates_s = (vectors_s, decays_s, gl.allocate_shared_memory(gl.int32, [STAGES, 1], VECTOR))
        p_g = g + i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
    stages = (q_s, k_s, v_s, do_s)
    barriers = (full, empty)
    descriptors = (q_desc, k_desc, v_desc, do_desc)
    shared = (stages, barriers, gates_s, state_s, met)
    ends = (p_dots, states_desc, p_dht, p_dh0)
    numbers = (decay, size, last, scale)
    if GATED:
        gl.warp_specialize(
            [
                (multiply, (shared, (dv_s, dv_desc, p_dv), ends, numbers, early_s.index(0), 0, H, C, K, V, BK, BV,
                            STAGES, REVERSE, GATED, WIDE_V, False, INIT, FINAL, LEARNED, GROUP)),
                (multiply, (shared, (dk_s, dk_desc, p_dk), ends, numbers, early_s.index(1), 1, H, C, K, V, BK, BV,
                            STAGES, REVERSE, GATED, WIDE_K, LEARNED, INIT, FINAL, LEARNED, GROUP)),
                (copy, (stages, barriers, descriptors, size, C, STAGES, REVERSE)),
                (add_gates, (p_g, natural, size, stride_gt, scale, gates_s, full, empty, k, C, BK, STAGES, REVERSE,
                             not REVERSE, True, False)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (shared, (dv_s, dv_desc, p_dv), ends, numbers, early_s.index(0), 0, H, C, K, V, BK, BV,
                            STAGES, REVERSE, GATED, WIDE_V, False, INIT, FINAL, LEARNED, GROUP)),
                (multiply, (shared, (dk_s, dk_desc, p_dk), ends, numbers, early_s.index(1), 1, H, C, K, V, BK, BV,
                            STAGES, REVERSE, GATED, WIDE_K, LEARNED, INIT, FINAL, LEARNED, GROUP)),
                (copy, (stages, barriers, descriptors, size, C, STAGES, REVERSE)),
            ],
            [4, 1],
            [232, 40],
        )
