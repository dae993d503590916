"""The contract of the serving functions: arguments of every platform, and the results that it must return.

A platform module (``xla.py``, ``torch.py``, ``triton/passes.py``) defines two functions::

    steps(args: Args, opts: Options)   -> (output or None, pool or None)      decode, verify, commit
    prefill(args: Args, opts: Options) -> (output, pool)

and hands them to :func:`implementation`: the latter with a family's walk over sequences, which that family's module of
the same platform gives it. In PyTorch the pool that is returned is the one given, changed in place; in JAX it is a new
one, for which the front end gives the old one's memory up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from keraunos import frontends
from keraunos.frontends.gradients import InPlace
from keraunos.kernels.recurrent.contract import head_sizes
from keraunos.ops import checks
from keraunos.ops.arguments import Arguments
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.registry import Implementation, kernel_registry

FLOATS = ("bfloat16", "float16", "float32")
POOLS = ("float32", "bfloat16")
INTEGERS = ("int32", "int64")
# The arguments that say where what is: they vary from call to call.
INDICES = ("slots", "counts", "cu_seqlens", "has_initial", "tokens", "targets")

# The arguments with a row for each token.
TOKENS = ("query", "key", "value", "g", "beta")


class Args(NamedTuple):
    """The arrays of one call; absent ones are ``None``. Rows are [N], or [N, T] drafts, or [T] packed tokens.

    The recurrence has H heads, as the states. Head h reads head ``h // (H // n)`` of an array with n heads, which
    divides H. H is the most that any has; of a commit, which has no query, any may have fewer.

    With ``beta`` the recurrence is the gated delta rule; without, linear attention.
    """

    key: Any  # [rows, heads, K]
    value: Any  # [rows, heads, V]
    query: Any = None  # [rows, heads, K]; None: commit
    g: Any = None  # [rows, heads, K] or [rows, heads], log, <= 0; with A_log what gates are made of
    g_gamma: Any = None  # [H] or, but for prefill, [N, H], log, <= 0
    states: Any = None  # [slots, H, K, V], or of JAX [slots, H, V, K]
    slots: Any = None  # [N], int; -1: padding
    counts: Any = None  # [N], int: how many drafts to commit
    cu_seqlens: Any = None  # [N + 1], int: prefill
    has_initial: Any = None  # [N], bool: prefill; None: all have a state
    tokens: Any = None  # [M], int: packed tokens after which states are exported
    targets: Any = None  # [M], or of drafts [N, T], int: the slots they go to; -1: nowhere
    out: Any = None  # [rows, H, V]: where the output goes, PyTorch only
    exports: Any = None  # [slots, H, K, V]: where the states after drafts go, PyTorch only; may be states itself
    beta: Any = None  # [rows, heads]
    A_log: Any = None  # [heads of g]: the gates are -exp(A_log) * softplus(g + dt_bias)
    dt_bias: Any = None  # [heads of g, K] or [heads of g], like g


class Options(NamedTuple):
    """The compile-time part of one call; hashable."""

    op_id: str
    softmax_scale: float
    cfg: Config  # complete: every field that the platform reads has a value
    use_qk_l2norm: bool = False
    raw_beta: bool = False  # beta is what its sigmoid is to be taken of
    lower_bound: float = 0.0  # below 0: the gates are lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
    state_v_first: bool = False  # the pool is [slots, H, V, K]; in PyTorch a view of it is given

    @property
    def reads(self) -> bool:
        """Whether the call has an output: a commit has none."""
        return self.op_id != "commit"

    @property
    def writes(self) -> bool:
        """The pool changes."""
        return self.op_id != "verify"


_DTYPES = (
    dict.fromkeys(Args._fields, FLOATS) | dict.fromkeys(INDICES, INTEGERS)
    | dict.fromkeys(("states", "exports"), POOLS) | {"has_initial": ("bool",)}
)
_ROWS = {"decode": "N", "verify": "N, T", "commit": "N, T", "prefill": "T"}


def function_of(op_id: str) -> str:
    """The public function of an operation: prompts of the delta rule are an operation of their own."""
    return op_id.removeprefix("delta_")


def describe(op_id: str, args: Args, softmax_scale: float | None = None, use_qk_l2norm: bool = False,
             raw_beta: bool = False, lower_bound: float = 0.0, state_v_first: bool = False) -> Invocation:
    """Check the arguments of one call and describe it. Looks at shapes and dtypes, never at values on a device.

    Raises:
        TypeError: an argument is no array of the key's framework, or has a wrong dtype.
        ValueError: a shape does not fit.
    """

    function = function_of(op_id)
    first = ("key", "value", "query") if op_id != "commit" else ("key", "value")
    required = (*first, "states", "slots", *{"commit": ("counts",), "prefill": ("cu_seqlens",)}.get(function, ()))
    names = {"g": "a"} if args.A_log is not None else {}
    check = Arguments(function, args, required, _DTYPES, like=("value", "query"), constants=("g_gamma",),
                      names=names | {"beta": "b"} if raw_beta else names)
    rows, sizes = _ROWS[function], check.sizes
    check.shape("key", f"{rows}, heads, K")
    layout = "[slots, H, V, K]" if state_v_first else "[slots, H, K, V]"
    if args.states.ndim != 4 or not args.states.shape[0]:
        check.wrong("states", f"{layout} with slots >= 1")
    _, H, *last = args.states.shape
    first, V = last[::-1] if state_v_first else last
    K, sizes["H"], sizes["V"] = sizes["K"], H, V
    N = sizes.setdefault("N", args.slots.shape[0] if args.slots.ndim == 1 else 0)
    if first != K:
        check.wrong("states", f"{layout} with K = {K}", "like key")
    if min(H, K, V, sizes.get("T", 1) if function != "prefill" else 1) < 1:
        got = f"has shape {tuple(args.key.shape)} with H = {H}, V = {V}"
        check.fail(ValueError, "key", got, "sizes of at least 1")
    heads = _check_rows(check, rows)
    if op_id != "commit" and (most := max(heads.values())) < H:
        check.fail(ValueError, "states", f"has H = {H} heads", most, "the most that query, key, value or gates have")
    check.shape("g_gamma", "H", "N, H", why="one decay per head, or per request and head")
    check.shape("out", f"{rows}, H, V")
    for name in ("slots", "counts", "has_initial"):
        check.shape(name, "N", why="one per request")
    if function == "prefill" and N < 1:
        check.wrong("slots", "[N] with N >= 1", "-1 is padding")
    sizes["N + 1"] = N + 1
    check.shape("cu_seqlens", "N + 1", why="with N like slots")
    _check_exports(check, rows)
    check.number("softmax_scale", softmax_scale)
    check.truth("use_qk_l2norm", use_qk_l2norm)
    _check_out(check)
    dims = {"N": N, "T": sizes.get("T", 1), "H": H, "G": heads["key"], "K": K, "V": V}
    options = {"state_v_first": True} if state_v_first else {}
    return check.invocation(op_id, dims | head_sizes(heads, H), "NT", options=options)


def _check_rows(check: Arguments, rows: str) -> dict[str, int]:
    """Check the arrays of tokens; their heads by the arrays' names."""
    heads, place = {}, len(rows.split(", "))
    for name, layouts, why in (
        ("key", (f"{rows}, heads, K",), ""),
        ("query", (f"{rows}, heads, K",), "like key"),
        ("value", (f"{rows}, heads, V",), "like states"),
        ("g", (f"{rows}, heads, K", f"{rows}, heads"), ""),
        ("beta", (f"{rows}, heads",), ""),
    ):
        if (x := getattr(check.args, name)) is not None:
            check.sizes["heads"] = heads[name] = n = x.shape[place] if x.ndim > place else 1
            check.shape(name, *layouts, why=why)
            check.shared_heads(name, n, "the heads of states")
    args: Any = check.args
    if args.A_log is not None:
        check.sizes["heads of a"] = heads["g"]
        check.shape("A_log", "heads of a")
        check.shape("dt_bias", "heads of a, K" if args.g.ndim > place + 1 else "heads of a", why="like a")
    return heads


