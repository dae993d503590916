"""Parts of a contract that all recurrences with a state ``[K, V]`` share: heads, states, folded calls, registration.

The arrays of a call are a NamedTuple with ``query``, ``key``, ``value``, ``initial_state`` and ``cu_seqlens``, and the
properties ``tokens``, its arrays ``[B, T, heads, ...]``, the first of its fields, and ``heads``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.ops.arguments import Arguments
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.registry import Implementation

# Sizes in place of symbols of jax.export, where a configuration is chosen.
_USUAL = {"B": 8, "T": 4096}


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
    not G; HG and HB: those of g and beta, where they are not H.
    """
    H, G = dims["H"], dims["G"]
    return {"query": dims.get("HQ", H), "key": G, "value": dims.get("HV", G), "g": dims.get("HG", H),
            "beta": dims.get("HB", H)}


def head_sizes(heads: Mapping[str, int], H: int) -> dict[str, int]:
    """Of the sizes of an invocation those that :func:`head_counts` says are only there where they are not as usual."""
    usual = {"HQ": ("query", H), "HV": ("value", heads["key"]), "HG": ("g", H), "HB": ("beta", H)}
    return {letters: heads[name] for letters, (name, n) in usual.items() if heads.get(name, n) != n}


def described_heads(check: Arguments, names: tuple[str, ...]) -> dict[str, int]:
    """Check the heads of the arrays of tokens, and K and V; return the sizes that :func:`head_sizes` gives."""
    heads = {name: x.shape[2] for name in names if (x := getattr(check.args, name)) is not None}
    most = f"the most that {', '.join(names[:-1])} or {names[-1]} has"
    for name, n in heads.items():
        check.shared_heads(name, n, most)
    K, V = check.sizes["K"], check.sizes["V"]
    if min(K, V) < 1:
        check.fail(ValueError, "query", f"has K = {K}, and value V = {V}", "sizes of at least 1")
    check.sizes["G"] = heads["key"]
    return head_sizes(heads, check.sizes["H"])


def check_states(check: Arguments, softmax_scale: float | None, state_v_first: bool) -> None:
    """Check the sequences, the initial state, which ``state_v_first`` is ``[N, H, V, K]``, and the scale."""
    check.sequences()
    state = "N, H, V, K" if check.truth("state_v_first", state_v_first) else "N, H, K, V"
    check.shape("initial_state", state, why="one state per sequence and head")
    check.number("softmax_scale", softmax_scale, why="to learn it, scale the query")


def described(check: Arguments, op_id: str, heads: Mapping[str, int], options: Mapping[str, Any]) -> Invocation:
    """Describe a call that has been checked."""
    sizes, length = check.sizes, check.frontend.length
    dims = {letter: length(sizes[letter], _USUAL.get(letter)) for letter in "BTHGKV"}
    packed = check.args._asdict()["cu_seqlens"] is not None
    dims["N"] = length(sizes["N"]) if packed else dims["B"]
    symbolic = any(check.frontend.is_symbol(sizes[letter]) for letter in "BTHGKVN")
    return check.invocation(op_id, {**dims, **heads}, "BTN", options=options, symbolic=symbolic)


def scale_of(args: Any, softmax_scale: float | None) -> float:
    """The factor of the output."""
    return float(args.query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)


def outputs(args: Any, opts: Any) -> tuple[tuple[tuple[int, ...], str] | None, ...]:
    """The shapes and dtypes of the output and of the final state, None if it is not wanted."""
    dtype = _dtype(frontends.of(args.query), args.query)
    output = *args.query.shape[:2], args.heads, args.value.shape[-1]
    return (output, dtype), state_spec(args) if opts.state else None


def state_spec(args: Any) -> tuple[tuple[int, ...], str]:
    """The shape and dtype of the final state."""
    (B, _, _, K), H, V = args.query.shape, args.heads, args.value.shape[-1]
    N = B if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    dtype = _dtype(frontends.of(args.query), args.query)
    return (N, H, K, V), "float64" if dtype == "float64" else "float32"


def _dtype(frontend: ModuleType, x: Array) -> str:
    return x.dtype.name if isinstance(x, np.ndarray) else frontend.dtype_name(x)


