"""`keraunos bench`: check one call, then time it."""

from typing import Annotated

import typer

from keraunos.cli import calls
from keraunos.cli.console import fields, plain
from keraunos.text import pairs, printable


def bench(
    operation: calls.OperationName,
    shape: Annotated[
        str, typer.Option(help="The call's sizes, such as B=1,T=2048,H=8,K=64,gate=scalar,dtype=float32.")
    ],
    framework: calls.Framework = None,
    platform: Annotated[str, typer.Option(help="The platform that the call asks for.")] = "auto",
    backward: Annotated[bool, typer.Option("--backward", help="Check and time forward plus backward.")] = False,
) -> None:
    """Time one call on random inputs, after small calls of its kind were compared with the float64 reference.

    Nothing is tuned or stored. Exits with 1 if no platform can run the call, or if a result is wrong.
    """
    entry = calls.find_operation(operation)
    kernel, known = entry.kernel, entry.cases
    (sizes,) = calls.collect(known, [shape], None).values()
    framework = calls.find_framework(framework)
    inv = calls.describe(kernel, framework, shape, sizes)
    from keraunos.ops.executor import default_executor
    from keraunos.ops.invocation import UnsupportedError
    from keraunos.ops.tuner import Tuner

    console = plain()
    try:
        choice = default_executor().chain.choose(kernel, inv, None, platform, measure=False)
    except UnsupportedError as error:
        console.print(printable(error))
        raise typer.Exit(1) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        (found,) = Tuner().tune(kernel, inv, [choice.cfg], backward=backward).measurements
        wrong = found.dropped
    except Exception as error:
        # Such as too little memory for the inputs.
        wrong = f"{type(error).__name__}: {error}"
    rows = [("platform", f"{choice.platform} through {framework} on {inv.device}"),
            ("configuration", fields(choice.cfg.to_json())), ("result", wrong or "right")]
    if not wrong:
        times = [f"{1e3 * seconds:.4g}" for seconds in (found.median, *found.quartiles)]
        rows += [("median", f"{times[0]} ms"), ("quartiles", f"{times[1]} to {times[2]} ms")]
    console.print(pairs(rows))
    if wrong:
        raise typer.Exit(1)
