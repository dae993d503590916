"""Which versions of Triton are known, and the names of Gluon that changed from one to the next."""

from __future__ import annotations

import triton

if ".".join(triton.__version__.split(".")[:2]) not in (KNOWN := ("3.6", "3.7", "3.8", "3.9")):
    raise ImportError(f"knows Triton {', '.join(KNOWN)}; this is {triton.__version__}", name="triton")

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# The versions that a GPU has run.
RUN = ("3.6",)

# The newer name first: the older one may be left, and fail.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
