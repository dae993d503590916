"""Requirements of Gluon kernels: devices, dtypes, versions of Triton; and names that changed between versions."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable
from typing import Any, dataclass_transform

import triton

from keraunos import frontends
from keraunos.ops.family import HOPPER
from keraunos.ops.invocation import Invocation

if ".".join(triton.__version__.split(".")[:2]) not in (KNOWN := ("3.6", "3.7", "3.8", "3.9")):
    raise ImportError(f"knows Triton {', '.join(KNOWN)}; this is {triton.__version__}", name="triton")

from triton._C.libtriton.ir import DESCRIPTOR_REDUCE_KIND
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate, base_value

# The versions that a GPU has run.
RUN = ("3.6",)

# The newer name first: the older one may be left, and fail.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_of_threads = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@builtin
def _add_out(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


# A copy out that adds to what is there.
add_out = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _add_out


# Whether a view of shared memory must have all of it.
_WHOLE = not triton.__version__.startswith(("3.6", "3.7"))


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Shared memory, or the first part of it, with another dtype, shape and layout.

    Where an axis in front has no place in the layout, it may be longer than asked for.
    """
    view = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    if _WHOLE:
        shape, kind, of = [gl.constexpr(x).value for x in shape], gl.constexpr(dtype).value, gl.constexpr(layout).value
        bits = math.prod(shape) * kind.primitive_bitwidth
        parts = math.prod(memory.shape) * memory.dtype.primitive_bitwidth // bits
        if parts > 1 and (of.rank if hasattr(of, "rank") else len(of.order)) == len(shape):
            return view(dtype, [parts, *shape], layout, _semantic=_semantic).index(0, _semantic=_semantic)
        shape[0] *= parts
    return view(dtype, shape, layout, _semantic=_semantic)


def lengths(arrays: Iterable[str], *others: str) -> list[str]:
    """The numbers of a kernel that no build depends on: the strides of arrays of tokens, by name, and others."""
    return [f"stride_{array}{axis}" for array in arrays for axis in "bth"] + [*others]


@dataclass_transform(eq_default=False)
def aggregate(cls: type) -> Any:
    """A class whose annotated fields are values of a kernel, which is made of them in their order or by name.

    Fields of ``gl.constexpr`` may be anything that is known at compile time. Triton 3.6 and 3.7 have this under a
    private name, and neither make constructors nor read annotations that are text: it is done here for all versions.

    Raises:
        TypeError: when an object is made, for a value that is too many or missing, or is not of its field's type.
    """
    fields = inspect.get_annotations(cls, eval_str=True)
    signature = inspect.Signature([inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in fields])

    def init(self: Any, *values: Any, **named: Any) -> None:
        for name, x in signature.bind(*values, **named).arguments.items():
            setattr(self, name, x if isinstance(x, base_value) else gl.constexpr(x))

    # The text of a kernel has its arguments: a build need not know this function's own text.
    init.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__annotations__, cls.__init__ = fields, init  # type: ignore[misc]
    made = _aggregate(cls)
    made.__annotations__, made.__signature__ = fields, signature
    return made


def cannot_run(inv: Invocation) -> str | None:
    """Why no kernel in Gluon can run the call, or None."""
    name, pattern = HOPPER
    if inv.backend != "gpu" or not re.search(pattern, inv.device):
        return f"needs {name}; the call's arrays are on {inv.device}"
    if reason := frontends.cannot_launch(inv.framework, gluon=True):
        return reason
    dtype = inv.arrays["query"][0]
    if dtype not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, whose products the tensor cores do; the call has {dtype}"
    return None


def was_not_measured() -> str | None:
    """Why ``"auto"`` should take no kernel in Gluon here, or None."""
    return None if triton.__version__.startswith(RUN) else f"was measured with Triton {', '.join(RUN)}"
