"""Hugging Face's MiniMax, patched and not: logits, gradients, caches and generated tokens, on tiny random models."""

import copy
import itertools
import pickle
import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import MethodType

import pytest

torch = pytest.importorskip("torch")
# The extra `dev` has it; machines with GPUs need not.
pytest.importorskip("transformers")

from transformers import MiniMaxConfig, MiniMaxForCausalLM  # noqa: E402
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention  # noqa: E402

from tests.compat.models import CACHE, DEVICE, assert_as_near, prompts  # noqa: E402
from tests.linear_attention.cases import GPU  # noqa: E402

if GPU:
    # They may have a version that is refused.
    pytest.importorskip("keraunos.compat.transformers", exc_type=ImportError)

from keraunos.compat import transformers  # noqa: E402
from keraunos.compat.transformers import KNOWN, LightningAttention, patch, unpatch  # noqa: E402

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LINEAR = 1, 2


def minimax(dtype="float32", kinds="SLL"):
    """Layers of softmax (S) and lightning attention (L); blocks are shorter than prompts, all experts are taken."""
    config = MiniMaxConfig(
        vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=len(kinds), num_attention_heads=2,
        head_dim=8, num_key_value_heads=1, num_local_experts=2, block_size=16, initializer_range=0.2, pad_token_id=0,
        layer_types=[{"S": "full_attention", "L": "linear_attention"}[kind] for kind in kinds],
    )
    config._experts_implementation = "eager"  # runs in float64, too
    torch.manual_seed(0)
    return MiniMaxForCausalLM(config).eval().to(DEVICE, DTYPES[dtype])


def exact(model):
    """The model in float64, with all factors made of its slopes, which its own dtype has rounded."""
    model = copy.deepcopy(model).double()
    for layer in LINEAR:
        layer = model.model.layers[layer].self_attn
        factors = layer.decay_factors(layer.slope_rate)
        for name, factor in zip(("query_decay", "key_decay", "diagonal_decay"), factors, strict=True):
            getattr(layer, name).copy_(factor)
    return model


def states(output):
    cache = output[CACHE]
    return [cache.linear_cache[i] for i in LINEAR]


