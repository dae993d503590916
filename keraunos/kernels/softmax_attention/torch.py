"""Softmax attention in PyTorch operations, on any device: its own kernels where they do, else by blocks of queries.

``scaled_dot_product_attention`` takes plain and causal calls: PyTorch's best for the device. Everything else is
computed for a block of queries and the keys that it may see, and again in the backward, so that the weights of one
block are all that is in memory: it grows linearly with T and S, work with what is visible.

A key that no query sees may be NaN or infinite, which a weight of 0 does not hide in a product. So each result is
looked at, where that takes no wait for a device: if it is not finite, it is made again with selections (``careful``).

Inside, queries are ``[B, G, R, T, K]``, R of them for each key head, keys ``[B, G, S, K]``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from keraunos.frontends.torch.arrays import einsum, is_watched, products_are_rounded
from keraunos.frontends.torch.gradient import differentiable
from keraunos.kernels.softmax_attention.contract import (
    OPERATOR,
    Args,
    Options,
    blocks,
    keeps,
    kernel,
    not_for_libraries,
    over_groups,
    sinks_of,
)
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q",)

# Weights that a block may have in memory.
_WEIGHTS = 1 << 23


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """As many queries as the weights of a block may be, 16 at least."""
    size = 1024
    while size > 16 and inv.dims["B"] * inv.dims["H"] * inv.dims["S"] * size > _WEIGHTS:
        size //= 2
    return replace(cfg, block_q=size)


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Blocks of 16 to 1,024 queries."""
    return [replace(cfg, block_q=size) for size in (16, 64, 256, 1024)]


def _as_called(fn: Callable) -> Callable:
    """The precision is the caller's choice by dtypes: autocast does not reach into ``fn(args, ...)``."""

    @functools.wraps(fn)
    def run(args: Args, *rest: Any, **named: Any) -> Any:
        device = args.query.device.type
        if not torch.amp.is_autocast_available(device):
            return fn(args, *rest, **named)
        with torch.autocast(device, enabled=False):
            return fn(args, *rest, **named)

    return run


def _working(x: torch.Tensor, opts: Options) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, getattr(torch, opts.softmax_dtype)), torch.float32)


class _Weights(NamedTuple):
    """The weights of some queries and keys, ``[B, G, R, T, S]``, and what their gradient needs."""

    p: torch.Tensor  # before the dropout
    sinks: torch.Tensor | None  # [B, G, R, T, n]
    capped: torch.Tensor  # the logits before the bias
    keep: torch.Tensor | float  # factors of the dropout
    top: torch.Tensor  # [B, G, R, T, 1]; the sum is exp(top) total
    total: torch.Tensor
    seen: torch.Tensor | None  # which keys a query sees, of a shape that broadcasts; None: all
    bad: torch.Tensor | None  # which queries see a bad pair

    @property
    def kept(self) -> torch.Tensor:
        """The weights that multiply the values."""
        return self.p * self.keep


