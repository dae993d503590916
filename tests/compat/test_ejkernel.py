"""keraunos.compat.ejkernel: ejKernel's names, arguments and results, by a loop in float64 and keraunos' functions."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import keraunos  # noqa: E402
from keraunos.compat import ejkernel  # noqa: E402
from keraunos.kernels.linear_attention.reference import linear_attention  # noqa: E402
from tests.numerics import assert_within_rule  # noqa: E402

jnp = jax.numpy
B, T, S, H, G, K, V = 2, 11, 13, 4, 2, 8, 6
# Of ejkernel 0.0.80.3, released on PyPI: names and defaults. "/": what is before it goes by position only.
STATE = "initial_state=None, cu_seqlens=None, /, *"
RUN = "softmax_scale=None, reverse=False, return_state=False, platform=None, cfg=None"
SIGNATURES = {
    "attention": "query, key, value, bias=None, dropout_rng=None, softmax_aux=None, /, *, mask_info=None, "
    "init_bias=None, deterministic=True, softmax_scale=None, logits_soft_cap=None, dtype=bfloat16, "
    "softmax_dtype=None, dropout_prob=0.0, causal=False, sliding_window=None",
    "gla_attention": f"query, key, value, g=None, g_gamma=None, {STATE}, {RUN}",
    "lightning_attention": f"query, key, value, {STATE}, layer_idx, num_layers, {RUN}",
    "recurrent_attention": f"query, key, value, g=None, g_gamma=None, gk=None, gv=None, {STATE}, {RUN}",
    "create_default_executor": "persistent_cache_path=None, enable_autotuning=True, warmup_iterations=2, "
    "timing_iterations=5",
    "AutotunePolicy": "allow_autotune=True, cache_miss_fallback='autotune', validate_backward=False",
    "MaskInfo.from_segments": "q_segment_ids, kv_segment_ids=None, is_attn_mask=False",
    "MaskInfo.from_attention_mask": "attention_mask, *, mask_is_valid=True",
    "MaskInfo.apply_causal": "offset=0",
    "MaskInfo.apply_sliding_window": "sliding_window, *, offset=0",
    "MaskInfo.apply_kv_lengths": "kv_lengths, *, q_len=None, end_index=None, sliding_window=None",
    "MaskInfo.create_bias": "dtype=float32",
}
# Where a function here hands on what is not its own.
BEHIND = {"attention": keraunos.attention, "recurrent_attention": keraunos.gla_attention}
# Here they may be left out, as log_decay may take their place.
OPTIONAL = {"layer_idx": "=None", "num_layers": "=None"}


def listed(parameters):
    """Names in order, with their defaults."""
    return [f"{p.name}{'' if p.default is p.empty else f'={_text(p.default)}'}" for p in parameters]


def _text(default):
    named = isinstance(default, str) and default != "autotune"
    return default if named else getattr(default, "__name__", None) or getattr(default, "name", None) or repr(default)


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_defaults_are_those_of_ejkernel(name):
    found = ejkernel
    for part in name.split("."):
        found = getattr(found, part)
    own = [p for p in inspect.signature(found).parameters.values() if p.kind != p.VAR_KEYWORD and p.name != "self"]
    behind = inspect.signature(BEHIND[name]).parameters.values() if name in BEHIND else []
    taken = listed([*own, *(p for p in behind if p.name not in {x.name for x in own})])
    positional, _, rest = SIGNATURES[name].partition(", /, *, ")
    for argument in rest.replace("*, ", "").split(", ") if rest else []:
        assert argument + OPTIONAL.get(argument, "") in taken
    first = positional.replace("*, ", "").split(", ")
    assert taken[: len(first)] == first


rng = np.random.default_rng(0)
query, key, value = (rng.normal(size=s).astype(np.float32) for s in ((B, T, H, K), (B, S, G, K), (B, S, G, V)))
seen = rng.random((B, H, T, S)) < 0.7
seen[..., 0] = True


def loop(mask, sinks=None, bias=None, scale=K**-0.5, dtype=np.float64):
    """Softmax attention, pair by pair: the output and the weights; a query that sees no key gives zeros."""
    output, weights = np.zeros((B, T, H, V), dtype), np.zeros((B, H, T, S), dtype)
    mask = np.broadcast_to(mask, (B, H, T, S))
    for b, h, t in np.ndindex(B, H, T):
        g = h // (H // G)
        logits = key[b, :, g].astype(dtype) @ query[b, t, h].astype(dtype) * dtype(scale)
        if bias is not None:
            logits = logits + bias[b, h, t]
        powers = np.where(mask[b, h, t], np.exp(logits), 0)
        total = powers.sum() + (0 if sinks is None else np.exp(sinks[h].astype(dtype)).sum())
        weights[b, h, t] = powers / total if total else 0
        output[b, t, h] = weights[b, h, t] @ value[b, :, g].astype(dtype)
    return output, weights


def check(found, mask, **options):
    truth, in_dtype = (loop(mask, dtype=dtype, **options) for dtype in (np.float64, np.float32))
    assert_within_rule(["output", "weights"], [np.asarray(x) for x in found], truth, in_dtype, ["float32"] * 2)


def call(*rest, **options):
    return ejkernel.attention(*map(jnp.asarray, (query, key, value)), *rest, dtype=jnp.float32, **options)


ALL = np.ones((1, 1, T, S), bool)
PADDING = rng.random((B, S)) < 0.6
s, t = np.arange(S), np.arange(T)[:, None]
MASKS = {
    "keys": (PADDING, PADDING[:, None, None]),
    "keys as numbers": (PADDING.astype(np.int32), PADDING[:, None, None]),
    "pairs": (seen[:, 0], seen[:, :1]),
    "pairs of each head": (seen, seen),
    "pairs of each key head": (seen[:, :G], seen[:, :G].repeat(H // G, 1)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_attention(name):
    given, mask = MASKS[name]
    check(call(attention_mask=given, causal=True, sliding_window=(4, 1)), mask & (s <= t) & (s >= t - 4))


SINKS = rng.normal(size=(H, 3)).astype(np.float32)
PER_HEAD = {
    "of each head": (SINKS[:, 0], SINKS[:, :1]),
    "of each key head": (SINKS[:G, 0], SINKS[:G, :1].repeat(H // G, 0)),
    "for all heads": (SINKS[0], np.tile(SINKS[0], (H, 1))),
    "for all heads in a row": (SINKS[:1], np.tile(SINKS[0], (H, 1))),
    "several of each head": (SINKS, SINKS),
}


@pytest.mark.parametrize("name", PER_HEAD)
def test_sinks_of_attention(name):
    given, sinks = PER_HEAD[name]
    check(call(None, None, jnp.asarray(given)), ALL, sinks=sinks)


def test_options_of_attention():
    bias = rng.normal(size=(B, H, T, S)).astype(np.float32)
    check(call(jnp.asarray(bias), softmax_scale=0.3), ALL, bias=bias, scale=0.3)
    check(call(init_bias=lambda: jnp.asarray(bias)), ALL, bias=bias)
    output, weights = call(return_weights=False, causal=True)
    assert weights is None
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    assert jnp.array_equal(output, keraunos.attention(*arrays, causal=True, dtype=jnp.float32))
    assert [x.dtype for x in ejkernel.attention(*arrays)] == [jnp.bfloat16] * 2
    assert ejkernel.attention(*(x.astype(jnp.bfloat16) for x in arrays), dtype=None)[0].dtype == jnp.float32


SEGMENTS = np.array([[0] * 5 + [1] * 6, [3] * 4 + [0] * 4 + [-1] * 3]), rng.integers(-1, 4, (B, S))
SAME = (SEGMENTS[0][:, :, None] == SEGMENTS[1][:, None]) & (SEGMENTS[0][:, :, None] >= 0)
TOKENS = (rng.random((B, T)) < 0.6).astype(np.int32)
LENGTHS = np.array([4, 9])
OFFSET = jnp.array([1, 3])


def padded(own, other):
    return (own[:, :, None] & other[:, None])[:, None]


Mask = ejkernel.MaskInfo
INFOS = {
    "segments": (lambda: Mask.from_segments(*SEGMENTS), SAME[:, None]),
    "masks of tokens": (lambda: Mask.from_segments(TOKENS, PADDING, is_attn_mask=True), padded(TOKENS > 0, PADDING)),
    "pairs": (lambda: Mask.from_attention_mask(seen), seen),
    "turned": (lambda: Mask.from_attention_mask(~seen[:, 0], mask_is_valid=False), seen[:, :1]),
    "causal": (lambda: Mask.from_segments(*SEGMENTS).apply_causal(2), SAME[:, None] & (s <= t + 2)),
    "window": (
        lambda: Mask.from_attention_mask(seen).apply_causal(OFFSET).apply_sliding_window(3, offset=OFFSET),
        seen & (s <= (place := t + np.asarray(OFFSET)[:, None, None, None])) & (s >= place - 3),
    ),
    "lengths": (
        lambda: Mask.from_segments(*SEGMENTS).apply_kv_lengths(LENGTHS, q_len=T, end_index=LENGTHS),
        SAME[:, None] & (s < LENGTHS[:, None, None, None]),
    ),
}


@pytest.mark.parametrize("name", INFOS)
def test_masks_as_objects(name):
    made, mask = INFOS[name]
    info = made()
    found = info.attention_mask
    assert found.dtype == jnp.bool_
    assert np.array_equal(found, mask)
    assert np.array_equal(info.get_or_compute_attention_mask(jnp.int32), mask.astype(np.int32))
    assert np.array_equal(info.bias, np.where(mask, np.float32(0), np.finfo(np.float32).min))
    assert info.shape == (info.batch_size, info.q_len, info.kv_len) == (B, T, S)
    check(call(mask_info=info), mask)
    check(call(mask_info=info.limits), mask)


def test_a_mask_goes_through_a_jitted_function():
    made, mask = INFOS["window"]
    check(jax.jit(lambda info: call(mask_info=info))(made()), mask)


def test_a_mask_of_tokens_is_one_of_pairs():
    info = Mask.from_attention_mask(TOKENS)
    assert np.array_equal(info.attention_mask, padded(TOKENS > 0, TOKENS > 0))
    ids = np.where(TOKENS > 0, 0, -1)
    for found in (info.q_segment_ids, info.kv_segment_ids):
        assert np.array_equal(found, ids)


def test_segment_ids():
    for info in (Mask.from_segments(*SEGMENTS), Mask.from_segments(*SEGMENTS).apply_causal()):
        for found, ids in zip(info.get_or_compute_segment_ids(), SEGMENTS, strict=True):
            assert np.array_equal(found, ids)
    cut = Mask.from_segments(*SEGMENTS).apply_kv_lengths(LENGTHS)
    assert np.array_equal(cut.kv_segment_ids, np.where(s < LENGTHS[:, None], SEGMENTS[1], -1))
    hidden = seen.copy()
    hidden[1, :, 7:], hidden[0, ..., 9] = False, False
    info = Mask.from_attention_mask(hidden)
    assert np.array_equal(info.q_segment_ids, np.where(hidden.any((1, 3)), 0, -1))
    assert np.array_equal(info.kv_segment_ids, np.where(hidden.any((1, 2)), 0, -1))


q, k, v, g, gk = (rng.normal(size=(B, T, H, K)).astype(np.float32) for _ in range(5))
g, gk, state = -np.abs(g), -np.abs(gk), rng.normal(size=(B, H, K, K)).astype(np.float32)
GAMMA = -rng.random((B, H)).astype(np.float32)
DECAY = np.float32(-8 / H * (1 - 1 / 4) * np.arange(H))
LINEAR = {
    "gla_attention": ((g, GAMMA, state), {"reverse": True}, (g, GAMMA, state)),
    "lightning_attention": ((state,), {"layer_idx": 1, "num_layers": 4}, (None, DECAY, state)),
    "recurrent_attention": ((g, GAMMA, gk, None, state), {}, (g + gk, GAMMA, state)),
}


def check_linear(found, gates, **options):
    truth, in_dtype = (linear_attention(q, k, v, *gates, dtype=d, **options) for d in (np.float64, np.float32))
    assert_within_rule(["output", "state"], [np.asarray(x) for x in found], truth, in_dtype, ["float32"] * 2)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention(name):
    rest, options, gates = LINEAR[name]
    given = [x if x is None else jnp.asarray(x) for x in (q, k, v, *rest)]
    found = getattr(ejkernel, name)(*given, return_state=True, **options)
    check_linear(found, gates, reverse=options.get("reverse", False))


def test_the_state_is_left_out():
    arrays = [jnp.asarray(x) for x in (q, k, v)]
    assert ejkernel.gla_attention(*arrays, jnp.asarray(g)).shape == v.shape


def test_executor_takes_arguments_in_its_order():
    executor = ejkernel.create_default_executor(enable_autotuning=False)
    given = [jnp.asarray(x) for x in (q, k, v)]
    found = executor(ejkernel.GLAttention(), *given, jnp.asarray(g), None, 0.5, jnp.asarray(state), return_state=True)
    check_linear(found, (g, None, state), softmax_scale=0.5)
    named = dict(zip(("query", "key", "value"), given, strict=True), initial_state=jnp.asarray(state))
    operation = ejkernel.LightningAttention()
    found = executor(operation, **named, layer_idx=1, num_layers=4, return_state=True, platform="xla")
    check_linear(found, (None, DECAY, state))
    for name in ("cfg", "_cfg"):
        cfg = {name: ejkernel.LightningAttentionConfig(platform="xla")}
        assert jnp.array_equal(executor(operation, *given, 1, 4, None, jnp.asarray(state), **cfg), found[0])
    with pytest.raises(ValueError, match="triton"):
        executor(operation, *given, 1, 4, cfg=ejkernel.LightningAttentionConfig(num_warps=4, platform="triton"),
                 platform="xla")


def test_errors():
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    info = Mask.from_segments(*SEGMENTS)
    with pytest.raises(ValueError, match=r"^attention: got two of bias, mask_info and attention_mask"):
        call(mask_info=info, attention_mask=seen)
    with pytest.raises(TypeError, match=r"^attention: mask_info is a dict"):
        call(mask_info={})
    with pytest.raises(TypeError, match=r"^MaskInfo.from_segments: got q_positions: places are counted here"):
        Mask.from_segments(*SEGMENTS, q_positions=SEGMENTS[0])
    with pytest.raises(TypeError, match=r"^MaskInfo.from_attention_mask: got qheads_axis_name: no axes are named"):
        Mask.from_attention_mask(seen, qheads_axis_name="tp")
    with pytest.raises(TypeError, match=r"^MaskInfo.from_segments: got ids: expected no such argument"):
        Mask.from_segments(*SEGMENTS, ids=1)
    with pytest.raises(ValueError, match=r"^MaskInfo.apply_sliding_window: offset is 0, after 2"):
        info.apply_causal(2).apply_sliding_window(3)
    with pytest.raises(TypeError, match=r"^MaskInfo.apply_sliding_window: got mode: it cuts keys"):
        info.apply_sliding_window(3, mode="decode")
    with pytest.raises(NotImplementedError, match=r"^MaskInfo.apply_kv_lengths: it cuts keys or queries out"):
        info.apply_kv_lengths(LENGTHS, q_len=1, end_index=LENGTHS)
    with pytest.raises(NotImplementedError, match=r"^recurrent_attention: gv is given"):
        ejkernel.recurrent_attention(*arrays, None, None, None, arrays[2])
    with pytest.raises(NotImplementedError, match=r"^Executor: got Attention; .* keraunos\.attention takes cfg"):
        ejkernel.create_default_executor()(ejkernel.Attention(), *arrays)
    with pytest.raises(TypeError, match=r"^Executor: got mesh: no axes are named here"):
        ejkernel.create_default_executor()(ejkernel.GLAttention(), *arrays, mesh=None)
    with pytest.raises(NotImplementedError, match=r"^create_default_executor: got persistent_cache_path"):
        ejkernel.create_default_executor("cache.json")
    with pytest.raises(NotImplementedError, match=r"^flash_attention: use keraunos\.attention"):
        ejkernel.flash_attention(*arrays)
    with pytest.raises(AttributeError, match="has no attribute 'stamp'"):
        ejkernel.stamp  # noqa: B018


def test_nothing_else_imports_it():
    code = "import sys, keraunos, keraunos.compat; keraunos.attention; print('ejkernel' in ' '.join(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
