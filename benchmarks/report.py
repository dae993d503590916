"""Writes docs/benchmarks.md, and details.md beside the raw results, from these: `python benchmarks/report.py`."""

from __future__ import annotations

import json
from pathlib import Path

import output

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"

INTRO = """\
# Benchmarks

![Training of lightning attention: time over the floor](charts/training.svg)

Training with lightning attention takes 1.3 times as long as reading and writing its arrays, on an H200 with enough
heads to fill it; flash-linear-attention takes 4.7 to 22 times as long. With few heads ours takes up to 2.0; with a
gate for each token 1.6 to 2.3; with a gate for each key dimension 2.0 to 2.9 where gates are weak ([Hopper
GPUs](hopper.md)), 2.6 to 3.0 in the table below. These times are from PyTorch; JAX runs the same kernels. On a CPU a
training step is twenty times as fast as a compiled loop over tokens. Softmax attention has the vendor's speed where
the vendor has the call, and 0.7 of it with soft caps, sinks and segments.

**How it is measured.** Every implementation is first compared with the float64 reference, and one that is wrong is not
timed. All are timed in turns, by device events, on random inputs; the median counts. The *floor* is the time in which
the same device, in the same run, copies as many bytes as the operation must move: every input read once, every output
written once, in the forward and in the backward. The tables below have times over the floor, so 1 is the best that can
be, and lower is better. Gates are -0.1 times the square of a normal number, a memory of about ten tokens; what weaker
and stronger ones take, and more shapes, is in [Hopper GPUs](hopper.md).

**On your machine**, in a checkout: `make bench` on a CPU, `make bench-gpu` on a GPU, or a table of all implementations
for any shapes:

```sh
PYTHONPATH=. python benchmarks/compare.py gla_attention --shapes 1,1024,4,64 --against torch --plot bench.png
```

Without a checkout, `keraunos bench` checks and times one call:

```sh
keraunos bench gla_attention --shape B=1,T=1024,H=4,K=64 --backward
```

Host times, memory, errors and notes about single figures are in
[benchmarks/results/details.md](../benchmarks/results/details.md), and
[benchmarks/results](../benchmarks/results/README.md) says what each raw file holds.
"""

CHARTS = """\
## Softmax attention

![Softmax attention: time over that of the visible products](charts/softmax.svg)

## Serving

![Lightning attention in a step of an engine](charts/serving.svg)

[In vLLM and SGLang](engines.md) says what was compared, and [Serving](serving.md) has `prefill`, `decode` and drafts
over the floor.

## Many devices

![Forward and backward over shards of the tokens](charts/devices.svg)

Launched call by call; in CUDA graphs the exchange costs less ([Over many devices](distributed.md)).
"""

PEERS = """\
## What each can do

As of keraunos 0.1.0, flash-linear-attention 0.6.0, vLLM 0.33, and PyTorch 2.13 with cuDNN's and its own kernels.

| | keraunos | flash-linear-attention | vLLM's lightning attention | FlashAttention, cuDNN | FlexAttention |
| --- | --- | --- | --- | --- | --- |
| decays per head, gates per token, per dimension | all | all | per head | none | none |
| softmax attention | yes | yes | no | yes | yes |
| PyTorch, JAX | both | PyTorch | PyTorch | both | PyTorch |
| CPU, with gradients | yes | no | no | no | no |
| gradients | yes | yes | no | yes | yes |
| packed sequences | yes | yes | yes | yes | by a mask |
| states of requests in a pool | yes | no | yes | no | no |
| soft cap, sinks, segments together | yes | | | in parts | yes |
"""

DETAILS = """\
# Benchmarks in detail

Made by `python benchmarks/report.py` from the files beside it; every figure of a table is from one run on one machine,
but for those that a line below it names. [docs/benchmarks.md](../../docs/benchmarks.md) says how it is measured.
"""


def page(results: Path = RESULTS) -> str:
    """The text of the documentation's page."""
    parts = [INTRO, *(_short(json.loads(file.read_text())) for file in gpu_files(results))]
    cpu = results / "cpu.json"
    if cpu.exists():
        parts.append("## On a CPU\n\n" + _against_scan(json.loads(cpu.read_text())) + "\n")
    return "\n".join([*parts, CHARTS, PEERS])


