"""PyTorch: differentiation, devices and dtypes."""

from __future__ import annotations

import base64
import functools
import itertools
import pickle
import typing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from keraunos.frontends import OUTPUT, Device, alone
from keraunos.frontends.torch_launch import kinds, remembered

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


_NUMBER = itertools.count()
# Tokens of a call of which nothing is known.
_USUAL = 4096


def differentiable(forward: Callable, backward: Callable, outputs: Callable, differentiated: Callable) -> Callable:
    """``prepare(opts, args)``: ``args -> outputs`` with a gradient; see :func:`keraunos.frontends.differentiable`.

    To whatever traces or transforms a call, such as ``torch.compile``, it is a custom operator: opaque, so that nothing
    traces into its kernels. Where nothing does, the call goes past the dispatcher. While a graph is traced, sizes may
    be symbols that stand for any: then no host code runs, which would decide by them and so fix them, and the shapes of
    the results are the answer.

    Args:
        forward: ``(args, opts) -> (outputs, residuals)``. Its annotation of ``args`` is a NamedTuple of tensors or
            None, ``opts`` can be pickled, there are two outputs, and ``forward.residuals`` are functions by the
            residuals' names, ``(args, opts) -> (shape, dtype name)`` or None where there can be none (each may be None
            all the same, or shorter); without it there are no residuals.
            The first may be ``OUTPUT``: the first output itself.
        backward: ``(args, residuals, gradients of the outputs, opts) -> gradients of args``. Where a residual can be,
            but was None, it may be given a tensor without values.
        outputs: ``(args, opts) ->`` for each output ``(shape, dtype name)``, None for one that is not there.
        differentiated: ``(args, opts) -> args``, None in place of those that have no gradient.
    """
    kind = typing.get_type_hints(forward)["args"]
    names, given_back = kind._fields, getattr(forward, "residuals", {})
    # Operators may not return a tensor twice.
    residuals = {name: shape for name, shape in given_back.items() if shape is not OUTPUT}
    n, shared = len(names), len(given_back) - len(residuals)
    fits = fitting(names)
    name = f"{forward.__module__.rpartition('.')[2]}_{next(_NUMBER)}"

    @functools.lru_cache(maxsize=4096)
    def launchers(opts):
        """``forward`` and ``backward`` of flat lists of tensors."""

        def launch_forward(flat):
            outputs, kept = forward(kind(*flat), opts)
            return (*outputs, *kept)

        def launch_backward(flat):
            return tuple(backward(kind(*flat[:n]), tuple(flat[n:-2]), tuple(flat[-2:]), opts))

        return remembered(launch_forward), remembered(launch_backward)

    def traced_forward(*flat):
        args, opts = kind(*flat[:n]), decode(flat[n])
        kept = (shape(args, opts) for shape in residuals.values())
        return tuple(_room(made, flat[0]) for made in (*outputs(args, opts), *kept))

    def run_forward(*flat):
        opts = decode(flat[n])
        made = launchers(opts)[0](list(flat[:n]))
        made = (*made[:2], *made[2 + shared :])
        args = kind(*flat[:n])
        shapes = (*outputs(args, opts), *(shape(args, opts) for shape in residuals.values()))
        return tuple(_within(x, like, flat[0]) for x, like in zip(made, shapes, strict=True))

    def traced_backward(*flat):
        wanted = differentiated(kind(*flat[:n]), decode(flat[-1]))
        return tuple(_room(None if x is None else (x.shape, dtype_name(x)), flat[0]) for x in wanted)

    def run_backward(*flat):
        _, launch = launchers(decode(flat[-1]))
        given = [*flat[:n], *map(_absent, flat[n:-3]), flat[-3], _absent(flat[-2])]
        return tuple(_room(None, flat[0]) if x is None else x for x in launch(given))

    tensors = ", ".join(f"Tensor? {name}" for name in names)
    forward_op = _operator(f"{name}_forward", f"({tensors}, str opts)", 2 + len(residuals), run_forward, traced_forward)
    kept = "".join(f"Tensor {name}, " for name in given_back)
    backward_op = _operator(
        f"{name}_backward", f"({tensors}, {kept}Tensor d0, Tensor? d1, str opts)", n, run_backward, traced_backward
    )

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:n], *output[:shared], *output[2:])
        ctx.opts, ctx.shape = inputs[n], output[0].shape
        ctx.set_materialize_grads(False)

    def given(ctx, doutput, dstate):
        """What the kernels take: the saved tensors and the gradients, in rows, that of the state perhaps absent."""
        saved = ctx.saved_tensors
        if doutput is None:
            doutput = torch.zeros(ctx.shape, dtype=saved[0].dtype, device=saved[0].device)
        return [*saved, _rows(doutput), dstate if dstate is None else dstate.contiguous()]

    def gradient(ctx, doutput, dstate, *_):
        return (*map(_absent, backward_op(*given(ctx, doutput, dstate), ctx.opts)), None)

    def second(ctx, *_):
        raise NotImplementedError(f"keraunos: {forward.__module__} has no gradient of its gradient (double backward)")

    forward_op = _with_gradient(forward_op, save, gradient)
    backward_op = _with_gradient(backward_op, lambda ctx, inputs, output: None, second)

    class Direct(torch.autograd.Function):
        """The operator without the dispatcher, which would take several times the host time."""

        @staticmethod
        def forward(ctx, opts, launch, *flat):
            output, state, *kept = launch(list(flat))
            ctx.save_for_backward(*flat, *kept)
            ctx.opts, ctx.shape = opts, output.shape
            ctx.set_materialize_grads(False)
            return output, state

        @staticmethod
        def backward(ctx, doutput, dstate):
            flat = given(ctx, doutput, dstate)
            if not torch.is_grad_enabled() and not _watched(flat):
                return (None, None, *launchers(ctx.opts)[1](flat))
            kept = (_room(None, flat[0]) if x is None else x for x in flat[n:-2])
            return (None, None, *map(_absent, backward_op(*flat[:n], *kept, *flat[-2:], encode(ctx.opts))))

    def prepare(opts, args):
        if _watched(args):
            return lambda args: tuple(map(_absent, forward_op(*_seen(args, fits), encode(opts))[:2]))
        changes = _changes(args, fits)
        launch, launch_alone = launchers(opts)[0].alike(), launchers(alone(opts))[0].alike()

        def run(args):
            flat = _flat(args, changes)
            # Forward mode has no derivative here, and says so.
            if forward_ad._current_level >= 0 or (
                torch.is_grad_enabled() and True in [x.requires_grad for x in flat if x is not None]
            ):
                return Direct.apply(opts, launch, *flat)
            return launch_alone(flat)[:2]

        return run

    return prepare


