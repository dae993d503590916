import json
import os
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from keraunos.cli import doctor as doctor_module
from keraunos.cli.main import app


def _doctor(*options, path=None):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "keraunos", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)


def test_json_says_what_is_there():
    jax = pytest.importorskip("jax")
    done = _doctor("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["installed"]["jax"] == report["jax"]["versions"]["jax"]["value"] == jax.__version__
    assert report["jax"]["devices"]["value"][0] == "cpu:0 cpu"
    found = {framework: report[framework]["operations"]["value"] for framework in ("jax", "torch")}
    for framework, platform in (("jax", "xla"), ("torch", "torch")):
        assert found[framework].keys() == {"lightning_attention", "gla_attention", "gated_delta_rule", "attention"}
        for operation, platforms in found[framework].items():
            assert platforms["value"][platform] == platforms["value"]["auto"] == {"value": platform}, operation
            assert operation == "gated_delta_rule" or platforms["value"]["triton"].get("error")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("raise ImportError('half of it is missing')", "ImportError: half of it is missing"),
        ("raise SystemExit(7)", "ended with status 7"),
        ("import os; os.abort()", "ended with status -6"),
        ("print('noise'); import os; os._exit(0)", "no answer"),
        ("__version__ = '0'", "AttributeError"),
    ],
)
def test_broken_frameworks_are_named(tmp_path, broken, reason):
    for module in ("jax", "torch"):
        (tmp_path / f"{module}.py").write_text(broken)
    done = _doctor("--json", path=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert reason in json.dumps(report["jax"])
    assert reason in json.dumps(report["torch"])
    if "ImportError" in reason:
        assert _doctor(path=tmp_path).stdout.count(reason) >= 2


def test_what_a_framework_prints_at_its_end_is_no_answer(tmp_path):
    (tmp_path / "torch.py").write_text("import atexit; atexit.register(print, '{}'); __version__ = '1.2.3'")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "from keraunos.cli import doctor; print(doctor._probe('torch'))"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "{'value': '1.2.3'}" in done.stdout


@pytest.fixture
def unasked(monkeypatch):
    """No probe is started; each of them answers with what is put here."""
    answer = {"error": "not asked"}
    monkeypatch.setattr(doctor_module, "_probe", lambda subject: answer)
    return answer


def test_what_comes_from_files_is_shown_as_text(unasked, monkeypatch):
    unasked["error"] = "[/bold] [B, T] \x1b]0;title\x07 :smile:"
    monkeypatch.setattr(doctor_module, "_installed", lambda: {"jax": "1\x1b[31m", "torch": None})
    monkeypatch.setenv("KERAUNOS_LOG", "\x1b[2J")
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert result.stdout.count("[/bold] [B, T] ·]0;title· :smile:") > 5
    for expected in ("1·[31m", "KERAUNOS_LOG=·[2J"):
        assert expected in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(("folder", "shown"), [("/somewhere", "/somewhere/configurations"),
                         ("~nosuchuser/x", "none: KERAUNOS_CACHE_DIR is '~nosuchuser/x'")])
def test_the_cache_is_named(unasked, monkeypatch, folder, shown):
    monkeypatch.setenv("KERAUNOS_CACHE_DIR", folder)
    assert f"cache: {shown}" in CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor"]).stdout
    (finding,) = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["cache"].values()
    assert finding.startswith(shown)


def test_probe_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor_module, "_SECONDS", 0.01)
    began = time.monotonic()
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    assert time.monotonic() - began < 10
    report = json.loads(done.stdout)
    assert all("no answer within" in report[subject]["error"] for subject in ("jax", "torch", "gpu"))


def test_help_is_quick_because_no_framework_is_loaded():
    look = "import sys, keraunos.cli.main; print({'jax', 'torch', 'numpy', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    for command in ((), ("doctor",), ("explain",), ("tune",), ("cache",), ("bench",)):
        assert CliRunner().invoke(app, [*command, "--help"]).exit_code == 0


def test_help_shows_what_is_in_brackets():
    output = CliRunner().invoke(app, ["explain", "--help"], env={"COLUMNS": "200"}).output
    assert "where a shape has none. [default: bfloat16]" in output


def test_what_is_not_installed_is_named():
    code = "import sys, keraunos.cli; sys.modules['typer'] = None; keraunos.cli.run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "keraunos: the command line needs typer: pip install 'keraunos[cli]'\n"
    assert done.returncode == 1