def _check_exports(check: Arguments, rows: str) -> None:
    """Check where states go other than to their own slots."""
    args: Any = check.args
    if args.tokens is not None:
        if args.tokens.ndim != 1:
            check.fail(ValueError, "boundaries", f"has tokens of shape {tuple(args.tokens.shape)}", "[M]")
        check.shape("tokens", "M")
        check.shape("targets", "M", why="one slot for each token")
    if args.exports is not None:
        pool, found = tuple(args.states.shape[1:]), tuple(args.exports.shape)
        if found[1:] != pool or not found[0]:
            wanted = f"[slots, {', '.join(map(str, pool))}] with slots >= 1"
            check.fail(ValueError, "exports", f"has a pool of shape {found}", wanted, "like states")
        if args.targets is None:
            check.fail(TypeError, "exports", "has None as targets", "a pair (pool, targets)")
        check.shape("targets", rows, why="one slot for each draft")


def _check_out(check: Arguments) -> None:
    """Check what a call writes to: JAX has no such arrays."""
    args: Any = check.args
    if args.out is not None and check.framework == "jax":
        check.fail(TypeError, "out", "is given", "None",
                   "JAX returns new arrays; donate the old ones to reuse their memory")
    if args.out is not None and check.dtypes["out"] != check.dtypes["query"]:
        check.fail(TypeError, "out", f"has dtype {check.dtypes['out']}", check.dtypes["query"], "like query")
    if args.exports is not None and check.framework == "jax":
        check.fail(TypeError, "exports", "is given", "None",
                   "it changes an array that is given, which JAX has none of")


