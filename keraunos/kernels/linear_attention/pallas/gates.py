"""What a warpgroup does with gates per token and dimension of the key, in the Pallas kernels for Hopper.

The kernels are in ``gates_scan.py`` and ``gates_gradients.py``; the words are those of
``kernels.py`` and ``walk.py``. A warpgroup works the gates of a chunk, for 64 dimensions of the key, into
q and k, in place, so that the walk itself knows of gates only as factors per row of the state. It shares nothing with
the one that has the other dimensions: each gives the pairs of its own, which are summed in the product with v. With
sums of gates G from the chunk's start (base 2, in the order of the recurrence), G_end of the whole chunk and G_mid of
its earlier half:

    mild    q' = q exp2(G - G_mid)    k' = k exp2(G_mid - G)    pairs = q' k'^T, masked    all gates sum to >= -MILD *
    fine    the same in float16 for pairs, in bf16 for the rest                            sum to >= -FINE, and it fits
    strong  q' = q exp2(G)            k' = k exp2(G_end - G)    pairs by halving           whatever the gates are

    * and to >= -MILD_EACH for each token: in the gradient of gates a token's pair with itself, which no gate touches,
      cancels but for its rounding, and that must be less than what few tokens with strong gates leave of other pairs

    o = q' (before * S) + pairs v         S <- after * (kept * S + k'^T v)

where ``before, kept, after`` are ``2^G_mid, 2^G_mid, 2^(G_end - G_mid)``, or ``1, 2^G_end, 1`` with strong gates. Sums
of gates are products with matrices of zeros and ones, over exactly the tokens meant: nothing overflows, and with strong
gates nothing cancels.

Sums over values of several warps are avoided, or done by the tensor cores: the compiler's own go through one place in
shared memory that all warpgroups have in common.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.pallas.products import T, product_of
from keraunos.kernels.linear_attention.pallas.program import (
    CHUNK,
    COLUMNS,
    PER_ROW,
    SHARED,
    clear_rows,
    copy_rows_out,
    either_of,
    rows_of,
    smem,
    when,
)
from keraunos.kernels.linear_attention.pallas.registers import widened
from keraunos.kernels.linear_attention.pallas.tiles import (
    Tile,
    copy_rows,
    load_bf16,
    load_halves,
    load_per_column,
    load_per_row,
    store_per_row,
    store_tile,
    whole_tiles,
)
from keraunos.kernels.linear_attention.pallas.vectors import flat_columns, flat_rows
from keraunos.kernels.linear_attention.pallas.walk import over

F32 = jnp.float32
_LOG2E = math.log2(math.e)
# Stands for -inf in sums of gates: 0 times it is 0, exp of it is 0, and every 16-bit format holds it exactly.
CLOSED = -16384.0
# How far gates may sum below 0, base 2, where their factors still are in the dtype's range with much to spare.
MILD = 92.0
MILD_EACH = 4.0
# And where they are in float16's, halfway to each side, with the values of most queries and keys.
FINE = 24.0
_HALF = CHUNK // 2
# Bytes of 64 by 64 values of 16 bits.
TILE = CHUNK * COLUMNS * 2


def constants_s() -> dict[str, Any]:
    """Room for what all chunks need, and a barrier for when it is there."""
    return dict(upto_s=tiles_of(jnp.bfloat16, 1), places_s=plgpu.SMEM((CHUNK,), jnp.int32), once=plgpu.Barrier())


def make_constants(at: Any, walk: Any, i: Any, unrolled: bool = False) -> None:
    """Weights that sum up to each token, and their places in the order of the recurrence: made where i is 0.

    Whoever needs them waits for ``once``.
    """

    @when(i == 0)
    def _():
        place = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=PER_ROW)
        place = CHUNK - 1 - place if walk.backward_in_time else place
        store_per_row(at.places_s, place)
        meet()
        store_tile(at.upto_s.at[0], exact(_column_places(at.places_s) <= rows_of(place, CHUNK)), unrolled)
        plgpu.commit_smem()
        plgpu.barrier_arrive(at.once)


def _column_places(places_s: Any) -> Any:
    """``[CHUNK, CHUNK]``: the place of a column's token."""
    return _of_columns(load_per_column(places_s))


def nought(at: Any, walk: Any) -> Any:
    """A zero that the compiler does not know: else it keeps the addresses of all tiles in registers."""
    return at.places_s[CHUNK - 1 if walk.backward_in_time else 0]


