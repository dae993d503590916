"""The platform ``cuda`` of linear attention without a GPU: values, faults, resources, launches."""

import dataclasses
import functools
import sys

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import triton

import keraunos
from keraunos import frontends
from keraunos.frontends.torch import launch as torch_launch
from keraunos.kernels import gluon, kernel_registry
from keraunos.kernels.gluon import RUN
from keraunos.kernels.linear_attention.contract import GLA, Args, Options
from keraunos.kernels.linear_attention.cuda import passes
from keraunos.ops.invocation import Config
from tests.cuda import builds, mutants
from tests.cuda.compile import known
from tests.cuda.emulator import EmulatorError
from tests.cuda.platform import emulated, run, small
from tests.linear_attention.cases import GPU

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")

CHUNK = 64
# What may run when, and in which order; see the emulator.
SCHEDULES = [("late", 0), ("early", 0), ("random", 1), ("late", 2), ("early", 3), ("random", 4)]
LENGTHS = [small(B=1, T=T, H=1, state=True, **kind)
           for T in (1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 5)
           for kind in (dict(gamma=1), dict(gate="scalar", reverse=True))]
OPTIONS = [
    small(B=2, T=70, H=2),
    small(B=2, T=70, H=2, gamma=2, reverse=True),
    small(B=1, T=70, H=2, gamma=1, gate="scalar", gate_dtype="bfloat16", state=True, dstate=False),
    small(B=1, T=100, H=4, G=2, HQ=1, HV=4, HG=2, gamma=1, gate="scalar"),
    small(B=1, T=100, H=2, G=1, scale=-0.3, state=True),
    small(B=1, T=200, H=2, HQ=1, G=1, HV=2, gamma=1),
    small(H=1, lengths=(70, 0, 1, 64, 63), gamma=1, gate="scalar", state=True),
    small(H=1, lengths=(65, 0, 130), gamma=1, reverse=True, state=True),
    small(H=1, lengths=(0, 3, 0), gate="scalar"),
    *(small(B=1, T=200, H=1, gamma=1, gate=gate, decay=decay, state=True)
      for decay in ("zero", "strong", "infinite") for gate in ("none", "scalar")),
]
# Head dims that fill tiles of both sizes, and that fill none.
HALVES, KEYS, VALUES, PADDED = dict(K=64, V=64), dict(K=128, V=64), dict(K=64, V=128), dict(K=96, V=40)
DIMS = [
    small(**HALVES, B=1, T=70, H=4, G=2, HQ=1, HV=4, HG=2, gamma=1, gate="scalar", state=True),
    small(**HALVES, B=1, T=130, H=1, gamma=1, reverse=True, state=True),
    small(**KEYS, H=1, lengths=(70, 0, 65), gamma=1, gate="scalar", reverse=True, state=True),
    small(**VALUES, B=2, T=70, H=1, gate="scalar", gate_dtype="bfloat16", state=True),
    small(**VALUES, H=2, G=1, lengths=(3, 65), gamma=1, state=True),
    small(**PADDED, B=1, T=70, H=2, HQ=1, G=1, HV=2, gamma=1, gate="scalar", state=True),
    small(**PADDED, H=2, lengths=(65, 0, 9), gamma=1, reverse=True, state=True),
    small(K=40, V=72, B=1, T=70, H=2, HV=1, gate="scalar", decay="strong", state=True),
]
CASES = [*LENGTHS, *OPTIONS, *DIMS]
PER_DIMENSION = [
    *(small(B=1, T=T, H=1, gate="vector", state=True, **kind) for T in (1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 5)
      for kind in (dict(), dict(reverse=True, gate_dtype="bfloat16"))),
    *(small(B=1, T=200, H=1, gate="vector", gate_dtype=dtype, decay=decay, state=True)
      for decay in ("zero", "moderate", "strong", "infinite") for dtype in ("bfloat16", "float32")),
    small(B=1, T=70, H=2, gamma=1, gate="vector", gate_dtype="bfloat16", state=True, dstate=False),
    small(B=1, T=130, H=2, HQ=1, G=1, HV=2, gate="vector", gamma=1, decay="moderate", reverse=True),
    small(**HALVES, H=1, lengths=(70, 0, 3), gate="vector", decay="moderate", state=True),
    small(B=1, T=100, H=4, G=2, HQ=1, HV=4, HG=2, gamma=1, gate="vector"),
    small(B=1, T=200, H=2, HQ=1, G=1, HV=2, gate="vector", decay="strong"),
    small(H=1, lengths=(70, 0, 1, 64, 63), gamma=1, gate="vector", state=True),
    small(H=1, lengths=(65, 0, 130), gate="vector", decay="strong", reverse=True, state=True),
    small(**HALVES, B=1, T=70, H=4, G=2, HQ=1, HV=4, HG=2, gamma=1, gate="vector", state=True),
    small(**KEYS, H=1, lengths=(70, 0, 65), gate="vector", reverse=True, state=True),
    small(**VALUES, B=2, T=70, H=1, gate="vector", gate_dtype="bfloat16", decay="strong", state=True),
    small(**PADDED, B=1, T=70, H=2, HQ=1, G=1, HV=2, gate="vector", state=True),
    small(K=40, V=72, B=1, T=70, H=2, HV=1, gate="vector", gate_dtype="bfloat16", decay="strong", state=True),
]


