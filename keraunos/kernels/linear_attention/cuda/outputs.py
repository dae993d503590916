"""The walk that makes outputs, or the queries' gradients: it reads everything once and keeps the state in registers."""

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
    reach,
    settled,
    store_state,
    sums_before,
    within,
    without_own,
)


@gluon.jit
def copy(stages, barriers, descriptors, size, C: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
         REVERSE: gl.constexpr, OUTPUT: gl.constexpr, DOTS: gl.constexpr):
    """A partition of one warp: copies chunks into the ring of stages."""
    q_s, k_s, v_s, f_s = stages
    full, empty = barriers
    q_desc, k_desc, v_desc, f_desc = descriptors
    BYTES: gl.constexpr = (1 + OUTPUT) * k_desc.block_type.nbytes + 2 * (1 + DOTS) * v_desc.block_type.nbytes
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        row = ((count - 1 - i) if REVERSE else i) * C
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        arrived = full.index(slot)
        mbarrier.expect(arrived, BYTES)
        if OUTPUT:
            copy_in(q_desc, [row, 0], arrived, q_s.index(slot))
        copy_in(k_desc, [row, 0], arrived, k_s.index(slot))
        copy_in(v_desc, [row, 0], arrived, v_s.index(2 * slot))
        copy_in(v_desc, [row, HALF], arrived, v_s.index(2 * slot + 1))
        if DOTS:
            copy_in(f_desc, [row, 0], arrived, f_s.index(slot))


