"""Calls that the Pallas platform takes, and what they give held to the tolerance rule."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

from tests.linear_attention.cases import Case
from tests.numerics import assert_within_rule

NEEDS_JAX = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason=f"needs jax 0.11; this is {jax.__version__}")
NAMES = ("output", "final_state", "dquery", "dkey", "dvalue", "dinitial_state")


def case(**sizes) -> Case:
    """A call with a constant decay, in bfloat16 unless said otherwise."""
    return Case(**{"B": 1, "H": 2, "K": 64, "V": 64, "gamma": 1, "dtype": "bfloat16", **sizes})


def check(case: Case, call) -> None:
    """Hold ``call(args, doutput, dfinal) -> results in the order of NAMES`` to the tolerance rule.

    The decay stays a NumPy array, a constant of the call: a gradient for it is left to other platforms.
    """
    args, doutput, dfinal = case.arrays
    got = [None if x is None else np.asarray(x) for x in call(args, doutput, dfinal)]
    truth, rough = (
        [values[i] for i in (0, 1, 2, 3, 4, 7)] for values, _ in (case.reference(), case.reference(np.float32))
    )
    assert_within_rule(NAMES, got, truth, rough, [case.dtype] * len(NAMES))
