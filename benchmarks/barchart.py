"""Draws the one kind of chart of the benchmarks: horizontal bars from 0, the shorter the better."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

# Of a wider figure, the text could not be read on a phone.
_WIDTH = 5.4
_GREY = "#444444"


def bars(
    title: str,
    panels: Mapping[str, Mapping[str, Mapping[str, float | str]]],
    colors: Mapping[str, str],
    axis: str,
    caption: str,
    ideal: str = "",
) -> Any:
    """A matplotlib figure: panels under each other, in each of them groups of bars.

    Args:
        title: of the figure.
        panels: for each title of a panel its groups, and for each group's name the bars by name: a length, or a text
            that gives the reason for a missing bar. A name that a group does not have leaves a gap.
        colors: the names of bars, in their order, and their colors.
        axis: what the lengths are.
        caption: below the figure; its lines are wrapped.
        ideal: what a line at 1 is.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    wrapped = [part for line in caption.splitlines() for part in textwrap.wrap(line, 84)]
    # A bar takes a sixth of an inch with its share of the gap between groups: its label is not higher.
    group, top = 0.5 * max(len(colors), 2) / 3, min(0.75, 2.25 / max(1, len(colors))) if ideal else 0.45
    above, under = 0.35 + 0.2 * -(-len(colors) // 3), max(0.4, 0.13 + 0.135 * len(wrapped))
    inches = above + under + sum(0.9 + 0.4 * bool(name) + group * len(rows) for name, rows in panels.items())
    figure = Figure(figsize=(_WIDTH, inches), dpi=150)
    figure.set_layout_engine("constrained", rect=(0.01, under / inches, 0.98, 1 - (above + under) / inches),
                             hspace=0.15 * len(panels) / inches)
    heights = [len(rows) - 0.1 + top for rows in panels.values()]
    every = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, rows) in zip(every, panels.items(), strict=True):
        _panel(axes, rows, colors, ideal)
        axes.set_ylim(len(rows) - 0.1, -top)
        axes.set_xlabel(f"{axis}; lower is better", fontsize=9)
        if name:
            axes.set_title(name, fontsize=9, fontweight="bold", loc="left")
    figure.text(0.02, 0.08 / inches, "\n".join(wrapped), fontsize=8, color=_GREY, parse_math=False)
    figure.text(0.02, 1 - 0.08 / inches, title, fontsize=11, fontweight="bold", va="top")
    patches = [Patch(facecolor=color, label=name) for name, color in colors.items()]
    figure.legend(handles=patches, frameon=False, loc="upper left", bbox_to_anchor=(0, 1 - 0.28 / inches), ncols=3,
                  fontsize=8, handlelength=1, columnspacing=1)
    return figure


def _panel(axes: Any, rows: Mapping[str, Mapping[str, float | str]], colors: Mapping[str, str], ideal: str) -> None:
    from matplotlib.patheffects import withStroke

    height = 0.8 / max(1, len(colors))
    for i, (name, color) in enumerate(colors.items()):
        found = [(j + height * i, row[name]) for j, row in enumerate(rows.values()) if name in row]
        known = [(place, x) for place, x in found if not isinstance(x, str)]
        drawn = axes.barh([place for place, _ in known], [x for _, x in known], 0.92 * height, color=color)
        labels = axes.bar_label(drawn, [_number(x) for _, x in known], padding=3, fontsize=8)
        for text, (_, x) in zip(labels, known, strict=True):
            if ideal and x < 1:  # The line may go through it.
                text.set_path_effects([withStroke(linewidth=2, foreground="white")])
        for place, reason in found:
            if isinstance(reason, str):
                axes.annotate(reason, (0, place), (3, 0), textcoords="offset points", va="center", fontsize=7,
                              color=_GREY, style="italic", parse_math=False, bbox={"color": "white", "pad": 0.5})
    if ideal:
        axes.axvline(1, color="#666666", linewidth=1)
        axes.annotate(f" {ideal}", (1, 1), (0, -5), xycoords=("data", "axes fraction"), textcoords="offset points",
                      fontsize=8, color=_GREY, va="center")
    axes.set_yticks([j + height * (len(colors) - 1) / 2 for j in range(len(rows))], [*rows])
    axes.tick_params(labelsize=9)
    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def _number(x: float) -> str:
    return f"{x:.2f}" if x < 1 else f"{x:.1f}" if x < 100 else f"{x:,.0f}"
