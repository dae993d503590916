"""Make Triton's interpreter right for bf16: it multiplies the raw 16-bit integers, and casts by cutting bits off.

A pytest plugin. KERAUNOS_TEST_SEGMENT cuts sequences into segments of that many tokens (or of two pieces of a chunk,
if that is longer), which the choice by size would not do for sequences as short as the interpreter can take. Nor would
it make the gradients of gates in parts, of as little as a chunk each or of some of the sequences: KERAUNOS_TEST_PARTS.
"""

import os

import numpy as np
import triton.runtime.interpreter as interpreter

_DOT = interpreter.InterpreterBuilder.create_dot
_CONVERT = interpreter._convert_float


def _widened(x):
    """The operand in float32 if it is bf16: its bits are the upper half of a float32's."""
    if x.dtype.scalar.is_bf16():
        import triton.language as tl

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


interpreter.InterpreterBuilder.create_dot = _dot
interpreter._convert_float = _convert

from keraunos.kernels.linear_attention import triton_call  # noqa: E402

if os.environ.get("KERAUNOS_TEST_SEGMENT"):
    triton_call._MIN_SEGMENT = int(os.environ["KERAUNOS_TEST_SEGMENT"]) // 2
    triton_call._MIN_PIECE = triton_call._MIN_SEGMENT // 2
if os.environ.get("KERAUNOS_TEST_PARTS"):
    triton_call._PARTS, triton_call._MIN_PART, triton_call._PROGRAMS = 3, 1, 4
    triton_call._SEGMENT_PARTS, triton_call._MIN_SEGMENT_PART = 3, 1
