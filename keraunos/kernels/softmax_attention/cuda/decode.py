"""The forward of few queries over many keys, as a cache has them: programs share out the keys of each row.

The queries of all heads that share keys are rows of a tile, one tile if they are few, and keys and values are read once
for it: row i is query i // R of head i % R of the R. A program walks over a part of the blocks of keys that the tile
sees; STAGES of them are on their way or in use. As in :mod:`.forward`::

    X_j = Q K_j^T         P_j = exp2(X_j - m_j)         O_j = O_(j-1) exp2(m_(j-1) - m_j) + P_j V_j

What bounds it is memory: there is one warpgroup, which copies, multiplies and waits in turn, and several programs on a
multiprocessor wait at different times. Where there are several parts, a second kernel adds them in their order: the
same call gives the same bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from keraunos.kernels.gluon import copy_in, lengths, thread_barrier
from keraunos.kernels.softmax_attention.cuda.forward import (
    bounds,
    describe,
    moved,
    narrowed,
    weigh,
    whole_logits,
    with_sinks,
)

# Rows of a tile: queries times the heads that share keys.
ROWS = gl.constexpr(64)
# Blocks of which a program compares the segments at once.
AT_ONCE = gl.constexpr(512)


@gluon.jit
def fetch(descriptors, ring, full, at, hi, stage, N: gl.constexpr):
    """A block of keys and of values, on their way to a stage, if the program has as many blocks."""
    k_desc, v_desc = descriptors
    k_s, v_s = ring
    i_b, i_g, block = at
    some = block < hi
    arrived = full.index(stage)
    mbarrier.expect(arrived, 2 * k_desc.block_type.nbytes, pred=some)
    copy_in(k_desc, [i_b, i_g, block * N, 0], arrived, k_s.index(stage), pred=some)
    copy_in(v_desc, [i_b, i_g, block * N, 0], arrived, v_s.index(stage), pred=some)


@gluon.jit
def clear_unseen(values, s0, reach, p_ids, S, LEFT: gl.constexpr, RIGHT: gl.constexpr, SEGMENTS: gl.constexpr,
                 LAYOUT: gl.constexpr):
    """Writes zeros over values, from key s0 on, that no query reaches: they may hold NaN, and 0 times NaN is NaN."""
    s = s0 + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    seen = s < S
    if LEFT:
        seen = seen & (s >= reach[0])
    if RIGHT:
        seen = seen & (s <= reach[1])
    if SEGMENTS:
        seen = seen & (gl.load(p_ids + s, mask=s < S, other=-1) >= 0)
    values.store(gl.where(seen[:, None], values.load(LAYOUT), 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit(do_not_specialize=lengths("qkv", "stride_queryb", "stride_keyb", "stride_sinksh", "left", "right", "B",
                                     "T", "S", "parts"))
def decode_kernel(
    q, k, v, sinks, query_ids, key_ids, spreads, offsets,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_queryb, stride_keyb, stride_sinksh, inner, unit, left, right, B, T, S, parts,
    o, lse,
    H: gl.constexpr, V: gl.constexpr, RN: gl.constexpr, SINKS: gl.constexpr, BD: gl.constexpr,
    K: gl.constexpr, R: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, CAP: gl.constexpr, NEGATIVE: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, OFFSET: gl.constexpr, SEGMENTS: gl.constexpr, PARTS: gl.constexpr,
):
    """``o`` and ``lse`` as ``forward_kernel`` gives them, or, with PARTS, those of parts of the keys.

    With PARTS, ``o [B, H, T, parts, V]`` is float32 and ``lse [B, H, T, parts]`` has -inf where a part shows nothing;
    sinks are left to ``join_kernel``. ``parts`` is 1 without. Other arguments are as for ``forward_kernel``.
    """
    dtype: gl.constexpr = k.dtype.element_ty
    G: gl.constexpr = H // R
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    WO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    LEFT_OF: gl.constexpr = gl.DotOperandLayout(0, WO, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, W)
    IN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BD, BD // 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, N, BD], dtype)
    k_desc = describe(k, B, S, G, stride_kb, stride_kt, stride_kh, K, N, BD, BLOCK)
    v_desc = describe(v, B, S, G, stride_vb, stride_vt, stride_vh, V, N, BD, BLOCK)
    q_s = gl.allocate_shared_memory(dtype, [ROWS, BD], gl.NVMMASharedLayout.get_default_for([ROWS, BD], dtype))
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, BD], BLOCK)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, BD], BLOCK)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    thread_barrier()

    # Programs that run at once read neighbouring heads of the same keys.
    tiles = gl.cdiv(T * R, ROWS)
    i_g = gl.program_id(0) % G
    part = gl.program_id(0) // G % parts
    i_b = gl.program_id(0) // (G * parts) // tiles
    i0 = gl.program_id(0) // (G * parts) % tiles * ROWS
    first, last = i0 // R, gl.minimum((i0 + ROWS - 1) // R, T - 1)
    far_left, far_right = moved(left, right, offsets, i_b, OFFSET)
    lo, hi, whole_lo, whole_hi = bounds(first, last, S, far_left, far_right, LEFT, RIGHT, N)
    if SEGMENTS:
        t = first + gl.arange(0, ROWS, layout=LINE)
        ids = gl.load(query_ids + i_b.to(gl.int64) * stride_queryb + t, mask=t <= last, other=-1)
        NS = gl.cdiv(S, N)
        p_spreads = spreads + i_b.to(gl.int64) * 3 * NS
        lo, hi, whole_lo, whole_hi = narrowed(lo, hi, whole_lo, whole_hi, ids, t <= last, p_spreads, p_spreads, NS,
                                              True, False, LINE, AT_ONCE)
    each = gl.cdiv(hi - lo, parts)
    lo = gl.minimum(lo + part * each, hi)
    hi = gl.minimum(lo + each, hi)
    ring = (k_s, v_s)
    descriptors = (k_desc, v_desc)
    for i in gl.static_range(STAGES):
        fetch(descriptors, ring, full, (i_b, i_g, lo + i), hi, i, N)

    i = i0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, IN))
    d = gl.arange(0, BD, layout=gl.SliceLayout(0, IN))
    rows = (i // R).to(gl.int64) * stride_qt + (i_g * R + i % R).to(gl.int64) * stride_qh
    p_q = q + i_b.to(gl.int64) * stride_qb + rows[:, None] + d[None, :]
    q_s.store(gl.load(p_q, mask=(i < T * R)[:, None] & (d < K)[None, :], other=0.0))
    fence_async_shared()
    thread_barrier()

    i = i0 + gl.arange(0, ROWS, layout=ROW)
    t = i // R
    i_h = i_g * R + i % R
    own = t
    p_ids = lse
    if SEGMENTS:
        own = gl.load(query_ids + i_b.to(gl.int64) * stride_queryb + t, mask=t < T, other=-1)
        p_ids = key_ids + i_b.to(gl.int64) * stride_keyb
    none = gl.zeros([ROWS, N], gl.float32, W)
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, BD], gl.float32, WO)
    for block in range(lo, hi):
        stage = (block - lo) % STAGES
        mbarrier.wait(full.index(stage), ((block - lo) // STAGES) & 1)
        x = warpgroup_mma(q_s, k_s.index(stage).reshape([N, BD]).permute((1, 0)), none, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        masked = (block < whole_lo) | (block >= whole_hi)
        p, top, total, decay = weigh(x, top, total, inner, unit, masked, (block, t, own, p_ids, far_left, far_right),
                                     S, N, CAP, NEGATIVE, LEFT, RIGHT, SEGMENTS, W)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, WO))[:, None]
        values = v_s.index(stage).reshape([N, BD])
        if masked:
            clear_unseen(values, block * N, (first - far_left, last + far_right), p_ids, S, LEFT, RIGHT, SEGMENTS, IN)
        p = gl.convert_layout(p.to(dtype), LEFT_OF)
        acc = warpgroup_mma(p, values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        fetch(descriptors, ring, full, (i_b, i_g, block + STAGES), hi, stage, N)

    top = whole_logits(top, unit, CAP)
    scale = gl.full([ROWS], 1.0, gl.float32, ROW)
    if SINKS and not PARTS:
        top, total, scale = with_sinks(top, total, sinks + (i_h // RN) * stride_sinksh, SINKS)
    some = total > 0.0
    total = gl.where(some, total, 1.0)
    inside = i < T * R
    row = (i_b * H + i_h).to(gl.int64) * T + t
    gl.store(lse + row * parts + part, gl.where(some, top + gl.log2(total), float("-inf" if PARTS else "inf")), inside)
    acc = acc * gl.convert_layout(scale / total, gl.SliceLayout(1, WO))[:, None]
    row = row * parts + part if PARTS else (i_b.to(gl.int64) * T + t) * H + i_h
    row = gl.convert_layout(row, gl.SliceLayout(1, WO))
    inside = gl.convert_layout(inside, gl.SliceLayout(1, WO))
    d = gl.arange(0, BD, layout=gl.SliceLayout(0, WO))
    gl.store(o + (row * V)[:, None] + d[None, :], acc.to(o.dtype.element_ty), inside[:, None] & (d < V)[None, :])


@gluon.jit(do_not_specialize=["stride_sinksh", "T", "parts"])
def join_kernel(part_o, part_lse, sinks, stride_sinksh, T, parts, o, lse, H: gl.constexpr, V: gl.constexpr,
                RN: gl.constexpr, SINKS: gl.constexpr, BD: gl.constexpr, AT_ONCE: gl.constexpr):
    """``o [B, T, H, V]`` and ``lse [B, H, T]`` from those of parts, a program for each query of each head.

    It has AT_ONCE parts in registers at once.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [max(128 // BD, 1), min(BD // 4, 32)], [4, 1], [1, 0])
    row = gl.program_id(0)
    i_h = row // T % H
    first = row.to(gl.int64) * parts
    j = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, BD, layout=gl.SliceLayout(0, L))
    top = gl.load(part_lse + first)
    for i in range(0, parts, AT_ONCE):
        logs = gl.load(part_lse + first + i + j, mask=i + j < parts, other=float("-inf"))
        top = gl.maximum(top, gl.max(logs, 0))
    zero = gl.where(top == float("-inf"), 0.0, top)
    sums = gl.zeros([AT_ONCE], gl.float32, gl.SliceLayout(1, L))
    acc = gl.zeros([AT_ONCE, BD], gl.float32, L)
    for i in range(0, parts, AT_ONCE):
        some = i + j < parts
        weight = gl.exp2(gl.load(part_lse + first + i + j, mask=some, other=float("-inf")) - zero)
        p_o = part_o + ((first + i + j) * V)[:, None] + d[None, :]
        acc += weight[:, None] * gl.load(p_o, mask=some[:, None] & (d < V)[None, :], other=0.0)
        sums += weight
    total = gl.sum(sums, 0)
    value = gl.sum(acc, 0)
    if SINKS:
        top, total, scale = with_sinks(top, total, sinks + (i_h // RN) * stride_sinksh, SINKS)
        value = value * scale
    some = total > 0.0
    total = gl.where(some, total, 1.0)
    gl.store(lse + row, gl.where(some, top + gl.log2(total), float("inf")))
    i_bt = (row // (T * H)).to(gl.int64) * T + row % T
    gl.store(o + (i_bt * H + i_h) * V + d, (value / total).to(o.dtype.element_ty), mask=d < V)
