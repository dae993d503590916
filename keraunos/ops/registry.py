"""Which implementations exist, and which of them can run a call.

A row is one implementation of one algorithm: ``(algorithm, platform, backend, priority)`` and a target, given as an
object or as ``"module:name"``, which is imported when a call needs it. Adding an implementation is one row.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

from keraunos.ops.family import Family, Operation
from keraunos.ops.invocation import Backend, Config, Invocation, Platform, UnsupportedError


def _no_limits(inv: Invocation) -> str | None:
    return None


def _as_given(inv: Invocation, cfg: Config) -> Config:
    return cfg


def _only_heuristic(inv: Invocation, cfg: Config) -> Iterable[Config]:
    return [cfg]


@dataclass(frozen=True, eq=False)
class Implementation:
    """One way of computing an algorithm, and what the choice of its configuration needs to know.

    It is the low-level function: called with the algorithm's arrays, by position or name, its options and ``cfg``.

    Attributes:
        algorithm: the operation that it computes.
        prepare: ``(args, cfg=, **options) -> run``, where ``run(args)`` computes, for all calls that are alike. The
            arrays are as the operation gives them to platforms: :meth:`keraunos.ops.Kernel.arranged`.
        fields: the configuration fields that it reads.
        unsupported: why it cannot run a call, or None if it can.
        loses: why others should run a call that it can run, or None: of a row that precedes theirs.
        heuristic: ``(inv, cfg) -> cfg`` with every field that it reads set to a good value for the call.
        candidates: ``(inv, cfg) -> configurations`` worth timing.
        config: its own configuration class, if it is not the operation's.
        source: its source file, or the function that it is.
        defaults: options of the low-level function that are its own.
        options: ``(arrays, cfg, return_state, **options) -> options`` as its functions take them.
        passes: ``framework -> functions``, of which it is made, forward and backward mostly: for those who put
            something in between, and for PyTorch's operators.
        segment: ``(args, options) -> tokens`` of the segments that it cuts sequences into; None: into none.
        parts: its functions of a part of the sequence, which others merge; see the operation's contract.
    """

    algorithm: str
    prepare: Callable[..., Callable]
    fields: tuple[str, ...] = ()
    unsupported: Callable[[Invocation], str | None] = _no_limits
    heuristic: Callable[[Invocation, Any], Any] = _as_given
    candidates: Callable[[Invocation, Any], Iterable[Any]] = _only_heuristic
    config: type[Config] | None = None
    source: str | Callable | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Callable[..., Any] | None = None
    passes: Callable[[str], tuple[Callable, ...]] | None = None
    segment: Callable[..., int | None] | None = None
    parts: tuple[Callable, Callable] | None = None
    loses: Callable[[Invocation], str | None] = _no_limits

    def __call__(self, *args: Any, cfg: Config | None = None, **options: Any) -> Any:
        """Compute with a configuration that is complete, or checked and with the heuristic's if none is given.

        Raises:
            ValueError, TypeError: the arguments are wrong, or it cannot run the call (:class:`UnsupportedError`).
        """
        if self.algorithm not in kernel_registry.operations:
            return self.prepare(args, cfg=cfg, **options)(args)
        kernel = kernel_registry.operations[self.algorithm].kernel
        args, options = kernel.low_level(*args, **{**self.defaults, **options})
        if cfg is None:
            inv = kernel.bind(*args, **options)
            if reason := self.unsupported(inv):
                raise UnsupportedError(f"{public_name(self.algorithm)}: {reason}")
            if check := kernel.checker(*args, **options):
                check(*args)
            cfg = self.heuristic(inv, (self.config or Config)())
        arrange, options = kernel.arranged(*args, **options)
        given = arrange(*args)
        return self.prepare(given, cfg=cfg, **options)(given)

    @functools.cached_property
    def source_version(self) -> str:
        """A hash of the source file, or of its platform's folder and what it shares with others.

        A change makes stored configurations stale.
        """
        fn, digest = inspect.unwrap(self.source if callable(self.source) else self.prepare), hashlib.sha256()
        try:
            path = Path(self.source if isinstance(self.source, str) else inspect.getsourcefile(fn) or "")
        except TypeError:  # no Python function
            return "unknown"
        if path.is_file():
            shared = path.parents[1].glob(f"recurrent/{path.stem}.py")  # what families share of a platform in one file
            files = [*path.parent.glob(f"{path.stem}*{path.suffix}"), *shared]
            if path.stem == "passes":  # a platform that has a folder of its own
                folders = path.parent, path.parents[1] / "shared", path.parents[2] / "device"
                files = [file for folder in folders for file in folder.glob("*.py")]
            for file in sorted(files):
                digest.update(file.read_bytes())
        else:
            # Typed in, not in a file.
            for part in _code(fn.__code__):
                digest.update(part)
        return digest.hexdigest()[:12]


def _plain(algorithm: str, fn: Callable) -> Callable[..., Callable]:
    """``prepare`` of a function that has nothing to settle beforehand."""

    def prepare(args: tuple, *, cfg: Config, **options: Any) -> Callable[[tuple], Any]:
        if algorithm not in kernel_registry.operations:
            return lambda args: fn(*args, cfg=cfg, **options)
        kernel = kernel_registry.operations[algorithm].kernel
        return lambda args: kernel.call(fn, args, cfg=cfg, **options)

    return prepare


def _code(code: CodeType) -> Iterator[bytes]:
    """The parts of a function's code, without its name."""
    yield code.co_code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield repr(constant).encode()


