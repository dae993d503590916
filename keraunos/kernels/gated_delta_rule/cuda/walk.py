"""The walk that makes outputs, with the state in registers.

The state of a chunk is kept transposed ``[V, K]``, so that it, and all that follows from it, is the left operand of
each product and stays in registers. With S the state before a chunk, ``G_i`` the sum of its gates up to and with token
i, base 2, and N of ``inverse.py``:

    Y = V - exp2(G) K S                     the errors before the chunk
    E = Y + N beta Y                        the errors that tokens correct
    O = scale exp2(G) Q S + P E             P_ij = scale exp2(G_i - G_j) beta_j q_i . k_j
    S' = exp2(G_C) S + (beta exp2(G_C - G) K)^T E

Where keys are alike, Y, N, E and P have two parts: corrections cancel, but not what 16 bits do not hold of them.

A warpgroup has 64 of the values' dimensions; two are one partition, which is compiled once. One more makes P, a warp
makes what depends on gates alone, one copies.
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
    clear_padding,
    describe,
    first_slot,
    load_state,
    locate,
    locate_segment,
    locate_walk,
    store_state,
    wide,
    within,
)
from keraunos.kernels.gated_delta_rule.cuda.parts import EPSILON, read, read_known
from keraunos.kernels.gluon import copy_in, copy_out, lengths, thread_barrier

# Chunks at a time whose values, N and P are in shared memory.
TURNS = gl.constexpr(2)


@gluon.jit
def copy(tiles, barriers, descriptors, alike, size, blank, H: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
         REVERSE: gl.constexpr, OUTPUT: gl.constexpr):
    """A partition of one warp: copies queries and keys into a ring of stages, values and N into rings of two.

    The rest of N is copied where it counts. blank: copies of values begin so many tokens later; beyond the end they are
    zeros.
    """
    q_s, k_s, v_s, n_s, _ = tiles
    full, _, empty, n_full, taken, v_full, v_empty = barriers
    q_desc, k_desc, v_desc, n_desc = descriptors
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        turn = i % TURNS
        at = (count - 1 - i) if REVERSE else i
        fine = gl.load(alike + at * H) != 0
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        arrived = full.index(slot)
        mbarrier.expect(arrived, (2 if OUTPUT else 1) * k_desc.block_type.nbytes)
        copy_in(k_desc, [at * C, 0], arrived, k_s.index(slot))
        if OUTPUT:
            copy_in(q_desc, [at * C, 0], arrived, q_s.index(slot))
        mbarrier.wait(taken.index(turn), ((i // TURNS) & 1) ^ 1)
        arrived = n_full.index(turn)
        if fine:
            mbarrier.expect(arrived, 2 * n_desc.block_type.nbytes)
        else:
            mbarrier.expect(arrived, n_desc.block_type.nbytes)
        copy_in(n_desc, [at * H * 2 * C, 0], arrived, n_s.index(2 * turn))
        if fine:
            copy_in(n_desc, [at * H * 2 * C + C, 0], arrived, n_s.index(2 * turn + 1))
        mbarrier.wait(v_empty.index(turn), ((i // TURNS) & 1) ^ 1)
        arrived = v_full.index(turn)
        mbarrier.expect(arrived, v_desc.block_type.nbytes)
        copy_in(v_desc, [at * C if OUTPUT else at * C + blank, 0], arrived, v_s.index(turn))


@gluon.jit
def gates(vectors, barriers, inputs, known, size, scale, H: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
          REVERSE: gl.constexpr, GATED: gl.constexpr, BETA: gl.constexpr, NORM: gl.constexpr):
    """A partition of one warp: what depends on gates alone, as soon as a stage is free.

    For each stage: ``exp2(G)`` and ``beta exp2(G_C - G)`` of keys as long as they are, ``scale exp2(G)``; beta; G, and
    with norms beta of keys as long as they are; whether keys are alike; and ``exp2(G_C)``.
    """
    factors_s, alike_s, totals_s = vectors
    full, _, empty, _, _, _, _ = barriers
    FACTORS: gl.constexpr = 7 if NORM else 6
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        of = slot * FACTORS
        at = (count - 1 - i) if REVERSE else i
        x, strength = read(inputs, at, size, C, GATED, BETA)
        of_keys, fine = read_known(known, at, H, C, NORM)
        G = gl.associative_scan(x, 0, add, reverse=REVERSE)
        total = gl.sum(x, 0)
        enter = gl.exp2(G)
        late = gl.exp2(gl.minimum(total - G, 0.0)) * strength
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        factors_s.index(of).store(enter * of_keys)
        factors_s.index(of + 1).store(enter * scale)
        factors_s.index(of + 2).store(late * of_keys)
        totals_s.index(slot).store(gl.full([1], 1.0, gl.float32, FLAG) * gl.exp2(total))
        factors_s.index(of + 3).store(strength)
        factors_s.index(of + 4).store(strength)
        factors_s.index(of + 5).store(G)
        if NORM:
            factors_s.index(of + 6).store(strength * of_keys)
        alike_s.index(slot).store(gl.full([1], 1, gl.int32, FLAG) * fine)
        thread_barrier()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def pair(tiles, vectors, barriers, size, scale, C: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr,
         NORM: gl.constexpr, OUTPUT: gl.constexpr):
    """A partition of one warpgroup: P of each chunk, and with norms the factors of queries."""
    q_s, k_s, _, _, p_s = tiles
    factors_s, alike_s, _ = vectors
    full, ready, empty, _, taken, _, _ = barriers
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
    # Without outputs there is none.
    count = gl.cdiv(size, C) if OUTPUT else 0
    for i in range(count):
        slot = i % STAGES
        turn = i % TURNS
        of = slot * FACTORS
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        q = q_s.index(slot)
        if NORM:
            squares = warpgroup_mma(q, q.permute((1, 0)), none, use_acc=False, is_async=True)
            squares = warpgroup_mma_wait(0, deps=[squares])
            of_queries = gl.rsqrt(gl.sum(gl.where(rows == columns, squares, 0.0), 1) + EPSILON)
            factors_s.index(of + 1).store(factors_s.index(of + 1).load(OF_ROWS) * of_queries)
        a = warpgroup_mma(q, k_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        apart = factors_s.index(of + 5).load(OF_ROWS)[:, None] - factors_s.index(of + 5).load(OF_COLUMNS)[None, :]
        reach = gl.exp2(gl.where(seen, apart, -float("inf")))
        reach *= factors_s.index(of + (6 if NORM else 3)).load(OF_COLUMNS)[None, :]
        a = warpgroup_mma_wait(0, deps=[a])
        if NORM:
            a *= (of_queries * scale)[:, None] * reach
        else:
            a *= reach * scale
        mbarrier.wait(taken.index(turn), ((i // TURNS) & 1) ^ 1)
        p_s.index(2 * turn).store(a.to(dtype))
        if gl.max(alike_s.index(slot).load(FLAG), 0) != 0:
            p_s.index(2 * turn + 1).store((a - wide(a.to(dtype))).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(ready.index(turn), count=1)
        mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def multiply(tiles, vectors, barriers, goals, states, size, last, before, part, H: gl.constexpr, C: gl.constexpr,
             K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
             GROUP: gl.constexpr, REVERSE: gl.constexpr, BETA: gl.constexpr, NORM: gl.constexpr, INIT: gl.constexpr,
             FINAL: gl.constexpr, SAVE: gl.constexpr, SPLIT: gl.constexpr, OUTPUT: gl.constexpr,
             MAY_START: gl.constexpr, STORED: gl.constexpr, stride_sk: gl.constexpr, stride_sv: gl.constexpr):
    """A partition of a warpgroup for each 64 of the values' dimensions, for which it has the state.

    before: the chunks that the walk has before its own; part: see ``walk_kernel``.
    """
    q_s, k_s, v_s, n_s, p_s = tiles
    factors_s, alike_s, totals_s = vectors
    full, ready, empty, n_full, taken, v_full, v_empty = barriers
    o_s, o_desc, e_desc, r_desc = goals
    WARPS: gl.constexpr = BV // 16
    h0, ht, kept, begins = states
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
    o_state = (o_v * stride_sv)[:, None] + (o_k * stride_sk)[None, :]
    none = gl.zeros([BV, C], gl.float32, W)
    state = gl.zeros([BV, BK], gl.float32, WS)
    if not OUTPUT:
        # A column of the matrix starts as one of the identity, and is no part of the state.
        column = o_v + (part - 1) * BV
        state = gl.where(column[:, None] == o_k[None, :], 1.0, state)
        if INIT:
            own = (part == 0) & (before == 0)
            if MAY_START:
                own = own & begins
            inside = (o_v < gl.where(own, V, 0))[:, None] & (o_k < K)[None, :]
            state += gl.load(h0 + o_state, mask=inside, other=0.0).to(gl.float32)
    elif INIT:
        if SPLIT:
            state = load_state(h0 + (o_v[:, None] + (o_k * V)[None, :]), o_v, o_k, V, K, BV, BK)
        elif not MAY_START:  # noqa: SIM114
            state = load_state(h0 + o_state, o_v, o_k, V, K, BV, BK)
        elif begins:
            state = load_state(h0 + o_state, o_v, o_k, V, K, BV, BK)
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        turn = i % TURNS
        of = slot * FACTORS
        at = (count - 1 - i) if REVERSE else i
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        k = k_s.index(slot)
        left = gl.convert_layout(state.to(dtype), LEFT)
        y = warpgroup_mma(left, k.permute((1, 0)), none, use_acc=False, is_async=True)
        if OUTPUT:
            o = warpgroup_mma(left, q_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        if SAVE:
            step = (before + i) if SPLIT else i
            if (step > 0) & (step % GROUP == 0):
                p_kept = kept + (step // GROUP).to(gl.int64) * (H * V * K)
                store_state(p_kept + (o_v * K)[:, None] + o_k[None, :], state.to(dtype), i >= 0, o_v, o_k, V, K,
                            BV, BK)
        if OUTPUT:
            y, o = warpgroup_mma_wait(0, deps=[y, o])
        else:
            y = warpgroup_mma_wait(0, deps=[y])
        mbarrier.wait(v_full.index(turn), (i // TURNS) & 1)
        own_v = v_s.index(turn).permute((1, 0))
        rest_s = o_s.permute((1, 0)) if SAVE else own_v
        # Loaded no sooner: the products leave no registers for them.
        enter = factors_s.index(of).load(OF_TOKENS)[None, :]
        alike = gl.max(alike_s.index(slot).load(FLAG), 0)
        fine = alike != 0
        y = wide(own_v.load(W)) - y * enter
        u = y * factors_s.index(of + 3).load(OF_TOKENS)[None, :] if BETA else y
        left = gl.convert_layout(u.to(dtype), LEFT)
        mbarrier.wait(n_full.index(turn), (i // TURNS) & 1)
        if fine:
            u = y * factors_s.index(of + 4).load(OF_TOKENS)[None, :] if BETA else y
            rest = gl.convert_layout((u - wide(u.to(dtype))).to(dtype), LEFT)
            y = warpgroup_mma(left, n_s.index(2 * turn + 1).permute((1, 0)), y)
            y = warpgroup_mma(rest, n_s.index(2 * turn).permute((1, 0)), y)
        e = warpgroup_mma(left, n_s.index(2 * turn).permute((1, 0)), y, is_async=True)
        state = state * gl.max(totals_s.index(slot).load(FLAG), 0)
        if OUTPUT:
            mbarrier.wait(ready.index(turn), (i // TURNS) & 1)
            o = o * factors_s.index(of + 1).load(OF_TOKENS)[None, :]
        e = warpgroup_mma_wait(0, deps=[e])
        high = e.to(dtype)
        if fine:
            # What 16 bits leave of E waits in shared memory: registers have no room for it.
            if SAVE:
                tma.store_wait(0)
            rest_s.store((e - wide(high)).to(dtype))
            if SAVE:  # noqa: SIM102
                if alike > 1:
                    fence_async_shared()
                    thread_barrier()
                    copy_out(r_desc, [at * C, 0], o_s)
        late = e * factors_s.index(of + 2).load(OF_TOKENS)[None, :]
        state = warpgroup_mma(gl.convert_layout(late.to(dtype), LEFT_S), k, state, is_async=True)
        if OUTPUT:
            o = warpgroup_mma(gl.convert_layout(high, LEFT), p_s.index(2 * turn).permute((1, 0)), o, is_async=True)
            tma.store_wait(0)
            if SAVE:
                # E takes the place of the values.
                own_v.store(high)
                if i > 0:
                    mbarrier.arrive(v_empty.index((i + 1) % TURNS), count=1)
            state, o = warpgroup_mma_wait(0, deps=[state, o])
        else:
            state = warpgroup_mma_wait(0, deps=[state])
        if fine:
            low = rest_s.load(W)
            late = (wide(high) + wide(low)) * factors_s.index(of + 2).load(OF_TOKENS)[None, :]
            rest = (late - wide(late.to(dtype))).to(dtype)
            state = warpgroup_mma(gl.convert_layout(rest, LEFT_S), k, state, is_async=True)
            if OUTPUT:
                o = warpgroup_mma(gl.convert_layout(high, LEFT), p_s.index(2 * turn + 1).permute((1, 0)), o,
                                  is_async=True)
                o = warpgroup_mma(gl.convert_layout(low, LEFT), p_s.index(2 * turn).permute((1, 0)), o, is_async=True)
                state, o = warpgroup_mma_wait(0, deps=[state, o])
            else:
                state = warpgroup_mma_wait(0, deps=[state])
        if STORED:
            t = at * C + gl.arange(0, C, layout=OF_TOKENS)[None, :]
            d = gl.arange(0, BV, layout=gl.SliceLayout(1, W))[:, None]
            gl.store(o_desc + (t.to(gl.int64) * (H * V) + d), o.to(dtype),
                     mask=within(t < size, d, V, BV))
        elif OUTPUT:
            o_s.permute((1, 0)).store(o.to(dtype))
        fence_async_shared()
        thread_barrier()
        # Copies out go before those into what becomes free.
        if OUTPUT and not STORED:
            copy_out(o_desc, [at * C, 0], o_s)
        if SAVE:
            copy_out(e_desc, [at * C, 0], v_s.index(turn))
        else:
            mbarrier.arrive(v_empty.index(turn), count=1)
        mbarrier.arrive(empty.index(slot), count=1)
        mbarrier.arrive(taken.index(turn), count=1)
    tma.store_wait(0)
    if not OUTPUT:
        column += V
        goal = gl.where(part == 0, o_v, column)
        inside = (goal < gl.where(part == 0, V, V + K))[:, None] & (o_k < K)[None, :]
        gl.store(ht + goal[:, None] + (o_k * (V + K))[None, :], state, mask=inside)
    elif FINAL:
        store_state(ht + o_state, state, last, o_v, o_k, V, K, BV, BK)


@gluon.jit(do_not_specialize=lengths("qkvgb", "T", "N", "L"))
def walk_kernel(
    q, k, v, g, beta, near, alike, norms, h0, cu_seqlens, pool, slots, has_initial, into,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_bb, stride_bt, stride_bh, scale, T, N, L,
    o, ht, errors, rest, states,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, PARTS: gl.constexpr,
    stride_ss: gl.constexpr, stride_sh: gl.constexpr, stride_sk: gl.constexpr, stride_sv: gl.constexpr,
    STORED: gl.constexpr,
):
    """``o`` ``[B, T, H, V]`` and the final states ``ht``, of one head of one sequence for each program.

    For gradients: ``errors`` ``[B, T, H, V]``, E; ``rest``, what its dtype leaves of that where ``alike`` is 2; and
    ``states`` ``[groups, H, V, K]``, those before every GROUP chunks, but for the first.

    near, alike, norms: see ``prepare_kernel``; with norms, queries and keys are divided by their lengths. h0: initial
    states. g None: no gates; beta None: ones.

    K, V: the dimensions of q and k, and of v and o, in tiles of BK and BV. RQ, RK, RV, RG, RB: how many heads
    share each of an array's.

    SPLIT: a program walks over one segment of L tokens, from its own state in h0 ``[segments, H, K, V]``. o None: what
    segments, but for the last, leave, which goes to ht ``[segments, H, K, V + K]``: the state, of the first one from
    h0, and of others from zeros; beside it the matrix, which takes the state before a segment to the one after, of all
    but the first. Each takes PARTS programs, of which the first one has the state.

    pool: in place of h0, and of ht, with slots and has_initial as in ``outputs_kernel`` of linear attention; stride_s:
    strides of states. STORED: o, which may overwrite ``into``, is stored, not copied.
    """
    # With gradients the walk has no registers left to know where its sequence is, other than by the program.
    i_h, i_o = locate_walk(cu_seqlens, H, PACKED and not SPLIT and errors is None)
    OUTPUT: gl.constexpr = o is not None
    before = 0
    part = 0
    blank = 0
    none = T < 0
    if SPLIT:
        if not OUTPUT:
            part = i_o % PARTS
            i_o = i_o // PARTS
            if not PACKED:
                i_o += i_o // (gl.cdiv(T, L) - 1)
        i_n, i_b, token, size, last, before = locate_segment(cu_seqlens, i_o, T, N, L, C, PACKED, REVERSE)
        none = (size <= 0) & (before > 0)
        if not OUTPUT:
            # Nobody goes on from the last one, nor from none.
            if last:
                return
            size = gl.where((part > 0) & (before == 0), 0, size)
            # Nothing is where the matrix would have values.
            blank = gl.where(part > 0, gl.cdiv(size, C) * C, 0)
        before = before // C
    else:
        i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, T, PACKED, False, REVERSE)
    POOL: gl.constexpr = pool is not None
    MAY_START: gl.constexpr = has_initial is not None
    begins = last
    if POOL:
        slot = gl.load(slots + i_n).to(gl.int64)
        done = size <= 0
        if MAY_START:
            begins = gl.load(has_initial + i_n) != 0
            done = done & begins
        none = none | done | (slot < 0)
        if OUTPUT:
            clear_padding(o, cu_seqlens, N, slot, i_o, i_h, token, size, T, H, C, V, BV)
    if POOL or (PACKED and SPLIT):  # noqa: SIM102
        if none:
            return
    dtype: gl.constexpr = k.dtype.element_ty
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    INIT: gl.constexpr = h0 is not None or POOL
    FINAL: gl.constexpr = ht is not None
    GATED: gl.constexpr = g is not None
    BETA: gl.constexpr = beta is not None
    NORM: gl.constexpr = norms is not None
    SAVE: gl.constexpr = errors is not None

    first = first_slot(i_n, token, size, T, C, PACKED) * H + i_h
    chunks = gl.maximum(gl.cdiv(size, C), 1)
    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, BLOCK)
    v_desc = describe(v, i_b, token, i_h // RV, size, stride_vb, stride_vt, stride_vh, C, V, BV, VALUES)
    # Something else stands for what is absent, and nobody reads it.
    q_desc = k_desc
    o_desc = v_desc
    if OUTPUT:
        q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, BLOCK)
        if STORED:
            o_desc = o + ((i_b.to(gl.int64) * T + token) * H + i_h) * V
        else:
            o_desc = describe(o, i_b, token, i_h, size, T.to(gl.int64) * (H * V), H * V, V, C, V, BV, VALUES)
    e_desc = o_desc
    r_desc = o_desc
    n_desc = tma.make_tensor_descriptor(near + first * (2 * C * C), [((chunks - 1) * H + 1) * (2 * C), C], [C, 1],
                                        [C, C], SQUARE)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    v_s = gl.allocate_shared_memory(dtype, [TURNS, C, BV], VALUES)
    n_s = gl.allocate_shared_memory(dtype, [2 * TURNS, C, C], SQUARE)
    q_s = k_s
    p_s = n_s
    o_s = v_s.index(0)
    if OUTPUT:
        q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
        p_s = gl.allocate_shared_memory(dtype, [2 * TURNS, C, C], SQUARE)
        o_s = gl.allocate_shared_memory(dtype, [C, BV], VALUES)
    factors_s = gl.allocate_shared_memory(gl.float32, [(7 if NORM else 6) * STAGES, C], VECTOR)
    alike_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1], VECTOR)
    totals_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER)
    n_full = gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2 if OUTPUT else 1)
    for i in gl.static_range(TURNS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(n_full.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    fence_async_shared()

    p_h0 = k
    p_ht = k
    p_g = k
    p_beta = k
    p_norms = near
    p_kept = k
    if SAVE:
        e_desc = describe(errors, i_b, token, i_h, size, T.to(gl.int64) * (H * V), H * V, V, C, V, BV, VALUES)
        r_desc = describe(rest, i_b, token, i_h, size, T.to(gl.int64) * (H * V), H * V, V, C, V, BV, VALUES)
        first_group = first_slot(i_n, token * 0 if SPLIT else token, size, T, GROUP * C, PACKED)
        p_kept = states + (first_group * H + i_h) * (V * K)
    if h0 is not None:
        i_init = i_o if OUTPUT else i_n
        p_h0 = h0 + (i_init.to(gl.int64) * H + i_h) * K * V
    elif POOL:
        p_h0 = pool + (slot * stride_ss + i_h.to(gl.int64) * stride_sh)
    if POOL and OUTPUT:
        p_ht = ht + (slot * stride_ss + i_h.to(gl.int64) * stride_sh)
    elif FINAL:
        i_final = i_n if OUTPUT else i_o
        p_ht = ht + (i_final.to(gl.int64) * H + i_h) * K * (V if OUTPUT else V + K)
    if GATED:
        p_g = g + i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
    if BETA:
        p_beta = beta + i_b.to(gl.int64) * stride_bb + token * stride_bt + (i_h // RB).to(gl.int64) * stride_bh
    if NORM:
        p_norms = norms + first * C
    p_alike = alike + first
    tiles = (q_s, k_s, v_s, n_s, p_s)
    vectors = (factors_s, alike_s, totals_s)
    barriers = (full, ready, empty, n_full, taken, v_full, v_empty)
    descriptors = (q_desc, k_desc, v_desc, n_desc)
    inputs = (p_g, stride_gt, p_beta, stride_bt)
    known = (p_alike, p_norms)
    ends = (p_h0, p_ht, p_kept, begins)
    goals = (o_s, o_desc, e_desc, r_desc)
    # Two warpgroups of walkers leave the registers of a multiprocessor for as much as the pair warpgroup needs.
    WIDE: gl.constexpr = BV == 128
    gl.warp_specialize(
        [
            (pair, (tiles, vectors, barriers, size, scale, C, STAGES, REVERSE, NORM, OUTPUT)),
            (multiply, (tiles, vectors, barriers, goals, ends, size, last, before, part, H, C, K, V, BK, BV, STAGES,
                        GROUP, REVERSE, BETA, NORM, INIT, FINAL, SAVE, SPLIT, OUTPUT, MAY_START, STORED, stride_sk,
                        stride_sv)),
            (gates, (vectors, barriers, inputs, known, size, scale, H, C, STAGES, REVERSE, GATED, BETA, NORM)),
            (copy, (tiles, barriers, descriptors, p_alike, size, blank, H, C, STAGES, REVERSE, OUTPUT)),
        ],
        [8 if WIDE else 4, 1, 1],
        [200 if WIDE else 216, 24, 24],
    )
