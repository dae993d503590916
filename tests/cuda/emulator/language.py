"""Gluon's functions on a whole program, and the table that says which functions the emulator has."""

from __future__ import annotations

import numpy as np
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from keraunos.kernels import gluon as gluon_names

from . import barriers, copies, machine, memory, products, shared, tensors, values
from .errors import CompileError, UnsupportedError
from .values import Tensor, concrete, scalar, static, tensor


def program_id(axis):
    return scalar(machine.here().ids[axis], gl.int32)


def num_programs(axis):
    return scalar(machine.here().grid[axis], gl.int32)


def counted(*bounds):
    """``range`` in a kernel: what it counts is a value of run time, int32 if no bound is int64."""
    dtype = gl.int64 if any(tensor(x).dtype == gl.int64 for x in bounds) else gl.int32
    for i in range(*(concrete(x, "range's bounds") for x in bounds)):
        yield scalar(i, dtype)


def static_range(*bounds):
    return range(*(static(x, "static_range's bounds") for x in bounds))


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs):
    if not len(functions_and_args) - 1 == len(worker_num_warps) == len(worker_num_regs):
        raise CompileError(
            f"warp_specialize: {len(functions_and_args) - 1} workers, {len(worker_num_warps)} counts of warps, "
            f"{len(worker_num_regs)} of registers"
        )
    for function, args in functions_and_args:
        if not isinstance(args, tuple):
            raise CompileError(f"warp_specialize: the arguments of {function.__name__} must be a tuple")
    if any(n not in (1, 2, 4, 8, 16) for n in worker_num_warps):
        raise CompileError(f"warp_specialize: warps must be powers of two, not {worker_num_warps}")
    if any(n % 8 or not 24 <= n <= 256 for n in worker_num_regs):
        raise CompileError(f"warp_specialize: registers must be multiples of 8 from 24 to 256, not {worker_num_regs}")
    calls = [lambda f=function, a=args: f(*a) for function, args in functions_and_args]
    return machine.here().specialize(calls, [f.__name__ for f, _ in functions_and_args], list(worker_num_warps))


def static_assert(cond, msg=""):
    if not static(cond, "static_assert's condition"):
        raise CompileError(f"static_assert: {msg}")


def device_assert(cond, msg="", mask=None):
    data = tensor(cond).data
    if not (data if mask is None else data | ~tensor(mask).data).all():
        raise AssertionError(f"device_assert at {machine.here().place()}: {msg}")


def assume(cond):
    if not tensor(cond).data.all():
        raise AssertionError(f"assume at {machine.here().place()} is not so")


def multiple_of(input, values):
    values = [values] if isinstance(values, int) else values
    if isinstance(input, Tensor) and not input.data.ndim and input.memory is None and int(input.data) % values[0]:
        raise AssertionError(f"{int(input.data)} is no multiple of {values[0]} at {machine.here().place()}")
    return input


def printed(*args, **_):
    print(*(x.data if isinstance(x, Tensor) else x for x in args))


# What instructions make, alone or of several elements in one block: a type, and the value of each element, exactly.
_INSTRUCTIONS = {
    "movmatrix.sync.aligned.m8n8.trans.b16": (gl.float16, tensors.blocks_transposed),
    # All threads have the same.
    "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;": (gl.int32, lambda x: x),
    "rcp.approx.ftz.f32": (gl.float32, tensors.elementwise(lambda x: 1 / x)),
    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;": (gl.float32, lambda x: x.to(gl.float32)),
    # Programs run one after the other: none sees what another has not finished.
    "cp.async.bulk.wait_group": (gl.int32, lambda x: x),
}


def inline_asm(asm, constraints, args, dtype, is_pure, pack):
    if asm == "mov.b32 $0, $1;" and dtype == args[0].dtype:
        return args[0]
    found = [function for name, (made, function) in _INSTRUCTIONS.items() if name in asm and made == dtype]
    if not found or len(args) != 1:
        raise UnsupportedError(f"the emulator has no instruction {asm!r} of {len(args)} operands that gives {dtype}")
    return found[0](args[0])


_FLOATS = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "cos": np.cos, "sin": np.sin, "sqrt": np.sqrt,
    "sqrt_rn": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "floor": np.floor, "ceil": np.ceil, "erf": tensors.erf,
}

# Functions that have Gluon's names, by the module that has them.
_SAME = {
    (gl, tensors): (
        "arange", "full", "zeros", "full_like", "zeros_like", "cast", "convert_layout", "set_auto_layout", "reshape",
        "permute", "ravel", "join", "split", "broadcast", "gather", "where", "fma", "maximum", "minimum", "cdiv", "sum",
        "max", "min", "reduce", "associative_scan", "num_warps",
    ),
    (gl, memory): ("load", "store", "atomic_cas"),
    (gl, barriers): ("thread_barrier",),
    (tma, copies): ("store_wait",),
    (mbarrier, barriers): ("init", "invalidate", "expect", "arrive", "wait"),
    (hopper, barriers): ("fence_async_shared",),
    (ampere, products): ("mma_v2",),
    (ampere.async_copy, copies): ("commit_group", "wait_group"),
    (hopper, products): ("warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait"),
}
_OTHERS = {
    gl: {
        **{name: tensors.elementwise(function) for name, function in _FLOATS.items()},
        **{f"atomic_{name}": memory.atomic(name) for name in ("add", "max", "min", "and", "or", "xor", "xchg")},
        "abs": tensors.absolute, "add": values.plus, "sub": lambda x, y: tensor(x) - y,
        "mul": lambda x, y: tensor(x) * y, "fdiv": values.divide, "div_rn": values.divide, "to_tensor": tensor,
        "expand_dims": values.expand, "allocate_shared_memory": shared.allocate, "barrier": barriers.thread_barrier,
        "program_id": program_id, "num_programs": num_programs, "num_ctas": lambda: 1, "static_range": static_range,
        "warp_specialize": warp_specialize, "static_assert": static_assert, "device_assert": device_assert,
        "assume": assume, "multiple_of": multiple_of, "max_contiguous": lambda input, values: input,
        "max_constancy": lambda input, values: input, "static_print": printed, "device_print": printed,
        "constexpr": lambda x: x, "inline_asm_elementwise": inline_asm,
    },
    ampere.async_copy: {"async_copy_global_to_shared": copies.copy_of_threads, "async_load": copies.copy_of_threads},
    tma: {
        "async_copy_global_to_shared": copies.copy_in, "async_load": copies.copy_in,
        "async_copy_shared_to_global": copies.copy_out, "async_store": copies.copy_out,
        "make_tensor_descriptor": memory.make_descriptor,
    },
}


def _table():
    """Gluon's functions and the emulator's. Names differ between versions of Triton: some are not there."""
    for (theirs, ours), names in _SAME.items():
        yield from ((theirs, name, getattr(ours, name)) for name in names)
    for theirs, functions in _OTHERS.items():
        yield from ((theirs, name, function) for name, function in functions.items())


# By the identity of Gluon's function, under whatever name a kernel has it.
TABLE = {id(getattr(theirs, name)): ours for theirs, name, ours in _table() if hasattr(theirs, name)}
TABLE[id(gluon_names.add_out)] = copies.add_out
TABLE[id(gluon_names.reinterpret)] = shared.View.reinterpret
