"""Softmax attention on ``cuda``: values in the emulator against float64, what is built, what is refused."""

import dataclasses
import itertools

import pytest
import torch
import triton

import keraunos
from keraunos import frontends
from keraunos.kernels import kernel_registry
from keraunos.kernels.gluon import RUN
from keraunos.kernels.softmax_attention.cuda import passes
from keraunos.kernels.softmax_attention.cuda.forward import forward_kernel
from tests.cuda.softmax_attention import Case, builds, built, call, errors, run

PACKED = (100, 130, -20, 50), (100, 130, -20, 50)
EVERYTHING = dict(causal=True, soft_cap=30.0, sinks=1, segments=PACKED)
WINDOW = dict(window=(150, 20), segments=PACKED)
CASES = {
    "plain": Case(),
    "other lengths": Case(T=130, S=333),
    "causal": Case(T=300, causal=True),
    "64": Case(T=300, D=64, causal=True),
    "float16": Case(T=300, dtype="float16", causal=True),
    "float16, 64": Case(D=64, dtype="float16"),
    "96 and 40": Case(D=96, V=40, causal=True),
    "256": Case(D=256, causal=True),
    "everything, 256": Case(T=300, D=256, V=200, dtype="float16", **EVERYTHING),
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
    "cap by polynomials": Case(T=300, causal=True, soft_cap=20.0, dtype="float16", exact=True),
    "small cap by polynomials": Case(T=300, causal=True, soft_cap=0.25, scale=1.0, exact=True),
    "sinks": Case(T=300, window=(50, 0), sinks=3),
    "segments": Case(T=300, causal=True, segments=PACKED),
    "lengths of keys": Case(T=140, S=300, B=2, segments=((140,), (170, -130))),
    "hidden rows": Case(T=300, S=260, causal=True, offset=(-150,)),
    "hidden rows with a cap": Case(T=300, S=260, causal=True, offset=(-150,), soft_cap=30.0),
    "hidden rows with sinks": Case(T=300, S=260, causal=True, offset=(-150,), sinks=2),
    "all hidden": Case(T=140, S=130, segments=((-140,), (130,))),
    "everything": Case(T=300, **EVERYTHING),
    "everything, float16": Case(T=300, window=(90, 10), offset=(7,), dtype="float16", **EVERYTHING),
    "bias": Case(T=300, S=200, B=2, bias=(2, 2), scale=-0.1),
    "bias of all rows, shared": Case(T=150, B=2, H=4, G=2, bias=(1, 2), causal=True, soft_cap=20.0, sinks=1),
    "mask": Case(T=300, S=260, B=2, H=4, mask=(2, 2), dtype="float16", scale=-0.1),
    "mask of all rows": Case(T=300, mask=(1, 1), soft_cap=20.0, **WINDOW),
    "dropout": Case(T=300, dropout=0.3, causal=True),
    "everything else": Case(T=150, G=1, bias=(1, 2), dropout=0.6, sinks=2, soft_cap=80.0, causal=True, D=256),
    "huge cap": Case(T=300, causal=True, soft_cap=1e6, dtype="float16"),
    "blocks of 64": Case(T=300, causal=True, cfg=(("block_k", 64), ("num_stages", 3))),
    "tiles of 256": Case(T=300, D=64, causal=True, cfg=(("block_q", 256), ("block_k", 64))),
    "tiles as they come": Case(T=300, B=2, **EVERYTHING),
    "as many tiles each": Case(T=300, B=2),
    "a program for each tile": Case(T=300, causal=True, programs=6),
}


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_float64(name):
    case = CASES[name]
    output, log = errors(case, run(case))
    assert output < (3e-3 if case.dtype == "bfloat16" else 4e-4)
    assert log < 2e-5


@pytest.mark.parametrize("name", ["everything", "tiles as they come"])
def test_every_schedule_gives_the_same_bits(name):
    first, log = run(CASES[name])
    for mode, seed in itertools.product(("late", "early", "random"), (0, 1)):
        again = run(CASES[name], mode, seed)
        assert torch.equal(first, again[0])
        assert torch.equal(log, again[1])


def test_who_computes_a_tile_changes_no_bit():
    first, log = run(CASES["everything"])
    for programs in (1, 6):
        output, again = run(dataclasses.replace(CASES["everything"], programs=programs))
        assert torch.equal(first, output)
        assert torch.equal(log, again)


