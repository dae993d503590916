"""PyTorch: launching Triton kernels, differentiation, devices and dtypes."""

from __future__ import annotations

import base64
import functools
import itertools
import pickle
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from keraunos.frontends import Device

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def launch(kernel: Any, grid: tuple[int, ...], inputs: dict[str, Any], outputs: dict[str, Any],
           constants: dict[str, Any], *, num_warps: int, num_stages: int) -> tuple[Any, ...]:  # fmt: skip
    """Allocate the outputs and launch.

    Args:
        kernel: a ``@triton.jit`` function; its parameters are the inputs, the outputs, the constants, in this order.
        grid: number of programs along each axis.
        inputs: name -> tensor, number or None.
        outputs: name -> (shape, dtype name), or None for one that the constants switch off.
        constants: name -> compile-time value.

    Returns:
        The outputs, in order; None for those that are off.
    """
    like = next(x for x in inputs.values() if isinstance(x, torch.Tensor))
    device = like.device
    made = tuple(None if o is None else torch.empty(o[0], dtype=_DTYPES[o[1]], device=device) for o in outputs.values())
    # While a graph is traced there is nothing to compute: the shapes and dtypes of the outputs are the answer.
    if isinstance(like, FakeTensor) or device.type == "meta" or 0 in grid:
        return made
    if device.type != "cuda":
        _run(kernel, grid, inputs, made, constants, num_warps, num_stages)
    elif device.index == torch.cuda.current_device():
        _run_built(kernel, grid, inputs, made, constants, num_warps, num_stages)
    else:
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device(device):
            _run_built(kernel, grid, inputs, made, constants, num_warps, num_stages)
    return made


def _run(kernel, grid, inputs, made, constants, num_warps, num_stages):
    return kernel[grid](*inputs.values(), *made, **constants, num_warps=num_warps, num_stages=num_stages)


def _run_built(kernel, grid, inputs, made, constants, num_warps, num_stages):
    """Launch what was built for the same numbers and constants before, without asking Triton to find it again.

    ``constants.built`` belongs to one set of numbers and constants. What remains is the device, the dtypes, and whether
    arrays are aligned to 16 bytes, which the code may rely on; new outputs always are.
    """
    built = getattr(constants, "built", None)
    if built is None:
        return _run(kernel, grid, inputs, made, constants, num_warps, num_stages)
    key = (
        torch.cuda.current_device(),
        *[(x.dtype, x.data_ptr() % 16) for x in inputs.values() if x.__class__ is not int and hasattr(x, "data_ptr")],
    )
    if key in built:
        built[key][(*grid, 1, 1)[:3]](*inputs.values(), *made, *map(constants.__getitem__, _constant_names(kernel)))
    else:
        built[key] = _run(kernel, grid, inputs, made, constants, num_warps, num_stages)


@functools.cache
def _constant_names(kernel: Any) -> tuple[str, ...]:
    return tuple(p.name for p in kernel.params if p.is_constexpr)


_NUMBER = itertools.count()


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """``(args, opts) -> outputs`` as a custom operator with a gradient.

    As an operator of the dispatcher it is opaque: autograd, ``torch.compile``, checkpointing and graph capture see its
    inputs and outputs, and nothing ever traces into its kernels.

    Args:
        forward: ``(args, opts) -> (outputs, residuals)``. Its annotation of ``args`` is a NamedTuple of tensors or
            None, ``opts`` can be pickled, there are two outputs, and ``forward.residuals`` names the residuals (each
            may be None); without it there are none.
        backward: ``(args, residuals, gradients of the outputs, opts) -> gradients of args``.
    """
    kind = typing.get_type_hints(forward)["args"]
    names, residuals = kind._fields, getattr(forward, "residuals", ())
    n = len(names)
    name = f"{forward.__module__.rpartition('.')[2]}_{next(_NUMBER)}"

    def run_forward(*flat):
        outputs, kept = forward(kind(*flat[:n]), decode(flat[n]))
        return (*outputs, *(_present(x, flat[0]) for x in kept))

    def run_backward(*flat):
        args, kept = kind(*flat[:n]), tuple(map(_absent, flat[n : n + len(residuals)]))
        grads = backward(args, kept, flat[n + len(residuals) : -1], decode(flat[-1]))
        return tuple(_present(x, flat[0]) for x in grads)

    tensors = ", ".join(f"Tensor? {name}" for name in names)
    forward_op = _operator(f"{name}_forward", f"({tensors}, str opts)", 2 + len(residuals), run_forward)
    kept = "".join(f"Tensor {name}, " for name in residuals)
    backward_op = _operator(f"{name}_backward", f"({tensors}, {kept}Tensor d0, Tensor? d1, str opts)", n, run_backward)

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:n], *output[2:])
        ctx.opts, ctx.shape = inputs[n], output[0].shape
        ctx.set_materialize_grads(False)

    def gradient(ctx, doutput, dstate, *_):
        saved = ctx.saved_tensors
        if doutput is None:
            doutput = torch.zeros(ctx.shape, dtype=saved[0].dtype, device=saved[0].device)
        grads = backward_op(*saved, _rows(doutput), dstate if dstate is None else dstate.contiguous(), ctx.opts)
        return (*map(_absent, grads), None)

    def second(ctx, *_):
        raise NotImplementedError(f"keraunos: {forward.__module__} has no gradient of its gradient (double backward)")

    forward_op = _with_gradient(forward_op, save, gradient)
    backward_op = _with_gradient(backward_op, lambda ctx, inputs, output: None, second)

    def call(args, opts):
        device = args[0].device
        if _nobody_watches(args):
            args = kind(*(_rows(constant(x, device) if isinstance(x, np.ndarray) else x) for x in args))
            return forward(args, opts)[0]
        flat = (_rows(constant(x, device) if isinstance(x, np.ndarray) else x) for x in args)
        return forward_op(*flat, encode(opts))[:2]

    return call


