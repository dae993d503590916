"""A platform's functions as functions of both frameworks' arrays: with gradients, or in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keraunos.frontends import Operator, framework_of


@dataclass(frozen=True, eq=False)
class Differentiable:
    """A platform's forward and backward as a function of both frameworks' arrays, with gradients.

    Attributes:
        forward: ``(args, opts) -> (outputs, residuals)``. Where ``forward.rehearsed``, the two do nothing but launch
            kernels, and a first call builds them side by side: those of both, if a gradient follows.
        backward: ``(args, residuals, gradients of the outputs, opts) -> gradients of args``.
        operator: what the operation is to PyTorch's graphs.
        platform: whose functions these are, under its name in the registry.
        folding: what makes of many calls one, for JAX's ``vmap``; see :func:`keraunos.frontends.jax.gradient.batched`.
        axes: what JAX may shard over devices; see :func:`keraunos.frontends.jax.partition.partitioned`.
    """

    forward: Callable
    backward: Callable
    operator: Operator
    platform: str
    folding: tuple[Callable, Callable] | None = None
    axes: Callable | None = None

    def prepare(self, opts: Any, args: Any) -> Callable[[Any], Any]:
        """``args -> outputs`` for all args with the signature of these, :func:`keraunos.frontends.signature`."""
        return (self._torch if framework_of(args[0]) == "torch" else self._jax)(opts, args)

    @functools.cached_property
    def _torch(self) -> Callable:
        from keraunos.frontends.torch.gradient import differentiable

        return differentiable(self.forward, self.backward, self.operator, self.platform)

    @functools.cached_property
    def _jax(self) -> Callable:
        from keraunos.frontends.jax import gradient, partition

        pair = gradient.rehearsed(self.forward, self.backward)
        if self.folding:
            if self.axes:
                # The partitioner calls them later.
                forward, backward = map(gradient.as_written, pair)
                pair = partition.partitioned(forward, backward, self.axes)
            pair = gradient.batched(*pair, *self.folding)
            once = functools.partial(gradient.once, function=self.operator.function, platform=self.platform)
            pair = once(pair[0]), once(pair[1])
        else:
            pair = gradient.traced_once(pair[0]), pair[1]
        return gradient.differentiable(*pair, self.axes)


@dataclass(frozen=True, eq=False)
class InPlace:
    """A platform's function that changes a pool in place, without gradients.

    Attributes:
        compute: ``(args, opts) -> (output or None, pool or None)``; in PyTorch it changes the pool that it is given.
            Where ``compute.rehearsed``, it does nothing but launch kernels, and in PyTorch a first call builds them
            side by side.
        operator: what the operation is to PyTorch's graphs. platform: whose function this is.
        pool: the name of the argument that is changed; in JAX an array to give up for a new one, or a ``jax.Ref``.
        writes: ``opts ->`` whether it is.
        output: ``(args, opts) -> (shape, dtype name)`` of the output, or None. In PyTorch it goes to ``args.out``.
    """

    compute: Callable
    operator: Operator
    platform: str
    pool: str
    writes: Callable[[Any], bool]
    output: Callable

    def prepare(self, opts: Any, args: Any) -> Callable[[Any], Any]:
        """``args -> (output, pool)`` for all args with the signature of these, see :class:`Differentiable`."""
        return (self._torch if framework_of(args[0]) == "torch" else self._jax)(opts, args)

    @functools.cached_property
    def _torch(self) -> Callable:
        from keraunos.frontends.torch.gradient import in_place

        return in_place(self.compute, self.operator, self.platform, self.pool, self.writes, self.output)

    @functools.cached_property
    def _jax(self) -> Callable:
        from keraunos.frontends.jax.gradient import in_place

        return in_place(self.compute, self.operator.args, self.pool, self.writes, self.output)
