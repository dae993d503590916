"""Host code runs once for all calls that are alike; a repeated call launches the same on its own tensors."""

import contextvars
import functools
import gc
import threading
import weakref
from collections import namedtuple
from types import SimpleNamespace

import pytest

torch, triton = map(pytest.importorskip, ("torch", "triton"))

from keraunos import frontends  # noqa: E402
from keraunos.frontends.torch import launch as torch_launch  # noqa: E402


class AddKernel:
    """Stands for a Triton kernel: ``y = x + factor * z``."""

    __name__ = "add_kernel"

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        def run(x, z, number, y, FACTOR, num_warps, num_stages, sanitize_overflow):
            self.seen.append((grid, number, num_warps, num_stages))
            y.copy_(x + FACTOR * z if z is not None else x)

        return run


@pytest.fixture
def kernel(monkeypatch):
    # Repeat launches on the CPU too, as the interpreter does.
    monkeypatch.setattr(torch_launch.interpreter, "ON", True)
    return AddKernel()


def add(kernel, x, z, factor=2):
    inputs, outputs = {"x": x, "z": z, "number": 7}, {"y": (tuple(x.shape), "float32")}
    return torch_launch.launch(kernel, (3,), inputs, outputs, {"FACTOR": factor}, num_warps=4, num_stages=2)[0]


def counted(fn):
    ran = []

    @functools.cache
    def call(opts):
        def run(tensors):
            ran.append(opts)
            return fn(tensors, opts)

        return torch_launch.remembered(run)

    return lambda tensors, opts: call(opts)(tensors), ran


def test_repeats_what_was_launched(kernel):
    def twice(tensors, factor):
        x, z = tensors
        between = add(kernel, x, z, factor)
        return between, None, add(kernel, between, x, factor)

    call, ran = counted(twice)
    for seed in range(3):
        torch.manual_seed(seed)
        x, z = torch.randn(2, 5)
        first, none, second = call([x, z], 2)
        assert torch.equal(first, x + 2 * z)
        assert torch.equal(second, first + 2 * x)
        assert none is None
    assert ran == [2]
    assert kernel.seen == [((3,), 7, 4, 2)] * 6


def test_runs_again_for_another_kind_of_call(kernel):
    call, ran = counted(lambda tensors, factor: (add(kernel, *tensors, factor),))
    x = torch.arange(64.0)
    calls = [
        ([x[:4], x[:4]], 2), ([x[:4], x[:4]], 3), ([x[:5], x[:5]], 2), ([x[:8:2], x[:4]], 2), ([x[:4], None], 2),
        ([x[:4].half(), x[:4]], 2), ([x[1:5], x[:4]], 2),
    ]
    for tensors, factor in calls * 2:
        first, second = tensors
        expected = first + factor * second if second is not None else first
        assert torch.equal(call(tensors, factor)[0], expected.float())
    assert ran == [factor for _, factor in calls]


def test_deterministic_mode_is_another_kind_of_call(kernel):
    call, ran = counted(lambda tensors, opts: (add(kernel, *tensors),))
    x = torch.randn(2, 4)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for mode in (False, True, False, True):
            torch.use_deterministic_algorithms(mode)
            torch.testing.assert_close(call([x, x], None)[0], 3 * x)
    finally:
        torch.use_deterministic_algorithms(before)
    assert len(ran) == 2


def test_looks_no_more_at_calls_that_are_alike(kernel):
    ran = []

    def twice(tensors):
        ran.append(tensors)
        return (add(kernel, add(kernel, *tensors), tensors[1]),)

    calls = torch_launch.remembered(twice)
    first, second = calls.for_one_kind(), calls.for_one_kind()
    for x, z in torch.randn(4, 2, 8):
        for call in (first, second, calls):
            assert torch.equal(call([x, z])[0], x + 2 * z + 2 * z)
    assert len(ran) == 1


def test_one_tensor_given_twice_is_two_arguments(kernel):
    call, ran = counted(lambda tensors, factor: (add(kernel, *tensors, factor),))
    x, z = torch.randn(2, 8)
    assert torch.equal(call([x, x], 2)[0], 3 * x)
    assert torch.equal(call([x, z], 2)[0], x + 2 * z)
    assert len(ran) == 1


