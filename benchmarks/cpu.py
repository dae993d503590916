"""Speed, growth, memory and accuracy on this machine's CPU: of the linear operations, and of softmax attention.

    python benchmarks/cpu.py                     all of it, into benchmarks/results/cpu.json
    python benchmarks/cpu.py speed growth        some of it, printed only
    /usr/bin/time -v python benchmarks/cpu.py peak lightning     one forward + backward at 131,072 tokens

Speed compares with the plain algorithm, a jitted ``lax.scan`` over tokens, in the same run.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness
import jax
import jax.numpy as jnp
import numpy as np
from workloads import Shape, Workload

import keraunos
from keraunos.kernels.linear_attention.reference import linear_attention
from keraunos.kernels.linear_attention.reference_vjp import linear_attention_vjp
from keraunos.numerics import error

OPERATIONS = ("lightning", "gla")


def inputs(operation, *sizes):
    """Query, key, value, the gates of GLA, and the output's gradient."""
    workload = Workload(f"{operation}_attention", Shape(*sizes), "float32", backward=True)
    arrays, (do,) = workload.arguments("jax", 0)
    return arrays, do


def ours(operation):
    if operation == "gla":
        return lambda q, k, v, g: keraunos.gla_attention(q, k, v, g, platform="xla")
    return lambda q, k, v: keraunos.lightning_attention(q, k, v, layer_idx=5, num_layers=32, platform="xla")


def token_scan(operation):
    def run(q, k, v, g=None):
        B, _, H, K = q.shape
        log_decay = keraunos.decay.lightning(H, 5, 32)[None, :, None, None]

        def step(state, x):
            decay = jnp.exp(x[3])[..., None] if operation == "gla" else jnp.exp(log_decay)
            state = decay * state + x[1][..., None] * x[2][..., None, :]
            return state, K**-0.5 * jnp.einsum("bhkv,bhk->bhv", state, x[0])

        tokens = [x.swapaxes(0, 1) for x in (q, k, v, g) if x is not None]
        return jax.lax.scan(step, jnp.zeros((B, H, K, v.shape[-1])), tokens)[1].swapaxes(0, 1)

    return run


def with_gradient(f, do, n):
    # With the value: else XLA drops the forward, whose results nobody reads.
    return jax.jit(jax.value_and_grad(lambda *x: (f(*x) * do).sum(), argnums=range(n)))


def seconds(f, *x, repeats=7):
    jax.block_until_ready(f(*x))
    return statistics.median(harness.wall(lambda: f(*x), finish=jax.block_until_ready) for _ in range(repeats))


def speed():
    rows = []
    for operation in OPERATIONS:
        x, do = inputs(operation, 1, 8192, 8, 64, 64)
        for name in ("forward", "forward+backward"):
            pair = [token_scan(operation), ours(operation)]
            pair = [jax.jit(f) if name == "forward" else with_gradient(f, do, len(x)) for f in pair]
            own, scan = seconds(pair[1], *x, repeats=15), seconds(pair[0], *x, repeats=3)
            rows.append({"operation": operation, "what": name, "token_scan_ms": 1e3 * scan, "keraunos_ms": 1e3 * own,
                         "ratio": scan / own})
            print(f"{operation} {name}: {1e3 * scan:.1f} ms by token, {1e3 * own:.1f} ms by us: {scan / own:.1f} x")
    return rows


def growth():
    rows = []
    for operation in OPERATIONS:
        previous = None
        for T in (2**n for n in range(11, 18)):
            x, do = inputs(operation, 1, T, 4, 64, 64)
            took = seconds(with_gradient(ours(operation), do, len(x)), *x, repeats=5)
            rows.append({"operation": operation, "T": T, "forward+backward_ms": 1e3 * took,
                         "factor": took / previous if previous else None})
            print(f"{operation} T {T}: {1e3 * took:.1f} ms" + (f", x {took / previous:.2f}" if previous else ""))
            previous = took
    return rows


