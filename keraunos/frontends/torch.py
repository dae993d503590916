"""PyTorch: differentiation, devices and dtypes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from keraunos.frontends import Device, Operator, alone
from keraunos.frontends import torch_operators as operators
from keraunos.frontends.torch_launch import kinds
from keraunos.frontends.torch_operators import DTYPES as DTYPES
from keraunos.frontends.torch_operators import dtype_name as dtype_name
from keraunos.frontends.torch_operators import fitting as fitting
from keraunos.frontends.torch_operators import rows as rows

# Tokens of a call of which nothing is known.
_USUAL = 4096


def differentiable(forward: Callable, backward: Callable, operator: Operator, platform: str) -> Callable:
    """``prepare(opts, args)``: ``args -> outputs`` with a gradient; see :func:`keraunos.frontends.differentiable`.

    To whatever traces or transforms a call, such as ``torch.compile``, it is an operator: opaque, so that nothing
    traces into its kernels. Where nothing does, the call goes past the dispatcher. While a graph is traced, sizes may
    be symbols that stand for any: then no host code runs, which would decide by them and so fix them, and the shapes of
    the results are the answer. A gradient of which nobody asked is not made: ``opts.constant`` names the arrays.

    Args:
        forward: ``(args, opts) -> (outputs, residuals)``. There are two outputs, and ``forward.residuals`` are
            functions by the residuals' names, ``(args, opts) -> (shape, dtype name)`` or None where there can be none
            (each may be None all the same, or shorter); without it there are no residuals. The first may be ``OUTPUT``:
            the first output itself.
        backward: ``(args, residuals, gradients of the outputs, opts) -> gradients of args``. Where a residual can be,
            but was None, it may be given a tensor without values.
        operator: the operation. platform: the name under which it finds these functions.
    """
    kind, n = operator.args, len(operator.args._fields)
    fits, launchers = fitting(kind._fields), functools.partial(operators.launchers, kind, forward, backward)
    places = [kind._fields.index(name) for name in operator.fields]

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
            saved = ctx.saved_tensors
            grads = operators.gradients_of(ctx.shape, saved[0], doutput, dstate)
            if not torch.is_grad_enabled() and not _watched(flat := [*saved, *grads]):
                return (None, None, *launchers(ctx.opts)[1](flat))
            node = operators.differentiable(operator)
            given, values = [saved[i] for i in places], node.plain.of(ctx.opts, platform)
            found = dict(zip(places, node.backward(given, list(saved[n:]), grads, values), strict=True))
            return (None, None, *map(found.get, range(n)))

    def needing(opts, needed):
        """The options of a call with what needs a gradient known."""
        missing = [name for name, x in zip(kind._fields, needed, strict=True) if not x and name in operator.gradients]
        return opts._replace(constant=tuple(dict.fromkeys((*opts.constant, *missing))))

    def watched(opts):
        node = operators.differentiable(operator)

        def run(args):
            flat, own = _seen(args, fits), opts
            if not torch._C._are_functorch_transforms_active():
                # To a transformation of a transformation, arrays do not say whether they need one.
                needed = [x is None or x.requires_grad for x in flat]
                graded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in flat)
                own = needing(opts, needed) if graded else alone(opts)
            return tuple(map(operators.absent, node.forward([flat[i] for i in places], own, platform)))

        return run

    def prepare(opts, args):
        if _watched(args):
            return watched(opts)
        changes, absent = _changes(args, fits), [x is None for x in args]
        launch_alone = launchers(alone(opts))[0].alike()
        known: dict[tuple[bool, ...], tuple[Any, Callable]] = {}

        def settled(needed):
            own = needing(opts, [x or y for x, y in zip(needed, absent, strict=True)])
            known[needed] = own, launchers(own)[0].alike()
            return known[needed]

        def run(args):
            flat = _flat(args, changes)
            needed = tuple([x is not None and x.requires_grad for x in flat])
            # Forward mode has no derivative here, and says so.
            if (True in needed and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
                return Direct.apply(*(known.get(needed) or settled(needed)), *flat)
            return launch_alone(flat)[:2]

        return run

    return prepare


def in_place(compute: Callable, operator: Operator, platform: str, pool: str, writes: Callable[[Any], bool],
             output: Callable) -> Callable:  # fmt: skip
    """``prepare(opts, args)``: ``args -> (output, pool)``; see :func:`keraunos.frontends.in_place`.

    To whatever traces a call it is an operator, which writes its output where it is told to.
    """
    kind = operator.args
    place, fits = kind._fields.index("out"), fitting(kind._fields, operator.strided)
    launcher = functools.partial(operators.launcher, kind, compute)

    def prepare(opts, args):
        if not _watched(args):
            changes, launch = _changes(args, fits), launcher(opts).alike()
            return lambda args: launch(_flat(args, changes))
        node = operators.in_place(operator)

        def run(args):
            flat = _seen(args, fits)
            if flat[place] is None and (made := output(args, opts)):
                flat[place] = operators.room(made, args[0])
            node(kind(*flat), opts, platform)
            return flat[place], getattr(args, pool) if writes(opts) else None

        return run

    return prepare


_parameters = functools.cache(inspect.signature)
# What autocast casts: not float64.
_NARROWER = {torch.float32, torch.float16, torch.bfloat16}


def autocast(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a public function, query, key and value cast as autocast would for PyTorch's own attention.

    Gates, decays, states and biases are not cast, nor anything where the call says the dtype itself.
    """
    try:
        bound = _parameters(fn).bind(*args, **kwargs)
    except TypeError:
        return args, kwargs  # the call is refused
    bound.apply_defaults()
    given = bound.arguments
    if given.get("dtype") is not None:
        return args, kwargs
    for name in ("query", "key", "value"):
        x = given.get(name)
        if isinstance(x, torch.Tensor) and x.dtype in _NARROWER and torch.amp.is_autocast_available(x.device.type):
            kind = x.device.type
            given[name] = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
    return bound.args, bound.kwargs


