"""Where the drafts of a step are: what plugins for engines share."""

from __future__ import annotations

import torch


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
    token = (begin[:-1, None] + draft).clamp(max=max(tokens - 1, 0))
    return token, draft < begin.diff()[:, None], request * most + (row - begin[request]).clamp(max=most - 1)
