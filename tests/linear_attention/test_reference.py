"""The reference's gradient against central differences of the reference itself."""

import numpy as np
import pytest

from keraunos.kernels.linear_attention.reference import linear_attention
from keraunos.kernels.linear_attention.reference_vjp import linear_attention_vjp
from tests.linear_attention.cases import Case


def test_two_tokens_by_hand():
    q, k, v = (np.array([[[[1.0]], [[2.0]]]]) * n for n in (1, 3, 5))
    output, state = linear_attention(q, k, v, np.log([[[0.5], [0.25]]]), softmax_scale=2.0)
    np.testing.assert_allclose(state, [[[[15 / 4 + 60]]]])
    np.testing.assert_allclose(output.ravel(), [2 * 15, 2 * 2 * (15 / 4 + 60)])


def test_reverse_is_the_flipped_sequence():
    args, _, _ = Case(gate="vector", state=True, T=9).arrays
    flipped = [None if x is None else x[:, ::-1] for x in args[:4]]
    output, state = linear_attention(*flipped, None, args.initial_state)
    reverse = linear_attention(*args, reverse=True)
    np.testing.assert_array_equal(reverse[0], output[:, ::-1])
    np.testing.assert_array_equal(reverse[1], state)


@pytest.mark.parametrize("case", [
    Case(B=2, T=5, K=3, V=2, gate="vector", gamma=2, state=True, G=1, dtype="float64", gate_dtype="float64"),
    Case(B=1, lengths=(2, 0, 3), K=3, V=2, gate="scalar", gamma=1, state=True, dtype="float64", gate_dtype="float64"),
    Case(B=1, T=4, K=2, V=3, gate="vector", reverse=True, state=True, dtype="float64", gate_dtype="float64", scale=0.7),
    Case(B=1, T=3, H=6, HQ=3, G=2, HV=6, HG=3, K=2, V=2, gate="scalar", gamma=1, state=True, dtype="float64",
         gate_dtype="float64"),
], ids=["vector", "packed", "reverse", "heads"])
def test_gradient_equals_central_differences(case):
    args, doutput, dstate = case.arrays
    args = args._replace(initial_state=args.initial_state.astype(np.float64))
    options = {"softmax_scale": case.scale, "reverse": case.reverse}
    grads = linear_attention_vjp(*args, doutput, dstate, **options)

    def loss(x):
        output, state = linear_attention(*x, **options)
        return (output * doutput).sum() + (state * dstate).sum()

    for i, grad in enumerate(grads):
        if args[i] is None:
            assert grad is None
            continue
        for index in np.ndindex(args[i].shape):
            step = np.zeros_like(args[i])
            step[index] = 1e-6
            slope = (loss(args._replace(**{args._fields[i]: args[i] + step}))
                     - loss(args._replace(**{args._fields[i]: args[i] - step}))) / 2e-6
            # Central differences in float64 hold about nine digits.
            assert abs(slope - grad[index]) <= 1e-8 * max(1, abs(slope))
