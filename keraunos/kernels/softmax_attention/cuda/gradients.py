"""The gradients of softmax attention: one walk over queries for each block of keys, and sums in a fixed order.

Two multiplying partitions have 64 keys each of a block. For tiles of queries i, of all heads that share the keys, they
make each weight once, with keys as rows, so that weights are left operands where they lie in registers::

    X^T = K Q_i^T         P^T  = exp2(X^T - lse)          dV += P^T dO_i
    Y^T = V dO_i^T        dX^T = P^T (Y^T - mean)         dK += dX^T Q_i
                                                          dQ_i += dX K

``mean`` is ``sum_v o do``, each query's. With a cap, ``dX`` takes the tangent's slope; with dropout, ``P`` of the first
product and ``Y`` are what is kept of them. For ``dX K`` the partitions
put ``dX^T`` side by side into shared memory, and each makes 64 columns, or 64 rows, of the product.

``dQ`` is a sum over blocks of keys, which programs make at once. A partition of one warp adds the blocks' parts to
float32 in memory, always from the last block to the first: each waits until the block behind it has added its part.
Blocks are also taken in that order, and a block waits only for blocks taken before, so that one can always go on. With
limits each block begins one tile before the next one does and hardly ever waits. The same call gives the same bits.
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

from keraunos.kernels.device.hopper import await_turn, tell
from keraunos.kernels.gluon import add_out, copy_in, copy_out, lengths, thread_barrier
from keraunos.kernels.softmax_attention.cuda.forward import (
    LANES,
    LOG2E,
    bounds,
    describe,
    kept,
    locate,
    moved,
    narrowed,
    tanh,
)

# The numbers that the copying partition says of a tile.
SAID = gl.constexpr(7)


@gluon.jit(do_not_specialize=["stride_keyb", "left", "right", "T", "S", "NS", "NT"])
def range_kernel(key_ids, spreads, offsets, stride_keyb, left, right, T, S, NS, NT, ranges, N: gl.constexpr,
                 BT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, OFFSET: gl.constexpr):
    """``ranges [B, 4, NS]``: :func:`narrowed` for each block of N keys, in tiles of BT queries."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i_b, i_s = gl.program_id(0) // NS, gl.program_id(0) % NS
    s0 = i_s * N
    s = s0 + gl.arange(0, N, layout=LINE)
    ids = gl.load(key_ids + i_b.to(gl.int64) * stride_keyb + s, mask=s < S, other=-1)
    left, right = moved(left, right, offsets, i_b, OFFSET)
    lo, hi, whole_lo, whole_hi = bounds(s0, gl.minimum(s0 + N, S) - 1, T, right, left, RIGHT, LEFT, BT)
    p_spreads = spreads + i_b.to(gl.int64) * 3 * NT
    lo, hi, whole_lo, whole_hi = narrowed(lo, hi, whole_lo, whole_hi, ids, s < S, p_spreads, spreads, NT, True, False,
                                          LINE, LANES)
    p_ranges = ranges + i_b.to(gl.int64) * 4 * NS + i_s
    gl.store(p_ranges, lo)
    gl.store(p_ranges + NS, hi)
    gl.store(p_ranges + 2 * NS, whole_lo)
    gl.store(p_ranges + 3 * NS, whole_hi)


@gluon.jit
def monotone(ranges, i_s, NS, NT, LAYOUT: gl.constexpr):
    """The range of block i_s, and where that of the blocks behind begins, made wider where ranges do not follow.

    Then the blocks that a tile of queries meets are neighbours, as far as there are any between.
    """
    lo = i_s * 0 + NT
    behind = lo
    hi = i_s * 0
    for first in range(0, NS, LANES):
        n = first + gl.arange(0, LANES, layout=LAYOUT)
        n_lo = gl.load(ranges + n, mask=n < NS, other=0)
        n_hi = gl.load(ranges + NS + n, mask=n < NS, other=0)
        some = n_lo < n_hi
        lo = gl.minimum(lo, gl.min(gl.where(some & (n >= i_s), n_lo, NT), 0))
        behind = gl.minimum(behind, gl.min(gl.where(some & (n > i_s), n_lo, NT), 0))
        hi = gl.maximum(hi, gl.max(gl.where(some & (n <= i_s), n_hi, 0), 0))
    return lo, hi, gl.load(ranges + 2 * NS + i_s), gl.load(ranges + 3 * NS + i_s), behind


