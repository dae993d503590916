"""Values and gradients of the gated delta rule on every platform of the machine, against float64."""

import dataclasses

import numpy as np
import pytest

import keraunos
from keraunos.kernels.gated_delta_rule.contract import Args
from keraunos.kernels.gated_delta_rule.reference import gated_delta_rule
from keraunos.kernels.host.arrays import spec_of
from tests.gated_delta_rule.cases import Case
from tests.linear_attention.cases import GPU, INTERPRETED, platforms, torch_tensor


@pytest.fixture(params=platforms(), ids="-".join)
def platform(request):
    return request.param


CASES = {
    "gate per token": Case(state=True),
    "gate per dimension": Case(gate="vector", state=True),
    "no gates, no beta": Case(gate="none", beta=None),
    "one token": Case(T=1, state=True),
    "63 tokens": Case(T=63, block=64),
    "65 tokens": Case(T=65, block=64),
    "700 tokens": Case(B=1, T=700, H=1, state=True),
    "packed, with empty sequences": Case(lengths=(5, 0, 35, 1, 0, 59), state=True),
    "packed, reverse, per dimension": Case(lengths=(33, 0, 64, 7), gate="vector", reverse=True, state=True),
    "normalised": Case(norm=True),
    "values share queries and keys, K = 40, V = 24": Case(H=6, HQ=2, G=2, HV=6, HG=3, HB=6, K=40, V=24, T=50),
    "queries share all else, per dimension, normalised, reverse": Case(
        H=4, HQ=4, G=1, HV=1, HG=1, HB=2, T=65, gate="vector", state=True, norm=True, reverse=True, scale=0.7),
    "K = 16, V = 512": Case(B=1, T=40, H=1, K=16, V=512, state=True),
    "gates of 0": Case(decay=0.0, state=True),
    "strong gates": Case(decay=8.0, state=True),
    "strong gates per dimension": Case(decay=40.0, gate="vector", state=True),
    "gates of -inf": Case(decay=None, state=True),
    "gates of -inf, per dimension": Case(decay=None, gate="vector", state=True),
    "beta 0": Case(beta=0.0, state=True),
    "beta 2": Case(beta=2.0, state=True),
    "equal keys": Case(keys="equal", beta=1.0, state=True),
    "equal keys, per dimension": Case(keys="equal", beta=1.0, gate="vector", state=True),
    "keys that are not normalised": Case(keys="longer", state=True),
    "bfloat16": Case(dtype="bfloat16", state=True),
    "float16, per dimension": Case(dtype="float16", gate="vector"),
    "bfloat16, equal keys": Case(dtype="bfloat16", keys="equal", beta=1.0, gate="none", state=True, K=64, V=32),
    "bfloat16, equal keys, per dimension": Case(dtype="bfloat16", keys="equal", beta=1.0, gate="vector", state=True),
    "float16, equal keys": Case(dtype="float16", keys="equal", beta=1.0, K=64, V=32),
    "bfloat16, beta 2": Case(dtype="bfloat16", beta=2.0, gate="none", T=200, B=1, K=64, V=32),
    "float16, beta 0, normalised": Case(dtype="float16", beta=0.0, state=True, norm=True),
    "bfloat16, gates of -inf, per dimension": Case(dtype="bfloat16", decay=None, gate="vector", state=True),
}


# XLA compiles each for seconds: of 16 bits with gates per dimension, bfloat16.
@pytest.mark.parametrize(("platform", "name"), [
    pytest.param(pair, name, id=f"{'-'.join(pair)}-{name}")
    for pair in platforms() for name in CASES if GPU or (pair[0], name) != ("xla", "float16, per dimension")
], indirect=["platform"])
def test_every_kind_of_call(platform, name):
    case = CASES[name]
    if INTERPRETED and case.dtype == "float32" and list(CASES).index(name) > 1:
        # Programs take long there.
        case = dataclasses.replace(case, B=1)
    case.check(*platform)


# What models have, with more arithmetic than a CPU has time for.
LARGE = {
    "16 heads over 32": Case(B=1, T=40, H=32, HQ=16, G=16, K=128, V=64, dtype="bfloat16", norm=True, state=True),
    "16 heads over 48": Case(B=1, T=40, H=48, HQ=16, G=16, K=64, V=64, dtype="bfloat16"),
    "16 heads over 64, per dimension": Case(B=1, T=40, H=64, HQ=16, G=16, K=96, V=64, dtype="bfloat16", gate="vector"),
    "K = 96, V = 128": Case(T=300, K=96, V=128, dtype="bfloat16", state=True),
    "K = V = 256": Case(B=1, T=150, K=256, V=256, dtype="float16", state=True),
    "K = 256, V = 64, float32, per dimension": Case(B=1, T=150, K=256, V=64, gate="vector"),
    "100,000 tokens": Case(B=1, T=100_000, H=1, K=16, V=16, decay=0.01, dtype="bfloat16", state=True),
}


@pytest.mark.skipif(not GPU, reason="takes too long without a GPU")
@pytest.mark.parametrize("name", LARGE)
def test_sizes_of_models(platform, name):
    if LARGE[name].T > 1000 and platform != ("triton", "torch"):
        pytest.skip("the float64 loop takes a minute")
    LARGE[name].check(*platform)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_every_chunk_length(platform, block):
    Case(block=block, T=150, B=1, state=True).check(*platform)


