"""The kernel that takes states of a pool through a few tokens, one after the other, in float32.

Grid: ``(groups of heads, requests)``. Which state a program has follows from the slots, which are there before it
begins: the pool stays in memory, and only the states of requests move, once in and once out. The pool that is returned
is the one that is given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from keraunos.kernels.device.pallas import launch


class Steps(NamedTuple):
    """The compile-time part of a call."""

    heads: int  # of a program
    scale: float
    reads: bool  # it has an output
    writes: bool  # the pool changes


def plan(slots: jax.Array, counts: jax.Array, size: int) -> jax.Array:
    """For each request ``[2, N]``, int32: the slot that its program has, and how many tokens it takes.

    A request without tokens, or with no slot of the pool's, has the slot of the one before, whose state so stays in
    fast memory, or the first one's: what a program is given is written back when the next one has another slot.
    """
    counts = jnp.where((slots >= 0) & (slots < size), counts, 0)
    live = counts > 0
    last = jax.lax.cummax(jnp.where(live, jnp.arange(len(slots)), -1))
    slot = slots[jnp.where(last < 0, jnp.argmax(live), last)]
    return jnp.stack([jnp.where(live.any(), slot, 0), counts]).astype(jnp.int32)


def _kernel(steps: Steps, plan: Any, refs: dict[str, Any]) -> None:
    """One request and group of heads; ``state`` is where its states are meanwhile: float32."""
    i, count = pl.program_id(1), plan[1, pl.program_id(1)]
    state, output, pool = refs["state"], refs.get("output"), refs.get("pool")
    begins = (count > 0) | (i == 0)

    @pl.when(begins)
    def _() -> None:
        state[...] = refs["states"][0].astype(state.dtype)

    if output is not None:
        @pl.when(count == 0)
        def _() -> None:
            output[...] = jnp.zeros(output.shape, output.dtype)

    def token(t: Any, _: None) -> None:
        # One transposition for all heads: a head's column is spread over its state's rows.
        columns = {name: refs[name][0, t].T for name in ("key", "query", "decays") if name in refs}
        rows = {name: refs[name][0, t] for name in ("value", "decay", "beta") if name in refs}
        for h in range(steps.heads):
            one, moved = slice(h, h + 1), state[h]
            if "decays" in columns:
                moved = moved * columns["decays"][:, one]
            if "decay" in rows:
                moved = moved * rows["decay"][one]
            value, key = rows["value"][one], columns["key"][:, one]
            if "beta" in rows:
                value = rows["beta"][one] * (value - (moved * key).sum(0, keepdims=True))
            moved = moved + key * value
            state[h] = moved
            if output is not None:
                output[0, t, one] = (moved * columns["query"][:, one]).sum(0, keepdims=True) * steps.scale

    jax.lax.fori_loop(0, count, token, None)

    if pool is not None and pool.dtype != state.dtype:
        @pl.when(begins)
        def _() -> None:
            pool[0] = state[...].astype(pool.dtype)


def run(steps: Steps, plan: jax.Array, states: jax.Array, tokens: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """``output`` ``[N, T, H, V]`` in float32, and ``pool``: what the call has of them.

    Args:
        states: ``[slots, H, K, V]``.
        tokens: ``[N, T, H, dim]``, float32: key, value, query but for a commit, and ``decays``, one for each dimension
            of K, or ``decay``, one for all; of the delta rule ``beta``, one for all.
    """
    (_, H, K, V), (N, T), heads = states.shape, tokens["key"].shape[:2], steps.heads

    def of_tokens(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, T, heads, dim), lambda h, i, plan: (i, 0, h, 0))

    of_pool = pl.BlockSpec((1, heads, K, V), lambda h, i, plan: (plan[0, i], h, 0, 0))
    given: dict[str, Any] = {"states": (states, of_pool)}
    given |= {name: (x, of_tokens(x.shape[3])) for name, x in tokens.items()}
    made: dict[str, Any] = {}
    if steps.reads:
        made["output"] = (N, T, H, V), jnp.float32, of_tokens(V)
    if steps.writes:
        made["pool"] = states.shape, states.dtype, of_pool
    # A pool of float32 that is written is where its states are meanwhile, too.
    in_place = steps.writes and states.dtype == jnp.float32

    def kernel(plan: Any, *refs: Any) -> None:
        named = dict(zip((*given, *made, "state"), refs, strict=False))
        _kernel(steps, plan, named | {"state": named["pool"].at[0]} if in_place else named)

    scratch = [] if in_place else [pltpu.VMEM((heads, K, V), jnp.float32)]
    return launch(kernel, "state_pool_steps", (H // heads, N), plan, given, made, scratch,
                  {"states": "pool"} if steps.writes else {})
