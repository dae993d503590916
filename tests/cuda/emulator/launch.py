"""Launches: what a kernel is given, and its programs."""

from __future__ import annotations

from . import machine, translate
from .memory import Descriptor, Memory, as_array


def descriptor(array, block_shape, layout, *, shape=None, strides=None, padding="zero") -> Descriptor:
    """A tensor descriptor of an array, as ``TensorDescriptor.from_tensor`` makes it on the host."""
    array = as_array(array)
    steps = [step // array.itemsize for step in array.strides] if strides is None else list(strides)
    sizes = list(array.shape if shape is None else shape)
    return Descriptor(Memory("the descriptor's array", array), 0, sizes, steps, list(block_shape), layout, padding)


def launch(kernel, grid, *args, mode="late", seed=0, num_warps=4, **kwargs) -> None:
    """Run a kernel; see the package's docstring."""
    function = translate.function(kernel)
    given = function.bind(args, kwargs)
    arguments = [translate.argument(p, given[p.name]) for p in kernel.params]
    machine.programs(function.__name__, function, arguments, num_warps, tuple(grid), mode, seed)
