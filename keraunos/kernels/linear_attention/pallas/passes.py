"""The recurrence with a decay per head or token on Hopper GPUs: which Pallas Mosaic GPU kernel runs when.

Forward: one fused walk that reads every input once. Where batch times heads does not fill the GPU, sequences are cut
into segments: one kernel gives the states of their pieces, a small one each segment's first state, then all segments
run at once.

Backward: the same walk with its arguments permuted. With L(a, b, c) the recurrence "queries a, keys b, values c" and R
its adjoint, which runs the other way: dq = L(do, v, k), dk = R(v, do, q), dv = R(k, q, do). No states are stored.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from keraunos import frontends
from keraunos.kernels.linear_attention.contract import Args, Options, head_counts
from keraunos.kernels.linear_attention.contract import kernels as implementations
from keraunos.ops.registry import HOPPER

if jax.__version_info__ < (0, 11):
    raise ImportError(f"needs jax 0.11 or later (and so Python 3.12); this is jax {jax.__version__}", name="jax")

from keraunos.kernels.linear_attention.pallas import gates as pallas_gates
from keraunos.kernels.linear_attention.pallas import gates_gradients, gates_scan, gates_starts, gates_strong
from keraunos.kernels.linear_attention.pallas import kernels as kernels
from keraunos.kernels.linear_attention.pallas import starts as pallas_starts

FIELDS = ("num_stages",)

_HEAD_DIMS = (64, 128, 256)
_DTYPES = ("bfloat16", "float16")

# The log of less than any 16-bit value. Sums of a chunk's gates stay small enough that their differences are as good as
# 16-bit inputs if no gate is below it.
_FAINT = -100.0

# What the choice of segments counts with: multiprocessors; the time of a chunk where a program runs alone, relative to
# that where all run and share the memory's bandwidth, which is the unit here; the time for starting programs, for two
# more launches, and for writing and reading a state twice, in that unit.
_PROCESSORS, _ALONE, _START, _LAUNCHES, _STATE = 132, 0.91, 4, 4, 4
# How many times over packed sequences times heads must fill the GPU to be left whole.
_ENOUGH = 3
# Chunks, of all heads, of a call of PyTorch's that ``"auto"`` has kernels compiled for.
_WORTH_COMPILING = 8192
# Chunks of a segment at least; of a piece, where there are two segments, and where more must be joined in turn.
_MIN_SEGMENT, _PIECE_TWO, _PIECE_MORE = 8, 4, 8


def _time(programs: int, chunks: float) -> float:
    """How long programs of so many chunks take, in chunks' time."""
    waves, rest = divmod(programs, _PROCESSORS)
    return (waves + (max(rest / _PROCESSORS, _ALONE) if rest else 0)) * (chunks + _START)


