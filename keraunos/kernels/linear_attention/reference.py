"""The gated linear recurrence, token by token in NumPy float64: what every platform is tested against."""

import itertools

import numpy as np


def linear_attention(query, key, value, g=None, g_gamma=None, initial_state=None, cu_seqlens=None,
                     *, softmax_scale=None, reverse=False, dtype=np.float64):  # fmt: skip
    """Run ``S_t = diag(exp(g_t + g_gamma)) S_{t-1} + k_t v_t^T`` and ``o_t = softmax_scale * S_t^T q_t``.

    Args:
        query: ``[B, T, H, K]``; key: ``[B, T, G, K]``; value: ``[B, T, G, V]``.
        g: log, <= 0: ``[B, T, H, K]`` or ``[B, T, H]``; g_gamma: log, <= 0: ``[H]`` or ``[B, H]``.
        initial_state: ``[N, H, K, V]``; cu_seqlens: ``[N + 1]``, needs ``B == 1``.

    Returns:
        ``(output [B, T, H, V], final_state [N, H, K, V])`` in ``dtype``, in which all is computed.
    """
    q, k, v = (np.asarray(x).astype(dtype) for x in (query, key, value))
    (B, T, H, K), V = q.shape, v.shape[-1]
    k, v = (np.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    scale = np.asarray(K**-0.5 if softmax_scale is None else softmax_scale, dtype)
    gate = np.zeros((B, T, H, K), dtype)
    if g is not None:
        gate = gate + np.asarray(g).astype(dtype).reshape(*np.shape(g), *[1] * (4 - np.ndim(g)))
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
