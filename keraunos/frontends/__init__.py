"""The only code that knows a framework: launching, differentiation, devices. One folder for each framework."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from keraunos.frontends.array_types import Array
from keraunos.frontends.graph_nodes import operations

P = ParamSpec("P")
R = TypeVar("R")

FRAMEWORKS = ("jax", "torch")
# Among the residuals of a forward: its first output.
OUTPUT = object()
# Bytes of shared memory that a program may have on Hopper: what is assumed where there is no GPU to ask.
SHARED_MEMORY = 232448
# What launches kernels of Triton in JAX, and of Gluon the second one too: versions whose interfaces are known.
_LAUNCHERS = {"jax-triton": ("0.3",), "jaxlib": ("0.8", "0.9", "0.10", "0.11")}


class UnnamedError(TypeError):
    """An error of a front end, which does not know the public function: that function puts its name before it."""


class Device(NamedTuple):
    """Where a call runs."""

    backend: str  # "cpu", "gpu" or "tpu"
    kind: str  # such as "NVIDIA H200"
    shared_memory: int = SHARED_MEMORY  # bytes of it that a program on a GPU may have
    traced: bool = False  # the call is traced, and its program may yet be lowered for another one


@dataclass(frozen=True, eq=False)
class Operator:
    """An operation as a node of PyTorch's graphs, with a name and arguments that any process understands.

    Attributes:
        name: of ``torch.ops.keraunos``; function: of the public function.
        args: the NamedTuple of the operation's arrays; fields: the names of those that it takes; required: of those
            that are always there; gradients: of those that can have a gradient; changed: of those that it changes in
            place; strided: of those that kernels take with any strides.
        options: the NamedTuple of its options; plain: the names of those that are arguments; fixed: all others.
        passes: ``platform -> functions``: forward and backward, or the one that changes arrays.
        check: ``(args, opts)``: raises what the public function would, for the platform of ``opts.cfg``.
        outputs: ``(args, opts) ->`` for each output ``(shape, dtype name)``, None for one that is not there.
        fold: what makes one call of many; see :func:`keraunos.frontends.jax.gradient.batched`.
        flops: ``args -> (forward, backward)``, the floating point operations of a call with arrays of these shapes.
    """

    name: str
    args: Any
    fields: tuple[str, ...]
    required: frozenset[str]
    options: Any
    plain: tuple[str, ...]
    passes: Callable[[str], tuple[Callable, ...]]
    check: Callable[[Any, Any], None]
    flops: Callable[[Any], tuple[int, int]]
    outputs: Callable[[Any, Any], tuple] = lambda args, opts: ()
    fold: Callable[[Any, int], Any] = lambda args, size: None
    gradients: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    function: str = ""


def framework_of(x: object) -> str | None:
    """``"jax"`` or ``"torch"`` for an array of theirs, else None. Imports neither."""
    if x is None:
        return None
    # jax.Array's own test is slow to say no.
    for name, array in (("torch", "Tensor"), ("jax", "Array"), ("jax", "Ref")):
        module = sys.modules.get(name)
        if module is not None and isinstance(x, getattr(module, array, ())):
            return name
    return None


def shared_memory(x: Array) -> int:
    """Bytes of shared memory that a program may have on the array's GPU."""
    return of(x).device_of(x).shared_memory


def number(x: object) -> int | None:
    """A whole number, or an array of one where its value is known on the host, as a number; else None."""
    if isinstance(x, int | np.integer | np.ndarray):
        return int(x)
    framework = None if compiling() else framework_of(x)
    return None if framework is None else get(framework).number(x)


def signature(args: Sequence[Any]) -> list[Any]:
    """The properties by which arrays are told apart: choices, checks and preparations depend on nothing else.

    The call runs where the first one is.
    """
    framework = framework_of(args[0])
    if framework == "torch" and (key := get("torch").signature(args)):
        return key
    key = [framework and get(framework).device_of(args[0])]
    if framework == "jax":
        # Casts depend on it.
        key.append(get("jax").has_wide_types())
    for x in args:
        if x is None:
            key.append(x)
        elif isinstance(x, np.ndarray):
            # A constant, whose values are checked too.
            key += x.shape, x.dtype, x.tobytes()
        elif own := framework_of(x):
            key += own, x.shape, x.dtype
        else:
            key.append(x)
    return key


@functools.cache
def get(framework: str) -> ModuleType:
    """The front end's module.

    Raises:
        ImportError: the framework is not installed.
    """
    try:
        return importlib.import_module(f"keraunos.frontends.{framework}")
    except ModuleNotFoundError as error:
        if error.name not in FRAMEWORKS:
            raise
        message = f"keraunos: {error.name} is not installed: pip install 'keraunos[{error.name}]'"
        raise ImportError(message, name=error.name) from error


def of(x: object) -> ModuleType:
    """The front end of the framework whose array it is."""
    if compiling():
        # The compiler reads an import, but not the cache of ``get``; with the module comes its package.
        import keraunos.frontends.torch.compile

        return keraunos.frontends.torch
    return get(framework_of(x) or "")


def arrays() -> str:
    """The types that arrays may have, in errors; without a framework, how to install one."""
    if any(name in sys.modules or find_spec(name) for name in FRAMEWORKS):
        return "a jax.Array or a torch.Tensor"
    wanted = " or ".join(f"'keraunos[{name}]'" for name in FRAMEWORKS)
    return f"a jax.Array or a torch.Tensor: neither framework is installed, pip install {wanted}"


