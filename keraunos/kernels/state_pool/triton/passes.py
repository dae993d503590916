"""The serving functions in Triton, for JAX and PyTorch on NVIDIA GPUs from sm_80.

decode, verify and commit are one kernel, which moves states and little else; prefill is a family's walk over
sequences, which reads the states that requests come with from the pool and leaves theirs there. It copies those that
are exported to their slots from before the chunk they are in; another kernel takes them further.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from keraunos.frontends.array_types import Array
from keraunos.kernels.device import limits
from keraunos.kernels.host.arrays import Spec, contiguous, pow2, spec_of, state_strides, tile, unit_of
from keraunos.kernels.host.plan import Plan, remember
from keraunos.kernels.host.pool import Pool
from keraunos.kernels.state_pool import contract
from keraunos.kernels.state_pool.contract import TOKENS, Args, Options
from keraunos.kernels.state_pool.prompts import Walk
from keraunos.kernels.state_pool.triton import steps
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.registry import Implementation

STEP_FIELDS = ("block_d", "num_warps")

# Dimensions of V per program, and warps, that take exported states to their tokens.
_EXPORT = (64, 8)


def _ratios(specs: Args, gate: int) -> dict[str, int]:
    """How many heads share each of those of q, k, v, g and beta."""
    heads = dict(Q=specs.query, K=specs.key, V=specs.value, G=specs.g, B=specs.beta)
    own = {name: x and x.shape[-1 if name == "B" or (name == "G" and gate == 1) else -2] for name, x in heads.items()}
    return {f"R{name}": specs.states.shape[1] // n if n else 1 for name, n in own.items()}


def _tokens(specs: Args, axes: str, out: Spec | None) -> tuple[dict[str, Any], int, int]:
    """The strides of tokens' arrays with these axes, in units, 0 for others; the unit; the kind of gate."""
    gate = 0 if specs.g is None else len(specs.g.shape) - len(specs.key.shape) + 2
    vectors = dict(q=specs.query, k=specs.key, v=specs.value, g=specs.g if gate == 2 else None, b=None, o=out)
    scalars = dict(g=specs.g if gate == 1 else None, b=specs.beta)
    unit = unit_of(*vectors.values())
    numbers: dict[str, Any] = {}
    for name, x in vectors.items():
        x, own = (x, unit) if x else (scalars.get(name), 1)
        for axis in "nth":
            place = axes.find(axis)
            numbers[f"stride_{name}{axis}"] = x.strides[place] // own if x and place >= 0 else 0
    return numbers, unit, gate


