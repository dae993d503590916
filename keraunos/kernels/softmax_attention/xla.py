"""Softmax attention in ``jax.numpy``, on CPU, GPU and TPU: at once where the weights are small, else block by block.

At once is the definition, and JAX differentiates it. Block by block, a scan takes the pairs of blocks of queries and
keys of which any see each other, in the order of the queries. It carries the running maximum and sum of a block of
queries (the online softmax) and keeps both for the backward, for each query: memory is linear in T and S. The
backward is a scan over the same pairs, which computes the weights again. Work grows with what is visible: blocks that a
causal mask or a window leaves out are no pairs.

A key that no query sees may be NaN or infinite, which a weight of 0 does not hide in a product. So products have 0 in
its place, and NaN is added to the logits of what is not finite, before those that are not seen become -inf.

Inside, queries are ``[B, G, R, T, K]``, R of them for each key head, keys ``[B, G, S, K]``.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from keraunos.frontends import jax as frontend
from keraunos.kernels.softmax_attention.contract import (
    FAR,
    Args,
    Options,
    axes,
    blocks,
    is_for_libraries,
    keeps,
    kernel,
    not_for_libraries,
    over_groups,
    sinks_of,
    traits,
)
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q", "block_k")

# Weights that a step may have in memory.
_WEIGHTS = 1 << 23


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """As large as the weights of one pair of blocks may be: fewer steps; 128 at least, for the matrix units."""
    size = 512 if inv.backend == "cpu" else 1024
    while size > 128 and inv.dims["B"] * inv.dims["H"] * size * size > _WEIGHTS:
        size //= 2
    return replace(cfg, block_q=size, block_k=size)


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Blocks of 128 to 1,024 tokens on either side."""
    sizes = (128, 256, 512, 1024)
    return [replace(cfg, block_q=q, block_k=k) for q in sizes for k in sizes]


class _Tile(NamedTuple):
    """The arrays, other than queries and keys, that the weights of a tile depend on; absent ones are None."""

    t: Any  # [Tq] places of the queries
    s: Any  # [Sk] places of the keys
    bias: Any  # [1 or B, G or 1, R or 1, Tq, Sk]
    mask: Any
    query_segments: Any  # [B, Tq]
    key_segments: Any  # [B, Sk]
    seed: Any
    query_offset: Any  # [B, 1, 1, 1, 1]


def _logits(q: jax.Array, k: jax.Array, tile: _Tile, opts: Options, S: int,
            nan: jax.Array | float = 0.0) -> tuple[Any, Any, Any]:
    """``(logits, the capped ones before the bias, which are seen)``, ``[B, G, R, Tq, Sk]``; -inf where not visible.

    ``nan``: is added to those that are seen.
    """
    x = opts.softmax_scale * _products(q, k, _working(q, opts))
    if opts.soft_cap is not None:
        # The tangent is 1 further on, and infinite logits of hidden keys have a gradient of 0.
        x = opts.soft_cap * jnp.tanh(jax.lax.clamp(-30.0, x / opts.soft_cap, 30.0))
    capped = x
    if tile.bias is not None:
        x = x + tile.bias
    seen = _seen(tile, opts, S)
    return jnp.where(seen, x + nan, -jnp.inf), capped, seen


def _seen(tile: _Tile, opts: Options, S: int) -> jax.Array:
    """Which keys a query sees, of a shape that broadcasts to the tile's."""
    t, s = tile.t[:, None], tile.s[None]
    seen = s < S
    place = t if tile.query_offset is None else t + tile.query_offset
    if opts.right is not None:
        seen = seen & (s <= place + opts.right)
    if opts.left is not None:
        seen = seen & (s >= place - opts.left)
    if tile.mask is not None:
        seen = seen & tile.mask
    if tile.query_segments is not None:
        own = tile.query_segments[:, None, None, :, None]
        seen = seen & (own == tile.key_segments[:, None, None, None]) & (own >= 0)
    if tile.bias is not None:
        # The logit of a key that is NaN is not -inf.
        seen = seen & (tile.bias > -jnp.inf)
    return seen


