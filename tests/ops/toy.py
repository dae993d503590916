"""An operation that is no linear recurrence: y = 2 x, with candidates that are slow, wrong or broken on demand."""

import contextlib
import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from keraunos.kernels import kernel_registry
from keraunos.ops import Executor, Invocation, Kernel
from keraunos.ops.cache import ConfigCache, PersistentCache
from keraunos.ops.selection import AutotunePolicy, ConfigSelectorChain
from keraunos.ops.tuner import Tuner


class Toy(Kernel):
    op_id = "toy"

    def bind(self, x, *, twice=False):
        if x.ndim != 2:
            raise ValueError(f"toy: x has shape {x.shape}; expected [B, T]")
        dims = {"B": x.shape[0], "T": x.shape[1]}
        return Invocation("toy", "jax", "cpu", "toy cpu", dims, frozenset("BT"), {"x": (x.dtype.name, 2)},
                          {"twice": twice})

    def sample(self, inv, seed):
        rng = np.random.default_rng(seed)
        return (jnp.asarray(rng.normal(size=(inv.dims["B"], inv.dims["T"])), inv.arrays["x"][0]),), dict(inv.options)

    def check_calls(self, inv, cfgs):
        return [replace(inv, dims={"B": 1, "T": 9})]

    def reference(self, args, kwargs, dtype):
        return (2 * args[0].astype(dtype),)

    def reference_vjp(self, args, kwargs, cotangents, dtype):
        return (2 * cotangents[0].astype(dtype),)


SLOW = 300


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def double(x, gradient):
    return 2 * x


double.defvjp(lambda x, gradient: (2 * x, None), lambda gradient, _, dy: (gradient * dy,))


def compute(x, cfg, work=0, factor=1.0, gradient=2.0):
    """``2 * factor * x`` after ``work`` useless products; ``gradient`` is what its derivative claims to be."""
    waste = jax.lax.fori_loop(0, work, lambda _, a: a @ a / 128, jnp.ones((128, 128)))
    return (double(x, gradient).astype(jnp.float32) * factor + 0 * waste[0, 0]).astype(x.dtype)


@contextlib.contextmanager
def planted(behaviour, calls=None):
    """Register the operation with one candidate per key of ``behaviour``: block_q -> arguments of :func:`compute`.

    The first is the heuristic's. A behaviour may be an exception, which the candidate raises.
    """

    def fn(x, *, cfg, twice=False):
        if calls is not None:
            calls.append(cfg.block_q)
        how = behaviour[cfg.block_q]
        if isinstance(how, Exception):
            raise how
        return compute(x, cfg, **how)

    sizes = list(behaviour)
    kernel_registry.register(
        "toy", "xla", "any", 1, frameworks=("jax",), fields=("block_q",),
        heuristic=lambda inv, cfg: replace(cfg, block_q=sizes[0]),
        candidates=lambda inv, cfg: [replace(cfg, block_q=size) for size in sizes],
    )(fn)
    try:
        yield Toy()
    finally:
        for row in kernel_registry.rows("toy"):
            kernel_registry.unregister(row)


def executor(directory=None, tuner=None, cache=None, **policy):
    """An executor that tunes, with a cache of its own."""
    policy = AutotunePolicy(**{"cache_miss_fallback": "autotune", **policy})
    persistent = None if directory is None else PersistentCache("configurations", directory)
    tuner = tuner or Tuner(warmup=1, iters=5, budget=30)
    return Executor(ConfigSelectorChain(ConfigCache() if cache is None else cache, policy, tuner, persistent))


def choose(executor, kernel, *args, cfg=None, **options) -> object:
    """The choice that a call gets."""
    return executor.chain.choose(kernel, kernel.bind(*args, **options), cfg)
