"""One call of the gated delta rule as the kernels for Hopper see it: what is cut into segments, and how many."""

from __future__ import annotations

from keraunos.kernels.gated_delta_rule.contract import Args, Options
from keraunos.kernels.host.hopper import CHUNK, LEAST_TILE, tiles_of
from keraunos.kernels.host.plan import remember
from keraunos.kernels.host.sequences import Sizes, cut

# Stages that the shared memory holds, where one of K and V is above 64, and where none is.
STAGES, STAGES_NARROW = 2, 3
# Chunks from one state that gradients begin from to the next: with more, errors of gradients grow without gates.
GROUP = 8
# Programs that run at once; tokens that make a segment worth its while. In tokens of a walk, by time: what a program
# begins with, and what it takes to join segments, and one more. What a walk without outputs takes of one with them.
AT_ONCE, _MIN_SEGMENT = 132, 512
_BEGIN, _JOIN, _JOIN_MORE, _LOCAL = 128, 130, 80, 0.7
# Segments of a sequence, for tests and timing; None: as many as take the least time.
SEGMENTS: int | None = None


def tokens_of_group() -> int:
    """Tokens from one state that gradients begin from to the next."""
    return GROUP * CHUNK


def most_segments(heads: int) -> int:
    """How many segments a sequence is cut into at most, whatever its length, for so many heads of all sequences."""
    return max(AT_ONCE // max(heads, 1), SEGMENTS or 1)


def _cost(T: int, heads: int, matrices: int, count: int) -> float:
    """The time of walks over so many segments of each sequence, in tokens; matrices: programs for each."""
    size = T / count
    walks = -(-heads * count // AT_ONCE) * (size + _BEGIN)
    if count == 1:
        return walks
    programs = heads * (count - 1 + (count - 2) * matrices)
    return walks + -(-programs // AT_ONCE) * (size * _LOCAL + _BEGIN) + _JOIN + (count - 2) * _JOIN_MORE


class Call(Sizes):
    """One call as these kernels see it; one object for all that are alike.

    The numbers are those of this module, such as ``GROUP``, that the call is made for.
    """

    def __init__(self, specs: Args, opts: Options, segments: int | None, group: int, at_once: int):
        super().__init__(specs, opts)
        self.group, self.at_once = group, at_once
        self.norm = opts.use_qk_l2norm
        self.need_g = specs.g is not None and opts.needs(specs, "g")
        self.chunks, self.groups = self.slots(CHUNK), self.slots(group * CHUNK)
        self.tiles = tiles_of(self.K, self.V)
        # With gates per token and dimension: programs that share the values of a head in a walk.
        shared = self.V > LEAST_TILE and at_once >= 2 * self.N * self.H
        self.shares = 2 if shared else 1
        # Programs that make a segment's matrix; tokens of a segment, 0 where sequences stay whole; segments, or these.
        self.matrices = max(self.tiles["BK"] // self.tiles["BV"], 1)
        # Packed sequences as if all were as long, and not where gradients follow.
        heads, T = self.N * self.H, self.T // self.N if self.packed else self.T
        most = max(min(most_segments(heads), T // _MIN_SEGMENT), 1)
        count = segments or min(range(1, most + 1), key=lambda n: _cost(T, heads, self.matrices, n))
        L, _ = cut(T, count, 1, 1, CHUNK)
        whole = self.gate == 2 or count == 1 or (self.packed and opts.kept)
        self.L = 0 if whole or L >= self.T else L
        self.segments = self.slots(self.L) if self.L else self.N
        # Tokens of a program that makes gradients.
        groups = range(1, max(-(-self.T // (group * CHUNK)), 1) + 1)
        self.part = CHUNK * min((group * n for n in groups), key=lambda n: self.cost(n, at_once))

    def cost(self, chunks: int, at_once: int) -> int:
        """The time of programs of so many chunks each, in chunks; at_once: how many run at once."""
        return -(-self.slots(chunks * CHUNK) * self.H // at_once) * (chunks + _BEGIN // CHUNK)

    def slots(self, tokens: int) -> int:
        """Of all sequences' parts of so many tokens."""
        return self.T // tokens + self.N if self.packed else self.N * -(-self.T // tokens)


_call = remember(Call)


def call_of(specs: Args, opts: Options) -> Call:
    """The call; the same object for all that are alike."""
    return _call(specs, opts, SEGMENTS, GROUP, AT_ONCE)
