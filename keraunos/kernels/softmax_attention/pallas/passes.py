"""Softmax attention on TPUs: calls that JAX's own kernel, ``splash_attention``, computes, and how it is given them.

It takes heads before tokens, one sequence, lengths of whole blocks, and queries that are scaled, which rounds them
unless the scale is a power of two. It computes causality and windows in the kernel and leaves out what they hide.

A query that sees nothing gets from it the mean of what it was shown, or NaN. So each head is given a sink that any
visible key outweighs: exp of the difference is 0 in float32. It is left alone where no key is visible, and a sink has
no value: the output and all gradients are 0. Keys that no query sees, and queries of padding, are set to 0 before.

No TPU has run this: values are from Pallas' interpreter, and compilers for TPUs take it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from keraunos.frontends import jax as frontend
from keraunos.kernels.softmax_attention.contract import Args, Options, axes, kernel
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q", "block_k")

_DTYPES = ("bfloat16", "float32")
_DIM = 256
# A register has so many lanes, and blocks are of whole ones.
_LANES = 128
# Below all logits, and far above what the kernel puts where a mask hides: exp of the difference of these is 0.
_SINK = -1e30
# What JAX's kernel has none of, or not exactly.
_ABSENT = {"bias": "bias", "mask": "boolean mask", "seed": "dropout", "query_offset": "query_offset that is an array",
           "sinks": "softmax_aux, whose gradient JAX's kernel sums in the query's dtype"}
_HIDDEN = -1  # the segment of keys that nobody sees, and
_BLIND = -2  # of queries that see nothing


def forward(args: Args, opts: Options) -> tuple[tuple[jax.Array, None], tuple]:
    """``((output, None), residuals)``: those of the kernel's own gradient."""
    if not _sees_any(args, opts):
        q, v = args.query, args.value
        return (frontend.zeros((*q.shape[:3], v.shape[3]), q.dtype, q), None), ()
    args = _cleared(args, opts)
    with _precision(args):
        output, pull = jax.vjp(lambda q, k, v: _computed(args, opts, q, k, v), *args[:3])
    return (output, None), tuple(jax.tree.leaves(pull))


def backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args`` from that of the output."""
    if not _sees_any(args, opts):
        return Args(*map(jnp.zeros_like, args[:3]))

    def pull(args: Args) -> Any:
        return jax.vjp(lambda q, k, v: _computed(args, opts, q, k, v), *args[:3])[1]

    with _precision(args):
        # Nothing is computed for its structure.
        structure = jax.tree.structure(jax.eval_shape(pull, args))
        return Args(*jax.tree.unflatten(structure, residuals)(grads[0]))


def _precision(args: Args) -> Any:
    """In which the kernel's products are: TPUs multiply bfloat16, of which six products are one of float32."""
    return jax.default_matmul_precision("highest" if args.query.dtype == jnp.float32 else "default")


def _sees_any(args: Args, opts: Options) -> bool:
    """Whether causality and window leave any query a key."""
    T, S = args.query.shape[1], args.key.shape[1]
    first = 1 - T if opts.left is None else max(1 - T, -opts.left)
    last = S - 1 if opts.right is None else min(S - 1, opts.right)
    return args.query.shape[0] > 0 and min(T, S) > 0 and first <= last


def _cleared(args: Args, opts: Options) -> Args:
    """``args`` with zeros in queries of padding and in keys that lengths, ids or causality hide from every query."""
    (T, S), own, other = (args.query.shape[1], args.key.shape[1]), args.query_segments, args.key_segments
    first = 0 if opts.left is None else max(-opts.left, 0)
    end = S if opts.right is None else min(T + opts.right, S)
    seen = ((jnp.arange(S) >= first) & (jnp.arange(S) < end))[None]
    if own is not None:
        args = args._replace(query=jnp.where((own >= 0)[..., None, None], args.query, 0))
        seen = seen & (other >= 0) & jax.vmap(jnp.isin)(other, own)
    elif (first, end) == (0, S):
        return args
    key, value = (jnp.where(seen[..., None, None], x, 0) for x in (args.key, args.value))
    return args._replace(key=key, value=value)


