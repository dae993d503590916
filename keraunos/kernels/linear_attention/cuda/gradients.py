"""The walk that makes the gradients of keys and values in one pass, against the order of the recurrence."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from keraunos.kernels.device.hopper import LOG2E, load_state, locate, locate_walk, store_state, within
from keraunos.kernels.device.pipeline import Pipeline, pipeline
from keraunos.kernels.gluon import aggregate, copy_out, lengths, thread_barrier
from keraunos.kernels.linear_attention.cuda.walk import (
    CLOSED,
    Blocks,
    Gates,
    Walk,
    constant_pairs,
    constant_sums,
    gated_pairs,
    gates_of,
    group_slot,
    mild_pairs,
    natural_decay,
    settled,
    without_own,
)


@aggregate
class Gradients:
    """The arrays and barriers that the partitions of one program share; an absent one is None.

    The first partition makes dv, the second dk, each in blocks, or where it is stored. Each has the gradient of half of
    the state in registers, and writes its half of the copy ``state`` that both read; ``halves`` is that copy's pipeline
    of one stage. early: of each half, the output's gradient times what reaches it from the chunk's start.
    """

    walk: Walk
    ring: Pipeline
    q: Blocks
    k: Blocks
    v: Blocks
    do: Blocks
    early: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor
    halves: Pipeline
    gates: Gates | gl.constexpr
    decay: gl.tensor
    scale: gl.tensor
    dk: Blocks | gl.tensor
    dv: Blocks | gl.tensor
    dht: gl.tensor | gl.constexpr
    dh0: gl.tensor | gl.constexpr
    last: gl.tensor
    dots: gl.tensor | gl.constexpr
    states: tma.tensor_descriptor | gl.constexpr
    GROUP: gl.constexpr

    @gluon.jit
    def copy(self):
        """A partition of one warp: copies chunks into the ring of stages."""
        BYTES: gl.constexpr = 2 * self.q.desc.block_type.nbytes + 2 * self.v.desc.block_type.nbytes
        for i in range(self.walk.chunks()):
            slot = i % self.ring.STAGES
            row = self.walk.place(i) * self.walk.C
            self.ring.acquire(i)
            self.ring.expect(i, BYTES)
            full = self.ring.full(i)
            self.q.copy(row, 0, slot, full)
            self.k.copy(row, 0, slot, full)
            self.v.copy(row, 0, slot, full)
            self.do.copy(row, 0, slot, full)

    @gluon.jit
    def multiply(self, WG: gl.constexpr):
        """A partition of one warpgroup: the first makes dv, the second dk."""
        walk, ring, gates, halves = self.walk, self.ring, self.gates, self.halves
        out = self.dv if WG == 0 else self.dk
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        HALF: gl.constexpr = walk.BV // 2
        GATED: gl.constexpr = gates is not None
        SAVE: gl.constexpr = self.dots is not None
        DOTS: gl.constexpr = SAVE and WG == 1
        STORED: gl.constexpr = not isinstance(out, Blocks)
        # What this partition makes has so many dimensions, in a tile.
        D: gl.constexpr = walk.V if WG == 0 else walk.K
        BD: gl.constexpr = walk.BV if WG == 0 else BK
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        W2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, W2, 2)
        dtype: gl.constexpr = self.q.stages.dtype
        early_s = self.early.index(WG)
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))
        columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))
        rows2 = gl.arange(0, C, layout=gl.SliceLayout(1, W2))
        # Rows are keys here and columns queries: the pairs of the recurrence that runs the other way.
        if not GATED:
            pairs = constant_pairs(self.decay, rows, columns, not walk.REVERSE) * self.scale
        o_k = gl.arange(0, BK, layout=gl.SliceLayout(1, W))
        o_v = WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, W))
        o_state = (o_k * walk.V)[:, None] + o_v[None, :]
        state = gl.zeros([BK, HALF], gl.float32, W)
        if self.dht is not None:
            state = load_state(self.dht + o_state, o_k, o_v, walk.K, walk.V, BK, walk.BV)
        none = gl.zeros([C, C], gl.float32, W)
        nothing = gl.zeros([C, BD], gl.float32, W2)
        mine = self.state.slice(WG * HALF, HALF, 1)
        mine.store(state.to(dtype))
        fence_async_shared()
        thread_barrier()
        halves.commit(0)
        for i in range(walk.chunks()):
            slot = i % ring.STAGES
            at = walk.place(i)
            left = gl.minimum(walk.size - at * C, C)
            ring.wait(i)
            q = self.q.stages.index(slot)
            do = self.do.stages.index(slot)
            if WG == 0:
                own = self.k.stages.index(slot)
                other = q
                into = do
                factor_s = self.v.stages.index(slot)
            else:
                own = self.v.stages.index(slot)
                other = do
                into = q
                factor_s = self.k.stages.index(slot)
            state = settled(state)
            a = warpgroup_mma(own, other.permute((1, 0)), none, use_acc=False, is_async=True)
            if GATED:
                to_row = gates.vectors.index(3 * slot + 1).load(gl.SliceLayout(1, W))
                rest = gates.vectors.index(3 * slot + 2).load(gl.SliceLayout(1, W2))
                across = gates.decays.index(slot).load(gl.SliceLayout(1, W))
                strong = gates.is_strong(slot)
            else:
                # Where there is no choice, registers suffice.
                strong = True
                total = self.decay * left.to(gl.float32)
                to_row = gl.exp2(constant_sums(self.decay, left, rows, walk.REVERSE)) * self.scale
                rest = gl.exp2(total - constant_sums(self.decay, left, rows2, walk.REVERSE))
                across = gl.full([BK], 1.0, gl.float32, gl.SliceLayout(1, W)) * gl.exp2(total)
            half = do.slice(WG * HALF, HALF, 1).load(W).to(gl.float32) * to_row[:, None]
            early_s.store(half.to(dtype))
            fence_async_shared()
            halves.wait(i)
            if WG == 0:
                b_o = warpgroup_mma(own, self.state, nothing, use_acc=False, is_async=True)
            else:
                b_o = warpgroup_mma(own, self.state.permute((1, 0)), nothing, use_acc=False, is_async=True)
            state = state * across[:, None]
            thread_barrier()
            state = warpgroup_mma(q.permute((1, 0)), early_s, state, is_async=True)
            a, b_o = warpgroup_mma_wait(1, deps=[a, b_o])
            own_pairs = gl.zeros([C], gl.float32, gl.SliceLayout(1, W))
            if not GATED:
                a = a * pairs
            elif strong:
                G_rows = gates.vectors.index(3 * slot).load(gl.SliceLayout(1, W))
                G_columns = gates.vectors.index(3 * slot).load(gl.SliceLayout(0, W))
                a = gated_pairs(a * self.scale, -G_rows, -G_columns, rows, columns, not walk.REVERSE)
            else:
                of_rows = gates.vectors.index(3 * slot).load(gl.SliceLayout(1, W))
                of_columns = gates.vectors.index(3 * slot + 1).load(gl.SliceLayout(0, W))
                a = mild_pairs(a, of_rows, of_columns, rows, columns, not walk.REVERSE)
            if DOTS:  # noqa: SIM102
                if strong:
                    a, own_pairs = without_own(a, rows, columns)
            p = gl.convert_layout(a.to(dtype), LEFT)
            b_o = b_o * rest[:, None]
            if SAVE and WG == 0:
                place = walk.chunks() - 1 - i
                if place % self.GROUP == 0:
                    copy_out(self.states, [place // self.GROUP * walk.H * BK, 0], self.state)
                    tma.store_wait(0)
            thread_barrier()
            halves.release(i)
            b_o = warpgroup_mma(p, into, b_o, is_async=True)
            if not STORED:
                tma.store_wait(0)
            state = warpgroup_mma_wait(1, deps=[state])
            halves.acquire(i + 1)
            mine.store(state.to(dtype))
            fence_async_shared()
            thread_barrier()
            halves.commit(i + 1)
            b_o = warpgroup_mma_wait(0, deps=[b_o])
            if DOTS:
                dot = gl.sum(b_o * factor_s.load(W2).to(gl.float32), 1)
                gl.store(self.dots + (at * C + rows2).to(gl.int64) * walk.H, dot, mask=rows2 < left)
                if strong:
                    b_o += gl.convert_layout(own_pairs, gl.SliceLayout(1, W2))[:, None] * into.load(W2).to(gl.float32)
            if STORED:
                o_d = gl.arange(0, BD, layout=gl.SliceLayout(0, W2))
                o_o = ((at * C + rows2).to(gl.int64) * (walk.H * D))[:, None] + o_d[None, :]
                gl.store(out + o_o, b_o, mask=within((rows2 < left)[:, None], o_d[None, :], D, BD))
                thread_barrier()
                ring.release(i)
            else:
                out.stages.store(b_o.to(dtype))
                fence_async_shared()
                thread_barrier()
                ring.release(i)
                copy_out(out.desc, [at * C, 0], out.stages)
        if not STORED:
            tma.store_wait(0)
        if self.dh0 is not None:
            store_state(self.dh0 + o_state, state, self.last, o_k, o_v, walk.K, walk.V, BK, walk.BV)


@gluon.jit(do_not_specialize=lengths("qkvog", "stride_gamma_b", "T", "L"))
def gradients_kernel(
    q, k, v, do, g, gamma, dht, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh, stride_gb, stride_gt, stride_gh, stride_gamma_b, scale, T, L,
    dk, dv, dh0, dots, states,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RG: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, GROUP: gl.constexpr,
):
    """dk and dv of one head of one sequence, or of one segment of it; what is left is the initial state's gradient.

    dht: the gradients of the states at the walks' ends. For the gradients of gates, where those are wanted: dots, the
    products of k with dk ``[B, T, H]``, without each token's pair with itself; states, the gradient of the state after
    each GROUP-th chunk, from the recurrence's first on, in whole tiles. REVERSE: of the recurrence, which is walked the
    other way. K, V: the dimensions of q and k, and of v and do, in tiles of BK and BV.
    """
    i_h, i_o = locate_walk(cu_seqlens, H, PACKED)
    i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, not REVERSE)
    HALF: gl.constexpr = BV // 2
    dtype: gl.constexpr = k.dtype.element_ty
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    # Of all that has the dimensions of values, and can be cut into halves.
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], dtype)
    GATED: gl.constexpr = g is not None

    walk = Walk(i_b, token, size, H, C, K, V, BK, BV, REVERSE, not REVERSE)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], PART)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], PART)
    early_s = gl.allocate_shared_memory(dtype, [2, C, HALF], PART)
    state_s = gl.allocate_shared_memory(dtype, [BK, BV], PART)
    queries = Blocks(walk.blocks(q, i_h // RQ, stride_qb, stride_qt, stride_qh, K, BK, BLOCK), q_s)
    keys = Blocks(walk.blocks(k, i_h // RK, stride_kb, stride_kt, stride_kh, K, BK, BLOCK), k_s)
    values = Blocks(walk.blocks(v, i_h // RV, stride_vb, stride_vt, stride_vh, V, BV, PART), v_s)
    d_out = Blocks(walk.blocks(do, i_h, stride_ob, stride_ot, stride_oh, V, BV, PART), do_s)
    of_token = (i_b.to(gl.int64) * T + token) * H + i_h
    rows_of_batch = T.to(gl.int64) * H
    if dk.dtype.element_ty == dtype:
        dk_s = gl.allocate_shared_memory(dtype, [C, BK], BLOCK)
        d_keys = Blocks(walk.blocks(dk, i_h, rows_of_batch * K, H * K, K, K, BK, BLOCK), dk_s)
    else:
        d_keys = dk + of_token * K
    if dv.dtype.element_ty == dtype:
        dv_s = gl.allocate_shared_memory(dtype, [C, BV], PART)
        d_values = Blocks(walk.blocks(dv, i_h, rows_of_batch * V, H * V, V, V, BV, PART), dv_s)
    else:
        d_values = dv + of_token * V
    p_dht = None if dht is None else dht + (i_o.to(gl.int64) * H + i_h) * K * V
    p_dh0 = None if dh0 is None else dh0 + (i_n.to(gl.int64) * H + i_h) * K * V
    p_dots, states_desc = None, None
    if dots is not None:
        p_dots = dots + of_token
        first = group_slot(i_o, token, T, L, GROUP * C, PACKED, SPLIT)
        rows = (gl.maximum(gl.cdiv(size, GROUP * C) - 1, 0) * H + 1) * BK
        p_states = states + (first * H + i_h) * BK * BV
        states_desc = tma.make_tensor_descriptor(p_states, [rows, BV], [BV, 1], [BK, BV], PART)
    ring = pipeline(STAGES, (2 if GATED else 1,), 2)
    halves = pipeline(1, (2,), 2)
    fence_async_shared()

    natural = natural_decay(gamma, i_b, i_h, stride_gamma_b)
    decay = gl.maximum(natural, CLOSED) * LOG2E
    gates = None
    if GATED:
        gates = gates_of(walk, g, stride_gb, stride_gt, stride_gh, i_h // RG, natural, None, STAGES, True)
    program = Gradients(walk, ring, queries, keys, values, d_out, early_s, state_s, halves, gates, decay, scale, d_keys,
                        d_values, p_dht, p_dh0, last, p_dots, states_desc, GROUP)
    gl.warp_specialize(
        [(Gradients.multiply, (program, 0)), (Gradients.multiply, (program, 1)), (Gradients.copy, (program,))]
        + ([(Gates.put, (gates, walk, ring, scale))] if GATED else []),
        [4, 1] + [1] * GATED,
        [232, 40] + [40] * GATED,
    )
