"""Sizes, strides, numbers and flags of one call of softmax attention: what launches share."""

from __future__ import annotations

import math
from typing import Any, cast

from keraunos import frontends
from keraunos.frontends import interpreter
from keraunos.frontends.array_types import Array
from keraunos.kernels.device.limits import precision
from keraunos.kernels.host.arrays import dtype_of, pow2, strides_of, tile
from keraunos.kernels.host.plan import named
from keraunos.kernels.softmax_attention.contract import FAR, Args, Options, axes
from keraunos.kernels.softmax_attention.shared import tiles

LOG2E = math.log2(math.e)
# Times a cap up to this the error of the tangents' difference from 1 is nothing next to 16 bits' own.
_SMALL_CAP = 1000.0


class Call:
    """The sizes of one call and what all its launches share."""

    def __init__(self, args: Args, opts: Options):
        self.args, self.opts = args, opts
        (self.B, self.T, self.H, self.K), (self.S, self.G, self.V) = args.query.shape, args.value.shape[1:]
        self.dtype = dtype_of(args.query)
        self.exact = self.dtype == "float32"
        # Complete by the contract, whatever its declared type allows.
        self.cfg = cast(Any, opts.cfg)
        self.sinks = 0 if args.sinks is None else args.sinks.shape[-1]
        self.flags = dict(
            CAP=self.cap(), LEFT=opts.left is not None, RIGHT=opts.right is not None, DROPOUT=opts.dropout > 0,
            PRECISION=precision(self.exact),
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
        inner = (scale / cap if cap else 0.0) * (1 if self.flags["CAP"] == 1 else 2 * LOG2E)
        self.numbers = dict(inner=inner, unit=unit * (1 if self.exact else LOG2E), keep=1 / (1 - opts.dropout))
        # Weights from exp(-60) to exp(60) are in bfloat16's range, and so are their sums; in float32's also, but the
        # logs of such sums have fewer digits than its results.
        self.bounded = cap is not None and cap <= 60 and args.bias is None and self.dtype == "bfloat16"
        mask, sinks = args.mask, args.sinks
        one = not self.sinks or sinks.ndim == 1  # of all heads
        self.known = dict(
            q=args.query, k=args.key, v=args.value, bias=args.bias, sinks=sinks, mask=mask, seed=args.seed,
            query_ids=args.query_segments, key_ids=args.key_segments, **_plane("bias", args.bias),
            **_plane("mask", mask), stride_flagsb=0 if mask is None or mask.shape[0] == 1 else mask.shape[1],
            stride_queryb=_rows(args.query_segments), stride_keyb=_rows(args.key_segments),
            stride_sinksh=0 if one else strides_of(sinks)[0], scale=scale, **self.numbers, **self.window,
            threshold=min(round(opts.dropout * 2**31), 2**31 - 1), B=self.B, T=self.T, S=self.S, H=self.H, K=self.K,
            V=self.V, R=self.H // self.G, RB=self._shared(args.bias), RM=self._shared(mask),
            RN=self.H if one else self.H // sinks.shape[0], SINKS=self.sinks, BK=tile(self.K), BV=tile(self.V),
            BN=pow2(self.sinks), **self.flags, **self.masks, NEGATIVE=self.negative,
        )

    def cap(self) -> int:
        """How the tangent is computed. NVIDIA's instruction for all of it is not exact enough for large logits."""
        if self.opts.soft_cap is None:
            return 0
        if self.exact or self.opts.soft_cap > _SMALL_CAP:
            return 1
        device = frontends.of(self.args.query).device_of(self.args.query).kind
        return 2 if interpreter.ON or "AMD" in device else 3

    def launch(self, kernel: Any, programs: int, outputs: dict[str, Any], num_warps: int = 4, num_stages: int = 1,
               **own: Any) -> tuple:
        """Run a kernel on what it names of what is known of the call, and of its ``own`` arguments."""
        known = {name: x for name, x in {**self.known, **own}.items() if name not in outputs}
        inputs, constants = named(kernel, known)
        return frontends.launch(kernel, (programs,), inputs, outputs, constants, num_warps=num_warps,
                                num_stages=num_stages)

    def rows(self, **arrays: Array) -> dict[str, int]:
        """Strides of arrays ``[B, T, H, dim]``: numbers in units, constants, and the unit."""
        strides = {name: strides_of(x) for name, x in arrays.items()}
        unit = math.gcd(16, *(n for of in strides.values() for n in of[:3]))
        return {f"stride_{name}{axis}": n // (1 if axis == "t" else unit)
                for name, of in strides.items() for axis, n in zip("bth", of, strict=False)} | {"UNIT": unit}

    def _shared(self, x: Array | None) -> int:
        """Query heads that share a head of the array."""
        return 1 if x is None else self.H // x.shape[1]

    def together(self, do: Array, block: int) -> dict[str, int]:
        """How the kernel of keys takes the heads that share them: its N, and strides between the N heads of a tile.

        With a soft cap as many as a tile of ``block`` rows can have, 8 queries each, which needs the fewest registers;
        without, the loads of one head are faster. 0, which compiles to less, for all that has parts of its own for each
        head. Strides that grow with T are no constants: the kernel would be built for every length.
        """
        args, opts, R = self.args, self.opts, self.H // self.G
        if R == 1 or self.exact or max(self.K, self.V) > 128 or args.bias is not args.mask or opts.dropout:
            return dict(N=0, stride_qn=0, stride_don=0)
        strides = [strides_of(x) for x in (args.query, do)]
        if opts.soft_cap is None or R % 2 or not all(h < t for _, t, h, _ in strides):
            return dict(N=1, stride_qn=0, stride_don=0)
        return dict(N=min(R & -R, block // 8), stride_qn=strides[0][2], stride_don=strides[1][2])

    def spreads(self, ids: Array | None, block: int) -> Array | None:
        """The lowest and highest segment ids of blocks of queries or keys; None without segments."""
        if ids is None:
            return None
        B, n = ids.shape
        NB = -(-n // block)
        dtype = "int64" if dtype_of(ids) == "int64" else "int32"
        return self.launch(tiles.spread_kernel, B * NB, dict(spreads=((B, 3, NB), dtype)), 1, ids=ids,
                           stride_b=strides_of(ids)[0], n=n, NB=NB, BLOCK=block)[0]

    def mask_flags(self, mask: Array | None, BT: int, BS: int) -> Array | None:
        """Flags of each block of the mask: nothing, something or everything is visible; None without a mask."""
        if mask is None:
            return None
        (B, heads), (NT, NS) = mask.shape[:2], (-(-self.T // BT), -(-self.S // BS))
        stride_b, stride_h, stride_t, _ = strides_of(mask)
        return self.launch(tiles.mask_kernel, B * heads * NT * NS, dict(flags=((B, heads, NT, NS), "int8")),
                           stride_b=stride_b, stride_h=stride_h, stride_t=stride_t, HM=heads, BT=BT, BS=BS)[0]


def _plane(name: str, x: Array | None) -> dict[str, int]:
    """Strides of a bias or a mask ``[1 or B, heads, T, S]``."""
    b, h, t = (0, 0, 0) if x is None else strides_of(x)[:3]
    return {f"stride_{name}b": b if x is not None and x.shape[0] > 1 else 0, f"stride_{name}h": h,
            f"stride_{name}t": t}


def _rows(ids: Array | None) -> int:
    return 0 if ids is None else strides_of(ids)[0]


def output_spec(args: Args, opts: Options) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the output."""
    return (*args.query.shape[:3], args.value.shape[3]), dtype_of(args.query)


def lse_spec(args: Args, opts: Options) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the logs of the queries' sums; in float32 of their tops and their sums."""
    B, T, H = args.query.shape[:3]
    return (B, H, 2, T) if dtype_of(args.query) == "float32" else (B, H, T), "float32"


def axes_with_residuals(args: Args, opts: Options) -> tuple[Args, tuple[str, None], tuple[str, str]]:
    """:func:`contract.axes` with those of the residuals."""
    letters, output = axes(args, opts)
    return letters, (output, None), (output, output[0] + output[2] + "." * (len(lse_spec(args, opts)[0]) - 2))
