"""`keraunos explain`: what a call would get, and why nothing else."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keraunos.cli import calls
from keraunos.cli.console import fields, plain
from keraunos.text import pairs, printable

if TYPE_CHECKING:
    from keraunos.ops.invocation import Invocation
    from keraunos.ops.kernel import Kernel


def explain(
    operation: calls.OperationName,
    shape: calls.Shapes = None,
    case: calls.Cases = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of query, key and value, where a shape has none. [default: bfloat16]")
    ] = None,
    framework: calls.Framework = None,
    platform: Annotated[str, typer.Option(help="The platform that the call asks for.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell which platform and configuration a call would get on this machine's device, and why none of the others.

    Nothing is launched, measured or stored. Exits with 1 if no platform can run a call.
    """
    entry = calls.find_operation(operation)
    kernel, known = entry.kernel, entry.cases
    wanted = calls.collect(known, shape, case)
    if not wanted:
        raise typer.BadParameter("expected --shape or --case: which call", param_hint="--shape")
    framework = calls.find_framework(framework)
    given = {} if dtype is None else {"dtype": dtype}
    described = {name: calls.describe(kernel, framework, name, {**given, **sizes}) for name, sizes in wanted.items()}
    try:
        reports = [_examine(kernel, name, inv, platform) for name, inv in described.items()]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps({"operation": operation, "framework": framework, "explained": reports}, indent=1))
    for report in () if as_json else reports:
        _show(operation, framework, report)
    if any(report["platform"] is None for report in reports):
        raise typer.Exit(1)


def _examine(kernel: "Kernel", name: str, inv: "Invocation", platform: str) -> dict[str, Any]:
    """Everything that the command shows of a call; raises ValueError if a name is unknown."""
    from keraunos.ops.executor import default_executor
    from keraunos.ops.invocation import UnsupportedError

    report: dict[str, Any] = {"case": name, "device": inv.device, "platform": None, "tier": None, "config": None,
                              "key": None, "tiers": {}}
    try:
        choice = default_executor().chain.choose(kernel, inv, None, platform, measure=False)
        report |= {"platform": choice.platform, "tier": choice.tier, "config": choice.cfg.to_json(), "key": choice.key,
                   "tiers": choice.missed}
    except UnsupportedError as error:
        report["error"] = str(error)
    return {**report, "platforms": _platforms(inv, platform, report["platform"])}


def _platforms(inv: "Invocation", asked: str, taken: str | None) -> dict[str, str]:
    """Each platform's answer to the call, best first."""
    from keraunos.kernels import kernel_registry
    from keraunos.ops.invocation import Platform

    answers = {}
    for name in kernel_registry.platforms(inv.op_id):
        found = [row.unsupported(inv) for row in kernel_registry.rows(inv.op_id) if row.platform == name]
        reasons = "; and ".join(dict.fromkeys(filter(None, found)))
        if name == taken:
            answers[name] = "taken"
        elif None not in found:
            answers[name] = reasons
        elif asked not in (name, Platform.AUTO):
            answers[name] = f"can run it; the call asks for {asked}"
        else:
            answers[name] = f"can run it if it is asked for by name; {reasons or f'{taken} comes first'}"
    return answers


def _show(operation: str, framework: str, report: dict[str, Any]) -> None:
    console = plain()
    console.print(f"{operation} {report['case']} through {framework} on {report['device']}", style="bold")
    console.print()
    if "error" in report:
        console.print(printable(report["error"]))
    else:
        about = {"platform": report["platform"], "configuration": fields(report["config"]), "from": report["tier"]}
        console.print(pairs(about.items()))
    console.print("\nPlatforms, best first:")
    console.print(pairs(report["platforms"].items(), chosen=report["platform"]))
    if report["tier"]:
        console.print("\nWhere a configuration is looked for, in this order:")
        tiers = {**report["tiers"], report["tier"]: fields(report["config"])}
        console.print(pairs(tiers.items(), chosen=report["tier"]))
        console.print("\nKey:")
        # In one piece, to be copied.
        console.print(printable(report["key"]), soft_wrap=True)
    console.print()
