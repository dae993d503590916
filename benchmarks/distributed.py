"""Linear attention over the GPUs of a host: weak scaling, what is exchanged, memory; beside gathering keys and values.

python benchmarks/distributed.py [--tokens 32768] [--heads 16] [--frameworks torch,jax] [--operations ...]
    [--quick] [--out FOLDER]

The plain public call on every GPU by itself, all at once, and the call over all of them, where each has as many tokens:
a perfect machine takes the same time for both. Times are of forward plus backward: medians of runs of many steps, by
the device's events in PyTorch, by the clock in JAX, of the slowest GPU. Writes ``<gpu>-x<n>.json``; with ``--quick``,
which leaves out all but those times, the host's and PyTorch's errors, ``<gpu>-x<n>-quick.json``. In PyTorch steps are
timed as they are and as CUDA graphs.
"""

import argparse
import contextlib
import functools
import importlib.metadata as metadata
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

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
                            device_id=torch.device("cuda", rank))  # fmt: skip

    def inputs(operation, T, seed=rank):
        made = torch.Generator("cuda").manual_seed(seed)
        x = [torch.randn(1, T, heads, K, generator=made, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        if operation == "gla_attention":
            gate = torch.randn(1, T, heads, K, generator=made, device="cuda", dtype=torch.bfloat16)
            x.insert(3, torch.nn.functional.logsigmoid(gate.float()).div(16).bfloat16())
        return [y.requires_grad_() for y in x[:-1]], x[-1]

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
        """The same step, in a CUDA graph: a function of no arguments, which keeps what the graph writes to."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                step(forward, x, do)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog, a thread of its own, may do what a capture forbids.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step(forward, x, do)
        return graph.replay

    def timed(run, *given):
        for _ in range(WARM):
            run(*given)
        found = []
        for _ in range(RUNS):
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(STEPS):
                run(*given)
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / STEPS)
        return slowest(statistics.median(found))

    def host(forward, x, do):
        """Milliseconds that issuing a step takes, one after the other, on a device that is busy with something else."""
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(100_000_000)
            begin = time.perf_counter()
            for _ in range(10):
                step(forward, x, do)
            times.append((time.perf_counter() - begin) * 100)
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
        pairs = zip(whole, (out, *(y.grad for y in mine)), strict=True)
        return slowest(max(((a - b).float().norm() / a.float().norm()).item() for a, b in pairs))

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
                                              *x, **({} if len(x) > 3 else LAYER)).platform)  # fmt: skip
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
                                       arithmetic_bytes=8 * T * heads * K * 2)  # fmt: skip
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
    from keraunos.kernels.linear_attention import ends

    _, k, v, *g = (y.detach() for y in x)
    gamma = None if g else torch.from_numpy(decay.lightning(heads, **LAYER)).cuda()
    stretch = ends.Stretch(k, v, g[0] if g else None, gamma)
    plan = torch.tensor([0, k.shape[1], 0, size - 1], dtype=torch.int32, device="cuda")
    way = ends.Way(heads, True, False)
    left = ends.leave(stretch, None, plan, way)
    every = left.new_empty(size * len(left))

    def median(fn):
        times = []
        for i in range(30):
            if i % 10 == 0:
                dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)
            begin.record()
            fn()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000)
        return statistics.median(times[10:])

    return dict(
        leave=median(lambda: ends.leave(stretch, None, plan, way)),
        gather=median(lambda: dist.all_gather_into_tensor(every, left)),
        arrive=median(lambda: ends.arrive(every.view(size, -1), None, plan, way, (1, heads, K, K))),
    )


def torch_world(size, tokens, heads, operations, quick):
    """What rank 0 of a world of processes found."""
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(torch_rank, (size, port, tokens, heads, operations, quick, results), size)
    return results.get()


def jax_devices(tokens, heads, operations, quick):
    """The same in JAX: one process, its devices in a mesh; number of devices -> what was found."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import keraunos

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

    def timed(*calls):
        """Of each. In turn: under load GPUs slow down, and not at once."""
        times = [[] for _ in calls]
        for fn, x in calls * WARM:
            jax.block_until_ready(fn(*x))
        for _ in range(RUNS):
            for (fn, x), found in zip(calls, times, strict=True):
                begin = time.perf_counter()
                for _ in range(STEPS):
                    out = fn(*x)
                jax.block_until_ready(out)
                found.append((time.perf_counter() - begin) / STEPS * 1000)
        return map(statistics.median, times)

    def one_by_one(whole, parts):
        pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True)
        return max(float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(a.astype(jnp.float32)))
                   for a, b in pairs)  # fmt: skip

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
            names = "one_ms", "alone_ms", "shards_ms"
            row = dict(zip(names, timed(one, (on_each(keraunos), x), (fn, x)), strict=True))
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


def versions():
    """Of what was measured."""
    found = {}
    for name in ("torch", "triton", "jax", "jaxlib", "jax-triton", "nvidia-nccl-cu13"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=32768, help="of each GPU")
    options.add_argument("--heads", type=int, default=16)
    options.add_argument("--frameworks", default="torch,jax")
    options.add_argument("--operations", default="lightning_attention,gla_attention")
    options.add_argument("--quick", action="store_true", help="times of calls alone and over shards, nothing else")
    options.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "distributed")
    options.add_argument("--in-process", choices=["jax"], help=argparse.SUPPRESS)
    given = options.parse_args()
    operations = given.operations.split(",")
    # Ranks that tuned on their own could choose differently, and would disturb each other's clocks.
    os.environ.setdefault("KERAUNOS_AUTOTUNE_POLICY", "heuristics")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if given.in_process:
        print(json.dumps(jax_devices(given.tokens, given.heads, operations, given.quick)))
        return
    import torch

    n, gpu = torch.cuda.device_count(), torch.cuda.get_device_name().lower().replace(" ", "-")
    found = dict(gpu=gpu, gpus=n, tokens=given.tokens, heads=given.heads, head_dim=K, dtype="bfloat16", layer=LAYER,
                 versions=versions(), date=time.strftime("%Y-%m-%d"))  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{gpu}-x{n}{'-quick' * given.quick}.json"
    if "torch" in given.frameworks:
        for size in [size for size in (2, 4, 8) if size <= n]:
            found.setdefault("torch", {})[str(size)] = torch_world(
                size, given.tokens, given.heads, operations, given.quick
            )
            path.write_text(json.dumps(found, indent=1) + "\n")
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
        found["jax"] = json.loads(lines[-1])
        path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
