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
that each part starts from.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple, cast

from keraunos.frontends import launch
from keraunos.kernels.linear_attention import triton_chunks, triton_kernels
from keraunos.kernels.linear_attention.interface import Args, Options
from keraunos.kernels.linear_attention.interface import kernels as implementations

FIELDS = ("block_q", "block_d", "num_warps", "num_stages")

# With TRITON_INTERPRET=1 kernels run on the CPU, in NumPy.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Programs that fill the largest GPUs. With fewer, sequences are cut into segments, for which a pass over pieces of them
# makes the states that they start from. Tokens that make a segment and a piece worth their while. Pieces, times heads,
# that run at once; and that share the pass evenly where constant decays leave most heads little to do.
_PROGRAMS = 128
_MIN_SEGMENT, _MIN_PIECE = 512, 1024
_PIECES, _PIECES_FORGETTING = 198, 2048
# Parts of a walk, one after the other, in which gradients of gates are made; and the chunks of the shortest.
_PARTS, _MIN_PART = 5, 16

# Tiles and launch options: dimensions of K, warps, stages of the kernel that halves; of V, warps, stages of walks that
# make states only; of K, of V, warps, stages of the gradient of gates. The last are never cut to fewer dimensions: with
# 32 of K and 64 of V, Triton 3.6 builds wrong code for Hopper.
_HALVING = (64, 4, 1)
_STATES = (64, 4, 3)
_GRADIENT = (64, 64, 4, 3)
# Heads that one program looks at, to find chunks with strong gates.
_HEADS = 8


# What follows from shapes, dtypes and options is worked out once.
_remember = functools.lru_cache(maxsize=4096)


def _pow2(n: int) -> int:
    return 1 << max(int(n) - 1, 0).bit_length()


def _tile(n: int) -> int:
    """The tile that holds n dimensions: the tensor cores take 16 at least."""
    return max(_pow2(n), 16)


class _Spec(NamedTuple):
    """What the host code needs to know of an array: hashable, so that what follows from it is worked out once."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def _spec(x: Any) -> _Spec | None:
    if x is None:
        return None
    if hasattr(x, "stride"):
        return _Spec(tuple(x.shape), x.stride(), _name(x.dtype))
    strides = [1]  # a JAX array is contiguous
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size)
    return _Spec(tuple(x.shape), tuple(strides), _name(x.dtype))


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _strides(x: _Spec | None, name: str, unit: int, axes: str = "bth") -> dict[str, int]:
    """``stride_<name><axis>`` of the axes of an array [B, T, H, ...], in units."""
    return {f"stride_{name}{axis}": x.strides["bth".index(axis)] // unit if x else 0 for axis in axes}


def _unit(*arrays: _Spec | None) -> int:
    """The largest power of two, up to 16, that divides every stride over tokens, heads and the batch."""
    return math.gcd(16, *(stride for x in arrays if x for stride in x.strides[:3]))


class _Plan(NamedTuple):
    """A launch but for its arrays."""

    kernel: Any
    grid: tuple[int, ...]
    numbers: dict[str, Any]
    outputs: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    def launch(self, **arrays):
        """Run it on arrays, given in the order of the kernel's parameters."""
        return launch(self.kernel, self.grid, {**arrays, **self.numbers}, self.outputs, self.constants,
                      num_warps=self.num_warps, num_stages=self.num_stages)  # fmt: skip


class _Part(NamedTuple):
    """Some tokens of some walks, ``call.M`` from the first ``token`` of the walk on; last: the walks end there."""

    token: int
    walk: int
    walks: int
    last: bool


# Where the states of sequences are in no pool, the kernels' flags for one.
NO_POOL = dict(POOL=False, MAY_START=False, stride_ss=0, stride_sh=0, stride_sk=0, stride_sv=0)


