"""The inverse of the products of a chunk's keys, which the walk reads and which needs no state.

With ``G_i`` the sum of a chunk's gates up to and with token i, ``Y`` the errors of the state before the chunk at its
tokens, and ``A_ij = exp(G_i - G_j) k_i . k_j`` for j before i, the errors that tokens correct are ``E = Y - A beta E``:
``E = Y + N beta Y`` with ``N = -(I + A beta)^-1 A``, which is what is stored. Gradients of E go through N transposed.

``D`` is N of the blocks of 16 tokens on the diagonal alone. With ``B`` the rest of A and ``M = -(B + D beta B)``, of
which four blocks leave no fourth power, N is what ``X = D + M + M beta X`` leaves of ``X = D`` after three times.

Where errors cancel, D is made by substitution, row after row, in float32. Else a warp makes ``I + D beta`` of its block
by products in registers; ``D + M = -(I + D beta) A`` is one product, and so is ``(M beta)^2``, for two of the times.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from keraunos.kernels.device.hopper import FAINT, LOG2E, add, locate_chunk, wide, within
from keraunos.kernels.gluon import copy_of_threads, lengths, reinterpret, thread_barrier

EPSILON = gl.constexpr(1e-6)
# Keys are alike from this sum of squares of a row of A beta on: errors cancel, and products count with more digits.
ALIKE = gl.constexpr(1.0)
# Without beta, from this sum on they are as good as the same: then all that gradients sum over a chunk cancels, too.
SAME = gl.constexpr(24.0)
# Tokens of a block on the diagonal.
BLOCK = gl.constexpr(16)


@gluon.jit
def own_block(x, rows, BLOCKS: gl.constexpr):
    """The blocks on the diagonal of a tile ``[4, 16, 16]``, of which a warp has one."""
    C: gl.constexpr = x.shape[0]
    low, high = gl.split(x.reshape([C, 2, 2, BLOCK]).permute((0, 2, 3, 1)))
    of = gl.convert_layout(rows, gl.SliceLayout(1, gl.SliceLayout(2, low.type.layout)))[:, None, None]
    x = gl.where(of // (2 * BLOCK) == 1, high, low)
    low, high = gl.split(x.permute((0, 2, 1)))
    of = gl.convert_layout(rows, gl.SliceLayout(1, low.type.layout))[:, None]
    x = gl.where(of // BLOCK % 2 == 1, high, low)
    return gl.convert_layout(x.reshape([C // BLOCK, BLOCK, BLOCK]), BLOCKS)


@gluon.jit
def spread(x, rows, columns, W: gl.constexpr):
    """A tile with blocks ``[4, 16, 16]`` on its diagonal. A product has fewer instructions than a choice of halves."""
    C: gl.constexpr = 4 * BLOCK
    x = x.reshape([C, BLOCK])
    x = gl.join(x, x)
    x = gl.convert_layout(gl.join(x, x).permute((0, 2, 3, 1)).reshape([C, C]), W)
    return gl.where(rows[:, None] // BLOCK == columns[None, :] // BLOCK, 1.0, 0.0) * x


@gluon.jit
def times(x, y, out, BLOCKS: gl.constexpr):
    """``out + x y^T`` of blocks, in registers."""
    left = gl.convert_layout(x.to(gl.float16), gl.DotOperandLayout(0, BLOCKS, 2))
    right = gl.convert_layout(y.to(gl.float16).permute((0, 2, 1)), gl.DotOperandLayout(1, BLOCKS, 2))
    return mma_v2(left, right, out)


@gluon.jit
def inverse_of_blocks(x, y, unit, BLOCKS: gl.constexpr):
    """``(I + x)^-1`` of triangular blocks of 16: ``(I - x) (I + x^2) (I + x^4) (I + x^8)``; y: x transposed."""
    none = unit * 0.0
    found = unit - x
    x, y = times(x, y, none, BLOCKS), times(y, x, none, BLOCKS)
    found = times(found, y, found, BLOCKS)
    x, y = times(x, y, none, BLOCKS), times(y, x, none, BLOCKS)
    found = times(found, y, found, BLOCKS)
    return times(found, times(y, x, none, BLOCKS), found, BLOCKS)


@gluon.jit
def joined_once(own, minus, strength_s, rows, columns, a_s, x_s, m_s, y_s):
    """N of products of one each, from ``own``, which is ``D beta``, and ``minus``, which is -A; strength_s: beta.

    Four tiles: of -A; of D + M; of M beta; of what is N up to the second power.
    """
    W: gl.constexpr = minus.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    a_s.store(minus.to(gl.float16))
    fence_async_shared()
    thread_barrier()
    x = warpgroup_mma(gl.convert_layout(own.to(gl.float16), LEFT), a_s, minus, is_async=True)
    x, _ = warpgroup_mma_wait(0, deps=[x, a_s])
    later = rows[:, None] // BLOCK > columns[None, :] // BLOCK
    m = (x * gl.where(later, strength_s.load(gl.SliceLayout(0, W))[None, :], 0.0)).to(gl.float16)
    x_s.store(x.to(gl.float16))
    m_s.store(m)
    fence_async_shared()
    thread_barrier()
    x = warpgroup_mma(m_s, x_s, x, is_async=True)
    squared = warpgroup_mma(m_s, m_s, gl.zeros(minus.shape, gl.float32, W), use_acc=False, is_async=True)
    x, _ = warpgroup_mma_wait(1, deps=[x, x_s])
    y_s.store(x.to(gl.float16))
    fence_async_shared()
    squared, _ = warpgroup_mma_wait(0, deps=[squared, m_s])
    thread_barrier()
    x = warpgroup_mma(gl.convert_layout(squared.to(gl.float16), LEFT), y_s, x, is_async=True)
    x, _ = warpgroup_mma_wait(0, deps=[x, y_s])
    return x


@gluon.jit
def put(x, x_s):
    """Stores x for products; the digits that float16 does not hold go to a second tile."""
    high = x.to(gl.float16)
    x_s.index(0).store(high)
    x_s.index(1).store((x - high.to(gl.float32)).to(gl.float16))


@gluon.jit
def dot(x_s, y_s, out, terms):
    """``out + x y`` of what was ``put``, of three products."""
    for i in range(terms):
        out = warpgroup_mma(x_s.index(i // 2), y_s.index(i % 2), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
    return out


@gluon.jit
def joined(d_s, b_s, rest, strength_s, terms):
    """N of the whole chunk, from the tiles of D and ``beta B``, and from B, which is ``rest``; strength_s: beta."""
    m = -dot(d_s, b_s, rest, terms)
    x = d_s.index(0).load(rest.type.layout).to(gl.float32) + d_s.index(1).load(rest.type.layout).to(gl.float32)
    thread_barrier()
    put(m, b_s)
    m += x
    for _ in range(3):
        put(x * strength_s.load(gl.SliceLayout(1, x.type.layout))[:, None], d_s)
        fence_async_shared()
        thread_barrier()
        x = dot(b_s, d_s, m, terms)
        thread_barrier()
    return x


@gluon.jit
def by_substitution(a, strength_s, own, d_s, b_s, terms):
    """N of three products each; ``own``: what the blocks on the diagonal have of a tile."""
    C: gl.constexpr = a.shape[0]
    # A lane has a column of a block, of which a warp has one.
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, BLOCK // 2, 1], [1, 2, 16], [4, 1, 1], [2, 1, 0])
    blocks = gl.sum(gl.where(own, a, 0.0).reshape([C // BLOCK, BLOCK, C // BLOCK, BLOCK]), 2)
    blocks_s = reinterpret(d_s, gl.float32, [BLOCK, C // BLOCK, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    blocks_s.store(gl.permute(blocks, [1, 0, 2]))
    rest = gl.where(own, 0.0, a)
    # The keys have been read, and their tile is free.
    thread_barrier()
    put(rest * strength_s.load(gl.SliceLayout(1, a.type.layout))[:, None], b_s)
    rows_s = reinterpret(d_s, gl.float32, [BLOCK, C // BLOCK, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLUMNS)))[None, :, None]
    of_blocks = strength_s.reshape([C // BLOCK, BLOCK]).load(gl.SliceLayout(2, COLUMNS))
    x = gl.zeros([C // BLOCK, BLOCK, BLOCK], gl.float32, COLUMNS)
    for i in gl.static_range(1, BLOCK):
        of_row = rows_s.index(i).load(gl.SliceLayout(2, COLUMNS))
        known = gl.sum((of_row * of_blocks)[:, :, None] * x, 1)
        known += rows_s.index(i).load(gl.SliceLayout(1, COLUMNS))
        x = gl.where(row == i, -known[:, None, :], x)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4, 8], [16, 1, 2], [4, 1, 1], [2, 1, 0])
    x = gl.convert_layout(x.reshape([C, BLOCK]), gl.SliceLayout(1, WIDE))
    block = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))[:, None, None] // BLOCK
    other = gl.arange(0, C // BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, WIDE)))[None, :, None]
    put(gl.where(block == other, x[:, None, :], 0.0).reshape([C, C]), d_s)
    fence_async_shared()
    thread_barrier()
    return joined(d_s, b_s, rest, strength_s, terms)


@gluon.jit
def store_tile(p, x, REVERSE: gl.constexpr):
    """Stores a tile, transposed in reverse, to where it is contiguous."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    C: gl.constexpr = x.shape[0]
    x = gl.convert_layout(x.permute((1, 0)) if REVERSE else x, FLAT)
    r = gl.arange(0, C, layout=gl.SliceLayout(1, FLAT))
    c = gl.arange(0, C, layout=gl.SliceLayout(0, FLAT))
    gl.store(p + r[:, None] * C + c[None, :], x)


