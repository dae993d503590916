"""The one rule that says whether a result is right, for the tests, the benchmarks and the tuner.

An error is the relative Frobenius distance to the float64 reference. A kernel may have at most twice the error that the
reference algorithm itself makes when it runs in the inputs' dtype (the state of at least float32), plus one rounding of
the result's dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def error(got: Any, truth: Any) -> float:
    """``||got - truth|| / ||truth||`` in float64; infinite if a value is not finite, absolute if the truth is zero."""
    got, truth = np.asarray(got).astype(np.float64), np.asarray(truth).astype(np.float64)
    if got.shape != truth.shape:
        raise ValueError(f"error: got shape {got.shape}; expected {truth.shape}")
    if not np.isfinite(got).all():
        return float("inf")
    scale = float(np.linalg.norm(truth))
    return float(np.linalg.norm(got - truth)) / (scale or 1.0)


def rounding(dtype: Any) -> float:
    """The relative size of one rounding to a floating dtype, given by name or as a NumPy (or ml_dtypes) dtype."""
    name = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
    bits = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}[name]
    return 2.0**-bits


def bound(in_dtype: Any, truth: Any, dtype: Any) -> float:
    """The largest error allowed.

    Args:
        in_dtype: the reference algorithm's result when it runs in the inputs' dtype.
        truth: its result in float64.
        dtype: the dtype of the result under test.
    """
    return 2 * error(in_dtype, truth) + rounding(dtype)
