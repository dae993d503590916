"""PyTorch: launching Pallas Mosaic GPU kernels. JAX translates them and has no part in a call; it need not see a GPU.

``plgpu.as_torch_kernel`` launches on the default stream, whatever the current one is, and takes strides for granted;
its translation for every call costs tens of microseconds. Here the compiled kernel that it would launch is kept, and
launched on the current stream.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
import threading
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.extend.mlir import ir

from keraunos.frontends.torch import _DTYPES, dtype_name
from keraunos.frontends.torch_launch import recorded

try:
    from jax.experimental.mosaic.gpu.core import _compile_as_torch_gpu_kernel as _build
except ImportError as _error:
    raise ImportError(f"jax {jax.__version__} has no known way to hand its kernels to PyTorch", name="jax") from _error


def unsupported() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    if any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return None
    return "needs JAX's compiler for NVIDIA GPUs (pip install 'jax[cuda13]')"


def launch(fn: Callable, arrays: dict[str, Any], static: dict[str, Any]) -> Any:
    """What ``fn(**arrays, **static)`` gives in JAX, for tensors.

    A tensor that is not contiguous, or not aligned to 16 bytes as the bulk copies want it, is copied first.

    Args:
        fn: a function of JAX that is one launch of a kernel.
        arrays: trees of tensors.
        static: compile-time values; hashable.
    """
    leaves, structure = jax.tree.flatten(arrays)
    leaves = [_plain(x) for x in leaves]
    kinds = tuple((tuple(x.shape), dtype_name(x)) for x in leaves)
    program = _program(fn, structure, kinds, tuple(static.items()), leaves[0].device)
    return jax.tree.unflatten(program.structure, recorded(program, leaves, program.outputs))


def _plain(x: torch.Tensor) -> torch.Tensor:
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _Program:
    """A compiled kernel: called with addresses or tensors, inputs then outputs, it launches on the current stream."""

    def __init__(self, fn, structure, kinds, static, device):
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
        traced = jax.jit(lambda *leaves: fn(**jax.tree.unflatten(structure, leaves), **dict(static))).trace(*structs)
        outputs, self.structure = jax.tree.flatten(traced.out_info)
        self.outputs = [(tuple(x.shape), _DTYPES[x.dtype.name]) for x in outputs]
        module = _module(traced.lower(lowering_platforms=("cuda",)).compiler_ir(), len(kinds), len(outputs))
        with torch.cuda.device(device):
            start, unload = _build(module)
        found = inspect.getclosurevars(start).nonlocals
        self.start, self.function, self.unload = found["launch_c"], found["function"], unload
        self.addresses = ctypes.c_void_p * (len(kinds) + len(outputs))

    def __call__(self, *arrays: Any) -> None:
        given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arrays]
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        self.start(self.function, stream, self.addresses(*given))


def _module(lowered: Any, inputs: int, outputs: int) -> bytes:
    """The kernel in a module of JAX, all that it may do: arguments in, results out, in their order."""
    [main] = lowered.body.operations
    [block] = main.regions[0].blocks
    call, end = block.operations
    if (
        call.attributes["call_target_name"].value != "mosaic_gpu_v2"
        or list(call.operands) != list(block.arguments)
        or list(end.operands) != list(call.results)
        or (len(call.operands), len(call.results)) != (inputs, outputs)
    ):
        raise NotImplementedError(f"no single launch of a kernel: {lowered}")
    kernel: Any = ir.DictAttr(call.attributes["mhlo.backend_config"])["module"]
    return kernel.value_bytes


_lock = threading.Lock()


@functools.lru_cache(maxsize=4096)
def _made(*key: Any) -> _Program:
    return _Program(*key)


def _program(*key: Any) -> _Program:
    # Two threads that need the same kernel compile it once.
    with _lock:
        return _made(*key)
