"""The state that a stretch of tokens leaves behind, and what many stretches leave one after the other.

That is all that devices tell each other which share a sequence (:mod:`keraunos.distributed`). Rightwards, to the last
token, a stretch leaves and lets pass, with ``start`` the state before it and D the sum of its gates::

    S = exp(D) start + sum_t exp(sum of the gates after t) k_t v_t^T

and leftwards the same in the mirror. The gradient of the state is such a state too, left the other way by queries and
the outputs' gradients; there a token's own gate is among those it passes.

No walk: all tokens of a stretch are one sum, so pieces of it are computed at once, each relative to its own end. What
is forgotten before the stretch's end is not even read: with constant decays that is known beforehand, with gates once
the pieces near the end have been summed. Decays are exponentials of sums, never differences of sums. On NVIDIA's GPUs
these are two Triton kernels, elsewhere a matrix product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from keraunos import frontends
from keraunos.frontends import interpreter
from keraunos.frontends.array_types import Array
from keraunos.kernels.device.limits import LITTLE, precision
from keraunos.kernels.host.arrays import Spec, pow2, spec_of, strides_by_name, tile, unit_of
from keraunos.kernels.host.plan import Plan, remember

# Stand for -inf: of a gate, and of the decay over stretches of which one begins anew. Finite, so that 0 times it is 0.
_CLOSED = _ANEW = -1e30
# Programs that keep the largest GPUs busy, and so many more where constant decays leave most of them nothing to do;
# tokens that make a piece worth its while; tokens near the end before those that gates may have forgotten.
_PROGRAMS, _FORGETTING, _MIN_PIECE, _NEAR = 264, 4, 1024, 4096
# Pieces of a segment at most: those of all heads then take tens of megabytes, whatever the number of tokens.
_PIECES = 8


class Stretch(NamedTuple):
    """What leaves a state. The heads of ``key``, ``value`` and ``g`` divide H."""

    key: Any  # [B, T, heads, K]
    value: Any  # [B, T, heads, V]
    g: Any  # [B, T, heads, K] or [B, T, heads], log, <= 0, or None
    g_gamma: Any  # [H] or [B, H], log, <= 0, or None


class Way(NamedTuple):
    """Where to; hashable."""

    heads: int
    right: bool  # towards the last token
    inclusive: bool  # a token's own gate is between it and the end
    scale: float = 1.0

    @property
    def adjoint(self) -> Way:
        """The way that the gradient of the state takes: to the other end."""
        return self._replace(right=not self.right, inclusive=not self.inclusive)


# A plan is four integers on the device: the first token of the stretch that counts, one past the last, whether the
# sequence begins there (then ``start`` enters, and nothing older passes), and how many stretches lie before.


def leave(x: Stretch, start: Array | None, plan: Array, way: Way, copies: int = 1) -> Array:
    """The state that a stretch leaves ``[B, H, K, V]`` and the sum of its gates ``[B, H, K]`` or ``[B, H]``, flat.

    Args:
        x: the stretch. start: ``[B, H, K, V]`` or None, zeros. plan: four integers; way: where to.
        copies: how often to write them, one after the other; more than once only :func:`is_for_gpu` can.
    """
    return leave_pieces(x, start, plan, way, 0, copies)[0] if is_for_gpu(x.key) else _leave(x, start, plan, way)


def arrive(left: Array, start: Array | None, plan: Array, way: Way, sizes: tuple[int, ...]) -> Array:
    """The state ``[B, H, K, V]`` after the stretches before this one; ``start``, or zeros, if there are none.

    Args:
        left: ``[stretches, n]``, what :func:`leave` made of each, from left to right.
        start, plan, way: as there; sizes: B, H, K, V.
    """
    return (_arrive_on_gpu if is_for_gpu(left) else _arrive)(left, start, plan, way, sizes)


def values_left(x: Stretch, way: Way) -> int:
    """How many values :func:`leave` makes."""
    B, K, V = x.key.shape[0], x.key.shape[-1], x.value.shape[-1]
    return B * way.heads * (K * V + gates(x))


def gates(x: Stretch) -> int:
    """The sums of gates per head: 1, or K."""
    return x.key.shape[-1] if x.g is not None and x.g.ndim == 4 else 1


def is_for_gpu(x: Array) -> bool:
    """Whether the Triton kernels make the state that arrays like the key ``x`` leave."""
    framework = frontends.framework_of(x)
    frontend = frontends.get(framework)
    if frontend.dtype_name(x) == "float64" or (x.ndim == 4 and x.shape[-1] > 256):
        return False
    there = frontend.device_of(x).backend == "gpu" or (framework == "torch" and interpreter.ON)
    return there and frontends.cannot_launch(framework) is None


def _leave(x: Stretch, start: Array | None, plan: Array, way: Way) -> Array:
    """:func:`leave` in plain operations of either framework."""
    frontend = frontends.of(x.key)
    xp, (B, T), H = frontend.xp, x.key.shape[:2], way.heads
    dtype = "float64" if frontend.dtype_name(x.key) == "float64" else "float32"
    t = frontend.numbers(T, x.key)
    live = ((t >= plan[0]) & (t < plan[1]))[None, :, None, None]

    def spread(y: Array) -> Array:
        y = frontend.cast(y, dtype)[:, :, :, None]
        y = xp.broadcast_to(y, (*y.shape[:3], H // y.shape[2], y.shape[-1]))
        return xp.where(live, y.reshape(B, T, H, y.shape[-1]), 0)

    a = frontend.zeros((B, T, H, 1), dtype, x.key)
    if x.g_gamma is not None:
        a = a + frontend.cast(x.g_gamma, dtype).reshape(-1, 1, H, 1).clip(_CLOSED)
    if x.g is not None:
        a = a + spread(x.g if x.g.ndim == 4 else x.g[..., None]).clip(_CLOSED)
    a = xp.where(live, a, 0)
    total = a.sum(1)  # [B, H, 1 or K]
    passed = a
    if not way.inclusive:
        passed = frontend.pad(a[:, 1:], 1, 1) if way.right else frontend.pad(a[:, :-1], 1, 0, 1)
    passed = xp.flip(xp.cumsum(xp.flip(passed, (1,)), 1), (1,)) if way.right else xp.cumsum(passed, 1)
    key, value = spread(x.key) * xp.exp(passed), spread(x.value)
    if way.inclusive:
        # A query whose output has no gradient counts for nothing, also where 0 times it is no 0.
        key = xp.where((value != 0).any(-1)[..., None] | xp.isfinite(key), key, 0)
    state = frontend.product(xp.moveaxis(key, 1, 3), xp.moveaxis(value, 1, 2)) * way.scale
    anew = plan[2] != 0
    if start is not None:
        decay = xp.exp(total)[..., None]
        state = state + xp.where(anew & (decay > 0), decay * frontend.cast(start, dtype), 0)
    return xp.concatenate([state.reshape(-1), xp.where(anew, _ANEW, total).reshape(-1)])


def _arrive(left: Array, start: Array | None, plan: Array, way: Way, sizes: tuple[int, ...]) -> Array:
    """:func:`arrive` in plain operations of either framework."""
    frontend = frontends.of(left)
    xp, (B, H, K, V), R = frontend.xp, sizes, left.shape[0]
    state = left[:, : B * H * K * V].reshape(R, B, H, K, V)
    total = left[:, B * H * K * V :].reshape(R, B, H, -1)
    place = frontend.numbers(R, left)
    place = place if way.right else R - 1 - place
    between = (place[:, None] < place) & (place < plan[3])
    decay = xp.exp(xp.where(between[:, :, None, None, None], total, 0).sum(1))[..., None]
    before = (place < plan[3])[:, None, None, None, None]
    # What is forgotten is nothing, even if it was no number.
    state = xp.where(before & (decay > 0), decay * state, 0).sum(0)
    if start is None:
        return state
    return xp.where(plan[3] == 0, frontend.cast(start, frontend.dtype_name(state)), state)


@remember
def _leave_plans(
    k: Spec, v: Spec, g: Spec | None, gamma: Spec | None, way: Way, segment: int = 0, little: bool = False
) -> list[Plan]:
    """The launches for the pieces of a stretch, those near its end before the others.

    little: a stage less lets two programs share a multiprocessor.
    """
    from keraunos.distributed import stretches_kernels

    (B, T, _, K), V, H = k.shape, v.shape[-1], way.heads
    gate, exact = 0 if g is None else len(g.shape) - 2, k.dtype == "float32"
    BT, BK = 32 if exact else 64, tile(K)
    # Where most heads forget, the pieces of few have much to read: two programs for each, with more of it on its way.
    halves = gamma is not None and not gate
    BV = min(tile(V), 64 if BK > 128 or exact or halves else 128)
    tiles = B * H * -(-V // BV)
    most = max(_PROGRAMS * (_FORGETTING if gamma or gate else 1) // tiles, 1)
    L = max(-(-T // (min(most, max(T // _MIN_PIECE, 1)) * BT)), 1) * BT
    if segment:
        L = segment // pieces(segment)
    whole = segment or L
    P = max(-(-T // whole), 1) * (whole // L)
    near = min(-(-_NEAR // L), P) if gate and not segment else P
    unit = unit_of(k, v, g if gate == 2 else None)
    numbers = dict(
        **strides_by_name(unit, k=k, v=v), **strides_by_name(unit if gate == 2 else 1, g=g),
        stride_gamma_b=H if gamma and len(gamma.shape) == 2 else 0, scale=way.scale, T=T, L=L, P=P, NEAR=near,
        SEGMENT=segment or P * L,
    )
    outputs: dict[str, Any] = dict(
        local=((B, P, H, K, V), "float32"), total=((B, P, H, K) if gate == 2 else (B, P, H), "float32"),
        seen=((B, P, H), "int32"),
    )
    constants = dict(
        H=H, K=K, V=V, RK=H // k.shape[2], RV=H // v.shape[2], RG=H // g.shape[2] if g else 1, UNIT=unit, BT=BT,
        BK=BK, BV=BV, GATE=gate, GAMMA=gamma is not None, EXACT=exact, RIGHT=way.right, INCLUSIVE=way.inclusive,
        PRECISION=precision(exact),
    )
    warps, stages = 8 if BK * BV > 8192 else 4, 4 if halves and not (exact or little) else 3

    def plan(count: int, outputs: dict[str, Any], far: bool) -> Plan:
        return Plan(
            stretches_kernels.leave_kernel, (count * tiles,), numbers, outputs, dict(constants, FAR=far), warps, stages
        )

    plans = [plan(near, outputs, False)]
    if near < P:
        plans.append(plan(P - near, {name: f"{name}_given" for name in outputs}, True))
    return plans


@remember
def _merge_plan(sizes: tuple[int, ...], gates: int, P: int, row: int, way: Way, start: bool, copies: int = 1) -> Plan:
    """The launch that makes one state of P; row: of values to a stretch, where they come from others, else 0."""
    from keraunos.distributed import stretches_kernels

    B, H, K, V = sizes
    M, BK = B * H, 8
    numbers = dict(row=row, P=P, M=M)
    merged = sizes if row else (copies * M * (K * V + gates),)
    constants = dict(H=H, K=K, V=V, KD=gates, BK=BK, BV=pow2(V), RIGHT=way.right, START=start, BEFORE=row > 0,
                     COPIES=copies)
    return Plan(
        stretches_kernels.merge_kernel, (M * -(-K // BK),), numbers, dict(merged=(merged, "float32")), constants, 4, 4
    )


def leave_pieces(x: Stretch, start: Array | None, plan: Array, way: Way, segment: int,
                 copies: int = 1) -> tuple[Any, ...]:
    """On a GPU: what :func:`leave` gives, and what :func:`starts` needs for segments of so many tokens.

    That is the states that pieces of a stretch leave, the sums of their gates, and which have any. Pieces are in the
    order of the way, ``[B, P, H, ...]``; with ``segment`` all segments have as many, some of which may have no tokens.
    """
    k, v, g, gamma = map(spec_of, x)
    local: Any = None
    total = seen = None
    for launch in _leave_plans(k, v, g, gamma, way, segment, frontends.shared_memory(x.key) < LITTLE):
        local, total, seen = launch.launch(k=x.key, v=x.value, g=x.g, gamma=x.g_gamma, plan=plan, local_given=local,
                                           total_given=total, seen_given=seen)
    B, P, *sizes = local.shape
    merge = _merge_plan((B, *sizes), gates(x), P, 0, way, start is not None, copies)
    return merge.launch(local=local, total=total, seen=seen, start=start, plan=plan)[0], local, total, seen


def _arrive_on_gpu(left: Array, start: Array | None, plan: Array, way: Way, sizes: tuple[int, ...]) -> Array:
    (R, row), (B, H, K, V) = left.shape, sizes
    merge = _merge_plan(sizes, row // (B * H) - K * V, R, row, way, start is not None)
    return merge.launch(local=left, total=left, seen=None, start=start, plan=plan)[0]


def pieces(segment: int) -> int:
    """How many pieces a segment has: as many as are worth their while, of whole chunks."""
    most = max(min(segment // max(_MIN_PIECE, 64), _PIECES), 1)
    return next(n for n in range(most, 0, -1) if segment % (n * 64) == 0 or n == 1)


def starts(left: Array, local: Array, total: Array, seen: Array | None, start: Array | None, plan: Array, way: Way,
           segment: int) -> Array:
    """What each segment of this stretch starts from ``[B * segments, H, K, V]``, after the stretches before it.

    Segments lie in the order of their tokens.

    Args:
        left, start, plan, way: as for :func:`arrive`; local, total, seen: what :func:`leave_pieces` gave.
        segment: its tokens.
    """
    B, P, *sizes = local.shape
    launch = _starts_plan((B, *sizes), total.shape[-1] if total.ndim == 4 else 1, P, pieces(segment), left.shape[0],
                          left.shape[1], way, start is not None)
    return launch.launch(left=left, local=local, total=total, seen=seen, start=start, plan=plan)[0]


@remember
def _starts_plan(
    sizes: tuple[int, ...], gates: int, P: int, N: int, R: int, row: int, way: Way, start: bool
) -> Plan:
    """The launch; P pieces, N to a segment; R stretches, row: values of each."""
    from keraunos.distributed import stretches_kernels

    B, H, K, V = sizes
    M, BK, S = B * H, 8, P // N
    constants = dict(H=H, K=K, V=V, KD=gates, BK=BK, BV=pow2(V), RIGHT=way.right, START=start)
    return Plan(stretches_kernels.starts_kernel, (M * -(-K // BK),), dict(stride_left=row, R=R, N=N, S=S, M=M),
                dict(starts=((B * S, H, K, V), "float32")), constants, 4, 2)
