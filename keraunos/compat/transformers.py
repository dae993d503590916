"""Hugging Face's MiniMax with its lightning layers computed by keraunos: :func:`patch` a model, :func:`unpatch` it.

A patched layer is the model's own module with another class: parameters, buffers, hooks and names stay as they are, and
so do all other models. What it does with masks and caches is what the model does; ``docs/transformers.md`` has what is
different.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import transformers

from keraunos.modules.lightning_attention import lightning_attention
from keraunos.ops import checks

# The first and the last version that was run.
KNOWN = (5, 18), (5, 24)

if not KNOWN[0] <= tuple(map(int, transformers.__version__.split(".")[:2])) <= KNOWN[1]:
    first, last = (".".join(map(str, version)) for version in KNOWN)
    raise ImportError(
        f"keraunos.compat.transformers.patch: knows transformers {first} to {last}; this is {transformers.__version__}",
        name="transformers",
    )

from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention  # noqa: E402

__all__ = ["patch", "unpatch"]


class LightningAttention(MiniMaxLightningAttention):  # type: ignore[misc]
    """A lightning layer of MiniMax, on :func:`keraunos.lightning_attention`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        *,
        past_key_values: Any = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output and its state after the last token.

        Args:
            hidden_states: ``[B, T, hidden]``.
            position_embeddings: not used: lightning layers have none.
            attention_mask: ``[B, T]``, 0 at padding, whose query, key and value become 0, whatever hidden_states are
                there; the state decays there, too. Floats without a 1 are read as a mask that is added to logits.
            cache: the model's MiniMaxCache; the layer's state there is read and replaced.
            past_key_values: the cache's name in transformers before 5.24.
            cu_seq_lens_q: ``[N + 1]``, offsets of sequences packed into one row (B = 1), each with its own state.
            kwargs: what other layers need.

        Returns:
            The output ``[B, T, hidden]`` and the state ``[N, H, D, D]``.

        Raises:
            ValueError: attention_mask has another shape, or floats of it that are known on the host are no mask.
        """
        cache = past_key_values if cache is None else cache
        given = None
        if attention_mask is not None:
            name = "keraunos.compat.transformers.LightningAttention"
            given = checks.tokens(name, attention_mask, hidden_states)[..., None]
            # Before the projections, too: their gradients are products with hidden states.
            hidden_states = hidden_states.where(given, 0)
        qkv = self.act_fn(self.qkv_proj(hidden_states))
        if given is not None:
            qkv = qkv.where(given, 0)
        query, key, value = qkv.unflatten(-1, (self.num_attention_heads, -1)).chunk(3, -1)
        output, state = lightning_attention(
            query, key, value, None if cache is None else cache.get_linear_cache(self.layer_idx), cu_seq_lens_q,
            log_decay=-self.slope_rate.flatten().float(), softmax_scale=1.0, return_state=True,
        )
        # The dtype in which the model adds up its states.
        state = state.to(torch.promote_types(value.dtype, self.slope_rate.dtype))
        if cache is not None:
            cache.set_linear_cache(self.layer_idx, state)
        gate = self.output_gate(hidden_states).sigmoid()
        output = self.out_proj(gate * self.norm(output.flatten(2)))
        # The result is 0 there; so is what a gradient that is not finite brings.
        return output if given is None else output.where(given, 0), state


def patch(model: Any) -> Any:
    """Let the lightning layers of a model run on :func:`keraunos.lightning_attention`.

    Args:
        model: a MiniMaxForCausalLM, a MiniMaxModel, another module with such layers, or one MiniMaxLightningAttention.
            Layers that are patched already stay so.

    Returns:
        The model, changed in place.

    Raises:
        TypeError: model is no ``torch.nn.Module``.
        ValueError: model has no lightning layers.
    """
    return _replace("patch", model, MiniMaxLightningAttention, LightningAttention)


def unpatch(model: Any) -> Any:
    """Give the lightning layers of a model their own code back; see :func:`patch`.

    Args:
        model: what :func:`patch` takes. Layers that are not patched stay as they are.

    Returns:
        The model, changed in place.

    Raises:
        TypeError: model is no ``torch.nn.Module``.
        ValueError: model has no lightning layers.
    """
    return _replace("unpatch", model, LightningAttention, MiniMaxLightningAttention)


def _replace(name: str, model: Any, old: Any, new: Any) -> Any:
    """The model, whose layers of class ``old`` become ``new``."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"keraunos.compat.transformers.{name}: model is of type {type(model).__qualname__}; "
            f"expected a torch.nn.Module"
        )
    layers = [x for x in model.modules() if type(x) in (old, new)]
    if not layers:
        raise ValueError(
            f"keraunos.compat.transformers.{name}: {type(model).__qualname__} has no lightning layers; "
            f"expected a model with modules of class MiniMaxLightningAttention"
        )
    for layer in layers:
        layer.__class__ = new
        # Hooks that move weights between devices keep the forward that they found.
        for attribute, value in list(vars(layer).items()):
            if isinstance(value, MethodType) and value.__func__ is old.forward:
                setattr(layer, attribute, MethodType(new.forward, layer))
    return model
