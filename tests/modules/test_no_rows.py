"""Calls with no sequence, or none of a sequence's tokens: arrays of the right shapes, with as little in them."""

import numpy as np
import pytest

import keraunos

SHAPES = [((0, 10, 2, 16), (0, 10, 2, 16)), ((2, 0, 2, 16), (2, 0, 2, 16)), ((2, 0, 2, 16), (2, 10, 2, 16)),
          ((2, 10, 2, 16), (2, 0, 2, 16))]


def results(framework, call, query, keys):
    """The shapes of outputs, and of the gradients of a query, keys and values of zeros."""
    given = [np.zeros(shape, np.float32) for shape in (query, keys, keys)]
    if framework == "jax":
        jax = pytest.importorskip("jax")
        outputs, pull = jax.vjp(call, *map(jax.numpy.asarray, given))
        found = [*outputs, *pull(tuple(jax.numpy.ones_like(x) for x in outputs))]
    else:
        torch = pytest.importorskip("torch")
        args = [torch.from_numpy(x).requires_grad_() for x in given]
        outputs = call(*args)
        sum(x.sum() for x in outputs).backward()
        found = [*(x.detach() for x in outputs), *(x.grad for x in args)]
    assert not any(np.asarray(x).any() for x in found)
    return [tuple(x.shape) for x in found]


@pytest.mark.parametrize(("framework", "platform"), [("jax", "xla"), ("torch", "torch")])
@pytest.mark.parametrize(("query", "keys"), SHAPES[:2], ids=str)
@pytest.mark.parametrize("gate", [(), (16,)], ids=["scalar", "vector"])
def test_linear_attention(framework, platform, query, keys, gate):
    def call(q, k, v):
        g = q if gate else q[..., 0]
        return keraunos.gla_attention(q, k, v, g, return_state=True, platform=platform)

    B, _, H, K = query
    assert results(framework, call, query, keys) == [query, (B, H, K, K), query, keys, keys]


@pytest.mark.parametrize(("framework", "platform"), [("jax", "xla"), ("torch", "torch")])
@pytest.mark.parametrize(("query", "keys"), SHAPES, ids=str)
@pytest.mark.parametrize("block", [None, 16])
def test_attention(framework, platform, query, keys, block):
    def call(q, k, v):
        # PyTorch's blocks are of queries only.
        cfg = keraunos.Config(block_q=block, block_k=block if platform == "xla" else None, platform=platform)
        return (keraunos.attention(q, k, v, dtype="float32", cfg=cfg),)

    assert results(framework, call, query, keys) == [query, query, keys, keys]
