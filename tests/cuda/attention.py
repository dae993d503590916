"""A small kernel with everything that the project's kernels for Hopper have, and faults that can be planted in it.

Lightning attention's forward: ``o_t = q_t S_t``, ``S_t = decay S_(t-1) + k_t v_t^T``. One partition copies blocks of 64
tokens into a ring of stages; two multiply, each for half of V, and copy their results out.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from keraunos.kernels.gluon import copy_in, copy_out, thread_barrier


@gluon.jit
def decays(log_decay, n):
    return gl.exp2(log_decay * n.to(gl.float32))


@gluon.jit
def copy(q_s, k_s, v_s, full, empty, q_desc, k_desc, v_desc, row, col, blocks, C: gl.constexpr, N: gl.constexpr,
         STAGES: gl.constexpr, FAULT: gl.constexpr):
    for i in range(blocks):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        if FAULT == "parity of empty":
            mbarrier.wait(empty.index(stage), phase)
        elif FAULT != "no wait for empty":
            mbarrier.wait(empty.index(stage), phase ^ 1)
        arrived = full.index(stage)
        nbytes: gl.constexpr = q_desc.block_type.nbytes + k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes
        if FAULT == "too many bytes":
            mbarrier.expect(arrived, nbytes + 2)
        elif FAULT == "too few bytes":
            mbarrier.expect(arrived, nbytes - v_desc.block_type.nbytes)
        else:
            mbarrier.expect(arrived, nbytes)
        copy_in(q_desc, [row + i * C, col], arrived, q_s.index(stage))
        copy_in(k_desc, [row + i * C, col], arrived, k_s.index(stage))
        copy_in(v_desc, [row + i * C, 2 * col], arrived, v_s.index(2 * stage))
        copy_in(v_desc, [row + i * C, 2 * col + N], arrived, v_s.index(2 * stage + 1))


@gluon.jit
def multiply(q_s, k_s, v_s, late_s, state_s, o_s, full, empty, o_desc, log_decay, row, col, blocks, HALF: gl.constexpr,
             C: gl.constexpr, K: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, FAULT: gl.constexpr):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    row_of = gl.arange(0, C, layout=gl.SliceLayout(1, MMA))
    apart = row_of[:, None] - gl.arange(0, C, layout=gl.SliceLayout(0, MMA))[None, :]
    mask = gl.where(apart >= 0, decays(log_decay, apart), 0.0)
    since_start = decays(log_decay, row_of + 1)
    to_end = decays(log_decay, C - 1 - row_of)
    state = gl.zeros([K, N], gl.float32, MMA)
    nothing = gl.zeros([C, N], gl.float32, MMA)
    for i in range(blocks):
        stage = i % STAGES
        state_s.store(state.to(gl.bfloat16))
        if FAULT == "parity of full":
            mbarrier.wait(full.index(stage), ((i // STAGES) & 1) ^ 1)
        elif FAULT != "no wait for full":
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        q = q_s.index(stage)
        k = k_s.index(stage)
        v = v_s.index(2 * stage + HALF)
        scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        late_s.store((v.load(MMA).to(gl.float32) * to_end[:, None]).to(gl.bfloat16))
        if FAULT != "no fence before products":
            fence_async_shared()
        if FAULT != "no thread barrier before products":
            thread_barrier()
        o = warpgroup_mma(q, state_s, nothing, use_acc=False, is_async=True)
        state *= decays(log_decay, gl.to_tensor(C))
        state = warpgroup_mma(k.permute((1, 0)), late_s, state, is_async=True)
        if FAULT == "scores read too early":
            scores = warpgroup_mma_wait(3, deps=[scores])
            o = warpgroup_mma_wait(1, deps=[o])
        elif FAULT == "no wait for the product":
            scores = warpgroup_mma_wait(1, deps=[scores])
        else:
            scores, o = warpgroup_mma_wait(1, deps=[scores, o])
        if FAULT == "late values overwritten":
            late_s.store(nothing.to(gl.bfloat16))
        weights = gl.convert_layout((scores * mask).to(gl.bfloat16), LEFT)
        o = warpgroup_mma(weights, v, o * since_start[:, None], is_async=True)
        if FAULT == "stage given back early":
            thread_barrier()
            mbarrier.arrive(empty.index(stage))
        if FAULT != "no store_wait":
            tma.store_wait(1)
        state, o = warpgroup_mma_wait(0, deps=[state, o])
        out = o_s.index(2 * HALF + i % 2)
        out.store(o.to(gl.bfloat16))
        if FAULT != "no fence before the copy":
            fence_async_shared()
        if FAULT == "arrive before the thread barrier":
            mbarrier.arrive(empty.index(stage))
        if FAULT != "no thread barrier before the copy":
            thread_barrier()
        if FAULT != "no arrive" and FAULT != "stage given back early" and FAULT != "arrive before the thread barrier":
            mbarrier.arrive(empty.index(stage))
        copy_out(o_desc, [row + i * C, 2 * col + HALF * N], out)
    if FAULT != "no last store_wait":
        tma.store_wait(0)


@gluon.jit
def forward(q_desc, k_desc, v_desc, o_desc, log_decay_ptr, T, C: gl.constexpr, K: gl.constexpr, N: gl.constexpr,
            STAGES: gl.constexpr, FAULT: gl.constexpr = None):
    """K and half of V are 64; descriptors of [B T, H K] and [B T, H V], log_decay of [H] in base 2."""
    log_decay = gl.load(log_decay_ptr + gl.program_id(0))
    q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], q_desc.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], k_desc.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, C, N], v_desc.layout)
    late_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, N], v_desc.layout)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [2, K, N], v_desc.layout)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [4, C, N], o_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    if FAULT != "no fence after init":
        fence_async_shared()
    row = gl.program_id(1) * T
    col = gl.program_id(0) * K
    blocks = gl.cdiv(T, C)
    gl.warp_specialize(
        [
            (multiply, (q_s, k_s, v_s, late_s.index(0), state_s.index(0), o_s, full, empty, o_desc, log_decay, row,
                        col, blocks, 0, C, K, N, STAGES, FAULT)),
            (multiply, (q_s, k_s, v_s, late_s.index(1), state_s.index(1), o_s, full, empty, o_desc, log_decay, row,
                        col, blocks, 1, C, K, N, STAGES, FAULT)),
            (copy, (q_s, k_s, v_s, full, empty, q_desc, k_desc, v_desc, row, col, blocks, C, N, STAGES, FAULT)),
        ],
        [4, 1],
        [232, 40],
    )
