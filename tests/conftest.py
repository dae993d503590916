"""Where the tests run: on the CPU, with 8 host devices for JAX, unless --gpu is given."""

import gc
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

# Parts of the names of tests that take half a minute or more: without --gpu, and with it.
_LONGEST = ("test_in_the_interpreter", "test_language_model")
_LONGEST_ON_GPUS = ("test_any_shape", "test_many_segments", "test_both_frameworks", "test_grad_and_checkpoint")
# Keep a GPU busy, and a processor each that waits for it: few at a time.
_WATCHED = "compute_sanitizer"
_RUN = pytest.StashKey[int]()


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run on the GPU, every platform and both frameworks")


def pytest_configure(config):
    # Before any test imports a framework. The user's own caches and settings stay out of it.
    os.environ["KERAUNOS_CACHE_DIR"] = tempfile.mkdtemp(prefix="keraunos-test-")
    for name in ("KERAUNOS_AUTOTUNE_POLICY", "KERAUNOS_LOG"):
        os.environ.pop(name, None)
    if config.getoption("gpu"):
        os.environ["KERAUNOS_TEST_GPU"] = "1"
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        _begin_with_another_gpu()
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Most of the time would go into compiling for speed what runs once.
        flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
        # Traces of programs are millions of objects, which would be looked through again and again. On a GPU its memory
        # is what garbage holds.
        gc.set_threshold(100_000, 50, 100)


def _begin_with_another_gpu():
    """Each of the processes that share the tests sees all GPUs, in another order: most tests take the first."""
    given, worker = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or (given is None and shutil.which("nvidia-smi") is None):
        return
    if given is None:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        given = ",".join(str(i) for i in range(listed.count("UUID: GPU")))
    gpus = given.split(",")
    first = int(worker.removeprefix("gw")) % len(gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def pytest_collection_modifyitems(config, items):
    """Each of the processes that share the tests has some of the longest, first: all end at about the same time."""
    processes, gpu = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), config.getoption("gpu")
    watched = [item for item in items if gpu and _WATCHED in item.nodeid]
    longest = [item for item in items if any(name in item.nodeid for name in (_LONGEST_ON_GPUS if gpu else _LONGEST))]
    first = {*watched, *longest}
    others, left = [item for item in items if item not in first], len(items)
    watchers = -(-processes // 4) if watched else 0
    shares = [watched[i::watchers] if i < watchers else [] for i in range(processes)]
    for i, item in enumerate(longest):
        shares[-1 - i % max(processes - watchers, 1)].append(item)
    items.clear()
    for i, own in enumerate(shares):
        count = max(left // (processes - i) - len(own), 0)  # each gets as many tests, one more the last ones
        items += own + others[:count]
        left -= len(own) + count
        del others[:count]


@pytest.fixture(params=["high", "medium"])
def rounded_products(request):
    """PyTorch may round the operands of float32's products: "high" does on GPUs and newer CPUs, "medium" on more."""
    torch = pytest.importorskip("torch")
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision("highest")


def pytest_collection_finish(session):
    # Modules stay: no search for garbage has to look through them.
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    # Each program that JAX keeps takes some of the memory mappings that a process may have, of which thousands run out.
    item.session.stash[_RUN] = item.session.stash.get(_RUN, 0) + 1
    if item.session.stash[_RUN] % 400 == 0 and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


def pytest_runtest_logreport(report):
    # A run on a GPU may be cut off before the summary: say at once what failed.
    if os.environ.get("KERAUNOS_TEST_GPU") == "1" and report.failed and not hasattr(report, "node_is_worker"):
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
        print(f"\nFAILED {report.nodeid}: {crash.splitlines()[0] if crash else ''}", flush=True)
