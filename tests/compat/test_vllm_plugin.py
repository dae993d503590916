"""vLLM's layers, replaced: steps against a plain float64 loop, and the plugin against a stand-in for the engine."""

import functools
from importlib.metadata import entry_points
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from keraunos.compat import vllm_plugin  # noqa: E402
from keraunos.numerics import error  # noqa: E402
from tests.compat import engine  # noqa: E402
from tests.compat.steps import DECAYS, DEVICE, NoValue, check, normal, tensors  # noqa: E402

H, D, BLOCKS, WIDTH = 3, 16, 16, 3
# For each request its tokens, and the block of its state; those with the most tokens before are prompts. Of a prompt
# also how many tokens went before; of drafts how many of the last ones were accepted.
MIXED = dict(decodes=[3, 0, 7, -1], prompts=[(70, 5, 0), (9, 2, 100), (0, 0, 0), (1, 9, 0), (130, 4, 1)])


def step(decodes=(), prompts=(), drafts=()):
    """The metadata of a step as the engine has it, and its requests for the loop."""
    lengths = [*[1] * len(decodes), *(x[0] for x in drafts), *(x[0] for x in prompts)]
    begin = np.cumsum([0, *lengths])
    n, tokens = len(decodes) + len(drafts), int(begin[len(decodes) + len(drafts)])
    rows = [np.arange(*begin[i : i + 2]) for i in range(len(lengths))]
    blocks = [*decodes, *(x[1][0] for x in drafts), *(x[1] for x in prompts)]
    ints = tensors(begin, [*[99] * n, *(x[0] + x[2] for x in prompts)], blocks)
    metadata = SimpleNamespace(
        num_prefills=len(prompts), num_prefill_tokens=int(begin[-1]) - tokens, num_decodes=n, num_decode_tokens=tokens,
        **dict(zip(("query_start_loc", "seq_lens", "state_indices_tensor"), ints, strict=True)),
    )
    requests = [(rows[i], block if block > 0 else -1, {0: block if block > 0 else -1}) for i, block in
                enumerate(decodes)]
    if drafts:
        own, accepted = tensors([x[1] for x in drafts], [x[2] for x in drafts])
        metadata.state_indices_tensor_d, metadata.num_accepted_tokens = own, accepted
        metadata.state_indices_tensor_p = metadata.state_indices_tensor[n:]
        metadata.query_start_loc_d = metadata.query_start_loc[: n + 1]
        for i, (_, own, accepted) in enumerate(drafts):
            start = own[min(max(accepted, 1), WIDTH) - 1]
            requests.append((rows[i], start if start > 0 else -1, dict(enumerate(own))))
    for i, (length, block, past) in enumerate(prompts, n):
        start = -1 if block <= 0 else block if past else None
        requests.append((rows[i], start, {length - 1: block}))
    return metadata, requests


