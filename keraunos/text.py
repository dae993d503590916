"""Text from outside, made fit for a terminal or a log."""


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
