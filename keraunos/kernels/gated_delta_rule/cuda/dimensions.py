"""N beta of ``prepare.py``, and P, of chunks with gates per token and dimension of the key, which need no state.

``G_i`` is, for each dimension, the sum of a chunk's gates up to and with token i, base 2:

    A_ij = sum_d k_id k_jd exp2(G_id - G_jd)                  j before i
    P_ij = scale beta_j sum_d q_id k_jd exp2(G_id - G_jd)     j before i, or i

With m the sum of the gates of a chunk's first half, ``q exp2(G - m)``, ``k exp2(G - m)`` and ``k exp2(m - G)`` are the
factors of both, if the gates of each half leave enough of the dtype's exponents. Pairs of tokens that do not see each
other may be infinite, and are taken away.

A second kernel makes what the first one leaves. Where keys are alike, that is products of factors in two parts. Where
one dimension's gates are stronger, it is one product for each level of a tree: at a level blocks of tokens have two
halves, the later one meets the earlier one at the boundary, ``exp2(G_i - G_mid)`` and ``exp2(G_mid - G_j)``. These
factors are not above 1. A token's pair with itself has no gate.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from keraunos.kernels.device.hopper import FAINT, LOG2E, add, locate_chunk, wide, within
from keraunos.kernels.gated_delta_rule.cuda.prepare import (
    ALIKE,
    BLOCK,
    EPSILON,
    by_substitution,
    inverse_of_blocks,
    joined_once,
    own_block,
    spread,
    store_tile,
)
from keraunos.kernels.gluon import lengths, reinterpret, thread_barrier

# Dimensions of a key that are worked on at a time.
PART = gl.constexpr(64)
# Blocks of tokens of a chunk, of which a warp has one, and a thread all tokens of two dimensions.
BLOCKS = gl.constexpr(4)
TOKENS = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))
IN_BLOCKS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
OF_BLOCKS = gl.constexpr(gl.BlockedLayout([1, 4, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
# The levels of a chunk's tree.
LEVELS = gl.constexpr(6)
# What marks chunks that are left to the second kernel, and those that it has made.
IS_LEFT = gl.constexpr(2)
IS_FINE = gl.constexpr(1)


@gluon.jit
def load_part(x, stride, left, part: gl.constexpr, K: gl.constexpr, BK: gl.constexpr):
    """PART dimensions of a chunk, from a pointer to its first token; 0 after its end."""
    t = gl.arange(0, BLOCKS * BLOCK, layout=gl.SliceLayout(1, TOKENS))
    d = part * PART + gl.arange(0, PART, layout=gl.SliceLayout(0, TOKENS))[None, :]
    mask = within((t < left)[:, None] & (d >= 0), d, K, BK)
    return gl.load(x + (t.to(gl.int64) * stride)[:, None] + d, mask=mask, other=0.0)


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


@gluon.jit
def least_half(blocks):
    """The least sum of the gates of either half of a chunk, base 2, in any dimension."""
    first = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, blocks.type.layout))[:, None] < BLOCKS // 2
    sums = gl.minimum(gl.sum(gl.where(first, blocks, 0.0), 0), gl.sum(gl.where(first, 0.0, blocks), 0))
    return gl.min(sums, 0) * LOG2E


@gluon.jit
def lengths_of(x_s):
    """One over the length of each row ``[C]`` of a tile."""
    BK: gl.constexpr = x_s.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [4, 1], [1, 0])
    x = wide(x_s.load(LAYOUT))
    return gl.rsqrt(gl.sum(x * x, 1) + EPSILON)


@gluon.jit
def to_own_boundary(x, HALF: gl.constexpr, REVERSE: gl.constexpr):
    """The rows of x minus the last one of the earlier of their two blocks of HALF tokens."""
    C: gl.constexpr = BLOCKS * BLOCK
    is_last = gl.arange(0, C, layout=gl.SliceLayout(1, TOKENS)) % (2 * HALF) == (HALF if REVERSE else HALF - 1)
    pairs = gl.where(is_last[:, None], x, 0.0).reshape([C // (2 * HALF), 2 * HALF, PART])
    boundary, _ = gl.broadcast(gl.expand_dims(gl.sum(pairs, 1), 1), pairs)
    return x - gl.convert_layout(boundary.reshape([C, PART]), TOKENS)


@gluon.jit
def to_boundary(sums, blocks, half, REVERSE: gl.constexpr):
    """``G - G_mid`` of each two blocks of ``half`` tokens, G_mid being G of the last token of the earlier one."""
    sums *= LOG2E
    apart = flat(sums + sums_from(blocks, gl.maximum(2 * half // BLOCK, 1), half // BLOCK, REVERSE))
    for i in gl.static_range(4):
        apart = gl.where(half == 1 << i, to_own_boundary(flat(sums), 1 << i, REVERSE), apart)
    return apart


@gluon.jit
def room(dtype: gl.constexpr, C: gl.constexpr, BK: gl.constexpr):
    """Shared memory: tiles of queries, keys, and another; those of two products; sums of blocks, beta, and lengths."""
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
    q_s = gl.allocate_shared_memory(dtype, [C, BK], TILE)
    k_s = gl.allocate_shared_memory(dtype, [C, BK], TILE)
    x_s = gl.allocate_shared_memory(dtype, [C, BK], TILE)
    if BK == 2 * C:
        d_s = reinterpret(x_s, gl.float16, [2, C, C], SQUARE)
        b_s = reinterpret(k_s, gl.float16, [2, C, C], SQUARE)
    else:
        d_s = gl.allocate_shared_memory(gl.float16, [2, C, C], SQUARE)
        b_s = gl.allocate_shared_memory(gl.float16, [2, C, C], SQUARE)
    sums_s = gl.allocate_shared_memory(gl.float32, [BK // PART, BLOCKS, PART],
                                       gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    strength_s = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    lengths_s = gl.allocate_shared_memory(gl.float32, [2, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return (q_s, k_s, x_s), (d_s, b_s), (sums_s, strength_s, lengths_s)


@gluon.jit
def load_chunk(i_b, i_h, token, left, arrays, strides, tiles, vectors, RATIOS: gl.constexpr, K: gl.constexpr,
               UNIT: gl.constexpr, BETA: gl.constexpr, NORM: gl.constexpr, REVERSE: gl.constexpr):
    """Loads queries and keys, and the lengths of their rows, beta, and the sums of gates, of blocks and within them.

    Returns the last, for each part of the dimensions; the least sum of either half of the chunk; and where queries and
    keys are in memory.
    """
    q, k, g, beta = arrays
    stride_q, stride_k, stride_g, stride_b = strides
    q_s, k_s, x_s = tiles
    sums_s, strength_s, lengths_s = vectors
    C: gl.constexpr = q_s.shape[0]
    BK: gl.constexpr = q_s.shape[1]
    PARTS: gl.constexpr = BK // PART
    g_dtype: gl.constexpr = g.dtype.element_ty
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [4, 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i_b, i_h = i_b.to(gl.int64), i_h.to(gl.int64)
    t = gl.arange(0, C, layout=gl.SliceLayout(1, LOADED))
    d = gl.arange(0, BK, layout=gl.SliceLayout(0, LOADED))
    mask = within((t < left)[:, None], d[None, :], K, BK)
    p_q = q + (i_b * stride_q[0] + token * stride_q[1] + i_h // RATIOS[0] * stride_q[2]) * UNIT
    p_k = k + (i_b * stride_k[0] + token * stride_k[1] + i_h // RATIOS[1] * stride_k[2]) * UNIT
    p_g = g + (i_b * stride_g[0] + token * stride_g[1] + i_h // RATIOS[2] * stride_g[2]) * UNIT
    o_q = ((t * UNIT).to(gl.int64) * stride_q[1])[:, None] + d[None, :]
    o_k = ((t * UNIT).to(gl.int64) * stride_k[1])[:, None] + d[None, :]
    if g_dtype != gl.float32:
        g_s = reinterpret(x_s, g_dtype, [C, BK], gl.NVMMASharedLayout.get_default_for([C, BK], g_dtype))
        o_g = ((t * UNIT).to(gl.int64) * stride_g[1])[:, None] + d[None, :]
        async_copy.async_copy_global_to_shared(g_s, p_g + o_g, mask=mask)
        async_copy.commit_group()
    async_copy.async_copy_global_to_shared(k_s, p_k + o_k, mask=mask)
    async_copy.async_copy_global_to_shared(q_s, p_q + o_q, mask=mask)
    async_copy.commit_group()
    each = gl.arange(0, C, layout=EACH)
    strength = gl.full([C], 1.0, gl.float32, EACH)
    if BETA:
        o_b = i_b * stride_b[0] + (token + each) * stride_b[1] + i_h // RATIOS[3] * stride_b[2]
        strength = gl.load(beta + o_b, mask=each < left, other=0.0).to(gl.float32)
    strength_s.store(strength)
    if g_dtype != gl.float32:
        async_copy.wait_group(1)
        x = in_blocks(g_s.slice(0, PART, 1).load(TOKENS))
    else:
        x = in_blocks(load_part(p_g, stride_g[1] * UNIT, left, 0, K, BK))
    sums_s.index(0).store(gl.sum(x, 1))
    sums = within_blocks(x, REVERSE)
    if PARTS == 2:
        if g_dtype != gl.float32:
            x = in_blocks(g_s.slice(PART, PART, 1).load(TOKENS))
        else:
            x = in_blocks(load_part(p_g, stride_g[1] * UNIT, left, 1, K, BK))
        sums_s.index(1).store(gl.sum(x, 1))
        all_sums = sums, within_blocks(x, REVERSE)
    else:
        all_sums = sums, sums
    async_copy.wait_group(0)
    if NORM:
        lengths_s.index(0).store(lengths_of(q_s))
        lengths_s.index(1).store(lengths_of(k_s))
    least = least_half(load_blocks(sums_s.index(0)))
    if PARTS == 2:
        least = gl.minimum(least, least_half(load_blocks(sums_s.index(1))))
    return all_sums, least, (p_q, stride_q[1] * UNIT, p_k, stride_k[1] * UNIT)


@gluon.jit
def from_middle(sums, sums_p, REVERSE: gl.constexpr):
    """``G - m`` of the dimensions of a part."""
    return flat(sums * LOG2E + sums_from(load_blocks(sums_p), BLOCKS, BLOCKS // 2, REVERSE))


@gluon.jit
def put(x, rest_s, part: gl.constexpr, x_s):
    """Stores the dimensions of a part; what their dtype leaves of them goes to a second tile, if there is one."""
    high = x.to(x_s.dtype)
    x_s.slice(part * PART, PART, 1).store(high)
    if rest_s is not None:
        rest_s.slice(part * PART, PART, 1).store((x - wide(high)).to(x_s.dtype))


@gluon.jit
def of_lower(a, lengths_s, NORM: gl.constexpr):
    """-A, in reverse transposed, from the products of keys."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, a.type.layout)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, a.type.layout)
    rows = gl.arange(0, a.shape[0], layout=OF_ROWS)[:, None]
    columns = gl.arange(0, a.shape[0], layout=OF_COLUMNS)[None, :]
    a = gl.where(rows > columns, -a, 0.0)
    if NORM:
        a *= lengths_s.index(1).load(OF_ROWS)[:, None] * lengths_s.index(1).load(OF_COLUMNS)[None, :]
    return a


