"""The gated linear recurrence in Triton, for JAX and PyTorch on NVIDIA GPUs from sm_80: which kernel runs when.

Forward: one fused scan, which reads every input once. Vector gates are first worked into q and k by a kernel that
streams through them; the scan takes the pairs of a chunk from these, or for chunks whose gates are too strong for that
from a kernel that makes them by halving. When batch times heads does not fill the GPU, sequences are cut into segments:
a cheap pass gives each segment's own state, a tiny one each segment's incoming state, then all segments run at once.

Backward, constant decay: the same scan with its arguments permuted. With L(a, b, c) the recurrence "queries a, keys b,
values c" and R its adjoint, which runs the other way: dq = L(do, v, k), dk = R(v, do, q), dv = R(k, q, do). Backward
with a gradient for gates: one scan gives the state before each chunk, R(k, q, do) gives dv and the gradient of the
state after each chunk, and from both a kernel that is parallel over chunks makes dq, dk and dg; a second launch does
the chunks with strong gates again, by halving. So that these states take little memory, they are made for one part of
the sequence (of each segment, where it is cut) after the other, from the last to the first: the forward keeps the state
that each part starts from. Segments too short for many parts are walked in pairs then. Walks of a backward that do not
read each other run side by side where the front end can have them so: one of few programs leaves most of the GPU idle.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from keraunos.frontends import shared_memory
from keraunos.frontends.array_types import Array
from keraunos.kernels.device import limits
from keraunos.kernels.device.limits import ENOUGH, four_warps
from keraunos.kernels.device.sums import over_shared, summed
from keraunos.kernels.host.arrays import Spec, pow2, spec_of, strides_by_name, tile, unit_of
from keraunos.kernels.host.plan import Plan, remember
from keraunos.kernels.host.pool import Pool
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.linear_attention.contract import kernels as implementations
from keraunos.kernels.linear_attention.triton import chunks
from keraunos.kernels.linear_attention.triton.call import Call, Part, call_of, starts_spec
from keraunos.kernels.linear_attention.triton.stretches import arrive, leave
from keraunos.kernels.linear_attention.triton.walks import (
    HEADS,
    IN_TURN,
    Decayed,
    Final,
    Init,
    Overlap,
    Save,
    gates_of,
    starts_of,
    walk,
)
from keraunos.kernels.state_pool.prompts import Walk
from keraunos.kernels.state_pool.triton import passes as pool_passes
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q", "block_d", "num_warps", "num_stages")

# Dimensions of K, of V, warps, stages of the gradient of gates, which are never cut to fewer dimensions: with 32 of K
# and 64 of V, Triton 3.6 builds wrong code for Hopper.
_GRADIENT = (64, 64, 4, 3)


def forward(args: Args, opts: Options, pool: Pool | None = None) -> tuple[tuple[Array, Array | None], tuple]:
    """``((output, final_state), residuals)``: the states that parts or segments start from, where there are any.

    With a pool, which is the final state then, the arrays of tokens have no axis for the batch.
    """
    call = call_of(pool.call if pool else Args(*map(spec_of, args)), opts, shared_memory(args.query))
    q, k, v = args.query, args.key, args.value
    decayed = gates_of(call, args, call.BT)
    if decayed:
        q, k = decayed.q, decayed.k
    starts = starts_of(call, args, k, v, args.initial_state, reverse=call.reverse, decayed=decayed, pool=pool)
    save = Save.PARTS if call.M and opts.kept else Save.NOTHING
    output, final, saved, _ = walk(
        call, args, q, k, v, reverse=call.reverse, **starts, decayed=decayed, output=call.dtype,
        final=Final.SEQUENCE if opts.state else Final.NONE, save=save, pool=pool, into=pool and pool.into,
    )
    return (output, final), (saved if call.M else starts["h0"] if call.L else None,)


forward.residuals = dict(starts=starts_spec)  # type: ignore[attr-defined]


def backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args`` from those of the output and of the final state (None: zero)."""
    call = call_of(Args(*map(spec_of, args)), opts, shared_memory(args.query)).of_gradients
    q, k, v, h0 = args.query, args.key, args.value, args.initial_state
    do, dfinal = grads
    decayed = gates_of(call, args, call.K if call.shares_pairs else call.BT)
    qd = decayed.q if decayed else q
    run: dict[str, Any] = dict(reverse=not call.reverse, adjoint=True)
    begin = dict(h0=residuals[0], init=Init.PART if call.M else Init.WALK)
    if not (call.M or call.L):
        begin = starts_of(call, args, k, v, h0, reverse=call.reverse)
    ends = starts_of(call, args, qd, do, dfinal, decayed=decayed, **run)
    wanted = {} if h0 is None else dict(final=Final.SEQUENCE, state=call.specs.initial_state.dtype)
    if call.need_gate:
        dq, dk, dv, dg, dgamma, dh0 = _gradients(call, args, decayed, do, begin, ends, wanted)
    else:
        dg = dgamma = None
        query, key, value = map(call.dtype_of_each, call.specs[:3])
        dv, dh0, _, _ = walk(call, args, k, q, do, **ends, output=value, overlap=Overlap.WITH_NEXT,
                             **wanted, **run)
        dq = walk(call, args, do, v, k, reverse=call.reverse, **begin, output=query, state_t=True,
                  overlap=Overlap.WITH_LAST | Overlap.WITH_NEXT)[0]
        dk = walk(call, args, v, do, q, **ends, output=key, state_t=True, overlap=Overlap.WITH_LAST,
                  **run)[0]
    dq, dk, dv, dg = (over_shared(call, *x) for x in zip((dq, dk, dv, dg), call.specs[:4], strict=True))
    return Args(dq, dk, dv, dg, dgamma, dh0)


