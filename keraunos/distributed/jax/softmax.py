"""Softmax attention over shards in JAX, inside ``shard_map``.

Without a window, keys and values go round the ring of devices, and all of them wait for the longest step: the program
is the same on every device, which leaves out what it does not see by a branch. With a window, each device is sent the
shards that its queries may see, straight from their owners.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from keraunos.distributed import agreement
from keraunos.distributed.ring import Merged, Ring, merged, of_part, sinks_gradient, whole, with_sinks
from keraunos.frontends import jax as frontend
from keraunos.kernels.softmax_attention.arguments import hidden_by_length
from keraunos.kernels.softmax_attention.contract import Args


def attention(args: Args, lengths: jax.Array | None, *, settle: Callable[[Args, int], Ring],
              place: Hashable) -> jax.Array:
    """The output of this device's queries; ``settle`` makes the options from the number of shards."""
    if args.sinks is not None and not args.sinks.shape[-1]:
        # They change nothing, and XLA's compiler for GPUs has crashed on gradients of no values here.
        args = args._replace(sinks=None)
    ring = settle(args, agreement.axis_size("attention", place))
    first = jax.lax.axis_index(place) * args.key.shape[1]
    return _over_shards(ring)(hidden_by_length(args, lengths, first))


def over_mesh(run: Callable, args: Args, lengths: jax.Array | None, mesh: jax.sharding.Mesh, spec: P,
              axis: Hashable) -> jax.Array:
    """:func:`attention` of whole arrays, outside of ``shard_map``; what devices do not share evenly is padded."""
    batch, _, heads = (*spec, None)[:3]
    (B, T), S, size = args.query.shape[:2], args.key.shape[1], agreement.mesh_size("attention", mesh, axis)
    if S % size:
        lengths = jnp.full((B,), S, jnp.int32) if lengths is None else jnp.minimum(lengths, S)
    whole = Args(*(x if x is None or x is args.sinks else frontend.pad(x, 1, -x.shape[1] % size) for x in args))
    per_token, sinks = P(batch, axis, heads), P(heads if args.sinks is not None and args.sinks.ndim == 2 else None)
    ids = P(batch, axis)
    own = Args(per_token, per_token, per_token, None, sinks, None, ids, ids)
    given, specs = (whole, lengths), (_those(whole, own), None if lengths is None else P(batch))
    if AxisType.Explicit in mesh.axis_types:
        given = jax.tree.map(lambda x, own: jax.sharding.reshard(x, NamedSharding(mesh, own)), given, specs)

    def local(args: Args, lengths: jax.Array | None) -> jax.Array:
        return run(args, lengths, place=axis)

    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=per_token)(*given)[:, :T]


def _those(args: Args, specs: Args) -> Args:
    """Without those of absent arrays."""
    return Args(*(None if x is None else spec for x, spec in zip(args, specs, strict=True)))


def _forward(args: Args, ring: Ring) -> tuple[jax.Array, Merged]:
    """``(output, what the backward needs)``."""
    T, own = args.query.shape[1], args[1:3] + args[7:8]
    place = jax.lax.axis_index(ring.axis_name)

    def add(found: Merged | None, keys: tuple, shift: int | None, seen: jax.Array | None = None) -> Merged:
        def attend() -> Merged:
            part = _with(args, keys)
            made = of_part(jnp, ring.parts[0](part, ring.part(shift, T)))
            return made if found is None else merged(jnp, found, made)

        return attend() if seen is None else jax.lax.cond(seen, attend, lambda: found)

    if ring.left is None:

        def step(carry: tuple, n: jax.Array) -> tuple[tuple, None]:
            keys, found = carry
            return (_hop(keys, ring), add(found, keys, None, _passed(n, place, ring))), None

        keys = _hop(own, ring)
        found = add(None, own, 0)
        if ring.size > 1:
            (keys, found), _ = jax.lax.scan(step, (keys, found), jnp.arange(1, ring.size - 1))
            found = add(found, keys, None, _passed(ring.size - 1, place, ring))
    else:
        found = add(None, own, 0)
        for shift in _shifts(ring, T):
            found = add(found, _send(own, shift, ring), shift, _is_there(shift, place, ring))
    found = with_sinks(jnp, found, args.sinks)
    found = found._replace(output=found.output.astype(args.query.dtype))
    return found.output, found


