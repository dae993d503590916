"""The example of continuous batching: each request's outputs are those of its own recurrence."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from keraunos.kernels.linear_attention.reference import linear_attention  # noqa: E402
from tests.linear_attention.cases import GPU  # noqa: E402
from tests.numerics import assert_within_rule  # noqa: E402


def load():
    path = Path(__file__).parents[2] / "examples" / "continuous_batching.py"
    spec = importlib.util.spec_from_file_location("continuous_batching", path)
    module = sys.modules["continuous_batching"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.skipif(not GPU, reason="needs a GPU"))])
def test_every_request_gets_its_own_recurrence(graph):
    example, device = load(), "cuda" if GPU else "cpu"
    log_decay = torch.tensor([-0.01, -0.7])
    requests = example.random_requests(24, 90, 2, 16, device, torch.float32)
    engine = example.Engine(5, 64, 3, log_decay, 16, device, torch.float32, graph)
    # What slots hold before their first request must not matter.
    engine.states.fill_(float("nan"))
    tokens, _, _ = example.measure(engine, requests)
    assert tokens == sum(len(r.inputs) for r in requests)
    assert sorted(engine.free) == list(range(5))
    assert len({r.slot for r in requests}) == 5
    for request in requests:
        q, k, v = (x[None].cpu().numpy() for x in request.inputs.unbind(1))
        truth, near = (
            linear_attention(q, k, v, None, log_decay.numpy(), dtype=dtype)[0][0] for dtype in (np.float64, np.float32)
        )
        got = torch.cat(request.outputs).cpu().numpy()
        assert_within_rule(("output",), [got], [truth], [near], ["float32"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_graph_without_a_gpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["continuous_batching.py", "--graph"])
    with pytest.raises(SystemExit):
        load().main()
    assert "--graph needs a GPU" in capsys.readouterr().err
