"""The recurrence with a decay per head, a gate per token, or both, on Hopper GPUs: which Gluon kernel runs when.

Forward: one walk, which reads every input once. Backward: the same walk with its arguments permuted makes dq, as
queries do, keys v and values k; another walk makes dk and dv in one pass, the other way. No states are stored.

Two neighbouring gates' gradients differ by a product of k with dk and one of q with dq. So the walk for dk and dv,
which comes first, leaves the former; the walk for dq also reads q and adds all up. Sums begin anew every few chunks,
from the product of the state with its gradient there, of which the first walk leaves some, too: so errors do not grow
with the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from keraunos.kernels.gluon import was_not_measured
from keraunos.kernels.host.arrays import Spec, spec_of, state_strides
from keraunos.kernels.host.hopper import CHUNK, LEAST_TILE, aligned, cannot_walk, tiles_of, token_strides
from keraunos.kernels.host.plan import Plan, remember
from keraunos.kernels.host.pool import NO_STATES, Pool
from keraunos.kernels.host.sequences import Sizes, cut, sequence_count
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.linear_attention.contract import kernels as implementations
from keraunos.kernels.linear_attention.cuda.dimensions import dimensions_kernel
from keraunos.kernels.linear_attention.cuda.dimensions_gates import scaled_size
from keraunos.kernels.linear_attention.cuda.dimensions_keys import keys_kernel
from keraunos.kernels.linear_attention.cuda.dimensions_queries import queries_kernel
from keraunos.kernels.linear_attention.cuda.gradients import gradients_kernel
from keraunos.kernels.linear_attention.cuda.joins import starts_kernel, sum_kernel
from keraunos.kernels.linear_attention.cuda.outputs import outputs_kernel
from keraunos.kernels.recurrent.contract import no_gradients, no_tokens
from keraunos.kernels.state_pool import contract as pool_contract
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("num_stages",)

# Stages that the shared memory holds: of a walk that makes outputs, of one with gates or their gradients, and of the
# one that makes the gradients of keys and values; of one that only makes states; with gates per dimension.
_STAGES, _STAGES_GATES, _STAGES_GRADIENTS, _STAGES_STATES, _STAGES_DIMENSIONS = 3, 2, 2, 3, 2
# Chunks from one state that the gradients of gates begin from to the next; with gates per dimension.
_GROUP, _GROUP_DIMENSIONS = 16, 32
# Registers that a thread has where a program has a multiprocessor for itself, in three warpgroups.
_MOST_REGISTERS = 168


# Programs that run at once; segments of a sequence at most, where its heads alone are about as many; tokens that make a
# segment, and a piece of one, worth their while; pieces of a segment at most, with a constant decay. Values of a state
# that a program joins at most, and of how many pieces at once, at most; from how many heads on, with a constant decay,
# of half as many.
_PROGRAMS, _FEW_SEGMENTS, _MIN_SEGMENT, _MIN_PIECE, _PIECES = 132, 4, 512, 512, 32
_STARTS, _AT_ONCE, _MANY_HEADS = 512, 16, 32
# In tokens of a walk, by time: what a program begins with; what the launches for segments come to. What a pass over
# pieces takes of a walk over as many tokens: with gates, and with a constant decay, of which most heads need few.
_BEGIN, _JOIN, _STATES, _FEW_STATES = 128, 256, 0.5, 0.2
# How many times longer than if its tokens were spread over the whole GPU a call may take for "auto" to take it. With
# gates, for which Triton takes longer still; with gates in packed sequences, which are not cut into segments; with a
# constant decay.
_MOST, _PACKED_MOST, _FEW_MOST = 13, 3, 1.5


def _most_segments(heads: int) -> int:
    """How many segments a sequence is cut into at most, whatever its length, for so many heads of all sequences."""
    return max(_PROGRAMS // max(heads, 1), _FEW_SEGMENTS if heads < 2 * _PROGRAMS else 1)


def _cost(T: int, heads: int, forgets: bool, count: int) -> float:
    """The time of a call whose sequences are cut into so many segments, in tokens of a walk."""
    size, programs = T / count, heads * count
    walks = -(-programs // _PROGRAMS) * (size + _BEGIN)
    if count == 1:
        return walks
    share = _FEW_STATES if forgets else _STATES
    return walks + -(-(programs - heads) // _PROGRAMS) * size * share + _JOIN


def _segments(T: int, heads: int, forgets: bool) -> int:
    """The number of segments that takes the least time."""
    most = min(_most_segments(heads), T // _MIN_SEGMENT)
    return min(range(1, max(most, 1) + 1), key=lambda count: _cost(T, heads, forgets, count))


def segmentation(T: int, heads: int, forgets: bool) -> tuple[int, int]:
    """``(tokens per segment, pieces per segment)``; no tokens where sequences stay whole.

    A pass over pieces makes the states that segments start from. forgets: the decay is constant, so that most heads
    need few of them.
    """
    count = _segments(T, heads, forgets)
    if count < 2:
        return 0, 1
    most = _PIECES if forgets else _PROGRAMS // ((count - 1) * heads)
    return cut(T, count, most, _MIN_PIECE, CHUNK)


def _at_once(heads: int, forgets: bool) -> int:
    """How many pieces of a sequence are joined at once: with many heads there are few, and each costs instructions."""
    if forgets:
        return _AT_ONCE if heads < _MANY_HEADS else _AT_ONCE // 2
    return next(n for n in (2, 4, 8, _AT_ONCE) if n == _AT_ONCE or n * heads >= _PROGRAMS - heads)


class _Call(Sizes):
    """Sizes and grids that follow from the shapes, dtypes and options of a call; one object for all that are alike."""

    def __init__(self, specs: Args, opts: Options):
        super().__init__(specs, opts)
        # Gates are per token and dimension.
        self.vector = self.gate == 2
        self.learned = self.need_gamma or opts.needs(specs, "g")
        # Tokens per segment (0: sequences are whole), pieces of each, and walks.
        self.L, self.P = (0, 1) if self.packed else segmentation(self.T, self.N * self.H, specs.g is None)
        self.walks = self.N * -(-self.T // self.L) if self.L else self.N
        self.group = _GROUP_DIMENSIONS if self.vector else _GROUP
        self.chunks, self.groups = self._slots(CHUNK), self._slots(self.group * CHUNK)

    def _slots(self, tokens: int) -> int:
        """Of all walks' groups of so many tokens."""
        return self.T // tokens + self.N if self.packed else self.walks * -(-(self.L or self.T) // tokens)

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of the heads' states."""
        return self.H, self.K, self.V

    @property
    def workspace(self) -> tuple[tuple[int, ...], str] | None:
        """Where walks add up products for the gradients of gates per dimension, in strong chunks."""
        return ((self.walks, self.H, CHUNK, tiles_of(self.K, self.V)["BK"]), "float32") if self.learned else None


