"""SGLang's kernels of the delta rule: batches against a plain float64 loop over requests."""

import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from keraunos import decay  # noqa: E402
from keraunos.compat import sglang  # noqa: E402
from tests.compat.steps import DEVICE, NoValue, check, delta_loop, normal, tensors  # noqa: E402

H, HV, K, V, SLOTS = 2, 4, 16, 8, 10


class Engines:
    """The engine's own kernel: says what it was asked for."""

    def asked(self, *args, **kwargs):
        return "the engine's own"

    decode = packed_decode = extend = target_verify = asked


@pytest.fixture(params=[(False, None), (True, None), (True, -5.0)], ids=["GDN", "KDA", "KDA, bounded"])
def kernel(request, monkeypatch):
    """The kernel that the plugin puts in place of the engine's, and its lower bound."""
    hooks, kernels = {}, "sglang.srt.layers.attention.linear.kernels"
    registry = types.SimpleNamespace(register=lambda name, hook, kind: hooks.update({name: hook}))
    for name, content in {
        "sglang": dict(__version__="0.5.23"),
        "sglang.srt.plugins.hook_registry": dict(HookRegistry=registry, HookType=types.SimpleNamespace(REPLACE="")),
        f"{kernels}.gdn_triton": dict(TritonGDNKernel=Engines), f"{kernels}.kda_triton": dict(TritonKDAKernel=Engines),
    }.items():
        for i in range(1, name.count(".") + 2):
            parent = ".".join(name.split(".")[:i])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        vars(sys.modules[name]).update(content)
    sglang.plugin()
    kimi, bound = request.param
    made = hooks[f"{kernels}.kda_triton.TritonKDAKernel" if kimi else f"{kernels}.gdn_triton.TritonGDNKernel"]
    assert issubclass(made, Engines)
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.5.22")
    hooks.clear()
    sglang.plugin()
    assert not any("Kernel" in name for name in hooks)
    return made(), bound


class Batch:
    """The tokens of a batch, slices of a fused projection, their gates, and a pool."""

    def __init__(self, kernel, tokens, dtype):
        (self.kernel, self.bound), (kimi, kind) = kernel, (kernel[0].kimi, getattr(torch, dtype))
        self.mixed = normal(tokens, 2 * H * K + HV * V, dtype=kind)
        q, k, v = self.mixed.split([H * K, H * K, HV * V], 1)
        self.qkv = q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V))
        gates = HV * (K if kimi else 1)
        self.a, self.b = normal(tokens, gates, seed=1, dtype=kind), normal(tokens, HV, seed=2, dtype=kind)
        self.A_log, self.dt_bias = normal(HV, seed=3), normal(gates, seed=4)
        self.states, self.dtype = normal(SLOTS, HV, V, K, seed=5), dtype
        self.before = self.states.clone()
        make, raw = (decay.kimi, (tokens, HV, K)) if kimi else (decay.gated_deltanet, (tokens, HV))
        bound = (self.bound,) if kimi else ()
        self.g, self.beta = make(self.a.reshape(raw), self.A_log, self.dt_bias, *bound), self.b.float().sigmoid()
        self.raw = dict(A_log=self.A_log.reshape(1, 1, HV, 1), dt_bias=self.dt_bias, lower_bound=self.bound)

    @property
    def rows(self):
        return (x[None] for x in self.qkv)

    def call(self, function, *args, **options):
        """Call a method of the kernel, which is to read no value on the host."""
        with NoValue():
            return getattr(self.kernel, function)(*args, ssm_states=self.states, **options)

    def check(self, output, requests, *pools, scale=K**-0.5):
        assert output.dtype == self.mixed.dtype
        pools = [(self.before, self.states), *pools]
        given = [*self.qkv, self.before, self.g, self.beta]
        given = [y if y is self.before else y[: output.shape[1]] for y in given]
        check(output[0], pools, given, requests, scale, self.dtype, delta_loop)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode(kernel, dtype):
    slots = [3, -1, 9, 0]
    (indices,) = tensors(slots)
    requests = [([n], slot, {0: slot}) for n, slot in enumerate(slots)]
    x = Batch(kernel, 4, dtype)
    output = x.call("packed_decode", x.mixed, x.a, x.b[None], scale=0.5, cache_indices=indices, num_v_heads=HV,
                    head_v_dim=V, **x.raw)
    x.check(output, requests, scale=0.5)
    x = Batch(kernel, 4, dtype)
    (begin,) = tensors(range(5))
    output = x.call("decode", *x.rows, x.a, x.b, cache_indices=indices, query_start_loc=begin, **x.raw)
    x.check(output, requests)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_and_tracked_states(kernel, dtype):
    lengths, slots, chunks = [70, 9, 0, 4, 130], [5, 2, 3, -1, 8], [1, 0, -1, -1, 2]
    begin = np.cumsum([0, *lengths])
    requests = [(range(*begin[n : n + 2]), slot, {lengths[n] - 1: slot}) for n, slot in enumerate(slots)]
    offsets, indices, tracked = tensors(begin, slots, chunks)
    for track in (False, True) if dtype == "float32" else (True,):
        x = Batch(kernel, begin[-1], dtype)
        options = dict(cache_indices=indices, query_start_loc=offsets)
        pools = []
        if track:
            state = torch.zeros(5, HV, V, K, device=DEVICE)
            options |= dict(track_state=state, track_chunk_idx=tracked)
            requests += [(range(64), 5, {63: SLOTS}), (range(begin[4], begin[4] + 128), 8, {127: SLOTS + 1})]
            pools = [(state[:2].clone(), state)]
        if x.kernel.kimi:
            gates, options = x.a.reshape(1, -1, HV, K), options | x.raw | dict(beta_is_raw=True)
            output, states = x.call("extend", *x.rows, gates, x.b[None], return_intermediate_states=True, **options)
        else:
            output, final, states = x.call("extend", *x.rows, x.g[None], x.beta[None], **options)
            assert final is None
        assert states is None
        if track:
            assert torch.equal(state[1], x.before[2])
            pools = [(pools[0][0], state[[0, 4]])]
        x.check(output, requests, *pools)