def folded(args: Any, size: int) -> dict[str, Any]:
    """``size`` calls at once, their arrays stacked along a new first axis, as the arrays of one with a larger batch.

    Packed sequences are joined to one longer row. What belongs to tokens or states keeps its order in memory.
    """
    query, cu_seqlens = args.query, args.cu_seqlens
    frontend, axis = frontends.of(query), 1 if cu_seqlens is None else 2

    def joined(x: Array | None, axis: int) -> Array | None:
        return x if x is None else x.reshape(*x.shape[1:axis], size * x.shape[axis], *x.shape[axis + 1 :])

    if cu_seqlens is not None:
        # Each call's sequences start where the tokens of those before it end.
        calls = frontend.cast(frontend.numbers(size, cu_seqlens), frontend.dtype_name(cu_seqlens))
        cu_seqlens = cu_seqlens + calls[:, None] * query.shape[2]
        cu_seqlens = frontend.xp.concatenate([cu_seqlens[0], cu_seqlens[1:, 1:].reshape(-1)])
    tokens = {name: joined(x, axis) for name, x in zip(args._fields, args.tokens, strict=False)}
    return {**tokens, "initial_state": joined(args.initial_state, 1), "cu_seqlens": cu_seqlens}


def axes(args: Any, opts: Any) -> tuple[Any, tuple[str, str | None], None]:
    """The axes that may be sharded among devices: batch and heads; of packed sequences, in one row, heads.

    See :func:`keraunos.frontends.jax.partition.partitioned`.
    """
    b = "." if args.cu_seqlens is not None else "b"
    letters = {name: None if x is None else f"{b}.h."[: x.ndim]
               for name, x in zip(args._fields, args.tokens, strict=False)}
    gamma = getattr(args, "g_gamma", None)
    if gamma is not None:
        letters["g_gamma"] = "bh"[-gamma.ndim :]
    state = f"{b}h.."
    made = args._replace(**letters, initial_state=state, cu_seqlens=".")
    return made, (f"{b}.h.", state if opts.state else None), None


def _without_state(forward: Callable) -> Callable:
    """``forward``, which gives None in place of a final state that is not wanted."""

    @functools.wraps(forward)
    def run_forward(args: Any, opts: Any) -> tuple[tuple[Array, Array | None], Any]:
        (output, state), residuals = forward(args, opts)
        return (output, state if opts.state else None), residuals

    return run_forward


def implementation(
    operator: frontends.Operator,
    options: Callable[..., Any],
    platform: str,
    source: str,
    forward: Callable,
    backward: Callable,
    *,
    fields: tuple[str, ...],
    heuristic: Callable,
    candidates: Callable,
    unsupported: Callable,
    has_vmap: bool,
    segment: Callable = lambda args, opts: None,
) -> Implementation:
    """Make an implementation of a platform's functions; see a family's contract.

    Args:
        operator: the operation.
        options: ``(args, cfg, state, **options)`` -> the options that the functions are given.
        platform: the name that it is registered under.
        source: the platform's ``__file__``.
        forward, backward, fields, heuristic, candidates, unsupported, has_vmap, segment: as the platform gives them.
    """
    folding = None if has_vmap else (operator.fold, frontends.unfold)
    both = _without_state(forward), backward
    made = frontends.differentiable(*both, operator, platform, folding, axes)

    def refused(inv: Invocation) -> str | None:
        if inv.symbolic and not has_vmap:
            return "takes no sizes that are symbols of jax.export: export each size, or with platform='xla'"
        return unsupported(inv)

    def passes(framework: str) -> tuple[Callable, ...]:
        return frontends.get("jax").batched(*both, *folding) if framework == "jax" and folding else both

    def prepare(args: Any, *given: Any, cfg: Config, return_state: bool = True, **rest: Any) -> Callable[[Any], tuple]:
        opts = options(args, cfg, return_state, *given, **rest)
        return made(frontends.framework_of(args.query), opts, args)

    return Implementation(operator.name, prepare, fields, refused, heuristic, candidates, source=source,
                          options=options, passes=passes, segment=segment)
