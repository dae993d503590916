"""Every Triton kernel compiles without a GPU, for every chip as was recorded."""

import dataclasses

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import triton

import keraunos
from keraunos.kernels.softmax_attention.triton.passes import unsupported
from tests.linear_attention.cases import GPU
from tests.triton.compile import CHIPS, HOPPER, RECORDED_WITH, Recorded, calls_of, measure, recorded

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")


# What is built whenever tests run: some calls of each operation for Hopper, one for each other chip. Of all others it
# is only seen that they would be built as they were when they were recorded.
BUILT = [
    ("sm_90", call)
    for call in ("lightning", "vector gates", "decode", "prefill, few heads", "attention, causal, shared keys")
]
BUILT += [(name, "decode") for name in CHIPS if name != "sm_90"]


# Builds are told apart by the compiler's version, too.
AS_RECORDED = pytest.mark.skipif(
    triton.__version__ != RECORDED_WITH, reason=f"recorded with Triton {RECORDED_WITH}; this is {triton.__version__}"
)


@AS_RECORDED
@pytest.mark.parametrize("name", CHIPS)
def test_what_is_chosen_for_a_chip_was_built_and_fits(name):
    chip, record = CHIPS[name], recorded(name)
    now = {call: measure(call, chip, Recorded(chip, {}, building=False)) for call in calls_of(name)}
    changed = [call for call in now if builds(now[call]) != builds(record.get(call, {}))]
    assert not changed, f"kernels or configurations have changed: run python -m tests.triton.compile {name}"
    for call in now:
        for kernel, used in record[call].items():
            assert used["shared"] <= chip.shared, (call, kernel)


def builds(found):
    return {kernel: used["build"] for kernel, used in found.items()}


@AS_RECORDED
@pytest.mark.parametrize(("name", "call"), BUILT)
def test_what_is_built_is_as_recorded(name, call):
    assert measure(call, CHIPS[name], Recorded(CHIPS[name], {})) == recorded(name)[call]


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
