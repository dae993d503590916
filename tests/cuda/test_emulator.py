"""The emulator of Gluon: that it computes what a GPU would, and finds what is wrong with a kernel."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from keraunos.kernels.device.pipeline import Pipeline, pipeline
from keraunos.kernels.gluon import aggregate, copy_in, copy_of_threads, copy_out, reinterpret, thread_barrier
from tests.cuda import attention
from tests.cuda.compile import descriptor as signature
from tests.cuda.compile import resources
from tests.cuda.emulator import (
    CompileError,
    DeadlockError,
    EmulatorError,
    OutOfBoundsError,
    RaceError,
    UnfinishedError,
    UnsupportedError,
    descriptor,
    launch,
)

MODES = "late", "early", "random"
SCHEDULES = list(itertools.product(MODES, (0, 1, 2, 3)))
BF16 = ml_dtypes.bfloat16
SHARED = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
BLOCK = signature("bf16", [64, 64], SHARED)


def attend(T, H=1, B=1, stages=2, fault=None, **options):
    """The small kernel's relative error."""
    rng = np.random.default_rng(T)
    q, k = (rng.standard_normal((B * T, H * 64)).astype(BF16) for _ in range(2))
    v = rng.standard_normal((B * T, H * 128)).astype(BF16)
    o = np.full_like(v, np.nan)
    log_decay = -np.linspace(0.01, 0.3, H).astype(np.float32)
    descriptors = [descriptor(x, [64, 64], SHARED) for x in (q, k, v, o)]
    launch(attention.forward, (H, B), *descriptors, log_decay, T, 64, 64, 64, stages, fault, **options)
    q, k, v, o = (x.astype(np.float64).reshape(B, T, H, -1) for x in (q, k, v, o))
    state, wanted = np.zeros((B, H, 64, 128)), np.empty_like(v)
    for t in range(T):
        state = state * 2.0 ** log_decay.astype(np.float64)[:, None, None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        wanted[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], state)
    return np.linalg.norm(o - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(("mode", "seed"), SCHEDULES)
def test_a_whole_kernel_in_every_mode(mode, seed):
    assert attend(256, mode=mode, seed=seed) < 4e-3


@pytest.mark.parametrize(("T", "H", "B", "stages"), [(64, 1, 1, 2), (128, 2, 2, 3), (200, 1, 1, 3), (1, 1, 1, 2)])
def test_a_whole_kernel_of_any_size(T, H, B, stages):
    assert attend(T, H, B, stages) < 4e-3


# What is planted, the error that must come, and the words in it.
FAULTS = {
    "no fence after init": (RaceError, r"full\[0\]: a copy at .* with no fence_async_shared\(\) after its init"),
    "no wait for full": (RaceError, r"q_s\[0\].*partition 0 \(multiply\)'s product .*nothing was written"),
    "no wait for empty": (EmulatorError, r"full\[0\]"),
    "parity of full": (RaceError, r"q_s\[0\].*partition 0 \(multiply\)'s product .*nothing was written"),
    "parity of empty": (DeadlockError, r"partition 2 \(copy\) waits for empty\[0\].*0 of 2 arrivals"),
    "too many bytes": (DeadlockError, r"waits for full\[0\].*1 of 1 arrivals came, \d+ bytes are still expected"),
    "too few bytes": (
        RaceError,
        r"[qkv]_s\[.\].*, after partition 2 \(copy\) copies in .* the copy (belongs to phase|has not)",
    ),
    "no fence before products": (RaceError, r"(state|late)_s\[.\].*'s product .* stores .*no fence_async_shared\(\)"),
    "no thread barrier before products": (RaceError, r"(state|late)_s\[.\].*'s product .*no gl.thread_barrier\(\)"),
    "scores read too early": (UnfinishedError, r"product at .*leaves it under way"),
    "no wait for the product": (UnfinishedError, r"product at .*no warpgroup_mma_wait that returned it"),
    "late values overwritten": (RaceError, r"late_s\[.\].* stores .*'s product .*not waited for"),
    "stage given back early": (
        RaceError,
        r"[qkv]_s\[.\]: partition 2 \(copy\) copies in .*'s product .*no barrier orders",
    ),
    "no store_wait": (RaceError, r"o_s\[.\].* stores .* copies out .*not waited for"),
    "no fence before the copy": (RaceError, r"o_s\[.\].*copies out .* stores .*no fence_async_shared\(\)"),
    "no thread barrier before the copy": (RaceError, r"o_s\[.\].*copies out .* stores .*no gl.thread_barrier\(\)"),
    "arrive before the thread barrier": (RaceError, r"[qkv]_s\[.\]: partition 2 \(copy\) copies in .*'s product"),
    "no arrive": (DeadlockError, r"partition 2 \(copy\) waits for empty\[0\].*0 of 2 arrivals"),
    "no last store_wait": (UnfinishedError, r"no tma.store_wait waited for o_s\[.\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault):
    error, words = FAULTS[fault]
    for mode, seed in SCHEDULES:
        if seed in (0, 1):
            with pytest.raises(error) as raised:
                attend(256, fault=fault, mode=mode, seed=seed)
            if seed == 0 and (fault, mode) != ("no wait for empty", "random"):
                raised.match("(?s)" + words)


def test_most_faults_are_found_in_one_walk_around_the_ring():
    """A short sequence is enough where no stage is used twice."""
    for fault, (error, _) in FAULTS.items():
        reused = fault.startswith(("no wait for empty", "no arrive", "stage given", "arrive before", "no store_wait"))
        if not reused:
            with pytest.raises(error):
                attend(64, fault=fault)


# Small kernels, one subject each


@gluon.jit
def elementwise(x_ptr, y_ptr, o_ptr, sums_ptr, n, M: gl.constexpr, N: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    i = gl.arange(0, M, layout=gl.SliceLayout(1, L))
    j = gl.arange(0, N, layout=gl.SliceLayout(0, L))
    at = i[:, None] * N + j[None, :]
    x = gl.load(x_ptr + at, mask=at < n, other=0.5)
    y = gl.load(y_ptr + at).to(gl.float32)
    z = gl.where(x > y, gl.exp2(x) - 1, gl.maximum(x * y, -0.25) / 3)
    gl.store(o_ptr + at, z, mask=(j < N - 1)[None, :])
    gl.store(sums_ptr + i, gl.sum(z, 1))


def test_elementwise_arithmetic_with_masks():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 64)).astype(np.float32), rng.standard_normal((16, 64)).astype(BF16)
    o, sums = np.zeros((16, 64), BF16), np.zeros(16, np.float32)
    launch(elementwise, (1,), x.ravel()[:1000].copy(), y, o, sums, 1000, 16, 64)
    x.ravel()[1000:] = 0.5
    y = y.astype(np.float32)
    z = np.where(x > y, np.exp2(x) - 1, np.maximum(x * y, np.float32(-0.25)) / np.float32(3))
    np.testing.assert_allclose(sums, z.sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(o[:, :-1], z.astype(BF16)[:, :-1])
    assert (o[:, -1] == 0).all()


@pytest.mark.parametrize("n", [1025, 2000])
def test_addresses_outside_an_array(n):
    x = np.zeros(1024, np.float32)
    with pytest.raises(OutOfBoundsError, match="y_ptr: element 1000 of 1000 is not of the array"):
        launch(elementwise, (1,), x, x[:1000], x, x, 1024, 16, 64)
    rows = np.zeros((16, 80), np.float32)[:, :64]
    with pytest.raises(OutOfBoundsError, match="y_ptr: element 64 of 1264 is not of the array"):
        launch(elementwise, (1,), x, rows, x, x, n, 16, 64)


@gluon.jit
def add_pairs(a, b, c, d):
    return a * c, b * c + d


@gluon.jit
def total(a, b):
    return a + b


@gluon.jit
def scans(x_ptr, o_ptr, N: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, N, layout=L)
    x = gl.load(x_ptr + i)
    gl.store(o_ptr + i, gl.associative_scan(x, 0, total))
    gl.store(o_ptr + N + i, gl.associative_scan(x, 0, total, reverse=True))
    _, b = gl.associative_scan((x, x), 0, add_pairs)
    gl.store(o_ptr + 2 * N + i, b)
    gl.store(o_ptr + 3 * N, gl.reduce(x, 0, total))
    gl.store(o_ptr + 3 * N + 1, gl.max(x, 0))


def test_scans_and_reductions():
    x, o = np.random.default_rng(0).uniform(0.5, 1, 128).astype(np.float32), np.zeros(3 * 128 + 2, np.float32)
    launch(scans, (1,), x, o, 128)
    wanted, h = [], 0.0
    for value in x:
        h = value * h + value
        wanted.append(h)
    np.testing.assert_allclose(o[:128], x.cumsum(), rtol=1e-5)
    np.testing.assert_allclose(o[128:256], x[::-1].cumsum()[::-1], rtol=1e-5)
    np.testing.assert_allclose(o[256:384], wanted, rtol=1e-5)
    np.testing.assert_allclose(o[384:], [x.sum(), x.max()], rtol=1e-5)


@gluon.jit
def integers(o_ptr, a, b):
    gl.store(o_ptr, a // b)
    gl.store(o_ptr + 1, a % b)
    n = 0
    for i in range(3, b):
        n += i
    gl.store(o_ptr + 2, n)
    gl.store(o_ptr + 3, min(a, b))
    gl.store(o_ptr + 4, (a.to(gl.int64) * 2147483647 >> 32).to(gl.int32))
    gl.atomic_add(o_ptr + 5, 2 + gl.program_id(0))


@gluon.jit
def overflows(o_ptr, a):
    gl.store(o_ptr, a * 65536)


def test_integers_are_of_the_gpu():
    o = np.zeros(6, np.int32)
    launch(integers, (3,), o, -7, 5)
    assert list(o) == [-1, -2, 7, -7, -4, 9]
    with pytest.raises(OverflowError, match="int32 overflows"):
        launch(overflows, (1,), o, 65536)


@gluon.jit
def through_shared(x_desc, o_desc, row, col, K: gl.constexpr):
    x_s = gl.allocate_shared_memory(gl.bfloat16, x_desc.block_shape, x_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    mbarrier.expect(arrived, x_desc.block_type.nbytes)
    copy_in(x_desc, [row, col], arrived, x_s)
    mbarrier.wait(arrived, 0)
    copy_out(o_desc, [row, col + K], x_s)
    tma.store_wait(0)


@pytest.mark.parametrize("at", [(0, 0), (50, 0), (-10, 30), (64, -64), (200, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_copies_at_the_edges_of_an_array(mode, at):
    """Zeros come from outside, and nothing is written there."""
    x = np.random.default_rng(0).standard_normal((100, 64)).astype(BF16)
    o = np.full((100, 64), 7, BF16)
    launch(through_shared, (1,), *(descriptor(a, [64, 64], SHARED) for a in (x, o)), *at, 0, mode=mode)
    around = np.zeros((400, 300), BF16)
    around[100:200, 100:164] = x
    block = around[100 + at[0] : 164 + at[0], 100 + at[1] : 164 + at[1]]
    wanted = np.zeros((400, 300), BF16)
    wanted[100:200, 100:164] = 7
    wanted[100 + at[0] : 164 + at[0], 100 + at[1] : 164 + at[1]] = block
    np.testing.assert_array_equal(o, wanted[100:200, 100:164])


@gluon.jit
def made_here(x_ptr, o_ptr, rows, width, L: gl.constexpr):
    x_desc = tma.make_tensor_descriptor(x_ptr + 64, [rows, 64], [width, 1], [64, 64], L)
    o_desc = tma.make_tensor_descriptor(o_ptr, [rows, 64], [64, 1], [64, 64], L)
    through_shared(x_desc, o_desc, 0, 0, 0)


def test_descriptors_that_a_kernel_makes():
    x, o = np.random.default_rng(0).standard_normal((50, 128)).astype(BF16), np.zeros((50, 64), BF16)
    launch(made_here, (1,), x, o, 50, 128, SHARED)
    np.testing.assert_array_equal(o, x[:, 64:])
    with pytest.raises(OutOfBoundsError, match="x_ptr: it reaches element 6527 of 6400"):
        launch(made_here, (1,), x, o, 51, 128, SHARED)
    with pytest.raises(CompileError, match="16 bytes"):
        launch(made_here, (1,), x, o, 50, 100, SHARED)


@gluon.jit
def late_or_early(x_desc, o_desc, x_ptr, o_ptr, seen_ptr):
    """Writes to an array while a copy is on its way: a race on global memory that shows when the copy happens."""
    x_s = gl.allocate_shared_memory(gl.bfloat16, x_desc.block_shape, x_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    mbarrier.expect(arrived, x_desc.block_type.nbytes)
    copy_in(x_desc, [0, 0], arrived, x_s)
    gl.store(x_ptr, 5.0)
    mbarrier.wait(arrived, 0)
    copy_out(o_desc, [0, 0], x_s)
    gl.store(seen_ptr, gl.load(o_ptr))
    tma.store_wait(0)


def test_modes_say_when_copies_happen():
    for mode, wanted in (("late", [5, 7]), ("early", [0, 0])):
        x, o, seen = np.zeros((64, 64), BF16), np.full((64, 64), 7, BF16), np.zeros(1, BF16)
        launch(late_or_early, (1,), *(descriptor(a, [64, 64], SHARED) for a in (x, o)), x, o, seen, mode=mode)
        assert [o[0, 0], seen[0]] == wanted
    with pytest.raises(ValueError, match="mode must be one of"):
        launch(late_or_early, (1,), None, None, x, o, seen, mode="now")


@gluon.jit
def writes_part(x_s, o_ptr, i, count, START: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    x_s.slice(START, 32, 1).store(gl.full([64, 32], 1.0 + i, gl.float32, L))
    gl.store(o_ptr + gl.atomic_add(count, 1), i)


@gluon.jit
def two_writers(o_ptr, count, SECOND: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    x_s = gl.allocate_shared_memory(gl.float32, [64, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    gl.warp_specialize(
        [(writes_part, (x_s, o_ptr, 0, count, 0)), (writes_part, (x_s, o_ptr, 1, count, SECOND))], [4], [40]
    )
    x = x_s.load(L)
    gl.store(o_ptr + 2, gl.sum(gl.sum(x, 1), 0).to(gl.int32))


def test_parts_of_a_buffer_and_schedules():
    orders = []
    for seed in range(8):
        o, count = np.zeros(3, np.int32), np.zeros(1, np.int32)
        launch(two_writers, (1,), o, count, 32, seed=seed)
        assert sorted(o[:2]) == [0, 1]
        assert o[2] == 64 * 32 * 3
        orders.append(list(o[:2]))
        with pytest.raises(RaceError, match=r"x_s.slice\(.*partition . \(writes_part\) stores .* stores"):
            launch(two_writers, (1,), o, count * 0, 0, seed=seed)
    assert orders[0] == [0, 1]
    assert [1, 0] in orders


@gluon.jit
def views(x_ptr, o_ptr):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    at = (
        gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None] * 64
        + gl.arange(0, 64, layout=gl.SliceLayout(0, L))[None, :]
    )
    x_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], S)
    x_s.index(1).store(gl.load(x_ptr + at))
    gl.store(o_ptr + at, x_s.index(1).permute((1, 0)).load(L))
    x = gl.load(x_ptr + at)
    x = gl.convert_layout(gl.permute(gl.reshape(x, [2, 32, 64]), (1, 0, 2)).reshape([64, 64]), L)
    gl.store(o_ptr + 4096 + at, x)


def test_views_and_shapes():
    x, o = np.random.default_rng(0).standard_normal((64, 64)).astype(BF16), np.zeros((2, 64, 64), BF16)
    launch(views, (1,), x, o)
    np.testing.assert_array_equal(o[0], x.T)
    np.testing.assert_array_equal(o[1], x.reshape(2, 32, 64).swapaxes(0, 1).reshape(64, 64))


@gluon.jit
def product(x_desc, o_ptr, M: gl.constexpr, N: gl.constexpr, FAULT: gl.constexpr):
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    x_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], x_desc.layout)
    at = (
        gl.arange(0, M, layout=gl.SliceLayout(1, W))[:, None] * N
        + gl.arange(0, N, layout=gl.SliceLayout(0, W))[None, :]
    )
    x_s.store(gl.full([64, 64], 0.1, gl.bfloat16, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    fence_async_shared()
    thread_barrier()
    zero = gl.zeros([M, N], gl.float32, W)
    left = x_s
    if FAULT == "shape":
        left = x_s.slice(0, 32, 0)
    if FAULT == "registers":
        left = gl.full([64, 64], 0.1, gl.bfloat16, gl.DotOperandLayout(0, W, 4))
    if FAULT == "type":
        zero = zero.to(gl.float16)
    if FAULT == "layout":
        at = gl.convert_layout(at, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
    if FAULT == "unfinished":
        gl.store(o_ptr + at, warpgroup_mma(left, x_s, zero, is_async=True))
    elif FAULT == "unknown":
        gl.histogram(gl.arange(0, 64), 64)
    else:
        o = warpgroup_mma(left, x_s, zero, is_async=True)
        o = warpgroup_mma(x_s, x_s, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        o = warpgroup_mma(x_s, x_s, o, use_acc=o.sum(0).sum(0) < 0)
        gl.store(o_ptr + at, o + zero)


def test_products():
    o = np.zeros((64, 64), np.float32)
    launch(product, (1,), descriptor(o.astype(BF16), [64, 64], SHARED), o, 64, 64, None)
    np.testing.assert_allclose(o, 64 * float(BF16(0.1)) ** 2, rtol=1e-6)


@gluon.jit
def products_of_warps(x_ptr, o_ptr, FAULT: gl.constexpr):
    """A block of 16 times itself transposed, a warp each."""
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    W: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    flat_s = gl.allocate_shared_memory(gl.float16, [1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    x_s = reinterpret(flat_s, gl.float16, [4, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    at = gl.arange(0, 1024, layout=L)
    flat_s.store(gl.load(x_ptr + at))
    if FAULT == "slice":
        flat_s.slice(0, 512).reshape([2, 16, 16])
    x = x_s.load(W)
    left = gl.convert_layout(x, gl.DotOperandLayout(0, W, 1 if FAULT == "layout" else 2))
    right = gl.convert_layout(x.permute((0, 2, 1)), gl.DotOperandLayout(1, W, 2))
    out = mma_v2(left, right, gl.full([4, 16, 16], 1.0, gl.float32, W))
    gl.store(o_ptr + at, gl.convert_layout(out.reshape([1024]), L))


def test_products_of_warps():
    x, o = np.random.default_rng(0).standard_normal((4, 16, 16)).astype(np.float16), np.zeros((4, 16, 16), np.float32)
    launch(products_of_warps, (1,), x, o, None)
    np.testing.assert_allclose(o, 1 + x.astype(np.float32) @ x.astype(np.float32).swapaxes(1, 2), rtol=1e-5, atol=1e-5)
    with pytest.raises(CompileError, match="operand 0 must be in DotOperandLayout"):
        launch(products_of_warps, (1,), x, o, "layout")
    with pytest.raises(CompileError, match="is a slice"):
        launch(products_of_warps, (1,), x, o, "slice")


@gluon.jit
def parts_of_two_forms(o_ptr, FAULT: gl.constexpr):
    """Of one buffer, the first half as rows of 128, the second as squares."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    FORM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    rows_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], FORM)
    squares_s = reinterpret(rows_s, gl.bfloat16, [4, 64, 64], FORM)
    rows_s.index(0).store(gl.full([64, 128], 2.0, gl.bfloat16, L))
    squares_s.index(2 if FAULT != "first" else 1).store(gl.full([64, 64], 3.0, gl.bfloat16, L))
    if FAULT == "second":
        rows_s.index(1).load(L)
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None] * 128
    at += gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :]
    gl.store(o_ptr + at, rows_s.index(0).load(L).to(gl.float32))


def test_parts_of_a_buffer_have_forms_of_their_own():
    o = np.zeros((64, 128), np.float32)
    launch(parts_of_two_forms, (1,), o, None)
    np.testing.assert_array_equal(o, 2)
    for fault in "first", "second":
        with pytest.raises(UnsupportedError, match="last written as"):
            launch(parts_of_two_forms, (1,), o, fault)


@gluon.jit
def copied_by_threads(x_ptr, o_ptr, rows, FAULT: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    x_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    at = r * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, L))[None, :]
    copy_of_threads(x_s, x_ptr + at, mask=r < rows)
    if FAULT != "commit":
        async_copy.commit_group()
    if FAULT == "read":
        gl.store(o_ptr + at, x_s.load(L).to(gl.float32))
    if FAULT != "wait" and FAULT != "all":
        async_copy.wait_group(1 if FAULT == "one left" else 0)
    if FAULT != "fence":
        fence_async_shared()
    if FAULT != "barrier":
        thread_barrier()
    if FAULT != "all":
        o = warpgroup_mma(x_s, x_s.permute((1, 0)), gl.zeros([64, 64], gl.float32, W), is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        gl.store(o_ptr + at, gl.convert_layout(o, L))


def test_copies_by_threads():
    x, o = np.random.default_rng(0).standard_normal((50, 64)).astype(BF16), np.zeros((64, 64), np.float32)
    wanted = np.zeros_like(o)
    wanted[:50, :50] = x.astype(np.float32) @ x.astype(np.float32).T
    missing = {"commit": "no async_copy.wait_group", "read": "no async_copy.wait_group",
               "wait": "no async_copy.wait_group", "one left": "no async_copy.wait_group",
               "fence": r"no fence_async_shared\(\)", "barrier": r"no gl.thread_barrier\(\)"}
    for mode in MODES:
        launch(copied_by_threads, (1,), x, o, 50, None, mode=mode)
        np.testing.assert_allclose(o, wanted, rtol=1e-5, atol=1e-5)
        for fault, words in missing.items():
            with pytest.raises(RaceError, match=words):
                launch(copied_by_threads, (1,), x, o, 50, fault, mode=mode)
    with pytest.raises(UnfinishedError, match=r"no async_copy\.wait_group waited for x_s"):
        launch(copied_by_threads, (1,), x, o, 50, "all")
    with pytest.raises(OutOfBoundsError):
        launch(copied_by_threads, (1,), x, o, 51, None)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("shape", CompileError, "shapes"),
        ("registers", CompileError, "a in registers must be in DotOperandLayout"),
        ("type", CompileError, "types bf16 @ bf16 \\+ fp16"),
        ("layout", CompileError, "layouts? of operands differ"),
        ("unfinished", UnfinishedError, "no warpgroup_mma_wait that returned it"),
        ("unknown", UnsupportedError, "histogram"),
    ],
)
def test_what_does_not_compile(fault, error, words):
    """Gluon's compiler refuses it as well; an fp16 sum of bf16 products fails late in it, and noisily."""
    o = np.zeros((64, 64), np.float32)
    with pytest.raises(error, match=words):
        launch(product, (1,), descriptor(o.astype(BF16), [64, 64], SHARED), o, 64, 64, fault)
    if fault not in ("type", "unknown"):
        with pytest.raises((RuntimeError, triton.CompilationError)):
            resources(product, dict(x_desc=BLOCK, o_ptr="*fp32"), dict(M=64, N=64, FAULT=fault))


# Kernel -> types of its arguments of run time, constants.
BUILDS = {
    attention.forward: (
        dict(q_desc=BLOCK, k_desc=BLOCK, v_desc=BLOCK, o_desc=BLOCK, log_decay_ptr="*fp32", T="i32"),
        dict(C=64, K=64, N=64, STAGES=3, FAULT=None),
    ),
    elementwise: (dict(x_ptr="*fp32", y_ptr="*bf16", o_ptr="*bf16", sums_ptr="*fp32", n="i32"), dict(M=16, N=64)),
    scans: (dict(x_ptr="*fp32", o_ptr="*fp32"), dict(N=128)),
    integers: (dict(o_ptr="*i32", a="i32", b="i32"), {}),
    through_shared: (dict(x_desc=BLOCK, o_desc=BLOCK, row="i32", col="i32"), dict(K=0)),
    made_here: (dict(x_ptr="*bf16", o_ptr="*bf16", rows="i32", width="i32"), dict(L=SHARED)),
    two_writers: (dict(o_ptr="*i32", count="*i32"), dict(SECOND=32)),
    views: (dict(x_ptr="*bf16", o_ptr="*bf16"), {}),
    product: (dict(x_desc=BLOCK, o_ptr="*fp32"), dict(M=64, N=64, FAULT=None)),
    products_of_warps: (dict(x_ptr="*fp16", o_ptr="*fp32"), dict(FAULT=None)),
    copied_by_threads: (dict(x_ptr="*bf16", o_ptr="*fp32", rows="i32"), dict(FAULT=None)),
}


@pytest.mark.parametrize("kernel", BUILDS, ids=lambda kernel: kernel.__name__)
def test_these_kernels_compile_for_hopper(kernel):
    """So that what the emulator runs is what the compiler takes."""
    found = resources(kernel, *BUILDS[kernel])
    assert found["stack"] == 0
    if kernel is attention.forward:
        assert found["registers"] <= 168
        assert found["warps"] == 12
        assert 160 * 1024 < found["shared"] <= 232448


@gluon.jit
def gives(x_s, full, empty, FAULT: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    for i in range(4):
        mbarrier.wait(empty, (i & 1) ^ 1)
        x_s.store(gl.full([64, 64], 1.0 + i, gl.bfloat16, L))
        if FAULT == "barrier, then fence":
            thread_barrier()
        if FAULT != "no fence" and FAULT != "fence of the reader":
            fence_async_shared()
        if FAULT != "no barrier of the writer" and FAULT != "barrier, then fence":
            thread_barrier()
        mbarrier.arrive(full, count=1)


@gluon.jit
def takes(x_s, full, empty, o_desc, FAULT: gl.constexpr):
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o = gl.zeros([64, 64], gl.float32, W)
    for i in range(4):
        mbarrier.wait(full, i & 1)
        if FAULT == "fence of the reader":
            fence_async_shared()
        if FAULT == "early arrival":
            mbarrier.arrive(empty)
        o = warpgroup_mma(x_s, x_s.permute((1, 0)), o)
        if FAULT != "no barrier of the reader":
            thread_barrier()
        if FAULT != "early arrival":
            mbarrier.arrive(empty)
    mbarrier.wait(empty, 1)
    if FAULT == "warps of the reader":
        o = warpgroup_mma(x_s, x_s, o)
    x_s.store(o.to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()
    copy_out(o_desc, [0, 0], x_s)
    tma.store_wait(0)


@gluon.jit
def hands_over(o_desc, FAULT: gl.constexpr):
    x_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], o_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(barriers.index(i), count=1)
    full = barriers.index(0)
    empty = barriers.index(1)
    gl.warp_specialize([(takes, (x_s, full, empty, o_desc, FAULT)), (gives, (x_s, full, empty, FAULT))], [4], [64])


PRODUCT = r"x_s: partition 0 \(takes\)'s product .* partition 1 \(gives\) stores"
HANDED = {
    None: None,
    "barrier, then fence": None,
    "fence of the reader": None,
    "no fence": PRODUCT + r" .*with no fence_async_shared\(\)",
    "no barrier of the writer": PRODUCT,
    "no barrier of the reader": r"x_s: partition 1 \(gives\) stores .* partition 0 \(takes\)'s product .*no barrier",
    "early arrival": r"x_s: partition . .* partition . .*no barrier orders",
    "warps of the reader": r"x_s: partition 0 \(takes\) stores .*'s product .*with no gl.thread_barrier\(\) between",
}


@pytest.mark.parametrize("fault", HANDED)
def test_what_one_partition_stores_and_another_multiplies(fault):
    for mode, seed in SCHEDULES:
        o = np.full((64, 64), np.nan, BF16)
        if HANDED[fault] is None:
            launch(hands_over, (1,), descriptor(o, [64, 64], SHARED), fault, mode=mode, seed=seed)
            assert (o == 64 * (1 + 4 + 9 + 16)).all()
        else:
            with pytest.raises(RaceError, match=HANDED[fault]):
                launch(hands_over, (1,), descriptor(o, [64, 64], SHARED), fault, mode=mode, seed=seed)


@gluon.jit
def signals(bar, n):
    for _ in range(n):
        mbarrier.arrive(bar, count=1)


@gluon.jit
def listens(bar, n):
    for i in range(n):
        mbarrier.wait(bar, i & 1)


@gluon.jit
def runs_ahead(n):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(listens, (bar, n)), (signals, (bar, n))], [1], [24])


def test_a_barrier_that_runs_ahead():
    """One phase is heard in every schedule; of two the first can be missed."""
    for seed in range(4):
        launch(runs_ahead, (1,), 1, seed=seed)
    with pytest.raises(
        DeadlockError, match=r"bar completes phase 1 while partition 0 \(listens\) has not seen the one before"
    ):
        launch(runs_ahead, (1,), 2)


VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@aggregate
class Scaled:
    """Values in shared memory, times a factor if there is one."""

    memory: gl.shared_memory_descriptor
    factor: gl.tensor | gl.constexpr
    SIZE: gl.constexpr

    @gluon.jit
    def load(self):
        x = self.memory.load(VECTOR)
        return x if self.factor is None else x * self.factor


@aggregate
class Pair:
    first: Scaled
    second: Scaled | gl.constexpr

    @gluon.jit
    def total(self):
        total = self.first.load()
        if self.second is not None:
            total += self.second.load()
        return total


@gluon.jit
def adds_pairs(o_ptr, factor, FAULT: gl.constexpr):
    x_s = gl.allocate_shared_memory(gl.float32, [128], ROW)
    x_s.store(gl.full([128], 1.0, gl.float32, VECTOR))
    first = Scaled(x_s, SIZE=128, factor=None)
    second = None
    if FAULT == "a field is missing":
        second = Scaled(x_s, factor)
    elif FAULT == "a field too many":
        second = Scaled(x_s, factor, 128, 128)
    elif FAULT == "a value of run time as a constant":
        second = Scaled(x_s, factor, factor)
    elif FAULT == "registers as shared memory":
        second = Scaled(factor, factor, 128)
    elif FAULT == "another aggregate":
        second = Pair(first, None)
    elif FAULT == "an unknown field":
        second = first.length
    elif FAULT is None:
        second = Scaled(x_s, factor, 128)
    pair = Pair(first, second)
    for i in range(2):
        o_t = i * pair.first.SIZE + gl.arange(0, pair.first.SIZE, layout=VECTOR)
        gl.store(o_ptr + o_t, pair.total())


def test_aggregates():
    for fault, wanted in ((None, 3.5), ("no second", 1)):
        o = np.zeros(256, np.float32)
        launch(adds_pairs, (1,), o, 2.5, fault)
        assert (o == wanted).all()


@pytest.mark.parametrize("fault", ["a field is missing", "a field too many", "a value of run time as a constant",
                                   "registers as shared memory", "another aggregate", "an unknown field"])
def test_aggregates_that_are_wrong_do_not_compile(fault):
    """Neither in the emulator nor in Triton."""
    with pytest.raises((CompileError, TypeError, AttributeError)):
        launch(adds_pairs, (1,), np.zeros(256, np.float32), 2.5, fault)
    with pytest.raises(triton.CompilationError):
        resources(adds_pairs, {"o_ptr": "*fp32", "factor": "fp32"}, {"FAULT": fault})


@gluon.jit
def assigns_a_field(o_ptr):
    x_s = gl.allocate_shared_memory(gl.float32, [128], ROW)
    values = Scaled(x_s, None, 128)
    values.SIZE = 64


def test_a_field_is_given_only_once():
    with pytest.raises(CompileError, match="SIZE is given only once"):
        launch(assigns_a_field, (1,), np.zeros(1, np.float32))


@aggregate
class Handed:
    ring: Pipeline
    x_s: gl.shared_memory_descriptor
    n: gl.tensor
    FAULT: gl.constexpr

    @gluon.jit
    def give(self):
        for i in range(self.n):
            if self.FAULT != "acquire":
                self.ring.acquire(i)
            self.x_s.index(i % self.ring.STAGES).store(gl.full([128], 1.0, gl.float32, VECTOR) * i)
            thread_barrier()
            if self.FAULT != "commit":
                self.ring.commit(i)

    @gluon.jit
    def take(self, o_ptr):
        total = gl.zeros([128], gl.float32, VECTOR)
        for i in range(self.n):
            if self.FAULT != "wait":
                self.ring.wait(i)
            total += self.x_s.index(i % self.ring.STAGES).load(VECTOR)
            thread_barrier()
            if self.FAULT != "release":
                self.ring.release(i)
        gl.store(o_ptr + gl.arange(0, 128, layout=VECTOR), total)


@gluon.jit
def passes_through_a_ring(o_ptr, n, STAGES: gl.constexpr, FAULT: gl.constexpr):
    x_s = gl.allocate_shared_memory(gl.float32, [STAGES, 128], ROW)
    ring = pipeline(STAGES, (1,), 1)
    handed = Handed(ring, x_s, n, FAULT)
    gl.warp_specialize([(Handed.take, (handed, o_ptr)), (Handed.give, (handed,))], [4], [64])


@pytest.mark.parametrize(("mode", "seed"), SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_pipeline(stages, mode, seed):
    o = np.zeros(128, np.float32)
    launch(passes_through_a_ring, (1,), o, 7, stages, None, mode=mode, seed=seed)
    assert (o == 21).all()
    for fault in ("acquire", "commit", "wait", "release"):
        with pytest.raises((RaceError, DeadlockError)):
            launch(passes_through_a_ring, (1,), o, 7, stages, fault, mode=mode, seed=seed)


def test_reports_name_the_ring_and_who_called_it():
    words = (r"\(give\) waits for ring\.barriers\[2\] .* at pipeline.py:\d+ \(acquire\), "
             r"called at test_emulator.py:\d+ \(give\)")
    with pytest.raises(DeadlockError, match=words):
        launch(passes_through_a_ring, (1,), np.zeros(128, np.float32), 7, 2, "release")


HIDDEN = 3


@gluon.jit
def uses_a_global(o_ptr):
    gl.store(o_ptr, HIDDEN)


def test_a_global_that_is_no_constant():
    with pytest.raises(CompileError, match=r"HIDDEN must be gl\.constexpr"):
        launch(uses_a_global, (1,), np.zeros(1, np.int32))


def test_tensors_of_pytorch():
    torch = pytest.importorskip("torch")
    hopper = pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    x, o = torch.randn(64, 64).bfloat16(), torch.zeros(64, 64).bfloat16()
    launch(through_shared, (1,), *(hopper.TensorDescriptor.from_tensor(a, [64, 64], SHARED) for a in (x, o)), 0, 0, 0)
    assert torch.equal(o, x)
