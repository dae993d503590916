"""What every platform of the serving functions is given and what it must return.

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
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from keraunos import frontends
from keraunos.kernels.linear_attention.contract import constants, head_sizes
from keraunos.ops import checks
from keraunos.ops.invocation import Config, Invocation, is_number
from keraunos.ops.registry import Implementation, kernel_registry

FLOATS = ("bfloat16", "float16", "float32")
POOLS = ("float32", "bfloat16")
INTEGERS = ("int32", "int64")
# The arguments that say where what is: they vary from call to call.
INDICES = ("slots", "counts", "cu_seqlens", "has_initial", "tokens", "targets")


class Args(NamedTuple):
    """The arrays of one call; absent ones are ``None``. Rows are [N], or [N, T] drafts, or [T] packed tokens.

    The recurrence has H heads, as the states. Head h reads head ``h // (H // n)`` of an array with n heads, which
    divides H. H is the most that any has; of a commit, which has no query, any may have fewer.
    """

    key: Any  # [rows, heads, K]
    value: Any  # [rows, heads, V]
    query: Any = None  # [rows, heads, K]; None: commit
    g: Any = None  # [rows, heads, K] or [rows, heads], log, <= 0
    g_gamma: Any = None  # [H] or, but for prefill, [N, H], log, <= 0
    states: Any = None  # [slots, H, K, V]
    slots: Any = None  # [N], int; -1: padding
    counts: Any = None  # [N], int: how many drafts to commit
    cu_seqlens: Any = None  # [N + 1], int: prefill
    has_initial: Any = None  # [N], bool: prefill; None: all have a state
    tokens: Any = None  # [M], int: packed tokens after which states are exported
    targets: Any = None  # [M], or of drafts [N, T], int: the slots they go to; -1: nowhere
    out: Any = None  # [rows, H, V]: where the output goes, PyTorch only
    exports: Any = None  # [slots, H, K, V]: where the states after drafts go, PyTorch only; may be states itself


class Options(NamedTuple):
    """The compile-time part of one call; hashable."""

    op_id: str
    softmax_scale: float
    cfg: Config  # complete: every field that the platform reads has a value

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
_ROWS = {"decode": "N", "verify": "NT", "commit": "NT", "prefill": "T"}


def describe(op_id: str, args: Args, softmax_scale: float | None = None) -> Invocation:
    """Check the arguments of one call and describe it. Looks at shapes and dtypes, never at values on a device.

    Raises:
        TypeError: an argument is no array of the key's framework, or has a wrong dtype.
        ValueError: a shape does not fit.
    """

    def fail(error: type[Exception], name: str, got: str, wanted: object, why: str = "") -> NoReturn:
        raise error(f"{op_id}: {name} {got}; expected {wanted}{', ' + why if why else ''}")

    first = ("key", "value", "query") if op_id != "commit" else ("key", "value")
    required = (*first, "states", "slots", *{"commit": ("counts",), "prefill": ("cu_seqlens",)}.get(op_id, ()))
    framework, frontend, dtypes = checks.arrays(
        op_id, args, required, _DTYPES, like=("value", "query"), constants=("g_gamma",)
    )
    rows = _ROWS[op_id]
    if args.key.ndim != len(rows) + 2:
        fail(ValueError, "key", f"has shape {tuple(args.key.shape)}", f"[{', '.join(rows)}, heads, K]")
    if args.states.ndim != 4 or not args.states.shape[0]:
        fail(ValueError, "states", f"has shape {tuple(args.states.shape)}", "[slots, H, K, V] with slots >= 1")
    *leading, _, K = args.key.shape
    sizes = dict(zip(rows, leading, strict=True))
    _, H, _, V = args.states.shape
    N = sizes.setdefault("N", args.slots.shape[0] if args.slots.ndim == 1 else 0)

    def shape(name: str, wanted: Sequence[tuple], letters: Sequence[Sequence[str]], why: str = "") -> None:
        x = getattr(args, name)
        if x is not None and tuple(x.shape) not in wanted:
            sought = " or ".join(f"[{', '.join(label)}] = {w}" for label, w in zip(letters, wanted, strict=True))
            fail(ValueError, name, f"has shape {tuple(x.shape)}", sought, why)

    if args.states.shape[2] != K:
        fail(ValueError, "states", f"has shape {tuple(args.states.shape)}", f"[slots, H, K, V] with K = {K}",
             "like key")
    drafts = sizes.get("T", 1) if op_id != "prefill" else 1
    if min(H, K, V, drafts) < 1:
        fail(ValueError, "key", f"has shape {tuple(args.key.shape)} with H = {H}, V = {V}", "sizes of at least 1")
    lead, heads = tuple(leading), {}
    for name, last, why in (
        ("key", "K", ""),
        ("query", "K", "like key"),
        ("value", "V", "like states"),
        ("g", "K", ""),
    ):
        if (x := getattr(args, name)) is None:
            continue
        n = heads[name] = x.shape[len(lead)] if x.ndim > len(lead) else 1
        wanted = [(*lead, n, V if last == "V" else K), (*lead, n)]
        few = 2 if name == "g" else 1
        shape(name, wanted[:few], [(*rows, "heads", last), (*rows, "heads")][:few], why)
        if n < 1 or H % n:
            fail(ValueError, name, f"has {n} heads", f"a divisor of H = {H}", "the heads of states")
    if op_id != "commit" and max(heads.values()) < H:
        fail(
            ValueError, "states", f"has H = {H} heads", max(heads.values()), "the most that query, key, value or g has"
        )
    shape("g_gamma", [(H,), (N, H)], ["H", "NH"], "one decay per head, or per request and head")
    shape("out", [(*lead, H, V)], [(*rows, "H", "V")])
    for name in ("slots", "counts", "has_initial"):
        shape(name, [(N,)], ["N"], "one per request")
    if op_id == "prefill" and N < 1:
        fail(ValueError, "slots", f"has shape {tuple(args.slots.shape)}", "[N] with N >= 1", "-1 is padding")
    shape("cu_seqlens", [(N + 1,)], [("N + 1",)], "with N like slots")
    if args.tokens is not None:
        if args.tokens.ndim != 1:
            fail(ValueError, "boundaries", f"has tokens of shape {tuple(args.tokens.shape)}", "[M]")
        shape("targets", [tuple(args.tokens.shape)], ["M"], "one slot for each token")
    if args.exports is not None:
        pool, found = tuple(args.states.shape[1:]), tuple(args.exports.shape)
        if found[1:] != pool or not found[0]:
            room = f"[slots, {', '.join(map(str, pool))}] with slots >= 1"
            fail(ValueError, "exports", f"has a pool of shape {found}", room, "like states")
        if args.targets is None:
            fail(TypeError, "exports", "has None as targets", "a pair (pool, targets)")
        shape("targets", [tuple(leading)], [rows], "one slot for each draft")
    if softmax_scale is not None and not is_number(softmax_scale):
        fail(TypeError, "softmax_scale", f"is {reprlib.repr(softmax_scale)}", "a finite number")
    if args.out is not None and framework == "jax":
        fail(TypeError, "out", "is given", "None", "JAX returns new arrays; donate the old ones to reuse their memory")
    if args.out is not None and dtypes["out"] != dtypes["query"]:
        fail(TypeError, "out", f"has dtype {dtypes['out']}", dtypes["query"], "like query")
    if args.exports is not None and framework == "jax":
        fail(TypeError, "exports", "is given", "None", "it changes an array that is given, which JAX has none of")
    device = frontend.device_of(args.key)
    sizes = {"N": N, "T": sizes.get("T", 1), "H": H, "G": heads["key"], "K": K, "V": V}
    sizes |= head_sizes(heads, H)
    return Invocation(
        op_id=op_id,
        framework=framework,
        backend=device.backend,
        device=device.kind,
        shared_memory=device.shared_memory,
        dims=sizes,
        lengths=frozenset("NT"),
        arrays={name: (dtype, getattr(args, name).ndim) for name, dtype in dtypes.items()},
        constants=constants(args),
        arguments=args._asdict(),
        settled=device.settled,
    )


def checker(op_id: str, args: Args) -> Callable[[Args], None] | None:
    """What checks values of calls like this one; see :mod:`keraunos.ops.checks`. Those of padding are any."""

    def tokens(slots: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
        found = np.repeat(slots >= 0, np.diff(cu_seqlens).clip(0))[:rows]
        return np.pad(found, (0, rows - len(found)))

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
    return checks.checker(op_id, rules, args)


def output(args: Args, opts: Options) -> tuple[tuple[int, ...], str] | None:
    """The shape and dtype of the output, if there is one."""
    if not opts.reads:
        return None
    dtype = frontends.of(args.query).dtype_name(args.query)
    _, H, _, V = args.states.shape
    return (*args.query.shape[:-2], H, V), dtype


def check_room(op_id: str, out: Any) -> None:
    """Refuse what an output cannot go to: a tensor whose strides kernels do not know.

    Raises:
        ValueError: the strides, and what was wanted.
    """
    if out is not None and hasattr(out, "stride"):
        whole = op_id == "prefill"
        if not (out.is_contiguous() if whole else out.stride(-1) == 1):
            wanted = "a contiguous tensor" if whole else "rows of V contiguous values"
            raise ValueError(f"{op_id}: out has strides {out.stride()}; expected {wanted}")


def flops(op_id: str, args: Args) -> tuple[int, int]:
    """The floating point operations of a call with arrays of these shapes, as the recurrence has them; no backward.

    A product of K x V values for each token and head changes the state, another one reads it.
    """
    rows, (_, H, K, V) = args.key[:-2], args.states
    return 2 * math.prod(rows) * H * K * V * (1 if op_id == "commit" else 2), 0


def _operator(op_id: str, required: tuple[str, ...], optional: tuple[str, ...]) -> frontends.Operator:
    def check(args: Args, opts: Options) -> None:
        inv = describe(op_id, args, opts.softmax_scale)
        kernel_registry.require(inv, opts.cfg)
        check_room(op_id, args.out)

    opts = {"op_id": op_id}
    changed = ("states", "out") if op_id != "verify" else ("out", "exports")
    return frontends.Operator(
        op_id, Args, (*required, *optional), frozenset(required), Options, ("softmax_scale", "cfg"), settled=opts,
        passes=functools.partial(kernel_registry.passes, op_id), check=check, flops=functools.partial(flops, op_id),
        changed=tuple(x for x in changed if x in (*required, *optional)),
        strided=("states", "out", "exports"),
    )


_STEP, _PACKED = ("query", "key", "value", "states", "slots"), ("cu_seqlens",)
_GATES, _PROMPT = ("g", "g_gamma"), ("has_initial", "tokens", "targets")
OPERATORS = {
    "decode": _operator("decode", (*_STEP, "out"), _GATES),
    "verify": _operator("verify", (*_STEP, "out"), (*_GATES, "targets", "exports")),
    "commit": _operator("commit", (*_STEP[1:], "counts"), _GATES),
    "prefill": _operator("prefill", (*_STEP, *_PACKED, "out"), (*_GATES, *_PROMPT)),
}


def implementation(op_id: str, compute: Callable, fields: tuple[str, ...], *, platform: str, source: str,
                   heuristic: Callable = lambda inv, cfg: cfg,
                   unsupported: Callable = lambda inv: None) -> Implementation:
    """The implementation of one function that a platform module registers.

    Args:
        compute: as at the top of this page. fields: of the configuration, that it reads.
        platform: the name that it is registered under; source: the module's ``__file__``.
        unsupported, heuristic: see :class:`Implementation`.
    """
    made = frontends.in_place(compute, OPERATORS[op_id], platform, "states", lambda opts: opts.writes, output)

    def prepare(args: Args, *, cfg: Config, softmax_scale: float | None = None) -> Callable:
        scale = float(args.key.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        return made(frontends.framework_of(args.key), Options(op_id, scale, cfg), args)

    return Implementation(op_id, prepare, fields, unsupported, heuristic, source=source,
                          passes=lambda framework: (compute,))
