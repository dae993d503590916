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


@triton.jit(do_not_specialize=["R", "E"])
def sum_kernel(x, R, E, y, FEW: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
               UNIT: tl.constexpr, LAST: tl.constexpr, OVERLAP: tl.constexpr):
    """``y[m, d] = sum_r x[m, r, d]`` of contiguous arrays, always in the same order, in all frameworks.

    E: how many values y has. FEW: R, or 0 for many. D 0: M is 1. LAST: x is ``[M, D, R]``. UNIT divides D, or E. The
    compiler learns no more: PyTorch would tell it more than JAX does, and it would sum in another order.
    """
    in_turn(OVERLAP)
    first = tl.program_id(0).to(tl.int64) * BE
    o_e = tl.arange(0, BE)
    o_r = tl.arange(0, BR)[:, None]
    m_e = tl.max_constancy(first + o_e < E, UNIT)
    if LAST:
        o_x = (first + o_e) * (FEW or R)
    elif D == 0:
        o_x = first + o_e
    else:
        o_d = (first % D).to(tl.int32) + o_e
        i_m = tl.max_constancy(first // D + o_d // D, UNIT)
        o_x = tl.multiple_of(i_m * (FEW or R) * D, UNIT) + tl.max_contiguous(tl.multiple_of(o_d % D, UNIT), UNIT)
    p_x = x + o_x[None, :]
    step = 1 if LAST else D or E
    if FEW:
        m_x = m_e[None, :] if FEW == BR else (o_r < FEW) & m_e[None, :]
        o_r = o_r.to(tl.int64) * step
        b_y = tl.load(p_x + (o_r if LAST else tl.multiple_of(o_r, (UNIT, UNIT))), mask=m_x, other=0.0).to(tl.float32)
    else:
        b_y = tl.zeros([BR, BE], dtype=tl.float32)
        for i_r in range(0, R, BR):
            m_x = (i_r + o_r < R) & m_e[None, :]
            i_x = (i_r + o_r).to(tl.int64) * step
            i_x = i_x if LAST else tl.multiple_of(i_x, (UNIT, UNIT))
            b_y += tl.load(p_x + i_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(y + first + o_e, tl.sum(b_y, 0).to(y.dtype.element_ty), mask=m_e)


@remember
def _plan(M: int, R: int, D: int, shape: tuple[int, ...], dtype: str, last: bool) -> Plan:
    E, BR = M * D, min(pow2(R), 16)
    # Few rows are each thread's own: to exchange sums would take four times as long as the bytes.
    BE = min(tile(E), 256 if R > 16 else 1024)
    D = 0 if last or M == 1 else D
    constants = dict(FEW=R if R <= 16 else 0, D=D, BR=BR, BE=BE, UNIT=math.gcd(16, D or E), LAST=last, OVERLAP=_IN_TURN)
    return Plan(sum_kernel, (-(-E // BE),), dict(R=R, E=E), dict(y=(shape, dtype)), constants, 4, 2)


def summed(x: Array, M: int, R: int, D: int, shape: tuple[int, ...], dtype: str, last: bool = False) -> Array:
    """``x`` as ``[M, R, D]``, or ``[M, D, R]`` with ``last``, summed over R, in the given shape and dtype."""
    # One row, or none, is in either order; read as the last axis it may have more values than fit into 32 bits.
    return _plan(M, R, D, shape, dtype, last or R < 2).launch(x=x)[0]


def over_shared(call: Sizes, dx: Array | None, x: Spec | None) -> Array | None:
    """The gradient of an array, if there is one, from those of all heads: their sum, where a kernel has not made it."""
    if x is None or dx is None or tuple(dx.shape) == tuple(x.shape):
        return dx
    R, own = call.ratio(x), math.prod(x.shape[:3])
    if len(x.shape) == 3:
        return summed(dx, 1, R, own, x.shape, x.dtype, last=True)
    return summed(dx, own, R, x.shape[3], x.shape, x.dtype)
