"""The platform ``cuda`` of the gated delta rule without a GPU: values, faults, resources, what it refuses."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import triton
from triton.runtime.jit import JITFunction

import keraunos
from keraunos import frontends
from keraunos.frontends import interpreter
from keraunos.frontends.torch import launch as torch_launch
from keraunos.kernels import kernel_registry
from keraunos.kernels.gated_delta_rule.contract import GATED_DELTA_RULE, Args
from keraunos.kernels.gated_delta_rule.cuda import call as calls
from keraunos.kernels.gated_delta_rule.cuda import passes
from keraunos.kernels.gluon import RUN
from tests.cuda import mutants
from tests.cuda.builds import DELTA_PREFILLS, launched, of
from tests.cuda.compile import known
from tests.cuda.delta_rule import (
    BUILDS,
    CASES,
    CHUNK,
    DIMENSIONS_CASES,
    PER_DIMENSION,
    WIDE,
    build,
    check,
    in_torch,
    joined,
    most,
    options,
    run,
    small,
    walks,
)
from tests.cuda.emulator import EmulatorError
from tests.cuda.platform import emulated
from tests.cuda.test_gpu import handed
from tests.linear_attention.cases import GPU, tensor_array, torch_tensor
from tests.numerics import assert_within_rule

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")

# What may run when, and in which order; see the emulator.
SCHEDULES = [("late", 0), ("early", 0), ("random", 1), ("late", 2), ("early", 3), ("random", 4)]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_values(number):
    mode, seed = SCHEDULES[number % len(SCHEDULES)]
    check(CASES[number], mode=mode, seed=seed)


@pytest.mark.skipif(not interpreter.ON, reason="a kernel of Triton makes the gradients: test_in_the_interpreter")
@pytest.mark.parametrize("number", range(len(DIMENSIONS_CASES)))
def test_values_per_dimension(number):
    mode, seed = SCHEDULES[number % len(SCHEDULES)]
    check(DIMENSIONS_CASES[number], mode=mode, seed=seed)


@pytest.mark.skipif(not interpreter.ON, reason="a kernel of Triton makes the gradients: test_in_the_interpreter")
@pytest.mark.parametrize("case", [
    small(**PER_DIMENSION, **WIDE, T=71, decay=3.0, HG=1, H=2, norm=True),
    small(**PER_DIMENSION, **WIDE, T=131, keys="equal", beta=1.0, decay=0.01),
    small(**PER_DIMENSION, K=40, V=72, lengths=(3, 66), reverse=True),
])
def test_values_per_dimension_where_a_program_has_whole_heads(case, monkeypatch):
    monkeypatch.setattr(calls, "AT_ONCE", 1)
    check(case, mode="random", seed=2)


def test_outputs_of_errors_that_cancel():
    """The gradients of queries there would need more than E of 16 bits."""
    case = small(**PER_DIMENSION, **WIDE, T=130, keys="equal", beta=2.0, decay=0.01, norm=True)
    (*_, output, state), _ = walks(case, mode="random", seed=1)
    case.hold([output, state])


SEGMENTS = [
    (small(T=9 * CHUNK + 5, state=True, decay=0.01), 3),
    (small(T=9 * CHUNK + 5, state=True, decay=0.01, reverse=True, norm=True), 2),
    (small(**WIDE, T=3 * CHUNK - 3, gate="none"), 3),
    (small(K=96, V=40, T=2 * CHUNK + 1, B=2, keys="equal", beta=1.0, decay=0.01, reverse=True), 3),
]


@pytest.mark.parametrize("number", range(len(SEGMENTS)))
def test_segments(number):
    case, segments = SEGMENTS[number]
    mode, seed = SCHEDULES[number]
    check(case, mode=mode, seed=seed, segments=segments)


@pytest.mark.parametrize("case", [case for case in CASES if case.keys == "some equal"])
def test_a_program_prepares_chunks_of_both_kinds(case, monkeypatch):
    for name in ("_PREPARING", "_PREPARING_REVERSE"):
        monkeypatch.setattr(passes, name, (1, getattr(passes, name)[1]))
    monkeypatch.setattr(calls, "AT_ONCE", 1)
    check(case, mode="random", seed=3)


@pytest.mark.parametrize(("chunks", "segments"), [(5, 1), (7, 2)])
def test_a_program_makes_gradients_of_several_groups(chunks, segments, monkeypatch):
    """Where there are two segments, a group begins with the second."""
    monkeypatch.setattr(calls, "GROUP", 2)
    monkeypatch.setattr(calls, "AT_ONCE", 1)
    check(small(T=chunks * CHUNK + 7, state=True, decay=0.01), mode="random", seed=1, segments=segments)


def test_packed_sequences_are_cut_where_no_gradient_follows():
    case = small(lengths=(130, 0, 3, 200), decay=0.01, state=True, reverse=True, norm=True)
    args, opts = Args(*map(torch_tensor, case.arrays[0])), options(case)._replace(kept=False)
    with (emulated("random", 5), mock.patch.object(calls, "SEGMENTS", 64),
          mock.patch.object(passes, "_joined", side_effect=joined) as joins):
        results, _ = passes.forward(args, opts)
    joins.assert_called_once()
    truth, in_dtype = (case.reference(*dtype)[:2] for dtype in ((), (np.float32,)))
    assert_within_rule(["output", "state"], [*map(tensor_array, results)], truth, in_dtype, [case.dtype] * 2)


def test_no_tokens():
    check(small(T=0, state=True))


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_gates_collect_no_errors(reverse):
    """Along the tokens of a group; what they end with is known. They were off by 1e-2."""
    q, k, v, do = (torch.randn(1, 582, 2, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    g = torch.nn.functional.logsigmoid(v[..., 0].float()) / 16
    args = Args(q, k, v, g, do[..., 0].sigmoid())
    opts = options(small(reverse=reverse))
    with emulated(), in_torch():
        _, residuals = passes.forward(args, opts)
        dg = passes.backward(args, residuals, (do, None), opts).g
    wide = [x.double().requires_grad_() for x in args if x is not None]
    output = keraunos.gated_delta_rule(*wide, reverse=reverse, platform="torch")
    (wanted,) = torch.autograd.grad(output, wide[3], do.double())
    assert torch.linalg.norm(dg - wanted) < 6e-3 * torch.linalg.norm(wanted)


def test_gates_and_beta_may_be_expanded():
    """As a view that tokens, heads or rows share."""
    q, k, v = (torch.randn(2, 70, 2, 64).bfloat16() for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    for shape in ((1, 70, 2), (2, 1, 2), (2, 70, 1), (1, 1, 1)):
        g, beta = torch.rand(shape).neg().expand(2, 70, 2), torch.rand(shape).expand(2, 70, 2)
        with emulated():
            (got, _), (wanted, _) = (passes.forward(Args(q, k, v, *x), options(small()))[0]
                                     for x in ((g, beta), (g.contiguous(), beta.contiguous())))
        assert torch.equal(got, wanted), shape


def test_tensors_may_be_slices():
    wide = torch.randn(2, 70, 3, 200).bfloat16()
    q, k, v = wide[:, :, 0:2, 8:72], wide[:, :, 1:3, 72:136] / 8, wide[:, 5:, :2, 136:]
    with emulated():
        (got, _), (wanted, _) = (passes.forward(Args(q[:, 5:], k[:, 5:], x), options(small()))[0]
                                 for x in (v, v.contiguous()))
    assert torch.equal(got, wanted)


# Faults in the kernels themselves

DELTA = ("keraunos.kernels.device.hopper", *(f"keraunos.kernels.gated_delta_rule.cuda.{name}" for name in (
    "inverse", "parts", "prepare", "walk", "adjoint", "gradients",
)))
# What finds most of them first.
ALIKE = dict(keys="equal", beta=1.0, decay=0.01, state=True)
FAULTY = {"others": (small(T=5 * CHUNK + 3, state=True), 1),
          "alike": (small(**ALIKE, T=2 * CHUNK + 3, norm=True, dtype="float16"), 3),
          "two walkers": (small(**ALIKE, **WIDE, T=2 * CHUNK + 3), 1),
          "shared": (small(T=4 * CHUNK + 3, H=2, HQ=1, G=1, keys="some equal", gate="none", beta=1.0), 1),
          "segments": (small(T=5 * CHUNK + 3), 2)}
UNHARMED = {}
# Two threads of a partition, which is one actor to the emulator: one has copied out, one may tell so.
UNSEEN = mutants.steps(DELTA)[0]


DIMENSIONS = tuple(f"keraunos.kernels.gated_delta_rule.cuda.{name}" for name in (
    "dimensions", "dimensions_walk", "dimensions_adjoint", "dimensions_gradients",
))
# With the stages of the walks.
FAULTY_DIMENSIONS = [
    (small(gate="vector", gate_dtype="bfloat16", T=4 * CHUNK + 3, norm=True), 3),
    (small(gate="vector", gate_dtype="bfloat16", T=3, H=2, decay=40.0), 3),
    (small(gate="vector", T=2 * CHUNK + 3, keys="equal", beta=1.0, decay=0.01), 3),
    (small(gate="vector", K=128, T=5, keys="equal", beta=1.0, decay=0.01), 3),
    (small(gate="vector", K=128, T=5), 3),
    (small(gate="vector", T=CHUNK + 2, keys="equal", beta=1.0, decay=0.01), 2),
]


@pytest.mark.parametrize("step", mutants.steps(DIMENSIONS), ids=mutants.label)
def test_each_missing_step_per_dimension_is_found(step, tmp_path):
    replaced = mutants.kernels(DIMENSIONS, step, tmp_path)
    backward_only = not {"prepare_dimensions_kernel", "walk_dimensions_kernel"} & {*replaced}

    def check():
        for key, how in hows.items():
            wanted, kept = UNHARMED[key]
            got, _ = walks(key[0], **how, replaced=replaced, kept=kept if backward_only else None)
            for x, y in zip(got, wanted, strict=not backward_only):
                np.testing.assert_array_equal(x, y)

    hows = {(case, mode): dict(mode=mode, stages=stages) for case, stages in FAULTY_DIMENSIONS
            for mode in ("late", "early")}
    for key, how in hows.items():
        if key not in UNHARMED:
            UNHARMED[key] = walks(key[0], **how)
    with pytest.raises((EmulatorError, AssertionError)):
        check()


@pytest.mark.parametrize("step", mutants.steps(DELTA), ids=mutants.label)
def test_each_missing_step_is_found(step, tmp_path, monkeypatch):
    if step == UNSEEN:
        assert mutants.label(step) == "hopper:thread_barrier()"
        return
    # Programs that prepare chunks have all of a head, those that make gradients several groups.
    monkeypatch.setattr(passes, "_PREPARING", (1, 64))
    monkeypatch.setattr(calls, "GROUP", 2)
    monkeypatch.setattr(calls, "AT_ONCE", 1)
    replaced = mutants.kernels(DELTA, step, tmp_path)
    hows = {(case, mode): dict(mode=mode, segments=segments, stages=2 if name == "segments" else 3)
            for name, (case, segments) in FAULTY.items() for mode in ("late", "early")}

    def check():
        for key, how in hows.items():
            for x, y in zip(run(key[0], **how, replaced=replaced), UNHARMED[key], strict=True):
                np.testing.assert_array_equal(x, y)

    for key, how in hows.items():
        if key not in UNHARMED:
            UNHARMED[key] = run(key[0], **how)
    with pytest.raises((EmulatorError, AssertionError)):
        check()


@pytest.mark.parametrize("attention", ["linear", "delta", "delta-dimensions", "softmax"])
def test_functions_that_racecheck_does_not_follow_exist(attention):
    """They are read on a GPU only."""
    assert all(isinstance(x, JITFunction) for functions in handed(attention) for x in functions)


# Launches


@pytest.mark.parametrize("name", ["delta rule", "delta rule, everything", "delta rule, dimensions"])
def test_a_first_call_in_pytorch_builds_all_that_it_launches(name):
    """An error of a rehearsal shows only as a first call that is slow."""
    case = BUILDS[name]
    flat = [None if x is None else torch.empty(x.shape, dtype=getattr(torch, x.dtype.name)) for x in case.arrays[0]]
    opts = options(case)
    first, _ = torch_launch.launchers(Args, passes.forward, passes.backward, opts)

    def call():
        outputs, kept = passes.forward(Args(*flat), opts)
        passes.backward(Args(*flat), kept, (outputs[0], None), opts)

    builds = [{build[0].fn.__name__ for build in launched(run)}
              for run in (call, lambda: first.rehearsal(torch_launch._without_memory(flat)))]
    assert builds[0] == builds[1]
    assert len(builds[0]) > 3


@pytest.mark.parametrize("case", [CASES[9], CASES[13], DIMENSIONS_CASES[0], *DIMENSIONS_CASES[7:10]])
def test_residuals_are_those_that_compilers_are_told_of(case):
    args, kept = Args(*map(torch_tensor, case.arrays[0])), []
    launched(lambda: kept.extend(passes.forward(args, options(case))[1]))
    for x, (name, told) in zip(kept, passes.forward.residuals.items(), strict=True):
        wanted = told(args, options(case))
        if x is None or name == "matrices":
            assert (x is None) >= (wanted is None)
        else:
            assert wanted == (tuple(x.shape), str(x.dtype).removeprefix("torch."))


@pytest.mark.parametrize("name", [*BUILDS, *DELTA_PREFILLS])
def test_kernels_stay_within_their_budgets(name):
    for kernel, *built in build(BUILDS[name]) if name in BUILDS else of(name):
        budget, used = most(kernel.fn.__name__), known(kernel, *built)
        assert {key: used[key] for key in budget if used[key] > budget[key]} == {}, (kernel.fn.__name__, used)


def test_no_kernel_is_compiled_for_a_length():
    alike = [[dict(T=T) for T in lengths] for lengths in ((1, 16, 64, 1000), (2048, 3333, 8192))]
    alike.append([dict(lengths=lengths) for lengths in ((3,), (5, 0, 7), (1,) * 9)])
    for some in alike:
        found = {frozenset((kernel.fn.__name__, *types.items(), *constants.items())
                           for kernel, types, constants in build(small(**call, H=2, state=True)))
                 for call in some}
        assert len(found) == 1


# What is refused


def refused(device="NVIDIA H200", **changes):
    """Why the platform does not take a call on a GPU."""
    arrays = dict(dtype=torch.bfloat16, K=128, V=128, g=None) | changes
    q, v = (torch.zeros(1, 70, 2, arrays[n], dtype=arrays["dtype"]) for n in "KV")
    inv = GATED_DELTA_RULE.describe(Args(q, q, v, arrays["g"]))
    return passes.cannot_walk(dataclasses.replace(inv, backend="gpu", device=device))


def test_what_it_cannot_do_it_refuses_with_the_reason():
    assert refused() is None
    assert refused(g=torch.zeros(1, 70, 2)) is None
    assert refused(dtype=torch.float16) is None
    for K, V in ((64, 64), (128, 64), (64, 128), (96, 40)):
        assert refused(K=K, V=V) is None
    assert "Hopper" in refused("NVIDIA A100")
    assert "float32" in refused(dtype=torch.float32)
    assert refused(g=torch.zeros(1, 70, 2, 128)) is None
    assert "V = 256" in refused(V=256)
    assert "K = 32" in refused(K=32)
    assert "16 bytes" in refused(V=100)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_auto_takes_it_where_walks_fill_a_gpu(framework, monkeypatch):
    if reason := frontends.cannot_launch(framework, gluon=True):
        pytest.skip(reason)
    monkeypatch.setattr(triton, "__version__", RUN[0])

    def chosen(B, T, H, **sizes):
        inv = keraunos.GatedDeltaRule().invocation(framework, **{"B": B, "T": T, "H": H, "K": 128, **sizes})
        inv = dataclasses.replace(inv, backend="gpu", device="NVIDIA H200")
        return kernel_registry.choose(inv)[0].platform

    assert chosen(2, 16384, 64) == chosen(8, 4096, 32) == chosen(1, 8192, 32, G=16) == "cuda"
    assert chosen(2, 16384, 64, gate="vector") == chosen(1, 8192, 16, gate="vector") == "cuda"
    assert chosen(1, 8192, 8, gate="vector") == chosen(1, 8192, 16, gate="vector", V=64) == "triton"
    assert chosen(1, 8192, 16) == chosen(2, 16384, 64, K=32) == "triton"
    assert chosen(2, 16384, 64, gate="vector", dtype="float16") == "triton"
