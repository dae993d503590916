"""What every platform of the linear recurrence is given and what it must return.

A platform module (``xla.py``, ``torch.py``, ``triton/passes.py``, ...) defines two functions that know this page only::

    forward(args: Args, opts: Options) -> ((output, final_state), residuals)
    backward(args: Args, residuals, (doutput, dfinal_state), opts: Options) -> Args of gradients

and hands them to :func:`kernels`, which makes of them the registered functions ``gla`` and ``lightning_attn``.
Residuals are a tuple. A final state that nobody asked for (``opts.state``) may be None, or is dropped, and its gradient
is None; so may residuals be that are not kept (``opts.kept``), as no gradient follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from keraunos import decay, frontends
from keraunos.frontends.array_types import Array
from keraunos.ops import checks
from keraunos.ops.arguments import FLOATS, Arguments
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.registry import Implementation, kernel_registry, public_name

# One decay per head, as it is given: an array, or numbers.
Decay: TypeAlias = "Array | list[float] | tuple[float, ...]"
# What stands for sizes that are symbols of jax.export, where a configuration is chosen.
_USUAL = {"B": 8, "T": 4096}


class Args(NamedTuple):
    """The arrays of one call; absent ones are ``None``.

    The recurrence has H heads, the most that query, key, value or g has. Head h reads head ``h // (H // n)`` of an
    array with n heads; n divides H.
    """

    query: Any  # [B, T, heads, K]
    key: Any  # [B, T, heads, K]
    value: Any  # [B, T, heads, V]
    g: Any = None  # [B, T, heads, K] or [B, T, heads], log, <= 0
    g_gamma: Any = None  # [H] or [B, H], log, <= 0
    initial_state: Any = None  # [N, H, K, V]
    cu_seqlens: Any = None  # [N + 1], int

    @property
    def heads(self) -> int:
        """H, the heads of the recurrence."""
        return most_heads(*self[:4])


def most_heads(*arrays: object) -> int:
    """The most heads that any of some arrays ``[B, T, heads, ...]`` has; what is no such array has none."""
    most = 0
    for x in arrays:
        shape: tuple[int, ...] = getattr(x, "shape", ())
        if len(shape) > 2 and shape[2] > most:
            most = shape[2]
    return most or 1


def head_counts(dims: Mapping[str, int]) -> dict[str, int]:
    """The heads of each array by the sizes of an invocation.

    H: those of the recurrence; G: the key's. HQ: the query's, where they are not H; HV: the value's, where they are
    not G; HG: those of g, where they are not H.
    """
    H, G = dims["H"], dims["G"]
    return {"query": dims.get("HQ", H), "key": G, "value": dims.get("HV", G), "g": dims.get("HG", H)}


def head_sizes(heads: Mapping[str, int], H: int) -> dict[str, int]:
    """Of the sizes of an invocation those that :func:`head_counts` says are only there where they are not as usual."""
    usual = {"HQ": ("query", H), "HV": ("value", heads["key"]), "HG": ("g", H)}
    return {letters: heads[name] for letters, (name, n) in usual.items() if heads.get(name, n) != n}


class Options(NamedTuple):
    """The compile-time part of one call; hashable."""

    softmax_scale: float
    reverse: bool
    cfg: Config  # complete: every field that the platform reads has a value
    constant: tuple[str, ...] = ()  # the arrays that no gradient is wanted of: it may be None, or be made all the same
    state: bool = True  # the final state is wanted
    kept: bool = True  # the residuals are
    started: bool = False  # in place of the initial state, and of the final one's gradient, those of every segment

    def needs(self, args: Args, name: str) -> bool:
        """Whether the array is there and a gradient of it is wanted."""
        return getattr(args, name) is not None and name not in self.constant


_DTYPES = dict.fromkeys(Args._fields, FLOATS) | {"cu_seqlens": checks.OFFSETS}


def describe(
    op_id: str, args: Args, softmax_scale: float | None = None, reverse: bool = False, state_v_first: bool = False
) -> Invocation:
    """Check the arguments of one call and describe it. Looks at shapes and dtypes, never at values on a device.

    ``state_v_first``: the initial state is ``[N, H, V, K]``.

    Raises:
        TypeError: an argument is no array of the query's framework, or has a wrong dtype.
        ValueError: a shape does not fit.
    """

    check = Arguments(
        public_name(op_id), args, ("query", "key", "value"), _DTYPES, constants=("g_gamma",),
        names={"g_gamma": "log_decay"} if op_id == "lightning_attn" else {},
    )
    check.shape("query", "B, T, H, K")
    check.shape("key", "B, T, heads, K", why="like query")
    check.shape("value", "B, T, heads, V", why="like query")
    check.shape("g", "B, T, heads, K", "B, T, heads", why="like query")
    sizes = check.sizes
    heads = {name: x.shape[2] for name, x in zip(Args._fields, args[:4], strict=False) if x is not None}
    sizes["H"] = H = args.heads
    for name, n in heads.items():
        check.shared_heads(name, n, "the most that query, key, value or g has")
    K, V = sizes["K"], sizes["V"]
    if min(K, V) < 1:
        check.fail(ValueError, "query", f"has K = {K}, and value V = {V}", "sizes of at least 1")
    check.shape("g_gamma", "H", "B, H", why="one decay per head")
    check.sequences()
    state = "N, H, V, K" if check.truth("state_v_first", state_v_first) else "N, H, K, V"
    check.shape("initial_state", state, why="one state per sequence and head")
    check.number("softmax_scale", softmax_scale, why="to learn it, scale the query")
    reverse = check.truth("reverse", reverse)
    sizes["G"] = heads["key"]
    given, length = [sizes[letter] for letter in "BTHGKVN"], check.frontend.length
    dims = {letter: length(sizes[letter], _USUAL.get(letter)) for letter in "BTHGKV"}
    dims["N"] = dims["B"] if args.cu_seqlens is None else length(sizes["N"])
    return check.invocation(op_id, dims | head_sizes(heads, H), "BTN", options={"reverse": reverse},
                            symbolic=any(map(check.frontend.is_symbol, given)))


def checker(op_id: str, args: Args, whole: bool = True) -> Callable[[Args], None] | None:
    """What checks values of calls like this one; see :mod:`keraunos.ops.checks`.

    Args:
        whole: the tokens are those of whole sequences; else one of several shards of them.
    """
    gamma = "log_decay" if op_id == "lightning_attn" else "g_gamma"
    cu_seqlens = checks.offsets(args.query.shape[1] if whole else None)
    rules = {"g": checks.decay("g"), "g_gamma": checks.decay(gamma), "cu_seqlens": cu_seqlens}
    return checks.checker(public_name(op_id), rules, args)


def placed(function: str, cu_seqlens: Array | None, query: Array, whole: bool = True) -> Array | None:
    """NumPy offsets as a constant on the query's device; see :func:`checker` and :func:`values.placed`."""
    return checks.placed(
        function, cu_seqlens, query, query.shape[1] if whole and getattr(query, "ndim", 0) == 4 else None
    )


