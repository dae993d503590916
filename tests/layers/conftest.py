"""On a GPU both frameworks would round the factors of float32's products and convolutions."""

import contextlib
import importlib.util

import pytest

from tests.linear_attention.cases import GPU


@pytest.fixture(autouse=GPU)
def whole_float32():
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("torch"):
            import torch

            for part in (torch.backends.cudnn, torch.backends.cuda.matmul):
                stack.callback(setattr, part, "allow_tf32", part.allow_tf32)
                part.allow_tf32 = False
        if importlib.util.find_spec("jax"):
            import jax

            stack.enter_context(jax.default_matmul_precision("float32"))
        yield
