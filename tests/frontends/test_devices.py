"""The front ends' descriptions of a device: its shared memory above all, of which JAX has to be told."""

from types import SimpleNamespace

import pytest

from keraunos import frontends


@pytest.mark.parametrize(("name", "properties", "shared"), [
    ("NVIDIA L4", dict(shared_memory_per_block_optin=101376, shared_memory_per_block=49152), 101376),
    ("NVIDIA H200", dict(shared_memory_per_block_optin=232448, shared_memory_per_block=49152), 232448),
    ("AMD Instinct MI300X", dict(shared_memory_per_block=65536), 65536),
])
def test_torch_asks_the_gpu(monkeypatch, request, name, properties, shared):
    torch = pytest.importorskip("torch")
    has = SimpleNamespace(name=name, **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: has)
    # Devices are described once: no other test has one of this number.
    x = SimpleNamespace(device=SimpleNamespace(type="cuda", index=hash(name)))
    assert frontends.get("torch").device_of(x)[:3] == ("gpu", name, shared)


@pytest.mark.parametrize(("platform", "capability", "shared"), [
    ("cuda", "8.0", 166912), ("cuda", "8.6", 101376), ("cuda", "8.7", 166912), ("cuda", "8.9", 101376),
    ("cuda", "9.0", 232448), ("cuda", "10.0", 232448), ("cuda", "12.0", 101376), ("cuda", "99.0", 101376),
    ("rocm", "gfx942:sramecc+:xnack-", 65536), ("rocm", "gfx950", 163840),
])
def test_jax_knows_capabilities(platform, capability, shared):
    pytest.importorskip("jax")
    device = _Device(platform, capability)
    found = frontends.get("jax").device_of(SimpleNamespace(devices=lambda: {device}))
    assert found[:3] == ("gpu", "a GPU", shared)


class _Device:
    """Stands for a device of JAX."""

    device_kind = "a GPU"

    def __init__(self, platform, capability):
        self.platform, self.compute_capability = platform, capability


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_without_a_gpu_it_is_as_on_hopper(framework):
    """So that what is lowered ahead for a GPU gets what the most are run on; the launch takes what fits."""
    pytest.importorskip(framework)
    device = frontends.get(framework).default_device()
    if device.backend != "gpu":
        assert device.shared_memory == 232448
