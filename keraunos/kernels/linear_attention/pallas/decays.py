"""The arithmetic inside a chunk of one head, for each kind of decay: values, and gradients.

The state S is kept transposed, ``[V, K]``, so that decays of its rows of K are plain row vectors. Each class takes the
chunk's gates and has two methods::

    forward(q, k, v, S) -> o, S after the chunk
    backward(q, k, v, do, S, D, scale, gates) -> dq, dk, dv, da, D before the chunk

with q, k ``[C, K]``; v, do ``[C, V]``; D the gradient of the state after the chunk; da that of the gates, or None.
Rows that are not the chunk's own hold zeros, gates too. ``o`` is without the scale, gradients are with it.

No decay is the exponential of a difference of long sums, which would cancel: each is exp of a sum over exactly the
tokens that it spans, or of a difference that is exact.

A key after a query, and a query whose output has no gradient, count for nothing, whatever they hold: products are
masked by selection, as 0 times NaN or an infinity is no 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# The log of less than any result can tell from zero; finite, so that sums over a chunk are numbers.
FAINT = -100.0
# One gate, and the sum over half a chunk, that a product of all pairs at once takes: exp of the sum and of its negative
# are numbers of float32, and what is rounded of a sum is a relative error of the decay. Inputs of 16 bits are coarser.
MILD = 4.0
FAR = {"bfloat16": 32.0, "float32": 4.0}
# Gates per token are cut at this unit: sums of what is above are exact, sums of what is below are small.
_UNIT = 2.0**-8


class Shape(NamedTuple):
    """The sizes that all chunks of a call share."""

    C: int
    dtype: Any  # of the operands of products
    reverse: bool

    def order(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        """The place of each token in the order of the recurrence, along an axis."""
        i = lax.broadcasted_iota(jnp.int32, shape, axis)
        return self.C - 1 - i if self.reverse else i

    @property
    def places(self) -> tuple[jax.Array, jax.Array]:
        """The places of the tokens of all pairs ``[C, C]``, of rows and columns."""
        return self.order((self.C, self.C), 0), self.order((self.C, self.C), 1)

    def product(self, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
        """The sum over one axis of each, in float32."""
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else lax.Precision.DEFAULT
        a, b = a.astype(self.dtype), b.astype(self.dtype)
        contract = ((axes[:1], axes[1:]), ((), ()))
        return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)

    def nn(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """``a b``."""
        return self.product(a, b, (1, 0))

    def nt(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """``a b^T``."""
        return self.product(a, b, (1, 1))

    def tn(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """``a^T b``."""
        return self.product(a, b, (0, 0))

    def seen(self, pairs: jax.Array, x: jax.Array) -> jax.Array:
        """``pairs x`` of queries with keys: what is not finite in x counts from its own token on only."""
        x, place = x.astype(jnp.float32), self.order(x.shape, 0).astype(jnp.float32)
        finite = jnp.abs(x) < jnp.inf
        first = jnp.where(finite, float(self.C), place).min(0, keepdims=True)
        return jnp.where(place < first, self.nn(pairs, jnp.where(finite, x, 0.0)), jnp.nan)


def sums(weights: jax.Array, x: jax.Array, terms: int, left: bool = True) -> jax.Array:
    """``weights x``, or ``x weights``, for small integers and float32 numbers: 8 digits of these for each term.

    Three terms are all of a float32 number, one is a whole bfloat16 number.
    """
    total: Any = 0.0
    weights = weights.astype(jnp.bfloat16)
    for _ in range(terms):
        # Cut off, not rounded by a cast and back, which XLA may drop as excess precision.
        part = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -0x10000, jnp.float32)
        x, part = x - part, part.astype(jnp.bfloat16)
        operands = (weights, part) if left else (part, weights)
        total = total + jnp.dot(*operands, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
    return total


def dots(x: jax.Array, y: jax.Array) -> jax.Array:
    """The products of rows with rows, ``[C, 1]``, in float32."""
    return (x.astype(jnp.float32) * y.astype(jnp.float32)).sum(1, keepdims=True)


def most(gradient: jax.Array, axis: int | None = 1) -> jax.Array:
    """The largest magnitude of rows, or of all: 0 where there is no gradient."""
    return jnp.abs(gradient.astype(jnp.float32)).max(axis, keepdims=True)


def kept(x: jax.Array, live: jax.Array) -> jax.Array:
    """``x`` in float32, but 0 where it is not finite and ``live``, of what it will be multiplied with, is 0."""
    x = x.astype(jnp.float32)
    return jnp.where((jnp.broadcast_to(live, x.shape) != 0) | (jnp.abs(x) < jnp.inf), x, 0.0)


def scaled(x: jax.Array, rows: jax.Array) -> jax.Array:
    """``[C, dim]`` times a factor for each row, ``[C, C]`` with columns alike: wide as it is, it need not be spread."""
    return x * (rows[:, : x.shape[1]] if x.shape[1] <= rows.shape[1] else rows[:, :1])


def sums_of_scalars(shape: Shape, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of gates ``[heads, C]`` up to each token: a part with exact differences, and a small one."""
    at, token = shape.places
    upto, coarse = jnp.where(at <= token, 1.0, 0.0), jnp.round(a / _UNIT) * _UNIT
    # Rows are gates, columns are tokens.
    first, second = (sums(upto, x, 3, left=False) for x in (coarse, a - coarse))
    return first, second


