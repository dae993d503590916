"""Queries and keys of length 1, in Triton: each head's divided by its length, and the gradients of that."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from keraunos.frontends.array_types import Array
from keraunos.kernels.gated_delta_rule import reference
from keraunos.kernels.host.arrays import Spec, spec_of, tile, unit_of
from keraunos.kernels.host.plan import Plan, remember

EPSILON = tl.constexpr(reference.EPSILON)
# Rows that one program normalises.
_ROWS = 16


@triton.jit
def norm_kernel(x, dy, stride_b, stride_t, stride_h, T, ROWS, y, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                BR: tl.constexpr, BACKWARD: tl.constexpr, UNIT: tl.constexpr):
    """``y = x / sqrt(sum x^2 + EPSILON)`` of each head's K dimensions; BACKWARD: x's gradient, from dy, that of y."""
    i_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_k = tl.arange(0, BK)
    m_r = (i_r < ROWS)[:, None] & (o_k < K)[None, :]
    p_x = x + (i_r // H // T * stride_b + i_r // H % T * stride_t + i_r % H * stride_h)[:, None] * UNIT + o_k[None, :]
    o_y = i_r[:, None] * K + o_k[None, :]
    b_x = tl.load(p_x, mask=m_r, other=0.0).to(tl.float32)
    b_r = tl.rsqrt(tl.sum(b_x * b_x, 1) + EPSILON)[:, None]
    b_y = b_x * b_r
    if BACKWARD:
        b_dy = tl.load(dy + o_y, mask=m_r, other=0.0).to(tl.float32)
        b_y = b_r * (b_dy - b_y * tl.sum(b_y * b_dy, 1)[:, None])
    tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_r)


@remember
def _plan(x: Spec, backward: bool) -> Plan:
    T, H, K = x.shape[-3:]
    rows = math.prod(x.shape[:-1])
    unit = unit_of(x)
    numbers = {f"stride_{axis}": n // unit for axis, n in zip("bth", (0, *x.strides)[-4:-1], strict=True)}
    numbers |= dict(T=T, ROWS=rows)
    constants = dict(H=H, K=K, BK=tile(K), BR=_ROWS, BACKWARD=backward, UNIT=unit)
    return Plan(norm_kernel, (-(-rows // _ROWS),), numbers, dict(y=(x.shape, x.dtype)), constants)


def normalised(x: Array) -> Array:
    """``x / sqrt(sum x^2 + EPSILON)`` of each head's dimensions."""
    return _plan(spec_of(x), False).launch(x=x, dy=x)[0]


def gradient(x: Array, dy: Array | None) -> Array:
    """The gradient of x from that of :func:`normalised`."""
    return _plan(spec_of(x), True).launch(x=x, dy=dy)[0]
