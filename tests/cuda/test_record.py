"""The recorded builds are those that are built."""

import pytest

pytest.importorskip("torch")

import triton

from tests.cuda import record
from tests.cuda.compile import RECORDED_WITH, recorded
from tests.linear_attention.cases import GPU

pytestmark = [
    pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu"),
    pytest.mark.skipif(triton.__version__ != RECORDED_WITH, reason=f"recorded with Triton {RECORDED_WITH}"),
]


# What is built whenever tests run: a call of each operation. Of all others it is only seen that the compiler would
# begin with the same.
@pytest.mark.parametrize("call", ["constant", "prefill", "attention, causal", "few queries, one query", "delta rule"])
def test_what_is_built_is_as_recorded(call):
    found = record.found(call, anew=True)
    assert found
    assert {key: recorded()[key] for key in found} == found