_call_of = remember(_Call)


def _state_strides(H: int, K: int, V: int, transposed: bool) -> dict[str, int]:
    """``stride_s<axis>`` of states ``[N, H, K, V]`` that are contiguous; transposed: ``[N, H, V, K]`` are."""
    k, v = (1, K) if transposed else (V, 1)
    return dict(stride_ss=H * K * V, stride_sh=K * V, stride_sk=k, stride_sv=v)


def _plan(call: _Call, kernel: Any, outputs: dict[str, Any], stages: int, own: dict[str, Any], walks: int | None = None,
          numbers: dict[str, int] | None = None, **arrays: Any) -> Plan:
    """The launch of a kernel that walks.

    Args:
        own: constants that other kernels have not. walks: how many, if not all; numbers: that others have not.
        arrays: those of tokens, by the names of their strides.
    """
    tiles = tiles_of(arrays["k"].shape[-1], arrays["v"].shape[-1])
    constants = dict(
        H=call.H, **call.ratios(**{name: x for name, x in arrays.items() if name != "o"}), **tiles, C=CHUNK,
        STAGES=stages, REVERSE=call.reverse, PACKED=call.packed, SPLIT=call.L > 0, **own,
    )
    given = dict(stride_gamma_b=call.stride_gamma_b, scale=call.scale, T=call.T, L=call.L)
    grid = ((call.walks if walks is None else walks) * call.H,)
    return Plan(kernel, grid, {**token_strides(**arrays), **given} | (numbers or {}), outputs, constants)