def run(model, tokens, mask=None, cache=None, **options):
    """Logits of what is no padding, and the cache."""
    with torch.no_grad():
        output = model(tokens, attention_mask=mask, use_cache=True, **{CACHE: cache}, **options)
    logits = output.logits
    return (logits if mask is None else logits[mask[:, -logits.shape[1] :].bool()]), output[CACHE]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_gradients_and_states(dtype, padded):
    theirs = minimax(dtype)
    tokens, mask = prompts(3, 40, padded=padded)
    results = []
    for model in (patch(copy.deepcopy(theirs)), theirs, exact(theirs)):
        output = model(tokens, attention_mask=mask, labels=tokens.where(mask.bool(), -100), use_cache=True)
        output.loss.backward()
        results.append([output.logits[mask.bool()], *states(output), *(x.grad for x in model.parameters())])
        for state in states(output):
            assert state.shape == (3, 2, 8, 8)
            assert state.dtype == model.dtype
            assert state.is_contiguous()
    names = ["logits", "first state", "second state", *dict(theirs.named_parameters())]
    assert_as_near(names, *results, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_is_continued_by_either(dtype):
    """In chunks of several tokens, with padding at the beginning and in the last chunk, and in single tokens."""
    theirs = minimax(dtype)
    ours, truth = patch(copy.deepcopy(theirs)), exact(theirs)
    tokens, mask = prompts(3, 37, padded=True)
    mask[1] = 1
    mask[2, 30:32] = 0
    pieces = [slice(0, 19), slice(19, 35), slice(35, 36), slice(36, 37)]

    def through(*models):
        logits, cache = [], None
        for model, piece in zip(models, pieces, strict=True):
            some, cache = run(model, tokens[:, piece], mask[:, : piece.stop], cache)
            logits.append(some)
        return [torch.cat(logits), *(cache.linear_cache[i] for i in LINEAR)]

    n = len(pieces)
    wanted, want = through(*[truth] * n), through(*[theirs] * n)
    for models in ([ours] * n, [theirs, *[ours] * (n - 1)], [ours, *[theirs] * (n - 1)], ([ours, theirs] * n)[:n]):
        assert_as_near(("logits", "first state", "second state"), through(*models), want, wanted, dtype)
    _, cache = run(truth, tokens, mask)
    assert_as_near(["second state"], [wanted[2]], [wanted[2]], [cache.linear_cache[2]], "float32")


@pytest.mark.parametrize("kinds", ["SLL", "LSL"])
@pytest.mark.parametrize("options", [
    dict(do_sample=False), dict(do_sample=True, top_k=20, temperature=2.0), dict(do_sample=False, num_beams=3),
    dict(do_sample=True, num_return_sequences=2),
], ids=["greedy", "sampled", "beams", "two_sequences"])
def test_generate(options, kinds):
    model = minimax(kinds=kinds)
    if GPU:
        # PyTorch's fused kernels refuse the masks of models that begin with lightning attention.
        model.set_attn_implementation("eager")
    tokens, mask = prompts(3, 20, padded=True)
    mask[1] = 1

    def generate():
        torch.manual_seed(2)
        return model.generate(tokens, attention_mask=mask, max_new_tokens=5, eos_token_id=None, **options)

    want = generate()
    assert want.shape[1] == 25
    patch(model)
    assert torch.equal(generate(), want)


def test_packed_sequences_are_apart():
    model = patch(minimax())
    tokens, _ = prompts(1, 30)
    ends = torch.tensor([0, 11, 12, 30], dtype=torch.int32, device=DEVICE)
    pieces = [slice(a, b) for a, b in itertools.pairwise(ends.tolist())]
    positions = torch.cat([torch.arange(x.stop - x.start) for x in pieces])[None].to(DEVICE)
    options = dict(position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=18, max_length_k=18)
    with torch.no_grad():
        packed = model(tokens, use_cache=False, **options).logits
        alone = torch.cat([model(tokens[:, x], use_cache=False).logits for x in pieces], 1)
    torch.testing.assert_close(packed, alone)
    layer, hidden = model.model.layers[1].self_attn, torch.randn(1, 30, 32, device=DEVICE)
    with torch.no_grad():
        state = layer(hidden, None, None, cu_seq_lens_q=ends)[1]
        torch.testing.assert_close(state, torch.cat([layer(hidden[:, x], None, None)[1] for x in pieces]))


def test_gradient_checkpointing():
    model = patch(minimax()).train()
    tokens, mask = prompts(3, 24, padded=True)

    def gradients():
        model.zero_grad()
        model(tokens, attention_mask=mask, labels=tokens, use_cache=False).loss.backward()
        return [x.grad.clone() for x in model.parameters()]

    want = gradients()
    # Its name, too, has changed in 5.24.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    for got, expected in zip(gradients(), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_autocast():
    theirs = minimax()
    ours, (tokens, mask) = patch(copy.deepcopy(theirs)), prompts(3, 40, padded=True)
    results = []
    for model in (ours, theirs):
        with torch.autocast(DEVICE, torch.bfloat16):
            logits, cache = run(model, tokens, mask)
        results.append([logits, *(cache.linear_cache[i] for i in LINEAR)])
    truth, cache = run(exact(theirs), tokens, mask)
    assert [x.dtype for x in results[0]] == [x.dtype for x in results[1]]
    assert_as_near(
        ("logits", "first state", "second state"), *results, [truth, *(cache.linear_cache[i] for i in LINEAR)],
        "bfloat16",
    )


def test_one_graph_for_all_lengths():
    from torch._dynamo import lookup_backend

    torch._dynamo.reset()
    layer, graphs = patch(minimax()).model.layers[1].self_attn, []

    def backend(graph, given):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, given)

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for T in (20, 33, 70):
        hidden = torch.randn(3, T, 32, device=DEVICE)
        mask = prompts(3, T, padded=True)[1]
        with torch.no_grad():
            torch.testing.assert_close(compiled(hidden, None, mask), layer(hidden, None, mask))
    assert len(graphs) == 1


def test_compiled_model():
    torch._dynamo.reset()
    model, (tokens, mask) = minimax(kinds="SL"), prompts(3, 24, padded=True)
    model.config._experts_implementation = "batched_mm"  # no loop over experts, in which graphs would break
    options = dict(attention_mask=mask, use_cache=False)
    with torch.no_grad():
        want = model(tokens, **options).logits
        got = torch.compile(patch(model), backend="eager", dynamic=True)(tokens, **options).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()])


def test_only_the_given_model_changes():
    model, other = minimax(), minimax()
    before = [(name, type(x), {**vars(x)}) for name, x in model.named_modules()]
    names = [*model.state_dict()]
    for _ in range(2):
        assert patch(model) is model
        kinds = [type(x.self_attn) for x in model.model.layers]
        assert [x is LightningAttention for x in kinds] == [False, True, True]
        assert [*model.state_dict()] == names
    assert not any(isinstance(x, LightningAttention) for x in other.modules())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied.model.layers[1].self_attn) is LightningAttention
    for _ in range(2):
        assert unpatch(model) is model
        assert [(name, type(x), {**vars(x)}) for name, x in model.named_modules()] == before


