"""Softmax attention on a GPU: tiles as they are chosen there, equal bits, big offsets, and who gets plain calls."""

import dataclasses
import functools
import importlib.util
import time

import numpy as np
import pytest

import keraunos
from keraunos import frontends
from keraunos.kernels import kernel_registry
from tests.linear_attention.cases import GPU
from tests.softmax_attention.cases import Case, is_hopper

pytestmark = pytest.mark.skipif(not GPU, reason="needs a GPU: run with --gpu")
torch = pytest.importorskip("torch")

HALF = Case(T=333, S=301, K=128, dtype="bfloat16")
CASES = [
    dataclasses.replace(HALF, causal=True, scale=-0.3),
    dataclasses.replace(HALF, causal=True, soft_cap=50.0, scale=2.0),
    dataclasses.replace(HALF, G=2, V=64, soft_cap=5.0, sinks=4, segments=True, causal=True),
    dataclasses.replace(HALF, dropout=0.3, bias=1, bias_batch=1, soft_cap=4.0, window=(100, 20)),
    dataclasses.replace(HALF, mask=1, G=1, sinks=-1),
    dataclasses.replace(HALF, bias=4, closed=True),
    dataclasses.replace(HALF, window=40, causal=True, sinks=2, G=2),
    dataclasses.replace(HALF, H=8, G=1, causal=True, soft_cap=5.0, segments=True),
    dataclasses.replace(HALF, H=12, G=1, window=(30, 50)),
    Case(T=200, H=2, G=1, K=256, dtype="bfloat16", causal=True, soft_cap=5.0, sinks=2),
    Case(T=200, H=2, K=96, V=40, dtype="float16", causal=True, soft_cap=5.0, segments=True),
    Case(B=1, T=200, H=2, K=256, causal=True, soft_cap=5.0, sinks=2, segments=True),
    Case(B=1, T=150, H=2, K=256, V=192, bias=2),
    Case(B=1, T=200, H=2, K=128, bias=1, dropout=0.2, window=30),
    # More tiles than run at once.
    Case(B=1, T=1100, H=16, G=4, K=64, dtype="bfloat16", causal=True),
    Case(B=1, T=1100, H=16, K=64, dtype="float16", window=(200, 30), sinks=16, segments=True, soft_cap=80.0),
]
needs_jax_triton = pytest.mark.skipif(
    not (importlib.util.find_spec("jax") and importlib.util.find_spec("jax_triton")), reason="needs jax and jax_triton"
)


@pytest.fixture(params=["triton", "cuda"])
def platform(request):
    if request.param == "cuda" and not is_hopper():
        pytest.skip("needs a Hopper GPU")
    return request.param


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_in_the_usual_tiles(case, platform):
    if platform == "cuda" and case.dtype == "float32":
        pytest.skip("takes 16 bits")
    case.check(platform, "torch")


@needs_jax_triton
@pytest.mark.parametrize("case", [*CASES[1:3], CASES[-1]], ids=str)
def test_both_frameworks_give_the_same_bits_every_time(case, platform):
    # A generator and a key give different seeds.
    case = dataclasses.replace(case, dropout=0.0)

    def differing(first, second):
        pairs = zip(first, second, strict=True)
        return [i for i, (a, b) in enumerate(pairs) if a is not b and not np.array_equal(np.asarray(a, np.float64), b)]

    first = case.run_torch(platform)[0]
    assert not differing(first, case.run_jax(platform)[0])
    for _ in range(20):
        assert not differing(first, case.run_torch(platform)[0])


