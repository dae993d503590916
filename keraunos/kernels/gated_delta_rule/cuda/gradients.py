"""The gradients, group of chunks by group of chunks, from what the walks have left.

A group begins from the state before it, which the forward walk has left, and makes the states before its chunks again:
S, in registers, of which it has the errors E. With dV and L of ``adjoint.py``, and the other names of ``walk.py``:

    dP_ij = scale exp2(G_i - G_j) beta_j dO_i . E_j                     j up to i
    dA_ij = - exp2(G_i - G_j) beta_j dV_i . E_j                         j before i
    dQ = scale exp2(G) dO S^T + dP K
    dK = L - exp2(G) dV S^T + dP^T Q + (dA + dA^T) K

A gate's gradient is the sum over all pairs of tokens that it is between. From a token to the next it changes by those
that end there, ``q . dq`` and k with what the key reads, and by those that begin there, k with what is read of it: of a
token with itself both are the same. Sums begin anew with each group, from the product of the state with its gradient
there: so errors do not grow with the length.

Where queries and keys are to be divided by their lengths, these are factors: tiles of pairs have both tokens', rows of
dQ and dK have their own, which is divided out at last.

Where keys are alike, E, dP and the keys that change S have two parts.

A warpgroup has 64 of the keys' dimensions, of S, dQ and dK; two are one partition, which is compiled once. One more
makes dP and dA, a warp makes what depends on gates alone and dg, one copies, and where heads share queries and keys one
adds up their dQ and dK.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from keraunos.kernels.device.hopper import (
    add,
    anew,
    await_turn,
    describe,
    first_slot,
    load_state,
    now,
    tell,
    wide,
)
from keraunos.kernels.gated_delta_rule.cuda.parts import (
    EPSILON,
    locate_group,
    of_lanes,
    of_tokens,
    of_warps,
    read,
    read_known,
)
from keraunos.kernels.gluon import add_out, copy_in, copy_out, lengths, reinterpret, thread_barrier


@gluon.jit
def place(i, size, C: gl.constexpr, REVERSE: gl.constexpr):
    """Where the i-th chunk of a walk lies among those of its sequence."""
    return (gl.cdiv(size, C) - 1 - i) if REVERSE else i


@gluon.jit
def turn_of(i, begin, GROUP: gl.constexpr):
    """The phase in which the state comes that the i-th chunk of a walk begins from; the first of all is not copied."""
    return (i // GROUP + (begin == 0).to(gl.int32)) & 1


@gluon.jit
def copy(tiles, barriers, descriptors, size, begin, end, C: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
         REVERSE: gl.constexpr):
    """A partition of one warp: copies chunks into the ring of stages; queries and L when their tiles are free.

    There comes, first, the state that a group begins from.
    """
    k_s, e_s, o_s, dv_s, q_s, s_s, _, _ = tiles
    full, _, empty, q_full, q_empty, s_full, s_empty, _ = barriers
    q_desc, k_desc, o_desc, e_desc, dv_desc, l_desc, s_desc = descriptors
    BYTES: gl.constexpr = k_desc.block_type.nbytes + 3 * e_desc.block_type.nbytes
    for i in range(end - begin):
        at = place(begin + i, size, C, REVERSE) * C
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        arrived = full.index(slot)
        mbarrier.expect(arrived, BYTES)
        copy_in(dv_desc, [at, 0], arrived, dv_s.index(slot))
        copy_in(e_desc, [at, 0], arrived, e_s.index(slot))
        copy_in(o_desc, [at, 0], arrived, o_s.index(slot))
        copy_in(k_desc, [at, 0], arrived, k_s.index(slot))
        mbarrier.wait(q_empty, (i & 1) ^ 1)
        step = begin + i
        if (step > 0) & (step % GROUP == 0):
            mbarrier.expect(s_full, s_desc.block_type.nbytes)
            copy_in(s_desc, [step // GROUP, 0, 0], s_full, s_s)
            mbarrier.wait(s_empty, turn_of(i, begin, GROUP))
        mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
        copy_in(q_desc, [at, 0], q_full, q_s.index(0))
        copy_in(l_desc, [at, 0], q_full, q_s.index(1))


@gluon.jit
def power(x):
    """The largest power of two that is no larger than x."""
    return (x.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def put_gates(dg, held, error, i, size, H: gl.constexpr, C: gl.constexpr, REVERSE: gl.constexpr):
    """Stores dg of a group's chunks up to the i-th of a walk, each token without its share in the error at the end."""
    GROUP: gl.constexpr = held.shape[0]
    last = i % GROUP
    share = error / ((last + 1) * C)
    row = gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(1, held.type.layout)), 1)
    t = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, held.type.layout)), 0)
    at = place(i - last + row, size, C, REVERSE) * C
    before = row * C + ((C - 1 - t) if REVERSE else t)
    x = held - share * before.to(gl.float32)
    gl.store(dg + (at + t).to(gl.int64) * H, x.to(dg.dtype.element_ty), mask=(row <= last) & (t < size - at))


