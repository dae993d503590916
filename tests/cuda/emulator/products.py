"""Products of a warpgroup, and their results before and after a wait."""

from __future__ import annotations

import math

import numpy as np
from triton.experimental.gluon import language as gl

from . import errors, machine, shared
from .values import Tensor, convert, static, tensor


class Product:
    """A warpgroup_mma under way."""

    def __init__(self, a, b, acc, use_acc, where):
        self.a, self.b, self.acc, self.use_acc, self.where = a, b, acc, use_acc, where
        self.value = None
        self.reads: list = []

    def __str__(self):
        return f"the product at {self.where}"

    def happen(self) -> None:
        if self.value is None:
            value = _factor(self.a) @ _factor(self.b)
            self.value = value + self.acc.numbers() if self.use_acc else value
            self.acc = None


def _factor(x) -> np.ndarray:
    data = convert(x.data, gl.float32)
    if x.dtype == gl.float32:  # TF32: the last 13 bits do not count.
        data = (data.view(np.uint32) & 0xFFFFE000).view(np.float32)
    return data


class Accumulator:
    """The result of a product that was not waited for; only warpgroup_mma and its wait take it."""

    def __init__(self, product, value: Tensor | None, shape, layout, waited=False):
        self.product, self.value, self.shape, self.layout = product, value, shape, layout
        self.waited = waited
        self.dtype = gl.float32

    def numbers(self) -> np.ndarray:
        return self.product.value if self.value is None else self.value.data

    def refuse(self):
        how = (
            "a warpgroup_mma_wait that leaves it under way" if self.waited else "no warpgroup_mma_wait that returned it"
        )
        raise errors.UnfinishedError(f"the result of {self.product} is used at {machine.here().place()}, after {how}")

    def __getattr__(self, name):
        self.refuse()


def _refuse(self, *_):
    self.refuse()


for _name in "add radd sub rsub mul rmul truediv rtruediv neg lt le gt ge getitem".split():  # noqa: SIM905
    setattr(Accumulator, f"__{_name}__", _refuse)


class _Registers:
    """A tensor as an accumulator."""

    def __init__(self, value):
        self.value = value

    def numbers(self):
        return self.value.data


def warpgroup_mma_init(value):
    value = tensor(value)
    return Accumulator(None, value, value.shape, value.layout)


