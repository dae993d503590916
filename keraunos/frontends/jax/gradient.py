"""JAX: a kernel's forward and backward as a function with a gradient, in place, and under ``vmap``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from keraunos.frontends import for_inference, rehearsal
from keraunos.frontends.jax import partition
from keraunos.frontends.jax.arrays import vary, varying, zeros


def as_written(fn: Callable) -> Callable:
    """``fn`` under JAX's own rules of promotion: stricter ones, which a user may set, are for the user's code."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return fn(*args)

    return run


def differentiable(forward: Callable, backward: Callable, axes: Callable | None = None) -> Callable:
    """``prepare(opts)``, which gives ``args -> outputs`` under ``jit``, with ``backward`` as its gradient.

    ``axes``: what may be sharded by explicit axes of a mesh; see :func:`keraunos.frontends.jax.partition.partitioned`.
    """
    forward, backward = as_written(forward), as_written(backward)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def call(args: Any, opts: Any) -> Any:
        return forward(args, for_inference(opts))[0]

    def save(args: Any, opts: Any) -> tuple[Any, tuple[Any, Any]]:
        outputs, residuals = forward(args, opts)
        return outputs, (args, residuals)

    def gradient(opts: Any, saved: tuple[Any, Any], grads: Any) -> tuple[Any]:
        args, residuals = saved
        return (backward(args, residuals, grads, opts),)

    call.defvjp(save, gradient)

    def same_axes(args: Any, opts: Any) -> Any:
        axes = frozenset().union(*map(varying, jax.tree.leaves(args)))
        return call(jax.tree.map(lambda x: vary(x, axes), args), opts)

    def spread(args: Any, opts: Any) -> Any:
        return same_axes(args, opts) if axes is None else partition.spread(same_axes, axes, args, opts)

    jitted = jax.jit(spread, static_argnums=1)
    return lambda opts, like=None: lambda args: jitted(args, opts)


def traced_once(forward: Callable) -> Callable:
    """``forward`` in plain operations, which is the same whether or not a gradient follows: JAX traces it once.

    Else it would for the call, and again for the call's gradient.
    """
    traced = jax.jit(forward, static_argnums=1, inline=True)

    def run(args: Any, opts: Any) -> Any:
        # JAX's cache tells no mesh from an empty one, as it has when it traces gradients.
        with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
            return traced(args, for_inference(opts))

    return run


def rehearsed(forward: Callable, backward: Callable) -> tuple[Callable, Callable]:
    """``forward`` and ``backward``; where ``forward.rehearsed``, the first with a gradient builds the kernels of both.

    They are built side by side, before the program is lowered, which would build one after the other.
    """
    if not getattr(forward, "rehearsed", False):
        return forward, backward

    @functools.lru_cache(maxsize=4096)
    def rehearse(args: Any, opts: Any) -> None:
        def run(args: Any) -> None:
            outputs, residuals = forward(args, opts)
            backward(args, residuals, outputs, opts)  # an output's gradient is like it

        rehearsal.Rehearsal(lambda: jax.eval_shape(run, args))

    @functools.wraps(forward)
    def first(args: Any, opts: Any) -> Any:
        if opts.kept:
            rehearse(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args), opts)
        return forward(args, opts)

    return first, backward


def in_place(compute: Callable, kind: type, pool: str, writes: Callable[[Any], bool], output: Callable) -> Callable:
    """``prepare(opts)``, which gives ``args -> (output, pool)``; see :class:`keraunos.frontends.gradients.InPlace`."""

    @as_written
    def call(states: Any, args: Any, opts: Any) -> tuple[Any, Any]:
        if not isinstance(states, jax.Ref):
            return compute(args._replace(**{pool: states}), opts)
        output, made = compute(args._replace(**{pool: states[...]}), opts)
        if made is not None:
            states[...] = made
        return output, None

    kept = jax.jit(call, static_argnums=2)
    given_up = jax.jit(call, static_argnums=2, donate_argnums=0)

    def prepare(opts: Any, like: Any = None) -> Callable[[Any], tuple[Any, Any]]:
        def run(args: Any) -> tuple[Any, Any]:
            states = getattr(args, pool)
            donate = writes(opts) and not isinstance(states, jax.Ref)
            return (given_up if donate else kept)(states, args._replace(**{pool: None}), opts)

        return run

    return prepare


