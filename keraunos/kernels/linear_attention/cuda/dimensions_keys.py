"""The walk that makes the gradients of keys and values with a gate per token and dimension of the key, in one pass.

It goes against the order of the recurrence and keeps ``D``, the gradient of the state after the chunk:

- ``dv_j = sum_{i >= j} A_ij do_i + (k_j exp2(G_total - G_j)) D``, with ``A_ij`` the pairs of the outputs,
- ``dk_j = exp2(G_total - G_j) (D v_j) + sum_{i >= j} (do_i . v_j) scale q_i exp2(G_i - G_j)``,
- and before the chunk ``D`` is ``exp2(G_total) D + sum_i scale q_i exp2(G_i) do_i``.

Two warpgroups work gates into q and k, in shared memory, and leave in the place of the gates what dk is to be
multiplied by; with kinds of chunks as in ``dimensions``. In a strong chunk k with gates has a tile of its own,
and another has, in turn, ``scale q_i exp2(G_i)``, for D, and for each level of the tree ``scale q_i exp2(G_i - G_mid)``
of the later halves and ``exp2(G_mid - G_j)`` of the earlier ones, by which what comes of the former is multiplied. The
pairs of the outputs are made at the same time.

Two more multiply: one makes dv, one dk. For the gradients of gates they leave the products of k with dk, and some D:
see ``dimensions_gates``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

import keraunos.kernels.linear_attention.cuda.dimensions as shared
from keraunos.kernels.device.hopper import LOG2E, load_state, locate, store_state, within
from keraunos.kernels.device.pipeline import Pipeline, pipeline
from keraunos.kernels.gluon import aggregate, copy_out, lengths, reinterpret, thread_barrier
from keraunos.kernels.linear_attention.cuda.dimensions import BLOCKS, DimensionGates
from keraunos.kernels.linear_attention.cuda.dimensions_gates import (
    accumulate,
    accumulated,
    scaled_size,
    store_scaled_parts,
)
from keraunos.kernels.linear_attention.cuda.walk import Blocks, Walk, group_slot, natural_decay, settled


@gluon.jit
def store_rows(x, p, at, left, H: gl.constexpr, D: gl.constexpr, BD: gl.constexpr):
    """Stores what comes of a chunk, from registers."""
    C: gl.constexpr = x.shape[0]
    L: gl.constexpr = x.type.layout
    t = gl.arange(0, C, layout=gl.SliceLayout(1, L))
    o_d = gl.arange(0, BD, layout=gl.SliceLayout(0, L))
    o = ((at * C + t).to(gl.int64) * (H * D))[:, None] + o_d[None, :]
    mask = within((t < left)[:, None], o_d[None, :], D, BD)
    gl.store(p + o, x, mask=mask)


@gluon.jit
def put(x, out, at, left, H: gl.constexpr, D: gl.constexpr, BD: gl.constexpr):
    """Copies out what comes of a chunk, or stores it."""
    C: gl.constexpr = x.shape[0]
    COPIED: gl.constexpr = isinstance(out, Blocks)
    if COPIED:
        tma.store_wait(0)
        out.stages.store(x.to(out.stages.dtype))
        fence_async_shared()
    else:
        store_rows(x, out, at, left, H, D, BD)
    thread_barrier()
    if COPIED:
        copy_out(out.desc, [at * C, 0], out.stages)


@aggregate
class Keys:
    """The arrays and barriers that the partitions of one program share; an absent one is None.

    The first partition makes dv, the second dk, each in blocks, or where it is stored. Each has half of the values'
    dimensions of the gradient of the state in registers, and writes its half of the copy ``state`` that both read, of
    which ``halves`` is the pipeline of one stage.

    The ring has q, k, gates, v and the output's gradients. The last tiles of q and k are for strong chunks: for the
    state, and then for each level of the tree, whose pipeline has one stage. It is taken at first, so that a step may
    fill it when readers have released it once more than before. They are those of dk and dv, too.

    factors get what dk is to be multiplied by, of a strong chunk MAGNIFIED; before, what the state is to be multiplied
    by before the chunk reads it, after the last chunk once more; kinds, for each stage, which kind of chunk it is.
    """

    walk: Walk
    ring: Pipeline
    q: Blocks
    k: Blocks
    v: Blocks
    do: Blocks
    dk: Blocks | gl.tensor
    dv: Blocks | gl.tensor
    gates: DimensionGates
    factors: gl.shared_memory_descriptor
    tree: Pipeline
    state: gl.shared_memory_descriptor
    halves: Pipeline
    before: gl.shared_memory_descriptor
    kinds: gl.shared_memory_descriptor
    scale: gl.tensor
    dht: gl.tensor | gl.constexpr
    dh0: gl.tensor | gl.constexpr
    last: gl.tensor
    dots: gl.tensor | gl.constexpr
    workspace: gl.tensor | gl.constexpr
    states: gl.tensor | gl.constexpr
    GROUP: gl.constexpr

    @gluon.jit
    def fetch(self, i):
        """Begins to copy chunk i into its stage, in the order in which its tiles are wanted."""
        ring, q, k, v, do = self.ring, self.q, self.k, self.v, self.do
        slot = i % ring.STAGES
        row = self.walk.place(i) * self.walk.C
        self.gates.copy(row, i, ring)
        ring.expect(i, q.desc.block_type.nbytes + k.desc.block_type.nbytes, shared.COPIED_KEYS)
        full = ring.full(i, shared.COPIED_KEYS)
        q.copy(row, 0, slot, full)
        k.copy(row, 0, slot, full)
        ring.expect(i, v.desc.block_type.nbytes + do.desc.block_type.nbytes, shared.COPIED_VALUES)
        full = ring.full(i, shared.COPIED_VALUES)
        v.copy(row, 0, slot, full)
        do.copy(row, 0, slot, full)

    @gluon.jit
    def do_strong(self, i, LAYOUT: gl.constexpr):
        """Works the gates of a strong chunk into copies of its q and k, for the state, and for each level of the tree.

        Of a level the copy of q gets the queries of the later halves and the factors of the earlier ones. In the end
        the pairs, which are products of such queries with such keys, are in the place of q.
        """
        walk, ring, gates, tree = self.walk, self.ring, self.gates, self.tree
        slot = i % ring.STAGES
        q_c = self.q.stages.index(slot)
        k_c = self.k.stages.index(slot)
        x_s = self.q.stages.index(ring.STAGES)
        y_s = self.k.stages.index(ring.STAGES)
        factors_c = self.factors.index(slot)
        dtype: gl.constexpr = q_c.dtype
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))[:, None]
        columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))[None, :]
        t = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        none = gl.zeros([C, C], gl.float32, W)
        b = warpgroup_mma(k_c, q_c.permute((1, 0)), none, use_acc=False, is_async=True)
        pairs = (warpgroup_mma_wait(0, deps=[b]) * self.scale).to(dtype)
        F, own, total, before, behind, beside = gates.load_strong(walk, walk.place(i), slot, LAYOUT)
        out, into = shared.ends(own, walk.REVERSE)
        factor = gl.exp2(shared.flat((out * LOG2E + behind)[:, None, :] - F * LOG2E, LAYOUT))
        factors_c.store((factor * shared.MAGNIFIED).to(factors_c.dtype))
        thread_barrier()
        ring.commit(i, shared.WORKED)
        tree.acquire(1)
        y_s.store((k_c.load(LAYOUT).to(gl.float32) * factor).to(dtype))
        factor = gl.exp2(shared.flat(F * LOG2E + (into * LOG2E + before)[:, None, :], LAYOUT)) * self.scale
        x_s.store((q_c.load(LAYOUT).to(gl.float32) * factor).to(dtype))
        self.before.store(gl.exp2(total))
        fence_async_shared()
        thread_barrier()
        tree.commit(0)
        for level in gl.static_range(shared.LEVELS):
            # Loaded anew, so that what follows from it does not wait in registers from the first level on.
            unit = gl.max(self.kinds.index(slot).load(FLAG), 0)
            if level == shared.LEVELS - 1:
                out, into = shared.of_two_leaves(out, into, beside, walk.REVERSE)
            one = gl.full([C, BK], 1.0, gl.float32, LAYOUT)
            f = shared.halves_meet(one * self.scale, one, F, out, into, unit, 1 << level, walk.REVERSE, LAYOUT)
            f = f.to(dtype).to(gl.float32)
            later = ((t >> level) % 2 == (0 if walk.REVERSE else 1))[:, None]
            tree.acquire(level + 2)
            x_s.store((gl.where(later, q_c.load(LAYOUT), k_c.load(LAYOUT)).to(gl.float32) * f).to(dtype))
            fence_async_shared()
            thread_barrier()
            b = warpgroup_mma(x_s, x_s.permute((1, 0)), none, use_acc=False, is_async=True)
            b = warpgroup_mma_wait(0, deps=[b])
            # What is no pair of this level's is one of a later level's.
            pairs = gl.where((rows ^ columns) >= (1 << level), b.to(dtype), pairs)
            thread_barrier()
            x_s.store(gl.where(later, q_c.load(LAYOUT).to(gl.float32) * f, f).to(dtype))
            fence_async_shared()
            thread_barrier()
            tree.commit(level + 1)
        # Rows are keys and columns queries.
        seen = (columns <= rows) if walk.REVERSE else (columns >= rows)
        tree.acquire(shared.LEVELS + 2)
        q_c.slice(0, C, 1).store(gl.where(seen, pairs, 0.0).to(dtype))
        fence_async_shared()  # The next copy comes here.
        thread_barrier()
        tree.commit(shared.LEVELS + 1)

    @gluon.jit
    def work_in_gates(self):
        """A partition of two warpgroups: works the gates of each chunk into its q and k, in shared memory."""
        walk, ring, gates, halves = self.walk, self.ring, self.gates, self.halves
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        LAYOUT: gl.constexpr = gl.BlockedLayout([C // BLOCKS, BK // 64], [1, 32], [BLOCKS, 2], [1, 0])
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        ALL: gl.constexpr = gl.BlockedLayout([1, BLOCKS, BK // 64], [1, 1, 32], [BLOCKS, 1, 2], [2, 1, 0])
        COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, ALL))
        dtype: gl.constexpr = self.k.stages.dtype
        mids = gl.zeros([BK], gl.float32, COLUMNS)
        count = walk.chunks()
        for i in range(count):
            slot = i % ring.STAGES
            at = walk.place(i)
            q_c = self.q.stages.index(slot)
            k_c = self.k.stages.index(slot)
            factors_c = self.factors.index(slot)
            gates.wait(i, ring)
            x = gates.load(walk, at, slot, LAYOUT)
            F = shared.within_blocks(x, walk.REVERSE)
            into = shared.ends(gl.sum(x, 1), walk.REVERSE)[1]
            gates.put_sums(x)
            ring.wait(i, shared.COPIED_KEYS)
            q = q_c.load(LAYOUT)
            k = k_c.load(LAYOUT)
            total, before = shared.around(gates.sums, F, LOG2E, walk.REVERSE)[:2]
            # What the chunk before reads has been read.
            halves.wait(i - 1)
            # Each thread puts factors where it has read gates.
            least = gates.least_sum()
            if least < shared.MODERATE:
                self.kinds.index(slot).store(gl.full([1], LOG2E, gl.float32, FLAG))
                self.before.store(gl.exp2(mids))
                mids = gl.zeros([BK], gl.float32, COLUMNS)
                # It loads all again, which would stay in registers else.
                self.do_strong(i, LAYOUT)
            else:
                half = total * 0.5
                self.before.store(gl.exp2(mids + half))
                mids = half
                # The factor of q is as the walk for dq has it.
                if least < shared.MILD:
                    self.kinds.index(slot).store(gl.full([1], shared.IS_MODERATE, gl.float32, FLAG))
                    apart = gates.load_from_middle(walk, at, slot, LAYOUT)
                    factor = gl.exp2(apart).to(gl.bfloat16).to(gl.float32)
                    q_c.store((q_c.load(LAYOUT).to(gl.float32) * (factor * self.scale)).to(dtype))
                    factor = gl.exp2(-apart)
                    k_c.store((k_c.load(LAYOUT).to(gl.float32) * factor).to(dtype))
                    shared.put_bfloat16(factor, factors_c)
                else:
                    self.kinds.index(slot).store(gl.full([1], shared.IS_MILD, gl.float32, FLAG))
                    apart = shared.from_middle(F, into, before, half, LAYOUT)
                    factor = gl.exp2(apart).to(gl.float16).to(gl.float32)
                    q_c.store((q.to(gl.float32) * (factor * self.scale)).to(dtype))
                    factor = gl.exp2(-apart)
                    k_c.store((k.to(gl.float32) * factor).to(dtype))
                    factors_c.store(factor.to(factors_c.dtype))
                fence_async_shared()
                thread_barrier()
                ring.commit(i, shared.WORKED)
        halves.wait(count - 1)
        self.before.store(gl.exp2(mids))
        thread_barrier()
        ring.commit(count, shared.WORKED)

    @gluon.jit
    def multiply(self, WG: gl.constexpr):
        """A partition of one warpgroup: the first makes dv, the second dk.

        The first copies chunks into the ring of stages, too, once the other has read what was there.
        """
        walk, ring, tree, halves = self.walk, self.ring, self.tree, self.halves
        out = self.dv if WG == 0 else self.dk
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        H: gl.constexpr = walk.H
        HALF: gl.constexpr = walk.BV // 2
        LEARNED: gl.constexpr = self.dots is not None
        STORED: gl.constexpr = not isinstance(out, Blocks)
        # What this partition makes has so many dimensions, in a tile.
        D: gl.constexpr = walk.V if WG == 0 else walk.K
        BD: gl.constexpr = walk.BV if WG == 0 else BK
        FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        WD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, WD, 2)
        dtype: gl.constexpr = self.q.stages.dtype
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))
        columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))
        o_k = gl.arange(0, BK, layout=gl.SliceLayout(1, W))
        o_v = WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, W))
        o_state = (o_k * walk.V)[:, None] + o_v[None, :]
        state = gl.zeros([BK, HALF], gl.float32, W)
        if self.dht is not None:
            state = load_state(self.dht + o_state, o_k, o_v, walk.K, walk.V, BK, walk.BV)
        none = gl.zeros([C, C], gl.float32, W)
        nothing = gl.zeros([C, BD], gl.float32, WD)
        mine = self.state.slice(WG * HALF, HALF, 1)
        x_s = self.q.stages.index(ring.STAGES)
        count = walk.chunks()
        if WG == 0:
            for i in range(gl.minimum(ring.STAGES, count)):
                self.fetch(i)
        for i in range(count):
            slot = i % ring.STAGES
            at = walk.place(i)
            left = gl.minimum(walk.size - at * C, C)
            ring.wait(i, shared.COPIED_VALUES)
            ring.wait(i, shared.WORKED)
            # None while a product is under way: the assembler would wait for it.
            halves.acquire(i)
            q = self.q.stages.index(slot)
            k = self.k.stages.index(slot)
            v = self.v.stages.index(slot)
            do = self.do.stages.index(slot)
            factors_c = self.factors.index(slot)
            if LEARNED:
                dots_c = self.dots + at.to(gl.int64) * (H * scaled_size(BK))
            state = settled(state)
            if WG == 0:
                a = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
            else:
                a = warpgroup_mma(v, do.permute((1, 0)), none, use_acc=False, is_async=True)
            state = state * self.before.load(gl.SliceLayout(1, W))[:, None]
            mine.store(state.to(dtype))
            fence_async_shared()
            thread_barrier()
            halves.commit(i)
            a = warpgroup_mma_wait(0, deps=[a])
            kind = gl.max(self.kinds.index(slot).load(FLAG), 0)
            strong = kind > 0
            moderate = kind < 0
            single = kind <= 0
            # Rows are keys here and columns queries. A token's own pair is added later to dk of a moderate chunk.
            later = rows[:, None]
            if WG == 1 and LEARNED:
                later += gl.where(moderate, -1 if walk.REVERSE else 1, 0)
            seen = (columns[None, :] <= later) if walk.REVERSE else (columns[None, :] >= later)
            pairs = gl.where(seen, a, 0.0).to(dtype)
            if strong:
                if not STORED:
                    # The tiles of a strong chunk are those of dk and dv.
                    tma.store_wait(0)
                tree.release(0)
                tree.wait(0)
                state = state * self.before.load(gl.SliceLayout(1, W))[:, None]
            x = self.q.stages.index(gl.where(strong, ring.STAGES, slot))
            halves.wait(i)
            if WG == 0:
                y = self.k.stages.index(gl.where(strong, ring.STAGES, slot))
                o = warpgroup_mma(y, self.state, nothing, use_acc=False, is_async=True)
            else:
                # Nothing comes of it in a strong chunk: else there were two kinds of pairs in registers.
                o = warpgroup_mma(gl.convert_layout(pairs, LEFT), x, nothing, use_acc=False, is_async=True)
                o = warpgroup_mma(v, self.state.permute((1, 0)), o, use_acc=single, is_async=True)
            state = warpgroup_mma(x.permute((1, 0)), do.slice(WG * HALF, HALF, 1), state, is_async=True)
            o, state = warpgroup_mma_wait(0, deps=[o, state])
            thread_barrier()
            halves.release(i)
            if WG == 0:
                if strong:
                    for level in range(shared.LEVELS + 1):
                        tree.release(level + 1)
                        tree.wait(level + 1)
                    pairs = q.slice(0, C, 1).load(W)
                o = warpgroup_mma(gl.convert_layout(pairs, LEFT), do, o, is_async=True)
                o = warpgroup_mma_wait(0, deps=[o])
                put(o, out, at, left, H, D, BD)
            else:
                # In branches of their own, so that what is in memory in a strong chunk is in registers in another.
                if strong:
                    # Only this partition read v, and has.
                    pairs_s = v.slice(0, C, 1)
                    pairs_s.store(pairs)
                    o = o * (factors_c.load(WD).to(gl.float32) / shared.MAGNIFIED)
                    if LEARNED:
                        accumulate(o * k.load(WD).to(gl.float32), self.workspace, True)
                    pairs = pairs_s.load(W)
                    own = gl.sum(gl.where(rows[:, None] == columns[None, :], pairs.to(gl.float32), 0.0), 1) * self.scale
                    o += gl.convert_layout(own, gl.SliceLayout(1, WD))[:, None] * q.load(WD).to(gl.float32)
                    for level in range(shared.LEVELS):
                        tree.release(level + 1)
                        # Tokens whose numbers agree but for the last bits, the first of which is the level's.
                        meet = ((rows[:, None] ^ columns[None, :]) >> level) == 1
                        p = gl.convert_layout(gl.where(meet, pairs_s.load(W), 0.0).to(dtype), LEFT)
                        tree.wait(level + 1)
                        b = warpgroup_mma(p, x_s, nothing, use_acc=False, is_async=True)
                        b = warpgroup_mma_wait(0, deps=[b])
                        f = x_s.load(WD).to(gl.float32)
                        o += b * f
                        if LEARNED:
                            b = b * (k.load(WD).to(gl.float32) * f).to(dtype).to(gl.float32)
                            accumulate(b, self.workspace, False)
                        thread_barrier()
                    tree.release(shared.LEVELS + 1)
                    if LEARNED:
                        store_scaled_parts(accumulated(self.workspace, BK, WD), dots_c)
                    put(o, out, at, left, H, D, BD)
                else:
                    if LEARNED:
                        # In a mild one with a token's pair with itself, which is in both walks' products.
                        store_scaled_parts(o * k.load(WD).to(gl.float32), dots_c)
                    # Once more in branches of their own.
                    if moderate:
                        if LEARNED:
                            own = shared.own_pairs(do, v, gl.SliceLayout(1, WD))
                            o += own[:, None] * q.load(WD).to(gl.float32)
                        put(o * shared.load_bfloat16(factors_c, WD), out, at, left, H, D, BD)
                    else:
                        put(o * factors_c.load(WD).to(gl.float32), out, at, left, H, D, BD)
            if WG == 1:
                ring.release(i)
            elif i + ring.STAGES < count:
                ring.acquire(i + ring.STAGES)
                self.fetch(i + ring.STAGES)
            if LEARNED:  # noqa: SIM102
                if (count - 1 - i) % self.GROUP == 0:
                    p_state = self.states + ((count - 1 - i) // self.GROUP).to(gl.int64) * (H * BK * walk.BV)
                    gl.store(p_state + ((o_k * walk.BV)[:, None] + o_v[None, :]), state.to(dtype))
        if not STORED:
            tma.store_wait(0)
        ring.wait(count, shared.WORKED)
        if self.dh0 is not None:
            state = settled(state) * self.before.load(gl.SliceLayout(1, W))[:, None]
            store_state(self.dh0 + o_state, state, self.last, o_k, o_v, walk.K, walk.V, BK, walk.BV)


@gluon.jit(do_not_specialize=lengths("qkvog", "stride_gamma_b", "T", "L"))
def keys_kernel(
    q, k, v, do, g, gamma, dht, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh, stride_gb, stride_gt, stride_gh, stride_gamma_b, scale, T, L,
    dk, dv, dh0, dots, workspace, states,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, GROUP: gl.constexpr,
):
    """dk and dv of one head of one sequence, or of one segment of it, with gates ``[B, T, H, K]``.

    Two partitions of a warpgroup multiply, one of two works the gates in. Otherwise as ``gradients_kernel``.

    dots ``[chunks, H, scaled_size(BK)]`` get the products of k with dk, but in mild chunks without a token's
    pair with itself; strong chunks add them up in workspace ``[walks, H, C, BK]``. states ``[groups, H, BK, BV]`` get
    the gradients of the state before each GROUP chunks, but for the ``exp2(G_total / 2)`` of a first one that is not
    strong.
    """
    i_h = gl.program_id(0) % H
    i_o = gl.program_id(0) // H
    i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, not REVERSE)
    HALF: gl.constexpr = BV // 2
    dtype: gl.constexpr = k.dtype.element_ty
    g_dtype: gl.constexpr = g.dtype.element_ty
    COPIED: gl.constexpr = g_dtype != gl.float32
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    # Of what is cut into halves.
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], dtype)
    GATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], g_dtype) if COPIED else None
    FACTORS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.float16)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    walk = Walk(i_b, token, size, H, C, K, V, BK, BV, REVERSE, not REVERSE)
    # The last tiles are for strong chunks, and for dk and dv.
    q_s = gl.allocate_shared_memory(dtype, [STAGES + 1, C, BK], KEYS)
    k_s = gl.allocate_shared_memory(dtype, [STAGES + 1, C, BK], KEYS)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], PART)
    queries = Blocks(walk.blocks(q, i_h // RQ, stride_qb, stride_qt, stride_qh, K, BK, KEYS), q_s)
    keys = Blocks(walk.blocks(k, i_h // RK, stride_kb, stride_kt, stride_kh, K, BK, KEYS), k_s)
    values = Blocks(walk.blocks(v, i_h // RV, stride_vb, stride_vt, stride_vh, V, BV, VALUES), v_s)
    d_out = Blocks(walk.blocks(do, i_h, stride_ob, stride_ot, stride_oh, V, BV, PART), do_s)
    state_s = gl.allocate_shared_memory(dtype, [BK, BV], PART)
    before_s = gl.allocate_shared_memory(gl.float32, [BK], VECTOR)
    kinds_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1], VECTOR)
    p_gamma = None if gamma is None else natural_decay(gamma, i_b, i_h, stride_gamma_b)
    gates = shared.dimension_gates(walk, g, stride_gb, stride_gt, stride_gh, i_h // RG, p_gamma, STAGES, GATES)
    if COPIED:
        factors_s = reinterpret(gates.blocks.stages, gl.float16, [STAGES, C, BK], GATES)
    else:
        factors_s = gl.allocate_shared_memory(gl.float16, [STAGES, C, BK], FACTORS)
    rows_of_batch = T.to(gl.int64) * H
    of_token = (i_b.to(gl.int64) * T + token) * H + i_h
    if dk.dtype.element_ty == dtype:
        desc = walk.blocks(dk, i_h, rows_of_batch * K, H * K, K, K, BK, KEYS)
        d_keys = Blocks(desc, q_s.index(STAGES))
    else:
        d_keys = dk + of_token * K
    if dv.dtype.element_ty == dtype:
        dv_s = k_s.index(STAGES)
        if BV != BK:
            dv_s = gl.allocate_shared_memory(dtype, [C, BV], VALUES)
        d_values = Blocks(walk.blocks(dv, i_h, rows_of_batch * V, H * V, V, V, BV, VALUES), dv_s)
    else:
        d_values = dv + of_token * V
    p_dht = None if dht is None else dht + (i_o.to(gl.int64) * H + i_h) * K * V
    p_dh0 = None if dh0 is None else dh0 + (i_n.to(gl.int64) * H + i_h) * K * V
    p_dots, p_workspace, p_states = None, None, None
    if dots is not None:
        p_dots = dots + (group_slot(i_o, token, T, L, C, PACKED, SPLIT) * H + i_h) * scaled_size(BK)
        p_workspace = workspace + gl.program_id(0).to(gl.int64) * (C * BK)
        p_states = states + (group_slot(i_o, token, T, L, GROUP * C, PACKED, SPLIT) * H + i_h) * (BK * BV)
    ring = pipeline(STAGES, (1, 1, 1, 1), 1)
    halves = pipeline(1, (2,), 2)
    tree = pipeline(1, (1,), 2)
    fence_async_shared()
    program = Keys(walk, ring, queries, keys, values, d_out, d_keys, d_values, gates, factors_s, tree, state_s, halves,
                   before_s, kinds_s, scale, p_dht, p_dh0, last, p_dots, p_workspace, p_states, GROUP)
    gl.warp_specialize(
        [(Keys.multiply, (program, 0)), (Keys.multiply, (program, 1)), (Keys.work_in_gates, (program,))],
        [4, 8],
        [176, 80],
    )
