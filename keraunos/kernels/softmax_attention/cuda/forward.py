"""The forward of softmax attention: warpgroups whose products run during each other's exponentials.

For tiles of queries ``Q_w``, one for each multiplying partition w, and blocks of keys j, the online softmax is::

    X_j = Q_w K_j^T                        logits, after scale and cap, base 2
    m_j = max(m_(j-1), max_s X_j)          per query
    P_j = exp2(X_j - m_j)
    l_j = l_(j-1) exp2(m_(j-1) - m_j) + sum_s P_j
    O_j = O_(j-1) exp2(m_(j-1) - m_j) + P_j V_j

and in the end ``O / l`` and ``m + log2(l)``, sinks being added to ``l``. A partition issues ``X_(j+1)`` and ``P_j V_j``
one after the other and makes ``P_(j+1)`` while the second, and those of the other partition, are under way.

A stage of the ring holds what is issued together: block j of the keys and block j - 1 of the values. Blocks of which no
query of the program's tile sees any key are not walked over, and those of which all see every key take no mask.
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
from triton.language import PropagateNan

from keraunos.kernels.gluon import copy_in, copy_out, lengths, thread_barrier
from keraunos.kernels.softmax_attention.shared.tiles import mixed

LOG2E = gl.constexpr(1.4426950408889634)
# Offsets are no further from 0, so that sums with windows and places stay within 32 bits.
FAR = gl.constexpr(1 << 29)
# The partitions that multiply.
GROUPS = gl.constexpr(2)
# Blocks of which a warp compares the segments at once.
LANES = gl.constexpr(32)


@gluon.jit
def describe(x, B, T, H, stride_b, stride_t, stride_h, D: gl.constexpr, ROWS: gl.constexpr, BD: gl.constexpr,
             LAYOUT: gl.constexpr):
    """A descriptor of ``[B, T, H, D]`` as ``[B, H, T, D]``, in blocks of ROWS tokens of one head and BD dimensions."""
    sizes = [gl.maximum(B, 1), gl.maximum(H, 1), gl.maximum(T, 1), D]
    return tma.make_tensor_descriptor(x, sizes, [stride_b, stride_h, stride_t, 1], [1, 1, ROWS, BD], LAYOUT)


@gluon.jit
def following(i, taken, SHARED: gl.constexpr):
    """The i-th tile of the program, i > 0.

    SHARED: the first that no program has taken yet; ``taken``, from 0, counts them. Who computes a tile changes none of
    its bits. Otherwise every other round goes the other way, so that if all heads are walked over together, programs
    have about as long walks.
    """
    programs = gl.num_programs(0)
    if SHARED:
        n = programs + gl.atomic_add(taken, 1)
    else:
        at = gl.program_id(0)
        n = i * programs + gl.where(i % 2 == 0, at, programs - 1 - at)
    return n


@gluon.jit
def locate(n, T, M, H: gl.constexpr, BT: gl.constexpr):
    """A tile -> (row of the batch, head, first query).

    M heads are walked over together, so that those that share keys read the same at once, and of them the longest walks
    of a causal call first.
    """
    NT = gl.cdiv(T, BT)
    i_bh = n // (M * NT) * M + n % M
    return i_bh // H, i_bh % H, (NT - 1 - n // M % NT) * BT


@gluon.jit
def moved(left, right, offsets, i_b, OFFSET: gl.constexpr):
    """How far queries of a row see, counted from their numbers; with OFFSET, their places are that much further on."""
    if OFFSET:
        offset = gl.minimum(gl.maximum(gl.load(offsets + i_b), -FAR), FAR).to(gl.int32)
        left = left - offset
        right = right + offset
    return left, right


@gluon.jit
def bounds(first, last, S, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, N: gl.constexpr):
    """The blocks of keys that any of the queries ``first`` to ``last`` sees, and in the middle those that all see."""
    lo = first * 0
    whole_lo = lo
    hi = lo + S
    whole_hi = hi
    if LEFT:
        lo = gl.maximum(first - left, 0)
        whole_lo = gl.maximum(last - left, 0)
    if RIGHT:
        hi = gl.minimum(last + right + 1, S)
        whole_hi = gl.minimum(first + right + 1, S)
    lo = lo // N
    hi = gl.maximum(gl.cdiv(hi, N), lo)
    whole_lo = gl.minimum(gl.maximum(gl.cdiv(whole_lo, N), lo), hi)
    whole_hi = gl.minimum(gl.maximum(whole_hi // N, whole_lo), hi)
    return lo, hi, whole_lo, whole_hi


@gluon.jit
def narrowed(lo, hi, whole_lo, whole_hi, ids, inside, spreads, flags, NS, SEGMENTS: gl.constexpr, MASK: gl.constexpr,
             LAYOUT: gl.constexpr, AT_ONCE: gl.constexpr):
    """:func:`bounds` without the blocks at both ends that segments or the mask hide, AT_ONCE of which are looked at.

    SEGMENTS: the queries' ids are ``ids``; ``spreads`` has each block's lowest id that is no padding, highest, and
    lowest of all. MASK: ``flags`` has 0 where nothing of a block is visible, 2 where everything is. The middle is what
    shows everything to all queries, if that is one run of blocks.
    """
    if SEGMENTS:
        highest = gl.max(gl.where(inside, ids, -1), 0)
        lowest = gl.min(gl.where(inside & (ids >= 0), ids, highest), 0)
        least = gl.min(gl.where(inside, ids, highest), 0)
    seen_lo = hi
    seen_hi = lo
    one_lo = hi
    one_hi = lo
    count = hi * 0
    for first in range(lo, hi, AT_ONCE):
        n = first + gl.arange(0, AT_ONCE, layout=LAYOUT)
        some = n < hi
        one = some & (n >= whole_lo) & (n < whole_hi)
        if MASK:
            flag = gl.load(flags + n, mask=some, other=0)
            one = one & (flag == 2)
            some = some & (flag > 0)
        if SEGMENTS:
            low = gl.load(spreads + n, mask=some, other=0)
            high = gl.load(spreads + NS + n, mask=some, other=-1)
            every = gl.load(spreads + 2 * NS + n, mask=some, other=-1)
            one = one & (every == highest) & (high == highest) & ((least == highest) & (highest >= 0))
            some = some & (high >= 0) & (low <= highest) & (high >= lowest) & (highest >= 0)
        seen_lo = gl.minimum(seen_lo, gl.min(gl.where(some, n, hi), 0))
        seen_hi = gl.maximum(seen_hi, gl.max(gl.where(some, n + 1, lo), 0))
        one_lo = gl.minimum(one_lo, gl.min(gl.where(one, n, hi), 0))
        one_hi = gl.maximum(one_hi, gl.max(gl.where(one, n + 1, lo), 0))
        count += gl.sum(one.to(gl.int32), 0)
    one_run = (count > 0) & (count == one_hi - one_lo)
    whole_lo = gl.where(one_run, one_lo, seen_lo)
    return seen_lo, gl.maximum(seen_hi, seen_lo), whole_lo, gl.where(one_run, one_hi, seen_lo)


@gluon.jit
def copy(shared, barriers, descriptors, queries, spreads, flags, stride_flagsb, sizes, tiles, taken, M,
         H: gl.constexpr, R: gl.constexpr, RM: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr,
         STAGES: gl.constexpr, HELD: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, OFFSET: gl.constexpr,
         SEGMENTS: gl.constexpr, MASK: gl.constexpr, SHARED: gl.constexpr):
    """A partition of one warp: copies tiles of queries, says which these are and which blocks they see, copies those.

    The last that it says is that there is no tile. A tile always has a block, so that there are products: that of
    queries that see nothing is masked.
    """
    q_s, k_s, v_s, plan_s = shared
    held, free, full, empty = barriers
    q_desc, k_desc, v_desc = descriptors
    query_ids, stride_queryb, offsets, left, right = queries
    T, S = sizes
    BT: gl.constexpr = GROUPS * ROWS
    IDS: gl.constexpr = gl.BlockedLayout([max(BT // 32, 1)], [32], [1], [0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ONE: gl.constexpr = k_desc.block_type.nbytes
    NS = gl.cdiv(S, N)
    one = gl.full([1], 1, gl.int32, LINE)
    c = tiles * 0
    r = c
    n = gl.program_id(0)
    while n < tiles:
        i_b, i_h, t0 = locate(n, T, M, H, BT)
        far_left, far_right = moved(left, right, offsets, i_b, OFFSET)
        lo, hi, whole_lo, whole_hi = bounds(t0, gl.minimum(t0 + BT, T) - 1, S, far_left, far_right, LEFT, RIGHT, N)
        if SEGMENTS or MASK:
            t = t0 + gl.arange(0, BT, layout=IDS)
            ids = t
            if SEGMENTS:
                ids = gl.load(query_ids + i_b.to(gl.int64) * stride_queryb + t, mask=t < T, other=-1)
            p_spreads = spreads + i_b.to(gl.int64) * 3 * NS
            p_flags = flags + ((i_b * stride_flagsb + i_h // RM).to(gl.int64) * gl.cdiv(T, BT) + t0 // BT) * NS
            lo, hi, whole_lo, whole_hi = narrowed(lo, hi, whole_lo, whole_hi, ids, t < T, p_spreads, p_flags, NS,
                                                  SEGMENTS, MASK, LINE, LANES)
        lo = gl.minimum(lo, NS - 1)
        count = gl.maximum(hi - lo, 1)
        slot = r % HELD
        mbarrier.wait(free.index(slot), ((r // HELD) & 1) ^ 1)
        plan_s.index(5 * slot).store(one * n)
        plan_s.index(5 * slot + 1).store(one * lo)
        plan_s.index(5 * slot + 2).store(one * count)
        plan_s.index(5 * slot + 3).store(one * whole_lo)
        plan_s.index(5 * slot + 4).store(one * whole_hi)
        thread_barrier()
        mbarrier.expect(held.index(slot), GROUPS * q_desc.block_type.nbytes)
        for w in gl.static_range(GROUPS):
            copy_in(q_desc, [i_b, i_h, t0 + w * ROWS, 0], held.index(slot), q_s.index(GROUPS * slot + w))
        for i in range(count + 1):
            stage = c % STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)
            both = (i > 0) & (i < count)
            mbarrier.expect(arrived, 2 * ONE, pred=both)
            mbarrier.expect(arrived, ONE, pred=(i == 0) | (i == count))
            row = (lo + i) * N
            copy_in(k_desc, [i_b, i_h // R, row, 0], arrived, k_s.index(stage), pred=i < count)
            copy_in(v_desc, [i_b, i_h // R, row - N, 0], arrived, v_s.index(stage), pred=i > 0)
            c += 1
        r += 1
        n = following(r, taken, SHARED)
    slot = r % HELD
    mbarrier.wait(free.index(slot), ((r // HELD) & 1) ^ 1)
    plan_s.index(5 * slot).store(one * tiles)
    thread_barrier()
    mbarrier.arrive(held.index(slot), count=1)


@gluon.jit
def said(plan_s, r, at: gl.constexpr, HELD: gl.constexpr):
    """One of the numbers that :func:`copy` says of the program's r-th tile, to a warpgroup that has waited for them."""
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(plan_s.index(5 * (r % HELD) + at).load(FLAG), 0)


