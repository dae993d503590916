"""N of ``inverse.py``, and P, of chunks with gates per token and dimension of the key, which need no state.

``G_i`` is, for each dimension, the sum of a chunk's gates up to and with token i, base 2:

    A_ij = sum_d k_id k_jd exp2(G_id - G_jd)                  j before i
    P_ij = scale sum_d q_id k_jd exp2(G_id - G_jd)     j before i, or i

With m G of the last token of a chunk's first half, ``q exp2(G - m)``, ``k exp2(G - m)`` and ``k exp2(m - G)`` are the
factors of both, if the gates of each half leave enough of the dtype's exponents. Else only the pairs of one half with
the other are made so, whose factors are not above 1; the next step makes the pairs within each half as if it were a
chunk of its own, and so on, until no block's gates are too strong. A token's pair with itself has no gate. Pairs that a
later step makes, or of tokens that do not see each other, may be infinite, and are taken away.

``G - m`` is the product of a matrix of 0, 1 and -1 with the chunk's gates, that is sums of gates between two tokens.
Of float32 gates it counts what float16 has of them: of a pair whose gates sum to x, that changes ``exp(x)`` by at most
``|x| 2^-12``, thus by less than 2^-13.

One kernel makes one step of each chunk. A second one makes chunks that need more, and then chunks whose keys are alike,
by products of factors in two parts.
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
from triton.language import PropagateNan

from keraunos.kernels.device.hopper import FAINT, LOG2E, locate_chunk, wide, within
from keraunos.kernels.gated_delta_rule.cuda.inverse import (
    ALIKE,
    BLOCK,
    blocks_inverted,
    by_substitution,
    joined_once,
    own_block,
)
from keraunos.kernels.gated_delta_rule.cuda.parts import EPSILON
from keraunos.kernels.gluon import copy_of_threads, lengths, reinterpret, thread_barrier

# Dimensions of a key that are worked on at a time.
PART = gl.constexpr(64)
NANS_TOO = gl.constexpr(PropagateNan.ALL)
# What marks chunks: results have two parts; they have one, but gates are strong; they are left, as keys are alike; as
# gates are strong.
IS_FINE = gl.constexpr(1)
IS_REMADE = gl.constexpr(2)
IS_ALIKE = gl.constexpr(3)
IS_STRONG = gl.constexpr(4)


@gluon.jit
def put(x, x_s, rest_s, part: gl.constexpr):
    """Stores PART dimensions of x; what their dtype leaves of it goes to a second tile, if there is one."""
    high = x.to(x_s.dtype)
    x_s.slice(part * PART, PART, 1).store(high)
    if rest_s is not None:
        rest_s.slice(part * PART, PART, 1).store((x - wide(high)).to(x_s.dtype))


@gluon.jit
def lengths_of(x_s):
    """One over the length of each row ``[C]`` of a tile."""
    BK: gl.constexpr = x_s.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [4, 1], [1, 0])
    x = wide(x_s.load(LAYOUT))
    return gl.rsqrt(gl.sum(x * x, 1) + EPSILON)


@gluon.jit
def sums_of(of_gates, g_s, part: gl.constexpr, W: gl.constexpr):
    """The product with the gates of PART dimensions, which is to be waited for."""
    C: gl.constexpr = g_s.shape[0]
    none = gl.zeros([C, PART], gl.float32, W)
    return warpgroup_mma(of_gates, g_s.slice(part * PART, PART, 1), none, use_acc=False, is_async=True)


@gluon.jit
def from_middle(half, zero, dtype: gl.constexpr, W: gl.constexpr, REVERSE: gl.constexpr):
    """The matrix whose product with gates is ``G - m``, m being G of the last token of the earlier of two halves.

    In blocks of ``2 half`` tokens; of one token, for which half is 0, it is that one's G.
    """
    C: gl.constexpr = W.instr_shape[1]
    rows = zero + gl.arange(0, C, layout=gl.SliceLayout(1, W))[:, None]
    columns = zero + gl.arange(0, C, layout=gl.SliceLayout(0, W))[None, :]
    middle = (rows & (-2 * half)) + half
    if REVERSE:
        middle = gl.where(half > 0, middle, rows)
        x = gl.where(columns >= rows, 1.0, 0.0) - gl.where(columns >= middle, 1.0, 0.0)
    else:
        middle = gl.where(half > 0, middle, rows + 1)
        x = gl.where(columns <= rows, 1.0, 0.0) - gl.where(columns < middle, 1.0, 0.0)
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, W, 2))


@gluon.jit
def room(dtype: gl.constexpr, C: gl.constexpr, BK: gl.constexpr):
    """Shared memory: tiles of queries, keys, and another; those of two products; beta and lengths."""
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
    strength_s = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    lengths_s = gl.allocate_shared_memory(gl.float32, [2, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return (q_s, k_s, x_s), (d_s, b_s), (strength_s, lengths_s)


@gluon.jit
def farther(x, y):
    """The greater one, or what is no number."""
    return gl.maximum(x, y, propagate_nan=NANS_TOO)


@gluon.jit
def meet(half, zero, chunk, arrays, strides, tiles, rests, narrow, lengths_s, RATIOS: gl.constexpr, K: gl.constexpr,
         UNIT: gl.constexpr, REVERSE: gl.constexpr, NORM: gl.constexpr, ANY: gl.constexpr):
    """The products of a chunk's keys, in reverse transposed, and those of queries and keys, of one step.

    That is, of the pairs of the blocks of ``2 half`` tokens; of factors in two parts, if there are rests. Also what of
    ``G - m`` is farthest from 0. Of gates that are not finite nothing comes out, and the last is no number; unless ANY
    gates are expected. narrow: where float16 gates are stored, and their stride, if they are float32.
    """
    i_b, i_h, token, left = chunk
    q, k, g = arrays
    stride_q, stride_k, stride_g = strides
    q_s, k_s, x_s = tiles
    q_r, k_r, x_r = rests
    C: gl.constexpr = q_s.shape[0]
    BK: gl.constexpr = q_s.shape[1]
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    g_dtype: gl.constexpr = gl.float16 if g.dtype.element_ty == gl.float32 else g.dtype.element_ty
    g_s = reinterpret(x_s, g_dtype, [C, BK], gl.NVMMASharedLayout.get_default_for([C, BK], g_dtype))
    i_b, i_h = i_b.to(gl.int64), i_h.to(gl.int64)
    t = zero + gl.arange(0, C, layout=gl.SliceLayout(1, LOADED))
    d = gl.arange(0, BK, layout=gl.SliceLayout(0, LOADED))
    mask = within((t < left)[:, None], d[None, :], K, BK)
    p_q = q + (i_b * stride_q[0] + token * stride_q[1] + i_h // RATIOS[0] * stride_q[2]) * UNIT
    p_k = k + (i_b * stride_k[0] + token * stride_k[1] + i_h // RATIOS[1] * stride_k[2]) * UNIT
    p_g = g + (i_b * stride_g[0] + token * stride_g[1] + i_h // RATIOS[2] * stride_g[2]) * UNIT
    o_q = ((t * UNIT).to(gl.int64) * stride_q[1])[:, None] + d[None, :]
    o_k = ((t * UNIT).to(gl.int64) * stride_k[1])[:, None] + d[None, :]
    o_g = ((t * UNIT).to(gl.int64) * stride_g[1])[:, None] + d[None, :]
    if narrow is None:
        copy_of_threads(g_s, p_g + o_g, mask=mask)
        async_copy.commit_group()
    copy_of_threads(k_s, p_k + o_k, mask=mask)
    copy_of_threads(q_s, p_q + o_q, mask=mask)
    async_copy.commit_group()
    if narrow is not None:
        x = gl.maximum(gl.load(p_g + o_g, mask=mask, other=0.0), FAINT).to(g_dtype)
        g_s.store(x)
        p_narrow, stride, is_first = narrow
        gl.store(p_narrow + (t * stride)[:, None] + d[None, :], x, mask=mask & is_first)
    elif ANY:
        async_copy.wait_group(1)
        g_s.store(gl.maximum(wide(g_s.load(LOADED)), FAINT).to(g_dtype))
    of_gates = from_middle(half, zero, g_dtype, W, REVERSE)
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()
    if NORM:
        lengths_s.index(0).store(lengths_of(q_s))
        lengths_s.index(1).store(lengths_of(k_s))
    farthest = gl.zeros([C], gl.float32, gl.SliceLayout(1, W))
    first = sums_of(of_gates, g_s, 0, W)
    of_parts = (first, sums_of(of_gates, g_s, 1, W)) if BK == 2 * PART else (first,)
    for part in gl.static_range(BK // PART):
        sums, _, _ = warpgroup_mma_wait(BK // PART - 1 - part, deps=[of_parts[part], of_gates, g_s])
        sums *= LOG2E
        farthest = farther(farthest, gl.reduce(gl.abs(sums), 1, farther))
        # All products have read these gates.
        thread_barrier()
        key = wide(k_s.slice(part * PART, PART, 1).load(W))
        query = wide(q_s.slice(part * PART, PART, 1).load(W))
        put(key * gl.exp2(-sums), x_s, x_r, part)
        to = gl.exp2(sums)
        put(key * to, k_s, k_r, part)
        put(query * to, q_s, q_r, part)
    fence_async_shared()
    thread_barrier()
    a = gl.zeros([C, C], gl.float32, W)
    p = gl.zeros([C, C], gl.float32, W)
    for i in gl.static_range(1 if x_r is None else 3):
        right_s = x_r if i == 2 else x_s
        key_s = k_r if i == 1 else k_s
        if REVERSE:
            a = warpgroup_mma(right_s, key_s.permute((1, 0)), a, use_acc=i > 0, is_async=True)
        else:
            a = warpgroup_mma(key_s, right_s.permute((1, 0)), a, use_acc=i > 0, is_async=True)
        p = warpgroup_mma(q_r if i == 1 else q_s, right_s.permute((1, 0)), p, use_acc=i > 0, is_async=True)
    if x_r is None:
        a, p, _, _, _ = warpgroup_mma_wait(0, deps=[a, p, q_s, k_s, x_s])
    else:
        a, p, _, _, _, _, _, _ = warpgroup_mma_wait(0, deps=[a, p, q_s, k_s, x_s, q_r, k_r, x_r])
    # All products have read their tiles.
    thread_barrier()
    return a, p, gl.reduce(farthest, 0, farther)


@gluon.jit
def load_strength(i_b, i_h, token, left, beta, stride_b, strength_s, RATIO: gl.constexpr):
    """A chunk's beta, 0 after its end, to shared memory."""
    C: gl.constexpr = strength_s.shape[0]
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    each = gl.arange(0, C, layout=EACH)
    strength = gl.full([C], 1.0, gl.float32, EACH)
    if beta is not None:
        i_b, i_h = i_b.to(gl.int64), i_h.to(gl.int64)
        o_b = i_b * stride_b[0] + (token + each) * stride_b[1] + i_h // RATIO * stride_b[2]
        strength = gl.load(beta + o_b, mask=each < left, other=0.0).to(gl.float32)
    strength_s.store(strength)


