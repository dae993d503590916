"""Prefill in plain operations of either framework, by a family's recurrence: no value is read on the host.

Where states are exported, requests are cut into pieces there, each of which goes on from the one before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.state_pool.contract import TOKENS, Args, Options


class Own(NamedTuple):
    """The operations that a framework has in a form of its own."""

    read: Callable[[Args], Any]  # the requests' states [N, H, K, V] in float32; for padding those of some slot
    write: Callable[..., Any]  # (states, slots, new) -> the states, with the new ones in their slots


class Walk(NamedTuple):
    """A family's recurrence over packed sequences, and what it takes."""

    args: Any  # the NamedTuple of its arrays
    options: Any  # that of its options
    forward: Callable


def prefill(own: Own, walk: Walk, args: Args, opts: Options) -> tuple[Any, Any]:
    """``(output, pool)``: the packed tokens of all requests."""
    xp, cu, live = frontends.of(args.key).xp, args.cu_seqlens, args.slots >= 0
    state = own.read(args)
    if args.has_initial is not None:
        state = rows(xp, args.has_initial, state)
    # Of padding nothing may be left, not even in the zeros that it is multiplied by.
    given = args._asdict() | {"initial_state": rows(xp, live, state)}
    given |= {name: x[None] for name in TOKENS if (x := given[name]) is not None}
    call = walk.args(**{name: given[name] for name in walk.args._fields})
    known = opts._asdict() | {"reverse": False}
    options = walk.options(**{name: known[name] for name in walk.options._fields if name in known})
    pool = args.states
    if args.tokens is None:
        (output, final), _ = walk.forward(call, options)
    else:
        output, final, exported = _in_pieces(walk.forward, call, options, args)
        pool = own.write(pool, *exported)
    alive = _of_request(live, cu, frontends.of(cu).numbers(args.key.shape[0], cu))
    return rows(xp, alive, output[0]), own.write(pool, args.slots, final)


def rows(xp: Any, live: Any, x: Any) -> Any:
    """The rows that are live; zeros for the others."""
    return xp.where(live.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def _of_request(live: Array, cu: Array, tokens: Array) -> Array:
    """Whether each token is of a request that is live."""
    frontend = frontends.of(cu)
    tokens = frontend.cast(tokens, frontend.dtype_name(cu))
    return frontend.pad(live, 0, 1)[frontend.xp.searchsorted(cu[1:], tokens, side="right")]


def _in_pieces(forward: Callable, call: Any, options: Any,
               args: Args) -> tuple[Array, Array, tuple[Array, Array]]:
    """``(output, final states, (slots, states) to export)`` of requests cut where states are wanted."""
    frontend, cu, state = frontends.of(args.key), args.cu_seqlens, call.initial_state
    xp, N, M = frontend.xp, len(cu) - 1, len(args.tokens)
    # A piece that ends where a request ends comes before the next request, which begins there.
    tokens = frontend.cast(args.tokens, frontend.dtype_name(cu))
    where = xp.concatenate([2 * cu[:-1] + 1, 2 * xp.minimum(tokens + 1, cu[-1])])
    order = xp.argsort(where, stable=True)
    cuts = xp.concatenate([where[order] // 2, cu[-1:]])
    call = call._replace(initial_state=state[order.clip(max=N - 1)], cu_seqlens=cuts)
    (output, final), _ = forward(call, options, order >= N)

    def after(tokens: Array) -> Array:
        """The states after tokens are those of the pieces that they are in."""
        return final[xp.searchsorted(cuts[1:], tokens, side="right").clip(max=N + M - 1)]

    first = final[xp.argsort(order)[:N]]
    last = xp.where((cu[1:] > cu[:-1])[:, None, None, None], after(cu[1:] - 1), first)
    alive = _of_request(args.slots >= 0, cu, tokens) & (tokens >= 0)
    return output, last, (xp.where(alive, args.targets, -1), after(tokens))
