"""Linear attention over the GPUs of a host: weak scaling, what is exchanged, memory; and gathering keys and values.

python benchmarks/distributed.py [--tokens 32768] [--heads 16] [--frameworks torch,jax] [--operations ...]
    [--quick] [--out FOLDER]

The plain public call on every GPU by itself, all at once, and the call over all of them, where each has as many tokens:
a perfect machine takes the same time for both. Times are of forward plus backward: medians of runs of many steps, by
the device's events in PyTorch, by the clock in JAX, of the slowest GPU. Writes ``<gpu>-x<n>.json``; with ``--quick``,
which leaves out all but those times, the host's and PyTorch's errors, ``<gpu>-x<n>-quick.json``. In PyTorch steps are
timed as they are and as CUDA graphs.
"""

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys

import harness
from workloads import Shape, Workload

from keraunos.ops.cache import file_name

K = 128
WARM, RUNS, STEPS = 5, 7, 100
# The layer's decay is halfway between the first one's and none.
LAYER = dict(layer_idx=16, num_layers=32)


def torch_rank(rank, size, port, tokens, heads, operations, quick, results):
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional as differentiable

    import keraunos

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size,
                            device_id=torch.device("cuda", rank))

    def inputs(operation, T, seed=rank):
        x, (do,) = Workload(operation, Shape(1, T, heads), backward=True).arguments("torch", seed)
        return [y.requires_grad_() for y in x], do

    def call(operation, module, x, **options):
        if operation == "lightning_attention":
            return module.lightning_attention(*x, **LAYER, **options)
        return module.gla_attention(*x, **options)

    def naive(operation, x):
        # The keys and values (and gates) of all; the state before the own tokens from those of the ranks before.
        every = [differentiable.all_gather(y) for y in x[1:]]
        gathered = [torch.cat(y[:rank], 1) if rank else y[0][:, :0] for y in every]
        state = None
        if rank:
            _, state = call(operation, keraunos, [gathered[0], *gathered], return_state=True)
        extra = (state,) if operation == "lightning_attention" else (None, state)
        out = call(operation, keraunos, [*x, *extra])
        return out if rank else out + 0 * sum(y.sum() for y in gathered)

    def step(forward, x, do):
        for y in x:
            y.grad = None
        forward(x).backward(do)

    def captured(forward, x, do):
        """``step`` in a CUDA graph."""
        return harness.captured(functools.partial(step, forward, x, do), WARM)

    def timed(run, *given):
        for _ in range(WARM):
            run(*given)
        found = []
        for _ in range(RUNS):
            dist.barrier()
            found.append(1e3 * harness.events(functools.partial(run, *given), STEPS))
        return slowest(statistics.median(found))

    def host(forward, x, do):
        """Milliseconds that issuing a step takes, one after the other, on a device that is busy with something else."""
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(100_000_000)
            times.append(1e3 * harness.wall(functools.partial(step, forward, x, do), 10))
        return slowest(statistics.median(times))

    def slowest(x):
        every = [None] * size
        dist.all_gather_object(every, x)
        return max(every)

    def peak(forward, x, do):
        step(forward, x, do)
        for y in x:
            y.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(forward, x, do)
        own = sum(y.nbytes for y in (*x, do))
        return slowest(torch.cuda.max_memory_allocated() - before + own)

    def check(operation):
        """The largest relative error of output and gradients against the plain call on the whole."""
        x, do = inputs(operation, tokens * size, seed=99)
        own = slice(rank * tokens, rank * tokens + tokens)
        step(functools.partial(call, operation, keraunos), x, do)
        whole = call(operation, keraunos, x)[:, own], *(y.grad[:, own] for y in x)
        mine = [y.detach()[:, own].contiguous().requires_grad_() for y in x]
        out = call(operation, keraunos.distributed, mine)
        out.backward(do[:, own].contiguous())
        pairs = zip((out, *(y.grad for y in mine)), whole, strict=True)
        return slowest(max(harness.distance(a, b) for a, b in pairs))

    found = {}
    for operation in operations:
        over = functools.partial(call, operation, keraunos.distributed)
        alone = functools.partial(call, operation, keraunos)
        x, do = inputs(operation, tokens)
        row = found[operation] = dict(alone_ms=timed(step, alone, x, do), alone_host_ms=host(alone, x, do))
        log(rank, f"torch x{size} {operation} {row}")
        row |= dict(shards_ms=timed(step, over, x, do), shards_host_ms=host(over, x, do))
        row["efficiency"] = row["alone_ms"] / row["shards_ms"]
        row |= dict(alone_graph_ms=timed(captured(alone, x, do)), shards_graph_ms=timed(captured(over, x, do)))
        row["graph_efficiency"] = row["alone_graph_ms"] / row["shards_graph_ms"]
        log(rank, f"torch x{size} {operation} {row}")
        # After those calls, so that it is launches that are repeated.
        row["error"] = check(operation)
        log(rank, f"torch x{size} {operation} error {row['error']:.2e}")
        if quick:
            continue
        row |= dict(platform=keraunos.explain(keraunos.gla_attention if len(x) > 3 else keraunos.lightning_attention,
                                              *x, **({} if len(x) > 3 else LAYER)).platform)
        row |= dict(alone_bytes=peak(alone, x, do), shards_bytes=peak(over, x, do))
        sums = K if len(x) > 3 else 1
        row["exchanged_bytes"] = 2 * (size - 1) * heads * (K * K + sums) * 4
        log(rank, f"torch x{size} {operation} {row}")
        row["naive_ms"] = timed(step, functools.partial(naive, operation), x, do)
        row["naive_exchanged_bytes"] = 2 * (size - 1) * sum(y.nbytes for y in x[1:])
        row["parts_us"] = parts(x, size, heads)
        log(rank, f"torch x{size} {operation} {row['naive_ms']:.3f} ms the naive way, {row['parts_us']}")
        del x, do
    if not quick:
        T = (1 << 20) // size
        x, do = inputs("lightning_attention", T)
        over = functools.partial(call, "lightning_attention", keraunos.distributed)
        steps = timed(step, over, x, do)
        found["million tokens"] = dict(tokens_each=T, ms=steps, peak_bytes=peak(over, x, do),
                                       arithmetic_bytes=8 * T * heads * K * 2)
        log(rank, f"torch x{size} a million tokens {found['million tokens']}")
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def parts(x, size, heads):
    """Microseconds of what the exchange consists of, one after the other on an idle device."""
    import torch
    import torch.distributed as dist

    from keraunos import decay
    from keraunos.kernels.linear_attention import stretches

    _, k, v, *g = (y.detach() for y in x)
    gamma = None if g else torch.from_numpy(decay.lightning(heads, **LAYER)).cuda()
    stretch = stretches.Stretch(k, v, g[0] if g else None, gamma)
    plan = torch.tensor([0, k.shape[1], 0, size - 1], dtype=torch.int32, device="cuda")
    way = stretches.Way(heads, True, False)
    (left,) = stretches.leave(stretch, None, plan, way)
    every = left.new_empty(size * len(left))

    def median(fn):
        times = []
        for i in range(30):
            if i % 10 == 0:
                dist.barrier()
            times.append(1e6 * harness.events(fn, cycles=2_000_000))
        return statistics.median(times[10:])

    return dict(
        leave=median(lambda: stretches.leave(stretch, None, plan, way)),
        gather=median(lambda: dist.all_gather_into_tensor(every, left)),
        arrive=median(lambda: stretches.arrive(every.view(size, -1), None, plan, way, (1, heads, K, K))),
    )