def names_of(gs: tuple[Any, ...]) -> dict[str, Any]:
    """Names for the terms of the gates."""
    return {f"g{i}": g for i, g in enumerate(gs)}


def tiles_of(dtype: Any, *shape: int) -> Any:
    """Room for tiles of 64 by 64."""
    return smem(dtype, *shape, CHUNK, COLUMNS)


def load_parts(at: Any, gs: Any, names: Any, split: Any, row: Any, t: Any, i_h: Any, slot: Any, barrier: Any) -> None:
    """Start copying a chunk of arrays of K dimensions, and of the gates, in parts of 64."""
    for part, dims in enumerate(parts_of(at.g0.shape[-1])):
        for j, g in enumerate(names_of(gs)):
            plgpu.copy_gmem_to_smem(getattr(at, g).at[row, t, i_h, dims], at.g_s.at[slot, j, part], barrier)
        for name, n in zip(names, split, strict=False):
            source = getattr(at, name).at[row, t, over(i_h, n), dims]
            plgpu.copy_gmem_to_smem(source, getattr(at, f"{name}_s").at[slot, part], barrier)


class Gates:
    """What one warpgroup does with 64 columns of the gates of a chunk, terms ``[CHUNK, 64]`` in shared memory.

    Where a token is in the order of the recurrence, its place, comes from shared memory each time: made of thread
    indices, masks would be moved out of the loop over chunks, into registers that are not there.
    """

    def __init__(self, at: Any, part: Any, zero: Any, gates: list[Any], gamma: Any, walk: Any, limits: Any, dtype: Any,
                 unrolled: bool = False, upto: Any = None):
        self.at, self.part, self.places_s, self.total = at, part, at.places_s, at.total_s.at[part]
        self.upto_s, self.flat = at.upto_s.at[zero] if upto is None else upto, upto is not None
        self.gates, self.gamma, self.dtype = gates, gamma, jnp.dtype(dtype)
        self.backward_in_time, self.unrolled = walk.backward_in_time, unrolled
        self.first, self.end = limits
        self.n = self.end - self.first
        # Places before that of the first own token.
        self.lead = CHUNK - self.end if walk.backward_in_time else self.first
        # The rows that hold G_end and G_mid.
        self.borders = [CHUNK - 1 - x if walk.backward_in_time else x for x in (CHUNK - 1, _HALF - 1)]

    def clear(self, *tiles: Any) -> None:
        """Zero the rows that belong to neighbours."""
        when(self.n < CHUNK)(lambda: clear_rows(map(whole_tiles, tiles), self.first, self.end))

    @property
    def place(self) -> Any:
        """``[CHUNK]``: the places."""
        return load_per_row(self.places_s)

    @property
    def row(self) -> Any:
        """``[CHUNK, CHUNK]``: the place of a row's token."""
        return _of_rows(self.place, self.flat)

    @property
    def col(self) -> Any:
        """``[CHUNK, CHUNK]``: the place of a column's token."""
        return _of_columns(load_per_column(self.places_s), self.flat)

    def sums(self, weights: Any, steps: Any) -> Any:
        """``weights @ gates``, base 2; the constant decay counts ``steps()`` ``[CHUNK]`` times."""
        return self.exponents(product_of(*self.operands(weights)), steps)

    def operands(self, weights: Any) -> list[Any]:
        """The operands of ``weights @ gates``, a pair for each of the gates' terms."""
        return [x for gate in self.gates for x in (weights, gate)]

    def exponents(self, sums: Any, steps: Any) -> Any:
        """Sums of gates, base 2, and with the constant decay."""
        sums = sums * _LOG2E
        return sums if self.gamma is None else sums + _of_rows(self.gamma * steps().astype(F32), self.flat)

    def upto(self, place: Any) -> Any:
        """How many own tokens there are up to a place."""
        return jnp.clip(place + 1 - self.lead, 0, self.n)

    def worst(self) -> Any:
        """The least sum of a dimension's gates, when G_end is known; NaN for -inf."""
        # Spread so that every warp has all of it: the least needs no exchange between warps.
        return jnp.min(load_per_column(self.total.at[0]))

    def least(self) -> Any:
        """The least that mild gates sum to."""
        return -jnp.minimum(MILD, MILD_EACH * self.n.astype(F32))

    def keep(self, to: Any) -> Any:
        """Leave G_end and G_mid of G, which is given back, for all threads. The warps meet."""
        self.leave_ends(to)
        meet()
        return to

    def leave_ends(self, to: Any) -> None:
        """Leave G_end and G_mid of G; the warps have not met."""
        copy_rows(Tile(self.at.total_s, (self.part,), plgpu.RefType()) if self.flat else self.total, to, self.borders)

    def ends(self) -> tuple[Any, Any]:
        """``(G_end, G_mid)``, ``[64]`` each."""
        end, mid = (load_per_row(self.total.at[i]) for i in range(2))
        return end, mid

    def factors(self, adjoint: bool) -> tuple[Any, Any, Any]:
        """The state's factors ``before, kept, after`` of mild gates: ``[64]`` each."""
        end, mid = self.ends()
        first, last = (end - mid, mid) if adjoint else (mid, end - mid)
        return jnp.exp2(first), jnp.exp2(first), jnp.exp2(last)

    def strong_factors(self) -> tuple[Any, Any, Any]:
        """The state's factors ``before, kept, after`` of strong gates: ``[64]`` each."""
        return ones(), jnp.exp2(self.ends()[0]), ones()

    def around(self, to: Any) -> Any:
        """``G - G_mid`` ``[CHUNK, 64]``, of G."""
        return to - across(self.total.at[1], self.flat)

    def close(self) -> None:
        """Put a finite number in the place of -inf; several terms have it already. The warps meet."""
        if len(self.gates) == 1:
            closed = jnp.maximum(load_bf16(self.gates[0], self.unrolled), CLOSED)
            store_tile(self.gates[0], closed.astype(jnp.bfloat16), self.unrolled)
        plgpu.commit_smem()

    def to(self) -> Any:
        """G: from the chunk's start to each token."""
        return self.sums(self.upto_s, self.steps_to)

    def steps_to(self) -> Any:
        """How many own tokens there are up to each."""
        return self.upto(self.place)

    def left(self) -> Any:
        """G_end - G: after each token to the chunk's end."""
        return self.sums(exact(self.col > self.row), lambda: self.n - self.upto(self.place))

    def between(self, m: Any) -> Any:
        """``[CHUNK, CHUNK]``: the tokens whose gates lie between a token and the boundary of its block's halves.

        Blocks have 2 m tokens; their later half looks back at their earlier half. m is a power of two.
        """
        row, col = self.row, self.col
        return ((col ^ row) < m) & jnp.where((row & m) != 0, col <= row, col > row)

    def spanned(self, m: Any) -> Any:
        """The transpose of :meth:`between`: which tokens have a gate in the sum of a level."""
        row, col = self.row, self.col
        return ((col ^ row) < m) & jnp.where((col & m) != 0, row <= col, row > col)

    def level(self, m: Any) -> Any:
        """exp2 of the sums of the gates of :meth:`between`."""

        def steps():
            place = self.place
            inside = place & (m - 1)
            return jnp.where((place & m) != 0, inside + 1, m - 1 - inside)

        return jnp.exp2(self.sums(exact(self.between(m)), steps))

    def later(self, m: Any) -> Any:
        """``[CHUNK, 64]``: which tokens are in the later half of a block."""
        return (self.row & m) != 0

    def either(self, q: Any, k: Any, m: Any) -> Any:
        """``[CHUNK, 64]``: queries of tokens in the later half of a block, keys of the others."""
        return widened(load_halves(q, k, m, self.backward_in_time))

    def pairs(self, m: Any) -> Any:
        """``[CHUNK, CHUNK]``: which pairs a level covers, in both directions."""
        apart = self.col ^ self.row
        return (apart >= m) & (apart < 2 * m)

    def halve(self, q: Any, k: Any, scratch: Any, scale: float) -> Any:
        """``[CHUNK, CHUNK]`` the pairs of queries q and keys k ``[CHUNK, 64]`` in shared memory, with any gates."""

        def given(scores):
            return (scores * scale).astype(self.dtype)

        def level(i, scores):
            m = lax.shift_left(jnp.int32(1), i)
            y = self.either(q, k, m) * self.level(m)
            store_tile(scratch, y.astype(self.dtype), self.unrolled)
            plgpu.commit_smem()
            found = product_of(scratch, T(scratch))
            # All warps are done with the scratch.
            plgpu.commit_smem()
            # From level to level in 16 bits, which takes fewer registers.
            return jnp.where(self.pairs(m) & self.later(m), given(found), scores)

        scores = given(jnp.where(self.row == self.col, product_of(q, T(k)), 0.0))
        return lax.fori_loop(0, CHUNK.bit_length() - 1, level, scores)