class Scalar:
    """One gate per token: the decay of each pair is exp of a difference of two sums, each in an exact and a small part.

    Args:
        coarse, fine: ``[1, C]``, of :func:`sums_of_scalars`.
    """

    def __init__(self, shape: Shape, coarse: jax.Array, fine: jax.Array):
        self.shape, (query, key) = shape, shape.places
        rows = [jnp.broadcast_to(x, (shape.C, shape.C)) for x in (coarse, fine)]
        columns = [x.T for x in rows]
        between = (columns[0] - rows[0]) + (columns[1] - rows[1])
        self.pair = jnp.where(key <= query, jnp.exp(between), 0.0)  # [C, C], from key to query
        end = 0 if shape.reverse else shape.C - 1
        totals = [x[:, end : end + 1] for x in (coarse, fine)]
        # [C, C], all columns alike: from the chunk's start, and to its end.
        self.enter = jnp.exp(columns[0] + columns[1])
        self.leave = jnp.exp((totals[0] - columns[0]) + (totals[1] - columns[1]))
        self.total = jnp.exp(totals[0] + totals[1])  # [1, 1]

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, S: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The output and the state; see the top of this page."""
        s, (query, key) = self.shape, self.shape.places
        o = s.seen(jnp.where(key <= query, s.nt(q, k), 0.0) * self.pair, v) + scaled(s.nt(q, S), self.enter)
        return o, self.total * S + s.tn(scaled(v, self.leave), k)

    def backward(self, q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, S: jax.Array, D: jax.Array,
                 scale: float, gates: bool) -> tuple:
        """The gradients; see the top of this page."""
        s, pair, enter, (query, key) = self.shape, self.pair * scale, self.enter * scale, self.shape.places
        live, after = most(do), most(D, None)
        q, k_left = kept(q, live), kept(k, after)
        scores, dscores = (jnp.where(key <= query, kept(x, live), 0.0) for x in (s.nt(q, k), s.nt(do, v)))
        dscores *= pair
        dq_enter, dk_leave = kept(scaled(s.nn(do, S), enter), live), scaled(s.nn(kept(v, after), D), self.leave)
        dq, dk = kept(s.seen(dscores, k), live) + dq_enter, s.tn(dscores, q) + dk_leave
        dv = s.tn(scores * pair, do) + scaled(s.nt(k_left, D), self.leave)
        da = None
        if gates:
            # Gate t scales the pairs of keys before it and queries from it on, what came in for these, what those left
            # for later, and what passed through. Rows are queries, or what was left by keys; columns are gates.
            at, gate = s.places
            inner = jnp.where(gate < at, scores * dscores, 0.0)
            later = s.nn(inner, jnp.where(at < gate, 1.0, 0.0))
            came, left = dots(q, dq_enter), dots(k_left, dk_leave)
            passed = self.total * (kept(S, after) * D).sum((0, 1), keepdims=True)
            da = jnp.where(gate <= at, later + came, left).sum(0, keepdims=True) + passed  # [1, C]
        return dq, dk, dv, da, self.total * D + s.tn(scaled(do, enter), q)


class Mild:
    """A gate per dimension, ``a: [C, K]``, none strong: decays of pairs are quotients, taken from the chunk's middle.

    With G the sums of gates from the middle on, negative before it: exp(G_i) is worked into the query, exp(-G_j) into
    the key.
    """

    def __init__(self, shape: Shape, a: jax.Array, terms: int):
        self.shape, (at, token) = shape, shape.places
        self.since = token <= at
        sign = jnp.where(self.since, 1.0, 0.0) - jnp.where(token < shape.C // 2, 1.0, 0.0)
        between = sums(sign, a, terms)
        self.to, self.back = jnp.exp(between), jnp.exp(-between)
        self.early, self.late = (jnp.exp(x) for x in halves(shape, a))  # [1, K]

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, S: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The output and the state; see the top of this page."""
        s, q, k, S = self.shape, q * self.to, k * self.back, S * self.early
        o = s.seen(jnp.where(self.since, s.nt(q, k), 0.0), v) + s.nt(q, S)
        return o, self.late * (S + s.tn(v, k))

    def backward(self, q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, S: jax.Array, D: jax.Array,
                 scale: float, gates: bool) -> tuple:
        """The gradients; see the top of this page."""
        s, (query, key) = self.shape, self.shape.places
        # Rounded, so that what a pair adds to the gates at its query is what it takes away at its key.
        q, k = ((x * y).astype(s.dtype) for x, y in ((q, self.to), (k, self.back)))
        S, D = S * self.early, D * self.late
        live, after = most(do), most(D, None)
        q = kept(q, live)
        scores = jnp.where(self.since, kept(s.nt(q, k) * scale, live), 0.0)
        # The diagonal spans no gate and is left out, not cancelled.
        dscores = jnp.where(key < query, kept(s.nt(do, v) * scale, live), 0.0).astype(s.dtype)
        dq, dk, diagonal = kept(s.seen(dscores, k), live), s.tn(dscores, q), kept(dots(do, v) * scale, live)
        dq_enter, dk_leave = kept(s.nn(do, S) * scale, live), s.nn(kept(v, after), D)
        dv = s.tn(scores, do) + s.nt(kept(k, after), D)
        da = None
        if gates:
            from_here = jnp.where(query <= key, 1.0, 0.0)
            da = sums(from_here, q * dq_enter + (q * dq - kept(k, dk) * dk), 3)
            da = da + sums(1.0 - from_here, kept(k, after) * dk_leave, 3)
            da = da + (kept(S, after) * D).sum(0, keepdims=True)
        dq = (dq + dq_enter + diagonal * kept(k, live)) * self.to
        dk = (dk + dk_leave + diagonal * q) * self.back
        return dq, dk, dv, da, self.early * (D + s.tn(do, q) * scale)


