"""Where the tests run: on the CPU, with 8 host devices for JAX, unless --gpu is given."""

import os
import shutil
import subprocess
import tempfile

# Parts of the names of tests that take half a minute or more.
_LONGEST = ("test_in_the_interpreter", "test_demo", "compute_sanitizer")


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


def pytest_collection_modifyitems(items):
    """Each of the processes that share the tests has some of the longest, first: all end at about the same time."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    longest = [item for item in items if any(name in item.nodeid for name in _LONGEST)]
    others = [item for item in items if item not in longest]
    left = len(items)
    items.clear()
    for i in range(processes):
        own = longest[i::processes]
        count = left // (processes - i) - len(own)  # each gets as many tests, one more the last ones
        items += own + others[:count]
        left -= len(own) + count
        del others[:count]


def pytest_runtest_logreport(report):
    # A run on a GPU may be cut off before the summary: say at once what failed.
    if os.environ.get("KERAUNOS_TEST_GPU") == "1" and report.failed and not hasattr(report, "node_is_worker"):
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
        print(f"\nFAILED {report.nodeid}: {crash.splitlines()[0] if crash else ''}", flush=True)