def exact(weights: Any) -> Any:
    """Small whole numbers as an operand of the tensor cores."""
    return weights.astype(F32).astype(jnp.bfloat16)


def split_terms(x: Any, count: int) -> list[Any]:
    """So many bf16 terms that sum to x."""
    found = []
    for _ in range(count - 1):
        # Cut off, not rounded, which takes instructions of a slow kind.
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        found.append(lax.bitcast_convert_type(bits, F32))
        x = x - found[-1]
    return [each.astype(jnp.bfloat16) for each in (*found, x)]


def meet() -> None:
    """The warps of a warpgroup wait for each other, for what they alone read and write."""
    plgpu.inline_mgpu()(lambda _: mgpu.warpgroup_barrier())()


def _of_rows(x: Any, flat: bool = False) -> Any:
    """One per row, for all columns."""
    return flat_rows(x) if flat else rows_of(x, COLUMNS)


def _of_columns(x: Any, flat: bool = False) -> Any:
    """One per column, for all rows."""
    return flat_columns(x) if flat else lax.broadcast_in_dim(x, (CHUNK, COLUMNS), [1])


def across(x: Any, flat: bool = False) -> Any:
    """``[64]`` in shared memory, one per column, for all rows of a chunk."""
    return _of_columns(load_per_column(x), flat)


