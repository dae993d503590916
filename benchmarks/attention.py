"""The table of softmax attention on a GPU: the vendor's kernels, who routes to them, and Triton's variants.

    PYTHONPATH=. python3 benchmarks/attention.py        into benchmarks/results/<gpu>.json, section "attention"

Written after every workload; what was left out, for the time or for another reason, is there with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

# JAX would take most of the memory for itself, and PyTorch is measured beside it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from rich.console import Console

from keraunos.bench import measuring, report
from keraunos.bench.contestants import find
from keraunos.bench.workloads import Shape, Workload
from keraunos.ops.cache import file_name

RESULTS = Path(__file__).parent / "results"
VENDORS = ("cudnn (jax)", "sdpa (torch)")
ROUTED = ("xla (jax)", "torch (torch)")
TRITON = ("triton (torch)",)
# Variant, shape, stages, contestants; in the order of importance, for a run that ends early.
BOTH = (False, True)
CASES = (
    ("special", "1,8192,64", BOTH, TRITON),
    ("causal", "1,8192,64", BOTH, (*VENDORS, *ROUTED, *TRITON)),
    ("special", "1,32768,16", BOTH, TRITON),
    ("causal", "1,32768,16", BOTH, (*VENDORS, *ROUTED, *TRITON)),
    ("window", "1,32768,16", BOTH, TRITON),
    ("shared", "1,8192,64", BOTH, (*ROUTED, *TRITON)),
    ("shared", "1,32768,16", BOTH, (*ROUTED, *TRITON)),
    ("shared-special", "1,8192,64", BOTH, TRITON),
    ("shared-window", "1,32768,16", BOTH, TRITON),
    ("special", "1,131072,8", BOTH[1:], TRITON),
    ("special", "1,8192,64", BOTH, ("triton (jax)",)),
)

console = Console(highlight=False, markup=False, width=170)


def _build(question: tuple[str, str]) -> None:
    """Run a small call of the kind, so that Triton's kernels are in its cache."""
    import torch

    variant, shape = question
    workload = Workload("attention", Shape.parse(shape), backward=True, variant=variant)
    # As many tokens as divide like the workload's: Triton builds other code for others.
    small = replace(workload, shape=replace(workload.shape, T=256))
    (triton,) = (c for c in find("attention", ["triton"], []) if c.framework == "torch")
    for call in (small, workload.small()):
        arrays, (cotangent,) = call.arguments("torch", 0)
        torch.autograd.grad(triton.function(call, None)(*(x.requires_grad_() for x in arrays)), arrays, cotangent)
    torch.cuda.synchronize()


def measure(seconds: float, save) -> None:
    """Fill the section of the results, saving after every step."""
    end = time.monotonic() + seconds
    kinds = dict.fromkeys((variant, shape) for variant, shape, _, _ in CASES)
    with ProcessPoolExecutor(len(kinds), get_context("spawn")) as processes:
        for kind, built in zip(kinds, [processes.submit(_build, kind) for kind in kinds], strict=True):
            if error := built.exception():
                console.print(f"{kind}: {type(error).__name__}: {error}")
    bandwidth = measuring.copy_bandwidth()
    about = {**report.about(bandwidth), "product_rate": measuring.product_rate("bfloat16")}
    section: dict = {"about": about, "cases": [], "left_out": []}
    known = {f"{c.name} ({c.framework})": c for c in find("attention", [], ["cudnn", "sdpa"])}
    effort = measuring.Effort(rounds=20, seconds=1.5)
    for variant, shape, stages, names in CASES:
        for backward in stages:
            workload = Workload("attention", Shape.parse(shape), backward=backward, variant=variant)
            if time.monotonic() > end:
                section["left_out"].append({"workload": str(workload), "reason": f"{seconds:.0f} s were over"})
                continue
            case = measuring.measure(workload, [known[name] for name in names], bandwidth, effort, console.print)
            section["cases"].append(case)
            save(section)
            console.print(report.show(case, [], told=set()))
    save(section)
    console.print(section["left_out"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for <gpu>.json")
    parser.add_argument("--seconds", type=float, default=180.0, help="no workload begins later")
    arguments = parser.parse_args()
    if not measuring.on_gpu():
        parser.error("no framework that is installed sees a GPU; on a CPU, use `keraunos bench attention`")
    path = arguments.out / file_name(report.about(0)["device"])
    # What other runs measured stays.
    others = RESULTS / path.name
    results = json.loads(others.read_text()) if others.exists() else {}
    measure(arguments.seconds, lambda section: report.write(path, {**results, "attention": section}))
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
