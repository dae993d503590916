"""Prompts and the rule of results that tests of transformers' models share."""

import inspect

import torch
from transformers import MiniMaxForCausalLM

from tests.linear_attention.cases import GPU
from tests.numerics import assert_within_rule

DEVICE = "cuda" if GPU else "cpu"
# Its name has changed in transformers 5.24.
CACHE = next(x for x in ("cache", "past_key_values") if x in inspect.signature(MiniMaxForCausalLM.forward).parameters)


def prompts(*shape, padded=False):
    """Tokens and their mask: padded left, right, and not at all."""
    tokens = torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :7], mask[1, -5:] = 0, 0
    return (tokens * mask).to(DEVICE), mask.to(DEVICE)


def assert_as_near(names, got, theirs, truth, dtype):
    """Each result is as near to the float64 model as the rule asks, where the model itself is the reference."""
    got, theirs, truth = ([x.detach().double().cpu().numpy() for x in results] for results in (got, theirs, truth))
    assert_within_rule(names, got, truth, theirs, [dtype] * len(got))
