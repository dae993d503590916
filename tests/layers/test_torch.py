"""PyTorch's layers: their parameters' names, published modules compared with them, compilation, dtypes, checkpoints."""

import subprocess
import sys

import numpy as np
import pytest

from tests.layers.cases import (
    CASES,
    DEVICE,
    HIDDEN,
    array,
    assert_published_in_bfloat16,
    tensor,
    tokens,
    torch_layer,
    weights,
)
from tests.numerics import assert_within_rule

torch = pytest.importorskip("torch")
layers = pytest.importorskip("keraunos.layers.torch")

# What flash-linear-attention's layers have with these arguments (layers/gla.py, layers/simple_gla.py).
GLA = {
    "q_proj.weight": (12, 24), "k_proj.weight": (6, 24), "v_proj.weight": (12, 24), "g_proj.weight": (24, 24),
    "q_conv1d.weight": (12, 1, 4), "q_conv1d.bias": (12,), "k_conv1d.weight": (6, 1, 4), "k_conv1d.bias": (6,),
    "v_conv1d.weight": (12, 1, 4), "v_conv1d.bias": (12,), "gk_proj.0.weight": (5, 24), "gk_proj.1.weight": (6, 5),
    "gk_proj.1.bias": (6,), "g_norm_swish_gate.weight": (6,), "o_proj.weight": (24, 24),
}
SIMPLE_GLA = {
    "q_proj.weight": (24, 24), "k_proj.weight": (12, 24), "v_proj.weight": (12, 24), "g_proj.weight": (24, 24),
    "q_conv1d.weight": (24, 1, 3), "k_conv1d.weight": (12, 1, 3), "v_conv1d.weight": (12, 1, 3),
    "gk_proj.weight": (2, 24), "gk_proj.bias": (2,), "g_norm_swish_gate.weight": (12,), "o_proj.weight": (24, 24),
}
BAILING = {
    "query_key_value.weight": (96, 24), "query_layernorm.weight": (8,), "key_layernorm.weight": (8,),
    "g_norm.weight": (32,), "g_proj.weight": (32, 24), "dense.weight": (24, 32),
}
MINICPM_SALA = {
    "q_proj.weight": (24, 24), "k_proj.weight": (24, 24), "v_proj.weight": (24, 24), "q_norm.weight": (6,),
    "k_norm.weight": (6,), "o_norm.weight": (24,), "z_proj.weight": (24, 24), "o_proj.weight": (24, 24),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gla", GLA), ("simple gla", SIMPLE_GLA), ("bailing", BAILING), ("minicpm_sala", MINICPM_SALA)],
)
def test_parameters_have_the_published_names_and_shapes(name, expected):
    assert {key: tuple(x.shape) for key, x in torch_layer(name).state_dict().items()} == expected


def test_the_norm_of_gla_is_called_as_the_arguments_say():
    def norms(**options):
        layer = layers.GatedLinearAttention(HIDDEN, num_heads=2, **options)
        return [key for key in layer.state_dict() if "norm" in key]

    assert norms() == ["g_norm_swish_gate.weight"]
    assert norms(fuse_norm=False) == norms(gate_fn="sigmoid") == norms(use_output_gate=False) == ["g_norm.weight"]
    assert norms(elementwise_affine=False) == []


def hugging_face(dtype):
    """MiniMax's layer with our layer's weights."""
    modeling = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    from transformers import MiniMaxConfig

    config = MiniMaxConfig(hidden_size=HIDDEN, num_attention_heads=3, head_dim=8, num_hidden_layers=4, block_size=8)
    theirs = modeling.MiniMaxLightningAttention(config, 1)
    missing, unexpected = theirs.load_state_dict(torch_layer("minimax").state_dict(), strict=False)
    assert {*missing} == {"slope_rate", "query_decay", "key_decay", "diagonal_decay"}
    assert not unexpected
    return theirs.to(DEVICE, dtype)