class Strong:
    """A gate per dimension, ``a: [C, K]``, however strong: the chunk is halved again and again.

    Between the right and the left half of a block the decay of a pair is exp(gates from the middle to the query) times
    exp(gates after the key up to the middle): two factors of at most 1. Level l has the blocks of ``2^(l + 1)`` tokens.
    """

    def __init__(self, shape: Shape, a: jax.Array, terms: int):
        self.shape, self.a, self.terms, (at, token) = shape, a, terms, shape.places
        since = jnp.where(token <= at, 1.0, 0.0)
        self.enter, self.leave = self.decay(since), self.decay(1.0 - since)  # [C, K]
        self.total = jnp.exp(a.sum(0, keepdims=True))  # [1, K]

    def places(self, level: jax.Array, back: bool = False) -> tuple[jax.Array, jax.Array]:
        """Of a level, ``[C, C]``: which pairs are its own, and which gates are between a token and its block's middle.

        Rows are queries, or tokens; with ``back`` they are keys, or gates.
        """
        row, column = self.shape.places
        at, other = (column, row) if back else (row, column)
        right = at >> level & 1 == 1
        pairs = (at >> level + 1 == other >> level + 1) & right & (other >> level & 1 == 0)
        span = (at >> level == other >> level) & (right & (other <= at) | ~right & (other > at))
        return pairs, jnp.where(span, 1.0, 0.0)

    def decay(self, span: jax.Array) -> jax.Array:
        """The decay ``[C, K]`` by some of the gates for each token."""
        return jnp.exp(sums(span, self.a, self.terms))

    def levels(self, step: Callable, start: Any) -> Any:
        """``step`` for every level in turn."""
        return lax.fori_loop(0, self.shape.C.bit_length() - 1, step, start)

    def diagonal(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """The products of queries with keys of the same token, on the diagonal of ``[C, C]``."""
        at, other = self.shape.places
        return jnp.where(at == other, dots(q, k), 0.0)

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, S: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The output and the state; see the top of this page."""
        s = self.shape

        def step(level: jax.Array, scores: jax.Array) -> jax.Array:
            pairs, span = self.places(level)
            decay = self.decay(span)
            return scores + jnp.where(pairs, s.nt(q * decay, k * decay), 0.0)

        scores = self.levels(step, self.diagonal(q, k))
        return s.seen(scores, v) + s.nt(q * self.enter, S), self.total * S + s.tn(v, k * self.leave)

    def backward(self, q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, S: jax.Array, D: jax.Array,
                 scale: float, gates: bool) -> tuple:
        """The gradients; see the top of this page."""
        s, live, after = self.shape, most(do), most(D, None)
        q, live_back = kept(q, live), jnp.broadcast_to(live, (s.C, s.C)).T
        # Both ways round, as the compiler fails on products of transposed operands in a loop.
        dscores, dscores_back = kept(s.nt(do, v) * scale, live), kept(s.nt(v, do) * scale, live_back)

        def step(level: jax.Array, found: tuple) -> tuple:
            scores_back, dq, dk, da = found
            (pairs, span), (pairs_back, span_back) = self.places(level), self.places(level, back=True)
            decay = self.decay(span)
            right = s.order(q.shape, 0) >> level & 1 == 1
            q_right, k_left = q * decay, k * decay
            scores_back = scores_back + jnp.where(pairs_back, kept(s.nt(k_left, q_right), live_back), 0.0)
            dq_right = kept(s.seen(jnp.where(pairs, dscores, 0.0), k_left), live)
            dk_left = s.nn(jnp.where(pairs_back, dscores_back, 0.0), q_right)
            of_both = jnp.where(right, dq_right, dk_left) * decay
            dq, dk = dq + jnp.where(right, of_both, 0.0), dk + jnp.where(right, 0.0, of_both)
            if gates:
                da = da + s.nn(span_back, kept(jnp.where(right, q, k), of_both) * of_both)
            return scores_back, dq, dk, da

        own, diagonal = kept(self.diagonal(q, k), live), kept(dots(do, v) * scale, live)
        zeros = jnp.zeros(q.shape if gates else (1, 1), jnp.float32)
        scores_back, dq, dk, da = self.levels(step, (own, diagonal * kept(k, live), diagonal * q, zeros))
        dq_enter = kept(s.nn(do, S) * scale * self.enter, live)
        dk_leave, k_leave = s.nn(kept(v, after), D) * self.leave, kept(k * self.leave, after)
        if gates:
            row, column = s.places
            from_here = jnp.where(row <= column, 1.0, 0.0)
            da = da + s.nn(from_here, q * dq_enter) + s.nn(1.0 - from_here, kept(k, after) * dk_leave)
            da = da + self.total * (kept(S, after) * D).sum(0, keepdims=True)
        dv = s.nn(scores_back * scale, do) + s.nt(k_leave, D)
        dq, dk, da = dq + dq_enter, dk + dk_leave, da if gates else None
        return dq, dk, dv, da, self.total * D + s.tn(do, q * self.enter) * scale


def halves(shape: Shape, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums ``[1, K]`` of gates ``[C, K]`` over the chunk's earlier and later half."""
    first, second = (x.sum(0, keepdims=True) for x in (a[: shape.C // 2], a[shape.C // 2 :]))
    return (second, first) if shape.reverse else (first, second)


def is_strong(shape: Shape, gates: list[jax.Array]) -> jax.Array:
    """Whether any head's gates ``[C, K]`` are."""
    far = FAR[jnp.dtype(shape.dtype).name] / MILD
    least = [functools.reduce(jnp.minimum, [x / far for x in halves(shape, a)], a.min(0, keepdims=True)) for a in gates]
    return functools.reduce(jnp.minimum, least).min() <= -MILD
