"""Frequent operations of Triton's interpreter in a few steps of NumPy: operations on values of one type, loads, casts.

Each of ``QUICK`` makes of the interpreter's own function, which it falls back to, one that gives the same.
"""

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

_WHOLE = (tl.int32, tl.int64)
_NUMBERS = (tl.float32, *_WHOLE)
_BITS = (*_WHOLE, tl.int1)
# Casts that NumPy does alike; and of the bits.
_CASTS = {("int32", "int64"), ("int64", "int32"), ("int32", "fp32"), ("int1", "int32"), ("int1", "fp32")}
_BITCASTS = {("fp32", "int32"), ("int32", "fp32")}
# A scalar is an array of one element, and so may a block be. By type and sizes: the type of blocks.
_ONE, _BLOCKS = (1,), {}


def _tensor(data, dtype, *like):
    """A tensor of this dtype: a block, where any of those that it is made of is one, or a scalar."""
    handle, shape = object.__new__(interpreter.TensorHandle), data.shape
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    if shape == _ONE and not any(x.__class__ is tl.tensor and x.type.is_block() for x in like):
        return tl.tensor(handle, dtype)
    if (kind := _BLOCKS.get((id(dtype), shape))) is None:
        # It holds the dtype, so that no other gets that id.
        kind = _BLOCKS[id(dtype), shape] = tl.block_type(dtype, list(shape))
    return tl.tensor(handle, kind)


def _value(x):
    return x.value if x.__class__ is tl.constexpr else x


def _common(a, b, kinds):
    """The dtype in which both are operands as they are; b may be a number. None: there is none."""
    kind = a.dtype
    if kind not in kinds:
        return None
    if b.__class__ is tl.tensor:
        return kind if b.dtype is kind else tl.int64 if kind in _WHOLE and b.dtype in _WHOLE else None
    if b.__class__ is float:
        return kind if kind is tl.float32 else None
    return kind if b.__class__ is int and -(2**31) <= b < 2**31 and kind is not tl.int1 else None


def _operation(apply, kinds=_NUMBERS, truth=False):
    """One on two values; truth: it says whether something is so."""

    def quick(slow):
        def call(a, b, **options):
            other = _value(b)
            if a.__class__ is not tl.tensor or options or (kind := _common(a, other, kinds)) is None:
                return slow(a, b, **options)
            data = apply(a.handle.data, other.handle.data if other.__class__ is tl.tensor else other)
            return _tensor(data, tl.int1 if truth else kind, a, other)

        return call

    return quick


def _function(apply):
    """One of float32 values, or of some and numbers."""

    def quick(slow):
        def call(*given):
            given = [_value(x) for x in given]
            if any(x.__class__ is tl.tensor and x.dtype is not tl.float32 for x in given):
                return slow(*given)
            data = apply(*[x.handle.data if x.__class__ is tl.tensor else np.float32(x) for x in given])
            return _tensor(data, tl.float32, *given)

        return call

    return quick


