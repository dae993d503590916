"""Every Triton kernel compiles without a GPU, and needs no more of it than was recorded: of Hopper, and of others."""

import dataclasses
import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import keraunos
from keraunos.kernels.softmax_attention.triton.passes import unsupported
from tests.linear_attention.cases import GPU
from tests.triton.compile import BUDGETS, CHIPS, HOPPER, ON_CHIPS, ON_HOPPER, Recorded, measure, recorded

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")


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


@pytest.mark.parametrize("name", CHIPS)
def test_what_is_built_for_another_chip_is_as_recorded(name):
    """One kernel of each chip is built whenever tests run; the others only if they have changed since."""
    assert measure("decode", CHIPS[name], Recorded(CHIPS[name], {})) == recorded(name)["decode"]


@pytest.mark.parametrize("name", CHIPS)
def test_what_no_tile_fits_is_refused(name):
    """The gradient of a bias in float32 with wide heads, for which only Hopper and its like have the room."""
    call = keraunos.Attention().invocation("torch", "float32", T=64, H=1, K=256)
    arrays = {**call.arrays, "bias": ("float32", 4)}
    inv = dataclasses.replace(call, arrays=arrays, backend="gpu", shared_memory=CHIPS[name].shared)
    reason = unsupported(inv)
    assert (reason is None) == (CHIPS[name].shared == HOPPER.shared)
    assert reason is None or "takes no bias in float32 with head dims over 128 on this GPU" in reason
    assert unsupported(dataclasses.replace(inv, arrays=call.arrays)) is None
