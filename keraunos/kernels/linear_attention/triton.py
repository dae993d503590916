"""The gated linear recurrence in Triton, for JAX and PyTorch on NVIDIA GPUs from sm_80: which kernel runs when.

Forward: one fused scan, which reads every input once. Vector gates are first worked into q, k and
the pairs of every chunk by a kernel that is parallel over chunks. When batch times heads does not fill the GPU, sequences are cut into segments:
a cheap pass gives each segment's own state, a tiny one each segment's incoming state, then all segments run at once.

Backward, constant decay: the same scan with its arguments permuted. With L(a, b, c) the recurrence "queries a, keys b,
values c" and R its adjoint, which runs the other way: dq = L(do, v, k), dk = R(v, do, q), dv = R(k, q, do). Backward with
a gradient for gates: one scan gives the state before each chunk, R(k, q, do) gives dv and the gradient of the state after
each chunk, and from both a kernel that is parallel over chunks makes dq, dk and dg.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from keraunos.frontends import launch
from keraunos.kernels.linear_attention import triton_kernels as kernels
from keraunos.kernels.linear_attention.interface import Args, Options
from keraunos.kernels.linear_attention.interface import kernels as implementations

FIELDS = ("block_q", "block_d", "num_warps", "num_stages")

# Programs that fill the largest GPUs. With fewer, sequences are cut into segments.
_PROGRAMS = 128
_MIN_SEGMENT = 512

# Tiles and launch options of the kernels that are parallel over chunks: (dimensions of K, of V, warps, stages).
_DECAY = (64, None, 4, 1)
_GRADIENT = (64, 64, 4, 1)


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _strides(x: Any, name: str, axes: str = "bth") -> dict[str, int]:
    """``stride_<name><axis>`` of the axes of an array [B, T, H, ...]; a JAX array is contiguous."""
    if x is None:
        strides = (0, 0, 0)
    elif hasattr(x, "stride"):
        strides = x.stride()
    else:
        strides = [1]
        for size in reversed(x.shape[1:]):
            strides.insert(0, strides[0] * size)
    return {f"stride_{name}{axis}": strides["bth".index(axis)] for axis in axes}


@dataclass(frozen=True)
class _Call:
    """The sizes of one call, its gates and how its sequences are cut."""

    args: Args
    opts: Options

    def __post_init__(self):
        args, cfg = self.args, self.opts.cfg
        B, T, H, K = args.query.shape
        G, V = args.value.shape[2:]
        packed = args.cu_seqlens is not None
        N = args.cu_seqlens.shape[0] - 1 if packed else B
        gate = 0 if args.g is None else args.g.ndim - 2
        exact = _dtype(args.query) == "float32"
        terms = 3 if exact else 1 if gate and _dtype(args.g) == "bfloat16" and args.g_gamma is None else 2
        BT = cfg.block_q
        tiles = -(-min(K, V) // cfg.block_d)
        L = segment_length(T, N * H * tiles, BT)
        slots = N if L is None else (T // L + N if packed else N * -(-T // L))
        chunks = T // BT + N if packed else N * -(-T // BT)
        values = dict(B=B, T=T, H=H, K=K, G=G, V=V, N=N, R=H // G, packed=packed, gate=gate, terms=terms, exact=exact,
                      BT=BT, L=L, slots=slots, chunks=chunks, precision="tf32x3" if exact else "tf32",
                      mild=40.0 if _dtype(args.query) == "bfloat16" else 0.0)  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def gamma(self):
        """The constant gate and its stride over the batch."""
        gamma = self.args.g_gamma
        return gamma, 0 if gamma is None or gamma.ndim == 1 else self.H

    def flags(self, reverse: bool) -> dict[str, Any]:
        """The constants that every kernel of the recurrence has."""
        return dict(GAMMA=self.args.g_gamma is not None, REVERSE=reverse, PACKED=self.packed)


def segment_length(T: int, programs: int, BT: int) -> int | None:
    """Tokens per segment, or None where one program per sequence, head and tile fills the GPU."""
    if 2 * programs > _PROGRAMS or T < 2 * _MIN_SEGMENT:
        return None
    count = min(-(-2 * _PROGRAMS // programs), T // _MIN_SEGMENT)
    return -(-T // (count * BT)) * BT


class _Decayed(NamedTuple):
    """What ``decay_kernel`` gives for vector gates: q and k decayed to their chunk's borders, its pairs and its sums."""

    q: Any
    k: Any
    intra: Any
    sums: Any


