"""Results are the same under a user's settings of JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import keraunos
from keraunos import serving
from tests.linear_attention import cases as linear
from tests.softmax_attention import cases as softmax


@pytest.fixture
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def gla(args, case, platform):
    return keraunos.gla_attention(*args, return_state=True, platform=platform)


SIZES = dict(B=1, K=8, H=4, G=2, dtype="bfloat16")
LINEAR = linear.Case(**SIZES, V=8, gate="vector", gamma=1, lengths=(7, 13))
SOFTMAX = softmax.Case(**SIZES, T=20, causal=True, dropout=0.25)


def test_gates(strict):
    LINEAR.check(linear.runner("xla", "jax", gla))


@pytest.mark.parametrize("options", [dict(lengths=(15,)), dict(segments=True, block=16)], ids=["at_once", "blocks"])
def test_softmax(strict, options):
    dataclasses.replace(SOFTMAX, **options).check("xla", "jax")


def mapped(q, k, v):
    return jax.vmap(lambda q: keraunos.lightning_attention(q, k, v, layer_idx=1, num_layers=4))(jnp.stack([q, q]))


def test_vmap():
    given = [jax.random.normal(jax.random.key(i), (1, 20, 4, 8), jnp.bfloat16) for i in range(3)]

    def results():
        outputs, pull = jax.vjp(mapped, *given)
        return jax.tree.leaves((outputs, pull(outputs)))

    want = results()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = results()
    assert all(map(jnp.array_equal, got, want))


def test_a_pool():
    tokens = [jax.random.normal(jax.random.key(i), (2, 4, 8), jnp.bfloat16) for i in range(3)]

    def results():
        return serving.decode(
            *tokens, jnp.zeros((3, 4, 8, 8)), jnp.array([2, -1]), g=-(tokens[0] ** 2), g_gamma=[-1.0] * 4
        )

    want = results()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = results()
    assert all(map(jnp.array_equal, got, want))
