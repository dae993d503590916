"""The command line: one module per subcommand, each importing what it needs when it runs."""

import io
import sys


def run() -> None:
    """The command `keraunos`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Text that a terminal cannot show must not end a command.
        sys.stdout.reconfigure(errors="replace")
    try:
        from keraunos.cli.main import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("keraunos: the command line needs typer: pip install 'keraunos[cli]'")
    app(prog_name="keraunos")
