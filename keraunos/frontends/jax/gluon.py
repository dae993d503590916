"""JAX: launching Gluon kernels, which jax_triton takes only from version 0.4 on, through what it is made of itself."""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.dispatch import apply_primitive
from jax._src.lib import gpu_triton
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from keraunos.frontends import build_options, rehearsal

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
    scratch = ShapedArray((max(int(np.prod(grid)) * built.scratch, 1),), np.dtype(np.uint8))
    parameters.append(gpu_triton.create_array_parameter(0, 16))
    program = gpu_triton.TritonKernel(
        kernel.__name__, built.num_warps, 1, built.shared, built.ptx, "", _CAPABILITY
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


class _Built(NamedTuple):
    """A kernel as a launch needs it."""

    ptx: str
    num_warps: int
    shared: int
    scratch: int  # bytes for each program


@functools.lru_cache(maxsize=4096)
def _built(kernel: Any, signature: tuple, constants: tuple, num_warps: int) -> _Built:
    """The kernel, compiled for arguments of these types; needs no GPU.

    As ``triton.compile`` does it, and kept where that keeps what it has made, but not assembled: JAX does that itself.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars, ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import get_cache_key, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.cache import get_cache_manager

    names, types = kernel.arg_names, dict(signature)
    source = GluonASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "")[:1] == "*"},
    )
    target = GPUTarget("cuda", _CAPABILITY, 32)
    backend = make_backend(target)
    given = {"num_warps": num_warps, **build_options(dict(constants))}
    options = backend.parse_options({**given, **source.parse_options()})
    key = f"{get_cache_key(source, backend, options, get_cache_invalidating_env_vars())} not assembled"
    kept = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if path := kept.get_file("built.json"):
        return _Built(*json.loads(Path(path).read_text()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generators, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    made = source.make_ir(target, options, generators, modules, context)
    rehearsal.was_read()
    stages: dict[str, Any] = {}
    metadata = {"target": target, **vars(options)}
    backend.add_stages(stages, options, source.language)
    order = list(stages)
    for name in order[order.index(source.ext) : order.index("ptx") + 1]:
        made = stages[name](made, metadata)
    built = _Built(made, metadata["num_warps"], metadata["shared"], metadata["global_scratch_size"])
    kept.put(json.dumps(built), "built.json", binary=False)
    return built
