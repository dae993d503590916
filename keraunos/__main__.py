"""`python -m keraunos`: the command line where the `keraunos` script is not on the path."""

from keraunos.cli.main import app

if __name__ == "__main__":
    app(prog_name="keraunos")
