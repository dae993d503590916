"""The gated delta rule, token by token in NumPy float64: what every platform is tested against."""

from __future__ import annotations

import numpy as np

from keraunos.kernels.recurrent.inputs import inputs

EPSILON = 1e-6


def normalised(x: np.ndarray) -> np.ndarray:
    """``x / sqrt(sum x^2 + epsilon)``."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(EPSILON))


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
    x = inputs(query, key, value, g, beta, None, initial_state, cu_seqlens, softmax_scale, reverse, dtype)
    if use_qk_l2norm:
        x = x._replace(q=normalised(x.q), k=normalised(x.k))
    output, state = np.zeros_like(x.v), x.states
    for n, (b, tokens) in enumerate(x.sequences):
        for t in tokens:
            decayed = np.exp(x.gate[b, t])[..., None] * state[n]
            error = x.v[b, t] - (decayed * x.k[b, t, :, :, None]).sum(-2)
            state[n] = decayed + x.k[b, t, :, :, None] * (x.beta[b, t, :, None] * error)[:, None, :]
            output[b, t] = x.scale * (state[n] * x.q[b, t, :, :, None]).sum(-2)
    return output, state
