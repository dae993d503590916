from dataclasses import replace

import jax
import numpy as np
import pytest
from language_model import DemoError, checkpoint, data, training


@pytest.fixture(scope="module")
def windows(corpus, settings):
    return data.held_out_windows(corpus.held_out, settings.model.context)


@pytest.fixture(scope="module")
def programs(settings, windows):
    return training.Programs(settings, training.evaluation_batch(windows), None)


@pytest.fixture
def train(corpus, settings, programs, windows):
    def run_for(run, steps, stop_at=None, save=lambda run: None):
        budget = training.Budget(1.0, steps)
        training.train(
            run,
            corpus,
            settings,
            budget,
            programs,
            windows,
            stop=lambda: run.step == stop_at,
            save=save,
            report=lambda run: None,
        )

    return run_for


def _assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, (one.params, one.optimizer), (other.params, other.optimizer))
    assert (one.step, one.train_bits, one.held_out_bits) == (other.step, other.train_bits, other.held_out_bits)


def test_resumed_run_equals_an_uninterrupted_one(train, settings, corpus, tmp_path):
    path = tmp_path / "checkpoint.npz"
    whole = training.new_run(settings)
    train(whole, 12)
    stopped = training.new_run(settings)
    with pytest.raises(KeyboardInterrupt):
        train(stopped, 12, stop_at=5, save=lambda run: training.save_run(path, run, settings, corpus))
    resumed = training.load_run(path, settings, corpus)
    _assert_same(resumed, stopped)
    assert resumed.elapsed == stopped.elapsed > 0
    train(resumed, 12)
    assert resumed.step == 12
    _assert_same(resumed, whole)


def test_learns(train, settings, programs, windows):
    run = training.new_run(settings)
    assert training.evaluate(programs, run.params, windows) == pytest.approx(8, abs=1e-3)
    train(run, 60)
    assert training.evaluate(programs, run.params, windows) < 5
    assert len(run.train_bits) == 60
    assert len(run.held_out_bits) == 16


def test_other_seed_text_or_model_is_not_continued(settings, corpus, tmp_path):
    path = tmp_path / "checkpoint.npz"
    training.save_run(path, training.new_run(settings), settings, corpus)
    with pytest.raises(DemoError, match="another seed: give --fresh"):
        training.load_run(path, replace(settings, seed=1), corpus)
    with pytest.raises(DemoError, match="another model"):
        training.load_run(path, replace(settings, model=replace(settings.model, heads=4)), corpus)
    with pytest.raises(DemoError, match="another text"):
        training.load_run(path, settings, replace(corpus, train=corpus.train[1:]))


def test_checkpoint_of_something_else_is_corrupt(settings, corpus, tmp_path):
    path = tmp_path / "checkpoint.npz"
    training.save_run(path, training.new_run(settings), settings, corpus)
    arrays, about = checkpoint.load(path)
    arrays.popitem()
    checkpoint.save(path, arrays, about)
    with pytest.raises(checkpoint.CorruptCheckpointError, match="has no"):
        training.load_run(path, settings, corpus)


def test_diverged_run_is_not_saved(train, settings):
    run = training.new_run(settings)
    run.params["head"] += np.nan
    with pytest.raises(DemoError, match="the loss is nan at step 1"):
        train(run, 5, save=lambda run: pytest.fail("saved"))


def test_learning_rate_warms_up_and_falls_to_zero():
    rates = [training.learning_rate(progress, 2.0) for progress in np.linspace(0, 1, 101)]
    assert 0 < rates[0] < 0.1
    assert max(rates) == pytest.approx(2.0, rel=0.01)
    assert rates.index(max(rates)) < 5
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0)


def test_budget_counts_time_or_steps():
    run = training.Run({}, None, step=30, elapsed=5.0)
    assert training.Budget(20.0).progress(run) == 0.25
    assert training.Budget(4.0).progress(run) == 1.0
    assert training.Budget(20.0, 60).progress(run) == 0.5
