"""Softmax attention by JAX's kernel for TPUs, in Pallas' interpreter: output and gradients, and what is refused."""

import dataclasses
import functools
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import keraunos
from keraunos.frontends.jax import partition
from keraunos.kernels import kernel_registry
from keraunos.kernels.softmax_attention.pallas import passes
from keraunos.types import MaskInfo
from tests.linear_attention.cases import GPU
from tests.softmax_attention import test_unseen as unseen
from tests.softmax_attention.cases import Case

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")


@pytest.fixture(autouse=True)
def interpreted():
    """The platform runs on the CPU, as if it were one device: the interpreter cannot be partitioned."""
    target = "keraunos.kernels.softmax_attention.pallas.passes:attention"
    kernel_registry.register("attention", "pallas", "cpu", 1, frameworks=("jax",))(target)
    make = functools.partial(passes.splash.make_splash_mha, interpret=True)
    alone = mock.patch.object(partition, "is_settled", return_value=True)
    with alone, mock.patch.object(passes.splash, "make_splash_mha", make):
        yield
    kernel_registry.unregister(next(row for row in kernel_registry.rows("attention") if row.backend == "cpu"))


CASES = {
    "plain, lengths that no block divides, shared keys, bfloat16": dict(T=40, S=150, H=2, G=1, K=64, V=128, block=128,
                                                                        dtype="bfloat16"),
    "causal, more keys than queries": dict(causal=True, T=20, S=300, offset=280, window=(30, 0), block=128, H=1),
    "window, soft cap, a scale that is rounded": dict(window=(5, 3), soft_cap=2.0, scale=-0.7, dtype="bfloat16", K=40),
    "segments with padding, and ids that the other side has not": dict(B=2, segments=True, causal=True, soft_cap=2.0),
    "the first and the last queries see nothing, whole blocks": dict(T=300, S=40, window=(10, 0), offset=-140, H=1,
                                                                     block=128),
    "no query sees anything": dict(causal=True, offset=-60),
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_values_and_gradients(sizes):
    Case(**{"B": 1, "T": 50, "H": 2, **sizes}).check("pallas", "jax")


HIDDEN = {
    "lengths": unseen.Case(lengths=True),
    "segments, cap": unseen.Case(segments=True, soft_cap=4.0),
    "causal": unseen.Case(S=70, causal=True),
}


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("garbage", unseen.GARBAGE)
@pytest.mark.parametrize("name", HIDDEN)
def test_keys_that_no_query_sees(name, garbage):
    unseen.check("pallas", "jax", HIDDEN[name], unseen.GARBAGE[garbage])


def test_queries_of_padding_may_hold_anything():
    own = np.array([[0] * 30 + [-1] * 10, [1] * 38 + [-1] * 2], np.int32)
    q, k, v = (jax.random.normal(key, (2, 40, 2, 16)) for key in jax.random.split(jax.random.key(0), 3))
    info = MaskInfo.from_segments(jnp.asarray(own), jnp.asarray(own))

    def loss(q, k, v):
        output = keraunos.attention(q, k, v, mask_info=info, dtype=None, platform="pallas")
        return (output**2).sum()

    clean = jax.grad(loss, (0, 1, 2))(q, k, v)
    spoilt = jax.grad(loss, (0, 1, 2))(jnp.where(own[..., None, None] < 0, jnp.nan, q), k, v)
    for a, b in zip(clean, spoilt, strict=True):
        np.testing.assert_array_equal(a, b)


def test_vmap():
    case = Case(B=2, T=20, H=1, segments=True)
    args = case.arrays[0]

    def call(q, k, v, own, other):
        info = MaskInfo.from_segments(own, other)
        return keraunos.attention(q, k, v, mask_info=info, causal=True, dtype=None, platform="pallas")

    given = [jnp.asarray(x) for x in (*args[:3], *args[6:8])]
    together = jax.vmap(call)(*(x[:, None] for x in given))
    np.testing.assert_allclose(together[:, 0], call(*given), rtol=1e-6)


def refusal(arrays=(), options=(), **sizes):
    """Why the platform refuses a call."""
    inv = keraunos.Attention().invocation("jax", **{"T": 4096, "H": 8, "K": 128, **sizes})
    inv = dataclasses.replace(inv, arrays={**inv.arrays, **dict(arrays)}, options={**inv.options, **dict(options)})
    return passes.attention.unsupported(inv)


def test_refusals_have_reasons():
    assert refusal() is None
    assert refusal(causal=True, window=4, soft_cap=True, segments=True, G=2, K=40, V=256, S=77) is None
    assert "takes bfloat16 and float32" in refusal(dtype="float16")
    assert "takes head dims up to 256; the call has K = 512" in refusal(K=512)
    assert "gradient JAX's kernel sums" in refusal(sinks=1)
    for name, words in (("bias", "no bias"), ("mask", "no boolean mask"), ("seed", "no dropout"),
                        ("query_offset", "no query_offset that is an array")):
        assert f"takes {words}" in refusal({name: ("float32", 4)})
    assert "takes segment ids of int32; the call has int64" in refusal({"key_segments": ("int64", 2)})
    assert "not in float64" in refusal(options={"softmax_dtype": "float64"})
    assert "never forms the weights" in refusal(options={"return_weights": True})


def test_a_tpu_gets_it_by_name_only():
    inv = keraunos.Attention().invocation("jax", T=4096, H=8, K=128, causal=True)
    inv = dataclasses.replace(inv, backend="tpu", device="TPU v5e")
    assert kernel_registry.choose(inv)[0].platform == "xla"
    assert kernel_registry.choose(inv, "pallas")[0].backend == "tpu"
