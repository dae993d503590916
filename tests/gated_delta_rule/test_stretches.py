"""Parts of a stretch of the gated delta rule, joined."""

import importlib.util

import numpy as np
import pytest

from keraunos.kernels import kernel_registry
from keraunos.kernels.gated_delta_rule import contract
from keraunos.kernels.gated_delta_rule.stretches import Transition, joined
from keraunos.ops import Config
from tests.numerics import assert_within_rule

FRAMEWORKS = [name for name in ("jax", "torch") if importlib.util.find_spec(name)]


def array(framework, x):
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    import torch

    return torch.from_numpy(x)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8])
def test_parts_join_in_their_order(framework, backwards, n):
    B, H, K, V = 2, 3, 4, 5
    parts = np.random.default_rng(n).standard_normal((B * n, H, K, V + K)).astype(np.float32) / 2
    found = joined(array(framework, parts), B, V, backwards)

    def in_turn(dtype):
        state, matrix = np.zeros((B, H, K, V), dtype), np.broadcast_to(np.eye(K, dtype=dtype), (B, H, K, K))
        of_rows = parts.astype(dtype).reshape(B, n, H, K, V + K)
        for i in range(n)[:: -1 if backwards else 1]:
            local, own = of_rows[:, i, ..., :V], of_rows[:, i, ..., V:]
            state, matrix = own @ state + local, own @ matrix
        return [state, matrix]

    got = np.asarray(found)
    assert_within_rule(["state", "matrix"], [got[..., :V], got[..., V:]], in_turn(np.float64), in_turn(np.float32),
                       ["float32"] * 2)


def test_kernels_of_hopper_leave_states_by_those_of_triton():
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    platform, cfg = kernel_registry.get("gated_delta_rule", "cuda"), Config(platform="cuda", block_q=64)
    x = torch.ones(1, 64, 2, 128, dtype=torch.bfloat16)
    args, opts = contract.Args(x, x, x), contract.Options(0.1, False, cfg)
    transition = Transition.of(platform, args, opts)
    assert transition.parts == kernel_registry.get("gated_delta_rule", "triton").parts
    assert transition.ways(args, opts)[0].opts.cfg == transition.cfg
    assert transition.cfg.platform == "triton"
    assert transition.cfg.num_stages
