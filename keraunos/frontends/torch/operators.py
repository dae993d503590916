"""PyTorch: operations as operators with names and arguments that last, for graphs, transformations and saved programs.

An operator's arguments are tensors, numbers and texts, which every process understands: ``torch.export`` saves them as
they are, and no code of a saved program is run, whoever made it. Arguments of an operator are checked as those of a
call. ``import keraunos.torch_ops`` registers all operators.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from keraunos.frontends import OUTPUT, Operator, for_inference, unfold
from keraunos.frontends.torch.arrays import DTYPES, dtype_name, fitting, rows
from keraunos.frontends.torch.launch import launcher, launchers

# How each kind of option is written in a schema. Texts stand for several names.
_TYPES = {
    float: "float",
    float | None: "float?",
    int: "int",
    int | None: "int?",
    bool: "bool",
    str: "str",
    tuple[str, ...]: "str",
}
_LIBRARY = torch.library.Library("keraunos", "FRAGMENT")
_MOST_KNOWN = 4096

ShapeAndDtype = tuple[tuple[int, ...], str]


class _Plain:
    """An operator's options as its arguments, and back."""

    def __init__(self, operator: Operator):
        hints = typing.get_type_hints(operator.options)
        self.operator, self.kinds = operator, {name: hints[name] for name in operator.plain}
        # The launch configuration is the one option that is a dataclass: two texts, the platform and all else.
        self.config: Any = next((kind for kind in self.kinds.values() if is_dataclass(kind)), None)
        self.launch = {x.name for x in fields(self.config)} - {"platform", "backend"} if self.config else set()
        self.schema = ", ".join(
            "str platform, str launch" if kind is self.config else f"{_TYPES[kind]} {name}"
            for name, kind in self.kinds.items()
        )
        self.count = len(self.kinds) + (self.config is not None)
        self.of = functools.lru_cache(maxsize=_MOST_KNOWN)(self._of)
        self._read = functools.lru_cache(maxsize=_MOST_KNOWN)(self._made)

    def _of(self, opts: Any, platform: str) -> tuple[Any, ...]:
        """The arguments; the platform is the one that computes, whatever the configuration says."""
        values: list[Any] = []
        for name, kind in self.kinds.items():
            value = getattr(opts, name)
            if kind is self.config:
                set_ = {x: getattr(value, x) for x in self.launch}
                values += str(platform), " ".join(f"{x}={n}" for x, n in sorted(set_.items()) if n is not None)
            else:
                values.append(" ".join(value) if kind == tuple[str, ...] else value)
        return tuple(values)

    def read(self, values: Sequence[Any]) -> Any:
        """The options of such arguments.

        Raises:
            ValueError: a text is none that :meth:`of` writes.
        """
        return self._read(*values)

    def _made(self, *values: Any) -> Any:
        found, given = dict(self.operator.fixed), iter(values)
        for name, kind in self.kinds.items():
            value = next(given)
            if kind is self.config:
                found[name] = self.config.from_json({"platform": value, **self._launch(next(given))})
            elif kind == tuple[str, ...]:
                found[name] = tuple(value.split())
                if unknown := set(found[name]) - set(self.operator.gradients):
                    self._fail(name, value, f"names of {', '.join(self.operator.gradients)}, not {sorted(unknown)}")
            else:
                found[name] = value
        return self.operator.options(**found)

    def _launch(self, text: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in text.split():
            name, _, value = part.partition("=")
            if name not in self.launch or name in found or not (value.isascii() and value.isdecimal()):
                self._fail("launch", text, "such as 'block_q=64 num_warps=4'")
            found[name] = int(value)
        return found

    def _fail(self, name: str, got: str, wanted: str) -> typing.NoReturn:
        raise ValueError(f"keraunos::{self.operator.name}: {name} is {got!r}; expected {wanted}")


class Residuals(NamedTuple):
    """The tensors that a platform's forward keeps for its backward."""

    shared: int  # the outputs themselves, from the first
    own: tuple[Callable, ...]  # of the others: (args, opts) -> shape and dtype, None: there is none

    @classmethod
    def of(cls, forward: Callable) -> Residuals:
        """See :func:`keraunos.frontends.torch.differentiable`."""
        given = getattr(forward, "residuals", {}).values()
        own = tuple(shape for shape in given if shape is not OUTPUT)
        return cls(len(given) - len(own), own)


class Differentiable:
    """The operators of an operation that has a gradient.

    Attributes:
        forward: ``(*arrays, *options) -> (output, final state, residuals)``.
        backward: ``(*arrays, residuals, doutput, dfinal_state, *options) -> gradients`` of those that can have one.
    """

    def __init__(self, operator: Operator):
        self.operator, self.plain = operator, _Plain(operator)
        self.fits = fitting(operator.args._fields)
        self.n = len(operator.fields)
        arrays = _arrays(operator)
        self._forward = _define(
            operator.name, f"({arrays}, {self.plain.schema}) -> (Tensor, Tensor, Tensor[])",
            self._run_forward, self._traced_forward, lambda *x, **_: operator.flops(self._shapes(x))[0],
        )
        self._backward = _define(
            f"{operator.name}_backward",
            f"({arrays}, Tensor[] residuals, Tensor doutput, Tensor? dfinal_state, {self.plain.schema})"
            f" -> ({', '.join(['Tensor'] * len(operator.gradients))})",
            self._run_backward, self._traced_backward, lambda *x, **_: operator.flops(self._shapes(x))[1],
        )
        rules: tuple[tuple[Any, Callable, Callable, Callable], ...] = (
            (self._forward, self._save, self._gradient, self._fold_forward),
            (self._backward, lambda ctx, inputs, output: None, self._second, self._fold_backward),
        )
        for op, save, gradient, fold in rules:
            torch.library.register_autograd(op, gradient, setup_context=save, lib=_LIBRARY)
            torch.library.register_vmap(op, fold, lib=_LIBRARY)
        self._transformed_forward, self._transformed_backward = self._transformed()

    def forward(self, arrays: Sequence[Any], opts: Any, platform: str) -> tuple[Any, Any]:
        """The output and the final state of the call; an absent one is a tensor of bytes without any."""
        given = (*arrays, *self.plain.of(opts, platform))
        if torch._C._are_functorch_transforms_active():
            return self._transformed_forward.apply(*given)[:2]
        return self._forward(*given)[:2]

    def backward(self, arrays: Sequence[Any], residuals: list, grads: Sequence[Any], values: tuple) -> list[Any]:
        """The gradients of the arrays, in their order; None of those that have none."""
        residuals = [allocate(None, arrays[0]) if x is None else x for x in residuals]
        if torch._C._are_functorch_transforms_active():
            found = self._transformed_backward.apply(*arrays, *residuals, *grads, *values)
        else:
            found = self._backward(*arrays, residuals, *grads, *values)
        by_name = dict(zip(self.operator.gradients, map(absent, found), strict=True))
        return [by_name.get(name) for name in self.operator.fields]

    def _transformed(self) -> tuple[Any, Any]:
        """The classes that ``torch.func`` differentiates: it takes no operator, and no lists."""
        n, values, forward, backward = self.n, self.plain.count, self._forward, self._backward

        def run_forward(*given: Any) -> tuple[torch.Tensor, ...]:
            output, state, residuals = forward(*given)
            return output, state, *residuals

        def run_backward(*given: Any) -> Any:
            end = len(given) - values
            return backward(*given[:n], list(given[n : end - 2]), *given[end - 2 :])

        class Forward(torch.autograd.Function):
            generate_vmap_rule = True
            forward = staticmethod(run_forward)
            setup_context = staticmethod(
                lambda ctx, inputs, output: self._save(ctx, inputs, (*output[:2], list(output[2:])))
            )
            backward = staticmethod(self._gradient)

        class Backward(torch.autograd.Function):
            generate_vmap_rule = True
            forward = staticmethod(run_backward)
            setup_context = staticmethod(lambda ctx, inputs, output: None)
            backward = staticmethod(self._second)

        return Forward, Backward

    # What PyTorch asks.

    def _args(self, arrays: Sequence[Any]) -> Any:
        return self.operator.args(**dict(zip(self.operator.fields, arrays, strict=True)))

    def _shapes(self, given: Sequence[Any]) -> Any:
        return self._args(given[: self.n])

    def _wanted(self, args: Any, opts: Any) -> list[Any]:
        """Of the arrays that can have a gradient, those that one is wanted of; None in place of the others."""
        return [None if name in opts.constant else getattr(args, name) for name in self.operator.gradients]

    def _residuals(self, args: Any, opts: Any) -> list[ShapeAndDtype | None]:
        forward, _ = self.operator.passes(opts.cfg.platform)
        return [shape(args, opts) for shape in Residuals.of(forward).own] if getattr(opts, "kept", True) else []

    def _traced_forward(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        args, opts = self._args(given[: self.n]), self.plain.read(given[self.n :])
        output, state = (allocate(made, args[0]) for made in self.operator.outputs(args, opts))
        return output, state, [allocate(made, args[0]) for made in self._residuals(args, opts)]

    def _run_forward(self, *given: Any) -> tuple[Any, ...]:
        args, opts = self._args(given[: self.n]), self.plain.read(given[self.n :])
        _check(self.operator, args, opts)
        passes = self.operator.passes(opts.cfg.platform)
        made = launchers(self.operator.args, *passes, opts)[0](_fit(args, self.fits))
        outputs = [allocate(None, args[0]) if x is None else x for x in made[:2]]
        kept = made[2 + Residuals.of(passes[0]).shared :]
        shapes = self._residuals(args, opts)
        return *outputs, [_within(x, shape, args[0]) for x, shape in zip(kept, shapes, strict=False)]

    def _traced_backward(self, *given: Any) -> tuple[torch.Tensor, ...]:
        args, opts = self._args(given[: self.n]), self.plain.read(given[-self.plain.count :])
        return tuple(allocate(x if x is None else (x.shape, dtype_name(x)), args[0]) for x in self._wanted(args, opts))

    def _run_backward(self, *given: Any) -> tuple[torch.Tensor, ...]:
        args, opts = self._args(given[: self.n]), self.plain.read(given[-self.plain.count :])
        residuals, doutput, dstate = given[self.n : self.n + 3]
        dstate = absent(dstate)
        _check(self.operator, args, opts)
        self._check_backward(args, residuals, doutput, dstate, opts)
        passes = self.operator.passes(opts.cfg.platform)
        flat = [*_fit(args, self.fits), *map(absent, residuals), rows(doutput),
                dstate if dstate is None else dstate.contiguous()]
        found = self.operator.args(*launchers(self.operator.args, *passes, opts)[1](flat))
        grads = (getattr(found, name) for name in self.operator.gradients)
        return tuple(allocate(None, args[0]) if x is None else x for x in grads)

    def _check_backward(self, args: Any, residuals: Sequence[torch.Tensor], doutput: torch.Tensor | None,
                        dstate: torch.Tensor | None, opts: Any) -> None:
        """Check the arguments that only the operator has; anyone may call an operator with anything."""
        shared = Residuals.of(self.operator.passes(opts.cfg.platform)[0]).shared
        output, state = self.operator.outputs(args, opts)
        wanted = [output, state, *[output] * shared, *self._residuals(args, opts)]
        given = [doutput, dstate, *residuals]
        for x, shape in zip(given, wanted, strict=len(given) == len(wanted)):
            if x is not None and x.dtype != torch.uint8 and (shape is None or _shape(x) != (tuple(shape[0]), shape[1])):
                raise ValueError(f"keraunos::{self.operator.name}_backward: got {_shape(x)}; expected {shape}")
        if len(given) != len(wanted):
            raise ValueError(f"keraunos::{self.operator.name}_backward: got {len(residuals)} residuals;"
                             f" expected {len(wanted) - 2}")

    def _save(self, ctx: Any, inputs: tuple, output: tuple) -> None:
        arrays, values = inputs[: self.n], inputs[self.n :]
        opts = self.plain.read(values)
        for name, needed in zip(self.operator.fields, ctx.needs_input_grad, strict=False):
            if needed and (name in opts.constant or not getattr(opts, "kept", True)):
                raise RuntimeError(f"keraunos::{self.operator.name}: {name} requires a gradient; the graph was made"
                                   " for one that does not")
        shared = Residuals.of(self.operator.passes(opts.cfg.platform)[0]).shared
        ctx.save_for_backward(*arrays, *output[:shared], *output[2])
        ctx.values, ctx.shape = values, output[0].shape
        ctx.set_materialize_grads(False)

    def _gradient(self, ctx: Any, doutput: torch.Tensor | None, dstate: torch.Tensor | None, *_: Any) -> tuple:
        saved = ctx.saved_tensors
        grads = gradients_of(ctx.shape, saved[0], doutput, dstate)
        found = self.backward(saved[: self.n], list(saved[self.n :]), grads, ctx.values)
        return *found, *[None] * self.plain.count

    def _second(self, ctx: Any, *_: Any) -> typing.NoReturn:
        name = self.operator.name
        raise NotImplementedError(f"keraunos::{name} has no gradient of its gradient (double backward)")

    # torch.vmap.

    def _fold_forward(self, info: Any, in_dims: Sequence[Any], *given: Any) -> tuple[tuple, tuple]:
        arrays, values = given[: self.n], given[self.n :]
        opts, size = self.plain.read(values), info.batch_size
        folded = self._folded(arrays, in_dims, size)
        if folded is None:
            return _one_by_one(self._forward, size, in_dims, given)
        one = self.operator.outputs(self._first(arrays, in_dims), opts)
        # A larger batch may be cut in other pieces: the backward makes its residuals itself.
        outputs = self._forward(*folded, *self.plain.of(for_inference(opts), opts.cfg.platform))[:2]
        outputs = [x if like is None else unfold(x, size, tuple(like[0]))
                   for x, like in zip(outputs, one, strict=True)]
        residuals = [allocate(None, given[0]) for _ in self._residuals(self._first(arrays, in_dims), opts)]
        dims = [None if like is None else 0 for like in one]
        return (*outputs, residuals), (*dims, [None] * len(residuals))

    def _fold_backward(self, info: Any, in_dims: Sequence[Any], *given: Any) -> tuple[tuple, tuple]:
        n, size = self.n, info.batch_size
        arrays, values = given[:n], given[n + 3 :]
        opts = self.plain.read(values)
        folded = self._folded(arrays, in_dims, size)
        if folded is None:
            return _one_by_one(self._backward, size, in_dims, given)
        shapes = self.operator.outputs(self._args(folded), opts)
        each = zip(given[n + 1 : n + 3], in_dims[n + 1 : n + 3], shapes, strict=True)
        grads = [_stacked(x, d, size).reshape(shape[0]) if shape and x is not None else x for x, d, shape in each]
        residuals: list[Any] = []
        kept = Residuals.of(self.operator.passes(opts.cfg.platform)[0])
        if kept.shared or kept.own:
            made = self._forward(*folded, *values)
            residuals = [*made[: kept.shared], *made[2]]
        found = self._backward(*folded, residuals, *grads, *values)
        one = self._wanted(self._first(arrays, in_dims), opts)
        found = [x if like is None else unfold(x, size, tuple(like.shape))
                 for x, like in zip(found, one, strict=True)]
        return tuple(found), tuple(None if like is None else 0 for like in one)

    def _first(self, arrays: Sequence[Any], in_dims: Sequence[Any]) -> Any:
        """The arrays of one call."""
        return self._args([x if d is None else x.select(d, 0) for x, d in zip(arrays, in_dims, strict=False)])

    def _folded(
        self, arrays: Sequence[torch.Tensor | None], in_dims: Sequence[Any], size: int
    ) -> tuple[Any, ...] | None:
        """The arrays of one call that does what ``size`` calls would; None: there is none."""
        stacked = [None if x is None else _stacked(x, d, size) for x, d in zip(arrays, in_dims, strict=False)]
        args = self.operator.fold(self._args(stacked), size)
        return None if args is None else tuple(getattr(args, name) for name in self.operator.fields)


class InPlace:
    """The operator of an operation that changes some of its arrays, and returns nothing."""

    def __init__(self, operator: Operator):
        self.operator, self.plain = operator, _Plain(operator)
        self.n = len(operator.fields)
        self.op = _define(
            operator.name, f"({_arrays(operator)}, {self.plain.schema}) -> ()", self._run, lambda *given: None,
            lambda *x, **_: operator.flops(self._args(x[: self.n]))[0],
        )

    def __call__(self, args: Any, opts: Any, platform: str) -> None:
        """Run the call."""
        arrays = [getattr(args, name) for name in self.operator.fields]
        self.op(*(x if x is None else x.detach() for x in arrays), *self.plain.of(opts, platform))

    def _args(self, arrays: Sequence[Any]) -> Any:
        return self.operator.args(**dict(zip(self.operator.fields, arrays, strict=True)))

    def _run(self, *given: Any) -> None:
        args, opts = self._args(given[: self.n]), self.plain.read(given[self.n :])
        _check(self.operator, args, opts)
        (compute,) = self.operator.passes(opts.cfg.platform)
        launcher(self.operator.args, compute, opts)(_fit(args, fitting(args._fields, self.operator.strided)))


@functools.cache
def differentiable(operator: Operator) -> Differentiable:
    """The operators of an operation, registered at the first call."""
    return Differentiable(operator)


@functools.cache
def in_place(operator: Operator) -> InPlace:
    """The operator of an operation that changes arrays, registered at the first call."""
    return InPlace(operator)


def register(operator: Operator) -> None:
    """Register the operators of an operation."""
    (in_place if operator.changed else differentiable)(operator)


def _arrays(operator: Operator) -> str:
    """The tensors of a schema."""
    letters = dict(zip(operator.changed, "abc", strict=False))
    return ", ".join(
        f"Tensor{f'({letters[x]}!)' if x in letters else ''}{'' if x in operator.required else '?'} {x}"
        for x in operator.fields
    )


def _define(name: str, schema: str, fn: Callable, traced: Callable, flops: Callable) -> Callable:
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"keraunos::{name}", traced, lib=_LIBRARY)
    packet = getattr(torch.ops.keraunos, name)
    flop_counter.register_flop_formula(packet)(flops)
    for mode in _get_current_dispatch_mode_stack():
        # One that counts already knows the formulas that were there when it was made.
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):
            counter.flop_registry.setdefault(packet, flop_counter.flop_registry[packet])
    return packet.default


