"""The gated delta rule in plain PyTorch operations: chunks of tokens, on any device.

With ``A_ts`` the decayed products of a chunk's keys, s before t, and ``S`` the state before the chunk::

    (I + beta A) U = beta (V - decayed K S)        the chunk's corrections, by substitution
    O = pairs(Q, K) U + decayed Q S                linear attention with U in place of the values
    S' = decayed S + (decayed K)^T U

The solution is linear in S, ``U = U0 - W S``: the walk from chunk to chunk has two products a chunk, all else is made
for a group of chunks at once. :mod:`keraunos.kernels.recurrent.torch` has the chunks and the decays inside them.

The backward keeps the inputs, recomputes the state before each chunk, and walks the groups back with the gradient of
the state: memory grows by ``K * V / chunk`` values a token and head, not by ``K * V``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from keraunos.kernels.gated_delta_rule.contract import Args, Options, kernel
from keraunos.kernels.gated_delta_rule.reference import EPSILON
from keraunos.kernels.recurrent.torch import Group, Walker
from keraunos.kernels.state_pool import torch as pool
from keraunos.kernels.state_pool.prompts import Walk
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q",)


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """Chunks of 64 tokens: fewer make the products too small, more spend the time on pairs inside the chunk."""
    return replace(cfg, block_q=64)


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Chunks from 16 to 128 tokens."""
    return [replace(cfg, block_q=c) for c in (16, 32, 64, 128)]


class _Chunks:
    """The arrays of a group of chunks, ``[n, B, H, C, dim]``, and its corrections as a function of the state."""

    def __init__(self, w: Walker, group: Group):
        args, opts = w.args, w.opts
        self.w, self.group = w, group
        self.rows = [w.read(x, group) for x in args[:2]]
        self.norms = []
        if opts.use_qk_l2norm:
            self.norms = [torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in self.rows]
        q, self.k = (x * r for x, r in zip(self.rows, self.norms, strict=True)) if self.norms else self.rows
        self.q, self.v = q * opts.softmax_scale, w.read(args.value, group)
        self.beta = torch.ones_like(self.v[..., :1]) if args.beta is None else w.read(args.beta, group)[..., None]
        self.decay = w.decay(group)
        self.k_enter, self.k_leave = self.k * self.decay.enter, self.k * self.decay.leave
        self.pairs = self.decay.before_pairs(self.k, self.k)

    def solved(self, x: torch.Tensor, transposed: bool = False) -> torch.Tensor:
        """``(I + beta A)^-1 x``, or of the transposed matrix, by substitution.

        Not as a product with the inverse, whose entries lose their digits where keys are equal.
        """
        dtype = torch.float64 if self.w.widen else x.dtype
        matrix = (self.beta * self.pairs).to(dtype)
        matrix = matrix.mT if transposed else matrix
        return torch.linalg.solve_triangular(matrix, x.to(dtype), upper=transposed, unitriangular=True).to(x.dtype)

    def corrections(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """U for the states before the chunks, and the values without these states' part."""
        left = self.v - self.w.mm(self.k_enter, state)
        return self.solved(self.beta * left), left

    def steps(self) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """The steps of the walk: the state after chunk i from the one before it."""
        w, total = self.w, self.decay.total.expand(self.group.n, *self.decay.total.shape[1:])
        made = self.solved(torch.cat([self.beta * self.v, self.beta * self.k_enter], -1))
        u0, w0 = made.split([w.V, w.K], -1)

        def step(i: int, state: torch.Tensor) -> torch.Tensor:
            return total[i] * state + w.mm(self.k_leave[i].mT, u0[i] - w.mm(w0[i], state))

        return step


def forward(args: Args, opts: Options,
            continues: torch.Tensor | None = None) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple]:
    """``((output, final_state), ())``: the backward needs the inputs only. continues: see :class:`Walker`."""
    w = Walker(args, opts, continues)
    states, state = w.states(args.initial_state)
    output = w.buffer(w.H, w.V, dtype=args.query.dtype)
    # The precision is the caller's choice by the dtype of the inputs: autocast does not reach in here.
    with torch.autocast(w.device.type, enabled=False):
        for group in w.groups:
            x = _Chunks(w, group)
            incoming, state = w.walk(state, states, x.steps(), group)
            u, _ = x.corrections(incoming)
            w.look_at(x.q, x.k, u)
            o = x.decay.inside(x.q, x.k, u).add_(w.mm(x.q * x.decay.enter, incoming))
            w.write(output, o, group)
    return (w.written(output), w.final(state, states)), ()