@gluon.jit
def reciprocal(x):
    """``1 / x`` by NVIDIA's approximation, to 1 ulp."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


# Reciprocals of four numbers, whose product is finite, from that of their product.
RECIPROCALS = gl.constexpr("""{
.reg .f32 ab, cd, r;
mul.f32 ab, $4, $5;
mul.f32 cd, $6, $7;
mul.f32 r, ab, cd;
rcp.approx.ftz.f32 r, r;
mul.f32 cd, cd, r;
mul.f32 ab, ab, r;
mul.f32 $0, $5, cd;
mul.f32 $1, $4, cd;
mul.f32 $2, $7, ab;
mul.f32 $3, $6, ab;
}""")
NANS_TOO = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def below_one(x):
    """``tanh(x / (2 LOG2E)) - 1 = -2 / (2^x + 1) = 1 / (-1/2 - 2^(x - 1))``, to 3e-7.

    One unit makes exponentials and reciprocals, 16 a clock in a multiprocessor: four share a reciprocal. From x = 25 on
    the result is nearly 0.
    """
    x = -0.5 - gl.exp2(gl.minimum(x - 1.0, 24.0, propagate_nan=NANS_TOO))
    return gl.inline_asm_elementwise(RECIPROCALS, "=&f,=&f,=&f,=&f,f,f,f,f", [x], gl.float32, True, 4)


@gluon.jit
def tanh(x, CAP: gl.constexpr):
    """The hyperbolic tangent of ``x / (2 LOG2E)``. CAP 1: ``1 - 2 / (2^x + 1)``, to 3e-7; 2: to digits of its value.

    1: as in :func:`below_one`. 2: a quotient of polynomials, within 7.5e-7 everywhere and 2.7e-6 of its value, found by
    weighted least squares; past its ends the tangent is as near to 1.
    """
    if CAP == 1:
        x = gl.exp2(gl.minimum(x, 25.0, propagate_nan=NANS_TOO)) + 1.0
        x = gl.inline_asm_elementwise(RECIPROCALS, "=&f,=&f,=&f,=&f,f,f,f,f", [x], gl.float32, True, 4)
        return 1.0 - 2.0 * x
    x = gl.minimum(gl.maximum(x, -18.755, propagate_nan=NANS_TOO), 18.755, propagate_nan=NANS_TOO)
    y = x * x
    above = x * (0.34657273 + y * (0.005147671 + y * (1.1673464e-05 + y * 2.5294529e-09)))
    return above * reciprocal(1.0 + y * (0.05488972 + y * (0.00030785415 + y * 2.5769643e-07)))


@gluon.jit
def adorned(x, block, t, masked, bias, mask, stride_biast, stride_maskt, inner, unit, T, S, N: gl.constexpr,
            CAP: gl.constexpr, NEGATIVE: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr, W: gl.constexpr):
    """Logits, base 2, of products: scaled or capped, with the bias added, -inf where the boolean mask hides the key."""
    if CAP:
        x = tanh(x * inner, CAP)
    x = x * (-unit if NEGATIVE else unit)
    s = block * N + gl.arange(0, N, layout=gl.SliceLayout(0, W))
    inside = (t < T)[:, None] & (s < S)[None, :]
    if BIAS:
        p_bias = bias + (t.to(gl.int64) * stride_biast)[:, None] + s[None, :]
        x += gl.load(p_bias, mask=inside, other=0.0).to(gl.float32) * LOG2E
    if MASK:  # noqa: SIM102 - a constant, unlike the next condition
        if masked:
            p_mask = mask + (t.to(gl.int64) * stride_maskt)[:, None] + s[None, :]
            x = gl.where(gl.load(p_mask, mask=inside, other=0) != 0, x, float("-inf"))
    return x


@gluon.jit
def kept(first, second, i_bh, t, s, threshold):
    """Which weights of a tile the dropout keeps, by the two numbers of its seed.

    Places t of queries and s of keys have an axis of 1, so that they broadcast to the tile.
    """
    head = first.to(gl.uint32) + i_bh.to(gl.uint32)
    row = mixed(mixed(head) ^ mixed(second.to(gl.uint32) + t.to(gl.uint32)))
    key = mixed(s.to(gl.uint32) + 0x1E3779B9)
    return (mixed(row ^ key) >> 1).to(gl.int32) >= threshold


@gluon.jit
def hidden(x, block, t, own, p_ids, S, left, right, N: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
           SEGMENTS: gl.constexpr, W: gl.constexpr):
    """Logits of a block, -inf where the key is not visible."""
    s = block * N + gl.arange(0, N, layout=gl.SliceLayout(0, W))
    last = t * 0 + (S - 1)
    if RIGHT:
        last = gl.minimum(t + right, last)
    seen = s[None, :] <= last[:, None]
    if LEFT:
        seen = seen & (s[None, :] >= (t - left)[:, None])
    if SEGMENTS:
        other = gl.load(p_ids + s, mask=s < S, other=-1)
        seen = seen & (own[:, None] == other[None, :]) & (own >= 0)[:, None]
    return gl.where(seen, x, float("-inf"))


@gluon.jit
def weigh(x, top, total, inner, unit, masked, mask, S, N: gl.constexpr, CAP: gl.constexpr, NEGATIVE: gl.constexpr,
          LEFT: gl.constexpr, RIGHT: gl.constexpr, SEGMENTS: gl.constexpr, W: gl.constexpr):
    """The online softmax's step: products -> (weights, new maximum, new sum, factor of what was summed before).

    :func:`whole_logits` makes logits of the maximum.
    """
    block, t, own, p_ids, left, right = mask
    if CAP == 1:
        x = below_one(x * inner)
    elif CAP:
        x = tanh(x * inner, CAP)
    elif NEGATIVE:
        x = -x
    if masked:
        x = hidden(x, block, t, own, p_ids, S, left, right, N, LEFT, RIGHT, SEGMENTS, W)
    most = gl.maximum(top, gl.max(x, 1))
    zero = gl.where(most == float("-inf"), 0.0, most) * unit
    p = gl.exp2(x * unit - zero[:, None])
    decay = gl.exp2(top * unit - zero)
    return p, most, total * decay + gl.sum(p, 1), decay


@gluon.jit
def whole_logits(top, unit, CAP: gl.constexpr):
    """The maximum of logits, base 2, from that of :func:`weigh`, whose tanh has 1 subtracted."""
    top = top * unit
    if CAP == 1:
        top += unit
    return top


@gluon.jit
def weights(x, block, top, total, limits, planes, numbers, T, S, N: gl.constexpr, CAP: gl.constexpr,
            NEGATIVE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
            SEGMENTS: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr, DROPOUT: gl.constexpr, W: gl.constexpr):
    """:func:`weigh` of a block, with biases, masks and dropout."""
    t, own, p_ids, left, right, whole_lo, whole_hi = limits
    p_bias, stride_biast, p_mask, stride_maskt, seed, i_bh = planes
    inner, unit, threshold = numbers
    masked = (block < whole_lo) | (block >= whole_hi)
    ADORNED: gl.constexpr = BIAS or MASK
    if ADORNED:
        x = adorned(x, block, t, masked, p_bias, p_mask, stride_biast, stride_maskt, inner, unit, T, S, N, CAP,
                    NEGATIVE, BIAS, MASK, W)
    x, top, total, decay = weigh(x, top, total, inner, 1.0 if ADORNED else unit, masked,
                                 (block, t, own, p_ids, left, right), S, N, 0 if ADORNED else CAP,
                                 NEGATIVE and not ADORNED, LEFT, RIGHT, SEGMENTS, W)
    if DROPOUT:
        s = block * N + gl.arange(0, N, layout=gl.SliceLayout(0, W))
        x = gl.where(kept(gl.load(seed), gl.load(seed + 1), i_bh, t[:, None], s[None, :], threshold), x, 0.0)
    return x, top, total, decay


@gluon.jit
def with_sinks(top, total, p_sinks, SINKS: gl.constexpr):
    """A sum times 2^top, and sinks -> (another top, the sum with the sinks, the factor of what was summed before).

    The top stays near the keys' logits, whose differences from it then lose no digits, as long as the sinks' part of
    the sum is in range.
    """
    most = gl.load(p_sinks).to(gl.float32)
    for j in gl.static_range(1, SINKS):
        most = gl.maximum(most, gl.load(p_sinks + j).to(gl.float32))
    zero = gl.maximum(top, (most - 80.0) * LOG2E)
    zero = gl.where(zero == float("-inf"), 0.0, zero)
    scale = gl.exp2(top - zero)
    total = total * scale
    for j in gl.static_range(SINKS):
        total += gl.exp2(gl.load(p_sinks + j).to(gl.float32) * LOG2E - zero)
    return zero, total, scale


@gluon.jit
def attend(shared, barriers, goal, queries, keys, arrays, last, numbers, sizes, tiles, M, WG: gl.constexpr,
           H: gl.constexpr, RB: gl.constexpr, RM: gl.constexpr, RN: gl.constexpr, SINKS: gl.constexpr,
           ROWS: gl.constexpr, N: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
           HELD: gl.constexpr, CAP: gl.constexpr, NEGATIVE: gl.constexpr, LEFT: gl.constexpr,
           RIGHT: gl.constexpr, OFFSET: gl.constexpr, SEGMENTS: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr,
           DROPOUT: gl.constexpr):
    """A partition of one warpgroup: ROWS queries of each tile."""
    q_s, k_s, v_s, plan_s = shared
    held, free, full, empty = barriers
    o_desc, lse = goal
    query_ids, stride_queryb, offsets, left, right = queries
    key_ids, stride_keyb = keys
    bias, stride_biasb, stride_biash, stride_biast, mask, stride_maskb, stride_maskh, stride_maskt, seed = arrays
    sinks, stride_sinksh, keep = last
    T, S = sizes
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    WO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    LEFT_OF: gl.constexpr = gl.DotOperandLayout(0, WO, 2)
    dtype: gl.constexpr = q_s.dtype
    none = gl.zeros([ROWS, N], gl.float32, W)
    c = tiles * 0
    r = c
    mbarrier.wait(held.index(0), 0)
    n = said(plan_s, r, 0, HELD)
    while n < tiles:
        i_b, i_h, t0 = locate(n, T, M, H, GROUPS * ROWS)
        far_left, far_right = moved(left, right, offsets, i_b, OFFSET)
        t = t0 + WG * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, W))
        own = t
        p_ids = lse
        if SEGMENTS:
            own = gl.load(query_ids + i_b.to(gl.int64) * stride_queryb + t, mask=t < T, other=-1)
            p_ids = key_ids + i_b.to(gl.int64) * stride_keyb
        p_bias = bias + i_b.to(gl.int64) * stride_biasb + (i_h // RB).to(gl.int64) * stride_biash
        p_mask = mask + i_b.to(gl.int64) * stride_maskb + (i_h // RM).to(gl.int64) * stride_maskh
        planes = (p_bias, stride_biast, p_mask, stride_maskt, seed, i_b * H + i_h)
        slot = r % HELD
        lo = said(plan_s, r, 1, HELD)
        count = said(plan_s, r, 2, HELD)
        whole_lo = said(plan_s, r, 3, HELD)
        whole_hi = said(plan_s, r, 4, HELD)
        limits = (t, own, p_ids, far_left, far_right, whole_lo, whole_hi)
        tile = q_s.index(GROUPS * slot + WG)
        q = tile.reshape([ROWS, BD])
        top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, W))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, W))
        o = gl.zeros([ROWS, BD], gl.float32, WO)

        mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
        x = warpgroup_mma(q, k_s.index(c % STAGES).reshape([N, BD]).permute((1, 0)), none, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        thread_barrier()
        mbarrier.arrive(empty.index(c % STAGES), count=1)
        c += 1
        x, top, total, decay = weights(x, lo, top, total, limits, planes, numbers, T, S, N, CAP, NEGATIVE,
                                       LEFT, RIGHT, SEGMENTS, BIAS, MASK, DROPOUT, W)
        p = gl.convert_layout(x.to(dtype), LEFT_OF)
        mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)

        for block in range(lo + 1, lo + count):
            stage = c % STAGES
            x = warpgroup_mma(q, k_s.index(stage).reshape([N, BD]).permute((1, 0)), none, use_acc=False, is_async=True)
            o = warpgroup_mma(p, v_s.index(stage).reshape([N, BD]), o, is_async=True)
            x = warpgroup_mma_wait(1, deps=[x])
            x, top, total, decay = weights(x, block, top, total, limits, planes, numbers, T, S, N, CAP, NEGATIVE,
                                           LEFT, RIGHT, SEGMENTS, BIAS, MASK, DROPOUT, W)
            c += 1
            # Were this wait not here, the assembler would make the weights after the next one.
            mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
            o, x = warpgroup_mma_wait(0, deps=[o, x])
            thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            o = o * gl.convert_layout(decay, gl.SliceLayout(1, WO))[:, None]
            p = gl.convert_layout(x.to(dtype), LEFT_OF)

        stage = c % STAGES
        o = warpgroup_mma(p, v_s.index(stage).reshape([N, BD]), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        c += 1

        if not (BIAS or MASK):
            top = whole_logits(top, numbers[1], CAP)
        scale = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, W))
        if SINKS:
            top, total, scale = with_sinks(top, total, sinks + (i_h // RN) * stride_sinksh, SINKS)
        some = total > 0.0
        total = gl.where(some, total, 1.0)
        p_lse = lse + (i_b * H + i_h).to(gl.int64) * T + t
        gl.store(p_lse, gl.where(some, top + gl.log2(total), float("inf")), mask=t < T)
        o = o * gl.convert_layout(scale * keep / total, gl.SliceLayout(1, WO))[:, None]
        q.store(o.to(dtype))
        fence_async_shared()
        thread_barrier()
        copy_out(o_desc, [i_b, i_h, t0 + WG * ROWS, 0], tile)
        tma.store_wait(0)
        thread_barrier()
        mbarrier.arrive(free.index(slot), count=1)
        r += 1
        mbarrier.wait(held.index(r % HELD), (r // HELD) & 1)
        n = said(plan_s, r, 0, HELD)


@gluon.jit(do_not_specialize=["n"])
def zero_kernel(like, n, zeros, N: gl.constexpr):
    """n zeros, N in a program; ``like`` is any array of the call."""
    i = gl.program_id(0) * N + gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(zeros + i, i * 0, mask=i < n)


@gluon.jit(do_not_specialize=lengths(("q", "k", "v", "bias", "mask"), "stride_flagsb", "stride_queryb", "stride_keyb",
                                     "stride_sinksh", "threshold", "left", "right", "B", "T", "S", "M"))
def forward_kernel(
    q, k, v, bias, sinks, mask, flags, query_ids, key_ids, spreads, seed, offsets, taken,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_biasb, stride_biash, stride_biast, stride_maskb, stride_maskh, stride_maskt, stride_flagsb, stride_queryb,
    stride_keyb, stride_sinksh, inner, unit, keep, threshold, left, right, B, T, S, M,
    o, lse, count,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, RB: gl.constexpr, RM: gl.constexpr,
    RN: gl.constexpr, SINKS: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr, BD: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, CAP: gl.constexpr, NEGATIVE: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, OFFSET: gl.constexpr, SEGMENTS: gl.constexpr, BIAS: gl.constexpr,
    MASK: gl.constexpr, DROPOUT: gl.constexpr, REGISTERS: gl.constexpr, OTHERS: gl.constexpr,
):
    """``o = softmax(scale * q k^T) v``, with what models add to it; ``lse [B, H, T]``: logs of sums, base 2.

    q, o: ``[B, T, H, K or V]``; k, v: ``[B, S, H / R, K or V]``. bias, mask: ``[1 or B, H / RB or H / RM, T, S]``;
    ``flags [1 or B, H / RM, tiles, blocks]``: what ``mask_kernel`` finds of a mask's tiles. sinks: ``[H / RN, SINKS]``,
    natural logits; ids ``[B, T]`` and ``[B, S]``, below 0: padding; ``spreads [B, 3, blocks]``: what ``spread_kernel``
    finds of blocks of N keys. seed: two numbers, from which the weights follow that DROPOUT keeps; they are multiplied
    by ``keep``. Query t sees keys ``t - left`` to ``t + right``, plus its row's offset; LEFT, RIGHT: whether these are
    limits.

    With CAP, ``unit`` is the cap, base 2, and ``inner`` what gives twice the tangent's argument, base 2; without,
    ``unit`` is the scale's magnitude, base 2, and NEGATIVE its sign.

    A program walks over tiles of GROUPS * ROWS queries of one head, HELD of which have memory; M heads are walked over
    together. taken: None, or a zero, with which programs take the tiles as they come, and not as many each; count:
    its memory. K, V: the dimensions, in tiles of BD. REGISTERS: of a thread that multiplies;
    OTHERS: of one that copies.
    """
    dtype: gl.constexpr = k.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, BD], dtype)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, N, BD], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_desc = describe(q, B, T, H, stride_qb, stride_qt, stride_qh, K, ROWS, BD, TILE)
    k_desc = describe(k, B, S, H // R, stride_kb, stride_kt, stride_kh, K, N, BD, BLOCK)
    v_desc = describe(v, B, S, H // R, stride_vb, stride_vt, stride_vh, V, N, BD, BLOCK)
    o_desc = describe(o, B, T, H, T.to(gl.int64) * (H * V), H * V, V, V, ROWS, BD, TILE)
    q_s = gl.allocate_shared_memory(dtype, [HELD * GROUPS, 1, 1, ROWS, BD], TILE)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, BD], BLOCK)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, BD], BLOCK)
    plan_s = gl.allocate_shared_memory(gl.int32, [5 * HELD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    held = gl.allocate_shared_memory(gl.int64, [HELD, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [HELD, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(HELD):
        mbarrier.init(held.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()

    if not SEGMENTS:
        query_ids = lse
        key_ids = lse
        spreads = lse
    if not BIAS:
        bias = lse
    if not MASK:
        mask = lse
        flags = lse
    if not DROPOUT:
        seed = lse
    if not SINKS:
        sinks = lse
    if not OFFSET:
        offsets = lse
    SHARED: gl.constexpr = taken is not None
    if not SHARED:
        count = lse
    tiles = B * H * gl.cdiv(T, GROUPS * ROWS)
    shared = (q_s, k_s, v_s, plan_s)
    barriers = (held, free, full, empty)
    queries = (query_ids, stride_queryb, offsets, left, right)
    keys = (key_ids, stride_keyb)
    goal = (o_desc, lse)
    arrays = (bias, stride_biasb, stride_biash, stride_biast, mask, stride_maskb, stride_maskh, stride_maskt, seed)
    last = (sinks, stride_sinksh, keep)
    numbers = (inner, unit, threshold)
    gl.warp_specialize(
        [
            (attend, (shared, barriers, goal, queries, keys, arrays, last, numbers, (T, S), tiles, M, 0, H, RB,
                      RM, RN, SINKS, ROWS, N, BD, STAGES, HELD, CAP, NEGATIVE, LEFT, RIGHT, OFFSET,
                      SEGMENTS, BIAS, MASK, DROPOUT)),
            (attend, (shared, barriers, goal, queries, keys, arrays, last, numbers, (T, S), tiles, M, 1, H, RB,
                      RM, RN, SINKS, ROWS, N, BD, STAGES, HELD, CAP, NEGATIVE, LEFT, RIGHT, OFFSET,
                      SEGMENTS, BIAS, MASK, DROPOUT)),
            (copy, (shared, barriers, (q_desc, k_desc, v_desc), queries, spreads, flags, stride_flagsb, (T, S), tiles,
                    count, M, H, R, RM, ROWS, N, STAGES, HELD, LEFT, RIGHT, OFFSET, SEGMENTS, MASK, SHARED)),
        ],
        [4, 1],
        [REGISTERS, OTHERS],
    )
