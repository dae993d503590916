"""Prefill on the platform ``cuda`` without a GPU: values, what is refused, what ``"auto"`` takes."""

import dataclasses
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from keraunos.frontends.torch import launch as torch_launch
from keraunos.kernels import kernel_registry
from keraunos.kernels.device.hopper import locate_walk
from keraunos.kernels.gated_delta_rule.cuda import call as delta_calls
from keraunos.kernels.gated_delta_rule.cuda import passes as delta_passes
from keraunos.kernels.gluon import RUN
from keraunos.kernels.linear_attention.cuda import passes
from keraunos.kernels.state_pool.contract import Args, describe
from tests.cuda import builds, emulator, mutants
from tests.cuda.delta_rule import joined
from tests.cuda.emulator import EmulatorError
from tests.cuda.platform import PREFILL, delta_prefill, prefill, prefill_options, small_prefill
from tests.linear_attention.cases import GPU
from tests.serving.cases import array

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")

SCHEDULES = [("late", 0), ("early", 1), ("random", 2)]
CASES = {
    "resumed": small_prefill(),
    "gates": small_prefill(gate="scalar", gamma=False, scale=0.7),
    "gates and decays": small_prefill(gate="scalar", pool="bfloat16"),
    "neither": small_prefill(gamma=False, pool="bfloat16"),
    "fresh and empty": small_prefill(lengths=(64, 5, 0, 65), fresh=(0, 2), tail=7),
    "empty and fresh": small_prefill(lengths=(0, 0, 129, 1), fresh=(0, 3), tail=64, gate="scalar", decay=8.0),
    "all padding": small_prefill(lengths=(10, 3), slots=(-1, -1), tail=130),
    "mostly padding": small_prefill(lengths=(0, 65, 0, 3), slots=(-1, -1, -1, 2), fresh=(3,), tail=300, gate="scalar"),
    "float16": small_prefill(dtype="float16", gate="scalar"),
    "shared heads": small_prefill(H=4, HQ=1, G=2, HV=4, HG=2, gate="scalar", lengths=(70, 5, 3, 0)),
    "64": small_prefill(K=64, V=64),
    "64 and 128": small_prefill(K=64, gate="scalar", fresh=(0,)),
    "96 and 40": small_prefill(K=96, V=40, H=1, fresh=(2,), tail=3, pool="bfloat16"),
    "40 and 120": small_prefill(K=40, V=120, H=1, lengths=(3, 5, 70, 0), slots=(3, -1, -1, 0), gate="scalar"),
    "delta": delta_prefill(K=128, V=128, H=1, scale=0.7),
    "delta, fresh and empty": delta_prefill(lengths=(64, 5, 0, 65), fresh=(0, 2), tail=7, norm=True, pool="bfloat16"),
    "delta, no gates": delta_prefill(lengths=(0, 0, 66, 1), fresh=(0, 3), tail=64, H=1, gate="none"),
    "delta, mostly padding": delta_prefill(lengths=(0, 65, 0, 3), slots=(-1, -1, -1, 2), fresh=(3,), tail=300),
    "delta, shared heads": delta_prefill(H=4, HQ=2, G=1, HV=4, HG=2, HB=1, lengths=(3, 5, 2, 0), dtype="float16"),
    "delta, 96 and 40": delta_prefill(K=96, V=40, H=1, lengths=(3, 9, 2, 0), slots=(3, -1, 1, 0), pool="bfloat16"),
}


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES).__getitem__)
def test_values(number):
    mode, seed = SCHEDULES[number % len(SCHEDULES)]
    list(CASES.values())[number].check(lambda case: prefill(case, mode=mode, seed=seed))


DELTA = ("keraunos.kernels.device.hopper", "keraunos.kernels.gated_delta_rule.cuda.walk")


@pytest.mark.parametrize(("module", "before", "after"), [
    (DELTA[1], "elif begins:", "elif begins | True:"),
    (DELTA[1], "none | done | (slot < 0)", "none | done"),
    (DELTA[1], "p_ht = ht + (slot *", "p_ht = ht + (i_n *"),
    (DELTA[0], "(T - end).to(gl.int32)", "0"),
], ids=["fresh", "padding", "slot", "tail"])
def test_faults_of_a_pool_are_found(module, before, after, tmp_path):
    replaced = mutants.replaced(DELTA, module, before, after, tmp_path)
    case = delta_prefill(lengths=(3, 5, 2, 0), H=1, fresh=(0,), tail=2)
    with pytest.raises((EmulatorError, AssertionError)):
        case.check(lambda case: prefill(case, replaced=replaced))


