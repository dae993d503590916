"""JAX: recurrences of whole arrays over a mesh, also where the devices do not share the tokens evenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from keraunos.modules.linear_operation import LinearOperation
from keraunos.ops.executor import default_executor


def over_mesh(
    run: Callable, name: str, operation: LinearOperation, mesh: Mesh, spec: P, arrays: tuple, options: dict[str, Any]
) -> tuple[Any, Any]:
    """``(output, final state)``: the tokens that the devices share evenly in a ``shard_map``, the rest on all of them.

    Args:
        run: :func:`keraunos.distributed.linear.run`, of the tokens that are shared.
        spec: ``P(batch, tokens, heads)``, mesh axes of the query's.
    """
    axes: list[Any] = [*spec] if isinstance(spec, P) else []
    batch, tokens, heads, *dims = axes + [None] * (4 - len(axes))
    if tokens is None or any(dims):
        raise ValueError(
            f"{name}: spec is {spec!r}; expected P(batch, tokens, heads), tokens being an axis of the mesh"
        )
    given = operation.pack(*arrays)
    T, packed = given.query.shape[1], given.cu_seqlens is not None
    size = int(np.prod([mesh.shape[axis] for axis in (tokens if isinstance(tokens, tuple) else (tokens,))]))
    # A decay that is a constant stays one; where heads are sharded, each device takes its own part of it.
    decay = getattr(given, "g_gamma", None)
    fixed = isinstance(decay, np.ndarray)
    constant = decay if fixed and heads is None else None
    explicit = AxisType.Explicit in mesh.axis_types

    def put(x: Any, spec: P) -> Any:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec)) if explicit and x is not None else x

    def part(begin: int, end: int, state: jax.Array | None, tokens: Any) -> tuple[jax.Array, jax.Array]:
        shared, n = [x if x is None else x[:, begin:end] for x in given.tokens], len(given.tokens)
        cu_seqlens = (given.cu_seqlens - begin).clip(0, end - begin) if packed else None
        own = given._replace(**dict(zip(given._fields[:n], shared, strict=True)), initial_state=state,
                             cu_seqlens=cu_seqlens)
        per_token, per_state = P(batch, tokens, heads), P(None if packed else batch, heads)
        specs = own._replace(**dict.fromkeys(own._fields[:n], per_token), initial_state=per_state, cu_seqlens=P())
        if decay is not None:
            own = own if constant is None else own._replace(g_gamma=None)
            specs = specs._replace(g_gamma=P(*(batch, heads)[2 - decay.ndim :]))
        specs = type(given)(*(None if x is None else y for x, y in zip(own, specs, strict=True)))

        def local(own: Any) -> tuple[jax.Array, jax.Array]:
            own = own if constant is None else own._replace(g_gamma=constant)
            flat = operation.unpack(own)
            if tokens is None:
                return default_executor()(operation, *flat, **options, return_state=True)
            return run(name, flat, (tokens, None, None, None), {**options, "return_state": True}, fixed)

        call = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(per_token, per_state), check_vma=False)
        output, state = call(type(given)(*map(put, own, specs))) if given.query.size else local(own)
        return put(output, P(batch, None, heads)) if T % size and given.query.size else output, state

    options = {key: x for key, x in options.items() if key != "return_state"}
    # XLA crashes on a shard_map of arrays without values: each device has all of these.
    shared = T - T % size if given.query.size else 0
    parts = [(0, shared, tokens), (shared, T, None)]
    made, state = {}, given.initial_state
    for begin, end, axis in reversed(parts) if options["reverse"] else parts:
        if end > begin or (axis is None and not T):
            made[begin], state = part(begin, end, state, axis)
    outputs = [made[begin] for begin in sorted(made)]
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, 1), state
