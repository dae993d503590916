"""The gated delta rule in ``jax.numpy``: chunks of tokens in a scan, on CPU, GPU and TPU.

With ``A_ts`` the decayed products of a chunk's keys, s before t, and ``S`` the state before the chunk::

    (I + beta A) U = beta (V - decayed K S)        the chunk's corrections, by substitution
    O = pairs(Q, K) U + decayed Q S                linear attention with U in place of the values
    S' = decayed S + (decayed K)^T U

:mod:`keraunos.kernels.recurrent.xla` has the chunks and the decays inside them.

The forward keeps the state before every 1024th token or so. The backward takes these groups of chunks from the last to
the first, recomputes the states inside a group, and walks its chunks back with the gradient of the state: memory grows
by ``K * V / 1024`` values a token and head, not by ``K * V``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from keraunos.frontends import jax as frontend
from keraunos.kernels.gated_delta_rule.contract import Args, Options, kernel
from keraunos.kernels.gated_delta_rule.reference import EPSILON
from keraunos.kernels.recurrent.contract import no_gradients, no_tokens, state_spec
from keraunos.kernels.recurrent.xla import Chunks, Decay, Walker, on_each_device, sum_last
from keraunos.kernels.state_pool import xla as pool
from keraunos.kernels.state_pool.prompts import Walk
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q",)
# Tokens per chunk. Longer ones spend the time on the substitution, which goes token by token.
_CHUNK = {"cpu": 32, "gpu": 64, "tpu": 64}


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """Chunks that suit the kind of device; of a traced call, that which the program is lowered for."""
    return replace(cfg, block_q=_CHUNK[inv.backend], backend=inv.backend if inv.traced else "any")


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Every chunk length that has a chance on some device."""
    return [replace(cfg, block_q=c) for c in (16, 32, 64, 128)]


class _Tokens:
    """The arrays of a chunk, ``[B, H, C, dim]``; queries and keys are normalised if asked for."""

    def __init__(self, w: Walker, chunk: Chunks):
        args, self.scale = w.args, w.opts.softmax_scale
        self.rows = w.read(args.query, chunk), w.read(args.key, chunk)
        self.norms = []
        if w.opts.use_qk_l2norm:
            self.norms = [jax.lax.rsqrt(sum_last(x * x)[..., None] + EPSILON) for x in self.rows]
        q, self.k = (x * r for x, r in zip(self.rows, self.norms, strict=True)) if self.norms else self.rows
        self.q, self.v = q * self.scale, w.read(args.value, chunk)
        beta = jnp.ones_like(self.v[..., 0]) if args.beta is None else w.read(args.beta, chunk)
        self.beta = beta[..., None]

    def gradients(self, dq: jax.Array, dk: jax.Array) -> list[jax.Array]:
        """The gradients of the arrays as given from those of ``q`` and ``k``."""
        made = [dq * self.scale, dk]
        if not self.norms:
            return made
        return [r * d - r**3 * x * sum_last(x * d)[..., None]
                for x, r, d in zip(self.rows, self.norms, made, strict=True)]


def _solve(beta: jax.Array, pairs: jax.Array, x: jax.Array, transposed: bool = False) -> jax.Array:
    """``(I + beta A)^-1 x``, or of the transposed matrix, by substitution.

    Not as a product with the inverse, whose entries lose their digits where keys are equal.
    """
    return jax.lax.linalg.triangular_solve(beta * pairs, x, left_side=True, lower=True, transpose_a=transposed,
                                           unit_diagonal=True)


