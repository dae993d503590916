"""The state that a stretch of tokens leaves behind, and how those of many stretches join, one after the other.

That is all that devices tell each other which share a sequence (:mod:`keraunos.distributed`). Rightwards, to the last
token, a stretch leaves and lets pass, with ``start`` the state before it and D the sum of its gates::

    S = exp(D) start + sum_t exp(sum of the gates after t) k_t v_t^T

and leftwards the same in the mirror. The gradient of the state is such a state too, left the other way by queries and
the outputs' gradients; there a token's own gate is among those it passes. Decays are exponentials of sums, never
differences of sums.

Here it is in plain operations of either framework. A platform with kernels has functions of its own, ``parts`` of its
:class:`Implementation`::

    leave(x, start, plan, way, segment, copies)                  -> what leaves, and what `arrive` needs for segments
    arrive(left, start, plan, way, sizes, local, total, segment) -> the states that arrive

``plan`` is four integers on the device: the first token of the stretch that counts, one past the last, whether the
sequence begins there (then ``start`` enters, and nothing older passes), and how many stretches lie before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from keraunos import frontends
from keraunos.frontends.array_types import Array

# Stand for -inf: of a gate, and of the decay over stretches of which one begins anew. Finite, so that 0 times it is 0.
_CLOSED = _ANEW = -1e30


class Stretch(NamedTuple):
    """The arrays that a state is left by. The heads of ``key``, ``value`` and ``g`` divide H."""

    key: Any  # [B, T, heads, K]
    value: Any  # [B, T, heads, V]
    g: Any  # [B, T, heads, K] or [B, T, heads], log, <= 0, or None
    g_gamma: Any  # [H] or [B, H], log, <= 0, or None


class Way(NamedTuple):
    """The direction of a state, and what counts on its way; hashable."""

    heads: int
    right: bool  # towards the last token
    inclusive: bool  # a token's own gate is between it and the end
    scale: float = 1.0

    @property
    def adjoint(self) -> Way:
        """The way that the gradient of the state takes: to the other end."""
        return self._replace(right=not self.right, inclusive=not self.inclusive)


def values_left(x: Stretch, way: Way) -> int:
    """The number of values that :func:`leave` makes."""
    B, K, V = x.key.shape[0], x.key.shape[-1], x.value.shape[-1]
    return B * way.heads * (K * V + (K if x.g is not None and x.g.ndim == 4 else 1))


def leave(x: Stretch, start: Array | None, plan: Array, way: Way) -> Array:
    """The state that a stretch leaves ``[B, H, K, V]`` and the sum of its gates ``[B, H, K]`` or ``[B, H]``, flat."""
    frontend = frontends.of(x.key)
    xp, (B, T), H = frontend.xp, x.key.shape[:2], way.heads
    dtype = "float64" if frontend.dtype_name(x.key) == "float64" else "float32"
    t = frontend.numbers(T, x.key)
    live = ((t >= plan[0]) & (t < plan[1]))[None, :, None, None]

    def spread(y: Array) -> Array:
        y = frontend.cast(y, dtype)[:, :, :, None]
        y = xp.broadcast_to(y, (*y.shape[:3], H // y.shape[2], y.shape[-1]))
        return xp.where(live, y.reshape(B, T, H, y.shape[-1]), 0)

    a = frontend.zeros((B, T, H, 1), dtype, x.key)
    if x.g_gamma is not None:
        a = a + frontend.cast(x.g_gamma, dtype).reshape(-1, 1, H, 1).clip(_CLOSED)
    if x.g is not None:
        a = a + spread(x.g if x.g.ndim == 4 else x.g[..., None]).clip(_CLOSED)
    a = xp.where(live, a, 0)
    total = a.sum(1)  # [B, H, 1 or K]
    passed = a
    if not way.inclusive:
        passed = frontend.pad(a[:, 1:], 1, 1) if way.right else frontend.pad(a[:, :-1], 1, 0, 1)
    passed = xp.flip(xp.cumsum(xp.flip(passed, (1,)), 1), (1,)) if way.right else xp.cumsum(passed, 1)
    key, value = spread(x.key) * xp.exp(passed), spread(x.value)
    if way.inclusive:
        # A query whose output has no gradient counts for nothing, also where 0 times it is no 0.
        key = xp.where((value != 0).any(-1)[..., None] | xp.isfinite(key), key, 0)
    state = frontend.product(xp.moveaxis(key, 1, 3), xp.moveaxis(value, 1, 2)) * way.scale
    anew = plan[2] != 0
    if start is not None:
        decay = xp.exp(total)[..., None]
        state = state + xp.where(anew & (decay > 0), decay * frontend.cast(start, dtype), 0)
    return xp.concatenate([state.reshape(-1), xp.where(anew, _ANEW, total).reshape(-1)])


def arrive(left: Array, start: Array | None, plan: Array, way: Way, sizes: tuple[int, ...]) -> Array:
    """The state ``[B, H, K, V]`` after the stretches before this one; ``start``, or zeros, if there are none.

    Args:
        left: ``[stretches, n]``, what :func:`leave` made of each, from left to right.
        sizes: B, H, K, V.
    """
    frontend = frontends.of(left)
    xp, (B, H, K, V), R = frontend.xp, sizes, left.shape[0]
    state = left[:, : B * H * K * V].reshape(R, B, H, K, V)
    total = left[:, B * H * K * V :].reshape(R, B, H, -1)
    place = frontend.numbers(R, left)
    place = place if way.right else R - 1 - place
    between = (place[:, None] < place) & (place < plan[3])
    decay = xp.exp(xp.where(between[:, :, None, None, None], total, 0).sum(1))[..., None]
    before = (place < plan[3])[:, None, None, None, None]
    # What is forgotten is nothing, even if it was no number.
    state = xp.where(before & (decay > 0), decay * state, 0).sum(0)
    if start is None:
        return state
    return xp.where(plan[3] == 0, frontend.cast(start, frontend.dtype_name(state)), state)
