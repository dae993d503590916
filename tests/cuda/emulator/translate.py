"""Runs the Python code of a @gluon.jit function with the emulator's functions in place of Gluon's."""

from __future__ import annotations

import dis
import functools
import inspect
import types
import typing

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import constexpr
from triton.language.core import dtype as triton_dtype
from triton.runtime.jit import ConstexprFunction, JITFunction

from . import language, machine, shared, tensors, values
from .errors import CompileError, UnsupportedError
from .memory import Descriptor, Memory, as_array
from .values import Tensor, tensor

_FUNCTIONS: dict[int, Function] = {}  # By the identity of Triton's: to compare those takes long.


class Function:
    """A @gluon.jit function that Python can call inside a kernel."""

    def __init__(self, jit: JITFunction):
        self.jit, self.__name__ = jit, jit.fn.__name__
        self.arg_names = jit.arg_names
        self.constexprs = {p.name for p in jit.params if p.is_constexpr}
        self._function = None

    def bind(self, args, kwargs) -> dict:
        """Arguments by name, with defaults."""
        if len(args) > len(self.arg_names):
            raise TypeError(f"{self.__name__} takes {len(self.arg_names)} arguments, not {len(args)}")
        given = dict(zip(self.arg_names, args, strict=False))
        if set(given) & set(kwargs) or set(kwargs) - set(self.arg_names):
            raise TypeError(f"{self.__name__} got an unexpected or a second {sorted(kwargs)}")
        given |= kwargs
        for p in self.jit.params:
            if p.name not in given:
                if not p.has_default:
                    raise TypeError(f"{self.__name__} misses its argument {p.name}")
                given[p.name] = p.default.value if isinstance(p.default, constexpr) else p.default
        return given

    def __call__(self, *args, **kwargs):
        given = self.bind(args, kwargs)
        for name in self.constexprs:
            if isinstance(given[name], Tensor):
                raise CompileError(f"{self.__name__}: {name} is gl.constexpr, but is given a value of run time")
        if self._function is None:
            self._function = _python(self.jit.fn)
        machine.here().codes.add(self._function.__code__)
        return self._function(*(given[name] for name in self.arg_names))


def function(jit) -> Function:
    if not isinstance(jit, JITFunction):
        raise UnsupportedError(f"the emulator runs @gluon.jit functions, not {jit!r}")
    if id(jit) not in _FUNCTIONS:
        _FUNCTIONS[id(jit)] = Function(jit)
    return _FUNCTIONS[id(jit)]


class Aggregate:
    """Values of a kernel in one object, whose class is a translation of one that ``kernels.gluon.aggregate`` made."""

    def __init__(self, *args, **kwargs):
        for name, x in self._signature.bind(*args, **kwargs).arguments.items():
            kinds = tuple(_KINDS.get(kind) or _aggregate(kind) for kind in self._kinds[name])
            is_static = not isinstance(x, (*_KINDS.values(), Aggregate))
            if not isinstance(x, kinds) and not (is_static and gl.constexpr in self._kinds[name]):
                raise CompileError(f"{type(self).__name__}: its {name} is not to be {x!r}")
            self.__dict__[name] = x

    def __setattr__(self, name, x):
        raise CompileError(f"{type(self).__name__}: the field {name} is given only once, when the object is made")


_KINDS = {gl.tensor: Tensor, gl.shared_memory_descriptor: shared.View, tma.tensor_descriptor: Descriptor}


@functools.cache
def _aggregate(kind) -> type:
    """The emulator's class of a kernel's."""
    if kind is gl.constexpr:
        return constexpr
    space = {name: _method(x) for name, x in vars(kind).items() if isinstance(x, JITFunction)}
    kinds = {name: typing.get_args(x) or (x,) for name, x in kind.__annotations__.items()}
    return type(kind.__name__, (Aggregate,), {**space, "_kinds": kinds, "_signature": inspect.signature(kind)})


def _method(jit):
    called = function(jit)
    return functools.wraps(jit.fn)(lambda *args, **kwargs: called(*args, **kwargs))


def _python(fn) -> types.FunctionType:
    """The function's own code, with the names that it uses translated."""
    names = set(_names(fn.__code__))
    space = {name: _translated(name, fn.__globals__[name]) for name in names if name in fn.__globals__}
    space["__builtins__"] = _BUILTINS
    cells = tuple(
        types.CellType(_translated(name, cell.cell_contents))
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    )
    return types.FunctionType(fn.__code__, space, fn.__name__, fn.__defaults__, cells)


def _names(code):
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _translated(name, x):
    if id(x) in language.TABLE:
        return language.TABLE[id(x)]
    if getattr(x, "__triton_aggregate__", False):
        return _aggregate(x)
    if isinstance(x, JITFunction):
        return function(x)
    if isinstance(x, constexpr):
        return x.value
    if isinstance(x, ConstexprFunction):
        return x
    if isinstance(x, types.ModuleType):
        return Module(x)
    if isinstance(x, triton_dtype) or (isinstance(x, type) and x.__module__.startswith("triton.")):
        return x
    if hasattr(x, "__triton_builtin__"):
        raise UnsupportedError(f"the emulator has no {name}")
    if isinstance(x, (bool, int, float, str, tuple, list)):
        raise CompileError(f"the global {name} must be gl.constexpr to be used in a kernel")
    raise UnsupportedError(f"the emulator cannot use the global {name}: {x!r}")


class Module:
    """A module as a kernel sees it."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        x = _translated(f"{self._module.__name__}.{name}", getattr(self._module, name))
        setattr(self, name, x)
        return x


def _several(act, python):
    def choose(first, *rest):
        if not any(isinstance(x, Tensor) for x in (first, *rest)):
            return python(first, *rest)
        for x in rest:
            first = act(first, x)
        return first

    return choose


def _float(x):
    return tensor(x).to(gl.float32) if isinstance(x, Tensor) else float(x)


_BUILTINS = {
    "range": language.counted, "len": len, "float": _float, "int": int, "bool": bool, "tuple": tuple, "list": list,
    "isinstance": isinstance, "getattr": getattr, "hasattr": hasattr, "print": language.printed,
    "min": _several(tensors.minimum, min), "max": _several(tensors.maximum, max),
    "abs": lambda x: tensors.absolute(x) if isinstance(x, Tensor) else abs(x), "slice": slice,
    "True": True, "False": False, "None": None, "AssertionError": AssertionError,
}


def argument(parameter, x):
    """An argument of a launch as the kernel receives it."""
    name = parameter.name
    if parameter.is_constexpr:
        return x.value if isinstance(x, constexpr) else x
    if isinstance(x, Descriptor) or x is None or isinstance(x, str):
        return x
    if isinstance(x, bool):
        return values.scalar(x, gl.int1)
    if isinstance(x, int):
        if x == 1 and not parameter.do_not_specialize:
            return x  # A launch compiles it in.
        return values.scalar(x, gl.int32 if -(2**31) <= x < 2**31 else gl.int64)
    if isinstance(x, float):
        return values.scalar(x, gl.float32)
    if hasattr(x, "block_shape"):
        array = as_array(x.base)
        steps = list(x.strides)
        return Descriptor(Memory(name, array), 0, list(x.shape), steps, list(x.block_shape), x.layout, x.padding)
    if hasattr(x, "shape"):
        return Memory(name, as_array(x)).pointer()
    raise TypeError(f"launch: {name}={x!r} of {type(x).__name__} cannot be given to a kernel")
