"""The command line: one module per subcommand, each importing what it needs when it runs."""

import sys


def run() -> None:
    """The command `keraunos`."""
    try:
        from keraunos.cli.main import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("keraunos: the command line needs typer: pip install 'keraunos[cli]'")
    app(prog_name="keraunos")