@pytest.mark.parametrize("other", [
    lambda x, y: (y.mul_(2),), lambda x, y: (y * 2,), lambda x, y: (y[1:],), lambda x, y: (torch.ones(2),),
])
def test_what_does_more_than_launch_runs_each_time(kernel, other):
    call, ran = counted(lambda tensors, factor: other(tensors[0], add(kernel, *tensors, factor)))
    results = []
    for x in torch.randn(3, 2, 6):
        got = call(list(x), 2)[0]
        results.append(got)
        assert torch.equal(got, other(x[0], x[0] + 2 * x[1])[0])
    assert len(ran) == 3


@pytest.mark.usefixtures("kernel")
def test_what_launches_nothing_runs_each_time():
    """In inference mode, too, where PyTorch does not count what is changed in place."""
    call, ran = counted(lambda tensors, number: (tensors[0].add_(number),))
    with torch.inference_mode():
        x = torch.zeros(2)
        for times in range(1, 4):
            assert torch.equal(call([x], 2)[0], torch.full((2,), 2.0 * times))
    assert len(ran) == 3


def test_what_nothing_reads_any_more_is_freed(kernel):
    alive = []

    def chain(tensors, factor):
        x, z = tensors
        for _ in range(4):
            x = add(kernel, x, z, factor)
        return (x,)

    def watch(grid):
        def run(x, z, number, y, **options):
            gc.collect()
            alive.append(sum(ref() is not None for ref in refs))
            refs.append(weakref.ref(y))

        return run

    call, ran = counted(chain)
    # What is there by now, all tests before this one in the process, need not be looked at each time.
    gc.freeze()
    try:
        for _ in range(2):
            refs = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(AddKernel, "__getitem__", lambda self, grid: watch(grid))
                call(list(torch.randn(2, 6)), 2)
    finally:
        gc.unfreeze()
    # Of the results before, only the one that is read.
    assert alive == [0, 1, 1, 1] * 2
    assert len(ran) == 1


def test_a_failed_call_is_not_remembered(kernel):
    def fail(tensors, factor):
        add(kernel, *tensors, factor)
        raise ValueError("no")

    call, ran = counted(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            call(list(torch.randn(2, 6)), 2)
    assert len(ran) == 2


def test_no_programs_leave_the_outputs_as_they_are(kernel):
    def none(tensors, factor):
        outputs = {"y": ((0, 4), "float32")}
        return torch_launch.launch(kernel, (0,), {"x": tensors[0]}, outputs, {}, num_warps=1, num_stages=1)

    call, ran = counted(none)
    for _ in range(2):
        assert call([torch.ones(2)], None)[0].shape == (0, 4)
    assert (len(ran), kernel.seen) == (1, [])


@pytest.mark.parametrize("scratch", [0, 16])
def test_launches_as_triton_would(monkeypatch, scratch):
    """By Triton's own launcher, of which only what it compiles is another; and through hooks, if there are any."""
    triton = pytest.importorskip("triton")
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(triton.runtime.driver, "_active", object())  # the launcher asks for it first
    monkeypatch.setattr(torch, "empty", lambda size, **options: ("memory", size))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: streams[device], raising=False)
    launched, watched, streams, start = [], [], {3: 70}, driver.CudaLauncher.__new__(driver.CudaLauncher)
    vars(start).update(
        launch=lambda *args: launched.append(args), num_ctas=1, launch_cooperative_grid=False, launch_pdl=True,
        global_scratch_size=scratch, global_scratch_align=16, profile_scratch_size=0, profile_scratch_align=1,
        gsan_enabled=False, arg_annotations=None, kernel_signature=None,  # of Triton 3.7 and newer
    )

    class Built:
        run, function, packed_metadata = start, 500, (4, 1, 1000)

        def __getitem__(self, grid):
            return lambda *args: watched.append((grid, *args))

    def launch():
        triton.set_allocator(lambda size, align, stream: ("memory", size))
        again = torch_launch._again(Built(), (5, 6, 1))
        launched.clear()
        for streams[3] in (80, 90):
            again(1000, None, 7)
            start(5, 6, 1, streams[3], 500, (4, 1, 1000), None, None, None, 1000, None, 7)
        chain, hook = triton.knobs.runtime.launch_enter_hook, lambda metadata: None
        chain.add(hook)
        again(2000, None, 7)
        chain.remove(hook)

    contextvars.copy_context().run(launch)
    assert len(launched) == 4
    assert launched[::2] == launched[1::2]
    assert watched == [((5, 6, 1), 2000, None, 7)]


