"""The description of one call of an operation, and its launch configuration."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from keraunos.frontends import SHARED_MEMORY
from keraunos.frontends.graph_nodes import GraphOption


class Platform(StrEnum):
    """Who computes: the technique an implementation is written in."""

    TRITON = "triton"
    PALLAS = "pallas"
    CUDA = "cuda"
    XLA = "xla"
    TORCH = "torch"
    AUTO = "auto"


class Backend(StrEnum):
    """Where it is computed: the kind of device an implementation is for."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"
    ANY = "any"


class UnsupportedError(ValueError):
    """No implementation that was allowed can run the call; the message gives each one's reason."""


# As text: PyTorch's compiler, which reads the checks of configurations, does not know classes of such names.
_BACKENDS = tuple(map(str, Backend))


@dataclass(frozen=True)
class Config(GraphOption):
    """Launch configuration; None leaves a field to the platform. A platform reads the fields that it has.

    Attributes:
        block_q: query tokens per tile (linear attention: tokens per chunk); a power of two, 1 to 1024.
        block_k: key tokens per tile (linear attention: tokens per sub-block of a vector gate); likewise.
        block_d: head dimensions per tile; a power of two, 16 to 256.
        num_warps: warps per program: 1, 2, 4, 8 or 16.
        num_stages: depth of the software pipeline, 1 to 8.
        platform: the platform it is for, or "auto".
        backend: the device kind it is for, or "any".

    Raises:
        ValueError: a field is outside its range.
    """

    block_q: int | None = None
    block_k: int | None = None
    block_d: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    platform: str = Platform.AUTO
    backend: str = Backend.ANY

    def __post_init__(self) -> None:
        self.check("block_q", lambda x: 1 <= x <= 1024 and x & (x - 1) == 0, "a power of two from 1 to 1024")
        self.check("block_k", lambda x: 1 <= x <= 1024 and x & (x - 1) == 0, "a power of two from 1 to 1024")
        self.check("block_d", lambda x: 16 <= x <= 256 and x & (x - 1) == 0, "a power of two from 16 to 256")
        self.check("num_warps", lambda x: x in (1, 2, 4, 8, 16), "1, 2, 4, 8 or 16")
        self.check("num_stages", lambda x: 1 <= x <= 8, "from 1 to 8")
        if not isinstance(self.platform, str) or not self.platform:
            raise ValueError(f"{type(self).__name__}: platform is {self.platform!r}; expected a platform's name")
        object.__setattr__(self, "platform", str(self.platform))
        if self.backend not in _BACKENDS:
            wanted = ", ".join(_BACKENDS)
            raise ValueError(f"{type(self).__name__}: backend is {self.backend!r}; expected one of {wanted}")
        object.__setattr__(self, "backend", str(self.backend))

    def check(self, name: str, allowed: Callable[[int], bool], wanted: str) -> None:
        """Refuse a field that is set and that ``allowed`` does not accept.

        Raises:
            ValueError: got, and ``wanted``.
        """
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not allowed(value):
            raise ValueError(f"{type(self).__name__}: {name} is {value!r}; expected {wanted}")

    def to_json(self) -> dict[str, Any]:
        """The fields that are set, as JSON values."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The configuration that :meth:`to_json` wrote.

        Raises:
            ValueError: a field is unknown or outside its range.
        """
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"{cls.__name__}: unknown fields {sorted(unknown)}")
        return cls(**data)


def is_number(x: object) -> bool:
    """Whether an option is a finite number: no truth value, no text, no array."""
    try:
        return isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x)
    except OverflowError:  # a whole number that no float can be
        return False


def bucket(n: int) -> int:
    """A length rounded up to a power of two."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Invocation:
    """One call of an operation: what the choice of platform and configuration may look at.

    Attributes:
        op_id: the operation, as registered.
        framework: "jax" or "torch".
        backend: "cpu", "gpu" or "tpu".
        device: the device's kind, such as "NVIDIA H200".
        dims: the call's sizes by their letters (B, T, H, ...).
        lengths: the letters of ``dims`` that vary from call to call and are bucketed in the key.
        arrays: name -> (dtype, number of dimensions) of the arguments that are given.
        options: the call's options that change what is computed.
        constants: those of ``arrays`` whose values are part of the program, such as a decay per head given as numbers.
        arguments: the call's own arrays, by name; not part of its identity.
        shared_memory: bytes of it that a program on the device may have, if that is a GPU.
        traced: it is, and its program may be lowered for another kind of device than ``backend``.
        symbolic: some of ``dims`` stand for sizes that are symbols of ``jax.export``.
    """

    op_id: str
    framework: str
    backend: str
    device: str
    dims: Mapping[str, int]
    lengths: frozenset[str]
    arrays: Mapping[str, tuple[str, int]]
    options: Mapping[str, Any] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    shared_memory: int = SHARED_MEMORY
    traced: bool = field(default=False, compare=False)
    symbolic: bool = field(default=False, compare=False)

    @functools.cached_property
    def key(self) -> str:
        """The key that all calls share which should get the same configuration, readable."""
        dims = " ".join(f"{d}{bucket(n) if d in self.lengths else n}" for d, n in self.dims.items())
        arrays = " ".join(
            f"{name}:{'constant-' if name in self.constants else ''}{dtype}x{ndim}"
            for name, (dtype, ndim) in self.arrays.items()
        )
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.op_id} | {self.framework} | {dims} | {arrays} | {options}"
