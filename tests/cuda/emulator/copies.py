"""Copies by the TMA unit: blocks of an array into shared memory, and out of it; and copies by each thread."""

from __future__ import annotations

import math

import numpy as np

from . import barriers, errors, machine, memory, shared
from .memory import Descriptor
from .values import concrete, static


class Copy:
    """A block on its way from an array to shared memory."""

    def __init__(self, descriptor, coordinates, target, access):
        self.descriptor, self.coordinates, self.target, self.access = descriptor, coordinates, target, access
        self.nbytes = descriptor.block_type.nbytes

    def __str__(self):
        return str(self.access)

    def happen(self) -> None:
        self.target.data[...] = self.descriptor.fetch(self.coordinates)


class ThreadsCopy:
    """Elements that a partition's threads copy to shared memory, in a group that none of them has waited for."""

    def __init__(self, group, data, target, access):
        self.group, self.data, self.target, self.access = group, data, target, access

    def __str__(self):
        return f"{self.target}: {self.access}"

    def happen(self) -> None:
        self.target.data[...] = self.data


class Store:
    """A block on its way from shared memory to an array."""

    def __init__(self, descriptor, coordinates, source, access, adds=False):
        self.descriptor, self.coordinates, self.source, self.access = descriptor, coordinates, source, access
        self.adds, self.happened = adds, False

    def __str__(self):
        return f"{self.source}: {self.access}"

    def happen(self) -> None:
        if not self.happened:
            self.happened = True
            block = self.source.data.copy()
            if self.adds:
                block += self.descriptor.fetch(self.coordinates)
            self.descriptor.put(self.coordinates, block)


def _block(descriptor, coordinates, view):
    if not isinstance(descriptor, Descriptor):
        raise errors.CompileError(f"a tensor descriptor is needed, not {descriptor!r}")
    if not isinstance(view, shared.View) or view.shape != tuple(descriptor.block_shape):
        raise errors.CompileError(f"a block of {descriptor.block_shape} and {view!r} of {getattr(view, 'shape', None)}")
    if view.dtype != descriptor.dtype or view.layout != descriptor.layout:
        raise errors.CompileError(
            f"a descriptor of {descriptor.dtype} in {descriptor.layout} and {view!r} of {view.dtype} in {view.layout}"
        )
    if len(coordinates) != len(descriptor.block_shape):
        raise errors.CompileError(f"{len(coordinates)} coordinates for blocks of {descriptor.block_shape}")
    return [concrete(x, "a coordinate") for x in coordinates]


def copy_in(descriptor, coord, barrier, result, pred=True):
    coordinates = _block(descriptor, coord, result)
    if not barriers.holds(pred):
        return
    here, barrier = machine.here(), barriers.of(barrier, copies=True)
    here.current.clock.tick()
    access = shared.Access(barrier, None, True, f"{here.current} copies in", here.place())
    shared.writes(result, access)
    copy = Copy(descriptor, coordinates, result, access)
    barrier.copies.append(copy)
    if here.mode == "early":
        barrier.deliver(copy)
    else:
        result.data[...] = np.nan if result.dtype.is_floating() else 0
    here.pause()


def add_out(descriptor, coord, src):
    copy_out(descriptor, coord, src, adds=True)


def copy_out(descriptor, coord, src, adds=False):
    coordinates = _block(descriptor, coord, src)
    here = machine.here()
    here.current.clock.tick()
    access = shared.Access(here.current, None, True, f"{here.current} copies out", here.place())
    shared.reads_later(src, access)
    store = Store(descriptor, coordinates, src, access, adds)
    here.current.stores.append(store)
    if here.mode == "early":
        store.happen()
    here.pause()


def store_wait(pendings):
    pendings = static(pendings, "pendings")
    here = machine.here()
    here.pause()
    me = here.current
    me.clock.tick()
    while len(me.stores) > pendings:
        store = me.stores.pop(0)
        store.happen()
        shared.read_is_done(store.source, store.access, "copy")
    me.clock.barrier()  # Gluon's compiler puts one after this wait.


# By threads


def copy_of_threads(smem, pointer, mask=None, cache_modifier="", eviction_policy="", volatile=False):
    here = machine.here()
    me = here.current
    value = memory.load(pointer, mask, None if mask is None else 0)
    if not isinstance(smem, shared.View) or (smem.shape, smem.dtype) != (value.shape, value.dtype):
        raise errors.CompileError(f"a copy of {value.dtype} of {value.shape} to {smem!r}")
    me.clock.tick()
    access = shared.Access(me, math.inf, False, f"{me} copies in", here.place())
    shared.writes(smem, access)
    copy = ThreadsCopy(me.groups, value.data, smem, access)
    me.copies.append(copy)
    smem.data[...] = np.nan if smem.dtype.is_floating() else 0
    if here.mode == "early":
        copy.happen()
    here.pause()


def commit_group():
    machine.here().current.groups += 1


def wait_group(num_outstanding=0):
    """Wait for all but so many groups: their copies are then like stores of the partition here."""
    left = static(num_outstanding, "num_outstanding")
    here = machine.here()
    here.pause()
    me = here.current
    time = me.clock.tick()
    while me.copies and me.copies[0].group < me.groups - left:
        copy = me.copies.pop(0)
        copy.happen()
        copy.access.time = time
