"""The gradients of softmax attention on ``cuda``: values in the emulator against float64, and what is built."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from keraunos.kernels.softmax_attention.cuda import passes
from keraunos.kernels.softmax_attention.cuda.gradients import gradients_kernel
from keraunos.kernels.softmax_attention.shared.gradients import bias_kernel
from tests.cuda.builds import ATTENTION, most
from tests.cuda.softmax_attention import TRITON, Case, builds, built, run

PACKED = (100, 60, -20, 50), (100, 60, -20, 50)
EVERYTHING = dict(T=230, causal=True, soft_cap=30.0, sinks=1, segments=PACKED)
CASES = {
    "other lengths": Case(T=130, S=200, B=2, H=4, G=1),
    "causal": Case(T=300, causal=True),
    "64, float16": Case(T=300, D=64, dtype="float16", causal=True),
    "96 and 40, shared keys": Case(T=150, H=4, G=2, D=96, V=40, causal=True),
    "one query": Case(T=1, S=200, H=4, G=1),
    "negative scale": Case(scale=-0.2, causal=True),
    "window, offsets": Case(T=200, S=300, B=2, H=1, G=1, window=(100, 20), offset=(90, -60)),
    "large cap": Case(causal=True, soft_cap=20.0, exact=True),
    "lengths of keys": Case(T=140, S=300, B=2, H=1, G=1, segments=((140,), (170, -130))),
    "segments in no order": Case(T=400, H=1, G=1, segments=((100, -100, 200), (40, 160, 200))),
    "all hidden": Case(T=140, S=130, H=1, G=1, segments=((-140,), (130,))),
    "mask": Case(T=300, S=260, mask=(1, 1), window=(280, 20)),
    "mask, shared keys": Case(B=2, H=4, mask=(2, 2), soft_cap=20.0, sinks=1, causal=True, offset=(-40, 30)),
    "dropout": Case(dropout=0.3, causal=True),
    "dropout, shared keys, float16": Case(T=230, H=4, G=1, dropout=0.3, segments=PACKED, dtype="float16"),
    "bias": Case(B=2, H=4, bias=(2, 2), window=(60, 20)),
    "bias, shared keys": Case(T=150, S=170, B=2, H=4, G=1, bias=(1, 4), scale=-0.1, sinks=2, dtype="float16"),
    "bias, dropout, cap, 64": Case(H=4, D=64, bias=(1, 1), dropout=0.6, soft_cap=30.0, causal=True, offset=(60,)),
    "everything": Case(**EVERYTHING),
    "everything, float16, 64": Case(**EVERYTHING | dict(window=(90, 10), offset=(7,), dtype="float16", D=64)),
}


def gradients(name, *schedule, **changes):
    return run(dataclasses.replace(CASES[name], **changes), *schedule, gradients=True)


@pytest.mark.parametrize("name", CASES)
def test_they_agree_with_float64(name):
    case = CASES[name]
    wanted = [x for x in case.wanted_gradients() if x is not None]
    for got, x in zip(gradients(name), wanted, strict=True):
        error = np.linalg.norm(got.double().numpy() - x) / (np.linalg.norm(x) or 1)
        # Those of sinks are two numbers, whose terms cancel: in twelve lengths 1e-4 to 1e-3.
        few = 2 if x.size < 10 else 1
        assert error < few * (4e-3 if case.dtype == "bfloat16" else 8e-4)


def test_every_schedule_gives_the_same_bits():
    first = gradients("everything")
    for mode, seed in itertools.product(("late", "early", "random"), (0, 1)):
        assert all(map(torch.equal, first, gradients("everything", mode, seed)))


def test_how_many_programs_there_are_changes_no_bit():
    assert all(map(torch.equal, gradients("other lengths"), gradients("other lengths", programs=1)))


@pytest.mark.parametrize("limits", [dict(causal=True, offset=(0, 90, -20)), dict(sinks=1)])
def test_heads_at_once_change_no_bit(limits, monkeypatch):
    """Launches for some of the heads each, whose sums take less memory, the last of them for fewer."""
    case = Case(T=70, S=130, B=3, H=4, G=2, **limits)
    whole = run(case, gradients=True)
    monkeypatch.setattr(passes, "_ENOUGH_BLOCKS", 4)
    assert passes._heads_at_once(6, 2) == [(0, 4), (4, 2)]
    assert all(map(torch.equal, whole, run(case, gradients=True)))


@pytest.mark.parametrize("name", ATTENTION)
def test_they_fit(name):
    used, budget = built(CASES[name], gradients_kernel), most(name)
    assert {key: used[key] for key in budget if used[key] > budget[key]} == {}


def test_a_bias_has_a_gradient_where_it_is_learned(monkeypatch):
    made = []

    def gradient(inputs, outputs, constants):
        made.append(torch.ones(*outputs["dbias"][0]))
        return made

    monkeypatch.setitem(TRITON, bias_kernel, gradient)
    others = gradients("bias")
    assert not made
    *first, dbias = gradients("bias", learned=True)
    assert dbias is made[0]
    assert dbias.shape == CASES["bias"].arrays["bias"].shape
    assert all(map(torch.equal, first, others))


def test_nothing_is_compiled_for_a_length():
    cases = [Case(**EVERYTHING | dict(T=T, S=S, segments=((T,), (S,))), programs=10**9)
             for T, S in ((65, 1), (80, 130), (1000, 64), (1280, 2048))]
    assert len({frozenset(builds(case, True)) for case in cases}) == 1
