"""The kernel of all gradients with gates per dimension, on what walks of NumPy leave, against float64."""

import dataclasses
import functools

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from keraunos.kernels.gated_delta_rule.contract import Args, Options
from keraunos.kernels.gated_delta_rule.dimension_gradients import dimension_gradients_plan
from keraunos.kernels.gated_delta_rule.reference import normalised
from keraunos.kernels.gated_delta_rule.reference_vjp import gated_delta_rule_vjp
from keraunos.kernels.host.arrays import spec_of
from keraunos.kernels.host.sequences import Sizes
from keraunos.kernels.recurrent.inputs import inputs
from keraunos.ops.invocation import Config
from tests.gated_delta_rule.cases import Case
from tests.linear_attention.cases import GPU, INTERPRETED, tensor_array, torch_tensor
from tests.numerics import assert_within_rule

pytestmark = pytest.mark.skipif(not (INTERPRETED or GPU), reason="launches a Triton kernel")

NAMES = ("dquery", "dkey", "dvalue", "dg", "dbeta")


@dataclasses.dataclass(frozen=True)
class Mixed(Case):
    """Gates that are mild in some chunks and strong in others, and some that leave nothing."""

    gate: str = "vector"
    state: bool = True

    @functools.cached_property
    def arrays(self):
        args, do, dstate = super().arrays
        t = np.arange(args.g.shape[1])[None, :, None, None]
        g = np.where(t // 50 % 3 == 1, args.g * 100, args.g)
        g = np.where((t // 50 % 3 == 2) & (t % 5 == 0), -np.inf, g)
        return args._replace(g=g.astype(args.g.dtype)), do, dstate


def left_by_walks(args, do, dstate, chunk, reverse, from_first):
    """E and Z of each token, the states before chunks and the gradients of those after them ``[slots, H, K, V]``.

    Also the slot of each token's chunk ``[B, T]``.
    """
    x = inputs(*args[:5], None, args.initial_state, args.cu_seqlens, None, reverse, np.float64)
    T, packed, decays = args.query.shape[1], args.cu_seqlens is not None, np.exp(x.gate)[..., None]
    slots = T // chunk + len(x.sequences) if packed else len(x.sequences) * -(-T // chunk)
    errors, rights = np.zeros_like(x.v), np.zeros_like(x.v)
    states, dstates = np.zeros((2, slots, *x.states.shape[1:]))
    slot_of = np.zeros(args.query.shape[:2], int)
    for n, (b, tokens) in enumerate(x.sequences):
        begin = min(tokens, default=0)
        first = begin // chunk + n if packed else n * -(-T // chunk)
        slot = [first + (t - begin if from_first else i) // chunk for i, t in enumerate(tokens)]
        slot_of[b, tokens] = slot
        state, gradient = x.states[n], dstate[n].astype(np.float64)
        for i, t in enumerate(tokens):
            if slot[i] not in slot[:i]:
                states[slot[i]] = state
            state = decays[b, t] * state
            errors[b, t] = x.v[b, t] - (state * x.k[b, t, :, :, None]).sum(-2)
            state = state + x.k[b, t, :, :, None] * (x.beta[b, t, :, None] * errors[b, t])[:, None, :]
        for i, t in reversed([*enumerate(tokens)]):
            if slot[i] not in slot[i + 1 :]:
                dstates[slot[i]] = gradient
            gradient = gradient + x.scale * x.q[b, t, :, :, None] * do[b, t, :, None, :].astype(np.float64)
            rights[b, t] = (gradient * x.k[b, t, :, :, None]).sum(-2)
            dv = x.beta[b, t, :, None] * rights[b, t]
            gradient = decays[b, t] * (gradient - x.k[b, t, :, :, None] * dv[:, None, :])
    return errors, rights, states, dstates, slot_of


def norms_of(x, H, chunk):
    """One over the length of each vector ``[slots, H, chunk]``, with one row of a batch."""
    lengths = np.repeat(1 / np.sqrt((x * x).sum(-1) + 1e-6), H // x.shape[2], 2)[0]
    padded = np.zeros((-(-len(lengths) // chunk) * chunk, H))
    padded[: len(lengths)] = lengths
    return padded.reshape(-1, chunk, H).swapaxes(1, 2)


@pytest.mark.parametrize(("case", "from_first"), [
    (Mixed(B=1, T=150, K=40, V=24, HG=1, reverse=True, norm=True, dtype="bfloat16"), True),
    (Mixed(lengths=(70, 0, 33), K=16, V=140, beta=None, reverse=True, dtype="bfloat16"), False),
], ids=["chunks from the first token, norms", "packed, wide values"])
def test_gradients(case, from_first):
    chunk, (args, do, dstate) = 64, case.arrays
    wide = [None if x is None else x.astype(np.float64) for x in args[:5]]
    if case.norm:
        wide[:2] = map(normalised, wide[:2])
    whole = Args(*wide, args.initial_state, args.cu_seqlens)
    *left, slot_of = left_by_walks(whole, do, dstate, chunk, case.reverse, from_first)
    if from_first:  # the two ways in which platforms store states
        left[2:] = (x.swapaxes(2, 3) for x in left[2:])
    device = "cuda" if GPU else "cpu"
    given = Args(*(torch_tensor(x, device) for x in args))
    errors, rights, states, dstates = (torch_tensor(np.ascontiguousarray(x).astype(args.query.dtype), device)
                                       for x in left)
    norms = None
    if case.norm:
        each = [torch.tensor(norms_of(x.astype(np.float64), case.H, chunk).astype(np.float32)) for x in args[:2]]
        norms = torch.stack(each, 2).contiguous().to(device)
    call = Sizes(Args(*map(spec_of, given)), Options(case.K**-0.5, case.reverse, Config()))
    of_do = torch_tensor(do, device)

    def launch(wanted=None):
        plan = dimension_gradients_plan(call, *map(spec_of, (given.query, given.key, given.g, of_do)), len(states),
                                        chunk, from_first, from_first, norm=case.norm, some=wanted is not None)
        return plan.launch(q=given.query, k=given.key, g=given.g, beta=given.beta, do=of_do, errors=errors,
                           rights=rights, states=states, dstates=dstates, norms=norms, wanted=wanted,
                           cu_seqlens=given.cu_seqlens)

    found = launch()
    of_heads = [None if x is None else tensor_array(x) for x in found]
    of_heads[3] = of_heads[3].reshape(*args.g.shape[:3], -1, case.K).sum(3)
    options = {"softmax_scale": None, "reverse": case.reverse}
    truth, in_dtype = (list(gated_delta_rule_vjp(*whole, do, dstate, **options, dtype=x))[:5]
                       for x in (np.float64, np.float32))
    scales = [*truth[:3], case.gate_terms(truth[3]), truth[4]]
    dtypes = [case.dtype] * 5
    assert_within_rule(NAMES, of_heads, truth, in_dtype, dtypes, scales)

    # Of some chunks and heads only: the others' are not written.
    wanted = torch.arange(len(states) * case.H, dtype=torch.int32, device=device).reshape(-1, case.H) % 3 % 2
    made = wanted[torch.tensor(slot_of, device=device)] != 0  # [B, T, H]
    assert 0 < made.sum() < made.numel()
    for x, y in zip(launch(wanted), found, strict=True):
        assert x is None or torch.equal(x[made], y[made])
