"""The forward of softmax attention in Gluon: values in the emulator against float64, and what it is built to."""

import dataclasses
import itertools

import pytest
import torch

from keraunos import frontends
from tests.cuda.softmax_attention import Case, built, errors, run

PACKED = (100, 130, -20, 50), (100, 130, -20, 50)
EVERYTHING = dict(causal=True, soft_cap=30.0, sinks=1, segments=PACKED)
CASES = {
    "plain": Case(),
    "other lengths": Case(T=130, S=333),
    "causal": Case(T=300, causal=True),
    "64": Case(T=300, D=64, causal=True),
    "float16": Case(T=300, dtype="float16", causal=True),
    "float16, 64": Case(D=64, dtype="float16"),
    "96 and 40": Case(D=96, V=40, causal=True),
    "256": Case(T=300, D=256, causal=True, block=64, held=1),
    "everything, 256": Case(T=300, D=256, V=200, dtype="float16", block=64, held=1, **EVERYTHING),
    "shared keys": Case(H=4, G=1, causal=True),
    "one query": Case(T=1, S=300, H=4, G=1),
    "negative scale": Case(scale=-0.2, causal=True),
    "offsets": Case(T=70, S=300, B=2, causal=True, offset=(230, -40)),
    "window": Case(T=400, window=(100, 0)),
    "window on both sides": Case(T=400, window=(60, 150)),
    "window elsewhere": Case(T=300, window=(-200, 260)),
    "cap": Case(T=300, causal=True, soft_cap=20.0),
    "large cap": Case(T=300, causal=True, soft_cap=100.0),
    "cap, float16": Case(T=300, causal=True, soft_cap=20.0, dtype="float16"),
    "cap by polynomials": Case(T=300, causal=True, soft_cap=20.0, dtype="float16", tangent=2),
    "small cap by polynomials": Case(T=300, causal=True, soft_cap=0.25, scale=1.0, tangent=2),
    "sinks": Case(T=300, window=(50, 0), sinks=3),
    "segments": Case(T=300, causal=True, segments=PACKED),
    "lengths of keys": Case(T=140, S=300, B=2, segments=((140,), (170, -130))),
    "hidden rows": Case(T=300, S=260, causal=True, offset=(-150,)),
    "hidden rows with a cap": Case(T=300, S=260, causal=True, offset=(-150,), soft_cap=30.0),
    "hidden rows with sinks": Case(T=300, S=260, causal=True, offset=(-150,), sinks=2),
    "all hidden": Case(T=140, S=130, segments=((-140,), (130,))),
    "everything": Case(T=300, **EVERYTHING),
    "everything, float16": Case(T=300, window=(90, 10), offset=(7,), dtype="float16", **EVERYTHING),
    "blocks of 64": Case(T=300, causal=True, block=64, stages=3),
    "tiles of 256": Case(T=300, D=64, causal=True, rows=128, block=64),
    "without turns": Case(T=300, causal=True, turns=False),
    "one tile held": Case(T=300, causal=True, held=1),
    "tiles as they come": Case(T=300, B=2, shared=True, **EVERYTHING),
    "a program for each tile": Case(T=300, causal=True, programs=6),
}


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_float64(name):
    case = CASES[name]
    output, log = errors(case, run(case))
    assert output < (3e-3 if case.dtype == "bfloat16" else 4e-4)
    assert log < 2e-5


@pytest.mark.parametrize("name", ["causal", "everything", "tiles as they come", "one tile held"])
def test_every_schedule_gives_the_same_bits(name):
    first, log = run(CASES[name])
    for mode, seed in itertools.product(("late", "early", "random"), (0, 1, 2)):
        again = run(CASES[name], mode, seed)
        assert torch.equal(first, again[0])
        assert torch.equal(log, again[1])


def test_who_computes_a_tile_changes_no_bit():
    first, log = run(CASES["everything"])
    for programs, shared in ((1, True), (6, False)):
        output, again = run(dataclasses.replace(CASES["everything"], programs=programs, shared=shared))
        assert torch.equal(first, output)
        assert torch.equal(log, again)


@pytest.mark.parametrize("name", ["plain", "causal", "64", "float16", "everything", "everything, float16",
                                  "blocks of 64", "tiles of 256", "tiles as they come", "cap by polynomials", "256"])
def test_it_fits(name):
    used = built(CASES[name])
    assert used["registers"] <= 168  # of a thread when the kernel starts, before partitions give theirs to others
    assert used["stack"] <= 64  # of what is read once for a tile; nothing in the loops of products
    assert used["shared"] <= frontends.SHARED_MEMORY
    assert used["waits"] == 0
