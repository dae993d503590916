"""Runs softmax attention on ``cuda`` in the emulator: cases, and what float64 gives for them."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import numpy as np
import torch

from keraunos import frontends
from keraunos.kernels.softmax_attention.contract import Args, Options, describe, sides
from keraunos.kernels.softmax_attention.cuda import passes
from keraunos.kernels.softmax_attention.cuda.forward import forward_kernel
from keraunos.kernels.softmax_attention.reference import attention
from keraunos.kernels.softmax_attention.shared.call import LOG2E
from keraunos.kernels.softmax_attention.shared.gradients import mean_kernel, sum_kernel
from keraunos.kernels.softmax_attention.shared.tiles import mask_kernel, spread_kernel
from keraunos.ops.invocation import Config
from tests.cuda.builds import launched
from tests.cuda.compile import known
from tests.cuda.platform import launcher


@dataclasses.dataclass(frozen=True)
class Case:
    """A call; ``segments``: ``(lengths of the queries' segments, of the keys')``, -n: as long, but padding.

    programs: as many run at once. cfg: what differs from the heuristic's configuration. exact: caps have the tangent
    that is exact next to 0, as large ones always have. learned: a gradient of the bias is wanted.
    """

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
    bias: tuple[int, int] | None = None  # rows of the batch and heads
    mask: tuple[int, int] | None = None
    dropout: float = 0.0
    programs: int = 3
    cfg: tuple[tuple[str, int], ...] = ()
    exact: bool = False
    learned: bool = False

    @functools.cached_property
    def arrays(self):
        rng = np.random.default_rng(0)
        S, V = self.T if self.S is None else self.S, self.V or self.D

        def normal(*shape):
            return torch.from_numpy(rng.standard_normal(shape)).to(getattr(torch, self.dtype))

        mask = None
        if self.mask:
            mask = torch.from_numpy(rng.random((*self.mask, self.T, S)) < 0.7)
            mask[..., :150, 128:] = False  # whole blocks
            mask[..., 150:, :128] = True
        ids = [None, None]
        if self.segments:
            ids = [torch.tensor([i if n > 0 else -1 for i, n in enumerate(lengths) for _ in range(abs(n))])
                   .to(torch.int32).expand(self.B, -1).contiguous() for lengths in self.segments]
        return dict(
            query=normal(self.B, self.T, self.H, self.D), key=normal(self.B, S, self.G, self.D),
            value=normal(self.B, S, self.G, V),
            sinks=torch.from_numpy(rng.standard_normal((self.H, self.sinks)).astype("f4")) if self.sinks else None,
            bias=normal(*self.bias, self.T, S) if self.bias else None, mask=mask,
            seed=torch.tensor([3, 2**32 - 5]) if self.dropout else None, query_segments=ids[0], key_segments=ids[1],
            query_offset=torch.tensor(self.offset, dtype=torch.int32) if self.offset else None,
        )

    @functools.cached_property
    def doutput(self):
        """The gradient of the output."""
        shape = (*self.arrays["query"].shape[:3], self.arrays["value"].shape[3])
        return torch.from_numpy(np.random.default_rng(1).standard_normal(shape)).to(self.arrays["query"].dtype)

    def _float64(self):
        given = {name: None if x is None else (x.double() if x.is_floating_point() else x).numpy()
                 for name, x in self.arrays.items()}
        return given, dict(softmax_scale=self.scale, soft_cap=self.soft_cap, causal=self.causal, window=self.window,
                           dropout=self.dropout)

    def wanted(self):
        """``(output, lse)`` in float64."""
        given, options = self._float64()
        output, _ = attention(**given, **options)
        return output, _logs(given, options, self.H)

    def wanted_gradients(self):
        """``(dq, dk, dv, dsinks or None)`` in float64."""
        given, options = self._float64()
        *grads, _, dsinks = attention(**given, **options, doutput=self.doutput.double().numpy())
        return *grads, dsinks.sum((0, 2)) if self.sinks else None


def _logs(given, options, H):
    """The log of each query's sum, base 2, inf where there is none ``[B, H, T]``, of the weight of one more sink."""
    one = np.zeros((H, 1))
    sinks = one if given["sinks"] is None else np.concatenate([given["sinks"], one], 1)
    _, p = attention(**{**given, "sinks": sinks}, **options | {"dropout": 0.0})
    rest = 1 - p.sum(-1)  # exp(0) and the other sinks, of a sum that has exp(0) too much
    whole = np.exp(sinks).sum(-1)[None, :, None] / rest - 1
    with np.errstate(divide="ignore"):
        log = np.log2(whole)
    return np.where(whole > 1e-12, log, np.inf)


