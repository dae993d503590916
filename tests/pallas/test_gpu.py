"""Values, gradients, transformations and equal bits on a Hopper GPU."""

import functools

import numpy as np
import pytest

import keraunos
from keraunos.kernels.linear_attention.reference import linear_attention
from keraunos.numerics import error
from tests.linear_attention.cases import GPU, run_torch
from tests.numerics import assert_within_rule
from tests.pallas.cases import NAMES, NEEDS_JAX, case, check, check_sizes, jax
from tests.sanitizer import CHECKS, watched

pytestmark = [NEEDS_JAX, pytest.mark.skipif(not GPU, reason="needs a GPU: run with --gpu")]


@pytest.fixture(autouse=True)
def _hopper():
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        pytest.skip("needs a Hopper GPU")


def lightning(case, cfg=None):
    """``(query, key, value, initial_state) -> (output, final_state)``."""
    args = case.arrays[0]
    options = dict(log_decay=args.g_gamma, softmax_scale=case.scale, reverse=case.reverse, cfg=cfg)
    offsets = None if args.cu_seqlens is None else jax.numpy.asarray(args.cu_seqlens)

    def call(query, key, value, state):
        return keraunos.lightning_attention(
            query, key, value, state, offsets, **options, return_state=True, platform="pallas"
        )

    return call


def gradients(case, cfg=None):
    """``(args, doutput, dfinal) -> results`` as :func:`check` wants them; the decay is a constant."""

    def call(args, doutput, dfinal):
        arrays = [None if x is None else jax.numpy.asarray(x) for x in (*args[:3], args.initial_state)]
        outputs, pull = jax.vjp(lightning(case, cfg), *arrays)
        *grads, dstate = pull((jax.numpy.asarray(doutput), jax.numpy.asarray(dfinal)))
        return *outputs, *grads, None, None, dstate

    return call


def learned(case):
    """A call of :func:`gradients`' form, with gates and decays that have gradients."""
    from keraunos.kernels.linear_attention.pallas.passes import gla

    def call(args, doutput, dfinal):
        *floats, offsets = (None if x is None else jax.numpy.asarray(x) for x in args)

        def run(query, key, value, g, gamma, state):
            return gla(query, key, value, g, gamma, case.scale, state, case.reverse, offsets)

        outputs, pull = jax.vjp(run, *floats)
        return *outputs, *pull((jax.numpy.asarray(doutput), jax.numpy.asarray(dfinal)))

    return call


PACKED = (5, 0, 270, 1, 64, 13, 600, 300)
# Few heads: cut into segments.
LONG = (70, 0, 1501, 1, 64, 900)
BOTH_WAYS = (False, True)
CASES = [
    *(case(T=T, state=True, reverse=T % 2 == 0) for T in (1, 8, 63, 64, 65, 200)),
    *(case(T=150, K=K, V=V, state=True) for K, V in ((64, 64), (64, 128), (128, 64), (128, 128))),
    case(T=150, B=3, H=6, G=2, K=128, V=128, state=True),
    case(T=150, H=4, G=1, dtype="float16", reverse=True),
    case(T=150, scale=-0.3, dstate=False),
    *(case(T=200, K=128, V=128, decay=decay, state=True) for decay in ("zero", "strong", "infinite")),
    # Long enough to be cut into segments.
    *(case(T=3001, H=1, state=True, reverse=reverse, decay=decay) for reverse in (False, True)
      for decay in ("zero", "weak", "infinite")),
    case(T=2048, B=2, H=2, G=1, K=128, V=128, decay="weak", state=True),
    *(case(T=333, K=K, V=V, state=True) for K, V in ((256, 256), (256, 64), (64, 256), (128, 256), (256, 128))),
    case(T=1501, G=1, K=256, V=256, state=True, reverse=True),
    # So many heads that packed sequences stay whole, and so few that they are cut.
    *(case(lengths=(5, 0, 70, 1, 130), H=80, G=16, state=True, reverse=reverse) for reverse in BOTH_WAYS),
    *(case(lengths=lengths, K=128, V=128, state=True, reverse=reverse) for lengths in (PACKED, LONG)
      for reverse in BOTH_WAYS),
    case(lengths=(64, 128, 64), dtype="float16"),
    case(lengths=(0, 0, 7), state=True),
    case(lengths=PACKED, G=1, K=256, V=256, state=True),
]

