"""Types of arguments: :class:`MaskInfo`, which keys a query of softmax attention may see."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.frontends.graph_nodes import GraphOption

# A window that reaches further reaches everything; places and this can be added in 32 bits.
_WIDEST = 1 << 30
_ARRAYS = ("attention_mask", "query_segments", "key_segments", "key_lengths")


def as_window(sliding_window: int | tuple[int, int] | None, name: str = "attention") -> tuple[int, int] | None:
    """``(left, right)`` of a window given as one number or two.

    Raises:
        ValueError: it is something else, or negative.
    """
    if sliding_window is None:
        return None
    pair = sliding_window if isinstance(sliding_window, tuple | list) else (sliding_window, sliding_window)
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0 for n in pair)
    if len(pair) != 2 or not whole:
        raise ValueError(
            f"{name}: sliding_window is {sliding_window!r}; expected w or (left, right), whole numbers >= 0"
        )
    return min(int(pair[0]), _WIDEST), min(int(pair[1]), _WIDEST)


def as_offset(query_offset: int | Array | list[int] | tuple[int, ...] | None,
              op: str = "attention") -> int | Array | None:
    """An int, or an array of integers, ``[]`` or ``[B]``; a list becomes a NumPy array. None stays None.

    Raises:
        TypeError: it is something else.
        ValueError: it has more dimensions.
    """
    if query_offset is None:
        return None
    if isinstance(query_offset, list | tuple):
        query_offset = np.asarray(query_offset)
    if isinstance(query_offset, int | np.integer) and not isinstance(query_offset, bool):
        return int(query_offset)
    if isinstance(query_offset, int) or not _dtype(query_offset).startswith(("int", "uint")):
        raise TypeError(f"{op}: query_offset is {_kind(query_offset)}; expected an int or an array of integers")
    if query_offset.ndim > 1:
        raise ValueError(f"{op}: query_offset has shape {tuple(query_offset.shape)}; expected an int or [B]")
    return query_offset


@dataclass(frozen=True)
class MaskInfo(GraphOption):
    """Which keys a query may see: a boolean mask or segment ids, and limits on top of them.

    Made by :meth:`from_attention_mask` or :meth:`from_segments`; JAX takes it as a pytree. A key is visible where the
    mask is true, or the ids are equal and not negative, and where all limits allow it. Segment ids and limits take
    memory for ``T + S`` values and are handed to the kernels as they are; a mask takes ``T * S``. Arrays of NumPy go
    with calls of either framework.

    Attributes:
        attention_mask: ``[1 or B, heads, T, S]``, bool, or None.
        query_segments, key_segments: ``[B, T]`` and ``[B, S]``, integers, or None; below 0: padding.
        key_lengths: ``[B]``, integers: keys from there on are padding; or None.
        causal: query t sees keys 0 to ``query_offset + t`` only.
        sliding_window: ``(left, right)``: query t sees keys ``query_offset + t - left`` to ``query_offset + t + right``
            only; or None.
        query_offset: the place of the first query among the keys, for causality and window: an int, or integers
            ``[B]``; None: 0.
    """

    attention_mask: Any = None
    query_segments: Any = None
    key_segments: Any = None
    key_lengths: Any = None
    causal: bool = False
    sliding_window: tuple[int, int] | None = None
    query_offset: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise TypeError(f"MaskInfo: causal is {self.causal!r}; expected True or False")
        object.__setattr__(self, "sliding_window", as_window(self.sliding_window, "MaskInfo"))
        if "jax" in sys.modules and not _registered and not frontends.compiling():
            _register()

    @classmethod
    def from_attention_mask(cls, attention_mask: Array) -> MaskInfo:
        """From a boolean mask, true where a query may see a key.

        Args:
            attention_mask: ``[T, S]``, ``[1 or B, T, S]`` or ``[1 or B, heads, T, S]``, bool.

        Raises:
            TypeError: it is no boolean array.
            ValueError: it has other dimensions.
        """
        if _dtype(attention_mask) != "bool":
            raise TypeError(f"from_attention_mask: got {_kind(attention_mask)}; expected an array of booleans")
        if attention_mask.ndim not in (2, 3, 4):
            raise ValueError(
                f"from_attention_mask: shape {tuple(attention_mask.shape)}; expected [T, S], [B, T, S] or [B, H, T, S]"
            )
        shape = tuple(attention_mask.shape)
        given = {2: (1, 1, *shape), 3: (shape[0], 1, *shape[1:])}.get(len(shape), shape)
        return cls(attention_mask=attention_mask.reshape(given))

    @classmethod
    def from_segments(cls, query_segments: Array, key_segments: Array | None = None) -> MaskInfo:
        """From segment ids: a query sees the keys that have its id; ids below 0 see nothing and are not seen.

        Args:
            query_segments: ``[B, T]``, integers.
            key_segments: ``[B, S]``, integers; the queries' if None.

        Raises:
            TypeError: an argument is no array of integers.
            ValueError: the shapes do not fit.
        """
        key_segments = query_segments if key_segments is None else key_segments
        for name, x in (("query_segments", query_segments), ("key_segments", key_segments)):
            if not _dtype(x).startswith(("int", "uint")):
                raise TypeError(f"from_segments: {name} is {_kind(x)}; expected an array of integers")
            if x.ndim != 2 or x.shape[0] != query_segments.shape[0]:
                raise ValueError(f"from_segments: {name} has shape {tuple(x.shape)}; expected [B, T] and [B, S]")
        return cls(query_segments=query_segments, key_segments=key_segments)

    def apply_causal(self, query_offset: int | Array | None = None) -> MaskInfo:
        """This mask, with no key after the query.

        Args:
            query_offset: the place of the first query among the keys, from which windows count, too: an int, or
                integers ``[B]``, one for each sequence. None: what it was, or 0.

        Raises:
            TypeError: it is neither.
            ValueError: there is one already, or it has other dimensions.
        """
        if query_offset is None:
            return replace(self, causal=True)
        if self.query_offset is not None:
            raise ValueError("apply_causal: there is a query_offset already; give it once")
        return replace(self, causal=True, query_offset=as_offset(query_offset, "apply_causal"))

    def apply_sliding_window(self, sliding_window: int | tuple[int, int]) -> MaskInfo:
        """This mask, where query t sees only keys ``query_offset + t - left`` to ``query_offset + t + right``.

        Args:
            sliding_window: ``(left, right)``, or one number for both.

        Raises:
            ValueError: it is no window.
        """
        return replace(self, sliding_window=narrower(self.sliding_window, as_window(sliding_window, "MaskInfo")))

    def apply_kv_lengths(self, key_lengths: Array) -> MaskInfo:
        """This mask, with no key from position ``key_lengths[b]`` on.

        Args:
            key_lengths: ``[B]``, integers.

        Raises:
            TypeError: it is no array of integers.
            ValueError: there are lengths already, or it has other dimensions.
        """
        if self.key_lengths is not None:
            raise ValueError("apply_kv_lengths: there are lengths already; combine them first")
        if not _dtype(key_lengths).startswith(("int", "uint")):
            raise TypeError(f"apply_kv_lengths: key_lengths is {_kind(key_lengths)}; expected an array of integers")
        if key_lengths.ndim != 1:
            raise ValueError(f"apply_kv_lengths: key_lengths has shape {tuple(key_lengths.shape)}; expected [B]")
        return replace(self, key_lengths=key_lengths)

    def get_or_compute_attention_mask(self, T: int | None = None, S: int | None = None) -> Any:
        """All of it as one boolean mask ``[1 or B, heads, T, S]``.

        Args:
            T, S: how many queries and keys; needed if there is neither a mask nor segment ids.

        Raises:
            ValueError: they are needed, and one is not given.
        """
        arrays = [x for x in (*self._arrays(), self.query_offset) if x is not None and not isinstance(x, int)]
        given = next((x for x in arrays if not isinstance(x, np.ndarray)), None)
        if given is not None and any(isinstance(x, np.ndarray) for x in arrays):
            return self.placed(given).get_or_compute_attention_mask(T, S)
        xp: Any = _namespace(given)
        if self.attention_mask is not None:
            T, S = self.attention_mask.shape[-2:]
        elif self.query_segments is not None:
            T, S = self.query_segments.shape[1], self.key_segments.shape[1]
        elif T is None or S is None:
            raise ValueError("get_or_compute_attention_mask: neither a mask nor segment ids are there; give T and S")
        # Where the arrays are.
        place = {"device": given.device} if given is not None and xp is sys.modules.get("torch") else {}
        t, s = xp.arange(T, **place)[:, None], xp.arange(S, **place)[None]
        mask = xp.ones((1, 1, T, S), dtype=xp.bool if xp is not np else np.bool_, **place)
        if self.attention_mask is not None:
            mask = mask & self.attention_mask
        if self.query_segments is not None:
            own = self.query_segments[:, None, :, None]
            mask = mask & (own == self.key_segments[:, None, None, :]) & (own >= 0)
        if self.key_lengths is not None:
            mask = mask & (s < self.key_lengths[:, None, None])[:, None]
        place = t
        if isinstance(self.query_offset, int):
            place = t + self.query_offset
        elif self.query_offset is not None:
            place = t + self.query_offset.reshape(-1, 1, 1, 1)
        if self.causal:
            mask = mask & (s <= place)
        if self.sliding_window is not None:
            left, right = self.sliding_window
            mask = mask & (s >= place - left) & (s <= place + right)
        return mask

    def placed(self, like: Array) -> MaskInfo:
        """This mask, with NumPy arrays as arrays of the framework of ``like``, on its device."""
        own = {name: getattr(self, name) for name in (*_ARRAYS, "query_offset")}
        host = {name: x for name, x in own.items() if isinstance(x, np.ndarray)}
        framework = frontends.framework_of(like) if host else None
        if framework is None:
            return self
        array = frontends.get(framework).array
        return replace(self, **{name: array(x, like) for name, x in host.items()})

    def get_or_compute_segment_ids(self) -> tuple[Any, Any]:
        """``(query_segments, key_segments)``, ``[B, T]`` and ``[B, S]``, without the limits.

        They are as given, or int32 of a mask, which must consist of blocks and be the same for all heads. A key's id is
        then the first query that sees it.

        Raises:
            ValueError: there are no ids and no mask, or the mask does not consist of blocks (if its values are known).
        """
        if self.query_segments is not None:
            return self.query_segments, self.key_segments
        mask = self.attention_mask
        if mask is None or mask.shape[1] != 1:
            raise ValueError("get_or_compute_segment_ids: needs segment ids, or a mask that is the same for all heads")
        xp, mask = _namespace(mask), mask[:, 0]
        numbers = mask.astype(np.int32) if xp is not sys.modules.get("torch") else mask.int()
        keys = xp.where(mask.any(1), numbers.argmax(1), -1)
        first = numbers.argmax(2)
        own = xp.take_along_axis(keys, first, 1) if hasattr(xp, "take_along_axis") else keys.gather(1, first)
        own = xp.where(mask.any(2), own, -1)
        same = (own[:, :, None] == keys[:, None, :]) & (own[:, :, None] >= 0)
        if _concrete(mask) and not bool((same == mask).all()):
            raise ValueError("get_or_compute_segment_ids: the mask is not made of segments; use it as it is")
        if xp is sys.modules.get("torch"):
            return own.int(), keys.int()
        return own.astype(np.int32), keys.astype(np.int32)

    def _arrays(self) -> tuple:
        return tuple(getattr(self, name) for name in _ARRAYS)


def narrower(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    """The window that is in both."""
    if a is None or b is None:
        return b if a is None else a
    return min(a[0], b[0]), min(a[1], b[1])


def _dtype(x: object) -> str:
    return str(getattr(x, "dtype", "")).removeprefix("torch.")


def _kind(x: object) -> str:
    return f"a {type(x).__name__}" + (f" of {_dtype(x)}" if _dtype(x) else "")


def _namespace(x: object) -> Any:
    framework = frontends.framework_of(x)
    if framework == "jax":
        return sys.modules["jax"].numpy
    return sys.modules["torch"] if framework == "torch" else np


def _concrete(x: object) -> bool:
    if frontends.compiling():
        return False
    if frontends.framework_of(x) == "torch":
        return frontends.get("torch").signature([x]) is not None
    jax = sys.modules.get("jax")
    return jax is None or not isinstance(x, jax.core.Tracer)


_registered: list[type] = []


def _register() -> None:
    import jax

    def flatten(info: MaskInfo) -> tuple[tuple, tuple]:
        # An int is known while a call is traced.
        number = info.query_offset if isinstance(info.query_offset, int) else None
        offset = info.query_offset if number is None else None
        return (*info._arrays(), offset), (info.causal, info.sliding_window, number)

    def unflatten(limits: tuple, arrays: tuple) -> MaskInfo:
        (mask, own, other, lengths, offset), (causal, window, number) = arrays, limits
        return MaskInfo(mask, own, other, lengths, causal, window, offset if number is None else number)

    _registered.append(MaskInfo)
    jax.tree_util.register_pytree_node(MaskInfo, flatten, unflatten)
