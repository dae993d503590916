"""The calls that each platform can run, asked of the registry, as the page ``docs/supported.md``.

``python -m tests.supported`` writes the page; it needs both frameworks.
``tests/test_supported.py`` compares the page with what the platforms say that can be imported.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import keraunos
from keraunos import frontends
from keraunos.kernels import kernel_registry

PAGE = Path(__file__).parent.parent / "docs" / "supported.md"
TRITON = Path(__file__).parent / "triton"
DEVICE = "NVIDIA H200"
# Platform, framework.
COLUMNS = [
    ("xla", "jax"), ("torch", "torch"), ("triton", "jax"), ("triton", "torch"), ("cuda", "jax"), ("cuda", "torch"),
]
FRAMEWORKS = {"jax": "JAX", "torch": "PyTorch"}

# What was done on which GPU, and its shared memory for a program.
GPUS = {
    "sm_90": ("H200, H100", "227 KB", "run: values, gradients, speed"),
    "sm_100": ("B200", "227 KB", "compiled"),
    "sm_80": ("A100", "163 KB", "compiled"),
    "sm_86": ("RTX 3090, A10", "99 KB", "compiled"),
    "sm_89": ("RTX 4090, L4", "99 KB", "compiled"),
    "sm_120": ("RTX 5090", "99 KB", "compiled"),
    "gfx942": ("MI300", "64 KB", "compiled"),
}


def gpus() -> list[str]:
    """The table of where ``triton`` was run, and where it was only compiled."""
    lines = [
        "| GPU | shared memory | `triton` | builds with spills |",
        "|---|---|---|---|",
    ]
    for name, (models, memory, done) in GPUS.items():
        record = TRITON / "chips" / f"{name}.json"
        spills = [used["stack"] for kernels in json.loads(record.read_text()).values() for used in kernels.values()]
        found = f"{sum(x > 0 for x in spills)} of {len(spills)}, to {max(spills):,} bytes"
        lines.append(f"| {models} ({name}) | {memory} | {done} | {found} |")
    return lines


# The part of the page that is made, and not written.
ASKED = re.compile(r"(?<=<!-- asked: python -m tests.supported -->\n).*?(?=<!-- end -->)", re.DOTALL)
# Before the columns whose platform takes every call, and before the calls that every platform takes.
TAKES_ALL, TAKEN = "All calls run on: ", "All platforms run: "
REASONS = "## Reasons"
PACKED, STATE = {"N": 4}, {"state": True}
LINEAR = {
    "bfloat16": {},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "float64": {"dtype": "float64"},
    "packed sequences": PACKED,
    "initial state": STATE,
    "`reverse`": {"reverse": True},
    "shared keys (GQA)": {"G": 2},
    "shared queries and keys (GVA)": {"HQ": 2, "G": 2, "HV": 8},
    "K = 64, V = 128": {"K": 64},
    "K = V = 96": {"K": 96, "V": 96},
    "K = V = 256": {"K": 256, "V": 256},
    "K = 256, V = 512": {"K": 256, "V": 512},
}
GATED = {
    "gates per token, head and dimension": {"gate": "vector"},
    "gates per token and head": {"gate": "scalar"},
    "a learned decay per head": {"gate": "learned"},
    "gates per token, head and dimension, packed": {"gate": "vector", **PACKED},
}
DELTA = {
    "gates per token and head": {},
    "gates per token, head and dimension": {"gate": "vector"},
    "no gates": {"gate": "none"},
}
# Options of attention, and arrays that come with them.
SOFTMAX = {
    "plain": ({}, {}),
    "`causal`": ({"causal": True}, {}),
    "`sliding_window`": ({"window": (1023, 0)}, {}),
    "`logits_soft_cap`": ({"soft_cap": True}, {}),
    "`softmax_aux` (sinks)": ({}, {"sinks": ("float32", 2)}),
    "`bias`": ({}, {"bias": ("bfloat16", 4)}),
    "a boolean mask": ({}, {"mask": ("bool", 4)}),
    "segment ids, key lengths": ({}, {"query_segments": ("int32", 2), "key_segments": ("int32", 2)}),
    "`dropout_prob`": ({"dropout": True}, {"seed": ("int32", 1)}),
    "`return_weights`": ({"return_weights": True}, {}),
    "`causal`, `sliding_window`, `logits_soft_cap`, sinks, bias and dropout": (
        {"causal": True, "window": (1023, 0), "soft_cap": True, "dropout": True},
        {"sinks": ("float32", 2), "bias": ("bfloat16", 4), "seed": ("int32", 1)},
    ),
    "`softmax_dtype` float64": ({"softmax_dtype": "float64"}, {}),
}
# Sizes and dtypes of plain calls.
SOFTMAX_SIZES = {
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "float64": {"dtype": "float64"},
    "shared keys (GQA)": {"G": 2},
    "S = 1000": {"S": 1000},
    "K = V = 40": {"K": 40},
    "K = 64, V = 128": {"K": 64, "V": 128},
    "K = V = 256": {"K": 256},
    "K = V = 512": {"K": 512},
}


def calls(operation: str, framework: str) -> dict[str, Any]:
    """Label -> description of a call on the device."""
    made = {}
    if operation == "attention":
        describe = keraunos.Attention().invocation
        plain = describe(framework, T=4096, H=8, K=128)
        for label, (options, arrays) in SOFTMAX.items():
            made[label] = dataclasses.replace(
                plain, options={**plain.options, **options}, arrays={**plain.arrays, **arrays}
            )
        for label, sizes in SOFTMAX_SIZES.items():
            made[label] = describe(framework, **{"T": 4096, "H": 8, "K": 128, **sizes})
    else:
        kernel = next(x.kernel for x in kernel_registry.operations.values() if x.function == operation)
        variants = {**{"gla_attention": GATED, "gated_delta_rule": DELTA}.get(operation, {}), **LINEAR}
        for label, sizes in variants.items():
            learned = sizes.get("gate") == "learned"
            sizes = {**sizes, "gate": "constant"} if learned else sizes
            inv = kernel.invocation(framework, **{"T": 4096, "H": 8, "K": 128, "V": 128, **sizes})
            made[label] = dataclasses.replace(inv, constants=frozenset()) if learned else inv
    return {label: dataclasses.replace(inv, backend="gpu", device=DEVICE) for label, inv in made.items()}


def answers(operation: str, platform: str, framework: str) -> dict[str, str | None]:
    """Label -> why the platform cannot run the call, or None.

    Raises:
        ImportError: the platform cannot be asked here.
    """
    if platform in ("triton", "cuda") and (reason := frontends.cannot_launch(framework, gluon=platform == "cuda")):
        raise ImportError(reason, name=framework)
    found = {}
    for label, inv in calls(operation, framework).items():
        rows = [row for row in kernel_registry.rows(inv.op_id) if row.platform == platform]
        # "auto" has rows of its own that pass over what is slower there; the last row is for calls by name.
        rows = [row for row in rows if framework in row.frameworks and row.backend in ("any", "gpu")][-1:]
        if not rows:
            raise ImportError(f"{platform} takes no {framework} arrays", name=framework)
        rows[0].implementation  # noqa: B018
        reason = rows[0].unsupported(inv)
        # Without what the call had, which the row of the table says.
        found[label] = reason and reason.split("; the call has")[0]
    return found


def columns(operation: str) -> dict[tuple[str, str], dict[str, str | None]]:
    """The answers of the platforms that can be asked here: not of one that lacks a package."""
    found = {}
    for platform, framework in COLUMNS:
        try:
            said = answers(operation, platform, framework)
        except ImportError:
            continue
        if len(set(said.values())) > 1 or None in said.values():
            found[platform, framework] = said
    return found


def merged(operation: str) -> dict[str, dict[str, str | None]]:
    """Head of a column -> answers: one column for both frameworks where a platform tells them the same."""
    found = columns(operation)
    heads: dict[str, dict[str, str | None]] = {}
    for (platform, framework), said in found.items():
        both = [other for (name, _), other in found.items() if name == platform]
        alike = len(both) == 2 and both[0] == both[1]
        heads[f"`{platform}`" if alike else f"`{platform}`, {FRAMEWORKS[framework]}"] = said
    return heads


def page(text: str) -> str:
    """The whole page, with the platforms' answers of today in the place that is marked."""
    return ASKED.sub(lambda _: "\n".join(tables()), text)


