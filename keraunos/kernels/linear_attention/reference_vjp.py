"""The gradient of the gated linear recurrence, token by token in NumPy float64."""

from __future__ import annotations

import numpy as np

from keraunos.kernels.recurrent.inputs import inputs, of_all_heads, of_own_heads


def linear_attention_vjp(query: np.ndarray, key: np.ndarray, value: np.ndarray, g: np.ndarray | None,
                         g_gamma: np.ndarray | None, initial_state: np.ndarray | None, cu_seqlens: np.ndarray | None,
                         doutput: np.ndarray, dfinal_state: np.ndarray | None, *, softmax_scale: float | None = None,
                         reverse: bool = False, dtype: type[np.floating] = np.float64) -> tuple[np.ndarray | None, ...]:
    """Gradients of :func:`reference.linear_attention` for its six float arguments, None where one is None.

    With ``dS_t`` the gradient of ``S_t`` (from ``o_t`` and from everything later): ``dq_t = scale S_t do_t``,
    ``dk_t = dS_t v_t``, ``dv_t = dS_t^T k_t``, ``dg_t = exp(g_t) * sum_v(S_{t-1} * dS_t)``, ``dS_{t-1}`` gets
    ``exp(g_t) * dS_t``.
    """
    x = inputs(query, key, value, g, None, g_gamma, initial_state, cu_seqlens, softmax_scale, reverse, dtype)
    do = of_all_heads(doutput, x.v.shape[2], dtype)
    dq, dk, dv, dgate = (np.zeros_like(a) for a in (x.q, x.k, x.v, x.gate))
    dstates = np.zeros_like(x.states) if dfinal_state is None else np.array(dfinal_state).astype(dtype)
    for n, (b, tokens) in enumerate(x.sequences):
        state, before = x.states[n], []
        for t in tokens:
            before.append(state)
            state = np.exp(x.gate[b, t])[..., None] * state + x.k[b, t, :, :, None] * x.v[b, t, :, None, :]
            dq[b, t] = x.scale * (state * do[b, t, :, None, :]).sum(-1)
        for t, state in zip(reversed(tokens), reversed(before), strict=True):
            dstate = dstates[n] + x.scale * x.q[b, t, :, :, None] * do[b, t, :, None, :]
            dk[b, t] = (dstate * x.v[b, t, :, None, :]).sum(-1)
            dv[b, t] = (dstate * x.k[b, t, :, :, None]).sum(-2)
            decayed = np.exp(x.gate[b, t])[..., None] * dstate
            dgate[b, t] = (decayed * state).sum(-1)
            dstates[n] = decayed
    dgamma = None
    if g_gamma is not None:
        dgamma = dgate.sum((1, 3)) if np.ndim(g_gamma) == 2 else dgate.sum((0, 1, 3))
    dg = dgate if g is not None and np.ndim(g) == 4 else dgate.sum(-1)
    own = map(of_own_heads, (dq, dk, dv, dg), (query, key, value, g))
    return *own, dgamma, None if initial_state is None else dstates
