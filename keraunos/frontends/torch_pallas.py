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
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.extend.mlir import ir

from keraunos.frontends.torch import _DTYPES, _constant, constant, dtype_name
from keraunos.frontends.torch_launch import own_work, recorded

try:
    from jax.experimental.mosaic.gpu.core import _compile_as_torch_gpu_kernel as _build
except ImportError as _error:
    raise ImportError(f"jax {jax.__version__} has no known way to hand its kernels to PyTorch", name="jax") from _error


def unsupported() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    if any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return None
    return "needs JAX's compiler for NVIDIA GPUs (pip install 'jax[cuda13]')"


def launch(fn: Callable, arrays: dict[str, Any], static: dict[str, Any], row: Row | None = None) -> Any:
    """What ``fn(**arrays, **static)`` gives in JAX, for tensors.

    A tensor that is not contiguous, or not aligned to 16 bytes as the bulk copies want it, is copied first.

    Args:
        fn: a function of JAX that is one launch of a kernel.
        arrays: trees of tensors, and of NumPy arrays, which are constants of the call.
        static: compile-time values; hashable.
        row: where the tokens lie, if they are the end of a longer row.
    """
    leaves, structure = jax.tree.flatten(arrays)
    like = next(x for x in leaves if isinstance(x, torch.Tensor))
    fixed = [i for i, x in enumerate(leaves) if isinstance(x, np.ndarray)]
    leaves = [_fixed(x, like.device) if i in fixed else _plain(x) for i, x in enumerate(leaves)]
    # Trees have their names in order.
    per_token = [
        row is not None and name in row.arrays for name in sorted(arrays) for _ in jax.tree.leaves(arrays[name])
    ]
    kinds = tuple(
        ((1, row.length, *x.shape[2:]) if row and long else tuple(x.shape), dtype_name(x))
        for x, long in zip(leaves, per_token, strict=True)
    )
    program = _program(fn, structure, kinds, tuple(static.items()), like.device)
    outputs = program.outputs
    leads = [row.lead * math.prod(x.shape[2:]) * x.itemsize if row and long else 0
             for x, long in zip(leaves, per_token, strict=True)]  # fmt: skip
    leads += [0] * len(outputs)
    if row and any(per_token) and len(outputs[0][0]) == 4:
        # The first output has a row per token too.
        (_, _, *rest), dtype = outputs[0]
        outputs = [((*leaves[per_token.index(True)].shape[:2], *rest), dtype), *outputs[1:]]
        leads[len(leaves)] = row.lead * math.prod(rest) * dtype.itemsize
    run = _Launch(program, leads, {i: leaves[i] for i in fixed})
    made = recorded(run, [x for i, x in enumerate(leaves) if i not in fixed], outputs)
    return jax.tree.unflatten(program.structure, made)


class Row(NamedTuple):
    """Tokens as the end of a longer row, which kernels are compiled for, so that they serve many lengths.

    What is before them is not there: kernels must not touch it. The addresses that they are given are as if it were.

    Attributes:
        lead: tokens before the first that is there.
        length: tokens of the row.
        arrays: the names of those that have axes of rows and tokens, ``[B, T, ...]``, here ``[1, length, ...]``; if any
            is there, the first output, if it has four axes, is another.
    """

    lead: int
    length: int
    arrays: tuple[str, ...]


class _Launch:
    """A program with its constants: called with the other arrays or their addresses, it launches."""

    def __init__(self, program: _Program, leads: list[int], constants: dict[int, torch.Tensor]):
        self.program, self.constants = program, constants
        self.places = [(i, lead) for i, lead in enumerate(leads) if i not in constants]
        self.addresses = [constants[i].data_ptr() if i in constants else 0 for i in range(len(leads))]

    def __call__(self, *arrays: Any) -> None:
        addresses = self.addresses.copy()
        for (i, lead), x in zip(self.places, arrays, strict=True):
            addresses[i] = (x.data_ptr() if isinstance(x, torch.Tensor) else x) - lead
        self.program(addresses)


def _fixed(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """A constant: made in no graph or transformation, for no code runs here that these could trace."""
    if torch._C._are_functorch_transforms_active():
        return constant(x, device)
    with own_work():
        return _constant(x.tobytes(), x.dtype.str, x.shape, device)


def _plain(x: torch.Tensor) -> torch.Tensor:
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _Program:
    """A compiled kernel: called with addresses, of inputs then outputs, it launches on the current stream."""

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

    def __call__(self, addresses: list[int]) -> None:
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        self.start(self.function, stream, self.addresses(*addresses))


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
