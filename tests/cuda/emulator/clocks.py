"""The operations that each partition knows to have happened: vector clocks.

A partition counts its operations. ``known`` says, for each other partition, up to which of its operations all happened
before whatever comes next here; for the partition itself, up to its last thread barrier, as one thread does not know
what the others have done since. A copy by the TMA unit is counted by the phases of the barrier that it signals.
``fenced`` is the part of ``known`` that asynchronous operations (products, copies) see too, because a
``fence_async_shared`` lies on the way.
"""

from __future__ import annotations


class Clock:
    """Two vectors: what is known, and what of it asynchronous operations see."""

    __slots__ = ("fenced", "known")

    def __init__(self, known=(), fenced=()):
        self.known, self.fenced = dict(known), dict(fenced)

    def join(self, other: Clock) -> None:
        _join(self.known, other.known)
        _join(self.fenced, other.fenced)

    def copy(self) -> Clock:
        return Clock(self.known, self.fenced)


class Threads(Clock):
    """The clock of a partition, whose threads run side by side."""

    __slots__ = ("agent", "now", "own_fence")

    def __init__(self, agent):
        super().__init__()
        self.agent, self.now, self.own_fence = agent, 0, 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def fence(self) -> None:
        """Each thread's own stores, and all that it knows of, can be seen by asynchronous operations."""
        _join(self.fenced, self.known)
        self.own_fence = self.now

    def barrier(self) -> None:
        """Each thread knows what the others have done so far."""
        self.known[self.agent] = self.now
        self.fenced[self.agent] = max(self.fenced.get(self.agent, 0), self.own_fence)


def _join(mine: dict, other: dict) -> None:
    for agent, time in other.items():
        if mine.get(agent, 0) < time:
            mine[agent] = time
