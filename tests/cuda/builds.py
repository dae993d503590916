"""Builds of the kernels of the platform ``cuda`` for Hopper; as a script, a table of them."""

from __future__ import annotations

import sys
from functools import partial
from unittest import mock

import torch
import triton

from keraunos import frontends
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.linear_attention.cuda import passes
from keraunos.kernels.state_pool import contract as pool_contract
from keraunos.ops.invocation import Config
from tests.cuda.compile import resources
from tests.cuda.platform import PREFILL, delta_prefill, prefill_options, small, small_prefill
from tests.serving.cases import tensor

CALLS = {
    "constant": (small(B=1, T=100, H=4, gamma=1), ("g_gamma",)),
    "learned": (small(B=1, T=100, H=4, gamma=1, state=True), ()),
    "segments": (small(B=1, T=2048, H=4, gamma=1), ("g_gamma",)),
    "segments with gates": (small(B=1, T=2048, H=4, gate="scalar", gate_dtype="bfloat16"), ("g",)),
    "gates, everything": (small(H=4, lengths=(60, 40), gamma=1, gate="scalar", state=True, reverse=True), ()),
    "shared": (small(B=1, T=100, H=4, G=2, HQ=1, gate="scalar", gate_dtype="bfloat16"), ()),
    "64": (small(K=64, V=64, B=1, T=2048, H=4, gamma=1, gate="scalar", gate_dtype="bfloat16", state=True), ()),
    "128 and 64": (small(K=128, V=64, B=1, T=2048, H=4, gate="scalar", gate_dtype="bfloat16"), ()),
    "constant 128 and 64": (small(K=128, V=64, B=1, T=100, H=4, gamma=1, state=True), ("g_gamma",)),
    "64 and 128": (small(K=64, V=128, B=1, T=100, H=4, gamma=1, state=True), ()),
    "dimensions": (small(B=1, T=100, H=4, gate="vector", gate_dtype="bfloat16", state=True), ("g",)),
    "dimensions, everything": (
        small(H=4, lengths=(60, 40), gamma=1, gate="vector", state=True, reverse=True), ()
    ),
    "dimensions, segments": (small(B=1, T=2048, H=4, gate="vector"), ("g",)),
    "dimensions, learned": (small(B=1, T=100, H=4, gate="vector", gate_dtype="bfloat16"), ()),
    "dimensions, shared": (small(B=1, T=100, H=4, G=2, HQ=1, gate="vector", gate_dtype="bfloat16"), ()),
    "dimensions, 64": (small(K=64, V=64, B=1, T=2048, H=4, gate="vector", gate_dtype="bfloat16"), ()),
    "dimensions, 96 and 40": (small(K=96, V=40, B=1, T=100, H=4, gate="vector", state=True), ()),
    "40, segments": (small(K=40, V=40, B=1, T=2048, H=4, gamma=1, state=True), ()),
    "96 and 40": (small(K=96, V=40, H=4, G=2, lengths=(60, 40), gamma=1, gate="scalar", state=True), ()),
}
# Whether the pool is stored as [slots, H, V, K], and whether the output goes where copies of blocks cannot take it.
PREFILLS = {
    "prefill": (small_prefill(), False, False),
    "prefill, some fresh": (small_prefill(fresh=(0,)), False, False),
    "prefill, transposed": (small_prefill(fresh=(0,)), True, False),
    "prefill, bfloat16 pool": (small_prefill(fresh=(0,), pool="bfloat16"), False, False),
    "prefill, stored": (small_prefill(fresh=(0,)), False, True),
    "prefill with gates": (small_prefill(gate="scalar", gamma=False, fresh=(0,)), False, False),
    "prefill with gates, transposed": (small_prefill(gate="scalar", fresh=(0,), pool="bfloat16"), True, False),
    "prefill, 96 and 40": (small_prefill(K=96, V=40, fresh=(0,)), False, False),
}
NAMES = (*CALLS, *PREFILLS)
DELTA_PREFILLS = {
    "delta prefill": (delta_prefill(K=128, V=128), False, False),
    "delta prefill, some fresh, transposed": (delta_prefill(K=128, V=128, fresh=(0,), norm=True), True, False),
    "delta prefill, cut": (delta_prefill(K=128, V=128, lengths=(2048,), slots=(3,), fresh=(0,)), False, False),
    "delta prefill, stored": (delta_prefill(K=128, V=128, fresh=(0,), pool="bfloat16", gate="none"), False, True),
}
# Gradients of softmax attention: cases of tests/cuda/test_softmax_gradients.py.
ATTENTION = ("other lengths", "causal", "64, float16", "large cap", "everything", "mask, shared keys", "dropout",
             "bias, dropout, cap, 64")
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "i8", "int32": "i32", "int64": "i64",
          "bool": "i1"}