@gluon.jit
def of_seen(p, strength_s, lengths_s, scale, NORM: gl.constexpr, REVERSE: gl.constexpr):
    """P, from the products of queries and keys."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, p.type.layout)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, p.type.layout)
    rows = gl.arange(0, p.shape[0], layout=OF_ROWS)[:, None]
    columns = gl.arange(0, p.shape[0], layout=OF_COLUMNS)[None, :]
    seen = (columns >= rows) if REVERSE else (columns <= rows)
    p = gl.where(seen, p, 0.0) * (strength_s.load(OF_COLUMNS) * scale)[None, :]
    if NORM:
        p *= lengths_s.index(0).load(OF_ROWS)[:, None] * lengths_s.index(1).load(OF_COLUMNS)[None, :]
    return p


@gluon.jit
def of_strength(x, strength_s, REVERSE: gl.constexpr):
    """N times beta of its columns, in reverse transposed."""
    if REVERSE:
        return x * strength_s.load(gl.SliceLayout(1, x.type.layout))[:, None]
    return x * strength_s.load(gl.SliceLayout(0, x.type.layout))[None, :]


@gluon.jit
def store_fine(a, p, squares, vectors, near, pairs, left, scale, NORM: gl.constexpr, REVERSE: gl.constexpr):
    """Stores P and N in two parts, from the products of queries and keys."""
    d_s, b_s = squares
    _, strength_s, lengths_s = vectors
    dtype: gl.constexpr = near.dtype.element_ty
    C: gl.constexpr = a.shape[0]
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, a.type.layout))[:, None]
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, a.type.layout))[None, :]
    p = of_seen(p, strength_s, lengths_s, scale, NORM, REVERSE)
    store_tile(pairs, p.to(dtype), False)
    store_tile(pairs + C * C, (p - wide(p.to(dtype))).to(dtype), False)
    # Three products each: of two tokens all are zero. A number that is not known here keeps them a loop.
    x = by_substitution(-of_lower(a, lengths_s, NORM), strength_s, rows // BLOCK == columns // BLOCK, d_s, b_s,
                        gl.minimum(left, 3))
    x = of_strength(gl.where(rows > columns, x, 0.0), strength_s, REVERSE)
    store_tile(near, x.to(dtype), REVERSE)
    store_tile(near + C * C, (x - wide(x.to(dtype))).to(dtype), REVERSE)


@gluon.jit(do_not_specialize=lengths("qkgb", "T", "N"))
def prepare_dimensions_kernel(
    q, k, g, beta, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_bb, stride_bt, stride_bh, scale, T, N,
    near, pairs, alike, norms,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr,
    K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, UNIT: gl.constexpr, LEAST: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, MAXNREG: gl.constexpr,
):
    """``near`` and ``pairs`` ``[slots, H, 2, C, C]``: N beta and P of a chunk and head, and what their dtype leaves.

    ``alike`` ``[slots, H]``: 0 where only the first are stored; IS_LEFT where nothing is, but left to
    ``fine_dimensions_kernel``: keys are alike, or the gates of half of a chunk come to less than LEAST. ``norms``
    ``[slots, H, 2, C]``: one over the length of each query and each key, where they are to be divided by it. stride_q,
    stride_k, stride_g: in UNIT values. beta None: ones. MAXNREG: see ``prepare_kernel``.
    """
    i_h = gl.program_id(0) % H
    i_s = gl.program_id(0) // H
    i_b, token, left = locate_chunk(cu_seqlens, i_s, T, N, C, PACKED)
    if left <= 0:
        return
    dtype: gl.constexpr = k.dtype.element_ty
    NORM: gl.constexpr = norms is not None
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    SQUARES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tiles, squares, vectors = room(dtype, C, BK)
    q_s, k_s, x_s = tiles
    d_s, b_s = squares
    sums_s, strength_s, lengths_s = vectors
    strides = ((stride_qb, stride_qt, stride_qh), (stride_kb, stride_kt, stride_kh), (stride_gb, stride_gt, stride_gh),
               (stride_bb, stride_bt, stride_bh))
    all_sums, least, _given = load_chunk(i_b, i_h, token, left, (q, k, g, beta), strides, tiles, vectors,
                                         (RQ, RK, RG, RB), K, UNIT, beta is not None, NORM, REVERSE)
    slot = i_s.to(gl.int64) * H + i_h
    if NORM:
        o_n = gl.arange(0, C, layout=EACH)
        for i in gl.static_range(2):
            gl.store(norms + slot * (2 * C) + i * C + o_n, lengths_s.index(i).load(EACH))
    for part in gl.static_range(BK // PART):
        apart = from_middle(all_sums[part], sums_s.index(part), REVERSE)
        query = wide(q_s.slice(part * PART, PART, 1).load(TOKENS))
        key = wide(k_s.slice(part * PART, PART, 1).load(TOKENS))
        to = gl.exp2(apart)
        put(query * to, None, part, q_s)
        put(key * to, None, part, k_s)
        put(key * gl.exp2(-apart), None, part, x_s)
    fence_async_shared()
    thread_barrier()
    none = gl.zeros([C, C], gl.float32, W)
    p = warpgroup_mma(q_s, x_s.permute((1, 0)), none, use_acc=False, is_async=True)
    if REVERSE:
        a = warpgroup_mma(x_s, k_s.permute((1, 0)), none, use_acc=False, is_async=True)
    else:
        a = warpgroup_mma(k_s, x_s.permute((1, 0)), none, use_acc=False, is_async=True)
    p, a, _, _, _ = warpgroup_mma_wait(0, deps=[p, a, q_s, k_s, x_s])
    a = of_lower(a, lengths_s, NORM)
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))
    strong = of_strength(a, strength_s, REVERSE)
    is_alike = gl.max(gl.sum(strong * strong, 0 if REVERSE else 1), 0) > ALIKE
    if is_alike | (least < LEAST):
        gl.store(alike + slot, IS_LEFT)
    else:
        gl.store(alike + slot, 0)
        p = of_seen(p, strength_s, lengths_s, scale, NORM, REVERSE)
        store_tile(pairs + slot * (2 * C * C), p.to(dtype), False)
        # All products have read their tiles.
        thread_barrier()
        i_r = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, SQUARES)))[None, :, None]
        i_c = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, SQUARES)))[None, None, :]
        below = -own_block(a, rows, SQUARES)
        below *= strength_s.reshape([C // BLOCK, BLOCK]).load(gl.SliceLayout(1, SQUARES))[:, None, :]
        above = gl.convert_layout(below.permute((0, 2, 1)), SQUARES)
        unit = gl.where(i_r == i_c, 1.0, 0.0) + gl.zeros([C // BLOCK, BLOCK, BLOCK], gl.float32, SQUARES)
        inverse = inverse_of_blocks(below, above, unit, SQUARES)
        found = joined_once(spread(inverse - unit, rows, columns, W), a, strength_s, rows, columns,
                            d_s.index(0), b_s.index(0), b_s.index(1), d_s.index(1))
        found = of_strength(found, strength_s, REVERSE)
        store_tile(near + slot * (2 * C * C), found.to(dtype), REVERSE)


@gluon.jit
def meet(all_sums, mild, given, left, tiles, rests, sums_s, K: gl.constexpr, REVERSE: gl.constexpr):
    """The products of keys, in reverse transposed, and those of queries and keys, with all digits of their factors.

    mild: they meet at the chunk's middle. Else they first meet without gates, for each token's pair with itself.
    All is one loop: ptxas 13.0 takes products of the same tiles in two branches for one.
    """
    q_s, k_s, x_s = tiles
    q_r, k_r, x_r = rests
    p_q, stride_q, p_k, stride_k = given
    C: gl.constexpr = q_s.shape[0]
    BK: gl.constexpr = q_s.shape[1]
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    none = gl.zeros([C, C], gl.float32, W)
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))[:, None]
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))[None, :]
    t = gl.arange(0, C, layout=gl.SliceLayout(1, TOKENS))
    a = none
    p = none
    for step in range(gl.where(mild, 1, 1 + LEVELS)):
        half = (1 << step) >> 1
        later = (t // gl.maximum(half, 1) % 2 == (0 if REVERSE else 1))[:, None]
        for part in gl.static_range(BK // PART):
            apart = gl.where(half > 0, to_boundary(all_sums[part], load_blocks(sums_s.index(part)), half, REVERSE), 0.0)
            apart = gl.where(mild, from_middle(all_sums[part], sums_s.index(part), REVERSE), apart)
            to = gl.where(later | mild, apart, -apart)
            key = wide(load_part(p_k, stride_k, left, part, K, BK))
            put(wide(load_part(p_q, stride_q, left, part, K, BK)) * gl.exp2(to), q_r, part, q_s)
            put(key * gl.exp2(to), k_r, part, k_s)
            put(key * gl.exp2(gl.where(mild, -apart, to)), x_r, part, x_s)
        fence_async_shared()
        thread_barrier()
        b = none
        c = none
        for i in gl.static_range(3):
            right_s = x_r if i == 2 else x_s
            if REVERSE:
                b = warpgroup_mma(right_s, (k_r if i == 1 else k_s).permute((1, 0)), b, is_async=True)
            else:
                b = warpgroup_mma(k_r if i == 1 else k_s, right_s.permute((1, 0)), b, is_async=True)
            c = warpgroup_mma(q_r if i == 1 else q_s, right_s.permute((1, 0)), c, is_async=True)
        b, c, _, _, _, _, _, _ = warpgroup_mma_wait(0, deps=[b, c, q_s, k_s, x_s, q_r, k_r, x_r])
        # All products have read their tiles.
        thread_barrier()
        # What is no pair of this step's is one of a later step's.
        a = gl.where((rows ^ columns) >= half, b, a)
        p = gl.where((rows ^ columns) >= half, c, p)
    return a, p


@gluon.jit(do_not_specialize=lengths("qkgb", "T", "N", "SLOTS", "EACH"))
def fine_dimensions_kernel(
    q, k, g, beta, near_given, pairs_given, alike_given, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_bb, stride_bt, stride_bh, scale, T, N, SLOTS, EACH,
    near, pairs, alike,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr,
    K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, UNIT: gl.constexpr, LEAST: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, NORM: gl.constexpr, MOST: gl.constexpr,
):
    """The results of chunks that ``prepare_dimensions_kernel`` has left, in two parts; ``alike`` is IS_FINE there.

    A program sees to EACH of all SLOTS, of chunks and heads, at most to MOST. The arrays that are given are those that
    are made.
    """
    first = gl.program_id(0) * EACH
    end = gl.minimum(first + EACH, SLOTS)
    FLAGS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_s = first + gl.arange(0, MOST, layout=FLAGS)
    flags = gl.load(alike_given + o_s, mask=o_s < end, other=0)
    if gl.max((flags == IS_LEFT).to(gl.int32), 0) > 0:
        dtype: gl.constexpr = k.dtype.element_ty
        TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
        tiles, squares, vectors = room(dtype, C, BK)
        rests = (gl.allocate_shared_memory(dtype, [C, BK], TILE), gl.allocate_shared_memory(dtype, [C, BK], TILE),
                 gl.allocate_shared_memory(dtype, [C, BK], TILE))
        strides = ((stride_qb, stride_qt, stride_qh), (stride_kb, stride_kt, stride_kh),
                   (stride_gb, stride_gt, stride_gh), (stride_bb, stride_bt, stride_bh))
        for i in range(first, end):
            i_h = i % H
            i_b, token, left = locate_chunk(cu_seqlens, i // H, T, N, C, PACKED)
            slot = first.to(gl.int64) + (i - first)
            if (left > 0) & (gl.load(alike_given + slot) == IS_LEFT):
                all_sums, least, given = load_chunk(i_b, i_h, token, left, (q, k, g, beta), strides, tiles, vectors,
                                                    (RQ, RK, RG, RB), K, UNIT, beta is not None, NORM, REVERSE)
                a, p = meet(all_sums, least >= LEAST, given, left, tiles, rests, vectors[0], K, REVERSE)
                store_fine(a, p, squares, vectors, near + slot * (2 * C * C), pairs + slot * (2 * C * C), left, scale,
                           NORM, REVERSE)
                gl.store(alike + slot, IS_FINE)
