"""Calls that the Pallas platform takes, and what they give held to the tolerance rule."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

from keraunos.numerics import coarser
from tests.linear_attention.cases import Case
from tests.numerics import assert_within_rule

NEEDS_JAX = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason=f"needs jax 0.11; this is {jax.__version__}")
NAMES = ("output", "final_state", "dquery", "dkey", "dvalue", "dg", "dg_gamma", "dinitial_state")


def case(**sizes) -> Case:
    """A call in bfloat16 with a constant decay, unless said otherwise."""
    return Case(**{"B": 1, "H": 2, "K": 64, "V": 64, "gamma": 1, "dtype": "bfloat16", **sizes})


def check(case: Case, call, *, learned: bool = False) -> None:
    """Hold ``call(args, doutput, dfinal) -> results in the order of NAMES`` to the tolerance rule.

    Unless it is learned, the decay per head is a NumPy array, a constant of the call, and has no gradient.
    """
    args, doutput, dfinal = case.arrays
    got = [None if x is None else np.asarray(x) for x in call(args, doutput, dfinal)]
    (truth, scale), (rough, _) = case.reference(), case.reference(np.float32)
    if not learned:
        truth[6] = None
    dtypes = [case.dtype] * len(NAMES)
    dtypes[5:7] = [coarser(case.dtype, case.gate_dtype)] * 2
    assert_within_rule(NAMES, got, truth, rough, dtypes, scale)
