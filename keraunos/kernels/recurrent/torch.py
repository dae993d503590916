"""Chunks of a linear recurrence in plain PyTorch operations: where they are, and the decays inside them.

Within a chunk every pair (query i, key j <= i) is a matrix product weighted by the decay between them; from chunk to
chunk only the state ``[K, V]`` travels. Decays are products of factors <= 1, each the exponential of a sum of gates
taken over exactly the tokens it spans: no difference of cumulative sums, so nothing overflows or cancels for any gate
<= 0.

A key after a query, and a query whose output has no gradient, count for nothing, whatever they hold: 0 times NaN or an
infinity is no 0, and products of large numbers are infinite. So products are masked by selection where arrays may hold
such values: see :meth:`Walker.look_at` and the methods after it. On a CPU their values are read, so that others cost
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from keraunos.frontends.torch.arrays import products_are_rounded

# Stands for -inf in sums: finite, so that 0 * gate is 0 in the triangular products, and exp of it is 0.
CLOSED = -1e30

# Values of one array that a group of chunks may have: on a CPU they should stay in its caches; elsewhere, few launches.
_GROUP = {"cpu": 1 << 18}
_GROUP_ELSEWHERE = 1 << 24


class Chunks(NamedTuple):
    """Where chunks of packed sequences are: one row per chunk, in the order of the recurrence."""

    tokens: Any  # [n, C] positions; T: none
    sequence: Any  # [n] whose state it continues; N: nobody's
    first: Any  # [n] bool: starts from the initial state
    last: Any  # [n] bool: ends in the final state


def find_chunks(args: Any, opts: Any, C: int, continues: torch.Tensor | None) -> Chunks:
    """The chunks of packed sequences: as many as any offsets could need, found where the offsets are, on the device."""
    T, N, cu = args.query.shape[1], args.cu_seqlens.shape[0] - 1, args.cu_seqlens.long()
    length = cu[1:] - cu[:-1]
    count = (length + C - 1) // C  # chunks of each sequence
    stop = count.cumsum(0)
    i = torch.arange(T // C + N, device=cu.device)
    sequence = torch.searchsorted(stop, i, right=True)
    s = sequence.clamp(max=N - 1)
    local = i - (stop - count)[s]
    live = sequence < N
    step = local[:, None] * C + torch.arange(C, device=cu.device)  # how far into the sequence
    tokens = cu[s + 1, None] - 1 - step if opts.reverse else cu[s, None] + step
    tokens = torch.where(live[:, None] & (step < length[s, None]), tokens, T)
    first = live & (local == 0)
    first = first if continues is None else first & ~continues[s]
    return Chunks(tokens, sequence, first, live & (local == count[s] - 1))


class Group(NamedTuple):
    """Chunks that are worked on at once."""

    n: int  # number of chunks
    tokens: Any  # slice of the row, or [n * C] positions, T: none
    valid: Any  # [n or 1, 1, 1, C] bool: there is a token; None: everywhere
    chunks: Any  # Chunks of packed sequences


class Walker:
    """Reads and writes groups of chunks of a call's arrays as ``[n, B, H, C, dim]`` in the order of the recurrence.

    ``continues``, ``[N]``: which packed sequences go on from where the one before them ended, if they have tokens.
    """

    def __init__(self, args: Any, opts: Any, continues: torch.Tensor | None = None):
        self.args, self.opts, self.continues = args, opts, continues
        self.B, self.T, _, self.K = args.query.shape
        self.H, self.V, self.device = args.heads, args.value.shape[-1], args.query.device
        # A power of two, for the halving of vector gates; no larger than what holds all tokens.
        self.C = min(opts.cfg.block_q, 1 << (self.T - 1).bit_length())
        self.dtype = torch.promote_types(args.query.dtype, torch.float32)
        self.widen = self.dtype == torch.float32 and products_are_rounded(self.device)
        self.packed = args.cu_seqlens is not None
        self.before = torch.ones(self.C, self.C, dtype=self.dtype, device=self.device).tril_(-1)
        self.onward = 1 - self.before
        self.careful = True
        self.groups = self._groups()
        self.constant: ScalarDecay | None = None

    def _groups(self) -> list[Group]:
        C, T = self.C, self.T
        if not (self.B and T):
            return []
        values = _GROUP.get(self.device.type, _GROUP_ELSEWHERE)
        step = max(1, values // (self.B * self.H * C * max(self.K, self.V, C)))
        if self.packed:
            chunks = find_chunks(self.args, self.opts, C, self.continues)
            pieces = (Chunks(*x) for x in zip(*(x.split(step) for x in chunks), strict=True))
            return [Group(len(x.tokens), x.tokens.flatten(), (x.tokens < T)[:, None, None], x) for x in pieces]
        groups = []
        for begin in range(0, T, step * C):
            end = min(begin + step * C, T)
            n = -(-(end - begin) // C)
            valid = None
            if (end - begin) % C:
                valid = (torch.arange(n * C, device=self.device) < end - begin).view(n, 1, 1, C)
            groups.append(Group(n, slice(T - end, T - begin) if self.opts.reverse else slice(begin, end), valid, None))
        return groups

    def mm(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The matrix product, in the precision of its arguments whatever the user's settings allow for products."""
        if b.shape[-2] == 1:
            return a * b
        if a.shape[-2] == b.shape[-1] == 1:
            return (a * b.mT).sum(-1, keepdim=True)
        return (a.double() @ b.double()).to(self.dtype) if self.widen else a @ b

    def look_at(self, *arrays: torch.Tensor) -> None:
        """Find out whether sums of products of what is in some arrays may not be finite.

        They are if the squares of each sum up to a number. No value is read on a GPU, where that would wait for it.
        """
        flat = (x.reshape(-1) for x in arrays)
        self.careful = self.device.type != "cpu" or not all(math.isfinite(x.dot(x)) for x in flat)

    def live(self, gradient: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
        """Where there is anything but zeros along some dimensions of a gradient, as :meth:`kept` takes it."""
        return (gradient != 0).any(dim, keepdim=True) if self.careful else gradient

    def kept(self, x: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """``x``, but 0 where it is not finite and ``live``, of what it will be multiplied with, is 0."""
        return torch.where((live != 0) | x.isfinite(), x, 0) if self.careful else x

    def pairs(self, x: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
        """The products ``[..., C, C]`` of queries with keys: 0 for later keys, and those of no live query finite."""
        if not self.careful:
            return x
        return (x if live is None else self.kept(x, live)).tril_()

    def mm_seen(self, a: torch.Tensor, b: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """The matrix product; where ``seen``, 0 or 1 for each number of ``a``, is 0, nothing in ``b`` counts."""
        if not self.careful:
            return self.mm(a, b)
        finite = b.isfinite()
        product = self.mm(a, torch.where(finite, b, 0))
        return torch.where(self.mm(seen, 1 - finite.to(b.dtype)) == 0, product, torch.nan)

    def read(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """``[B, T, heads(, dim)] -> [n, B, H, C(, dim)]``; zero where there is no token."""
        if self.packed:
            x = x.index_select(1, group.tokens.clamp(max=self.T - 1))
        else:
            x = x[:, group.tokens].flip(1) if self.opts.reverse else x[:, group.tokens]
            missing = group.n * self.C - x.shape[1]
            if missing:
                x = torch.cat([x, x.new_zeros(self.B, missing, *x.shape[2:])], 1)
        x = x.unflatten(1, (group.n, self.C)).transpose(0, 1).transpose(2, 3)
        # Always a copy: what is read may be overwritten.
        x = x.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        if self.packed:
            x = torch.where(group.valid[..., None] if x.ndim == 5 else group.valid, x, 0)
        return x if x.shape[2] == self.H else x.repeat_interleave(self.H // x.shape[2], 2)

    def write(self, buffer: torch.Tensor, x: torch.Tensor, group: Group) -> None:
        """Put ``[n, B, H, C(, dim)]`` back into ``[B, T, heads(, dim)]``, summed over heads that share one."""
        if buffer.shape[2] != self.H:
            x = x.unflatten(2, (buffer.shape[2], -1)).sum(3)
        x = x.transpose(2, 3).transpose(0, 1).flatten(1, 2)
        if self.packed:
            buffer.index_copy_(1, group.tokens, x.to(buffer.dtype))
            return
        row = buffer[:, group.tokens]
        x = x[:, : row.shape[1]]
        row.copy_(x.flip(1) if self.opts.reverse else x)

    def buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for ``[B, T, heads(, dim)]``; for packed sequences with a row for what belongs to no token."""
        return torch.empty(self.B, self.T + self.packed, *shape, dtype=dtype, device=self.device)

    def written(self, buffer: torch.Tensor) -> torch.Tensor:
        """``[B, T, heads(, dim)]`` of what was written."""
        # Not a view, which the caller could not change in place. Packed sequences are one row, which ends earlier.
        return buffer.resize_(self.B, self.T, *buffer.shape[2:])

    def qkv(self, group: Group) -> tuple[torch.Tensor, ...]:
        """Query, times the scale, key and value."""
        q, k, v = (self.read(x, group) for x in self.args[:3])
        return q.mul_(self.opts.softmax_scale), k, v

    def decay(self, group: Group) -> ScalarDecay | VectorDecay:
        """The decay inside the chunks; a constant one is computed once, as ``[1, ...]``."""
        g, gamma = self.args.g, getattr(self.args, "g_gamma", None)
        if g is None and group.valid is None and self.constant is not None:
            return self.constant
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        gamma = zero.expand(1, self.H) if gamma is None else gamma.to(self.dtype).clamp(min=CLOSED).view(-1, self.H)
        a = gamma[None, ..., None].expand(1, -1, self.H, self.C)  # [1, B or 1, H, C]
        if group.valid is not None:
            a = torch.where(group.valid, a, zero)
        if g is not None:
            a = self.read(g, group).clamp_(min=CLOSED) + (a if g.ndim == 3 else a[..., None])
            return (ScalarDecay if g.ndim == 3 else VectorDecay)(self, a)
        made = ScalarDecay(self, a)
        if group.valid is None:
            self.constant = made
        return made

    def states(self, given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The states to start from, as given or zero, and the one carried: ``[N + 1 or B, H, K, V]``, ``[B, ...]``."""
        N = self.args.cu_seqlens.shape[0] - 1 if self.packed else self.B
        # Of packed sequences each has a state of its own; one more is nobody's.
        states = torch.zeros(N + self.packed, self.H, self.K, self.V, dtype=self.dtype, device=self.device)
        if given is not None:
            states[:N] = given
        return states, torch.zeros_like(states[:1]) if self.packed else states

    def walk(self, state: torch.Tensor, states: torch.Tensor, step: Callable[[int, torch.Tensor], torch.Tensor],
             group: Group, backwards: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The state that comes into each chunk ``[n, B, H, K, V]``, and the one carried on.

        ``step(i, state)`` is the state after chunk i. Packed sequences start from their rows of ``states`` and leave
        their last state there.
        """
        if self.packed:
            own = states[group.chunks.sequence][:, None]
            starts, ends = group.chunks.first, group.chunks.last
            if backwards:
                starts, ends = ends, starts
        incoming, outgoing = [], []
        for i in range(group.n)[:: -1 if backwards else 1]:
            if self.packed:
                state = torch.where(starts[i], own[i], state)
            incoming.append(state)
            state = step(i, state)
            outgoing.append(state)
        if backwards:
            incoming, outgoing = incoming[::-1], outgoing[::-1]
        if self.packed:
            to = torch.where(ends, group.chunks.sequence, len(states) - 1)
            states.index_copy_(0, to, torch.cat(outgoing))
        return torch.stack(incoming), state

    def final(self, state: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The final states ``[N, H, K, V]``."""
        # Not a view, which would keep its whole group in memory.
        return states.resize_(len(states) - 1, *states.shape[1:]) if self.packed else state.clone()


def flush(x: torch.Tensor) -> torch.Tensor:
    """Decays too small to matter become 0, in place: CPUs compute many times slower with numbers next to underflow."""
    return torch.threshold_(x, torch.finfo(x.dtype).tiny * 2.0**26, 0)


class ScalarDecay:
    """Decay inside chunks for one gate per token and head, ``a: [n, B, H, C]``."""

    def __init__(self, walker: Walker, a: torch.Tensor):
        self.walker, self.mm, self.before, self.onward = walker, walker.mm, walker.before, walker.onward
        between = torch.where(self.before.bool(), a[..., None], 0).cumsum(-2)
        self.pair = flush(between.exp_().tril_())  # [n, B, H, C, C], from j to i
        self.enter = flush(a.cumsum(-1).exp_())[..., None]  # [n, B, H, C, 1], from the chunk's start to i
        self.leave = self.pair[..., -1, :, None]  # [n, B, H, C, 1], from j to the chunk's end
        self.total = self.enter[..., -1:, :]  # [n, B, H, 1, 1]

    def before_pairs(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The products of queries with the keys before them in the chunk, ``[n, B, H, C, C]``."""
        return self.mm(q, k.mT).mul_(self.pair).tril_(-1)

    def inside(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The output from keys of the query's own chunk, ``[n, B, H, C, V]``."""
        return self.walker.mm_seen(self.walker.pairs(self.mm(q, k.mT).mul_(self.pair)), v, self.onward.mT)

    def inside_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, live: torch.Tensor, need_gate: bool,
        own: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Gradients of :meth:`inside` for q, k, v and the gates ``[n, B, H, C]``; live: queries with a gradient.

        ``own``: queries see the key of their own token.
        """
        w = self.walker
        scores, dscores = w.pairs(self.mm(q, k.mT), live), w.pairs(self.mm(do, v.mT).mul_(self.pair), live)
        if not own:
            scores, dscores = scores.tril_(-1), dscores.tril_(-1)
        dq = w.kept(w.mm_seen(dscores, k, self.onward.mT), live)
        dk = w.mm_seen(dscores.mT, q, self.onward)
        da = None
        if need_gate:
            # Gate t scales the pairs i >= t > j. The diagonal is no such pair and is left out, not cancelled.
            pairs = (scores * dscores).tril_(-1)
            da = self.mm(pairs, self.before.mT).tril_().sum(-2)
        return dq, dk, w.mm_seen(scores.mul_(self.pair).mT, do, self.onward), da

    def across_backward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Gradient of the gates ``[n, B, H, C]`` from what crosses the chunks' borders.

        x ``[n, B, H, C, K]`` came in and reached query i; y went out from key j; z ``[n, B, H, K, V]`` passed through.
        """
        x, y = x.sum(-1, keepdim=True), y.sum(-1, keepdim=True)
        return (self.mm(self.onward, x) + self.mm(self.before, y))[..., 0] + z.sum((-1, -2))[..., None]


class VectorDecay:
    """Decay inside chunks for a gate per key dimension, ``a: [n, B, H, C, K]``.

    The chunk is halved again and again. Between the right and the left half of a block, the decay from j to i is
    exp(gates from the middle to i) * exp(gates after j up to the middle): two factors <= 1, and a matrix product. Both
    are products of the factors of smaller blocks, so that each gate is exponentiated once.
    """

    def __init__(self, walker: Walker, a: torch.Tensor):
        self.walker, self.mm, self.before, self.onward = walker, walker.mm, walker.before, walker.onward
        # The decay within blocks of m tokens: from the block's start through each token; after it to the block's end.
        through, after, m = flush(a.exp()), torch.ones_like(a), 1
        self.levels = []  # (m, to the middle of the block of 2m tokens, from there): [n, B, H, C / 2m, m, K]
        while m < walker.C:
            after_left, through_right = left_half(after, m), right_half(through, m)
            self.levels.append((m, after_left.clone(), through_right.clone()))
            flush(after_left.mul_(through_right[..., -1:, :]))
            flush(through_right.mul_(left_half(through, m)[..., -1:, :]))
            m *= 2
        self.enter, self.leave = through, after
        self.total = self.enter[..., -1:, :].mT  # [n, B, H, K, 1]

    def before_pairs(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The products of queries with the keys before them in the chunk, ``[n, B, H, C, C]``."""
        found = q.new_zeros(*q.shape[:-1], q.shape[-2])
        for m, to_middle, from_middle in self.levels:
            scores = self.mm(right_half(q, m) * from_middle, (left_half(k, m) * to_middle).mT)
            blocks = found.unflatten(-2, (-1, 2, m)).unflatten(-1, (-1, 2, m)).diagonal(dim1=-6, dim2=-3)
            blocks[..., 1, :, 0, :, :] = scores.movedim(-3, -1)
        return found

    def inside(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The output from keys of the query's own chunk, ``[n, B, H, C, V]``."""
        o = (q * k).sum(-1, keepdim=True) * v
        for m, to_middle, from_middle in self.levels:
            scores = self.mm(right_half(q, m) * from_middle, (left_half(k, m) * to_middle).mT)
            right_half(o, m).add_(self.mm(scores, left_half(v, m)))
        return o

    def inside_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, live: torch.Tensor, need_gate: bool,
        own: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Gradients of :meth:`inside` for q, k, v and the gates ``[n, B, H, C, K]``; see :class:`ScalarDecay`."""
        kept = self.walker.kept
        if own:
            score, diagonal = (kept((x * y).sum(-1, keepdim=True), live) for x, y in ((q, k), (do, v)))
            dq, dk, dv = kept(diagonal * k, live), diagonal * q, score * do
        else:
            dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        da = torch.zeros_like(q) if need_gate else None
        for m, to_middle, from_middle in self.levels:
            q_right, k_left = right_half(q, m) * from_middle, left_half(k, m) * to_middle
            v_left, do_right, rows = left_half(v, m), right_half(do, m), right_half(live, m)
            scores, dscores = kept(self.mm(q_right, k_left.mT), rows), kept(self.mm(do_right, v_left.mT), rows)
            dq_right, dk_left = kept(self.mm(dscores, k_left), rows), self.mm(dscores.mT, q_right)
            right_half(dq, m).addcmul_(dq_right, from_middle)
            left_half(dk, m).addcmul_(dk_left, to_middle)
            left_half(dv, m).add_(self.mm(scores.mT, do_right))
            if da is not None:
                right_half(da, m).add_(self.mm(self.onward[:m, :m], q_right.mul_(dq_right)))
                left_half(da, m).add_(self.mm(self.before[:m, :m], kept(k_left, dk_left).mul_(dk_left)))
        return dq, dk, dv, da

    def across_backward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Gradient of the gates ``[n, B, H, C, K]`` from what crosses the chunks' borders; see :class:`ScalarDecay`."""
        return self.mm(self.onward, x) + self.mm(self.before, y) + z.sum(-1)[..., None, :]


def left_half(x: torch.Tensor, m: int) -> torch.Tensor:
    """A view of the left half of each block of 2m tokens: ``[..., C, dim] -> [..., C / 2m, m, dim]``."""
    return x.unflatten(-2, (-1, 2, m)).select(-3, 0)


def right_half(x: torch.Tensor, m: int) -> torch.Tensor:
    """A view of the right half of each block of 2m tokens."""
    return x.unflatten(-2, (-1, 2, m)).select(-3, 1)
