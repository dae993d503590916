"""Launches that may run side by side: none reads what another one writes, none writes what another one reads."""

import pytest

pytest.importorskip("triton")

import torch

from tests.triton import compile as calls

NEXT, BESIDE, WAITS = 1, 2, 4


def launches(call):
    """Of each launch: its kernel's name, constants, inputs and outputs."""
    found = []

    def launch(kernel, grid, inputs, outputs, constants, **options):
        made = [calls.empty(*o[0], dtype=o[1]) if isinstance(o, tuple) else o and inputs[o] for o in outputs.values()]
        arrays = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        found.append((kernel.__name__, constants, arrays, [x for x in made if x is not None]))
        return tuple(made)

    with calls.launching(launch):
        calls.attend(*calls.CALLS[call])
    return found


def among(arrays, others):
    return any(x is y for x in arrays for y in others)


@pytest.mark.parametrize("call", calls.CALLS)
def test_side_by_side(call):
    given, made, allowed = [], [], False  # of what has not ended for certain when a launch begins; whether it may then
    for name, constants, inputs, outputs in launches(call):
        order = constants["OVERLAP"]
        assert bool(order & BESIDE) != bool(order & WAITS), name
        if order & BESIDE:
            assert allowed, name
            assert not among(inputs.values(), made), name
            assert not among(outputs, given + made), name
            given, made = [*given, *inputs.values()], [*made, *outputs]
        else:
            # Chunks that are halved are looked up before the wait.
            assert not (constants.get("HALVED") and among([inputs["halved"]], made)), name
            given, made = list(inputs.values()), outputs
        allowed = bool(order & NEXT)


def test_walks_are_side_by_side():
    beside = [bool(constants["OVERLAP"] & BESIDE) for _, constants, _, _ in launches("lightning")]
    assert beside == [False, False, True, True]


def test_pieces_spread():
    """Kernels after pieces of segments wait until these have left all multiprocessors free."""
    found = launches("lightning, few heads, shared keys, packed")
    pieces = [constants for name, constants, _, _ in found if name == "scan_kernel" and constants["FINAL"] == 2]
    assert len(pieces) == 2
    assert not any(constants["OVERLAP"] & NEXT for constants in pieces)
