"""JAX: values of arrays that are known on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keraunos import frontends


def readable(arrays: Sequence[Any], everywhere: bool) -> bool:
    """Whether calls on arrays like these may have values that may be read; ``everywhere``: those on a device, too."""
    return everywhere or frontends.get("jax").device_of(arrays[0]).backend == "cpu"


def read(arrays: Sequence[jax.Array], look: Callable[..., None], everywhere: bool) -> None:
    """``look`` at the values of arrays, if all have some; ``everywhere``: of those that are traced when they have."""
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        if everywhere:
            jax.debug.callback(lambda *x: look(*map(np.asarray, x)), *arrays)
        return
    if everywhere or all(next(iter(x.devices())).platform == "cpu" for x in arrays):
        values = list(map(_values, arrays))
        if all(x is not None for x in values):
            look(*values)


def number(x: jax.Array) -> int | None:
    """The value of an array without dimensions, if it is known on the host."""
    found: list[np.ndarray] = []
    read([x], found.append, False)
    return int(found[0]) if found else None


def constant(x: np.ndarray, like: Any) -> jax.Array:
    """The NumPy array ``x`` as an array of JAX, which goes where ``like`` is."""
    return jnp.asarray(x)


def _values(x: jax.Array) -> np.ndarray | None:
    # Of a part: the array would keep a view of its own, and then could not be given up to a computation.
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    if not x.is_fully_addressable:
        return None
    whole = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
        whole[shard.index] = shard.data
    return whole
