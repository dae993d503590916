"""The walk that makes the gradients of keys and values with a gate per token and dimension of the key, in one pass.

It goes against the order of the recurrence and keeps ``D``, the gradient of the state after the chunk:

- ``dv_j = sum_{i >= j} A_ij do_i + (k_j exp2(G_total - G_j)) D``, with ``A_ij`` the pairs of the outputs,
- ``dk_j = exp2(G_total - G_j) (D v_j) + sum_{i >= j} (do_i . v_j) scale q_i exp2(G_i - G_j)``,
- and before the chunk ``D`` is ``exp2(G_total) D + sum_i scale q_i exp2(G_i) do_i``.

Two warpgroups work gates into q and k, in shared memory, and leave in the place of the gates what dk is to be
multiplied by; with kinds of chunks as in ``dimensions``. In a strong chunk k with gates has a tile of its own,
and another has, in turn, ``scale q_i exp2(G_i)``, for D, and for each level of the tree ``scale q_i exp2(G_i - G_mid)``
of the later halves and ``exp2(G_mid - G_j)`` of the earlier ones, by which what comes of the former is multiplied. The
pairs of the outputs are made beside it.

Two more multiply: one makes dv, one dk. For the gradients of gates they leave the products of k with dk, and some D:
see ``dimensions_gates``.
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
from keraunos.kernels.linear_attention.cuda.dimensions_gates import add_up, added_up, leave_halves, room_of
from keraunos.kernels.linear_attention.cuda.walk import (
    FAINT,
    LOG2E,
    describe,
    group_slot,
    load_state,
    locate,
    natural_decay,
    settled,
    store_state,
    within,
)


@gluon.jit
def fetch(i, count, stages, arrivals, descriptors, C: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr,
          COPIED: gl.constexpr):
    """Begins to copy chunk i into its stage, in the order in which its tiles are wanted."""
    slot = i % STAGES
    q_s, k_s, v_s, do_s, g_s = stages
    given, full, came = arrivals.index(slot), arrivals.index(STAGES + slot), arrivals.index(2 * STAGES + slot)
    q_desc, k_desc, v_desc, do_desc, g_desc = descriptors
    row = (i if REVERSE else (count - 1 - i)) * C
    if COPIED:
        mbarrier.expect(given, g_desc.block_type.nbytes)
        copy_in(g_desc, [row, 0], given, g_s.index(slot))
    mbarrier.expect(full, q_desc.block_type.nbytes + k_desc.block_type.nbytes)
    copy_in(q_desc, [row, 0], full, q_s.index(slot))
    copy_in(k_desc, [row, 0], full, k_s.index(slot))
    mbarrier.expect(came, v_desc.block_type.nbytes + do_desc.block_type.nbytes)
    copy_in(v_desc, [row, 0], came, v_s.index(slot))
    copy_in(do_desc, [row, 0], came, do_s.index(slot))


@gluon.jit
def do_strong(q_c, k_c, x_s, y_s, factors_c, g_c, ready, met, sums_s, kinds_s, before_s, g, stride_t, gamma, at, size,
              scale, K: gl.constexpr, REVERSE: gl.constexpr, GAMMA: gl.constexpr, COPIED: gl.constexpr,
              LAYOUT: gl.constexpr):
    """Works the gates of a strong chunk into copies of its q and k, for the state, and then for each level of the tree.

    Of a level the copy of q gets the queries of the later halves and the factors of the earlier ones. In the end the
    pairs, which are products of such queries with such keys, are in the place of q.
    """
    dtype: gl.constexpr = q_c.dtype
    C: gl.constexpr = q_c.shape[0]
    BK: gl.constexpr = q_c.shape[1]
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))[:, None]
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))[None, :]
    t = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    x_empty, x_full = met.index(2), met.index(3)
    none = gl.zeros([C, C], gl.float32, W)
    b = warpgroup_mma(k_c, q_c.permute((1, 0)), none, use_acc=False, is_async=True)
    pairs = (warpgroup_mma_wait(0, deps=[b]) * scale).to(dtype)
    x = gl.maximum(load_gates(g_c, g, stride_t, gamma, at, size, C, K, BK, GAMMA, COPIED, LAYOUT), FAINT)
    F = within_blocks(x, REVERSE)
    own = gl.sum(x, 1)
    out, into = ends(own, REVERSE)
    total, before, behind, beside = around(sums_s, F, LOG2E, REVERSE)
    odd = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, own.type.layout))[:, None] % 2 == 1
    factor = gl.exp2(flat((out * LOG2E + behind)[:, None, :] - F * LOG2E, LAYOUT))
    factors_c.store((factor * MAGNIFIED).to(factors_c.dtype))
    thread_barrier()
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(x_empty, 0)
    y_s.store((k_c.load(LAYOUT).to(gl.float32) * factor).to(dtype))
    factor = gl.exp2(flat(F * LOG2E + (into * LOG2E + before)[:, None, :], LAYOUT)) * scale
    x_s.store((q_c.load(LAYOUT).to(gl.float32) * factor).to(dtype))
    before_s.store(gl.exp2(total))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(x_full, count=1)
    for level in gl.static_range(LEVELS):
        # Loaded anew, so that what follows from it does not wait in registers from the first level on.
        unit = gl.max(kinds_s.load(FLAG), 0)
        if level == LEVELS - 1:
            # Blocks of two leaves.
            into += gl.where(odd != REVERSE, beside, 0.0) / LOG2E
            out += gl.where(odd == REVERSE, beside, 0.0) / LOG2E
        one = gl.full([C, BK], 1.0, gl.float32, LAYOUT)
        f = halves_meet(one * scale, one, F, out, into, unit, 1 << level, REVERSE, LAYOUT).to(dtype).to(gl.float32)
        later = ((t >> level) % 2 == (0 if REVERSE else 1))[:, None]
        mbarrier.wait(x_empty, (level + 1) & 1)
        x_s.store((gl.where(later, q_c.load(LAYOUT), k_c.load(LAYOUT)).to(gl.float32) * f).to(dtype))
        fence_async_shared()
        thread_barrier()
        b = warpgroup_mma(x_s, x_s.permute((1, 0)), none, use_acc=False, is_async=True)
        b = warpgroup_mma_wait(0, deps=[b])
        # What is no pair of this level's is one of a later level's.
        pairs = gl.where((rows ^ columns) >= (1 << level), b.to(dtype), pairs)
        thread_barrier()
        x_s.store(gl.where(later, q_c.load(LAYOUT).to(gl.float32) * f, f).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(x_full, count=1)
    # Rows are keys and columns queries.
    seen = (columns <= rows) if REVERSE else (columns >= rows)
    mbarrier.wait(x_empty, (LEVELS + 1) & 1)
    q_c.slice(0, C, 1).store(gl.where(seen, pairs, 0.0).to(dtype))
    fence_async_shared()  # The next copy comes here.
    thread_barrier()
    mbarrier.arrive(x_full, count=1)


@gluon.jit
def work_in_gates(stages, factors_s, arrivals, ready, met, tiles, vectors, g, stride_t, gamma, size, scale,
                  C: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr,
                  GAMMA: gl.constexpr, COPIED: gl.constexpr):
    """A partition of two warpgroups: works the gates of each chunk into its q and k, in shared memory.

    ``factors_s`` get what dk is to be multiplied by, of a strong chunk MAGNIFIED; ``vectors`` what the state is to be
    multiplied by before the chunk reads it, after the last chunk once more, and for each stage which kind of chunk it
    is.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([C // BLOCKS, BK // 64], [1, 32], [BLOCKS, 2], [1, 0])
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    ALL: gl.constexpr = gl.BlockedLayout([1, BLOCKS, BK // 64], [1, 1, 32], [BLOCKS, 1, 2], [2, 1, 0])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, ALL))
    q_s, k_s, _, _, g_s = stages
    sums_s, least_s = tiles
    before_s, kinds_s = vectors
    dtype: gl.constexpr = k_s.dtype
    mids = gl.zeros([BK], gl.float32, COLUMNS)
    count = gl.cdiv(size, C)
    for i in range(count):
        slot = i % STAGES
        at = i if REVERSE else (count - 1 - i)
        q_c = q_s.index(slot)
        k_c = k_s.index(slot)
        if COPIED:
            mbarrier.wait(arrivals.index(slot), (i // STAGES) & 1)
        x = load_gates(g_s.index(slot), g, stride_t, gamma, at, size, C, K, BK, GAMMA, COPIED, LAYOUT)
        F = within_blocks(x, REVERSE)
        into = ends(gl.sum(x, 1), REVERSE)[1]
        put_sums(x, sums_s, least_s)
        mbarrier.wait(arrivals.index(STAGES + slot), (i // STAGES) & 1)
        q = q_c.load(LAYOUT)
        k = k_c.load(LAYOUT)
        total, before = around(sums_s, F, LOG2E, REVERSE)[:2]
        # What the chunk before reads has been read.
        mbarrier.wait(met.index(0), (i & 1) ^ 1)
        # Each thread puts factors where it has read gates.
        least = least_of(least_s)
        if least < MODERATE:
            kinds_s.index(slot).store(gl.full([1], LOG2E, gl.float32, FLAG))
            before_s.store(gl.exp2(mids))
            mids = gl.zeros([BK], gl.float32, COLUMNS)
            # It loads all again, which would stay in registers else.
            do_strong(q_c, k_c, q_s.index(STAGES), k_s.index(STAGES), factors_s.index(slot), g_s.index(slot),
                      ready.index(slot), met, sums_s, kinds_s.index(slot), before_s, g, stride_t, gamma, at, size,
                      scale, K, REVERSE, GAMMA, COPIED, LAYOUT)
        else:
            half = total * 0.5
            before_s.store(gl.exp2(mids + half))
            mids = half
            # The factor of q is as the walk for dq has it.
            if least < MILD:
                kinds_s.index(slot).store(gl.full([1], IS_MODERATE, gl.float32, FLAG))
                apart = load_from_middle(g_s.index(slot), g, stride_t, gamma, at, size, sums_s, C, K, BK, REVERSE,
                                         GAMMA, COPIED, LAYOUT)
                factor = gl.exp2(apart).to(gl.bfloat16).to(gl.float32)
                q_c.store((q_c.load(LAYOUT).to(gl.float32) * (factor * scale)).to(dtype))
                factor = gl.exp2(-apart)
                k_c.store((k_c.load(LAYOUT).to(gl.float32) * factor).to(dtype))
                put_bfloat16(factor, factors_s.index(slot))
            else:
                kinds_s.index(slot).store(gl.full([1], IS_MILD, gl.float32, FLAG))
                apart = from_middle(F, into, before, half, LAYOUT)
                factor = gl.exp2(apart).to(gl.float16).to(gl.float32)
                q_c.store((q.to(gl.float32) * (factor * scale)).to(dtype))
                factor = gl.exp2(-apart)
                k_c.store((k.to(gl.float32) * factor).to(dtype))
                factors_s.index(slot).store(factor.to(factors_s.dtype))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(ready.index(slot), count=1)
    mbarrier.wait(met.index(0), (count & 1) ^ 1)
    before_s.store(gl.exp2(mids))
    thread_barrier()
    mbarrier.arrive(ready.index(count % STAGES), count=1)


@gluon.jit
def store_rows(x, p, at, left, H: gl.constexpr, D: gl.constexpr, BD: gl.constexpr):
    """Stores what comes of a chunk, from registers."""
    C: gl.constexpr = x.shape[0]
    L: gl.constexpr = x.type.layout
    t = gl.arange(0, C, layout=gl.SliceLayout(1, L))
    o_d = gl.arange(0, BD, layout=gl.SliceLayout(0, L))
    o = ((at * C + t).to(gl.int64) * (H * D))[:, None] + o_d[None, :]
    mask = within((t < left)[:, None], o_d[None, :], D, BD)
    gl.store(p + o, x, mask=mask)


@gluon.jit
def put(x, goal, at, left, H: gl.constexpr, D: gl.constexpr, BD: gl.constexpr, STORED: gl.constexpr):
    """Copies out what comes of a chunk."""
    o_s, o_desc, o = goal
    C: gl.constexpr = x.shape[0]
    if STORED:
        store_rows(x, o, at, left, H, D, BD)
    else:
        tma.store_wait(0)
        o_s.store(x.to(o_s.dtype))
        fence_async_shared()
    thread_barrier()
    if not STORED:
        copy_out(o_desc, [at * C, 0], o_s)


@gluon.jit
def multiply(shared, descriptors, goal, borders, remains, size, last, scale, WG: gl.constexpr, H: gl.constexpr,
             C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
             STAGES: gl.constexpr, REVERSE: gl.constexpr, STORED: gl.constexpr, INIT: gl.constexpr,
             FINAL: gl.constexpr, COPIED: gl.constexpr, LEARNED: gl.constexpr, GROUP: gl.constexpr):
    """A partition of one warpgroup: the first makes dv, the second dk. It has half of the values' dimensions of the
    gradient of the state in registers, and writes its half of the copy that both read.

    Of the barriers ``met`` the first says that the copy is whole, the second that it was read, the third and the fourth
    that the tile of a strong chunk was read, and that it is whole. The first partition copies chunks into the ring of
    stages, too, once the other has read what was there.
    """
    stages, factors_s, arrivals, ready, vectors, state_s, met = shared
    q_s, k_s, v_s, do_s, _ = stages
    x_empty, x_full = met.index(2), met.index(3)
    before_s, kinds_s = vectors
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dht, dh0 = borders
    dots, room, states = remains
    HALF: gl.constexpr = BV // 2
    # What this partition makes has so many dimensions, in a tile.
    D: gl.constexpr = V if WG == 0 else K
    BD: gl.constexpr = BV if WG == 0 else BK
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WD, 2)
    dtype: gl.constexpr = q_s.dtype
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))
    o_k = gl.arange(0, BK, layout=gl.SliceLayout(1, W))
    o_v = WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, W))
    o_state = (o_k * V)[:, None] + o_v[None, :]
    state = gl.zeros([BK, HALF], gl.float32, W)
    if INIT:
        state = load_state(dht + o_state, o_k, o_v, K, V, BK, BV)
    none = gl.zeros([C, C], gl.float32, W)
    nothing = gl.zeros([C, BD], gl.float32, WD)
    mine = state_s.slice(WG * HALF, HALF, 1)
    x_s = q_s.index(STAGES)
    count = gl.cdiv(size, C)
    if WG == 0:
        for i in range(gl.minimum(STAGES, count)):
            fetch(i, count, stages, arrivals, descriptors, C, STAGES, REVERSE, COPIED)
    for i in range(count):
        slot = i % STAGES
        at = i if REVERSE else (count - 1 - i)
        left = gl.minimum(size - at * C, C)
        mbarrier.wait(arrivals.index(2 * STAGES + slot), (i // STAGES) & 1)
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        # None while a product is under way: the assembler would wait for it.
        mbarrier.wait(met.index(1), (i & 1) ^ 1)
        do = do_s.index(slot)
        dots_c = dots + at.to(gl.int64) * (2 * H * room_of(BK // 2))  # type: ignore[union-attr]
        state = settled(state)
        if WG == 0:
            a = warpgroup_mma(k_s.index(slot), q_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        else:
            a = warpgroup_mma(v_s.index(slot), do.permute((1, 0)), none, use_acc=False, is_async=True)
        state = state * before_s.load(gl.SliceLayout(1, W))[:, None]
        mine.store(state.to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(met.index(0), count=1)
        a = warpgroup_mma_wait(0, deps=[a])
        kind = gl.max(kinds_s.index(slot).load(FLAG), 0)
        strong = kind > 0
        moderate = kind < 0
        single = kind <= 0
        # Rows are keys here and columns queries. A token's own pair is added later to dk of a moderate chunk.
        later = rows[:, None]
        if WG == 1 and LEARNED:
            later += gl.where(moderate, -1 if REVERSE else 1, 0)
        seen = (columns[None, :] <= later) if REVERSE else (columns[None, :] >= later)
        pairs = gl.where(seen, a, 0.0).to(dtype)
        if strong:
            if not STORED:
                # The tiles of a strong chunk are those of dk and dv.
                tma.store_wait(0)
            mbarrier.arrive(x_empty, count=1)
            mbarrier.wait(x_full, 0)
            state = state * before_s.load(gl.SliceLayout(1, W))[:, None]
        x = q_s.index(gl.where(strong, STAGES, slot))
        mbarrier.wait(met.index(0), i & 1)
        if WG == 0:
            k = k_s.index(gl.where(strong, STAGES, slot))
            o = warpgroup_mma(k, state_s, nothing, use_acc=False, is_async=True)
        else:
            # Nothing comes of it in a strong chunk: else there were two kinds of pairs in registers.
            o = warpgroup_mma(gl.convert_layout(pairs, LEFT), x, nothing, use_acc=False, is_async=True)
            o = warpgroup_mma(v_s.index(slot), state_s.permute((1, 0)), o, use_acc=single, is_async=True)
        state = warpgroup_mma(x.permute((1, 0)), do.slice(WG * HALF, HALF, 1), state, is_async=True)
        o, state = warpgroup_mma_wait(0, deps=[o, state])
        thread_barrier()
        mbarrier.arrive(met.index(1), count=1)
        if WG == 0:
            if strong:
                for level in range(LEVELS + 1):
                    mbarrier.arrive(x_empty, count=1)
                    mbarrier.wait(x_full, (level + 1) & 1)
                pairs = q_s.index(slot).slice(0, C, 1).load(W)
            o = warpgroup_mma(gl.convert_layout(pairs, LEFT), do, o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            put(o, goal, at, left, H, D, BD, STORED)
        else:
            # In branches of their own, so that what is in memory in a strong chunk is in registers in another.
            if strong:
                # Only this partition read v, and has.
                pairs_s = v_s.index(slot).slice(0, C, 1)
                pairs_s.store(pairs)
                o = o * (factors_s.index(slot).load(WD).to(gl.float32) / MAGNIFIED)
                if LEARNED:
                    add_up(o * k_s.index(slot).load(WD).to(gl.float32), room, True)
                pairs = pairs_s.load(W)
                own = gl.sum(gl.where(rows[:, None] == columns[None, :], pairs.to(gl.float32), 0.0), 1) * scale
                o += gl.convert_layout(own, gl.SliceLayout(1, WD))[:, None] * q_s.index(slot).load(WD).to(gl.float32)
                for level in range(LEVELS):
                    mbarrier.arrive(x_empty, count=1)
                    # Tokens whose numbers agree but for the last bits, the first of which is the level's.
                    meet = ((rows[:, None] ^ columns[None, :]) >> level) == 1
                    p = gl.convert_layout(gl.where(meet, pairs_s.load(W), 0.0).to(dtype), LEFT)
                    mbarrier.wait(x_full, (level + 1) & 1)
                    b = warpgroup_mma(p, x_s, nothing, use_acc=False, is_async=True)
                    b = warpgroup_mma_wait(0, deps=[b])
                    f = x_s.load(WD).to(gl.float32)
                    o += b * f
                    if LEARNED:
                        b = b * (k_s.index(slot).load(WD).to(gl.float32) * f).to(dtype).to(gl.float32)
                        add_up(b, room, False)
                    thread_barrier()
                mbarrier.arrive(x_empty, count=1)
                if LEARNED:
                    leave_halves(added_up(room, BK, WD), dots_c)
                put(o, goal, at, left, H, D, BD, STORED)
            else:
                if LEARNED:
                    # In a mild one with a token's pair with itself, which is in both walks' products.
                    leave_halves(o * k_s.index(slot).load(WD).to(gl.float32), dots_c)
                # Once more in branches of their own.
                if moderate:
                    if LEARNED:
                        o += own_pairs(do, v_s.index(slot), WD) * q_s.index(slot).load(WD).to(gl.float32)
                    put(o * load_bfloat16(factors_s.index(slot), WD), goal, at, left, H, D, BD, STORED)
                else:
                    put(o * factors_s.index(slot).load(WD).to(gl.float32), goal, at, left, H, D, BD, STORED)
        if WG == 1:
            mbarrier.arrive(ready.index(STAGES + slot), count=1)
        elif i + STAGES < count:
            mbarrier.wait(ready.index(STAGES + slot), (i // STAGES) & 1)
            fetch(i + STAGES, count, stages, arrivals, descriptors, C, STAGES, REVERSE, COPIED)
        if LEARNED:  # noqa: SIM102
            if (count - 1 - i) % GROUP == 0:
                p_state = states + ((count - 1 - i) // GROUP).to(gl.int64) * (H * BK * BV)
                gl.store(p_state + ((o_v * BK)[None, :] + o_k[:, None]), state.to(dtype))
    if not STORED:
        tma.store_wait(0)
    mbarrier.wait(ready.index(count % STAGES), (count // STAGES) & 1)
    if FINAL:
        state = settled(state) * before_s.load(gl.SliceLayout(1, W))[:, None]
        store_state(dh0 + o_state, state, last, o_k, o_v, K, V, BK, BV)


_LENGTHS = ["stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt",
            "stride_vh", "stride_ob", "stride_ot", "stride_oh", "stride_gb", "stride_gt", "stride_gh",
            "stride_gamma_b", "T", "L"]


@gluon.jit(do_not_specialize=_LENGTHS)
def keys_kernel(
    q, k, v, do, g, gamma, dht, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh, stride_gb, stride_gt, stride_gh, stride_gamma_b, scale, T, L,
    dk, dv, dh0, dots, room, states,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, GROUP: gl.constexpr,
):
    """dk and dv of one head of one sequence, or of one segment of it, with gates ``[B, T, H, K]``.

    Two partitions of a warpgroup multiply, one of two works the gates in. Otherwise as ``gradients_kernel``.

    dots ``[chunks, H, 2, room_of(BK // 2)]`` get the products of k with dk, but in mild chunks without a token's pair
    with itself; strong chunks add them up in room ``[walks, H, C, BK]``. states ``[groups, H, BV, BK]`` get the
    gradients of the state before each GROUP chunks, but for the ``exp2(G_total / 2)`` of a first one that is not
    strong.
    """
    i_h = gl.program_id(0) % H
    i_o = gl.program_id(0) // H
    i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, not REVERSE)
    natural = natural_decay(gamma, i_b, i_h, stride_gamma_b)
    HALF: gl.constexpr = BV // 2
    dtype: gl.constexpr = k.dtype.element_ty
    g_dtype: gl.constexpr = g.dtype.element_ty
    # Wide gates have no room in shared memory.
    COPIED: gl.constexpr = g_dtype != gl.float32
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    # Of what is cut into halves.
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    VECTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    INIT: gl.constexpr = dht is not None
    FINAL: gl.constexpr = dh0 is not None
    LEARNED: gl.constexpr = dots is not None
    STORED_K: gl.constexpr = dk.dtype.element_ty != dtype
    STORED_V: gl.constexpr = dv.dtype.element_ty != dtype

    q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, KEYS)
    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, KEYS)
    v_desc = describe(v, i_b, token, i_h // RV, size, stride_vb, stride_vt, stride_vh, C, V, BV, VALUES)
    do_desc = describe(do, i_b, token, i_h, size, stride_ob, stride_ot, stride_oh, C, V, BV, PART)
    # The last tiles are for strong chunks, and for dk and dv.
    q_s = gl.allocate_shared_memory(dtype, [STAGES + 1, C, BK], KEYS)
    k_s = gl.allocate_shared_memory(dtype, [STAGES + 1, C, BK], KEYS)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], PART)
    state_s = gl.allocate_shared_memory(dtype, [BK, BV], PART)
    before_s = gl.allocate_shared_memory(gl.float32, [BK], VECTOR)
    kinds_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1], VECTOR)
    sums_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, BK], VECTORS)
    least_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, 2], VECTORS)
    arrivals = gl.allocate_shared_memory(gl.int64, [3 * STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    met = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    rows_of_batch = T.to(gl.int64) * H
    of_token = (i_b.to(gl.int64) * T + token) * H + i_h
    p_g = g + i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
    if COPIED:
        GATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], g_dtype)
        g_desc = describe(g, i_b, token, i_h // RG, size, stride_gb, stride_gt, stride_gh, C, K, BK, GATES)
        g_s = gl.allocate_shared_memory(g_dtype, [STAGES, C, BK], GATES)
        factors_s = reinterpret(g_s, gl.float16, [STAGES, C, BK], GATES)
    else:
        FACTORS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.float16)
        factors_s = gl.allocate_shared_memory(gl.float16, [STAGES, C, BK], FACTORS)
        g_desc = k_desc
        g_s = k_s
    # What is absent is something else, which nobody reads.
    dk_desc = k_desc
    dv_desc = k_desc
    p_dk = dk + of_token * K
    p_dv = dv + of_token * V
    p_dht = k
    p_dh0 = k
    p_dots = k
    p_room = k
    p_states = k
    if not STORED_K:
        dk_desc = describe(dk, i_b, token, i_h, size, rows_of_batch * K, H * K, K, C, K, BK, KEYS)
    dv_s = k_s.index(STAGES)
    if not STORED_V:
        dv_desc = describe(dv, i_b, token, i_h, size, rows_of_batch * V, H * V, V, C, V, BV, VALUES)
        if BV != BK:
            dv_s = gl.allocate_shared_memory(dtype, [C, BV], VALUES)
    if INIT:
        p_dht = dht + (i_o.to(gl.int64) * H + i_h) * K * V
    if FINAL:
        p_dh0 = dh0 + (i_n.to(gl.int64) * H + i_h) * K * V
    if LEARNED:
        p_dots = dots + (group_slot(i_o, token, T, L, C, PACKED, SPLIT) * H + i_h) * (2 * room_of(BK // 2))
        p_room = room + gl.program_id(0).to(gl.int64) * (C * BK)
        p_states = states + (group_slot(i_o, token, T, L, GROUP * C, PACKED, SPLIT) * H + i_h) * (BK * BV)
    for i in gl.static_range(3 * STAGES):
        mbarrier.init(arrivals.index(i), count=1)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(3):
        mbarrier.init(met.index(i), count=2)
    mbarrier.init(met.index(3), count=1)
    fence_async_shared()
    stages = (q_s, k_s, v_s, do_s, g_s)
    vectors = (before_s, kinds_s)
    tiles = (sums_s, least_s)
    shared = (stages, factors_s, arrivals, ready, vectors, state_s, met)
    descriptors = (q_desc, k_desc, v_desc, do_desc, g_desc)
    dk_goal = (q_s.index(STAGES), dk_desc, p_dk)
    dv_goal = (dv_s, dv_desc, p_dv)
    borders = (p_dht, p_dh0)
    remains = (p_dots, p_room, p_states)
    gl.warp_specialize(
        [
            (multiply, (shared, descriptors, dv_goal, borders, remains, size, last, scale, 0, H, C, K, V, BK, BV,
                        STAGES, REVERSE, STORED_V, INIT, FINAL, COPIED, LEARNED, GROUP)),
            (multiply, (shared, descriptors, dk_goal, borders, remains, size, last, scale, 1, H, C, K, V, BK, BV,
                        STAGES, REVERSE, STORED_K, INIT, FINAL, COPIED, LEARNED, GROUP)),
            (work_in_gates, (stages, factors_s, arrivals, ready, met, tiles, vectors, p_g, stride_gt, natural, size,
                             scale, C, K, BK, STAGES, REVERSE, gamma is not None, COPIED)),
        ],
        [4, 8],
        [176, 80],
    )