def test_offsets_past_2_to_the_31(platform):
    T, H, D = 140_000, 128, 128
    # Other processes' tests may have memory for a while.
    for _ in range(60):
        if torch.cuda.mem_get_info()[0] > 40 * 2**30:
            break
        time.sleep(5)
    q = torch.empty(1, T, H, D, device="cuda", dtype=torch.bfloat16).normal_()
    assert q.numel() > 2**31
    options = dict(causal=True, sliding_window=(100, 0), platform=platform)
    tail, heads = slice(T - 256, T), slice(H - 2, H)
    x = q[:, tail, heads].clone()
    do = torch.zeros_like(q)
    do[:, T - 128 :, heads] = 1.0
    found = []
    for given, doutput in ((q, do), (x, do[:, tail, heads])):
        given.requires_grad_()
        output = keraunos.attention(given, given, given, **options)
        output.backward(doutput)
        found.append((output.detach()[:, -128:, -2:], given.grad[:, -256:, -2:]))
    # Of other tiles, so of other roundings.
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def tokens(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


CUDA = dict(causal=True, platform="cuda")


def outputs_and_gradients(given, doutput=None):
    """The output and the gradients of query, key and value."""
    given = [x.detach().requires_grad_() for x in given]
    output = keraunos.attention(*given, **CUDA)
    return output, *torch.autograd.grad(output, given, torch.ones_like(output) if doutput is None else doutput)


@pytest.fixture
def hopper():
    if not is_hopper():
        pytest.skip("needs a Hopper GPU")


@pytest.mark.usefixtures("hopper")
def test_tensors_with_strides():
    """Parts of one projection, heads before tokens, and what copies of blocks cannot take."""
    fused = tokens(2, 300, 4, 3 * 128 + 8)
    parts = [fused[..., i : i + 128] for i in (0, 128, 256)]
    heads_first = [tokens(2, 4, 300, 128).transpose(1, 2) for _ in range(3)]
    odd = [fused[..., i : i + 128] for i in (1, 130, 257)]
    shared = [x[:, :, :1].expand(2, 300, 4, 128) for x in parts]
    single = [x[:1, :, :1] for x in parts]
    for args in (parts, heads_first, odd, shared, single):
        for _ in range(2):
            whole = [x.contiguous() for x in args]
            assert all(map(torch.equal, *(outputs_and_gradients(given) for given in (args, whole))))


@pytest.mark.usefixtures("hopper")
def test_nothing_is_compiled_for_a_length():
    from keraunos.kernels.softmax_attention.cuda.decode import decode_kernel
    from keraunos.kernels.softmax_attention.cuda.forward import forward_kernel
    from keraunos.kernels.softmax_attention.cuda.gradients import gradients_kernel, queries_kernel

    def call(T):
        outputs_and_gradients([tokens(1, T, 16, 128) for _ in range(3)])
        kernels = decode_kernel, forward_kernel, gradients_kernel, queries_kernel
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    call(64)  # few queries
    call(65)  # with fewer tiles than run at once, and with more
    compiled = call(2000)
    for T in np.random.default_rng(0).integers(1, 3000, 50):
        assert call(int(T)) == compiled


@pytest.mark.usefixtures("hopper")
def test_in_a_cuda_graph():
    given = [tokens(1, 4096, 8, 128) for _ in range(4)]
    call = functools.partial(outputs_and_gradients, given[:3], given[3])
    wanted = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for _ in range(3):
        for x in got:
            x.detach().zero_()
        graph.replay()
        assert all(map(torch.equal, got, wanted))


@pytest.mark.usefixtures("hopper")
@needs_jax_triton
def test_calls_in_one_program_count_their_own_tiles():
    """Of calls with the same arrays, and in a loop, JAX must not make one counter of all."""
    import jax

    q, k, _ = given = [jax.dlpack.from_dlpack(tokens(1, 2000, 16, 128)) for _ in range(3)]
    window = functools.partial(keraunos.attention, **CUDA, sliding_window=(100, 0))
    causal = functools.partial(keraunos.attention, **CUDA)

    def gradients(call, q, k, v):
        return jax.vjp(call, q, k, v)[1](v)

    def both(q, k, v):
        looped, _ = jax.lax.scan(lambda x, _: (causal(q, k, x), None), v, length=3)
        back, _ = jax.lax.scan(lambda x, _: (gradients(causal, q, k, x)[2], None), v, length=2)
        return causal(q, k, v), window(q, k, v), looped, back, gradients(causal, q, k, v), gradients(window, q, k, v)

    first = causal(*given)
    wanted = (first, window(*given), causal(q, k, causal(q, k, first)),
              gradients(causal, q, k, gradients(causal, *given)[2])[2], gradients(causal, *given),
              gradients(window, *given))
    for got, one in zip(*map(jax.tree.leaves, (jax.jit(both)(*given), wanted)), strict=True):
        assert np.array_equal(np.asarray(got, np.float32), np.asarray(one, np.float32))


PLAIN = [Case(T=128, K=64, dtype="bfloat16", causal=True), Case(T=130, S=96, G=2, K=128, dtype="float16")]


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_the_vendors_kernels_get_plain_calls_and_are_right(case, framework):
    pytest.importorskip(framework)
    platform = {"jax": "xla", "torch": "torch"}[framework]
    inv = keraunos.Attention().invocation(
        framework, case.dtype, T=case.T, S=case.S, H=case.H, G=case.G, K=case.K, causal=case.causal
    )
    inv = dataclasses.replace(inv, device=frontends.get(framework).default_device().kind)
    row, _ = kernel_registry.choose(inv)
    assert (row.platform, row.priority) == (platform, 40)
    case.check("auto", framework)
