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
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from keraunos.frontends.torch.arrays import DTYPES, constant, dtype_name, kept_constant
from keraunos.frontends.torch.launch import current_device, recorded

try:
    from jax._src.xla_bridge import backends_are_initialized
    from jax.experimental.mosaic.gpu.core import _compile_as_torch_gpu_kernel as _build
except ImportError as _error:
    raise ImportError(f"jax {jax.__version__} has no known way to hand its kernels to PyTorch", name="jax") from _error


def unsupported() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    if not {"launch_c", "function"}.issubset(_build.__code__.co_cellvars):
        return f"does not know how jax {jax.__version__} hands kernels to PyTorch; it knows 0.11.2"
    if any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return None
    return "needs JAX's compiler for NVIDIA GPUs (pip install 'jax[cuda13]')"


def launch(fn: Callable, arrays: dict[str, Any], static: dict[str, Any], row: Row | None = None) -> Any:
    """What ``fn(**arrays, **static)`` gives in JAX, for tensors.

    A tensor that is not contiguous, or not aligned to 16 bytes as the bulk copies want it, is copied first. One that
    the kernel changes in place is a result itself.

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
             for x, long in zip(leaves, per_token, strict=True)]
    leads += [0] * len(outputs)
    if row and any(per_token) and len(outputs[0][0]) == 4:
        # The first output has a row per token too.
        (_, _, *rest), dtype = outputs[0]
        outputs = [((*leaves[per_token.index(True)].shape[:2], *rest), dtype), *outputs[1:]]
        leads[len(leaves)] = row.lead * math.prod(rest) * dtype.itemsize
    given = [i for i in range(len(leaves)) if i not in fixed]
    made = recorded(
        _Launch(program, leads, {i: leaves[i] for i in fixed}),
        [leaves[i] for i in given],
        [given.index(program.changed[i]) if i in program.changed else x for i, x in enumerate(outputs)],
    )
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
        self.fixed = {i: x.data_ptr() for i, x in constants.items()}
        given = [i for i in range(len(leads)) if i not in constants]
        # Of each address, where among the arrays that are given it is, and what lies before.
        self.places = [(given.index(i) if i in given else -1, self.fixed.get(i, -leads[i])) for i in program.order]

    def __call__(self, *arrays: Any) -> None:
        given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arrays]
        given.append(0)
        self.program([given[i] + offset for i, offset in self.places])


def _fixed(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """A constant: made in no graph or transformation, for no code runs here that these could trace."""
    if torch._C._are_functorch_transforms_active():
        return constant(x, device)
    return kept_constant(x.tobytes(), x.dtype.str, x.shape, device)


def _plain(x: torch.Tensor) -> torch.Tensor:
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _Program:
    """A compiled kernel: called with addresses in its own order, it launches on the current stream.

    ``order`` has, for each address, which of the arguments and outputs of the function it is; ``changed``, of each
    output that is an argument changed in place, which.
    """

    def __init__(self, fn: Callable, structure: Any, kinds: Sequence[Any], static: Any, device: torch.device):
        _start_jax()
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]

        def call(*leaves: Any) -> Any:
            return fn(**jax.tree.unflatten(structure, leaves), **dict(static))

        # A kernel need not use all that it is given.
        traced = jax.jit(call, keep_unused=True).trace(*structs)
        outputs, self.structure = jax.tree.flatten(traced.out_info)
        self.outputs = [(tuple(x.shape), DTYPES[x.dtype.name]) for x in outputs]
        lowered = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
        module, self.order, self.changed = _module(lowered, len(kinds), len(outputs))
        with current_device(device):
            _make_current(device.index)
            start, unload = _build(module)
        found = inspect.getclosurevars(start).nonlocals
        self.start, self.function, self.unload = found["launch_c"], found["function"], unload
        self.addresses = ctypes.c_void_p * len(self.order)

    def __call__(self, addresses: list[int]) -> None:
        device = torch._C._cuda_getDevice()
        _make_current(device)
        self.start(self.function, torch._C._cuda_getCurrentRawStream(device), self.addresses(*addresses))


def _start_jax() -> None:
    """Have JAX, unless it has started, take the GPU's memory as it needs it and not most of it for itself."""
    if backends_are_initialized():
        return
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    given = os.environ.get(name)
    os.environ[name] = given or "false"
    # Of several GPUs it would leave the last one the current one.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        jax.devices()
    finally:
        if given is None:
            del os.environ[name]
        if device is not None:
            torch.cuda.set_device(device)


_threads = threading.local()


def _make_current(index: int | None) -> None:
    """Give the thread the device's context: PyTorch does so at the first call that needs one, JAX's kernels do not."""
    if index is not None and index not in (known := _threads.__dict__.setdefault("devices", set())):
        torch.cuda.Event().record()
        known.add(index)


def _module(lowered: Any, inputs: int, outputs: int) -> tuple[bytes, list[int], dict[int, int]]:
    """The kernel in a module of JAX, which must be all that is done there; the order of its arrays; who is changed."""
    [main] = lowered.body.operations
    [block] = main.regions[0].blocks
    call, *rest, end = block.operations
    given, results = list(block.arguments), list(end.operands)
    if (
        rest
        or call.attributes["call_target_name"].value != "mosaic_gpu_v2"
        or any(x not in given for x in call.operands)
        or results != list(call.results)
        or (len(given), len(results)) != (inputs, outputs)
    ):
        raise NotImplementedError(f"not only a kernel is launched by {[op.name for op in block.operations]}")
    kernel: Any = ir.DictAttr(call.attributes["mhlo.backend_config"])["module"]
    order = [*(given.index(x) for x in call.operands), *range(inputs, inputs + outputs)]
    aliases = map(stablehlo.OutputOperandAlias, call.attributes["output_operand_aliases"])
    # A single result has no index.
    changed = {(*x.output_tuple_indices, 0)[0]: order[x.operand_index] for x in aliases}
    return kernel.value_bytes, order, changed


_lock = threading.Lock()


@functools.lru_cache(maxsize=4096)
def _made(*key: Any) -> _Program:
    return _Program(*key)


def _program(*key: Any) -> _Program:
    # Two threads that need the same kernel compile it once.
    with _lock:
        return _made(*key)
