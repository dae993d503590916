"""The exchange of states between the GPUs of a host, and what is made of them, in one Pallas Mosaic GPU kernel.

In place of three steps (``stretches.py``), whose bytes are few and whose launches are not: merging what pieces of a
stretch leave, an all-to-all, and making of what arrives the states to start from. Program j of a device has a part of
one head's state, and to do with the programs j of the others only::

    the part of what the own pieces leave, from zero; on its way, what each segment starts from if nothing arrives
    write it into the memory of the devices after this one, then count up their program's number (release)
    wait until all from which something comes have counted (acquire), and make of it what arrives
    add that to what the segments start from

The memory written to is an output of the same kernel on the other device: XLA tells each where the others' outputs
are, and has all devices meet before the kernel, so that nobody writes what another still uses. Programs begin in the
order of their numbers, and none waits for one of a higher number: all that wait are waited for by nobody that must end
first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.distributed import stretches
from keraunos.distributed.stretches import Stretch, Way
from keraunos.kernels.linear_attention.pallas.decays import Decay
from keraunos.kernels.linear_attention.pallas.program import Names, launch_kernel, when
from keraunos.kernels.linear_attention.pallas.starts import local_states
from keraunos.kernels.linear_attention.pallas.walk import CHUNK, Walk, over

# Values of a program's part: eight to a thread. Tiles that are asked for before the first is used.
PART, AHEAD = 1024, 8
_LOG2E = math.log2(math.e)
# The log, base 2, of decays of which nothing is left; that over stretches of which one begins anew.
_NOTHING, _ANEW = -150.0, -1e30


def leaves(x: Stretch, segment: int) -> bool:
    """Whether :func:`leave` can be had: of constant decays, for the tensor cores, of whole segments."""
    (_, T, _, K), V = x.key.shape, x.value.shape[-1]
    if x.key.shape[2] != x.value.shape[2]:
        return False
    if not segment or T % segment or segment % CHUNK or not {K, V} <= {64, 128, 256}:
        return False
    return x.key.dtype == x.value.dtype and x.key.dtype in ("bfloat16", "float16") and x.g is None


def leave(x: Stretch, way: Way, segment: int) -> tuple[jax.Array, jax.Array, None]:
    """What pieces of segments of so many tokens leave, in place of ``stretches.leave_local``.

    XLA launches what lies side by side as one CUDA graph, but nothing of Triton's.

    Returns:
        The states, as there, not written where nothing is left at the end of the segment; in place of sums the gate of
        each token ``[H]`` or ``[B, H]``; None.
    """
    B, T, _, K = x.key.shape
    walk = Walk(T, not way.right, way.inclusive, segment // CHUNK, stretches.pieces(segment))
    gamma = jnp.zeros(way.heads) if x.g_gamma is None else jnp.asarray(x.g_gamma, jnp.float32)
    local, *_ = local_states(x.key, x.value, Decay(gamma), H=way.heads, walk=walk, plan=None, scale=way.scale, stages=3,
                             last=True)
    return local.reshape(B, -1, way.heads, K, x.value.shape[-1]), gamma, None


def hand_over(local: jax.Array, total: jax.Array, seen: jax.Array | None, start: jax.Array | None,
              plan: jax.Array | None, *, axis: str, size: int, right: bool, pieces: int | None, walked: bool,
              same: bool, tokens: int = 0) -> jax.Array:
    """What each segment of this stretch starts from ``[B * segments, H, K, V]``.

    Args:
        local, total, seen: what ``stretches.leave_local`` gave, of one gate to a head; or :func:`leave`.
        start: see ``stretches.py``. plan: as there, of packed sequences, whose ``start`` only leaves; else None.
        axis, size: of the mesh, the axis of the stretches, and how many there are.
        right: the way of the states.
        pieces: of a segment; None: there is one segment, so what arrives is the result.
        walked: segments lie in the order in which they are walked.
        same: the sums of gates are those of all stretches.
        tokens: of a piece, where :func:`leave` gave them, else 0.
    """
    (B, P, H, K, V), R = local.shape, size
    M, n = B * H, K * V
    parts = n // PART
    # Pieces are taken in groups: those of a segment, or as many as are asked for at once.
    group = pieces or min(P, AHEAD)
    groups = -(-P // group)
    S = groups if pieces else 1
    # Groups whose tiles are asked for before those of one are used.
    distance = max(AHEAD // group, 1)
    layout = plgpu.Layout.WG_STRIDED((PART,), vec_size=4)
    inputs = dict(
        local=local.reshape(B, P, H, n), total=total, seen=seen,
        start=None if start is None else start.reshape(M, n).astype(jnp.float32), plan=plan,
    )
    outputs = dict(
        starts=jax.ShapeDtypeStruct((B * S, H, n), jnp.float32),
        box=jax.ShapeDtypeStruct((R - 1, M * parts, PART), jnp.float32),
        sums=jax.ShapeDtypeStruct((R - 1, M * parts), jnp.float32),
    )

    def body(indices: tuple[jax.Array, jax.Array], _: object, *refs: Any) -> None:
        i_m, i_part = indices
        at: Any = Names(refs, inputs, outputs)
        part, i_box = pl.ds(i_part * PART, PART), i_m * parts + i_part
        i_b, i_h = over(i_m, H), lax.rem(i_m, H)
        if tokens:
            each = at.total[i_h] if total.ndim == 1 else at.total[i_b, i_h]
            # A finite stand-in for -inf.
            each = jnp.maximum(each, -1e4) * tokens
        # The program is the same on all devices: which one it is on, it is told when it runs.
        rank = lax.axis_index(axis)
        place = rank if right else R - 1 - rank
        fresh = place == 0 if plan is None else at.plan[2] != 0
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR((M * parts,))).at[i_box]
        zeros = plgpu.layout_cast(jnp.zeros((PART,), jnp.float32), layout)

        def load(ref: Any) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False)

        def where(condition: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.where(lax.broadcast_in_dim(condition, (PART,), []), x, zeros)

        def decayed(state: jax.Array, log: jax.Array) -> jax.Array:
            """What is forgotten is nothing, even if it was no number."""
            decay = jnp.exp2(log * _LOG2E)
            return where(decay > 0, state * decay)

        def piece(i: jax.Array, j: int) -> tuple[jax.Array, jax.Array]:
            """Which piece is the j-th of group i, and whether there is one."""
            p = i * group + j
            return jnp.minimum(p, P - 1), p < P

        def passed(i: jax.Array, j: int) -> jax.Array:
            """The log of its decay."""
            if tokens:
                return each
            p, there = piece(i, j)
            return jnp.where(there, at.total[i_b, p, i_h], 0.0)

        def known(i: jax.Array) -> tuple[tuple[jax.Array, jax.Array, jax.Array], ...]:
            """Of the pieces of a group: whose tile to read, whether it counts, the log of the decay."""
            i, found = jnp.minimum(i, groups - 1), []
            # What does not count is not there to be read: in its place one that is read anyway.
            nearest, _ = piece(i, group - 1)
            for j in range(group):
                p, there = piece(i, j)
                # By less than what :func:`leave` goes by: that has written what counts.
                left = (group - 1 - j) * _LOG2E * each >= _NOTHING + 1 if tokens else at.seen[i_b, p, i_h] != 0
                counts = there & left
                found.append((jnp.where(counts, p, nearest), counts, passed(i, j)))
            return tuple(found)

        def ask(pieces: tuple) -> tuple[tuple[jax.Array, jax.Array, jax.Array], ...]:
            return tuple((load(at.local.at[i_b, p, i_h, part]), counts, log) for p, counts, log in pieces)

        def slot(i: jax.Array) -> tuple:
            """Where the state has its place that segment i, in the order of the way, starts from."""
            i_slot = i if right or walked else S - 1 - i
            return (i_b * S + i_slot, i_h, part) if B > 1 else (i_slot, i_m, part)

        def gather(i: jax.Array, carry: tuple) -> tuple:
            state, log, (now, *asked), later = carry
            asked = *asked, ask(later)
            later = known(i + distance + 1)
            if S > 1:

                @when(i > 0)
                def _() -> None:
                    at.starts[slot(i)] = state

            for tile, counts, gate in now:
                state = decayed(state, gate) + where(counts, tile)
                log += gate
            return state, log, asked, later

        asked = tuple(ask(known(jnp.int32(i))) for i in range(distance))
        begin = zeros, jnp.float32(0), asked, known(jnp.int32(distance))
        state, log, *_ = lax.fori_loop(0, groups, gather, begin)
        first = zeros
        if start is not None:
            first = load(at.start.at[i_m, part])
            state = state + where(fresh, decayed(first, log))

        def wanted(d: int) -> jax.Array:
            """Whether anything is left d stretches on of what a stretch leaves."""
            return (d - 1) * _LOG2E * log >= _NOTHING if same and d > 1 else jnp.bool(True)

        def to_others(do: Callable[[int, dict], None]) -> None:
            for d in range(1, R):
                # Places are in the order of the way, the devices of the mesh in that of their tokens.
                other = {axis: place + d if right else R - 1 - place - d}
                when(place + d < R)(functools.partial(do, d, other))

        def write(d: int, other: dict) -> None:
            @when(wanted(d))
            def _() -> None:
                plgpu.remote_ref(at.box, other)[place, i_box] = state
                plgpu.remote_ref(at.sums, other)[place, i_box] = jnp.where(fresh, _ANEW, log)

        to_others(write)
        to_others(lambda d, other: pl.semaphore_signal(counter, device_id=other))

        def found(k: Any, log: jax.Array) -> tuple[list[tuple], jax.Array]:
            """Of so many segments after the first: whether what arrives counts there, its decay, what is there now."""
            segments = []
            for n in range(AHEAD):
                i = 1 + k * AHEAD + n
                for j in range(group):
                    log += passed(jnp.minimum(i, S) - 1, j)
                counts = (i < S) & (log * _LOG2E >= _NOTHING)
                where_to = slot(jnp.where(counts, i, 0))
                segments.append((counts, log, where_to, load(at.starts.at[where_to])))
            return segments, log

        def add(segments: list[tuple]) -> None:
            for counts, gates, where_to, tile in segments:

                @when(counts)
                def _(gates: jax.Array = gates, where_to: tuple = where_to, tile: jax.Array = tile) -> None:
                    at.starts[where_to] = tile + decayed(arrived, gates)

        # The first ones are read while others write.
        segments, gone = found(0, jnp.float32(0)) if S > 1 else ([], 0)
        senders: Any = [(d <= place) & wanted(d) for d in range(1, R)]
        # All count, also those that had nothing to write: nobody waits in vain, whatever the decays are.
        pl.semaphore_wait(counter, place, decrement=False)
        arrived = where(place == 0, first) if plan is None else zeros
        tiles = [load(at.box.at[jnp.maximum(place - d, 0), i_box]) for d in range(1, R)]
        for d in reversed(range(1, R)):
            gates = at.sums[jnp.maximum(place - d, 0), i_box]
            comes = lax.broadcast_in_dim(senders[d - 1], (PART,), [])
            arrived = jnp.where(comes, decayed(arrived, gates) + tiles[d - 1], arrived)
        at.starts[slot(jnp.int32(0))] = arrived
        add(segments)

        def more(k: jax.Array, log: jax.Array) -> jax.Array:
            segments, log = found(k, log)
            add(segments)
            return log

        if S - 1 > AHEAD:
            lax.fori_loop(1, -(-(S - 1) // AHEAD), more, gone)

    results = launch_kernel(
        body, inputs.values(), name="exchange", grid=(M, parts), warpgroups=1, between_warps=False, scratch_types=[],
        out_type=list(outputs.values()), barriers=True,
    )
    return results[0].reshape(B * S, H, K, V)
