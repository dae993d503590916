"""The walk that makes the queries' gradients with a gate per token and dimension of the key.

``dq_i = scale * exp2(G_i) (S do_i + sum_{j <= i} (do_i . v_j) exp2(-G_j) k_j)`` is an output with queries ``do``, keys
v and values k, whose gates are those of the values' dimensions: pairs have none. Two warpgroups work them into k, in
shared memory, and leave what outputs are to be multiplied by in the place of the gates; with kinds of chunks as in
``dimensions``. A strong chunk reads and makes the state with a copy of its k. Then, for each level of the tree, the
pairs of its halves multiply ``k_j exp2(G_mid - G_j)``, and what comes out ``exp2(G_i - G_mid)``.

With the products that the walk for k and v has left it makes the gradients of gates, too: see ``dimensions_gates``.
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
from keraunos.kernels.linear_attention.cuda.dimensions import (
    BLOCKS,
    IS_MILD,
    IS_MODERATE,
    LEVELS,
    MAGNIFIED,
    MILD,
    MODERATE,
    around,
    ends,
    flat,
    from_middle,
    halves_meet,
    least_of,
    load_bfloat16,
    load_from_middle,
    load_gates,
    own_pairs,
    put_bfloat16,
    put_sums,
    within_blocks,
)
from keraunos.kernels.linear_attention.cuda.dimensions_gates import (
    add_up,
    added_up,
    dg_of,
    load_left,
    of_left,
    room_of,
)
from keraunos.kernels.linear_attention.cuda.walk import (
    FAINT,
    LOG2E,
    cut,
    describe,
    group_slot,
    load_state,
    locate,
    natural_decay,
    rounded,
    settled,
    within,
)


@gluon.jit
def fetch(i, count, stages, arrivals, descriptors, C: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr,
          COPIED: gl.constexpr):
    """Begins to copy chunk i into its stage, in the order in which its tiles are wanted."""
    do_s, v_s, k_s, g_s = stages
    given, full, came = arrivals
    do_desc, v_desc, k_desc, g_desc = descriptors
    slot = i % STAGES
    row = ((count - 1 - i) if REVERSE else i) * C
    if COPIED:
        mbarrier.expect(given.index(slot), g_desc.block_type.nbytes)
        copy_in(g_desc, [row, 0], given.index(slot), g_s.index(slot))
    mbarrier.expect(full.index(slot), k_desc.block_type.nbytes)
    copy_in(k_desc, [row, 0], full.index(slot), k_s.index(slot))
    arrived = came.index(slot)
    mbarrier.expect(arrived, do_desc.block_type.nbytes + v_desc.block_type.nbytes)
    copy_in(do_desc, [row, 0], arrived, do_s.index(slot))
    copy_in(v_desc, [row, 0], arrived, v_s.index(slot))


@gluon.jit
def fetch_queries(i, count, q_s, q_desc, came, C: gl.constexpr, REVERSE: gl.constexpr):
    """Begins to copy the queries of chunk i, which only the gradients of gates are made of."""
    mbarrier.expect(came, q_desc.block_type.nbytes)
    copy_in(q_desc, [((count - 1 - i) if REVERSE else i) * C, 0], came, q_s)


@gluon.jit
def free_tiles(gates, STORED_G: gl.constexpr, DG: gl.constexpr):
    """Says that the tiles of what gates' gradients are made of are free, when those are copied out."""
    if DG and not STORED_G:
        tma.store_wait(0)
    z_empty = gates[4]
    mbarrier.arrive(z_empty, count=1)


