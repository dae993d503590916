"""The walk that makes outputs with a gate per token and dimension of the key.

``G`` is, for each dimension, the sum of a chunk's gates, base 2, in the order of the recurrence, up to and with each
token; ``G_total`` that of the whole chunk, ``m`` half of it. Two warpgroups work gates into q and k, in shared memory:

- where a chunk's gates are mild or moderate, ``q exp2(G - m)`` and ``k exp2(m - G)``, whose products are all the
  chunk's pairs, and the state is kept times ``exp2(m)``;
- where one dimension's are strong, these factors would leave float32. Then ``q exp2(G)`` and ``k exp2(G_total - G)``
  read and make the state, and the two warpgroups make the pairs, from one product for each level of a tree: at a level
  blocks of tokens have two halves, the queries of the later one meet the keys of the earlier one at the boundary,
  ``q_i exp2(G_i - G_mid)`` and ``k_j exp2(G_mid - G_j)``. These factors are not above 1. A token's pair with itself has
  no gate.
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

from keraunos.kernels.gluon import copy_in, copy_out, reinterpret, thread_barrier
from keraunos.kernels.linear_attention.cuda.walk import (
    FAINT,
    LOG2E,
    add,
    describe,
    load_state,
    locate,
    natural_decay,
    settled,
    store_state,
    within,
)

# A chunk has so many blocks of tokens.
BLOCKS = gl.constexpr(4)
# The least sum of a block's gates in any dimension of which float32 has the chunk's factors, and those of a state from
# one chunk to the next, which are their squares: 2 ** -126. Products of tokens that do not see each other may be
# infinite, and are taken away. Chunks past it are strong.
MODERATE = gl.constexpr(-21.8)
# The same for the factors that gradients are multiplied by, if they are float16 and are to have all its digits: half of
# the gates of all blocks, base 2, is no less than -12. Those of moderate chunks, which lie between, are bfloat16.
MILD = gl.constexpr(-4.15)
# What says of which kind a chunk is; of strong ones LOG2E does.
IS_MILD = gl.constexpr(0.0)
IS_MODERATE = gl.constexpr(-1.0)
# What strong chunks' factors, which are not above 1, are stored in float16 times, so that small ones have all digits.
MAGNIFIED = gl.constexpr(32768.0)
# The levels of a chunk's tree.
LEVELS = gl.constexpr(6)


@gluon.jit
def fetch(i, count, stages, arrivals, descriptors, C: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
          BACKWARDS: gl.constexpr, OUTPUT: gl.constexpr, COPIED: gl.constexpr):
    """Begins to copy chunk i into its stage, in the order in which its tiles are wanted."""
    q_s, k_s, v_s, g_s = stages
    given, full, came = arrivals
    q_desc, k_desc, v_desc, g_desc = descriptors
    slot = i % STAGES
    row = ((count - 1 - i) if BACKWARDS else i) * C
    if COPIED:
        mbarrier.expect(given.index(slot), g_desc.block_type.nbytes)
        copy_in(g_desc, [row, 0], given.index(slot), g_s.index(slot))
    arrived = full.index(slot)
    mbarrier.expect(arrived, (1 + OUTPUT) * k_desc.block_type.nbytes)
    if OUTPUT:
        copy_in(q_desc, [row, 0], arrived, q_s.index(slot))
    copy_in(k_desc, [row, 0], arrived, k_s.index(slot))
    arrived = came.index(slot)
    mbarrier.expect(arrived, 2 * v_desc.block_type.nbytes)
    copy_in(v_desc, [row, 0], arrived, v_s.index(2 * slot))
    copy_in(v_desc, [row, HALF], arrived, v_s.index(2 * slot + 1))


@gluon.jit
def load_gates(g_s, g, stride_t, gamma, at, size, C: gl.constexpr, K: gl.constexpr, BK: gl.constexpr,
               GAMMA: gl.constexpr, COPIED: gl.constexpr, LAYOUT: gl.constexpr):
    """The gates of a chunk, in blocks of tokens ``[BLOCKS, tokens, dimensions]``; of tokens after the end none.

    COPIED: they are in shared memory. Wide ones have no room there.
    """
    ROWS: gl.constexpr = gl.BlockedLayout([1, C // BLOCKS, BK // 64], [1, 1, 32], [BLOCKS, 1, 2], [2, 1, 0])
    t = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    inside = (t < size - at * C)[:, None]
    if COPIED:
        x = g_s.load(LAYOUT).to(gl.float32)
    else:
        d = gl.arange(0, BK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        o_g = ((at * C + t).to(gl.int64) * stride_t)[:, None] + d
        x = gl.load(g + o_g, mask=within(inside & (d >= 0), d, K, BK), other=0.0).to(gl.float32)
    if GAMMA:
        x = gl.where(inside, x + gamma, 0.0)
    return gl.convert_layout(x.reshape([BLOCKS, C // BLOCKS, BK]), ROWS)


@gluon.jit
def flat(x, LAYOUT: gl.constexpr):
    """Blocks of tokens as tokens ``[C, dimensions]``."""
    return gl.convert_layout(x.reshape([x.shape[0] * x.shape[1], x.shape[2]]), LAYOUT)


@gluon.jit
def put_sums(x, sums_s, least_s):
    """Leaves the sums of each block's gates, and the least of them."""
    BK: gl.constexpr = x.shape[2]
    blocks = gl.sum(x, 1)
    sums_s.store(blocks)
    least_s.store(gl.min(blocks.reshape([BLOCKS, 2, BK // 2]), 2))


@gluon.jit
def least_of(least_s):
    """The least sum of the gates of any block."""
    EACH: gl.constexpr = gl.BlockedLayout([BLOCKS, 2], [32, 1], [8, 1], [1, 0])
    return gl.min(gl.min(least_s.load(EACH), 1), 0)


@gluon.jit
def around(sums_s, like, unit, REVERSE: gl.constexpr):
    """Sums of blocks, times a unit: of all; before each block, after it, and in its neighbour of the same half."""
    BK: gl.constexpr = like.shape[2]
    ALL: gl.constexpr = gl.BlockedLayout([1, BLOCKS, BK // 64], [1, 1, 32], [BLOCKS, 1, 2], [2, 1, 0])
    OWN: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    blocks = sums_s.load(gl.SliceLayout(0, ALL)) * unit
    one = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, ALL)))[:, None]
    other = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, ALL)))[None, :]
    lower = gl.convert_layout(gl.sum(gl.where((other < one)[:, :, None], blocks[None, :, :], 0.0), 1), OWN)
    higher = gl.convert_layout(gl.sum(gl.where((other > one)[:, :, None], blocks[None, :, :], 0.0), 1), OWN)
    beside = gl.convert_layout(gl.sum(gl.where(((other ^ one) == 1)[:, :, None], blocks[None, :, :], 0.0), 1), OWN)
    total = gl.sum(blocks, 0)
    return total, higher if REVERSE else lower, lower if REVERSE else higher, beside


