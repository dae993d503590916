"""The state that a stretch of tokens leaves behind, and the matrix by which older states pass it.

With M the product of ``(I - beta_t k_t k_t^T) diag(exp(g_t))`` over the stretch, for each head::

    S = M start + local            D = M^T end + scale sum_t P_t^T q_t do_t^T

D is the gradient of the state before it, and P_t the product up to token t. All of it is the recurrence itself: from
the identity and with values of 0 its last state is M, and its outputs are ``scale P_t^T q_t``.
:mod:`keraunos.kernels.recurrent.stretches` says how states join, and what a plan is.

It is in plain operations of either framework here, around a platform's forward. Triton has functions of its own,
``parts`` of its :class:`Implementation`, and Hopper's kernels take these, too. They are given a call of one stretch,
or, packed, of three of which it is the second::

    states_left(args, opts)                 -> local and M side by side [B, H, K, V + K]
    gradient_left(args, opts, doutput, end) -> D [B, H, K, V]; no end: zeros
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.gated_delta_rule.contract import GATED_DELTA_RULE, Args, Options
from keraunos.kernels.recurrent import stretches
from keraunos.kernels.recurrent.contract import state_spec
from keraunos.ops.invocation import Config, Platform
from keraunos.ops.registry import Implementation, kernel_registry


class Way(NamedTuple):
    """The direction of a state or of its gradient; hashable."""

    opts: Options
    adjoint: bool

    @property
    def right(self) -> bool:
        """Whether it goes towards the last token."""
        return self.opts.reverse == self.adjoint


class Transition(NamedTuple):
    """The operator of the gated delta rule; see :mod:`keraunos.kernels.recurrent.stretches`."""

    passes: Callable[[str], tuple[Callable, ...]]
    parts: tuple[Callable, Callable] | None
    packed: bool
    cfg: Config
    copies: bool = False
    started: bool = False
    kept: bool = True

    @classmethod
    def of(cls, implementation: Implementation, args: Args, opts: Options) -> Self:
        """For calls like this one on a platform."""
        cfg = opts.cfg
        if cfg.platform == Platform.CUDA:
            implementation = kernel_registry.get("gated_delta_rule", Platform.TRITON)
            flags = dict(use_qk_l2norm=opts.use_qk_l2norm, reverse=opts.reverse)
            inv = GATED_DELTA_RULE.describe(args, opts.softmax_scale, **flags)
            cfg = implementation.heuristic(inv, Config(platform=Platform.TRITON))
        assert implementation.passes
        return cls(implementation.passes, implementation.parts, args.cu_seqlens is not None, cfg)

    def ways(self, args: Args, opts: Options) -> tuple[Way, Way]:
        """Of the state and of its gradient."""
        opts = opts._replace(cfg=self.cfg, state=True, kept=False)
        return Way(opts, False), Way(opts, True)

    def arrays(self, args: Args, doutput: Array | None = None, own: Array | None = None) -> tuple:
        """The arrays that a pass reads."""
        return *args.tokens, doutput, own

    def leave(self, x: Sequence[Any], start: Array | None, plan: Array, way: Way, copies: int) -> tuple[Array]:
        """The state, or gradient, that a stretch leaves, and M or its transpose, flat."""
        *tokens, doutput, own = x
        args = Args(*tokens)
        frontend = frontends.of(args.query)
        xp, (B, T, _, K), H, V = frontend.xp, args.query.shape, args.heads, args.value.shape[-1]
        if self.packed:
            offsets = [plan[0] * 0, plan[0], plan[1], plan[0] * 0 + T]
            args = args._replace(cu_seqlens=frontend.stack(offsets, 0))
        states_left, gradient_left = self.parts or (self._states_left, self._gradient_left)
        begins = plan[2] != 0
        local: Any
        start = None if start is None else xp.where(begins, start, 0)
        if way.adjoint:
            t = frontend.numbers(T, args.query)
            live = ((t >= plan[0]) & (t < plan[1]))[:, None, None]
            local = gradient_left(args, way.opts, xp.where(live, doutput, 0), start)
            # Older gradients pass only where the stretch is all of the shard: it was so forward, too.
            matrix = own[B * H * K * V :].reshape(B, H, K, K).mT
        else:
            found = states_left(args, way.opts)
            local, matrix = found[..., :V], found[..., V:]
            local = local if start is None else local + _passed(matrix, start)
        return (xp.concatenate([local.reshape(-1), xp.where(begins, 0, matrix).reshape(-1)]),)

    def arrive(self, left: Array, start: Array | None, plan: Array, way: Way, sizes: tuple[int, ...],
               pieces: Sequence[Array]) -> Array:
        """The state ``[B, H, K, V]``, or gradient, after the stretches before this one."""
        return stretches.arrive(left, start, plan, way.right, sizes, _passed)

    def _states_left(self, args: Args, opts: Options) -> Array:
        return self._run(args, opts, True)[1]

    def _gradient_left(self, args: Args, opts: Options, doutput: Array, end: Array | None) -> Array:
        frontend, (queries, matrix) = frontends.of(args.query), self._run(args, opts, False)
        xp = frontend.xp
        # A query whose output has no gradient counts for nothing, also where 0 times it is no 0.
        queries = xp.where((doutput != 0).any(-1)[..., None] | xp.isfinite(queries), queries, 0)
        doutput = frontend.cast(doutput, frontend.dtype_name(queries))
        made = frontend.product(xp.moveaxis(queries, 1, 3), xp.moveaxis(doutput, 1, 2))
        return made if end is None else made + _passed(matrix.mT, end)

    def _run(self, args: Args, opts: Options, values: bool) -> tuple[Array, Array]:
        """Outputs and the last state of the values, if these are wanted, from zero; then of none from the identity."""
        frontend, ((N, H, K, V), dtype) = frontends.of(args.query), state_spec(args)
        xp, like = frontend.xp, args.query
        query, key, value = (frontend.cast(x, dtype) for x in args[:3])
        number = frontend.numbers(K, like)
        state = frontend.zeros((N, H, K, K), dtype, like) + frontend.cast(number[:, None] == number, dtype)
        none = frontend.zeros((*value.shape[:3], K), dtype, like)
        if values:
            state = xp.concatenate([frontend.zeros((N, H, K, V), dtype, like), state], -1)
            none = xp.concatenate([value, none], -1)
        args = Args(query, key, none, args.g, args.beta, state, args.cu_seqlens)
        (output, last), _ = self.passes(str(frontends.framework_of(like)))[0](args, opts)
        return output, last[1:2] if self.packed else last


def joined(parts: Any, B: int, V: int, backwards: bool = False) -> Any:
    """The state and the matrix ``[B, H, K, V + K]`` that a stretch leaves, from those of its parts ``[B * n, ...]``.

    Neighbours are joined, then pairs of them. backwards: the last part is the first on the way.
    """
    frontend = frontends.of(parts)
    parts = parts.reshape(B, -1, *parts.shape[1:])
    while (n := parts.shape[1]) > 1:
        first, second = parts[:, : n - n % 2 : 2], parts[:, 1::2]
        first, second = (second, first) if backwards else (first, second)
        both = frontend.product(second[..., V:], first)
        both = frontend.xp.concatenate([both[..., :V] + second[..., :V], both[..., V:]], -1)
        parts = frontend.xp.concatenate([both, parts[:, n - n % 2 :]], 1)
    return parts[:, 0]


def _passed(matrix: Any, state: Any) -> Any:
    """The state after a stretch with this matrix; what it forgets is nothing, even if it was no number."""
    frontend = frontends.of(state)
    matrix = matrix.reshape(*state.shape[:-1], state.shape[-2])
    state = frontend.cast(state, frontend.dtype_name(matrix))
    return frontend.product(matrix, frontend.xp.where((matrix != 0).any(-2)[..., None], state, 0))
