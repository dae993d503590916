"""PyTorch's front end: what :func:`keraunos.frontends.get` gives for ``"torch"``."""

from keraunos.frontends.torch.arguments import (
    autocast,
    refuse,
)
from keraunos.frontends.torch.arrays import (
    DTYPES,
    array,
    cast,
    constant,
    default_device,
    device_of,
    dtype_name,
    is_symbol,
    length,
    numbers,
    pad,
    place_of,
    product,
    seed,
    stack,
    xp,
    zeros,
)
from keraunos.frontends.torch.gradient import (
    differentiable,
    in_place,
    signature,
)
from keraunos.frontends.torch.strides import (
    aligned,
    fitting,
    rows,
)

__all__ = [
    "DTYPES",
    "aligned",
    "array",
    "autocast",
    "cast",
    "constant",
    "default_device",
    "device_of",
    "differentiable",
    "dtype_name",
    "fitting",
    "in_place",
    "is_symbol",
    "length",
    "numbers",
    "pad",
    "place_of",
    "product",
    "refuse",
    "rows",
    "seed",
    "signature",
    "stack",
    "xp",
    "zeros",
]