def in_place(compute: Callable, kind: Any, pool: str, writes: Callable[[Any], bool], output: Callable) -> Callable:
    """``prepare(opts, args)``: ``args -> (output, pool)``; see :func:`keraunos.frontends.in_place`.

    To whatever traces a call it is a custom operator, which writes its output where it is told to.
    """
    names = kind._fields
    place = names.index("out")
    fits = [None if name in (pool, "out") else fit for name, fit in zip(names, fitting(names), strict=True)]
    name = f"{compute.__module__.rpartition('.')[2]}_{next(_NUMBER)}"

    @functools.lru_cache(maxsize=4096)
    def launcher(opts):
        return remembered(lambda flat: compute(kind(*flat), opts))

    def run_operator(*flat):
        launcher(decode(flat[-1]))(list(flat[:-1]))

    def operator(changed):
        tensors = ", ".join(f"Tensor({changed[n]}!)? {n}" if n in changed else f"Tensor? {n}" for n in names)
        own = f"{name}_{'_'.join(changed)}"
        return _operator(own, f"({tensors}, str opts)", 0, run_operator, lambda *flat: None)

    operators = {True: operator({pool: "a", "out": "b"}), False: operator({"out": "a"})}

    def prepare(opts, args):
        if not _watched(args):
            changes, launch = _changes(args, fits), launcher(opts).alike()
            return lambda args: launch(_flat(args, changes))

        def run(args):
            flat = _seen(args, fits)
            if flat[place] is None and (made := output(args, opts)):
                flat[place] = _room(made, args[0])
            operators[writes(opts)](*(x if x is None else x.detach() for x in flat), encode(opts))
            return flat[place], getattr(args, pool) if writes(opts) else None

        return run

    return prepare


