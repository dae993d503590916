"""What a compiled kernel needs of a multiprocessor."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton


def usage(built) -> dict[str, int]:
    """Registers, bytes of stack (spills) and of shared memory of a kernel that Triton has built."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(re.search(rf"{key}:(\d+)", text)[1]) for name, key in (("registers", "REG"), ("stack", "STACK"))}
    return {**found, "shared": built.metadata.shared}
