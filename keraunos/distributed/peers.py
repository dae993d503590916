"""What the driver says of GPUs that share memory, for all frameworks."""

from __future__ import annotations

import ctypes
import functools
import logging
import os

_log = logging.getLogger("keraunos")

# Of the driver's attributes of two devices: one can do atomic operations in the memory of the other.
_ATOMIC = 3
# Said by both front ends.
REFUSED = "KERAUNOS_PEERS is 0"


def refused() -> bool:
    """Whether the user wants no memory to be shared."""
    return _checked(os.environ.get("KERAUNOS_PEERS", "")) == "0"


def demanded() -> bool:
    """Whether the user wants it also where it has not been tried."""
    return _checked(os.environ.get("KERAUNOS_PEERS", "")) == "1"


@functools.cache
def _checked(value: str) -> str:
    """The value; others than 0 and 1 get a warning, once. An error on one rank would leave the others waiting."""
    if value not in ("", "0", "1"):
        _log.warning("KERAUNOS_PEERS is %r; expected 0 or 1: it counts as not set", value)
    return value


def without_atomics(device: int, others: set[int]) -> str:
    """Why a GPU cannot write, and count, in the memory of others, all by CUDA's numbers; empty if it can."""
    driver, able = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    for other in others - {device}:
        if driver.cuDeviceGetP2PAttribute(ctypes.byref(able), _ATOMIC, device, other) or not able.value:
            return "the GPUs have no atomic operations in each other's memory"
    return ""