@gluon.jit
def gates(vectors, barriers, inputs, known, begins, dg, size, begin, end, scale, H: gl.constexpr, C: gl.constexpr,
          STAGES: gl.constexpr, GROUP: gl.constexpr, REVERSE: gl.constexpr, GATED: gl.constexpr, BETA: gl.constexpr,
          NORM: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr, NEED_G: gl.constexpr):
    """A partition of one warp: what depends on gates alone, as soon as a stage is free, and dg of its former chunk.

    dg is a sum over the tokens from a group's first one, and collects errors. Its value after the group's last token is
    known: the next group begins with it, and without a gradient of the final state it is 0 in the end. So dg is held
    until its group ends, in registers: beside so much shared memory there is little L1 for what is spilled.

    For each stage: ``scale exp2(G)``, ``-exp2(G)``, ``beta exp2(G_C - G)``, G and beta, with norms those of keys,
    too; ``exp2(G_C)``, and whether keys are alike.
    """
    factors_s, scalars_s, x_s = vectors
    full, _, empty, _, _, _, _, _ = barriers
    FACTORS: gl.constexpr = 10 if NORM else 5
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    HELD: gl.constexpr = gl.BlockedLayout([GROUP, 2], [1, 32], [1, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, GROUP, layout=gl.SliceLayout(1, HELD)), 1)
    held = gl.zeros([GROUP, C], gl.float32, HELD)
    left = scale * 0.0
    if NEED_G:
        left = gl.load(begins + (begin // GROUP).to(gl.int64) * H, mask=(begin > 0) | INIT, other=0.0)
    count = end - begin
    for i in range(count + STAGES):
        slot = i % STAGES
        at = place(begin + gl.minimum(i, count - 1), size, C, REVERSE)
        x, strength = read(inputs, at, size, C, GATED, BETA)
        of_keys, alike = read_known(known, at, H, C, NORM)
        G = gl.associative_scan(x, 0, add, reverse=REVERSE)
        total = gl.sum(x, 0)
        enter = gl.exp2(G)
        late = gl.exp2(gl.minimum(total - G, 0.0))
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        if NEED_G:  # noqa: SIM102
            if i >= STAGES:
                ended = begin + i - STAGES
                after = ended + 1
                each = of_tokens(x_s.index(slot))
                sums = gl.associative_scan(each, 0, add, reverse=REVERSE)
                of_chunk = gl.convert_layout(left - (sums - each), gl.SliceLayout(0, HELD), assert_trivial=True)
                held = gl.where(row == ended % GROUP, gl.expand_dims(of_chunk, 0), held)
                left -= gl.sum(each, 0)
                if (after % GROUP == 0) | (after == end):
                    more = after < gl.cdiv(size, C)
                    begun = gl.load(begins + (after // GROUP).to(gl.int64) * H, mask=more, other=0.0)
                    error = left - begun
                    if FINAL:
                        error = gl.where(more, error, 0.0)
                    put_gates(dg, held, error, ended, size, H, C, REVERSE)
                    left = begun
        if i < count:
            of = slot * FACTORS
            factors_s.index(of + 0).store(enter * scale)
            factors_s.index(of + 1).store(-enter)
            factors_s.index(of + 2).store(late * strength)
            factors_s.index(of + 3).store(G)
            factors_s.index(of + 4).store(strength)
            if NORM:
                factors_s.index(of + 5).store(of_keys)
            scalars_s.index(slot * 2).store(gl.full([1], 1.0, gl.float32, FLAG) * gl.exp2(total))
            scalars_s.index(slot * 2 + 1).store(gl.full([1], 1.0, gl.float32, FLAG) * (alike > 1).to(gl.float32))
            thread_barrier()
            mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def take_lengths(tiles, factors_s, of, slot, scale):
    """Adds the lengths of queries and keys to a chunk's factors; of float16, scales its tiles.

    Then there are also one over lengths of queries and of keys, and these in turn of queries, ``scale`` times, and of
    keys, as they are and beta times. Products of two of these would not fit into float16: tiles take the powers of two,
    without error.
    """
    k_s, _, _, _, q_s, _, _, _ = tiles
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    EACH: gl.constexpr = gl.SliceLayout(1, ROWS)
    PARTS: gl.constexpr = q_s.shape[2] // 64
    dtype: gl.constexpr = q_s.dtype
    of_keys = factors_s.index(of + 5).load(EACH)
    squares = of_keys * 0.0
    # No more at a time than there are registers for.
    for j in gl.static_range(PARTS):
        q = wide(q_s.index(0).slice(j * 64, 64, 1).load(ROWS))
        squares += gl.sum(q * q, 1)
    of_queries = gl.rsqrt(squares + EPSILON)
    if dtype == gl.float16:
        q_power = power(of_queries)
        k_power = power(of_keys)
        for j in gl.static_range(PARTS):
            q_j = q_s.index(0).slice(j * 64, 64, 1)
            k_j = k_s.index(slot).slice(j * 64, 64, 1)
            q_j.store((wide(q_j.load(ROWS)) * q_power[:, None]).to(dtype))
            k_j.store((wide(k_j.load(ROWS)) * k_power[:, None]).to(dtype))
        of_queries = of_queries / q_power
        of_keys = of_keys / k_power
    enter = factors_s.index(of + 0).load(EACH)
    leaves = factors_s.index(of + 1).load(EACH)
    late = factors_s.index(of + 2).load(EACH)
    strength = factors_s.index(of + 4).load(EACH)
    factors_s.index(of + 0).store(enter * of_queries)
    factors_s.index(of + 1).store(leaves * of_keys)
    factors_s.index(of + 2).store(late * of_keys)
    factors_s.index(of + 5).store(of_keys)
    factors_s.index(of + 6).store(1 / of_queries)
    factors_s.index(of + 7).store(1 / of_keys)
    factors_s.index(of + 8).store(of_queries * scale)
    factors_s.index(of + 9).store(of_keys * strength)


@gluon.jit
def reach(factors_s, of, OF_KEYS: gl.constexpr, SELF: gl.constexpr, C: gl.constexpr, W: gl.constexpr,
          REVERSE: gl.constexpr):
    """``exp2(G_i - G_j) beta_j`` of tokens j up to i, or before i if SELF is 1; with norms over the length of key j."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, W)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, W)
    rows = now(gl.arange(0, C, layout=OF_ROWS))[:, None]
    columns = gl.arange(0, C, layout=OF_COLUMNS)[None, :]
    seen = (columns >= rows + SELF) if REVERSE else (columns <= rows - SELF)
    apart = factors_s.index(of + 3).load(OF_ROWS)[:, None] - factors_s.index(of + 3).load(OF_COLUMNS)[None, :]
    return gl.exp2(gl.where(seen, apart, -float("inf"))) * factors_s.index(of + OF_KEYS).load(OF_COLUMNS)[None, :]


@gluon.jit
def pair(tiles, vectors, barriers, r_desc, size, begin, end, scale, C: gl.constexpr, STAGES: gl.constexpr,
         REVERSE: gl.constexpr, NORM: gl.constexpr):
    """A partition of one warpgroup: dP and dA of each chunk."""
    _, e_s, o_s, dv_s, _, _, p_s, a_s = tiles
    factors_s, scalars_s, _ = vectors
    full, ready, empty, q_full, q_empty, _, _, rest_full = barriers
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, W)
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    FACTORS: gl.constexpr = 10 if NORM else 5
    OF_KEYS: gl.constexpr = 9 if NORM else 4
    dtype: gl.constexpr = e_s.dtype
    none = gl.zeros([C, C], gl.float32, W)
    squares: gl.constexpr = STAGES * e_s.shape[2] // C
    rests = begin * 0
    for i in range(end - begin):
        at = place(begin + i, size, C, REVERSE)
        slot = i % STAGES
        of = slot * FACTORS
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        if NORM:
            mbarrier.wait(q_full, i & 1)
            take_lengths(tiles, factors_s, of, slot, scale)
        # A product in two branches might read anywhere: the rest of E is one more turn.
        parts = 1 + (gl.max(scalars_s.index(slot * 2 + 1).load(FLAG), 0) != 0).to(gl.int32)
        a = none
        for part in range(parts):
            if part > 0:
                # It comes where dA will be.
                mbarrier.wait(q_empty, (i & 1) ^ 1)
                mbarrier.expect(rest_full.index(1), r_desc.block_type.nbytes)
                copy_in(r_desc, [at * C, 0], rest_full.index(1), e_s.index(STAGES))
                mbarrier.wait(rest_full.index(1), rests & 1)
                rests += 1
            e = e_s.index(slot + part * (STAGES - slot)).permute((1, 0))
            a = warpgroup_mma(dv_s.index(slot), e, a, use_acc=part > 0, is_async=True)
            a = warpgroup_mma_wait(0, deps=[a])
        of_key = -factors_s.index(of + 5).load(OF_ROWS)[:, None] if NORM else -1.0
        a *= reach(factors_s, of, OF_KEYS, 1, C, W, REVERSE) * of_key
        b_a = now(a.to(dtype))
        p = none
        for part in range(parts):
            e = e_s.index(slot + part * (STAGES - slot)).permute((1, 0))
            p = warpgroup_mma(o_s.index(slot), e, p, use_acc=part > 0, is_async=True)
            p = warpgroup_mma_wait(0, deps=[p])
        of_query = factors_s.index(of + 8).load(OF_ROWS)[:, None] if NORM else scale
        p *= reach(factors_s, of, OF_KEYS, 0, C, W, REVERSE) * of_query
        b_p = p.to(dtype)
        # Walkers wait for no more than the stores, once the tiles are free.
        mbarrier.wait(q_empty, (i & 1) ^ 1)
        if parts > 1:
            thread_barrier()
        a_s.index(squares).store(b_a)
        p_s.index(0).store(b_p)
        if parts > 1:
            a_s.index(squares + 1).store((p - wide(b_p)).to(dtype))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(ready.index(slot), count=1)
        mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def add_up(goals, turns, size, begin, end, number, H: gl.constexpr, C: gl.constexpr, REVERSE: gl.constexpr,
           SHARED: gl.constexpr):
    """A partition of one warp: adds a chunk's dq and dk to those of the heads before, of all that share q and k.

    turns: of each chunk, how many heads have been there, whose copies out have arrived in memory.
    """
    if SHARED:
        dq, dk, outs_s, done, free = goals
        for i in range(end - begin):
            at = place(begin + i, size, C, REVERSE)
            turn = turns + at.to(gl.int64) * H
            if number > 0:
                await_turn(turn, number)
            for x in gl.static_range(2):
                goal = dq if x == 0 else dk
                mbarrier.wait(done.index(x), i & 1)
                if number > 0:
                    add_out(goal, [at * C, 0], outs_s.index(x))
                else:
                    copy_out(goal, [at * C, 0], outs_s.index(x))
            tma.store_wait(0)
            mbarrier.arrive(free, count=1)
            tell(turn, number + 1, 0)


@gluon.jit
def multiply(tiles, vectors, barriers, goals, h0, r_desc, size, begin, end, H: gl.constexpr, C: gl.constexpr,
             K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
             GROUP: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, NORM: gl.constexpr,
             NEED_G: gl.constexpr, SHARED: gl.constexpr):
    """A partition of a warpgroup for each 64 of the keys' dimensions, for which it has the state."""
    k_s, e_s, o_s, dv_s, q_s, s_s, p_s, a_s = tiles
    factors_s, scalars_s, x_s = vectors
    full, ready, empty, q_full, q_empty, s_full, s_empty, rest_full = barriers
    WARPS: gl.constexpr = BK // 16
    dq, dk, outs_s, done, free = goals
    FACTORS: gl.constexpr = 10 if NORM else 5
    # A chunk's tokens are columns; so are the dimensions of values of a state.
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    WS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BV, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, WS, 2)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, W)
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    dtype: gl.constexpr = k_s.dtype
    squares: gl.constexpr = STAGES * BV // C
    none = gl.zeros([BK, C], gl.float32, W)
    state = gl.zeros([BK, BV], gl.float32, WS)
    rests = begin * 0
    for i in range(end - begin):
        at = place(begin + i, size, C, REVERSE)
        slot = i % STAGES
        phase = (i // STAGES) & 1
        of = slot * FACTORS
        zero = anew(i)
        dq_s = outs_s.index(zero)
        dk_s = outs_s.index(zero + 1)
        q = q_s.index(zero).permute((1, 0))
        given_k = q_s.index(zero + 1).permute((1, 0))
        p = p_s.index(zero)
        a = a_s.index(zero + squares)
        if (begin + i) % GROUP == 0:
            if begin + i > 0:
                mbarrier.wait(s_full, turn_of(i, begin, GROUP))
                state = wide(s_s.reshape((BV, BK)).permute((1, 0)).load(WS))
                thread_barrier()
                mbarrier.arrive(s_empty, count=1)
            elif INIT:
                o_k = zero + gl.arange(0, BK, layout=gl.SliceLayout(1, WS))
                o_v = zero + gl.arange(0, BV, layout=gl.SliceLayout(0, WS))
                state = load_state(h0 + o_k[:, None] * V + o_v[None, :], o_k, o_v, K, V, BK, BV)
        mbarrier.wait(full.index(slot), phase)
        k = k_s.index(slot).permute((1, 0))
        left = gl.convert_layout(state.to(dtype), LEFT)
        dq_t = warpgroup_mma(left, o_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        dk_t = warpgroup_mma(left, dv_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(ready.index(slot), phase)
        dq_t = warpgroup_mma_wait(1, deps=[dq_t])
        dq_t = dq_t * factors_s.index(of + 0).load(OF_TOKENS)[None, :]
        dk_t = warpgroup_mma_wait(0, deps=[dk_t])
        dk_t = dk_t * factors_s.index(of + 1).load(OF_TOKENS)[None, :]
        state = state * gl.max(scalars_s.index(slot * 2).load(FLAG), 0)
        if SHARED:
            mbarrier.wait(free, (i & 1) ^ 1)
        if gl.max(scalars_s.index(slot * 2 + 1).load(FLAG), 0) != 0:
            # The tiles of both results hold the rest of the errors, first.
            r_s = reinterpret(outs_s, dtype, [C, BV], r_desc.layout)
            if not SHARED:
                tma.store_wait(0)
            mbarrier.expect(rest_full.index(0), r_desc.block_type.nbytes)
            copy_in(r_desc, [at * C, 0], rest_full.index(0), r_s)
            dq_t = warpgroup_mma(k, a_s.index(zero + squares + 1).permute((1, 0)), dq_t)
            late = wide(k.load(W)) * factors_s.index(of + 2).load(OF_TOKENS)[None, :]
            low = gl.convert_layout((late - wide(late.to(dtype))).to(dtype), LEFT_S)
            state = warpgroup_mma(low, e_s.index(slot), state)
            mbarrier.wait(rest_full.index(0), rests & 1)
            rests += 1
            state = warpgroup_mma(gl.convert_layout(late.to(dtype), LEFT_S), r_s, state)
            if SHARED:
                thread_barrier()
        own_k = k.load(W)
        left_k = gl.convert_layout(own_k, LEFT)
        dq_t = warpgroup_mma(left_k, p.permute((1, 0)), dq_t, is_async=True)
        dk_t = warpgroup_mma(left_k, a.permute((1, 0)), dk_t, is_async=True)
        late = wide(now(own_k)) * factors_s.index(of + 2).load(OF_TOKENS)[None, :]
        high = gl.convert_layout(late.to(dtype), LEFT_S)
        state = warpgroup_mma(high, e_s.index(slot), state, is_async=True)
        # The state may be late: it is needed no sooner than for the next chunk.
        dq_t, dk_t = warpgroup_mma_wait(1, deps=[dq_t, dk_t])
        # What ends at a token counts, and what begins there is subtracted: twice what ends, minus all of it.
        x = of_lanes(dk_t * wide(k.load(W))) * 2.0
        mbarrier.wait(q_full, i & 1)
        if NORM:
            dk_t += wide(given_k.load(W)) * factors_s.index(of + 5).load(OF_TOKENS)[None, :]
        else:
            dk_t += wide(given_k.load(W))
        state = warpgroup_mma_wait(0, deps=[state])
        dk_t = warpgroup_mma(q, p, dk_t, is_async=True)
        dk_t = warpgroup_mma(k, a, dk_t, is_async=True)
        x += of_lanes(dq_t * wide(q.load(W)))
        if NORM:
            dq_t *= factors_s.index(of + 6).load(OF_TOKENS)[None, :]
        if not SHARED:
            tma.store_wait(1)
        dq_s.permute((1, 0)).store(dq_t.to(dtype))
        fence_async_shared()
        dk_t = warpgroup_mma_wait(0, deps=[dk_t])
        thread_barrier()
        # Copies out go before those into what they make free.
        if SHARED:
            mbarrier.arrive(done.index(0), count=1)
        else:
            copy_out(dq, [at * C, 0], dq_s)
        mbarrier.arrive(q_empty, count=1)
        if NEED_G:
            x -= of_lanes(dk_t * wide(k.load(W)))
            # Each warp has the sums over its own rows.
            x_s.index(slot).store(of_warps(x))
        if NORM:
            dk_t *= factors_s.index(of + 7).load(OF_TOKENS)[None, :]
        if not SHARED:
            tma.store_wait(1)
        dk_s.permute((1, 0)).store(dk_t.to(dtype))
        fence_async_shared()
        thread_barrier()
        if SHARED:
            mbarrier.arrive(done.index(1), count=1)
        else:
            copy_out(dk, [at * C, 0], dk_s)
        mbarrier.arrive(empty.index(slot), count=1)
    if not SHARED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=lengths("qkogb", "T", "N", "L"))
def gradients_kernel(
    q, k, g, beta, do, errors, rest, dv, dk_given, alike, norms, states, begins, h0, turns, cu_seqlens,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_ob, stride_ot, stride_oh,
    stride_gb, stride_gt, stride_gh, stride_bb, stride_bt, stride_bh, scale, T, N, L,
    dq, dk, dg, turned,
    H: gl.constexpr, RQ: gl.constexpr, RK: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr, R: gl.constexpr,
    FINAL: gl.constexpr,
):
    """``dq`` and ``dk`` ``[B, T, H / R, K]`` and ``dg`` ``[B, T, H]``.

    R heads that share queries and keys add up their dq and dk, always in their order: ``turns`` ``[slots, H]``, zeros
    in the beginning, and ``turned``, its memory, count them for each chunk. A head waits for those of programs before.

    A program has L tokens of one head of one sequence, which are whole groups of GROUP chunks, but for the end. dv,
    dk_given, begins: dV, L and sums of ``adjoint_kernel``; errors, rest, states: see ``walk_kernel``. alike, norms: see
    ``prepare_kernel``; with norms, dq and dk are those of queries and keys of length 1. h0: initial states.

    K, V: the dimensions of q and k, and of values, in tiles of BK and BV. RQ, RK, RG, RB: how many heads share each of
    an array's.
    """
    i_h = gl.program_id(0) % H
    i_s = gl.program_id(0) // H
    i_n, i_b, token, size, i_g = locate_group(cu_seqlens, i_s, T, N, L, PACKED)
    begin = i_g * (L // C)
    end = gl.minimum(begin + L // C, gl.cdiv(size, C))
    if end <= begin:
        return
    dtype: gl.constexpr = k.dtype.element_ty
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, BV, BK], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    INIT: gl.constexpr = h0 is not None
    GATED: gl.constexpr = g is not None
    BETA: gl.constexpr = beta is not None
    NORM: gl.constexpr = norms is not None
    NEED_G: gl.constexpr = dg is not None
    SHARED: gl.constexpr = turned is not None
    G: gl.constexpr = H // R

    first = first_slot(i_n, token, size, T, C, PACKED) * H + i_h
    stride_b = T.to(gl.int64) * H
    q_desc = describe(q, i_b, token, i_h // RQ, size, stride_qb, stride_qt, stride_qh, C, K, BK, KEYS)
    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, KEYS)
    o_desc = describe(do, i_b, token, i_h, size, stride_ob, stride_ot, stride_oh, C, V, BV, VALUES)
    e_desc = describe(errors, i_b, token, i_h, size, stride_b * V, H * V, V, C, V, BV, VALUES)
    dv_desc = describe(dv, i_b, token, i_h, size, stride_b * V, H * V, V, C, V, BV, VALUES)
    l_desc = describe(dk_given, i_b, token, i_h, size, stride_b * K, H * K, K, C, K, BK, KEYS)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], KEYS)
    e_s = gl.allocate_shared_memory(dtype, [STAGES + 2 * C // BV, C, BV], VALUES)
    o_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    dv_s = gl.allocate_shared_memory(dtype, [STAGES, C, BV], VALUES)
    # Queries and L, or a state.
    q_s = gl.allocate_shared_memory(dtype, [2, C, BK], KEYS)
    s_s = reinterpret(q_s, dtype, [1, BV, BK], STATE)
    # dA has the last two tiles of squares.
    a_s = reinterpret(e_s, dtype, [STAGES * BV // C + 2, C, C], SQUARE)
    p_s = gl.allocate_shared_memory(dtype, [1, C, C], SQUARE)
    factors_s = gl.allocate_shared_memory(gl.float32, [(10 if NORM else 5) * STAGES, C], VECTOR)
    scalars_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1], VECTOR)
    x_s = gl.allocate_shared_memory(gl.float32, [STAGES, BK // 16, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    s_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    s_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    rest_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(s_full, count=1)
    mbarrier.init(s_empty, count=1)
    mbarrier.init(rest_full.index(0), count=1)
    mbarrier.init(rest_full.index(1), count=1)
    done = full
    free = full
    if SHARED:
        done = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(done.index(0), count=1)
        mbarrier.init(done.index(1), count=1)
        mbarrier.init(free, count=1)
    fence_async_shared()

    # Something else stands for an absent array, and nobody reads it.
    p_h0 = errors
    p_g = errors
    p_beta = errors
    p_norms = errors
    p_dg = errors
    p_begins = errors
    if INIT:
        p_h0 = h0 + (i_n.to(gl.int64) * H + i_h) * K * V
    if GATED:
        p_g = g + i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
    if BETA:
        p_beta = beta + i_b.to(gl.int64) * stride_bb + token * stride_bt + (i_h // RB).to(gl.int64) * stride_bh
    if NORM:
        p_norms = norms + first * C
    first_group = first_slot(i_n, token, size, T, GROUP * C, PACKED) * H + i_h
    if NEED_G:
        p_dg = dg + (i_b.to(gl.int64) * T + token) * H + i_h
        p_begins = begins + first_group
    r_desc = describe(rest, i_b, token, i_h, size, stride_b * V, H * V, V, C, V, BV, VALUES)
    goal_q = describe(dq, i_b, token, i_h // R, size, T.to(gl.int64) * (G * K), G * K, K, C, K, BK, KEYS)
    goal_k = describe(dk, i_b, token, i_h // R, size, T.to(gl.int64) * (G * K), G * K, K, C, K, BK, KEYS)
    s_desc = tma.make_tensor_descriptor(states + first_group * (V * K), [gl.cdiv(size, GROUP * C), V, K],
                                        [H * V * K, K, 1], [1, BV, BK], STATE)
    tiles = (k_s, e_s, o_s, dv_s, q_s, s_s, p_s, a_s)
    vectors = (factors_s, scalars_s, x_s)
    barriers = (full, ready, empty, q_full, q_empty, s_full, s_empty, rest_full)
    descriptors = (q_desc, k_desc, o_desc, e_desc, dv_desc, l_desc, s_desc)
    inputs = (p_g, stride_gt, p_beta, stride_bt)
    known = (alike + first, p_norms)
    outs_s = gl.allocate_shared_memory(dtype, [2, C, BK], KEYS)
    p_turns = alike
    if SHARED:
        p_turns = turned + (first - i_h % R)
    results = (goal_q, goal_k, outs_s, done, free)
    # Two warpgroups of walkers leave the registers of a multiprocessor for as much as the pair warpgroup needs, and for
    # the dg of a group.
    WIDE: gl.constexpr = BK == 128
    gl.warp_specialize(
        [
            (pair, (tiles, vectors, barriers, r_desc, size, begin, end, scale, C, STAGES, REVERSE, NORM)),
            (multiply, (tiles, vectors, barriers, results, p_h0, r_desc, size, begin, end, H, C, K, V, BK, BV, STAGES,
                        GROUP, REVERSE, INIT, NORM, NEED_G, SHARED)),
            (gates, (vectors, barriers, inputs, known, p_begins, p_dg, size, begin, end, scale, H, C, STAGES, GROUP,
                     REVERSE, GATED, BETA, NORM, INIT, FINAL, NEED_G)),
            (copy, (tiles, barriers, descriptors, size, begin, end, C, STAGES, GROUP, REVERSE)),
            (add_up, (results, p_turns, size, begin, end, i_h % R, H, C, REVERSE, SHARED)),
        ],
        [8 if WIDE else 4, 1, 1, 1],
        [192 if WIDE else 208, 40, 40, 40],
    )
