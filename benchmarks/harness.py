"""Options, clocks, and a run whose results are written after every step: the scripts of this folder share them.

Inputs come from ``workloads.py``, checks and times of calls from ``measuring.py``, tables from ``output.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# JAX would take most of a GPU's memory for itself, and PyTorch is measured in the same process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import measuring
import output
from contestants import Contestant, find
from workloads import Workload

from keraunos import frontends
from keraunos.ops.cache import file_name

RESULTS = Path(__file__).parent / "results"
LINEAR = ("lightning_attention", "gla_attention")


def say(shown: Any) -> None:
    """Print a line, or something of rich."""
    if isinstance(shown, str):
        print(shown, flush=True)
        return
    from rich.console import Console

    Console(highlight=False, markup=False, width=170).print(shown)


def parser(description: str, folder: str = "", seconds: float | None = None, names: Sequence[str] = ()):
    """The options of a script.

    Args:
        description: the script's docstring.
        folder: of its results, within ``benchmarks/results``.
        seconds: the default of --seconds; None: there is no such option.
        names: what the script can be asked for by name; all of it is the default.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.set_defaults(results=RESULTS / folder)
    made.add_argument("--out", type=Path, default=RESULTS / folder, help="the file, or the folder for <device>.json")
    if seconds is not None:
        made.add_argument("--seconds", type=float, default=seconds, help="after that long nothing new begins")
    if names:

        def known(text: str) -> str:
            if text not in names:
                raise argparse.ArgumentTypeError(f"{text!r}; expected one of {', '.join(names)}")
            return text

        made.add_argument("names", nargs="*", type=known, default=list(names), metavar="NAME",
                          help=f"of {', '.join(names)}; all if none is named")
    return made


def wall(run: Callable[[], Any], calls: int = 1, finish: Callable[[Any], Any] | None = None,
         clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of each of so many calls by the host's clock, until ``finish`` has waited for the last one's results."""
    start = clock()
    for _ in range(calls):
        results = run()
    if finish is not None:
        finish(results)
    return (clock() - start) / calls


def events(run: Callable[[], Any], calls: int = 1, cycles: int = 0) -> float:
    """Seconds of each of so many calls by the events of PyTorch's GPU.

    Args:
        run: what to launch.
        calls: how often, between the two events.
        cycles: for which the GPU sleeps before: else it would wait between the events until the host has launched.
    """
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if cycles:
        torch.cuda._sleep(cycles)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls / 1e3


def captured(run: Callable[[], Any], warm: int = 1) -> Callable[[], None]:
    """The replay of a CUDA graph of what ``run`` launches, which has run ``warm`` times before."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog, a thread of its own, may do what a capture forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def in_turns(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The times of each timer, one per round; timers take turns, as a device does not stay as fast as it is."""
    found: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            found[name].append(timer())
    return found


def side_by_side(function: Callable[[Any], object], questions: Iterable[Any]) -> None:
    """Ask a function in a process for each question, at most one a processor: what they compile is in the caches then.

    A question that fails is printed: its error comes again where it is measured.
    """
    questions = list(questions)
    with ProcessPoolExecutor(max(min(len(questions), os.cpu_count() or 1), 1), get_context("spawn")) as processes:
        asked = [processes.submit(function, question) for question in questions]
        for question, answer in zip(questions, asked, strict=True):
            if error := answer.exception():
                say(f"{question}: {failure(error)}")


def build(workloads: Iterable[Workload]) -> None:
    """Compile what `cuda` and `triton` run in PyTorch for these workloads."""
    side_by_side(_build, workloads)


def _build(workload: Workload) -> None:
    program = frontends.get("torch.measure").program
    for platform in find(workload.operation, ["cuda", "triton"], []):
        for call in (workload, workload.small()) if platform.framework == "torch" else ():
            program(platform.function(call, call.log_decay()), *call.arguments("torch", 0))


def distance(got: Any, true: Any) -> float:
    """The relative error of a tensor in the Frobenius norm, computed on its device in float64."""
    true = true.double()
    return ((got.double() - true).norm() / true.norm()).item()


def failure(error: BaseException) -> str:
    """An exception's text in the results."""
    return f"{type(error).__name__}: {error}"[:500]


class Run:
    """One run of a script: its device, the time that is left, and its results.

    Attributes:
        about: the device, versions and the date.
        results: what the file holds, from the last run on where it is kept.
        path: the file; None: nothing is written.
        began: when the time began to count, of ``time.monotonic``.
    """

    def __init__(self, options: argparse.Namespace, framework: str | None = None, name: str = "", keep: bool = False):
        """Find the device and the file.

        Args:
            options: what :func:`parser` read.
            framework: whose device it is; one that has a GPU if None.
            name: of the file; that of the device if empty.
            keep: whether what earlier runs measured stays, unless it is measured anew.
        """
        self.about = output.about(framework)
        name = name or file_name(self.about["device"])
        out: Path | None = options.out
        self.path = out / name if out is not None and out.suffix != ".json" else out
        before: Path = options.results / name
        self.results: dict[str, Any] = json.loads(before.read_text()) if keep and before.exists() else {}
        self._seconds: float | None = getattr(options, "seconds", None)
        self.restart()

    def restart(self) -> None:
        """Begin to count the time anew."""
        self.began = time.monotonic()

    @property
    def late(self) -> bool:
        """True if the time is over."""
        return self._seconds is not None and time.monotonic() - self.began > self._seconds

    def measured(self) -> dict[str, Any]:
        """Device, versions and date, and the bandwidth of a large copy now."""
        about = {**self.about, "copy_bandwidth": measuring.copy_bandwidth()}
        say(f"{about['device']}: copies {about['copy_bandwidth'] / 1e9:.4g} GB/s, read plus written")
        return about

    def save(self) -> None:
        """Write all results."""
        if self.path is not None:
            output.write(self.path, self.results)

    def section(self, name: str, **more: Any) -> dict[str, Any]:
        """A new section of the results for :meth:`compare`."""
        self.results[name] = {"about": {**self.measured(), **more}, "cases": [], "left_out": []}
        return self.results[name]

    def compare(
        self,
        section: dict[str, Any],
        calls: Iterable[tuple[Workload, Sequence[Contestant]]],
        effort: measuring.Effort,
        peers: Sequence[str] = (),
    ) -> None:
        """Check and time who computes each workload; those for which the time was over are named in the section."""
        shown_before: set[tuple[str, str]] = set()
        for workload, contestants in calls:
            if self.late:
                reason = f"{self._seconds:.0f} s were over"
                section["left_out"].append({"workload": str(workload), "reason": reason})
            else:
                bandwidth = section["about"]["copy_bandwidth"]
                case = measuring.measure(workload, contestants, bandwidth, effort, say)
                section["cases"].append(case)
                say(output.show(case, peers, shown_before))
            self.save()


def require_gpu(made: argparse.ArgumentParser) -> None:
    """End the script where no framework that is installed sees a GPU."""
    if not measuring.on_gpu():
        made.error("no framework that is installed sees a GPU; on a CPU, use benchmarks/compare.py")
