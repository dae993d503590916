"""The command: train a language model made of linear attention, let it write, and check what it claims."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from language_model.session import Session

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_show_locals=False)

# Compilation and the closing checks take another half a minute on two CPU cores; all of it has to end within three.
_MINUTES = 1.75


@app.command()
def demo(
    text: Annotated[
        Path | None,
        typer.Option(help="A file to learn from, read as bytes. [default: the sources of the Python standard library]"),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.01, help="Training time; compilation and checks take about half a minute more.")
    ] = _MINUTES,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train for this many steps instead of for a time, repeatably.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for checkpoint, plot and text.")] = Path("keraunos-demo"),
    prompt: Annotated[str | None, typer.Option(help="What the generated text goes on from.")] = None,
    length: Annotated[int, typer.Option(min=1, help="Bytes to generate.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Decides parameters, batches and generated text.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over even if there is a checkpoint in --out.")] = False,
    platform: Annotated[
        str, typer.Option(help="What computes the attention: auto, or one that `keraunos doctor` shows.")
    ] = "auto",
    layers: Annotated[
        str | None,
        typer.Option(help="All blocks alike: lightning, gla, or delta, the gated delta rule. [default: a mixture]"),
    ] = None,
) -> None:
    """Train a small byte-level language model of lightning and gated linear attention, and let it write.

    Ctrl-C is safe at any time: the same command goes on from the last step. Exits with 1 if one of the three closing
    checks fails, with 2 if it cannot start, with 130 after Ctrl-C.
    """
    from rich.console import Console

    from language_model import DemoError

    # The model is small: leave a GPU's memory to others.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # On a CPU the delta rule solves small systems, for which threads of OpenBLAS wait longer than they compute.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    console = Console(highlight=False)
    session: Session | None = None
    try:
        with console.status("Loading JAX and the text"):
            from language_model import session as loaded

            options = loaded.Options(text, minutes * 60, steps, out, prompt, length, seed, fresh, platform, layers)
            session = loaded.Session(options, console)
        passed = session.run()
    except ImportError as error:
        _fail(f"the demo needs {error.name}, which cannot be imported ({error}): pip install -e '.[demo]'")
    except DemoError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        where = session.whereabouts() if session else "Interrupted before training began; nothing is lost."
        typer.echo(f"\n{where}", err=True)
        raise typer.Exit(130) from None
    if not passed:
        raise typer.Exit(1)


def _fail(message: str) -> None:
    typer.secho(f"demo: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(2)