def ones() -> Any:
    """``[64]`` ones, one for each row of the state."""
    return plgpu.layout_cast(jnp.ones((COLUMNS,), F32), PER_ROW)


def decayed(ref: Any, exponents: Any, scale: float = 1, unrolled: bool = False) -> Any:
    """Queries or keys, decayed: here, and not in the branch that uses it."""
    factor = jnp.exp2(exponents)
    x = load_bf16(ref, unrolled) * (factor if scale == 1 else factor * scale)
    return lax.optimization_barrier(x.astype(ref.dtype))


def factor_of(factors: Any, flat: bool = False) -> Any:
    """``[64]`` in shared memory as factors per row of part of a state."""
    return _of_rows(load_per_row(factors), flat)


def gamma_of(gamma_ref: Any, row: Any, i_h: Any) -> Any:
    """The constant decay of a head, base 2; None where there is none."""
    if gamma_ref is None:
        return None
    gamma = gamma_ref[i_h] if len(gamma_ref.shape) == 1 else gamma_ref[row, i_h]
    return jnp.maximum(gamma, CLOSED) * _LOG2E


class Decay(NamedTuple):
    """What decays the state of a head.

    Attributes:
        gates: bf16 arrays ``[B, T, H, K]`` that sum to the gates: one, or two of gates that are no lower than
            ``CLOSED``. Rows past T are zero.
        gamma: ``[H]`` or ``[B, H]``, the log of a constant decay on top, or None.
    """

    gates: tuple[Any, ...]
    gamma: Any = None


def stages_of(wanted: int, of_each: int, fixed: int) -> int:
    """As many stages of so many bytes as are wanted and fit beside the rest."""
    # What each row of a chunk or a state has one of, and the constants, take less than the last.
    return max(min(wanted, (SHARED - fixed - 2 * TILE) // of_each), 1)


def parts_of(n: int) -> list[Any]:
    """The blocks of 64 of n dimensions."""
    return [pl.ds(i * COLUMNS, COLUMNS) for i in range(n // COLUMNS)]


def give_back(tile: Any, ref: Any, index: tuple[Any, ...], chunks: Any, i: Any, columns: Any, packed: bool) -> None:
    """Start copying the rows of a chunk ``[CHUNK, 64]`` to memory; the warps have met since they were written."""
    target = ref.at[index[0], pl.ds(chunks.start(i), CHUNK), *index[1:], columns]
    tile = whole_tiles(tile)
    if not packed:
        plgpu.copy_smem_to_gmem(tile, target)
        return
    whole = chunks.length(i) == CHUNK
    # The neighbours' rows are others' to write, and a bulk copy has whole tiles of rows only.
    either_of(
        whole,
        lambda: plgpu.copy_smem_to_gmem(tile, target),
        lambda: copy_rows_out(target, tile, *chunks.rows(i)),
    )
