"""A stand-in for fla 0.6.0: its registry of backends, and functions of its packages that compute nothing."""

import functools
import inspect
import logging
import os
import types

# Those that fla 0.6.0 asks backends for; the others it does not.
DISPATCHED = {"chunk_kda", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla"}
PACKAGES = {
    "gated_delta_rule": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"],
    "delta_rule": ["chunk_delta_rule", "fused_recurrent_delta_rule"],
    "kda": ["chunk_kda", "fused_recurrent_kda"],
    "gla": ["chunk_gla", "fused_recurrent_gla"],
    "simple_gla": ["chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla"],
    "lightning_attn": ["chunk_lightning_attn", "fused_recurrent_lightning_attn"],
    "retention": ["chunk_retention", "fused_chunk_retention", "fused_recurrent_retention", "parallel_retention"],
}
log = logging.getLogger("fla.backends")


class BaseBackend:
    backend_type, env_var, priority = "base", None, 5

    def refused(self, function, args, kwargs):
        """The reason why a call is not taken, or None."""
        if self.env_var and os.environ.get(self.env_var) == "0":
            return f"{self.env_var} is 0"
        try:
            taken, reason = getattr(self, f"{function}_verifier")(*args, **kwargs)
        except Exception as error:
            return str(error)
        return None if taken else reason


class Registry:
    def __init__(self):
        self.backends = {}

    def dispatch(self, default):
        name = default.__name__

        @functools.wraps(default)
        def call(*args, **kwargs):
            for backend in sorted(self.backends.values(), key=lambda backend: backend.priority):
                if hasattr(backend, name):
                    reason = backend.refused(name, args, kwargs)
                    log.info("%s -> %s %s", name, backend.backend_type, reason and f"rejected: {reason}")
                    if reason is None:
                        return getattr(backend, name)(*args, **kwargs)
            return default(*args, **kwargs)

        return call


def modules():
    """The package, as what ``sys.modules`` holds of it."""
    of_packages, of_functions = {}, {}

    def register(entry):
        def add(backend):
            registry = of_packages[entry] if isinstance(entry, str) else of_functions[inspect.unwrap(entry)]
            registry.backends[backend.backend_type] = backend()
            return backend

        return add

    def dispatch(entry):
        if isinstance(entry, str):
            return of_packages.setdefault(entry, Registry()).dispatch
        return of_functions.setdefault(inspect.unwrap(entry), Registry()).dispatch(entry)

    def made(name, **names):
        found[name] = types.ModuleType(name)
        vars(found[name]).update(names, __path__=[])

    def function(name):
        def default(*args, **kwargs):
            raise NotImplementedError(f"{name}: fla's own kernel")

        default.__name__ = default.__qualname__ = name
        if name == "chunk_gated_delta_rule":
            return dispatch("gated_delta_rule")(default)
        return dispatch(default) if name in DISPATCHED else default

    found = {}
    made("fla")
    made("fla.ops")
    made("fla.backends", BaseBackend=BaseBackend, register=register, dispatch=dispatch)
    everything = {}
    for package, names in PACKAGES.items():
        functions = {name: function(name) for name in names}
        everything |= functions
        made(f"fla.ops.{package}", **functions)
    # A layer that took the functions before a backend was there.
    made("fla.layers", **everything)
    return found
