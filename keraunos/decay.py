"""The decays of released models: for each head, the log decay of one step back (<= 0), float32 ``[H]``.

Both frameworks take what a function returns as ``log_decay=`` and ``g_gamma=``: a NumPy array, a constant of the call.
To keep it in a module, convert it once: ``register_buffer("decay", torch.from_numpy(decay))`` in PyTorch,
``jnp.asarray(decay)`` in JAX.

``num_heads`` is H, and ``layer_idx`` counts from 0. If the layer index is an array, such as a tracer in a loop over
layers, the decay is an array of the same framework, and the range is checked if the host knows the value. A number out
of its range raises ValueError, a layer index that is not an integer TypeError.

- :func:`lightning`: fla's ``chunk_lightning_attn``, and :func:`keraunos.lightning_attention` of a layer;
- :func:`minimax`: MiniMax-Text-01 in Hugging Face transformers;
- :func:`minimax_vllm`: MiniMax-Text-01 in vLLM and in the code published with its weights; Ring linear and Ling linear
  in vLLM and SGLang;
- :func:`bailing`: Ring linear and Ling linear in the code published with their weights;
- :func:`minicpm_sala`: MiniCPM-SALA in the code published with its weights, and in SGLang;
- :func:`retnet`: RetNet, and fla's ``chunk_retention``.

Two more make the log gates of tokens, with the gradients of their framework, as :func:`keraunos.gated_delta_rule` takes
them: :func:`gated_deltanet` for Qwen3-Next and Qwen3.5, :func:`kimi` for Kimi Linear.

Example:
    >>> from keraunos import decay
    >>> decay.alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
    >>> decay.lightning(4, layer_idx=0, num_layers=2)
    array([-0., -2., -4., -6.], dtype=float32)
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array


def lightning(num_heads: int, layer_idx: int | Array, num_layers: int) -> Array:
    """``-(8 / H) * (1 - layer_idx / num_layers) * h`` for h = 0 to H - 1: stronger for later heads, earlier layers.

    :func:`keraunos.lightning_attention` and fla's ``chunk_lightning_attn`` take it for a layer.

    Source: Lightning Attention-2 (arXiv:2401.04658) with the layer scaling of TransNormerLLM (arXiv:2307.14995).
    """
    check("lightning", num_heads, layer_idx, num_layers)
    return _scale(-8 / num_heads * np.arange(num_heads), 1 - layer_idx / num_layers)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Positive slopes ``[H]``: ``2 ** (-8 (i + 1) / H)`` for head i if H is a power of two.

    If it is not, the first n heads have the slopes of n, the largest power of two below H, and the others have every
    second slope of ``2 n``. The decays below are these slopes with a minus.

    Source: ALiBi (arXiv:2108.12409).
    """
    check("alibi_slopes", num_heads)
    n = 1 << (int(num_heads).bit_length() - 1)
    slopes = 2.0 ** (-8 * np.arange(1, n + 1) / n)
    extra = 2.0 ** (-8 * np.arange(1, 2 * n + 1, 2) / (2 * n))
    return np.concatenate([slopes, extra])[:num_heads].astype(np.float32)


def minimax(num_heads: int, layer_idx: int | Array, num_layers: int) -> Array:
    """``-(2 ** (-8 (i + 1) / H)) * (1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5)`` for head i, for every H.

    MiniMax-Text-01 in Hugging Face transformers (``MiniMaxLightningAttention.get_slope_rate``). Where H is no power of
    two these are not ALiBi's slopes, which :func:`minimax_vllm` has.

    Source: MiniMax-01 (arXiv:2501.08313).
    """
    check("minimax", num_heads, layer_idx, num_layers)
    slopes = 2.0 ** (-8 * np.arange(1, num_heads + 1) / num_heads)
    return _scale(-slopes, 1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5)


def minimax_vllm(num_heads: int, layer_idx: int | Array, num_layers: int) -> Array:
    """``-alibi * (1 - layer_idx / (num_layers - 1) + 1e-5)``, with :func:`alibi_slopes`; of one layer, ``1 + 1e-5``.

    MiniMax-Text-01 in vLLM, and in the code published with its weights (which takes two layers or more); Ring linear
    and Ling linear in vLLM and SGLang, where their own code has :func:`bailing`.

    Source: MiniMax-01 (arXiv:2501.08313).
    """
    check("minimax_vllm", num_heads, layer_idx, num_layers)
    # With one layer its index is 0.
    return _scale(-alibi_slopes(num_heads).astype(np.float64), 1 - layer_idx / max(num_layers - 1, 1) + 1e-5)


def bailing(num_heads: int, layer_idx: int | Array, num_layers: int) -> Array:
    """``-alibi * (1 - (layer_idx - 1) / (num_layers - 1) + 1e-5)``, with :func:`alibi_slopes`; two layers or more.

    The code published with the weights of Ring linear and Ling linear (Bailing), in which the first layer is 0, too:
    its decays are scaled by more than 1. vLLM and SGLang run these models with :func:`minimax_vllm`.

    Source: Every Attention Matters (arXiv:2510.19338).
    """
    check("bailing", num_heads, layer_idx, num_layers, least=2)
    return _scale(-alibi_slopes(num_heads).astype(np.float64), 1 - (layer_idx - 1) / (num_layers - 1) + 1e-5)


