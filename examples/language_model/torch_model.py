"""The model in PyTorch: the formulas and the names of parameters of `language_model.model`, as modules."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import keraunos
from language_model.config import GATE_TEMPERATURE, VOCABULARY, ModelConfig

States = tuple[Tensor, ...]


class Block(nn.Module):
    """One attention layer and one MLP, each added to the residual stream.

    Args:
        config: The sizes.
        index: Which block it is; that decides the kind of its attention, and lightning attention's decays.
        platform: The platform that computes the attention; `None` lets keraunos choose.
    """

    def __init__(self, config: ModelConfig, index: int, platform: str | None):
        super().__init__()
        width = config.width
        self.config, self.index, self.platform = config, index, platform
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output_gate = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.forget_gate = nn.Linear(width, width, bias=False) if config.blocks[index] == "gla" else None
        self.gates = nn.Linear(width, 2 * config.heads, bias=False) if config.blocks[index] == "delta" else None

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The residual stream `[B, T, width]` after the block, and the state after its last byte."""
        mixed, state = self._attention(self.attention_norm(x), state)
        x = x + mixed
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")), state

    def _attention(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        config = self.config
        heads = config.heads, config.head_dim
        query, key, value = functional.silu(self.query_key_value(x)).unflatten(-1, (3, *heads)).unbind(2)
        options: dict[str, Any] = {"return_state": True, "platform": self.platform}
        if self.forget_gate is not None:
            g = functional.logsigmoid(self.forget_gate(x)).unflatten(-1, heads) / GATE_TEMPERATURE
            o, state = keraunos.gla_attention(query, key, value, g, None, state, **options)
        elif self.gates is not None:
            decay, strength = self.gates(x).chunk(2, -1)
            g, beta = functional.logsigmoid(decay) / GATE_TEMPERATURE, torch.sigmoid(strength)
            o, state = keraunos.gated_delta_rule(query, key, value, g, beta, state, use_qk_l2norm=True, **options)
        else:
            options |= {"layer_idx": self.index, "num_layers": len(config.blocks)}
            o, state = keraunos.lightning_attention(query, key, value, state, **options)
        o = functional.rms_norm(o, o.shape[-1:], eps=1e-6).flatten(2)
        return self.output(o * functional.silu(self.output_gate(x))), state


class LanguageModel(nn.Module):
    """Predicts the next byte; see `language_model.model`.

    Every matrix keeps the variance of its input at first, and every block starts as the identity.

    Args:
        config: The sizes.
        platform: The platform that computes the attention; `None` lets keraunos choose.
    """

    def __init__(self, config: ModelConfig, platform: str | None = None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config, i, platform) for i in range(len(config.blocks)))
        self.norm = nn.RMSNorm(config.width, 1e-6)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                silent = name.endswith(("output", "down", "head"))
                nn.init.normal_(module.weight, std=0.0 if silent else module.in_features**-0.5)

    def forward(self, tokens: Tensor, states: States | None = None) -> tuple[Tensor, States]:
        """Logits of the next byte `[B, T, 256]` for bytes `[B, T]`, and the states after the last byte.

        Args:
            tokens: Any T, also 1: training, reading a prompt and generating are this one function.
            states: The states that an earlier call returned; `None` before the first byte.
        """
        x, after = self.embed(tokens), []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[i])
            after.append(state)
        return self.head(self.norm(x)), tuple(after)

    @torch.no_grad()
    def load_params(self, params: Mapping[str, Any]) -> None:
        """Takes the parameters of `language_model.model.init_params`."""
        for name, parameter in self.named_parameters():
            found: Any = params
            for part in name.removesuffix(".weight").split("."):
                found = found[int(part) if part.isdigit() else part]
            value = np.asarray(found)
            parameter.copy_(torch.tensor(value if name == "embed.weight" else value.T))