def _finite(x: jax.Array) -> jax.Array:
    """With 0 for what is NaN or infinite."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _nan(x: jax.Array) -> jax.Array:
    """NaN for a row of which any value is NaN or infinite, else 0: ``[..., n, dim] -> [..., n, 1]``."""
    return jax.lax.stop_gradient(jnp.where(jnp.isfinite(x).all(-1, keepdims=True), 0, jnp.nan))


def _beside(x: jax.Array) -> jax.Array:
    """Of keys ``[B, G, S, 1] -> [B, G, 1, 1, S]``, as the weights have them."""
    return x.swapaxes(2, 3)[:, :, None]


def _poisoned(x: jax.Array, value: jax.Array) -> jax.Array:
    """``value`` where it is not 0, else ``x``: gradients that come to a value are made infinite, but for those of 0."""
    # They are not NaN, whose product with a gradient of 0 is no 0.
    large = jnp.where(value == 0, 1, jnp.finfo(x.dtype).max).astype(x.dtype)
    known = jax.lax.stop_gradient(x)
    return (x - known) * large * large * large + jnp.where(value == 0, known, value.astype(x.dtype))


def _working(q: jax.Array, opts: Options) -> np.dtype:
    return jnp.promote_types(jnp.promote_types(q.dtype, opts.softmax_dtype), jnp.float32)


def _product(equation: str, a: jax.Array, b: jax.Array, work: np.dtype) -> jax.Array:
    """In ``work``'s precision; of 16-bit operands the matrix units' products are exact as they are."""
    precision = jax.lax.Precision.HIGHEST if a.dtype.itemsize > 2 else None
    return jnp.einsum(equation, a, b, preferred_element_type=work, precision=precision)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _products(q: jax.Array, k: jax.Array, work: np.dtype) -> jax.Array:
    """Of queries and keys: what is not finite stays in its own pairs, in derivatives too."""
    return _product("bgrtk,bgsk->bgrts", q, k, work)


@_products.defjvp
def _tangent(work: np.dtype, given: tuple, moved: tuple) -> tuple[jax.Array, jax.Array]:
    (q, k), (dq, dk) = given, moved
    return _products(q, k, work), _products(dq, _finite(k), work) + _products(_finite(q), dk, work)


def _kept(x: jax.Array, tile: _Tile, opts: Options) -> jax.Array:
    """Weights, or their gradients, after dropout."""
    if not opts.dropout:
        return x
    B, G, R = x.shape[:3]
    head = jnp.arange(B * G * R, dtype=jnp.uint32).reshape(B, G, R, 1, 1)
    t, s = tile.t.astype(jnp.uint32)[:, None], tile.s.astype(jnp.uint32)
    keep = keeps(tile.seed.astype(jnp.uint32), head, t, s, opts.dropout)
    return jnp.where(keep, x / (1 - opts.dropout), 0)


def _heads(args: Args) -> tuple[Any, Any, Any]:
    """Queries ``[B, G, R, T, K]``, keys and values ``[B, G, S, dim]``."""
    q, k, v = args[:3]
    G = k.shape[2]
    q = q.reshape(*q.shape[:2], G, q.shape[2] // G, q.shape[3])
    return q.transpose(0, 2, 3, 1, 4), k.swapaxes(1, 2), v.swapaxes(1, 2)


def _tile(args: Args) -> _Tile:
    """The tile of all queries and keys of the call."""
    G, sides = args.key.shape[2], (args.query.shape[1], args.key.shape[1])
    t, s = (jnp.arange(n, dtype=jnp.int32) for n in sides)
    bias, mask = (None if x is None else over_groups(x, G) for x in (args.bias, args.mask))
    offset = args.query_offset
    if offset is not None:
        # So near that the sums with places and windows have no more than 32 bits.
        offset = jnp.clip(offset, -FAR // 2, FAR // 2).astype(jnp.int32)[:, None, None, None, None]
    return _Tile(t, s, bias, mask, args.query_segments, args.key_segments, args.seed, offset)


def _at_once(args: Args, opts: Options) -> tuple[Any, Any]:
    """The definition, ``(output, weights)``: of finite logits, into whose results the others are put afterwards."""
    q, k, v = _heads(args)
    (B, T, H, _), S = args.query.shape, k.shape[2]
    tile = _tile(args)
    x, _, seen = _logits(q, k, tile, opts, S, _beside(_nan(v)))
    # Maxima pass over NaN on some devices.
    x = jnp.where(x < jnp.inf, x, jnp.inf).astype(opts.softmax_dtype)
    sinks = jnp.zeros((1, 1, 1, 0), x.dtype) if args.sinks is None else sinks_of(args.sinks.astype(x.dtype), k.shape[1])
    sinks = sinks[..., None, :]
    most = jax.lax.stop_gradient(x.max(-1, keepdims=True, initial=-jnp.inf))
    top = jnp.maximum(most, jax.lax.stop_gradient(sinks).max(-1, keepdims=True, initial=-jnp.inf))
    top = jnp.where(jnp.isfinite(top), top, 0)
    x = x - top
    # It is above 0 where a query sees what is not finite, or has a product that is not.
    p = jnp.exp(jnp.where(x <= 0, x, 0))
    total = p.sum(-1, keepdims=True) + jnp.exp(sinks - top).sum(-1, keepdims=True)
    # No gradient comes to the weight of a key that is not seen.
    weights = _kept(jnp.where(seen, p / jnp.where(total == 0, 1, total), 0), tile, opts)
    o = _product("bgrts,bgsv->bgrtv", weights.astype(v.dtype), _finite(v), _working(q, opts))
    nan = jnp.where(most < jnp.inf, 0, jnp.nan)
    o = _poisoned(o, nan)
    if opts.return_weights:
        weights = _poisoned(weights, nan)
    o = o.transpose(0, 3, 1, 2, 4).reshape(B, T, H, v.shape[-1])
    return o.astype(args.query.dtype), weights.reshape(B, H, T, S)


class _Blocks:
    """The blocks of one call, and the pairs of them that a scan takes."""

    def __init__(self, args: Args, opts: Options):
        self.args, self.opts = args, opts
        (self.B, self.T, self.H, _), (self.S, self.G, self.V) = args.query.shape, args.value.shape[1:]
        # Complete by the contract, whatever their declared type allows.
        self.sizes = cast(int, opts.cfg.block_q), cast(int, opts.cfg.block_k)
        self.q, self.k, self.v = (self.cut(x, 3 if i == 0 else 2, min(i, 1)) for i, x in enumerate(_heads(args)))
        self.work = _working(args.query, opts)
        whole = _tile(args)
        sides = ((whole.bias, -2, -1), (whole.mask, -2, -1))
        bias, mask = (None if x is None else self.pad(self.pad(x, t, 0), s, 1) for x, t, s in sides)
        segments = [None if x is None else self.pad(x, 1, i) for i, x in enumerate(whole[4:6])]
        self.whole = whole._replace(bias=bias, mask=mask, query_segments=segments[0], key_segments=segments[1])
        seen = blocks(args, opts, *self.sizes)
        pairs = [(i, j, n == 0) for i, row in enumerate(seen) for n, j in enumerate(row)]
        self.pairs = tuple(np.array(x, np.int32) for x in zip(*pairs, strict=True)) if pairs else ()

    def pad(self, x: jax.Array, axis: int, side: int) -> jax.Array:
        """With zeros up to whole blocks of queries (side 0) or keys (1)."""
        return frontend.pad(x, axis % x.ndim, -x.shape[axis] % self.sizes[side])

    def cut(self, x: jax.Array, axis: int, side: int) -> jax.Array:
        """``[n, ...]``: the blocks of an axis."""
        x = self.pad(x, axis, side)
        size = self.sizes[side]
        shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def joined(self, x: jax.Array, axis: int, length: int) -> jax.Array:
        """The inverse of :meth:`cut`."""
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, length, axis=axis)

    def rows(self, x: jax.Array) -> jax.Array:
        """Blocks of queries' results ``[n, B, G, R, block, dim]`` as ``[B, T, H, dim]``."""
        return self.joined(x, 3, self.T).transpose(0, 3, 1, 2, 4).reshape(self.B, self.T, self.H, x.shape[-1])

    def tile(self, i: jax.Array, j: jax.Array) -> _Tile:
        """The tile of one pair of blocks: queries of block ``i``, keys of block ``j``."""
        at, sizes = (i * self.sizes[0], j * self.sizes[1]), self.sizes

        def part(x: jax.Array | None, axis: int, side: int) -> Any:
            return None if x is None else jax.lax.dynamic_slice_in_dim(x, at[side], sizes[side], axis % x.ndim)

        t, s = (jnp.arange(n, dtype=jnp.int32) + first for n, first in zip(sizes, at, strict=True))
        bias, mask = (part(part(x, -2, 0), -1, 1) for x in self.whole[2:4])
        own, other = part(self.whole.query_segments, 1, 0), part(self.whole.key_segments, 1, 1)
        return _Tile(t, s, bias, mask, own, other, self.args.seed, self.whole.query_offset)

    def sinks(self) -> jax.Array:
        """``[1, G or 1, R or 1, 1, n]``; none: n is 0."""
        if self.args.sinks is None:
            return jnp.zeros((1, 1, 1, 1, 0), self.work)
        return sinks_of(self.args.sinks.astype(self.work), self.G)[..., None, :]

    def zeros(self, shape: tuple[int, ...]) -> jax.Array:
        return frontend.zeros(shape, self.work, self.args.query)

    def start(self) -> tuple[Any, Any, Any]:
        """A block of queries that has seen its sinks only: ``(maximum, sum, output)``, not yet divided."""
        sinks, rows = self.sinks(), self.zeros(self.q.shape[1:-1])
        top = rows + sinks.max(-1, initial=-jnp.inf)
        total = rows + jnp.exp(sinks - jnp.where(jnp.isfinite(top), top, 0)[..., None]).sum(-1)
        return top, total, self.zeros((*self.q.shape[1:-1], self.V))


