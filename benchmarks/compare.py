"""Compare everything that computes an operation, on any shapes: each is checked, then all are timed in turns.

    PYTHONPATH=. python benchmarks/compare.py gla_attention --shapes 1,1024,4,64 --against torch --plot bench.png

Each platform is called through each framework that it takes. One that is wrong is not timed, and the script ends with
status 1. Figures are written only with --out. The floor is the time in which the device copies as many bytes as the
operation must move, or does as many products as softmax attention must, measured in the same run. Variants of
attention: a window of 1,024; special, which is a soft cap with sinks and segment ids; shared, where 8 heads share their
keys. All but plain are causal. Variants of gla_attention: gates per token, and mild ones per dimension, which are
`logsigmoid(normal) / 16`, or x times that; without one they are -0.1 times the square of a normal number.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import harness
import measuring
import output
from contestants import find
from workloads import BYTES, GATES, OPERATIONS, VARIANTS, Shape, Workload

from keraunos.text import pairs


def read(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The options, and their parser for what is found to be wrong later."""
    parser = harness.parser(__doc__ or "", seconds=600.0)
    parser.set_defaults(out=None)
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("--shapes", nargs="+", metavar="B,T,H[,K[,V]]", help="sizes; K is 128 and V is K unless given")
    parser.add_argument("--forward", action="store_true", help="only forward (unless --backward is there too)")
    parser.add_argument("--backward", action="store_true", help="only forward plus backward (likewise)")
    parser.add_argument("--dtype", choices=BYTES, default="bfloat16", help="of all arrays; bfloat16 unless given")
    parser.add_argument("--variants", nargs="+", default=[""], metavar="NAME",
                        help=f"of attention: {', '.join(VARIANTS)}; causal unless given; of gla_attention: "
                        f"{', '.join(filter(None, GATES))}")
    parser.add_argument("--platforms", nargs="+", default=[], metavar="NAME", help="of ours; all unless given")
    parser.add_argument("--against", nargs="+", default=[], metavar="NAME",
                        help="fla (the package fla-core), cudnn, sdpa, or platforms: a column compares with each")
    parser.add_argument("--rounds", type=int, default=20, help="times that each is timed, at most; 20 unless given")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw times over the floor there, as .png")
    return parser, parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; its exit status."""
    parser, options = read(arguments)
    stages = [False] * (options.forward or not options.backward) + [True] * (options.backward or not options.forward)
    try:
        shapes = options.shapes or (["1,8192,64"] if measuring.on_gpu() else ["1,1024,4,64"])
        work = [
            Workload(options.operation, Shape.parse(shape), options.dtype, stage, variant)
            for shape in shapes for variant in options.variants for stage in stages
        ]
        found = find(options.operation, options.platforms, options.against)
        if options.plot is not None:
            output.check_plot(options.plot)
    except ValueError as error:
        parser.error(str(error))
    run = harness.Run(options)
    section = run.section(options.operation)
    calls = ((workload, found) for workload in work)
    run.compare(section, calls, measuring.Effort(rounds=options.rounds), options.against)
    harness.say("Columns:")
    harness.say(pairs((name, text) for name, text in output.LEGEND.items() if options.against or name != "vs"))
    if options.plot is not None:
        output.plot(section, options.plot)
    return int(any(c.get("wrong") for case in section["cases"] for c in case["contestants"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
