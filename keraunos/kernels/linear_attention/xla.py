"""The gated linear recurrence in ``jax.numpy``: chunks of tokens in a scan, on CPU, GPU and TPU.

:mod:`keraunos.kernels.recurrent.xla` has the chunks and the decays inside them.

The forward keeps the state before every 1024th token or so. The backward takes these groups of chunks from the last to
the first, recomputes the states inside a group, and walks its chunks back with the gradient of the state: memory grows
by ``K * V / 1024`` values a token and head, not by ``K * V``.

A CPU walks from chunk to chunk. Where chunks are longer, for GPUs and TPUs, all chunks of a group are computed at once
but for the products that the state gathers: few and large operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from keraunos.frontends import jax as frontend
from keraunos.kernels.linear_attention.contract import Args, Options, kernels
from keraunos.kernels.recurrent.contract import no_gradients, no_tokens, state_spec
from keraunos.kernels.recurrent.xla import CHUNK, Chunks, Decay, Walker, kept, live_along, on_each_device, sum_last
from keraunos.kernels.state_pool import xla as pool
from keraunos.kernels.state_pool.prompts import Walk
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q",)


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """Chunks and groups that suit the kind of device.

    Of a traced call, ``backend`` says whom it is for: where the program is lowered for another, that one's is taken.
    """
    return replace(cfg, block_q=CHUNK[inv.backend], backend=inv.backend if inv.traced else "any")


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Every chunk length that has a chance on some device."""
    return [replace(cfg, block_q=c) for c in (16, 32, 64, 128, 256)]


