"""Gradients of vector gates need at most a tenth more memory than inputs, outputs and gradients take."""

from dataclasses import replace

import pytest

from keraunos import frontends
from keraunos.ops import Config
from tests.linear_attention.cases import GPU

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")

torch = pytest.importorskip("torch")

from keraunos.kernels.linear_attention import contract  # noqa: E402
from keraunos.kernels.linear_attention.triton import passes as triton  # noqa: E402


@pytest.fixture
def launches(monkeypatch):
    """Of each launch the arrays that it is given, and those that it makes."""
    found = []

    def launch(kernel, grid, inputs, outputs, constants, **options):
        made = tuple(
            inputs[o] if isinstance(o, str) else o and torch.empty(o[0], dtype=getattr(torch, o[1]), device="meta")
            for o in outputs.values()
        )
        found.append(([x for x in inputs.values() if isinstance(x, torch.Tensor)], [x for x in made if x is not None]))
        return made

    monkeypatch.setattr(frontends, "launch", launch)
    return found


def peak(launches, given, results):
    """Bytes, where what a launch makes is there until the last launch that is given it; inputs and results stay."""
    last = {id(x): n for n, (inputs, made) in enumerate(launches) for x in (*inputs, *made)}
    last |= {id(x): len(launches) for x in (*given, *results)}
    alive, most = {id(x): x.nbytes for x in given}, 0
    for n, (_, made) in enumerate(launches):
        alive |= {id(x): x.nbytes for x in made}
        most = max(most, sum(alive.values()))
        alive = {x: size for x, size in alive.items() if last[x] > n}
    return most


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(("B", "T", "H"), [
    (2, 16384, 64), (1, 65536, 64), (8, 4096, 32), (1, 8192, 64), (1, 65536, 4), (1, 32768, 8), (1, 32768, 16),
])
def test_few_arrays_beside_those_of_the_caller(launches, B, T, H, framework):
    given = q, k, v, g, do = [torch.empty(B, T, H, 128, dtype=torch.bfloat16, device="meta") for _ in range(5)]
    args = contract.Args(q, k, v, g, None, None, None)
    call = replace(contract.GLA.describe(args), framework=framework)
    opts = contract.Options(1.0, False, triton.heuristic(call, Config()), ("g_gamma",), False)
    (output, _), residuals = triton.forward(args, opts)
    gradients = triton.backward(args, residuals, (do, None), opts)
    results = [x for x in (output, *gradients) if x is not None]
    assert peak(launches, given, results) <= 1.1 * sum(x.nbytes for x in (*given, *results))