def tables() -> list[str]:
    """The lines that are made: what was done on which GPU, and the answers for each operation."""
    text = ["", *gpus(), ""]
    reasons: list[str] = []
    for operation in ("lightning_attention", "gla_attention", "gated_delta_rule", "attention"):
        found = merged(operation)
        taken = [label for label in next(iter(found.values())) if not any(column[label] for column in found.values())]
        text += [f"## `{operation}`", ""]
        text += [TAKES_ALL + "; ".join(head for head, column in found.items() if not any(column.values())), ""]
        text += [TAKEN + "; ".join(taken), ""]
        found = {head: column for head, column in found.items() if any(column.values())}
        text += [f"| | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
        for label in next(iter(found.values())):
            if label in taken:
                continue
            cells = []
            for column in found.values():
                reason = column[label]
                if reason and reason not in reasons:
                    reasons.append(reason)
                cells.append(f"({reasons.index(reason) + 1})" if reason else "yes")
            text.append(f"| {label} | {' | '.join(cells)} |")
        text.append("")
    return [*text, REASONS, "", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1)), "", ""]


def read(text: str) -> dict[str, dict[str, dict[str, str | None]]]:
    """Operation -> column's head -> label -> reason, out of a page."""
    found: dict[str, dict[str, dict[str, str | None]]] = {}
    sections, last = text.split("<!-- end -->")[0].split(REASONS)
    reasons = {f"({line.split('. ')[0]})": line.split(". ", 1)[1] for line in last.splitlines() if line}
    for section in sections.split("\n## ")[1:]:
        lines = section.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        heads, taken = (
            [part for line in lines if line.startswith(begin) for part in line.removeprefix(begin).split("; ")]
            for begin in (TAKES_ALL, TAKEN)
        )
        labels = dict.fromkeys([*taken, *(row[0] for row in rows[2:])])
        found[lines[0].strip("`")] = dict.fromkeys(heads, labels) | {
            head: dict.fromkeys(taken) | {row[0]: reasons.get(row[i + 1]) for row in rows[2:]}
            for i, head in enumerate(rows[0][1:])
        }
    return found


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