@gluon.jit
def is_alike(a, strength_s, REVERSE: gl.constexpr):
    """Whether keys are: of -A, in reverse transposed."""
    if REVERSE:
        strong = a * strength_s.load(gl.SliceLayout(1, a.type.layout))[:, None]
    else:
        strong = a * strength_s.load(gl.SliceLayout(0, a.type.layout))[None, :]
    return gl.max(gl.sum(strong * strong, 0 if REVERSE else 1), 0) > ALIKE


@gluon.jit
def store_tile(p, x, REVERSE: gl.constexpr):
    """Stores a tile, transposed in reverse, to where it is contiguous."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    C: gl.constexpr = x.shape[0]
    x = gl.convert_layout(x.permute((1, 0)) if REVERSE else x, FLAT)
    r = gl.arange(0, C, layout=gl.SliceLayout(1, FLAT))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, FLAT))
    gl.store(p + r[:, None] * C + c[None, :], x)


@gluon.jit
def store_usual(a, p, squares, vectors, near, pairs, scale, NORM: gl.constexpr, REVERSE: gl.constexpr):
    """Stores P and N, from -A and the products of queries and keys."""
    d_s, b_s = squares
    strength_s, lengths_s = vectors
    dtype: gl.constexpr = near.dtype.element_ty
    C: gl.constexpr = a.shape[0]
    W: gl.constexpr = a.type.layout
    SQUARES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))
    p = of_seen(p, lengths_s, scale, NORM, REVERSE)
    store_tile(pairs, p.to(dtype), False)
    own = blocks_inverted(own_block(a, rows, SQUARES), strength_s, SQUARES)
    d_s.index(0).store(a.to(gl.float16))
    found = joined_once(own, a, strength_s, d_s.index(0), d_s.index(1), b_s.index(0))
    store_tile(near, found.to(dtype), REVERSE)


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
def of_seen(p, lengths_s, scale, NORM: gl.constexpr, REVERSE: gl.constexpr):
    """P, from the products of queries and keys."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, p.type.layout)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, p.type.layout)
    rows = gl.arange(0, p.shape[0], layout=OF_ROWS)[:, None]
    columns = gl.arange(0, p.shape[0], layout=OF_COLUMNS)[None, :]
    seen = (columns >= rows) if REVERSE else (columns <= rows)
    p = gl.where(seen, p * scale, 0.0)
    if NORM:
        p *= lengths_s.index(0).load(OF_ROWS)[:, None] * lengths_s.index(1).load(OF_COLUMNS)[None, :]
    return p


