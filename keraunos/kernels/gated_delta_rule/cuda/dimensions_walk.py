"""The walk that makes outputs with gates per token and dimension of the key, with the state in registers.

It is the walk of ``walk.py`` with other factors. With S the state before a chunk, ``G_i`` for each dimension the sum of
its gates up to and with token i, base 2, and N and P of ``dimensions.py``:

    Y = V - (K o exp2(G)) S                            the errors before the chunk
    E = Y + N beta Y                                   the errors that tokens correct
    O = scale (Q o exp2(G)) S + P beta E
    S' = exp2(G_C) o S + (K o exp2(G_C - G))^T beta E

A warpgroup has 64 of the values' dimensions: none waits for another. One more makes the three products of queries, keys
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

from keraunos.kernels.device.hopper import (
    FAINT,
    LOG2E,
    add,
    describe,
    first_slot,
    load_state,
    locate,
    store_state,
    wide,
    within,
)
from keraunos.kernels.gated_delta_rule.cuda.dimensions import IS_FINE
from keraunos.kernels.gated_delta_rule.cuda.inverse import BLOCK
from keraunos.kernels.gluon import copy_in, copy_out, lengths, thread_barrier

# Dimensions of a key that are worked on at a time.
PART = gl.constexpr(64)
# Blocks of tokens of a chunk, of which a warp has one, and a thread all tokens of two dimensions.
BLOCKS = gl.constexpr(4)
TOKENS = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))
IN_BLOCKS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
OF_BLOCKS = gl.constexpr(gl.BlockedLayout([1, 4, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))


@gluon.jit
def in_blocks(x):
    """Gates ``[C, PART]`` as ``[BLOCKS, BLOCK, PART]``."""
    x = gl.maximum(wide(x), FAINT)
    return gl.convert_layout(x.reshape([BLOCKS, BLOCK, PART]), IN_BLOCKS)


@gluon.jit
def within_blocks(x, REVERSE: gl.constexpr):
    """Sums of a block's gates up to and with each token.

    In the order of memory, too, where the recurrence has the other one: such sums would be over threads.
    """
    sums = gl.associative_scan(x, 1, add)
    if REVERSE:
        sums = gl.expand_dims(gl.sum(x, 1), 1) - (sums - x)
    return sums


@gluon.jit
def order_of(block, REVERSE: gl.constexpr):
    """The place of a block in the recurrence."""
    return BLOCKS - 1 - block if REVERSE else block


@gluon.jit
def sums_from(blocks, half, edge, REVERSE: gl.constexpr):
    """The sums of blocks from a boundary to each block ``[BLOCKS, 1, PART]``, base 2; for those before it, times -1.

    The boundary is before block ``edge`` of each ``half`` blocks, in the order of the recurrence.
    """
    one = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, OF_BLOCKS)))[:, None]
    other = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, OF_BLOCKS)))[None, :]
    one, other = order_of(one, REVERSE), order_of(other, REVERSE)
    at = one // half * half + edge
    sign = gl.where((at <= other) & (other < one), 1.0, 0.0) - gl.where((one <= other) & (other < at), 1.0, 0.0)
    sums = gl.sum((sign * LOG2E)[:, :, None] * blocks[None, :, :], 1)
    return gl.expand_dims(gl.convert_layout(sums, gl.SliceLayout(1, IN_BLOCKS)), 1)


@gluon.jit
def load_blocks(sums_s):
    """The sums of each block's gates, of PART dimensions."""
    return sums_s.load(gl.SliceLayout(0, OF_BLOCKS))


@gluon.jit
def flat(x):
    """Blocks of tokens as tokens ``[C, PART]``."""
    return gl.convert_layout(x.reshape([BLOCKS * BLOCK, PART]), TOKENS)


