"""The table of a family of operations: everything about it that is known by its name elsewhere.

Each folder of kernels has one, ``family.py``, and ``keraunos.kernels.families`` lists them. The registry, the executor,
the command line, the benchmarks and the distributed functions read it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from keraunos.frontends import Operator
from keraunos.ops.invocation import Backend, Platform


@dataclass(frozen=True)
class PlatformRow:
    """One platform of a family, as the registry lists it.

    Attributes:
        platform: its name.
        module: of its implementations, in the family's folder.
        priority: of the rows that can run a call, the one with the highest priority does.
        prefix: of the implementations' names, before the operation's.
        frameworks, backend, devices: whose arrays and which devices it takes, as in ``KernelRegistry.register``.
    """

    platform: str
    module: str
    priority: int
    prefix: str = ""
    frameworks: tuple[str, ...] = ("jax", "torch")
    backend: str = Backend.ANY
    devices: tuple[str, str] = ("", "")


NVIDIA = ("an NVIDIA GPU", r"^NVIDIA")
HOPPER = ("a Hopper GPU (H100, H200)", r"\bG?H(20|100|200|800)\b")
# Platforms that have everything.
PORTABLE = (
    PlatformRow(Platform.TRITON, "triton.passes", 30),
    PlatformRow(Platform.XLA, "xla", 10, frameworks=("jax",)),
    PlatformRow(Platform.TORCH, "torch", 10, frameworks=("torch",)),
)
# By name only: these kernels were compiled for TPUs, and run in an interpreter, but on none.
TPU = (PlatformRow(Platform.PALLAS, "pallas.passes", 5, frameworks=("jax",), backend=Backend.TPU),)


# Of kernels for Hopper GPUs: the calls that these compute the fastest, and all that they can run.
CUDA = tuple(
    PlatformRow(Platform.CUDA, "cuda.passes", priority, prefix, backend=Backend.GPU, devices=HOPPER)
    for prefix, priority in (("preferred_", 45), ("", 15))
)


def named(path: str) -> Any:
    """The object that ``"module:name"`` names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Operation:
    """One operation of a family.

    Attributes:
        name: in the registry and in keys of configurations.
        function: the name of its public function, which errors carry.
        operator: its node in PyTorch's graphs.
        described: ``"module:name"`` of its :class:`Kernel`, a class or an instance.
        distributed: the module of ``keraunos.distributed`` that has it over several devices; None: there is none.
        cases: calls of real models, name -> sizes.
        like: an operation whose calls stand for its own where it has no sizes; "": it has.
    """

    name: str
    function: str
    operator: Operator
    described: str
    distributed: str | None = None
    cases: Mapping[str, dict[str, Any]] = field(default_factory=dict, hash=False)
    like: str = ""

    @functools.cached_property
    def kernel(self) -> Any:
        """Its :class:`Kernel`, imported at the first use: it is defined above its platforms."""
        found = named(self.described)
        return found() if isinstance(found, type) else found


@dataclass(frozen=True)
class Family:
    """A folder of ``keraunos.kernels``: its operations, and the platforms that have them.

    Attributes:
        transition: ``"module:name"`` of what a stretch of tokens does to a state, for operations over shards: see
            :mod:`keraunos.kernels.recurrent.stretches`; "": they have no state.
    """

    name: str
    operations: tuple[Operation, ...]
    rows: tuple[PlatformRow, ...]
    transition: str = ""

    def targets(self) -> Iterator[tuple[Operation, PlatformRow, str]]:
        """Each implementation: of which operation, in which row, and where it is."""
        for operation in self.operations:
            for row in self.rows:
                home = f"keraunos.kernels.{self.name}.{row.module}"
                yield operation, row, f"{home}:{row.prefix}{operation.name}"
