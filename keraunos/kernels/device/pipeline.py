"""A ring of stages in shared memory, which some partitions of a Gluon kernel fill and others read."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from keraunos.kernels.gluon import aggregate


@aggregate
class Pipeline:
    """Barriers for each stage: of each of its parts, full when producers have filled it; empty when all were read.

    Step i takes stage ``i % STAGES``. Each step a producer calls ``acquire``, then ``commit``, or ``expect`` and copies
    that signal ``full``; a consumer ``wait``, then ``release``. One thread arrives for all of a partition:
    ``thread_barrier()`` comes before ``commit`` and ``release``.
    """

    barriers: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    PARTS: gl.constexpr

    @gluon.jit
    def full(self, i, part: gl.constexpr = 0):
        """The barrier at which the producers of a part arrive."""
        return self.barriers.index(part * self.STAGES + i % self.STAGES)

    @gluon.jit
    def empty(self, i):
        """The barrier at which consumers arrive."""
        return self.barriers.index(self.PARTS * self.STAGES + i % self.STAGES)

    @gluon.jit
    def acquire(self, i):
        """Waits until the stage was read in the step that had it before; at first it is empty."""
        mbarrier.wait(self.empty(i), ((i // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def expect(self, i, nbytes: gl.constexpr, part: gl.constexpr = 0):
        """Arrives as one producer, whose part is there when copies have brought so many bytes."""
        mbarrier.expect(self.full(i, part), nbytes)

    @gluon.jit
    def commit(self, i, part: gl.constexpr = 0):
        """Arrives as one producer, whose part is there."""
        mbarrier.arrive(self.full(i, part), count=1)

    @gluon.jit
    def wait(self, i, part: gl.constexpr = 0):
        """Waits until a part is full."""
        mbarrier.wait(self.full(i, part), (i // self.STAGES) & 1)

    @gluon.jit
    def release(self, i):
        """Arrives as one consumer, which reads the stage no more."""
        mbarrier.arrive(self.empty(i), count=1)


@gluon.jit
def pipeline(STAGES: gl.constexpr, producers, CONSUMERS: gl.constexpr):
    """A pipeline, before whose use by copies a ``fence_async_shared()`` must come.

    producers: how many arrivals fill each part of a stage; CONSUMERS: how many empty the stage.
    """
    PARTS: gl.constexpr = len(producers)
    # One piece of memory: each that other partitions get takes shared memory of its own.
    barriers = gl.allocate_shared_memory(gl.int64, [(PARTS + 1) * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        for part in gl.static_range(PARTS):
            mbarrier.init(barriers.index(part * STAGES + stage), count=producers[part])
        mbarrier.init(barriers.index(PARTS * STAGES + stage), count=CONSUMERS)
    return Pipeline(barriers, STAGES, PARTS)
