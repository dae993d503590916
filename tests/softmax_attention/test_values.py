"""Softmax attention on every platform that runs here: values and gradients against float64."""

import dataclasses

import numpy as np
import pytest

import keraunos
from keraunos.types import MaskInfo
from tests.linear_attention.cases import GPU, INTERPRETED
from tests.numerics import assert_within_rule
from tests.softmax_attention.cases import Case, is_hopper, platforms

# At once, and block by block with partial blocks on both sides; one choice where each block takes long.
BLOCKS = {"blocks": 32} if INTERPRETED else {"at_once": None, "blocks": 32 if GPU else 16}


@pytest.fixture(params=platforms(), ids="-".join)
def platform(request):
    if request.param[0] == "cuda" and not is_hopper():
        pytest.skip("needs a Hopper GPU")
    return request.param


OF_KERNELS = set()


def of_kernels(case):
    """A call for kernels' tiles of heads, or that libraries' are wrong for; block by block XLA has its like."""
    OF_KERNELS.add(case)
    return case


def is_taken(where, name, number, case):
    """XLA compiles each: at once it takes every third, among which are all options, and what these lack."""
    if where[0] != "xla":
        return True
    return case not in OF_KERNELS if name == "blocks" else number % 3 == 1 or case.V or 0 in (case.B, case.T)


CASES = [
    Case(),
    Case(causal=True),
    Case(causal=True, T=20, S=50),
    Case(causal=True, T=50, S=20),
    Case(T=1, S=33, H=2),
    Case(T=33, S=1),
    Case(G=2, V=24, causal=True),
    Case(G=1, K=40),
    Case(window=5),
    Case(window=(7, 0), causal=True, G=2),
    Case(window=(0, 3)),
    # Queries that see no key: the window leaves all keys behind.
    Case(T=60, S=20, window=(4, 4)),
    Case(T=60, S=20, window=(4, 4), sinks=4, G=2),
    Case(bias=4),
    Case(bias=1, bias_batch=1, causal=True),
    Case(bias=2, G=2, soft_cap=3.0),
    Case(bias=4, closed=True),
    Case(bias=4, T=20, S=50, lengths=(7, 50), soft_cap=3.0),
    Case(bias=1, bias_batch=1, causal=True, lengths=(20, 50), sinks=1),
    Case(bias=2, G=2, bias_size=300.0, causal=True),
    Case(bias=1, closed=True, sinks=-1),
    Case(mask=1),
    Case(mask=4, G=2, sinks=2),
    Case(mask=2, G=2, soft_cap=2.0, causal=True),
    Case(segments=True),
    Case(segments=True, causal=True, window=(9, 9), sinks=4),
    Case(sinks=-1),
    Case(sinks=2, G=2, causal=True),
    # Far above all logits, and far below: of such a number a float32 has few digits behind the point.
    Case(B=1, T=1, S=33, H=1, sinks=1, sink_size=52.0),
    Case(sinks=4, sink_size=30.0),
    Case(causal=True, sinks=4, sink_size=100.0),
    # Queries that see no key, and sinks whose sum, without a running maximum, has no finite reciprocal.
    Case(T=60, S=20, window=(4, 4), sinks=4, sink_size=2.0, sink_mean=-93.0, soft_cap=30.0, dtype="bfloat16"),
    Case(soft_cap=1.5, scale=0.7),
    Case(soft_cap=50.0, scale=3.0, causal=True),
    of_kernels(Case(soft_cap=70.0, scale=2.0)),
    # Large logits and many blocks of keys, over which a running maximum's rounding would add up. With fewer heads one
    # weight near 1 would decide the error: chance, and other digits on every host.
    Case(B=1, T=20, S=700, H=8, scale=1.0),
    Case(dropout=0.3),
    Case(dropout=0.5, causal=True, G=2, sinks=-1, soft_cap=4.0, bias=1, window=(20, 3)),
    Case(dtype="bfloat16", causal=True, K=64),
    Case(dtype="float16", sinks=4, soft_cap=5.0, segments=True),
    # Heads that share keys: one at a time; two in a tile and more to come; more groups than walk at once.
    of_kernels(Case(H=6, G=2, dtype="bfloat16", causal=True)),
    of_kernels(Case(B=1, H=6, G=1, dtype="bfloat16", causal=True, soft_cap=5.0, segments=True)),
    of_kernels(Case(B=1, T=16, S=2752, H=8, G=4, dtype="bfloat16", window=4)),
    # A bias of every head where heads share keys.
    Case(bias=4, G=2),
    # Nothing to do, of each kind.
    Case(B=0, window=3, sinks=2, G=2),
    Case(T=0, S=20, bias=4, dropout=0.3),
    Case(T=20, S=0, sinks=4),
    # Queries that stand further on than the keys begin: one token after a cache, a chunk, for all rows or each its own.
    Case(T=1, S=50, causal=True, offset=(49, 20)),
    of_kernels(Case(B=1, T=1, S=700, H=16, G=2, causal=True, offset=(650,), scale=1.0)),
    Case(T=20, S=50, causal=True, offset=30, G=2),
    Case(T=20, S=50, causal=True, offset=(30, 17), G=2, dtype="bfloat16"),
    Case(T=40, S=50, window=(9, 4), offset=(20, 37), sinks=4, soft_cap=3.0, segments=True),
    Case(T=40, S=50, window=(9, 4), offset=13, sinks=-1),
    of_kernels(Case(B=1, T=30, S=50, H=6, G=1, causal=True, offset=(20,), soft_cap=5.0, segments=True,
                    dtype="bfloat16")),
    Case(T=40, S=50, causal=True, offset=(10, 3), mask=2, G=2),
    # A bias of all rows, whose gradient is of tiles that only some rows see; and one of each.
    Case(T=70, S=130, causal=True, offset=(60, -40), bias=1, bias_batch=1, dropout=0.3),
    Case(T=40, S=50, window=(7, 0), offset=(10, -20), bias=4, scale=-0.4),
    # Queries that stand before the first key, past the last, and as far off as there are numbers for.
    Case(T=40, S=20, causal=True, offset=-25),
    Case(T=20, S=40, window=(3, 3), offset=(-15, 38), sinks=4),
    Case(T=20, S=20, window=(2**62, 3), offset=(2**31 - 1, -(2**31))),
    Case(T=20, S=20, window=(2**62, 3), offset=2**40),
    # Scales that make nothing of the logits, or turn them round: what libraries' own kernels are wrong for.
    Case(scale=0.0),
    of_kernels(Case(scale=0.0, causal=True, dtype="bfloat16", K=64)),
    Case(scale=-0.4, G=2),
    of_kernels(Case(scale=-3.0, causal=True, dtype="bfloat16", K=64)),
    of_kernels(Case(scale=0.0, causal=True, soft_cap=2.0, sinks=4)),
    of_kernels(Case(scale=0.0, bias=1, causal=True)),
    # A cap next to which the tangent of a logit is small.
    Case(dtype="float16", soft_cap=1e6),
]


