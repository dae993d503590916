"""Softmax attention in Triton, for JAX and PyTorch on GPUs: the host code, from shapes and dtypes only.

One kernel walks over blocks of keys with the online softmax, and keeps each query's sum. ``block_q`` are the queries of
the tile that a program keeps, ``block_k`` the keys of a block; ``shared/backward.py`` makes the gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.host.arrays import dtype_of
from keraunos.kernels.softmax_attention.contract import Args, Options, kernel
from keraunos.kernels.softmax_attention.shared.backward import backward, heuristic, unsupported
from keraunos.kernels.softmax_attention.shared.call import LOG2E, Call, axes_with_residuals, lse_spec, output_spec
from keraunos.kernels.softmax_attention.triton.forward import forward_kernel
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q", "block_k", "num_warps", "num_stages")


def forward(args: Args, opts: Options) -> tuple[tuple[Array, None], tuple]:
    """``((output, None), (output, the log of each query's sum, or its top and its sum))``."""
    w = Call(args, opts)
    if min(w.cfg.block_q, w.cfg.block_k) < 16:
        raise ValueError(f"attention: block_q = {w.cfg.block_q}, block_k = {w.cfg.block_k}; expected at least 16 on "
                         "triton, whose products take no smaller tiles")
    BT, BS = w.cfg.block_q, w.cfg.block_k
    spreads = w.spreads(args.key_segments, BS)
    output, lse = w.launch(
        forward_kernel, w.B * w.H * -(-w.T // BT), dict(o=output_spec(args, opts), lse=lse_spec(args, opts)),
        w.cfg.num_warps, w.cfg.num_stages, **w.rows(q=args.query, k=args.key, v=args.value), spreads=spreads,
        flags=w.mask_flags(args.mask, BT, BS), BT=BT, BS=BS, BOUNDED=w.bounded,
    )
    return (output, None), (output, lse)


forward.residuals = dict(output=frontends.OUTPUT, lse=lse_spec)  # type: ignore[attr-defined]


def candidates(inv: Invocation, cfg: Config) -> list[Config]:
    """Tiles of 64 and 128 rows; of float32 and of wide heads only what their registers hold."""
    wide = max(inv.dims["K"], inv.dims["V"]) > 128
    if inv.arrays["query"][0] == "float32":
        tiles = {(16, 16, 4), (16, 16, 2)} if wide else {(64, 16, 4), (32, 32, 4), (64, 32, 8)}
    elif wide:
        tiles = {(128, 32, 8), (64, 32, 4)}
    else:
        tiles = {(128, 64, 8), (128, 32, 8), (64, 64, 4), (64, 32, 4)}
    return [
        replace(cfg, block_q=rows, block_k=columns, num_warps=warps, num_stages=stages)
        for rows, columns, warps in sorted(tiles)
        for stages in (2, 3)
    ]


def part(args: Args, opts: Options) -> tuple[Any, Any, Any]:
    """See ``contract.py``."""
    _, (output, lse) = forward(args, opts)
    if lse.ndim == 4:
        return output, lse[:, :, 0], lse[:, :, 1]
    frontend = frontends.of(lse)
    return output, lse / LOG2E, frontend.zeros(tuple(lse.shape), "float32", lse) + 1


def part_gradients(args: Args, whole: tuple[Any, Any, Any], doutput: Array, opts: Options) -> Args:
    """See ``contract.py``."""
    output, top, total = whole
    frontend = frontends.of(top)
    exact = dtype_of(args.query) == "float32"
    lse = frontend.stack([top, total], 2) if exact else (top + frontend.xp.log(total)) * LOG2E
    return backward(args, (output, lse), (doutput, None), opts)


attention = replace(kernel(
    "triton", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates,
    unsupported=unsupported, forms_weights=False, letters=axes_with_residuals,
), parts=(part, part_gradients))
