"""`python -m keraunos`: the command line where the `keraunos` script is not on the path."""

from keraunos.cli import run

if __name__ == "__main__":
    run()