def refuse_nested(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Say what a call wants that failed on a nested tensor.

    Raises:
        TypeError: an argument is one.
    """
    names = _parameters(fn).parameters
    wanted = "a dense one"
    if "cu_seqlens" in names:
        wanted = "x.values() of a jagged one, with an axis of 1 in front where there is a batch, and x.offsets() as"
        wanted += " cu_seqlens"
    elif {"limits", "mask_info"} & set(names):
        wanted = "x.values()[None] of a jagged one, and sequences told apart by ids, MaskInfo.from_segments"
    for name, x in (*zip(names, args, strict=False), *kwargs.items()):
        if isinstance(x, torch.Tensor) and x.is_nested:
            raise TypeError(f"{fn.__name__.lstrip('_')}: {name} is a nested tensor; expected {wanted}") from None


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


def constant(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """A small constant on the device: copied there once, not in every call."""
    if is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        # What is made now belongs to a graph or a transformation, and must not outlive it.
        return torch.tensor(x.tolist(), dtype=DTYPES[x.dtype.name], device=device)
    return _constant(x.tobytes(), x.dtype.str, x.shape, device)


@functools.lru_cache(maxsize=1024)
def _constant(data: bytes, dtype: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Kept for calls that gradients follow, too.
    with torch.inference_mode(False):
        return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()).to(device)


def zeros(shape: tuple[int, ...], dtype: str, like: torch.Tensor) -> torch.Tensor:
    """Zeros on the device of ``like``."""
    return torch.zeros(shape, dtype=DTYPES[dtype], device=like.device)


def array(x: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """A NumPy array on the device of ``like``."""
    return torch.tensor(x, device=like.device)


def cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The values in another dtype."""
    return x if x.dtype == DTYPES[dtype] else x.to(DTYPES[dtype])


# The array library, for what it and JAX have alike.
xp = torch


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The matrix product, in the precision of its arguments whatever the user's settings allow for products."""
    with torch.autocast(a.device.type, enabled=False):
        return (a.double() @ b.double()).to(a.dtype)


def rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The values, of float32, rounded to those of a narrower dtype."""
    return x.to(DTYPES[dtype]).to(x.dtype)


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


def length(n: int | torch.SymInt, usual: int | None = None) -> int:
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


def is_symbol(n: Any) -> bool:
    """Whether a size has no number that :func:`length` gives."""
    return False


def seed(rng: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    """Two integers of 32 bits, the next that a generator gives, on the device of ``like``."""
    if not isinstance(rng, torch.Generator):
        raise TypeError(f"attention: dropout_rng is of type {type(rng).__qualname__}; expected a torch.Generator")
    return torch.randint(1 << 32, (2,), generator=rng, device=rng.device).to(like.device, non_blocking=True)
