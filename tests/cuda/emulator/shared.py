"""Shared memory: allocations, views of them, and who has read and written which part.

A *region* is the set of bytes that a view covers. Each region remembers the last write, the reads since, and the
asynchronous operations that still use it; every access is checked against the regions that overlap its own.
"""

from __future__ import annotations

import linecache
import math
import re
import sys

import numpy as np
from triton.experimental.gluon import language as gl

from . import layouts, machine
from .errors import CompileError, OutOfBoundsError, RaceError, UnsupportedError
from .values import Tensor, concrete, made, numpy_type, poison, static


class Access:
    """One read or write: who, when on its clock (None: not yet), and how the report calls it."""

    __slots__ = ("agent", "asynchronous", "time", "what", "where")

    def __init__(self, agent, time, asynchronous, what, where):
        self.agent, self.time, self.asynchronous, self.what, self.where = agent, time, asynchronous, what, where

    def __str__(self):
        return f"{self.what} at {self.where}"


class Region:
    """A set of bytes of an allocation, and what happened to it."""

    def __init__(self, start, steps, allocation):
        marks = np.zeros(allocation.bytes.size, bool)
        np.lib.stride_tricks.as_strided(marks[start:], [n for n, _ in steps], [step for _, step in steps])[...] = True
        self.marks = marks
        self.written = False
        self.form = None  # The width of a value, the shape and the layout under which it was last written.
        self.writes: list[Access] = []
        self.reads: dict = {}
        self.pending: list[Access] = []  # Asynchronous reads that were not waited for.
        self.overlapping, self.inside = [self], [self]
        for other in allocation.regions.values():
            if (marks & other.marks).any():
                self.overlapping.append(other)
                other.overlapping.append(self)
                if not (other.marks & ~marks).any():
                    self.inside.append(other)
                if not (marks & ~other.marks).any():
                    other.inside.append(self)


class Allocation:
    """The memory of one allocate_shared_memory."""

    def __init__(self, name, nbytes):
        self.name = name
        self.bytes = np.empty(nbytes, np.uint8)
        self.address = self.bytes.__array_interface__["data"][0]
        self.regions: dict = {}
        self.barriers: dict = {}  # By their address.


