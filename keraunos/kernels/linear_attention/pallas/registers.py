"""What a thread does with its registers in the Pallas kernels, where the compiler's way takes more instructions.

The warpgroups that prepare chunks set the pace of the kernels for gates per dimension; the mask of pairs is for gates
per token, too. Arrays are ``[CHUNK, 64]`` in the layout of the tensor cores' results, in which a register, or two, hold
neighbours of a row.
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

from keraunos.kernels.linear_attention.pallas.program import CHUNK, COLUMNS, LAYOUT, by_row

_F32 = jnp.float32


def _of_pairs(dtype: Any, of: Callable[..., Any], *xs: Any) -> Any:
    """An array of a dtype: of two neighbours in each array those of the result."""

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT,) * len(xs), return_type=plgpu.ShapeDtypeStruct((CHUNK, COLUMNS), dtype, layout=LAYOUT)
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


def widened(x: Any) -> Any:
    """bf16 values in float32: one instruction each, where the compiler takes two for every other one."""

    def of(pair):
        constant: Any = arith.constant
        bits = mgpu.utils.bitcast(pair, _i32())
        halves = arith.shli(bits, constant(_i32(), 16)), arith.andi(bits, constant(_i32(), -65536))
        return vector.bitcast(_two(ir.F32Type.get()), vector.from_elements(_two(_i32()), halves))

    return _of_pairs(_F32, of, x)


def exp2_of_minus(x: Any) -> Any:
    """``exp2(-x)``: the sign costs nothing in the instruction itself, for which the compiler takes another."""

    def one(value):
        code = "{ .reg .f32 a; neg.f32 a, $1; ex2.approx.ftz.f32 $0, a; }"
        return mgpu.utils.inline_ptx(code, value, result_types=ir.F32Type.get())

    def of(pair):
        values = [vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2)]
        return vector.from_elements(pair.type, [one(value) for value in values])

    return _of_pairs(_F32, of, x)


def upto_of(x: Any, dtype: Any, backward_in_time: bool, apart: Any = None) -> Any:
    """x ``[CHUNK, CHUNK]`` in 16 bits where the column's token is not after the row's, else 0, whatever x is there.

    ``apart``: how many tokens it must be before the row's, at least.

    Of a choice between x and 0 the compiler would convert each value by itself, and to compare places it would read
    them from shared memory.
    """

    least = [] if apart is None else [apart]

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, *(plgpu.Layout.WG_SPLAT for _ in least)),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, CHUNK), dtype, layout=LAYOUT),
    )
    def upto(_, x, *least):
        constant: Any = arith.constant

        # In each half of a word 2^15 and how far the column is before the row, or after; the second column is the next.
        difference, bias = ("c, r", "0x80018000") if backward_in_time else ("r, c", "0x7fff8000")
        steps = mgpu.utils.inline_ptx(
            "{ .reg .u32 t, r, c; mov.u32 t, %tid.x; bfe.u32 r, t, 5, 2; shl.b32 r, r, 4; bfe.u32 c, t, 2, 3;"
            " add.u32 r, r, c; and.b32 c, t, 3; shl.b32 c, c, 1;"
            f" sub.u32 r, {difference};{' sub.u32 r, r, $1;' if least else ''} mad.lo.u32 $0, r, 0x10001, {bias}; }}",
            *(each.registers.item() for each in least),
            result_types=_i32(),
            # Anew for each chunk: masks that are kept take registers.
            has_side_effects=True,
        )
        registers, two = np.empty_like(x.registers), _two(mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
        # A thread has two rows and eight pairs of columns, each 8 apart.
        rows, columns = x.registers.shape.index(2), x.registers.shape.index(8)
        for i, pair in np.ndenumerate(x.registers):
            further = 8 * (i[rows] - i[columns]) * (-1 if backward_in_time else 1)
            words = arith.addi(steps, constant(_i32(), further * 0x10001))
            # The first bit of each half becomes all of it.
            mask = mgpu.utils.inline_ptx("prmt.b32 $0, $1, 0, 0xbb99;", words, result_types=_i32())
            bits = mgpu.utils.bitcast(arith.truncf(two, pair), _i32())
            registers[i] = mgpu.utils.bitcast(arith.andi(bits, mask), two)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return upto(x, *least)


def commit_fine(x: Any, y: Any) -> Any:
    """``plgpu.commit_smem``, and 1 if all of x and y, bf16, may be float16 as well, else 0.

    Each thread looks at a quarter of two rows of both. The largest of its values must be 0, or less than 2^16 and at
    least 2^-16, where float16 has as many digits as bf16.
    """

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, LAYOUT), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    )
    def commit(_, x, y):
        def ptx(code, *operands):
            return mgpu.utils.inline_ptx(code, *operands, result_types=_i32())

        def most(a, b):
            return ptx("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", a, b)

        def largest(values):
            # As a tree: what comes last, all warps wait for.
            half = len(values) // 2
            return values[0] if not half else most(largest(values[:half]), largest(values[half:]))

        def rows(x):
            first, second = (
                largest([mgpu.utils.bitcast(register, _i32()) for _, register in mine]) for mine in by_row(x)
            )
            low, high = (ptx(f"prmt.b32 $0, $1, $2, {which};", first, second) for which in ("0x5410", "0x7632"))
            return ptx("and.b32 $0, $1, 0x7fff7fff;", most(low, high))

        # Of halves of words: a has 2^15 where one is too large, b has 1 where one is too small but not 0.
        code = (
            "{ .reg .b32 a, b, c, d; .reg .pred p; max.u16x2 a, $1, $2; add.u32 a, a, 0x38803880;"
            " mov.b32 d, 0xffffffff; add.u16x2 b, $1, d; add.u16x2 c, $2, d; min.u16x2 b, b, c; mov.b32 d, 0x377e377e;"
            " max.u16x2 b, b, d; sub.u32 b, b, d; mov.b32 d, 0x00010001; min.u16x2 b, b, d;"
            " and.b32 a, a, 0x80008000; xor.b32 b, b, 0x00010001; or.b32 a, a, b; setp.eq.u32 p, a, 0;"
            " fence.proxy.async.shared::cta; bar.red.and.pred p, $3, 128, p; selp.b32 $0, 1, 0, p; }"
        )
        barrier = mgpu.utils.warpgroup_barrier_idx(sync=False)
        fits = mgpu.utils.inline_ptx(
            code, rows(x), rows(y), barrier, result_types=_i32(), has_side_effects=True, convergent=True
        )
        return mgpu.FragmentedArray.splat(fits, (), is_signed=True)

    return commit(x, y)
