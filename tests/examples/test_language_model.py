import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from language_model import checkpoint, data, session, training
from language_model.command import app
from language_model.display import ByteDisplay, minutes
from language_model.interrupts import HeldBackInterrupt
from typer.testing import CliRunner

from keraunos.text import printable
from tests.examples.tiny import MODEL

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(monkeypatch, settings, prose, tmp_path):
    """Runs the command in this process, with a tiny model on a small text; with one block, which compiles faster."""
    one_block = dataclasses.replace(settings.model, blocks=("lightning",))
    text = tmp_path / "prose.txt"
    text.write_bytes(prose)

    def run(*options, text=text, out=tmp_path / "out"):
        tiny = functools.partial(training.Settings, model=one_block, batch=settings.batch)
        monkeypatch.setattr(session.training, "Settings", tiny)
        return CliRunner().invoke(app, ["--text", str(text), "--out", str(out), "--length", "40", *options])

    return run


def test_a_run_ends_with_three_checks_passed(demo, tmp_path):
    done = demo("--steps", "150")
    assert done.exit_code == 0, done.output
    assert re.findall(r"^(\d)\. (\w+)", done.output, re.M) == [("1", "passed"), ("2", "passed"), ("3", "passed")]
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {"checkpoint.npz", "loss.png", "text.txt"}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    held_out = (tmp_path / "prose.txt").read_bytes()[-len((tmp_path / "prose.txt").read_bytes()) // 10 :]
    assert len((out / "text.txt").read_bytes()) == 64 + 40
    assert (out / "text.txt").read_bytes()[:60] in held_out
    # A finished run is not trained again, and says the same.
    again = demo("--steps", "150")
    assert again.exit_code == 0
    assert "Training is complete" in again.output
    assert (
        again.output[again.output.index("1. passed") :].splitlines()[:8]
        == (done.output[done.output.index("1. passed") :].splitlines()[:8])
    )


def test_failed_check_is_the_exit_code(demo, monkeypatch):
    monkeypatch.setattr(data, "bigram_bits_per_byte", lambda train, windows: 0.0)
    done = demo("--steps", "2")
    assert done.exit_code == 1
    assert "3. FAILED" in done.output
    assert "1. passed" in done.output


def test_corrupt_checkpoint_is_kept_and_training_starts_afresh(demo, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint.npz").write_bytes(b"damaged")
    done = demo("--steps", "2")
    assert done.exit_code in (0, 1)
    assert "kept as checkpoint.npz.corrupt-1, training starts afresh" in done.output
    assert (tmp_path / "out" / "checkpoint.npz.corrupt-1").read_bytes() == b"damaged"
    assert checkpoint.load(tmp_path / "out" / "checkpoint.npz")[1]["step"] == 2


def test_other_seed_needs_fresh(demo, tmp_path):
    demo("--steps", "2")
    refused = demo("--steps", "2", "--seed", "1")
    assert refused.exit_code == 2
    assert "another seed: give --fresh" in refused.output
    assert demo("--steps", "3", "--seed", "1", "--fresh").exit_code in (0, 1)
    assert checkpoint.load(tmp_path / "out" / "checkpoint.npz")[1]["step"] == 3


def test_unusable_arguments_are_refused_in_one_line_before_training(demo, tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    for options, places, message in (
        ((), {"text": tmp_path / "none"}, "cannot read"),
        ((), {"text": tmp_path}, "cannot read"),
        ((), {"text": empty}, "has 0 bytes; at least"),
        ((), {"out": empty}, "cannot write into"),
        ((), {"out": empty / "below"}, "cannot write into"),
        (("--platform", "abacus"), {}, "--platform abacus: .*unknown platform"),
        (("--platform", "pallas", "--layers", "delta"), {}, "--platform pallas: .*gated_delta_rule"),
        (("--layers", "abacus"), {}, "--layers abacus: expected lightning, gla, delta"),
    ):
        done = demo("--steps", "2", *options, **places)
        assert done.exit_code == 2, done.output
        (line,) = done.output.strip().splitlines()
        assert re.match(f"demo: .*{message}", line)
    assert not (tmp_path / "out" / "checkpoint.npz").exists()


def _start(cache, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.examples.tiny", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={
            **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
        },
    )


def _wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_interrupted_anywhere_leaves_a_usable_checkpoint(prose, tmp_path):
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_bytes(prose)
    options = ("--text", str(text), "--out", str(out), "--minutes", "10", "--length", "8")

    # While it compiles: the checkpoint of step 0 is there before that.
    process = _start(tmp_path / "cache", *options)
    _wait_for((out / "checkpoint.npz").exists)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert re.search(r"^Interrupted; the same command goes on from step \d ", output.splitlines()[-1])
    assert checkpoint.load(out / "checkpoint.npz")[1]["step"] < 3

    # While it trains.
    process = _start(tmp_path / "cache", *options)
    lines = [process.stdout.readline()]
    while "Compiled" not in lines[-1]:
        assert lines[-1], lines
        lines.append(process.stdout.readline())
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    settings = training.Settings(model=MODEL, batch=4)
    stopped = training.load_run(out / "checkpoint.npz", settings, data.text_file(text, settings.model.context))
    assert stopped.step == len(stopped.train_bits) > 0
    assert f"goes on from step {stopped.step} " in output.splitlines()[-1]
    assert "Traceback" not in output


def test_second_interrupt_is_not_held_back():
    before = signal.getsignal(signal.SIGINT)

    def press_twice():
        with HeldBackInterrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert interrupt.requested
            signal.raise_signal(signal.SIGINT)
            pytest.fail("held back")

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_that_nobody_acted_upon_is_not_lost():
    finished = []

    def press_once():
        with HeldBackInterrupt():
            signal.raise_signal(signal.SIGINT)
            finished.append(True)

    with pytest.raises(KeyboardInterrupt):
        press_once()
    assert finished


def test_bytes_are_shown_without_commands_for_the_terminal(capsys):
    from rich.console import Console

    display = ByteDisplay(Console())
    for byte in "é\x1b[31mx\r\x07\n".encode():
        display.write(bytes([byte]))
    assert capsys.readouterr().out == "é·[31mx··\n"
    assert printable("a\x9b\u202e\tb", keep="\n\t") == "a··\tb"
    assert printable("a\n\tb") == "a··b"


def test_minutes():
    assert [minutes(s) for s in (0, 59.9, 60, 605)] == ["0:00", "0:59", "1:00", "10:05"]
