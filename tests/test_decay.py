"""The named decay formulas against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keraunos import decay


def test_lightning():
    np.testing.assert_allclose(decay.lightning(4, 1, 4), [0, -1.5, -3, -4.5])
    assert decay.lightning(4, 1, 4).dtype == np.float32


def test_alibi_slopes():
    np.testing.assert_allclose(decay.alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(decay.alibi_slopes(6), [2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0, 2**-3.0])
    assert len(decay.alibi_slopes(1)) == 1


def test_the_models():
    slopes = decay.alibi_slopes(8).astype(np.float64)
    np.testing.assert_allclose(decay.minimax(8, 3, 10), -slopes * (1 - 3 / (9 + 1e-5) + 1e-5), rtol=1e-6)
    np.testing.assert_allclose(decay.minimax_vllm(8, 3, 10), -slopes * (1 - 3 / 9 + 1e-5), rtol=1e-6)
    np.testing.assert_allclose(decay.bailing(8, 3, 10), -slopes * (1 - 2 / 9 + 1e-5), rtol=1e-6)


@pytest.mark.parametrize("formula", [decay.lightning, decay.minimax, decay.minimax_vllm, decay.bailing])
def test_traced_layer(formula):
    traced = jax.jit(lambda i: formula(6, i, 5))(jnp.int32(2))
    np.testing.assert_allclose(traced, formula(6, 2, 5), rtol=1e-6)


@pytest.mark.parametrize("formula", [decay.lightning, decay.minimax, decay.minimax_vllm, decay.bailing])
def test_every_decay_of_every_layer_is_a_decay(formula):
    for layer in range(12):
        assert (formula(10, layer, 12) <= 0).all() or (formula is decay.bailing and layer == 0)


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, 0, 1), "num_heads is 0"), ((True, 0, 1), "num_heads is True"), ((4, 2, 2), "0-based"),
    ((4, np.int64(2), 2), "0-based"), ((4, np.array(2), 2), "0-based"), ((4, 0, 1.5), "num_layers is 1.5"),
])  # fmt: skip
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        decay.lightning(*arguments)


@pytest.mark.parametrize(
    "layer", [0.5, True, np.float32(1), np.bool_(True), np.array([0, 1]), jnp.float32(1), jnp.array([0, 1])], ids=repr
)
def test_what_is_no_layer(layer):
    with pytest.raises(TypeError, match="expected an integer"):
        decay.lightning(2, layer, 4)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("formula", [decay.lightning, decay.minimax, decay.minimax_vllm, decay.bailing])
def test_a_layer_that_torch_traces(formula):
    torch = pytest.importorskip("torch")
    compiled = torch.compile(lambda i: formula(6, i, 5), backend="eager", fullgraph=True)
    np.testing.assert_allclose(compiled(torch.tensor(2)), formula(6, 2, 5), rtol=1e-6)


def test_what_is_traced_is_no_layer_either_if_it_is_no_integer():
    with pytest.raises(TypeError, match="expected an integer"):
        jax.jit(lambda layer: decay.lightning(2, layer, 4))(1.0)


class _Number(int):
    """Such as a member of an enum.IntEnum."""


@pytest.mark.parametrize("number", [int, _Number, np.int64, np.uint8])
def test_whole_numbers_of_any_type_are_numbers(number):
    np.testing.assert_array_equal(decay.minimax(number(6), number(1), number(4)), decay.minimax(6, 1, 4))


def test_one_layer_is_refused_where_the_formula_divides_by_zero():
    with pytest.raises(ValueError, match="expected an integer >= 2"):
        decay.bailing(4, 0, 1)
