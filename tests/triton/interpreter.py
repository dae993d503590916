"""Make Triton's interpreter right for bf16: it multiplies the raw 16-bit integers, and casts by cutting bits off.

And make it three times as fast, by leaving out what it does again with every operation or call of a function.

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

_DOT = interpreter.InterpreterBuilder.create_dot
_CONVERT = interpreter._convert_float


def _widened(x):
    """The operand in float32 if it is bf16: its bits are the upper half of a float32's."""
    if x.dtype.scalar.is_bf16():
        data = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)
    return x


def _dot(self, a, b, d, *rest):
    return _DOT(self, _widened(a), _widened(b), d, *rest)


def _convert(x, source, target, rounding):
    """Casts from float32 to bf16 round to nearest even, like the GPU's."""
    if not (source.is_fp32() and target.is_bf16()):
        return _CONVERT(x, source, target, rounding)
    bits = np.frombuffer(x.tobytes(), np.uint32).astype(np.uint64).reshape(x.shape)
    rounded = np.where(np.isnan(x), bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
    return (rounded >> 16).astype(np.uint16)


def _patch_lang(fn):
    """For a function that another one calls, the language is the interpreter's already."""
    modules = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
    if not any(tl.core.is_builtin(module.load) for module in modules):
        return interpreter._LangPatchScope()
    return _PATCH_LANG(fn)


def _np_dtype(x):
    return np.dtype(np.uint64) if x.scalar.is_ptr() else _NP_DTYPE(x.scalar)


def _tuple(self, args, type=None):
    """The type is made when it is asked for: every value has tuples of sizes, whose types hardly anybody reads."""
    self.values = list(args)
    self._type = type if type is None or isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


def _type(self):
    return self._type or tl.core._type_for_tuple_values(self.values)


interpreter.InterpreterBuilder.create_dot = _dot
interpreter._convert_float = _convert
interpreter._patch_lang, _PATCH_LANG = _patch_lang, interpreter._patch_lang
interpreter._get_np_dtype, _NP_DTYPE = _np_dtype, functools.cache(interpreter._get_np_dtype)
tl.core.tuple.__init__, tl.core.tuple.type = _tuple, property(_type)
# No index of arrays as small as these overflows.
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

from keraunos.kernels.linear_attention import triton_call  # noqa: E402

if os.environ.get("KERAUNOS_TEST_SEGMENT"):
    triton_call._MIN_SEGMENT = int(os.environ["KERAUNOS_TEST_SEGMENT"]) // 2
    triton_call._MIN_PIECE = triton_call._MIN_SEGMENT // 2
if os.environ.get("KERAUNOS_TEST_PARTS"):
    triton_call._PARTS, triton_call._MIN_PART, triton_call._PROGRAMS = 3, 1, 4
    triton_call._SEGMENT_PARTS, triton_call._MIN_SEGMENT_PART = 3, 1
    if os.environ.get("KERAUNOS_TEST_SEGMENT"):
        triton_call._PROGRAMS, triton_call._SEGMENT_PARTS, triton_call._HALF_TILE = 128, 6, 16
