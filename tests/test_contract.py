"""Tests of the package as a whole."""

import dataclasses
import inspect
import json
import subprocess
import sys

import pytest

import keraunos
from keraunos.kernels import kernel_registry

KERNELS = {
    "gla": keraunos.GLAttention, "lightning_attn": keraunos.LightningAttention, "attention": keraunos.Attention,
}


def python(code, *args):
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True).stdout


def test_importing_loads_no_framework():
    loaded = python(
        "import json, sys, keraunos, keraunos.kernels, keraunos.layers, keraunos.ops, keraunos.decay\n"
        "keraunos.lightning_attention, keraunos.kernel_registry.rows()\n"
        "print(json.dumps([m for m in ('flax', 'jax', 'torch', 'triton', 'jax_triton') if m in sys.modules]))"
    )
    assert json.loads(loaded) == []


def test_importing_touches_no_file_of_the_user(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    python("import os, sys; os.environ['HOME'] = sys.argv[1]; os.environ.pop('KERAUNOS_CACHE_DIR', None)\n"
           "import keraunos; keraunos.gla_attention", str(home))
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("name", ["kernels.kernel_registry", "ops.Tuner", "types.MaskInfo"])
def test_importing_the_package_is_enough_to_reach_its_modules(name):
    assert python(f"import keraunos; print(keraunos.{name} is not None)") == "True\n"


def test_every_public_name_is_there_and_documented():
    for name in keraunos.__all__:
        value = getattr(keraunos, name)
        if name != "__version__":
            assert inspect.getdoc(value), name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        keraunos.nonsense  # noqa: B018


@pytest.mark.parametrize("row", kernel_registry.rows(), ids=lambda r: f"{r.algorithm}-{r.platform}-{r.backend}")
def test_every_row_imports_or_says_why_not(row):
    try:
        implementation = row.implementation
    except ImportError as error:
        # A reason that a user can act on names what is missing.
        if not error.name:
            pytest.fail(f"{row.target} cannot be imported and does not say what is missing: {error}")
        return
    # Plain operations that take token after token have nothing to configure.
    assert implementation.fields or row.algorithm in ("decode", "verify", "commit")
    assert len(implementation.source_version) == 12


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("named", [False, True], ids=["by position", "by name"])
def test_low_level_functions_take_arrays_options_and_a_configuration(framework, named):
    xp = pytest.importorskip({"jax": "jax.numpy"}.get(framework, framework))
    platform = {"jax": "xla"}.get(framework, framework)
    q, state = xp.ones((1, 20, 2, 16)), xp.ones((1, 2, 16, 16))
    gamma = -xp.ones(2)
    token = xp.ones((3, 2, 16))
    arrays = {
        "gla": dict(query=q, key=q, value=q, g=-q, g_gamma=gamma, softmax_scale=0.5, initial_state=state, reverse=True),
        "lightning_attn": dict(query=q, key=q, value=q, layer_idx=1, num_layers=4, softmax_scale=0.5),
        "attention": dict(query=q, key=q, value=q),
        "decode": dict(key=token, value=token, query=token, g=-token, g_gamma=gamma, states=None, slots=xp.arange(3)),
    }
    for algorithm, given in arrays.items():
        fn = kernel_registry.get(algorithm, platform)
        inv = {"decode": "gla"}.get(algorithm, algorithm)
        inv = KERNELS[inv]().invocation(framework, "float32", T=20, H=2, K=16)
        cfg = dataclasses.replace(fn.heuristic(inv, keraunos.Config()), platform=platform)
        for options in ({}, {"cfg": cfg}):
            if algorithm == "decode":
                given["states"] = xp.ones((4, 2, 16, 16))  # given up to the call in JAX
            found = fn(**given, **options) if named else fn(*given.values(), **options)
            assert [tuple(x.shape)[-1] for x in found] == [16, 20 if algorithm == "attention" else 16]
        with pytest.raises(TypeError):
            fn(**given, nonsense=1)


def test_a_function_of_the_low_level_signature_is_an_implementation():
    import jax.numpy as jnp

    q, seen = jnp.ones((1, 20, 2, 16)), []

    def mine(query, key, value, g, g_gamma, softmax_scale, initial_state, reverse, cu_seqlens, *, cfg):
        seen.append((softmax_scale, reverse, cfg.block_q))
        return query, jnp.ones((1, 2, 16, 16))

    kernel_registry.register("gla", "mine", fields=("block_q",))(mine)
    try:
        cfg = keraunos.GLAttentionConfig(platform="mine", block_q=32)
        assert keraunos.gla_attention(q, q, q, softmax_scale=2.0, platform="mine") is q
        assert keraunos.gla_attention(q, q, q, reverse=True, cfg=cfg) is q
        output, state = kernel_registry.get("gla", "mine")(q, q, q, None, None, 3.0, cfg=cfg)
        assert output is q
        assert state.shape == (1, 2, 16, 16)
        assert seen == [(2.0, False, None), (None, True, 32), (3.0, False, 32)]
    finally:
        kernel_registry.unregister(kernel_registry.find("gla", "mine")[0])


def test_low_level_lightning_has_the_contract_signature():
    parameters = list(inspect.signature(keraunos.LightningAttention().low_level).parameters)
    assert parameters[:9] == [
        "query", "key", "value", "layer_idx", "num_layers", "softmax_scale", "initial_state", "reverse", "cu_seqlens",
    ]


def test_low_level_kernel_works_under_jit_and_returns_the_state():
    import jax
    import jax.numpy as jnp

    fn = kernel_registry.get("lightning_attn", platform="xla", backend="any")
    q = jnp.ones((1, 20, 2, 16))
    output, state = jax.jit(lambda q: fn(q, q, q, 1, 4))(q)
    want = keraunos.lightning_attention(q, q, q, layer_idx=1, num_layers=4, return_state=True, platform="xla")
    assert jnp.allclose(output, want[0])
    assert jnp.allclose(state, want[1])


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_low_level_attention_returns_the_weights(framework):
    xp = pytest.importorskip({"jax": "jax.numpy"}.get(framework, framework))
    q, k, v = xp.ones((2, 6, 4, 8)), xp.ones((2, 5, 2, 8)), xp.ones((2, 5, 2, 16))
    fn = kernel_registry.get("attention", platform={"jax": "xla"}.get(framework, framework))
    output, weights = fn(q, k, v, causal=True)
    assert (tuple(output.shape), tuple(weights.shape)) == ((2, 6, 4, 16), (2, 4, 6, 5))
    assert abs(weights.sum(-1) - 1).max() < 1e-5
    assert fn(q, k, v, causal=True, return_weights=False)[1] is None
    assert keraunos.create_default_executor()(keraunos.Attention(), q, k, v)[1] is None


def test_low_level_attention_without_weights_refuses():
    import jax.numpy as jnp

    fn, q = kernel_registry.get("attention", platform="triton"), jnp.ones((1, 8, 2, 16))
    for cfg in (None, keraunos.AttentionConfig(block_q=64, block_k=64, num_warps=4, num_stages=3)):
        with pytest.raises(keraunos.UnsupportedError, match=r"attention: (needs a GPU|never forms the weights)"):
            fn(q, q, q, cfg=cfg, return_weights=True)


def test_detect_platform():
    import jax  # noqa: F401

    assert keraunos.detect_platform("gla", "xla") == "xla"
    with pytest.raises(ValueError, match="unknown platform 'nonsense'"):
        keraunos.detect_platform("gla", "nonsense")
    for name in (keraunos.Platform.CUDA, "cuda"):
        with pytest.raises(
            keraunos.UnsupportedError, match="decode: platform 'cuda' does not have it; expected one of"
        ):
            keraunos.detect_platform("decode", name)
    with pytest.raises(ValueError, match="no algorithm 'nonsense'"):
        kernel_registry.get("nonsense")


def test_detect_platform_without_jax():
    found = python("import sys, keraunos; sys.modules['jax'] = None; print(keraunos.detect_platform('gla'))")
    assert found.strip() in ("torch", "triton", "cuda")


def test_detect_platform_says_what_a_call_gets():
    import jax.numpy as jnp

    x = jnp.ones((1, 4096, 16, 128), jnp.bfloat16)
    token, pool, slots = x[0, :2], jnp.zeros((4, 16, 128, 128)), jnp.arange(2)
    calls = {
        "gla": keraunos.explain(keraunos.gla_attention, x, x, x, -x),
        "lightning_attn": keraunos.explain(keraunos.lightning_attention, x, x, x, layer_idx=0, num_layers=2),
        "attention": keraunos.explain(keraunos.attention, x, x, x),
        "decode": keraunos.explain(keraunos.serving.decode, token, token, token, pool, slots),
    }
    for algorithm, choice in calls.items():
        assert keraunos.detect_platform(algorithm) == choice.platform
