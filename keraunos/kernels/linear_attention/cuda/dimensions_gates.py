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

from keraunos.kernels.linear_attention.cuda.dimensions import around
from keraunos.kernels.linear_attention.cuda.walk import sums_before


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
def scaled_size(HALF):
    """How many values of 16 bits :func:`store_scaled` stores of ``[64, HALF]``."""
    return 64 * HALF + 128


@gluon.jit
def store_scaled(x, p):
    """Stores float32 values ``[64, D]`` in 16 bits, with an exponent for each thread."""
    D: gl.constexpr = x.shape[1]
    x = by_thread(x, 8)
    # The largest one comes to between 2 ** 14 and 2 ** 15.
    most = gl.max(gl.max(gl.abs(x), 2), 0)
    exponent = gl.maximum(most.to(gl.int32, bitcast=True) >> 23, 15)
    factor = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    thread = gl.arange(0, 128, layout=most.type.layout)
    gl.store(p + places(D // 16, 8), (x * factor[None, :, None]).to(gl.float16))
    gl.store(p + 64 * D + thread, exponent.to(gl.int16).to(gl.float16, bitcast=True))


@gluon.jit
def store_scaled_halves(x, p):
    """Stores ``[64, D]`` as :func:`store_scaled` does, half of the dimensions after the other."""
    HALF: gl.constexpr = x.shape[1] // 2
    halves = x.reshape([64, 2, HALF]).permute([0, 2, 1]).split()
    for i in gl.static_range(2):
        store_scaled(halves[i], p + i * scaled_size(HALF))


@gluon.jit
def load_scaled(p, HALF: gl.constexpr):
    """One half of what :func:`store_scaled` has stored, as it is in memory."""
    x = gl.load(p + places(HALF // 16, 8))
    thread = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))
    return x, gl.load(p + 64 * HALF + thread)


@gluon.jit
def unscaled(scaled, LAYOUT: gl.constexpr):
    """The values that :func:`load_scaled` has loaded."""
    x, exponent = scaled
    exponent = exponent.to(gl.int16, bitcast=True).to(gl.int32)
    x = x.to(gl.float32) * ((exponent - 14) << 23).to(gl.float32, bitcast=True)[None, :, None]
    return from_threads(x, LAYOUT)


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
def dg_of(z, base, sums_s, REVERSE: gl.constexpr):
    """dg of a chunk, and that of the next one's first token, from ``z = x - y`` in blocks of tokens.

    ``base`` is dg of the chunk's first token.
    """
    sums_s.store(gl.sum(z, 1))
    sums = sums_before(z, 1, REVERSE)
    total, before = around(sums_s, sums, 1.0, REVERSE)[:2]
    first = gl.convert_layout(base, gl.SliceLayout(0, gl.SliceLayout(1, z.type.layout)))
    return first[None, None, :] - (sums + before[:, None, :]), base - total
