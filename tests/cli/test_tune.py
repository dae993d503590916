"""`keraunos tune` and `keraunos cache`."""

import errno
import json
import os

import pytest
from typer.testing import CliRunner

from keraunos.cli.main import app
from keraunos.kernels.linear_attention import cases as linear
from keraunos.kernels.softmax_attention import cases as softmax
from keraunos.ops import PersistentCache
from keraunos.ops import cache as cache_module

CASES = linear.CASES | softmax.CASES
SHAPE = "B=1,T=8,H=1,K=16,dtype=float32,gate=constant"


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAUNOS_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(cache_module, "shipped_directory", lambda: tmp_path / "shipped")

    def invoke(*arguments, code=0):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if "--json" in arguments else result.output

    return invoke


def test_tune_then_look_then_clear(run, tmp_path):
    report = run("tune", "gla", "--shape", SHAPE, "--budget", "120", "--ship", "--json")
    (tuned,) = report["tuned"]
    assert tuned["stored"]
    assert [m["config"]["block_q"] for m in tuned["measurements"]] == [32, 16, 64, 128, 256]
    assert all(m["rounds"] >= 1 for m in tuned["measurements"])
    assert json.loads((tmp_path / "shipped" / "cpu.json").read_text())["entries"].keys() == {tuned["key"]}

    assert run("cache", "path", "--json") == {"path": str(tmp_path / "user" / "configurations")}
    (file,) = run("cache", "list", "--json")["files"]
    assert (file["file"], file["entries"]) == (str(tmp_path / "user" / "configurations" / "cpu.json"), 1)
    entries = run("cache", "show", "--json")["entries"]
    assert entries[tuned["key"]]["winner"] == tuned["winner"]
    assert tuned["key"] in run("cache", "show", "--only", "gla |")
    assert run("cache", "show", "--only", "lightning") == "no such entry\n"
    assert run("cache", "clear", "--only", "lightning", "--json") == {"dropped": 0, "failed": []}
    assert run("cache", "clear", "--json") == {"dropped": 1, "failed": []}
    assert run("cache", "show", "--json") == {"entries": {}}


@pytest.mark.parametrize("command", ["list", "show", "clear"])
def test_a_damaged_file_is_moved_aside(run, tmp_path, command):
    folder = tmp_path / "user" / "configurations"
    folder.mkdir(parents=True)
    (folder / "cpu.json").write_bytes(b"\xff{")
    run("cache", command)
    assert run("cache", "list", "--json")["files"] == []
    assert (folder / "cpu.json.aside-1").exists()


def test_the_table_has_every_candidate(run):
    table = run("tune", "lightning_attention", "--shape", "T=8,H=1,K=16,dtype=float32", "--budget", "120")
    for size in (16, 32, 64, 128, 256):
        assert f"block_q={size}" in table
    assert table.count("chosen") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gal", "--cases"], "'gal' is none of lightning_attention, gla_attention, attention"),
        (["gla"], "what to tune for"),
        (["gla", "--shape", "T"], "expected NAME=VALUE"),
        (["gla", "--shape", "T=8,H=1,K=16,gate=no"], "gate is 'no'; expected one of"),
        (["gla", "--shape", "T=8,H=3,K=16,G=2"], "G a divisor of H"),
        (["gla", "--shape", "T=8,H=3,K=16,Q=2"], "gla has no Q; it has "),
        (["gla", "--shape", "H=3"], "H=3: gla needs T, K as well"),
        (["attention", "--shape", "B=x,T=8,H=1,K=16"], "B is 'x'; expected a whole number"),
        (["gla", "--shape", "B=1,T=-8,H=1,K=16"], "T is '-8'; expected a whole number"),
        (["gla", "--case", "no model"], "'no model' is none of"),
        (["gla", "--shape", SHAPE, "--platform", "tritom"], "unknown platform 'tritom'"),
        (["gla", "--shape", SHAPE, "--framework", "numpy"], "for --framework: 'numpy' is none of jax, torch"),
        (["gla", "--shape", SHAPE, "--budget", "0"], "no positive number of seconds"),
        (["gla", "--shape", SHAPE, "--budget", "nan"], "no positive number of seconds"),
    ],
)
def test_what_is_wrong_is_said(run, arguments, message):
    output = run("tune", *arguments, code=2)
    assert message in " ".join(output.replace("│", " ").split())


def test_what_could_not_be_done_is_the_exit_code(run, tmp_path, monkeypatch):
    (tuned,) = run("tune", "gla", "--shape", SHAPE, "--platform", "pallas", "--json", code=1)["tuned"]
    assert "pallas: needs a gpu device" in tuned["error"]
    (tuned,) = run("tune", "attention", "--shape", "T=8,H=1,K=16", "--platform", "pallas", "--json", code=1)["tuned"]
    assert "platform 'pallas' does not have it" in tuned["error"]

    PersistentCache("configurations").put("a key", "cpu", {"winner": {"block_q": 16}})

    def fail(*args):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", fail)
    assert "not stored: " in run("tune", "gla", "--shape", SHAPE, "--budget", "120", code=1)
    file = str(tmp_path / "user" / "configurations" / "cpu.json")
    assert run("cache", "clear", "--json", code=1) == {"dropped": 0, "failed": [file]}


@pytest.mark.parametrize(("operation", "name"), [(op, name) for op, cases in CASES.items() for name in cases])
def test_every_case_is_a_call(operation, name):
    from keraunos.cli.tune import _operation

    kernel, cases = _operation(operation)
    inv = kernel.invocation("jax", **cases[name])
    assert inv.op_id == operation
    assert inv.dims["T"] >= 256
