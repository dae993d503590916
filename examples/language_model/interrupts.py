"""Ctrl-C between two steps instead of within one."""

import signal
import threading
from types import FrameType


class HeldBackInterrupt:
    """While entered, a first Ctrl-C only sets `requested`, so that the work at hand is finished; a second ends it.

    A request that was not acted upon is not lost: leaving raises `KeyboardInterrupt`.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "HeldBackInterrupt":
        # Python allows handlers in the main thread only, and only it is interrupted by Ctrl-C.
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._in_main:
            signal.signal(signal.SIGINT, self._previous)
        if self.requested and kind is None:
            raise KeyboardInterrupt

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
