"""What is measured: an operation on arrays of some shape, forward or with its gradients, and the bytes it must move."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keraunos import decay, frontends
from keraunos.kernels.linear_attention.operation import LinearOperation
from keraunos.ops.kernel import Invocation

# Public operation -> its class.
OPERATIONS = {
    "lightning_attention": "keraunos.modules.lightning_attention:LightningAttention",
    "gla_attention": "keraunos.modules.gla_attention:GLAttention",
}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# What the models of these operations have.
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
    """

    operation: str
    shape: Shape
    dtype: str = "bfloat16"
    backward: bool = False

    def __post_init__(self):
        for name, got, known in (("operation", self.operation, OPERATIONS), ("dtype", self.dtype, BYTES)):
            if got not in known:
                raise ValueError(f"{name} is {got!r}; expected one of {', '.join(known)}")

    def __str__(self) -> str:
        return f"{self.operation} {self.shape} {self.dtype} {self.stage}"

    @property
    def stage(self) -> str:
        """ "forward" or "forward+backward"."""
        return "forward+backward" if self.backward else "forward"

    @property
    def kernel(self) -> LinearOperation:
        """The operation's kernel."""
        return _kernel(self.operation)

    def invocation(self, framework: str) -> Invocation:
        """The description of the call on a framework's default device."""
        s = self.shape
        return self.kernel.invocation(framework, self.dtype, B=s.B, T=s.T, H=s.H, K=s.K, V=s.V)

    def inputs(self, framework: str, seed: int) -> list[Any]:
        """Random query, key, value and, for gates per token, g, on that device."""
        args, _ = self.kernel.sample(self.invocation(framework), seed)
        return [x for x, name in zip(args, self.kernel.arguments, strict=True) if x is not None and name != "g_gamma"]

    def arguments(self, framework: str, seed: int) -> tuple[list[Any], list[Any] | None]:
        """The inputs, and a gradient of the output if there is a backward."""
        inputs, s = self.inputs(framework, seed), self.shape
        if not self.backward:
            return inputs, None
        normal, backend = frontends.get(f"{framework}_measure").normal, self.invocation(framework).backend
        return inputs, [normal((s.B, s.T, s.H, s.V), self.dtype, 1000 + seed, backend)]

    def log_decay(self) -> np.ndarray | None:
        """Lightning's constant decays ``[H]``: those of a layer in the middle of a model."""
        return decay.lightning(self.shape.H, 16, 32) if self.operation == "lightning_attention" else None

    @property
    def input_bytes(self) -> int:
        """Bytes of query, key, value and gates per token."""
        s = self.shape
        gates = s.K if self.operation == "gla_attention" else 0
        return s.B * s.T * s.H * (2 * s.K + s.V + gates) * BYTES[self.dtype]

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
    def bytes_kept(self) -> int:
        """Bytes of all arrays that the caller has in the end: inputs and output, with backward all their gradients."""
        return (self.input_bytes + self.output_bytes) * (1 + self.backward)

    def small(self) -> Workload:
        """The same kind of call, small enough for the reference: two rows, a length that no chunk divides."""
        return replace(self, shape=replace(self.shape, B=2, T=min(self.shape.T, 300)))


@functools.cache
def _kernel(operation: str) -> LinearOperation:
    module, name = OPERATIONS[operation].split(":")
    return getattr(importlib.import_module(module), name)()
