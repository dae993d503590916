"""Keys that no query sees have no influence on a result, nor has a query without a gradient, whatever they hold."""

import dataclasses

import numpy as np
import pytest

import keraunos
from keraunos.kernels.softmax_attention.contract import keeps
from keraunos.types import MaskInfo
from tests.linear_attention.cases import GPU, INTERPRETED
from tests.numerics import assert_within_rule
from tests.softmax_attention.cases import platforms

B, T, G, K = 2, 40, 1, 16
NAMES = ("output", "dquery", "dkey", "dvalue", "dbias", "dsinks")
GARBAGE = {"nan": np.nan, "inf": np.inf, "large": 3e38}
LENGTHS, OFFSETS = np.array([21, 35]), np.array([7, -12])
SEGMENTS = np.array([[0] * 10 + [3] * 17 + [-1] * 13, [2] * 33 + [5] * 7])


@dataclasses.dataclass(frozen=True)
class Case:
    """A call some of whose keys no query sees. ``later``: queries see keys that are not finite, others do not."""

    S: int = T
    causal: bool = False
    window: tuple[int, int] | None = None
    offsets: bool = False
    lengths: bool = False
    segments: bool = False
    mask: bool = False
    bias: bool = False
    H: int = 2
    sinks: bool = False
    soft_cap: float | None = None
    dropout: float = 0.0
    weights: bool = False
    later: int = 0

    @property
    def seen(self):
        """``[B, H, T, S]``."""
        place = np.arange(T)[:, None] + (OFFSETS if self.offsets else np.zeros(B, int))[:, None, None, None]
        s = np.arange(self.S)
        seen = np.ones((B, self.H, T, self.S), bool)
        if self.causal:
            seen &= s <= place
        if self.window:
            seen &= (s >= place - self.window[0]) & (s <= place + self.window[1])
        if self.lengths:
            seen &= s < LENGTHS[:, None, None, None]
        if self.segments:
            own = SEGMENTS[:, None, :, None]
            # Other ids than the keys': one that only keys have.
            seen &= (own == self.key_segments[:, None, None]) & (own >= 0)
        if self.mask or self.bias:
            seen &= self.visible
        return seen

    @property
    def key_segments(self):
        return np.where(np.arange(self.S) % 9 == 4, 7, np.resize(SEGMENTS, (B, self.S)))

    @property
    def visible(self):
        """``[B, H, T, S]``: of each key all queries or none, and some queries see nothing."""
        rng = np.random.default_rng(1)
        seen = rng.random((B, self.H, T, self.S)) < 0.7
        seen[..., rng.random(self.S) < 0.3] = False
        seen[:, :, 5] = False
        return seen

    def arrays(self, garbage, queries=True):
        """Query, key, value, bias, sinks and the output's gradient, with garbage where nothing may come from.

        ``queries``: also in queries whose output has no gradient.
        """
        rng = np.random.default_rng(0)
        q, do = (rng.standard_normal((B, T, self.H, K)).astype(np.float32) for _ in range(2))
        k, v = (rng.standard_normal((B, self.S, G, K)).astype(np.float32) for _ in range(2))
        bias = None
        if self.bias:
            bias = rng.standard_normal((B, self.H, T, self.S)).astype(np.float32)
            bias[~self.visible] = -np.inf
        sinks = rng.standard_normal((self.H, 2)).astype(np.float32) if self.sinks else None
        if self.sinks:
            sinks[0] = -np.inf  # The first head has none, in effect.
        # Padding: the last queries, and some in between.
        dead = np.arange(T) >= T - 3
        dead[11] = True
        q[:, dead], do[:, dead] = garbage if queries else 1, 0
        if self.later:
            k[:, -self.later :, :, 1::2] = v[:, -self.later :, :, ::3] = garbage
            return q, k, v, bias, sinks, do
        hidden = ~self.seen.any((1, 2))
        assert hidden.any()
        for x in (k, v):
            x[np.broadcast_to(hidden[..., None, None], x.shape)] = garbage
        return q, k, v, bias, sinks, do

    def options(self, framework, array):
        info = MaskInfo()
        if self.segments:
            info = MaskInfo.from_segments(array(SEGMENTS.astype(np.int32)), array(self.key_segments.astype(np.int32)))
        if self.mask:
            info = MaskInfo.from_attention_mask(array(self.visible))
        if self.lengths:
            info = info.apply_kv_lengths(array(LENGTHS.astype(np.int32)))
        return dict(mask_info=info, causal=self.causal, sliding_window=self.window, logits_soft_cap=self.soft_cap,
                    query_offset=array(OFFSETS.astype(np.int32)) if self.offsets else None,
                    dropout_prob=self.dropout, deterministic=not self.dropout)


