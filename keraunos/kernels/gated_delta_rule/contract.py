"""The contract of the gated delta rule: arguments of every platform, and the results that it must return.

A platform module (``xla.py``, ``torch.py``) defines two functions that know this page only::

    forward(args: Args, opts: Options) -> ((output, final_state), residuals)
    backward(args: Args, residuals, (doutput, dfinal_state), opts: Options) -> Args of gradients

and hands them to :func:`kernel`, which makes the registered function of them. Residuals are a tuple. A final state that
nobody asked for (``opts.state``) may be None, or is dropped, and its gradient is None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from keraunos import frontends
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
from keraunos.ops.registry import Implementation, kernel_registry

_NAME = "gated_delta_rule"


class Args(NamedTuple):
    """The arrays of one call; absent ones are ``None``.

    The recurrence has H heads, the most that any of the first five has. Head h reads head ``h // (H // n)`` of an array
    with n heads; n divides H.
    """

    query: Any  # [B, T, heads, K]
    key: Any  # [B, T, heads, K]
    value: Any  # [B, T, heads, V]
    g: Any = None  # [B, T, heads, K] or [B, T, heads], log, <= 0
    beta: Any = None  # [B, T, heads]
    initial_state: Any = None  # [N, H, K, V]
    cu_seqlens: Any = None  # [N + 1], int

    @property
    def tokens(self) -> tuple:
        """The arrays of tokens."""
        return self[:5]

    @property
    def heads(self) -> int:
        """H, the heads of the recurrence."""
        return most_heads(*self[:5])


class Options(NamedTuple):
    """The compile-time part of one call; hashable."""

    softmax_scale: float
    reverse: bool
    use_qk_l2norm: bool
    cfg: Config  # complete: every field that the platform reads has a value
    constant: tuple[str, ...] = ()  # the arrays that no gradient is wanted of: it may be None, or be made all the same
    state: bool = True  # the final state is wanted
    kept: bool = True  # the residuals are

    def needs(self, args: Args, name: str) -> bool:
        """Whether the array is there and a gradient of it is wanted."""
        return getattr(args, name) is not None and name not in self.constant


_DTYPES = dict.fromkeys(Args._fields, FLOATS) | {"cu_seqlens": checks.OFFSETS}


def describe(args: Args, softmax_scale: float | None = None, use_qk_l2norm: bool = False, reverse: bool = False,
             state_v_first: bool = False) -> Invocation:
    """Check the arguments of one call and describe it. Looks at shapes and dtypes, never at values on a device.

    ``state_v_first``: the initial state is ``[N, H, V, K]``.

    Raises:
        TypeError: an argument is no array of the query's framework, or has a wrong dtype.
        ValueError: a shape does not fit.
    """
    check = Arguments(_NAME, args, ("query", "key", "value"), _DTYPES)
    check.shape("query", "B, T, H, K")
    check.shape("key", "B, T, heads, K", why="like query")
    check.shape("value", "B, T, heads, V", why="like query")
    check.shape("g", "B, T, heads, K", "B, T, heads", why="like query")
    check.shape("beta", "B, T, heads", why="like query")
    check.sizes["H"] = args.heads
    sizes = described_heads(check, ("query", "key", "value", "g", "beta"))
    check_states(check, softmax_scale, state_v_first)
    flags = {"use_qk_l2norm": use_qk_l2norm, "reverse": reverse}
    return described(check, _NAME, sizes, {name: check.truth(name, flag) for name, flag in flags.items()})


def checker(args: Args, whole: bool = True) -> Callable[[Args], None] | None:
    """Make the check of the values of calls like this one; see :mod:`keraunos.ops.checks`.

    Args:
        whole: the tokens are those of whole sequences; else one of several shards of them.
    """
    rules = {"g": checks.decay("g"), "cu_seqlens": checks.offsets(args.query.shape[1] if whole else None)}
    return checks.checker(_NAME, rules, args)


def flops(args: Args) -> tuple[int, int]:
    """The floating point operations of a call with arrays of these shapes, forward and backward.

    Those of the recurrence, whatever a platform does: three products of K x V values for each token and head, to read
    the error, to change the state and to read it; backward eight, of which two make the states again.
    """
    (B, T, _, K), V = args.query, args.value[-1]
    product = 2 * B * T * max(x[2] for x in args[:5] if x is not None) * K * V
    return 3 * product, 8 * product


def fold(args: Args, size: int) -> Args:
    """``size`` calls at once as one; see :func:`recurrent.contract.folded`."""
    return Args(**folded(args, size))


def _check(args: Args, opts: Options) -> None:
    inv = describe(args, opts.softmax_scale, opts.use_qk_l2norm, opts.reverse)
    kernel_registry.require(inv, opts.cfg)


OPERATOR = frontends.Operator(
    _NAME, Args, Args._fields, frozenset(("query", "key", "value")), Options,
    ("softmax_scale", "reverse", "use_qk_l2norm", "cfg", "constant", "state", "kept"),
    passes=functools.partial(kernel_registry.passes, _NAME), check=_check, flops=flops, outputs=outputs,
    fold=fold, gradients=tuple(x for x in Args._fields if x != "cu_seqlens"), function=_NAME,
)


def kernel(
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
) -> Implementation:
    """The implementation that a platform module registers; see :class:`Implementation`.

    Args:
        platform: the name that it registers it under.
        source: the module's ``__file__``.
        forward, backward: as at the top of this page.
        fields, heuristic, candidates, unsupported: see :class:`Implementation`.
        has_vmap: all that it does JAX can batch and XLA can partition, and batch and length may be symbols of
            ``jax.export``; without, calls under ``vmap`` are folded into one, and shared out among devices as
            :func:`axes` says.
    """
    def options(args: Args, cfg: Config, state: bool, softmax_scale: float | None = None, use_qk_l2norm: bool = False,
                reverse: bool = False) -> Options:
        return Options(scale_of(args, softmax_scale), bool(reverse), bool(use_qk_l2norm), cfg, (), state)

    return implementation(OPERATOR, options, platform, source, forward, backward, fields=fields, heuristic=heuristic,
                          candidates=candidates, unsupported=unsupported, has_vmap=has_vmap)
