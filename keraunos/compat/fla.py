"""flash-linear-attention's functions, computed by keraunos: names, arguments, defaults and results of fla 0.6.0.

A model changes its import, ``from keraunos.compat.fla import chunk_gla`` in place of ``from fla.ops.gla import
chunk_gla``, and nothing else. fla has several functions for one formula, which differ in how they compute; here they
are one function, and the platform is chosen as in every call of :func:`keraunos.gla_attention` and
:func:`keraunos.gated_delta_rule`. Arrays are tensors ``[B, T, H, ...]``.

Differences from fla:

- The heads of g, q, k and v may be any numbers that divide the largest. ``initial_state`` may have any float dtype;
  it is computed in float32. ``chunk_delta_rule`` takes float32 and float64, too.
- ``fused_recurrent_gated_delta_rule`` and ``fused_recurrent_kda`` have gradients.
- Gates and sigmoids in the call (``A_log``, ``dt_bias``, ``lower_bound``, ``allow_neg_eigval``) are computed by
  :mod:`keraunos.decay` before the kernel, with all gradients.
- ``chunk_size`` (fla's sizes or a power of two), ``cu_seqlens_cpu`` and ``use_graph``, ``safe_gate`` and
  ``disable_recompute`` of ``chunk_kda`` change nothing.
- ``cp_context`` and ``gv``, gates per value dimension, raise NotImplementedError.
- ``output_attentions`` computes the weights of all pairs by PyTorch, in ``T ** 2`` memory.
- Under ``torch.compile`` a call is one node of the graph.
- Unknown arguments raise TypeError, and wrong shapes ValueError, before any kernel starts. Positive gates raise
  ValueError on a CPU, or with ``KERAUNOS_CHECK=1``.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from keraunos import decay, frontends, serving
from keraunos.frontends.array_types import Array
from keraunos.modules.gated_delta_rule import gated_delta_rule
from keraunos.modules.gla_attention import gla_attention

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_chunk_gla",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
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
    size = old.pop("chunk_size", None)
    if size is not None and (not isinstance(size, int) or size < 1 or size & (size - 1)):
        raise ValueError(f"{name}: chunk_size is {size!r}; expected a power of two")
    state_v_first = _layout(name, old, state_v_first)
    shape = tensors[0].shape
    if len(shape) == 4 and 1 < shape[1] < shape[2] and cu_seqlens is None:
        message = f"{name}: q has fewer tokens than heads, {shape[1]} < {shape[2]}; expected [B, T, H, K]"
        warnings.warn(f"{message}, not [B, H, T, K]", stacklevel=3)
    options: Any = dict(softmax_scale=scale, reverse=reverse, return_state=True, state_v_first=state_v_first)
    if output_final_state:
        return gla_attention(*tensors, g, g_gamma, initial_state, cu_seqlens, **options)
    options["return_state"] = False
    return gla_attention(*tensors, g, g_gamma, initial_state, cu_seqlens, **options), None


def _layout(name: str, old: dict[str, Any], state_v_first: bool) -> bool:
    """Whether states are ``[N, H, V, K]``: by that name or, of what is left of a call's arguments, by its old one."""
    if "head_first" in old:
        raise DeprecationWarning(f"{name}: head_first belongs to older versions; expected tensors [B, T, H, ...]")
    if "transpose_state_layout" in old:
        if state_v_first:
            raise ValueError(
                f"{name}: got state_v_first and transpose_state_layout, its old name; expected one of both"
            )
        message = f"{name}: transpose_state_layout is the old name of state_v_first"
        warnings.warn(message, DeprecationWarning, stacklevel=4)
        state_v_first = bool(old.pop("transpose_state_layout"))
    if old:
        raise TypeError(f"{name}: got an unexpected argument {next(iter(old))!r}")
    return state_v_first


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


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule with a gate per token and head, :func:`keraunos.gated_delta_rule` with ``g [B, T, HV]``.

    Args:
        q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``, HV a multiple of H.
        g: ``[B, T, HV]``, natural log, <= 0; with use_gate_in_kernel what :func:`keraunos.decay.gated_deltanet` makes
            gates of, with A_log and dt_bias, ``[HV]``.
        beta: ``[B, T, HV]``; with use_beta_sigmoid_in_kernel its sigmoid is taken, twice that with allow_neg_eigval.
        scale: factor of the output; ``K ** -0.5`` if None.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with state_v_first.
        output_final_state: return the final state too; None in its place otherwise.
        use_qk_l2norm_in_kernel: divide q and k by ``sqrt(sum x^2 + 1e-6)``.
        cu_seqlens: ``[N + 1]``, offsets of packed sequences, with B = 1.
        cu_seqlens_cpu, chunk_indices: not used: nothing needs the offsets on the host, or a list of chunks.
        cp_context: None; :mod:`keraunos.distributed` has other ways to share tokens among devices.
        chunk_size: 16, 32 or 64; changes nothing.
        kwargs: transpose_state_layout, the old name of state_v_first.

    Returns:
        The output ``[B, T, HV, V]`` and the final state or None.

    Raises:
        ValueError, TypeError: as :func:`keraunos.gated_delta_rule`; an argument is given without the one it needs.
        NotImplementedError: cp_context is given.
        DeprecationWarning: head_first is given.
    """
    name = "chunk_gated_delta_rule"
    _check_chunks(name, chunk_size, (16, 32, 64), cp_context)
    if use_gate_in_kernel:
        g = _deltanet_gates(name, g, A_log, dt_bias)
    return _delta_rule(
        name, (q, k, v), kwargs, g=g, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, normed=use_qk_l2norm_in_kernel,
        sigmoid=use_beta_sigmoid_in_kernel, twice=allow_neg_eigval, state_v_first=state_v_first,
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_gated_delta_rule`; it has gradients here. q, k and v may differ in dtype: v's is the output's.

    Args:
        gk: ``[B, T, HV, K]``, gates per key dimension, added to g.
        beta: ones if None.

    Raises:
        NotImplementedError: gv, gates of the value dimensions, is given: no kernel here has them.
    """
    name = "fused_recurrent_gated_delta_rule"
    if gv is not None:
        raise NotImplementedError(f"{name}: gv is given; expected None: gates are per key dimension here")
    if use_gate_in_kernel:
        g = _deltanet_gates(name, g, A_log, dt_bias)
    if gk is not None:
        g = gk if g is None else g[..., None] + gk
    output, state = _delta_rule(
        name, _alike(q, k, v), kwargs, g=g, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, normed=use_qk_l2norm_in_kernel,
        sigmoid=use_beta_sigmoid_in_kernel, twice=allow_neg_eigval, state_v_first=state_v_first,
    )
    return output.to(v.dtype), state


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int = 64,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule without gates; see :func:`chunk_gated_delta_rule`. It takes float32, too."""
    name = "chunk_delta_rule"
    _check_chunks(name, chunk_size, (16, 32, 64), None)
    return _delta_rule(
        name, (q, k, v), kwargs, g=None, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, normed=use_qk_l2norm_in_kernel,
    )


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_delta_rule`; beta: ones if None."""
    return _delta_rule(
        "fused_recurrent_delta_rule", (q, k, v), {}, g=None, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, normed=use_qk_l2norm_in_kernel,
    )


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention, :func:`keraunos.gated_delta_rule` with ``g [B, T, HV, K]``.

    Args:
        g: ``[B, T, HV, K]``, natural log, <= 0; with use_gate_in_kernel what :func:`keraunos.decay.kimi` makes gates
            of, with A_log ``[HV]``, dt_bias ``[HV * K]`` and lower_bound. With a bound A_log may be None: zeros.
        safe_gate: g is bounded, in the call by a lower_bound from -5 to 0; changes nothing else.
        disable_recompute, use_graph: change nothing; max_num_seqs: with use_graph, N.
        return_intermediate_states: the states before each chunk of chunk_size tokens, too, ``[B, NT, HV, K, V]`` in
            k's dtype, of all sequences one after the other; inside ``torch.inference_mode()`` only.
        chunk_size: 32 or 64.

    The others are those of :func:`chunk_gated_delta_rule`.
    """
    name = "chunk_kda"
    _check_chunks(name, chunk_size, (32, 64), cp_context)
    if use_graph and cu_seqlens is not None and max_num_seqs not in (None, cu_seqlens.shape[0] - 1):
        raise ValueError(
            f"{name}: cu_seqlens has {cu_seqlens.shape[0] - 1} sequences; expected max_num_seqs = {max_num_seqs}, the "
            f"last of them empty"
        )
    if use_gate_in_kernel:
        if safe_gate and not -5 <= (1 if lower_bound is None else lower_bound) < 0:
            raise ValueError(f"{name}: lower_bound is {lower_bound!r} with safe_gate; expected -5 <= lower_bound < 0")
        g = _kimi_gates(name, g, A_log, dt_bias, lower_bound)
    return _delta_rule(
        name, (q, k, v), kwargs, g=g, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, normed=use_qk_l2norm_in_kernel,
        sigmoid=use_beta_sigmoid_in_kernel, twice=allow_neg_eigval, state_v_first=state_v_first,
        every=chunk_size if return_intermediate_states else None,
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`chunk_kda`; it has gradients here. q, k and v may differ in dtype: v's is the output's."""
    name = "fused_recurrent_kda"
    if use_gate_in_kernel:
        g = _kimi_gates(name, g, A_log, dt_bias, lower_bound)
    output, state = _delta_rule(
        name, _alike(q, k, v), kwargs, g=g, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, normed=use_qk_l2norm_in_kernel,
        sigmoid=use_beta_sigmoid_in_kernel, twice=allow_neg_eigval, state_v_first=state_v_first,
    )
    return output.to(v.dtype), state


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def _delta_rule(
    name: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    old: dict[str, Any],
    *,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    normed: bool,
    sigmoid: bool = False,
    twice: bool = False,
    state_v_first: bool = False,
    every: int | None = None,
) -> tuple[Any, ...]:
    """As :func:`_run`, of the gated delta rule; every: the states before each so many tokens, too."""
    if twice and not sigmoid:
        raise ValueError(f"{name}: allow_neg_eigval is True; expected use_beta_sigmoid_in_kernel=True with it")
    if sigmoid:
        if beta is None:
            raise ValueError(f"{name}: use_beta_sigmoid_in_kernel is True; expected beta")
        beta = (beta if beta.dtype.itemsize == 8 else beta.float()).sigmoid() * (2 if twice else 1)
    options: Any = dict(
        softmax_scale=scale, use_qk_l2norm=normed, state_v_first=_layout(name, old, state_v_first)
    )
    if every is not None:
        output, state, states = _states(name, *tensors, g, beta, every, initial_state, cu_seqlens, **options)
        return output, state if output_final_state else None, states
    if output_final_state:
        return gated_delta_rule(*tensors, g, beta, initial_state, cu_seqlens, return_state=True, **options)
    return gated_delta_rule(*tensors, g, beta, initial_state, cu_seqlens, **options), None


