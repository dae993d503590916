"""PyTorch: which strides kernels can take, and tensors that have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Arguments that kernels take without strides, and those of tokens.
_DENSE, _TOKENS = ("g_gamma", "initial_state", "targets"), ("query", "key", "value", "g")


# Kernels count the values between the rows of a tile, which has 128 at most, in 32 bits.
_LONGEST_STRIDE = 2**31 // 128


def fitting(names: Sequence[str], strided: Sequence[str] = ()) -> list[Callable | None]:
    """For each argument, what says whether kernels can take a tensor as it is; None: whatever its strides are."""
    kinds: dict[str, Callable] = {
        **dict.fromkeys(_DENSE, torch.Tensor.is_contiguous),
        **dict.fromkeys(_TOKENS, _has_near_rows),
    }
    return [None if name in strided else kinds.get(name, _has_rows) for name in names]


def _has_rows(x: torch.Tensor) -> bool:
    """Kernels take any strides but the last one's, which is 1."""
    return x.stride(-1) == 1


def _has_near_rows(x: torch.Tensor) -> bool:
    """Nor do they take tokens so far apart as those of a huge batch that lies in memory token by token."""
    return _has_rows(x) and (x.ndim < 4 or x.stride(1) < _LONGEST_STRIDE or x.shape[1] == 1)


def rows(x: torch.Tensor) -> torch.Tensor:
    """A tensor as kernels take it."""
    return x if _has_near_rows(x) else x.contiguous()


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if rows of its last dimension do not begin at multiples of 16 bytes."""
    steps = [step for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    if x.data_ptr() % 16 == 0 and all(step > 0 and step * x.itemsize % 16 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)