def _backward(args: Args, found: Merged, doutput: jax.Array, ring: Ring) -> Args:
    """The gradients of ``args``."""
    T, own = args.query.shape[1], args[1:3] + args[7:8]
    place = jax.lax.axis_index(ring.axis_name)
    work = found.top.dtype
    known = whole(jnp, found)

    def gradients(keys: tuple, shift: int | None, seen: jax.Array | None = None) -> tuple:
        def compute() -> tuple:
            part = ring.parts[1](_with(args, keys), known, doutput, ring.part(shift, T))
            return tuple(part[:3])

        def nothing() -> tuple:
            return tuple(frontend.zeros(x.shape, x.dtype, args.query) for x in args[:3])

        return compute() if seen is None else jax.lax.cond(seen, compute, nothing)

    def plus(sums: tuple, new: tuple) -> tuple:
        return tuple(x + y.astype(work) for x, y in zip(sums, new, strict=True))

    if ring.left is None:

        def step(carry: tuple, n: jax.Array) -> tuple[tuple, None]:
            keys, dq, dkeys = carry
            # The gradients of a shard's keys go round with it, and from the last rank home.
            ahead, dkeys = _hop(keys, ring), _hop(dkeys, ring)
            new = gradients(keys, None, _passed(n, place, ring))
            return (ahead, *plus((dq,), new[:1]), plus(dkeys, new[1:])), None

        keys = _hop(own, ring)
        dq, *dkeys = (x.astype(work) for x in gradients(own, 0))
        if ring.size > 1:
            carry: Any = keys, dq, tuple(dkeys)
            (keys, dq, dkeys), _ = jax.lax.scan(step, carry, jnp.arange(1, ring.size - 1))
            new = gradients(keys, None, _passed(ring.size - 1, place, ring))
            dq, *dkeys = plus((dq, *_hop(dkeys, ring)), new)
            dkeys = _hop(tuple(dkeys), ring)
    else:
        dq, *dkeys = (x.astype(work) for x in gradients(own, 0))
        for shift in _shifts(ring, T):
            new = gradients(_send(own, shift, ring), shift, _is_there(shift, place, ring))
            dq, *dkeys = plus((dq, *dkeys), (new[0], *_send(new[1:], -shift, ring)))
    means = (known[0].astype(work) * doutput.astype(work)).sum(-1).swapaxes(1, 2)
    dsinks = sinks_gradient(jnp, args.sinks, found, means)
    dq, dk, dv = (d.astype(x.dtype) for d, x in zip((dq, *dkeys), args[:3], strict=True))
    return Args(dq, dk, dv, None, dsinks)


_over_shards = frontend.differentiable(_forward, _backward)


def _with(args: Args, keys: tuple) -> Args:
    """The call with the keys, values and ids of another shard, without sinks."""
    key, value, ids = keys
    return args._replace(key=key, value=value, key_segments=ids, sinks=None)


def _hop(x: Any, ring: Ring) -> Any:
    """To the next device, from the last one to the first."""
    return jax.lax.ppermute(x, ring.axis_name, [(i, (i + 1) % ring.size) for i in range(ring.size)])


def _passed(n: int | jax.Array, place: jax.Array, ring: Ring) -> jax.Array | None:
    """Whether a device sees the shard n before its own, going round; None: all devices do."""
    return None if ring.right is None else place >= n


def _shifts(ring: Ring, T: int) -> list[int]:
    """How many shards before the queries' the others are that some of these see."""
    return [shift for shift in range(1 - ring.size, ring.size) if shift and ring.sees(shift, T)]


def _send(x: Any, shift: int, ring: Ring) -> Any:
    """To the device ``shift`` later, zeros to those that none sends to."""
    return jax.lax.ppermute(x, ring.axis_name, [(i, i + shift) for i in range(ring.size) if 0 <= i + shift < ring.size])


def _is_there(shift: int, place: jax.Array, ring: Ring) -> jax.Array:
    """Whether there is a shard ``shift`` before the device's own."""
    return place >= shift if shift > 0 else place < ring.size + shift
