"""The gated delta rule with a gate per token, or with none, on Hopper GPUs: which Gluon kernel runs when.

A kernel that is parallel over chunks makes the inverse of each chunk's keys, then one walk over each sequence and head
has the output. Both read each input once but for the keys, which the first one reads, too.

Backward: platform ``triton`` has it, which needs the inputs only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keraunos import frontends
from keraunos.kernels.gated_delta_rule.contract import GATED_DELTA_RULE, Args, Options, kernel
from keraunos.kernels.gated_delta_rule.cuda.prepare import prepare_kernel
from keraunos.kernels.gated_delta_rule.cuda.walk import walk_kernel
from keraunos.kernels.gluon import cannot_run, was_not_measured
from keraunos.kernels.host.arrays import Spec, pow2, spec_of, state_strides
from keraunos.kernels.host.plan import Plan, remember
from keraunos.kernels.host.pool import NO_STATES, Pool
from keraunos.kernels.host.sequences import Sizes
from keraunos.kernels.recurrent.contract import state_spec
from keraunos.ops.invocation import Config, Invocation, Platform
from keraunos.ops.registry import kernel_registry

FIELDS = ("num_stages",)

# Dimensions of a tile are as few or as many as these; rows of a multiple of so many begin at multiples of 16 bytes.
_LEAST_TILE, _MOST_DIMS, _ROW, _CHUNK = 64, 128, 8, 64
# Stages that the shared memory holds, where one of K and V is above 64, and where none is.
_STAGES, _STAGES_NARROW = 2, 3
# Walks with which it was measured to be faster than Triton, which cuts sequences into segments where there are few.
_PROGRAMS = 32


class _Call(Sizes):
    """One call as these kernels see it; one object for all that are alike."""

    def __init__(self, specs: Args, opts: Options):
        super().__init__(specs, opts)
        self.norm = opts.use_qk_l2norm
        self.BK, self.BV = (_LEAST_TILE if size <= _LEAST_TILE else _MOST_DIMS for size in (self.K, self.V))
        chunks = -(-self.T // _CHUNK)
        self.chunks = self.T // _CHUNK + self.N if self.packed else self.B * chunks


_call_of = remember(_Call)


def _strides(**arrays: Spec | None) -> dict[str, int]:
    """``stride_<name><axis>`` of arrays [B, T, heads, ...]; of a single token none, which may be anything."""
    none = 0, _MOST_DIMS, 0
    return {f"stride_{name}{axis}": x.strides[i] if x and x.shape[i] > 1 else none[i]
            for name, x in arrays.items() for i, axis in enumerate("bth")}


@remember
def _prepare_plan(call: _Call, k: Spec) -> Plan:
    g, beta, H, slots = call.specs.g, call.specs.beta, call.H, call.chunks
    outputs = dict(
        near=((slots, H, 2, _CHUNK, _CHUNK), call.dtype),
        alike=((slots, H), "int32"),
        norms=((slots, H, _CHUNK), "float32") if call.norm else None,
    )
    of_keys = {name: stride // _ROW for name, stride in _strides(k=k).items()}
    numbers = of_keys | _strides(g=g, b=beta) | dict(T=call.T, N=call.N)
    constants = dict(H=H, **call.ratios(k=k, g=g, b=beta), K=call.K, BK=call.BK, C=_CHUNK, BN=pow2(call.N), UNIT=_ROW,
                     REVERSE=call.reverse, PACKED=call.packed)
    return Plan(prepare_kernel, (slots * H,), numbers, outputs, constants)


@remember
def _walk_plan(call: _Call, q: Spec, k: Spec, v: Spec, final: bool, pool: Pool | None, into: bool) -> Plan:
    g, beta, H, K, V = call.specs.g, call.specs.beta, call.H, call.K, call.V
    outputs: dict[str, Any] = dict(o=((call.B, call.T, H, V), call.dtype),
                                   ht=((call.N, H, K, V), "float32") if final else None)
    states = dict(stride_ss=H * K * V, stride_sh=K * V, stride_sk=V, stride_sv=1)
    if pool:
        # The states are not made, but put where they came from.
        outputs = dict(o="into" if into else ((pool.T, H, V), call.dtype), ht="h0")
        states = state_strides(pool.states)
    stages = min(_STAGES if max(call.BK, call.BV) > _LEAST_TILE else _STAGES_NARROW, call.cfg.num_stages)
    numbers = _strides(q=q, k=k, v=v, g=g, b=beta) | dict(scale=call.scale, T=call.T, L=0)
    constants = dict(H=H, **call.ratios(q=q, k=k, v=v, g=g, b=beta), K=K, V=V, BK=call.BK, BV=call.BV, C=_CHUNK,
                     STAGES=stages, REVERSE=call.reverse, PACKED=call.packed, SPLIT=False, **states)
    return Plan(walk_kernel, (call.N * H,), numbers, outputs, constants)


def forward(args: Args, opts: Options, pool: Pool | None = None) -> tuple[tuple[Any, Any], tuple]:
    """``((output, final_state), ())``: the backward needs the inputs only.

    With a pool, which is the final state then, the arrays of tokens have no axis for the batch.
    """
    if not args.query.shape[1]:
        return _no_tokens(args), ()
    args = args._replace(**{name: _aligned(getattr(args, name)) for name in ("query", "key", "value")})
    given, q, k, v = pool or NO_STATES, args.query, args.key, args.value
    call = _call_of(pool.call if pool else Args(*map(spec_of, args)), opts)
    specs = call.specs[:3]
    prepared = _prepare_plan(call, specs[1]).launch(k=k, g=args.g, beta=args.beta, cu_seqlens=args.cu_seqlens)
    near, alike, norms = prepared
    plan = _walk_plan(call, *specs, opts.state, pool and pool.specs(), given.into is not None)
    output, final = plan.launch(
        q=q, k=k, v=v, g=args.g, beta=args.beta, near=near, alike=alike, norms=norms,
        h0=pool.states if pool else args.initial_state, cu_seqlens=args.cu_seqlens, slots=given.slots,
        has_initial=given.has_initial, into=given.into)
    return (output, final), ()


def _no_tokens(args: Args) -> tuple[Any, Any]:
    """The outputs where there is no token: the final states are the initial ones."""
    arrays = frontends.of(args.query)
    (shape, dtype), h0 = state_spec(args), args.initial_state
    output = (*args.query.shape[:2], args.heads, args.value.shape[-1])
    output = arrays.zeros(output, arrays.dtype_name(args.query), args.query)
    return output, arrays.zeros(shape, dtype, args.query) if h0 is None else arrays.cast(h0, dtype)


def _aligned(x: Any) -> Any:
    """The array, or a copy where copies of blocks cannot take it: rows must begin at multiples of 16 bytes."""
    return frontends.of(x).aligned(x)


def backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args``, from those of the output and of the final state (None: zero)."""
    triton = kernel_registry.get("gated_delta_rule", Platform.TRITON)
    assert triton.passes is not None
    inv = GATED_DELTA_RULE.describe(args, opts.softmax_scale, use_qk_l2norm=opts.use_qk_l2norm, reverse=opts.reverse)
    return triton.passes("torch")[1](args, (), grads, opts._replace(cfg=triton.heuristic(inv, Config())))


