"""SGLang's functions for lightning attention, computed by :mod:`keraunos.serving`: ``docs/engines.md``.

SGLang loads :func:`plugin` where keraunos is installed. Its lightning backend then calls :func:`seg_la_fwd`, or for
models with ``linear_backend = "minimax"`` the two functions that :mod:`keraunos.compat.vllm` has, too. A call is one
``serving.prefill``, ``serving.decode`` or ``serving.verify``, and reads no value on the host.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

from keraunos import serving
from keraunos.compat.vllm import lightning_attention, linear_decode_forward_triton, log_decay

__all__ = ["SegLaMeta", "lightning_attention", "linear_decode_forward_triton", "plugin", "seg_la_fwd"]

VERSIONS = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")


@dataclass
class SegLaMeta:
    """SGLang's description of a batch; its own class of this name serves :func:`seg_la_fwd` as well.

    Attributes:
        batch_size: requests.
        max_q_length: not used.
        q_offsets: ``[batch_size + 1]``, int32 or int64, where each request's tokens begin.
        s_offsets: ``[batch_size]``, int32 or int64, the requests' slots; -1: padding.
        q_lengths: ``[batch_size]``, tokens of each request.
        s_scales: ``[batch_size]``, bool or numbers: 0 for a prompt that starts from zeros.
        s_offsets_stride, q_offsets_stride, s_scales_stride, decay_scales_stride: not used.
        mask: None; drafts in a tree are refused.
    """

    batch_size: int
    max_q_length: int | None
    q_offsets: torch.Tensor
    s_offsets: torch.Tensor
    q_lengths: torch.Tensor
    s_scales: torch.Tensor
    s_offsets_stride: int = 0
    q_offsets_stride: int = 0
    s_scales_stride: int = 0
    decay_scales_stride: int = 0
    mask: torch.Tensor | None = None


def seg_la_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    decay_scales: torch.Tensor,
    meta: SegLaMeta,
    caches: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    track_lens: torch.Tensor | None = None,
    track_state_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    decouple: bool = False,
) -> torch.Tensor:
    """One batch: ``S_t = exp(-decay_scales) S_{t-1} + k_t v_t^T``, ``o_t = softmax_scale * S_t^T q_t``.

    With ``caches`` all requests have the same number of drafts, one after the other: the state after draft t goes to
    ``caches[cache_indices[n], t]``, and ``s`` stays. Else, with no more tokens than requests, each has one, and
    continues the state in its slot. Else tokens are prompts, or parts of prompts, of any lengths.

    Args:
        q, k, v: ``[tokens, H, D]``, bfloat16, float16 or float32.
        s: ``[slots, H, D, D]``, float32 or bfloat16, changed in place.
        decay_scales: the slopes, >= 0: ``[H]``, ``[H, 1, 1]`` or ``[1, H, 1, 1]``.
        meta: the requests.
        caches: ``[slots, drafts, H, D, D]``, changed in place; cache_indices: ``[batch_size]``.
        track_lens, track_state_indices: ``[batch_size]``, for prompts: the state after so many of a request's tokens
            goes to that slot of ``s`` as well; 0 tokens or a slot of -1: nowhere.
        softmax_scale: factor of the output; ``D ** -0.5`` if None.
        decouple: not used: what it chooses between in older versions is one computation here.

    Returns:
        ``[tokens, H, D]`` in q's dtype, zeros for padding.

    Raises:
        NotImplementedError: meta.mask is given, drafts in a tree.
        ValueError, TypeError: as :mod:`keraunos.serving`; drafts that are not as many for all requests.

    Example:
        >>> import torch
        >>> from keraunos.compat.sglang import SegLaMeta, seg_la_fwd
        >>> q, states = torch.ones(5, 2, 16), torch.zeros(8, 2, 16, 16)
        >>> new, begin = torch.tensor([False, False]), torch.tensor([0, 3, 5])
        >>> meta = SegLaMeta(2, None, begin, torch.tensor([4, 1]), begin.diff(), new)
        >>> output = seg_la_fwd(q, q, q, states, torch.zeros(2), meta)
        >>> output[:, 0, 0].tolist()
        [4.0, 8.0, 12.0, 4.0, 8.0]
    """
    if meta.mask is not None:
        raise NotImplementedError("seg_la_fwd: meta.mask is given; expected None: drafts are a chain, and no tree")
    if q.ndim != 3:
        raise ValueError(f"seg_la_fwd: q has shape {tuple(q.shape)}; expected [tokens, H, D]")
    tokens, H, D = q.shape
    N = meta.batch_size
    slots, scale = meta.s_offsets[:N], D**-0.5 if softmax_scale is None else softmax_scale
    decay = log_decay("seg_la_fwd", decay_scales, H)
    if caches is not None and cache_indices is not None:
        if tokens % N or not 0 < tokens // N <= caches.shape[1]:
            raise ValueError(
                f"seg_la_fwd: q has {tokens} tokens of {N} requests; expected as many for each, up to"
                f" {caches.shape[1]}, which caches holds"
            )
        T, most = tokens // N, caches.shape[1]
        targets = cache_indices[:N, None] * most + torch.arange(T, device=q.device)
        q, k, v = (x.unflatten(0, (N, T)) for x in (q, k, v))
        output: torch.Tensor = serving.verify(
            q, k, v, s, slots, log_decay=decay, softmax_scale=scale, exports=(caches.flatten(0, 1), targets)
        )
        return output.flatten(0, 1)
    if tokens <= N:
        return serving.decode(q, k, v, s, slots[:tokens], log_decay=decay, softmax_scale=scale)[0]
    boundaries, offsets = None, meta.q_offsets[: N + 1]
    if track_lens is not None and track_state_indices is not None:
        # Ascending, as boundaries have to be; those of requests that nothing is tracked of lead nowhere.
        wanted = (track_lens > 0) & (track_lens <= offsets.diff())
        last = torch.where(wanted, track_lens, 1).to(offsets.dtype)
        boundaries = offsets[:-1] + last - 1, torch.where(wanted, track_state_indices, -1)
    return serving.prefill(
        q, k, v, s, slots, offsets, log_decay=decay, softmax_scale=scale, has_initial=meta.s_scales[:N] > 0,
        boundaries=boundaries,
    )[0]


_FOLDER = "sglang.kernels.ops.attention.linear"
_FUNCTIONS = {
    f"{_FOLDER}.seg_la.seg_la_fwd": seg_la_fwd,
    f"{_FOLDER}.lightning_attn.lightning_attention": lightning_attention,
    f"{_FOLDER}.lightning_attn.linear_decode_forward_triton": linear_decode_forward_triton,
}


def plugin() -> None:
    """The entry point of ``sglang.srt.plugins``: let SGLang call these functions in place of its own.

    Raises:
        ImportError: SGLang is not installed.
        RuntimeError: its version is none that is known; SGLang says so in its log, and goes on with its own.
    """
    version = importlib.import_module("sglang").__version__
    if not version.startswith(VERSIONS):
        raise RuntimeError(
            f"plugin: SGLang is {version}; expected {', '.join(VERSIONS)}, whose functions and metadata are known"
        )
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    for name, function in _FUNCTIONS.items():
        hooks.HookRegistry.register(name, function, hooks.HookType.REPLACE)
