"""The gated linear recurrence, token by token in NumPy float64: what every platform is tested against."""

from __future__ import annotations

import numpy as np

from keraunos.kernels.recurrent.inputs import inputs


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
    x = inputs(query, key, value, g, None, g_gamma, initial_state, cu_seqlens, softmax_scale, reverse, dtype)
    output, state = np.zeros_like(x.v), x.states
    for n, (b, tokens) in enumerate(x.sequences):
        for t in tokens:
            state[n] = np.exp(x.gate[b, t])[..., None] * state[n] + x.k[b, t, :, :, None] * x.v[b, t, :, None, :]
            output[b, t] = x.scale * (state[n] * x.q[b, t, :, :, None]).sum(-2)
    return output, state
