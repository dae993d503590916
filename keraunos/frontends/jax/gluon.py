"""JAX: launching Gluon kernels, which jax_triton takes only from version 0.4 on, through what it is made of itself."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import numpy as np
from jax._src.dispatch import apply_primitive
from jax._src.lib import gpu_triton
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from keraunos.frontends import rehearsal

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
    build = kernel, signature, (*absent, *constants.items()), num_warps
    if rehearsed := rehearsal.current():
        rehearsed.build(_built, *build)
    arrays = {name: x for name, x in inputs.items() if isinstance(x, jax.Array)}
    places, results = list(arrays), [name for name, o in outputs.items() if o is not None]
    return _launch_p.bind(
        *arrays.values(), build=build, grid=grid, made=tuple(made),
        numbers=tuple(x for x in inputs.values() if x is not None and not isinstance(x, jax.Array)),
        aliases=tuple((places.index(x), results.index(name)) for name, x in overwritten.items()),
    )


# A trace may never be lowered, such as that of a call without its gradient: kernels are built for what is.
_launch_p = Primitive("keraunos_gluon_launch")
_launch_p.multiple_results = True
_launch_p.def_impl(functools.partial(apply_primitive, _launch_p))


@_launch_p.def_abstract_eval
def _outputs(*arrays: Any, made: tuple[jax.ShapeDtypeStruct, ...], **options: Any) -> list[Any]:
    return [ShapedArray(o.shape, o.dtype) for o in made]


def _lower(ctx: Any, *arrays: Any, build: tuple, grid: tuple[int, ...], numbers: tuple, aliases: tuple,
           **options: Any) -> Any:
    """A launch in a program for a GPU."""
    (kernel, signature, *_), built, rest = build, _built(*build), iter(numbers)
    parameters = [gpu_triton.create_array_parameter(0, 16) if dtype[0] == "*" else
                  gpu_triton.create_scalar_parameter(next(rest), dtype) for _, dtype in signature]
    # Memory for the descriptors that the kernel makes, which is its last parameter.
    scratch = ShapedArray((max(int(np.prod(grid)) * built.metadata.global_scratch_size, 1),), np.dtype(np.uint8))
    parameters.append(gpu_triton.create_array_parameter(0, 16))
    program = gpu_triton.TritonKernel(
        kernel.__name__, built.metadata.num_warps, 1, built.metadata.shared, built.asm["ptx"], "", _CAPABILITY
    )
    launch = gpu_triton.TritonKernelCall(program, *(*grid, 1, 1)[:3], parameters)
    message: Any = zlib.compress(launch.to_proto(kernel.__name__, b""))
    rule = jax.ffi.ffi_lowering("triton_kernel_call", api_version=2, backend_config=message,
                                operand_output_aliases=dict(aliases))
    return rule(ctx.replace(avals_out=[*ctx.avals_out, scratch]), *arrays)[:-1]


mlir.register_lowering(_launch_p, _lower, platform="cuda")


def _type(x: Any) -> str:
    """The type of a kernel's argument of run time, as Triton writes it."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return f"*{_TYPES[x.dtype.name]}"
    if isinstance(x, float):
        return "fp32"
    return "i32" if -(2**31) <= x < 2**31 else "i64"


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
