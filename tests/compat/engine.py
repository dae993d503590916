"""A stand-in for vLLM: the names that the plugin uses, and layers that compute nothing themselves."""

import sys
import types
import typing
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).parents[2]


class PluggableLayer(torch.nn.Module):
    def __new__(cls, *args, **kwargs):
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, layer):
        assert cls.__name__ not in op_registry_oot
        op_registry_oot[cls.__name__] = layer
        return layer


op_registry_oot: dict[str, type] = {}


class Projection(torch.nn.Linear):
    """The engine's return a bias too."""

    def forward(self, x):
        return super().forward(x), None


class Norm(torch.nn.Module):
    """Of all heads together, or of groups of them, before the gate; what is small stays so, and its scale matters."""

    def __init__(self, groups=1):
        super().__init__()
        self.groups = groups

    def _forward(self, x):
        y = x.float().unflatten(-1, (self.groups, -1))
        return (y * (y.square().mean(-1, keepdim=True) + 0.5).rsqrt()).flatten(-2).to(x.dtype)

    def forward(self, x, gate=None):
        return self._forward(x) if gate is None else self._forward(x) * gate.sigmoid()


class LinearAttention(PluggableLayer):
    projections: typing.ClassVar[dict[str, str]]

    def __init__(self, config, prefix):
        super().__init__()
        H, D, size, self.prefix = config.heads, config.dim, config.size, prefix
        self.tp_heads, self.head_dim, self.q_size_per_rank, self.kv_size_per_rank = H, D, H * D, H * D
        self.tp_slope = torch.tensor([0.05, 0.5, 1.0, 0.0])[:H].reshape(H, 1, 1)
        self.rms_norm_eps = 1e-5
        for name, out in (("qkv", 3 * H * D), ("gate", H * D)):
            setattr(self, self.projections[name], Projection(size, out, bias=False))
        setattr(self, self.projections["out"], Projection(H * D, size, bias=False))

    def forward(self, hidden_states, output, positions):
        torch.ops.standin.linear_attention(hidden_states, output, positions, self.prefix)

    def _forward(self, *args):
        raise AssertionError("the engine's own layer ran")


class MiniMaxText01LinearAttention(LinearAttention):
    projections: typing.ClassVar = {"qkv": "qkv_proj", "gate": "output_gate", "out": "out_proj"}

    def __init__(self, config, prefix):
        super().__init__(config, prefix)
        self.norm = Norm()


class BailingMoELinearAttention(LinearAttention):
    projections: typing.ClassVar = {"qkv": "query_key_value", "gate": "g_proj", "out": "dense"}

    def __init__(self, config, prefix):
        super().__init__(config, prefix)
        self.linear_silu, self.use_qk_norm, self.linear_rope, self.linear_scale = config.flags
        self.scaling = self.head_dim**-0.5
        self.group_norm_size = config.groups
        self.g_norm = Norm(config.groups)
        self.query_layernorm, self.key_layernorm = SimpleNamespace(weight=2.0), SimpleNamespace(weight=3.0)

    @staticmethod
    def rotary_emb(positions, q, k):
        """Something that depends on the position."""
        return tuple(x * (1 + positions[:, None] % 3) for x in (q, k))


class GatedDeltaNetAttention(PluggableLayer):
    """A layer of the delta rule without projections; its convolutions double what they get."""

    def __init__(self, prefix, states, A_log, dt_bias, bound=None):
        super().__init__()
        self.prefix, self.A_log, self.dt_bias, self.gate_lower_bound = prefix, A_log, dt_bias, bound
        self.activation, self.conv1d = "silu", SimpleNamespace(weight=torch.ones(1, 1, 4), bias=None)
        self.kv_cache = [states.new_zeros(len(states), 3, 1), states]
        self._checkpoint_exporter, self.exported = SimpleNamespace(export=self.export), []

    def export(self, checkpoint, *, raw_qkv, conv_state, cu_seqlens):
        self.exported.append((len(raw_qkv), cu_seqlens))

    def o_norm(self, x, gate):
        return x * gate


class QwenGatedDeltaNetAttention(GatedDeltaNetAttention):
    pass


class KimiGatedDeltaNetAttention(GatedDeltaNetAttention):
    pass


def causal_conv1d_update(x, conv_state, weight, bias, activation, *, conv_state_indices, out, num_accepted_tokens=None,
                         query_start_loc=None, max_query_len=None, validate_data):
    assert len(conv_state_indices) == (len(x) if query_start_loc is None else len(num_accepted_tokens))
    return out.copy_(2 * x)


def causal_conv1d_fn(x, weight, bias, *, activation, conv_states, has_initial_state, cache_indices, query_start_loc,
                     metadata):
    assert len(has_initial_state) == len(cache_indices) == len(query_start_loc) - 1
    return 2 * x


context = SimpleNamespace(attn_metadata=None, layers={})
if not hasattr(torch.ops.standin, "linear_attention"):

    @torch.library.custom_op("standin::linear_attention", mutates_args=("output",))
    def linear_attention(
        hidden_states: torch.Tensor, output: torch.Tensor, positions: torch.Tensor, layer: str
    ) -> None:
        context.layers[layer]._forward(hidden_states, output, positions)

    linear_attention.register_fake(lambda *args: None)


def install(monkeypatch, version="0.33.0"):
    """Put it where vLLM would be."""
    op_registry_oot.clear()
    base = "vllm.model_executor.layers.mamba.linear"
    contents = {
        "vllm": dict(__version__=version),
        "vllm.model_executor.custom_op": dict(op_registry_oot=op_registry_oot),
        "vllm.forward_context": dict(get_forward_context=lambda: context),
        f"{base}.minimax_linear_attn": dict(MiniMaxText01LinearAttention=MiniMaxText01LinearAttention),
        f"{base}.bailing_linear_attn": dict(BailingMoELinearAttention=BailingMoELinearAttention),
    }
    delta = dict(
        get_forward_context=lambda: context, is_conv_state_dim_first=lambda: False,
        causal_conv1d_update=causal_conv1d_update, causal_conv1d_fn=causal_conv1d_fn,
        eager_break_during_capture=lambda function: function,
    )
    for kind, layer in (("qwen", QwenGatedDeltaNetAttention), ("kimi", KimiGatedDeltaNetAttention)):
        contents[f"vllm.model_executor.layers.mamba.gdn.{kind}_gdn_linear_attn"] = delta | {layer.__name__: layer}
    for name, content in contents.items():
        for i in range(1, name.count(".") + 2):
            parent = ".".join(name.split(".")[:i])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        for key, value in content.items():
            monkeypatch.setattr(sys.modules[name], key, value, raising=False)
