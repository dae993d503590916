"""keraunos as a backend of flash-linear-attention 0.6.0: ``import keraunos.compat.fla_backend`` is all a model needs.

fla asks the backends of its registry, before it computes a call itself, whether they take it. The import registers
those functions of :mod:`keraunos.compat.fla` that a model of fla calls; those that fla asks no backend for do so from
then on, under every name that a module of fla has for them. A call that keraunos cannot run, or that no kernel of it
can run on a GPU, is fla's own, with the reason in fla's log. ``FLA_KERAUNOS=0`` in the environment leaves all to fla.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from keraunos import frontends
from keraunos.compat import fla
from keraunos.ops.executor import explain

__all__ = ["register"]

# In which package of fla they are; fla's aliases are the same functions.
_FUNCTIONS: dict[str, tuple[Callable, ...]] = {
    "gated_delta_rule": (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule),
    "delta_rule": (fla.chunk_delta_rule, fla.fused_recurrent_delta_rule),
    "kda": (fla.chunk_kda, fla.fused_recurrent_kda),
    "gla": (fla.chunk_gla, fla.fused_recurrent_gla),
    "simple_gla": (
        fla.chunk_simple_gla, fla.fused_chunk_simple_gla, fla.fused_recurrent_simple_gla, fla.parallel_simple_gla,
    ),
    "lightning_attn": (fla.chunk_lightning_attn, fla.fused_recurrent_lightning_attn),
    "retention": (
        fla.chunk_retention, fla.fused_chunk_retention, fla.fused_recurrent_retention, fla.parallel_retention,
    ),
}


def register() -> None:
    """Register all functions, once more if they are.

    Raises:
        ImportError: there is no fla with a registry of backends, from 0.6.0.
        RuntimeError: FLA_DISABLE_BACKEND_DISPATCH is 1: then fla asks no backend.
    """
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise RuntimeError("keraunos.compat.fla_backend: FLA_DISABLE_BACKEND_DISPATCH is 1; expected it not to be set")
    backends = importlib.import_module("fla.backends")
    for package, functions in _FUNCTIONS.items():
        module = importlib.import_module(f"fla.ops.{package}")
        for own in functions:
            adapter = _adapter(backends.BaseBackend, own)
            if own is fla.chunk_gated_delta_rule:
                # The one that fla asks for by the name of its package.
                backends.register(package)(adapter)
                continue
            theirs = getattr(module, own.__name__)
            try:
                backends.register(theirs)(adapter)
            except KeyError:
                _replace(theirs, backends.dispatch(theirs))
                backends.register(theirs)(adapter)


def _adapter(base: type, own: Callable) -> type:
    """The class that fla's registry takes, for one function."""
    name = own.__name__
    return type("KeraunosBackend", (base,), {
        "backend_type": "keraunos", "env_var": "FLA_KERAUNOS", "priority": 1,  # before other libraries' kernels
        name: staticmethod(own), f"{name}_verifier": staticmethod(_verifier(own)),
    })


def _verifier(own: Callable) -> Callable[..., tuple[bool, str | None]]:
    """The function that tells fla whether keraunos takes a call, and why not. fla takes an error as a reason."""
    taken: set[tuple] = set()

    def verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        query = kwargs["q"] if "q" in kwargs else args[0]
        key = (*kwargs, *frontends.signature([query, *args, *kwargs.values()]))
        try:
            if key in taken:
                return True, None
        except TypeError:
            # Something that cannot be hashed is nothing that is taken, but the reason is another.
            explain(own, *args, **kwargs)
            raise
        choice = explain(own, *args, **kwargs)
        if choice.platform == "torch" and query.device.type != "cpu":
            return False, f"no kernel of keraunos can run the call: {'; '.join(choice.passed)}"
        if len(taken) >= 16384:
            taken.clear()
        taken.add(key)
        return True, None

    return verify


def _replace(old: Callable, new: Callable) -> None:
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "fla"]:
        if isinstance(module, ModuleType):
            for name in [name for name, x in vars(module).items() if x is old]:
                setattr(module, name, new)


register()
