"""Compile Gluon kernels ahead of time for Hopper, without a GPU, and report their resources."""

from __future__ import annotations

import contextlib
import io
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tests.triton.usage import usage


def descriptor(dtype: str, block_shape, layout) -> str:
    """A host tensor descriptor in a signature; ``dtype`` as Triton writes it ("bf16")."""
    return f"tensordesc<{dtype}{list(block_shape)},{layout!r}>"


def resources(kernel, signature: dict[str, str], constants: dict, num_warps: int = 4) -> dict[str, int]:
    """Registers, bytes of stack (spills) and of shared memory, warps and waits of a kernel built for sm_90.

    Waits: how often the assembler waits for products where the kernel does not.

    ``signature`` has the types of the arguments of run time ("*bf16", "i32", "fp32", `descriptor`); pointers are
    taken to be of 16 bytes.
    """
    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source, said, knobs = GluonASTSource(kernel, types, fixed, attrs), io.StringIO(), triton.knobs
    # What was built before says nothing.
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=num_warps))
    assert "ptxas info" in said.getvalue()
    return {**usage(built), "warps": built.metadata.num_warps, "waits": _waits(said.getvalue())}


def _waits(said: str) -> int:
    # A wait that the assembler put in; products that it put in turn.
    return len(re.findall(r"\(C7510\)|\(C7512\)|\(C7514\)|\(C7517\)", said))
