"""`keraunos bench`: check every implementation of an operation against the reference, then time them side by side."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from keraunos.cli.console import plain
from keraunos.text import pairs


def bench(
    operation: Annotated[str, typer.Argument(metavar="OP", help="lightning_attention, gla_attention or attention.")],
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B,T,H[,K[,V]]", help="Sizes; several in one value, between spaces, or the option several times."
        ),
    ] = None,
    forward: Annotated[bool, typer.Option("--forward", help="Only forward (unless --backward is there too).")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Only forward plus backward (likewise).")] = False,
    dtype: Annotated[str, typer.Option(help="Of all arrays: bfloat16, float16 or float32.")] = "bfloat16",
    variant: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Of attention: causal, plain, window, special, shared, shared-window, shared-special.",
        ),
    ] = "",
    against: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Compare with these: fla (the package fla-core), cudnn, sdpa, or platforms."
        ),
    ] = "",
    platform: Annotated[
        str, typer.Option(metavar="NAME,...", help="Only these platforms of ours. [default: all]")
    ] = "",
    seconds: Annotated[float, typer.Option(min=0, help="Timing of one shape ends after about this long.")] = 4.0,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each contestant is timed, at most.")] = 20,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw time over floor there, as .png.")] = None,
) -> None:
    """Check every implementation against the float64 reference, then time all of them in turns.

    Each platform is called through each framework that it takes. One that is wrong is not timed. The floor is the time
    in which the device copies as many bytes as the operation must move, or does as many products as softmax attention
    must, measured in the same run. Variants of attention: a window of 1,024, special, which is a soft cap with sinks
    and segment ids, and shared, where 8 heads share their keys; all but plain are causal. Exits with 1 if an
    implementation was wrong.
    """
    # JAX would take most of a GPU's memory for itself, and PyTorch is measured beside it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from keraunos.bench import contestants, measuring, report, workloads

    console = plain()
    peers = _names(against)
    try:
        stages = [False] * (forward or not backward) + [True] * (backward or not forward)
        default = ["1,8192,64"] if not shapes and measuring.on_gpu() else ["1,1024,4,64"]
        parsed = [workloads.Shape.parse(text) for value in shapes or default for text in value.split()]
        if not parsed:
            raise ValueError("--shapes has none; expected B,T,H or B,T,H,K or B,T,H,K,V, such as 1,8192,64,128")
        work = [
            workloads.Workload(operation, shape, dtype, stage, name)
            for shape in parsed for name in _names(variant) or [""] for stage in stages
        ]
        found = contestants.find(operation, _names(platform), peers)
        if plot is not None:
            report.check_plot(plot)
        if not measuring.backends():
            raise ValueError("neither jax nor torch can be imported")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with console.status("Measuring the copy bandwidth") as status:
        bandwidth = measuring.copy_bandwidth()
        results: dict[str, Any] = {"about": {**report.about(), "copy_bandwidth": bandwidth}, "cases": []}
        told: set[tuple[str, str]] = set()
        device = results["about"]["device"]
        console.print(f"{device}: copies {bandwidth / 1e9:.4g} GB/s, read plus written\n")
        effort = measuring.Effort(rounds=rounds, seconds=seconds)
        for workload in work:
            case = measuring.measure(workload, found, bandwidth, effort, lambda text: status.update(text))
            results["cases"].append(case)
            console.print(report.show(case, peers, told))
            if as_json is not None:
                # After each, so that a run that is stopped keeps what it has.
                report.write(as_json, results)
    console.print("Columns:")
    console.print(pairs((name, text) for name, text in report.LEGEND.items() if peers or name != "vs"))
    if plot is not None:
        report.plot(results, plot)
    if any(c.get("wrong") for case in results["cases"] for c in case["contestants"].values()):
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
