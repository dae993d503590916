"""The arrays that the references of recurrences walk over, token by token in NumPy."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np


class Inputs(NamedTuple):
    """The arrays of a call, with all heads, and the tokens of each sequence in the order of the recurrence."""

    q: np.ndarray  # [B, T, H, K]
    k: np.ndarray  # [B, T, H, K]
    v: np.ndarray  # [B, T, H, V]
    gate: np.ndarray  # [B, T, H, K], log
    beta: np.ndarray  # [B, T, H]
    scale: np.ndarray
    states: np.ndarray  # [N, H, K, V]
    sequences: list[tuple[int, list[int]]]  # row of the batch, tokens


def inputs(query: np.ndarray, key: np.ndarray, value: np.ndarray, g: np.ndarray | None, beta: np.ndarray | None,
           g_gamma: np.ndarray | None, initial_state: np.ndarray | None, cu_seqlens: np.ndarray | None,
           softmax_scale: float | None, reverse: bool, dtype: type[np.floating]) -> Inputs:
    """Widen the arrays of a call to all heads and the dtype; absent gates are 0, absent betas 1."""
    (B, T, _, K), V = np.shape(query), np.shape(value)[-1]
    H = max(np.shape(x)[2] for x in (query, key, value, g, beta) if x is not None)
    q, k, v = (of_all_heads(x, H, dtype) for x in (query, key, value))
    gate = np.zeros((B, T, H, K), dtype)
    if g is not None:
        gates = of_all_heads(g, H, dtype)
        gate = gate + (gates if gates.ndim == 4 else gates[..., None])
    if g_gamma is not None:
        gate = gate + np.broadcast_to(np.asarray(g_gamma).astype(dtype), (B, H))[:, None, :, None]
    strength = np.ones((B, T, H), dtype) if beta is None else of_all_heads(beta, H, dtype)
    scale = np.asarray(K**-0.5 if softmax_scale is None else softmax_scale, dtype)
    ends = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        ends = [(0, int(a), int(b)) for a, b in itertools.pairwise(cu_seqlens)]
    states = np.zeros((len(ends), H, K, V), dtype) if initial_state is None else np.array(initial_state).astype(dtype)
    sequences = [(b, list(range(start, end))[:: -1 if reverse else 1]) for b, start, end in ends]
    return Inputs(q, k, v, gate, strength, scale, states, sequences)


def of_all_heads(x: np.ndarray, H: int, dtype: type[np.floating]) -> np.ndarray:
    """``[B, T, H, ...]`` of an array with fewer heads."""
    x = np.asarray(x).astype(dtype)
    return np.repeat(x, H // x.shape[2], axis=2)


def of_own_heads(dx: np.ndarray, x: np.ndarray | None) -> np.ndarray | None:
    """The gradient of ``x``, summed over the heads that share one of its own."""
    if x is None:
        return None
    (B, T, H), n = dx.shape[:3], np.shape(x)[2]
    return dx.reshape(B, T, n, H // n, *dx.shape[3:]).sum(3)
