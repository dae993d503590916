"""The gated delta rule on Hopper GPUs: which Gluon kernel runs when.

Forward: a kernel that is parallel over chunks makes of each chunk's keys what needs no state, then one walk over each
sequence and head has the output. Both read each input once but for the keys, which the first one reads, too. Where
walks are too few to fill a GPU, sequences are cut into segments: a walk that makes no outputs leaves each one's own
state and its matrix, all at once, and ``join_kernel`` makes from these the states that segments start from.

Where gradients follow, the walk leaves the errors that tokens correct, and the state before every few chunks. Backward:
a walk the other way, with the gradient of the state, leaves what depends on that, of each token, and the gradients of
the same states. From there all groups of chunks are walked at once, which make their states again: they have the rest.

Gates per token and dimension have kernels of their own: ``dimensions_passes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from keraunos.kernels.device.sums import over_shared
from keraunos.kernels.gated_delta_rule import norms
from keraunos.kernels.gated_delta_rule.contract import Args, Options, kernel
from keraunos.kernels.gated_delta_rule.cuda import dimensions_passes
from keraunos.kernels.gated_delta_rule.cuda.adjoint import adjoint_kernel
from keraunos.kernels.gated_delta_rule.cuda.call import (
    STAGES,
    STAGES_NARROW,
    Call,
    call_of,
    most_segments,
    tokens_of_group,
)
from keraunos.kernels.gated_delta_rule.cuda.gradients import gradients_kernel
from keraunos.kernels.gated_delta_rule.cuda.prepare import MOST, prepare_kernel
from keraunos.kernels.gated_delta_rule.cuda.walk import walk_kernel
from keraunos.kernels.gated_delta_rule.joins import join_plan
from keraunos.kernels.gluon import was_not_measured
from keraunos.kernels.host.arrays import Spec, contiguous, dtype_of, spec_of, state_strides
from keraunos.kernels.host.hopper import CHUNK, LEAST_TILE, aligned, cannot_walk, token_strides
from keraunos.kernels.host.plan import Plan, remember
from keraunos.kernels.host.pool import NO_STATES, Pool
from keraunos.kernels.recurrent.contract import no_gradients, no_tokens
from keraunos.kernels.state_pool import contract as pool_contract
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("num_stages",)

# Programs that prepare chunks at once on a multiprocessor, and registers of a thread when they begin; in reverse sums
# over columns take more of them.
_PREPARING, _PREPARING_REVERSE = (4, 64), (3, 80)
# Heads that add up gradients in one kernel.
_MOST_ADDING = 4
# Walks with which it was measured to be faster than Triton, which cuts sequences into segments where there are few; of
# gates per token and dimension also halves of values.
_PROGRAMS = 32


@remember
def _prepare_plan(call: Call, k: Spec) -> Plan:
    g, beta, H, slots = call.specs.g, call.specs.beta, call.H, call.chunks
    outputs = dict(
        near=((slots, H, 2, CHUNK, CHUNK), call.dtype),
        alike=((slots, H), "int32"),
        norms=((slots, H, CHUNK), "float32") if call.norm else None,
    )
    programs, registers = _PREPARING_REVERSE if call.reverse else _PREPARING
    run = CHUNK * min(range(MOST.value, 0, -1), key=lambda n: call.cost(n, programs * call.at_once))
    numbers = token_strides(k=k, g=g, b=beta) | dict(T=call.T, N=call.N, L=run)
    constants = dict(H=H, **call.ratios(k=k, g=g, b=beta), K=call.K, BK=call.tiles["BK"], C=CHUNK, STAGES=STAGES,
                     REVERSE=call.reverse, PACKED=call.packed, MAXNREG=registers)
    return Plan(prepare_kernel, (call.slots(run) * H,), numbers, outputs, constants)


@remember
def _walk_plan(call: Call, q: Spec | None, k: Spec, v: Spec, final: bool, save: bool, pool: Pool | None,
               stored: bool) -> Plan:
    """The walk; without q the one that only makes what segments leave. stored: copies cannot take the output."""
    g, beta, H, K, V = call.specs.g, call.specs.beta, call.H, call.K, call.V
    of_values = (call.B, call.T, H, V), call.dtype
    outputs: dict[str, Any] = dict(o=of_values if q else None, ht=((call.N, H, K, V), "float32") if final else None)
    outputs |= dict(errors=of_values, rest=of_values, states=((call.groups, H, V, K), call.dtype)) if save \
        else dict(errors=None, rest=None, states=None)
    states = Spec(shape := (call.N, H, K, V), contiguous(shape), "float32")
    if pool:
        # The states are not made, but put where they came from.
        outputs |= dict(o="into" if pool.into else ((call.T, H, V), call.dtype), ht="pool") if q else {}
        states = pool.states
    programs, parts = call.segments, 1
    if not q:
        outputs["ht"] = (call.segments, H, K, V + K), "float32"
        parts = 1 + call.matrices
        programs = (programs - (0 if call.packed else call.N)) * parts
    numbers = token_strides(q=q, k=k, v=v, g=g, b=beta) | dict(scale=call.scale, T=call.T, N=call.N, L=call.L)
    constants = dict(H=H, **call.ratios(q=q, k=k, v=v, g=g, b=beta), **call.tiles, C=CHUNK,
                     STAGES=min(STAGES_NARROW, call.cfg.num_stages), GROUP=call.group, REVERSE=call.reverse,
                     PACKED=call.packed, SPLIT=call.L > 0, PARTS=parts, **state_strides(states), STORED=stored)
    return Plan(walk_kernel, (programs * H,), numbers, outputs, constants)


def _adding(call: Call) -> int:
    """How many heads that share queries and keys add up their gradients; 1: each has its own, which are summed later.

    With more than a few, the last ones would begin late, and sums of 16 bits lose digits.
    """
    R = call.ratio(call.specs.query)
    return R if call.ratio(call.specs.key) == R and R <= _MOST_ADDING else 1


@remember
def _adjoint_plan(call: Call, q: Spec, k: Spec, do: Spec, local: bool) -> Plan:
    """The adjoint walk; local: the one that only makes what segments leave."""
    (g, beta, h0), H, K, V = call.specs[3:6], call.H, call.K, call.V
    tokens, programs, most = (call.B, call.T, H), call.segments, STAGES
    outputs: dict[str, Any] = dict(dv=((*tokens, V), call.dtype),
                                   dbeta=None if beta is None else (tokens, call.dtype_of_each(beta)),
                                   dlate=((*tokens, K), call.dtype), dh0=((call.N, H, K, V), h0.dtype) if h0 else None,
                                   begins=((call.groups, H), "float32") if call.need_g else None,
                                   turns=((call.chunks, H), "int32") if _adding(call) > 1 else None)
    if local:
        outputs = dict.fromkeys(outputs) | dict(dh0=((call.segments, H, K, V), "float32"))
        programs, most = call.segments - call.N, STAGES_NARROW
    numbers = token_strides(q=q, k=k, o=do, g=g, b=beta) | dict(scale=call.scale, T=call.T, L=call.L)
    constants = dict(H=H, **call.ratios(q=q, k=k, g=g, b=beta), **call.tiles, C=CHUNK,
                     STAGES=min(most, call.cfg.num_stages), GROUP=call.group, REVERSE=call.reverse, PACKED=call.packed,
                     SPLIT=call.L > 0)
    return Plan(adjoint_kernel, (programs * H,), numbers, outputs, constants)


@remember
def _gradients_plan(call: Call, q: Spec, k: Spec, do: Spec, final: bool) -> Plan:
    (g, beta), H, K, R = call.specs[3:5], call.H, call.K, _adding(call)
    of_keys = (call.B, call.T, H // R, K), call.dtype
    outputs = dict(
        # Where heads share nothing, one takes the place of what it is made of.
        dq=of_keys, dk=of_keys if R > 1 else "dk_given",
        dg=((call.B, call.T, H), call.dtype_of_each(g)) if call.need_g else None,
        turned="turns" if R > 1 else None)
    numbers = token_strides(q=q, k=k, o=do, g=g, b=beta) | dict(scale=call.scale, T=call.T, N=call.N, L=call.part)
    constants = dict(H=H, **call.ratios(q=q, k=k, g=g, b=beta), **call.tiles, C=CHUNK, GROUP=call.group,
                     STAGES=min(STAGES, call.cfg.num_stages), REVERSE=call.reverse,
                     PACKED=call.packed, R=R, FINAL=final)
    return Plan(gradients_kernel, (call.slots(call.part) * H,), numbers, outputs, constants)


def _prepared(call: Call, args: Args) -> tuple[Any, Any, Any]:
    """The results of ``prepare_kernel``."""
    return _prepare_plan(call, call.specs.key).launch(k=args.key, g=args.g, beta=args.beta, cu_seqlens=args.cu_seqlens)


def _joined(call: Call, args: Args, local: Any, matrices: Any, start: Any, adjoint: bool,
            pool: Pool | None = None) -> Any:
    """The states that segments start from, or the gradients, from what they leave; see ``join_kernel``."""
    given = pool or NO_STATES
    return join_plan(call, start is not None, adjoint, pool and pool.specs(), own=True).launch(
        local=local, matrices=matrices, h0=pool.states if pool else start, cu_seqlens=args.cu_seqlens,
        slots=given.slots, has_initial=given.has_initial)[0]


def _walked(call: Call, args: Args, ready: tuple[Any, Any, Any], final: bool, save: bool,
            pool: Pool | None = None) -> tuple[Any, ...]:
    """The results of ``walk_kernel``, and what segments leave."""
    (near, alike, of_keys), given = ready, pool or NO_STATES

    def walk(q: Any, starts: Any, final: bool, save: bool) -> tuple[Any, ...]:
        plan = _walk_plan(call, None if q is None else call.specs.query, *call.specs[1:3], final, save,
                          pool and pool.specs(), given.into is not aligned(given.into))
        return plan.launch(
            q=q, k=args.key, v=args.value, g=args.g, beta=args.beta, near=near, alike=alike, norms=of_keys,
            h0=starts, cu_seqlens=args.cu_seqlens, pool=given.states, slots=given.slots,
            has_initial=given.has_initial, into=given.into)

    starts, local = args.initial_state, None
    if call.L:
        local = walk(None, starts, False, False)[1]
        starts = _joined(call, args, local, local, starts, False, pool)
    return *walk(args.query, starts, final, save), local


def _walked_back(call: Call, args: Args, do: Any, dfinal: Any, residuals: Sequence[Any]) -> tuple[Any, ...]:
    """The results of ``adjoint_kernel``."""
    near, alike, of_keys, errors, _, states, matrices, *_ = residuals

    def walk(ends: Any, local: bool) -> tuple[Any, ...]:
        kept = (None, None, None) if local else (errors, states, args.initial_state)
        return _adjoint_plan(call, *call.specs[:2], spec_of(do), local).launch(
            q=args.query, k=args.key, do=do, g=args.g, beta=args.beta, errors=kept[0], near=near, alike=alike,
            norms=of_keys, states=kept[1], h0=kept[2], dht=ends, cu_seqlens=args.cu_seqlens)

    ends = dfinal
    if call.L:
        ends = _joined(call, args, walk(ends, True)[3], matrices, ends, True)
    return walk(ends, False)


def _gradients_of_scalars(call: Call, args: Args, residuals: Sequence[Any], do: Any, dfinal: Any) -> Args:
    """The gradients without gates, or with one per token, of each head."""
    _, alike, of_keys, errors, rest, states, *_ = residuals
    q, k, _, g, beta, h0, cu_seqlens = args
    dv, dbeta, dlate, dh0, begins, turns = _walked_back(call, args, do, dfinal, residuals)
    dq, dk, dg = _gradients_plan(call, *call.specs[:2], spec_of(do), dfinal is not None).launch(
        q=q, k=k, g=g, beta=beta, do=do, errors=errors, rest=rest, dv=dv, dk_given=dlate, alike=alike, norms=of_keys,
        states=states, begins=begins, h0=h0, turns=turns, cu_seqlens=cu_seqlens)[:3]
    return Args(dq, dk, dv, dg, dbeta, dh0)


def _per_dimension(args: Args) -> bool:
    """Whether there is a gate per token and dimension."""
    return args.g is not None and len(args.g.shape) == 4


def _all_aligned(args: Args) -> Args:
    """The arguments, with arrays that copies can take."""
    names = ("query", "key", "value", *(("g",) if _per_dimension(args) else ()))
    return args._replace(**{name: aligned(getattr(args, name)) for name in names})


def forward(args: Args, opts: Options) -> tuple[tuple[Any, Any], tuple]:
    """``((output, final_state), residuals)``: what needs no state, the errors, and some states, or all."""
    if not args.query.shape[1]:
        return no_tokens(args), (None,) * len(forward.residuals)  # type: ignore[attr-defined]
    args = _all_aligned(args)
    call = call_of(Args(*map(spec_of, args)), opts)
    if _per_dimension(args):
        return dimensions_passes.forward(call, args, opts.state, opts.kept)
    ready = _prepared(call, args)
    output, final, *kept = _walked(call, args, ready, opts.state, opts.kept)
    return (output, final), (*ready, *kept, None, None)


def _prefill(given: pool_contract.Args, options: pool_contract.Options) -> tuple[Any, Any]:
    """``(output, pool)`` of packed sequences whose states are in a pool; tokens' arrays have no axis for the batch."""
    args = Args(given.query, given.key, given.value, given.g, given.beta, None, given.cu_seqlens)
    args = _all_aligned(args)
    specs = Args(*map(spec_of, args))
    rows = {name: x and x.row(x.shape[0]) for name, x in zip(Args._fields, specs.tokens, strict=False)}
    opts = Options(options.softmax_scale, False, options.cfg, kept=False, use_qk_l2norm=options.use_qk_l2norm)
    call = call_of(specs._replace(**rows), opts)
    pool = Pool(given.states, given.slots, given.has_initial, into=given.out)
    return _walked(call, args, _prepared(call, args), True, False, pool)[:2]


