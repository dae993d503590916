"""A byte-level language model of linear attention: one function trains it, reads a prompt and writes a byte."""

from typing import Any

import jax
import jax.numpy as jnp

import keraunos
import keraunos.distributed
from language_model.config import GATE_TEMPERATURE, VOCABULARY, ModelConfig

Params = dict[str, Any]
States = tuple[jax.Array, ...]


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Draws the parameters: every matrix keeps the variance of its input, and every block starts as the identity."""
    embed_key, *block_keys = jax.random.split(key, 1 + len(config.blocks))
    return {
        "embed": jax.random.normal(embed_key, (VOCABULARY, config.width)),
        "blocks": [_init_block(config, kind, k) for kind, k in zip(config.blocks, block_keys, strict=True)],
        "norm": jnp.ones(config.width),
        "head": jnp.zeros((config.width, VOCABULARY)),
    }


def init_states(config: ModelConfig, batch: int) -> States:
    """The state before the first byte: one `[batch, heads, head_dim, head_dim]` array of zeros per block."""
    shape = (batch, config.heads, config.head_dim, config.head_dim)
    return tuple(jnp.zeros(shape, jnp.float32) for _ in config.blocks)


def forward(
    params: Params,
    tokens: jax.Array,
    states: States,
    config: ModelConfig,
    platform: str | None = None,
    shards: dict[str, Any] | None = None,
) -> tuple[jax.Array, States]:
    """Predicts every next byte of a piece of text, given the state that the text before it left.

    Args:
        params: From `init_params`.
        tokens: Bytes `[B, T]`; any T, also 1, so training, reading a prompt and generating are this one function.
        states: The state of each attention layer before the first of these bytes.
        config: The sizes.
        platform: The platform that computes the attention; `None` lets keraunos choose.
        shards: The options that say how the bytes are spread over devices: `mesh` and `spec` of `keraunos.distributed`.

    Returns:
        Logits of the next byte `[B, T, 256]`, and the states after the last byte.
    """
    x = params["embed"][tokens]
    after = []
    # By step and in parallel the same sums come in another order: with a GPU's default TF32 products they would differ
    # by more than a mistake does.
    with jax.default_matmul_precision("highest"):
        for i, (block, kind, state) in enumerate(zip(params["blocks"], config.blocks, states, strict=True)):
            normed = _rms_norm(x) * block["attention_norm"]
            mixed, state = _attention(block, normed, state, i, kind, config, platform, shards)
            x = x + mixed
            x = x + _mlp(block, _rms_norm(x) * block["mlp_norm"])
            after.append(state)
        return (_rms_norm(x) * params["norm"]) @ params["head"], tuple(after)


def _init_block(config: ModelConfig, kind: str, key: jax.Array) -> Params:
    width = config.width
    keys = iter(jax.random.split(key, 6))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    block = {
        "attention_norm": jnp.ones(width),
        "query_key_value": matrix(width, 3 * width),
        "output_gate": matrix(width, width),
        "output": jnp.zeros((width, width)),
        "mlp_norm": jnp.ones(width),
        "up": matrix(width, 4 * width),
        "down": jnp.zeros((4 * width, width)),
    }
    if kind == "gla":
        block["forget_gate"] = matrix(width, width)
    elif kind == "delta":
        block["gates"] = matrix(width, 2 * config.heads)
    return block


def _attention(
    block: Params,
    x: jax.Array,
    state: jax.Array,
    index: int,
    kind: str,
    config: ModelConfig,
    platform: str | None,
    shards: dict[str, Any] | None,
) -> tuple[jax.Array, jax.Array]:
    heads = (*x.shape[:2], config.heads, config.head_dim)
    query, key, value = (part.reshape(heads) for part in jnp.split(jax.nn.silu(x @ block["query_key_value"]), 3, -1))
    options: dict[str, Any] = {"return_state": True, "platform": platform, **(shards or {})}
    library = keraunos.distributed if shards else keraunos
    if kind == "gla":
        g = jax.nn.log_sigmoid(x @ block["forget_gate"]).reshape(heads) / GATE_TEMPERATURE
        o, state = library.gla_attention(query, key, value, g, None, state, **options)
    elif kind == "delta":
        decay, strength = jnp.split(x @ block["gates"], 2, -1)
        g, beta = jax.nn.log_sigmoid(decay) / GATE_TEMPERATURE, jax.nn.sigmoid(strength)
        o, state = library.gated_delta_rule(query, key, value, g, beta, state, use_qk_l2norm=True, **options)
    else:
        layers = len(config.blocks)
        o, state = library.lightning_attention(query, key, value, state, layer_idx=index, num_layers=layers, **options)
    # A sum over the past grows with its length: the norm per head takes that out again.
    o = _rms_norm(o).reshape(x.shape)
    return (o * jax.nn.silu(x @ block["output_gate"])) @ block["output"], state


def _mlp(block: Params, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ block["up"]) @ block["down"]


def _rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