@dataclass(frozen=True)
class Row:
    """One line of the registry."""

    algorithm: str
    platform: str
    backend: str
    priority: int
    frameworks: tuple[str, ...] = ("jax", "torch")
    devices: tuple[str, str] = ("", "")
    target: Implementation | str = field(default="", compare=False)

    @functools.cached_property
    def implementation(self) -> Implementation:
        """The registered implementation, imported if need be."""
        if not isinstance(self.target, str):
            return self.target
        module, name = self.target.split(":")
        return getattr(importlib.import_module(module), name)

    def unsupported(self, inv: Invocation) -> str | None:
        """Why this row cannot run the call, or None."""
        if inv.framework not in self.frameworks:
            return f"takes {' or '.join(self.frameworks)} arrays, not {inv.framework}"
        if self.backend not in (Backend.ANY, inv.backend):
            return f"needs a {self.backend} device; the call's arrays are on {inv.backend}"
        name, pattern = self.devices
        if not re.search(pattern, inv.device):
            return f"needs {name}; the call's arrays are on {inv.device}"
        try:
            implementation = self.implementation
        except ImportError as error:
            return f"cannot be imported: {error}"
        return implementation.loses(inv) or implementation.unsupported(inv)


# What a row is registered with: a low-level function, or an implementation, or where it is.
Target = TypeVar("Target", bound="Callable | str")


