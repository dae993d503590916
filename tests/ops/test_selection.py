"""The order of the tiers, what each stores, the policies, and what explain tells."""

import asyncio
import copy
import dataclasses
import pickle
import re
import threading

import jax
import jax.numpy as jnp
import pytest

import keraunos
from keraunos import frontends
from keraunos.ops import AutotunePolicy, Config, ConfigCache
from keraunos.ops import cache as cache_module
from keraunos.ops.cache import PersistentCache, split_key
from keraunos.ops.executor import create_default_executor
from keraunos.ops.invocation import bucket
from keraunos.ops.selection import default_policy

from .toy import SLOW, choose, compute, executor, planted

X = jnp.ones((2, 32))


@pytest.fixture
def toy():
    with planted({64: {"work": SLOW}, 32: {}, 16: {"work": SLOW}}) as kernel:
        yield kernel


def test_the_order_of_the_tiers(toy, tmp_path, monkeypatch):
    run = executor(tmp_path / "user", cache_miss_fallback="heuristics")
    assert (choose(run, toy, X).tier, choose(run, toy, X).cfg.block_q) == ("heuristic", 64)
    key = choose(run, toy, X).key

    with keraunos.policy_override(cache_miss_fallback="autotune"):
        tuned = choose(executor(), toy, X)
    assert (tuned.tier, tuned.cfg.block_q) == ("autotune", 32)

    shipped = tmp_path / "shipped"
    monkeypatch.setattr(cache_module, "shipped_directory", lambda: shipped)
    cache_module._shipped_entries.cache_clear()
    cache_module.ship(key, "toy cpu", {"winner": {"block_q": 16}})
    assert (choose(run, toy, X).tier, choose(run, toy, X).cfg.block_q) == ("shipped", 16)

    PersistentCache("", tmp_path / "user").put(key, "toy cpu", {"winner": {"block_q": 32}})
    choice = choose(run, toy, X)
    assert (choice.tier, choice.cfg.block_q) == ("disk", 32)
    assert choice.cfg.platform == "xla"
    assert choose(run, toy, X).tier == "memory"

    with keraunos.overlay_cache({key: Config(block_q=16)}):
        assert (choose(run, toy, X).tier, choose(run, toy, X).cfg.block_q) == ("overlay", 16)
        with keraunos.overlay_cache({key: Config(block_q=64)}):
            assert choose(run, toy, X).cfg.block_q == 64
        choice = choose(run, toy, X, cfg=Config(block_q=128))
        assert (choice.tier, choice.cfg.block_q) == ("explicit", 128)
    assert choose(run, toy, X).tier == "memory"
    cache_module._shipped_entries.cache_clear()


def test_what_is_no_configuration_is_refused_by_the_memory_tier():
    with (
        pytest.raises(TypeError, match=r"ConfigCache: 'a key' has \{'block_q': 16\}; expected a configuration"),
        keraunos.overlay_cache({"a key": {"block_q": 16}}),
    ):
        pass


def test_explicit_and_heuristic_configurations_are_never_stored(toy, tmp_path):
    run = executor(tmp_path, cache_miss_fallback="heuristics")
    run(toy, X)
    run(toy, X, _cfg=Config(block_q=16))
    assert not list(tmp_path.iterdir())
    assert choose(run, toy, X).missed["memory"] == "no entry"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_an_executor_can_be_copied_with_the_model_that_has_it(copied):
    given = [jnp.ones((1, 8, 2, 4))] * 3
    run = executor(cache_miss_fallback="heuristics")
    gla = keraunos.GLAttention()
    output, _ = run(gla, *given)
    cfg = Config(block_q=4)
    run.chain.cache.put(choose(run, gla, *given).key, cfg)
    other = copied(run)
    assert choose(other, gla, *given).cfg.block_q == 4
    assert other.chain.policy == run.chain.policy
    assert jnp.array_equal(other(gla, *given)[0], output)
    # What one of them learns from now on the other does not.
    other.chain.cache.put(choose(run, gla, *given).key, Config(block_q=2))
    assert choose(run, gla, *given).cfg.block_q == 4


