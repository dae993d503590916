"""The serving functions in ``jax.numpy``, on CPU, GPU and TPU.

Prompts run through a family's recurrence.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from keraunos.kernels.state_pool import contract, prompts, tokens
from keraunos.kernels.state_pool.contract import Args, Options
from keraunos.ops.registry import Implementation


def _own(opts: Options) -> prompts.Own:
    """How states are read and written, ``[N, H, K, V]`` in either layout of the pool."""

    def turned(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, -1, -2) if opts.state_v_first else x

    def read(args: Args) -> jax.Array:
        return turned(args.states[jnp.maximum(args.slots, 0)].astype(jnp.float32))

    def write(states: jax.Array, slots: jax.Array, new: jax.Array) -> jax.Array:
        # What goes beyond the pool's end goes nowhere.
        slots = jnp.where(slots >= 0, slots, states.shape[0])
        return states.at[slots].set(turned(new).astype(states.dtype), mode="drop")

    return prompts.Own(read, write)


def _steps(args: Args, opts: Options) -> tuple[jax.Array | None, jax.Array | None]:
    """``(output, pool)`` of decode, verify or commit: token after token."""
    given, one_step, own = tokens.read(args, opts), tokens.step_of(args), _own(opts)
    given = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), given)
    counts = jnp.full(args.slots.shape, given.k.shape[0]) if args.counts is None else args.counts

    def step(state: jax.Array, xs: tuple) -> tuple[jax.Array, jax.Array | None]:
        t, token = xs
        state = jnp.where((t < counts)[:, None, None, None], one_step(state, token), state)
        return state, None if token.q is None else (state * token.q[..., None]).sum(-2) * opts.softmax_scale

    state, outputs = jax.lax.scan(step, own.read(args), (jnp.arange(given.k.shape[0]), given))
    output = pool = None
    if opts.writes:
        pool = own.write(args.states, jnp.where(counts > 0, args.slots, -1), state)
    if outputs is not None:
        output = prompts.rows(jnp, args.slots >= 0, jnp.moveaxis(outputs, 0, 1)).astype(args.query.dtype)
        output = output[:, 0] if opts.op_id == "decode" else output
    return output, pool


def prefill(source: str, walk: prompts.Walk, fields: tuple[str, ...], heuristic: Callable,
            op_id: str = "prefill") -> Implementation:
    """Prefill by a family's recurrence, with its heuristic; source: the module's ``__file__``."""

    def compute(args: Args, opts: Options) -> tuple[jax.Array, jax.Array]:
        return prompts.prefill(_own(opts), walk, args, opts)

    return contract.implementation(op_id, compute, fields, platform="xla", source=source, heuristic=heuristic,
                                   layouts=True)


decode, verify, commit = (
    contract.implementation(op_id, _steps, (), platform="xla", source=__file__, layouts=True)
    for op_id in ("decode", "verify", "commit")
)