def _heads(x: torch.Tensor, G: int) -> torch.Tensor:
    """``[B, T, H, dim] -> [B, G, R, T, dim]``."""
    return x.reshape(*x.shape[:2], G, x.shape[2] // G, x.shape[3]).permute(0, 2, 3, 1, 4)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``[B, G, R, T, dim] -> [B, T, H, dim]``."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _weights(args: Args, opts: Options, t0: int, s0: int, sums: tuple[torch.Tensor, ...] | None = None,
             careful: bool = True, bad: torch.Tensor | None = None) -> _Weights:
    """The weights of queries from ``t0`` and keys from ``s0``; ``sums``: the queries' top and total, if known.

    ``bad``: the pairs whose products are not to be used, which others that are not finite join.
    """
    (B, T, H, _), (S, G) = args.query.shape, args.key.shape[1:3]
    work, device = _working(args.query, opts), args.query.device
    q, k = _heads(args.query.to(work), G), args.key.to(work).transpose(1, 2)
    x = opts.softmax_scale * einsum("bgrtk,bgsk->bgrts", q, k)
    if bad is not None:
        bad = bad | ~x.isfinite()
        x = torch.where(bad, 0, x)
    if opts.soft_cap is not None:
        x = opts.soft_cap * torch.tanh(x / opts.soft_cap)
    capped = x
    if args.bias is not None:
        x = x + over_groups(args.bias, G)
    t, s = torch.arange(t0, t0 + T, device=device)[:, None], torch.arange(s0, s0 + S, device=device)
    place = t if args.query_offset is None else t + args.query_offset[:, None, None, None, None]
    seen = None
    if opts.right is not None:
        seen = s <= place + opts.right
    if opts.left is not None:
        seen = _both(seen, s >= place - opts.left)
    if args.mask is not None:
        seen = _both(seen, over_groups(args.mask, G))
    if args.query_segments is not None:
        own = args.query_segments[:, None, None, :, None]
        seen = _both(seen, (own == args.key_segments[:, None, None, None]) & (own >= 0))
    if args.bias is not None and careful:
        # The logit of a key that is NaN is not -inf.
        seen = _both(seen, over_groups(args.bias, G) > -torch.inf)
    if seen is not None:
        x = torch.where(seen, x, -torch.inf)
    x = x.to(getattr(torch, opts.softmax_dtype))
    sinks = x.new_zeros(1, 1, 1, 1, 0) if args.sinks is None else sinks_of(args.sinks.to(x.dtype), G)[..., None, :]
    if sums is None:
        lowest = x.new_full((*x.shape[:-1], 1), -torch.inf)
        top = torch.cat([lowest, x.detach(), sinks.detach().expand(*x.shape[:-1], -1)], -1).amax(-1, keepdim=True)
        top = torch.where(torch.isfinite(top), top, 0)
        p, sinks = torch.exp(x - top), torch.exp(sinks - top)
        total = p.sum(-1, keepdim=True) + sinks.sum(-1, keepdim=True)
    else:
        top, total = sums
        p = torch.exp(x - top)
    divisor = torch.where(total == 0, 1, total)
    keep: Any = 1.0
    if opts.dropout:
        head = torch.arange(B * H, device=device).reshape(B, G, H // G, 1, 1)
        keep = keeps(args.seed.long(), head, t, s, opts.dropout).to(x.dtype) / (1 - opts.dropout)
    p = p / divisor
    if bad is not None and seen is not None:
        # Where PyTorch differentiates it, no gradient comes to a hidden key's weight.
        bad, p = bad & seen, torch.where(seen, p, 0)
    bad = None if bad is None else bad.any(-1, keepdim=True)
    return _Weights(p, None if args.sinks is None else sinks / divisor, capped, keep, top, total, seen, bad)


def _both(a: torch.Tensor | None, b: torch.Tensor) -> torch.Tensor:
    return b if a is None else a & b


def _part(args: Args, t: slice, s: slice) -> Args:
    """The call of some queries and keys."""

    def cut(x: torch.Tensor | None, *where: slice) -> torch.Tensor | None:
        return None if x is None else x[where]

    both, every = (slice(None), slice(None), t, s), slice(None)
    return Args(
        args.query[:, t], args.key[:, s], args.value[:, s], cut(args.bias, *both), args.sinks, cut(args.mask, *both),
        cut(args.query_segments, every, t), cut(args.key_segments, every, s), args.seed, args.query_offset,
    )


def _parts(args: Args, opts: Options) -> Iterator[tuple[Args, slice, slice]]:
    """Blocks of queries with the keys that they may see, and where both are."""
    T, size = args.query.shape[1], opts.cfg.block_q or 1
    for i, keys in enumerate(blocks(args, opts, size, 1)):
        t, s = slice(i * size, min((i + 1) * size, T)), slice(keys.start, keys.stop)
        yield _part(args, t, s), t, s


def _output(args: Args, weights: torch.Tensor) -> torch.Tensor:
    value = args.value.to(torch.promote_types(weights.dtype, torch.float32))
    o = einsum("bgrts,bgsv->bgrtv", weights.to(value.dtype), value.transpose(1, 2))
    return _rows(o).to(args.query.dtype)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """With 0 for what is NaN or infinite."""
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)


