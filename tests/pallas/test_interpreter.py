"""The kernels' values in JAX's interpreter: indices, barriers, decays and partial chunks, but for the tensor cores."""

import pytest

from tests.linear_attention.cases import GPU
from tests.pallas.cases import NEEDS_JAX, case, check, jax

pytestmark = [NEEDS_JAX, pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")]


def interpret(case, segmentation, monkeypatch):
    from keraunos.kernels.linear_attention import pallas as platform
    from keraunos.kernels.linear_attention.interface import Options
    from keraunos.ops import Config
    from tests.pallas.interpreter import interpreted

    if segmentation:
        monkeypatch.setattr(platform, "segmentation", lambda heads, chunks: segmentation)
    scale = case.K**-0.5 if case.scale is None else case.scale
    opts = Options(scale, case.reverse, Config(num_stages=2), True)

    @jax.jit
    def both(args, doutput, dfinal):
        outputs, residuals = platform.forward(args, opts)
        grads = platform.backward(args, residuals, (doutput, dfinal), opts)
        return *outputs, grads.query, grads.key, grads.value, grads.initial_state

    with interpreted():
        check(case, both)


@pytest.mark.parametrize(
    ("case", "segmentation"),
    [
        (case(T=130, H=1, state=True), None),
        (case(T=70, B=2, G=1, reverse=True, scale=-0.3), None),
        (case(T=1, K=128, V=64, H=1, state=True), None),
        (case(T=333, H=1, state=True), (2, 2)),
        (case(T=200, reverse=True, decay="infinite", dtype="float16"), (2, 1)),
    ],
    ids=str,
)
def test_values(case, segmentation, monkeypatch):
    interpret(case, segmentation, monkeypatch)
