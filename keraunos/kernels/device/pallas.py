"""Launches of Pallas kernels on TPUs, in which a plan says what block of an array each program has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from keraunos.frontends.jax.arrays import vary, varying, zeros

# What a kernel may take of a core's fast memory: all of v5e, v6e and v5p have at least twice that, tpu7x has 64 MiB.
VMEM = 56 << 20


def launch(kernel: Callable, name: str, grid: tuple[int, ...], plan: jax.Array, given: Mapping[str, tuple],
           made: Mapping[str, tuple], scratch: Sequence[Any], in_place: Mapping[str, str]) -> dict[str, jax.Array]:
    """Run ``kernel(plan, *references)`` on what is given, what is made, and scratch memory, in this order.

    Args:
        grid: the programs; those of the last axis run one after the other.
        plan: integers, which the specs of blocks are given.
        given: each array and its spec; made: each output's shape, dtype and spec.
        in_place: the arrays whose memory outputs get, and these.

    Returns:
        The outputs by their names.
    """
    varies = varying(plan).union(*(varying(x) for x, _ in given.values()))
    like = vary(next(iter(given.values()))[0], varies)
    found = pl.pallas_call(
        kernel,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=grid, in_specs=[spec for _, spec in given.values()],
            out_specs=[spec for _, _, spec in made.values()], scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(*["parallel"] * (len(grid) - 1), "arbitrary"), vmem_limit_bytes=VMEM
        ),
        # Inside ``shard_map`` they vary as the inputs do.
        out_shape=jax.eval_shape(lambda: [zeros(shape, dtype, like) for shape, dtype, _ in made.values()]),
        # Inputs are counted with the plan.
        input_output_aliases={[*given].index(x) + 1: [*made].index(y) for x, y in in_place.items()},
    )(vary(plan, varies), *(vary(x, varies) for x, _ in given.values()))
    return dict(zip(made, found, strict=True))
