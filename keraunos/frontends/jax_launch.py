"""JAX: launching Triton kernels through jax_triton."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keraunos.frontends.jax import vary, varying

_CACHE = os.environ.get("TRITON_CACHE_DIR")
try:
    import jax_triton
finally:
    # Importing jax_triton, even in vain, empties the variable, which would switch Triton's own cache off for everybody
    # in the process.
    os.environ.pop("TRITON_CACHE_DIR", None)
    if _CACHE is not None:
        os.environ["TRITON_CACHE_DIR"] = _CACHE


def launch(kernel: Any, grid: tuple[int, ...], inputs: dict[str, Any], outputs: dict[str, Any],
           constants: dict[str, Any], *, num_warps: int, num_stages: int) -> tuple[Any, ...]:  # fmt: skip
    """Launch as an operation of JAX; the arguments are those of :func:`keraunos.frontends.torch_launch.launch`."""
    _check_names(kernel, inputs, outputs, constants)
    if "OVERLAP" in constants:
        constants = {**constants, "OVERLAP": 0}  # XLA orders launches
    made = {
        name: jax.ShapeDtypeStruct(*((inputs[o].shape, inputs[o].dtype) if isinstance(o, str) else o))
        for name, o in outputs.items() if o is not None
    }  # fmt: skip
    if not all(grid):
        done = [jnp.zeros(o.shape, o.dtype) for o in made.values()]
    else:
        arrays = {name: jnp.asarray(x) for name, x in inputs.items() if isinstance(x, jax.Array | np.ndarray)}
        # Every parameter needs a buffer, also where the constants switch it off.
        shapes = [made.get(name, jax.ShapeDtypeStruct((1,), np.float32)) for name in outputs]

        # An absent array is any other one, which the kernel never reads. Not one that is overwritten: JAX would first
        # copy it.
        other = next(x for name, x in arrays.items() if name not in outputs.values())
        args = {name: other if x is None else _argument(name, x, arrays) for name, x in inputs.items()}
        places = [name for name, x in args.items() if isinstance(x, jax.Array)]
        found = jax_triton.triton_call(
            *args.values(), kernel=kernel, out_shape=shapes, grid=grid, num_warps=num_warps, num_stages=num_stages,
            input_output_aliases={places.index(o): i for i, o in enumerate(outputs.values()) if isinstance(o, str)},
            **constants,
        )  # fmt: skip
        # Inside shard_map, results vary over the mesh axes that any input does; jax_triton does not say so.
        axes = frozenset().union(*map(varying, arrays.values()))
        done = [vary(x, axes) for x in found]
        return tuple(x if name in made else None for name, x in zip(outputs, done, strict=True))
    filled = iter(done)
    return tuple(next(filled) if name in made else None for name in outputs)


def _argument(name: str, x: Any, arrays: dict[str, jax.Array]) -> Any:
    """A kernel's argument: floats are float32."""
    if isinstance(x, float):
        return np.float32(x)
    return arrays.get(name, x)


def _check_names(kernel: Any, inputs: dict[str, Any], outputs: dict[str, Any], constants: dict[str, Any]) -> None:
    """jax_triton takes arguments by position and any other name as a constant: a slip would go unnoticed."""
    names, given = kernel.arg_names, [*inputs, *outputs]
    if given != names[: len(given)] or set(constants) != set(names[len(given) :]):
        raise TypeError(f"{kernel.__name__}: got arguments {given}, constants {list(constants)}; expected {names}")
