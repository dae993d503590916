"""The serving functions in plain PyTorch operations, on any device: no value is read on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from keraunos.kernels.state_pool import contract, prompts, tokens
from keraunos.kernels.state_pool.contract import Args, Options
from keraunos.ops.registry import Implementation


def _read(args: Args) -> torch.Tensor:
    """The requests' states ``[N, H, K, V]``; for padding those of some slot, of no use."""
    return args.states.index_select(0, args.slots.long().clamp(min=0))


def _write(states: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Put states into their slots. Padding writes what the first other request writes, or slot 0 as it was."""
    if not len(slots):
        return states
    live = slots >= 0
    row = torch.where(live, torch.arange(len(slots), device=slots.device), live.int().argmax())
    slots = slots.long().clamp(min=0)
    old = states.index_select(0, slots[:1])
    new = new.to(states.dtype)
    new = torch.where((live[0] | (row > 0)).view(-1, 1, 1, 1), new.index_select(0, row), old)
    return states.index_copy_(0, slots[row], new)


@torch.no_grad()
def _steps(args: Args, opts: Options) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``(output, pool)`` of decode, verify or commit: token after token."""
    states, live, step, given = args.states, args.slots >= 0, tokens.step_of(args), tokens.read(args, opts)
    state, outputs = _read(args).float(), []
    for t in range(given.k.shape[1]):
        token = tokens.Tokens(*(x if x is None else x[:, t] for x in given))
        moved = step(state, token)
        state = moved if args.counts is None else torch.where((t < args.counts).view(-1, 1, 1, 1), moved, state)
        if args.exports is not None:
            _write(args.exports, torch.where(live, args.targets[:, t], -1), state)
        if token.q is not None:
            outputs.append((state * token.q[..., None]).sum(-2) * opts.softmax_scale)
    if opts.writes:
        _write(states, args.slots if args.counts is None else torch.where(args.counts > 0, args.slots, -1), state)
    if not opts.reads:
        return None, states
    output = prompts.rows(torch, live, torch.stack(outputs, 1)).to(args.query.dtype)
    return _finish(output[:, 0] if opts.op_id == "decode" else output, args), states if opts.writes else None


def _finish(output: torch.Tensor, args: Args) -> torch.Tensor:
    return output if args.out is None else args.out.copy_(output)


@torch.no_grad()
def _prefill(walk: prompts.Walk, args: Args, opts: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, pool)``: the packed tokens of all requests."""
    own = prompts.Own(lambda args: _read(args).float(), _write)
    output, pool = prompts.prefill(own, walk, args._replace(cu_seqlens=args.cu_seqlens.long()), opts)
    return _finish(output, args), pool


def prefill(source: str, walk: prompts.Walk, fields: tuple[str, ...], heuristic: Callable,
            op_id: str = "prefill") -> Implementation:
    """Prefill by a family's recurrence, with its heuristic; source: the module's ``__file__``."""
    compute = functools.partial(_prefill, walk)
    return contract.implementation(op_id, compute, fields, platform="torch", source=source, heuristic=heuristic)


decode, verify, commit = (
    contract.implementation(op_id, _steps, (), platform="torch", source=__file__)
    for op_id in ("decode", "verify", "commit")
)