def test_stages_that_do_not_fit_are_left_out(kernel):
    from triton.runtime.errors import OutOfResources

    class Greedy(AddKernel):
        room = 2

        def __getitem__(self, grid):
            run = super().__getitem__(grid)

            def start(*args, num_stages, **options):
                if num_stages > self.room:
                    raise OutOfResources(num_stages, self.room, "shared memory")
                return run(*args, num_stages=num_stages, **options)

            return start

    def launch(stages):
        inputs, outputs = {"x": x, "z": None, "number": 7}, {"y": ((2,), "float32")}
        return torch_launch.launch(greedy, (1,), inputs, outputs, {"FACTOR": 1}, num_warps=4, num_stages=stages)[0]

    greedy, x = Greedy(), torch.arange(2.0)
    assert torch.equal(launch(4), x)
    assert [stages for *_, stages in greedy.seen] == [2]
    greedy.room = 0
    with pytest.raises(ValueError, match=r"add_kernel needs 1 of shared memory with num_stages = 1, .* has 0"):
        launch(2)


def test_what_takes_tensors_and_constants_is_repeated_too(kernel):
    constant, seen = torch.ones(8), []

    def double(x, y):
        seen.append(x)
        y.copy_(2 * x)

    def inner(tensors):
        return (add(kernel, tensors[0], torch_launch.fixed(constant)),)

    part = torch_launch.remembered(inner)

    def outer(tensors, opts):
        (between,) = part(tensors)
        return torch_launch.recorded(double, [between], [((8,), torch.float32)])

    call, ran = counted(outer)
    for x in torch.randn(3, 8):
        assert torch.equal(call([x], 2)[0], 2 * (x + 2))
        # A part that stands alone is remembered on its own.
        assert torch.equal(part([x])[0], x + 2)
    assert len(ran) == 1
    assert len(part.known) == 1
    assert all(isinstance(x, torch.Tensor) for x in seen)


def test_tokens_that_are_too_far_apart_are_copied():
    """The rows of a tile are counted in 32 bits; heads and sequences may be anywhere."""
    from keraunos.frontends.torch import fitting

    (fits,) = fitting(["query"])
    far = torch.empty(100, 4096, 64, 128, device="meta").transpose(0, 1)
    assert not fits(far)
    assert fits(far[:1].contiguous())
    assert fits(far[:, :1])
    assert fits(torch.empty(64, 4096, 8192, 128, device="meta").transpose(1, 2))


class Source:
    """The source that a kernel is read from."""

    def make_ir(self):
        return self


class BuiltKernel(AddKernel):
    """A kernel that is built in its first call, for which it waits until others are, too."""

    device_caches, ASTSource = {None: None}, Source

    def __init__(self, together):
        super().__init__()
        self.together, self.built = together, []

    def warmup(self, *args, grid, **options):
        assert all(x.device.type == "meta" for x in args if isinstance(x, torch.Tensor))
        self.ASTSource().make_ir()
        self.together.wait(timeout=10)
        self.built.append(options)
        return self

    @property
    def run(self):
        return None


def test_a_first_call_builds_side_by_side(monkeypatch):
    """The kernels, and what launches them."""
    together, launched = threading.Barrier(4), []

    def launcher(source, metadata):
        together.wait(timeout=10)
        launched.append(type(source))

    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(launcher_cls=launcher))
    first, second = BuiltKernel(together), BuiltKernel(together)

    def fn(tensors):
        return (add(second, add(first, *tensors), tensors[1]),)

    run = torch_launch.remembered(fn, rehearsal=fn)
    monkeypatch.setattr(torch_launch, "_build", lambda kernel, grid, args, options, device: (
        kernel[grid](*args, **options), None))
    for _ in range(2):
        x, z = torch.randn(4), torch.randn(4)
        # What finds whether a call is known looks for GPUs, of which there is none.
        result = run._record([x, z])[0]
        torch.testing.assert_close(result, x + 4 * z)
        assert first.built == second.built == [dict(FACTOR=2, num_warps=4, num_stages=2, sanitize_overflow=False)]
    assert len(first.seen) == len(second.seen) == 2
    assert launched == [Source] * 2


