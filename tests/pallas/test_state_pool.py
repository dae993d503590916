"""The serving functions' kernels for TPUs, in Pallas' interpreter: values, what changes in the pool, and refusals."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("jax")

from jax.experimental.pallas import tpu as pltpu

import keraunos
from keraunos.kernels import kernel_registry
from keraunos.kernels.state_pool.pallas import passes
from tests.linear_attention.cases import GPU
from tests.serving.cases import Case, run_jax

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")
OPS = ("decode", "verify", "commit", "prefill")


@pytest.fixture(autouse=True)
def interpreted():
    """The platform runs on the CPU."""
    for op in OPS:
        target = f"keraunos.kernels.{'linear_attention' if op == 'prefill' else 'state_pool'}.pallas.passes:{op}"
        kernel_registry.register(op, "pallas", "cpu", 1, frameworks=("jax",))(target)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        yield
    for row in [row for op in OPS for row in kernel_registry.rows(op) if row.backend == "cpu"]:
        kernel_registry.unregister(row)


SIZES = dict(H=2, K=8, V=128)
PROMPTS = dict(H=2, K=64, V=128)
CASES = {
    "decode, decays per head": dict(),
    "decode, nothing decays, all padding": dict(gamma=False, slots=(-1, -1)),
    "decode, gates per token, shared heads, bfloat16": dict(gate="scalar", H=4, HQ=2, G=1, HV=4, dtype="bfloat16"),
    "decode, gates per dimension, decays per request, a pool of bfloat16": dict(
        gate="vector", each=True, HG=1, pool="bfloat16", decay=3.0),
    "verify, gates per token, a pool of bfloat16, float16": dict(op="verify", gate="scalar", gamma=False,
                                                                 pool="bfloat16", dtype="float16", slots=(-1, 1)),
    "commit, gates per dimension, a pool of bfloat16": dict(op="commit", counts=(0, 2, 3, 1), gate="vector",
                                                            pool="bfloat16"),
    "decode, delta rule, raw gates, shared heads, bfloat16": dict(
        delta=True, raw="softplus", norm=True, gate="scalar", gamma=False, H=4, HQ=2, G=2, HV=4,
        dtype="bfloat16"),
    "verify, delta rule without gates": dict(op="verify", delta=True, gamma=False),
    "commit, delta rule, gates per dimension, a pool of bfloat16": dict(
        op="commit", counts=(0, 2, 3, 1), delta=True, gate="vector", decay=3.0, pool="bfloat16"),
    "prefill, padding first and last": dict(op="prefill", lengths=(3, 130, 9, 0, 5), slots=(-1, 3, -1, 0, -1), tail=4,
                                            gate="scalar", dtype="bfloat16", pool="bfloat16"),
    "prefill, some begin with zeros, gates per dimension": dict(op="prefill", lengths=(5, 4, 9, 0), fresh=(0, 3),
                                                                gate="vector", G=1),
    "prefill, all padding": dict(op="prefill", lengths=(5, 4), slots=(-1, -1)),
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_values(sizes):
    Case(**(PROMPTS if sizes.get("op") == "prefill" else SIZES) | sizes).check(lambda case: run_jax("pallas", case))


def test_groups_of_heads(monkeypatch):
    monkeypatch.setattr(passes, "_ENOUGH", 0)
    assert passes.group(16, 8, 128) == 8
    case = Case(**SIZES | dict(H=16, G=2, slots=(-1, 2, -1, 5, -1), gate="vector"))
    case.check(lambda case: run_jax("pallas", case))


def test_no_requests_and_no_tokens():
    for op, sizes in (("decode", SIZES), ("prefill", PROMPTS)):
        case = Case(**{**sizes, "op": op, "slots": () if op == "decode" else (2, -1), "lengths": (0, 0)})
        output, pool = run_jax("pallas", case)
        assert output.shape == (0, 2, 128)
        assert pool.tobytes() == case.arrays["states"].tobytes()


def test_nothing_leaks_between_requests():
    sizes = dict(op="prefill", lengths=(9, 3, 5, 130), tail=2, **PROMPTS)
    case, spoilt = Case(**sizes), Case(**sizes)
    spoilt.arrays["states"][case.slots[0]] = np.nan
    (clean, pool), (output, found) = (run_jax("pallas", x) for x in (case, spoilt))
    assert np.isnan(output[:9]).all()
    np.testing.assert_array_equal(output[9:], clean[9:])
    others = list(case.slots[2:])
    np.testing.assert_array_equal(found[others], pool[others])


def refusal(op="decode", H=8, K=128, V=128, arrays=(), options=(), **sizes):
    """Why the platform refuses a call."""
    inv = keraunos.GLAttention().invocation("jax", **{"T": 1, "H": H, "K": K, "V": V, **sizes})
    return kernel_registry.get(op, "pallas").unsupported(
        dataclasses.replace(inv, op_id=op, arrays={**inv.arrays, **dict(arrays)}, options=dict(options))
    )


def test_refusals_have_reasons():
    for op in OPS:
        assert refusal(op) is None
        assert "takes no state_v_first in JAX" in refusal(op, options={"state_v_first": True})
        assert "of other pools the compiler makes a copy; the call has K = 128, V = 64" in refusal(op, V=64)
    assert refusal(H=64, K=192, V=384, dtype="float16") is None
    assert "fit in 8 MiB; the call has H = 36, K = 256, V = 256" in refusal(H=36, K=256, V=256)
    assert "takes no boundaries" in refusal("prefill", arrays={"tokens": ("int32", 1)})
    assert "takes bfloat16 and float32" in refusal("prefill", dtype="float16")


def test_a_tpu_gets_them_by_name_only():
    inv = keraunos.GLAttention().invocation("jax", T=1, H=8, K=128)
    for op in OPS:
        on_tpu = dataclasses.replace(inv, op_id=op, backend="tpu", device="TPU v5e")
        assert kernel_registry.choose(on_tpu)[0].platform == "xla"
        assert kernel_registry.choose(on_tpu, "pallas")[0].backend == "tpu"
