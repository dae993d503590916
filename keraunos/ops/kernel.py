"""What an operation, one call of it, and its launch configuration are."""

from __future__ import annotations

import functools
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from keraunos.frontends import SHARED_MEMORY
from keraunos.kernels.registry import Backend, Implementation, Platform, Row, kernel_registry, public_name

# As text: PyTorch's compiler, which reads the checks of configurations, does not know classes of such names.
_BACKENDS = tuple(map(str, Backend))


@dataclass(frozen=True)
class Config:
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

    def __post_init__(self):
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


def is_number(x: Any) -> bool:
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
        arguments: the call's own arrays, by name; not part of its identity.
        shared_memory: bytes of it that a program on the device may have, if that is a GPU.
        settled: False: it is traced, and its program may be lowered for another kind of device than ``backend``.
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
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    shared_memory: int = SHARED_MEMORY
    settled: bool = field(default=True, compare=False)
    symbolic: bool = field(default=False, compare=False)

    @functools.cached_property
    def key(self) -> str:
        """What the call shares with every call that should get the same configuration, readable."""
        dims = " ".join(f"{d}{bucket(n) if d in self.lengths else n}" for d, n in self.dims.items())
        arrays = " ".join(f"{name}:{dtype}x{ndim}" for name, (dtype, ndim) in self.arrays.items())
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.op_id} | {self.framework} | {dims} | {arrays} | {options}"


class Kernel(ABC):
    """An operation: validates a call, runs it on a platform, and knows what to ask about configurations.

    Attributes:
        op_id: its name in ``kernel_registry``.
        config: its configuration class.
        arguments: the names of the arrays that it takes, in order.
    """

    op_id: ClassVar[str]
    config: ClassVar[type[Config]] = Config
    arguments: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def bind(self, *args: Any, **kwargs: Any) -> Invocation:
        """Check one call's arguments and describe it.

        Raises:
            ValueError, TypeError: the arguments are wrong.
        """

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the implementation and the launch configuration that the keyword ``cfg`` names."""

    def in_order(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """All its arrays, of which some are given by name or left out (None), and the options.

        Raises:
            TypeError: there are too many arrays, or one is given twice.
        """
        names, label = self.arguments, public_name(self.op_id)
        if len(args) > len(names):
            raise TypeError(f"{label}: got {len(args)} arrays; expected at most {len(names)}: {', '.join(names)}")
        if twice := [name for name in names[: len(args)] if name in kwargs]:
            raise TypeError(f"{label}: got {', '.join(twice)} by position and by name; expected one of both")
        options = {name: value for name, value in kwargs.items() if name not in names}
        return (*args, *map(kwargs.get, names[len(args) :])), options

    def checker(self, *args: Any, **kwargs: Any) -> Callable | None:
        """What checks the values of ``args`` in all calls with arguments like these; None: nothing does.

        Raises:
            ValueError: a constant has a wrong value.
        """
        return None

    def prepare(self, *args: Any, cfg: Config, **kwargs: Any) -> Callable:
        """``run`` for all calls with arguments like these, as a function of ``args``, settled as far as it can be."""
        return functools.partial(self.run, cfg=cfg, **kwargs)

    def get_impl(self, cfg: Config) -> Implementation:
        """The implementation that ``cfg.platform`` and ``cfg.backend`` name."""
        return _implementation(self.op_id, cfg.platform, cfg.backend, kernel_registry.generation)

    def heuristic_cfg(self, inv: Invocation, row: Row | None = None, partial: Config | None = None) -> Config:
        """A good configuration for the call without measuring; fields set in ``partial`` stay as they are."""
        row = row or kernel_registry.choose(inv)[0]
        made = (row.implementation.config or self.config)()
        cfg = row.implementation.heuristic(inv, replace(made, platform=row.platform, backend=row.backend))
        if partial is None:
            return cfg
        given = {f.name: getattr(partial, f.name) for f in fields(partial) if f.name not in ("platform", "backend")}
        given = {name: value for name, value in given.items() if value is not None}
        # What was chosen or measured is for whatever device the program is lowered for.
        return replace(cfg, **given, backend=row.backend) if given else cfg

    def candidate_cfgs(self, inv: Invocation, row: Row | None = None) -> list[Config]:
        """The configurations worth timing for the call; the heuristic's own is the first."""
        row = row or kernel_registry.choose(inv)[0]
        heuristic = self.heuristic_cfg(inv, row)
        return list(dict.fromkeys([heuristic, *row.implementation.candidates(inv, heuristic)]))

    # What the tuner asks. An operation that can be tuned answers all four.

    def sample(self, inv: Invocation, seed: int) -> tuple[tuple, dict]:
        """Random arguments ``(args, kwargs)`` of :meth:`run` with the call's shapes and dtypes, on its device."""
        raise self._untunable("sample")

    def check_calls(self, inv: Invocation, cfgs: Sequence[Config]) -> list[Invocation]:
        """Small calls of the same kind, on which candidates are compared with the reference."""
        raise self._untunable("check_calls")

    def reference(self, args: Sequence[Any], kwargs: dict, dtype: Any) -> tuple:
        """The right outputs, computed in a NumPy dtype from arguments like :meth:`sample`'s as NumPy arrays."""
        raise self._untunable("reference")

    def reference_vjp(self, args: Sequence[Any], kwargs: dict, cotangents: Sequence[Any], dtype: Any) -> tuple:
        """The right gradients of ``args`` for those of the outputs; None where there is none to compare."""
        raise self._untunable("reference_vjp")

    def _untunable(self, missing: str) -> NotImplementedError:
        return NotImplementedError(f"{self.op_id} cannot be tuned: {type(self).__name__} has no {missing}()")


@functools.lru_cache(maxsize=256)
def _implementation(algorithm: str, platform: str, backend: str, generation: int) -> Implementation:
    return kernel_registry.get(algorithm, platform, backend)
