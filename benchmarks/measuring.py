"""Times contestants against each other on one device, and the memory bandwidth that sets the floor under them."""

from __future__ import annotations

import functools
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from contestants import Contestant, label
from correctness import WrongResultError, check
from workloads import Workload

from keraunos import frontends

# Inputs and outputs of less than this are rotated among several sets: more than any device's cache holds.
CACHES = 1 << 28
_MOST_SETS = 8
# Calls whose host time and latency are taken.
_CALLS = 20
# Calls in a row, where a contestant has the device without a pause.
_UNDER_LOAD = 100


@dataclass(frozen=True)
class Effort:
    """The limits of measuring one workload.

    Attributes:
        rounds: times each contestant is timed, at most; on a GPU each time is the mean of ten runs.
        seconds: after that long, no further round of one workload begins.
        load: seconds for which the first contestant then runs without a pause, of which the last times are "hot".
    """

    rounds: int = 20
    seconds: float = 4.0
    load: float = 0.0


@functools.cache
def on_gpu() -> bool:
    """True if a framework that is installed has a GPU."""
    return any(backend == "gpu" for backend in backends().values())


@functools.cache
def backends() -> dict[str, str]:
    """The kind of device that each installed framework puts arrays on."""
    found = {}
    for framework in ("torch", "jax"):
        try:
            found[framework] = frontends.get(framework).default_device().backend
        except ImportError:
            continue
        if framework == "torch" and found["torch"] == "gpu":
            import torch

            device = torch.cuda.current_device()
    if found.get("torch") == "gpu":
        # JAX leaves the last of several GPUs current, PyTorch's events would be there, and its arrays elsewhere.
        torch.cuda.set_device(device)
    return found


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a large copy within the device's memory."""
    n = 1 << 31 if on_gpu() else 1 << 26
    if not on_gpu():
        source, target = np.random.default_rng(0).random(n // 8), np.empty(n // 8)

        def seconds() -> float:
            start = time.perf_counter()
            np.copyto(target, source)
            return time.perf_counter() - start

    else:
        framework = next(name for name, backend in backends().items() if backend == "gpu")
        measure = frontends.get(f"{framework}.measure")
        source = measure.normal((n // 4,), "float32", 0, "gpu")
        # The sum is a copy that no compiler drops.
        run = measure.program(lambda x: x.clone() if framework == "torch" else x + 1, [source])
        clock = measure.clock([run], "gpu")

        def seconds() -> float:
            return clock(run)

    seconds()
    return 2 * n / statistics.median(seconds() for _ in range(7))


@functools.cache
def product_rate(dtype: str) -> float:
    """Floating-point operations per second of a large matrix product; on a CPU in float32, by NumPy."""
    n = 8192 if on_gpu() else 1024
    if not on_gpu():
        x = np.ones((n, n), np.float32)

        def seconds() -> float:
            start = time.perf_counter()
            x @ x
            return time.perf_counter() - start

    else:
        framework = next(name for name, backend in backends().items() if backend == "gpu")
        framework_measure = frontends.get(f"{framework}.measure")
        x = framework_measure.normal((n, n), dtype, 0, "gpu")
        run = framework_measure.program(lambda x: x @ x, [x])
        clock = framework_measure.clock([run], "gpu")

        def seconds() -> float:
            return clock(run)

    seconds()
    return 2 * n**3 / statistics.median(seconds() for _ in range(7))


def floor(workload: Workload, bandwidth: float) -> float:
    """Seconds that moving the bytes takes, or the matrix products where they take longer."""
    rate = product_rate(workload.dtype) if workload.products else 1.0
    return max(workload.bytes_moved / bandwidth, workload.products / rate)


def measure(
    workload: Workload,
    contestants: Sequence[Contestant],
    bandwidth: float,
    effort: Effort,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Check, then time the contestants in turns on one workload.

    Args:
        workload: what they compute.
        contestants: who.
        bandwidth: bytes per second that set the floor.
        effort: how long to measure.
        say: is called with a line that names the step.

    Returns:
        All figures, as JSON values. A contestant that could not be timed has ``"skipped"``, the reason.
    """
    reports: dict[str, dict[str, Any]] = {}
    entries: dict[str, _Entry] = {}
    for contestant in contestants:
        report: dict[str, Any] = {"name": contestant.name, "framework": contestant.framework}
        reports[label(contestant)] = report
        reason = contestant.unsupported(workload)
        if reason is not None:
            report["skipped"] = reason
            continue
        say(f"{workload}: {label(contestant)}")
        try:
            report |= contestant.about(workload)
            # The first call is the workload's own: a library that tunes then must not do so on the small call.
            entry = _Entry(contestant, workload)
            report["errors"] = check(contestant, workload)
            report |= entry.figures()
            slow = 0.05 if entry.backend == "gpu" else 2.0
            if report["latency_s"] > slow:
                report["seconds"] = [report["latency_s"]]
                report["note"] = f"one call takes more than {slow} s: timed once, by the host's clock"
            else:
                entries[label(contestant)] = entry
                entry.prepare_timing()
        except WrongResultError as error:
            report |= {"skipped": str(error), "wrong": True}
        except Exception as error:
            # Whatever a library raises is a finding about it, and must not end the measurement of the others.
            report["skipped"] = _first_line(error)
            entries.pop(label(contestant), None)
    _time_in_turns(entries, reports, effort)
    entries.clear()
    _give_back_memory()
    for report in reports.values():
        if report.get("seconds"):
            report["median_s"] = statistics.median(report["seconds"])
    return {
        **asdict(workload), "pass": workload.stage, "bytes_moved": workload.bytes_moved,
        "floor_s": floor(workload, bandwidth), "contestants": reports,
    }


def _time_in_turns(entries: dict[str, _Entry], reports: dict[str, dict], effort: Effort) -> None:
    end = time.monotonic() + effort.seconds
    for n in range(effort.rounds):
        # In another order every time: one that draws much power slows down whoever follows it.
        for name, entry in random.Random(n).sample(list(entries.items()), len(entries)):
            try:
                took = entry.clock(entry.rotating) / entry.sets
            except Exception as error:
                reports[name]["skipped"] = _first_line(error)
                del entries[name]
                continue
            # The first is for warming up.
            if n:
                reports[name].setdefault("seconds", []).append(took)
        if n and time.monotonic() > end:
            break
    if effort.load and entries:
        name, entry = next(iter(entries.items()))
        reports[name]["hot_s"] = statistics.median(_under_load(entry, effort))


def _under_load(entry: _Entry, effort: Effort) -> list[float]:
    """The last times, by the host's clock, of one contestant that has run for so long without a pause."""
    found: list[float] = []
    end = time.monotonic() + effort.load
    while time.monotonic() < end or len(found) < effort.rounds:
        found.append(entry.in_a_row(entry.rotating, _UNDER_LOAD) / entry.sets)
    return found[-effort.rounds :]


class _Entry:
    """One contestant's programs for a workload; the first call is timed as it is made."""

    def __init__(self, contestant: Contestant, workload: Workload):
        self.workload, self.framework = workload, contestant.framework
        self.measure = frontends.get(f"{self.framework}.measure")
        self.backend = frontends.get(self.framework).default_device().backend
        self.fn = contestant.function(workload, workload.log_decay())
        self.run, self.first = self._first()

    def _first(self) -> tuple[Any, float]:
        arrays, cotangents = self.workload.arguments(self.framework, 0)
        self.finish(arrays)
        start = time.perf_counter()
        run = self.measure.program(self.fn, arrays, cotangents)
        self.finish(run())
        return run, time.perf_counter() - start

    def finish(self, results: Any) -> None:
        """Wait until the results are there."""
        finish(self.framework, results)

    def in_a_row(self, run: Callable, calls: int) -> float:
        """Seconds of each of so many calls without a pause, by the host's clock."""
        start = time.perf_counter()
        for _ in range(calls):
            results = run()
        self.finish(results)
        return (time.perf_counter() - start) / calls

    def figures(self) -> dict[str, Any]:
        """First call, memory, and what the host sees of a call: to return, until its end, and each of many in a row."""
        returned, ended = [], []
        for _ in range(_CALLS):
            start = time.perf_counter()
            results = self.run()
            returned.append(time.perf_counter() - start)
            self.finish(results)
            ended.append(time.perf_counter() - start)
            del results
            if sum(ended) > 1:
                break
        calls = max(2, min(_CALLS, int(0.5 / min(ended))))
        # In a row, a call's results exist while those of the call before still do. The first such call may have to ask
        # for memory, which takes long, once.
        results = [self.run() for _ in range(2)]
        self.finish(results)
        del results
        in_a_row = self.in_a_row(self.run, calls)
        peak = self._peak_memory()
        return {
            "first_call_s": self.first,
            "host_s": statistics.median(returned),
            "latency_s": statistics.median(ended),
            "in_a_row_s": in_a_row,
            "peak_bytes": peak,
            "peak_ratio": None if peak is None else peak / self.workload.bytes_kept,
        }

    def _peak_memory(self) -> int | None:
        """Bytes that a call needs in all: its inputs, its results and what it allocates in between."""
        if self.framework == "jax":
            memory = self.run.compiled.memory_analysis()
            parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
            return None if memory is None else sum(getattr(memory, part) for part in parts)
        if self.backend != "gpu":
            return None
        import torch

        # What earlier calls left in cycles would be counted as there before, and then freed.
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.finish(self.run())
        # Inputs and output gradients were there before.
        inputs, output = self.workload.input_bytes, self.workload.output_bytes
        return torch.cuda.max_memory_allocated() - before + inputs + self.workload.backward * output

    def prepare_timing(self) -> None:
        """One program over enough sets of inputs that no cache holds them all."""
        self.sets = max(1, min(_MOST_SETS, -(-CACHES // self.workload.bytes_moved)))
        self.rotating = self.run if self.sets == 1 else self._over_all_sets()
        self.clock = self.measure.clock([self.rotating], self.backend)

    def _over_all_sets(self) -> Callable:
        arrays, cotangents = zip(
            *(self.workload.arguments(self.framework, seed) for seed in range(self.sets)), strict=True
        )
        width = len(arrays[0])

        def over_all_sets(*flat: Any) -> list:
            return [self.fn(*flat[i : i + width]) for i in range(0, len(flat), width)]

        together = [c for one in cotangents for c in one] if self.workload.backward else None
        run = self.measure.program(over_all_sets, [x for one in arrays for x in one], together)
        self.finish(run())
        return run


def _give_back_memory() -> None:
    """PyTorch keeps what it freed, which JAX cannot use then."""
    if backends().get("torch") == "gpu":
        import torch

        torch.cuda.empty_cache()


def finish(framework: str, results: Any) -> None:
    """Wait until a framework's results are there."""
    if framework == "jax":
        import jax

        jax.block_until_ready(results)
    elif backends()["torch"] == "gpu":
        import torch

        torch.cuda.synchronize()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
