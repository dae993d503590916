"""The states that a stretch leaves to other devices, and those that arrive from them, by the scan over its pieces."""

from __future__ import annotations

from keraunos.frontends import shared_memory
from keraunos.frontends.array_types import Array
from keraunos.kernels.device.limits import four_warps
from keraunos.kernels.host.arrays import spec_of, tile
from keraunos.kernels.host.plan import Plan, remember
from keraunos.kernels.host.pool import NO_POOL
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.linear_attention.stretches import Stretch, Way
from keraunos.kernels.linear_attention.triton import scan
from keraunos.kernels.linear_attention.triton.call import Call, pieces_of
from keraunos.kernels.linear_attention.triton.walks import IN_TURN, Final, gates_of, walk
from keraunos.ops.invocation import Config


@remember
def call_of_stretch(specs: Args, way: Way, segment: int, shared: int) -> Call:
    """A stretch as a call, whose pieces are those of its segments of so many tokens; 0: of one segment."""
    vector = specs.g is not None and len(specs.g.shape) == 4
    wide = max(specs.key.shape[-1], specs.value.shape[-1]) > 128
    cfg = Config(**four_warps(specs.key.dtype == "float32", wide, vector, shared))
    # The recurrence itself goes to the other end, if it is the adjoint that the way is of.
    opts = Options(way.scale, way.right == way.inclusive, cfg, ("g", "g_gamma"))
    call = Call(specs, opts, shared, way.heads)
    call.cut_stretch(segment)
    return call


def leave(x: Stretch, start: Array | None, plan: Array, way: Way, segment: int,
          copies: int) -> tuple[Array, Array, Array]:
    """The state and gates that a stretch leaves, ``copies`` times; the states and gates of its pieces."""
    args = Args(x.key, *x, None, plan)
    specs = Args(*map(spec_of, args))._replace(cu_seqlens=None)
    call = call_of_stretch(specs, way, segment, shared_memory(x.key))
    decayed, key = gates_of(call, args, 0, way.inclusive, not way.inclusive), x.key
    if decayed:
        key = decayed.q if way.inclusive else decayed.k
    _, local, _, total = walk(call, args, None, key, x.value, reverse=not way.right, adjoint=way.inclusive,
                              final=Final.STRETCH, decayed=decayed)
    sizes, T = (call.N, call.H, call.K, call.V), -(-call.T // (call.L // call.P))
    join = _join_plan(sizes, call.gate == 2, not way.right, start is not None, T, 1, True, copies=copies)
    return _join(join, local, total, start, None, plan), local, total


def arrive(left: Array, start: Array | None, plan: Array, way: Way, sizes: tuple[int, ...], local: Array | None = None,
           total: Array | None = None, segment: int = 0) -> Array:
    """The states that arrive at a stretch, or, with what pieces of its segments leave, at each of them."""
    (B, H, K, V), (R, row) = sizes, left.shape
    T, P = (local.shape[0] // B, pieces_of(segment)) if local is not None else (0, 1)
    join = _join_plan(sizes, row > B * H * (K * V + 1), not way.right, start is not None, T, P, local is not None, R=R,
                      row=row)
    return _join(join, local, total, start, left, plan)


def _join(join: Plan, local: Array | None, total: Array | None, start: Array | None, left: Array | None,
          plan: Array) -> Array:
    return join.launch(local=local, total=total, gamma=None, h0=start, cu_seqlens=None, slots=None, has_initial=None,
                       left=left, plan=plan)[0]


@remember
def _join_plan(sizes: tuple[int, ...], vector: bool, reverse: bool, init: bool, T: int, P: int, pieces: bool, *,
               copies: int = 0, R: int = 0, row: int = 0) -> Plan:
    """The launch for T pieces, P to a segment, if any; row: the values that each of R stretches has left."""
    (N, H, K, V), BK = sizes, 8
    numbers = dict(stride_gamma_b=0, T=T, N=N, L=1, P=P, R=R, stride_left=row)
    constants = dict(H=H, K=K, V=V, BK=BK, BV=tile(V), GATE=2 if vector else 0, INIT=init, GOES_ON=True, COPIES=copies,
                     LOCAL=pieces, GAMMA=False, EXACT=True, REVERSE=reverse, PACKED=False, OVERLAP=IN_TURN, **NO_POOL)
    shape = (copies * N * H * (K * V + (K if vector else 1)),) if copies else (N * max(-(-T // P), 1), H, K, V)
    return Plan(scan.combine_kernel, (N * H * -(-K // BK),), numbers, dict(starts=(shape, "float32")), constants, 4, 2)
