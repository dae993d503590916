"""JAX: the devices along a mesh axis, each with a shard of the tokens; inside ``shard_map``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from keraunos.distributed import agreement
from keraunos.frontends import for_inference
from keraunos.frontends.jax import as_written, vary, varying

# So many devices at most each send their own to all the others at once. An all-gather hands it from one to the next.
_AT_ONCE = 8


class Shards:
    """The other devices.

    Attributes:
        size: how many there are.
        rank: this one's place among them, which is that of its tokens.
        copies: how often what is gathered should be there, one after the other, where that costs nothing.
    """

    def __init__(self, op: str, axis: Hashable):
        self.axis, self.size = axis, agreement.axis_size(op, axis)
        self.copies = self.size if self.size <= _AT_ONCE else 1

    @property
    def rank(self) -> jax.Array:
        """A tracer: the program is the same on all devices."""
        return jax.lax.axis_index(self.axis)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shards) and (self.axis, self.size) == (other.axis, other.size)

    def __hash__(self) -> int:
        return hash((self.axis, self.size))

    def numbers(self, values: tuple[Any, ...], like: jax.Array) -> jax.Array:
        """int32."""
        return jnp.stack([jnp.asarray(x, jnp.int32) for x in values])

    def gather(self, x: jax.Array, right: bool) -> jax.Array:
        """Every device's vector, ``[size, n]``; ``x``: this one's, or :attr:`copies` of it, a row each."""
        if x.ndim > 1:
            return jax.lax.all_to_all(x, self.axis, 0, 0, tiled=True)
        return jax.lax.all_gather(x, self.axis)

    def together(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """``arrays``, none of which a later operation can read before all of them are computed.

        Without this, a walk that needs only the gradient of the output would run during the exchange. It takes all
        multiprocessors of its device, and would hold up the exchange there, for which the other devices wait.
        """
        return jax.lax.optimization_barrier(arrays)

    def first_token(self, tokens: int, offsets: jax.Array) -> jax.Array:
        """The place of a shard's first token in the row."""
        return self.rank * tokens

    def checker(self, **what: Any) -> Callable[[], None]:
        """One program: the calls are the same."""
        return lambda: None


def remembered(fn: Callable) -> Callable:
    """``fn``: it is traced once."""
    return fn


def place(axis: Hashable | list) -> Hashable:
    """The axis, or axes."""
    return tuple(axis) if isinstance(axis, list) else axis


def shards(op: str, axis: Hashable) -> Shards:
    """The devices along an axis, or several."""
    return Shards(op, axis)


def arguments(where: object) -> AbstractContextManager:
    """Around the checks of the arguments."""
    return contextlib.nullcontext()


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """``prepare(opts, shards, args)``: ``args -> (output, final state or None)``; see PyTorch's front end."""
    forward, backward = as_written(forward), as_written(backward)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
    def call(args: NamedTuple, opts: Any, shards: Shards) -> tuple[jax.Array, jax.Array | None]:
        return forward(args, for_inference(opts), shards)[0]

    def save(args: NamedTuple, opts: Any, shards: Shards) -> tuple[tuple, tuple]:
        outputs, residuals = forward(args, opts, shards)
        return outputs, (args, residuals)

    def gradient(opts: Any, shards: Shards, saved: tuple, grads: tuple) -> tuple[NamedTuple]:
        return (backward(*saved, grads, opts, shards),)

    call.defvjp(save, gradient)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def everywhere(args: NamedTuple, opts: Any, shards: Shards) -> tuple[jax.Array, jax.Array | None]:
        axes = frozenset().union(varying(shards.rank), *map(varying, jax.tree.leaves(args)))
        output, final = call(jax.tree.map(lambda x: vary(x, axes), args), opts, shards)
        # Each device's own part, and of each argument that they share its own part of the gradient: JAX sums those.
        return output, None if final is None else jax.lax.psum(final, shards.axis)

    return lambda opts, shards, args: lambda args: everywhere(args, opts, shards)
