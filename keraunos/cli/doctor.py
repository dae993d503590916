"""`keraunos doctor`: what is installed, what loads, which devices there are, and what can run on them."""

import json
import os
import platform as host
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Annotated, Any

import typer

from keraunos.cli.console import plain
from keraunos.cli.probe import ANSWER
from keraunos.text import printable

_SUBJECTS = ("jax", "torch", "gpu")
_SECONDS = 60
_PACKAGES = ("keraunos", "numpy", "jax", "jaxlib", "jax-triton", "torch", "triton")
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show versions, devices, and which platforms can run each operation here and why others cannot.

    It always ends well, whatever is broken: that is what it shows.
    """
    report = examine()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(report)


def examine() -> dict[str, Any]:
    """Everything that `doctor` knows; each finding is `{"value": ...}` or `{"error": why not}`."""
    with ThreadPoolExecutor() as threads:
        found = dict(zip(_SUBJECTS, threads.map(_probe, _SUBJECTS), strict=True))
    return {
        "python": {"version": host.python_version(), "executable": sys.executable, "system": host.platform()},
        "environment": {
            name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith("KERAUNOS_")
        },
        "cache": _cache(),
        "installed": _installed(),
        **found,
    }


def _probe(subject: str) -> dict[str, Any]:
    """Runs one probe in its own process; its answer, or why there is none."""
    command = [sys.executable, "-m", "keraunos.cli.probe", subject]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
        if done.returncode:
            complaint = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"error": f"looking at it ended with status {done.returncode}: {complaint}"}
        # A framework may print lines of its own, even when it ends.
        lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
        return json.loads(lines[-1].removeprefix(ANSWER)) if lines else {"error": "no answer: it ended before the end"}
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_SECONDS} s"}
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _cache() -> dict[str, Any]:
    """Where configurations are stored that were measured on this machine."""
    from keraunos.ops.cache import PersistentCache

    try:
        return {"value": str(PersistentCache("configurations").directory())}
    except OSError as error:
        return {"error": f"none: {error}"}


def _installed() -> dict[str, str | None]:
    """Versions as installed, of our packages and of every JAX plugin; None: not installed."""
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for distribution in metadata.distributions():
        # A half-removed distribution has no name.
        name = (distribution.name or "").lower().replace("_", "-")
        if name in versions or (name.startswith("jax-") and name.endswith(("-plugin", "-pjrt"))):
            versions[name] = distribution.version
    return versions


def _show(report: dict[str, Any]) -> None:
    console = plain()
    python = report["python"]
    cache, error = _unfold(report, "cache")
    lines = [f"Python {python['version']} ({python['executable']})", python["system"]]
    lines += [f"{name}={value}" for name, value in report["environment"].items()]
    for line in [*lines, f"cache: {cache or error}"]:
        console.print(printable(line), soft_wrap=True)
    console.print(_version_table(report))
    console.print(_device_table(report))
    console.print(_operation_table(report))


def _version_table(report: dict[str, Any]) -> Any:
    table = _table("Versions", "package", "installed", "loaded")
    loaded: dict[str, Any] = {}
    for framework in ("torch", "jax"):
        loaded |= report[framework].get("versions", {framework: report[framework]})
    for name, version in report["installed"].items():
        finding = loaded.get(name.replace("-", "_"))
        state = "" if finding is None else finding.get("value") or (finding["error"] if version else "")
        table.add_row(*_cells(name, version or "not installed", state))
    return table


def _device_table(report: dict[str, Any]) -> Any:
    table = _table("Devices", "seen by", "what")
    for title, subject, name in (
        ("JAX", "jax", "devices"),
        ("PyTorch", "torch", "devices"),
        ("NVIDIA driver", "gpu", "gpus"),
        ("CUDA driver", "gpu", "cuda_driver"),
    ):
        value, error = _unfold(report[subject], name)
        table.add_row(*_cells(title, error or ("\n".join(value) if isinstance(value, list) else value)))
    return table


def _operation_table(report: dict[str, Any]) -> Any:
    table = _table("Which platform can run what", "operation", "platform", "on JAX arrays", "on PyTorch tensors")
    answers = {framework: _unfold(report[framework], "operations") for framework in ("jax", "torch")}
    operations = dict.fromkeys(name for value, _ in answers.values() for name in value or ())
    for operation in operations:
        found = [({}, error) if error else _unfold(value, operation) for value, error in answers.values()]
        platforms = dict.fromkeys(name for value, _ in found for name in value or () if name != "auto")
        for platform in platforms or ("any",):
            verdicts = [error or _verdict(value, platform) for value, error in found]
            table.add_row(*_cells(operation, platform, *verdicts))
        table.add_section()
    if not operations:
        table.add_row(*_cells("any", "any", *(error for _, error in answers.values())))
    return table


def _verdict(answers: dict[str, Any], platform: str) -> str:
    if "error" in answers[platform]:
        return answers[platform]["error"]
    return "yes, taken by auto" if answers["auto"].get("value") == platform else "yes"


def _unfold(answer: dict[str, Any], name: str) -> tuple[Any, str]:
    """A finding's value and "", or None and the error, whether the finding or its whole probe failed."""
    finding = answer.get(name, answer)
    return finding.get("value"), finding.get("error", "")


def _cells(*texts: str) -> list[str]:
    # Versions, names and reasons come from files and libraries.
    return [printable(text, keep="\n") for text in texts]


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        # Names stay whole, reasons wrap.
        table.add_column(column, overflow="fold", no_wrap=column in ("package", "operation", "platform", "seen by"))
    return table
