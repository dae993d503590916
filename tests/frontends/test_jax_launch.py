"""Which versions of what launches Triton's kernels in JAX are taken; which kernels of Gluon are built, and when."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import threading

import jax
import jax.numpy as jnp
import pytest

import keraunos
from keraunos.frontends import cannot_launch, rehearsal
from keraunos.kernels import kernel_registry
from keraunos.ops.invocation import Config, UnsupportedError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="needs jax-triton")

SHAPE = dict(B=2, T=4096, H=64, K=128)
CALLS = {
    "cuda": keraunos.GLAttention().invocation("jax", **SHAPE, gate="constant"),
    "triton": keraunos.GLAttention().invocation("jax", **SHAPE, gate="constant"),
    "softmax": keraunos.Attention().invocation("jax", **SHAPE),
}


def choose(kind, platform=None):
    inv = dataclasses.replace(CALLS[kind], backend="gpu", device="NVIDIA H200")
    return kernel_registry.choose(inv, platform)


def refusal(kind):
    """Why the platform does not take its call, or None."""
    try:
        choose(kind, "triton" if kind == "softmax" else kind)
    except UnsupportedError as error:
        return str(error)
    return None


@pytest.fixture
def install(monkeypatch):
    """Pretends that a version of a package is installed; None: that its version cannot be told."""

    def install(package, version):
        def found(name, real=importlib.metadata.version):
            if name != package:
                return real(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", found)

    return install


def test_what_is_installed_is_taken():
    if reason := cannot_launch("jax", gluon=True):
        pytest.skip(reason)
    assert [refusal(kind) for kind in CALLS] == [None, None, None]


@pytest.mark.parametrize(("version", "told"), [("0.4.1", "0.4.1"), ("0.2.0", "0.2.0"), (None, "of no version")])
def test_versions_of_jax_triton_that_are_not_known_are_refused(version, told, install):
    install("jax-triton", version)
    for kind in CALLS:
        assert f"knows jax-triton 0.3 for JAX arrays; this is {told}" in refusal(kind)
        assert choose(kind)[0].platform not in ("cuda", "triton")


def test_versions_of_jaxlib_that_are_not_known_are_refused_for_gluon(install):
    install("jax-triton", "0.3.1")
    install("jaxlib", "0.12.0.1")
    assert "knows jaxlib 0.8, 0.9, 0.10, 0.11 for JAX arrays; this is 0.12.0.1" in refusal("cuda")
    assert refusal("triton") is None
    install("jaxlib", "0.11.2")
    assert refusal("cuda") is None


@pytest.fixture
def builds(monkeypatch):
    """The names of the kernels that are built; four builds wait for each other."""
    if reason := cannot_launch("jax", gluon=True):
        pytest.skip(reason)
    from keraunos.frontends.jax import gluon

    built, together = [], threading.Barrier(4)

    def build(kernel, *rest):
        rehearsal.was_read()
        together.wait(timeout=10)
        built.append(kernel.__name__)

    monkeypatch.setattr(gluon, "_built", build)
    return built


def gla(*args):
    return kernel_registry.get("gla", "cuda")(*args, cfg=Config(num_stages=3))[0]


def test_a_gradient_builds_what_it_launches_side_by_side_and_once(builds):
    x = jax.ShapeDtypeStruct((3, 77, 2, 128), jnp.bfloat16)
    loss = jax.value_and_grad(lambda *args: gla(*args).astype(jnp.float32).sum(), range(4))
    for _ in range(2):
        jax.jit(functools.partial(loss)).trace(x, x, x, x)
        assert sorted(builds) == ["dimensions_kernel", "keys_kernel", *["queries_kernel"] * 2]


def test_a_trace_builds_nothing(builds):
    """It may never be lowered."""
    x = jax.ShapeDtypeStruct((3, 78, 2, 128), jnp.bfloat16)
    assert jax.eval_shape(gla, x, x, x, x).shape == x.shape
    assert jax.eval_shape(jax.vmap(gla), *[jax.ShapeDtypeStruct((2, *x.shape), x.dtype)] * 4).shape == (2, *x.shape)
    assert builds == []