_prefill.rehearsed = True  # type: ignore[attr-defined]


def _parts(args: Args, tokens: int) -> int:
    """How many parts of so many tokens sequences have at most."""
    B, T = args.query.shape[:2]
    return T // tokens + args.cu_seqlens.shape[0] - 1 if args.cu_seqlens is not None else B * -(-T // tokens)


def _of_values(args: Args, opts: Options) -> tuple[tuple[int, ...], str]:
    return (*args.query.shape[:2], args.heads, args.value.shape[3]), dtype_of(args.query)


def _room(args: Args, opts: Options) -> tuple[tuple[int, ...], str] | None:
    """Room for what segments leave, enough for all lengths; None: no length is cut."""
    N, K, V = args.query.shape[0], args.query.shape[3], args.value.shape[3]
    most = 1 if args.cu_seqlens is not None else most_segments(N * args.heads)
    return ((N * most, args.heads, K, V + K), "float32") if most > 1 else None


def _of_scalars(shape: Callable) -> Callable:
    """Of a residual, which there is not with gates per token and dimension."""
    return lambda args, opts: None if _per_dimension(args) else shape(args, opts)


def _of_dimensions(shape: Callable) -> Callable:
    """Of a residual, which there is only with gates per token and dimension."""
    return lambda args, opts: shape(args, opts) if _per_dimension(args) else None


