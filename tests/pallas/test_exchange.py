"""The kernel in which devices hand over states, where one device plays all of them.

JAX's interpreter has no semaphores. There devices come one after the other, in the order of the way, and what they
write is kept for those after them. On a GPU they are parts of one launch: what they wait for is real.
"""

import dataclasses
import math
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

if jax.__version_info__ < (0, 11):
    pytest.skip("needs jax 0.11", allow_module_level=True)

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.distributed import stretches
from keraunos.distributed.jax import exchange
from keraunos.kernels.linear_attention.pallas.program import launch_kernel
from tests.linear_attention.cases import GPU
from tests.numerics import assert_within_rule
from tests.pallas.interpreter import _With, interpreted


def on_device(rank, came, arrays, **options):
    """What a device's segments start from, and what it wrote, of what came there (None: nothing)."""
    read, written, results = [], [], []

    def launch(body, inputs, *, out_type, grid, barriers, **other):
        given = [x for x in inputs if x is not None]
        boxes, n = came or [jnp.full(x.shape, jnp.nan) for x in out_type[1:]], len(given)

        def split(indices, i_w, *refs):
            read[:], written[:] = refs[n : n + 2], refs[n + 3 :]
            body(indices, i_w, *refs[:n], refs[n + 2], *read)

        results[:] = launch_kernel(split, [*given, *boxes], out_type=out_type, grid=grid, **other)
        return results

    def remote_ref(ref, other):
        return next(there for here, there in zip(read, written, strict=True) if ref is here)

    def nothing(*x, **more):
        pass

    plgpu = _With(exchange.plgpu, remote_ref=remote_ref)
    pl = _With(exchange.pl, get_global=mock.MagicMock(), semaphore_signal=nothing, semaphore_wait=nothing)
    lax = _With(exchange.lax, axis_index=lambda axis: jnp.int32(rank))
    patches = dict(plgpu=plgpu, pl=pl, lax=lax, launch_kernel=launch, AHEAD=4)
    with interpreted(), mock.patch.multiple(exchange, **patches):
        starts = exchange.hand_over(*(x if x is None else x[rank] for x in arrays), axis="tokens", **options)
    return starts, results[1:]


def handed_over(arrays, size, right, **options):
    """What each device's segments start from."""
    found, came = [None] * size, None
    for place in range(size):
        rank = place if right else size - 1 - place
        found[rank], wrote = on_device(rank, came, arrays, size=size, right=right, **options)
        came = came or [jnp.full(x.shape, jnp.nan) for x in wrote]
        if place < size - 1:
            came = [x.at[place].set(y[place]) for x, y in zip(came, wrote, strict=True)]
    return found


def played(arrays, size, right, **options):
    """The exchange, on one GPU: a launch has the programs of all devices, those of the first on the way first."""
    rank, results = [], []

    def launch(body, inputs, *, out_type, grid, **other):
        def program(indices, i_w, *refs):
            place, *rest = indices
            rank[:] = [place if right else size - 1 - place]
            body(rest, i_w, *(ref.at[rank[0]] for ref in refs))

        given = [jnp.stack(x).reshape(size, *one.shape) for x, one in zip(arrays, inputs, strict=True) if x is not None]
        every = [jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in out_type]
        results[:] = launch_kernel(program, given, out_type=every, grid=(size, *grid), **other)
        return [x[0] for x in results]

    def counters(kind):
        return pl.get_global(plgpu.SemaphoreType.REGULAR((size, *kind.shape))).at[rank[0]]

    def remote_ref(ref, other):
        first = ref.ref.at[other["tokens"]]
        return dataclasses.replace(first, transforms=(*first.transforms, *ref.transforms[1:]))

    def signal(counter, device_id):
        pl.semaphore_signal(remote_ref(counter, device_id))

    patches = dict(
        plgpu=_With(plgpu, remote_ref=remote_ref),
        pl=_With(pl, get_global=counters, semaphore_signal=signal),
        lax=_With(lax, axis_index=lambda axis: rank[0]),
        launch_kernel=launch,
    )
    with mock.patch.multiple(exchange, **patches):
        exchange.hand_over(*(x if x is None else x[0] for x in arrays), axis="tokens", size=size, right=right,
                           **options)
    return results[0]


