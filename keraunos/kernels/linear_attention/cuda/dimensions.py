"""The walk that makes outputs with a gate per token and dimension of the key.

``G`` is, for each dimension, the sum of a chunk's gates, base 2, in the order of the recurrence, up to and with each
token; ``G_total`` that of the whole chunk. One warpgroup works gates into q and k, in shared memory, and makes pairs:

- where a chunk's gates are mild or moderate, of ``q exp2(G - u)`` and ``k exp2(u - G)``; and the state is kept times
  ``exp2(u)``. From chunk to chunk ``G_total`` is taken from u, so that the state stays, until the factors would go
  beyond RANGE: then the state is multiplied, and u begins anew;
- where one dimension's are strong, these factors would leave float32. Then ``q exp2(G)`` and ``k exp2(G_total - G)``
  read and make the state, and pairs come from one product for each level of a tree: at a level blocks of tokens have
  two halves, the queries of the later one meet the keys of the earlier one at the boundary, ``q_i exp2(G_i - G_mid)``
  and ``k_j exp2(G_mid - G_j)``. These factors are not above 1. A token's pair with itself has no gate.

The state is kept transposed ``[V, K]`` in registers, as the left operand of products. A warpgroup has PART of the
values' dimensions: none waits for another's products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from keraunos.kernels.device.hopper import FAINT, LOG2E, add, load_state, locate, store_state, within
from keraunos.kernels.device.pipeline import Pipeline, pipeline
from keraunos.kernels.gluon import aggregate, copy_out, lengths, reinterpret, thread_barrier
from keraunos.kernels.linear_attention.cuda.walk import Blocks, Walk, natural_decay, settled

# A chunk has so many blocks of tokens.
BLOCKS = gl.constexpr(4)
# The least sum of a block's gates in any dimension of which float32 has the chunk's factors, and those of a state from
# one chunk to the next, which are their squares: 2 ** -126. Products of tokens that do not see each other may be
# infinite, and are taken away. Chunks past it are strong.
MODERATE = gl.constexpr(-21.8)
# The same for the factors that gradients are multiplied by, if they are float16 and are to have all its digits: half of
# the gates of all blocks, base 2, is no less than -12. Those of moderate chunks, which lie between, are bfloat16.
MILD = gl.constexpr(-4.15)
# What says of which kind a chunk is; of strong ones LOG2E does. Outputs tell not mild from moderate ones, but those
# before which the state is multiplied from others.
IS_MILD = gl.constexpr(0.0)
IS_MODERATE = gl.constexpr(-1.0)
IS_RESCALED = gl.constexpr(0.0)
IS_KEPT = gl.constexpr(-1.0)
# The log, base 2, that factors of q and k may come to before the state is multiplied; a single chunk's may be more.
RANGE = gl.constexpr(24.0)
# What is beyond all ranges.
BEYOND = gl.constexpr(1e6)
# What strong chunks' factors, which are not above 1, are stored in float16 times, so that small ones have all digits.
MAGNIFIED = gl.constexpr(32768.0)
# The levels of a chunk's tree.
LEVELS = gl.constexpr(6)
# So many dimensions of a state, as rows, has a warpgroup.
PART = gl.constexpr(64)
# The parts of a stage: copies of gates, of keys and what has their dimensions, and of values; and what comes of all
# with the gates worked in.
COPIED_GATES = gl.constexpr(0)
COPIED_KEYS = gl.constexpr(1)
COPIED_VALUES = gl.constexpr(2)
WORKED = gl.constexpr(3)


@gluon.constexpr_function
def of_tokens(C, BK, WARPS):
    """The layout of a chunk for so many warps that work gates in: a thread has the tokens of a block."""
    return gl.BlockedLayout([C // BLOCKS, 2 if WARPS == 4 else BK // 64], [1, 32], [BLOCKS, WARPS // BLOCKS], [1, 0])


@gluon.constexpr_function
def of_blocks(first, BK, WARPS):
    """The layout, for as many warps, of ``[BLOCKS, first, dimensions]``, of which each warp has one of the blocks."""
    size = 2 if WARPS == 4 else BK // 64
    return gl.BlockedLayout([1, first, size], [1, 1, 32], [BLOCKS, 1, WARPS // BLOCKS], [2, 1, 0])


@gluon.jit
def wide_pairs(x):
    """bfloat16 values as float32, two of a register at a time, of which a thread must have both."""
    both: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return gl.inline_asm_elementwise(both, "=f,=f,r", [x], gl.float32, True, 2)


@gluon.jit
def flat(x, LAYOUT: gl.constexpr):
    """Blocks of tokens as tokens ``[C, dimensions]``."""
    return gl.convert_layout(x.reshape([x.shape[0] * x.shape[1], x.shape[2]]), LAYOUT)


@gluon.jit
def around(sums_s, like, unit, REVERSE: gl.constexpr):
    """Sums of blocks, times a unit: of all; before each block, after it, and in its neighbour of the same half."""
    BK: gl.constexpr = like.shape[2]
    ALL: gl.constexpr = of_blocks(BLOCKS, BK, gl.num_warps())
    OWN: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    blocks = sums_s.load(gl.SliceLayout(0, ALL)) * unit
    one = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, ALL)))[:, None]
    other = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, ALL)))[None, :]
    lower = gl.convert_layout(gl.sum(gl.where((other < one)[:, :, None], blocks[None, :, :], 0.0), 1), OWN)
    higher = gl.convert_layout(gl.sum(gl.where((other > one)[:, :, None], blocks[None, :, :], 0.0), 1), OWN)
    beside = gl.convert_layout(gl.sum(gl.where(((other ^ one) == 1)[:, :, None], blocks[None, :, :], 0.0), 1), OWN)
    total = gl.sum(blocks, 0)
    return total, higher if REVERSE else lower, lower if REVERSE else higher, beside


@gluon.jit
def within_blocks(x, REVERSE: gl.constexpr):
    """``F`` of each token, which differs from G by what is the same for all tokens of its block of tokens.

    Sums in the order of memory do for both orders of the recurrence: others would be sums over threads.
    """
    F = gl.associative_scan(x, 1, add)
    return x - F if REVERSE else F


@gluon.jit
def ends(own, REVERSE: gl.constexpr):
    """F of the ends of blocks whose gates come to ``own``, and what is to be added for G of the blocks alone."""
    none = gl.full(own.shape, 0.0, gl.float32, own.type.layout)
    return none if REVERSE else own, own if REVERSE else none


@gluon.jit
def of_two_leaves(out, into, beside, REVERSE: gl.constexpr):
    """The results of :func:`ends`, for two blocks at a time."""
    odd = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, out.type.layout))[:, None] % 2 == 1
    into += gl.where(odd != REVERSE, beside, 0.0) / LOG2E
    out += gl.where(odd == REVERSE, beside, 0.0) / LOG2E
    return out, into


@gluon.jit
def from_middle(F, into, before, half, LAYOUT: gl.constexpr):
    """``G - m`` of a chunk: from F of each block's tokens, the sums of blocks, and m for each dimension."""
    half = gl.convert_layout(half, gl.SliceLayout(0, gl.SliceLayout(1, F.type.layout)))
    return flat(F * LOG2E + (into * LOG2E + before - half[None, :])[:, None, :], LAYOUT)


