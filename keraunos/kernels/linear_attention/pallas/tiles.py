"""How a thread loads and stores its part of an array, in the Pallas kernels for gates per token and dimension.

Each access is one block of PTX. JAX has functions for all of them, but makes 150 to 1,000 operations for each, most of
them to find the thread's place: they were more than half of what it took to compile a kernel.

A thread has, of an array ``[CHUNK, 64]`` in the layout of the tensor cores' results, two rows, 8 apart, and eight pairs
of neighbours in each, 8 columns apart: pair by pair, its first row's before its second's. In that order PTX numbers the
values; the address of the array comes last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import llvm

from keraunos.kernels.linear_attention.pallas.program import CHUNK, COLUMNS, LAYOUT, PER_COLUMN, PER_ROW, SWIZZLED
from keraunos.kernels.linear_attention.pallas.registers import widened

# A tile ``[CHUNK, 64]`` of 16-bit values in shared memory.
TILE = plgpu.RefType(SWIZZLED)

# All of a thread's values of an array ``[CHUNK, 64]`` in one vector, in the order above: of a sum of two JAX makes one
# operation, and not 16. It is told of vectors of neighbours in memory, and does not ask.
FLAT = plgpu.Layout.WG_STRIDED((CHUNK, COLUMNS), 32)


class Tile(NamedTuple):
    """A place in room for several in shared memory: of ``room.at[place]`` JAX makes the address in five times the time.

    Its values are ``FLAT`` in registers, those of references not.
    """

    room: Any
    place: tuple[Any, ...]
    kind: Any = TILE

    @property
    def ref(self) -> Any:
        """The place as a reference, for all that is not PTX of ours."""
        return self.room.at[*self.place]

    @property
    def dtype(self) -> Any:
        """Of its values."""
        return self.room.dtype


def whole_tiles(x: Any) -> Any:
    """The reference of a :class:`Tile`, or what is one."""
    return x.ref if isinstance(x, Tile) else x


def types(x: Any, kind: Any) -> tuple[Any, ...]:
    """The types of what PTX is given for a reference or a :class:`Tile`."""
    if not isinstance(x, Tile):
        return (kind,)
    return x.kind, *(plgpu.Layout.WG_SPLAT for i in x.place if not isinstance(i, int))


def values_of(x: Any) -> tuple[Any, ...]:
    """What PTX is given."""
    return (x.room, *(i for i in x.place if not isinstance(i, int))) if isinstance(x, Tile) else (x,)


def address_of(x: Any, given: Iterator[Any]) -> Any:
    """The address, of what has been given."""
    ref = next(given)
    pointer = mgpu.utils.memref_ptr(ref)
    if not isinstance(x, Tile):
        return pointer
    constant: Any = arith.constant
    word, known = ir.IntegerType.get_signless(32), ir.MemRefType(ref.type)
    size, found = mgpu.utils.bytewidth(known.element_type), llvm.ptrtoint(word, pointer)
    for i, stride in zip(x.place, known.get_strides_and_offset()[0], strict=False):
        n = constant(word, i) if isinstance(i, int) else next(given).registers.item()
        found = arith.addi(found, arith.muli(n, constant(word, stride * size)))
    return found


def words_of(x: Any) -> list[Any]:
    """A thread's values of an array, in 32 bits: one each, or two 16-bit neighbours."""

    def words(register):
        kind = ir.VectorType(register.type)
        if mgpu.utils.bitwidth(kind.element_type) == 16:
            found = ir.VectorType.get((kind.shape[0] // 2,), ir.IntegerType.get_signless(32))
            register = vector.bitcast(found, register)
        elements: Any = vector.ToElementsOp(register)
        return elements.results

    return [word for register in x.registers.flat for word in words(register)]


def array(words: Callable[[Any, int], Sequence[Any]], shape: tuple[int, ...], dtype: Any, layout: Any) -> Any:
    """The array of a thread's ``words(type, count)``."""
    found, element = layout.to_mgpu(), mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))
    into = found.registers_shape(shape)
    kind = ir.VectorType(found.registers_element_type(element))
    word = ir.IntegerType.get_signless(32) if mgpu.utils.bitwidth(element) == 16 else element
    n = kind.shape[0] * mgpu.utils.bitwidth(element) // 32
    given, made = words(word, n * math.prod(into)), ir.VectorType.get((n,), word)
    values = [vector.from_elements(made, given[i : i + n]) for i in range(0, len(given), n)]
    registers = np.empty(len(values), object)
    registers[:] = [x if word is element else vector.bitcast(kind, x) for x in values]
    registers = registers.reshape(into)
    is_signed = True if isinstance(element, ir.IntegerType) else None
    return mgpu.FragmentedArray(_registers=registers, _layout=found, _is_signed=is_signed)