class Pool(NamedTuple):
    """Where the states of packed sequences come from and go to; as arrays, or as what is known of them."""

    states: Any  # [slots, H, K, V], any strides
    slots: Any  # [N]; -1: no sequence
    has_initial: Any = None  # [N], bool
    exports: Any = None  # for each chunk the slot that the state before it goes to as well; -1: none
    T: int = 0  # tokens of the row
    call: Args | None = None  # what is known of the call's arrays, which may say more tokens
    into: Any = None  # where the output goes

    def specs(self) -> Pool:
        """What is known of the arrays."""
        states, slots, has_initial, exports = map(_spec, self[:4])
        return Pool(states, slots, has_initial, exports, self.T, self.call)

    def arrays(self) -> dict[str, Any]:
        """The kernels' arguments."""
        return dict(pool=self.states, slots=self.slots, has_initial=self.has_initial, exports=self.exports)

    def flags(self) -> dict[str, Any]:
        """The kernels' constants."""
        strides = {f"stride_s{axis}": n for axis, n in zip("shkv", self.states.strides, strict=True)}
        return dict(POOL=True, MAY_START=self.has_initial is not None, **strides)


NO_STATES = Pool(None, None)


class _Call:
    """The sizes of one call, its gates and how its sequences are cut; one object for all calls that are alike."""

    def __init__(self, specs: Args, opts: Options):
        self.specs, self.opts = specs, opts
        # Complete by the contract, whatever its declared type allows.
        self.cfg: Any = opts.cfg
        self.scale, self.reverse = opts.softmax_scale, opts.reverse
        self.B, self.T, self.H, self.K = specs.query.shape
        self.G, self.V = specs.value.shape[2:]
        self.R = self.H // self.G
        self.dtype = specs.query.dtype
        self.packed = specs.cu_seqlens is not None
        self.N = _sequences(specs)
        self.gate = 0 if specs.g is None else len(specs.g.shape) - 2
        self.has_gamma = specs.g_gamma is not None
        self.need_gamma = self.has_gamma and not opts.gamma_is_constant
        self.need_gate = self.gate > 0 or self.need_gamma
        # Query heads that share keys: each gives a gradient, and they are summed afterwards.
        self.dtype_shared = "float32" if self.R > 1 else self.dtype
        # Of the gradient of gates, before it is summed over what shares a gate.
        self.dg = "float32" if self.need_gamma or self.gate < 2 else specs.g.dtype
        self.stride_gamma_b = self.H if self.has_gamma and len(specs.g_gamma.shape) == 2 else 0
        self.exact = self.dtype == "float32"
        plain = self.gate and specs.g.dtype == "bfloat16" and not self.has_gamma
        self.terms = 3 if self.exact else 1 if plain else 2
        # Six bf16 products are as good as float32; the interpreter, which computes in float32, has no name for them.
        self.precision = "tf32" if not self.exact else "ieee" if _INTERPRETED else "bf16x6"
        # How far gates may sum below 0, base 2, where their factors still are in the dtype's range with much to spare.
        self.mild = 92.0 if self.dtype == "bfloat16" else 0.0
        self.BT: int = cast(int, self.cfg.block_q)
        # Whether the gradient of the gates can be where the pairs of halved chunks were.
        self.shares_pairs = self.dg == self.dtype and self.K >= self.BT
        # Tokens per segment (0: sequences are not cut) and pieces per segment.
        forgets = self.has_gamma and not self.gate
        self.L, self.P = segmentation(self.T, self.N * self.H, _programs(specs, opts), self.BT, forgets)
        self.chunks = self.slots(self.BT)
        # Tokens per walk, and per part of it (0: walks are not parted).
        self.walk = self.L or -(-self.T // self.BT) * self.BT
        self.M, self.parts = 0, []
        if self.need_gate and not self.packed:
            self._part(_programs(specs, opts))

    def _part(self, programs: int) -> None:
        """Choose the parts in which gradients of gates are made: of the sequences, if those are many, and of each."""
        groups = max(min(programs // _PROGRAMS, _PARTS, self.N), 1)
        count = self.walk // self.BT
        parts = max(min(count // _MIN_PART, -(-_PARTS // groups)), 1)
        if not self.L and groups * parts == 1:
            return
        self.M, most = -(-count // parts) * self.BT, -(-self.N // groups)
        tokens = range(0, self.walk, self.M)
        for n in range(0, self.N, most):
            for token in tokens if self.reverse else reversed(tokens):
                last = token == tokens[-1 if self.reverse else 0]
                walks = -(-self.T // self.walk)
                self.parts.append(_Part(token, n * walks, min(most, self.N - n) * walks, last))

    def slots(self, length: int) -> int:
        """How many parts of a length sequences have at most; a packed one may end in a shorter part anywhere."""
        return self.T // length + self.N if self.packed else self.N * -(-self.T // length)

    def place(self, part: _Part | None) -> dict[str, int]:
        """Tokens per part, and where a part begins."""
        return dict(M=self.M, F=part.token if part else 0, W=part.walk if part else 0)

    def chunk_slots(self, part: _Part | None) -> int:
        """How many chunks a part has at most (None: all walks)."""
        if self.packed:
            return self.chunks
        return part.walks * (self.M // self.BT) if part else self.N * -(-self.T // self.walk) * (self.walk // self.BT)

    def flags(self, reverse: bool) -> dict[str, Any]:
        """The constants that every kernel of the recurrence has."""
        return dict(GAMMA=self.has_gamma, REVERSE=reverse, PACKED=self.packed)


@_remember
def _call(specs: Args, opts: Options) -> _Call:
    return _Call(specs, opts)


def _sequences(args: Args) -> int:
    return args.query.shape[0] if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1


def _programs(args: Args, opts: Options) -> int:
    """Programs of a walk over whole sequences."""
    (_, _, H, K), V = args.query.shape, args.value.shape[-1]
    return _sequences(args) * H * -(-min(K, V) // cast(int, opts.cfg.block_d))


def _most_segments(programs: int) -> int:
    """How many segments a sequence is cut into at most, whatever its length."""
    return _PROGRAMS // max(programs, 1)


def segmentation(T: int, heads: int, programs: int, BT: int, forgets: bool) -> tuple[int, int]:
    """``(tokens per segment, pieces per segment)``; no tokens where one program per sequence, head and tile is enough.

    Args:
        T: tokens of the longest sequence; heads: sequences times heads; programs: those of a walk over sequences.
        BT: tokens per chunk; forgets: the decay is constant.
    """
    count = min(_most_segments(programs), T // _MIN_SEGMENT)
    if count < 2:
        return 0, 1
    most = _PIECES_FORGETTING // (count * heads) if forgets else _PIECES // ((count - 1) * heads)
    pieces = max(min(T // count // _MIN_PIECE, most), 1)
    return -(-T // (count * pieces * BT)) * pieces * BT, pieces


def _room(args: Args, opts: Options) -> tuple[tuple[int, ...], str] | None:
    """Room for the states that segments or parts start from, the same for all lengths; None: no length is cut."""
    (_, _, H, K), V, N = args.query.shape, args.value.shape[-1], _sequences(args)
    most, packed = _most_segments(_programs(args, opts)), args.cu_seqlens is not None
    if not packed and (args.g is not None or (args.g_gamma is not None and not opts.gamma_is_constant)):
        return (N * max(most, 1) * _PARTS, H, K, V), _name(args.query.dtype)
    return ((N + most if packed else N * most, H, K, V), "float32") if most > 1 else None


@_remember
def _scan_plan(
    call: _Call, q, k, v, *, reverse, adjoint, init, final, state, output, into, save, part, state_t, width, pool
) -> _Plan:
    H, cfg = call.H, call.cfg
    K, V = k.shape[-1], v.shape[-1]
    BV, num_warps, num_stages = min(cfg.block_d, _tile(V)), cfg.num_warps, cfg.num_stages
    if q is None:
        BV, num_warps, num_stages = min((BV, num_warps, num_stages), _STATES)
    pieces = final == _Final.PIECE
    split = pieces or (call.L > 0 and init != _Init.SEQUENCE)
    length = call.L // call.P if pieces else call.L
    slots = call.slots(length) if split else call.N
    walks = part.walks if part else slots
    like_q = q or k
    g = call.specs.g if call.gate == 1 else None
    unit = _unit(like_q, k, v)
    numbers = dict(
        **_strides(like_q, "q", unit, "bh"), **_strides(k, "k", unit, "bh"), **_strides(v, "v", unit, "bh"),
        **_strides(g, "g", 1),
        stride_gamma_b=call.stride_gamma_b, scale=call.scale, T=call.T, N=call.N, L=length, P=call.P,
        **call.place(part), ROWS=pool.T if pool else 0,
    )  # fmt: skip
    ends = (call.N if final == _Final.SEQUENCE else slots, H)
    saved = {_Save.CHUNKS: call.chunk_slots(part), _Save.PARTS: slots * -(-call.walk // call.M) if call.M else 0}.get(
        save
    )
    outputs = dict(
        o=None if q is None else "into" if into else ((call.B, call.T, H, V), output),
        ht="h0" if final == _Final.WALK else ((*ends, V, K) if state_t else (*ends, K, V), state) if final else None,
        hs=((saved, H, K, V), call.dtype) if saved else None,
        total=((slots, H, K) if call.gate == 2 else (slots, H), "float32") if pieces and call.gate else None,
    )
    constants = dict(
        H=H, K=K, V=V, RQ=H // like_q.shape[2], RK=H // k.shape[2], RV=H // v.shape[2], **_strides(like_q, "q", 1, "t"),
        **_strides(k, "k", 1, "t"), **_strides(v, "v", 1, "t"), UNIT=unit, BT=call.BT, BK=_tile(K), BV=BV,
        BN=_pow2(call.N), GATE=call.gate, TERMS=call.terms, MILD=call.mild, ADJOINT=adjoint, SPLIT=split,
        PART=part is not None, WIDTH=width, INIT=int(init), FINAL=int(final), OUTPUT=q is not None, SAVE=int(save),
        STATE_T=state_t, EXACT=call.exact, PRECISION=call.precision, EXPORT=False, **NO_POOL, **call.flags(reverse),
    )  # fmt: skip
    if pool:
        # The states are not made, but put where they came from.
        outputs["ht"] = "pool"
        outputs["o"] = outputs["o"] if into else ((pool.T, H, V), output)
        constants |= dict(EXPORT=pool.exports is not None, **pool.flags())
    grid = (walks * H * -(-V // BV),)
    return _Plan(triton_kernels.scan_kernel, grid, numbers, outputs, constants, num_warps, num_stages)


class _Init(IntEnum):
    """Whose state a walk starts from."""

    ZERO, SEQUENCE, WALK, PART = range(4)


class _Final(IntEnum):
    """Whose final state is wanted."""

    NONE, SEQUENCE, PIECE, WALK = range(4)


class _Save(IntEnum):
    """Before what the state is written down."""

    NOTHING, CHUNKS, PARTS = range(3)


def _scan(call: _Call, args: Args, q, k, v, *, reverse, adjoint=False, h0=None, init=_Init.ZERO, decayed=None,
          final=_Final.NONE, state="float32", output=None, into=None, save=_Save.NOTHING, part=None,
          state_t=False, pool=None):  # fmt: skip
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

    Returns:
        ``(output, final states, states written down, sums of the gates)``.
    """
    q_spec, k_spec, v_spec = (
        known if x is own else _spec(x) for x, own, known in zip((q, k, v), args[:3], call.specs[:3], strict=True)
    )
    plan = _scan_plan(
        call, q_spec, k_spec, v_spec, reverse=reverse, adjoint=adjoint, init=init, final=final, state=state,
        output=output, into=into is not None, save=save, part=part, state_t=state_t,
        width=decayed.intra.shape[-1] if decayed else 0, pool=pool and pool.specs(),
    )  # fmt: skip
    # Triton would build other code for absent arrays.
    return plan.launch(
        q=k if q is None else q, k=k, v=v, g=args.g if call.gate == 1 else None, gamma=args.g_gamma,
        sums=decayed and decayed.sums, halved=decayed and decayed.halved, intra=decayed and decayed.intra,
        h0=h0, into=v if into is None else into, cu_seqlens=args.cu_seqlens, **(pool or NO_STATES).arrays(),
    )  # fmt: skip


@_remember
def _combine_plan(call: _Call, K: int, V: int, reverse: bool, init: bool, pool: Pool | None = None) -> _Plan:
    BK, flags = 8, pool.flags() if pool else NO_POOL
    numbers = dict(stride_gamma_b=call.stride_gamma_b, T=call.T, N=call.N, L=call.L // call.P, P=call.P)
    constants = dict(H=call.H, K=K, V=V, BK=BK, BV=_tile(V), GATE=call.gate, INIT=init, **flags,
                     **call.flags(reverse))  # fmt: skip
    outputs = dict(starts=((call.slots(call.L), call.H, K, V), "float32"))
    return _Plan(triton_kernels.combine_kernel, (call.N * call.H * -(-K // BK),), numbers, outputs, constants, 4, 2)


def _starts(call: _Call, args: Args, k, v, h0, *, reverse, adjoint=False, decayed=None, pool=None) -> dict[str, Any]:
    """What each walk starts from: where sequences are cut, the states of their segments ``[slots, H, K, V]``."""
    if not call.L and pool:
        return dict(h0=None, init=_Init.SEQUENCE)
    if not call.L:
        return dict(h0=h0, init=_Init.ZERO if h0 is None else _Init.SEQUENCE)
    _, local, _, total = _scan(call, args, None, k, v, reverse=reverse, adjoint=adjoint, final=_Final.PIECE,
                               decayed=decayed)  # fmt: skip
    plan = _combine_plan(call, k.shape[-1], v.shape[-1], reverse, h0 is not None, pool and pool.specs())
    given = pool or NO_STATES
    (starts,) = plan.launch(local=local, total=total, gamma=args.g_gamma, h0=h0 if pool is None else pool.states,
                            cu_seqlens=args.cu_seqlens, slots=given.slots, has_initial=given.has_initial)  # fmt: skip
    return dict(h0=starts, init=_Init.WALK)


class _Decayed(NamedTuple):
    """What ``decay_kernel`` makes of vector gates, and the pairs of the chunks that are halved."""

    q: Any
    k: Any
    sums: Any
    halved: Any
    intra: Any


@_remember
def _decay_plans(call: _Call, width: int) -> tuple[_Plan, _Plan]:
    q, k, g = call.specs.query, call.specs.key, call.specs.g
    unit = _unit(q, k, g)
    numbers: dict[str, Any] = dict(
        **_strides(q, "q", unit), **_strides(k, "k", unit), **_strides(g, "g", unit),
        stride_gamma_b=call.stride_gamma_b, scale=call.scale, T=call.T, N=call.N,
    )  # fmt: skip
    common = dict(H=call.H, K=call.K, RK=call.R, UNIT=unit, BT=call.BT, BN=_pow2(call.N), MILD=call.mild,
                  **call.flags(call.reverse))  # fmt: skip
    tokens, chunks = (call.B, call.T, call.H), (call.chunks, call.H)
    mild, decayed, sums = call.mild > 0, ((*tokens, call.K), call.dtype), ((*chunks, call.K), "float32")
    outputs: dict[str, Any] = dict(qd=decayed, kd=decayed, sums=sums, halved=(chunks, "int32") if mild else None)
    BK = _tile(call.K)
    decay = _Plan(triton_chunks.decay_kernel, (call.chunks * call.H,), numbers, outputs, dict(**common, BK=BK),
                  max(BK // 128, 1), 1)  # fmt: skip
    BK, num_warps, num_stages = _HALVING
    BH = min(_pow2(call.H), _HEADS)
    grid, outputs = (call.chunks * -(-call.H // BH),), dict(intra=((*tokens, width), call.dtype))
    constants = dict(**common, BK=min(_tile(call.K), BK), BH=BH, TERMS=call.terms, PRECISION=call.precision)
    halving = _Plan(triton_chunks.halving_kernel, grid, {**numbers, "WIDTH": width}, outputs, constants, num_warps,
                    num_stages)  # fmt: skip
    return decay, halving


def _decay(call: _Call, args: Args, width: int) -> _Decayed | None:
    """Vector gates, worked into q and k in parallel over chunks; None where there are none. width: of ``intra``."""
    if call.gate != 2:
        return None
    decay, halving = _decay_plans(call, width)
    arrays = dict(q=args.query, k=args.key, g=args.g, gamma=args.g_gamma)
    made = decay.launch(**arrays, cu_seqlens=args.cu_seqlens)
    return _Decayed(*made, *halving.launch(**arrays, halved=made[-1], cu_seqlens=args.cu_seqlens))


def forward(args: Args, opts: Options, pool: Pool | None = None):
    """``((output, final_state), residuals)``: the states that parts or segments start from, where there are any.

    With a pool, which is the final state then, the arrays of tokens have no axis for the batch.
    """
    call = _call(pool.call if pool else Args(*map(_spec, args)), opts)
    q, k, v = args.query, args.key, args.value
    decayed = _decay(call, args, call.BT)
    if decayed:
        q, k = decayed.q, decayed.k
    starts = _starts(call, args, k, v, args.initial_state, reverse=call.reverse, decayed=decayed, pool=pool)
    save = _Save.PARTS if call.M and opts.kept else _Save.NOTHING
    output, final, saved, _ = _scan(
        call, args, q, k, v, reverse=call.reverse, **starts, decayed=decayed, output=call.dtype,
        final=_Final.SEQUENCE if opts.state else _Final.NONE, save=save, pool=pool, into=pool and pool.into,
    )  # fmt: skip
    return (output, final), (saved if call.M else starts["h0"] if call.L else None,)


forward.residuals = dict(starts=_room)  # type: ignore[attr-defined]


def backward(args: Args, residuals, grads, opts: Options) -> Args:
    """The gradients of ``args`` from those of the output and of the final state (None: zero)."""
    call = _call(Args(*map(_spec, args)), opts)
    q, k, v, h0 = args.query, args.key, args.value, args.initial_state
    do, dfinal = grads
    decayed = _decay(call, args, call.K if call.shares_pairs else call.BT)
    qd = decayed.q if decayed else q
    run = dict(reverse=not call.reverse, adjoint=True)
    begin = dict(h0=residuals[0], init=_Init.PART if call.M else _Init.WALK)
    if not (call.M or call.L):
        begin = _starts(call, args, k, v, h0, reverse=call.reverse)
    ends = _starts(call, args, qd, do, dfinal, decayed=decayed, **run)
    wanted = {} if h0 is None else dict(final=_Final.SEQUENCE, state=call.specs.initial_state.dtype)
    if call.need_gate:
        dq, dk, dv, dg, dgamma, dh0 = _gradients(call, args, decayed, do, begin, ends, wanted)
    else:
        dg = dgamma = None
        dv, dh0, _, _ = _scan(call, args, k, q, do, **ends, output=call.dtype_shared, **wanted, **run)
        dq = _scan(call, args, do, v, k, reverse=call.reverse, **begin, output=call.dtype, state_t=True)[0]
        dk = _scan(call, args, v, do, q, **ends, output=call.dtype_shared, state_t=True, **run)[0]
    if call.R > 1:
        dk, dv = (_sum(x, call.B * call.T * call.G, call.R, like.shape[-1], like.shape, like.dtype)
                  for x, like in ((dk, call.specs.key), (dv, call.specs.value)))  # fmt: skip
    return Args(dq, dk, dv, dg, dgamma, dh0)


@_remember
def _gradient_plan(
    call: _Call, q: _Spec, k: _Spec, do: _Spec, mild: bool, halved: bool, outputs: tuple, part: _Part | None
) -> _Plan:
    """The launch for all chunks of a part (mild: with decayed q and k), or for those that are halved."""
    v, g = call.specs.value, call.specs.g
    H, K, V = call.H, call.K, call.V
    BK, BV, num_warps, num_stages = _GRADIENT
    vector = call.gate == 2
    unit = _unit(q, k, v, do, g if vector else None)
    numbers = dict(**_strides(q, "q", unit), **_strides(k, "k", unit), **_strides(v, "v", unit),
                   **_strides(g, "g", unit if vector else 1), stride_gamma_b=call.stride_gamma_b,
                   **_strides(do, "o", unit), scale=call.scale, T=call.T, N=call.N, L=call.walk,
                   **(call.place(part) if part else dict(M=call.walk, F=0, W=0)))  # fmt: skip
    BH = min(_pow2(H), _HEADS) if halved else 1
    constants = dict(
        H=H, K=K, V=V, RK=H // k.shape[2], RV=call.R, UNIT=unit, BT=call.BT, BK=BK, BV=BV, BH=BH, BN=_pow2(call.N),
        GATE=call.gate, TERMS=call.terms, DG_TERMS={"bfloat16": 1, "float16": 2}.get(call.dtype, 3), MILD=mild,
        HALVED=halved, PRECISION=call.precision, **call.flags(call.reverse),
    )  # fmt: skip
    grid = (call.chunk_slots(part) * -(-H // BH) * -(-K // BK),)
    return _Plan(triton_chunks.gradient_kernel, grid, numbers, dict(zip(_GRADIENTS, outputs, strict=True)), constants,
                 num_warps, num_stages)  # fmt: skip


_GRADIENTS = ("dq", "dk", "dg")
_GIVEN = tuple(f"{name}_given" for name in _GRADIENTS)


def _gradients(call: _Call, args: Args, decayed: _Decayed | None, do, begin, ends, wanted) -> tuple:
    """``(dq, dk, dv, dg, dgamma, dh0)`` where gates have gradients, part by part, from the last one that is walked.

    Args:
        begin, ends: what the forward and the adjoint walks start from; wanted: what of the last state.
    """
    g, whole, h0 = call.specs.g, (call.B, call.T, call.H), call.specs.initial_state
    dv, dh0, grads = None, None, (None, None, None)
    if decayed and call.shares_pairs:
        grads = (None, None, decayed.intra)
    if call.M:
        # Walks go on from each other's states, which stay in one place. The first do so too: all are the same kernel.
        shape = (call.N * -(-call.T // call.walk), call.H, call.K, call.V)
        if ends["init"] != _Init.WALK:
            given = ends["init"] == _Init.SEQUENCE
            ends = dict(h0=_sum(ends["h0"] if given else do, 1, int(given), math.prod(shape), shape, "float32"))
        ends = dict(h0=ends["h0"], init=_Init.WALK)
    for part in call.parts or [None]:
        final = wanted
        if part and not (part.last and call.L and wanted):
            final = dict(final=_Final.WALK)
        q, k = (decayed.q, decayed.k) if decayed else (args.query, args.key)
        dv, dh0, dhs, _ = _scan(
            call, args, k, q, do, reverse=not call.reverse, adjoint=True, **ends, decayed=decayed, into=dv, part=part,
            output=call.dtype_shared, save=_Save.CHUNKS, **final,
        )  # fmt: skip
        ends = dict(h0=dh0, init=_Init.WALK)
        _, _, hs, _ = _scan(call, args, None, k, args.value, reverse=call.reverse, **begin, decayed=decayed,
                            save=_Save.CHUNKS, part=part)  # fmt: skip
        decayed, grads = _part_gradients(call, args, decayed, do, hs, dhs, grads, part)
    dq, dk, dg = grads
    if call.gate < 2:
        dg = _sum(dg, 1, dg.shape[0], math.prod(whole), whole, "float32" if call.need_gamma else g.dtype)
    dgamma = _gamma_gradient(call, dg) if call.need_gamma else None
    if g is None:
        dg = None
    elif call.need_gamma:
        dg = _sum(dg, 1, 1, math.prod(g.shape), g.shape, g.dtype)
    if wanted and call.M and not call.L and h0.dtype != "float32":
        dh0 = _sum(dh0, 1, 1, math.prod(h0.shape), h0.shape, h0.dtype)
    return dq, dk, dv, dg, dgamma, dh0 if wanted else None


def _part_gradients(call: _Call, args: Args, decayed: _Decayed | None, do, hs, dhs, grads, part):
    """``(dq, dk, dg)`` with those of a part's chunks, from the states before and the gradients after each of them.

    Each program overwrites what no other reads: with mild vector gates its own part of the decayed q and k, and dg's
    array had the pairs of halved chunks before. Also returns what is left of these.
    """
    whole = (call.B, call.T, call.H)
    kinds = (((*whole, call.K), call.dtype), ((*whole, call.K), call.dtype_shared),
             ((*whole, call.K) if call.gate == 2 else (-(-call.K // _GRADIENT[0]), *whole), call.dg))  # fmt: skip

    def launch(q, k, mild, halved, outputs, grads):
        # Where k is decayed so is q.
        specs = (_spec(q), _spec(k)) if mild else (call.specs.query, call.specs.key)
        plan = _gradient_plan(call, *specs, _spec(do), mild, halved, outputs, part)
        return plan.launch(
            q=q, k=k, v=args.value, g=args.g, gamma=args.g_gamma, sums=decayed and decayed.sums, do=do, hs=hs, dhs=dhs,
            halved=decayed and decayed.halved, **dict(zip(_GIVEN, grads, strict=True)), cu_seqlens=args.cu_seqlens,
        )  # fmt: skip

    outputs = tuple(kind if x is None else name for kind, x, name in zip(kinds, grads, _GIVEN, strict=True))
    own: list[str] = []
    if not (decayed and call.mild):
        grads = launch(args.query, args.key, False, False, outputs, grads)
    else:
        own = ["q", "k"][: 2 if call.R == 1 else 1]
        given = (*[None] * len(own), *grads[len(own) :])
        grads = launch(decayed.q, decayed.k, True, False, (*own, *outputs[len(own) :]), given)
        grads = launch(args.query, args.key, False, True, _GIVEN, grads)
    if decayed:
        decayed = decayed._replace(**dict(zip(own, grads, strict=False)))
        if call.shares_pairs:
            decayed = decayed._replace(intra=grads[2])
    return decayed, grads


def _gamma_gradient(call: _Call, dg):
    """The sum of the gates' gradients over tokens (and dimensions, and the batch if it shares the decay)."""
    gamma, D = call.specs.g_gamma, call.K if call.gate == 2 else 1
    x = _sum(dg, call.B, call.T, call.H * D, (call.B, call.H, D), "float32")
    if D > 1:
        x = _sum(x, call.B * call.H, D, 1, (call.B, call.H), "float32")
    M, R = (1, call.B) if len(gamma.shape) == 1 else (call.B, 1)
    return _sum(x, M, R, call.H, gamma.shape, gamma.dtype)


@_remember
def _sum_plan(M: int, R: int, D: int, shape: tuple[int, ...], dtype: str) -> _Plan:
    BD, BR, unit = min(_tile(D), 256), min(_pow2(R), 16), math.gcd(16, D)
    return _Plan(triton_chunks.sum_kernel, (M * -(-D // BD),), dict(R=R, D=D // unit), dict(y=(shape, dtype)),
                 dict(UNIT=unit, BR=BR, BD=BD), 4, 2)  # fmt: skip


def _sum(x, M: int, R: int, D: int, shape, dtype: str):
    """``x`` as ``[M, R, D]``, summed over R, in the given shape and dtype."""
    return _sum_plan(M, R, D, shape, dtype).launch(x=x)[0]


def unsupported(inv) -> str | None:
    """Why Triton cannot run the call, or None."""
    if inv.backend != "gpu" and not (_INTERPRETED and inv.framework == "torch"):
        return f"needs a GPU; the call's arrays are on {inv.backend}"
    if inv.framework == "jax" and importlib.util.find_spec("jax_triton") is None:
        return "needs the package jax-triton for JAX arrays"
    if inv.arrays["query"][0] == "float64":
        return "Triton's matrix products have no float64; use xla or torch, or convert to float32"
    if max(inv.dims["K"], inv.dims["V"]) > 256:
        return f"takes head dims up to 256; the call has K = {inv.dims['K']}, V = {inv.dims['V']}"
    return None


def heuristic(inv, cfg):
    """Chunks of 64 tokens; tiles of V and pipeline depth as registers and shared memory allow."""
    exact, K, V = inv.arrays["query"][0] == "float32", inv.dims["K"], inv.dims["V"]
    wide = max(K, V) > 128
    if exact or wide:
        return replace(cfg, block_q=_exact_chunk(wide) if exact else 64, block_d=32 if exact and wide else 64,
                       num_warps=4, num_stages=2)  # fmt: skip
    # Two warpgroups with half a state each read every input once. But where programs with half a state fill the GPU as
    # they are, and with a whole one only once sequences are cut, that pays in long sequences only.
    heads = inv.dims["N"] * inv.dims["H"]
    # The assembler in the driver, which JAX takes, makes slower code of the narrow walks than Triton's own.
    short = inv.dims["T"] <= (2048 if inv.framework == "jax" and "g" not in inv.arrays else 8192)
    wide = min(K, V) > 64 and not (48 < heads <= 66 and short)
    stages = 3 if "g" in inv.arrays else 4
    return replace(cfg, block_q=64, block_d=128 if wide else 64, num_warps=8 if wide else 4, num_stages=stages)


def _exact_chunk(wide: bool) -> int:
    """Tokens per chunk in float32: with 32 and wide heads, ptxas runs out of registers, and 13.0 builds wrong code."""
    return 16 if wide else 32


def candidates(inv, cfg):
    """Tiles of 64 and 128 dimensions, and of 32 only where the heuristic takes them; see the note on _GRADIENT."""
    # A tile wider than the heads is cut to them: another name for the same program.
    widest = _tile(max(inv.dims["K"], inv.dims["V"]))
    tiles = {(BV, warps) for BV, warps in ((64, 4), (128, 8)) if widest >= BV}
    return [
        replace(cfg, block_q=BT, block_d=BV, num_warps=warps, num_stages=stages)
        for BT in ((cfg.block_q,) if cfg.block_q == 16 else (32, 64))
        for BV, warps in sorted(tiles | {(cfg.block_d, cfg.num_warps)})
        for stages in (2, 3, 4)
    ]


gla, lightning_attn = implementations(
    __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates, unsupported=unsupported
)
