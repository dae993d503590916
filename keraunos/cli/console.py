"""How commands print: text that is no markup, in lines as long as the terminal is wide."""

from collections.abc import Iterable
from typing import Any

from keraunos.text import printable


def plain() -> Any:
    """A rich console that takes text as it is."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def pairs(rows: Iterable[tuple[str, str]], chosen: str = "") -> Any:
    """Names and what there is to say of each, in two columns of which the second one wraps.

    Args:
        rows: the names and texts.
        chosen: the name that stands out.
    """
    from rich.padding import Padding
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        # Text of several lines is one: the second column wraps.
        table.add_row(printable(name), printable(" ".join(text.split())), style="bold" if name == chosen else None)
    return Padding(table, (0, 0, 0, 2))


def fields(config: Any) -> str:
    """The fields of a configuration that its platform reads, such as ``block_q=64 num_warps=4``."""
    if not isinstance(config, dict):
        return printable(config)
    # Who computes is said beside it.
    shown = {name: value for name, value in config.items() if name not in ("platform", "backend")}
    return printable(" ".join(f"{name}={value}" for name, value in shown.items()) or "nothing to choose")
