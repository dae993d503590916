"""Asks one framework, or the GPUs, for `keraunos doctor`: `python -m keraunos.cli.probe jax|torch|gpu`.

Each runs in a process of its own, because a broken installation may crash or hang where no `except` helps, and so that
whatever memory a framework takes on a GPU is given back at once. It prints ``ANSWER`` and one line of JSON.
"""

import ctypes
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keraunos.ops.family import Operation

# What the line with the answer starts with.
ANSWER = "keraunos probe: "
# The sizes of one ordinary call, in bfloat16; the answers are for calls like it.
_SIZES = {"B": 1, "T": 128, "H": 2, "K": 64}
_MODULES = {
    "jax": ("jax", "jaxlib", "jax_triton", "triton", "numpy", "keraunos"),
    "torch": ("torch", "triton", "numpy", "keraunos"),
}


def guarded(ask: Callable[[], Any]) -> dict[str, Any]:
    """`{"value": ask()}`, or `{"error": why not}` in one line: one failing probe must not hide the others."""
    try:
        return {"value": ask()}
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def probe_framework(framework: str) -> dict[str, Any]:
    """Loaded versions, devices, and which platform can run which operation for this framework's arrays."""
    versions = {name: guarded(partial(_version, name)) for name in _MODULES[framework]}
    if "error" in versions[framework]:
        return {"versions": versions, "devices": versions[framework], "operations": versions[framework]}
    return {
        "versions": versions,
        "devices": guarded({"jax": _jax_devices, "torch": _torch_devices}[framework]),
        "operations": guarded(partial(_operations, framework)),
    }


def probe_gpu() -> dict[str, Any]:
    """The NVIDIA GPUs and the driver, without making a context on any."""
    return {"gpus": guarded(_gpus), "cuda_driver": guarded(_cuda_driver)}


def _version(module: str) -> str:
    return importlib.import_module(module).__version__


def _operations(framework: str) -> dict[str, Any]:
    from keraunos.cli.calls import operations

    return {operation.function: guarded(partial(_platforms, framework, operation)) for operation in operations()}


def _platforms(framework: str, operation: "Operation") -> dict[str, Any]:
    """The answer of each platform to such a call; for "auto", the name of the platform that it takes."""
    from keraunos.kernels import kernel_registry

    call = operation.kernel.invocation(framework, **_SIZES)
    answers: dict[str, dict[str | None, None]] = {}
    for row in kernel_registry.rows(call.op_id):
        answers.setdefault(row.platform, {})[row.unsupported(call)] = None
    found = {
        platform: {"value": platform} if None in reasons else {"error": "; ".join(map(str, reasons))}
        for platform, reasons in answers.items()
    }
    return found | {"auto": guarded(lambda: kernel_registry.choose(call)[0].platform)}


def _jax_devices() -> list[str]:
    import jax

    return [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]


def _torch_devices() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count))]


def _gpus() -> list[str]:
    if not shutil.which("nvidia-smi"):
        raise FileNotFoundError("nvidia-smi is not on the path")
    fields = "index,name,memory.total,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip().splitlines()


def _cuda_driver() -> str:
    version = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    if status:
        raise OSError(f"cuDriverGetVersion returned {status}")
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


if __name__ == "__main__":
    # JAX would reserve most of a GPU's memory, which is somebody else's while we only look.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    subject = sys.argv[1]
    print(ANSWER + json.dumps(probe_gpu() if subject == "gpu" else probe_framework(subject)))
