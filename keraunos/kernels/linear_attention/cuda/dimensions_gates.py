"""The gradients of gates per token and dimension of the key, from what the walks for q and for k and v leave.

``dg_t = dg_u - sum_{u <= i < t} (x_i - y_i)`` with ``x = q dq`` and ``y = k dk``, where u is the first token of a group
of chunks and ``dg_u`` the product of the state before it with its gradient, summed over the values' dimensions. x and y
are of the same rounded factors and pairs, so that of what both have, the pairs within a chunk, only float32's rounding
is left. A token's pair with itself, which no gate touches, is in both where a chunk is mild, and in none where it is
strong.

The walks leave x and y as their threads have them in registers, in 16 bits: see :func:`leave`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from keraunos.kernels.gluon import thread_barrier
from keraunos.kernels.linear_attention.cuda.walk import group_slot, locate, within


@gluon.constexpr_function
def of_threads(groups, size):
    """The layout in which each thread of a warpgroup has so many groups of so many values."""
    return gl.BlockedLayout([groups, 1, size], [1, 32, 1], [1, 4, 1], [2, 1, 0])


@gluon.jit
def by_thread(x, SIZE: gl.constexpr):
    """The accumulators ``[64, D]`` of a warpgroup as its threads have them: ``[D // 2 // SIZE, 128, SIZE]``."""
    D: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, D // 8, 4, 2]).permute([3, 1, 5, 0, 2, 4]).reshape([D // 2 // SIZE, SIZE, 128])
    return gl.convert_layout(x.permute([0, 2, 1]), of_threads(D // 2 // SIZE, SIZE), assert_trivial=True)


@gluon.jit
def from_threads(x, LAYOUT: gl.constexpr):
    """What :func:`by_thread` was given, in its layout."""
    D: gl.constexpr = x.shape[0] * x.shape[2] * 2
    x = x.permute([0, 2, 1]).reshape([D // 8, 2, 2, 4, 8, 4]).permute([3, 1, 4, 0, 5, 2]).reshape([64, D])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def places(GROUPS: gl.constexpr, SIZE: gl.constexpr):
    """Where in memory the values of :func:`by_thread` are: threads read and write groups of them at a time."""
    L: gl.constexpr = of_threads(GROUPS, SIZE)
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    thread = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    one = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return (group * 128 + thread) * SIZE + one


@gluon.constexpr_function
def room_of(HALF):
    """How many values of 16 bits :func:`leave` stores of ``[64, HALF]``."""
    return 64 * HALF + 128


@gluon.jit
def leave(x, p):
    """Stores float32 values ``[64, D]`` in 16 bits, with an exponent for each thread."""
    D: gl.constexpr = x.shape[1]
    x = by_thread(x, 8)
    # The largest one comes to between 2 ** 14 and 2 ** 15.
    most = gl.max(gl.max(gl.abs(x), 2), 0)
    exponent = gl.maximum(most.to(gl.int32, bitcast=True) >> 23, 15)
    factor = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    thread = gl.arange(0, 128, layout=most.type.layout)
    gl.store(p + places(D // 16, 8), (x * factor[None, :, None]).to(gl.float16))
    gl.store(p + 64 * D + thread, exponent.to(gl.int16).to(gl.float16, bitcast=True))


@gluon.jit
def leave_halves(x, p):
    """Stores ``[64, D]`` as :func:`leave` does, half of the dimensions after the other."""
    HALF: gl.constexpr = x.shape[1] // 2
    halves = x.reshape([64, 2, HALF]).permute([0, 2, 1]).split()
    for i in gl.static_range(2):
        leave(halves[i], p + i * room_of(HALF))


@gluon.jit
def load_left(p, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """One half of the values that :func:`leave` has stored."""
    x = gl.load(p + places(HALF // 16, 8)).to(gl.float32)
    thread = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))
    exponent = gl.load(p + 64 * HALF + thread).to(gl.int16, bitcast=True).to(gl.int32)
    x *= ((exponent - 14) << 23).to(gl.float32, bitcast=True)[None, :, None]
    return from_threads(x, LAYOUT)


@gluon.jit
def add_up(x, p, FIRST: gl.constexpr):
    """Adds ``[64, D]`` to what this thread has in memory, where registers have no room. FIRST: to nothing."""
    D: gl.constexpr = x.shape[1]
    p += places(D // 8, 4)
    x = by_thread(x, 4)
    if not FIRST:
        x += gl.load(p)
    gl.store(p, x)


@gluon.jit
def added_up(p, D: gl.constexpr, LAYOUT: gl.constexpr):
    """What :func:`add_up` has added."""
    return from_threads(gl.load(p + places(D // 8, 4)), LAYOUT)


@gluon.jit
def walk_of(cu_seqlens, slot, N, STEPS, tokens):
    """The sequence of a batch of N packed ones that has a slot of groups of so many tokens: see ``group_slot``."""
    first = slot * 0
    after = first + N
    for _ in range(STEPS):
        middle = (first + after) // 2
        before = (gl.load(cu_seqlens + middle).to(gl.int64) // tokens).to(gl.int32) + middle <= slot
        first = gl.where(before, middle, first)
        after = gl.where(before, after, middle)
    return first


@gluon.jit(do_not_specialize=["T", "L", "N", "STEPS"])
def gates_kernel(
    x, y, bases, cu_seqlens, T, L, N, STEPS, dg, dgamma,
    H: gl.constexpr, K: gl.constexpr, BK: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr, REVERSE: gl.constexpr,
    PACKED: gl.constexpr, SPLIT: gl.constexpr,
):
    """dg ``[B, T, H, K]`` of a group of chunks of one head and half of its dimensions, and its sum.

    x, y ``[chunks, H, 2, room_of(BK // 2)]``; bases ``[groups, H, BK]``: dg of the first tokens of groups;
    dgamma ``[groups, 2, H]``; STEPS: bits of N, the number of packed sequences.
    """
    HALF: gl.constexpr = BK // 2
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, W)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    ONES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    half = gl.program_id(0) % 2
    i_h = gl.program_id(0) // 2 % H
    slot = gl.program_id(0) // (2 * H)
    i_o = walk_of(cu_seqlens, slot, N, STEPS, GROUP * C) if PACKED else slot // gl.cdiv(L if SPLIT else T, GROUP * C)
    _, i_b, token, size, _ = locate(cu_seqlens, i_o, T, L, PACKED, SPLIT, REVERSE)
    group = slot - group_slot(i_o, token, T, L, GROUP * C, PACKED, SPLIT).to(gl.int32)
    count = gl.cdiv(size, C)
    first = group * GROUP
    last = gl.minimum(first + GROUP, count)
    # Sums the values of the tokens before each of a chunk.
    t = gl.arange(0, C, layout=gl.SliceLayout(1, ONES))[:, None]
    other = gl.arange(0, C, layout=gl.SliceLayout(0, ONES))[None, :]
    ones_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16))
    ones_s.store(gl.where((other > t) if REVERSE else (other < t), 1.0, 0.0).to(gl.bfloat16))
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], gl.bfloat16)
    parts_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, HALF], PART)

    rows = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))
    o_k = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, ROWS))
    ROOM: gl.constexpr = room_of(HALF)
    chunks = ((group_slot(i_o, token, T, L, C, PACKED, SPLIT) * H + i_h) * 2 + half) * ROOM
    p_dg = x
    if dg is not None:
        p_dg = dg + ((i_b.to(gl.int64) * T + token) * H + i_h) * K
    base = gl.load(bases + (slot.to(gl.int64) * H + i_h) * BK + half * HALF + gl.arange(0, HALF, layout=COLUMNS))
    everything = slot.to(gl.float32) * 0.0
    for i in range(first, last):
        at = (count - 1 - i) if REVERSE else i
        o = chunks + at.to(gl.int64) * (2 * H * ROOM)  # type: ignore[union-attr]
        z = load_left(x + o, HALF, W) - load_left(y + o, HALF, W)
        part = z.to(gl.bfloat16)
        thread_barrier()
        parts_s.index(0).store(part)
        parts_s.index(1).store((z - part.to(gl.float32)).to(gl.bfloat16))
        fence_async_shared()
        thread_barrier()
        sums = gl.zeros([C, HALF], gl.float32, W)
        sums = warpgroup_mma(ones_s, parts_s.index(0), sums, is_async=True)
        sums = warpgroup_mma(ones_s, parts_s.index(1), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        dx = gl.convert_layout(base[None, :] - sums, ROWS)
        # That of the next chunk's first token.
        base -= gl.sum(z, 0)
        inside = within((rows < size - at * C)[:, None], o_k[None, :], K, BK)
        if dg is not None:
            o_o = ((at * C + rows).to(gl.int64) * (H * K))[:, None] + o_k[None, :]
            gl.store(p_dg + o_o, dx.to(dg.dtype.element_ty), mask=inside)
        if dgamma is not None:
            everything += gl.sum(gl.sum(gl.where(inside, dx, 0.0), 0), 0)
    if dgamma is not None:
        gl.store(dgamma + (slot.to(gl.int64) * 2 + half) * H + i_h, everything)
