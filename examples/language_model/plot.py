"""The loss curve as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def loss_curve(
    path: Path,
    train: Sequence[float],
    held_out: Sequence[tuple[int, float]],
    final: float,
    bigram: float,
    title: str,
) -> None:
    """Draws bits per byte over steps into a PNG.

    Args:
        path: The file to write.
        train: Bits per byte of every step's batch.
        held_out: Pairs of a step and the bits per byte after it on a sample of the held-out text, at least one.
        final: Bits per byte at the end on all held-out text that is judged.
        bigram: The bigram model's held-out bits per byte, drawn as a line.
        title: The model and the text.
    """
    # A Figure of its own, not pyplot: no global state and no display.
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    steps = np.arange(1, len(train) + 1)
    axes.plot(steps, train, color="tab:blue", alpha=0.2, linewidth=0.8)
    axes.plot(steps, _smooth(np.asarray(train)), color="tab:blue", label="training text, running mean")
    axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held-out text, a sample")
    axes.plot(len(train), final, "D", color="tab:red", label=f"held-out text, at the end ({final:.2f})")
    axes.axhline(bigram, color="tab:gray", linestyle="--", label=f"held-out text, bigram model ({bigram:.2f})")
    axes.set(title=title, xlabel="training step", ylabel="bits per byte", xlim=(0, len(train) + 1), ylim=(0, 8.2))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _smooth(values: np.ndarray) -> np.ndarray:
    """The mean over a window of a fiftieth of the curve, which ends at the value (nothing from the future)."""
    window = max(1, len(values) // 50)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)
