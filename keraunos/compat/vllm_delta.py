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


class _Step:
    """A layer's step by the engine's metadata ``m``: projections ``x [tokens, dim]`` and raw gates fill ``out``."""

    def __init__(self, layer: Any, m: Any, gate: tuple[int, ...], lower_bound: float | None):
        """Take what the layer has; ``gate``: the shape of a token's gates."""
        self.layer, self.m = layer, m
        conv_state, self.states = layer.kv_cache[:2]
        self.conv_state = conv_state if layer.engine.is_conv_state_dim_first() else conv_state.transpose(-1, -2)
        self.weight, self.bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
        self.options: Any = dict(use_qk_l2norm=True, state_v_first=True)
        self.gates: Any = dict(A_log=layer.A_log, dt_bias=layer.dt_bias.view(gate), lower_bound=lower_bound)

    def rows(self, x: Tensor, **gates: Tensor) -> dict[str, Any]:
        """The arrays of a call."""
        return dict(zip(("query", "key", "value"), heads(x, self.states), strict=True), **gates)

    def update(self, x: Tensor, slots: Tensor, **more: Any) -> Tensor:
        """The convolution of a token or of drafts."""
        made: Tensor = self.layer.engine.causal_conv1d_update(
            x, self.conv_state, self.weight, self.bias, self.layer.activation, conv_state_indices=slots,
            out=torch.empty(x.shape, dtype=x.dtype, device=x.device), validate_data=False, **more,
        )
        return made

    def drafts(self, x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Requests with drafts."""
        N, slots, begin = self.m.num_spec_decodes, self.m.spec_state_indices_tensor, self.m.spec_query_start_loc
        accepted = self.m.num_accepted_tokens[:N]
        x = self.update(x, slots[:N, 0], num_accepted_tokens=accepted, query_start_loc=begin,
                        max_query_len=slots.shape[1])
        verify(self.rows(x, a=a, b=b), self.states, slots[:N], begin[: N + 1], accepted, out,
               self.options | self.gates)

    def others(self, x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Requests with a token each, which come first, and prompts."""
        m, slots = self.m, self.m.non_spec_state_indices_tensor
        # Without prompts, rows of padding are among those with a token.
        d = m.num_decode_tokens if m.num_prefills else len(x)
        if m.num_prefills:
            y = self.layer.engine.causal_conv1d_fn(
                x.transpose(0, 1), self.weight, self.bias, activation=self.layer.activation,
                conv_states=self.conv_state, has_initial_state=m.has_initial_state, cache_indices=slots,
                query_start_loc=m.non_spec_query_start_loc, metadata=m,
            ).transpose(0, 1)
        else:
            y = self.update(x, slots[:d])
        if d:
            serving.decode(**self.rows(y[:d], a=a[:d], b=b[:d]), states=self.states, slots=live(slots[:d]),
                           out=out[:d], **self.options, **self.gates)
        if m.num_prefills:
            self.prompts(y[d:], a[d:], b[d:], out[d:], self.boundaries(x))

    def prompts(self, x: Tensor, a: Tensor, b: Tensor, out: Tensor, boundaries: tuple[Tensor, Tensor] | None) -> None:
        """Prompts, or parts of them."""
        A_log, bias, lower_bound = self.gates.values()
        g: Any = decay.gates(a, A_log.view(-1, *[1] * (a.ndim - 2)), bias, lower_bound or 0.0)
        serving.prefill(
            **self.rows(x, g=g, beta=b.float().sigmoid()), states=self.states,
            slots=live(self.m.prefill_state_indices), cu_seqlens=self.m.prefill_query_start_loc,
            has_initial=self.m.prefill_has_initial_state, boundaries=boundaries, out=out, **self.options,
        )

    def boundaries(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The states that the prefix cache keeps; convolutions' inputs, of ``x``, are exported by the engine."""
        m, offsets = self.m, self.m.prefill_query_start_loc
        if m.checkpoint is None:
            return None
        self.layer._checkpoint_exporter.export(
            m.checkpoint, raw_qkv=x, conv_state=self.conv_state, cu_seqlens=m.non_spec_query_start_loc
        )
        N = len(m.prefill_state_indices)
        after, to = (z[-N:] for z in (m.checkpoint.checkpoint_offsets, m.checkpoint.state_indices))
        tokens = offsets[:-1] + after.clamp(min=1) - 1
        return tokens.to(offsets.dtype), live(torch.where(after > 0, to, 0))


class _Layer:
    """The base of both layers; the engine's class comes after it among a layer's bases."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The attributes of the engine's class."""

    def _recur(self, x: Tensor, a: Tensor, b: Tensor, out: Tensor, lower_bound: float | None = None) -> bool:
        """Fill ``out [tokens, HV, V]`` from projections, ``x [tokens, dim]``; False in runs that measure memory.

        Raw gates are ``a``, ``[tokens, HV]`` or ``[tokens, HV, K]``, and ``b [tokens, HV]``.
        """
        found = self.engine.get_forward_context().attn_metadata  # of the module of its class
        m = found.get(self.prefix) if isinstance(found, dict) else None
        if m is None:
            return False
        step = _Step(self, m, a.shape[1:], lower_bound)
        x, a, b, out = (z[: m.num_actual_tokens] for z in (x, a, b, out))
        if m.spec_sequence_masks is None:
            step.others(x, a, b, out)
        elif m.num_prefills + m.num_decodes == 0:
            step.drafts(x, a, b, out)
        else:
            for tokens, run in ((m.spec_token_indx, step.drafts), (m.non_spec_token_indx, step.others)):
                made = out.new_empty(len(tokens), *out.shape[1:])
                run(x[tokens], a[tokens], b[tokens], made)
                out[tokens] = made
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
