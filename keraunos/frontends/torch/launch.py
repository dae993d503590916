"""PyTorch: launching kernels; host code runs once for all calls that are alike, which repeat its launches."""

from __future__ import annotations

import contextvars
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from keraunos.frontends import build_options, in_shared_memory, interpreter, rehearsal
from keraunos.frontends.torch.arrays import DTYPES

_MOST_KNOWN = 4096


def launch(kernel: Any, grid: tuple[int, ...], inputs: dict[str, Any], outputs: dict[str, Any],
           constants: dict[str, Any], *, num_warps: int, num_stages: int) -> tuple[Any, ...]:
    """Allocate the outputs and launch.

    Args:
        kernel: a ``@triton.jit`` function; its parameters are the inputs, the outputs, the constants, in this order.
        grid: number of programs along each axis.
        inputs: name -> tensor, number or None.
        outputs: name -> (shape, dtype name); or the name of an input to overwrite, which nothing else may use then; or
            None for one that the constants switch off.
        constants: name -> compile-time value. OVERLAP, where a kernel has it: 1 lets the next launch begin while this
            one runs, 2 lets this one begin while the one before it runs, 4 when that one's programs end, and waits for
            them before it touches memory; 0 is what the kernel gets where the GPU cannot do that.
        num_warps: per program.
        num_stages: of its loops, at most: fewer where shared memory has not the room, which only some GPUs have.

    Returns:
        The outputs, in order; None for those that are off.
    """
    if (recording := getattr(_local, "recording", None)) is None:
        return _launch(kernel, grid, inputs, outputs, constants, num_warps, num_stages)[0]
    made, run, given, kinds = _launch(kernel, grid, inputs, outputs, constants, num_warps, num_stages)
    recording.add(run, list(inputs.values()), kinds, made, given, beside=bool(constants.get("OVERLAP", 0) & 2))
    return made


def recorded(run: Callable, inputs: list[torch.Tensor],
             outputs: list[tuple[tuple[int, ...], torch.dtype]]) -> tuple[torch.Tensor, ...]:
    """Allocate outputs of these shapes and dtypes, ``run(*inputs, *outputs)``, return them."""
    device, recording = inputs[0].device, getattr(_local, "recording", None)
    made = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs)
    with _current_device(device):
        run(*inputs, *made)
    if recording is not None:
        recording.add(run, inputs, outputs, made, [], addresses=False)
    return made


def fixed(x: torch.Tensor) -> torch.Tensor:
    """``x``, a constant of the calls that are alike: what is launched with it is launched with it again."""
    if (recording := getattr(_local, "recording", None)) is not None:
        recording.fixed[x] = x
    return x


def _launch(
    kernel: Any, grid: tuple[int, ...], inputs: dict[str, Any], outputs: dict[str, Any], constants: dict[str, Any],
    num_warps: int, num_stages: int,
) -> tuple[tuple, Callable, list, list]:
    """The outputs; what does the same launch with other arguments, and the last of these; the outputs' kinds."""
    like = next(x for x in inputs.values() if isinstance(x, torch.Tensor))
    rehearsed = rehearsal.current()
    device = rehearsed.device if rehearsed else like.device
    kinds = [(o[0], DTYPES[o[1]]) if isinstance(o, tuple) else o for o in outputs.values()]
    made = tuple(
        torch.empty(o[0], dtype=o[1], device=like.device) if isinstance(o, tuple) else o and inputs[o] for o in kinds
    )
    if 0 in grid:
        return made, _nothing, [], kinds
    options: dict[str, Any] = dict(num_warps=num_warps, num_stages=num_stages, **build_options(constants))
    if "OVERLAP" in constants:
        # PyTorch's deterministic mode has launches of its own between these (see kinds).
        able = _overlaps(device) and not torch.are_deterministic_algorithms_enabled()
        constants = {**constants, "OVERLAP": constants["OVERLAP"] if able else 0}
        if constants["OVERLAP"] & 6:
            options["launch_pdl"] = True  # which other makers' GPUs do not know
    args, options = [*inputs.values(), *made], {**constants, **options}
    if rehearsed:
        with _current_device(device):
            # Triton sets what reads a kernel when it first looks up what it has built of it; first its driver is built.
            _ = kernel.device_caches[device.index]
        rehearsed.build(_warm_up, kernel, grid, args, options, device)
        return made, _nothing, [], kinds
    run, built = _build(kernel, grid, args, options, device)
    if built is None:
        # The interpreter builds nothing.
        return made, run, [], kinds
    return made, _again(built, (*grid, 1, 1)[:3]), [constants[p.name] for p in kernel.params if p.is_constexpr], kinds


