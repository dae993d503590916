"""Training over data, sequence and heads at once: the model of `language_model` on a mesh of devices, in JAX.

    python examples/distributed_training.py                         on all GPUs, or on 8 devices that the CPU plays
    python examples/distributed_training.py --mesh 1 4 2 --context 4096 --steps 20

The mesh has three axes. The batch is sharded over ``data``, the tokens of a sequence over ``tokens``, and the
attention's heads and the wide matrices over ``heads``. Arrays are annotated, and XLA shares out all that works on
single tokens. Attention is what goes through a sequence: there ``keraunos.distributed`` exchanges one state per head
between the devices of ``tokens``. Nothing else of the model knows of devices. The first loss is printed next to that of
one device.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

if not any(os.path.exists(f"/dev/{name}") for name in ("nvidia0", "nvidiactl", "kfd")):
    # Before JAX starts; another number wins that the user has set.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from language_model.model import ModelConfig, Params, forward, init_params, init_states

AXES = ("data", "tokens", "heads")
TOKENS = P(*AXES)
# Of the wide matrices, the dimension that is not the residual stream's. Queries, keys and values lie side by side in
# one matrix, whose halves would be no heads: it is on all devices.
SHARDED = {"output_gate": P(None, "heads"), "forget_gate": P(None, "heads"), "output": P("heads"),
           "up": P(None, "heads"), "down": P("heads")}
OPTIMIZER = optax.adam(1e-3)


def make_mesh(sizes: tuple[int, ...] | None = None) -> Mesh:
    """A mesh of so many devices for data, tokens and heads; None: all there are, most of them for tokens."""
    count = jax.device_count()
    if sizes is None:
        data, heads = (2 if count % 4 == 0 else 1), (2 if count % 8 == 0 else 1)
        sizes = data, count // data // heads, heads
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Where parameters are, and with them what the optimizer keeps of each."""

    def of(path, x):
        return NamedSharding(mesh, SHARDED.get(getattr(path[-1], "key", ""), P()))

    return jax.tree_util.tree_map_with_path(of, tree)


def start(model: ModelConfig, seed: int = 0) -> Params:
    """Parameters, none of them zero: a fresh model is the identity, whose loss would say nothing."""
    key, noise = jax.random.split(jax.random.key(seed))
    params, tree = jax.tree.flatten(init_params(model, key))
    keys = jax.random.split(noise, len(params))
    return tree.unflatten([x + 0.05 * jax.random.normal(key, x.shape) for x, key in zip(params, keys, strict=True)])


def loss(params: Params, tokens: jax.Array, following: jax.Array, model: ModelConfig, mesh: Mesh | None) -> jax.Array:
    """The mean cross entropy, on a mesh or on one device."""
    shards = None if mesh is None else {"mesh": mesh, "spec": TOKENS}
    logits, _ = forward(params, tokens, init_states(model, len(tokens)), model, shards=shards)
    return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()


def step(params: Params, state: Any, tokens: jax.Array, following: jax.Array, model: ModelConfig, mesh: Mesh) -> tuple:
    """``(parameters, optimizer's state, loss before)``."""
    before, gradients = jax.value_and_grad(loss)(params, tokens, following, model, mesh)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, before


def batch(model: ModelConfig, size: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """Bytes that can be predicted, each from the one before, and the bytes that follow them."""
    first, stride = jax.random.randint(jax.random.key(seed), (2, size, 1), 1, 256)
    windows = (first + stride * jnp.arange(model.context + 1)) % 251
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Train for some steps and say what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=int, nargs=3, metavar=("DATA", "TOKENS", "HEADS"))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    mesh = make_mesh(tuple(options.mesh) if options.mesh else None)
    model = ModelConfig(width=64, heads=4, context=options.context)
    params = start(model)
    alone = jax.jit(loss, static_argnums=(3, 4))(params, *batch(model, options.batch, 0), model, None)
    state = OPTIMIZER.init(params)
    where = shardings((params, state), mesh)
    params, state = jax.device_put((params, state), where)
    run = jax.jit(step, static_argnums=(4, 5), donate_argnums=(0, 1), out_shardings=(*where, None))
    print(f"{dict(mesh.shape)} on {mesh.devices.flat[0].device_kind}; the first loss on one device: {float(alone):.6f}")
    for n in range(options.steps):
        given = jax.device_put(batch(model, options.batch, n), NamedSharding(mesh, P("data", "tokens")))
        began = time.perf_counter()
        params, state, before = run(params, state, *given, model, mesh)
        print(f"step {n}: loss {float(before):.6f}, {time.perf_counter() - began:.3f} s")


if __name__ == "__main__":
    main()
