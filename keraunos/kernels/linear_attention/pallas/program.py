"""What the Pallas kernels of Hopper share: layouts, rows of chunks in shared memory, rings of stages, launches.

A kernel is a function of its program's indices, its warpgroup and references to arrays, outputs and shared memory, and
``launch_kernel`` runs it. One warpgroup fills a ring of stages, the others give them back:
``benchmarks/results/hopper-notes.md`` draws it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import run_state
from jax.extend.core import jaxpr_as_fun
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf, vector
from jaxlib.mlir.dialects import llvm

from keraunos.frontends.jax import vary, varying
from keraunos.kernels.linear_attention.pallas.walk import CHUNK

# Columns of V per compute warpgroup: its state [K, 64] in float32 is half of a thread's registers where K is 128.
COLUMNS = 64
# Registers per thread, of 65,536 per multiprocessor: the memory warpgroup only issues copies.
REGISTERS, REGISTERS_MEMORY = 232, 40

# Bytes of shared memory of a block, less what barriers and alignment take.
SHARED = 232448 - 256

LAYOUT = plgpu.Layout.WGMMA
# One value per row, and one per column, of an array of that layout.
PER_ROW, PER_COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)


def rows_of(x, columns):
    """A factor per row, for all columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def columns_of(x, rows):
    """A factor per column, for all rows."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


# Tiles of 8 rows of 128 bytes, swizzled.
SWIZZLED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def smem(dtype, *shape):
    """Room laid out as the tensor cores and the bulk copies agree on: rows of 128 bytes, swizzled, in tiles of 8."""
    row = min(shape[-1] * jnp.dtype(dtype).itemsize, 128)
    tiles = plgpu.TilingTransform((8, row // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(row)
    return plgpu.SMEM(shape, dtype, transforms=tiles)


def when(condition):
    """``pl.when``, for which JAX makes a number of a bool, and asks ptxas, a process of its own, for its version."""

    def decorated(run):
        run() if condition is True else either_of(condition, run, lambda: None)

    return decorated


def either_of(condition, run, otherwise):
    """``lax.cond``, the same way."""
    return lax.switch(lax.select(condition, np.int32(1), np.int32(0)), (otherwise, run))


def zeros(*shape):
    """Zeros in registers, float32."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), LAYOUT)


def by_row(value):
    """The indices and registers of a thread's values, in either layout, by the rows that they lie in: two."""
    indices = [tuple(index) for index in value.layout.thread_idxs(value.shape)]
    registers = list(zip(indices, value.registers.flat, strict=True))
    axis = [i for i, n in enumerate(value.registers.shape) if n == 2][-1]
    halves = [i[axis] for i in np.ndindex(value.registers.shape)]
    return [[x for x, at in zip(registers, halves, strict=True) if at == half] for half in range(2)]


def store_rows(ref, value, first, end):
    """Store rows of a value ``[rows, columns]`` or ``[rows]`` to memory, from the first to before the end."""
    layout = LAYOUT if value.ndim == 2 else PER_ROW

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT))
    def store(_, ref, value, *limits):
        first, end = (arith.index_cast(ir.IndexType.get(), x.registers.item()) for x in limits)
        for mine in by_row(value):
            row_index = mine[0][0][0]
            after = arith.cmpi(arith.CmpIPredicate.sge, row_index, first)
            before = arith.cmpi(arith.CmpIPredicate.slt, row_index, end)
            inside: Any = scf.IfOp(arith.andi(after, before))  # type: ignore
            with ir.InsertionPoint(inside.then_block):
                for index, register in mine:
                    vector.store(register, ref, [row_index, *index[1:]])
                scf.yield_([])

    store(ref, value, jnp.int32(first), jnp.int32(end))


def clear_rows(tiles, first, end):
    """Zero the rows of tiles ``[CHUNK, 64]`` in shared memory that are not from the first to before the end."""
    for tile in tiles:
        _zero_rows(tile, jnp.int32(first), jnp.int32(end))
    plgpu.commit_smem()


