"""The decays of released models: for each head, the log decay of one step back (<= 0), float32 ``[H]``.

Every function takes ``layer_idx`` counted from 0. The layer index may be a JAX tracer or a torch scalar (in a loop over
layers); then the decay is computed with that framework and nothing is range-checked. ``num_heads`` is H. A number out
of its range is a ValueError, a layer index that is no integer a TypeError.

Example:
    >>> from keraunos import decay
    >>> decay.alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
    >>> decay.lightning(4, layer_idx=0, num_layers=2)
    array([-0., -2., -4., -6.], dtype=float32)
"""

from __future__ import annotations

from typing import Any

import numpy as np


def lightning(num_heads: int, layer_idx: Any, num_layers: int) -> Any:
    """``-(8 / H) * (1 - layer_idx / num_layers) * h``: stronger for later heads and earlier layers.

    Source: Lightning Attention-2 (arXiv:2401.04658) with the layer scaling of TransNormerLLM (arXiv:2307.14995).
    """
    check("lightning", num_heads, layer_idx, num_layers)
    return _scale(-8 / num_heads * np.arange(num_heads), 1 - layer_idx / num_layers)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Geometric slopes > 0: ``2 ** (-8 (i + 1) / n)`` for n a power of two.

    Otherwise the slopes of the closest power of two below, followed by every other slope of twice that.
    Source: ALiBi (arXiv:2108.12409).
    """
    check("alibi_slopes", num_heads)
    n = 1 << (int(num_heads).bit_length() - 1)
    slopes = 2.0 ** (-8 * np.arange(1, n + 1) / n)
    extra = 2.0 ** (-8 * np.arange(1, 2 * n + 1, 2) / (2 * n))
    return np.concatenate([slopes, extra])[:num_heads].astype(np.float32)


def minimax(num_heads: int, layer_idx: Any, num_layers: int) -> Any:
    """``-alibi * (1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5)``, with :func:`alibi_slopes`.

    Source: MiniMax-01 (arXiv:2501.08313), as in Hugging Face transformers.
    """
    check("minimax", num_heads, layer_idx, num_layers)
    return _scale(-alibi_slopes(num_heads).astype(np.float64), 1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5)


def minimax_vllm(num_heads: int, layer_idx: Any, num_layers: int) -> Any:
    """``-alibi * (1 - layer_idx / (num_layers - 1) + 1e-5)``, with :func:`alibi_slopes`; two layers or more.

    Source: the same model, as in vLLM.
    """
    check("minimax_vllm", num_heads, layer_idx, num_layers, least=2)
    return _scale(-alibi_slopes(num_heads).astype(np.float64), 1 - layer_idx / (num_layers - 1) + 1e-5)


def bailing(num_heads: int, layer_idx: Any, num_layers: int) -> Any:
    """``-alibi * (1 - (layer_idx - 1) / (num_layers - 1) + 1e-5)``, with :func:`alibi_slopes`; two layers or more.

    Source: the code published with the weights of Ring and Ling linear, in which the first layer is 0, too.
    """
    check("bailing", num_heads, layer_idx, num_layers, least=2)
    return _scale(-alibi_slopes(num_heads).astype(np.float64), 1 - (layer_idx - 1) / (num_layers - 1) + 1e-5)


def _scale(per_head: np.ndarray, factor: Any) -> Any:
    if isinstance(factor, float | np.floating):
        return (per_head * factor).astype(np.float32)
    # A traced layer index: its own framework does the product.
    per_head = per_head.astype(np.float32)
    return factor * (factor.new_tensor(per_head) if hasattr(factor, "new_tensor") else per_head)


def check(name: str, num_heads: int, layer_idx: Any = 0, num_layers: int = 1, least: int = 1) -> None:
    """Refuse a number out of its range (ValueError) or of a wrong type (TypeError), in the name of a function."""
    if not isinstance(num_heads, int | np.integer) or isinstance(num_heads, bool) or num_heads < 1:
        raise ValueError(f"{name}: num_heads is {num_heads!r}; expected an integer >= 1")
    if not isinstance(num_layers, int | np.integer) or isinstance(num_layers, bool) or num_layers < least:
        raise ValueError(f"{name}: num_layers is {num_layers!r}; expected an integer >= {least}")
    if isinstance(layer_idx, int):
        whole = not isinstance(layer_idx, bool)
    else:
        kind = str(getattr(layer_idx, "dtype", None)).removeprefix("torch.")
        whole = kind.startswith(("int", "uint")) and not layer_idx.ndim
    if not whole:
        raise TypeError(f"{name}: layer_idx is {layer_idx!r}; expected an integer (0-based)")
    if isinstance(layer_idx, int | np.integer | np.ndarray) and not 0 <= layer_idx < num_layers:
        raise ValueError(
            f"{name}: layer_idx is {layer_idx}; expected 0 <= layer_idx < num_layers = {num_layers} (0-based)"
        )
