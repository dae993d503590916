"""The first call of a contestant in a process of its own: `first_call` starts a process of this file.

What a user waits for at the first call of a fresh process: compiling, and tuning where a library tunes. The start of
the framework and of the device, and making the inputs, are not in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict

from workloads import Shape, Workload


def first_call(
    workload: Workload, name: str, framework: str, environment: Mapping[str, str], seconds: float
) -> float | str:
    """Start a process that makes the call once.

    Args:
        workload: the call.
        name: of a contestant.
        framework: of the same.
        environment: set for the process; an empty ``TRITON_CACHE_DIR`` makes Triton's kernels compile anew.
        seconds: the process is ended after that long.

    Returns:
        Seconds, or why there are none.
    """
    question = json.dumps({**asdict(workload), "name": name, "framework": framework})
    command = [sys.executable, __file__, question]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **environment}, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its first call takes more than {seconds:.0f} s"
    lines = done.stdout.splitlines() if done.returncode == 0 else done.stderr.splitlines()
    return float(lines[-1]) if done.returncode == 0 else f"its first call failed: {(lines or ['no message'])[-1]}"


def _main(question: str) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from contestants import find
    from measuring import finish

    from keraunos import frontends

    asked = json.loads(question)
    name, framework = asked.pop("name"), asked.pop("framework")
    workload = Workload(**{**asked, "shape": Shape(**asked["shape"])})
    contestant = next(c for c in find(workload.operation, [], [name]) if (c.name, c.framework) == (name, framework))
    reason = contestant.unsupported(workload)
    if reason is not None:
        sys.exit(reason)
    arrays, cotangents = workload.arguments(framework, 0)
    fn = contestant.function(workload, workload.log_decay())
    finish(framework, arrays)
    start = time.perf_counter()
    finish(framework, frontends.get(f"{framework}.measure").program(fn, arrays, cotangents)())
    print(time.perf_counter() - start)


if __name__ == "__main__":
    _main(sys.argv[1])
