"""The gradients of softmax attention in Triton: launches, from shapes and dtypes only.

The mean of each query's gradient comes first, then the gradients of keys and values by walks over queries, and those of
queries by walks over keys; a bias has a kernel of its own, which goes over the heads that share it, and the sinks' come
as sums of blocks of queries. ``block_q`` are the rows of the tile that a program keeps, ``block_k`` those that it walks
over: in the kernel of keys and values, keys and queries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.device import limits
from keraunos.kernels.device.limits import ENOUGH, LITTLE
from keraunos.kernels.host.arrays import dtype_of, pow2
from keraunos.kernels.softmax_attention.contract import Args, Options
from keraunos.kernels.softmax_attention.shared import gradients
from keraunos.kernels.softmax_attention.shared.call import Call
from keraunos.ops.invocation import Config, Invocation

# Queries whose means one program makes; tiles of the bias's gradient.
_MEANS, _BIAS = 64, 64


def backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args`` from that of the output."""
    w, (output, lse), do = Call(args, opts), residuals, grads[0]
    mean, dsinks = means(w, output, do, lse)
    given = dict(w.rows(q=args.query, k=args.key, v=args.value, do=do), do=do, lse=lse, mean=mean)
    # Its tiles and blocks are of two arrays each, so one stage fewer fits.
    options = w.cfg.num_warps, max(w.cfg.num_stages - 1, 1)
    rows, columns = w.cfg.block_q, w.cfg.block_k
    made = dict(dk=(tuple(args.key.shape), w.dtype), dv=(tuple(args.value.shape), w.dtype))
    heads = w.together(do, columns)
    own = dict(given, BT=columns, BS=rows, **heads, flags=w.mask_flags(args.mask, columns, rows),
               spreads=w.spreads(args.query_segments, columns // max(heads["N"], 1)))
    programs = w.B * w.G * -(-w.S // rows)
    if max(w.K, w.V) > (64 if w.dtype == "float32" else 128):
        # The two sums do not fit the registers at once.
        dk = w.launch(gradients.key_kernel, programs, {**made, "dv": None}, *options, **own, DK=True, DV=False)[0]
        dv = w.launch(gradients.key_kernel, programs, {**made, "dk": None}, *options, **own, DK=False, DV=True)[1]
    else:
        dk, dv = w.launch(gradients.key_kernel, programs, made, *options, **own, DK=True, DV=True)
    (dq,) = w.launch(
        gradients.query_kernel, w.B * w.H * -(-w.T // rows), dict(dq=(tuple(args.query.shape), w.dtype)), *options,
        **given, BT=rows, BS=columns, flags=w.mask_flags(args.mask, rows, columns),
        spreads=w.spreads(args.key_segments, columns),
    )
    dbias = bias_gradient(w, do, lse, mean) if opts.needs(args, "bias") else None
    return Args(dq, dk, dv, dbias, dsinks)


def bias_gradient(w: Call, do: Array, lse: Array, mean: Array) -> Array:
    """The gradient of the bias."""
    args, shape = w.args, tuple(w.args.bias.shape)
    # Where products take their operands from registers, these hold no larger tiles.
    block = _BIAS if frontends.shared_memory(args.query) >= ENOUGH else _BIAS // 2
    return w.launch(
        gradients.bias_kernel, shape[0] * shape[1] * -(-w.T // block) * -(-w.S // block),
        dict(dbias=(shape, dtype_of(args.bias))), 8 if max(w.K, w.V) > 128 else 4,
        **w.rows(q=args.query, k=args.key, v=args.value, do=do), do=do, lse=lse, mean=mean, SHARED=shape[0] < w.B,
        BT=block, BS=block,
    )[0]


def means(w: Call, output: Array, do: Array, lse: Array) -> tuple[Any, Any]:
    """Each query's mean, and the gradient of the sinks."""
    args, NT = w.args, -(-w.T // _MEANS)
    mean, parts = w.launch(
        gradients.mean_kernel, w.B * w.H * NT,
        dict(mean=((w.B, w.H, w.T), "float32"), dsinks=((w.B, w.H, NT, w.sinks), "float32") if w.sinks else None),
        o=output, do=do, lse=lse, **w.rows(do=do), BT=_MEANS,
    )
    if args.sinks is None:
        return mean, None
    RN = w.known["RN"]
    heads, rows = w.H // RN, RN * NT
    (dsinks,) = w.launch(
        gradients.sum_kernel, heads if w.sinks else 0, dict(y=(tuple(args.sinks.shape), dtype_of(args.sinks))),
        x=parts if w.sinks else lse, stride_b=w.H * NT * w.sinks, stride_g=rows * w.sinks, n=rows,
        N=w.sinks, BR=max(min(pow2(rows), 2048 // pow2(w.sinks)), 1),
    )
    return mean, dsinks


def unsupported(inv: Invocation) -> str | None:
    """Why Triton cannot run the call, or None."""
    if reason := limits.cannot_run(inv, inv.arrays["query"][0], inv.options["softmax_dtype"]):
        return reason
    if {"bias", "mask"} <= set(inv.arrays):
        return "takes a bias or a mask, not both; add the mask to the bias as -inf"
    exact, wide = inv.arrays["query"][0] == "float32", max(inv.dims["K"], inv.dims["V"]) > 128
    if exact and wide and "bias" in inv.arrays and inv.shared_memory < ENOUGH:
        # The kernel spills 6 KB and more of each thread, whatever its tile: such code has been wrong before.
        return "takes no bias in float32 with head dims over 128 on this GPU, whose assembler runs out of registers"
    if any(inv.arrays.get(name, ("",))[0].startswith("u") for name in ("query_segments", "key_segments")):
        return "takes segment ids of signed integers"
    return None


def heuristic(inv: Invocation, cfg: Config) -> Config:
    """Tiles of 64 rows by blocks of 64, of which two programs fit a multiprocessor: one's exponentials, the other's
    products. Smaller blocks, or one program of two warpgroups, where registers ask for it.
    """
    wide = max(inv.dims["K"], inv.dims["V"]) > 128
    enough, little = inv.shared_memory >= ENOUGH, inv.shared_memory < LITTLE
    if inv.arrays["query"][0] == "float32":
        # Its products are of three parts of each operand; from larger tiles ptxas makes wrong code.
        rows, columns, num_warps, num_stages = (16, 16, 4, 2) if wide else (32, 16, 4, 2) if little else (64, 16, 4, 3)
    elif enough:
        rows, columns, num_warps, num_stages = (128, 32, 8, 3) if wide else (64, 64, 4, 3)
    else:
        # By occupancy: nothing was measured on such GPUs. The gradients of keys are what must fit, and with a bias they
        # need room for it too.
        rows, num_warps, num_stages = 64, 4, 2 if wide or little else 3
        columns = 16 if wide and "bias" in inv.arrays else 32 if wide or little else 64
    return replace(cfg, block_q=rows, block_k=columns, num_warps=num_warps, num_stages=num_stages)
