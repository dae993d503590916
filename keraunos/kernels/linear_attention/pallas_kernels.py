"""The recurrence with a constant decay per head, for Hopper: warp-specialised kernels in Pallas Mosaic GPU.

Three kernels: ``scan`` (queries, keys and values give outputs), ``local_states`` (the states that pieces of a sequence
would end in if they started from zero) and ``combine`` (from those, the state that each segment starts from). All three
have the same shape: one memory warpgroup issues bulk copies into a ring of stages, compute warpgroups use them up.
docs/hopper.md draws who waits for whom.

Words: a *chunk* is ``CHUNK`` tokens, the unit of the loops. A *segment* is what one program of ``scan`` walks through,
a *piece* what one program of ``local_states`` does. Chunks, pieces and segments are counted in the order in which they
are walked; ``Walk`` turns that into token positions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import jaxpr_as_fun

from keraunos.frontends.jax import vary, varying

CHUNK = 64
# Columns of V per compute warpgroup: its state [K, 64] in float32 is half of a thread's registers where K is 128.
COLUMNS = 64
# Older than this many powers of two, a token is nothing in float32.
_UNDERFLOW = 150.0
# Registers per thread, of 65,536 per multiprocessor: the memory warpgroup only issues copies.
_REGISTERS, _REGISTERS_MEMORY = 232, 40

# Bytes of shared memory of a block, less what barriers and alignment take.
_SHARED = 232448 - 1024

_LAYOUT = plgpu.Layout.WGMMA
# What the tensor cores and the bulk copies agree on: rows of 128 bytes, swizzled, in tiles of 8.
_TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_TILES_FLOAT32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


class Walk(NamedTuple):
    """How the tokens of a sequence are walked through, and with which decay; hashable.

    Attributes:
        T: tokens.
        reverse: from the last token to the first.
        adjoint: the state is a gradient: it leaves a token before it decays, rather than after.
        segment: chunks per segment.
        pieces: pieces per segment.
    """

    T: int
    reverse: bool
    adjoint: bool
    segment: int
    pieces: int

    @property
    def chunks(self) -> int:
        """Chunks of a sequence."""
        return -(-self.T // CHUNK)

    @property
    def segments(self) -> int:
        """Segments of a sequence."""
        return -(-self.chunks // self.segment)

    def tokens(self, i_p: Any) -> Any:
        """Tokens of a segment."""
        first = self._first(i_p, self.segment, self.segments)
        return jnp.minimum(self.T - first * CHUNK, self.segment * CHUNK)

    def of_segment(self, i_p: Any) -> _Range:
        """The chunks of a segment."""
        return _Range(self, self._first(i_p, self.segment, self.segments), self.segment)

    def of_piece(self, i_p: Any, i_f: Any) -> _Range:
        """The chunks of a piece of a segment; there may be none."""
        size = self.segment // self.pieces
        first = self._first(i_p, self.segment, self.segments) + self._first(i_f, size, self.pieces)
        return _Range(self, first, size)

    def first_piece(self, log2_decay: Any) -> Any:
        """The first piece of a segment of which anything is left at the segment's end."""
        piece = self.segment // self.pieces * CHUNK
        return jnp.maximum(self.pieces - 1 - _horizon(log2_decay) // piece, 0)

    def _first(self, i: Any, size: int, count: int) -> Any:
        return (count - 1 - i if self.reverse else i) * size


class _Range:
    """Some consecutive chunks."""

    def __init__(self, walk: Walk, first: Any, size: int):
        self.walk, self.first = walk, first
        self.count = jnp.clip(walk.chunks - first, 0, size)

    def start(self, i: Any) -> Any:
        """The first token of a chunk."""
        return (self.first + (self.count - 1 - i if self.walk.reverse else i)) * CHUNK

    def length(self, i: Any) -> Any:
        """The tokens of a chunk."""
        return jnp.minimum(self.walk.T - self.start(i), CHUNK)


def _horizon(log2_decay):
    """How many tokens back anything is left."""
    return jnp.minimum(_UNDERFLOW / jnp.maximum(-log2_decay, 1e-7), 2.0**30).astype(jnp.int32)


def _log2_decay(gamma):
    # A finite stand-in for -inf, so that no steps of it are no decay: exp2 of either is 0.
    return jnp.maximum(gamma, -1e4) * math.log2(math.e)


def _weights(walk, log2_decay, n):
    """``(enter, leave)`` ``[CHUNK]`` of a chunk of n tokens: from its start to a token, from a token to its end."""
    row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=_LAYOUT.reduce(1))
    to, after = (n - row, row) if walk.reverse else (row + 1, n - 1 - row)
    if walk.adjoint:
        to, after = to - 1, after + 1
    # Rows past the end hold zeros, and what they give is never read: any finite weight will do for them.
    enter, leave = (jnp.exp2(log2_decay * jnp.maximum(x, 0).astype(jnp.float32)) for x in (to, after))
    return enter, leave


