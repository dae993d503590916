"""The kernel in which devices hand over states, in JAX's interpreter, which has one device and no semaphores.

So devices come one after the other, in the order of the way, and what they write is kept for those after them.
"""

from unittest import mock

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

if jax.__version_info__ < (0, 11):
    pytest.skip("needs jax 0.11", allow_module_level=True)

import jax.numpy as jnp

from keraunos.kernels.linear_attention import pallas_exchange
from keraunos.kernels.linear_attention.pallas_program import _launch
from tests.linear_attention.cases import GPU
from tests.numerics import assert_within_rule
from tests.pallas.interpreter import _With, interpreted

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: test_gpu.py has the exchange on GPUs")


def on_device(rank, came, arrays, **options):
    """What a device's segments start from, and what it wrote, of what came there (None: nothing)."""
    read, written, results = [], [], []

    def launch(body, inputs, *, out_type, grid, barriers, **other):
        given = [x for x in inputs if x is not None]
        boxes, n = came or [jnp.full(x.shape, jnp.nan) for x in out_type[1:]], len(given)

        def split(indices, i_w, *refs):
            read[:], written[:] = refs[n : n + 2], refs[n + 3 :]
            body(indices, i_w, *refs[:n], refs[n + 2], *read)

        results[:] = _launch(split, [*given, *boxes], out_type=out_type, grid=grid, **other)
        return results

    def remote_ref(ref, other):
        return next(there for here, there in zip(read, written, strict=True) if ref is here)

    def nothing(*x, **more):
        pass

    plgpu = _With(pallas_exchange.plgpu, remote_ref=remote_ref)
    pl = _With(pallas_exchange.pl, get_global=mock.MagicMock(), semaphore_signal=nothing, semaphore_wait=nothing)
    lax = _With(pallas_exchange.lax, axis_index=lambda axis: jnp.int32(rank))
    patches = dict(plgpu=plgpu, pl=pl, lax=lax, _launch=launch, AHEAD=4)
    with interpreted(), mock.patch.multiple(pallas_exchange, **patches):
        starts = pallas_exchange.hand_over(*(x if x is None else x[rank] for x in arrays), axis="tokens", **options)
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


@pytest.mark.parametrize(("P", "pieces", "B", "H", "K", "right", "walked", "decay"), [
    (5, 2, 1, 1, 32, True, True, 0.5), (11, 2, 1, 1, 16, False, False, 5.0), (11, None, 1, 2, 16, True, True, 0.5),
    (3, 1, 2, 1, 16, False, True, 40.0),
])  # fmt: skip
def test_devices_hand_over(P, pieces, B, H, K, right, walked, decay):
    """Head h of H decays by ``exp(-(H - h) decay)`` over a piece."""
    R, V = 3, 64
    made = np.random.default_rng(0)
    local = made.standard_normal((R, P, B, H, K, V)).astype(np.float32)
    seen = (made.random((R, P, B, H)) < 0.8).astype(np.int32)
    start = made.standard_normal((B, H, K, V)).astype(np.float32)
    total = np.broadcast_to(-decay * np.arange(H, 0, -1, dtype=np.float32), (R, P, B, H)).copy()
    given = np.where(seen[..., None, None] != 0, local, np.nan)
    arrays = given, total, seen, [start] * R, None
    results = handed_over(arrays, R, right, pieces=pieces, walked=walked, same=True)
    truth, rough = (
        expected(given, total, seen, start.astype(dtype), right=right, pieces=pieces, walked=walked)
        for dtype in (np.float64, np.float32)
    )
    got = [np.asarray(x).reshape(y.shape) for x, y in zip(results, truth, strict=True)]
    assert_within_rule([f"device {rank}" for rank in range(R)], got, truth, rough, ["float32"] * R)


def expected(local, total, seen, state, *, right, pieces, walked):
    """What each device's segments start from, piece by piece, in the dtype of the state."""
    R, P, B = local.shape[:3]
    S = -(-P // pieces) if pieces else 1
    found = [np.zeros((B, S, *state.shape[1:]), state.dtype) for _ in range(R)]
    for rank in range(R) if right else reversed(range(R)):
        for i, p in enumerate(range(P) if right else reversed(range(P))):
            enters = i == 0 if not pieces else p % pieces == 0 if right else i == 0 or p % pieces == pieces - 1
            if enters:
                segment = p // pieces if pieces else 0
                found[rank][:, segment if right or not walked else S - 1 - segment] = state
            there = seen[rank, p][..., None, None] != 0
            state = state * np.exp(total[rank, p].astype(state.dtype))[..., None, None]
            state = state + np.where(there, local[rank, p], 0).astype(state.dtype)
    return found
