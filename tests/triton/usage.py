"""The resources that a compiled kernel needs of a multiprocessor."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton


def usage(built) -> dict[str, int]:
    """Registers, bytes of stack (spills) and of shared memory of a kernel that Triton has built."""
    if "amdgcn" in built.asm:
        text, names = built.asm["amdgcn"], dict(registers=r"\.vgpr_count: +", stack=r"\.private_segment_fixed_size: ")
    else:
        text, names = _of_cubin(built.asm["cubin"]), dict(registers="REG:", stack="STACK:")
    found = {name: int(re.search(rf"{key}(\d+)", text)[1]) for name, key in names.items()}
    return {**found, "shared": built.metadata.shared}


def _of_cubin(cubin) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [tool, "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