@gluon.jit
def within_blocks(x, REVERSE: gl.constexpr):
    """``F`` of each token, which differs from G by what is the same for all tokens of its block of tokens.

    Sums in the order of memory do for both orders of the recurrence: others would be sums over threads.
    """
    F = gl.associative_scan(x, 1, add)
    return x - F if REVERSE else F


@gluon.jit
def ends(own, REVERSE: gl.constexpr):
    """F of the ends of blocks whose gates come to ``own``, and what is to be added for G of the blocks alone."""
    none = gl.full(own.shape, 0.0, gl.float32, own.type.layout)
    return none if REVERSE else own, own if REVERSE else none


@gluon.jit
def from_middle(F, into, before, half, LAYOUT: gl.constexpr):
    """``G - m`` of a chunk: from F of each block's tokens, the sums of blocks, and m for each dimension."""
    half = gl.convert_layout(half, gl.SliceLayout(0, gl.SliceLayout(1, F.type.layout)))
    return flat(F * LOG2E + (into * LOG2E + before - half[None, :])[:, None, :], LAYOUT)


@gluon.jit
def load_from_middle(g_s, g, stride_t, gamma, at, size, sums_s, C: gl.constexpr, K: gl.constexpr, BK: gl.constexpr,
                     REVERSE: gl.constexpr, GAMMA: gl.constexpr, COPIED: gl.constexpr, LAYOUT: gl.constexpr):
    """:func:`from_middle` of gates that are loaded once more, and of the sums of blocks in shared memory."""
    x = load_gates(g_s, g, stride_t, gamma, at, size, C, K, BK, GAMMA, COPIED, LAYOUT)
    F = within_blocks(x, REVERSE)
    into = ends(gl.sum(x, 1), REVERSE)[1]
    total, before = around(sums_s, F, LOG2E, REVERSE)[:2]
    return from_middle(F, into, before, total * 0.5, LAYOUT)


