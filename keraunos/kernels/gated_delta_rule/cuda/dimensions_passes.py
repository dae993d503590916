"""The gated delta rule with gates per token and dimension on Hopper GPUs: which kernel runs when.

One kernel prepares most chunks, and a second one those with strong gates, and those that need more digits. Sequences
stay whole: where walks are few, two programs share the values of a head. The walks, forward and backward, leave the
state before each chunk and the gradient of the state after it, from which one kernel makes all gradients of a chunk,
and one in Triton those of chunks that the first kernel has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keraunos.kernels.gated_delta_rule.contract import Args
from keraunos.kernels.gated_delta_rule.cuda.call import STAGES, STAGES_NARROW, Call
from keraunos.kernels.gated_delta_rule.cuda.dimensions import prepare_dimensions_kernel, remake_dimensions_kernel
from keraunos.kernels.gated_delta_rule.cuda.dimensions_adjoint import adjoint_dimensions_kernel
from keraunos.kernels.gated_delta_rule.cuda.dimensions_gradients import gradients_dimensions_kernel
from keraunos.kernels.gated_delta_rule.cuda.dimensions_walk import walk_dimensions_kernel
from keraunos.kernels.gated_delta_rule.dimension_gradients import dimension_gradients_plan
from keraunos.kernels.host.arrays import Spec, spec_of
from keraunos.kernels.host.hopper import CHUNK, LEAST_TILE, ROW, token_strides
from keraunos.kernels.host.plan import Plan, remember

# Registers of a thread that prepares chunks: four programs share a multiprocessor; three where gates are strong; two
# where keys are alike.
_REGISTERS, _REGISTERS_STRONG, _REGISTERS_ALIKE = 128, 168, 255
# The least sum of gates, base 2, of which the dtype has the factors.
_LEAST = {"bfloat16": -100.0, "float16": -8.0}
# Programs that look for chunks that were left: two or three times those that run at once, if no more than so many
# chunks come to one.
_PROGRAMS_LEFT, _MOST_LEFT = 792, 64


@remember
def _prepare_plan(call: Call, q: Spec, k: Spec, g: Spec, fine: bool | None = None) -> Plan:
    """The launch that makes what needs no state; with fine, of chunks that another one has left."""
    beta, H, slots = call.specs.beta, call.H, call.chunks
    of_tokens = {name: stride // ROW for name, stride in token_strides(q=q, k=k, g=g).items()}
    numbers = of_tokens | token_strides(b=beta) | dict(scale=call.scale, T=call.T, N=call.N)
    constants = dict(H=H, **call.ratios(q=q, k=k, g=g, b=beta), K=call.K, BK=call.tiles["BK"], C=CHUNK,
                     UNIT=ROW, LEAST=_LEAST[call.dtype], REVERSE=call.reverse, PACKED=call.packed)
    if fine is not None:
        each = min(-(-slots * H // _PROGRAMS_LEFT), _MOST_LEFT)
        return Plan(remake_dimensions_kernel, (-(-slots * H // each),), numbers | dict(SLOTS=slots * H, EACH=each),
                    {name: f"{name}_given" for name in ("near", "pairs", "alike")},
                    constants | dict(NORM=call.norm, MOST=_MOST_LEFT, FINE=fine,
                                     MAXNREG=_REGISTERS_ALIKE if fine else _REGISTERS_STRONG))
    square = (slots, H, 2, CHUNK, CHUNK), call.dtype
    outputs = dict(near=square, pairs=square, alike=((slots, H), "int32"),
                   norms=((slots, H, 2, CHUNK), "float32") if call.norm else None,
                   gates=(g.shape, "float16") if g.dtype == "float32" else None)
    return Plan(prepare_dimensions_kernel, (slots * H,), numbers, outputs,
                constants | dict(MAXNREG=_REGISTERS))


def _stages(call: Call) -> int:
    """The stages of walks with gates per token and dimension. A chunk whose keys are alike takes two."""
    most = STAGES if max(call.K, call.V) > LEAST_TILE else STAGES_NARROW
    return max(min(most, call.cfg.num_stages), 2)


@remember
def _walk_plan(call: Call, q: Spec, k: Spec, v: Spec, g: Spec, final: bool, save: bool) -> Plan:
    beta, H, K, V = call.specs.beta, call.H, call.K, call.V
    of_values = (call.B, call.T, H, V), call.dtype
    outputs = dict(o=of_values, ht=((call.N, H, K, V), "float32") if final else None,
                   errors=of_values if save else None,
                   states=((call.chunks, H, V, K), call.dtype) if save else None)
    numbers = token_strides(q=q, k=k, v=v, g=g, b=beta) | dict(scale=call.scale, T=call.T)
    constants = dict(H=H, **call.ratios(q=q, k=k, v=v, g=g, b=beta), **call.tiles, C=CHUNK, STAGES=_stages(call),
                     REVERSE=call.reverse, PACKED=call.packed, SHARES=call.shares)
    return Plan(walk_dimensions_kernel, (call.N * H * call.shares,), numbers, outputs, constants)


@remember
def _adjoint_plan(call: Call, q: Spec, k: Spec, do: Spec, g: Spec) -> Plan:
    """The adjoint walk with gates per token and dimension, which are of 16 bits."""
    (beta, h0), H, K, V = call.specs[4:6], call.H, call.K, call.V
    outputs = dict(du=((call.B, call.T, H, V), call.dtype), dh0=((call.N, H, K, V), h0.dtype) if h0 else None,
                   dstates=((call.chunks, H, V, K), call.dtype))
    numbers = token_strides(q=q, k=k, o=do, g=g, b=beta) | dict(scale=call.scale, T=call.T)
    constants = dict(H=H, **call.ratios(q=q, k=k, g=g, b=beta), **call.tiles, C=CHUNK, STAGES=_stages(call),
                     REVERSE=call.reverse, PACKED=call.packed, SHARES=call.shares)
    return Plan(adjoint_dimensions_kernel, (call.N * H * call.shares,), numbers, outputs, constants)


@remember
def _gradients_plan(call: Call, q: Spec, k: Spec, do: Spec, g: Spec) -> Plan:
    """The gradients of usual chunks; g: the gates, of 16 bits."""
    gates, beta = call.specs[3:5]
    outputs: dict[str, Any] = {name: f"{name}_given" for name in ("dq", "dk", "dv", "dg", "dbeta")}
    outputs |= {} if call.opts.needs(call.specs, "g") else dict(dg=None)
    outputs |= {} if beta else dict(dbeta=None)
    numbers = token_strides(q=q, k=k, o=do, g=g, b=beta) | dict(scale=call.scale, T=call.T, N=call.N, L=call.part)
    constants = dict(H=call.H, **call.ratios(q=q, k=k, g=gates, b=beta), **call.tiles, C=CHUNK, REVERSE=call.reverse,
                     PACKED=call.packed)
    return Plan(gradients_dimensions_kernel, (call.slots(call.part) * call.H,), numbers, outputs, constants)


def forward(call: Call, args: Args, final: bool, save: bool) -> tuple[tuple[Any, Any], tuple]:
    """The output, the final state and the residuals with gates per token and dimension."""
    q, k, v, g, beta, h0, cu_seqlens = args
    near, pairs, alike, of_rows, narrow = _prepare_plan(call, *call.specs[:2], call.specs.g).launch(
        q=q, k=k, g=g, beta=beta, cu_seqlens=cu_seqlens)
    g = g if narrow is None else narrow
    for fine in (False, True):
        near, pairs, alike = _prepare_plan(call, *call.specs[:2], spec_of(g), fine).launch(
            q=q, k=k, g=g, beta=beta, near_given=near, pairs_given=pairs, alike_given=alike, cu_seqlens=cu_seqlens)
    output, state, errors, states = _walk_plan(call, *call.specs[:3], spec_of(g), final, save).launch(
        q=q, k=k, v=v, g=g, beta=beta, near=near, pairs=pairs, alike=alike, norms=of_rows, h0=h0,
        cu_seqlens=cu_seqlens)
    return (output, state), (near, alike, of_rows, errors, None, states, None, pairs, narrow)


def walked_back(call: Call, args: Args, residuals: Sequence[Any], do: Any, dfinal: Any) -> tuple:
    """The results of ``adjoint_dimensions_kernel``."""
    near, alike, of_rows, _, _, _, _, pairs, narrow = residuals
    g = args.g if narrow is None else narrow
    return _adjoint_plan(call, *call.specs[:2], spec_of(do), spec_of(g)).launch(
        q=args.query, k=args.key, do=do, g=g, beta=args.beta, near=near, pairs=pairs, alike=alike, norms=of_rows,
        dht=dfinal, cu_seqlens=args.cu_seqlens)


def gradients_of_chunks(call: Call, args: Args, residuals: Sequence[Any], do: Any, back: Sequence[Any]) -> Args:
    """The gradients of each head from what both walks have left: of chunks that were left, then of usual ones."""
    _, alike, of_rows, errors, _, states, _, _, narrow = residuals
    du, dh0, dstates = back
    g = args.g if narrow is None else narrow
    q, k, beta, cu_seqlens = args.query, args.key, args.beta, args.cu_seqlens
    specs, of_output, of_gates = call.specs[:2], spec_of(do), spec_of(g)
    plan = dimension_gradients_plan(call, *specs, of_gates, of_output, call.chunks, CHUNK, values_first=True,
                                    from_first=True, norm=call.norm, some=True)
    dq, dk, dv, dg, dbeta = plan.launch(
        q=q, k=k, g=g, beta=beta, do=do, errors=errors, rights=du, states=states, dstates=dstates, norms=of_rows,
        wanted=alike, cu_seqlens=cu_seqlens)
    dq, dk, dv, dg, dbeta = _gradients_plan(call, *specs, of_output, of_gates).launch(
        q=q, k=k, do=do, g=g, beta=beta, errors=errors, du=du, alike=alike, norms=of_rows, states=states,
        dstates=dstates, dq_given=dq, dk_given=dk, dv_given=dv, dg_given=dg, dbeta_given=dbeta, cu_seqlens=cu_seqlens)
    return Args(dq, dk, dv, dg, dbeta, dh0)


def gradients(call: Call, args: Args, residuals: Sequence[Any], do: Any, dfinal: Any) -> Args:
    """The gradients with gates per token and dimension, of each head."""
    back = walked_back(call, args, residuals, do, dfinal)
    return gradients_of_chunks(call, args, residuals, do, back)
