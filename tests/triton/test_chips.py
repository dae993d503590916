"""The tiles that are chosen for GPUs with less shared memory than Hopper give the right values, in the interpreter.

``test_interpreter.py`` runs these in a process of their own. Warps and stages are nothing to the interpreter.
"""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import keraunos
from keraunos import frontends
from tests.linear_attention.cases import GPU, INTERPRETED, Case, runner
from tests.linear_attention.test_values import gla
from tests.softmax_attention.cases import Case as SoftmaxCase

pytestmark = pytest.mark.skipif(GPU or not INTERPRETED, reason="runs in the interpreter: see test_interpreter.py")

# What programs have on A100, on sm_86, sm_89 and sm_120, and on AMD's GPUs.
SHARED = {"sm_80": 166912, "sm_89": 101376, "gfx942": 65536}


@pytest.fixture
def chosen(request, monkeypatch):
    """The configurations that the platform chooses on such a GPU, as they are chosen."""
    shared = SHARED[request.param]
    frontend = frontends.get("torch")
    device_of = frontend.device_of
    monkeypatch.setattr(frontend, "device_of", lambda x: device_of(x)._replace(shared_memory=shared))
    found, choose = [], keraunos.ops.Kernel.heuristic_cfg

    def heuristic_cfg(*args, **kwargs):
        found.append(choose(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(keraunos.ops.Kernel, "heuristic_cfg", heuristic_cfg)
    return found


@pytest.mark.parametrize(("chosen", "case", "tile"), [
    ("sm_89", Case(gamma=1, K=128, V=80, T=70, B=1, H=1, dtype="bfloat16", state=True), (32, 64)),
    ("sm_80", Case(gate="scalar", gate_dtype="bfloat16", K=96, T=70, B=1, H=2, G=1, dtype="bfloat16"), (32, 64)),
    ("gfx942", Case(gate="vector", K=32, V=128, T=70, B=1, H=1, dtype="bfloat16"), (64, 64)),
    ("sm_89", Case(gamma=1, K=160, V=48, T=70, B=1, H=1, dtype="float16", state=True), (32, 64)),
    ("sm_80", Case(gate="scalar", K=48, V=160, T=70, B=1, H=1, dtype="bfloat16", reverse=True), (32, 64)),
    ("sm_89", Case(gate="vector", gamma=1, K=160, V=48, T=70, B=1, H=1, dtype="bfloat16"), (32, 64)),
], ids=str, indirect=["chosen"])
def test_linear_attention(chosen, case, tile):
    case.check(runner("triton", "torch", gla))
    assert {(cfg.block_q, cfg.block_d) for cfg in chosen} == {tile}


@pytest.mark.parametrize(("chosen", "case", "tile"), [
    ("sm_89", SoftmaxCase(B=1, T=80, H=2, K=64, dtype="bfloat16", causal=True, sinks=2, segments=True), (64, 32)),
    ("sm_80", SoftmaxCase(B=1, T=70, H=2, G=1, K=160, dtype="float16", mask=1), (64, 32)),
    ("sm_89", SoftmaxCase(B=1, T=70, H=2, K=160, dtype="bfloat16", bias=2, causal=True), (64, 16)),
    ("gfx942", SoftmaxCase(B=1, T=70, H=1, K=160, dtype="bfloat16", bias=1, dropout=0.2), (64, 16)),
], ids=str, indirect=["chosen"])
def test_softmax_attention(chosen, case, tile):
    case.check("triton", "torch")
    assert {(cfg.block_q, cfg.block_k) for cfg in chosen} == {tile}