def _corrections(w: Walker, decay: Decay, k: jax.Array, v: jax.Array, beta: jax.Array,
                 state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(U, the pairs of keys, the values without the part of the state before the chunk)``."""
    left = v - w.mm("bhik,bhkv->bhiv", k * decay.enter, state)
    pairs = decay.before_pairs(k, k)
    return _solve(beta, pairs, beta * left), pairs, left


def _after(w: Walker, decay: Decay, k: jax.Array, u: jax.Array, state: jax.Array) -> jax.Array:
    """The state after a chunk."""
    return decay.total * state + w.mm("bhik,bhiv->bhkv", k * decay.leave, u)


def _walker(args: Args, opts: Options, continues: jax.Array | None = None) -> Walker:
    w = Walker(args, opts, at_once=False, continues=continues)
    beta = None if args.beta is None else w.pad(args.beta)
    w.args = w.args._replace(beta=beta)
    return w


def _forward(args: Args, opts: Options,
             continues: jax.Array | None = None) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    """``((output, final_state), (the states before the groups of chunks, [groups, B or 1, H, K, V],))``."""
    if args.query.shape[1] == 0:
        return no_tokens(args), ()
    w = _walker(args, opts, continues)
    under = w.decay()

    def pass_chunk(decay: Decay, state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array,
                   beta: jax.Array) -> tuple[jax.Array, jax.Array]:
        u, _, _ = _corrections(w, decay, k, v, beta, state)
        o = decay.inside(q, k, u) + w.mm("bhik,bhkv->bhiv", q * decay.enter, state)
        return o, _after(w, decay, k, u, state)

    def step(carry: tuple, chunk: Chunks) -> tuple[tuple, None]:
        state, states, output = carry
        x = _Tokens(w, chunk)
        o, state = under(chunk, pass_chunk, w.enter(state, states, chunk.first, chunk), x.q, x.k, x.v, x.beta)
        return (state, w.leave(state, states, chunk), w.write(output, o, chunk)), None

    def walk(carry: tuple, group: Chunks) -> tuple[tuple, jax.Array]:
        return jax.lax.scan(step, carry, group)[0], carry[0]

    states = w.initial()
    output = w.buffer(jax.ShapeDtypeStruct((w.B, w.T, w.H, w.V), args.query.dtype))
    (_, states, output), before = jax.lax.scan(walk, (w.carry(states), states, output), w.chunks)
    return (w.written(output), states), (before,)


def _states_before(w: Walker, under: Callable, group: Chunks, state: jax.Array) -> jax.Array:
    """The state before each chunk of a group, ``[chunks, B, H, K, V]``, from the one before its first."""
    states = w.initial()

    def pass_chunk(decay: Decay, state: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array) -> tuple[jax.Array]:
        return (_after(w, decay, k, _corrections(w, decay, k, v, beta, state)[0], state),)

    def step(state: jax.Array, chunk: Chunks) -> tuple[jax.Array, jax.Array]:
        state = w.enter(state, states, chunk.first, chunk)
        x = _Tokens(w, chunk)
        (after,) = under(chunk, pass_chunk, state, x.k, x.v, x.beta)
        return after, state

    return jax.lax.scan(step, state, group)[1]


def _backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args``, from those of the output and of the final state (None: zero).

    With ``L = (I + beta A)^-T dU``, the gradient of the substitution's right side, ``-beta L`` is to the pairs of keys
    what the output's gradient is to those of queries with keys: both are linear attention's backward.
    """
    doutput, dfinal = grads
    if args.query.shape[1] == 0:
        return no_gradients(args, dfinal)
    if dfinal is None:
        dfinal = frontend.zeros(*state_spec(args), args.query)
    w = _walker(args, opts)
    under = w.decay()
    doutput = w.pad(doutput)
    need_gate = opts.needs(args, "g")

    def pass_chunk(decay: Decay, state: jax.Array, dstate: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array,
                   beta: jax.Array, do: jax.Array) -> tuple:
        u, pairs, left = _corrections(w, decay, k, v, beta, state)
        q_enter, k_enter, k_leave = q * decay.enter, k * decay.enter, k * decay.leave
        dq_enter = w.mm("bhiv,bhkv->bhik", do, state)
        dk_leave = w.mm("bhiv,bhkv->bhik", u, dstate)
        crossing = q_enter * dq_enter, k_leave * dk_leave, decay.total * state * dstate
        dq, dk, du, da = decay.backward(q, k, u, do, crossing if need_gate else None)
        right = _solve(beta, pairs, du + w.mm("bhik,bhkv->bhiv", k_leave, dstate), transposed=True)
        dv = beta * right
        dk_enter = -w.mm("bhiv,bhkv->bhik", dv, state)
        crossing = k_enter * dk_enter, jnp.zeros_like(k), jnp.zeros_like(state)
        k_own, k_before, _, da_pairs = decay.backward(k, k, u, -dv, crossing if need_gate else None, own=False)
        dq = dq + decay.enter * dq_enter
        dk = dk + k_own + k_before + decay.enter * dk_enter + decay.leave * dk_leave
        # The errors are U over beta: their own sum cancels where keys are alike.
        error = jnp.where(beta == 0, left - w.mm("bhij,bhjv->bhiv", pairs, u), u / jnp.where(beta == 0, 1, beta))
        before = decay.total * dstate + w.mm("bhik,bhiv->bhkv", q_enter, do) - w.mm("bhik,bhiv->bhkv", k_enter, dv)
        da = None if da is None or da_pairs is None else da + da_pairs
        return dq, dk, dv, da, sum_last(right * error)[..., None], before

    def step(carry: tuple, xs: tuple) -> tuple[tuple, None]:
        dstate, dstates, buffers = carry
        chunk, state = xs
        dstate = w.enter(dstate, dstates, chunk.last, chunk)
        x, do = _Tokens(w, chunk), w.read(doutput, chunk)
        dq, dk, dv, da, dbeta, dstate = under(chunk, pass_chunk, state, dstate, x.q, x.k, x.v, x.beta, do)
        made = (*x.gradients(dq, dk), dv, da, dbeta[..., 0])
        buffers = tuple(None if b is None or d is None else w.write(b, d, chunk)
                        for b, d in zip(buffers, made, strict=True))
        return (dstate, w.leave(dstate, dstates, chunk), buffers), None

    def walk(carry: tuple, xs: tuple) -> tuple[tuple, None]:
        group, state = xs
        return jax.lax.scan(step, carry, (group, _states_before(w, under, group, state)), reverse=True)[0], None

    dstates = dfinal.astype(w.dtype)
    wanted = (True, True, True, need_gate, True)
    buffers = tuple(w.buffer(x) if need and x is not None else None for x, need in zip(args[:5], wanted, strict=True))
    (_, dstates, buffers), _ = jax.lax.scan(
        walk, (w.carry(dstates), dstates, buffers), (w.chunks, residuals[0][: w.chunks.begin.shape[0]]), reverse=True
    )
    found = (*(None if x is None else w.written(x) for x in buffers),
             None if args.initial_state is None else dstates, None)
    return Args(*(None if d is None else d.astype(x.dtype) for x, d in zip(args, found, strict=True)))


forward, backward = on_each_device(_forward, _backward, _CHUNK, at_once=False)
gated_delta_rule = kernel(
    "xla", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates, has_vmap=True
)
delta_prefill = pool.prefill(__file__, Walk(Args, Options, forward), FIELDS, heuristic, "delta_prefill")
