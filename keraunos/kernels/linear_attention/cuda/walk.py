"""Shared by the walks over sequences: where a program walks, copies into shared memory, and the decays of a chunk.

A program walks over one sequence, or one segment of it, of one head, in chunks of C tokens, of which only the one that
lies last in memory may be partial. Its descriptors are of its own tokens, so that copies read zeros after their end and
write nothing there: a token after the end changes no state, and gates are 0 there.

``G`` is the sum of a chunk's gates, base 2, in the order of the recurrence, up to and with each token. With it

- the state that enters the chunk reaches token i by ``exp2(G_i)``,
- token j reaches token i by ``exp2(G_i - G_j)``, and the state that leaves the chunk by ``exp2(G_total - G_j)``,
- the state that enters reaches the one that leaves by ``exp2(G_total)``,

and none of these differences is above 0. The gradient of the state goes the other ways of the same numbers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from keraunos.kernels.device.hopper import FAINT, LOG2E, add, describe
from keraunos.kernels.gluon import aggregate, copy_in, thread_barrier

# A constant decay that is finite, so that no tokens' worth of it is 0.
CLOSED = gl.constexpr(-16384.0)
# The log, base 2, of less than any float32 value.
NOTHING = gl.constexpr(-150.0)


@aggregate
class Walk:
    """A program's way over its tokens, in chunks, and the sizes of tiles.

    The tokens are ``size`` from ``token`` on in row ``i_b`` of the batch. REVERSE: the recurrence runs backwards;
    BACKWARDS: the walk does.
    """

    i_b: gl.tensor
    token: gl.tensor
    size: gl.tensor
    H: gl.constexpr
    C: gl.constexpr
    K: gl.constexpr
    V: gl.constexpr
    BK: gl.constexpr
    BV: gl.constexpr
    REVERSE: gl.constexpr
    BACKWARDS: gl.constexpr

    @gluon.jit
    def chunks(self):
        """How many chunks there are."""
        return gl.cdiv(self.size, self.C)

    @gluon.jit
    def place(self, i):
        """Where in memory the i-th chunk is, in chunks."""
        return (self.chunks() - 1 - i) if self.BACKWARDS else i

    @gluon.jit
    def blocks(self, x, i_h, stride_b, stride_t, stride_h, D: gl.constexpr, BD: gl.constexpr, LAYOUT: gl.constexpr):
        """A descriptor of the walk's tokens ``[size, D]``, in blocks of C tokens and BD dimensions."""
        return describe(x, self.i_b, self.token, i_h, self.size, stride_b, stride_t, stride_h, self.C, D, BD, LAYOUT)


@aggregate
class Blocks:
    """Blocks of tokens: where they are in memory, and the stages that they are copied into, or out of."""

    desc: tma.tensor_descriptor
    stages: gl.shared_memory_descriptor

    @gluon.jit
    def copy(self, row, column, stage, full):
        """Begins to copy a block in, which ``full`` will say."""
        copy_in(self.desc, [row, column], full, self.stages.index(stage))


@gluon.jit
def add_before(sums, x, sums_of_later, later):
    """The step of a scan for the sum of all elements before each: the sum so far, and the element after it."""
    return sums + x + sums_of_later, later


@gluon.jit
def sums_before(x, axis: gl.constexpr, REVERSE: gl.constexpr):
    """The sums of what is before each, made without it: they may be small compared with it."""
    return gl.associative_scan((gl.zeros_like(x), x), axis, add_before, reverse=REVERSE)[0]


@gluon.jit
def settled(state):
    """The state, at the top of a chunk, where no product is under way.

    Were this not said, the assembler would wait at the first use of the state's registers, where products are.
    """
    return warpgroup_mma_wait(0, deps=[state])


@gluon.jit
def group_slot(i_o, token, T, L, tokens, PACKED: gl.constexpr, SPLIT: gl.constexpr):
    """The first slot of a walk among all walks' groups of so many tokens."""
    if PACKED:
        return token // tokens + i_o
    return i_o.to(gl.int64) * gl.cdiv(L if SPLIT else T, tokens)


@gluon.jit
def cut(x):
    """The first 8 of a float32's 24 bits, which bfloat16 has."""
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def rounded(x):
    """A float32 rounded to bfloat16; of two as near, the larger one: for products that have many bits.

    A conversion there and back takes the slow unit that exponentials need.
    """
    return cut((x.to(gl.int32, bitcast=True) + 32768).to(gl.float32, bitcast=True))


@gluon.jit
def natural_decay(gamma, i_b, i_h, stride_gamma_b):
    """The constant gate of a head, or 0."""
    decay = i_h.to(gl.float32) * 0.0
    if gamma is not None:
        decay = gl.load(gamma + i_b * stride_gamma_b + i_h).to(gl.float32)
    return decay


@gluon.jit
def reach(decay, after):
    """Of how many tokens, the last ones before ``after`` others, a constant decay leaves anything; below 0: of none."""
    return gl.minimum(NOTHING / gl.minimum(decay, -1e-6), 1e9).to(gl.int32) - after


@gluon.jit
def constant_sums(decay, n, rows, REVERSE: gl.constexpr):
    """G of a chunk of n tokens of a constant decay, base 2."""
    count = gl.maximum(n - rows, 0) if REVERSE else gl.minimum(rows + 1, n)
    return decay * count.to(gl.float32)