@functools.lru_cache(maxsize=1024)
def segmentation(heads: int, chunks: int, sequences: int = 1, packed: bool = False) -> tuple[int, int]:
    """``(chunks per segment, pieces per segment)`` for so many heads and sequences, packed ones of so many in all."""
    if packed:
        # How long each is nobody knows here: they are cut into what would be the segments of a single one, or there are
        # enough of them that the GPU is busy with others while it does the longest.
        return (chunks, 1) if heads * sequences >= _ENOUGH * _PROCESSORS else segmentation(heads, chunks)
    heads *= sequences

    def cost(segment):
        segments = -(-chunks // segment)
        time = _time(heads * segments, segment)
        if segments > 1:
            # Keys and values are read again, and every segment's state is written and read twice.
            time += _time(heads * (segments - 1), segment / 2) + _LAUNCHES
            time += _STATE * heads * segments / _PROCESSORS
        return time

    cuts = {max(-(-chunks // n), _MIN_SEGMENT) for n in range(2, 2 * _PROCESSORS)}
    segment = min([chunks, *sorted(cuts, reverse=True)], key=cost)
    if segment >= chunks:
        return max(chunks, 1), 1
    # Most heads forget within a piece. For the few that do not, pieces are more programs to share the work; but no
    # segment grows by more than a sixteenth for them.
    most = segment // (_PIECE_TWO if 2 * segment >= chunks else _PIECE_MORE)
    pieces = next(n for n in range(min(16, most), 0, -1) if -(-segment // n) * n * 16 <= segment * 17)
    return -(-segment // pieces) * pieces, pieces


def bucket(tokens: int) -> int:
    """The length that kernels are compiled for in PyTorch: up to an eighth longer, eight for each power of two."""
    step = max(1 << max((tokens - 1).bit_length() - 4, 0), kernels.CHUNK)
    return -(-tokens // step) * step


class _Host:
    """Of a front end, what a plan of offsets needs that are known on the host: see :meth:`Walk.plan`."""

    cast = staticmethod(lambda x, dtype: x.astype(dtype))
    numbers = staticmethod(lambda n, like: np.arange(n, dtype=np.int32))
    stack = staticmethod(np.stack)


@functools.lru_cache(maxsize=1024)
def _plan(walk: kernels.Walk, offsets: tuple[int, ...]) -> np.ndarray:
    return walk.plan(np.array(offsets, np.int32), _Host)


class _Call:
    """One call: its sizes, its arrays with a length that the copies can take, and how its sequences are cut."""

    # Whether gates are per token and dimension.
    vector = False

    def __init__(self, args: Args, opts: Options):
        self.args, self.opts, self.scale = args, opts, opts.softmax_scale
        self.framework = frontends.framework_of(args.query)
        # What is done to arrays outside of kernels.
        self.arrays = frontends.get(self.framework)
        self.B, self.T, self.H, self.K = args.query.shape
        self.G, self.V = args.value.shape[2:]
        self.learned = args.g is not None or opts.needs(args, "g_gamma")
        self.h0 = None if args.initial_state is None else self.arrays.cast(args.initial_state, "float32")
        self.N = self.B if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
        self.cu_seqlens, self.row, length = self.lay_out()
        self.q, self.k, self.v = (self.pad(x) for x in args[:3])
        self.decay = self.decays()
        packed = None if self.cu_seqlens is None else self.N
        segment, pieces = segmentation(self.H, -(-length // kernels.CHUNK), self.N, packed is not None)
        if not self.vector and self.learned and segment * kernels.CHUNK < length:
            # Whole groups of chunks.
            unit = math.lcm(pieces, kernels.GROUP)
            segment = -(-segment // unit) * unit
        if self.vector or args.g is not None or args.g_gamma is None:
            # Every piece is needed, whatever is forgotten: they only share the work, where that is for few programs.
            programs = self.N * self.H * (-(-length // (segment * kernels.CHUNK)) - 1)
            fit = [n for n in range(2, pieces + 1) if segment % n == 0 and programs * n <= pallas_starts.PROGRAMS]
            pieces = max(fit, default=1)
        self.forward = kernels.Walk(length, opts.reverse, False, segment, pieces, packed)
        self.adjoint = kernels.Walk(length, not opts.reverse, True, segment, pieces, packed)
        self.plan = None
        if isinstance(self.cu_seqlens, np.ndarray):
            self.plan = _plan(self.forward, tuple(self.cu_seqlens.tolist()))
        elif packed is not None:
            self.plan = self.forward.plan(self.cu_seqlens, self.arrays)

    def lay_out(self) -> tuple[Any, Any, int]:
        """``(cu_seqlens, row, length)``: offsets of packed sequences, and the tokens of a row.

        In PyTorch, which compiles anew for every length, sequences of most lengths are packed ones at the end of a row
        of another length. Chunks start at multiples of a tile, so that no kernel touches what would lie before them.
        """
        offsets = self.args.cu_seqlens
        if offsets is not None:
            offsets = self.arrays.cast(offsets, "int32")
        tokens, gamma = self.B * self.T, self.args.g_gamma
        # The sequences of a row share their decay.
        alone = gamma is not None and gamma.ndim == 2 and self.B > 1
        if self.framework != "torch" or alone or (offsets is None and bucket(self.T) == self.T):
            return offsets, None, self.T
        length = bucket(tokens)
        lead = length - tokens - -tokens % kernels.TILE
        if offsets is None:
            offsets = np.arange(self.B + 1, dtype=np.int32) * self.T + np.int32(lead)
        elif lead:
            offsets = offsets + lead
        return offsets, frontends.get("torch.pallas").Row(lead, length, kernels.PER_TOKEN), length

    def run(self, kernel: Any, arrays: dict[str, Any], **static: Any) -> Any:
        """Launch a kernel on arrays."""
        if self.framework == "torch":
            return frontends.get("torch.pallas").launch(kernel, arrays, static, self.row)
        return kernel(**arrays, **static)

    def pad(self, x: Any) -> Any:
        """Up to a multiple of 8 tokens, the rows of a tile of a bulk copy."""
        if self.row is None:
            return self.arrays.pad(x, 1, -self.T % kernels.TILE)
        missing = -self.B * self.T % kernels.TILE
        return self.arrays.pad(x.reshape(1, -1, *x.shape[2:]), 1, missing) if missing else x

    def unpad(self, x: Any) -> Any:
        """The tokens of such an array."""
        if x.shape[1] == self.T:
            return x
        return x[:, : self.T if self.row is None else self.B * self.T].reshape(self.B, self.T, *x.shape[2:])

    def decays(self) -> Any:
        """What decays the states."""
        if self.args.g is not None:
            return kernels.Decay(None, self.token_gates())
        gamma = self.args.g_gamma
        none: Any = np.zeros(self.H, np.float32)
        return kernels.Decay(none if gamma is None else self.arrays.cast(gamma, "float32"))

    def token_gates(self) -> Any:
        """Gates and constant decays together, ``[B, H, T]``, base 2, at least ``_FAINT``."""
        g = self.arrays.cast(self.args.g, "float32")
        if self.args.g_gamma is not None:
            gamma = self.arrays.cast(self.args.g_gamma, "float32")
            g = g + (gamma if gamma.ndim == 1 else gamma[:, None])
        g = g.clip(_FAINT) * math.log2(math.e)
        if self.row is None:
            return self.arrays.pad(self.arrays.permute(g, 0, 2, 1), 2, -self.T % kernels.TILE)
        g = self.arrays.permute(g.reshape(1, -1, self.H), 0, 2, 1)
        return self.arrays.pad(g, 2, -g.shape[2] % kernels.TILE, self.row.lead)

    def starts(self, b: Any, c: Any, initial: Any, walk: Any, scale: float = 1.0) -> Any:
        """The state that each segment starts from; where sequences are not cut, the initial ones."""
        if walk.segments == 1 or self.opts.started:
            return initial
        given = dict(b=b, c=c, decay=self.decay, plan=self.plan)
        options: Any = dict(H=self.H, walk=walk, scale=scale, stages=3, from_zero=self.from_zero(initial))
        local, total, starts = self.run(pallas_starts.local_states, given, **options)
        given = dict(local=local, total=total, decay=self.decay, initial=initial, starts=starts,
                     cu_seqlens=self.cu_seqlens)
        return self.run(pallas_starts.combine, given, B=self.B, walk=walk)

    def from_zero(self, initial: Any) -> bool:
        """Whether first segments start without a state in memory: with gates that takes registers they have not."""
        return initial is None and not self.learned

    def scan(self, a: Any, b: Any, c: Any, starts: Any, walk: Any, *, factor: Any = None, gradient: Any = None,
             **options: Any) -> Any:
        """``kernels.scan``, without the rows that were padded; as many stages as were asked for, or as fit."""
        arrays = dict(a=a, b=b, c=c, decay=self.decay, starts=starts, plan=self.plan, factor=factor, gradient=gradient)
        static = {"scale_in": 1.0, "scale_out": 1.0, "output": None, "final": False, "transposed": False} | options
        wanted: Any = self.opts.cfg.num_stages
        output, *more = self.run(kernels.scan, arrays, H=self.H, walk=walk, stages=wanted, **static)
        return self.unpad(output), *more

    def shared(self, x: Any) -> Any:
        """The sum over the query heads that share a key."""
        if self.G == self.H:
            return x
        return x.reshape(*x.shape[:2], self.G, -1, x.shape[-1]).sum(3)

    def of_decay(self, dgates: Any) -> tuple[Any, Any]:
        """The gradients of gates and of constant decays, from that of both per token ``[K / 64, B, H, T]``."""
        if dgates is None:
            return None, None
        first, count = (0, self.T) if self.row is None else (self.row.lead, self.B * self.T)
        dg = self.arrays.permute(dgates[..., first : first + count].sum(0), 0, 2, 1).reshape(self.B, self.T, self.H)
        gamma = self.args.g_gamma
        dgamma = dg.sum(1) if self.opts.needs(self.args, "g_gamma") else None
        if dgamma is not None and gamma.ndim == 1:
            dgamma = dgamma.sum(0)
        return None if self.args.g is None else dg, dgamma

    def outputs(self, starts: Any) -> tuple[tuple[Any, Any], Any]:
        """The output and the final state, if that is wanted; and what :meth:`gradients` had rather than the starts."""
        options: Any = dict(scale_out=self.scale, final=self.opts.state, from_zero=self.from_zero(self.h0))
        output, final, _ = self.scan(self.q, self.k, self.v, starts, self.forward, **options)
        return (output, final), None

    def gradients(self, starts: Any, do: Any, dfinal: Any) -> Args:
        """The arguments' gradients, from those of the output, padded, and of the final state."""
        q, k, v = self.q, self.k, self.v
        ends = self.starts(q, do, dfinal, self.adjoint, self.scale)
        # Sums over the heads that share a key are made of float32.
        each = None if self.G == self.H else "float32"
        learned = self.learned
        back: Any = dict(walk=self.adjoint, scale_in=self.scale, output=each, from_zero=self.from_zero(dfinal))
        dk, _, gradient = self.scan(v, do, q, ends, transposed=True, factor=k if learned else None, **back)
        dq, _, dgates = self.scan(do, v, k, starts, self.forward, from_zero=self.from_zero(self.h0), transposed=True,
                                  scale_out=self.scale, factor=q if learned else None, gradient=gradient)
        dv, dh0, _ = self.scan(k, q, do, ends, final=self.h0 is not None, **back)
        return Args(dq, self.shared(dk), self.shared(dv), *self.of_decay(dgates), dh0)


class _VectorCall(_Call):
    """A call with gates per token and dimension, which have kernels of their own."""

    vector = True

    def decays(self) -> Any:
        """What decays the states."""
        gamma = self.args.g_gamma
        gamma = None if gamma is None else self.arrays.cast(gamma, "float32")
        g = self.pad(self.args.g)
        if self.arrays.dtype_name(g) == "bfloat16":
            return pallas_gates.Decay((g,), gamma)
        # The tensor cores sum bf16 terms exactly: two have 16 bits at least.
        g = self.arrays.cast(g, "float32").clip(pallas_gates.CLOSED)
        high = self.arrays.rounded(g, "bfloat16")
        return pallas_gates.Decay((self.arrays.cast(high, "bfloat16"), self.arrays.cast(g - high, "bfloat16")), gamma)

    def lay_out(self) -> tuple[Any, Any, int]:
        """As they are: in PyTorch each length is compiled for."""
        offsets = self.args.cu_seqlens
        return None if offsets is None else self.arrays.cast(offsets, "int32"), None, self.T

    def walked(self, kernel: Any, walk: Any, arrays: dict[str, Any], **static: Any) -> Any:
        """What a kernel gives that walks through sequences."""
        static |= dict(H=self.H, walk=walk, scale=self.scale, stages=self.opts.cfg.num_stages)
        return self.run(kernel, dict(decay=self.decay, plan=self.plan, **arrays), **static)

    def starts(self, b: Any, c: Any, initial: Any, walk: Any, scale: float = 1.0) -> Any:
        """The state that each segment starts from; where sequences are not cut, the initial ones."""
        if walk.segments == 1:
            return initial
        local, sums = self.walked(gates_scan.states, walk, dict(x=b, y=c, starts=None), every=False)
        if walk.segments == 2:
            return gates_starts.Pieces(local, sums, initial)
        given = dict(local=local, sums=sums, initial=initial, cu_seqlens=self.cu_seqlens)
        return self.run(gates_starts.combine, given, B=self.B, walk=walk)

    def outputs(self, starts: Any) -> tuple[tuple[Any, Any], Any]:
        """The output and the final state; and what :meth:`gradients` had rather than the starts: in JAX, every state.

        That is as large as two of the inputs, and takes half the time here that it takes if it is made later.
        """
        # Where XLA may share the call out, what is kept is dropped, and made again.
        every = self.opts.kept and self.framework == "jax" and frontends.get("jax.partition").is_settled()
        given = dict(q=self.q, k=self.k, v=self.v, starts=starts)
        options: Any = dict(final=self.opts.state, every=every)
        output, final, states = self.walked(gates_scan.scan, self.forward, given, **options)
        return (self.unpad(output), final), states

    def gradients(self, saved: Any, do: Any, dfinal: Any) -> Args:
        """The arguments' gradients, from starts or every state, the output's, padded, and the final state's."""
        ends = self.starts(self.q, do, dfinal, self.adjoint)
        if not isinstance(saved, gates_scan.Every):
            given = dict(x=self.k, y=self.v, starts=saved)
            saved = self.walked(gates_scan.states, self.forward, given, every=True)
        before, last = saved
        given = dict(q=self.q, k=self.k, v=self.v, do=do, before=before, ends=ends, last=last)
        dq, dk, dv, dh0, strong, *terms = self.walked(gates_gradients.gradients, self.adjoint, given)
        given = dict(q=self.q, k=self.k, v=self.v, decay=self.decay, do=do, strong=strong, plan=self.plan,
                     dq=dq, dk=dk, dv=dv, terms=terms)
        static = dict(H=self.H, walk=self.adjoint, scale=self.scale)
        dq, dk, dv, *terms = self.run(gates_strong.add_pairs, given, **static)
        # A single term is of the gates' own dtype.
        dg = self.unpad(terms[0] if len(terms) == 1 else sum(self.arrays.cast(x, "float32") for x in terms))
        dk, dv = (self.shared(self.arrays.cast(x, "float32") if self.G < self.H else x) for x in (dk, dv))
        gamma, dgamma = self.args.g_gamma, None
        if self.opts.needs(self.args, "g_gamma"):
            dgamma = self.arrays.cast(dg, "float32").sum((1, 3) if gamma.ndim == 2 else (0, 1, 3))
        return Args(self.unpad(dq), self.unpad(dk), self.unpad(dv), dg, dgamma, None if self.h0 is None else dh0)


def _call(args: Args, opts: Options) -> _Call:
    return (_VectorCall if args.g is not None and args.g.ndim == 4 else _Call)(args, opts)


def forward(args: Args, opts: Options):
    """``((output, final_state), residuals)``: in JAX states that the backward needs."""
    call = _call(args, opts) if args.query.shape[1] else None
    if call is None:
        outputs, saved = _no_tokens(args), None
    else:
        starts = call.starts(call.k, call.v, call.h0, call.forward)
        outputs, saved = call.outputs(starts)
        if saved is None and call.forward.segments > 1:
            saved = starts
    # PyTorch's compiler wants the shapes of residuals for lengths that it leaves open: there they are made again.
    return outputs, () if frontends.framework_of(args.query) == "torch" else (saved,)


def backward(args: Args, residuals, grads, opts: Options) -> Args:
    """The gradients of ``args`` from those of the output and of the final state, which may be None."""
    doutput, dfinal = grads
    arrays = frontends.of(args.query)
    if not args.query.shape[1]:
        given = _no_gradients(args, dfinal, opts)
    else:
        call, saved = _call(args, opts), residuals[0] if residuals else None
        if saved is None:
            saved = call.starts(call.k, call.v, call.h0, call.forward)
        dfinal = None if dfinal is None else arrays.cast(dfinal, "float32")
        given = call.gradients(saved, call.pad(doutput), dfinal)
    return Args(*(None if d is None else arrays.cast(d, arrays.dtype_name(x))
                  for x, d in zip(args, given, strict=True)))


def _no_tokens(args: Args):
    arrays = frontends.of(args.query)
    (B, _, H, K), V = args.query.shape, args.value.shape[-1]
    N = B if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    state = args.initial_state
    # A copy: an operation of PyTorch's may not return what it was given.
    state = arrays.zeros((N, H, K, V), "float32", args.query) + (0 if state is None else arrays.cast(state, "float32"))
    return arrays.zeros((B, 0, H, V), arrays.dtype_name(args.query), args.query), state


def _no_gradients(args: Args, dfinal: Any, opts: Options) -> Args:
    """Where there are no tokens: all zero but that of the initial state."""
    arrays = frontends.of(args.query)
    wanted = args._replace(g_gamma=args.g_gamma if opts.needs(args, "g_gamma") else None, cu_seqlens=None)
    given = Args(*(None if x is None else arrays.zeros(x.shape, arrays.dtype_name(x), x) for x in wanted))
    if dfinal is not None and args.initial_state is not None:
        given = given._replace(initial_state=given.initial_state + arrays.cast(dfinal, "float32"))
    return given


def segment(args: Args, opts: Options) -> tuple[int, bool] | None:
    """The tokens of a segment, if rows of one length are cut into several."""
    if "g_gamma" in opts.constant:
        args = args._replace(g_gamma=None)
    call = _call(args, opts) if args.query.shape[1] else None
    if call is None or call.vector or call.cu_seqlens is not None or call.forward.segments == 1:
        return None
    return call.forward.segment * kernels.CHUNK, True


def unsupported(inv) -> str | None:
    """Why these kernels cannot run the call, or None."""
    K, V, dtype = inv.dims["K"], inv.dims["V"], inv.arrays["query"][0]
    name, pattern = HOPPER
    if inv.backend != "gpu" or not re.search(pattern, inv.device):
        return f"needs {name}; the call's arrays are on {inv.device}"
    if inv.framework == "torch" and (reason := frontends.get("torch.pallas").unsupported()):
        return reason
    heads, H = head_counts(inv.dims), inv.dims["H"]
    if heads["query"] < H or heads["key"] != heads["value"] or ("g" in inv.arrays and heads["g"] < H):
        return "takes as many heads of values as of keys, and of gates as of queries, of which none has more"
    if dtype not in _DTYPES:
        return f"takes bfloat16 and float16, whose products the tensor cores do; the call has {dtype}"
    gates = inv.arrays.get("g", (None, 0))[1]
    learned = "g_gamma" in inv.arrays and "g_gamma" not in inv.constants
    if dtype == "float16" and (gates or learned):
        return "takes gates and decays that are arrays in bfloat16: float16 is too narrow for their gradients"
    if gates == 4 and (K not in _HEAD_DIMS[:2] or V not in _HEAD_DIMS[:2]):
        return f"takes head dims of 64 and 128 with gates per token and dimension; the call has K = {K}, V = {V}"
    if K not in _HEAD_DIMS or V not in _HEAD_DIMS:
        return f"takes head dims of 64, 128 and 256; the call has K = {K}, V = {V}"
    return None


def loses(inv) -> str | None:
    """Why ``"auto"`` should prefer others, or None: what it cannot run, and where Triton was measured to be faster."""
    heads, chunks = inv.dims["N"] * inv.dims["H"], -(-inv.dims["T"] // kernels.CHUNK)
    if inv.framework == "torch":
        if heads * chunks < _WORTH_COMPILING:
            return "has kernels compiled for every size, for seconds, which so small a call is not worth"
        if "cu_seqlens" in inv.arrays or bucket(inv.dims["T"]) != inv.dims["T"]:
            return "is at its best in PyTorch where sequences are not packed and have a length that it compiles for"
        if "g" in inv.arrays or "g_gamma" not in inv.constants:
            return "makes the gradients of gates and of decays that are tensors, wanted or not; is at its best without"
    # Triton then has two programs per head, which fill the GPU. With gates it was slower all the same.
    if "g" not in inv.arrays and 32 < heads < 96 and 0 < chunks < 64 and segmentation(heads, chunks)[0] >= chunks:
        return "is slower than Triton where half the GPU's programs would do and sequences are too short to be cut"
    return unsupported(inv)


def heuristic(inv, cfg):
    """Two stages: a third was measured to be slower by one to seven percent."""
    return replace(cfg, num_stages=2)


def candidates(inv, cfg):
    """Two to four stages; of head dims of 128, no more than three fit."""
    most = kernels.room(inv.dims["K"], inv.dims["V"], "bfloat16").stages
    return [replace(cfg, num_stages=n) for n in range(2, min(most, 4) + 1)]


gla, lightning_attn = implementations(
    "pallas",
    __file__,
    forward,
    backward,
    fields=FIELDS,
    heuristic=heuristic,
    candidates=candidates,
    unsupported=unsupported,
    segment=segment,
)
preferred_gla, preferred_lightning_attn = (replace(x, loses=loses) for x in (gla, lightning_attn))