def test_minimax_is_that_of_hugging_face_with_its_gradients():
    def run(layer, dtype, **options):
        x = tensor(tokens(2, 21), dtype).requires_grad_()
        y = layer(x, **options)
        y = y[0] if isinstance(y, tuple) else y
        named = {key: p for key, p in layer.named_parameters() if key in weights("minimax", np.float32)}
        gradients = torch.autograd.grad(y.square().sum(), [x, *named.values()])
        return ["y", "x", *named], [array(y), *map(array, gradients)]

    theirs = dict(position_embeddings=None, attention_mask=None)
    names, truth = run(hugging_face(torch.float64), torch.float64, **theirs)
    again, in_dtype = run(hugging_face(torch.float32), torch.float32, **theirs)
    mine, got = run(torch_layer("minimax"), torch.float32)
    assert sorted(names) == sorted(again) == sorted(mine)
    order = [mine.index(name) for name in names]
    assert_within_rule(names, [got[i] for i in order], truth, in_dtype, ["float32"] * len(names))


def test_minimax_is_that_of_hugging_face_where_rows_are_padded_on_the_left():
    x = tensor(tokens(2, 21))
    mask = torch.ones(2, 21, device=DEVICE)
    mask[1, :9] = 0
    truth, in_dtype = (
        hugging_face(dtype)(x.to(dtype), position_embeddings=None, attention_mask=mask)[0][mask > 0]
        for dtype in (torch.float64, torch.float32)
    )
    got = torch_layer("minimax")(x, attention_mask=mask)[mask > 0]
    assert_within_rule(["y"], *([array(y)] for y in (got, truth, in_dtype)), ["float32"])


MASK = [[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [("gla", 2, {}), ("gla", 2, {"attention_mask": MASK}), ("bailing", 1, {"cu_seqlens": [0, 4, 9]})],
)
def test_compiled_as_one_graph(name, rows, options):
    layer, x = torch_layer(name), tensor(tokens(rows, 9))
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    options = {key: tensor(value) for key, value in options.items()}
    expected, got = (run(x, layer.init_cache(2), **options) for run in (layer, compiled))
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(y.sum(), [*layer.parameters()]) for y, _ in (expected, got)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16(name):
    layer = CASES[name].make(layers, dtype=torch.bfloat16, device=DEVICE)
    # Also of what the layer keeps in float32.
    layer.load_state_dict({key: x.bfloat16() for key, x in torch_layer(name).state_dict().items()})
    x = tokens(64)
    y, cache = layer(tensor(x, torch.bfloat16)[None], layer.init_cache(1))
    assert y.dtype == torch.bfloat16
    assert cache.state.dtype == torch.float32
    assert_published_in_bfloat16(name, array(y[0].float()), x)


@pytest.mark.parametrize("name", ["simple gla", "bailing"])
def test_autocast(name):
    layer, x = torch_layer(name), tokens(64)
    with torch.autocast(DEVICE, torch.bfloat16):
        y, cache = layer(tensor(x)[None], layer.init_cache(1))
        layer(tensor(x)[None], cache, attention_mask=torch.ones(1, 64, device=DEVICE))
    assert (y.dtype, cache.state.dtype) == (torch.bfloat16, torch.float32)
    assert_published_in_bfloat16(name, array(y[0].float()), x)


class Kept(torch.nn.Module):
    """A linear layer in float32, whose weight is stored in another dtype, or is no parameter."""

    def __init__(self, linear, dtype=None):
        super().__init__()
        weight = linear.weight.detach()
        self.scale = weight.abs().max() / 127 if dtype == torch.int8 else 1
        stored = weight if dtype is None else (weight / self.scale).to(dtype)
        self.weight = (lambda: weight) if dtype is None else torch.nn.Parameter(stored, requires_grad=False)

    def forward(self, x):
        weight = self.weight() if callable(self.weight) else self.weight
        return torch.nn.functional.linear(x, weight.float() * self.scale)


def keep(layer, dtype):
    for name, module in [*layer.named_children()]:
        if isinstance(module, torch.nn.Linear) and module.bias is None:
            setattr(layer, name, Kept(module, dtype))
        elif dtype is None:
            # Functions are no modules, and so hide parameters.
            layer.__dict__[name] = layer._modules.pop(name).forward


def offload(layer):
    """As libraries do that move weights to the device for each call of a module only."""
    for module in layer.modules():
        own = dict(module.named_parameters(recurse=False))

        def away(module, *_, own=own):
            module._parameters.update({
                key: torch.nn.Parameter(torch.empty_like(x, device="meta")) for key, x in own.items()
            })

        module.register_forward_pre_hook(lambda module, _, own=own: module._parameters.update(own))
        module.register_forward_hook(away)
        away(module)


STORED = {
    "int8": lambda layer: keep(layer, torch.int8), "bfloat16": lambda layer: keep(layer, torch.bfloat16),
    "no parameters": lambda layer: keep(layer, None), "offloaded": offload,
}


@pytest.mark.parametrize("change", STORED)
def test_a_cache_has_what_the_layer_computes_in_however_weights_are_stored(change):
    torch.manual_seed(0)
    layer, x = layers.SimpleGatedLinearAttention(HIDDEN, num_heads=2, device=DEVICE), tensor(tokens(2, 9))
    STORED[change](layer)
    assert_decodes(layer, x)
    cache = layer.init_cache(2)
    assert {part.dtype for part in (cache.state, *cache.conv)} == {torch.float32}
    assert cache.state.device.type == ("cpu" if change in ("no parameters", "offloaded") else DEVICE)


def assert_decodes(layer, x):
    """Token by token, the layer's results are those of the whole sequence, as near as it computes."""
    cache, outputs = layer.init_cache(len(x)), []
    with torch.no_grad():
        for token in x.split(1, 1):
            y, cache = layer(token, cache)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x))


