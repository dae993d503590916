"""Names of Gluon that changed from one version of Triton to the next, and which versions are known."""

from __future__ import annotations

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

KNOWN = ("3.6",)
if ".".join(triton.__version__.split(".")[:2]) not in KNOWN:
    raise ImportError(f"is written for Triton {', '.join(KNOWN)}; this is {triton.__version__}", name="triton")

thread_barrier = gl.thread_barrier
copy_in = tma.async_copy_global_to_shared
copy_out = tma.async_copy_shared_to_global