def _build(kernel: Any, grid: tuple[int, ...], args: list[Any], options: dict[str, Any],
           device: torch.device) -> tuple[Callable, Any]:
    """Launch, with fewer stages where the GPU has not the shared memory for all; what did it, and what was built."""

    def build(num_stages: int) -> tuple[Callable, Any]:
        run = functools.partial(kernel[grid], **{**options, "num_stages": num_stages})
        with _current_device(device):
            return run, _allocating(_scratch, run, *args)

    return in_shared_memory(build, kernel.__name__, options["num_stages"])


def _warm_up(kernel: Any, grid: tuple[int, ...], args: list[Any], options: dict[str, Any],
             device: torch.device) -> None:
    """Build for a launch."""
    with _current_device(device):
        if isinstance(kernel.ASTSource, type):
            kernel.ASTSource = functools.partial(_source, kernel.ASTSource)
        # What launches it is there when it is asked for.
        _ = kernel.warmup(*args, grid=grid, **options).run


def _source(kind: Callable, *args: Any) -> Any:
    """Make the source that Triton reads a kernel from; when it was read, what launches the kernel is compiled, too."""
    source = kind(*args)
    read = source.make_ir

    def compile_launcher() -> None:
        from triton.runtime import driver

        # Triton keeps what it has compiled; only then it looks at what is known of the kernel.
        driver.active.launcher_cls(source, None)

    def make_ir(*args: Any) -> Any:
        made = read(*args)
        rehearsal.was_read(compile_launcher)
        return made

    source.make_ir = make_ir
    return source


