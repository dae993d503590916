"""The inverse of the products of a chunk's keys, which walks read and which needs no state.

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
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from keraunos.kernels.device.hopper import now
from keraunos.kernels.gluon import reinterpret, thread_barrier

# Keys are alike from this sum of squares of a row of A beta on: errors cancel, and products count with more digits.
ALIKE = gl.constexpr(1.0)
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
def transposed(x, BLOCKS: gl.constexpr):
    """Blocks ``[n, 16, 16]`` of 16-bit values transposed, in registers."""
    n: gl.constexpr = x.shape[0]
    x = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], x.dtype, False, 2)
    x = x.reshape([n, 2, BLOCK // 2, 2, BLOCK // 2]).permute((0, 3, 2, 1, 4)).reshape([n, BLOCK, BLOCK])
    return gl.convert_layout(x, BLOCKS)


@gluon.jit
def times(x, y, out, BLOCKS: gl.constexpr):
    """``out + x y^T`` of blocks, in registers."""
    left = gl.convert_layout(x.to(gl.float16), gl.DotOperandLayout(0, BLOCKS, 2))
    right = gl.convert_layout(y.to(gl.float16).permute((0, 2, 1)), gl.DotOperandLayout(1, BLOCKS, 2))
    return mma_v2(left, right, out)


@gluon.jit
def inverse_of_blocks(x, y, unit, BLOCKS: gl.constexpr):
    """``(I + x)^-1`` of triangular blocks of 16: ``(I - x) (I + x^2) (I + x^4) (I + x^8)``; y: x transposed."""
    none = gl.zeros(unit.shape, gl.float32, BLOCKS)
    found = unit - x
    x, y = times(x, y, none, BLOCKS), times(y, x, none, BLOCKS)
    found = times(found, y, found, BLOCKS)
    x, y = times(x, y, none, BLOCKS), times(y, x, none, BLOCKS)
    found = times(found, y, found, BLOCKS)
    return times(found, times(y, x, none, BLOCKS), found, BLOCKS)


@gluon.jit
def blocks_inverted(block, strength_s, BLOCKS: gl.constexpr):
    """``(I + A beta)^-1 - I`` of the blocks on the diagonal, from those of -A."""
    C: gl.constexpr = BLOCK * block.shape[0]
    i_r = now(gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS))))[None, :, None]
    i_c = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
    x = 0.0 - block * strength_s.reshape([C // BLOCK, BLOCK]).load(gl.SliceLayout(1, BLOCKS))[:, None, :]
    unit = gl.where(i_r == i_c, 1.0, 0.0) + gl.zeros(block.shape, gl.float32, BLOCKS)
    return inverse_of_blocks(x, transposed(x.to(gl.float16), BLOCKS), unit, BLOCKS) - unit


@gluon.jit
def joined_once(own, minus, strength_s, a_s, x_s, m_s):
    """N of products of one each, from ``own``, which is ``D beta``, and ``minus``, which is -A; strength_s: beta.

    Tiles: that of -A, later of what is N up to the second power; of D + M; of M beta.
    """
    C: gl.constexpr = minus.shape[0]
    W: gl.constexpr = minus.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    BLOCKS: gl.constexpr = own.type.layout
    # A warp has the rows of one block: their product is its own, and their factors are the same.
    x = gl.convert_layout(minus.reshape([C // BLOCK, BLOCK, C]), BLOCKS)
    right = a_s.reshape([C // BLOCK, BLOCK, C]).load(gl.DotOperandLayout(1, BLOCKS, 2))
    x = mma_v2(gl.convert_layout(own.to(gl.float16), gl.DotOperandLayout(0, BLOCKS, 2)), right, x)
    block = now(gl.arange(0, C // BLOCK, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS))))[:, None, None]
    column = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
    strength = strength_s.load(gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
    m = x * gl.where(block > column // BLOCK, strength, 0.0)
    x = gl.convert_layout(x.reshape([C, C]), W)
    m = gl.convert_layout(m.reshape([C, C]), W).to(gl.float16)
    x_s.store(x.to(gl.float16))
    m_s.store(m)
    fence_async_shared()
    thread_barrier()
    x = warpgroup_mma(m_s, x_s, x, is_async=True)
    squared = warpgroup_mma(m_s, m_s, gl.zeros(minus.shape, gl.float32, W), use_acc=False, is_async=True)
    x, _ = warpgroup_mma_wait(1, deps=[x, x_s])
    a_s.store(x.to(gl.float16))
    fence_async_shared()
    squared, _ = warpgroup_mma_wait(0, deps=[squared, m_s])
    thread_barrier()
    x = warpgroup_mma(gl.convert_layout(squared.to(gl.float16), LEFT), a_s, x, is_async=True)
    x, _ = warpgroup_mma_wait(0, deps=[x, a_s])
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
    """N of three products each; ``own``: what the blocks on the diagonal have of a tile. Two tiles each: of D, of B."""
    C: gl.constexpr = a.shape[0]
    # A lane has a column of a block, of which a warp has one.
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, BLOCK // 2, 1], [1, 2, 16], [4, 1, 1], [2, 1, 0])
    blocks = gl.sum(gl.where(own, a, 0.0).reshape([C // BLOCK, BLOCK, C // BLOCK, BLOCK]), 2)
    blocks_s = reinterpret(d_s.index(0), gl.float32, [BLOCK, C // BLOCK, BLOCK],
                           gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    blocks_s.store(gl.permute(blocks, [1, 0, 2]))
    rest = gl.where(own, 0.0, a)
    put(rest * strength_s.load(gl.SliceLayout(1, a.type.layout))[:, None], b_s)
    rows_s = reinterpret(d_s.index(0), gl.float32, [BLOCK, C // BLOCK, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
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