class KernelRegistry:
    """All implementations, best first within an algorithm.

    Attributes:
        operations: those of keraunos, by name; algorithms that users register are not among them.
        generation: counts changes of the rows.
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self.operations: dict[str, Operation] = {}
        self.generation = 0

    def add(self, family: Family) -> None:
        """Register a family's operations on all its platforms."""
        self.operations |= {operation.name: operation for operation in family.operations}
        for operation, row, target in family.targets():
            self.register(operation.name, row.platform, row.backend, row.priority, frameworks=row.frameworks,
                          devices=row.devices)(target)

    def register(
        self,
        algorithm: str,
        platform: str,
        backend: str = Backend.ANY,
        priority: int = 0,
        *,
        frameworks: tuple[str, ...] = ("jax", "torch"),
        devices: tuple[str, str] = ("", ""),
        **about: Any,
    ) -> Callable[[Target], Target]:
        """Register what the returned decorator is applied to: a function, an Implementation or "module:name".

        Args:
            algorithm: the operation it computes, such as ``"gla"``.
            platform: one of :class:`Platform`, or a new name, which ``platform=`` then accepts.
            backend: the device kind it needs.
            priority: of the rows that can run a call, the one with the highest priority does.
            frameworks: whose arrays it takes.
            devices: a name for the devices it is for, and a pattern of theirs: for others it is not even imported.
            about: other fields of :class:`Implementation`, when it is applied to a function: a low-level one.

        Raises:
            ValueError: the row is taken, or the platform is ``auto``.
        """
        platform, backend = str(platform), str(Backend(backend))
        if platform == Platform.AUTO:
            raise ValueError("register: platform 'auto' is the choice among the others and cannot be registered")

        def add(target: Target) -> Target:
            made: Any = target
            if callable(target) and not isinstance(target, Implementation):
                made = Implementation(algorithm, _plain(algorithm, target), **{"source": target, **about})
            elif about:
                raise TypeError(f"register: {', '.join(about)} describe a function; the target already is complete")
            row = Row(algorithm, platform, backend, priority, frameworks, devices, made)
            if row in self._rows:
                raise ValueError(
                    f"register: {algorithm} on {platform}/{backend} with priority {priority} is registered already"
                )
            self._rows.append(row)
            self._rows.sort(key=lambda r: -r.priority)
            self.generation += 1
            return target

        return add

    def unregister(self, row: Row) -> None:
        """Take a row out again."""
        self._rows.remove(row)
        self.generation += 1

    def rows(self, algorithm: str | None = None) -> tuple[Row, ...]:
        """The rows of an algorithm (or all), best first."""
        return tuple(r for r in self._rows if algorithm in (None, r.algorithm))

    def platforms(self, algorithm: str) -> list[str]:
        """The names that ``platform=`` accepts for an algorithm, best first."""
        return list(dict.fromkeys(r.platform for r in self.rows(algorithm)))

    def find(self, algorithm: str, platform: str | None = None, backend: str = Backend.ANY) -> list[Row]:
        """The rows that the names allow, best first.

        Raises:
            ValueError: no such algorithm, platform or backend.
            UnsupportedError: the platform has nothing for the algorithm.
        """
        rows = self.rows(algorithm)
        if not rows:
            raise ValueError(f"no algorithm {algorithm!r}; registered: {sorted({r.algorithm for r in self._rows})}")
        name = public_name(algorithm)
        if platform not in (None, Platform.AUTO) and platform not in self.platforms(algorithm):
            wanted = f"expected one of {[*self.platforms(algorithm), 'auto']}"
            if platform in list(Platform):
                raise UnsupportedError(f"{name}: platform {str(platform)!r} does not have it; {wanted}")
            raise ValueError(f"{name}: unknown platform {platform!r}; {wanted}")
        if backend not in list(Backend):
            raise ValueError(f"{name}: unknown backend {backend!r}; expected one of {[str(b) for b in Backend]}")
        return [
            r
            for r in rows
            if platform in (None, Platform.AUTO, r.platform)
            and (backend == Backend.ANY or r.backend in (Backend.ANY, backend))
        ]

    def get(self, algorithm: str, platform: str | None = None, backend: str = Backend.ANY) -> Implementation:
        """The low-level function of an algorithm on a platform.

        Raises:
            ValueError: no such algorithm or platform.
            UnsupportedError: the platform has nothing for that backend, or cannot be imported here.
        """
        reasons = []
        for row in self.find(algorithm, platform, backend):
            try:
                return row.implementation
            except ImportError as error:
                reasons.append(f"{row.platform}: cannot be imported: {error}")
        raise UnsupportedError(
            f"{public_name(algorithm)}: nothing for platform {platform!r}, backend {backend!r}. {'; '.join(reasons)}"
        )

    def choose(self, inv: Invocation, platform: str | None = None, backend: str = Backend.ANY) -> tuple[Row, list[str]]:
        """The best row that can run the call, and why each better platform was passed over.

        Raises:
            ValueError: unknown names.
            UnsupportedError: none can; the message gives each one's reason.
        """
        passed: dict[str, dict[str, None]] = {}
        rows, name = self.find(inv.op_id, platform, backend), public_name(inv.op_id)
        if backend not in (Backend.ANY, inv.backend):
            raise UnsupportedError(f"{name}: asked for backend {backend!r}; the arrays are on {inv.backend}")
        for row in rows:
            reason = row.unsupported(inv)
            if reason is None:
                # A platform may have several rows, and no platform is lost with one that could not run it.
                passed.pop(row.platform, None)
                return row, _by_platform(passed)
            passed.setdefault(row.platform, {})[reason] = None
        reasons = "; ".join(_by_platform(passed))
        if not any(row.backend in (Backend.ANY, inv.backend) for row in rows):
            # A platform for other devices was named: say which ones can be named here.
            able = dict.fromkeys(r.platform for r in self.rows(inv.op_id) if r.unsupported(inv) is None)
            reasons += f"; on {inv.backend}, {' or '.join(able)} can run it" if able else ""
        raise UnsupportedError(f"{name}: no platform can run this call. {reasons}")

    def passes(self, algorithm: str, platform: str) -> tuple[Callable, ...]:
        """The functions of a platform of which PyTorch's operator is made.

        Raises:
            ValueError: no such platform.
            UnsupportedError: the platform has none.
        """
        passes = self.get(algorithm, platform).passes
        if passes is None:
            raise UnsupportedError(f"{public_name(algorithm)}: platform {platform!r} is no part of PyTorch's graphs")
        return passes("torch")

    def require(self, inv: Invocation, cfg: Config) -> None:
        """See that the platform of a configuration can run a call, and has all that it reads of the configuration.

        Raises:
            ValueError: the platform is unknown, or a field is not set.
            UnsupportedError: it cannot.
        """
        row, _ = self.choose(inv, cfg.platform)
        if missing := [name for name in row.implementation.fields if getattr(cfg, name) is None]:
            raise ValueError(f"{public_name(inv.op_id)}: the configuration has no {', '.join(missing)}; platform"
                             f" {row.platform!r} needs {', '.join(row.implementation.fields)}")