def given(R, P, B, H, K, V, decay):
    """What devices begin with. Head h of H decays by ``exp(-(H - h) decay)`` over a piece."""
    made = np.random.default_rng(0)
    local = made.standard_normal((R, B, P, H, K, V)).astype(np.float32)
    seen = (made.random((R, B, P, H)) < 0.8).astype(np.int32)
    start = made.standard_normal((B, H, K, V)).astype(np.float32)
    total = np.broadcast_to(-decay * np.arange(H, 0, -1, dtype=np.float32), (R, B, P, H)).copy()
    return np.where(seen[..., None, None] != 0, local, np.nan), total, seen, [start] * R, None


def of_constant_decays(arrays, tokens):
    """The arrays in the form that ``leave`` gives for constant decays, if ``seen`` is what it goes by."""
    local, total, _, start, plan = arrays
    return local, total[:, 0, 0] / tokens, None, start, plan


def check(results, arrays, **options):
    """What segments start from, device by device."""
    local, total, seen, (start, *_), _ = arrays
    truth, rough = (expected(local, total, seen, start.astype(dtype), **options) for dtype in (np.float64, np.float32))
    got = [np.asarray(x).reshape(y.shape) for x, y in zip(results, truth, strict=True)]
    assert_within_rule([f"device {rank}" for rank in range(len(got))], got, truth, rough, ["float32"] * len(got))


@pytest.mark.skipif(GPU, reason="for the CPU: the next test has the same for a GPU")
@pytest.mark.parametrize(("P", "pieces", "B", "H", "K", "right", "walked", "decay"), [
    (6, 2, 1, 1, 32, True, True, 0.5), (12, 2, 1, 1, 16, False, False, 5.0), (11, None, 1, 2, 16, True, True, 0.5),
    (3, 1, 2, 1, 16, False, True, 40.0),
])
def test_devices_hand_over(P, pieces, B, H, K, right, walked, decay):
    arrays, options = given(3, P, B, H, K, 64, decay), dict(right=right, pieces=pieces, walked=walked)
    check(handed_over(arrays, 3, same=True, **options), arrays, **options)


def without_forgotten(arrays, pieces):
    """All pieces that count at the end of their segment; the others are no numbers."""
    local, total, seen, start, plan = arrays
    later = (pieces - 1 - np.arange(local.shape[2]) % pieces)[:, None]
    seen = (later * total > -149 * math.log(2)).astype(np.int32)
    return np.where(seen[..., None, None] != 0, np.nan_to_num(local), np.nan), total, seen, start, plan


@pytest.mark.skipif(GPU, reason="for the CPU: the next test has the same for a GPU")
@pytest.mark.parametrize(("P", "pieces", "B", "H", "right", "decay"), [
    (6, 2, 1, 2, True, 0.5), (6, 3, 2, 1, False, 40.0), (2, 2, 1, 1, True, 200.0),
])
def test_devices_hand_over_what_constant_decays_leave(P, pieces, B, H, right, decay):
    options = dict(right=right, pieces=pieces, walked=True)
    arrays = without_forgotten(given(3, P, B, H, 16, 64, decay), pieces)
    constant = of_constant_decays(arrays, 128)
    check(handed_over(constant, 3, same=True, tokens=128, **options), arrays, **options)


