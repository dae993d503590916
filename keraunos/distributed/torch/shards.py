"""PyTorch: the ranks of a process group, each with a shard of the tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from keraunos.distributed import agreement
from keraunos.distributed.torch.peers import peers
from keraunos.frontends import for_inference
from keraunos.frontends.torch.arrays import constant, fitting, is_watched, rows
from keraunos.frontends.torch.gradient import fitted, to_change
from keraunos.frontends.torch.launch import fixed, recorded
from keraunos.frontends.torch.launch import remembered as remembered

# Its name from PyTorch 2.13 on, and before.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# So many ranks at most each send their own at once to all that want it. Through NCCL that is done in CUDA graphs: an
# all-gather, which hands it from one to the next, takes longer on the device, but less of the host.
_DIRECT = 8


class Shards:
    """The other ranks.

    Attributes:
        size: how many there are.
        rank: this one's place among them, which is that of its tokens.
        copies: see JAX's front end.
    """

    copies = 1

    def __init__(self, op: str, group: dist.ProcessGroup):
        self.op, self.group = op, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.direct = self.size <= _DIRECT and "cuda:nccl" in dist.get_backend_config(group)

    def numbers(self, values: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """int32, on the device."""
        return fixed(constant(np.array(values, np.int32), like))

    def gather(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        """The ranks' vectors ``x``, ``[size, n]``: of those before this one at least, or after it if not ``right``."""
        if self.direct and x.is_cuda and x.dtype == torch.float32:
            near = peers(self.group, x.device)
            if near.ready(len(x)):
                return near.gather(right)([x])[0]
        run = functools.partial(self._gather, right)
        return recorded(run, [x], [((self.size, len(x)), x.dtype)])[0]

    def _gather(self, right: bool, x: torch.Tensor, made: torch.Tensor) -> None:
        with agreement.exchange(self.group):
            if not (self.direct and x.is_cuda and torch.cuda.is_current_stream_capturing()):
                _GATHER(made.view(-1), x, self.group)
                return
            none, before = x[:0], range(self.rank) if right else range(self.rank + 1, self.size)
            come = [row if r in before else none for r, row in enumerate(made)]
            go = [none if r in before or r == self.rank else x for r in range(self.size)]
            dist.all_to_all(come, go, self.group)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; overwrites ``x``."""
        with agreement.exchange(self.group):
            dist.all_reduce(x, group=self.group)
        return x

    def together(self, *arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``arrays``, all computed before a later operation reads one, as is so anyway in a stream."""
        return arrays

    def first_token(self, tokens: int, offsets: torch.Tensor) -> int | torch.Tensor:
        """The place of a shard's first token in the row: all but the last rank's have the same length."""
        return self.rank * tokens if self.rank < self.size - 1 else offsets[-1] - tokens

    def checker(self, **what: Any) -> Callable[[], None]:
        """Makes sure that all ranks mean the same call."""
        return agreement.checker(self.group, **what)


def place(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group; None: the default one."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("keraunos.distributed: no process group; call torch.distributed.init_process_group first")
    return dist.group.WORLD if group is None else group


@functools.lru_cache(maxsize=1024)
def shards(op: str, group: dist.ProcessGroup) -> Shards:
    """The ranks of a group; None: the default one."""
    return Shards(op, group)


def arguments(where: dist.ProcessGroup) -> AbstractContextManager:
    """Around the checks of this rank's arguments."""
    return agreement.arguments(where)


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """``prepare(opts, shards, args)``: ``args -> (output, final state or None)``, for args that are alike.

    The gradient is that of the sum of the ranks' losses. Where a call's host code does nothing but launch kernels and
    gather, it runs once, the exchange in the middle of it.

    Args:
        forward: ``(args, opts, shards) -> ((output, this rank's part of the final state or None), residuals)``.
        backward: ``(args, residuals, (doutput, dfinal), opts, shards) -> gradients of args``.
    """

    @functools.lru_cache(maxsize=4096)
    def launchers(kind: Any, opts: Any, shards: Shards) -> tuple[Any, Any]:
        """``forward`` and ``backward`` of flat lists of tensors."""
        n = len(kind._fields)

        def launch_forward(flat: list) -> tuple:
            outputs, residuals = forward(kind(*flat), opts, shards)
            return (*outputs, *residuals)

        def launch_backward(flat: list) -> tuple:
            return tuple(backward(kind(*flat[:n]), tuple(flat[n:-2]), tuple(flat[-2:]), opts, shards))

        return remembered(launch_forward), remembered(launch_backward)

    class Sharded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, shards: Shards, launch: Callable, launch_backward: Callable,
                    *flat: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            output, final, *residuals = launch(list(flat))
            ctx.save_for_backward(*flat, *residuals)
            ctx.call, ctx.shape, ctx.state = (shards, launch_backward), output.shape, None
            ctx.set_materialize_grads(False)
            if final is not None:
                final = shards.total(final)
                ctx.state = final.shape, final.dtype
            return output, final

        @staticmethod
        def backward(ctx: Any, doutput: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple:
            # What refuses a second gradient costs as much as a launch.
            return (refusing if torch.is_grad_enabled() else gradient)(ctx, doutput, dfinal)

    def gradient(ctx: Any, doutput: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple:
        (shards, launch), saved = ctx.call, ctx.saved_tensors
        like = saved[0]
        doutput = like.new_zeros(ctx.shape) if doutput is None else rows(doutput)
        if ctx.state:
            # Some ranks may use the state in their losses, others not.
            shape, dtype = ctx.state
            dfinal = like.new_zeros(shape, dtype=dtype) if dfinal is None else dfinal.clone().contiguous()
            dfinal = shards.total(dfinal)
        return None, None, None, *launch([*saved, doutput, dfinal])

    refusing = torch.autograd.function.once_differentiable(gradient)

    def prepare(opts: Any, shards: Shards, args: Any) -> Callable:
        kind: Any = type(args)
        fits = fitting(kind._fields)
        changes = to_change(args, fits)
        launch, launch_backward = launchers(kind, opts, shards)
        launch_alone, _ = launchers(kind, for_inference(opts), shards)
        watched = is_watched(args)
        if watched:
            launch, launch_backward, launch_alone = launch.fn, launch_backward.fn, launch_alone.fn
        else:
            launch, launch_alone = launch.for_one_kind(), launch_alone.for_one_kind()

        def run(args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            flat = fitted(args, to_change(args, fits) if watched else changes)
            # Forward mode has no derivative here, and says so.
            if forward_ad._current_level >= 0 or (
                torch.is_grad_enabled() and True in [x.requires_grad for x in flat if x is not None]
            ):
                return Sharded.apply(shards, launch, launch_backward, *flat)
            output, final, *_ = launch_alone(flat)
            return output, final if final is None else shards.total(final)

        return run

    return prepare
