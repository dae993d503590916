"""Turns what was measured into output: a JSON file with device and versions, a table for each workload, a plot."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import barchart
from measuring import backends
from workloads import Shape

import keraunos
from keraunos import frontends
from keraunos.text import pairs, printable

_PACKAGES = ("jax", "jaxlib", "jax-triton", "torch", "triton", "fla-core", "transformers", "nvidia-nccl-cu13", "numpy")
_HUES = (
    ("#3f51b5", "#9fa8da"), ("#00897b", "#80cbc4"), ("#6d4c41", "#bcaaa4"), ("#ffb300", "#ffe082"),
    ("#d81b60", "#f48fb1"), ("#546e7a", "#b0bec5"), ("#7cb342", "#c5e1a5"), ("#8e24aa", "#ce93d8"),
)


def about(framework: str | None = None) -> dict[str, Any]:
    """The device of a framework, or of one that has a GPU, the versions of everything, and the date."""
    framework = framework or max(backends(), key=lambda name: backends()[name] == "gpu")
    device = frontends.get(framework).default_device()
    return {
        "device": device.kind,
        "backend": device.backend,
        "driver": _driver() if device.backend == "gpu" else None,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "date": datetime.now(UTC).date().isoformat(),
        "keraunos": keraunos.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write results as JSON, in one step: whoever stops the run leaves the last complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


def shape_of(case: Mapping[str, Any]) -> Shape:
    """The shape of a measured workload."""
    return Shape(**case["shape"])


def fastest(case: Mapping[str, Any], name: str) -> float | None:
    """The best median, in seconds, of a platform or library over the frameworks it was called through."""
    found = [c["median_s"] for c in case["contestants"].values() if c["name"] == name and "median_s" in c]
    return min(found, default=None)


def show(case: Mapping[str, Any], against: Sequence[str], shown_before: set[tuple[str, str]]) -> Any:
    """Make a workload's text for a terminal: a table of those that were timed, below it why others were not.

    Args:
        case: what :func:`measuring.measure` returned.
        against: names of contestants; each gets a column that says how many times as fast as it the others are.
        shown_before: the reasons that earlier texts have, which this one leaves out; those of this workload are added.
    """
    from rich.console import Group
    from rich.text import Text

    reasons: dict[tuple[str, str], list[str]] = {}
    for found in case["contestants"].values():
        if "skipped" in found:
            reasons.setdefault((found["name"], found["skipped"]), []).append(found["framework"])
    new = [(f"{name} ({', '.join(of)})", why) for (name, why), of in reasons.items() if (name, why) not in shown_before]
    shown_before.update(reasons)
    notes = [(label, found["note"]) for label, found in case["contestants"].items() if "note" in found]
    title = f"{_operation(case)} {shape_of(case)} {case['dtype']} {case['pass']}"
    floor = f"floor {1e3 * case['floor_s']:.3g} ms ({case['bytes_moved'] / 1e6:.4g} MB)"
    shown: list[Any] = [Text(title, style="bold"), Text(floor)]
    if any("median_s" in found for found in case["contestants"].values()):
        shown.append(table(case, [name for name in against if fastest(case, name)]))
    for title, rows in (("Not measured:", new), ("Notes:", notes)):
        shown += ["", title, pairs(rows)] if rows else []
    return Group(*shown, "")


def table(case: Mapping[str, Any], against: Sequence[str]) -> Any:
    """A rich table of those that were timed, the fastest first; see :func:`show`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    peers = [f"vs\n{name}" for name in against]
    # 80 characters have room for two of them.
    shown = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1 if len(peers) < 2 else 0, 0, 0))
    shown.add_column("contestant", no_wrap=True)
    for column in ("ms", "x\nfloor", *peers, "host\nµs", "wall\nms", "peak", "error", "first\ns"):
        shown.add_column(column, justify="right", no_wrap=True)
    timed = [(label, found) for label, found in case["contestants"].items() if "median_s" in found]
    for label, found in sorted(timed, key=lambda one: one[1]["median_s"]):
        shown.add_row(label, *_cells(case, found, against))
    return shown


