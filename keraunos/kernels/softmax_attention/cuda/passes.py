"""Softmax attention on Hopper GPUs, in Gluon; Triton's kernels make gradients of wide heads, and those of biases.

Forward: ``block_q`` queries are a tile, half for each multiplying partition, ``block_k`` keys a block of the walk, and
``num_stages`` blocks have memory, or as many as fit. Where ``block_q`` is 64, as heuristics have it for few queries, a
tile has those of all heads that share keys, and programs share the keys out. Backward: tiles are of one size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.gluon import cannot_run, was_not_measured
from keraunos.kernels.host.arrays import strides_of
from keraunos.kernels.softmax_attention.contract import Args, Options, describe, is_for_libraries, kernel
from keraunos.kernels.softmax_attention.cuda.decode import decode_kernel, join_kernel
from keraunos.kernels.softmax_attention.cuda.forward import forward_kernel, zero_kernel
from keraunos.kernels.softmax_attention.cuda.gradients import gradients_kernel, queries_kernel, range_kernel
from keraunos.kernels.softmax_attention.shared import backward as triton
from keraunos.kernels.softmax_attention.shared.call import LOG2E, Call, axes_with_residuals, lse_spec, output_spec
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q", "block_k", "num_stages")

# Programs that run at once; registers of a thread that multiplies, and of one that copies.
_PROGRAMS, _REGISTERS, _OTHERS = 132, 240, 24
# Rows of a multiple of so many values begin at multiples of 16 bytes.
_ROW = 8
# Bytes of shared memory that barriers take at most, and what makes blocks begin where they must.
_BARRIERS = 2048
# Keys of a block of the gradients, of which as many tiles of queries are in memory.
_KEYS, _STAGES = 128, 2
# So many blocks of keys keep a launch of the gradients busy: a call that has more makes them for some heads at a time.
_ENOUGH_BLOCKS = 4096
# Rows of a tile of few queries, of all heads that share keys.
_ROWS = 64
# Blocks that take as long as a program's beginning and end, about, and the fewest that a program is started for.
_START, _LEAST = 4, 2
# Their blocks of keys, and stages, for each tile's dimensions.
_FEW = {64: (128, 3), 128: (64, 3), 256: (64, 3)}
# Zeros that a program writes.
_ZEROS = 1024
# What was measured to be faster has so many queries and keys at least; so many keys where queries are few.
_LONG, _CACHE = 4096, 2048
# Arrays with which "auto" leaves calls to others: no faster here, or where a mask hides whole blocks, half as fast.
_SLOWER = {"bias", "mask", "seed"}
# From this cap on a tangent next to 0 is computed to more digits.
_LARGE_CAP = 1000.0


def _tile(K: int, V: int) -> int:
    """The dimensions of a tile."""
    return next(size for size in (64, 128, 256) if size >= max(K, V))


def _memory(cfg: Any, BD: int) -> tuple[int, int]:
    """Stages and tiles of queries that have memory.

    Raises:
        ValueError: there is none for the configuration's blocks.
    """
    held = 1 if BD == 256 or cfg.block_q == _ROWS else 2
    left = frontends.SHARED_MEMORY - _BARRIERS - 2 * held * cfg.block_q * BD
    stages = min(max(cfg.num_stages, 2), left // (4 * cfg.block_k * BD))
    if cfg.block_q not in (_ROWS, 128, 256) or cfg.block_k not in (64, 128) or stages < 2:
        raise ValueError(f"attention: block_q = {cfg.block_q}, block_k = {cfg.block_k}; expected 64, 128 or 256, and 64"
                         f" or 128, on cuda, in the shared memory with tiles of {BD} dimensions")
    return stages, held


def forward(args: Args, opts: Options) -> tuple[tuple[Array, None], tuple]:
    """``((output, None), (output, the log of each query's sum, base 2))``."""
    if not args.key.shape[1]:
        return _no_keys(args, opts)
    args = args._replace(**{name: frontends.of(args.query).aligned(getattr(args, name))
                            for name in ("query", "key", "value")})
    w = Call(args, opts)
    if w.cfg.block_q == _ROWS:
        return _few(w)
    rows, block, BD = w.cfg.block_q, w.cfg.block_k, _tile(w.K, w.V)
    stages, held = _memory(w.cfg, BD)
    tiles = w.B * w.H * -(-w.T // rows)
    taken = None
    if tiles > _PROGRAMS and (w.flags["LEFT"] or w.flags["RIGHT"] or w.masks["SEGMENTS"] or w.masks["MASK"]):
        # Some tiles see more keys than others.
        taken = _zeros(1, args.query)
    outputs = dict(o=output_spec(args, opts), lse=lse_spec(args, opts), count=taken if taken is None else "taken")
    output, lse, _ = w.launch(
        forward_kernel, min(tiles, _PROGRAMS), outputs, flags=w.mask_flags(args.mask, rows, block),
        spreads=w.spreads(args.key_segments, block), taken=taken, M=w.H // w.G, ROWS=rows // 2, N=block, BD=BD,
        STAGES=stages, HELD=held, REGISTERS=_REGISTERS, OTHERS=_OTHERS, **_own(w),
    )
    return (output, None), (output, lse)


forward.residuals = dict(output=frontends.OUTPUT, lse=lse_spec)  # type: ignore[attr-defined]


def _no_keys(args: Args, opts: Options) -> tuple[tuple[Array, None], tuple]:
    """:func:`forward` where queries see nothing, and have no sum."""
    arrays = frontends.of(args.query)
    output, lse = (arrays.zeros(*spec(args, opts), args.query) for spec in (output_spec, lse_spec))
    return (output, None), (output, lse + math.inf)


def _few(w: Call) -> tuple[tuple[Array, None], tuple]:
    """:func:`forward` in tiles of all heads that share keys, whose keys programs share out.

    Raises:
        ValueError: something comes that their kernel does not take.
    """
    args, opts, block, BD, R = w.args, w.opts, w.cfg.block_k, _tile(w.K, w.V), w.H // w.G
    if w.masks["BIAS"] or w.masks["MASK"] or opts.dropout:
        raise ValueError(f"attention: block_q = {_ROWS}; expected 128 or 256 on cuda with biases, masks and dropout")
    stages, _ = _memory(w.cfg, BD)
    tiles = w.B * w.G * -(-w.T * R // _ROWS)
    own = 4 * stages * block * BD + 2 * _ROWS * BD + _BARRIERS
    programs = _PROGRAMS * ((frontends.SHARED_MEMORY + _BARRIERS) // own)
    parts = _parts(tiles, -(-_reach(w) // block), programs, w.flags | w.masks)
    wanted = dict(o=output_spec(args, opts), lse=lse_spec(args, opts))
    found = dict(o=((w.B, w.H, w.T, parts, w.V), "float32"), lse=((w.B, w.H, w.T, parts), "float32"))
    output, lse = w.launch(
        decode_kernel, tiles * parts, found if parts > 1 else wanted, spreads=w.spreads(args.key_segments, block),
        parts=parts, PARTS=parts > 1, N=block, BD=BD, STAGES=stages, **_own(w),
    )
    if parts > 1:
        output, lse = w.launch(join_kernel, w.B * w.H * w.T, wanted, part_o=output, part_lse=lse, parts=parts, BD=BD,
                               AT_ONCE=8192 // BD, **_own(w))
    return (output, None), (output, lse)


def _reach(w: Call) -> int:
    """How many keys any query sees at most."""
    left, right = w.window["left"], w.window["right"]
    seen = w.S
    if w.flags["RIGHT"] and w.flags["LEFT"]:
        seen = min(seen, w.T + left + right)
    if w.flags["RIGHT"] and not w.flags["OFFSET"]:
        seen = min(seen, w.T + right)
    return max(seen, 0)


def _parts(tiles: int, blocks: int, programs: int, flags: dict[str, Any]) -> int:
    """Into how many parts the blocks of keys of each tile are divided, where so many programs run at once.

    All programs take about as long; where tiles may see more keys or fewer, there are more, to be taken as they come.
    """
    most = max(min(-(-4 * programs // max(tiles, 1)), blocks // _LEAST), 1)
    if flags["SEGMENTS"] or (flags["OFFSET"] and not (flags["LEFT"] and flags["RIGHT"])):
        return most

    def time(parts: int) -> int:
        return -(-tiles * parts // programs) * (-(-blocks // parts) + _START)

    return min(range(1, most + 1), key=time)


def _are_few(inv: Invocation) -> bool:
    """Whether a tile has the queries of all heads that share keys, and nothing comes that its kernel does not take."""
    return inv.dims["T"] * inv.dims["H"] // inv.dims["G"] <= _ROWS and not {"bias", "mask", "seed"} & set(inv.arrays)


def _strides(**arrays: Array) -> dict[str, int]:
    """``stride_<name><axis>`` of arrays [B, T, heads, dim]; where there is one only, it may be anything."""
    return {f"stride_{name}{axis}": stride if size > 1 else _ROW for name, x in arrays.items()
            for axis, stride, size in zip("bth", strides_of(x), x.shape, strict=False)}


def _own(w: Call) -> dict[str, Any]:
    """The arguments that Triton's kernels take otherwise."""
    args, opts = w.args, w.opts
    # Of products, twice the argument of the cap's tangent, base 2; which tangent, 0: there is no cap.
    inner, cap = 0.0, 0
    if opts.soft_cap:
        inner, cap = 2 * LOG2E * opts.softmax_scale / opts.soft_cap, 2 if opts.soft_cap > _LARGE_CAP else 1
    return dict(_strides(q=args.query, k=args.key, v=args.value), sinks=args.sinks if w.sinks else None, inner=inner,
                CAP=cap)


def backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args`` from that of the output."""
    if _are_for_triton(args):
        return triton.backward(args, residuals, grads, _of_triton(args, opts))
    (output, lse), aligned = residuals, frontends.of(args.query).aligned
    args, do = args._replace(query=aligned(args.query), key=aligned(args.key), value=aligned(args.value)), grads[0]
    w = Call(args, opts)
    mean, dsinks = triton.means(w, output, do, lse)
    do = aligned(do)
    BD = _tile(w.K, w.V)
    BT = 8192 // BD
    NT, NS = -(-w.T // BT), -(-w.S // _KEYS)
    ranges = None
    if w.masks["SEGMENTS"]:
        (ranges,) = w.launch(range_kernel, w.B * NS, dict(ranges=((w.B, 4, NS), "int32")), 1,
                             spreads=w.spreads(args.query_segments, BT), NS=NS, NT=NT, N=_KEYS, BT=BT)
    given = dict(
        _own(w), **_strides(do=do), ranges=ranges, do=do, lse=lse, mean=mean, N=_KEYS, BT=BT, BD=BD, STAGES=_STAGES,
        unit=(-1 if w.negative else 1) * w.numbers["unit"], REGISTERS=_REGISTERS, OTHERS=_OTHERS,
    )
    R, dq, dk, dv = w.H // w.G, None, None, None
    for first, heads in _heads_at_once(w.B * w.G, NS):
        # Without a limit on the right, a head's blocks begin one after the other: programs are busy with four heads.
        together = 1 if w.flags["RIGHT"] else math.gcd(4, first, heads)
        outputs = dict(dq=((heads * R, w.T, w.K), "float32"),
                       dk="dk_given" if first else (tuple(args.key.shape), w.dtype),
                       dv="dv_given" if first else (tuple(args.value.shape), w.dtype), counted="counts")
        sums, dk, dv, counted = w.launch(
            gradients_kernel, min(heads * NS, _PROGRAMS), outputs, **given, counts=_zeros(1 + heads * R * NT, do),
            dk_given=dk if first else args.key, dv_given=dv if first else args.value, FIRST=first, HEADS=heads,
            M=together,
        )
        (dq,) = w.launch(
            queries_kernel, heads * R * NT, dict(dq="dq_given" if first else (tuple(args.query.shape), w.dtype)),
            sums=sums, counted=counted, dq_given=dq if first else do, NT=NT, first=first * R, BT=BT, BK=BD,
        )
    dbias = triton.bias_gradient(w, do, lse, mean) if opts.needs(args, "bias") else None
    return Args(dq, dk, dv, dbias, dsinks)


def _heads_at_once(heads: int, blocks: int) -> list[tuple[int, int]]:
    """``(first, number)`` of the heads of keys in each launch of the gradients: their queries' sums take memory."""
    number = max(-(-_ENOUGH_BLOCKS // blocks), 1)
    number += -number % 4  # which programs take together
    return [(first, min(number, heads - first)) for first in range(0, heads, number)]


def _are_for_triton(args: Args) -> bool:
    """Whether Triton's kernels make the gradients: those of wide heads, and of nothing."""
    return any(0 in x.shape or x.shape[3] > 128 for x in (args.query, args.key, args.value))


def _zeros(n: int, like: Array) -> Array:
    """n zeros that no other launch has, as programs will count with them."""
    return frontends.launch(zero_kernel, (-(-n // _ZEROS),), dict(like=like, n=n), dict(zeros=((n,), "int32")),
                            dict(N=_ZEROS), num_warps=1, num_stages=1)[0]


def _of_triton(args: Args, opts: Options) -> Options:
    """The options of Triton's kernels, with their configuration."""
    return opts._replace(cfg=triton.heuristic(describe(args), Config()))


def unsupported(inv: Invocation) -> str | None:
    """Why these kernels cannot run the call, or None."""
    if reason := cannot_run(inv):
        return reason
    if reason := triton.unsupported(inv):
        return reason
    K, V = inv.dims["K"], inv.dims["V"]
    if K % _ROW or V % _ROW:
        return ("takes head dims that are multiples of 8: rows must begin at multiples of 16 bytes; the call has"
                f" K = {K}, V = {V}")
    for name in ("query_segments", "key_segments", "query_offset"):
        if inv.arrays.get(name, ("int32",))[0] not in ("int32", "int64"):
            return "takes segment ids and offsets of int32 and int64"
    return None


def loses(inv: Invocation) -> str | None:
    """Why ``"auto"`` should prefer others, or None."""
    if reason := was_not_measured():
        return reason
    if _SLOWER & set(inv.arrays):
        return "was not measured to be faster with biases, boolean masks and dropout"
    plain = is_for_libraries(inv.arrays, inv.arrays["query"][0], inv.dims, inv.options)
    if _are_few(inv):
        if inv.dims["S"] < _CACHE:
            return f"was measured to be faster with few queries from {_CACHE} keys on"
        alone = plain and inv.dims["T"] == 1 and inv.framework == "torch"
        return "leaves one query that sees all keys to PyTorch's kernels, which are as fast" if alone else None
    if min(inv.dims["T"], inv.dims["S"]) < _LONG:
        return f"was measured to be faster from {_LONG} queries and keys on"
    if plain:
        return "leaves plain and causal calls to the vendor's kernels, which have faster gradients"
    return None


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """Blocks of 128 keys; of 64 where shared memory, or registers with a bias or a mask, have no room for more.

    With few queries several programs share a multiprocessor's memory, of which copies in flight have most.
    """
    if _are_few(inv):
        block, stages = _FEW[_tile(inv.dims["K"], inv.dims["V"])]
        return replace(cfg, block_q=_ROWS, block_k=block, num_stages=stages)
    small = _tile(inv.dims["K"], inv.dims["V"]) == 256 or bool({"bias", "mask"} & set(inv.arrays))
    return replace(cfg, block_q=128, block_k=64 if small else 128, num_stages=4 if small else 2)


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """The tiles that fit registers and shared memory."""
    BD = _tile(inv.dims["K"], inv.dims["V"])
    tiles = {64: ((128, 128, 2), (128, 128, 3), (128, 64, 4), (256, 64, 3)), 128: ((128, 128, 2), (128, 64, 4)),
             256: ((128, 64, 2),)}[BD]
    if _are_few(inv):
        tiles = tiles[:1] + {64: ((64, 128, 3), (64, 64, 6)), 128: ((64, 64, 3), (64, 128, 3)), 256: ((64, 64, 3),)}[BD]
    return [replace(cfg, block_q=rows, block_k=block, num_stages=stages) for rows, block, stages in tiles]


attention = kernel(
    "cuda", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates,
    unsupported=unsupported, forms_weights=False, letters=axes_with_residuals,
)
preferred_attention = replace(attention, loses=loses)