def details(results: Path = RESULTS) -> str:
    """The text of the page beside the raw results."""
    parts = [DETAILS, "## GPU\n"]
    files = gpu_files(results)
    parts += [_gpu(json.loads(file.read_text()), file.stem) for file in files]
    if not files:
        parts.append("There are no results from a GPU of the kernels as they stand yet.\n")
    parts.append("## CPU\n")
    cpu = results / "cpu.json"
    parts.append(_cpu(json.loads(cpu.read_text())) if cpu.exists() else "There are no results from a CPU yet.\n")
    return "\n".join(parts)


def _short(sections: dict) -> str:
    """Times over the floor: a table for each operation and pass, with a column for each implementation."""
    lines = []
    for operation, section in sections.items():
        if operation == "attention":
            continue
        about = section["about"]
        lines.append(f"## {operation} on {about['device']}\n")
        for stage in dict.fromkeys(case["pass"] for case in section["cases"]):
            found = [case for case in section["cases"] if case["pass"] == stage]
            names = list(dict.fromkeys(label.split()[0] for case in found for label, c in case["contestants"].items()
                                       if "median_s" in c))
            lines += [f"{stage.capitalize()}, {found[0]['dtype']}, head dim {found[0]['shape']['K']}, {about['date']}; "
                      "through JAX; PyTorch:\n",
                      _row("B, T, H", *names), _row("---", *["---:"] * len(names))]
            for case in found:
                lines.append(_row(output.shape_of(case), *(_ratios(case, name) for name in names)))
            lines.append("")
    return "\n".join(lines)


def _ratios(case: dict, name: str) -> str:
    """Times over the floor of an implementation, from each framework that has it."""
    times = [case["contestants"].get(f"{name} ({framework})", {}).get("median_s") for framework in ("jax", "torch")]
    shown = ["" if t is None else f"{t / case['floor_s']:.2f}" for t in times]
    return "; ".join(x for x in shown if x)


def gpu_files(results: Path = RESULTS) -> list[Path]:
    return sorted(file for file in results.glob("*.json") if file.name != "cpu.json")


def plot_name(stem: str) -> str:
    return f"benchmarks-{stem}.png"


def shown(sections: dict) -> dict:
    """The cases of the plot: all but those of softmax attention, with the days on which they were measured."""
    found = [section for name, section in sections.items() if name != "attention"]
    dates = ", ".join(dict.fromkeys(section["about"]["date"] for section in found))
    return {"about": found[0]["about"] | {"date": dates}, "cases": [case for x in found for case in x["cases"]]}


def _gpu(sections: dict, stem: str) -> str:
    parts = []
    for operation, section in sections.items():
        if operation == "attention":
            continue
        about = section["about"]
        versions = ("keraunos", "torch", "jax", "triton", "jax-triton", "fla-core", "driver", "python")
        known = ", ".join(f"{name} {about[name]}" for name in versions if about[name])
        parts.append(f"### {operation} on {about['device']}\n")
        bandwidth = about["copy_bandwidth"] / 1e12
        parts.append(f"{about['date']}; copies {bandwidth:.2f} TB/s, read plus written; {known}.\n")
        for stage in dict.fromkeys(case["pass"] for case in section["cases"]):
            parts.append(_table([case for case in section["cases"] if case["pass"] == stage], stage))
        parts.append(_rest(section))
    parts.append(f"![Time over floor for each shape and implementation]({plot_name(stem)})\n")
    if "attention" in sections:
        parts.append(_attention(sections["attention"]))
    return "\n".join(parts)


