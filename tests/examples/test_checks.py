import jax
import numpy as np
import pytest
from language_model import generation
from language_model.checks import beats_bigram, constant_state, same_logits
from language_model.model import init_params


@pytest.fixture(scope="module")
def params(settings):
    params = init_params(settings.model, jax.random.key(0))
    # A fresh model predicts nothing: give its zero matrices values.
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape) if not x.any() else x, params)


@pytest.fixture(scope="module")
def sample(params, settings):
    return generation.generate(params, settings.model, b"the storm", 40, seed=0)


def test_generation_passes(params, sample, settings):
    parallel = generation.parallel_logits(params, settings.model, sample)
    assert parallel.shape == sample.logits.shape == (40, 256)
    assert np.abs(parallel).max() > 1
    check = same_logits(sample.logits, parallel)
    assert check.passed, check.figures
    assert len(sample.state_bytes) == 40
    blocks, head = len(settings.model.blocks), settings.model.head_dim
    check = constant_state(sample.state_bytes, 9, settings.model.cache_bytes_per_token)
    assert check.passed
    assert f"{blocks * settings.model.heads * head * head * 4:,} after 48 (" in check.figures


def test_same_seed_generates_the_same(params, sample, settings):
    seen = []
    again = generation.generate(params, settings.model, b"the storm", 40, seed=0, on_byte=seen.append)
    assert again.text == sample.text == b"".join(seen)
    assert generation.generate(params, settings.model, b"the storm", 40, seed=1).text != sample.text


def test_state_that_missed_a_byte_is_noticed(params, sample, settings):
    shorter = generation.Sample(sample.prompt[1:], sample.text, sample.logits, sample.state_bytes)
    assert not same_logits(sample.logits, generation.parallel_logits(params, settings.model, shorter)).passed


@pytest.mark.parametrize("wrong", [lambda x: np.roll(x, 1, axis=0), lambda x: x + 0.01, lambda x: x * np.nan])
def test_wrong_logits_fail(sample, wrong):
    assert same_logits(sample.logits, sample.logits).passed
    assert not same_logits(wrong(sample.logits), sample.logits).passed
    assert not same_logits(sample.logits, wrong(sample.logits)).passed


def test_growing_state_fails():
    assert constant_state([64, 64, 64], 10, 8).passed
    assert not constant_state([64, 72, 80], 10, 8).passed
    assert not constant_state([64, 72, 64], 10, 8).passed


def test_bigram_has_to_be_beaten():
    assert beats_bigram(2.5, 3.5, 100).passed
    for bits in (3.5, 3.6, float("nan")):
        assert not beats_bigram(bits, 3.5, 100).passed