def _of_pairs(args: Args, opts: Options) -> tuple[tuple[int, ...], str]:
    return (_parts(args, CHUNK), args.heads, 2, CHUNK, CHUNK), dtype_of(args.query)


def _of_norms(args: Args, opts: Options) -> tuple[tuple[int, ...], str] | None:
    each = (2, CHUNK) if _per_dimension(args) else (CHUNK,)
    return ((_parts(args, CHUNK), args.heads, *each), "float32") if opts.use_qk_l2norm else None


def _of_states(args: Args, opts: Options) -> tuple[tuple[int, ...], str]:
    tokens = CHUNK if _per_dimension(args) else tokens_of_group()
    return (_parts(args, tokens), args.heads, args.value.shape[3], args.query.shape[3]), dtype_of(args.query)


def _of_gates(args: Args, opts: Options) -> tuple[tuple[int, ...], str] | None:
    return (tuple(args.g.shape), "float16") if dtype_of(args.g) == "float32" else None


# Their shapes and dtypes.
forward.residuals = dict(  # type: ignore[attr-defined]
    near=_of_pairs,
    alike=lambda args, opts: ((_parts(args, CHUNK), args.heads), "int32"),
    norms=_of_norms, errors=_of_values, rest=_of_scalars(_of_values), states=_of_states, matrices=_of_scalars(_room),
    pairs=_of_dimensions(_of_pairs), gates=_of_dimensions(_of_gates),
)
forward.rehearsed = True  # type: ignore[attr-defined]


