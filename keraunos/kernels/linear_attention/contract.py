"""The contract of the linear recurrence: the arrays of a call, its operations; see :class:`Recurrence`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from keraunos import decay, frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.recurrent.contract import Options as Options
from keraunos.kernels.recurrent.contract import Recurrence, folded, most_heads
from keraunos.ops import checks
from keraunos.ops.registry import Implementation

# One decay per head, as it is given: an array, or numbers.
Decay: TypeAlias = "Array | list[float] | tuple[float, ...]"


class Args(NamedTuple):
    """The arrays of one call; absent ones are ``None``.

    The recurrence has H heads, the most that query, key, value or g has. Head h reads head ``h // (H // n)`` of an
    array with n heads; n divides H.
    """

    query: Any  # [B, T, heads, K]
    key: Any  # [B, T, heads, K]
    value: Any  # [B, T, heads, V]
    g: Any = None  # [B, T, heads, K] or [B, T, heads], log, <= 0
    g_gamma: Any = None  # [H] or [B, H], log, <= 0
    initial_state: Any = None  # [N, H, K, V]
    cu_seqlens: Any = None  # [N + 1], int

    @property
    def tokens(self) -> tuple:
        """The arrays of tokens."""
        return self[:4]

    @property
    def heads(self) -> int:
        """H, the heads of the recurrence."""
        return most_heads(*self[:4])


def placed(function: str, cu_seqlens: Array | None, query: Array) -> Array | None:
    """NumPy offsets as a constant on the query's device; see :func:`checks.placed`."""
    return checks.placed(function, cu_seqlens, query, query.shape[1] if getattr(query, "ndim", 0) == 4 else None)


def fold(args: Args, size: int) -> Args | None:
    """``size`` calls at once, their arrays stacked along a new first axis, as one call with a larger batch.

    Packed sequences are joined to one longer row. Arrays of tokens and states keep their order in memory. A decay
    per call comes back as one per sequence of the batch; None: packed sequences share theirs, so calls with decays of
    their own cannot be one.
    """
    gamma = args.g_gamma
    if gamma is not None:
        if args.cu_seqlens is not None:
            return None
        B, H = args.query.shape[1], max(x.shape[3] for x in args.tokens if x is not None)
        xp = frontends.of(args.query).xp
        gamma = gamma if gamma.ndim == 3 else xp.broadcast_to(gamma[:, None], (size, B, H))
        gamma = gamma.reshape(size * B, H)
    return Args(**folded(args, size), g_gamma=gamma)


def constant_decay(op_id: str, query: Array, num_heads: int, layer_idx: int | Array | None, num_layers: int | None,
                   log_decay: Decay | None) -> Array | None:
    """Lightning's decay per head: ``log_decay``, or the formula for a layer as a NumPy array.

    Raises:
        ValueError: both or neither are given, or the layer is out of range.
        TypeError: ``layer_idx`` or ``num_layers`` is no integer, or ``log_decay`` no numbers.
    """
    if log_decay is None:
        if layer_idx is None or num_layers is None:
            raise ValueError(f"{op_id}: expected layer_idx and num_layers, or log_decay; got neither pair nor decay")
        if isinstance(layer_idx, int) and isinstance(num_layers, int):
            # A number, also where the compiler leaves sizes open: the decay is a constant of its graph.
            return _remembered_layer(op_id, int(num_heads), layer_idx, num_layers)
        return _layer(op_id, num_heads, layer_idx, num_layers)
    if layer_idx is not None or num_layers is not None:
        raise ValueError(f"{op_id}: got log_decay and layer_idx or num_layers; expected one or the other")
    return per_head(op_id, query, "log_decay", log_decay)


def _layer(op_id: str, num_heads: int, layer_idx: int | Array, num_layers: int) -> Array:
    decay.check(op_id, num_heads, layer_idx, num_layers)
    return decay.lightning(num_heads, layer_idx, num_layers)


# By type too: what equals a layer, such as True, is none, and has to reach the check.
_remembered_layer = functools.lru_cache(maxsize=1024, typed=True)(_layer)


def per_head(function: str, query: Array, argument: str, x: Decay | None) -> Array | None:
    """A decay per head: an array of a framework as it is, numbers as a NumPy array for this query, None as None.

    Raises:
        TypeError: it is none of these.
    """
    # Numbers first: they are slow to be told from arrays.
    if x is None or (not isinstance(x, list | tuple | float | np.ndarray) and frontends.framework_of(x)):
        return x
    try:
        return np.asarray(x, np.float64 if str(getattr(query, "dtype", "")).endswith("float64") else np.float32)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: {argument} is {x!r}; expected an array or numbers, one per head") from None


# Forward one product changes the state, and one reads it; backward one makes the states again.
GLA = Recurrence("gla", "gla_attention", Args, Args._fields, (2, 5), fold)
LIGHTNING = Recurrence("lightning_attn", "lightning_attention", Args, (*Args._fields[:3], *Args._fields[4:]), (2, 5),
                       fold, names={"g_gamma": "log_decay"})


def kernels(*platform: Any, **about: Any) -> tuple[Implementation, Implementation]:
    """The implementations ``(gla, lightning_attn)`` of a platform; see :meth:`Recurrence.implementation`."""
    return GLA.implementation(*platform, **about), LIGHTNING.implementation(*platform, **about)
