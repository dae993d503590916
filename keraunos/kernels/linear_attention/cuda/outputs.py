"""The walk that makes outputs, or the queries' gradients: it reads everything once and keeps the state in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from keraunos.kernels.device.hopper import LOG2E, clear_padding, load_state, locate, locate_walk, store_state, within
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
    reach,
    settled,
    sums_before,
    without_own,
)


@aggregate
class GateGradients:
    """The arrays that make the gradients of gates, each the sum over all pairs of tokens that the gate is between.

    From a token to the next the sum changes by the pairs that end there, products of q with dq, and by those that
    begin there, of k with dk: the latter are in ``products``. The former, and sums to begin with, come in two parts to
    ``dots``, one chunk after the other.
    """

    ring: Pipeline
    dots: gl.shared_memory_descriptor
    products: gl.tensor
    dh: gl.tensor
    dg: gl.tensor | gl.constexpr
    dgamma: gl.tensor | gl.constexpr
    GROUP: gl.constexpr

    @gluon.jit
    def add_up(self, walk):
        """A partition of one warp: adds up all chunks."""
        C: gl.constexpr = walk.C
        LAYOUT: gl.constexpr = gl.BlockedLayout([C // 32], [32], [1], [0])
        t = gl.arange(0, C, layout=LAYOUT)
        everything = walk.size.to(gl.float32) * 0.0
        carry = everything
        for i in range(walk.chunks()):
            at = walk.place(i)
            inside = t < walk.size - at * C
            o_t = (at * C + t).to(gl.int64) * walk.H
            x = gl.load(self.products + o_t, mask=inside, other=0.0)
            self.ring.wait(i)
            x -= self.dots.index(0).load(LAYOUT) + self.dots.index(1).load(LAYOUT)
            if i % self.GROUP == 0:
                carry = gl.max(self.dots.index(2).load(LAYOUT), 0) + gl.max(self.dots.index(3).load(LAYOUT), 0)
            thread_barrier()
            self.ring.release(i)
            x = gl.where(inside, x, 0.0)
            sums = sums_before(x, 0, walk.REVERSE) + carry
            carry += gl.sum(x, 0)
            if self.dg is not None:
                gl.store(self.dg + o_t, sums.to(self.dg.dtype.element_ty), mask=inside)
            everything += gl.sum(gl.where(inside, sums, 0.0), 0)
        if self.dgamma is not None:
            gl.store(self.dgamma, everything)


@aggregate
class Outputs:
    """The arrays and barriers that the partitions of one program share; an absent one is None.

    The ring has q, k, v in halves of its dimensions, and f. Of each half: ``late``, v times what reaches the chunk's
    end; ``states``, a copy of the state; two blocks of ``o``, or where it is stored.
    """

    walk: Walk
    ring: Pipeline
    q: Blocks | gl.constexpr
    k: Blocks
    v: Blocks
    f: Blocks | gl.constexpr
    o: Blocks | gl.tensor | gl.constexpr
    late: gl.shared_memory_descriptor
    states: gl.shared_memory_descriptor | gl.constexpr
    gates: Gates | gl.constexpr
    gradients: GateGradients | gl.constexpr
    decay: gl.tensor
    scale: gl.tensor
    h0: gl.tensor | gl.constexpr
    ht: gl.tensor | gl.constexpr
    begins: gl.tensor | gl.constexpr
    last: gl.tensor
    stride_sk: gl.constexpr
    stride_sv: gl.constexpr
    STORED: gl.constexpr

    @gluon.jit
    def copy(self):
        """A partition of one warp: copies chunks into the ring of stages."""
        HALF: gl.constexpr = self.walk.BV // 2
        QUERIES: gl.constexpr = self.q is not None
        FACTORS: gl.constexpr = self.f is not None
        BYTES: gl.constexpr = ((1 + QUERIES) * self.k.desc.block_type.nbytes
                               + 2 * (1 + FACTORS) * self.v.desc.block_type.nbytes)
        for i in range(self.walk.chunks()):
            slot = i % self.ring.STAGES
            row = self.walk.place(i) * self.walk.C
            self.ring.acquire(i)
            self.ring.expect(i, BYTES)
            full = self.ring.full(i)
            if QUERIES:
                self.q.copy(row, 0, slot, full)
            self.k.copy(row, 0, slot, full)
            self.v.copy(row, 0, 2 * slot, full)
            self.v.copy(row, HALF, 2 * slot + 1, full)
            if FACTORS:
                self.f.copy(row, 0, slot, full)

    @gluon.jit
    def multiply(self, WG: gl.constexpr):
        """A partition of one warpgroup: half of the values' dimensions, for which it has the state in registers."""
        walk, ring, gates, gradients = self.walk, self.ring, self.gates, self.gradients
        C: gl.constexpr = walk.C
        BK: gl.constexpr = walk.BK
        HALF: gl.constexpr = walk.BV // 2
        GATED: gl.constexpr = gates is not None
        OUTPUT: gl.constexpr = self.q is not None
        DOTS: gl.constexpr = gradients is not None
        W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
        dtype: gl.constexpr = self.k.stages.dtype
        late_s = self.late.index(WG)
        rows = gl.arange(0, C, layout=gl.SliceLayout(1, W))
        columns = gl.arange(0, C, layout=gl.SliceLayout(0, W))
        if OUTPUT and not GATED:
            pairs = constant_pairs(self.decay, rows, columns, walk.REVERSE) * self.scale
        o_k = gl.arange(0, BK, layout=gl.SliceLayout(1, W))
        o_v = WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, W))
        across_k = (o_k * self.stride_sk)[:, None]
        across_v = (o_v * self.stride_sv)[None, :]
        o_state = across_v + across_k if self.stride_sk == 1 else across_k + across_v
        none = gl.zeros([C, C], gl.float32, W)
        nothing = gl.zeros([C, HALF], gl.float32, W)
        state = gl.zeros([BK, HALF], gl.float32, W)
        if self.h0 is not None:
            if self.begins is None:  # noqa: SIM114
                state = load_state(self.h0 + o_state, o_k, o_v, walk.K, walk.V, BK, walk.BV)
            elif self.begins:
                state = load_state(self.h0 + o_state, o_k, o_v, walk.K, walk.V, BK, walk.BV)
        if OUTPUT:
            state_s = self.states.index(WG)
            state_s.store(state.to(dtype))
            fence_async_shared()
            thread_barrier()
        for i in range(walk.chunks()):
            slot = i % ring.STAGES
            at = walk.place(i)
            left = gl.minimum(walk.size - at * C, C)
            ring.wait(i)
            k = self.k.stages.index(slot)
            v = self.v.stages.index(2 * slot + WG)
            if GATED:
                across = gates.decays.index(slot).load(gl.SliceLayout(1, W))
            else:
                # Where there is no choice, registers suffice.
                strong = True
                total = self.decay * left.to(gl.float32)
                across = gl.full([BK], 1.0, gl.float32, gl.SliceLayout(1, W)) * gl.exp2(total)
            if DOTS:
                # What the gates of this chunk have in common, where the sums of their gradients begin anew.
                begin = self.scale * 0.0
                if i % gradients.GROUP == 0:
                    p_dh = gradients.dh + (i // gradients.GROUP).to(gl.int64) * (walk.H * BK * walk.BV)
                    b_dh = gl.load(p_dh + ((o_v * BK)[None, :] + o_k[:, None])).to(gl.float32)
                    begin = gl.sum(gl.sum(state * b_dh, 1) * across, 0)
            state = settled(state)
            if OUTPUT:
                q = self.q.stages.index(slot)
                a = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
                b_o = warpgroup_mma(q, state_s, nothing, use_acc=False, is_async=True)
            if GATED:
                to_row = gates.vectors.index(3 * slot + 1).load(gl.SliceLayout(1, W))
                from_row = gates.vectors.index(3 * slot + 2).load(gl.SliceLayout(1, W))
                if walk.REVERSE != walk.BACKWARDS:
                    from_row = to_row
            else:
                G = constant_sums(self.decay, left, rows, walk.REVERSE)
                to_row = gl.exp2(G) * self.scale
                from_row = to_row if walk.REVERSE != walk.BACKWARDS else gl.exp2(total - G)
            late_s.store((v.load(W).to(gl.float32) * from_row[:, None]).to(dtype))
            fence_async_shared()
            state = state * across[:, None]
            thread_barrier()
            state = warpgroup_mma(k.permute((1, 0)), late_s, state, is_async=True)
            if not OUTPUT:
                state = warpgroup_mma_wait(0, deps=[state])
                thread_barrier()
                ring.release(i)
            else:
                if GATED:
                    of_columns = gates.vectors.index(3 * slot).load(gl.SliceLayout(0, W))
                    strong = gates.is_strong(slot)
                    if not DOTS:
                        G = gates.vectors.index(3 * slot).load(gl.SliceLayout(1, W))
                        pairs = gated_pairs(self.scale, G, of_columns, rows, columns, walk.REVERSE)
                a, b_o = warpgroup_mma_wait(1, deps=[a, b_o])
                b_o = b_o * to_row[:, None]
                own = gl.zeros([C], gl.float32, gl.SliceLayout(1, W))
                if not DOTS:
                    a = a * pairs
                elif not GATED:
                    a, own = without_own(a * pairs, rows, columns)
                elif strong:
                    G = gates.vectors.index(3 * slot).load(gl.SliceLayout(1, W))
                    a = gated_pairs(a * self.scale, G, of_columns, rows, columns, walk.REVERSE)
                    a, own = without_own(a, rows, columns)
                else:
                    a = mild_pairs(a, to_row, of_columns, rows, columns, walk.REVERSE)
                p = gl.convert_layout(a.to(dtype), LEFT)
                if DOTS:
                    factor_s = self.f.stages.index(slot).slice(WG * HALF, HALF, 1)
                    if i % gradients.GROUP == 0:
                        begin += gl.sum(gl.sum(b_o * factor_s.load(W).to(gl.float32), 1), 0)
                b_o = warpgroup_mma(p, v, b_o, is_async=True)
                if DOTS:
                    factor = factor_s.load(W)
                if self.STORED:
                    thread_barrier()
                else:
                    tma.store_wait(1)
                state = warpgroup_mma_wait(1, deps=[state])
                state_s.store(state.to(dtype))
                b_o = warpgroup_mma_wait(0, deps=[b_o])
                if DOTS:
                    gradients.ring.acquire(i)
                    gradients.dots.index(WG).store(gl.sum(b_o * factor.to(gl.float32), 1))
                    if i % gradients.GROUP == 0:
                        ones = gl.full([C], 1.0, gl.float32, gl.SliceLayout(1, W))
                        gradients.dots.index(2 + WG).store(ones * begin)
                    if strong:
                        b_o += own[:, None] * v.load(W).to(gl.float32)
                if self.STORED:
                    o_o = ((at * C + rows).to(gl.int64) * (walk.H * walk.V))[:, None] + o_v[None, :]
                    gl.store(self.o + o_o, b_o, mask=within((rows < left)[:, None], o_v[None, :], walk.V, walk.BV))
                    fence_async_shared()
                    thread_barrier()
                    ring.release(i)
                else:
                    out = self.o.stages.index(2 * WG + i % 2)
                    out.store(b_o.to(dtype))
                    fence_async_shared()
                    thread_barrier()
                    ring.release(i)
                    copy_out(self.o.desc, [at * C, WG * HALF], out)
                if DOTS:
                    gradients.ring.commit(i)
        if OUTPUT and not self.STORED:
            tma.store_wait(0)
        if self.ht is not None:
            store_state(self.ht + o_state, state, self.last, o_k, o_v, walk.K, walk.V, BK, walk.BV)


@gluon.jit(do_not_specialize=lengths("qkvfg", "stride_gamma_b", "T", "L", "P"))
def outputs_kernel(
    q, k, v, f, g, gamma, h0, products, dh, cu_seqlens, slots, has_initial, into,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_fb, stride_ft, stride_fh, stride_gb, stride_gt, stride_gh, stride_gamma_b, scale, T, L, P,
    o, ht, dg, dgamma, sums,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RV: gl.constexpr, RF: gl.constexpr, RG: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, INIT_WALK: gl.constexpr,
    stride_ss: gl.constexpr, stride_sh: gl.constexpr, stride_sk: gl.constexpr, stride_sv: gl.constexpr,
    STORED: gl.constexpr, GROUP: gl.constexpr, BACKWARDS: gl.constexpr,
):
    """``o_i = scale * sum_{j <= i} decay_ij (q_i . k_j) v_j`` for one head of one sequence, or of one segment of it.

    Two partitions of a warpgroup multiply, each for half of v's dimensions; one warp copies, one adds up gates.

    q: None where only states are wanted: those that pieces of L tokens, P of them to a segment, leave from none, of as
    many of their last tokens as a constant decay leaves anything of at their segment's end; with gates ``sums``
    ``[walks, H]`` are what these come to. BACKWARDS, where that is not REVERSE: the gradients of states, to which k
    and v are queries and the output's gradients.

    g: gates per token; gamma: constant decays. h0: initial states, of walks (INIT_WALK) or of sequences; ht: final
    states.

    slots: h0 and ht are a pool, in which they say where the states of packed sequences are; -1: the sequence is
    padding, whose outputs are zeros, as those after the last sequence are. has_initial: which sequences have a state.

    f: what the output is the gradient of, where that of gates is wanted too: dg ``[B, T, H]``, dgamma ``[walks, H]``.
    Then products ``[B, T, H]`` and dh, the gradients of states in whole tiles, are what ``gradients_kernel`` left.

    K, V: the dimensions of q and k, and of v, f and o, in tiles of BK and BV. stride_s: strides of states. STORED: o,
    which may overwrite ``into``, is stored, not copied. RQ, RK, RV, RF, RG: how many heads share each of an array's.
    """
    i_h, i_o = locate_walk(cu_seqlens, H, PACKED)
    OUTPUT: gl.constexpr = q is not None
    if not OUTPUT:
        # Nobody goes on from the segment that is walked last.
        pieces = gl.cdiv(T, L)
        wanted = pieces - P if BACKWARDS else (gl.cdiv(pieces, P) - 1) * P
        i_p = i_o % wanted + (P if BACKWARDS else 0)
        i_o = i_o // wanted * pieces + i_p
    i_n, i_b, token, size, last = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, BACKWARDS)
    POOL: gl.constexpr = slots is not None
    begins = None
    if POOL:
        slot = gl.load(slots + i_n).to(gl.int64)
        done = size <= 0
        if has_initial is not None:
            begins = gl.load(has_initial + i_n) != 0
            done = done & begins
        clear_padding(o, cu_seqlens, gl.num_programs(0) // H, slot, i_n, i_h, token, size, T, H, C, V, BV)
        if (slot < 0) | done:
            return
    natural = natural_decay(gamma, i_b, i_h, stride_gamma_b)
    decay = gl.maximum(natural, CLOSED) * LOG2E
    if not OUTPUT:
        last = size >= 0
        if g is None:
            seen = reach(decay, (i_p % P if BACKWARDS else P - 1 - i_p % P) * L)
            if seen < 0:
                return
            unseen = gl.maximum(size - seen, 0) // C * C
            size = size - unseen
            if not BACKWARDS:
                token += unseen
    HALF: gl.constexpr = BV // 2
    dtype: gl.constexpr = k.dtype.element_ty
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], dtype)
    GATED: gl.constexpr = g is not None
    DOTS: gl.constexpr = f is not None

    walk = Walk(i_b, token, size, H, C, K, V, BK, BV, REVERSE, BACKWARDS)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
    v_s = gl.allocate_shared_memory(dtype, [2 * STAGES, C, HALF], PART)
    late_s = gl.allocate_shared_memory(dtype, [2, C, HALF], PART)
    keys = Blocks(walk.blocks(k, i_h // RK, stride_kb, stride_kt, stride_kh, K, BK, BLOCK), k_s)
    values = Blocks(walk.blocks(v, i_h // RV, stride_vb, stride_vt, stride_vh, V, HALF, PART), v_s)
    queries, factors, out, state_s, gates, gradients, p_h0, p_ht = None, None, None, None, None, None, None, None
    of_token = (i_b.to(gl.int64) * T + token) * H + i_h
    if OUTPUT:
        q_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], BLOCK)
        queries = Blocks(walk.blocks(q, i_h // RQ, stride_qb, stride_qt, stride_qh, K, BK, BLOCK), q_s)
        state_s = gl.allocate_shared_memory(dtype, [2, BK, HALF], PART)
        if STORED:
            out = o + of_token * V
        else:
            o_s = gl.allocate_shared_memory(dtype, [4, C, HALF], PART)
            out = Blocks(walk.blocks(o, i_h, T.to(gl.int64) * (H * V), H * V, V, V, HALF, PART), o_s)
    if DOTS:
        f_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], PART)
        factors = Blocks(walk.blocks(f, i_h // RF, stride_fb, stride_ft, stride_fh, V, BV, PART), f_s)
        dots_s = gl.allocate_shared_memory(gl.float32, [4, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        p_dh = dh + (group_slot(i_o, token, T, L, GROUP * C, PACKED, SPLIT) * H + i_h) * BK * BV
        p_dg = None if dg is None else dg + of_token
        p_dgamma = None if dgamma is None else dgamma + i_o * H + i_h
        gradients = GateGradients(pipeline(1, (2,), 1), dots_s, products + of_token, p_dh, p_dg, p_dgamma, GROUP)
    if POOL:
        own = slot * stride_ss + i_h.to(gl.int64) * stride_sh
        p_h0 = h0 + own
        p_ht = ht + own
    else:
        if h0 is not None:
            p_h0 = h0 + ((i_o if INIT_WALK else i_n).to(gl.int64) * H + i_h) * K * V
        if ht is not None:
            p_ht = ht + ((i_n if OUTPUT else i_o).to(gl.int64) * H + i_h) * K * V
    ring = pipeline(STAGES, (2 if GATED else 1,), 2)
    fence_async_shared()
    if GATED:
        p_sums = None if sums is None else sums + i_o * H + i_h
        gates = gates_of(walk, g, stride_gb, stride_gt, stride_gh, i_h // RG, natural, p_sums, STAGES, DOTS)
    program = Outputs(walk, ring, queries, keys, values, factors, out, late_s, state_s, gates, gradients, decay, scale,
                      p_h0, p_ht, begins, last, stride_sk, stride_sv, STORED)
    gl.warp_specialize(
        [(Outputs.multiply, (program, 0)), (Outputs.multiply, (program, 1)), (Outputs.copy, (program,))]
        + ([(Gates.put, (gates, walk, ring, scale))] if GATED else [])
        + ([(GateGradients.add_up, (gradients, walk))] if DOTS else []),
        [4, 1] + [1] * (GATED + DOTS),
        [232, 40] + [40] * (GATED + DOTS),
    )
