"""The sizes of the model, for every framework."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from language_model import DemoError

Kind = Literal["lightning", "gla", "delta"]

VOCABULARY = 256
# A learned gate keeps sigmoid(x) ** (1 / 16) of the state per token, as in the GLA paper: without the root a fresh
# model would forget half of everything at every byte.
GATE_TEMPERATURE = 16.0
# How bytes are drawn from the logits.
TEMPERATURE = 0.7


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the default is what learns fastest per second on two CPU cores.

    Args:
        width: Channels of the residual stream.
        heads: Attention heads; each has `width // heads` channels for keys and as many for values.
        blocks: The kind of attention in each block, from the first to the last.
        context: Bytes per training window.
    """

    width: int = 96
    heads: int = 3
    blocks: tuple[Kind, ...] = ("lightning", "gla", "lightning")
    context: int = 256

    def alike(self, kind: str) -> "ModelConfig":
        """The model of these sizes with one kind of attention in all blocks.

        Raises:
            DemoError: There is no such kind.
        """
        found = next((known for known in get_args(Kind) if known == kind), None)
        if found is None:
            raise DemoError(f"--layers {kind}: expected {', '.join(get_args(Kind))}")
        return replace(self, blocks=(found,) * len(self.blocks))

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.width // self.heads

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that softmax attention with the same layers would keep of each token: a key and a value, in float32."""
        return len(self.blocks) * 2 * self.width * 4
