"""The layers as Flax NNX modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    from flax import nnx
except ModuleNotFoundError as error:
    message = f"keraunos.layers.flax: {error.name} is not installed: pip install 'keraunos[flax]'"
    raise ImportError(message, name=error.name) from error

from keraunos.layers import delta, mixers
from keraunos.layers.delta import DeltaNames
from keraunos.layers.mixers import Cache, Names

__all__ = [
    "Cache", "DeltaNames", "GatedDeltaNet", "GatedLinearAttention", "KimiDeltaAttention", "LightningAttention", "Names",
    "SimpleGatedLinearAttention", "load_state_dict", "state_dict",
]


class _Maker:
    def __init__(self, rngs: nnx.Rngs, dtype: Any = None, param_dtype: Any = jnp.float32,
                 heads: str | None = None) -> None:
        self.options: Any = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.heads = heads

    def _sharded(self, *of_heads: bool) -> dict[str, Any]:
        """The sharding of parameters: which axes of a kernel are heads; a bias has the last one."""
        if self.heads is None:
            return {}
        axes = tuple(self.heads if sharded else None for sharded in of_heads)
        return {"kernel_metadata": {"out_sharding": axes}, "bias_metadata": {"out_sharding": axes[-1:]}}

    def linear(self, features: int, outputs: int, bias: bool = False, inward: bool = False) -> nnx.Module:
        return nnx.Linear(features, outputs, use_bias=bias, **self.options, **self._sharded(inward, not inward))

    def low_rank(self, features: int, rank: int, outputs: int, bias: bool = True) -> Any:
        first = nnx.Linear(features, rank, use_bias=False, **self.options)
        return nnx.List([first, self.linear(rank, outputs, bias=bias)])

    def conv(self, channels: int, size: int, bias: bool) -> nnx.Module:
        return nnx.Conv(channels, channels, size, padding="VALID", feature_group_count=channels, use_bias=bias,
                        **self.options, **self._sharded(False, False, True))

    def norm(self, features: int, eps: float, groups: int = 1, affine: bool = True) -> nnx.Module:
        axes = -1 if groups == 1 else (-2, -1)
        return nnx.RMSNorm(features, epsilon=eps, use_scale=affine, feature_axes=axes, **self.options)

    @staticmethod
    def group() -> nnx.Module:
        return nnx.Module()

    def parameter(self, shape: tuple[int, ...], low: float, high: float, change: Callable) -> nnx.Param:
        dtype = jnp.promote_types(self.options["param_dtype"], jnp.float32)
        # Like all parameters, the transpose of PyTorch's.
        return nnx.Param(change(jax.random.uniform(self.options["rngs"].params(), shape[::-1], dtype, low, high)))


class _Layer(nnx.Module):
    """The part of :class:`keraunos.layers.mixers.Layer` that is JAX's."""

    xp: Any = jnp
    arrays: Any = jax.Array, np.ndarray
    make: Any = _Maker
    take = staticmethod(jnp.take_along_axis)
    cast = staticmethod(jax.lax.convert_element_type)
    activations: ClassVar[Any] = {
        "silu": jax.nn.silu, "swish": jax.nn.silu, "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid,
        "log_sigmoid": jax.nn.log_sigmoid, "gelu": jax.nn.gelu,
    }

    forward: Any
    known_device = None

    def __call__(self, x: jax.Array, cache: Cache | None = None, **options: Any) -> Any:
        return self.forward(x, cache, **options)

    @property
    def known_dtypes(self) -> list:
        # Modules may compute in another dtype than that of their parameters.
        modules = [getattr(module, "dtype", None) for _, module in nnx.iter_modules(self)]
        return [*modules, *(x.dtype for x in jax.tree.leaves(nnx.state(self, nnx.Param)))]

    def moved(self, cache: Cache, like: jax.Array) -> Cache:
        return cache

    def arange(self, n: int, like: jax.Array) -> jax.Array:
        return jnp.arange(n)

    def zeros(self, shape: tuple[int, ...], like: jax.Array, dtype: Any = None) -> jax.Array:
        return jnp.zeros(shape, like.dtype if dtype is None else dtype)

    def asarray(self, values: Any, like: jax.Array, dtype: Any = None) -> jax.Array:
        return jnp.asarray(values, dtype)


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


def _parameters(module: nnx.Module) -> dict[str, nnx.Variable]:
    """By the names that they have in PyTorch, where kernels and scales are weights."""
    leaves = {"kernel": "weight", "scale": "weight"}
    found = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join([*map(str, path[:-1]), leaves.get(str(path[-1]), str(path[-1]))]): x for path, x in found}


def state_dict(module: nnx.Module) -> dict[str, np.ndarray]:
    """The parameters of a layer, or of a module that consists of such, as PyTorch's module has them: by name, NumPy.

    Args:
        module: of linear layers, convolutions over one dimension, norms, and layers of this page.
    """
    return {name: np.asarray(x[...]).T for name, x in _parameters(module).items()}


def load_state_dict(module: nnx.Module, state_dict: Mapping[str, Any]) -> None:
    """Take the parameters of PyTorch's module of the same layers, ``torch_module.state_dict()``, or of a checkpoint.

    Args:
        module: as for :func:`state_dict`; its parameters keep their dtypes and shardings.
        state_dict: tensors or NumPy arrays by name.

    Raises:
        ValueError: a name is missing or not known, or a shape is another.
    """
    parameters = _parameters(module)
    if parameters.keys() != state_dict.keys():
        raise ValueError(f"load_state_dict: missing are {sorted(parameters.keys() - state_dict.keys())}, "
                         f"not known {sorted(state_dict.keys() - parameters.keys())}")
    for name, old in parameters.items():
        given = state_dict[name]
        # NumPy has no bfloat16, which double holds, and takes no tensor of a GPU.
        value = np.asarray(given.double().cpu() if hasattr(given, "double") else given).T
        if value.shape != old.shape:
            raise ValueError(f"load_state_dict: {name} has shape {value.T.shape}; expected {old.shape[::-1]}")
        old[...] = jax.device_put(value.astype(old.dtype), old[...].sharding)
