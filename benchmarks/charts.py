"""Draw the charts of the documentation from raw results: ``PYTHONPATH=. python benchmarks/charts.py``.

The floor of linear attention is the time that reading the inputs and writing the outputs takes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import barchart
import matplotlib as mpl

mpl.rcParams["svg.hashsalt"] = "keraunos"

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {"cuda": "keraunos (cuda)", "triton": "keraunos (triton)", "fla": "flash-linear-attention 0.6.0"}
COLORS = ("#3f51b5", "#9fa8da", "#ffb300")


def bars(path: Path, title: str, rows: dict[str, dict[str, float]], *more: Any, **options: Any) -> None:
    """Save a chart of one panel, the same bytes each time."""
    barchart.bars(title, {"": rows}, *more, **options).savefig(path, metadata={"Date": None})


def read(name: str) -> dict:
    """A file of the raw results."""
    return json.loads((RESULTS / name).read_text())


def training(path: Path) -> None:
    """Lightning attention, forward and backward, on an H200."""
    section = read("nvidia-h200.json")["lightning_attention"]
    about, rows = section["about"], {}
    for case in section["cases"]:
        if case["pass"] == "forward+backward":
            shape, times = case["shape"], case["contestants"]
            rows[f"{shape['B']} x {shape['T']:,} tokens\n{shape['H']} heads"] = {
                name: times[f"{x} (torch)"]["median_s"] / case["floor_s"] for x, name in NAMES.items()
            }
    bars(path, "Lightning attention, forward and backward", rows, dict(zip(NAMES.values(), COLORS, strict=True)),
         "time over the floor",
         f"{about['device']}, bfloat16, head dim 128, PyTorch {about['torch'][:4]}, {about['date']}",
         ideal="the floor: memory alone")


def serving(path: Path) -> None:
    """The attention of one layer in a step of an engine: the loop that vLLM has, and one call for all requests."""
    found = read("models/nvidia-h200.json")
    named = {"float32 loop": "loop over requests in float32, as vLLM's", "loop": "loop in bfloat16",
             "plugin": "keraunos' plugin"}
    steps = {
        row["name"].removeprefix("vLLM's step of ").removesuffix(", 64 heads of 128"):
            {named[x]: cost["total_ms"] for x, cost in row["costs"].items()}
        for row in found["rows"] if row["name"].startswith("vLLM's step")
    }
    about = found["about"]
    colors = dict(zip(named.values(), COLORS[::-1], strict=True))
    bars(path, "Lightning attention of one layer in a step of an engine", steps, colors, "milliseconds",
         f"{about['device']}, bfloat16, 64 heads of 128, launched call by call, PyTorch {about['torch'][:4]}, "
         f"{about['date']}")


def softmax(path: Path) -> None:
    """Softmax attention, forward and backward: the vendor's kernels and ours."""
    section = read("nvidia-h200.json")["attention"]
    kinds = {"causal": "causal", "special": "with soft cap, sinks, segments"}
    named = {"cudnn (jax)": "cuDNN", "cuda (torch)": "keraunos, cuda", "triton (torch)": "keraunos, triton"}
    calls: dict[str, dict[str, float]] = {}
    for case in section["cases"]:
        shape, times = case["shape"], case["contestants"]
        if case["variant"] in kinds and case["pass"] == "forward+backward" and shape["T"] < 2**17:
            row = calls.setdefault(f"{shape['T']:,} tokens, {shape['H']} heads\n{kinds[case['variant']]}", {})
            known = {y: x for y, x in named.items() if "median_s" in times.get(y, {})}
            row |= {x: times[y]["median_s"] / case["floor_s"] for y, x in known.items()}
    about = section["about"]
    bars(path, "Softmax attention, forward and backward", dict(sorted(calls.items())),
         dict(zip(named.values(), (COLORS[2], *COLORS[:2]), strict=True)), "time over that of the visible products",
         f"{about['device']}, bfloat16, head dim 128, {about['date']}; cuDNN has no kernel for the others",
         ideal="products alone")


def devices(path: Path) -> None:
    """Tokens over several GPUs, compared with one GPU without neighbours and with gathering keys and values."""
    found = read("distributed/nvidia-h200-x4.json")
    named = {"shards_ms": "keraunos.distributed", "naive_ms": "gather keys and values"}
    shards = {
        f"{operation}\n{gpus} GPUs": {named[x]: row[x] / row["alone_ms"] for x in named}
        for gpus, rows in found["torch"].items() for operation, row in rows.items() if "naive_ms" in row
    }
    colors = dict(zip(named.values(), COLORS[::2], strict=True))
    bars(path, "Forward and backward over shards of the tokens", shards, colors,
         "time over that of one shard on one GPU",
         f"4 x NVIDIA H200, {found['dtype']}, {found['tokens']:,} tokens each, {found['heads']} heads of "
         f"{found['head_dim']}, PyTorch, eager, {found['date']}",
         ideal="no exchange at all")


if __name__ == "__main__":
    charts = ROOT / "docs" / "charts"
    charts.mkdir(exist_ok=True)
    for draw in (training, serving, softmax, devices):
        draw(charts / f"{draw.__name__}.svg")