# Arguments that kernels take without strides, and those of tokens.
_DENSE, _TOKENS = ("g_gamma", "initial_state"), ("query", "key", "value", "g")
# Kernels count the values between the rows of a tile, which has 128 at most, in 32 bits.
_FAR = 2**31 // 128
_PLAIN = {torch.Tensor, torch.nn.Parameter, np.ndarray, type(None)}


def signature(args: Sequence[Any]) -> list[Any] | None:
    """What tells launches on tensors and constants apart; None where the call has to be an operator, or is wrong."""
    return None if _watched(args) else kinds(args)


def _changes(args: Sequence[Any], fits: Sequence[Callable | None]) -> list[tuple[int, torch.Tensor | None]]:
    """Which of args like these kernels cannot take as they are: constants, with their tensors, and what is no fit."""
    return [
        (i, constant(x, args[0].device) if isinstance(x, np.ndarray) else None)
        for i, (x, fit) in enumerate(zip(args, fits, strict=True))
        if x is not None and fit and (isinstance(x, np.ndarray) or not fit(x))
    ]


def _flat(args: Sequence[Any], changes: list[tuple[int, torch.Tensor | None]]) -> list[Any]:
    """The tensors that kernels take."""
    flat = list(args)
    for i, made in changes:
        flat[i] = flat[i].contiguous() if made is None else made
    return flat


def _seen(args: Sequence[Any], fits: Sequence[Callable | None]) -> list[Any]:
    """The same for the operator of a call that is watched.

    Raises:
        TypeError: an argument is a DTensor; PyTorch would say that the operator has no sharding strategy.
    """
    if any(type(x).__name__ == "DTensor" for x in args):
        raise TypeError(
            "keraunos: got a DTensor; expected each rank's own heads or sequences, x.to_local() of every argument, and "
            "DTensor.from_local(...) of the output; where tokens are sharded, see keraunos.distributed"
        )
    return _flat(args, _changes(args, fits))


def _watched(tensors: Sequence[Any]) -> bool:
    """Whether something traces or transforms the call, or asks for shapes, so that it has to be an operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or tensors[0].is_meta
        or not _PLAIN.issuperset(map(type, tensors))
    )


_LIBRARY = torch.library.Library("keraunos", "FRAGMENT")


def _operator(name: str, parameters: str, outputs: int, fn: Callable, traced: Callable) -> Callable:
    returns = ", ".join(["Tensor"] * outputs)
    _LIBRARY.define(f"{name}{parameters} -> ({returns})")
    _LIBRARY.impl(name, fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"keraunos::{name}", traced, lib=_LIBRARY)
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


def _room(made: tuple[tuple[int, ...], str] | None, like: torch.Tensor) -> torch.Tensor:
    """A tensor of a shape and dtype. Operators return tensors only: an empty vector of bytes stands for None."""
    shape, dtype = made or ((0,), "uint8")
    return torch.empty(shape, dtype=_DTYPES[dtype], device=like.device)


def _within(x: torch.Tensor | None, made: tuple[tuple[int, ...], str] | None, like: torch.Tensor) -> torch.Tensor:
    """A residual in the room for it, of which it may take the beginning."""
    if x is not None and (made is None or tuple(x.shape) == tuple(made[0])):
        return x
    room = _room(made, like)
    if x is not None:
        room[: len(x)] = x
    return room


def _absent(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None or x.dtype == torch.uint8 else x


def fitting(names: Sequence[str]) -> list[Callable]:
    """For each argument, what says whether kernels can take a tensor as it is."""
    return [
        torch.Tensor.is_contiguous if name in _DENSE else _has_near_rows if name in _TOKENS else _has_rows
        for name in names
    ]


def _has_rows(x: torch.Tensor) -> bool:
    """Kernels take any strides but the last one's, which is 1."""
    return x.stride(-1) == 1


