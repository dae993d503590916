"""What ``torch.compile`` needs to know; imported while it traces, for it loads PyTorch's compiler."""

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import assume_constant_result

from keraunos import frontends


@assume_constant_result
def keep_whole() -> None:
    """Have the operations made nodes of the graph, whose Python code is run, not translated."""
    for operation in frontends.operations:
        torch.compiler.allow_in_graph(operation)


def settled(option: Any) -> Any:
    """An option of a call with its numbers, which a graph would leave open, as they are now: others, another graph."""
    if isinstance(option, list | tuple):
        return type(option)(map(settled, option))
    if isinstance(option, torch.SymInt):
        return int(option)
    return float(option) if isinstance(option, torch.SymFloat) else option


@torch.compiler.disable
def untraced(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``, no part of a graph."""
    return fn(*args, **kwargs)
