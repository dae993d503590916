"""No offset overflows 32 bits: of calls with longer arrays, programs touch nothing but what belongs to these.

Arrays have addresses, but no memory. Of each launch the first and the last program run, in the interpreter, up to their
first few hundred loads and stores.
"""

from unittest import mock

import numpy as np
import pytest

from tests.linear_attention.cases import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter: test_interpreter.py")

torch = pytest.importorskip("torch")
tl = pytest.importorskip("triton.language")

from triton.runtime import interpreter  # noqa: E402

from tests.triton import compile as calls  # noqa: E402

# Loads and stores of a program; the bits of a distance from the beginning of an array, forth or back.
MOST, BITS = 200, 43
# What is read from arrays by their names, in place of zeros: gates that are strong, sums to divide by, and what makes
# programs go on.
VALUES = {"g": -1.2, "lse": 1, "halved": 1, "seen": 1, "flags": 1, "counts": 9}


class EnoughError(Exception):
    """A program has touched memory often enough."""


class Memory:
    """Of one launch's arrays; it takes the place of the interpreter's."""

    def __init__(self):
        self.arrays = []
        self.left = MOST

    def pointer(self, name, x):
        """The address of an array, as a kernel is given it."""
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        self.arrays.append((name, (last + 1) * x.element_size() if x.numel() else 0, VALUES.get(name, 0)))
        kind = tl.pointer_type(tl.str_to_ty(calls.TYPES[str(x.dtype).removeprefix("torch.")], None))
        address = np.array([(2 * len(self.arrays) + 1) << BITS], np.uint64)
        return tl.tensor(interpreter.TensorHandle(address, kind), kind)

    def touch(self, places, mask):
        """All that is touched belongs to one array, which is returned."""
        self.left -= 1
        if not self.left:
            raise EnoughError
        places = np.broadcast_to(places, np.broadcast(places, mask).shape)[np.broadcast_to(mask, places.shape)]
        if not len(places):
            return 0
        array = int(places.flat[0]) >> BITS + 1
        name, size, value = self.arrays[array - 1]
        first, last = (int(x) - (2 * array + 1 << BITS) for x in (places.min(), places.max()))
        assert 0 <= first <= last < size, f"{name} has {size} bytes; touched from {first} to {last}"
        return value

    def load(self, places, mask, other, dtype):
        value = self.touch(places, mask)
        if dtype == np.uint16:  # bf16, by its bits
            value = np.array(value, np.float32).view(np.uint32) >> 16
        return np.where(mask, np.array(value, dtype), other).astype(dtype)

    def store(self, places, values, mask):
        self.touch(places, mask)


def launch(kernel, grid, inputs, outputs, constants, *, num_warps, num_stages):
    """Run the first and the last program."""
    made = [calls.empty(*o[0], dtype=o[1]) if isinstance(o, tuple) else o and inputs[o] for o in outputs.values()]
    if 0 in grid:
        return tuple(made)
    builder = interpreter.interpreter_builder
    if "OVERLAP" in constants:
        constants = {**constants, "OVERLAP": 0}
    for program in {0, grid[0] - 1}:
        memory = Memory()
        args = dict(zip(kernel.arg_names, [*inputs.values(), *made], strict=False))
        args = {
            name: memory.pointer(name, x) if isinstance(x, torch.Tensor) else interpreter._implicit_cvt(x)
            for name, x in args.items()
        }
        run, scope = kernel.rewrite(), interpreter._patch_lang(kernel.fn)
        builder.set_grid_dim(*grid, 1, 1)
        builder.set_grid_idx(program, 0, 0)
        try:
            with mock.patch.object(interpreter, "_interpreter", memory):
                run(**args, **constants)
        except Exception as error:
            # One in a function that a kernel calls comes as another one.
            if "EnoughError" not in repr(error):
                raise
        finally:
            scope.restore()
    return tuple(made)


def head_major(*shape, dtype):
    """``[B, T, H, D]`` that lies in memory as ``[B, H, T, D]``, or without B."""
    x = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return x if len(shape) < 3 else x.transpose(-3, -2).contiguous().transpose(-3, -2)


LONG = {
    "lightning": (calls.attend, "bfloat16", 128, 128, 64, 64, None, True, 8200, 64, False),
    "scalar gates, shared keys": (calls.attend, "float16", 128, 64, 64, 8, "scalar", True, 8200, 96, False),
    "vector gates": (calls.attend, "bfloat16", 128, 128, 64, 64, "vector", True, 8200, 64, False),
    "vector gates, float32": (calls.attend, "float32", 75, 75, 1024, 512, "vector", False, 1, 65536, False),
    "one long row": (calls.attend, "bfloat16", 128, 128, 16, 16, "vector", True, 1, 1100000, False),
    "odd": (calls.attend, "bfloat16", 75, 75, 600, 600, "vector", False, 1, 65536, False),
    "ends": (calls.leave, "bfloat16", 128, 128, 64, 64, None, True, 2100, 4096),
    "ends, vector gates": (calls.leave, "bfloat16", 75, 75, 64, 64, "vector", True, 6100, 4096),
    "decode": (calls.serve, "decode", "bfloat16", "float32", 75, 75, 64, 64, "vector", 500000, 1, 0, 9000),
    "verify": (calls.serve, "verify", "bfloat16", "float32", 75, 75, 64, 64, "vector", 200000, 8, 0, 9000),
    "prefill": (calls.serve, "prefill", "bfloat16", "float32", 75, 75, 64, 64, "vector", 32, 600000, 100, 9000),
    "attention": (calls.soften, "bfloat16", 128, 128, 64, 8, 0, 0, 4, True, {"causal": True}, 64, 8192, 8192),
    "attention, mask": (
        calls.soften, "float16", 256, 192, 16, 2, 0, 1, 0, False, {"window": (1023, 0)}, 8, 70000, 70000),
    "attention, bias": (
        calls.soften, "float32", 75, 75, 16, 16, 16, 0, 0, False, {"dropout": 0.1}, 8, 70000, 70000),
}


@pytest.mark.parametrize("layout", [None, head_major], ids=["plain", "head-major"])
@pytest.mark.parametrize("call", LONG)
def test_addresses_of_long_arrays(call, layout, monkeypatch):
    if layout:
        monkeypatch.setattr(calls, "empty", layout)
    run, *sizes = LONG[call]
    with calls.launching(launch):
        run(*sizes)


def test_the_longest_sum(monkeypatch):
    """Such as that of the gradients of vector gates which a decay per head shares."""
    from keraunos.kernels.device.sums import summed

    stored = []
    monkeypatch.setattr(Memory, "store", lambda memory, places, values, mask: stored.append(mask.any()))
    n = 2**31 + 64
    with calls.launching(launch):
        summed(calls.empty(n, dtype="float32"), 1, 1, n, (n,), "bfloat16")
    assert stored == [True, True]
