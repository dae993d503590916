"""The gated delta rule in Triton, for JAX and PyTorch: which kernel runs when.

Forward: a kernel that is parallel over chunks makes what needs no state (``prepare_kernel``), then one walk over each
sequence, head and tile of values has the output. Where these are too few to fill a GPU, sequences are cut into
segments: a walk over all of them at once gives each one's own state and its matrix, which takes the state before it to
the one after; ``join_kernel`` makes from these the states that segments start from, exactly.

Backward: nothing is kept. The forward walk is done again, and leaves the state before each chunk; the adjoint walk
leaves the gradient of the state after it; from both, kernels that are parallel over chunks make the gradients. With
gates per dimension one makes them all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from keraunos import frontends
from keraunos.frontends import shared_memory
from keraunos.frontends.array_types import Array
from keraunos.kernels.device import limits
from keraunos.kernels.device.limits import four_warps, precision
from keraunos.kernels.device.sums import over_shared, summed
from keraunos.kernels.gated_delta_rule import norms
from keraunos.kernels.gated_delta_rule.contract import Args, Options, kernel
from keraunos.kernels.gated_delta_rule.dimension_gradients import dimension_gradients_plan
from keraunos.kernels.gated_delta_rule.joins import join_plan
from keraunos.kernels.gated_delta_rule.stretches import joined
from keraunos.kernels.gated_delta_rule.triton import chunks, walks
from keraunos.kernels.host.arrays import Spec, pow2, spec_of, strides_by_name, tile, unit_of
from keraunos.kernels.host.plan import Plan, named, remember
from keraunos.kernels.host.pool import NO_POOL, NO_STATES, Pool
from keraunos.kernels.host.sequences import Sizes
from keraunos.kernels.state_pool.prompts import Walk
from keraunos.kernels.state_pool.triton import passes as pool_passes
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q", "block_d", "num_warps", "num_stages")

# Programs that fill the largest GPUs; a cut takes a second walk with twice the columns, so it pays where a quarter of
# these is idle. Tokens that make a segment worth its while.
_PROGRAMS, _MIN_SEGMENT = 264, 512
# Kernels of gradients, and the dimensions of K and of V that they take at once. These tiles are never cut to fewer
# dimensions: with 16 of float32, Triton 3.6 builds code for Hopper that writes elsewhere.
_GRADIENTS = {
    "pairs": chunks.pairs_gradient_kernel,
    "queries": chunks.queries_gradient_kernel,
    "keys": chunks.keys_gradient_kernel,
}
_DIMENSIONS = 64


class Call(Sizes):
    """One call as the Triton kernels see it, and how its sequences are cut."""

    def __init__(self, specs: Args, opts: Options, shared: int):
        super().__init__(specs, opts)
        self.shared = shared
        self.exact = self.dtype == "float32"
        self.terms = 3 if self.exact else 2
        self.precision, self.fine = precision(self.exact), precision(True) if self.exact else limits.finer()
        # How far gates may sum below 0, base 2, where their factors still are in the dtype's range with much to spare.
        self.mild = 92.0 if self.dtype == "bfloat16" else -1.0
        self.BT: int = self.cfg.block_q
        self.BV: int = min(self.cfg.block_d, tile(self.V))
        # Tokens of a segment; 0: sequences are not cut.
        programs = self.N * self.H * -(-self.V // self.BV)
        count = min(_PROGRAMS // max(programs, 1), self.T // _MIN_SEGMENT)
        # Tokens that programs of gradients take at once: more than a walk's chunks, so that fewer states are kept; with
        # gates per dimension 32, so that strong gates have fewer steps.
        self.BG = max(self.BT, 32 if self.gate == 2 else self.BT if self.exact else 64)
        self.L = -(-self.T // (count * self.BG)) * self.BG if count > 3 else 0
        self.chunks, self.segments = self.slots(self.BT), self.slots(self.L) if self.L else self.N

    def slots(self, length: int) -> int:
        """How many parts of a length sequences have at most; a packed one may end in a shorter part anywhere."""
        return self.T // length + self.N if self.packed else self.N * -(-self.T // length)


@remember
def call_of(specs: Args, opts: Options, shared: int) -> Call:
    """The call; the same object for all that are alike. shared: bytes of shared memory that a program may have."""
    return Call(specs, opts, shared)


class Prepared(NamedTuple):
    """The results of ``prepare_kernel``, and the queries and keys that walks read: decayed by gates per dimension."""

    near: Array
    pairs: Array
    alike: Array
    enter: Array | None
    leave: Array | None
    q: Array
    k: Array
    kl: Array


def _plan(call: Call, kernel: Any, programs: int, outputs: dict[str, Any], constants: dict[str, Any], num_warps: int,
          num_stages: int, **arrays: Spec | None) -> Plan:
    """A launch; of the numbers and constants that several kernels have, each takes those that it names.

    arrays: those of tokens, by their names in the kernel.
    """
    beta, g = call.specs.beta, call.specs.g
    unit = unit_of(*arrays.values())
    strides = strides_by_name(unit, "bth", **arrays) | strides_by_name(g=g) | strides_by_name(b=beta)
    numbers = strides | dict(scale=call.scale, T=call.T, N=call.N, ROWS=call.B * call.T) | constants
    fixed = call.ratios(**arrays, g=g, b=beta) | strides_by_name(1, "t", **arrays) | dict(
        H=call.H, K=call.K, V=call.V, UNIT=unit, BT=call.BT, BN=pow2(call.N), GATE=call.gate, BETA=beta is not None,
        EXACT=call.exact, TERMS=call.terms, REVERSE=call.reverse, PACKED=call.packed, PRECISION=call.precision,
        DG_TERMS={"bfloat16": 1, "float16": 2}.get(call.dtype, 3), NEED_G=call.opts.needs(call.specs, "g"),
    ) | constants
    return Plan(kernel, (programs,), named(kernel, numbers)[0], outputs, named(kernel, fixed)[1], num_warps, num_stages)


@remember
def _prepare_plan(call: Call, q: Spec, k: Spec) -> Plan:
    H, BT, dtype = call.H, call.BT, call.dtype
    square, row = (call.chunks, H, BT, BT), ((call.chunks, H, BT), "float32")
    decayed = ((call.B, call.T, H, call.K), dtype) if call.gate == 2 else None
    enter = {0: None, 1: row, 2: ((call.chunks, H, call.K), "float32")}[call.gate]
    outputs = dict(near=(square if call.exact else (*square[:2], 2, BT, BT), dtype), pairs=(square, dtype),
                   alike=((call.chunks, H), "int32"), enter=enter, leave=row if call.gate == 1 else None,
                   qd=decayed, ke=decayed, kl=decayed)
    constants = dict(BK=min(tile(call.K), 64), FINE=call.fine, MILD=call.mild)
    num_warps = 2 if call.gate == 2 or call.exact else 1
    return _plan(call, chunks.prepare_kernel, call.chunks * H, outputs, constants, num_warps, 2, q=q, k=k)


def _specs(call: Call, *arrays: Array) -> list[Spec]:
    """The properties of arrays of tokens; those of a pool's calls have no axis for the batch."""
    return [x if len(x.shape) == 4 else x.row(call.T) for x in map(spec_of, arrays) if x]