def _sums(top: jax.Array, total: jax.Array) -> tuple[Any, Any]:
    """The sums as ``contract.py`` has them: inf where nothing is visible, so that weights computed from it are 0."""
    nothing = total == 0
    return jnp.where(nothing, jnp.inf, jnp.where(jnp.isfinite(top), top, 0)), jnp.where(nothing, 1, total)


def _forward(args: Args, opts: Options) -> tuple[jax.Array, tuple]:
    """``(output, what the backward needs: the output and, for each query, its maximum and the sum relative to it)``."""
    w = _Blocks(args, opts)
    start = w.start()

    def step(carry: tuple, pair: tuple) -> tuple:
        (top, total, acc), outputs, sums = carry
        i, j, is_first = pair
        top, total, acc = (jnp.where(is_first, new, old) for new, old in zip(start, (top, total, acc), strict=True))
        tile = w.tile(i, j)
        x, _, _ = _logits(w.q[i], w.k[j], tile, opts, w.S, _beside(_nan(w.v[j])))
        higher = jnp.maximum(top, x.max(-1))
        finite = jnp.where(jnp.isfinite(higher), higher, 0)
        kept, p = jnp.exp(top - finite), jnp.exp(x - finite[..., None])
        total = total * kept + p.sum(-1)
        p = _kept(p, tile, opts).astype(args.value.dtype)
        acc = acc * kept[..., None] + _product("bgrts,bgsv->bgrtv", p, _finite(w.v[j]), w.work)
        own = _sums(higher, total)
        outputs = outputs.at[i].set((acc / own[1][..., None]).astype(outputs.dtype))
        sums = tuple(of.at[i].set(x) for of, x in zip(sums, own, strict=True))
        return ((higher, total, acc), outputs, sums), None

    n = w.q.shape[0]
    top, total, acc = start
    sums = tuple(jnp.broadcast_to(x, (n, *x.shape)) for x in _sums(top, total))
    outputs = frontend.zeros((n, *acc.shape), args.query.dtype, args.query)
    if w.pairs:
        (_, outputs, sums), _ = jax.lax.scan(step, (start, outputs, sums), w.pairs)
    output = w.rows(outputs)
    return output, (output, *sums)