@pytest.mark.skipif(not (INTERPRETED or GPU), reason="cuts sequences on Triton only")
@pytest.mark.parametrize("case", [
    Case(B=1, T=200, state=True),
    Case(B=1, T=230, gate="vector", reverse=True, state=True, K=80, V=24),
    Case(lengths=(130, 0, 64, 65, 1), state=True, keys="equal", beta=1.0),
    Case(lengths=(0, 70, 140), reverse=True, dtype="bfloat16", norm=True),
], ids=["scalar", "vector, reverse", "packed, equal keys", "packed, reverse, bfloat16"])
def test_segments(platform, case, monkeypatch):
    """The segments of few long sequences, as short as tests can have them."""
    from keraunos.kernels.gated_delta_rule.triton import passes

    if platform[0] != "triton":
        pytest.skip("cuts no sequences")
    monkeypatch.setattr(passes, "_MIN_SEGMENT", 20)
    made = []
    monkeypatch.setattr(passes, "call_of", lambda *args: made.append(passes.Call(*args)) or made[-1])
    dataclasses.replace(case, block=32).check(*platform)
    assert made[0].L == made[0].BG


@pytest.mark.skipif(not INTERPRETED, reason="is of Triton's kernel; on a GPU the platform's values are seen")
@pytest.mark.parametrize("adjoint", [False, True])
def test_the_first_segment_needs_no_matrix(adjoint, monkeypatch):
    """On Hopper its own state is from the one that it starts from."""
    torch = pytest.importorskip("torch")
    from tests.cuda import delta_rule

    monkeypatch.setattr(delta_rule.calls, "SEGMENTS", 4)
    args = Args(*(torch_tensor(x) for x in Case(T=250, K=40, V=40).arrays[0]))
    call = delta_rule.calls.call_of(Args(*map(spec_of, args)), delta_rule.options(Case()))
    local, matrices = (torch.randn(8, 2, 40, D) for D in (40 if adjoint else 80, 80))
    matrices[:: 4] = matrices[3 :: 4] = torch.nan
    for start in (None, torch.randn(2, 2, 40, 40)):
        got, wanted = (join(call, args, local, matrices, start, adjoint)
                       for join in (delta_rule.passes._joined, delta_rule.joined))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


def test_three_thousand_sequences():
    """As many as others number by the second axis of a grid."""
    pytest.importorskip("torch")
    case = Case(lengths=(1,) * (30 if INTERPRETED else 3000), H=1, K=4, V=4)
    case.check("triton" if INTERPRETED or GPU else "torch", "torch")


@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_a_prefix_and_the_rest_are_the_whole(platform, gate):
    # Both are as long: on XLA one program.
    args, _, _ = Case(gate=gate, state=True, T=74, B=1).arrays
    array = _array(platform[1])

    def call(begin, end, state):
        tokens = [array(x[:, begin:end]) for x in args[:5]]
        return keraunos.gated_delta_rule(*tokens, state, return_state=True, platform=platform[0])

    output, state = call(0, 74, array(args.initial_state))
    first, between = call(0, 37, array(args.initial_state))
    second, last = call(37, 74, between)
    whole = np.concatenate([_host(first), _host(second)], 1)
    np.testing.assert_allclose(_host(output), whole, rtol=0, atol=2e-6)
    np.testing.assert_allclose(_host(state), _host(last), rtol=0, atol=2e-6)


def test_states_with_values_first(platform):
    args, _, _ = Case(state=True, K=8, V=12).arrays
    array = _array(platform[1])
    output, state = keraunos.gated_delta_rule(*map(array, args[:6]), return_state=True, platform=platform[0])
    turned = args._replace(initial_state=np.ascontiguousarray(args.initial_state.swapaxes(2, 3)))
    other, last = keraunos.gated_delta_rule(*map(array, turned[:6]), return_state=True, state_v_first=True,
                                            platform=platform[0])
    np.testing.assert_array_equal(_host(output), _host(other))
    np.testing.assert_array_equal(_host(state).swapaxes(2, 3), _host(last))


# The interpreter's arithmetic warns of what tokens hold that the call does not read further.
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38])
def test_tokens_of_other_sequences_may_hold_anything(platform, garbage):
    case = Case(lengths=(20, 30, 10))
    args, _, _ = case.arrays
    array = _array(platform[1])

    def call(args):
        return _host(keraunos.gated_delta_rule(*map(array, args), platform=platform[0]))

    clean = call(args)
    spoilt = dataclasses.replace(case).arrays[0]
    for x in spoilt[:3]:
        x[:, 20:50] = garbage
    found = call(spoilt)
    np.testing.assert_array_equal(found[:, :20], clean[:, :20])
    np.testing.assert_array_equal(found[:, 50:], clean[:, 50:])


def test_the_same_call_gives_the_same_bits(platform):
    args, _, _ = Case(gate="vector", state=True).arrays
    array = _array(platform[1])
    first, second = (_host(keraunos.gated_delta_rule(*map(array, args), platform=platform[0])) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()
    assert np.abs(first - gated_delta_rule(*args)[0]).max() < 1e-5


def _array(framework):
    if framework == "jax":
        import jax.numpy as jnp

        return lambda x: None if x is None else jnp.asarray(x)
    import torch

    return lambda x: None if x is None else torch.tensor(np.asarray(_host(x)), device="cuda" if GPU else "cpu")


def _host(x):
    """An array as NumPy's."""
    return x.numpy(force=True) if hasattr(x, "numpy") else np.asarray(x)