def torch_world(size, tokens, heads, operations, quick):
    """The results of rank 0 of a world of processes."""
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(torch_rank, (size, port, tokens, heads, operations, quick, results), size)
    return results.get()


def jax_devices(tokens, heads, operations, quick):
    """JAX's figures, of one process with its devices in a mesh: number of devices -> what was found."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import keraunos
    from keraunos.numerics import error

    def call(operation, module, x, **options):
        if operation == "lightning_attention":
            return module.lightning_attention(*x, **LAYER, **options)
        return module.gla_attention(*x, **options)

    def step(operation, module, *arrays, **options):
        *x, do = arrays
        out, pull = jax.vjp(lambda *x: call(operation, module, x, **options), *x)
        return out, *pull(do)

    def inputs(operation, T):
        def make():
            keys = jax.random.split(jax.random.key(0), 5)
            x = [jax.random.normal(key, (1, T, heads, K), jnp.bfloat16) for key in keys]
            gate = (jax.nn.log_sigmoid(x[4].astype(jnp.float32)) / 16).astype(jnp.bfloat16)
            return [*x[:3], *([gate] if operation == "gla_attention" else []), x[3]]

        return make

    def timed(**calls):
        """Milliseconds of each, in turns: under load GPUs slow down, and not at once."""
        for fn, x in [*calls.values()] * WARM:
            jax.block_until_ready(fn(*x))
        timers = {
            name: functools.partial(harness.wall, functools.partial(fn, *x), STEPS, jax.block_until_ready)
            for name, (fn, x) in calls.items()
        }
        return {name: 1e3 * statistics.median(times) for name, times in harness.in_turns(timers, RUNS).items()}

    def one_by_one(whole, parts):
        pairs = zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True)
        return max(error(*(np.asarray(x, np.float32) for x in pair)) for pair in pairs)

    found = {}
    sizes = [n for n in (2, 4, 8) if n <= len(jax.devices())]
    for operation in operations:
        alone = jax.jit(functools.partial(step, operation, keraunos))
        one = alone, jax.jit(inputs(operation, tokens))()
        for size in sizes:
            mesh = jax.make_mesh((size,), ("tokens",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
            kind = P(None, "tokens")

            def on_each(module, operation=operation, mesh=mesh, kind=kind, **options):
                run = functools.partial(step, operation, module, **options)
                return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=kind, out_specs=kind, check_vma=False))

            x = jax.jit(inputs(operation, tokens * size), out_shardings=NamedSharding(mesh, kind))()
            fn = on_each(keraunos.distributed, axis_name="tokens")
            row = timed(one_ms=one, alone_ms=(on_each(keraunos), x), shards_ms=(fn, x))
            row["efficiency"] = row["alone_ms"] / row["shards_ms"]
            row["efficiency_of_one"] = row["one_ms"] / row["shards_ms"]
            if not quick:
                small = jax.jit(inputs(operation, 2048 * size))()
                spread = [jax.device_put(y, NamedSharding(mesh, kind)) for y in small]
                row["error"] = one_by_one(alone(*small), [jax.device_get(y) for y in fn(*spread)])
            found.setdefault(str(size), {})[operation] = row
            log(0, f"jax x{size} {operation} {row}")
    return found


def log(rank, text):
    if rank == 0:
        print(text, flush=True)


def main():
    parser = harness.parser(__doc__, "distributed")
    parser.add_argument("--tokens", type=int, default=32768, help="of each GPU")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--frameworks", default="torch,jax")
    parser.add_argument("--operations", default=",".join(harness.LINEAR))
    parser.add_argument("--quick", action="store_true", help="times of calls alone and over shards, nothing else")
    parser.add_argument("--in-process", choices=["jax"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    operations = given.operations.split(",")
    # Ranks that tuned on their own could choose differently, and would disturb each other's clocks.
    os.environ.setdefault("KERAUNOS_AUTOTUNE_POLICY", "heuristics")
    if given.in_process:
        print(json.dumps(jax_devices(given.tokens, given.heads, operations, given.quick)))
        return
    import torch

    n = torch.cuda.device_count()
    gpu = file_name(torch.cuda.get_device_name()).removesuffix(".json")
    run = harness.Run(given, "torch", f"{gpu}-x{n}{'-quick' * given.quick}.json")
    run.results = dict(about=run.about, gpus=n, tokens=given.tokens, heads=given.heads, head_dim=K, dtype="bfloat16",
                       layer=LAYER)
    if "torch" in given.frameworks:
        for size in [size for size in (2, 4, 8) if size <= n]:
            found = torch_world(size, given.tokens, given.heads, operations, given.quick)
            run.results.setdefault("torch", {})[str(size)] = found
            run.save()
    if "jax" in given.frameworks:
        # A process of its own: each framework takes memory for itself.
        command = [sys.executable, __file__, "--in-process", "jax", "--tokens", str(given.tokens)]
        command += ["--heads", str(given.heads), "--operations", given.operations, *["--quick"] * given.quick]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines = []
            for line in process.stdout:
                lines.append(line)
                print(line, end="", flush=True)
        if process.returncode:
            raise SystemExit(f"distributed: JAX's part ended with {process.returncode}")
        run.results["jax"] = json.loads(lines[-1])
        run.save()
    harness.say(f"written: {run.path}")


if __name__ == "__main__":
    main()