def unsupported(inv: Invocation) -> str | None:
    """Why these kernels cannot run the call, or None."""
    if reason := cannot_run(inv):
        return reason
    if inv.arrays.get("g", ("", 0))[1] == 4:
        return "takes gates per token [B, T, H]; the call has gates per token and dimension"
    K, V = inv.dims["K"], inv.dims["V"]
    dims = f"the call has K = {K}, V = {V}"
    if max(K, V) > _MOST_DIMS:
        return f"takes head dims up to 128: a state of more takes more registers than there are; {dims}"
    if min(K, V) <= _LEAST_TILE // 2:
        return f"takes head dims over 32: most of a tile of 64 would stay empty; {dims}"
    if K % _ROW or V % _ROW:
        return f"takes head dims that are multiples of 8: rows must begin at multiples of 16 bytes; {dims}"
    return None


def loses(inv: Invocation) -> str | None:
    """Why ``"auto"`` should prefer others, or None: what was not measured to be faster."""
    if reason := was_not_measured():
        return reason
    if inv.dims["N"] * inv.dims["H"] < _PROGRAMS:
        return f"has a walk for each sequence and head, and was measured to be faster with {_PROGRAMS} of them or more"
    return None


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """As many stages as fit."""
    return replace(cfg, num_stages=_STAGES_NARROW)


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Two stages and as many as fit."""
    return [replace(cfg, num_stages=n) for n in (2, _STAGES_NARROW)]


gated_delta_rule = kernel("cuda", __file__, forward, backward, fields=FIELDS, heuristic=heuristic,
                          candidates=candidates, unsupported=unsupported)
preferred_gated_delta_rule = replace(gated_delta_rule, loses=loses)