def _rows(x, columns):
    """A factor per row, for all columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def _smem(dtype, *shape):
    return plgpu.SMEM(shape, dtype, transforms=_TILES if jnp.dtype(dtype).itemsize == 2 else _TILES_FLOAT32)


def _zeros(*shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _LAYOUT)


def _ring(first, last, stages, full, empty, load):
    """The memory warpgroup's loop: fill the stages in turn, each as soon as everyone is done with it.

    ``load(i, slot, barrier)`` issues the copies of step i. They arrive at ``full[slot]`` by themselves when their bytes
    are there; each compute warpgroup arrives at ``empty[slot]`` when it needs them no more. Every completion of a
    barrier is waited for, those of the last round too.
    """

    @pl.loop(first, last)
    def _(i):
        slot = lax.rem(i - first, stages)

        @pl.when(i - first >= stages)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        load(i, slot, full.at[slot])

    @pl.loop(jnp.maximum(last - stages, first), last)
    def _(i):
        plgpu.barrier_wait(empty.at[lax.rem(i - first, stages)])


def _registers(warpgroups, n, action):
    """Move registers from the memory warpgroup to the compute warpgroups; a single one has all it can use anyway."""
    if warpgroups > 1:
        plgpu.set_max_registers(n, action=action)


def _axis(name):
    """A name for an axis of the grid that no axis of a user's mesh has: that would be taken for it."""
    return f"keraunos.{name}"