@pytest.mark.parametrize("part", [lambda x: x.model, lambda x: x.model.layers[2].self_attn])
def test_parts_of_a_model(part):
    model = minimax()
    assert patch(part(model)) is part(model)
    assert type(model.model.layers[2].self_attn) is LightningAttention
    unpatch(part(model))
    assert type(model.model.layers[2].self_attn) is MiniMaxLightningAttention


def test_forwards_that_hooks_keep():
    """As libraries do that move weights between devices: they call what was the forward when they came."""
    layer = minimax().model.layers[1].self_attn
    hidden, calls = torch.randn(1, 5, 32, device=DEVICE), []
    layer.kept = layer.forward

    def hooked(self, *args, **kwargs):
        calls.append(type(self))
        return self.kept(*args, **kwargs)

    layer.forward = MethodType(hooked, layer)
    for change, kind in ((patch, LightningAttention), (unpatch, MiniMaxLightningAttention)):
        change(layer)
        layer(hidden, None, None)
        assert layer.kept.__func__ is kind.forward
    assert calls == [LightningAttention, MiniMaxLightningAttention]


@pytest.mark.parametrize("change", [patch, unpatch])
def test_what_has_no_lightning_layers(change):
    name = f"keraunos.compat.transformers.{change.__name__}: "
    with pytest.raises(ValueError, match=re.escape(name) + "Linear has no layers of lightning attention"):
        change(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=re.escape(name) + "model is of type dict"):
        change({})


@pytest.mark.parametrize("version", ["4.57.6", f"5.{KNOWN[1][1] + 1}.0", "6.0.0.dev0"])
def test_versions_that_are_not_known(version, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=rf"^keraunos\.compat\.transformers\.patch: knows .* this is {version}$"):
        runpy.run_path(transformers.__file__)


def test_the_extra_ends_with_the_versions_that_are_known():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (first, _), (_, last) = KNOWN
    assert first == KNOWN[1][0]
    assert f"transformers>={first}.{KNOWN[0][1]},<{first}.{last + 1}" in project["optional-dependencies"]["dev"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_padding_reaches_no_result_and_no_gradient(bad):
    layer, keep = patch(minimax().model.layers[1].self_attn), torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    keep[0, :3], keep[1, 7:] = False, False
    hidden = torch.randn(2, 9, 32, device=DEVICE)
    upstream = torch.randn(2, 9, 32, device=DEVICE)

    def run(value):
        x = hidden.where(keep[..., None], value).requires_grad_()
        y, state = layer(x, None, keep)
        given = upstream.where(keep[..., None], value)
        return [y, state, *torch.autograd.grad(y, [x, *layer.parameters()], given)]

    want = run(0.0)
    assert not want[2][~keep].any()
    for got, expected in zip(run(bad), want, strict=True):
        assert torch.equal(got, expected)


def test_masks_of_floats():
    layer, keep = patch(minimax().model.layers[1].self_attn), torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    keep[0, :3] = False
    hidden, zeros = torch.randn(2, 9, 32, device=DEVICE), torch.zeros(2, 9, device=DEVICE)
    want = layer(hidden, None, keep)
    for mask in (keep.float(), zeros.masked_fill(~keep, torch.finfo(torch.float32).min),
                 zeros.bfloat16().masked_fill(~keep, -torch.inf)):
        for got, expected in zip(layer(hidden, None, mask), want, strict=True):
            assert torch.equal(got, expected)
    name = r"^keraunos\.compat\.transformers\.LightningAttention: attention_mask has "
    with pytest.raises(ValueError, match=name + r"shape \(2, 1, 1, 9\); expected \(2, 9\)"):
        layer(hidden, None, zeros[:, None, None])
    if not GPU:  # where values are not read
        with pytest.raises(ValueError, match=name + r"a value 0.0 at \[0, 0\]"):
            layer(hidden, None, zeros)


def test_the_layer_alone_with_its_cache():
    layer = patch(minimax().model.layers[2].self_attn)
    hidden, cache = torch.randn(2, 9, 32, device=DEVICE), MiniMaxCache()
    with torch.no_grad():
        want, state = layer(hidden, None, None)
        parts = [layer(x, None, None, cache)[0] for x in hidden.split(4, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want)
    torch.testing.assert_close(cache.get_linear_cache(2), state)