def _table(found: list[dict], stage: str) -> str:
    labels = list(dict.fromkeys(label for case in found for label, c in case["contestants"].items() if "median_s" in c))
    dtypes = ", ".join(dict.fromkeys(case["dtype"] for case in found))
    heads = [*(f"{label} ms" for label in labels), *(f"{label} / floor" for label in labels)]
    lines = [f"{stage}, {dtypes}:\n", _row("B, T, H", "floor ms", *heads, "fla / fastest of ours"),
             _row("---", *["---:"] * (2 + len(heads)))]
    for case in found:
        times = [case["contestants"].get(label, {}).get("median_s") for label in labels]
        fla = output.fastest(case, "fla")
        own = min(
            (t for label, t in zip(labels, times, strict=True) if t and not label.startswith("fla ")), default=None
        )
        cells = [_milliseconds(t) for t in times]
        cells += ["" if t is None else f"{t / case['floor_s']:.2f}" for t in times]
        cells.append(f"{fla / own:.2f}" if fla and own else "")
        lines.append(_row(output.shape_of(case), f"{1e3 * case['floor_s']:.3f}", *cells))
    lines += ["", "What a call costs beside the device's time:\n",
              _row("B, T, H", "implementation", "host µs", "alone, launch to end, ms", "in a row, ms",
                   "peak memory / arrays", "largest error"),
              _row("---", "---", *["---:"] * 5)]
    for case in found:
        for label in labels:
            c = case["contestants"].get(label, {})
            if "median_s" in c:
                # Some entries were saved from a log, which has not all of them.
                lines.append(_row(
                    output.shape_of(case), label, f"{1e6 * c['host_s']:.0f}" if "host_s" in c else "",
                    _milliseconds(c.get("latency_s")),
                    _milliseconds(c.get("in_a_row_s")), "" if c["peak_ratio"] is None else f"{c['peak_ratio']:.3f}",
                    f"{max(c['errors'].values()):.1e}" if "errors" in c else "",
                ))
    skipped: dict[str, list[str]] = {}
    for case in found:
        for label, c in case["contestants"].items():
            for reason in (c.get("skipped"), c.get("note")):
                if reason:
                    skipped.setdefault(f"{label}: {reason}", []).append(str(output.shape_of(case)))
    lines += ["", *(f"- {reason} (at {' · '.join(shapes)})" for reason, shapes in skipped.items()), ""]
    return "\n".join(lines)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3f}"


def _rest(section: dict) -> str:
    lines = []
    for call in section["first_calls"]:
        figure = f"{call['seconds']:.1f} s" if "seconds" in call else call["skipped"]
        what = f"{call['contestant']}, {call['pass']}"
        lines.append(f"- first call in a fresh process with an empty compile cache, {what}: {figure}")
    same = section.get("equalities")
    if same:
        yes = {True: "yes", False: "no"}
        lines.append(f"- same bits through JAX and PyTorch: {yes[same['jax_equals_torch']]}; "
                     f"in 20 runs: {yes[same['reruns_equal']]}")
    lines += [f"- {note}" for note in section.get("notes", ())]
    lines += [f"- left out: {missing['workload']}: {missing['reason']}" for missing in section["left_out"]]
    return "\n".join([*lines, ""])


ATTENTION = """\
`python benchmarks/attention.py`; bfloat16, head dims of 128. Causal calls of cuDNN (through JAX) and of PyTorch's own
function, of our platforms `xla` and `torch`, which send such calls there, and of the Triton platform, also with what
those kernels do not take: *special* is a soft cap with a sink for each head and segment ids (one segment, so that no
block is left out), *window* sees 1,024 keys, and in *shared* 8 query heads share each key head. The floor is the time
of the visible products at the rate of a large product. The last columns compare with cuDNN's plain causal call of the
same shape in the same pass, and *shared* with the same implementation's call where every head has keys of its own;
backward alone is forward+backward less forward. The same kernel's times differ by some percent within a run: `cudnn`
and `xla`, or `sdpa` and `torch`, launch the same.
"""


def _attention(section: dict) -> str:
    parts = [f"### attention on {section['about']['device']}\n", ATTENTION, *_attention_run(section)]
    if "earlier" in section:
        parts += [f"\n{section['earlier']['why']}\n", *_attention_run(section["earlier"])]
    return "\n".join([*parts, ""])


