"""The implementations to measure: each platform of ours through each framework that it takes, and other libraries."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from workloads import Shape, Workload

import keraunos
from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels import kernel_registry
from keraunos.ops.executor import default_executor
from keraunos.ops.invocation import Config
from keraunos.ops.selection import Choice
from keraunos.types import MaskInfo


class Contestant(Protocol):
    """One implementation, called through one framework.

    Attributes:
        name: the platform or library.
        framework: whose arrays it is given.
        tolerance: its errors may be this many times those that ours may have.
    """

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def framework(self) -> str: ...  # noqa: D102

    @property
    def tolerance(self) -> float: ...  # noqa: D102

    def unsupported(self, workload: Workload) -> str | None:
        """The reason why it cannot run here, or None."""

    def about(self, workload: Workload) -> dict[str, Any]:
        """Further facts for the results: version, configuration."""

    def config(self, workload: Workload) -> Config | None:
        """The launch configuration that it takes for a workload, where that can be told."""

    def function(self, workload: Workload, log_decay: Array | None, cfg: Config | None = None) -> Callable:
        """``(query, key, value[, g]) -> output``, on the configuration it would take, or on ``cfg``."""


def label(contestant: Contestant) -> str:
    """The name of a contestant in tables."""
    return f"{contestant.name} ({contestant.framework})"


@dataclass(frozen=True)
class Ours:
    """A platform of this package; see :class:`Contestant`."""

    name: str
    framework: str
    tolerance: float = 1.0

    def unsupported(self, workload: Workload) -> str | None:
        """See :class:`Contestant`."""
        if importlib.util.find_spec(self.framework) is None:
            return f"{self.framework} is not installed"
        try:
            inv = workload.invocation(self.framework)
        except ImportError as error:
            return str(error)
        rows = [row for row in kernel_registry.rows(inv.op_id) if row.platform == self.name]
        reasons = [row.unsupported(inv) for row in rows]
        return None if None in reasons else "; and ".join(dict.fromkeys(map(str, reasons)))

    def about(self, workload: Workload) -> dict[str, Any]:
        """See :class:`Contestant`."""
        choice = self._choice(workload)
        source = kernel_registry.choose(workload.invocation(self.framework), self.name)[0].implementation.source_version
        return {"config": choice.cfg.to_json(), "config_from": choice.tier, "source": source}

    def config(self, workload: Workload) -> Config | None:
        """See :class:`Contestant`."""
        return self._choice(workload).cfg

    def function(self, workload: Workload, log_decay: Array | None, cfg: Config | None = None) -> Callable:
        """See :class:`Contestant`."""
        operation: Any = getattr(keraunos, workload.operation)
        options: dict[str, Any] = {"platform": self.name, "cfg": cfg}
        if workload.operation == "attention":
            extras, more = workload.rest(self.framework)
            info = MaskInfo(query_segments=extras.get("query_segments"), key_segments=extras.get("key_segments"))
            options |= {"causal": more["causal"], "sliding_window": more["window"], "logits_soft_cap": more["soft_cap"]}
            return lambda q, k, v: operation(q, k, v, None, None, extras.get("sinks"), mask_info=info, dtype=None,
                                             **options)
        if log_decay is not None:
            options["log_decay"] = log_decay
        return lambda *arrays: operation(*arrays, **options)

    def _choice(self, workload: Workload) -> Choice:
        inv = workload.invocation(self.framework)
        return default_executor().chain.choose(workload.kernel, inv, None, self.name, measure=False)


@dataclass(frozen=True)
class Fla:
    """flash-linear-attention (the package fla-core); see :class:`Contestant`."""

    name: str = "fla"
    framework: str = "torch"
    # Enough to see that it computes the same; how exact it is is its own affair.
    tolerance: float = 4.0

    def unsupported(self, workload: Workload) -> str | None:
        """See :class:`Contestant`."""
        if workload.products:
            return "is measured with linear attention only"
        if workload.variant == "token":
            return "is measured without gates per token, whose gradients it refuses"
        for module, package in (("torch", "torch"), ("fla", "fla-core")):
            if importlib.util.find_spec(module) is None:
                return f"{package} is not installed"
        import torch

        return None if torch.cuda.is_available() else "needs a GPU"

    def about(self, workload: Workload) -> dict[str, Any]:
        """See :class:`Contestant`."""
        return {"version": importlib.import_module("fla").__version__}

    def config(self, workload: Workload) -> Config | None:
        """See :class:`Contestant`."""
        return None

    def function(self, workload: Workload, log_decay: Array | None, cfg: Config | None = None) -> Callable:
        """See :class:`Contestant`."""
        import torch

        # Layout [B, T, H, dim], natural logs and a scale of K ** -0.5 are its defaults as they are ours.
        if log_decay is not None:
            simple = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
            gamma = torch.tensor(log_decay, device="cuda")
            return lambda q, k, v: simple(q, k, v, g_gamma=gamma)[0]
        gated = importlib.import_module("fla.ops.gla").chunk_gla
        return lambda q, k, v, g: gated(q, k, v, g)[0]


@dataclass(frozen=True)
class Vendor:
    """A framework's own softmax attention: cuDNN from JAX, PyTorch's best for the device; see :class:`Contestant`."""

    name: str
    framework: str
    # How exact it is is its own affair.
    tolerance: float = 4.0

    def unsupported(self, workload: Workload) -> str | None:
        """See :class:`Contestant`."""
        if workload.variant not in ("causal", "plain", "shared"):
            return f"is not measured with {workload.variant or workload.operation}"
        if importlib.util.find_spec(self.framework) is None:
            return f"{self.framework} is not installed"
        backend = frontends.get(self.framework).default_device().backend
        return None if self.framework == "torch" or backend == "gpu" else "needs a GPU"

    def about(self, workload: Workload) -> dict[str, Any]:
        """See :class:`Contestant`."""
        return {}

    def config(self, workload: Workload) -> Config | None:
        """See :class:`Contestant`."""
        return None

    def function(self, workload: Workload, log_decay: Array | None, cfg: Config | None = None) -> Callable:
        """See :class:`Contestant`."""
        causal = bool(workload.rest(self.framework)[1]["causal"])
        if self.framework == "jax":
            import jax

            return functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
        import torch

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            shared = q.shape[1] != k.shape[1]
            own = torch.nn.functional.scaled_dot_product_attention
            return own(q, k, v, is_causal=causal, enable_gqa=shared).transpose(1, 2)

        return run


PEERS: dict[str, Contestant] = {"fla": Fla(), "cudnn": Vendor("cudnn", "jax"), "sdpa": Vendor("sdpa", "torch")}


def ours(operation: str) -> list[Contestant]:
    """Every platform that is registered for a public operation, through every framework that it takes."""
    op_id = Workload(operation, Shape(1, 1, 1)).kernel.op_id
    pairs = dict.fromkeys((row.platform, f) for row in kernel_registry.rows(op_id) for f in row.frameworks)
    return [Ours(platform, framework) for platform, framework in pairs]


def find(operation: str, platforms: list[str], against: list[str]) -> list[Contestant]:
    """The contestants that the names allow: platforms (all of ours if empty), and those to compare with.

    Raises:
        ValueError: a name is unknown.
    """
    own = ours(operation)
    names = list(dict.fromkeys(c.name for c in own))
    for name in platforms:
        if name not in names:
            raise ValueError(f"platform is {name!r}; expected one of {', '.join(names)}")
    for name in against:
        if name not in (*names, *PEERS):
            raise ValueError(f"peer is {name!r}; expected one of {', '.join([*PEERS, *names])}")
    wanted = {*(platforms or names), *against}
    return [*(c for c in own if c.name in wanted), *(PEERS[name] for name in against if name in PEERS)]