class View:
    """A shared memory descriptor."""

    def __init__(self, allocation, name, data, dtype, layout, form):
        self.allocation, self.name, self.data, self.dtype, self.layout = allocation, name, data, dtype, layout
        self.form, self.sliced = form, False
        self.views: dict = {}
        self._region = None

    def __repr__(self):
        return self.name

    @property
    def shape(self):
        return self.data.shape

    @property
    def rank(self):
        return self.data.ndim

    @property
    def numel(self):
        return self.data.size

    @property
    def type(self):
        return gl.shared_memory_descriptor_type(self.dtype, list(self.shape), self.layout, list(self.shape))

    @property
    def region(self) -> Region:
        if self._region is None:
            start = self.data.__array_interface__["data"][0] - self.allocation.address
            steps = sorted(zip(self.data.strides, self.shape, strict=True), reverse=True)
            steps = (*((n, step) for step, n in steps if n > 1), (self.data.itemsize, 1))
            key = start, steps
            if key not in self.allocation.regions:
                self.allocation.regions[key] = Region(start, steps, self.allocation)
            self._region = self.allocation.regions[key]
        return self._region

    def _view(self, key, make):
        if key not in self.views:
            self.views[key] = make()
        return self.views[key]

    def _of(self, name, data, layout):
        return View(self.allocation, self.name + name, data, self.dtype, layout, self.form)

    def index(self, index):
        i = concrete(index, "index")
        if not 0 <= i < self.shape[0]:
            raise OutOfBoundsError(f"{self}.index({i}): there are {self.shape[0]}, at {machine.here().place()}")
        return self._view(i, lambda: self._of(f"[{i}]", self.data[i], self.layout))

    def slice(self, start, length, dim=0):
        start, length, dim = (static(x, "slice's arguments") for x in (start, length, dim))
        if start < 0 or length < 1 or start + length > self.shape[dim]:
            raise OutOfBoundsError(f"{self}.slice({start}, {length}, {dim}): the shape is {self.shape}")
        if length & (length - 1):
            raise CompileError(f"{self}.slice({start}, {length}, {dim}): the length must be a power of two")
        width = getattr(self.layout, "swizzle_byte_width", 0)
        if width and self.rank == 2:
            inner = dim == (0 if self.layout.transposed else 1)
            tile = width * 8 // self.dtype.primitive_bitwidth if inner else 8
            if start % tile or length % tile:
                raise CompileError(f"{self}.slice({start}, {length}, {dim}) cuts the layout's tiles of {tile}")
        key = tuple(slice(start, start + length) if i == dim else slice(None) for i in range(self.rank))

        def make():
            view = self._of(f".slice({start}, {length}, {dim})", self.data[key], self.layout)
            view.sliced = True
            return view

        return self._view(("slice", start, length, dim), make)

    def permute(self, order):
        order = tuple(static(i, "permute's order") for i in order)
        if sorted(order) != list(range(self.rank)):
            raise CompileError(f"{self}.permute({order}): the shape is {self.shape}")

        def make():
            layout = layouts.after_shared("permute", self.layout, self.dtype, self.shape, order)
            return self._of(f".permute({order})", self.data.transpose(order), layout)

        return self._view(("permute", order), make)

    def reshape(self, shape):
        shape = tuple(static(n, "reshape's shape") for n in shape)

        def make():
            if math.prod(shape) != self.numel or self.sliced or not self.data.flags.c_contiguous:
                raise CompileError(
                    f"{self}.reshape({shape}): the shape is {self.shape}, or it is a slice or transposed"
                )
            layout = layouts.after_shared("reshape", self.layout, self.dtype, self.shape, shape)
            return self._of(f".reshape({shape})", self.data.reshape(shape), layout)

        return self._view(("reshape", shape), make)

    def reinterpret(self, dtype, shape, layout):
        shape = tuple(static(n, "the shape") for n in shape)
        if not self.data.flags.c_contiguous:
            raise UnsupportedError(f"the emulator reinterprets whole buffers only, not {self}")
        layouts.check_shared(layout)
        size = math.prod(shape) * numpy_type(dtype).itemsize
        if size > self.data.nbytes:
            raise OutOfBoundsError(f"{self} reinterpreted as {shape} of {dtype}: {size} of {self.data.nbytes} bytes")

        def make():
            data = self.data.reshape(-1).view(np.uint8)[:size].view(numpy_type(dtype)).reshape(shape)
            return View(self.allocation, self.name, data, dtype, layout, _form(data, shape, layout))

        return self._view(("reinterpret", str(dtype), shape, layout), make)

    def load(self, layout):
        reads(self)
        return made(self.data.copy(), self.dtype, layout)

    def store(self, value):
        if not isinstance(value, Tensor):
            if hasattr(value, "refuse"):
                value.refuse()
            raise CompileError(f"{self}.store takes a tensor, not {value!r}")
        if value.shape != self.shape or value.dtype != self.dtype or value.memory is not None:
            raise CompileError(
                f"{self}.store: {value.dtype} of {value.shape} into {self.dtype} of {self.shape}: they must be the same"
            )
        here = machine.here()
        writes(self, Access(here.current, here.current.clock.tick(), False, f"{here.current} stores", here.place()))
        self.data[...] = value.data

    def _keep_alive(self):
        """Has no effect here."""


def _form(data, shape, layout):
    """The place of each element, as a key: rows of rows without swizzling lie alike in any shape."""
    plain = isinstance(layout, gl.SwizzledSharedLayout) and layout.max_phase == 1
    if plain and list(layout.order) == sorted(layout.order, reverse=True):
        return data.itemsize, "rows"
    return data.itemsize, shape, layout


def allocate(dtype, shape, layout, value=None) -> View:
    """gl.allocate_shared_memory."""
    shape = tuple(static(n, "the shape") for n in shape)
    layouts.check_shared(layout)
    here = machine.here()
    name = _assigned(here) or f"buffer {len(here.allocations)}"
    allocation = Allocation(name, math.prod(shape) * numpy_type(dtype).itemsize)
    here.allocations.append(allocation)
    data = allocation.bytes.view(numpy_type(dtype)).reshape(shape)
    data[...] = poison(dtype)
    view = View(allocation, name, data, dtype, layout, _form(data, shape, layout))
    if value is not None:
        view.store(value)
    return view


