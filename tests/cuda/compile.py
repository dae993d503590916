"""Compile Gluon kernels ahead of time for Hopper, without a GPU, and report their resources."""

from __future__ import annotations

import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
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
    source = GluonASTSource(kernel, types, fixed, attrs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=num_warps))
    return {**usage(built), "warps": built.metadata.num_warps, "waits": _waits(built.asm["ptx"])}


def _waits(ptx: str) -> int:
    tool = get_ptxas(90).path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "--gpu-name", "sm_90a", "--output-file", "/dev/null", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    # A wait that it put in; products that it put in turn.
    return len(re.findall(r"\(C7510\)|\(C7512\)|\(C7514\)|\(C7517\)", said))