@remember
def _outputs_plan(call: _Call, q: Spec, k: Spec, v: Spec, f: Spec | None, *, output: str, final: bool,
                  transposed: bool, pool: Pool | None, into: bool, aligned: bool) -> Plan:
    B, T, H, (specs, opts) = call.B, call.T, call.H, (call.specs, call.opts)
    g, K, V = specs.g, k.shape[-1], v.shape[-1]
    outputs: dict[str, Any] = dict(
        o=((B, T, H, V), output),
        ht=((call.N, *call.state), "float32") if final else None,
        dg=((B, T, H), call.dtype_of_each(g)) if f and opts.needs(specs, "g") else None,
        dgamma=((call.walks, H), "float32") if f and opts.needs(specs, "g_gamma") else None,
        sums=None,
    )
    own = dict(INIT_WALK=call.L > 0, **_state_strides(H, K, V, transposed),
               STORED=not aligned or output != call.dtype, GROUP=_GROUP, BACKWARDS=call.reverse)
    if pool:
        # The states are not made, but put where they came from.
        outputs |= dict(o="into" if into else ((T, H, V), output), ht="h0")
        own |= state_strides(pool.states)
    stages = min(_STAGES_GATES if f or g else _STAGES, call.cfg.num_stages)
    return _plan(call, outputs_kernel, outputs, stages, own, numbers=dict(P=1), q=q, k=k, v=v, f=f, g=g)


def _outputs(call: _Call, args: Args, q: Any, k: Any, v: Any, *, f: Any = None, h0: Any = None, products: Any = None,
             dh: Any = None, output: str | None = None, final: bool = False,
             transposed: bool = False, pool: Pool | None = None) -> tuple[Any, ...]:
    """``(output, final state, dg, dgamma)``: see ``outputs_kernel``. h0: what each walk starts from."""
    specs, given = (call.specs[:3] if pool else map(spec_of, (q, k, v))), pool or NO_STATES
    plan = _outputs_plan(
        call, *specs, spec_of(f), output=output or call.dtype, final=final, transposed=transposed,
        pool=pool and pool.specs(), into=given.into is not None, aligned=given.into is aligned(given.into),
    )
    return plan.launch(q=q, k=k, v=v, f=f, g=args.g, gamma=args.g_gamma, h0=h0, products=products, dh=dh,
                       cu_seqlens=args.cu_seqlens, slots=given.slots, has_initial=given.has_initial,
                       into=given.into)[:4]


def _registers(call: _Call) -> int:
    """How many registers a thread of outputs' walk with gates per dimension has: with few, two programs run at once."""
    tiles = tiles_of(call.K, call.V)
    return 128 if tiles["BK"] == tiles["BV"] == LEAST_TILE else _MOST_REGISTERS


@remember
def _dimensions_plan(call: _Call, q: Spec, k: Spec, v: Spec, final: bool) -> Plan:
    outputs = dict(
        o=((call.B, call.T, call.H, call.V), call.dtype),
        ht=((call.N, *call.state), "float32") if final else None,
        sums=None,
        strong=((call.walks, call.H), "int32") if call.opts.kept else None,
    )
    own = dict(INIT_WALK=call.L > 0, BACKWARDS=call.reverse, MAXNREG=_registers(call))
    return _plan(call, dimensions_kernel, outputs, _STAGES, own, numbers=dict(P=1), q=q, k=k, v=v,
                 g=call.specs.g)