def test_a_winner_is_stored_with_all_measurements_and_found_by_the_next_process(toy, tmp_path):
    assert choose(executor(tmp_path), toy, X).tier == "autotune"
    choice = choose(executor(tmp_path, allow_autotune=False), toy, X)
    assert (choice.tier, choice.cfg.block_q) == ("disk", 32)
    (entry,) = PersistentCache("", tmp_path).entries(tmp_path / "toy-cpu.json").values()
    assert [m["config"]["block_q"] for m in entry["measurements"]] == [64, 32, 16]
    assert all(m["microseconds"]["median"] > 0 for m in entry["measurements"])


def test_a_shipped_entry_of_another_kernel_source_is_passed_over_with_a_reason(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "shipped_directory", lambda: tmp_path)
    run = executor(cache_miss_fallback="heuristics")
    key = choose(run, toy, X).key
    source = split_key(key)[1]
    for other, tier in (
        (key.replace(source, "0" * 12), "heuristic"),
        # The versions only say what it was measured with.
        (key.replace("jaxlib ", "jaxlib 0."), "shipped"),
    ):
        cache_module._shipped_entries.cache_clear()
        cache_module.ship(other, "toy cpu", {"winner": {"block_q": 16}})
        choice = choose(run, toy, X)
        assert choice.tier == tier
        if tier == "heuristic":
            assert f"another version of the kernel (source {'0' * 12}, now {source})" in str(choice)
    entries = cache_module.load(tmp_path / "toy-cpu.json")["entries"]
    assert len(entries) == 1, "an entry replaces those of other versions"
    cache_module._shipped_entries.cache_clear()


def test_everything_in_the_key_changes_it(toy, monkeypatch):
    run = executor(cache_miss_fallback="heuristics")
    key = choose(run, toy, X).key
    assert key.startswith("toy cpu | xla/any | toy | jax | B2 T32 | x:float32x2 | twice=False | source ")
    assert choose(run, toy, jnp.ones((2, 17))).key == key
    different = {
        choose(run, toy, jnp.ones((2, 33))).key,
        choose(run, toy, jnp.ones((3, 32))).key,
        choose(run, toy, X.astype(jnp.bfloat16)).key,
        choose(run, toy, X, twice=True).key,
    }
    monkeypatch.setattr(cache_module, "_version", lambda distribution: f"{distribution}'s other version")
    different.add(choose(run, toy, X).key)
    monkeypatch.undo()
    monkeypatch.setattr(cache_module, "__version__", "9.9")
    different.add(choose(run, toy, X).key)
    monkeypatch.undo()
    assert len(different - {key}) == 6


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_decay_that_is_constant_and_one_that_is_learned_have_keys_of_their_own(framework):
    q, gamma = jnp.ones((1, 8, 2, 16)), jnp.zeros(2)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        q, gamma = torch.ones(1, 8, 2, 16), torch.zeros(2)
    key = [keraunos.explain(keraunos.gla_attention, q, q, q, None, x).key for x in ([0.0, 0.0], gamma)]
    assert "g_gamma:constant-float32x1" in key[0]
    assert "g_gamma:float32x1" in key[1]
    constant = keraunos.GLAttention().invocation(framework, "float32", T=8, H=2, K=16, gate="constant")
    assert constant.key in key[0]
    t = jnp.ones((2, 2, 16)) if framework == "jax" else q[0, :2]
    pool, slots = (jnp.ones((4, 2, 16, 16)), jnp.arange(2)) if framework == "jax" else (
        torch.ones(4, 2, 16, 16), torch.arange(2))
    key = [keraunos.explain(keraunos.serving.decode, t, t, t, pool, slots, g_gamma=x).key for x in ([0.0, 0.0], gamma)]
    assert key[0] != key[1]


