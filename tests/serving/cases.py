"""Calls of the serving functions as NumPy arrays, their truth in float64, and how each framework runs them."""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest

from keraunos import serving
from keraunos.kernels import kernel_registry
from keraunos.kernels.gated_delta_rule.reference import gated_delta_rule
from keraunos.kernels.linear_attention.reference import linear_attention
from keraunos.numerics import coarser
from tests.linear_attention.cases import DTYPES, GPU, platforms
from tests.numerics import assert_within_rule

PLATFORMS = platforms()


@dataclasses.dataclass(frozen=True)
class Case:
    """One call on a pool whose other slots, and those of fresh requests, hold NaN."""

    op: str = "decode"
    slots: tuple[int, ...] = (3, -1, 6, 0)
    size: int = 8  # of the pool
    T: int = 3  # drafts
    lengths: tuple[int, ...] = ()  # of requests, prefill
    tail: int = 0  # tokens of padding, prefill
    counts: tuple[int, ...] = ()  # accepted drafts, commit
    fresh: tuple[int, ...] | None = None  # requests without a state, prefill; None: has_initial is not given
    tokens: tuple[int, ...] | None = None  # boundaries
    targets: tuple[int, ...] = ()
    H: int = 4
    G: int | None = None  # heads of key, and of value unless another number is given
    HQ: int | None = None
    HV: int | None = None
    HG: int | None = None
    K: int = 16
    V: int = 16
    gate: str = "none"  # none, scalar, vector
    gamma: bool = True
    each: bool = False  # a constant decay for each request
    decay: float = 0.3
    dtype: str = "float32"
    pool: str = "float32"
    delta: bool = False
    raw: str = ""  # gates in the call: "softplus", "bounded"
    norm: bool = False
    HB: int | None = None  # heads of beta
    scale: float | None = None
    seed: int = 0

    @property
    def rows(self) -> tuple[int, ...]:
        N = len(self.slots)
        return {"decode": (N,), "prefill": (sum(self.lengths) + self.tail,)}.get(self.op, (N, self.T))

    @property
    def options(self) -> dict:
        scale = {} if self.op == "commit" else {"softmax_scale": self.scale}
        norm = {"use_qk_l2norm": True} if self.norm else {}
        return scale | norm | ({"lower_bound": -5.0} if self.raw == "bounded" else {})

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray | None]:
        rng = np.random.default_rng(self.seed)
        rows, G, N = self.rows, self.G or self.H, len(self.slots)
        HG = self.HG or self.H

        def normal(*shape):
            return rng.standard_normal(shape).astype(DTYPES[self.dtype])

        def decays(*shape):
            x = -self.decay * rng.exponential(size=shape)
            x[rng.random(shape) < 0.05] *= 100
            if self.decay > 1:
                x[rng.random(shape) < 0.05] = -np.inf
            return x.astype(np.float32)

        states = rng.standard_normal((self.size, self.H, self.K, self.V)).astype(DTYPES[self.pool])
        used = [s for n, s in enumerate(self.slots) if s >= 0 and n not in (self.fresh or ())]
        states[np.setdiff1d(np.arange(self.size), used)] = np.nan
        shapes = {"scalar": (*rows, HG), "vector": (*rows, HG, self.K)}
        made = dict(
            query=normal(*rows, self.HQ or self.H, self.K), key=normal(*rows, G, self.K),
            value=normal(*rows, self.HV or G, self.V),
            g=decays(*shapes[self.gate]) if self.gate in shapes else None,
            g_gamma=decays(*[N] * self.each, self.H) if self.gamma else None, states=states,
            slots=np.array(self.slots, np.int32),
            counts=np.array(self.counts, np.int32) if self.op == "commit" else None,
            cu_seqlens=np.cumsum([0, *self.lengths]).astype(np.int32) if self.op == "prefill" else None,
            has_initial=None if self.fresh is None else ~np.isin(np.arange(N), self.fresh),
            tokens=None if self.tokens is None else np.array(self.tokens, np.int32),
            targets=np.array(self.targets, np.int32) if self.tokens is not None else None,
        )
        made |= dict.fromkeys(("beta", "A_log", "dt_bias"))
        if self.delta:
            heads = self.HB or self.H
            beta = (1 / (1 + np.exp(-rng.standard_normal((*rows, heads))))).astype(DTYPES[self.dtype])
            made["beta"] = normal(*rows, heads) if self.raw else beta
            # Where beta times the square of a key's length is above 2 states grow without end.
            made["key"] = made["key"] if self.norm else (made["key"] * self.K**-0.5).astype(DTYPES[self.dtype])
        if self.raw:
            dims = made["g"].shape[len(rows):]
            made["g"] = normal(*rows, *dims)
            made |= dict(A_log=normal(HG).astype(np.float32), dt_bias=normal(*dims).astype(np.float32))
        # Whatever padding holds must not matter.
        for n, slot in enumerate(self.slots):
            if slot < 0:
                where = np.s_[slice(*made["cu_seqlens"][n : n + 2])] if self.op == "prefill" else np.s_[n]
                made["query"][where] = made["key"][where] = np.nan
        if self.tail:
            made["value"][-self.tail :] = np.nan
        return made

    def gates(self, dtype) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The gates and beta of all tokens."""
        a = self.arrays
        g, beta = (a[name] if a[name] is None else a[name].astype(dtype) for name in ("g", "beta"))
        if self.raw:
            x = g + a["dt_bias"].astype(dtype)
            rate = np.exp(a["A_log"].astype(dtype)).reshape(-1, *(1,) * (self.gate == "vector"))
            g = -5 / (1 + np.exp(-rate * x)) if self.raw == "bounded" else -rate * np.logaddexp(x, dtype(0))
            beta = 1 / (1 + np.exp(-beta))
        return g, beta

    def truth(self, dtype=np.float64) -> tuple[np.ndarray | None, dict[int, np.ndarray]]:
        """The output, and the states of the slots that change."""
        a = self.arrays
        output = np.zeros((*self.rows, self.H, self.V), dtype)
        g, beta = self.gates(dtype)
        changed: dict[int, np.ndarray] = {}

        def recur(where, state):
            """The outputs and the last state of the tokens there, of request n."""
            gamma = a["g_gamma"][n] if self.each else a["g_gamma"]
            given = [x if x is None else x[where].reshape(1, -1 if x[where].size else 0, *x.shape[len(self.rows):])
                     for x in (a["query"], a["key"], a["value"], g, beta)]
            if not given[0].shape[1]:
                return given[0][..., :0], state[None]
            if self.delta:
                if gamma is not None:
                    gate = np.zeros((1, given[0].shape[1], 1), dtype) if given[3] is None else given[3]
                    gate = np.repeat(gate, self.H // gate.shape[2], 2)
                    given[3] = gate + gamma.astype(dtype).reshape(-1, *(1,) * (gate.ndim - 3))
                return gated_delta_rule(*given, state[None], softmax_scale=self.scale, use_qk_l2norm=self.norm,
                                        dtype=dtype)
            return linear_attention(*given[:4], gamma, state[None], softmax_scale=self.scale, dtype=dtype)

        for n, slot in enumerate(self.slots):
            if slot < 0:
                continue
            state = a["states"][slot].astype(dtype)
            where = np.s_[n : n + 1]
            if self.op == "prefill":
                begin, end = a["cu_seqlens"][n : n + 2]
                where = np.s_[begin:end]
                if n in (self.fresh or ()):
                    state = np.zeros_like(state)
                for token, target in zip(self.tokens or (), self.targets, strict=True):
                    if begin <= token < end and target >= 0:
                        changed[target] = recur(np.s_[begin : token + 1], state)[1][0]
            if self.op == "commit":
                where = np.s_[n, : self.counts[n]]
                if self.counts[n]:
                    changed[slot] = recur(where, state)[1][0]
                continue
            made, final = recur(where, state)
            if made.size:
                output[where] = made[0].reshape(output[where].shape)
            if self.op != "verify":
                changed[slot] = final[0]
        return None if self.op == "commit" else output, changed

    def check(self, run) -> None:
        """Hold ``run(case) -> (output or None, pool)`` to the tolerance rule, and every other slot to its bits."""
        output, pool = run(self)
        (truth, changed), (in_dtype, changed_in_dtype) = self.truth(), self.truth(np.float32)
        before = self.arrays["states"]
        untouched = np.setdiff1d(np.arange(self.size), list(changed))
        assert pool.dtype == before.dtype
        assert pool[untouched].tobytes() == before[untouched].tobytes(), "a slot changed that is not the call's"
        names = [f"slot {slot}" for slot in changed]
        got, want, near = [pool[s] for s in changed], list(changed.values()), list(changed_in_dtype.values())
        dtypes = [coarser(self.dtype, self.pool)] * len(changed)
        if truth is not None:
            dead = ~np.abs(truth).sum((-1, -2)).astype(bool)
            assert not output[dead].any(), "a row of padding is not zero"
            names, got, want, near = ["output", *names], [output, *got], [truth, *want], [in_dtype, *near]
            dtypes = [self.dtype, *dtypes]
        assert_within_rule(names, got, want, near, dtypes)


def arguments(op: str, a: dict) -> tuple[list, dict]:
    """Arguments of the public function from a case's arrays, in whatever framework."""
    positional = {
        "decode": ("query", "key", "value", "states", "slots"), "verify": ("query", "key", "value", "states", "slots"),
        "commit": ("key", "value", "states", "slots", "counts"),
        "prefill": ("query", "key", "value", "states", "slots", "cu_seqlens"),
    }[op]
    options = {name: a[name] for name in ("g", "g_gamma", "beta")}
    if a["A_log"] is not None:
        options |= {"a": options.pop("g"), "b": options.pop("beta"), "A_log": a["A_log"], "dt_bias": a["dt_bias"]}
    if op == "prefill":
        options["has_initial"] = a["has_initial"]
        options["boundaries"] = None if a["tokens"] is None else (a["tokens"], a["targets"])
    return [a[name] for name in positional], options


