"""Softmax attention over shards, for both frameworks: the ring of shards, and sums over parts of the keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from keraunos.frontends.array_types import Array
from keraunos.kernels.softmax_attention.contract import Options
from keraunos.ops.invocation import Platform
from keraunos.ops.registry import kernel_registry

# The platforms that give the sums of parts of the keys, best first.
PLATFORMS = Platform.TRITON, Platform.XLA, Platform.TORCH


class Ring(NamedTuple):
    """The compile-time part of one call; hashable."""

    size: int  # the number of shards
    axis_name: Any
    left: int | None  # keys before a query that it sees, None: all
    right: int | None  # and after
    platform: str
    opts: Options  # of a part, but for left and right

    @property
    def parts(self) -> tuple[Callable, Callable]:
        """The platform's ``part`` and ``part_gradients``."""
        parts = kernel_registry.get("attention", self.platform).parts
        assert parts
        return parts

    def sees(self, shift: int, T: int) -> bool:
        """Whether queries of a shard see any keys of the one ``shift`` before it; shards of T tokens."""
        first, last = (shift - 1) * T + 1, (shift + 1) * T - 1  # how far before the query a key is
        return (self.left is None or first <= self.left) and (self.right is None or -last <= self.right)

    def part(self, shift: int | None, T: int) -> Options:
        """The options of that part; shift None: every key is visible."""
        if shift is None:
            return self.opts
        sides = (None if x is None else x + by for x, by in ((self.left, -shift * T), (self.right, shift * T)))
        left, right = (None if x is None or x >= T - 1 else x for x in sides)
        return self.opts._replace(left=left, right=right)


class Merged(NamedTuple):
    """The attention of queries to the keys so far."""

    output: Any  # [B, T, H, V]
    top: Any  # [B, H, T]; a query's sum is exp(top) total, top is -inf where it sees nothing
    total: Any


def merged(xp: ModuleType, a: Merged, b: Merged) -> Merged:
    """To the keys of both; ``xp`` is ``jax.numpy`` or ``torch``."""
    top = xp.maximum(a.top, b.top)
    finite = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    shares = [xp.exp(x.top - finite) * x.total for x in (a, b)]
    total = shares[0] + shares[1]
    total = xp.where(total > 0, total, xp.ones_like(total))
    outputs = [x.output * xp.swapaxes(s / total, 1, 2)[..., None] for x, s in zip((a, b), shares, strict=True)]
    return Merged(outputs[0] + outputs[1], top, total)


def of_part(xp: ModuleType, found: tuple) -> Merged:
    """The sums of one part, from the results of a platform's ``part``."""
    output, top, total = found
    return Merged(xp.asarray(output, dtype=top.dtype), xp.where(top == math.inf, -top, top), total)


def with_sinks(xp: ModuleType, found: Merged, sinks: Array | None) -> Merged:
    """The attention ``found`` over keys, with the sinks added, which are keys without values."""
    if sinks is None or not sinks.shape[-1]:
        return found
    own = _by_head(xp, sinks, found)[:, None]
    # The top stays near the keys' logits: differences from a far one have few digits.
    top = xp.maximum(found.top, xp.amax(own, -1) - 80)
    finite = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    keys = found.total * xp.exp(found.top - finite)
    total = keys + xp.exp(own - finite[..., None]).sum(-1)
    total = xp.where(total > 0, total, xp.ones_like(total))
    return Merged(found.output * xp.swapaxes(keys / total, 1, 2)[..., None], top, total)


def sinks_gradient(xp: ModuleType, sinks: Array | None, found: Merged, means: Array) -> Array | None:
    """The sinks' gradient, of this rank's queries; ``means``, ``[B, H, T]``, are of the products of output and its."""
    if sinks is None:
        return None
    finite = xp.where(xp.isfinite(found.top), found.top, xp.zeros_like(found.top))
    weights = xp.exp(_by_head(xp, sinks, found)[:, None] - finite[..., None]) / found.total[..., None]
    each = -(weights * means[..., None]).sum((0, 2))
    (H, n), heads = each.shape, 1 if sinks.ndim == 1 else sinks.shape[0]
    return xp.asarray(each.reshape(heads, H // heads, n).sum(1).reshape(sinks.shape), dtype=sinks.dtype)


def _by_head(xp: ModuleType, sinks: Array, like: Merged) -> Any:
    """``[H, n]``."""
    H, n, heads = like.top.shape[1], sinks.shape[-1], 1 if sinks.ndim == 1 else sinks.shape[0]
    sinks = xp.asarray(sinks, dtype=like.top.dtype).reshape(heads, 1, n)
    return xp.broadcast_to(sinks, (heads, H // heads, n)).reshape(H, n)


def whole(xp: ModuleType, found: Merged) -> tuple[Any, Any, Any]:
    """The arguments of a platform's ``part_gradients``: output and sums of all keys."""
    return found.output, xp.where(xp.isfinite(found.top), found.top, math.inf), found.total
