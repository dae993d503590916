"""How a call is configured: operations, executor, selection, caches, tuner."""

from keraunos.ops.cache import ConfigCache, PersistentCache
from keraunos.ops.executor import Executor, create_default_executor, explain
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.kernel import Kernel
from keraunos.ops.selection import AutotunePolicy, Choice, ConfigSelectorChain, overlay_cache, policy_override
from keraunos.ops.tuner import Tuner

__all__ = [
    "AutotunePolicy",
    "Choice",
    "Config",
    "ConfigCache",
    "ConfigSelectorChain",
    "Executor",
    "Invocation",
    "Kernel",
    "PersistentCache",
    "Tuner",
    "create_default_executor",
    "explain",
    "overlay_cache",
    "policy_override",
]
