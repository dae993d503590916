"""Models, an engine's step and a layer on keraunos, each against the code that would run without it.

    PYTHONPATH=. python3 benchmarks/models.py           prints, and writes benchmarks/results/models/<gpu>.json
    PYTHONPATH=. python3 benchmarks/models.py layer     a part of it
    PYTHONPATH=. python3 benchmarks/models.py --small   tiny sizes, also on a CPU, where times say nothing

- transformers: MiniMax by Hugging Face's classes, a layer of softmax attention and seven of lightning attention:
  prefill, a training step, decode; as it is against ``keraunos.compat.transformers.patch``.
- qwen: the same of Qwen3.5, three layers of the gated delta rule to one of softmax attention; also against
  transformers with flash-linear-attention's two functions for the rule.
- engine: a step of requests that decode and prompts, and one of drafts: ``keraunos.compat.vllm_plugin`` against the
  loops that vLLM's own layers have, in float32 as there and without, on the same kernels (``keraunos.compat.vllm``).
- delta_engine: such steps of vLLM's layer for the gated delta rule, ``keraunos.compat.vllm_delta``, without its
  convolution: against flash-linear-attention on states that are gathered and scattered, and SGLang's kernel for tokens
  where its package is there. The step of drafts is ours alone.
- layer: ``keraunos.layers.torch.GatedLinearAttention`` against flash-linear-attention's, forward and backward.

Results are compared first: a wrong one is not timed, and who is left out is named with the reason. Who is compared
takes turns, each call alone; times are medians, of two where a call takes over a second: "total" until the device is
done, "host" until the call returns, "device" what the kernels and copies of one call take together, by PyTorch's
profiler. "peak" is the memory that one call takes beyond what is there before it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import delta_rule
import harness
import torch

import keraunos
from keraunos import decay
from keraunos.compat import vllm, vllm_delta, vllm_plugin
from keraunos.layers import torch as layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
FULL = SimpleNamespace(
    rounds=9, width=2048, heads=16, layers=8, experts=2, inner=3072, words=32000, prompt=16384, batch=64, context=256,
    trained=8192, engine_heads=64, dim=128, prompts=8, tokens=512, drafts=4, layer_tokens=8192, layer_heads=(4, 16),
)
SMALL = SimpleNamespace(
    rounds=1, width=64, heads=2, layers=4, experts=2, inner=48, words=50, prompt=150, batch=3, context=20,
    trained=70, engine_heads=2, dim=32, prompts=2, tokens=40, drafts=3, layer_tokens=100, layer_heads=(2,),
)


# The name of a row, and what measures it.
Rows = Iterator[tuple[str, Callable[[], dict]]]


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def once(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a call until it returns, and until the device is done."""
    wait()
    start = time.perf_counter()
    kept = run()
    host = time.perf_counter() - start
    wait()
    total = time.perf_counter() - start
    del kept
    return host, total


