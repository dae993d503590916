"""Faults planted in the platform's own kernels: each step of their synchronisation left out, one at a time."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from keraunos.kernels.linear_attention import cuda

FILES = ("walk", "outputs", "gradients", "dimensions", "dimensions_queries", "dimensions_keys",
         "dimensions_gates")
KERNELS = dict(outputs="outputs_kernel", gradients="gradients_kernel", dimensions="dimensions_kernel",
               dimensions_queries="queries_kernel", dimensions_keys="keys_kernel",
               dimensions_gates="gates_kernel")
_FOLDER = Path(cuda.__file__).parent
_STEP = re.compile(
    r"^( +)(?:fence_async_shared\(\)|thread_barrier\(\)|mbarrier\.(?:wait|arrive|init|expect)\(.*\)|"
    r"tma\.store_wait\((?:\d)\)|copy_(?:in|out)\(.*\)|[a-z_, ]+ = warpgroup_mma_wait\((\d), deps=\[.*\]\))$",
    re.MULTILINE,
)


def steps() -> list[tuple[str, int]]:
    """The file and the number, in it, of each step."""
    return [(name, i) for name in FILES for i, _ in enumerate(_STEP.finditer(_text(name)))]


def label(step: tuple[str, int]) -> str:
    """What a step is, for reports."""
    return f"{step[0]}:{list(_STEP.finditer(_text(step[0])))[step[1]][0].strip()}"


def kernels(step: tuple[str, int], folder: Path) -> dict:
    """The kernels without a step, or where it waits for products, with a wait that leaves one more under way."""
    name, number = step
    found = list(_STEP.finditer(_text(name)))[number]
    left = found[1] + "pass"
    if found[2]:
        left = found[0].replace(f"wait({found[2]},", f"wait({int(found[2]) + 1},")
    package = f"mutant_{name}_{number}"
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    for file in FILES:
        text = _text(file)
        if file == name:
            text = text[: found.start()] + left + text[found.end() :]
        text = re.sub(rf"{re.escape(cuda.__name__)}\.({'|'.join(FILES)})\b", rf"{package}.\1", text)
        (folder / package / f"{file}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        modules = {file: importlib.import_module(f"{package}.{file}") for file in KERNELS}
    finally:
        sys.path.remove(str(folder))
    return {kernel: getattr(modules[file], kernel) for file, kernel in KERNELS.items()}


def _text(name: str) -> str:
    return (_FOLDER / f"{name}.py").read_text()
