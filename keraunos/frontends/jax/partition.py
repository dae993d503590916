"""JAX: calls of arrays that are sharded over a mesh, outside of ``shard_map``.

Sequences and heads are independent of each other: a call whose batch and heads are sharded is the same call on every
device's shards, and only gradients of what several sequences or heads share are summed. Where the mesh's axes are
explicit, shardings are known while the call is traced, and :func:`spread` maps it over them. Where they are automatic,
XLA's partitioner settles them later. A kernel is a box to it: it would gather all that goes in, and compute the whole
on every device. :func:`partitioned` tells it better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keraunos.frontends import UnnamedError


def spread(call: Callable, axes: Callable, args: Any, opts: Any) -> Any:
    """``call(args, opts)``, on every device's shards if the query has any by explicit axes of a mesh.

    Raises:
        UnnamedError: a dimension is sharded that takes an exchange between devices.
    """
    sharding = jax.typeof(args[0]).sharding
    if not any(sharding.spec):
        explicit = sharding.mesh.explicit_axes
        if not explicit:
            return call(args, opts)
        # What ``vmap`` goes over may be sharded, which is not seen here, and JAX's rules do not take all that is done.
        whole = NamedSharding(sharding.mesh, P())
        return jax.sharding.auto_axes(lambda args: call(args, opts), axes=explicit, out_sharding=whole)(args)
    own, outputs, _ = axes(args, opts)
    shards = _Shards.of(sharding, own[0], args[0].shape, _heads(own, args))
    if shards.spec(own[0]) != P(*sharding.spec, *[None] * (4 - len(sharding.spec))):
        raise UnnamedError(
            f"query {args[0].shape} is sharded as {sharding.spec}; expected shards of batch and heads, in each whole "
            "heads of all arrays; for shards of the tokens, see keraunos.distributed"
        )
    specs = _like(args, map(shards.spec, _letters(own, args)))
    placed = jax.tree.map(lambda x, spec: jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec)), args, specs)
    results = jax.tree.map(shards.spec, outputs)
    mapped = jax.shard_map(lambda args: call(args, opts), mesh=sharding.mesh, in_specs=(specs,), out_specs=results)
    return mapped(placed)


def partitioned(forward: Callable, backward: Callable, axes: Callable) -> tuple[Callable, Callable]:
    """``forward`` and ``backward``, which XLA's partitioner can run on shards of batch and heads.

    Args:
        forward, backward: as for :class:`keraunos.frontends.gradients.Differentiable`.
        axes: ``(args, opts) -> (args, outputs, residuals)``, strings in place of arrays, with a letter for each
            dimension: ``b``: the batch, ``h``: heads, of which arrays may have different numbers: each head of an array
            with fewer belongs to as many of one with more; ``.``: never sharded. The query is the first argument.
            Residuals None: what their dimensions are differs from call to call; where anything is sharded, the
            backward makes them again.
    """

    def run_forward(args: Any, opts: Any) -> Any:
        if is_settled():
            return forward(args, opts)
        own, outputs, residuals = axes(args, opts)

        def local(shards: _Shards, shapes: Any, args: Any) -> tuple[Any, Any]:
            found, kept = forward(args, opts)
            if shards.any and residuals is None:
                kept = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1])
            return found, kept

        return _shared_out(lambda args: forward(args, opts), local, (own,), (outputs, residuals))(args)

    def run_backward(args: Any, residuals: Any, grads: Any, opts: Any) -> Any:
        if is_settled():
            return backward(args, residuals, grads, opts)
        own, outputs, kept = axes(args, opts)

        def local(shards: _Shards, shapes: Any, args: Any, residuals: Any, grads: Any) -> Any:
            if shards.any and kept is None:
                residuals = forward(args, opts)[1]
            found = backward(args, residuals, grads, opts)
            return type(found)(*map(shards.summed, found, own))

        def whole(args: Any, residuals: Any, grads: Any) -> Any:
            return backward(args, residuals, grads, opts)

        return _shared_out(whole, local, (own, kept, outputs), own)(args, residuals, grads)

    return run_forward, run_backward


def is_settled() -> bool:
    """Whether the partitioner has nothing to do: there is one device, or ``shard_map`` has said who does what."""
    return jax.device_count() == 1 or bool(jax.sharding.get_abstract_mesh().manual_axes)


class _Shards(NamedTuple):
    """The mesh axes over which batch and heads are sharded."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]

    @classmethod
    def of(cls, sharding: Any, letters: str, query: tuple[int, ...], heads: int) -> _Shards:
        """The axes that shard the query's batch and heads, where they divide these evenly; see :func:`_heads`."""
        spec, axes = (*sharding.spec, None, None, None), []
        for place, letter, size in ((0, "b", query[0]), (2, "h", heads)):
            names = _names(spec[place])
            whole = letter in letters and size % math.prod(sharding.mesh.shape[name] for name in names) == 0
            axes.append(names if whole else ())
        return cls(*axes)

    @property
    def any(self) -> bool:
        """Whether anything is."""
        return bool(self.batch or self.heads)

    def spec(self, letters: str) -> P:
        """The sharding of an array."""
        axes = {"b": self.batch, "h": self.heads, ".": ()}
        return P(*(axes[letter] or None for letter in letters))

    def summed(self, x: Any, letters: str | None) -> Any:
        """A gradient of something that several shards have in common."""
        if x is None or letters is None:
            return x
        shared = () if "b" in letters else self.batch
        shared += () if "h" in letters else self.heads
        return jax.lax.psum(x, shared) if shared else x