@gluon.jit
def constant_pairs(decay, rows, columns, REVERSE: gl.constexpr):
    """How each column's token reaches each row's, where it comes before, by a constant decay, base 2; 0 elsewhere."""
    apart = (columns[None, :] - rows[:, None]) if REVERSE else (rows[:, None] - columns[None, :])
    return gl.where(apart >= 0, gl.exp2(decay * gl.maximum(apart, 0).to(gl.float32)), 0.0)


@gluon.jit
def is_strong(total, n):
    """Whether the gates of n tokens are strong.

    If not, ``exp2(G_i)`` and ``exp2(-G_j)`` stay far from the ends of float32. If so, the gradients of gates may be as
    small as what rounding leaves: what a token's pair with itself, which no gate touches, adds to the sums of one walk
    cancels in those of the other, but for ``1e-7`` of it.
    """
    return total < -gl.minimum(8 * n, 60).to(gl.float32)


@gluon.jit
def gated_pairs(a, G_rows, G_columns, rows, columns, REVERSE: gl.constexpr):
    """``a`` times how each column's token reaches each row's by the sums of gates, 0 where it comes after."""
    seen = (columns[None, :] >= rows[:, None]) if REVERSE else (columns[None, :] <= rows[:, None])
    return gl.where(seen, a * gl.exp2(G_rows[:, None] - G_columns[None, :]), 0.0)


@gluon.jit
def mild_pairs(a, of_rows, of_columns, rows, columns, REVERSE: gl.constexpr):
    """The result of :func:`gated_pairs`, from ``exp2`` of the sums of rows and of columns."""
    seen = (columns[None, :] >= rows[:, None]) if REVERSE else (columns[None, :] <= rows[:, None])
    return gl.where(seen, a * (of_rows[:, None] * of_columns[None, :]), 0.0)


@gluon.jit
def without_own(a, rows, columns):
    """The pairs of different tokens, and those of each token with itself ``[C]``."""
    own = rows[:, None] == columns[None, :]
    return gl.where(own, 0.0, a), gl.sum(gl.where(own, a, 0.0), 1)


@aggregate
class Gates:
    """A walk's gates per token, to each of which gamma is added, and what they do in the chunk of each stage.

    vectors: ``G``, of a chunk that is not strong ``exp2(-G)`` if FACTORS; ``scale * exp2(G)``; ``exp2(G_total - G)``.
    decays: ``exp2(G_total)``, once for each row of the state. strong: whether the chunk is. sums: where what the
    walk's gates come to is stored, or None.
    """

    g: gl.tensor
    stride: gl.tensor
    gamma: gl.tensor
    sums: gl.tensor | gl.constexpr
    vectors: gl.shared_memory_descriptor
    decays: gl.shared_memory_descriptor
    strong: gl.shared_memory_descriptor
    FACTORS: gl.constexpr

    @gluon.jit
    def put(self, walk, ring, scale):
        """A partition of one warp: fills each chunk's stage, in the order in which chunks are walked."""
        C: gl.constexpr = walk.C
        LAYOUT: gl.constexpr = gl.BlockedLayout([C // 32], [32], [1], [0])
        ROWS: gl.constexpr = gl.BlockedLayout([walk.BK // 32], [32], [1], [0])
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        t = gl.arange(0, C, layout=LAYOUT)
        everything = scale * 0.0
        for i in range(walk.chunks()):
            slot = i % ring.STAGES
            at = walk.place(i)
            inside = t < walk.size - at * C
            x = gl.load(self.g + (at * C + t).to(gl.int64) * self.stride, mask=inside, other=0.0).to(gl.float32)
            x = gl.where(inside, gl.maximum(x + self.gamma, FAINT) * LOG2E, 0.0)
            G = gl.associative_scan(x, 0, add, reverse=walk.REVERSE)
            total = gl.sum(x, 0)
            everything += total
            strong = is_strong(total, gl.minimum(walk.size - at * C, C))
            ring.acquire(i)
            self.vectors.index(3 * slot).store(gl.where(strong, G, gl.exp2(-G)) if self.FACTORS else G)
            self.vectors.index(3 * slot + 1).store(gl.exp2(G) * scale)
            self.vectors.index(3 * slot + 2).store(gl.exp2(gl.minimum(total - G, 0.0)))
            self.strong.index(slot).store(gl.full([1], 1, gl.int32, FLAG) * strong.to(gl.int32))
            self.decays.index(slot).store(gl.full([walk.BK], 1.0, gl.float32, ROWS) * gl.exp2(total))
            thread_barrier()
            ring.commit(i)
        if self.sums is not None:
            gl.store(self.sums, everything)

    @gluon.jit
    def is_strong(self, slot):
        """Whether the chunk in a stage is strong, for a warpgroup."""
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        return gl.max(self.strong.index(slot).load(FLAG), 0) != 0


@gluon.jit
def gates_of(walk, g, stride_b, stride_t, stride_h, i_h, gamma, sums, STAGES: gl.constexpr, FACTORS: gl.constexpr):
    """The gates of a walk."""
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    vectors = gl.allocate_shared_memory(gl.float32, [3 * STAGES, walk.C], VECTOR)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, walk.BK], VECTOR)
    strong = gl.allocate_shared_memory(gl.int32, [STAGES, 1], VECTOR)
    p_g = g + walk.i_b.to(gl.int64) * stride_b + walk.token * stride_t + i_h.to(gl.int64) * stride_h
    return Gates(p_g, stride_t, gamma, sums, vectors, decays, strong, FACTORS)
