"""The inverse of the products of a chunk's keys, which the walk reads and which needs no state.

With ``G_i`` the sum of a chunk's gates up to and with token i, ``Y`` the errors of the state before the chunk at its
tokens, and ``A_ij = beta_j exp(G_i - G_j) k_i . k_j`` for j before i, the errors that tokens correct are
``E = Y - A E``: ``E = (I + A)^-1 Y``. The inverse is stored minus I.

The inverse is that of the blocks of 16 tokens on the diagonal, ``D``, by substitution, row after row, in float32; with
``B`` the rest of A and ``M = -D B``, of which four blocks leave no fourth power, it is ``(I + M + M^2 + M^3) D``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from keraunos.kernels.device.hopper import FAINT, LOG2E, add, locate_chunk, wide, within
from keraunos.kernels.gluon import lengths, reinterpret, thread_barrier

EPSILON = gl.constexpr(1e-6)
# Keys are alike from this sum of squares of a row of A on: then errors cancel, and products count with more digits.
ALIKE = gl.constexpr(1.0)
# Tokens of a block on the diagonal.
BLOCK = gl.constexpr(16)


@gluon.jit
def put(x, x_s, fine):
    """Stores x for products; fine: the digits that float16 does not hold go to a second tile."""
    high = x.to(gl.float16)
    x_s.index(0).store(high)
    if fine:
        x_s.index(1).store((x - high.to(gl.float32)).to(gl.float16))


@gluon.jit
def dot(x_s, y_s, out, terms):
    """``out + x y`` of what was ``put``: of three products, or of the first one."""
    for i in range(terms):
        out = warpgroup_mma(x_s.index(i // 2), y_s.index(i % 2), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
    return out


@gluon.jit
def joined(d_s, b_s, none, fine):
    """The whole inverse ``(I + M + M^2 + M^3) D``, from the tiles of D and B."""
    terms = gl.where(fine, 3, 1)
    m = dot(d_s, b_s, none, terms)
    thread_barrier()
    put(-m, b_s, fine)
    fence_async_shared()
    thread_barrier()
    found = d_s.index(0).load(none.type.layout).to(gl.float32)
    if fine:
        found += d_s.index(1).load(none.type.layout).to(gl.float32)
    found = dot(b_s, d_s, found, terms)
    squared = dot(b_s, b_s, none, terms)
    thread_barrier()
    put(found, d_s, fine)
    put(squared, b_s, fine)
    fence_async_shared()
    thread_barrier()
    return dot(b_s, d_s, found, terms)


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
    C: gl.constexpr, BN: gl.constexpr, UNIT: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr,
    MAXNREG: gl.constexpr,
):
    """``near`` ``[slots, H, 2, C, C]``: ``(I + A)^-1 - I`` of a chunk and head, and what its dtype leaves of that.

    ``alike`` ``[slots, H]``: whether the rest counts; else it is not stored. ``norms`` ``[slots, H, C]``: one over the
    length of each key, where keys are to be divided by it. stride_k: in UNIT values. g None: no gates; beta None: ones.
    MAXNREG is read by the launcher: the registers that a thread may have.
    """
    i_h = gl.program_id(0) % H
    i_s = gl.program_id(0) // H
    i_b, token, left = locate_chunk(cu_seqlens, i_s, T, N, C, BN, PACKED)
    if left <= 0:
        return
    dtype: gl.constexpr = k.dtype.element_ty
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, W)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, W)
    EACH: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
    k_s = gl.allocate_shared_memory(dtype, [C, BK], TILE)
    d_s = gl.allocate_shared_memory(gl.float16, [2, C, C], SQUARE)
    b_s = reinterpret(k_s, gl.float16, [2, C, C], SQUARE) if BK == 2 * C else gl.allocate_shared_memory(
        gl.float16, [2, C, C], SQUARE)
    blocks_s = gl.allocate_shared_memory(gl.float32, [BLOCK, C // BLOCK, BLOCK],
                                         gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))

    t = gl.arange(0, C, layout=gl.SliceLayout(1, LOADED))
    d = gl.arange(0, BK, layout=gl.SliceLayout(0, LOADED))
    p_k = k + (i_b.to(gl.int64) * stride_kb + token * stride_kt + (i_h // RK).to(gl.int64) * stride_kh) * UNIT
    o_k = (t.to(gl.int64) * stride_kt * UNIT)[:, None] + d[None, :]
    keys = gl.load(p_k + o_k, mask=within((t < left)[:, None], d[None, :], K, BK), other=0.0)
    each = gl.arange(0, C, layout=EACH)
    inside = each < left
    x = gl.zeros([C], gl.float32, EACH)
    if g is not None:
        o_g = i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
        x = gl.load(g + o_g + each.to(gl.int64) * stride_gt, mask=inside, other=0.0).to(gl.float32)
        x = gl.where(inside, gl.maximum(x, FAINT) * LOG2E, 0.0)
    strength = gl.full([C], 1.0, gl.float32, EACH)
    if beta is not None:
        o_b = i_b.to(gl.int64) * stride_bb + token * stride_bt + (i_h // RB).to(gl.int64) * stride_bh
        strength = gl.load(beta + o_b + each.to(gl.int64) * stride_bt, mask=inside, other=0.0).to(gl.float32)
    k_s.store(keys)
    fence_async_shared()
    thread_barrier()
    none = gl.zeros([C, C], gl.float32, W)
    a = warpgroup_mma(k_s, k_s.permute((1, 0)), none, use_acc=False, is_async=True)
    G = gl.associative_scan(x, 0, add, reverse=REVERSE)
    rows = gl.arange(0, C, layout=OF_ROWS)
    columns = gl.arange(0, C, layout=OF_COLUMNS)
    # Below the diagonal the row's token comes later; in reverse the tile is A's transposed, whose inverse is, too.
    lower = rows[:, None] > columns[None, :]
    G_rows = gl.convert_layout(G, OF_ROWS)
    G_columns = gl.convert_layout(G, OF_COLUMNS)
    apart = (G_columns[None, :] - G_rows[:, None]) if REVERSE else (G_rows[:, None] - G_columns[None, :])
    pairs = gl.exp2(gl.where(lower, apart, -float("inf")))
    if REVERSE:
        pairs *= gl.convert_layout(strength, OF_ROWS)[:, None]
    else:
        pairs *= gl.convert_layout(strength, OF_COLUMNS)[None, :]
    # The compiler may use a tile's memory again after the last mention of the tile: here, when the product has read it.
    a, _ = warpgroup_mma_wait(0, deps=[a, k_s])
    slot = i_s.to(gl.int64) * H + i_h
    if norms is not None:
        squares = gl.sum(gl.where(rows[:, None] == columns[None, :], a, 0.0), 1)
        lengths = gl.rsqrt(squares + EPSILON)
        gl.store(norms + slot * C + rows, lengths)
        pairs *= lengths[:, None] * gl.convert_layout(lengths, OF_COLUMNS)[None, :]
    a *= pairs
    is_alike = gl.max(gl.sum(a * a, 0 if REVERSE else 1), 0) > ALIKE
    gl.store(alike + slot, is_alike.to(gl.int32))

    # The blocks on the diagonal, of which a warp has one; a lane has a column.
    own = (rows[:, None] // BLOCK) == (columns[None, :] // BLOCK)
    blocks = gl.sum(gl.where(own, a, 0.0).reshape([C // BLOCK, BLOCK, C // BLOCK, BLOCK]), 2)
    blocks_s.store(gl.permute(blocks, [1, 0, 2]))
    rest = gl.where(own, 0.0, a)
    # The keys have been read, and their tile is free.
    thread_barrier()
    put(rest, b_s, is_alike)
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, BLOCK // 2, 1], [1, 2, 16], [4, 1, 1], [2, 1, 0])
    rows_s = reinterpret(blocks_s, gl.float32, [BLOCK, C // BLOCK, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLUMNS)))[None, :, None]
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, COLUMNS)))[None, None, :]
    x = gl.where(row == column, 1.0, 0.0) + gl.zeros([C // BLOCK, BLOCK, BLOCK], gl.float32, COLUMNS)
    for i in gl.static_range(1, BLOCK):
        of_row = rows_s.index(i).load(gl.SliceLayout(2, COLUMNS))
        known = gl.sum(of_row[:, :, None] * x, 1)
        x = gl.where(row == i, x - known[:, None, :], x)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4, 8], [16, 1, 2], [4, 1, 1], [2, 1, 0])
    x = gl.convert_layout(x.reshape([C, BLOCK]), gl.SliceLayout(1, WIDE))
    block = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))[:, None, None] // BLOCK
    other = gl.arange(0, C // BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, WIDE)))[None, :, None]
    put(gl.where(block == other, x[:, None, :], 0.0).reshape([C, C]), d_s, is_alike)

    fence_async_shared()
    thread_barrier()
    found = joined(d_s, b_s, none, is_alike)
    found = gl.where(lower, found, 0.0)
    high = found.to(dtype)
    p_near = near + slot * (2 * C * C)
    store_tile(p_near, high, REVERSE)
    if is_alike:
        store_tile(p_near + C * C, (found - wide(high)).to(dtype), REVERSE)
