"""vLLM's layers for lightning attention and the delta rule, by :mod:`keraunos.serving`: a plugin, ``docs/engines.md``.

vLLM loads :func:`plugin` where keraunos is installed. Its layers stay what they are, parameters and custom operator
included; what is replaced is the part inside that operator, from the projections of a step's tokens to their outputs.

A step is one ``serving.decode`` for requests with a token each, or one ``serving.verify`` for their drafts, and one
``serving.prefill`` for prompts, in the dtype of the model, and reads no value on the host.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import sigmoid, silu

from keraunos import serving
from keraunos.compat.steps import live, verify
from keraunos.compat.vllm_delta import GatedDeltaNetLayer, KimiLayer

__all__ = ["attend", "plugin", "register"]

VERSIONS = ("0.31", "0.32", "0.33")
# Those whose layers of the delta rule are known.
_DELTA_VERSIONS = ("0.33",)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    states: torch.Tensor,
    metadata: Any,
    log_decay: torch.Tensor,
    softmax_scale: float = 1.0,
) -> torch.Tensor:
    """The attention of one step: ``S_t = exp(log_decay) S_{t-1} + k_t v_t^T``, ``o_t = softmax_scale * S_t^T q_t``.

    Args:
        q, k, v: ``[tokens, H, D]``, bfloat16, float16 or float32: first those of requests that decode.
        states: ``[blocks, H, D, D]``, float32 or bfloat16, changed in place.
        metadata: vLLM's ``LinearAttentionMetadata`` or ``BailingLinearAttentionMetadata`` of the step. A block of -1 or
            0 is padding. Prompts whose ``seq_lens`` are as long as their tokens start from zeros. With drafts, request
            n starts from ``state_indices_tensor_d[n, num_accepted_tokens[n] - 1]``, and the state after its token t
            goes to ``state_indices_tensor_d[n, t]``.
        log_decay: ``[H]``, natural log, <= 0.
        softmax_scale: factor of the output.

    Returns:
        ``[tokens, H * D]`` in q's dtype, zeros for padding.

    Raises:
        ValueError, TypeError: as :mod:`keraunos.serving`.
    """
    n, tokens = metadata.num_decodes, metadata.num_decode_tokens
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    options: dict[str, Any] = dict(log_decay=log_decay, softmax_scale=softmax_scale)
    slots: torch.Tensor = metadata.state_indices_tensor
    drafts = getattr(metadata, "state_indices_tensor_d", None)
    if tokens and drafts is not None and drafts.ndim > 1:
        verify(
            dict(query=q[:tokens], key=k[:tokens], value=v[:tokens]), states, drafts[:n],
            metadata.query_start_loc_d[: n + 1], metadata.num_accepted_tokens[:n], out[:tokens], options,
        )
    elif tokens:
        own = live((slots if drafts is None else drafts)[:tokens])
        serving.decode(q[:tokens], k[:tokens], v[:tokens], states, own, out=out[:tokens], **options)
    if prompts := metadata.num_prefills:
        given = getattr(metadata, "state_indices_tensor_p", None)
        own = live(slots[n : n + prompts] if given is None else given)
        offsets = metadata.query_start_loc[n : n + prompts + 1] - tokens
        serving.prefill(
            q[tokens:], k[tokens:], v[tokens:], states, own, offsets, out=out[tokens:],
            has_initial=metadata.seq_lens[n : n + prompts] > offsets.diff(), **options,
        )
    return out.flatten(1)


class _Layer:
    """The base of both layers; the engine's class comes after it among a layer's bases."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.log_decay = -self.tp_slope.flatten().float()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The attributes of the engine's class."""

    def _step(self, hidden_states: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The step's metadata, None in a run that measures memory, and the tokens that are no padding."""
        found = importlib.import_module("vllm.forward_context").get_forward_context().attn_metadata
        metadata = None if found is None else found.get(self.prefix)
        if metadata is None:
            return None, hidden_states
        return metadata, hidden_states[: metadata.num_prefill_tokens + metadata.num_decode_tokens]

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any, scale: float) -> torch.Tensor:
        if metadata is None:
            return torch.zeros_like(q, memory_format=torch.contiguous_format).flatten(1)
        return attend(q, k, v, self.kv_cache[0], metadata, self.log_decay, scale)


