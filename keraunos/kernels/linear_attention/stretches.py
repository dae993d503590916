"""The state that a stretch of tokens leaves behind, and the decays by which older states pass it.

Rightwards, to the last token, a stretch leaves and lets pass, with ``start`` the state before it and D the sum of its
gates::

    S = exp(D) start + sum_t exp(sum of the gates after t) k_t v_t^T

and leftwards the same in the mirror. The gradient of the state is such a state too, left the other way by queries and
the outputs' gradients; there a token's own gate is among those it passes. Decays are exponentials of sums, never
differences of sums. :mod:`keraunos.kernels.recurrent.stretches` says how states join, and what a plan is.

It is in plain operations of either framework here. Where Triton's kernels can run they do it: the platform has
functions of its own, ``parts`` of its :class:`Implementation`::

    leave(x, start, plan, way, segment, copies)                  -> what leaves, and what `arrive` needs for segments
    arrive(left, start, plan, way, sizes, local, total, segment) -> the states that arrive
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from keraunos import frontends
from keraunos.frontends import interpreter
from keraunos.frontends.array_types import Array
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.recurrent import stretches
from keraunos.ops.invocation import Platform
from keraunos.ops.registry import Implementation, kernel_registry

# Stand for -inf: of a gate, and of the decay over stretches of which one begins anew. Finite, so that 0 times it is 0.
_CLOSED = _ANEW = -1e30


class Stretch(NamedTuple):
    """The arrays that a state is left by. The heads of ``key``, ``value`` and ``g`` divide H."""

    key: Any  # [B, T, heads, K]
    value: Any  # [B, T, heads, V]
    g: Any  # [B, T, heads, K] or [B, T, heads], log, <= 0, or None
    g_gamma: Any  # [H] or [B, H], log, <= 0, or None


class Way(NamedTuple):
    """The direction of a state, and what counts on its way; hashable."""

    heads: int
    right: bool  # towards the last token
    inclusive: bool  # a token's own gate is between it and the end
    scale: float = 1.0

    @property
    def adjoint(self) -> Way:
        """The way that the gradient of the state takes: to the other end."""
        return self._replace(right=not self.right, inclusive=not self.inclusive)


def _leave(x: Stretch, start: Array | None, plan: Array, way: Way) -> Array:
    """The state that a stretch leaves ``[B, H, K, V]`` and the sum of its gates ``[B, H, K]`` or ``[B, H]``, flat."""
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


def is_for_gpu(x: Array) -> bool:
    """Whether the Triton kernels make the state that arrays like the key ``x`` leave."""
    framework = frontends.framework_of(x)
    frontend = frontends.get(framework)
    if frontend.dtype_name(x) == "float64" or (x.ndim == 4 and x.shape[-1] > 256):
        return False
    there = frontend.device_of(x).backend == "gpu" or (framework == "torch" and interpreter.ON)
    return there and frontends.cannot_launch(framework) is None


def leave(x: Stretch, start: Array | None, plan: Array, way: Way, copies: int = 1, segment: int = 0) -> tuple:
    """The state and the sum of gates that a stretch leaves, flat; and what :func:`arrive` needs for segments.

    Args:
        copies: how often, more than once only on GPUs.
        segment: on a GPU, tokens of a segment; then also the states that pieces of the stretch leave, and the sums of
            their gates. 0: no segments.
    """
    if not is_for_gpu(x.key):
        return (_leave(x, start, plan, way),)
    made = _kernels()[0](x, start, plan, way, segment, copies)
    return made if segment else made[:1]


def arrive(left: Array, start: Array | None, plan: Array, way: Way, sizes: tuple[int, ...],
           pieces: Sequence[Array] = (), segment: int = 0) -> Array:
    """The state ``[B, H, K, V]`` after the stretches before this one; ``start``, or zeros, if there are none.

    Args:
        left: ``[stretches, n]``, what :func:`leave` made of each, from left to right.
        sizes: B, H, K, V.
        pieces, segment: what else it made of this one, with segments of so many tokens: then the states are those that
            these start from ``[B * segments, H, K, V]``, in the order of their tokens.
    """
    if is_for_gpu(left):
        return _kernels()[1](left, start, plan, way, sizes, *pieces, segment=segment)
    return stretches.arrive(left, start, plan, way.right, sizes, _passed)


def _passed(total: Array, state: Array) -> Array:
    """The state after a stretch whose gates have these sums; what is forgotten is nothing, even if it was no number."""
    xp = frontends.of(total).xp
    decay = xp.exp(total)[..., None]
    return xp.where(decay > 0, decay * state, 0)


def _kernels() -> tuple[Callable, Callable]:
    """The functions of the platform ``triton``."""
    parts = kernel_registry.get("gla", Platform.TRITON).parts
    assert parts
    return parts


class Transition(NamedTuple):
    """The operator of linear attention; see :mod:`keraunos.kernels.recurrent.stretches`.

    Where the platform cuts sequences into segments, the pass over their pieces that it would make serves the exchange
    too: it makes the state that the shard leaves, and with what arrives those that the segments start from.
    """

    segment: int | None
    copies: bool
    kept: bool = False

    @classmethod
    def of(cls, implementation: Implementation, args: Args, opts: Options) -> Self:
        """For calls like this one."""
        gpu, segment = is_for_gpu(args.key), None
        # Where segments start from states that are given, gradients of gates per dimension do not walk them in pairs.
        if implementation.segment and gpu and (args.g is None or args.g.ndim == 3):
            segment = implementation.segment(args, opts)
        return cls(segment, gpu)

    @property
    def started(self) -> bool:
        """Whether what arrives are the states of segments."""
        return self.segment is not None

    def ways(self, args: Args, opts: Options) -> tuple[Way, Way]:
        """Of the state and of its gradient."""
        way = Way(args.heads, not opts.reverse, False)
        return way, way.adjoint._replace(scale=opts.softmax_scale)

    def arrays(self, args: Args, doutput: Array | None = None, own: Array | None = None) -> Stretch:
        """The arrays that a pass reads."""
        if doutput is None:
            return Stretch(args.key, args.value, args.g, args.g_gamma)
        return Stretch(args.query, doutput, args.g, args.g_gamma)

    def leave(self, x: Sequence[Any], start: Array | None, plan: Array, way: Way, copies: int) -> tuple[Any, ...]:
        """The state that leaves, and what :meth:`arrive` needs of this pass."""
        return leave(Stretch(*x), start, plan, way, copies, self.segment or 0)

    def arrive(self, left: Array, start: Array | None, plan: Array, way: Way, sizes: tuple[int, ...],
               pieces: Sequence[Array]) -> Array:
        """The states that arrive."""
        return arrive(left, start, plan, way, sizes, pieces, self.segment or 0)
