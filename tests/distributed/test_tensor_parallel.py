"""Tensor parallelism in PyTorch: each rank's heads, between the halves of the projections around them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from keraunos import decay  # noqa: E402
from keraunos.kernels.linear_attention.reference import linear_attention  # noqa: E402
from keraunos.kernels.linear_attention.reference_vjp import linear_attention_vjp  # noqa: E402
from tests.distributed.worlds import worlds  # noqa: E402
from tests.linear_attention.cases import GPU  # noqa: E402
from tests.numerics import assert_within_rule  # noqa: E402

B, T, H, K, WIDTH = 2, 40, 4, 16, 24


def weights(dtype):
    """The input, the projections to queries, keys and values, that of the output, and the output's gradient."""
    rng = np.random.default_rng(0)
    shapes = ((B, T, WIDTH), (WIDTH, H * K), (WIDTH, H * K), (WIDTH, H * K), (H * K, WIDTH), (B, T, WIDTH))
    return [rng.standard_normal(shape).astype("float32").astype(dtype) / 4 for shape in shapes]


def sharded(rank, size):
    """``[output, gradients of input and output projection]`` of a layer of which each rank has some heads."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    import keraunos

    mesh = init_device_mesh("cpu", (size,))
    x, *inner, outer, gradient = map(torch.from_numpy, weights("float32"))
    x = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    inner = [distribute_tensor(w, mesh, [Shard(1)]) for w in inner]
    outer = distribute_tensor(outer, mesh, [Shard(0)]).requires_grad_()
    # The local heads are contiguous columns.
    local = ((x @ w).to_local().reshape(B, T, -1, K) for w in inner)
    log_decay = np.array_split(decay.lightning(H, 1, 4), size)[rank]
    o = keraunos.lightning_attention(*local, log_decay=log_decay)
    y = DTensor.from_local(o.reshape(B, T, -1), mesh, [Shard(2)]) @ outer
    y = y.redistribute(placements=[Replicate()])
    y.to_local().backward(gradient)
    return [z.full_tensor().detach().numpy() for z in (y, x.grad, outer.grad)]


def refusals(rank, size):
    """The errors of linear attention and of a step of serving for DTensors."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    import keraunos

    mesh = init_device_mesh("cpu", (size,))
    q, pool = (
        distribute_tensor(torch.ones(shape), mesh, [Shard(n)]) for shape, n in (((B, T, H, K), 2), ((3, H, K, K), 1))
    )
    slots = torch.tensor([0, 1])
    found = []
    for call in (
        lambda: keraunos.gla_attention(q, q, q),
        lambda: keraunos.lightning_attention(q, q, q, layer_idx=0, num_layers=2),
        lambda: keraunos.gla_attention(q.to_local(), q.to_local(), q.to_local(), q),
        lambda: keraunos.serving.decode(q[:, 0], q[:, 0], q[:, 0], pool, slots),
    ):
        try:
            call()
        except TypeError as error:
            found.append(str(error))
    return found


def whole(dtype):
    """The output and gradients of the layer in NumPy, not sharded."""
    x, *inner, outer, gradient = weights(dtype)
    q, k, v = ((x @ w).reshape(B, T, H, K) for w in inner)
    gamma = decay.lightning(H, 1, 4).astype(dtype)
    do = (gradient @ outer.T).reshape(B, T, H, K)
    o = linear_attention(q, k, v, None, gamma, dtype=dtype)[0]
    found = linear_attention_vjp(q, k, v, None, gamma, None, None, do, None, dtype=dtype)
    dx = sum(d.reshape(B, T, -1) @ w.T for d, w in zip(found[:3], inner, strict=True))
    return [o.reshape(B, T, -1) @ outer, dx, np.einsum("bti,btj->ij", o.reshape(B, T, -1), gradient)]


@pytest.fixture(scope="module")
def pair():
    with worlds() as world:
        yield world(2)


@pytest.mark.skipif(GPU, reason="runs on the host's processes")
def test_dtensors_are_refused_with_what_to_do(pair):
    text = "got a DTensor; expected each rank's own heads or sequences, x.to_local()"
    for said in pair.run(refusals):
        assert [x.split(text)[0] for x in said] == [
            "gla_attention: ", "lightning_attention: ", "gla_attention: ", "decode: ",
        ]


@pytest.mark.skipif(GPU, reason="runs on the host's processes")
def test_heads_of_a_layer_over_ranks(pair):
    for got in pair.run(sharded):
        assert_within_rule(["output", "dx", "dw"], got, whole(np.float64), whole(np.float32), ["float32"] * 3)