@gluon.jit
def put_bfloat16(x, factors_c):
    """Stores the factors of a moderate chunk, in a tile of float16."""
    factors_c.store(x.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.float16, bitcast=True))


@gluon.jit
def load_bfloat16(factors_c, LAYOUT: gl.constexpr):
    """The values that :func:`put_bfloat16` has stored."""
    x = factors_c.load(LAYOUT).to(gl.int16, bitcast=True)
    return (x.to(gl.int32) << 16).to(gl.float32, bitcast=True)


@gluon.jit
def own_pairs(x_c, y_c, LAYOUT: gl.constexpr):
    """The products of two tiles' rows ``[C]``, made of 64 dimensions at a time."""
    C: gl.constexpr = y_c.shape[0]
    D: gl.constexpr = y_c.shape[1]
    EACH: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    own = gl.zeros([C], gl.float32, gl.SliceLayout(1, EACH))
    for i in gl.static_range(D // PART):
        x = x_c.slice(i * PART, PART, 1).load(EACH).to(gl.float32)
        own += gl.sum(x * y_c.slice(i * PART, PART, 1).load(EACH).to(gl.float32), 1)
    return gl.convert_layout(own, LAYOUT)


@gluon.jit
def halves_meet(q, k, F, out, into, unit, HALF: gl.constexpr, REVERSE: gl.constexpr, LAYOUT: gl.constexpr):
    """The queries of the later ones of each two blocks of HALF tokens, and the keys of the earlier ones, with gates.

    Where HALF are whole blocks: to F is added ``into``, and ``out`` minus F is taken.
    """
    C: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    t = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    later = (t // HALF % 2 == (0 if REVERSE else 1))[:, None]
    if HALF < C // BLOCKS:
        F = flat(F, LAYOUT)
        is_last = t % (2 * HALF) == (HALF if REVERSE else HALF - 1)
        # The one of a block that there is, in bits: floats could not leave out the zeros.
        blocks = gl.where(is_last[:, None], F.to(gl.int32, bitcast=True), 0).reshape([C // (2 * HALF), 2 * HALF, D])
        boundary = gl.expand_dims(gl.sum(blocks, 1), 1).to(gl.float32, bitcast=True) * unit
        boundary, _ = gl.broadcast(boundary, blocks)
        boundary = gl.convert_layout(boundary.reshape([C, D]), LAYOUT)
        apart = gl.where(later, F * unit - boundary, boundary - F * unit)
    else:
        upto = F * unit + (into * unit)[:, None, :]
        rest = (out * unit)[:, None, :] - F * unit
        apart = gl.where(later, flat(upto, LAYOUT), flat(rest, LAYOUT))
    return gl.where(later, q, k).to(gl.float32) * gl.exp2(apart)


@aggregate
class DimensionGates:
    """A walk's gates per token and dimension, to each of which gamma is added, if there is one.

    blocks: those that are copied to the stages of the ring, or None: wide ones have no space there. ``sums`` are of
    each block of a chunk's tokens, ``least`` the least of those of each block and of half of the dimensions.
    """

    g: gl.tensor
    stride: gl.tensor
    gamma: gl.tensor | gl.constexpr
    blocks: Blocks | gl.constexpr
    sums: gl.shared_memory_descriptor
    least: gl.shared_memory_descriptor

    @gluon.jit
    def copy(self, row, i, ring):
        """Begins to copy a chunk's gates, if gates are copied, to the stage of step i."""
        if self.blocks is not None:
            ring.expect(i, self.blocks.desc.block_type.nbytes, COPIED_GATES)
            self.blocks.copy(row, 0, i % ring.STAGES, ring.full(i, COPIED_GATES))

    @gluon.jit
    def wait(self, i, ring):
        """Waits for the gates that :meth:`copy` has begun to copy."""
        if self.blocks is not None:
            ring.wait(i, COPIED_GATES)

    @gluon.jit
    def load(self, walk, at, slot, LAYOUT: gl.constexpr):
        """The gates of a chunk, in blocks of tokens ``[BLOCKS, tokens, dimensions]``; of tokens after the end none."""
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        ROWS: gl.constexpr = of_blocks(C // BLOCKS, BK, gl.num_warps())
        t = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
        inside = (t < walk.size - at * C)[:, None]
        if self.blocks is not None:
            x = self.blocks.stages.index(slot).load(LAYOUT)
            x = wide_pairs(x) if gl.num_warps() == 4 else x.to(gl.float32)
        else:
            d = gl.arange(0, BK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
            o_g = ((at * C + t).to(gl.int64) * self.stride)[:, None] + d
            x = gl.load(self.g + o_g, mask=within(inside & (d >= 0), d, walk.K, BK), other=0.0).to(gl.float32)
        if self.gamma is not None:
            x = gl.where(inside, x + self.gamma, 0.0)
        return gl.convert_layout(x.reshape([BLOCKS, C // BLOCKS, BK]), ROWS)

    @gluon.jit
    def load_strong(self, walk, at, slot, LAYOUT: gl.constexpr):
        """F of a strong chunk, the sums of its blocks, and what is :func:`around` these."""
        x = gl.maximum(self.load(walk, at, slot, LAYOUT), FAINT)
        F = within_blocks(x, walk.REVERSE)
        own = gl.sum(x, 1)
        total, before, behind, beside = around(self.sums, F, LOG2E, walk.REVERSE)
        return F, own, total, before, behind, beside

    @gluon.jit
    def put_sums(self, x):
        """Leaves the sums of each block's gates, and the least of them."""
        PARTS: gl.constexpr = gl.num_warps() // BLOCKS
        blocks = gl.sum(x, 1)
        self.sums.store(blocks)
        self.least.store(gl.min(blocks.reshape([BLOCKS, PARTS, x.shape[2] // PARTS]), 2))

    @gluon.jit
    def least_sum(self):
        """The least sum of the gates of any block."""
        EACH: gl.constexpr = gl.BlockedLayout([BLOCKS, gl.num_warps() // BLOCKS], [32, 1], [gl.num_warps(), 1], [1, 0])
        return gl.min(gl.min(self.least.load(EACH), 1), 0)

    @gluon.jit
    def load_from_middle(self, walk, at, slot, LAYOUT: gl.constexpr):
        """:func:`from_middle` of gates that are loaded once more, and of the sums of blocks in shared memory."""
        x = self.load(walk, at, slot, LAYOUT)
        F = within_blocks(x, walk.REVERSE)
        into = ends(gl.sum(x, 1), walk.REVERSE)[1]
        total, before = around(self.sums, F, LOG2E, walk.REVERSE)[:2]
        return from_middle(F, into, before, total * 0.5, LAYOUT)


@gluon.jit
def dimension_gates(walk, g, stride_b, stride_t, stride_h, i_h, gamma, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
                    WARPS: gl.constexpr = 8):
    """The gates of a walk, which so many warps work in. LAYOUT: of the blocks that are copied; None: none are."""
    VECTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    blocks = None
    if LAYOUT is not None:
        g_s = gl.allocate_shared_memory(g.dtype.element_ty, [STAGES, walk.C, walk.BK], LAYOUT)
        blocks = Blocks(walk.blocks(g, i_h, stride_b, stride_t, stride_h, walk.K, walk.BK, LAYOUT), g_s)
    p_g = g + walk.i_b.to(gl.int64) * stride_b + walk.token * stride_t + i_h.to(gl.int64) * stride_h
    sums_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, walk.BK], VECTORS)
    least_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, WARPS // BLOCKS], VECTORS)
    return DimensionGates(p_g, stride_t, gamma, blocks, sums_s, least_s)


@aggregate
class Outputs:
    """The arrays and barriers that the partitions of one program share; an absent one is None.

    The ring has q, k, gates, and v in parts of its dimensions; ``o`` a block for each of these. For each stage: of
    which kind the chunk is, and what the state is to be multiplied by, by kind, ``before`` the chunk reads it, or
    ``after`` it has. In the ``end`` it is multiplied once more. Pairs come to where gates were, and before them, in a
    strong chunk, the halves of one level after the other.
    """

    walk: Walk
    ring: Pipeline
    q: Blocks | gl.constexpr
    k: Blocks
    v: Blocks
    o: Blocks | gl.constexpr
    gates: DimensionGates
    pairs: gl.shared_memory_descriptor | gl.constexpr
    before: gl.shared_memory_descriptor | gl.constexpr
    after: gl.shared_memory_descriptor
    end: gl.shared_memory_descriptor | gl.constexpr
    kinds: gl.shared_memory_descriptor | gl.constexpr
    scale: gl.tensor
    h0: gl.tensor | gl.constexpr
    ht: gl.tensor | gl.constexpr
    last: gl.tensor
    sums: gl.tensor | gl.constexpr
    strong: gl.tensor | gl.constexpr
    WALKERS: gl.constexpr

    @gluon.jit
    def fetch(self, i):
        """Begins to copy chunk i into its stage, in the order in which its tiles are wanted."""
        ring, k, v = self.ring, self.k, self.v
        slot = i % ring.STAGES
        row = self.walk.place(i) * self.walk.C
        OUTPUT: gl.constexpr = self.q is not None
        self.gates.copy(row, i, ring)
        ring.expect(i, (1 + OUTPUT) * k.desc.block_type.nbytes, COPIED_KEYS)
        full = ring.full(i, COPIED_KEYS)
        if OUTPUT:
            self.q.copy(row, 0, slot, full)
        k.copy(row, 0, slot, full)
        ring.expect(i, self.WALKERS * v.desc.block_type.nbytes, COPIED_VALUES)
        full = ring.full(i, COPIED_VALUES)
        for part in gl.static_range(self.WALKERS):
            v.copy(row, part * PART, self.WALKERS * slot + part, full)

    @gluon.jit
    def do_strong(self, at, slot, LAYOUT: gl.constexpr):
        """Works the gates of a strong chunk into its q and k, for the state, and makes its pairs."""
        walk, gates = self.walk, self.gates
        C: gl.constexpr = walk.C
        q_c = self.q.stages.index(slot)
        k_c = self.k.stages.index(slot)
        pairs_c = self.pairs.index(slot)
        kind_s = self.kinds.index(slot)
        dtype: gl.constexpr = q_c.dtype
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))[:, None]
        columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))[None, :]
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        none = gl.zeros([C, C], gl.float32, W)
        # No product: ptxas 13.0 takes its addresses for those of the same product of other chunks.
        own = own_pairs(q_c, k_c, gl.SliceLayout(1, W))
        pairs = gl.where(rows == columns, own[:, None], 0.0).to(dtype)
        F, own, _, before, behind, beside = gates.load_strong(walk, at, slot, LAYOUT)
        out, into = ends(own, walk.REVERSE)
        for level in gl.static_range(LEVELS):
            # Loaded anew, so that what follows from it does not wait in registers from the first level on.
            unit = gl.max(kind_s.load(FLAG), 0)
            if level == LEVELS - 1:
                out, into = of_two_leaves(out, into, beside, walk.REVERSE)
            x = halves_meet(q_c.load(LAYOUT), k_c.load(LAYOUT), F, out, into, unit, 1 << level, walk.REVERSE, LAYOUT)
            thread_barrier()
            pairs_c.store(x.to(dtype))
            fence_async_shared()
            thread_barrier()
            b = warpgroup_mma(pairs_c, pairs_c.permute((1, 0)), none, use_acc=False, is_async=True)
            b = warpgroup_mma_wait(0, deps=[b])
            # What is no pair of this level's is one of a later level's.
            pairs = gl.where((rows ^ columns) >= (1 << level), b.to(dtype), pairs)
        seen = (columns >= rows) if walk.REVERSE else (columns <= rows)
        out, into = ends(own, walk.REVERSE)
        unit = gl.max(kind_s.load(FLAG), 0)
        of_q = gl.exp2(flat(F * unit + (into * unit + before)[:, None, :], LAYOUT))
        of_k = gl.exp2(flat((out * unit + behind)[:, None, :] - F * unit, LAYOUT))
        q = (q_c.load(LAYOUT).to(gl.float32) * of_q).to(dtype)
        k = (k_c.load(LAYOUT).to(gl.float32) * of_k).to(dtype)
        thread_barrier()
        q_c.store(q)
        k_c.store(k)
        pairs_c.slice(0, C, 1).store(gl.where(seen, pairs, 0.0).to(dtype))

    @gluon.jit
    def work_in_gates(self):
        """A partition of one warpgroup: works the gates of each chunk into its q and k, and makes its pairs."""
        walk, ring, gates = self.walk, self.ring, self.gates
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        LAYOUT: gl.constexpr = of_tokens(C, BK, 4)
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, of_blocks(BLOCKS, BK, 4)))
        OUTPUT: gl.constexpr = self.q is not None
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
        dtype: gl.constexpr = self.k.stages.dtype
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))[:, None]
        columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))[None, :]
        none = gl.zeros([C, C], gl.float32, W)
        # u, and what it and the chunks since it began may come to.
        none_yet = gl.zeros([BK], gl.float32, COLUMNS)
        unit = none_yet
        reach = self.scale * 0 + BEYOND
        everything = unit
        least_of_all = self.scale * 0
        for i in range(walk.chunks()):
            slot = i % ring.STAGES
            at = walk.place(i)
            if OUTPUT:
                q_c = self.q.stages.index(slot)
            k_c = self.k.stages.index(slot)
            gates.wait(i, ring)
            x = gates.load(walk, at, slot, LAYOUT)
            if not OUTPUT:
                x = gl.maximum(x, FAINT)
            F = within_blocks(x, walk.REVERSE)
            into = ends(gl.sum(x, 1), walk.REVERSE)[1]
            gates.put_sums(x)
            ring.wait(i, COPIED_KEYS)
            k = k_c.load(LAYOUT)
            if not OUTPUT:
                total, before = around(gates.sums, F, LOG2E, walk.REVERSE)[:2]
                self.after.index(slot).store(gl.exp2(total))
                if self.sums is not None:
                    everything += total
                G = F * LOG2E + (into * LOG2E + before)[:, None, :]
                if walk.REVERSE == walk.BACKWARDS:
                    whole = gl.convert_layout(total, gl.SliceLayout(0, gl.SliceLayout(1, G.type.layout)))
                    factor = gl.exp2(whole[None, None, :] - G)
                else:
                    factor = gl.exp2(G) * self.scale
                k_c.store((k.to(gl.float32) * flat(factor, LAYOUT)).to(dtype))
            else:
                q = q_c.load(LAYOUT)
                total, before = around(gates.sums, F, LOG2E, walk.REVERSE)[:2]
                least = gates.least_sum()
                least_of_all = gl.minimum(least_of_all, least)
                if least < MODERATE:
                    self.kinds.index(slot).store(gl.full([1], LOG2E, gl.float32, FLAG))
                    self.before.index(slot).store(gl.exp2(-unit))
                    self.after.index(slot).store(gl.exp2(total))
                    unit = none_yet
                    reach = BEYOND
                    # It loads all again, which would stay in registers else.
                    self.do_strong(at, slot, LAYOUT)
                else:
                    # The sum of the chunk's gates is not below minus this.
                    most = least * (-BLOCKS * LOG2E)
                    reach += most
                    kind = IS_KEPT
                    if reach > RANGE:
                        begin = gl.maximum(most * 0.5, RANGE)
                        self.before.index(slot).store(gl.exp2(-begin - unit))
                        unit = none_yet - begin
                        reach = most - begin
                        kind = IS_RESCALED
                    self.kinds.index(slot).store(gl.full([1], kind, gl.float32, FLAG))
                    apart = from_middle(F, into, before, unit, LAYOUT)
                    unit -= total
                    q_c.store((wide_pairs(q) * gl.exp2(apart)).to(dtype))
                    k_c.store((wide_pairs(k) * gl.exp2(apart * -1.0)).to(dtype))
                    fence_async_shared()
                    thread_barrier()
                    a = warpgroup_mma(q_c, k_c.permute((1, 0)), none, use_acc=False, is_async=True)
                    a = warpgroup_mma_wait(0, deps=[a])
                    seen = (columns >= rows) if walk.REVERSE else (columns <= rows)
                    self.pairs.index(slot).slice(0, C, 1).store(gl.where(seen, a, 0.0).to(dtype))
            if OUTPUT:  # noqa: SIM102
                if i + 1 == walk.chunks():
                    self.end.store(gl.exp2(-unit))
            fence_async_shared()
            thread_barrier()
            ring.commit(i, WORKED)
        if self.sums is not None:
            o_k = gl.arange(0, BK, layout=COLUMNS)
            gl.store(self.sums + o_k, everything, mask=o_k < walk.K)
        if self.strong is not None:
            gl.store(self.strong, (least_of_all < MILD).to(gl.int32))

    @gluon.jit
    def multiply(self, WALKER: gl.constexpr):
        """A partition of one warpgroup: PART of the values' dimensions, for which it has the state, transposed.

        So the state is the left operand of products and stays in registers. The first partition copies chunks into the
        ring of stages, too, once all have read what was there.
        """
        walk, ring = self.walk, self.ring
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        OUTPUT: gl.constexpr = self.q is not None
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        # A chunk's tokens are columns; so are the dimensions of keys of a state.
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
        WS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
        LEFT_S: gl.constexpr = gl.DotOperandLayout(0, WS, 2)
        COLUMNS: gl.constexpr = gl.SliceLayout(0, WS)
        dtype: gl.constexpr = self.k.stages.dtype
        o_v = WALKER * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, WS))
        o_k = gl.arange(0, BK, layout=COLUMNS)
        o_state = o_v[:, None] + (o_k * walk.V)[None, :]
        none = gl.zeros([PART, C], gl.float32, W)
        state = gl.zeros([PART, BK], gl.float32, WS)
        if self.h0 is not None:
            state = load_state(self.h0 + o_state, o_v, o_k, walk.V, walk.K, walk.BV, BK)
        count = walk.chunks()
        if WALKER == 0:
            for i in range(gl.minimum(ring.STAGES, count)):
                self.fetch(i)
        for i in range(count):
            slot = i % ring.STAGES
            ring.wait(i, COPIED_VALUES)
            ring.wait(i, WORKED)
            k = self.k.stages.index(slot)
            state = settled(state)
            if OUTPUT:
                kind = gl.max(self.kinds.index(slot).load(FLAG), 0)
                if kind != IS_KEPT:
                    state = state * self.before.index(slot).load(COLUMNS)[None, :]
                left = gl.convert_layout(state.to(dtype), LEFT)
                if kind > 0:
                    state = state * self.after.index(slot).load(COLUMNS)[None, :]
            else:
                state = state * self.after.index(slot).load(COLUMNS)[None, :]
            if OUTPUT:
                o = warpgroup_mma(left, self.q.stages.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
                # Its left operand leaves registers for the values.
                o = settled(o)
            v = self.v.stages.index(self.WALKERS * slot + WALKER).permute((1, 0)).load(W)
            state = warpgroup_mma(gl.convert_layout(v, LEFT_S), k, state, is_async=True)
            if OUTPUT:
                pairs = self.pairs.index(slot).slice(0, C, 1)
                o = warpgroup_mma(gl.convert_layout(v, LEFT), pairs.permute((1, 0)), o, is_async=True)
                tma.store_wait(0)
                o, state = warpgroup_mma_wait(0, deps=[o, state])
                out = self.o.stages.index(WALKER)
                out.permute((1, 0)).store((o * self.scale).to(dtype))
                fence_async_shared()
            else:
                state = warpgroup_mma_wait(0, deps=[state])
            thread_barrier()
            if OUTPUT:
                copy_out(self.o.desc, [walk.place(i) * C, WALKER * PART], out)
            ring.release(i)
            if WALKER == 0 and i + ring.STAGES < count:
                ring.acquire(i + ring.STAGES)
                self.fetch(i + ring.STAGES)
        if OUTPUT:
            tma.store_wait(0)
        if self.ht is not None:
            if OUTPUT:  # noqa: SIM102
                if count > 0:
                    state = settled(state) * self.end.load(COLUMNS)[None, :]
            store_state(self.ht + o_state, state, self.last, o_v, o_k, walk.V, walk.K, walk.BV, BK)


@gluon.jit(do_not_specialize=lengths("qkvg", "stride_gamma_b", "T", "L", "P"))
def dimensions_kernel(
    q, k, v, g, gamma, h0, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_gamma_b, scale, T, L, P,
    o, ht, sums, strong,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, INIT_WALK: gl.constexpr,
    BACKWARDS: gl.constexpr, MAXNREG: gl.constexpr,
):
    """``o_i = scale * sum_{j <= i} sum_k q_ik decay_ijk k_jk v_j`` for one head of one sequence, or of a segment of it.

    Partitions of a warpgroup multiply, each for PART of v's dimensions, one of two works the gates in.

    q: None where only states are wanted: those that pieces of L tokens, P of them to a segment, leave from none; then
    ``sums`` ``[walks, H, K]`` are what their gates come to. BACKWARDS: walk against the order of the recurrence, and
    make the gradients of states, with k as queries and v as the gradients of outputs. Otherwise it is REVERSE.

    strong ``[walks, H]`` gets 1 where a walk has chunks that are not mild, else 0. MAXNREG is read by the launcher:
    the registers that a thread has.

    Otherwise as in ``outputs_kernel``, with g ``[B, T, H, K]``.
    """
    i_h = gl.program_id(0) % H
    i_o = gl.program_id(0) // H
    OUTPUT: gl.constexpr = q is not None
    if not OUTPUT:
        # Nobody goes on from the segment that is walked last.
        pieces = gl.cdiv(T, L)
        wanted = pieces - P if BACKWARDS else (gl.cdiv(pieces, P) - 1) * P
        i_o = i_o // wanted * pieces + i_o % wanted + (P if BACKWARDS else 0)
    i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, REVERSE)
    if not OUTPUT:
        last = size >= 0
    WALKERS: gl.constexpr = BV // PART
    dtype: gl.constexpr = k.dtype.element_ty
    g_dtype: gl.constexpr = g.dtype.element_ty
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    COPIED: gl.constexpr = g_dtype != gl.float32
    GATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], g_dtype) if COPIED else None
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PART], dtype)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    walk = Walk(i_b, token, size, H, C, K, V, BK, BV, REVERSE, BACKWARDS)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    v_s = gl.allocate_shared_memory(dtype, [WALKERS * STAGES, C, PART], VALUES)
    keys = Blocks(walk.blocks(k, i_h // RK, stride_kb, stride_kt, stride_kh, K, BK, BLOCK), k_s)
    values = Blocks(walk.blocks(v, i_h // RV, stride_vb, stride_vt, stride_vh, V, PART, VALUES), v_s)
    after_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
    p_gamma = None if gamma is None else natural_decay(gamma, i_b, i_h, stride_gamma_b)
    gates = dimension_gates(walk, g, stride_gb, stride_gt, stride_gh, i_h // RG, p_gamma, STAGES, GATES, 4)
    queries, out, pairs_s, before_s, end_s, kinds_s = None, None, None, None, None, None
    if OUTPUT:
        q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
        queries = Blocks(walk.blocks(q, i_h // RQ, stride_qb, stride_qt, stride_qh, K, BK, BLOCK), q_s)
        if COPIED:
            pairs_s = reinterpret(gates.blocks.stages, dtype, [STAGES, C, BK], BLOCK)
        else:
            pairs_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
        before_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
        end_s = gl.allocate_shared_memory(gl.float32, [BK], VECTOR)
        kinds_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1], VECTOR)
        o_s = gl.allocate_shared_memory(dtype, [WALKERS, C, PART], VALUES)
        out = Blocks(walk.blocks(o, i_h, T.to(gl.int64) * (H * V), H * V, V, V, PART, VALUES), o_s)
    p_h0 = None if h0 is None else h0 + ((i_o if INIT_WALK else i_n).to(gl.int64) * H + i_h) * K * V
    p_ht = None if ht is None else ht + ((i_n if OUTPUT else i_o).to(gl.int64) * H + i_h) * K * V
    p_sums = None if sums is None else sums + (i_o.to(gl.int64) * H + i_h) * K
    p_strong = None if strong is None else strong + i_o * H + i_h
    ring = pipeline(STAGES, (1, 1, 1, 1), WALKERS)
    fence_async_shared()
    program = Outputs(walk, ring, queries, keys, values, out, gates, pairs_s, before_s, after_s, end_s, kinds_s, scale,
                      p_h0, p_ht, last, p_sums, p_strong, WALKERS)
    if WALKERS == 2:
        gl.warp_specialize(
            [(Outputs.multiply, (program, 0)), (Outputs.multiply, (program, 1)), (Outputs.work_in_gates, (program,))],
            [4, 4],
            [MAXNREG, MAXNREG],
        )
    else:
        gl.warp_specialize(
            [(Outputs.multiply, (program, 0)), (Outputs.work_in_gates, (program,))],
            [4],
            [MAXNREG],
        )
