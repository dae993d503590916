"""PyTorch: values of tensors that are known on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from keraunos import frontends


def readable(tensors: Sequence[torch.Tensor | None], everywhere: bool) -> bool:
    """Whether calls on tensors like these have values that may be read; ``everywhere``: those on a GPU, too."""
    if frontends.get("torch").signature(tensors) is None:
        return False  # traced, or transformed, or no values are there
    return everywhere or tensors[0].device.type == "cpu"  # type: ignore[union-attr]


def read(tensors: Sequence[torch.Tensor], look: Callable[..., None], everywhere: bool) -> None:
    """``look`` at the values of tensors that are :func:`readable`."""
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return  # there are no values yet
    look(*map(_values, tensors))


def number(x: torch.Tensor) -> int | None:
    """The value of a tensor without dimensions, if it is known on the host."""
    return int(x) if readable([x], False) else None


def constant(x: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """The NumPy array as a tensor on the device of ``like``."""
    return frontends.get("torch").constant(x, like.device)


def _values(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
