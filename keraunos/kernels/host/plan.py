"""A launch but for its arrays: worked out once for all calls that are alike."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from keraunos import frontends
from keraunos.frontends.array_types import Array

# What follows from shapes, dtypes and options is worked out once.
remember = functools.lru_cache(maxsize=4096)


def named(kernel: Any, known: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of what is known of a call the arguments that a kernel names, in its order, and the constants."""
    names, constant = [name for name in kernel.arg_names if name in known], kernel.fn.__annotations__
    return ({name: known[name] for name in names if name not in constant},
            {name: known[name] for name in names if name in constant})


class Plan(NamedTuple):
    """A launch but for its arrays."""

    kernel: Any
    grid: tuple[int, ...]
    numbers: dict[str, Any]
    outputs: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def launch(self, **arrays: Array | None) -> tuple[Any, ...]:
        """Run it on arrays, given in the order of the kernel's parameters."""
        return frontends.launch(self.kernel, self.grid, {**arrays, **self.numbers}, self.outputs, self.constants,
                                num_warps=self.num_warps, num_stages=self.num_stages)
