"""How values are spread over threads: what Gluon's compiler checks of a layout, and which one follows from which."""

from __future__ import annotations

import functools
import math

from triton._C.libtriton import ir
from triton._C.libtriton.gluon_ir import GluonOpBuilder
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import SharedLayout
from triton.experimental.gluon.language._layouts import DistributedLayout
from triton.experimental.gluon.language._semantic import GluonSemantic

from .errors import CompileError, UnsupportedError

AUTO = gl.AutoLayout()


@functools.cache
def check(layout, shape: tuple[int, ...], warps: int) -> None:
    """Raises if a partition of so many warps cannot hold such a tensor in this layout."""
    if not isinstance(layout, DistributedLayout):
        raise CompileError(f"a tensor's layout must be a distributed layout, not {layout!r}")
    if isinstance(layout, (gl.AutoLayout, gl.CoalescedLayout)):
        return
    if layout.rank != len(shape):
        raise CompileError(f"a layout of {layout.rank} dimensions for a tensor of shape {shape}: {layout}")
    if any(n & (n - 1) for n in shape):
        raise CompileError(f"tensor's shape {shape}: every size must be a power of two")
    while isinstance(layout, (gl.SliceLayout, gl.DotOperandLayout)):
        layout = layout.parent
    if isinstance(layout, gl.DistributedLinearLayout):
        own = 2 ** len(layout.warp_bases)
    else:
        own = math.prod(layout.warps_per_cta)
    if own != warps:
        raise CompileError(f"a layout over {own} warps in a partition of {warps}: {layout}")
    if isinstance(layout, gl.BlockedLayout) and math.prod(layout.threads_per_warp) != 32:
        raise CompileError(f"a warp has 32 threads: {layout}")


def same(a, b):
    """The layout of an operation on two tensors; raises if theirs differ."""
    if a is b or a == b or isinstance(b, gl.AutoLayout):
        return a
    if isinstance(a, gl.AutoLayout):
        return b
    raise CompileError(f"layouts of operands differ: {a} and {b}")


@functools.cache
def _compiler(warps: int) -> GluonSemantic:
    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", 90, 32)).load_dialects(context)
    builder = GluonOpBuilder(context)
    module = builder.create_module()
    module.set_attr("ttg.target", builder.get_string_attr("cuda:90"))
    for name, value in (("num-warps", warps), ("num-ctas", 1), ("threads-per-warp", 32)):
        module.set_attr(f"ttg.{name}", builder.get_int32_attr(value))
    function = builder.get_or_insert_function(module, "f", builder.get_function_ty([], []), "public", False)
    module.push_back(function)
    builder.set_insertion_point_to_start(function.add_entry_block())
    semantic = GluonSemantic(builder)
    semantic.kept = context, module, function
    return semantic


@functools.cache
def after(operation: str, layout, shape: tuple[int, ...], argument, warps: int):
    """The layout that Gluon's compiler finds for the result of reshape, permute, join or split."""
    if isinstance(layout, gl.AutoLayout):
        return layout
    compiler = _compiler(warps)
    try:
        x = compiler.full(list(shape), 0.0, gl.float32, layout)
        if operation == "reshape":
            return compiler.reshape(x, list(argument), False).type.layout
        if operation == "permute":
            return compiler.permute(x, argument).type.layout
        if operation == "join":
            return compiler.join(x, x).type.layout
        if operation == "split":
            return compiler.split(x)[0].type.layout
    except Exception as error:
        raise CompileError(f"{operation} of {shape} with {argument}: {error}") from error
    raise UnsupportedError(operation)


@functools.cache
def after_shared(operation: str, layout, dtype, shape: tuple[int, ...], argument):
    """The layout that Gluon's compiler finds for a view of shared memory."""
    compiler = _compiler(4)
    try:
        view = compiler.allocate_shared(dtype, list(shape), layout, None)
        act = {"permute": compiler.memdesc_trans, "reshape": compiler.memdesc_reshape}[operation]
        return act(view, list(argument)).layout
    except Exception as error:
        raise CompileError(f"{operation} of {shape} with {argument} in shared memory: {error}") from error


def check_shared(layout) -> None:
    if not isinstance(layout, SharedLayout):
        raise CompileError(f"shared memory's layout must be a shared layout, not {layout!r}")