def checker(op_id: str, args: Args) -> Callable[[Args], None] | None:
    """Make the check of the values of calls like this one; see :mod:`keraunos.ops.checks`. Padding may hold any."""

    def tokens(slots: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
        found = np.repeat(slots >= 0, np.diff(cu_seqlens).clip(0))[:rows]
        return np.pad(found, (0, rows - len(found)))

    op_id = function_of(op_id)
    rows, size, packed = args.key.shape[0], args.states.shape[0], op_id == "prefill"
    others = size if args.exports is None else args.exports.shape[0]
    live, beside = (tokens, ("slots", "cu_seqlens")) if packed else (lambda slots: slots >= 0, ("slots",))
    rules = {
        "slots": checks.slots("slots", size, once=op_id != "verify"),
        "counts": checks.counts("counts", args.key.shape[1]),
        "targets": checks.slots(f"{'exports' if op_id == 'verify' else 'boundaries'}' targets", others, once=False),
        "cu_seqlens": checks.offsets(rows, whole=False),
        "g": checks.decay("g", live, beside),
        "g_gamma": checks.decay("g_gamma (or log_decay)"),
    }
    if args.A_log is not None:
        del rules["g"]
    return checks.checker(op_id, rules, args)


def output(args: Args, opts: Options) -> tuple[tuple[int, ...], str] | None:
    """The shape and dtype of the output, if there is one."""
    if not opts.reads:
        return None
    dtype = frontends.of(args.query).dtype_name(args.query)
    return (*args.query.shape[:-2], args.states.shape[1], args.value.shape[-1]), dtype


def check_room(op_id: str, out: Any) -> None:
    """Refuse what an output cannot go to: a tensor whose strides kernels do not know.

    Raises:
        ValueError: the strides, and what was wanted.
    """
    if out is not None and hasattr(out, "stride"):
        whole = function_of(op_id) == "prefill"
        if not (out.is_contiguous() if whole else out.stride(-1) == 1):
            wanted = "a contiguous tensor" if whole else "rows of V contiguous values"
            raise ValueError(f"{op_id}: out has strides {out.stride()}; expected {wanted}")


def flops(op_id: str, args: Args) -> tuple[int, int]:
    """The floating point operations of a call with arrays of these shapes, as the recurrence has them; no backward.

    A product of K x V values for each token and head changes the state, another one reads it, and with ``beta`` a third
    one the error.
    """
    rows, (_, H, K, V) = args.key[:-2], args.states
    return 2 * math.prod(rows) * H * K * V * ((op_id != "commit") + (1 if args.beta is None else 2)), 0


def _operator(op_id: str, required: tuple[str, ...], optional: tuple[str, ...],
              options: tuple[str, ...]) -> frontends.Operator:
    def check(args: Args, opts: Options) -> None:
        inv = describe(op_id, args, opts.softmax_scale, *opts[3:])
        kernel_registry.require(inv, opts.cfg)
        check_room(op_id, args.out)

    opts = {"op_id": op_id}
    changed = ("states", "out") if op_id != "verify" else ("out", "exports")
    return frontends.Operator(
        op_id, Args, (*required, *optional), frozenset(required), Options, ("softmax_scale", "cfg", *options),
        fixed=opts,
        passes=functools.partial(kernel_registry.passes, op_id), check=check, flops=functools.partial(flops, op_id),
        changed=tuple(x for x in changed if x in (*required, *optional)),
        strided=("states", "out", "exports"),
    )


_STEP, _PACKED = ("query", "key", "value", "states", "slots"), ("cu_seqlens",)
_GATES, _RAW, _PROMPT = ("g", "g_gamma"), ("beta", "A_log", "dt_bias"), ("has_initial", "tokens", "targets")
_DELTA = ("use_qk_l2norm", "raw_beta", "lower_bound")
OPERATORS = {
    "decode": _operator("decode", (*_STEP, "out"), (*_GATES, *_RAW), _DELTA),
    "verify": _operator("verify", (*_STEP, "out"), (*_GATES, *_RAW, "targets", "exports"), _DELTA),
    "commit": _operator("commit", (*_STEP[1:], "counts"), (*_GATES, *_RAW), _DELTA),
    "prefill": _operator("prefill", (*_STEP, *_PACKED, "out"), (*_GATES, *_PROMPT), ()),
    "delta_prefill": _operator("delta_prefill", (*_STEP, *_PACKED, "out"), ("g", "beta", *_PROMPT), _DELTA[:1]),
}


def implementation(op_id: str, compute: Callable, fields: tuple[str, ...], *, platform: str, source: str,
                   heuristic: Callable = lambda inv, cfg: cfg, unsupported: Callable = lambda inv: None,
                   layouts: bool = False) -> Implementation:
    """The implementation of one function that a platform module registers.

    Args:
        compute: as at the top of this page. fields: of the configuration, that it reads.
        platform: the name that it is registered under; source: the module's ``__file__``.
        unsupported, heuristic: see :class:`Implementation`. layouts: it takes arrays of JAX with ``state_v_first``.
    """
    def refused(inv: Invocation) -> str | None:
        if inv.options.get("state_v_first") and not layouts:
            return "takes no state_v_first in JAX, whose arrays have no strides"
        return unsupported(inv)

    made = InPlace(compute, OPERATORS[op_id], platform, "states", lambda opts: opts.writes, output)

    def prepare(args: Args, *, cfg: Config, softmax_scale: float | None = None, **options: Any) -> Callable:
        scale = float(args.key.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        return made.prepare(Options(op_id, scale, cfg, **options), args)

    return Implementation(op_id, prepare, fields, refused, heuristic, source=source,
                          passes=lambda framework: (compute,))
