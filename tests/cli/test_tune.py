"""`keraunos tune` and `keraunos cache`."""

import errno
import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from keraunos.cli import calls
from keraunos.cli.main import app
from keraunos.kernels.linear_attention import cases as linear
from keraunos.kernels.softmax_attention import cases as softmax
from keraunos.ops import Config, PersistentCache, tuner
from keraunos.ops import cache as cache_module
from keraunos.ops.tuner import Measurement, TuneResult

CASES = linear.CASES | softmax.CASES
SHAPE = "B=1,T=8,H=1,K=16,dtype=float32,gate=constant"


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAUNOS_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(cache_module, "shipped_directory", lambda: tmp_path / "shipped")

    def invoke(*arguments, code=0, columns=200):
        result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(arguments))
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
        (["gal", "--cases"], "'gal' is none of lightning_attention, gla_attention, gated_delta_rule, attention"),
        (["gla"], "what to tune for"),
        (["gla", "--shape", "T"], "expected NAME=VALUE"),
        (["gla", "--shape", "T=8,H=1,K=16,gate=no"], "gate is 'no'; expected one of"),
        (["gla", "--shape", "T=8,H=3,K=16,G=2"], "G a divisor of H"),
        (["gla", "--shape", "T=8,H=3,K=16,Q=2"], "gla has no Q; it has "),
        (["gla", "--shape", "H=3"], "H=3: gla needs T, K as well"),
        (["attention", "--shape", "B=x,T=8,H=1,K=16"], "B is 'x'; expected a whole number"),
        (["gla", "--shape", "B=1,T=-8,H=1,K=16"], "T is '-8'; expected a whole number"),
        (["gla", "--shape", "T=²"], "T is '²'; expected a whole number"),
        (["gla", "--shape", "T=٣"], "T is '٣'; expected a whole number"),
        (["gla", "--shape", f"T={2**31},H=1,K=16"], "T is 2147483648; expected a whole number up to 2147483647"),
        (["gla", "--shape", "T=8,T=9,H=1,K=16"], "has T twice"),
        (["gla", "--shape", "T=8,H=1,K=16,state=yes"], "state is 'yes'; expected true or false"),
        (["attention", "--shape", "T=8,H=1,K=16,causal=1"], "causal is 1; expected true or false"),
        (["attention", "--shape", "T=8,H=1,K=16,sinks=true"], "sinks is True; expected a whole number"),
        (["gla", "--case", "no model"], "'no model' is none of"),
        (["gla", "--shape", SHAPE, "--platform", "tritom"], "unknown platform 'tritom'"),
        (["gla", "--shape", SHAPE, "--framework", "numpy"], "for --framework: 'numpy' is none of jax, torch"),
        (["gla", "--shape", SHAPE, "--budget", "0"], "not a positive number of seconds"),
        (["gla", "--shape", SHAPE, "--budget", "nan"], "not a positive number of seconds"),
    ],
)
def test_what_is_wrong_is_said(run, arguments, message):
    output = run("tune", *arguments, code=2)
    assert message in " ".join(output.replace("│", " ").split())


def test_what_could_not_be_done_is_the_exit_code(run, tmp_path, monkeypatch):
    (tuned,) = run("tune", "gla", "--shape", SHAPE, "--platform", "pallas", "--json", code=1)["tuned"]
    assert "pallas: needs a tpu device" in tuned["error"]
    (tuned,) = run("tune", "attention", "--shape", "T=8,H=1,K=16", "--platform", "pallas", "--json", code=1)["tuned"]
    assert "pallas: needs a tpu device" in tuned["error"]

    PersistentCache("configurations").put("a key", "cpu", {"winner": {"block_q": 16}})

    def fail(*args):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", fail)
    assert "not stored: " in run("tune", "gla", "--shape", SHAPE, "--budget", "120", code=1)
    file = str(tmp_path / "user" / "configurations" / "cpu.json")
    assert run("cache", "clear", "--json", code=1) == {"dropped": 0, "failed": [file]}


def test_a_shape_that_cannot_be_measured_does_not_end_the_others(run, monkeypatch):
    def tune(self, kernel, inv, *args, **kwargs):
        if inv.dims["T"] == 8:
            raise MemoryError("too little of it")
        return TuneResult(Config(block_q=16), (), False, "a note")

    monkeypatch.setattr(tuner.Tuner, "tune", tune)
    shapes = [option for T in (8, 9) for option in ("--shape", f"T={T},H=1,K=16")]
    first, second = run("tune", "gla", *shapes, "--json", code=1)["tuned"]
    assert (first["stored"], first["error"]) == (False, "MemoryError: too little of it")
    assert second["stored"]


