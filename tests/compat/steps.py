"""The steps of an engine in float64: a plain loop over requests, and over the tokens of each."""

import numpy as np
import torch

from keraunos.kernels.gated_delta_rule.reference import gated_delta_rule
from keraunos.numerics import coarser
from tests.linear_attention.cases import GPU
from tests.numerics import assert_within_rule

DEVICE = "cuda" if GPU else "cpu"
DECAYS = np.array([-0.05, -0.5, 0.0], np.float32)


class NoValue(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses whatever reads a value of a tensor on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))


def tensors(*values, dtype=torch.int32):
    return [torch.tensor(x, dtype=dtype, device=DEVICE) for x in values]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def array(x):
    return x.detach().double().cpu().numpy()


def loop(q, k, v, states, requests, scale, dtype):
    """``(output, states by slot)``; a request: its tokens, where it starts (None: zeros), what goes where after each.

    A request without a slot to start from that is -1 has outputs of zeros.
    """
    output, left = np.zeros(v.shape, dtype), {}
    decay = np.exp(DECAYS.astype(dtype))[:, None, None]
    for tokens, start, targets in requests:
        if start == -1:
            continue
        state = np.zeros(states.shape[1:], dtype) if start is None else states[start].astype(dtype)
        for t, token in enumerate(tokens):
            state = decay * state + k[token].astype(dtype)[:, :, None] * v[token].astype(dtype)[:, None]
            output[token] = scale * (state * q[token].astype(dtype)[:, :, None]).sum(1)
            if targets.get(t, -1) >= 0:
                left[targets[t]] = state
    return output, left


def delta_loop(q, k, v, states, g, beta, requests, scale, dtype):
    """The delta rule, as :func:`loop`; states are ``[slots, HV, V, K]``, queries and keys are normalised."""
    output, left = np.zeros(v.shape, dtype), {}
    for tokens, start, targets in requests:
        if start == -1:
            continue
        state = (np.zeros_like(states[0]) if start is None else states[start]).swapaxes(-1, -2)[None]
        for t, token in enumerate(tokens):
            row = [x[token][None, None] for x in (q, k, v, g, beta)]
            made, state = gated_delta_rule(*row, state, softmax_scale=scale, use_qk_l2norm=True, dtype=dtype)
            output[token] = made[0, 0]
            if targets.get(t, -1) >= 0:
                left[targets[t]] = state[0].swapaxes(-1, -2)
    return output, left


def check(output, pools, given, requests, scale, dtype, run=loop):
    """Hold the output ``[tokens, H * D]`` and states to the rule, and all other slots to their bits.

    Args:
        output: the result; pools: ``{name: (before, after, size)}``: slots of several pools are counted on.
        given: ``(q, k, v, states)``, the states of the first pool as they were; then what else ``run``, the loop over
            requests, takes.
        requests: as :func:`loop` has them. scale: of the output. dtype: of the tokens, by name.
    """
    given = [array(x) for x in given]
    v = given[2]
    truth, near = (run(*given, requests, scale, x) for x in (np.float64, np.float32))
    before, after = (np.concatenate([array(pair[i]) for pair in pools]) for i in (0, 1))
    others = np.setdiff1d(np.arange(len(before)), list(truth[1]))
    assert np.array_equal(before[others], after[others], equal_nan=True), "a slot changed that is not the step's"
    got = output.unflatten(1, (v.shape[1], -1)) if output.ndim == 2 else output
    dead = ~np.abs(truth[0]).sum((-1, -2)).astype(bool)
    assert not array(got)[dead].any(), "a row of padding is not zero"
    assert_within_rule(
        ["output", *truth[1]], [array(got), *(after[x] for x in truth[1])], [truth[0], *truth[1].values()],
        [near[0], *near[1].values()], [dtype, *[coarser(dtype, "float32")] * len(truth[1])],
    )
