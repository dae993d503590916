"""Softmax attention of few queries on ``cuda``: values in the emulator against float64, and what is built."""

import dataclasses
import itertools

import pytest
import torch

from keraunos import frontends
from keraunos.kernels.softmax_attention.cuda import passes
from keraunos.kernels.softmax_attention.cuda.decode import decode_kernel, join_kernel
from tests.cuda import mutants
from tests.cuda.emulator import EmulatorError
from tests.cuda.softmax_attention import Case, builds, built, call, errors, run

CASES = {
    "one query": Case(T=1, S=300, H=4, G=1),
    "a head of keys each": Case(T=1, S=130),
    "two heads": Case(T=2, S=256, H=4, G=2, causal=True, offset=(200,)),
    "eight heads": Case(T=1, S=700, H=8, G=1, B=2),
    "seven heads": Case(T=1, S=200, H=14, G=2),
    "a full tile": Case(T=16, S=300, H=4, G=1, causal=True, offset=(250,)),
    "some queries": Case(T=5, S=300, H=6, G=2, B=2, causal=True, offset=(290, 100)),
    "one key": Case(T=1, S=1, H=4, G=2),
    "as many keys as blocks have": Case(T=3, S=256),
    "many parts": Case(T=2, S=9000, H=2, G=1, D=64, programs=40, cfg=(("block_k", 64),)),
    "parts that are longer than the ring": Case(T=2, S=900, H=4, G=2, causal=True, offset=(890,), programs=1),
    "parts of different lengths": Case(T=1, S=1500, H=4, G=2, B=3, causal=True, offset=(1499, 700, -1)),
    "64": Case(T=1, S=500, H=8, G=2, D=64),
    "96 and 40": Case(T=2, S=400, H=4, G=2, D=96, V=40),
    "256": Case(T=1, S=300, H=4, G=1, D=256),
    "float16": Case(T=1, S=500, H=4, G=2, dtype="float16"),
    "float16, 256": Case(T=3, S=200, H=2, G=2, D=256, V=200, dtype="float16"),
    "negative scale": Case(T=1, S=300, scale=-0.2),
    "top left": Case(T=4, S=300, causal=True),
    "window": Case(T=3, S=900, H=4, G=2, B=2, window=(300, 0), offset=(890, 150)),
    "window on both sides": Case(T=2, S=900, window=(200, 100), offset=(400,)),
    "window elsewhere": Case(T=2, S=600, window=(-200, 260)),
    "window past the end": Case(T=2, S=300, window=(100, 0), offset=(1000,)),
    "cap": Case(T=1, S=600, H=4, G=1, soft_cap=20.0),
    "cap by polynomials": Case(T=1, S=600, soft_cap=20.0, dtype="float16", exact=True),
    "sinks": Case(T=2, S=700, H=4, G=2, sinks=3),
    "sinks, one part": Case(T=2, S=100, H=4, G=2, sinks=1),
    "key lengths": Case(T=2, S=900, B=2, segments=((2,), (500, -400))),
    "key length of 0": Case(T=2, S=300, H=4, G=1, segments=((2,), (-300,)), sinks=1),
    "segments": Case(T=6, S=700, H=4, G=1, segments=((2, -1, 3), (300, 100, -50, 250))),
    "hidden rows": Case(T=4, S=600, H=4, G=2, causal=True, offset=(-2,)),
    "hidden rows with sinks": Case(T=4, S=600, causal=True, offset=(-2,), sinks=2),
    "all hidden": Case(T=1, S=600, causal=True, offset=(-10,)),
    "everything": Case(T=4, S=800, H=8, G=2, B=2, causal=True, window=(500, 0), offset=(700, 300), soft_cap=30.0,
                       sinks=2, segments=((4,), (750, -50))),
    "blocks of 128": Case(T=1, S=700, cfg=(("block_k", 128),)),
    "several tiles": Case(T=70, S=300, H=4, G=2, causal=True, offset=(230,), cfg=(("block_q", 64),)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_float64(name):
    case = CASES[name]
    output, log = errors(case, run(case))
    assert output < (3e-3 if case.dtype == "bfloat16" else 4e-4)
    assert log < 2e-5


@pytest.mark.parametrize(("name", "seen"), [("key lengths", [(0, 500)] * 2), ("some queries", [(0, 295), (0, 105)]),
                                            ("window", [(590, 893), (0, 153)])])
def test_what_no_query_sees_may_hold_anything(name, seen):
    case = dataclasses.replace(CASES[name])
    want = run(case)
    for b, (first, end) in enumerate(seen):
        for x in (case.arrays["key"], case.arrays["value"]):
            x[b, :first] = x[b, end:] = float("nan")
    for got, finite in zip(run(case), want, strict=True):
        assert torch.equal(got, finite)


@pytest.mark.parametrize("name", ["one query", "parts that are longer than the ring", "everything"])
def test_every_schedule_gives_the_same_bits(name):
    first, log = run(CASES[name])
    for mode, seed in itertools.product(("late", "early", "random"), (0, 1)):
        again = run(CASES[name], mode, seed)
        assert torch.equal(first, again[0])
        assert torch.equal(log, again[1])


# Two threads of a partition, which is one actor to the emulator: one makes the barriers, one may give them to copies.
UNSEEN = mutants.steps(mutants.DECODE)[7]


@pytest.mark.parametrize("step", mutants.steps(mutants.DECODE), ids=mutants.label)
def test_each_missing_step_is_found(step, tmp_path):
    if step == UNSEEN:
        assert mutants.label(step) == "decode:thread_barrier()"
        return
    replaced = mutants.kernels(mutants.DECODE, step, tmp_path)
    with pytest.raises(EmulatorError):
        run(CASES["parts that are longer than the ring"], replaced=replaced)


BUILT = "one query", "64", "96 and 40", "256", "everything", "blocks of 128"


@pytest.mark.parametrize("name", BUILT)
def test_it_fits(name):
    used = built(CASES[name], decode_kernel)
    # Two programs on a multiprocessor, but for what has large tiles.
    assert used["registers"] <= (255 if name in ("256", "blocks of 128") else 176)
    assert used["stack"] == 0
    assert used["shared"] <= (frontends.SHARED_MEMORY if name in ("256", "blocks of 128") else 115_712)
    assert used["waits"] == 0
    assert used["warps"] == 4


def test_parts_are_joined_without_spills():
    assert built(CASES["everything"], join_kernel)["stack"] == 0


def test_it_is_one_launch_or_two():
    assert [build[0] for build in builds(CASES["one key"])] == [decode_kernel]
    assert [build[0] for build in builds(CASES["many parts"])] == [decode_kernel, join_kernel]


def test_nothing_is_compiled_for_a_length():
    cases = [Case(T=T, S=S, B=B, H=4, G=2, causal=True, offset=(S,) * B)
             for B, T, S in ((1, 1, 1000), (2, 3, 5000), (3, 16, 2048))]
    assert len({frozenset(builds(case)) for case in cases}) == 1


def test_programs_have_about_as_many_blocks():
    def parts(tiles, blocks, programs=264, **flags):
        return passes._parts(tiles, blocks, programs, {**dict.fromkeys(("LEFT", "RIGHT", "OFFSET", "SEGMENTS"), False),
                                                       **flags})

    assert parts(512, 256) == parts(2048, 32) == parts(1, 1) == 1
    assert parts(8, 2048) == 33  # one round
    assert parts(300, 256) == 4  # four rounds and a half, for one and an eighth
    assert parts(64, 512, OFFSET=True) == parts(64, 512, SEGMENTS=True) == 17
    assert parts(64, 512, OFFSET=True, LEFT=True, RIGHT=True) == parts(64, 512) == 4


def test_few_queries_take_its_configuration():
    for case, few in ((Case(T=16, H=4, G=1), True), (Case(T=17, H=4, G=1), False), (Case(T=64), True)):
        kernels = {build[0] for build in builds(dataclasses.replace(case, S=300))}
        assert (decode_kernel in kernels) is few
    for extra in (dict(bias=(1, 1)), dict(mask=(1, 1)), dict(dropout=0.5)):
        assert decode_kernel not in {build[0] for build in builds(Case(T=1, S=300, **extra))}
        with pytest.raises(ValueError, match="expected 128 or 256 on cuda with biases, masks and dropout"):
            call(Case(T=1, S=300, **extra, cfg=(("block_q", 64),)))
