"""The gradient of the gated linear recurrence, token by token in NumPy float64."""

from __future__ import annotations

import itertools

import numpy as np

from keraunos.kernels.linear_attention.reference import of_all_heads


def linear_attention_vjp(query: np.ndarray, key: np.ndarray, value: np.ndarray, g: np.ndarray | None,
                         g_gamma: np.ndarray | None, initial_state: np.ndarray | None, cu_seqlens: np.ndarray | None,
                         doutput: np.ndarray, dfinal_state: np.ndarray | None, *, softmax_scale: float | None = None,
                         reverse: bool = False, dtype: type[np.floating] = np.float64) -> tuple[np.ndarray | None, ...]:
    """Gradients of :func:`reference.linear_attention` for its six float arguments, None where one is None.

    With ``dS_t`` the gradient of ``S_t`` (from ``o_t`` and from everything later): ``dq_t = scale S_t do_t``,
    ``dk_t = dS_t v_t``, ``dv_t = dS_t^T k_t``, ``dg_t = exp(g_t) * sum_v(S_{t-1} * dS_t)``, ``dS_{t-1}`` gets
    ``exp(g_t) * dS_t``.
    """
    (B, T, H, V), K = np.shape(doutput), np.shape(query)[-1]
    q, k, v, do = (of_all_heads(x, H, dtype) for x in (query, key, value, doutput))
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
    dq, dk, dv, dgate = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros_like(gate)
    dstates = np.zeros((len(sequences), H, K, V), dtype)
    if dfinal_state is not None:
        dstates = np.array(dfinal_state).astype(dtype)
    for n, (b, start, end) in enumerate(sequences):
        tokens = list(range(start, end))[:: -1 if reverse else 1]
        state = np.zeros((H, K, V), dtype)
        if initial_state is not None:
            state = np.array(initial_state[n]).astype(dtype)
        before = []
        for t in tokens:
            before.append(state)
            state = np.exp(gate[b, t])[..., None] * state + k[b, t, :, :, None] * v[b, t, :, None, :]
            dq[b, t] = scale * (state * do[b, t, :, None, :]).sum(-1)
        for t, state in zip(reversed(tokens), reversed(before), strict=True):
            dstate = dstates[n] + scale * q[b, t, :, :, None] * do[b, t, :, None, :]
            dk[b, t] = (dstate * v[b, t, :, None, :]).sum(-1)
            dv[b, t] = (dstate * k[b, t, :, :, None]).sum(-2)
            decayed = np.exp(gate[b, t])[..., None] * dstate
            dgate[b, t] = (decayed * state).sum(-1)
            dstates[n] = decayed
    dgamma = None
    if g_gamma is not None:
        dgamma = dgate.sum((1, 3)) if np.ndim(g_gamma) == 2 else dgate.sum((0, 1, 3))
    dg = dgate if g is not None and np.ndim(g) == 4 else dgate.sum(-1)
    own = map(_shared, (dq, dk, dv, dg), (query, key, value, g))
    return *own, dgamma, None if initial_state is None else dstates


def _shared(dx: np.ndarray, x: np.ndarray | None) -> np.ndarray | None:
    """The gradient of ``x``, summed over the heads that share one of its own."""
    if x is None:
        return None
    (B, T, H), n = dx.shape[:3], np.shape(x)[2]
    return dx.reshape(B, T, n, H // n, *dx.shape[3:]).sum(3)
