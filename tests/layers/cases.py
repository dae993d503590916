"""Layers of both frameworks with the same weights, and what published descriptions say that they compute."""

import functools
from typing import NamedTuple

import numpy as np

from keraunos import decay
from keraunos.layers import Cache
from tests.layers import published
from tests.linear_attention.cases import GPU
from tests.numerics import assert_within_rule

HIDDEN = 24
DEVICE = "cuda" if GPU else "cpu"


class Case(NamedTuple):
    make: object  # (the module of a framework, its parameters) -> a layer
    published: object  # (weights, one sequence) -> its output and state


def _gla(m, **parameters):
    return m.GatedLinearAttention(HIDDEN, num_heads=4, num_kv_heads=2, use_short_conv=True, conv_bias=True,
                                  gate_low_rank_dim=5, gate_logit_normalizer=2, clamp_min=-0.3, **parameters)


CASES = {
    "gla": Case(_gla, functools.partial(published.gated, heads=4, kv_heads=2, normalizer=2, clamp=-0.3)),
    "ungated gla": Case(
        lambda m, **p: m.GatedLinearAttention(HIDDEN, num_heads=2, use_short_conv=True, use_output_gate=False,
                                              feature_map="relu", **p),
        functools.partial(published.gated, heads=2, kv_heads=2, feature_map=lambda x: np.maximum(x, 0),
                          gated_output=False),
    ),
    "simple gla": Case(
        lambda m, **p: m.SimpleGatedLinearAttention(HIDDEN, num_heads=2, num_kv_heads=1, conv_size=3, **p),
        functools.partial(published.gated, heads=2, kv_heads=1),
    ),
    "delta": Case(
        lambda m, **p: m.GatedDeltaNet(HIDDEN, head_dim=4, expand_v=1.5, num_heads=2, num_v_heads=4, conv_bias=True,
                                       allow_neg_eigval=True, **p),
        functools.partial(published.delta, heads=2, value_heads=4, eps=1e-5, most=2),
    ),
    "qwen3_next": Case(
        lambda m, **p: m.GatedDeltaNet.qwen3_next(HIDDEN, 2, 4, head_dim=4, expand_v=1.5, **p),
        functools.partial(published.delta, heads=2, value_heads=4, eps=1e-6),
    ),
    "kimi": Case(
        lambda m, **p: m.KimiDeltaAttention(HIDDEN, head_dim=4, num_heads=2, num_v_heads=4, lower_bound=-5.0, **p),
        functools.partial(published.delta, heads=2, value_heads=4, eps=1e-5, gate=published.sigmoid, lower_bound=-5),
    ),
    "minimax": Case(
        lambda m, **p: m.LightningAttention.minimax(HIDDEN, 3, 1, 4, head_dim=8, **p),
        functools.partial(published.lightning, heads=3, decay=decay.minimax(3, 1, 4), model="minimax"),
    ),
    "bailing": Case(
        lambda m, **p: m.LightningAttention.bailing(HIDDEN, 4, 1, 4, head_dim=8, rotary_dim=4, rope_theta=6e5,
                                                    norm_groups=2, **p),
        functools.partial(published.lightning, heads=4, decay=decay.bailing(4, 1, 4), model="bailing", rotary_dim=4,
                          theta=6e5, groups=2),
    ),
    "minicpm_sala": Case(
        lambda m, **p: m.LightningAttention.minicpm_sala(HIDDEN, 4, **p),
        functools.partial(published.lightning, heads=4, decay=decay.minicpm_sala(4), model="minicpm_sala",
                          rotary_dim=6),
    ),
}


@functools.cache
def torch_layer(name, dtype="float32"):
    """With weights that differ from what layers begin with, norms' too."""
    import torch

    from keraunos.layers import torch as layers

    torch.manual_seed(0)
    layer = CASES[name].make(layers)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.to(DEVICE, getattr(torch, dtype))


def tensor(x, dtype=None):
    """NumPy's on the device of PyTorch's layers."""
    import torch

    return torch.as_tensor(x).to(DEVICE, dtype)


def array(x):
    """An array of either framework as NumPy's."""
    return x.detach().cpu().numpy() if hasattr(x, "detach") else np.asarray(x)


def weights(name, dtype):
    return {key: array(x.double()).astype(dtype) for key, x in torch_layer(name).state_dict().items()}


@functools.cache
def flax_layer(name):
    from flax import nnx

    from keraunos.layers import flax as layers

    layer = CASES[name].make(layers, rngs=nnx.Rngs(0))
    layers.load_state_dict(layer, torch_layer(name).state_dict())
    return layer


class Torch:
    """PyTorch's layer, from NumPy to NumPy."""

    def __init__(self, name):
        self.layer = torch_layer(name)

    def __call__(self, x, cache=None, **options):
        found = self.layer(tensor(x), cache, **{key: tensor(y) for key, y in options.items()})
        return (array(found[0]), found[1]) if cache is not None else array(found)


class Flax:
    """NNX's layer, compiled, from NumPy to NumPy."""

    def __init__(self, name):
        from flax import nnx

        self.layer = flax_layer(name)
        self.run = nnx.jit(lambda layer, x, cache, options: layer(x, cache, **options))

    def __call__(self, x, cache=None, **options):
        found = self.run(self.layer, x, cache, options)
        return (array(found[0]), found[1]) if cache is not None else array(found)


FRAMEWORKS = {"torch": Torch, "flax": Flax}


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal((*shape, HIDDEN), np.float32)


def assert_published(name, got, sequences, state=None):
    """Outputs of sequences, ``[T, hidden]`` each, and their states are the published description's."""
    results = [
        [CASES[name].published(weights(name, dtype), x.astype(dtype)) for x in sequences]
        for dtype in (np.float64, np.float32)
    ]
    truth, in_dtype = ([np.concatenate([y for y, _ in found]), np.stack([s for _, s in found])] for found in results)
    names, found = ["output", "state"], [np.concatenate(got), None if state is None else np.asarray(state)]
    n = 1 if state is None else 2
    assert_within_rule(names[:n], found[:n], truth[:n], in_dtype[:n], ["float32"] * n)


def assert_published_in_bfloat16(name, got, x):
    """The output of one sequence, as near to the description as what rounds the same steps in float32."""
    import torch

    def stored(x):
        return torch.from_numpy(np.asarray(x)).bfloat16().float().numpy()

    rounded = {key: stored(w) for key, w in weights(name, np.float32).items()}
    wide = {key: w.astype(np.float64) for key, w in rounded.items()}
    truth, _ = CASES[name].published(wide, stored(x).astype(np.float64))
    in_dtype, _ = CASES[name].published(rounded, stored(x), stored=stored)
    assert_within_rule(["output"], [got], [truth], [in_dtype], ["bfloat16"])


def state_of(cache):
    assert isinstance(cache, Cache)
    return array(cache.state)
