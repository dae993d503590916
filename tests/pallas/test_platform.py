"""What the platform says that it cannot do, and how it cuts sequences."""

import dataclasses

import numpy as np
import pytest

import keraunos
from keraunos import frontends
from keraunos.ops.invocation import UnsupportedError
from keraunos.ops.registry import kernel_registry
from tests.linear_attention.cases import GPU
from tests.pallas.cases import NEEDS_JAX, jax


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="needs a jax before 0.11")
def test_an_older_jax_is_named_as_the_reason():
    q = jax.numpy.ones((1, 8, 1, 64), "bfloat16")
    with pytest.raises(UnsupportedError, match=r"pallas: (needs a gpu device|cannot be imported: needs jax 0\.11)"):
        keraunos.lightning_attention(q, q, q, layer_idx=0, num_layers=2, platform="pallas")
    with pytest.raises(UnsupportedError, match=r"needs jax 0\.11 or later .*this is jax 0\."):
        kernel_registry.get("lightning_attn", platform="pallas", backend="gpu")


@NEEDS_JAX
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"dtype": "float16", "K": 128}, None),
        ({"dtype": "float32"}, "takes bfloat16 and float16"),
        ({"K": 96}, "head dims of 64, 128 and 256; the call has K = 96, V = 64"),
        ({"V": 512}, "K = 64, V = 512"),
        ({"K": 256, "V": 256}, None),
        ({"N": 3}, None),
        ({"device": "NVIDIA A100-SXM4-80GB"}, "needs a Hopper GPU"),
        ({"device": "NVIDIA GB200"}, "needs a Hopper GPU"),
        ({"device": "NVIDIA GH200 480GB"}, None),
        ({"device": "NVIDIA H100 80GB HBM3"}, None),
        ({"g_gamma": "learned"}, None),
        ({"gate": "scalar"}, None),
        ({"gate": "scalar", "dtype": "float16"}, "takes gates and decays that are arrays in bfloat16"),
        ({"g_gamma": "learned", "dtype": "float16"}, "takes gates and decays that are arrays in bfloat16"),
        ({"gate": "vector", "dtype": "float16"}, "takes gates and decays that are arrays in bfloat16"),
        ({"gate": "vector"}, None),
        ({"G": 1}, None),
        ({"HQ": 1}, "takes as many heads of values as of keys"),
        ({"G": 1, "HV": 2}, "takes as many heads of values as of keys"),
        ({"gate": "scalar", "HG": 1}, "and of gates as of queries"),
        (
            {"gate": "vector", "K": 256},
            "head dims of 64 and 128 with gates per token and dimension; the call has K = 256",
        ),
    ],
    ids=str,
)
def test_it_says_what_it_cannot_do(change, reason):
    from keraunos.kernels.linear_attention.pallas.passes import unsupported

    change = {"dtype": "bfloat16", "device": "NVIDIA H200", "g_gamma": "constant", **change}
    sizes = {"T": 100, "H": 2, "K": 64, "V": 64} | {
        k: v for k, v in change.items() if k not in ("dtype", "device", "g_gamma")
    }
    operation = keraunos.GLAttention() if "gate" in change else keraunos.LightningAttention()
    inv = operation.invocation("jax", change["dtype"], **sizes)
    constants = inv.constants if change["g_gamma"] == "constant" else frozenset()
    inv = dataclasses.replace(inv, backend="gpu", device=change["device"], constants=constants)
    said = unsupported(inv)
    assert said is None if reason is None else reason in said