@pytest.mark.parametrize(("platform", "case", "block"), [
    pytest.param(where, case, block, id=f"{'-'.join(where)}-{case}-{name}")
    for where in platforms() for number, case in enumerate(CASES) for name, block in BLOCKS.items()
    if is_taken(where, name, number, case)
], indirect=["platform"])
def test_values_and_gradients(platform, case, block):
    number = CASES.index(case)
    size = {"triton": BLOCKS["blocks"], "cuda": None}.get(platform[0], block)
    if GPU and (block != size or (platform[0] in ("triton", "cuda") and platform[1] == "jax" and number % 3)):
        pytest.skip("kernels take long to build: in one size, and through JAX for every third call")
    if platform[0] == "cuda" and case.dtype == "float32":
        case = dataclasses.replace(case, dtype="bfloat16")
    if INTERPRETED and number % 3 and case.bias_batch is None:
        # Programs take long there.
        case = dataclasses.replace(case, B=1)
    dataclasses.replace(case, block=block).check(*platform)


@pytest.mark.parametrize("case", [Case(K=64, causal=True), Case(K=512, V=64, G=2, soft_cap=3.0)], ids=str)
def test_rounded_products_are_not_used(rounded_products, case):
    case.check("torch", "torch")


def test_ids_may_have_no_numbers_below_zero(platform):
    """Of bytes, where the id of a key past its sequence's end, -1, would be 255; against a softmax in NumPy."""
    name, framework = platform
    if name == "cuda":
        pytest.skip("takes 16 bits")
    rng = np.random.default_rng(0)
    given = [rng.standard_normal((2, 24, 2, 16)).astype(np.float32) for _ in range(3)]
    ids, lengths = np.sort(rng.choice([3, 200, 255], (2, 24)), 1), np.array([20, 24])

    def run(dtype):
        arrays = *given, ids.astype(dtype), lengths
        if framework == "jax":
            import jax.numpy as jnp

            *x, ids_, lengths_ = map(jnp.asarray, arrays)
        else:
            import torch

            *x, ids_, lengths_ = (torch.from_numpy(x).to("cuda" if GPU else "cpu") for x in arrays)
        info = MaskInfo.from_segments(ids_).apply_kv_lengths(lengths_)
        output = keraunos.attention(*x, mask_info=info, dtype=None, platform=name)
        return np.asarray(output if framework == "jax" else output.cpu())

    def whole(dtype):
        q, k, v = (x.astype(dtype) for x in given)
        seen = (ids[:, None] == ids[:, :, None]) & (np.arange(24) < lengths[:, None])[:, None]
        logits = np.where(seen[:, None], np.einsum("bthk,bshk->bhts", q, k) / 4, -1e9)
        weights = np.exp(logits - logits.max(-1, keepdims=True)) * seen[:, None]
        total = weights.sum(-1, keepdims=True)
        return np.einsum("bhts,bshv->bthv", weights / np.where(total == 0, 1, total), v)

    assert_within_rule(["output"], [run("uint8")], [whole(np.float64)], [whole(np.float32)], ["float32"])
