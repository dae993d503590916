"""compute-sanitizer over a module of the tests that runs kernels."""

import faulthandler
import os
import shutil
import subprocess
import sys

import pytest

CHECKS = ("memcheck", "racecheck")
# Seconds that a module may take, several times what it takes.
_LONGEST = 240


def limit_time() -> None:
    """Have the module that is watched say where it is, and end, if it does not end by itself."""
    faulthandler.dump_traceback_later(_LONGEST, exit=True)


def watched(check: str, module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run ``python -m module arguments``; the return code is 9 if the check finds a fault."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    # Where it follows the compilers that JAX starts, too, the tool itself ends with a segmentation fault now and then.
    options = ["--tool", check, "--target-processes", "application-only", "--error-exitcode", "9",
               "--print-limit", "10000"]
    command = [tool, *options, sys.executable, "-m", module, *arguments]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if "Device not supported" in run.stdout:
        pytest.skip("compute-sanitizer does not support this machine's GPU")
    return run
