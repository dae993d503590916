"""The recurrence on TPUs: the arrays that kernels are given, and what is made of theirs.

Forward: one walk over the chunks, which reads every input once. Where a gradient will be wanted it keeps the state
before each chunk, in the inputs' dtype: as many bytes as one input has, with chunks of K tokens. Backward: one walk
against the recurrence with the state's gradient, which makes all gradients of a chunk from its state.

No TPU has run these kernels: their values are from Pallas' interpreter, and compilers for TPUs take them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from keraunos.frontends.jax import partition
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.linear_attention.contract import kernels as implementations
from keraunos.kernels.linear_attention.pallas import decays, kernels
from keraunos.kernels.recurrent.contract import head_counts, no_gradients, no_tokens
from keraunos.kernels.state_pool.pallas import passes as pool_passes
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q",)

_DTYPES = ("bfloat16", "float32")
_DIMS = (64, 128, 256)
# Heads of a program: a tile of memory has 8, and a program is written out for each of its heads.
_TILE, _MOST = 8, 32


def group(H: int, *counts: int) -> int:
    """How many of H heads a program takes: the fewest of which every array's share is whole tiles, or all it has.

    ``counts``: the heads of arrays. 0: no number will do.
    """
    sizes = [n for n in range(_TILE, min(H, _MOST + 1), _TILE) if H % n == 0] + [H] * (H <= _MOST)
    fit = (n for n in sizes if n == H or all(n * own % (_TILE * H) == 0 for own in counts))
    return next(fit, 0)


class _Call:
    """One call: its sizes, its plan and its arrays; ``pool``: the slots of its states, and which begin with zeros."""

    def __init__(self, args: Args, opts: Options, pool: tuple[jax.Array, jax.Array] | None = None):
        self.args, self.opts = args, opts
        (B, T, _, K), V, H = args.query.shape, args.value.shape[3], args.heads
        C: Any = opts.cfg.block_q
        cu = args.cu_seqlens
        packed = cu is not None
        self.N = cu.shape[0] - 1 if packed else B
        self.visits = kernels.plan(cu if packed else jnp.array([0, T], jnp.int32), T, C, packed)
        self.visits = kernels.turned(self.visits) if opts.reverse else self.visits
        if pool is not None:
            self.N = args.initial_state.shape[0]
            self.visits = kernels.pooled(self.visits, *pool, self.N)
        gate = "vector" if args.g is not None and args.g.ndim == 4 else "scalar"
        tokens = [x for x in args[:4] if x is not None and x.ndim == 4]
        heads = group(H, *(x.shape[2] for x in tokens))
        if not heads:
            # Shares that are no whole tiles: each head gets a copy of its own.
            heads = group(H)
            args = args._replace(**{name: jnp.repeat(x, H // x.shape[2], axis=2)
                                    for name, x in zip(Args._fields[:4], args[:4], strict=True) if x is not None})
        shape = decays.Shape(C, args.query.dtype, opts.reverse)
        self.walk = kernels.Walk(shape, B, T, H, K, V, heads, self.visits.shape[1], gate, opts.softmax_scale,
                                 T % C == 0 and not packed, packed, pool is not None)
        state = args.initial_state
        self.arrays = dict(q=args.query, k=args.key, v=args.value, **self.gates(args, gate),
                           initial=state if state is None or pool is not None else state.astype(jnp.float32))

    def gates(self, args: Args, gate: str) -> dict[str, Any]:
        """The decays as kernels take them."""
        (B, T), H, K, gamma, g = args.query.shape[:2], args.heads, self.args.query.shape[3], args.g_gamma, args.g
        if gamma is not None:
            gamma = jnp.maximum(jnp.asarray(gamma).astype(jnp.float32), decays.FAINT)
            gamma = gamma if gamma.ndim == 2 else gamma[None]
        if gate == "vector":
            return dict(g=g, gamma=gamma if gamma is None else jnp.broadcast_to(gamma[..., None], (*gamma.shape, K)))
        a = jnp.zeros((B, H, T), jnp.float32)
        if g is not None:
            g = jnp.maximum(g.astype(jnp.float32), decays.FAINT)
            a = a + jnp.repeat(g, H // g.shape[2], axis=2).swapaxes(1, 2)
        return dict(a=a if gamma is None else a + gamma[..., None])

    def forward(self, final: bool, kept: bool) -> dict[str, Any]:
        """Output, final state and states before chunks."""
        return kernels.forward(self.walk, self.visits, self.arrays, self.N, final, kept)

    def backward(self, kept: Any, do: Any, dfinal: Any) -> Args:
        """The gradients of the arguments, in any dtype."""
        args, opts, w = self.args, self.opts, self.walk
        learned = opts.needs(args, "g_gamma")
        dtypes = {f"d{letter}": x.dtype if x.shape[2] == w.H else jnp.float32
                  for letter, x in zip("qkv", args[:3], strict=True)}
        if learned or opts.needs(args, "g"):
            own = w.gate == "vector" and not learned and args.g.shape[2] == w.H
            dtypes["da"] = args.g.dtype if own else jnp.float32
        if args.initial_state is not None:
            dtypes["dinitial"] = jnp.float32
        arrays = {name: x for name, x in self.arrays.items() if name != "initial"}
        arrays |= dict(do=do, kept=kept, dfinal=None if dfinal is None else dfinal.astype(jnp.float32))
        made = kernels.backward(w, kernels.turned(self.visits), arrays, self.N, dtypes)
        dg, dgamma = made.get("da"), None
        if dg is not None:
            dg = dg.swapaxes(1, 2) if w.gate == "scalar" else dg
            if learned:
                dgamma = dg.sum(1) if dg.ndim == 3 else dg.sum((1, 3))
                dgamma = dgamma if args.g_gamma.ndim == 2 else dgamma.sum(0)
        grads = (*(made[f"d{letter}"] for letter in "qkv"), None if args.g is None else dg)
        query, key, value, g = (None if d is None else _shared(d, x) for d, x in zip(grads, args[:4], strict=True))
        return Args(query, key, value, g, dgamma, made.get("dinitial"))


def _shared(d: jax.Array, x: jax.Array) -> jax.Array:
    """The gradient of ``x``, summed over the heads that share one of its own."""
    n, (B, T, H, *dim) = x.shape[2], d.shape
    return d if n == H else d.reshape(B, T, n, H // n, *dim).sum(3)


def forward(args: Args, opts: Options) -> tuple[tuple[jax.Array, jax.Array | None], tuple]:
    """``((output, final_state), residuals)``: the states before all chunks, if they are kept."""
    if 0 in args.query.shape[:2]:
        return no_tokens(args), (None,)
    # Where XLA may share the call out, what is kept is dropped, and made again.
    kept = opts.kept and partition.is_settled()
    made = _Call(args, opts).forward(opts.state, kept)
    return (made["o"], made.get("final")), (made.get("kept"),)


def walk_in_pool(args: Args, opts: Options, slots: jax.Array, fresh: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(output, pool)`` of packed sequences whose states are in slots of a pool, ``args.initial_state``.

    Args:
        slots: ``[N]``; -1: a sequence without a state, of whose tokens nothing is computed.
        fresh: ``[N]``, bool: which begin with zeros, whatever their slot holds.
    """
    if not args.query.shape[1]:
        args = args._replace(**{name: jnp.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2))
                                for name, x in zip(Args._fields[:4], args[:4], strict=True) if x is not None})
        output, pool = walk_in_pool(args, opts, slots, fresh)
        return output[:, :0], pool
    made = _Call(args, opts, (slots, fresh)).forward(True, False)
    return made["o"], made["final"]


def backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args`` from those of the output and of the final state, which may be None."""
    doutput, dfinal = grads
    if 0 in args.query.shape[:2]:
        return no_gradients(args, dfinal)
    call, (kept,) = _Call(args, opts), residuals
    kept = call.forward(False, True)["kept"] if kept is None else kept
    given = call.backward(kept, doutput, dfinal)
    return Args(*(None if d is None else d.astype(x.dtype) for x, d in zip(args, given, strict=True)))


def unsupported(inv: Invocation) -> str | None:
    """Why these kernels cannot run the call, or None."""
    dims, dtype, H = inv.dims, inv.arrays["query"][0], inv.dims["H"]
    if dtype not in _DTYPES:
        return f"takes bfloat16 and float32, whose products TPUs do; the call has {dtype}"
    if dims["K"] not in _DIMS or dims["V"] not in _DIMS:
        return f"takes head dims of 64, 128 and 256; the call has K = {dims['K']}, V = {dims['V']}"
    if not group(H) or not all(H % n == 0 for n in head_counts(dims).values()):
        return f"takes up to {_MOST} heads, or a multiple of {_TILE}; the call has {H}"
    return None


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """Chunks of 128 tokens: as long as the matrix units of all but the newest are wide."""
    return replace(cfg, block_q=128)


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Chunks of 128 or 256 tokens: gates per token lie 128 to a row of a register."""
    return [replace(cfg, block_q=C) for C in (128, 256)]


gla, lightning_attn = implementations(
    "pallas", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates,
    unsupported=unsupported,
)
prefill = pool_passes.prefill(__file__, walk_in_pool, FIELDS, unsupported, heuristic)