def outputs(args: Args, opts: Options) -> tuple[tuple[tuple[int, ...], str] | None, ...]:
    """The shapes and dtypes of the output and of the final state, None if it is not wanted."""
    dtype = _dtype(frontends.of(args.query), args.query)
    output = *args.query.shape[:2], args.heads, args.value.shape[-1]
    return (output, dtype), state_spec(args) if opts.state else None


def state_spec(args: Args) -> tuple[tuple[int, ...], str]:
    """The shape and dtype of the final state."""
    (B, _, _, K), H, V = args.query.shape, args.heads, args.value.shape[-1]
    N = B if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    dtype = _dtype(frontends.of(args.query), args.query)
    return (N, H, K, V), "float64" if dtype == "float64" else "float32"


def flops(args: Args) -> tuple[int, int]:
    """The floating point operations of a call with arrays of these shapes, forward and backward.

    Those of the recurrence, whatever a platform does: two products of K x V values for each token and head, to change
    the state and to read it; backward five, of which one makes the states again. That is how Megatron-LM counts layers
    with states, and the backward how PyTorch counts ``scaled_dot_product_attention``.
    """
    (B, T, _, K), V = args.query, args.value[-1]
    product = 2 * B * T * max(x[2] for x in args[:4] if x is not None) * K * V
    return 2 * product, 5 * product


