"""Runs Gluon kernels for Hopper on NumPy arrays, without a GPU: for tests only.

    launch(kernel, grid, *arguments, mode="late", seed=0, num_warps=4)

runs an unchanged ``@gluon.jit`` kernel, program after program. Arguments are NumPy arrays (or PyTorch tensors on the
CPU), which become pointers and are written in place; numbers; what `descriptor` makes of an array; and Triton's own
``TensorDescriptor``. Types, layouts and shapes are checked as Gluon's compiler does where that is simple, so that
little passes here that does not compile; the rest is for a build ahead of time (``tests/cuda/compile.py``) to find.
A feature that the emulator lacks raises `UnsupportedError`.

**Partitions** of ``gl.warp_specialize`` are threads of which one runs at a time. With ``seed=0`` each runs until it has
to wait. Every other seed gives another schedule, each time the same, which changes partitions at waits, arrivals,
barriers and copies. A partition is one actor: its 32 or 128 threads are told apart only where it matters, see below.

**Asynchronous operations** (products, copies of the TMA unit) happen

- ``mode="late"``: as late as the waits allow. A copy arrives when no partition can go on without it, a product reads
  its operands in the wait that ends it, a copy out reads shared memory in its ``store_wait``, and what threads copy
  comes in their ``wait_group``;
- ``mode="early"``: at once;
- ``mode="random"``: somewhere between, as the seed says.

**Races** are found from what is ordered by barriers, not from what happened in this schedule: almost any schedule and
mode finds them. `RaceError` names the buffer, the two operations with the partitions and lines that did them, and what
is missing between the two. The rules are the hardware's:

- What another partition did is known after a wait on an mbarrier at which it has arrived since. One thread arrives for
  all: it knows of the others only what they did before the last ``gl.thread_barrier()``.
- A copy into shared memory has happened after a wait for the phase of its mbarrier that counts its bytes.
- A product or a copy out sees what ordinary stores wrote if a ``fence_async_shared()`` and, in the same partition, a
  ``gl.thread_barrier()`` lie between (in either order). A copy into memory that was stored to needs both, too.
  An mbarrier that copies signal needs a fence after its init.
- What threads copy (``async_copy``) is there after a ``wait_group`` for a group that was committed, as if the
  partition had stored it in that wait: a product needs a fence and a thread barrier after it.
- Operands may be overwritten after the ``warpgroup_mma_wait`` or ``store_wait`` that ends the reads, and a thread
  barrier: a partition's warps do not finish together. ``store_wait`` is one, as Gluon's compiler adds it there.
- Ordinary loads and stores of one partition need no barriers: Gluon's compiler adds those.

Gluon's compiler (Triton 3.6) adds thread barriers in more places than these. Kernels should not build on that. It adds
no fence.

`UnfinishedError` is raised for the result of a product that is used before a wait has returned it, and for operations
that nobody has waited for when a partition or the kernel ends. `DeadlockError` is raised when no partition can go on,
with what each waits for and the state of its barrier, and when a barrier completes two phases while a partition waits
for the first. Registers and shared memory that nothing wrote hold NaN (integers: a large number); to read a buffer of
which nothing was written is a race.

Not seen: races on global memory, programs that run at once and wait for each other, too few registers or too little
shared memory (build ahead of time), the order of sums inside a product, approximate functions (NumPy's are used).
"""

from .errors import (
    CompileError,
    DeadlockError,
    EmulatorError,
    OutOfBoundsError,
    RaceError,
    UnfinishedError,
    UnsupportedError,
)
from .launch import descriptor, launch

__all__ = [
    "CompileError",
    "DeadlockError",
    "EmulatorError",
    "OutOfBoundsError",
    "RaceError",
    "UnfinishedError",
    "UnsupportedError",
    "descriptor",
    "launch",
]