def _add(slow):
    values = _operation(np.add)(slow)

    def call(a, b):
        kind = a.dtype
        if not kind.is_ptr() or b.__class__ is not tl.tensor or b.dtype not in _WHOLE:
            return values(a, b)
        size = max(1, kind.element_ty.primitive_bitwidth // 8)
        return _tensor(a.handle.data + size * b.handle.data.astype(np.uint64), kind, a, b)

    return call


def _expand(slow):
    def call(x, key):
        whole = slice(None)
        plain = key.__class__ is tuple and all(k is None or (k.__class__ is slice and k == whole) for k in key)
        return _tensor(x.handle.data[key], x.dtype, x) if plain and x.type.is_block() else slow(x, key)

    return call


def _floats(x):
    """The values of a float32, bf16 or fp16 in float32; bf16 is the upper half of that."""
    data = x.handle.data
    if x.dtype is tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data if x.dtype is tl.float32 else data.astype(np.float32)


def _cast(slow):
    def call(x, dtype, **options):
        dtype = _value(dtype)
        if options == {"bitcast": True} and (x.dtype.name, dtype.name) in _BITCASTS:
            return _tensor(x.handle.data.view(interpreter._get_np_dtype(dtype)), dtype, x)
        if options:
            return slow(x, dtype, **options)
        if dtype is x.dtype:
            return x
        if x.dtype is tl.float32 and dtype is tl.bfloat16:
            return _tensor(interpreter._convert_float(x.handle.data, tl.float32, dtype, None), dtype, x)
        if x.dtype is tl.bfloat16 and dtype is tl.float32:
            return _tensor(_floats(x), dtype, x)
        if (x.dtype.name, dtype.name) in _CASTS:
            return _tensor(x.handle.data.astype(interpreter._get_np_dtype(dtype)), dtype, x)
        return slow(x, dtype)

    return call


def _load(slow):
    def call(pointer, mask=None, other=None, **options):
        place, element = pointer.handle.data, pointer.dtype.element_ty
        fits = (
            not options and _value(other) == 0 and pointer.type.is_block() and element is not tl.int1
            and mask.__class__ is tl.tensor and mask.dtype is tl.int1
            and np.broadcast(place, mask.handle.data).shape == place.shape
        )
        if not fits:
            return slow(pointer, mask, other, **options)
        dtype, mask = interpreter._get_np_dtype(element), mask.handle.data
        if mask.shape != place.shape:
            mask = np.broadcast_to(mask, place.shape)
        data = interpreter._interpreter.load(place, mask, np.zeros(place.shape, dtype), dtype)
        return _tensor(data, element, pointer)

    return call


def _store(slow):
    def call(pointer, value, mask=None, **options):
        place, element = pointer.handle.data, pointer.dtype.element_ty
        fits = (
            not options and pointer.type.is_block() and element is not tl.int1
            and value.__class__ is mask.__class__ is tl.tensor and value.dtype is element and mask.dtype is tl.int1
            and place.shape == value.handle.data.shape == mask.handle.data.shape
        )
        if not fits:
            return slow(pointer, value, mask, **options)
        return interpreter._interpreter.store(place, value.handle.data, mask.handle.data)

    return call


def _dot(_):
    """Never the slow one, which multiplies the raw integers of bf16."""

    def call(a, b, acc=None, input_precision=None):
        assert a.dtype is b.dtype
        assert acc is None or acc.dtype is tl.float32
        x, y = _floats(a), _floats(b)
        if a.dtype is tl.float32:
            # NumPy's product of the transposed operands has other digits on some processors, a GPU's has not: what a
            # backward computes again is then what the forward had.
            data = np.matmul(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
        else:
            data = np.matmul(x, y)
        return _tensor(data if acc is None else data + acc.handle.data, tl.float32, a)

    return call


def _where(slow):
    def call(condition, x, y):
        a, b = _value(x), _value(y)
        first = a if a.__class__ is tl.tensor else b
        other = b if first is a else a
        if (
            condition.__class__ is first.__class__ is tl.tensor and condition.dtype is tl.int1
            and (kind := _common(first, other, _NUMBERS)) is first.dtype
        ):
            given = [v.handle.data if v.__class__ is tl.tensor else v for v in (a, b)]
            return _tensor(np.where(condition.handle.data, *given), kind, condition, a, b)
        return slow(condition, x, y)

    return call


QUICK = {
    (tl.tensor, "__add__"): _add,
    (tl.tensor, "__radd__"): _operation(np.add),
    (tl.tensor, "__sub__"): _operation(np.subtract),
    (tl.tensor, "__rsub__"): _operation(lambda a, b: np.subtract(b, a)),
    (tl.tensor, "__mul__"): _operation(np.multiply),
    (tl.tensor, "__rmul__"): _operation(np.multiply),
    (tl.tensor, "__truediv__"): _operation(np.divide, (tl.float32,)),
    (tl.tensor, "__rtruediv__"): _operation(lambda a, b: np.divide(b, a), (tl.float32,)),
    # Towards zero, as on a GPU.
    (tl.tensor, "__floordiv__"): _operation(lambda a, b: (a - np.fmod(a, b)) // b, _WHOLE),
    (tl.tensor, "__mod__"): _operation(np.fmod, _WHOLE),
    (tl.tensor, "__lt__"): _operation(np.less, truth=True),
    (tl.tensor, "__le__"): _operation(np.less_equal, truth=True),
    (tl.tensor, "__gt__"): _operation(np.greater, truth=True),
    (tl.tensor, "__ge__"): _operation(np.greater_equal, truth=True),
    (tl.tensor, "__eq__"): _operation(np.equal, truth=True),
    (tl.tensor, "__ne__"): _operation(np.not_equal, truth=True),
    (tl.tensor, "__and__"): _operation(np.bitwise_and, _BITS),
    (tl.tensor, "__or__"): _operation(np.bitwise_or, _BITS),
    (tl.tensor, "__xor__"): _operation(np.bitwise_xor, _BITS),
    (tl.tensor, "__getitem__"): _expand,
    (tl.tensor, "to"): _cast,
    (tl, "load"): _load,
    (tl, "store"): _store,
    (tl, "dot"): _dot,
    (tl, "where"): _where,
    (tl, "maximum"): _operation(np.maximum),
    (tl, "minimum"): _operation(np.minimum),
    (tl, "exp2"): _function(np.exp2),
    (tl, "floor"): _function(np.floor),
    (tl, "fma"): _function(lambda x, y, z: x * y + z),
}