def prepare(call: Call, args: Args) -> Prepared:
    """Launch ``prepare_kernel``."""
    plan = _prepare_plan(call, *_specs(call, args.query, args.key))
    near, pairs, alike, enter, leave, q, k, kl = plan.launch(q=args.query, k=args.key, g=args.g, beta=args.beta,
                                                             cu_seqlens=args.cu_seqlens)
    if call.gate < 2:
        q, k, kl = args.query, args.key, args.key
    return Prepared(near, pairs, alike, enter, leave, q, k, kl)


@remember
def _walk_plan(call: Call, q: Spec, k: Spec, x: Spec, name: str, split: bool, init: bool, output: bool, save: bool,
               final: int, matrix: bool, pool: Pool | None = None) -> Plan:
    """A walk over the values (name "v"), or the adjoint one over the output's gradient ("o")."""
    H, K, V, forward = call.H, call.K, call.V, name == "v"
    W = V + K if matrix else V
    BV = min(call.cfg.block_d, tile(W))
    tokens, saved = ((call.B, call.T, H, V), call.dtype), ((call.slots(call.BG), H, K, V), call.dtype)
    ends = (call.segments if final == 2 else call.N, H, K, W)
    end = call.specs.initial_state.dtype if final == 1 and not forward else "float32"
    made = [tokens if save else None, saved if save else None, (ends, end) if final else None]
    names = ("errors", "hs", "ht") if forward else ("rights", "dhs", "dh0")
    outputs = (dict(o=tokens if output else None) if forward else {}) | dict(zip(names, made, strict=True))
    if pool:
        # The states are not made, but put where they came from.
        outputs |= dict(o="into" if pool.into else ((pool.T, H, V), call.dtype), ht="pool")
    constants = dict(L=call.L if split else max(call.T, 1), BK=tile(K), BV=BV, W=W, OUTPUT=output, SPLIT=split,
                     INIT=init, SAVE=save and call.BG // call.BT, FINAL=final, ROWS=pool.T if pool else 0,
                     EXPORT=bool(pool and pool.exports), **(pool.flags() if pool else NO_POOL))
    programs = (call.segments if split else call.N) * H * -(-W // BV)
    return _plan(call, walks.walk_kernel if forward else walks.adjoint_kernel, programs, outputs, constants,
                 call.cfg.num_warps, call.cfg.num_stages, q=q, k=k, **{name: x})


def walk(call: Call, args: Args, ready: Prepared, h0: Array | None, *, split: bool = False, output: bool = False,
         save: bool = False, final: int = 0, matrix: bool = False, pool: Pool | None = None) -> tuple:
    """One forward walk: ``(output, errors, states before chunks, last states)``, None for what is not wanted."""
    plan = _walk_plan(call, *_specs(call, ready.q, ready.k), call.specs.value, "v", split, h0 is not None, output, save,
                      final, matrix, pool and pool.specs())
    return plan.launch(q=ready.q, k=ready.k, kl=ready.kl, v=args.value, beta=args.beta, near=ready.near,
                       pairs=ready.pairs, alike=ready.alike, enter=ready.enter, leave=ready.leave, h0=h0,
                       into=args.value if pool is None or pool.into is None else pool.into, cu_seqlens=args.cu_seqlens,
                       **(pool or NO_STATES).arrays())


def adjoint(call: Call, args: Args, ready: Prepared, do: Array, dht: Array | None, *, split: bool = False,
            save: bool = False, final: int = 0) -> tuple:
    """One adjoint walk: ``(R, gradients of the states after chunks, of the first states)``."""
    plan = _walk_plan(call, spec_of(ready.q), spec_of(ready.k), spec_of(do), "o", split, dht is not None, False, save,
                      final, False)
    return plan.launch(q=ready.q, k=ready.k, kl=ready.kl, do=do, beta=args.beta, near=ready.near, pairs=ready.pairs,
                       alike=ready.alike, enter=ready.enter, leave=ready.leave, dht=dht, cu_seqlens=args.cu_seqlens)


def starts_of(call: Call, args: Args, ready: Prepared,
              pool: Pool | None = None) -> tuple[Array | None, Array | None]:
    """The states that forward walks start from, and the segments' states and matrices, where sequences are cut."""
    if not call.L:
        return args.initial_state, None
    local = walk(call, args, ready, None, split=True, final=2, matrix=True)[-1]
    given = pool or NO_STATES
    (starts,) = join_plan(call, args.initial_state is not None, False, pool and pool.specs()).launch(
        local=local, matrices=local, h0=pool.states if pool else args.initial_state, cu_seqlens=args.cu_seqlens,
        slots=given.slots, has_initial=given.has_initial)
    return starts, local


def ends_of(call: Call, args: Args, ready: Prepared, do: Array, dfinal: Array | None,
            matrices: Array | None) -> Array | None:
    """The gradients of states that adjoint walks start from."""
    if not call.L:
        return dfinal
    local = adjoint(call, args, ready, do, None, split=True, final=2)[-1]
    (ends,) = join_plan(call, dfinal is not None, True).launch(local=local, matrices=matrices, h0=dfinal,
                                                               cu_seqlens=args.cu_seqlens, slots=None,
                                                               has_initial=None)
    return ends


def _normalised(opts: Options, args: Args) -> Args:
    """The arrays with queries and keys of length 1, if that is wanted."""
    if not opts.use_qk_l2norm:
        return args
    return args._replace(query=norms.normalised(args.query), key=norms.normalised(args.key))


def forward(args: Args, opts: Options, pool: Pool | None = None) -> tuple[tuple[Array, Array | None], tuple]:
    """``((output, final_state), ())``: the backward needs the inputs only.

    With a pool, which is the final state then, the arrays of tokens have no axis for the batch.
    """
    call = call_of(pool.call if pool else Args(*map(spec_of, args)), opts, shared_memory(args.query))
    args = _normalised(opts, args)
    ready = prepare(call, args)
    starts, _ = starts_of(call, args, ready, pool)
    output, _, _, final = walk(call, args, ready, starts, split=call.L > 0, output=True, final=int(opts.state),
                               pool=pool)
    return (output, final), ()


@remember
def _call_of_stretch(specs: Args, opts: Options, shared: int) -> Call:
    """A stretch of a longer sequence as a call. Packed it is not cut: its length is not known here."""
    call = Call(specs, opts, shared)
    if call.packed:
        call.L, call.segments = 0, call.N
    return call


def _of_stretch(args: Args, opts: Options) -> tuple[Call, Args, Prepared]:
    call = _call_of_stretch(Args(*map(spec_of, args)), opts, shared_memory(args.query))
    args = _normalised(opts, args)
    return call, args, prepare(call, args)


def states_left(args: Args, opts: Options) -> Array:
    """The state and the matrix that a stretch leaves; see :mod:`keraunos.kernels.gated_delta_rule.stretches`."""
    call, args, ready = _of_stretch(args, opts)
    left = walk(call, args, ready, None, split=call.L > 0, final=2, matrix=True)[-1]
    return left[1:2] if call.packed else joined(left, call.B, call.V)


def gradient_left(args: Args, opts: Options, doutput: Array, end: Any) -> Any:
    """The gradient of a state that a stretch leaves; see :mod:`keraunos.kernels.gated_delta_rule.stretches`."""
    frontend, (call, args, ready) = frontends.of(args.query), _of_stretch(args, opts)
    xp = frontend.xp
    if not call.L:
        if call.packed and end is not None:
            end = xp.concatenate([xp.zeros_like(end), end, xp.zeros_like(end)])
        left = adjoint(call, args, ready, doutput, end, final=2)[-1]
        return left[1:2] if call.packed else left
    matrices = walk(call, args, ready, None, split=True, final=2, matrix=True)[-1][..., call.V :]
    local = adjoint(call, args, ready, doutput, None, split=True, final=2)[-1]
    left = joined(xp.concatenate([local, matrices.mT], -1), call.B, call.V, backwards=True)
    local = left[..., : call.V]
    return local if end is None else local + frontend.product(left[..., call.V :], end)


@remember
def _gradient_plan(call: Call, name: str, q: Spec, k: Spec, do: Spec) -> Plan:
    """The launch that makes the gradients of "pairs", "queries" or "keys", where gates are of tokens."""
    H, K, V, beta = call.H, call.K, call.V, call.specs.beta
    tokens, parts = (call.B, call.T, H), -(-K // _DIMENSIONS)
    query, key, value = call.specs[:3]
    chunks = call.slots(call.BG)
    square = (chunks, H, call.BG, call.BG), call.dtype
    outputs: dict[str, dict[str, Any]] = dict(
        pairs=dict(dpairs=square, dkeys=square, dv=((*tokens, V), call.dtype_of_each(value)),
                   dbeta=None if beta is None else (tokens, call.dtype_of_each(beta)),
                   dg=(tokens, "float32")),
        queries=dict(dq=(query.shape, query.dtype), dg=((parts, *tokens), "float32")),
        keys=dict(dk=(key.shape, key.dtype), dg="dg_given"),
    )
    if not call.opts.needs(call.specs, "g"):
        outputs[name]["dg"] = None
    shared = dict(pairs=1, queries=call.ratio(query), keys=call.ratio(key))[name]
    programs = chunks * H // shared * (1 if name == "pairs" else parts)
    constants, num_warps = dict(BT=call.BG, BK=_DIMENSIONS, BV=_DIMENSIONS), 4 if call.BG == 64 else 2
    return _plan(call, _GRADIENTS[name], programs, outputs[name], constants, num_warps, 2, q=q, k=k, o=do)


def _gradients_of_tokens(call: Call, args: Args, do: Array, errors: Array, rights: Array, hs: Array,
                         dhs: Array) -> tuple:
    """The gradients of queries, keys, values, gates and beta without gates or with one per token.

    Those of queries and keys are summed over the heads that share them, the others are of each head.
    """
    q, k, g, beta, cu = args.query, args.key, args.g, args.beta, args.cu_seqlens
    specs = [spec_of(x) for x in (q, k, do)]
    dpairs, dkeys, dv, dbeta, dg = _gradient_plan(call, "pairs", *specs).launch(
        q=q, k=k, g=g, beta=beta, do=do, errors=errors, rights=rights, cu_seqlens=cu)
    dq, dg = _gradient_plan(call, "queries", *specs).launch(
        q=q, k=k, g=g, do=do, hs=hs, dpairs=dpairs, dg_given=dg, cu_seqlens=cu)
    dk, dg = _gradient_plan(call, "keys", *specs).launch(
        q=q, k=k, g=g, beta=beta, errors=errors, rights=rights, hs=hs, dhs=dhs, dpairs=dpairs, dkeys=dkeys,
        dg_given=dg, cu_seqlens=cu)
    if dg is not None and call.gate == 1:
        whole = (call.B, call.T, call.H)
        dg = summed(dg, 1, dg.shape[0], math.prod(whole), whole, call.dtype_of_each(call.specs.g))
    return dq, dk, dv, dg, dbeta


def _gradients_of_dimensions(call: Call, args: Args, do: Array, errors: Array, rights: Array, hs: Array,
                             dhs: Array) -> tuple:
    """The gradients with gates per dimension, likewise."""
    q, k, g = args.query, args.key, args.g
    plan = dimension_gradients_plan(call, spec_of(q), spec_of(k), call.specs.g, spec_of(do), call.slots(call.BG),
                                    call.BG, values_first=False, from_first=False)
    dq, dk, dv, dg, dbeta = plan.launch(
        q=q, k=k, g=g, beta=args.beta, do=do, errors=errors, rights=rights, states=hs, dstates=dhs, norms=None,
        wanted=None, cu_seqlens=args.cu_seqlens)
    return over_shared(call, dq, call.specs.query), over_shared(call, dk, call.specs.key), dv, dg, dbeta


def backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args``, from those of the output and of the final state (None: zero)."""
    call = call_of(Args(*map(spec_of, args)), opts, shared_memory(args.query))
    given, args = args, _normalised(opts, args)
    do, dfinal = grads
    ready = prepare(call, args)
    starts, matrices = starts_of(call, args, ready)
    split = call.L > 0
    _, errors, hs, _ = walk(call, args, ready, starts, split=split, save=True)
    ends = ends_of(call, args, ready, do, dfinal, matrices)
    rights, dhs, dh0 = adjoint(call, args, ready, do, ends, split=split, save=True,
                               final=int(args.initial_state is not None))
    if call.gate == 2:
        dq, dk, dv, dg, dbeta = _gradients_of_dimensions(call, args, do, errors, rights, hs, dhs)
    else:
        dq, dk, dv, dg, dbeta = _gradients_of_tokens(call, args, do, errors, rights, hs, dhs)
    dv, dg, dbeta = (over_shared(call, *x) for x in zip((dv, dg, dbeta), call.specs[2:5], strict=True))
    if opts.use_qk_l2norm:
        dq, dk = norms.gradient(given.query, dq), norms.gradient(given.key, dk)
    return Args(dq, dk, dv, dg, dbeta, dh0)


def unsupported(inv: Invocation) -> str | None:
    """Why Triton cannot run the call, or None."""
    return limits.cannot_run(inv, inv.arrays["query"][0], any_value=True)


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """Chunks of 32 tokens, and programs of four warps with 64 columns of a state.

    With 64 tokens a walk needs more registers than there are, and to prepare a chunk takes three times as long.
    """
    exact, wide = inv.arrays["query"][0] == "float32", max(inv.dims["K"], inv.dims["V"]) > 128
    chosen = four_warps(exact, wide, False, inv.shared_memory)
    return replace(cfg, **{**chosen, "block_q": min(chosen["block_q"], 32)})


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Chunks of 32 and 64 tokens, tiles of 32 to 128 columns of a state, and pipelines of one to three stages."""
    widest = tile(inv.dims["V"])
    return [
        replace(cfg, block_q=BT, block_d=BV, num_warps=warps, num_stages=stages)
        for BT in ((cfg.block_q,) if cfg.block_q == 16 else (32, 64))
        for BV, warps in ((32, 4), (64, 4), (128, 8)) if widest >= BV or BV == 32
        for stages in (1, 2, 3)
    ]


gated_delta_rule = replace(
    kernel("triton", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates,
           unsupported=unsupported),
    parts=(states_left, gradient_left),
)
delta_prefill = pool_passes.prefill(__file__, Walk(Args, Options, forward), FIELDS, heuristic, "delta_prefill")
