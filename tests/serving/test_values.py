"""The serving functions on every platform, against the float64 recurrence: values, and slots that must not change."""

import dataclasses
import importlib

import numpy as np
import pytest

from keraunos import serving
from keraunos.kernels.state_pool.contract import INDICES
from tests.serving.cases import PLATFORMS, Case, arguments, array, require, results, runner, tensor

pytestmark = pytest.mark.parametrize(("platform", "framework"), PLATFORMS)

GATES = {
    "none": Case(gamma=False, scale=1.0),
    "constant": Case(),
    "constant, of each request": Case(each=True),
    "vector and constant, of each request": Case(gate="vector", each=True),
    "scalar": Case(gate="scalar", gamma=False),
    "vector and constant, strong": Case(gate="vector", decay=8.0),
}
SHAPES = {
    "shared keys, odd dims": Case(H=2, G=1, K=24, V=40, gate="vector"),
    "wide, bfloat16 pool": Case(H=1, K=256, V=96, dtype="bfloat16", pool="bfloat16"),
    "float16": Case(K=32, dtype="float16", gate="scalar", scale=0.7),
    "narrow": Case(H=2, K=3, V=5, dtype="bfloat16"),
    "all padding": Case(slots=(-1, -1)),
    "heads of their own": Case(HQ=1, G=2, HV=4, HG=2, V=24, gate="vector"),
    "query has most heads": Case(G=2, HV=1, HG=2, gate="scalar"),
}
STEPS = {
    "decode": Case(), "verify": Case(op="verify", T=4), "commit": Case(op="commit", T=4, counts=(2, 3, 0, 4)),
    "one": Case(op="verify", T=1), "sixteen": Case(op="commit", T=16, counts=(16, 1, 9, 15)),
}


def also(case, **changes):
    """The case with what differs from the default in another case."""
    return dataclasses.replace(case, **changes)


def different(case):
    return {f.name: v for f in dataclasses.fields(case) if (v := getattr(case, f.name)) != f.default}


STRONG = "vector and constant, strong"
EACH = "vector and constant, of each request"


@pytest.mark.parametrize(("step", "gate"), [
    *(("decode", gate) for gate in GATES), ("verify", "scalar"), ("verify", STRONG), ("commit", "none"),
    ("commit", STRONG), ("commit", EACH), ("verify", EACH), ("one", "constant"), ("sixteen", "constant"),
])
def test_steps_with_every_gate(platform, framework, step, gate):
    also(STEPS[step], **different(GATES[gate])).check(runner(platform, framework))


@pytest.mark.parametrize(("step", "shape"), [
    *(("decode", shape) for shape in SHAPES), ("verify", "narrow"), ("commit", "wide, bfloat16 pool"),
    ("commit", "all padding"), ("verify", "heads of their own"), ("commit", "query has most heads"),
])
def test_steps_with_every_shape(platform, framework, step, shape):
    changes = different(SHAPES[shape])
    if step == "commit" and "slots" in changes:
        changes["counts"] = (1, 2)
    also(STEPS[step], **changes).check(runner(platform, framework))


PREFILLS = {
    "resumed": Case(op="prefill", lengths=(70, 5, 130, 0)),
    "fresh and empty": Case(op="prefill", lengths=(64, 5, 0, 65), fresh=(0, 2), tail=7),
    "empty and fresh": Case(op="prefill", lengths=(0, 0, 129, 1), fresh=(0, 3), tail=64),
    "nothing": Case(op="prefill", lengths=(0, 0, 0, 0), fresh=(0,)),
    "all padding": Case(op="prefill", lengths=(10, 3), slots=(-1, -1)),
    "exported": Case(op="prefill", lengths=(150, 5, 70, 3), tail=4, tokens=(0, 63, 64, 149, 152, 155, 224, 226, 229),
                     targets=(1, 2, 4, 5, 7, 8, 9, 10, 11), size=12),
    "exported twice from one chunk": Case(op="prefill", slots=(2, 3), lengths=(100, 64), fresh=(1,), size=12,
                                          tokens=(70, 70, 71, 163, 163, 200), targets=(4, 5, -1, 6, 7, 8)),
}


@pytest.mark.parametrize(("prefill", "gate"), [
    ("resumed", "none"), ("fresh and empty", "constant"), ("empty and fresh", STRONG), ("nothing", "constant"),
    ("all padding", "scalar"), ("exported", "none"), ("exported", "constant"), ("exported", "scalar"),
    ("exported twice from one chunk", STRONG), ("exported", EACH), ("fresh and empty", "constant, of each request"),
])
def test_prefill_with_every_gate(platform, framework, prefill, gate):
    also(PREFILLS[prefill], **different(GATES[gate])).check(runner(platform, framework))


@pytest.mark.parametrize("shape", [*list(SHAPES)[:3], "heads of their own", "query has most heads"])
def test_prefill_with_every_shape(platform, framework, shape):
    also(PREFILLS["exported"], **different(SHAPES[shape])).check(runner(platform, framework))