def _check_chunks(name: str, size: int, sizes: tuple[int, ...], cp_context: Any) -> None:
    if size not in sizes:
        raise ValueError(f"{name}: chunk_size is {size!r}; expected one of {sizes}")
    if cp_context is not None:
        raise NotImplementedError(f"{name}: cp_context is given; expected None: fla's exchanges are not taken over")


def _deltanet_gates(name: str, g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    if g is None or A_log is None:
        raise ValueError(f"{name}: use_gate_in_kernel is True; expected g and A_log, which gates are made of")
    gates: Any = decay.gated_deltanet(g, A_log, dt_bias)
    return gates


def _kimi_gates(name: str, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower: float | None) -> Tensor:
    if A_log is None:
        if lower is None:
            raise ValueError(f"{name}: use_gate_in_kernel is True; expected A_log or lower_bound")
        A_log = g.new_zeros(g.shape[2])
    gates: Any = decay.kimi(g, A_log, dt_bias, lower)
    return gates


def _alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three in the widest dtype of theirs."""
    import torch

    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _states(
    name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, size: int,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the final states and those before each chunk of ``size`` tokens, by one pass over a pool."""
    import torch

    if not torch.is_inference_mode_enabled():
        raise ValueError(f"{name}: return_intermediate_states is True; expected it inside torch.inference_mode() only")
    B, T = q.shape[:2]
    offsets = torch.arange(0, B * T + 1, T, device=q.device) if cu_seqlens is None else cu_seqlens
    chunks = (offsets.diff() + size - 1) // size  # [N]
    first, total = chunks.cumsum(0) - chunks, int(chunks.sum())
    later = torch.arange(1, max(int(chunks.max()), 2), device=q.device)
    targets = torch.where(later < chunks[:, None], first[:, None] + later, -1)  # [N, chunks]
    K, V = k.shape[3], v.shape[3]
    # The states before the chunks, then those of the sequences.
    pool = torch.zeros(total + len(chunks), v.shape[2], *((V, K) if options["state_v_first"] else (K, V)),
                       device=q.device)
    if initial_state is not None:
        pool[total:] = initial_state
        pool[first[chunks > 0]] = pool[total:][chunks > 0]
    slots = torch.arange(total, len(pool), device=q.device)
    rows: Any = [x if x is None else x.flatten(0, 1) for x in (q, k, v, g, beta)]
    query, key, value, g, beta = rows
    output, _ = serving.prefill(
        query, key, value, pool, slots, offsets, g=g, beta=beta, every=(size, targets), **options
    )
    return output.unflatten(0, (B, T)), pool[total:], pool[:total].unflatten(0, (B, -1)).to(k.dtype)
