"""JAX traces the forward of a call with a gradient once."""

import jax
import jax.numpy as jnp
import pytest

from keraunos.frontends.jax import gradient


@pytest.mark.parametrize("traced", [False, True])
def test_the_forward_is_traced_once(traced):
    seen = []

    def forward(args, opts):
        seen.append(args)
        return opts * args[0] ** 2, (args[0],)

    def backward(args, residuals, grads, opts):
        return (2 * opts * residuals[0] * grads,)

    run = gradient.differentiable(gradient.traced_once(forward), backward)(3)
    call = jax.value_and_grad(lambda x: run((x,)))
    assert (jax.jit(call) if traced else call)(jnp.float32(5)) == (75, 30)
    assert len(seen) == 1