def _computed(args: Args, opts: Options, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """``[B, T, H, V]``."""
    (T, H), S = q.shape[1:3], k.shape[1]
    sizes = [min(cast(int, size), n + -n % _LANES) for size, n in ((opts.cfg.block_q, T), (opts.cfg.block_k, S))]
    rows, columns = (n + -n % size for n, size in zip((T, S), sizes, strict=True))
    q = (q.astype(jnp.float32) * opts.softmax_scale).astype(q.dtype)
    q, k, v = (frontend.pad(x, 1, n - x.shape[1]).swapaxes(1, 2)
               for x, n in ((q, rows), (k, columns), (v, columns)))
    window = opts.left, opts.right
    mask = masks.FullMask((rows, columns)) if window == (None, None) else masks.LocalMask((rows, columns), window, 0)
    block_q, block_k = sizes
    run = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * H), head_shards=1, q_seq_shards=1, attn_logits_soft_cap=opts.soft_cap,
        block_sizes=splash.BlockSizes(
            block_q=block_q, block_kv=block_k, block_kv_compute=block_k, block_q_dkv=block_q, block_kv_dkv=block_k,
            block_kv_dkv_compute=block_k, block_q_dq=block_q, block_kv_dq=block_k,
        ),
    )
    sinks, segments = jnp.full(H, _SINK, q.dtype), _segments(args, opts, rows, columns)
    output = jax.vmap(lambda q, k, v, segments: run(q, k, v, segments, sinks))(q, k, v, segments)
    return output[:, :, :T].swapaxes(1, 2)


def _segments(args: Args, opts: Options, rows: int, columns: int) -> splash.SegmentIds | None:
    """The segments of queries and keys up to whole blocks, with what hides padding; None: nothing is to be hidden."""
    (B, T), S = args.query.shape[:2], args.key.shape[1]
    own, other = args.query_segments, args.key_segments
    if own is None:
        if columns == S or (opts.right is not None and T - 1 + opts.right < S):
            return None
        own, other = (jnp.zeros((B, n), jnp.int32) for n in (T, S))
    own, other = jnp.where(own < 0, _BLIND, own), jnp.where(other < 0, _HIDDEN, other)
    ids = (jnp.pad(x, ((0, 0), (0, n - x.shape[1])), constant_values=_HIDDEN)
           for x, n in ((own, rows), (other, columns)))
    return splash.SegmentIds(*ids)


def unsupported(inv: Invocation) -> str | None:
    """Why JAX's kernel cannot run the call, or None."""
    dims, options, dtype = inv.dims, inv.options, inv.arrays["query"][0]
    if dtype not in _DTYPES:
        return f"takes bfloat16 and float32, whose products TPUs do; the call has {dtype}"
    if options["softmax_dtype"] == "float64":
        return "computes the softmax in float32, not in float64"
    if max(dims["K"], dims["V"]) > _DIM:
        return f"takes head dims up to {_DIM}; the call has K = {dims['K']}, V = {dims['V']}"
    for name, words in _ABSENT.items():
        if name in inv.arrays:
            return f"takes no {words}"
    for name in ("query_segments", "key_segments"):
        if (found := inv.arrays.get(name, ("int32",))[0]) != "int32":
            return f"takes segment ids of int32; the call has {found}"
    return None


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """Blocks of 512 tokens, or as many as there are: few steps, whose weights fit in fast memory."""
    return replace(cfg, block_q=512, block_k=512)


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Blocks of 256 to 1,024 tokens on either side, of float32 to 512: larger ones do not fit in fast memory."""
    sizes = (256, 512) if inv.arrays["query"][0] == "float32" else (256, 512, 1024)
    return [replace(cfg, block_q=q, block_k=k) for q in sizes for k in sizes]


attention = kernel(
    "pallas", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates,
    unsupported=unsupported, forms_weights=False, letters=lambda args, opts: (*axes(args, opts), None),
)
