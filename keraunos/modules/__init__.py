"""The public operations: what each computes, its checks, its configuration."""

from keraunos.modules.attention import Attention, AttentionConfig, attention
from keraunos.modules.gla_attention import GLAttention, GLAttentionConfig, gla_attention
from keraunos.modules.lightning_attention import LightningAttention, LightningAttentionConfig, lightning_attention

__all__ = [
    "Attention",
    "AttentionConfig",
    "GLAttention",
    "GLAttentionConfig",
    "LightningAttention",
    "LightningAttentionConfig",
    "attention",
    "gla_attention",
    "lightning_attention",
]
