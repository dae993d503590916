"""The calls to measure: an operation on arrays of some shape, forward or with gradients, and the bytes it must move."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from keraunos import decay, frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels import kernel_registry
from keraunos.ops.invocation import Invocation

# By the name of the public function.
OPERATIONS = {operation.function: operation for operation in kernel_registry.operations.values() if not operation.like}
# What calls of softmax attention have: arguments of its operation's ``invocation``. In those that are named "shared", 8
# query heads share each key head.
_WINDOW = {"causal": True, "window": (1023, 0)}
_SPECIAL = {"causal": True, "soft_cap": True, "sinks": 1, "segments": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "plain": {},
    "window": _WINDOW,
    "special": _SPECIAL,
    "shared": {"causal": True},
    "shared-window": _WINDOW,
    "shared-special": _SPECIAL,
}
# The gates of gated linear attention: their kind, and how many times ``logsigmoid(normal) / 16`` they are. 0: as the
# operation draws them.
GATES: dict[str, tuple[str, float]] = {
    "": ("vector", 0), "token": ("scalar", 1),
    "mild": ("vector", 1), "x4": ("vector", 4), "x16": ("vector", 16), "x64": ("vector", 64),
}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# The head dim of the models of these operations.
_HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """Sizes of one call: batch, tokens, heads, key and value dimension of a head."""

    B: int
    T: int
    H: int
    K: int = _HEAD_DIM
    V: int = _HEAD_DIM

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The shape that ``"B,T,H"``, ``"B,T,H,K"`` or ``"B,T,H,K,V"`` names; K is 128 and V is K unless given.

        Raises:
            ValueError: it names none.
        """
        sizes = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
        if not 3 <= len(sizes) <= 5 or min(sizes) < 1:
            raise ValueError(f"shape is {text!r}; expected B,T,H or B,T,H,K or B,T,H,K,V, such as 1,8192,64,128")
        return cls(*sizes, *sizes[3:4]) if len(sizes) == 4 else cls(*sizes)

    def __str__(self) -> str:
        dims = (self.K, self.V) if self.K != self.V else (self.K,) if self.K != _HEAD_DIM else ()
        return ",".join(map(str, (self.B, self.T, self.H, *dims)))