BUILT = "causal", "64", "256", "everything", "tiles of 256", "mask", "dropout", "everything else"


@pytest.mark.parametrize("name", BUILT)
def test_it_fits(name):
    used = built(CASES[name], forward_kernel)
    assert used["registers"] <= 168  # of a thread when the kernel starts, before partitions give theirs to others
    # Of what is read once for a tile; nothing in the loops of products, but for a cap with a bias and a mask.
    assert used["stack"] <= (192 if name == "everything else" else 64)
    assert used["shared"] <= frontends.SHARED_MEMORY
    assert used["waits"] == 0


def test_nothing_is_compiled_for_a_length():
    for programs in (10**9, 1):  # tiles are fewer than run at once, and more
        cases = [Case(T=T, S=S, programs=programs, **EVERYTHING | {"segments": ((T,), (S,))})
                 for T, S in ((65, 1), (80, 130), (1000, 64), (1280, 2048))]
        assert len({frozenset(builds(case)) for case in cases}) == 1


@pytest.mark.parametrize("cfg", [(("block_q", 32),), (("block_k", 256),), (("block_q", 256),)], ids=str)
def test_blocks_that_it_does_not_have_are_refused(cfg):
    with pytest.raises(ValueError, match=r"attention: block_q = \d+, .* expected 64, 128 or 256, and 64 or 128"):
        call(Case(cfg=cfg))


def on_a_gpu(framework="torch", device="NVIDIA H200", arrays=None, options=None, **sizes):
    inv = keraunos.Attention().invocation(framework, **{"T": 4096, "H": 16, "K": 128, "causal": True, **sizes})
    return dataclasses.replace(inv, backend="gpu", device=device, arrays={**inv.arrays, **(arrays or {})},
                               options={**inv.options, **(options or {})})


def test_what_it_cannot_do_it_refuses_with_the_reason():
    def refused(*args, **changes):
        return passes.unsupported(on_a_gpu(*args, **changes))

    for arrays in ({"bias": ("bfloat16", 4), "seed": ("int64", 1)}, {"mask": ("bool", 4)}):
        assert refused(arrays=arrays) is None
    assert refused() is refused(dtype="float16", window=(5, 0), sinks=1, segments=True, soft_cap=True) is None
    for K, V in ((64, 64), (16, 128), (200, 40), (256, 256)):
        assert refused(K=K, V=V) is None
    assert "Hopper" in refused(device="NVIDIA A100")
    assert "float32" in refused(dtype="float32")
    assert "V = 264" in refused(V=264)
    assert "16 bytes" in refused(K=100)
    assert "not both" in refused(arrays={"bias": ("bfloat16", 4), "mask": ("bool", 4)})
    assert "segment ids" in refused(arrays={"key_segments": ("int16", 2)})
    assert "float64" in refused(options={"softmax_dtype": "float64"})


@pytest.mark.parametrize(("framework", "vendor"), [("torch", "torch"), ("jax", "xla")])
def test_auto_takes_it_for_what_the_vendors_kernels_do_not_do(framework, vendor, monkeypatch):
    pytest.importorskip(framework)
    monkeypatch.setattr(triton, "__version__", RUN[0])
    if reason := frontends.cannot_launch(framework, gluon=True):
        pytest.skip(reason)

    def chosen(**call):
        return kernel_registry.choose(on_a_gpu(framework, **call))[0].platform

    assert chosen() == chosen(causal=False) == vendor
    assert chosen(window=(1023, 0)) == chosen(sinks=1) == chosen(segments=True) == chosen(K=256) == "cuda"
    assert chosen(sinks=1, dtype="float32") == chosen(sinks=1, device="NVIDIA A100") == "triton"
    assert chosen(arrays={"bias": ("bfloat16", 4)}) == "triton"
    # It was measured to be faster in long calls only.
    assert chosen(sinks=1, T=4095) == chosen(sinks=1, T=100, S=8192) == "triton"
    # Few queries on a cache: all but one that sees all keys, which PyTorch's kernels do as fast.
    assert chosen(sinks=1, T=1, S=8192) == chosen(T=4, S=8192) == chosen(causal=False, T=4, S=8192) == "cuda"
    assert chosen(causal=False, T=1, S=8192) == ("torch" if framework == "torch" else "cuda")
    assert chosen(sinks=1, T=1, S=2047) == "triton"