def fold(args: Args, size: int) -> Args | None:
    """``size`` calls at once, their arrays stacked along a new first axis, as one call with a larger batch.

    Packed sequences are joined to one longer row. What belongs to tokens or states keeps its order in memory. A decay
    per call comes back as one per sequence of the batch; None: packed sequences share theirs, so calls with decays of
    their own cannot be one.
    """
    query, cu_seqlens, gamma = args.query, args.cu_seqlens, args.g_gamma
    packed = cu_seqlens is not None
    if packed and gamma is not None:
        return None
    frontend = frontends.of(query)

    def joined(x: Array | None, axis: int) -> Array | None:
        return x if x is None else x.reshape(*x.shape[1:axis], size * x.shape[axis], *x.shape[axis + 1 :])

    if gamma is not None:
        B, H = query.shape[1], max(x.shape[3] for x in args[:4] if x is not None)
        gamma = gamma if gamma.ndim == 3 else frontend.xp.broadcast_to(gamma[:, None], (size, B, H))
        gamma = gamma.reshape(size * B, H)
    if packed:
        # Each call's sequences start where the tokens of those before it end.
        calls = frontend.cast(frontend.numbers(size, cu_seqlens), frontend.dtype_name(cu_seqlens))
        cu_seqlens = cu_seqlens + calls[:, None] * query.shape[2]
        cu_seqlens = frontend.xp.concatenate([cu_seqlens[0], cu_seqlens[1:, 1:].reshape(-1)])
    query, key, value, g = (joined(x, 2 if packed else 1) for x in args[:4])
    return Args(query, key, value, g, gamma, joined(args.initial_state, 1), cu_seqlens)


def axes(args: Args, opts: Options) -> tuple[Args, tuple[str, str | None], None]:
    """What may be sharded among devices: batch and heads; of packed sequences, which lie in one row, heads.

    See :func:`keraunos.frontends.jax.partition.partitioned`.
    """
    b = "." if args.cu_seqlens is not None else "b"
    gamma = None if args.g_gamma is None else "bh"[-args.g_gamma.ndim :]
    gate = None if args.g is None else f"{b}.h."[: args.g.ndim]
    letters = Args(f"{b}.h.", f"{b}.h.", f"{b}.h.", gate, gamma, f"{b}h..", ".")
    return letters, (f"{b}.h.", f"{b}h.." if opts.state else None), None


def _without_state(forward: Callable) -> Callable:
    """``forward``, which gives None in place of a final state that is not wanted."""

    @functools.wraps(forward)
    def run_forward(args: Args, opts: Options) -> tuple[tuple[Array, Array | None], Any]:
        (output, state), residuals = forward(args, opts)
        return (output, state if opts.state else None), residuals

    return run_forward


def _dtype(frontend: ModuleType, x: Array) -> str:
    return x.dtype.name if isinstance(x, np.ndarray) else frontend.dtype_name(x)


def constant_decay(op_id: str, query: Array, num_heads: int, layer_idx: int | Array | None, num_layers: int | None,
                   log_decay: Decay | None) -> Array | None:
    """Lightning's decay per head: ``log_decay``, or the formula for a layer as a NumPy array.

    Raises:
        ValueError: both or neither are given, or the layer is out of range.
        TypeError: ``layer_idx`` or ``num_layers`` is no integer, or ``log_decay`` no numbers.
    """
    if log_decay is None:
        if layer_idx is None or num_layers is None:
            raise ValueError(f"{op_id}: expected layer_idx and num_layers, or log_decay; got neither pair nor decay")
        if isinstance(layer_idx, int) and isinstance(num_layers, int):
            # A number, also where the compiler leaves sizes open: the decay is a constant of its graph.
            return _remembered_layer(op_id, int(num_heads), layer_idx, num_layers)
        return _layer(op_id, num_heads, layer_idx, num_layers)
    if layer_idx is not None or num_layers is not None:
        raise ValueError(f"{op_id}: got log_decay and layer_idx or num_layers; expected one or the other")
    return per_head(op_id, query, "log_decay", log_decay)


