"""Tokens and the steps of states, in plain operations of either framework: a family's step is one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from keraunos import decay, frontends
from keraunos.kernels.gated_delta_rule.reference import EPSILON
from keraunos.kernels.state_pool.contract import Args, Options


class Tokens(NamedTuple):
    """Arrays that steps read, float32, with all heads: ``[N, T, H, ...]``, or ``[N, H, ...]`` of one token of each."""

    q: Any  # [..., K]; None: commit
    k: Any  # [..., K]
    v: Any  # [..., V]
    decay: Any  # [..., K or 1]; None: no decay
    beta: Any  # [..., 1]; None: linear attention


def read(args: Args, opts: Options) -> Tokens:
    """The tokens of decode, verify or commit."""
    frontend, H, one = frontends.of(args.key), args.states.shape[1], opts.op_id == "decode"
    xp = frontend.xp

    def widened(x: Any) -> Any:
        x = frontend.cast(x[:, None] if one else x, "float32")
        N, T, heads, *dims = x.shape
        return xp.broadcast_to(x[:, :, :, None], (N, T, heads, H // heads, *dims)).reshape(N, T, H, *dims)

    def row(x: Any) -> Any:
        x = widened(x)
        return x / xp.sqrt((x * x).sum(-1)[..., None] + EPSILON) if opts.use_qk_l2norm else x

    gate = args.g
    if args.A_log is not None:
        A_log = args.A_log[:, None] if gate.ndim == args.key.ndim else args.A_log
        gate = decay.gates(frontend.cast(gate, "float32"), A_log, args.dt_bias, opts.lower_bound)
    if gate is not None:
        gate = widened(gate if gate.ndim == args.key.ndim else gate[..., None])
    if args.g_gamma is not None:
        gamma = frontend.cast(args.g_gamma, "float32")[..., None]
        gamma = gamma if gamma.ndim == 2 else gamma[:, None]
        gate = gamma if gate is None else gate + gamma
    k, beta = row(args.key), None
    if gate is not None:
        gate = xp.broadcast_to(xp.exp(gate), (*k.shape[:3], gate.shape[-1]))
    if args.beta is not None:
        beta = widened(args.beta)[..., None]
        beta = decay.sigmoid(beta) if opts.raw_beta else beta
    return Tokens(row(args.query) if opts.reads else None, k, widened(args.value), gate, beta)


def step_of(args: Args) -> Callable[[Any, Tokens], Any]:
    """The step of the call's family: ``(states [N, H, K, V], their tokens) -> states``."""
    return added if args.beta is None else corrected


def added(state: Any, token: Tokens) -> Any:
    """Linear attention's step, ``diag(decay) S + k v^T``."""
    return _decayed(state, token) + token.k[..., None] * token.v[..., None, :]


def corrected(state: Any, token: Tokens) -> Any:
    """The delta rule's step, ``S~ + k (beta (v - S~^T k))^T`` with ``S~ = diag(decay) S``."""
    state = _decayed(state, token)
    error = token.v - (state * token.k[..., None]).sum(-2)
    return state + token.k[..., None] * (token.beta * error)[..., None, :]


def _decayed(state: Any, token: Tokens) -> Any:
    return state if token.decay is None else token.decay[..., None] * state
