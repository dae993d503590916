"""A byte-level language model of linear attention, trained on real text; `make run` runs it.

The modules in the order of a run: `command` (what the user asks for), `session` (one run, with `display` and
`interrupts`), `data` (what to read), `model` (what is learned), `training` and `checkpoint` (how), `plot` (how it
went), `generation` (what came of it) and `checks` (whether it is right).
"""


class DemoError(Exception):
    """The demo cannot go on, for a reason that the user can change; the message is one line and says which."""