def _operation(case: Mapping[str, Any]) -> str:
    return f"{case['operation']} {case.get('variant', '')}".strip()


LEGEND = {
    "ms": "median by device events (on a CPU by the clock)",
    "x floor": "over the time to move the bytes once, or of the matrix products of softmax attention if that is longer",
    "vs": "times as fast",
    "host": "until a call returns",
    "wall": "each of many calls in a row",
    "peak": "memory over that of inputs, outputs and gradients",
    "error": "the largest, relative",
    "first": "first call in this process, compiling and tuning included",
}


def _cells(case: Mapping[str, Any], found: Mapping[str, Any], against: Sequence[str]) -> list[str]:
    median, peak = found["median_s"], found["peak_ratio"]
    peers = [fastest(case, name) for name in against]
    return [
        _short(1e3 * median), _ratio(median / case["floor_s"]),
        *("" if peer is None else _ratio(peer / median) for peer in peers),
        _short(1e6 * found["host_s"]), _short(1e3 * found["in_a_row_s"]), "" if peak is None else f"{peak:.2f}",
        f"{max(found['errors'].values()):.1e}", f"{found['first_call_s']:.1f}",
    ]


def _ratio(x: float) -> str:
    return f"{x:.2f}" if x < 100 else _short(x)


def _short(x: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}"


def check_plot(path: Path) -> None:
    """Check that :func:`plot` can draw into such a file, before anything is measured.

    Raises:
        ValueError: matplotlib is not installed, or it does not know the format that the file's ending names.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib: pip install 'keraunos[demo]' ({error})") from error
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ValueError(f"--plot is {str(path)!r}; expected an ending such as .png or .svg")


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw every contestant's time over the floor: a panel for each operation and pass, a group of bars for each shape.

    One that has no time in some shape says why instead of its bar, or below the chart if it has none at all.

    Args:
        results: ``"about"``, what :func:`about` returned, and ``"cases"``.
        path: the file; its ending names the format.
    """
    about, cases = results["about"], results["cases"]
    entries = [(label, found) for c in cases for label, found in c["contestants"].items()]
    # One hue for each platform or library, lighter through its second framework.
    named: dict[str, dict[str, None]] = {}
    for label, found in entries:
        if "median_s" in found:
            named.setdefault(found["name"], {})[label] = None
    hues = zip(itertools.cycle(_HUES), named.values(), strict=False)
    colors = {label: hue[j % 2] for hue, of in hues for j, label in enumerate(of)}
    never: dict[str, dict[str, None]] = {}
    for label, found in entries:
        if label not in colors:
            never.setdefault(_reason(found, 160), {})[label] = None
    panels: dict[str, dict[str, dict[str, float | str]]] = {}
    for c in cases:
        panels.setdefault(f"{_operation(c)} {c['pass']}", {})[str(shape_of(c))] = {
            label: found["median_s"] / c["floor_s"] if "median_s" in found else _reason(found, 60)
            for label in colors for found in [c["contestants"].get(label, {})]
        }
    caption = [
        ", ".join([
            about["device"], *dict.fromkeys(c["dtype"] for c in cases),
            *(f"{name} {about[name]}" for name in ("keraunos", "jax", "torch") if about[name]), about["date"],
        ]),
        "Beside the bars: batch, tokens, heads; then head dims, unless they are 128.",
        *(f"Not timed: {', '.join(of)}: {why}" for why, of in never.items()),
    ]
    figure = barchart.bars("Time over the floor", panels, colors, "time over the floor", "\n".join(caption),
                           "the floor")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _reason(found: Mapping[str, Any], most: int) -> str:
    """The reason why one was not timed, in so many characters at most."""
    reason = printable(" ".join(found.get("skipped", "not measured").split()))
    return reason if len(reason) <= most else reason[: most - 1].rstrip(" .,;") + "…"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0]