@gluon.jit(do_not_specialize=lengths("kgb", "T", "N"))
def prepare_kernel(
    k, g, beta, cu_seqlens,
    stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh, stride_bb, stride_bt, stride_bh, T, N,
    near, alike, norms,
    H: gl.constexpr, RK: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr, K: gl.constexpr, BK: gl.constexpr,
    C: gl.constexpr, UNIT: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr,
    MAXNREG: gl.constexpr,
):
    """``near`` ``[slots, H, 2, C, C]``: N of a chunk and head, and what its dtype leaves of that.

    ``alike`` ``[slots, H]``: 0, or the rest counts, else it is not stored; 2: for gradients, too. ``norms``
    ``[slots, H, C]``: one over the length of each key, where keys are to be divided by it. stride_k: in UNIT values.
    g None: no gates; beta None: ones. MAXNREG is read by the launcher: the registers that a thread may have.
    """
    i_h = gl.program_id(0) % H
    i_s = gl.program_id(0) // H
    i_b, token, left = locate_chunk(cu_seqlens, i_s, T, N, C, PACKED)
    if left <= 0:
        return
    dtype: gl.constexpr = k.dtype.element_ty
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, W)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, W)
    BLOCKS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    EACH: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    BOTH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
    k_s = gl.allocate_shared_memory(dtype, [C, BK], TILE)
    d_s = gl.allocate_shared_memory(gl.float16, [2, C, C], SQUARE)
    b_s = reinterpret(k_s, gl.float16, [2, C, C], SQUARE) if BK == 2 * C else gl.allocate_shared_memory(
        gl.float16, [2, C, C], SQUARE)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    both_s = gl.allocate_shared_memory(gl.float32, [2 * C], LINE)
    sums_s = gl.allocate_shared_memory(gl.float32, [C], LINE)
    lines_s = reinterpret(both_s, gl.float32, [2, C], LINE)
    strength_s = lines_s.index(1)

    t = gl.arange(0, C, layout=gl.SliceLayout(1, LOADED))
    d = gl.arange(0, BK, layout=gl.SliceLayout(0, LOADED))
    p_k = k + (i_b.to(gl.int64) * stride_kb + token * stride_kt + (i_h // RK).to(gl.int64) * stride_kh) * UNIT
    o_k = ((t * UNIT).to(gl.int64) * stride_kt)[:, None] + d[None, :]
    copy_of_threads(k_s, p_k + o_k, mask=within((t < left)[:, None], d[None, :], K, BK))
    async_copy.commit_group()
    # Half of the threads load gates, the other half strengths.
    n = gl.arange(0, 2 * C, layout=BOTH)
    each = n % C
    both = gl.where(n < C, 0.0, 1.0)
    if g is not None:
        o_g = i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
        x = gl.load(g + o_g + each.to(gl.int64) * stride_gt, mask=(each < left) & (n < C), other=0.0).to(gl.float32)
        both = gl.where(n < C, gl.maximum(x, FAINT) * LOG2E, both)
    if beta is not None:
        o_b = i_b.to(gl.int64) * stride_bb + token * stride_bt + (i_h // RB).to(gl.int64) * stride_bh
        x = gl.load(beta + o_b + each.to(gl.int64) * stride_bt, mask=(each < left) & (n >= C), other=0.0).to(gl.float32)
        both = gl.where(n < C, both, x)
    both_s.store(both)
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()
    a = warpgroup_mma(k_s, k_s.permute((1, 0)), gl.zeros([C, C], gl.float32, W), use_acc=False, is_async=True)
    sums_s.store(gl.associative_scan(lines_s.index(0).load(EACH), 0, add, reverse=REVERSE))
    rows = gl.arange(0, C, layout=OF_ROWS)
    columns = gl.arange(0, C, layout=OF_COLUMNS)
    # Below the diagonal the row's token comes later; in reverse the tile is A's transposed, and N is, too.
    lower = rows[:, None] > columns[None, :]
    G_rows = sums_s.load(OF_ROWS)
    G_columns = sums_s.load(OF_COLUMNS)
    apart = (G_columns[None, :] - G_rows[:, None]) if REVERSE else (G_rows[:, None] - G_columns[None, :])
    pairs = gl.exp2(gl.where(lower, apart, -float("inf")))
    # The compiler may use a tile's memory again after the last mention of the tile: here, when the product has read it.
    a, _ = warpgroup_mma_wait(0, deps=[a, k_s])
    slot = i_s.to(gl.int64) * H + i_h
    if norms is not None:
        squares = gl.sum(gl.where(rows[:, None] == columns[None, :], a, 0.0), 1)
        lengths = gl.rsqrt(squares + EPSILON)
        gl.store(norms + slot * C + rows, lengths)
        a *= lengths[:, None] * gl.convert_layout(lengths, OF_COLUMNS)[None, :]
    block = own_block(a, rows, BLOCKS)
    a *= -pairs
    strong = a * (strength_s.load(OF_ROWS)[:, None] if REVERSE else strength_s.load(OF_COLUMNS)[None, :])
    is_alike = gl.max(gl.sum(strong * strong, 0 if REVERSE else 1), 0) > ALIKE
    p_near = near + slot * (2 * C * C)
    own = (rows[:, None] // BLOCK) == (columns[None, :] // BLOCK)
    if is_alike:
        is_same = gl.max(gl.sum(a * a, 0 if REVERSE else 1), 0) > SAME
        gl.store(alike + slot, 1 + is_same.to(gl.int32))
        # Three products each: of two tokens all are zero. A number that is not known here keeps them a loop.
        found = by_substitution(-a, strength_s, own, d_s, b_s, gl.minimum(left, 3))
        found = gl.where(lower, found, 0.0)
        high = found.to(dtype)
        store_tile(p_near, high, REVERSE)
        store_tile(p_near + C * C, (found - wide(high)).to(dtype), REVERSE)
    else:
        gl.store(alike + slot, 0)
        # The blocks of A beta on the diagonal, and their transposed: the products of keys are the same for both.
        i_r = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]
        i_c = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
        ROWS: gl.constexpr = gl.SliceLayout(2, BLOCKS)
        COLUMNS: gl.constexpr = gl.SliceLayout(1, BLOCKS)
        of_sums, of_strength = sums_s.reshape([C // BLOCK, BLOCK]), strength_s.reshape([C // BLOCK, BLOCK])
        away = of_sums.load(ROWS)[:, :, None] - of_sums.load(COLUMNS)[:, None, :]
        away = -away if REVERSE else away
        away = block * gl.exp2(gl.where(i_r > i_c, away, -away))
        below = gl.where(i_r > i_c, away * of_strength.load(COLUMNS)[:, None, :], 0.0)
        above = gl.where(i_r < i_c, away * of_strength.load(ROWS)[:, :, None], 0.0)
        unit = gl.where(i_r == i_c, 1.0, 0.0) + gl.zeros([C // BLOCK, BLOCK, BLOCK], gl.float32, BLOCKS)
        inverse = inverse_of_blocks(below, above, unit, BLOCKS)
        # What is above the diagonal is zero.
        found = joined_once(spread(inverse - unit, rows, columns, W), a, strength_s, rows, columns,
                            d_s.index(0), b_s.index(0), b_s.index(1), d_s.index(1))
        store_tile(p_near, found.to(dtype), REVERSE)
