"""N of each chunk, which ``inverse.py`` explains, of all chunks at once.

A program has some chunks of one head of one sequence. A warpgroup inverts, a warp makes the sums of gates, one copies
keys. Chunks whose keys are alike are left to a loop of their own, after the others: their products take registers.
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

from keraunos.kernels.device.hopper import add, describe, first_slot, now, wide
from keraunos.kernels.gated_delta_rule.cuda.inverse import (
    ALIKE,
    BLOCK,
    blocks_inverted,
    by_substitution,
    joined_once,
    own_block,
)
from keraunos.kernels.gated_delta_rule.cuda.parts import EPSILON, locate_group, read
from keraunos.kernels.gluon import copy_in, copy_out, lengths, reinterpret, thread_barrier

# From this sum of squares of a row of A on, keys are as good as the same: then all that gradients sum over a chunk
# cancels, too.
SAME = gl.constexpr(24.0)
# Chunks of a program at most: a bit of an integer says of each whether it is left.
MOST = gl.constexpr(32)


@gluon.jit
def copy(k_s, barriers, k_desc, begin, end, C: gl.constexpr, STAGES: gl.constexpr):
    """A partition of one warp: copies keys into a ring of stages."""
    full, empty, _ = barriers
    for i in range(end - begin):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes)
        copy_in(k_desc, [(begin + i) * C, 0], full.index(slot), k_s.index(slot))


@gluon.jit
def gates(vectors, barriers, inputs, size, begin, end, C: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr,
          GATED: gl.constexpr, BETA: gl.constexpr):
    """A partition of one warp: the sums of gates, base 2, and beta, as soon as a stage is free."""
    sums_s, strength_s, _, _ = vectors
    full, empty, _ = barriers
    for i in range(end - begin):
        slot = i % STAGES
        x, strength = read(inputs, begin + i, size, C, GATED, BETA)
        x = gl.associative_scan(x, 0, add, reverse=REVERSE)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        sums_s.index(slot).store(x)
        strength_s.index(slot).store(strength)
        thread_barrier()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def lower_of(k, sums_s, lengths_s, rows, columns, W: gl.constexpr, REVERSE: gl.constexpr, NORM: gl.constexpr):
    """Products of keys; ``exp2`` of the gates between tokens; one over the lengths of keys.

    The second is 0 but where the token of a row comes later; in reverse the tiles are A's transposed, and N's.
    """
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, W)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, W)
    C: gl.constexpr = k.shape[0]
    a = warpgroup_mma(k, k.permute((1, 0)), gl.zeros([C, C], gl.float32, W), use_acc=False, is_async=True)
    apart = sums_s.load(OF_ROWS)[:, None] - sums_s.load(OF_COLUMNS)[None, :]
    apart = -apart if REVERSE else apart
    reach = gl.exp2(gl.where(columns[None, :] < rows[:, None], apart, -float("inf")))
    a = warpgroup_mma_wait(0, deps=[a])
    of_keys = rows
    if NORM:
        of_keys = gl.rsqrt(gl.sum(gl.where(rows[:, None] == columns[None, :], a, 0.0), 1) + EPSILON)
        lengths_s.store(of_keys)
        a *= of_keys[:, None] * lengths_s.load(OF_COLUMNS)[None, :]
    return a, reach, of_keys


@gluon.jit
def upright(tile, REVERSE: gl.constexpr):
    """A tile of N, to which it is stored transposed in reverse."""
    return tile.permute((1, 0)) if REVERSE else tile


@gluon.jit
def invert(tiles, vectors, barriers, descriptors, inputs, known, size, begin, end, H: gl.constexpr, C: gl.constexpr,
           STAGES: gl.constexpr, REVERSE: gl.constexpr, GATED: gl.constexpr, BETA: gl.constexpr, NORM: gl.constexpr):
    """A partition of one warpgroup: N of each chunk, whether keys are alike, and with norms their lengths.

    Tiles of a stage's keys are free for others when the keys have been read; those of N have D, and what is made of it.
    """
    k_s, m_s, n_s, d_s = tiles
    sums_s, strengths_s, lengths_s, flags_s = vectors
    full, empty, again = barriers
    k_desc, n_desc = descriptors
    alike, norms = known
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, W)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, W)
    BLOCKS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    FLAGS: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    dtype: gl.constexpr = k_s.dtype
    columns = gl.arange(0, C, layout=OF_COLUMNS)
    # Of a stage.
    TILES: gl.constexpr = m_s.shape[0] // STAGES
    are_left = 0
    for i in range(end - begin):
        slot = i % STAGES
        at = begin + i
        # Made in each turn: masks that are held take registers.
        rows = now(gl.arange(0, C, layout=OF_ROWS))
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        strength_s = strengths_s.index(slot)
        a, reach, of_keys = lower_of(k_s.index(slot), sums_s.index(slot), lengths_s, rows, columns, W, REVERSE, NORM)
        if NORM:
            gl.store(norms + at * (H * C) + rows, of_keys)
        a = 0.0 - a * reach
        tma.store_wait(0)
        d_s.index(0).store(a.to(gl.float16))
        if REVERSE:
            strong = a * strength_s.load(OF_ROWS)[:, None]
            # Of the columns of all rows: each warp says the same.
            squares = gl.max(gl.sum(strong * strong, 0), 0) + gl.zeros([4], gl.float32, FLAGS)
        else:
            strong = a * strength_s.load(OF_COLUMNS)[None, :]
            # Of each warp's own rows.
            squares = gl.max(gl.sum(strong * strong, 1).reshape([4, C // 4]), 1)
        flags_s.store((squares > ALIKE).to(gl.int32))
        own = blocks_inverted(own_block(a, rows, BLOCKS), strength_s, BLOCKS)
        if gl.max(flags_s.load(FLAGS), 0) != 0:
            are_left |= 1 << i
        else:
            found = joined_once(own, a, strength_s, d_s.index(0), d_s.index(1), m_s.index(TILES * slot))
            upright(n_s.index(1), REVERSE).store(found.to(dtype))
            gl.store(alike + at * H, 0)
        fence_async_shared()
        thread_barrier()
        if (are_left >> i) & 1 == 0:
            copy_out(n_desc, [at * H * 2 * C, 0], n_s.index(1))
        mbarrier.arrive(empty.index(slot), count=1)
    done = 0
    for i in range(end - begin):
        if (are_left >> i) & 1 != 0:
            at = begin + i
            rows = now(gl.arange(0, C, layout=OF_ROWS))
            x, strength = read(inputs, at, size, C, GATED, BETA)
            tma.store_wait(0)
            sums_s.index(0).store(gl.associative_scan(x, 0, add, reverse=REVERSE))
            strengths_s.index(0).store(strength)
            mbarrier.expect(again, k_desc.block_type.nbytes)
            copy_in(k_desc, [at * C, 0], again, k_s.index(0))
            mbarrier.wait(again, done & 1)
            done += 1
            a, reach, _ = lower_of(k_s.index(0), sums_s.index(0), lengths_s, rows, columns, W, REVERSE, NORM)
            a *= reach
            is_same = (gl.max(gl.sum(a * a, 0 if REVERSE else 1), 0) > SAME).to(gl.int32)
            gl.store(alike + at * H, 1 + is_same)
            # The keys have been read, and their tile is free.
            thread_barrier()
            # Three products each: a number that is not known here keeps them a loop.
            found = by_substitution(a, strengths_s.index(0), rows[:, None] // BLOCK == columns[None, :] // BLOCK,
                                    d_s, m_s, gl.minimum(size, 3))
            found = gl.where(rows[:, None] > columns[None, :], found, 0.0)
            high = found.to(dtype)
            upright(n_s.index(0), REVERSE).store(high)
            upright(n_s.index(1), REVERSE).store((found - wide(high)).to(dtype))
            fence_async_shared()
            thread_barrier()
            copy_out(n_desc, [at * H * 2 * C, 0], n_s.index(0))
            copy_out(n_desc, [at * H * 2 * C + C, 0], n_s.index(1))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=lengths("kgb", "T", "N", "L"))
def prepare_kernel(
    k, g, beta, cu_seqlens,
    stride_kb, stride_kt, stride_kh, stride_gb, stride_gt, stride_gh, stride_bb, stride_bt, stride_bh, T, N, L,
    near, alike, norms,
    H: gl.constexpr, RK: gl.constexpr, RG: gl.constexpr, RB: gl.constexpr, K: gl.constexpr, BK: gl.constexpr,
    C: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr, MAXNREG: gl.constexpr,
):
    """``near`` ``[slots, H, 2, C, C]``: N of a chunk and head, and what its dtype leaves of that.

    ``alike`` ``[slots, H]``: 0, or the rest counts, else it is not stored; 2: for gradients, too. ``norms``
    ``[slots, H, C]``: one over the length of each key, where keys are to be divided by it. A program has L tokens, at
    most MOST chunks. g None: no gates; beta None: ones. MAXNREG is read by the launcher: the registers that a thread
    may have.
    """
    i_h = gl.program_id(0) % H
    i_n, i_b, token, size, i_g = locate_group(cu_seqlens, gl.program_id(0) // H, T, N, L, PACKED)
    begin = i_g * (L // C)
    end = gl.minimum(begin + L // C, gl.cdiv(size, C))
    if end <= begin:
        return
    dtype: gl.constexpr = k.dtype.element_ty
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    GATED: gl.constexpr = g is not None
    BETA: gl.constexpr = beta is not None
    NORM: gl.constexpr = norms is not None
    first = first_slot(i_n, token, size, T, C, PACKED) * H + i_h
    k_desc = describe(k, i_b, token, i_h // RK, size, stride_kb, stride_kt, stride_kh, C, K, BK, KEYS)
    n_desc = tma.make_tensor_descriptor(near + first * (2 * C * C), [((gl.cdiv(size, C) - 1) * H + 1) * (2 * C), C],
                                        [C, 1], [C, C], SQUARE)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, C, BK], KEYS)
    m_s = reinterpret(k_s, gl.float16, [2 * STAGES, C, C], HALF) if BK == 2 * C else gl.allocate_shared_memory(
        gl.float16, [STAGES, C, C], HALF)
    n_s = gl.allocate_shared_memory(dtype, [2, C, C], SQUARE)
    d_s = reinterpret(n_s, gl.float16, [2, C, C], HALF)
    sums_s = gl.allocate_shared_memory(gl.float32, [STAGES, C], VECTOR)
    strength_s = gl.allocate_shared_memory(gl.float32, [STAGES, C], VECTOR)
    lengths_s = gl.allocate_shared_memory(gl.float32, [C], VECTOR)
    flags_s = gl.allocate_shared_memory(gl.int32, [4], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    again = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(again, count=1)
    fence_async_shared()

    # Something else stands for an absent array, and nobody reads it.
    p_g = k
    p_beta = k
    p_norms = near
    if GATED:
        p_g = g + i_b.to(gl.int64) * stride_gb + token * stride_gt + (i_h // RG).to(gl.int64) * stride_gh
    if BETA:
        p_beta = beta + i_b.to(gl.int64) * stride_bb + token * stride_bt + (i_h // RB).to(gl.int64) * stride_bh
    if NORM:
        p_norms = norms + first * C
    tiles = (k_s, m_s, n_s, d_s)
    vectors = (sums_s, strength_s, lengths_s, flags_s)
    barriers = (full, empty, again)
    inputs = (p_g, stride_gt, p_beta, stride_bt)
    known = (alike + first, p_norms)
    gl.warp_specialize(
        [
            (invert, (tiles, vectors, barriers, (k_desc, n_desc), inputs, known, size, begin, end, H, C, STAGES,
                      REVERSE, GATED, BETA, NORM)),
            (gates, (vectors, barriers, inputs, size, begin, end, C, STAGES, REVERSE, GATED, BETA)),
            (copy, (k_s, barriers, k_desc, begin, end, C, STAGES)),
        ],
        [1, 1],
        [24, 24],
    )
