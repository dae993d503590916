"""Results of layers, in both frameworks, compared with the published descriptions."""

import functools

import numpy as np
import pytest

from tests.layers import published
from tests.layers.cases import (
    CASES,
    DEVICE,
    FRAMEWORKS,
    HIDDEN,
    Case,
    array,
    assert_published,
    state_of,
    tensor,
    tokens,
)

pytest.importorskip("torch")
T = 21

# The code is one: JAX, which compiles each call, sees through all of it with two layers.
BOTH = [("torch", name) for name in CASES] + [("flax", "gla"), ("flax", "bailing")]


def layer(framework, name):
    pytest.importorskip(framework)
    return FRAMEWORKS[framework](name)


def of(framework, x):
    """An array of the framework."""
    if framework == "torch":
        return tensor(x)
    import jax.numpy as jnp

    return jnp.asarray(x)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_whole_sequences(framework, name):
    x = tokens(2, T)
    assert_published(name, list(layer(framework, name)(x)), list(x))


def test_functions_of_a_user_that_change_shapes_are_refused():
    from keraunos.layers import torch as layers

    run = layers.GatedLinearAttention(HIDDEN, num_heads=4, feature_map=lambda x: x.sum(-1), device=DEVICE)
    with pytest.raises(ValueError, match=r"GatedLinearAttention: <.* makes \(2, 5, 4\) of \(2, 5, 4, 3\)"):
        run(of("torch", tokens(2, 5)))


@pytest.mark.parametrize(("framework", "name"), BOTH)
def test_a_prompt_in_parts_then_token_by_token(framework, name):
    run, x = layer(framework, name), tokens(2, T)
    cache, outputs = run.layer.init_cache(2), []
    for start, end in [(0, 2), (2, 18), *((t, t + 1) for t in range(18, T))]:
        y, cache = run(x[:, start:end], cache)
        outputs.append(y)
    assert_published(name, list(np.concatenate(outputs, 1)), list(x), state_of(cache))
    assert array(cache.length).tolist() == [T, T]


@pytest.mark.parametrize(
    ("framework", "name", "operation", "parts"),
    [("torch", "ungated gla", "gla_attention", (6, 4)), ("flax", "ungated gla", "gla_attention", (6, 4)),
     ("torch", "delta", "gated_delta_rule", (8, 3))],
)
def test_wide_values_go_to_the_kernels_in_parts(framework, name, operation, parts, monkeypatch):
    from keraunos.layers import delta, mixers

    monkeypatch.setattr(mixers, "_WIDEST", 5)
    module = delta if name == "delta" else mixers
    widths, computed = [], getattr(module, operation)
    monkeypatch.setattr(module, operation, lambda q, k, v, *args, **options: (
        widths.append(v.shape[2:]), computed(q, k, v, *args, **options))[1])
    run, x = layer(framework, name), tokens(2, T)
    y, cache = run(x[:, :9], run.layer.init_cache(2))
    z, after = run(x[:, 9:], cache)
    assert_published(name, list(np.concatenate([y, z], 1)), list(x), state_of(after))
    assert_published(name, list(run(x)), list(x))
    assert {tuple(width) for width in widths} == {parts}


@pytest.mark.parametrize(("framework", "name"), BOTH)
def test_padding_leaves_no_trace(framework, name):
    run, x = layer(framework, name), tokens(4, T)
    # On the left, on the right, in between, and nothing else but one token.
    mask = np.ones((4, T), bool)
    mask[0, :7], mask[1, 15:], mask[2, 4:9], mask[3, :-1] = False, False, False, False
    first = np.where(mask[..., None], x, np.nan).astype(np.float32)
    # A second part of the prompts, of which one row has none: its cache stays.
    more, more_mask = tokens(4, T, seed=1), np.ones((4, T), bool)
    more_mask[0, 3:], more_mask[1, :20], more_mask[2], more_mask[3, ::2] = False, False, False, False
    y, cache = run(first, run.layer.init_cache(4), attention_mask=mask)
    z, after = run(more, cache, attention_mask=more_mask)
    assert not y[~mask].any()
    assert not z[~more_mask].any()
    got = [np.concatenate([y[i][mask[i]], z[i][more_mask[i]]]) for i in range(4)]
    sequences = [np.concatenate([x[i][mask[i]], more[i][more_mask[i]]]) for i in range(4)]
    assert_published(name, got, sequences, state_of(after))
    assert array(after.length).tolist() == [len(s) for s in sequences]


