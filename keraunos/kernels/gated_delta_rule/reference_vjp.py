"""The gradient of the gated delta rule, token by token in NumPy float64."""

from __future__ import annotations

import numpy as np

from keraunos.kernels.gated_delta_rule.reference import EPSILON, normalised
from keraunos.kernels.recurrent.inputs import inputs, of_all_heads, of_own_heads


def gated_delta_rule_vjp(query: np.ndarray, key: np.ndarray, value: np.ndarray, g: np.ndarray | None,
                         beta: np.ndarray | None, initial_state: np.ndarray | None, cu_seqlens: np.ndarray | None,
                         doutput: np.ndarray, dfinal_state: np.ndarray | None, *, softmax_scale: float | None = None,
                         use_qk_l2norm: bool = False, reverse: bool = False,
                         dtype: type[np.floating] = np.float64) -> tuple[np.ndarray | None, ...]:
    """Gradients of :func:`reference.gated_delta_rule` for its six float arguments, None where one is None.

    With ``dS_t`` the gradient of ``S_t`` (from ``o_t`` and from everything later) and ``e_t = v_t - S~^T k_t``:
    ``du_t = dS_t^T k_t``, ``dbeta_t = du_t . e_t``, ``dv_t = beta_t du_t``, ``dk_t = dS_t u_t - S~ dv_t``,
    ``dS~ = dS_t - k_t dv_t^T``, ``dg_t = sum_v(dS~ * S~)``, and ``dS_{t-1}`` gets ``exp(g_t) * dS~``.
    """
    x = inputs(query, key, value, g, beta, None, initial_state, cu_seqlens, softmax_scale, reverse, dtype)
    if use_qk_l2norm:
        x = x._replace(q=normalised(x.q), k=normalised(x.k))
    do = of_all_heads(doutput, x.v.shape[2], dtype)
    dq, dk, dv, dgate, dbeta = (np.zeros_like(a) for a in (x.q, x.k, x.v, x.gate, x.beta))
    dstates = np.zeros_like(x.states) if dfinal_state is None else np.array(dfinal_state).astype(dtype)
    for n, (b, tokens) in enumerate(x.sequences):
        state, seen = x.states[n], []
        for t in tokens:
            decayed = np.exp(x.gate[b, t])[..., None] * state
            error = x.v[b, t] - (decayed * x.k[b, t, :, :, None]).sum(-2)
            u = x.beta[b, t, :, None] * error
            state = decayed + x.k[b, t, :, :, None] * u[:, None, :]
            dq[b, t] = x.scale * (state * do[b, t, :, None, :]).sum(-1)
            seen.append((decayed, error, u))
        for t, (decayed, error, u) in zip(reversed(tokens), reversed(seen), strict=True):
            dstate = dstates[n] + x.scale * x.q[b, t, :, :, None] * do[b, t, :, None, :]
            du = (dstate * x.k[b, t, :, :, None]).sum(-2)
            dbeta[b, t] = (du * error).sum(-1)
            dv[b, t] = x.beta[b, t, :, None] * du
            dk[b, t] = (dstate * u[:, None, :]).sum(-1) - (decayed * dv[b, t, :, None, :]).sum(-1)
            ddecayed = dstate - x.k[b, t, :, :, None] * dv[b, t, :, None, :]
            dgate[b, t] = (ddecayed * decayed).sum(-1)
            dstates[n] = np.exp(x.gate[b, t])[..., None] * ddecayed
    if use_qk_l2norm:
        dq, dk = (_unnormalised(d, of_all_heads(a, d.shape[2], dtype)) for d, a in ((dq, query), (dk, key)))
    dg = dgate if g is not None and np.ndim(g) == 4 else dgate.sum(-1)
    own = map(of_own_heads, (dq, dk, dv, dg, dbeta), (query, key, value, g, beta))
    return *own, None if initial_state is None else dstates


def _unnormalised(d: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The gradient of x from that of ``x / sqrt(sum x^2 + epsilon)``."""
    r = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(EPSILON))
    return r * d - r**3 * x * (x * d).sum(-1, keepdims=True)
