"""What the kernels of the platform ``cuda`` become when they are compiled for Hopper; as a script, a table of it."""

from __future__ import annotations

import sys
from unittest import mock

import torch
import triton

from keraunos import frontends
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.linear_attention.cuda import passes
from keraunos.ops.invocation import Config
from tests.cuda.compile import resources
from tests.cuda.platform import small

CALLS = {
    "constant": (small(B=1, T=100, H=4, gamma=1), ("g_gamma",)),
    "learned": (small(B=1, T=100, H=4, gamma=1, state=True), ()),
    "segments": (small(B=1, T=2048, H=4, gamma=1), ("g_gamma",)),
    "segments with gates": (small(B=1, T=2048, H=4, gate="scalar", gate_dtype="bfloat16"), ("g",)),
    "everything": (small(H=4, lengths=(60, 40), gamma=1, gate="scalar", state=True, reverse=True), ()),
    "shared": (small(B=1, T=100, H=4, G=2, HQ=1, gate="scalar", gate_dtype="bfloat16"), ()),
    "64": (small(K=64, V=64, B=1, T=2048, H=4, gamma=1, gate="scalar", gate_dtype="bfloat16", state=True), ()),
    "128 and 64": (small(K=128, V=64, B=1, T=2048, H=4, gate="scalar", gate_dtype="bfloat16"), ()),
    "constant 128 and 64": (small(K=128, V=64, B=1, T=100, H=4, gamma=1, state=True), ("g_gamma",)),
    "64 and 128": (small(K=64, V=128, B=1, T=100, H=4, gamma=1, state=True), ()),
    "96 and 40": (small(K=96, V=40, H=4, G=2, lengths=(60, 40), gamma=1, gate="scalar", state=True), ()),
}
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}


def most(call):
    """The budgets of a call's kernels.

    Bytes of stack are registers that did not fit: those of addresses and the like, outside of products; and where heads
    share an array, whose gradients of each head are not copied out but stored. Triton 3.9 has another assembler.
    """
    stack = 160 if triton.__version__.startswith("3.9") else 112
    return dict(registers=168, stack=176 if call == "shared" else stack, shared=frontends.SHARED_MEMORY, waits=0)


def launches(case, constant=()):
    """The kernels that a call forward and backward launches, with the types of their arguments, and constants."""
    found = []

    def launch(kernel, grid, inputs, outputs, constants, *, num_warps, num_stages):
        types = {}
        fixed = dict(constants)
        made = {name: x and torch.empty(x[0], dtype=getattr(torch, x[1]), device="meta") for name, x in outputs.items()}
        for name, x in {**inputs, **made}.items():
            if x is None:
                fixed[name] = None
            elif isinstance(x, torch.Tensor):
                types[name] = "*" + _TYPES[str(x.dtype).removeprefix("torch.")]
            else:
                types[name] = "fp32" if isinstance(x, float) else "i32"
        found.append((kernel, tuple(sorted(types.items())), tuple(sorted(fixed.items()))))
        return tuple(made.values())

    args, doutput, dstate = (
        [None if x is None else torch.empty(x.shape, dtype=getattr(torch, x.dtype.name)) for x in group]
        for group in (case.arrays[0], [case.arrays[1]], [case.arrays[2]])
    )
    opts = Options(case.K**-0.5, case.reverse, Config(num_stages=3), constant)
    with mock.patch.object(frontends, "launch", launch):
        _, residuals = passes.forward(Args(*args), opts)
        passes.backward(Args(*args), residuals, (*doutput, *dstate), opts)
    return found


def of(call):
    """``(name, resources)`` of each kernel that a call launches, as often as it launches another build of it."""
    case, constant = CALLS[call]
    for kernel, types, constants in dict.fromkeys(launches(case, constant)):
        yield kernel.fn.__name__, resources(kernel, dict(types), dict(constants))


def _table():
    """Print a line for each build, with what is over its budget; the exit status says whether anything is."""
    columns, failed = ("registers", "stack", "shared", "waits"), False
    print("| triton | call | kernel | registers | stack | shared memory | waits | over |\n|" + " --- |" * 8)
    for call in CALLS:
        budget = most(call)
        for name, used in of(call):
            over = [f"{key} {budget[key]}" for key in columns if used[key] > budget[key]]
            cells = triton.__version__, call, name, *(used[key] for key in columns), ", ".join(over)
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            failed |= bool(over)
    return int(failed)


if __name__ == "__main__":
    sys.exit(_table())
