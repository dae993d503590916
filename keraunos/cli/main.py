"""The `keraunos` command and its subcommands."""

from typing import Annotated

import typer

import keraunos
from keraunos.cli.bench import bench
from keraunos.cli.cache import cache
from keraunos.cli.doctor import doctor
from keraunos.cli.explain import explain
from keraunos.cli.tune import tune

app = typer.Typer(
    name="keraunos",
    help="Attention kernels for JAX and PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    # What is in brackets is text, and lines are as long as the terminal is wide.
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"keraunos {keraunos.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# The modules of the subcommands import frameworks only inside their functions, so that --help is quick.
app.command()(bench)
app.command()(doctor)
app.command()(explain)
app.command()(tune)
app.add_typer(cache, name="cache")
