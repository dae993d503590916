"""One program of a walk with gates per token and dimension of the key, for Hopper: what its warpgroups do alike.

Some hold the state, some prepare chunks as ``gates.py`` says, one moves memory; ``gates_scan.py`` has the
kernels.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas.gates import (
    FINE,
    Gates,
    factor_of,
    gamma_of,
    make_constants,
    names_of,
    nought,
    parts_of,
)
from keraunos.kernels.linear_attention.pallas.program import CHUNK, COLUMNS, clear_rows, when
from keraunos.kernels.linear_attention.pallas.walk import over

# Registers per thread of the warpgroups that hold the state, prepare chunks and move memory, by how many hold and
# prepare. Where there is one of each, all have what they can use.
_REGISTERS = {(2, 2): (128, 96, 24), (2, 1): (144, 184, 40), (1, 2): (152, 160, 40)}


class Program:
    """One program: what its warpgroups do alike in ``scan`` and ``states``.

    Args:
        at: the kernel's references, by name.
        walk, chunks, row, i_h: how it walks, its chunks, their row of the batch, and its head.
        keyed, value: names of the arrays with 64 dimensions of the key per warpgroup that prepares, and of the one with
            64 columns per warpgroup that holds the state.
        shared: how many query heads share a head of each.
        sizes: ``W`` and ``P``, how many warpgroups hold and prepare, and the terms of the gates.
        stages: of the ring.
        early: the factors of a chunk are handed on before the chunk is there.
        unrolled: tiles are moved by JAX's functions: see ``tiles.py``.
    """

    def __init__(self, at: Any, walk: Any, chunks: Any, row: Any, i_h: Any, keyed: tuple[str, ...], value: str,
                 shared: list[int], sizes: tuple[int, int, Any], stages: int, early: bool = False,
                 unrolled: bool = False):
        self.at, self.walk, self.chunks, self.row, self.i_h = at, walk, chunks, row, i_h
        self.keyed, self.value, self.shared, self.stages = keyed, value, shared, stages
        self.early, self.unrolled = early, unrolled
        self.W, self.P, self.gs = sizes
        self.packed = at.plan is not None

    def run(self, i_w: Any, hold: Any, prepare: Any, counts: Any) -> None:
        """Each warpgroup what it is for: ``hold(i_w)``, ``prepare(part)``, or the copies."""
        W, P = self.W, self.P

        @when(counts & (i_w < W))
        def _():
            self._set_registers(0)
            if self.early:
                # Those that prepare are the ones with the most to do, and too few registers.
                make_constants(self.at, self.walk, i_w, self.unrolled)
            hold(i_w)

        @when(counts & (i_w >= W) & (i_w < W + P))
        def _():
            self._set_registers(1)
            prepare(i_w - W)

        @when(counts & (i_w == W + P))
        def _():
            self._set_registers(2)
            self._fill()

    def _set_registers(self, role: int) -> None:
        """Move registers to where they are needed: role 0 holds a state, 1 prepares chunks, 2 moves memory."""
        W, P = self.W, self.P
        if (W, P) in _REGISTERS:
            entry, wanted = 65536 // (W + P + 1) // 1024 * 8, _REGISTERS[W, P][role]
            plgpu.set_max_registers(wanted, action="increase" if wanted >= entry else "decrease")

    def _fill(self) -> None:
        """Fill both rings, each stage as soon as everyone is done with it: gates are a chunk ahead of the rest."""
        at, count = self.at, self.chunks.count
        rings = (at.gates_empty, at.gates_full, self._load_gates), (at.empty, at.full, self._load)

        def fill(i, ring):
            (empty, full, load), slot = ring, lax.rem(i, self.stages)
            when(i >= self.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            load(slot, full.at[slot], pl.ds(self.chunks.start(i), CHUNK))

        when(count > 0)(lambda: fill(0, rings[0]))

        @pl.loop(0, count)
        def _(i):
            fill(i, rings[1])
            when(i + 1 < count)(lambda: fill(i + 1, rings[0]))

        # Every completion of a barrier is waited for, those of the last round too.
        @pl.loop(jnp.maximum(count - self.stages, 0), count)
        def _(i):
            for empty, _, _ in rings:
                plgpu.barrier_wait(empty.at[lax.rem(i, self.stages)])

    def _load_gates(self, slot: Any, barrier: Any, t: Any) -> None:
        for part, dims in enumerate(parts_of(self.P * COLUMNS)):
            for j, g in enumerate(names_of(self.gs)):
                source = getattr(self.at, g).at[self.row, t, self.i_h, dims]
                plgpu.copy_gmem_to_smem(source, self.at.g_s.at[slot, j, part], barrier)

    def _load(self, slot: Any, barrier: Any, t: Any) -> None:
        names, parts = (*self.keyed, self.value), [self.P] * len(self.keyed) + [self.W]
        for name, count, shared in zip(names, parts, self.shared, strict=True):
            for part, dims in enumerate(parts_of(count * COLUMNS)):
                source = getattr(self.at, name).at[self.row, t, over(self.i_h, shared), dims]
                plgpu.copy_gmem_to_smem(source, getattr(self.at, f"{name}_s").at[slot, part], barrier)

    def _place(self, i: Any) -> Any:
        """Where the factors of a chunk are: if early, those of the chunk that had its stage may still be in use."""
        return lax.rem(i, self.stages + self.early)

    def hold(self, i_w: Any, state: Any, before: Any, products: Any, after: Any = None) -> Any:
        """Walk with 64 columns of the state, in parts of 64 rows: what is done with each chunk.

        ``before(i, state)`` is given the state that queries read, ``products(i, slot, v, state) -> state, ...`` the one
        that keys are added to, and ``after(i, ...)`` the rest of what that gives, when the chunk's stage is free.
        """
        at, chunks = self.at, self.chunks

        def step(i, state):
            slot, place = lax.rem(i, self.stages), self._place(i)
            v, factors = getattr(at, f"{self.value}_s").at[slot, i_w], at.factors_s.at[place]
            if self.early:
                plgpu.barrier_wait(at.known.at[place])
                before(i, _scaled(state, factors, 0))
            plgpu.barrier_wait(at.ready.at[slot])
            if self.packed:
                when(chunks.length(i) < CHUNK)(lambda: clear_rows([v], *chunks.rows(i)))
            if not self.early:
                before(i, _scaled(state, factors, 0))
            state, *rest = products(i, slot, v, _scaled(state, factors, 1))
            state = _scaled(state, factors, 2)
            plgpu.barrier_arrive(at.empty.at[slot])
            if rest:
                after(i, *rest)
            return state

        return lax.fori_loop(0, chunks.count, step, state)

    def prepare(self, own: Any, mild: Any, strong: Any, dtype: Any) -> None:
        """Prepare 64 dimensions of all chunks.

        Where gates are mild ``mild(work, slot, around, fine)`` does it, else ``strong(work, slot, to)``.
        """
        at, chunks, gs = self.at, self.chunks, range(len(self.gs))
        gamma = gamma_of(at.gamma, self.row, self.i_h)
        if not self.early:
            make_constants(at, self.walk, own, self.unrolled)
        plgpu.barrier_wait(at.once)

        def work_on(i):
            slot, zero = lax.rem(i, self.stages), nought(at, self.walk)
            part = own + zero
            gates = [at.g_s.at[slot, j, part] for j in gs]
            return slot, Gates(at, part, zero, gates, gamma, self.walk, chunks.rows(i), dtype, self.unrolled)

        def sums(i):
            """G of a chunk. After the last one, of what is there: nobody reads it."""
            slot, work = work_on(i)

            @when(i < chunks.count)
            def _():
                plgpu.barrier_wait(at.gates_full.at[slot])
                if self.packed:
                    work.clear(*work.gates)

            return work.to()

        def step(i, to):
            slot, work = work_on(i)
            place = self._place(i)
            work.keep(to)

            def wait():
                plgpu.barrier_wait(at.full.at[slot])
                if self.packed:
                    work.clear(*(getattr(at, f"{name}_s").at[slot, work.part] for name in self.keyed))

            def hand_on(values):
                for j, x in enumerate(values):
                    at.factors_s[place, j, work.part] = x
                if self.early:
                    plgpu.barrier_arrive(at.known.at[place])
                    wait()

            worst = work.worst()
            is_mild = worst >= work.least()
            if not self.early:
                wait()

            @when(is_mild)
            def _():
                hand_on(work.factors(self.walk.adjoint))
                mild(work, slot, work.around(to), worst >= -FINE)

            @when(jnp.logical_not(is_mild))
            def _():
                work.close()
                to = work.keep(work.to())
                hand_on(work.strong_factors())
                strong(work, slot, to)

            plgpu.commit_smem()
            plgpu.barrier_arrive(at.gates_empty.at[slot])
            # Before those that hold the state begin with this chunk, and keep the tensor cores busy.
            following = sums(i + 1)
            plgpu.barrier_arrive(at.ready.at[slot])
            return following

        lax.fori_loop(0, chunks.count, step, sums(0))


def _scaled(state: tuple[Any, ...], factors: Any, i: int) -> tuple[Any, ...]:
    """A state, each of its rows times one of its three factors."""
    return tuple(x * factor_of(factors.at[i, p]) for p, x in enumerate(state))


def barriers(keyed: int, W: int, P: int, gs: Any, stages: int) -> dict[str, Any]:
    """full: one arrival per copy; ready: those that prepare; empty: those that hold the state, or prepare."""
    arrivals = dict(full=P * keyed + W, gates_full=P * len(gs), gates_empty=P, ready=P, empty=W)
    return {name: plgpu.Barrier(num_arrivals=n, num_barriers=stages) for name, n in arrivals.items()}