def truth(case, arrays, seed, dtype):
    """``(output, weights, gradients of the first five arrays, magnitude of the last one's terms)``, pair by pair.

    Queries whose output has no gradient give none.
    """
    q, k, v, bias, sinks, do = (None if x is None else x.astype(dtype) for x in arrays)
    seen, scale = case.seen, dtype(K**-0.5)
    o, weights = np.zeros((B, T, case.H, K), dtype), np.zeros((B, case.H, T, case.S), dtype)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    dbias, dsinks = np.zeros_like(weights), np.zeros((2, case.H, 2), dtype)
    at = np.arange(max(T, case.S)).astype(np.uint64)
    for b, h, t in np.ndindex(B, case.H, T):
        own = np.flatnonzero(seen[b, h, t])
        kk, vv, qq, g = k[b, own, 0], v[b, own, 0], q[b, t, h], do[b, t, h]
        x = scale * (kk @ qq)
        slope = np.ones_like(x)
        if case.soft_cap:
            x = dtype(case.soft_cap) * np.tanh(x / dtype(case.soft_cap))
            slope = 1 - (x / dtype(case.soft_cap)) ** 2
        if bias is not None:
            x = x + bias[b, h, t, own]
        sink = np.zeros(0, dtype) if sinks is None else sinks[h]
        every = np.concatenate([x, sink])
        if not (every != -np.inf).any():
            continue
        every = np.exp(every - every.max())
        p = every / every.sum()
        p, sink = p[: len(own)], p[len(own) :]
        keep = dtype(1)
        if case.dropout:
            keep = keeps(seed.astype(np.uint64), np.uint64(b * case.H + h), at[t], at[own], case.dropout)
            keep = keep / dtype(1 - case.dropout)
        o[b, t, h], weights[b, h, t, own] = (p * keep) @ vv, p * keep
        if not g.any():
            continue
        dp = keep * (vv @ g)
        mean = (p * dp).sum()
        dx = p * (dp - mean)
        dz = scale * dx * slope
        dq[b, t, h] = dz @ kk
        dk[b, own, 0] += dz[:, None] * qq
        dv[b, own, 0] += (p * keep)[:, None] * g
        dbias[b, h, t, own] = dx
        if sinks is not None:
            dsinks[:, h] += -sink * mean, np.abs(sink * mean)
    return o, weights, dq, dk, dv, dbias, *dsinks


def run(platform, framework, case, arrays, block):
    """``(output, weights or None, gradients)`` and the dropout's seed."""
    keys = None if platform == "torch" else block
    cfg = keraunos.AttentionConfig(block_q=block, block_k=keys) if block else None
    same = dict(dtype=None, platform=platform, cfg=cfg, return_weights=case.weights)
    if framework == "jax":
        import jax
        import jax.numpy as jnp

        rng = jax.random.key(3)
        *given, do = (None if x is None else jnp.asarray(x) for x in arrays)
        options = case.options(framework, jnp.asarray)

        def call(q, k, v, bias, sinks):
            made = keraunos.attention(q, k, v, bias, rng, sinks, **options, **same)
            return made if case.weights else (made, None)

        output, pull, weights = jax.vjp(call, *given, has_aux=True)
        found = [output, weights, *pull(do)]
        return [x if x is None else np.array(x) for x in found], np.asarray(jax.random.bits(rng, (2,), jnp.uint32))
    import torch

    def tensor(x):
        return torch.from_numpy(np.array(x)).to("cuda" if GPU else "cpu")

    *given, do = (None if x is None else tensor(x) for x in arrays)
    given = [x if x is None else x.requires_grad_() for x in given]
    rng, again = (torch.Generator().manual_seed(3) for _ in range(2))
    made = keraunos.attention(*given[:4], rng, given[4], **case.options(framework, tensor), **same)
    output, weights = made if case.weights else (made, None)
    output.backward(do)
    found = [output, weights, *(x if x is None else x.grad for x in given)]
    return [None if x is None else x.detach().cpu().numpy() for x in found], torch.randint(
        1 << 32, (2,), generator=again).numpy()