@pytest.fixture
def short_groups(monkeypatch):
    """Sums of gates' gradients begin anew after two chunks."""
    monkeypatch.setattr(passes, "_GROUP", 2)
    monkeypatch.setattr(passes, "_GROUP_DIMENSIONS", 2)
    for plan in (passes._call_of, passes._outputs_plan, passes._gradients_plan):
        monkeypatch.setattr(passes, plan.__name__, plan.__wrapped__)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_values_and_gradients(number):
    case, (mode, seed) = CASES[number], SCHEDULES[number % len(SCHEDULES)]
    case.check(lambda case, gradients: run(case, gradients, mode=mode, seed=seed))


@pytest.mark.parametrize("number", range(len(PER_DIMENSION)))
def test_gates_per_dimension(number):
    case, (mode, seed) = PER_DIMENSION[number], SCHEDULES[number % len(SCHEDULES)]
    case.check(lambda case, gradients: run(case, gradients, mode=mode, seed=seed))


def some_strong(**fields):
    """Chunks with strong gates between others, of which one's are moderate."""
    case = small(**{"B": 1, "T": 7 * CHUNK + 3, "H": 1, "gate": "vector", "state": True, **fields})
    case.arrays[0].g[:, CHUNK : 4 * CHUNK] *= 40
    case.arrays[0].g[:, 5 * CHUNK : 6 * CHUNK] *= 6
    return case


@pytest.mark.parametrize(("mode", "seed"), SCHEDULES[:3])
@pytest.mark.parametrize("reverse", [False, True])
def test_strong_and_mild_gates_per_dimension(mode, seed, reverse):
    case = some_strong(reverse=reverse, gate_dtype="float32" if reverse else "bfloat16")
    case.check(lambda case, gradients: run(case, gradients, mode=mode, seed=seed))


@pytest.mark.parametrize(("mode", "seed"), SCHEDULES[:3])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_gates_that_begin_anew(mode, seed, reverse, short_groups):
    case = small(B=1, T=5 * CHUNK + 7, H=1, gamma=1, gate="scalar", decay="strong", state=True, reverse=reverse)
    case.check(lambda case, gradients: run(case, gradients, mode=mode, seed=seed))


@pytest.mark.parametrize("each", [-1.36, -1.37])
def test_gates_on_both_sides_of_where_chunks_are_strong(each):
    """One dimension in three forgets little, so that there are states; two tokens close no gate at all."""
    case = small(B=1, T=3 * CHUNK + 7, H=1, gate="vector", gate_dtype="float32", state=True)
    g = case.arrays[0].g
    g[...] = each
    g[..., ::3] = -0.01
    g[:, [CHUNK, 2 * CHUNK - 1]] = 0
    case.check(run)


def test_strong_chunks_one_after_the_other():
    """Gradients that heads share are stored: no copy out of theirs comes between a chunk's pairs and the next chunk."""
    small(B=1, T=5 * CHUNK, H=2, HQ=1, G=1, gate="vector", decay="infinite").check(run)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_gates_per_dimension_that_begin_anew(reverse, short_groups):
    some_strong(gamma=1, reverse=reverse, gate_dtype="bfloat16").check(run)


@pytest.mark.parametrize("dims", [KEYS, PADDED], ids=str)
def test_gradients_of_gates_that_begin_anew_with_other_dims(dims, short_groups):
    small(**dims, B=1, T=3 * CHUNK + 7, H=2, gamma=1, gate="scalar", state=True).check(run)


