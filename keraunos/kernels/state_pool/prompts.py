"""Prefill in plain operations of either framework, by a family's recurrence: no value is read on the host.

Where states are exported, requests are cut into pieces there: first each piece's own state is made, from these what
every piece starts from, and from that all outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.linear_attention import contract as linear_contract
from keraunos.kernels.state_pool.contract import Args, Options


class Own(NamedTuple):
    """The operations that a framework has in a form of its own."""

    read: Callable[[Args], Any]  # the requests' states [N, H, K, V] in float32; for padding those of some slot
    write: Callable[..., Any]  # (states, slots, new) -> the states, with the new ones in their slots
    sums: Callable[..., Any]  # (x, piece, n) -> the sums of the rows of each of n pieces
    join: Callable[..., Any]  # (own, begin, total, local) -> what each piece starts from: begin, or what is before it


def prefill(own: Own, forward: Callable, args: Args, opts: Options) -> tuple[Any, Any]:
    """``(output, pool)``: the packed tokens of all requests."""
    xp, cu, live = frontends.of(args.key).xp, args.cu_seqlens, args.slots >= 0
    state = own.read(args)
    if args.has_initial is not None:
        state = rows(xp, args.has_initial, state)
    # Of padding nothing may be left, not even in the zeros that it is multiplied by.
    state = rows(xp, live, state)
    q, k, v, g = (x if x is None else x[None] for x in (args.query, args.key, args.value, args.g))
    call = linear_contract.Args(q, k, v, g, args.g_gamma, state, cu)
    options = linear_contract.Options(opts.softmax_scale, False, opts.cfg)
    pool = args.states
    if args.tokens is None:
        (output, final), _ = forward(call, options)
    else:
        output, final, exported = _in_pieces(own, forward, call, options, args)
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


def _in_pieces(own: Own, forward: Callable, call: linear_contract.Args, options: linear_contract.Options,
               args: Args) -> tuple[Array, Array, tuple[Array, Array]]:
    """``(output, final states, (slots, states) to export)`` of requests cut where states are wanted."""
    frontend, cu, state = frontends.of(args.key), args.cu_seqlens, call.initial_state
    xp, N, M = frontend.xp, len(cu) - 1, len(args.tokens)
    # A piece that ends where a request ends comes before the next request, which begins there.
    tokens = frontend.cast(args.tokens, frontend.dtype_name(cu))
    where = xp.concatenate([2 * cu[:-1] + 1, 2 * xp.minimum(tokens + 1, cu[-1])])
    order = xp.argsort(where, stable=True)
    place = xp.argsort(order)
    cuts = xp.concatenate([where[order] // 2, cu[-1:]])
    cut = call._replace(initial_state=None, cu_seqlens=cuts)
    (_, local), _ = forward(cut, options)
    starts = own.join(order < N, state[order.clip(max=N - 1)], _decays(own, cut), local)
    (output, final), _ = forward(cut._replace(initial_state=starts), options)
    # A request's last piece is the one before the next request's first.
    last = xp.concatenate([place[1:N], place[:1] * 0 + N + M]) - 1
    alive = _of_request(args.slots >= 0, cu, tokens) & (tokens >= 0)
    return output, final[last], (xp.where(alive, args.targets, -1), final[(place[N:] - 1).clip(0)])


def _decays(own: Own, call: linear_contract.Args) -> Array:
    """The decay across each piece, ``[pieces, H, K or 1, 1]``: sums over its own tokens only, so that none cancels."""
    frontend, cuts = frontends.of(call.key), call.cu_seqlens
    xp, n, H = frontend.xp, len(cuts) - 1, call.heads
    total = frontend.zeros((n, H, 1), "float32", call.key)
    if call.g is not None:
        g = frontend.cast(call.g[0], "float32")
        token = frontend.cast(frontend.numbers(len(g), cuts), frontend.dtype_name(cuts))
        sums = own.sums(g if g.ndim == 3 else g[..., None], xp.searchsorted(cuts[1:], token, side="right"), n)
        heads = sums.shape[1]
        total = xp.broadcast_to(sums[:, :, None], (n, heads, H // heads, sums.shape[2])).reshape(n, H, -1)
    if call.g_gamma is not None:
        length = frontend.cast(cuts[1:] - cuts[:-1], "float32")[:, None, None]
        total = total + xp.where(length > 0, frontend.cast(call.g_gamma, "float32")[:, None] * length, 0)
    return xp.exp(total)[..., None]
