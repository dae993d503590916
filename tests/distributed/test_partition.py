"""Calls of sharded arrays under ``jit``: every device computes with its own shards, and nothing is moved."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import keraunos
from keraunos import distributed, frontends
from keraunos.frontends.gradients import Differentiable
from keraunos.kernels.gated_delta_rule import contract as delta_contract
from keraunos.kernels.gated_delta_rule import xla as delta
from keraunos.kernels.linear_attention import contract
from keraunos.kernels.linear_attention import xla as linear
from keraunos.kernels.softmax_attention import xla as softmax
from keraunos.kernels.softmax_attention.contract import OPERATOR, Args, Options, fold
from keraunos.types import MaskInfo
from tests.linear_attention.cases import GPU
from tests.numerics import assert_within_rule

pytestmark = pytest.mark.skipif(GPU or jax.device_count() < 8, reason="needs the 8 devices of the run without --gpu")

B, T, H, G, K = 2, 40, 8, 4, 16
TOKENS, STATE = P("batch", None, "heads"), P("batch", "heads")
CFG = keraunos.Config(block_q=16, block_k=16, platform="xla")
# The platform as if it were made of kernels that JAX and XLA see nothing of.
BOXES = contract.kernels("xla", linear.__file__, linear.forward, linear.backward, fields=linear.FIELDS,
                         heuristic=linear.heuristic, candidates=linear.candidates)
DELTA_BOX = delta_contract.kernel("xla", delta.__file__, delta.forward, delta.backward, fields=delta.FIELDS,
                                  heuristic=delta.heuristic, candidates=delta.candidates)


def normal(seed, *shape):
    # Of NumPy: these are made wherever tests are collected.
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


Q, KEYS, VALUES = normal(0, B, T, H, K), normal(1, B, T, G, K), normal(2, B, T, G, K)
GATES, DECAYS, STATES = -abs(normal(3, B, T, H)), -abs(normal(4, H)), normal(5, B, H, K, K)
UNIT, BETAS = KEYS / np.linalg.norm(KEYS, axis=-1, keepdims=True), 1 / (1 + abs(normal(7, B, T, H)))
SINKS, IDS = normal(6, H, 2), np.repeat(np.array([[0, 1, -1]], np.int32), [20, 15, 5], axis=1).repeat(B, 0)
OFFSETS = np.array([7, -3], np.int32)


def box_of_attention(q, k, v):
    """Attention in such a box, whose residuals are sharded too."""
    call = pytest.importorskip("keraunos.kernels.softmax_attention.shared.call", exc_type=ImportError)

    def forward(args, opts):
        output, top, _ = softmax.part(args, opts)
        return (output, None), (output, top)

    def backward(args, residuals, grads, opts):
        return softmax.part_gradients(args, (*residuals, 0 * residuals[1]), grads[0], opts)

    opts = Options(0.25, None, None, 0, 0.0, "float32", False, CFG)
    folding = fold, frontends.unfold
    made = Differentiable(forward, backward, OPERATOR, "box", folding, call.axes_with_residuals)
    return made.prepare(opts, Args(q, k, v))(Args(q, k, v))[0]


def masked(q, k, v, sinks, ids, offsets):
    info = MaskInfo.from_segments(ids).apply_causal(offsets)
    return keraunos.attention(q, k, v, None, None, sinks, mask_info=info, causal=True, dtype=None, cfg=CFG)


def half(x):
    return x.astype(jnp.bfloat16)


CALLS = {
    "lightning": (functools.partial(keraunos.lightning_attention, layer_idx=1, num_layers=4, return_state=True),
                  [(Q, TOKENS), (KEYS, TOKENS), (VALUES, TOKENS), (STATES, STATE)]),
    "gla": (functools.partial(keraunos.gla_attention, return_state=True),
            [(Q, TOKENS), (KEYS, TOKENS), (VALUES, TOKENS), (GATES, TOKENS), (DECAYS, P("heads")), (STATES, STATE)]),
    "gla in a box": (functools.partial(BOXES[0], cfg=CFG),
                     [(Q, TOKENS), (KEYS, TOKENS), (VALUES, TOKENS), (GATES, TOKENS), (DECAYS, P("heads"))]),
    "heads of their own in a box": (functools.partial(BOXES[0], cfg=CFG),
                                    [(KEYS, TOKENS), (KEYS, TOKENS), (Q, TOKENS), (GATES[:, :, :G], TOKENS),
                                     (DECAYS, P("heads"))]),
    "packed in a box": (lambda *x: BOXES[0](*x, cu_seqlens=jnp.array([0, 3, T]), cfg=CFG),
                        [(x[:1], P(None, None, "heads")) for x in (Q, KEYS, VALUES, GATES)]),
    "delta rule": (functools.partial(keraunos.gated_delta_rule, return_state=True),
                   [*((x, TOKENS) for x in (Q, UNIT, VALUES, GATES, BETAS)), (STATES, STATE)]),
    "delta rule in a box": (functools.partial(DELTA_BOX, cfg=CFG),
                            [*((x, TOKENS) for x in (Q, UNIT, VALUES, GATES, BETAS)), (STATES, STATE)]),
    "attention": (functools.partial(keraunos.attention, causal=True, dtype=None),
                  [(Q, TOKENS), (KEYS, TOKENS), (VALUES, TOKENS)]),
    "attention by blocks": (masked, [(Q, TOKENS), (KEYS, TOKENS), (VALUES, TOKENS), (SINKS, P("heads")),
                                     (IDS, P("batch")), (OFFSETS, P("batch"))]),
    "attention in a box": (box_of_attention, [(half(x), TOKENS) for x in (Q, KEYS, VALUES)]),
}


def results_and_gradients(f):
    def run(*x):
        floats = [i for i, y in enumerate(x) if jnp.issubdtype(y.dtype, jnp.floating)]

        def loss(*some):
            given = list(x)
            for i, y in zip(floats, some, strict=True):
                given[i] = y
            results = f(*given)
            return sum((y.astype(jnp.float32) ** 2).sum() for y in jax.tree.leaves(results)), results

        return jax.grad(loss, range(len(floats)), has_aux=True)(*(x[i] for i in floats))

    return run


@pytest.mark.parametrize(("name", "kind"), [
    *((name, AxisType.Auto) for name in CALLS),
    *((name, AxisType.Explicit) for name in ("gla in a box", "heads of their own in a box", "delta rule in a box",
                                             "attention by blocks")),
], ids=str)
def test_nothing_is_resharded(name, kind):
    f, given = CALLS[name]
    mesh = jax.make_mesh((2, 4), ("batch", "heads"), axis_types=(kind,) * 2)
    put = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in given]
    run = jax.jit(results_and_gradients(f))
    compiled = run.lower(*put).compile()
    moved = re.findall(r"\b(all-gather|all-to-all|collective-permute|reduce-scatter)", compiled.as_text())
    assert not moved
    got = compiled(*put)
    for x, like in zip(got[0], put, strict=False):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(run(*(x for x, _ in given))), strict=True):
        # Only the order of sums differs.
        a, b = np.asarray(a.astype(jnp.float32)), np.asarray(b.astype(jnp.float32))
        assert_within_rule(["result"], [a], [b], [b], ["float32"], [np.abs(b) + np.abs(b).max()])


@pytest.mark.parametrize("name", ["gla", "gla in a box", "attention by blocks"])
def test_vmap_over_what_explicit_axes_shard(name):
    f, given = CALLS[name]
    mesh = jax.make_mesh((2,), ("calls",), axis_types=(AxisType.Explicit,))
    both = [jnp.stack([jnp.asarray(x)] * 2) for x, _ in given]
    put = [jax.device_put(x, NamedSharding(mesh, P("calls"))) for x in both]
    run = jax.jit(jax.vmap(results_and_gradients(f)))
    compiled = run.lower(*put).compile()
    assert not re.search(r"\b(all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce)", compiled.as_text())
    for a, b in zip(jax.tree.leaves(compiled(*put)), jax.tree.leaves(run(*both)), strict=True):
        assert a.sharding.spec[0] == "calls"
        assert_within_rule(["result"], [a], [b], [b], ["float32"], [np.abs(b) + np.abs(b).max()])


@pytest.mark.parametrize("name", ["lightning_attention", "gated_delta_rule", "attention"])
def test_shards_of_tokens_beside_those_of_batch_and_heads(name):
    """Only the operations' own exchanges, of states, or of shards of keys and values from one device to another."""
    mesh = jax.make_mesh((2, 2, 2), ("batch", "tokens", "heads"), axis_types=(AxisType.Auto,) * 3)
    spec = P("batch", "tokens", "heads")
    put = [jax.device_put(normal(i, B, 256, H, K), NamedSharding(mesh, spec)) for i in range(3)]
    options = {"lightning_attention": dict(layer_idx=1, num_layers=4), "attention": dict(causal=True, dtype=None)}
    call = functools.partial(getattr(distributed, name), mesh=mesh, spec=spec, **options.get(name, {}))
    text = jax.jit(results_and_gradients(call)).lower(*put).compile().as_text()
    found = re.findall(
        r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(", text
    )
    moved = {kind: max(max(map(_size, re.findall(r"\[([\d,]*)\]", shape))) for shape, k in found if k == kind)
             for _, kind in found}
    shard = B * 256 * H * K // 8
    if name == "attention":
        assert set(moved) == {"collective-permute"}
        assert moved["collective-permute"] <= 2 * shard
    else:
        # Of two devices, for this one's sequence and four heads: a state, and the sum of its gates or a matrix.
        assert set(moved) <= {"all-gather", "all-reduce"}
        assert moved["all-gather"] <= 2 * 4 * (K * K + (1 if name == "lightning_attention" else K * K)) < shard


def _size(dims):
    return int(np.prod([int(n) for n in dims.split(",") if n]))


def test_heads_that_share_keys_stay_together():
    """Eight shards of heads, but four heads of keys: the partitioner moves what it must, and the result is right."""
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(AxisType.Auto,))
    f, given = CALLS["gla in a box"]
    put = [jax.device_put(x, NamedSharding(mesh, P(None, None, "heads") if x.shape[2:3] == (H,) else P()))
           for x, _ in given]
    for a, b in zip(jax.jit(f)(*put), f(*(jnp.asarray(x) for x, _ in given)), strict=True):
        assert_within_rule(["result"], [a], [b], [b], ["float32"], [np.abs(b) + np.abs(b).max()])


def test_shards_of_tokens_are_refused_where_they_are_known():
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(Q, NamedSharding(mesh, P(None, "tokens")))
    blocks = keraunos.AttentionConfig(block_q=16, block_k=16)
    for name, options in (("gla_attention", {}), ("attention", {}), ("attention", dict(return_weights=True)),
                          ("attention", dict(cfg=blocks))):
        with pytest.raises(TypeError, match=rf"^{name}: query .*for shards of the tokens, see keraunos\.distributed"):
            getattr(keraunos, name)(x, x, x, **options)
