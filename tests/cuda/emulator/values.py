"""Registers: tensors and run-time scalars as NumPy arrays, with Triton's rules for types."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
from triton.experimental.gluon import language as gl
from triton.language.semantic import TritonSemantic

from . import layouts, machine
from .errors import CompileError, UnsupportedError

NUMPY = {
    gl.int1: np.dtype(bool),
    gl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    **{
        getattr(gl, name): np.dtype(name)
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
                     "float64")
    },
}
TRITON = {numpy: triton for triton, numpy in NUMPY.items()}
_NAMED = {dtype.name: numpy for dtype, numpy in NUMPY.items()}  # Triton's types take long to compare.
_RULES = object.__new__(TritonSemantic)


def numpy_type(dtype) -> np.dtype:
    found = _NAMED.get(dtype.name)
    if found is None:
        raise UnsupportedError(f"the emulator has no {dtype}")
    return found


@functools.cache
def promoted(a, a_is_number: bool, b, b_is_number: bool, divides: bool):
    try:
        return _RULES.computation_type_impl(a, a_is_number, b, b_is_number, divides)
    except TypeError as error:
        raise CompileError(str(error)) from error


def number_type(x):
    """The type that a compile-time number has where it meets a tensor."""
    if isinstance(x, bool):
        return gl.int1
    if isinstance(x, int):
        for dtype in (gl.int32, gl.uint32, gl.int64, gl.uint64):
            if dtype.get_int_min_value() <= x <= dtype.get_int_max_value():
                return dtype
    if isinstance(x, float):
        size = abs(x)
        return gl.float64 if 0 < size < 2**-126 or 3.5e38 < size < float("inf") else gl.float32
    raise CompileError(f"{x!r} of type {type(x).__name__} where a tensor or a number is needed")


def convert(data, dtype) -> np.ndarray:
    """The numbers in another type: to the nearest even, and fractions of integers are cut off."""
    wanted = numpy_type(dtype)
    if isinstance(data, np.ndarray) and data.dtype == wanted:
        return data
    data = np.asarray(data)
    if wanted == np.bool_:
        return data != 0
    return data.astype(wanted)


def poison(dtype):
    """The values of registers and memory that nothing wrote."""
    kind = numpy_type(dtype)
    if kind == np.bool_:
        return True
    return np.nan if dtype.is_floating() else np.iinfo(kind).max - 1000


class Tensor:
    """A tensor or, without dimensions, a run-time scalar. Pointers are offsets in elements into a piece of memory."""

    __slots__ = ("data", "dtype", "layout", "memory")

    def __init__(self, data, dtype, layout=None, memory=None):
        self.data, self.dtype, self.layout, self.memory = data, dtype, layout, memory

    def __repr__(self):
        return f"<{self.dtype} {self.data.shape}>"

    @property
    def shape(self):
        return self.data.shape

    @property
    def numel(self):
        return self.data.size

    @property
    def type(self):
        return gl.distributed_type(self.dtype, list(self.shape), self.layout) if self.data.ndim else self.dtype

    def __bool__(self):
        if self.data.ndim:
            raise CompileError("a tensor as a condition: only scalars have one truth value (use & and | on tensors)")
        return bool(self.data)

    def __iter__(self):
        raise CompileError("a tensor cannot be unpacked")

    def __getitem__(self, index):
        result = self
        for axis, item in enumerate(index if isinstance(index, tuple) else (index,)):
            if item is None:
                result = expand(result, axis)
            elif not (isinstance(item, slice) and item == slice(None)):
                raise CompileError(f"a tensor is indexed by None and : only, not by {item!r}")
        return result

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        if fp_downcast_rounding not in (None, "rtne"):
            raise UnsupportedError(f"rounding {fp_downcast_rounding!r}")
        if self.memory is not None or dtype.is_ptr():
            raise UnsupportedError("the emulator casts no pointers")
        if bitcast:
            if numpy_type(dtype).itemsize != self.data.dtype.itemsize:
                raise CompileError(f"bitcast of {self.dtype} to {dtype}: sizes differ")
            return Tensor(self.data.view(numpy_type(dtype)), dtype, self.layout)
        return self if dtype == self.dtype else Tensor(convert(self.data, dtype), dtype, self.layout)

    def __add__(self, other):
        return plus(self, other)

    def __radd__(self, other):
        return plus(other, self)

    def __sub__(self, other):
        if self.memory is not None:
            return plus(self, -tensor(other))
        return binary(np.subtract, self, other)

    def __neg__(self):
        return Tensor(convert(-self.data, self.dtype), self.dtype, self.layout)

    def __invert__(self):
        if not self.dtype.is_int():
            raise CompileError(f"~ of {self.dtype}")
        return Tensor(~self.data, self.dtype, self.layout)

    def logical_not(self):
        return self == 0


def plus(a, b) -> Tensor:
    """A sum, of which one may be a pointer."""
    if isinstance(b, Tensor) and b.memory is not None:
        a, b = b, a
    if not (isinstance(a, Tensor) and a.memory is not None):
        return binary(np.add, a, b)
    b = tensor(b)
    if b.memory is not None or not b.dtype.is_int():
        raise CompileError(f"a pointer and {b.dtype} cannot be added")
    layout = layouts.same(a.layout, b.layout) if a.data.ndim and b.data.ndim else a.layout or b.layout
    return Tensor(np.add(a.data, b.data, dtype=np.int64), a.dtype, layout, a.memory)


def tensor(x) -> Tensor:
    """A tensor; a number becomes a scalar."""
    if isinstance(x, Tensor):
        return x
    if not isinstance(x, (bool, int, float)) and hasattr(x, "refuse"):
        x.refuse()
    dtype = number_type(x)
    return Tensor(np.asarray(x, numpy_type(dtype)), dtype)


def concrete(x, what: str) -> int:
    """A run-time or compile-time integer as Python's."""
    x = tensor(x)
    if x.data.ndim or not x.dtype.is_int():
        raise CompileError(f"{what} must be an integer scalar, not {x!r}")
    return int(x.data)