def gradients(framework, run, mask):
    """``x -> (y, gradients)`` of a loss of the tokens: of x and of all weights."""
    if framework == "torch":
        import torch

        def found(x):
            x = tensor(x).requires_grad_()
            y = run.layer(x, attention_mask=tensor(mask))
            return array(y), [*map(array, torch.autograd.grad(y.square().sum(), [x, *run.layer.parameters()]))]

        return found
    import jax
    import jax.numpy as jnp
    from flax import nnx

    def loss(x, layer):
        y = layer(x, attention_mask=mask)
        return jnp.square(y).sum(), y

    compiled = nnx.jit(nnx.grad(loss, argnums=(0, 1), has_aux=True))

    def found(x):
        gradients, y = compiled(jnp.asarray(x), run.layer)
        return array(y), [*map(array, jax.tree.leaves(gradients))]

    return found


def normalized(x):
    """Of one head: not finite at 0."""
    return x / (x * x).sum(-1)[..., None] ** 0.5


OWN = Case(
    lambda m, **p: m.SimpleGatedLinearAttention(HIDDEN, num_heads=4, num_kv_heads=2, use_short_conv=False,
                                                feature_map=normalized, gate_fn=normalized, **p),
    functools.partial(published.gated, heads=4, kv_heads=2, feature_map=normalized, gate=normalized),
)


@pytest.mark.parametrize(
    ("framework", "name"), [("torch", "own"), ("torch", "gla"), ("torch", "bailing"), ("flax", "own")]
)
def test_a_users_functions_are_given_heads_and_padding_reaches_no_gradient(framework, name, monkeypatch):
    monkeypatch.setitem(CASES, "own", OWN)
    mask, x = np.ones((3, 9), bool), tokens(3, 9)
    mask[0, :4], mask[1, 5:], mask[2] = False, False, False
    run = gradients(framework, layer(framework, name), mask)
    # Products with 3e38 are infinite in float32.
    padded = [np.where(mask[..., None], x, bad).astype(np.float32) for bad in (0.5, np.nan, np.inf, 3e38)]
    (y, want), *others = map(run, padded)
    assert_published(name, [y[i][mask[i]] for i in range(2)], [x[i][mask[i]] for i in range(2)])
    assert not want[0][~mask].any()
    assert all(np.isfinite(part).all() for part in want)
    for same, got in others:
        np.testing.assert_array_equal(same, y)
        for part, wanted in zip(got, want, strict=True):
            np.testing.assert_array_equal(part, wanted)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_masks_that_are_added_and_masks_of_floats(framework):
    run, x = layer(framework, "simple gla"), tokens(3, T)
    mask = np.ones((3, T), bool)
    mask[0, :7], mask[1, 15:] = False, False
    for added in (np.finfo(np.float32).min, -np.inf):
        y = run(x, attention_mask=np.where(mask, 0, added).astype(np.float32))
        assert_published("simple gla", [y[i][mask[i]] for i in range(3)], [x[i][mask[i]] for i in range(3)])
        assert not y[~mask].any()
    np.testing.assert_array_equal(run(x, attention_mask=mask.astype(np.float32)), y)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_masks_and_offsets_with_wrong_values_are_refused_by_the_layer(framework):
    run, make = layer(framework, "simple gla").layer, functools.partial(of, framework)
    x, zeros = make(tokens(1, 5)), [0.0] * 5
    host = DEVICE == "cpu"  # a GPU's values are not read
    for options, error, message in [
        (dict(attention_mask=make([zeros])), host and ValueError, "attention_mask has a value 0.0 .* all zeros"),
        (dict(attention_mask=make([[1.0, 1.0, 0.5, 0.0, 0.0]])), host and ValueError, r"a value 0.5 at \[0, 2\]"),
        (dict(attention_mask=make([[0.0, 0.0, 0.0, -1.0, -1e9]])), host and ValueError, r"a value -1.0 at \[0, 3\]"),
        (dict(attention_mask=make([[1.0, 1.0, 1.0, np.nan, 0.0]])), host and ValueError, "a value nan"),
        (dict(attention_mask=make([[[zeros] * 5]])), ValueError, r"attention_mask has shape \(1, 1, 5, 5\)"),
        (dict(cu_seqlens=[0, 3, 2, 5]), ValueError, r"cu_seqlens has a value 2 at \[2\]; expected offsets that rise"),
        (dict(cu_seqlens=(0, 3)), ValueError, "cu_seqlens has a value 3"),
        (dict(cu_seqlens=make([0, 3, 9])), host and ValueError, "cu_seqlens has a value 9"),
        (dict(cu_seqlens=[]), ValueError, r"cu_seqlens has shape \(0,\)"),
        (dict(cu_seqlens=5), ValueError, r"cu_seqlens has shape \(\)"),
        (dict(cu_seqlens=[0.0, 5.0]), TypeError, "cu_seqlens has dtype float32; expected int32 or int64"),
    ]:
        if error:
            with pytest.raises(error, match=f"SimpleGatedLinearAttention: .*{message}"):
                run(x, **options)