def cut_into(patch, tokens, pieces):
    """Segments of so many tokens and pieces, which few programs join, two at once."""
    patch.setattr(passes, "segmentation", lambda T, heads, forgets: (tokens, pieces))
    patch.setattr(passes, "_STARTS", 4096)
    patch.setattr(passes, "_at_once", lambda heads, forgets: 2)
    for plan in (passes._call_of, passes._starts_plans):
        patch.setattr(passes, plan.__name__, plan.__wrapped__)


@pytest.fixture
def segments(number, monkeypatch):
    """Sequences are cut into segments of two pieces, or of one of two chunks: each kind of gates both ways."""
    pieces, chunks = (2, 1) if number % 4 < 2 else (1, 2)
    usual = passes._STARTS, passes._at_once
    cut_into(monkeypatch, pieces * chunks * CHUNK, pieces)
    if CUT[number].K == CUT[number].V == 40:
        monkeypatch.setattr(passes, "_STARTS", usual[0])
        monkeypatch.setattr(passes, "_at_once", usual[1])


CUT = [
    small(B=1, T=5 * CHUNK + 7, H=2, gamma=1, state=True),
    small(B=1, T=5 * CHUNK + 7, H=1, gamma=1, gate="scalar", state=True, reverse=True),
    small(B=2, T=3 * CHUNK, H=1, gamma=2, decay="strong", reverse=True),
    small(B=1, T=6 * CHUNK, H=1, gate="scalar", decay="infinite"),
    small(B=1, T=CHUNK, H=1, gamma=1, state=True),
    small(**KEYS, B=1, T=3 * CHUNK + 7, H=1, gamma=1, gate="scalar", state=True),
    small(**PADDED, B=1, T=3 * CHUNK + 7, H=2, gamma=1, state=True, reverse=True),
    small(B=1, T=5 * CHUNK + 7, H=2, gate="vector", state=True),
    small(B=1, T=5 * CHUNK + 7, H=1, gamma=1, gate="vector", gate_dtype="bfloat16", state=True, reverse=True),
    small(B=2, T=3 * CHUNK, H=1, gate="vector", decay="strong", reverse=True),
    small(K=40, V=40, B=1, T=3 * CHUNK, H=1, gate="scalar", gamma=1, state=True),
    small(**PADDED, B=1, T=3 * CHUNK + 7, H=2, gate="vector", state=True),
]


@pytest.mark.parametrize("number", range(len(CUT)))
def test_segments(number, segments):
    mode, seed = SCHEDULES[number % len(SCHEDULES)]
    case = CUT[number]
    case.check(lambda case, gradients: run(case, gradients, mode=mode, seed=seed))


def test_few_heads_are_cut_into_segments():
    assert passes.segmentation(65536, 64, True) == (32768, 32)
    assert passes.segmentation(32768, 16, True) == (4096, 8)
    assert passes.segmentation(8192, 128, True) == (0, 1)
    assert passes.segmentation(16384, 192, True) == (8192, 16)
    assert passes.segmentation(16384, 192, False) == (0, 1)
    assert passes.segmentation(1000, 4, True) == (0, 1)


def test_float16_with_a_constant_decay():
    case = small(B=1, T=100, H=2, gamma=1, state=True, dtype="float16")
    case.check(lambda case, gradients: run(case, gradients, constant=("g_gamma",)))


def test_no_tokens():
    case = small(B=1, T=0, H=1, gamma=1, state=True)
    case.check(lambda case, gradients: run(case, gradients, constant=("g_gamma",)))


def test_tensors_that_copies_cannot_take_are_copied():
    x = torch.zeros(2, 4, 3, 136)
    assert frontends.get("torch").aligned(x) is x
    assert frontends.get("torch").aligned(x[..., 8:]).data_ptr() == x[..., 8:].data_ptr()
    for odd in (x[..., 1:129], torch.zeros(2, 4, 3, 129)[..., :128], torch.zeros(2, 1, 3, 128).expand(2, 4, 3, 128)):
        made = frontends.get("torch").aligned(odd)
        assert made.is_contiguous()
        assert made.data_ptr() % 16 == 0
        assert torch.equal(made, odd)


