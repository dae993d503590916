"""Wrong calls get an error that says what came, what was wanted and why, before anything runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keraunos

B, T, H, G, K, V = 2, 8, 4, 2, 16, 24


def call(**changes):
    x = {
        "query": jnp.zeros((B, T, H, K)),
        "key": jnp.zeros((B, T, G, K)),
        "value": jnp.zeros((B, T, G, V)),
        "g": None,
        "g_gamma": None,
        "initial_state": None,
        "cu_seqlens": None,
    }
    options = {name: value for name, value in changes.items() if name not in x}
    return keraunos.gla_attention(*(x | {k: v for k, v in changes.items() if k in x}).values(), **options)


def packed(**changes):
    one = {"query": jnp.zeros((1, T, H, K)), "key": jnp.zeros((1, T, G, K)), "value": jnp.zeros((1, T, G, V))}
    return call(**(one | {"cu_seqlens": jnp.array([0, 3, T])} | changes))


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"query": np.zeros((B, T, H, K))}, TypeError, r"query is of type numpy.ndarray; expected a jax.Array or a torch"),
    ({"query": None}, TypeError, "query is None"),
    ({"key": None}, TypeError, "key is None; expected an array"),
    ({"key": np.zeros((B, T, G, K))}, TypeError, "key is of type numpy.ndarray; expected an array of jax, like query"),
    ({"query": jnp.zeros((B, T, H * K))}, ValueError, r"query has shape \(2, 8, 64\); expected \[B, T, H, K\]"),
    ({"key": jnp.zeros((B, T + 1, G, K))}, ValueError,
     r"key has shape \(2, 9, 2, 16\); expected \[B, T, heads, K\] = \(2, 8, heads, 16\), like query"),
    ({"key": jnp.zeros((B, T, G, K + 1))}, ValueError, r"key has shape .*; expected .* \(2, 8, heads, 16\), like"),
    ({"value": jnp.zeros((B, 1, G, V))}, ValueError, r"value has shape .*; expected .* = \(2, 8, heads, V\)"),
    ({"key": jnp.zeros((B, T, 3, K))}, ValueError,
     "key has 3 heads; expected a divisor of H = 4, the most that query, key, value or g has"),
    ({"value": jnp.zeros((B, T, 6, V))}, ValueError, "query has 4 heads; expected a divisor of H = 6"),
    ({"value": jnp.zeros((B, T, 0, V))}, ValueError, "value has 0 heads; expected a divisor of H = 4"),
    ({"g": jnp.zeros((B, T, 3))}, ValueError, "g has 3 heads; expected a divisor of H = 4"),
    ({"key": jnp.zeros((B, T, G, K), jnp.bfloat16)}, TypeError, "key has dtype bfloat16; expected float32, like query"),
    ({"query": jnp.zeros((B, T, H, K), int)}, TypeError, "query has dtype int32; expected bfloat16 or float16"),
    ({"g": jnp.zeros((B, T, H, V))}, ValueError,
     r"g has shape \(2, 8, 4, 24\); expected .* = \(2, 8, heads, 16\) or \[B, T, heads\] = \(2, 8, heads\)"),
    ({"g_gamma": jnp.zeros(G)}, ValueError,
     r"g_gamma has shape \(2,\); expected \[H\] = \(4,\) or \[B, H\] = \(2, 4\)"),
    ({"g_gamma": [0.0, -1, -1, 0.5]}, ValueError,
     r"g_gamma has a value 0.5 at \[3\]; expected <= 0, it is the log of a decay"),
    ({"g_gamma": np.array([0, -1, np.nan, -1])}, ValueError,
     r"g_gamma has a value nan at \[2\]; expected <= 0"),
    ({"initial_state": jnp.zeros((1, H, K, V))}, ValueError,
     r"initial_state has shape .*; expected .* \(2, 4, 16, 24\), one state per sequence and head"),
    ({"initial_state": jnp.zeros((B, G, K, V))}, ValueError, "one state per sequence and head"),
    ({"initial_state": jnp.zeros((B, H, K, V)), "state_v_first": True}, ValueError,
     r"initial_state has shape \(2, 4, 16, 24\); expected \[N, H, V, K\] = \(2, 4, 24, 16\)"),
    ({"state_v_first": "yes"}, TypeError, "state_v_first is 'yes'; expected True or False"),
    ({"cu_seqlens": jnp.array([0, T])}, ValueError, "query has B = 2; expected B = 1 with cu_seqlens"),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale is '1'; expected a finite number"),
    ({"softmax_scale": True}, TypeError, "softmax_scale is True; expected a finite number"),
    ({"softmax_scale": float("nan")}, TypeError, "softmax_scale is nan"),
    ({"reverse": 1}, TypeError, "reverse is 1; expected True or False"),
    ({"platform": "tirton"}, ValueError, "unknown platform 'tirton'; expected one of"),
    ({"platform": "torch"}, keraunos.UnsupportedError, "torch: takes torch arrays, not jax"),
    ({"cfg": {"block_q": 64}}, TypeError, "cfg is .*; expected a configuration"),
    ({"platform": "xla", "cfg": keraunos.Config(platform="torch")}, ValueError, "expected the same"),
    ({"cfg": keraunos.Config(backend="tpu", platform="xla")}, keraunos.UnsupportedError,
     "gla_attention: asked for backend 'tpu'; the arrays are on [cg]pu"),
], ids=lambda x: str(x)[:40])
def test_gla(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"cu_seqlens": jnp.array([0.0, T])}, TypeError, "cu_seqlens has dtype float32; expected int32 or int64"),
    ({"cu_seqlens": jnp.array([0], jnp.int32)}, ValueError, r"cu_seqlens has shape \(1,\); expected \[N \+ 1\]"),
    ({"cu_seqlens": jnp.array([[0, T]])}, ValueError, r"cu_seqlens has shape \(1, 2\)"),
    ({"cu_seqlens": [0, T]}, TypeError, "cu_seqlens is of type builtins.list"),
    ({"initial_state": jnp.zeros((1, H, K, V))}, ValueError, r"initial_state .*; expected .* \(2, 4, 16, 24\)"),
    ({"g_gamma": jnp.zeros((2, H))}, ValueError, "g_gamma has shape"),
], ids=lambda x: str(x)[:40])
def test_packed(changes, error, message):
    with pytest.raises(error, match=message):
        packed(**changes)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"layer_idx": 4, "num_layers": 4}, ValueError, "layer_idx is 4; expected 0 <= layer_idx < num_layers = 4"),
    ({"layer_idx": -1, "num_layers": 4}, ValueError, "layer_idx is -1"),
    ({"layer_idx": 0, "num_layers": 0}, ValueError, "num_layers is 0; expected an integer >= 1"),
    ({"layer_idx": 0.5, "num_layers": 4}, TypeError, "layer_idx is 0.5; expected an integer"),
    ({"layer_idx": True, "num_layers": 4}, TypeError, "layer_idx is True"),
    ({"layer_idx": jnp.float32(1), "num_layers": 4}, TypeError, "layer_idx is .*; expected an integer"),
    ({"layer_idx": 0, "num_layers": 4.0}, ValueError, "num_layers is 4.0"),
    ({"layer_idx": 0, "num_layers": jnp.array(4)}, ValueError, "num_layers is Array.*; expected an integer"),
    ({}, ValueError, "expected layer_idx and num_layers, or log_decay"),
    ({"layer_idx": 0}, ValueError, "expected layer_idx and num_layers, or log_decay"),
    ({"layer_idx": 0, "num_layers": 4, "log_decay": [0, 0, 0, 0]}, ValueError, "expected one or the other"),
    ({"log_decay": [0, 0, 0, 0.1]}, ValueError,
     r"log_decay has a value 0.1.* at \[3\]; expected <= 0"),
    ({"log_decay": [0, 0, 0]}, ValueError, r"log_decay has shape \(3,\); expected \[H\] = \(4,\)"),
    ({"log_decay": jnp.zeros(H, int)}, TypeError, "log_decay has dtype int32"),
], ids=str)
def test_lightning(options, error, message):
    q, k, v = jnp.zeros((B, T, H, K)), jnp.zeros((B, T, G, K)), jnp.zeros((B, T, G, V))
    with pytest.raises(error, match=message):
        keraunos.lightning_attention(q, k, v, **options)


@pytest.mark.parametrize(("right", "wrong", "error", "message"), [
    ({"reverse": True}, {"reverse": 1}, TypeError, "reverse is 1; expected True or False"),
    ({"reverse": False}, {"reverse": 0.0}, TypeError, "reverse is 0.0"),
    ({"softmax_scale": 1.0}, {"softmax_scale": 1 + 0j}, TypeError, r"softmax_scale is \(1\+0j\)"),
    ({"layer_idx": 1}, {"layer_idx": True}, TypeError, "layer_idx is True; expected an integer"),
    ({"num_layers": 4}, {"num_layers": 4.0}, ValueError, "num_layers is 4.0; expected an integer"),
], ids=str)
def test_what_equals_a_remembered_option_is_checked_all_the_same(right, wrong, error, message):
    def run(**options):
        q = jnp.zeros((B, T, H, K))
        return keraunos.lightning_attention(q, q, q, **{"layer_idx": 1, "num_layers": 4, **options})

    run(**right)
    with pytest.raises(error, match=message):
        run(**wrong)


def test_a_misspelled_option_is_no_option():
    with pytest.raises(TypeError, match="sofmax_scale"):
        call(sofmax_scale=1.0)


def test_errors_come_while_tracing_too():
    with pytest.raises(ValueError, match="g has shape"):
        jax.jit(lambda g: call(g=g))(jnp.zeros((1, 1)))


def test_sizes_that_may_be_no_symbols():
    shape = jax.export.symbolic_shape("b, t, 2, k")
    q = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(TypeError, match=r"a size is k, a symbol of jax\.export; expected a number"):
        jax.export.export(jax.jit(keraunos.gla_attention))(q, q, q)
    q = jax.ShapeDtypeStruct((*shape[:3], 8), jnp.float32)
    with pytest.raises(keraunos.UnsupportedError, match=r"symbols of jax\.export: export each size, or .*'xla'"):
        jax.export.export(jax.jit(functools.partial(keraunos.gla_attention, platform="triton")))(q, q, q)


def test_no_platform_gives_every_reason(monkeypatch):
    rows = keraunos.kernel_registry.rows("gla")
    monkeypatch.setattr(keraunos.kernel_registry, "_rows", [r for r in rows if "jax" not in r.frameworks])
    with pytest.raises(keraunos.UnsupportedError, match="no platform can run this call"):
        call()