def _check_product(a, b, acc, warps) -> None:
    def fail(why):
        raise errors.CompileError(f"warpgroup_mma at {machine.here().place()}: {why}")

    layout = acc.layout
    if not isinstance(layout, gl.NVMMADistributedLayout) or list(layout.version) != [3, 0]:
        fail(f"the accumulator's layout must be NVMMADistributedLayout of version [3, 0], not {layout}")
    if math.prod(layout.warps_per_cta) != warps or warps % 4:
        fail(f"{layout} in a partition of {warps} warps")
    if not isinstance(b, shared.View):
        fail(f"b must be in shared memory, not {b!r}")
    if not isinstance(a, shared.View):
        a.shape  # noqa: B018  (raises for a result that was not waited for)
        if not isinstance(a, Tensor):
            fail(f"a must be a tensor or in shared memory, not {a!r}")
        wanted = gl.DotOperandLayout(0, layout, 32 // a.dtype.primitive_bitwidth)
        if a.layout != wanted:
            fail(f"a in registers must be in {wanted}, not {a.layout}")
    (m, k), (k2, n), size = a.shape, b.shape, (layout.instr_shape[0] * layout.warps_per_cta[0], layout.instr_shape[1])
    if k != k2 or tuple(acc.shape) != (m, n):
        fail(f"shapes {a.shape} @ {b.shape} + {tuple(acc.shape)}")
    if a.dtype != b.dtype or acc.dtype != gl.float32:
        fail(f"types {a.dtype} @ {b.dtype} + {acc.dtype}")
    if a.dtype not in (gl.bfloat16, gl.float16, gl.float32):
        raise errors.UnsupportedError(f"the emulator has no products of {a.dtype}")
    bits = a.dtype.primitive_bitwidth
    if layout.instr_shape[0] != 16 or len(layout.instr_shape) != 3 or layout.instr_shape[2] * bits != 256:
        fail(f"instr_shape {layout.instr_shape} for {a.dtype}: [16, N, {256 // bits}]")
    if m % size[0] or n % size[1] or size[1] % 8 or size[1] > 256 or k % layout.instr_shape[2]:
        fail(f"{m} x {n} x {k} is not made of instructions of {size[0]} x {size[1]} x {layout.instr_shape[2]}")
    for name, x in (("a", a), ("b", b)):
        if isinstance(x, shared.View):
            if not isinstance(x.layout, gl.NVMMASharedLayout):
                fail(f"{name}'s layout must be NVMMASharedLayout, not {x.layout}")
            if bits == 32 and x.layout.transposed != (name == "b"):
                fail(f"{name} of float32 must be contiguous along the sum")


def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    here = machine.here()
    me = here.current
    if precision not in (None, "tf32") or max_num_imprecise_acc not in (None, 0):
        raise errors.UnsupportedError(
            f"warpgroup_mma with precision {precision!r}, max_num_imprecise_acc {max_num_imprecise_acc!r}"
        )
    if not isinstance(acc, (Tensor, Accumulator)):
        raise errors.CompileError(f"warpgroup_mma: acc must be a tensor, not {acc!r}")
    _check_product(a, b, acc, me.warps)
    me.clock.tick()
    where = here.place()
    before = acc if isinstance(acc, Accumulator) else _Registers(acc)
    product = Product(a, b, before, bool(tensor(use_acc)), where)
    for x in (a, b):
        if isinstance(x, shared.View):
            access = shared.Access(me, None, True, f"{me}'s product", where)
            shared.reads_later(x, access)
            product.reads.append((x, access))
    me.products.append(product)
    if here.mode == "early":
        for each in me.products:
            each.happen()
    if static(is_async, "is_async"):
        return Accumulator(product, None, tuple(acc.shape), acc.layout)
    _finish(me, 0)
    return Tensor(product.value, gl.float32, acc.layout)


def _finish(me, outstanding: int) -> None:
    me.clock.tick()
    while len(me.products) > outstanding:
        product = me.products.pop(0)
        product.happen()
        for view, access in product.reads:
            shared.read_is_done(view, access, "product")


def mma_v2(a, b, acc, input_precision=None):
    """A product of warps, of what is in their registers: done at once."""
    def fail(why):
        raise errors.CompileError(f"mma_v2 at {machine.here().place()}: {why}")

    a, b, acc = tensor(a), tensor(b), tensor(acc)
    if not isinstance(acc.layout, gl.NVMMADistributedLayout) or list(acc.layout.version) != [2, 0]:
        fail(f"the accumulator's layout must be NVMMADistributedLayout of version [2, 0], not {acc.layout}")
    for i, x in enumerate((a, b)):
        if x.layout != (wanted := gl.DotOperandLayout(i, acc.layout, 32 // x.dtype.primitive_bitwidth)):
            fail(f"operand {i} must be in {wanted}, not {x.layout}")
    if a.dtype != b.dtype or a.dtype not in (gl.bfloat16, gl.float16) or acc.dtype != gl.float32:
        fail(f"types {a.dtype} @ {b.dtype} + {acc.dtype}")
    if a.shape[-1] != b.shape[-2] or acc.shape != (*a.shape[:-1], b.shape[-1]):
        fail(f"shapes {a.shape} @ {b.shape} + {acc.shape}")
    return Tensor(_factor(a) @ _factor(b) + acc.data, gl.float32, acc.layout)


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    if not deps:
        raise errors.CompileError("warpgroup_mma_wait: deps must be given")
    here = machine.here()
    here.pause()
    me = here.current
    _finish(me, static(num_outstanding, "num_outstanding"))
    results = []
    for x in deps:
        if not isinstance(x, Accumulator):
            results.append(x)
        elif x.product is None:
            results.append(x.value)
        elif x.product in me.products:
            results.append(Accumulator(x.product, None, x.shape, x.layout, waited=True))
        else:
            results.append(Tensor(x.product.value, gl.float32, x.layout))
    return results[0] if len(results) == 1 else tuple(results)