@pytest.mark.skipif(GPU, reason="for the CPU: test_gpu.py has calls whose pieces these are")
@pytest.mark.parametrize(
    ("right", "inclusive", "gamma"),
    [(True, False, -0.01), (False, True, -0.01), (True, True, -2.0), (False, True, 0.0)],
)
def test_pieces_leave(right, inclusive, gamma, monkeypatch):
    """Pieces of a chunk, four to a segment."""
    monkeypatch.setattr(stretches, "_MIN_PIECE", 64)
    B, T, H, K, V, n, C = 2, 512, 2, 64, 64, 4, 64
    made = np.random.default_rng(0)
    k, v = (np.asarray(jnp.asarray(made.standard_normal((B, T, H, K)), "bfloat16"), np.float32) for _ in range(2))
    gammas = gamma * np.arange(1, H + 1, dtype=np.float32)
    x = stretches.Stretch(jnp.asarray(k, "bfloat16"), jnp.asarray(v, "bfloat16"), None, gammas)
    assert exchange.leaves(x, n * C)
    assert not exchange.leaves(x, 3 * C)
    with interpreted():
        got = np.asarray(exchange.leave(x, stretches.Way(H, right, inclusive, 0.3), n * C)[0])
    assert got.shape == (B, T // C, H, K, V)
    passed = (C - 1 - np.arange(C) if right else np.arange(C)) + inclusive
    weights = np.exp(gammas.astype(np.float64)[:, None] * passed)
    pairs = (y.reshape(B, T // C, C, H, -1)[:, :: 1 if right else -1] for y in (k, v))
    want = 0.3 * np.einsum("hc,bpchk,bpchv->bphkv", weights, *pairs)
    for p in range(T // C):
        for h in range(H):
            if (n - 1 - p % n) * C * gammas[h] > -149 * math.log(2):
                # What does not forget is not rounded.
                dtype = "bfloat16" if gamma else "float32"
                assert_within_rule(
                    ["state"], [got[:, p, h]], [want[:, p, h]], [want[:, p, h].astype(np.float32)], [dtype]
                )


@pytest.mark.skipif(not GPU, reason="needs a GPU: run with --gpu")
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize(("P", "pieces", "B", "H", "right", "walked", "decay", "same", "tokens"), [
    (32, 4, 1, 16, True, True, 0.02, True, 0), (32, 4, 1, 16, False, True, 0.02, True, 0),
    (32, 4, 1, 4, False, False, 1e-5, False, 0), (11, None, 2, 3, True, True, 0.5, True, 0),
    (64, 1, 1, 2, True, True, 40, True, 0), (32, 4, 1, 16, True, True, 0.02, True, 1024),
    (32, 4, 2, 3, False, True, 30, True, 1024),
])
def test_devices_that_a_gpu_plays_hand_over(size, P, pieces, B, H, right, walked, decay, same, tokens):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs a Hopper GPU")
    arrays, options = given(size, P, B, H, 128, 128, decay), dict(right=right, pieces=pieces, walked=walked)
    if tokens:
        arrays = without_forgotten(arrays, pieces)
    call = jax.jit(lambda *arrays: played(arrays, size, same=same, tokens=tokens, **options))
    given_to = of_constant_decays(arrays, tokens) if tokens else arrays
    found = call(*given_to)
    check(found, arrays, **options)
    for _ in range(20):
        assert (call(*given_to) == found).all()


def expected(local, total, seen, state, *, right, pieces, walked):
    """What each device's segments start from, piece by piece, in the dtype of the state."""
    R, B, P = local.shape[:3]
    pieces = pieces or P
    S = P // pieces
    found = [np.zeros((B, S, *state.shape[1:]), state.dtype) for _ in range(R)]
    for rank in range(R) if right else reversed(range(R)):
        for p in range(P):
            if p % pieces == 0:
                found[rank][:, p // pieces if right or walked else S - 1 - p // pieces] = state
            there = seen[rank, :, p, :, None, None] != 0
            state = state * np.exp(total[rank, :, p].astype(state.dtype))[..., None, None]
            state = state + np.where(there, local[rank, :, p], 0).astype(state.dtype)
    return found
