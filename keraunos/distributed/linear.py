"""Recurrences over shards of a sequence: what devices exchange is one state per head, not keys and values.

Each device computes the state that its tokens leave, all gather these with what their tokens do to older states, which
a family's table tells, each makes of them the state that arrives at its own tokens, and then the call is a local one
with that initial state. The gradient is the same with what goes the other way: the gradient of the state, left by
queries and the output's gradients.

Of packed sequences only the one that crosses a border between shards leaves or takes a state there. Every device calls
with all of them; those that have no token here are empty. A sequence's final state is known where it ends, and summed
over the devices where it is asked for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels import FAMILIES
from keraunos.kernels.linear_attention import contract
from keraunos.kernels.linear_attention.contract import Decay
from keraunos.kernels.recurrent.contract import most_heads
from keraunos.modules.linear_operation import LinearOperation
from keraunos.ops import checks
from keraunos.ops.executor import default_executor
from keraunos.ops.family import named
from keraunos.ops.invocation import Config, Invocation

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P
    from torch.distributed import ProcessGroup


def shards_of(framework: str) -> ModuleType:
    """The module of a framework that knows its devices or ranks."""
    return importlib.import_module(f"keraunos.distributed.{framework}.shards")


class _Where(NamedTuple):
    """The other shards: the framework, the group or the axis, and how many there are: axes may share their name."""

    framework: str
    name: Any
    size: int
    fixed: bool = False  # the decay per head has no gradient, even if it is an array

    @property
    def frontend(self) -> ModuleType:
        return shards_of(self.framework)


class _Borders:
    """Which sequences lie at the borders of this shard; "right" is the way of a state, towards the last token."""

    def __init__(self, args: Any, shards: Any):
        self.shards, self.like, self.cu = shards, args.query, args.cu_seqlens
        self.T = args.query.shape[1]
        self.frontend = frontends.of(args.query)
        if self.cu is None:
            return
        cu = self.cu
        self.N, self.begin = cu.shape[0] - 1, shards.first_token(self.T, cu)
        self.end = self.begin + self.T
        # The sequences of the shard's first and last token.
        self.first = (cu[1:] <= self.begin).sum().clip(None, self.N - 1)
        self.last = ((cu[:-1] < self.end).sum() - 1).clip(0, None)

    def place(self, right: bool) -> int | Array:
        """How many shards a state has passed before this one."""
        return self.shards.rank if right else self.shards.size - 1 - self.shards.rank

    def leaving(self, states: Array | None, right: bool) -> tuple[Any, Any]:
        """``(start, plan)`` for a stretch: of the sequence that goes on at the border, its tokens here."""
        place = self.place(right)
        if self.cu is None:
            return states, self.shards.numbers((0, self.T, place == 0, place), self.like)
        cu, n = self.cu, self.last if right else self.first
        low, high = (cu[n] - self.begin, self.T) if right else (0, cu[n + 1] - self.begin)
        begins = cu[n] >= self.begin if right else cu[n + 1] <= self.end
        plan = (n * 0 + low).clip(0, self.T), (n * 0 + high).clip(0, self.T), begins, n * 0 + place
        plan = self.frontend.stack([self.frontend.cast(x, "int32") for x in plan], 0)
        return None if states is None else states[n][None], plan

    def _arrives(self, right: bool) -> Array:
        """Which of the sequences ``[N, 1, 1, 1]`` takes the state that arrives."""
        cu, (n, border) = self.cu, (self.first, self.begin) if right else (self.last, self.end)
        # At the border of a shard without tokens may be none.
        crosses = (cu[n] < border) & (cu[n + 1] > border)
        return ((self.frontend.numbers(self.N, self.like) == n) & crosses)[:, None, None, None]

    def taking(self, states: Array | None, arrived: Array, right: bool) -> Array:
        """The states to start from: what has arrived, and of sequences that begin here their own (None: zeros)."""
        if self.cu is None:
            return arrived
        own = 0 if states is None else self.frontend.cast(states, self.frontend.dtype_name(arrived))
        return self.frontend.xp.where(self._arrives(right), arrived, own)

    def of_own(self, states: Array, right: bool) -> Array:
        """Without the row that was taken from what arrived."""
        if self.cu is None:
            return self._only(self.place(right) == 0, states)
        return self.frontend.xp.where(self._arrives(right), 0, states)

    def ending(self, states: Array, right: bool) -> Array:
        """Of the states those of the sequences that end here; zeros for the others."""
        if self.cu is None:
            return self._only(self.place(not right) == 0, states)
        cu, begin, end = self.cu, self.begin, self.end
        # One without tokens ends on exactly one device, too.
        ends = (cu[1:] > begin) & (cu[1:] <= end) if right else (cu[:-1] >= begin) & (cu[:-1] < end)
        at_edge = (cu[1:] == 0) if right else (cu[:-1] == cu[-1])
        ends = ends | (at_edge & (self.place(right) == 0))
        return self.frontend.xp.where(ends[:, None, None, None], states, 0)

    def _only(self, here: bool | Array, states: Array) -> Array:
        if isinstance(here, bool):
            return states if here else self.frontend.xp.zeros_like(states)
        return self.frontend.xp.where(here, states, 0)

    def local(self, args: Any, states: Array) -> Any:
        """The call on the tokens that are here."""
        cu = self.cu
        if cu is not None:
            cu = self.frontend.cast((cu - self.begin).clip(0, self.T), self.frontend.dtype_name(cu))
        return args._replace(initial_state=states, cu_seqlens=cu)


@functools.cache
def _sharded(framework: str, passes: Callable[[str], tuple[Callable, ...]], transition: Any) -> Callable:
    """``prepare(opts, shards, args)`` of a platform's forward and backward: ``args -> outputs``, with a gradient.

    transition: what a shard does to a state; see :mod:`keraunos.kernels.recurrent.stretches`.
    """
    frontend = shards_of(framework)
    remembered = frontend.remembered
    platform_forward, platform_backward = passes(framework)

    # In PyTorch the host code of what only launches kernels runs once for calls that are alike. If that is not all that
    # a call does, which the front end looks at, it still is of these parts.
    @functools.lru_cache(maxsize=4096)
    def leave(way: Any, copies: int) -> Callable:
        def launch(flat: list) -> tuple:
            *x, start, plan = flat
            return transition.leave(x, start, plan, way, copies)

        return remembered(launch)

    @functools.lru_cache(maxsize=4096)
    def arrive(way: Any, sizes: tuple[int, ...]) -> Callable:
        def launch(flat: list) -> tuple:
            left, start, plan, *pieces = flat
            return (transition.arrive(left, start, plan, way, sizes, pieces),)

        return remembered(launch)

    @functools.lru_cache(maxsize=4096)
    def run_forward(kind: Any, opts: Any) -> Callable:
        def launch(flat: list) -> tuple:
            outputs, residuals = platform_forward(kind(*flat), opts)
            return (*outputs, *residuals)

        return remembered(launch)

    @functools.lru_cache(maxsize=4096)
    def run_backward(kind: Any, opts: Any) -> Callable:
        n = len(kind._fields)
        return remembered(
            lambda flat: tuple(platform_backward(kind(*flat[:n]), tuple(flat[n:-2]), tuple(flat[-2:]), opts))
        )

    def kind_of(args: Any) -> Any:
        return type(args)

    def started(opts: Any) -> Any:
        return opts._replace(started=True) if transition.started else opts

    def exchange(borders: _Borders, args: Any, x: tuple, states: Array | None, way: Any) -> tuple[Array, Array | None]:
        """The state that arrives at this shard, those that its segments start from if it is cut; and what it left."""
        (B, _, _, K), V = args.query.shape, args.value.shape[-1]
        if not B:
            # There is no state: no kernel has a program, and no exchange anything to say.
            dtype = "float64" if borders.frontend.dtype_name(args.query) == "float64" else "float32"
            return borders.frontend.zeros((0, args.heads, K, V), dtype, args.query), None
        start, plan = borders.leaving(states, way.right)
        shards = borders.shards
        copies = shards.copies if transition.copies else 1
        own, *pieces = leave(way, copies)([*x, start, plan])
        left = shards.gather(own.reshape(copies, -1) if copies > 1 else own, way.right)
        start = start if borders.cu is None else None
        return arrive(way, (B, args.heads, K, V))([left, start, plan, *pieces])[0], own

    def forward(args: Any, opts: Any, shards: Any) -> tuple[tuple[Array, Array | None], tuple]:
        borders, (to, _) = _Borders(args, shards), transition.ways(args, opts)
        arrived, own = exchange(borders, args, transition.arrays(args), args.initial_state, to)
        states = borders.taking(args.initial_state, arrived, to.right)
        output, final, *residuals = run_forward(kind_of(args), started(opts))([*borders.local(args, states)])
        final = borders.ending(final, to.right) if opts.state else None
        return (output, final), (states, own if transition.kept else None, *residuals)

    def backward(args: Any, residuals: tuple, grads: tuple, opts: Any, shards: Any) -> Any:
        borders, (to, back) = _Borders(args, shards), transition.ways(args, opts)
        doutput, dfinal = grads
        if dfinal is not None:
            dfinal = borders.ending(dfinal, to.right)
        states, own, *kept = residuals
        arrived, _ = exchange(borders, args, transition.arrays(args, doutput, own), dfinal, back)
        dstates = borders.taking(dfinal, arrived, back.right)
        doutput, dstates = borders.shards.together(doutput, dstates)
        local = [*borders.local(args, states), *kept, doutput, dstates]
        kind = kind_of(args)
        made = kind(*run_backward(kind, started(opts))(local))
        dinitial = args.initial_state
        if dinitial is not None:
            dinitial = borders.of_own(made.initial_state, to.right)
            dinitial = borders.frontend.cast(dinitial, borders.frontend.dtype_name(args.initial_state))
        return made._replace(initial_state=dinitial, cu_seqlens=None)

    return frontend.differentiable(forward, backward)


class _OverShards(LinearOperation):
    """An operation on shards. To the tuner it is the operation itself: whom it measures, it measures alone.

    Attributes:
        transition: its family's class.
    """

    transition: Any

    def bind(self, *args: Array | None, where: _Where | None = None, **options: Any) -> Invocation:
        """See :meth:`Kernel.bind`."""
        operation: Any = super()
        return operation.bind(*args, **options)

    def checker(self, *args: Array | None, where: _Where | None = None, **options: Any) -> Callable | None:
        """See :meth:`Kernel.checker`."""
        return super().checker(*args, whole=where is None or where.size == 1)

    def prepare(self, *args: Array | None, cfg: Config, where: _Where | None = None, **options: Any) -> Callable:
        """A function of the arguments that gives another one, which makes the call: so all checks come first."""
        alone = super().prepare(*args, cfg=cfg, **options)
        if where is None:
            return alone
        shards = where.frontend.shards(self.op_id, where.name)
        if shards.size == 1:
            return lambda *args: functools.partial(alone, *args)
        given, impl = self.pack(*args), self.get_impl(cfg)
        assert impl.options
        opts = impl.options(given, cfg, options.pop("return_state"), **options)
        opts = opts._replace(constant=("g_gamma",)) if where.fixed else opts
        transition = self.transition.of(impl, given, opts)
        call = _sharded(where.framework, impl.passes, transition)(opts, shards, given)
        check = shards.checker(**_description(self.op_id, given, opts))

        def agreed(args: tuple) -> Any:
            check()
            return call(self.pack(*args))

        return lambda *args: functools.partial(agreed, args)


def _description(op_id: str, args: Any, opts: Any) -> dict[str, Any]:
    """The properties that all ranks must share. The lengths of shards may differ."""
    frontend = frontends.of(args.query)
    own = ("cfg", "constant", "state", "kept", "started")  # of each rank
    options = {name: x for name, x in opts._asdict().items() if name not in own}
    what = {"op": op_id, **options, "return_state": opts.state}
    for name, x in args._asdict().items():
        if x is not None:
            tokens = name in args._fields[: len(args.tokens)]
            shape = tuple("T" if tokens and i == 1 else n for i, n in enumerate(x.shape))
            dtype = x.dtype.name if isinstance(x, np.ndarray) else frontend.dtype_name(x)
            what[name] = f"{dtype} ({', '.join(map(str, shape))})"
    return what


# Public name -> the operation on shards.
_OPERATIONS: dict[str, Any] = {
    operation.function: type(operation.function, (_OverShards, type(operation.kernel)),
                             {"transition": named(family.transition), "__doc__": _OverShards.__doc__})()
    for family in FAMILIES if family.transition for operation in family.operations if operation.distributed
}


def run(name: str, arrays: tuple, where: tuple, options: dict[str, Any], fixed: bool = False) -> Any:
    """Check the call, then make it; the arrays are the operation's.

    Args:
        where: the public functions' axis_name, group, mesh and spec.
        fixed: the decay per head has no gradient.
    """
    axis_name, group, mesh, spec = where
    framework = frontends.framework_of(arrays[0])
    if framework is None:
        raise TypeError(f"{name}: query is {type(arrays[0]).__qualname__}; expected {frontends.arrays()}")
    mine, others = (group, (axis_name, mesh)) if framework == "torch" else (axis_name, (group,))
    if any(x is not None for x in others) or (framework == "jax" and (axis_name is None) == (mesh is None)):
        wanted = {"torch": "group=, or none for all ranks", "jax": "axis_name= inside shard_map, or mesh= and spec="}
        raise ValueError(
            f"{name}: axis_name is {axis_name!r}, group {group!r}, mesh {mesh!r}; expected {wanted[framework]}"
        )
    if mesh is not None:
        from keraunos.distributed.mesh import over_mesh

        T = arrays[0].shape[1] if arrays[0].ndim == 4 else None
        arrays = (*arrays[:-1], checks.placed(name, arrays[-1], arrays[0], T))
        # Inside, values are traced.
        if check := _OPERATIONS[name].checker(*arrays):
            check(*arrays)
        output, state = over_mesh(run, name, _OPERATIONS[name], mesh, spec, arrays, options)
    else:
        frontend = shards_of(framework)
        place = frontend.place(mine)
        with frontend.arguments(place):
            arrays = (*arrays[:-1], checks.placed(name, arrays[-1], arrays[0], None))
            here = _Where(framework, place, frontend.shards(name, place).size, fixed)
            call = default_executor()(_OPERATIONS[name], *arrays, where=here, **options)
        output, state = call()
    return (output, state) if options["return_state"] else output


@frontends.outside_graphs
def gla_attention(
    query: Array,
    key: Array,
    value: Array,
    g: Array | None = None,
    g_gamma: Decay | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    *,
    axis_name: Hashable | None = None,
    group: ProcessGroup | None = None,
    mesh: Mesh | None = None,
    spec: P | None = None,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: str | None = None,
    cfg: Config | None = None,
) -> Any:
    """:func:`keraunos.gla_attention` of sequences whose tokens are spread over devices, in the order of their ranks.

    Devices exchange the state ``[K, V]`` per head that each leaves and the sum of its gates, once forward and once
    backward; with ``return_state`` the final states too. Nothing that they exchange grows with T.

    Args:
        query, key, value, g: this device's tokens, ``[B, T_r, ...]``. In PyTorch shards may differ in length and be
            empty; with ``cu_seqlens`` all but the last rank's must have the same length.
        g_gamma: the same on all devices.
        initial_state: ``[N, H, K, V]``, of the whole sequences; the same on all devices.
        cu_seqlens: ``[N + 1]``, offsets into the whole row; the same on all devices.
        axis_name: JAX, inside ``shard_map``: the mesh axis that the tokens are sharded over.
        group: PyTorch: the process group; None: the default one.
        mesh, spec: JAX, outside of ``shard_map``: the arrays are whole then, any T, and are sharded over the mesh as
            ``spec``, ``P(batch, tokens, heads)``, says of the query.
        softmax_scale, reverse, return_state, platform, cfg: see :func:`keraunos.gla_attention`.

    Returns:
        This device's tokens of the output, or ``(output, final_state)``, the state of the whole sequences, on every
        device. The sum of the losses of all devices is differentiated. In PyTorch the gradients of g_gamma and
        initial_state are this rank's part: the ranks' sum is the whole, as for any parameter that ranks share.

    Raises:
        ValueError, TypeError: see :func:`keraunos.gla_attention`; in PyTorch on all ranks.
        DisagreementError, RankFailedError: see :mod:`keraunos.distributed.agreement`.

    Example:
        >>> import jax, jax.numpy as jnp, keraunos
        >>> from jax.sharding import PartitionSpec as P
        >>> q = jnp.ones((1, 100, 2, 16))
        >>> mesh = jax.make_mesh((1,), ("sequence",))
        >>> keraunos.distributed.gla_attention(q, q, q, mesh=mesh, spec=P(None, "sequence")).shape
        (1, 100, 2, 16)
    """
    g_gamma = contract.per_head("gla_attention", query, "g_gamma", g_gamma)
    arrays = query, key, value, g, g_gamma, initial_state, cu_seqlens
    options = dict(softmax_scale=softmax_scale, reverse=reverse, return_state=bool(return_state), platform=platform,
                   _cfg=cfg)
    return run("gla_attention", arrays, (axis_name, group, mesh, spec), options)


@frontends.outside_graphs
def lightning_attention(
    query: Array,
    key: Array,
    value: Array,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    *,
    axis_name: Hashable | None = None,
    group: ProcessGroup | None = None,
    mesh: Mesh | None = None,
    spec: P | None = None,
    layer_idx: int | Array | None = None,
    num_layers: int | None = None,
    log_decay: Decay | None = None,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: str | None = None,
    cfg: Config | None = None,
) -> Any:
    """:func:`keraunos.lightning_attention` of sequences whose tokens are spread over devices.

    Args:
        query, key, value, initial_state, cu_seqlens: see :func:`gla_attention`.
        axis_name, group, mesh, spec: see there.
        layer_idx, num_layers, log_decay, softmax_scale, reverse, return_state, platform, cfg: see
            :func:`keraunos.lightning_attention`. Where heads are sharded too, each device passes ``log_decay`` of its
            own; with ``mesh`` that is done here.

    Returns:
        See :func:`gla_attention`.

    Raises:
        ValueError, TypeError: see :func:`keraunos.lightning_attention`; in PyTorch on all ranks.
        DisagreementError, RankFailedError: see :mod:`keraunos.distributed.agreement`.

    Example:
        >>> import jax, jax.numpy as jnp, keraunos
        >>> from jax.sharding import PartitionSpec as P
        >>> q = jnp.ones((1, 100, 2, 16))
        >>> mesh = jax.make_mesh((1,), ("sequence",))
        >>> shape = dict(mesh=mesh, spec=P(None, "sequence"), layer_idx=0, num_layers=4)
        >>> keraunos.distributed.lightning_attention(q, q, q, **shape).shape
        (1, 100, 2, 16)
    """
    heads = most_heads(query, key, value)
    log_decay = contract.constant_decay("lightning_attention", query, heads, layer_idx, num_layers, log_decay)
    arrays = query, key, value, log_decay, initial_state, cu_seqlens
    options = dict(softmax_scale=softmax_scale, reverse=reverse, return_state=bool(return_state), platform=platform,
                   _cfg=cfg)
    return run("lightning_attention", arrays, (axis_name, group, mesh, spec), options)


@frontends.outside_graphs
def gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    g: Array | None = None,
    beta: Array | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    *,
    axis_name: Hashable | None = None,
    group: ProcessGroup | None = None,
    mesh: Mesh | None = None,
    spec: P | None = None,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
    reverse: bool = False,
    return_state: bool = False,
    platform: str | None = None,
    cfg: Config | None = None,
) -> Any:
    """:func:`keraunos.gated_delta_rule` of sequences whose tokens are spread over devices, in the order of their ranks.

    Devices exchange the state ``[K, V]`` per head that each leaves and the matrix ``[K, K]`` by which older states pass
    its tokens, once forward and once backward; with ``return_state`` the final states too. Nothing is left out, however
    strong the gates, and nothing that they exchange grows with T.

    Args:
        query, key, value, g, beta: this device's tokens, ``[B, T_r, ...]``; see :func:`gla_attention`.
        initial_state, cu_seqlens: see there.
        axis_name, group, mesh, spec: see there.
        softmax_scale, use_qk_l2norm, reverse, return_state, platform, cfg: see :func:`keraunos.gated_delta_rule`.

    Returns:
        See :func:`gla_attention`.

    Raises:
        ValueError, TypeError: see :func:`keraunos.gated_delta_rule`; in PyTorch on all ranks.
        DisagreementError, RankFailedError: see :mod:`keraunos.distributed.agreement`.

    Example:
        >>> import jax, jax.numpy as jnp, keraunos
        >>> from jax.sharding import PartitionSpec as P
        >>> q, beta = jnp.ones((1, 100, 2, 16)), jnp.ones((1, 100, 2)) / 2
        >>> mesh = jax.make_mesh((1,), ("sequence",))
        >>> options = dict(use_qk_l2norm=True, mesh=mesh, spec=P(None, "sequence"))
        >>> keraunos.distributed.gated_delta_rule(q, q, q, -beta, beta, **options).shape
        (1, 100, 2, 16)
    """
    arrays = query, key, value, g, beta, initial_state, cu_seqlens
    options = dict(softmax_scale=softmax_scale, use_qk_l2norm=use_qk_l2norm, reverse=reverse,
                   return_state=bool(return_state), platform=platform, _cfg=cfg)
    return run("gated_delta_rule", arrays, (axis_name, group, mesh, spec), options)
