"""The public operations over several devices, each of which has a shard of the tokens.

The functions take the arguments of those of the same name in :mod:`keraunos`, and where the other shards are:
``group=`` in PyTorch, ``axis_name=`` in JAX inside ``shard_map``, ``mesh=`` and ``spec=`` in JAX outside.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keraunos.kernels import FAMILIES

if TYPE_CHECKING:
    from keraunos.distributed.linear import gated_delta_rule as gated_delta_rule
    from keraunos.distributed.linear import gla_attention as gla_attention
    from keraunos.distributed.linear import lightning_attention as lightning_attention
    from keraunos.distributed.softmax import attention as attention

# Public name -> the module that defines it, imported at its first use; none has the name itself, as it would hide it.
_HOME = {operation.function: operation.distributed for family in FAMILIES for operation in family.operations
         if operation.distributed}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'keraunos.distributed' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"keraunos.distributed.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
