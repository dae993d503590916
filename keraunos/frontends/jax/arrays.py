"""JAX's arrays and devices: what host code that knows no framework asks of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keraunos.frontends import Device, UnnamedError


def zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that, inside ``shard_map``, vary over the mesh axes that ``like`` does, so that a scan may carry them."""
    return vary(jnp.zeros(shape, dtype), varying(like))


def empty(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """As :func:`zeros`, with any values."""

    @jax.custom_batching.custom_vmap
    def made() -> jax.Array:
        return jax.lax.empty(shape, dtype)

    # Under vmap JAX makes one of these for each call, and then takes all that is written there to differ between calls.
    made.def_vmap(lambda size, mapped: (made(), False))
    return vary(made(), varying(like))


def array(x: np.ndarray, like: jax.Array) -> jax.Array:
    """A NumPy array as one of JAX."""
    return jnp.asarray(x)


def cast(x: jax.Array | np.ndarray, dtype: str) -> jax.Array:
    """The values in another dtype."""
    return jnp.asarray(x, dtype)


def has_wide_types() -> bool:
    """Whether arrays may have 64 bits: JAX narrows what is cast to them where they may not."""
    return bool(jax.config.read("jax_enable_x64"))


# The array library, for what it and PyTorch have alike.
xp = jnp


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The matrix product, in the precision of its arguments."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def aligned(x: jax.Array) -> jax.Array:
    """The array, whose rows begin at multiples of 16 bytes if they are as long: JAX's do."""
    return x


def pad(x: jax.Array, axis: int, after: int, before: int = 0) -> jax.Array:
    """With so many zeros at the ends of an axis."""
    return jnp.pad(x, [(before, after) if i == axis else (0, 0) for i in range(x.ndim)]) if before or after else x


def stack(arrays: Sequence[jax.Array], axis: int) -> jax.Array:
    """Side by side along a new axis."""
    return jnp.stack(arrays, axis)


def numbers(n: int, like: jax.Array) -> jax.Array:
    """0 to n - 1, int32."""
    return jnp.arange(n, dtype=jnp.int32)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which a value differs from device to device inside ``shard_map``."""
    aval = jax.typeof(x)
    axes = getattr(aval, "manual_axis_type", None)  # its name from jax 0.10 on
    return axes.varying if axes is not None else getattr(aval, "vma", frozenset())


def vary(x: Any, axes: frozenset[str]) -> Any:
    """``x``, typed as a value that may differ from device to device over the mesh axes ``axes`` too."""
    axes = axes - varying(x)
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def device_of(x: Any) -> Device:
    """The device a concrete array is on; while tracing, the default device."""
    if isinstance(x, jax.core.Tracer):
        return default_device()._replace(traced=True)
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
    if backend == "gpu":
        return Device(backend, device.device_kind, shared_memory(str(getattr(device, "compute_capability", ""))))
    return Device(backend, device.device_kind)


def shared_memory(capability: str) -> int:
    """Bytes of shared memory that a program may have on GPUs of a capability, such as "8.9" or "gfx942".

    Of unknown ones what all have of their maker's that are known: JAX does not say how much it is.
    """
    if capability.startswith("gfx"):
        return 163840 if capability.startswith("gfx950") else 65536
    return {"8.0": 166912, "8.7": 166912, "9.0": 232448, "10.0": 232448, "10.3": 232448}.get(capability, 101376)


def place_of(x: Any) -> None:
    """Where the array is: JAX sees to it that those of a call are together."""


def dtype_name(x: Any) -> str:
    """The dtype's name: "bfloat16", "float32", "int32", ..."""
    return np.dtype(x.dtype).name


def length(n: int, usual: int | None = None) -> int:
    """A size as a number; ``usual`` for a symbol of ``jax.export``.

    Raises:
        UnnamedError: it is a symbol, and there is no usual size.
    """
    if not is_symbol(n):
        return n
    if usual is None:
        raise UnnamedError(f"a size is {n}, a symbol of jax.export; expected a number: export each size")
    return usual


def is_symbol(n: Any) -> bool:
    """Whether a size is a symbol of ``jax.export``: a number when the program runs."""
    return not isinstance(n, int)


def by_device(functions: dict[str, Callable], *args: Any) -> Any:
    """The results of the function for the kind of device, "cpu", "gpu" or "tpu", that the program is lowered for."""
    usual = functions["gpu"]
    others = {name: fn for name, fn in functions.items() if fn is not usual}
    return jax.lax.platform_dependent(*args, default=usual, **others) if others else usual(*args)


def seed(rng: jax.Array, like: jax.Array) -> jax.Array:
    """Two integers of 32 bits that follow from a key."""
    if not isinstance(rng, jax.Array | np.ndarray):
        raise TypeError(f"attention: dropout_rng is of type {type(rng).__qualname__}; expected a key of jax.random")
    return jax.random.bits(rng, (2,), jnp.uint32)


def is_local() -> bool:
    """Whether no array is shared out among devices: there is one, or a ``shard_map`` is over all axes of the mesh."""
    return jax.device_count() == 1 or jax.sharding.get_abstract_mesh().are_all_axes_manual


# Values that are known on the host.


def readable(arrays: Sequence[Any], everywhere: bool) -> bool:
    """Whether calls on arrays like these may have values that may be read; ``everywhere``: those on a device, too."""
    return everywhere or device_of(arrays[0]).backend == "cpu"


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
