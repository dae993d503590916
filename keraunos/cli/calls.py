"""Calls described by their sizes, as the options of `bench`, `explain` and `tune` give them."""

import importlib
import importlib.util
import inspect
from typing import Annotated, Any

import typer

# Operation -> its class, and the module of the shapes of real models.
OPERATIONS = {
    "lightning_attn": ("keraunos.modules.lightning_attention:LightningAttention", "linear_attention"),
    "gla": ("keraunos.modules.gla_attention:GLAttention", "linear_attention"),
    "attention": ("keraunos.modules.attention:Attention", "softmax_attention"),
}
_LARGEST = 2**31 - 1

Operation = Annotated[str, typer.Argument(metavar="OP", help="lightning_attention, gla_attention or attention.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", help="A call's sizes, such as B=1,T=2048,H=8,K=64,gate=scalar,dtype=float32. May be repeated."
    ),
]
Cases = Annotated[list[str] | None, typer.Option("--case", help="The shape of a real model, by name. May be repeated.")]
Framework = Annotated[str | None, typer.Option(help="jax or torch; the first that is installed.")]


def find_operation(name: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    """An operation, and its calls in real models, by name."""
    # The public function's name is good, and the one in keys.
    # Loads NumPy, which a command's help does not need.
    from keraunos.ops.invocation import public_name

    public = {public_name(algorithm): algorithm for algorithm in OPERATIONS}
    name = public.get(name, name)
    if name not in OPERATIONS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(public)}", param_hint="OP")
    target, family = OPERATIONS[name]
    module, _, kernel = target.partition(":")
    cases = importlib.import_module(f"keraunos.kernels.{family}.cases").CASES[name]
    return getattr(importlib.import_module(module), kernel)(), cases


def find_framework(asked: str | None) -> str:
    """The framework that was asked for, or else the first that is installed."""
    names = ("jax", "torch") if asked is None else (asked,)
    for name in names:
        if name not in ("jax", "torch"):
            raise typer.BadParameter(f"{name!r} is none of jax, torch", param_hint="--framework")
        if importlib.util.find_spec(name):
            return name
    raise typer.BadParameter(f"not installed: {', '.join(names)}", param_hint="--framework")


def collect(known: dict[str, dict], shapes: list[str] | None, cases: list[str] | None) -> dict[str, dict[str, Any]]:
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
