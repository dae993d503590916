"""PyTorch: a public function's arguments before anything else: they follow autocast; nested tensors are refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

_parameters = functools.cache(inspect.signature)


# What autocast casts: not float64.
_NARROWER = {torch.float32, torch.float16, torch.bfloat16}


def autocast(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a public function, query, key and value cast as autocast would for PyTorch's own attention.

    Gates, decays, states and biases are not cast, nor anything where the call says the dtype itself.
    """
    try:
        bound = _parameters(fn).bind(*args, **kwargs)
    except TypeError:
        return args, kwargs  # the call is refused
    bound.apply_defaults()
    given = bound.arguments
    if given.get("dtype") is not None:
        return args, kwargs
    for name in ("query", "key", "value"):
        x = given.get(name)
        if isinstance(x, torch.Tensor) and x.dtype in _NARROWER and torch.amp.is_autocast_available(x.device.type):
            kind = x.device.type
            given[name] = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
    return bound.args, bound.kwargs


def refuse_nested(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Say what a call wants that failed on a nested tensor.

    Raises:
        TypeError: an argument is one.
    """
    names = _parameters(fn).parameters
    wanted = "a dense one"
    if "cu_seqlens" in names:
        wanted = "x.values() of a jagged one, with an axis of 1 in front where there is a batch, and x.offsets() as"
        wanted += " cu_seqlens"
    elif {"limits", "mask_info"} & set(names):
        wanted = "x.values()[None] of a jagged one, and sequences told apart by ids, MaskInfo.from_segments"
    for name, x in (*zip(names, args, strict=False), *kwargs.items()):
        if isinstance(x, torch.Tensor) and x.is_nested:
            raise TypeError(f"{fn.__name__.lstrip('_')}: {name} is a nested tensor; expected {wanted}") from None
