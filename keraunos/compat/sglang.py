"""SGLang's functions for lightning attention and the delta rule, by :mod:`keraunos.serving`: ``docs/engines.md``.

SGLang loads :func:`plugin` where keraunos is installed. Its lightning backend then calls :func:`seg_la_fwd`, or for
models with ``linear_backend = "minimax"`` the two functions that :mod:`keraunos.compat.vllm` has, too; its backends for
Gated DeltaNet and Kimi Delta Attention call :class:`GatedDeltaNet` and :class:`KimiDeltaAttention` where they would
call kernels in Triton. A call is one ``serving.prefill``, ``serving.decode`` or ``serving.verify``, and reads no value
on the host.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keraunos import decay, serving
from keraunos.compat.steps import heads, places
from keraunos.compat.vllm import lightning_attention, linear_decode_forward_triton, log_decay

__all__ = [
    "GatedDeltaNet", "KimiDeltaAttention", "SegLaMeta", "lightning_attention", "linear_decode_forward_triton", "plugin",
    "seg_la_fwd",
]

VERSIONS = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
# Those whose kernels of the delta rule are known.
_DELTA_VERSIONS = ("0.5.23",)
# Prompts are tracked after multiples of so many tokens.
_CHUNK = 64


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


class GatedDeltaNet:
    """The kernel of SGLang's backend for Gated DeltaNet: the engine's own one is to come after it among the bases.

    The pool ``ssm_states`` is ``[slots, HV, V, K]``, float32 or bfloat16, changed in place; slots of -1 in
    ``cache_indices`` are padding. q and k are ``[1, tokens, H, K]``, v and outputs ``[1, tokens, HV, V]``; a and b are
    raw gates of each token. Left to the engine's own kernel are drafts in a tree, rings of tokens in place of states
    (ReplaySSM), and prompts that leave the pool as it is.
    """

    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_fused_chain_verify = False
    supports_strided_target_verify_qkv = True
    supports_track_state_snapshot = True
    kimi = False

    def decode(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, ssm_states: Tensor,
               cache_indices: Tensor, scale: float | None = None, **gates: Any) -> Tensor:
        """One token for each request."""
        n = q.shape[1]
        gates = self._gates(a, b, n, ssm_states, **gates)
        return serving.decode(q[0], k[0], v[0], ssm_states, cache_indices[:n], softmax_scale=scale, **gates)[0][None]

    def packed_decode(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, **given: Any) -> Tensor:
        """One token for each request: all heads of q, k and v one after the other in mixed_qkv ``[N, dim]``."""
        if given.get("replayssm_d") is not None:
            return self._engines("packed_decode", mixed_qkv, a, b, **given)
        q, k, v = heads(mixed_qkv, given["ssm_states"])
        return self.decode(q[None], k[None], v[None], a, b, **given)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, inplace_update: bool = True,
               **given: Any) -> Any:
        """Prompts, with ``g`` and ``beta`` ``[1, tokens, HV]``: ``(output, None, None)``.

        ``track_state [N, HV, V, K]`` gets the state after ``64 * track_chunk_idx[n]`` tokens of request n, where that
        is not negative.
        """
        if not inplace_update:
            return self._engines("extend", q, k, v, g, beta, inplace_update=False, **given)
        return self._prefill(q, k, v, g, beta, **given), None, None

    def target_verify(self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
                      **given: Any) -> Tensor:
        """Drafts, up to cache_steps of each request, the pool staying as it is.

        The state after draft t of request n goes to ``intermediate_states_buffer[intermediate_state_indices[n], t]``.
        """
        room, states, T = (given[x] for x in ("intermediate_states_buffer", "ssm_states", "cache_steps"))
        if room is None or given.get("retrieve_parent_token") is not None:
            return self._engines("target_verify", A_log, dt_bias, q, k, v, a, b, **given)
        begin, tokens = given["query_start_loc"], q.shape[1]
        N, place = len(begin) - 1, None
        slots, own = given["cache_indices"][:N], given["intermediate_state_indices"][:N, None].long()
        targets = own * room.shape[1] + torch.arange(T, device=q.device)
        targets = torch.where((slots >= 0)[:, None], targets, -1)
        gates = self._gates(a, b, tokens, states, A_log, dt_bias, **given)
        rows = dict(query=q[0], key=k[0], value=v[0], a=gates.pop("a"), b=gates.pop("b"))
        if self.kimi:
            # Some requests may have fewer drafts, which is known on the device only.
            token, there, place = places(begin, T, tokens)
            rows = {name: x[token] for name, x in rows.items()}
            targets = torch.where(there, targets, -1)
        else:
            rows = {name: x.unflatten(0, (N, T)) for name, x in rows.items()}
        output: Tensor = serving.verify(
            states=states, slots=slots, exports=(room.flatten(0, 1), targets), **rows, **gates
        ).flatten(0, 1)
        return (output if place is None else output[place])[None]

    def _engines(self, name: str, *args: Any, **given: Any) -> Any:
        return getattr(super(), name)(*args, **given)

    def _gates(self, a: Tensor, b: Tensor, tokens: int, states: Tensor, A_log: Tensor, dt_bias: Tensor,
               lower_bound: float | None = None, **kwargs: Any) -> dict[str, Any]:
        _, HV, _, K = states.shape
        gate = (HV, K) if self.kimi else (HV,)
        return dict(
            a=a.reshape(tokens, *gate), b=b.reshape(tokens, HV), A_log=A_log.reshape(HV),
            dt_bias=dt_bias.reshape(gate), lower_bound=lower_bound, use_qk_l2norm=True, state_v_first=True,
        )

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
                 cache_indices: Tensor, query_start_loc: Tensor, track_state: Tensor | None = None,
                 track_chunk_idx: Tensor | None = None, **kwargs: Any) -> Tensor:
        def prefill(slots: Tensor, offsets: Tensor) -> Tensor:
            output: Tensor = serving.prefill(
                q[0], k[0], v[0], ssm_states, slots, offsets, g=g[0], beta=beta[0], use_qk_l2norm=True,
                state_v_first=True,
            )[0]
            return output[None]

        if track_state is None or track_chunk_idx is None:
            return prefill(cache_indices, query_start_loc)
        # To the tracked states, which are copied, then from there on: the other part's rows are zeros.
        begin, end = query_start_loc[:-1], query_start_loc[1:]
        tracked = (begin + _CHUNK * track_chunk_idx).to(begin.dtype)
        middle = torch.where(track_chunk_idx >= 0, tracked, end)
        offsets = torch.cat([torch.stack([begin, middle], 1).flatten(), end[-1:]])
        none = torch.full_like(cache_indices, -1)
        before = prefill(torch.stack([cache_indices, none], 1).flatten(), offsets)
        track_state.copy_(ssm_states[cache_indices.clamp(min=0).long()])
        return before + prefill(torch.stack([none, cache_indices], 1).flatten(), offsets)


class KimiDeltaAttention(GatedDeltaNet):
    """The kernel of SGLang's backend for Kimi Delta Attention, as :class:`GatedDeltaNet`, with gates per dimension."""

    kimi = True

    def extend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, A_log: Tensor | None = None,
               dt_bias: Tensor | None = None, lower_bound: float | None = None, beta_is_raw: bool = False,
               return_intermediate_states: bool = False, **given: Any) -> Any:
        """Prompts, with ``g [1, tokens, HV, K]``: the output, or with return_intermediate_states ``(output, None)``.

        With A_log ``g`` are raw gates, with beta_is_raw ``beta`` is before its sigmoid.
        """
        if A_log is not None:
            gates: Any = decay.kimi(g, A_log, dt_bias, lower_bound)
            g = gates
        output = self._prefill(q, k, v, g, beta.float().sigmoid() if beta_is_raw else beta, **given)
        return (output, None) if return_intermediate_states else output


_FOLDER = "sglang.kernels.ops.attention.linear"
_FUNCTIONS = {
    f"{_FOLDER}.seg_la.seg_la_fwd": seg_la_fwd,
    f"{_FOLDER}.lightning_attn.lightning_attention": lightning_attention,
    f"{_FOLDER}.lightning_attn.linear_decode_forward_triton": linear_decode_forward_triton,
}
_KERNELS = "sglang.srt.layers.attention.linear.kernels"
_CLASSES = {
    f"{_KERNELS}.gdn_triton.TritonGDNKernel": GatedDeltaNet,
    f"{_KERNELS}.kda_triton.TritonKDAKernel": KimiDeltaAttention,
}


def plugin() -> None:
    """The entry point of ``sglang.srt.plugins``: let SGLang call these functions and kernels in place of its own.

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
    for name, own in _CLASSES.items() if version.startswith(_DELTA_VERSIONS) else ():
        module, _, kernel = name.rpartition(".")
        theirs = getattr(importlib.import_module(module), kernel)
        hooks.HookRegistry.register(name, type(kernel, (own, theirs), {}), hooks.HookType.REPLACE)
