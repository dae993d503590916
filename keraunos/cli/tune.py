"""`keraunos tune`: measure the candidates of an operation ahead of time, and remember the winners."""

import importlib
import importlib.util
import inspect
import json
from typing import Annotated, Any

import typer

# Operation -> its class, and the module of the shapes of real models.
_OPERATIONS = {
    "lightning_attn": ("keraunos.modules.lightning_attention:LightningAttention", "linear_attention"),
    "gla": ("keraunos.modules.gla_attention:GLAttention", "linear_attention"),
    "attention": ("keraunos.modules.attention:Attention", "softmax_attention"),
}


def tune(
    operation: Annotated[str, typer.Argument(metavar="OP", help="lightning_attention, gla_attention or attention.")],
    shape: Annotated[
        list[str] | None,
        typer.Option(help="A call's sizes, such as B=1,T=2048,H=8,K=64,gate=scalar,dtype=float32. May be repeated."),
    ] = None,
    cases: Annotated[bool, typer.Option("--cases", help="All shapes of real models.")] = False,
    case: Annotated[list[str] | None, typer.Option(help="One of these shapes, by name. May be repeated.")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Time and check forward plus backward.")] = False,
    budget: Annotated[
        float, typer.Option(help="Seconds for each shape; the heuristic's configuration is waited for.")
    ] = 60.0,
    framework: Annotated[str | None, typer.Option(help="jax or torch; the first that is installed.")] = None,
    platform: Annotated[str, typer.Option(help="The platform to tune.")] = "auto",
    ship: Annotated[bool, typer.Option("--ship", help="Store the winners in the package too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure all candidates for some shapes, store the winners in the user's cache, and show every time."""
    kernel, known = _operation(operation)
    calls = {text: _sizes(text) for text in shape or ()}
    if cases:
        calls |= known
    for name in case or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(map(repr, known))}", param_hint="--case")
        calls[name] = known[name]
    if not calls:
        raise typer.BadParameter("expected --shape, --case or --cases: what to tune for", param_hint="--shape")
    framework = _framework(framework)
    invocations = {}
    for name, sizes in calls.items():
        try:
            _check(kernel, sizes)
            invocations[name] = kernel.invocation(framework, **sizes)
        except (TypeError, ValueError, ImportError) as error:
            raise typer.BadParameter(f"{name}: {error}") from None
    if not budget > 0:
        raise typer.BadParameter(f"{budget} is no positive number of seconds", param_hint="--budget")
    done = []
    for name, inv in invocations.items():
        report = _tune(kernel, name, inv, platform, backward, budget, ship)
        done.append(report)
        if not as_json:
            _show(report)
    if as_json:
        typer.echo(json.dumps({"operation": operation, "framework": framework, "tuned": done}, indent=1))
    if not all(report.get("stored") for report in done):
        raise typer.Exit(1)


# The public functions' names are good, too.
_PUBLIC = {"lightning_attention": "lightning_attn", "gla_attention": "gla"}


def _operation(name: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    name = _PUBLIC.get(name, name)
    if name not in _OPERATIONS:
        names = ", ".join([*_PUBLIC, "attention"])
        raise typer.BadParameter(f"{name!r} is none of {names}", param_hint="OP")
    target, family = _OPERATIONS[name]
    module, _, kernel = target.partition(":")
    cases = importlib.import_module(f"keraunos.kernels.{family}.cases").CASES[name]
    return getattr(importlib.import_module(module), kernel)(), cases


def _framework(asked: str | None) -> str:
    names = ("jax", "torch") if asked is None else (asked,)
    for name in names:
        if name not in ("jax", "torch"):
            raise typer.BadParameter(f"{name!r} is none of jax, torch", param_hint="--framework")
        if importlib.util.find_spec(name):
            return name
    raise typer.BadParameter(f"not installed: {', '.join(names)}", param_hint="--framework")


def _sizes(text: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise typer.BadParameter(f"{part!r}: expected NAME=VALUE, such as T=2048", param_hint="--shape")
        flags = {"true": True, "false": False}
        sizes[name.strip()] = int(value) if value.strip().isdigit() else flags.get(value.lower(), value.strip())
    return sizes


def _check(kernel: Any, sizes: dict[str, Any]) -> None:
    """Whether all that a call needs is there, and nothing else.

    Raises:
        ValueError: it is not.
    """
    known = dict(inspect.signature(kernel.invocation).parameters)
    del known["framework"]
    for name, value in sizes.items():
        if name not in known:
            raise ValueError(f"{kernel.op_id} has no {name}; it has {', '.join(known)}")
        if name.isupper() and type(value) is not int:
            raise ValueError(f"{name} is {value!r}; expected a whole number")
    missing = [name for name, parameter in known.items() if parameter.default is parameter.empty and name not in sizes]
    if missing:
        raise ValueError(f"{kernel.op_id} needs {', '.join(missing)} as well")


def _tune(kernel, name, inv, platform, backward, budget, ship) -> dict[str, Any]:
    from keraunos.kernels.registry import UnsupportedError, kernel_registry
    from keraunos.ops.cache import PersistentCache, cache_key
    from keraunos.ops.cache import ship as store_in_package
    from keraunos.ops.tuner import Tuner

    try:
        row, _ = kernel_registry.choose(inv, platform)
    except UnsupportedError as error:
        return {"case": name, "stored": False, "error": str(error)}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--platform") from None
    result = Tuner(budget=budget).tune(kernel, inv, kernel.candidate_cfgs(inv, row), backward=backward)
    key, entry = cache_key(inv, row), result.to_json()
    report = {"case": name, "key": key, "platform": row.platform, **entry, "stored": False}
    if result.winner is not None:
        stored = PersistentCache("configurations").put(key, inv.device, entry)
        report["stored"] = stored and (not ship or store_in_package(key, inv.device, entry))
    return report


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if "error" in report:
        console.print(f"{report['case']}: {report['error']}", markup=False)
        return
    table = Table(title=f"{report['case']} on {report['platform']}", title_justify="left")
    for column in ("configuration", "median µs", "quartiles µs", "rounds", ""):
        table.add_column(column, justify="left" if column in ("configuration", "") else "right", overflow="fold")
    for found in sorted(report["measurements"], key=lambda m: m.get("microseconds", {}).get("median", float("inf"))):
        fields = {name: value for name, value in found["config"].items() if name not in ("platform", "backend")}
        cells = [" ".join(f"{name}={value}" for name, value in fields.items())]
        if times := found.get("microseconds"):
            cells += [f"{times['median']:.1f}", f"{times['quartile_1']:.1f} to {times['quartile_3']:.1f}"]
            cells += [str(found["rounds"]), "chosen" if found["config"] == report["winner"] else ""]
        else:
            cells += ["", "", "", f"dropped: {found['dropped']}"]
        table.add_row(*cells)
    console.print(table)
    console.print(report["note"] if report["stored"] else f"not stored: {report['note']}", markup=False)