@pytest.mark.parametrize(
    ("framework", "kind"), [("torch", list), ("torch", tuple), ("torch", np.array), ("flax", list)]
)
def test_lists_as_offsets_and_masks(framework, kind):
    run, x = layer(framework, "minimax").layer, tokens(1, T)
    offsets, mask = kind([0, 9, 9, T]), kind([[0] * 9 + [1] * (T - 9)])

    def call(run, x):
        return run(x, cu_seqlens=offsets), run(x, attention_mask=mask)

    if framework == "flax":
        from flax import nnx

        call = nnx.jit(call)
    y, masked = call(run, of(framework, x))
    assert_published("minimax", [array(y)[0]], [x[0, :9], x[0, 9:]])
    assert_published("minimax", [array(masked)[0, 9:]], [x[0, 9:]])


@pytest.mark.parametrize(("framework", "name"), [x for x in BOTH if x != ("flax", "bailing")])
def test_no_rows(framework, name):
    run, x = layer(framework, name), tokens(0, T)
    cache = run.layer.init_cache(0)
    y, after = run(x, cache, attention_mask=np.ones((0, T), bool))
    assert y.shape == x.shape
    assert state_of(after).shape == (0, *run.layer.state_shape)
    assert [part.shape for part in after.conv] == [part.shape for part in cache.conv]


@pytest.mark.parametrize(("framework", "name"), BOTH)
def test_packed_sequences_are_apart(framework, name):
    run, x, more = layer(framework, name), tokens(1, T), tokens(1, T, seed=1)
    # One of them has no tokens, one has fewer than a convolution's taps; then they go on.
    offsets, further = np.array([0, 9, 9, 11, T]), np.array([0, 1, 5, 5, T])
    y, cache = run(x, run.layer.init_cache(4), cu_seqlens=offsets)
    z, after = run(more, cache, cu_seqlens=further)

    def joined(a, b):
        pairs = zip(np.split(a[0], offsets[1:-1]), np.split(b[0], further[1:-1]), strict=True)
        return [np.concatenate(pair) for pair in pairs]

    assert_published(name, joined(y, z), joined(x, more), state_of(after))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_errors_come_first_and_carry_the_layers_name(framework):
    run = layer(framework, "gla")
    x, ones = tokens(2, 5), np.ones((2, 5))
    cache = run.layer.init_cache(2)
    for wrong, options, message in [
        ((x[0],), {}, r"GatedLinearAttention: x has shape \(5, 24\); expected \[B, T, 24\], T >= 1"),
        ((x[:, :0],), {}, r"x has shape \(2, 0, 24\)"),
        ((x[..., 1:],), {}, r"x has shape \(2, 5, 23\)"),
        ((x,), dict(attention_mask=ones[:, 1:]), r"attention_mask has shape \(2, 4\); expected \(2, 5\)"),
        ((x,), dict(cu_seqlens=np.array([0, 5])), r"cu_seqlens has shape \(2,\), x \(2, 5, 24\)"),
        ((x,), dict(cu_seqlens=np.array([0, 5]), attention_mask=ones), "expected one of both"),
        ((x[:1], cache), {}, r"cache.state has shape \(2, 4, 3, 6\); expected \(1, 4, 3, 6\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(*wrong, **options)
    with pytest.raises(TypeError, match="GatedLinearAttention: x is of type list"):
        run.layer([1.0])
    with pytest.raises(TypeError, match="cache is of type tuple; expected init_cache's"):
        run(x, tuple(cache))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: m.GatedLinearAttention(30, num_heads=4), "key width is 15; expected a multiple of 4"),
        (lambda m: m.GatedLinearAttention(HIDDEN, num_heads=4, num_kv_heads=3), "num_heads is 4"),
        (lambda m: m.GatedLinearAttention(HIDDEN, feature_map="elu"), "got 'elu'; expected a function or one of"),
        (lambda m: m.LightningAttention(HIDDEN, 4, [-0.1] * 3), "-0.1]; expected num_heads = 4 numbers <= 0"),
        (lambda m: m.LightningAttention(HIDDEN, 2, [-0.1, 0.1]), "expected num_heads = 2 numbers <= 0"),
        (lambda m: m.LightningAttention(HIDDEN, 0, []), "expected num_heads = 0 numbers <= 0"),
        (lambda m: m.LightningAttention(HIDDEN, 2, [-0.1] * 2, rotary_dim=3), "rotary_dim is 3"),
        (lambda m: m.LightningAttention(HIDDEN, 2, [-0.1] * 2, norm_groups=3), "norm_groups is 3"),
        (lambda m: m.LightningAttention(HIDDEN, 2, [-0.1] * 2, fused="no"), "fused is 'no'"),
    ],
)
def test_sizes_that_do_not_fit(make, message):
    from keraunos.layers import torch as layers

    with pytest.raises(ValueError, match=message):
        make(layers)
