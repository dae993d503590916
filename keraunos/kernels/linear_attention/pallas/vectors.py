"""Arrays ``[CHUNK, 64]`` of which all of a thread's values are one vector, for the walk of GLA's gradients.

Of a sum of two such arrays JAX makes one operation, where it makes 16 in the layout of the tensor cores' results; what
it would not make of them right is PTX here. ``tiles.py`` says which value is which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import llvm

from keraunos.kernels.linear_attention.pallas.program import CHUNK, COLUMNS, LAYOUT, PER_COLUMN, PER_ROW
from keraunos.kernels.linear_attention.pallas.tiles import FLAT, array, words_of


def _of_flat(of: Callable[..., Any], *xs: Any, dtype: Any = None, layout: Any = FLAT, given: Any = FLAT) -> Any:
    """``of(type, count, words of an array, ...)``: those of the result."""
    shape, dtype = (CHUNK, COLUMNS) if layout in (FLAT, LAYOUT) else (CHUNK,), dtype or xs[0].dtype

    @plgpu.inline_mgpu(arg_types=(given,) * len(xs), return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout))
    def found(_, *xs):
        return array(lambda *kind: of(*kind, *map(words_of, xs)), shape, dtype, layout)

    return found(*xs)


def flat(x: Any) -> Any:
    """An array in one vector."""
    return _of_flat(lambda kind, count, words: words, x, given=LAYOUT)


def unflat(x: Any) -> Any:
    """The other way."""
    return _of_flat(lambda kind, count, words: words, x, layout=LAYOUT)


def flat_rows(x: Any) -> Any:
    """A value per row, for all columns, in one vector."""
    return _of_flat(lambda kind, count, words: [words[i // 2 % 2] for i in range(32)], x, given=PER_ROW)


def flat_columns(x: Any) -> Any:
    """A value per column, for all rows."""
    return _of_flat(lambda kind, count, words: [words[i // 4 * 2 + i % 2] for i in range(32)], x, given=PER_COLUMN)


def flat_zeros() -> Any:
    """A chunk's zeros, ``[CHUNK, 64]``, in one vector a thread."""
    return plgpu.layout_cast(jnp.zeros((CHUNK, COLUMNS), jnp.float32), FLAT)


def flat_exp2(x: Any, sign: str = "") -> Any:
    """``exp2(x)``, or ``exp2(-x)``, whose sign costs nothing in the instruction itself."""

    def words(kind, count, values):
        each = f"ex2.approx.ftz.f32 ${{0}}, {'a' if sign else '${1}'};"
        each = f"neg.f32 a, ${{1}}; {each}" if sign else each
        code = " ".join(each.format(i, 32 + i) for i in range(32))
        return mgpu.utils.inline_ptx(f"{{ .reg .f32 a; {code} }}", *values, result_types=(kind,) * count)

    return _of_flat(words, x)


def flat_sum(x: Any) -> Any:
    """The sum of each row, in the order of JAX's."""

    def words(kind, count, values):
        code = "{ .reg .f32 a, b, c, t;"
        for half in range(2):
            # Every other pair of columns, first and second columns by themselves; then the four threads of a row.
            for column, name in enumerate("bc"):
                for odd in range(2):
                    first, *rest = (f"${2 + 8 * j + 4 * odd + 2 * half + column}" for j in range(4))
                    into = "t" if odd else name
                    code += f" mov.f32 {into}, {first};" + "".join(f" add.f32 {into}, {into}, {x};" for x in rest)
                code += f" add.f32 {name}, {name}, t;"
            code += f" add.f32 ${half}, b, c;"
            code += "".join(
                f" shfl.sync.bfly.b32 t, ${half}, {n}, 31, -1; add.f32 ${half}, ${half}, t;" for n in (1, 2)
            )
        return mgpu.utils.inline_ptx(
            f"{code} }}", *values, result_types=(kind,) * count, has_side_effects=True, convergent=True
        )

    return _of_flat(words, x, layout=PER_ROW)


def here(x: Any) -> Any:
    """x, made here and not in the branch that uses it."""

    def words(kind, count, values):
        code = ["=r" if isinstance(kind, ir.IntegerType) else "=f"] * count + [str(i) for i in range(count)]
        inline: Any = llvm.inline_asm
        found = inline(llvm.StructType.get_literal([kind] * count), values, "", ",".join(code), has_side_effects=True)
        return [llvm.extractvalue(kind, found, [i]) for i in range(count)]

    return _of_flat(words, x)
