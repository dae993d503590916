"""Heads, slots and drafts of a step: what plugins for engines share."""

from __future__ import annotations

from typing import Any

import torch

from keraunos import serving

# The block that vLLM gives to no request, for rows of padding.
_NULL_BLOCK = 0


def live(blocks: torch.Tensor) -> torch.Tensor:
    """The slots of vLLM's blocks, -1 for padding."""
    return torch.where(blocks > _NULL_BLOCK, blocks, -1)


def heads(x: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
    """Query, key and value ``[tokens, heads, K or V]`` of rows ``[tokens, dim]``, for a pool ``[slots, HV, V, K]``."""
    _, HV, V, K = states.shape
    keys = (x.shape[1] - HV * V) // 2
    return [y.unflatten(1, (-1, D)) for y, D in zip(x.split([keys, keys, HV * V], 1), (K, K, V), strict=True)]


def places(begin: torch.Tensor, most: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The places of requests with up to ``most`` drafts each, one request after the other in a row of tokens.

    Args:
        begin: ``[N + 1]``, offsets of the requests' tokens, of which those past the last offset are padding.

    Returns:
        The token of each request's draft t, and whether there is one, ``[N, most]``; and for each token its place in
        ``[N * most]``. Those of what is not there are some that exist.
    """
    begin = begin.long()
    draft, row = (torch.arange(n, device=begin.device) for n in (most, tokens))
    request = torch.searchsorted(begin[1:], row, right=True).clamp(max=len(begin) - 2)
    token = (begin[:-1, None] + draft).clamp(max=tokens - 1)
    return token, draft < begin.diff()[:, None], request * most + (row - begin[request]).clamp(max=most - 1)


def verify(rows: dict[str, Any], states: torch.Tensor, blocks: torch.Tensor, begin: torch.Tensor,
           accepted: torch.Tensor, out: torch.Tensor, options: dict[str, Any]) -> None:
    """Tokens and drafts of vLLM's requests, as many for all, or fewer for some: fill ``out [tokens, H, V]``.

    Args:
        rows: query, key, value and what else there is for each token, by the names of ``serving.verify``.
        blocks: ``[N, W]``: request n goes on from the state in block ``accepted[n] - 1`` of its own, and the state
            after its token t goes to its block t.
        begin: ``[N + 1]``, the requests' offsets; options: of ``serving.verify``.
    """
    slots, tokens = live(blocks), len(out)
    N, W = slots.shape
    token, there, place = places(begin, W, tokens)
    own = slots.gather(1, (accepted.long() - 1).clamp(0, W - 1)[:, None])[:, 0]
    options = options | dict(states=states, slots=own, exports=(states, torch.where(there, slots, -1)))
    if tokens == N * W:
        rows = {name: x.unflatten(0, (N, W)) for name, x in rows.items()}
        serving.verify(**rows, out=out.unflatten(0, (N, W)), **options)
        return
    made = serving.verify(**{name: x[token] for name, x in rows.items()}, **options)
    out.copy_(made.flatten(0, 1)[place])
