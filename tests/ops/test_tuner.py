"""The tuner crowns what is right and fast, on inputs of its own, and says why the others were dropped."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keraunos
from keraunos.ops import ConfigCache, Tuner
from keraunos.ops.invocation import bucket
from keraunos.ops.tuner import Measurement, _decide

from .toy import SLOW, Toy, choose, executor, planted

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)


def tune(kernel, backward=False, **settings):
    inv = kernel.bind(jnp.asarray(X))
    tuner = Tuner(**{"warmup": 1, "iters": 5, "budget": 30, **settings})
    return tuner.tune(kernel, inv, kernel.candidate_cfgs(inv), backward)


def dropped(result):
    return {m.cfg.block_q: m.dropped for m in result.measurements if m.dropped}


def test_the_fastest_right_candidate_wins():
    with planted({64: {"work": SLOW}, 32: {}, 16: {"work": SLOW}}) as toy:
        result = tune(toy)
    assert result.winner.block_q == 32
    assert not dropped(result)
    assert [len(m.seconds) for m in result.measurements] == [5, 5, 5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_candidate_off_by_one_percent_is_never_chosen_though_it_is_the_fastest(dtype):
    with planted({64: {"work": SLOW}, 32: {"work": SLOW}, 16: {"factor": 1.01}}) as toy:
        inv = toy.bind(jnp.asarray(X, dtype))
        result = Tuner(warmup=1, iters=5).tune(toy, inv, toy.candidate_cfgs(inv))
    assert result.winner.block_q != 16
    assert "output 0 is wrong: error 0.01" in dropped(result)[16]


def test_a_wrong_gradient_is_dropped_under_validate_backward_and_only_then():
    with planted({64: {"work": SLOW}, 16: {"gradient": 2.02}}) as toy:
        assert tune(toy).winner.block_q == 16
        result = tune(toy, backward=True)
    assert result.winner.block_q == 64
    assert "gradient 0 is wrong: error 0.01" in dropped(result)[16]
    assert result.to_json()["backward"]


def test_the_policy_asks_for_the_gradient():
    x = jnp.asarray(X)
    with planted({64: {"work": SLOW}, 16: {"gradient": 2.02}}) as toy:
        assert choose(executor(), toy, x).cfg.block_q == 16
        run = executor()
        assert choose(run, toy, x).cfg.block_q == 16
        with keraunos.policy_override(run.chain.policy, validate_backward=True):
            # What was measured without the backward does not count.
            choice = choose(run, toy, x)
        assert (choice.tier, choice.cfg.block_q) == ("autotune", 64)


def test_candidates_that_do_not_run_are_dropped_with_their_reason():
    with planted({64: {}, 32: RuntimeError("out of shared memory\nmore"), 16: {"factor": float("nan")}}) as toy:
        result = tune(toy)
    assert result.winner.block_q == 64
    assert dropped(result)[32] == "RuntimeError: out of shared memory"
    assert "error inf" in dropped(result)[16]


def test_the_heuristic_stays_within_the_spread():
    with planted({64: {}}) as toy:
        slow, fast, clear = (toy.heuristic_cfg(toy.bind(jnp.asarray(X))).__class__(block_q=n) for n in (64, 32, 16))
    heuristic = Measurement(slow, (1.0, 1.1, 1.2, 1.3))
    near = Measurement(fast, (0.9, 1.0, 1.1, 1.2))
    far = Measurement(clear, (0.5, 0.6, 0.7, 0.8))
    result = _decide((heuristic, near), False)
    assert result.winner == slow
    assert "within the spread" in result.note
    assert _decide((heuristic, near, far), False).winner == clear
    # One round that something disturbed, such as another candidate's compiler, decides nothing.
    result = _decide((Measurement(slow, (1000.0,)), Measurement(clear, (0.5,))), False)
    assert result.winner == slow
    assert "fewer than 3 rounds" in result.note
    # A heuristic that is wrong does not stay.
    assert _decide((Measurement(slow, dropped="wrong"), near), False).winner == fast


def test_when_all_fail_the_heuristic_runs_nothing_is_stored_and_it_says_so(tmp_path, caplog):
    x = jnp.asarray(X)
    calls = []
    with planted({64: {"factor": 1.01}, 32: RuntimeError("no")}, calls) as toy:
        run = executor(tmp_path)
        run(toy, x)
        choice = choose(run, toy, x)
        compiled = len(calls)
        run(toy, jnp.ones((2, 31)))
        assert len(calls) == compiled + 1, "what failed is not tried again in the same bucket"
    assert choice.tier == "heuristic"
    assert "all candidates failed" in choice.missed["autotune"]
    assert "RuntimeError: no" in str(choice)
    assert "all candidates failed" in caplog.text
    assert not list(tmp_path.iterdir())


def test_an_operation_that_cannot_be_sampled_runs_with_its_heuristic():
    class Untunable(Toy):
        def sample(self, inv, seed):
            return super(Toy, self).sample(inv, seed)

    with planted({64: {}, 32: {}}):
        choice = choose(executor(), Untunable(), jnp.asarray(X))
    assert choice.tier == "heuristic"
    assert "has no sample()" in choice.missed["autotune"]


def test_it_never_sees_the_callers_arrays_nor_zeros():
    seen = []

    class Watching(Toy):
        def sample(self, inv, seed):
            made = super().sample(inv, seed)
            seen.append(np.asarray(made[0][0]))
            return made

    with planted({64: {}, 32: {}}):
        executor()(Watching(), jnp.zeros((2, 32)))
    assert [x.shape for x in seen] == [(1, 9), (2, 32)]
    assert all(np.count_nonzero(x) == x.size for x in seen)


@pytest.mark.parametrize("trace", ["jit", "grad", "vmap", "scan"])
def test_it_tunes_while_tracing(trace):
    x = jnp.asarray(X)
    with planted({64: {"work": SLOW}, 32: {}}) as toy:
        run = executor()

        def fn(x):
            return run(toy, x)

        if trace == "jit":
            np.testing.assert_array_equal(jax.jit(fn)(x), 2 * x)
        elif trace == "grad":
            assert jax.grad(lambda x: fn(x).sum())(x).shape == x.shape
        elif trace == "vmap":
            np.testing.assert_array_equal(jax.vmap(fn)(x[None]), 2 * x[None])
        else:
            np.testing.assert_array_equal(jax.lax.scan(lambda c, y: (c, fn(y)), 0, x[None])[1], 2 * x[None])
        assert choose(run, toy, x).cfg.block_q == 32


def test_a_thousand_lengths_tune_at_most_once_for_each_power_of_two(monkeypatch):
    tuned = []
    monkeypatch.setattr(Tuner, "tune", counting(Tuner.tune, tuned))
    # As many short ones as long ones.
    lengths = np.exp2(np.random.default_rng(0).uniform(0, 13, 1000)).round()
    calls = []
    with planted({64: {"work": 1}, 32: {}}, calls) as toy:
        run = executor(tuner=Tuner(warmup=0, iters=1))
        for n in lengths:
            run.chain.choose(toy, toy.bind(jax.ShapeDtypeStruct((1, int(n)), jnp.float32)))
    assert len(tuned) == len({bucket(int(n)) for n in lengths}) == 14


def counting(fn, calls):
    def counted(*args, **kwargs):
        calls.append(args)
        return fn(*args, **kwargs)

    return counted


def test_threads_that_need_the_same_key_tune_once(monkeypatch):
    tuned = []
    monkeypatch.setattr(Tuner, "tune", counting(Tuner.tune, tuned))
    with planted({64: {}, 32: {}}) as toy:
        run = executor(cache=ConfigCache())
        threads = [threading.Thread(target=choose, args=(run, toy, jnp.asarray(X))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(tuned) == 1


def test_the_budget_ends_it_with_the_best_so_far():
    with planted({64: {}, 32: {"work": SLOW}}) as toy:
        result = tune(toy, iters=10**9, budget=2)
    assert result.winner.block_q == 64
    assert 1 <= len(result.measurements[0].seconds) < 10**9


def test_a_budget_of_nothing_still_measures_the_heuristic():
    with planted({64: {}, 32: {}}) as toy:
        result = tune(toy, budget=1e-9)
    assert result.measurements[0].seconds


@pytest.mark.parametrize("settings", [{"warmup": -1}, {"iters": 0}, {"budget": 0}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="expected warmup >= 0"):
        Tuner(**settings)


def test_the_real_operation_is_tuned_and_its_gradient_checked():
    kernel = keraunos.LightningAttention()
    inv = kernel.invocation("jax", "float32", T=40, H=2, K=16)
    candidates = [c for c in kernel.candidate_cfgs(inv) if c.block_q in (16, 64)]
    result = Tuner(warmup=0, iters=2, budget=300).tune(kernel, inv, candidates, backward=True)
    assert result.winner in candidates
    assert [m.dropped for m in result.measurements] == [None, None]


@pytest.mark.parametrize("name", ["gla", "lightning_attn"])
@pytest.mark.parametrize("sizes", [
    {"gate": "constant"}, {"N": 3, "state": True}, {"G": 1, "V": 8, "reverse": True}, {"HQ": 1, "G": 1, "HV": 2},
])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_samples_are_calls_of_the_shape_that_was_asked_for(name, sizes, framework):
    kernel = {"gla": keraunos.GLAttention, "lightning_attn": keraunos.LightningAttention}[name]()
    inv = kernel.invocation(framework, "bfloat16", T=33, H=2, K=16, **sizes)
    args, kwargs = kernel.sample(inv, 3)
    again = kernel.bind(*args, **kwargs)
    assert again.key == inv.key
    assert dict(again.dims) == dict(inv.dims)
    for small in kernel.check_calls(inv, [kernel.config(block_q=64)]):
        args, kwargs = kernel.sample(small, 0)
        assert kernel.bind(*args, **kwargs).dims == small.dims


def test_progress_is_not_shown_into_files(capfd):
    with planted({64: {}, 32: {}}) as toy:
        tune(toy)
        assert capfd.readouterr() == ("", "")
        tune(toy, progress=True)
    assert capfd.readouterr().err
