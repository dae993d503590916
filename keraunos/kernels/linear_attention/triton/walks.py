"""Launches that the passes of linear attention are made of: walks over sequences, where these start, gates."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

from keraunos.frontends.array_types import Array
from keraunos.kernels.host.arrays import Spec, pow2, spec_of, strides_by_name, tile, unit_of
from keraunos.kernels.host.plan import Plan, remember
from keraunos.kernels.host.pool import NO_POOL, NO_STATES, Pool
from keraunos.kernels.linear_attention.contract import Args
from keraunos.kernels.linear_attention.triton import chunks, scan
from keraunos.kernels.linear_attention.triton.call import Call, Part

# Tiles and launch options: dimensions of K, warps, stages of the kernel that halves; of V, warps, stages of walks that
# make states only.
_HALVING = (64, 4, 1)
_STATES = (64, 4, 3)
# Stages of a walk of four warps that leave room on its multiprocessor for another.
_SHARING = 3
# Heads that one program looks at, to find chunks with strong gates.
HEADS = 8


class Init(IntEnum):
    """The state that a walk starts from: zeros, or that of its sequence, walk or part."""

    ZERO, SEQUENCE, WALK, PART = range(4)


class Final(IntEnum):
    """The final states that a walk writes: none, or those of sequences, pieces or walks."""

    NONE, SEQUENCE, PIECE, WALK, STRETCH = range(5)


class Save(IntEnum):
    """The places before which a walk writes the state down."""

    NOTHING, CHUNKS, PARTS = range(3)


class Overlap(IntFlag):
    """Which of two launches may run side by side: see ``recurrence.in_turn``.

    A walk of few programs leaves most of the GPU to another one. WITH_LAST: neither reads what the other writes, and
    what the first reads must live until the second ends. WITH_NEXT: the next one is such a launch, or waits itself:
    AFTER_LAST, as all do that are not WITH_LAST.
    """

    NONE, WITH_NEXT, WITH_LAST, AFTER_LAST = 0, 1, 2, 4


# Programs are there when the launch before theirs ends, and wait for that; so may those of the next. Not so where it
# matters that programs spread over all multiprocessors: those that come early go where there is room first.
IN_TURN = int(Overlap.WITH_NEXT | Overlap.AFTER_LAST)


@remember
def _scan_plan(call: Call, q: Spec | None, k: Spec, v: Spec, *, reverse: bool, adjoint: bool, init: Init,
               final: Final, state: str, output: str | None, into: bool, save: Save, part: Part | None, state_t: bool,
               width: int, pool: Pool | None, overlap: Overlap) -> Plan:
    H, cfg = call.H, call.cfg
    K, V = k.shape[-1], v.shape[-1]
    BV, num_warps, num_stages = min(cfg.block_d, tile(V)), cfg.num_warps, cfg.num_stages
    if q is None:
        BV, num_warps, num_stages = min((BV, num_warps, num_stages), (*_STATES[:2], min(num_stages, _STATES[2])))
    if overlap and num_warps == 4:
        num_stages = min(num_stages, _SHARING)
    pieces, goes_on = final in (Final.PIECE, Final.STRETCH), final == Final.STRETCH
    split = pieces or (call.L > 0 and init != Init.SEQUENCE)
    length = call.L // call.P if pieces else call.L
    slots = call.slots(length) if split else call.N
    walks = part.walks if part else slots
    like_q = q or k
    g = call.specs.g if call.gate == 1 else None
    unit = unit_of(like_q, k, v)
    if not overlap & Overlap.WITH_LAST:
        overlap |= Overlap.AFTER_LAST
    ends = (call.N if final == Final.SEQUENCE else slots, H)
    saved = 0
    if save:
        whole = slots + slots % 2 if call.in_pairs else slots
        saved = call.chunk_slots(part) if save == Save.CHUNKS else whole * (-(-call.walk // call.M))
    save = save if saved else Save.NOTHING
    outputs: dict[str, Any] = dict(
        o=None if q is None else "into" if into else ((call.B, call.T, H, V), output),
        ht="h0" if final == Final.WALK else ((*ends, V, K) if state_t else (*ends, K, V), state) if final else None,
        hs=((saved, H, K, V), call.dtype) if saved else None,
        total=((slots, H, K) if call.gate == 2 else (slots, H), "float32")
        if pieces and (call.gate or goes_on) else None,
    )
    own = dict(
        **call.ratios(q=like_q, k=k, v=v, g=g), **strides_by_name(unit, "bh", q=like_q, k=k, v=v),
        **strides_by_name(1, "t", q=like_q, k=k, v=v), **strides_by_name(g=g), UNIT=unit, K=K, V=V, BK=tile(K), BV=BV,
        L=length, P=call.P, **call.place(part), ROWS=pool.T if pool else 0, REVERSE=reverse, ADJOINT=adjoint,
        SPLIT=split, PART=part is not None, WIDTH=width, INIT=int(init), FINAL=int(final), OUTPUT=q is not None,
        SAVE=int(save), STATE_T=state_t, EXPORT=pool is not None and pool.exports is not None, OVERLAP=int(overlap),
        **(pool.flags() if pool else NO_POOL),
    )
    if pool:
        # The states are not made, but put where they came from.
        outputs["ht"] = "pool"
        outputs["o"] = outputs["o"] if into else ((pool.T, H, V), output)
    return call.plan(scan.scan_kernel, walks * H * -(-V // BV), outputs, num_warps, num_stages, **own)


def walk(call: Call, args: Args, q: Array | None, k: Array, v: Array, *, reverse: bool, adjoint: bool = False,
         h0: Array | None = None, init: Init = Init.ZERO, decayed: Decayed | None = None,
         final: Final = Final.NONE, state: str = "float32", output: str | None = None, into: Array | None = None,
         save: Save = Save.NOTHING, part: Part | None = None, state_t: bool = False, pool: Pool | None = None,
         overlap: Overlap = Overlap.NONE) -> tuple:
    """One walk of ``scan_kernel`` over the queries q, keys k and values v (None q: only states are wanted).

    Args:
        reverse: from the last token to the first; adjoint: with the gradient of the state.
        h0, init: the states to start from.
        decayed: where the gates are vectors.
        final, state: the final states that are wanted, their dtype; those of pieces of segments are from zero.
        output: its dtype; into: an array to write it into.
        save: states that are written down.
        part: walk only this part.
        state_t: states are transposed in memory.
        pool: where the states of sequences are.
        overlap: whether the launch before or after this one may run at the same time.

    Returns:
        ``(output, final states, states written down, sums of the gates)``.
    """
    q_spec, k_spec, v_spec = (
        known if x is own else spec_of(x) for x, own, known in zip((q, k, v), args[:3], call.specs[:3], strict=True)
    )
    plan = _scan_plan(
        call, q_spec, k_spec, v_spec, reverse=reverse, adjoint=adjoint, init=init, final=final, state=state,
        output=output, into=into is not None, save=save, part=part, state_t=state_t,
        width=decayed.intra.shape[-1] if decayed and decayed.intra is not None else 0, pool=pool and pool.specs(),
        overlap=overlap,
    )
    # Triton would build other code for absent arrays.
    return plan.launch(
        q=k if q is None else q, k=k, v=v, g=args.g if call.gate == 1 else None, gamma=args.g_gamma,
        sums=decayed and decayed.sums, halved=decayed and decayed.halved, intra=decayed and decayed.intra,
        h0=h0, into=v if into is None else into, cu_seqlens=args.cu_seqlens, **(pool or NO_STATES).arrays(),
    )


@remember
def _combine_plan(call: Call, K: int, V: int, reverse: bool, init: bool, pool: Pool | None = None) -> Plan:
    BK, outputs = 8, dict(starts=((call.slots(call.L), call.H, K, V), "float32"))
    return call.plan(scan.combine_kernel, call.N * call.H * -(-K // BK), outputs, 4, 2, L=call.L // call.P, P=call.P,
                     R=0, stride_left=0, K=K, V=V, BK=BK, BV=tile(V), INIT=init, GOES_ON=False, COPIES=0, LOCAL=True,
                     REVERSE=reverse, OVERLAP=IN_TURN, **(pool.flags() if pool else NO_POOL))


def starts_of(call: Call, args: Args, k: Array, v: Array, h0: Array | None, *, reverse: bool, adjoint: bool = False,
              decayed: Decayed | None = None, pool: Pool | None = None) -> dict[str, Any]:
    """The states that walks start from: where sequences are cut, those of their segments ``[slots, H, K, V]``."""
    if not call.L and pool:
        return dict(h0=None, init=Init.SEQUENCE)
    if not call.L:
        return dict(h0=h0, init=Init.ZERO if h0 is None else Init.SEQUENCE)
    if call.opts.started:
        return dict(h0=h0, init=Init.WALK)
    _, local, _, total = walk(call, args, None, k, v, reverse=reverse, adjoint=adjoint, final=Final.PIECE,
                              decayed=decayed)
    plan = _combine_plan(call, k.shape[-1], v.shape[-1], reverse, h0 is not None, pool and pool.specs())
    given = pool or NO_STATES
    (starts,) = plan.launch(local=local, total=total, gamma=args.g_gamma, h0=h0 if pool is None else pool.states,
                            cu_seqlens=args.cu_seqlens, slots=given.slots, has_initial=given.has_initial, left=None,
                            plan=None)
    return dict(h0=starts, init=Init.WALK)


class Decayed(NamedTuple):
    """The results of ``decay_kernel`` for vector gates, and the pairs of the chunks that are halved."""

    q: Any
    k: Any
    sums: Any
    halved: Any
    intra: Any = None


@remember
def _decay_plan(call: Call, queries: bool, keys: bool) -> Plan:
    BK, decayed = tile(call.K), ((call.B, call.T, call.H, call.K), call.dtype)
    outputs: dict[str, Any] = dict(
        qd=decayed if queries else None, kd=decayed if keys else None,
        sums=((call.chunks, call.H, call.K), "float32"),
        halved=((call.chunks, call.H), "int32") if call.mild > 0 else None,
    )
    return call.plan(chunks.decay_kernel, call.chunks * call.H, outputs, max(BK // 128, 1), 1, BK=BK, QUERIES=queries,
                     KEYS=keys, **_gated(call))


@remember
def _halving_plan(call: Call, width: int) -> Plan:
    BK, num_warps, num_stages = _HALVING
    BH = min(pow2(call.H), HEADS)
    outputs = dict(intra=((call.B, call.T, call.H, width), call.dtype))
    return call.plan(chunks.halving_kernel, call.chunks * -(-call.H // BH), outputs, num_warps, num_stages, WIDTH=width,
                     BK=min(tile(call.K), BK), BH=BH, **_gated(call))


def _gated(call: Call) -> dict[str, Any]:
    """The arguments of the kernels that work gates into q and k."""
    arrays = dict(q=call.specs.query, k=call.specs.key, g=call.specs.g)
    unit = unit_of(*arrays.values())
    return dict(**strides_by_name(unit, **arrays), **call.ratios(**arrays), UNIT=unit, OVERLAP=IN_TURN)


def gates_of(call: Call, args: Args, width: int, queries: bool = True, keys: bool = True) -> Decayed | None:
    """Vector gates, worked into q and k in parallel over chunks; None where there are none.

    width: of ``intra``, 0: no pairs are wanted. queries, keys: which of q and k are.
    """
    if call.gate != 2:
        return None
    arrays = dict(q=args.query, k=args.key, g=args.g, gamma=args.g_gamma)
    made = _decay_plan(call, queries, keys).launch(**arrays, cu_seqlens=args.cu_seqlens)
    intra = None
    if width:
        (intra,) = _halving_plan(call, width).launch(**arrays, halved=made[-1], cu_seqlens=args.cu_seqlens)
    return Decayed(*made)._replace(intra=intra)
