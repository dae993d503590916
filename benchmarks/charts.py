"""Draw the charts of the documentation from raw results: ``PYTHONPATH=. python benchmarks/charts.py``.

Bars are the time over the floor, the time that reading the inputs and writing the outputs takes; lower is better.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

mpl.rcParams.update({"svg.hashsalt": "keraunos", "font.size": 9})

ROOT = Path(__file__).parent.parent
LOG = ROOT / "benchmarks" / "results" / "nvidia-h200-cuda.txt"
# A row of the run that times all three.
ROW = re.compile(
    r"^\[[\d.]+\] (?P<shape>[\d,]+) const .*?cuda (?P<cuda>.*?) \|.*?triton (?P<triton>.*?) \|.*?fla (?P<fla>.*?) \{",
    re.MULTILINE,
)
# What is read and written forward and backward, in arrays of B T H 128 values of 2 bytes; bytes a second.
UNITS, BANDWIDTH = 11, 4.25e12
NAMES = {"cuda": "keraunos (cuda)", "triton": "keraunos (triton)", "fla": "flash-linear-attention 0.6.0"}
COLORS = {"cuda": "#3f51b5", "triton": "#9fa8da", "fla": "#ffb300"}


def rows() -> dict[str, dict[str, float]]:
    """Time with gradients over the floor, by shape and implementation; a shape's first row counts."""
    found: dict[str, dict[str, float]] = {}
    for row in ROW.finditer(LOG.read_text()):
        batch, tokens, heads = map(int, row["shape"].split(","))
        floor = UNITS * batch * tokens * heads * 128 * 2 / BANDWIDTH * 1e3
        times = {name: float(re.findall(r"([\d.]+) ms", row[name])[1]) / floor for name in NAMES}
        found.setdefault(f"{batch} x {tokens:,} tokens, {heads} heads", times)
    return found


def training(path: Path) -> None:
    """Lightning attention, forward and backward, on an H200."""
    shapes = rows()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, name in enumerate(NAMES):
        bars = axes.barh([j + 0.27 * i for j in range(len(shapes))], [x[name] for x in shapes.values()], 0.25,
                         label=NAMES[name], color=COLORS[name])
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.axvline(1, color="#666666", linewidth=1)
    axes.text(1.1, -0.35, "the floor: memory alone", fontsize=8, color="#444444")
    axes.set_yticks([j + 0.27 for j in range(len(shapes))], [*shapes])
    axes.set_ylim(len(shapes) - 0.1, -0.6)
    axes.set_xlabel("time over the floor; lower is better\n"
                    "NVIDIA H200, bfloat16, head dim 128, PyTorch 2.11, 2026-11-25")
    axes.set_title("Lightning attention, forward and backward", loc="left", fontweight="bold", pad=24)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    charts = ROOT / "docs" / "charts"
    charts.mkdir(exist_ok=True)
    training(charts / "training.svg")
