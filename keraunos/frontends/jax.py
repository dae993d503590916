"""JAX: differentiation, devices and dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keraunos.frontends import Device


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """``(args, opts) -> outputs`` under ``jit``, with ``backward`` as its gradient; ``opts`` is static."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def call(args, opts):
        return forward(args, opts)[0]

    def save(args, opts):
        outputs, residuals = forward(args, opts)
        return outputs, (args, residuals)

    def gradient(opts, saved, grads):
        args, residuals = saved
        return (backward(args, residuals, grads, opts),)

    call.defvjp(save, gradient)
    return jax.jit(call, static_argnums=1)


def zeros(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.Array:
    """Zeros that vary over the mesh axes over which any array in ``like`` does, so that a scan may carry them."""
    axes: frozenset = frozenset().union(*(getattr(jax.typeof(x), "vma", ()) for x in jax.tree.leaves(like)))
    x = jnp.zeros(shape, dtype)
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def device_of(x: Any) -> Device:
    """The device a concrete array is on; while tracing, the default device."""
    if isinstance(x, jax.core.Tracer):
        return default_device()
    return _describe(next(iter(x.devices())))


def default_device() -> Device:
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    return _describe(device)


@functools.cache
def _describe(device: jax.Device) -> Device:
    backend = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
    return Device(backend, device.device_kind)


def dtype_name(x: Any) -> str:
    """The dtype's name: "bfloat16", "float32", "int32", ..."""
    return np.dtype(x.dtype).name


