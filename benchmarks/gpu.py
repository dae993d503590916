"""The table of linear attention on a GPU: all shapes, forward and with gradients, against fla and the XLA platform.

    PYTHONPATH=. python3 benchmarks/gpu.py                              all of it, into benchmarks/results/<gpu>.json
    PYTHONPATH=. python3 benchmarks/gpu.py lightning_attention          one operation; the other's figures stay

Each operation is one run of its own, with its own copy bandwidth. Results are written after every workload. Workloads
that were left out, for the time or otherwise, are in the results with the reason.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import harness
import measuring
import numpy as np
from compile_fla import compile_all
from contestants import Contestant, find
from first_call import first_call
from workloads import Shape, Workload

from keraunos import frontends

# In the order of importance, for a run that ends early. fla keeps what it tuned for a number of heads: the longer shape
# comes first.
SHAPES = ("2,16384,64", "1,8192,64", "1,65536,64", "8,4096,32", "1,32768,16", "1,32768,8", "1,65536,4")
# A prompt so short that the launch counts.
LATENCY = "1,2048,64"
# Where that is measured too whose compilation takes longer than its timing.
SOME_SHAPES = ("2,16384,64", "1,8192,64")
# For questions that have nothing to do with size.
SAMPLE = "1,4096,16"


@dataclass(frozen=True)
class Absent:
    """A contestant that is not measured this time, and why."""

    name: str
    framework: str
    reason: str

    def unsupported(self, workload: Workload) -> str:
        """The reason."""
        return self.reason


def workloads(operation: str) -> list[Workload]:
    # Gates per key dimension are as those of models before training.
    gates = "mild" if operation == "gla_attention" else ""
    found = [Workload(operation, Shape.parse(text), backward=backward, variant=gates)
             for text in SHAPES for backward in (False, True)]
    if operation == "lightning_attention":
        found.insert(2, Workload(operation, Shape.parse(LATENCY)))
    return found


def contestants(workload: Workload, fla: dict[int, str]) -> list[Contestant | Absent]:
    """Triton and CUDA, XLA on some shapes, and fla unless its first call took too long."""
    chosen: list[Contestant | Absent] = []
    for c in find(workload.operation, [], ["fla"]):
        if c.name == "xla" and str(workload.shape) not in SOME_SHAPES:
            chosen.append(Absent(c.name, c.framework, f"left out: measured at {' and '.join(SOME_SHAPES)} only"))
        elif c.name == "torch":
            chosen.append(Absent(c.name, c.framework, "left out: made for other devices"))
        elif c.name == "fla" and workload.shape.H in fla:
            chosen.append(Absent(c.name, c.framework, f"left out: {fla[workload.shape.H]}"))
        else:
            chosen.append(c)
    return chosen


def first_calls(operation: str) -> list[dict]:
    """Our first call in fresh processes with an empty compile cache, one after the other."""
    found = []
    for backward in (False, True):
        for framework in ("torch", "jax"):
            workload = Workload(operation, Shape.parse("1,8192,64"), backward=backward)
            with tempfile.TemporaryDirectory() as empty:
                took = first_call(workload, "triton", framework, {"TRITON_CACHE_DIR": empty}, seconds=60)
            found.append({"contestant": f"triton ({framework})", "pass": workload.stage,
                          **({"skipped": took} if isinstance(took, str) else {"seconds": took})})
    return found


def equalities(operation: str) -> dict[str, bool]:
    """Whether the Triton platform gives the same bits through both frameworks, and in 20 runs."""
    workload = Workload(operation, Shape.parse(SAMPLE), backward=True)
    given = workload.arguments("torch", 0)
    results: dict[str, list] = {}
    same = True
    for c in find(operation, ["triton"], []):
        measure, values = frontends.get(f"{c.framework}.measure"), frontends.get("torch.measure").values
        arrays, cotangents = ([measure.array(values(x), workload.dtype, "gpu") for x in xs] for xs in given)
        run = measure.program(c.function(workload, workload.log_decay()), arrays, cotangents)
        for _ in range(20):
            outputs, gradients = run()
            got = [measure.values(x).astype(np.float32) for x in (*outputs, *gradients)]
            before = results.setdefault(c.framework, got)
            same &= all(np.array_equal(x, y) for x, y in zip(before, got, strict=True))
    equal = len(results) == 2 and all(np.array_equal(x, y) for x, y in zip(*results.values(), strict=True))
    return {"jax_equals_torch": equal, "reruns_equal": same}


def measure_operation(run: harness.Run, operation: str, fla: dict[int, str]) -> None:
    """Fill one operation's section of the results, saving after every step."""
    section = run.section(operation)
    section["first_calls"] = []
    calls = ((workload, contestants(workload, fla)) for workload in workloads(operation))
    run.compare(section, calls, measuring.Effort(rounds=15, seconds=1.5), ["fla"])
    try:
        section["equalities"] = equalities(operation)
    except Exception as error:
        # The figures above stay, whatever happens here.
        section["left_out"].append({"workload": "same bits", "reason": harness.failure(error)})
    run.save()
    section["first_calls"] = first_calls(operation)
    run.save()
    harness.say(f"{section.get('equalities')} {section['first_calls']} {section['left_out']}")


def main() -> None:
    parser = harness.parser(__doc__, seconds=400.0, names=harness.LINEAR)
    parser.add_argument("--fla-seconds", type=float, default=240.0, help="for compiling fla; 0 leaves it out")
    options = parser.parse_args()
    harness.require_gpu(parser)
    run = harness.Run(options, keep=True)
    heads = list(dict.fromkeys(Shape.parse(text).H for text in SHAPES))
    fla = compile_all(options.names, heads, options.fla_seconds, harness.say)
    for operation in options.names:
        run.restart()
        measure_operation(run, operation, fla[operation])
        harness.say(f"written: {run.path}")


if __name__ == "__main__":
    main()
