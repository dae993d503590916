"""Runs the platform ``cuda`` of the gated delta rule without a GPU: its own host code, its kernels in the emulator."""

from __future__ import annotations

import torch

from keraunos.kernels.gated_delta_rule.contract import Args, Options
from keraunos.kernels.gated_delta_rule.cuda import passes
from keraunos.kernels.gated_delta_rule.reference import gated_delta_rule
from keraunos.numerics import coarser, working_dtype
from keraunos.ops.invocation import Config
from tests.cuda.builds import launched
from tests.cuda.platform import emulated
from tests.gated_delta_rule.cases import NAMES, Case
from tests.linear_attention.cases import tensor_array, torch_tensor
from tests.numerics import assert_within_rule


def small(**fields):
    """A case of bfloat16 with one head and head dims of 64, unless others are given."""
    return Case(**{"B": 1, "H": 1, "K": 64, "V": 64, "dtype": "bfloat16", **fields})


# Calls whose builds have budgets, and are recorded.
BUILDS = {
    "delta rule": small(K=128, V=128, H=4),
    "delta rule, everything": small(K=128, V=128, H=4, lengths=(60, 40), state=True, norm=True, reverse=True),
    "delta rule, no gates": small(K=128, V=128, H=4, gate="none", beta=None, state=True),
    "delta rule, shared": small(K=128, V=128, H=4, HQ=2, G=2, HV=4),
    "delta rule, float16": small(K=128, V=128, H=4, dtype="float16"),
    "delta rule, 64": small(H=4, state=True),
    "delta rule, 64 and 128": small(K=64, V=128, H=4),
    "delta rule, 96 and 40": small(K=96, V=40, H=4, state=True),
}


def options(case, stages=3):
    """The options of a case's call."""
    return Options(case.scale or case.K**-0.5, case.reverse, Config(num_stages=stages), use_qk_l2norm=case.norm)


def run(case, *, mode="late", seed=0, replaced=None):
    """The output and the final state of a case."""
    with emulated(mode, seed, replaced):
        results, _ = passes.forward(Args(*map(torch_tensor, case.arrays[0])), options(case))
    return [*map(tensor_array, results)]


def check(case, **how):
    """Run a case; hold it to the tolerance rule."""
    got, args = run(case, **how), case.arrays[0]
    truth, in_dtype = (gated_delta_rule(*args, **case.options, dtype=dtype)
                       for dtype in (float, working_dtype(case.dtype)))
    assert_within_rule(NAMES[:2], got, truth, in_dtype, [case.dtype, coarser(case.dtype, "float32")])


def build(case):
    """``(kernel, types of its arguments, constants)`` of each build that a call launches."""
    args = Args(*(None if x is None else torch.empty(x.shape, dtype=getattr(torch, x.dtype.name))
                  for x in case.arrays[0]))
    found = launched(lambda: passes.forward(args, options(case)))
    return [(kernel, dict(types), dict(constants)) for kernel, types, constants in dict.fromkeys(found)]
