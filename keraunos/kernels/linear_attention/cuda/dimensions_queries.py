"""The walk that makes the queries' gradients with a gate per token and dimension of the key.

``dq_i = scale * exp2(G_i) (S do_i + sum_{j <= i} (do_i . v_j) exp2(-G_j) k_j)`` is an output with queries ``do``, keys
v and values k, whose gates are those of the values' dimensions: pairs have none. Two warpgroups work them into k, in
shared memory, and leave what outputs are to be multiplied by in the place of the gates; with kinds of chunks as in
``dimensions``. A strong chunk reads and makes the state with a copy of its k. Then, for each level of the tree, the
pairs of its halves multiply ``k_j exp2(G_mid - G_j)``, and what comes out ``exp2(G_i - G_mid)``.

With the products that the walk for k and v has left it makes the gradients of gates, too: see ``dimensions_gates``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

import keraunos.kernels.linear_attention.cuda.dimensions as shared
from keraunos.kernels.device.hopper import FAINT, LOG2E, load_state, locate, within
from keraunos.kernels.device.pipeline import Pipeline, pipeline
from keraunos.kernels.gluon import aggregate, copy_out, lengths, reinterpret, thread_barrier
from keraunos.kernels.linear_attention.cuda.dimensions import BLOCKS, DimensionGates
from keraunos.kernels.linear_attention.cuda.dimensions_gates import (
    accumulate,
    accumulated,
    dg_of,
    load_scaled,
    scaled_size,
    unscaled,
)
from keraunos.kernels.linear_attention.cuda.walk import Blocks, Walk, cut, group_slot, natural_decay, rounded, settled

# What the gradients of a chunk's gates are made of: copies of queries, and products.
QUERIES = gl.constexpr(0)
PRODUCTS = gl.constexpr(1)


@aggregate
class GateGradients:
    """The arrays that gradients of gates are made of, and where these go; an absent one is None.

    The ring has one stage: a chunk's queries and, in two tiles of 16 bits, the products of q with dq minus those of k
    with dk, which ``y`` has. The gradients of the state, ``dh``, give that of each GROUP-th chunk's first token, which
    comes to ``base``. dg is copied out from the tile of its block, or stored. workspace: where strong chunks add up.
    """

    ring: Pipeline
    q: Blocks
    high: gl.shared_memory_descriptor
    low: gl.shared_memory_descriptor
    base: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    y: gl.tensor
    dh: gl.tensor
    workspace: gl.tensor | gl.constexpr
    dg: Blocks | gl.tensor | gl.constexpr
    dgamma: gl.tensor | gl.constexpr
    GROUP: gl.constexpr

    @gluon.jit
    def fetch(self, i, walk):
        """Begins to copy the queries of chunk i."""
        self.ring.expect(i, self.q.desc.block_type.nbytes, QUERIES)
        self.q.copy(walk.place(i) * walk.C, 0, 0, self.ring.full(i, QUERIES))

    @gluon.jit
    def free_tiles(self, i):
        """Says that the tiles of chunk i are free, when its gates' gradients are copied out."""
        if isinstance(self.dg, Blocks):
            tma.store_wait(0)
        self.ring.release(i)

    @gluon.jit
    def make(self, i, walk, base, everything, STRONG: gl.constexpr):
        """Makes the gradients of the gates of chunk i, and copies them out from the place of what they are made of.

        Returns the gradient for the next chunk's first token, and the sum of all. Copies the next chunk's queries, too.
        """
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        LAYOUT: gl.constexpr = gl.BlockedLayout([C // BLOCKS, BK // 64], [1, 32], [BLOCKS, 2], [1, 0])
        ROWS: gl.constexpr = gl.BlockedLayout([1, C // BLOCKS, BK // 64], [1, 1, 32], [BLOCKS, 1, 2], [2, 1, 0])
        COPIED: gl.constexpr = isinstance(self.dg, Blocks)
        at = walk.place(i)
        self.ring.wait(i, PRODUCTS)
        z = self.high.load(LAYOUT).to(gl.float32) + self.low.load(LAYOUT).to(gl.float32)
        fence_async_shared()
        thread_barrier()
        if i + 1 < walk.chunks():
            self.fetch(i + 1, walk)
        z = gl.convert_layout(z.reshape([BLOCKS, C // BLOCKS, BK]), ROWS)
        if i % self.GROUP == 0:
            base = self.base.load(base.type.layout)
        x, base = dg_of(z, base, self.sums, walk.REVERSE)
        x = shared.flat(x, LAYOUT)
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
        o_k = gl.arange(0, BK, layout=gl.SliceLayout(0, LAYOUT))
        inside = within((rows < walk.size - at * C)[:, None], o_k[None, :], walk.K, BK)
        if self.dgamma is not None:
            everything += gl.sum(gl.sum(gl.where(inside, x, 0.0), 0), 0)
        if COPIED:
            self.dg.stages.store(x.to(self.dg.stages.dtype))
        elif self.dg is not None:
            o_g = ((at * C + rows).to(gl.int64) * (walk.H * walk.K))[:, None] + o_k[None, :]
            gl.store(self.dg + o_g, x, mask=inside)
        fence_async_shared()
        thread_barrier()
        if COPIED:
            copy_out(self.dg.desc, [at * C, 0], self.dg.stages)
        if STRONG:
            self.free_tiles(i)
        return base, everything


@aggregate
class Queries:
    """The arrays and barriers that the partitions of one program share; an absent one is None.

    The ring has the output's gradients, values, keys and gates. The last tile of keys is for strong chunks: for the
    state, and then for each level of the tree, whose pipeline has one stage. It is taken at first, so that a step may
    fill it when readers have released it once more than before. factors get what outputs are to be multiplied by, of a
    strong chunk MAGNIFIED. For each stage: what the state is to be multiplied by ``before`` the chunk reads it and, of
    a strong chunk, ``after`` it has; which kind of chunk it is. Of each half of k's dimensions: a copy of the state,
    and a block of the gradients, or where they are stored.
    """

    walk: Walk
    ring: Pipeline
    do: Blocks
    v: Blocks
    k: Blocks
    o: Blocks | gl.tensor
    gates: DimensionGates
    factors: gl.shared_memory_descriptor
    tree: Pipeline
    states: gl.shared_memory_descriptor
    before: gl.shared_memory_descriptor
    after: gl.shared_memory_descriptor
    kinds: gl.shared_memory_descriptor
    gradients: GateGradients | gl.constexpr
    scale: gl.tensor
    h0: gl.tensor | gl.constexpr
    STRONG: gl.constexpr

    @gluon.jit
    def fetch(self, i):
        """Begins to copy chunk i into its stage, in the order in which its tiles are wanted."""
        ring, do, v, k = self.ring, self.do, self.v, self.k
        slot = i % ring.STAGES
        row = self.walk.place(i) * self.walk.C
        self.gates.copy(row, i, ring)
        ring.expect(i, k.desc.block_type.nbytes, shared.COPIED_KEYS)
        k.copy(row, 0, slot, ring.full(i, shared.COPIED_KEYS))
        ring.expect(i, do.desc.block_type.nbytes + v.desc.block_type.nbytes, shared.COPIED_VALUES)
        full = ring.full(i, shared.COPIED_VALUES)
        do.copy(row, 0, slot, full)
        v.copy(row, 0, slot, full)

    @gluon.jit
    def do_strong(self, i, used, LAYOUT: gl.constexpr):
        """Works the gates of a strong chunk into a copy of its k, for the state, and for each level of the tree."""
        walk, ring, gates, tree = self.walk, self.ring, self.gates, self.tree
        slot = i % ring.STAGES
        k_c = self.k.stages.index(slot)
        x_s = self.k.stages.index(ring.STAGES)
        factors_c = self.factors.index(slot)
        dtype: gl.constexpr = k_c.dtype
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        x = gl.maximum(gates.load(walk, walk.place(i), slot, LAYOUT), FAINT)
        F = shared.within_blocks(x, walk.REVERSE)
        own = gl.sum(x, 1)
        out, into = shared.ends(own, walk.REVERSE)
        before, behind, beside = shared.around(gates.sums, F, LOG2E, walk.REVERSE)[1:]
        odd = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, own.type.layout))[:, None] % 2 == 1
        t = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
        factor = gl.exp2(shared.flat(F * LOG2E + (into * LOG2E + before)[:, None, :], LAYOUT))
        factors_c.store((factor * shared.MAGNIFIED).to(factors_c.dtype))
        factor = gl.exp2(shared.flat((out * LOG2E + behind)[:, None, :] - F * LOG2E, LAYOUT))
        x_s.store((k_c.load(LAYOUT).to(gl.float32) * factor).to(dtype))
        fence_async_shared()  # As those do who read it, after they have written more.
        thread_barrier()
        ring.commit(i, shared.WORKED)
        # At first blocks of two leaves.
        into += gl.where(odd != walk.REVERSE, beside, 0.0) / LOG2E
        out += gl.where(odd == walk.REVERSE, beside, 0.0) / LOG2E
        for level in gl.static_range(shared.LEVELS):
            if level == 1:
                out, into = shared.ends(own, walk.REVERSE)
            # Loaded anew, so that what follows from it does not wait in registers from the first level on.
            unit = gl.max(self.kinds.index(slot).load(FLAG), 0)
            one = gl.full([C, BK], 1.0, gl.float32, LAYOUT)
            # Rounded as in the walk for dk.
            f = shared.halves_meet(one * self.scale, one, F, out, into, unit, C >> (level + 1), walk.REVERSE, LAYOUT)
            f = f.to(dtype).to(gl.float32)
            later = ((t >> (shared.LEVELS - 1 - level)) % 2 == (0 if walk.REVERSE else 1))[:, None]
            tree.acquire(used + (level + 1))
            x_s.store(gl.where(later, f, k_c.load(LAYOUT).to(gl.float32) * f).to(dtype))
            fence_async_shared()
            thread_barrier()
            tree.commit(level)

    @gluon.jit
    def work_in_gates(self):
        """A partition of two warpgroups: copies each chunk into the ring, and works its gates into its k there.

        Where those are wanted it makes the gradients of the gates of a chunk when all else of it is done.
        """
        walk, ring, gates, gradients = self.walk, self.ring, self.gates, self.gradients
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        STRONG: gl.constexpr = self.STRONG
        LEARNED: gl.constexpr = gradients is not None
        LAYOUT: gl.constexpr = gl.BlockedLayout([C // BLOCKS, BK // 64], [1, 32], [BLOCKS, 2], [1, 0])
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        ALL: gl.constexpr = gl.BlockedLayout([1, BLOCKS, BK // 64], [1, 1, 32], [BLOCKS, 1, 2], [2, 1, 0])
        COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, ALL))
        dtype: gl.constexpr = self.k.stages.dtype
        mids = gl.zeros([BK], gl.float32, COLUMNS)
        # The gradient of the gates of a chunk's first token; the sum of all; how many chunks have theirs.
        base = mids
        everything = self.scale * 0
        finished = walk.size * 0
        used = walk.size * 0
        count = walk.chunks()
        if LEARNED:  # noqa: SIM102
            if count > 0:
                gradients.fetch(0, walk)
        for i in range(count + (ring.STAGES if LEARNED else 0)):
            slot = i % ring.STAGES
            if i < count:
                ring.acquire(i)
                self.fetch(i)
            if LEARNED:  # noqa: SIM102
                if finished <= i - ring.STAGES and finished < count:
                    base, everything = gradients.make(finished, walk, base, everything, STRONG)
                    finished += 1
            if i < count:
                at = walk.place(i)
                k_c = self.k.stages.index(slot)
                factors_c = self.factors.index(slot)
                gates.wait(i, ring)
                x = gates.load(walk, at, slot, LAYOUT)
                F = shared.within_blocks(x, walk.REVERSE)
                into = shared.ends(gl.sum(x, 1), walk.REVERSE)[1]
                gates.put_sums(x)
                if LEARNED and not STRONG:  # noqa: SIM102
                    if i >= ring.STAGES:
                        gradients.free_tiles(i)
                ring.wait(i, shared.COPIED_KEYS)
                k = k_c.load(LAYOUT)
                total, before = shared.around(gates.sums, F, LOG2E, walk.REVERSE)[:2]
                # Each thread puts factors where it has read gates.
                least = gates.least_sum()
                if STRONG and least < shared.MODERATE:
                    self.kinds.index(slot).store(gl.full([1], LOG2E, gl.float32, FLAG))
                    self.before.index(slot).store(gl.exp2(mids))
                    self.after.index(slot).store(gl.exp2(total))
                    mids = gl.zeros([BK], gl.float32, COLUMNS)
                    # The tile of the tree is free when the chunk before is done.
                    if i > 0:
                        if not LEARNED:
                            ring.acquire(i - 1 + ring.STAGES)
                        else:
                            base, everything = gradients.make(finished, walk, base, everything, STRONG)
                            finished += 1
                    # It loads all again, which would stay in registers else.
                    self.do_strong(i, used, LAYOUT)
                    used += shared.LEVELS + 1
                else:
                    half = total * 0.5
                    self.before.index(slot).store(gl.exp2(mids + half))
                    mids = half
                    if STRONG and least < shared.MILD:
                        self.kinds.index(slot).store(gl.full([1], shared.IS_MODERATE, gl.float32, FLAG))
                        apart = gates.load_from_middle(walk, at, slot, LAYOUT)
                        shared.put_bfloat16(gl.exp2(apart), factors_c)
                        k_c.store((k_c.load(LAYOUT).to(gl.float32) * gl.exp2(-apart)).to(dtype))
                    else:
                        self.kinds.index(slot).store(gl.full([1], shared.IS_MILD, gl.float32, FLAG))
                        apart = shared.from_middle(F, into, before, half, LAYOUT)
                        factors_c.store(gl.exp2(apart).to(factors_c.dtype))
                        k_c.store((k.to(gl.float32) * gl.exp2(-apart)).to(dtype))
                    fence_async_shared()  # As those do who read it, after they have written more.
                    thread_barrier()
                    ring.commit(i, shared.WORKED)
            elif LEARNED and not STRONG and i >= ring.STAGES:
                gradients.free_tiles(i)
        if LEARNED:  # noqa: SIM102
            if gradients.dgamma is not None:
                gl.store(gradients.dgamma, everything)

    @gluon.jit
    def multiply(self, WG: gl.constexpr):
        """A partition of one warpgroup: half of the keys' dimensions, for which it has the state in registers.

        The products that gradients of gates are made of go where the tree and queries were.
        """
        walk, ring, tree, gradients = self.walk, self.ring, self.tree, self.gradients
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        BV: gl.constexpr = walk.BV
        HALF: gl.constexpr = BK // 2
        STRONG: gl.constexpr = self.STRONG
        LEARNED: gl.constexpr = gradients is not None
        STORED: gl.constexpr = not isinstance(self.o, Blocks)
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        COLUMNS: gl.constexpr = gl.SliceLayout(0, W)
        LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
        dtype: gl.constexpr = self.k.stages.dtype
        state_s = self.states.index(WG)
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))
        columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))
        o_v = gl.arange(0, BV, layout=gl.SliceLayout(1, W))
        o_k = WG * HALF + gl.arange(0, HALF, layout=COLUMNS)
        none = gl.zeros([C, C], gl.float32, W)
        nothing = gl.zeros([C, HALF], gl.float32, W)
        state = gl.zeros([BV, HALF], gl.float32, W)
        if self.h0 is not None:
            p_h0 = self.h0 + ((o_k * walk.V)[None, :] + o_v[:, None])
            state = load_state(p_h0, o_v, o_k, walk.V, walk.K, BV, BK)
        x_p = self.k.stages.index(ring.STAGES).slice(WG * HALF, HALF, 1)
        if LEARNED:
            q_c = gradients.q.stages.index(0).slice(WG * HALF, HALF, 1)
            if STRONG:
                workspace = gradients.workspace + WG * C * HALF
        for i in range(walk.chunks()):
            slot = i % ring.STAGES
            at = walk.place(i)
            left = gl.minimum(walk.size - at * C, C)
            ring.wait(i, shared.COPIED_VALUES)
            ring.wait(i, shared.WORKED)
            kind = gl.max(self.kinds.index(slot).load(FLAG), 0) if STRONG else shared.IS_MILD
            strong = kind > 0
            moderate = kind < 0
            single = kind <= 0
            # A token's own pair is added later to dq of a moderate chunk.
            earlier = rows[:, None]
            if LEARNED and STRONG:
                earlier -= gl.where(moderate, -1 if walk.REVERSE else 1, 0)
            seen = (columns[None, :] >= earlier) if walk.REVERSE else (columns[None, :] <= earlier)
            do = self.do.stages.index(slot)
            v = self.v.stages.index(slot)
            k_slot = gl.where(strong, ring.STAGES, slot) if STRONG else slot
            k = self.k.stages.index(k_slot).slice(WG * HALF, HALF, 1)
            state = settled(state)
            a = warpgroup_mma(do, v.permute((1, 0)), none, use_acc=False, is_async=True)
            state = state * self.before.index(slot).slice(WG * HALF, HALF, 0).load(COLUMNS)[None, :]
            state_s.store(state.to(dtype))
            a = warpgroup_mma_wait(0, deps=[a])
            if LEARNED:  # noqa: SIM102
                if i % gradients.GROUP == 0:
                    p_dh = gradients.dh + (i // gradients.GROUP).to(gl.int64) * (walk.H * BK * BV)
                    b_dh = gl.load(p_dh + ((o_v * BK)[:, None] + o_k[None, :])).to(gl.float32)
                    gradients.base.slice(WG * HALF, HALF, 0).store(gl.sum(state * b_dh, 0))
            if STRONG and strong:
                state = state * self.after.index(slot).slice(WG * HALF, HALF, 0).load(COLUMNS)[None, :]
            if LEARNED:
                p_y = gradients.y + at.to(gl.int64) * (2 * walk.H * scaled_size(HALF)) + WG * scaled_size(HALF)
                y_c = load_scaled(p_y, HALF)
            fence_async_shared()
            thread_barrier()
            state = warpgroup_mma(v.permute((1, 0)), k, state, is_async=True)
            pairs = gl.where(seen, a, 0.0).to(dtype)
            # Nothing comes of it in a strong chunk: else there were two kinds of pairs in registers.
            b_dq = warpgroup_mma(gl.convert_layout(pairs, LEFT), k, nothing, use_acc=False, is_async=True)
            b_dq = warpgroup_mma(do, state_s, b_dq, use_acc=single if STRONG else True, is_async=True)
            b_dq, state = warpgroup_mma_wait(0, deps=[b_dq, state])
            unit = gl.where(strong, self.scale / shared.MAGNIFIED, self.scale) if STRONG else self.scale
            factors_c = self.factors.index(slot).slice(WG * HALF, HALF, 1)
            if STRONG and moderate:
                factor = shared.load_bfloat16(factors_c, W) * unit
            else:
                factor = factors_c.load(W).to(gl.float32) * unit
            if LEARNED:
                gradients.ring.wait(i, QUERIES)
                x = rounded(q_c.load(W).to(gl.float32) * factor) * b_dq
                if STRONG and strong:
                    accumulate(x, workspace, True)
                if STRONG and moderate:
                    own = shared.own_pairs(do, v, gl.SliceLayout(1, W))
                    b_dq += own[:, None] * k.load(W).to(gl.float32)
            b_dq = b_dq * factor
            if STRONG and strong:
                thread_barrier()
                tree.release(0)
                state = settled(state)
                own = gl.sum(gl.where(rows[:, None] == columns[None, :], pairs.to(gl.float32), 0.0), 1) * self.scale
                k_own = self.k.stages.index(slot).slice(WG * HALF, HALF, 1)
                b_dq += own[:, None] * k_own.load(W).to(gl.float32)
                for level in range(shared.LEVELS):
                    # Tokens whose numbers agree but for the last bits, the first of which is the level's.
                    meet = (rows[:, None] ^ columns[None, :]) // ((C >> 1) >> level) == 1
                    p = gl.convert_layout(gl.where(meet, pairs, 0.0).to(dtype), LEFT)
                    tree.wait(level)
                    b = warpgroup_mma(p, x_p, nothing, use_acc=False, is_async=True)
                    b = warpgroup_mma_wait(0, deps=[b])
                    f = x_p.load(W).to(gl.float32)
                    b_dq += b * f
                    if LEARNED:
                        b = b * (q_c.load(W).to(gl.float32) * f).to(dtype).to(gl.float32)
                        accumulate(b, workspace, False)
                    thread_barrier()
                    tree.release(level + 1)
                if LEARNED:
                    x = accumulated(workspace, HALF, W)
            if LEARNED:
                x -= unscaled(y_c, W)
                high = cut(x)
                gradients.ring.acquire(i)
                gradients.high.slice(WG * HALF, HALF, 1).store(high.to(gl.bfloat16))
                gradients.low.slice(WG * HALF, HALF, 1).store((x - high).to(gl.bfloat16))
            if STORED:
                inside = within((rows < left)[:, None], o_k[None, :], walk.K, BK)
                o_o = ((at * C + rows).to(gl.int64) * (walk.H * walk.K))[:, None] + o_k[None, :]
                gl.store(self.o + o_o, b_dq, mask=inside)
            else:
                o_s = self.o.stages.index(WG)
                tma.store_wait(0)
                o_s.store(b_dq.to(dtype))
                fence_async_shared()
            thread_barrier()
            if not STORED:
                copy_out(self.o.desc, [at * C, WG * HALF], o_s)
            ring.release(i)
            if LEARNED:
                gradients.ring.commit(i, PRODUCTS)
        if not STORED:
            tma.store_wait(0)


@gluon.jit(do_not_specialize=lengths("qkvog", "stride_gamma_b", "T", "L"))
def queries_kernel(
    q, k, v, do, g, gamma, h0, y, dh, strong, cu_seqlens, dq_given, dg_given, dgamma_given,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh, stride_gb, stride_gt, stride_gh, stride_gamma_b, scale, T, L,
    dq, workspace, dg, dgamma,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, INIT_WALK: gl.constexpr, STORED: gl.constexpr,
    STORED_G: gl.constexpr, GROUP: gl.constexpr, STRONG: gl.constexpr,
):
    """The gradients of one head's queries in one sequence, or in a segment of it, with gates ``[B, T, H, K]``.

    Two partitions of a warpgroup multiply, each for half of k's dimensions, one of two works the gates in. strong
    ``[walks, H]`` says which walks have chunks that are not mild. STRONG launches make the gradients of those, with
    code for such chunks, which takes registers from the other; the others' go into the same arrays.

    h0: the states ``[.., H, K, V]`` that walks (INIT_WALK) or sequences start from. Where the gradients of gates are
    wanted, dg ``[B, T, H, K]`` and dgamma ``[walks, H]``, y are the dots and dh the states of ``keys_kernel``, and
    strong chunks add up the products of q with dq in workspace ``[walks, H, C, BK]``.
    Otherwise as ``outputs_kernel``.
    """
    i_h = gl.program_id(0) % H
    i_o = gl.program_id(0) // H
    if (gl.load(strong + i_o * H + i_h) != 0) != STRONG:
        return
    i_n, i_b, token, size, _ = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, REVERSE)
    HALF: gl.constexpr = BK // 2
    dtype: gl.constexpr = k.dtype.element_ty
    g_dtype: gl.constexpr = g.dtype.element_ty
    COPIED: gl.constexpr = g_dtype != gl.float32
    # Of all that has the dimensions of keys, and can be cut into halves.
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    COPIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], g_dtype) if COPIED else None
    FACTORS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], gl.float16)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    walk = Walk(i_b, token, size, H, C, K, V, BK, BV, REVERSE, REVERSE)
    # The last tile is for the tree of a strong chunk.
    k_s = gl.allocate_shared_memory(dtype, [STAGES + 1, C, BK], PART)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    keys = Blocks(walk.blocks(k, i_h // RK, stride_kb, stride_kt, stride_kh, K, BK, PART), k_s)
    values = Blocks(walk.blocks(v, i_h // RV, stride_vb, stride_vt, stride_vh, V, BV, VALUES), v_s)
    d_out = Blocks(walk.blocks(do, i_h, stride_ob, stride_ot, stride_oh, V, BV, VALUES), do_s)
    p_gamma = None if gamma is None else natural_decay(gamma, i_b, i_h, stride_gamma_b)
    gates = shared.dimension_gates(walk, g, stride_gb, stride_gt, stride_gh, i_h // RG, p_gamma, STAGES, COPIES)
    if COPIED:
        factors_s = reinterpret(gates.blocks.stages, gl.float16, [STAGES, C, BK], COPIES)
    else:
        factors_s = gl.allocate_shared_memory(gl.float16, [STAGES, C, BK], FACTORS)
    state_s = gl.allocate_shared_memory(dtype, [2, BV, HALF], PART)
    before_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
    after_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
    kinds_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1], VECTOR)
    of_token = (i_b.to(gl.int64) * T + token) * H + i_h
    if STORED:
        out = dq + of_token * K
    else:
        o_s = gl.allocate_shared_memory(dtype, [2, C, HALF], PART)
        out = Blocks(walk.blocks(dq, i_h, T.to(gl.int64) * (H * K), H * K, K, K, HALF, PART), o_s)
    p_h0 = None if h0 is None else h0 + ((i_o if INIT_WALK else i_n).to(gl.int64) * H + i_h) * K * V
    gradients = None
    if dh is not None:
        q_s = gl.allocate_shared_memory(dtype, [1, C, BK], PART)
        queries = Blocks(walk.blocks(q, i_h // RQ, stride_qb, stride_qt, stride_qh, K, BK, PART), q_s)
        # What outlasts no chunk has the tile of the tree, and that of queries.
        high_s = reinterpret(k_s, gl.bfloat16, [STAGES + 1, C, BK], PART).index(STAGES)
        low_s = reinterpret(q_s, gl.bfloat16, [1, C, BK], PART).index(0)
        totals_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, BK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        base_s = gl.allocate_shared_memory(gl.float32, [BK], VECTOR)
        p_dh = dh + (group_slot(i_o, token, T, L, GROUP * C, PACKED, SPLIT) * H + i_h) * (BK * BV)
        p_y = y + (group_slot(i_o, token, T, L, C, PACKED, SPLIT) * H + i_h) * (2 * scaled_size(HALF))
        p_workspace = workspace + gl.program_id(0).to(gl.int64) * (C * BK) if STRONG else None
        d_gates = None
        if dg is not None:
            if STORED_G:
                d_gates = dg + of_token * K
            else:
                dg_s = reinterpret(k_s, dg.dtype.element_ty, [STAGES + 1, C, BK], PART).index(STAGES)
                d_gates = Blocks(walk.blocks(dg, i_h, T.to(gl.int64) * (H * K), H * K, K, K, BK, PART), dg_s)
        p_dgamma = None if dgamma is None else dgamma + i_o * H + i_h
        handed = pipeline(1, (1, 2), 1)
        gradients = GateGradients(handed, queries, high_s, low_s, base_s, totals_s, p_y, p_dh, p_workspace, d_gates,
                                  p_dgamma, GROUP)
    ring = pipeline(STAGES, (1, 1, 1, 1), 2)
    tree = pipeline(1, (1,), 2)
    fence_async_shared()
    program = Queries(walk, ring, d_out, values, keys, out, gates, factors_s, tree, state_s, before_s, after_s, kinds_s,
                      gradients, scale, p_h0, STRONG)
    gl.warp_specialize(
        [(Queries.multiply, (program, 0)), (Queries.multiply, (program, 1)), (Queries.work_in_gates, (program,))],
        [4, 8],
        [176, 80],
    )
