"""The contract of the linear recurrence: arguments of every platform, and the results that it must return.

A platform module (``xla.py``, ``torch.py``, ``triton/passes.py``, ...) defines two functions that know this page only::

    forward(args: Args, opts: Options) -> ((output, final_state), residuals)
    backward(args: Args, residuals, (doutput, dfinal_state), opts: Options) -> Args of gradients

and hands them to :func:`kernels`, which makes of them the registered functions ``gla`` and ``lightning_attn``.
Residuals are a tuple. A final state that nobody asked for (``opts.state``) may be None, or is dropped, and its gradient
is None; so may residuals be that are not kept (``opts.kept``), as no gradient follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from keraunos import decay, frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.recurrent.contract import (
    check_states,
    described,
    described_heads,
    folded,
    implementation,
    most_heads,
    outputs,
    scale_of,
)
from keraunos.ops import checks
from keraunos.ops.arguments import FLOATS, Arguments
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.registry import Implementation, kernel_registry, public_name

# One decay per head, as it is given: an array, or numbers.
Decay: TypeAlias = "Array | list[float] | tuple[float, ...]"


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
    def tokens(self) -> tuple:
        """The arrays of tokens."""
        return self[:4]

    @property
    def heads(self) -> int:
        """H, the heads of the recurrence."""
        return most_heads(*self[:4])


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
    check.sizes["H"] = args.heads
    sizes = described_heads(check, ("query", "key", "value", "g"))
    check.shape("g_gamma", "H", "B, H", why="one decay per head")
    check_states(check, softmax_scale, state_v_first)
    return described(check, op_id, sizes, {"reverse": check.truth("reverse", reverse)})


def checker(op_id: str, args: Args, whole: bool = True) -> Callable[[Args], None] | None:
    """Make the check of the values of calls like this one; see :mod:`keraunos.ops.checks`.

    Args:
        whole: the tokens are those of whole sequences; else one of several shards of them.
    """
    gamma = "log_decay" if op_id == "lightning_attn" else "g_gamma"
    cu_seqlens = checks.offsets(args.query.shape[1] if whole else None)
    rules = {"g": checks.decay("g"), "g_gamma": checks.decay(gamma), "cu_seqlens": cu_seqlens}
    return checks.checker(public_name(op_id), rules, args)


def placed(function: str, cu_seqlens: Array | None, query: Array) -> Array | None:
    """NumPy offsets as a constant on the query's device; see :func:`checker` and :func:`checks.placed`."""
    return checks.placed(function, cu_seqlens, query, query.shape[1] if getattr(query, "ndim", 0) == 4 else None)


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
    gamma = args.g_gamma
    if gamma is not None:
        if args.cu_seqlens is not None:
            return None
        B, H = args.query.shape[1], max(x.shape[3] for x in args.tokens if x is not None)
        xp = frontends.of(args.query).xp
        gamma = gamma if gamma.ndim == 3 else xp.broadcast_to(gamma[:, None], (size, B, H))
        gamma = gamma.reshape(size * B, H)
    return Args(**folded(args, size), g_gamma=gamma)


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
    def options(args: Args, cfg: Config, state: bool, softmax_scale: float | None = None,
                reverse: bool = False) -> Options:
        constant = ("g_gamma",) if isinstance(args.g_gamma, np.ndarray) else ()
        return Options(scale_of(args, softmax_scale), bool(reverse), cfg, constant, state)

    gla, lightning_attn = (
        implementation(operator, options, platform, source, forward, backward, fields=fields, heuristic=heuristic,
                       candidates=candidates, unsupported=unsupported, has_vmap=has_vmap, segment=segment)
        for operator in OPERATORS.values()
    )
    return gla, lightning_attn
