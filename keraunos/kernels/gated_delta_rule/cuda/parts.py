"""Parts of all walks of the gated delta rule over a chunk."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from keraunos.kernels.device.hopper import FAINT, LOG2E


@gluon.jit
def read(inputs, at, size, H: gl.constexpr, C: gl.constexpr, GATED: gl.constexpr, BETA: gl.constexpr,
         NORM: gl.constexpr):
    """A chunk's gates, base 2, and beta; one over the lengths of its keys, by one warp; and whether they are alike."""
    g, stride_g, beta, stride_beta, alike, norms = inputs
    EACH: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    t = gl.arange(0, C, layout=EACH)
    inside = t < size - at * C
    x = gl.zeros([C], gl.float32, EACH)
    if GATED:
        x = gl.load(g + (at * C + t).to(gl.int64) * stride_g, mask=inside, other=0.0).to(gl.float32)
        x = gl.where(inside, gl.maximum(x, FAINT) * LOG2E, 0.0)
    strength = gl.full([C], 1.0, gl.float32, EACH)
    if BETA:
        strength = gl.load(beta + (at * C + t).to(gl.int64) * stride_beta, mask=inside, other=0.0).to(gl.float32)
    of_keys = gl.full([C], 1.0, gl.float32, EACH)
    if NORM:
        of_keys = gl.load(norms + at * (H * C) + t)
    return x, strength, of_keys, gl.load(alike + at * H)


@gluon.jit
def of_lanes(x):
    """Sums ``[warps, 8, C]`` over the rows of a tile that a thread has, of which a warp has 16."""
    return gl.sum(x.reshape([x.shape[0] // 16, 2, 8, x.shape[1]]), 1)


@gluon.jit
def of_tokens(parts_s):
    """Sums over all rows of a tile from those that warps have left ``[warps, C]``, by one warp."""
    PARTS: gl.constexpr = gl.BlockedLayout([parts_s.shape[0], 2], [1, 32], [1, 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    return gl.convert_layout(gl.sum(parts_s.load(PARTS), 0), EACH)
