"""Results are the same under a user's settings of JAX."""

import jax
import jax.numpy as jnp
import pytest

import keraunos
from keraunos import serving
from keraunos.types import MaskInfo

SHAPE = (1, 20, 4, 8)


def gates(q, k, v):
    g = -jax.nn.softplus(q.astype(jnp.float32))
    offsets = jnp.array([0, 7, 20])
    return keraunos.gla_attention(q, k[:, :, :2], v[:, :, :2], g, -jnp.ones(4), None, offsets, return_state=True)


def blocks(q, k, v):
    cfg = keraunos.AttentionConfig(block_q=16, block_k=16)
    mask = MaskInfo.from_segments(jnp.zeros(q.shape[:2], jnp.int32)).apply_kv_lengths(jnp.array([15]))
    rng = jax.random.key(0)
    return [
        keraunos.attention(q, k[:, :, :2], v[:, :, :2], None, rng, mask_info=mask, causal=True, deterministic=False,
                           dropout_prob=0.25, cfg=cfg)
        for cfg in (None, cfg)
    ]


def mapped(q, k, v):
    return jax.vmap(lambda q: keraunos.lightning_attention(q, k, v, layer_idx=1, num_layers=4))(jnp.stack([q, q]))


@pytest.mark.parametrize("call", [gates, blocks, mapped])
def test_strict_rules_of_promotion_change_no_result(call):
    given = [jax.random.normal(jax.random.key(i), SHAPE, jnp.bfloat16) for i in range(3)]

    def results():
        outputs, pull = jax.vjp(call, *given)
        return jax.tree.leaves((outputs, pull(outputs)))

    want = results()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = results()
    assert all(map(jnp.array_equal, got, want))


def test_strict_rules_of_promotion_and_a_pool():
    tokens = [jax.random.normal(jax.random.key(i), (2, 4, 8), jnp.bfloat16) for i in range(3)]

    def results():
        return serving.decode(
            *tokens, jnp.zeros((3, 4, 8, 8)), jnp.array([2, -1]), g=-(tokens[0] ** 2), g_gamma=[-1.0] * 4
        )

    want = results()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = results()
    assert all(map(jnp.array_equal, got, want))