_checked: dict[Any, None] = {}


def _check(operator: Operator, args: Any, opts: Any) -> None:
    """Raise what the call would: graphs hold what was checked when they were made, but anyone may write one."""
    key = (operator, opts, *[x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in args])
    if key in _checked:
        return
    operator.check(args, opts)
    if len(_checked) >= _MOST_KNOWN:
        _checked.clear()
    _checked[key] = None


def _fit(args: Sequence[Any], fits: Sequence[Callable | None]) -> list[Any]:
    """The tensors as kernels take them: the strides of a graph's tensors need not be those that it was made for."""
    return [x if x is None or fit is None or fit(x) else x.contiguous() for x, fit in zip(args, fits, strict=True)]


def _stacked(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _one_by_one(op: Callable, size: int, in_dims: Sequence[Any], given: Sequence[Any]) -> tuple[Any, Any]:
    """The operator for each element of ``torch.vmap``'s axis."""

    def of(x: Any, d: Any, i: int) -> Any:
        if isinstance(x, list):
            return [of(y, e, i) for y, e in zip(x, d, strict=True)]
        return x if d is None else x.select(d, i)

    def stacked(*parts: Any) -> Any:
        return [stacked(*x) for x in zip(*parts, strict=True)] if isinstance(parts[0], list) else torch.stack(parts)

    # Of a list of numbers, which is no tensors', the dimensions are one None each or for all.
    dims = [None if isinstance(x, list) and not any(isinstance(y, torch.Tensor) for y in x) else d
            for x, d in zip(given, in_dims, strict=True)]
    calls = [op(*(x if d is None else of(x, d, i) for x, d in zip(given, dims, strict=True))) for i in range(size)]
    outputs = tuple(stacked(*x) for x in zip(*calls, strict=True))
    return outputs, tuple([0] * len(x) if isinstance(x, list) else 0 for x in outputs)


def gradients_of(
    shape: tuple[int, ...], like: torch.Tensor, doutput: Any, dstate: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of outputs as kernels take them: in rows; that of the state may be absent."""
    if doutput is None:
        doutput = torch.zeros(shape, dtype=like.dtype, device=like.device)
    return rows(doutput), dstate if dstate is None else dstate.contiguous()


def allocate(made: ShapeAndDtype | None, like: torch.Tensor) -> torch.Tensor:
    """A tensor of a shape and dtype. Operators return tensors only: an empty vector of bytes stands for None."""
    shape, dtype = made or ((0,), "uint8")
    return torch.empty(shape, dtype=DTYPES[dtype], device=like.device)


def _within(x: torch.Tensor | None, made: ShapeAndDtype | None, like: torch.Tensor) -> torch.Tensor:
    """A residual in memory of its full size, of which it may take the beginning."""
    if x is not None and (made is None or tuple(x.shape) == tuple(made[0])):
        return x
    whole = allocate(made, like)
    if x is not None:
        whole[: len(x)] = x
    return whole


def absent(x: torch.Tensor | None) -> torch.Tensor | None:
    """None in place of what stands for it."""
    return None if x is None or x.dtype == torch.uint8 else x


def _shape(x: torch.Tensor) -> ShapeAndDtype:
    return tuple(x.shape), dtype_name(x)
