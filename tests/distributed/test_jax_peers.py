"""Which of two ways devices of JAX take to exchange states: what is known of them when a program is lowered."""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
from jax.interpreters.mlir import SPMDAxisContext
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.linear_attention.cases import GPU

if jax.__version_info__ < (0, 11):
    pytest.skip("needs jax 0.11, as the kernel does", allow_module_level=True)
if len(jax.devices()) < 4:
    pytest.skip("needs four devices", allow_module_level=True)

from keraunos.distributed import peers
from keraunos.distributed.jax import peers as jax_peers

NAMES = ("data", "tokens")


def mesh_of(*numbers):
    return Mesh(np.array([jax.devices()[n] for n in numbers]).reshape(2, 2), NAMES)


@pytest.mark.skipif(GPU, reason="of devices that reach each other's memory in no way")
@pytest.mark.parametrize("check_vma", [True, False])
def test_only_one_way_is_in_the_program(check_vma):
    def directly(x, rank):
        return {"y": jax.numpy.sin(x["y"]) + rank}["y"]

    def otherwise(x, rank):
        return jax.lax.psum(x["y"], NAMES) + np.arange(3, dtype=np.float32) + rank

    def call(x):
        return jax_peers.exchange(directly, otherwise, {"y": x}, jax.lax.axis_index(NAMES).astype(x.dtype))

    mapped = jax.shard_map(call, mesh=mesh_of(0, 1, 2, 3), in_specs=P(NAMES), out_specs=P(NAMES), check_vma=check_vma)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    program = jax.jit(mapped).lower(x)
    assert "sine" not in program.as_text()
    np.testing.assert_array_equal(program.compile()(x), x.sum(0) + np.arange(3) + np.arange(4)[:, None])


@pytest.mark.parametrize(("numbers", "manual", "environment", "reason"), [
    ((0, 1, 2, 3), NAMES, "0", "KERAUNOS_PEERS is 0"),
    ((0, 1, 2, 3), NAMES[1:], "", "not all axes of the mesh are those of a shard_map"),
    ((0, 2, 1, 3), NAMES, "", "the mesh has the devices in another order than jax.devices()"),
    pytest.param((0, 1, 2, 3), NAMES, "", "a device is not a Hopper GPU (H100, H200)",
                 marks=pytest.mark.skipif(GPU, reason="these may be")),
])
def test_what_speaks_against_it(numbers, manual, environment, reason, monkeypatch):
    monkeypatch.setenv("KERAUNOS_PEERS", environment)
    assert jax_peers.unreachable(SPMDAxisContext(mesh_of(*numbers), frozenset(manual))) == reason


def test_a_mesh_without_devices():
    context = SPMDAxisContext(mesh_of(0, 1, 2, 3).abstract_mesh, frozenset(NAMES))
    assert "not all axes" in jax_peers.unreachable(context)


def test_the_driver_is_asked_of_every_device(monkeypatch):
    asked = []
    monkeypatch.setattr(jax_peers, "HOPPER", ("one of these", "."))
    monkeypatch.setattr(peers, "without_atomics", lambda gpu, others: asked.append((gpu, others)) or "")
    monkeypatch.delenv("KERAUNOS_PEERS", raising=False)
    assert "more than two devices" in jax_peers.unreachable(SPMDAxisContext(mesh_of(0, 1, 2, 3), frozenset(NAMES)))
    monkeypatch.setenv("KERAUNOS_PEERS", "1")
    assert jax_peers.unreachable(SPMDAxisContext(mesh_of(0, 1, 2, 3), frozenset(NAMES))) == ""
    numbers = {device.local_hardware_id for device in jax.devices()[:4]}
    assert asked == [(n, numbers) for n in numbers]
    monkeypatch.setattr(peers, "without_atomics", lambda gpu, others: "no" if gpu == max(others) else "")
    assert jax_peers.unreachable(SPMDAxisContext(mesh_of(0, 1, 2, 3), frozenset(NAMES))) == "no"
