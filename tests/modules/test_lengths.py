"""Operations that are compiled for a few lengths give what they give without padding, and compile as seldom."""

import logging

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import keraunos  # noqa: E402
from keraunos.modules.lengths import rounded_up  # noqa: E402
from tests.linear_attention.cases import INTERPRETED, Case, run_jax  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="JAX takes no kernels that are interpreted")

gla, lightning = keraunos.bucketed(keraunos.gla_attention), keraunos.bucketed(keraunos.lightning_attention)


@pytest.mark.parametrize("case", [
    Case(T=20, gate="vector", gamma=2, decay="infinite", state=True, G=1), Case(T=96, gate="scalar"),
    Case(T=20, gate="scalar", gamma=1, state=True, reverse=True), Case(T=33, gamma=1, state=True),
    Case(T=100, state=True),
    Case(B=1, lengths=(3, 0, 60, 7), gamma=1, state=True, gate="scalar"),
    Case(B=1, lengths=(30, 34), gamma=1, state=True, reverse=True), Case(B=1, lengths=(40,), state=True),
], ids=str)
def test_results_and_gradients_are_those_of_the_call_as_given(case):
    def function(args, case, platform):
        return gla(*args, softmax_scale=case.scale, reverse=case.reverse, return_state=True, platform=platform)

    case.check(lambda case, gradients: run_jax("xla", function, case, gradients))


def test_lightning_takes_a_layer():
    q = jnp.asarray(Case(T=41, H=4).arrays[0].query)
    layer = dict(layer_idx=2, num_layers=8)
    want = keraunos.lightning_attention(q, q, q, **layer)
    np.testing.assert_allclose(lightning(q, q, q, **layer), want, rtol=1e-5, atol=1e-5)


def test_lengths_are_few_and_not_much_longer():
    lengths = {n: rounded_up(n) for n in range(1, 5000)}
    assert len(set(lengths.values())) < 30
    assert all(n <= room < max(1.25 * n, n + 32) for n, room in lengths.items())


def compiled(caplog, call):
    """How many programs a call compiles."""
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        jax.block_until_ready(call())
    return [record.getMessage().split()[4] for record in caplog.records if "Finished XLA" in record.getMessage()]


@pytest.mark.parametrize("gates", [{}, {"g_gamma": [-0.1, -0.2]}])
def test_another_length_of_a_bucket_compiles_nothing(caplog, gates):
    def gradient(T):
        x = jax.device_put(np.ones((1, T, 2, 4), np.float32))
        g = None if gates else jax.device_put(np.full((1, T, 2, 4), -0.1, np.float32))
        output, pull = jax.vjp(lambda x, g: gla(x, x, x, g, **gates), x, g)
        return pull(jax.device_put(np.ones(output.shape, np.float32)))

    assert compiled(caplog, lambda: gradient(20))
    # But for JAX's own sums of the three gradients of x, and in jax 0.11 the padding and cutting of one array.
    own = ("add", "jit(_pad)", "jit(dynamic_slice)")
    assert not {name for name in compiled(caplog, lambda: gradient(30)) if not any(x in name for x in own)}


def test_errors():
    x = jnp.ones((1, 40, 2, 4))
    with pytest.raises(ValueError, match=r"expected keraunos\.gla_attention or keraunos\.lightning_attention"):
        keraunos.bucketed(keraunos.attention)
    with pytest.raises(TypeError, match=r"bucketed: query is of type ndarray; expected a jax\.Array"):
        gla(np.ones((1, 40, 2, 4), np.float32), x, x)
    with pytest.raises(ValueError, match="gla_attention: key has shape"):
        gla(x, x[:, :9], x)
