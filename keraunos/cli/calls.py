"""Calls described by their sizes, as the options of `bench`, `explain` and `tune` give them."""

import importlib.util
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from keraunos.ops.family import Operation

_LARGEST = 2**31 - 1

OperationName = Annotated[str, typer.Argument(metavar="OP", help="A public function, such as gla_attention.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", help="A call's sizes, such as B=1,T=2048,H=8,K=64,gate=scalar,dtype=float32. May be repeated."
    ),
]
Cases = Annotated[list[str] | None, typer.Option("--case", help="The shape of a real model, by name. May be repeated.")]
Framework = Annotated[str | None, typer.Option(help="jax or torch; the first that is installed.")]


def operations() -> "list[Operation]":
    """The operations that take a call described by its sizes."""
    # Loads NumPy, which a command's help does not need.
    from keraunos.kernels import kernel_registry

    return [operation for operation in kernel_registry.operations.values() if not operation.like]


def find_operation(name: str) -> "Operation":
    """An operation by its public function's name, or by that in keys of configurations."""
    known = operations()
    for operation in known:
        if name in (operation.function, operation.name):
            return operation
    names = ", ".join(operation.function for operation in known)
    raise typer.BadParameter(f"{name!r} is none of {names}", param_hint="OP")


def find_framework(asked: str | None) -> str:
    """The framework that was asked for, or else the first that is installed."""
    names = ("jax", "torch") if asked is None else (asked,)
    for name in names:
        if name not in ("jax", "torch"):
            raise typer.BadParameter(f"{name!r} is none of jax, torch", param_hint="--framework")
        if importlib.util.find_spec(name):
            return name
    raise typer.BadParameter(f"not installed: {', '.join(names)}", param_hint="--framework")


def collect(
    known: Mapping[str, dict[str, Any]], shapes: list[str] | None, cases: list[str] | None
) -> dict[str, dict[str, Any]]:
    """The sizes that the options name, by what the user called them."""
    calls = {text: _sizes(text) for text in shapes or ()}
    for name in cases or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(map(repr, known))}", param_hint="--case")
        calls[name] = known[name]
    return calls


def describe(kernel: Any, framework: str, name: str, sizes: dict[str, Any]) -> Any:
    """The description of the call that has these sizes; ``name`` is what messages call it."""
    try:
        _check(kernel, sizes)
        return kernel.invocation(framework, **sizes)
    except (TypeError, ValueError, ImportError, MemoryError) as error:
        raise typer.BadParameter(f"{name}: {error}") from None


def _sizes(text: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise typer.BadParameter(f"{part!r}: expected NAME=VALUE, such as T=2048", param_hint="--shape")
        if name in sizes:
            raise typer.BadParameter(f"{text!r} has {name} twice", param_hint="--shape")
        sizes[name] = _value(value)
    return sizes


def _value(text: str) -> Any:
    if text.isascii() and text.isdecimal():
        # Python refuses to read numbers of thousands of digits; as text they are refused, too.
        return int(text) if len(text) < 100 else text
    return {"true": True, "false": False}.get(text.lower(), text)


def _check(kernel: Any, sizes: dict[str, Any]) -> None:
    """Check that all that a call needs is there, and nothing else.

    Raises:
        ValueError: something is missing, unknown or of the wrong kind.
    """
    known = dict(inspect.signature(kernel.invocation).parameters)
    del known["framework"]
    for name, value in sizes.items():
        if name not in known:
            raise ValueError(f"{kernel.op_id} has no {name}; it has {', '.join(known)}")
        default = known[name].default
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; expected true or false")
        if (name.isupper() or type(default) is int) and not (type(value) is int and value <= _LARGEST):
            raise ValueError(f"{name} is {value!r}; expected a whole number up to {_LARGEST}")
    missing = [name for name, parameter in known.items() if parameter.default is parameter.empty and name not in sizes]
    if missing:
        raise ValueError(f"{kernel.op_id} needs {', '.join(missing)} as well")