@gluon.jit
def copy(shared, barriers, descriptors, means, queries, ranges, sizes, begin, tiles, taken, M, H: gl.constexpr,
         R: gl.constexpr, N: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr,
         RIGHT: gl.constexpr, OFFSET: gl.constexpr, SEGMENTS: gl.constexpr):
    """A partition of one warp: takes blocks of keys, says what they are, copies them and their tiles of queries.

    It also copies out the gradients of keys and values, which lie where these were. The first queries of a block come
    before its keys, as their product is issued, with the keys before, at the end of the walk before; after the last
    walk some others do. A block always has a tile of queries: of one that nobody sees nothing is added.
    """
    q_s, do_s, k_s, v_s, number_s, plan_s = shared
    held, done, full, empty = barriers
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc = descriptors
    lse, mean = means
    offsets, left, right = queries
    T, S = sizes
    G: gl.constexpr = H // R
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ROW: gl.constexpr = gl.BlockedLayout([BT // 32], [32], [1], [0])
    NS = gl.cdiv(S, N)
    NT = gl.cdiv(T, BT)
    one = gl.full([1], 1, gl.int32, LINE)
    c = tiles * 0
    r = c
    old_b = c
    old_g = c
    old_s0 = c
    going = tiles >= 0
    while going:
        n = begin + gl.atomic_add(taken, 1)
        going = n < tiles
        i_b, i_g, s0 = locate(gl.minimum(n, tiles - 1), S, M, G, N)
        i_s = s0 // N
        far_left, far_right = moved(left, right, offsets, i_b, OFFSET)
        if SEGMENTS:
            lo, hi, whole_lo, whole_hi, behind = monotone(ranges + i_b.to(gl.int64) * 4 * NS, i_s, NS, NT, LINE)
        else:
            lo, hi, whole_lo, whole_hi = bounds(s0, gl.minimum(s0 + N, S) - 1, T, far_right, far_left, RIGHT, LEFT, BT)
            behind, _hi, _lo, _end = bounds(s0 + N, s0 + N, T, far_right, far_left, RIGHT, LEFT, BT)
            behind = gl.where(s0 + N < S, behind, NT)
        whole_hi = gl.where(s0 + N <= S, whole_hi, whole_lo)
        real = hi > lo
        lo = gl.minimum(lo, NT - 1)
        count = gl.where(going, gl.maximum(hi - lo, 1), 1)
        walk = gl.where(going, count * R, 1)
        i_h = i_g * R
        i_t = lo
        for i in range(walk):
            stage = c % STAGES
            i_bh = (i_b * H + i_h).to(gl.int64)
            row = i_t * BT
            t = row + gl.arange(0, BT, layout=ROW)
            some_lse = gl.load(lse + i_bh * T + t, mask=t < T, other=float("inf"))
            some_mean = gl.load(mean + i_bh * T + t, mask=t < T, other=0.0)
            mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)
            number_s.index(2 * stage).store(some_lse)
            number_s.index(2 * stage + 1).store(some_mean)
            thread_barrier()
            arrived = full.index(stage)
            mbarrier.expect(arrived, 2 * q_desc.block_type.nbytes)
            copy_in(q_desc, [i_b, i_h, row, 0], arrived, q_s.index(stage))
            copy_in(do_desc, [i_b, i_h, row, 0], arrived, do_s.index(stage))
            c += 1
            i_t += 1
            if i_t == lo + count:
                i_h += 1
                i_t = lo
            if i == 0:
                if r > 0:
                    mbarrier.wait(done, (r & 1) ^ 1)
                    copy_out(dk_desc, [old_b, old_g, old_s0, 0], k_s)
                    copy_out(dv_desc, [old_b, old_g, old_s0, 0], v_s)
                    tma.store_wait(0)
                plan = SAID * (r & 1)
                plan_s.index(plan).store(one * gl.where(going, n, tiles))
                plan_s.index(plan + 1).store(one * lo)
                plan_s.index(plan + 2).store(one * count)
                plan_s.index(plan + 3).store(one * whole_lo)
                plan_s.index(plan + 4).store(one * whole_hi)
                plan_s.index(plan + 5).store(one * behind)
                plan_s.index(plan + 6).store(one * real.to(gl.int32))
                thread_barrier()
                if going:
                    mbarrier.expect(held, 2 * k_desc.block_type.nbytes)
                    copy_in(k_desc, [i_b, i_g, s0, 0], held, k_s)
                    copy_in(v_desc, [i_b, i_g, s0, 0], held, v_s)
                else:
                    mbarrier.arrive(held, count=1)
        old_b = i_b
        old_g = i_g
        old_s0 = s0
        r += 1


@gluon.jit
def said(plan_s, r, at: gl.constexpr, WARPS: gl.constexpr):
    """One of the numbers that :func:`copy` says of the program's r-th block."""
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(plan_s.index(SAID * (r & 1) + at).load(FLAG), 0)


@gluon.jit
def add(dq_s, plan_s, held, summed, added, dq_desc, turns, sizes, first, tiles, M, H: gl.constexpr, R: gl.constexpr,
        N: gl.constexpr, BT: gl.constexpr):
    """A partition of one warp: adds a block's parts to the gradients of queries, when it is the block's turn.

    ``turns [HEADS R, NT]``: of each tile of queries, how many blocks from the end have been there. It is written when
    the part has arrived in memory, for which nobody waits before the next part is on its way.
    """
    T, S = sizes
    NS = gl.cdiv(S, N)
    NT = gl.cdiv(T, BT)
    c = tiles * 0
    r = c
    mbarrier.wait(held, 0)
    n = said(plan_s, r, 0, 1)
    while n < tiles:
        i_b, i_g, s0 = locate(n, S, M, H // R, N)
        lo = said(plan_s, r, 1, 1)
        count = said(plan_s, r, 2, 1)
        behind = said(plan_s, r, 5, 1)
        real = said(plan_s, r, 6, 1) > 0
        number = NS - s0 // N
        before = turns
        i_bh = i_b * H + (i_g - first) * R
        i_t = lo
        for i in range(count * R):
            turn = turns + i_bh.to(gl.int64) * NT + i_t
            follows = i_t >= behind
            if real & follows:
                await_turn(turn, number - 1)
            mbarrier.wait(summed, c & 1)
            if real:
                for w in gl.static_range(2):
                    # Two halves of 64 rows, or of 64 columns.
                    row = i_t * BT + (w * 64 if BT == 128 else 0)
                    column = 0 if BT == 128 else w * 64
                    if follows:
                        add_out(dq_desc, [0, i_bh, row, column], dq_s.index(w))
                    else:
                        copy_out(dq_desc, [0, i_bh, row, column], dq_s.index(w))
            tma.store_wait(0)
            mbarrier.arrive(added, count=1)
            if real & (i > 0):
                tell(before, number, 2)
            before = turn
            c += 1
            i_t += 1
            if i_t == lo + count:
                i_bh += 1
                i_t = lo
        if real:
            tell(before, number, 0)
        r += 1
        mbarrier.wait(held, r & 1)
        n = said(plan_s, r, 0, 1)


@gluon.jit
def hidden(x, s, t, own, other, S, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, SEGMENTS: gl.constexpr):
    """Logits with keys s as rows and queries t as columns, -inf where the key is not visible."""
    last = t * 0 + (S - 1)
    if RIGHT:
        last = gl.minimum(t + right, last)
    seen = s[:, None] <= last[None, :]
    if LEFT:
        seen = seen & (s[:, None] >= (t - left)[None, :])
    if SEGMENTS:
        seen = seen & (own[None, :] == other[:, None]) & (other >= 0)[:, None]
    return gl.where(seen, x, float("-inf"))


@gluon.jit
def plane(x, strides, i_b, i_h, i_t, s, sizes, R: gl.constexpr, BT: gl.constexpr, W: gl.constexpr):
    """A tile of a bias or a mask ``[1 or B, H / R, T, S]``, keys s as rows and queries as columns; 0 past the ends."""
    stride_b, stride_h, stride_t = strides
    T, S = sizes
    t = i_t * BT + gl.arange(0, BT, layout=gl.SliceLayout(0, W))
    x += i_b.to(gl.int64) * stride_b + (i_h // R).to(gl.int64) * stride_h
    inside = (s < S)[:, None] & (t < T)[None, :]
    return gl.load(x + (t.to(gl.int64) * stride_t)[None, :] + s[:, None], mask=inside, other=0)


@gluon.jit
def logits(k, q_s, full, c, none, BT: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr):
    """The product of 64 keys and the c-th tile of queries, under way."""
    mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
    q = q_s.index(c % STAGES).reshape([BT, BD])
    return warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def differentiate(shared, barriers, queries, keys, planes, dropout, numbers, sizes, tiles, M, WG: gl.constexpr,
                  H: gl.constexpr, R: gl.constexpr, RB: gl.constexpr, RM: gl.constexpr, N: gl.constexpr,
                  BT: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr, CAP: gl.constexpr, LEFT: gl.constexpr,
                  RIGHT: gl.constexpr, OFFSET: gl.constexpr, SEGMENTS: gl.constexpr, BIAS: gl.constexpr,
                  MASK: gl.constexpr, DROPOUT: gl.constexpr):
    """A partition of one warpgroup: 64 keys of each block, and half of what the block adds to queries' gradients."""
    q_s, do_s, k_s, v_s, number_s, plan_s, dx_s, dq_s = shared
    held, done, full, empty, whole, over, summed, added = barriers
    query_ids, stride_queryb, offsets, left, right = queries
    key_ids, stride_keyb = keys
    bias, strides_bias, mask, strides_mask = planes
    seed, keep, threshold = dropout
    scale, inner, unit = numbers
    T, S = sizes
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    WD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    WQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT_OF: gl.constexpr = gl.DotOperandLayout(0, WD, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, W)
    # What the dropout keeps takes long enough to find out for a product, where registers have room for it.
    EARLY: gl.constexpr = DROPOUT and BT == 64
    dtype: gl.constexpr = q_s.dtype
    none = gl.zeros([64, BT], gl.float32, W)
    nothing = gl.zeros([64, 64], gl.float32, WQ)
    if DROPOUT:
        first = gl.load(seed)
        second = gl.load(seed + 1)
    k_all = k_s.reshape([N, BD])
    k = k_all.slice(64 * WG, 64, 0)
    v = v_s.reshape([N, BD]).slice(64 * WG, 64, 0)
    c = tiles * 0
    r = c
    mbarrier.wait(held, 0)
    n = said(plan_s, r, 0, 4)
    while n < tiles:
        i_b, i_g, s0 = locate(n, S, M, H // R, N)
        far_left, far_right = moved(left, right, offsets, i_b, OFFSET)
        lo = said(plan_s, r, 1, 4)
        count = said(plan_s, r, 2, 4)
        whole_lo = said(plan_s, r, 3, 4)
        whole_hi = said(plan_s, r, 4, 4)
        s = s0 + WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, W))
        other = s
        if SEGMENTS:
            other = gl.load(key_ids + i_b.to(gl.int64) * stride_keyb + s, mask=s < S, other=-1)
        dk = gl.zeros([64, BD], gl.float32, WD)
        dv = gl.zeros([64, BD], gl.float32, WD)
        x = logits(k, q_s, full, c, none, BT, BD, STAGES)
        x = warpgroup_mma_wait(0, deps=[x])
        i_t = lo
        i_h = i_g * R
        # Biases and masks are loaded while the product that they are for is under way.
        if BIAS:
            b_bias = plane(bias, strides_bias, i_b, i_h, i_t, s, sizes, RB, BT, W)
        if MASK:
            b_seen = plane(mask, strides_mask, i_b, i_h, i_t, s, sizes, RM, BT, W)
        for _ in range(count * R):
            stage = c % STAGES
            q = q_s.index(stage).reshape([BT, BD])
            do = do_s.index(stage).reshape([BT, BD])
            if EARLY:
                y = warpgroup_mma(v, do.permute((1, 0)), none, use_acc=False, is_async=True)
            if CAP:
                x = tanh(x * inner, CAP)
            p = x * unit - number_s.index(2 * stage).load(ROW)[None, :]
            if BIAS:
                p += b_bias.to(gl.float32) * LOG2E
            if MASK:
                p = gl.where(b_seen != 0, p, float("-inf"))
            if (i_t < whole_lo) | (i_t >= whole_hi):
                t = i_t * BT + gl.arange(0, BT, layout=ROW)
                own = t
                if SEGMENTS:
                    own = gl.load(query_ids + i_b.to(gl.int64) * stride_queryb + t, mask=t < T, other=-1)
                p = hidden(p, s, t, own, other, S, far_left, far_right, LEFT, RIGHT, SEGMENTS)
            p = gl.exp2(p)
            if DROPOUT:
                # A weight that is left out is below 0 until its gradient is made.
                columns = i_t * BT + gl.arange(0, BT, layout=ROW)
                p = gl.where(kept(first, second, i_b * H + i_h, columns[None, :], s[:, None], threshold), p, -p)
                weights = gl.convert_layout(gl.maximum(p, 0.0).to(dtype), LEFT_OF)
            else:
                weights = gl.convert_layout(p.to(dtype), LEFT_OF)
            if CAP:
                p = p * (1.0 - x * x)
            if not EARLY:
                y = warpgroup_mma(v, do.permute((1, 0)), none, use_acc=False, is_async=True)
            dv = warpgroup_mma(weights, do, dv, is_async=True)
            y = warpgroup_mma_wait(1, deps=[y])
            mean = number_s.index(2 * stage + 1).load(ROW)[None, :]
            y = gl.where(p > 0.0, y * keep - mean, mean) if DROPOUT else y - mean
            dx = (p * y).to(dtype)
            dx_s.index(c & 1).slice(64 * WG, 64, 0).store(dx)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(whole, count=1)
            dk = warpgroup_mma(gl.convert_layout(dx, LEFT_OF), q, dk, is_async=True)
            dv = warpgroup_mma_wait(1, deps=[dv])
            mbarrier.wait(whole, c & 1)
            if BT == 128:
                dq = warpgroup_mma(dx_s.index(c & 1).slice(64 * WG, 64, 1).permute((1, 0)), k_all, nothing,
                                   use_acc=False, is_async=True)
            else:
                dq = warpgroup_mma(dx_s.index(c & 1).permute((1, 0)), k_all.slice(64 * WG, 64, 1), nothing,
                                   use_acc=False, is_async=True)
            c += 1
            x = logits(k, q_s, full, c, none, BT, BD, STAGES)
            dq, dk = warpgroup_mma_wait(1, deps=[dq, dk])
            thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            mbarrier.wait(added, c & 1)
            dq_s.index(WG).reshape([64, 64]).store(dq)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(summed, count=1)
            ends = i_t == lo + count - 1
            i_t = gl.where(ends, lo, i_t + 1)
            # After the last tile, the one of which nothing is made is any.
            i_h = gl.minimum(gl.where(ends, i_h + 1, i_h), i_g * R + R - 1)
            if BIAS:
                b_bias = plane(bias, strides_bias, i_b, i_h, i_t, s, sizes, RB, BT, W)
            if MASK:
                b_seen = plane(mask, strides_mask, i_b, i_h, i_t, s, sizes, RM, BT, W)
            x = warpgroup_mma_wait(0, deps=[x])
        thread_barrier()
        mbarrier.arrive(over, count=1)
        mbarrier.wait(over, r & 1)
        k.store((dk * scale).to(dtype))
        v.store(((dv * keep) if DROPOUT else dv).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(done, count=1)
        r += 1
        mbarrier.wait(held, r & 1)
        n = said(plan_s, r, 0, 4)
    # The product of what follows the last walk is not made.
    mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)


@gluon.jit(do_not_specialize=lengths(("q", "k", "v", "do", "bias", "mask"), "stride_queryb", "stride_keyb",
                                     "threshold", "left", "right", "B", "T", "S", "FIRST", "HEADS", "M"))
def gradients_kernel(
    q, k, v, bias, mask, query_ids, key_ids, ranges, seed, offsets, do, lse, mean, counts, dk_given, dv_given,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_dob, stride_dot, stride_doh, stride_biasb, stride_biash, stride_biast, stride_maskb, stride_maskh,
    stride_maskt, stride_queryb, stride_keyb, scale, inner, unit, keep, threshold, left, right, B, T, S, FIRST,
    HEADS, M,
    dq, dk, dv, counted,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, RB: gl.constexpr, RM: gl.constexpr,
    N: gl.constexpr, BT: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr, CAP: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, OFFSET: gl.constexpr, SEGMENTS: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr,
    DROPOUT: gl.constexpr, REGISTERS: gl.constexpr, OTHERS: gl.constexpr,
):
    """``dk``, ``dv``; ``dq [HEADS R, T, K]`` in float32 without the scale, not written where no block meets a query.

    q, do: ``[B, T, H, K or V]``; k, v, dk, dv: ``[B, S, H / R, K or V]``; lse, mean: ``[B, H, T]``, the first base 2.
    ranges: of ``range_kernel``, of segments. ``counts [1 + HEADS R tiles]``, zeros in the beginning, and ``counted``,
    its memory: how many blocks are taken, and turns of each tile of queries.
    Other arguments are as for ``forward_kernel``; without a cap ``unit`` is the scale, base 2, with its sign.

    Programs take blocks of N = 128 keys as they come, those of M heads of keys together, and walk over tiles of BT
    queries: 64 of 128 dimensions (BD), 128 of 64. Without RIGHT all blocks of a head begin at its first queries, one
    after the other, and several heads keep programs busy.

    A launch makes the gradients of HEADS heads of keys, from head FIRST on of all ``B H / R`` in a row; M must divide
    both. ``dk_given`` and ``dv_given`` have no values that are read: later launches write into the first one's dk, dv.
    """
    dtype: gl.constexpr = k.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BT, BD], dtype)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, N, BD], dtype)
    SUM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 64, 64], gl.float32)
    ACROSS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, BT], dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    G: gl.constexpr = H // R
    q_desc = describe(q, B, T, H, stride_qb, stride_qt, stride_qh, K, BT, BD, TILE)
    do_desc = describe(do, B, T, H, stride_dob, stride_dot, stride_doh, V, BT, BD, TILE)
    k_desc = describe(k, B, S, G, stride_kb, stride_kt, stride_kh, K, N, BD, BLOCK)
    v_desc = describe(v, B, S, G, stride_vb, stride_vt, stride_vh, V, N, BD, BLOCK)
    dk_desc = describe(dk, B, S, G, S.to(gl.int64) * (G * K), G * K, K, K, N, BD, BLOCK)
    dv_desc = describe(dv, B, S, G, S.to(gl.int64) * (G * V), G * V, V, V, N, BD, BLOCK)
    dq_desc = describe(dq, 1, T, HEADS * R, K, K, T.to(gl.int64) * K, K, 64, 64, SUM)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BT, BD], TILE)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BT, BD], TILE)
    k_s = gl.allocate_shared_memory(dtype, [1, 1, N, BD], BLOCK)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, N, BD], BLOCK)
    dx_s = gl.allocate_shared_memory(dtype, [2, N, BT], ACROSS)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, 64], SUM)
    number_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BT], PLAIN)
    plan_s = gl.allocate_shared_memory(gl.int32, [2 * SAID, 1], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    held = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    whole = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    over = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    summed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    added = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(held, count=1)
    mbarrier.init(done, count=2)
    mbarrier.init(whole, count=2)
    mbarrier.init(over, count=2)
    mbarrier.init(summed, count=2)
    mbarrier.init(added, count=1)
    fence_async_shared()

    if not SEGMENTS:
        query_ids = lse
        key_ids = lse
        ranges = lse
    if not BIAS:
        bias = lse
    if not MASK:
        mask = lse
    if not DROPOUT:
        seed = lse
    if not OFFSET:
        offsets = lse
    begin = FIRST * gl.cdiv(S, N)
    tiles = begin + HEADS * gl.cdiv(S, N)
    ring = (q_s, do_s, k_s, v_s, number_s, plan_s)
    shared = (q_s, do_s, k_s, v_s, number_s, plan_s, dx_s, dq_s)
    barriers = (held, done, full, empty, whole, over, summed, added)
    queries = (query_ids, stride_queryb, offsets, left, right)
    keys = (key_ids, stride_keyb)
    planes = (bias, (stride_biasb, stride_biash, stride_biast), mask, (stride_maskb, stride_maskh, stride_maskt))
    dropout = (seed, keep, threshold)
    numbers = (scale, inner, unit)
    descriptors = (q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc)
    gl.warp_specialize(
        [
            (differentiate, (shared, barriers, queries, keys, planes, dropout, numbers, (T, S), tiles, M, 0, H, R, RB,
                             RM, N, BT, BD, STAGES, CAP, LEFT, RIGHT, OFFSET, SEGMENTS, BIAS, MASK, DROPOUT)),
            (differentiate, (shared, barriers, queries, keys, planes, dropout, numbers, (T, S), tiles, M, 1, H, R, RB,
                             RM, N, BT, BD, STAGES, CAP, LEFT, RIGHT, OFFSET, SEGMENTS, BIAS, MASK, DROPOUT)),
            (copy, (ring, (held, done, full, empty), descriptors, (lse, mean), (offsets, left, right), ranges, (T, S),
                    begin, tiles, counted, M, H, R, N, BT, STAGES, LEFT, RIGHT, OFFSET, SEGMENTS)),
            (add, (dq_s, plan_s, held, summed, added, dq_desc, counted + 1, (T, S), FIRST, tiles, M, H, R, N, BT)),
        ],
        [4, 1, 1],
        [REGISTERS, OTHERS, OTHERS],
    )


@gluon.jit(do_not_specialize=["T", "NT", "first"])
def queries_kernel(sums, counted, dq_given, scale, T, NT, first, dq, H: gl.constexpr, K: gl.constexpr, BT: gl.constexpr,
                   BK: gl.constexpr):
    """``dq [B, T, H, K]`` from head ``first`` of all ``B H`` on: the sums ``[heads, T, K]`` times the scale.

    It is 0 of tiles that nobody has added to. ``dq_given`` has no values that are read: dq may overwrite it.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32 * 4 // BK, BK // 4], [4, 1], [1, 0])
    i_bh, i_t = gl.program_id(0) // NT, gl.program_id(0) % NT
    i_b, i_h = ((first + i_bh) // H).to(gl.int64), (first + i_bh) % H
    t = i_t * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, BK, layout=gl.SliceLayout(0, L))
    some = (t < T)[:, None] & (d < K)[None, :]
    met = gl.load(counted + 1 + i_bh.to(gl.int64) * NT + i_t) > 0
    x = gl.load(sums + (i_bh.to(gl.int64) * T + t)[:, None] * K + d[None, :], mask=some & met, other=0.0)
    p = dq + ((i_b * T + t) * (H * K) + i_h * K)[:, None] + d[None, :]
    gl.store(p, (x * scale).to(dq.dtype.element_ty), mask=some)
