"""Calls that softmax attention refuses, and its errors; the order in which masks and biases count."""

import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keraunos
from keraunos.types import MaskInfo

Q = jnp.ones((2, 6, 4, 8))
KV = jnp.ones((2, 6, 2, 8))
module = importlib.import_module("keraunos.modules.attention")


@pytest.mark.parametrize(("args", "kwargs", "error", "message"), [
    ((Q, KV, KV[..., None]), {}, ValueError, r"value has shape .*expected \[B, S, G, V\]"),
    ((Q, KV[:1], KV), {}, ValueError, r"key has shape \(1, 6, 2, 8\)"),
    ((Q, jnp.ones((2, 6, 3, 8)), jnp.ones((2, 6, 3, 8))), {}, ValueError, "a divisor of H = 4"),
    ((Q[0], KV, KV), {}, ValueError, r"expected \[B, T, H, K\]"),
    ((np.ones((2, 6, 4, 8)), KV, KV), {}, TypeError, r"query is of type numpy\.ndarray"),
    ((Q, KV, KV, jnp.ones((2, 3, 6, 6))), {}, ValueError, r"bias has shape \(2, 3, 6, 6\)"),
    ((Q, KV, KV, jnp.ones((2, 4, 6, 6), jnp.int32)), {}, TypeError, "bias has dtype int32"),
    ((Q, KV, KV, None, None, jnp.ones((3, 1))), {}, ValueError, "softmax_aux has shape"),
    ((Q, KV, KV, None, None, jnp.ones(4)), {}, ValueError,
     r"softmax_aux has shape \(4,\), as many sinks as heads; expected \[H, 1\] = \(4, 1\) for one .*\[1, sinks\]"),
    ((Q, KV, KV), {"mask_info": jnp.ones((6, 6), bool)}, TypeError, "expected a keraunos.types.MaskInfo"),
    ((Q, KV, KV), {"mask_info": MaskInfo.from_attention_mask(jnp.ones((5, 6), bool))}, ValueError, "mask has shape"),
    ((Q, KV, KV), {"mask_info": MaskInfo.from_segments(jnp.ones((2, 5), int))}, ValueError, "query_segments has shape"),
    ((Q, KV, KV), {"sliding_window": -1}, ValueError, "^attention: sliding_window is -1"),
    ((Q, KV, KV), {"sliding_window": (1, 2, 3)}, ValueError, "^attention: sliding_window is"),
    ((Q, KV, KV), {"sliding_window": True}, ValueError, "^attention: sliding_window is True"),
    ((Q, KV, KV), {"dtype": "brainfloat"}, TypeError, "dtype is 'brainfloat'; expected bfloat16 or"),
    ((Q, KV, KV), {"dtype": 3}, TypeError, "dtype is 3; expected bfloat16 or"),
    ((Q, KV, KV), {"mask_info": MaskInfo(key_lengths=jnp.ones(3, int))}, ValueError,
     r"key_lengths has shape \(3,\); expected \[B\] = \(2,\)"),
    ((Q, KV, KV), {"mask_info": MaskInfo(key_lengths=[1, 2])}, TypeError, "key_lengths is a list"),
    ((Q, KV, KV), {"logits_soft_cap": 0.0}, TypeError, "a finite number above 0"),
    ((Q, KV, KV), {"softmax_scale": float("nan")}, TypeError, "softmax_scale is nan"),
    ((Q, KV, KV), {"dropout_prob": 1.0, "deterministic": False}, ValueError, "dropout_prob is 1.0"),
    ((Q, KV, KV), {"dropout_prob": 0.1, "deterministic": False}, ValueError, "dropout_rng is None"),
    ((Q, KV, KV, None, 42), {"dropout_prob": 0.1, "deterministic": False}, TypeError,
     r"dropout_rng is of type int; expected a key of jax\.random"),
    ((Q, KV, KV), {"platform": "pallas"}, keraunos.UnsupportedError, "pallas: needs a tpu device"),
    ((Q, KV, KV), {"causal": "no"}, TypeError, "causal is 'no'; expected True or False"),
    ((Q, KV, KV), {"deterministic": "no"}, TypeError, "deterministic is 'no'; expected True or False"),
    ((Q, KV, KV), {"return_weights": 1}, TypeError, "return_weights is 1; expected True or False"),
    ((Q, KV, KV), {"causal": True, "query_offset": 1.5}, TypeError, "query_offset is a float; expected an int or an"),
    ((Q, KV, KV), {"causal": True, "query_offset": True}, TypeError, "query_offset is a bool"),
    ((Q, KV, KV), {"causal": True, "query_offset": jnp.ones(2)}, TypeError, "query_offset is a .* of float32"),
    ((Q, KV, KV), {"causal": True, "query_offset": jnp.ones(3, int)}, ValueError,
     r"query_offset has shape \(3,\); expected an int, or \[B\] = \(2,\)"),
    ((Q, KV, KV), {"causal": True, "query_offset": jnp.ones((2, 1), int)}, ValueError, "query_offset has shape"),
    ((Q, KV, KV), {"query_offset": 3, "mask_info": MaskInfo().apply_causal(2)}, ValueError, "is given twice"),
    ((Q, KV, KV), {"softmax_dtype": "int8"}, TypeError, "softmax_dtype is int8"),
    ((Q + 0j, KV, KV), {}, TypeError, "query has dtype complex64"),
    ((Q, KV, KV.astype(int)), {"dtype": None}, TypeError, "value has dtype int32"),
], ids=lambda x: None)
def test_what_is_refused(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        keraunos.attention(*args, **kwargs)


def test_what_torch_refuses():
    torch = pytest.importorskip("torch")
    q = torch.ones(2, 6, 4, 8)
    with pytest.raises(TypeError, match=r"dropout_rng is of type int; expected a torch\.Generator"):
        keraunos.attention(q, q, q, None, 42, dropout_prob=0.5, deterministic=False)
    with pytest.raises(ValueError, match="attention: key is on meta; expected cpu, like query"):
        keraunos.attention(q, q.to("meta"), q)
    with pytest.raises(TypeError, match=r"dtype is torch\.int8; expected bfloat16 or"):
        keraunos.attention(q, q, q, dtype=torch.int8)


def test_ids_of_larger_unsigned_types_in_torch():
    torch = pytest.importorskip("torch")
    q, ids, lengths = torch.randn(2, 6, 1, 8), torch.tensor([[0, 0, 1, 1, 2, 2]] * 2), torch.tensor([5, 3])

    def run(dtype, hidden=lambda info: info):
        return keraunos.attention(q, q, q, mask_info=hidden(MaskInfo.from_segments(ids.to(dtype))), dtype=None)

    for hidden in (lambda info: info, lambda info: info.apply_kv_lengths(lengths)):
        torch.testing.assert_close(run(torch.uint32, hidden), run(torch.int32, hidden), rtol=0, atol=0)
    with pytest.raises(TypeError, match="segment ids have dtype uint64; expected int64"):
        run(torch.uint64)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("cfg", [None, keraunos.AttentionConfig(block_q=16, block_k=16)], ids=["at_once", "blocks"])
@pytest.mark.parametrize("window", [2**31 - 1, (2**31, 0), (0, 2**40), (2**63 - 1, 2**63 - 1)], ids=str)
def test_windows_may_be_wider_than_any_sequence(window, cfg, x64):
    given = [jax.random.normal(jax.random.key(i), (1, 20, 2, 8)) for i in range(3)]
    pair = window if isinstance(window, tuple) else (window, window)
    narrow = tuple(min(n, 20) for n in pair)
    with jax.enable_x64(x64):
        got, want = (keraunos.attention(*given, sliding_window=w, dtype="float32", cfg=cfg) for w in (window, narrow))
        np.testing.assert_array_equal(got, want)
        masks = [MaskInfo(sliding_window=w).get_or_compute_attention_mask(20, 20) for w in (window, narrow)]
        np.testing.assert_array_equal(*masks)
        in_jax = MaskInfo.from_segments(jnp.zeros((1, 20), int)).apply_sliding_window(window)
        np.testing.assert_array_equal(in_jax.get_or_compute_attention_mask(), masks[1])


def test_a_bias_that_switches_a_mask_off_warns_once():
    module._warn_of_bias.cache_clear()
    bias = jnp.zeros((1, 1, 6, 6))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        keraunos.attention(Q, KV, KV, bias, mask_info=MaskInfo().apply_causal())
        assert not seen
        for _ in range(2):
            keraunos.attention(Q, KV, KV, bias, mask_info=MaskInfo.from_segments(jnp.zeros((2, 6), int)))
    (warning,) = seen
    assert "a bias is given" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.filterwarnings("ignore:attention. a bias is given")
def test_a_bias_wins_over_a_mask_and_init_bias_is_asked_last():
    given = [jax.random.normal(jax.random.key(i), (2, 6, 2, 8)) for i in range(3)]
    info = MaskInfo.from_attention_mask(jnp.zeros((6, 6), bool))
    bias = jax.random.normal(jax.random.key(3), (2, 2, 6, 6))

    def never():
        raise AssertionError("init_bias was called")

    def run(*args, **kwargs):
        return keraunos.attention(*given, *args, dtype="float32", **kwargs)

    want = run(bias)
    np.testing.assert_array_equal(run(bias, mask_info=info, init_bias=never), want)
    assert not run(mask_info=info, init_bias=never).any()
    np.testing.assert_array_equal(run(init_bias=lambda: bias), want)


def test_what_is_cast():
    given = [jax.random.normal(jax.random.key(i), (1, 6, 2, 8)) for i in range(3)]
    assert keraunos.attention(*given).dtype == jnp.bfloat16
    assert keraunos.attention(*given, dtype=None).dtype == jnp.float32
    assert keraunos.attention(*given, dtype=jnp.float16).dtype == jnp.float16
    gradient = jax.grad(lambda q: keraunos.attention(q, *given[1:]).astype(jnp.float32).sum())(given[0])
    assert gradient.dtype == jnp.float32


def test_what_is_cast_follows_the_types_that_jax_allows():
    q = jax.random.normal(jax.random.key(0), (1, 7, 2, 8), jnp.float32)
    for wide in (False, True, False):
        with jax.enable_x64(wide), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert keraunos.attention(q, q, q, dtype="float64").dtype == (jnp.float64 if wide else jnp.float32)
