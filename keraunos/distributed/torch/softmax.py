"""Softmax attention over shards in PyTorch, over a process group.

In step n every rank sends its keys and values to the rank n after it, if that one's queries see any of them, and
computes with those that came in the step before. In the backward the gradients of keys and values go the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from keraunos.distributed import agreement
from keraunos.distributed.ring import Merged, Ring, merged, of_part, sinks_gradient, whole, with_sinks
from keraunos.kernels.softmax_attention.arguments import hidden_by_length
from keraunos.kernels.softmax_attention.contract import Args


def attention(args: Args, lengths: torch.Tensor | None, *, settle: Callable[[Args, int], Ring],
              place: dist.ProcessGroup) -> torch.Tensor:
    """The output of this rank's queries; ``settle`` makes the options from the number of shards."""
    group = place
    with agreement.arguments(group):
        ring = settle(args, dist.get_world_size(group))
    given = {**args._asdict(), "key_lengths": lengths}
    what = {name: None if x is None else (tuple(x.shape), x.dtype) for name, x in given.items()}
    opts = ring.opts._replace(cfg=None)  # type: ignore[arg-type]
    agreement.check(group, op="attention", **what, left=ring.left, right=ring.right, options=opts)
    args = hidden_by_length(args, lengths, dist.get_rank(group) * args.key.shape[1])
    return _OverShards.apply(ring, group, *args[:3], args.sinks, *args[6:8])


class _Steps:
    """The exchanges of one call: which shards come when, and where from."""

    def __init__(self, ring: Ring, group: dist.ProcessGroup, T: int):
        self.ring, self.T, self.group = ring, T, group
        self.ranks, self.me = dist.get_process_group_ranks(group), dist.get_rank(group)

    def pairs(self) -> list[tuple[int | None, int | None]]:
        """Step by step, the rank to send keys to and the one that sends some; as many steps on all ranks.

        Also where a rank has nothing to do in a step: it must not get to the next exchange before the others.
        """
        size, me, sees = self.ring.size, self.me, self.ring.sees
        found: list[tuple[int | None, int | None]] = []
        for n in range(1, size):
            to, source = (me + n) % size, (me - n) % size
            if sees(n, self.T) or sees(n - size, self.T):
                found.append((to if sees(to - me, self.T) else None, source if sees(me - source, self.T) else None))
        return found

    def start(self, out: tuple, to: int | None, into: tuple, source: int | None) -> list[Any]:
        """Begin to send some tensors to a rank and to receive some from another."""
        ops = [] if to is None else [dist.P2POp(dist.isend, x, self.ranks[to], self.group) for x in out]
        if source is not None:
            ops += [dist.P2POp(dist.irecv, x, self.ranks[source], self.group) for x in into]
        with agreement.exchange(self.group):
            return dist.batch_isend_irecv(ops) if ops else []

    def finish(self, started: list[Any]) -> None:
        """Wait for what :meth:`start` began."""
        with agreement.exchange(self.group):
            for work in started:
                work.wait()

    def shards(self, own: tuple) -> Iterator[tuple[tuple, int | None, int | None]]:
        """``(keys, their rank, the rank that has this one's keys meanwhile)``; of one step None where none come."""
        pairs = self.pairs()
        buffers = [tuple(map(torch.empty_like, own)) for _ in pairs[:2]]
        started = self.start(own, pairs[0][0], buffers[0], pairs[0][1]) if pairs else []
        yield own, self.me, self.me
        for n, (to, source) in enumerate(pairs):
            self.finish(started)
            if n + 1 < len(pairs):
                # While this shard is computed with, the next one comes.
                following = pairs[n + 1]
                started = self.start(own, following[0], buffers[(n + 1) % 2], following[1])
            yield buffers[n % 2], source, to


class _OverShards(torch.autograd.Function):
    """Forward and backward of one rank."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, group: dist.ProcessGroup, query: torch.Tensor, key: torch.Tensor,
                value: torch.Tensor, sinks: torch.Tensor | None, *segments: torch.Tensor | None) -> torch.Tensor:
        given = (query, key, value, None, sinks, None, *segments)
        args = Args(*(x if x is None else x.detach() for x in given))
        steps, found = _Steps(ring, group, query.shape[1]), None
        for keys, source, _ in steps.shards(_keys(args)):
            if source is not None:
                made = ring.parts[0](_with(args, keys), ring.part(steps.me - source, steps.T))
                new = of_part(torch, made)
                found = new if found is None else merged(torch, found, new)
        assert found is not None  # this rank's own keys come first
        found = with_sinks(torch, found, args.sinks)
        found = found._replace(output=found.output.to(query.dtype))
        ctx.ring, ctx.group = ring, group
        ctx.save_for_backward(*args, *found)
        return found.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, doutput: torch.Tensor) -> tuple:
        saved = [x if x is None else x.detach() for x in ctx.saved_tensors]
        ring, args, found = ctx.ring, Args(*saved[:-3]), Merged(*saved[-3:])
        steps, known = _Steps(ring, ctx.group, args.query.shape[1]), whole(torch, found)
        work, doutput = found.top.dtype, doutput.contiguous()
        sums = [torch.zeros_like(x, dtype=work) for x in args[:3]]
        returned: list[Any] = []
        came: tuple = ()

        def add(grads: Sequence[torch.Tensor], places: list[int]) -> None:
            for i, grad in zip(places, grads, strict=True):
                sums[i] += grad

        for keys, source, holder in steps.shards(_keys(args)):
            grads: tuple = ()
            if source is not None:
                opts = ring.part(steps.me - source, steps.T)
                grads = tuple(ring.parts[1](_with(args, keys), known, doutput, opts)[:3])
                add(grads[:1], [0])
            if source == steps.me:
                add(grads[1:], [1, 2])
                continue
            steps.finish(returned)
            add(came, [1, 2][: len(came)])
            came = () if holder is None else tuple(map(torch.empty_like, keys[:2]))
            out = tuple(x.contiguous() for x in grads[1:])
            returned = steps.start(out, source, came, holder)
        steps.finish(returned)
        add(came, [1, 2][: len(came)])
        means = (known[0].to(work) * doutput.to(work)).sum(-1).transpose(1, 2)
        dsinks = sinks_gradient(torch, args.sinks, found, means)
        dq, dk, dv = (d.to(x.dtype) for d, x in zip(sums, args[:3], strict=True))
        return None, None, dq, dk, dv, dsinks, None, None


def _keys(args: Args) -> tuple:
    """The arrays that are sent: keys, values and, where there are any, their ids."""
    return tuple(x.contiguous() for x in (*args[1:3], args.key_segments) if x is not None)


def _with(args: Args, keys: tuple) -> Args:
    """The call with the keys of another shard, without sinks."""
    key, value, *ids = keys
    return args._replace(key=key, value=value, key_segments=ids[0] if ids else None, sinks=None)
