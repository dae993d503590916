"""A model and a text small enough to train within a test."""

import jax
import numpy as np
import pytest
from language_model.data import Corpus
from language_model.model import ModelConfig
from language_model.training import Settings

PHRASES = [b"the storm comes over the hill; ", b"lightning strikes the tree, ", b"and thunder answers from the sea.\n"]


@pytest.fixture(scope="session", autouse=True)
def _compile_once(tmp_path_factory):
    """Keeps compiled programs between tests: here they take longer than all else."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def prose() -> bytes:
    order = np.random.default_rng(0).integers(0, len(PHRASES), 400)
    return b"".join(PHRASES[i] for i in order)


@pytest.fixture(scope="session")
def corpus(prose: bytes) -> Corpus:
    text = np.frombuffer(prose, np.uint8)
    return Corpus("prose", text[:-2000], text[-2000:], b"the storm ")


@pytest.fixture(scope="session")
def settings() -> Settings:
    return Settings(model=ModelConfig(width=32, heads=2, blocks=("lightning", "gla"), context=32), batch=4)
