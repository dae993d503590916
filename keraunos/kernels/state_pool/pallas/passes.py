"""The serving functions on TPUs, in Pallas: the arrays that kernels are given.

decode, verify and commit are one kernel. Nothing but the state's bytes matters to it: what a token has is widened to
float32 and to a copy for each head before, normalised, and decays are made there. prefill is a family's walk, which
reads the states that requests come with from the pool and leaves theirs there.

No TPU has run this: values are from Pallas' interpreter, and compilers for TPUs take it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from keraunos.kernels.linear_attention import contract as linear_contract
from keraunos.kernels.state_pool import contract, tokens
from keraunos.kernels.state_pool.contract import Args, Options
from keraunos.kernels.state_pool.pallas import steps
from keraunos.ops.invocation import Invocation
from keraunos.ops.registry import Implementation

# Bytes of a program's states, in float32: where there are more of them its steps are no faster; and the most that fit.
_ENOUGH, _MOST = 1 << 20, 8 << 20
# A tile of memory has so many rows and columns.
_TILE, _LANES = 8, 128


def group(H: int, K: int, V: int) -> int:
    """How many of H heads a program takes: whole tiles of tokens' heads, or all; 0: no number will do."""
    sizes = [n for n in range(_TILE, H, _TILE) if H % n == 0] + [H]
    fit = [n for n in sizes if 4 * n * K * V <= _ENOUGH] or sizes[:1]
    return fit[-1] if 4 * fit[-1] * K * V <= _MOST else 0


def _steps(args: Args, opts: Options) -> tuple[jax.Array | None, jax.Array | None]:
    """``(output, pool)`` of decode, verify or commit."""
    (size, H, K, V), N, one = args.states.shape, args.slots.shape[0], opts.op_id == "decode"

    read = tokens.read(args, opts)
    given = dict(key=read.k, value=read.v)
    if opts.reads:
        given["query"] = read.q
    if read.decay is not None:
        given["decay" if read.decay.shape[-1] == 1 else "decays"] = read.decay
    if read.beta is not None:
        given["beta"] = read.beta
    T = given["key"].shape[1]
    made = dict(output=jnp.zeros((0, T, H, V)), pool=args.states)
    if N:
        counts = jnp.full(N, T) if args.counts is None else jnp.clip(args.counts, 0, T)
        call = steps.Steps(group(H, K, V), opts.softmax_scale, opts.reads, opts.writes)
        made = steps.run(call, steps.plan(args.slots, counts, size), args.states, given)
    output = None
    if opts.reads:
        output = (made["output"][:, 0] if one else made["output"]).astype(args.query.dtype)
    return output, made["pool"] if opts.writes else None


def _prefill(walk: Callable, args: Args, opts: Options) -> tuple[jax.Array, jax.Array]:
    """``(output, pool)``: the packed tokens of all requests, by a family's walk."""
    q, k, v, g = (x if x is None else x[None] for x in (args.query, args.key, args.value, args.g))
    row = linear_contract.Args(q, k, v, g, args.g_gamma, args.states, args.cu_seqlens)
    options = linear_contract.Options(opts.softmax_scale, False, opts.cfg, kept=False)
    fresh = jnp.zeros(args.slots.shape, bool) if args.has_initial is None else ~args.has_initial
    output, pool = walk(row, options, args.slots, fresh)
    return output[0], pool


def _copies(inv: Invocation) -> str | None:
    """Why the kernels would be given a copy of the pool, which XLA lays out in another way, or None."""
    K, V = inv.dims["K"], inv.dims["V"]
    if K % _TILE or V % _LANES:
        return (f"takes K of multiples of {_TILE} and V of multiples of {_LANES}: of other pools the compiler makes a"
                f" copy; the call has K = {K}, V = {V}")
    return None


def unsupported(inv: Invocation) -> str | None:
    """Why the kernel of steps cannot run the call, or None."""
    H, K, V = (inv.dims[name] for name in "HKV")
    if not group(H, K, V):
        fit = f"takes states of which 8 heads, or all, fit in {_MOST >> 20} MiB"
        return f"{fit}; the call has H = {H}, K = {K}, V = {V}"
    return _copies(inv)


def prefill(source: str, walk: Callable, fields: tuple[str, ...], cannot_walk: Callable,
            heuristic: Callable) -> Implementation:
    """Prefill by a family's walk.

    Args:
        source: the module's ``__file__``; fields, heuristic: of the walk's configuration.
        walk: ``(args, opts, slots, fresh) -> (output, pool)``; cannot_walk: why it cannot run a call, or None.
    """

    def unsupported(inv: Invocation) -> str | None:
        if "tokens" in inv.arrays:
            return "takes no boundaries: it exports no states"
        return cannot_walk(inv) or _copies(inv)

    return contract.implementation("prefill", functools.partial(_prefill, walk), fields, platform="pallas",
                                   source=source, unsupported=unsupported, heuristic=heuristic)


decode, verify, commit = (
    contract.implementation(op_id, _steps, (), platform="pallas", source=__file__, unsupported=unsupported)
    for op_id in ("decode", "verify", "commit")
)