def _zero_rows(tile, first, end):
    """Zero rows of one tile of 16 bits, in few instructions and registers: eight threads have a row."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT))
    def zero(_, tile, *limits):
        # Bytes from eight rows to the next.
        eight = 2 * ir.MemRefType(tile.type).get_strides_and_offset()[0][0]
        code = (
            "{ .reg .u32 t, a, row, nil; .reg .pred p; mov.u32 t, %tid.x; mov.u32 nil, 0; bfe.u32 row, t, 3, 4;"
            f" shr.u32 a, row, 3; mad.lo.u32 a, a, {eight}, $0; and.b32 t, t, 63; mad.lo.u32 a, t, 16, a;"
        )
        for _ in range(CHUNK // 16):
            code += (
                " setp.lt.s32 p, row, $1; setp.ge.or.s32 p, row, $2, p; @p st.shared.v4.b32 [a], {nil, nil, nil, nil};"
                f" add.u32 row, row, 16; add.u32 a, a, {2 * eight};"
            )
        pointer = mgpu.utils.memref_ptr(tile)
        mgpu.utils.inline_ptx(code + " }", pointer, *(x.registers.item() for x in limits), has_side_effects=True)

    zero(tile, first, end)


def copy_rows_out(ref, tile, first, end):
    """Copy rows of a tile ``[CHUNK, 64]`` of 16 bits to memory, from the first to before the end."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(SWIZZLED), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT)
    )
    def copy(_, ref, tile, *limits):
        # Eight threads have a row, 16 bytes each, which have swapped places in shared memory.
        apart = 2 * ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
        code = (
            "{ .reg .u32 t, a, row; .reg .u64 to, group; .reg .b32 w, x, y, z; .reg .pred p; mov.u32 t, %tid.x;"
            " bfe.u32 row, t, 3, 4; and.b32 a, row, 7; xor.b32 a, a, t; and.b32 a, a, 127; mad.lo.u32 a, a, 16, $1;"
            f" and.b32 t, t, 7; mul.wide.u32 group, t, 16; mul.wide.u32 to, row, {apart}; add.u64 to, to, group;"
            " add.u64 to, to, $0;"
        )
        for _ in range(CHUNK // 16):
            code += (
                " setp.ge.s32 p, row, $2; setp.lt.and.s32 p, row, $3, p; @p ld.shared.v4.b32 {w, x, y, z}, [a];"
                " @p st.global.v4.b32 [to], {w, x, y, z};"
                f" add.u32 row, row, 16; add.u32 a, a, 2048; add.u64 to, to, {16 * apart};"
            )
        pointers = mgpu.utils.memref_ptr(ref), mgpu.utils.memref_ptr(tile)
        mgpu.utils.inline_ptx(code + " }", *pointers, *(x.registers.item() for x in limits), has_side_effects=True)

    copy(ref, tile, jnp.int32(first), jnp.int32(end))


def clear_shared(tile, i_w, warpgroups, met, first, end):
    """Zero rows of a tile ``[CHUNK, K]`` that all compute warpgroups read: each does its part, then they meet."""
    for i in range(tile.shape[1] // 64):

        @when(i_w == i % warpgroups)
        def _(i=i):
            clear_rows([tile.at[:, pl.ds(i * 64, 64)]], first, end)

    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)


def ring(first, last, stages, full, empty, load):
    """The memory warpgroup's loop: fill the stages in turn, each as soon as everyone is done with it.

    ``load(i, slot, barrier)`` issues the copies of step i. They arrive at ``full[slot]`` by themselves when their bytes
    are there; each compute warpgroup arrives at ``empty[slot]`` when it needs them no more. Every completion of a
    barrier is waited for, those of the last round too.
    """
    fill(first, last, 0, stages, full, empty, load)
    drain(last - first, stages, empty)


def fill(first, last, before, stages, full, empty, load):
    """The first part of :func:`ring`, without the last round, after ``before`` steps of other loops."""

    @pl.loop(first, last)
    def _(i):
        n = before + i - first
        slot = lax.rem(n, stages)

        @when(n >= stages)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        load(i, slot, full.at[slot])


def drain(count, stages, empty):
    """Wait for the last round of so many steps."""

    @pl.loop(jnp.maximum(count - stages, 0), jnp.maximum(count, 0))
    def _(n):
        plgpu.barrier_wait(empty.at[lax.rem(n, stages)])


def give_back(empty, i, stages):
    """Say that what step i (-1: none) has loaded from its slot has been used.

    Not in step i itself: arriving there would not wait for the loads, and the copy of a later step could overtake them.
    """
    when(i >= 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(i, stages)]))


