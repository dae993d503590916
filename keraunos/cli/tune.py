"""`keraunos tune`: measure the candidates of an operation ahead of time, and remember the winners."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keraunos.cli import calls
from keraunos.cli.console import fields, plain
from keraunos.text import pairs, printable

if TYPE_CHECKING:
    from keraunos.ops.invocation import Invocation
    from keraunos.ops.kernel import Kernel


def tune(
    operation: calls.OperationName,
    shape: calls.Shapes = None,
    cases: Annotated[bool, typer.Option("--cases", help="All shapes of real models.")] = False,
    case: calls.Cases = None,
    backward: Annotated[bool, typer.Option("--backward", help="Time and check forward plus backward.")] = False,
    budget: Annotated[
        float, typer.Option(help="Seconds for each shape; the heuristic's configuration is waited for.")
    ] = 60.0,
    framework: calls.Framework = None,
    platform: Annotated[str, typer.Option(help="The platform to tune.")] = "auto",
    ship: Annotated[bool, typer.Option("--ship", help="Store the winners in the package too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure all candidates for some shapes, store the winners in the user's cache, and show every time."""
    entry = calls.find_operation(operation)
    kernel, known = entry.kernel, entry.cases
    wanted = calls.collect(known, shape, [*(known if cases else ()), *(case or ())])
    if not wanted:
        raise typer.BadParameter("expected --shape, --case or --cases: what to tune for", param_hint="--shape")
    framework = calls.find_framework(framework)
    invocations = {name: calls.describe(kernel, framework, name, sizes) for name, sizes in wanted.items()}
    if not budget > 0:
        raise typer.BadParameter(f"{budget} is not a positive number of seconds", param_hint="--budget")
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


def _tune(kernel: "Kernel", name: str, inv: "Invocation", platform: str, backward: bool, budget: float,
          ship: bool) -> dict[str, Any]:
    from keraunos.kernels import kernel_registry
    from keraunos.ops.cache import PersistentCache, cache_key
    from keraunos.ops.cache import ship as store_in_package
    from keraunos.ops.invocation import UnsupportedError
    from keraunos.ops.tuner import Tuner

    try:
        row, _ = kernel_registry.choose(inv, platform)
    except UnsupportedError as error:
        return {"case": name, "stored": False, "error": str(error)}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--platform") from None
    try:
        result = Tuner(budget=budget).tune(kernel, inv, kernel.candidate_cfgs(inv, row), backward=backward)
    except Exception as error:
        # Such as too little memory for the inputs: the other shapes are tuned all the same.
        return {"case": name, "stored": False, "error": f"{type(error).__name__}: {error}"}
    key, entry = cache_key(inv, row), result.to_json()
    report = {"case": name, "key": key, "platform": row.platform, **entry, "stored": False}
    if result.winner is not None:
        stored = PersistentCache("configurations").put(key, inv.device, entry)
        report["stored"] = stored and (not ship or store_in_package(key, inv.device, entry))
    return report


def _show(report: dict[str, Any]) -> None:
    from rich.table import Table

    console = plain()
    if "error" in report:
        console.print(printable(f"{report['case']}: {report['error']}", keep="\n"))
        return
    timed = [found for found in report["measurements"] if "microseconds" in found]
    table = Table(title=f"{report['case']} on {report['platform']}", title_justify="left", title_style="bold")
    for column in ("configuration", "median µs", "quartiles µs", "rounds", ""):
        table.add_column(column, justify="left" if column in ("configuration", "") else "right", overflow="fold")
    for found in sorted(timed, key=lambda found: found["microseconds"]["median"]):
        times, chosen = found["microseconds"], found["config"] == report["winner"]
        quartiles = f"{times['quartile_1']:.1f} to {times['quartile_3']:.1f}"
        table.add_row(fields(found["config"]), f"{times['median']:.1f}", quartiles, str(found["rounds"]),
                      "chosen" if chosen else "", style="bold" if chosen else None)
    if timed:
        console.print(table)
    dropped = [found for found in report["measurements"] if "microseconds" not in found]
    if dropped:
        console.print("Dropped:")
        console.print(pairs((fields(found["config"]), found["dropped"]) for found in dropped))
    console.print(report["note"] if report["stored"] else f"not stored: {report['note']}")
