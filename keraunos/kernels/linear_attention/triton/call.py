"""One call of the recurrence as its Triton kernels see it: what is known of its arrays, how its sequences are cut."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any, NamedTuple, cast

from keraunos.frontends import SHARED_MEMORY
from keraunos.kernels.device.limits import LITTLE, precision
from keraunos.kernels.host.arrays import dtype_of, pow2, tile
from keraunos.kernels.host.plan import Plan, named, remember
from keraunos.kernels.host.sequences import Sizes, cut, sequence_count
from keraunos.kernels.linear_attention.contract import Args, Options

# Programs that fill the largest GPUs. With fewer, sequences are cut into segments, for which a pass over pieces of them
# makes the states that they start from. Tokens that make a segment and a piece worth their while. Pieces, times heads,
# that run at once; and that share the pass evenly where constant decays leave most heads little to do.
_PROGRAMS = 128
_MIN_SEGMENT, _MIN_PIECE = 512, 1024
_PIECES, _PIECES_FORGETTING = 198, 2048
# Pieces of a segment at most, where others have the rest of the sequence: those of all heads take tens of megabytes.
_STRETCH_PIECES = 8
# Parts of a walk, one after the other, in which gradients of gates are made; and the chunks of the shortest. With many
# segments the states that parts start from count too.
_PARTS, _MIN_PART = 5, 16
_SEGMENT_PARTS, _MIN_SEGMENT_PART = 6, 10
# Heads of all sequences that leave segments too short for so many parts: gradients walk them in pairs then, and each
# program has but this many of V's dimensions, half of what it has elsewhere.
_FEW_HEADS, _HALF_TILE = 24, 64


class Part(NamedTuple):
    """Some tokens of some walks, ``call.M`` from the first ``token`` of the walk on; last: the walks end there."""

    token: int
    walk: int
    walks: int
    last: bool


class Call(Sizes):
    """One call as the Triton kernels see it, and how its sequences are cut."""

    def __init__(self, specs: Args, opts: Options, shared: int, heads: int = 0):
        super().__init__(specs, opts, heads)
        # Whether so little shared memory makes it worth its while to have less on its way, for two programs at once.
        self.little = shared < LITTLE
        self.need_gate = needs_gates(specs, opts)
        # Of the gradient of gates, before it is summed over what shares a gate.
        self.dg = "float32" if self.need_gamma or self.gate < 2 else self.dtype_of_each(specs.g)
        self.exact = self.dtype == "float32"
        plain = self.gate and specs.g.dtype == "bfloat16" and not self.has_gamma
        self.terms = 3 if self.exact else 1 if plain else 2
        self.precision = precision(self.exact)
        # How far gates may sum below 0, base 2, where their factors still are in the dtype's range with much to spare.
        self.mild = 92.0 if self.dtype == "bfloat16" else 0.0
        self.BT: int = cast(int, self.cfg.block_q)
        # Whether the gradient of the gates can be where the pairs of halved chunks were.
        self.shares_pairs = self.dg == self.dtype and self.K >= self.BT
        # Tokens per segment (0: sequences are not cut) and pieces per segment.
        forgets = self.has_gamma and not self.gate
        self.L, self.P = segmentation(self.T, self.N * self.H, _programs(specs, opts), self.BT, forgets)
        self.chunks = self.slots(self.BT)
        # Tokens per walk, and per part of it (0: walks are not parted); whether gradients walk segments in pairs.
        self.walk = self.L or max(-(-self.T // self.BT), 1) * self.BT
        self.M, self.in_pairs = 0, False
        self.parts: list[Part] = []
        if self.need_gate and self.N and not self.packed:
            self._part(_programs(specs, opts))

    def _part(self, programs: int) -> None:
        """Choose the parts in which gradients of gates are made: of the sequences, if those are many, and of each."""
        most, least = (_SEGMENT_PARTS, _MIN_SEGMENT_PART) if self.L else (_PARTS, _MIN_PART)
        groups = max(min(programs // _PROGRAMS, most, self.N), 1)
        count = self.walk // self.BT
        parts = max(min(count // least, -(-most // groups)), 1)
        if not self.L and groups * parts == 1:
            return
        if self.L and self.N * self.H <= _FEW_HEADS and least <= count < least * most:
            self._pair(max(min(2 * count // least, most) // 2, 1))
        if not self.in_pairs:
            self.M = -(-count // parts) * self.BT
        self._list_parts(-(-self.N // groups))

    def _pair(self, parts: int) -> None:
        """Let gradients walk segments in pairs if tiles can be halved; parts: of a segment, all of one length.

        A pair has the parts of its segments, in their order.
        """
        unit = parts * self.P * self.BT
        L = -(-self.L // unit) * unit
        alike = self.N == 1 or -(-self.T // L) % 2 == 0
        self.in_pairs = alike and min(self.cfg.block_d, tile(min(self.K, self.V))) == 2 * _HALF_TILE
        if self.in_pairs:
            self.L = self.walk = L
            self.M = L // parts

    def _list_parts(self, most: int) -> None:
        """From the last that a walk comes to, to the first; most: sequences at once."""
        tokens, walks = range(0, self.walk, self.M), -(-self.T // self.walk)
        for n in range(0, self.N, most):
            for token in tokens if self.reverse else reversed(tokens):
                last = token == tokens[-1 if self.reverse else 0]
                self.parts.append(Part(token, n * walks, min(most, self.N - n) * walks, last))

    def cut_stretch(self, segment: int) -> None:
        """Cut what is a stretch of a longer sequence into pieces, of segments of so many tokens; 0: of one segment."""
        most = _PIECES_FORGETTING if self.has_gamma and not self.gate else _PIECES
        one = cut(max(self.T, 1), 1, most // max(self.N * self.H, 1), _MIN_PIECE, self.BT)
        self.L, self.P = (segment, pieces_of(segment)) if segment else one
        self.M, self.in_pairs, self.parts = 0, False, []

    @functools.cached_property
    def of_gradients(self) -> Call:
        """The call as gradients of gates walk it: pairs of segments, by as many programs, each with half a tile.

        The states before chunks are kept for a part of all walks, half as many as for segments. If the states that
        segments start from are made already, segments are walked one by one.
        """
        if not self.in_pairs or self.opts.started:
            return self
        call = copy.copy(self)
        call.cfg = replace(self.cfg, block_d=_HALF_TILE, num_warps=self.cfg.num_warps // 2)
        call.L, call.P, call.walk, call.parts = 2 * self.L, 2 * self.P, 2 * self.walk, []
        call._list_parts(self.N)
        return call

    def slots(self, length: int) -> int:
        """How many parts of a length sequences have at most; a packed one may end in a shorter part anywhere."""
        return self.T // length + self.N if self.packed else self.N * -(-self.T // length)

    def place(self, part: Part | None) -> dict[str, int]:
        """Tokens per part, and where a part begins."""
        return dict(M=self.M, F=part.token if part else 0, W=part.walk if part else 0)

    def chunk_slots(self, part: Part | None) -> int:
        """How many chunks a part has at most (None: all walks)."""
        if self.packed:
            return self.chunks
        return part.walks * (self.M // self.BT) if part else self.N * -(-self.T // self.walk) * (self.walk // self.BT)

    def plan(self, kernel: Any, programs: int, outputs: dict[str, Any], num_warps: int, num_stages: int,
             **own: Any) -> Plan:
        """The launch of a kernel on what it names of what is known of the call, and of its ``own`` arguments."""
        known = dict(
            scale=self.scale, stride_gamma_b=self.stride_gamma_b, T=self.T, N=self.N, H=self.H, K=self.K, V=self.V,
            BT=self.BT, BN=pow2(self.N), GATE=self.gate, GAMMA=self.has_gamma, EXACT=self.exact, MILD=self.mild,
            TERMS=self.terms, PRECISION=self.precision, REVERSE=self.reverse, PACKED=self.packed,
        )
        numbers, constants = named(kernel, known | own)
        return Plan(kernel, (programs,), numbers, outputs, constants, num_warps, num_stages)


@remember
def call_of(specs: Args, opts: Options, shared: int = SHARED_MEMORY) -> Call:
    """The call; the same object for all that are alike. shared: bytes of shared memory that a program may have."""
    return Call(specs, opts, shared)


def _programs(args: Args, opts: Options) -> int:
    """Programs of a walk over whole sequences."""
    K, V = args.query.shape[-1], args.value.shape[-1]
    return sequence_count(args) * args.heads * -(-min(K, V) // cast(int, opts.cfg.block_d))


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
    if count < 2 or not heads:
        return 0, 1
    most = _PIECES_FORGETTING // (count * heads) if forgets else _PIECES // ((count - 1) * heads)
    return cut(T, count, most, _MIN_PIECE, BT)


def pieces_of(segment: int) -> int:
    """How many pieces a segment of a stretch has: as many as are worth their while, of whole chunks."""
    most = max(min(segment // _MIN_PIECE, _STRETCH_PIECES), 1)
    return next(n for n in range(most, 0, -1) if segment % (n * 64) == 0 or n == 1)


def needs_gates(args: Args, opts: Options) -> bool:
    """Whether the backward is the one that gives gates a gradient; with gates per dimension there is no other."""
    vector = args.g is not None and len(args.g.shape) == 4
    return vector or opts.needs(args, "g") or opts.needs(args, "g_gamma")


def starts_spec(args: Args, opts: Options) -> tuple[tuple[int, ...], str] | None:
    """Shape, dtype of the states that segments or parts start from, the same for all lengths; None: none is cut."""
    H, K, V, N = args.heads, args.query.shape[-1], args.value.shape[-1], sequence_count(args)
    most, packed = _most_segments(_programs(args, opts)), args.cu_seqlens is not None
    if not packed and needs_gates(args, opts):
        return (N * max(most, 1) * (_SEGMENT_PARTS if most > 1 else _PARTS), H, K, V), dtype_of(args.query)
    return ((N + most if packed else N * most, H, K, V), "float32") if most > 1 else None
