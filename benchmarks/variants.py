"""Linear attention on a GPU where calls are not those of the table: other gates, short sequences,
other head dims; and of few heads.

    PYTHONPATH=. python3 benchmarks/variants.py              into benchmarks/results/variants/<gpu>.json
    PYTHONPATH=. python3 benchmarks/variants.py dimension    gates per dimension; the others' figures stay
    PYTHONPATH=. python3 benchmarks/variants.py hot          mild ones after a minute of load

`cuda` and `triton` through PyTorch, with the gates that `compare.py` names. Written after every workload; what was left
out, for the time or for another reason, is there with its reason.
"""

from __future__ import annotations

import harness
import measuring
from contestants import Contestant, find
from workloads import Shape, Workload

BOTH = (False, True)
DIMS = ("1,8192,64,64", "1,8192,64,96", "1,8192,64,64,128")
# Operation, gates, shapes, stages; in the order of importance, for a run that ends early.
CASES = {
    "token": (
        ("gla_attention", "token", ("2,16384,64", "1,8192,64", "1,65536,4"), BOTH),
        ("lightning_attention", "", ("1,64,32",), BOTH[:1]),
        ("gla_attention", "token", ("1,64,32", *DIMS), BOTH),
    ),
    "dimension": (
        ("gla_attention", "mild", ("2,16384,64", "8,4096,32", "1,8192,64", "1,65536,4"), BOTH),
        *(("gla_attention", times, ("2,16384,64",), BOTH) for times in ("x4", "x16", "x64")),
        ("gla_attention", "mild", DIMS, BOTH),
    ),
    "few": (("lightning_attention", "", ("1,8192,64", "1,32768,16", "1,65536,4"), BOTH),),
    "hot": (("gla_attention", "mild", ("2,16384,64", "8,4096,32"), BOTH),),
}


def contestants(name: str, workload: Workload) -> list[Contestant]:
    """Who computes a workload of some cases."""
    found = find(workload.operation, ["cuda"] if name == "hot" else ["cuda", "triton"], [])
    return [c for c in found if c.framework == "torch"]


def main() -> None:
    parser = harness.parser(__doc__ or "", "variants", seconds=250.0, names=tuple(CASES))
    parser.add_argument("--load", type=float, default=60.0, help="seconds of load before what is hot is timed")
    options = parser.parse_args()
    harness.require_gpu(parser)
    run = harness.Run(options, "torch", keep=True)
    work = {
        name: [Workload(operation, Shape.parse(shape), backward=backward, variant=gates)
               for operation, gates, shapes, stages in CASES[name] for shape in shapes for backward in stages]
        for name in options.names
    }
    # The times of gates change no kernel.
    harness.build([one for some in work.values() for one in some if one.variant in ("", "token", "mild")])
    for name, some in work.items():
        section = run.section(name)
        calls = ((x, contestants(name, x)) for x in some)
        run.compare(section, calls, measuring.Effort(9, 1.0, options.load if name == "hot" else 0.0))
        harness.say(f"{section['left_out']}\nwritten: {run.path}")


if __name__ == "__main__":
    main()
