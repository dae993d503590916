"""Runs the platform ``cuda`` without a GPU: its own host code, its kernels in the emulator."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from keraunos import frontends
from keraunos.frontends import interpreter
from keraunos.kernels.gated_delta_rule.cuda import passes as delta_passes
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.linear_attention.cuda import passes
from keraunos.kernels.state_pool import contract as pool_contract
from keraunos.ops.invocation import Config
from tests.cuda import emulator
from tests.linear_attention.cases import LEFT_OUT, Case, tensor_array, torch_tensor
from tests.serving import cases as serving_cases

# By whether it is of the delta rule.
PREFILL = {delta: prefill.passes("torch")[0]
           for delta, prefill in ((False, passes.prefill), (True, delta_passes.delta_prefill))}


def poisoned(shape, dtype):
    """Memory that is yet to be written."""
    dtype = getattr(torch, dtype)
    return torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype)


def launcher(mode="late", seed=0, replaced=None):
    """Like the front ends' ``launch``, on the CPU; ``replaced`` has other kernels in place of some, by their names.

    Kernels of Triton run where its interpreter is on: elsewhere they write nothing.
    """

    def launch(kernel, grid, inputs, outputs, constants, *, num_warps, num_stages):
        kernel = (replaced or {}).get(kernel.fn.__name__, kernel)
        assert [*inputs, *outputs, *constants] == kernel.arg_names
        made = tuple(inputs[x] if isinstance(x, str) else x and poisoned(*x) for x in outputs.values())
        if 0 not in grid:
            given = *inputs.values(), *made
            if not isinstance(kernel, GluonJITFunction):
                alone = dict(OVERLAP=0) if "OVERLAP" in constants else {}
                if interpreter.ON:
                    kernel[grid](*given, **{**constants, **alone})
            else:
                emulator.launch(kernel, grid, *given, *constants.values(), mode=mode, seed=seed, num_warps=num_warps)
        return made

    return launch


@contextlib.contextmanager
def emulated(mode="late", seed=0, replaced=None):
    """Within it the platform's kernels run in the emulator."""
    with mock.patch.object(frontends, "launch", launcher(mode, seed, replaced)):
        yield


def run(case, gradients=True, *, mode="late", seed=0, constant=(), replaced=None):
    """A :class:`Case` forward and backward: what ``case.check`` wants."""
    args, doutput, dstate = case.arrays
    args = Args(*map(torch_tensor, args))
    scale = case.scale or case.K**-0.5
    opts = Options(scale, case.reverse, Config(num_stages=3), constant)
    with emulated(mode, seed, replaced):
        (output, state), residuals = passes.forward(args, opts)
        got = [output, state]
        if gradients:
            grads = torch_tensor(doutput), torch_tensor(dstate) if case.dstate else None
            got += list(passes.backward(args, residuals, grads, opts))[:6]
    got = [tensor_array(x) for x in got]
    for i, name in ((5, "g"), (6, "g_gamma")) if gradients else ():
        if name in constant:
            got[i] = LEFT_OUT
    return got


def small(**fields):
    """A case of bfloat16 with head dims of 128, unless others are given."""
    return Case(**{"K": 128, "V": 128, "dtype": "bfloat16", **fields})


def prefill_options(case):
    """The options of a call of prefill."""
    op_id = "delta_prefill" if case.delta else "prefill"
    return pool_contract.Options(op_id, case.scale or case.K**-0.5, Config(num_stages=3), use_qk_l2norm=case.norm)


def prefill(case, view=lambda given: given, *, mode="late", seed=0, replaced=None, **options):
    """``(output, pool)`` of a prefill, which is a case of ``tests/serving``; ``view``: of its tensors by name."""
    given = view({name: serving_cases.tensor(x) for name, x in case.arrays.items()})
    with emulated(mode, seed, replaced):
        output, pool = PREFILL[case.delta](pool_contract.Args(**given, **options), prefill_options(case))
    assert pool is given["states"]
    return serving_cases.array(output), serving_cases.array(pool)


def small_prefill(**fields):
    """A case of prefill with bfloat16 tokens and head dims of 128, unless others are given."""
    default = dict(op="prefill", lengths=(70, 5, 130, 0), H=2, K=128, V=128, dtype="bfloat16")
    return serving_cases.Case(**{**default, **fields})


def delta_prefill(**fields):
    """A case of prefill with the delta rule, with gates and head dims of 64 unless others are given."""
    return small_prefill(**{**dict(delta=True, gate="scalar", gamma=False, K=64, V=64), **fields})