STEPS = {
    "decodes only": dict(decodes=[3, 0, 7, -1, 12]),
    "decodes and prompts": MIXED,
    "prompts only": dict(prompts=MIXED["prompts"]),
    "drafts, as many for all": dict(drafts=[(3, [1, 2, 3], 1), (3, [4, 5, 6], 2), (3, [-1, -1, -1], 1),
                                            (3, [9, 8, 7], 3), (3, [0, 0, 0], 1)]),
    "drafts and padding without tokens": dict(drafts=[(2, [1, 2, 3], 2), (3, [4, 5, 6], 9), (1, [9, 8, 7], 0),
                                                      (0, [0, 0, 0], 1)]),
    "drafts and prompts": dict(drafts=[(2, [1, 2, 3], 3), (3, [6, 5, 4], 2)], prompts=[(66, 9, 0), (5, 11, 7)]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_loop_over_requests(name, dtype):
    metadata, requests = step(**STEPS[name])
    tokens, kind = metadata.num_prefill_tokens + metadata.num_decode_tokens, getattr(torch, dtype)
    # Slices of a fused projection.
    q, k, v = normal(tokens, H, 3 * D, dtype=kind).split(D, -1)
    states = normal(BLOCKS, H, D, D, seed=1)
    # What padding and the blocks of new prompts hold does not matter.
    states[0] = states[[x[1] for x in STEPS[name].get("prompts", ()) if not x[2]]] = float("nan")
    before, decay = states.clone(), torch.tensor(DECAYS, device=DEVICE)
    vllm_plugin.attend(q, k, v, states.clone(), metadata, decay, 0.25)
    with NoValue():
        output = vllm_plugin.attend(q, k, v, states, metadata, decay, 0.25)
    assert output.shape == (tokens, H * D)
    assert output.dtype == kind
    check(output, [(before, states)], (q, k, v, before), requests, 0.25, dtype)


def test_the_accepted_drafts_are_decoded_tokens():
    """Steps of drafts, of which some are accepted, leave what decoding the accepted tokens leaves.

    Up to rounding: drafts and tokens may run on two platforms.
    """
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)
    decay, states = torch.tensor(DECAYS, device=DEVICE), normal(BLOCKS, H, D, D)
    states[[8, 9]] = states[[1, 4]]
    accepted = [1, 1]
    for i, kept in enumerate([(2, 3), (1, 2), (3, 1)]):
        q, k, v = (normal(6, H, D, seed=3 * i + j) for j in range(3))
        metadata, _ = step(drafts=[(3, [1, 2, 3], accepted[0]), (3, [4, 5, 6], accepted[1])])
        output = vllm_plugin.attend(q, k, v, states, metadata, decay).view(2, 3, H * D)
        for t in range(3):
            live = [block if t < n else -1 for block, n in zip((8, 9), kept, strict=True)]
            metadata, _ = step(decodes=live)
            one = vllm_plugin.attend(*(x[t::3] for x in (q, k, v)), states, metadata, decay)
            for n in range(2):
                if live[n] >= 0:
                    close(one[n], output[n, t])
        accepted = kept
    close(states[8], states[3])
    close(states[9], states[4])


def config(flags=(True, True, True, True), groups=1):
    return SimpleNamespace(heads=H, dim=D, size=24, flags=flags, groups=groups)


LAYERS = {
    "minimax": (engine.MiniMaxText01LinearAttention, config()),
    "bailing": (engine.BailingMoELinearAttention, config()),
    "bailing, groups": (engine.BailingMoELinearAttention, config(groups=3)),
    "bailing, plain": (engine.BailingMoELinearAttention, config(flags=(False, False, False, False))),
}


def engines_layer(layer, x, positions, states, requests):
    """The layer in float64, as the engine has it: activations, norms, angles, attention, gate, projections."""
    names = layer.projections
    weights = {name: getattr(layer, module).weight.double() for name, module in names.items()}
    qkv, gate = x.double() @ weights["qkv"].T, (x.double() @ weights["gate"].T).sigmoid()
    scale, bailing = 1.0, "g_proj" in names.values()
    if not bailing or layer.linear_silu:
        qkv = torch.nn.functional.silu(qkv)
    if bailing:
        q, k, v = qkv.unflatten(-1, (3, H, D)).unbind(1)
        if layer.use_qk_norm:
            q, k = (w * y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() for y, w in ((q, 2.0), (k, 3.0)))
        if layer.linear_rope:
            q, k = (y * (1 + positions[:, None, None] % 3) for y in (q, k))
        scale = D**-0.5 if layer.linear_scale else 1.0
        norm = layer.g_norm
    else:
        q, k, v = qkv.unflatten(-1, (H, 3 * D)).split(D, -1)
        norm = layer.norm
    state = {n: torch.zeros(H, D, D).double() if start is None else states[start].double()
             for n, (_, start, _) in enumerate(requests) if start != -1}
    hidden = torch.zeros(len(x), H, D).double()
    for n in state:
        for token in requests[n][0]:
            state[n] = torch.exp(-layer.tp_slope.double()) * state[n] + k[token][:, :, None] * v[token][:, None]
            hidden[token] = scale * (state[n] * q[token][:, :, None]).sum(1)
    y = hidden.flatten(1).unflatten(-1, (norm.groups, -1))
    y = (y / (y.square().mean(-1, keepdim=True) + 0.5).sqrt()).flatten(-2)
    return (gate * y) @ weights["out"].T


@pytest.fixture
def vllm(monkeypatch):
    engine.install(monkeypatch)
    monkeypatch.setattr(engine.context, "layers", {})
    monkeypatch.setattr(engine.context, "attn_metadata", None)
    vllm_plugin.plugin()
    return engine


@pytest.mark.skipif(DEVICE != "cpu", reason="the stand-in is on the CPU")
@pytest.mark.parametrize("name", LAYERS)
def test_the_engine_makes_these_layers(vllm, name):
    kind, settings = LAYERS[name]
    torch.manual_seed(0)
    layer = kind(settings, "layer 3")
    assert isinstance(layer, kind)
    engine.context.layers["layer 3"] = layer
    metadata, requests = step(**MIXED)
    tokens, padding = metadata.num_prefill_tokens + metadata.num_decode_tokens, 5
    x, positions = normal(tokens + padding, 24), torch.arange(tokens + padding)
    states = normal(BLOCKS, H, D, D, seed=1)
    want = engines_layer(layer, x[:tokens], positions[:tokens], states, requests)

    def run(forward):
        layer.kv_cache, output = [states.clone()], torch.full_like(x, 7.0)
        with torch.no_grad():
            forward(x, output, positions)
        return output

    # A run that measures memory has no metadata.
    assert run(layer).isfinite().all()
    engine.context.attn_metadata = {"layer 3": metadata}
    output = run(layer)
    assert error(output[:tokens].numpy(), want.detach().numpy()) < 1e-5
    assert (output[tokens:] == 7.0).all()
    torch._dynamo.reset()
    assert torch.equal(run(torch.compile(layer, fullgraph=True, backend="aot_eager")), output)


def test_registering_twice_changes_nothing(vllm):
    made = dict(vllm.op_registry_oot)
    vllm_plugin.register()
    assert made == vllm.op_registry_oot
    delta = ["KimiGatedDeltaNetAttention", "QwenGatedDeltaNetAttention"]
    assert sorted(made) == sorted(["BailingMoELinearAttention", "MiniMaxText01LinearAttention", *delta])
    vllm.op_registry_oot["MiniMaxText01LinearAttention"] = torch.nn.Linear
    with pytest.raises(RuntimeError, match=r"register: MiniMaxText01LinearAttention is replaced by .*Linear"):
        vllm_plugin.register()


def test_layers_of_the_delta_rule_are_those_of_versions_that_were_read(monkeypatch):
    engine.install(monkeypatch, "0.32.1")
    vllm_plugin.register()
    assert sorted(engine.op_registry_oot) == ["BailingMoELinearAttention", "MiniMaxText01LinearAttention"]


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0"])
def test_other_versions_keep_their_layers(monkeypatch, caplog, version):
    engine.install(monkeypatch, version)
    with pytest.raises(RuntimeError, match=f"register: vLLM is {version}; expected 0.31, 0.32, 0.33"):
        vllm_plugin.register()
    vllm_plugin.plugin()
    assert f"keraunos is not used: register: vLLM is {version}" in caplog.text
    assert not engine.op_registry_oot


def test_the_entry_point_is_where_the_engine_looks():
    pyproject = pytest.importorskip("tomllib").loads((engine.ROOT / "pyproject.toml").read_text())
    found = pyproject["project"]["entry-points"]["vllm.general_plugins"]
    assert found == {"keraunos": f"{vllm_plugin.__name__}:{vllm_plugin.plugin.__name__}"}
    installed = entry_points(group="vllm.general_plugins", name="keraunos")
    assert all(point.load() is vllm_plugin.plugin for point in installed)