def _layer(op_id: str, num_heads: int, layer_idx: int | Array, num_layers: int) -> Array:
    decay.check(op_id, num_heads, layer_idx, num_layers)
    return decay.lightning(num_heads, layer_idx, num_layers)


# By type too: what equals a layer, such as True, is none, and has to reach the check.
_remembered_layer = functools.lru_cache(maxsize=1024, typed=True)(_layer)


def per_head(function: str, query: Array, argument: str, x: Decay | None) -> Array | None:
    """A decay per head: an array of a framework as it is, numbers as a NumPy array for this query, None as None.

    Raises:
        TypeError: it is none of these.
    """
    # Numbers first: they are slow to be told from arrays.
    if x is None or (not isinstance(x, list | tuple | float | np.ndarray) and frontends.framework_of(x)):
        return x
    try:
        return np.asarray(x, np.float64 if str(getattr(query, "dtype", "")).endswith("float64") else np.float32)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: {argument} is {x!r}; expected an array or numbers, one per head") from None


def _check(op_id: str) -> Callable[[Args, Options], None]:
    def check(args: Args, opts: Options) -> None:
        kernel_registry.require(describe(op_id, args, opts.softmax_scale, opts.reverse), opts.cfg)

    return check


def _operator(op_id: str, fields: tuple[str, ...]) -> frontends.Operator:
    return frontends.Operator(
        op_id, Args, fields, frozenset(("query", "key", "value")), Options,
        ("softmax_scale", "reverse", "cfg", "constant", "state", "kept"),
        passes=functools.partial(kernel_registry.passes, op_id), check=_check(op_id), flops=flops, outputs=outputs,
        fold=fold, gradients=tuple(x for x in fields if x != "cu_seqlens"),
        function=public_name(op_id),
    )


OPERATORS = {
    "gla": _operator("gla", Args._fields),
    "lightning_attn": _operator("lightning_attn", tuple(x for x in Args._fields if x != "g")),
}


def kernels(
    platform: str,
    source: str,
    forward: Callable,
    backward: Callable,
    *,
    fields: tuple[str, ...],
    heuristic: Callable,
    candidates: Callable,
    unsupported: Callable = lambda inv: None,
    has_vmap: bool = False,
    segment: Callable = lambda args, opts: None,
) -> tuple[Implementation, Implementation]:
    """The implementations ``(gla, lightning_attn)`` that a platform module registers.

    Args:
        platform: the name that it registers them under.
        source: the module's ``__file__``.
        forward, backward: as at the top of this page.
        fields, heuristic, candidates, unsupported: see :class:`Implementation`.
        segment: see :class:`Implementation`; who cuts sequences also takes ``opts.started``.
        has_vmap: all that it does JAX can batch and XLA can partition, and batch and length may be symbols of
            ``jax.export``; without, calls under ``vmap`` are folded into one, and shared out among devices as
            :func:`axes` says.
    """
    folding = None if has_vmap else (fold, frontends.unfold)
    both = _without_state(forward), backward
    made = {
        op_id: frontends.differentiable(*both, operator, platform, folding, axes)
        for op_id, operator in OPERATORS.items()
    }

    def refused(inv: Invocation) -> str | None:
        if inv.symbolic and not has_vmap:
            return "takes no sizes that are symbols of jax.export: export each size, or with platform='xla'"
        return unsupported(inv)

    def passes(framework: str) -> tuple[Callable, ...]:
        return frontends.get("jax").batched(*both, *folding) if framework == "jax" and folding else both

    def prepare(op_id: str, args: Args, softmax_scale: float | None = None, reverse: bool = False, *,
                cfg: Config, return_state: bool = True) -> Callable[[Args], tuple]:
        scale = float(args.query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        constant = ("g_gamma",) if isinstance(args.g_gamma, np.ndarray) else ()
        opts = Options(scale, bool(reverse), cfg, constant, return_state)
        return made[op_id](frontends.framework_of(args.query), opts, args)

    gla, lightning_attn = (
        Implementation(op_id, functools.partial(prepare, op_id), fields, refused, heuristic, candidates, source=source,
                       passes=passes, segment=segment)
        for op_id in OPERATORS
    )
    return gla, lightning_attn
