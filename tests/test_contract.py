"""What holds for the package as a whole."""

import inspect
import json
import subprocess
import sys

import pytest

import keraunos
from keraunos.ops.registry import kernel_registry


def python(code, *args):
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True).stdout


def test_importing_loads_no_framework():
    loaded = python(
        "import json, sys, keraunos, keraunos.kernels, keraunos.ops, keraunos.decay\n"
        "keraunos.lightning_attention, keraunos.kernel_registry.rows()\n"
        "print(json.dumps([m for m in ('jax', 'torch', 'triton', 'jax_triton') if m in sys.modules]))"
    )
    assert json.loads(loaded) == []


def test_importing_touches_no_file_of_the_user(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    python("import os, sys; os.environ['HOME'] = sys.argv[1]; os.environ.pop('KERAUNOS_CACHE_DIR', None)\n"
           "import keraunos; keraunos.gla_attention", str(home))  # fmt: skip
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


@pytest.mark.parametrize("algorithm", sorted({r.algorithm for r in kernel_registry.rows()}))
def test_implementations_agree_on_the_signature(algorithm):
    signatures = set()
    for row in kernel_registry.rows(algorithm):
        try:
            signatures.add(str(inspect.signature(row.implementation.fn)))
        except ImportError:
            continue
    assert len(signatures) == 1


def test_low_level_lightning_has_the_contract_signature():
    parameters = list(inspect.signature(kernel_registry.get("lightning_attn", platform="xla").fn).parameters)
    assert parameters[:9] == [
        "query", "key", "value", "layer_idx", "num_layers", "softmax_scale", "initial_state", "reverse", "cu_seqlens",
    ]  # fmt: skip


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
            keraunos.UnsupportedError, match="attention: platform 'cuda' does not have it; expected one of"
        ):
            keraunos.detect_platform("attention", name)
    with pytest.raises(ValueError, match="no algorithm 'nonsense'"):
        kernel_registry.get("nonsense")


def test_detect_platform_without_jax():
    found = python("import sys, keraunos; sys.modules['jax'] = None; print(keraunos.detect_platform('gla'))")
    assert found.strip() in ("torch", "triton")


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
