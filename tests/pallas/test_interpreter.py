"""The kernels' values in JAX's interpreter: indices, barriers, decays and partial chunks, but for the tensor cores."""

from unittest import mock

import numpy as np
import pytest

from keraunos.numerics import error
from tests.linear_attention.cases import GPU
from tests.pallas.cases import NAMES, NEEDS_JAX, case, check, check_sizes, jax

pytestmark = [NEEDS_JAX, pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")]


def runner(case, learned, settled=True):
    """``(args, doutput, dfinal) -> results`` as :func:`check` wants them; ``settled``: as if there were one device."""
    from keraunos.frontends.jax import partition
    from keraunos.kernels.linear_attention.contract import Options
    from keraunos.kernels.linear_attention.pallas import passes as platform
    from keraunos.ops import Config
    from tests.pallas.interpreter import interpreted

    scale = case.K**-0.5 if case.scale is None else case.scale
    opts = Options(scale, case.reverse, Config(num_stages=2), () if learned else ("g_gamma",))

    @jax.jit
    def both(args, doutput, dfinal):
        outputs, residuals = platform.forward(args, opts)
        *grads, _ = platform.backward(args, residuals, (doutput, dfinal), opts)
        return *outputs, *grads

    def run(*arrays):
        with interpreted(), mock.patch.object(partition, "is_settled", return_value=settled):
            return [None if x is None else np.asarray(x) for x in both(*arrays)]

    return run


def interpret(case, segmentation, learned, monkeypatch):
    from keraunos.kernels.linear_attention.pallas import passes as platform

    if segmentation:
        monkeypatch.setattr(platform, "segmentation", lambda *_: segmentation)
        # So few programs that each takes several pieces, so few asked for at once that they are asked for again.
        monkeypatch.setattr(platform.pallas_starts, "PROGRAMS", 3)
        for ahead in ("AHEAD_TWO", "AHEAD_MORE"):
            monkeypatch.setattr(platform.pallas_starts, ahead, 2)
    check(case, runner(case, learned), learned=learned)


GATES = dict(H=1, gate="scalar", gamma=0, state=True)
VECTOR = dict(H=1, gate="vector", state=True)
PACKED = (5, 0, 70, 1, 64, 13)


@pytest.mark.parametrize(
    ("case", "segmentation"),
    [
        (case(T=130, H=1, state=True), None),
        (case(T=70, B=2, G=1, reverse=True, scale=-0.3), None),
        (case(T=1, K=128, V=64, H=1, state=True), None),
        (case(T=333, H=1, state=True), (2, 2)),
        (case(T=330, reverse=True, decay="infinite", seed=13, dtype="float16"), (2, 1)),
        (case(lengths=PACKED, H=1, state=True), None),
        (case(lengths=(67, 70), G=1, K=128, V=128, reverse=True), None),
        (case(lengths=(5, 0, 333, 1, 150), H=1, state=True), (2, 2)),
        (case(lengths=(5, 0, 333, 1, 150), H=1, state=True, reverse=True), (2, 1)),
        # The second head's segments start from a single piece, the first one's from all before.
        (case(lengths=(5, 333, 150), decay="infinite", seed=171, reverse=True), (2, 2)),
        (case(T=100, K=256, V=256, H=1, state=True), None),
    ],
    ids=str,
)
def test_values(case, segmentation, monkeypatch):
    interpret(case, segmentation, False, monkeypatch)


@pytest.mark.parametrize(
    ("case", "segmentation"),
    [
        *((case(T=600, decay=decay, **GATES), None) for decay in ("zero", "weak", "strong", "infinite")),
        (case(T=200, **{**GATES, "gamma": 1}, reverse=True), None),
        # Gates whose gradients are next to nothing.
        (case(T=200, **{**GATES, "gamma": 1}, decay="strong"), None),
        (case(lengths=(130, 5, 70), **{**GATES, "gamma": 1}, K=256, V=128, decay="strong", reverse=True), None),
        (case(T=1300, **GATES), (8, 2)),
        (case(T=500, B=2, H=1, gamma=2, state=True), None),
        (case(T=700, H=1, decay="strong", state=True), (8, 2)),
        (case(lengths=(*PACKED, 270), **{**GATES, "H": 2}, G=1), None),
        (case(lengths=(*PACKED, 600), **{**GATES, "gamma": 1}, reverse=True), (8, 2)),
        (case(lengths=(30, 40), **GATES, K=64, V=256), None),
        (case(T=70, **{**GATES, "H": 2}, G=1, K=256, V=128), None),
        # Two segments: whoever starts from the second makes its state.
        (case(T=130, **VECTOR, gamma=0), (2, 1)),
        (case(T=70, **VECTOR, reverse=True, decay="strong", scale=-0.3), None),
        (case(T=70, **VECTOR, K=128, V=128, decay="infinite"), None),
        # The state's gradient times the state is far larger at the chunk's end than at its start.
        (case(T=64, **{**VECTOR, "H": 2}, reverse=True), None),
        (case(T=64, **{**VECTOR, "H": 2}, G=1, K=128, gate_dtype="bfloat16"), None),
        (case(lengths=PACKED, **VECTOR, gamma=0, gate_dtype="bfloat16", decay="infinite"), None),
        (case(lengths=(5, 0, 200, 150), **VECTOR, reverse=True), (2, 1)),
        # Gradients that are next to nothing, of few tokens.
        (case(lengths=(2, 5, 3, 4), **{**VECTOR, "state": False}, dstate=False, decay="strong", seed=18), None),
        # None at all.
        (case(lengths=(1, 0, 1), **{**VECTOR, "state": False}), None),
        (case(T=1, **{**GATES, "state": False}), None),
    ],
    ids=str,
)
def test_gradients_of_gates(case, segmentation, monkeypatch):
    interpret(case, segmentation, True, monkeypatch)


def test_gradients_of_gates_lose_little_to_rounding():
    # Rounding them to bfloat16 costs 1.65e-3. With decayed queries and keys, pairs and the gradients of pairs rounded
    # too it was 2.8e-3 to 3.4e-3.
    some = case(T=128, H=1, K=128, V=128, gate="vector", gate_dtype="bfloat16", dstate=False)
    got, (truth, _) = runner(some, True)(*some.arrays), some.reference()
    for name, x, right in list(zip(NAMES, got, truth, strict=True))[2:6]:
        assert error(x, right) < 2.1e-3, name


def test_a_scale_that_is_no_power_of_two_costs_no_digits():
    # Rounded to bfloat16 together with the values it made dk and dv a fifth less exact.
    errors = []
    for scale in (128**-0.5, 2.0**-4):
        some = case(T=192, H=1, K=128, V=128, decay="zero", scale=scale, dstate=False)
        got, (truth, _) = runner(some, False)(*some.arrays), some.reference()
        errors.append([error(x, right) for x, right in zip(got[2:5], truth[2:5], strict=True)])
    np.testing.assert_array_less(errors[0], 1.05 * np.array(errors[1]))


def test_queries_and_keys_of_any_size():
    from keraunos.kernels.linear_attention.contract import Args, Options
    from keraunos.kernels.linear_attention.pallas import passes as platform
    from keraunos.ops import Config
    from tests.pallas.interpreter import interpreted

    opts = Options(128**-0.5, False, Config(num_stages=2))
    with interpreted():
        check_sizes(jax.jit(lambda *arrays: platform.forward(Args(*arrays, None, None, None), opts)[0][0]))


def test_states_that_the_forward_kept_are_those_that_the_backward_makes():
    from keraunos.kernels.linear_attention.pallas import gates_scan

    some, results = case(T=70, **VECTOR, gate_dtype="bfloat16"), []
    for settled, made in ((True, 0), (False, 1)):
        with mock.patch.object(gates_scan, "states", wraps=gates_scan.states) as states:
            results.append(runner(some, True, settled)(*some.arrays))
        assert states.call_count == made
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_neighbours_hold_does_not_matter():
    # Of three packed sequences the middle one holds NaN: the others' results and gradients are as if it held zeros.
    some = case(lengths=(30, 50, 75), H=1, gate="scalar", gamma=0)
    run, results = runner(some, learned=True), []
    for middle in (0.0, np.nan):
        args, doutput, dfinal = some.arrays
        *arrays, doutput = [np.array(x) for x in (*args[:4], doutput)]
        for x in (*arrays[:3], doutput):
            x[:, 30:80] = middle
        results.append(run(type(args)(*arrays, *args[4:]), doutput, dfinal))
    per_token = (0, 2, 3, 4, 5)
    for i, (zeros, nans) in enumerate(zip(*results, strict=True)):
        if zeros is not None:
            others = np.r_[0:30, 80:155] if i in per_token else [0, 2]
            zeros, nans = (np.take(x, others, 1 if i in per_token else 0) for x in (zeros, nans))
            np.testing.assert_array_equal(zeros, nans)
