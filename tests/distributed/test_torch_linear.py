"""Linear attention over ranks of torch.distributed, held to the tolerance rule as on one."""

import functools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from keraunos import distributed
from keraunos.distributed import agreement
from tests.distributed.cases import CASES, EMPTY
from tests.distributed.worlds import worlds
from tests.linear_attention.cases import INTERPRETED, Case

# Where shards begin and end, where that is not at equal distances but for a shorter last shard.
ODD = {
    Case(T=40, gate="scalar", state=True): (0, 0, 25, 25, 40),
    Case(T=40, gate="scalar", state=True, reverse=True): (0, 0, 25, 25, 40),
    Case(lengths=(3, 0, 9), B=1, gamma=1, state=True): (0, 6, 12, 12, 12),
    Case(lengths=(5, 7), B=1, gamma=1, state=True): (0, 0, 0, 0, 12),
    Case(lengths=(5, 7), B=1, gamma=1, state=True, reverse=True): (0, 4, 8, 12, 12),
}
PLATFORM = "triton" if INTERPRETED else "torch"
LIGHTNING = Case(gamma=1, state=True, T=50, H=4)


def cuts_of(case: Case, size: int) -> tuple[int, ...]:
    T = case.arrays[0].query.shape[1]
    return ODD.get(case) or (*(min(i * -(-T // size), T) for i in range(size)), T)


def tensor(x, grad=False):
    return None if x is None else torch.from_numpy(np.array(x)).requires_grad_(grad)


def on_rank(rank: int, size: int, case: Case) -> list:
    """This rank's tokens: its output, the final state, and its part of the six gradients."""
    (*floats, cu), doutput, dstate = case.arrays
    own = slice(*cuts_of(case, size)[rank : rank + 2])
    cu, floats = tensor(cu), [tensor(x if x is None or i > 3 else x[:, own], True) for i, x in enumerate(floats)]
    q, k, v, g, gamma, state = floats
    options = dict(softmax_scale=case.scale, reverse=case.reverse, return_state=True, platform=PLATFORM)
    if case == LIGHTNING:
        output, final = distributed.lightning_attention(q, k, v, state, cu, log_decay=gamma, **options)
    else:
        output, final = distributed.gla_attention(q, k, v, g, gamma, state, cu, **options)
    # The loss is the sum over ranks, of which one uses the state.
    loss = (output * tensor(doutput[:, own])).sum()
    if rank == size // 2:
        loss = loss + (final * tensor(dstate)).sum()
    loss.backward()
    grads = [x if x is None else x.grad for x in floats]
    return [x if x is None else x.detach().numpy() for x in (output, final, *grads)]


def all_on_rank(rank: int, size: int, cases: list[Case]) -> list:
    if INTERPRETED:
        import tests.triton.interpreter  # noqa: F401
    return [*(on_rank(rank, size, case) for case in cases), refusal(rank, V=24 + rank), refusal(rank, K=16 + rank)]


def refusal(rank: int, K: int = 16, V: int = 24) -> str:
    """A rank's errors for shapes that are not those of the others, or that are wrong on some."""
    q, k, v = torch.ones(1, 4, 2, 16), torch.ones(1, 4, 2, K), torch.ones(1, 4, 2, V)
    try:
        distributed.gla_attention(q, k, v)
    except agreement.DisagreementError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def world():
    with worlds() as world:
        yield world


@pytest.fixture(scope="module")
def ranks(world):
    """The results of the ranks of a world of some size, case by case."""

    @functools.cache
    def found(size: int) -> dict[Any, tuple]:
        cases = [*CASES, *EMPTY, LIGHTNING, *(ODD if size == 4 else [])]
        rows = zip(*world(size).run(all_on_rank, cases), strict=True)
        return dict(zip([*cases, "others", "wrong"], rows, strict=True))

    return found


def over_ranks(found):
    """``run(case, gradients)`` as :meth:`Case.check` wants it."""

    def run(case, gradients):
        output, final, *grads = zip(*found[case], strict=True)
        for state in final[1:]:
            np.testing.assert_array_equal(state, final[0])
        tokens = [None if x[0] is None else np.concatenate(x, 1) for x in grads[:4]]
        return [np.concatenate(output, 1), final[0], *tokens, *(None if x[0] is None else sum(x) for x in grads[4:])]

    return run


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", [*CASES, *EMPTY, LIGHTNING], ids=str)
def test_shards_give_what_the_whole_gives(ranks, case, size):
    case.check(over_ranks(ranks(size)))


def alike(rank: int, size: int) -> tuple[list, int]:
    """Output and gradients of calls with 1, 2 and 4 times the values; and how often host code made them."""
    if INTERPRETED:
        import tests.triton.interpreter  # noqa: F401
    from keraunos.distributed import linear

    made = []

    class Counted(linear._Borders):
        def __init__(self, *args):
            made.append(args)
            super().__init__(*args)

    linear._Borders = Counted
    draw = torch.Generator().manual_seed(rank)
    q, k, v, do = (torch.randn(1, 130, 2, 16, generator=draw) for _ in range(4))
    found = []
    for factor in (1, 2, 4):
        x = [y.clone().requires_grad_() for y in (q, k, factor * v)]
        out = distributed.lightning_attention(*x, layer_idx=1, num_layers=4, platform=PLATFORM)
        out.backward(do)
        found.append([y.detach().numpy() for y in (out, *(y.grad for y in x))])
    return found, len(made)


def test_calls_that_are_alike(world):
    for found, made in world(2).run(alike):
        for factor, got in zip((2, 4), found[1:], strict=True):
            # Powers of two: the same bits but for the exponent. The values' own gradient knows nothing of them.
            for x, y, f in zip(found[0], got, (factor, factor, factor, 1), strict=True):
                np.testing.assert_array_equal(f * x, y)
        # Of what only launches kernels and gathers, forward and backward, host code runs once.
        assert made == (2 if INTERPRETED else 6)


def strided(rank: int, size: int) -> bool:
    """Whether states and decays that lie otherwise in memory make the same output."""
    if INTERPRETED:
        import tests.triton.interpreter  # noqa: F401
    draw = torch.Generator().manual_seed(0)
    q, state = torch.randn(2, 20, 3, 16, generator=draw), torch.randn(3, 2, 16, 16, generator=draw).transpose(0, 1)
    gamma = torch.tensor([-0.1, -0.2, -0.3]).expand(2, 3)
    made = [
        distributed.gla_attention(q, q, q, None, *x, None, platform=PLATFORM)
        for x in ((gamma, state), (gamma.contiguous(), state.contiguous()))
    ]
    return torch.equal(*made)


def test_strided_states_are_alike(world):
    assert world(2).run(strided) == [True, True]


@pytest.mark.parametrize("case", ODD, ids=str)
def test_shards_of_other_lengths(ranks, case):
    case.check(over_ranks(ranks(4)))


@pytest.mark.parametrize(("what", "words"), [
    ("others", "value is float32 (1, T, 2, 24) on rank 0, float32 (1, T, 2, 25) on rank 1"),
    ("wrong", "rank 1: gla_attention: key has shape (1, 4, 2, 17); expected [B, T, heads, K] = (1, 4, heads, 16)"),
])
def test_all_ranks_say_what_is_wrong_on_some(ranks, what, words):
    first, second = ranks(2)[what]
    assert words in first
    assert first == second


def test_a_group_is_needed():
    with pytest.raises(ValueError, match="init_process_group"):
        distributed.gla_attention(*[torch.ones(1, 4, 2, 16)] * 3)
    with pytest.raises(ValueError, match="expected group="):
        distributed.gla_attention(*[torch.ones(1, 4, 2, 16)] * 3, axis_name="tokens")
