"""Support for ``torch.compile``; imported while it traces, for it loads PyTorch's compiler."""

import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch._dynamo import assume_constant_result

from keraunos.frontends.graph_nodes import GraphOption, operations


@assume_constant_result
def keep_whole() -> None:
    """Have the operations made nodes of the graph, whose Python code is run, not translated."""
    for operation in operations:
        torch.compiler.allow_in_graph(operation)


def made_again(option: Any) -> Any:
    """An option with its whole numbers concrete: a graph makes dataclasses again, and their checks want numbers.

    This code is translated: :func:`operator.index` is where the compiler settles a number.
    """
    if isinstance(option, GraphOption):
        return type(option)(
            **{
                x.name: made_again(getattr(option, x.name))
                for x in fields(option)  # type: ignore[arg-type]
            }
        )
    if isinstance(option, tuple):
        return tuple([made_again(x) for x in option])
    return operator.index(option) if isinstance(option, int) and not isinstance(option, bool) else option


def concrete(option: Any) -> Any:
    """An option of a call with its numbers, which a graph would leave open, as they are now: others, another graph."""
    if isinstance(option, list | tuple):
        return type(option)(map(concrete, option))
    if isinstance(option, torch.SymInt):
        return int(option)
    return float(option) if isinstance(option, torch.SymFloat) else option


@torch.compiler.disable
def untraced(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``, no part of a graph."""
    return fn(*args, **kwargs)