def _nobody_watches(args: Any) -> bool:
    """Whether a call needs no gradient and nothing traces it, so that its kernels can be launched at once.

    The dispatcher would do the same with a third of the host time of a call.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    needs = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
    return not needs and type(args[0]) is torch.Tensor


_LIBRARY = torch.library.Library("keraunos", "FRAGMENT")


def _operator(name: str, parameters: str, outputs: int, fn: Callable) -> Callable:
    returns = ", ".join(["Tensor"] * outputs)
    _LIBRARY.define(f"{name}{parameters} -> ({returns})")
    _LIBRARY.impl(name, fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"keraunos::{name}", fn, lib=_LIBRARY)
    return getattr(torch.ops.keraunos, name).default


def _with_gradient(op: Any, save: Callable, gradient: Callable) -> Callable:
    """The operator with its gradient; ``torch.func`` takes none of an operator, only that of such a class."""
    torch.library.register_autograd(op, gradient, setup_context=save, lib=_LIBRARY)
    torch.library.register_vmap(op, functools.partial(_one_by_one, op), lib=_LIBRARY)

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(lambda *flat: op(*flat))
        setup_context = staticmethod(save)
        backward = staticmethod(gradient)

    return lambda *flat: (Transformed.apply if torch._C._are_functorch_transforms_active() else op)(*flat)


def _one_by_one(op: Callable, info: Any, in_dims: tuple, *flat: Any) -> tuple:
    """The operator for each element of ``torch.vmap``'s axis; packed sequences have none that it could be folded in."""
    calls = [
        op(*(x if d is None else x.select(d, i) for x, d in zip(flat, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    outputs = tuple(map(torch.stack, zip(*calls, strict=True)))
    return outputs, (0,) * len(outputs)


def _present(x: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Operators return tensors only: an empty vector of bytes stands for None."""
    return torch.empty(0, dtype=torch.uint8, device=like.device) if x is None else x


def _absent(x: torch.Tensor) -> torch.Tensor | None:
    return None if x.dtype == torch.uint8 else x


def _rows(x: torch.Tensor | None) -> torch.Tensor | None:
    """Kernels take any strides but the last one's, which is 1."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


@functools.lru_cache(maxsize=4096)
def encode(opts: Any) -> str:
    """Options as an operator's argument: text that means the same in other processes, which may share caches."""
    return base64.b85encode(pickle.dumps(opts)).decode()


@functools.lru_cache(maxsize=4096)
def decode(text: str) -> Any:
    """The options that :func:`encode` made a text of."""
    return pickle.loads(base64.b85decode(text))


def constant(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """A small constant on the device: copied there once, not in every call."""
    if is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        # What is made now belongs to a graph or a transformation, and must not outlive it.
        return torch.tensor(x.tolist(), dtype=_DTYPES[x.dtype.name], device=device)
    return _constant(x.tobytes(), x.dtype.str, x.shape, device)


@functools.lru_cache(maxsize=1024)
def _constant(data: bytes, dtype: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()).to(device)


def device_of(x: torch.Tensor) -> Device:
    """The device a tensor is on."""
    return _describe(x.device.type, x.device.index)


def default_device() -> Device:
    """The first GPU if there is one."""
    return _describe("cuda" if torch.cuda.is_available() else "cpu", None)


@functools.cache
def _describe(kind: str, index: int | None) -> Device:
    return Device("gpu", torch.cuda.get_device_name(index)) if kind == "cuda" else Device(kind, kind)


def dtype_name(x: torch.Tensor) -> str:
    """The dtype's name: "bfloat16", "float32", "int32", ..."""
    return str(x.dtype).removeprefix("torch.")


def length(n: int | torch.SymInt) -> int:
    """A size as a number; of one that a graph leaves open, the one at hand while it is traced, without fixing it."""
    return n if isinstance(n, int) else n.node.hint
