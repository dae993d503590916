"""The table of softmax attention on a GPU: the vendor's kernels, who routes to them, and ours.

    PYTHONPATH=. python3 benchmarks/attention.py        into benchmarks/results/<gpu>.json, section "attention"

Written after every workload; what was left out, for the time or for another reason, is there with its reason.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import harness
import measuring
from contestants import find, label
from workloads import Shape, Workload

VENDORS = ("cudnn (jax)", "sdpa (torch)")
ROUTED = ("xla (jax)", "torch (torch)")
OURS = ("cuda (torch)", "triton (torch)")
# Variant, shape, stages, contestants; in the order of importance, for a run that ends early.
BOTH = (False, True)
CASES = (
    ("special", "1,8192,64", BOTH, OURS),
    ("causal", "1,8192,64", BOTH, (*VENDORS, *ROUTED, *OURS)),
    ("special", "1,32768,16", BOTH, OURS),
    ("causal", "1,32768,16", BOTH, (*VENDORS, *ROUTED, *OURS)),
    ("window", "1,32768,16", BOTH, OURS),
    ("shared", "1,8192,64", BOTH, (*ROUTED, *OURS)),
    ("shared", "1,32768,16", BOTH, (*ROUTED, *OURS)),
    ("shared-special", "1,8192,64", BOTH, OURS),
    ("shared-window", "1,32768,16", BOTH, OURS),
    ("special", "1,131072,8", BOTH[1:], OURS),
    ("special", "1,8192,64", BOTH, ("cuda (jax)", "triton (jax)")),
)


def _build(question: tuple[str, str]) -> None:
    """Run a small call of the kind, so that its kernels are in Triton's cache."""
    import torch

    variant, shape = question
    workload = Workload("attention", Shape.parse(shape), backward=True, variant=variant)
    # As many tokens as divide like the workload's: Triton builds other code for others.
    small = replace(workload, shape=replace(workload.shape, T=256))
    for ours in (c for c in find("attention", ["cuda", "triton"], []) if c.framework == "torch"):
        for call in (small, workload.small()):
            arrays, (cotangent,) = call.arguments("torch", 0)
            torch.autograd.grad(ours.function(call, None)(*(x.requires_grad_() for x in arrays)), arrays, cotangent)
    torch.cuda.synchronize()


def build() -> None:
    """Compile for all workloads at once, in processes."""
    kinds = dict.fromkeys((variant, shape) for variant, shape, _, _ in CASES)
    with ProcessPoolExecutor(len(kinds), get_context("spawn")) as processes:
        for kind, built in zip(kinds, [processes.submit(_build, kind) for kind in kinds], strict=True):
            if error := built.exception():
                harness.say(f"{kind}: {harness.failure(error)}")


def main() -> None:
    parser = harness.parser(__doc__, seconds=180.0)
    options = parser.parse_args()
    harness.require_gpu(parser)
    run = harness.Run(options, keep=True)
    build()
    section = run.section("attention", product_rate=measuring.product_rate("bfloat16"))
    known = {label(c): c for c in find("attention", [], ["cudnn", "sdpa"])}
    calls = (
        (Workload("attention", Shape.parse(shape), backward=backward, variant=variant), [known[name] for name in names])
        for variant, shape, stages, names in CASES for backward in stages
    )
    run.compare(section, calls, measuring.Effort(rounds=20, seconds=1.5))
    harness.say(f"{section['left_out']}\nwritten: {run.path}")


if __name__ == "__main__":
    main()
