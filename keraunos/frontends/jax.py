"""JAX: differentiation, devices and dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keraunos.frontends import Device, alone, jax_partition


def as_written(fn: Callable) -> Callable:
    """``fn`` under JAX's own rules of promotion: stricter ones, which a user may set, are for the user's code."""

    @functools.wraps(fn)
    def run(*args):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return fn(*args)

    return run


def differentiable(forward: Callable, backward: Callable, axes: Callable | None = None) -> Callable:
    """``prepare(opts)``, which gives ``args -> outputs`` under ``jit``, with ``backward`` as its gradient.

    ``axes``: what may be sharded by explicit axes of a mesh; see :func:`keraunos.frontends.jax_partition.partitioned`.
    """
    forward, backward = as_written(forward), as_written(backward)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def call(args, opts):
        return forward(args, alone(opts))[0]

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

    def spread(args, opts):
        return same_axes(args, opts) if axes is None else jax_partition.spread(same_axes, axes, args, opts)

    jitted = jax.jit(spread, static_argnums=1)
    return lambda opts, like=None: lambda args: jitted(args, opts)


def in_place(compute: Callable, kind: type, pool: str, writes: Callable[[Any], bool], output: Callable) -> Callable:
    """``prepare(opts)``, which gives ``args -> (output, pool)``; see :func:`keraunos.frontends.in_place`."""

    @as_written
    def call(states, args, opts):
        if not isinstance(states, jax.Ref):
            return compute(args._replace(**{pool: states}), opts)
        output, made = compute(args._replace(**{pool: states[...]}), opts)
        if made is not None:
            states[...] = made
        return output, None

    kept = jax.jit(call, static_argnums=2)
    given_up = jax.jit(call, static_argnums=2, donate_argnums=0)

    def prepare(opts, like=None):
        def run(args):
            states = getattr(args, pool)
            donate = writes(opts) and not isinstance(states, jax.Ref)
            return (given_up if donate else kept)(states, args._replace(**{pool: None}), opts)

        return run

    return prepare


def batched(forward: Callable, backward: Callable, fold: Callable, unfold: Callable) -> tuple[Callable, Callable]:
    """The same two functions, which under ``vmap`` make one call of many.

    Args:
        forward, backward: as for :func:`keraunos.frontends.differentiable`.
        fold: ``(args, size) -> args`` of one call that does ``size`` calls, whose arrays are stacked along a new first
            axis; None if there is none, and the calls are made one after the other.
        unfold: ``(x, size, shape) -> x``: the outputs, each of ``shape``, of the ``size`` calls from that of the one.
    """
    forward, backward = as_written(forward), as_written(backward)

    def run_forward(args, opts):
        @jax.custom_batching.custom_vmap
        def call(args):
            return forward(args, opts)

        @call.def_vmap
        def rule(size, all_mapped, args):
            (mapped,) = all_mapped
            one = jax.eval_shape(lambda args: forward(args, opts), _first(args, mapped))
            folded = fold(_stacked(args, mapped, size), size)
            if folded is None:
                return _in_turn(lambda args: run_forward(args, opts), mapped, args)
            outputs, _ = run_forward(folded, alone(opts))
            # A larger batch may be cut in other pieces, or in none: run_backward makes its residuals itself.
            residuals = jax.tree.map(lambda x: zeros(x.shape, x.dtype, args[0]), one[1])
            return (_unfolded(unfold, outputs, size, one[0]), residuals), (_all(one[0], True), _all(one[1], False))

        return call(args)

    def run_backward(args, residuals, grads, opts):
        @jax.custom_batching.custom_vmap
        def call(args, residuals, grads):
            return backward(args, residuals, grads, opts)

        @call.def_vmap
        def rule(size, all_mapped, args, residuals, grads):
            given, mapped = (args, residuals, grads), tuple(all_mapped)
            one = jax.eval_shape(lambda *given: backward(*given, opts), *_first(given, mapped))
            folded = fold(_stacked(args, mapped[0], size), size)
            if folded is None:
                return _in_turn(lambda given: run_backward(given[0], given[1], given[2], opts), mapped, given)
            outputs, residuals = run_forward(folded, opts)
            stacked = _stacked(grads, mapped[2], size)
            grads = jax.tree.map(lambda x, like: x.reshape(like.shape), stacked, outputs)
            return _unfolded(unfold, run_backward(folded, residuals, grads, opts), size, one), _all(one, True)

        return call(args, residuals, grads)

    return run_forward, run_backward


def rowwise(fn: Callable) -> Callable:
    """``fn``, whose arguments and results have rows along their first axis, each of which stands for itself.

    Under ``vmap`` it makes one call of many, with all their rows.
    """

    @jax.custom_batching.custom_vmap
    def call(*args):
        return fn(*args)

    @call.def_vmap
    def rule(size, mapped, *args):
        stacked = _stacked(args, tuple(mapped), size)
        found = call(*jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked))
        return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), found), _all(found, True)

    return call


def is_local() -> bool:
    """Whether no array is shared out among devices: there is one, or a ``shard_map`` is over all axes of the mesh."""
    return jax.device_count() == 1 or jax.sharding.get_abstract_mesh().are_all_axes_manual


def _first(tree, mapped):
    """The shapes of one call."""
    return jax.tree.map(lambda x, m: jax.ShapeDtypeStruct(x.shape[1:] if m else x.shape, x.dtype), tree, mapped)


def _stacked(tree, mapped, size):
    return jax.tree.map(lambda x, m: x if m else jnp.broadcast_to(x, (size, *x.shape)), tree, mapped)


def _unfolded(unfold, tree, size, one):
    return jax.tree.map(lambda x, like: unfold(x, size, like.shape), tree, one)


def _all(tree, value):
    return jax.tree.map(lambda _: value, tree)


def _in_turn(fn, mapped, given):
    """One call after the other."""
    leaves, structure = jax.tree.flatten(given)
    which = jax.tree.leaves(mapped)

    def call(moving):
        moving = iter(moving)
        return fn(jax.tree.unflatten(structure, [next(moving) if m else x for x, m in zip(leaves, which, strict=True)]))

    outputs = jax.lax.map(call, [x for x, m in zip(leaves, which, strict=True) if m])
    return outputs, _all(outputs, True)


def zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that, inside ``shard_map``, vary over the mesh axes that ``like`` does, so that a scan may carry them."""
    return vary(jnp.zeros(shape, dtype), varying(like))


