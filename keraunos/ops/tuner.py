"""Measures which configuration of a call is the fastest, among those that compute the right thing."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import numpy as np

from keraunos import frontends, numerics
from keraunos.frontends.array_types import Array
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.kernel import Kernel

_log = logging.getLogger("keraunos")

# The part of the budget after which nothing more is compiled, so that what did compile is timed.
COMPILING = 0.7


@dataclass(frozen=True)
class Measurement:
    """The result of one candidate.

    Attributes:
        cfg: the candidate.
        seconds: its time in each round; empty if it was dropped before.
        dropped: why it was dropped.
    """

    cfg: Config
    seconds: tuple[float, ...] = ()
    dropped: str | None = None

    @property
    def median(self) -> float:
        """Median time; infinite if it was not timed."""
        return statistics.median(self.seconds) if self.seconds else math.inf

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the times."""
        first, _, third = np.quantile(self.seconds, (0.25, 0.5, 0.75)) if self.seconds else (math.inf,) * 3
        return float(first), float(third)

    def to_json(self) -> dict[str, Any]:
        """As stored on disk; times in microseconds."""
        if not self.seconds:
            return {"config": self.cfg.to_json(), "dropped": self.dropped}
        first, third = self.quartiles
        times = {"median": self.median, "quartile_1": first, "quartile_3": third, "best": min(self.seconds)}
        microseconds = {name: round(t * 1e6, 3) for name, t in times.items()}
        return {"config": self.cfg.to_json(), "microseconds": microseconds, "rounds": len(self.seconds)}


@dataclass(frozen=True)
class TuneResult:
    """The result of a tuning.

    Attributes:
        winner: the configuration to use; None if every candidate failed.
        measurements: all candidates; the heuristic's is the first.
        backward: the backward was timed and checked too.
        note: why the winner won.
    """

    winner: Config | None
    measurements: tuple[Measurement, ...]
    backward: bool
    note: str

    def reasons(self) -> str:
        """Why candidates were dropped, each reason once."""
        counts: dict[str, list[Config]] = {}
        for m in self.measurements:
            if m.dropped:
                counts.setdefault(m.dropped, []).append(m.cfg)
        return "; ".join(f"{len(cfgs)} of {len(self.measurements)}: {reason}" for reason, cfgs in counts.items())

    def to_json(self) -> dict[str, Any]:
        """The entry that the caches on disk hold."""
        return {
            "winner": None if self.winner is None else self.winner.to_json(),
            "backward": self.backward,
            "note": self.note,
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "measurements": [m.to_json() for m in self.measurements],
        }


# Rounds of timing without which nothing is taken in place of the heuristic's.
_ENOUGH = 3


class _Dropped(Exception):  # noqa: N818
    """A candidate is out, for the reason given."""