class MiniMaxLayer(_Layer):
    """vLLM's ``minimax_text_01_attention``."""

    def _forward(self, hidden_states: torch.Tensor, output: torch.Tensor, positions: torch.Tensor) -> None:
        metadata, x = self._step(hidden_states)
        qkv = silu(self.qkv_proj(x)[0]).unflatten(-1, (self.tp_heads, -1))
        q, k, v = qkv.split(self.head_dim, -1)
        hidden = self.norm._forward(self._attend(q, k, v, metadata, 1.0))
        hidden = sigmoid(self.output_gate(x)[0]) * hidden
        output[: len(x)] = self.out_proj(hidden.to(x.dtype))[0]


class BailingLayer(_Layer):
    """vLLM's ``bailing_moe_linear_attention``."""

    def _forward(self, hidden_states: torch.Tensor, output: torch.Tensor, positions: torch.Tensor) -> None:
        metadata, x = self._step(hidden_states)
        qkv = self.query_key_value(x)[0]
        if self.linear_silu:
            qkv = silu(qkv)
        q, k, v = qkv.split([self.q_size_per_rank, self.kv_size_per_rank, self.kv_size_per_rank], -1)
        if self.use_qk_norm:
            q, k = self._normed(q, self.query_layernorm), self._normed(k, self.key_layernorm)
        if self.linear_rope:
            # Angles of far positions need more digits than the model's dtype has.
            q, k = self.rotary_emb(positions[: len(x)], q.float(), k.float())
        q, k, v = (y.to(x.dtype).unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        hidden = self._attend(q, k, v, metadata, self.scaling if self.linear_scale else 1.0)
        gate = self.g_proj(x)[0]
        hidden = self.g_norm(hidden, gate) if self.group_norm_size > 1 else sigmoid(gate) * self.g_norm(hidden)
        output[: len(x)] = self.dense(hidden.to(x.dtype))[0]

    def _normed(self, x: torch.Tensor, norm: Any) -> torch.Tensor:
        """Each head by its root mean square, in float32."""
        x = x.float().unflatten(-1, (-1, self.head_dim))
        factor = (x.square().mean(-1, keepdim=True) + self.rms_norm_eps).rsqrt()
        return (x * factor * norm.weight).flatten(-2)


_FOLDER = "vllm.model_executor.layers.mamba.linear"
_LAYERS = {
    "MiniMaxText01LinearAttention": (f"{_FOLDER}.minimax_linear_attn", MiniMaxLayer),
    "BailingMoELinearAttention": (f"{_FOLDER}.bailing_linear_attn", BailingLayer),
}
_DELTA_FOLDER = "vllm.model_executor.layers.mamba.gdn"
_DELTA_LAYERS = {
    "QwenGatedDeltaNetAttention": (f"{_DELTA_FOLDER}.qwen_gdn_linear_attn", GatedDeltaNetLayer),
    "KimiGatedDeltaNetAttention": (f"{_DELTA_FOLDER}.kimi_gdn_linear_attn", KimiLayer),
}


def register() -> None:
    """Let vLLM make these layers where it makes its own. A second call changes nothing.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: its version is none that is known, or another plugin has replaced the layers.
    """
    version = importlib.import_module("vllm").__version__
    minor = ".".join(version.split(".")[:2])
    if minor not in VERSIONS:
        raise RuntimeError(
            f"register: vLLM is {version}; expected {', '.join(VERSIONS)}, whose layers and metadata are known"
        )
    replaced = importlib.import_module("vllm.model_executor.custom_op").op_registry_oot
    layers: dict[str, tuple[str, Any]] = {**_LAYERS, **(_DELTA_LAYERS if minor in _DELTA_VERSIONS else {})}
    for name, (path, layer) in layers.items():
        if name not in replaced:
            module: Any = importlib.import_module(path)
            engine = getattr(module, name)
            content = {"engine": module}
            if layer is KimiLayer:
                # Not in a custom operator: the engine ends its CUDA graphs here.
                content["_forward"] = module.eager_break_during_capture(layer._forward)
            engine.register_oot(type(name, (layer, engine), content))
        elif not issubclass(replaced[name], layer):
            raise RuntimeError(f"register: {name} is replaced by {replaced[name]}; expected no other plugin for it")


def plugin() -> None:
    """The entry point of ``vllm.general_plugins``: :func:`register`, or a warning that says why vLLM keeps its own."""
    try:
        register()
    except RuntimeError as error:
        logging.getLogger("vllm.keraunos").warning("keraunos is not used: %s", error)