@pytest.mark.parametrize("counts", [(3, 3, 3), (3, 1, 2)])
def test_drafts_leave_their_states(kernel, counts):
    if min(counts) < 3 and not kernel[0].kimi:
        pytest.skip("the engine has as many drafts for all requests")
    slots, room, places, begin = [4, -1, 7], 4, [3, 1, 0], np.cumsum([0, *counts])
    states = normal(6, room, HV, V, K, seed=9)
    start = states.clone()
    offsets, indices, own = tensors(begin, slots, places)
    x = Batch(kernel, begin[-1] + (0 if min(counts) == 3 else 2), "float32")
    output = x.call(
        "target_verify", x.raw["A_log"], x.dt_bias, *x.rows, x.a, x.b, cache_indices=indices, query_start_loc=offsets,
        intermediate_states_buffer=states, intermediate_state_indices=own, cache_steps=3, retrieve_parent_token=None,
        lower_bound=x.bound,
    )
    requests = [
        (range(*begin[n : n + 2]), slot, {t: SLOTS + places[n] * room + t for t in range(counts[n])})
        for n, slot in enumerate(slots)
    ]
    x.check(output[:, : begin[-1]], requests, (start.flatten(0, 1), states.flatten(0, 1)))


def test_what_is_left_to_the_engine(kernel):
    x, (begin,) = Batch(kernel, 2, "float32"), tensors([0, 2])
    given = dict(cache_indices=begin[:1], query_start_loc=begin)
    drafts = dict(given, intermediate_state_indices=begin[:1], cache_steps=2)
    for room, parents in ((None, None), (x.states[None], begin)):
        assert x.call("target_verify", x.A_log, x.dt_bias, *x.rows, x.a, x.b, intermediate_states_buffer=room,
                      retrieve_parent_token=parents, **drafts) == "the engine's own"
    assert x.call("packed_decode", x.mixed, x.a, x.b, replayssm_d=x.states, num_v_heads=HV, head_v_dim=V,
                  **given) == "the engine's own"
    if not x.kernel.kimi:
        assert x.call("extend", *x.rows, x.g, x.beta, inplace_update=False, **given) == "the engine's own"
