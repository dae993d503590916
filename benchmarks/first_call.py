"""The first call in a process of its own: `first_call` starts a process of this file; as a script it makes a table.

A user waits for this at the first call of a fresh process: compiling, and tuning where a library tunes. The start of
the framework and of the device, and making the inputs, are not in it.

The table has the linear operations as `"auto"` runs them, each with empty caches, and what `triton.compile` took for
each kernel, which PyTorch's kernels go through:

    PYTHONPATH=. python3 benchmarks/first_call.py      prints, and writes benchmarks/results/first_calls/<gpu>.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict

from workloads import Shape, Workload


def first_call(
    workload: Workload, name: str, framework: str, environment: Mapping[str, str], seconds: float
) -> float | str:
    """Start a process that makes the call once.

    Args:
        workload: the call.
        name: of a contestant.
        framework: of the same.
        environment: set for the process; an empty ``TRITON_CACHE_DIR`` makes Triton's kernels compile anew.
        seconds: the process is ended after that long.

    Returns:
        Seconds, or why there are none.
    """
    question = json.dumps({**asdict(workload), "name": name, "framework": framework})
    command = [sys.executable, __file__, question]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **environment}, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its first call takes more than {seconds:.0f} s"
    lines = done.stdout.splitlines() if done.returncode == 0 else done.stderr.splitlines()
    return float(lines[-1]) if done.returncode == 0 else f"its first call failed: {(lines or ['no message'])[-1]}"


def _main(question: str) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from contestants import find
    from measuring import finish

    from keraunos import frontends

    asked = json.loads(question)
    name, framework = asked.pop("name"), asked.pop("framework")
    workload = Workload(**{**asked, "shape": Shape(**asked["shape"])})
    contestant = next(c for c in find(workload.operation, [], [name]) if (c.name, c.framework) == (name, framework))
    reason = contestant.unsupported(workload)
    if reason is not None:
        sys.exit(reason)
    arrays, cotangents = workload.arguments(framework, 0)
    fn = contestant.function(workload, workload.log_decay())
    finish(framework, arrays)
    start = time.perf_counter()
    finish(framework, frontends.get(f"{framework}.measure").program(fn, arrays, cotangents)())
    print(time.perf_counter() - start)


def _table() -> None:
    """Write and print a row for each call, with the kernels that were built for it."""
    import harness

    parser = harness.parser(__doc__ or "", "first_calls", seconds=120.0)
    parser.add_argument("--shape", default="2,16384,64", help="B,T,H; head dims are 128")
    parser.add_argument("--gates", nargs="*", default=["dimension", "token", "constant", "delta rule"],
                        help='of linear attention; "delta rule": the gated delta rule, with gates per token')
    parser.add_argument("--frameworks", nargs="*", default=["torch", "jax"])
    options = parser.parse_args()
    run = harness.Run(options)
    run.results = {"about": run.about, "shape": options.shape, "rows": []}
    for framework in options.frameworks:
        for gates in options.gates:
            for backward in (False, True):
                row: dict = dict(gates=gates, framework=framework, backward=backward)
                run.results["rows"].append(row)
                if run.late:
                    row["left_out"] = "the time was over"
                    continue
                with tempfile.TemporaryDirectory() as empty:
                    environment = {**os.environ, "TRITON_CACHE_DIR": empty, "JAX_ENABLE_COMPILATION_CACHE": "false"}
                    question = json.dumps({**row, "shape": options.shape})
                    done = subprocess.run([sys.executable, __file__, question], capture_output=True, text=True,
                                          env=environment, check=False)
                lines = (done.stderr if done.returncode else done.stdout).splitlines() or ["no message"]
                row |= {"failed": lines[-1]} if done.returncode else json.loads(lines[-1])
                harness.say(", ".join(f"{name} {x:.2f}" if isinstance(x, float) else f"{name} {x}"
                                      for name, x in row.items()))
                run.save()


def _linear(gates: str, framework: str, shape: str, backward: bool) -> None:
    """Make a call of a linear operation once, and print what it took."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import triton
    from measuring import finish

    import keraunos

    B, T, H = map(int, shape.split(","))
    sizes, builds, start = (B, T, H, 128), [], 0.0

    def note(*, src, times, **rest):
        end = time.perf_counter() - start
        stages = dict(source=times.ir_initialization, **dict(times.lowering_stages))
        took = ", ".join(f"{name} {us / 1e6:.2f}" for name, us in stages.items())
        builds.append(f"{src.name}: {end - times.total / 1e6:.2f} to {end:.2f}, {took}")

    triton.knobs.compilation.listener = note
    if gates == "constant":
        call = lambda q, k, v, g: keraunos.lightning_attention(q, k, v, layer_idx=0, num_layers=2)  # noqa: E731
    elif gates == "delta rule":
        call = lambda q, k, v, g: keraunos.gated_delta_rule(q, k, v, g, -g, use_qk_l2norm=True)  # noqa: E731
    else:
        call = lambda q, k, v, g: keraunos.gla_attention(q, k, v, g)  # noqa: E731
    of_gates = sizes if gates == "dimension" else sizes[:3]
    if framework == "torch":
        import torch

        torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
        q, k, v, doutput, g = (torch.randn(of_gates if i == 4 else sizes).bfloat16() for i in range(5))
        given = [x.requires_grad_(backward) for x in (q, k, v, torch.nn.functional.logsigmoid(g) / 16)]
        # PyTorch's own first gradient imports what knows symbols.
        torch.autograd.grad(given[0] + 0, given[0], doutput) if backward else None
        finish("torch", [*given, doutput])
        start = time.perf_counter()
        found = call(*given)
        if backward:
            found = torch.autograd.grad(found, given, doutput, allow_unused=True)
        ready = time.perf_counter() - start
    else:
        import jax
        import jax.numpy as jnp

        q, k, v, doutput, g = (
            jax.random.normal(jax.random.key(i), of_gates if i == 4 else sizes, jnp.bfloat16) for i in range(5)
        )
        given = q, k, v, jax.nn.log_sigmoid(g) / 16

        def both(given, doutput):
            output, pull = jax.vjp(call, *given)
            return output, pull(doutput)

        finish("jax", [given, doutput])
        start = time.perf_counter()
        fn = jax.jit(both if backward else lambda given, doutput: call(*given)).lower(given, doutput).compile()
        ready = time.perf_counter() - start
        found = fn(given, doutput)
    finish(framework, found)
    print(json.dumps(dict(seconds=time.perf_counter() - start, ready=ready, builds=builds)))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        _table()
    elif "gates" in (asked := json.loads(sys.argv[1])):
        _linear(**asked)
    else:
        _main(sys.argv[1])