@remember
def _queries_plan(call: _Call, q: Spec, k: Spec, v: Spec, do: Spec, strong: bool) -> Plan:
    g, dtype = call.specs.g, call.dtype_of_each(call.specs.query)
    needs, of_each = call.opts.needs, (call.B, call.T, call.H, call.K)
    dtype_g, walkers = call.dtype_of_each(g), tiles_of(call.K, call.V)["BK"] // LEAST_TILE
    outputs: dict[str, Any] = dict(
        dq=(of_each, dtype),
        workspace=call.workspace if strong else None,
        dg=(of_each, dtype_g) if needs(call.specs, "g") else None,
        dgamma=((call.walks, walkers, call.H), "float32") if needs(call.specs, "g_gamma") else None,
    )
    if not strong:
        outputs |= {name: f"{name}_given" for name in ("dq", "dg", "dgamma") if outputs[name]}
    own = dict(INIT_WALK=call.L > 0, STORED=dtype != call.dtype, STORED_G=dtype_g == "float32", GROUP=call.group,
               STRONG=strong, MAXNREG=_MOST_REGISTERS)
    return _plan(call, queries_kernel, outputs, _STAGES_DIMENSIONS, own, q=q, k=k, v=v, o=do, g=g)


@remember
def _keys_plan(call: _Call, q: Spec, k: Spec, v: Spec, do: Spec) -> Plan:
    B, T, H, specs, tiles = call.B, call.T, call.H, call.specs, tiles_of(call.K, call.V)
    outputs = dict(
        dk=((B, T, H, call.K), call.dtype_of_each(specs.key)),
        dv=((B, T, H, call.V), call.dtype_of_each(specs.value)),
        dh0=((call.N, *call.state), specs.initial_state.dtype) if specs.initial_state else None,
        dots=((call.chunks, H, scaled_size(tiles["BK"])), "float16") if call.learned else None,
        workspace=call.workspace,
        states=((call.groups, H, tiles["BK"], tiles["BV"]), call.dtype) if call.learned else None,
    )
    return _plan(call, keys_kernel, outputs, _STAGES_DIMENSIONS, dict(GROUP=call.group), q=q, k=k, v=v, o=do, g=specs.g)


