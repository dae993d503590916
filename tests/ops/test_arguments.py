"""The checker of arguments says shapes by letters, also those of families that are not there yet."""

import re
from typing import Any, NamedTuple

import pytest
import torch

from keraunos.ops.arguments import FLOATS, Arguments

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6


class Args(NamedTuple):
    """The arrays of a gated delta rule."""

    query: Any
    key: Any
    value: Any
    g: Any = None
    beta: Any = None
    initial_state: Any = None
    cu_seqlens: Any = None


def check(state_v_first=False, **changes):
    given = {"query": (B, T, H, K), "key": (B, T, H, K), "value": (B, T, HV, V), "g": (B, T, HV), "beta": (B, T, HV)}
    arrays = {name: torch.zeros(shape) for name, shape in (given | changes).items() if shape is not None}
    allowed = dict.fromkeys(Args._fields, FLOATS)
    found = Arguments("gated_delta_rule", Args(**arrays), ("query", "key", "value"), allowed)
    found.shape("query", "B, T, H, K")
    found.shape("key", "B, T, H, K", why="like query")
    found.shape("value", "B, T, HV, V", why="like query")
    found.shape("g", "B, T, HV, K", "B, T, HV", why="like value")
    found.shape("beta", "B, T, HV", why="like value")
    found.sequences()
    state = "N, HV, V, K" if state_v_first else "N, HV, K, V"
    found.shape("initial_state", state, why="one state per sequence and head")
    return found.sizes


def test_sizes_are_those_of_the_first_array_that_has_them():
    assert check() == {"B": B, "T": T, "H": H, "K": K, "HV": HV, "V": V, "N": B}
    check(g=(B, T, HV, K), initial_state=(B, HV, K, V))
    check(g=None, beta=None, initial_state=(B, HV, V, K), state_v_first=True)
    row = {"query": (1, T, H, K), "key": (1, T, H, K), "value": (1, T, HV, V), "g": None, "beta": None}
    assert check(**row, cu_seqlens=(4,), initial_state=(3, HV, K, V))["N"] == 3


@pytest.mark.parametrize(("changes", "message"), [
    ({"query": (B, T, K)}, r"query has shape (2, 5, 8); expected [B, T, H, K]"),
    ({"key": (B, T, 3, K)}, r"key has shape (2, 5, 3, 8); expected [B, T, H, K] = (2, 5, 2, 8), like query"),
    ({"value": (B, 1, HV, V)}, r"value has shape (2, 1, 4, 6); expected [B, T, HV, V] = (2, 5, HV, V), like query"),
    ({"g": (B, T, H)}, r"g has shape (2, 5, 2); expected [B, T, HV, K] = (2, 5, 4, 8) or [B, T, HV] = (2, 5, 4), "
     "like value"),
    ({"beta": (B, T, HV, 1)}, r"beta has shape (2, 5, 4, 1); expected [B, T, HV] = (2, 5, 4), like value"),
    ({"initial_state": (B, HV, K, V), "state_v_first": True},
     r"initial_state has shape (2, 4, 8, 6); expected [N, HV, V, K] = (2, 4, 6, 8), one state per sequence and head"),
    ({"cu_seqlens": (4,)}, "query has B = 2; expected B = 1 with cu_seqlens, packed sequences lie in one row"),
    ({"cu_seqlens": (1,)}, r"cu_seqlens has shape (1,); expected [N + 1] with N >= 1"),
], ids=lambda x: str(x)[:30])
def test_an_error_says_what_came_and_what_was_wanted(changes, message):
    with pytest.raises(ValueError, match=rf"^{re.escape(f'gated_delta_rule: {message}')}$"):
        check(**changes)