@pytest.mark.parametrize("platform", [None, "xla"])
def test_an_explicit_field_that_the_platform_does_not_have_is_refused(platform):
    q = jnp.ones((1, 8, 2, 16))
    cfg = keraunos.GLAttentionConfig(block_q=16, num_warps=4)
    for call in (keraunos.gla_attention, lambda *x, **options: keraunos.explain(keraunos.gla_attention, *x, **options)):
        with pytest.raises(ValueError, match=r"^gla_attention: cfg has num_warps, which platform 'xla' .* block_q$"):
            call(q, q, q, cfg=cfg, platform=platform)
    with pytest.raises(ValueError, match="lightning_attention: cfg has block_d, num_warps, which platform 'xla'"):
        keraunos.lightning_attention(q, q, q, layer_idx=0, num_layers=2, cfg=keraunos.LightningAttentionConfig(
            block_d=16, num_warps=4, platform="xla"))
    with pytest.raises(ValueError, match=r"decode: cfg has block_q, .*expected no field"):
        keraunos.serving.decode(q[0, :2], q[0, :2], q[0, :2], jnp.ones((4, 2, 16, 16)), jnp.arange(2),
                                cfg=keraunos.ops.Config(block_q=16))
    # An overlay's is none that a user gave for this platform.
    key = keraunos.explain(keraunos.gla_attention, q, q, q).key
    with keraunos.overlay_cache({key: cfg}):
        keraunos.gla_attention(q, q, q)


def test_buckets_are_powers_of_two():
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]


@pytest.mark.parametrize("operation", [keraunos.gla_attention, keraunos.attention, keraunos.lightning_attention])
def test_explain_names_each_platform_once(operation):
    q = jnp.ones((1, 8, 1, 16))
    layer = {"layer_idx": 0, "num_layers": 2} if operation is keraunos.lightning_attention else {}
    choice = keraunos.explain(operation, q, q, q, **layer)
    named = [choice.platform, *(reason.partition(": ")[0] for reason in choice.passed)]
    assert sorted(named) == sorted(set(named))
    assert "triton" in named
    with pytest.raises(ValueError, match="no platform can run this call") as error:
        keraunos.explain(operation, q, q, q, platform="torch", **layer)
    assert str(error.value).count("torch: ") == 1


def test_all_reasons_of_a_platform_are_told(toy):
    for n, reason in enumerate(("is slow", "is slow", "is out of order")):
        keraunos.kernel_registry.register("toy", "pallas", priority=9 - n, unsupported=lambda inv, r=reason: r)(compute)
    run = executor(cache_miss_fallback="heuristics")
    assert choose(run, toy, X).passed == ["pallas: is slow; and is out of order"]
    with pytest.raises(ValueError, match=r"run this call\. pallas: is slow; and is out of order$"):
        run(toy, X, platform="pallas")


@pytest.mark.parametrize("operation", [keraunos.GLAttention(), keraunos.Attention()])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_platform_for_other_devices_says_which_are_for_these(framework, operation):
    pytest.importorskip("triton")
    if reason := frontends.cannot_launch(framework, gluon=True):
        pytest.skip(reason)
    inv = operation.invocation(framework, "bfloat16", T=4096, H=16, K=128)
    there = {"NVIDIA H200": {"cuda", "triton", {"jax": "xla"}.get(framework, framework)}}
    there["NVIDIA A100-SXM4-80GB"] = there["NVIDIA H200"] - {"cuda"}
    for device, able in there.items():
        with pytest.raises(ValueError, match=r"\. pallas: ") as error:
            keraunos.kernel_registry.choose(dataclasses.replace(inv, backend="gpu", device=device), "pallas")
        told = re.search("; on gpu, (.*) can run it$", str(error.value))
        assert told
        assert {*told[1].split(" or ")} == able


def test_explain_measures_nothing(monkeypatch):
    q = jnp.ones((1, 8, 1, 16))
    monkeypatch.setattr(keraunos.Tuner, "tune", lambda *a, **k: pytest.fail("it tuned"))
    with keraunos.policy_override(cache_miss_fallback="autotune"):
        choice = keraunos.explain(keraunos.gla_attention, q, q, q, platform="xla")
    assert "would time" in choice.missed["autotune"]
    with pytest.raises(TypeError, match="no operation of keraunos"):
        keraunos.explain(len, [])
    with pytest.raises(TypeError, match="'gla' is no operation; expected a function"):
        keraunos.explain("gla", q, q, q)


