"""The gated linear recurrence, token by token in NumPy float64: what every platform is tested against."""

from __future__ import annotations

import itertools

import numpy as np


def linear_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, g: np.ndarray | None = None,
                     g_gamma: np.ndarray | None = None, initial_state: np.ndarray | None = None,
                     cu_seqlens: np.ndarray | None = None, *, softmax_scale: float | None = None, reverse: bool = False,
                     dtype: type[np.floating] = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """Run ``S_t = diag(exp(g_t + g_gamma)) S_{t-1} + k_t v_t^T`` and ``o_t = softmax_scale * S_t^T q_t``.

    Args:
        query, key, value: ``[B, T, heads, K]``, ``[B, T, heads, K]``, ``[B, T, heads, V]``; of these and of g each has
            its own number of heads, which divides H, the largest: head h reads head ``h // (H // heads)``.
        g: log, <= 0: ``[B, T, heads, K]`` or ``[B, T, heads]``; g_gamma: log, <= 0: ``[H]`` or ``[B, H]``.
        initial_state: ``[N, H, K, V]``; cu_seqlens: ``[N + 1]``, needs ``B == 1``.

    Returns:
        ``(output [B, T, H, V], final_state [N, H, K, V])`` in ``dtype``, in which all is computed.
    """
    (B, T, _, K), V = np.shape(query), np.shape(value)[-1]
    H = max(np.shape(x)[2] for x in (query, key, value, g) if x is not None)
    q, k, v = (of_all_heads(x, H, dtype) for x in (query, key, value))
    scale = np.asarray(K**-0.5 if softmax_scale is None else softmax_scale, dtype)
    gate = np.zeros((B, T, H, K), dtype)
    if g is not None:
        gates = of_all_heads(g, H, dtype)
        gate = gate + (gates if gates.ndim == 4 else gates[..., None])
    if g_gamma is not None:
        gate = gate + np.broadcast_to(np.asarray(g_gamma).astype(dtype), (B, H))[:, None, :, None]
    sequences = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        sequences = [(0, int(a), int(b)) for a, b in itertools.pairwise(cu_seqlens)]
    state = np.zeros((len(sequences), H, K, V), dtype)
    if initial_state is not None:
        state = np.array(initial_state).astype(dtype)
    output = np.zeros((B, T, H, V), dtype)
    for n, (b, start, end) in enumerate(sequences):
        for t in range(start, end)[:: -1 if reverse else 1]:
            state[n] = np.exp(gate[b, t])[..., None] * state[n] + k[b, t, :, :, None] * v[b, t, :, None, :]
            output[b, t] = scale * (state[n] * q[b, t, :, :, None]).sum(-2)
    return output, state


def of_all_heads(x: np.ndarray, H: int, dtype: type[np.floating]) -> np.ndarray:
    """``[B, T, H, ...]`` of an array with fewer heads."""
    x = np.asarray(x).astype(dtype)
    return np.repeat(x, H // x.shape[2], axis=2)
