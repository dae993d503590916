"""Global memory: the arrays given to a kernel, pointers into them, and tensor descriptors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from triton.experimental.gluon import language as gl

from . import layouts, machine
from .errors import CompileError, OutOfBoundsError
from .values import TRITON, Tensor, concrete, convert, made, poison, scalar, static, tensor


def as_array(x) -> np.ndarray:
    """A NumPy array, or a PyTorch tensor on the CPU as a NumPy array of the same memory."""
    if isinstance(x, np.ndarray):
        return x
    if str(x.dtype) == "torch.bfloat16":
        import torch

        return x.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.detach().numpy()


class Memory:
    """An array's memory from its first element to its last; what lies between rows of a slice is out of bounds."""

    def __init__(self, name: str, array: np.ndarray):
        if array.dtype not in TRITON or any(step < 0 or step % array.itemsize for step in array.strides):
            raise TypeError(f"launch: {name} of {array.dtype} with strides {array.strides} cannot be given to a kernel")
        self.name, self.dtype = name, TRITON[array.dtype]
        steps = [step // array.itemsize for step in array.strides]
        self.size = 1 + sum((n - 1) * step for n, step in zip(array.shape, steps, strict=True)) if array.size else 0
        self.flat = np.lib.stride_tricks.as_strided(array, (self.size,), (array.itemsize,))
        self.inside = None
        if array.size and not (array.flags.c_contiguous or self.size == array.size):
            self.inside = np.zeros(self.size, bool)
            ones = np.lib.stride_tricks.as_strided(self.inside, array.shape, steps)
            ones[...] = True

    def pointer(self) -> Tensor:
        return Tensor(np.asarray(0, np.int64), gl.pointer_type(self.dtype), None, self)

    def check(self, offsets, mask) -> None:
        bad = (offsets < 0) | (offsets >= self.size)
        if self.inside is not None:
            bad |= ~self.inside[np.where(bad, 0, offsets)]
        if mask is not None:
            bad = bad & mask
        if bad.any():
            first = int(np.broadcast_to(offsets, bad.shape)[bad].ravel()[0])
            raise OutOfBoundsError(
                f"{self.name}: element {first} of {self.size} is not of the array, at {machine.here().place()}"
            )


def _addresses(pointer, mask):
    if not isinstance(pointer, Tensor) or pointer.memory is None:
        raise CompileError(f"a pointer is needed, not {pointer!r}")
    mask = None if mask is None else tensor(mask)
    if mask is not None:
        if mask.dtype != gl.int1:
            raise CompileError(f"a mask must be int1, not {mask.dtype}")
        if mask.data.ndim and pointer.data.ndim:
            layouts.same(pointer.layout, mask.layout)
    offsets = pointer.data
    if mask is not None and mask.shape != offsets.shape:
        if mask.data.ndim > offsets.ndim:
            raise CompileError(f"a mask of shape {mask.shape} for pointers of shape {offsets.shape}")
        mask = Tensor(np.broadcast_to(mask.data, offsets.shape), gl.int1, pointer.layout)
    pointer.memory.check(offsets, None if mask is None else mask.data)
    return pointer.memory, offsets, None if mask is None else mask.data


def load(pointer, mask=None, other=None, boundary_check=(), padding_option="", cache_modifier="",
         eviction_policy="", volatile=False):
    memory, offsets, mask = _addresses(pointer, mask)
    if other is not None and mask is None:
        raise CompileError("load: other needs a mask")
    if mask is None:
        return made(np.asarray(memory.flat[offsets]), memory.dtype, pointer.layout)
    if other is None:
        rest = np.asarray(poison(memory.dtype), memory.flat.dtype)
    else:
        rest = convert(tensor(other).data, memory.dtype)
    if memory.size == 0:
        return made(np.broadcast_to(rest, offsets.shape), memory.dtype, pointer.layout)
    found = memory.flat[np.where(mask, offsets, 0)]
    return made(np.asarray(np.where(mask, found, rest)), memory.dtype, pointer.layout)


def store(pointer, value, mask=None, boundary_check=(), cache_modifier="", eviction_policy=""):
    memory, offsets, mask = _addresses(pointer, mask)
    value = tensor(value)
    if value.data.ndim and pointer.data.ndim:
        layouts.same(pointer.layout, value.layout)
    if value.data.ndim > offsets.ndim:
        raise CompileError(f"store: a value of shape {value.shape} to pointers of shape {offsets.shape}")
    data = np.broadcast_to(convert(value.data, memory.dtype), offsets.shape)
    if mask is None:
        memory.flat[offsets] = data
    else:
        memory.flat[offsets[mask]] = data[mask]


def atomic(name: str):
    """gl.atomic_add and the like: what was there before."""
    combine = {"add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
               "xor": np.bitwise_xor, "xchg": lambda old, new: new}[name]

    def act(pointer, val, mask=None, sem=None, scope=None):
        memory, offsets, mask = _addresses(pointer, mask)
        values = np.broadcast_to(convert(tensor(val).data, memory.dtype), offsets.shape)
        old = np.full(offsets.shape, poison(memory.dtype), memory.flat.dtype)
        for at in np.ndindex(offsets.shape):
            if mask is None or mask[at]:
                old[at] = memory.flat[offsets[at]]
                memory.flat[offsets[at]] = combine(old[at], values[at])
        return Tensor(old, memory.dtype, pointer.layout)

    return act


def atomic_cas(pointer, cmp, val, sem=None, scope=None):
    memory, offsets, _ = _addresses(pointer, None)
    if offsets.ndim:
        return _several_cas(memory, pointer, cmp, val)
    old = memory.flat[offsets]
    if old == convert(tensor(cmp).data, memory.dtype):
        memory.flat[offsets] = convert(tensor(val).data, memory.dtype)
    return Tensor(np.asarray(old), memory.dtype)


def _several_cas(memory, pointer, cmp, val):
    expected, new = (np.broadcast_to(convert(tensor(x).data, memory.dtype), pointer.shape) for x in (cmp, val))
    old = np.empty(pointer.shape, memory.flat.dtype)
    for at in np.ndindex(pointer.shape):
        old[at] = memory.flat[pointer.data[at]]
        if old[at] == expected[at]:
            memory.flat[pointer.data[at]] = new[at]
    return Tensor(old, memory.dtype, pointer.layout)


class Descriptor:
    """A tensor descriptor: blocks of an array that the TMA unit copies; what lies outside is 0, or is not written."""

    def __init__(self, memory: Memory, start: int, shape, strides, block_shape, layout, padding="zero"):
        self.memory, self.layout, self.padding = memory, layout, padding
        self.dtype = memory.dtype
        self.block_type = gl.block_type(self.dtype, list(block_shape))
        self.sizes, size = tuple(shape), self.dtype.primitive_bitwidth // 8
        what = f"a descriptor of {memory.name}"
        if not isinstance(layout, gl.NVMMASharedLayout):
            raise CompileError(f"{what}: its layout must be NVMMASharedLayout, not {layout!r}")
        if layout.element_bitwidth != size * 8 or layout.rank != len(block_shape):
            raise CompileError(f"{what}: {layout} does not fit blocks of {block_shape} of {self.dtype}")
        if not 1 <= len(shape) == len(strides) == len(block_shape) <= 5:
            raise CompileError(f"{what}: shape {shape}, strides {strides}, blocks {block_shape} differ in length")
        if strides[-1] != 1 or any(step * size % 16 for step in strides[:-1]) or start * size % 16:
            raise CompileError(f"{what}: start {start} and strides {strides} must be of 16 bytes, the last stride 1")
        if block_shape[-1] * size < 16 or any(n > 256 for n in block_shape[:-1]):
            raise CompileError(f"{what}: blocks of {block_shape}: 16 bytes and more a row, at most 256 rows")
        if any(n < 1 for n in shape):
            raise OutOfBoundsError(f"{what}: shape {shape}: every size must be 1 or more")
        last = start + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if start < 0 or last >= memory.size:
            raise OutOfBoundsError(f"{what}: it reaches element {last} of {memory.size}")
        view = (self.sizes, [step * size for step in strides])
        self.array = np.lib.stride_tricks.as_strided(memory.flat[start:], *view)
        if (
            memory.inside is not None
            and not np.lib.stride_tricks.as_strided(memory.inside[start:], self.sizes, strides).all()
        ):
            raise OutOfBoundsError(f"{what}: it covers elements that are not of the array")
        self.shape = tuple(scalar(n, gl.int32) for n in shape)
        self.strides = tuple(scalar(n, gl.int64) for n in strides)

    @property
    def block_shape(self):
        return self.block_type.shape

    def _parts(self, coordinates):
        """Where a block lies: the part inside, of the array and of the block."""
        whole, part = [], []
        for at, n, size in zip(coordinates, self.block_shape, self.sizes, strict=True):
            first, last = min(max(at, 0), size), min(max(at + n, 0), size)
            whole.append(slice(first, last))
            part.append(slice(first - at, last - at) if last > first else slice(0, 0))
        return tuple(whole), tuple(part)

    def fetch(self, coordinates) -> np.ndarray:
        whole, part = self._parts(coordinates)
        block = np.full(self.block_shape, np.nan if self.padding == "nan" else 0, self.array.dtype)
        block[part] = self.array[whole]
        return block

    def put(self, coordinates, block) -> None:
        whole, part = self._parts(coordinates)
        self.array[whole] = block[part]


def make_descriptor(base, shape, strides, block_shape, layout, padding_option="zero") -> Descriptor:
    """tma.make_tensor_descriptor."""
    if not isinstance(base, Tensor) or base.memory is None or base.data.ndim:
        raise CompileError(f"make_tensor_descriptor: base must be a pointer, not {base!r}")
    if isinstance(strides[-1], Tensor):
        raise CompileError("make_tensor_descriptor: the last stride must be 1 at compile time")
    shape = [concrete(n, "a descriptor's shape") for n in shape]
    strides = [concrete(n, "a descriptor's stride") for n in strides]
    block_shape = [static(n, "block_shape") for n in block_shape]
    return Descriptor(base.memory, int(base.data), shape, strides, block_shape, layout, padding_option)
