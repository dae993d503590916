"""The cost of dispatch: a warm public call minus the implementation called directly, and under jit.

    python benchmarks/dispatch.py [--json]

Calls on CPU with tiny arrays, in alternating batches, in time of the calling thread; the medians over the batches are
compared. The layer is what lies between the public function and the implementation: arguments to key, look-up, launch.
"""

import argparse
import json
import os
import statistics
import time
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness
import jax

import keraunos
from keraunos.kernels import kernel_registry
from keraunos.ops.executor import Executor, default_executor


def overhead(public, direct, batches, calls):
    """Microseconds: public call, direct call, median of the differences of neighbouring batches."""
    timers = {fn: partial(harness.wall, fn, clock=time.thread_time) for fn in (public, direct)}
    for timer in timers.values():
        timer(200)
    a, b = harness.in_turns({fn: partial(timer, calls) for fn, timer in timers.items()}, batches).values()
    return [1e6 * statistics.median(x) for x in (a, b, [x - y for x, y in zip(a, b, strict=True)])]


def measure(batches=30, calls=300):
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 1, 1, 16)) for i in range(3))
    g = -abs(q)
    results = {}
    state, offsets = jax.numpy.zeros((1, 1, 16, 16)), jax.numpy.array([0, 1])
    for name, algorithm, op, args, constants in (
        ("gla", "gla", keraunos.gla_attention, (q, k, v, g), {}),
        ("gla, all seven arrays", "gla", keraunos.gla_attention, (q, k, v, g, g[0, 0, :, 0], state, offsets), {}),
        ("lightning", "lightning_attn", keraunos.lightning_attention, (q, k, v), {"layer_idx": 1, "num_layers": 4}),
    ):
        choice = keraunos.explain(op, *args, **constants)
        low_level = kernel_registry.get(algorithm, choice.platform)

        def public(op=op, args=args, constants=constants):
            return op(*args, **constants)

        named = dict(zip(("query", "key", "value", "g", "g_gamma", "initial_state", "cu_seqlens"), args, strict=False))

        def direct(fn=low_level, named=named, constants=constants, cfg=choice.cfg):
            return fn(**named, **constants, cfg=cfg)

        a, b, difference = overhead(public, direct, batches, calls)
        results[name] = {"public_us": a, "direct_us": b, "layer_us": difference}
    return results


def jitted_calls():
    """How often the executor runs in 100 calls of a jitted function after its trace."""
    count = 0
    original = Executor.__call__

    def counting(*args, **kwargs):
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    q = jax.numpy.ones((1, 4, 1, 16))
    Executor.__call__ = counting
    try:
        fn = jax.jit(lambda q: keraunos.gla_attention(q, q, q))
        fn(q)
        traced, count = count, 0
        for _ in range(100):
            fn(q)
    finally:
        Executor.__call__ = original
    return {"while_tracing": traced, "in_100_calls_after": count}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--batches", type=int, default=30)
    arguments = parser.parse_args()
    default_executor()
    report = {"eager": measure(arguments.batches), "jit": jitted_calls(), "jax": jax.__version__}
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    for name, row in report["eager"].items():
        print(f"{name:24}" + "  ".join(f"{key} {value:6.1f}" for key, value in row.items()))
    print("jit", report["jit"])


if __name__ == "__main__":
    main()