def _not_finite(seen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The NaN that values of ``x [..., n, dim]`` that are not finite add to sums over ``seen [..., m, n]``."""
    mask = seen.to(torch.float32)
    above, below = (mask @ mark.to(torch.float32) > 0 for mark in (~(x < torch.inf), ~(x > -torch.inf)))
    return torch.where(above, torch.inf, 0.0) + torch.where(below, -torch.inf, 0.0)


def _are_fine(*results: torch.Tensor | None) -> bool:
    """Whether results may be taken as they are: they are known to be finite, as only then their sum is."""

    def total(x: torch.Tensor) -> float:
        return x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)).item()

    return all(x is None or (x.is_cpu and math.isfinite(total(x))) for x in results)


def _attended(args: Args, opts: Options, t0: int, s0: int) -> tuple[torch.Tensor, _Weights]:
    """``(output, weights)`` of queries from ``t0`` and keys from ``s0``, without gradients."""
    w = _weights(args, opts, t0, s0, careful=False)
    output = _output(args, w.kept)
    if (w.seen is None and args.bias is None) or _are_fine(output):
        return output, w
    w = _weights(args, opts, t0, s0)
    output = _output(args._replace(value=_finite(args.value)), w.kept)
    assert w.seen is not None  # by a bias, if by nothing else
    hidden = _not_finite(w.seen, args.value.transpose(1, 2)[:, :, None])
    return output + _rows(hidden.expand(*w.p.shape[:4], -1)).to(output.dtype), w


@_as_called
def forward(args: Args, opts: Options) -> tuple[tuple[torch.Tensor, None], tuple]:
    """``((output, None), nothing)``."""
    output = args.query.new_empty(*args.query.shape[:3], args.value.shape[3])
    for part, t, s in _parts(args, opts):
        output[:, t] = _attended(part, opts, t.start, s.start)[0]
    return (output, None), ()


def _gradients(args: Args, do: torch.Tensor, opts: Options, begin: tuple[int, int], known: tuple[torch.Tensor, ...],
               careful: bool) -> Args:
    """The part of the gradients from some queries and keys, which begin there; of the bias before any sum.

    ``known``: the queries' top and total and their means, if they are of more keys.
    """
    work, G = _working(args.query, opts), args.key.shape[2]
    w = _weights(args, opts, *begin, known[:2] or None, careful)
    p, capped, sinks = w.p.to(work), w.capped, w.sinks
    q = _heads(args.query.to(work), G)
    k, v = args.key.to(work).transpose(1, 2), args.value.to(work).transpose(1, 2)
    dp = einsum("bgrtv,bgsv->bgrts", do, v) * w.keep
    rows = live = None
    if careful:
        # A query whose output has no gradient changes nothing, whatever it holds.
        rows = (do != 0).any(-1, keepdim=True)
        live = _both(w.seen, rows).expand(p.shape)
        p, dp, q, k = torch.where(live, p, 0), torch.where(live, dp, 0), _finite(q), _finite(k)
    mean = known[2] if known else (p * dp).sum(-1, keepdim=True)
    dx = p * (dp - mean)
    if live is not None:
        dx = torch.where(live, dx, 0)
    dsinks = None
    if sinks is not None:
        dsinks = sinks * mean
        dsinks = (dsinks if rows is None else torch.where(rows, dsinks, 0)).sum((0, 3))
    dz = opts.softmax_scale * dx
    if opts.soft_cap is not None:
        dz = dz * (1 - (capped / opts.soft_cap) ** 2)
        dz = dz if live is None else torch.where(live, dz, 0)
    dq = einsum("bgrts,bgsk->bgrtk", dz, k)
    dk = einsum("bgrts,bgrtk->bsgk", dz, q)
    kept = (p * w.keep).to(work)
    if live is None:
        return Args(dq, dk, einsum("bgrts,bgrtv->bsgv", kept, do), dx, dsinks)
    dv = einsum("bgrts,bgrtv->bsgv", kept, _finite(do))
    hidden = _not_finite(live.flatten(2, 3).transpose(2, 3), do.flatten(2, 3))
    return Args(dq, dk, dv + hidden.transpose(1, 2), dx, dsinks)


@_as_called
def backward(args: Args, residuals: tuple, grads: tuple, opts: Options, sums: tuple = (),
             means: torch.Tensor | None = None) -> Args:
    """The gradients of ``args`` from that of the output.

    ``sums`` and ``means``, ``[B, G, R, T, 1]``, are of all keys where these are a part of them.
    """
    work, G, H = _working(args.query, opts), args.key.shape[2], args.query.shape[2]

    def zeros(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    dq, dk, dv = zeros(args.query), zeros(args.key, work), zeros(args.value, work)
    dbias = zeros(args.bias) if opts.needs(args, "bias") else None
    dsinks = None if args.sinks is None else args.sinks.new_zeros(G, H // G, args.sinks.shape[-1], dtype=work)
    for part, t, s in _parts(args, opts):
        own = tuple(x[..., t, :] for x in (*sums, *(() if means is None else (means,))))
        found = _gradients(part, _heads(grads[0][:, t].to(work), G), opts, (t.start, s.start), own, careful=False)
        if not _are_fine(*found):
            found = _gradients(part, _heads(grads[0][:, t].to(work), G), opts, (t.start, s.start), own, careful=True)
        dq[:, t] = _rows(found.query).to(dq.dtype)
        dk[:, s] += found.key
        dv[:, s] += found.value
        if dbias is not None:
            dbias[:, :, t, s] = found.bias.sum_to_size(over_groups(part.bias, G).shape).reshape(part.bias.shape)
        if dsinks is not None:
            dsinks -= found.sinks
    if dsinks is not None:
        heads = 1 if args.sinks.ndim == 1 else args.sinks.shape[0]
        dsinks = dsinks.reshape(heads, H // heads, args.sinks.shape[-1]).sum(1).reshape(args.sinks.shape)
    found = Args(dq, dk, dv, dbias, dsinks)
    return Args(*(None if d is None else d.to(x.dtype) for x, d in zip(args, found, strict=True)))


@_as_called
def part(args: Args, opts: Options) -> tuple[Any, Any, Any]:
    """See ``contract.py``."""
    B, T, H = args.query.shape[:3]
    output = args.query.new_empty(B, T, H, args.value.shape[3])
    top, total = (output.new_empty(B, H, T, dtype=_working(args.query, opts)) for _ in range(2))
    for some, t, s in _parts(args, opts):
        output[:, t], w = _attended(some, opts, t.start, s.start)
        top[..., t], total[..., t] = (x.flatten(1, 2)[..., 0] for x in (w.top, w.total))
    return output, torch.where(total == 0, torch.inf, top), torch.where(total == 0, 1, total)


def part_gradients(args: Args, whole: tuple[Any, Any, Any], doutput: torch.Tensor, opts: Options) -> Args:
    """See ``contract.py``."""
    (B, T, H, _), G = args.query.shape, args.key.shape[2]
    output, *sums = whole
    work = _working(args.query, opts)
    means = (output.to(work) * doutput.to(work)).sum(-1).transpose(1, 2)
    top, total, means = (x.reshape(B, G, H // G, T, 1) for x in (*sums, means))
    return backward(args, (), (doutput, None), opts, (top, total), means)


def _is_plain(args: Args, opts: Options) -> bool:
    """Whether PyTorch's own function computes just this. It scales what causality hides, which is -inf."""
    return (
        all(x is None for x in (*args[3:8], args.query_offset, opts.soft_cap, opts.left, opts.dropout or None))
        and opts.right in (None, 0)
        and opts.softmax_scale > 0
        and not opts.return_weights
        and opts.softmax_dtype == ("float64" if args.query.dtype == torch.float64 else "float32")
        # On GPUs its float32 has not float32's precision, elsewhere only as far as the user's settings allow.
        and not (args.query.dtype == torch.float32 and (args.query.is_cuda or products_are_rounded(args.query.device)))
        and min(args.query.shape[1], args.key.shape[1]) > 0
    )


def compute(args: Args, opts: Options) -> Callable[[Args, Options], tuple[torch.Tensor, torch.Tensor | None]] | None:
    """See ``contract.py``: PyTorch's own function, or the definition, where the weights are wanted.

    On a CPU what the function gives is looked at, which nothing that traces or transforms a call allows.
    """
    if _is_plain(args, opts):
        return _guarded if args.query.is_cpu and is_watched(args) else _own
    return _at_once if opts.return_weights else None


@_as_called
def _own(args: Args, opts: Options) -> tuple[torch.Tensor, None]:
    o = _library(args, opts)
    if o.is_cpu and not _are_fine(o):
        # Its gradients would not be those of what is seen: of finite outputs they are.
        return _by_block(opts, args)(args)[0], None
    return o, None


def _library(args: Args, opts: Options) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in args[:3])
    if opts.right == 0:
        # Its kernels read keys past the last query's, too.
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    # Of sizes that a graph leaves open, it is a symbol.
    shared = bool(q.shape[1] != k.shape[1])
    o = scaled_dot_product_attention(q, k, v, is_causal=opts.right == 0, scale=opts.softmax_scale, enable_gqa=shared)
    return o.transpose(1, 2)


