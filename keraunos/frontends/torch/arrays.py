"""PyTorch's tensors and devices: what host code that knows no framework asks of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from keraunos.frontends import Device, UnnamedError

DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def dtype_name(x: torch.Tensor) -> str:
    """The dtype's name: "bfloat16", "float32", "int32", ..."""
    return str(x.dtype).removeprefix("torch.")


def constant(x: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """A small constant on the device of ``like``: copied there once, not in every call."""
    if is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        # What is made now belongs to a graph or a transformation, and must not outlive it.
        return torch.tensor(x.tolist(), dtype=DTYPES[x.dtype.name], device=like.device)
    return _kept_constant(x.tobytes(), x.dtype.str, x.shape, like.device)


@functools.lru_cache(maxsize=1024)
def _kept_constant(data: bytes, dtype: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A constant on the device, from its bytes; it is kept, also for calls that gradients follow."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()).to(device)


def zeros(shape: tuple[int, ...], dtype: str, like: torch.Tensor) -> torch.Tensor:
    """Zeros on the device of ``like``."""
    return torch.zeros(shape, dtype=DTYPES[dtype], device=like.device)


def array(x: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """A NumPy array on the device of ``like``."""
    return torch.tensor(x, device=like.device)


def cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The values in another dtype."""
    return x if x.dtype == DTYPES[dtype] else x.to(DTYPES[dtype])


# The array library, for what it and JAX have alike.
xp = torch


def products_are_rounded(device: torch.device) -> bool:
    """Whether the user's settings let products of float32 matrices round their operands (TF32, bfloat16).

    They are global to the process, so they are respected, not changed: such products are then computed in float64.
    """
    settings = {"cpu": torch.backends.mkldnn, "cuda": torch.backends.cuda}.get(device.type)
    if settings is None:
        return False
    if not hasattr(settings.matmul, "fp32_precision"):  # before torch 2.9
        return torch.get_float32_matmul_precision() != "highest"
    return settings.matmul.fp32_precision not in ("none", "ieee")


def einsum(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``torch.einsum``, in the precision of its operands whatever the user's settings allow for products."""
    if a.dtype == torch.float32 and products_are_rounded(a.device):
        return torch.einsum(equation, a.double(), b.double()).to(a.dtype)
    return torch.einsum(equation, a, b)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The matrix product; see :func:`einsum`. Autocast does not reach it either."""
    with torch.autocast(a.device.type, enabled=False):
        return einsum("...ij,...jk->...ik", a, b)


def pad(x: torch.Tensor, axis: int, after: int, before: int = 0) -> torch.Tensor:
    """With so many zeros at the ends of an axis."""
    if not (before or after):
        return x
    return torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - axis) + [before, after])


def stack(tensors: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Side by side along a new axis."""
    return torch.stack(list(tensors), axis)


def numbers(n: int, like: torch.Tensor) -> torch.Tensor:
    """0 to n - 1, int32."""
    return torch.arange(n, dtype=torch.int32, device=like.device)


def device_of(x: torch.Tensor) -> Device:
    """The device a tensor is on."""
    return _describe(x.device.type, x.device.index)


def default_device() -> Device:
    """The first GPU if there is one."""
    return _describe("cuda" if torch.cuda.is_available() else "cpu", None)


@functools.cache
def _describe(kind: str, index: int | None) -> Device:
    if kind != "cuda":
        return Device(kind, kind)
    has = torch.cuda.get_device_properties(index)
    # AMD's GPUs have no more of it for those who ask.
    return Device("gpu", has.name, getattr(has, "shared_memory_per_block_optin", has.shared_memory_per_block))


def place_of(x: torch.Tensor) -> Any:
    """Where the tensor is, for those of a call must be together."""
    return x.device


# Tokens of a call of which nothing is known.
_USUAL = 4096


def length(n: int | torch.SymInt, usual: int | None = None) -> int:
    """A size as a number; of one that a graph leaves open, the one at hand while it is traced, without fixing it.

    Where none is at hand, as the size follows from values, a usual length stands for it.

    Raises:
        UnnamedError: it is a tensor of ``torch.jit.trace``.
    """
    if isinstance(n, int):
        return n
    if not isinstance(n, torch.SymInt):
        raise UnnamedError("torch.jit.trace does not see what kernels do; use torch.export or torch.compile")
    return _USUAL if n.node.hint is None else n.node.hint


def is_symbol(n: Any) -> bool:
    """Whether a size has no number that :func:`length` gives."""
    return False


def seed(rng: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    """Two integers of 32 bits, the next that a generator gives, on the device of ``like``."""
    if not isinstance(rng, torch.Generator):
        raise TypeError(f"attention: dropout_rng is of type {type(rng).__qualname__}; expected a torch.Generator")
    return torch.randint(1 << 32, (2,), generator=rng, device=rng.device).to(like.device, non_blocking=True)


_PLAIN = {torch.Tensor, torch.nn.Parameter, np.ndarray, type(None)}


def is_watched(tensors: Sequence[Any]) -> bool:
    """Whether something traces or transforms the call, or asks for shapes, so that it has to be an operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or tensors[0].is_meta
        or not _PLAIN.issuperset(map(type, tensors))
    )


# Values that are known on the host.


def readable(tensors: Sequence[torch.Tensor | None], everywhere: bool) -> bool:
    """Whether calls on tensors like these have values that may be read; ``everywhere``: those on a GPU, too."""
    # What is traced or transformed has none.
    return not is_watched(tensors) and (everywhere or tensors[0].device.type == "cpu")  # type: ignore[union-attr]


def read(tensors: Sequence[torch.Tensor], look: Callable[..., None], everywhere: bool) -> None:
    """``look`` at the values of tensors that are :func:`readable`."""
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return  # there are no values yet
    look(*map(_values, tensors))


def number(x: torch.Tensor) -> int | None:
    """The value of a tensor without dimensions, if it is known on the host."""
    return int(x) if readable([x], False) else None


def _values(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


# Strides that kernels can take, and tensors that have them.

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
