"""Other projects' functions, by their names and arguments, and layers of their models, computed by keraunos."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ejkernel", "fla", "sglang", "transformers", "vllm", "vllm_plugin"]


def __getattr__(name: str) -> Any:
    # They import their projects' frameworks.
    if name in __all__:
        return importlib.import_module(f"keraunos.compat.{name}")
    raise AttributeError(f"module 'keraunos.compat' has no attribute {name!r}")
