"""Errors of linear attention on a GPU against float64, of all on the same inputs, so large that chance counts little.

    PYTHONPATH=. python3 benchmarks/accuracy.py                         into benchmarks/results/accuracy/<gpu>.json
    PYTHONPATH=. python3 benchmarks/accuracy.py gla_attention           one operation; the other's figures stay

The truth is the platform ``torch`` on float64, which the tests compare with the recurrence token by token. An error is
the relative distance in the Frobenius norm (keraunos/numerics.py); "rounded" is that of the truth in bfloat16.
"""

from __future__ import annotations

from typing import Any

import harness
import torch
from compile_fla import compile_all
from contestants import find, label
from workloads import Shape, Workload

import keraunos
from keraunos import frontends

SHAPE = Shape.parse("1,8192,64")
NAMES = ("output", "dquery", "dkey", "dvalue", "dg")


def truth(workload: Workload, inputs: list[Any], cotangents: list[Any], log_decay: Any) -> list[torch.Tensor]:
    """Output and gradients in float64, a head after the other."""
    options = {} if log_decay is None else {"log_decay": log_decay}
    found = []
    for h in range(SHAPE.H):
        given = [x[:, :, h : h + 1].double().requires_grad_() for x in inputs]
        of_head = {name: x[h : h + 1] for name, x in options.items()}
        output = getattr(keraunos, workload.operation)(*given, **of_head, platform="torch")
        found.append([output, *torch.autograd.grad(output, given, cotangents[0][:, :, h : h + 1].double())])
    return [torch.cat([x.detach() for x in heads], 2) for heads in zip(*found, strict=True)]


def errors(got: list[torch.Tensor], true: list[torch.Tensor]) -> dict[str, float]:
    """The relative error of each result."""
    return {name: harness.distance(x, y) for name, x, y in zip(NAMES, got, true, strict=False)}


def measure(operation: str, fla: str | None) -> dict[str, Any]:
    """The errors of each contestant; of one that cannot run the reason."""
    workload = Workload(operation, SHAPE, backward=True)
    inputs, cotangents = workload.arguments("torch", 0)
    assert cotangents is not None
    log_decay = workload.log_decay()
    true = truth(workload, inputs, cotangents, log_decay)
    found: dict[str, Any] = {"rounded": errors([x.bfloat16() for x in true], true)}
    for c in find(operation, ["cuda", "triton"], ["fla"]):
        name, frontend = label(c), frontends.get(f"{c.framework}.measure")
        reason = fla if c.name == "fla" else c.unsupported(workload)
        if reason is None:
            given = [frontend.array(x.float().cpu().numpy(), "bfloat16", "gpu") for x in (*inputs, *cotangents)]
            outputs, gradients = frontend.program(c.function(workload, log_decay), given[:-1], given[-1:])()
            got = [torch.from_numpy(frontend.values(x).astype("float32")).cuda() for x in (*outputs, *gradients)]
        found[name] = {"skipped": reason} if reason else errors(got, true)
        harness.say(f"{operation} {name} {found[name]}")
    return found


def main() -> None:
    parser = harness.parser(__doc__, "accuracy", names=harness.LINEAR)
    parser.add_argument("--fla-seconds", type=float, default=240.0, help="for compiling fla; 0 leaves it out")
    options = parser.parse_args()
    harness.require_gpu(parser)
    run = harness.Run(options, keep=True)
    fla = compile_all(options.names, [SHAPE.H], options.fla_seconds, harness.say)
    for operation in options.names:
        found = measure(operation, fla[operation].get(SHAPE.H))
        run.results[operation] = {"about": run.about, "shape": str(SHAPE), "errors": found}
        run.save()


if __name__ == "__main__":
    main()