def peak_gib():
    """The largest resident memory of this process; what getrusage tells begins with that of its parent."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return int(status.read_text().split("VmHWM:")[1].split()[0]) / 2**20


def peak(operation):
    x, do = inputs(operation, 1, 131072, 4, 64, 64)
    jax.block_until_ready(with_gradient(ours(operation), do, len(x))(*x))
    print(f"{peak_gib():.3f}")


def softmax(platform, window):
    """One process: the median time of a forward + backward of causal softmax attention, and its peak memory."""
    options = dict(causal=True, sliding_window=(int(window) - 1, 0) if window != "full" else None, dtype="float32",
                   platform=platform)
    x, do = inputs("lightning", 1, 32768, 2, 64, 64)

    def run(q, k, v):
        return keraunos.attention(q, k, v, **options)

    if platform == "torch":
        import torch

        x = [torch.from_numpy(np.array(a)).requires_grad_() for a in x]
        do = torch.from_numpy(np.array(do))
        took = seconds(lambda *x: [a.numpy() for a in torch.autograd.grad((run(*x) * do).sum(), x)], *x, repeats=3)
    else:
        took = seconds(with_gradient(run, do, 3), *x, repeats=3)
    print(took, peak_gib())


def attention():
    rows = []
    for framework in ("xla", "torch"):
        for window in ("full", "512"):
            command = [sys.executable, __file__, "softmax", framework, window]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            took, gib = map(float, said[-2:])
            rows.append({"platform": framework, "window": window, "forward+backward_s": took,
                         "peak_resident_gib": gib})
            print(f"attention, {framework}, window {window}: {took:.2f} s, peak resident memory {gib:.2f} GiB")
    return rows


def memory():
    rows = []
    for operation in OPERATIONS:
        command = [sys.executable, __file__, "peak", operation]
        gib = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
        rows.append({"operation": operation, "shape": "B 1, T 131072, H 4, K V 64, float32, forward+backward",
                     "peak_resident_gib": gib})
        print(f"{operation}: peak resident memory {gib:.2f} GiB")
    return rows


def accuracy():
    rows, T, H, K = [], 4096, 2, 128
    rng = np.random.default_rng(0)
    names = ("output", "final_state", "dquery", "dkey", "dvalue", "dg", "dg_gamma", "dinitial_state")
    for gates in ("gamma weak", "gamma strong", "scalar weak", "scalar strong", "vector weak", "vector strong",
                  "vector -inf"):
        kind, strength = gates.split()
        q, k, v, do = (rng.standard_normal((1, T, H, K)).astype(np.float32) for _ in range(4))
        h0, dh = (rng.standard_normal((1, H, K, K)).astype(np.float32) for _ in range(2))
        shape = {"gamma": (H,), "scalar": (1, T, H), "vector": (1, T, H, K)}[kind]
        decay = -rng.exponential(size=shape).astype(np.float32) * (20 if strength == "strong" else 0.05)
        if strength == "-inf":
            decay[rng.random(shape) < 0.05] = -np.inf
        args = [q, k, v, None, decay, h0] if kind == "gamma" else [q, k, v, decay, None, h0]
        truth = [*linear_attention(*args), *linear_attention_vjp(*args, None, do, dh)]

        def run(*x):
            return keraunos.gla_attention(*x, return_state=True, platform="xla")

        outputs, pull = jax.vjp(run, *(None if x is None else jnp.asarray(x) for x in args))
        got = [*outputs, *pull((jnp.asarray(do), jnp.asarray(dh)))]
        errors = {n: error(g, t) for n, g, t in zip(names, got, truth, strict=True) if t is not None}
        rows.append({"gates": gates, "errors": errors})
        print(gates, {n: f"{e:.1e}" for n, e in errors.items()})
    return rows


PARTS = {"speed": speed, "growth": growth, "memory": memory, "accuracy": accuracy, "attention": attention}


def main():
    if sys.argv[1:2] == ["peak"]:
        return peak(sys.argv[2])
    if sys.argv[1:2] == ["softmax"]:
        return softmax(*sys.argv[2:])
    options = harness.parser(__doc__, names=list(PARTS)).parse_args()
    measured = {name: PARTS[name]() for name in options.names}
    if options.names != list(PARTS):
        return None
    run = harness.Run(options, "jax")
    sources = {a: keraunos.kernel_registry.get(a, "xla").source_version for a in ("gla", "lightning_attn", "attention")}
    run.results = {"about": {**run.about, "source": sources}, **measured}
    run.save()
    print(f"written: {run.path}")
    return None


if __name__ == "__main__":
    main()