GATES = dict(gate="scalar", gamma=0, state=True)
VECTOR = dict(gate="vector", state=True)
LEARNED = [
    *(case(T=T, **GATES, reverse=T % 2 == 0) for T in (1, 8, 63, 64, 65, 200)),
    *(case(T=333, K=K, V=V, **GATES) for K in (64, 128, 256) for V in (64, 128, 256)),
    *(case(T=3001, K=K, **GATES, decay=decay, gate_dtype=dtype) for decay in ("zero", "weak", "strong", "infinite")
      for K, dtype in ((64, "float32"), (128, "bfloat16"))),
    *(case(lengths=lengths, K=128, V=128, **GATES, reverse=reverse, decay="infinite") for lengths in (PACKED, LONG)
      for reverse in BOTH_WAYS),
    case(lengths=(5, 0, 70, 1, 130), H=80, G=16, **{**GATES, "gamma": 1}),
    case(T=500, B=2, H=4, G=2, **{**GATES, "gamma": 2}),
    *(case(T=1333, B=2, K=128, V=128, gamma=gamma, state=True, reverse=gamma == 2) for gamma in (1, 2)),
    case(T=1501, G=1, K=256, V=256, decay="strong"),
    case(lengths=LONG, gamma=1, state=True),
    # Gates whose gradients are next to nothing.
    *(case(T=457, K=K, **{**GATES, "gamma": 1}, decay="strong", seed=1) for K in (64, 128, 256)),
    *(case(lengths=(130, 5, 70), H=1, K=256, V=128, **{**GATES, "gamma": 1}, decay="strong", reverse=reverse)
      for reverse in BOTH_WAYS),
    case(T=1333, H=1, gamma=1, decay="strong", state=True, seed=3),
    *(case(lengths=lengths, H=1, **{**VECTOR, "gamma": 1, "state": False}, dstate=False, decay="strong", seed=seed)
      for lengths, seed in (((2, 5, 3, 4), 18), ((2, 2, 3), 854), ((3, 2), 2080))),
    # None at all.
    *(case(lengths=(1, 0, 1), K=128, V=128, **{**gates, "state": False}) for gates in (GATES, VECTOR)),
    case(B=3, T=1, **{**VECTOR, "state": False}, reverse=True),
    *(case(T=T, **VECTOR, reverse=T % 2 == 0) for T in (1, 8, 63, 64, 65, 200)),
    *(case(T=333, K=K, V=V, **VECTOR, gamma=0, gate_dtype="bfloat16") for K in (64, 128) for V in (64, 128)),
    *(case(T=1001, K=128, V=128, **VECTOR, decay=decay, reverse=reverse)
      for decay in ("zero", "weak", "strong", "infinite") for reverse in BOTH_WAYS),
    *(case(lengths=lengths, K=128, V=128, **VECTOR, gamma=0, gate_dtype="bfloat16",
           reverse=reverse, decay=decay)
      for lengths in (PACKED, LONG) for reverse, decay in ((False, "weak"), (True, "infinite"))),
    case(lengths=(5, 0, 70, 1, 130), H=80, G=16, **VECTOR),
    case(T=500, B=2, H=4, G=2, **VECTOR, gamma=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case):
    check(case, gradients(case))


@pytest.mark.parametrize("case", LEARNED, ids=str)
def test_gradients_of_gates(case):
    check(case, learned(case), learned=True)


def test_gradients_of_gates_lose_little_to_rounding():
    # Rounding them to bfloat16 costs 1.65e-3: see the test of this name without a GPU.
    some = case(T=1000, K=128, V=128, gate="vector", gate_dtype="bfloat16", dstate=False)
    got, (truth, _) = learned(some)(*some.arrays), some.reference()
    for name, x, right in list(zip(NAMES, got, truth, strict=True))[2:6]:
        assert error(x, right) < 2.1e-3, name


def test_queries_and_keys_of_any_size():
    check_sizes(jax.jit(lambda *arrays: keraunos.gla_attention(*arrays, platform="pallas")))


def test_an_empty_sequence_keeps_its_state():
    for empty in (case(T=0, state=True), case(lengths=(0, 0), state=True)):
        output, state, *_, dstate = gradients(empty)(*empty.arrays)
        assert output.shape == (1, 0, 2, 64)
        np.testing.assert_array_equal(state, empty.arrays[0].initial_state)
        np.testing.assert_array_equal(dstate, empty.arrays[2])


# Of every kind, each with partial chunks; cut into segments and whole; gradients of gates too.
KINDS = [
    case(T=2501, B=2, K=128, V=128, state=True),
    case(T=333, K=256, V=256, state=True),
    case(lengths=PACKED, H=64, K=128, V=128, state=True),
    case(lengths=LONG, state=True),
    case(T=2501, **GATES),
    case(T=500, K=256, V=128, H=4, G=2, **GATES),
    case(lengths=PACKED, H=64, **GATES),
    case(lengths=LONG, K=128, V=128, **{**GATES, "gamma": 1}),
    case(T=2501, B=2, K=128, V=128, **VECTOR, gate_dtype="bfloat16"),
    case(T=333, K=128, **VECTOR, decay="infinite"),
    case(lengths=PACKED, H=64, **VECTOR, gate_dtype="bfloat16"),
    case(lengths=LONG, K=128, V=128, **VECTOR),
]


def every(case):
    """All results of a call, as a jitted function of nothing."""
    arrays = case.arrays
    has_gates = case.gate != "none"
    run = jax.jit(learned(case) if has_gates else gradients(case))
    given = arrays if has_gates else (arrays[0]._replace(g_gamma=None), *arrays[1:])
    return lambda: run(*given)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_same_bits_on_every_run(case):
    run = every(case)
    first = jax.tree.leaves(run())
    for _ in range(100):
        for a, b in zip(first, jax.tree.leaves(run()), strict=True):
            assert jax.numpy.array_equal(a, b)


# So many segments that those who join their states use every slot of a ring again.
MANY = [
    case(T=5120, K=128, V=128, state=True, decay="weak"),
    case(T=5120, K=128, V=128, **GATES, decay="weak"),
    case(T=5120, K=128, V=128, **VECTOR, decay="weak"),
]


@pytest.mark.parametrize("case", MANY, ids=str)
def test_many_segments(case, monkeypatch):
    from keraunos.kernels.linear_attention.pallas import passes as platform

    monkeypatch.setattr(platform, "segmentation", lambda *_: (2, 1))
    # So few programs that each takes several.
    monkeypatch.setattr(platform.pallas_starts, "PROGRAMS", 7)
    learns = case.gate != "none"
    check(case, learned(case) if learns else gradients(case), learned=learns)
    test_the_same_bits_on_every_run(case)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_what_memory_held_before_does_not_matter(case):
    # Freed arrays full of NaN are what outputs, states and padding are made in next.
    run = every(case)
    want = jax.tree.leaves(run())
    for _ in range(3):
        junk = [jax.numpy.full(x.shape, np.nan, x.dtype) for x in want for _ in range(4)]
        jax.block_until_ready(junk)
        del junk
        for a, b in zip(want, jax.tree.leaves(run()), strict=True):
            assert jax.numpy.array_equal(a, b)


def test_offsets_are_data():
    # One compilation for all lengths of sequences, and no way back to the host.
    gamma = np.array([-0.1, -0.01], np.float32)
    compiled = 0

    @jax.jit
    def run(query, key, value, offsets):
        nonlocal compiled
        compiled += 1
        return keraunos.lightning_attention(
            query, key, value, None, offsets, log_decay=gamma, return_state=True, platform="pallas"
        )

    for lengths in ((100, 200, 33), (0, 333, 0), (1, 2, 330)):
        args = case(lengths=lengths).arrays[0]._replace(g_gamma=gamma)
        arrays = [jax.numpy.asarray(x) for x in (*args[:3], args.cu_seqlens)]
        with jax.transfer_guard("disallow"):
            got = jax.block_until_ready(run(*arrays))
        truth, rough = (linear_attention(*args, dtype=dtype) for dtype in (np.float64, np.float32))
        assert_within_rule(NAMES[:2], [np.asarray(x) for x in got], truth, rough, ["bfloat16"] * 2)
    assert compiled == 1


@functools.cache
def pair():
    made = [case(T=200, H=2, state=True, seed=seed) for seed in (0, 1)]
    arrays = [[jax.numpy.asarray(x) for x in (*c.arrays[0][:3], c.arrays[0].initial_state)] for c in made]
    return lightning(made[0]), arrays


def loss(call, *x):
    output, state = call(*x)
    return (output.astype("float32") ** 2).sum() + (state**2).sum()


def test_jit_checkpoint_and_vmap_give_the_same_bits():
    call, (x, y) = pair()
    grad = jax.grad(functools.partial(loss, call), range(4))
    want = [grad(*x), grad(*y)]
    for other in (jax.jit(grad), jax.grad(functools.partial(loss, jax.checkpoint(call)), range(4))):
        for a, b in zip(want[0], other(*x), strict=True):
            assert np.array_equal(a, b)
    mapped = jax.vmap(grad)(*[jax.numpy.stack(both) for both in zip(x, y, strict=True)])
    for i in (0, 1):
        for a, b in zip(want[i], mapped, strict=True):
            assert np.array_equal(a, b[i])


def test_shard_map():
    call, (x, _) = pair()
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(spec("batch"),) * 4, out_specs=(spec("batch"),) * 2)
    for f in (lambda call: call, lambda call: jax.grad(functools.partial(loss, call), range(4))):
        for a, b in zip(f(call)(*x), jax.jit(f(sharded))(*x), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("num_stages", [2, 3, 8])
@pytest.mark.parametrize("some", [case(T=700, K=128, V=128, state=True), case(T=700, G=1, state=True)], ids=str)
def test_every_depth_of_the_ring_gives_the_same_bits(some, num_stages):
    cfg = keraunos.LightningAttentionConfig(platform="pallas", num_stages=num_stages)
    for a, b in zip(gradients(some)(*some.arrays), gradients(some, cfg)(*some.arrays), strict=True):
        assert np.array_equal(a, b)


# Of PyTorch: lengths that kernels are compiled for and others; every gradient there is.
TORCH = [
    case(T=1024, B=2, K=128, V=128, gamma=1, state=True),
    case(T=333, B=3, H=4, G=2, K=128, V=128, gamma=1, state=True, reverse=True),
    case(T=1, gamma=1, state=True),
    case(T=3001, H=1, state=True, gamma=0),
    case(T=500, B=2, gamma=2),
    case(T=700, B=2, K=128, V=128, **GATES, decay="infinite"),
    case(T=512, K=256, V=64, **{**GATES, "gamma": 1}, gate_dtype="bfloat16", reverse=True),
    case(lengths=PACKED, K=128, V=128, state=True, gamma=1),
    case(lengths=LONG, **GATES, reverse=True),
    case(T=333, B=2, H=4, G=2, K=128, V=128, **VECTOR, gamma=1),
    case(lengths=LONG, **VECTOR, gamma=0, gate_dtype="bfloat16", decay="infinite", reverse=True),
]


def gla_of_torch(args, case, platform="pallas"):
    """All results of a call with tensors."""
    return keraunos.gla_attention(
        *args, softmax_scale=case.scale, reverse=case.reverse, return_state=True, platform=platform
    )


@pytest.mark.parametrize("case", TORCH, ids=str)
def test_torch(case):
    pytest.importorskip("torch")
    case.check(functools.partial(run_torch, "pallas", gla_of_torch))


def tensors(B, T, H, D=128):
    torch = pytest.importorskip("torch")
    gen = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(B, T, H, D, generator=gen, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def lightning_of_torch(*args):
    return keraunos.lightning_attention(*args, layer_idx=1, num_layers=4, return_state=True, platform="pallas")


def test_torch_takes_what_is_not_contiguous_or_not_aligned():
    import torch

    q, k, v = tensors(2, 200, 4, 64)
    want = lightning_of_torch(q, k, v)
    fused = torch.cat([q, k, v], 2)
    flat = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape)
    for parts in (fused.split(4, 2), (flat.copy_(q), k, v)):
        for a, b in zip(want, lightning_of_torch(*parts), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("T", [512, 504, 501])
def test_torch_runs_on_the_current_stream(T):
    import torch

    q, k, v = tensors(1, T, 4)
    want = lightning_of_torch(q, k, v)
    late = [torch.zeros_like(x) for x in (q, k, v)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late, (q, k, v), strict=True):
            x.copy_(y)
        got = lightning_of_torch(*late)
    stream.synchronize()
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        got = lightning_of_torch(*late)
    for x in late:
        x.mul_(-1)
    graph.replay()
    for a, b in zip(lightning_of_torch(*late), got, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("T", [1000, 2001])
def test_torch_reads_nothing_outside_of_its_tensors(T):
    import torch

    x = tensors(2, T, 4)
    want = lightning_of_torch(*x)
    around = [torch.full((4, T, 4, 128), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in x]
    for whole, part in zip(around, x, strict=True):
        whole[1:3] = part
    for a, b in zip(want, lightning_of_torch(*(whole[1:3] for whole in around)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_torch_compiles_for_a_bucket_of_lengths():
    pytest.importorskip("torch")
    from keraunos.frontends.torch import pallas

    lightning_of_torch(*tensors(1, 4700, 4))
    made = pallas._made.cache_info().misses
    for T in (4616, 4800, 5112, 5120 - 64):
        lightning_of_torch(*tensors(1, T, 4))
    assert pallas._made.cache_info().misses == made


def test_torch_compile_takes_the_whole_graph():
    torch = pytest.importorskip("torch")
    q, k, v = (x.requires_grad_() for x in tensors(2, 200, 2, 64))
    compiled = torch.compile(lambda *x: lightning_of_torch(*x)[0] * 2, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    torch.testing.assert_close(out, lightning_of_torch(q, k, v)[0] * 2, rtol=0, atol=0)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def sanitized(check, *arguments):
    # Kernels in XLA's command buffers crash under the tools, and arrays that share one block of memory hide accesses
    # past the end of one.
    env = dict(XLA_FLAGS="--xla_gpu_enable_command_buffer=", XLA_PYTHON_CLIENT_ALLOCATOR="platform")
    return watched(check, "tests.pallas.sanitize", *arguments, **env)


@pytest.mark.parametrize("tool", CHECKS)
def test_compute_sanitizer_finds_a_planted_fault(tool):
    run = sanitized(tool, "planted")
    assert run.returncode == 9, run.stdout[-2000:] + run.stderr[-2000:]


# racecheck takes long for what it watches, memcheck to start.
@pytest.mark.parametrize(
    ("tool", "part", "parts"), [(tool, i, n) for tool, n in zip(CHECKS, (3, 12), strict=True) for i in range(n)]
)
def test_compute_sanitizer_finds_nothing(tool, part, parts):
    run = sanitized(tool, str(part), str(parts))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
