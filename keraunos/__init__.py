"""Attention kernels for JAX and PyTorch: lightning attention, GLA, the gated delta rule and softmax attention."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keraunos.version import __version__ as __version__

if TYPE_CHECKING:
    from keraunos import compat as compat
    from keraunos import decay as decay
    from keraunos import distributed as distributed
    from keraunos import kernels as kernels
    from keraunos import layers as layers
    from keraunos import ops as ops
    from keraunos import serving as serving
    from keraunos import types as types
    from keraunos.kernels import detect_platform as detect_platform
    from keraunos.kernels import kernel_registry as kernel_registry
    from keraunos.modules.attention import Attention as Attention
    from keraunos.modules.attention import AttentionConfig as AttentionConfig
    from keraunos.modules.attention import attention as attention
    from keraunos.modules.gated_delta_rule import GatedDeltaRule as GatedDeltaRule
    from keraunos.modules.gated_delta_rule import GatedDeltaRuleConfig as GatedDeltaRuleConfig
    from keraunos.modules.gated_delta_rule import gated_delta_rule as gated_delta_rule
    from keraunos.modules.gla_attention import GLAttention as GLAttention
    from keraunos.modules.gla_attention import GLAttentionConfig as GLAttentionConfig
    from keraunos.modules.gla_attention import gla_attention as gla_attention
    from keraunos.modules.lengths import bucketed as bucketed
    from keraunos.modules.lightning_attention import LightningAttention as LightningAttention
    from keraunos.modules.lightning_attention import LightningAttentionConfig as LightningAttentionConfig
    from keraunos.modules.lightning_attention import lightning_attention as lightning_attention
    from keraunos.ops.cache import ConfigCache as ConfigCache
    from keraunos.ops.cache import PersistentCache as PersistentCache
    from keraunos.ops.executor import Executor as Executor
    from keraunos.ops.executor import create_default_executor as create_default_executor
    from keraunos.ops.executor import explain as explain
    from keraunos.ops.invocation import Backend as Backend
    from keraunos.ops.invocation import Config as Config
    from keraunos.ops.invocation import Invocation as Invocation
    from keraunos.ops.invocation import Platform as Platform
    from keraunos.ops.invocation import UnsupportedError as UnsupportedError
    from keraunos.ops.kernel import Kernel as Kernel
    from keraunos.ops.selection import AutotunePolicy as AutotunePolicy
    from keraunos.ops.selection import Choice as Choice
    from keraunos.ops.selection import ConfigSelectorChain as ConfigSelectorChain
    from keraunos.ops.selection import overlay_cache as overlay_cache
    from keraunos.ops.selection import policy_override as policy_override
    from keraunos.ops.tuner import Tuner as Tuner

# The public names of each module, which is imported at their first use: importing keraunos loads no framework.
_NAMES = {
    "kernels": ("detect_platform", "kernel_registry"),
    "modules.attention": ("Attention", "AttentionConfig", "attention"),
    "modules.gated_delta_rule": ("GatedDeltaRule", "GatedDeltaRuleConfig", "gated_delta_rule"),
    "modules.gla_attention": ("GLAttention", "GLAttentionConfig", "gla_attention"),
    "modules.lengths": ("bucketed",),
    "modules.lightning_attention": ("LightningAttention", "LightningAttentionConfig", "lightning_attention"),
    "ops.cache": ("ConfigCache", "PersistentCache"),
    "ops.executor": ("Executor", "create_default_executor", "explain"),
    "ops.invocation": ("Backend", "Config", "Invocation", "Platform", "UnsupportedError"),
    "ops.kernel": ("Kernel",),
    "ops.selection": ("AutotunePolicy", "Choice", "ConfigSelectorChain", "overlay_cache", "policy_override"),
    "ops.tuner": ("Tuner",),
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}
_MODULES = ("compat", "decay", "distributed", "kernels", "layers", "ops", "serving", "types")

__all__ = ["__version__", *_MODULES, *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"keraunos.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"keraunos.{name}")
    else:
        raise AttributeError(f"module 'keraunos' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
