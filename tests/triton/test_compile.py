"""Every Triton kernel compiles for Hopper without a GPU, and needs no more of it than was recorded."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.linear_attention.cases import GPU
from tests.triton.compile import BUDGETS, CALLS, ENDS, PEERS, SERVING, SOFTMAX, measure

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")

# What one block may have on sm_90.
SHARED = 232448


@pytest.mark.parametrize("call", [*CALLS, *SERVING, *SOFTMAX, *ENDS, *PEERS])
def test_kernels_stay_within_their_budgets(call):
    budget, found = json.loads(BUDGETS.read_text())[call], measure(call)
    assert found.keys() == budget.keys()
    for name, used in found.items():
        assert used["shared"] <= SHARED, name
        for what, most in budget[name].items():
            assert used[what] <= most, f"{name}: {what} {used[what]}, budget {most}; record it if that is meant"