@gluon.jit
def make_dg(i, count, gates, queries, sums_s, base, everything, size, C: gl.constexpr, K: gl.constexpr,
            BK: gl.constexpr, H: gl.constexpr, REVERSE: gl.constexpr, STORED_G: gl.constexpr, DG: gl.constexpr,
            DGAMMA: gl.constexpr, GROUP: gl.constexpr, STRONG: gl.constexpr):
    """Makes the gradients of the gates of chunk i, and copies them out from the place of what they are made of.

    Returns the gradient for the next chunk's first token, and the sum of all. Copies the next chunk's queries, too.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([C // BLOCKS, BK // 64], [1, 32], [BLOCKS, 2], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, C // BLOCKS, BK // 64], [1, 1, 32], [BLOCKS, 1, 2], [2, 1, 0])
    high_s, low_s, base_s, z_full, _, dg_s, dg_desc, dg, _ = gates
    q_s, q_desc, came_q = queries
    at = (count - 1 - i) if REVERSE else i
    mbarrier.wait(z_full, i & 1)
    z = high_s.load(LAYOUT).to(gl.float32) + low_s.load(LAYOUT).to(gl.float32)
    fence_async_shared()
    thread_barrier()
    if i + 1 < count:
        fetch_queries(i + 1, count, q_s, q_desc, came_q, C, REVERSE)
    z = gl.convert_layout(z.reshape([BLOCKS, C // BLOCKS, BK]), ROWS)
    if i % GROUP == 0:
        base = base_s.load(base.type.layout)
    x, base = dg_of(z, base, sums_s, REVERSE)
    x = flat(x, LAYOUT)
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(0, LAYOUT))
    inside = within((rows < size - at * C)[:, None], o_k[None, :], K, BK)
    if DGAMMA:
        everything += gl.sum(gl.sum(gl.where(inside, x, 0.0), 0), 0)
    if DG and STORED_G:
        gl.store(dg + ((at * C + rows).to(gl.int64) * (H * K))[:, None] + o_k[None, :], x, mask=inside)
    elif DG:
        dg_s.store(x.to(dg_s.dtype))
    fence_async_shared()
    thread_barrier()
    if DG and not STORED_G:
        copy_out(dg_desc, [at * C, 0], dg_s)
    if STRONG:
        free_tiles(gates, STORED_G, DG)
    return base, everything


@gluon.jit
def do_strong(k_c, x_s, factors_c, g_c, ready, tree, sums_s, kinds_s, used, g, stride_t, gamma, at, size, scale,
              K: gl.constexpr, REVERSE: gl.constexpr, GAMMA: gl.constexpr, COPIED: gl.constexpr, LAYOUT: gl.constexpr):
    """Works the gates of a strong chunk into a copy of its k, for the state, and then for each level of the tree."""
    dtype: gl.constexpr = k_c.dtype
    C: gl.constexpr = k_c.shape[0]
    BK: gl.constexpr = k_c.shape[1]
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    x_full, x_empty = tree
    x = gl.maximum(load_gates(g_c, g, stride_t, gamma, at, size, C, K, BK, GAMMA, COPIED, LAYOUT), FAINT)
    F = within_blocks(x, REVERSE)
    own = gl.sum(x, 1)
    out, into = ends(own, REVERSE)
    before, behind, beside = around(sums_s, F, LOG2E, REVERSE)[1:]
    odd = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, own.type.layout))[:, None] % 2 == 1
    t = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    factor = gl.exp2(flat(F * LOG2E + (into * LOG2E + before)[:, None, :], LAYOUT))
    factors_c.store((factor * MAGNIFIED).to(factors_c.dtype))
    factor = gl.exp2(flat((out * LOG2E + behind)[:, None, :] - F * LOG2E, LAYOUT))
    x_s.store((k_c.load(LAYOUT).to(gl.float32) * factor).to(dtype))
    fence_async_shared()  # As those do who read it, after they have written more.
    thread_barrier()
    mbarrier.arrive(ready, count=1)
    # At first blocks of two leaves.
    into += gl.where(odd != REVERSE, beside, 0.0) / LOG2E
    out += gl.where(odd == REVERSE, beside, 0.0) / LOG2E
    for level in gl.static_range(LEVELS):
        if level == 1:
            out, into = ends(own, REVERSE)
        # Loaded anew, so that what follows from it does not wait in registers from the first level on.
        unit = gl.max(kinds_s.load(FLAG), 0)
        one = gl.full([C, BK], 1.0, gl.float32, LAYOUT)
        # Rounded as in the walk for dk.
        f = halves_meet(one * scale, one, F, out, into, unit, C >> (level + 1), REVERSE, LAYOUT)
        f = f.to(dtype).to(gl.float32)
        later = ((t >> (LEVELS - 1 - level)) % 2 == (0 if REVERSE else 1))[:, None]
        mbarrier.wait(x_empty, ((used + level) & 1))
        x_s.store(gl.where(later, f, k_c.load(LAYOUT).to(gl.float32) * f).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(x_full, count=1)


@gluon.jit
def work_in_gates(stages, factors_s, arrivals, ready, read, tree, tiles, vectors, descriptors, queries, gates, g,
                  stride_t, gamma, size, scale, H: gl.constexpr, C: gl.constexpr, K: gl.constexpr, BK: gl.constexpr,
                  STAGES: gl.constexpr, REVERSE: gl.constexpr, GAMMA: gl.constexpr, COPIED: gl.constexpr,
                  LEARNED: gl.constexpr, STORED_G: gl.constexpr, DG: gl.constexpr, DGAMMA: gl.constexpr,
                  GROUP: gl.constexpr, STRONG: gl.constexpr):
    """A partition of two warpgroups: copies each chunk into the ring of stages, and works its gates into its k there.

    ``factors_s`` get what outputs are to be multiplied by, of a strong chunk MAGNIFIED; ``vectors``, for each stage:
    what the state is to be multiplied by before the chunk reads it and, of a strong chunk, before it adds to it;
    which kind of chunk it is. LEARNED: it makes the gradients of the gates of a chunk when all else of it is done.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([C // BLOCKS, BK // 64], [1, 32], [BLOCKS, 2], [1, 0])
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    ALL: gl.constexpr = gl.BlockedLayout([1, BLOCKS, BK // 64], [1, 1, 32], [BLOCKS, 1, 2], [2, 1, 0])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, ALL))
    _, _, k_s, g_s = stages
    given, full, _ = arrivals
    sums_s, least_s, totals_s = tiles
    before_s, after_s, kinds_s = vectors
    q_s, q_desc, came_q = queries
    dtype: gl.constexpr = k_s.dtype
    mids = gl.zeros([BK], gl.float32, COLUMNS)
    # The gradient of the gates of a chunk's first token; the sum of all; how many chunks have theirs.
    base = mids
    everything = scale * 0
    finished = size * 0
    used = size * 0
    count = gl.cdiv(size, C)
    if LEARNED:  # noqa: SIM102
        if count > 0:
            fetch_queries(0, count, q_s, q_desc, came_q, C, REVERSE)
    for i in range(count + (STAGES if LEARNED else 0)):
        slot = i % STAGES
        if i < count:
            if i >= STAGES:
                mbarrier.wait(read.index(slot), ((i // STAGES) & 1) ^ 1)
            fetch(i, count, stages, arrivals, descriptors, C, STAGES, REVERSE, COPIED)
        if LEARNED:  # noqa: SIM102
            if finished <= i - STAGES and finished < count:
                base, everything = make_dg(finished, count, gates, queries, totals_s, base, everything, size, C, K, BK,
                                           H, REVERSE, STORED_G, DG, DGAMMA, GROUP, STRONG)
                finished += 1
        if i < count:
            at = (count - 1 - i) if REVERSE else i
            k_c = k_s.index(slot)
            if COPIED:
                mbarrier.wait(given.index(slot), (i // STAGES) & 1)
            x = load_gates(g_s.index(slot), g, stride_t, gamma, at, size, C, K, BK, GAMMA, COPIED, LAYOUT)
            F = within_blocks(x, REVERSE)
            into = ends(gl.sum(x, 1), REVERSE)[1]
            put_sums(x, sums_s, least_s)
            if LEARNED and not STRONG:  # noqa: SIM102
                if i >= STAGES:
                    free_tiles(gates, STORED_G, DG)
            mbarrier.wait(full.index(slot), (i // STAGES) & 1)
            k = k_c.load(LAYOUT)
            total, before = around(sums_s, F, LOG2E, REVERSE)[:2]
            # Each thread puts factors where it has read gates.
            least = least_of(least_s)
            if STRONG and least < MODERATE:
                kinds_s.index(slot).store(gl.full([1], LOG2E, gl.float32, FLAG))
                before_s.index(slot).store(gl.exp2(mids))
                after_s.index(slot).store(gl.exp2(total))
                mids = gl.zeros([BK], gl.float32, COLUMNS)
                # The tile of the tree is free when the chunk before is done.
                if i > 0:
                    if not LEARNED:
                        mbarrier.wait(read.index((i - 1) % STAGES), ((i - 1) // STAGES) & 1)
                    else:
                        base, everything = make_dg(finished, count, gates, queries, totals_s, base, everything, size, C,
                                                   K, BK, H, REVERSE, STORED_G, DG, DGAMMA, GROUP, STRONG)
                        finished += 1
                # It loads all again, which would stay in registers else.
                do_strong(k_c, k_s.index(STAGES), factors_s.index(slot), g_s.index(slot), ready.index(slot), tree,
                          sums_s, kinds_s.index(slot), used, g, stride_t, gamma, at, size, scale, K, REVERSE, GAMMA,
                          COPIED, LAYOUT)
                used += LEVELS + 1
            else:
                half = total * 0.5
                before_s.index(slot).store(gl.exp2(mids + half))
                mids = half
                if STRONG and least < MILD:
                    kinds_s.index(slot).store(gl.full([1], IS_MODERATE, gl.float32, FLAG))
                    apart = load_from_middle(g_s.index(slot), g, stride_t, gamma, at, size, sums_s, C, K, BK, REVERSE,
                                             GAMMA, COPIED, LAYOUT)
                    put_bfloat16(gl.exp2(apart), factors_s.index(slot))
                    k_c.store((k_c.load(LAYOUT).to(gl.float32) * gl.exp2(-apart)).to(dtype))
                else:
                    kinds_s.index(slot).store(gl.full([1], IS_MILD, gl.float32, FLAG))
                    apart = from_middle(F, into, before, half, LAYOUT)
                    factors_s.index(slot).store(gl.exp2(apart).to(factors_s.dtype))
                    k_c.store((k.to(gl.float32) * gl.exp2(-apart)).to(dtype))
                fence_async_shared()  # As those do who read it, after they have written more.
                thread_barrier()
                mbarrier.arrive(ready.index(slot), count=1)
        elif LEARNED and not STRONG and i >= STAGES:
            free_tiles(gates, STORED_G, DG)
    if DGAMMA:
        dgamma = gates[8]
        gl.store(dgamma, everything)


@gluon.jit
def multiply(shared, goal, learned, h0, size, scale, state_s, WG: gl.constexpr, H: gl.constexpr,
             C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
             STAGES: gl.constexpr, REVERSE: gl.constexpr, STORED: gl.constexpr, INIT: gl.constexpr,
             COPIED: gl.constexpr, LEARNED: gl.constexpr, GROUP: gl.constexpr, STRONG: gl.constexpr):
    """A partition of one warpgroup: half of the keys' dimensions, for which it has the state in registers.

    What the gradients of gates are made of, in two parts of 16 bits, is put where the tree and queries were.
    """
    stages, factors_s, arrivals, ready, read, tree, vectors = shared
    do_s, v_s, k_s, _ = stages
    x_full, x_empty = tree
    before_s, after_s, kinds_s = vectors
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_s, o_desc, o = goal
    q_s, came_q, y, room, dh, z = learned
    high_s, low_s, base_s, z_full, z_empty = z
    HALF: gl.constexpr = BK // 2
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, W)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    dtype: gl.constexpr = k_s.dtype
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, W))
    o_k = WG * HALF + gl.arange(0, HALF, layout=COLUMNS)
    none = gl.zeros([C, C], gl.float32, W)
    nothing = gl.zeros([C, HALF], gl.float32, W)
    state = gl.zeros([BV, HALF], gl.float32, W)
    if INIT:
        state = load_state(h0 + ((o_k * V)[None, :] + o_v[:, None]), o_v, o_k, V, K, BV, BK)
    x_p = k_s.index(STAGES).slice(WG * HALF, HALF, 1)
    o_dh = (o_v * BK)[:, None] + o_k[None, :]
    used = size * 0
    count = gl.cdiv(size, C)
    q_c = q_s.slice(WG * HALF, HALF, 1)
    for i in range(count):
        slot = i % STAGES
        at = (count - 1 - i) if REVERSE else i
        left = gl.minimum(size - at * C, C)
        mbarrier.wait(arrivals[2].index(slot), (i // STAGES) & 1)
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        kind = gl.max(kinds_s.index(slot).load(FLAG), 0) if STRONG else IS_MILD
        strong = kind > 0
        moderate = kind < 0
        single = kind <= 0
        # A token's own pair is added later to dq of a moderate chunk.
        earlier = rows[:, None]
        if LEARNED and STRONG:
            earlier -= gl.where(moderate, -1 if REVERSE else 1, 0)
        seen = (columns[None, :] >= earlier) if REVERSE else (columns[None, :] <= earlier)
        do = do_s.index(slot)
        v = v_s.index(slot)
        k = k_s.index(gl.where(strong, STAGES, slot) if STRONG else slot).slice(WG * HALF, HALF, 1)
        state = settled(state)
        a = warpgroup_mma(do, v.permute((1, 0)), none, use_acc=False, is_async=True)
        state = state * before_s.index(slot).slice(WG * HALF, HALF, 0).load(COLUMNS)[None, :]
        state_s.store(state.to(dtype))
        a = warpgroup_mma_wait(0, deps=[a])
        if LEARNED:  # noqa: SIM102
            if i % GROUP == 0:
                p_dh = dh + (i // GROUP).to(gl.int64) * (H * BK * BV) + o_dh
                base_s.slice(WG * HALF, HALF, 0).store(gl.sum(state * gl.load(p_dh).to(gl.float32), 0))
        if STRONG and strong:
            state = state * after_s.index(slot).slice(WG * HALF, HALF, 0).load(COLUMNS)[None, :]
        if LEARNED:
            y_c = load_left(y + at.to(gl.int64) * (2 * H * room_of(HALF)), HALF)  # type: ignore[union-attr]
        fence_async_shared()
        thread_barrier()
        state = warpgroup_mma(v.permute((1, 0)), k, state, is_async=True)
        pairs = gl.where(seen, a, 0.0).to(dtype)
        # Nothing comes of it in a strong chunk: else there were two kinds of pairs in registers.
        b_dq = warpgroup_mma(gl.convert_layout(pairs, LEFT), k, nothing, use_acc=False, is_async=True)
        b_dq = warpgroup_mma(do, state_s, b_dq, use_acc=single if STRONG else True, is_async=True)
        b_dq, state = warpgroup_mma_wait(0, deps=[b_dq, state])
        unit = gl.where(strong, scale / MAGNIFIED, scale) if STRONG else scale
        factors_c = factors_s.index(slot).slice(WG * HALF, HALF, 1)
        if STRONG and moderate:  # noqa: SIM108
            factor = load_bfloat16(factors_c, W) * unit
        else:
            factor = factors_c.load(W).to(gl.float32) * unit
        inside = within((rows < left)[:, None], o_k[None, :], K, BK)
        o_o = ((at * C + rows).to(gl.int64) * (H * K))[:, None] + o_k[None, :]
        if LEARNED:
            mbarrier.wait(came_q, i & 1)
            x = rounded(q_c.load(W).to(gl.float32) * factor) * b_dq
            if STRONG and strong:
                add_up(x, room, True)
            if STRONG and moderate:
                b_dq += own_pairs(do, v, W) * k.load(W).to(gl.float32)
        b_dq = b_dq * factor
        if STRONG and strong:
            thread_barrier()
            mbarrier.arrive(x_empty, count=1)
            used += 1
            state = settled(state)
            own = gl.sum(gl.where(rows[:, None] == columns[None, :], pairs.to(gl.float32), 0.0), 1) * scale
            b_dq += own[:, None] * k_s.index(slot).slice(WG * HALF, HALF, 1).load(W).to(gl.float32)
            for level in range(LEVELS):
                # Tokens whose numbers agree but for the last bits, the first of which is the level's.
                met = (rows[:, None] ^ columns[None, :]) // ((C >> 1) >> level) == 1
                p = gl.convert_layout(gl.where(met, pairs, 0.0).to(dtype), LEFT)
                mbarrier.wait(x_full, level & 1)
                b = warpgroup_mma(p, x_p, nothing, use_acc=False, is_async=True)
                b = warpgroup_mma_wait(0, deps=[b])
                f = x_p.load(W).to(gl.float32)
                b_dq += b * f
                if LEARNED:
                    add_up(b * (q_c.load(W).to(gl.float32) * f).to(dtype).to(gl.float32), room, False)
                thread_barrier()
                mbarrier.arrive(x_empty, count=1)
                used += 1
            if LEARNED:
                x = added_up(room, HALF, W)
        if LEARNED:
            x -= of_left(y_c, W)
            high = cut(x)
            mbarrier.wait(z_empty, (i & 1) ^ 1)
            high_s.slice(WG * HALF, HALF, 1).store(high.to(gl.bfloat16))
            low_s.slice(WG * HALF, HALF, 1).store((x - high).to(gl.bfloat16))
        if STORED:
            gl.store(o + o_o, b_dq, mask=inside)
        else:
            tma.store_wait(0)
            o_s.store(b_dq.to(dtype))
            fence_async_shared()
        thread_barrier()
        if not STORED:
            copy_out(o_desc, [at * C, WG * HALF], o_s)
        mbarrier.arrive(read.index(slot), count=1)
        if LEARNED:
            mbarrier.arrive(z_full, count=1)
    if not STORED:
        tma.store_wait(0)


_LENGTHS = ["stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt",
            "stride_vh", "stride_ob", "stride_ot", "stride_oh", "stride_gb", "stride_gt", "stride_gh",
            "stride_gamma_b", "T", "L"]


@gluon.jit(do_not_specialize=_LENGTHS)
def queries_kernel(
    q, k, v, do, g, gamma, h0, y, dh, strong, cu_seqlens, dq_given, dg_given, dgamma_given,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh, stride_gb, stride_gt, stride_gh, stride_gamma_b, scale, T, L,
    dq, room, dg, dgamma,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, INIT_WALK: gl.constexpr, STORED: gl.constexpr,
    STORED_G: gl.constexpr, GROUP: gl.constexpr, STRONG: gl.constexpr,
):
    """The gradients of one head's queries in one sequence, or in a segment of it, with gates ``[B, T, H, K]``.

    Two partitions of a warpgroup multiply, each for half of k's dimensions, one of two works the gates in. strong
    ``[walks, H]`` says which walks have chunks that are not mild. STRONG launches make the gradients of those, with
    code for such chunks, which takes registers from the other; the others' go into the same arrays.

    h0: the states ``[.., H, K, V]`` that walks (INIT_WALK) or sequences start from. Where the gradients of gates are
    wanted, dg ``[B, T, H, K]`` and dgamma ``[walks, H]``, y are the dots and dh the states of ``keys_kernel``, and
    strong chunks add up the products of q with dq in room ``[walks, H, C, BK]``.
    Otherwise as ``outputs_kernel``.
    """
    i_h = gl.program_id(0) % H
    i_o = gl.program_id(0) // H
    if (gl.load(strong + i_o * H + i_h) != 0) != STRONG:
        return
    i_n, i_b, token, size, _ = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, REVERSE)
    natural = natural_decay(gamma, i_b, i_h, stride_gamma_b)
    HALF: gl.constexpr = BK // 2
    dtype: gl.constexpr = k.dtype.element_ty
    g_dtype: gl.constexpr = g.dtype.element_ty
    COPIED: gl.constexpr = g_dtype != gl.float32
    # Of all that has the dimensions of keys, and can be cut into halves.
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    VECTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    INIT: gl.constexpr = h0 is not None
    LEARNED: gl.constexpr = dh is not None
    DG: gl.constexpr = dg is not None
    DGAMMA: gl.constexpr = dgamma is not None

    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, PART)
    v_desc = describe(v, i_b, token, i_h // RV, size, stride_vb, stride_vt, stride_vh, C, V, BV, VALUES)
    do_desc = describe(do, i_b, token, i_h, size, stride_ob, stride_ot, stride_oh, C, V, BV, VALUES)
    p_g = g + i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
    # The last tile is for the tree of a strong chunk.
    k_s = gl.allocate_shared_memory(dtype, [STAGES + 1, C, BK], PART)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    if COPIED:
        COPIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], g_dtype)
        g_desc = describe(g, i_b, token, i_h // RG, size, stride_gb, stride_gt, stride_gh, C, K, BK, COPIES)
        g_s = gl.allocate_shared_memory(g_dtype, [STAGES, C, BK], COPIES)
        factors_s = reinterpret(g_s, gl.float16, [STAGES, C, BK], COPIES)
    else:
        FACTORS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], gl.float16)
        g_desc = k_desc
        g_s = k_s
        factors_s = gl.allocate_shared_memory(gl.float16, [STAGES, C, BK], FACTORS)
    state_s = gl.allocate_shared_memory(dtype, [2, BV, HALF], PART)
    before_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
    after_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
    kinds_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    given = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    came = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    sums_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, BK], VECTORS)
    least_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, 2], VECTORS)
    totals_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, BK], VECTORS)
    base_s = gl.allocate_shared_memory(gl.float32, [BK], VECTOR)
    met = gl.allocate_shared_memory(gl.int64, [5, 1], BARRIER)
    o_desc = k_desc
    o_s = k_s
    p_o = k
    p_h0 = k
    p_room = k
    p_dh = k
    q_desc = k_desc
    q_s = k_s.index(0)
    high_s = q_s
    low_s = q_s
    dg_s = q_s
    dg_desc = k_desc
    p_y = k
    p_dg = k
    p_dgamma = k
    of_token = (i_b.to(gl.int64) * T + token) * H + i_h
    if STORED:
        p_o = dq + of_token * K
    else:
        o_desc = describe(dq, i_b, token, i_h, size, T.to(gl.int64) * (H * K), H * K, K, C, K, HALF, PART)
        o_s = gl.allocate_shared_memory(dtype, [2, C, HALF], PART)
    if INIT:
        p_h0 = h0 + ((i_o if INIT_WALK else i_n).to(gl.int64) * H + i_h) * K * V
    if LEARNED:
        q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, PART)
        q_s = gl.allocate_shared_memory(dtype, [C, BK], PART)
        group = group_slot(i_o, token, T, L, GROUP * C, PACKED, SPLIT) * H + i_h
        p_dh = dh + group * (BK * BV)
        p_y = y + (group_slot(i_o, token, T, L, C, PACKED, SPLIT) * H + i_h) * (2 * room_of(HALF))
        if STRONG:
            p_room = room + gl.program_id(0).to(gl.int64) * (C * BK)
        # What outlasts no chunk has the tile of the tree, and that of queries.
        high_s = reinterpret(k_s, gl.bfloat16, [STAGES + 1, C, BK], PART).index(STAGES)
        low_s = reinterpret(q_s, gl.bfloat16, [C, BK], PART)
    if DG:
        p_dg = dg + of_token * K
        if not STORED_G:
            dg_s = reinterpret(k_s, dg.dtype.element_ty, [STAGES + 1, C, BK], PART).index(STAGES)
            dg_desc = describe(dg, i_b, token, i_h, size, T.to(gl.int64) * (H * K), H * K, K, C, K, BK, PART)
    if DGAMMA:
        p_dgamma = dgamma + i_o * H + i_h
    for i in gl.static_range(STAGES):
        mbarrier.init(given.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(came.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(read.index(i), count=2)
    mbarrier.init(met.index(0), count=1)
    mbarrier.init(met.index(1), count=2)
    mbarrier.init(met.index(2), count=1)
    mbarrier.init(met.index(3), count=2)
    mbarrier.init(met.index(4), count=1)
    fence_async_shared()
    stages = (do_s, v_s, k_s, g_s)
    tree = (met.index(0), met.index(1))
    vectors = (before_s, after_s, kinds_s)
    arrivals = (given, full, came)
    tiles = (sums_s, least_s, totals_s)
    shared = (stages, factors_s, arrivals, ready, read, tree, vectors)
    descriptors = (do_desc, v_desc, k_desc, g_desc)
    queries = (q_s, q_desc, met.index(2))
    z = (high_s, low_s, base_s, met.index(3), met.index(4))
    gates = (high_s, low_s, base_s, met.index(3), met.index(4), dg_s, dg_desc, p_dg, p_dgamma)
    of_first = (q_s, met.index(2), p_y, p_room, p_dh, z)
    of_second = (q_s, met.index(2), p_y + room_of(HALF), p_room + C * HALF, p_dh, z)
    gl.warp_specialize(
        [
            (multiply, (shared, (o_s.index(0), o_desc, p_o), of_first, p_h0, size, scale, state_s.index(0), 0, H, C, K,
                        V, BK, BV, STAGES, REVERSE, STORED, INIT, COPIED, LEARNED, GROUP, STRONG)),
            (multiply, (shared, (o_s.index(1), o_desc, p_o), of_second, p_h0, size, scale, state_s.index(1), 1, H, C, K,
                        V, BK, BV, STAGES, REVERSE, STORED, INIT, COPIED, LEARNED, GROUP, STRONG)),
            (work_in_gates, (stages, factors_s, arrivals, ready, read, tree, tiles, vectors, descriptors, queries,
                             gates, p_g, stride_gt, natural, size, scale, H, C, K, BK, STAGES, REVERSE,
                             gamma is not None, COPIED, LEARNED, STORED_G, DG, DGAMMA, GROUP, STRONG)),
        ],
        [4, 8],
        [176, 80],
    )
