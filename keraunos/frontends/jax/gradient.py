"""JAX: a kernel's forward and backward as a function with a gradient, in place, and under ``vmap``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from keraunos.frontends import alone
from keraunos.frontends.jax import partition
from keraunos.frontends.jax.arrays import vary, varying, zeros


def as_written(fn: Callable) -> Callable:
    """``fn`` under JAX's own rules of promotion: stricter ones, which a user may set, are for the user's code."""

    @functools.wraps(fn)
    def run(*args):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return fn(*args)

    return run


def differentiable(forward: Callable, backward: Callable, axes: Callable | None = None) -> Callable:
    """``prepare(opts)``, which gives ``args -> outputs`` under ``jit``, with ``backward`` as its gradient.

    ``axes``: what may be sharded by explicit axes of a mesh; see :func:`keraunos.frontends.jax.partition.partitioned`.
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
        return same_axes(args, opts) if axes is None else partition.spread(same_axes, axes, args, opts)

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
    """``forward`` and ``backward``, for which ``vmap`` makes one call with a larger batch of many calls.

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
