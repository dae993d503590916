"""Calls of the linear recurrence as NumPy arrays, their truth in float64, and the platforms that run them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os

import ml_dtypes
import numpy as np

from keraunos.kernels.linear_attention.contract import Args
from keraunos.kernels.linear_attention.reference import linear_attention
from keraunos.kernels.linear_attention.reference_vjp import linear_attention_vjp
from keraunos.numerics import coarser, working_dtype
from tests.numerics import assert_within_rule

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}
GPU = os.environ.get("KERAUNOS_TEST_GPU") == "1"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# In place of a gradient that the call does not make.
LEFT_OUT = object()


def platforms() -> list[tuple[str, str]]:
    """The (platform, framework) pairs that run here."""
    if INTERPRETED:
        return [("triton", "torch")]
    pairs = [("xla", "jax"), ("torch", "torch")] + ([("triton", "jax"), ("triton", "torch")] if GPU else [])
    return [pair for pair in pairs if importlib.util.find_spec(pair[1])]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; the defaults are small and ordinary."""

    B: int = 2
    T: int = 100
    H: int = 2  # of the recurrence, as query and gates have unless another number is given
    G: int | None = None  # of key, and of value unless another number is given
    HQ: int | None = None
    HV: int | None = None
    HG: int | None = None
    K: int = 16
    V: int = 16
    gate: str = "none"  # none, scalar, vector
    gamma: int = 0  # number of dimensions of g_gamma; 0: none
    decay: str = "weak"  # zero, weak, moderate, strong, infinite (some gates are -inf, some -100)
    state: bool = False
    dstate: bool = True
    reverse: bool = False
    lengths: tuple[int, ...] | None = None  # packed; B = 1 and T is their sum
    dtype: str = "float32"
    gate_dtype: str = "float32"
    scale: float | None = None
    seed: int = 0

    @property
    def cu_seqlens(self):
        return None if self.lengths is None else np.cumsum([0, *self.lengths]).astype(np.int32)

    @functools.cached_property
    def arrays(self) -> tuple[Args, np.ndarray, np.ndarray]:
        """The arguments, and gradients for the output and the final state."""
        rng = np.random.default_rng(self.seed)
        B, T = (1, sum(self.lengths)) if self.lengths is not None else (self.B, self.T)
        H, G, K, V = self.H, self.G or self.H, self.K, self.V
        HG = self.HG or H
        N = len(self.lengths) if self.lengths is not None else B
        dtype = DTYPES[self.dtype]

        def normal(*shape, dtype=dtype):
            return rng.standard_normal(shape).astype(dtype)

        def decays(*shape):
            strength = {"zero": 0.0, "weak": 0.1, "moderate": 0.4, "strong": 8.0, "infinite": 0.5}[self.decay]
            x = -strength * rng.exponential(size=shape)
            if self.decay == "infinite":
                x[rng.random(shape) < 0.1] = -np.inf
                x[rng.random(shape) < 0.1] = -100.0
            return x.astype(DTYPES[self.gate_dtype])

        shapes = {"scalar": (B, T, HG), "vector": (B, T, HG, K)}
        args = Args(
            normal(B, T, self.HQ or H, K),
            normal(B, T, G, K),
            normal(B, T, self.HV or G, V),
            decays(*shapes[self.gate]) if self.gate in shapes else None,
            decays(*((H,) if self.gamma == 1 else (B, H))) if self.gamma else None,
            normal(N, H, K, V, dtype=np.float32) if self.state else None,
            self.cu_seqlens,
        )
        state_dtype = np.float64 if self.dtype == "float64" else np.float32
        dstate = normal(N, H, K, V, dtype=state_dtype) if self.dstate else np.zeros((N, H, K, V), state_dtype)
        return args, normal(B, T, H, V), dstate

    def reference(self, dtype=np.float64):
        """Output, final state, and the six gradients, token by token in ``dtype``; and what each error is relative to.

        The gradients of gates are the sums of those of full vector gates; their scales the sums of the magnitudes.
        """
        args, doutput, dstate = self.arrays
        options = {"softmax_scale": self.scale, "reverse": self.reverse, "dtype": dtype}
        (B, T), K = args.query.shape[:2], self.K
        gate = np.zeros((B, T, self.H, K), dtype)
        if args.g is not None:
            g = np.repeat(args.g.astype(dtype), self.H // args.g.shape[2], axis=2)
            gate = gate + (g if g.ndim == 4 else g[..., None])
        *grads, dgate, dgamma, dinitial = linear_attention_vjp(*args._replace(g=gate), doutput, dstate, **options)
        axes = {0: None, 1: (0, 1, 3), 2: (1, 3)}[self.gamma]

        def sums(x):
            HG = self.HG or self.H
            own = x.reshape(B, T, HG, self.H // HG, K).sum(3)
            return {"none": None, "scalar": own.sum(-1), "vector": own}[self.gate], x.sum(axes) if axes else None

        values = [*linear_attention(*args, **options), *grads, sums(dgate)[0], dgamma, dinitial]
        return values, [*values[:5], *sums(np.abs(dgate)), dinitial]

    def check(self, run, *, gradients=True):
        """Run the call by ``run(case, gradients) -> output, state, six gradients``; hold it to the tolerance rule."""
        got = run(self, gradients)
        (truth, scale), (in_dtype, _) = self.reference(), self.reference(working_dtype(self.dtype))
        for i in (5, 6) if gradients else ():
            if got[i] is LEFT_OUT:
                got[i] = truth[i] = None
        dtypes = [*[self.dtype] * 5, *[coarser(self.dtype, self.gate_dtype)] * 2, coarser(self.dtype, "float32")]
        names = ["output", "final_state", "dquery", "dkey", "dvalue", "dg", "dg_gamma", "dinitial_state"]
        n = 8 if gradients else 2
        assert_within_rule(names[:n], got[:n], truth[:n], in_dtype[:n], dtypes[:n], scale[:n])


def run_jax(platform, function, case, gradients):
    """Run a case through JAX: ``function(args, case, platform) -> (output, state)``."""
    import jax
    import jax.numpy as jnp

    args, doutput, dstate = case.arrays
    args = [None if x is None else jnp.asarray(x) for x in args]
    doutput, dstate = jnp.asarray(doutput), jnp.asarray(dstate)

    def call(*floats):
        return function((*floats, args[6]), case, platform)

    if not gradients:
        return [np.asarray(x) for x in call(*args[:6])]
    outputs, pull = jax.vjp(call, *args[:6])
    return [None if x is None else np.asarray(x) for x in (*outputs, *pull((doutput, dstate)))]


def torch_tensor(x, device="cpu"):
    """A NumPy array as a tensor; None stays None."""
    import torch

    if x is None:
        return None
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.astype(np.float32)).to(device, torch.bfloat16)
    return torch.from_numpy(np.array(x)).to(device)


def tensor_array(x):
    """A tensor as a NumPy array; None stays None."""
    import torch

    if x is None:
        return None
    return (x.double() if x.dtype == torch.bfloat16 else x).detach().cpu().numpy()


def run_torch(platform, function, case, gradients):
    """Run a case through torch."""
    import torch

    args, doutput, dstate = case.arrays
    device = "cuda" if GPU else "cpu"

    args = [torch_tensor(x, device) for x in args]
    inputs = [x for x in args[:6] if x is not None]
    for x in inputs:
        x.requires_grad_(gradients)
    outputs = function(args, case, platform)
    got = [tensor_array(x) for x in outputs]
    assert str(outputs[0].dtype) == f"torch.{case.dtype}"
    if not gradients:
        return got
    torch.autograd.backward(list(outputs), [torch_tensor(doutput, device), torch_tensor(dstate, device)])
    for x in inputs:
        assert x.grad.dtype == x.dtype
    return got + [None if x is None else tensor_array(x.grad) for x in args[:6]]


def runner(platform, framework, function):
    """``run(case, gradients)`` for a platform and a framework."""
    return functools.partial({"jax": run_jax, "torch": run_torch}[framework], platform, function)
