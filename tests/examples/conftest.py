"""A model and a text small enough to train within a test."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from language_model.data import Corpus
from language_model.model import ModelConfig
from language_model.training import Settings

PHRASES = [b"the storm comes over the hill; ", b"lightning strikes the tree, ", b"and thunder answers from the sea.\n"]


@pytest.fixture(scope="session")
def _compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="package", autouse=True)
def _compile_once(_compiled):
    """Keeps compiled programs between these tests, where they take longer than all else; between no others."""
    options = {"jax_compilation_cache_dir": str(_compiled), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


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
