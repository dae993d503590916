"""Which versions of what launches Triton's kernels in JAX are taken."""

import dataclasses
import importlib.metadata
import importlib.util

import pytest

import keraunos
from keraunos.frontends import cannot_launch
from keraunos.ops.invocation import UnsupportedError
from keraunos.ops.registry import kernel_registry

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