def _load(ref: Any, code: Any, dtype: Any, *more: Any, kind: Any = None, layout: Any = LAYOUT) -> Any:
    """An array of a dtype, by PTX or what makes it of the reference; ``more``: another reference, and a number."""
    shape, kind, refs = (CHUNK, COLUMNS) if layout is LAYOUT else (CHUNK,), kind or plgpu.RefType(), (ref, *more[:1])
    layout = FLAT if layout is LAYOUT and isinstance(ref, Tile) else layout

    @plgpu.inline_mgpu(
        arg_types=(*(each for x in refs for each in types(x, kind)), *(plgpu.Layout.WG_SPLAT for _ in more[1:])),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout),
    )
    def load(_, *given):
        def words(element, count):
            rest = iter(given)
            addresses = [address_of(x, rest) for x in refs]
            return mgpu.utils.inline_ptx(
                code if isinstance(code, str) else code(given[0]), *addresses, *(x.registers.item() for x in rest),
                result_types=(element,) * count, has_side_effects=True, convergent=True,
            )

        return array(words, shape, dtype, layout)

    return load(*(each for x in refs for each in values_of(x)), *more[1:])


def _store(ref: Any, x: Any, code: Any, *, kind: Any = None, layout: Any = LAYOUT) -> None:
    """Store an array by a block of PTX."""

    layout = FLAT if layout is LAYOUT and isinstance(ref, Tile) else layout

    @plgpu.inline_mgpu(arg_types=(layout, *types(ref, kind or plgpu.RefType())))
    def store(_, x, *given):
        text = code if isinstance(code, str) else code(given[0])
        address = address_of(ref, iter(given))
        mgpu.utils.inline_ptx(text, *words_of(x), address, result_types=None, has_side_effects=True, convergent=True)

    store(x, *values_of(ref))


def _names(first: int, count: int) -> str:
    return ", ".join(f"${i}" for i in range(first, first + count))


def _four(i: int) -> str:
    return f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{_names(i, 4)}}}, [a];"


def _of_tile(access: Callable[[int], str], address: str) -> str:
    """PTX for the 16 blocks of 8 by 8 that a warp has of a tile, of that for four, at ``[a]``, from the i-th on.

    Rows have 128 bytes, in which blocks of 16 bytes change places by the last three bits of the row. 16 lanes say where
    the rows of a block are, r, the others of the block beside it; ``address``: what moves that of the tile to b.
    """
    steps = " ".join(f"xor.b32 a, c, {32 * i}; add.u32 a, a, b; {access(4 * i)}" for i in range(4))
    return (
        "{ .reg .b32 a, b, c, r, t, x0, x1, x2, x3; .reg .pred p; mov.u32 t, %tid.x; shr.u32 r, t, 1; and.b32 r, r, 48;"
        f" and.b32 a, t, 15; or.b32 r, r, a; {address} shl.b32 a, t, 4; and.b32 a, a, 112; and.b32 c, t, 16;"
        f" xor.b32 c, c, a; shl.b32 a, r, 7; or.b32 c, c, a; {steps} }}"
    )


def load_tile(ref: Any) -> Any:
    """A tile of 16-bit values."""
    return _load(ref, _of_tile(_four, "mov.b32 b, $16;"), ref.dtype, kind=TILE)


def load_halves(later: Any, earlier: Any, m: Any, backward_in_time: bool) -> Any:
    """Each row of the first tile whose place has the bit m, of the second tile the others."""
    first, second = (earlier, later) if backward_in_time else (later, earlier)
    address = "and.b32 b, r, $18; setp.ne.u32 p, b, 0; selp.b32 b, $16, $17, p;"
    return _load(first, _of_tile(_four, address), later.dtype, second, m, kind=TILE)


def load_bf16(ref: Any, unrolled: bool = False) -> Any:
    """A tile of bf16 in float32, one instruction for each value; ``unrolled`` as in :func:`_store_tile`."""
    if unrolled:
        return widened(plgpu.load(ref, layout=LAYOUT))

    def four(i):
        halves = (f"shl.b32 ${2 * (i + j)}, x{j}, 16; and.b32 ${2 * (i + j) + 1}, x{j}, 0xffff0000;" for j in range(4))
        return f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{x0, x1, x2, x3}}, [a]; {' '.join(halves)}"

    return _load(ref, _of_tile(four, "mov.b32 b, $32;"), jnp.float32, kind=TILE)