def _backward(args: Args, residuals: tuple, doutput: jax.Array, opts: Options) -> Args:
    """The gradients of ``args``."""
    output, tops, totals = residuals
    w = _Blocks(args, opts)
    by_block = [w.cut(_heads(args._replace(query=x))[0], 3, 0) for x in (doutput, output)]
    do = by_block[0]
    # A query whose output has no gradient changes nothing, whatever it holds.
    rows = (do != 0).any(-1)  # [n, B, G, R, block]
    mean = jnp.where(rows, (do.astype(w.work) * by_block[1].astype(w.work)).sum(-1), 0)

    def step(carry: tuple, pair: tuple) -> tuple:
        dq, (dqs, dks, dvs, dbias) = carry
        i, j, is_first = pair
        tile, q, k = w.tile(i, j), w.q[i], w.k[j]
        x, capped, seen = _logits(q, k, tile, opts, w.S)
        live = seen & rows[i][..., None]
        p = jnp.where(live, jnp.exp(x - tops[i][..., None]) / totals[i][..., None], 0)
        dp = _kept(_product("bgrtv,bgsv->bgrts", do[i], w.v[j], w.work), tile, opts)
        dx = jnp.where(live, p * (dp - mean[i][..., None]), 0)
        if dbias is not None:
            place = (*[i * 0] * 3, i * w.sizes[0], j * w.sizes[1])
            dbias = jax.lax.dynamic_update_slice(dbias, _summed(dx, dbias.shape[:3]).astype(dbias.dtype), place)
        dz = opts.softmax_scale * dx
        if opts.soft_cap is not None:
            dz = jnp.where(live, dz * (1 - (capped / opts.soft_cap) ** 2), 0)
        # Where a gradient is not finite, keys that its query sees have NaN.
        p = jnp.where(live, p + _nan(do[i]), 0)
        dz, p = dz.astype(q.dtype), _kept(p, tile, opts).astype(q.dtype)
        own = _product("bgrts,bgsk->bgrtk", dz, _finite(k), w.work)
        dq = jnp.where(is_first, 0, dq) + own
        dk = _product("bgrts,bgrtk->bgsk", dz, _finite(q), w.work)
        dv = _product("bgrts,bgrtv->bgsv", p, _finite(do[i]), w.work)
        return (dq, (dqs.at[i].set(dq.astype(dqs.dtype)), dks.at[j].add(dk), dvs.at[j].add(dv), dbias)), None

    bias = w.whole.bias
    sums = (
        frontend.zeros(w.q.shape, args.query.dtype, args.query), w.zeros(w.k.shape), w.zeros(w.v.shape),
        None if bias is None else frontend.zeros(bias.shape, bias.dtype, args.query),
    )
    if w.pairs:
        (_, sums), _ = jax.lax.scan(step, (w.zeros(w.q.shape[1:]), sums), w.pairs)
    dq, dk, dv, dbias = sums
    dk, dv = (w.joined(x, 2, w.S).swapaxes(1, 2) for x in (dk, dv))
    if dbias is not None:
        dbias = dbias.reshape(*args.bias.shape[:2], *dbias.shape[3:])[..., : w.T, : w.S]
    dsinks = None
    if args.sinks is not None:
        # [n, B, G, R, block, sinks]; queries that were padded have no gradient of their output.
        weights = jnp.where(rows[..., None], jnp.exp(w.sinks() - tops[..., None]) / totals[..., None], 0)
        dsinks = -(weights * mean[..., None]).sum((0, 1, 4))
        heads = 1 if args.sinks.ndim == 1 else args.sinks.shape[0]
        dsinks = dsinks.reshape(heads, w.H // heads, dsinks.shape[-1]).sum(1).reshape(args.sinks.shape)
    found = Args(w.rows(dq), dk, dv, dbias, dsinks)
    return Args(*(None if d is None else d.astype(x.dtype) for x, d in zip(args, found, strict=True)))


def _summed(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Over the first axes that are 1 in ``shape``."""
    return x.sum([i for i, n in enumerate(shape) if n == 1], keepdims=True)


def _small(args: Args, opts: Options) -> Options:
    """With blocks no larger than the call needs."""
    sizes = (("block_q", args.query.shape[1]), ("block_k", args.key.shape[1]))
    least = {name: min(getattr(opts.cfg, name), 1 << max(n - 1, 0).bit_length()) for name, n in sizes}
    return opts._replace(cfg=replace(opts.cfg, **least))


def part(args: Args, opts: Options) -> tuple[Any, Any, Any]:
    """See ``contract.py``."""
    (B, T, H, _), opts = args.query.shape, _small(args, opts)
    output, (_, *sums) = _forward(args, opts)
    top, total = (_Blocks(args, opts).joined(x, 3, T).reshape(B, H, T) for x in sums)
    return output, top, total


def part_gradients(args: Args, whole: tuple[Any, Any, Any], doutput: jax.Array, opts: Options) -> Args:
    """See ``contract.py``."""
    (B, T, H, _), G, opts = args.query.shape, args.key.shape[2], _small(args, opts)
    output, *sums = whole
    w = _Blocks(args, opts)
    top, total = (w.cut(x.reshape(B, G, H // G, T), 3, 0) for x in sums)
    # Of queries that were padded it is 0, of all others at least 1.
    return _backward(args, (output, top, jnp.maximum(total, 1)), doutput, opts)


_by_block = frontend.differentiable(_forward, _backward, lambda args, opts: (*axes(args, opts), None))
_jitted = jax.jit(frontend.as_written(_at_once), static_argnums=1)


def _not_for_cudnn(inv: Invocation) -> str | None:
    """Why a call is none for cuDNN, or None."""
    if (inv.dims["T"] | inv.dims["S"]) % 2:
        return f"JAX gives cuDNN no odd lengths; the call has T = {inv.dims['T']}, S = {inv.dims['S']}"
    return not_for_libraries(inv)


def _goes_to_cudnn(args: Args, opts: Options) -> bool:
    device, (q, k, v) = frontend.device_of(args.query), args[:3]
    given = [name for name, x in zip(Args._fields, args, strict=True) if x is not None]
    sizes = dict(T=q.shape[1], S=k.shape[1], K=q.shape[3], V=v.shape[3])
    return (
        device.backend == "gpu"
        and device.kind.startswith("NVIDIA")
        and (sizes["T"] | sizes["S"]) % 2 == 0
        and is_for_libraries(given, frontend.dtype_name(q), sizes, traits(opts))
    )


def _attention(args: Args, opts: Options) -> tuple[Any, Any]:
    """``(output, weights or None)``."""
    if opts.dropout:
        # What is left out follows from places in the whole call: JAX shards that by its own rules.
        return _on_shards(args, opts)
    return frontend.spread(_on_shards, _letters, args, opts)


def _letters(args: Args, opts: Options) -> tuple[Args, tuple[str, str | None], None]:
    own, rows = axes(args, opts)
    return own, (rows, f"{rows[0]}{rows[2]}.." if opts.return_weights else None), None


def _on_shards(args: Args, opts: Options) -> tuple[Any, Any]:
    """:func:`_attention` of what is on one device, or where XLA's partitioner settles what is."""
    if _goes_to_cudnn(args, opts):
        q, k, v = args[:3]
        o = jax.nn.dot_product_attention(
            q, k, v, scale=opts.softmax_scale, is_causal=opts.right == 0, implementation="cudnn"
        )
        return o, None
    queries, keys = args.query.shape[1], args.key.shape[1]
    # One token on a cache has few weights, however many keys it sees; blocks would copy these.
    block_q, block_k = cast(int, opts.cfg.block_q), cast(int, opts.cfg.block_k)
    most = block_k * (block_q if queries == 1 else 1)
    if (queries <= block_q and keys <= most) or opts.return_weights:
        output, weights = _jitted(args, opts)
        return output, weights if opts.return_weights else None
    return _by_block(_small(args, opts))(args), None


attention = replace(kernel(
    "xla", __file__, compute=lambda args, opts: _attention, fields=FIELDS, heuristic=heuristic, candidates=candidates
), parts=(part, part_gradients))
# The row before Triton's, for calls that cuDNN computes.
preferred_attention = replace(attention, loses=_not_for_cudnn)