def _by_platform(reasons: dict[str, dict[str, None]]) -> list[str]:
    return [f"{platform}: {'; and '.join(found)}" for platform, found in reasons.items()]


kernel_registry = KernelRegistry()


def public_name(algorithm: str) -> str:
    """The public function of an algorithm, whose name errors carry; the algorithm's own where it has none."""
    known = kernel_registry.operations.get(algorithm)
    return known.function if known else algorithm


def detect_platform(algorithm: str, platform: str | None = Platform.AUTO) -> str:
    """The platform that calls of an algorithm get on this machine's default device.

    Args:
        algorithm: such as ``"gla"``.
        platform: a name is checked and returned; ``"auto"`` or None asks for the best one for the device and the
            framework loaded, or if none is, installed (JAX if both are).

    Returns:
        The platform's name, of a call in bfloat16 with 4,096 tokens and 16 heads of 128. Others may get another one:
        ask ``keraunos.explain``.

    Raises:
        ValueError: unknown algorithm or platform.
        UnsupportedError: no platform can run such a call on this device.
    """
    kernel_registry.find(algorithm, platform)
    if platform not in (None, Platform.AUTO):
        return str(platform)
    there = [x for x in ("jax", "torch") if sys.modules.get(x)] or [x for x in ("jax", "torch") if find_spec(x)]
    ours = kernel_registry.operations
    described = ours[ours[algorithm].like or algorithm].kernel
    inv = replace(described.invocation((*there, "jax")[0], T=4096, H=16, K=128), op_id=algorithm)
    return kernel_registry.choose(inv)[0].platform
