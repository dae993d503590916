"""The example of distributed training: loss and gradients on a mesh are those of one device."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("optax")


def load():
    path = Path(__file__).parents[2] / "examples" / "distributed_training.py"
    spec = importlib.util.spec_from_file_location("distributed_training", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices: the CPU run forces 8 host devices")
def test_a_step_on_a_mesh_is_that_of_one_device():
    from language_model.model import ModelConfig

    from tests.numerics import assert_within_rule

    example = load()
    model = ModelConfig(width=32, heads=2, blocks=("lightning",), context=16)
    mesh = example.make_mesh()
    assert dict(mesh.shape) == {"data": 2, "tokens": 2, "heads": 2}
    params, given = example.start(model), example.batch(model, 4, 0)
    run = jax.jit(jax.value_and_grad(example.loss), static_argnums=(3, 4))
    placed = jax.device_put(params, example.shardings(params, mesh))
    got, gradients = run(placed, *given, model, mesh)
    near, near_gradients = run(params, *given, model, None)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jax.numpy.asarray(np.asarray(x, np.float64)), params)
        truth, true_gradients = run(wide, *given, model, None)
    names = ["loss", *(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))]
    sides = ([x, *jax.tree.leaves(of)] for x, of in ((got, gradients), (truth, true_gradients), (near, near_gradients)))
    assert_within_rule(names, *sides, ["float32"] * len(names))
