"""The one rule that says whether a result is right, for the tests, the benchmarks and the tuner.

An error is the relative distance to the float64 reference in the Frobenius norm. A result may have at most twice the
error of the reference algorithm run in :func:`working_dtype` on the same inputs, plus one unit in the last place of
its own dtype, or of the inputs' where they have fewer digits: operands of matrix products are rounded to theirs.

A number smaller than 2**-100 counts as zero: near there float32 runs out of digits.

A result that is a sum of terms of both signs (the gradient of a gate that many tokens share) can be arbitrarily small
next to its terms; its errors are taken relative to the sum of the terms' magnitudes, given as ``scale``.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def working_dtype(dtype: str) -> type[np.floating]:
    """The dtype in which the recurrence accumulates: float32, or float64 for float64."""
    return np.float64 if dtype == "float64" else np.float32


def error(got: Any, truth: Any, scale: Any = None) -> float:
    """``||got - truth|| / ||scale||`` in float64; infinite if a value is not finite.

    Args:
        got: the result.
        truth: what it should be.
        scale: what its errors are relative to; the truth if None.

    Raises:
        ValueError: the shapes differ.
    """
    got, truth = np.asarray(got).astype(np.float64), np.asarray(truth).astype(np.float64)
    if got.shape != truth.shape:
        raise ValueError(f"error: got shape {got.shape}; expected {truth.shape}")
    if not np.isfinite(got).all():
        return float("inf")
    size = float(np.linalg.norm(truth if scale is None else np.asarray(scale).astype(np.float64)))
    return float(np.linalg.norm(got - truth)) / max(size, 2.0**-100)


def rounding(dtype: Any) -> float:
    """One unit in the last place of a floating dtype, relative; the dtype by name or as a NumPy dtype."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}[name]


def coarser(*dtypes: str) -> str:
    """The dtype with the fewest digits."""
    return max(dtypes, key=rounding)


def bound(in_dtype: Any, truth: Any, dtype: Any, scale: Any = None) -> float:
    """The largest error allowed.

    Args:
        in_dtype: the reference algorithm's result when it runs in the working dtype.
        truth: its result in float64.
        dtype: the dtype of the result under test.
        scale: as for :func:`error`.
    """
    return 2 * error(in_dtype, truth, scale) + rounding(dtype)
