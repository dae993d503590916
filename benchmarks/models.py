"""Models, an engine's step and a layer on keraunos, each against the code that would run without it.

    PYTHONPATH=. python3 benchmarks/models.py           prints, and writes benchmarks/results/models/<gpu>.json
    PYTHONPATH=. python3 benchmarks/models.py layer     a part of it
    PYTHONPATH=. python3 benchmarks/models.py --small   tiny sizes, also on a CPU, where times say nothing

- transformers: MiniMax by Hugging Face's classes, a layer of softmax attention and seven of lightning attention:
  prefill, a training step, decode; as it is against ``keraunos.compat.transformers.patch``.
- engine: a step of requests that decode and prompts, and one of drafts: ``keraunos.compat.vllm_plugin`` against the
  loops that vLLM's own layers have, in float32 as there and without, on the same kernels (``keraunos.compat.vllm``).
- layer: ``keraunos.layers.torch.GatedLinearAttention`` against flash-linear-attention's, forward and backward.

Results are compared first: a wrong one is not timed. Who is compared takes turns, each call alone; times are medians:
"total" until the device is done, "host" until the call returns, "device" what the kernels and copies of one call take
together, by PyTorch's profiler. "peak" is the memory that one call takes beyond what is there before it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import harness
import torch

from keraunos import decay
from keraunos.compat import vllm, vllm_plugin
from keraunos.layers import torch as layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
FULL = SimpleNamespace(
    rounds=9, width=2048, heads=16, layers=8, experts=2, inner=3072, words=32000, prompt=16384, batch=64, context=256,
    trained=8192, engine_heads=64, dim=128, prompts=8, tokens=512, drafts=4, layer_tokens=8192, layer_heads=(4, 16),
)
SMALL = SimpleNamespace(
    rounds=1, width=64, heads=2, layers=3, experts=2, inner=48, words=50, prompt=600, batch=3, context=20,
    trained=300, engine_heads=2, dim=32, prompts=2, tokens=40, drafts=3, layer_tokens=100, layer_heads=(2,),
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
    for run in runs.values():
        for _ in range(min(rounds, 3)):
            run()
    times = harness.in_turns({name: functools.partial(once, run) for name, run in runs.items()}, rounds)
    found = {}
    for name, run in runs.items():
        host, total = (1e3 * statistics.median(column) for column in zip(*times[name], strict=True))
        found[name] = {"total_ms": total, "host_ms": host, **(on_device(run) if DEVICE == "cuda" else {})}
    return found


def check(errors: Mapping[str, float], reference: str) -> None:
    """Raise an AssertionError unless ours are of the size that the reference's errors have."""
    assert errors["keraunos"] <= 3 * errors[reference] + 2.0**-10, errors


# MiniMax by transformers.


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


def lightning(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers if hasattr(layer.self_attn, "slope_rate")]


def in_float32(model: Any) -> Any:
    """The model's own code on the same weights, with all factors made anew of its slopes."""
    model = copy.deepcopy(model).float()
    model.config._experts_implementation = "eager"
    for layer in lightning(model):
        factors = layer.decay_factors(layer.slope_rate)
        for name, factor in zip(("query_decay", "key_decay", "diagonal_decay"), factors, strict=True):
            getattr(layer, name).copy_(factor)
    return model


def gradients(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The gradients of the lightning layers' weights; those of the first layer have come through all others."""
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    found = torch.cat([x.grad.flatten() for layer in lightning(model) for x in layer.parameters()])
    model.zero_grad()
    return found


def transformers(sizes: SimpleNamespace) -> Rows:
    """Prefill, decode and a training step."""
    from keraunos.compat.transformers import patch

    theirs = minimax(sizes)
    models = {"transformers": theirs, "keraunos": patch(copy.deepcopy(theirs))}
    exact = in_float32(theirs)
    # Its name has changed in transformers 5.24.
    known = inspect.signature(theirs.forward).parameters
    given = next(name for name in ("cache", "past_key_values") if name in known)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(3, sizes.words, shape, device=DEVICE)

    def errors(result: Callable[[Any], torch.Tensor]) -> dict[str, float]:
        true = result(exact)
        found = {name: harness.distance(result(model), true) for name, model in models.items()}
        check(found, "transformers")
        return found

    @torch.no_grad()
    def prefill() -> dict:
        tokens = random(1, sizes.prompt)
        found = errors(lambda model: model.model(tokens, use_cache=False).last_hidden_state)
        runs = {name: functools.partial(model, tokens, use_cache=True, logits_to_keep=1)
                for name, model in models.items()}
        return {"errors": found, "costs": compare(runs, sizes.rounds)}

    @torch.no_grad()
    def decoded() -> dict:
        tokens, prompts = random(sizes.batch, 4), random(sizes.batch, sizes.context)

        def prompted(model: Any) -> dict:
            return {given: model(prompts, use_cache=True, logits_to_keep=1)[given]}

        def several(model: Any) -> torch.Tensor:
            cache = prompted(model)
            return torch.cat([model(token, use_cache=True, **cache).logits for token in tokens.split(1, 1)], 1)

        found = errors(several)
        runs = {name: functools.partial(model, tokens[:, :1], use_cache=True, **prompted(model))
                for name, model in models.items()}
        return {"errors": found, "costs": compare(runs, sizes.rounds)}

    def trained() -> dict:
        tokens = random(1, sizes.trained)

        def training(model: Any) -> Callable[[], None]:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

            def step() -> None:
                model(tokens, labels=tokens, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        found = errors(functools.partial(gradients, tokens=tokens))
        return {"errors": found, "costs": compare({name: training(x) for name, x in models.items()}, sizes.rounds)}

    yield f"MiniMax, prefill of {sizes.prompt} tokens", prefill
    yield f"MiniMax, decode of {sizes.batch} sequences", decoded
    yield f"MiniMax, training step of {sizes.trained} tokens", trained


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


def engine(sizes: SimpleNamespace) -> Rows:
    """A step of tokens and prompts, and one of drafts."""
    n, prompts, H, D, drafts = sizes.batch, sizes.prompts, sizes.engine_heads, sizes.dim, sizes.drafts
    log_decay = torch.from_numpy(decay.minimax(H, 5, 32)).to(DEVICE)
    slopes = (-log_decay).reshape(H, 1, 1)
    pool = 0.1 * torch.randn(n * drafts + prompts + 1, H, D, D, device=DEVICE)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

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
        if DEVICE == "cuda":
            replay = harness.captured(runs["plugin"])
            times = [harness.events(replay, cycles=200_000) for _ in range(3 * sizes.rounds)]
            costs["plugin"]["graph_ms"] = 1e3 * statistics.median(times)
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


PARTS: dict[str, Callable[[SimpleNamespace], Rows]] = {"transformers": transformers, "engine": engine, "layer": layer}


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
