"""Several GPUs of one host: shards over NCCL, in both frameworks, and kernels under ``jit`` with shardings."""

import contextlib
import functools
import os
import random
import re
import time
from datetime import timedelta

import numpy as np
import pytest

from tests.distributed import test_softmax as softmax
from tests.distributed.test_agreement import outcome
from tests.distributed.worlds import run_world
from tests.linear_attention.cases import GPU
from tests.numerics import assert_within_rule

pytestmark = pytest.mark.skipif(not GPU, reason="needs GPUs: run with --gpu")
CASES = softmax.CASES + softmax.MORE


def test_attention_over_the_ranks_of_torch():
    torch = pytest.importorskip("torch")
    size = min(torch.cuda.device_count(), 4)
    if size < 2:
        pytest.skip("needs two GPUs")
    ranks = run_world(softmax.on_torch, size, CASES, None, "cuda", timeout=60, backend="nccl")
    wrong = []
    for i, case in enumerate(CASES):
        *rows, sinks = zip(*(found[i] for found in ranks), strict=True)
        try:
            case.check([*(np.concatenate(x, 1) for x in rows), sinks[0]])
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)


def faults(rank, size, device, timeout):
    """A rank's errors where the last one brings another shape, and where that one dies within a step, and how soon."""
    import torch
    import torch.distributed as dist

    from keraunos import distributed

    # Of a group that is made from now on: exchanges that fail raise where they are waited for.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    group = dist.new_group(timeout=timedelta(seconds=timeout))

    def step(V, dies=False):
        q, v = (torch.ones(1, 64, 2, n, dtype=torch.bfloat16, device=device, requires_grad=True) for n in (64, V))
        output = distributed.lightning_attention(q, q, v, layer_idx=0, num_layers=2, group=group)
        if dies and rank == size - 1:
            os._exit(0)
        output.sum().backward()

    def twice():
        step(64, dies=True)
        # Where ranks write into each other's memory, what has failed on the device is found by the next call.
        torch.cuda.synchronize()
        step(64)

    step(64)
    other = outcome(lambda: step(32 + 16 * rank))
    start = time.monotonic()
    return other, outcome(twice), time.monotonic() - start


def test_faults_under_nccl():
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_faults("cuda", backend="nccl")


def check_faults(device, timeout=8, **world):
    (other, died, seconds), gone = run_world(faults, 2, device, timeout, timeout=timeout, **world)
    assert gone is None
    assert other[0] == "DisagreementError"
    assert "value is bfloat16 (1, T, 2, 32) on rank 0, bfloat16 (1, T, 2, 48) on rank 1" in other[1]
    assert died[0] == "RankFailedError"
    assert re.search("rank 1 (left the|did not come to an) exchange", died[1])
    assert seconds < 4 * timeout


