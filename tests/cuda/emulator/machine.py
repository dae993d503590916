"""One program of a kernel: its partitions, of which one runs at a time, and who is next."""

from __future__ import annotations

import os
import random
import sys
import threading

import numpy as np

from .clocks import Threads
from .errors import DeadlockError, EmulatorError, UnfinishedError

_running: list[Machine] = []
MODES = ("late", "early", "random")


def here() -> Machine:
    """The program that runs now."""
    if not _running:
        raise EmulatorError("this works only inside a kernel that the emulator runs")
    return _running[-1]


class Stopped(BaseException):
    """Another partition has failed."""


class Partition:
    """Warps that run one function: their clock, and the asynchronous operations that they have not waited for."""

    def __init__(self, number: int, name: str, warps: int):
        self.number, self.name, self.warps = number, name, warps
        self.clock = Threads(self)
        self.products: list = []  # of warpgroup_mma, oldest first
        self.stores: list = []  # of the TMA unit, oldest first
        self.copies: list = []  # by its threads, oldest first
        self.groups = 0  # Of these, which were committed.
        self.turn = threading.Semaphore(0)
        self.ended = False
        self.ready = None  # Whether what it waits for has come; None if it waits for nothing.
        self.waits = None  # Describes that.
        self.barrier = None  # The mbarrier, if it is one.

    def __str__(self):
        return f"partition {self.number} ({self.name})"

    def runnable(self) -> bool:
        return not self.ended and (self.ready is None or self.ready())

    def end(self) -> None:
        """Raises if asynchronous operations are left."""
        for what, left in (("warpgroup_mma_wait", self.products), ("tma.store_wait", self.stores),
                           ("async_copy.wait_group", self.copies)):
            if left:
                raise UnfinishedError(f"{self} ends, but no {what} waited for {left[0]}")


class Machine:
    """One program: modes and schedules are explained in the package's docstring."""

    def __init__(self, name, warps, ids, grid, mode, rng, shuffled):
        self.ids, self.grid, self.mode, self.rng, self.shuffled = ids, grid, mode, rng, shuffled
        self.main = Partition(0, name, warps)
        self.partitions, self.current = [self.main], self.main
        self.barriers: list = []
        self.allocations: list = []
        self.codes: set = set()
        self.failure: BaseException | None = None

    def run(self, function, args) -> None:
        _running.append(self)
        try:
            with np.errstate(all="ignore"):
                function(*args)
                self.main.end()
                for barrier in self.barriers:
                    barrier.end()
        finally:
            _running.pop()

    def place(self) -> str:
        """Where in the kernel the running partition is, and where it called that function."""
        found, frame = [], sys._getframe(1)
        while frame is not None and len(found) < 2:
            if frame.f_code in self.codes:
                found.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})")
            frame = frame.f_back
        return ", called at ".join(found) or "the kernel's start"

    # Partitions

    def specialize(self, functions, names, warps):
        """Run functions side by side, the first as this partition; its result."""
        if len(self.partitions) > 1:
            raise EmulatorError("a second warp_specialize in one kernel")
        self.main.clock.tick()
        self.main.clock.barrier()
        self.main.name = names[0]
        workers = [Partition(i, name, n) for i, (name, n) in enumerate(zip(names[1:], warps, strict=True), start=1)]
        for worker in workers:
            worker.clock.join(self.main.clock)
        self.partitions += workers
        threads = [
            threading.Thread(target=self._work, args=(worker, function), daemon=True)
            for worker, function in zip(workers, functions[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            self.pause()
            result = functions[0]()
            self.wait(lambda: all(worker.ended for worker in workers), lambda: "for the other partitions to end")
        except Stopped:
            raise self.failure from None
        except BaseException as error:
            self.failure = error
            raise
        finally:
            if self.failure is not None:
                for worker in workers:
                    worker.turn.release()
            for thread in threads:
                thread.join()
        for worker in workers:
            worker.clock.tick()
            worker.clock.barrier()
            self.main.clock.join(worker.clock)
        return result

    def _work(self, worker: Partition, function) -> None:
        worker.turn.acquire()
        if self.failure is not None:
            return
        try:
            with np.errstate(all="ignore"):
                function()
            worker.end()
            worker.ended = True
            self.switch()
        except Stopped:
            pass
        except BaseException as error:
            self.failure = error
            worker.ended = True
            self.main.turn.release()

    # Whose turn it is

    def pause(self) -> None:
        """Something other than this partition may happen here."""
        if self.mode == "random":
            self._advance()
        if self.shuffled and len(self.partitions) > 1 and self.rng.random() < 0.5:
            self.switch()

    def wait(self, ready, waits, barrier=None) -> None:
        """Go on when ready; ``waits`` describes it, and ``barrier`` is what is waited for, if it is one."""
        me = self.current
        me.ready, me.waits, me.barrier = ready, waits, barrier
        self.pause()
        if not ready():
            self.switch()
        me.ready = me.waits = me.barrier = None

    def switch(self) -> None:
        """The next partition's turn, which may be this one's again."""
        me, following = self.current, self._next()
        if following is me:
            return
        self.current = following
        following.turn.release()
        if not me.ended:
            me.turn.acquire()
            if self.failure is not None:
                raise Stopped

    def _next(self) -> Partition:
        number = self.current.number
        order = self.partitions[number + 1 :] + self.partitions[:number]
        if self.shuffled:
            self.rng.shuffle(order)
        order.append(self.current)
        for partition in order:
            if partition.runnable():
                return partition
        for partition in order:
            if partition.barrier is not None and partition.barrier.pull() and partition.runnable():
                return partition
        waits = [f"{p} waits {p.waits()}" for p in self.partitions if not p.ended]
        raise DeadlockError("no partition can go on:\n  " + "\n  ".join(waits))

    def _advance(self) -> None:
        """Any asynchronous operations under way happen now, or do not."""
        for partition in self.partitions:
            for queue in (partition.products, partition.stores, partition.copies):
                for operation in queue:
                    if self.rng.random() < 0.5:
                        break
                    operation.happen()
        for barrier in self.barriers:
            for copy in list(barrier.copies):
                if self.rng.random() < 0.3:
                    barrier.deliver(copy)


def programs(name, function, arguments, warps, grid, mode, seed) -> None:
    """Run every program of a grid, one after another."""
    if mode not in MODES:
        raise ValueError(f"launch: mode must be one of {MODES}, not {mode!r}")
    sizes = (*grid, 1, 1)[:3]
    rng = random.Random(seed)
    for z in range(sizes[2]):
        for y in range(sizes[1]):
            for x in range(sizes[0]):
                machine = Machine(name, warps, (x, y, z), sizes, mode, rng, seed != 0)
                try:
                    machine.run(function, arguments)
                except Exception as error:
                    error.add_note(f"{name}, program {x, y, z}, mode={mode!r}, seed={seed}")
                    raise