def _forward(args: Args, opts: Options,
             continues: jax.Array | None = None) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    """``((output, final_state), (the states before the groups of chunks, [groups, B or 1, H, K, V],))``."""
    if args.query.shape[1] == 0:
        return no_tokens(args), ()
    w = Walker(args, opts, continues=continues)
    under = w.decay()

    def pass_chunks(decay: Decay, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return decay.inside(q, k, v), q * decay.enter, decay.total, decay.leave

    def step(carry: tuple, chunk: Chunks) -> tuple[tuple, None]:
        state, states, output = carry
        state = w.enter(state, states, chunk.first, chunk)
        q, k, v = w.qkv(chunk)
        o, q, total, leave = under(chunk, pass_chunks, q, k, v)
        state, before = w.through(state, total, leave, k, v)
        o = o + w.mm("bhik,bhkv->bhiv", q, before)
        return (state, w.leave(state, states, chunk), w.write(output, o, chunk)), None

    def walk(carry: tuple, group: Chunks) -> tuple[tuple, jax.Array]:
        return jax.lax.scan(step, carry, group)[0], carry[0]

    states = w.initial()
    output = w.buffer(jax.ShapeDtypeStruct((w.B, w.T, w.H, w.V), args.query.dtype))
    (_, states, output), before = jax.lax.scan(walk, (w.carry(states), states, output), w.chunks)
    return (w.written(output), states), (before,)


def _states_before(w: Walker, under: Callable, group: Chunks, state: jax.Array) -> jax.Array:
    """The state before each step of a group, ``[steps, B, H, K, V]``, from the one before its first."""
    if group.begin.shape[0] == 1:
        return state[None]
    states = w.initial()

    def step(state: jax.Array, chunk: Chunks) -> tuple[jax.Array, jax.Array]:
        state = w.enter(state, states, chunk.first, chunk)
        k, v = w.read(w.args.key, chunk), w.read(w.args.value, chunk)
        total, leave = under(chunk, lambda decay: (decay.total, decay.leave))
        return w.through(state, total, leave, k, v)

    return jax.lax.scan(step, state, group)[1]


def _backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args``, from those of the output and of the final state (None: zero)."""
    doutput, dfinal = grads
    if args.query.shape[1] == 0:
        return no_gradients(args, dfinal)
    if dfinal is None:
        dfinal = frontend.zeros(*state_spec(args), args.query)
    w = Walker(args, opts)
    under = w.decay()
    doutput = w.pad(doutput)
    need_gate = opts.needs(args, "g") or opts.needs(args, "g_gamma")

    def pass_chunks(decay: Decay, state: jax.Array, dstate: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array,
                    do: jax.Array) -> tuple:
        later, total = live_along(dstate, (-2, -1)), decay.total
        q_enter, k_leave = q * decay.enter, kept(k * decay.leave, later)
        dq_enter = kept(w.mm("bhiv,bhkv->bhik", do, state), live_along(do))
        dk_leave = w.mm("bhjv,bhkv->bhjk", kept(v, later), dstate)
        crossing = q_enter * dq_enter, k_leave * dk_leave, total * kept(state, later) * dstate
        dq, dk, dv, da = decay.backward(q, k, v, do, crossing if need_gate else None)
        dq, dk = dq + decay.enter * dq_enter, dk + decay.leave * dk_leave
        dv = dv + w.mm("bhjk,bhkv->bhjv", k_leave, dstate)
        return dq, dk, dv, da, total, decay.enter

    def step(carry: tuple, xs: tuple) -> tuple[tuple, None]:
        dstate, dstates, dgamma, (dq_, dk_, dv_, dg_) = carry
        chunk, state = xs
        dstate = w.enter(dstate, dstates, chunk.last, chunk)
        (q, k, v), do, after = w.qkv(chunk), w.read(doutput, chunk), dstate
        q = kept(q, live_along(do))
        if w.n > 1:
            total, enter, leave = under(chunk, lambda decay: (decay.total, decay.enter, decay.leave))
            state = w.through(state, total, leave, k, v)[1]
            dstate, after = w.through(dstate, total, enter, q, do, reverse=True)
        dq, dk, dv, da, total, enter = under(chunk, pass_chunks, state, after, q, k, v, do)
        if w.n == 1:
            dstate = w.through(dstate, total, enter, q, do)[0]
        if need_gate:
            dgamma = dgamma + _gamma_gradient(w, da, chunk)
            dg_ = None if dg_ is None else w.write(dg_, da, chunk)
        dq_ = w.write(dq_, dq * opts.softmax_scale, chunk)
        buffers = dq_, w.write(dk_, dk, chunk), w.write(dv_, dv, chunk), dg_
        return (dstate, w.leave(dstate, dstates, chunk), dgamma, buffers), None

    def walk(carry: tuple, xs: tuple) -> tuple[tuple, None]:
        group, state = xs
        return jax.lax.scan(step, carry, (group, _states_before(w, under, group, state)), reverse=True)[0], None

    dstates = dfinal.astype(w.dtype)
    buffers = tuple(None if x is None else w.buffer(x) for x in args[:4])
    carry = (w.carry(dstates), dstates, w.zeros((w.B, w.H)), buffers)
    (_, dstates, total, buffers), _ = jax.lax.scan(
        walk, carry, (w.chunks, residuals[0][: w.chunks.begin.shape[0]]), reverse=True
    )
    dgamma = None
    if opts.needs(args, "g_gamma"):
        dgamma = total if args.g_gamma.ndim == 2 else total.sum(0)
    dinitial = None if args.initial_state is None else dstates
    grads = (*(None if x is None else w.written(x) for x in buffers), dgamma, dinitial, None)
    return Args(*(None if d is None else d.astype(x.dtype) for x, d in zip(args, grads, strict=True)))


def _gamma_gradient(w: Walker, da: jax.Array, chunk: Chunks) -> jax.Array:
    """The sum of the gates' gradients over the step's own tokens, ``[B, H]``."""
    _, valid = w.rows(chunk)
    da = da if da.ndim == 3 else sum_last(da)
    total = sum_last(da if valid is None else jnp.where(w.mask(valid), da, 0))
    return total if w.n == 1 else total.reshape(w.B, w.n, w.H).sum(1)


forward, backward = on_each_device(_forward, _backward, CHUNK)
gla, lightning_attn = kernels(
    "xla", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates, has_vmap=True
)
prefill = pool.prefill(__file__, Walk(Args, Options, forward), FIELDS, heuristic)
