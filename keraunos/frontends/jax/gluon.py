"""JAX: launching Gluon kernels, which jax_triton takes only from version 0.4 on, through what it is made of itself."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import numpy as np
from jax._src.lib import gpu_triton

# The generation of NVIDIA GPUs that Gluon kernels are written for: Hopper.
_CAPABILITY = 90
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "int8": "i8", "uint8": "u8",
          "int32": "i32", "int64": "i64", "uint32": "u32", "bool": "i1"}


def call(kernel: Any, grid: tuple[int, ...], inputs: dict[str, Any], outputs: dict[str, jax.ShapeDtypeStruct | None],
         constants: dict[str, Any], num_warps: int, overwritten: dict[str, str]) -> list[jax.Array]:
    """The outputs that are there, in order.

    Args:
        kernel: a ``@gluon.jit`` function; its parameters are the inputs, the outputs, the constants, in this order.
        inputs: name -> array, number or None, which the kernel gets as a constant.
        outputs: name -> shape and dtype, or None likewise.
        overwritten: output -> the input in whose place it is.
    """
    made = [o for o in outputs.values() if o is not None]
    if not all(grid):
        return [jax.numpy.zeros(o.shape, o.dtype) for o in made]
    given = {**inputs, **outputs}
    signature = tuple((name, _type(x)) for name, x in given.items() if x is not None)
    absent = tuple((name, None) for name, x in given.items() if x is None)
    built = _built(kernel, signature, (*absent, *constants.items()), num_warps)
    # Memory for the descriptors that the kernel makes, which is its last parameter.
    scratch = jax.ShapeDtypeStruct((max(int(np.prod(grid)) * built.metadata.global_scratch_size, 1),), np.uint8)
    parameters = [_parameter(x, dtype) for x, (_, dtype) in
                  zip((x for x in given.values() if x is not None), signature, strict=True)]
    program = gpu_triton.TritonKernel(
        kernel.__name__, built.metadata.num_warps, 1, built.metadata.shared, built.asm["ptx"], "", _CAPABILITY
    )
    launch = gpu_triton.TritonKernelCall(
        program, *(*grid, 1, 1)[:3], [*parameters, gpu_triton.create_array_parameter(0, 16)]
    )
    message: Any = zlib.compress(launch.to_proto(kernel.__name__, b""))
    arrays = {name: x for name, x in inputs.items() if isinstance(x, jax.Array)}
    places, results = list(arrays), [name for name, o in outputs.items() if o is not None]
    run = jax.ffi.ffi_call(
        "triton_kernel_call", (*made, scratch), custom_call_api_version=2, legacy_backend_config=message,
        input_output_aliases={places.index(x): results.index(name) for name, x in overwritten.items()},
    )
    return list(run(*arrays.values()))[:-1]


def _type(x: Any) -> str:
    """The type of a kernel's argument of run time, as Triton writes it."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return f"*{_TYPES[x.dtype.name]}"
    if isinstance(x, float):
        return "fp32"
    return "i32" if -(2**31) <= x < 2**31 else "i64"


def _parameter(x: Any, dtype: str) -> Any:
    return gpu_triton.create_array_parameter(0, 16) if dtype[0] == "*" else gpu_triton.create_scalar_parameter(x, dtype)


@functools.lru_cache(maxsize=4096)
def _built(kernel: Any, signature: tuple, constants: tuple, num_warps: int) -> Any:
    """The kernel, compiled for arguments of these types; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names, types = kernel.arg_names, dict(signature)
    source = GluonASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "")[:1] == "*"},
    )
    return triton.compile(source, target=GPUTarget("cuda", _CAPABILITY, 32), options=dict(num_warps=num_warps))
