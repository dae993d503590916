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
    """``prepare(opts)``, which gives ``args -> outputs`` under ``jit``, with ``backward`` as its gradient."""

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

    def same_axes(args, opts):
        axes = frozenset().union(*map(varying, jax.tree.leaves(args)))
        return call(jax.tree.map(lambda x: vary(x, axes), args), opts)

    jitted = jax.jit(same_axes, static_argnums=1)
    return lambda opts: lambda args: jitted(args, opts)


def zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that, inside ``shard_map``, vary over the mesh axes that ``like`` does, so that a scan may carry them."""
    return vary(jnp.zeros(shape, dtype), varying(like))


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which a value differs from device to device inside ``shard_map``."""
    aval = jax.typeof(x)
    axes = getattr(aval, "manual_axis_type", None)  # its name from jax 0.10 on
    return axes.varying if axes is not None else getattr(aval, "vma", frozenset())


def vary(x: Any, axes: frozenset[str]) -> Any:
    """The same value, as one that varies over ``axes`` too."""
    axes = axes - varying(x)
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def device_of(x: Any) -> Device:
    """The device a concrete array is on; while tracing, the default device."""
    if isinstance(x, jax.core.Tracer):
        return default_device()
    return _describe(next(iter(x.devices())))


def default_device() -> Device:
    """The device on which JAX puts new arrays."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
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


def length(n: int) -> int:
    """A size as a number."""
    return n
