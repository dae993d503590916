"""The arrays of a call of softmax attention as platforms take them: casts, ids that stand for lengths, offsets."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array, DType
from keraunos.kernels.softmax_attention.contract import Args
from keraunos.ops.arguments import FLOATS

# Segment ids need numbers below 0; PyTorch has no comparisons of its larger unsigned numbers.
_WIDER = {"uint8": "int32", "uint16": "int32"}
_WIDER_IN_TORCH = {**_WIDER, "uint32": "int64"}


class Arrangement:
    """Converts the arrays that a user gives to those that platforms take, for all calls with the same signature.

    It depends only on what :func:`keraunos.frontends.signature` tells arrays apart by. An argument that does not fit
    stays as it is, and the checks refuse it.

    Args:
        args: the fields of :class:`Args`, then the lengths of the keys, ``[B]``, or None.
        dtype: what query, key and value are cast to, a dtype or its name; None: the query's.

    Attributes:
        dtype: the name of what they are cast to; None where the query is no array.

    Raises:
        TypeError, ValueError: the dtype, the lengths or the ids are wrong.
    """

    def __init__(self, args: tuple, dtype: DType | None = None):
        given, self.has_lengths = Args(*args[:-1]), args[-1] is not None
        self.dtype: str | None = None
        self.casts: list[tuple[int, str]] = []
        self.is_shared = False  # one offset for all rows
        if framework := frontends.framework_of(given.query):
            self.frontend = frontends.get(framework)
            self.dtype = dtype_name(dtype) or self.frontend.dtype_name(given.query)
            if dtype is not None and self.dtype not in FLOATS:
                raise TypeError(f"attention: dtype is {dtype!r}; expected {' or '.join(FLOATS)}, or None")
            for i, (name, x) in enumerate(zip(Args._fields, given, strict=True)):
                own = self.frontend.dtype_name(x) if frontends.framework_of(x) == framework else None
                if own and (wanted := self._wanted(name, own, framework)) != own:
                    self.casts.append((i, wanted))
        whole = framework is not None and given.query.ndim == 4
        self.has_lengths &= whole and getattr(given.key, "ndim", 0) == 4
        if self.has_lengths:
            _check_lengths(args[-1], framework, given.query.shape[0])
        self.is_shared = whole and getattr(given.query_offset, "ndim", 1) == 0
        self.is_trivial = not (self.casts or self.has_lengths or self.is_shared)

    def _wanted(self, name: str, own: str, framework: str) -> Any:
        """The dtype that an array is cast to."""
        if name in ("query", "key", "value") and own in FLOATS:
            return self.dtype
        if name in ("query_segments", "key_segments"):
            return _signed(own, framework)
        return "int32" if name == "query_offset" and own not in ("int32", "int64") else own

    @property
    def converter(self) -> Callable[..., Args]:
        """The function from a user's arrays to a platform's; where nothing is changed, one that only names them."""
        return _as_given if self.is_trivial else self

    def __call__(self, *args: Array | None) -> Args:
        """The arrays that a platform takes."""
        given: list[Any] = list(args)
        lengths = given.pop()
        for i, dtype in self.casts:
            given[i] = self.frontend.cast(given[i], dtype)
        made = Args(*given)
        if self.has_lengths:
            made = _within(made, lengths, self.frontend)
        if self.is_shared:
            offsets = self.frontend.xp.broadcast_to(made.query_offset, made.query.shape[:1])
            made = made._replace(query_offset=offsets)
        return made


def _as_given(*args: Array | None) -> Args:
    return Args(*args[:-1])


def _signed(dtype: str, framework: str | None) -> str:
    """The integer type that holds ids of a type and numbers below 0."""
    if framework == "torch" and dtype == "uint64":
        raise TypeError("attention: segment ids have dtype uint64; expected int64 or narrower integers")
    return (_WIDER_IN_TORCH if framework == "torch" else _WIDER).get(dtype, dtype)


def _check_lengths(lengths: Array, framework: str | None, B: int) -> None:
    if frontends.framework_of(lengths) != framework:
        kind = type(lengths).__name__
        raise TypeError(f"attention: key_lengths is a {kind}; expected an array of {framework}, like query")
    if tuple(lengths.shape) != (B,):
        raise ValueError(f"attention: key_lengths has shape {tuple(lengths.shape)}; expected [B] = {(B,)}")


def _within(args: Args, lengths: Array, frontend: ModuleType, first: int | Array = 0) -> Args:
    """With ids that hide the keys from ``lengths`` on; ``first`` is the place of the first key."""
    own, other = args.query_segments, args.key_segments
    (B, T), S = args.query.shape[:2], args.key.shape[1]
    if own is None:
        own, other = (frontend.zeros((B, n), "int32", args.query) for n in (T, S))
    seen = (frontend.numbers(S, args.query) + first)[None] < lengths[:, None]
    # What is past the end has an id that no query has.
    return args._replace(query_segments=own, key_segments=frontend.xp.where(seen, other, -1))


def hidden_by_length(args: Args, lengths: Array | None, first: int | Array) -> Args:
    """The arrays of a shard, with ids that hide the keys from ``lengths`` on; ``first`` is its first key's place."""
    if lengths is None:
        return args
    framework = frontends.framework_of(args.query)
    _check_lengths(lengths, framework, args.query.shape[0])
    frontend = frontends.get(framework)
    own, other = (x if x is None else frontend.cast(x, _signed(frontend.dtype_name(x), framework)) for x in args[6:8])
    return _within(args._replace(query_segments=own, key_segments=other), lengths, frontend, first)


def dtype_name(dtype: Any) -> str | None:
    """A dtype of JAX, NumPy or PyTorch, or a name, as a name."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    if str(dtype).startswith("torch."):
        return str(dtype).removeprefix("torch.")
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype)


def softmax_dtype(dtype: str | None, wanted: DType | None) -> str:
    """The name of the softmax's dtype: what is wanted, or float32, float64 for float64."""
    return dtype_name(wanted) or ("float64" if dtype == "float64" else "float32")
