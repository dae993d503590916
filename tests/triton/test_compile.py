"""Every Triton kernel compiles without a GPU, and needs no more of it than was recorded: of Hopper, and of others."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.linear_attention.cases import GPU
from tests.triton.compile import BUDGETS, CHIPS, HOPPER, ON_CHIPS, ON_HOPPER, Recorded, measure, recorded

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")

# What is built for every chip whenever tests run: two of each operation's kernels. Of all others it is only seen that
# they would be built as they were when they were recorded.
BUILT = ("decode", "prefill, few heads", "attention, causal, shared keys")


@pytest.mark.parametrize("call", ON_HOPPER)
def test_kernels_stay_within_their_budgets(call):
    budget, found = json.loads(BUDGETS.read_text())[call], measure(call)
    assert found.keys() == budget.keys()
    for name, used in found.items():
        assert used["shared"] <= HOPPER.shared, name
        for what, most in budget[name].items():
            assert used[what] <= most, f"{name}: {what} {used[what]}, budget {most}; record it if that is meant"


@pytest.mark.parametrize("name", CHIPS)
def test_what_is_chosen_for_another_chip_was_built_and_fits(name):
    chip, record = CHIPS[name], recorded(name)
    now = {call: measure(call, chip, Recorded(chip, {}, building=False)) for call in ON_CHIPS}
    changed = [call for call in ON_CHIPS if builds(now[call]) != builds(record.get(call, {}))]
    assert not changed, f"kernels or configurations have changed: run python -m tests.triton.compile {name}"
    for call in ON_CHIPS:
        for kernel, used in record[call].items():
            assert used["shared"] <= chip.shared, (call, kernel)


def builds(found):
    return {kernel: used["build"] for kernel, used in found.items()}


@pytest.mark.parametrize("call", BUILT)
@pytest.mark.parametrize("name", CHIPS)
def test_what_is_built_for_another_chip_is_as_recorded(name, call):
    record = recorded(name)[call]
    assert measure(call, CHIPS[name], Recorded(CHIPS[name], {})) == record
