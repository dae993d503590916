"""Lowering of Triton's kernels in JAX without a GPU."""

from __future__ import annotations

import functools
import re

import pytest

# What was built: of each kernel the first build; and what launches put into graphs.
_BUILT: dict = {}
_PUT: dict = {}


def on_hopper(monkeypatch):
    """The module that launches, as on a Hopper GPU: without a device there is nothing to ask for its capability."""
    # Not jax_triton itself, which would leave Triton without a cache for all tests that follow in the process.
    launch = pytest.importorskip("keraunos.frontends.jax.launch", exc_type=ImportError)
    call = functools.partial(launch.jax_triton.triton_call, compute_capability=90)
    monkeypatch.setattr(launch.jax_triton, "triton_call", call)
    return launch


def build_each_once(launch, monkeypatch):
    """Let Triton make its program of every launch, and build the first of each kernel to its end.

    ``tests/triton/compile.py`` builds all.
    """
    build = launch.triton_lib.compile_ttir_inplace

    def built(module, *options):
        kernel = re.search(r"tt\.func public @(\w+)", str(module))[1]
        if kernel not in _BUILT:
            _BUILT[kernel] = build(module, *options)
        return _BUILT[kernel]

    monkeypatch.setattr(launch.triton_lib, "compile_ttir_inplace", built)
    monkeypatch.setattr(launch.triton_lib, "_COMPILED_KERNEL_CACHE", _PUT)