def _without_memory(tensors: list[Any]) -> list[Any]:
    """Tensors of the same kind for a rehearsal."""
    return [x if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether a launch can begin before the one before it has ended: from Hopper on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _nothing(*args: Any) -> None:
    """The launch of no program."""


def _again(built: Any, grid: tuple[int, ...]) -> Callable:
    """Launches what Triton has built, without asking it to find that again."""
    import triton

    hooks, watched = triton.knobs.runtime, built[grid]
    stream, device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    start, rest = built.run, [built.function, built.packed_metadata, None, None, None]
    # What it compiled to launch with can do without the Python around it, half of the time that a launch takes.
    bare, seen, sizes = copy.copy(start), [], []
    bare.launch = lambda *given: seen.extend(given)

    def note(size: int, alignment: int, stream: int | None) -> Any:
        sizes.append(size)
        return sizes

    _allocating(note, bare, *grid, None, *rest)
    start, rest = start.launch, seen[4:]
    # Memory for what a kernel writes down for itself, such as descriptors, is another each time.
    places = [i for i, x in enumerate(rest) if x is sizes]
    # From Triton 3.7 on what was compiled takes the kernel's own arguments as one.
    if together := isinstance(rest[-1], tuple):
        rest = rest[:-1]

    def run(*args: Any) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            _allocating(_scratch, watched, *args)
            return
        given = rest
        if places:
            given = rest.copy()
            for i, size in zip(places, sizes, strict=True):
                given[i] = _scratch(size)
        # Past Triton's hooks, such as a profiler's: they cost a fifth of a call even where there are none.
        start(*grid, stream(device()), *given, *((args,) if together else args))

    return run


def _allocating(allocator: Callable, run: Callable, *args: Any) -> Any:
    """``run(*args)``, in which Triton asks this allocator for memory; what is set elsewhere is the user's affair."""

    def call() -> Any:
        import triton

        triton.set_allocator(allocator)
        return run(*args)

    return contextvars.copy_context().run(call)


def _scratch(size: int, alignment: int = 1, stream: int | None = None) -> torch.Tensor:
    """Memory for one launch: who gets it next is a later launch on the stream."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _current_device(device: torch.device) -> Any:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device.index if device.type == "cuda" else -1)


class _Step(NamedTuple):
    """One launch: what it allocates, and where among its arguments the arrays go."""

    run: Callable
    args: list[Any]
    arrays: list[tuple[int, int]]  # argument, slot
    outputs: list[tuple[tuple[int, ...], torch.dtype]]
    spent: list[int]  # slots that nothing reads afterwards
    addresses: bool  # take the place of arrays on a GPU


class _Recording:
    """The launches between some tensors and what is made of them; and whether they were all that was done.

    A tensor that something else makes is seen when a launch is given it, or when it is a result. A change of one in
    place is seen by its version, which launches leave as it is.
    """

    def __init__(self, tensors: list[torch.Tensor | None]):
        # By identity, and weakly: what the host code lets go of is free for what comes next.
        self.slots: Any = WeakTensorKeyDictionary()
        self.versions: Any = WeakTensorKeyDictionary()
        self.fixed: Any = WeakTensorKeyDictionary()
        self.size = 0
        self.steps: list[_Step] = []
        self.first: Any = None  # of the launches that may run side by side
        self.complete = True
        for x in tensors:
            self._take(x)

    def __enter__(self) -> _Recording:
        _local.recording = self
        return self

    def __exit__(self, *error: object) -> None:
        _local.recording = None

    def _take(self, x: torch.Tensor | None) -> None:
        if x is not None:
            self.slots[x], self.versions[x] = self.size, _version(x)
        self.size += 1

    def add(self, run: Callable, inputs: Iterable[Any], kinds: Sequence[Any], made: Sequence[torch.Tensor | None],
            given: Sequence[Any], beside: bool = False, addresses: bool = True) -> None:
        """Note a launch of ``run(*inputs, *made, *given)``, which makes arrays of these ``kinds``."""
        for x in made:
            if x is not None and x not in self.slots:
                self._take(x)
        args = [*inputs, *made]
        arrays = []
        for i, x in enumerate(args):
            if isinstance(x, torch.Tensor):
                if x in self.fixed:
                    args[i] = x.data_ptr() if addresses and x.is_cuda else x
                else:
                    arrays.append((i, self.slots.get(x, -1)))
                    args[i] = None
        self.complete &= all(slot >= 0 for _, slot in arrays) and self._unchanged()
        args += given
        outputs = [k for k in kinds if isinstance(k, tuple)]
        if beside:
            # What the launches before it no longer need may be in use yet: it gets its memory before the first of them.
            self.first.outputs.extend(outputs)
            outputs = []
        self.steps.append(_Step(run, args, arrays, outputs, [], addresses))
        if not beside:
            self.first = self.steps[-1]

    def finish(self, results: Sequence[torch.Tensor | None]) -> _Launches | None:
        """Make a function that repeats the launches; None where something other than launches made the results."""
        made = [None if x is None else self.slots.get(x, -1) for x in results]
        # In inference mode and within an operator PyTorch counts no changes: what launched nothing may have made some.
        if not self.steps or not self.complete or -1 in made or not self._unchanged():
            return None
        last = {slot: step for step in self.steps for _, slot in step.arrays}
        for slot, step in last.items():
            if slot not in made:
                step.spent.append(slot)
        return _Launches(self.steps, made, list(self.fixed.values()))

    def _unchanged(self) -> bool:
        return all(_version(x) == version for x, version in self.versions.items())


def _version(x: torch.Tensor) -> int:
    """How often PyTorch has changed the tensor in place; it does not count that where no gradient can ever follow."""
    return 0 if x.is_inference() else x._version


class _Launches(NamedTuple):
    steps: list[_Step]
    results: list[int | None]
    constants: list[torch.Tensor]  # whose addresses the steps have

    def repeat(self, tensors: list[Any], device: torch.device) -> tuple[Any, ...]:
        """Launch everything on other tensors of the same kind."""
        on_gpu = device.type == "cuda"
        if on_gpu and device.index != torch._C._cuda_getDevice():
            with _current_device(device):
                return self.repeat(tensors, device)
        slots = tensors.copy()
        for run, args, arrays, outputs, spent, addresses in self.steps:
            for shape, dtype in outputs:
                slots.append(torch.empty(shape, dtype=dtype, device=device))
            args, addresses = args.copy(), addresses and on_gpu
            for i, slot in arrays:
                # Triton takes addresses too, and need not ask the driver whether they are on the device: they were.
                args[i] = slots[slot].data_ptr() if addresses else slots[slot]
            run(*args)
            for slot in spent:
                slots[slot] = None
        return tuple([None if i is None else slots[i] for i in self.results])


def kinds(arrays: Sequence[Any]) -> list[Any]:
    """The properties that tell launches apart, of tensors and of constants (NumPy arrays); None is an absent one.

    In its deterministic mode PyTorch fills what it allocates: no launch may overlap that.
    """
    found: list[Any] = [torch._C._get_deterministic_algorithms()]
    for x in arrays:
        if x is None:
            found.append(x)
        elif isinstance(x, np.ndarray):
            found += x.shape, x.dtype, x.tobytes()
        else:
            # Triton builds other code for arrays that are not aligned to 16 bytes.
            found += x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0
    return found


class remembered:  # noqa: N801, to those who use it a function
    """``fn(tensors)``, whose launches are recorded, and repeated for tensors of the same kind.

    Within another one that is recorded it is a part of that.

    Args:
        fn: takes a list of tensors or None, returns a tuple of the like. Its work depends on the tensors' shapes,
            strides, dtypes and device. If it does more to tensors than launch kernels, it is run each time.
        rehearsal: like ``fn``, and does nothing but launch kernels. Before the first call, what it launches is built
            side by side.
    """

    def __init__(self, fn: Callable[[list], tuple], rehearsal: Callable[[list], Any] | None = None):
        self.fn, self.rehearsal = fn, rehearsal
        self.known: dict[Any, Callable[[list], tuple]] = {}

    def __call__(self, tensors: list[Any]) -> tuple:
        """Run it, or repeat what it launched."""
        return (self._find(tensors) or self._record)(tensors)

    def for_one_kind(self) -> Callable[[list], tuple]:
        """A function of tensors that are always of one kind: it looks at their kind in the first call only."""
        run: Callable[[list], tuple] | None = None

        def call(tensors: list[Any]) -> tuple:
            nonlocal run
            known = run or self._find(tensors)
            if known is None:
                return self._record(tensors)
            run = known
            return known(tensors)

        return call

    def _find(self, tensors: list[Any]) -> Callable[[list], tuple] | None:
        if getattr(_local, "recording", None) is not None:
            return self.fn
        if tensors[0].device.type == "cuda" or interpreter.ON:
            return self.known.get(tuple(kinds(tensors)))
        return self.fn

    def _record(self, tensors: list[Any]) -> tuple:
        # One tensor given twice is two arguments, which other calls may tell apart.
        own = [x if x is None else x.detach() for x in tensors]
        capturing = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if self.rehearsal and not (self.known or interpreter.ON or capturing):
            rehearsal.Rehearsal(functools.partial(self.rehearsal, _without_memory(own)), tensors[0].device)
        with _Recording(own) as recording:
            results = self.fn(own)
        if len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        launches = recording.finish(results)
        repeat = functools.partial(launches.repeat, device=tensors[0].device) if launches else self.fn
        self.known[tuple(kinds(tensors))] = repeat
        return results


_local = threading.local()


@functools.lru_cache(maxsize=_MOST_KNOWN)
def launchers(kind: Any, forward: Callable, backward: Callable, opts: Any) -> tuple[remembered, remembered]:
    """A platform's ``forward`` and ``backward``, of flat lists of tensors."""
    n = len(kind._fields)

    def launch_forward(flat: list[Any]) -> tuple:
        outputs, kept = forward(kind(*flat), opts)
        return (*outputs, *kept)

    def launch_backward(flat: list[Any]) -> tuple:
        return tuple(backward(kind(*flat[:n]), tuple(flat[n:-2]), tuple(flat[-2:]), opts))

    def launch_both(flat: list[Any]) -> None:
        output, _, *kept = launch_forward(flat)
        launch_backward([*flat, *kept, output, None])  # an output's gradient is like it

    if not getattr(forward, "rehearsed", False):
        return remembered(launch_forward), remembered(launch_backward)
    first = launch_both if getattr(opts, "kept", False) else launch_forward
    return remembered(launch_forward, first), remembered(launch_backward, launch_backward)


@functools.lru_cache(maxsize=_MOST_KNOWN)
def launcher(kind: Any, compute: Callable, opts: Any) -> remembered:
    """``compute`` of a platform that changes arrays in place, of a flat list of tensors."""
    def launch(flat: list[Any]) -> tuple:
        return compute(kind(*flat), opts)

    return remembered(launch, launch if getattr(compute, "rehearsed", False) else None)