def array(x: np.ndarray, like: jax.Array) -> jax.Array:
    """A NumPy array as one of JAX."""
    return jnp.asarray(x)


def cast(x: jax.Array | np.ndarray, dtype: str) -> jax.Array:
    """The values in another dtype."""
    return jnp.asarray(x, dtype)


# The array library, for what it and PyTorch have alike.
xp = jnp


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The matrix product, in the precision of its arguments."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def rounded(x: jax.Array, dtype: str) -> jax.Array:
    """The values, of float32, rounded to those of a narrower dtype."""
    info = jnp.finfo(dtype)
    # Not by a cast and back, which the compiler may drop as excess precision.
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)


def pad(x: jax.Array, axis: int, after: int, before: int = 0) -> jax.Array:
    """With so many zeros at the ends of an axis."""
    return jnp.pad(x, [(before, after) if i == axis else (0, 0) for i in range(x.ndim)]) if before or after else x


def permute(x: jax.Array, *axes: int) -> jax.Array:
    """With its axes in another order."""
    return x.transpose(axes)


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
    """The same value, as one that varies over ``axes`` too."""
    axes = axes - varying(x)
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def device_of(x: Any) -> Device:
    """The device a concrete array is on; while tracing, the default device."""
    if isinstance(x, jax.core.Tracer):
        return default_device()._replace(settled=False)
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
        TypeError: it is a symbol, and there is no usual size.
    """
    if not is_symbol(n):
        return n
    if usual is None:
        raise TypeError(f"keraunos: a size is {n}, a symbol of jax.export; expected a number: export each size")
    return usual


def is_symbol(n: Any) -> bool:
    """Whether a size is a symbol of ``jax.export``: a number when the program runs."""
    return not isinstance(n, int)


def by_device(functions: dict[str, Callable], *args: Any) -> Any:
    """The results of the function for the kind of device, "cpu", "gpu" or "tpu", that the program is lowered for."""
    others = {name: fn for name, fn in functions.items() if name != "gpu"}
    return jax.lax.platform_dependent(*args, default=functions["gpu"], **others)


def seed(rng: jax.Array, like: jax.Array) -> jax.Array:
    """Two integers of 32 bits that follow from a key."""
    if not isinstance(rng, jax.Array | np.ndarray):
        raise TypeError(f"attention: dropout_rng is of type {type(rng).__qualname__}; expected a key of jax.random")
    return jax.random.bits(rng, (2,), jnp.uint32)