def test_gates_may_be_expanded():
    """Gates that tokens, heads or rows share, as a view."""
    q, k, v = (torch.randn(2, 70, 2, 128).bfloat16() for _ in range(3))
    opts = Options(1.0, False, Config(num_stages=3), ("g",))
    for shape in ((1, 70, 2), (2, 1, 2), (2, 70, 1), (1, 1, 1)):
        g = torch.rand(shape).neg().expand(2, 70, 2)
        with emulated():
            (got, _), (wanted, _) = (passes.forward(Args(q, k, v, x), opts)[0] for x in (g, g.contiguous()))
        assert torch.equal(got, wanted), shape


# Faults in the kernels themselves

GATES = small(B=1, T=3 * CHUNK + 3, H=1, gate="scalar", gamma=1, state=True)
SHARED = small(B=1, T=5 * CHUNK + 3, H=2, HQ=1, G=1, HV=2, gamma=1, dstate=False)
MILD = small(B=1, T=3 * CHUNK + 3, H=1, gate="vector", gate_dtype="bfloat16", state=True)
STRONG = some_strong(gate_dtype="bfloat16")
STRONG_SHARED = some_strong(H=2, HQ=1, G=1, HV=2, reverse=True)


@pytest.mark.parametrize("step", mutants.steps(mutants.LINEAR), ids=mutants.label)
def test_each_missing_step_is_found(step, tmp_path, monkeypatch):
    replaced = mutants.kernels(mutants.LINEAR, step, tmp_path)

    cases = (("gates", GATES), ("shared", SHARED))
    if ".dimensions" in step[0]:
        # Products that happen late hide how far one partition may get ahead of another.
        cases = (("mild", MILD), ("strong", STRONG), ("strong, constant", STRONG), ("strong, shared", STRONG_SHARED),
                 ("strong, early", STRONG))

    def check():
        for name, case in cases:
            got = whole_or_cut(name, case, monkeypatch, replaced)
            for x, y in zip(got, unharmed(name, case), strict=True):
                np.testing.assert_array_equal(x, y)

    with pytest.raises((EmulatorError, AssertionError)):
        check()


def whole_or_cut(name, case, monkeypatch, replaced=None):
    """The results of a case, of which one is cut into segments; a gradient that is left out is none."""
    constant = ("g_gamma",) if name == "shared" else ("g",) if "constant" in name else ()
    with monkeypatch.context() as patch:
        if "shared" in name:
            cut_into(patch, 4 * CHUNK, 1)
        got = run(case, mode="early" if "early" in name else "late", replaced=replaced, constant=constant)
    return [x for x in got if isinstance(x, np.ndarray)]


@functools.cache
def unharmed(name, case):
    """The results of the kernels as they are."""
    return whole_or_cut(name, case, pytest.MonkeyPatch())


# Launches


@pytest.mark.parametrize("call", builds.NAMES)
def test_kernels_stay_within_their_budgets(call):
    most = builds.most(call)
    for kernel, *build in builds.of(call):
        used = known(kernel, *build)
        assert {key: used[key] for key in most if used[key] > most[key]} == {}, (kernel.fn.__name__, used)


def test_a_first_call_in_pytorch_builds_side_by_side():
    passes_of = kernel_registry.passes("gla", "cuda")
    opts = Options(1.0, False, Config(num_stages=3), ())
    assert all(x.rehearsal for x in torch_launch.launchers(Args, *passes_of, opts))


def test_no_kernel_is_compiled_for_a_length():
    call = functools.partial(small, B=1, H=2, gamma=1, gate="scalar", state=True)
    for lengths in ((1, 16, 64, 1000), (2000, 3333, 20000)):  # The latter are cut into segments.
        assert len({frozenset(builds.launches(call(T=T))) for T in lengths}) == 1


# What is refused


def refused(device="NVIDIA H200", **changes):
    """Why the platform does not take a call on a GPU."""
    arrays = dict(dtype=torch.bfloat16, K=128, V=128, gate=None, g_gamma=np.zeros(2, np.float32)) | changes
    q, v = (torch.zeros(1, 70, 2, arrays[n], dtype=arrays["dtype"]) for n in "KV")
    inv = GLA.describe(Args(q, q, v, arrays["gate"], arrays["g_gamma"]))
    return passes.unsupported(dataclasses.replace(inv, backend="gpu", device=device))