@_as_called
def _guarded(args: Args, opts: Options) -> tuple[torch.Tensor, None]:
    """:func:`_own` where no value can be looked at."""
    q, k, v = args[:3]
    own, *others = (~x.isfinite().all(-1) for x in (q, k, v))  # [B, T, H], [B, S, G]
    # Causality shows a query the keys up to its own; no limit, all of them.
    other, T = others[0] | others[1], q.shape[1]
    other = (other.cumsum(1) > 0)[:, :T] if opts.right == 0 else other.any(1, keepdim=True)
    if opts.right == 0 and k.shape[1] < T:
        other = torch.cat([other, other[:, -1:].expand(-1, T - k.shape[1], -1)], 1)
    bad = own | other.repeat_interleave(q.shape[2] // k.shape[2], 2)
    o = _library(args._replace(query=_finite(q), key=_finite(k), value=_finite(v)), opts)
    return _poisoned(o, torch.where(bad, torch.nan, 0.0)[..., None]), None


def _poisoned(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` where it is not 0, else ``x``: gradients that come to a value are made infinite, but for those of 0."""
    # They are not NaN, whose product with a gradient of 0 is no 0.
    large = torch.where(value == 0, 1.0, torch.finfo(x.dtype).max).to(x.dtype)
    return (x - x.detach()) * large * large * large + torch.where(value == 0, x.detach(), value.to(x.dtype))


@_as_called
def _at_once(args: Args, opts: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, which PyTorch differentiates: of finite values, into which the others are put afterwards."""
    G, names = args.key.shape[2], ("query", "key", "value")
    clean = args._replace(**{name: _finite(getattr(args, name)) for name in names})
    own, other = (~x.isfinite().all(-1, keepdim=True) for x in args[:2])
    w = _weights(clean, opts, 0, 0, bad=_heads(own, G) | other.transpose(1, 2)[:, :, None].mT)
    assert w.bad is not None
    poison = torch.where(w.bad, torch.nan, 0.0)
    seen = torch.ones(1, args.key.shape[1], dtype=torch.bool, device=args.key.device) if w.seen is None else w.seen
    hidden = _not_finite(seen, args.value.transpose(1, 2)[:, :, None])
    output = _poisoned(_output(clean, w.kept), _rows((hidden + poison).expand(*w.p.shape[:4], args.value.shape[3])))
    return output, _poisoned(w.kept, poison).flatten(1, 2)


_by_block = differentiable(forward, backward, OPERATOR, "torch")
attention = replace(kernel(
    "torch", __file__, forward, backward, compute=compute, fields=FIELDS, heuristic=heuristic, candidates=candidates
), parts=(part, part_gradients))

# The row before Triton's, for calls that PyTorch's own kernels compute.
preferred_attention = replace(attention, loses=not_for_libraries)
