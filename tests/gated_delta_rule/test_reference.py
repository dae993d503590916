"""The reference's gradient against central differences of the reference itself."""

import numpy as np
import pytest

from keraunos.kernels.gated_delta_rule.reference import gated_delta_rule
from keraunos.kernels.gated_delta_rule.reference_vjp import gated_delta_rule_vjp
from tests.gated_delta_rule.cases import Case


def test_two_tokens_by_hand():
    q, k, v = (np.array([[[[1.0]], [[2.0]]]]) * n for n in (1, 0.5, 5))
    g, beta = np.log([[[0.5], [0.25]]]), np.array([[[1.0], [0.5]]])
    output, state = gated_delta_rule(q, k, v, g, beta, softmax_scale=2.0)
    first = 0.5 * 5  # from no state, the error is the value
    second = 0.25 * first + 1 * 0.5 * (10 - 0.25 * first)
    np.testing.assert_allclose(state, [[[[second]]]])
    np.testing.assert_allclose(output.ravel(), [2 * first, 2 * 2 * second])


def test_without_corrections_it_forgets_only():
    args, _, _ = Case(beta=0, state=True, T=9).arrays
    _, state = gated_delta_rule(*args)
    np.testing.assert_allclose(state, np.exp(args.g.astype(float).sum(1))[..., None, None] * args.initial_state)


def test_equal_keys_read_back_the_last_value():
    args, _, _ = Case(beta=1, keys="equal", gate="none", dtype="float64").arrays
    output, _ = gated_delta_rule(args.key, *args[1:], softmax_scale=1.0)
    np.testing.assert_allclose(output, args.value)


@pytest.mark.parametrize("case", [
    Case(B=2, T=5, K=3, V=2, gate="vector", state=True, G=1, dtype="float64"),
    Case(lengths=(2, 0, 3), K=3, V=2, state=True, norm=True, dtype="float64"),
    Case(B=1, T=4, K=2, V=3, gate="vector", reverse=True, state=True, dtype="float64", scale=0.7, norm=True),
    Case(B=1, T=3, H=6, HQ=3, G=2, HG=3, HB=1, K=2, V=2, state=True, dtype="float64", beta=2.0),
], ids=["vector", "packed", "reverse", "heads"])
def test_gradient_equals_central_differences(case):
    args, doutput, dstate = case.arrays
    args = args._replace(g=args.g.astype(np.float64), initial_state=args.initial_state.astype(np.float64))
    grads = gated_delta_rule_vjp(*args, doutput, dstate, **case.options)

    def loss(x):
        output, state = gated_delta_rule(*x, **case.options)
        return (output * doutput).sum() + (state * dstate).sum()

    for i, grad in enumerate(grads):
        for index in np.ndindex(args[i].shape):
            step = np.zeros_like(args[i])
            step[index] = 1e-6
            slope = (loss(args._replace(**{args._fields[i]: args[i] + step}))
                     - loss(args._replace(**{args._fields[i]: args[i] - step}))) / 2e-6
            # Central differences in float64 hold about nine digits.
            assert abs(slope - grad[index]) <= 1e-8 * max(1, abs(slope))
