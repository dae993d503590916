"""How sequences are cut for the Pallas kernels: which program walks through which chunks of which tokens.

A *chunk* is ``CHUNK`` tokens, the unit of the loops. A *segment* is what one program of ``scan`` walks through, a
*piece* what one of ``local_states`` does at a time. A *slot* is a place for a segment: those of a sequence lie side by
side, and packed sequences have some to spare. Chunks, pieces and segments are counted in the order in which they are
walked; ``Walk`` turns that into token positions.

Bulk copies move tiles of ``TILE`` rows, so the first chunk of a packed sequence starts up to ``TILE - 1`` tokens before
the sequence does, and its last chunk ends after it: rows that belong to neighbours are there and must not count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

CHUNK = 64
TILE = 8
# Older than this many powers of two, a token is nothing in float32.
_UNDERFLOW = 150.0


def over(a: Any, n: int) -> Any:
    """``a // n`` of numbers that are not negative. For others too, as ``//`` is, it would take ten operations."""
    if n == 1:
        return a
    return a // n if isinstance(a, int) else lax.div(a, n)


class Walk(NamedTuple):
    """How the tokens of a sequence are walked through, and with which decay; hashable.

    Attributes:
        T: tokens of a row of the batch.
        reverse: from the last token to the first.
        adjoint: the state is a gradient: it leaves a token before it decays, rather than after.
        segment: chunks per segment.
        pieces: pieces per segment.
        packed: how many sequences the one row holds; None: every row is a sequence.
    """

    T: int
    reverse: bool
    adjoint: bool
    segment: int
    pieces: int
    packed: int | None = None

    @property
    def chunks(self) -> int:
        """Chunks of a sequence, of a packed one at most."""
        return -(-self.T // CHUNK)

    @property
    def segments(self) -> int:
        """Segments of a sequence, of a packed one at most."""
        return -(-self.chunks // self.segment)

    @property
    def backward_in_time(self) -> bool:
        """The recurrence itself, of which an adjoint walk goes the other way, runs from the last token to the first."""
        return self.reverse != self.adjoint

    def places(self, B: int, size: int) -> int:
        """How many pieces of so many chunks there may be in all sequences; each then has places of its own."""
        return B * -(-self.chunks // size) if self.packed is None else self.T // (size * CHUNK) + self.packed

    def slots(self, B: int) -> int:
        """Slots of all sequences."""
        return self.packed if self.packed is not None and self.segments == 1 else self.places(B, self.segment)

    def plan(self, cu_seqlens: Any, arrays: Any) -> Any:
        """``[slots, 4]`` int32: a slot's sequence, which segment of it, the sequence's first token and its end.

        ``cu_seqlens`` is int32; ``arrays`` is the front end whose array it is.

        The longest sequences come first where they are not cut: a program that starts last had better be short.
        """
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
        if self.segments == 1:
            n = arrays.cast((starts - ends).argsort(), "int32")
            i_p = n * 0
        else:
            first = starts // (self.segment * CHUNK) + arrays.numbers(len(starts), starts)
            slots = arrays.numbers(self.slots(1), starts)
            n = arrays.cast((first <= slots[:, None]).sum(1) - 1, "int32").clip(0)
            i_p = slots - first[n]
        return arrays.stack([n, i_p, starts[n], ends[n]], 1)

    def at(self, slot: Any, plan: Any = None) -> Sequence:
        """The sequence that a slot belongs to and which segment of it: ``plan`` is a reference to :meth:`plan`'s."""
        if self.packed is None:
            return Sequence(self, over(slot, self.segments), lax.rem(slot, self.segments))
        n, i_p, begin, end = (plan[slot, i] for i in range(4))
        return Sequence(self, n, i_p, begin, end)

    def of(self, n: Any, cu_seqlens: Any = None) -> Sequence:
        """A sequence, at its first segment: ``cu_seqlens`` is a reference to the sequences' offsets, if packed."""
        return Sequence(self, n, 0) if self.packed is None else Sequence(self, n, 0, cu_seqlens[n], cu_seqlens[n + 1])

    def of_segment(self, i_p: Any) -> _Range:
        """The chunks of a segment of a row."""
        return Sequence(self, 0, i_p).of_segment()

    def of_piece(self, i_p: Any, i_f: Any) -> _Range:
        """The chunks of a piece of a segment of a row; there may be none."""
        return Sequence(self, 0, i_p).of_piece(i_f)

    def first_piece(self, log2_decay: Any) -> Any:
        """The first piece of a segment of which anything is left at the segment's end."""
        piece = self.segment // self.pieces * CHUNK
        return jnp.maximum(self.pieces - 1 - over(horizon(log2_decay), piece), 0)

    def is_last_piece_all(self, log2_decay: Any) -> Any:
        """Whether at a segment's end nothing is left of what was before its last piece, nor before the segment."""
        return horizon(log2_decay) < self.segment // self.pieces * CHUNK


class Sequence:
    """One sequence, and one of its segments: ``begin`` and ``end`` are tokens of its row."""

    def __init__(self, walk: Walk, index: Any, i_p: Any, begin: Any = 0, end: Any = None):
        self.walk, self.index, self.i_p = walk, index, i_p
        packed = walk.packed is not None
        self.row = 0 if packed else index
        self.lead = lax.rem(begin, TILE) if packed else 0
        self.origin = begin - self.lead
        # Of the tokens from the origin on.
        self.end = end - self.origin if packed else walk.T
        self.chunks: Any = walk.chunks
        self.segments: Any = walk.segments
        if packed:
            self.chunks = jnp.where(end > begin, over(self.end + CHUNK - 1, CHUNK), 0)
            self.segments = jnp.maximum(over(self.chunks + walk.segment - 1, walk.segment), 1)
        # Spare slots hold none.
        self.exists = i_p < self.segments if packed else True
        self.is_last = i_p == self.segments - 1

    def place(self, size: int) -> Any:
        """The first place of the sequence among the pieces of so many chunks: see :meth:`Walk.places`."""
        if self.walk.packed is None:
            return self.index * -(-self.walk.chunks // size)
        return over(self.origin, size * CHUNK) + self.index

    def tokens(self, i_p: Any) -> Any:
        """Tokens of a segment."""
        first = self._first(i_p, self.walk.segment, self.segments) * CHUNK
        return jnp.minimum(self.end - first, self.walk.segment * CHUNK) - jnp.maximum(self.lead - first, 0)

    def of_segment(self) -> _Range:
        """The chunks of the segment."""
        return _Range(self, self._first(self.i_p, self.walk.segment, self.segments), self.walk.segment)

    def of_piece(self, i_f: Any) -> _Range:
        """The chunks of a piece of the segment; there may be none."""
        size = self.walk.segment // self.walk.pieces
        first = self._first(self.i_p, self.walk.segment, self.segments) + self._first(i_f, size, self.walk.pieces)
        return _Range(self, first, size)

    def _first(self, i: Any, size: int, count: Any) -> Any:
        return (count - 1 - i if self.walk.reverse else i) * size


class _Range:
    """Some consecutive chunks of a sequence."""

    def __init__(self, sequence: Sequence, first: Any, size: int):
        self.sequence, self.first = sequence, first
        count = jnp.clip(sequence.chunks - first, 0, size)
        self.count = count if sequence.exists is True else jnp.where(sequence.exists, count, 0)

    def chunk(self, i: Any) -> Any:
        """A chunk's number in its sequence, in the order of the tokens."""
        return self.first + (self.count - 1 - i if self.sequence.walk.reverse else i)

    def place(self, i: Any, size: int) -> Any:
        """Where a chunk's group of so many lies among those of all sequences; segments are whole groups.

        Groups are counted from the end of the segment where the recurrence itself, not its adjoint, starts.
        """
        return self.sequence.place(size) + over(self.first, size) + over(self.ahead(i), size)

    def ahead(self, i: Any) -> Any:
        """How many chunks of the range the recurrence itself, not its adjoint, walks through before this one."""
        return self.count - 1 - i if self.sequence.walk.adjoint else i

    def start(self, i: Any) -> Any:
        """The first token of a chunk."""
        start = self.sequence.origin + self.chunk(i) * CHUNK
        return start if self.sequence.walk.packed is None else pl.multiple_of(start, TILE)

    def rows(self, i: Any) -> tuple[Any, Any]:
        """The rows of a chunk that belong to the sequence: from the first to before the second."""
        first = self.chunk(i) * CHUNK
        lead = 0 if self.sequence.walk.packed is None else jnp.maximum(self.sequence.lead - first, 0)
        return lead, jnp.minimum(self.sequence.end - first, CHUNK)

    def length(self, i: Any) -> Any:
        """The tokens of a chunk."""
        first, end = self.rows(i)
        return end - first


def horizon(log2_decay: Any) -> Any:
    """How many tokens back anything is left."""
    return jnp.minimum(_UNDERFLOW / jnp.maximum(-log2_decay, 1e-7), 2.0**30).astype(jnp.int32)
