"""The contract of softmax attention: arguments of every platform, results that it must return, checks of a call.

A platform module defines one or both of these, which know this page only, and hands them to :func:`kernel`::

    forward(args: Args, opts: Options) -> ((output, None), residuals)
    backward(args: Args, residuals, (doutput, None), opts: Options) -> Args of gradients

    compute(args: Args, opts: Options) -> None, or what takes these and gives (output, weights or None)

The framework differentiates the results of ``compute``; None: forward and backward do the call. For each query, with
every step in at least ``softmax_dtype``::

    x_s = soft_cap * tanh(softmax_scale * q . k_s / soft_cap) + bias_s      -inf where the key is not visible
    p_s = exp(x_s) / (sum_s exp(x_s) + sum_n exp(sinks_n))                  0 where no key is visible and no sink there
    o   = sum_s keep_s / (1 - dropout) p_s v_s

Query t sees keys ``t - left`` to ``t + right``, plus its row's offset where there are offsets: causality, window and an
offset that is known beforehand are all in these two numbers (:func:`sides`), either of which may be negative.

For sequences in shards (``keraunos.distributed``), a module also has what parts of the keys are merged with::

    part(args, opts)                                          -> (output, top, total)
    part_gradients(args, (output, top, total), doutput, opts) -> gradients of query, key and value, as Args

A query's sum over the part's keys is ``exp(top) total``, both ``[B, H, T]``, top being inf where it sees none: the log
of the sum would have fewer digits. ``part_gradients`` is given the output and the sum of all keys. No bias, sinks,
mask, dropout or offset comes; ``opts.left`` and ``opts.right`` count from the part's first key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from keraunos import frontends
from keraunos.frontends.array_types import Array, ArrayT
from keraunos.frontends.gradients import Differentiable
from keraunos.ops.arguments import FLOATS, INTEGERS, Arguments
from keraunos.ops.invocation import Config, Invocation, UnsupportedError, is_number
from keraunos.ops.registry import Implementation, kernel_registry


class Args(NamedTuple):
    """The arrays of one call; absent ones are ``None``. Heads of bias, mask and sinks: 1, G or H."""

    query: Any  # [B, T, H, K]
    key: Any  # [B, S, G, K]
    value: Any  # [B, S, G, V]
    bias: Any = None  # [1 or B, heads, T, S]
    sinks: Any = None  # [n] or [heads, n]
    mask: Any = None  # [1 or B, heads, T, S], bool
    query_segments: Any = None  # [B, T], int; below 0: padding
    key_segments: Any = None  # [B, S], int
    seed: Any = None  # [2], int: what the dropout follows from
    query_offset: Any = None  # [B], int: the place of each row's first query among the keys


class Options(NamedTuple):
    """The compile-time part of one call; hashable."""

    softmax_scale: float
    soft_cap: float | None
    left: int | None  # how far before its place a query sees keys; None: all
    right: int | None  # and after
    dropout: float
    softmax_dtype: str
    return_weights: bool
    cfg: Config  # complete: every field that the platform reads has a value
    constant: tuple[str, ...] = ()  # the arrays that no gradient is wanted of: it may be None, or be made all the same

    def needs(self, args: Args, name: str) -> bool:
        """Whether the array is there and a gradient of it is wanted."""
        return getattr(args, name) is not None and name not in self.constant


NO_WEIGHTS = "never forms the weights; return_weights needs xla or torch"
# What is as far away is out of reach: no sequence is as long, and places and this can be added in 32 bits.
FAR = 1 << 30


def sides(causal: bool, window: tuple[int, int] | None, shift: int = 0) -> tuple[int | None, int | None]:
    """``(left, right)`` of :class:`Options`, for queries of which the first has the place ``shift`` among the keys."""
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)

    def moved(reach: int | None, by: int) -> int | None:
        if reach is None or reach >= FAR or reach + by >= FAR:
            return None
        return max(reach + by, -FAR)

    return moved(left, -shift), moved(right, shift)


_DTYPES = (
    dict.fromkeys(Args._fields, FLOATS)
    | dict.fromkeys(("query_segments", "key_segments", "seed", "query_offset"), INTEGERS)
    | {"mask": ("bool",)}
)


def describe(args: Args, *, softmax_scale: float | None = None, soft_cap: float | None = None, causal: bool = False,
             window: tuple[int, int] | None = None, shift: int = 0, dropout: float = 0.0,
             softmax_dtype: str = "float32", return_weights: bool = False) -> Invocation:
    """Check the arguments of one call and describe it. Looks at shapes and dtypes, never at values on a device.

    Raises:
        TypeError: an argument is no array of the query's framework, or has a wrong dtype.
        ValueError: a shape or a number does not fit.
    """

    check = Arguments("attention", args, ("query", "key", "value"), _DTYPES, names={"sinks": "softmax_aux"})
    check.shape("query", "B, T, H, K")
    check.shape("key", "B, S, G, K", why="like query")
    check.shape("value", "B, S, G, V", why="like key")
    B, T, S, H, G, K, V = (check.sizes[letter] for letter in "BTSHGKV")
    if min(H, G, K, V) < 1:
        check.fail(ValueError, "query", f"has H = {H}, G = {G}, K = {K}, V = {V}", "sizes of at least 1")
    if H % G:
        check.fail(ValueError, "key", f"has G = {G} heads", f"a divisor of H = {H}", "query heads share them evenly")
    check.shape("bias", "1 or B, 1 or G or H, T, S")
    check.shape("mask", "1 or B, 1 or G or H, T, S")
    check.shape("sinks", "sinks", "1 or G or H, sinks")
    if args.sinks is not None and tuple(args.sinks.shape) == (H,) != (1,):
        # Models with one sink for each head hold them so, and would silently get something else.
        wanted = f"[H, 1] = {(H, 1)} for one sink of each head, or [1, sinks] = {(1, H)} for sinks that all heads share"
        check.fail(ValueError, "sinks", f"has shape {(H,)}, as many sinks as heads", wanted)
    if (args.query_segments is None) != (args.key_segments is None):
        check.fail(ValueError, "segments", "are given for one side", "ids of queries and of keys")
    check.shape("query_segments", "B, T", wanted=f"{(B, T)}")
    check.shape("key_segments", "B, S", wanted=f"{(B, S)}")
    check.shape("query_offset", "B", wanted=f"an int, or [B] = ({B},)")
    check.number("softmax_scale", softmax_scale)
    check.number("logits_soft_cap", soft_cap, positive=True)
    if not (is_number(dropout) and 0 <= dropout < 1):
        check.fail(ValueError, "dropout_prob", f"is {dropout!r}", "a number from 0 to less than 1")
    if dropout and args.seed is None:
        check.fail(ValueError, "dropout_rng", "is None", "a key or generator", "dropout_prob is above 0")
    causal, return_weights = check.truth("causal", causal), check.truth("return_weights", return_weights)
    if softmax_dtype not in FLOATS:
        check.fail(TypeError, "softmax_dtype", f"is {softmax_dtype}", " or ".join(FLOATS))
    # Of numbers that may change from call to call only what the choice depends on.
    options = {"causal": causal, "window": window, "shifted": bool(shift), "soft_cap": soft_cap is not None,
               "dropout": bool(dropout), "softmax_dtype": softmax_dtype, "return_weights": return_weights,
               "positive_scale": softmax_scale is None or softmax_scale > 0}
    dims = dict(zip("BTSHGKV", map(check.frontend.length, (B, T, S, H, G, K, V)), strict=True))
    return check.invocation("attention", dims, "BTS", options=options)


def traits(opts: Options) -> dict[str, Any]:
    """The options as :func:`describe` gives them, for :func:`is_for_libraries`."""
    causal = opts.left is None and opts.right == 0
    return {**opts._asdict(), "causal": causal, "window": not causal and (opts.left, opts.right) != (None, None),
            "shifted": False, "positive_scale": opts.softmax_scale > 0}


def is_for_libraries(arrays: Iterable[str], dtype: str, dims: Mapping[str, int], options: Mapping[str, Any]) -> bool:
    """Whether a vendor's kernel computes just this call, and nothing is faster: plain and causal ones in 16 bits.

    With a scale of 0 or below PyTorch's kernels are wrong where keys are hidden: they scale the -inf of these.

    Args:
        arrays: the names of those that are given; dtype: of query, key and value; dims: T, S, K and V.
        options: of the call, as :func:`describe` has them.
    """
    return (
        set(arrays) == {"query", "key", "value"}
        and not any(options[name] for name in ("window", "shifted", "soft_cap", "dropout", "return_weights"))
        and options["positive_scale"]
        and options["softmax_dtype"] == "float32"
        and dtype in ("bfloat16", "float16")
        and dims["K"] == dims["V"] <= 128
        and dims["K"] % 8 == 0
        and min(dims["T"], dims["S"]) > 0
        and (dims["T"] == dims["S"] or not options["causal"])
    )


def not_for_libraries(inv: Invocation) -> str | None:
    """Why a call is not :func:`is_for_libraries`, or None."""
    if is_for_libraries(inv.arrays, inv.arrays["query"][0], inv.dims, inv.options):
        return None
    return "the vendor's kernels take plain and causal calls in 16 bits, positive scales and head dims up to 128"


def over_groups(x: ArrayT, G: int) -> ArrayT:
    """``[B, heads, ...] -> [B, G or 1, H // G or 1, ...]``: the heads next to the keys that they read."""
    n = x.shape[1]
    groups, each = (n, 1) if n in (1, G) else (G, n // G)
    return x.reshape(x.shape[0], groups, each, *x.shape[2:])


def sinks_of(sinks: ArrayT, G: int) -> ArrayT:
    """``[1, G or 1, H // G or 1, n]``."""
    return over_groups(sinks.reshape(1, *((1,) * (2 - sinks.ndim)), *sinks.shape), G)


def keeps(seed: ArrayT, head: ArrayT, t: ArrayT, s: ArrayT, dropout: float) -> ArrayT:
    """Which weights the dropout keeps: a hash of their place, so that nothing is stored and all platforms agree.

    Args:
        seed: two integers; head: ``b * H + h``; t, s: the query's and the key's place. Arrays that broadcast, of 32
            bits unsigned or of 64 bits, below 2**32.
        dropout: the probability of 0.
    """
    row = _mixed(_mixed(seed[0] + head) ^ _mixed(seed[1] + t))
    return _mixed(row ^ _mixed(s + 0x1E3779B9)) >> 1 >= min(round(dropout * 2**31), 2**31 - 1)


def _mixed(x: ArrayT) -> ArrayT:
    """A permutation of the numbers of 32 bits, every bit of which depends on all."""
    x = _low(x)
    x = _low((x ^ (x >> 16)) * 0x21F0AAAD)
    x = _low((x ^ (x >> 15)) * 0x735A2D97)
    return x ^ (x >> 15)


def _low(x: ArrayT) -> ArrayT:
    return x & 0xFFFFFFFF if x.dtype.itemsize > 4 else x


def axes(args: Args, opts: Options) -> tuple[Args, str]:
    """The axes that JAX may shard over devices: batch and heads, but none with dropout, which counts them.

    See :func:`keraunos.frontends.jax.partition.partitioned`.
    """
    b, h = ".." if opts.dropout else "bh"
    B, H, G = args.query.shape[0], args.query.shape[2], args.key.shape[2]

    def heads(n: int) -> str:
        return h if n in (H, G) else "."

    def plane(x: Array | None) -> str | None:
        return None if x is None else (b if x.shape[0] == B else ".") + heads(x.shape[1]) + ".."

    sinks = None if args.sinks is None else "." if args.sinks.ndim == 1 else heads(args.sinks.shape[0]) + "."
    rows, ids = f"{b}.{h}.", f"{b}."
    return Args(rows, rows, rows, plane(args.bias), sinks, plane(args.mask), ids, ids, ".", b), rows


def blocks(args: Args, opts: Options, block_q: int, block_k: int) -> list[range]:
    """For each block of queries, the blocks of keys of which it may see any: all, where only a device has offsets."""
    T, S = args.query.shape[1], args.key.shape[1]
    left, right = (opts.left, opts.right) if args.query_offset is None else (None, None)
    found = []
    for first in range(0, T, block_q):
        last = min(first + block_q, T) - 1
        low = 0 if left is None else max(0, first - left)
        high = S - 1 if right is None else min(S - 1, last + right)
        found.append(range(low // block_k, high // block_k + 1) if low <= high else range(0))
    return found


def outputs(args: Args, opts: Options) -> tuple[tuple[tuple[int, ...], str] | None, ...]:
    """The shape and dtype of the output, and None for the weights, which no operator gives."""
    dtype = frontends.of(args.query).dtype_name(args.query)
    return ((*args.query.shape[:3], args.value.shape[3]), dtype), None


def flops(args: Args) -> tuple[int, int]:
    """The floating point operations of a call with arrays of these shapes, forward and backward.

    As PyTorch counts ``scaled_dot_product_attention``: all pairs of a query and a key, hidden ones too; two products
    forward, five backward, of which one makes the logits again.
    """
    (B, T, H, K), (S, V) = args.query, (args.value[1], args.value[3])
    pairs = 2 * B * H * T * S
    return pairs * (K + V), pairs * (3 * K + 2 * V)


def _check(args: Args, opts: Options) -> None:
    names = ("softmax_scale", "soft_cap", "dropout", "softmax_dtype")
    inv = describe(args, **{name: getattr(opts, name) for name in names})
    for name in ("left", "right"):
        if not -FAR <= (getattr(opts, name) or 0) <= FAR:
            raise ValueError(f"attention: {name} is {getattr(opts, name)}; expected {-FAR} to {FAR}, or None")
    kernel_registry.require(inv, opts.cfg)


def fold(args: Args, size: int) -> Args | None:
    """``size`` calls at once, stacked along a new first axis, as one call with a larger batch.

    None: sinks have no batch, and what the dropout leaves out follows from the place in it.
    """
    if args.sinks is not None or args.seed is not None:
        return None
    B = args.query.shape[1]
    xp = frontends.of(args.query).xp

    def joined(x: Array | None) -> Array | None:
        if x is None:
            return None
        x = xp.broadcast_to(x, (size, B, *x.shape[2:])) if x.shape[1] < B else x
        return x.reshape(-1, *x.shape[2:])

    return Args(*map(joined, args))


_GRADIENTS = ("query", "key", "value", "bias", "sinks")
OPERATOR = frontends.Operator(
    "attention", Args, Args._fields, frozenset(("query", "key", "value")), Options,
    ("softmax_scale", "soft_cap", "left", "right", "dropout", "softmax_dtype", "cfg", "constant"),
    passes=functools.partial(kernel_registry.passes, "attention"), check=_check, flops=flops, outputs=outputs,
    fold=fold, gradients=_GRADIENTS, fixed={"return_weights": False}, function="attention",
)


def kernel(platform: str, source: str, forward: Callable | None = None, backward: Callable | None = None, *,
           compute: Callable[[Args, Options], Any] = lambda args, opts: None, fields: tuple[str, ...],
           heuristic: Callable, candidates: Callable, unsupported: Callable = lambda inv: None,
           forms_weights: bool = True, letters: Callable = axes) -> Implementation:
    """The implementation that a platform module registers; see :class:`Implementation`.

    Args:
        platform: the name that it registers it under.
        source: the module's ``__file__``.
        forward, backward, compute: as at the top of this page.
        fields, heuristic, candidates, unsupported: see :class:`Implementation`.
        forms_weights: it can return them.
        letters: :func:`axes`, with those of the residuals.
    """
    made, passes = None, None
    if forward and backward:
        made = Differentiable(forward, backward, OPERATOR, platform, (fold, frontends.unfold), letters)
        passes = forward, backward

    def prepare(args: Args, *, cfg: Config, softmax_scale: float | None = None, soft_cap: float | None = None,
                causal: bool = False, window: tuple[int, int] | None = None, shift: int = 0, dropout: float = 0.0,
                softmax_dtype: str = "float32", return_weights: bool = False) -> Callable:
        if return_weights and not forms_weights:
            raise UnsupportedError(f"attention: {NO_WEIGHTS}")
        scale = float(args.query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        cap = None if soft_cap is None else float(soft_cap)
        left, right = sides(causal, window, shift)
        opts = Options(scale, cap, left, right, float(dropout), softmax_dtype, return_weights, cfg)
        if (run := compute(args, opts)) or made is None:
            return lambda args: run(args, opts)
        return made.prepare(opts, args)

    def refused(inv: Invocation) -> str | None:
        return NO_WEIGHTS if inv.options["return_weights"] and not forms_weights else unsupported(inv)

    return Implementation("attention", prepare, fields, refused, heuristic, candidates, source=source,
                          defaults={"return_weights": forms_weights},
                          passes=passes and (lambda framework: passes))
