"""JAX: launching Triton kernels through jax_triton."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from keraunos.frontends import cannot_launch, in_shared_memory
from keraunos.frontends.jax import gluon, shared_memory, vary, varying

if _reason := cannot_launch("jax"):
    raise ImportError(f"keraunos: {_reason}", name="jax_triton")
_CACHE = os.environ.get("TRITON_CACHE_DIR")
try:
    import jax_triton
    from jax_triton import triton_lib
finally:
    # Importing jax_triton, even in vain, empties the variable, which would switch Triton's own cache off for everybody
    # in the process.
    os.environ.pop("TRITON_CACHE_DIR", None)
    if _CACHE is not None:
        os.environ["TRITON_CACHE_DIR"] = _CACHE


def launch(kernel: Any, grid: tuple[int, ...], inputs: dict[str, Any], outputs: dict[str, Any],
           constants: dict[str, Any], *, num_warps: int, num_stages: int) -> tuple[Any, ...]:
    """Launch as an operation of JAX; the arguments are those of :func:`keraunos.frontends.torch.launch.launch`."""
    _check_names(kernel, inputs, outputs, constants)
    if "OVERLAP" in constants:
        constants = {**constants, "OVERLAP": 0}  # XLA orders launches
    made = {
        name: jax.ShapeDtypeStruct(*((inputs[o].shape, inputs[o].dtype) if isinstance(o, str) else o))
        for name, o in outputs.items() if o is not None
    }
    arrays = {name: jnp.asarray(x) for name, x in inputs.items() if isinstance(x, jax.Array | np.ndarray)}
    if kernel.is_gluon():
        wanted = {name: made.get(name) for name in outputs}
        overwritten = {name: o for name, o in outputs.items() if isinstance(o, str)}
        found = gluon.call(kernel, grid, {**inputs, **arrays}, wanted, constants, num_warps, overwritten)
        done = [vary(x, frozenset().union(*map(varying, arrays.values()))) for x in found]
    elif not all(grid):
        done = [jnp.zeros(o.shape, o.dtype) for o in made.values()]
    else:
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
        )
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


def _lower(
    lower: Callable, make_backend: Callable, ctx: Any, *args: Any, fn: Any, num_stages: int, **options: Any
) -> Any:
    """jax_triton's lowering, of our kernels with as many stages, up to these, as the GPU has shared memory for."""
    if not fn.__module__.startswith("keraunos."):
        return lower(make_backend, ctx, *args, fn=fn, num_stages=num_stages, **options)

    def build(num_stages: int) -> Any:
        return lower(functools.partial(_limited, make_backend), ctx, *args, fn=fn, num_stages=num_stages, **options)

    return in_shared_memory(build, fn.__name__, num_stages)


def _limited(make_backend: Callable, device: int, capability: int) -> Any:
    """Triton's compiler, which refuses kernels that need more shared memory than there is before it assembles them."""
    from triton.runtime.errors import OutOfResources

    backend = make_backend(device, capability)
    arch, make_llir = backend.target.arch, backend.make_llir
    limit = shared_memory(arch if isinstance(arch, str) else f"{arch // 10}.{arch % 10}")

    def limited(source: Any, metadata: dict[str, Any], *options: Any) -> Any:
        made = make_llir(source, metadata, *options)
        if metadata["shared"] > limit:
            raise OutOfResources(metadata["shared"], limit, "shared memory")
        return made

    backend.make_llir = limited
    return backend


# The GPU is known when the program is lowered, and no sooner.
for _platform, _make_backend in (("cuda", triton_lib.get_cuda_backend), ("rocm", triton_lib.get_hip_backend)):
    _rule = functools.partial(_lower, triton_lib.triton_kernel_call_lowering, _make_backend)
    mlir.register_lowering(triton_lib.triton_kernel_call_p, _rule, platform=_platform)