def test_policies_are_validated():
    with pytest.raises(ValueError, match="'guess'; expected 'autotune' or 'heuristics'"):
        AutotunePolicy(cache_miss_fallback="guess")
    with pytest.raises(TypeError), keraunos.policy_override(allow_autotuning=False):
        pass


def test_the_environment_sets_the_default_policy(monkeypatch):
    assert create_default_executor().chain.policy.cache_miss_fallback == "heuristics"
    monkeypatch.setenv("KERAUNOS_AUTOTUNE_POLICY", "autotune")
    assert create_default_executor().chain.policy.cache_miss_fallback == "autotune"
    with keraunos.policy_override(validate_backward=True) as policy:
        assert policy == AutotunePolicy(cache_miss_fallback="autotune", validate_backward=True)
    monkeypatch.setenv("KERAUNOS_AUTOTUNE_POLICY", "guess")
    with pytest.raises(ValueError, match="KERAUNOS_AUTOTUNE_POLICY"):
        default_policy()


def test_a_policy_stays_in_its_thread_and_task():
    run = executor()
    other = []
    with keraunos.policy_override(allow_autotune=False):
        assert not run.chain.policy.allow_autotune
        thread = threading.Thread(target=lambda: other.append(run.chain.policy.allow_autotune))
        thread.start()
        thread.join()
    assert other == [True]

    async def task(allowed):
        with keraunos.policy_override(allow_autotune=allowed):
            await asyncio.sleep(0)
            return run.chain.policy.allow_autotune

    async def both():
        return await asyncio.gather(task(False), task(True))

    assert asyncio.run(both()) == [False, True]
    assert run.chain.policy.allow_autotune


def test_warm_calls_ask_nobody_and_jitted_ones_not_even_the_executor(toy, monkeypatch):
    run = executor(cache_miss_fallback="heuristics")
    asked, executed = [], []
    choose_ = type(run.chain).choose
    monkeypatch.setattr(type(run.chain), "choose", lambda *a, **k: (asked.append(1), choose_(*a, **k))[1])
    call = type(run).__call__
    monkeypatch.setattr(type(run), "__call__", lambda *a, **k: (executed.append(1), call(*a, **k))[1])
    for _ in range(3):
        run(toy, X)
    assert (len(asked), len(executed)) == (1, 3)
    jitted = jax.jit(lambda x: run(toy, x))
    for _ in range(3):
        jitted(X)
    assert len(executed) == 4
    assert len(asked) == 2, "a traced call, which may be lowered for another device, is another question"
    with keraunos.policy_override(allow_autotune=False):
        run(toy, X)
    assert len(asked) == 3, "another policy is another question"


def test_a_new_entry_reaches_calls_that_were_answered_before(toy):
    cache = ConfigCache()
    calls = []
    run = executor(cache=cache, cache_miss_fallback="heuristics")
    run(toy, X)
    cache.put(choose(run, toy, X).key, Config(block_q=16))
    toy.run = lambda x, *, cfg: calls.append(cfg.block_q)
    run(toy, X)
    assert calls == [16]


def test_unknown_names_are_refused_with_those_that_exist():
    q = jnp.ones((1, 8, 1, 16))
    with pytest.raises(ValueError, match=r"unknown platform 'tritom'; expected one of \['"):
        keraunos.gla_attention(q, q, q, platform="tritom")
    with pytest.raises(ValueError, match="platform='xla', but cfg is for 'triton'"):
        keraunos.gla_attention(q, q, q, platform="xla", cfg=Config(platform="triton"))
    with pytest.raises(TypeError, match="expected a configuration"):
        keraunos.gla_attention(q, q, q, cfg={"block_q": 16})


def test_each_key_is_logged_once(toy, caplog):
    run = executor(cache_miss_fallback="heuristics")
    caplog.set_level("INFO", logger="keraunos")
    for n in (32, 31, 32):
        run(toy, jnp.ones((2, n)))
    assert len(caplog.records) == 1
    assert "xla: {'block_q': 64" in caplog.text
    assert "disk: not in use" in caplog.text