def require(case: Case, platform: str) -> None:
    """Skip a test of the delta rule on a platform that does not have it."""
    if case.delta and platform not in kernel_registry.platforms("delta_prefill"):
        pytest.skip("does not have the delta rule")


def results(op: str, given: dict, made) -> tuple:
    """``(output, pool)`` of what the public function returned."""
    return {"verify": lambda: (made, given["states"]), "commit": lambda: (None, made)}.get(op, lambda: made)()


def tensor(x):
    """A tensor on the device of the tests."""
    import torch

    device = "cuda" if GPU else "cpu"
    if x is None:
        return None
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.array(x)).to(device)


def array(x):
    """A tensor's values, bit for bit."""
    import torch

    if x is None:
        return None
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def run_torch(platform, case, view=lambda given: given, **options):
    given = view({name: tensor(x) for name, x in case.arrays.items()})
    args, gates = arguments(case.op, given)
    made = getattr(serving, case.op)(*args, **gates, **case.options, **options, platform=platform)
    output, pool = results(case.op, given, made)
    assert pool is given["states"]
    return array(output), array(pool)


def run_jax(platform, case):
    import jax.numpy as jnp

    given = {name: None if x is None else jnp.asarray(x) for name, x in case.arrays.items()}
    args, gates = arguments(case.op, given)
    made = getattr(serving, case.op)(*args, **gates, **case.options, platform=platform)
    output, pool = results(case.op, given, made)
    return None if output is None else np.asarray(output), np.asarray(pool)


def runner(platform, framework):
    """``run(case) -> (output, pool)``."""
    return functools.partial({"jax": run_jax, "torch": run_torch}[framework], platform)
