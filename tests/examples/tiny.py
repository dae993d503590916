"""Runs the example as a process would, with a model that compiles in a few seconds."""

import functools
import runpy
from pathlib import Path

from language_model import session, training
from language_model.model import ModelConfig

MODEL = ModelConfig(width=32, heads=2, blocks=("lightning",), context=32)

if __name__ == "__main__":
    session.training.Settings = functools.partial(training.Settings, model=MODEL, batch=4)
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "language_model"), run_name="__main__")