def test_a_cache_in_the_dtype_and_on_the_device_that_are_asked_for():
    layer = layers.SimpleGatedLinearAttention(HIDDEN, num_heads=2)
    cache = layer.init_cache(2, dtype=torch.bfloat16, device="meta")
    assert {x.device.type for x in (cache.state, cache.length, *cache.conv)} == {"meta"}
    assert (cache.state.dtype, cache.conv[0].dtype) == (torch.float32, torch.bfloat16)
    # One that is too narrow is not kept.
    layer.double()
    x = tensor(tokens(2, 9), torch.float64).cpu()
    _, after = layer(x[:, :5], layer.init_cache(2, dtype=torch.float32))
    torch.testing.assert_close(layer(x[:, 5:], after)[0], layer(x)[:, 5:])
    assert layer.init_cache(2).conv[0].dtype == after.state.dtype == torch.float64


@pytest.mark.parametrize("name", ["simple gla", "minimax"])
def test_fully_sharded_layers_train_and_decode(name):
    distributed = pytest.importorskip("torch.distributed")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    torch.manual_seed(0)
    layer, x = CASES[name].make(layers), torch.from_numpy(tokens(2, 9))
    want = torch.autograd.grad(layer(x).square().sum(), [*layer.parameters()])
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        fsdp.fully_shard(layer, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(layer.parameters(), 0.01)
        layer(x).square().sum().backward()
        torch.testing.assert_close([p.grad.to_local() for p in layer.parameters()], [*want])
        optimizer.step()
        assert_decodes(layer, x)
    finally:
        distributed.destroy_process_group()


def test_layers_of_one_kind_are_compiled_once_where_they_are_compiled_one_by_one():
    made, x = [], tensor(tokens(1, 9))
    torch.compiler.reset()

    def counted(graph, inputs):
        made.append(graph)
        return graph

    for _ in range(10):
        torch.compile(CASES["gla"].make(layers, device=DEVICE), fullgraph=True, backend=counted)(x)
    assert len(made) == 1


def test_gradients_through_checkpoints():
    layer, x = torch_layer("gla"), tensor(tokens(2, 9))
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    gradients = [torch.autograd.grad(y.sum(), [*layer.parameters()]) for y in (layer(x), again)]
    torch.testing.assert_close(*gradients)


def test_a_named_platform_and_configuration_are_those_of_the_calls():
    import keraunos

    x = tensor(tokens(1, 9))
    with pytest.raises(keraunos.UnsupportedError, match="xla"):
        layers.GatedLinearAttention(HIDDEN, num_heads=2, platform="xla", device=DEVICE)(x)
    cfg = keraunos.LightningAttentionConfig(block_q=16, platform="torch")
    layer = layers.LightningAttention.minimax(HIDDEN, 4, 0, 2, cfg=cfg, platform="torch", device=DEVICE)
    torch.testing.assert_close(layer(x, attention_mask=torch.ones(1, 9, device=DEVICE)), layer(x))


@pytest.mark.parametrize("absent", ["torch", "flax"])
def test_without_a_framework(absent):
    code = f"import sys; sys.modules['{absent}'] = None; import keraunos.layers; keraunos.layers.Cache; "
    done = subprocess.run([sys.executable, "-c", f"{code}keraunos.layers.{absent}"], capture_output=True, text=True)
    assert f"{absent} is not installed: pip install 'keraunos[{absent}]'" in done.stderr
