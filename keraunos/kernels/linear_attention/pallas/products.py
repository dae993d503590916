"""Products of tiles ``[64, 64]`` by the tensor cores, for the kernels with gates per token and dimension.

Several that add to one result are one block of PTX: JAX makes some 240 operations for each, a fifth of what it took to
compile a kernel. They run in the order in which they are started, while the program goes on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm

from keraunos.kernels.linear_attention.pallas.program import CHUNK, COLUMNS, LAYOUT
from keraunos.kernels.linear_attention.pallas.tiles import (
    FLAT,
    TILE,
    Tile,
    address_of,
    array,
    types,
    values_of,
    words_of,
)


class T(NamedTuple):
    """A tile in shared memory, transposed."""

    tile: Any


def wait_for(pending: int = 0) -> None:
    """Wait for all products but those of so many of the last :func:`_start`."""
    plgpu.inline_mgpu()(lambda _: mgpu.utils.inline_ptx(f"wgmma.wait_group.sync.aligned {pending};"))()


def _describe(name: str, address: str, across: bool) -> str:
    """PTX for what the tensor cores know a tile by: its address, in 16 bytes, and that it lies as ``smem`` says.

    That is h: rows of 128 bytes, swizzled, and 1,024 bytes from eight rows to the next. ``across``: what is summed over
    lies across the rows.
    """
    return f"shr.u32 x, {address}, 4;{' or.b32 x, x, 0x400000;' if across else ''} mov.b64 {name}, {{x, h}};"


def start_product(*operands: Any, onto: Any = None) -> Any:
    """Start ``onto + a @ b + ...`` over the operands a, b, a, b, ...; the result is there when it has been waited for.

    a is a tile or its transpose, or an array of the compiler's; b a tile or its transpose.
    """
    tiles = [x.tile if isinstance(x, T) else x for x in operands]
    turned = [isinstance(x, T) for x in operands]
    arrays = [isinstance(x, jnp.ndarray) for x in operands]

    layout = FLAT if isinstance(tiles[1], Tile) else LAYOUT
    kinds = [(layout,) if is_array else types(x, TILE) for x, is_array in zip(tiles, arrays, strict=True)]

    @plgpu.inline_mgpu(
        arg_types=(*(kind for each in kinds for kind in each), *((layout,) if onto is not None else ())),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, COLUMNS), jnp.float32, layout=layout),
    )
    def start(_, *given):
        before = [] if onto is None else words_of(given[-1])
        values, code, rest = list[Any](), list[str](), iter(given)

        def operand(n: int) -> list[str]:
            new = words_of(next(rest)) if arrays[n] else [address_of(tiles[n], rest)]
            first = 32 + len(before) + len(values)
            values.extend(new)
            return [f"${first + i}" for i in range(len(new))]

        result = f"{{{', '.join(f'${i}' for i in range(32))}}}"
        dtype = mgpu.utils.dtype_to_ir_type(tiles[1].dtype)
        for n in range(0, len(operands), 2):
            a, b = operand(n), operand(n + 1)
            across = turned[n], not turned[n + 1]
            code.append("" if arrays[n] else _describe("a", a[0], across[0]))
            code.append(_describe("b", b[0], across[1]))
            for i in range(4):
                # 16 at a time of what is summed over: along the rows two units further, across them 128.
                if i and not arrays[n]:
                    code.append(f"add.s64 a, a, {128 if across[0] else 2};")
                if i:
                    code.append(f"add.s64 b, b, {128 if across[1] else 2};")
                left = f"{{{', '.join(a[4 * i : 4 * i + 4])}}}" if arrays[n] else "a"
                flags = across[1:] if arrays[n] else across
                fresh = onto is None and n == i == 0
                code.append(
                    f"wgmma.mma_async.sync.aligned.m64n64k16.f32.{dtype}.{dtype} {result}, {left}, b,"
                    f" {'no' if fresh else 'yes'}, 1, 1, {', '.join(str(int(x)) for x in flags)};"
                )
        text = (
            "{ .reg .b32 x, h; .reg .b64 a, b; .reg .pred yes, no; mov.b32 h, 0x40000040; setp.eq.u32 yes, 0, 0;"
            f" setp.ne.u32 no, 0, 0; wgmma.fence.sync.aligned; {' '.join(code)} wgmma.commit_group.sync.aligned; }}"
        )
        constraints = ["=f"] * 32 + [str(i) for i in range(len(before))] + ["r"] * len(values)

        def words(element, count):
            # Results that begin as values, which JAX's own function for PTX does not know.
            inline: Any = llvm.inline_asm
            found = inline(
                llvm.StructType.get_literal([element] * count), [*before, *values], text, ",".join(constraints),
                has_side_effects=True, convergent=True,
            )
            return [llvm.extractvalue(element, found, [i]) for i in range(count)]

        return array(words, (CHUNK, COLUMNS), jnp.float32, layout)

    values = [(x,) if is_array else values_of(x) for x, is_array in zip(tiles, arrays, strict=True)]
    return start(*(each for x in values for each in x), *(() if onto is None else (onto,)))


def product_of(*operands: Any) -> Any:
    """``a @ b``, the sum over the operands a, b, a, b, ..."""
    found = start_product(*operands)
    wait_for()
    return found
