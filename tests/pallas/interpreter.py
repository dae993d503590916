"""Run the Pallas kernels on the CPU, in the interpreter of JAX.

The interpreter knows threads, barriers, bulk copies and shared memory, but no product whose left operand or whose
accumulator is a value in registers. Here all products are ordinary ones, done at once: what is tested is everything
around them.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas import (
    decays,
    gates_chunk,
    gates_gradients,
    gates_program,
    gates_scan,
    gates_starts,
    gates_strong,
    products,
    program,
    starts,
    tiles,
    vectors,
)
from keraunos.kernels.linear_attention.pallas import gates as pallas_gates
from keraunos.kernels.linear_attention.pallas import kernels as pallas_kernels


class _Accumulator:
    """An accumulator's value; reading it waits for nothing, since nothing is pending."""

    def __init__(self, value):
        self.value = value

    @classmethod
    def zeros(cls, shape, dtype):
        return cls(jnp.zeros(shape, dtype))

    # The name that the kernels use.
    init = classmethod(lambda cls, value: cls(value))

    def __getitem__(self, index):
        return self.value


def _wgmma(acc, a, b):
    left, right = (x if isinstance(x, jnp.ndarray) else x[...] for x in (a, b))
    acc.value = acc.value + jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32))


def _run_scoped(fn, *accumulators):
    return fn(*accumulators)


def _run_state(fn):
    def run(state):
        fn(state)
        return tuple(x.value for x in state) if isinstance(state, tuple) else state.value

    return run


def _accumulator_load(acc, *, wait_n):
    return acc.value


def _whole(x):
    return x.ref if isinstance(x, tiles.Tile) else x


def _store_rows(ref, value, first, end):
    @pl.loop(first, end)
    def _(i):
        ref[pl.ds(i, 1)] = lax.dynamic_slice_in_dim(value, i, 1)


def _zero_rows(tile, first, end):
    row = lax.broadcasted_iota(jnp.int32, tile.shape, 0)
    tile[...] = jnp.where((row >= first) & (row < end), tile[...], 0)


def _copy_rows_out(ref, tile, first, end):
    _store_rows(ref, tile[...], first, end)


def _start(*operands, onto=None):
    def value(x):
        if isinstance(x, products.T):
            return value(x.tile).T
        return (x if isinstance(x, jnp.ndarray) else _load(x)).astype(jnp.float32)

    a, b = operands[::2], operands[1::2]
    found = sum(jnp.dot(value(x), value(y)) for x, y in zip(a, b, strict=True))
    return found if onto is None else onto + found


def _await(pending=0):
    pass


def _load(ref):
    return _whole(ref)[...]


def _load_halves(later, earlier, m, backward_in_time):
    row = lax.broadcasted_iota(jnp.int32, later.shape, 0)
    place = later.shape[0] - 1 - row if backward_in_time else row
    return jnp.where((place & m) != 0, _load(later), _load(earlier))


def _store(ref, x, unrolled=False):
    _whole(ref)[...] = x


def _copy_rows(ref, value, rows):
    for i, row in enumerate(rows):
        _whole(ref)[i] = value[row]


def _upto(x, dtype, backward_in_time, apart=None):
    row, col = (lax.broadcasted_iota(jnp.int32, x.shape, i) for i in range(2))
    before = col - row if backward_in_time else row - col
    return jnp.where(before >= (0 if apart is None else apart), x, 0).astype(dtype)


def _commit_fine(x, y):
    plgpu.commit_smem()
    # A quarter of a row: what one thread has of it.
    most = jnp.abs(jnp.stack([x, y])).reshape(2, 64, 8, 4, 2).max((2, 4)).astype(jnp.float32)
    return ((most == 0) | ((most >= 2.0**-16) & (most < 2.0**16))).all().astype(jnp.int32)


class _With:
    """A module with some names replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


class _ACC:
    """Stands for ``plgpu.ACC``: called, an accumulator of zeros."""

    def __new__(cls, shape, dtype):
        return _Accumulator.zeros(shape, dtype)

    init = staticmethod(_Accumulator)


@contextlib.contextmanager
def interpreted():
    """Within it, the kernels run on the CPU."""
    names = dict(
        plgpu=_With(plgpu, wgmma=_wgmma, wgmma_accumulator_load=_accumulator_load, ACC=_ACC),
        pl=_With(pl, run_scoped=_run_scoped, run_state=_run_state),
        _descriptors_in_words=lambda: None,
        store_rows=_store_rows,
        _zero_rows=_zero_rows,
        copy_rows_out=_copy_rows_out,
        copy_rows=_copy_rows,
        meet=plgpu.commit_smem,
        start_product=_start,
        wait_for=_await,
        load_tile=_load,
        load_halves=_load_halves,
        load_bf16=lambda ref, unrolled=False: _load(ref).astype(jnp.float32),
        load_per_row=_load,
        load_per_column=_load,
        store_tile=_store,
        store_per_row=_store,
        leave_in=_store,
        taken=_load,
        put=_store,
        read_from=_load,
        widened=lambda x: x.astype(jnp.float32),
        exp2_of_minus=lambda x: jnp.exp2(-x),
        flat=lambda x: x,
        unflat=lambda x: x,
        here=lambda x: x,
        flat_rows=lambda x: jnp.broadcast_to(x[:, None], (64, 64)),
        flat_columns=lambda x: jnp.broadcast_to(x, (64, 64)),
        flat_zeros=lambda: jnp.zeros((64, 64)),
        flat_exp2=lambda x, sign="": jnp.exp2(-x if sign else x),
        flat_sum=lambda x: jnp.sum(x, 1),
        upto_of=_upto,
        commit_fine=_commit_fine,
    )
    with contextlib.ExitStack() as stack:
        gates = pallas_gates, gates_program, gates_scan, gates_starts, gates_strong
        walk = gates_gradients, gates_chunk
        shared = program, products, tiles, vectors
        for module in (*shared, decays, pallas_kernels, starts, *gates, *walk):
            known = {name: x for name, x in names.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **known))
        stack.enter_context(plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()))
        yield
