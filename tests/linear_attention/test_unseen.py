"""Values in tokens that nobody sees, NaN and infinities too, change no output and no gradient."""

import dataclasses
import functools

import numpy as np
import pytest

import keraunos
from keraunos.kernels.linear_attention import contract
from tests.linear_attention.cases import Case, platforms, run_jax, runner
from tests.linear_attention.test_values import gla, tiled
from tests.numerics import assert_within_rule

NAMES = ["output", "final_state", "dquery", "dkey", "dvalue", "dg", "dg_gamma", "dinitial_state"]
# The last is near the largest number of float32 and of bfloat16, so that products of it are infinite.
BAD = [np.nan, np.inf, -np.inf, 3e38]
CASES = [
    Case(gamma=1, B=1, T=75),
    Case(gate="scalar", gamma=1, B=1, T=75, reverse=True),
    Case(gate="vector", gamma=1, B=1, T=75),
    Case(gate="vector", B=1, T=75, decay="strong", reverse=True),
    Case(gate="scalar", gamma=1, B=1, lengths=(50, 25)),
    Case(gate="vector", B=1, lengths=(50, 25), decay="infinite"),
]
CASES = [dataclasses.replace(case, H=1, state=True) for case in CASES]
CASES += tiled(*(dataclasses.replace(case, dtype="bfloat16") for case in CASES[:3]))


# docs/numerics.md says what holds on other platforms.
@pytest.fixture(params=[pair for pair in platforms() if pair[0] != "triton"], ids="-".join)
def run_gla(request):
    return runner(*request.param, gla)


def with_arrays(case, args, doutput, dstate):
    made = dataclasses.replace(case)
    made.__dict__["arrays"] = (args, doutput, dstate)
    return made


def spoilt(case, bad, where):
    """The case with ``bad`` in some tokens of the arrays named in ``where``."""
    args, doutput, dstate = case.arrays
    arrays = {name: np.array(getattr(args, name)) for name in where}
    for name, x in arrays.items():
        x[:, where[name]] = np.asarray(bad, np.float32).astype(x.dtype)
    return with_arrays(case, contract.Args(**{**args._asdict(), **arrays}), doutput, dstate)


def compare(case, got, wanted, tokens, names=NAMES):
    """Hold what belongs to some tokens, and what belongs to none, to the tolerance rule."""
    rows, picked = [], [NAMES.index(name) for name in names]
    for values in (got, *wanted):
        rows.append([
            None if values[i] is None else np.asarray(values[i])[:, tokens] if i in (0, 2, 3, 4, 5) else values[i]
            for i in picked
        ])
    dtypes = [case.dtype if i < 5 else "bfloat16" if case.dtype == "bfloat16" else "float32" for i in picked]
    assert_within_rule(names, rows[0], rows[1], rows[3], dtypes, rows[2])


def reference(case):
    """Truth, scales and the result in float32."""
    (truth, scale), (rounded, _) = case.reference(), case.reference(np.float32)
    return truth, scale, rounded


@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding(run_gla, case):
    """No gradient comes from the last tokens, the second sequence, nor from token 10."""
    tokens = np.arange(75)[:: -1 if case.reverse else 1]
    padding, valid = tokens[50:], tokens[:50]
    args, doutput, dstate = case.arrays
    doutput, dstate = doutput.copy(), dstate.copy()
    doutput[:, [*padding, tokens[10]]] = 0
    dstate[-1] = 0
    case = with_arrays(case, args, doutput, dstate)
    wanted = reference(case)
    values = np.delete(valid, 10)
    for bad in BAD:
        got = run_gla(spoilt(case, bad, dict(query=[*padding, tokens[10]], key=padding, value=padding)), True)
        compare(case, got, wanted, values, ["output"])
        compare(case, got, wanted, valid, NAMES[2:])
        for name, x in zip(NAMES[2:5], got[2:5], strict=True):
            assert not np.asarray(x, np.float32)[:, padding].any(), f"{name} of padding is not 0, of {bad}"


@pytest.mark.parametrize("case", CASES[:4] + CASES[6:], ids=str)
@pytest.mark.parametrize("name", ["key", "value"])
def test_later_tokens(run_gla, case, name):
    """Whoever is before a token does not see it, and whoever is after it does."""
    tokens = np.arange(75)[:: -1 if case.reverse else 1]
    wanted = reference(case)
    for bad in BAD[:2]:
        got = run_gla(spoilt(case, bad, {name: tokens[40:41]}), True)
        compare(case, got, wanted, tokens[:40], ["output", "dquery"])
        assert not np.isfinite(np.asarray(got[0], np.float32)[:, tokens[40:50]]).any()
        assert not np.isfinite(got[1]).all()


@pytest.mark.skipif(("xla", "jax") not in platforms(), reason="needs JAX")
@pytest.mark.parametrize("case", CASES[:3:2], ids=str)
def test_padding_with_the_chunks_of_a_gpu(case):
    """XLA decides on a CPU at run time what it does there."""

    def call(args, case, platform):
        cfg = keraunos.Config(block_q=64, platform=platform)
        return keraunos.gla_attention(*args, reverse=case.reverse, return_state=True, cfg=cfg)

    run = functools.partial(run_jax, "xla", call)
    test_padding(run, case)
    test_later_tokens(run, case, "key")