def check(platform, framework, case, garbage, block=None):
    # Other kernels multiply by all queries of a block that see any key of it.
    arrays = case.arrays(np.float32(garbage), queries=platform in ("xla", "torch"))
    got, seed = run(platform, framework, case, arrays, block)
    with np.errstate(all="ignore"):
        *found, terms = zip(*(truth(case, arrays, seed, dtype) for dtype in (np.float64, np.float32)), strict=True)
        found = [list(x) for x in zip(*found, strict=True)]
    dead = ~arrays[5].any((-1, -2))
    for x in (got, *found):
        # The output of padding is anything.
        x[0][dead] = 0
    names = ("output", "weights", *NAMES[1:])
    seen = [x[0] is not None for x in zip(got, strict=True)]
    got, *found = ([x[i] for i, there in enumerate(seen) if there] for x in (got, *found))
    names = [name for name, there in zip(names, seen, strict=True) if there]
    for i, name in enumerate(names):
        if name == "weights":
            for x in (got, *found):
                x[i][np.broadcast_to(dead[:, None, :, None], x[i].shape)] = 0
        finite = np.isfinite(found[0][i])
        if case.later and name != "output":
            # Only of queries that do not see them: their own gradients.
            continue
        assert np.array_equal(np.isnan(got[i]), np.isnan(found[0][i])), f"{name}: other values are NaN"
        hidden = ~case.seen.any((1, 2))
        if name in ("dkey", "dvalue"):
            assert not got[i][hidden].any(), f"{name}: a key that no query sees has a gradient"
        for x in (got, *found):
            x[i] = np.where(finite, x[i], 0)
    if case.later:
        good = ~(case.seen[..., -case.later :].any((1, 3)))
        at = names.index("dquery")
        got, *found = ([x[0], np.where(good[..., None, None], x[at], 0)] for x in (got, *found))
        names = ["output", "dquery"]
    scales = [terms[0] if name == "dsinks" else x for name, x in zip(names, found[0], strict=True)]
    assert_within_rule(names, got, *found, ["float32"] * len(names), scales)


# Triton's interpreter compares NaN.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value", "ignore:overflow")


@pytest.fixture(params=platforms(), ids="-".join)
def platform(request):
    if request.param[0] == "cuda":
        pytest.skip("takes 16 bits")
    return request.param


HIDDEN = {
    "lengths": Case(lengths=True),
    "lengths, causal": Case(lengths=True, causal=True, H=1),
    "segments": Case(segments=True, sinks=True),
    "segments, window, cap": Case(segments=True, window=(9, 3), soft_cap=4.0, lengths=True),
    "mask": Case(mask=True, soft_cap=3.0),
    "mask of a causal call, sinks": Case(mask=True, causal=True, sinks=True, dropout=0.3),
    "causal": Case(S=70, causal=True),
    "causal, offsets": Case(S=70, causal=True, offsets=True, soft_cap=5.0),
    "window, offsets": Case(S=70, window=(6, 2), offsets=True, dropout=0.3),
    "bias": Case(bias=True),
    "bias, cap, sinks": Case(bias=True, soft_cap=3.0, sinks=True, dropout=0.3),
}
BLOCKS = {"blocks": 16} if INTERPRETED or GPU else {"at_once": None, "blocks": 16}


# XLA compiles each: of the two calls that hide keys in the same way, one at once and the other block by block.
@pytest.mark.parametrize(("platform", "name", "block"), [
    pytest.param(where, name, block, id="-".join([*where, name, size]))
    for where in platforms() for i, name in enumerate(HIDDEN) for size, block in BLOCKS.items()
    if where[0] != "xla" or GPU or (block is None) == (i % 2 == 0) or name == "window, offsets"
], indirect=["platform"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_keys_that_no_query_sees(platform, name, garbage, block):
    if platform[0] == "triton" and HIDDEN[name].bias:
        pytest.skip("a bias of -inf hides no NaN there: docs/numerics.md")
    check(*platform, HIDDEN[name], GARBAGE[garbage], block)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", ["lengths, causal", "mask", "bias", "causal, offsets"])
def test_weights_that_are_returned(platform, name, garbage):
    if platform[0] in ("triton", "cuda"):
        pytest.skip("forms no weights")
    check(*platform, dataclasses.replace(HIDDEN[name], weights=True), GARBAGE[garbage])


LATER = {
    "causal": Case(causal=True, later=5), "window": Case(window=(12, 3), later=9),
    "segments": Case(segments=True, later=7, soft_cap=4.0), "mask": Case(mask=True, causal=True, later=4),
    "weights": Case(causal=True, later=5, weights=True), "dropout": Case(causal=True, later=5, dropout=0.3),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("garbage", ["nan", "inf"])
@pytest.mark.parametrize("name", LATER)
def test_a_query_has_nothing_of_keys_that_others_see(platform, name, garbage, block):
    if platform[0] in ("triton", "cuda"):
        pytest.skip("keys of a block are those of all its queries")
    check(*platform, LATER[name], GARBAGE[garbage], None if LATER[name].weights else block)