@remember
def _gradient_plan(
    call: Call, q: Spec, k: Spec, do: Spec, mild: bool, halved: bool, outputs: tuple, part: Part | None
) -> Plan:
    """The launch for all chunks of a part (mild: with decayed q and k), or for those that are halved."""
    v, g = call.specs.value, call.specs.g
    BK, BV, num_warps, num_stages = _GRADIENT
    num_stages = min(num_stages, 2) if call.little else num_stages
    vector = call.gate == 2
    unit = unit_of(q, k, v, do, g if vector else None)
    BH = min(pow2(call.H), HEADS) if halved else 1
    return call.plan(
        chunks.gradient_kernel, call.chunk_slots(part) * -(-call.H // BH) * -(-call.K // BK),
        dict(zip(_GRADIENTS, outputs, strict=True)), num_warps, num_stages,
        **strides_by_name(unit, q=q, k=k, v=v, o=do), **strides_by_name(unit if vector else 1, g=g),
        **call.ratios(q=q, k=k, v=v, g=g), UNIT=unit, L=call.walk,
        **(call.place(part) if part else dict(M=call.walk, F=0, W=0)), BK=BK, BV=BV, BH=BH, MILD=mild, HALVED=halved,
        DG_TERMS={"bfloat16": 1, "float16": 2}.get(call.dtype, 3), OVERLAP=IN_TURN,
    )


_GRADIENTS = ("dq", "dk", "dg")
_GIVEN = tuple(f"{name}_given" for name in _GRADIENTS)


def _gradients(call: Call, args: Args, decayed: Decayed | None, do: Array, begin: dict[str, Any], ends: dict[str, Any],
               wanted: dict[str, Any]) -> tuple:
    """``(dq, dk, dv, dg, dgamma, dh0)`` where gates have gradients, part by part, from the last one that is walked.

    Args:
        begin, ends: what the forward and the adjoint walks start from; wanted: what of the last state.
    """
    g, whole, h0 = call.specs.g, (call.B, call.T, call.H), call.specs.initial_state
    dv: Any = None
    grads: tuple[Any, ...] = (None, None, None)
    if decayed and call.shares_pairs:
        grads = (None, None, decayed.intra)
    if call.M:
        # Walks go on from each other's states, which stay in one place. The first do so too: all are the same kernel.
        shape = (call.N * -(-call.T // call.walk), call.H, call.K, call.V)
        if ends["init"] != Init.WALK:
            given = ends["init"] == Init.SEQUENCE
            ends = dict(h0=summed(ends["h0"] if given else do, 1, int(given), math.prod(shape), shape, "float32"))
        ends = dict(h0=ends["h0"], init=Init.WALK)
    parts: list[Part | None] = [*call.parts]
    for part in parts or [None]:
        final = wanted
        if part and not (part.last and call.L and wanted):
            final = dict(final=Final.WALK)
        q, k = (decayed.q, decayed.k) if decayed else (args.query, args.key)
        dv, dh0, dhs, _ = walk(
            call, args, k, q, do, reverse=not call.reverse, adjoint=True, **ends, decayed=decayed, into=dv, part=part,
            output=call.dtype_of_each(call.specs.value), save=Save.CHUNKS, overlap=Overlap.WITH_NEXT, **final,
        )
        _, _, hs, _ = walk(call, args, None, k, args.value, reverse=call.reverse, **begin, decayed=decayed,
                           save=Save.CHUNKS, part=part, overlap=Overlap.WITH_LAST | Overlap.WITH_NEXT)
        ends = dict(h0=dh0, init=Init.WALK)
        decayed, grads = _part_gradients(call, args, decayed, do, hs, dhs, grads, part)
    dq, dk, dg = grads
    if call.gate < 2:
        dtype = "float32" if call.need_gamma else call.dtype_of_each(g)
        dg = summed(dg, 1, dg.shape[0], math.prod(whole), whole, dtype)
    dgamma = _gamma_gradient(call, dg) if call.need_gamma else None
    if not call.opts.needs(args, "g"):
        dg = None
    elif call.need_gamma and call.ratio(g) == 1:
        dg = summed(dg, 1, 1, math.prod(g.shape), g.shape, g.dtype)
    if wanted and call.M and not call.L and h0.dtype != "float32":
        dh0 = summed(dh0, 1, 1, math.prod(h0.shape), h0.shape, h0.dtype)
    return dq, dk, dv, dg, dgamma, dh0 if wanted else None


def _part_gradients(call: Call, args: Args, decayed: Decayed | None, do: Array, hs: Array, dhs: Array, grads: tuple,
                    part: Part | None) -> tuple[Decayed | None, tuple]:
    """``(dq, dk, dg)`` with those of a part's chunks, from the states before and the gradients after each of them.

    Each program overwrites what no other reads: with mild vector gates its own part of the decayed q and k, and dg's
    array had the pairs of halved chunks before. Also returns what is left of these.
    """
    whole, query, key = (call.B, call.T, call.H), call.specs.query, call.specs.key
    kinds = (((*whole, call.K), call.dtype_of_each(query)), ((*whole, call.K), call.dtype_of_each(key)),
             ((*whole, call.K) if call.gate == 2 else (-(-call.K // _GRADIENT[0]), *whole), call.dg))

    def launch(q: Array, k: Array, mild: bool, halved: bool, outputs: tuple, grads: tuple) -> tuple:
        # Where k is decayed so is q.
        specs = (spec_of(q), spec_of(k)) if mild else (query, key)
        plan = _gradient_plan(call, *specs, spec_of(do), mild, halved, outputs, part)
        return plan.launch(
            q=q, k=k, v=args.value, g=args.g, gamma=args.g_gamma, sums=decayed and decayed.sums, do=do, hs=hs, dhs=dhs,
            halved=decayed and decayed.halved, **dict(zip(_GIVEN, grads, strict=True)), cu_seqlens=args.cu_seqlens,
        )

    outputs = tuple(kind if x is None else name for kind, x, name in zip(kinds, grads, _GIVEN, strict=True))
    own: dict[int, str] = {}
    if not (decayed and call.mild):
        grads = launch(args.query, args.key, False, False, outputs, grads)
    else:
        own = {i: name for i, (name, x) in enumerate(zip("qk", (query, key), strict=True)) if call.ratio(x) == 1}
        given = tuple(None if i in own else x for i, x in enumerate(grads))
        outputs = tuple(own.get(i, x) for i, x in enumerate(outputs))
        grads = launch(decayed.q, decayed.k, True, False, outputs, given)
        grads = launch(args.query, args.key, False, True, _GIVEN, grads)
    if decayed:
        decayed = decayed._replace(**{name: grads[i] for i, name in own.items()})
        if call.shares_pairs:
            decayed = decayed._replace(intra=grads[2])
    return decayed, grads


def _gamma_gradient(call: Call, dg: Array) -> Array:
    """The sum of the gates' gradients over tokens (and dimensions, and the batch if it shares the decay)."""
    gamma, D = call.specs.g_gamma, call.K if call.gate == 2 else 1
    x = summed(dg, call.B, call.T, call.H * D, (call.B, call.H, D), "float32")
    if D > 1:
        x = summed(x, call.B * call.H, D, 1, (call.B, call.H), "float32")
    M, R = (1, call.B) if len(gamma.shape) == 1 else (call.B, 1)
    return summed(x, M, R, call.H, gamma.shape, gamma.dtype)


def segment(args: Args, opts: Options) -> int | None:
    """The tokens of a segment, if rows of one length are cut into several."""
    call = call_of(Args(*map(spec_of, args)), opts)
    return call.L if call.L and not call.packed else None


def unsupported(inv: Invocation) -> str | None:
    """Why Triton cannot run the call, or None."""
    return limits.cannot_run(inv, inv.arrays["query"][0])


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """Chunks of 64 tokens; tiles of V and pipeline depth as registers and shared memory allow."""
    exact, K, V = inv.arrays["query"][0] == "float32", inv.dims["K"], inv.dims["V"]
    wide = max(K, V) > 128
    if exact or wide or inv.shared_memory < ENOUGH:
        vector = "g" in inv.arrays and inv.arrays["g"][1] == inv.arrays["key"][1]
        return replace(cfg, **four_warps(exact, wide, vector, inv.shared_memory))
    # Two warpgroups with half a state each read every input once. But where programs with half a state fill the GPU as
    # they are, and with a whole one only once sequences are cut, that pays in long sequences only.
    heads = inv.dims["N"] * inv.dims["H"]
    gates, jax = "g" in inv.arrays, inv.framework == "jax"
    # The assembler in the driver, which JAX takes, makes slower code of the narrow walks than Triton's own. Where gates
    # have gradients, and launches overlap, which they do not in JAX, the narrow are the faster at any length.
    overlaps = gates and not jax
    longest = 16384 if not jax else 8192 if gates else 2048
    narrow = 48 < heads <= 66 and (overlaps or inv.dims["T"] <= longest)
    wide = min(K, V) > 64 and not narrow
    stages = 3 if gates else 4
    return replace(cfg, block_q=64, block_d=128 if wide else 64, num_warps=8 if wide else 4, num_stages=stages)


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Tiles of 64 and 128 dimensions, and of 32 only where the heuristic takes them; see the note on _GRADIENT."""
    # A tile wider than the heads is cut to them: another name for the same program.
    widest = tile(max(inv.dims["K"], inv.dims["V"]))
    tiles = {(BV, warps) for BV, warps in ((64, 4), (128, 8)) if widest >= BV}
    return [
        replace(cfg, block_q=BT, block_d=BV, num_warps=warps, num_stages=stages)
        for BT in ((cfg.block_q,) if cfg.block_q == 16 else (32, 64))
        for BV, warps in sorted(tiles | {(cfg.block_d, cfg.num_warps)})
        for stages in (2, 3, 4)
    ]


gla, lightning_attn = (
    replace(implementation, parts=(leave, arrive))
    for implementation in implementations(
        "triton", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates,
        unsupported=unsupported, segment=segment,
    )
)
prefill = pool_passes.prefill(__file__, Walk(Args, Options, forward), FIELDS, heuristic)
