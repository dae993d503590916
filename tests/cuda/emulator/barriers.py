"""mbarriers, fences, and barriers between the threads of a partition."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import errors, machine, shared
from .clocks import Clock
from .values import concrete, static, tensor


class Barrier:
    """An mbarrier: a phase is complete when all arrivals and all bytes that were expected have come."""

    def __init__(self, name: str, count: int, here):
        self.name, self.count, self.left = name, count, count
        self.bytes = 0  # Still expected; below zero, more have come.
        self.completed = 0
        self.arriving, self.released = Clock(), Clock()
        self.copies: list = []  # Under way, and not yet counted.
        self.initialised = here.current, here.current.clock.tick()

    def __str__(self):
        return self.name

    def state(self) -> str:
        text = f"{self} has completed {self.completed} phases, {self.count - self.left} of {self.count} arrivals came"
        return text + (f", {self.bytes} bytes are still expected" if self.bytes else "")

    def passes(self, parity: int) -> bool:
        return self.completed & 1 != parity

    def expect(self, nbytes: int) -> None:
        self.bytes += nbytes
        self.arrive(1)

    def arrive(self, count: int) -> None:
        here = machine.here()
        if count > self.left:
            raise errors.EmulatorError(
                f"{self}: {count} arrivals where {self.left} of {self.count} were left, at {here.place()}"
            )
        here.current.clock.tick()
        self.arriving.join(here.current.clock)
        self.left -= count
        self._complete()

    def deliver(self, copy) -> None:
        """A copy arrives."""
        self.copies.remove(copy)
        copy.happen()
        copy.access.time = self.completed + 1
        self.bytes -= copy.nbytes
        self._complete()

    def pull(self) -> bool:
        """Let copies arrive, if they complete the phase."""
        if self.left or not self.copies or sum(copy.nbytes for copy in self.copies) < self.bytes:
            return False
        phase = self.completed
        while self.copies and self.completed == phase:
            self.deliver(self.copies[0])
        return self.completed > phase

    def _complete(self) -> None:
        if self.left or self.bytes:
            return
        for partition in machine.here().partitions:
            if partition.barrier is self and partition.ready():
                raise errors.DeadlockError(
                    f"{self} completes phase {self.completed} while {partition} has not seen the one before, "
                    f"and may miss it: it waits {partition.waits()}"
                )
        self.completed += 1
        self.left = self.count
        self.arriving.known[self] = self.completed
        self.released = self.arriving.copy()

    def end(self) -> None:
        if self.copies:
            raise errors.UnfinishedError(f"the kernel ends, but no wait on {self} needed {self.copies[0]}")
        if self.bytes:
            what = (
                f"{self.bytes} bytes of {self} never came"
                if self.bytes > 0
                else f"{-self.bytes} bytes more than expected came to {self}"
            )
            raise errors.EmulatorError(f"the kernel ends: {what}")


def _cell(view):
    if not isinstance(view, shared.View) or not isinstance(view.layout, mbarrier.MBarrierLayout):
        raise errors.CompileError(f"an mbarrier is needed, not {view!r}")
    if view.numel != 1 or view.dtype != gl.int64:
        raise errors.CompileError(f"an mbarrier is one int64, not {view.shape} of {view.dtype}")
    return view.allocation, view.data.__array_interface__["data"][0]


def of(view, *, copies=False) -> Barrier:
    """The barrier in a piece of shared memory, for the running partition, or for copies that it issues."""
    allocation, address = _cell(view)
    here = machine.here()
    found = allocation.barriers.get(address)
    if found is None:
        raise errors.EmulatorError(f"{view} is used at {here.place()}, but was not initialised")
    who, when = found.initialised
    if who is not here.current and here.current.clock.known.get(who, 0) < when:
        raise errors.RaceError(
            f"{view}: {here.current} uses it at {here.place()}, but nothing orders that after {who}'s init"
        )
    if (
        copies
        and here.current.clock.fenced.get(who, 0) < when
        and not (who is here.current and here.current.clock.own_fence >= when)
    ):
        raise errors.RaceError(
            f"{view}: a copy at {here.place()} signals it, with no fence_async_shared() after its init"
        )
    return found


def holds(pred) -> bool:
    """Whether an operation takes place."""
    return bool(tensor(pred))


def init(view, count):
    allocation, address = _cell(view)
    here = machine.here()
    if address in allocation.barriers:
        raise errors.EmulatorError(f"{view} is initialised twice, at {here.place()}")
    barrier = Barrier(view.name, static(count, "count"), here)
    allocation.barriers[address] = barrier
    here.barriers.append(barrier)


def invalidate(view):
    barrier = of(view)
    allocation, address = _cell(view)
    barrier.end()
    del allocation.barriers[address]
    machine.here().barriers.remove(barrier)


def expect(view, bytes, pred=True):
    nbytes = static(bytes, "bytes")
    if holds(pred):
        of(view).expect(nbytes)
        machine.here().pause()


def arrive(view, *, count=1, pred=True):
    count = static(count, "count")
    if holds(pred):
        of(view).arrive(count)
        machine.here().pause()


def wait(view, phase, pred=True, deps=()):
    if not holds(pred):
        return
    here, barrier, parity = machine.here(), of(view), concrete(phase, "phase")
    if parity not in (0, 1):
        raise errors.EmulatorError(f"{view}: a wait's phase is 0 or 1, not {parity}, at {here.place()}")
    where = here.place()
    me = here.current
    here.wait(
        lambda: barrier.passes(parity),
        lambda: f"for {barrier} to complete a phase of parity {parity} at {where}: {barrier.state()}",
        barrier,
    )
    me.clock.tick()
    me.clock.join(barrier.released)


# Between the threads of a partition


def fence_async_shared(cluster=False):
    clock = machine.here().current.clock
    clock.tick()
    clock.fence()


def thread_barrier():
    here = machine.here()
    here.current.clock.tick()
    here.current.clock.barrier()
    here.pause()
