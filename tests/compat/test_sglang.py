"""SGLang's functions: batches against a plain float64 loop over requests."""

import inspect
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from keraunos.compat import sglang  # noqa: E402
from tests.compat import engine  # noqa: E402
from tests.compat.steps import DECAYS, DEVICE, NoValue, check, normal, tensors  # noqa: E402

H, D, SLOTS = 3, 16, 10
SLOPES = torch.tensor(-DECAYS).reshape(H, 1, 1)


def run(tokens, meta, dtype="float32", fresh=(), **options):
    """``(output, the call's q, k, v and states before it, states after it)``."""
    q, k, v = normal(tokens, H, 3 * D, dtype=getattr(torch, dtype)).split(D, -1)
    states = normal(SLOTS, H, D, D, seed=1)
    states[list(fresh)] = float("nan")
    before = states.clone()
    slopes = SLOPES.to(DEVICE)
    sglang.seg_la_fwd(q, k, v, states.clone(), slopes, meta, **options)
    with NoValue():
        output = sglang.seg_la_fwd(q, k, v, states, slopes, meta, **options)
    assert output.shape == (tokens, H, D)
    assert output.dtype == q.dtype
    return output, (q, k, v, before), states


def batch(lengths, slots, scales):
    offsets, slots, scales = tensors(np.cumsum([0, *lengths]), slots, scales)
    return sglang.SegLaMeta(len(lengths), None, offsets, slots, offsets.diff(), scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode(dtype):
    meta = batch([1] * 4, [3, -1, 9, 0], [1] * 4)
    output, given, states = run(4, meta, dtype)
    requests = [([n], slot, {0: slot}) for n, slot in enumerate([3, -1, 9, 0])]
    check(output, [(given[-1], states)], given, requests, D**-0.5, dtype)


@pytest.mark.parametrize("bools", [True, False])
def test_prompts_and_tracked_states(bools):
    """New and continued ones, padding, one without tokens; states at a length, at no length, past the end."""
    lengths, slots, scales = [70, 9, 0, 33, 4, 64], [5, 2, 3, 0, -1, 8], [0, 1, 1, 0, 1, 1]
    meta = batch(lengths, slots, scales)
    if bools:
        meta.s_scales = meta.s_scales > 0
    track_lens, track_slots = tensors([64, 3, 1, 0, 2, 64], [1, -1, 4, 6, 7, 9])
    output, given, states = run(
        sum(lengths), meta, fresh=(5, 0), softmax_scale=0.5, track_lens=track_lens, track_state_indices=track_slots
    )
    begin, requests = np.cumsum([0, *lengths]), []
    for n, slot in enumerate(slots):
        start = -1 if slot < 0 else slot if scales[n] else None
        requests.append((range(*begin[n : n + 2]), start, {lengths[n] - 1: slot}))
    # The first and the last request have tracked states, the latter at its very end.
    requests += [(range(64), None, {63: 1}), (range(begin[5], begin[6]), 8, {63: 9})]
    check(output, [(given[-1], states)], given, requests, 0.5, "float32")


def test_a_prompt_without_tracked_states():
    output, given, states = run(5, batch([5], [2], [False]), "bfloat16", fresh=(2,), decouple=True)
    check(output, [(given[-1], states)], given, [(range(5), None, {4: 2})], D**-0.5, "bfloat16")


@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_leave_their_states_in_the_caches(drafts):
    slots, room = [4, -1, 7], 4
    caches = normal(6, room, H, D, D, seed=2)
    start = caches.clone()
    (places,) = tensors([3, 1, 0])
    meta = batch([drafts] * 3, slots, [1] * 3)
    output, given, states = run(3 * drafts, meta, caches=caches, cache_indices=places)
    requests = [
        (range(n * drafts, (n + 1) * drafts), slot, {t: SLOTS + place * room + t for t in range(drafts)})
        for n, (slot, place) in enumerate(zip(slots, [3, 1, 0], strict=True))
    ]
    pools = [(given[-1], states), (start.flatten(0, 1), caches.flatten(0, 1))]
    check(output, pools, given, requests, D**-0.5, "float32")


def test_what_is_refused():
    q, states, caches = normal(6, H, D), normal(SLOTS, H, D, D), normal(4, 2, H, D, D)
    meta = batch([3, 3], [4, 7], [1, 1])
    (places,) = tensors([0, 1])
    slopes = SLOPES.to(DEVICE)

    def call(q=q, slopes=slopes, **options):
        return sglang.seg_la_fwd(q, q, q, states, slopes, meta, **options)

    for tokens in (5, 6):
        with pytest.raises(ValueError, match=rf"seg_la_fwd: q has {tokens} tokens of 2 requests; expected as many for"):
            call(q[:tokens], caches=caches, cache_indices=places)
    with pytest.raises(ValueError, match=r"seg_la_fwd: q has shape .*; expected \[tokens, H, D\]"):
        call(q[None])
    with pytest.raises(ValueError, match="seg_la_fwd: slopes have shape"):
        call(slopes=slopes[:2])
    meta.mask = torch.ones(2, 3, 3)
    with pytest.raises(NotImplementedError, match=r"seg_la_fwd: meta.mask is given; expected None: drafts are a chain"):
        call()


def test_the_engine_calls_these_functions(monkeypatch):
    hooks = {}
    registry = types.SimpleNamespace(register=lambda name, hook, kind: hooks.update({name: (hook, kind)}))
    replace = types.SimpleNamespace(REPLACE="replace")
    for name, content in {
        "sglang": dict(__version__="0.5.22"), "sglang.srt": {}, "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": dict(HookRegistry=registry, HookType=replace),
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    sglang.plugin()
    folder = "sglang.kernels.ops.attention.linear"
    assert hooks[f"{folder}.seg_la.seg_la_fwd"] == (sglang.seg_la_fwd, "replace")
    assert [name.rpartition(".")[2] for name in hooks] == [hook.__name__ for hook, _ in hooks.values()]
    for version in ("0.5.19", "0.6.0"):
        monkeypatch.setattr(sys.modules["sglang"], "__version__", version)
        with pytest.raises(RuntimeError, match=f"plugin: SGLang is {version}; expected 0.5.20"):
            sglang.plugin()
    pyproject = pytest.importorskip("tomllib").loads((engine.ROOT / "pyproject.toml").read_text())
    found = pyproject["project"]["entry-points"]["sglang.srt.plugins"]
    assert found == {"keraunos": f"{sglang.__name__}:{sglang.plugin.__name__}"}


def test_signatures_are_the_engines():
    assert list(inspect.signature(sglang.seg_la_fwd).parameters) == [
        "q", "k", "v", "s", "decay_scales", "meta", "caches", "cache_indices", "track_lens", "track_state_indices",
        "softmax_scale", "decouple",
    ]
    assert list(inspect.signature(sglang.SegLaMeta).parameters) == [
        "batch_size", "max_q_length", "q_offsets", "s_offsets", "q_lengths", "s_scales", "s_offsets_stride",
        "q_offsets_stride", "s_scales_stride", "decay_scales_stride", "mask",
    ]
