"""PyTorch: the arguments of public functions: they follow autocast, and errors name what no kernel takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.autograd import forward_ad

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


def refuse(fn: Callable, args: tuple, kwargs: dict[str, Any], error: Exception) -> None:
    """Say what a call that failed wants in place of tensors, or of a kind of derivative, that no kernel has.

    Raises:
        TypeError: an argument is a nested or sparse tensor, or one of MKL-DNN.
        NotImplementedError: it was called for a forward-mode derivative.
    """
    name = fn.__name__.lstrip("_")
    if isinstance(error, NotImplementedError) and forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{name}: has no forward-mode derivative (torch.func.jvp, jacfwd, hessian; torch.autograd.forward_ad); "
            "expected reverse mode, such as torch.func.vjp or jacrev"
        ) from None
    names = _parameters(fn).parameters
    for argument, x in (*zip(names, args, strict=False), *kwargs.items()):
        if isinstance(x, torch.Tensor) and (x.is_nested or x.layout != torch.strided):
            kind, wanted = _instead(x, names)
            raise TypeError(f"{name}: {argument} is {kind}; expected {wanted}") from None


def _instead(x: torch.Tensor, names: Collection[str]) -> tuple[str, str]:
    """The kind of a tensor that kernels do not take, and what to give a function with these parameters."""
    if not x.is_nested:
        return f"a tensor of layout {x.layout}", "a dense one, x.to_dense()"
    wanted = "a dense one"
    if "cu_seqlens" in names:
        wanted = "x.values() of a jagged one, with an axis of 1 in front where there is a batch, and x.offsets() as"
        wanted += " cu_seqlens"
    elif {"limits", "mask_info"} & set(names):
        wanted = "x.values()[None] of a jagged one, and sequences told apart by ids, MaskInfo.from_segments"
    return "a nested tensor", wanted
