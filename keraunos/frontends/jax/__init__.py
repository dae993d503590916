"""JAX's front end: what :func:`keraunos.frontends.get` gives for ``"jax"``."""

from keraunos.frontends.jax.arrays import (
    aligned,
    array,
    by_device,
    cast,
    constant,
    default_device,
    device_of,
    dtype_name,
    empty,
    has_wide_types,
    is_local,
    is_symbol,
    length,
    number,
    numbers,
    pad,
    place_of,
    product,
    read,
    readable,
    seed,
    shared_memory,
    stack,
    vary,
    varying,
    xp,
    zeros,
)
from keraunos.frontends.jax.gradient import as_written, batched, differentiable, rowwise
from keraunos.frontends.jax.partition import spread
