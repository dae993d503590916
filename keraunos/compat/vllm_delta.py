"""vLLM's layers of the delta rule, computed by :mod:`keraunos.serving`; :mod:`keraunos.compat.vllm_plugin` uses them.

Projections, convolutions and norms are the engine's. A step is one ``serving.decode`` for requests with a token each,
one ``serving.verify`` for drafts and one ``serving.prefill`` for prompts, on the pool ``[blocks, HV, V, K]`` as it is:
no state is gathered or scattered, and no value is read on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from keraunos import decay, serving
from keraunos.compat.steps import heads, live, verify

Tensor = torch.Tensor


class _Layer:
    """The base of both layers; the engine's class comes after it among a layer's bases."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The attributes of the engine's class."""

    def _recur(self, x: Tensor, a: Tensor, b: Tensor, out: Tensor, lower_bound: float | None = None) -> bool:
        """Fill ``out [tokens, HV, V]`` from projections, ``x [tokens, dim]``; False in runs that measure memory.

        Raw gates are ``a``, ``[tokens, HV]`` or ``[tokens, HV, K]``, and ``b [tokens, HV]``.
        """
        engine = self.engine  # the module of its class
        found = engine.get_forward_context().attn_metadata
        m = found.get(self.prefix) if isinstance(found, dict) else None
        if m is None:
            return False
        conv_state, states = self.kv_cache[:2]
        if not engine.is_conv_state_dim_first():
            conv_state = conv_state.transpose(-1, -2)
        _, HV, V, K = states.shape
        options: Any = dict(use_qk_l2norm=True, state_v_first=True)
        bias = self.dt_bias if a.ndim == 2 else self.dt_bias.view(HV, K)
        raw = options | dict(A_log=self.A_log, dt_bias=bias, lower_bound=lower_bound)
        convolution = conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation

        def rows(y: Tensor, **gates: Tensor) -> dict[str, Any]:
            return dict(zip(("query", "key", "value"), heads(y, states), strict=True), **gates)

        def update(y: Tensor, slots: Tensor, **more: Any) -> Tensor:
            made: Tensor = engine.causal_conv1d_update(
                y, *convolution, conv_state_indices=slots, out=torch.empty(y.shape, dtype=y.dtype, device=y.device),
                validate_data=False, **more,
            )
            return made

        n = m.num_actual_tokens
        x, a, b, rest = x[:n], a[:n], b[:n], out[:n]
        both = m.spec_sequence_masks is not None and m.num_prefills + m.num_decodes > 0
        if m.spec_sequence_masks is not None:
            N, slots, begin = m.num_spec_decodes, m.spec_state_indices_tensor, m.spec_query_start_loc
            accepted = m.num_accepted_tokens[:N]
            y, some, other, made = x, a, b, rest
            if both:
                y, some, other = (z[m.spec_token_indx] for z in (x, a, b))
                made = out.new_empty(len(y), HV, V)
            drafts = dict(num_accepted_tokens=accepted, query_start_loc=begin, max_query_len=slots.shape[1])
            y = update(y, slots[:N, 0], **drafts)
            verify(rows(y, a=some, b=other), states, slots[:N], begin[: N + 1], accepted, made, raw)
            if not both:
                return True
            out[m.spec_token_indx] = made
            x, a, b = (z[m.non_spec_token_indx] for z in (x, a, b))
            rest = out.new_empty(len(x), HV, V)
        # Requests with a token each come first; without prompts, their rows of padding are among them.
        d = m.num_decode_tokens if m.num_prefills else len(x)
        slots = m.non_spec_state_indices_tensor
        if m.num_prefills:
            y = engine.causal_conv1d_fn(
                x.transpose(0, 1), *convolution[1:3], activation=self.activation, conv_states=conv_state,
                has_initial_state=m.has_initial_state, cache_indices=slots,
                query_start_loc=m.non_spec_query_start_loc, metadata=m,
            ).transpose(0, 1)
        else:
            y = update(x, slots[:d])
        if d:
            serving.decode(**rows(y[:d], a=a[:d], b=b[:d]), states=states, slots=live(slots[:d]), out=rest[:d], **raw)
        if m.num_prefills:
            own, offsets = m.prefill_state_indices, m.prefill_query_start_loc
            boundaries = None
            if m.checkpoint is not None:
                # For the prefix cache: convolutions by the engine, states while prompts are computed.
                self._checkpoint_exporter.export(
                    m.checkpoint, raw_qkv=x, conv_state=conv_state, cu_seqlens=m.non_spec_query_start_loc
                )
                after, to = (z[-len(own):] for z in (m.checkpoint.checkpoint_offsets, m.checkpoint.state_indices))
                tokens = offsets[:-1] + after.clamp(min=1) - 1
                boundaries = tokens.to(offsets.dtype), live(torch.where(after > 0, to, 0))
            gates: Any = decay.gates(a[d:], self.A_log.view(HV, *[1] * (a.ndim - 2)), bias, lower_bound or 0.0)
            serving.prefill(
                **rows(y[d:], g=gates, beta=b[d:].float().sigmoid()), states=states, slots=live(own),
                cu_seqlens=offsets, has_initial=m.prefill_has_initial_state, boundaries=boundaries, out=rest[d:],
                **options,
            )
        if both:
            out[m.non_spec_token_indx] = rest
        return True


class GatedDeltaNetLayer(_Layer):
    """vLLM's ``qwen_gated_delta_net_attention``."""

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        self._recur(mixed_qkv, a, b, core_attn_out)

    def _can_use_fused_gdn_mtp_decode(self, attn_metadata: Any) -> bool:
        return False


class KimiLayer(_Layer):
    """vLLM's ``kimi_gated_delta_net_attention``."""

    def _forward(self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
        if self._recur(mixed_qkv, g1[0], beta[0], core_attn_out[0], self.gate_lower_bound):
            core_attn_out.copy_(self.o_norm(core_attn_out, g2))
