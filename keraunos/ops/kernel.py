"""The base class of operations."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import numpy as np

from keraunos.frontends.array_types import Array
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.registry import Implementation, Row, kernel_registry, public_name


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

    def run(self, *args: Array | None, cfg: Config, **kwargs: Any) -> Any:
        """Compute with the implementation and the launch configuration that the keyword ``cfg`` names."""
        return self.prepare(*args, cfg=cfg, **kwargs)(*args)

    def arranged(self, *args: Array | None, **kwargs: Any) -> tuple[Callable, dict[str, Any]]:
        """``(convert, options)``: a function that makes a platform's arrays of such arguments, and its options."""
        return _as_given, kwargs

    def low_level(self, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """The operation's arrays, in order, and its options, from the arguments of its low-level function."""
        return self.in_order(args, kwargs)

    def call(self, fn: Callable, args: Any, *, cfg: Config, **options: Any) -> Any:
        """Call a low-level function with a platform's arrays and options."""
        return fn(*args, cfg=cfg, **options)

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

    def checker(self, *args: Array | None, **kwargs: Any) -> Callable | None:
        """Make the check of the values of ``args`` for all calls with arguments like these; None: there is none.

        Raises:
            ValueError: a constant has a wrong value.
        """
        return None

    def prepare(self, *args: Array | None, cfg: Config, **kwargs: Any) -> Callable:
        """A function of ``args`` that computes ``run`` for all calls with arguments like these, prepared beforehand."""
        if getattr(self.run, "__func__", None) is not Kernel.run:
            return functools.partial(self.run, cfg=cfg, **kwargs)  # an operation that computes in its own way
        (arrange, options), prepare = self.arranged(*args, **kwargs), self.get_impl(cfg).prepare
        known: Callable | None = None

        def call(*args: Array | None) -> Any:
            nonlocal known
            given = arrange(*args)
            run = known = known or prepare(given, cfg=cfg, **options)
            return run(given)

        return call

    def get_impl(self, cfg: Config) -> Implementation:
        """The implementation that ``cfg.platform`` and ``cfg.backend`` name."""
        return kernel_registry.get(self.op_id, cfg.platform, cfg.backend)

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

    def reference(self, args: Sequence[np.ndarray | None], kwargs: dict, dtype: type) -> tuple:
        """The right outputs, computed in a NumPy dtype from arguments like :meth:`sample`'s as NumPy arrays."""
        raise self._untunable("reference")

    def reference_vjp(self, args: Sequence[np.ndarray | None], kwargs: dict, cotangents: Sequence[np.ndarray],
                      dtype: type) -> tuple:
        """The right gradients of ``args`` for those of the outputs; None where there is none to compare."""
        raise self._untunable("reference_vjp")

    def _untunable(self, missing: str) -> NotImplementedError:
        return NotImplementedError(f"{self.op_id} cannot be tuned: {type(self).__name__} has no {missing}()")


def _as_given(*args: Array | None) -> tuple:
    return args
