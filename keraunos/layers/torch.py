"""The layers as ``torch.nn.Module``s."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
except ModuleNotFoundError as error:
    message = "keraunos.layers.torch: torch is not installed: pip install 'keraunos[torch]'"
    raise ImportError(message, name=error.name) from error

from keraunos.layers import delta, mixers
from keraunos.layers.delta import DeltaNames
from keraunos.layers.mixers import Cache, Names

__all__ = [
    "Cache", "DeltaNames", "GatedDeltaNet", "GatedLinearAttention", "KimiDeltaAttention", "LightningAttention", "Names",
    "SimpleGatedLinearAttention",
]


class _Norm(nn.RMSNorm):
    """RMSNorm over the last dimension; with groups, the weight is for each value of the last two."""

    def __init__(self, features: int, groups: int, **options: Any) -> None:
        super().__init__(features, **options)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        # Autocast would leave it in another dtype than x, for which PyTorch warns.
        weight = self.weight.to(x.dtype) if self.elementwise_affine else None
        if weight is None or self.groups == 1:
            return functional.rms_norm(x, x.shape[-1:], weight, self.eps)
        return functional.rms_norm(x, x.shape[-1:], eps=self.eps) * weight.view(x.shape[-2:])


class _Conv(nn.Conv1d):
    """A convolution of each channel by itself, of ``[B, T, channels]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class _Maker:
    def __init__(self, device: Any = None, dtype: torch.dtype | None = None) -> None:
        self.options: Any = dict(device=device, dtype=dtype)

    def linear(self, features: int, outputs: int, bias: bool = False, inward: bool = False) -> nn.Module:
        return nn.Linear(features, outputs, bias, **self.options)

    def low_rank(self, features: int, rank: int, outputs: int, bias: bool = True) -> Any:
        return nn.Sequential(self.linear(features, rank), self.linear(rank, outputs, bias=bias))

    def conv(self, channels: int, size: int, bias: bool) -> nn.Module:
        return _Conv(channels, channels, size, groups=channels, bias=bias, **self.options)

    def norm(self, features: int, eps: float, groups: int = 1, affine: bool = True) -> nn.Module:
        return _Norm(features, groups, eps=eps, elementwise_affine=affine, **self.options)

    @staticmethod
    def group() -> nn.Module:
        return nn.Module()

    def parameter(self, shape: tuple[int, ...], low: float, high: float, change: Callable) -> nn.Parameter:
        dtype = torch.promote_types(self.options["dtype"] or torch.get_default_dtype(), torch.float32)
        drawn = torch.empty(shape, device=self.options["device"], dtype=dtype).uniform_(low, high)
        return nn.Parameter(change(drawn))


class _Layer(nn.Module):
    """The part of :class:`keraunos.layers.mixers.Layer` that is PyTorch's."""

    xp: Any = torch
    arrays: Any = Tensor
    make: Any = _Maker
    take = staticmethod(torch.take_along_dim)
    cast = staticmethod(Tensor.to)
    activations: ClassVar[Any] = {
        "silu": functional.silu, "swish": functional.silu, "relu": functional.relu, "sigmoid": torch.sigmoid,
        "log_sigmoid": functional.logsigmoid, "gelu": functools.partial(functional.gelu, approximate="tanh"),
    }

    @property
    def known_dtypes(self) -> list[torch.dtype]:
        return [x.dtype for x in self.parameters()]

    @property
    def known_device(self) -> torch.device | None:
        # Weights that are offloaded are on the device meta. An FSDP2 parameter's device is that of its shard.
        return next((x.device for x in (*self.parameters(), *self.buffers()) if not x.is_meta), None)

    def moved(self, cache: Any, like: Tensor) -> Cache:
        state, conv, length = cache
        return Cache(state.to(like.device), tuple(x.to(like.device) for x in conv), length.to(like.device))

    def arange(self, n: int, like: Tensor) -> Tensor:
        return torch.arange(n, device=like.device)

    def zeros(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return like.new_zeros(shape, dtype=dtype)

    def asarray(self, values: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=like.device)


class GatedLinearAttention(mixers.GatedLinearAttention, _Layer):
    __doc__ = mixers.GatedLinearAttention.__doc__


class SimpleGatedLinearAttention(mixers.SimpleGatedLinearAttention, _Layer):
    __doc__ = mixers.SimpleGatedLinearAttention.__doc__


class LightningAttention(mixers.LightningAttention, _Layer):
    __doc__ = mixers.LightningAttention.__doc__


class GatedDeltaNet(delta.GatedDeltaNet, _Layer):
    __doc__ = delta.GatedDeltaNet.__doc__


class KimiDeltaAttention(delta.KimiDeltaAttention, _Layer):
    __doc__ = delta.KimiDeltaAttention.__doc__