@gluon.jit
def store_fine(a, p, squares, vectors, near, pairs, left, scale, NORM: gl.constexpr, REVERSE: gl.constexpr):
    """Stores P and N in two parts, from -A and the products of queries and keys."""
    d_s, b_s = squares
    strength_s, lengths_s = vectors
    dtype: gl.constexpr = near.dtype.element_ty
    C: gl.constexpr = a.shape[0]
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, a.type.layout))[:, None]
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, a.type.layout))[None, :]
    p = of_seen(p, lengths_s, scale, NORM, REVERSE)
    store_tile(pairs, p.to(dtype), False)
    store_tile(pairs + C * C, (p - wide(p.to(dtype))).to(dtype), False)
    # Three products each: of two tokens all are zero. A number that is not known here keeps them a loop.
    x = by_substitution(-a, strength_s, rows // BLOCK == columns // BLOCK, d_s, b_s, gl.minimum(left, 3))
    x = gl.where(rows > columns, x, 0.0)
    store_tile(near, x.to(dtype), REVERSE)
    store_tile(near + C * C, (x - wide(x.to(dtype))).to(dtype), REVERSE)


@gluon.jit(do_not_specialize=lengths("qkgb", "T", "N"))
def prepare_dimensions_kernel(
    q, k, g, beta, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_bb, stride_bt, stride_bh, scale, T, N,
    near, pairs, alike, norms, gates,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr,
    K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, UNIT: gl.constexpr, LEAST: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, MAXNREG: gl.constexpr,
):
    """``near`` and ``pairs`` ``[slots, H, 2, C, C]``: N and P of a chunk and head, and what their dtype leaves.

    ``alike`` ``[slots, H]``: 0 where the first are stored; where nothing is, why a chunk is left to
    ``remake_dimensions_kernel``: IS_STRONG where ``G - m`` is farther from 0 than LEAST, IS_ALIKE. ``norms``
    ``[slots, H, 2, C]``: one over the length of each query and each key, where they are to be divided by it. ``gates``:
    float32 gates as float16, contiguous, for all that runs after this. stride_q, stride_k, stride_g: in UNIT values.
    beta None: ones. MAXNREG: see ``prepare_kernel``.
    """
    i_h = gl.program_id(0) % H
    i_s = gl.program_id(0) // H
    i_b, token, left = locate_chunk(cu_seqlens, i_s, T, N, C, PACKED)
    if left <= 0:
        return
    dtype: gl.constexpr = k.dtype.element_ty
    NORM: gl.constexpr = norms is not None
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tiles, squares, vectors = room(dtype, C, BK)
    strength_s, lengths_s = vectors
    narrow = None
    if gates is not None:
        # Of the heads that share gates one stores them.
        row = (i_b.to(gl.int64) * T + token) * (H // RG) + i_h // RG
        narrow = gates + row * K, H // RG * K, i_h % RG == 0
    strides = ((stride_qb, stride_qt, stride_qh), (stride_kb, stride_kt, stride_kh), (stride_gb, stride_gt, stride_gh))
    load_strength(i_b, i_h, token, left, beta, (stride_bb, stride_bt, stride_bh), strength_s, RB)
    a, p, farthest = meet(C // 2, 0, (i_b, i_h, token, left), (q, k, g), strides, tiles, (None, None, None), narrow,
                          lengths_s, (RQ, RK, RG), K, UNIT, REVERSE, NORM, False)
    slot = i_s.to(gl.int64) * H + i_h
    if NORM:
        o_n = gl.arange(0, C, layout=EACH)
        for i in gl.static_range(2):
            gl.store(norms + slot * (2 * C) + i * C + o_n, lengths_s.index(i).load(EACH))
    a = of_lower(a, lengths_s, NORM)
    if not (farthest <= -LEAST):
        gl.store(alike + slot, IS_STRONG)
    elif is_alike(a, strength_s, REVERSE):
        gl.store(alike + slot, IS_ALIKE)
    else:
        gl.store(alike + slot, 0)
        store_usual(a, p, squares, vectors, near + slot * (2 * C * C), pairs + slot * (2 * C * C), scale, NORM, REVERSE)


@gluon.jit(do_not_specialize=lengths("qkgb", "T", "N", "SLOTS", "EACH"))
def remake_dimensions_kernel(
    q, k, g, beta, near_given, pairs_given, alike_given, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh,
    stride_bb, stride_bt, stride_bh, scale, T, N, SLOTS, EACH,
    near, pairs, alike,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr,
    K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, UNIT: gl.constexpr, LEAST: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, NORM: gl.constexpr, MOST: gl.constexpr, FINE: gl.constexpr,
    MAXNREG: gl.constexpr,
):
    """The results of chunks that were left as IS_STRONG, which become IS_REMADE or are left as IS_ALIKE.

    Or, FINE, of those that were left as IS_ALIKE: in two parts, and they become IS_FINE. A program sees to EACH of all
    SLOTS, of chunks and heads, at most to MOST. The arrays that are given are those that are made.
    """
    KIND: gl.constexpr = IS_ALIKE if FINE else IS_STRONG
    first = gl.program_id(0) * EACH
    end = gl.minimum(first + EACH, SLOTS)
    FLAGS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_s = first + gl.arange(0, MOST, layout=FLAGS)
    flags = gl.load(alike_given + o_s, mask=o_s < end, other=0)
    if gl.max((flags == KIND).to(gl.int32), 0) > 0:
        dtype: gl.constexpr = k.dtype.element_ty
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
        TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
        tiles, squares, vectors = room(dtype, C, BK)
        strength_s, lengths_s = vectors
        rests = (None, None, None)
        if FINE:
            rests = (gl.allocate_shared_memory(dtype, [C, BK], TILE), gl.allocate_shared_memory(dtype, [C, BK], TILE),
                     gl.allocate_shared_memory(dtype, [C, BK], TILE))
        strides = ((stride_qb, stride_qt, stride_qh), (stride_kb, stride_kt, stride_kh),
                   (stride_gb, stride_gt, stride_gh))
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))[:, None]
        columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))[None, :]
        for i in range(first, end):
            i_h = i % H
            i_b, token, left = locate_chunk(cu_seqlens, i // H, T, N, C, PACKED)
            slot = first.to(gl.int64) + (i - first)
            if (left > 0) & (gl.load(alike_given + slot) == KIND):
                load_strength(i_b, i_h, token, left, beta, (stride_bb, stride_bt, stride_bh), strength_s, RB)
                a = gl.zeros([C, C], gl.float32, W)
                p = gl.zeros([C, C], gl.float32, W)
                size = left * 0 + C
                farthest = left.to(gl.float32) - LEAST
                while farthest > -LEAST:
                    # That it is 0 no compiler knows: they would keep in registers what does not change with the step.
                    zero = (farthest > 1e30).to(gl.int32)
                    b, c, farthest = meet(size // 2, zero, (i_b, i_h, token, left), (q, k, g), strides, tiles, rests,
                                          None, lengths_s, (RQ, RK, RG), K, UNIT, REVERSE, NORM, True)
                    own = (zero + (rows ^ columns)) < size
                    a = gl.where(own, b, a)
                    p = gl.where(own, c, p)
                    size //= 2
                a = of_lower(a, lengths_s, NORM)
                p_near = near + slot * (2 * C * C)
                p_pairs = pairs + slot * (2 * C * C)
                if FINE:
                    store_fine(a, p, squares, vectors, p_near, p_pairs, left, scale, NORM, REVERSE)
                    gl.store(alike + slot, IS_FINE)
                elif is_alike(a, strength_s, REVERSE):
                    gl.store(alike + slot, IS_ALIKE)
                else:
                    store_usual(a, p, squares, vectors, p_near, p_pairs, scale, NORM, REVERSE)
                    gl.store(alike + slot, IS_REMADE)
