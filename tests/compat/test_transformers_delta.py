"""Hugging Face's models with the gated delta rule, patched and not: logits, gradients, caches, generated tokens."""

import copy
import itertools
import pickle

import pytest

torch = pytest.importorskip("torch")
# The extra `dev` has it; machines with GPUs need not.
transformers = pytest.importorskip("transformers")
pytest.importorskip("keraunos.compat.transformers", exc_type=ImportError)

from keraunos.compat.transformers import patch, unpatch  # noqa: E402
from tests.compat.models import CACHE, DEVICE, assert_as_near, prompts  # noqa: E402

DELTA = dict(linear_key_head_dim=8, linear_value_head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2)
# All experts are taken: rounding cannot change which.
EXPERTS = dict(moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=2, num_experts_per_tok=2)
KIMI = dict(
    linear_head_dim=8, linear_num_heads=2, num_key_value_heads=2, kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8,
    qk_nope_head_dim=8, moe_intermediate_size=16, num_local_experts=2, num_experts_per_tok=2,
    mlp_layer_types=["dense", "sparse"],
)
# A model, its configuration, and what that has in addition to SIZES.
MODELS = {
    "Qwen3Next": ("Qwen3NextConfig", DELTA | EXPERTS),
    "Qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "Qwen3_5Moe": ("Qwen3_5MoeTextConfig", DELTA | EXPERTS),
    "OlmoHybrid": ("OlmoHybridConfig", DELTA),
    "KimiLinear": ("KimiLinearConfig", KIMI),
}
SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, layer_types=["linear_attention", "full_attention"], initializer_range=0.2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)


def tiny(name):
    config, sizes = MODELS[name]
    config = getattr(transformers, config)(**SIZES | sizes)
    config._experts_implementation = "eager"  # runs in float64, too
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().to(DEVICE)


def layer_of(model):
    return next(x for x in model.modules() if hasattr(x, "conv1d"))


@pytest.fixture(params=MODELS)
def model(request):
    return tiny(request.param)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_gradients_and_states(model, dtype):
    """A prompt, then three tokens, one of them padding, then one, of a cache that the other model has begun."""
    model.to(getattr(torch, dtype))
    tokens, mask = prompts(3, 44, padded=True)
    mask[:, 40:] = 1
    mask[2, 41] = 0
    # The own functions of a model in float64 compute in float32.
    ours, truth = patch(copy.deepcopy(model)), patch(copy.deepcopy(model).double())
    # Gradients of these are sums over all tokens, in float32 with as many digits as their terms, which cancel.
    sums = ("A_log", "dt_bias") if dtype == "float32" else ()
    weights = [name for name, _ in model.named_parameters() if not name.endswith(sums)]
    results = []
    for first, then in ((ours, ours), (ours, model), (model, ours), (model, model), (truth, truth)):
        output = first(tokens[:, :40], attention_mask=mask[:, :40], use_cache=True)
        loss = output.logits[mask[:, :40].bool()].square().sum()
        gradients = torch.autograd.grad(loss, [first.get_parameter(name) for name in weights])
        logits, cache = [output.logits], output[CACHE]
        with torch.no_grad():
            for piece in (slice(40, 43), slice(43, 44)):
                output = then(tokens[:, piece], attention_mask=mask[:, : piece.stop], **{CACHE: cache})
                logits.append(output.logits)
        states = cache.layers[0]
        results.append([torch.cat(logits, 1)[mask.bool()], states.recurrent_states[0], states.conv_states[0],
                        *gradients])
    names = ["logits", "state", "convolution's state", *weights]
    *results, theirs, truth = results
    assert_as_near(names, theirs, results[0], truth, "bfloat16")
    for got in results:
        assert [x.dtype for x in got] == [x.dtype for x in theirs]
        assert_as_near(names, got, theirs, truth, dtype)


def test_generate_and_unpatch(model):
    tokens, mask = prompts(3, 20, padded=True)
    mask[1] = 1

    def generate():
        torch.manual_seed(2)
        options = dict(attention_mask=mask, max_new_tokens=4, eos_token_id=None)
        return [model.generate(tokens, **options, **some)
                for some in (dict(do_sample=False), dict(do_sample=True, num_beams=3))]

    kind, want = type(layer_of(model)), generate()
    for _ in range(2):
        patch(model)
        assert type(layer_of(model)) is not kind
    for got, expected in zip(generate(), want, strict=True):
        assert torch.equal(got, expected)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(layer_of(made)) is type(layer_of(model))
    for _ in range(2):
        unpatch(model)
        assert type(layer_of(model)) is kind


def test_packed_sequences_are_apart(model):
    """Without fla the model's own code refuses packed sequences, or mixes them up: Kimi's, and older versions'."""
    tokens, _ = prompts(1, 40)
    ends = torch.tensor([0, 11, 12, 40], dtype=torch.int32, device=DEVICE)
    pieces = [slice(a, b) for a, b in itertools.pairwise(ends.tolist())]
    positions = torch.cat([torch.arange(x.stop - x.start) for x in pieces])[None].to(DEVICE)
    options = dict(position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=28, max_length_k=28)

    def packed(model):
        return model(tokens, use_cache=False, **options).logits

    def alone(model):
        return torch.cat([model(tokens[:, x], use_cache=False).logits for x in pieces], 1)

    def compared(model):
        # Which experts a token goes to hangs on roundings, and the gradients of what chooses them on that.
        return {name: x for name, x in model.named_parameters() if not name.endswith("mlp.gate.weight")}

    def results(model, run):
        logits = run(model.train())
        return [logits, *torch.autograd.grad(logits.square().sum(), [*compared(model).values()])]

    theirs, truth = (results(x, alone) for x in (model.bfloat16(), copy.deepcopy(model).double()))
    names = ["logits", *compared(model)]
    assert_as_near(names, results(patch(model), packed), theirs, truth, "bfloat16")
    # Its name has changed in 5.24.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert_as_near(names, results(model, packed), theirs, truth, "bfloat16")
    with pytest.raises(ValueError, match="got seq_idx; expected cu_seq_lens_q with it"):
        layer_of(model)(torch.zeros(1, 4, 32).to(model.lm_head.weight), seq_idx=torch.zeros(1, 4, device=DEVICE))
    with pytest.raises((ValueError, AssertionError), match=r"packed sequences|logits: error"):
        assert_as_near(["logits"], [packed(unpatch(model))], theirs[:1], truth[:1], "bfloat16")


def test_one_graph_for_all_lengths():
    torch._dynamo.reset()
    layer, graphs = layer_of(patch(tiny("Qwen3Next"))), []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for T in (20, 70):
        hidden, ends = torch.randn(1, T, 32, device=DEVICE), torch.tensor([0, 9, T], device=DEVICE)
        with torch.no_grad():
            torch.testing.assert_close(compiled(hidden, cu_seq_lens_q=ends), layer(hidden, cu_seq_lens_q=ends))
    assert len(graphs) == 1