def in_a_graph(rank, size):
    """Whether a step that a CUDA graph has captured gives the bits of a step, with inputs that it has not seen."""
    import torch

    from keraunos import distributed

    made = torch.Generator("cuda").manual_seed(rank)
    *x, do = (torch.randn(1, 4096, 4, 64, generator=made, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    x = [y.requires_grad_() for y in x]

    def step():
        for y in x:
            y.grad = None
        output = distributed.lightning_attention(*x, layer_idx=1, num_layers=4)
        output.backward(do)
        return [output.detach(), *(y.grad for y in x)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    with torch.no_grad():
        for y in x:
            y.mul_(-0.5)
    graph.replay()
    return all(map(torch.equal, captured, step()))


def test_a_step_over_nccl_in_a_cuda_graph():
    torch = pytest.importorskip("torch")
    size = min(torch.cuda.device_count(), 4)
    if size < 2:
        pytest.skip("needs two GPUs")
    assert run_world(in_a_graph, size, timeout=60, backend="nccl") == [True] * size


def both_ways(rank, size):
    """How many of many steps have other bits than those of a group whose states go through NCCL; both groups' ways.

    Steps come in one order on all ranks, on streams, with sizes and as parts of graphs that change; ranks are late.
    """
    import torch
    import torch.distributed as dist

    from keraunos import distributed
    from keraunos.distributed.torch.peers import peers

    os.environ["KERAUNOS_PEERS"] = "0"
    through_nccl, directly = (dist.new_group(timeout=timedelta(seconds=30)) for _ in range(2))
    reasons = [peers(through_nccl, torch.device("cuda", rank)).reason]
    del os.environ["KERAUNOS_PEERS"]
    reasons += [peers(directly, torch.device("cuda", rank)).reason]
    made = torch.Generator("cuda").manual_seed(rank)
    options = [dict(layer_idx=0, num_layers=4), dict(layer_idx=3, num_layers=4, reverse=True)]
    inputs = {}
    for shape in ((1, 512, 4, 64), (2, 300 + 100 * rank, 2, 128), (1, 4096, 32, 128)):
        *x, do = (torch.randn(shape, generator=made, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        inputs[shape] = [*(y.requires_grad_() for y in x), do]

    def step(x, kind, group):
        *x, do = x
        with torch.no_grad() if kind == "forward" else contextlib.nullcontext():
            output = distributed.lightning_attention(*x, group=group, **options[shape[0] - 1])
        return [output, *(torch.autograd.grad(output, x, do) if kind != "forward" else [])]

    side, graphs = torch.cuda.Stream(), {}
    for shape, x in inputs.items():
        step(x, "", through_nccl), step(x, "", directly)
        torch.cuda.synchronize()
        graphs[shape] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[shape], capture_error_mode="thread_local"):
            inputs[shape].append(step(x, "graph", directly))
    same, own, wrong = random.Random(0), random.Random(rank), 0
    for _ in range(60):
        (shape, (*x, captured)), kind = same.choice([*inputs.items()]), same.choice(["forward", "graph", "", "side"])
        with torch.no_grad():
            x[1].mul_(-1)
        if own.random() < 0.1:
            torch.cuda._sleep(1 << 22)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side) if kind == "side" else contextlib.nullcontext():
            if kind == "graph":
                graphs[shape].replay()
            got = captured if kind == "graph" else step(x, kind, directly)
        torch.cuda.current_stream().wait_stream(side)
        wrong += not all(map(torch.equal, got, step(x, kind, through_nccl)))
    return wrong, reasons


def test_states_written_into_the_memory_of_others_are_those_that_nccl_brings():
    torch = pytest.importorskip("torch")
    size = min(torch.cuda.device_count(), 4)
    if size < 2:
        pytest.skip("needs two GPUs")
    assert run_world(both_ways, size, timeout=60, backend="nccl") == [(0, ["KERAUNOS_PEERS is 0", ""])] * size


def late(rank, size):
    """Results of ranks of which one comes too late, and what their next call says."""
    import torch
    import torch.distributed as dist

    from keraunos import distributed

    group = dist.new_group(timeout=timedelta(seconds=4))

    def call(group=group):
        q = torch.ones(1, 64, 2, 64, dtype=torch.bfloat16, device="cuda")
        output = distributed.lightning_attention(q, q, q, layer_idx=0, num_layers=2, group=group, reverse=True)
        torch.cuda.synchronize()
        return output.isnan().any().item()

    call(None)  # the compiler may take longer than the group waits
    before = call()
    if rank == size - 1:
        time.sleep(8)
    return before, call(), outcome(call)


def test_a_rank_that_comes_too_late_is_named():
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (before, after, error), _ = run_world(late, 2, timeout=60, backend="nccl")
    assert (before, after) == (False, True)
    assert error == ("RankFailedError", "keraunos.distributed: rank 1 did not come to an exchange within 4 s")


def devices():
    jax = pytest.importorskip("jax")
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    return 2


@pytest.mark.parametrize("case", CASES[:4] + softmax.MORE[3:], ids=str)
def test_attention_over_the_devices_of_jax(case):
    got, text = softmax.on_jax(case, devices())
    case.check(got)
    assert "all-gather" not in text


@pytest.mark.parametrize("axis", ["batch", "heads"])
@pytest.mark.parametrize(("name", "platform"), [
    ("lightning", "triton"), ("lightning", "cuda"), ("decays", "triton"), ("decays", "cuda"), ("gates", "triton"),
    ("gates", "cuda"), ("attention", "triton"), ("attention", None), ("sinks", "triton"),
])
def test_nothing_is_resharded(name, platform, axis):
    size = devices()
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import keraunos
    from tests.distributed.test_partition import results_and_gradients

    B, T, H, K = 2, 300, 4, 64
    shapes = dict(q=(B, T, H, K), k=(B, T, H, K), v=(B, T, H, K))
    more = {"decays": dict(d=(H,)), "gates": dict(g=(B, T, H, K)), "sinks": dict(s=(H, 2))}.get(name, {})
    keys = jax.random.split(jax.random.key(0), 4)
    given = {n: jax.random.normal(key, shape, "bfloat16")
             for key, (n, shape) in zip(keys, (shapes | more).items(), strict=False)}
    for n in set(given) & {"g", "d"}:
        given[n] = -abs(given[n]).astype("float32" if n == "d" else "bfloat16") / 8

    def call(*x, platform=platform):
        q, k, v, *extra = x
        if name == "lightning":
            return keraunos.lightning_attention(q, k, v, layer_idx=1, num_layers=4, platform=platform)
        if name in ("decays", "gates"):
            g, d = (extra[0], None) if name == "gates" else (None, extra[0])
            return keraunos.gla_attention(q, k, v, g, d, platform=platform)
        return keraunos.attention(q, k, v, None, None, *extra, causal=True, dtype=None, platform=platform)

    letters = dict(s="h.", d="h", **dict.fromkeys("qkvg", "b.h."))
    where = {"b": "batch", "h": "heads"}
    mesh = jax.make_mesh((size,), (axis,), axis_types=(AxisType.Auto,))
    put = [jax.device_put(x, NamedSharding(mesh, P(*(where.get(c) if where.get(c) == axis else None
                                                     for c in letters[n])))) for n, x in given.items()]
    compiled = jax.jit(results_and_gradients(call)).lower(*put).compile()
    moved = re.findall(r"\b(all-gather|all-to-all|collective-permute|reduce-scatter)", compiled.as_text())
    got = compiled(*put)
    assert not moved
    wide = [x.astype("float32") for x in given.values()]
    want = jax.jit(results_and_gradients(functools.partial(call, platform="xla")))(*wide)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        assert_within_rule(["result"], [a], [b], [b], ["bfloat16"])


@pytest.mark.parametrize(
    "kind", ["cut", "pieces", "reverse", "triton", "gates", "many heads", "packed", "forgets nothing"]
)
def test_states_that_devices_of_jax_exchange_are_those_of_one_device(kind):
    jax = pytest.importorskip("jax")
    size = min(devices() and jax.device_count(), 4)
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from keraunos import distributed
    from tests.distributed.test_partition import results_and_gradients

    T, H, K = (16384 * size, 16, 64) if kind == "pieces" else (2048 * size, 64 if kind == "many heads" else 4, 64)
    keys = jax.random.split(jax.random.key(0), 5)
    given = [jax.random.normal(key, (1, T, H, K), "bfloat16") for key in keys[:3]]
    if kind == "gates":
        given.append((-abs(jax.random.normal(keys[3], (1, T, H))) / 512).astype("bfloat16"))
    states = jax.random.normal(keys[4], (3 if kind == "packed" else 1, H, K, K))
    lengths = jnp.array([0, T // size - 100, T - T // size + 30, T], "int32") if kind == "packed" else None
    decays = -np.arange(1, H + 1, dtype=np.float32) / (1e6 if kind == "forgets nothing" else 256)
    own = "triton" if kind == "triton" else "cuda"
    mesh = jax.make_mesh((size,), ("tokens",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    spread = [jax.device_put(x, NamedSharding(mesh, P(None, "tokens"))) for x in given]

    def call(*x, platform=own):
        *x, state = x
        decay = (x[3], None) if kind == "gates" else (None, decays)
        return distributed.gla_attention(*x[:3], *decay, state, lengths, mesh=mesh, spec=P(None, "tokens"),
                                         platform=platform, reverse=kind == "reverse", return_state=True)

    program = jax.jit(results_and_gradients(lambda *x: call(*x))).lower(*spread, states).compile()
    assert "all-to-all" in program.as_text()
    found = jax.block_until_ready(program(*spread, states))
    for _ in range(10):
        again = program(*spread, states)
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all().item(), found, again)))
    wide = [x.astype("float32") for x in spread]
    want = jax.jit(results_and_gradients(functools.partial(call, platform="xla")))(*wide, states)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        # States and their gradients are as good as the queries, keys and values that they are made of.
        assert_within_rule(["result"], [a], [b], [b], ["bfloat16"])