def _states_before(w: Walker) -> list[torch.Tensor]:
    """The state before each chunk, group by group."""
    states, state = w.states(w.args.initial_state)
    found = []
    for group in w.groups:
        incoming, state = w.walk(state, states, _Chunks(w, group).steps(), group)
        found.append(incoming)
    return found


def backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args``, from those of the output and of the final state (None: zero).

    With ``L = (I + beta A)^-T dU``, the gradient of the substitution's right side, ``-beta L`` is to the pairs of keys
    what the output's gradient is to those of queries with keys: both are linear attention's backward.
    """
    doutput, dfinal = grads
    need_g, need_beta = (opts.needs(args, name) for name in ("g", "beta"))
    w = Walker(args, opts)
    dstates, dstate = w.states(dfinal)
    wanted = ["query", "key", "value", *(["g"] if need_g else []), *(["beta"] if need_beta else [])]
    buffers = {name: w.buffer(*x.shape[2:], dtype=x.dtype) for name in wanted for x in [getattr(args, name)]}
    with torch.autocast(w.device.type, enabled=False):
        for group, state in reversed(list(zip(w.groups, _states_before(w), strict=True))):
            x, do = _Chunks(w, group), w.read(doutput, group)
            decay, total = x.decay, x.decay.total.expand(group.n, *x.decay.total.shape[1:])
            u, left = x.corrections(state)
            w.look_at(x.q, x.k, u, do, state)
            live = w.live(do, (-1,))
            dq, dk, du, da = decay.inside_backward(x.q, x.k, u, do, live, need_g)
            q_enter = x.q * decay.enter
            local, through = x.solved(torch.cat([du, x.k_leave], -1), transposed=True).split([w.V, w.K], -1)
            added, k_beta = w.mm(q_enter.mT, do), x.beta * x.k_enter

            def step(i: int, dstate: torch.Tensor, total: torch.Tensor = total, added: torch.Tensor = added,
                     k_beta: torch.Tensor = k_beta, local: torch.Tensor = local,
                     through: torch.Tensor = through) -> torch.Tensor:
                lost = w.mm(k_beta[i].mT, local[i] + w.mm(through[i], dstate))
                return total[i] * dstate + added[i] - lost

            dincoming, ddstate = w.walk(dstate, dstates, step, group, backwards=True)
            right = x.solved(du + w.mm(x.k_leave, dincoming), transposed=True)
            dv = x.beta * right
            k_own, k_before, _, da_pairs = decay.inside_backward(x.k, x.k, u, -dv, torch.ones_like(live), need_g,
                                                                 own=False)
            dq_enter, dk_enter, dk_leave = w.mm(do, state.mT), -w.mm(dv, state.mT), w.mm(u, dincoming.mT)
            dq.addcmul_(decay.enter, dq_enter)
            dk = (dk + k_own + k_before).addcmul_(decay.enter, dk_enter).addcmul_(decay.leave, dk_leave)
            dq.mul_(opts.softmax_scale)
            if x.norms:
                dq, dk = (r * d - r**3 * row * (row * d).sum(-1, keepdim=True)
                          for row, r, d in zip(x.rows, x.norms, (dq, dk), strict=True))
            made = [dq, dk, dv]
            if da is not None and da_pairs is not None:
                came = q_enter * dq_enter + x.k_enter * dk_enter
                passed = decay.total * state * dincoming
                made.append(da + da_pairs + decay.across_backward(came, x.k_leave * dk_leave, passed))
            if need_beta:
                # The errors are U over beta: their own sum cancels where keys are alike.
                error = torch.where(x.beta == 0, left - w.mm(x.pairs, u), u / x.beta)
                made.append((right * error).sum(-1))
            for buffer, d in zip(buffers.values(), made, strict=True):
                w.write(buffer, d, group)
            dstate = ddstate
    dinitial = None if args.initial_state is None else w.final(dstate, dstates).to(args.initial_state.dtype)
    return Args(**{name: w.written(x) for name, x in buffers.items()}, initial_state=dinitial)


gated_delta_rule = kernel(
    "torch", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates
)
delta_prefill = pool.prefill(__file__, Walk(Args, Options, forward), FIELDS, heuristic, "delta_prefill")
