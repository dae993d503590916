"""What a thread does with its registers in the Pallas kernels, where the compiler's way takes more instructions.

The warpgroups that prepare chunks set the pace of the kernels for gates per dimension. Arrays are ``[CHUNK, 64]`` in
the layout of the tensor cores' results, in which a register, or two, hold neighbours of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from keraunos.kernels.linear_attention.pallas_program import _LAYOUT, CHUNK, COLUMNS

_F32 = jnp.float32


def _of_pairs(dtype: Any, of: Callable[..., Any], *xs: Any) -> Any:
    """An array of a dtype: of two neighbours in each array those of the result."""

    @plgpu.inline_mgpu(
        arg_types=(_LAYOUT,) * len(xs), return_type=plgpu.ShapeDtypeStruct((CHUNK, COLUMNS), dtype, layout=_LAYOUT)
    )
    def every(_, first, *rest):
        registers = np.empty_like(first.registers)
        for i, pair in np.ndenumerate(first.registers):
            registers[i] = of(pair, *(x.registers[i] for x in rest))
        return mgpu.FragmentedArray(_registers=registers, _layout=first.layout, _is_signed=None)

    return every(*xs)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _two(element: Any) -> Any:
    return ir.VectorType.get((2,), element)


def _widened(x: Any) -> Any:
    """bf16 values in float32: one instruction each, where the compiler takes two for every other one."""

    def of(pair):
        constant: Any = arith.constant
        bits = mgpu.utils.bitcast(pair, _i32())
        halves = arith.shli(bits, constant(_i32(), 16)), arith.andi(bits, constant(_i32(), -65536))
        return vector.bitcast(_two(ir.F32Type.get()), vector.from_elements(_two(_i32()), halves))

    return _of_pairs(_F32, of, x)


def _exp2_of_minus(x: Any) -> Any:
    """``exp2(-x)``: the sign costs nothing in the instruction itself, for which the compiler takes another."""

    def one(value):
        code = "{ .reg .f32 a; neg.f32 a, $1; ex2.approx.ftz.f32 $0, a; }"
        return mgpu.utils.inline_ptx(code, value, result_types=ir.F32Type.get())

    def of(pair):
        values = [vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2)]
        return vector.from_elements(pair.type, [one(value) for value in values])

    return _of_pairs(_F32, of, x)


def _masked(x: Any, weights: Any) -> Any:
    """x in bf16 where weights, ones and zeros in bf16, are not 0, else 0, whatever x is there.

    Of a choice between x and 0 the compiler would convert each value by itself.
    """

    def of(pair, ones):
        # The last bit of the exponent of 1 is the first of its byte, and becomes all bits.
        code = "prmt.b32 $0, $1, 0, 0xaa88;"
        mask = mgpu.utils.inline_ptx(code, mgpu.utils.bitcast(ones, _i32()), result_types=_i32())
        bf16 = _two(ir.BF16Type.get())
        return mgpu.utils.bitcast(arith.andi(mgpu.utils.bitcast(arith.truncf(bf16, pair), _i32()), mask), bf16)

    return _of_pairs(jnp.bfloat16, of, x, weights)