def spreads(ids, block):
    """The results of ``spread_kernel`` for blocks of ids."""
    B, n = ids.shape
    found = torch.empty(B, 3, -(-n // block), dtype=ids.dtype)
    for b in range(B):
        for i, part in enumerate(ids[b].split(block)):
            highest = part.max().clamp(min=-1)
            real = part[part >= 0]
            found[b, :, i] = torch.stack([real.min() if len(real) else highest, highest, part.min()])
    return found


def flags(mask, rows, columns):
    """The results of ``mask_kernel`` for blocks of a mask."""
    B, heads, T, S = mask.shape
    found = torch.empty(B, heads, -(-T // rows), -(-S // columns), dtype=torch.int8)
    for i, tile in enumerate(mask.split(rows, 2)):
        for j, block in enumerate(tile.split(columns, 3)):
            found[:, :, i, j] = block.flatten(2).any(-1).to(torch.int8) + block.flatten(2).all(-1).to(torch.int8)
    return found


def means(inputs, outputs, constants):
    """The results of ``mean_kernel``, the sinks' gradients in one part."""
    mean = (inputs["o"].float() * inputs["do"].float()).sum(-1).transpose(1, 2).contiguous()
    if outputs["dsinks"] is None:
        return mean, None
    p = torch.exp2(inputs["sinks"][None, :, None] * LOG2E - inputs["lse"][..., None])
    parts = torch.zeros(outputs["dsinks"][0])
    parts[:, :, 0] = -(p * mean[..., None]).sum(2)
    return mean, parts


def sums(inputs, outputs, constants):
    """The results of ``sum_kernel`` for sinks of each head."""
    return (inputs["x"].sum((0, 2)),)


# Kernels in Triton, which the emulator does not know.
TRITON = {
    spread_kernel: lambda inputs, outputs, constants: (spreads(inputs["ids"], constants["BLOCK"]),),
    mask_kernel: lambda inputs, outputs, constants: (flags(inputs["mask"], constants["BT"], constants["BS"]),),
    mean_kernel: means, sum_kernel: sums,
}


def call(case, gradients=False, device="cpu"):
    """``(output, lse)`` of the platform's own host code, or gradients."""
    args = Args(**{name: x if x is None else x.to(device) for name, x in case.arrays.items()})
    cfg = dataclasses.replace(passes.heuristic(describe(args), Config()), **dict(case.cfg))
    scale = case.D**-0.5 if case.scale is None else case.scale
    opts = Options(scale, case.soft_cap, *sides(case.causal, case.window), case.dropout, "float32", False, cfg,
                   () if case.learned else ("bias",))
    large = 0 if case.exact else passes._LARGE_CAP
    with mock.patch.multiple(passes, _PROGRAMS=case.programs, _LARGE_CAP=large):
        residuals = passes.forward(args, opts)[1]
        return passes.backward(args, residuals, (case.doutput.to(device), None), opts) if gradients else residuals


def run(case, mode="late", seed=0, gradients=False, replaced=None):
    """``(output, lse)``, or the gradients of the arrays that have any, from the emulator.

    replaced: other kernels in place of some, by their names.
    """
    emulated = launcher(mode, seed, replaced)

    def launch(kernel, grid, inputs, outputs, constants, **options):
        if kernel in TRITON:
            return TRITON[kernel](inputs, outputs, constants)
        return emulated(kernel, grid, inputs, outputs, constants, **options)

    with mock.patch.object(frontends, "launch", launch):
        made = call(case, gradients)
    return [x for x in made if x is not None] if gradients else made


def errors(case, got):
    """The output's relative error, and the log's largest error; infinities must agree."""
    (output, lse), (o, sums) = got, case.wanted()
    o_error = np.linalg.norm(output.double().numpy() - o) / max(np.linalg.norm(o), 1e-30)
    finite = np.isfinite(sums)
    assert (finite == torch.isfinite(lse).numpy()).all()
    assert not torch.isnan(output).any()
    assert (output.double().numpy()[~finite.transpose(0, 2, 1)] == 0).all()
    return o_error, np.abs(np.where(finite, lse.double().numpy(), 0) - np.where(finite, sums, 0)).max()


def builds(case, gradients=False):
    """The kernels in Gluon that a call launches."""
    return [build for build in launched(lambda: call(case, gradients)) if build[0] not in TRITON]


def build_of(case, kernel):
    """The kernel's build in a call, or in its gradients: the kernel, the types of its arguments, constants."""
    (build,) = [build for build in builds(case, kernel is not forward_kernel) if build[0] is kernel]
    return kernel, *map(dict, build[1:])


def built(case, kernel):
    """The kernel's resources in a call, or in its gradients; see ``tests/cuda/compile.py``."""
    return known(*build_of(case, kernel))