def backward(args: Args, residuals: Sequence[Any], grads: Sequence[Any], opts: Options) -> Args:
    """The gradients of ``args``, from those of the output and of the final state (None: zero)."""
    if not args.query.shape[1]:
        return no_gradients(args, grads[1])
    given, args = args, _all_aligned(args)
    do, dfinal = aligned(grads[0]), grads[1]
    call = call_of(Args(*map(spec_of, args)), opts)
    of_heads = dimensions_passes.gradients if _per_dimension(args) else _gradients_of_scalars
    found = of_heads(call, args, residuals, do, dfinal)
    of_arrays = [over_shared(call, *x) for x in zip(found.tokens, call.specs.tokens, strict=True)]
    found = Args(*of_arrays)._replace(initial_state=found.initial_state)
    if opts.use_qk_l2norm:
        dq, dk = norms.gradient(given.query, found.query), norms.gradient(given.key, found.key)
        found = found._replace(query=dq, key=dk)
    return found


def loses(inv: Invocation) -> str | None:
    """Why ``"auto"`` should prefer others, or None: what was not measured to be faster."""
    if reason := was_not_measured():
        return reason
    dimensions = inv.arrays.get("g", ("", 0))[1] == 4
    if dimensions and inv.arrays["query"][0] == "float16":
        return "with gates per token and dimension, was measured to be faster in bfloat16, which has more exponents"
    walks = inv.dims["N"] * inv.dims["H"] * (1 + (dimensions and inv.dims["V"] > LEAST_TILE))
    if walks < _PROGRAMS:
        return f"has {walks} programs for the call's walks, and was measured to be faster with {_PROGRAMS} or more"
    return None


def _cannot_prefill(inv: Invocation) -> str | None:
    """Why these kernels cannot run a call of prefill, or None."""
    if reason := cannot_walk(inv):
        return reason
    if inv.arrays.get("g", ("", 0))[1] == 3:
        return "takes gates per token [T, H]; the call has gates per token and dimension"
    return "takes no boundaries: it exports no states" if "tokens" in inv.arrays else None


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """As many stages as fit."""
    return replace(cfg, num_stages=STAGES_NARROW)


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Two stages and as many as fit."""
    return [replace(cfg, num_stages=n) for n in (2, STAGES_NARROW)]


gated_delta_rule = kernel("cuda", __file__, forward, backward, fields=FIELDS, heuristic=heuristic,
                          candidates=candidates, unsupported=cannot_walk)
preferred_gated_delta_rule = replace(gated_delta_rule, loses=loses)
delta_prefill = pool_contract.implementation(
    "delta_prefill", _prefill, FIELDS, platform="cuda", source=__file__, unsupported=_cannot_prefill,
    heuristic=heuristic,
)
preferred_delta_prefill = replace(delta_prefill, loses=loses)
