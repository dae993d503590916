"""vLLM's layers of the delta rule, replaced: steps against a plain float64 loop over requests."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from keraunos import decay  # noqa: E402
from keraunos.compat import vllm_plugin  # noqa: E402
from tests.compat import engine  # noqa: E402
from tests.compat.steps import DEVICE, NoValue, check, delta_loop, normal, tensors  # noqa: E402

H, HV, K, V, BLOCKS, WIDTH = 2, 4, 16, 8, 16, 3
# In the order of the batch, requests with one token: their block; prompts: tokens, block, tokens before; drafts:
# tokens, blocks, how many of the last ones were accepted.
STEPS = {
    "decodes": [3, 0, 7],
    "decodes and prompts": [3, 0, 7, (70, 5, 0), (9, 2, 100), (4, 0, 0)],
    "prompts and their checkpoints": [(70, 5, 0, 64, 6), (9, 2, 100, 0, 0), (20, 8, 3, 16, 9)],
    "drafts": [(3, [1, 2, 3], 1), (3, [4, 5, 6], 2), (3, [0, 0, 0], 1)],
    "fewer drafts, and padding": [(3, [1, 2, 3], 1), (1, [4, 5, 6], 2), (2, [9, 8, 7], 3)],
    "drafts among prompts": [(70, 5, 0), (2, [1, 2, 3], 3), (5, 7, 30), (3, [4, 10, 6], 2)],
}


def step(batch):
    """The metadata of a step as the engine has it, and its requests for the loop."""
    kinds = ["decode" if isinstance(x, int) else "draft" if isinstance(x[1], list) else "prompt" for x in batch]
    lengths = np.array([1 if kind == "decode" else x[0] for kind, x in zip(kinds, batch, strict=True)])
    begin = np.cumsum([0, *lengths])
    rows = [np.arange(*begin[i : i + 2]) for i in range(len(batch))]
    drafts, others = ([i for i, x in enumerate(kinds) if (x == "draft") is wanted] for wanted in (True, False))
    decodes, requests = kinds.count("decode"), []
    for i, (kind, x) in enumerate(zip(kinds, batch, strict=True)):
        if kind == "draft":
            start = x[1][x[2] - 1]
            requests.append((rows[i], start if start else -1, dict(enumerate(x[1]))))
        else:
            block, past = (x, True) if kind == "decode" else (x[1], x[2])
            start = (block if past else None) if block else -1
            requests.append((rows[i], start, {lengths[i] - 1: block if block else -1}))
        if kind == "prompt" and len(x) > 3 and x[4]:
            requests.append((rows[i][: x[3]], start, {x[3] - 1: x[4]}))
    m = dict.fromkeys(("spec_sequence_masks", "checkpoint", "has_initial_state", "prefill_state_indices"))
    if drafts:
        spec, blocks, accepted = tensors(np.cumsum([0, *lengths[drafts]]), [batch[i][1] for i in drafts],
                                         [batch[i][2] for i in drafts])
        m |= dict(spec_sequence_masks=True, spec_query_start_loc=spec, spec_state_indices_tensor=blocks,
                  num_accepted_tokens=accepted)
        m["spec_token_indx"], = tensors(np.concatenate([rows[i] for i in drafts]))
    blocks = [batch[i] if kinds[i] == "decode" else batch[i][1] for i in others]
    if others:
        offsets, blocks, m["non_spec_token_indx"] = tensors(
            np.cumsum([0, *lengths[others]]), blocks, np.concatenate([rows[i] for i in others])
        )
        m |= dict(non_spec_query_start_loc=offsets, non_spec_state_indices_tensor=blocks)
    prompts = [batch[i] for i in others[decodes:]]
    if prompts:
        past, = tensors([*[1] * decodes, *(x[2] for x in prompts)])
        m |= dict(has_initial_state=past > 0, prefill_has_initial_state=past[decodes:] > 0,
                  prefill_query_start_loc=offsets[decodes:] - decodes, prefill_state_indices=blocks[decodes:])
        if len(prompts[0]) > 3:
            after, to = tensors([x[3] for x in prompts], [x[4] for x in prompts])
            m["checkpoint"] = SimpleNamespace(checkpoint_offsets=after, state_indices=to)
    return SimpleNamespace(
        num_actual_tokens=int(begin[-1]), num_decodes=decodes, num_decode_tokens=decodes, num_prefills=len(prompts),
        num_spec_decodes=len(drafts), **m,
    ), requests


@pytest.mark.parametrize("kimi", [False, True], ids=["GDN", "KDA"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_loop_over_requests(name, kimi, monkeypatch):
    engine.install(monkeypatch)
    vllm_plugin.register()
    metadata, requests = step(STEPS[name])
    n, padding = metadata.num_actual_tokens, 2
    tokens, kind, gate = n + padding, torch.bfloat16, (HV, K) if kimi else (HV,)
    mixed, a, b = (normal(tokens, *x, seed=i, dtype=kind) for i, x in enumerate([(2 * H * K + HV * V,), gate, (HV,)]))
    states, A_log, dt_bias = normal(BLOCKS, HV, V, K, seed=3), normal(HV, seed=4), normal(*gate, seed=5)
    # What padding and the blocks of new prompts hold does not matter.
    new = [x[1] for x in STEPS[name] if isinstance(x, tuple) and not isinstance(x[1], list) and not x[2]]
    states[[0, *new]] = float("nan")
    before, bound = states.clone(), -5.0 if kimi else None
    layer = engine.KimiGatedDeltaNetAttention if kimi else engine.QwenGatedDeltaNetAttention
    layer = layer("a layer", states, A_log, dt_bias.flatten(), bound)
    monkeypatch.setattr(engine.context, "attn_metadata", {"a layer": metadata})
    out = torch.zeros(tokens, HV, V, dtype=kind, device=DEVICE)
    with NoValue():
        if kimi:
            layer._forward(mixed, a[None], torch.full_like(out, 2.0)[None], b[None], out[None])
            out = out / 2
        else:
            layer._forward_core(mixed, b, a, out)
    assert not out[n:].any()
    q, k, v = (2 * mixed[:n]).split([H * K, H * K, HV * V], 1)
    gates = decay.kimi(a[:n], A_log, dt_bias, bound) if kimi else decay.gated_deltanet(a[:n], A_log, dt_bias)
    q, k, v = q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V))
    given = (q, k, v, before, gates, b[:n].float().sigmoid())
    check(out[:n], [(before, states)], given, requests, K**-0.5, "bfloat16", delta_loop)
    if metadata.checkpoint:
        assert [x for x, _ in layer.exported] == [n]


def test_runs_that_measure_memory(monkeypatch):
    engine.install(monkeypatch)
    vllm_plugin.register()
    monkeypatch.setattr(engine.context, "attn_metadata", None)
    out = torch.full((2, HV, V), 3.0)
    layer = engine.QwenGatedDeltaNetAttention("a layer", torch.zeros(2, HV, V, K), None, None)
    layer._forward_core(None, None, None, out)
    assert not layer._can_use_fused_gdn_mtp_decode(None)
    assert (out == 3).all()
