"""The gradients of gates per token and dimension of the key, from what the walks for q and for k and v leave.

``dg_t = dg_u - sum_{u <= i < t} (x_i - y_i)`` with ``x = q dq`` and ``y = k dk``, where u is the first token of a group
of chunks and ``dg_u`` the product of the state before it with its gradient, summed over the values' dimensions. x and y
are of the same rounded factors and pairs, so that of what both have, the pairs within a chunk, only the rounding of
sums is left. A token's pair with itself, which no gate touches, is in both where a chunk is mild, and in none where it
is moderate or strong: all else may be small compared with it.

The walk for k leaves y as its threads have it in registers, in 16 bits: see :func:`store_scaled`. In the walk for q
threads have x of the same tokens and dimensions. It makes dg.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def of_threads(groups, size):
    """The layout in which each thread of a warpgroup has so many groups of so many values."""
    return gl.BlockedLayout([groups, 1, size], [1, 32, 1], [1, 4, 1], [2, 1, 0])


@gluon.jit
def by_thread(x, SIZE: gl.constexpr):
    """The accumulators ``[64, D]`` of a warpgroup as its threads have them: ``[D // 2 // SIZE, 128, SIZE]``."""
    D: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, D // 8, 4, 2]).permute([3, 1, 5, 0, 2, 4]).reshape([D // 2 // SIZE, SIZE, 128])
    return gl.convert_layout(x.permute([0, 2, 1]), of_threads(D // 2 // SIZE, SIZE), assert_trivial=True)


@gluon.jit
def from_threads(x, LAYOUT: gl.constexpr):
    """The argument of :func:`by_thread`, in its layout, from its result."""
    D: gl.constexpr = x.shape[0] * x.shape[2] * 2
    x = x.permute([0, 2, 1]).reshape([D // 8, 2, 2, 4, 8, 4]).permute([3, 1, 4, 0, 5, 2]).reshape([64, D])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def places(GROUPS: gl.constexpr, SIZE: gl.constexpr):
    """Where in memory the values of :func:`by_thread` are: threads read and write groups of them at a time."""
    L: gl.constexpr = of_threads(GROUPS, SIZE)
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    thread = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    one = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return (group * 128 + thread) * SIZE + one


@gluon.constexpr_function
def scaled_size(D):
    """How many values of 16 bits :func:`store_scaled` stores of ``[64, D]``."""
    return D // 64 * (64 * 64 + 128)


@gluon.jit
def store_scaled(x, p):
    """Stores float32 values ``[64, 64]`` in 16 bits, with an exponent for each warp."""
    x = by_thread(x, 8)
    most = gl.max(gl.max(gl.abs(x), 2), 0)
    warps = most.reshape([4, 32])
    warps, _ = gl.broadcast(gl.expand_dims(gl.max(warps, 1), 1), warps)
    most = gl.convert_layout(warps.reshape([128]), most.type.layout)
    # The largest one comes to between 2 ** 14 and 2 ** 15.
    exponent = gl.maximum(most.to(gl.int32, bitcast=True) >> 23, 15)
    factor = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    gl.store(p + places(4, 8), (x * factor[None, :, None]).to(gl.float16))
    thread = gl.arange(0, 128, layout=most.type.layout)
    gl.store(p + 64 * 64 + thread, exponent.to(gl.int16).to(gl.float16, bitcast=True))


@gluon.jit
def store_scaled_parts(x, p):
    """Stores ``[64, D]`` as :func:`store_scaled` does, 64 of the dimensions after the other."""
    if x.shape[1] == 64:
        store_scaled(x, p)
    else:
        parts = x.reshape([64, 2, 64]).permute([0, 2, 1]).split()
        for i in gl.static_range(2):
            store_scaled(parts[i], p + i * scaled_size(64))


@gluon.jit
def load_scaled(p):
    """The values that :func:`store_scaled` has stored, as threads of the transposed product will have them."""
    L: gl.constexpr = gl.BlockedLayout([1, 4, 1, 8], [1, 1, 32, 1], [4, 1, 1, 1], [3, 2, 1, 0])
    PAIR: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, L))
    group = gl.arange(0, 4, layout=gl.SliceLayout(1, PAIR))[:, None, None, None]
    warp = gl.arange(0, 4, layout=gl.SliceLayout(0, PAIR))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    one = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    x = gl.load(p + (((group * 4 + warp[None, :, None, None]) * 32 + lane) * 8 + one))
    return x, gl.load(p + 64 * 64 + warp * 32)


@gluon.jit
def unscaled(scaled, LAYOUT: gl.constexpr):
    """The values that :func:`load_scaled` has loaded, transposed: each block of eight by eight across its warp."""
    x, exponent = scaled
    x = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], gl.float16, False, 2)
    exponent = exponent.to(gl.int16, bitcast=True).to(gl.int32)
    x = x.to(gl.float32) * ((exponent - 14) << 23).to(gl.float32, bitcast=True)[None, :, None, None]
    # The dimension has its group, half of that, and the row; the token its warp, half, and the column's two.
    x = x.reshape([4, 4, 8, 4, 2, 2, 2]).permute([0, 4, 2, 1, 5, 3, 6]).reshape([64, 64])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def accumulate(x, p, FIRST: gl.constexpr):
    """Adds ``[64, D]`` to what this thread has in memory, where there are no registers for it. FIRST: to nothing."""
    D: gl.constexpr = x.shape[1]
    p += places(D // 8, 4)
    x = by_thread(x, 4)
    if not FIRST:
        x += gl.load(p)
    gl.store(p, x)


@gluon.jit
def accumulated(p, D: gl.constexpr, LAYOUT: gl.constexpr):
    """The sum that :func:`accumulate` has made."""
    return from_threads(gl.load(p + places(D // 8, 4)), LAYOUT)


@gluon.jit
def earlier_tokens(C: gl.constexpr, REVERSE: gl.constexpr):
    """The matrix ``[C, C]``, a product with which sums, for each column's token, what is of those before it."""
    EACH: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, EACH))[:, None]
    columns = gl.arange(0, C, layout=gl.SliceLayout(0, EACH))[None, :]
    return gl.where((rows > columns) if REVERSE else (rows < columns), 1.0, 0.0)
