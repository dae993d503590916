"""How the site reads docstrings, which are written as in Python's own documentation."""

import re
from typing import Any

from griffe import Extension, Object


class Docstrings(Extension):
    """Examples are a section, what a role names is code, and two colons before code are one."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Change a docstring before it is parsed."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r":(?:func|class|mod|meth|data|attr|exc):`~?([^`]+)`", r"`\1`", text)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