@pytest.mark.parametrize("kept", [True, False])
def test_a_first_call_builds_what_its_gradient_launches_too(monkeypatch, kept):
    together = threading.Barrier(1 + kept)
    ahead, back = BuiltKernel(together), BuiltKernel(together)
    Args, Opts = namedtuple("Args", "x z"), namedtuple("Opts", "kept")

    def forward(args, opts):
        return (add(ahead, *args), None), (args.z,)

    def backward(args, residuals, grads, opts):
        assert grads[0].shape == args.x.shape
        assert grads[1] is None
        return Args(add(back, grads[0], *residuals), None)

    forward.rehearsed = True
    run, _ = torch_launch.launchers(Args, forward, backward, Opts(kept))
    monkeypatch.setattr(torch_launch, "_build", lambda kernel, grid, args, options, device: (
        kernel[grid](*args, **options), None))
    x, z = torch.randn(4), torch.randn(4)
    torch.testing.assert_close(run._record([x, z])[0], x + 2 * z)
    assert (len(ahead.built), len(back.built)) == (1, kept)
    assert (len(ahead.seen), len(back.seen)) == (1, 0)


@pytest.mark.parametrize("rehearsed", [True, False])
def test_a_first_call_in_place_builds_side_by_side(monkeypatch, rehearsed):
    kernel, Args = BuiltKernel(threading.Barrier(1)), namedtuple("Args", "x z")

    def compute(args, opts):
        return add(kernel, *args), args.x

    compute.rehearsed = rehearsed
    monkeypatch.setattr(torch_launch, "_build", lambda kernel, grid, args, options, device: (
        kernel[grid](*args, **options), None))
    x, z = torch.randn(4), torch.randn(4)
    torch.testing.assert_close(torch_launch.launcher(Args, compute, None)._record([x, z])[0], x + 2 * z)
    assert (len(kernel.built), len(kernel.seen)) == (rehearsed, 1)


@pytest.mark.parametrize("debug", [False, True])
def test_integers_are_checked_by_who_debugs(monkeypatch, debug):
    monkeypatch.setattr(triton.knobs.runtime, "debug", debug)
    assert frontends.build_options({"MAXNREG": 96}) == {"maxnreg": 96, "sanitize_overflow": debug}


def test_what_cannot_be_rehearsed_is_built_when_it_is_launched(monkeypatch):
    kernel = AddKernel()  # which has no warmup

    def fn(tensors):
        assert tensors[0].sum().item() != 0  # which tensors without memory do not know
        return (add(kernel, *tensors),)

    monkeypatch.setattr(torch_launch, "_build", lambda kernel, grid, args, options, device: (
        kernel[grid](*args, **options), None))
    x, z = torch.ones(4), torch.randn(4)
    run = torch_launch.remembered(fn, rehearsal=fn)
    torch.testing.assert_close(run._record([x, z])[0], x + 2 * z)
    assert len(kernel.seen) == 1


def test_nothing_is_rehearsed_without_being_asked_for():
    """Host code may do more than launch kernels: exchange with other ranks, draw random numbers."""
    ran = []

    def fn(tensors):
        ran.append(tensors[0].device.type)
        return (tensors[0] + 1,)

    torch_launch.remembered(fn)._record([torch.ones(4)])
    assert ran == ["cpu"]


def test_an_interrupted_rehearsal_ends():
    def interrupted(tensors):
        raise KeyboardInterrupt

    x = torch.ones(4)
    with pytest.raises(KeyboardInterrupt):
        torch_launch.remembered(interrupted, rehearsal=interrupted)._record([x, x])
    assert getattr(torch_launch._local, "rehearsal", None) is None