def on_device(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds that a call's kernels and copies take together, and the gigabytes that it takes."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    peak = torch.cuda.max_memory_allocated() - before
    wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        wait()
    spans = [
        event.self_device_time_total for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    return {"device_ms": sum(spans) / 1e3, "peak_gb": peak / 1e9}


def compare(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """The cost of each call, in milliseconds and gigabytes."""
    slow, fast = {}, {}
    for name, run in runs.items():
        taken = min(once(run)[1] for _ in range(min(rounds, 3)))
        (slow if taken > 1 else fast)[name] = functools.partial(once, run)
    times = harness.in_turns(fast, rounds) | harness.in_turns(slow, min(rounds, 2))
    found = {}
    for name, run in runs.items():
        host, total = (1e3 * statistics.median(column) for column in zip(*times[name], strict=True))
        found[name] = {"total_ms": total, "host_ms": host, **(on_device(run) if DEVICE == "cuda" else {})}
    return found


def check(errors: Mapping[str, Any], reference: str, name: str = "keraunos") -> None:
    """Raise an AssertionError unless those of ``name`` are of the size that the reference's errors have."""
    assert errors[name] <= 3 * errors[reference] + 2.0**-10, errors


def compared(runs: Mapping[str, Any], own: Callable[[Any], float], check: Callable[[dict, str], None]) -> dict:
    """The error of each, or why it is left out: only ``"fla"`` may be."""
    found: dict[str, Any] = {}
    for name, run in runs.items():
        try:
            found[name] = own(run)
            check(found, name)
        except Exception as error:
            if name != "fla":
                raise
            found[name] = harness.failure(error)
    return found


# Models by transformers.


def minimax(sizes: SimpleNamespace) -> Any:
    """Random weights. All experts are taken: a choice among them would turn rounding into other values."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    config = MiniMaxConfig(
        vocab_size=sizes.words, hidden_size=sizes.width, intermediate_size=sizes.inner, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=max(sizes.heads // 4, 1),
        head_dim=sizes.width // sizes.heads, num_local_experts=sizes.experts, num_experts_per_tok=sizes.experts,
        layer_types=["full_attention"] + ["linear_attention"] * (sizes.layers - 1), pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return MiniMaxForCausalLM(config).eval().to(DTYPE)


def qwen3_5(sizes: SimpleNamespace) -> Any:
    """Random weights, and no experts."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    heads, dim = sizes.heads, sizes.width // sizes.heads
    config = modeling_qwen3_5.Qwen3_5TextConfig(
        vocab_size=sizes.words, hidden_size=sizes.width, intermediate_size=2 * sizes.inner,
        num_hidden_layers=sizes.layers, num_attention_heads=heads, num_key_value_heads=max(heads // 4, 1), head_dim=dim,
        linear_num_key_heads=heads, linear_num_value_heads=2 * heads, linear_key_head_dim=dim,
        linear_value_head_dim=dim, layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (sizes.layers // 4),
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return modeling_qwen3_5.Qwen3_5ForCausalLM(config).eval().to(DTYPE)


def linear(model: Any) -> list[Any]:
    """The layers without softmax."""
    return [x for x in model.modules() if hasattr(x, "slope_rate") or hasattr(x, "A_log")]


def in_float32(model: Any) -> Any:
    """The model's own code on the same weights, with all factors made anew of MiniMax' slopes."""
    model = copy.deepcopy(model).float()
    model.config._experts_implementation = "eager"
    for layer in (x for x in linear(model) if hasattr(x, "slope_rate")):
        factors = layer.decay_factors(layer.slope_rate)
        for name, factor in zip(("query_decay", "key_decay", "diagonal_decay"), factors, strict=True):
            getattr(layer, name).copy_(factor)
    return model


def gradients(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The gradients of these layers' weights; those of the first layer have come through all others."""
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    found = torch.cat([x.grad.flatten() for layer in linear(model) for x in layer.parameters()])
    model.zero_grad()
    return found


def calling(model: Any, functions: Mapping[str, Callable]) -> Any:
    """The model, which puts functions of its own in the place of transformers' before it runs."""
    names = vars(importlib.import_module(type(model).__module__))
    own = {name: functools.partial(known, run, inspect.signature(run).parameters) for name, run in functions.items()}
    model.model.register_forward_pre_hook(lambda *_: names.update(own))
    return model


def known(run: Callable, parameters: Mapping[str, Any], *arrays: Any, **options: Any) -> Any:
    """Call a function with those options that it has, as transformers does."""
    return run(*arrays, **{name: x for name, x in options.items() if name in parameters})


def qwen(sizes: SimpleNamespace) -> Rows:
    """Prefill, decode and a training step of Qwen3.5."""
    from keraunos.compat.transformers import patch

    theirs = qwen3_5(sizes)
    models, absent = {"keraunos": patch(copy.deepcopy(theirs))}, {}
    modeling = importlib.import_module(type(theirs).__module__)
    names = ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
    try:
        fla = importlib.import_module("fla.ops.gated_delta_rule")
        both = fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule
        models["fla"] = calling(copy.deepcopy(theirs), dict(zip(names, both, strict=True)))
    except Exception as error:
        absent["without fla"] = harness.failure(error)
    calling(theirs, {name: inspect.unwrap(getattr(modeling, name)) for name in names})
    yield from rows("Qwen3.5", {"transformers": theirs, **models}, sizes, absent)


def transformers(sizes: SimpleNamespace) -> Rows:
    """Prefill, decode and a training step of MiniMax."""
    from keraunos.compat.transformers import patch

    theirs = minimax(sizes)
    yield from rows("MiniMax", {"transformers": theirs, "keraunos": patch(copy.deepcopy(theirs))}, sizes, {})


def rows(title: str, models: Mapping[str, Any], sizes: SimpleNamespace, absent: Mapping[str, str]) -> Rows:
    """Prefill, decode and a training step of models of the same weights."""
    theirs = models["transformers"]
    exact = in_float32(theirs)
    # Its name has changed in transformers 5.24.
    known = inspect.signature(theirs.forward).parameters
    given = next(name for name in ("cache", "past_key_values") if name in known)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(3, sizes.words, shape, device=DEVICE)

    def row(result: Callable[[Any], torch.Tensor], timed: Callable[[Any], Callable[[], Any]]) -> dict:
        true = result(exact)
        found = compared(models, lambda model: harness.distance(result(model), true),
                         lambda errors, name: check(errors, "transformers", name))
        runs = {name: timed(model) for name, model in models.items() if isinstance(found[name], float)}
        return {"errors": found | absent, "costs": compare(runs, sizes.rounds)}

    @torch.no_grad()
    def prefill() -> dict:
        tokens = random(1, sizes.prompt)
        return row(lambda model: model.model(tokens, use_cache=False).last_hidden_state,
                   lambda model: functools.partial(model, tokens, use_cache=True, logits_to_keep=1))

    @torch.no_grad()
    def decoded() -> dict:
        tokens, prompts = random(sizes.batch, 4), random(sizes.batch, sizes.context)

        def prompted(model: Any) -> dict:
            return {given: model(prompts, use_cache=True, logits_to_keep=1)[given]}

        def several(model: Any) -> torch.Tensor:
            cache = prompted(model)
            return torch.cat([model(token, use_cache=True, **cache).logits for token in tokens.split(1, 1)], 1)

        return row(several, lambda model: functools.partial(model, tokens[:, :1], use_cache=True, **prompted(model)))

    def trained() -> dict:
        tokens = random(1, sizes.trained)

        def training(model: Any) -> Callable[[], None]:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

            def step() -> None:
                model(tokens, labels=tokens, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        return row(functools.partial(gradients, tokens=tokens), training)

    yield f"{title}, prefill of {sizes.prompt} tokens", prefill
    yield f"{title}, decode of {sizes.batch} sequences", decoded
    yield f"{title}, training step of {sizes.trained} tokens", trained


# A step of vLLM.


def engine_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, states: torch.Tensor, step: SimpleNamespace,
                slopes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The attention of a step as vLLM's MiniMax layer has it, and so with its loops, copies and reads of values."""
    n, slots, begin = step.num_decode_tokens, step.state_indices_tensor, step.query_start_loc
    outer, q, k, v = q.dtype, q.to(dtype), k.to(dtype), v.to(dtype)
    for i in range(n, n + step.num_prefills):
        if step.seq_lens[i] - (begin[i + 1] - begin[i]) == 0:
            states[slots[i], ...] = 0
    hidden = []
    for i in range(n, n + step.num_prefills):
        part = [x[begin[i] : begin[i + 1]].transpose(0, 1).contiguous()[None] for x in (q, k, v)]
        state = states[slots[i], ...]
        output, history = vllm.lightning_attention(*part, slopes, 256, state[None].contiguous())
        state.copy_(history[0, :, -1])
        hidden.append(output[0].transpose(0, 1).flatten(1).contiguous())
    if n:
        token = [x[:n].unsqueeze(2).contiguous() for x in (q, k, v)]
        hidden.insert(0, vllm.linear_decode_forward_triton(*token, states, slopes, slots[:n]))
    return torch.cat(hidden).to(outer)


def engine_drafts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, states: torch.Tensor, step: SimpleNamespace,
                  slopes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One call for each draft, as vLLM's Ring and Ling layers have it.

    Its kernel reads a state and writes it to the next slot. Here it stays where it is: as many bytes.
    """
    slots, drafts = step.state_indices_tensor_d[:, 0], step.num_decode_tokens // step.num_decodes
    outer, *parts = q.dtype, *(x.to(dtype).unflatten(0, (-1, drafts)) for x in (q, k, v))
    hidden = [
        vllm.linear_decode_forward_triton(*(x[:, t].unsqueeze(2) for x in parts), states, slopes, slots)
        for t in range(drafts)
    ]
    return torch.stack(hidden, 1).flatten(0, 1).to(outer)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def replayed(run: Callable[[], Any], rounds: int) -> dict[str, float]:
    """The milliseconds of a CUDA graph of what is launched."""
    if DEVICE == "cpu":
        return {}
    replay = harness.captured(run)
    return {"graph_ms": 1e3 * statistics.median(harness.events(replay, cycles=200_000) for _ in range(rounds))}


def engine(sizes: SimpleNamespace) -> Rows:
    """A step of tokens and prompts, and one of drafts."""
    n, prompts, H, D, drafts = sizes.batch, sizes.prompts, sizes.engine_heads, sizes.dim, sizes.drafts
    log_decay = torch.from_numpy(decay.minimax(H, 5, 32)).to(DEVICE)
    slopes = (-log_decay).reshape(H, 1, 1)
    pool = 0.1 * torch.randn(n * drafts + prompts + 1, H, D, D, device=DEVICE)

    def measured(step: SimpleNamespace, loop: Callable, ours: torch.Tensor, theirs: torch.Tensor) -> dict:
        """``ours`` and ``theirs``: the slots in which the last states are."""
        tokens = step.num_decode_tokens + step.num_prefill_tokens
        q, k, v = torch.randn(tokens, H, 3 * D, device=DEVICE, dtype=DTYPE).split(D, -1)
        calls = {
            "float32 loop": lambda states: loop(q, k, v, states, step, slopes),
            "loop": lambda states: loop(q, k, v, states, step, slopes, DTYPE),
            "plugin": lambda states: vllm_plugin.attend(q, k, v, states, step, log_decay),
        }
        found = {}
        for name, call in calls.items():
            states = pool.clone()
            found[name] = call(states), states[(ours if name == "plugin" else theirs).long()]
        errors = {name: max(map(harness.distance, found[name], found["float32 loop"])) for name in ("loop", "plugin")}
        assert max(errors.values()) <= 2.0**-6, errors
        runs = {name: functools.partial(call, pool) for name, call in calls.items()}
        costs = compare(runs, 3 * sizes.rounds)
        costs["plugin"] |= replayed(runs["plugin"], 3 * sizes.rounds)
        return {"errors": errors, "costs": costs}

    lengths = [1] * n + [sizes.tokens] * prompts
    slots = ints(*range(1, n + prompts + 1))
    step = SimpleNamespace(
        num_decodes=n, num_decode_tokens=n, num_prefills=prompts, num_prefill_tokens=prompts * sizes.tokens,
        query_start_loc=ints(0, *torch.tensor(lengths).cumsum(0).tolist()), state_indices_tensor=slots,
        seq_lens=ints(*[1000] * n, *lengths[n:]),
    )
    name = f"vLLM's step of {n} tokens and {prompts} prompts of {sizes.tokens}, {H} heads of {D}"
    yield name, functools.partial(measured, step, engine_step, slots, slots)

    slots = ints(*range(1, n * drafts + 1)).view(n, drafts)
    step = SimpleNamespace(
        num_decodes=n, num_decode_tokens=n * drafts, num_prefills=0, num_prefill_tokens=0,
        state_indices_tensor=slots[:, 0], state_indices_tensor_d=slots, num_accepted_tokens=ints(*[1] * n),
        query_start_loc_d=ints(*range(0, n * drafts + 1, drafts)),
    )
    name = f"vLLM's step of {drafts} drafts for each of {n}, {H} heads of {D}"
    yield name, functools.partial(measured, step, engine_drafts, slots[:, -1], slots[:, 0])


# A step of vLLM's layer for the gated delta rule.


class DeltaLayer(vllm_delta.GatedDeltaNetLayer):
    """keraunos' layer, on an engine whose convolutions are left out."""

    def __init__(self, **own: Any):
        """Take the layer's arrays, its cache and the step."""
        vars(self).update(own, prefix="", activation="silu", engine=self)
        self.conv1d = SimpleNamespace(weight=torch.empty(1, 1, device=DEVICE), bias=None)
        self.causal_conv1d_fn = self.causal_conv1d_update = lambda x, *_, **__: x
        self.is_conv_state_dim_first = lambda: True

    def get_forward_context(self) -> Any:
        """The engine's metadata of the step."""
        return SimpleNamespace(attn_metadata={"": self.step})


def delta_engine(sizes: SimpleNamespace) -> Rows:
    """A step of tokens and prompts, and one of drafts."""
    n, prompts, HV, D, drafts = sizes.batch, sizes.prompts, 2 * sizes.heads, sizes.dim, sizes.drafts
    keys = sizes.heads * D
    pool = 0.1 * torch.randn(n * drafts + prompts + 1, HV, D, D, device=DEVICE)
    A_log, dt_bias = torch.rand(HV, device=DEVICE), torch.randn(HV, device=DEVICE)

    def projected(tokens: int) -> list[torch.Tensor]:
        """Query, key and value in a row, then a and b."""
        return [torch.randn(tokens, x, device=DEVICE, dtype=DTYPE) for x in (2 * keys + HV * D, HV, HV)]

    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        return [y.unflatten(1, (-1, D))[None] for y in x.split([keys, keys, HV * D], 1)]

    def ours(step: SimpleNamespace, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, states: torch.Tensor):
        out = torch.empty(len(x), HV, D, device=DEVICE, dtype=DTYPE)
        layer = DeltaLayer(step=step, kv_cache=(pool, states), A_log=A_log, dt_bias=dt_bias)
        layer._forward_core(x, b, a, out)
        return out

    def theirs() -> Callable:
        """The step as vLLM has it, on flash-linear-attention and, for tokens, SGLang."""
        fla = importlib.import_module("fla.ops.gated_delta_rule")
        packed = delta_rule.engine()
        options: Any = dict(
            output_final_state=True, state_v_first=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
        )

        def run(step: SimpleNamespace, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, states: torch.Tensor):
            slots, own = step.non_spec_state_indices_tensor[:n], step.prefill_state_indices
            if packed:
                token = torch.empty(n, 1, HV, D, device=DEVICE, dtype=DTYPE)
                packed(x[:n], a[:n], b[:n], A_log, dt_bias, D**-0.5, states, token, slots, True)
            else:
                rows = [y.transpose(0, 1) for y in (*parts(x[:n]), a[None, :n], b[None, :n])]
                names = dict(zip(("q", "k", "v", "g", "beta"), rows, strict=True))
                token, last = fla.fused_recurrent_gated_delta_rule(**names, initial_state=states[slots], **options)
                states[slots] = last
            state = states[own]
            state[~step.prefill_has_initial_state] = 0
            output, last = fla.chunk_gated_delta_rule(
                *parts(x[n:]), a[None, n:], b[None, n:], initial_state=state,
                cu_seqlens=step.prefill_query_start_loc, **options,
            )
            states[own] = last
            return torch.cat([token[:, 0], output[0]])

        return run

    def measured(step: SimpleNamespace, lengths: list[int], start: torch.Tensor, end: torch.Tensor,
                 fresh: int, others: bool) -> dict:
        """``start``, ``end``: the slots of states before and after, of which the last ``fresh`` start from zeros."""
        x, a, b = projected(sum(lengths))
        first = pool[start].double()
        first[len(lengths) - fresh:] = 0
        output, last = keraunos.gated_delta_rule(
            *(y.double() for y in parts(x)), decay.gated_deltanet(a[None].double(), A_log.double(), dt_bias.double()),
            b[None].double().sigmoid(), first.mT, ints(0, *torch.tensor(lengths).cumsum(0).tolist()),
            use_qk_l2norm=True, return_state=True, platform="torch",
        )
        calls, absent = {"keraunos": ours}, {}
        if others:
            try:
                calls["fla"] = theirs()
                absent["tokens of fla"] = "SGLang's kernel" if delta_rule.engine() else "fla's own kernel"
            except Exception as error:
                absent["without fla"] = harness.failure(error)

        def distance(call: Callable) -> float:
            states = pool.clone()
            return max(harness.distance(call(step, x, a, b, states), output[0]),
                       harness.distance(states[end], last.mT))

        def small(errors: dict, name: str) -> None:
            assert errors[name] <= 2.0**-6, errors

        found = compared(calls, distance, small)
        runs = {name: functools.partial(call, step, x, a, b, pool) for name, call in calls.items()
                if isinstance(found[name], float)}
        costs = compare(runs, 3 * sizes.rounds)
        costs["keraunos"] |= replayed(runs["keraunos"], 3 * sizes.rounds)
        return {"errors": found | absent, "costs": costs}

    slots, lengths = ints(*range(1, n + prompts + 1)), [1] * n + [sizes.tokens] * prompts
    offsets = ints(*range(0, prompts * sizes.tokens + 1, sizes.tokens))
    step = SimpleNamespace(
        num_actual_tokens=sum(lengths), num_decodes=n, num_decode_tokens=n, num_prefills=prompts,
        spec_sequence_masks=None, checkpoint=None, non_spec_state_indices_tensor=slots,
        non_spec_query_start_loc=torch.cat([ints(*range(n)), n + offsets]), prefill_query_start_loc=offsets,
        prefill_state_indices=slots[n:], has_initial_state=torch.arange(n + prompts, device=DEVICE) < n,
        prefill_has_initial_state=torch.zeros(prompts, dtype=torch.bool, device=DEVICE),
    )
    name = f"vLLM's delta step of {n} tokens and {prompts} prompts of {sizes.tokens}, {sizes.heads} over {HV} heads"
    yield name, functools.partial(measured, step, lengths, slots.long(), slots.long(), prompts, True)

    blocks = ints(*range(1, n * drafts + 1)).view(n, drafts)
    step = SimpleNamespace(
        num_actual_tokens=n * drafts, num_decodes=0, num_prefills=0, num_spec_decodes=n, spec_sequence_masks=True,
        spec_state_indices_tensor=blocks, spec_query_start_loc=ints(*range(0, n * drafts + 1, drafts)),
        num_accepted_tokens=ints(*[1] * n),
    )
    name = f"vLLM's delta step of {drafts} drafts for each of {n}, {sizes.heads} over {HV} heads"
    yield name, functools.partial(measured, step, [drafts] * n, blocks[:, 0].long(), blocks[:, -1].long(), 0, False)


# A layer of flash-linear-attention.


def gla(sizes: SimpleNamespace, heads: int) -> tuple[dict[str, Any], str | None]:
    """Both layers with the same weights, and why there is but one."""
    torch.manual_seed(0)
    ours = layers.GatedLinearAttention(sizes.width, num_heads=heads, device=DEVICE, dtype=DTYPE)
    try:
        from fla.layers import GatedLinearAttention

        theirs = GatedLinearAttention(hidden_size=sizes.width, num_heads=heads).to(DEVICE, DTYPE)
        theirs.load_state_dict(ours.state_dict())
        # Its kernels are tuned for what they meet first.
        theirs(torch.randn(1, sizes.layer_tokens, sizes.width, device=DEVICE, dtype=DTYPE))
    # It is not installed, or needs a GPU.
    except Exception as error:
        return {"keraunos": ours}, harness.failure(error)
    return {"fla": theirs, "keraunos": ours}, None


def forward_backward(module: Any, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input and the weights in the order of their names."""
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    weights = [weight for _, weight in sorted(module.named_parameters())]
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], dy)]


def layer_row(sizes: SimpleNamespace, heads: int) -> dict:
    """Both layers, or the one that there is."""
    made, missing = gla(sizes, heads)
    x, dy = (torch.randn(1, sizes.layer_tokens, sizes.width, device=DEVICE, dtype=DTYPE) for _ in range(2))
    x.requires_grad_()
    exact = copy.deepcopy(made["keraunos"]).float()
    exact.platform = "torch"
    true = forward_backward(exact, x.detach().float().requires_grad_(), dy.float())
    errors = {}
    for name, module in made.items():
        found = [harness.distance(a, b) for a, b in zip(forward_backward(module, x, dy), true, strict=True)]
        errors |= {name: found[0], f"{name}, gradients": max(found[1:])}
    del true, exact
    if missing is not None:
        errors["without fla"] = missing
    else:
        check(errors, "fla")
    runs = {name: functools.partial(forward_backward, module, x, dy) for name, module in made.items()}
    return {"errors": errors, "costs": compare(runs, sizes.rounds)}


def layer(sizes: SimpleNamespace) -> Rows:
    """Forward and backward with several numbers of heads."""
    for heads in sizes.layer_heads:
        name = f"GatedLinearAttention({sizes.width}, num_heads={heads}), {sizes.layer_tokens} tokens"
        yield name, functools.partial(layer_row, sizes, heads)


PARTS: dict[str, Callable[[SimpleNamespace], Rows]] = {
    "transformers": transformers, "qwen": qwen, "engine": engine, "delta_engine": delta_engine, "layer": layer,
}


def main() -> None:
    parser = harness.parser(__doc__, "models", names=tuple(PARTS))
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.small:
        parser.error("PyTorch sees no GPU; on a CPU, --small shows that it runs")
    run = harness.Run(options, "torch")
    run.results = {"about": run.measured(), "rows": []}

    def report(name: str, row: dict[str, Any]) -> None:
        run.results["rows"].append({"name": name, **row})
        harness.say(name)
        for key, values in ({key: x for key, x in row.items() if key != "costs"} | row.get("costs", {})).items():
            shown = values if isinstance(values, str) else ", ".join(
                f"{x} {y:.3g}" if isinstance(y, float) else f"{x} {y}" for x, y in values.items())
            harness.say(f"  {key}: {shown}")
        run.save()

    for part in options.names:
        try:
            for name, row in PARTS[part](SMALL if options.small else FULL):
                try:
                    report(name, row())
                # The other rows are still worth knowing, and so are the other parts.
                except Exception as error:
                    report(name, {"failed": harness.failure(error)})
        except Exception as error:
            report(part, {"failed": harness.failure(error)})
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
