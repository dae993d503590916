"""The gated linear recurrence in plain PyTorch operations: chunks of tokens, on any device.

The algorithm is that of ``xla.py``; :mod:`keraunos.kernels.recurrent.torch` has the chunks and the decays inside them.

PyTorch pays for every operation that it starts. The insides of chunks are therefore computed for a group of them at
once; only the walk of the state goes chunk by chunk, with one operation (two for packed sequences).

The backward keeps the inputs, recomputes the state before each chunk, and walks the groups back with the gradient of
the state: memory grows by ``K * V / chunk`` values a token and head, not by ``K * V``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from keraunos.kernels.linear_attention.contract import Args, Options, kernels
from keraunos.kernels.recurrent.torch import Group, ScalarDecay, VectorDecay, Walker
from keraunos.kernels.state_pool import torch as pool
from keraunos.kernels.state_pool.prompts import Walk
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q",)


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """Chunks of 64 tokens: fewer make the products too small, more spend the time on pairs inside the chunk."""
    return replace(cfg, block_q=64)


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Chunks from 16 to 256 tokens."""
    return [replace(cfg, block_q=c) for c in (16, 32, 64, 128, 256)]


def _steps(added: torch.Tensor, decay: ScalarDecay | VectorDecay) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """The steps of a walk on which chunks add ``[n, B, H, K, V]`` to the state; overwrites these."""
    total = decay.total.expand(len(added), *decay.total.shape[1:])
    return lambda i, state: added[i].addcmul_(total[i], state)


def forward(args: Args, opts: Options,
            continues: torch.Tensor | None = None) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple]:
    """``((output, final_state), ())``: the backward needs the inputs only. continues: see :class:`Walker`."""
    w = Walker(args, opts, continues)
    states, state = w.states(args.initial_state)
    output = w.buffer(w.H, w.V, dtype=args.query.dtype)
    # The precision is the caller's choice by the dtype of the inputs: autocast does not reach in here.
    with torch.autocast(w.device.type, enabled=False):
        for group in w.groups:
            q, k, v = w.qkv(group)
            w.look_at(q, k, v)
            decay = w.decay(group)
            incoming, state = w.walk(state, states, _steps(w.mm((k * decay.leave).mT, v), decay), group)
            o = decay.inside(q, k, v).add_(w.mm(q.mul_(decay.enter), incoming))
            w.write(output, o, group)
    return (w.written(output), w.final(state, states)), ()


def _states_before(w: Walker) -> Iterator[torch.Tensor]:
    """The state before each chunk, group by group."""
    states, state = w.states(w.args.initial_state)
    for group in w.groups:
        k, v = w.read(w.args.key, group), w.read(w.args.value, group)
        decay = w.decay(group)
        incoming, state = w.walk(state, states, _steps(w.mm((k * decay.leave).mT, v), decay), group)
        yield incoming


def backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args``, from those of the output and of the final state (None: zero)."""
    doutput, dfinal = grads
    need_g, need_gamma = (opts.needs(args, name) for name in ("g", "g_gamma"))
    need_gate = need_g or need_gamma
    w = Walker(args, opts)
    dstates, dstate = w.states(dfinal)
    dq_, dk_, dv_ = (w.buffer(*x.shape[2:], dtype=x.dtype) for x in args[:3])
    dg_ = w.buffer(*args.g.shape[2:], dtype=args.g.dtype) if need_g else None
    dgamma = torch.zeros(w.B, w.H, dtype=w.dtype, device=w.device)
    with torch.autocast(w.device.type, enabled=False):
        for group, state in reversed(list(zip(w.groups, _states_before(w), strict=True))):
            q, k, v = w.qkv(group)
            do = w.read(doutput, group)
            w.look_at(q, k, v, do, state)
            live = w.live(do, (-1,))
            q = w.kept(q, live)
            decay = w.decay(group)
            q_enter = q * decay.enter
            steps = _steps(w.mm(q_enter.mT, do), decay)
            dincoming, ddstate = w.walk(dstate, dstates, steps, group, backwards=True)
            later = w.live(dincoming, (-2, -1))
            k_leave = w.kept(k * decay.leave, later)
            dq_enter, dk_leave = w.kept(w.mm(do, state.mT), live), w.mm(w.kept(v, later), dincoming.mT)
            dq, dk, dv, da = decay.inside_backward(q, k, v, do, live, need_gate)
            dq.addcmul_(decay.enter, dq_enter)
            dk.addcmul_(decay.leave, dk_leave)
            dv.add_(w.mm(k_leave, dincoming))
            if da is not None:
                passed = (decay.total * w.kept(state, later)).mul_(dincoming)
                da = da + decay.across_backward(q_enter.mul_(dq_enter), k_leave.mul_(dk_leave), passed)
                dgamma += _gamma_gradient(da, group) if need_gamma else 0
                if dg_ is not None:
                    w.write(dg_, da, group)
            w.write(dq_, dq.mul_(opts.softmax_scale), group)
            w.write(dk_, dk, group)
            w.write(dv_, dv, group)
            dstate = ddstate
    dinitial = None if args.initial_state is None else w.final(dstate, dstates).to(args.initial_state.dtype)
    if need_gamma:
        dgamma = (dgamma if args.g_gamma.ndim == 2 else dgamma.sum(0)).to(args.g_gamma.dtype)
    dg = None if dg_ is None else w.written(dg_)
    return Args(w.written(dq_), w.written(dk_), w.written(dv_), dg, dgamma if need_gamma else None, dinitial)


def _gamma_gradient(da: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of the gates' gradients over the chunks' own tokens, ``[B, H]``."""
    if group.valid is not None:
        da = torch.where(group.valid if da.ndim == 4 else group.valid[..., None], da, 0)
    return da.sum((0, *range(3, da.ndim)))


gla, lightning_attn = kernels(
    "torch", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates
)
prefill = pool.prefill(__file__, Walk(Args, Options, forward), FIELDS, heuristic)
