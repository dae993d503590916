"""The serving functions in ``jax.numpy``, on CPU, GPU and TPU.

Prompts run through a family's recurrence. Where states are exported, requests are cut into pieces there: first
each piece's own state is made, from these what every piece starts from, and from that all outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from keraunos.kernels.linear_attention import contract as linear_contract
from keraunos.kernels.state_pool import contract
from keraunos.kernels.state_pool.contract import Args, Options
from keraunos.ops.registry import Implementation


def _read(args: Args) -> jax.Array:
    """The requests' states ``[N, H, K, V]`` in float32; for padding those of some slot, of no use."""
    return args.states[jnp.maximum(args.slots, 0)].astype(jnp.float32)


def _write(states: jax.Array, slots: jax.Array, new: jax.Array) -> jax.Array:
    """The pool with states put into their slots; what goes beyond its end goes nowhere."""
    slots = jnp.where(slots >= 0, slots, states.shape[0])
    return states.at[slots].set(new.astype(states.dtype), mode="drop")


def _rows(live: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(live.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def _steps(args: Args, opts: Options) -> tuple[jax.Array | None, jax.Array | None]:
    """``(output, pool)`` of decode, verify or commit: token after token."""
    H, one = args.states.shape[1], opts.op_id == "decode"

    def tokens(x: jax.Array) -> jax.Array:
        """``[T, N, H, ...]`` in float32."""
        x = x[:, None] if one else x
        x = jnp.moveaxis(x, 1, 0).astype(jnp.float32)
        return jnp.repeat(x, H // x.shape[2], 2) if x.shape[2] != H else x

    k, v = tokens(args.key), tokens(args.value)
    gate = jnp.zeros((*k.shape[:3], 1), jnp.float32)
    if args.g is not None:
        g = tokens(args.g)
        gate = gate + (g if g.ndim == 4 else g[..., None])
    if args.g_gamma is not None:
        gate = gate + args.g_gamma.astype(jnp.float32)[..., None]
    counts = jnp.full(args.slots.shape, k.shape[0]) if args.counts is None else args.counts

    def step(state: jax.Array, token: tuple) -> tuple[jax.Array, jax.Array | None]:
        t, q, k, v, decay = token
        moved = decay[..., None] * state + k[..., None] * v[..., None, :]
        state = jnp.where((t < counts)[:, None, None, None], moved, state)
        return state, None if q is None else (state * q[..., None]).sum(-2) * opts.softmax_scale

    q = tokens(args.query) if opts.reads else None
    state, outputs = jax.lax.scan(step, _read(args), (jnp.arange(k.shape[0]), q, k, v, jnp.exp(gate)))
    output = pool = None
    if opts.writes:
        pool = _write(args.states, jnp.where(counts > 0, args.slots, -1), state)
    if outputs is not None:
        output = _rows(args.slots >= 0, jnp.moveaxis(outputs, 0, 1)).astype(args.query.dtype)
        output = output[:, 0] if one else output
    return output, pool


def _prefill(forward: Callable, args: Args, opts: Options) -> tuple[jax.Array, jax.Array]:
    """``(output, pool)``: the packed tokens of all requests."""
    cu, T = args.cu_seqlens, args.key.shape[0]
    live = args.slots >= 0
    state = _read(args)
    if args.has_initial is not None:
        state = _rows(args.has_initial, state)
    # Of padding nothing may be left, not even in the zeros that it is multiplied by.
    state = _rows(live, state)
    q, k, v, g = (x if x is None else x[None] for x in (args.query, args.key, args.value, args.g))
    call = linear_contract.Args(q, k, v, g, args.g_gamma, state, cu)
    options = linear_contract.Options(opts.softmax_scale, False, opts.cfg)
    pool = args.states
    if args.tokens is None:
        (output, final), _ = forward(call, options)
    else:
        output, final, exported = _in_pieces(forward, call, options, args)
        pool = _write(pool, *exported)
    token = jnp.searchsorted(cu[1:], jnp.arange(T), side="right")
    alive = jnp.append(live, False)[token]
    return _rows(alive, output[0]), _write(pool, args.slots, final)


def _in_pieces(
    forward: Callable, call: linear_contract.Args, options: linear_contract.Options, args: Args
) -> tuple:
    """``(output, final states, (slots, states) to export)`` of requests cut where states are wanted."""
    cu, state = args.cu_seqlens, call.initial_state
    N, M = len(cu) - 1, len(args.tokens)
    # A piece that ends where a request ends comes before the next request, which begins there.
    tokens = args.tokens.astype(cu.dtype)
    where = jnp.concatenate([2 * cu[:-1] + 1, 2 * jnp.minimum(tokens + 1, cu[-1])])
    order = jnp.argsort(where, stable=True)
    place = jnp.argsort(order)
    cuts = jnp.append(where[order] // 2, cu[-1])
    cut = call._replace(initial_state=None, cu_seqlens=cuts)
    (_, local), _ = forward(cut, options)

    def enter(carried: jax.Array, piece: tuple) -> tuple[jax.Array, jax.Array]:
        own, begin, total, local = piece
        carried = jnp.where(own, begin, carried)
        return total * carried + local, carried

    begin = state[jnp.minimum(order, N - 1)]
    _, starts = jax.lax.scan(enter, jnp.zeros_like(state[0]), (order < N, begin, _gates(cut, cuts), local))
    (output, final), _ = forward(cut._replace(initial_state=starts), options)
    # A request's last piece is the one before the next request's first.
    last = jnp.append(place[1:N], N + M) - 1
    request = jnp.searchsorted(cu[1:], tokens, side="right")
    alive = jnp.append(args.slots >= 0, False)[request] & (tokens >= 0)
    return output, final[last], (jnp.where(alive, args.targets, -1), final[jnp.maximum(place[N:] - 1, 0)])


def _gates(call: linear_contract.Args, cuts: jax.Array) -> jax.Array:
    """The decay across each piece, ``[pieces, H, K or 1, 1]``: sums over its own tokens only, so that none cancels."""
    n, H = len(cuts) - 1, call.heads
    total = jnp.zeros((n, H, 1), jnp.float32)
    if call.g is not None:
        g = call.g[0].astype(jnp.float32)
        piece = jnp.searchsorted(cuts[1:], jnp.arange(len(g)), side="right")
        total = jax.ops.segment_sum(g if g.ndim == 3 else g[..., None], piece, n)
        total = jnp.repeat(total, H // g.shape[1], axis=1)
    if call.g_gamma is not None:
        length = (cuts[1:] - cuts[:-1]).astype(jnp.float32)[:, None, None]
        total = total + jnp.where(length > 0, call.g_gamma.astype(jnp.float32)[:, None] * length, 0)
    return jnp.exp(total)[..., None]


def prefill(source: str, forward: Callable, fields: tuple[str, ...], heuristic: Callable) -> Implementation:
    """Prefill by a family's ``forward``, with its heuristic; source: the module's ``__file__``."""
    return contract.implementation("prefill", functools.partial(_prefill, forward), fields, platform="xla",
                                   source=source, heuristic=heuristic)


decode, verify, commit = (
    contract.implementation(op_id, _steps, (), platform="xla", source=__file__)
    for op_id in ("decode", "verify", "commit")
)
