"""PyTorch's front end: what :func:`keraunos.frontends.get` gives for ``"torch"``."""

from keraunos.frontends.torch.arguments import autocast, refuse
from keraunos.frontends.torch.arrays import (
    DTYPES,
    aligned,
    array,
    cast,
    constant,
    default_device,
    device_of,
    dtype_name,
    fitting,
    is_symbol,
    length,
    number,
    numbers,
    pad,
    place_of,
    product,
    read,
    readable,
    rows,
    seed,
    stack,
    xp,
    zeros,
)
from keraunos.frontends.torch.gradient import signature