# Bytes of stack, where a call takes more than 112, with gates per dimension 720, in the gradients of softmax 448.
STACK = {"shared": 176, "dimensions, everything": 888, "dimensions, segments": 776}
# What newer versions take beyond that: the most of a call's kernels as measured, and which calls have a kernel whose
# products wait for each other, as registers are few ("C7512"). No GPU has run these, and "auto" does not take them.
NEWER_STACK = {
    "3.7": {"bias, dropout, cap, 64": 472},
    "3.8": {"dimensions": 1120, "dimensions, learned": 1120, "dimensions, shared": 1120, "dimensions, everything": 1040,
            "dimensions, segments": 1104, "dimensions, 96 and 40": 1128},
    "3.9": {"bias, dropout, cap, 64": 640, "dimensions": 920, "dimensions, learned": 912, "dimensions, shared": 912,
            "dimensions, everything": 1280, "dimensions, segments": 1000, "dimensions, 96 and 40": 1032,
            "learned": 160},
}
NEWER_WAITS = {"3.9": ("dimensions, 64",)}


def most(call):
    """The budgets of a call's kernels; of ATTENTION, of the kernel of the gradients.

    Bytes of stack are registers that did not fit: those of addresses and the like, outside of products; and where heads
    share an array, whose gradients of each head are not copied out but stored; and in strong chunks with gates per
    dimension, whose gates come from memory by many pointers.
    """
    version = ".".join(triton.__version__.split(".")[:2])
    usual = 448 if call in ATTENTION else 720 if call.startswith("dimensions") else 112
    stack = NEWER_STACK.get(version, {}).get(call, STACK.get(call, usual))
    return dict(registers=168, stack=stack, shared=frontends.SHARED_MEMORY,
                waits=int(call in NEWER_WAITS.get(version, ())))


def launched(run):
    """The kernels that ``run`` launches, with the types of their arguments, and constants."""
    found = []

    def launch(kernel, grid, inputs, outputs, constants, *, num_warps, num_stages):
        types = {}
        fixed = dict(constants)
        made = {name: inputs[x] if isinstance(x, str) else
                x and torch.empty(x[0], dtype=getattr(torch, x[1]), device="meta") for name, x in outputs.items()}
        for name, x in {**inputs, **made}.items():
            if x is None:
                fixed[name] = None
            elif isinstance(x, torch.Tensor):
                types[name] = "*" + _TYPES[str(x.dtype).removeprefix("torch.")]
            else:
                types[name] = "fp32" if isinstance(x, float) else "i32"
        found.append((kernel, tuple(sorted(types.items())), tuple(sorted(fixed.items()))))
        return tuple(made.values())

    with mock.patch.object(frontends, "launch", launch):
        run()
    return found


def launches(case, constant=()):
    """The launches of a call of linear attention, forward and backward."""
    args, doutput, dstate = (
        [None if x is None else torch.empty(x.shape, dtype=getattr(torch, x.dtype.name)) for x in group]
        for group in (case.arrays[0], [case.arrays[1]], [case.arrays[2]])
    )
    opts = Options(case.K**-0.5, case.reverse, Config(num_stages=3), constant)

    def run():
        _, residuals = passes.forward(Args(*args), opts)
        passes.backward(Args(*args), residuals, (*doutput, *dstate), opts)

    return launched(run)


def prefills(case, transposed=False, stored=False):
    """The launches of a prefill."""
    given = {name: tensor(x) for name, x in case.arrays.items()}
    if transposed:
        given["states"] = given["states"].mT.contiguous().mT
    if stored:
        like = given["query"].new_empty(*case.rows, case.H, case.V)
        given["out"] = like.new_empty(like.numel() + 1)[1:].view_as(like)
    return launched(lambda: PREFILL[case.delta](pool_contract.Args(**given), prefill_options(case)))


def of(call):
    """``(kernel, types of its arguments, constants)`` of each build that a call launches."""
    if call in ATTENTION:
        # These import this module.
        from tests.cuda.softmax_attention import build_of
        from tests.cuda.test_softmax_gradients import CASES, gradients_kernel

        return [build_of(CASES[call], gradients_kernel)]
    found = launches(*CALLS[call]) if call in CALLS else prefills(*(PREFILLS | DELTA_PREFILLS)[call])
    return [(kernel, dict(types), dict(constants)) for kernel, types, constants in dict.fromkeys(found)
            if ".cuda." in kernel.fn.__module__]


def _table():
    """Print a line for each build, with what is over its budget; the exit status says whether anything is."""
    from tests.cuda import delta_rule  # which imports this module

    of_delta_rule = {name: partial(delta_rule.build, case) for name, case in delta_rule.BUILDS.items()}
    of_delta_rule |= {name: partial(of, name) for name in DELTA_PREFILLS}
    columns, failed = ("registers", "stack", "shared", "waits"), False
    print("| triton | call | kernel | registers | stack | shared memory | waits | over |\n|" + " --- |" * 8)
    for call in sys.argv[1:] or (*NAMES, *ATTENTION, *of_delta_rule):
        for kernel, *build in of_delta_rule[call]() if call in of_delta_rule else of(call):
            name, used = kernel.fn.__name__, resources(kernel, *build)
            budget = delta_rule.most(name) if call in of_delta_rule else most(call)
            over = [f"{key} {budget[key]}" for key in columns if used[key] > budget[key]]
            cells = triton.__version__, call, name, *(used[key] for key in columns), ", ".join(over)
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            failed |= bool(over)
    return int(failed)


if __name__ == "__main__":
    sys.exit(_table())
