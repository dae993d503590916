"""What `keraunos doctor` finds out about one framework or the GPUs: `python -m keraunos.cli.probe jax|torch|gpu`.

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
from typing import Any

# What the line with the answer starts with.
ANSWER = "keraunos probe: "
# One ordinary call, [B, T, heads, dim] in bfloat16; the answers are for calls like it.
SHAPE = (1, 128, 2, 64)
# Each public operation: its class, and what it has to be told besides query, key and value.
_OPERATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "lightning_attention": ("LightningAttention", {"log_decay": (-0.5, -1.0)}),
    "gla_attention": ("GLAttention", {}),
    "attention": ("Attention", {}),
}
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
    devices, array = {"jax": (_jax_devices, _jax_array), "torch": (_torch_devices, _torch_array)}[framework]
    return {
        "versions": versions,
        "devices": guarded(devices),
        "operations": guarded(lambda: _operations(array())),
    }


def probe_gpu() -> dict[str, Any]:
    """The NVIDIA GPUs and the driver, without making a context on any."""
    return {"gpus": guarded(_gpus), "cuda_driver": guarded(_cuda_driver)}


def _version(module: str) -> str:
    return importlib.import_module(module).__version__


def _operations(array: Any) -> dict[str, Any]:
    import keraunos

    # A version of keraunos need not have every operation.
    return {
        name: guarded(partial(_platforms, getattr(keraunos, operation)(), array, more))
        for name, (operation, more) in _OPERATIONS.items()
        if operation in keraunos.__all__
    }


def _platforms(operation: Any, array: Any, more: dict[str, Any]) -> dict[str, Any]:
    """What each platform says to such a call; for "auto", the name of the platform that it takes."""
    import numpy as np

    from keraunos import Platform, kernel_registry

    constants = {name: np.asarray(value, np.float32) for name, value in more.items()}
    call = operation.bind(array, array, array, **constants)

    def ask(platform: str) -> dict[str, Any]:
        reasons = [row.unsupported(call) for row in kernel_registry.rows(operation.op_id) if row.platform == platform]
        if not reasons:
            return {"error": "not implemented"}
        return {"value": platform} if None in reasons else {"error": "; ".join(dict.fromkeys(map(str, reasons)))}

    names = dict.fromkeys([*kernel_registry.platforms(operation.op_id), *map(str, Platform)])
    answers = {name: ask(name) for name in names if name != Platform.AUTO}
    return answers | {"auto": guarded(lambda: kernel_registry.choose(call)[0].platform)}


def _jax_devices() -> list[str]:
    import jax

    return [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]


def _jax_array() -> Any:
    import jax.numpy as jnp

    return jnp.zeros(SHAPE, jnp.bfloat16)


def _torch_devices() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count))]


def _torch_array() -> Any:
    import torch

    return torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu")


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