class Tuner:
    """Times the candidates of a call on inputs of its own and picks the fastest that is right.

    Candidates that do not compile, do not run, or do not match the operation's float64 reference on small calls of the
    same kind are dropped. The others run in turns, so that a disturbance meets all of them. The heuristic's stays
    unless, after at least three rounds, another one's third quartile is below its first quartile.

    Args:
        warmup: untimed runs of each candidate.
        iters: rounds of timing, at most.
        budget: seconds for all of it; then the best so far wins. The heuristic's configuration is always compiled and
            timed once, however long that takes; so is, if that one fails, the first that is right.
        progress: show a progress bar on standard error; None: if it is a terminal.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, warmup: int = 5, iters: int = 100, budget: float = 20.0, progress: bool | None = None):
        if warmup < 0 or iters < 1 or not budget > 0:
            raise ValueError(
                f"Tuner: warmup={warmup}, iters={iters}, budget={budget}; expected warmup >= 0, iters >= 1, budget > 0"
            )
        self.warmup, self.iters, self.budget, self.progress = warmup, iters, budget, progress

    def tune(self, kernel: Kernel, inv: Invocation, candidates: Sequence[Config], backward: bool = False) -> TuneResult:
        """Measure the candidates of one call.

        It works in threads of its own, outside any trace that the caller is in, and never looks at the call's arrays.

        Args:
            kernel: the operation.
            inv: the call.
            candidates: complete configurations; the first is the heuristic's.
            backward: time forward plus backward, and drop candidates whose gradient is wrong.

        Returns:
            The result; that every candidate failed is a result too.

        Raises:
            NotImplementedError: the operation has no sample or reference.
        """
        measure = frontends.get(f"{inv.framework}.measure")
        deadline = _Deadline(self.budget)
        with ThreadPoolExecutor(1, thread_name_prefix="keraunos-tuner") as thread:
            work = thread.submit(measure.elsewhere(self._tune), kernel, inv, list(candidates), backward, deadline)
            try:
                result = work.result()
            except BaseException:
                deadline.end()
                raise
        _log.info("tuned %s: %s", inv.key, result.note)
        return result

    def _tune(self, kernel: Kernel, inv: Invocation, cfgs: list[Config], backward: bool,
              deadline: _Deadline) -> TuneResult:
        measure = frontends.get(f"{inv.framework}.measure")
        with _progress(self.progress, f"tuning {inv.op_id}", len(cfgs) + self.iters) as advance:
            jobs = _Jobs(kernel, inv, cfgs, backward)
            runs, dropped = _prepare(measure, jobs, deadline, advance)
            clock = measure.clock(list(runs.values()), inv.backend)
            seconds: list[list[float]] = [[] for _ in cfgs]
            for i in runs:
                for _ in range(self.warmup):
                    if deadline.left() > 0:
                        clock(runs[i])
            for n in range(self.iters):
                # Every other round runs backwards: no candidate always follows the same one.
                for i in sorted(runs, reverse=bool(n % 2)):
                    # One round is always finished: what has been compiled gets a time.
                    if n == 0 or deadline.left() > 0:
                        seconds[i].append(clock(runs[i]))
                advance()
                if deadline.left() <= 0:
                    break
        found = tuple(
            Measurement(cfg, tuple(s), dropped.get(i)) for i, (cfg, s) in enumerate(zip(cfgs, seconds, strict=True))
        )
        return _decide(found, backward)


def _prepare(measure: ModuleType, jobs: _Jobs, deadline: _Deadline,
             advance: Callable[[], None]) -> tuple[dict[int, Callable], dict[int, str]]:
    """Check and compile all candidates: the programs of the good ones, the reasons of the others, by number."""
    runs, dropped = {}, {}
    # No "with": leaving it would wait for a compiler that is past the deadline.
    pool = ThreadPoolExecutor(min(measure.COMPILE_THREADS, len(jobs.cfgs)), thread_name_prefix="keraunos-compile")
    ready = measure.elsewhere(jobs.ready)
    futures: dict[Future, int] = {pool.submit(ready, i): i for i in range(len(jobs.cfgs))}
    for future in futures:
        future.add_done_callback(lambda _: advance())
    wait(futures, timeout=deadline.left() - (1 - COMPILING) * deadline.seconds)
    # The heuristic's is waited for however long it takes, for the others to be compared with; so is the first that is
    # right, if the heuristic's is not.
    first = next(iter(futures))
    while not deadline.ended and not all(f.done() for f in futures):
        if first.done() and any(f.done() and not f.exception() for f in futures):
            break
        wait(futures, timeout=0.1, return_when="FIRST_COMPLETED")
    pool.shutdown(wait=False, cancel_futures=True)
    for future, i in futures.items():
        if not future.done() or future.cancelled():
            dropped[i] = "the time budget ended before it was compiled"
        elif error := future.exception():
            dropped[i] = str(error) if isinstance(error, _Dropped) else _first_line(error)
        else:
            runs[i] = future.result()
    return runs, dropped


def _decide(found: tuple[Measurement, ...], backward: bool) -> TuneResult:
    best = min(found, key=lambda m: m.median)
    heuristic = found[0]
    if not best.seconds:
        return TuneResult(None, found, backward, "every candidate failed")
    if best is heuristic:
        note = "the heuristic's configuration is the fastest"
    elif not heuristic.seconds:
        note = f"the fastest; the heuristic's was dropped: {heuristic.dropped}"
    else:
        gain = heuristic.median / best.median
        note = f"{gain:.2f} times as fast as the heuristic's"
        if min(len(best.seconds), len(heuristic.seconds)) < _ENOUGH:
            # One disturbed round would decide.
            note = f"the heuristic's stays: the time budget ended after fewer than {_ENOUGH} rounds"
            best = heuristic
        elif best.quartiles[1] >= heuristic.quartiles[0]:
            note = f"the heuristic's stays: the fastest is {note}, which is within the spread"
            best = heuristic
    return TuneResult(best.cfg, found, backward, note)


class _Jobs:
    """The candidates of one call: each is checked on small calls, then made ready to be timed on the call itself."""

    def __init__(self, kernel: Kernel, inv: Invocation, cfgs: list[Config], backward: bool):
        self.kernel, self.inv, self.cfgs, self.backward = kernel, inv, cfgs, backward
        self.checks = [_Check(kernel, small, seed) for seed, small in enumerate(kernel.check_calls(inv, cfgs))]
        self.measure = frontends.get(f"{inv.framework}.measure")
        self.args, self.kwargs = kernel.sample(inv, len(self.checks))

    def ready(self, i: int) -> Callable[[], Any]:
        """A run of candidate ``i`` on the call.

        Raises:
            Exception: the candidate is out; the message says why.
        """
        for check in self.checks:
            check(self.cfgs[i], self.backward)
        fn = functools.partial(self.kernel.run, cfg=self.cfgs[i], **self.kwargs)
        cotangents = _cotangents(self.inv, self.measure.results(fn, self.args)) if self.backward else None
        return self.measure.program(fn, self.args, cotangents)


class _Check:
    """A small call whose right results are known."""

    def __init__(self, kernel: Kernel, inv: Invocation, seed: int):
        self.kernel, self.inv = kernel, inv
        self.measure = frontends.get(f"{inv.framework}.measure")
        self.args, self.kwargs = kernel.sample(inv, seed)
        self.numpy = [self.measure.values(x) if frontends.framework_of(x) else x for x in self.args]
        floats = [dtype for dtype, _ in inv.arrays.values() if "float" in dtype]
        self.dtype = numerics.coarser(*floats)
        # The truth has more digits than anything under test; the reference algorithm in the inputs' dtype sums in
        # float32 at least, as all kernels do.
        double = self.dtype == "float64"
        self.dtypes: tuple[type, type] = (np.longdouble, np.float64) if double else (np.float64, np.float32)
        self.outputs = [kernel.reference(self.numpy, self.kwargs, dtype) for dtype in self.dtypes]
        self.gradients: list[tuple] = []
        self.lock = threading.Lock()

    def __call__(self, cfg: Config, backward: bool) -> None:
        """Compare a candidate's results with the right ones.

        Raises:
            Exception: it does not run, or a result is wrong.
        """
        fn = functools.partial(self.kernel.run, cfg=cfg, **self.kwargs)
        cotangents = _cotangents(self.inv, self.measure.results(fn, self.args)) if backward else None
        outputs, gradients = self.measure.program(fn, self.args, cotangents)()
        self._compare("output", outputs, *self.outputs)
        if cotangents is not None:
            self._compare("gradient", gradients, *self._gradients(cotangents))

    def _gradients(self, cotangents: list[Array]) -> list[tuple]:
        with self.lock:
            if not self.gradients:
                values = [self.measure.values(x) for x in cotangents]
                self.gradients = [
                    self.kernel.reference_vjp(self.numpy, self.kwargs, values, dtype) for dtype in self.dtypes
                ]
            return self.gradients

    def _compare(self, what: str, got: Sequence[Array | None], truth: Sequence[np.ndarray | None],
                 plain: Sequence[np.ndarray | None]) -> None:
        for i, (x, true, low) in enumerate(zip(got, truth, plain, strict=True)):
            if x is None or true is None:
                continue
            dtype = frontends.get(self.inv.framework).dtype_name(x)
            low = self.measure.values(self.measure.array(low, dtype, self.inv.backend))
            allowed = numerics.bound(low, true, numerics.coarser(dtype, self.dtype))
            error = numerics.error(self.measure.values(x), true)
            if not error <= allowed:
                size = " ".join(f"{d}{n}" for d, n in self.inv.dims.items())
                raise _Dropped(f"{what} {i} is wrong: error {error:.2g}, allowed {allowed:.2g} ({size})")


def _cotangents(inv: Invocation, results: Sequence[tuple[tuple[int, ...], str]]) -> list[Array]:
    measure = frontends.get(f"{inv.framework}.measure")
    return [measure.normal(shape, dtype, 1000 + i, inv.backend) for i, (shape, dtype) in enumerate(results)]


class _Deadline:
    def __init__(self, seconds: float):
        self.seconds, self.at, self.ended = seconds, time.monotonic() + seconds, False

    def left(self) -> float:
        return -math.inf if self.ended else self.at - time.monotonic()

    def end(self) -> None:
        """Stop as soon as possible: nobody waits for the result."""
        self.ended = True


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def _progress(wanted: bool | None, title: str, steps: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal; yields what advances it by a step."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=steps)
        yield lambda: bar.advance(task)