def _scan(call: _Call, q, k, v, *, reverse, adjoint=False, init=None, starts=None, decayed=None, final=None,
          final_per_segment=False, output=None, chunks=None, state_t=False):  # fmt: skip
    """One walk of ``scan_kernel`` over the queries q, keys k and values v (None q: only states are wanted).

    Args:
        reverse: from the last token to the first; adjoint: with the gradient of the state.
        init: state of each sequence; starts: state of each segment.
        decayed: where the gates are vectors.
        final, output, chunks: dtype of the final state, the output and the states at chunks, None if not wanted.
        state_t: states are transposed in memory.

    Returns:
        ``(output, final states, states at chunks, sums of the gates)``.
    """
    H, cfg = call.H, call.opts.cfg
    K, V = k.shape[-1], v.shape[-1]
    g, (gamma, stride_gamma_b) = call.args.g if call.gate == 1 else None, call.gamma
    BV = min(cfg.block_d, max(_pow2(V), 16))
    split = final_per_segment or starts is not None
    slots = call.slots if split else call.N
    like_q = k if q is None else q
    inputs = dict(
        q=like_q, k=k, v=v, g=g, gamma=gamma, intra=decayed and decayed.intra, sums=decayed and decayed.sums,
        h0=init if starts is None else starts, cu_seqlens=call.args.cu_seqlens, **_strides(like_q, "q", "bh"),
        **_strides(k, "k", "bh"), **_strides(v, "v", "bh"), **_strides(g, "g"), stride_gamma_b=stride_gamma_b,
        scale=call.opts.softmax_scale, T=call.T, N=call.N, L=call.L or 0,
    )  # fmt: skip
    states = (slots if final_per_segment else call.N, H)
    outputs = dict(
        o=None if q is None else ((call.B, call.T, H, V), output),
        ht=None if final is None else ((*states, V, K) if state_t else (*states, K, V), final),
        hs=None if chunks is None else ((call.chunks, H, K, V), chunks),
        total=((slots, H, K) if call.gate == 2 else (slots, H), "float32") if final_per_segment and call.gate else None,
    )
    constants = dict(
        H=H, K=K, V=V, RQ=H // like_q.shape[2], RK=H // k.shape[2], RV=H // v.shape[2], **_strides(like_q, "q", "t"),
        **_strides(k, "k", "t"), **_strides(v, "v", "t"), BT=call.BT, BK=max(_pow2(K), 16), BV=BV, BN=_pow2(call.N),
        GATE=call.gate, TERMS=call.terms, ADJOINT=adjoint, SPLIT=split,
        INIT=2 if starts is not None else int(init is not None),
        FINAL=0 if final is None else 2 if final_per_segment else 1, OUTPUT=q is not None, CHUNKS=chunks is not None,
        STATE_T=state_t, EXACT=call.exact, PRECISION=call.precision, **call.flags(reverse),
    )  # fmt: skip
    grid = (slots * H * -(-V // BV),)
    return launch(kernels.scan_kernel, grid, inputs, outputs, constants,
                  num_warps=cfg.num_warps, num_stages=cfg.num_stages)  # fmt: skip


def _starts(call: _Call, k, v, *, reverse, adjoint=False, init=None, decayed=None):
    """The state that each segment starts from, ``[slots, H, K, V]``; None where sequences are not cut."""
    if call.L is None:
        return None
    _, local, _, total = _scan(call, None, k, v, reverse=reverse, adjoint=adjoint, final="float32",
                               final_per_segment=True, decayed=decayed)  # fmt: skip
    K, V = k.shape[-1], v.shape[-1]
    gamma, stride_gamma_b = call.gamma
    inputs = dict(local=local, total=total, gamma=gamma, h0=init, cu_seqlens=call.args.cu_seqlens,
                  stride_gamma_b=stride_gamma_b, T=call.T, N=call.N, L=call.L)  # fmt: skip
    BK = 16
    constants = dict(H=call.H, K=K, V=V, BK=BK, BV=max(_pow2(V), 16), GATE=call.gate, INIT=init is not None,
                     **call.flags(reverse))  # fmt: skip
    outputs = dict(starts=((call.slots, call.H, K, V), "float32"))
    return launch(kernels.combine_kernel, (call.N * call.H * -(-K // BK),), inputs, outputs, constants,
                  num_warps=4, num_stages=2)[0]  # fmt: skip


def _decay(call: _Call) -> _Decayed | None:
    """Vector gates, worked into q and k in parallel over chunks; None where there are none."""
    if call.gate != 2:
        return None
    q, k, g = call.args.query, call.args.key, call.args.g
    gamma, stride_gamma_b = call.gamma
    BK, _, num_warps, num_stages = _DECAY
    inputs = dict(q=q, k=k, g=g, gamma=gamma, cu_seqlens=call.args.cu_seqlens, **_strides(q, "q"), **_strides(k, "k"),
                  **_strides(g, "g"), stride_gamma_b=stride_gamma_b, scale=call.opts.softmax_scale, T=call.T,
                  N=call.N)  # fmt: skip
    constants = dict(H=call.H, K=call.K, RK=call.R, BT=call.BT, BK=min(max(_pow2(call.K), 16), BK), BN=_pow2(call.N),
                     TERMS=call.terms, MILD=call.mild, PRECISION=call.precision,
                     **call.flags(call.opts.reverse))  # fmt: skip
    tokens, dtype = (call.B, call.T, call.H), _dtype(q)
    outputs = dict(qd=((*tokens, call.K), dtype), kd=((*tokens, call.K), dtype), intra=((*tokens, call.BT), dtype),
                   sums=((call.chunks, call.H, 2, call.K), "float32"))  # fmt: skip
    return _Decayed(*launch(kernels.decay_kernel, (call.chunks * call.H,), inputs, outputs, constants,
                            num_warps=num_warps, num_stages=num_stages))  # fmt: skip


def forward(args: Args, opts: Options):
    """``((output, final_state), residuals)``: the states at segments, where sequences are cut."""
    call = _Call(args, opts)
    q, k, v, h0 = args.query, args.key, args.value, args.initial_state
    decayed = _decay(call)
    if decayed:
        q, k = decayed.q, decayed.k
    starts = _starts(call, k, v, reverse=opts.reverse, init=h0, decayed=decayed)
    output, final, _, _ = _scan(call, q, k, v, reverse=opts.reverse, init=h0, starts=starts, decayed=decayed,
                                final="float32", output=_dtype(q))  # fmt: skip
    return (output, final), (starts,)


forward.residuals = ("starts",)


def backward(args: Args, residuals, grads, opts: Options) -> Args:
    """The gradients of ``args`` from those of the output and of the final state (None: zero)."""
    call = _Call(args, opts)
    q, k, v, h0 = args.query, args.key, args.value, args.initial_state
    (starts,) = residuals
    do, dfinal = grads
    # Query heads that share keys: each gives a gradient, and they are summed afterwards.
    dtype = "float32" if call.R > 1 else _dtype(q)
    need_gate = args.g is not None or (args.g_gamma is not None and not opts.gamma_is_constant)
    chunks = _dtype(q) if need_gate else None
    decayed = _decay(call)
    qd, kd = (decayed.q, decayed.k) if decayed else (q, k)
    run = dict(reverse=not opts.reverse, adjoint=True, init=dfinal)
    ends = _starts(call, qd, do, decayed=decayed, **run)
    dv, dh0, dhs, _ = _scan(call, kd, qd, do, starts=ends, decayed=decayed, output=dtype, chunks=chunks,
                            final=None if h0 is None else _dtype(h0), **run)  # fmt: skip
    dg = dgamma = None
    if need_gate:
        _, _, hs, _ = _scan(call, None, kd, v, reverse=opts.reverse, init=h0, starts=starts, decayed=decayed,
                            chunks=chunks)  # fmt: skip
        sums = decayed and decayed.sums
        del decayed, qd, kd
        dq, dk, dg, dgamma = _gradients(call, sums, do, hs, dhs, dtype)
    else:
        dq = _scan(call, do, v, k, reverse=opts.reverse, init=h0, starts=starts, output=_dtype(q), state_t=True)[0]
        dk = _scan(call, v, do, q, starts=ends, output=dtype, state_t=True, **run)[0]
    if call.R > 1:
        dk, dv = (_sum(x, x.shape[0] * x.shape[1] * call.G, call.R, x.shape[3], like.shape, _dtype(like))
                  for x, like in ((dk, k), (dv, v)))  # fmt: skip
    return Args(dq, dk, dv, dg, dgamma, dh0)


def _gradients(call: _Call, sums, do, hs, dhs, dtype: str):
    """``(dq, dk, dg, dgamma)``, in parallel over chunks, from the states before and the gradients after each chunk."""
    q, k, v, g = call.args[:4]
    B, T, H, K = q.shape
    gamma, stride_gamma_b = call.gamma
    need_gamma = gamma is not None and not call.opts.gamma_is_constant
    vector = call.gate == 2
    BK, BV, num_warps, num_stages = _GRADIENT
    BK, BV = min(max(_pow2(K), 16), BK), min(max(_pow2(call.V), 16), BV)
    tiles = -(-K // BK)
    inputs = dict(q=q, k=k, v=v, g=g, gamma=gamma, sums=sums, do=do, hs=hs, dhs=dhs, cu_seqlens=call.args.cu_seqlens,
                  **_strides(q, "q"), **_strides(k, "k"), **_strides(v, "v"), **_strides(g, "g"),
                  stride_gamma_b=stride_gamma_b, **_strides(do, "o"), scale=call.opts.softmax_scale, T=T,
                  N=call.N)  # fmt: skip
    dg = ((B, T, H, K), "float32" if need_gamma else _dtype(g)) if vector else ((tiles, B, T, H), "float32")
    outputs = dict(dq=((B, T, H, K), _dtype(q)), dk=((B, T, H, K), dtype), dg=dg)
    constants = dict(H=H, K=K, V=call.V, R=call.R, BT=call.BT, BK=BK, BV=BV, BN=_pow2(call.N), GATE=call.gate,
                     TERMS=call.terms, DG_TERMS={"bfloat16": 1, "float16": 2}.get(_dtype(q), 3), MILD=call.mild,
                     PRECISION=call.precision, **call.flags(call.opts.reverse))  # fmt: skip
    dq, dk, dg = launch(kernels.gradient_kernel, (call.chunks * H * tiles,), inputs, outputs, constants,
                        num_warps=num_warps, num_stages=num_stages)  # fmt: skip
    if not vector:
        dg = _sum(dg, 1, tiles, B * T * H, (B, T, H), "float32" if need_gamma else _dtype(g))
    dgamma = _gamma_gradient(call, dg) if need_gamma else None
    if g is None:
        dg = None
    elif need_gamma:
        dg = _sum(dg, 1, 1, math.prod(g.shape), g.shape, _dtype(g))
    return dq, dk, dg, dgamma


def _gamma_gradient(call: _Call, dg):
    """The sum of the gates' gradients over tokens (and dimensions, and the batch if it shares the decay)."""
    gamma, D = call.args.g_gamma, call.K if call.gate == 2 else 1
    x = _sum(dg, call.B, call.T, call.H * D, (call.B, call.H, D), "float32")
    if D > 1:
        x = _sum(x, call.B * call.H, D, 1, (call.B, call.H), "float32")
    return _sum(x, 1 if gamma.ndim == 1 else call.B, call.B if gamma.ndim == 1 else 1, call.H, gamma.shape, _dtype(gamma))


def _sum(x, M: int, R: int, D: int, shape, dtype: str):
    """``x`` as ``[M, R, D]``, summed over R, in the given shape and dtype."""
    BD = min(max(_pow2(D), 16), 256)
    BR = min(_pow2(R), 16)
    return launch(kernels.sum_kernel, (M * -(-D // BD),), dict(x=x, R=R, D=D), dict(y=(tuple(shape), dtype)),
                  dict(BR=BR, BD=BD), num_warps=4, num_stages=2)[0]  # fmt: skip


def unsupported(inv) -> str | None:
    """Why Triton cannot run the call, or None."""
    # With TRITON_INTERPRET=1 the kernels run on the CPU, in NumPy.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and inv.framework == "torch"
    if inv.backend != "gpu" and not interpreted:
        return f"needs a GPU; the call's arrays are on {inv.backend}"
    if inv.arrays["query"][0] == "float64":
        return "Triton's matrix products have no float64; use xla or torch, or convert to float32"
    if max(inv.dims["K"], inv.dims["V"]) > 256:
        return f"takes head dims up to 256; the call has K = {inv.dims['K']}, V = {inv.dims['V']}"
    return None


def heuristic(inv, cfg):
    """Chunks of 64 tokens; tiles of V and pipeline depth as registers and shared memory allow."""
    wide = inv.arrays["query"][0] == "float32"
    K = max(inv.dims["K"], inv.dims["V"])
    return replace(cfg, block_q=32 if wide else 64, block_d=32 if K > 128 else 64, num_warps=4,
                   num_stages=2 if wide or K > 128 else 3)  # fmt: skip


def candidates(inv, cfg):
    return [
        replace(cfg, block_q=BT, block_d=BV, num_warps=warps, num_stages=stages)
        for BT in (32, 64) for BV in (32, 64, 128) for warps in (4, 8) for stages in (2, 3)
    ]  # fmt: skip


gla, lightning_attn = implementations(
    __file__, forward, backward, fields=FIELDS, heuristic=heuristic, candidates=candidates, unsupported=unsupported
)