def _attention_run(section: dict) -> list[str]:
    about, found = section["about"], section["cases"]
    versions = ("keraunos", "torch", "jax", "triton", "jax-triton", "driver", "python")
    known = ", ".join(f"{name} {about[name]}" for name in versions if about[name])
    lines = [
        f"{about['date']}; multiplies {about['product_rate'] / 1e12:.0f} TFLOP/s; {known}.\n",
        _row("calls", "B, T, H", "pass", "implementation", "ms", "/ floor", "peak memory / arrays", "cuDNN / it",
             "own keys / it"),
        _row("---", "---", "---", "---", *["---:"] * 5),
    ]
    times = {
        (case["variant"], str(output.shape_of(case)), case["pass"], label): c["median_s"]
        for case in found for label, c in case["contestants"].items() if "median_s" in c
    }

    def seconds(variant, shape, stage, label):
        """The seconds of a pass, or None where they were not measured; of backward, what it adds to forward."""
        if stage != "backward":
            return times.get((variant, shape, stage, label))
        both, forward = (times.get((variant, shape, name, label)) for name in ("forward+backward", "forward"))
        return both and forward and both - forward

    for case in found:
        variant, shape = case["variant"], str(output.shape_of(case))
        own_keys = (variant.removeprefix("shared").removeprefix("-") or "causal") if "shared" in variant else None
        for label, c in case["contestants"].items():
            if "median_s" not in c:
                lines.append(_row(variant, shape, case["pass"], label, c["skipped"], "", "", "", ""))
                continue
            for stage in dict.fromkeys((case["pass"], case["pass"].removeprefix("forward+"))):
                own = seconds(variant, shape, stage, label)
                if own is None:
                    continue
                others = (seconds("causal", shape, stage, "cudnn (jax)"), seconds(own_keys, shape, stage, label))
                whole = stage == case["pass"]
                lines.append(_row(variant, shape, stage, label, f"{1e3 * own:.2f}",
                                  f"{own / case['floor_s']:.2f}" if whole else "",
                                  f"{c['peak_ratio']:.3f}" if whole else "",
                                  *(f"{other / own:.2f}" if other else "" for other in others)))
    rest = [f"- {note}" for note in section.get("notes", ())]
    rest += [f"- left out: {missing['workload']}: {missing['reason']}" for missing in section["left_out"]]
    return [*lines, "", *rest] if rest else lines


def _against_scan(found: dict) -> str:
    about = found["about"]
    lines = [
        f"{about['date']}; {about['processor']}, {about['cores']} cores; keraunos {about['keraunos']}, "
        f"jax {about['jax']}, python {about['python']}.\n",
        "Against a jitted scan over tokens, B 1, T 8192, H 8, K V 64, float32:\n",
        _row("operation", "pass", "token scan ms", "xla ms", "ratio"),
        _row("---", "---", "---:", "---:", "---:"),
    ]
    for x in found["speed"]:
        times = (f"{x['token_scan_ms']:.1f}", f"{x['keraunos_ms']:.1f}", f"{x['ratio']:.1f}")
        lines.append(_row(x["operation"], x["what"], *times))
    return "\n".join(lines)


def _cpu(found: dict) -> str:
    lines = [_against_scan(found)]
    lines += [
        "\nGrowth with the length, forward+backward, B 1, H 4, K V 64, float32:\n",
        _row("operation", "T", "ms", "factor"),
        _row("---", "---:", "---:", "---:"),
    ]
    for x in found["growth"]:
        factor = f"{x['factor']:.2f}" if x["factor"] else ""
        lines.append(_row(x["operation"], x["T"], f"{x['forward+backward_ms']:.1f}", factor))
    lines.append("")
    for x in found["memory"]:
        lines.append(f"- peak resident memory, {x['operation']}, {x['shape']}: {x['peak_resident_gib']:.2f} GiB")
    results = list(dict.fromkeys(name for x in found["accuracy"] for name in x["errors"]))
    lines += [
        "\nRelative errors against float64, float32 inputs:\n",
        _row("gates", *results),
        _row("---", *["---:"] * len(results)),
    ]
    for x in found["accuracy"]:
        lines.append(_row(x["gates"], *(f"{x['errors'][n]:.1e}" if n in x["errors"] else "" for n in results)))
    lines += [
        "\nSoftmax attention, causal, forward+backward, B 1, T = S = 32768, H 2, K V 64, float32, without the first "
        "call:\n",
        _row("platform", "window", "s", "peak resident memory, GiB"),
        _row("---", "---", "---:", "---:"),
    ]
    for x in found["attention"]:
        figures = (f"{x['forward+backward_s']:.2f}", f"{x['peak_resident_gib']:.2f}")
        lines.append(_row(x["platform"], x["window"], *figures))
    return "\n".join([*lines, ""])


def _row(*cells) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    (DOCS / "benchmarks.md").write_text(page())
    (RESULTS / "details.md").write_text(details())
    for file in gpu_files():
        output.plot(shown(json.loads(file.read_text())), RESULTS / plot_name(file.stem))


if __name__ == "__main__":
    main()
