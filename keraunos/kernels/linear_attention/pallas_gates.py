"""The recurrence with a gate per token and dimension of the key, for Hopper: warp-specialised Pallas kernels.

Four kernels: ``scan`` (outputs), ``states`` (the state before every chunk, or at the end of every segment, or the
gradient of it), ``combine`` (from those of segments, the state that each starts from) and ``gradients`` (a walk from
the end that gives dq, dk, dv and dg). The words are those of ``pallas_kernels.py`` and ``pallas_walk.py``.

Beside the warpgroups that hold the state, 64 columns of V each, stand others, one per 64 dimensions of the key: they
work the gates of a chunk into q and k, in place in the ring, so that the walk itself knows of gates only as factors per
row of the state. They share nothing: each gives the pairs of its own dimensions, which are summed in the product with
v. With sums of gates G from the chunk's start (base 2, in the order of the recurrence), G_end of the whole chunk and
G_mid of its earlier half:

    mild    q' = q exp2(G - G_mid)    k' = k exp2(G_mid - G)    pairs = q' k'^T, masked    all gates sum to >= -MILD
    strong  q' = q exp2(G)            k' = k exp2(G_end - G)    pairs by halving           whatever the gates are

    o = q' (before * S) + pairs v         S <- after * (kept * S + k'^T v)

where ``before, kept, after`` are ``2^G_mid, 2^G_mid, 2^(G_end - G_mid)``, or ``1, 2^G_end, 1`` with strong gates. Sums
of gates are products with matrices of zeros and ones, over exactly the tokens meant: nothing overflows or cancels.

Sums over values of several warps are avoided, or done by the tensor cores: the compiler's own go through one place in
shared memory that all warpgroups have in common.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas_kernels import (
    _LAYOUT,
    _PER_COLUMN,
    _PER_ROW,
    _SHARED,
    CHUNK,
    COLUMNS,
    _clear,
    _launch,
    _Names,
    _ring,
    _rows,
    _smem,
    _store_rows,
    _zeros,
)

_F32 = jnp.float32
_LOG2E = math.log2(math.e)
# Stands for -inf in sums of gates: 0 times it is 0, exp of it is 0, and every 16-bit format holds it exactly.
CLOSED = -16384.0
# How far gates may sum below 0, base 2, where their factors still are in the dtype's range with much to spare.
MILD = {"bfloat16": 92.0, "float16": 0.0}
_HALF = CHUNK // 2
# Bytes of 64 by 64 values of 16 bits.
_TILE = CHUNK * COLUMNS * 2
# Registers per thread of the warpgroups that hold the state, prepare chunks and move memory, by how many hold and
# prepare. Where there is one of each, all have what they can use.
_REGISTERS = {(2, 2): (128, 96, 24), (2, 1): (144, 184, 40), (1, 2): (152, 160, 40)}
# Rows of the constant operand that sums gates: over the chunk, over its earlier half, and nothing.
_BORDERS = 8


def terms(g: Any) -> tuple[Any, ...]:
    """Gates as bf16 arrays that sum to them, to 16 bits at least: the tensor cores sum them exactly."""
    if g.dtype == jnp.bfloat16:
        return (g,)
    g = jnp.maximum(g.astype(jnp.float32), CLOSED)
    # Not by a cast and back, which the compiler may drop as excess precision.
    high = lax.reduce_precision(g, 8, 7)
    return high.astype(jnp.bfloat16), (g - high).astype(jnp.bfloat16)


def _constants(walk: Any) -> dict[str, Any]:
    """Weights that sum a chunk and its earlier half ``[_BORDERS, CHUNK]``, and up to each token; tokens' places."""
    place = np.arange(CHUNK)[:: -1 if walk.backward_in_time else 1]
    rows = np.zeros((_BORDERS, CHUNK))
    rows[0], rows[1] = 1, place < _HALF
    upto = jnp.asarray(place <= place[:, None], jnp.bfloat16)
    return dict(borders=jnp.asarray(rows, jnp.bfloat16), upto=upto, places=jnp.asarray(place, jnp.int32))


def _constants_s() -> dict[str, Any]:
    """Room for them, and a barrier for when they are there."""
    return dict(
        borders_s=_smem(jnp.bfloat16, _BORDERS, CHUNK), upto_s=_tiles(jnp.bfloat16),
        places_s=plgpu.SMEM((CHUNK,), jnp.int32), once=plgpu.Barrier(num_arrivals=3),
    )  # fmt: skip


def _load_constants(at: Any) -> None:
    for name in ("borders", "upto", "places"):
        plgpu.copy_gmem_to_smem(getattr(at, name), getattr(at, f"{name}_s"), at.once)


def _names(gs: tuple[Any, ...]) -> dict[str, Any]:
    """Names for the terms of the gates."""
    return {f"g{i}": g for i, g in enumerate(gs)}


def _tiles(dtype: Any, *shape: int) -> Any:
    """Room for tiles of 64 by 64."""
    return _smem(dtype, *shape, CHUNK, COLUMNS)


