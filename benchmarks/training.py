"""Training steps of examples/language_model at a size that fills a GPU: tokens per second, by the attention's platform.

    PYTHONPATH=. python3 benchmarks/training.py [--platforms cuda,triton,xla] [--width 2048] [--layers 8] ...
    PYTHONPATH=. python3 benchmarks/training.py --framework torch       the same model in PyTorch

Everything but the attention is the same: lightning attention in every block, parameters in float32, the model computed
in bfloat16, Adam. In JAX a step is one jitted function, in PyTorch the model is compiled. The result goes to
benchmarks/results/training/<gpu>.json, that of PyTorch to <gpu>-torch.json; a platform that failed is there with its
reason.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# The example's model.
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from language_model.model import VOCABULARY, ModelConfig, forward, init_params, init_states


def program(config: ModelConfig, batch: int, platform: str) -> tuple[Any, Any]:
    """``(step, its first carry)``: ``step(params, state, windows)`` gives the next two and the loss."""
    optimizer = optax.adam(1e-4)

    def loss(params, windows):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        logits, _ = forward(params, windows[:, :-1], init_states(config, batch), config, platform)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), windows[:, 1:]).mean()

    def step(params, state, windows):
        value, gradients = jax.value_and_grad(loss)(params, windows)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = init_params(config, jax.random.key(0))
    return jax.jit(step, donate_argnums=(0, 1)), (params, optimizer.init(params))


def torch_program(config: ModelConfig, batch: int, platform: str, device: str = "cuda") -> Any:
    """``step(windows) -> loss`` in PyTorch: the model of the example, from the same parameters."""
    import torch
    from language_model.torch_model import LanguageModel
    from torch.nn import functional

    model = LanguageModel(config, platform)
    with jax.default_device(jax.devices("cpu")[0]):
        model.load_params(init_params(config, jax.random.key(0)))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    @torch.compile
    def loss(windows):
        half = {name: x.bfloat16() for name, x in model.named_parameters()}
        logits, _ = torch.func.functional_call(model, half, (windows[:, :-1],))
        return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    def step(windows):
        value = loss(windows)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return value

    return step


def measure_torch(config: ModelConfig, batch: int, platform: str, steps: int) -> dict[str, Any]:
    """:func:`measure` for PyTorch."""
    import torch

    step = torch_program(config, batch, platform)
    shape = batch, config.context + 1
    windows = [torch.tensor(np.asarray(jax.random.randint(jax.random.key(i), shape, 0, VOCABULARY)), device="cuda",
                            dtype=torch.int64) for i in range(2)]
    start = time.perf_counter()
    losses, seconds = [step(windows[0]).item()], []
    compiling = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    for i in range(1, steps + 2):
        start = time.perf_counter()
        losses.append(step(windows[i % 2]).item())
        seconds.append(time.perf_counter() - start)
    return told(batch * config.context, seconds[1:], compiling, torch.cuda.max_memory_allocated(), losses)


def told(tokens: int, seconds: list[float], compiling: float, memory: int | None, losses: list[float]) -> dict:
    """The results of one platform."""
    return {
        "tokens per second": round(tokens / statistics.median(seconds)),
        "milliseconds per step": {
            "median": 1e3 * statistics.median(seconds), "least": 1e3 * min(seconds), "most": 1e3 * max(seconds)
        },
        "seconds to compile": compiling,
        "temporary bytes": memory,
        "losses": losses,
    }


def measure(config: ModelConfig, batch: int, platform: str, steps: int) -> dict[str, Any]:
    """Times of steps, each on its own: the median, and what compiling took."""
    step, carry = program(config, batch, platform)
    shape = batch, config.context + 1
    windows = [jax.random.randint(jax.random.key(i), shape, 0, VOCABULARY) for i in range(2)]
    start = time.perf_counter()
    compiled = step.lower(*carry, windows[0]).compile()
    compiling = time.perf_counter() - start
    losses, seconds = [], []
    for i in range(steps + 2):
        start = time.perf_counter()
        *carry, value = compiled(*carry, windows[i % 2])
        losses.append(float(value))
        seconds.append(time.perf_counter() - start)
    memory = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    return told(batch * config.context, seconds[2:], compiling, memory, losses)


def main() -> None:
    """Measure each platform, write after each."""
    sizes = dict(width=2048, heads=16, layers=8, context=8192, batch=4, steps=10)
    parser = harness.parser(__doc__, "training")
    parser.add_argument("--platforms", default="cuda,triton,xla")
    parser.add_argument("--framework", choices=("jax", "torch"), default="jax")
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = ModelConfig(options.width, options.heads, ("lightning",) * options.layers, options.context)
    torch = options.framework == "torch"
    run = harness.Run(options, "jax")
    if torch:
        run.path = run.path.with_stem(f"{run.path.stem}-torch")
    run.about["compilation cache"] = bool(os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    run.results = {"about": run.about, "model": {name: getattr(options, name) for name in sizes}, "platforms": {}}
    for platform in options.platforms.split(","):
        try:
            found = (measure_torch if torch else measure)(config, options.batch, platform, options.steps)
        # The others are still worth knowing.
        except Exception as error:
            found = {"failed": harness.failure(error)}
        run.results["platforms"][platform] = found
        harness.say(f"{platform} {json.dumps(found)}")
        run.save()


if __name__ == "__main__":
    main()