def static(x, what: str):
    """A number that must be known at compile time."""
    if isinstance(x, Tensor):
        raise CompileError(f"{what} must be known at compile time (gl.constexpr)")
    return x


def meet(a, b, *, divides=False) -> tuple[np.ndarray, np.ndarray, object, object]:
    """Two operands in their common type and layout: both arrays, type, layout."""
    a_is_number, b_is_number = not isinstance(a, Tensor), not isinstance(b, Tensor)
    a, b = tensor(a), tensor(b)
    if a.memory is not None or b.memory is not None:
        raise CompileError("pointers take additions of integers only")
    dtype = promoted(a.dtype, a_is_number, b.dtype, b_is_number, divides)
    if dtype.is_int() and (a_is_number or b_is_number):
        value = int((a if a_is_number else b).data)
        if not dtype.get_int_min_value() <= value <= dtype.get_int_max_value():
            raise CompileError(f"{value} is out of range for {dtype}")
    layout = a.layout or b.layout
    if a.data.ndim and b.data.ndim:
        layout = layouts.same(a.layout, b.layout)
        if len(a.shape) != len(b.shape) or any(
            m != n and 1 not in (m, n) for m, n in zip(a.shape, b.shape, strict=True)
        ):
            raise CompileError(f"shapes of operands do not fit: {a.shape} and {b.shape}")
    return convert(a.data, dtype), convert(b.data, dtype), dtype, layout


