"""The gated delta rule with a gate per token, or with none, on Hopper GPUs: which Gluon kernel runs when.

A kernel that is parallel over chunks makes the inverse of each chunk's keys, then one walk over each sequence and head
has the output. Both read each input once but for the keys, which the first one reads, too.

Backward: platform ``triton`` has it, which needs the inputs only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keraunos.kernels.gated_delta_rule.contract import GATED_DELTA_RULE, Args, Options, kernel
from keraunos.kernels.gated_delta_rule.cuda.prepare import prepare_kernel
from keraunos.kernels.gated_delta_rule.cuda.walk import walk_kernel
from keraunos.kernels.gluon import was_not_measured
from keraunos.kernels.host.arrays import Spec, pow2, spec_of
from keraunos.kernels.host.hopper import CHUNK, LEAST_TILE, ROW, aligned, cannot_walk, tiles_of, token_strides
from keraunos.kernels.host.plan import Plan, remember
from keraunos.kernels.host.sequences import Sizes
from keraunos.kernels.recurrent.contract import no_tokens
from keraunos.ops.invocation import Config, Invocation, Platform
from keraunos.ops.registry import kernel_registry

FIELDS = ("num_stages",)

# Stages that the shared memory holds, where one of K and V is above 64, and where none is.
_STAGES, _STAGES_NARROW = 2, 3
# Registers of a thread that prepares chunks: five programs share a multiprocessor, and spill 16 bytes at most.
_REGISTERS = 96
# Walks with which it was measured to be faster than Triton, which cuts sequences into segments where there are few.
_PROGRAMS = 32


class _Call(Sizes):
    """One call as these kernels see it; one object for all that are alike."""

    def __init__(self, specs: Args, opts: Options):
        super().__init__(specs, opts)
        self.norm = opts.use_qk_l2norm
        chunks = -(-self.T // CHUNK)
        self.chunks = self.T // CHUNK + self.N if self.packed else self.B * chunks


_call_of = remember(_Call)


@remember
def _prepare_plan(call: _Call, k: Spec) -> Plan:
    g, beta, H, slots = call.specs.g, call.specs.beta, call.H, call.chunks
    outputs = dict(
        near=((slots, H, 2, CHUNK, CHUNK), call.dtype),
        alike=((slots, H), "int32"),
        norms=((slots, H, CHUNK), "float32") if call.norm else None,
    )
    of_keys = {name: stride // ROW for name, stride in token_strides(k=k).items()}
    numbers = of_keys | token_strides(g=g, b=beta) | dict(T=call.T, N=call.N)
    constants = dict(H=H, **call.ratios(k=k, g=g, b=beta), K=call.K, BK=tiles_of(call.K, call.V)["BK"], C=CHUNK,
                     BN=pow2(call.N), UNIT=ROW, REVERSE=call.reverse, PACKED=call.packed, MAXNREG=_REGISTERS)
    return Plan(prepare_kernel, (slots * H,), numbers, outputs, constants)


@remember
def _walk_plan(call: _Call, q: Spec, k: Spec, v: Spec, final: bool) -> Plan:
    g, beta, H, K, V = call.specs.g, call.specs.beta, call.H, call.K, call.V
    outputs = dict(o=((call.B, call.T, H, V), call.dtype), ht=((call.N, H, K, V), "float32") if final else None)
    stages = min(_STAGES if max(K, V) > LEAST_TILE else _STAGES_NARROW, call.cfg.num_stages)
    numbers = token_strides(q=q, k=k, v=v, g=g, b=beta) | dict(scale=call.scale, T=call.T)
    constants = dict(H=H, **call.ratios(q=q, k=k, v=v, g=g, b=beta), **tiles_of(K, V), C=CHUNK, STAGES=stages,
                     REVERSE=call.reverse, PACKED=call.packed)
    return Plan(walk_kernel, (call.N * H,), numbers, outputs, constants)


def forward(args: Args, opts: Options) -> tuple[tuple[Any, Any], tuple]:
    """``((output, final_state), ())``: the backward needs the inputs only."""
    if not args.query.shape[1]:
        return no_tokens(args), ()
    args = args._replace(**{name: aligned(getattr(args, name)) for name in ("query", "key", "value")})
    q, k, v = args.query, args.key, args.value
    call = _call_of(Args(*map(spec_of, args)), opts)
    near, alike, norms = _prepare_plan(call, call.specs[1]).launch(
        k=k, g=args.g, beta=args.beta, cu_seqlens=args.cu_seqlens)
    output, final = _walk_plan(call, *call.specs[:3], opts.state).launch(
        q=q, k=k, v=v, g=args.g, beta=args.beta, near=near, alike=alike, norms=norms, h0=args.initial_state,
        cu_seqlens=args.cu_seqlens)
    return (output, final), ()


def backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args``, from those of the output and of the final state (None: zero)."""
    triton = kernel_registry.get("gated_delta_rule", Platform.TRITON)
    assert triton.passes is not None
    inv = GATED_DELTA_RULE.describe(args, opts.softmax_scale, use_qk_l2norm=opts.use_qk_l2norm, reverse=opts.reverse)
    return triton.passes("torch")[1](args, (), grads, opts._replace(cfg=triton.heuristic(inv, Config())))


def unsupported(inv: Invocation) -> str | None:
    """Why these kernels cannot run the call, or None."""
    if reason := cannot_walk(inv):
        return reason
    if inv.arrays.get("g", ("", 0))[1] == 4:
        return "takes gates per token [B, T, H]; the call has gates per token and dimension"
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
