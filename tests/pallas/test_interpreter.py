"""The kernels' values and gradients in Pallas' interpreter of TPUs, through JAX's front end."""

import contextlib
import dataclasses
import functools
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

import keraunos
from keraunos.frontends.jax import partition
from keraunos.kernels import kernel_registry
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.linear_attention.pallas import kernels, passes
from tests.linear_attention import test_unseen
from tests.linear_attention.cases import GPU, Case, run_jax

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")


@contextlib.contextmanager
def interpreted():
    """Within it the kernels run on the CPU, as if it were one device: the interpreter cannot be partitioned."""
    alone = mock.patch.object(partition, "is_settled", return_value=True)
    with alone, pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        yield


CFG = keraunos.Config(block_q=128, platform="pallas")


def gla(args, case, platform, cfg=CFG):
    fn = kernel_registry.get("gla", "pallas", "tpu")
    query, key, value, g, g_gamma, state, cu_seqlens = args
    with interpreted():
        return fn(query, key, value, g, g_gamma, case.scale, state, case.reverse, cu_seqlens, cfg=cfg)


# Its backward runs in the interpreter, too.
def run(case, gradients=True, function=gla):
    with interpreted():
        return run_jax("tpu", function, case, gradients)


BASE = Case(B=1, T=150, H=2, K=64, V=64, state=True)
PACKED = (5, 0, 140, 1, 64)
CASES = {
    "constant": dict(gamma=1),
    "constant per sequence, both ways shared, reverse": dict(B=2, gamma=2, HQ=1, G=1, H=2, HV=2, reverse=True),
    "constant, one token, no state": dict(gamma=1, T=1, state=False, dstate=False),
    "constant, bfloat16, a whole chunk": dict(gamma=1, T=256, dtype="bfloat16", K=128, scale=-0.3),
    "constant, packed": dict(gamma=1, lengths=PACKED),
    "no decay": dict(T=40),
    "per token": dict(gate="scalar", gamma=1, T=300),
    "per token, infinite": dict(gate="scalar", gamma=1, decay="infinite", T=300),
    "per token, strong, packed, reverse": dict(gate="scalar", lengths=PACKED, decay="strong", reverse=True, G=1),
    "per token, next to nothing": dict(gate="scalar", gamma=1, T=200, decay="strong", dtype="bfloat16", H=1),
    "per dimension": dict(gate="vector", V=128),
    "per dimension, infinite, shared gates, a whole chunk": dict(gate="vector", decay="infinite", HG=1, T=128),
    "per dimension, mild and packed in bfloat16": dict(gate="vector", lengths=PACKED, dtype="bfloat16", G=1,
                                                       gate_dtype="bfloat16", reverse=True),
    "per dimension, strong, packed": dict(gate="vector", gamma=1, lengths=(3, 130, 2), decay="strong", H=1),
    "per dimension, next to nothing": dict(gate="vector", gamma=1, lengths=(3, 2), seed=2080, decay="strong", H=1,
                                           dtype="bfloat16"),
    "per dimension, zero, shared gates, a whole chunk": dict(gate="vector", decay="zero", HG=1, T=128),
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_values(sizes):
    dataclasses.replace(BASE, **sizes).check(run)


def test_heads_in_groups():
    # Two programs of a tile of heads each; or one of all heads, in a loop, where keys have no whole tile for each.
    for G in (16, 4):
        case = Case(B=1, T=20, H=16, G=G, K=64, V=64, gate="scalar", state=True)
        case.check(run, gradients=G == 4)


def test_longer_chunks():
    case = dataclasses.replace(BASE, gate="vector", T=300, H=1)
    case.check(functools.partial(run, function=functools.partial(gla, cfg=keraunos.Config(block_q=256))))


def test_vmap():
    case = dataclasses.replace(BASE, B=2, T=20, gamma=1)
    args, *_ = case.arrays
    query, key, value = (jnp.asarray(x) for x in args[:3])

    def call(query, key, value):
        return gla(Args(query, key, value, g_gamma=jnp.asarray(args.g_gamma)), case, "tpu")[0]

    batched = jax.vmap(call)(*(x[:, None] for x in (query, key, value)))
    np.testing.assert_allclose(batched[:, 0], call(query, key, value), rtol=1e-6)


def test_nothing_leaks_between_packed_sequences():
    case = dataclasses.replace(BASE, gate="vector", lengths=(40, 30, 50), H=1)
    args = case.arrays[0]
    clean = run(case, False)
    for x in args[:3]:
        x[:, 40:70] = np.nan
    args.initial_state[1] = np.nan
    output, states = run(case, False)
    for got, want in ((output[:, :40], clean[0][:, :40]), (output[:, 70:], clean[0][:, 70:]),
                      (states[[0, 2]], clean[1][[0, 2]])):
        np.testing.assert_array_equal(got, want)
    assert np.isnan(output[:, 40:70]).all()


STRONG = dataclasses.replace(test_unseen.CASES[2], decay="strong")


@pytest.mark.parametrize("case", [*test_unseen.CASES[1:3], STRONG], ids=str)
def test_what_nobody_sees(case):
    case = dataclasses.replace(case, K=64, V=64)
    test_unseen.test_padding(run, case)
    test_unseen.test_later_tokens(run, case, "key")


def test_no_tokens():
    case = dataclasses.replace(BASE, gate="vector", T=0)
    output, state, *grads = run(case, True)
    assert output.shape == (1, 0, 2, 64)
    np.testing.assert_array_equal(state, case.arrays[0].initial_state)
    np.testing.assert_array_equal(grads[5], case.arrays[2])


@pytest.mark.parametrize("lengths", [(128, 128), (0, 0, 5), (1, 300, 0, 2), (256,), (0,)], ids=str)
def test_a_plan_visits_every_token_once(lengths):
    offsets, T, C = np.cumsum([0, *lengths]), max(sum(lengths), 1), 128
    visits = np.asarray(kernels.plan(jnp.asarray(offsets), T, C, packed=True)).T
    seen, blocks, owner = np.zeros(-(-T // C) * C, int), [], np.full(T, -1)
    for block, begin, end, sequence, _, _, live in visits:
        seen[block * C + begin : block * C + end] += 1
        owner[block * C + begin : block * C + end] = sequence if live else -1
        blocks.append(block)
    assert (seen[:T] == 1).all()
    assert blocks == sorted(blocks)
    assert owner[: sum(lengths)].tolist() == np.repeat(np.arange(len(lengths)), lengths).tolist()
    for n in range(len(lengths)):
        own = [v for v in visits if v[6] and v[3] == n]
        assert [v[4] for v in own] == [1, *[0] * (len(own) - 1)]
        assert [v[5] for v in own] == [*[0] * (len(own) - 1), 1]


def refusal(**sizes):
    """Why the platform refuses a call on a TPU."""
    inv = keraunos.GLAttention().invocation("jax", **{"T": 4096, "H": 8, "K": 128, "V": 128, **sizes})
    return passes.unsupported(dataclasses.replace(inv, backend="tpu", device="TPU v5e"))


def test_refusals_have_reasons():
    assert refusal() is None
    assert refusal(H=64, G=8, V=256) is None
    assert "takes bfloat16 and float32" in refusal(dtype="float16")
    assert "takes head dims of 64, 128 and 256; the call has K = 96" in refusal(K=96)
    assert "takes up to 32 heads, or a multiple of 8; the call has 36" in refusal(H=36)


def test_what_a_tpu_gets():
    inv = keraunos.GLAttention().invocation("jax", T=4096, H=8, K=128)
    inv = dataclasses.replace(inv, backend="tpu", device="TPU v5e")
    # No TPU has run the kernels: they are taken by name only.
    assert kernel_registry.choose(inv)[0].platform == "xla"
    row, passed = kernel_registry.choose(inv, "pallas")
    assert row.backend == "tpu"
    assert not passed


def test_states_that_were_not_kept_are_made_again():
    case = dataclasses.replace(BASE, gate="scalar", T=140, H=1)
    args, doutput, dstate = case.arrays
    opts = Options(case.K**-0.5, False, CFG)
    with interpreted():
        kept = passes._Call(args, opts).forward(False, True)["kept"]
        found = [passes.backward(args, (x,), (doutput, dstate), opts) for x in (kept, None)]
    for one, other in zip(*found, strict=True):
        assert one is other is None or np.array_equal(one, other)
