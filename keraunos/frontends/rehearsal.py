"""Builds what a call launches side by side, before the first launch: builds are most of a first call."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

_local = threading.local()


class Rehearsal:
    """Runs a function that does nothing but launch kernels, on arrays without values; front ends build, not launch.

    Args:
        fn: the function. An error of it, or of a build, shows when the kernels are launched.
        device: where they will be.
    """

    def __init__(self, fn: Callable[[], Any], device: Any = None):
        self.device = device
        self._builds: list[tuple[Callable, tuple]] = []
        # Reading a kernel, Triton changes the process's filters of warnings: one thread would leave what another set.
        with warnings.catch_warnings(), ThreadPoolExecutor() as threads:
            identity = threads.submit(_identify)
            _local.rehearsal = self
            try:
                with contextlib.suppress(Exception):
                    fn()
            finally:
                _local.rehearsal = None
            wait([identity])
            # Only one thread at a time can read a kernel, which is done in Python. Those that are launched last, such
            # as gradients, take longest to compile.
            for build, args in reversed(self._builds):
                read = threading.Event()
                threads.submit(_run, threads, read, build, args)
                read.wait()

    def build(self, fn: Callable, *args: Any) -> None:
        """Have ``fn(*args)`` called, which keeps what it builds, and calls :func:`was_read` when it has read one."""
        self._builds.append((fn, args))


def _identify() -> None:
    """Have Triton make what it knows itself by: a hash of all of it, which takes as long as to read a kernel."""
    from triton.runtime.cache import triton_key

    triton_key()


def _run(threads: ThreadPoolExecutor, read: threading.Event, build: Callable, args: tuple) -> None:
    _local.building = threads, read
    try:
        build(*args)
    finally:
        read.set()


def was_read(*beside: Callable[[], Any]) -> None:
    """Say that this thread has read the kernel which it builds; what is left of that is done outside of Python.

    ``beside``: what makes all else that the kernel needs, meanwhile.
    """
    if building := getattr(_local, "building", None):
        threads, read = building
        for fn in beside:
            threads.submit(fn)
        read.set()


def current() -> Rehearsal | None:
    """The rehearsal in which this thread is."""
    return getattr(_local, "rehearsal", None)
