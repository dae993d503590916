"""The gated delta rule, token by token in NumPy float64: what every platform is tested against."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

EPSILON = 1e-6


class Inputs(NamedTuple):
    """The arrays of a call, with all heads, and the tokens of each sequence in the order of the recurrence."""

    q: np.ndarray  # [B, T, H, K], normalised if asked for
    k: np.ndarray  # [B, T, H, K]
    v: np.ndarray  # [B, T, H, V]
    gate: np.ndarray  # [B, T, H, K], log
    beta: np.ndarray  # [B, T, H]
    scale: np.ndarray
    states: np.ndarray  # [N, H, K, V]
    sequences: list[tuple[int, list[int]]]  # row of the batch, tokens


def inputs(query: np.ndarray, key: np.ndarray, value: np.ndarray, g: np.ndarray | None, beta: np.ndarray | None,
           initial_state: np.ndarray | None, cu_seqlens: np.ndarray | None, softmax_scale: float | None,
           use_qk_l2norm: bool, reverse: bool, dtype: type[np.floating]) -> Inputs:
    """Widen the arrays of a call to all heads."""
    (B, T, _, K), V = np.shape(query), np.shape(value)[-1]
    H = max(np.shape(x)[2] for x in (query, key, value, g, beta) if x is not None)
    q, k, v = (of_all_heads(x, H, dtype) for x in (query, key, value))
    if use_qk_l2norm:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + dtype(EPSILON)) for x in (q, k))
    gate = np.zeros((B, T, H, K), dtype)
    if g is not None:
        gates = of_all_heads(g, H, dtype)
        gate = gate + (gates if gates.ndim == 4 else gates[..., None])
    strength = np.ones((B, T, H), dtype) if beta is None else of_all_heads(beta, H, dtype)
    scale = np.asarray(K**-0.5 if softmax_scale is None else softmax_scale, dtype)
    ends = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        ends = [(0, int(a), int(b)) for a, b in itertools.pairwise(cu_seqlens)]
    states = np.zeros((len(ends), H, K, V), dtype) if initial_state is None else np.array(initial_state).astype(dtype)
    sequences = [(b, list(range(start, end))[:: -1 if reverse else 1]) for b, start, end in ends]
    return Inputs(q, k, v, gate, strength, scale, states, sequences)


def gated_delta_rule(query: np.ndarray, key: np.ndarray, value: np.ndarray, g: np.ndarray | None = None,
                     beta: np.ndarray | None = None, initial_state: np.ndarray | None = None,
                     cu_seqlens: np.ndarray | None = None, *, softmax_scale: float | None = None,
                     use_qk_l2norm: bool = False, reverse: bool = False,
                     dtype: type[np.floating] = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """Run ``S~ = diag(exp(g_t)) S_{t-1}``, ``u_t = beta_t (v_t - S~^T k_t)``, ``S_t = S~ + k_t u_t^T``.

    ``o_t = softmax_scale * S_t^T q_t``.

    Args:
        query, key, value: ``[B, T, heads, K]``, ``[B, T, heads, K]``, ``[B, T, heads, V]``; of these, of g and of beta
            each has its own number of heads, which divides H, the largest: head h reads head ``h // (H // heads)``.
        g: log, <= 0: ``[B, T, heads, K]`` or ``[B, T, heads]``; beta: ``[B, T, heads]``, ones if None.
        initial_state: ``[N, H, K, V]``; cu_seqlens: ``[N + 1]``, needs ``B == 1``.
        use_qk_l2norm: query and key are divided by ``sqrt(sum x^2 + 1e-6)`` first.

    Returns:
        ``(output [B, T, H, V], final_state [N, H, K, V])`` in ``dtype``, in which all is computed.
    """
    x = inputs(query, key, value, g, beta, initial_state, cu_seqlens, softmax_scale, use_qk_l2norm, reverse, dtype)
    output, state = np.zeros_like(x.v), x.states
    for n, (b, tokens) in enumerate(x.sequences):
        for t in tokens:
            decayed = np.exp(x.gate[b, t])[..., None] * state[n]
            error = x.v[b, t] - (decayed * x.k[b, t, :, :, None]).sum(-2)
            state[n] = decayed + x.k[b, t, :, :, None] * (x.beta[b, t, :, None] * error)[:, None, :]
            output[b, t] = x.scale * (state[n] * x.q[b, t, :, :, None]).sum(-2)
    return output, state


def of_all_heads(x: np.ndarray, H: int, dtype: type[np.floating]) -> np.ndarray:
    """``[B, T, H, ...]`` of an array with fewer heads."""
    x = np.asarray(x).astype(dtype)
    return np.repeat(x, H // x.shape[2], axis=2)