def _assigned(here) -> str:
    """The name of the variable that the kernel's running line assigns to, after those of the lines that call it."""
    names: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in here.codes:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            names[:0] = re.findall(r"^\s*(\w+)(?:: [\w.]+)? = ", line)
        frame = frame.f_back
    return ".".join(names)


# Accesses by the running partition


def reads(view: View) -> None:
    """An ordinary read, by all threads."""
    here = machine.here()
    me = here.current
    access = Access(me, me.clock.tick(), False, f"{me} loads", here.place())
    _check_writes(view, access)
    _check_contents(view, access)
    view.region.reads[me, "load"] = access


def reads_later(view: View, access: Access) -> None:
    """A read by an asynchronous operation begins: nothing may write before it was waited for."""
    _check_writes(view, access)
    _check_contents(view, access)
    view.region.pending.append(access)


def read_is_done(view: View, access: Access, kind: str) -> None:
    """The running partition has waited for a read."""
    view.region.pending.remove(access)
    access.time = machine.here().current.clock.now
    view.region.reads[access.agent, kind] = access


def writes(view: View, access: Access) -> None:
    """A write begins, an ordinary one or a copy."""
    _check_writes(view, access)
    me = machine.here().current
    for region in view.region.overlapping:
        for read in region.pending:
            _race(view, access, read, "which was not waited for, and may still read")
        for read in region.reads.values():
            if read.agent is me and not (read.asynchronous or access.asynchronous):
                continue  # Gluon's compiler puts barriers between ordinary accesses of one partition.
            if me.clock.known.get(read.agent, 0) < read.time:
                _race(view, access, read, _unordered(me, read))
    for region in view.region.inside:
        region.writes, region.reads = [], {}
    for region in view.region.overlapping:
        region.form = None
    view.region.writes, view.region.written, view.region.form = [access], True, view.form


def _check_writes(view: View, access: Access) -> None:
    me = machine.here().current
    for region in view.region.overlapping:
        for write in region.writes:
            if write.asynchronous:  # A copy's agent is the barrier that it signals, its time that barrier's phase.
                if write.time is None or me.clock.known.get(write.agent, 0) < write.time:
                    late = (
                        "has not arrived"
                        if write.time is None
                        else f"belongs to phase {write.time - 1} of {write.agent}"
                    )
                    seen = me.clock.known.get(write.agent, 0)
                    seen = f"has waited for its phase {seen - 1}" if seen else "has waited for none of its phases"
                    _race(view, access, write, f"but the copy {late}, and {me} {seen}")
            elif access.asynchronous:
                if me.clock.fenced.get(write.agent, 0) < write.time:
                    _race(view, access, write, _unordered(me, write, fence=True))
            elif (write.agent is not me or write.time == math.inf) and me.clock.known.get(write.agent, 0) < write.time:
                _race(view, access, write, _unordered(me, write))


def _check_contents(view: View, access: Access) -> None:
    if not any(region.written for region in view.region.overlapping):
        raise RaceError(f"{view}: {access}, but nothing was written there yet: is a wait missing, or of another phase?")
    for region in view.region.overlapping:
        if region.form not in (None, view.form):
            raise UnsupportedError(
                f"{view} is read as {view.form}, but was last written as {region.form}: "
                "the emulator does not know where the layouts put each element"
            )


def _unordered(me, other: Access, fence=False) -> str:
    """Why an operation of this partition does not know of another."""
    if other.time == math.inf:
        return f"and no async_copy.wait_group in {other.agent} has waited for that"
    known = me.clock.known.get(other.agent, 0) >= other.time
    if other.agent is me:
        missing = [] if known else ["gl.thread_barrier()"]
        if fence and me.clock.own_fence < other.time and me.clock.fenced.get(me, 0) < other.time:
            missing.insert(0, "fence_async_shared()")
        return f"with no {' and no '.join(missing or ['fence_async_shared() before gl.thread_barrier()'])} between"
    if known:
        return f"with no fence_async_shared() between (before {other.agent} arrives, or after {me} has waited)"
    return (
        "and no barrier orders the two: a wait or an arrive is missing, is of another phase, "
        f"or {other.agent} arrives before it has done this (or with no gl.thread_barrier() after it)"
    )


def _race(view: View, access: Access, other: Access, why: str):
    raise RaceError(f"{view}: {access}, after {other}, {why}")