def test_what_it_cannot_do_it_refuses_with_the_reason():
    assert refused() is None
    assert refused(gate=torch.zeros(1, 70, 2), g_gamma=torch.zeros(2)) is None
    assert refused(dtype=torch.float16) is None
    assert "Hopper" in refused("NVIDIA A100")
    assert "float32" in refused(dtype=torch.float32)
    for K, V in ((64, 64), (128, 64), (64, 128), (96, 40), (40, 120)):
        assert refused(K=K, V=V) is None
    assert "128 registers" in refused(V=256)
    assert "V = 136" in refused(V=136)
    assert "K = 32" in refused(K=32)
    assert "16 bytes" in refused(V=100)
    assert refused(gate=torch.zeros(1, 70, 2, 128)) is None
    assert "float16" in refused(dtype=torch.float16, gate=torch.zeros(1, 70, 2))
    assert "float16" in refused(dtype=torch.float16, g_gamma=torch.zeros(2))


def on_a_gpu(B, T, H, framework="torch", **sizes):
    sizes = {"B": B, "T": T, "H": H, "K": 128, "gate": "constant", **sizes}
    inv = keraunos.GLAttention().invocation(framework, **sizes)
    return dataclasses.replace(inv, backend="gpu", device="NVIDIA H200")


@pytest.mark.parametrize("version", ["3.4.0", "3.5.1", "3.10.0", "4.0.0+git1"])
def test_auto_leaves_versions_of_triton_that_are_not_known(version, monkeypatch):
    homes = f"{passes.__package__}.", f"{gluon.__name__}."
    for name in [name for name in sys.modules if f"{name}.".startswith(homes)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(triton, "__version__", version)
    # Without what these rows have imported before.
    monkeypatch.setattr(kernel_registry, "_rows", [dataclasses.replace(row) for row in kernel_registry.rows()])
    row, reasons = kernel_registry.choose(on_a_gpu(2, 16384, 64))
    assert row.platform != "cuda"
    assert f"cuda: cannot be imported: knows Triton 3.6, 3.7, 3.8, 3.9; this is {version}" in reasons


def test_small_gradients_of_gates_are_not_lost_beside_large_products():
    """The last token's product of k with dk is not small: what comes of the final state has no gate."""
    strong = dict(gate="vector", gate_dtype="bfloat16", gamma=1, decay="strong")
    small(K=40, V=40, B=2, T=2, H=1, **strong).check(run)
    small(K=64, V=64, B=1, T=7, H=1, reverse=True, **strong).check(run)
    # Of two tokens the gates are moderate, those of seven are strong.
    small(K=64, V=64, B=1, T=2, H=1, **strong).check(run)
    strong["gate"] = "scalar"
    small(K=64, V=64, B=1, T=7, H=1, reverse=True, seed=3, **strong).check(run)
    small(K=64, V=64, B=1, T=70, H=1, **strong).check(run)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_auto_takes_it_where_it_was_measured_to_be_faster(framework, monkeypatch):
    if reason := frontends.cannot_launch(framework, gluon=True):
        pytest.skip(reason)
    monkeypatch.setattr(triton, "__version__", RUN[0])

    def chosen(*call, **sizes):
        row, _ = kernel_registry.choose(on_a_gpu(*call, framework=framework, **sizes))
        return row.platform

    assert chosen(2, 16384, 64) == chosen(8, 4096, 32) == chosen(2, 4096, 64, gate="scalar") == "cuda"
    assert chosen(1, 8192, 64) == chosen(1, 65536, 4) == chosen(1, 4096, 32, gate="scalar") == "cuda"
    assert chosen(2, 16384, 64, G=8) == chosen(1, 66000, 64, N=32) == chosen(4, 512, 32) == "cuda"
    for call in ((1, 2048, 32), (1, 512, 64), (8, 256, 64)):
        assert chosen(*call) == "triton"
        assert chosen(*call, gate="scalar") == "cuda"
    assert chosen(1, 66000, 64, N=1000) == "triton"
    for gate in ("scalar", "vector"):
        assert chosen(1, 64, 32, gate=gate) == chosen(1, 256, 32, gate=gate) == chosen(1, 1024, 32, gate=gate) == "cuda"
        assert chosen(1, 1024, 8, gate=gate) == "triton"
    assert chosen(2, 16384, 64, gate="vector") == chosen(1, 32768, 8, gate="vector") == "cuda"
    for sizes in (dict(K=64), dict(V=64), dict(K=64, V=64)):
        assert chosen(2, 16384, 64, **sizes) == "triton"
        assert chosen(2, 16384, 64, gate="scalar", **sizes) == chosen(2, 16384, 64, gate="vector", **sizes) == "cuda"
    assert chosen(2, 16384, 64, K=96, V=96) == "cuda"
