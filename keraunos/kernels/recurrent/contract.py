"""The contract of recurrences with a state ``[K, V]``, from a family's table: arguments, results, registration.

The arrays of a call are a NamedTuple with ``query``, ``key``, ``value``, ``initial_state`` and ``cu_seqlens``, and the
properties ``tokens``, its arrays ``[B, T, heads, ...]``, the first of its fields, and ``heads``. A platform module
(``xla.py``, ``torch.py``, ``triton/passes.py``, ...) defines two functions that know the contract only::

    forward(args, opts: Options) -> ((output, final_state), residuals)
    backward(args, residuals, (doutput, dfinal_state), opts: Options) -> gradients, as args

and hands them to :meth:`Recurrence.implementation`, which makes the registered function of them. Residuals are a tuple.
A final state that nobody asked for (``opts.state``) may be None, or is dropped, and its gradient is None; so may
residuals be that are not kept (``opts.kept``), as no gradient follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.frontends.gradients import Differentiable
from keraunos.ops import checks
from keraunos.ops.arguments import FLOATS, Arguments
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.registry import Implementation, kernel_registry

# Sizes in place of symbols of jax.export, where a configuration is chosen.
_USUAL = {"B": 8, "T": 4096}
# The layouts of the arrays of tokens after the query; see :mod:`keraunos.ops.arguments`.
_LAYOUTS = {
    "key": ("B, T, heads, K",),
    "value": ("B, T, heads, V",),
    "g": ("B, T, heads, K", "B, T, heads"),
    "beta": ("B, T, heads",),
}


class Options(NamedTuple):
    """The compile-time part of one call; hashable."""

    softmax_scale: float
    reverse: bool
    cfg: Config  # complete: every field that the platform reads has a value
    constant: tuple[str, ...] = ()  # the arrays that no gradient is wanted of: it may be None, or be made all the same
    state: bool = True  # the final state is wanted
    kept: bool = True  # the residuals are
    started: bool = False  # in place of the initial state, and of the final one's gradient, those of every segment
    use_qk_l2norm: bool = False  # of the delta rule

    def needs(self, args: Any, name: str) -> bool:
        """Whether the array is there and a gradient of it is wanted."""
        return getattr(args, name) is not None and name not in self.constant


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


def no_tokens(args: Any) -> tuple[Any, Any]:
    """The outputs where there is no token: the final states are the initial ones."""
    arrays = frontends.of(args.query)
    (shape, dtype), h0 = state_spec(args), args.initial_state
    output = (*args.query.shape[:2], args.heads, args.value.shape[-1])
    output = arrays.zeros(output, arrays.dtype_name(args.query), args.query)
    return output, arrays.zeros(shape, dtype, args.query) if h0 is None else arrays.cast(h0, dtype)


def no_gradients(args: Any, dfinal: Any) -> Any:
    """The gradients where there is no token: the initial states have those of the final ones."""
    arrays = frontends.of(args.query)
    grads = [None if x is None or isinstance(x, np.ndarray) else arrays.zeros(x.shape, arrays.dtype_name(x), x)
             for x in args]
    made = type(args)(*grads)._replace(cu_seqlens=None)
    if args.initial_state is None or dfinal is None:
        return made
    return made._replace(initial_state=arrays.cast(dfinal, arrays.dtype_name(args.initial_state)))


def _dtype(frontend: ModuleType, x: Array) -> str:
    return x.dtype.name if isinstance(x, np.ndarray) else frontend.dtype_name(x)


def folded(args: Any, size: int) -> dict[str, Any]:
    """``size`` calls at once, their arrays stacked along a new first axis, as the arrays of one with a larger batch.

    Packed sequences are joined to one longer row. Arrays of tokens and states keep their order in memory.
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


