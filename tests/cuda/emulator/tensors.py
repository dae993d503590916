"""Gluon's functions on tensors: making them, their shapes, arithmetic, reductions and scans."""

from __future__ import annotations

import math

import numpy as np
from triton.experimental.gluon import language as gl

from . import layouts, machine, values
from .errors import CompileError, UnsupportedError
from .values import Tensor, convert, made, meet, static, tensor


def num_warps() -> int:
    """gl.num_warps."""
    return machine.here().current.warps


# Making tensors


def arange(start, end, layout=None):
    start, end = static(start, "start"), static(end, "end")
    return made(np.arange(start, end, dtype=np.int32), gl.int32, layout or layouts.AUTO)


def full(shape, value, dtype, layout=None):
    shape = tuple(static(n, "the shape") for n in shape)
    value = convert(tensor(value).data, dtype)
    if value.ndim:
        raise CompileError("full takes a scalar")
    return made(np.full(shape, value, value.dtype), dtype, layout or layouts.AUTO)


def zeros(shape, dtype, layout=None):
    return full(shape, 0, dtype, layout)


def full_like(input, value, shape=None, dtype=None, layout=None):
    return full(shape or input.shape, value, dtype or input.dtype, layout or input.layout)


def zeros_like(input, shape=None, dtype=None, layout=None):
    return full_like(input, 0, shape, dtype, layout)


def cast(input, dtype, fp_downcast_rounding=None, bitcast=False):
    return tensor(input).to(dtype, fp_downcast_rounding, bitcast)


# Shapes and layouts


def convert_layout(value, layout, assert_trivial=False):
    value = tensor(value)
    if not value.data.ndim:
        raise CompileError("convert_layout of a scalar")
    return made(value.data, value.dtype, layout, value.memory)


def set_auto_layout(value, layout):
    if not isinstance(tensor(value).layout, gl.AutoLayout):
        raise CompileError(f"set_auto_layout of a tensor in {value.layout}")
    return convert_layout(value, layout)


def reshape(input, *shape):
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    shape = tuple(static(n, "the shape") for n in shape)
    if math.prod(shape) != input.numel:
        raise CompileError(f"reshape of {input.shape} to {shape}")
    layout = layouts.after("reshape", input.layout, input.shape, shape, num_warps())
    return Tensor(input.data.reshape(shape), input.dtype, layout, input.memory)


def permute(input, *dims):
    dims = tuple(dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)
    layout = layouts.after("permute", input.layout, input.shape, dims, num_warps())
    return Tensor(input.data.transpose(dims), input.dtype, layout, input.memory)


def ravel(x):
    return reshape(x, (x.numel,))


def join(a, b):
    x, y, dtype, layout = meet(a, b)
    x, y = np.broadcast_arrays(x, y)
    return Tensor(np.stack([x, y], -1), dtype, layouts.after("join", layout, x.shape, None, num_warps()))


def split(a):
    if not a.shape or a.shape[-1] != 2:
        raise CompileError(f"split of {a.shape}: the last size must be 2")
    layout = layouts.after("split", a.layout, a.shape, None, num_warps())
    return Tensor(a.data[..., 0], a.dtype, layout), Tensor(a.data[..., 1], a.dtype, layout)


def broadcast(input, other):
    x, y = tensor(input), tensor(other)
    layout = layouts.same(x.layout, y.layout) if x.data.ndim and y.data.ndim else x.layout or y.layout
    a, b = np.broadcast_arrays(x.data, y.data)
    return Tensor(a, x.dtype, layout, x.memory), Tensor(b, y.dtype, layout, y.memory)


def gather(src, index, axis):
    return Tensor(np.take_along_axis(src.data, index.data, axis), src.dtype, index.layout)


# Arithmetic


def where(condition, x, y):
    condition = tensor(condition)
    if condition.dtype != gl.int1:
        condition = condition != 0
    a, b, dtype, layout = meet(x, y)
    if condition.data.ndim:
        layout = condition.layout if layout is None else layouts.same(condition.layout, layout)
        sizes = {len(shape) for shape in (condition.shape, a.shape, b.shape) if shape}
        if len(sizes) > 1:
            raise CompileError(f"where: shapes {condition.shape}, {a.shape}, {b.shape}")
    return Tensor(np.asarray(np.where(condition.data, a, b), a.dtype), dtype, layout)


def elementwise(function):
    def act(x):
        x = tensor(x)
        if x.dtype not in (gl.float32, gl.float64):
            raise CompileError(f"{function.__name__} of {x.dtype}: it takes float32 or float64")
        return Tensor(np.asarray(function(x.data), x.data.dtype), x.dtype, x.layout)

    return act


