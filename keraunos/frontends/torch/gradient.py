"""PyTorch: a kernel's forward and backward as a function with a gradient, or one that changes a tensor in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from keraunos.frontends import Operator, UnnamedError, for_inference
from keraunos.frontends.torch import operators
from keraunos.frontends.torch.arrays import constant, fitting, is_watched
from keraunos.frontends.torch.launch import kinds, launcher, launchers


def differentiable(forward: Callable, backward: Callable, operator: Operator, platform: str) -> Callable:
    """``prepare(opts, args)``: ``args -> outputs`` with a gradient; see :class:`Differentiable`.

    To whatever traces or transforms a call, such as ``torch.compile``, it is an operator: opaque, so that nothing
    traces into its kernels. Where nothing does, the call goes past the dispatcher. While a graph is traced, sizes may
    be symbols that stand for any: then no host code runs, which would decide by them and so fix them, and the shapes of
    the results are the answer. A gradient of which nobody asked is not made: ``opts.constant`` names the arrays.

    Args:
        forward: ``(args, opts) -> (outputs, residuals)``. There are two outputs, and ``forward.residuals`` are
            functions by the residuals' names, ``(args, opts) -> (shape, dtype name)`` or None where there can be none
            (each may be None all the same, or shorter); without it there are no residuals. The first may be ``OUTPUT``:
            the first output itself. Where ``forward.rehearsed``, the two do nothing but launch kernels, and the first
            call builds those of both.
        backward: ``(args, residuals, gradients of the outputs, opts) -> gradients of args``. Where a residual can be,
            but was None, it may be given a tensor without values.
        operator: the operation. platform: the name under which it finds these functions.
    """
    kind, n = operator.args, len(operator.args._fields)
    fits, of_options = fitting(kind._fields), functools.partial(launchers, kind, forward, backward)
    places = [kind._fields.index(name) for name in operator.fields]

    class Direct(torch.autograd.Function):
        """The operator without the dispatcher, which would take several times the host time."""

        @staticmethod
        def forward(ctx: Any, opts: Any, launch: Callable, *flat: torch.Tensor | None) -> tuple[Any, Any]:
            output, state, *kept = launch(list(flat))
            ctx.save_for_backward(*flat, *kept)
            ctx.opts, ctx.shape = opts, output.shape
            ctx.set_materialize_grads(False)
            return output, state

        @staticmethod
        def backward(ctx: Any, doutput: torch.Tensor | None, dstate: torch.Tensor | None) -> tuple[Any, ...]:
            saved = ctx.saved_tensors
            grads = operators.gradients_of(ctx.shape, saved[0], doutput, dstate)
            if not torch.is_grad_enabled() and not is_watched(flat := [*saved, *grads]):
                return (None, None, *of_options(ctx.opts)[1](flat))
            node = operators.differentiable(operator)
            given, values = [saved[i] for i in places], node.plain.of(ctx.opts, platform)
            found = dict(zip(places, node.backward(given, list(saved[n:]), grads, values), strict=True))
            return (None, None, *map(found.get, range(n)))

    def needing(opts: Any, needed: Sequence[bool]) -> Any:
        """The options of a call with what needs a gradient known."""
        missing = [name for name, x in zip(kind._fields, needed, strict=True) if not x and name in operator.gradients]
        return opts._replace(constant=tuple(dict.fromkeys((*opts.constant, *missing))))

    def watched(opts: Any) -> Callable[[Any], tuple[Any, ...]]:
        node = operators.differentiable(operator)

        def run(args: Any) -> tuple[Any, ...]:
            flat, own = _seen(args, fits), opts
            if not torch._C._are_functorch_transforms_active():
                # To a transformation of a transformation, arrays do not say whether they need one.
                needed = [x is None or x.requires_grad for x in flat]
                graded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in flat)
                own = needing(opts, needed) if graded else for_inference(opts)
            return tuple(map(operators.absent, node.forward([flat[i] for i in places], own, platform)))

        return run

    def prepare(opts: Any, args: Any) -> Callable[[Any], tuple[Any, ...]]:
        if is_watched(args):
            return watched(opts)
        changes, absent = to_change(args, fits), [x is None for x in args]
        launch_alone = of_options(for_inference(opts))[0].for_one_kind()
        known: dict[tuple[bool, ...], tuple[Any, Callable]] = {}

        def known_for(needed: tuple[bool, ...]) -> tuple[Any, Callable]:
            own = needing(opts, [x or y for x, y in zip(needed, absent, strict=True)])
            known[needed] = own, of_options(own)[0].for_one_kind()
            return known[needed]

        def run(args: Any) -> tuple[Any, ...]:
            flat = fitted(args, changes)
            needed = tuple([x is not None and x.requires_grad for x in flat])
            # Forward mode has no derivative here, and says so.
            if (True in needed and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
                return Direct.apply(*(known.get(needed) or known_for(needed)), *flat)
            return launch_alone(flat)[:2]

        return run

    return prepare


def in_place(compute: Callable, operator: Operator, platform: str, pool: str, writes: Callable[[Any], bool],
             output: Callable) -> Callable:
    """``prepare(opts, args)``: ``args -> (output, pool)``; see :class:`keraunos.frontends.gradients.InPlace`.

    To whatever traces a call it is an operator, which writes its output where it is told to.
    """
    kind = operator.args
    place, fits = kind._fields.index("out"), fitting(kind._fields, operator.strided)

    def prepare(opts: Any, args: Any) -> Callable[[Any], tuple[Any, Any]]:
        if not is_watched(args):
            changes, launch = to_change(args, fits), launcher(kind, compute, opts).for_one_kind()

            def launched(args: Any) -> tuple[Any, Any]:
                if forward_ad._current_level >= 0:
                    _refuse_tangents(args)
                return launch(fitted(args, changes))

            return launched
        node = operators.in_place(operator)

        def run(args: Any) -> tuple[Any, Any]:
            if forward_ad._current_level >= 0:
                _refuse_tangents(args)
            flat = _seen(args, fits)
            if flat[place] is None and (made := output(args, opts)):
                flat[place] = operators.allocate(made, args[0])
            node(kind(*flat), opts, platform)
            return flat[place], getattr(args, pool) if writes(opts) else None

        return run

    return prepare


def _refuse_tangents(args: Sequence[Any]) -> None:
    """Refuse tensors of forward mode, whose derivative the call would silently drop."""
    if any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args):
        raise NotImplementedError("there is no forward mode")


def signature(args: Sequence[Any]) -> list[Any] | None:
    """The properties that tell launches apart; None where the call has to be an operator, or is wrong."""
    return None if is_watched(args) else kinds(args)


def to_change(args: Sequence[Any], fits: Sequence[Callable | None]) -> list[tuple[int, torch.Tensor | None]]:
    """Which of args like these kernels cannot take as they are: constants, with their tensors, and what is no fit."""
    return [
        (i, constant(x, args[0]) if isinstance(x, np.ndarray) else None)
        for i, (x, fit) in enumerate(zip(args, fits, strict=True))
        if x is not None and fit and (isinstance(x, np.ndarray) or not fit(x))
    ]


def fitted(args: Sequence[Any], changes: list[tuple[int, torch.Tensor | None]]) -> list[Any]:
    """The tensors that kernels take."""
    flat = list(args)
    for i, made in changes:
        flat[i] = flat[i].contiguous() if made is None else made
    return flat


def _seen(args: Sequence[Any], fits: Sequence[Callable | None]) -> list[Any]:
    """The tensors that the operator takes, for a call that PyTorch traces or transforms (:func:`is_watched`).

    Raises:
        UnnamedError: an argument is a DTensor; PyTorch would say that the operator has no sharding strategy.
    """
    if any(type(x).__name__ == "DTensor" for x in args):
        raise UnnamedError(
            "got a DTensor; expected each rank's own heads or sequences, x.to_local() of every argument, and "
            "DTensor.from_local(...) of the output; where tokens are sharded, see keraunos.distributed"
        )
    return fitted(args, to_change(args, fits))