def _launch(body, arrays, *, name, grid, warpgroups, out_type, scratch_types):
    """Run a kernel on arrays (None: left out).

    ``grid``: its sizes; programs side by side differ in the last index. ``body(indices, warpgroup, *references)``.
    """
    arrays = [x for x in arrays if x is not None]

    def program(*refs):
        # One axis of CUDA's: the others end at 65,535.
        rest, indices = lax.axis_index(_axis("program")), list[Any]()
        for size in reversed(grid):
            indices.insert(0, lax.rem(rest, size))
            rest = lax.div(rest, size)
        body(indices, lax.axis_index(_axis("warpgroup")), *refs)

    kernel = plgpu.kernel(
        program, out_type=out_type, scratch_types=scratch_types, kernel_name=f"linear_attention_{name}",
        grid=(math.prod(grid),), grid_names=(_axis("program"),), num_threads=warpgroups, thread_name=_axis("warpgroup"),
        # No barriers of the compiler's own: each place below where one warp may not overtake another says so.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )  # fmt: skip
    # Inside shard_map, types say over which axes of the mesh a value varies. Accumulators lose that, and then the
    # loops' types do not match: the kernel is traced for plain arrays.
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    results = jaxpr_as_fun(jax.make_jaxpr(kernel)(*plain))(*arrays)
    axes = frozenset().union(*map(varying, arrays))
    return [vary(x, axes) for x in results]


def most_stages(K: int, V: int, output: Any) -> int:
    """How many stages of ``scan``'s ring fit into shared memory."""
    state, chunk = K * V * 2, CHUNK * V
    rest = _SHARED - state - chunk * 2 - 2 * chunk * jnp.dtype(output).itemsize
    return rest // (CHUNK * (2 * K + V) * 2)


def scan(a, b, c, gamma, starts, *, H, walk, scale_in, scale_out, output, final, transposed, stages):
    """One walk with queries a, keys b, values c: ``(output [B, T, H, V], final state [B, H, K, V] or None)``.

    Args:
        a, b, c: ``[B, T, heads, K]``, ``[B, T, heads, K]``, ``[B, T, heads, V]``; heads divide H; rows past T are zero.
        gamma: ``[B, H]``, the log of the decay.
        starts: ``[B, segments, H, K, V]`` float32, or None: zeros (one segment only).
        transposed: starts are ``[B, segments, H, V, K]``.
        scale_in: factor of what enters the state; scale_out: of what is read from it; outputs have both.
        output: dtype of the output.
        final: the final state is wanted.
        stages: stages of the ring.
    """
    (B, rows, _, K), V, dtype = a.shape, c.shape[-1], a.dtype
    W = V // COLUMNS
    split = [H // x.shape[2] for x in (a, b, c)]

    def body(indices, i_w, *refs):
        i_b, i_p, i_h = indices
        a_ref, b_ref, c_ref, gamma_ref = refs[:4]
        rest = list(refs[4:])
        starts_ref: Any = None if starts is None else rest.pop(0)
        o_ref = rest.pop(0)
        final_ref: Any = rest.pop(0) if final else None
        a_s, b_s, c_s, left_s, state_s, o_s, full, empty = rest
        chunks = walk.of_segment(i_p)
        columns = pl.ds(i_w * COLUMNS, COLUMNS)

        @pl.when(i_w < W)
        def _compute():
            _registers(W, _REGISTERS, "increase")
            g = _log2_decay(gamma_ref[i_b, i_h])
            row, col = (plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), d, layout=_LAYOUT) for d in (0, 1))
            steps = col - row if walk.reverse else row - col
            pairs = jnp.where(steps >= 0, jnp.exp2(g * steps.astype(jnp.float32)) * (scale_in * scale_out), 0.0)
            if starts is None:
                state = _zeros(K, COLUMNS)
            else:
                start, layout = starts_ref.at[i_b, i_p, i_h], plgpu.Layout.WGMMA_TRANSPOSED if transposed else _LAYOUT
                start = start.at[columns].T if transposed else start.at[:, columns]
                state = plgpu.layout_cast(plgpu.load(start, layout=layout, optimized=False), _LAYOUT)
            state_s[i_w] = state.astype(dtype)
            plgpu.commit_smem()

            def step(i, state):
                slot, t, n = lax.rem(i, stages), chunks.start(i), chunks.length(i)
                enter, leave = _weights(walk, g, n)
                out = o_s.at[lax.rem(i, 2), i_w]
                plgpu.barrier_wait(full.at[slot])

                def products(state):
                    def first(scores, o):
                        plgpu.wgmma(scores, a_s.at[slot], b_s.at[slot].T)
                        plgpu.wgmma(o, a_s.at[slot], state_s.at[i_w])
                        # While the tensor cores do that: what of each value is left at the chunk's end.
                        v = plgpu.load(c_s.at[slot, i_w], layout=_LAYOUT).astype(jnp.float32)
                        left_s[i_w] = (v * _rows(leave * scale_in, COLUMNS)).astype(dtype)
                        plgpu.commit_smem()
                        plgpu.wgmma(state, b_s.at[slot].T, left_s.at[i_w])
                        # Of the three products, the last one or two may still be running.
                        return plgpu.wgmma_accumulator_load(scores, wait_n=2), plgpu.wgmma_accumulator_load(o, wait_n=1)

                    accumulators = plgpu.ACC((CHUNK, CHUNK), jnp.float32), plgpu.ACC((CHUNK, COLUMNS), jnp.float32)
                    scores, o = pl.run_scoped(first, *accumulators)
                    scores = (scores * pairs).astype(dtype)

                    def last(o):
                        plgpu.wgmma(o, scores, c_s.at[slot, i_w])

                    # Ends with all products done.
                    o = pl.run_state(last)(plgpu.ACC.init(o * _rows(enter * scale_out, COLUMNS)))
                    plgpu.barrier_arrive(empty.at[slot])
                    # Waits until the output of two chunks ago has left its buffer. Here the warps of the warpgroup
                    # meet, all with their products done: only from now on may state_s and left_s be written again.
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    out[...] = o.astype(output)

                state = pl.run_state(products)(plgpu.ACC.init(state * jnp.exp2(g * n.astype(jnp.float32))))
                state_s[i_w] = state.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out, o_ref.at[i_b, pl.ds(t, CHUNK), i_h, columns])
                return state

            state = lax.fori_loop(0, chunks.count, step, state)
            if final:

                @pl.when(i_p == walk.segments - 1)
                def _():
                    final_ref[i_b, i_h, :, columns] = state

            plgpu.wait_smem_to_gmem(0)

        @pl.when(i_w == W)
        def _memory():
            _registers(W, _REGISTERS_MEMORY, "decrease")
            head_a, head_b, head_c = (i_h // n for n in split)

            def load(i, slot, barrier):
                t = pl.ds(chunks.start(i), CHUNK)
                plgpu.copy_gmem_to_smem(a_ref.at[i_b, t, head_a], a_s.at[slot], barrier)
                plgpu.copy_gmem_to_smem(b_ref.at[i_b, t, head_b], b_s.at[slot], barrier)
                for w in range(W):
                    source = c_ref.at[i_b, t, head_c, pl.ds(w * COLUMNS, COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, c_s.at[slot, w], barrier)

            _ring(0, chunks.count, stages, full, empty, load)

    out_type = [jax.ShapeDtypeStruct((B, rows, H, V), output)]
    if final:
        out_type.append(jax.ShapeDtypeStruct((B, H, K, V), jnp.float32))
    results = _launch(
        body, (a, b, c, gamma, starts), name="scan", out_type=out_type, warpgroups=W + 1,
        grid=(B, walk.segments, H),
        scratch_types=[
            _smem(dtype, stages, CHUNK, K), _smem(dtype, stages, CHUNK, K), _smem(dtype, stages, W, CHUNK, COLUMNS),
            _smem(dtype, W, CHUNK, COLUMNS), _smem(dtype, W, K, COLUMNS), _smem(output, 2, W, CHUNK, COLUMNS),
            # full: one arrival per copy; empty: one per compute warpgroup.
            plgpu.Barrier(num_arrivals=2 + W, num_barriers=stages), plgpu.Barrier(num_arrivals=W, num_barriers=stages),
        ],
    )  # fmt: skip
    return results[0], results[1] if final else None


def local_states(b, c, gamma, *, H, walk, scale_in, stages):
    """The state at the end of each piece, had it started from zero: ``[B, segments - 1, pieces, H, K, V]``.

    Only of pieces that still count at the end of their segment; the others' places are not written. The last segment
    has no successor.
    """
    (B, _, _, K), V, dtype = b.shape, c.shape[-1], b.dtype
    W = V // COLUMNS
    split = [H // x.shape[2] for x in (b, c)]

    def body(indices, i_w, b_ref, c_ref, gamma_ref, local_ref, b_s, c_s, left_s, full, empty):
        i_b, i_p, i_f, i_h = indices
        chunks = walk.of_piece(i_p, i_f)
        g = _log2_decay(gamma_ref[i_b, i_h])
        counts = i_f >= walk.first_piece(g)
        # From this chunk on, something is left at the end of the segment.
        after = (walk.pieces - 1 - i_f) * (walk.segment // walk.pieces)
        first = jnp.clip(chunks.count - 1 + after - _horizon(g) // CHUNK, 0, chunks.count)

        @pl.when(counts & (i_w < W))
        def _compute():
            _registers(W, _REGISTERS, "increase")

            def step(i, state):
                slot, n = lax.rem(i - first, stages), chunks.length(i)
                _, leave = _weights(walk, g, n)
                plgpu.barrier_wait(full.at[slot])
                v = plgpu.load(c_s.at[slot, i_w], layout=_LAYOUT).astype(jnp.float32)
                # Two buffers: when one is written again, every warp has passed the meeting point of the chunk between,
                # and so is done with the product that read it.
                left = left_s.at[lax.rem(i, 2), i_w]
                left[...] = (v * _rows(leave * scale_in, COLUMNS)).astype(dtype)
                plgpu.commit_smem()
                state = state * jnp.exp2(g * n.astype(jnp.float32))

                def write(state):
                    plgpu.wgmma(state, b_s.at[slot].T, left)

                state = pl.run_state(write)(plgpu.ACC.init(state))
                plgpu.barrier_arrive(empty.at[slot])
                return state

            state = lax.fori_loop(first, chunks.count, step, _zeros(K, COLUMNS))
            local_ref[i_b, i_p, i_f, i_h, :, pl.ds(i_w * COLUMNS, COLUMNS)] = state

        @pl.when(counts & (i_w == W))
        def _memory():
            _registers(W, _REGISTERS_MEMORY, "decrease")

            def load(i, slot, barrier):
                t = pl.ds(chunks.start(i), CHUNK)
                plgpu.copy_gmem_to_smem(b_ref.at[i_b, t, i_h // split[0]], b_s.at[slot], barrier)
                for w in range(W):
                    source = c_ref.at[i_b, t, i_h // split[1], pl.ds(w * COLUMNS, COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, c_s.at[slot, w], barrier)

            _ring(first, chunks.count, stages, full, empty, load)

    out_type = [jax.ShapeDtypeStruct((B, walk.segments - 1, walk.pieces, H, K, V), jnp.float32)]
    return _launch(
        body, (b, c, gamma), name="states", out_type=out_type, warpgroups=W + 1,
        grid=(B, walk.segments - 1, walk.pieces, H),
        scratch_types=[
            _smem(dtype, stages, CHUNK, K), _smem(dtype, stages, W, CHUNK, COLUMNS), _smem(dtype, 2, W, CHUNK, COLUMNS),
            plgpu.Barrier(num_arrivals=1 + W, num_barriers=stages), plgpu.Barrier(num_arrivals=W, num_barriers=stages),
        ],
    )[0]  # fmt: skip


def combine(local, gamma, initial, *, walk):
    """The state that each segment starts from, ``[B, segments, H, K, V]``, from the pieces' own and the initial one.

    One program per head and 16 rows of the state: parallel over the state, in order over the pieces.
    """
    B, _, _, H, K, V = local.shape
    rows, stages = 16, 8
    layout = plgpu.Layout.WG_STRIDED((rows, V), vec_size=4)

    def body(indices, i_w, *refs):
        i_b, i_h, i_r = indices
        local_ref, gamma_ref = refs[:2]
        initial_ref: Any = None if initial is None else refs[2]
        starts_ref, tiles, full, empty = refs[-4:]
        g = _log2_decay(gamma_ref[i_b, i_h])
        first = walk.first_piece(g)
        count = walk.pieces - first
        part = pl.ds(i_r * rows, rows)

        @pl.when(i_w == 0)
        def _compute():
            def store(i_p, state):
                starts_ref[i_b, i_p, i_h, part] = state

            def segment(i_p, state):
                store(i_p, state)
                state = state * jnp.exp2(g * walk.tokens(i_p).astype(jnp.float32))

                def piece(n, state):
                    i = i_p * count + n
                    slot = lax.rem(i, stages)
                    later = (count - 1 - n) * (walk.segment // walk.pieces * CHUNK)
                    plgpu.barrier_wait(full.at[slot])
                    tile = plgpu.load(tiles.at[slot], layout=layout)
                    state = state + tile * jnp.exp2(g * later.astype(jnp.float32))
                    plgpu.barrier_arrive(empty.at[slot])
                    return state

                return lax.fori_loop(0, count, piece, state)

            if initial is None:
                state = plgpu.layout_cast(jnp.zeros((rows, V), jnp.float32), layout)
            else:
                state = plgpu.load(initial_ref.at[i_b, i_h, part], layout=layout, optimized=False)
            store(walk.segments - 1, lax.fori_loop(0, walk.segments - 1, segment, state))

        @pl.when(i_w == 1)
        def _memory():
            def load(i, slot, barrier):
                i_p, i_f = i // count, first + lax.rem(i, count)
                plgpu.copy_gmem_to_smem(local_ref.at[i_b, i_p, i_f, i_h, part], tiles.at[slot], barrier)

            _ring(0, (walk.segments - 1) * count, stages, full, empty, load)

    return _launch(
        body, (local, gamma, initial), name="combine", warpgroups=2,
        out_type=[jax.ShapeDtypeStruct((B, walk.segments, H, K, V), jnp.float32)],
        grid=(B, H, K // rows),
        scratch_types=[
            plgpu.SMEM((stages, rows, V), jnp.float32), plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
    )[0]  # fmt: skip
