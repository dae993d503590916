"""Training steps of examples/language_model at a size that fills a GPU: tokens per second, by the attention's platform.

    PYTHONPATH=. python3 benchmarks/training.py [--platforms pallas,triton,xla] [--width 2048] [--layers 8] ...

Everything but the attention is the same: lightning attention in every block, parameters in float32, the model computed
in bfloat16, Adam. A step is one jitted function. The result goes to benchmarks/results/training/<gpu>.json; a platform
that failed is there with its reason.
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
    seconds = seconds[2:]
    memory = compiled.memory_analysis()
    return {
        "tokens per second": round(batch * config.context / statistics.median(seconds)),
        "milliseconds per step": {
            "median": 1e3 * statistics.median(seconds), "least": 1e3 * min(seconds), "most": 1e3 * max(seconds)
        },
        "seconds to compile": compiling,
        "temporary bytes": getattr(memory, "temp_size_in_bytes", None),
        "losses": losses,
    }


def main() -> None:
    """Measure each platform, write after each."""
    sizes = dict(width=2048, heads=16, layers=8, context=8192, batch=4, steps=10)
    parser = harness.parser(__doc__, "training")
    parser.add_argument("--platforms", default="pallas,triton,xla")
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = ModelConfig(options.width, options.heads, ("lightning",) * options.layers, options.context)
    run = harness.Run(options, "jax")
    run.about["compilation cache"] = bool(os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    run.results = {"about": run.about, "model": {name: getattr(options, name) for name in sizes}, "platforms": {}}
    for platform in options.platforms.split(","):
        try:
            found = measure(config, options.batch, platform, options.steps)
        # The others are still worth knowing.
        except Exception as error:
            found = {"failed": harness.failure(error)}
        run.results["platforms"][platform] = found
        harness.say(f"{platform} {json.dumps(found)}")
        run.save()


if __name__ == "__main__":
    main()
