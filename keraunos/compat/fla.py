"""flash-linear-attention's functions, computed by keraunos: names, arguments, defaults and results of fla 0.6.0.

A model changes its import, ``from keraunos.compat.fla import chunk_gla`` in place of ``from fla.ops.gla import
chunk_gla``, and nothing else. fla has several functions for one formula, which differ in how they compute; here they
are one function, and the platform is chosen as in every call of :func:`keraunos.gla_attention`. Arrays are tensors
``[B, T, H, ...]``; ``docs/fla.md`` has the differences.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from keraunos import decay, frontends
from keraunos.frontends.array_types import Array
from keraunos.modules.gla_attention import gla_attention

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__all__ = [
    "chunk_gla",
    "chunk_lightning_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_chunk_gla",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_gla",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "parallel_retention",
    "parallel_simple_gla",
]


def _run(
    name: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    old: dict[str, Any],
    *,
    g: Tensor | None = None,
    g_gamma: Array | None = None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The call of ``name``; ``old``: what it was given under names that its signature does not have."""
    if "head_first" in old:
        raise DeprecationWarning(f"{name}: head_first belongs to older versions; expected tensors [B, T, H, ...]")
    if "transpose_state_layout" in old:
        if state_v_first:
            raise ValueError(
                f"{name}: got state_v_first and transpose_state_layout, its old name; expected one of both"
            )
        message = f"{name}: transpose_state_layout is the old name of state_v_first"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        state_v_first = bool(old.pop("transpose_state_layout"))
    size = old.pop("chunk_size", None)
    if size is not None and (not isinstance(size, int) or size < 1 or size & (size - 1)):
        raise ValueError(f"{name}: chunk_size is {size!r}; expected a power of two")
    if old:
        raise TypeError(f"{name}: got an unexpected argument {next(iter(old))!r}")
    shape = tensors[0].shape
    if len(shape) == 4 and 1 < shape[1] < shape[2] and cu_seqlens is None:
        message = f"{name}: q has fewer tokens than heads, {shape[1]} < {shape[2]}; expected [B, T, H, K]"
        warnings.warn(f"{message}, not [B, H, T, K]", stacklevel=3)
    options: Any = dict(softmax_scale=scale, reverse=reverse, return_state=True, state_v_first=state_v_first)
    if output_final_state:
        return gla_attention(*tensors, g, g_gamma, initial_state, cu_seqlens, **options)
    options["return_state"] = False
    return gla_attention(*tensors, g, g_gamma, initial_state, cu_seqlens, **options), None


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a gate per token and head, :func:`keraunos.gla_attention` with ``g [B, T, H]``.

    Args:
        q, k: ``[B, T, H, K]``; v: ``[B, T, H, V]``.
        g: ``[B, T, H]``, natural log, <= 0; g_gamma: ``[H]``, constant per head, natural log, <= 0.
        scale: factor of the output; ``K ** -0.5`` if None.
        initial_state: ``[N, H, K, V]``, or ``[N, H, V, K]`` with state_v_first.
        output_final_state: return the final state too; None in its place otherwise.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences, with B = 1.
        cu_seqlens_cpu: not used: nothing needs the offsets on the host.
        kwargs: chunk_size, which changes nothing but must be a power of two; transpose_state_layout, the old name of
            state_v_first.

    Returns:
        The output ``[B, T, H, V]`` and the final state or None.

    Raises:
        ValueError, TypeError: as :func:`keraunos.gla_attention`.
        DeprecationWarning: head_first is given.
    """
    return _run(
        "chunk_simple_gla", (q, k, v), kwargs, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, state_v_first=state_v_first,
    )


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_simple_gla`."""
    return _run(
        "fused_chunk_simple_gla", (q, k, v), {}, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens,
    )


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_simple_gla`; reverse: from the last token to the first."""
    return _run(
        "fused_recurrent_simple_gla", (q, k, v), kwargs, g=g, g_gamma=g_gamma, scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        state_v_first=state_v_first, reverse=reverse,
    )


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_simple_gla`; output_attentions: the weights ``[B, H, T, T]``, too, in memory ``T ** 2``."""
    return _with_weights("parallel_simple_gla", (q, k, v), g, scale, output_attentions, cu_seqlens, kwargs)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention, :func:`keraunos.gla_attention`; see :func:`chunk_simple_gla`. g: ``[B, T, H, K]``."""
    return _run(
        "chunk_gla", (q, k, v), {}, g=g, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, state_v_first=state_v_first,
    )


