"""Arrays may be given by position or by name; errors carry the name of the public function."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keraunos
from keraunos import distributed, frontends, serving
from keraunos.ops import create_default_executor
from keraunos.serving.pool_operation import DECODE

B, T, H, K = 2, 5, 2, 4
FRAMEWORKS = ["jax", "torch"]


def arrays(framework, **shapes):
    """Random arrays by name."""
    measure = pytest.importorskip(framework) and frontends.get(f"{framework}.measure")
    return {name: measure.normal(shape, "float32", i, "cpu") for i, (name, shape) in enumerate(shapes.items())}


def qkv(framework, **shapes):
    return arrays(framework, **dict.fromkeys(("query", "key", "value"), (B, T, H, K)), **shapes)


def equal(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_public_functions_take_arrays_by_name(framework):
    x = qkv(framework, g=(B, T, H, K), initial_state=(B, H, K, K))
    x["g"] = -(x["g"] ** 2)
    q, k, v, g, h0 = x.values()
    equal(keraunos.gla_attention(**x), keraunos.gla_attention(q, k, v, g, None, h0))
    del x["g"]
    layer = dict(layer_idx=1, num_layers=4)
    equal(keraunos.lightning_attention(**x, **layer), keraunos.lightning_attention(q, k, v, h0, **layer))
    del x["initial_state"]
    sinks = dict(softmax_aux=g[0, 0, 0], dtype="float32")
    equal(keraunos.attention(**x, **sinks), keraunos.attention(q, k, v, None, None, g[0, 0, 0], dtype="float32"))


def test_so_does_a_graph():
    torch = pytest.importorskip("torch")
    x = qkv("torch", g=(B, T, H))
    x["g"] = -(x["g"] ** 2)
    for fn in (
        keraunos.gla_attention,
        lambda g, **x: keraunos.lightning_attention(**x, log_decay=[-1.0, -2.0]),
        lambda g, **x: keraunos.attention(**x, dtype=None),
    ):
        equal(torch.compile(fn, backend="eager", fullgraph=True)(**x), fn(**x))


def test_so_do_those_over_shards():
    x = qkv("jax")
    where = dict(mesh=jax.make_mesh((1,), ("tokens",)), spec=jax.P(None, "tokens"))
    equal(distributed.gla_attention(**x, **where), keraunos.gla_attention(**x))
    layer = dict(layer_idx=1, num_layers=4)
    equal(distributed.lightning_attention(**x, **where, **layer), keraunos.lightning_attention(**x, **layer))
    equal(distributed.attention(**x, **where), distributed.attention(*x.values(), **where))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_executor_takes_arrays_by_name(framework):
    run, x = create_default_executor(), qkv(framework, initial_state=(B, H, K, K))
    q, k, v, h0 = x.values()
    want = keraunos.gla_attention(q, k, v, initial_state=h0, return_state=True)
    equal(run(keraunos.GLAttention(), **x), want)
    equal(run(keraunos.GLAttention(), q, k, v, initial_state=h0), want)
    equal(run(keraunos.GLAttention(), q, k, v)[0], keraunos.gla_attention(q, k, v))
    decay = np.array([-0.5, -1.0], np.float32)
    equal(run(keraunos.LightningAttention(), **x, log_decay=decay)[0],
          keraunos.lightning_attention(**x, log_decay=decay))
    equal(run(keraunos.Attention(), query=q, key=k, value=v, causal=True)[0],
          keraunos.attention(q, k, v, causal=True, dtype=None))
    step = arrays(framework, key=(3, H, K), value=(3, H, K), query=(3, H, K), states=(4, H, K, K))
    slots = (q[0, :3, 0, 0] * 0 + 1).cumsum(0)
    step["slots"] = slots.astype("int32") if framework == "jax" else slots.int()
    assert run(DECODE, **step)[0].shape == (3, H, K)


def test_names_that_the_executor_does_not_know():
    run, (q, k, v) = create_default_executor(), qkv("jax").values()
    with pytest.raises(TypeError, match="unexpected keyword argument 'gama'"):
        run(keraunos.GLAttention(), query=q, key=k, value=v, gama=v)
    with pytest.raises(TypeError, match="got query, key by position and by name"):
        run(keraunos.GLAttention(), q, k, v, query=q, key=k)
    with pytest.raises(TypeError, match="got 8 arrays; expected at most 7: query, key, value, g, g_gamma"):
        run(keraunos.GLAttention(), *[q] * 8)
    with pytest.raises(TypeError, match="value is None; expected an array"):
        run(keraunos.GLAttention(), query=q, key=k)


def test_a_policy_is_for_all_selectors():
    chain = create_default_executor().chain
    with pytest.raises(TypeError, match="policy is of type ConfigSelectorChain; expected an AutotunePolicy or None"):
        keraunos.policy_override(chain, allow_autotune=False).__enter__()
    with pytest.raises(TypeError, match="got alow_autotune; expected fields of AutotunePolicy: allow_autotune, "):
        keraunos.policy_override(alow_autotune=False).__enter__()
    with keraunos.policy_override(allow_autotune=False) as policy:
        assert chain.policy is policy


_WRONG = jnp.ones((1, 1, 1, 7))


@pytest.mark.parametrize(("name", "call"), [
    ("gla_attention", lambda x: keraunos.gla_attention(**x | {"key": _WRONG})),
    ("gla_attention", lambda x: keraunos.gla_attention(**x, platform="torch")),
    ("gla_attention", lambda x: keraunos.gla_attention(**x, platform="cpu")),
    ("gla_attention", lambda x: keraunos.gla_attention(**x, cfg=3)),
    ("gla_attention", lambda x: keraunos.gla_attention(**x, cfg=keraunos.Config(backend="tpu"))),
    ("lightning_attention", lambda x: keraunos.lightning_attention(**x | {"key": _WRONG}, log_decay=[0.0, 0.0])),
    ("lightning_attention", lambda x: keraunos.lightning_attention(**x)),
    ("lightning_attention", lambda x: keraunos.lightning_attention(**x, layer_idx=4, num_layers=4)),
    ("lightning_attention", lambda x: keraunos.lightning_attention(**x, layer_idx=0.5, num_layers=4)),
    ("lightning_attention", lambda x: keraunos.lightning_attention(**x, log_decay=[0.0, 0.0], platform="torch")),
    ("lightning_attention", lambda x: keraunos.lightning_attention(**x, log_decay="no")),
    ("attention", lambda x: keraunos.attention(**x | {"key": _WRONG})),
    ("attention", lambda x: keraunos.attention(**x, platform="torch")),
    ("attention", lambda x: keraunos.attention(**x, sliding_window=-1)),
    ("gla_attention", lambda x: distributed.gla_attention(**x)),
    ("lightning_attention", lambda x: distributed.lightning_attention(**x, layer_idx=0, num_layers=1)),
    ("attention", lambda x: distributed.attention(**x)),
    ("decode", lambda x: serving.decode(**x, states=_WRONG, slots=_WRONG)),
    ("verify", lambda x: serving.verify(**x, states=_WRONG, slots=_WRONG)),
    ("commit", lambda x: serving.commit(x["key"], x["value"], states=_WRONG, slots=_WRONG, counts=None)),
    ("prefill", lambda x: serving.prefill(**x, states=_WRONG, slots=_WRONG, cu_seqlens=None)),
])
def test_errors_carry_the_functions_name(name, call):
    with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
        call(qkv("jax"))


def test_numbers_that_no_float_can_be():
    q, pool = jnp.ones((1, 2, 2, 4)), jnp.ones((3, 2, 4, 4))
    for call in (
        lambda scale: keraunos.gla_attention(q, q, q, softmax_scale=scale),
        lambda scale: keraunos.lightning_attention(q, q, q, layer_idx=0, num_layers=1, softmax_scale=scale),
        lambda scale: keraunos.attention(q, q, q, softmax_scale=scale),
        lambda scale: serving.decode(*[q[0]] * 3, pool, jnp.array([0, 1]), softmax_scale=scale),
    ):
        with pytest.raises(TypeError, match=r"softmax_scale is 1000.*\.\.\..*; expected a finite number"):
            call(10**400)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_pool_without_slots_is_refused(framework):
    x = arrays(framework, token=(2, H, K), pool=(0, H, K, K), many=(2, 3, H, K))
    token, pool, many = x.values()
    slots = token[:, 0, 0].astype("int32") if framework == "jax" else token[:, 0, 0].int()
    for name, call in (
        ("decode", lambda: serving.decode(token, token, token, pool, slots)),
        ("verify", lambda: serving.verify(many, many, many, pool, slots)),
        ("commit", lambda: serving.commit(many, many, pool, slots, slots)),
        ("prefill", lambda: serving.prefill(token, token, token, pool, slots, np.array([0, 1, 2]))),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: states has shape \(0, 2, 4, 4\); expected .* slots >= 1"):
            call()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_decays_given_as_numbers_have_the_digits_of_the_query(framework):
    measure = pytest.importorskip(framework) and frontends.get(f"{framework}.measure")
    decays = [-1 / 3, -1 / 7]
    with jax.enable_x64(True):
        q = measure.array(np.ones((1, 50, 2, 4)), "float64", "cpu")
        want = np.asarray(keraunos.gla_attention(q, q, q, g_gamma=measure.array(np.array(decays), "float64", "cpu")))
        for given in (decays, np.array(decays)):
            for got in (
                keraunos.gla_attention(q, q, q, g_gamma=given),
                keraunos.lightning_attention(q, q, q, log_decay=given),
            ):
                np.testing.assert_allclose(np.asarray(got), want, rtol=1e-14)


def test_without_a_framework_errors_say_what_to_install(tmp_path):
    for package in ("numpy", "filelock", "platformdirs", "keraunos"):
        spec = importlib.util.find_spec(package)
        folder = Path(spec.origin).parent if spec else None
        if folder:
            (tmp_path / package).symlink_to(folder)
            if (libraries := folder.parent / f"{package}.libs").exists():
                (tmp_path / libraries.name).symlink_to(libraries)
    code = """if True:
        import numpy as np, keraunos
        q = np.ones((1, 2, 2, 4), np.float32)
        for call in (lambda: keraunos.gla_attention(q, q, q), lambda: keraunos.attention(q, q, q),
                     lambda: keraunos.serving.decode(q, q, q, q, q), lambda: keraunos.detect_platform("gla")):
            try:
                call()
            except (TypeError, ImportError) as error:
                print(error)
        """
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path,
                          env={"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)})
    wanted = "neither framework is installed, pip install 'keraunos[jax]' or 'keraunos[torch]'"
    lines = done.stdout.splitlines()
    assert [line.endswith(wanted) for line in lines[:3]] == [True] * 3, done.stdout + done.stderr
    assert lines[3:] == ["keraunos: jax is not installed: pip install 'keraunos[jax]'"]