@dataclass(frozen=True)
class Workload:
    """One thing to measure.

    Attributes:
        operation: one of ``OPERATIONS``.
        shape: its sizes.
        dtype: of all arrays, the gates too; one of ``BYTES``.
        backward: forward plus backward, with gradients for every array.
        variant: of softmax attention, one of ``VARIANTS``; of gated linear attention, one of ``GATES``; else "".
    """

    operation: str
    shape: Shape
    dtype: str = "bfloat16"
    backward: bool = False
    variant: str = ""

    def __post_init__(self) -> None:
        known_variants: dict[str, Collection[str]] = {"attention": VARIANTS, "gla_attention": GATES}
        variants = known_variants.get(self.operation, ("",))
        if not self.variant:
            object.__setattr__(self, "variant", next(iter(variants)))
        for name, got, known in (("operation", self.operation, OPERATIONS), ("dtype", self.dtype, BYTES),
                                 ("variant", self.variant, variants)):
            if got not in known:
                raise ValueError(f"{name} is {got!r}; expected one of {', '.join(x for x in known if x)}")
        if self.shape.H % self._sharing:
            raise ValueError(
                f"shape has {self.shape.H} heads; expected a multiple of {self._sharing}, which share keys"
            )

    def __str__(self) -> str:
        return f"{' '.join(filter(None, (self.operation, self.variant)))} {self.shape} {self.dtype} {self.stage}"

    @property
    def _sharing(self) -> int:
        """Query heads for each key head."""
        return 8 if self.variant.startswith("shared") else 1

    @property
    def stage(self) -> str:
        """ "forward" or "forward+backward"."""
        return "forward+backward" if self.backward else "forward"

    @property
    def kernel(self) -> Any:
        """The operation's kernel."""
        return OPERATIONS[self.operation].kernel

    def invocation(self, framework: str) -> Invocation:
        """The description of the call on a framework's default device."""
        s = self.shape
        more = {**VARIANTS.get(self.variant, {}), "G": s.H // self._sharing}
        if self.operation == "gla_attention":
            more["gate"] = GATES[self.variant][0]
        return self.kernel.invocation(framework, self.dtype, B=s.B, T=s.T, H=s.H, K=s.K, V=s.V, **more)

    def inputs(self, framework: str, seed: int) -> list[Any]:
        """Random query, key, value and, for gates per token, g, on that device."""
        inv = self.invocation(framework)
        args, _ = self.kernel.sample(inv, seed)
        names = ("query", "key", "value", "g")
        found = [x for x, name in zip(args, self.kernel.arguments, strict=True) if x is not None and name in names]
        if self.operation == "gla_attention" and (times := GATES[self.variant][1]):
            normal = frontends.get(f"{framework}.measure").normal
            found[-1] = _gates(normal(found[-1].shape, "float32", 100 * seed + 9, inv.backend), times, self.dtype)
        return found

    def rest(self, framework: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays of softmax attention that are not inputs, and the options of its operation."""
        if self.operation != "attention":
            return {}, {}
        inv = self.invocation(framework)
        return self.kernel.extras(inv), self.kernel.sample_options(inv)

    def arguments(self, framework: str, seed: int) -> tuple[list[Any], list[Any] | None]:
        """The inputs, and a gradient of the output if there is a backward."""
        inputs, s = self.inputs(framework, seed), self.shape
        if not self.backward:
            return inputs, None
        normal, backend = frontends.get(f"{framework}.measure").normal, self.invocation(framework).backend
        return inputs, [normal((s.B, s.T, s.H, s.V), self.dtype, 1000 + seed, backend)]

    def log_decay(self) -> Array | None:
        """Lightning's constant decays ``[H]``: those of a layer in the middle of a model."""
        return decay.lightning(self.shape.H, 16, 32) if self.operation == "lightning_attention" else None

    @property
    def input_bytes(self) -> int:
        """Bytes of query, key, value and gates per token."""
        s = self.shape
        gates = {"vector": s.K, "scalar": 1}[GATES[self.variant][0]] if self.operation == "gla_attention" else 0
        return s.B * s.T * (s.H * (s.K + gates) + s.H // self._sharing * (s.K + s.V)) * BYTES[self.dtype]

    @property
    def output_bytes(self) -> int:
        """Bytes of the output."""
        return self.shape.B * self.shape.T * self.shape.H * self.shape.V * BYTES[self.dtype]

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that memory must move: each pass reads its inputs once and writes its outputs once.

        Forward reads the inputs and writes the output. Backward reads the inputs and the output's gradient, and writes
        the inputs' gradients. With K = V and in units of one array: 4 + 7 = 11 for lightning, 5 + 9 = 14 for GLA. (The
        decays of lightning and the states are smaller by orders of magnitude and do not count.)
        """
        forward = self.input_bytes + self.output_bytes
        return forward + self.backward * (forward + self.input_bytes)

    @property
    def products(self) -> int:
        """Floating-point operations of softmax attention's matrix products, where keys are visible; else 0.

        Forward has two products, of K and of V dimensions, backward five: one again, three of K, two of V in all.
        """
        if self.operation != "attention":
            return 0
        s, has = self.shape, VARIANTS[self.variant]
        window = has["window"][0] + 1 if "window" in has else s.T
        seen = s.T * s.T if not has.get("causal") else s.T * (s.T + 1) // 2
        seen -= max(s.T - window, 0) * (max(s.T - window, 0) + 1) // 2
        return 2 * s.B * s.H * seen * (s.K + s.V + self.backward * (3 * s.K + 2 * s.V))

    @property
    def bytes_kept(self) -> int:
        """Bytes of all arrays that the caller has in the end: inputs and output, with backward all their gradients."""
        return (self.input_bytes + self.output_bytes) * (1 + self.backward)

    def small(self) -> Workload:
        """A small workload with the options of this one, whose truth the reference can compute: two rows, 300 tokens.

        No chunk size divides the length. Softmax attention gets one row, with all its heads, and an even length, as JAX
        gives cuDNN no odd ones.
        """
        B, T = (1, 130) if self.products else (2, 300)
        return replace(self, shape=replace(self.shape, B=B, T=min(self.shape.T, T)))


def _gates(normal: Any, times: float, dtype: str) -> Any:
    """``times * logsigmoid(normal) / 16`` of a framework's array."""
    if frontends.framework_of(normal) == "jax":
        import jax

        return (jax.nn.log_sigmoid(normal) * (times / 16)).astype(dtype)
    import torch

    return (torch.nn.functional.logsigmoid(normal) * (times / 16)).to(getattr(torch, dtype))
