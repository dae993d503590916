"""keraunos as a backend of fla's registry: what reaches it, and what is left to fla, with which reason."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from keraunos.compat import fla  # noqa: E402
from tests.compat import fla_registry  # noqa: E402

ROOT = Path(__file__).parents[2]
BACKEND = "keraunos.compat.fla_backend"
NAMES = [(package, name) for package, names in fla_registry.PACKAGES.items() for name in names]
H = 2


@pytest.fixture
def package(monkeypatch):
    """The stand-in, with the backend just imported."""
    for name, module in fla_registry.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    importlib.import_module(BACKEND)
    yield sys.modules
    monkeypatch.delitem(sys.modules, BACKEND)


def arguments(name):
    """A plain call of a function: q, k, v, then by names what it cannot do without."""
    tensors = [torch.ones(1, 5, H, 4) for _ in range(3)]
    beta, gate = torch.ones(1, 5, H), -torch.ones(1, 5, H, 4)
    own = {"chunk_gated_delta_rule": {"g": gate[..., 0], "beta": beta}, "chunk_gla": {"g": gate},
           "chunk_delta_rule": {"beta": beta}}
    if "kda" in name:
        return tensors, {"g": gate, "beta": beta}
    if "lightning" in name:
        return tensors, {"layer_idx": 0, "num_layers": 2}
    return tensors, own.get(name, {})


@pytest.mark.parametrize(("folder", "name"), NAMES)
def test_a_call_by_any_name_is_ours(package, folder, name, caplog):
    tensors, own = arguments(name)
    expected = getattr(fla, name)(*tensors, **own)[0]
    caplog.set_level("INFO", "fla.backends")
    for module in (f"fla.ops.{folder}", "fla.layers"):
        called = getattr(package[module], name)
        assert torch.equal(called(*tensors, **own)[0], expected)
        # Once more, as the same kind of call, and with all arguments by name.
        assert torch.equal(called(*tensors, **own)[0], expected)
        assert torch.equal(called(**dict(zip("qkv", tensors, strict=True)), **own)[0], expected)
    assert {record.getMessage() for record in caplog.records} == {f"{name} -> keraunos None"}


def test_every_function_is_registered():
    aliases = {"chunk_gdn", "fused_recurrent_gdn"}
    assert {name for _, name in NAMES} == {*fla.__all__} - aliases - {"fused_chunk_gla"}


class Context:
    """As fla's: it has no hash."""

    __hash__ = None


@pytest.mark.parametrize(("name", "options", "reason"), [
    ("chunk_kda", {"cp_context": Context()}, "chunk_kda: cp_context is given"),
    ("chunk_gated_delta_rule", {"cp_context": Context()}, "chunk_gated_delta_rule: cp_context is given"),
    ("fused_recurrent_gla", {"gv": -torch.ones(1, 5, H, 4)}, "fused_recurrent_gla: gv is given"),
    ("chunk_kda", {"chunk_size": 16}, "chunk_kda: chunk_size is 16"),
    ("chunk_delta_rule", {"initial_state": torch.ones(3, H, 4, 4)}, "gated_delta_rule: initial_state has shape"),
])
def test_what_is_refused_is_left_to_fla(package, name, options, reason, caplog):
    tensors, own = arguments(name)
    caplog.set_level("INFO", "fla.backends")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="fla's own kernel"):
            getattr(package["fla.layers"], name)(*tensors, **own, **options)
    assert all(record.getMessage().startswith(f"{name} -> keraunos rejected: {reason}") for record in caplog.records)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("platform", ["torch", "triton"])
def test_a_call_that_only_plain_operations_can_run_is_left_to_fla_on_gpus(package, monkeypatch, platform):
    choice = SimpleNamespace(platform=platform, passed=["triton: K is 1024", "xla: takes jax arrays"])
    monkeypatch.setattr(package[BACKEND], "explain", lambda *args, **kwargs: choice)
    tensors, own = arguments("chunk_kda")
    verify = package[BACKEND]._verifier(fla.chunk_kda)
    assert verify(*tensors, **own) == (True, None)
    reason = "no kernel of keraunos can run the call: triton: K is 1024; xla: takes jax arrays"
    expected = (False, reason) if platform == "torch" else (True, None)
    assert verify(*(x.to("meta") for x in tensors), **own) == expected


def test_the_environment_leaves_all_to_fla(package, monkeypatch):
    tensors, own = arguments("chunk_kda")
    monkeypatch.setenv("FLA_KERAUNOS", "0")
    with pytest.raises(NotImplementedError, match="fla's own kernel"):
        package["fla.layers"].chunk_kda(*tensors, **own)


def test_fla_that_asks_no_backend_is_an_error(package, monkeypatch):
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH is 1; expected it not to be set"):
        package[BACKEND].register()


def test_registered_twice_is_registered_once(package):
    tensors, own = arguments("chunk_gla")
    package[BACKEND].register()
    assert torch.equal(package["fla.layers"].chunk_gla(*tensors, **own)[0], fla.chunk_gla(*tensors, **own)[0])


REAL = """
import importlib, torch, {backend}
from keraunos.compat import fla
from tests.compat.test_fla_backend import NAMES, arguments
for folder, name in NAMES:
    tensors, own = arguments(name)
    found = getattr(importlib.import_module(f"fla.ops.{{folder}}"), name)(*tensors, **own)
    assert torch.equal(found[0], getattr(fla, name)(*tensors, **own)[0]), name
from fla.ops.gated_delta_rule import chunk_gdn, fused_recurrent_gdn
for called in (chunk_gdn, fused_recurrent_gdn):
    tensors, own = arguments("chunk_gated_delta_rule")
    assert torch.equal(called(*tensors, **own)[0], fla.chunk_gdn(*tensors, **own)[0])
"""


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla-core is not installed")
def test_the_real_package_asks_us():
    """A CPU is enough: a call that did not reach us would need fla's kernels, which run on GPUs."""
    code = REAL.format(backend=BACKEND)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
