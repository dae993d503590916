"""Softmax attention in NumPy float64: what every platform is tested against."""

from __future__ import annotations

import numpy as np

from keraunos.kernels.softmax_attention.contract import keeps, over_groups, sinks_of


def attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, bias: np.ndarray | None = None,
              sinks: np.ndarray | None = None, mask: np.ndarray | None = None, query_segments: np.ndarray | None = None,
              key_segments: np.ndarray | None = None, seed: np.ndarray | None = None,
              query_offset: np.ndarray | None = None, *, softmax_scale: float | None = None,
              soft_cap: float | None = None, causal: bool = False, window: tuple[int, int] | None = None,
              shift: int = 0, dropout: float = 0.0, doutput: np.ndarray | None = None,
              dtype: type[np.floating] = np.float64) -> tuple[np.ndarray, ...]:
    """``(output, weights)`` as ``contract.py`` defines them; with ``doutput``, gradients of the first five arrays.

    Those of bias and sinks are for every sequence, head and query: ``[B, H, T, S]`` and ``[B, H, T, n]``.
    """
    q, k, v = (np.asarray(x).astype(dtype) for x in (query, key, value))
    (B, T, H, K), (S, G, V) = q.shape, v.shape[1:]
    R = H // G
    q, k, v = q.reshape(B, T, G, R, K).transpose(0, 2, 3, 1, 4), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scale = dtype(K**-0.5 if softmax_scale is None else softmax_scale)
    capped = x = scale * np.einsum("bgrtk,bgsk->bgrts", q, k)
    if soft_cap is not None:
        capped = x = dtype(soft_cap) * np.tanh(x / dtype(soft_cap))
    t, s = np.arange(T)[:, None], np.arange(S)[None]
    place = t + shift + (0 if query_offset is None else np.asarray(query_offset, np.int64)[:, None, None, None, None])
    seen = np.ones((1, 1, 1, T, S), bool) & (not causal or s <= place)
    if window is not None:
        seen = seen & (s >= place - window[0]) & (s <= place + window[1])
    if bias is not None:
        x = x + over_groups(np.asarray(bias).astype(dtype), G)
    if mask is not None:
        seen = seen & over_groups(np.asarray(mask), G)
    if query_segments is not None and key_segments is not None:
        own = query_segments[:, None, None, :, None]
        seen = seen & (own == key_segments[:, None, None, None, :]) & (own >= 0)
    x = np.where(seen, x, -np.inf)
    sink = np.zeros((1, G, 1, 0), dtype) if sinks is None else sinks_of(np.asarray(sinks).astype(dtype), G)
    sink = np.broadcast_to(sink[..., None, :], (B, G, R, T, sink.shape[-1]))
    top = np.concatenate([x, sink], -1).max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    x, sink = np.exp(x - top), np.exp(sink - top)
    total = x.sum(-1, keepdims=True) + sink.sum(-1, keepdims=True)
    total = np.where(total > 0, total, 1)
    p, sink, keep = x / total, sink / total, dtype(1)
    if dropout:
        head = np.arange(B * H).astype(np.uint64).reshape(B, G, R, 1, 1)
        seed = np.asarray(seed).astype(np.uint64)
        keep = keeps(seed, head, t.astype(np.uint64), s.astype(np.uint64), dropout) / dtype(1 - dropout)
    weights = p * keep
    output = np.einsum("bgrts,bgsv->btgrv", weights, v).reshape(B, T, H, V)
    if doutput is None:
        return output, weights.reshape(B, H, T, S)
    do = np.asarray(doutput).astype(dtype).reshape(B, T, G, R, V).transpose(0, 2, 3, 1, 4)
    dp = np.einsum("bgrtv,bgsv->bgrts", do, v) * keep
    mean = (p * dp).sum(-1, keepdims=True)
    dx = p * (dp - mean)
    dz = scale * dx * (1 if soft_cap is None else 1 - (capped / dtype(soft_cap)) ** 2)
    dq = np.einsum("bgrts,bgsk->btgrk", dz, k).reshape(B, T, H, K)
    dk, dv = np.einsum("bgrts,bgrtk->bsgk", dz, q), np.einsum("bgrts,bgrtv->bsgv", weights, do)
    return dq, dk, dv, dx.reshape(B, H, T, S), (-sink * mean).reshape(B, H, T, sink.shape[-1])