@gluon.jit
def multiply(shared, goal, states, numbers, late_s, state_s, WG: gl.constexpr, H: gl.constexpr, C: gl.constexpr,
             K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
             REVERSE: gl.constexpr, stride_sk: gl.constexpr, stride_sv: gl.constexpr, GATED: gl.constexpr,
             OUTPUT: gl.constexpr, STORED: gl.constexpr, DOTS: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr,
             GROUP: gl.constexpr, BACKWARDS: gl.constexpr):
    """A partition of one warpgroup: half of the values' dimensions, for which it has the state in registers."""
    stages, barriers, gates_s, dots_s, dotted = shared
    q_s, k_s, v_s, f_s = stages
    full, empty = barriers
    vectors_s, decays_s, strong_s = gates_s
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_s, o_desc, o = goal
    h0, ht, dh = states
    gamma, size, last, scale, begins = numbers
    HALF: gl.constexpr = BV // 2
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    dtype: gl.constexpr = k_s.dtype
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))
    if OUTPUT and not GATED:
        pairs = constant_pairs(gamma, rows, columns, REVERSE) * scale
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(1, W))
    o_v = WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, W))
    across_k = (o_k * stride_sk)[:, None]
    across_v = (o_v * stride_sv)[None, :]
    o_state = across_v + across_k if stride_sk == 1 else across_k + across_v
    o_dh = (o_v * BK)[None, :] + o_k[:, None]
    none = gl.zeros([C, C], gl.float32, W)
    nothing = gl.zeros([C, HALF], gl.float32, W)
    state = gl.zeros([BK, HALF], gl.float32, W)
    if INIT == 1:
        state = load_state(h0 + o_state, o_k, o_v, K, V, BK, BV)
    if INIT == 2:  # noqa: SIM102
        if begins:
            state = load_state(h0 + o_state, o_k, o_v, K, V, BK, BV)
    if OUTPUT:
        state_s.store(state.to(dtype))
        fence_async_shared()
        thread_barrier()
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        at = (count - 1 - i) if BACKWARDS else i
        left = gl.minimum(size - at * C, C)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        k = k_s.index(slot)
        v = v_s.index(2 * slot + WG)
        if GATED:
            across = decays_s.index(slot).load(gl.SliceLayout(1, W))
        else:
            # Where there is no choice, registers suffice.
            strong = True
            total = gamma * left.to(gl.float32)
            across = gl.full([BK], 1.0, gl.float32, gl.SliceLayout(1, W)) * gl.exp2(total)
        if DOTS:
            # What the gates of this chunk have in common, where the sums of their gradients begin anew.
            begin = scale * 0.0
            if i % GROUP == 0:
                b_dh = gl.load(dh + (i // GROUP).to(gl.int64) * (H * BK * BV) + o_dh).to(gl.float32)
                begin = gl.sum(gl.sum(state * b_dh, 1) * across, 0)
        state = settled(state)
        if OUTPUT:
            q = q_s.index(slot)
            a = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
            b_o = warpgroup_mma(q, state_s, nothing, use_acc=False, is_async=True)
        if GATED:
            to_row = vectors_s.index(3 * slot + 1).load(gl.SliceLayout(1, W))
            from_row = vectors_s.index(3 * slot + 2).load(gl.SliceLayout(1, W))
            if REVERSE != BACKWARDS:
                from_row = to_row
        else:
            G = constant_sums(gamma, left, rows, REVERSE)
            to_row = gl.exp2(G) * scale
            from_row = to_row if REVERSE != BACKWARDS else gl.exp2(total - G)
        late_s.store((v.load(W).to(gl.float32) * from_row[:, None]).to(dtype))
        fence_async_shared()
        state = state * across[:, None]
        thread_barrier()
        state = warpgroup_mma(k.permute((1, 0)), late_s, state, is_async=True)
        if not OUTPUT:
            state = warpgroup_mma_wait(0, deps=[state])
            thread_barrier()
            mbarrier.arrive(empty.index(slot), count=1)
        else:
            if GATED:
                of_columns = vectors_s.index(3 * slot).load(gl.SliceLayout(0, W))
                strong = gl.max(strong_s.index(slot).load(FLAG), 0) != 0
                if not DOTS:
                    G = vectors_s.index(3 * slot).load(gl.SliceLayout(1, W))
                    pairs = gated_pairs(scale, G, of_columns, rows, columns, REVERSE)
            a, b_o = warpgroup_mma_wait(1, deps=[a, b_o])
            b_o = b_o * to_row[:, None]
            own = gl.zeros([C], gl.float32, gl.SliceLayout(1, W))
            if not DOTS:
                a = a * pairs
            elif not GATED:
                a, own = without_own(a * pairs, rows, columns)
            elif strong:
                G = vectors_s.index(3 * slot).load(gl.SliceLayout(1, W))
                a, own = without_own(gated_pairs(a * scale, G, of_columns, rows, columns, REVERSE), rows, columns)
            else:
                a = mild_pairs(a, to_row, of_columns, rows, columns, REVERSE)
            p = gl.convert_layout(a.to(dtype), LEFT)
            if DOTS:
                factor_s = f_s.index(slot).slice(WG * HALF, HALF, 1)
                if i % GROUP == 0:
                    begin += gl.sum(gl.sum(b_o * factor_s.load(W).to(gl.float32), 1), 0)
            b_o = warpgroup_mma(p, v, b_o, is_async=True)
            if DOTS:
                factor = factor_s.load(W)
            if STORED:
                thread_barrier()
            else:
                tma.store_wait(1)
            state = warpgroup_mma_wait(1, deps=[state])
            state_s.store(state.to(dtype))
            b_o = warpgroup_mma_wait(0, deps=[b_o])
            if DOTS:
                mbarrier.wait(dotted.index(1), (i & 1) ^ 1)
                dots_s.index(WG).store(gl.sum(b_o * factor.to(gl.float32), 1))
                if i % GROUP == 0:
                    dots_s.index(2 + WG).store(gl.full([C], 1.0, gl.float32, gl.SliceLayout(1, W)) * begin)
                if strong:
                    b_o += own[:, None] * v.load(W).to(gl.float32)
            if STORED:
                o_o = ((at * C + rows).to(gl.int64) * (H * V))[:, None] + o_v[None, :]
                gl.store(o + o_o, b_o, mask=within((rows < left)[:, None], o_v[None, :], V, BV))
                fence_async_shared()
                thread_barrier()
                mbarrier.arrive(empty.index(slot), count=1)
            else:
                out = o_s.index(2 * WG + i % 2)
                out.store(b_o.to(dtype))
                fence_async_shared()
                thread_barrier()
                mbarrier.arrive(empty.index(slot), count=1)
                copy_out(o_desc, [at * C, WG * HALF], out)
            if DOTS:
                mbarrier.arrive(dotted.index(0), count=1)
    if OUTPUT and not STORED:
        tma.store_wait(0)
    if FINAL:
        store_state(ht + o_state, state, last, o_k, o_v, K, V, BK, BV)


@gluon.jit
def clear(o, first, end, step, H: gl.constexpr, C: gl.constexpr, V: gl.constexpr, BV: gl.constexpr):
    """Zeros for C of a head's outputs from each ``step``-th token on, up to the ``end``."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, BV // 32], [1, 32], [4, 1], [1, 0])
    t = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, LAYOUT))
    nothing = gl.zeros([C, BV], o.dtype.element_ty, LAYOUT)
    for i in range(first, end, step):
        o_o = ((i + t).to(gl.int64) * (H * V))[:, None] + o_v[None, :]
        gl.store(o + o_o, nothing, mask=within((i + t < end)[:, None], o_v[None, :], V, BV))


@gluon.jit
def add_gradients(dots_s, dotted, products, dg, dgamma, size, H: gl.constexpr, C: gl.constexpr, REVERSE: gl.constexpr,
                  GATES: gl.constexpr, GAMMA: gl.constexpr, GROUP: gl.constexpr):
    """A partition of one warp: the gradients of gates, each the sum of what all pairs that it is between come to.

    What changes from a token to the next are the pairs that end there, products of q with dq, and those that begin
    there, of k with dk: the latter are in ``products``. The former, and sums to begin with, come in two parts.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([C // 32], [32], [1], [0])
    t = gl.arange(0, C, layout=LAYOUT)
    everything = size.to(gl.float32) * 0.0
    carry = everything
    count = gl.cdiv(size, C)
    for i in range(count):
        at = (count - 1 - i) if REVERSE else i
        inside = t < size - at * C
        o_t = (at * C + t).to(gl.int64) * H
        x = gl.load(products + o_t, mask=inside, other=0.0)
        mbarrier.wait(dotted.index(0), i & 1)
        x -= dots_s.index(0).load(LAYOUT) + dots_s.index(1).load(LAYOUT)
        if i % GROUP == 0:
            carry = gl.max(dots_s.index(2).load(LAYOUT), 0) + gl.max(dots_s.index(3).load(LAYOUT), 0)
        thread_barrier()
        mbarrier.arrive(dotted.index(1), count=1)
        x = gl.where(inside, x, 0.0)
        sums = sums_before(x, 0, REVERSE) + carry
        carry += gl.sum(x, 0)
        if GATES:
            gl.store(dg + o_t, sums.to(dg.dtype.element_ty), mask=inside)
        everything += gl.sum(gl.where(inside, sums, 0.0), 0)
    if GAMMA:
        gl.store(dgamma, everything)


_LENGTHS = ["stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt",
            "stride_vh", "stride_fb", "stride_ft", "stride_fh", "stride_gb", "stride_gt", "stride_gh",
            "stride_gamma_b", "T", "L", "P"]


@gluon.jit(do_not_specialize=_LENGTHS)
def outputs_kernel(
    q, k, v, f, g, gamma, h0, products, dh, cu_seqlens, slots, has_initial, into,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_fb, stride_ft, stride_fh, stride_gb, stride_gt, stride_gh, stride_gamma_b, scale, T, L, P,
    o, ht, dg, dgamma, sums,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RF: gl.constexpr, RG: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, INIT_WALK: gl.constexpr,
    stride_ss: gl.constexpr, stride_sh: gl.constexpr, stride_sk: gl.constexpr, stride_sv: gl.constexpr,
    STORED: gl.constexpr, GROUP: gl.constexpr, BACKWARDS: gl.constexpr,
):
    """``o_i = scale * sum_{j <= i} decay_ij (q_i . k_j) v_j`` for one head of one sequence, or of one segment of it.

    Two partitions of a warpgroup multiply, each for half of v's dimensions; one warp copies, one adds up gates.

    q: None where only states are wanted: those that pieces of L tokens, P of them to a segment, leave from none, of as
    many of their last tokens as a constant decay leaves anything of at their segment's end; with gates ``sums``
    ``[walks, H]`` are what these come to. BACKWARDS, where that is not REVERSE: the gradients of states, to which k
    and v are queries and the output's gradients.

    g: gates per token; gamma: constant decays. h0: initial states, of walks (INIT_WALK) or of sequences; ht: final
    states.

    slots: h0 and ht are a pool, in which they say where the states of packed sequences are; -1: the sequence is
    padding, whose outputs are zeros, as those after the last sequence are. has_initial: which sequences have a state.

    f: what the output is the gradient of, where that of gates is wanted too: dg ``[B, T, H]``, dgamma ``[walks, H]``.
    Then products ``[B, T, H]`` and dh, the gradients of states in whole tiles, are what ``gradients_kernel`` left.

    K, V: the dimensions of q and k, and of v, f and o, in tiles of BK and BV. stride_s: strides of states. STORED: o,
    which may overwrite ``into``, is stored, not copied. RQ, RK, RV, RF, RG: how many heads share each of an array's.
    """
    i_h = gl.program_id(0) % H
    i_o = gl.program_id(0) // H
    OUTPUT: gl.constexpr = q is not None
    if not OUTPUT:
        # Nobody goes on from the segment that is walked last.
        pieces = gl.cdiv(T, L)
        wanted = pieces - P if BACKWARDS else (gl.cdiv(pieces, P) - 1) * P
        i_p = i_o % wanted + (P if BACKWARDS else 0)
        i_o = i_o // wanted * pieces + i_p
    i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, BACKWARDS)
    POOL: gl.constexpr = slots is not None
    begins = last
    if POOL:
        slot = gl.load(slots + i_n).to(gl.int64)
        if has_initial is not None:
            begins = gl.load(has_initial + i_n) != 0
        count = gl.num_programs(0) // H
        end = gl.load(cu_seqlens + count).to(gl.int64)
        clear(o + (end * H + i_h) * V, i_n * C, (T - end).to(gl.int32), count * C, H, C, V, BV)
        if slot < 0:
            clear(o + (token * H + i_h) * V, 0, size, C, H, C, V, BV)
            return
        if (size <= 0) & begins:
            return
    natural = natural_decay(gamma, i_b, i_h, stride_gamma_b)
    decay = gl.maximum(natural, CLOSED) * LOG2E
    if not OUTPUT:
        last = size >= 0
        if g is None:
            seen = reach(decay, (i_p % P if BACKWARDS else P - 1 - i_p % P) * L)
            if seen < 0:
                return
            unseen = gl.maximum(size - seen, 0) // C * C
            size = size - unseen
            if not BACKWARDS:
                token += unseen
    HALF: gl.constexpr = BV // 2
    dtype: gl.constexpr = k.dtype.element_ty
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    DOTS: gl.constexpr = f is not None
    INIT: gl.constexpr = (h0 is not None) + (has_initial is not None)
    FINAL: gl.constexpr = ht is not None
    GATES: gl.constexpr = dg is not None
    GAMMA: gl.constexpr = dgamma is not None
    GATED: gl.constexpr = g is not None

    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, BLOCK)
    v_desc = describe(v, i_b, token, i_h // RV, size, stride_vb, stride_vt, stride_vh, C, V, HALF, PART)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    v_s = gl.allocate_shared_memory(dtype, [2 * STAGES, C, HALF], PART)
    late_s = gl.allocate_shared_memory(dtype, [2, C, HALF], PART)
    # What is absent is something else, which nobody reads.
    q_desc = k_desc
    f_desc = k_desc
    o_desc = v_desc
    q_s = k_s
    f_s = k_s
    o_s = v_s
    state_s = late_s
    p_o = k
    dots_s = late_s
    dotted = late_s
    p_h0 = k
    p_ht = k
    p_dh = k
    of_token = (i_b.to(gl.int64) * T + token) * H + i_h
    if OUTPUT:
        q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, BLOCK)
        q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
        state_s = gl.allocate_shared_memory(dtype, [2, BK, HALF], PART)
        if STORED:
            p_o = o + of_token * V
        else:
            o_desc = describe(o, i_b, token, i_h, size, T.to(gl.int64) * (H * V), H * V, V, C, V, HALF, PART)
            o_s = gl.allocate_shared_memory(dtype, [4, C, HALF], PART)
    if DOTS:
        f_desc = describe(f, i_b, token, i_h // RF, size, stride_fb, stride_ft, stride_fh, C, V, BV, PART)
        f_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], PART)
        dots_s = gl.allocate_shared_memory(gl.float32, [4, C], VECTOR)
        dotted = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        mbarrier.init(dotted.index(0), count=2)
        mbarrier.init(dotted.index(1), count=1)
        p_dh = dh + (group_slot(i_o, token, T, L, GROUP * C, PACKED, SPLIT) * H + i_h) * BK * BV
    if INIT:
        p_h0 = h0 + ((i_o if INIT_WALK else i_n).to(gl.int64) * H + i_h) * K * V
    if FINAL:
        p_ht = ht + ((i_n if OUTPUT else i_o).to(gl.int64) * H + i_h) * K * V
    if POOL:
        own = slot * stride_ss + i_h.to(gl.int64) * stride_sh
        p_h0 = h0 + own
        p_ht = ht + own
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2 if GATED else 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()

    gates_s = (late_s, late_s, late_s)
    if GATED:
        vectors_s = gl.allocate_shared_memory(gl.float32, [3 * STAGES, C], VECTOR)
        decays_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
        gates_s = (vectors_s, decays_s, gl.allocate_shared_memory(gl.int32, [STAGES, 1], VECTOR))
    stages = (q_s, k_s, v_s, f_s)
    barriers = (full, empty)
    descriptors = (q_desc, k_desc, v_desc, f_desc)
    states = (p_h0, p_ht, p_dh)
    if GATED:
        p_g = g + i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
    SUM: gl.constexpr = sums is not None
    p_sums = k
    if SUM:
        p_sums = sums + i_o * H + i_h
    if DOTS:
        p_dg = products
        p_dgamma = products
        if GATES:
            p_dg = dg + of_token
        if GAMMA:
            p_dgamma = dgamma + gl.program_id(0)
    shared = (stages, barriers, gates_s, dots_s, dotted)
    goal = (o_s, o_desc, p_o)
    numbers = (decay, size, last, scale, begins)
    if GATED and DOTS:
        gl.warp_specialize(
            [
                (multiply, (shared, goal, states, numbers, late_s.index(0), state_s.index(0), 0, H, C, K, V, BK, BV,
                            STAGES, REVERSE, stride_sk, stride_sv, GATED, OUTPUT, STORED, DOTS, INIT, FINAL, GROUP,
                            BACKWARDS)),
                (multiply, (shared, goal, states, numbers, late_s.index(1), state_s.index(1), 1, H, C, K, V, BK, BV,
                            STAGES, REVERSE, stride_sk, stride_sv, GATED, OUTPUT, STORED, DOTS, INIT, FINAL, GROUP,
                            BACKWARDS)),
                (copy, (stages, barriers, descriptors, size, C, HALF, STAGES, BACKWARDS, OUTPUT, DOTS)),
                (add_gates, (p_g, natural, size, stride_gt, scale, gates_s, full, empty, p_sums, C, BK, STAGES,
                             REVERSE, BACKWARDS, DOTS, SUM)),
                (add_gradients, (dots_s, dotted, products + of_token, p_dg, p_dgamma, size, H, C, REVERSE, GATES,
                                 GAMMA, GROUP)),
            ],
            [4, 1, 1, 1],
            [232, 40, 40, 40],
        )
    elif GATED:
        gl.warp_specialize(
            [
                (multiply, (shared, goal, states, numbers, late_s.index(0), state_s.index(0), 0, H, C, K, V, BK, BV,
                            STAGES, REVERSE, stride_sk, stride_sv, GATED, OUTPUT, STORED, DOTS, INIT, FINAL, GROUP,
                            BACKWARDS)),
                (multiply, (shared, goal, states, numbers, late_s.index(1), state_s.index(1), 1, H, C, K, V, BK, BV,
                            STAGES, REVERSE, stride_sk, stride_sv, GATED, OUTPUT, STORED, DOTS, INIT, FINAL, GROUP,
                            BACKWARDS)),
                (copy, (stages, barriers, descriptors, size, C, HALF, STAGES, BACKWARDS, OUTPUT, DOTS)),
                (add_gates, (p_g, natural, size, stride_gt, scale, gates_s, full, empty, p_sums, C, BK, STAGES,
                             REVERSE, BACKWARDS, DOTS, SUM)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
    elif DOTS:
        gl.warp_specialize(
            [
                (multiply, (shared, goal, states, numbers, late_s.index(0), state_s.index(0), 0, H, C, K, V, BK, BV,
                            STAGES, REVERSE, stride_sk, stride_sv, GATED, OUTPUT, STORED, DOTS, INIT, FINAL, GROUP,
                            BACKWARDS)),
                (multiply, (shared, goal, states, numbers, late_s.index(1), state_s.index(1), 1, H, C, K, V, BK, BV,
                            STAGES, REVERSE, stride_sk, stride_sv, GATED, OUTPUT, STORED, DOTS, INIT, FINAL, GROUP,
                            BACKWARDS)),
                (copy, (stages, barriers, descriptors, size, C, HALF, STAGES, BACKWARDS, OUTPUT, DOTS)),
                (add_gradients, (dots_s, dotted, products + of_token, p_dg, p_dgamma, size, H, C, REVERSE, GATES,
                                 GAMMA, GROUP)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (shared, goal, states, numbers, late_s.index(0), state_s.index(0), 0, H, C, K, V, BK, BV,
                            STAGES, REVERSE, stride_sk, stride_sv, GATED, OUTPUT, STORED, DOTS, INIT, FINAL, GROUP,
                            BACKWARDS)),
                (multiply, (shared, goal, states, numbers, late_s.index(1), state_s.index(1), 1, H, C, K, V, BK, BV,
                            STAGES, REVERSE, stride_sk, stride_sv, GATED, OUTPUT, STORED, DOTS, INIT, FINAL, GROUP,
                            BACKWARDS)),
                (copy, (stages, barriers, descriptors, size, C, HALF, STAGES, BACKWARDS, OUTPUT, DOTS)),
            ],
            [4, 1],
            [232, 40],
        )