@gluon.constexpr_function
def of_rows(BK):
    """The layout of 64 rows of a state: a thread has 16 bytes at a time, a warp the rows that products give it."""
    columns = [[0, n] for n in (1, 2, 4, 32, 64) if n < BK]
    return gl.DistributedLinearLayout([*columns, [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
                                      [[16, 0], [32, 0]], [], [64, BK])


@gluon.jit
def store_kept(p_kept, state, first, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr):
    """Stores PART rows of a state ``[V, K]``, from the given one on."""
    BK: gl.constexpr = state.shape[1]
    ROWS: gl.constexpr = of_rows(BK)
    o_v = first + gl.arange(0, PART, layout=gl.SliceLayout(1, ROWS))
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(0, ROWS))
    mask = within(within((o_v >= 0)[:, None], o_v[:, None], V, BV), o_k[None, :], K, BK)
    gl.store(p_kept + (o_v * K)[:, None] + o_k[None, :], gl.convert_layout(state, ROWS), mask=mask)


@gluon.jit
def copy(tiles, barriers, descriptors, alike, size, first_value, H: gl.constexpr, C: gl.constexpr,
         WALKERS: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr):
    """A partition of one warp: copies chunks into the rings of stages.

    One has queries, keys and gates, the other what is read later: v, N, P, and what ``work_in`` puts there. Where keys
    are alike, what 16 bits leave of a chunk's takes one more stage of the second.
    """
    q_s, k_s, g_s, _, v_s, n_s, p_s = tiles
    full, full_late, _, free, free_late = barriers
    q_desc, k_desc, v_desc, n_desc, p_desc, g_desc = descriptors
    SQUARES: gl.constexpr = 2 * n_desc.block_type.nbytes
    count = gl.cdiv(size, C)
    m = size * 0
    for i in range(count):
        slot = i % STAGES
        at = (count - 1 - i) if REVERSE else i
        fine = gl.load(alike + at * H) == IS_FINE
        mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
        arrived = full.index(slot)
        mbarrier.expect(arrived, 3 * k_desc.block_type.nbytes)
        copy_in(g_desc, [at * C, 0], arrived, g_s.index(slot))
        copy_in(k_desc, [at * C, 0], arrived, k_s.index(slot))
        copy_in(q_desc, [at * C, 0], arrived, q_s.index(slot))
        slot = m % STAGES
        mbarrier.wait(free_late.index(slot), ((m // STAGES) & 1) ^ 1)
        arrived = full_late.index(slot)
        mbarrier.expect(arrived, WALKERS * v_desc.block_type.nbytes + SQUARES)
        copy_in(n_desc, [at * H * 2 * C, 0], arrived, n_s.index(slot))
        for j in gl.static_range(WALKERS):
            copy_in(v_desc, [at * C, first_value + j * PART], arrived, v_s.index(slot * WALKERS + j))
        copy_in(p_desc, [at * H * 2 * C, 0], arrived, p_s.index(slot))
        m += 1
        if fine:
            slot = m % STAGES
            mbarrier.wait(free_late.index(slot), ((m // STAGES) & 1) ^ 1)
            arrived = full_late.index(slot)
            mbarrier.expect(arrived, SQUARES)
            copy_in(n_desc, [at * H * 2 * C + C, 0], arrived, n_s.index(slot))
            copy_in(p_desc, [at * H * 2 * C + C, 0], arrived, p_s.index(slot))
            m += 1


@gluon.jit
def work_in(tiles, vectors, barriers, inputs, size, H: gl.constexpr, C: gl.constexpr, K: gl.constexpr,
            BK: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr, BETA: gl.constexpr, NORM: gl.constexpr):
    """A partition of one warpgroup: ``Q o exp2(G)``, ``K o exp2(G)`` and ``K o exp2(G_C - G)`` of each chunk.

    Where keys are alike, what 16 bits leave of the last, too. For each late stage: ``exp2(G_C)``; beta; whether keys
    are alike; and one over the lengths of queries and keys, by which only the last is divided.
    """
    q_s, k_s, g_s, x_s, _, _, _ = tiles
    sums_s, decay_s, strength_s, alike_s, lengths_s = vectors
    full, full_late, ready, _, free_late = barriers
    beta, stride_beta, alike, norms = inputs
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    OF_TOKENS: gl.constexpr = gl.SliceLayout(1, TOKENS)
    PARTS: gl.constexpr = BK // PART
    dtype: gl.constexpr = k_s.dtype
    t = gl.arange(0, C, layout=EACH)
    t_of_both = gl.arange(0, 2 * C, layout=EACH)
    count = gl.cdiv(size, C)
    m = size * 0
    for i in range(count):
        slot = i % STAGES
        late_slot = m % STAGES
        at = (count - 1 - i) if REVERSE else i
        left = size - at * C
        if BETA:
            strength = gl.load(beta + (at * C + t).to(gl.int64) * stride_beta, mask=t < left, other=0.0).to(gl.float32)
        if NORM:
            both = gl.load(norms + at * (H * 2 * C) + t_of_both)
        fine = (gl.load(alike + at * H) == IS_FINE).to(gl.int32)
        rest_slot = (m + 1) % STAGES
        mbarrier.wait(free_late.index(late_slot), ((m // STAGES) & 1) ^ 1)
        if fine != 0:
            mbarrier.wait(free_late.index(rest_slot), (((m + 1) // STAGES) & 1) ^ 1)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        alike_s.index(late_slot).store(gl.full([1], 1, gl.int32, EACH) * fine)
        if BETA:
            strength_s.index(2 * late_slot).store(strength)
            strength_s.index(2 * late_slot + 1).store(strength)
        if NORM:
            lengths_s.index(late_slot).store(both)
        for part in gl.static_range(PARTS):
            x = in_blocks(g_s.index(slot).slice(part * PART, PART, 1).load(TOKENS))
            sums_s.index(part).store(gl.sum(x, 1))
            blocks = load_blocks(sums_s.index(part))
            total = gl.sum(blocks, 0) * LOG2E
            decay_s.index(late_slot).slice(part * PART, PART).store(gl.exp2(total))
            G = within_blocks(x, REVERSE) * LOG2E + sums_from(blocks, BLOCKS, 0, REVERSE)
            total = gl.convert_layout(total, gl.SliceLayout(0, gl.SliceLayout(1, G.type.layout)))
            q_c = q_s.index(slot).slice(part * PART, PART, 1)
            k_c = k_s.index(slot).slice(part * PART, PART, 1)
            after = flat(total[None, None, :] - G)
            to = gl.exp2(flat(G))
            q_c.store((wide(q_c.load(TOKENS)) * to).to(dtype))
            key = wide(k_c.load(TOKENS))
            k_c.store((key * to).to(dtype))
            late = key * gl.exp2(after)
            if NORM:
                late *= lengths_s.index(late_slot).slice(C, C).load(OF_TOKENS)[:, None]
            x_s.index(late_slot).slice(part * PART, PART, 1).store(late.to(dtype))
            if fine != 0:
                x_s.index(rest_slot).slice(part * PART, PART, 1).store((late - wide(late.to(dtype))).to(dtype))
        mbarrier.wait(full_late.index(late_slot), (m // STAGES) & 1)
        m += 1
        if fine != 0:
            mbarrier.wait(full_late.index(rest_slot), (m // STAGES) & 1)
            m += 1
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(ready.index(late_slot), count=1)
        if fine != 0:
            mbarrier.arrive(ready.index(rest_slot), count=1)


@gluon.jit
def multiply(tiles, vectors, barriers, goals, states, size, last, first_value, scale, WALKER: gl.constexpr,
             C: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
             WALKERS: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr, BETA: gl.constexpr,
             NORM: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr, SAVE: gl.constexpr):
    """A partition of one warpgroup: PART of the values' dimensions, for which it has the state.

    first_value: the program's first dimension of values; BV: those of all programs.
    """
    q_s, k_s, _, x_s, v_s, n_s, p_s = tiles
    _, decay_s, strength_s, alike_s, lengths_s = vectors
    _, _, ready, free, free_late = barriers
    outs_s, o_desc, e_desc = goals
    o_s = outs_s.index(WALKER)
    h0, ht, kept = states
    # A chunk's tokens are columns; so are the dimensions of keys of a state.
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    WS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, WS, 2)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, W)
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = k_s.dtype
    own = first_value + WALKER * PART
    o_v = own + gl.arange(0, PART, layout=gl.SliceLayout(1, WS))
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(0, WS))
    o_state = o_v[:, None] + (o_k * V)[None, :]
    none = gl.zeros([PART, C], gl.float32, W)
    state = gl.zeros([PART, BK], gl.float32, WS)
    if INIT:
        state = load_state(h0 + o_state, o_v, o_k, V, K, BV, BK)
    count = gl.cdiv(size, C)
    m = size * 0
    for i in range(count):
        slot = i % STAGES
        late_slot = m % STAGES
        rest_slot = (m + 1) % STAGES
        at = (count - 1 - i) if REVERSE else i
        near = n_s.index(late_slot).permute((1, 0))
        pairs = p_s.index(late_slot).permute((1, 0))
        left = gl.convert_layout(state.to(dtype), LEFT)
        # Who arrives there has waited for the copies.
        mbarrier.wait(ready.index(late_slot), (m // STAGES) & 1)
        y = warpgroup_mma(left, k_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        o = warpgroup_mma(left, q_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        if SAVE:
            store_kept(kept + (size * 0 + at).to(gl.int64) * (H * V * K), state.to(dtype), own, K, V, BV)
        y, o = warpgroup_mma_wait(0, deps=[y, o])
        thread_barrier()
        mbarrier.arrive(free.index(slot), count=1)
        # Loaded no sooner: the products leave no registers for them.
        alike = gl.max(alike_s.index(late_slot).load(FLAG), 0)
        fine = alike != 0
        own_v = v_s.index(late_slot * WALKERS + WALKER).permute((1, 0))
        rest_s = o_s.permute((1, 0)) if SAVE else own_v
        y = wide(own_v.load(W)) - (y * lengths_s.index(late_slot).slice(C, C).load(OF_TOKENS)[None, :] if NORM else y)
        u = y * strength_s.index(2 * late_slot).load(OF_TOKENS)[None, :] if BETA else y
        left = gl.convert_layout(u.to(dtype), LEFT)
        if fine:
            u = y * strength_s.index(2 * late_slot + 1).load(OF_TOKENS)[None, :] if BETA else y
            rest = gl.convert_layout((u - wide(u.to(dtype))).to(dtype), LEFT)
            y = warpgroup_mma(left, n_s.index(rest_slot).permute((1, 0)), y)
            y = warpgroup_mma(rest, near, y)
        e = warpgroup_mma(left, near, y, is_async=True)
        state = state * decay_s.index(late_slot).load(gl.SliceLayout(0, WS))[None, :]
        o = o * (lengths_s.index(late_slot).slice(0, C).load(OF_TOKENS)[None, :] * scale if NORM else scale)
        e = warpgroup_mma_wait(0, deps=[e])
        if SAVE:
            # E takes the place of the values.
            own_v.store(e.to(dtype))
        u = e * strength_s.index(2 * late_slot).load(OF_TOKENS)[None, :] if BETA else e
        high = u.to(dtype)
        if fine:
            # What 16 bits leave waits in shared memory: registers have no room for it.
            if SAVE:
                tma.store_wait(0)
            rest_s.store((u - wide(high)).to(dtype))
        state = warpgroup_mma(gl.convert_layout(high, LEFT_S), x_s.index(late_slot), state, is_async=True)
        o = warpgroup_mma(gl.convert_layout(high, LEFT), pairs, o, is_async=True)
        if SAVE:
            fence_async_shared()
            thread_barrier()
            copy_out(e_desc, [at * C, own], v_s.index(late_slot * WALKERS + WALKER))
        tma.store_wait(1 if SAVE else 0)
        state, o = warpgroup_mma_wait(0, deps=[state, o])
        if fine:
            rest = rest_s.load(W)
            state = warpgroup_mma(gl.convert_layout(high, LEFT_S), x_s.index(rest_slot), state, is_async=True)
            state = warpgroup_mma(gl.convert_layout(rest, LEFT_S), x_s.index(late_slot), state, is_async=True)
            o = warpgroup_mma(gl.convert_layout(high, LEFT), p_s.index(rest_slot).permute((1, 0)), o, is_async=True)
            o = warpgroup_mma(gl.convert_layout(rest, LEFT), pairs, o, is_async=True)
            state, o = warpgroup_mma_wait(0, deps=[state, o])
        o_s.permute((1, 0)).store(o.to(dtype))
        fence_async_shared()
        thread_barrier()
        copy_out(o_desc, [at * C, own], o_s)
        if SAVE:
            tma.store_wait(1)
        mbarrier.arrive(free_late.index(late_slot), count=1)
        m += 1
        if fine:
            mbarrier.arrive(free_late.index(rest_slot), count=1)
            m += 1
    tma.store_wait(0)
    if FINAL:
        store_state(ht + o_state, state, last, o_v, o_k, V, K, BV, BK)


@gluon.jit(do_not_specialize=lengths("qkvgb", "T"))
def walk_dimensions_kernel(
    q, k, v, g, beta, near, pairs, alike, norms, h0, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_bb, stride_bt, stride_bh, scale, T,
    o, ht, errors, states,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SHARES: gl.constexpr,
):
    """``o`` ``[B, T, H, V]`` and the final states ``ht``.

    SHARES programs have one head of one sequence: each has as many of the values' dimensions, which need no others.

    For gradients: ``errors`` ``[B, T, H, V]``, E, and ``states`` ``[slots, H, V, K]``, those before each chunk.

    near, pairs, alike, norms: see ``prepare_dimensions_kernel``. h0: initial states. beta None: ones.

    K, V: the dimensions of q and k, and of v and o, in tiles of BK and BV. RQ, RK, RV, RG, RB: how many heads
    share each of an array's.
    """
    i_h = gl.program_id(0) // SHARES % H
    i_o = gl.program_id(0) // (SHARES * H)
    i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, T, PACKED, False, REVERSE)
    WALKERS: gl.constexpr = BV // PART // SHARES
    first_value = gl.program_id(0) % SHARES * (BV // SHARES)
    dtype: gl.constexpr = k.dtype.element_ty
    g_dtype: gl.constexpr = g.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PART], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    VECTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    INIT: gl.constexpr = h0 is not None
    FINAL: gl.constexpr = ht is not None
    BETA: gl.constexpr = beta is not None
    NORM: gl.constexpr = norms is not None
    SAVE: gl.constexpr = errors is not None

    first = first_slot(i_n, token, size, T, C, PACKED) * H + i_h
    rows = ((gl.maximum(gl.cdiv(size, C), 1) - 1) * H + 1) * (2 * C)
    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, TILE)
    q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, TILE)
    v_desc = describe(v, i_b, token, i_h // RV, size, stride_vb, stride_vt, stride_vh, C, V, PART, VALUES)
    o_desc = describe(o, i_b, token, i_h, size, T.to(gl.int64) * (H * V), H * V, V, C, V, PART, VALUES)
    # Something else stands for what is absent, and nobody reads it.
    e_desc = o_desc
    if SAVE:
        e_desc = describe(errors, i_b, token, i_h, size, T.to(gl.int64) * (H * V), H * V, V, C, V, PART, VALUES)
    n_desc = tma.make_tensor_descriptor(near + first * (2 * C * C), [rows, C], [C, 1], [C, C], SQUARE)
    p_desc = tma.make_tensor_descriptor(pairs + first * (2 * C * C), [rows, C], [C, 1], [C, C], SQUARE)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], TILE)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], TILE)
    x_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], TILE)
    GATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], g_dtype)
    g_s = gl.allocate_shared_memory(g_dtype, [STAGES, C, BK], GATES)
    g_desc = describe(g, i_b, token, i_h // RG, size, stride_gb, stride_gt, stride_gh, C, K, BK, GATES)
    v_s = gl.allocate_shared_memory(dtype, [STAGES * WALKERS, C, PART], VALUES)
    n_s = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
    p_s = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
    outs_s = gl.allocate_shared_memory(dtype, [WALKERS, C, PART], VALUES)
    sums_s = gl.allocate_shared_memory(gl.float32, [BK // PART, BLOCKS, PART], VECTORS)
    decay_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
    strength_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES, C], VECTOR)
    alike_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1], VECTOR)
    lengths_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * C], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full_late = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free_late = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(full_late.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=WALKERS)
        mbarrier.init(free_late.index(i), count=WALKERS)
    fence_async_shared()

    p_h0 = k
    p_ht = k
    p_kept = k
    p_beta = k
    p_norms = near
    if INIT:
        p_h0 = h0 + (i_n.to(gl.int64) * H + i_h) * K * V
    if FINAL:
        p_ht = ht + (i_n.to(gl.int64) * H + i_h) * K * V
    if SAVE:
        p_kept = states + first * (V * K)
    if BETA:
        p_beta = beta + i_b.to(gl.int64) * stride_bb + token * stride_bt + (i_h // RB).to(gl.int64) * stride_bh
    if NORM:
        p_norms = norms + first * (2 * C)
    p_alike = alike + first
    tiles = (q_s, k_s, g_s, x_s, v_s, n_s, p_s)
    vectors = (sums_s, decay_s, strength_s, alike_s, lengths_s)
    barriers = (full, full_late, ready, free, free_late)
    descriptors = (q_desc, k_desc, v_desc, n_desc, p_desc, g_desc)
    inputs = (p_beta, stride_bt, p_alike, p_norms)
    goals = (outs_s, o_desc, e_desc)
    ends = (p_h0, p_ht, p_kept)
    if WALKERS == 2:
        gl.warp_specialize(
            [
                (multiply, (tiles, vectors, barriers, goals, ends, size, last, first_value, scale, 0, C, H, K, V, BK,
                            BV, WALKERS, STAGES, REVERSE, BETA, NORM, INIT, FINAL, SAVE)),
                (multiply, (tiles, vectors, barriers, goals, ends, size, last, first_value, scale, 1, C, H, K, V, BK,
                            BV, WALKERS, STAGES, REVERSE, BETA, NORM, INIT, FINAL, SAVE)),
                (work_in, (tiles, vectors, barriers, inputs, size, H, C, K, BK, STAGES, REVERSE, BETA, NORM)),
                (copy, (tiles, barriers, descriptors, p_alike, size, first_value, H, C, WALKERS, STAGES, REVERSE)),
            ],
            [4, 4, 1],
            [200, 88, 24],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (tiles, vectors, barriers, goals, ends, size, last, first_value, scale, 0, C, H, K, V, BK,
                            BV, WALKERS, STAGES, REVERSE, BETA, NORM, INIT, FINAL, SAVE)),
                (work_in, (tiles, vectors, barriers, inputs, size, H, C, K, BK, STAGES, REVERSE, BETA, NORM)),
                (copy, (tiles, barriers, descriptors, p_alike, size, first_value, H, C, WALKERS, STAGES, REVERSE)),
            ],
            [4, 1],
            [104, 24],
        )