def _shared_out(whole: Callable, local: Callable, given: Any, found: Any) -> Callable:
    """``whole``, which on shards is ``local(shards, shapes of the whole's results, *args)``.

    Args:
        given, found: the letters of arguments and results; None in place of a tree: none of it is ever sharded.
    """
    traced: list[Any] = []  # arguments and results

    def run(*args: Any) -> Any:
        # A jaxpr of its own keeps its constants, of which custom_partitioning takes none.
        results = jax.jit(whole)(*args)
        traced[:] = jax.tree.map(jax.typeof, (args, results))
        return results

    def settle(arg_shapes: Any) -> tuple[Any, _Shards]:
        # What the partitioner chose, by the rule, from what is around the call.
        query, heads = arg_shapes[0][0], _heads(given[0], arg_shapes[0])
        return query.sharding.mesh, _Shards.of(query.sharding, given[0][0], query.shape, heads)

    def shardings(mesh: Any, shards: _Shards, letters: Any, arrays: Any) -> Any:
        return _like(arrays, (NamedSharding(mesh, shards.spec(x)) for x in _letters(letters, arrays)))

    def partition(mesh: Any, arg_shapes: Any, shapes: Any) -> tuple[Any, Callable, Any, Any]:
        mesh, shards = settle(arg_shapes)
        sides = shardings(mesh, shards, found, shapes), shardings(mesh, shards, given, arg_shapes)
        return mesh, lambda *args: local(shards, shapes, *args), *sides

    def infer(mesh: Any, arg_shapes: Any, shapes: Any) -> Any:
        mesh, shards = settle(arg_shapes)
        return shardings(mesh, shards, found, shapes)

    def rule(mesh: Any, arg_types: Any, result_types: Any) -> tuple[str, dict]:
        args, results = traced
        return _rule(_sizes(given, args), _sizes(found, results), _heads(given[0], args[0]))

    call = custom_partitioning(run)
    call.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return call


def _letters(letters: Any, arrays: Any) -> list[str]:
    """The letters of the arrays that are not None, in the order of the tree's leaves."""
    if letters is None or arrays is None:
        return ["." * len(x.shape) for x in jax.tree.leaves(arrays)]
    if isinstance(letters, str):
        return [letters]
    return [x for pair in zip(letters, arrays, strict=True) for x in _letters(*pair)]


def _sizes(letters: Any, arrays: Any) -> list[list[tuple[str, int]]]:
    """For each array that is there, the letters of its dimensions with their sizes."""
    leaves = jax.tree.leaves(arrays)
    return [[*zip(text, x.shape, strict=True)] for text, x in zip(_letters(letters, arrays), leaves, strict=True)]


def _heads(letters: Any, arrays: Any) -> int:
    """Into how many shards all heads can be cut, so that those of each array which belong together stay together."""
    return math.gcd(*(size for dims in _sizes(letters, arrays) for letter, size in dims if letter == "h"))


def _like(arrays: Any, values: Iterable[Any]) -> Any:
    """A tree like that of the arrays with the values in their places."""
    return jax.tree.unflatten(jax.tree.structure(arrays), list(values))


def _rule(given: list[list[tuple[str, int]]], found: list[list[tuple[str, int]]], heads: int) -> tuple[str, dict]:
    """Shardy's rule: which dimensions are sharded alike, and which are not sharded at all."""
    fixed: list[str] = []  # in the order of the text, as Shardy wants them
    ratios: dict[str, int] = {}

    def factor(letter: str, size: int) -> str:
        if letter == "h" and size > heads:
            name = f"r{size // heads}"
            fixed.extend([name] * (name not in fixed))
            ratios[name] = size // heads
            return f"(h {name})"
        if letter == ".":
            fixed.append(f"x{len(fixed)}")
            return fixed[-1]
        return letter

    text = " -> ".join(", ".join(" ".join(factor(*dim) for dim in dims) for dims in side) for side in (given, found))
    return text, dict(need_replication_factors=tuple(fixed), **ratios)


def _names(axes: Any) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
