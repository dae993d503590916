"""Runs the forward of softmax attention in the emulator: cases, and what float64 gives for them."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import torch

from keraunos.kernels.softmax_attention.contract import FAR, sides
from keraunos.kernels.softmax_attention.cuda.forward import forward_kernel
from keraunos.kernels.softmax_attention.reference import attention
from tests.cuda import emulator
from tests.cuda.compile import resources


@dataclasses.dataclass(frozen=True)
class Case:
    """A call; ``segments``: ``(lengths of the queries' segments, of the keys')``, -n: as long, but padding."""

    T: int = 200
    S: int | None = None
    B: int = 1
    H: int = 2
    G: int = 2
    D: int = 128
    V: int | None = None
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] | None = None
    offset: tuple[int, ...] | None = None
    soft_cap: float | None = None
    scale: float | None = None
    sinks: int = 0
    segments: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    programs: int = 3
    rows: int = 64
    block: int = 128
    stages: int = 2
    held: int = 2
    turns: bool = True
    shared: bool = False
    tangent: int = 1

    @functools.cached_property
    def arrays(self):
        rng = np.random.default_rng(0)
        S, V = self.T if self.S is None else self.S, self.V or self.D

        def normal(*shape):
            return torch.from_numpy(rng.standard_normal(shape)).to(getattr(torch, self.dtype))

        ids = [None, None]
        if self.segments:
            ids = [torch.tensor([i if n > 0 else -1 for i, n in enumerate(lengths) for _ in range(abs(n))])
                   .to(torch.int32).expand(self.B, -1).contiguous() for lengths in self.segments]
        return dict(
            query=normal(self.B, self.T, self.H, self.D), key=normal(self.B, S, self.G, self.D),
            value=normal(self.B, S, self.G, V),
            sinks=torch.from_numpy(rng.standard_normal((self.H, self.sinks)).astype("f4")) if self.sinks else None,
            query_segments=ids[0], key_segments=ids[1],
            query_offset=torch.tensor(self.offset, dtype=torch.int32) if self.offset else None,
        )

    def wanted(self):
        """``(output, lse)`` in float64."""
        given = {name: None if x is None else (x.double() if x.is_floating_point() else x).numpy()
                 for name, x in self.arrays.items()}
        options = dict(softmax_scale=self.scale, soft_cap=self.soft_cap, causal=self.causal, window=self.window)
        output, _ = attention(**given, **options)
        return output, _logs(given, options, self.H)


def _logs(given, options, H):
    """The log of each query's sum, base 2, inf where there is none ``[B, H, T]``, of the weight of one more sink."""
    one = np.zeros((H, 1))
    sinks = one if given["sinks"] is None else np.concatenate([given["sinks"], one], 1)
    _, p = attention(**{**given, "sinks": sinks}, **options)
    rest = 1 - p.sum(-1)  # exp(0) and the other sinks, of a sum that has exp(0) too much
    whole = np.exp(sinks).sum(-1)[None, :, None] / rest - 1
    with np.errstate(divide="ignore"):
        log = np.log2(whole)
    return np.where(whole > 1e-12, log, np.inf)


def spreads(ids, block):
    """What ``spread_kernel`` finds of blocks of ids."""
    B, n = ids.shape
    found = torch.empty(B, 3, -(-n // block), dtype=ids.dtype)
    for b in range(B):
        for i, part in enumerate(ids[b].split(block)):
            highest = part.max().clamp(min=-1)
            real = part[part >= 0]
            found[b, :, i] = torch.stack([real.min() if len(real) else highest, highest, part.min()])
    return found


def inputs(case):
    """``(inputs, outputs, constants)`` of the kernel."""
    x = case.arrays
    (B, T, H, K), (S, G, V) = x["query"].shape, x["value"].shape[1:]
    left, right = sides(case.causal, case.window)
    scale = K**-0.5 if case.scale is None else case.scale
    log2e = math.log2(math.e)
    cap = case.soft_cap
    strides = {f"stride_{name[0]}{axis}": x[name].stride(i)
               for name in ("query", "key", "value") for i, axis in enumerate("bth")}
    ids = x["key_segments"]
    given = dict(
        q=x["query"], k=x["key"], v=x["value"], sinks=x["sinks"], query_ids=x["query_segments"], key_ids=ids,
        spreads=None if ids is None else spreads(ids, case.block), offsets=x["query_offset"],
        taken=torch.zeros(1, dtype=torch.int32) if case.shared else None, **strides,
        stride_queryb=T, stride_keyb=S, stride_sinksh=case.sinks,
        inner=scale / cap * 2 * log2e if cap else 0.0, unit=(cap or abs(scale)) * log2e,
        left=min(left or 0, FAR // 2), right=min(right or 0, FAR // 2), B=B, T=T, S=S, M=H // G,
    )
    made = dict(o=torch.full((B, T, H, V), torch.nan, dtype=x["query"].dtype), lse=torch.full((B, H, T), torch.nan),
                count=given["taken"])
    fixed = dict(
        H=H, K=K, V=V, R=H // G, RN=1, SINKS=case.sinks, GROUPS=2, ROWS=case.rows, N=case.block,
        BD=max(64, 1 << (max(K, V) - 1).bit_length()), STAGES=case.stages, HELD=case.held,
        CAP=case.tangent if cap else 0,
        NEGATIVE=not cap and scale < 0, BOUNDED=bool(cap) and cap <= 60 and case.dtype == "bfloat16",
        LEFT=left is not None, RIGHT=right is not None,
        OFFSET=case.offset is not None and (left, right) != (None, None), SEGMENTS=ids is not None, TURNS=case.turns,
        REGISTERS=240, OTHERS=24,
    )
    return given, made, fixed


def run(case, mode="late", seed=0):
    """``(output, lse)`` of the kernel in the emulator."""
    given, made, fixed = inputs(case)
    emulator.launch(forward_kernel, (case.programs,), *given.values(), *made.values(), *fixed.values(), mode=mode,
                    seed=seed)
    return made["o"], made["lse"]


def errors(case, got):
    """The output's relative error, and the log's largest error; infinities must agree."""
    (output, lse), (o, sums) = got, case.wanted()
    o_error = np.linalg.norm(output.double().numpy() - o) / max(np.linalg.norm(o), 1e-30)
    finite = np.isfinite(sums)
    assert (finite == torch.isfinite(lse).numpy()).all()
    assert not torch.isnan(output).any()
    assert (output.double().numpy()[~finite.transpose(0, 2, 1)] == 0).all()
    return o_error, np.abs(np.where(finite, lse.double().numpy(), 0) - np.where(finite, sums, 0)).max()


_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}


def built(case):
    """The kernel's resources; see ``tests/cuda/compile.py``."""
    given, made, fixed = inputs(case)
    types, constants = {}, dict(fixed)
    for name, x in {**given, **made}.items():
        if x is None:
            constants[name] = None
        elif isinstance(x, torch.Tensor):
            types[name] = "*" + _TYPES[x.dtype]
        else:
            types[name] = "fp32" if isinstance(x, float) else "i32"
    return resources(forward_kernel, types, constants)
