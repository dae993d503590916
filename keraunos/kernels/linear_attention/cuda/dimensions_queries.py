"""The walk that makes the queries' gradients with a gate per token and dimension of the key.

``dq_i = scale * exp2(G_i) (S do_i + sum_{j <= i} (do_i . v_j) exp2(-G_j) k_j)`` is an output with queries ``do``, keys
v and values k, whose gates are those of the values' dimensions: pairs have none. One warpgroup makes the pairs, works
gates into k, in shared memory, and leaves what outputs are to be multiplied by in the place of the gates; with kinds of
chunks as in ``dimensions``, but with half of the chunk's gates for u, as the walk for k and v has it. A strong chunk
reads and makes the state with a copy of its k. Then, for each level of the tree, the pairs of its halves multiply
``k_j exp2(G_mid - G_j)``, and what comes out ``exp2(G_i - G_mid)``.

The state is kept ``[K, V]``, and all that comes of it transposed, in registers: a warpgroup has PART of the keys'
dimensions. With the products that the walk for k and v has left it makes the gradients of gates, too: see
``dimensions_gates``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

import keraunos.kernels.linear_attention.cuda.dimensions as shared
from keraunos.kernels.device.hopper import LOG2E, load_state, locate, within
from keraunos.kernels.device.pipeline import Pipeline, pipeline
from keraunos.kernels.gluon import aggregate, copy_out, lengths, reinterpret, thread_barrier
from keraunos.kernels.linear_attention.cuda.dimensions import BLOCKS, PART, DimensionGates, wide_pairs
from keraunos.kernels.linear_attention.cuda.dimensions_gates import (
    accumulate,
    accumulated,
    earlier_tokens,
    load_scaled,
    scaled_size,
    unscaled,
)
from keraunos.kernels.linear_attention.cuda.walk import Blocks, Walk, cut, group_slot, natural_decay, settled

# Copies of queries: a part of a stage, where gradients of gates are made.
QUERIES = gl.constexpr(4)


@gluon.jit
def put(x, out, walk, at, o_k, WALKER: gl.constexpr):
    """Copies out what comes of a chunk, transposed, or stores it."""
    C: gl.constexpr = walk.C
    COPIED: gl.constexpr = isinstance(out, Blocks)
    if COPIED:
        tile = out.stages.index(WALKER)
        tma.store_wait(0)
        tile.permute((1, 0)).store(x.to(tile.dtype))
        fence_async_shared()
    else:
        t = gl.arange(0, C, layout=gl.SliceLayout(0, x.type.layout))
        o = (o_k[:, None] + ((at * C + t).to(gl.int64) * (walk.H * walk.K))[None, :])
        inside = within((t < walk.size - at * C)[None, :], o_k[:, None], walk.K, walk.BK)
        gl.store(out + o, x, mask=inside)
    thread_barrier()
    if COPIED:
        copy_out(out.desc, [at * C, WALKER * PART], tile)


@aggregate
class GateGradients:
    """The arrays that gradients of gates are made of, and where these go; an absent one is None.

    The products of q with dq minus those of k with dk, which ``y`` has, are summed by products with the matrix
    ``earlier``. The gradients of the state, ``dh``, give that of each GROUP-th chunk's first token. dg is copied out in
    blocks, or stored. workspace: where strong chunks add up.
    """

    q: Blocks
    earlier: gl.shared_memory_descriptor
    y: gl.tensor
    dh: gl.tensor
    workspace: gl.tensor | gl.constexpr
    dg: Blocks | gl.tensor | gl.constexpr
    dgamma: gl.tensor | gl.constexpr
    GROUP: gl.constexpr


@aggregate
class Queries:
    """The arrays and barriers that the partitions of one program share; an absent one is None.

    The ring has the output's gradients, values, keys, gates and, where their gradients are made, queries. The last tile
    of keys is for strong chunks: for the state, and then for each level of the tree, whose pipeline has one stage. It
    is taken at first, so that a step may fill it when readers have released it once more than before. factors get what
    outputs are to be multiplied by, of a strong chunk MAGNIFIED; pairs those of a stage, of a strong chunk none at
    first, and then those of each level. For each stage: what the state is to be multiplied by ``before`` the chunk
    reads it and, of a strong chunk, ``after`` it has; which kind of chunk it is. Of each part of k's dimensions: a
    block of the gradients, or where they are stored.
    """

    walk: Walk
    ring: Pipeline
    do: Blocks
    v: Blocks
    k: Blocks
    o: Blocks | gl.tensor
    gates: DimensionGates
    factors: gl.shared_memory_descriptor
    pairs: gl.shared_memory_descriptor
    tree: Pipeline
    before: gl.shared_memory_descriptor
    after: gl.shared_memory_descriptor
    kinds: gl.shared_memory_descriptor
    gradients: GateGradients | gl.constexpr
    scale: gl.tensor
    h0: gl.tensor | gl.constexpr
    STRONG: gl.constexpr
    WALKERS: gl.constexpr

    @gluon.jit
    def fetch(self, i):
        """Begins to copy chunk i into its stage, in the order in which its tiles are wanted."""
        ring, do, v, k, gradients = self.ring, self.do, self.v, self.k, self.gradients
        slot = i % ring.STAGES
        row = self.walk.place(i) * self.walk.C
        self.gates.copy(row, i, ring)
        ring.expect(i, k.desc.block_type.nbytes, shared.COPIED_KEYS)
        k.copy(row, 0, slot, ring.full(i, shared.COPIED_KEYS))
        ring.expect(i, do.desc.block_type.nbytes + v.desc.block_type.nbytes, shared.COPIED_VALUES)
        full = ring.full(i, shared.COPIED_VALUES)
        do.copy(row, 0, slot, full)
        v.copy(row, 0, slot, full)
        if gradients is not None:
            ring.expect(i, gradients.q.desc.block_type.nbytes, QUERIES)
            gradients.q.copy(row, 0, slot, ring.full(i, QUERIES))

    @gluon.jit
    def do_strong(self, i, used, pairs, LAYOUT: gl.constexpr):
        """Works the gates of a strong chunk into a copy of its k, for the state, and for each level of the tree.

        Of a level the copy gets the keys of the earlier halves and the factors of the later ones.
        """
        walk, ring, gates, tree = self.walk, self.ring, self.gates, self.tree
        slot = i % ring.STAGES
        k_c = self.k.stages.index(slot)
        x_s = self.k.stages.index(ring.STAGES)
        pairs_c = self.pairs.index(slot)
        factors_c = self.factors.index(slot)
        dtype: gl.constexpr = k_c.dtype
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))[:, None]
        columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))[None, :]
        none = gl.zeros([C, C], gl.float32, W)
        F, own, _, before, behind, beside = gates.load_strong(walk, walk.place(i), slot, LAYOUT)
        out, into = shared.ends(own, walk.REVERSE)
        t = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
        factor = gl.exp2(shared.flat(F * LOG2E + (into * LOG2E + before)[:, None, :], LAYOUT))
        factors_c.store((factor * shared.MAGNIFIED).to(factors_c.dtype))
        factor = gl.exp2(shared.flat((out * LOG2E + behind)[:, None, :] - F * LOG2E, LAYOUT))
        x_s.store((k_c.load(LAYOUT).to(gl.float32) * factor).to(dtype))
        pairs_c.store(none.to(dtype))
        fence_async_shared()
        thread_barrier()
        ring.commit(i, shared.WORKED)
        out, into = shared.of_two_leaves(out, into, beside, walk.REVERSE)
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
            # Tokens whose numbers agree but for the last bits, the first of which is the level's.
            meet = (rows ^ columns) // ((C >> 1) >> level) == 1
            tree.acquire(used + (level + 1))
            x_s.store(gl.where(later, f, k_c.load(LAYOUT).to(gl.float32) * f).to(dtype))
            pairs_c.store(gl.where(meet, pairs, 0.0).to(dtype))
            fence_async_shared()
            thread_barrier()
            tree.commit(level)

    @gluon.jit
    def work_in_gates(self):
        """A partition of one warpgroup: works the gates of each chunk into its k, and makes its pairs."""
        walk, ring, gates, gradients = self.walk, self.ring, self.gates, self.gradients
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        STRONG: gl.constexpr = self.STRONG
        LAYOUT: gl.constexpr = shared.of_tokens(C, BK, 4)
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, shared.of_blocks(BLOCKS, BK, 4)))
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
        dtype: gl.constexpr = self.k.stages.dtype
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))[:, None]
        columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))[None, :]
        none = gl.zeros([C, C], gl.float32, W)
        mids = gl.zeros([BK], gl.float32, COLUMNS)
        used = walk.size * 0
        for i in range(walk.chunks()):
            slot = i % ring.STAGES
            at = walk.place(i)
            k_c = self.k.stages.index(slot)
            factors_c = self.factors.index(slot)
            gates.wait(i, ring)
            x = gates.load(walk, at, slot, LAYOUT)
            F = shared.within_blocks(x, walk.REVERSE)
            into = shared.ends(gl.sum(x, 1), walk.REVERSE)[1]
            gates.put_sums(x)
            ring.wait(i, shared.COPIED_KEYS)
            ring.wait(i, shared.COPIED_VALUES)
            # In no branch: ptxas 13.0 takes the addresses of a product in one for those of the same in another.
            a = warpgroup_mma(self.do.stages.index(slot), self.v.stages.index(slot).permute((1, 0)), none,
                              use_acc=False, is_async=True)
            k = k_c.load(LAYOUT)
            total, before = shared.around(gates.sums, F, LOG2E, walk.REVERSE)[:2]
            # Each thread puts factors where it has read gates.
            least = gates.least_sum()
            a = warpgroup_mma_wait(0, deps=[a])
            seen = (columns >= rows) if walk.REVERSE else (columns <= rows)
            pairs = gl.where(seen, a, 0.0).to(dtype)
            if STRONG and least < shared.MODERATE:
                self.kinds.index(slot).store(gl.full([1], LOG2E, gl.float32, FLAG))
                self.before.index(slot).store(gl.exp2(mids))
                self.after.index(slot).store(gl.exp2(total))
                mids = gl.zeros([BK], gl.float32, COLUMNS)
                # The tile of the tree is free when the chunk before is done.
                if i > 0:
                    ring.acquire(i - 1 + ring.STAGES)
                # It loads all again, which would stay in registers else.
                self.do_strong(i, used, pairs, LAYOUT)
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
                    if gradients is not None:
                        # A token's own pair is added later to dq.
                        pairs = gl.where(rows == columns, 0.0, pairs).to(dtype)
                else:
                    self.kinds.index(slot).store(gl.full([1], shared.IS_MILD, gl.float32, FLAG))
                    apart = shared.from_middle(F, into, before, half, LAYOUT)
                    factors_c.store(gl.exp2(apart).to(factors_c.dtype))
                    k_c.store((wide_pairs(k) * gl.exp2(apart * -1.0)).to(dtype))
                self.pairs.index(slot).store(pairs)
                fence_async_shared()
                thread_barrier()
                ring.commit(i, shared.WORKED)

    @gluon.jit
    def multiply(self, WALKER: gl.constexpr):
        """A partition of one warpgroup: PART of the keys' dimensions, for which it has the state in registers.

        The first partition copies chunks into the ring of stages, too, once all have read what was there.
        """
        walk, ring, tree, gradients = self.walk, self.ring, self.tree, self.gradients
        C: gl.constexpr = walk.C
        BV: gl.constexpr = walk.BV
        STRONG: gl.constexpr = self.STRONG
        LEARNED: gl.constexpr = gradients is not None
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        # A chunk's tokens are columns.
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
        WS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
        LEFT_S: gl.constexpr = gl.DotOperandLayout(0, WS, 2)
        ROWS: gl.constexpr = gl.SliceLayout(1, WS)
        dtype: gl.constexpr = self.k.stages.dtype
        first: gl.constexpr = WALKER * PART
        o_k = first + gl.arange(0, PART, layout=ROWS)
        o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, WS))
        o_rows = first + gl.arange(0, PART, layout=gl.SliceLayout(1, W))
        none = gl.zeros([PART, C], gl.float32, W)
        state = gl.zeros([PART, BV], gl.float32, WS)
        if self.h0 is not None:
            p_h0 = self.h0 + ((o_k * walk.V)[:, None] + o_v[None, :])
            state = load_state(p_h0, o_k, o_v, walk.K, walk.V, walk.BK, BV)
        if LEARNED:
            # The gradient of the gates of a chunk's first token, and the sum of all.
            base = gl.zeros([PART], gl.float32, gl.SliceLayout(1, W))
            everything = base
            if STRONG:
                workspace = gradients.workspace + WALKER * C * PART
        count = walk.chunks()
        if WALKER == 0:
            for i in range(gl.minimum(ring.STAGES, count)):
                self.fetch(i)
        for i in range(count):
            slot = i % ring.STAGES
            at = walk.place(i)
            ring.wait(i, shared.WORKED)
            kind = gl.max(self.kinds.index(slot).load(FLAG), 0) if STRONG else shared.IS_MILD
            strong = kind > 0
            moderate = kind < 0
            do = self.do.stages.index(slot)
            v = self.v.stages.index(slot)
            pairs = self.pairs.index(slot)
            k_slot = gl.where(strong, ring.STAGES, slot) if STRONG else slot
            state = settled(state)
            state = state * self.before.index(slot).slice(first, PART, 0).load(ROWS)[:, None]
            if LEARNED:  # noqa: SIM102
                if i % gradients.GROUP == 0:
                    p_dh = gradients.dh + (i // gradients.GROUP).to(gl.int64) * (walk.H * walk.BK * BV)
                    b_dh = gl.load(p_dh + ((o_k * BV)[:, None] + o_v[None, :])).to(gl.float32)
                    base = gl.convert_layout(gl.sum(state * b_dh, 1), base.type.layout)
            left = gl.convert_layout(state.to(dtype), LEFT)
            if STRONG and strong:
                state = state * self.after.index(slot).slice(first, PART, 0).load(ROWS)[:, None]
            b_dq = warpgroup_mma(left, do.permute((1, 0)), none, use_acc=False, is_async=True)
            # Its left operand leaves registers for the keys.
            b_dq = settled(b_dq)
            k = self.k.stages.index(k_slot).slice(first, PART, 1).permute((1, 0)).load(W)
            state = warpgroup_mma(gl.convert_layout(k, LEFT_S), v, state, is_async=True)
            b_dq = warpgroup_mma(gl.convert_layout(k, LEFT), pairs.permute((1, 0)), b_dq, is_async=True)
            b_dq, state = warpgroup_mma_wait(0, deps=[b_dq, state])
            if LEARNED:
                p_y = gradients.y + at.to(gl.int64) * (walk.H * scaled_size(walk.BK)) + WALKER * scaled_size(PART)
                y = load_scaled(p_y)
                ring.wait(i, QUERIES)
                q_c = gradients.q.stages.index(slot).slice(first, PART, 1).permute((1, 0))
            unit = gl.where(strong, self.scale / shared.MAGNIFIED, self.scale) if STRONG else self.scale
            factors_c = self.factors.index(slot).slice(first, PART, 1).permute((1, 0))
            if STRONG and moderate:
                factor = shared.load_bfloat16(factors_c, W) * unit
            else:
                factor = factors_c.load(W).to(gl.float32) * unit
            if LEARNED:
                # Rounded as in the walk for dk.
                x = wide_pairs((wide_pairs(q_c.load(W)) * factor).to(dtype)) * b_dq
                if STRONG and strong:
                    accumulate(x, workspace, True)
                if STRONG and moderate:
                    own = shared.own_pairs(do, v, gl.SliceLayout(0, W))
                    b_dq += own[None, :] * wide_pairs(k)
            b_dq = b_dq * factor
            if STRONG and strong:
                thread_barrier()
                tree.release(0)
                state = settled(state)
                own = shared.own_pairs(do, v, gl.SliceLayout(0, W)) * self.scale
                k_own = self.k.stages.index(slot).slice(first, PART, 1).permute((1, 0))
                b_dq += own[None, :] * wide_pairs(k_own.load(W))
                x_p = self.k.stages.index(ring.STAGES).slice(first, PART, 1).permute((1, 0))
                for level in range(shared.LEVELS):
                    tree.wait(level)
                    f = x_p.load(W)
                    b = warpgroup_mma(gl.convert_layout(f, LEFT), pairs.permute((1, 0)), none, use_acc=False)
                    f = wide_pairs(f)
                    b_dq += b * f
                    if LEARNED:
                        b = b * wide_pairs((wide_pairs(q_c.load(W)) * f).to(dtype))
                        accumulate(b, workspace, False)
                    thread_barrier()
                    tree.release(level + 1)
                if LEARNED:
                    x = accumulated(workspace, C, W)
            put(b_dq, self.o, walk, at, o_rows, WALKER)
            ring.release(i)
            if WALKER == 0 and i + ring.STAGES < count:
                ring.acquire(i + ring.STAGES)
                self.fetch(i + ring.STAGES)
            if LEARNED:
                x -= unscaled(y, W)
                total = gl.sum(x, 1)
                high = cut(x)
                left = gl.convert_layout(high.to(gl.bfloat16), LEFT)
                sums = warpgroup_mma(left, gradients.earlier, none, use_acc=False, is_async=True)
                left = gl.convert_layout((x - high).to(gl.bfloat16), LEFT)
                sums = warpgroup_mma(left, gradients.earlier, sums, is_async=True)
                sums = warpgroup_mma_wait(0, deps=[sums])
                x = base[:, None] - sums
                base -= total
                if gradients.dgamma is not None:
                    t = gl.arange(0, C, layout=gl.SliceLayout(0, W))
                    inside = within((t < walk.size - at * C)[None, :], o_rows[:, None], walk.K, walk.BK)
                    everything += gl.sum(gl.where(inside, x, 0.0), 1)
                if gradients.dg is not None:
                    put(x, gradients.dg, walk, at, o_rows, WALKER)
        tma.store_wait(0)
        if LEARNED:  # noqa: SIM102
            if gradients.dgamma is not None:
                gl.store(gradients.dgamma + WALKER * walk.H, gl.sum(everything, 0))


@gluon.jit(do_not_specialize=lengths("qkvog", "stride_gamma_b", "T", "L"))
def queries_kernel(
    q, k, v, do, g, gamma, h0, y, dh, strong, cu_seqlens, dq_given, dg_given, dgamma_given,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh, stride_gb, stride_gt, stride_gh, stride_gamma_b, scale, T, L,
    dq, workspace, dg, dgamma,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, INIT_WALK: gl.constexpr, STORED: gl.constexpr,
    STORED_G: gl.constexpr, GROUP: gl.constexpr, STRONG: gl.constexpr, MAXNREG: gl.constexpr,
):
    """The gradients of one head's queries in one sequence, or in a segment of it, with gates ``[B, T, H, K]``.

    Partitions of a warpgroup multiply, each for PART of k's dimensions, another works the gates in. strong
    ``[walks, H]`` says which walks have chunks that are not mild. STRONG launches make the gradients of those, with
    code for such chunks, which takes registers from the other; the others' go into the same arrays.

    h0: the states ``[.., H, K, V]`` that walks (INIT_WALK) or sequences start from. Where the gradients of gates are
    wanted, dg ``[B, T, H, K]`` and dgamma ``[walks, parts, H]``, y are the dots and dh the states of ``keys_kernel``,
    and strong chunks add up the products of q with dq in workspace ``[walks, H, C, BK]``.
    Otherwise as ``outputs_kernel``.
    """
    i_h = gl.program_id(0) % H
    i_o = gl.program_id(0) // H
    if (gl.load(strong + i_o * H + i_h) != 0) != STRONG:
        return
    i_n, i_b, token, size, _ = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, REVERSE)
    WALKERS: gl.constexpr = BK // PART
    dtype: gl.constexpr = k.dtype.element_ty
    g_dtype: gl.constexpr = g.dtype.element_ty
    COPIED: gl.constexpr = g_dtype != gl.float32
    # Of all that has the dimensions of keys, and can be cut into parts.
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PART], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    COPIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PART], g_dtype) if COPIED else None
    FACTORS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, PART], gl.float16)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    walk = Walk(i_b, token, size, H, C, K, V, BK, BV, REVERSE, REVERSE)
    # The last tile is for the tree of a strong chunk.
    k_s = gl.allocate_shared_memory(dtype, [STAGES + STRONG, C, BK], KEYS)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    keys = Blocks(walk.blocks(k, i_h // RK, stride_kb, stride_kt, stride_kh, K, BK, KEYS), k_s)
    values = Blocks(walk.blocks(v, i_h // RV, stride_vb, stride_vt, stride_vh, V, BV, VALUES), v_s)
    d_out = Blocks(walk.blocks(do, i_h, stride_ob, stride_ot, stride_oh, V, BV, VALUES), do_s)
    p_gamma = None if gamma is None else natural_decay(gamma, i_b, i_h, stride_gamma_b)
    gates = shared.dimension_gates(walk, g, stride_gb, stride_gt, stride_gh, i_h // RG, p_gamma, STAGES, COPIES, 4)
    if COPIED:
        factors_s = reinterpret(gates.blocks.stages, gl.float16, [STAGES, C, BK], COPIES)
    else:
        factors_s = gl.allocate_shared_memory(gl.float16, [STAGES, C, BK], FACTORS)
    pairs_s = gl.allocate_shared_memory(dtype, [STAGES, C, C], SQUARE)
    before_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
    after_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK], VECTOR)
    kinds_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1], VECTOR)
    of_token = (i_b.to(gl.int64) * T + token) * H + i_h
    if STORED:
        out = dq + of_token * K
    else:
        o_s = gl.allocate_shared_memory(dtype, [WALKERS, C, PART], KEYS)
        out = Blocks(walk.blocks(dq, i_h, T.to(gl.int64) * (H * K), H * K, K, K, PART, KEYS), o_s)
    p_h0 = None if h0 is None else h0 + ((i_o if INIT_WALK else i_n).to(gl.int64) * H + i_h) * K * V
    gradients = None
    if dh is not None:
        q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], KEYS)
        queries = Blocks(walk.blocks(q, i_h // RQ, stride_qb, stride_qt, stride_qh, K, BK, KEYS), q_s)
        earlier_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], SQUARE)
        earlier_s.store(earlier_tokens(C, REVERSE).to(gl.bfloat16))
        p_dh = dh + (group_slot(i_o, token, T, L, GROUP * C, PACKED, SPLIT) * H + i_h) * (BK * BV)
        p_y = y + (group_slot(i_o, token, T, L, C, PACKED, SPLIT) * H + i_h) * scaled_size(BK)
        p_workspace = workspace + gl.program_id(0).to(gl.int64) * (C * BK) if STRONG else None
        d_gates = None
        if dg is not None:
            if STORED_G:
                d_gates = dg + of_token * K
            else:
                # Strong chunks leave no space for tiles of their own.
                if STRONG and not STORED:
                    dg_s = o_s
                else:
                    dg_s = gl.allocate_shared_memory(dg.dtype.element_ty, [WALKERS, C, PART], KEYS)
                d_gates = Blocks(walk.blocks(dg, i_h, T.to(gl.int64) * (H * K), H * K, K, K, PART, KEYS), dg_s)
        p_dgamma = None if dgamma is None else dgamma + i_o * (WALKERS * H) + i_h
        gradients = GateGradients(queries, earlier_s, p_y, p_dh, p_workspace, d_gates, p_dgamma, GROUP)
    ring = pipeline(STAGES, (1, 1, 1, 1, 1), WALKERS)
    tree = pipeline(1, (1,), WALKERS)
    fence_async_shared()
    program = Queries(walk, ring, d_out, values, keys, out, gates, factors_s, pairs_s, tree, before_s, after_s, kinds_s,
                      gradients, scale, p_h0, STRONG, WALKERS)
    if WALKERS == 2:
        gl.warp_specialize(
            [(Queries.multiply, (program, 0)), (Queries.multiply, (program, 1)), (Queries.work_in_gates, (program,))],
            [4, 4],
            [MAXNREG, MAXNREG],
        )
    else:
        gl.warp_specialize([(Queries.multiply, (program, 0)), (Queries.work_in_gates, (program,))], [4], [MAXNREG])