def test_reasons_stand_below_the_table(run, monkeypatch):
    dropped = "wrong: output has [/error] 0.1,\x1b[31m\nallowed 0.01; " + "and so on " * 12
    found = [Measurement(Config(block_q=16), (1e-6, 2e-6, 3e-6)), Measurement(Config(block_q=32), (), dropped)]
    monkeypatch.setattr(tuner.Tuner, "tune", lambda *a, **k: TuneResult(Config(block_q=16), tuple(found), False, "!"))
    table = run("tune", "gla", "--shape", SHAPE, columns=80)
    assert max(map(len, table.splitlines())) <= 80
    assert "\x1b" not in table
    table, _, reasons = table.partition("Dropped:")
    assert "block_q=16" in table
    assert "block_q=32" not in table
    assert "block_q=32 wrong: output has [/error] 0.1,·[31m allowed 0.01; and so on" in " ".join(reasons.split())


HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e\x9b31m"


def store(tmp_path, entries):
    folder = tmp_path / "user" / "configurations"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.json").write_text(json.dumps({"schema": 1, "device": "cpu", "entries": entries}))


def test_entries_that_are_not_ours_are_shown_as_far_as_they_can_be(run, tmp_path):
    median = {"config": {"block_q": 16}, "microseconds": {"median": 5.5}}
    store(tmp_path, {
        "whole": {"winner": {"block_q": 16, "platform": "xla"}, "note": "n", "measurements": [
            {"config": {"block_q": 16, "platform": "xla"}, "microseconds": {"median": 1.25}}, {"config": {}}]},
        "empty": {}, "null": {"winner": None, "measurements": None}, "text": {"measurements": "text"},
        "number": {"measurements": 5}, "of others": {"winner": {"block_q": 16}, "measurements": [1, None, [], median]},
        "no median": {"winner": {}, "measurements": [{"config": {}, "microseconds": 3}]},
    })
    lines = run("cache", "show").splitlines()
    shown = dict(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))
    assert shown["whole"] == "block_q=16 · 1.25 µs · of 2 candidates · n"
    assert shown["of others"] == "block_q=16 · 5.5 µs · of 1 candidates"
    assert len(run("cache", "show", "--json")["entries"]) == len(shown) == 7


def test_nothing_in_a_file_or_its_name_reaches_the_terminal_as_a_command(run, tmp_path):
    entry = {"winner": {HOSTILE: HOSTILE}, "measurements": [{"config": {HOSTILE: HOSTILE},
             "microseconds": {"median": HOSTILE}}], "note": f"a\nb{HOSTILE}"}
    store(tmp_path, {f"gla | {HOSTILE}\nanother key": entry, "gla | \ud800": entry})
    folder = tmp_path / "user" / "configurations"
    (folder / f"{HOSTILE}.json").write_text("{")
    (folder / "x\x1b[31m.json").write_text('{"schema": 1, "entries": {}}')
    for command in ("list", "show", "path", "clear"):
        output = run("cache", command)
        assert all(c.isprintable() or c == "\n" for c in output), repr(output)
    assert len(run("cache", "list").splitlines()) == 2


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda some: (
        st.lists(some, max_size=3)
        | st.dictionaries(
            st.sampled_from(["config", "microseconds", "median", "block_q"]) | st.text(max_size=4), some, max_size=4
        )
    ),
    max_leaves=15,
)


OURS = st.fixed_dictionaries({}, optional=dict.fromkeys(["winner", "measurements", "note"], ANY))


@given(st.dictionaries(st.text(), OURS | st.dictionaries(st.text(), ANY)))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_json_an_entry_is_it_can_be_shown(run, tmp_path, entries):
    store(tmp_path, entries)
    output = run("cache", "show")
    assert all(c.isprintable() or c == "\n" for c in output)
    assert output.count("\n") == max(1, 2 * len(entries))
    assert run("cache", "show", "--json")["entries"].keys() == entries.keys()


def test_a_terminal_that_cannot_show_all_letters_gets_those_that_it_can(tmp_path):
    store(tmp_path, {"gla | ж": {"winner": {"block_q": 16}, "note": "µ"}})
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "KERAUNOS_CACHE_DIR": str(tmp_path / "user")}
    command = [sys.executable, "-m", "keraunos", "cache", "show"]
    done = subprocess.run(command, capture_output=True, encoding="latin-1", env=environment)
    assert (done.returncode, done.stdout) == (0, "gla | ?\n    block_q=16 · µ\n")


@pytest.mark.parametrize("command", ["path", "list", "show", "clear"])
def test_without_a_folder_the_reason_is_said(run, monkeypatch, command):
    monkeypatch.setenv("KERAUNOS_CACHE_DIR", "~nosuchuser/x")
    output = run("cache", command, code=1)
    assert "keraunos cache: there is no folder: KERAUNOS_CACHE_DIR is '~nosuchuser/x'" in output


@pytest.mark.parametrize(("operation", "name"), [(op, name) for op, cases in CASES.items() for name in cases])
def test_every_case_is_a_call(operation, name):
    found = calls.find_operation(operation)
    inv = found.kernel.invocation("jax", **found.cases[name])
    assert inv.op_id == operation
    assert inv.dims["T"] >= 256
