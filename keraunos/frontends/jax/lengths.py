"""JAX: arrays made longer and shorter. Where their values are at hand, on a CPU, nothing is compiled for that."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _on_host(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and all(device.platform == "cpu" for device in x.devices())


def _put(x: np.ndarray, like: jax.Array) -> jax.Array:
    # Not jnp.asarray, which compiles a program for that while something is differentiated.
    return jax.device_put(x, like.sharding if like.committed else None)


def longer(x: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
    """With so many values along an axis, the new ones all the same."""
    widths = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    if not _on_host(x):
        return jnp.pad(x, widths, constant_values=value)
    return _put(np.pad(x, widths, constant_values=value), x)


def shorter(x: jax.Array, axis: int, size: int) -> jax.Array:
    """The first values along an axis."""
    first = (*[slice(None)] * axis, slice(size))
    return _put(np.asarray(x)[first], x) if _on_host(x) else x[first]


# With gradients whose values are at hand, too: rules of differentiation get them, tracers only what is in between.
grow = jax.custom_vjp(lambda x, axis, size: longer(x, axis, size), nondiff_argnums=(1, 2))
cut = jax.custom_vjp(shorter, nondiff_argnums=(1, 2))
grow.defvjp(
    lambda x, axis, size: (longer(x, axis, size), x.shape[axis]),
    lambda axis, size, n, gradient: (shorter(gradient, axis, n),),
)
cut.defvjp(
    lambda x, axis, size: (shorter(x, axis, size), x.shape[axis]),
    lambda axis, size, n, gradient: (longer(gradient, axis, n),),
)


def as_gates(g: Any, gamma: Any, like: jax.Array, T: int, heads: int) -> jax.Array:
    """Gates per token that a constant decay per head is part of, and that decay nothing from token T on.

    Args:
        g: ``[B, padded, heads or fewer, K]``, ``[B, padded, heads or fewer]`` or None.
        gamma: ``[heads]`` or ``[B, heads]``.
        like: ``[B, padded, ...]``.
        T: how many tokens are none of the padding's.
        heads: of the recurrence.
    """
    B, padded = like.shape[:2]
    real = np.arange(padded) < T
    xp: Any = np if isinstance(gamma, np.ndarray) else jnp
    gates = xp.broadcast_to(xp.where(real[:, None], gamma[..., None, :], 0), (B, padded, heads))
    gates = jax.device_put(gates) if xp is np else gates
    if g is None:
        return gates
    g = jnp.repeat(g, heads // g.shape[2], axis=2)
    return g + (gates if g.ndim == 3 else gates[..., None])
