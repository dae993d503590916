"""Softmax attention in Triton, for JAX and PyTorch on GPUs: the host code, from shapes and dtypes only.

Forward: one kernel walks over blocks of keys with the online softmax, and keeps each query's sum. Backward:
the mean of each query's gradient, then the gradients of keys and values by walks over queries, and those of queries by
walks over keys; a bias has a kernel of its own, which goes over the heads that share it, and the sinks' come as sums of
blocks of queries. ``block_q`` are the rows of the tile that a program keeps, ``block_k`` those that it walks over: in
the kernel of keys and values, keys and queries.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.softmax_attention.contract import FAR, Args, Options, axes, kernel
from keraunos.kernels.softmax_attention.triton import gradients, kernels
from keraunos.ops.invocation import Config, Invocation

FIELDS = ("block_q", "block_k", "num_warps", "num_stages")

# With TRITON_INTERPRET=1 kernels run on the CPU, in NumPy.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_LOG2E = math.log2(math.e)
# Times a cap up to this the error of the tangents' difference from 1 is nothing next to 16 bits' own.
_SMALL_CAP = 1000.0
# Queries whose means one program makes; tiles of the bias's gradient.
_MEANS, _BIAS = 64, 64
# Bytes of shared memory that programs have on Hopper, where tiles were chosen by speed; and nearly those on A100.
_ENOUGH, _LITTLE = frontends.SHARED_MEMORY, 160 * 1024


def _pow2(n: int) -> int:
    return 1 << max(int(n) - 1, 0).bit_length()


def _tile(n: int) -> int:
    """The tile that holds n dimensions: the tensor cores take 16 at least."""
    return max(_pow2(n), 16)


def _name(x: Array) -> str:
    return str(x.dtype).removeprefix("torch.")


def _strides(x: Array) -> tuple[int, ...]:
    if hasattr(x, "stride"):
        return x.stride()
    strides = [1]  # a JAX array is contiguous
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


class _Call:
    """The sizes of one call and what all its launches share."""

    def __init__(self, args: Args, opts: Options):
        self.args, self.opts = args, opts
        (self.B, self.T, self.H, self.K), (self.S, self.G, self.V) = args.query.shape, args.value.shape[1:]
        self.dtype = _name(args.query)
        self.exact = self.dtype == "float32"
        # Complete by the contract, whatever its declared type allows.
        self.cfg = cast(Any, opts.cfg)
        if min(self.cfg.block_q, self.cfg.block_k) < 16:
            raise ValueError(f"attention: block_q = {self.cfg.block_q}, block_k = {self.cfg.block_k}; expected at "
                             "least 16 on triton, whose products take no smaller tiles")
        self.sinks = 0 if args.sinks is None else args.sinks.shape[-1]
        self.flags = dict(
            CAP=self.cap(), LEFT=opts.left is not None, RIGHT=opts.right is not None, DROPOUT=opts.dropout > 0,
            PRECISION="tf32" if not self.exact else "ieee" if _INTERPRETED else "bf16x6",
        )
        self.masks = dict(SEGMENTS=args.query_segments is not None, BIAS=args.bias is not None,
                          MASK=args.mask is not None)
        # What reaches past both ends is as good as what reaches further; where, an offset decides.
        most = max(self.T, self.S) if args.query_offset is None else FAR
        left, right = (max(min(x or 0, most), -most) for x in (opts.left, opts.right))
        self.window = dict(left=left, right=right, offsets=args.query_offset)
        self.flags["OFFSET"] = args.query_offset is not None and (opts.left, opts.right) != (None, None)
        scale, cap = opts.softmax_scale, opts.soft_cap
        # The running maximum is of products: the factor that follows must not turn them round, nor make -inf nothing.
        self.negative = scale < 0 and cap is None and args.bias is None
        unit = cap or (abs(scale) if self.negative else scale)
        if not unit:
            unit = 1e-30
        inner = (scale / cap if cap else 0.0) * (1 if self.flags["CAP"] == 1 else 2 * _LOG2E)
        self.numbers = dict(inner=inner, unit=unit * (1 if self.exact else _LOG2E), keep=1 / (1 - opts.dropout))
        # Weights from exp(-60) to exp(60) are in bfloat16's range, and so are their sums; in float32's also, but the
        # logs of such sums have fewer digits than its results.
        self.bounded = cap is not None and cap <= 60 and args.bias is None and self.dtype == "bfloat16"
        self.threshold = min(round(opts.dropout * 2**31), 2**31 - 1)

    def cap(self) -> int:
        """How the tangent is computed. NVIDIA's instruction for all of it is not exact enough for large logits."""
        if self.opts.soft_cap is None:
            return 0
        if self.exact or self.opts.soft_cap > _SMALL_CAP:
            return 1
        device = frontends.of(self.args.query).device_of(self.args.query).kind
        return 2 if _INTERPRETED or "AMD" in device else 3

    def rows(self, **arrays: Array) -> tuple[dict[str, int], dict[str, int]]:
        """Strides of arrays ``[B, T, H, dim]``: numbers in units, and constants with the unit."""
        strides = {name: _strides(x) for name, x in arrays.items()}
        unit = math.gcd(16, *(n for of in strides.values() for n in of[:3]))
        numbers = {
            f"stride_{name}{axis}": of[i] // unit for name, of in strides.items() for axis, i in (("b", 0), ("h", 2))
        }
        return numbers, {**{f"stride_{name}t": of[1] for name, of in strides.items()}, "UNIT": unit}

    def plane(self, name: str, x: Array | None) -> dict[str, int]:
        """Strides of a bias or a mask ``[1 or B, heads, T, S]``."""
        if x is None:
            return {f"stride_{name}{axis}": 0 for axis in "bht"}
        b, h, t, _ = _strides(x)
        return {f"stride_{name}b": b if x.shape[0] > 1 else 0, f"stride_{name}h": h, f"stride_{name}t": t}

    def mask_strides(self) -> dict[str, int]:
        """Strides of the mask, and that of what :meth:`mask_flags` gives, in heads."""
        mask = self.args.mask
        shared = mask is None or mask.shape[0] == 1
        return {**self.plane("mask", mask), "stride_flagsb": 0 if shared else mask.shape[1]}

    def shared(self, x: Array | None) -> int:
        """Query heads that share a head of the array."""
        return 1 if x is None else self.H // x.shape[1]

    def sink_heads(self) -> tuple[int, int]:
        """Stride of the heads of sinks, and query heads that share one."""
        x = self.args.sinks
        if not self.sinks or x.ndim == 1:
            return 0, self.H
        return _strides(x)[0], self.H // x.shape[0]

    def sizes(self) -> dict[str, int]:
        return dict(H=self.H, K=self.K, V=self.V, R=self.H // self.G, RB=self.shared(self.args.bias))

    def ids(self) -> dict[str, int]:
        """Strides of the segment ids."""
        ids = dict(query=self.args.query_segments, key=self.args.key_segments)
        return {f"stride_{name}b": 0 if x is None else _strides(x)[0] for name, x in ids.items()}

    def together(self, do: Array, block: int) -> dict[str, int]:
        """How the kernel of keys takes the heads that share them: its N, and strides between the N heads of a tile.

        With a soft cap as many as a tile of ``block`` rows can have, 8 queries each, which needs the fewest registers;
        without, the loads of one head are faster. 0, which compiles to less, for all that has parts of its own for each
        head. Strides that grow with T are no constants: the kernel would be built for every length.
        """
        args, opts, R = self.args, self.opts, self.H // self.G
        if R == 1 or self.exact or max(self.K, self.V) > 128 or args.bias is not args.mask or opts.dropout:
            return dict(N=0, stride_qn=0, stride_don=0)
        strides = [_strides(x) for x in (args.query, do)]
        if opts.soft_cap is None or R % 2 or not all(h < t for _, t, h, _ in strides):
            return dict(N=1, stride_qn=0, stride_don=0)
        return dict(N=min(R & -R, block // 8), stride_qn=strides[0][2], stride_don=strides[1][2])

    def spreads(self, ids: Array | None, block: int) -> Array | None:
        """What segments are in blocks of queries or keys; None without any."""
        if ids is None:
            return None
        B, n = ids.shape
        NB = -(-n // block)
        dtype = "int64" if _name(ids) == "int64" else "int32"
        return frontends.launch(
            kernels.spread_kernel, (B * NB,), dict(ids=ids, stride_b=_strides(ids)[0], n=n, NB=NB),
            dict(spreads=((B, 3, NB), dtype)), dict(BLOCK=block), num_warps=1, num_stages=1,
        )[0]

    def mask_flags(self, mask: Array | None, BT: int, BS: int) -> Array | None:
        """What of each block of the mask is visible; None without one."""
        if mask is None:
            return None
        (B, heads), (NT, NS) = mask.shape[:2], (-(-self.T // BT), -(-self.S // BS))
        stride_b, stride_h, stride_t, _ = _strides(mask)
        numbers = dict(stride_b=stride_b, stride_h=stride_h, stride_t=stride_t, HM=heads, T=self.T, S=self.S)
        return frontends.launch(
            kernels.mask_kernel, (B * heads * NT * NS,), dict(mask=mask, **numbers),
            dict(flags=((B, heads, NT, NS), "int8")), dict(BT=BT, BS=BS), num_warps=4, num_stages=1,
        )[0]


def forward(args: Args, opts: Options) -> tuple[tuple[Array, None], tuple]:
    """``((output, None), (output, the log of each query's sum, or its top and its sum))``."""
    w = _Call(args, opts)
    strides, fixed = w.rows(q=args.query, k=args.key, v=args.value)
    BT, BS = w.cfg.block_q, w.cfg.block_k
    stride_sinks, RN = w.sink_heads()
    spreads = w.spreads(args.key_segments, BS)
    inputs = dict(
        q=args.query, k=args.key, v=args.value, bias=args.bias, sinks=args.sinks, mask=args.mask,
        flags=w.mask_flags(args.mask, BT, BS), query_ids=args.query_segments, key_ids=args.key_segments,
        spreads=spreads, seed=args.seed,
        **strides, **w.plane("bias", args.bias), **w.mask_strides(), stride_sinksh=stride_sinks, **w.ids(),
        **w.numbers, threshold=w.threshold, **w.window, T=w.T, S=w.S,
    )
    constants = dict(
        **w.sizes(), RM=w.shared(args.mask), RN=RN, **fixed, BT=BT, BS=BS, BK=_tile(w.K), BV=_tile(w.V),
        BN=_pow2(w.sinks), SINKS=w.sinks, **w.flags, **w.masks, BOUNDED=w.bounded, NEGATIVE=w.negative,
    )
    outputs = dict(o=_output(args, opts), lse=_lse(args, opts))
    output, lse = frontends.launch(
        kernels.forward_kernel, (w.B * w.H * -(-w.T // BT),), inputs, outputs, constants,
        num_warps=w.cfg.num_warps, num_stages=w.cfg.num_stages,
    )
    return (output, None), (output, lse)


def _output(args: Args, opts: Options) -> tuple[tuple[int, ...], str]:
    return (*args.query.shape[:3], args.value.shape[3]), _name(args.query)


def _lse(args: Args, opts: Options) -> tuple[tuple[int, ...], str]:
    B, T, H = args.query.shape[:3]
    return (B, H, 2, T) if _name(args.query) == "float32" else (B, H, T), "float32"


forward.residuals = dict(output=frontends.OUTPUT, lse=_lse)  # type: ignore[attr-defined]


def backward(args: Args, residuals: tuple, grads: tuple, opts: Options) -> Args:
    """The gradients of ``args`` from that of the output."""
    w, (output, lse), do = _Call(args, opts), residuals, grads[0]
    mean, dsinks = _means(w, output, do, lse)
    strides, fixed = w.rows(q=args.query, k=args.key, v=args.value, do=do)
    # Its tiles and blocks are of two arrays each, which leaves room for a stage less.
    options = dict(num_warps=w.cfg.num_warps, num_stages=max(w.cfg.num_stages - 1, 1))
    constants = dict(**w.sizes(), RM=w.shared(args.mask), **fixed, BK=_tile(w.K), BV=_tile(w.V), **w.flags,
                     **w.masks, NEGATIVE=w.negative)
    rows, columns = w.cfg.block_q, w.cfg.block_k

    def launch(kernel: Callable, grid: tuple[int, ...], flags: Array | None, spreads: Array | None,
               outputs: dict[str, Any], constants: dict[str, Any]) -> tuple:
        inputs = dict(
            q=args.query, k=args.key, v=args.value, bias=args.bias, mask=args.mask, flags=flags,
            query_ids=args.query_segments, key_ids=args.key_segments, spreads=spreads, seed=args.seed, do=do, lse=lse,
            mean=mean, **strides, **w.plane("bias", args.bias), **w.mask_strides(), **w.ids(),
            scale=opts.softmax_scale, **w.numbers, threshold=w.threshold, **w.window, T=w.T, S=w.S,
        )
        return frontends.launch(kernel, grid, inputs, outputs, constants, **options)

    made = dict(dk=(tuple(args.key.shape), w.dtype), dv=(tuple(args.value.shape), w.dtype))
    heads = w.together(do, columns)
    grid, own = (w.B * w.G * -(-w.S // rows),), dict(constants, BT=columns, BS=rows, **heads)
    hidden = w.mask_flags(args.mask, columns, rows), w.spreads(args.query_segments, columns // max(heads["N"], 1))
    if max(w.K, w.V) > (64 if w.dtype == "float32" else 128):
        # The two sums do not fit the registers at once.
        dk = launch(gradients.key_kernel, grid, *hidden, {**made, "dv": None}, dict(own, DK=True, DV=False))[0]
        dv = launch(gradients.key_kernel, grid, *hidden, {**made, "dk": None}, dict(own, DK=False, DV=True))[1]
    else:
        dk, dv = launch(gradients.key_kernel, grid, *hidden, made, dict(own, DK=True, DV=True))
    (dq,) = launch(
        gradients.query_kernel, (w.B * w.H * -(-w.T // rows),),
        w.mask_flags(args.mask, rows, columns), w.spreads(args.key_segments, columns),
        dict(dq=(tuple(args.query.shape), w.dtype)), dict(constants, BT=rows, BS=columns),
    )
    dbias = _bias(w, do, lse, mean) if opts.needs(args, "bias") else None
    return Args(dq, dk, dv, dbias, dsinks)


def _bias(w: _Call, do: Array, lse: Array, mean: Array) -> Array:
    """The gradient of the bias."""
    args = w.args
    strides, fixed = w.rows(q=args.query, k=args.key, v=args.value, do=do)
    shape = tuple(args.bias.shape)
    inputs = dict(
        q=args.query, k=args.key, v=args.value, bias=args.bias, do=do, lse=lse, mean=mean, seed=args.seed, **strides,
        **w.plane("bias", args.bias), **w.numbers, threshold=w.threshold, **w.window, B=w.B, T=w.T,
        S=w.S,
    )
    # Where products take their operands from registers, these hold no larger tiles.
    block = _BIAS if frontends.shared_memory(args.query) >= _ENOUGH else _BIAS // 2
    constants = dict(**w.sizes(), SHARED=shape[0] < w.B, **fixed, BT=block, BS=block, BK=_tile(w.K), BV=_tile(w.V),
                     **w.flags)
    grid = (shape[0] * shape[1] * -(-w.T // block) * -(-w.S // block),)
    return frontends.launch(
        gradients.bias_kernel, grid, inputs, dict(dbias=(shape, _name(args.bias))), constants,
        num_warps=8 if max(w.K, w.V) > 128 else 4, num_stages=1,
    )[0]


def _means(w: _Call, output: Array, do: Array, lse: Array) -> tuple[Any, Any]:
    """Each query's mean, and the gradient of the sinks."""
    args = w.args
    strides, fixed = w.rows(do=do)
    stride_sinks, RN = w.sink_heads()
    NT = -(-w.T // _MEANS)
    mean, parts = frontends.launch(
        gradients.mean_kernel, (w.B * w.H * NT,),
        dict(o=output, do=do, lse=lse, sinks=args.sinks, **strides, stride_sinksh=stride_sinks, T=w.T),
        dict(mean=((w.B, w.H, w.T), "float32"), dsinks=((w.B, w.H, NT, w.sinks), "float32") if w.sinks else None),
        dict(H=w.H, V=w.V, RN=RN, **fixed, BT=_MEANS, BV=_tile(w.V), BN=_pow2(w.sinks), SINKS=w.sinks),
        num_warps=4, num_stages=1,
    )
    if args.sinks is None:
        return mean, None
    heads, rows = w.H // RN, RN * NT
    x = parts if w.sinks else lse
    (dsinks,) = frontends.launch(
        gradients.sum_kernel, (heads if w.sinks else 0,),
        dict(x=x, B=w.B, stride_b=w.H * NT * w.sinks, stride_g=rows * w.sinks, n=rows),
        dict(y=(tuple(args.sinks.shape), _name(args.sinks))),
        dict(N=w.sinks, BR=max(min(_pow2(rows), 2048 // _pow2(w.sinks)), 1), BN=_pow2(w.sinks)),
        num_warps=4, num_stages=1,
    )
    return mean, dsinks


def unsupported(inv: Invocation) -> str | None:
    """Why Triton cannot run the call, or None."""
    if inv.backend != "gpu" and not (_INTERPRETED and inv.framework == "torch"):
        return f"needs a GPU; the call's arrays are on {inv.backend}"
    if reason := frontends.cannot_launch(inv.framework):
        return reason
    if "float64" in (inv.arrays["query"][0], inv.options["softmax_dtype"]):
        return "Triton's matrix products have no float64; use xla or torch, or convert to float32"
    if max(inv.dims["K"], inv.dims["V"]) > 256:
        return f"takes head dims up to 256; the call has K = {inv.dims['K']}, V = {inv.dims['V']}"
    if "bias" in inv.arrays and {"mask", "query_segments"} & set(inv.arrays):
        return "takes a bias or a mask, not both; add the mask to the bias as -inf"
    exact, wide = inv.arrays["query"][0] == "float32", max(inv.dims["K"], inv.dims["V"]) > 128
    if exact and wide and "bias" in inv.arrays and inv.shared_memory < _ENOUGH:
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
    enough, little = inv.shared_memory >= _ENOUGH, inv.shared_memory < _LITTLE
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


def _axes(args: Args, opts: Options) -> tuple[Args, tuple[str, None], tuple[str, str]]:
    """:func:`contract.axes` with those of the residuals."""
    letters, output = axes(args, opts)
    return letters, (output, None), (output, output[0] + output[2] + "." * (len(_lse(args, opts)[0]) - 2))


def part(args: Args, opts: Options) -> tuple[Any, Any, Any]:
    """See ``contract.py``."""
    _, (output, lse) = forward(args, opts)
    if lse.ndim == 4:
        return output, lse[:, :, 0], lse[:, :, 1]
    frontend = frontends.of(lse)
    return output, lse / _LOG2E, frontend.zeros(tuple(lse.shape), "float32", lse) + 1


def part_gradients(args: Args, whole: tuple[Any, Any, Any], doutput: Array, opts: Options) -> Args:
    """See ``contract.py``."""
    output, top, total = whole
    frontend = frontends.of(top)
    exact = _name(args.query) == "float32"
    lse = frontend.stack([top, total], 2) if exact else (top + frontend.xp.log(total)) * _LOG2E
    return backward(args, (output, lse), (doutput, None), opts)


attention = kernel(
    "triton", __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates,
    unsupported=unsupported, forms_weights=False, letters=_axes,
)