# The gated delta rule: with these, and with what a case says itself.
DELTA = {
    "without gates": Case(delta=True, gamma=False),
    "constant": Case(delta=True),
    "constant, of each request, normalised": Case(delta=True, each=True, norm=True),
    "scalar": Case(delta=True, gate="scalar", gamma=False, norm=True),
    "vector and constant, strong": Case(delta=True, gate="vector", decay=8.0),
    "raw, shared heads": Case(delta=True, raw="softplus", gate="scalar", gamma=False, norm=True, HQ=2, G=2, HV=4, HG=2,
                              HB=2, V=24),
    "raw, bfloat16, bfloat16 pool": Case(delta=True, raw="softplus", gate="scalar", gamma=False, norm=True, K=32, V=40,
                                         dtype="bfloat16", pool="bfloat16"),
    "raw, per dimension": Case(delta=True, raw="softplus", gate="vector", norm=True, H=2),
    "many values": Case(delta=True, gate="scalar", H=2, V=272),
    "bounded": Case(delta=True, raw="bounded", gate="vector", gamma=False, norm=True, HG=2, dtype="float16"),
}


@pytest.mark.parametrize(("step", "kind"), [
    *(("decode", kind) for kind in DELTA), ("verify", "without gates"), ("verify", "raw, shared heads"),
    ("commit", "bounded"), ("commit", "constant, of each request, normalised"), ("one", "scalar"),
    ("sixteen", "raw, bfloat16, bfloat16 pool"), ("verify", "vector and constant, strong"), ("commit", "scalar"),
])
def test_steps_of_the_delta_rule(platform, framework, step, kind):
    also(STEPS[step], **different(DELTA[kind])).check(runner(platform, framework))


@pytest.mark.parametrize(("prefill", "kind"), [
    ("resumed", "without gates"), ("fresh and empty", "scalar"), ("empty and fresh", "vector and constant, strong"),
    ("nothing", "constant"), ("all padding", "scalar"), ("exported", "constant, of each request, normalised"),
    ("exported", "vector and constant, strong"), ("exported twice from one chunk", "constant"),
])
def test_prompts_of_the_delta_rule(platform, framework, prefill, kind):
    case = also(PREFILLS[prefill], **different(DELTA[kind]))
    require(case, platform)
    case.check(runner(platform, framework))


@pytest.mark.parametrize("case", [
    Case(V=24, gate="vector"), Case(op="verify", V=24), Case(op="commit", V=24, counts=(2, 3, 0, 1), delta=True),
    also(PREFILLS["exported"], V=24), also(PREFILLS["exported"], V=24, delta=True),
], ids=lambda case: f"{case.op}{', delta' * case.delta}")
def test_the_pool_may_have_v_first(platform, framework, case):
    require(case, platform)
    if (platform, framework, case.op) == ("triton", "jax", "prefill"):
        pytest.skip("takes no such pool of JAX")
    forward, back = {
        "jax": (lambda x: importlib.import_module("jax.numpy").asarray(x), np.asarray), "torch": (tensor, array),
    }[framework]

    def run(case):
        turned = case.arrays | {"states": np.ascontiguousarray(case.arrays["states"].swapaxes(-1, -2))}
        given = {name: x if x is None else forward(x) for name, x in turned.items()}
        args, gates = arguments(case.op, given)
        made = getattr(serving, case.op)(*args, **gates, **case.options, state_v_first=True, platform=platform)
        output, pool = results(case.op, given, made)
        return None if output is None else back(output), back(pool).swapaxes(-1, -2)

    case.check(run)


# Keys of 0: states are as small as the decay, so the relative error of that is all of theirs.
@pytest.mark.parametrize("gate", ["constant", "scalar", STRONG])
@pytest.mark.parametrize("call", [
    Case(), Case(op="commit", T=2, counts=(1, 2, 0, 2)),
    Case(op="prefill", lengths=(1, 1, 1, 1), tokens=(0, 2, 3), targets=(1, 2, 4)),
], ids=lambda call: call.op)
def test_states_that_only_decay(platform, framework, gate, call):
    case = also(call, **{**different(GATES[gate]), "decay": 8.0})
    case.arrays["key"][:] = 0.0
    case.check(runner(platform, framework))


@pytest.mark.parametrize("op", ["decode", "commit", "prefill"])
def test_what_is_known_on_the_host_may_be_numpy(platform, framework, op):
    case = {**STEPS, "prefill": PREFILLS["exported"]}[op]
    convert = {"jax": lambda x: importlib.import_module("jax.numpy").asarray(x), "torch": tensor}[framework]
    given = {name: x if x is None or name in INDICES else convert(x) for name, x in case.arrays.items()}

    def run(case):
        args, gates = arguments(op, given)
        output, pool = results(op, given, getattr(serving, op)(*args, **gates, platform=platform))
        back = {"jax": np.asarray, "torch": array}[framework]
        return None if output is None else back(output), back(pool)

    case.check(run)
    assert all(isinstance(given[name], np.ndarray | type(None)) for name in INDICES)
