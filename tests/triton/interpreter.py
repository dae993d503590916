"""Make Triton's interpreter right for bf16: it multiplies the raw 16-bit integers, and casts by cutting bits off.

And make it several times as fast, by leaving out what it does again with every operation or call of a function.

A pytest plugin. KERAUNOS_TEST_SEGMENT cuts sequences into segments of that many tokens (or of two pieces of a chunk,
if that is longer), which the choice by size would not do for sequences as short as the interpreter can take. Nor would
it make the gradients of gates in parts, of as little as a chunk each or of some of the sequences: KERAUNOS_TEST_PARTS,
and where that cuts into segments, too, of pairs of them.
"""

import dataclasses
import functools
import os

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

from tests.triton.quick import QUICK

_CONVERT = interpreter._convert_float


def _convert(x, source, target, rounding):
    """Casts from float32 to bf16 round to nearest even, like the GPU's."""
    if not (source.is_fp32() and target.is_bf16()):
        return _CONVERT(x, source, target, rounding)
    bits = x.view(np.uint32)
    rounded = np.where(np.isnan(x), bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
    return (rounded >> 16).astype(np.uint16)


def _patch_lang(fn):
    """For a function that another one calls, the language is the interpreter's already."""
    if not any(tl.core.is_builtin(module.load) for module in _languages(fn)):
        return interpreter._LangPatchScope()
    return _PATCH_LANG(fn)


@functools.cache
def _languages(fn):
    return [x for x in fn.__globals__.values() if x is tl or x is tl.core]


def _np_dtype(x):
    return np.dtype(np.uint64) if x.scalar.is_ptr() else _NP_DTYPE(x.scalar)


def _patch_attr(obj, name, member, builder, scope):
    """A function of the language without the one around it, which only refuses calls from elsewhere."""
    semantic = interpreter.TritonSemantic(builder)
    fn = member.__wrapped__ if getattr(member, "__code__", None) is _CHECKED else member

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return fn(*args, **kwargs)

    quick = QUICK.get((obj, name))
    scope.set_attr(obj, name, quick(call) if quick else call)


def _tuple(self, args, type=None):
    """The type is made when it is asked for: every value has tuples of sizes, whose types hardly anybody reads."""
    self.values = list(args)
    self._type = type if type is None or isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


def _type(self):
    return self._type or tl.core._type_for_tuple_values(self.values)


def _constexpr(self, value):
    """Likewise."""
    self.value = value.value if isinstance(value, tl.constexpr) else value


def _block_type(cls, element, shape, *layout):
    """There is one of each, which also has what tensors of it are asked for; but for those of Gluon's."""
    if layout:
        return object.__new__(cls)
    key = id(element), *[n.value if isinstance(n, tl.constexpr) else n for n in shape]
    if (known := _BLOCK_TYPES.get(key)) is None:
        # It holds the element's type, so that no other gets that id.
        known = _BLOCK_TYPES[key] = object.__new__(cls)
        _BLOCK_TYPE(known, element, shape)
        known.sizes = tl.core.tuple([tl.constexpr(n) for n in known.shape]), tl.constexpr(known.numel)
    return known


def _tensor(self, handle, type):
    if type.is_block() and type.__class__ is not tl.block_type:
        return _TENSOR(self, handle, type)
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.sizes if type.is_block() else _NO_SIZES


def _broadcast(self, a, b):
    """Most operands have the same shape."""
    x, y = a.type, b.type
    if x is y or (x.is_block() and y.is_block() and x.shape.values == y.shape.values):
        return a, b
    return _BROADCAST(self, a, b)


def _to_tensor(self, x, *rest):
    """A number divided by a tensor is a constant here, which holds a tensor: Triton 3.8 refuses that."""
    return _TO_TENSOR(self, _unwrap(x), *rest)


def _unwrap(x):
    return x.value if x.__class__ is tl.constexpr else x if x.__class__ in _BARE else _UNWRAP(x)


interpreter._convert_float = _convert
interpreter._patch_lang, _PATCH_LANG = _patch_lang, interpreter._patch_lang
interpreter._get_np_dtype, _NP_DTYPE = _np_dtype, functools.cache(interpreter._get_np_dtype)
interpreter._patch_attr, _CHECKED = _patch_attr, tl.load.__code__
tl.core.tuple.__init__, tl.core.tuple.type = _tuple, property(_type)
tl.constexpr.__init__, tl.constexpr.type = _constexpr, property(lambda self: tl.core.constexpr_type(self.value))
_BLOCK_TYPES, _NO_SIZES, _BARE = {}, (tl.core.tuple([]), tl.constexpr(1)), (int, tl.dtype)
_BLOCK_TYPE = tl.block_type.__init__
tl.block_type.__init__ = lambda self, *given: None if self.__class__ is tl.block_type else _BLOCK_TYPE(self, *given)
tl.block_type.__new__ = staticmethod(_block_type)
tl.tensor.__init__, _TENSOR = _tensor, tl.tensor.__init__
tl.dtype.__eq__, _EQUAL = lambda self, other: self is other or _EQUAL(self, other), tl.dtype.__eq__
tl.core._unwrap_if_constexpr, _UNWRAP = _unwrap, tl.core._unwrap_if_constexpr
semantic = interpreter.TritonSemantic
semantic.broadcast_impl_value, _BROADCAST = _broadcast, semantic.broadcast_impl_value
semantic.to_tensor, _TO_TENSOR = _to_tensor, semantic.to_tensor
# No index of arrays as small as these overflows.
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

from keraunos.frontends import interpreter as ours  # noqa: E402
from keraunos.kernels.linear_attention.triton import call as triton_call  # noqa: E402

ours.is_right = True

if os.environ.get("KERAUNOS_TEST_SEGMENT"):
    triton_call._MIN_SEGMENT = int(os.environ["KERAUNOS_TEST_SEGMENT"]) // 2
    triton_call._MIN_PIECE = triton_call._MIN_SEGMENT // 2
if os.environ.get("KERAUNOS_TEST_PARTS"):
    triton_call._PARTS, triton_call._MIN_PART, triton_call._PROGRAMS = 3, 1, 4
    triton_call._SEGMENT_PARTS, triton_call._MIN_SEGMENT_PART = 3, 1
    if os.environ.get("KERAUNOS_TEST_SEGMENT"):
        triton_call._PROGRAMS, triton_call._SEGMENT_PARTS, triton_call._HALF_TILE = 128, 6, 16