@dataclass(frozen=True)
class Recurrence:
    """One operation of a family of recurrences.

    Attributes:
        name: in the registry; function: the public function, whose name errors carry.
        args: the NamedTuple of the arrays; fields: the names of those that it takes.
        products: of K x V values, for each token and head, forward and backward; see :meth:`flops`.
        fold: ``size`` calls at once as one; see :func:`folded`.
        flags: the options that are True or False.
        names: other names that the public function has for arrays.
    """

    name: str
    function: str
    args: Any
    fields: tuple[str, ...]
    products: tuple[int, int]
    fold: Callable[[Any, int], Any]
    flags: tuple[str, ...] = ("reverse",)
    names: Mapping[str, str] = field(default_factory=dict)

    def describe(self, args: Any, softmax_scale: float | None = None, state_v_first: bool = False,
                 **flags: Any) -> Invocation:
        """Check the arguments of one call and describe it. Looks at shapes and dtypes, never at values on a device.

        ``state_v_first``: the initial state is ``[N, H, V, K]``.

        Raises:
            TypeError: an argument is no array of the query's framework, or has a wrong dtype; or an option is unknown.
            ValueError: a shape does not fit.
        """
        if unknown := flags.keys() - {*self.flags}:
            raise TypeError(f"{self.function}: got an unexpected keyword argument {min(unknown)!r}")
        allowed = dict.fromkeys(args._fields, FLOATS) | {"cu_seqlens": checks.OFFSETS}
        check = Arguments(self.function, args, ("query", "key", "value"), allowed, constants=("g_gamma",),
                          names=self.names)
        tokens = args._fields[: len(args.tokens)]
        check.shape("query", "B, T, H, K")
        for name in tokens[1:]:
            check.shape(name, *_LAYOUTS[name], why="like query")
        check.sizes["H"] = H = args.heads
        heads = {name: x.shape[2] for name, x in zip(tokens, args.tokens, strict=True) if x is not None}
        for name, n in heads.items():
            check.shared_heads(name, n, f"the most that {', '.join(tokens[:-1])} or {tokens[-1]} has")
        K, V = check.sizes["K"], check.sizes["V"]
        if min(K, V) < 1:
            check.fail(ValueError, "query", f"has K = {K}, and value V = {V}", "sizes of at least 1")
        check.sizes["G"] = heads["key"]
        if "g_gamma" in args._fields:
            check.shape("g_gamma", "H", "B, H", why="one decay per head")
        check.sequences()
        state = "N, H, V, K" if check.truth("state_v_first", state_v_first) else "N, H, K, V"
        check.shape("initial_state", state, why="one state per sequence and head")
        check.number("softmax_scale", softmax_scale, why="to learn it, scale the query")
        options = {name: check.truth(name, flags.get(name, False)) for name in self.flags}
        sizes, length = check.sizes, check.frontend.length
        dims = {letter: length(sizes[letter], _USUAL.get(letter)) for letter in "BTHGKV"}
        dims["N"] = dims["B"] if args.cu_seqlens is None else length(sizes["N"])
        symbolic = any(check.frontend.is_symbol(sizes[letter]) for letter in "BTHGKVN")
        return check.invocation(self.name, dims | head_sizes(heads, H), "BTN", options=options, symbolic=symbolic)

    def checker(self, args: Any, whole: bool = True) -> Callable[[Any], None] | None:
        """Make the check of the values of calls like this one; see :mod:`keraunos.ops.checks`.

        Args:
            whole: the tokens are those of whole sequences; else one of several shards of them.
        """
        rules = {"g": checks.decay("g"), "g_gamma": checks.decay(self.names.get("g_gamma", "g_gamma")),
                 "cu_seqlens": checks.offsets(args.query.shape[1] if whole else None)}
        return checks.checker(self.function, {x: rule for x, rule in rules.items() if x in args._fields}, args)

    def flops(self, args: Any) -> tuple[int, int]:
        """The floating point operations of a call with arrays of these shapes, forward and backward.

        Those of the recurrence, whatever a platform does. Products of K x V values change the state and read it, with
        the delta rule also its error; backward some of them make the states again. That is how Megatron-LM counts
        layers with states, and the backward how PyTorch counts ``scaled_dot_product_attention``.
        """
        (B, T, _, K), V = args.query, args.value[-1]
        product = 2 * B * T * max(x[2] for x in args.tokens if x is not None) * K * V
        return self.products[0] * product, self.products[1] * product

    def options(self, args: Any, cfg: Config, state: bool, softmax_scale: float | None = None,
                **flags: Any) -> Options:
        """The options that a platform's functions are given."""
        constant = ("g_gamma",) if isinstance(getattr(args, "g_gamma", None), np.ndarray) else ()
        given = {"reverse": False, **{name: bool(flag) for name, flag in flags.items()}}
        return Options(scale_of(args, softmax_scale), cfg=cfg, constant=constant, state=state, **given)

    def _check(self, args: Any, opts: Options) -> None:
        flags = {name: getattr(opts, name) for name in self.flags}
        kernel_registry.require(self.describe(args, opts.softmax_scale, **flags), opts.cfg)

    @functools.cached_property
    def operator(self) -> frontends.Operator:
        """Its node in PyTorch's graphs."""
        return frontends.Operator(
            self.name, self.args, self.fields, frozenset(("query", "key", "value")), Options,
            ("softmax_scale", *self.flags, "cfg", "constant", "state", "kept"),
            passes=functools.partial(kernel_registry.passes, self.name), check=self._check, flops=self.flops,
            outputs=outputs, fold=self.fold, gradients=tuple(x for x in self.fields if x != "cu_seqlens"),
            function=self.function,
        )

    def implementation(self, platform: str, source: str, forward: Callable, backward: Callable, *,
                       fields: tuple[str, ...], heuristic: Callable, candidates: Callable,
                       unsupported: Callable = lambda inv: None, has_vmap: bool = False,
                       segment: Callable = lambda args, opts: None) -> Implementation:
        """Make the implementation that a platform module registers.

        Args:
            platform: the name that it is registered under.
            source: the module's ``__file__``.
            forward, backward: as at the top of this page.
            fields, heuristic, candidates, unsupported: see :class:`Implementation`.
            segment: see :class:`Implementation`; who cuts sequences also takes ``opts.started``.
            has_vmap: all that it does JAX can batch and XLA can partition, and batch and length may be symbols of
                ``jax.export``; without, calls under ``vmap`` are folded into one, and shared out among devices as
                :func:`axes` says.
        """
        folding = None if has_vmap else (self.fold, frontends.unfold)
        both = _without_state(forward), backward
        made = Differentiable(*both, self.operator, platform, folding, axes)

        def refused(inv: Invocation) -> str | None:
            if inv.symbolic and not has_vmap:
                return "takes no sizes that are symbols of jax.export: export each size, or with platform='xla'"
            return unsupported(inv)

        def passes(framework: str) -> tuple[Callable, ...]:
            return frontends.get("jax").batched(*both, *folding) if framework == "jax" and folding else both

        def prepare(args: Any, *, cfg: Config, return_state: bool = True, **rest: Any) -> Callable[[Any], tuple]:
            return made.prepare(self.options(args, cfg, return_state, **rest), args)

        return Implementation(self.name, prepare, fields, refused, heuristic, candidates, source=source,
                              options=self.options, passes=passes, segment=segment)
