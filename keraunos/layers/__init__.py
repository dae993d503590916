"""Ready-made token-mixing layers: ``keraunos.layers.torch`` has PyTorch modules, ``keraunos.layers.flax`` NNX modules.

Both have ``GatedLinearAttention``, ``SimpleGatedLinearAttention``, ``GatedDeltaNet``, ``KimiDeltaAttention`` and
``LightningAttention``, with the same arguments, the same names of parameters, and the same results from the same
weights. A :class:`Cache` carries a layer from one call to the next. ``docs/layers.md`` shows how models use them.
"""

from __future__ import annotations

import importlib
from typing import Any

from keraunos.layers.delta import DeltaNames
from keraunos.layers.mixers import Cache, Names

__all__ = ["Cache", "DeltaNames", "Names", "flax", "torch"]


def __getattr__(name: str) -> Any:
    # They import their frameworks.
    if name in ("flax", "torch"):
        return importlib.import_module(f"keraunos.layers.{name}")
    raise AttributeError(f"module 'keraunos.layers' has no attribute {name!r}")