def _has_near_rows(x: torch.Tensor) -> bool:
    """Nor do they take tokens so far apart as those of a huge batch that lies in memory token by token."""
    return _has_rows(x) and (x.ndim < 4 or x.stride(1) < _FAR or x.shape[1] == 1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if _has_near_rows(x) else x.contiguous()


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
    # Kept for calls that gradients follow, too.
    with torch.inference_mode(False):
        return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()).to(device)


def zeros(shape: tuple[int, ...], dtype: str, like: torch.Tensor) -> torch.Tensor:
    """Zeros on the device of ``like``."""
    return torch.zeros(shape, dtype=_DTYPES[dtype], device=like.device)


def array(x: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """A NumPy array on the device of ``like``."""
    return torch.tensor(x, device=like.device)


def cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The values in another dtype."""
    return x if x.dtype == _DTYPES[dtype] else x.to(_DTYPES[dtype])


# The array library, for what it and JAX have alike.
xp = torch


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The matrix product, in the precision of its arguments whatever the user's settings allow for products."""
    with torch.autocast(a.device.type, enabled=False):
        return (a.double() @ b.double()).to(a.dtype)


def rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The values, of float32, rounded to those of a narrower dtype."""
    return x.to(_DTYPES[dtype]).to(x.dtype)


def pad(x: torch.Tensor, axis: int, after: int, before: int = 0) -> torch.Tensor:
    """With so many zeros at the ends of an axis."""
    if not (before or after):
        return x
    return torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - axis) + [before, after])


def permute(x: torch.Tensor, *axes: int) -> torch.Tensor:
    """With its axes in another order, in memory too."""
    return x.permute(axes).contiguous()


def stack(tensors: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Side by side along a new axis."""
    return torch.stack(list(tensors), axis)


def numbers(n: int, like: torch.Tensor) -> torch.Tensor:
    """0 to n - 1, int32."""
    return torch.arange(n, dtype=torch.int32, device=like.device)


def device_of(x: torch.Tensor) -> Device:
    """The device a tensor is on."""
    return _describe(x.device.type, x.device.index)


def default_device() -> Device:
    """The first GPU if there is one."""
    return _describe("cuda" if torch.cuda.is_available() else "cpu", None)


@functools.cache
def _describe(kind: str, index: int | None) -> Device:
    if kind != "cuda":
        return Device(kind, kind)
    has = torch.cuda.get_device_properties(index)
    # AMD's GPUs have no more of it for those who ask.
    return Device("gpu", has.name, getattr(has, "shared_memory_per_block_optin", has.shared_memory_per_block))


def place_of(x: torch.Tensor) -> Any:
    """Where the tensor is, for those of a call must be together."""
    return x.device


def dtype_name(x: torch.Tensor) -> str:
    """The dtype's name: "bfloat16", "float32", "int32", ..."""
    return str(x.dtype).removeprefix("torch.")


def length(n: int | torch.SymInt) -> int:
    """A size as a number; of one that a graph leaves open, the one at hand while it is traced, without fixing it.

    Where none is at hand, as the size follows from values, a usual length stands for it.

    Raises:
        TypeError: it is a tensor of ``torch.jit.trace``.
    """
    if isinstance(n, int):
        return n
    if not isinstance(n, torch.SymInt):
        raise TypeError("keraunos: torch.jit.trace does not see what kernels do; use torch.export or torch.compile")
    return _USUAL if n.node.hint is None else n.node.hint


def seed(rng: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    """Two integers of 32 bits, the next that a generator gives, on the device of ``like``."""
    if not isinstance(rng, torch.Generator):
        raise TypeError(f"attention: dropout_rng is of type {type(rng).__qualname__}; expected a torch.Generator")
    return torch.randint(1 << 32, (2,), generator=rng, device=rng.device).to(like.device, non_blocking=True)
