"""Writes the tables of docs/benchmarks.md from the raw results: ``python benchmarks/report.py``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import output

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"

# The part of the page that is made, and not written.
MEASURED = re.compile(r"(?<=<!-- measured: python benchmarks/report.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def page(text: str, results: Path = RESULTS) -> str:
    """The text of the documentation's page with the tables of these results."""
    parts = ["", *(_tables(json.loads(file.read_text())) for file in sorted(results.glob("*.json"))
                   if file.name != "cpu.json")]
    cpu = results / "cpu.json"
    if cpu.exists():
        parts.append("### On a CPU\n\n" + _against_scan(json.loads(cpu.read_text())) + "\n")
    return MEASURED.sub(lambda _: "\n".join([*parts, ""]), text)


def _tables(sections: dict) -> str:
    """Times over the floor: a table for each operation, with a column for each implementation."""
    lines = []
    for operation, section in sections.items():
        if operation == "attention":
            continue
        about, cases = section["about"], section["cases"]
        names = list(dict.fromkeys(label.split()[0] for case in cases for label, c in case["contestants"].items()
                                   if "median_s" in c))
        lines += [f"### `{operation}`, {about['device']}\n",
                  f"{about['date']}, {cases[0]['dtype']}, head dim {cases[0]['shape']['K']}; through PyTorch, `xla` "
                  "through JAX:\n",
                  _row("B, T, H", *(f"`{name}`" for name in names)), _row("---", *["---:"] * len(names))]
        for shape in dict.fromkeys(str(output.shape_of(case)) for case in cases):
            stages = {case["pass"]: case for case in cases if str(output.shape_of(case)) == shape}
            cells = [[_ratio(stages.get(stage), name) for stage in ("forward", "forward+backward")] for name in names]
            lines.append(_row(shape, *("; ".join(cell).strip() if any(cell) else "" for cell in cells)))
        lines.append("")
    return "\n".join(lines)


def _ratio(case: dict | None, name: str) -> str:
    """The time over the floor of an implementation, through PyTorch where that has it."""
    for framework in ("torch", "jax"):
        contestant = case["contestants"].get(f"{name} ({framework})", {}) if case else {}
        if "median_s" in contestant:
            return f"{contestant['median_s'] / case['floor_s']:.2f}"
    return ""


def _against_scan(found: dict) -> str:
    about = found["about"]
    lines = [
        f"{about['date']}; {about['processor']}, {about['cores']} cores; "
        f"jax {about['jax']}, python {about['python']}.\n",
        "Compared with a jitted scan over tokens, B 1, T 8192, H 8, K = V = 64, float32:\n",
        _row("operation", "pass", "token scan ms", "xla ms", "ratio"),
        _row("---", "---", "---:", "---:", "---:"),
    ]
    for x in found["speed"]:
        times = (f"{x['token_scan_ms']:.1f}", f"{x['keraunos_ms']:.1f}", f"{x['ratio']:.1f}")
        lines.append(_row(x["operation"], x["what"], *times))
    return "\n".join(lines)


def _row(*cells) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
