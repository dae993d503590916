"""Make Triton's interpreter right for bf16 products, which it computes on the raw 16-bit integers.

A pytest plugin. KERAUNOS_TEST_SEGMENT cuts every sequence into segments of that many tokens, which the choice by size
would not do for sequences as short as the interpreter can take.
"""

import os

import numpy as np
import triton.runtime.interpreter as interpreter

_DOT = interpreter.InterpreterBuilder.create_dot


def _widened(x):
    """The operand in float32 if it is bf16: its bits are the upper half of a float32's."""
    if x.dtype.scalar.is_bf16():
        import triton.language as tl

        data = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)
    return x


def _dot(self, a, b, d, *rest):
    return _DOT(self, _widened(a), _widened(b), d, *rest)


interpreter.InterpreterBuilder.create_dot = _dot

if os.environ.get("KERAUNOS_TEST_SEGMENT"):
    from keraunos.kernels.linear_attention import triton as platform

    platform.segment_length = lambda T, programs, BT: max(int(os.environ["KERAUNOS_TEST_SEGMENT"]), BT)
