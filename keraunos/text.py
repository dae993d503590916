"""Text from outside, made fit for a terminal or a log."""

from collections.abc import Iterable
from typing import Any


def printable(text: object, keep: str = "") -> str:
    """A text with a dot in place of every character that is not visible, which a terminal may take for a command.

    Args:
        text: what to show; ``str`` is taken of it.
        keep: characters that stay, such as ``"\\n\\t"`` for text of several lines.

    Example:
        >>> printable("a key \\x1b[31m")
        'a key ·[31m'
    """
    return "".join(c if c.isprintable() or c in keep else "·" for c in str(text))


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