def fused_chunk_gla(**kwargs: Any) -> None:
    """Removed in fla.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("fused_chunk_gla: fla has removed it; expected chunk_gla")


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_gla`; gk: ``[B, T, H, K]``, its g.

    Raises:
        NotImplementedError: gv, gates of the value dimensions, is given: no kernel here has them.
    """
    if gv is not None:
        raise NotImplementedError("fused_recurrent_gla: gv is given; expected None: gates are per key dimension here")
    return _run(
        "fused_recurrent_gla", (q, k, v), kwargs, g=gk, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, state_v_first=state_v_first, reverse=reverse,
    )


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_simple_gla`; the decay is :func:`keraunos.decay.lightning` of a layer."""
    return _run(
        "chunk_lightning_attn", (q, k, v), kwargs, g_gamma=decay.lightning(q.shape[2], layer_idx, num_layers),
        scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
    )


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_lightning_attn`; reverse: from the last token to the first."""
    return _run(
        "fused_recurrent_lightning_attn", (q, k, v), {}, g_gamma=decay.lightning(q.shape[2], layer_idx, num_layers),
        scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        reverse=reverse,
    )


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Retention: see :func:`chunk_simple_gla`; the decay is :func:`keraunos.decay.retnet`."""
    return _run(
        "chunk_retention", (q, k, v), kwargs, g_gamma=decay.retnet(q.shape[2]), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
    )


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_retention`."""
    return _run(
        "fused_chunk_retention", (q, k, v), kwargs, g_gamma=decay.retnet(q.shape[2]), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
    )


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_retention`; reverse: from the last token to the first."""
    return _run(
        "fused_recurrent_retention", (q, k, v), kwargs, g_gamma=decay.retnet(q.shape[2]), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        state_v_first=state_v_first, reverse=reverse,
    )


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_retention` and, for output_attentions, :func:`parallel_simple_gla`."""
    gamma = decay.retnet(q.shape[2])
    return _with_weights("parallel_retention", (q, k, v), gamma, scale, output_attentions, cu_seqlens, kwargs)


def _with_weights(
    name: str, tensors: tuple[Tensor, Tensor, Tensor], gates: Tensor | np.ndarray | None, scale: float | None,
    wanted: bool,
    cu_seqlens: Tensor | None, old: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The output, and the weights of all pairs of tokens if they are wanted; gates ``[B, T, H]`` or ``[H]``."""
    if wanted and cu_seqlens is not None:
        raise ValueError(f"{name}: output_attentions is True with cu_seqlens; expected one of them")
    gate = dict(g_gamma=gates) if gates is None or gates.ndim == 1 else dict(g=gates)
    output, _ = _run(
        name, tensors, old, scale=scale, initial_state=None, output_final_state=False, cu_seqlens=cu_seqlens, **gate
    )
    return output, _weights(*tensors[:2], gates, scale) if wanted else None


def _weights(q: Tensor, k: Tensor, gates: Tensor | np.ndarray | None, scale: float | None) -> Tensor:
    """``[B, H, T, T]``: what the value of each token counts for in the output of each."""
    import torch

    T, H = q.shape[1:3]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    below = torch.ones(T, T, dtype=torch.bool, device=q.device).tril(-1)
    gates = torch.zeros(H) if gates is None else torch.as_tensor(gates)
    gates = gates.to(q.device, torch.float32).expand(*q.shape[:2], H).transpose(1, 2)  # [B, H, T]
    # Between two tokens a sum of the gates there, and no difference of longer sums, which may be of infinities.
    between = torch.where(below, gates[..., None], 0.0).cumsum(-2)
    pairs = frontends.of(q).product(q.float().transpose(1, 2), k.float().permute(0, 2, 3, 1)) * scale
    return torch.where(below.T, 0.0, pairs * between.exp()).to(q.dtype)
