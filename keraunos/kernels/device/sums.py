"""Sums in Triton over one axis of an array, always in the same order."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from keraunos.frontends.array_types import Array
from keraunos.kernels.device.recurrence import in_turn
from keraunos.kernels.host.arrays import Spec, pow2, tile
from keraunos.kernels.host.plan import Plan, remember
from keraunos.kernels.host.sequences import Sizes

# The next launch may begin when all programs have begun; this one waits for the end of the one before.
_IN_TURN = 5


@triton.jit(do_not_specialize=["R", "D", "E"])
def sum_kernel(x, R, D, E, y, BR: tl.constexpr, BE: tl.constexpr, UNIT: tl.constexpr, LAST: tl.constexpr,
               OVERLAP: tl.constexpr):
    """``y[m, d] = sum_r x[m, r, d]`` of contiguous arrays, always in the same order, in all frameworks.

    E: how many values y has. UNIT divides D. LAST: x is ``[M, D, R]``. The compiler learns no more of the numbers than
    UNIT: PyTorch would tell it more than JAX does, and it would sum in another order.
    """
    in_turn(OVERLAP)
    first = tl.program_id(0).to(tl.int64) * BE
    o_e = tl.arange(0, BE)
    o_d = (first % D).to(tl.int32) + o_e
    i_m = first // D + o_d // D
    o_d = tl.max_contiguous(tl.multiple_of(o_d % D, UNIT), UNIT)
    i_m = tl.max_constancy(i_m, UNIT)
    o_r = tl.arange(0, BR)
    m_e = tl.max_constancy(first + o_e < E, UNIT)
    b_y = tl.zeros([BR, BE], dtype=tl.float32)
    for i_r in range(0, R, BR):
        m_x = (i_r + o_r < R)[:, None] & m_e[None, :]
        if LAST:
            p_x = x + (first + o_e)[None, :] * R + (i_r + o_r)[:, None]
        else:
            o_x = (i_m[None, :] * R + (i_r + o_r)[:, None]) * D
            p_x = x + tl.multiple_of(o_x, (UNIT, UNIT)) + o_d[None, :]
        b_y += tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(y + first + o_e, tl.sum(b_y, 0).to(y.dtype.element_ty), mask=m_e)


@remember
def _plan(M: int, R: int, D: int, shape: tuple[int, ...], dtype: str, last: bool) -> Plan:
    BR = min(pow2(R), 16)
    BE = min(tile(M * D), 256 if R > 16 else 2048 // BR)
    return Plan(sum_kernel, (-(-M * D // BE),), dict(R=R, D=D, E=M * D), dict(y=(shape, dtype)),
                dict(BR=BR, BE=BE, UNIT=math.gcd(16, D), LAST=last, OVERLAP=_IN_TURN), 4, 2)


def summed(x: Array, M: int, R: int, D: int, shape: tuple[int, ...], dtype: str, last: bool = False) -> Array:
    """``x`` as ``[M, R, D]``, or ``[M, D, R]`` with ``last``, summed over R, in the given shape and dtype."""
    # One row is in either order; read as the last axis it may have more values than fit into 32 bits.
    return _plan(M, R, D, shape, dtype, last or R == 1).launch(x=x)[0]


def over_shared(call: Sizes, dx: Array | None, x: Spec | None) -> Array | None:
    """The gradient of an array, if there is one, from those of all heads: the sum over those that share one."""
    R = call.ratio(x)
    if x is None or dx is None or R == 1:
        return dx
    own = math.prod(x.shape[:3])
    if len(x.shape) == 3:
        return summed(dx, 1, R, own, x.shape, x.dtype, last=True)
    return summed(dx, own, R, x.shape[3], x.shape, x.dtype)
