"""Layers of the delta rule: published names, and Hugging Face's modules with the same weights."""

import importlib.util

import pytest

from tests.layers.cases import DEVICE, HIDDEN, array, tensor, tokens, torch_layer
from tests.numerics import assert_within_rule

torch = pytest.importorskip("torch")
layers = pytest.importorskip("keraunos.layers.torch")

# What flash-linear-attention's layers have with these arguments (layers/gated_deltanet.py, layers/kda.py).
SHARED = {
    "A_log": (4,), "q_proj.weight": (8, 24), "k_proj.weight": (8, 24), "b_proj.weight": (4, 24),
    "q_conv1d.weight": (8, 1, 4), "k_conv1d.weight": (8, 1, 4),
}
GATED_DELTANET = {
    **SHARED, "dt_bias": (4,), "v_proj.weight": (24, 24), "a_proj.weight": (4, 24), "g_proj.weight": (24, 24),
    "q_conv1d.bias": (8,), "k_conv1d.bias": (8,), "v_conv1d.weight": (24, 1, 4), "v_conv1d.bias": (24,),
    "o_norm.weight": (6,), "o_proj.weight": (24, 24),
}
KIMI = {
    **SHARED, "dt_bias": (16,), "v_proj.weight": (16, 24), "f_proj.0.weight": (4, 24), "f_proj.1.weight": (16, 4),
    "g_proj.0.weight": (4, 24), "g_proj.1.weight": (16, 4), "g_proj.1.bias": (16,), "v_conv1d.weight": (16, 1, 4),
    "o_norm.weight": (4,), "o_proj.weight": (24, 16),
}

SIZES = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=4, linear_value_head_dim=6)
# The model's module, its configuration and class; its further sizes; our layer.
HUGGING_FACE = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet", SIZES, lambda m, **p: m.GatedDeltaNet.qwen3_next(
        HIDDEN, 2, 4, head_dim=4, expand_v=1.5, **p)),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", SIZES, lambda m, **p: m.GatedDeltaNet.qwen3_5(
        HIDDEN, 2, 4, head_dim=4, expand_v=1.5, **p)),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridGatedDeltaNet", SIZES, lambda m, **p: m.GatedDeltaNet.olmo_hybrid(
        HIDDEN, 2, 4, head_dim=4, expand_v=1.5, **p)),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearDeltaAttention", dict(linear_num_heads=2, linear_head_dim=4),
                    lambda m, **p: m.KimiDeltaAttention.kimi_linear(HIDDEN, 2, head_dim=4, **p)),
}


def hugging_face(model):
    """A model's layer, with weights that differ from what layers begin with."""
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    config, layer, sizes, _ = HUGGING_FACE[model]
    config = getattr(importlib.import_module(f"transformers.models.{model}"), config)(
        hidden_size=HIDDEN, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **sizes)
    torch.manual_seed(0)
    theirs = getattr(modeling, layer)(config, 0)
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            x.copy_(torch.randn_like(x) * 0.3 + (1 if "norm" in name else 0))
    return theirs.to(DEVICE)


@pytest.mark.parametrize(("name", "expected"), [("delta", GATED_DELTANET), ("kimi", KIMI)])
def test_parameters_have_flash_linear_attentions_names_and_shapes(name, expected):
    assert {key: tuple(x.shape) for key, x in torch_layer(name).state_dict().items()} == expected


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="transformers takes fla's functions then")
@pytest.mark.parametrize("model", HUGGING_FACE)
def test_layers_are_those_of_hugging_face_with_their_gradients(model):
    theirs = hugging_face(model)
    mine = {dtype: HUGGING_FACE[model][3](layers, dtype=dtype, device=DEVICE)
            for dtype in (torch.float64, torch.float32)}
    for layer in mine.values():
        layer.load_state_dict(theirs.state_dict())

    def run(layer, dtype):
        x = tensor(tokens(2, 21), dtype).requires_grad_()
        y, named = layer(x), dict(sorted(layer.named_parameters()))
        return ["y", "x", *named], [*map(array, [y, *torch.autograd.grad(y.square().sum(), [x, *named.values()])])]

    names, truth = run(mine[torch.float64], torch.float64)
    again, got = run(mine[torch.float32], torch.float32)
    of_theirs, published = run(theirs, torch.float32)
    assert names == again == of_theirs
    # The truth is that of their module, up to roundings; the layer is as near to it as theirs.
    assert_within_rule(names, published, truth, got, ["float16"] * len(names))
    assert_within_rule(names, got, truth, published, ["float32"] * len(names))


def test_flax_has_hugging_faces_nested_names():
    nnx = pytest.importorskip("flax.nnx")
    of_flax = pytest.importorskip("keraunos.layers.flax")
    made = nnx.eval_shape(lambda: HUGGING_FACE["kimi_linear"][3](of_flax, rngs=nnx.Rngs(0)))
    # Kernels, convolutions' too, are the transposes of PyTorch's, and so are the other parameters.
    shapes = {".".join(path).replace("kernel", "weight").replace("scale", "weight"): x.shape[::-1]
              for path, x in nnx.to_flat_state(nnx.state(made, nnx.Param))}
    assert shapes == {key: tuple(x.shape) for key, x in hugging_face("kimi_linear").state_dict().items()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: m.GatedDeltaNet(HIDDEN, num_heads=4, num_v_heads=6), "num_v_heads is 6; expected a multiple of"),
        (lambda m: m.GatedDeltaNet(HIDDEN, head_dim=3, expand_v=1.5), r"head_dim \* expand_v is 4.5"),
        (lambda m: m.GatedDeltaNet(HIDDEN, output_gate_activation="relu"), "output_gate_activation is 'relu'"),
        (lambda m: m.KimiDeltaAttention(HIDDEN, lower_bound=0.0), "KimiDeltaAttention: lower_bound is 0.0"),
    ],
)
def test_sizes_that_do_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make(layers)
