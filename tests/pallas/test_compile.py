"""Every kernel compiles for every kind of TPU, without one, and within the fast memory that was recorded."""

import importlib.util
import re

import numpy as np
import pytest

pytest.importorskip("jax")

from tests.pallas.compile import CHIPS, arrays, compiled, pool, sharded, softmax

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: test-tpu-compile")

KINDS = ["constant", "scalar", "vector"]


# MiB of fast memory that are enough.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip(chip, kind):
    text = compiled(arrays(kind, H=8), gradients=True, chip=chip, vmem=16).as_text()
    assert len(re.findall(r"custom_call_target=.tpu_custom_call", text)) == 2
    # No array of tokens is laid out anew.
    assert not re.findall(r"= bf16\[1,8192\S* (?:copy|transpose|fusion)\(", text)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_only(kind):
    text = compiled(arrays(kind), gradients=False, vmem=8).as_text()
    assert len(re.findall(r"custom_call_target=.tpu_custom_call", text)) == 1


CALLS = {
    "packed, shared keys, states": (dict(kind="scalar", H=16, G=8, N=5, state=True, T=1000), 24),
    "few heads, packed": (dict(kind="vector", H=2, N=5, state=True, T=1000), 8),
    "heads that are no tile": (dict(kind="constant", H=12, T=100, B=3), 24),
    "a single head": (dict(kind="vector", H=1, T=100, B=3), 8),
    "K = V = 64": (dict(kind="vector", K=64, V=64, H=4), 8),
    "K = 128, V = 256": (dict(kind="constant", V=256, H=8), 24),
    "K = V = 256": (dict(kind="vector", K=256, V=256, H=2), 16),
    "float32": (dict(kind="vector", dtype="float32", H=2), 16),
}


@pytest.mark.parametrize(("sizes", "vmem"), CALLS.values(), ids=CALLS)
def test_every_size(sizes, vmem):
    compiled(arrays(**sizes), gradients=True, vmem=vmem)


def test_chunks_of_256_tokens():
    compiled(arrays("vector", H=2), gradients=True, block_q=256, vmem=24)


def test_shards_of_batch_and_heads():
    text = sharded((4, 1024, 16, 128)).as_text()
    assert len(re.findall(r"custom_call_target=.tpu_custom_call", text)) == 2
    assert "bf16[2,1024,8,128]" in text
    assert not re.findall("all-gather|all-reduce|collective-permute", text)


def test_what_does_not_fit_is_an_error():
    with pytest.raises(Exception, match="vmem"):
        compiled(arrays("vector"), gradients=True, vmem=1)


SOFTMAX = {
    "plain, in a batch": dict(B=2),
    "causal, shared keys": dict(T=4096, G=2, right=0),
    "window, segments, soft cap": dict(B=2, G=1, segments=True, soft_cap=30.0, left=100, right=0),
    "lengths that are no blocks, any head dims": dict(T=1000, S=77, H=3, K=40, V=96, left=3, right=0),
    "K = V = 256": dict(K=256, segments=True, right=0),
    "float32, K = V = 256": dict(K=256, dtype="float32", segments=True, right=0, soft_cap=30.0),
}


@pytest.mark.parametrize("sizes", SOFTMAX.values(), ids=SOFTMAX)
def test_softmax_attention(sizes):
    text = softmax(**sizes).as_text()
    assert len(re.findall(r"custom_call_target=.tpu_custom_call", text)) == 3


@pytest.mark.parametrize("chip", CHIPS)
def test_softmax_attention_on_every_chip(chip):
    softmax(chip, **SOFTMAX["float32, K = V = 256"])
    softmax(chip, **SOFTMAX["window, segments, soft cap"])


POOL = {
    "decode": dict(op="decode"),
    "decode, gates per token, shared keys, bfloat16": dict(op="decode", gate="scalar", G=2, states="bfloat16"),
    "decode, gates per dimension, K = V = 256": dict(op="decode", gate="vector", K=256, V=256, H=12, slots=64),
    "decode, a head of K = 40": dict(op="decode", H=1, K=40),
    "decode, K = 192, V = 384, float16": dict(op="decode", H=20, K=192, V=384, dtype="float16", slots=64),
    "decode in a loop": dict(op="decode", steps=5),
    "decode, delta rule, gates per token": dict(op="decode", gate="scalar", delta=True),
    "verify, delta rule, gates per dimension, a pool of bfloat16": dict(
        op="verify", gate="vector", delta=True, states="bfloat16"),
    "verify": dict(op="verify", gate="scalar"),
    "commit": dict(op="commit", gate="vector", states="bfloat16"),
    "prefill": dict(op="prefill", T=3000),
    "prefill, gates per dimension, a pool of bfloat16": dict(op="prefill", T=3000, gate="vector", states="bfloat16"),
    "prefill in a loop, K = 64": dict(op="prefill", T=300, K=64, gate="scalar", G=2, steps=3),
}


@pytest.mark.parametrize("sizes", POOL.values(), ids=POOL)
def test_no_copy_of_the_pool(sizes):
    made = pool(**sizes)
    memory, text = made.memory_analysis(), made.as_text()
    size = sizes.get("slots", 256) * np.prod([sizes.get(x, n) for x, n in (("H", 16), ("K", 128), ("V", 128))])
    size *= 2 if sizes.get("states") else 4
    assert memory.alias_size_in_bytes >= (0 if sizes["op"] == "verify" else size)
    assert memory.temp_size_in_bytes < size / 8
    assert len(re.findall(r"custom_call_target=.tpu_custom_call", text)) == 1


@pytest.mark.parametrize("chip", CHIPS)
def test_serving_on_every_chip(chip):
    for op, gate in (("decode", "constant"), ("verify", "scalar"), ("commit", "vector"), ("prefill", "vector")):
        pool(op, chip, gate=gate)