def _load_parts(at: Any, gs: Any, names: Any, split: Any, row: Any, t: Any, i_h: Any, slot: Any, barrier: Any) -> None:
    """Start copying a chunk of arrays of K dimensions, and of the gates, in parts of 64."""
    for part, dims in enumerate(_parts(at.g0.shape[-1])):
        for j, g in enumerate(_names(gs)):
            plgpu.copy_gmem_to_smem(getattr(at, g).at[row, t, i_h, dims], at.g_s.at[slot, j, part], barrier)
        for name, n in zip(names, split, strict=False):
            source = getattr(at, name).at[row, t, i_h // n, dims]
            plgpu.copy_gmem_to_smem(source, getattr(at, f"{name}_s").at[slot, part], barrier)


class _Gates:
    """What one warpgroup does with 64 columns of the gates of a chunk, terms ``[CHUNK, 64]`` in shared memory.

    Where a token is in the order of the recurrence, its place, comes from shared memory each time: made of thread
    indices, masks would be moved out of the loop over chunks, into registers that are not there.
    """

    def __init__(self, at: Any, part: int, gates: list[Any], gamma: Any, walk: Any, limits: Any, dtype: Any):
        self.borders_s, self.upto_s, self.places_s, self.total = (
            at.borders_s,
            at.upto_s,
            at.places_s,
            at.total_s.at[part],
        )
        self.gates, self.gamma, self.dtype = gates, gamma, jnp.dtype(dtype)
        self.first, self.end = limits
        self.n = self.end - self.first
        # Places before that of the first own token.
        self.lead = CHUNK - self.end if walk.backward_in_time else self.first

    def clear(self, *tiles: Any) -> None:
        """Zero the rows that belong to neighbours."""
        pl.when(self.n < CHUNK)(lambda: _clear(tiles, self.first, self.end))

    @property
    def place(self) -> Any:
        """``[CHUNK]``: the places."""
        return plgpu.load(self.places_s, layout=_PER_ROW)

    @property
    def row(self) -> Any:
        """``[CHUNK, CHUNK]``: the place of a row's token."""
        return _rows(self.place, CHUNK)

    @property
    def col(self) -> Any:
        """``[CHUNK, CHUNK]``: the place of a column's token."""
        return lax.broadcast_in_dim(plgpu.load(self.places_s, layout=_PER_COLUMN), (CHUNK, CHUNK), [1])

    def sums(self, weights: Any, steps: Any) -> Any:
        """``weights @ gates``, base 2; the constant decay counts ``steps()`` ``[CHUNK]`` times."""
        sums = _product(*(x for gate in self.gates for x in (weights, gate))) * _LOG2E
        return sums if self.gamma is None else sums + _rows(self.gamma * steps().astype(_F32), COLUMNS)

    def upto(self, place: Any) -> Any:
        """How many own tokens there are up to a place."""
        return jnp.clip(place + 1 - self.lead, 0, self.n)

    def start(self) -> tuple[Any, Any, Any]:
        """``(G_end [64], G_mid [64], whether no dimension's gates sum below -MILD)``. The warps meet."""
        end, mid = self.ends()
        self.total[0], self.total[1] = end, mid
        plgpu.commit_smem()
        # Spread so that every warp has all of it: the least needs no exchange between warps.
        worst = jnp.min(plgpu.load(self.total.at[0], layout=_PER_COLUMN))
        # False for NaN, which -inf gives.
        return end, mid, worst >= -MILD[self.dtype.name]

    def around(self) -> Any:
        """``G - G_mid`` ``[CHUNK, 64]`` of mild gates, after :meth:`start`."""
        return self.to() - lax.broadcast_in_dim(plgpu.load(self.total.at[1], layout=_PER_COLUMN), (CHUNK, COLUMNS), [1])

    def ends(self) -> tuple[Any, Any]:
        """``(G_end, G_mid)``, ``[64]``."""
        return self._totals(_product(*(x for gate in self.gates for x in (gate.T, self.borders_s.T))))

    def _totals(self, totals):
        end, mid = (x * _LOG2E for x in self.borders(totals))
        if self.gamma is not None:
            steps = self.n, self.upto(_HALF - 1)
            end, mid = (x + self.gamma * jnp.asarray(m, _F32) for x, m in zip((end, mid), steps, strict=True))
        return end, mid

    def borders(self, totals: Any) -> tuple[Any, Any]:
        """The first two columns, ``[64]`` each, of a product with the borders' transpose."""
        column = plgpu.broadcasted_iota(jnp.int32, totals.shape, 1, layout=_LAYOUT)
        first, second = (jnp.sum(jnp.where(column == i, totals, 0.0), 1) for i in (0, 1))
        return first, second

    def close(self) -> None:
        """Put a finite number in the place of -inf; several terms have it already."""
        if len(self.gates) == 1:
            self.gates[0][...] = jnp.maximum(_load(self.gates[0]), CLOSED).astype(jnp.bfloat16)
            plgpu.commit_smem()

    def to(self) -> Any:
        """G: from the chunk's start to each token."""
        return self.sums(self.upto_s, lambda: self.upto(self.place))

    def left(self) -> Any:
        """G_end - G: after each token to the chunk's end."""
        return self.sums(_exact(self.col > self.row), lambda: self.n - self.upto(self.place))

    def between(self, m: Any) -> Any:
        """``[CHUNK, CHUNK]``: the tokens whose gates lie between a token and the boundary of its block's halves.

        Blocks have 2 m tokens; their later half looks back at their earlier half. m is a power of two.
        """
        return ((self.col ^ self.row) < m) & jnp.where(self.later(m), self.col <= self.row, self.col > self.row)

    def spanned(self, m: Any) -> Any:
        """The transpose of :meth:`between`: which tokens have a gate in the sum of a level."""
        return ((self.col ^ self.row) < m) & jnp.where((self.col & m) != 0, self.row <= self.col, self.row > self.col)

    def level(self, m: Any) -> Any:
        """exp2 of the sums of the gates of :meth:`between`."""

        def steps():
            place = self.place
            inside = place & (m - 1)
            return jnp.where((place & m) != 0, inside + 1, m - 1 - inside)

        return jnp.exp2(self.sums(_exact(self.between(m)), steps))

    def later(self, m: Any) -> Any:
        """``[CHUNK, 64]``: which tokens are in the later half of a block."""
        return (self.row & m) != 0

    def pairs(self, m: Any) -> Any:
        """``[CHUNK, CHUNK]``: which pairs a level covers, in both directions."""
        apart = self.col ^ self.row
        return (apart >= m) & (apart < 2 * m)

    def halve(self, q: Any, k: Any, scratch: Any, scale: float) -> Any:
        """``[CHUNK, CHUNK]`` the pairs of queries q and keys k ``[CHUNK, 64]`` in shared memory, with any gates."""

        def level(i, scores):
            m = lax.shift_left(jnp.int32(1), i)
            y = jnp.where(self.later(m), plgpu.load(q, layout=_LAYOUT), plgpu.load(k, layout=_LAYOUT))
            y = y.astype(_F32) * self.level(m)
            scratch[...] = y.astype(self.dtype)
            plgpu.commit_smem()
            found = _product(scratch, scratch.T)
            # All warps are done with the scratch.
            plgpu.commit_smem()
            return jnp.where(self.pairs(m) & self.later(m), found, scores)

        scores = jnp.where(self.row == self.col, _product(q, k.T), 0.0)
        return lax.fori_loop(0, CHUNK.bit_length() - 1, level, scores) * scale


def _exact(weights: Any) -> Any:
    """Small whole numbers as an operand of the tensor cores."""
    return weights.astype(_F32).astype(jnp.bfloat16)


def _split(x: Any, count: int) -> list[Any]:
    """So many bf16 terms that sum to x."""
    found = []
    for _ in range(count):
        found.append(x.astype(jnp.bfloat16))
        x = x - found[-1].astype(_F32)
    return found


def _ones() -> Any:
    return plgpu.layout_cast(jnp.ones((COLUMNS,), _F32), _PER_ROW)


def _product(*operands: Any) -> Any:
    """``a @ b``, the sum over the operands a, b, a, b, ..."""

    def products(acc):
        for a, b in zip(operands[::2], operands[1::2], strict=True):
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(products, plgpu.ACC((operands[0].shape[0], operands[1].shape[1]), _F32))


def _add(value: Any, *operands: Any) -> Any:
    """``value + a @ b``, for the operands a, b, a, b, ..."""

    def products(acc):
        for a, b in zip(operands[::2], operands[1::2], strict=True):
            plgpu.wgmma(acc, a, b)

    return pl.run_state(products)(plgpu.ACC.init(value))


def _run(products: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """The state after products that add to it."""
    return pl.run_state(products)(tuple(plgpu.ACC.init(x) for x in state))


def _load(ref: Any, layout: Any = _LAYOUT) -> Any:
    return plgpu.load(ref, layout=layout).astype(_F32)


def _decay(ref: Any, exponents: Any, scale: float = 1) -> None:
    """Decay queries or keys in place."""
    factor = jnp.exp2(exponents)
    ref[...] = (_load(ref) * (factor if scale == 1 else factor * scale)).astype(ref.dtype)


def _factor(factors: Any) -> Any:
    """``[64]`` in shared memory as factors per row of part of a state."""
    return _rows(plgpu.load(factors, layout=_PER_ROW), COLUMNS)


def _gamma(gamma_ref: Any, row: Any, i_h: Any) -> Any:
    """The constant decay of a head, base 2; None where there is none."""
    if gamma_ref is None:
        return None
    gamma = gamma_ref[i_h] if len(gamma_ref.shape) == 1 else gamma_ref[row, i_h]
    return jnp.maximum(gamma, CLOSED) * _LOG2E


def _set_registers(W: int, P: int, role: int) -> None:
    """Move registers to where they are needed: role 0 holds a state, 1 prepares chunks, 2 moves memory."""
    if (W, P) in _REGISTERS:
        entry, wanted = 65536 // (W + P + 1) // 1024 * 8, _REGISTERS[W, P][role]
        plgpu.set_max_registers(wanted, action="increase" if wanted >= entry else "decrease")


def _each_part(i_w: Any, W: int, P: int, prepare: Any, counts: Any = True) -> None:
    """Run ``prepare(part)`` in the warpgroups after the first W."""
    for part in range(P):
        pl.when(counts & (i_w == W + part))(lambda part=part: prepare(part))


class Decay(NamedTuple):
    """What decays the state of a head.

    Attributes:
        gates: :func:`terms` of the gates ``[B, T, H, K]``; rows past T are zero.
        gamma: ``[H]`` or ``[B, H]``, the log of a constant decay on top, or None.
    """

    gates: tuple[Any, ...]
    gamma: Any = None


def _stages(wanted: int, of_each: int, fixed: int) -> int:
    """As many stages of so many bytes as are wanted and fit beside the rest."""
    # What each row of a chunk or a state has one of, and the constants, take less than the last.
    return max(min(wanted, (_SHARED - fixed - 2 * _TILE) // of_each), 1)


def _parts(n: int) -> list[Any]:
    """The blocks of 64 of n dimensions."""
    return [pl.ds(i * COLUMNS, COLUMNS) for i in range(n // COLUMNS)]


def _start(ref: Any, index: tuple[Any, ...], K: int, columns: Any) -> tuple[Any, ...]:
    """A state's columns, in parts of 64 rows; zeros where there is no state."""
    if ref is None:
        return (_zeros(COLUMNS, COLUMNS),) * (K // COLUMNS)
    return tuple(plgpu.load(ref.at[*index, part, columns], layout=_LAYOUT, optimized=False) for part in _parts(K))


def _scaled(state: tuple[Any, ...], factors: Any, i: int) -> tuple[Any, ...]:
    """A state, each of its rows times one of its three factors."""
    return tuple(x * _factor(factors.at[i, p]) for p, x in enumerate(state))


def _keep(ref: Any, index: tuple[Any, ...], state: tuple[Any, ...], columns: Any) -> None:
    for part, x in zip(_parts(len(state) * COLUMNS), state, strict=True):
        ref[*index, part, columns] = x


def _give(tile: Any, ref: Any, index: tuple[Any, ...], chunks: Any, i: Any, columns: Any, packed: bool) -> None:
    """Start copying the rows of a chunk ``[CHUNK, 64]`` to memory; the warps have met since they were written."""
    target = ref.at[index[0], pl.ds(chunks.start(i), CHUNK), *index[1:], columns]
    if not packed:
        plgpu.copy_smem_to_gmem(tile, target)
        return
    whole = chunks.length(i) == CHUNK
    pl.when(whole)(lambda: plgpu.copy_smem_to_gmem(tile, target))

    # The neighbours' rows are others' to write, and a bulk copy has whole tiles of rows only.
    @pl.when(jnp.logical_not(whole))
    def _():
        _store_rows(target, plgpu.load(tile, layout=_LAYOUT), *chunks.rows(i))


def scan(q, k, v, decay, starts, *, H, walk, plan, scale, stages):
    """One walk: ``(output [B, T, H, V], final state [N, H, K, V])``.

    Args:
        q, k, v: ``[B, T, heads, K]``, ``[B, T, heads, K]``, ``[B, T, heads, V]``; heads divide H; rows past T are zero.
        decay: the decay.
        starts: ``[N, H, K, V]`` float32, or ``[slots, H, K, V]`` where sequences are cut; None: zeros.
        H: heads.
        walk, plan: how sequences are walked; of packed ones the plan.
        scale: the softmax scale.
        stages: stages of the ring, at most.
    """
    (B, rows, _, K), V, dtype, gs = q.shape, v.shape[-1], q.dtype, decay.gates
    W, P, split = V // COLUMNS, K // COLUMNS, [H // x.shape[2] for x in (q, k, v)]
    N, packed = B if walk.packed is None else walk.packed, plan is not None
    stages = _stages(stages, _TILE * (P * (3 + len(gs)) + W), _TILE * W * (P + 1))
    inputs = dict(q=q, k=k, v=v, **_names(gs), gamma=decay.gamma, starts=starts, plan=plan, **_constants(walk))
    outputs = dict(o=jax.ShapeDtypeStruct((B, rows, H, V), dtype), final=jax.ShapeDtypeStruct((N, H, K, V), _F32))
    scratch = dict(
        q_s=_tiles(dtype, stages, P), k_s=_tiles(dtype, stages, P), v_s=_tiles(dtype, stages, W),
        g_s=_tiles(jnp.bfloat16, stages, len(gs), P), pairs_s=_tiles(dtype, stages, P), state_s=_tiles(dtype, W, P),
        o_s=_tiles(dtype, W), factors_s=plgpu.SMEM((stages, 3, P, COLUMNS), _F32),
        total_s=plgpu.SMEM((P, 3, COLUMNS), _F32), **_constants_s(),
        # full: one arrival per copy; ready: those that prepare; empty: those that hold the state.
        full=plgpu.Barrier(num_arrivals=P * (2 + len(gs)) + W, num_barriers=stages),
        ready=plgpu.Barrier(num_arrivals=P, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=W, num_barriers=stages),
    )  # fmt: skip

    def body(indices, i_w, *refs):
        i_s, i_h = indices
        at: Any = _Names(refs, inputs, outputs, scratch)
        sequence = walk.at(i_s, at.plan)
        chunks = sequence.of_segment()
        columns = pl.ds(i_w * COLUMNS, COLUMNS)

        @pl.when(i_w < W)
        def _hold():
            _set_registers(W, P, 0)
            out = at.o_s.at[i_w]

            def step(i, state):
                slot = lax.rem(i, stages)
                factors, v = at.factors_s.at[slot], at.v_s.at[slot, i_w]
                plgpu.barrier_wait(at.ready.at[slot])
                if packed:
                    pl.when(chunks.length(i) < CHUNK)(lambda: _clear([v], *chunks.rows(i)))
                # Every warp has read what was there: they met after the products of the last chunk.
                for p, x in enumerate(_scaled(state, factors, 0)):
                    at.state_s[i_w, p] = x.astype(dtype)
                plgpu.commit_smem()

                def products(state):
                    def output(o):
                        for p in range(P):
                            plgpu.wgmma(o, at.q_s.at[slot, p], at.state_s.at[i_w, p])
                        for p in range(P):
                            plgpu.wgmma(o, at.pairs_s.at[slot, p], v)
                        for p in range(P):
                            plgpu.wgmma(state[p], at.k_s.at[slot, p].T, v)
                        return plgpu.wgmma_accumulator_load(o, wait_n=P)

                    o = pl.run_scoped(output, plgpu.ACC((CHUNK, COLUMNS), _F32))
                    # Waits until the last chunk's output has left the buffer; here the warps meet.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out[...] = o.astype(dtype)
                    plgpu.commit_smem()
                    _give(out, at.o, (sequence.row, i_h), chunks, i, columns, packed)

                state = _run(products, _scaled(state, factors, 1))
                state = _scaled(state, factors, 2)
                plgpu.barrier_arrive(at.empty.at[slot])
                return state

            state = _start(at.starts, (i_s if walk.segments > 1 else sequence.index, i_h), K, columns)
            state = lax.fori_loop(0, chunks.count, step, state)
            pl.when(sequence.is_last)(lambda: _keep(at.final, (sequence.index, i_h), state, columns))
            plgpu.wait_smem_to_gmem(0)

        def prepare(part):
            _set_registers(W, P, 1)
            gamma = _gamma(at.gamma, sequence.row, i_h)
            plgpu.barrier_wait(at.once)

            @pl.loop(0, chunks.count)
            def _(i):
                slot = lax.rem(i, stages)
                q, k, pairs = (x.at[slot, part] for x in (at.q_s, at.k_s, at.pairs_s))
                gates = [at.g_s.at[slot, j, part] for j in range(len(gs))]
                before, kept, after = (at.factors_s.at[slot, j, part] for j in range(3))
                work = _Gates(at, part, gates, gamma, walk, chunks.rows(i), dtype)
                plgpu.barrier_wait(at.full.at[slot])
                if packed:
                    work.clear(q, k, *gates)
                end, mid, mild = work.start()

                @pl.when(mild)
                def _():
                    around = work.around()
                    _decay(q, around, scale)
                    _decay(k, -around)
                    plgpu.commit_smem()
                    before[...] = kept[...] = jnp.exp2(mid)
                    after[...] = jnp.exp2(end - mid)
                    pairs[...] = jnp.where(work.col <= work.row, _product(q, k.T), 0.0).astype(dtype)

                @pl.when(jnp.logical_not(mild))
                def _():
                    work.close()
                    before[...] = after[...] = _ones()
                    kept[...] = jnp.exp2(work.ends()[0])
                    pairs[...] = work.halve(q, k, pairs, scale).astype(dtype)
                    _decay(q, work.to(), scale)
                    _decay(k, work.left())

                plgpu.commit_smem()
                plgpu.barrier_arrive(at.ready.at[slot])

        _each_part(i_w, W, P, prepare)

        @pl.when(i_w == W + P)
        def _move():
            _set_registers(W, P, 2)
            _load_constants(at)

            def load(i, slot, barrier):
                t, row = pl.ds(chunks.start(i), CHUNK), sequence.row
                _load_parts(at, gs, ("q", "k"), split, row, t, i_h, slot, barrier)
                for w, part in enumerate(_parts(V)):
                    plgpu.copy_gmem_to_smem(at.v.at[row, t, i_h // split[2], part], at.v_s.at[slot, w], barrier)

            _ring(0, chunks.count, stages, at.full, at.empty, load)

    return _launch(
        body, inputs.values(), lanes=True, between_warps=False,
        name="gates_scan", warpgroups=W + P + 1, grid=(walk.slots(B), H),
        out_type=list(outputs.values()), scratch_types=list(scratch.values()),
    )  # fmt: skip


def states(x, y, decay, starts, *, H, walk, plan, scale, every, stages):
    """The state, or with an adjoint walk its gradient, and how it got there.

    Args:
        x, y: keys and values; in an adjoint walk queries and gradients of the output.
        decay, starts, H, walk, plan: as for :func:`scan`.
        scale: the softmax scale, of queries.
        every: ``before * S`` of every chunk is wanted; else the state at the end of every segment, from zero. That of
            the last segment of a sequence, which has no successor, is not written.
        stages: stages of the ring, at most.

    Returns:
        ``[places of chunks, H, K, V]`` in the dtype of x; else ``([slots, H, K, V] float32, [slots, H, K] float32)``,
        the second the sums of the gates, base 2.
    """
    (B, _, _, K), V, dtype, gs = x.shape, y.shape[-1], x.dtype, decay.gates
    W, P, split = V // COLUMNS, K // COLUMNS, [H // a.shape[2] for a in (x, y)]
    packed, slots = plan is not None, walk.slots(B)
    stages = _stages(stages, _TILE * (P * (1 + len(gs)) + W), _TILE * W * P * 2 * every)
    inputs = dict(x=x, y=y, **_names(gs), gamma=decay.gamma, starts=starts, plan=plan, **_constants(walk))
    outputs = dict(
        out=jax.ShapeDtypeStruct((walk.places(B, 1), H, K, V), dtype) if every
        else jax.ShapeDtypeStruct((slots, H, K, V), _F32),
        sums=None if every else jax.ShapeDtypeStruct((slots, H, K), _F32),
    )  # fmt: skip
    scratch = dict(
        x_s=_tiles(dtype, stages, P), y_s=_tiles(dtype, stages, W), g_s=_tiles(jnp.bfloat16, stages, len(gs), P),
        state_s=_tiles(dtype, 2, W, P) if every else None, factors_s=plgpu.SMEM((stages, 3, P, COLUMNS), _F32),
        total_s=plgpu.SMEM((P, 3, COLUMNS), _F32), sums_s=plgpu.SMEM((P, COLUMNS), _F32), **_constants_s(),
        full=plgpu.Barrier(num_arrivals=P * (1 + len(gs)) + W, num_barriers=stages),
        ready=plgpu.Barrier(num_arrivals=P, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=W, num_barriers=stages),
    )  # fmt: skip

    def body(indices, i_w, *refs):
        i_s, i_h = indices
        at: Any = _Names(refs, inputs, outputs, scratch)
        sequence = walk.at(i_s, at.plan)
        chunks = sequence.of_segment()
        columns = pl.ds(i_w * COLUMNS, COLUMNS)
        counts = True if every else sequence.i_p < sequence.segments - 1

        @pl.when(counts & (i_w < W))
        def _hold():
            _set_registers(W, P, 0)

            def step(i, state):
                slot = lax.rem(i, stages)
                factors, y = at.factors_s.at[slot], at.y_s.at[slot, i_w]
                plgpu.barrier_wait(at.ready.at[slot])
                if packed:
                    pl.when(chunks.length(i) < CHUNK)(lambda: _clear([y], *chunks.rows(i)))
                if every:
                    # Waits until the state of two chunks ago has left its buffer; here the warps meet.
                    plgpu.wait_smem_to_gmem(P, wait_read_only=True)
                    out = at.state_s.at[lax.rem(i, 2), i_w]
                    for p, x in enumerate(_scaled(state, factors, 0)):
                        out[p] = x.astype(dtype)
                    plgpu.commit_smem()
                    for p, part in enumerate(_parts(K)):
                        plgpu.copy_smem_to_gmem(out.at[p], at.out.at[chunks.place(i, 1), i_h, part, columns])

                def product(state):
                    for p in range(P):
                        plgpu.wgmma(state[p], at.x_s.at[slot, p].T, y)

                state = _run(product, _scaled(state, factors, 1))
                state = _scaled(state, factors, 2)
                plgpu.barrier_arrive(at.empty.at[slot])
                return state

            state = _start(at.starts, (i_s if walk.segments > 1 else sequence.index, i_h), K, columns)
            state = lax.fori_loop(0, chunks.count, step, state)
            if every:
                plgpu.wait_smem_to_gmem(0)
            else:
                _keep(at.out, (i_s, i_h), state, columns)

        def prepare(part):
            _set_registers(W, P, 1)
            gamma = _gamma(at.gamma, sequence.row, i_h)
            factor = scale if walk.adjoint else 1
            passed = at.sums_s.at[part]
            passed[...] = plgpu.layout_cast(jnp.zeros((COLUMNS,), _F32), _PER_ROW)
            plgpu.barrier_wait(at.once)

            @pl.loop(0, chunks.count)
            def _(i):
                slot = lax.rem(i, stages)
                x, gates = at.x_s.at[slot, part], [at.g_s.at[slot, j, part] for j in range(len(gs))]
                before, kept, after = (at.factors_s.at[slot, j, part] for j in range(3))
                work = _Gates(at, part, gates, gamma, walk, chunks.rows(i), dtype)
                plgpu.barrier_wait(at.full.at[slot])
                if packed:
                    work.clear(x, *gates)
                end, mid, mild = work.start()

                def add(end):
                    passed[...] = plgpu.load(passed, layout=_PER_ROW) + end

                @pl.when(mild)
                def _():
                    around = work.around()
                    _decay(x, around if walk.adjoint else -around, factor)
                    first, last = (end - mid, mid) if walk.adjoint else (mid, end - mid)
                    before[...] = kept[...] = jnp.exp2(first)
                    after[...] = jnp.exp2(last)
                    add(end)

                @pl.when(jnp.logical_not(mild))
                def _():
                    work.close()
                    end, _ = work.ends()
                    before[...] = after[...] = _ones()
                    kept[...] = jnp.exp2(end)
                    add(end)
                    _decay(x, work.to() if walk.adjoint else work.left(), factor)

                plgpu.commit_smem()
                plgpu.barrier_arrive(at.ready.at[slot])

            if not every:
                at.sums[i_s, i_h, pl.ds(part * COLUMNS, COLUMNS)] = plgpu.load(passed, layout=_PER_ROW)

        _each_part(i_w, W, P, prepare, counts)

        @pl.when(counts & (i_w == W + P))
        def _move():
            _set_registers(W, P, 2)
            _load_constants(at)

            def load(i, slot, barrier):
                t, row = pl.ds(chunks.start(i), CHUNK), sequence.row
                _load_parts(at, gs, ("x",), split, row, t, i_h, slot, barrier)
                for w, part in enumerate(_parts(V)):
                    plgpu.copy_gmem_to_smem(at.y.at[row, t, i_h // split[1], part], at.y_s.at[slot, w], barrier)

            _ring(0, chunks.count, stages, at.full, at.empty, load)

    results = _launch(
        body, inputs.values(), lanes=True, between_warps=False,
        name="gates_states", warpgroups=W + P + 1, grid=(slots, H),
        out_type=[x for x in outputs.values() if x is not None],
        scratch_types=[x for x in scratch.values() if x is not None],
    )  # fmt: skip
    return results[0] if every else results


def combine(local, sums, initial, *, B, walk, cu_seqlens):
    """The state that each segment starts from, ``[slots, H, K, V]`` float32.

    ``local`` ``[slots, H, K, V]`` are the segments' own, ``sums`` ``[slots, H, K]`` those of their gates, base 2. One
    program per head and 64 x 64 of the state.
    """
    slots, H, K, V = local.shape
    stages = 8
    inputs = dict(local=local, sums=sums, initial=initial, cu_seqlens=cu_seqlens)
    outputs = dict(starts=jax.ShapeDtypeStruct((slots, H, K, V), _F32))
    scratch = dict(
        tiles=_smem(_F32, stages, COLUMNS, COLUMNS), sums_s=plgpu.SMEM((stages, COLUMNS), _F32),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages), empty=plgpu.Barrier(num_barriers=stages),
    )  # fmt: skip

    def body(indices, i_w, *refs):
        i_n, i_h, i_r, i_c = indices
        at: Any = _Names(refs, inputs, outputs, scratch)
        sequence = walk.of(i_n, at.cu_seqlens)
        slot0, n = sequence.place(walk.segment), sequence.segments - 1
        part = pl.ds(i_r * COLUMNS, COLUMNS), pl.ds(i_c * COLUMNS, COLUMNS)

        @pl.when(i_w == 0)
        def _compute():
            def segment(i, state):
                slot = lax.rem(i, stages)
                at.starts[slot0 + i, i_h, *part] = state
                plgpu.barrier_wait(at.full.at[slot])
                state = state * jnp.exp2(_factor(at.sums_s.at[slot])) + _load(at.tiles.at[slot])
                plgpu.barrier_arrive(at.empty.at[slot])
                return state

            if initial is None:
                state = _zeros(COLUMNS, COLUMNS)
            else:
                state = plgpu.load(at.initial.at[i_n, i_h, *part], layout=_LAYOUT, optimized=False)
            at.starts[slot0 + n, i_h, *part] = lax.fori_loop(0, n, segment, state)

        @pl.when(i_w == 1)
        def _move():
            def load(i, slot, barrier):
                plgpu.copy_gmem_to_smem(at.local.at[slot0 + i, i_h, *part], at.tiles.at[slot], barrier)
                plgpu.copy_gmem_to_smem(at.sums.at[slot0 + i, i_h, part[0]], at.sums_s.at[slot], barrier)

            _ring(0, n, stages, at.full, at.empty, load)

    return _launch(
        body, inputs.values(), lanes=True, between_warps=False,
        name="gates_combine", warpgroups=2, out_type=list(outputs.values()),
        grid=(B if walk.packed is None else walk.packed, H, K // COLUMNS, V // COLUMNS),
        scratch_types=list(scratch.values()),
    )[0]  # fmt: skip


def _columns_of(ref: Any, columns: list[Any]) -> tuple[Any, ...]:
    """Part of a state ``[64, V]`` in memory, by its columns."""
    return tuple(plgpu.load(ref.at[:, x], layout=_LAYOUT, optimized=False) for x in columns)


def _keep_columns(ref: Any, state: tuple[Any, ...], columns: list[Any]) -> None:
    for x, value in zip(columns, state, strict=True):
        ref[:, x] = value


def gradients(q, k, v, decay, do, before, ends, *, H, walk, plan, scale, stages):
    """One walk against the recurrence: ``(dq, dk, dv, gradient of the initial state, *terms of dg)``.

    Pairs, the state before each chunk and the gradient of the state after it give all gradients of the chunk. A gate is
    in every pair that spans it: its gradient is a sum over those within the chunk, from before it through q and dq, to
    after it through k and dk, and across it through both states. Nothing in it cancels but pairs within a mild chunk
    that do not span the gate, and those exactly, as both sides have the same terms.

    Here a warpgroup holds 64 rows of the state's gradient and prepares what belongs to them. Only dv is a sum over
    them: each gives the others its part.

    Args:
        q, k, v, decay, H, plan: as for :func:`scan`; do: ``[B, T, H, V]``, the gradients of the outputs, zero past T.
        before: what :func:`states` gives of every chunk.
        ends: the gradient of the state at the end of each segment, as ``starts`` are for :func:`scan`.
        walk: of the gradient; stages: of the ring of q, k and gates, at most.

    Returns:
        dq, dk, dv per query head in the dtype of q; ``[N, H, K, V]`` float32; as many bf16 terms of the gradient of the
        gates as there are of the gates.
    """
    (B, rows, _, K), V, dtype, gs = q.shape, v.shape[-1], q.dtype, decay.gates
    W, P, split = V // COLUMNS, K // COLUMNS, [H // x.shape[2] for x in (q, k, v)]
    N, packed = B if walk.packed is None else walk.packed, plan is not None
    # How many bf16 terms a value needs.
    exact = 1 if jnp.dtype(dtype) == jnp.bfloat16 else 2
    own = exact > 1
    fixed = _TILE * (W * (2 + 2 * P) + P * (1 + own))
    stages = _stages(stages, _TILE * P * (2 + len(gs)), fixed)

    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    inputs = dict(q=q, k=k, v=v, **_names(gs), gamma=decay.gamma, do=do, before=before, ends=ends, plan=plan,
                  **_constants(walk))  # fmt: skip
    outputs = dict(
        dq=shape(B, rows, H, K), dk=shape(B, rows, H, K), dv=shape(B, rows, H, V), start=shape(N, H, K, V, dtype=_F32),
        # Where the state is while chunks with strong gates are done.
        parked=shape(walk.slots(B), H, K, V, dtype=_F32),
        **{f"d{name}": shape(B, rows, H, K, dtype=jnp.bfloat16) for name in _names(gs)},
    )  # fmt: skip
    scratch = dict(
        q_s=_tiles(dtype, stages, P), k_s=_tiles(dtype, stages, P), g_s=_tiles(jnp.bfloat16, stages, len(gs), P),
        v_s=_tiles(dtype, W), do_s=_tiles(dtype, W), before_s=_tiles(dtype, P, W), after_s=_tiles(dtype, P, W),
        pairs_s=_tiles(dtype, P), terms_s=_tiles(jnp.bfloat16, P) if own else None,
        factors_s=plgpu.SMEM((P, 3, COLUMNS), _F32), total_s=plgpu.SMEM((P, 3, COLUMNS), _F32), **_constants_s(),
        # full and empty, of q, k and gates; full_v and empty_v, of v, do and states; met: what neighbours hold of v and
        # do is cleared; sent: the parts of dv are there; again: q and k are there once more.
        full=plgpu.Barrier(num_arrivals=P * (2 + len(gs)), num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=P, num_barriers=stages),
        full_v=plgpu.Barrier(num_arrivals=W * (2 + P)), empty_v=plgpu.Barrier(num_arrivals=P),
        met=plgpu.Barrier(num_arrivals=P) if packed else None, sent=plgpu.Barrier(num_arrivals=P) if P > 1 else None,
        again=plgpu.Barrier(num_arrivals=2, num_barriers=P),
    )  # fmt: skip

    def body(indices, i_w, *refs):
        i_s, i_h = indices
        at: Any = _Names(refs, inputs, outputs, scratch)
        sequence = walk.at(i_s, at.plan)
        chunks = sequence.of_segment()
        row, count = sequence.row, chunks.count
        dgs = [getattr(at, f"d{name}") for name in _names(gs)]

        def tokens(i):
            return pl.ds(chunks.start(i), CHUNK)

        def compute(part):
            if P > 1:
                plgpu.set_max_registers(232, action="increase")
            gamma = _gamma(at.gamma, row, i_h)
            dims, columns = pl.ds(part * COLUMNS, COLUMNS), _parts(V)
            mine = [w for w in range(W) if w % P == part]
            plgpu.barrier_wait(at.once)

            def nought():
                """A zero that the compiler does not know: else it keeps the addresses of all tiles in registers."""
                return at.places_s[CHUNK - 1 if walk.backward_in_time else 0]

            def step(i, state):
                slot = lax.rem(i, stages)
                zero = nought()
                own_part = part + zero
                pairs, term = at.pairs_s.at[own_part], (at.terms_s if own else at.pairs_s).at[own_part]
                first, kept, last = (at.factors_s.at[own_part, j] for j in range(3))
                passing = at.total_s.at[own_part, 2]
                after, before = ([x.at[own_part, w] for w in range(W)] for x in (at.after_s, at.before_s))
                v, do = ([x.at[w + zero] for w in range(W)] for x in (at.v_s, at.do_s))
                q, k = at.q_s.at[slot, part], at.k_s.at[slot, part]

                def of_pairs(transposed=False):
                    """The gradients of pairs, ``do v^T`` or ``v do^T``."""
                    both = zip(v, do, strict=True) if transposed else zip(do, v, strict=True)
                    return _product(*(x for a, b in both for x in (a, b.T)))

                def through_before():
                    """What reads from before the chunk: operands of its product."""
                    return [x for w in range(W) for x in (do[w], before[w].T)]

                def terms_of(x, count):
                    """So many bf16 terms of x in turn in shared memory, each until the next is asked for."""
                    for each in _split(x, count):
                        term[...] = each
                        plgpu.commit_smem()
                        yield term
                        # All warps are done with it.
                        plgpu.commit_smem()

                def ones(weights, x):
                    """``weights @ x`` of zeros and ones."""
                    return sum(_product(weights, each) for each in terms_of(x, exact))

                def per_column(x):
                    return lax.broadcast_in_dim(plgpu.load(x, layout=_PER_COLUMN), (CHUNK, COLUMNS), [1])

                gates = [at.g_s.at[slot, j, part] for j in range(len(gs))]
                limits = chunks.rows(i)
                work = _Gates(at, part, gates, gamma, walk, limits, dtype)
                plgpu.barrier_wait(at.full.at[slot])
                if packed:
                    work.clear(q, k, *gates)
                end, mid, mild = work.start()

                @pl.when(mild)
                def _():
                    around = work.around()
                    _decay(q, around, scale)
                    _decay(k, -around)
                    plgpu.commit_smem()
                    first[...] = kept[...] = jnp.exp2(end - mid)
                    last[...] = jnp.exp2(mid)
                    pairs[...] = jnp.where(work.col <= work.row, _product(q, k.T), 0.0).astype(dtype)

                @pl.when(jnp.logical_not(mild))
                def _():
                    work.close()
                    first[...] = last[...] = _ones()
                    kept[...] = jnp.exp2(work.ends()[0])
                    pairs[...] = work.halve(q, k, pairs, scale).astype(dtype)
                    _decay(q, work.to(), scale)
                    _decay(k, work.left())

                plgpu.barrier_wait(at.full_v)
                if packed:

                    @pl.when(work.n < CHUNK)
                    def _():
                        _clear([x for w in mine for x in (v[w], do[w])], *limits)
                        plgpu.barrier_arrive(at.met)
                        plgpu.barrier_wait(at.met)

                for w, x in enumerate(state):
                    after[w][...] = (x * _factor(first)).astype(dtype)
                state = tuple(x * _factor(kept) for x in state)
                passing[...] = sum(jnp.sum(_load(before[w]) * x, 1) for w, x in enumerate(state))
                plgpu.commit_smem()

                def products(state):
                    for w in range(W):
                        plgpu.wgmma(state[w], q.T, do[w])

                def of_values(w):
                    """The part of dv that goes through this warpgroup's dimensions."""
                    return _product(pairs.T, do[w], k, after[w])

                dk = _product(*(x for w in range(W) for x in (v[w], after[w].T)))
                # One after the other: there are no registers for all.
                others = [(w, of_values(w)) for w in range(W) if w not in mine]
                state = _run(products, state)
                # All products with what is after the chunk are done: its place is free for parts of dv.
                plgpu.commit_smem()
                if P > 1:
                    for w, dv in others:
                        after[w][...] = dv.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(at.sent)
                values = [(w, of_values(w)) for w in mine]
                if P > 1:
                    plgpu.barrier_wait(at.sent)
                plgpu.commit_smem()
                for w, dv in values:
                    parts = [_load(at.after_s.at[p, w]) for p in range(P) if p != part]
                    after[w][...] = sum(parts, start=dv).astype(dtype)
                plgpu.commit_smem()
                for w in mine:
                    _give(after[w], at.dv, (row, i_h), chunks, i, columns[w], packed)

                def of_mild(*state):
                    to_after = sum(_product(x.T, at.borders_s.T) for x in terms_of(_load(k) * dk, 2))
                    passing[...] = plgpu.load(passing, layout=_PER_ROW) + work.borders(to_after)[0]
                    dpairs = jnp.where(work.col >= work.row, of_pairs(transposed=True), 0.0).astype(dtype)
                    dk_ = _add(dk, dpairs, q)
                    dpairs = jnp.where(work.col <= work.row, of_pairs(), 0.0).astype(dtype)
                    dq = _product(*through_before(), dpairs, k)
                    plgpu.barrier_arrive(at.empty_v)
                    x = _load(q) * dq - _load(k) * dk_
                    high, low = _split(x, 2)
                    term[...] = high
                    e = work.around()
                    # All products with q, k and the gates are done.
                    plgpu.commit_smem()
                    q[...] = (dq * (jnp.exp2(e) * scale)).astype(dtype)
                    k[...] = (dk_ * jnp.exp2(-e)).astype(dtype)
                    gates[0][...] = low
                    plgpu.commit_smem()
                    upto = at.upto_s.T
                    dg = _product(upto, term, upto, gates[0])
                    plgpu.commit_smem()
                    for gate, x in zip(gates, _split(dg + per_column(passing), len(gates)), strict=True):
                        gate[...] = x
                    plgpu.commit_smem()
                    for source, target in ((q, at.dq), (k, at.dk), *zip(gates, dgs, strict=True)):
                        _give(source, target, (row, i_h), chunks, i, dims, packed)

                    return state

                def of_strong(*state):
                    # There are no registers for the state, too.
                    _keep_columns(at.parked.at[i_s, i_h, dims], state, columns)
                    # q and k as they were.
                    for source, target, n in ((at.q, q, split[0]), (at.k, k, split[1])):
                        source = source.at[row, tokens(i), i_h // n, dims]
                        plgpu.copy_gmem_to_smem(source, target, at.again.at[part])
                    plgpu.barrier_wait(at.again.at[part])
                    if packed:
                        work.clear(q, k)
                    dpairs = of_pairs()
                    same = jnp.sum(jnp.where(work.row == work.col, dpairs, 0.0), 1) * scale
                    dpairs = jnp.where(work.col <= work.row, dpairs, of_pairs(transposed=True)) * scale
                    dpairs = dpairs.astype(dtype)

                    def dq_before():
                        return _product(*through_before()) * (jnp.exp2(work.to()) * scale)

                    def levels(fn, carry):
                        """``carry <- fn(m, carry, work, q' or k', their gradient, decay)`` for all levels."""

                        def level(i, carry):
                            m, here = lax.shift_left(jnp.int32(1), i), part + nought()
                            q, k, pairs = at.q_s.at[slot, here], at.k_s.at[slot, here], at.pairs_s.at[here]
                            gates = [at.g_s.at[slot, j, here] for j in range(len(gs))]
                            work = _Gates(at, here, gates, gamma, walk, limits, dtype)
                            e = work.level(m)
                            y = jnp.where(work.later(m), plgpu.load(q, layout=_LAYOUT), plgpu.load(k, layout=_LAYOUT))
                            pairs[...] = (y.astype(_F32) * e).astype(dtype)
                            plgpu.commit_smem()
                            covered = jnp.where(work.pairs(m), dpairs.astype(_F32), 0.0).astype(dtype)
                            return fn(m, carry, work, pairs, _product(covered, pairs), e)

                        return lax.fori_loop(0, CHUNK.bit_length() - 1, level, carry)

                    def store(value, target):
                        _store_rows(target.at[row, tokens(i), i_h, dims], value, *chunks.rows(i))

                    # First the gates' gradient, then those of q and k: there are no registers for all at once.
                    dk_ = dk * jnp.exp2(work.left())
                    dg = per_column(passing) + ones(at.upto_s.T, _load(q) * dq_before())
                    dg = dg + ones(_exact(work.col < work.row), _load(k) * dk_)

                    def of_gates(m, dg, work, y, z, e):
                        x = _load(y) * z
                        plgpu.commit_smem()
                        return dg + ones(_exact(work.spanned(m)), x)

                    for target, x in zip(dgs, _split(levels(of_gates, dg), len(gates)), strict=True):
                        store(x, target)
                    dq = dq_before()
                    plgpu.barrier_arrive(at.empty_v)

                    def of_both(m, carry, work, y, z, e):
                        dq, dk = carry
                        plgpu.commit_smem()
                        z, later = z * e, work.later(m)
                        return dq + jnp.where(later, z, 0.0), dk + jnp.where(later, 0.0, z)

                    same = _rows(same, COLUMNS)
                    dq, dk_ = levels(of_both, (dq + same * _load(k), dk_ + same * _load(q)))
                    store(dq.astype(dtype), at.dq)
                    store(dk_.astype(dtype), at.dk)
                    return _columns_of(at.parked.at[i_s, i_h, dims], columns)

                state = lax.cond(mild, of_mild, of_strong, *state)
                state = tuple(x * _factor(last) for x in state)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(at.empty.at[slot])
                return state

            if ends is None:
                state = (_zeros(COLUMNS, COLUMNS),) * W
            else:
                index = i_s if walk.segments > 1 else sequence.index
                state = _columns_of(at.ends.at[index, i_h, dims], columns)
            state = lax.fori_loop(0, count, step, state)

            @pl.when(sequence.is_last)
            def _():
                _keep_columns(at.start.at[sequence.index, i_h, dims], state, columns)

            plgpu.wait_smem_to_gmem(0)

        for part in range(P):
            pl.when(i_w == part)(lambda part=part: compute(part))

        @pl.when(i_w == P)
        def _move():
            if P > 1:
                plgpu.set_max_registers(40, action="decrease")
            _load_constants(at)

            @pl.loop(0, count)
            def _(i):
                slot, t = lax.rem(i, stages), tokens(i)
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(at.empty.at[slot]))
                _load_parts(at, gs, ("q", "k"), split, row, t, i_h, slot, at.full.at[slot])
                pl.when(i >= 1)(lambda: plgpu.barrier_wait(at.empty_v))
                for w, columns in enumerate(_parts(V)):
                    plgpu.copy_gmem_to_smem(at.v.at[row, t, i_h // split[2], columns], at.v_s.at[w], at.full_v)
                    plgpu.copy_gmem_to_smem(at.do.at[row, t, i_h, columns], at.do_s.at[w], at.full_v)
                    for p, dims in enumerate(_parts(K)):
                        source = at.before.at[chunks.place(i, 1), i_h, dims, columns]
                        plgpu.copy_gmem_to_smem(source, at.before_s.at[p, w], at.full_v)

            @pl.loop(jnp.maximum(count - stages, 0), count)
            def _(i):
                plgpu.barrier_wait(at.empty.at[lax.rem(i, stages)])

            pl.when(count > 0)(lambda: plgpu.barrier_wait(at.empty_v))

    dq, dk, dv, start, _, *dgs = _launch(
        body, inputs.values(), lanes=True, between_warps=False,
        name="gates_gradients", warpgroups=P + 1, grid=(walk.slots(B), H),
        out_type=list(outputs.values()), scratch_types=[x for x in scratch.values() if x is not None],
    )  # fmt: skip
    return dq, dk, dv, start, *dgs
