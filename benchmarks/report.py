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
    """Times over the floor of the linear operations: a table for each, with a column for each implementation."""
    lines = []
    for operation, section in sections.items():
        if operation == "attention":
            continue
        about, cells = section["about"], _cells(section["cases"])
        # Those that have most shapes; the others are named under the table.
        names = [name for name, column in cells.items() if 2 * len(column) > max(map(len, cells.values()))]
        lines += [f"### `{operation}`\n", f"{about['device']}, {about['date']}:\n",
                  _row("B, T, H", *(f"`{name}`" for name in names)), "|---|" + "---:|" * len(names)]
        lines += [_row(shape, *(cells[name].get(shape, "") for name in names))
                  for shape in dict.fromkeys(shape for column in cells.values() for shape in column)]
        lines += [f"\n`{name}` takes {', '.join(f'{cell} at {shape}' for shape, cell in column.items())}."
                  for name, column in cells.items() if name not in names]
        lines.append("")
    return "\n".join(lines)


def _cells(cases: list[dict]) -> dict[str, dict[str, str]]:
    """Name -> shape -> forward; forward with backward, of what was measured."""
    found: dict[str, dict[str, str]] = {}
    for shape in dict.fromkeys(str(output.shape_of(case)) for case in cases):
        stages = {case["pass"]: case for case in cases if str(output.shape_of(case)) == shape}
        names = dict.fromkeys(label.split()[0] for case in stages.values() for label in case["contestants"])
        for name in names:
            cell = [_ratio(stages.get(stage), name) for stage in ("forward", "forward+backward")]
            if any(cell):
                found.setdefault(name, {})[shape] = "; ".join(cell).strip()
    return found


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
        f"{about['date']}, {about['processor']}, {about['cores']} cores, jax {about['jax']}, float32, B 1, T 8192, "
        "H 8, K = V = 64.\n",
        "The time of a jitted scan over tokens, divided by that of `xla`:\n",
        _row("operation", "forward", "with backward"), "|---|---:|---:|",
    ]
    ratios: dict[str, list[str]] = {}
    for x in found["speed"]:
        ratios.setdefault(x["operation"], []).append(f"{x['ratio']:.1f}")
    return "\n".join([*lines, *(_row(operation, *cells) for operation, cells in ratios.items())])


def _row(*cells) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
