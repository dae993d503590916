"""Triton's builds for the serving functions depend neither on lengths nor on how many requests there are."""

from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.linear_attention.cases import GPU, INTERPRETED  # noqa: E402
from tests.triton import compile as builds  # noqa: E402

pytestmark = pytest.mark.skipif(GPU or INTERPRETED, reason="needs no GPU: part of the run without --gpu")


def built(op, N, T, *, H=64, gate=None, pool="float32", exports=0):
    """The keys of a call's builds, launch by launch: constants, and the properties of numbers that Triton sees."""
    found = []

    def find(kernel, inputs, made, constants, num_warps, num_stages):
        numbers = {}
        for param, x in zip(kernel.params, inputs.values(), strict=False):
            if isinstance(x, int):
                seen = "wide" if x >= 2**31 else "one" if x == 1 else "even" if x % 16 == 0 else "odd"
                numbers[param.name] = "any" if param.do_not_specialize and seen != "wide" else seen
        found.append((kernel.__name__, repr(sorted(constants.items())), numbers, num_warps, num_stages))
        return {}

    call = {"call": (op, "bfloat16", pool, 128, 128, H, H, gate, N, T, exports)}
    with mock.patch.dict(builds.SERVING, call):
        builds.measure("call", builds.HOPPER, find)
    return found


@pytest.mark.parametrize("op", ["decode", "verify", "commit"])
def test_steps_are_built_once(op):
    first = built(op, 1, 4)
    for N, T in ((2, 4), (16, 4), (33, 3), (256, 16)):
        assert built(op, N, T) == first


@pytest.mark.parametrize(("gate", "exports"), [(None, 0), (None, 5), ("scalar", 0), ("vector", 7)])
def test_prompts_are_built_once_for_a_power_of_two_of_requests(gate, exports):
    first = built("prefill", 32, 65536, gate=gate, exports=exports)
    for N, T in ((17, 100), (31, 65537), (32, 4097), (25, 16)):
        assert built("prefill", N, T, gate=gate, exports=exports and exports + N) == first


def test_requests_that_are_cut_are_built_for_the_number_of_their_pieces_only():
    """Which is one, a multiple of 16, or another, as Triton sees it."""

    def but_for_pieces(found):
        return [(name, constants, numbers | {"P": ""}, *rest) for name, constants, numbers, *rest in found]

    first = built("prefill", 1, 65536)
    assert [name for name, *_ in first] == ["scan_kernel", "combine_kernel", "scan_kernel"]
    assert built("prefill", 1, 65537) == first
    for T in (40000, 30001, 17000):
        assert but_for_pieces(built("prefill", 1, T)) == but_for_pieces(first)
