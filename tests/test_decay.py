"""The named decay formulas against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keraunos
from keraunos import decay


def test_lightning():
    np.testing.assert_allclose(decay.lightning(4, 1, 4), [0, -1.5, -3, -4.5])
    assert decay.lightning(4, 1, 4).dtype == np.float32


def test_alibi_slopes():
    np.testing.assert_allclose(decay.alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(decay.alibi_slopes(6), [2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0, 2**-3.0])
    assert len(decay.alibi_slopes(1)) == 1


@pytest.mark.parametrize(("got", "want"), [
    # Hugging Face's MiniMax: powers of 2 ** (-8 / 6) times 1 - 1 / 3.00001 + 1e-5; no power of two is needed.
    (decay.minimax(6, 1, 4),
     [-0.264571251, -0.104995171, -0.0416673611, -0.0165357032, -0.00656219817, -0.00260421007]),
    # One layer: times 1.00001.
    (decay.minimax(6, 0, 1), [-0.396854231, -0.157491706, -0.062500625, -0.0248033895, -0.00984323163, -0.00390628906]),
    (decay.minimax(4, 2, 3), [-3.74999375e-06, -9.37498438e-07, -2.34374609e-07, -5.85936523e-08]),
    # vLLM's: ALiBi's slopes of 6 heads, those of 4 and then every other one of 8, times 2 / 3 + 1e-5.
    (decay.minimax_vllm(6, 1, 4),
     [-0.166669167, -0.0416672917, -0.0104168229, -0.00260420573, -0.333338333, -0.0833345833]),
    (decay.minimax_vllm(6, 0, 1), [-0.2500025, -0.062500625, -0.0156251562, -0.00390628906, -0.500005, -0.12500125]),
    # The code of Ring and Ling: the first layer counts as the one before the first, times 4 / 3 + 1e-5.
    (decay.bailing(6, 0, 4),
     [-0.333335833, -0.0833339583, -0.0208334896, -0.00520837240, -0.666671667, -0.166667917]),
    (decay.bailing(6, 3, 4),
     [-0.0833358333, -0.0208339583, -0.00520848958, -0.00130212240, -0.166671667, -0.0416679167]),
    (decay.minicpm_sala(6), [-0.25, -0.0625, -0.015625, -0.00390625, -0.5, -0.125]),
    (decay.retnet(3), [np.log(31 / 32), np.log(63 / 64), np.log(127 / 128)]),
], ids=range(9))
def test_the_models(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-7)
    assert type(got) is np.ndarray
    assert got.dtype == np.float32


FORMULAS = [decay.lightning, decay.minimax, decay.minimax_vllm, decay.bailing]


def test_what_they_return_is_taken_as_it_is():
    torch = pytest.importorskip("torch")
    for formula in FORMULAS:
        found = formula(2, 1, 4)
        module = torch.nn.Module()
        module.register_buffer("decay", torch.from_numpy(found))
        q = np.ones((1, 5, 2, 4), np.float32)
        outputs = [
            keraunos.lightning_attention(*[x] * 3, log_decay=log_decay)
            for x, log_decay in (
                (jnp.asarray(q), found), (jnp.asarray(q), jnp.asarray(found)),
                (torch.from_numpy(q), found), (torch.from_numpy(q), module.decay),
            )
        ]
        for output in outputs[1:]:
            np.testing.assert_allclose(output, outputs[0], rtol=1e-6)


@pytest.mark.parametrize("formula", FORMULAS)
def test_traced_layer(formula):
    traced = jax.jit(lambda i: formula(6, i, 5))(jnp.int32(2))
    np.testing.assert_allclose(traced, formula(6, 2, 5), rtol=1e-6)


@pytest.mark.parametrize("formula", FORMULAS)
def test_every_decay_of_every_layer_is_a_decay(formula):
    for layer in range(12):
        assert (formula(10, layer, 12) <= 0).all() or (formula is decay.bailing and layer == 0)


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, 0, 1), "num_heads is 0"), ((True, 0, 1), "num_heads is True"), ((4, 2, 2), "0-based"),
    ((4, np.int64(2), 2), "0-based"), ((4, np.array(2), 2), "0-based"), ((4, 0, 1.5), "num_layers is 1.5"),
])
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        decay.lightning(*arguments)


@pytest.mark.parametrize(
    "layer", [0.5, True, np.float32(1), np.bool_(True), np.array([0, 1]), jnp.float32(1), jnp.array([0, 1])], ids=repr
)
def test_what_is_no_layer(layer):
    with pytest.raises(TypeError, match="expected an integer"):
        decay.lightning(2, layer, 4)


@pytest.mark.parametrize("formula", FORMULAS)
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


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("layer", [5, -1, 7])
def test_an_array_out_of_range_is_refused_where_its_value_is_known(formula, layer):
    torch = pytest.importorskip("torch")
    message = f"{formula.__name__}: layer_idx is .*{layer}.*; expected 0 <= layer_idx < num_layers = 5"
    for number in (torch.tensor(layer), jnp.int32(layer), np.array(layer)):
        with pytest.raises(ValueError, match=message):
            formula(6, number, 5)
    q = torch.ones(1, 3, 6, 4)
    with pytest.raises(
        ValueError, match=r"^lightning_attention: layer_idx is .*; expected 0 <= layer_idx < num_layers"
    ):
        keraunos.lightning_attention(q, q, q, layer_idx=torch.tensor(layer), num_layers=5)
    # What is traced has no value.
    jax.jit(lambda i: formula(6, i, 5))(layer)
    torch.compile(lambda i: formula(6, i, 5), backend="eager")(torch.tensor(layer))


def test_one_layer_is_refused_where_the_formula_divides_by_zero():
    with pytest.raises(ValueError, match="expected an integer >= 2"):
        decay.bailing(4, 0, 1)


def _gates(formula, a, A_log, dt_bias, **options):
    """The gates and the gradients of their sum in both frameworks, after their truth in float64."""
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x).requires_grad_() for x in (a, A_log, dt_bias)]
    found = formula(*tensors, **options)
    found.sum().backward()
    arrays = [jnp.asarray(x) for x in (a, A_log, dt_bias)]
    gradients = jax.grad(lambda *x: formula(*x, **options).sum(), (0, 1, 2))(*arrays)
    yield [found.detach().numpy(), *(x.grad.numpy() for x in tensors)]
    yield [np.asarray(formula(*arrays, **options)), *map(np.asarray, gradients)]
    assert formula(arrays[0].astype(jnp.bfloat16), *arrays[1:], **options).dtype == jnp.float32


# Where the gates' exponentials would overflow, and where they underflow.
STRENGTHS = np.array([-200.0, -30.0, -1.0, 0.0, 3.0, 19.9, 20.1, 200.0], np.float32)


def test_the_gates_of_gated_deltanet():
    a, A_log, dt_bias = STRENGTHS[:, None] + np.zeros(2, np.float32), np.float32([-1.0, 2.0]), np.float32([0.0, 0.5])
    x, rate = a.astype(np.float64) + dt_bias, np.exp(A_log.astype(np.float64))
    slope = 1 / (1 + np.exp(-x))
    truth = -rate * np.logaddexp(x, 0)
    want = [truth, -rate * slope, truth.sum(0), (-rate * slope).sum(0)]
    for got in _gates(decay.gated_deltanet, a, A_log, dt_bias):
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-30)
    with pytest.raises(ValueError, match=r"gated_deltanet: dt_bias has shape \(1,\); expected \(2,\), like a"):
        decay.gated_deltanet(jnp.asarray(a), jnp.asarray(A_log), jnp.zeros(1))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_gates_of_kimi(lower_bound):
    a = STRENGTHS[:, None, None] * np.ones((2, 3), np.float32)
    A_log, dt_bias = np.float32([-1.0, 0.5]), np.linspace(-1, 1, 6, dtype=np.float32)
    x, rate = a.astype(np.float64) + dt_bias.reshape(2, 3), np.exp(A_log.astype(np.float64))[:, None]
    truth, slope = -rate * np.logaddexp(x, 0), -rate / (1 + np.exp(-x))
    strengths = truth
    if lower_bound:
        truth = lower_bound / (1 + np.exp(-rate * x))
        slope = lower_bound * rate * np.exp(-np.abs(rate * x)) / (1 + np.exp(-np.abs(rate * x))) ** 2
        strengths = slope * x
    want = [truth, slope, strengths.sum((0, 2)), slope.sum(0).ravel()]
    for got in _gates(decay.kimi, a, A_log, dt_bias, lower_bound=lower_bound):
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-18)
    with pytest.raises(ValueError, match=r"kimi: lower_bound is 1\.0; expected a number below 0"):
        decay.kimi(jnp.asarray(a), jnp.asarray(A_log), lower_bound=1.0)
    with pytest.raises(ValueError, match=r"kimi: A_log has shape \(3,\); expected \(2,\)"):
        decay.kimi(jnp.asarray(a), jnp.zeros(3))