def store_tile(ref: Any, x: Any, unrolled: bool = False) -> None:
    """Store 16-bit values in a tile.

    ``unrolled``: by JAX's function for it, whose instructions the compiler mixes with what stands around.
    """
    if unrolled:
        ref[...] = x
        return
    code = _of_tile(lambda i: f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [a], {{{_names(i, 4)}}};", "mov.b32 b, $16;")
    _store(ref, x, code, kind=TILE)


def store_tiles(refs: Sequence[Any], xs: Sequence[Any]) -> None:
    """Store 16-bit values in several tiles."""
    for ref, x in zip(refs, xs, strict=True):
        store_tile(ref, x)


# Four bytes for each row, to the thread's first: which warp, which lane. And eight for its first two columns.
_ROW = "{ .reg .b32 a, t; mov.u32 a, %tid.x; and.b32 t, a, 0x60; shl.b32 t, t, 1; and.b32 a, a, 28; or.b32 a, a, t;"
_COLUMN = "{ .reg .b32 a, t; .reg .pred p; mov.u32 t, %tid.x; and.b32 a, t, 3; shl.b32 a, a, 3;"


def load_per_row(ref: Any) -> Any:
    """``[CHUNK]`` values of 32 bits in shared memory, one per row."""
    code = f"{_ROW} add.u32 a, a, $2; ld.shared.b32 $0, [a]; ld.shared.b32 $1, [a+32]; }}"
    return _load(ref, code, ref.dtype, layout=PER_ROW)


def store_per_row(ref: Any, x: Any) -> None:
    """Store them."""
    code = f"{_ROW} add.u32 a, a, $2; st.shared.b32 [a], $0; st.shared.b32 [a+32], $1; }}"
    _store(ref, x, code, layout=PER_ROW)


def load_per_column(ref: Any) -> Any:
    """``[64]`` values of 32 bits in shared memory, one per column."""
    loads = " ".join(f"ld.shared.v2.b32 {{{_names(2 * i, 2)}}}, [a+{32 * i}];" for i in range(8))
    return _load(ref, f"{_COLUMN} add.u32 a, a, $16; {loads} }}", ref.dtype, layout=PER_COLUMN)


def copy_rows(ref: Any, x: Any, rows: Sequence[int]) -> None:
    """Copy rows of float32 values to a reference ``[rows, 64]`` in shared memory."""
    code = f"{_COLUMN} add.u32 a, a, $32; and.b32 t, t, 0x7c;"
    for i, row in enumerate(rows):
        # The four threads that have it, as the first or the second of their rows.
        code += f" setp.ne.u32 p, t, {row // 16 * 32 + row % 8 * 4}; @p bra after{i};" + "".join(
            f" st.shared.v2.b32 [a+{256 * i + 32 * j}], {{{_names(4 * j + row % 16 // 8 * 2, 2)}}};" for j in range(8)
        )
        code += f" after{i}:"
    _store(ref, x, f"{code} }}")


def _own(access: Callable[[str, str], str]) -> str:
    """PTX for shared memory in which each thread has 16 bytes at a time."""
    each = " ".join(access(f"[a+{2048 * i}]", f"{{{_names(4 * i, 4)}}}") for i in range(8))
    return f"{{ .reg .b32 a; mov.u32 a, %tid.x; and.b32 a, a, 127; shl.b32 a, a, 4; add.u32 a, a, $32; {each} }}"


def leave_in(ref: Any, x: Any) -> None:
    """Leave float32 values for another warpgroup in shared memory, in an order that only :func:`_taken` knows."""
    _store(ref, x, _own(lambda at, values: f"st.shared.v4.f32 {at}, {values};"))


def taken(ref: Any) -> Any:
    """What another warpgroup has left."""
    return _load(ref, _own(lambda at, values: f"ld.shared.v4.f32 {values}, {at};"), jnp.float32)


def _block(access: Callable[[str, str], str]) -> Callable[[Any], str]:
    """What makes PTX for a block of a float32 array in memory, two neighbours at a time."""

    def code(ref):
        stride = 4 * ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        each = " ".join(
            access(f"[a+{32 * j + 8 * stride * i}]", f"{{{_names(4 * j + 2 * i, 2)}}}")
            for j in range(8)
            for i in range(2)
        )
        return (
            "{ .reg .b32 r, c, t; .reg .b64 a; mov.u32 t, %tid.x; bfe.u32 r, t, 5, 2; shl.b32 r, r, 4;"
            " bfe.u32 c, t, 2, 3; add.u32 r, r, c; and.b32 c, t, 3;"
            f" mad.wide.u32 a, r, {stride}, $32; mad.wide.u32 a, c, 8, a; {each} }}"
        )

    return code


def put(ref: Any, x: Any) -> None:
    """Store a block ``[64, 64]`` of float32 in memory."""
    _store(ref, x, _block(lambda at, values: f"st.global.v2.f32 {at}, {values};"))


def read_from(ref: Any) -> Any:
    """Load one."""
    return _load(ref, _block(lambda at, values: f"ld.global.v2.f32 {values}, {at};"), jnp.float32)