@gluon.jit
def put_bfloat16(x, factors_c):
    """Stores the factors of a moderate chunk, in a tile of float16."""
    factors_c.store(x.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.float16, bitcast=True))


@gluon.jit
def load_bfloat16(factors_c, LAYOUT: gl.constexpr):
    """What :func:`put_bfloat16` has stored."""
    x = factors_c.load(LAYOUT).to(gl.int16, bitcast=True)
    return (x.to(gl.int32) << 16).to(gl.float32, bitcast=True)


@gluon.jit
def own_pairs(do_c, v_c, LAYOUT: gl.constexpr):
    """The product of each token's gradient with its own value, made of 64 dimensions at a time."""
    C: gl.constexpr = v_c.shape[0]
    V: gl.constexpr = v_c.shape[1]
    PART: gl.constexpr = 64
    EACH: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    own = gl.zeros([C], gl.float32, gl.SliceLayout(1, EACH))
    for i in gl.static_range(V // PART):
        do = do_c.slice(i * PART, PART, 1).load(EACH).to(gl.float32)
        own += gl.sum(do * v_c.slice(i * PART, PART, 1).load(EACH).to(gl.float32), 1)
    return gl.convert_layout(own, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def halves_meet(q, k, F, out, into, unit, HALF: gl.constexpr, REVERSE: gl.constexpr, LAYOUT: gl.constexpr):
    """The queries of the later ones of each two blocks of HALF tokens, and the keys of the earlier ones, with gates.

    Where HALF are whole blocks: to F is added ``into``, and ``out`` less F is taken.
    """
    C: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    t = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    later = (t // HALF % 2 == (0 if REVERSE else 1))[:, None]
    if HALF < C // BLOCKS:
        F = flat(F, LAYOUT)
        is_last = t % (2 * HALF) == (HALF if REVERSE else HALF - 1)
        # The one of a block that there is, in bits: floats could not leave out the zeros.
        blocks = gl.where(is_last[:, None], F.to(gl.int32, bitcast=True), 0).reshape([C // (2 * HALF), 2 * HALF, D])
        boundary = gl.expand_dims(gl.sum(blocks, 1), 1).to(gl.float32, bitcast=True) * unit
        boundary, _ = gl.broadcast(boundary, blocks)
        boundary = gl.convert_layout(boundary.reshape([C, D]), LAYOUT)
        apart = gl.where(later, F * unit - boundary, boundary - F * unit)
    else:
        upto = F * unit + (into * unit)[:, None, :]
        rest = (out * unit)[:, None, :] - F * unit
        apart = gl.where(later, flat(upto, LAYOUT), flat(rest, LAYOUT))
    return gl.where(later, q, k).to(gl.float32) * gl.exp2(apart)


@gluon.jit
def do_strong(q_c, k_c, g_s, tiles, pairs_s, kinds_s, g, stride_t, gamma, at, size, K: gl.constexpr,
              REVERSE: gl.constexpr, GAMMA: gl.constexpr, COPIED: gl.constexpr, LAYOUT: gl.constexpr):
    """Works the gates of a strong chunk into its q and k, for the state, and makes its pairs."""
    dtype: gl.constexpr = q_c.dtype
    C: gl.constexpr = q_c.shape[0]
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))[:, None]
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))[None, :]
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    x_s, _, sums_s, _ = tiles
    none = gl.zeros([C, C], gl.float32, W)
    b = warpgroup_mma(q_c, k_c.permute((1, 0)), none, use_acc=False, is_async=True)
    pairs = warpgroup_mma_wait(0, deps=[b]).to(dtype)
    x = load_gates(g_s, g, stride_t, gamma, at, size, C, K, q_c.shape[1], GAMMA, COPIED, LAYOUT)
    x = gl.maximum(x, FAINT)
    F = within_blocks(x, REVERSE)
    own = gl.sum(x, 1)
    out, into = ends(own, REVERSE)
    before, behind, beside = around(sums_s, F, LOG2E, REVERSE)[1:]
    odd = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, own.type.layout))[:, None] % 2 == 1
    for level in gl.static_range(LEVELS):
        # Loaded anew, so that what follows from it does not wait in registers from the first level on.
        unit = gl.max(kinds_s.load(FLAG), 0)
        if level == LEVELS - 1:
            # Blocks of two leaves.
            into += gl.where(odd != REVERSE, beside, 0.0) / LOG2E
            out += gl.where(odd == REVERSE, beside, 0.0) / LOG2E
        x = halves_meet(q_c.load(LAYOUT), k_c.load(LAYOUT), F, out, into, unit, 1 << level, REVERSE, LAYOUT)
        # In turn, so that what is read is not written.
        x_c = x_s if level % 2 == 0 else pairs_s
        x_c.store(x.to(dtype))
        fence_async_shared()
        thread_barrier()
        b = warpgroup_mma(x_c, x_c.permute((1, 0)), none, use_acc=False, is_async=True)
        b = warpgroup_mma_wait(0, deps=[b])
        # What is no pair of this level's is one of a later level's.
        pairs = gl.where((rows ^ columns) >= (1 << level), b.to(dtype), pairs)
    seen = (columns >= rows) if REVERSE else (columns <= rows)
    out, into = ends(own, REVERSE)
    unit = gl.max(kinds_s.load(FLAG), 0)
    of_q = gl.exp2(flat(F * unit + (into * unit + before)[:, None, :], LAYOUT))
    of_k = gl.exp2(flat((out * unit + behind)[:, None, :] - F * unit, LAYOUT))
    q = (q_c.load(LAYOUT).to(gl.float32) * of_q).to(dtype)
    k = (k_c.load(LAYOUT).to(gl.float32) * of_k).to(dtype)
    thread_barrier()
    q_c.store(q)
    k_c.store(k)
    pairs_s.slice(0, C, 1).store(gl.where(seen, pairs, 0.0).to(dtype))