def registers_of(warpgroups, n, action):
    """Move registers from the memory warpgroup to the compute warpgroups; a single one has all it can use anyway."""
    if warpgroups > 1:
        plgpu.set_max_registers(n, action=action)


def axis_of(name):
    """A name for an axis of the grid that no axis of a user's mesh has: that would be taken for it."""
    return f"keraunos.{name}"


@plgpu.inline_mgpu()
def _descriptors_in_words(launch):
    """Have a kernel's descriptors of bulk copies passed to it as an array of words.

    JAX passes an array of bytes, by value, and LLVM loads and stores each of them on the host: a quarter of what it
    took to compile the largest kernel. Where a version of JAX does otherwise nothing is changed.
    """

    def pass_words(room):
        for use in room.uses:
            if isinstance(load := use.owner.opview, llvm.LoadOp):
                size = llvm.ArrayType(load.result.type).num_elements
                load.result.set_type(llvm.ArrayType.get(ir.IntegerType.get_signless(64), size // 8))

    # JAX calls these when it knows how many there are.
    if (calls := getattr(getattr(launch, "scratch", None), "host_init", None)) is not None:
        calls.append(pass_words)


def launch_kernel(body, arrays, *, name, grid, warpgroups, scratch_types, out_type=(), in_place=0, between_warps=True,
                  lanes=False, barriers=False):
    """Run a kernel on arrays (None: left out).

    ``grid``: its sizes; programs side by side differ in the last index. ``body(indices, warpgroup, *references)``.
    ``between_warps``: there are sums over values of several warps, which go through shared memory.
    ``lanes``: all layouts are said: no search for them, which takes minutes where kernels are large.
    ``barriers``: warps meet wherever the compiler thinks that they must.
    ``in_place``: so many of the arrays, the last, are changed in place; they are the results.
    """
    arrays = [x for x in arrays if x is not None]

    def program(*refs):
        _descriptors_in_words()
        # One axis of CUDA's: the others end at 65,535.
        rest, indices = lax.axis_index(axis_of("program")), list[Any]()
        for size in reversed(grid):
            indices.insert(0, lax.rem(rest, size))
            rest = lax.div(rest, size)
        body(indices, lax.axis_index(axis_of("warpgroup")), *refs)

    kernel = plgpu.kernel(
        program, out_type=out_type, scratch_types=scratch_types, kernel_name=f"linear_attention_{name}",
        grid=(math.prod(grid),), grid_names=(axis_of("program"),),
        num_threads=warpgroups, thread_name=axis_of("warpgroup"),
        # Else no barriers of the compiler's own: each place where one warp may not overtake another says so.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not barriers,
            **({} if between_warps else dict(reduction_scratch_bytes=0)),
            **(dict(lowering_semantics=plgpu.LoweringSemantics.Lane) if lanes else {}),
        ),
    )

    def run(*arrays):
        if not in_place:
            return kernel(*arrays)
        given, changed = arrays[:-in_place], arrays[-in_place:]
        return run_state(lambda refs: kernel(*given, *refs))(changed)

    # Inside shard_map, types say over which axes of the mesh a value varies. Accumulators lose that, and then the
    # loops' types do not match: the kernel is traced for plain arrays.
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    results = jaxpr_as_fun(jax.make_jaxpr(run)(*plain))(*arrays)
    axes = frozenset().union(*map(varying, arrays))
    return [vary(x, axes) for x in results]


class Names:
    """References by name: those of a kernel's arrays, outputs and scratch space, in that order; None: left out."""

    def __init__(self, refs, *groups):
        rest = iter(refs)
        for group in groups:
            for name, value in group.items():
                setattr(self, name, None if value is None else next(rest))
