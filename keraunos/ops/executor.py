"""The only dispatcher: every public operation goes through an Executor."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Self

from keraunos.frontends import outside_graphs, signature
from keraunos.frontends.array_types import Array
from keraunos.ops.cache import ConfigCache, PersistentCache
from keraunos.ops.invocation import Config
from keraunos.ops.kernel import Kernel
from keraunos.ops.registry import kernel_registry
from keraunos.ops.selection import Choice, ConfigSelectorChain, active_overlays, active_policy, default_policy
from keraunos.ops.tuner import Tuner

_log = logging.getLogger("keraunos")
_explaining: ContextVar[bool] = ContextVar("keraunos_explaining", default=False)


class _Explained(BaseException):
    """Carries the choice out of a call that :func:`explain` stopped before its kernel."""

    def __init__(self, choice: Choice):
        self.choice = choice


class Executor:
    """Runs operations: checks the call, chooses platform and configuration, launches.

    The choice for a call is remembered by its options and by all of its arrays that launches depend on. So a warm call
    costs a few microseconds here, and a jitted function nothing at all.

    Args:
        chain: how configurations are chosen.
    """

    def __init__(self, chain: ConfigSelectorChain):
        self.chain = chain
        self._remembered: dict[tuple, Callable] = {}
        self._seen: set[str] = set()

    def __reduce__(self) -> tuple[type[Self], tuple[ConfigSelectorChain]]:
        # Copied and pickled as part of a model; what it remembers of calls is made again.
        return type(self), (self.chain,)

    def __call__(self, kernel: Kernel, *args: Array | None, _cfg: Config | None = None, platform: str | None = None,
                 **kwargs: Any) -> Any:
        """Run ``kernel`` on ``args``.

        Args:
            kernel: the operation.
            args: its arrays, in the order of ``kernel.arguments``; absent ones are None.
            _cfg: an explicit configuration: wins over every cache and is never stored.
            platform: the platform asked for.
            kwargs: arrays by their names; the operation's options, hashable.

        Raises:
            ValueError, TypeError: the call is wrong, or no platform can run it.
        """
        if len(args) != len(kernel.arguments) and kernel.arguments:
            args, kwargs = kernel.in_order(args, kwargs)
        if active_overlays.get() or _explaining.get():
            return kernel.run(*args, cfg=self._choose(kernel, args, kwargs, _cfg, platform).cfg, **kwargs)
        # With the options' types: 1 and 1.0 equal True, but the checks may refuse them.
        key = (kernel, _cfg, platform, active_policy.get(), self.chain.cache.generation, kernel_registry.generation,
               *kwargs, *kwargs.values(), *map(type, kwargs.values()), *signature(args))
        try:
            run = self._remembered.get(key)
        except TypeError:
            # What cannot be hashed: lengths that are symbols of a graph, or something that the checks refuse.
            return kernel.run(*args, cfg=self._choose(kernel, args, kwargs, _cfg, platform).cfg, **kwargs)
        if run is None:
            cfg = self._choose(kernel, args, kwargs, _cfg, platform).cfg
            run = _checked(kernel.checker(*args, **kwargs), kernel.prepare(*args, cfg=cfg, **kwargs))
            if len(self._remembered) >= 16384:
                self._remembered.clear()
            self._remembered[(*key[:4], self.chain.cache.generation, *key[5:])] = run
        return run(*args)

    def _choose(self, kernel: Kernel, args: tuple, kwargs: dict[str, Any], cfg: Config | None,
                platform: str | None) -> Choice:
        inv = kernel.bind(*args, **kwargs)
        if check := kernel.checker(*args, **kwargs):
            check(*args)
        explaining = _explaining.get()
        choice = self.chain.choose(kernel, inv, cfg, platform, measure=not explaining)
        if explaining:
            raise _Explained(choice)
        if choice.key not in self._seen:
            self._seen.add(choice.key)
            _log.info("%s", choice)
        return choice


def _checked(check: Callable | None, run: Callable) -> Callable:
    """``run``, which looks at the values first that are known on the host."""
    if check is None:
        return run

    def checked(*args: Array | None) -> Any:
        check(*args)
        return run(*args)

    return checked


def create_default_executor() -> Executor:
    """A new executor with memory and disk caches and a tuner; ``KERAUNOS_AUTOTUNE_POLICY`` sets its policy.

    Raises:
        ValueError: the variable is neither ``autotune`` nor ``heuristics``.
    """
    if os.environ.get("KERAUNOS_LOG", "0") not in ("", "0") and not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("keraunos: %(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
    return Executor(ConfigSelectorChain(ConfigCache(), default_policy(), Tuner(), PersistentCache("configurations")))


default_executor = functools.cache(create_default_executor)
default_executor.__doc__ = "The executor that the public functions share, made at the first call."


@outside_graphs
def explain(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """The platform and configuration that a call would get, and the reason why each better one was not taken.

    Args:
        operation: a public function, such as ``keraunos.gla_attention``.
        args, kwargs: the call's own.

    Returns:
        A :class:`Choice`; ``print`` it to read all of it. No kernel is launched, and nothing is tuned or stored. For
        softmax attention the arguments are cast and a ``torch.Generator`` moves on, as in the call.

    Raises:
        ValueError, TypeError: what the call itself would raise.

    Example:
        >>> import jax.numpy as jnp, keraunos
        >>> q = jnp.ones((1, 64, 2, 16))
        >>> choice = keraunos.explain(keraunos.gla_attention, q, q, q, platform="xla")
        >>> choice.platform, choice.tier
        ('xla', 'heuristic')
    """
    if not callable(operation):
        raise TypeError(f"explain: {operation!r} is no operation; expected a function such as keraunos.gla_attention")
    token = _explaining.set(True)
    try:
        operation(*args, **kwargs)
    except _Explained as explained:
        return explained.choice
    finally:
        _explaining.reset(token)
    raise TypeError(f"explain: {operation!r} is no operation of keraunos: it returned without asking for a platform")
