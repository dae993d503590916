"""Linear attention on a GPU where calls are not those of the table: other gates, short sequences, other head dims.

    PYTHONPATH=. python3 benchmarks/variants.py      into benchmarks/results/variants/<gpu>.json

`cuda` and `triton` through PyTorch, with the gates that `compare.py` names. Written after every workload; what was left
out, for the time or for another reason, is there with its reason.
"""

from __future__ import annotations

import harness
import measuring
from contestants import find
from workloads import Shape, Workload

BOTH = (False, True)
DIMS = ("1,8192,64,64", "1,8192,64,96", "1,8192,64,64,128")
# Operation, gates, shapes, stages; in the order of importance, for a run that ends early.
CASES = (
    ("gla_attention", "token", ("2,16384,64", "1,8192,64", "1,65536,4"), BOTH),
    ("gla_attention", "mild", ("2,16384,64", "1,65536,4"), BOTH),
    *(("gla_attention", times, ("2,16384,64",), BOTH) for times in ("x4", "x16", "x64")),
    ("lightning_attention", "", ("1,64,32",), BOTH[:1]),
    ("gla_attention", "token", ("1,64,32", *DIMS), BOTH),
    ("gla_attention", "mild", DIMS, BOTH),
)


def main() -> None:
    parser = harness.parser(__doc__ or "", "variants", seconds=150.0)
    options = parser.parse_args()
    harness.require_gpu(parser)
    run = harness.Run(options, "torch")
    work = [
        Workload(operation, Shape.parse(shape), backward=backward, variant=gates)
        for operation, gates, shapes, stages in CASES for shape in shapes for backward in stages
    ]
    # The times of gates change no kernel.
    harness.build([one for one in work if one.variant in ("", "token", "mild")])
    section = run.section("variants")
    calls = ((one, [c for c in find(one.operation, ["cuda", "triton"], []) if c.framework == "torch"]) for one in work)
    run.compare(section, calls, measuring.Effort(rounds=9, seconds=1.0))
    harness.say(f"{section['left_out']}\nwritten: {run.path}")


if __name__ == "__main__":
    main()
