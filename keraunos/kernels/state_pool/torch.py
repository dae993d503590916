"""The serving functions in plain PyTorch operations, on any device: no value is read on the host.

Prompts run through a family's recurrence. Where states are exported, requests are cut into pieces there: first
each piece's own state is made, from these what every piece starts from, and from that all outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from keraunos.kernels.linear_attention import contract as linear_contract
from keraunos.kernels.state_pool import contract
from keraunos.kernels.state_pool.contract import Args, Options
from keraunos.ops.registry import Implementation


def _read(args: Args) -> torch.Tensor:
    """The requests' states ``[N, H, K, V]``; for padding those of some slot, of no use."""
    return args.states.index_select(0, args.slots.long().clamp(min=0))


def _write(states: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Put states into their slots. Padding writes what the first other request writes, or slot 0 as it was."""
    if not len(slots):
        return
    live = slots >= 0
    row = torch.where(live, torch.arange(len(slots), device=slots.device), live.int().argmax())
    slots = slots.long().clamp(min=0)
    old = states.index_select(0, slots[:1])
    new = new.to(states.dtype)
    new = torch.where((live[0] | (row > 0)).view(-1, 1, 1, 1), new.index_select(0, row), old)
    states.index_copy_(0, slots[row], new)


def _rows(live: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(live.view(-1, *[1] * (x.ndim - 1)), x, 0)


@torch.no_grad()
def _steps(args: Args, opts: Options) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``(output, pool)`` of decode, verify or commit: token after token."""
    states, H = args.states, args.states.shape[1]
    live = args.slots >= 0
    state = _read(args).float()

    def token(x: torch.Tensor) -> torch.Tensor:
        """The rows of each token ``[N, H, ...]`` in float32."""
        x = x[:, None] if opts.op_id == "decode" else x
        x = x.float()
        return x.repeat_interleave(H // x.shape[2], 2) if x.shape[2] != H else x

    k, v = token(args.key), token(args.value)
    q = token(args.query) if opts.reads else None
    gate = state.new_zeros(1, 1, 1, 1)
    if args.g is not None:
        gate = token(args.g)
        gate = gate if gate.ndim == 4 else gate[..., None]
    if args.g_gamma is not None:
        gamma = args.g_gamma.float()[..., None]
        gate = gate + (gamma if gamma.ndim == 2 else gamma[:, None])
    decay = gate.exp().expand(*k.shape[:3], -1)
    outputs = []
    for t in range(k.shape[1]):
        moved = decay[:, t, ..., None] * state + k[:, t, ..., None] * v[:, t, :, None]
        state = moved if args.counts is None else torch.where((t < args.counts).view(-1, 1, 1, 1), moved, state)
        if args.exports is not None:
            _write(args.exports, torch.where(live, args.targets[:, t], -1), state)
        if q is not None:
            outputs.append((state * q[:, t, ..., None]).sum(-2) * opts.softmax_scale)
    if opts.writes:
        _write(states, args.slots if args.counts is None else torch.where(args.counts > 0, args.slots, -1), state)
    if not opts.reads:
        return None, states
    output = _rows(live, torch.stack(outputs, 1)).to(args.query.dtype)
    return _finish(output[:, 0] if opts.op_id == "decode" else output, args), states if opts.writes else None


def _finish(output: torch.Tensor, args: Args) -> torch.Tensor:
    return output if args.out is None else args.out.copy_(output)


@torch.no_grad()
def _prefill(forward: Callable, args: Args, opts: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, pool)``: the packed tokens of all requests."""
    cu, T = args.cu_seqlens.long(), args.key.shape[0]
    live = args.slots >= 0
    state = _read(args).float()
    if args.has_initial is not None:
        state = _rows(args.has_initial, state)
    # Of padding nothing may be left, not even in the zeros that it is multiplied by.
    state = _rows(live, state)
    q, k, v, g = (x if x is None else x[None] for x in (args.query, args.key, args.value, args.g))
    call = linear_contract.Args(q, k, v, g, args.g_gamma, state, cu)
    options = linear_contract.Options(opts.softmax_scale, False, opts.cfg)
    if args.tokens is None:
        (output, final), _ = forward(call, options)
    else:
        output, final, exported = _in_pieces(forward, call, options, args)
    token = torch.searchsorted(cu[1:], torch.arange(T, device=cu.device), right=True)
    alive = torch.cat([live, live.new_zeros(1)])[token]
    if args.tokens is not None:
        _write(args.states, *exported)
    _write(args.states, args.slots, final)
    return _finish(_rows(alive, output[0]), args), args.states


def _in_pieces(
    forward: Callable, call: linear_contract.Args, options: linear_contract.Options, args: Args
) -> tuple:
    """``(output, final states, (slots, states) to export)`` of requests cut where states are wanted."""
    cu, state = args.cu_seqlens.long(), call.initial_state
    N, M = len(cu) - 1, len(args.tokens)
    # A piece that ends where a request ends comes before the next request, which begins there.
    ends = torch.minimum(args.tokens.long() + 1, cu[-1])
    where = torch.cat([2 * cu[:-1] + 1, 2 * ends])
    order = where.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(N + M, device=order.device))
    cuts = torch.cat([where[order] // 2, cu[-1:]])
    own = (order < N).view(-1, 1, 1, 1)
    cut = call._replace(initial_state=None, cu_seqlens=cuts)
    (_, local), _ = forward(cut, options)
    total = _gates(cut, cuts)
    starts, carried = [], torch.zeros_like(state[:1])
    begin = state.index_select(0, order.clamp(max=N - 1))
    for i in range(N + M):
        carried = torch.where(own[i], begin[i : i + 1], carried)
        starts.append(carried)
        carried = total[i : i + 1] * carried + local[i : i + 1]
    (output, final), _ = forward(cut._replace(initial_state=torch.cat(starts)), options)
    # A request's last piece is the one before the next request's first.
    last = torch.cat([place[1:N], place.new_full((1,), N + M)]) - 1
    exported = final.index_select(0, (place[N:] - 1).clamp(min=0))
    request = torch.searchsorted(cu[1:], args.tokens.long(), right=True)
    alive = torch.cat([args.slots >= 0, args.slots.new_zeros(1).bool()])[request]
    return output, final.index_select(0, last), (torch.where(alive & (args.tokens >= 0), args.targets, -1), exported)


def _gates(call: linear_contract.Args, cuts: torch.Tensor) -> torch.Tensor:
    """The decay across each piece, ``[pieces, H, K or 1, 1]``: sums over its own tokens only, so that none cancels."""
    n, H = len(cuts) - 1, call.heads
    total = torch.zeros(n, H, 1, device=cuts.device)
    if call.g is not None:
        g = call.g[0].float()
        g = g if g.ndim == 3 else g[..., None]
        piece = torch.searchsorted(cuts[1:].contiguous(), torch.arange(len(g), device=cuts.device), right=True)
        total = total.new_zeros(n + 1, *g.shape[1:]).index_add_(0, piece, g)[:n]
        total = total.repeat_interleave(H // g.shape[1], 1)
    if call.g_gamma is not None:
        length = (cuts[1:] - cuts[:-1]).float()[:, None, None]
        total = total + torch.where(length > 0, call.g_gamma.float()[:, None] * length, 0)
    return total.exp()[..., None]


def prefill(source: str, forward: Callable, fields: tuple[str, ...], heuristic: Callable) -> Implementation:
    """Prefill by a family's ``forward``, with its heuristic; source: the module's ``__file__``."""
    return contract.implementation("prefill", functools.partial(_prefill, forward), fields, platform="torch",
                                   source=source, heuristic=heuristic)


decode, verify, commit = (
    contract.implementation(op_id, _steps, (), platform="torch", source=__file__)
    for op_id in ("decode", "verify", "commit")
)