def batched(forward: Callable, backward: Callable, fold: Callable, unfold: Callable) -> tuple[Callable, Callable]:
    """``forward`` and ``backward``, for which ``vmap`` makes one call with a larger batch of many calls.

    Args:
        forward, backward: as for :class:`keraunos.frontends.gradients.Differentiable`.
        fold: ``(args, size) -> args`` of one call that does ``size`` calls, whose arrays are stacked along a new first
            axis; None if there is none, and the calls are made one after the other.
        unfold: ``(x, size, shape) -> x``: the outputs, each of ``shape``, of the ``size`` calls from that of the one.
    """
    forward, backward = as_written(forward), as_written(backward)

    def run_forward(args: Any, opts: Any) -> Any:
        @jax.custom_batching.custom_vmap
        def call(args: Any) -> Any:
            return forward(args, opts)

        @call.def_vmap
        def rule(size: int, all_mapped: Any, args: Any) -> tuple[Any, Any]:
            (mapped,) = all_mapped
            one = jax.eval_shape(lambda args: forward(args, opts), _first(args, mapped))
            folded = fold(_stacked(args, mapped, size), size)
            if folded is None:
                return _in_turn(lambda args: run_forward(args, opts), mapped, args)
            outputs, _ = run_forward(folded, for_inference(opts))
            # A larger batch may be cut in other pieces, or in none: run_backward makes its residuals itself.
            residuals = jax.tree.map(lambda x: zeros(x.shape, x.dtype, args[0]), one[1])
            return (_unfolded(unfold, outputs, size, one[0]), residuals), (_all(one[0], True), _all(one[1], False))

        return call(args)

    def run_backward(args: Any, residuals: Any, grads: Any, opts: Any) -> Any:
        @jax.custom_batching.custom_vmap
        def call(args: Any, residuals: Any, grads: Any) -> Any:
            return backward(args, residuals, grads, opts)

        @call.def_vmap
        def rule(size: int, all_mapped: Any, args: Any, residuals: Any, grads: Any) -> tuple[Any, Any]:
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


def once(fn: Callable, function: str, platform: str) -> Callable:
    """A forward or a backward made of kernels, which have no derivative: whoever asks for one is told so.

    First derivatives ask for none: they are made of both.
    """

    def run(*given: Any) -> Any:
        *arrays, opts = given

        @jax.custom_jvp
        def call(*arrays: Any) -> Any:
            return fn(*arrays, opts)

        @call.defjvp
        def refuse(primals: Any, tangents: Any) -> NoReturn:
            raise NotImplementedError(
                f"{function}: platform {platform!r} has no second derivatives; expected platform='xla', which has them"
            )

        return call(*arrays)

    return run


def rowwise(fn: Callable) -> Callable:
    """``fn``, whose arguments and results have rows along their first axis, each of which stands for itself.

    Under ``vmap`` it makes one call of many, with all their rows.
    """

    @jax.custom_batching.custom_vmap
    def call(*args: jax.Array | None) -> Any:
        return fn(*args)

    @call.def_vmap
    def rule(size: int, mapped: Iterable[bool], *args: jax.Array | None) -> tuple[Any, Any]:
        stacked = _stacked(args, tuple(mapped), size)
        found = call(*jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked))
        return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), found), _all(found, True)

    return call


def _first(tree: Any, mapped: Any) -> Any:
    """The shapes of one call."""
    return jax.tree.map(lambda x, m: jax.ShapeDtypeStruct(x.shape[1:] if m else x.shape, x.dtype), tree, mapped)


def _stacked(tree: Any, mapped: Any, size: int) -> Any:
    return jax.tree.map(lambda x, m: x if m else jnp.broadcast_to(x, (size, *x.shape)), tree, mapped)


def _unfolded(unfold: Callable, tree: Any, size: int, one: Any) -> Any:
    return jax.tree.map(lambda x, like: unfold(x, size, like.shape), tree, one)


def _all(tree: Any, value: bool) -> Any:
    return jax.tree.map(lambda _: value, tree)


def _in_turn(fn: Callable, mapped: Any, given: Any) -> tuple[Any, Any]:
    """One call after the other."""
    leaves, structure = jax.tree.flatten(given)
    which = jax.tree.leaves(mapped)

    def call(moving: list[jax.Array]) -> Any:
        each = iter(moving)
        return fn(jax.tree.unflatten(structure, [next(each) if m else x for x, m in zip(leaves, which, strict=True)]))

    outputs = jax.lax.map(call, [x for x, m in zip(leaves, which, strict=True) if m])
    return outputs, _all(outputs, True)
