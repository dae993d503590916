"""A launch but for its arrays: worked out once for all calls that are alike."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from keraunos import frontends
from keraunos.frontends.array_types import Array

# What follows from shapes, dtypes and options is worked out once.
remember = functools.lru_cache(maxsize=4096)


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
