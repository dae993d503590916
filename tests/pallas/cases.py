"""Calls that the Pallas platform takes, and what they give held to the tolerance rule."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

from keraunos.kernels.linear_attention.reference import linear_attention
from keraunos.numerics import bound, coarser, error
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


def sized(rng: np.random.Generator):
    """``(what, query, key, value, g)`` in bfloat16, with values and gates in float16's range and outside of it."""
    import jax.numpy as jnp

    def normal():
        return rng.normal(size=(1, 150, 2, 128))

    query, key, value, g = normal(), normal(), normal(), -0.1 * normal() ** 2
    tokens = np.arange(150)[None, :, None, None]
    zeros, sizes = np.where(tokens % 3, 1.0, 0.0), 2.0 ** (tokens % 64 - 32)
    # Forgets nothing but in the later half of each chunk, and there some dimensions only.
    late = np.where((tokens % 64 >= 32) & (np.arange(128) % 3 == 0), -0.5, 0.0) + 0 * g
    for what, factors in (
        ("as they are", (1, 1)), ("large queries", (2.0**20, 1)), ("small queries", (2.0**-20, 1)),
        ("large keys", (1, 2.0**20)), ("small keys", (1, 2.0**-20)), ("queries of zeros", (zeros, 1)),
        ("keys of zeros", (1, zeros)), ("queries of all sizes", (sizes, 1)), ("keys of all sizes", (1, sizes)),
    ):
        yield what, *(jnp.asarray(x, jnp.bfloat16) for x in (query * factors[0], key * factors[1], value, g))
    for what, gates in (("late gates", late), *((f"gates times {n}", g * n) for n in (1.6, 2, 8, 30))):
        yield what, *(jnp.asarray(x, jnp.bfloat16) for x in (query, key, value, gates))


def in_chunks(query, key, value, g, pairs: str) -> np.ndarray:
    """The output in float64, with the roundings of the kernel: those of queries and keys of pairs to that dtype."""
    import jax.numpy as jnp

    def rounded(x, dtype="bfloat16"):
        return np.asarray(jnp.asarray(x, jnp.float32).astype(dtype)).astype(np.float64)

    q, k, v, g = (np.asarray(x).astype(np.float64)[0].transpose(1, 0, 2) for x in (query, key, value, g))
    (H, T, K), V, output = q.shape, v.shape[-1], []
    state = np.zeros((H, K, V))
    for start in range(0, T, 64):
        own = np.s_[:, start : start + 64]
        sums = np.cumsum(g[own], 1)
        mid, end = sums[:, :32][:, -1:], sums[:, -1:]
        later, earlier = q[own] * np.exp(sums - mid) * K**-0.5, k[own] * np.exp(mid - sums)
        state = np.exp(mid).transpose(0, 2, 1) * state
        found = rounded(later) @ rounded(state)
        for part in (np.s_[..., i : i + 64] for i in range(0, K, 64)):
            a, b = (rounded(x[part], pairs) for x in (later, earlier))
            found += rounded(np.tril(a @ b.transpose(0, 2, 1))) @ v[own]
        output.append(rounded(found))
        state = np.exp(end - mid).transpose(0, 2, 1) * (state + rounded(earlier).transpose(0, 2, 1) @ v[own])
    return np.concatenate(output, 1).transpose(1, 0, 2)[None]


def check_sizes(run) -> None:
    """Hold the outputs of ``run(query, key, value, g)`` for :func:`sized` to the tolerance rule.

    Where values are in float16's range, pairs are made of them: the error is what that gives, and not what bf16 gives.
    """
    for what, *arrays in sized(np.random.default_rng(0)):
        args = [np.asarray(x).astype(np.float64) for x in arrays]
        got, truth = np.asarray(run(*arrays)).astype(np.float64), linear_attention(*args)[0]
        rough = linear_attention(*args, dtype=np.float32)[0]
        assert error(got, truth) <= bound(rough, truth, "bfloat16"), what
        if what in ("as they are", "queries of zeros", "keys of zeros"):
            fine, coarse = (error(in_chunks(*arrays, dtype), truth) for dtype in ("float16", "bfloat16"))
            assert abs(error(got, truth) - fine) < abs(error(got, truth) - coarse), what
