"""Chunks of a linear recurrence in ``jax.numpy``: where they are, and the decays inside them.

Within a chunk every pair (query i, key j <= i) is a matrix product weighted by the decay between them; from chunk to
chunk only the state ``[K, V]`` travels. A decay is a product of factors, each over exactly the tokens it spans, and no
difference of long sums, so nothing overflows or cancels for any gate <= 0.

A key after a query, and a query whose output has no gradient, count for nothing, whatever they hold: 0 times NaN or an
infinity is no 0, and products of large numbers are infinite. So products are masked by selection: see :func:`kept` and
the functions after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from keraunos.frontends import jax as frontend

# Stands for -inf in sums: finite, so that 0 * gate is 0 in the triangular products, and exp of it is 0.
_CLOSED = -1e30
# How far a vector gate, and their sum over half a chunk, may be below 0 where one product takes all the chunk's pairs.
# The rounding of the sum is a relative error of the decay: up to 4, that is at most two units in the last place of
# float32. Inputs of 16 bits are coarser by far; there the range of float32 is the limit, which twice the sum must fit.
_MILD = 4.0
_FAR = 32.0
# Products of float32 numbers on a TPU take one pass with the 8 digits of bfloat16, or three with 16, or six with all;
# on a GPU with TensorFloat-32's 11 digits both of the first. What follows from bfloat16 needs no more than its digits,
# what follows from float16 has 11.
_PRECISION = {"bfloat16": jax.lax.Precision.DEFAULT, "float16": jax.lax.Precision.HIGH}
# How many rows (a sequence's heads) with strong gates are computed at once.
_TILE = 8
# How many tokens, at most, walk back together from one state that was kept.
_GROUP = 1024
# Tokens per chunk. Longer chunks spend the time on pairs inside the chunk, shorter ones waste wide matrix units, which
# CPUs lack.
CHUNK = {"cpu": 32, "gpu": 128, "tpu": 128}


# The decay inside a chunk: for one gate per token, or one per dimension, of which none or some are strong.
Decay: TypeAlias = "ScalarDecay | MildVectorDecay | VectorDecay"


class Chunks(NamedTuple):
    """Where each step of the scans works, on one chunk or several: in the order of the recurrence, in equal groups."""

    begin: Any  # [groups, steps] first token
    end: Any  # one past its last token; begin == end: nothing to do
    sequence: Any  # whose state it continues; N: nobody's
    first: Any  # bool: starts from the initial state
    last: Any  # bool: ends in the final state


def find_chunks(args: Any, opts: Any, C: int, groups: int, steps: int, continues: jax.Array | None) -> Chunks:
    """The work of each step, which takes C tokens."""
    T = args.query.shape[1]
    if args.cu_seqlens is None:
        cu, N = jnp.stack([jnp.int32(0), jnp.asarray(T, jnp.int32)]), 1
    else:
        cu, N = args.cu_seqlens.astype(jnp.int32), args.cu_seqlens.shape[0] - 1
    count = -(-(cu[1:] - cu[:-1]) // C)  # steps of each sequence
    stop = jnp.cumsum(count)
    i = jnp.arange(groups * steps, dtype=jnp.int32).reshape(groups, steps)
    sequence = jnp.searchsorted(stop, i, side="right").astype(jnp.int32)
    s = jnp.minimum(sequence, N - 1)
    local = i - (stop - count)[s]
    ordinal = count[s] - 1 - local if opts.reverse else local
    live = sequence < N
    begin = jnp.where(live, cu[s] + ordinal * C, 0)
    end = jnp.where(live, jnp.minimum(begin + C, cu[s + 1]), 0)
    first = live & (local == 0)
    first = first if continues is None else first & ~continues[s]
    return Chunks(begin, end, sequence, first, live & (local == count[s] - 1))


def chunk_length(T: int, block_q: int) -> int:
    """Tokens per chunk: a window of them must fit into T; a power of two, for the halving of vector gates."""
    return block_q if frontend.is_symbol(T) else min(block_q, 1 << (T.bit_length() - 1))


def find_groups(args: Any, C: int, at_once: bool = True) -> tuple[int, int, int]:
    """How many groups of chunks there are, the last of which may be empty, steps in each, and chunks at each step.

    Chunks as short as a CPU's are taken one by one, which its caches like; so are those of packed sequences, which
    begin anywhere. Others are taken all at once, as fast matrix units wait for nothing as long as for the next step,
    if the recurrence can (``at_once``).
    """
    T, packed = args.query.shape[1], args.cu_seqlens is not None
    N = args.cu_seqlens.shape[0] - 1 if packed else 0
    at_once = at_once and not packed and CHUNK["cpu"] < C
    if frontend.is_symbol(T):
        # As many groups whatever the chunk: packed sequences have up to N chunks that are not whole.
        groups, group = -(-T // _GROUP) + -(-N // 4), max(_GROUP // C, 4 if packed else 1)
    else:
        n = T // C + N if packed else -(-T // C)
        # Groups with the fewest empty chunks; none at all where every chunk is whole, as then nothing need be masked,
        # unless that made many steps of few.
        longest = min(max(_GROUP // C, 1), n)
        shortest = 1 if not packed and not at_once and T % C == 0 else longest // 2 + 1
        group = min(range(longest, shortest - 1, -1), key=lambda g: -n % g)
        groups = -(-n // group)
    return (groups, 1, group) if at_once else (groups, group, 1)


class Walker:
    """Reads and writes chunks of the arrays of one call as ``[B * n, H, C, dim]`` in the order of the recurrence.

    n are the chunks that one step takes. ``continues``, ``[N]``: which packed sequences go on from where the one before
    them ended, if they have tokens.
    """

    def __init__(self, args: Any, opts: Any, at_once: bool = True, continues: jax.Array | None = None):
        self.opts = opts
        self.B, self.T, _, self.K = args.query.shape
        self.H, self.V = args.heads, args.value.shape[3]
        symbolic = frontend.is_symbol(self.T)
        self.C = chunk_length(self.T, cast(int, opts.cfg.block_q))
        self.dtype = jnp.promote_types(args.query.dtype, jnp.float32)
        self.precision = _PRECISION.get(args.query.dtype.name, jax.lax.Precision.HIGHEST)
        self.far = _FAR if args.query.dtype.name in _PRECISION else _MILD
        groups, steps, self.n = find_groups(args, self.C, at_once)
        self.span = self.n * self.C  # tokens of a step
        self.chunks = find_chunks(args, opts, self.span, groups, steps, continues)
        self.whole = args.cu_seqlens is None and not symbolic and groups * steps * self.span == self.T
        # Where the tokens are fewer than a window's, or may be, the arrays that are read and written are longer.
        self.padded = -(-self.T // self.span) * self.span if symbolic else max(self.T, self.span)
        tokens = {name: getattr(args, name) for name in ("query", "key", "value", "g")}
        self.args = args._replace(**{name: self.pad(x) for name, x in tokens.items() if x is not None})

    def mm(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """The product of an einsum, in the precision that the inputs' dtype wants."""
        return jnp.einsum(equation, a, b, precision=self.precision)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> jax.Array:
        """Zeros where the query is."""
        return frontend.zeros(shape, dtype or self.dtype, self.args.query)

    def pad(self, x: jax.Array) -> jax.Array:
        """``[B, T, ...]`` as it is read: ``[B, chunks, C, ...]`` if whole, else with zeros where windows need them."""
        if self.whole:
            return x.reshape(x.shape[0], -1, self.C, *x.shape[2:])
        return frontend.pad(x, 1, self.padded - self.T)

    def buffer(self, x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        """Memory to write an array into: zeros, if tokens may be no sequence's."""
        make = frontend.empty if self.args.cu_seqlens is None else frontend.zeros
        shape = (self.T // self.C, self.C) if self.whole else (self.padded,)
        return make((self.B, *shape, *x.shape[2:]), x.dtype, self.args.query)

    def written(self, buffer: jax.Array) -> jax.Array:
        """``[B, T, ...]`` of what was written."""
        return buffer.reshape(self.B, self.T, *buffer.shape[3:]) if self.whole else buffer[:, : self.T]

    def rows(self, chunk: Chunks) -> tuple[jax.Array, jax.Array | None]:
        """The window's start, and which of its rows belong to the step (None: all), in the order of the recurrence."""
        start = jnp.minimum(chunk.begin, self.padded - self.span)
        if self.whole:
            return start, None
        row = start + jnp.arange(self.span)
        valid = (row >= chunk.begin) & (row < chunk.end)
        return start, valid[::-1] if self.opts.reverse else valid

    def fold(self, x: jax.Array) -> jax.Array:
        """``[B, n * C, heads, ...] or [B, n, C, heads, ...] -> [B * n, heads, C, ...]``."""
        heads = x.shape[3 if self.whole else 2 :]
        return jnp.swapaxes(x.reshape(x.shape[0] * self.n, self.C, *heads), 1, 2)

    def mask(self, valid: jax.Array) -> jax.Array:
        """``[n * C] -> [B * n or 1, 1, C]``."""
        return self.fold(jnp.broadcast_to(valid[:, None], (1 if self.n == 1 else self.B, *valid.shape, 1)))

    def read(self, x: jax.Array, chunk: Chunks) -> jax.Array:
        """``[B * n, H, C(, dim)]`` of an array of the tokens; rows outside the chunks are zero."""
        start, valid = self.rows(chunk)
        if self.whole:
            x = jax.lax.dynamic_slice_in_dim(x, start // self.C, self.n, axis=1)
            x = x[:, ::-1, ::-1] if self.opts.reverse else x
        else:
            x = jax.lax.dynamic_slice_in_dim(x, start, self.span, axis=1)
            x = x[:, ::-1] if self.opts.reverse else x
        x = self.fold(x).astype(self.dtype)
        if valid is not None:
            valid = self.mask(valid)
            x = jnp.where(valid[..., None] if x.ndim == 4 else valid, x, 0)
        return jnp.repeat(x, self.H // x.shape[1], axis=1)

    def write(self, buffer: jax.Array, x: jax.Array, chunk: Chunks) -> jax.Array:
        """Put ``[B * n, H, C(, dim)]`` where it belongs, summed over the heads that share one."""
        start, valid = self.rows(chunk)
        heads = buffer.shape[3 if self.whole else 2]
        if heads != self.H:
            x = x.reshape(x.shape[0], heads, self.H // heads, *x.shape[2:]).sum(2)
        x = jnp.swapaxes(x, 1, 2).astype(buffer.dtype)
        if self.whole:
            x = x.reshape(self.B, self.n, *x.shape[1:])
            x = x[:, ::-1, ::-1] if self.opts.reverse else x
            return jax.lax.dynamic_update_slice_in_dim(buffer, x, start // self.C, axis=1)
        x = x.reshape(self.B, self.span, *x.shape[2:])
        if valid is not None:
            old = jax.lax.dynamic_slice_in_dim(buffer, start, self.span, axis=1)
            old = old[:, ::-1] if self.opts.reverse else old
            x = jnp.where(valid.reshape(1, -1, *[1] * (x.ndim - 2)), x, old)
        x = x[:, ::-1] if self.opts.reverse else x
        return jax.lax.dynamic_update_slice_in_dim(buffer, x, start, axis=1)

    def qkv(self, chunk: Chunks) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, times the scale, key and value."""
        q, k, v = (self.read(x, chunk) for x in self.args[:3])
        return q * self.opts.softmax_scale, k, v

    def decay(self) -> Callable:
        """A function ``(chunk, f, *arrays) -> f(decay inside the chunk, *arrays)``, with arrays ``[B, H, ...]``.

        B is that of what :meth:`read` gives. A constant decay is computed once, outside the scan.
        """
        g, gamma = self.args.g, getattr(self.args, "g_gamma", None)
        gamma = jnp.zeros(self.H, self.dtype) if gamma is None else gamma.astype(self.dtype)
        gamma = jnp.broadcast_to(jnp.maximum(gamma, _CLOSED)[..., None], (*gamma.shape, self.C))
        gamma = jnp.repeat(gamma, self.n, axis=0) if gamma.ndim == 3 else gamma[None]  # [1 or B, H, C]
        if g is None and self.whole:
            constant = ScalarDecay(self, gamma)
            return lambda chunk, f, *arrays: f(constant, *arrays)

        def under(chunk: Chunks, f: Callable, *arrays: jax.Array) -> Any:
            _, valid = self.rows(chunk)
            a = gamma if valid is None else jnp.where(self.mask(valid), gamma, 0)
            if g is None:
                return f(ScalarDecay(self, a), *arrays)
            gates = jnp.maximum(self.read(g, chunk), _CLOSED)
            if gates.ndim == 3:
                return f(ScalarDecay(self, gates + a), *arrays)
            a = gates + a[..., None]
            between = _between(a)
            halves = jnp.concatenate([a[:, :, :1] - between[:, :, :1], between[:, :, -1:]], axis=2)
            strong = (halves.min((2, 3)) <= -self.far) | (a.min((2, 3)) <= -_MILD)
            return _by_strength(self, f, strong, a, between, *arrays)

        return under

    def initial(self) -> jax.Array:
        """The states as given, ``[N, H, K, V]``; zeros where there are none."""
        shape = self.args.query.shape[0] if self.args.cu_seqlens is None else self.args.cu_seqlens.shape[0] - 1
        if self.args.initial_state is None:
            return self.zeros((shape, self.H, self.K, self.V))
        return self.args.initial_state.astype(self.dtype)

    def enter(self, state: jax.Array, states: jax.Array, flag: jax.Array, chunk: Chunks) -> jax.Array:
        """The state that a chunk starts from: its sequence's own where ``flag`` is set, else the one carried."""
        if self.args.cu_seqlens is None:
            return state
        return jnp.where(flag, states.at[chunk.sequence].get(mode="clip")[None], state)

    def leave(self, state: jax.Array, states: jax.Array, chunk: Chunks) -> jax.Array:
        """Record the state after a chunk as its sequence's."""
        if self.args.cu_seqlens is None:
            return state
        return states.at[chunk.sequence].set(state[0], mode="drop")

    def through(self, state: jax.Array, total: jax.Array, decay: jax.Array, k: jax.Array, v: jax.Array,
                reverse: bool = False) -> tuple[jax.Array, jax.Array]:
        """The state ``[B, H, K, V]`` after a step's chunks, and before each of them, ``[B * n, H, K, V]``.

        Each chunk leaves ``total``, ``[B * n or 1, H, K or 1, 1]``, of the state, and adds the products of its values
        with its keys, times their ``decay`` up to its end. Each for itself, as slices of what was multiplied are laid
        out anew on a TPU.
        """
        total, decay, k, v = (
            x[:, None] if x.shape[0] == 1 else x.reshape(self.B, self.n, *x.shape[1:]) for x in (total, decay, k, v)
        )
        before = []
        for i in range(self.n)[:: -1 if reverse else 1]:
            before.append(state)
            key = k[:, i] * decay[:, i % decay.shape[1]]
            state = total[:, i % total.shape[1]] * state + self.mm("bhjk,bhjv->bhkv", key, v[:, i])
        before = before[::-1] if reverse else before
        return state, jnp.stack(before, axis=1).reshape(self.B * self.n, *state.shape[1:])

    def carry(self, states: jax.Array) -> jax.Array:
        """The initial carry of the scan over chunks: batch rows walk together, packed sequences one after another."""
        return states if self.args.cu_seqlens is None else self.zeros((1, self.H, self.K, self.V))


def _by_strength(walker: Walker, f: Callable, strong: jax.Array, *arrays: jax.Array) -> Any:
    """``f(decay, ...)`` for gates ``[B, H, C, K]``, their sums from the middle, and more; rows are strong or mild.

    Arrays and results are ``[B, H, ...]``. No kind of row is computed that there is none of; what a row gets does not
    depend on which others are strong.
    """

    # Several places call it, and ask for its shapes: traced once for all of them.
    @functools.partial(jax.jit, inline=True)
    def mild_rows(strong: jax.Array, a: jax.Array, between: jax.Array, *arrays: jax.Array) -> Any:
        first, between = (jnp.where(strong[..., None, None], 0, x) for x in (a[:, :, :1], between))
        return f(MildVectorDecay(walker, first, between), *arrays)

    def strong_rows(a: jax.Array, between: jax.Array, *arrays: jax.Array) -> Any:
        return f(VectorDecay(walker, a), *arrays)

    def everywhere(strong: jax.Array, *arrays: jax.Array, mild: Any = None) -> Any:
        mild = mild_rows(strong, *arrays) if mild is None else mild
        return jax.tree.map(lambda x, y: jnp.where(strong[..., None, None], x, y), strong_rows(*arrays), mild)

    def nothing(strong: jax.Array, *arrays: jax.Array) -> Any:
        shapes = jax.eval_shape(mild_rows, strong, *arrays)
        return jax.tree.map(lambda x: frontend.zeros(x.shape, x.dtype, arrays[0]), shapes)

    # Under vmap lax.cond computes both of its sides, unless all calls share what decides. Rows of all calls lie in one
    # array, and so they share it.
    @frontend.rowwise
    def in_tiles(strong: jax.Array, *arrays: jax.Array) -> Any:
        n = len(strong)
        if n == 0:
            return mild_rows(strong, *arrays)
        tile = min(_TILE, n)

        def with_strong(found: Any, strong: jax.Array, *arrays: jax.Array) -> Any:
            places = jnp.nonzero(strong[:, 0], size=-(-n // tile) * tile, fill_value=n)[0]

            def step(i: jax.Array, found: Any) -> Any:
                own = jax.lax.dynamic_slice_in_dim(places, i * tile, tile)
                new = strong_rows(*(x.at[own].get(mode="clip") for x in arrays))
                return jax.tree.map(lambda x, new: x.at[own].set(new, mode="drop"), found, new)

            return jax.lax.fori_loop(0, -(-strong.sum() // tile), step, found)

        found = jax.lax.cond(strong.all(), nothing, mild_rows, strong, *arrays)
        return jax.lax.cond(strong.any(), with_strong, lambda found, *_: found, found, strong, *arrays)

    # Rows on several devices stay where they are, and each call decides alone: a loop of no turn leaves out what
    # is not needed.
    def mild_if_any(strong: jax.Array, *arrays: jax.Array) -> Any:
        def run(*_: Any) -> Any:
            return mild_rows(strong, *arrays)

        return jax.lax.fori_loop(0, (~strong).any().astype(int), run, nothing(strong, *arrays))

    @jax.custom_jvp
    def call(strong: jax.Array, *arrays: jax.Array) -> Any:
        if not frontend.is_local() or frontend.is_symbol(strong.shape[0]):
            # Rows that lie on several devices are not gathered.
            some = strong.any().astype(int)
            mild = mild_if_any(strong, *arrays)
            return jax.lax.fori_loop(0, some, lambda _, mild: everywhere(strong, *arrays, mild=mild), mild)
        rows = [x.reshape(-1, 1, *x.shape[2:]) for x in (strong, *arrays)]
        return jax.tree.map(lambda x: x.reshape(*strong.shape, *x.shape[2:]), in_tiles(*rows))

    @call.defjvp
    def second_order(primals: tuple, tangents: tuple) -> tuple:
        # Under vmap the same values have to be mapped with a derivative and without: both come from call.
        return call(*primals), jax.jvp(everywhere, primals, tangents)[1]

    return call(strong, *arrays)


class ScalarDecay:
    """Decay inside a chunk for one gate per token and head, ``a: [B, H, C]``."""

    def __init__(self, walker: Walker, a: jax.Array):
        self.mm, i = walker.mm, jnp.arange(walker.C)
        self.below = i[:, None] > i
        between = jnp.cumsum(jnp.where(self.below, a[..., None], 0), axis=-2)
        self.pair = jnp.where(i[:, None] >= i, jnp.exp(between), 0)  # [B, H, C, C], from j to i
        self.enter = jnp.exp(jnp.cumsum(a, axis=-1))[..., None]  # [B, H, C, 1], from the chunk's start to i
        self.leave = self.pair[..., -1, :, None]  # [B, H, C, 1], from j to the chunk's end
        self.total = self.enter[..., -1:, :]  # [B, H, 1, 1]

    def before_pairs(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """The products of queries with the keys before them in the chunk, ``[B, H, C, C]``."""
        return jnp.tril(self.mm("bhik,bhjk->bhij", q, k) * self.pair, -1)

    def inside(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """The output from keys of the query's own chunk, ``[B, H, C, V]``."""
        return seen(self.mm, pairs_of(self.mm("bhik,bhjk->bhij", q, k)) * self.pair, v)

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array,
        crossing: tuple[jax.Array, jax.Array, jax.Array] | None, own: bool = True
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Gradients for q, k and v of :meth:`inside`, and for the gates ``[B, H, C]`` of it and of ``crossing``.

        Crossing are the terms of the loss that span the chunk's border: x ``[B, H, C, K]`` came in and reached query i;
        y went out from key j; z ``[B, H, K, V]`` passed through. None: the gates need no gradient. ``own``: queries
        see the key of their own token.
        """
        live = live_along(do)
        scores = pairs_of(self.mm("bhik,bhjk->bhij", q, k), live)
        dscores = pairs_of(self.mm("bhiv,bhjv->bhij", do, v), live) * self.pair
        if not own:
            scores, dscores = jnp.tril(scores, -1), jnp.tril(dscores, -1)
        dq = kept(seen(self.mm, dscores, k), live)
        dk, dv = self.mm("bhij,bhik->bhjk", dscores, q), self.mm("bhij,bhiv->bhjv", scores * self.pair, do)
        if crossing is None:
            return dq, dk, dv, None
        # Gate t scales the terms from j < t to i >= t. The diagonal is no such pair and is left out, not cancelled.
        before = self.below.astype(dq.dtype)  # [t, j]
        pairs = self.mm("bhij,tj->bhit", jnp.where(self.below, scores * dscores, 0), before)
        x, y, z = crossing
        da = jnp.where(self.below.T, 0, pairs + sum_last(x)[..., None]).sum(-2)
        return dq, dk, dv, da + self.mm("tj,bhj->bht", before, sum_last(y)) + sum_last(sum_last(z))[..., None]


class MildVectorDecay:
    """Decay inside a chunk for a gate per key dimension, none of them strong.

    The decay from j to i is exp(gates from the chunk's middle to i) * exp(-gates from there to j), where gates before
    the middle count negative, ``between: [B, H, C, K]``: two factors, neither too large nor too small, and one matrix
    product for all pairs. ``first: [B, H, 1, K]`` are the gates of the first token.
    """

    def __init__(self, walker: Walker, first: jax.Array, between: jax.Array):
        self.mm = walker.mm
        self.to, self.back = jnp.exp(between), jnp.exp(-between)
        early, late = jnp.exp(first - between[:, :, :1]), self.to[:, :, -1:]
        self.enter, self.leave = self.to * early, self.back * late
        self.total = jnp.swapaxes(early * late, -1, -2)  # [B, H, K, 1]

    def before_pairs(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """The products of queries with the keys before them in the chunk, ``[B, H, C, C]``."""
        return jnp.tril(self.mm("bhik,bhjk->bhij", q * self.to, k * self.back), -1)

    def inside(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """The output from keys of the query's own chunk, ``[B, H, C, V]``."""
        return seen(self.mm, pairs_of(self.mm("bhik,bhjk->bhij", q * self.to, k * self.back)), v)

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array,
        crossing: tuple[jax.Array, jax.Array, jax.Array] | None, own: bool = True
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Gradients for q, k and v of :meth:`inside`, and for the gates ``[B, H, C, K]``; see :class:`ScalarDecay`.

        A pair adds a product to the gates at its query, and takes the same product away at its key.
        """
        live = live_along(do)
        q, k = kept(q * self.to, live), k * self.back
        scores = pairs_of(self.mm("bhik,bhjk->bhij", q, k), live)
        # The diagonal spans no gate and is left out, not cancelled.
        dscores = jnp.tril(pairs_of(self.mm("bhiv,bhjv->bhij", do, v), live), -1)
        dk, dv = self.mm("bhij,bhik->bhjk", dscores, q), self.mm("bhij,bhiv->bhjv", scores, do)
        dq, diagonal = kept(seen(self.mm, dscores, k), live), kept(sum_last(do * v)[..., None], live)
        if not own:
            diagonal = jnp.zeros_like(diagonal)
        da = None
        if crossing is not None:
            x, y, z = crossing
            since = _since(x)
            da = _exact("bhts,bhsk->bhtk", since, x + q * dq - kept(k, dk) * dk)
            da = da + _exact("bhts,bhsk->bhtk", 1 - since, y) + sum_last(z)[..., None, :]
        return (dq + diagonal * kept(k, live)) * self.to, (dk + diagonal * q) * self.back, dv, da


class VectorDecay:
    """Decay inside a chunk for a gate per key dimension, ``a: [B, H, C, K]``, however strong.

    The chunk is halved again and again. Between the right and the left half of a block, the decay from j to i is
    exp(gates from the middle to i) * exp(gates after j up to the middle): two factors <= 1, and a matrix product. Both
    are products of the factors of smaller blocks, so that each gate is exponentiated once.
    """

    def __init__(self, walker: Walker, a: jax.Array):
        self.mm, C = walker.mm, walker.C
        # The decay within blocks of m tokens: from the block's start through each token; after it to the block's end.
        through, after, m = jnp.exp(a), jnp.ones_like(a), 1
        self.levels = []  # (m, [B, H, C, K]: to the middle of the block of 2m tokens, or from there)
        while m < C:
            is_right = (jnp.arange(C) // m % 2 == 1)[:, None]
            self.levels.append((m, jnp.where(is_right, through, after)))
            blocks = through.reshape(*a.shape[:2], C // (2 * m), 2, m, a.shape[-1])
            left, right = (
                jnp.broadcast_to(blocks[:, :, :, half : half + 1, -1:], blocks.shape).reshape(a.shape)
                for half in (0, 1)
            )
            through, after = jnp.where(is_right, left * through, through), jnp.where(is_right, after, after * right)
            m *= 2
        self.enter, self.leave = through, after
        self.total = jnp.swapaxes(self.enter[..., -1:, :], -1, -2)  # [B, H, K, 1]

    def before_pairs(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """The products of queries with the keys before them in the chunk, ``[B, H, C, C]``."""
        blocks = jnp.zeros((*q.shape[:3], 1, 1), q.dtype)
        for m, decay in self.levels:
            scores = self.mm("...ik,...jk->...ij", _right(q * decay, m), _left(k * decay, m))
            left, right = blocks[:, :, ::2], blocks[:, :, 1::2]
            halves = jnp.concatenate([left, jnp.zeros_like(left)], -1), jnp.concatenate([scores, right], -1)
            blocks = jnp.concatenate(halves, -2)
        return blocks[:, :, 0]

    def inside(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """The output from keys of the query's own chunk, ``[B, H, C, V]``."""
        o = (q * k).sum(-1, keepdims=True) * v
        for m, decay in self.levels:
            scores = self.mm("...ik,...jk->...ij", _right(q * decay, m), _left(k * decay, m))
            o = o + _join(None, self.mm("...ij,...jv->...iv", scores, _left(v, m)))
        return o

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array,
        crossing: tuple[jax.Array, jax.Array, jax.Array] | None, own: bool = True
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Gradients for q, k and v of :meth:`inside`, and for the gates ``[B, H, C, K]``; see :class:`ScalarDecay`.

        Gate t scales the terms from j < t to i >= t. Between the halves of a block these are, for t in the right half,
        the terms of i >= t, and for t in the left half those of j < t: sums within that half, whatever is in the other.
        So terms wait, by query or by key, until the blocks have been halved down to single tokens.
        """
        live = live_along(do)
        score, diagonal = (kept((x * y).sum(-1, keepdims=True), live) for x, y in ((q, k), (do, v)))
        if not own:
            score, diagonal = jnp.zeros_like(score), jnp.zeros_like(diagonal)
        dq, dk, dv = diagonal * kept(k, live), diagonal * q, score * do
        if crossing is not None:
            by_query, by_key, z = crossing
            da = z.sum(-1)[..., None, :]
        for m, decay in reversed(self.levels):
            q_right, k_left = _right(q * decay, m), _left(k * decay, m)
            v_left, do_right, rows = _left(v, m), _right(do, m), _right(live, m)
            scores = kept(self.mm("...ik,...jk->...ij", q_right, k_left), rows)
            dscores = kept(self.mm("...iv,...jv->...ij", do_right, v_left), rows)
            dq_right = kept(self.mm("...ij,...jk->...ik", dscores, k_left), rows)
            dk_left = self.mm("...ij,...ik->...jk", dscores, q_right)
            dqk = _join(dk_left, dq_right) * decay
            is_right = (jnp.arange(q.shape[2]) // m % 2 == 1)[:, None]
            dq, dk = dq + jnp.where(is_right, dqk, 0), dk + jnp.where(is_right, 0, dqk)
            dv = dv + _join(self.mm("...ij,...iv->...jv", scores, do_right), None)
            if crossing is not None:
                halves = _right(by_query, m).sum(-2, keepdims=True), _left(by_key, m).sum(-2, keepdims=True)
                da = da + _join(*(jnp.broadcast_to(x, v_left.shape[:-1] + x.shape[-1:]) for x in halves))
                by_query = by_query + jnp.where(is_right, q * dqk, 0)
                by_key = by_key + jnp.where(is_right, 0, kept(k, dqk) * dqk)
        return dq, dk, dv, None if crossing is None else da + by_query


def live_along(gradient: jax.Array, axes: int | tuple[int, ...] = -1) -> jax.Array:
    """Where there is anything but zeros along some axes of a gradient."""
    return (gradient != 0).any(axes, keepdims=True)


def kept(x: jax.Array, live: jax.Array) -> jax.Array:
    """``x``, but 0 where it is not finite and ``live``, of what it will be multiplied with, is 0.

    A finite value stays: the derivative with respect to a value of 0 needs it.
    """
    return jnp.where((live != 0) | jnp.isfinite(x), x, 0)


def pairs_of(x: jax.Array, live: jax.Array | None = None) -> jax.Array:
    """The products ``[..., C, C]`` of queries with keys: 0 for later keys, and those of no live query finite."""
    return jnp.tril(x if live is None else kept(x, live))


def seen(mm: Callable, pairs: jax.Array, x: jax.Array) -> jax.Array:
    """``pairs x`` of :func:`pairs_of` and ``[B, H, C, dim]``: what is not finite in x counts from its own token on."""
    product = functools.partial(mm, "bhij,bhjd->bhid")

    def selected(pairs: jax.Array, x: jax.Array) -> jax.Array:
        i, finite = jnp.arange(x.shape[2])[:, None], jnp.isfinite(x)
        first = jnp.where(finite, x.shape[2], i).min(2, keepdims=True)
        return jnp.where(i < first, product(pairs, jnp.where(finite, x, 0)), jnp.nan)

    # Other devices would wait for what decides, but on a CPU selecting costs more.
    if x.shape[2] > CHUNK["cpu"]:
        return selected(pairs, x)

    @jax.custom_jvp
    def call(pairs: jax.Array, x: jax.Array) -> jax.Array:
        # The first token's pairs with others are 0: 0 times what is not finite shows there.
        found = product(pairs, x)
        return jax.lax.cond(jnp.isfinite(found[:, :, 0]).all(), lambda: found, lambda: selected(pairs, x))

    @call.defjvp
    def second_order(primals: tuple, tangents: tuple) -> tuple:
        # Under vmap JAX could not transpose a derivative that goes through lax.cond.
        return call(*primals), jax.jvp(selected, primals, tangents)[1]

    return call(pairs, x)


def _since(a: jax.Array) -> jax.Array:
    """``[B, H, C, C]``: 1 for tokens s from each token t on, for ``a: [B, H, C, K]``; else 0.

    One copy a head, as a product of all heads with the same triangle transposes them all twice.
    """
    i = jnp.arange(a.shape[2])
    return jnp.broadcast_to((i[:, None] <= i).astype(a.dtype), (*a.shape[:3], len(i)))


def _between(a: jax.Array) -> jax.Array:
    """The gates' sums from the chunk's middle to each token, ``[B, H, C, K]``; those before it count negative."""
    sign = jnp.swapaxes(_since(a), -1, -2) - (jnp.arange(a.shape[2]) < a.shape[2] // 2)
    return _exact("bhts,bhsk->bhtk", sign, a)


def _exact(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)


def sum_last(x: jax.Array) -> jax.Array:
    """Sums over the last axis, as a product: a sum that XLA's CPU backend fuses with its neighbours is far slower."""
    return _exact("...v,v->...", x, jnp.ones(x.shape[-1], x.dtype))


def _left(x: jax.Array, m: int) -> jax.Array:
    """The left half of each block of 2m tokens: ``[B, H, C, dim] -> [B, H, C / 2m, m, dim]``."""
    return _halves(x, m)[:, :, :, 0]


def _right(x: jax.Array, m: int) -> jax.Array:
    return _halves(x, m)[:, :, :, 1]


def _halves(x: jax.Array, m: int) -> jax.Array:
    return x.reshape(*x.shape[:2], x.shape[2] // (2 * m), 2, m, x.shape[-1])


def _join(left: jax.Array | None, right: jax.Array | None) -> jax.Array:
    """The blocks from their halves; None: zeros."""
    given = next(x for x in (left, right) if x is not None)
    halves = [jnp.zeros_like(given) if x is None else x for x in (left, right)]
    B, H, n, m, dim = given.shape
    return jnp.stack(halves, axis=3).reshape(B, H, n * 2 * m, dim)


def on_each_device(forward: Callable, backward: Callable, sizes: Mapping[str, int],
                   at_once: bool = True) -> tuple[Callable, Callable]:
    """``forward`` and ``backward`` with the chunks of the device that a program is lowered for.

    Args:
        forward, backward: as a family's contract has them; the residuals are states before groups of chunks. A third
            argument of ``forward`` may say which sequences continue others; see :class:`Walker`.
        sizes: tokens per chunk by the kind of device, where these are nobody's choice.
        at_once: see :func:`find_groups`.
    """

    def run_forward(args: Any, opts: Any, *others: Any) -> tuple[tuple, tuple]:
        T = args.query.shape[1]
        if opts.cfg.backend == "any" or T == 0:
            return forward(args, opts, *others)
        most = max(find_groups(args, chunk_length(T, n), at_once)[0] for n in sizes.values())

        def run(opts: Any, args: Any, *others: Any) -> tuple[tuple, tuple]:
            outputs, residuals = forward(args, opts, *others)
            # All devices keep equally many states.
            return outputs, tuple(frontend.pad(x, 0, most - x.shape[0]) for x in residuals)

        return _by_device(run, opts, args, *others, sizes=sizes)

    def run_backward(args: Any, residuals: tuple, grads: tuple, opts: Any) -> Any:
        def run(opts: Any, args: Any, residuals: tuple, grads: tuple) -> Any:
            return backward(args, residuals, grads, opts)

        return _by_device(run, opts, args, residuals, grads, sizes=sizes)

    return run_forward, run_backward


def _by_device(fn: Callable, opts: Any, args: Any, *others: Any, sizes: Mapping[str, int]) -> Any:
    """``fn(opts, args, ...)``; with the chunks of the device that it is lowered for, where these are nobody's choice.

    Devices whose chunks are as long, as few tokens have no longer ones, share what is traced.
    """
    T = args.query.shape[1]
    if opts.cfg.backend == "any" or T == 0:
        return fn(opts, args, *others)

    @functools.cache
    def on(block_q: int) -> Callable:
        return functools.partial(fn, opts._replace(cfg=replace(opts.cfg, block_q=block_q, backend="any")))

    return frontend.by_device({name: on(chunk_length(T, n)) for name, n in sizes.items()}, args, *others)
