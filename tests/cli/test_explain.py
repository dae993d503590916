"""`keraunos explain`: what it tells is what a call gets."""

import json

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import keraunos
from keraunos.cli.main import app
from keraunos.ops import PersistentCache

SHAPE = "B=2,T=40,H=4,G=2,K=16,V=8,dtype=float32"


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAUNOS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(keraunos.ops.executor, "default_executor", keraunos.create_default_executor)

    def invoke(*arguments, code=0, columns=80):
        result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["explain", *arguments])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if "--json" in arguments else result.output

    return invoke


def test_it_tells_what_a_call_gets(run):
    (report,) = run("gla_attention", "--shape", SHAPE, "--json")["explained"]
    q, k, v = (jnp.ones((2, 40, heads, dim)) for heads, dim in ((4, 16), (2, 16), (2, 8)))
    choice = keraunos.explain(keraunos.gla_attention, q, k, v, jnp.ones((2, 40, 4, 16)) * -1)
    assert (report["platform"], report["tier"], report["key"]) == (choice.platform, choice.tier, choice.key)
    assert report["config"] == choice.cfg.to_json()
    assert report["tiers"] == choice.missed
    assert report["platforms"].keys() == set(keraunos.kernel_registry.platforms("gla"))
    assert report["platforms"]["xla"] == "taken"
    assert "takes torch arrays, not jax" in report["platforms"]["torch"]


def test_it_finds_what_was_measured(run, tmp_path):
    (report,) = run("gla", "--shape", SHAPE, "--json")["explained"]
    PersistentCache("configurations").put(report["key"], report["device"], {"winner": {"block_q": 16}})
    (report,) = run("gla", "--shape", SHAPE, "--json")["explained"]
    assert (report["tier"], report["config"]["block_q"]) == ("disk", 16)


@pytest.mark.parametrize(("operation", "framework", "platform"), [
    ("lightning_attention", "jax", "xla"), ("gla_attention", "torch", "torch"), ("attention", "torch", "torch"),
])
def test_text_fits_into_narrow_terminals(run, operation, framework, platform):
    text = run(operation, "--shape", "T=8,H=2,K=16", "--framework", framework, "--dtype", "float16")
    lines = text.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line == "Key:")
    assert "query:float16x4" in lines[at + 1]
    assert max(map(len, [*lines[:at], *lines[at + 2 :]])) <= 80
    words = [" ".join(line.split()) for line in lines]
    assert words[0] == f"{operation} T=8,H=2,K=16 through {framework} on cpu"
    assert f"platform {platform}" in words
    assert f"{platform} taken" in words
    assert "from heuristic" in words
    assert "autotune the policy says heuristics" in words
    assert sum(word.startswith("triton ") for word in words) == 1


def test_a_shapes_own_dtype_goes_before_the_option(run):
    (report,) = run("gla", "--shape", SHAPE, "--dtype", "float16", "--json")["explained"]
    assert "query:float32x4" in report["key"]


def test_what_no_platform_can_run_is_the_exit_code(run):
    text = " ".join(run("gla", "--shape", SHAPE, "--platform", "triton", code=1).split())
    assert "no platform can run this call. triton: needs a GPU" in text
    assert "xla can run it; the call asks for triton" in text
    (report,) = run("gla", "--shape", SHAPE, "--platform", "triton", "--json", code=1)["explained"]
    assert (report["platform"], report["tier"]) == (None, None)


def test_real_models_by_name(run):
    explained = run("lightning_attention", "--case", "minimax-01 prompt 2k", "--shape", "T=3,H=2,K=4", "--json")
    assert [report["case"] for report in explained["explained"]] == ["T=3,H=2,K=4", "minimax-01 prompt 2k"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gla"], "expected --shape or --case: which call"),
        (["gal", "--shape", SHAPE], "'gal' is none of lightning_attention, gla_attention, gated_delta_rule, attention"),
        (["gla", "--shape", "T=²,H=1,K=16"], "T is '²'; expected a whole number"),
        (["gla", "--shape", SHAPE, "--platform", "tritom"], "unknown platform 'tritom'; expected one of"),
        (["gla", "--shape", SHAPE, "--framework", "numpy"], "'numpy' is none of jax, torch"),
        (["gla", "--shape", "T=8,H=1,K=16", "--dtype", "int8"], "dtype is 'int8'; expected one of"),
    ],
)
def test_what_is_wrong_is_said(run, arguments, message):
    output = run(*arguments, code=2)
    assert message in " ".join(output.replace("│", " ").split())


def test_a_policy_that_is_none_is_said(run, monkeypatch):
    monkeypatch.setenv("KERAUNOS_AUTOTUNE_POLICY", "guess")
    assert "KERAUNOS_AUTOTUNE_POLICY" in run("gla", "--shape", SHAPE, code=2)


_NAMES = st.sampled_from(
    ["B", "T", "S", "H", "G", "K", "V", "N", "gate", "causal", "window", "sinks", "state", "dtype"]
)
_VALUES = (
    st.integers(-1, 64) | st.integers() | st.sampled_from(["²", "٣", "", "true", "vector", "9" * 5000]) | st.text()
)


@given(st.sampled_from(["gla", "attention"]), st.dictionaries(_NAMES | st.text(max_size=3), _VALUES), st.booleans())
@settings(max_examples=50, deadline=None)
def test_whatever_is_asked_there_is_an_answer(operation, sizes, complete):
    sizes = {**({"T": 8, "H": 2, "K": 16} if complete else {}), **sizes}
    shape = ",".join(f"{name}={value}" for name, value in sizes.items())
    result = CliRunner().invoke(app, ["explain", operation, f"--shape={shape}"])
    assert result.exit_code in (0, 1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "\x1b" not in result.stdout