def minicpm_sala(num_heads: int) -> np.ndarray:
    """``-alibi``, with :func:`alibi_slopes`: the same in every layer.

    The lightning layers of MiniCPM-SALA, in the code published with the weights and in SGLang.
    """
    check("minicpm_sala", num_heads)
    return -alibi_slopes(num_heads)


def retnet(num_heads: int) -> np.ndarray:
    """``log(1 - 2 ** (-5 - h))`` for head h: from 1/32 forgotten at each step to next to nothing, in every layer.

    Source: Retentive Network (arXiv:2307.08621).
    """
    check("retnet", num_heads)
    return np.log1p(-(2.0 ** (-5 - np.arange(num_heads)))).astype(np.float32)


def gated_deltanet(a: Array, A_log: Array, dt_bias: Array | None = None) -> Array:
    """The log gates ``-exp(A_log) * softplus(a + dt_bias)`` of Gated DeltaNet: one for each token and head.

    Args:
        a: ``[..., H]``; A_log, dt_bias: ``[H]``, arrays of one framework. softplus is linear past 20.

    Returns:
        ``[..., H]``, float32 (float64 for a float64 ``a``), <= 0.

    Raises:
        ValueError: a shape does not fit.

    Source: Gated Delta Networks (arXiv:2412.06464).
    """
    _fit("gated_deltanet", a.shape[-1:], A_log=A_log, dt_bias=dt_bias)
    return gates(a, A_log, dt_bias, 0.0)


def kimi(a: Array, A_log: Array, dt_bias: Array | None = None, lower_bound: float | None = None) -> Array:
    """The log gates ``-exp(A_log) * softplus(a + dt_bias)`` of Kimi Delta Attention: one for each key dimension.

    Args:
        a: ``[..., H, K]``; A_log: H values, of any shape; dt_bias: H * K values.
        lower_bound: below 0: then they are ``lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``.

    Returns:
        ``[..., H, K]``, float32 (float64 for a float64 ``a``), <= 0.

    Raises:
        ValueError: a shape does not fit, or the bound is not below 0.

    Source: Kimi Linear (arXiv:2510.26692).
    """
    H, K = a.shape[-2:]
    _fit("kimi", (H,), A_log=A_log)
    _fit("kimi", (H, K), dt_bias=dt_bias)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"kimi: lower_bound is {lower_bound!r}; expected a number below 0")
    return gates(a, A_log.reshape(H, 1), dt_bias if dt_bias is None else dt_bias.reshape(H, K), lower_bound or 0.0)


def gates(a: Array, A_log: Array, dt_bias: Array | None, lower_bound: float) -> Array:
    """The log gates of arrays that can be broadcast to the shape of ``a``; lower_bound: 0.0 if there is none."""
    frontend = frontends.of(a)
    xp, dtype = frontend.xp, "float64" if frontend.dtype_name(a) == "float64" else "float32"
    x, rate = frontend.cast(a, dtype), xp.exp(frontend.cast(A_log, dtype))
    if dt_bias is not None:
        x = x + frontend.cast(dt_bias, dtype)
    if lower_bound:
        return lower_bound * sigmoid(rate * x)
    # Of the branch that is not taken, the exponential would be infinite, and its gradient no number.
    return -rate * xp.where(x > 20, x, xp.log1p(xp.exp(xp.clip(x, None, 20))))


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))``, its gradient finite everywhere."""
    xp = frontends.of(x).xp
    return 1 / (1 + xp.exp(xp.clip(-x, None, 80)))


def _fit(name: str, shape: tuple[int, ...], **arrays: Array | None) -> None:
    for argument, x in arrays.items():
        if x is not None and math.prod(x.shape) != math.prod(shape):
            raise ValueError(f"{name}: {argument} has shape {tuple(x.shape)}; expected {tuple(shape)}, like a")


def _scale(per_head: np.ndarray, factor: Any) -> Array:
    if isinstance(factor, float | np.floating):
        return (per_head * factor).astype(np.float32)
    # A traced layer index: its own framework does the product.
    per_head = per_head.astype(np.float32)
    if hasattr(factor, "new_tensor"):
        return factor * sys.modules["torch"].as_tensor(per_head, device=factor.device)
    return factor * per_head


def check(name: str, num_heads: int, layer_idx: int | Array = 0, num_layers: int = 1, least: int = 1) -> None:
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
    known = frontends.number(layer_idx)
    if known is not None and not 0 <= known < num_layers:
        raise ValueError(
            f"{name}: layer_idx is {layer_idx}; expected 0 <= layer_idx < num_layers = {num_layers} (0-based)"
        )