def binary(function, a, b) -> Tensor:
    """Arithmetic in the operands' common type. Signed integers that leave their type's range raise."""
    x, y, dtype, layout = meet(a, b)
    if dtype.is_int_signed() and dtype.int_bitwidth in (8, 16, 32):
        wide = np.asarray(function(x.astype(np.int64), y.astype(np.int64)))
        data = wide.astype(x.dtype)
        if (wide != data).any():
            raise OverflowError(f"{dtype} overflows in {function.__name__} at {machine.here().place()}")
        return Tensor(data, dtype, layout)
    return Tensor(np.asarray(function(x, y), x.dtype), dtype, layout)


def integers(function, a, b) -> Tensor:
    x, y, dtype, layout = meet(a, b)
    if not dtype.is_int():
        raise CompileError(f"{function.__name__} of {dtype}")
    return Tensor(np.asarray(function(x, y), x.dtype), dtype, layout)


def compare(function, a, b) -> Tensor:
    x, y, _, layout = meet(a, b)
    return Tensor(np.asarray(function(x, y)), gl.int1, layout)


def divide(a, b) -> Tensor:
    x, y, dtype, layout = meet(a, b, divides=True)
    if dtype.is_int():
        dtype = gl.float32
        x, y = convert(x, dtype), convert(y, dtype)
    return Tensor(np.asarray(x / y), dtype, layout)


def _quotient(x, y):
    if (y == 0).any():
        raise ZeroDivisionError(f"integer division by 0 at {machine.here().place()}")
    down = x // y
    return down + ((down < 0) & (down * y != x))


def floor_divide(a, b) -> Tensor:
    x, y, dtype, layout = meet(a, b, divides=True)
    if not dtype.is_int():
        raise CompileError(f"// of {dtype}")
    return Tensor(np.asarray(_quotient(x, y), x.dtype), dtype, layout)


def remainder(a, b) -> Tensor:
    x, y, dtype, layout = meet(a, b, divides=True)
    data = x - _quotient(x, y) * y if dtype.is_int() else np.fmod(x, y)
    return Tensor(np.asarray(data, x.dtype), dtype, layout)


def _both_ways(name, act, *, reflected=True):
    setattr(Tensor, f"__{name}__", lambda self, other: act(self, other))
    if reflected:
        setattr(Tensor, f"__r{name}__", lambda self, other: act(other, self))


_both_ways("mul", functools.partial(binary, np.multiply))
_both_ways("truediv", divide)
_both_ways("floordiv", floor_divide)
_both_ways("mod", remainder)
for _name, _function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
    _both_ways(_name, functools.partial(integers, _function))
_both_ways("lshift", functools.partial(integers, np.left_shift))
_both_ways("rshift", functools.partial(integers, np.right_shift))
Tensor.__rsub__ = lambda self, other: binary(np.subtract, other, self)
for _name, _function in (
    ("lt", np.less), ("le", np.less_equal), ("gt", np.greater), ("ge", np.greater_equal), ("eq", np.equal),
    ("ne", np.not_equal),
):
    _both_ways(_name, functools.partial(compare, _function), reflected=False)
Tensor.__hash__ = None


def expand(x, axis: int) -> Tensor:
    """One more dimension, which the layout must have been sliced along."""
    x = tensor(x)
    axis = axis + x.data.ndim + 1 if axis < 0 else axis
    layout = x.layout
    if isinstance(layout, gl.SliceLayout):
        if layout.dim != axis:
            raise CompileError(f"a dimension {axis} cannot be added to a layout sliced along {layout.dim}")
        layout = layout.parent
    elif not isinstance(layout, gl.AutoLayout):
        raise CompileError(f"a dimension is added only to a sliced layout, not to {layout}")
    return Tensor(np.expand_dims(x.data, axis), x.dtype, layout, x.memory)


def made(data, dtype, layout, memory=None) -> Tensor:
    """A new tensor in a layout that the kernel names, which must fit the partition."""
    if data.ndim:
        layouts.check(layout, data.shape, machine.here().current.warps)
    return Tensor(data, dtype, layout, memory)


def scalar(x, dtype) -> Tensor:
    return Tensor(np.asarray(x, numpy_type(dtype)), dtype)