def for_inference(opts: Any) -> Any:
    """The options of a call that no gradient follows: the field ``kept``, where there is one, is False."""
    return opts._replace(kept=False) if hasattr(opts, "kept") else opts


def compiling() -> bool:
    """Whether ``torch.compile`` reads this Python code, in place of running it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def operation(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: to ``torch.compile`` it is one step, which chooses its kernel while it is traced.

    It follows PyTorch's autocast, and names tensors that no kernel takes: :mod:`keraunos.frontends.torch.arguments`.
    """
    own = _as_called(fn)

    @functools.wraps(fn)
    def step(*args: Any, **kwargs: Any) -> Any:
        from keraunos.frontends.torch.compile import concrete

        return own(*args, **{name: concrete(x) for name, x in kwargs.items()})

    operations.append(step)

    def traced(*args: Any, **kwargs: Any) -> Any:
        from keraunos.frontends.torch.compile import keep_whole, made_again

        keep_whole()
        return step(*args, **{name: made_again(x) for name, x in kwargs.items()})

    return _as_called(fn, traced)


def outside_graphs(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: ``torch.compile`` runs it as it is, between graphs; else like :func:`operation`."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        from keraunos.frontends.torch.compile import untraced

        return untraced(called, *args, **kwargs)

    called = _as_called(fn)
    return _as_called(fn, traced)


def _as_called(fn: Callable[P, R], traced: Callable[..., Any] | None = None) -> Callable[P, R]:
    """``fn`` as PyTorch's users call it; ``traced`` is what ``torch.compile`` reads in its place."""

    # One function, and what costs nothing in a call without autocast: this is before everything else in each.
    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        torch = sys.modules.get("torch")
        if torch is not None:
            if traced is not None and torch.compiler.is_dynamo_compiling():
                return traced(*args, **kwargs)
            if torch._C._is_any_autocast_enabled():
                args, kwargs = get("torch").autocast(fn, args, kwargs)
        try:
            return fn(*args, **kwargs)
        except UnnamedError as error:
            raise TypeError(f"{fn.__name__.lstrip('_')}: {error}") from None
        except Exception as error:
            if torch is not None:
                get("torch").refuse(fn, args, kwargs, error)
            if "forward-mode autodiff (jvp) to a custom_vjp" in str(error):
                name, wanted = fn.__name__.lstrip("_"), "a gradient first, such as jax.grad, jax.vjp or jax.hessian"
                raise TypeError(f"{name}: has no forward-mode derivative; expected {wanted}") from error
            raise

    return call


def launch(kernel: Callable, grid: tuple[int, ...], inputs: dict[str, Any], outputs: dict[str, Any],
           constants: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """Launch a Triton kernel through the framework whose arrays ``inputs`` holds; see the front ends."""
    framework = next(name for name in map(framework_of, inputs.values()) if name)
    return get(f"{framework}.launch").launch(kernel, grid, inputs, outputs, constants, **options)


def build_options(constants: dict[str, Any]) -> dict[str, Any]:
    """The options of a build: MAXNREG, if the kernel's constants have it, limits a thread's registers.

    Checks that integers do not overflow are up to a quarter of what Triton reads of a kernel, and of no use unless it
    debugs.
    """
    from triton import knobs

    limit = {"maxnreg": constants["MAXNREG"]} if "MAXNREG" in constants else {}
    return {**limit, "sanitize_overflow": knobs.runtime.debug}


def cannot_launch(framework: str | None, gluon: bool = False) -> str | None:
    """Why kernels of Triton, or of Gluon, cannot be launched on a framework's arrays, or None.

    The launcher in JAX is not a public interface: a version that is not known may take something else.
    """
    from keraunos.frontends import interpreter

    if (reason := interpreter.refuses()) or framework != "jax":
        return reason
    if find_spec("jax_triton") is None:
        return "needs the package jax-triton for JAX arrays"
    for package, known in _LAUNCHERS.items() if gluon else [("jax-triton", _LAUNCHERS["jax-triton"])]:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "of no version"
        if ".".join(version.split(".")[:2]) not in known:
            return f"knows {package} {', '.join(known)} for JAX arrays; this is {version}"
    return None


def in_shared_memory(build: Callable[[int], Any], kernel: str, num_stages: int) -> Any:
    """Call ``build`` with as many stages, up to these, as fit the shared memory of the GPU.

    Args:
        build: takes the number of stages; raises Triton's OutOfResources if that many do not fit.
        kernel: its name.

    Raises:
        ValueError: one stage does not fit.
    """
    from triton.runtime.errors import OutOfResources

    while True:
        try:
            return build(num_stages)
        except OutOfResources as error:
            if num_stages == 1:
                raise ValueError(
                    f"keraunos: {kernel} needs {error.required} of {error.name} with num_stages = 1, of which this GPU "
                    f"has {error.limit}; expected a cfg with smaller blocks, or none: the default fits"
                ) from error
            num_stages -= 1


def unfold(x: Array, size: int, shape: tuple[int, ...]) -> Array:
    """An output of a folded call, or a gradient, as those of ``size`` calls: each of ``shape``."""
    if math.prod(x.shape) == size * math.prod(shape):
        return x.reshape(size, *shape)
    # An argument that the batch of a call shares, such as a decay or a bias.
    return x.reshape(size, -1, *shape).sum(1)
