"""PyTorch: the ranks of a process group, each with a shard of the tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from keraunos.distributed import agreement
from keraunos.frontends import alone
from keraunos.frontends.torch import _rows, constant
from keraunos.frontends.torch_launch import remembered as remembered

# Its name from PyTorch 2.13 on, and before.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Shards:
    """The other ranks.

    Attributes:
        size: how many there are.
        rank: this one's place among them, which is that of its tokens.
    """

    def __init__(self, op: str, group: Any):
        self.op, self.group = op, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def numbers(self, values: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """int32, on the device."""
        return constant(np.array(values, np.int32), like.device)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's vector ``x``, ``[size, n]``."""
        made = x.new_empty(self.size * len(x))
        with agreement.exchange(self.group):
            _GATHER(made, x, self.group)
        return made.view(self.size, -1)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; overwrites ``x``."""
        with agreement.exchange(self.group):
            dist.all_reduce(x, group=self.group)
        return x

    def first_token(self, tokens: int, offsets: torch.Tensor) -> Any:
        """The place of a shard's first token in the row: all but the last rank's have the same length."""
        return self.rank * tokens if self.rank < self.size - 1 else offsets[-1] - tokens

    def check(self, **what: Any) -> None:
        """All ranks mean the same call."""
        agreement.check(self.group, **what)


def place(group: Any) -> Any:
    """The group; None: the default one."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("keraunos.distributed: no process group; call torch.distributed.init_process_group first")
    return dist.group.WORLD if group is None else group


@functools.lru_cache(maxsize=1024)
def shards(op: str, group: Any) -> Shards:
    """The ranks of a group; None: the default one."""
    return Shards(op, group)


def arguments(where: Any) -> AbstractContextManager:
    """Around the checks of this rank's arguments."""
    return agreement.arguments(where)


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """``call(args, opts, shards) -> (output, final state or None)`` with a gradient, that of the sum of ranks' losses.

    Args:
        forward: ``(args, opts, shards) -> ((output, this rank's part of the final state or None), residuals)``.
        backward: ``(args, residuals, (doutput, dfinal), opts, shards) -> gradients of args``.
    """

    class Sharded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, kind, opts, shards, *flat):
            (output, final), residuals = forward(kind(*flat), opts, shards)
            ctx.save_for_backward(*flat, *residuals)
            ctx.call, ctx.shape, ctx.state = (kind, opts, shards), output.shape, None
            ctx.set_materialize_grads(False)
            if final is not None:
                final = shards.total(final)
                ctx.state = final.shape, final.dtype
            return output, final

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, doutput, dfinal):
            (kind, opts, shards), saved = ctx.call, ctx.saved_tensors
            n = len(kind._fields)
            args = kind(*saved[:n])
            if doutput is None:
                doutput = args.query.new_zeros(ctx.shape)
            if ctx.state:
                # Some ranks may use the state in their losses, others not.
                shape, dtype = ctx.state
                dfinal = args.query.new_zeros(shape, dtype=dtype) if dfinal is None else dfinal.clone().contiguous()
                dfinal = shards.total(dfinal)
            return None, None, None, *backward(args, saved[n:], (_rows(doutput), dfinal), opts, shards)

    def call(args, opts, shards):
        flat = [constant(x, args[0].device) if isinstance(x, np.ndarray) else x for x in args]
        if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in flat)):
            opts = alone(opts)
        return Sharded.apply(type(args), opts, shards, *(x if x is None else _rows(x) for x in flat))

    return call
