import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from language_model import data
from language_model.model import forward, init_params, init_states

from tests.numerics import assert_within_rule

torch = pytest.importorskip("torch")
language_model_torch = pytest.importorskip("language_model_torch")

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_model_is_that_of_jax(settings):
    config = replace(settings.model, blocks=("lightning", "gla", "delta"))
    params = init_params(config, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    params = jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape) if not x.any() else x, params)
    model = language_model_torch.LanguageModel(config)
    model.load_params(params)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 20))

    def run(model):
        first, states = model(torch.from_numpy(tokens[:, :7]))
        then, states = model(torch.from_numpy(tokens[:, 7:]), states)
        return [torch.cat([first, then], 1).detach().numpy(), *(state.detach().numpy() for state in states)]

    logits, states = forward(params, tokens, init_states(config, 2), config)
    in_dtype, truth = run(model), run(model.double())
    names = ["logits", *config.blocks]
    assert_within_rule(names, [logits, *states], truth, in_dtype, ["float32"] * len(names))


@pytest.fixture
def text(prose, tmp_path):
    path = tmp_path / "prose.txt"
    path.write_bytes(prose)
    return ["--text", str(path), "--length", "40", "--platform", "torch"]


def test_a_run_ends_with_three_checks_passed(settings, text, capsys):
    assert language_model_torch.main([*text, "--steps", "100"], settings.model) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(\d)\. (\w+)", printed, re.M) == [("1", "passed"), ("2", "passed"), ("3", "passed")]


def test_a_failed_check_is_the_exit_code(settings, text, monkeypatch, capsys):
    monkeypatch.setattr(data, "bigram_bits_per_byte", lambda train, windows: 0.0)
    assert language_model_torch.main([*text, "--steps", "2", "--layers", "delta"], settings.model) == 1
    assert "3. FAILED" in capsys.readouterr().out


def test_the_command_needs_no_jax(tmp_path):
    short = tmp_path / "short"
    short.write_bytes(b"short")
    code = [
        f"import sys; sys.modules['jax'] = None; sys.path.insert(0, {str(EXAMPLES)!r})",
        f"import language_model_torch as demo; demo.main(['--text', {str(short)!r}])",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "has 5 bytes; at least" in done.stderr
