"""Tests of the Triton platform that need a GPU: graphs, the compiler, big offsets, equal bits in both frameworks."""

import dataclasses
import functools
import importlib.util
import subprocess
import sys

import numpy as np
import pytest

import keraunos
from tests.linear_attention.cases import GPU, Case, run_jax, run_torch
from tests.sanitizer import CHECKS, watched

pytestmark = pytest.mark.skipif(not GPU, reason="needs a GPU: run with --gpu")
torch = pytest.importorskip("torch")


def inputs(B, T, H, D=128, gate=None, dtype=torch.bfloat16, seed=0):
    gen = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, device="cuda", dtype=torch.float32).to(dtype)

    shape = {None: None, "scalar": (B, T, H), "vector": (B, T, H, D)}[gate]
    g = None if shape is None else torch.nn.functional.logsigmoid(normal(*shape)) / 16
    return [normal(B, T, H, D) for _ in range(3)], g


def gla(*args, **options):
    return keraunos.gla_attention(*args, platform="triton", return_state=True, **options)


@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_torch_compile_takes_the_whole_graph(gate):
    (q, k, v), g = inputs(2, 200, 2, 64, gate)
    operator = gla(q, k, v, g)[0]
    compiled = torch.compile(lambda *x: gla(*x)[0] * 2, fullgraph=True, backend="aot_eager")
    q.requires_grad_()
    out = compiled(q, k, v, g)
    out.sum().backward()
    torch.testing.assert_close(out, operator * 2, rtol=0, atol=0)
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("gate", [None, "vector"])
def test_cuda_graph_capture(gate):
    (q, k, v), g = inputs(1, 300, 2, 64, gate)
    gamma = np.array([-0.1, -0.2], np.float32)
    gla(q, k, v, g, gamma)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = gla(q, k, v, g, gamma)[0]
    q.normal_()
    graph.replay()
    torch.testing.assert_close(out, gla(q, k, v, g, gamma)[0], rtol=0, atol=0)


@pytest.mark.parametrize("gate", [None, "scalar", "vector"])
def test_slices_of_a_fused_projection_are_not_copied(gate):
    (q, k, v), g = inputs(2, 130, 4, 64, gate)
    fused = torch.stack([q, k, v], 2).reshape(2, 130, 12, 64)
    parts = fused[:, :, :4], fused[:, :, 4:8], fused[:, :, 8:]
    want, got = gla(q, k, v, g), gla(*parts, g)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_offsets_past_2_to_the_31():
    T, H, D = 140_000, 128, 128
    q = torch.empty(1, T, H, D, device="cuda", dtype=torch.bfloat16).normal_()
    assert q.numel() > 2**31
    gamma = torch.full((H,), -0.5, device="cuda")
    out = gla(q, q, q, None, gamma)[0]
    tail, heads = slice(T - 256, T), slice(H - 2, H)
    x = q[:, tail, heads].contiguous()
    want = gla(x, x, x, None, gamma[heads])[0]
    # What is older than 128 tokens has decayed to nothing.
    torch.testing.assert_close(out[:, T - 128 :, heads], want[:, 128:], rtol=2e-2, atol=2e-2)


def call(args, case, platform):
    q, k, v, g, gamma, state, cu = args
    return gla(q, k, v, g, gamma, state, cu, reverse=case.reverse)


def differing(first, second):
    """The numbers of the results, gradients included, of which some bit differs."""
    pairs = zip(first, second, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if a is not b and not np.array_equal(np.asarray(a, np.float64), b)]


# Cut into segments, and packed.
CASES = [
    Case(gamma=1, T=3000, B=1, K=64, V=64, state=True, dtype="bfloat16", G=1),
    Case(gamma=1, lengths=(700, 0, 65, 1), B=1, H=4, K=128, V=128, state=True, dtype="bfloat16", reverse=True),
]


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("case", CASES, ids=["segments", "packed"])
def test_both_frameworks_give_the_same_bits_every_time(gate, case):
    if not importlib.util.find_spec("jax") or not importlib.util.find_spec("jax_triton"):
        pytest.skip("needs jax and jax_triton")
    case = dataclasses.replace(case, gate=gate)
    first = run_torch("triton", call, case, True)
    assert not differing(first, run_jax("triton", call, case, True))
    for _ in range(20):
        assert not differing(first, run_torch("triton", call, case, True))


def test_an_exported_function_runs():
    jax = pytest.importorskip("jax")
    pytest.importorskip("keraunos.frontends.jax.launch", exc_type=ImportError)
    from jax import export

    function = jax.jit(functools.partial(keraunos.gla_attention, platform="triton"))
    x = [jax.random.normal(jax.random.key(i), (2, 200, 4, 64), "bfloat16") for i in range(3)]
    allowed = [export.DisabledSafetyCheck.custom_call("triton_kernel_call")]
    data = export.export(function, disabled_checks=allowed)(*x).serialize()
    np.testing.assert_array_equal(export.deserialize(data).call(*x), function(*x))


def test_compute_sanitizer_finds_nothing():
    # Blocks from PyTorch's own cache hide accesses past the end of an array.
    watch = functools.partial(watched, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    subprocess.run([sys.executable, "-m", "tests.triton.sanitize", "build"], check=True)
    for check in CHECKS:
        planted = watch(check, "tests.triton.sanitize", "planted")
        assert planted.returncode == 9, f"{check} finds no planted fault: {planted.stdout[-2000:]}"
        run = watch(check, "tests.triton.sanitize", "run")
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