SEGMENTS = [
    delta_prefill(lengths=(3, 150, 0, 2), slots=(3, 1, 6, 0), fresh=(1, 2), tail=70, pool="bfloat16"),
    delta_prefill(K=128, V=128, H=1, lengths=(0, 193, 70, 1), fresh=(3,), norm=True),
    delta_prefill(lengths=(65, 130), slots=(2, -1), H=1, gate="none", tail=3),
]


@pytest.mark.parametrize("number", range(len(SEGMENTS)))
def test_long_prompts_are_cut(number):
    mode, seed = SCHEDULES[number]
    with (mock.patch.object(delta_calls, "SEGMENTS", 64),
          mock.patch.object(delta_passes, "_joined", side_effect=joined)):
        SEGMENTS[number].check(lambda case: prefill(case, mode=mode, seed=seed))
        delta_passes._joined.assert_called_once()


def transposed(given):
    """A pool stored as ``[slots, H, V, K]``, of which the layer before this one shares the memory."""
    layers = torch.stack([given["states"], given["states"]], 1).mT.contiguous()
    return given | {"states": layers[:, 1].mT}


@pytest.mark.parametrize("case", [
    *(small_prefill(K=96, pool=pool, gate=gate, fresh=(1,), tail=3)
      for gate in ("none", "scalar") for pool in ("float32", "bfloat16")),
    delta_prefill(K=96, H=1, lengths=(3, 5, 2, 0), fresh=(1,), tail=3),
], ids=lambda case: f"{case.gate}, {case.pool}{', delta' * case.delta}")
def test_pools_with_strides(case):
    case.check(lambda case: prefill(case, transposed))


@pytest.mark.parametrize("skip", [0, 1], ids=["copied", "stored"])
@pytest.mark.parametrize("case", [
    *(small_prefill(V=V, slots=(3, -1, 6, 0), gate="scalar", tail=70) for V in (128, 40)),
    delta_prefill(V=40, slots=(3, -1, 6, 0), H=1, lengths=(3, 5, 70, 0), tail=3),
], ids=lambda case: f"{case.V}{', delta' * case.delta}")
def test_outputs_go_where_they_are_wanted(case, skip):
    """An output may begin where copies of blocks cannot: at no multiple of 16 bytes."""
    size = case.rows[0] * case.H * case.V
    room = torch.full((size + 8,), torch.nan, dtype=torch.bfloat16)
    out = room[skip : skip + size].view(*case.rows, case.H, case.V)
    case.check(lambda case: prefill(case, out=out))
    case.check(lambda case: (array(out), prefill(case)[1]))
    assert room[:skip].isnan().all()
    assert room[skip + size :].isnan().all()


def test_tokens_with_strides():
    """Slices of one projection, which copies of blocks can take, and which they cannot."""
    case = small_prefill(gate="scalar", lengths=(70, 5, 3, 0))
    for begin in (0, 8, 1):

        def view(given, begin=begin):
            names = ("query", "key", "value")
            fused = torch.cat([given[name] for name in names], -1)
            wide = torch.cat([fused[..., :begin], fused, fused[..., : 8 - begin]], -1)
            return given | {name: wide[..., begin + 128 * i :][..., :128] for i, name in enumerate(names)}

        case.check(lambda case, view=view: prefill(case, view))


def test_no_tokens():
    small_prefill(lengths=(0, 0), slots=(-1, 3)).check(prefill)


def test_no_kernel_is_compiled_for_lengths_or_requests():
    calls = dict(lengths=(70, 5, 130, 0)), dict(lengths=(1,), slots=(3,)), dict(lengths=(16, 16), slots=(0, 1), size=9)
    for options in ({}, dict(gate="scalar", fresh=(0,)), dict(gamma=False, delta=True)):
        assert len({tuple(builds.prefills(small_prefill(**call, **options))) for call in calls}) == 1


def test_a_first_call_in_pytorch_builds_side_by_side():
    """Only the delta rule has several kernels."""
    assert torch_launch.launcher(Args, PREFILL[True], prefill_options(delta_prefill())).rehearsal
    assert not torch_launch.launcher(Args, PREFILL[False], prefill_options(small_prefill())).rehearsal


# What is refused


