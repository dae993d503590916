"""The gated delta rule over ranks of torch.distributed, held to the tolerance rule as on one."""

import functools

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from keraunos import distributed
from keraunos.distributed import agreement
from tests.distributed.cases import DELTA, EMPTY_DELTA
from tests.distributed.worlds import run_world
from tests.gated_delta_rule.cases import Case
from tests.linear_attention.cases import INTERPRETED, tensor_array, torch_tensor

# Where shards begin and end, where that is not at equal distances but for a shorter last shard.
ODD = {
    Case(T=40, state=True): (0, 0, 25, 25, 40),
    Case(T=40, gate="vector", state=True, reverse=True): (0, 0, 25, 25, 40),
    Case(lengths=(3, 0, 9), state=True): (0, 6, 12, 12, 12),
    Case(lengths=(5, 7), state=True, reverse=True): (0, 4, 8, 12, 12),
}
PLATFORM = "triton" if INTERPRETED else "torch"
# The interpreter is slow.
CASES, SIZES = (DELTA[1::8], [2]) if INTERPRETED else ([*DELTA, *EMPTY_DELTA], [2, 4])


# Three sequences, of which the one in the middle will hold anything.
SPOILT = Case(lengths=(20, 30, 10), state=True)


def cuts_of(case, size):
    T = case.arrays[0].query.shape[1]
    return ODD.get(case) or (*(min(i * -(-T // size), T) for i in range(size)), T)


def on_rank(rank, size, case):
    """This rank's tokens: its output, the final state, and its part of the six gradients."""
    (*floats, cu), doutput, dstate = case.arrays
    own = slice(*cuts_of(case, size)[rank : rank + 2])
    floats = [torch_tensor(x if x is None or i > 4 else x[:, own]) for i, x in enumerate(floats)]
    floats = [x if x is None else x.requires_grad_() for x in floats]
    output, final = distributed.gated_delta_rule(*floats, torch_tensor(cu), **case.options, return_state=True,
                                                 platform=PLATFORM)
    # The loss is the sum over ranks, of which one uses the state.
    loss = (output * torch_tensor(doutput[:, own])).sum()
    if rank == size // 2:
        loss = loss + (final * torch_tensor(dstate)).sum()
    loss.backward()
    found = output.detach(), final.detach(), *(x if x is None else x.grad for x in floats)
    return [*map(tensor_array, found)]


def all_on_rank(rank, size, cases):
    if INTERPRETED:
        import tests.triton.interpreter  # noqa: F401
        from keraunos.kernels.gated_delta_rule.triton import passes

        # Shards as short as these are cut into segments, too.
        passes._MIN_SEGMENT = 5
    made = [on_rank(rank, size, case) for case in [*cases, SPOILT]]
    for x in SPOILT.arrays[0][:3]:
        x[:, 20:50] = np.nan
    made.append(on_rank(rank, size, SPOILT))
    x = torch.ones(1, 4, 2, 16)
    try:
        distributed.gated_delta_rule(x, x, x, use_qk_l2norm=rank == 1)
    except agreement.DisagreementError as error:
        return [*made, str(error)]
    return made


@functools.cache
def ranks(size):
    """The results of the ranks of a world, case by case."""
    cases = [*CASES, *(ODD if size == 4 else [])]
    found = zip(*run_world(all_on_rank, size, cases), strict=True)
    return dict(zip([*cases, "clean", "spoilt", "others"], found, strict=True))


def over_ranks(case, size):
    output, final, *grads = zip(*ranks(size)[case], strict=True)
    for state in final[1:]:
        np.testing.assert_array_equal(state, final[0])
    tokens = [None if x[0] is None else np.concatenate(x, 1) for x in grads[:5]]
    return [np.concatenate(output, 1), final[0], *tokens, None if grads[5][0] is None else sum(grads[5])]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shards_give_what_the_whole_gives(case, size):
    case.hold(over_ranks(case, size))


@pytest.mark.skipif(4 not in SIZES, reason="needs four ranks")
@pytest.mark.parametrize("case", ODD, ids=str)
def test_shards_of_other_lengths(case):
    case.hold(over_ranks(case, 4))


@pytest.mark.parametrize("size", SIZES)
def test_other_sequences_may_hold_anything(size):
    for clean, spoilt in zip(over_ranks("clean", size), over_ranks("spoilt", size), strict=True):
        # Arrays of tokens, and of states.
        middle, axis = (slice(20, 50), 1) if clean.shape[0] == 1 else (1, 0)
        np.testing.assert_array_equal(np.delete(clean, middle, axis), np.delete(spoilt, middle, axis))


def test_ranks_with_other_options_say_so():
    first, second = ranks(2)["others"]
    assert "use_qk_l2norm is False on rank 0, True on rank 1" in first
    assert first == second
