"""Public functions as nodes of the graphs of ``torch.compile``; :mod:`keraunos.frontends` wraps them."""

from __future__ import annotations

from collections.abc import Callable

operations: list[Callable] = []


class GraphOption:
    """An option that is a dataclass: a graph of ``torch.compile`` makes it again of its fields."""
