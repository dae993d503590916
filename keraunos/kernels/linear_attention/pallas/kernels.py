"""The kernels: walks over chunks, with the state of a group of heads in scratch memory.

Grid: ``(batch, groups of heads, visits)``. A visit is a chunk of one sequence: of a block of C tokens those that belong
to it. Packed sequences that meet in a block visit it in turn; its outputs stay in fast memory meanwhile.

Blocks hold all heads of a group as they lie in memory, ``[C, heads, K]``; a head's own rows are put together in the
kernel, which costs next to nothing there and two passes over memory outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from keraunos.kernels.device.pallas import launch
from keraunos.kernels.linear_attention.pallas import decays

# Heads that are computed at once.
AT_ONCE = 8
# Arrays of tokens, of which each head's rows are put together.
_TOKENS = ("q", "k", "v", "g", "do", "o", "dq", "dk", "dv", "da")


class Visit(NamedTuple):
    """The rows of a plan, ``[7, visits]``, int32: what each visit does."""

    block: Any  # of C tokens
    begin: Any  # the first of its rows
    end: Any  # one past the last
    sequence: Any  # whose states it reads and writes
    first: Any  # whether it starts from the initial state; 2: from zeros
    last: Any  # whether it ends in the final one
    live: Any  # whether the tokens are of a sequence; others get zeros


class Walk(NamedTuple):
    """The compile-time part of a call."""

    shape: decays.Shape
    B: int
    T: int
    H: int
    K: int
    V: int
    heads: int  # of a group
    visits: int
    gate: str  # "scalar" or "vector"
    scale: float
    whole: bool  # every visit has all of its block
    packed: bool
    pooled: bool = False  # states are those of a pool, where they are left, too

    def share(self, n: int) -> int:
        """How many of an array's n heads a group of heads has."""
        return max(self.heads * n // self.H, 1)


def plan(offsets: jax.Array, T: int, C: int, packed: bool) -> jax.Array:
    """The visits ``[7, visits]`` of sequences that begin and end at offsets ``[N + 1]``, from left to right.

    Tokens before the first sequence and after the last are visited, too, so that something is written there. There are
    at most ``ceil(T / C) + N + 1`` visits; those that are not needed have no tokens.
    """
    N, blocks = offsets.shape[0] - 1, -(-T // C)
    offsets = offsets.astype(jnp.int32)
    edges = jnp.concatenate([jnp.zeros(1, jnp.int32), offsets, jnp.full(1, T, jnp.int32)]) if packed else offsets
    begin, end = edges[:-1], edges[1:]
    is_own = jnp.arange(N + 2) % (N + 1) != 0 if packed else jnp.ones(1, bool)
    opening = jnp.minimum(begin // C, blocks - 1)
    # A sequence of no tokens has a visit all the same, which hands its state on.
    count = jnp.maximum(-(-end // C) - opening, is_own.astype(jnp.int32))
    count = jnp.where(is_own | (end > begin), count, 0)
    stop = jnp.cumsum(count)
    i = jnp.arange(blocks + (N + 1 if packed else 0), dtype=jnp.int32)
    s = jnp.minimum(jnp.searchsorted(stop, i, side="right"), len(begin) - 1)
    local = i - (stop - count)[s]
    needed = i < stop[-1]
    block = jnp.minimum(opening[s] + local, blocks - 1)
    first, last = ((jnp.clip(x[s] - block * C, 0, C) * needed) for x in (begin, end))
    live = needed & is_own[s]
    sequence = jnp.clip(s - 1, 0, N - 1) if packed else s
    rows = block, first, last, sequence, live & (local == 0), live & (local == count[s] - 1), live
    return jnp.stack([x.astype(jnp.int32) for x in rows])


def turned(plan: jax.Array) -> jax.Array:
    """The visits of a walk the other way."""
    block, begin, end, sequence, first, last, live = plan[:, ::-1]
    return jnp.stack([block, begin, end, sequence, last, first, live])


def pooled(plan: jax.Array, slots: jax.Array, fresh: jax.Array, size: int) -> jax.Array:
    """The visits of sequences whose states are in slots of a pool of that size; ``fresh``: those that begin with zeros.

    Tokens of a sequence without a slot belong to none. Their visits have the slot of the visit before, or the first
    that there is: what a program is given is written back when the next one has another slot.
    """
    visit = Visit(*plan)
    slot = slots[visit.sequence]
    live = (visit.live == 1) & (slot >= 0) & (slot < size)
    last = jax.lax.cummax(jnp.where(live, jnp.arange(len(slot)), -1))
    slot = jnp.where(live.any(), slot[jnp.where(last < 0, jnp.argmax(live), last)], 0)
    # Others begin with zeros, too: nothing of a state may be left in their outputs, not even times zero.
    first = jnp.where(live, visit.first * (1 + fresh[visit.sequence]), 2)
    rows = visit._replace(sequence=slot, first=first, last=live * visit.last, live=live)
    return jnp.stack([x.astype(jnp.int32) for x in rows])


class _Specs:
    """Which block of an array each program has."""

    def __init__(self, walk: Walk):
        self.walk, self.C = walk, walk.shape.C

    def tokens(self, n: int, dim: int) -> pl.BlockSpec:
        """Of ``[B, T, n, dim]``."""
        shape = (1, self.C, self.walk.share(n), dim)
        return pl.BlockSpec(shape, lambda b, h, i, plan: (b, plan[0, i], h, 0))

    def scalars(self) -> pl.BlockSpec:
        """Of ``[B, H, T]``."""
        return pl.BlockSpec((1, self.walk.heads, self.C), lambda b, h, i, plan: (b, h, plan[0, i]))

    def rows(self, batch: int) -> pl.BlockSpec:
        """Of ``[1 or B, H, K]``."""
        shape = (1, self.walk.heads, self.walk.K)
        return pl.BlockSpec(shape, lambda b, h, i, plan: (b if batch > 1 else 0, h, 0))

    def states(self) -> pl.BlockSpec:
        """Of ``[N, H, K, V]``."""
        w = self.walk
        shape = (1, w.heads, w.K, w.V)
        return pl.BlockSpec(shape, lambda b, h, i, plan: (plan[3, i] if w.packed else b, h, 0, 0))

    def kept(self, back: bool) -> pl.BlockSpec:
        """Of the states before all chunks, ``[B * visits, H, V, K]``."""
        w = self.walk
        shape = (1, w.heads, w.V, w.K)
        return pl.BlockSpec(shape, lambda b, h, i, plan: (b * w.visits + (w.visits - 1 - i if back else i), h, 0, 0))


class _Program:
    """One visit of one program: its blocks by their names."""

    def __init__(self, walk: Walk, plan: Any, blocks: dict[str, Any], heads: dict[str, Any]):
        self.walk, self.blocks, self.heads = walk, blocks, heads
        self.visit = Visit(*(plan[row, pl.program_id(2)] for row in range(7)))

    def __getitem__(self, name: str) -> Any:
        return self.blocks.get(name)

    def rows(self, shape: tuple[int, ...], axis: int, live: bool = True) -> jax.Array:
        """Which rows are the visit's."""
        row, (_, begin, end, *_, is_live) = jax.lax.broadcasted_iota(jnp.int32, shape, axis), self.visit
        return (row >= begin) & (row < (jnp.where(is_live == 1, end, begin) if live else end))

    def own(self, x: jax.Array, axis: int) -> jax.Array:
        """Zeros in the rows that are not the visit's, which may hold anything."""
        return x if self.walk.whole else jnp.where(self.rows(x.shape, axis), x, jnp.zeros((), x.dtype))

    def gather(self, *names: str) -> None:
        """Put each head's rows ``[C, dim]`` of some arrays together."""
        for name in names:
            self.heads[name][...] = self.own(jnp.swapaxes(self[name][0], 0, 1), 1)

    def head(self, name: str, h: Any) -> jax.Array:
        """``[C, dim]`` of a head of the recurrence."""
        ref = self.heads[name]
        each = self.walk.heads // ref.shape[0]
        # Its sign is known: ``//`` would ask for it.
        return ref[h // each if isinstance(h, int) else jax.lax.div(h, jnp.int32(each))]

    def scatter(self, *names: str) -> None:
        """Write what was put together for each head into the visit's rows."""
        for name in names:
            ref, x = self[name], self.heads[name][...]
            axis = 1 if x.ndim == 2 else 0
            x = x if x.ndim == 2 else jnp.swapaxes(x, 0, 1)
            ref[0] = x if self.walk.whole else jnp.where(self.rows(x.shape, axis, live=False), x, ref[0])

    def each(self, run: Callable[[Any], None]) -> None:
        """Run a function of every head: a few at once, so that one computes while another waits."""
        n = self.walk.heads
        some = max(x for x in range(1, AT_ONCE + 1) if n % x == 0)

        def step(i: Any, _: None) -> None:
            for j in range(some):
                run(i * some + j)

        if some == n:
            step(0, None)
        else:
            jax.lax.fori_loop(0, n // some, step, None)

    def enter(self, name: str, flag: jax.Array) -> None:
        """Start from given states ``[heads, K, V]``, or from zeros, where the flag is set."""
        state, given = self["state"], self[name]

        def from_zeros() -> None:
            for h in range(self.walk.heads):
                state[h] = jnp.zeros(state.shape[1:], state.dtype)

        def from_given() -> None:
            for h in range(self.walk.heads):
                state[h] = given[0, h].astype(state.dtype).T

        pl.when(flag == 1)(from_zeros if given is None else from_given)
        if self.walk.pooled:
            pl.when(flag == 2)(from_zeros)

    def leave(self, name: str, flag: jax.Array) -> None:
        """Write the states where they are wanted and the flag is set."""
        state, wanted = self["state"], self[name]
        if wanted is None:
            return

        @pl.when(flag == 1)
        def _() -> None:
            for h in range(self.walk.heads):
                wanted[0, h] = state[h].T.astype(wanted.dtype)

    def under(self, run: Callable[[Any, Any], None]) -> None:
        """Run a function of every head and its decay, for the kind of gates that the chunk has."""
        shape, gamma = self.walk.shape, self["gamma"]
        if self.walk.gate == "scalar":
            coarse, fine = self.heads["a"]
            coarse[...], fine[...] = decays.sums_of_scalars(shape, self.own(self["a"][0], 1))
            return self.each(lambda h: run(h, decays.Scalar(shape, coarse[pl.ds(h, 1)], fine[pl.ds(h, 1)])))
        self.gather("g")

        def gates(h: Any) -> jax.Array:
            a = jnp.maximum(self.head("g", h).astype(jnp.float32), decays.FAINT)
            return a if gamma is None else self.own(a + gamma[0, pl.ds(h, 1)], 0)

        terms = 3 if shape.dtype == jnp.float32 else 1 if gamma is None and self["g"].dtype == jnp.bfloat16 else 2
        is_strong = decays.is_strong(shape, [gates(h) for h in range(self.walk.heads)])
        for flag, kind in ((is_strong, decays.Strong), (~is_strong, decays.Mild)):
            pl.when(flag)(lambda kind=kind: self.each(lambda h: run(h, kind(shape, gates(h), terms))))
        return None


def _forward(p: _Program) -> None:
    if p.walk.pooled:
        # No sequence may be left there.
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            p["final"][...] = p["initial"][...]

    p.enter("initial", p.visit.first)
    state, kept, output = p["state"], p["kept"], p.heads["o"]
    if kept is not None:
        kept[0] = state[...].astype(kept.dtype)
    p.gather("q", "k", "v")

    def run(h: Any, decay: Any) -> None:
        o, state[h] = decay.forward(*(p.head(name, h) for name in ("q", "k", "v")), state[h])
        output[h] = (o * p.walk.scale).astype(output.dtype)

    p.under(run)
    p.scatter("o")
    p.leave("final", p.visit.last)


def _backward(p: _Program) -> None:
    p.enter("dfinal", p.visit.first)
    dstate, kept, gates = p["state"], p["kept"], p["da"] is not None
    made = ("dq", "dk", "dv", "da") if gates else ("dq", "dk", "dv")
    p.gather("q", "k", "v", "do")

    def run(h: Any, decay: Any) -> None:
        given = [p.head(name, h) for name in ("q", "k", "v", "do")]
        state = kept[0, h].astype(jnp.float32)
        *grads, dstate[h] = decay.backward(*given, state, dstate[h], p.walk.scale, gates)
        for name, x in zip(made, grads, strict=False):
            ref = p.heads[name]
            ref[pl.ds(h, 1)] = x.astype(ref.dtype).reshape(1, *ref.shape[1:])

    p.under(run)
    p.scatter(*made)
    p.leave("dinitial", p.visit.last)


def _launch(body: Callable, walk: Walk, visits: jax.Array, given: dict[str, tuple], made: dict[str, tuple]) -> dict:
    """Run a kernel.

    Args:
        given: each array and its spec, or None.
        made: each output's shape, dtype and spec, or None.

    Returns:
        The outputs by their names.
    """
    given, made = ({name: x for name, x in some.items() if x is not None} for some in (given, made))
    names = *given, *made, "state"
    # Where heads are put together.
    tokens = {name: (spec.block_shape, x.dtype) for name, (x, spec) in given.items() if name in _TOKENS}
    tokens |= {name: (spec.block_shape, dtype) for name, (_, dtype, spec) in made.items() if name in _TOKENS}
    heads: dict[str, Any] = {
        name: pltpu.VMEM((n, C, *dim) if dim else (C, n), dtype) for name, ((_, C, n, *dim), dtype) in tokens.items()
    }
    if "a" in given:
        heads["a"] = [pltpu.VMEM((walk.heads, walk.shape.C), jnp.float32)] * 2

    def kernel(plan: Any, *refs: Any) -> None:
        *blocks, own = refs
        body(_Program(walk, plan, dict(zip(names, blocks, strict=True)), own))

    grid, state = (walk.B, walk.H // walk.heads, walk.visits), pltpu.VMEM((walk.heads, walk.V, walk.K), jnp.float32)
    return launch(kernel, f"linear_attention{body.__name__}", grid, visits, given, made, [state, heads],
                  {"initial": "final"} if walk.pooled else {})


def _inputs(walk: Walk, arrays: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    specs = _Specs(walk)
    others = dict(a=specs.scalars(), initial=specs.states(), dfinal=specs.states(), kept=specs.kept(back=True))
    for name, x in arrays.items():
        if name == "gamma" and x is not None:
            yield name, (x, specs.rows(x.shape[0]))
        elif x is not None:
            yield name, (x, others[name] if name in others else specs.tokens(*x.shape[2:]))


def forward(walk: Walk, visits: jax.Array, arrays: dict[str, Any], N: int, final: bool, kept: bool) -> dict:
    """Output ``o``, and ``final`` ``[N, H, K, V]`` and ``kept``, the states before all chunks, if wanted.

    Args:
        arrays: q, k, v; g, or a ``[B, H, T]``; gamma ``[1 or B, H, K]``, with g; initial; each but q, k, v or None.
        N: sequences, or slots of the pool: ``initial``, whose memory ``final`` gets.
    """
    w, specs, dtype = walk, _Specs(walk), arrays["q"].dtype
    made: dict[str, Any] = dict(
        o=((w.B, w.T, w.H, w.V), dtype, specs.tokens(w.H, w.V)),
        final=((N, w.H, w.K, w.V), arrays["initial"].dtype if w.pooled else jnp.float32, specs.states())
        if final else None,
        kept=((w.B * w.visits, w.H, w.V, w.K), dtype, specs.kept(back=False)) if kept else None,
    )
    return _launch(_forward, walk, visits, dict(_inputs(walk, arrays)), made)


def backward(walk: Walk, visits: jax.Array, arrays: dict[str, Any], N: int, dtypes: dict[str, Any]) -> dict:
    """Gradients ``dq, dk, dv`` per head of the recurrence, and ``da``, those of gates, and ``dinitial``, if wanted.

    Args:
        visits: of the walk against the recurrence.
        arrays: q, k, v, do, kept; gates as for :func:`forward`; dfinal or None.
        dtypes: of what is wanted.
    """
    w, specs = walk, _Specs(walk)
    keys, values = (((w.B, w.T, w.H, dim), specs.tokens(w.H, dim)) for dim in (w.K, w.V))
    scalars = (w.B, w.H, w.T), specs.scalars()
    kinds = dict(dq=keys, dk=keys, dv=values, da=scalars if w.gate == "scalar" else keys,
                 dinitial=((N, w.H, w.K, w.V), specs.states()))
    made: dict[str, Any] = {name: (kinds[name][0], dtype, kinds[name][1]) for name, dtype in dtypes.items()}
    return _launch(_backward, walk, visits, dict(_inputs(walk, arrays)), made)
