"""Faults planted in the platform's own kernels: each step of their synchronisation left out, one at a time."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from triton.runtime.jit import JITFunction

# Modules with kernels, and those that these import: a step is one of theirs.
LINEAR = ("keraunos.kernels.device.pipeline", *(f"keraunos.kernels.linear_attention.cuda.{name}" for name in (
    "walk", "outputs", "gradients", "dimensions", "dimensions_queries", "dimensions_keys", "dimensions_gates"
)))
DECODE = ("keraunos.kernels.softmax_attention.cuda.decode",)
_STEP = re.compile(
    r"^( +)(?:fence_async_shared\(\)|thread_barrier\(\)|mbarrier\.(?:arrive|init)\(.*\)|"
    r"[\w.]+\.(?:acquire|expect|commit|wait|release|copy|commit_group|wait_group)\(.*\)|"
    r"tma\.store_wait\((?:\d)\)|(?:copy_in|copy_out|copy_of_threads|add_out)\(.*\)|"
    r"[a-z_, ]+ = warpgroup_mma_wait\((\d), deps=\[.*\]\))$",
    re.MULTILINE,
)


def steps(modules: tuple[str, ...]) -> list[tuple[str, int]]:
    """The module and the number, in it, of each step."""
    return [(name, i) for name in modules for i, _ in enumerate(_STEP.finditer(_text(name)))]


def label(step: tuple[str, int]) -> str:
    """The description of a step, for reports."""
    return f"{step[0].rpartition('.')[2]}:{list(_STEP.finditer(_text(step[0])))[step[1]][0].strip()}"


def kernels(modules: tuple[str, ...], step: tuple[str, int], folder: Path) -> dict:
    """The kernels without a step, or where it waits for products, with a wait that leaves one more under way.

    Of the step's module and of those that import it; others have no kernel that has changed.
    """
    name, number = step
    found = list(_STEP.finditer(_text(name)))[number]
    left = found[1] + "pass"
    if found[2]:
        left = found[0].replace(f"wait({found[2]},", f"wait({int(found[2]) + 1},")
    return _made(modules, name, _text(name)[: found.start()] + left + _text(name)[found.end() :], folder)


def replaced(modules: tuple[str, ...], name: str, before: str, after: str, folder: Path) -> dict:
    """The kernels with another text in one place of a module; see :func:`kernels`."""
    assert _text(name).count(before) == 1
    return _made(modules, name, _text(name).replace(before, after), folder)


def _made(modules: tuple[str, ...], name: str, mutant: str, folder: Path) -> dict:
    """The kernels of a module with this text, and of those that import it; ``folder``: an own one for each."""
    package = f"mutant_{folder.name}"
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    changed = _users(modules, name)
    for module in changed:
        text = mutant if module == name else _text(module)
        for other in changed:
            text = re.sub(rf"{re.escape(other)}\b", f"{package}.{other.rpartition('.')[2]}", text)
        (folder / package / f"{module.rpartition('.')[2]}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        made = [importlib.import_module(f"{package}.{module.rpartition('.')[2]}") for module in changed]
    finally:
        sys.path.remove(str(folder))
    return {name: x for module in made for name, x in vars(module).items()
            if name.endswith("_kernel") and isinstance(x, JITFunction)}


def _users(modules: tuple[str, ...], name: str) -> tuple[str, ...]:
    """A module and those that import it, or others that do."""
    found: set[str] = set()
    more = {name}
    while more:
        found |= more
        names = re.compile("|".join(rf"{re.escape(x)}\b" for x in more))
        more = {module for module in modules if module not in found and names.search(_text(module))}
    return tuple(module for module in modules if module in found)


def _text(name: str) -> str:
    return Path(sys.modules[name].__file__).read_text()
