"""The table of linear attention on a GPU: all shapes, forward and with gradients, against fla and the XLA platform.

    PYTHONPATH=. python3 benchmarks/gpu.py                              all of it, into benchmarks/results/<gpu>.json
    PYTHONPATH=. python3 benchmarks/gpu.py lightning_attention          one operation; the other's figures stay

Each operation is one run of its own, with its own copy bandwidth. Results are written after every workload. What was
left out, for the time or for another reason, is in the results with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

# JAX would take most of the memory for itself, and PyTorch is measured beside it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
from compile_fla import compile_all
from rich.console import Console

from keraunos import frontends
from keraunos.bench import measuring, report
from keraunos.bench.contestants import Absent, Contestant, find
from keraunos.bench.first import first_call
from keraunos.bench.workloads import Shape, Workload
from keraunos.ops.cache import file_name

OPERATIONS = ("lightning_attention", "gla_attention")
RESULTS = Path(__file__).parent / "results"
# In the order of importance, for a run that ends early. fla keeps what it tuned for a number of heads: the longer shape
# comes first.
SHAPES = ("2,16384,64", "1,8192,64", "1,65536,64", "8,4096,32", "1,32768,16", "1,32768,8", "1,65536,4")
# A prompt so short that the launch counts.
LATENCY = "1,2048,64"
# Where that is measured too whose compilation takes longer than its timing.
SOME_SHAPES = ("2,16384,64", "1,8192,64")
# For questions that have nothing to do with size.
SAMPLE = "1,4096,16"

console = Console(highlight=False, markup=False, width=170)


def workloads(operation: str) -> list[Workload]:
    found = [Workload(operation, Shape.parse(text), backward=b) for text in SHAPES for b in (False, True)]
    if operation == "lightning_attention":
        found.insert(2, Workload(operation, Shape.parse(LATENCY)))
    return found


def contestants(workload: Workload, fla: dict[int, str]) -> list[Contestant]:
    """Triton and Pallas, XLA on some shapes, and fla unless its first call took too long."""
    chosen: list[Contestant] = []
    for c in find(workload.operation, [], ["fla"]):
        through_torch = (c.name, c.framework) == ("pallas", "torch")
        slow = through_torch and workload.operation == "gla_attention" and workload.backward
        if (c.name == "xla" or through_torch) and str(workload.shape) not in SOME_SHAPES:
            chosen.append(Absent(c.name, c.framework, f"left out: measured at {' and '.join(SOME_SHAPES)} only"))
        elif slow and str(workload.shape) != SOME_SHAPES[0]:
            reason = f"left out: compiling takes longer than timing; measured at {SOME_SHAPES[0]} only"
            chosen.append(Absent(c.name, c.framework, reason))
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
                          **({"skipped": took} if isinstance(took, str) else {"seconds": took})})  # fmt: skip
    return found


def equalities(operation: str) -> dict[str, bool]:
    """Whether the Triton platform gives the same bits through both frameworks, and in 20 runs."""
    workload = Workload(operation, Shape.parse(SAMPLE), backward=True)
    given = workload.arguments("torch", 0)
    results: dict[str, list] = {}
    same = True
    for c in find(operation, ["triton"], []):
        measure, values = frontends.get(f"{c.framework}_measure"), frontends.get("torch_measure").values
        arrays, cotangents = ([measure.array(values(x), workload.dtype, "gpu") for x in xs] for xs in given)
        run = measure.program(c.function(workload, workload.log_decay()), arrays, cotangents)
        for _ in range(20):
            outputs, gradients = run()
            got = [measure.values(x).astype(np.float32) for x in (*outputs, *gradients)]
            before = results.setdefault(c.framework, got)
            same &= all(np.array_equal(x, y) for x, y in zip(before, got, strict=True))
    equal = len(results) == 2 and all(np.array_equal(x, y) for x, y in zip(*results.values(), strict=True))
    return {"jax_equals_torch": equal, "reruns_equal": same}


def measure_operation(operation: str, fla: dict[int, str], seconds: float, save) -> None:
    """Fill one operation's section of the results, saving after every step."""
    end = time.monotonic() + seconds
    bandwidth = measuring.copy_bandwidth()
    section: dict = {"about": report.about(bandwidth), "first_calls": [], "cases": [], "left_out": []}
    save(section)
    effort = measuring.Effort(rounds=15, seconds=1.5)
    for workload in workloads(operation):
        if time.monotonic() > end:
            section["left_out"].append({"workload": str(workload), "reason": f"{seconds:.0f} s were over"})
            save(section)
            continue
        case = measuring.measure(workload, contestants(workload, fla), bandwidth, effort, console.print)
        section["cases"].append(case)
        save(section)
        console.print(report.show(case, ["fla"], told=set()))
    try:
        section["equalities"] = equalities(operation)
    except Exception as error:
        # The figures above stay, whatever happens here.
        section["left_out"].append({"workload": "same bits", "reason": f"{type(error).__name__}: {error}"})
    save(section)
    section["first_calls"] = first_calls(operation)
    save(section)
    console.print(section.get("equalities"), section["first_calls"], section["left_out"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", metavar="OP", help=f"{' or '.join(OPERATIONS)}; both if none is named")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for <gpu>.json")
    parser.add_argument("--seconds", type=float, default=400.0, help="for each operation; no workload begins later")
    parser.add_argument("--fla-seconds", type=float, default=240.0, help="for compiling fla; 0 leaves it out")
    arguments = parser.parse_args()
    operations = arguments.operations or list(OPERATIONS)
    if unknown := set(operations) - set(OPERATIONS):
        parser.error(f"operation {unknown.pop()!r}; expected one of {', '.join(OPERATIONS)}")
    if not measuring.on_gpu():
        parser.error("no framework that is installed sees a GPU; on a CPU, use `keraunos bench`")
    path = arguments.out / file_name(report.about(0)["device"])
    # What another run measured for the other operation stays.
    known = RESULTS / path.name
    results = json.loads(known.read_text()) if known.exists() else {}
    start = time.monotonic()
    heads = list(dict.fromkeys(Shape.parse(text).H for text in SHAPES))
    fla = dict.fromkeys(operations, dict.fromkeys(heads, "not asked for"))
    if arguments.fla_seconds:
        fla = compile_all(operations, heads, arguments.fla_seconds, console.print)
    for operation in operations:

        def save(section, operation=operation):
            report.write(path, {**results, operation: section})
            results[operation] = section

        measure_operation(operation, fla[operation], arguments.seconds, save)
        console.print(f"{time.monotonic() - start:.0f} s so far; written: {path}")


if __name__ == "__main__":
    main()
