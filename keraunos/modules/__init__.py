"""The public operations: what each computes, its checks, its configuration."""

from keraunos.modules.attention import Attention, AttentionConfig, attention
from keraunos.modules.gated_delta_rule import GatedDeltaRule, GatedDeltaRuleConfig, gated_delta_rule
from keraunos.modules.gla_attention import GLAttention, GLAttentionConfig, gla_attention
from keraunos.modules.lightning_attention import LightningAttention, LightningAttentionConfig, lightning_attention

__all__ = [
    "Attention",
    "AttentionConfig",
    "GLAttention",
    "GLAttentionConfig",
    "GatedDeltaRule",
    "GatedDeltaRuleConfig",
    "LightningAttention",
    "LightningAttentionConfig",
    "attention",
    "gated_delta_rule",
    "gla_attention",
    "lightning_attention",
]
