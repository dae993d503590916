"""Hugging Face's models with their linear attention computed by keraunos: :func:`patch` a model, :func:`unpatch` it.

A patched layer is the model's own module with another class: parameters, buffers, hooks and names stay as they are, and
so do all other models. It treats masks and caches as the model does; ``docs/compat.md`` has the differences.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import transformers

from keraunos.modules.gated_delta_rule import gated_delta_rule
from keraunos.modules.lightning_attention import lightning_attention
from keraunos.ops import checks

# The first and the last version that was run.
KNOWN = (5, 17), (5, 24)

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

    theirs = MiniMaxLightningAttention

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


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In place of transformers' two functions for the rule. Kimi's layers leave its name to the offsets of a batch."""
    offsets = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    result = gated_delta_rule(
        query, key, value, g, beta, initial_state, offsets, use_qk_l2norm=use_qk_l2norm_in_kernel,
        return_state=output_final_state,
    )
    return result if output_final_state else (result, None)


def _convolution(theirs: Callable) -> Callable:
    """In place of transformers' function for the convolution, ``theirs``, which this one calls."""

    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        seq_idx: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if cu_seq_lens_q is None:
            if seq_idx is not None:
                raise ValueError(
                    "keraunos.compat.transformers: got seq_idx; expected cu_seq_lens_q with it, or neither: the delta "
                    "rule needs the offsets of packed sequences"
                )
            return theirs(hidden_states, weight, bias, activation=activation, **kwargs)
        # Sequences with zeros between them do not see each other. What a cache has put before the tokens is the first
        # one's.
        T, gap = hidden_states.shape[2], weight.shape[-1] - 1
        place = torch.arange(T, device=hidden_states.device)
        ends = cu_seq_lens_q[1:] + (T - cu_seq_lens_q[-1])
        index = place + gap * torch.searchsorted(ends, place, right=True)
        apart = hidden_states.new_zeros(*hidden_states.shape[:2], T + gap * len(ends))
        apart = apart.index_copy(2, index, hidden_states)
        return theirs(apart, weight, bias, activation=activation, **kwargs).index_select(2, index)

    return convolve


# Names that layers of the delta rule call, and what takes their place, made of what is there.
_FUNCTIONS: dict[str, Callable[[Callable], Callable]] = {
    "torch_chunk_gated_delta_rule": lambda theirs: _delta_rule,
    "torch_recurrent_gated_delta_rule": lambda theirs: _delta_rule,
    "chunk_kimi_delta_attention": lambda theirs: _delta_rule,
    "recurrent_kimi_delta_attention": lambda theirs: _delta_rule,
    "causal_conv1d_fn": _convolution,
}


@functools.cache
def _ours(kind: Any) -> Any:
    """The class of patched layers of class ``kind``, None for other modules."""
    if kind is MiniMaxLightningAttention or _theirs(kind):
        return None if _theirs(kind) else LightningAttention
    method = inspect.unwrap(kind.forward)
    called = _FUNCTIONS.keys() & getattr(getattr(method, "__code__", None), "co_names", ())
    if not called - {"causal_conv1d_fn"} or not called <= method.__globals__.keys():
        return None
    forward = _calling(kind.forward, {x: _FUNCTIONS[x](method.__globals__[x]) for x in called})
    return type(kind.__name__, (kind,), {"theirs": kind, "forward": forward, "__reduce_ex__": _reduce})


def _theirs(kind: Any) -> Any:
    """The class of transformers of patched layers of class ``kind``, None for other modules."""
    return vars(kind).get("theirs")


def _calling(function: Any, functions: dict[str, Callable]) -> Any:
    """A function's code, inside its decorators, with other functions under the global names that it calls."""
    scope, cells, inner = function.__globals__, function.__closure__, getattr(function, "__wrapped__", None)
    if inner is None:
        own = None
        # Without a name: torch.compile would look for the functions in the module of that name.
        scope = {x: value for x, value in scope.items() if x != "__name__"} | functions
    else:
        own = _calling(inner, functions)
        cells = tuple(CellType(own) if x.cell_contents is inner else x for x in cells)
    made: Any = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    functools.update_wrapper(made, function)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__wrapped__ = own
    if own is None:
        del made.__wrapped__
    return made


def _reduce(layer: Any, protocol: Any) -> tuple[Any, ...]:
    return _empty, (layer.theirs,), vars(layer)


def _empty(kind: Any) -> Any:
    """A patched layer for a pickle or copy to fill: its class is in no module."""
    made = _ours(kind)
    return made.__new__(made)


def patch(model: Any) -> Any:
    """Let the lightning layers and the layers of the gated delta rule of a model run on keraunos.

    Args:
        model: MiniMax, Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear or another model of transformers with layers that
            call its functions for the rule; or a module with such layers, or one of them. Layers that are patched
            already stay so.

    Returns:
        The model, changed in place.

    Raises:
        TypeError: model is no ``torch.nn.Module``.
        ValueError: model has no such layers.
    """
    return _replace("patch", model, _ours)


def unpatch(model: Any) -> Any:
    """Give these layers of a model their own code back; see :func:`patch`.

    Args:
        model: what :func:`patch` takes. Layers that are not patched stay as they are.

    Returns:
        The model, changed in place.

    Raises:
        TypeError: model is no ``torch.nn.Module``.
        ValueError: model has no such layers.
    """
    return _replace("unpatch", model, _theirs)


def _replace(name: str, model: Any, change: Callable[[Any], Any]) -> Any:
    """The model, whose layers become what ``change`` says of their classes."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"keraunos.compat.transformers.{name}: model is of type {type(model).__qualname__}; "
            f"expected a torch.nn.Module"
        )
    modules: list[Any] = [*model.modules()]
    layers = [x for x in modules if _theirs(x.__class__) or _ours(x.__class__)]
    if not layers:
        raise ValueError(
            f"keraunos.compat.transformers.{name}: {type(model).__qualname__} has no layers of lightning attention or "
            f"the gated delta rule; expected a model of transformers with modules such as MiniMaxLightningAttention or "
            f"Qwen3NextGatedDeltaNet"
        )
    for layer in layers:
        old, new = type(layer), change(type(layer))
        if new is None:
            continue
        layer.__class__ = new
        # Hooks that move weights between devices keep the forward that they found.
        for attribute, value in list(vars(layer).items()):
            if isinstance(value, MethodType) and value.__func__ is old.forward:
                setattr(layer, attribute, MethodType(new.forward, layer))
    return model