def blocks_transposed(x):
    """Each block of eight by eight of 16 bits of a warp transposed: a thread has two values of one of its rows."""
    if isinstance(x.layout, gl.NVMMADistributedLayout) and list(x.layout.version) == [2, 0]:
        rows, columns = x.shape[-2:]
        blocks = x.data.reshape(*x.shape[:-2], rows // 8, 8, columns // 8, 8).swapaxes(-3, -1)
        return Tensor(np.ascontiguousarray(blocks).reshape(x.shape), x.dtype, x.layout)
    lanes = x.layout.threads_per_warp
    if x.shape[-2] != 32 or list(lanes) != [1] * (len(lanes) - 2) + [32, 1] or x.layout.size_per_thread[-1] % 2:
        raise UnsupportedError(f"blocks are transposed of threads in the last dimension but one: {x.layout}")
    blocks = x.data.reshape(*x.shape[:-2], 8, 4, x.shape[-1] // 2, 2).swapaxes(-3, -2).swapaxes(-4, -3)
    turned = np.ascontiguousarray(blocks).reshape(*blocks.shape[:-2], 8).swapaxes(-2, -1)
    turned = np.ascontiguousarray(turned).reshape(blocks.shape).swapaxes(-4, -3).swapaxes(-3, -2)
    return Tensor(np.ascontiguousarray(turned).reshape(x.shape), x.dtype, x.layout)


def erf(x):
    return np.vectorize(math.erf, otypes=[x.dtype])(x)


def absolute(x):
    x = tensor(x)
    return Tensor(np.abs(x.data), x.dtype, x.layout)


def fma(x, y, z):
    """Rounded once for float32, as float64 holds the product exactly."""
    a, b, dtype, layout = meet(x, y)
    c, _, dtype, layout = meet(z, Tensor(a, dtype, layout))
    wide = np.float64 if dtype.is_floating() else np.int64
    return Tensor(np.asarray(a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype), dtype, layout)


def _extreme(function):
    def act(x, y, propagate_nan=None):
        if propagate_nan is not None and "ALL" in str(propagate_nan):
            keeping = np.maximum if function is np.fmax else np.minimum
            return values.binary(keeping, x, y)
        return values.binary(function, x, y)

    return act


maximum, minimum = _extreme(np.fmax), _extreme(np.fmin)


def cdiv(x, div):
    if isinstance(x, int) and isinstance(div, int):
        return -(-x // div)
    return (x + div - 1) // div


# Reductions and scans


def _axis(x, axis):
    axis = static(axis, "axis")
    if not -x.data.ndim <= axis < x.data.ndim:
        raise CompileError(f"axis {axis} of {x.shape}")
    return axis % x.data.ndim


def _reduced(x, axis, function, dtype, keep_dims):
    x = tensor(x)
    if axis is None:
        x, axis = ravel(x), 0
    axis = _axis(x, axis)
    data = np.asarray(function(convert(x.data, dtype), axis=axis), values.numpy_type(dtype))
    result = Tensor(data, dtype, _without(x.layout, axis) if data.ndim else None)
    return values.expand(result, axis) if keep_dims and data.ndim else result


def _without(layout, axis):
    return layout if isinstance(layout, gl.AutoLayout) else gl.SliceLayout(axis, layout)


def sum(input, axis=None, keep_dims=False, dtype=None):
    """In float32 for bfloat16, as Triton does it."""
    input = tensor(input)
    if dtype is None:
        dtype = input.dtype
        if dtype == gl.bfloat16:
            dtype = gl.float32
        elif dtype.is_int() and dtype.int_bitwidth < 32:
            dtype = gl.int32 if dtype.is_int_signed() else gl.uint32
    return _reduced(input, axis, np.sum, dtype, keep_dims)


def _most(function):
    def act(input, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False):
        if return_indices:
            raise UnsupportedError("the emulator gives no indices with max and min")
        input = tensor(input)
        dtype = input.dtype
        if dtype.primitive_bitwidth < 32:
            dtype = gl.float32 if dtype.is_floating() else gl.int32
        return _reduced(input, axis, function.reduce, dtype, keep_dims)

    return act


max, min = _most(np.fmax), _most(np.fmin)


def _parts(input):
    parts = input if isinstance(input, tuple) else (input,)
    return tuple(tensor(x) for x in parts)


def _combined(function, left, right):
    result = function(*left, *right)
    return result if isinstance(result, tuple) else (result,)


def _cut(parts, axis, first, last, like=None):
    key = (slice(None),) * axis + (slice(first, last),)
    return tuple(Tensor(x.data[key], x.dtype, x.layout) for x in parts)


def reduce(input, axis, combine_fn, keep_dims=False):
    """Halves are combined until one is left."""
    parts = _parts(input)
    if axis is None:
        parts, axis = tuple(ravel(x) for x in parts), 0
    axis = _axis(parts[0], axis)
    while (n := parts[0].shape[axis]) > 1:
        parts = _combined(combine_fn, _cut(parts, axis, 0, n // 2), _cut(parts, axis, n // 2, n))
    results = []
    for x in parts:
        data = x.data.squeeze(axis)
        result = Tensor(np.asarray(data), x.dtype, _without(x.layout, axis) if data.ndim else None)
        results.append(values.expand(result, axis) if keep_dims and data.ndim else result)
    return tuple(results) if isinstance(input, tuple) else results[0]


def associative_scan(input, axis, combine_fn, reverse=False):
    """Each step combines with what twice as many places before have combined."""
    parts = _parts(input)
    axis = _axis(parts[0], axis)
    flip = (lambda x: np.flip(x, axis)) if reverse else (lambda x: x)
    parts = tuple(Tensor(flip(x.data), x.dtype, x.layout) for x in parts)
    n, step = parts[0].shape[axis], 1
    while step < n:
        later = _combined(combine_fn, _cut(parts, axis, 0, n - step), _cut(parts, axis, step, n))
        first = _cut(parts, axis, 0, step)
        parts = tuple(
            Tensor(np.concatenate([x.data, y.data], axis), x.dtype, x.layout) for x, y in zip(first, later, strict=True)
        )
        step *= 2
    results = tuple(Tensor(flip(x.data), x.dtype, x.layout) for x in parts)
    return results if isinstance(input, tuple) else results[0]


# What a tensor can do by itself.
for _name, _act in (
    ("sum", sum), ("max", max), ("min", min), ("reshape", reshape), ("permute", permute), ("trans", permute),
    ("split", split), ("ravel", ravel), ("expand_dims", values.expand),
):
    setattr(Tensor, _name, _act)
Tensor.T = property(lambda self: permute(self, (1, 0)))