@remember
def _step_plan(specs: Args, opts: Options) -> Plan:
    """The launch of decode, verify or commit."""
    q, k, states, out = specs.query, specs.key, specs.states, specs.out
    if opts.state_v_first:
        shape, strides = ((*x[:2], x[3], x[2]) for x in states[:2])
        states = Spec(shape, strides, states.dtype)
    N, (_, H, K, V) = specs.slots.shape[0], states.shape
    many, made = opts.op_id != "decode", None
    if opts.reads:
        shape = (*q.shape[:-2], H, V)
        made = out or Spec(shape, contiguous(shape), q.dtype)
    numbers, unit, gate = _tokens(specs, "nth" if many else "nh", made)
    numbers |= dict(scale=opts.softmax_scale, lower=opts.lower_bound, T=k.shape[1] if many else 1)
    BV = min(cast(int, opts.cfg.block_d), tile(V))
    constants = dict(
        H=H, K=K, V=V, **_ratios(specs, gate), UNIT=unit, **state_strides(states), **state_strides(specs.exports, "e"),
        BK=tile(K), BV=BV, GATE=gate, GAMMA=0 if specs.g_gamma is None else len(specs.g_gamma.shape),
        EXACT=k.dtype == "float32", MANY=many,
        COUNTED=specs.counts is not None, OUTPUT=opts.reads, STORE=opts.writes, EXPORT=specs.exports is not None,
        DELTA=specs.beta is not None, RAW=0 if specs.A_log is None else 2 if opts.lower_bound else 1,
        BIAS=specs.dt_bias is not None, RAW_BETA=opts.raw_beta, NORM=opts.use_qk_l2norm, OVERLAP=4,
    )
    outputs = dict(o=None if made is None else "into" if out else (made.shape, made.dtype),
                   pool="states" if opts.writes else None)
    grid = (N * H * -(-V // BV),)
    return Plan(steps.step_kernel, grid, numbers, outputs, constants, cast(int, opts.cfg.num_warps), 1)


def _steps(args: Args, opts: Options) -> tuple:
    """``(output, pool)`` of decode, verify or commit."""
    return _step_plan(Args(*map(spec_of, args)), opts).launch(
        q=args.key if args.query is None else args.query, k=args.key, v=args.value, g=args.g, gamma=args.g_gamma,
        beta=args.beta, A_log=args.A_log, dt_bias=args.dt_bias, slots=args.slots, counts=args.counts,
        targets=args.targets, states=args.states, exports=args.exports,
        into=args.out,
    )


def _bucket(n: int) -> int:
    """Tokens rounded up by 1/32 at most: what is worked out for a length serves others too, and segments are equal."""
    step = max(pow2(n) // 64, 64)
    return -(-n // step) * step


def _call(walk: Walk, specs: Args) -> Any:
    """The packed row as a row of the family's with room for some more tokens."""
    known = specs._asdict() | {"initial_state": None}
    known |= {name: x.row(_bucket(x.shape[0])) for name in TOKENS if (x := known[name])}
    return walk.args(**{name: known[name] for name in walk.args._fields})


@remember
def _export_plans(specs: Args, opts: Options) -> tuple[Plan, Plan]:
    """Plan where the walk copies states to, and how these are carried on to the tokens that are asked for."""
    N, M, (_, H, K, V) = specs.slots.shape[0], specs.tokens.shape[0], specs.states.shape
    BT, BN, sizes = cast(int, opts.cfg.block_q), pow2(N), dict(N=N, M=M)
    exact = specs.key.dtype == "float32"
    chunks = _bucket(specs.key.shape[0]) // BT + N
    plan = Plan(steps.plan_kernel, (chunks,), sizes, dict(exports=((chunks,), "int32")),
                dict(BT=BT, BN=BN), 1, 1)
    strides, unit, gate = _tokens(specs, "th", None)
    ratios = _ratios(specs, gate)
    del ratios["RQ"]
    names = [f"stride_{name}{axis}" for name in "kvgb" for axis in "th"]
    BV = min(_EXPORT[0], tile(V))
    constants = dict(
        H=H, K=K, V=V, **ratios, UNIT=unit, **state_strides(specs.states), BK=tile(K), BV=BV,
        BN=BN, BT=BT, GATE=gate, GAMMA=specs.g_gamma is not None, EXACT=exact, PRECISION=limits.precision(exact),
        DELTA=specs.beta is not None, NORM=opts.use_qk_l2norm,
    )
    return plan, Plan(
        steps.export_kernel, (M * H * -(-V // BV),), {name: strides[name] for name in names} | sizes,
        dict(pool="states"), constants, _EXPORT[1], 1,
    )


def _prefill(walk: Walk, args: Args, opts: Options) -> tuple[Array, Array | None]:
    """``(output, pool)``: the packed tokens of all requests."""
    specs = Args(*map(spec_of, args))
    given = args._asdict() | {"initial_state": None}
    row = walk.args(**{name: given[name] for name in walk.args._fields})
    pool = Pool(args.states, args.slots, args.has_initial, None, args.key.shape[0], _call(walk, specs), args.out)
    if args.tokens is not None:
        wanted = dict(tokens=args.tokens, targets=args.targets)
        plan, export = _export_plans(specs, opts)
        (exports,) = plan.launch(cu_seqlens=args.cu_seqlens, **wanted)
        pool = pool._replace(exports=exports)
    known = opts._asdict() | {"reverse": False, "constant": ("g_gamma",), "state": True, "kept": False}
    options = walk.options(**{name: known[name] for name in walk.options._fields if name in known})
    (output, states), _ = walk.forward(row, options, pool)
    if args.tokens is not None:
        (states,) = export.launch(k=args.key, v=args.value, g=args.g, gamma=args.g_gamma, beta=args.beta,
                                  cu_seqlens=args.cu_seqlens, slots=args.slots, **wanted, states=states)
    return output, states


def unsupported(inv: Invocation) -> str | None:
    """Why Triton cannot run the call, or None."""
    return limits.cannot_run(inv, inv.arrays["key"][0], any_value=True)


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """The configuration of all batches, so that a request's bits do not depend on its batch."""
    return replace(cfg, block_d=64 if inv.dims["K"] <= 128 else 32, num_warps=4)


def prefill(source: str, walk: Walk, fields: tuple[str, ...], of_family: Callable,
            op_id: str = "prefill") -> Implementation:
    """Prefill by a family's walk.

    Args:
        source: the module's ``__file__``; fields: of the configuration, that the walk reads.
        walk: whose forward is ``(args, opts, pool) -> ((output, pool), residuals)``; of_family: its heuristic.
        op_id: the operation.
    """
    return contract.implementation(
        op_id, functools.partial(_prefill, walk), fields, platform="triton", source=source, unsupported=unsupported,
        heuristic=lambda inv, cfg: of_family(replace(inv, arrays={**inv.arrays, "query": inv.arrays["key"]}), cfg),
    )


decode, verify, commit = (
    contract.implementation(op_id, _steps, STEP_FIELDS, platform="triton", source=__file__, unsupported=unsupported,
                            heuristic=heuristic, layouts=True)
    for op_id in ("decode", "verify", "commit")
)
