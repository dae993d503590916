"""Checks a contestant against the float64 reference: one that is wrong is not timed."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
from contestants import Contestant
from workloads import Workload

from keraunos import frontends, numerics
from keraunos.ops.invocation import Config

_NAMES = ("query", "key", "value", "g")


class WrongResultError(ValueError):
    """A contestant's result is further from the float64 reference than it may be."""


def check(contestant: Contestant, workload: Workload) -> dict[str, float]:
    """Compare a contestant with the float64 reference on a small call of the same kind.

    The small call has all heads of the workload, which are copies of two: so the reference is quick, and what depends
    on the number of heads is as in the workload.

    Returns:
        The relative error of the output and, with backward, of each gradient.

    Raises:
        WrongResultError: an error is larger than allowed; see :mod:`keraunos.numerics`.
        Exception: what the contestant itself raises.
    """
    return _check(contestant, workload.small(), contestant.config(workload))


# Workloads that differ in batch and length only share a check.
@functools.lru_cache(maxsize=64)
def _check(contestant: Contestant, small: Workload, cfg: Config | None) -> dict[str, float]:
    framework = contestant.framework
    measure, frontend = frontends.get(f"{framework}.measure"), frontends.get(framework)
    backend = frontend.default_device().backend
    # The reference of softmax attention is quick enough for all of them.
    two = small if small.products else replace(small, shape=replace(small.shape, H=min(2, small.shape.H)))
    inputs, cotangent, right = _two_heads(two, framework)

    def all_heads(x: np.ndarray) -> np.ndarray:
        return x if two == small else x[:, :, np.arange(small.shape.H) % two.shape.H]

    decays = two.log_decay()
    if decays is not None:
        decays = decays[np.arange(small.shape.H) % two.shape.H]
    fn = contestant.function(small, decays, cfg)
    given = [measure.array(all_heads(x), small.dtype, backend) for x in inputs]
    cotangents = [measure.array(all_heads(cotangent), small.dtype, backend)] if small.backward else None
    outputs, gradients = measure.program(fn, given, cotangents)()
    names = ("output", *(f"d{name}" for name in _NAMES[: len(inputs)]))
    errors = {}
    for name, got, (truth, plain) in zip(names, [*outputs, *(gradients or ())], right, strict=small.backward):
        dtype = frontend.dtype_name(got)
        low = measure.values(measure.array(plain, dtype, backend))
        allowed = contestant.tolerance * numerics.bound(low, truth, max(dtype, small.dtype, key=numerics.rounding))
        errors[name] = numerics.error(measure.values(got), all_heads(truth))
        if not errors[name] <= allowed:
            raise WrongResultError(f"wrong: {name} has error {errors[name]:.2g}, allowed {allowed:.2g}")
    return errors


@functools.lru_cache(maxsize=8)
def _two_heads(two: Workload, framework: str) -> tuple[list[np.ndarray], np.ndarray, list[tuple[Any, Any]]]:
    """Inputs, the output's gradient, and for each result its truth and what the reference gives in float32."""
    measure = frontends.get(f"{framework}.measure")
    inputs = [measure.values(x).astype(np.float32) for x in two.inputs(framework, seed=0)]
    extras, options = two.rest(framework)
    given: dict[str, Any] = {
        **dict(zip(_NAMES, inputs, strict=False)), "log_decay": two.log_decay(),
        **{name: measure.values(x) for name, x in extras.items()},
    }
    kernel, s = two.kernel, two.shape
    args = [given.get(name) for name in kernel.arguments]
    backend = frontends.get(framework).default_device().backend
    cotangent = measure.values(measure.normal((s.B, s.T, s.H, s.V), two.dtype, 1, backend)).astype(np.float32)
    found = []
    for dtype in (np.float64, np.float32):
        results = [kernel.reference(args, options, dtype)[0]]
        if two.backward:
            gradients = dict(
                zip(kernel.arguments, kernel.reference_vjp(args, options, (cotangent, None), dtype), strict=True)
            )
            results += [gradients[name] for name in _NAMES[: len(inputs)]]
        found.append(results)
    return inputs, cotangent, list(zip(*found, strict=True))