def described(T=70, N=2, H=64, device="NVIDIA H200", op_id="prefill", **changes):
    """A prefill on a GPU; the arrays are never read."""
    sizes = dict(dtype=torch.bfloat16, K=128, V=128, gate=None, gamma=None, beta=None, boundaries=None) | changes
    q, v = (torch.empty(T, H, sizes[n], dtype=sizes["dtype"]) for n in "KV")
    slots = torch.zeros(N, dtype=torch.int32)
    args = Args(q, v, q, sizes["gate"], sizes["gamma"], torch.empty(1, H, sizes["K"], sizes["V"]), slots,
                cu_seqlens=torch.zeros(N + 1, dtype=torch.int32), tokens=sizes["boundaries"],
                targets=sizes["boundaries"], beta=sizes["beta"])
    return dataclasses.replace(describe(op_id, args), backend="gpu", device=device)


def test_what_it_cannot_do_it_refuses_with_the_reason():
    def refused(**changes):
        return passes.prefill.unsupported(described(**changes))

    assert refused() is None
    for dtype in (torch.bfloat16, torch.float16):
        assert refused(dtype=dtype, gate=torch.zeros(70, 64), gamma=torch.zeros(64)) is None
    assert refused(K=96, V=40) is None
    assert "Hopper" in refused(device="NVIDIA A100")
    assert "float32" in refused(dtype=torch.float32)
    assert "V = 256" in refused(V=256)
    assert "per token and dimension" in refused(gate=torch.zeros(70, 64, 128))
    assert "boundaries" in refused(boundaries=torch.zeros(3, dtype=torch.int32))


def test_what_it_cannot_do_of_the_delta_rule_it_refuses_with_the_reason():
    def refused(**changes):
        inv = described(op_id="delta_prefill", beta=torch.zeros(70, 64), **changes)
        return delta_passes.delta_prefill.unsupported(inv)

    assert refused() is None
    assert refused(dtype=torch.float16, gate=torch.zeros(70, 64)) is None
    assert "V = 256" in refused(V=256)
    assert "per token and dimension" in refused(gate=torch.zeros(70, 64, 128))
    assert "boundaries" in refused(boundaries=torch.zeros(3, dtype=torch.int32))


def test_auto_takes_it_where_walks_fill_the_gpu(monkeypatch):
    monkeypatch.setattr(triton, "__version__", RUN[0])

    def chosen(*call, **changes):
        inv = described(*call, **changes)
        row, _ = kernel_registry.choose(inv)
        return row.platform

    gates = dict(gate=torch.empty(65536, 64))
    assert chosen(65536, 32) == chosen(65536, 32, **gates) == chosen(65536, 1, **gates) == "cuda"
    assert chosen(65536, 1) == chosen(4096, 256) == "triton"
    assert chosen(65536, 32, boundaries=torch.zeros(3, dtype=torch.int32)) == chosen(65536, 32, K=64) == "triton"
    assert chosen(65536, 32, device="NVIDIA A100") == "triton"
    delta = dict(op_id="delta_prefill", beta=torch.empty(65536, 64))
    assert chosen(65536, 32, **delta) == chosen(65536, 1, **delta, **gates) == "cuda"
    assert chosen(65536, 32, **delta, boundaries=torch.zeros(3, dtype=torch.int32)) == "triton"


class Unknown(int):
    """A size of a graph for all lengths: without a value to be found by."""

    __hash__ = None


def test_auto_chooses_for_sizes_that_are_not_known(monkeypatch):
    monkeypatch.setattr(triton, "__version__", RUN[0])
    inv = described(65536, 32)
    row, _ = kernel_registry.choose(dataclasses.replace(inv, dims={n: Unknown(x) for n, x in inv.dims.items()}))
    assert row.platform == "cuda"


# In which order programs walk


@gluon.jit
def order_kernel(cu_seqlens, found, H: gl.constexpr, PACKED: gl.constexpr):
    i_h, i_o = locate_walk(cu_seqlens, H, PACKED)
    gl.store(found + gl.program_id(0), i_o * H + i_h)


@pytest.mark.parametrize(("lengths", "order"), [
    ((3, 70, 0, 70, 5), (1, 3, 4, 0, 2)), ((0, 0), (0, 1)), ((7,), (0,)), ((1, *[0] * 127, 5), range(129)),
])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_longest_sequences_start_first(lengths, order, dtype):
    """Where there are many, they start in their order: other programs end late enough."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    found = torch.full((len(lengths), 2), -1, dtype=torch.int32)
    emulator.launch(order_kernel, (found.numel(),), cu_seqlens, found, 2, True, num_warps=4)
    assert found.tolist() == [[2 * n, 2 * n + 1] for n in order]