@remember
def _starts_plans(call: _Call, k: Spec, v: Spec, backwards: bool) -> tuple[Plan, Plan]:
    """The launches for the states that pieces of segments leave, and for those that segments start from."""
    H, g, L, P = call.H, call.specs.g, call.L // call.P, call.P
    pieces, KV = -(-call.T // L), call.K * call.V
    cells, state = (call.N * pieces, H), ((call.N * pieces, *call.state), "float32")
    # None of the segment that is walked last.
    walks = call.N * (pieces - P if backwards else (-(-pieces // P) - 1) * P)
    given: dict[str, Any] = dict(walks=walks, numbers=dict(L=L, P=P), q=None, k=k, v=v)
    outputs: dict[str, Any]
    own: dict[str, Any] = dict(INIT_WALK=False)
    if call.vector:
        outputs = dict(o=None, ht=state, sums=((*cells, call.K), "float32"), strong=None)
        own |= dict(BACKWARDS=backwards, MAXNREG=_registers(call))
        local = _plan(call, dimensions_kernel, outputs, _STAGES, own, **given, g=g)
    else:
        outputs = dict(o=None, ht=state, dg=None, dgamma=None, sums=(cells, "float32") if g else None)
        own |= dict(**_state_strides(H, call.K, call.V, False), STORED=False, GROUP=_GROUP, BACKWARDS=backwards)
        local = _plan(call, outputs_kernel, outputs, _STAGES_STATES, own, **given, f=None, g=g)
    BD = math.gcd(KV, _STARTS)
    constants = dict(H=H, KV=KV, WIDTH=call.V if call.vector else KV, BD=BD,
                     AT_ONCE=_at_once(call.N * H, g is None), BACKWARDS=backwards)
    return local, Plan(starts_kernel, (call.N * H * KV // BD,),
                       dict(stride_gamma_b=call.stride_gamma_b, T=call.T, L=L, P=P),
                       dict(starts=((call.walks, *call.state), "float32")), constants)


def _starts(call: _Call, args: Args, k: Any, v: Any, h0: Any, backwards: bool) -> Any:
    """The states that walks start from: those of segments where sequences are cut into these, else of sequences."""
    if not call.L or call.opts.started:
        return h0
    local_plan, plan = _starts_plans(call, spec_of(k), spec_of(v), backwards)
    gamma = args.g_gamma
    if call.vector:
        _, local, sums, _ = local_plan.launch(q=None, k=k, v=v, g=args.g, gamma=gamma, h0=None, cu_seqlens=None)
    else:
        _, local, _, _, sums = local_plan.launch(q=None, k=k, v=v, f=None, g=args.g, gamma=gamma, h0=None,
                                                 products=None, dh=None, cu_seqlens=None, slots=None, has_initial=None,
                                                 into=None)
    return plan.launch(local=local, sums=sums, gamma=gamma, h0=h0)[0]


@remember
def _gradients_plan(call: _Call, q: Spec, k: Spec, v: Spec, do: Spec) -> Plan:
    B, T, H, specs, tiles = call.B, call.T, call.H, call.specs, tiles_of(call.K, call.V)
    outputs = dict(
        dk=((B, T, H, call.K), call.dtype_of_each(specs.key)),
        dv=((B, T, H, call.V), call.dtype_of_each(specs.value)),
        dh0=((call.N, *call.state), specs.initial_state.dtype) if specs.initial_state else None,
        dots=((B, T, H), "float32") if call.learned else None,
        states=((call.groups, H, tiles["BK"], tiles["BV"]), call.dtype) if call.learned else None,
    )
    return _plan(call, gradients_kernel, outputs, _STAGES_GRADIENTS, dict(GROUP=_GROUP), q=q, k=k, v=v, o=do, g=specs.g)


def forward(args: Args, opts: Options) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
    """``((output, final_state), residuals)``."""
    if not args.query.shape[1]:
        return no_tokens(args), (None, None)
    args = _all_aligned(args)
    call = _call_of(Args(*map(spec_of, args)), opts)
    starts = _starts(call, args, args.key, args.value, args.initial_state, call.reverse)
    strong = None
    if call.vector:
        q, k, v, g, gamma = args[:5]
        plan = _dimensions_plan(call, *map(spec_of, (q, k, v)), opts.state)
        output, final, _, strong = plan.launch(q=q, k=k, v=v, g=g, gamma=gamma, h0=starts, cu_seqlens=args.cu_seqlens)
    else:
        output, final, _, _ = _outputs(call, args, *args[:3], h0=starts, final=opts.state)
    return (output, final), (starts if call.L else None, strong)


def _prefill(given: pool_contract.Args, options: pool_contract.Options) -> tuple[Any, Any]:
    """``(output, pool)`` of packed sequences whose states are in a pool; tokens' arrays have no axis for the batch."""
    q, k, v = map(aligned, (given.query, given.key, given.value))
    args = Args(q, k, v, given.g, given.g_gamma, None, given.cu_seqlens)
    known = Args(*map(spec_of, args))
    rows = {name: x and x.row(x.shape[0]) for name, x in zip(Args._fields[:4], known[:4], strict=True)}
    opts = Options(options.softmax_scale, False, options.cfg, ("g_gamma",), kept=False)
    call = _call_of(known._replace(**rows), opts)
    pool = Pool(given.states, given.slots, given.has_initial, into=given.out)
    return _outputs(call, args, q, k, v, h0=pool.states, pool=pool)[:2]


def _room(args: Args, opts: Options) -> tuple[tuple[int, ...], str] | None:
    """Room for the states that segments start from, enough for all lengths; None: no length is cut."""
    N, K, V = args.query.shape[0], args.query.shape[-1], args.value.shape[-1]
    most = _most_segments(N * args.heads)
    return ((N * most, args.heads, K, V), "float32") if most > 1 and args.cu_seqlens is None else None


def _strong(args: Args, opts: Options) -> tuple[tuple[int, ...], str] | None:
    """Room for which heads' walks have strong gates per dimension, enough for all lengths."""
    if args.g is None or len(args.g.shape) != 4:
        return None
    packed, heads, N = args.cu_seqlens is not None, args.heads, sequence_count(args)
    return ((N if packed else N * _most_segments(N * heads), heads), "int32")


forward.residuals = dict(starts=_room, strong=_strong)  # type: ignore[attr-defined]
forward.rehearsed = True  # type: ignore[attr-defined]


def backward(args: Args, residuals: Sequence[Any], grads: Sequence[Any], opts: Options) -> Args:
    """The gradients of ``args`` from those of the output and of the final state (None: zero)."""
    if not args.query.shape[1]:
        return no_gradients(args, grads[1])
    args = _all_aligned(args)
    do, dfinal = aligned(grads[0]), grads[1]
    call = _call_of(Args(*map(spec_of, args)), opts)
    q, k, v, g, gamma, h0, cu_seqlens = args
    starts = residuals[0] if call.L else h0
    ends = _starts(call, args, q, do, dfinal, not call.reverse)
    if call.vector:
        plan = _keys_plan(call, *map(spec_of, (q, k, v, do)))
        dk, dv, dh0, dots, _, states = plan.launch(q=q, k=k, v=v, do=do, g=g, gamma=gamma, dht=ends,
                                                   cu_seqlens=cu_seqlens)
        dq = dg = dgamma = None
        # Two kernels, which are built side by side.
        for strong in (True, False):
            plan = _queries_plan(call, *map(spec_of, (q, k, v, do)), strong)
            dq, _, dg, dgamma = plan.launch(q=q, k=k, v=v, do=do, g=g, gamma=gamma, h0=starts, y=dots, dh=states,
                                            strong=residuals[1], cu_seqlens=cu_seqlens, dq_given=dq, dg_given=dg,
                                            dgamma_given=dgamma)
    else:
        plan = _gradients_plan(call, *map(spec_of, (q, k, v, do)))
        dk, dv, dh0, products, states = plan.launch(q=q, k=k, v=v, do=do, g=g, gamma=gamma, dht=ends,
                                                    cu_seqlens=cu_seqlens)
        query = call.dtype_of_each(call.specs.query)
        dq, _, dg, dgamma = _outputs(call, args, do, v, k, f=q if call.learned else None, h0=starts,
                                     products=products, dh=states, output=query, transposed=True)
    dq, dk, dv, dg = (_of_own(call, *x) for x in zip((dq, dk, dv, dg), call.specs[:4], strict=True))
    if dgamma is not None:
        spec = call.specs.g_gamma
        dgamma = _sum(dgamma, 1 if len(spec.shape) == 1 else call.B, call.H, spec)
    return Args(dq, dk, dv, dg, dgamma, dh0)


def _of_own(call: _Call, dx: Any, x: Spec | None) -> Any:
    """The gradient of an array from those of all heads: summed over the heads that share one of its own."""
    if dx is None or x is None or call.ratio(x) == 1:
        return dx
    return _sum(dx, math.prod(x.shape[:3]), math.prod(x.shape[3:]), x)


@remember
def _sum_plan(size: int, M: int, D: int, shape: tuple[int, ...], dtype: str) -> Plan:
    BR, BO = 4, 128
    outputs, constants = dict(y=(shape, dtype)), dict(D=D, BR=BR, BO=BO)
    return Plan(sum_kernel, (-(-M * D // BO),), dict(M=M, R=size // (M * D)), outputs, constants)


def _sum(x: Any, M: int, D: int, like: Spec) -> Any:
    """``x`` as ``[M, R, D]``, summed over R, in the shape and dtype of ``like``."""
    return _sum_plan(math.prod(x.shape), M, D, like.shape, like.dtype).launch(x=x)[0]


def _all_aligned(args: Args) -> Args:
    """The arguments, with arrays that copies can take."""
    names = ("query", "key", "value", *(("g",) if args.g is not None and len(args.g.shape) == 4 else ()))
    return args._replace(**{name: aligned(getattr(args, name)) for name in names})


def unsupported(inv: Invocation) -> str | None:
    """Why these kernels cannot run the call, or None."""
    learned = "g_gamma" in inv.arrays and "g_gamma" not in inv.constants
    if reason := cannot_walk(inv):
        return reason
    if inv.arrays["query"][0] == "float16" and ("g" in inv.arrays or learned):
        return "takes gates and decays that are arrays in bfloat16: float16 is too narrow for their gradients"
    return None


def loses(inv: Invocation) -> str | None:
    """Why ``"auto"`` should prefer others, or None: what was not measured to be faster."""
    if reason := was_not_measured():
        return reason
    N, packed, forgets = inv.dims["N"], "cu_seqlens" in inv.arrays, "g" not in inv.arrays
    if forgets and min(inv.dims["K"], inv.dims["V"]) <= LEAST_TILE:
        return "was measured to be slower than Triton, forward, with constant decays and head dims up to 64"
    T, heads = max(inv.dims["T"] // (N if packed else 1), 1), N * inv.dims["H"]
    cost = _cost(T, heads, forgets, 1 if packed else _segments(T, heads, forgets))
    most = _FEW_MOST if forgets else _PACKED_MOST if packed else _MOST
    if cost > most * T * heads / _PROGRAMS:
        return "was measured to be slower than Triton where heads, or segments, do not fill the GPU for long"
    return None


def segment(args: Args, opts: Options) -> int | None:
    """The tokens of a segment, if rows of one length are cut into several."""
    call = _call_of(Args(*map(spec_of, args)), opts)
    return call.L or None


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """Three stages, as many as fit."""
    return replace(cfg, num_stages=_STAGES)


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Two and three stages."""
    return [replace(cfg, num_stages=n) for n in (2, 3)]


def _of_attention(inv: Invocation) -> Invocation:
    """A call of prefill as one of linear attention, whose arrays have an axis for the batch."""
    dtype, ndim = inv.arrays.get("g", ("", 0))
    return replace(inv, arrays={**inv.arrays, "g": (dtype, ndim + 1)}) if dtype else inv


def _cannot_prefill(inv: Invocation) -> str | None:
    """Why these kernels cannot run a call of prefill, or None."""
    if reason := cannot_walk(_of_attention(inv)):
        return reason
    if inv.arrays.get("g", ("", 0))[1] == 3:
        return "takes gates per token [T, H]; the call has gates per token and dimension"
    return "takes no boundaries: it exports no states" if "tokens" in inv.arrays else None


gla, lightning_attn = implementations(
    "cuda", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates,
    unsupported=unsupported, segment=segment,
)
preferred_gla, preferred_lightning_attn = (replace(x, loses=loses) for x in (gla, lightning_attn))
# Each request has one walk for each head, however long it is.
prefill = pool_contract.implementation(
    "prefill", _prefill, FIELDS, platform="cuda", source=__file__, unsupported=_cannot_prefill, heuristic=heuristic,
)
preferred_prefill = replace(prefill, loses=lambda inv: loses(_of_attention(inv)))
