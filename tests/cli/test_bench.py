"""`keraunos bench`: one call is checked, then timed."""

import re

import pytest
from typer.testing import CliRunner

import keraunos
from keraunos.cli.main import app

SHAPE = "B=1,T=8,H=1,K=16,dtype=float32,gate=constant"


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAUNOS_CACHE_DIR", str(tmp_path))

    def invoke(*arguments, code=0):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", *arguments])
        assert result.exit_code == code, result.output
        return " ".join(result.output.replace("│", " ").split())

    return invoke


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gla", "--shape", SHAPE, "--framework", "jax"], "platform xla through jax on cpu configuration block_q=32"),
        (["lightning_attention", "--shape", "T=8,H=2,K=16", "--framework", "torch", "--backward"],
         "platform torch through torch on cpu"),
        (["attention", "--shape", "T=8,H=2,K=16,causal=true", "--framework", "torch", "--platform", "torch"],
         "platform torch through torch on cpu"),
    ],
)
def test_a_call_is_checked_and_timed(run, arguments, expected):
    printed = run(*arguments)
    assert printed.startswith(expected)
    found = re.search(r"result right median (\S+) ms quartiles (\S+) to (\S+) ms$", printed)
    median, first, third = map(float, found.groups())
    assert 0 < first <= median <= third


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_wrong_is_not_timed(run, monkeypatch, backward):
    right = keraunos.GLAttention.prepare

    def wrong(self, *args, **kwargs):
        run = right(self, *args, **kwargs)

        def scaled(*args):
            output, state = run(*args)
            # The values are right and the gradients doubled, or the values are wrong.
            return (2 * output - output.detach() if backward else 1.01 * output), state

        return scaled

    monkeypatch.setattr(keraunos.GLAttention, "prepare", wrong)
    printed = run("gla_attention", "--shape", SHAPE, "--framework", "torch", *["--backward"] * backward, code=1)
    assert f"result {'gradient' if backward else 'output'} 0 is wrong: error " in printed
    assert "median" not in printed


def test_what_cannot_be_run_is_said(run):
    assert "pallas: needs a tpu device" in run("gla", "--shape", SHAPE, "--platform", "pallas", code=1)
    printed = run("gla", "--shape", f"T={2**31 - 1},H={2**20},K=16", "--framework", "torch", code=1)
    assert re.search(r"result \w*Error: ", printed)
    assert "median" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gla"], "Missing option '--shape'"),
        (["gal", "--shape", SHAPE], "'gal' is none of lightning_attention, gla_attention, gated_delta_rule, attention"),
        (["gla", "--shape", "T=8"], "T=8: gla needs H, K as well"),
        (["gla", "--shape", SHAPE, "--platform", "tritom"], "unknown platform 'tritom'; expected one of"),
        (["gla", "--shape", SHAPE, "--framework", "numpy"], "'numpy' is none of jax, torch"),
    ],
)
def test_what_is_misspelt_is_said(run, arguments, message):
    assert message in run(*arguments, code=2)
