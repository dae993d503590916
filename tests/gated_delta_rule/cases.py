"""Calls of the gated delta rule as NumPy arrays, and their truth in float64."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

import keraunos
from keraunos.kernels.gated_delta_rule.contract import Args
from keraunos.kernels.gated_delta_rule.reference import gated_delta_rule
from keraunos.kernels.gated_delta_rule.reference_vjp import gated_delta_rule_vjp
from keraunos.numerics import coarser, working_dtype
from tests.linear_attention.cases import DTYPES, GPU, tensor_array, torch_tensor
from tests.numerics import assert_within_rule

NAMES = ("output", "final_state", "dquery", "dkey", "dvalue", "dg", "dbeta", "dinitial_state")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; the defaults are small and ordinary."""

    B: int = 2
    T: int = 100
    H: int = 2  # of the recurrence, as all arrays have unless another number is given
    HQ: int | None = None
    G: int | None = None  # of key
    HV: int | None = None
    HG: int | None = None
    HB: int | None = None
    K: int = 16
    V: int = 16
    gate: str = "scalar"  # none, scalar, vector
    gate_dtype: str = "float32"
    decay: float | None = 0.1  # strength of the gates; None: every seventh is -inf
    beta: float | None = -1  # below 0: between 0 and 1; None: not given
    # unit: of length 1; equal: all of them the same; some equal: those of 64 tokens, then 64 others, and again; longer:
    # of length 1 to 1.4
    keys: str = "unit"
    norm: bool = False
    state: bool = False
    reverse: bool = False
    lengths: tuple[int, ...] | None = None  # packed; B = 1 and T is their sum
    dtype: str = "float32"
    scale: float | None = None
    block: int | None = None

    @property
    def cu_seqlens(self):
        return None if self.lengths is None else np.cumsum([0, *self.lengths]).astype(np.int32)

    @property
    def options(self):
        return {"softmax_scale": self.scale, "use_qk_l2norm": self.norm, "reverse": self.reverse}

    @functools.cached_property
    def arrays(self) -> tuple[Args, np.ndarray, np.ndarray]:
        """The arguments, and gradients for the output and the final state."""
        rng = np.random.default_rng(0)
        B, T = (1, sum(self.lengths)) if self.lengths is not None else (self.B, self.T)
        N, H, K, V = B if self.lengths is None else len(self.lengths), self.H, self.K, self.V
        normal, dtype = rng.standard_normal, DTYPES[self.dtype]
        q, k, v = normal((B, T, self.HQ or H, K)), normal((B, T, self.G or H, K)), normal((B, T, self.HV or H, V))
        if not self.norm:
            k /= np.sqrt((k * k).sum(-1, keepdims=True))
        if self.keys == "equal":
            k[:] = k[:, :1]
        if self.keys == "some equal":
            k[:, np.arange(T) // 64 % 2 == 0] = k[:, :1]
        if self.keys == "longer":
            k *= 1 + 0.4 * rng.random((*k.shape[:3], 1))
        g = None
        if self.gate != "none":
            shape = (B, T, self.HG or H, K)[: 3 if self.gate == "scalar" else 4]
            g = -(0.1 if self.decay is None else self.decay) * rng.exponential(size=shape)
            if self.decay is None:
                g[:, ::7] = -np.inf
            g = g.astype(DTYPES[self.gate_dtype])
        shape = B, T, self.HB or H
        beta = None if self.beta is None else rng.random(shape) if self.beta < 0 else np.full(shape, self.beta)
        state = normal((N, H, K, V)).astype(np.float32) if self.state else None
        q, k, v, beta = (None if x is None else x.astype(dtype) for x in (q, k, v, beta))
        dstate = normal((N, H, K, V)).astype(np.float64 if self.dtype == "float64" else np.float32)
        return Args(q, k, v, g, beta, state, self.cu_seqlens), normal((B, T, H, V)).astype(dtype), dstate

    def reference(self, dtype=np.float64, gradients=True):
        """Output, final state, and the six gradients, token by token in ``dtype``."""
        args, doutput, dstate = self.arrays
        options = {**self.options, "dtype": dtype}
        found = [*gated_delta_rule(*args, **options)]
        return [*found, *gated_delta_rule_vjp(*args, doutput, dstate, **options)] if gradients else found

    def gate_terms(self, dg):
        """The magnitudes of the terms of each gate's gradient: one for each number of the states of its heads.

        Dimensions of values do not meet in the recurrence: each is computed as a head of its own, with its own gates.
        """
        if dg is None:
            return None
        args, doutput, dstate = self.arrays
        B, T, HG = dg.shape[:3]
        H, K, V = self.H, self.K, self.V

        def columns(x):
            return np.repeat(x, H // x.shape[2], 2).reshape(B, T, H * V, 1)

        def states(x):
            return None if x is None else x.swapaxes(2, 3).reshape(-1, H * V, K, 1)

        g = args.g.astype(np.float64)
        g = np.repeat(g if g.ndim == 4 else g[..., None].repeat(K, 3), H * V // HG, 2)
        wide = args._replace(value=columns(args.value), g=g, initial_state=states(args.initial_state))
        terms = np.abs(gated_delta_rule_vjp(*wide, columns(doutput), states(dstate), **self.options)[3])
        terms = terms.reshape(B, T, HG, H // HG * V, K).sum(3)
        return terms if dg.ndim == 4 else terms.sum(-1)

    def check(self, platform, framework):
        """Run the call and its gradients on a platform; hold it to the tolerance rule."""
        self.hold({"jax": run_jax, "torch": run_torch}[framework](platform, self))

    def hold(self, got):
        """Hold output, final state and the six gradients, if there are any, to the tolerance rule."""
        gradients = len(got) > 2
        truth, in_dtype = (self.reference(x, gradients) for x in (np.float64, working_dtype(self.dtype)))
        scales = [*truth[:5], self.gate_terms(truth[5]), *truth[6:]] if gradients else truth
        dtypes = [*[self.dtype] * 5, coarser(self.dtype, self.gate_dtype), self.dtype, coarser(self.dtype, "float32")]
        assert_within_rule(NAMES[: len(got)], got, truth, in_dtype, dtypes[: len(got)], scales)


@functools.cache
def _program(platform, options, block, present):
    """One compiled program for the values and gradients of all calls that differ in data only."""
    import jax

    cfg = keraunos.GatedDeltaRuleConfig(block_q=block) if block else None

    def call(floats, cu_seqlens):
        given = iter(floats)
        args = [next(given) if there else None for there in present]
        return keraunos.gated_delta_rule(*args, cu_seqlens, **dict(options), return_state=True, platform=platform,
                                         cfg=cfg)

    @jax.jit
    def both(floats, cu_seqlens, grads):
        outputs, pull = jax.vjp(lambda floats: call(floats, cu_seqlens), floats)
        return outputs, pull(grads)[0]

    return both


def run_jax(platform, case):
    import jax
    import jax.numpy as jnp

    args, doutput, dstate = case.arrays
    present = tuple(x is not None for x in args[:6])
    program = _program(platform, tuple(case.options.items()), case.block, present)
    *floats, cu_seqlens = (None if x is None else jnp.asarray(x) for x in args)
    floats = [x for x in floats if x is not None]
    outputs, grads = program(floats, cu_seqlens, (jnp.asarray(doutput), jnp.asarray(dstate)))
    assert outputs[0].dtype.name == case.dtype
    assert [x.dtype for x in grads] == [x.dtype for x in floats]
    found = iter(jax.tree.map(np.asarray, grads))
    return [*map(np.asarray, outputs), *(next(found) if there else None for there in present)]


def run_torch(platform, case):
    import torch

    args, doutput, dstate = case.arrays
    device = "cuda" if GPU else "cpu"
    args = [torch_tensor(x, device) for x in args]
    inputs = [x.requires_grad_() for x in args[:6] if x is not None]
    cfg = keraunos.GatedDeltaRuleConfig(block_q=case.block) if case.block else None
    outputs = keraunos.gated_delta_rule(*args, **case.options, return_state=True, platform=platform, cfg=cfg)
    assert str(outputs[0].dtype) == f"torch.{case.dtype}"
    torch.autograd.backward(list(outputs), [torch_tensor(doutput, device), torch_tensor(dstate, device)])
    assert all(x.grad.dtype == x.dtype for x in inputs)
    return [*map(tensor_array, outputs), *(None if x is None else tensor_array(x.grad) for x in args[:6])]