@NEEDS_JAX
@pytest.mark.parametrize(
    ("heads", "chunks", "segments"),
    [(128, 256, 1), (256, 64, 1), (64, 128, 2), (64, 100, 2), (4, 1024, 32), (1, 1, 1), (1, 4, 1)],
)
def test_sequences_are_cut_where_heads_do_not_fill_the_gpu(heads, chunks, segments):
    from keraunos.kernels.linear_attention.pallas.passes import segmentation

    size, pieces = segmentation(heads, chunks)
    assert -(-chunks // size) == segments
    assert size % pieces == 0
    # Pieces make no segment much longer than the others.
    assert size * 16 <= -(-chunks // segments) * 17


@NEEDS_JAX
@pytest.mark.parametrize(
    ("B", "T", "H", "first"),
    [(1, 2048, 64, "triton"), (4, 2048, 16, "triton"), (1, 8192, 64, "pallas"), (2, 512, 64, "pallas"),
     (1, 512, 32, "pallas"), (1, 65536, 4, "pallas"), (1, 0, 64, "pallas")],
)
def test_auto_prefers_what_was_measured_to_be_faster(B, T, H, first):
    from keraunos.kernels.linear_attention.pallas.passes import loses

    def preferred(operation, framework="jax"):
        inv = operation.invocation(framework, "bfloat16", B=B, T=T or 1, H=H, K=128)
        inv = dataclasses.replace(inv, backend="gpu", device="NVIDIA H200", dims={**inv.dims, "T": T})
        return "pallas" if loses(inv) is None else "triton"

    assert preferred(keraunos.LightningAttention()) == first
    assert preferred(keraunos.GLAttention()) == "pallas"
    # Gates are compiled for every length there.
    assert preferred(keraunos.GLAttention(), "torch") == "triton"


def spans(ranges):
    """The first token of each chunk's own, and how many they are."""
    from keraunos.kernels.linear_attention.pallas.walk import CHUNK, TILE

    found = []
    for r in ranges:
        for i in range(int(r.count)):
            first, end = map(int, r.rows(i))
            assert int(r.start(i)) % TILE == 0
            assert 0 <= first < end <= CHUNK
            assert end - first == int(r.length(i))
            found.append((int(r.start(i)) + first, end - first))
    return found


@NEEDS_JAX
@pytest.mark.parametrize("reverse", [False, True])
def test_every_token_is_walked_once_and_in_order(reverse):
    from keraunos.kernels.linear_attention.pallas.walk import Sequence, Walk

    walk = Walk(T=1001, reverse=reverse, adjoint=False, segment=6, pieces=3)
    for ranges in (
        [walk.of_segment(p) for p in range(walk.segments)],
        [walk.of_piece(p, f) for p in range(walk.segments) for f in range(walk.pieces)],
    ):
        found = spans(ranges)
        assert sum(n for _, n in found) == 1001
        assert found == sorted(found, reverse=reverse)
    assert sum(int(Sequence(walk, 0, 0).tokens(p)) for p in range(walk.segments)) == 1001


@NEEDS_JAX
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("segment", [2, 100])
@pytest.mark.parametrize("lengths", [(5, 0, 333, 1, 150, 64), (0, 0, 700), (63, 65, 127, 129), (1,) * 40])
def test_every_token_of_packed_sequences_is_walked_once_by_its_own(lengths, segment, reverse):
    from keraunos.kernels.linear_attention.pallas.walk import Walk

    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    walk = Walk(offsets[-1], reverse, False, segment, 1, len(lengths))
    plan = np.asarray(walk.plan(jax.numpy.asarray(offsets), frontends.get("jax")))
    assert len(plan) == walk.slots(1)
    of_each = {n: [] for n in range(len(lengths))}
    last, places = [], {1: [], 4: []}
    for slot in range(len(plan)):
        sequence = walk.at(slot, plan)
        if bool(sequence.exists):
            n, chunks = int(sequence.index), sequence.of_segment()
            if walk.segments > 1:
                assert slot == int(walk.of(n, offsets).place(segment)) + int(sequence.i_p)
            of_each[n] += spans([chunks])
            last += [n] if bool(sequence.is_last) else []
            for i in range(int(chunks.count)):
                places[1].append(int(chunks.place(i, 1)))
                if segment % 4 == 0 and i % 4 == 0:
                    places[4].append(int(chunks.place(i, 4)))
    # Each sequence has one end, also where it has no tokens.
    assert sorted(last) == list(range(len(lengths)))
    for n, found in of_each.items():
        assert sum(count for _, count in found) == lengths[n]
        if found:
            assert min(found)[0] == offsets[n]
            assert found == sorted(found, reverse=reverse)
    for size, taken in places.items():
        assert len(set(taken)) == len(taken)
        assert all(0 <= place < walk.places(1, size) for place in taken)


@NEEDS_JAX
@pytest.mark.skipif(not GPU, reason="needs a GPU: run with --gpu")
def test_auto_takes_it_on_hopper():
    q = jax.numpy.ones((2, 4096, 64, 128), "bfloat16")
    capability = jax.devices()[0].compute_capability
    for choice in (
        keraunos.explain(keraunos.lightning_attention, q, q, q, layer_idx=0, num_layers=2),
        keraunos.explain(keraunos.gla_attention, q, q, q, -q),
    ):
        assert (choice.platform == "pallas") == (capability == "9.0")
