"""Which configuration a call gets: explicit, overlay, memory, disk, shipped, autotune, heuristic."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from keraunos.ops.cache import ConfigCache, PersistentCache, cache_key, find_shipped
from keraunos.ops.invocation import Config, Invocation, Platform
from keraunos.ops.kernel import Kernel
from keraunos.ops.registry import Row, kernel_registry, public_name
from keraunos.ops.tuner import Tuner

_log = logging.getLogger("keraunos")


@dataclass(frozen=True)
class AutotunePolicy:
    """The policy for a call that no cache knows.

    Attributes:
        allow_autotune: False: never measure anything.
        cache_miss_fallback: ``"autotune"`` or ``"heuristics"``.
        validate_backward: time forward plus backward, and drop candidates whose gradient is wrong.

    Raises:
        ValueError: ``cache_miss_fallback`` is neither.
    """

    allow_autotune: bool = True
    cache_miss_fallback: str = "heuristics"
    validate_backward: bool = False

    def __post_init__(self) -> None:
        if self.cache_miss_fallback not in ("autotune", "heuristics"):
            raise ValueError(
                f"AutotunePolicy: cache_miss_fallback is {self.cache_miss_fallback!r}; "
                "expected 'autotune' or 'heuristics' (KERAUNOS_AUTOTUNE_POLICY sets the default)"
            )


def default_policy() -> AutotunePolicy:
    """The policy that ``KERAUNOS_AUTOTUNE_POLICY`` sets: ``autotune`` or ``heuristics``, which is the default.

    Raises:
        ValueError: the variable is neither.
    """
    return AutotunePolicy(cache_miss_fallback=os.environ.get("KERAUNOS_AUTOTUNE_POLICY") or "heuristics")


active_policy: ContextVar[AutotunePolicy | None] = ContextVar("keraunos_policy", default=None)
active_overlays: ContextVar[tuple[ConfigCache, ...]] = ContextVar("keraunos_overlays", default=())


@contextlib.contextmanager
def policy_override(policy: AutotunePolicy | None = None, **changes: Any) -> Iterator[AutotunePolicy]:
    """Use another policy inside the block, in this thread or task only.

    Args:
        policy: the policy; if None, that of the block around this one, or else the default policy.
        changes: fields to change in it.

    Raises:
        TypeError: ``policy`` is no policy, or there is no such field.
        ValueError: a field is outside its range.

    Example:
        >>> import keraunos
        >>> with keraunos.policy_override(cache_miss_fallback="autotune") as policy:
        ...     policy.cache_miss_fallback
        'autotune'
    """
    if policy is not None and not isinstance(policy, AutotunePolicy):
        raise TypeError(
            f"policy_override: policy is of type {type(policy).__qualname__}; expected an AutotunePolicy or None: "
            "inside the block all selectors follow it, and fields to change go by name, such as allow_autotune=False"
        )
    if unknown := sorted(set(changes) - {x.name for x in fields(AutotunePolicy)}):
        raise TypeError(
            f"policy_override: got {', '.join(unknown)}; expected fields of AutotunePolicy: "
            f"{', '.join(x.name for x in fields(AutotunePolicy))}"
        )
    changed = replace(policy or active_policy.get() or default_policy(), **changes)
    token = active_policy.set(changed)
    try:
        yield changed
    finally:
        active_policy.reset(token)


@contextlib.contextmanager
def overlay_cache(cache: ConfigCache | Mapping[str, Config]) -> Iterator[ConfigCache]:
    """Look configurations up here first inside the block, in this thread or task only; the innermost overlay wins.

    Args:
        cache: from keys (as ``keraunos.explain`` shows them) to configurations.

    Raises:
        TypeError: an entry is no configuration.
    """
    overlay = cache if isinstance(cache, ConfigCache) else ConfigCache(cache)
    token = active_overlays.set((overlay, *active_overlays.get()))
    try:
        yield overlay
    finally:
        active_overlays.reset(token)


@dataclass(frozen=True)
class Choice:
    """The platform and configuration that a call gets, and how they were found.

    Attributes:
        cfg: the complete configuration.
        tier: the tier that gave it: explicit, overlay, memory, disk, shipped, autotune or heuristic.
        platform: the platform that computes the call.
        key: the call's key in the caches.
        passed: why platforms of a higher priority were not taken, each once.
        missed: for each tier before ``tier``, why it had no configuration.
    """

    cfg: Config
    tier: str
    platform: str
    key: str
    passed: list[str] = field(default_factory=list)
    missed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.platform}: {self.cfg.to_json()} ({self.tier})", f"  key: {self.key}"]
        lines += [f"  passed over {reason}" for reason in self.passed]
        lines += [f"  {tier}: {reason}" for tier, reason in self.missed.items()]
        return "\n".join(lines)


class ConfigSelectorChain:
    """Finds a call's platform and configuration.

    Args:
        cache: the memory tier.
        policy: what to do for a call that no cache knows; :func:`policy_override` wins over it.
        tuner: measures candidates; None: nothing is ever tuned.
        persistent: the disk tier; None: nothing is read or stored.
    """

    def __init__(
        self,
        cache: ConfigCache | None = None,
        policy: AutotunePolicy | None = None,
        tuner: Tuner | None = None,
        persistent: PersistentCache | None = None,
    ):
        self.cache = cache if cache is not None else ConfigCache()
        self._own_policy = policy or AutotunePolicy()
        self.tuner = tuner
        self.persistent = persistent
        self._failed: dict[tuple[str, bool], str] = {}
        # One tuning at a time: two would disturb each other's clocks, and one key needs only one.
        self._tuning = threading.Lock()

    def __reduce__(self) -> tuple[type[Self], tuple]:
        # A lock is not copied or pickled.
        return type(self), (self.cache, self._own_policy, self.tuner, self.persistent)

    @property
    def policy(self) -> AutotunePolicy:
        """The policy in force."""
        return active_policy.get() or self._own_policy

    def choose(self, kernel: Kernel, inv: Invocation, cfg: Config | None = None, platform: str | None = None,
               *, measure: bool = True) -> Choice:
        """The platform and configuration for a call.

        Args:
            kernel: the operation.
            inv: the call.
            cfg: the explicit configuration; its platform counts if ``platform`` leaves the choice.
            platform: the platform asked for.
            measure: False: where this would tune, tell so instead (for ``explain``).

        Raises:
            ValueError: ``cfg`` and ``platform`` name different platforms, a name is unknown, or the platform has not a
                field that ``cfg`` sets.
            TypeError: ``cfg`` is no configuration.
            UnsupportedError: no platform that is allowed can run the call.
        """
        row, passed = self._row(inv, cfg, platform)
        if cfg is not None:
            _refuse_unknown(cfg, row)
        missed: dict[str, str] = {}
        key, backward, config = cache_key(inv, row), self.policy.validate_backward, row.implementation.config
        wanted = key, inv.device, config or kernel.config, backward
        overlays = [entry for x in active_overlays.get() if (entry := x.get(key)) is not None]
        tiers: dict[str, Callable[[], Config | str]] = {
            "explicit": lambda: "no cfg was given" if cfg is None else cfg,
            "overlay": lambda: overlays[0] if overlays else "no entry" if active_overlays.get() else "none is in force",
            "memory": lambda: self.cache.get(key, backward) or "no entry",
            "disk": lambda: "not in use" if self.persistent is None else self.persistent.find(*wanted),
            "shipped": lambda: find_shipped(*wanted),
            "autotune": lambda: self._autotune(kernel, inv, row, key, measure),
        }
        for tier, look in tiers.items():
            found = look()
            if isinstance(found, Config):
                if tier == "disk":
                    self.cache.put(key, found, backward)
                # It may leave fields open; the heuristic fills them.
                return Choice(kernel.heuristic_cfg(inv, row, found), tier, row.platform, key, passed, missed)
            missed[tier] = found
        return Choice(kernel.heuristic_cfg(inv, row), "heuristic", row.platform, key, passed, missed)

    def _row(self, inv: Invocation, cfg: Config | None, platform: str | None) -> tuple[Row, list[str]]:
        backend, name = "any", public_name(inv.op_id)
        if cfg is not None:
            if not isinstance(cfg, Config):
                raise TypeError(f"{name}: cfg is {cfg!r}; expected a configuration such as keraunos.ops.Config")
            backend = cfg.backend
            if platform in (None, Platform.AUTO):
                platform = cfg.platform
            elif cfg.platform not in (Platform.AUTO, platform):
                raise ValueError(f"{name}: platform={platform!r}, but cfg is for {cfg.platform!r}; expected the same")
        return kernel_registry.choose(inv, platform, backend)

    def _autotune(self, kernel: Kernel, inv: Invocation, row: Row, key: str, measure: bool) -> Config | str:
        policy = self.policy
        backward = policy.validate_backward
        if self.tuner is None:
            return "no tuner"
        if not policy.allow_autotune or policy.cache_miss_fallback != "autotune":
            return "the policy says heuristics"
        if failed := self._failed.get((key, backward)):
            return failed
        candidates = kernel.candidate_cfgs(inv, row)
        if len(candidates) < 2:
            return f"{row.platform} has nothing to tune for this call"
        if not measure:
            return f"would time {len(candidates)} candidates at the first call"
        with self._tuning:
            # Another thread may have tuned this key while this one waited.
            if (found := self.cache.get(key, backward)) is not None:
                return found
            return self._tune(self.tuner, kernel, inv, key, candidates, backward)

    def _tune(self, tuner: Tuner, kernel: Kernel, inv: Invocation, key: str, candidates: list[Config],
              backward: bool) -> Config | str:
        try:
            result = tuner.tune(kernel, inv, candidates, backward=backward)
        except Exception as error:
            # Whatever went wrong, such as too little memory for inputs of its own, the call can do without tuning.
            failed = f"it could not be done: {type(error).__name__}: {error}"
        else:
            if result.winner is not None:
                self.cache.put(key, result.winner, backward)
                if self.persistent is not None:
                    self.persistent.put(key, inv.device, result.to_json())
                return result.winner
            failed = f"all candidates failed: {result.reasons()}"
        self._failed[key, backward] = failed
        _log.warning("autotune of %s: %s; the heuristic's configuration is used", key, failed)
        return failed


def _refuse_unknown(cfg: Config, row: Row) -> None:
    """Refuse fields that would change nothing: what the user set is not what would run."""
    name, has = public_name(row.algorithm), row.implementation.fields
    if unknown := sorted(set(cfg.to_json()) - {"platform", "backend"} - set(has)):
        raise ValueError(
            f"{name}: cfg has {', '.join(unknown)}, which platform {row.platform!r} does not have; "
            f"expected {', '.join(has) or 'no field: there is nothing to configure'}"
        )
