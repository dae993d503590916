"""The harness of the benchmarks: options, clocks, results; and that each script still takes its options."""

import importlib
import json
import runpy
import sys
from pathlib import Path

import harness
import measuring
import pytest
from contestants import find
from first_call import first_call
from workloads import Shape, Workload

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
TINY = Workload("lightning_attention", Shape(1, 16, 1, 16, 16), "float32")


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Options as a script has them, whose results are in a folder of the test."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")

    def read(*arguments, seconds=100.0):
        return harness.parser("A script.", "some", seconds, ("one", "other")).parse_args(arguments)

    return read


def test_names_are_all_or_those_asked_for(options, capsys):
    assert options().names == ["one", "other"]
    assert options("other").names == ["other"]
    with pytest.raises(SystemExit):
        options("another")
    assert "'another'; expected one of one, other" in capsys.readouterr().err


def test_what_other_runs_measured_stays(options, tmp_path):
    run = harness.Run(options(), "jax", keep=True)
    assert (run.results, run.path) == ({}, tmp_path / "results" / "some" / "cpu.json")
    run.results["one"] = 1
    run.save()
    run = harness.Run(options("--out", str(tmp_path / "elsewhere")), "jax", keep=True)
    run.results["other"] = 2
    run.save()
    assert run.path == tmp_path / "elsewhere" / "cpu.json"
    assert json.loads(run.path.read_text()) == {"one": 1, "other": 2}
    run = harness.Run(options("--out", str(tmp_path / "elsewhere" / "other.json")), "jax")
    assert (run.results, run.path.name) == ({}, "other.json")


def test_cases_are_written_one_by_one_and_what_was_left_out_is_named(options, monkeypatch):
    monkeypatch.setattr(measuring, "copy_bandwidth", lambda: 1e9)
    run = harness.Run(options(), "jax")
    section, written = run.section("one", more="known"), []
    assert section["about"].items() >= {"device": "cpu", "copy_bandwidth": 1e9, "more": "known"}.items()
    monkeypatch.setattr(run, "save", lambda: written.append(json.loads(json.dumps(run.results["one"]))))
    contestants = find(TINY.operation, ["xla"], [])

    def calls():
        yield TINY, contestants
        run.began -= 200
        yield TINY, contestants

    run.compare(section, calls(), measuring.Effort(rounds=2, seconds=0))
    assert [(len(x["cases"]), len(x["left_out"])) for x in written] == [(1, 0), (1, 1)]
    assert section["cases"][0]["contestants"]["xla (jax)"]["median_s"] > 0
    assert section["left_out"] == [{"workload": str(TINY), "reason": "100 s were over"}]


def test_the_wall_clock_waits_for_the_last_call():
    now, done = [0.0], []

    def call():
        now[0] += 1.0
        return len(done)

    def finish(results):
        done.append(results)
        now[0] += 2.0

    assert harness.wall(call, 4, finish, clock=lambda: now[0]) == 1.5
    assert done == [0]


def test_timers_take_turns():
    asked = []
    timers = {name: lambda name=name: asked.append(name) or len(asked) for name in "ab"}
    assert harness.in_turns(timers, 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}


def test_a_first_call_is_timed_in_a_process_of_its_own():
    assert first_call(TINY, "xla", "jax", {"PYTHONPATH": str(SCRIPTS.parent)}, seconds=300) > 0
    failed = first_call(TINY, "fla", "torch", {"PYTHONPATH": str(SCRIPTS.parent)}, seconds=300)
    assert failed.startswith("its first call failed: ")


@pytest.mark.parametrize(
    "script",
    ["accuracy", "attention", "compare", "concurrency", "cpu", "delta_rule", "dispatch", "distributed", "faults",
     "first_call", "gpu", "models", "pools", "serving", "training", "variants"],
)
def test_scripts_take_their_options(script, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert ("--out" in printed) == (script not in ("concurrency", "dispatch", "faults"))


def test_models_are_compared_with_what_would_run_without_keraunos(tmp_path, monkeypatch):
    for name in ("torch", "transformers"):
        pytest.importorskip(name)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", importlib.import_module("keraunos.compat.fla"))
    monkeypatch.setattr(sys, "argv", ["models", "--small", "--out", str(tmp_path / "found.json")])
    runpy.run_path(str(SCRIPTS / "models.py"), run_name="__main__")
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(rows) == 11
    for row in rows:
        assert "keraunos" in row["costs"] or "plugin" in row["costs"], row
    assert sum("fla" in row["costs"] for row in rows) == 4
    assert rows[-1]["errors"]["without fla"].startswith("ModuleNotFoundError")


@pytest.mark.parametrize("script", ["accuracy", "attention", "delta_rule", "gpu", "variants"])
def test_no_gpu_is_said(script, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(measuring, "on_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    assert "no framework that is installed sees a GPU" in capsys.readouterr().err


def test_the_distance_is_relative_and_in_float64():
    torch = pytest.importorskip("torch")
    true = torch.full((3, 4), 2.0, requires_grad=True)
    assert harness.distance(true.bfloat16() * 1.5, true) == 0.5
    # In float32 this difference would be lost.
    assert harness.distance(torch.tensor([1.0 + 2**-40], dtype=torch.float64), torch.ones(1)) == 2**-40