@gluon.jit
def work_in_gates(stages, arrivals, ready, tiles, vectors, g, stride_t, gamma, size, scale, sums, strong,
                  C: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr,
                  BACKWARDS: gl.constexpr, OUTPUT: gl.constexpr, SUM: gl.constexpr, FLAG_WALK: gl.constexpr,
                  GAMMA: gl.constexpr, COPIED: gl.constexpr):
    """A partition of two warpgroups: works the gates of each chunk into its q and k, in shared memory.

    ``vectors`` get, for each stage: what the state is to be multiplied by before the chunk reads it and, of a strong
    chunk, before it adds to it; what it is to be multiplied by in the end; ``LOG2E`` if the chunk is strong,
    else ``IS_MILD``. If it is strong, its pairs come to where its gates were.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([C // BLOCKS, BK // 64], [1, 32], [BLOCKS, 2], [1, 0])
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    ALL: gl.constexpr = gl.BlockedLayout([1, BLOCKS, BK // 64], [1, 1, 32], [BLOCKS, 1, 2], [2, 1, 0])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, ALL))
    q_s, k_s, _, g_s = stages
    given, full, _ = arrivals
    _, pairs_s, sums_s, least_s = tiles
    before_s, after_s, leave_s, kinds_s = vectors
    dtype: gl.constexpr = k_s.dtype
    mids = gl.zeros([BK], gl.float32, COLUMNS)
    everything = mids
    least_of_all = scale * 0
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        at = (count - 1 - i) if BACKWARDS else i
        q_c = q_s.index(slot)
        k_c = k_s.index(slot)
        if COPIED:
            mbarrier.wait(given.index(slot), (i // STAGES) & 1)
        x = load_gates(g_s.index(slot), g, stride_t, gamma, at, size, C, K, BK, GAMMA, COPIED, LAYOUT)
        if not OUTPUT:
            x = gl.maximum(x, FAINT)
        F = within_blocks(x, REVERSE)
        into = ends(gl.sum(x, 1), REVERSE)[1]
        put_sums(x, sums_s, least_s)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        k = k_c.load(LAYOUT)
        if not OUTPUT:
            total, before = around(sums_s, F, LOG2E, REVERSE)[:2]
            after_s.index(slot).store(gl.exp2(total))
            if SUM:
                everything += total
            G = F * LOG2E + (into * LOG2E + before)[:, None, :]
            if REVERSE == BACKWARDS:
                whole = gl.convert_layout(total, gl.SliceLayout(0, gl.SliceLayout(1, G.type.layout)))
                factor = gl.exp2(whole[None, None, :] - G)
            else:
                factor = gl.exp2(G) * scale
            k_c.store((k.to(gl.float32) * flat(factor, LAYOUT)).to(dtype))
        else:
            q = q_c.load(LAYOUT)
            total, before = around(sums_s, F, LOG2E, REVERSE)[:2]
            least = least_of(least_s)
            least_of_all = gl.minimum(least_of_all, least)
            if least < MODERATE:
                kinds_s.index(slot).store(gl.full([1], LOG2E, gl.float32, FLAG))
                before_s.index(slot).store(gl.exp2(mids))
                after_s.index(slot).store(gl.exp2(total))
                leave_s.index(slot).store(gl.full([BK], 1.0, gl.float32, COLUMNS))
                mids = gl.zeros([BK], gl.float32, COLUMNS)
                # It loads all again, which would stay in registers else.
                do_strong(q_c, k_c, g_s.index(slot), tiles, pairs_s.index(slot), kinds_s.index(slot), g, stride_t,
                          gamma, at, size, K, REVERSE, GAMMA, COPIED, LAYOUT)
            else:
                kinds_s.index(slot).store(gl.full([1], IS_MILD, gl.float32, FLAG))
                half = total * 0.5
                before_s.index(slot).store(gl.exp2(mids + half))
                leave_s.index(slot).store(gl.exp2(half))
                mids = half
                apart = from_middle(F, into, before, half, LAYOUT)
                q_c.store((q.to(gl.float32) * gl.exp2(apart)).to(dtype))
                k_c.store((k.to(gl.float32) * gl.exp2(-apart)).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(ready.index(slot), count=1)
    if SUM:
        o_k = gl.arange(0, BK, layout=COLUMNS)
        gl.store(sums + o_k, everything, mask=o_k < K)
    if FLAG_WALK:
        gl.store(strong, (least_of_all < MILD).to(gl.int32))


@gluon.jit
def multiply(shared, descriptors, goal, states, size, last, scale, state_s, WG: gl.constexpr, C: gl.constexpr,
             K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
             REVERSE: gl.constexpr, BACKWARDS: gl.constexpr, stride_sk: gl.constexpr, stride_sv: gl.constexpr,
             OUTPUT: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr, COPIED: gl.constexpr):
    """A partition of one warpgroup: half of the values' dimensions, for which it has the state in registers.

    The first one copies chunks into the ring of stages, too, once the other has read what was there.
    """
    stages, arrivals, pairs_s, ready, read, vectors = shared
    q_s, k_s, v_s, _ = stages
    came = arrivals[2]
    before_s, after_s, leave_s, kinds_s = vectors
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_s, o_desc = goal
    h0, ht = states
    HALF: gl.constexpr = BV // 2
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    dtype: gl.constexpr = k_s.dtype
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(1, W))
    o_v = WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, W))
    across_k = (o_k * stride_sk)[:, None]
    across_v = (o_v * stride_sv)[None, :]
    o_state = across_v + across_k if stride_sk == 1 else across_k + across_v
    none = gl.zeros([C, C], gl.float32, W)
    nothing = gl.zeros([C, HALF], gl.float32, W)
    state = gl.zeros([BK, HALF], gl.float32, W)
    if INIT:
        state = load_state(h0 + o_state, o_k, o_v, K, V, BK, BV)
    count = gl.cdiv(size, C)
    if WG == 0:
        for i in range(gl.minimum(STAGES, count)):
            fetch(i, count, stages, arrivals, descriptors, C, HALF, STAGES, BACKWARDS, OUTPUT, COPIED)
    for i in range(count):
        slot = i % STAGES
        at = (count - 1 - i) if BACKWARDS else i
        mbarrier.wait(came.index(slot), (i // STAGES) & 1)
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        k = k_s.index(slot)
        v = v_s.index(2 * slot + WG)
        state = settled(state)
        if not OUTPUT:
            state = state * after_s.index(slot).load(gl.SliceLayout(1, W))[:, None]
            state = warpgroup_mma(k.permute((1, 0)), v, state, is_async=True)
            state = warpgroup_mma_wait(0, deps=[state])
            thread_barrier()
        else:
            q = q_s.index(slot)
            seen = (columns[None, :] >= rows[:, None]) if REVERSE else (columns[None, :] <= rows[:, None])
            # The products of both kinds of chunks: ptxas 13.0 reuses what one in a branch leaves after it.
            a = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
            state = state * before_s.index(slot).load(gl.SliceLayout(1, W))[:, None]
            state_s.store(state.to(dtype))
            a = warpgroup_mma_wait(0, deps=[a])
            strong = gl.max(kinds_s.index(slot).load(FLAG), 0) != 0
            if strong:
                state = state * after_s.index(slot).load(gl.SliceLayout(1, W))[:, None]
            fence_async_shared()
            thread_barrier()
            b_o = warpgroup_mma(q, state_s, nothing, use_acc=False, is_async=True)
            state = warpgroup_mma(k.permute((1, 0)), v, state, is_async=True)
            pairs = gl.where(seen, a, 0.0).to(dtype)
            if strong:
                pairs = pairs_s.index(slot).slice(0, C, 1).load(W)
            p = gl.convert_layout(pairs, LEFT)
            b_o = warpgroup_mma(p, v, b_o, is_async=True)
            tma.store_wait(1)
            b_o, state = warpgroup_mma_wait(0, deps=[b_o, state])
            out = o_s.index(2 * WG + i % 2)
            out.store((b_o * scale).to(dtype))
            fence_async_shared()
            thread_barrier()
            copy_out(o_desc, [at * C, WG * HALF], out)
        if WG == 1:
            mbarrier.arrive(read.index(slot), count=1)
        elif i + STAGES < count:
            mbarrier.wait(read.index(slot), (i // STAGES) & 1)
            fetch(i + STAGES, count, stages, arrivals, descriptors, C, HALF, STAGES, BACKWARDS, OUTPUT, COPIED)
    if OUTPUT:
        tma.store_wait(0)
    if FINAL:
        if OUTPUT:  # noqa: SIM102
            if count > 0:
                state = settled(state) * leave_s.index((count - 1) % STAGES).load(gl.SliceLayout(1, W))[:, None]
        store_state(ht + o_state, state, last, o_k, o_v, K, V, BK, BV)


_LENGTHS = ["stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt",
            "stride_vh", "stride_gb", "stride_gt", "stride_gh", "stride_gamma_b", "T", "L", "P"]


@gluon.jit(do_not_specialize=_LENGTHS)
def dimensions_kernel(
    q, k, v, g, gamma, h0, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_gamma_b, scale, T, L, P,
    o, ht, sums, strong,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, INIT_WALK: gl.constexpr,
    stride_sk: gl.constexpr, stride_sv: gl.constexpr, BACKWARDS: gl.constexpr,
):
    """``o_i = scale * sum_{j <= i} sum_k q_ik decay_ijk k_jk v_j`` for one head of one sequence, or of a segment of it.

    Two partitions of a warpgroup multiply, each for half of v's dimensions, one of two works the gates in.

    q: None where only states are wanted: those that pieces of L tokens, P of them to a segment, leave from none; then
    ``sums`` ``[walks, H, K]`` are what their gates come to. BACKWARDS: walk against the order of the recurrence, and
    make the gradients of states, with k as queries and v as the gradients of outputs. Otherwise it is REVERSE.

    strong ``[walks, H]`` gets 1 where a walk has chunks that are not mild, else 0.

    Otherwise as in ``outputs_kernel``, with g ``[B, T, H, K]``.
    """
    i_h = gl.program_id(0) % H
    i_o = gl.program_id(0) // H
    OUTPUT: gl.constexpr = q is not None
    if not OUTPUT:
        # Nobody goes on from the segment that is walked last.
        pieces = gl.cdiv(T, L)
        wanted = pieces - P if BACKWARDS else (gl.cdiv(pieces, P) - 1) * P
        i_o = i_o // wanted * pieces + i_o % wanted + (P if BACKWARDS else 0)
    i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, REVERSE)
    natural = natural_decay(gamma, i_b, i_h, stride_gamma_b)
    if not OUTPUT:
        last = size >= 0
    HALF: gl.constexpr = BV // 2
    dtype: gl.constexpr = k.dtype.element_ty
    g_dtype: gl.constexpr = g.dtype.element_ty
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    COPIED: gl.constexpr = g_dtype != gl.float32
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    VECTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    INIT: gl.constexpr = h0 is not None
    FINAL: gl.constexpr = ht is not None
    SUM: gl.constexpr = sums is not None

    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, BLOCK)
    v_desc = describe(v, i_b, token, i_h // RV, size, stride_vb, stride_vt, stride_vh, C, V, HALF, PART)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    v_s = gl.allocate_shared_memory(dtype, [2 * STAGES, C, HALF], PART)
    after_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    given = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    came = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    sums_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, BK], VECTORS)
    least_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, 2], VECTORS)
    # What is absent is something else, which nobody reads.
    p_g = g + i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
    g_desc = k_desc
    g_s = k_s
    if COPIED:
        GATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], g_dtype)
        g_desc = describe(g, i_b, token, i_h // RG, size, stride_gb, stride_gt, stride_gh, C, K, BK, GATES)
        g_s = gl.allocate_shared_memory(g_dtype, [STAGES, C, BK], GATES)
    q_desc = k_desc
    o_desc = v_desc
    q_s = k_s
    o_s = v_s
    x_s = k_s.index(0)
    pairs_s = k_s
    state_s = v_s
    before_s = after_s
    leave_s = after_s
    kinds_s = after_s
    p_h0 = k
    p_ht = k
    p_sums = k
    p_strong = k
    if OUTPUT:
        q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, BLOCK)
        q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
        x_s = gl.allocate_shared_memory(dtype, [C, BK], BLOCK)
        if COPIED:
            pairs_s = reinterpret(g_s, dtype, [STAGES, C, BK], BLOCK)
        else:
            pairs_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
        state_s = gl.allocate_shared_memory(dtype, [2, BK, HALF], PART)
        before_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
        leave_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
        kinds_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1], VECTOR)
        o_desc = describe(o, i_b, token, i_h, size, T.to(gl.int64) * (H * V), H * V, V, C, V, HALF, PART)
        o_s = gl.allocate_shared_memory(dtype, [4, C, HALF], PART)
    if INIT:
        p_h0 = h0 + ((i_o if INIT_WALK else i_n).to(gl.int64) * H + i_h) * K * V
    if FINAL:
        p_ht = ht + ((i_n if OUTPUT else i_o).to(gl.int64) * H + i_h) * K * V
    if strong is not None:
        p_strong = strong + i_o * H + i_h
    if SUM:
        p_sums = sums + (i_o.to(gl.int64) * H + i_h) * K
    for i in gl.static_range(STAGES):
        mbarrier.init(given.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(came.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(read.index(i), count=1)
    fence_async_shared()
    stages = (q_s, k_s, v_s, g_s)
    arrivals = (given, full, came)
    tiles = (x_s, pairs_s, sums_s, least_s)
    vectors = (before_s, after_s, leave_s, kinds_s)
    shared = (stages, arrivals, pairs_s, ready, read, vectors)
    descriptors = (q_desc, k_desc, v_desc, g_desc)
    goal = (o_s, o_desc)
    gl.warp_specialize(
        [
            (multiply, (shared, descriptors, goal, (p_h0, p_ht), size, last, scale, state_s.index(0), 0, C, K, V, BK,
                        BV, STAGES, REVERSE, BACKWARDS, stride_sk, stride_sv, OUTPUT, INIT, FINAL, COPIED)),
            (multiply, (shared, descriptors, goal, (p_h0, p_ht), size, last, scale, state_s.index(1), 1, C, K, V, BK,
                        BV, STAGES, REVERSE, BACKWARDS, stride_sk, stride_sv, OUTPUT, INIT, FINAL, COPIED)),
            (work_in_gates, (stages, arrivals, ready, tiles, vectors, p_g, stride_gt, natural, size, scale, p_sums,
                             p_strong, C, K, BK, STAGES, REVERSE, BACKWARDS, OUTPUT, SUM, strong is not None,
                             gamma is not None, COPIED)),
        ],
        [4, 8],
        [152, 104],
    )
