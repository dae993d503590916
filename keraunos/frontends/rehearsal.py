"""Builds what a call launches side by side, before the first launch: builds are most of a first call."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_local = threading.local()


class Rehearsal:
    """Runs a function that does nothing but launch kernels, on arrays without values; front ends build, not launch.

    Args:
        fn: the function. What is wrong with it, or with a build, shows when the kernels are launched.
        device: where they will be.
    """

    def __init__(self, fn: Callable[[], Any], device: Any = None):
        self.device = device
        # Reading a kernel, Triton changes the process's filters of warnings: one thread would leave what another set.
        with warnings.catch_warnings(), ThreadPoolExecutor() as self._threads:
            _local.rehearsal = self
            try:
                with contextlib.suppress(Exception):
                    fn()
            finally:
                _local.rehearsal = None

    def build(self, fn: Callable, *args: Any) -> None:
        """Begin ``fn(*args)``, which keeps what it builds."""
        self._threads.submit(fn, *args)


def current() -> Rehearsal | None:
    """The rehearsal in which this thread is."""
    return getattr(_local, "rehearsal", None)
