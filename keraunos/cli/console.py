"""Prints what commands show: text without markup, in lines as long as the terminal is wide."""

from typing import Any

from keraunos.text import printable


def plain() -> Any:
    """A rich console that takes text as it is."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def fields(config: object) -> str:
    """The fields of a configuration that its platform reads, such as ``block_q=64 num_warps=4``."""
    if not isinstance(config, dict):
        return printable(config)
    # Commands show these two by themselves.
    shown = {name: value for name, value in config.items() if name not in ("platform", "backend")}
    return printable(" ".join(f"{name}={value}" for name, value in shown.items()) or "nothing to choose")
