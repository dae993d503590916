"""Faults of cache and tuner, as a user sees them: one line of log, and the call's result all the same.

python benchmarks/faults.py        as root on Linux: it mounts file systems, one read-only and one full
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CALL = """
import sys
import numpy as np, jax, jax.numpy as jnp
import keraunos
from keraunos.ops import Tuner
from keraunos.ops.executor import default_executor
if sys.argv[1] == "all candidates fail":
    from keraunos.kernels.linear_attention import xla
    from keraunos.kernels import kernel_registry
    from dataclasses import replace
    row = kernel_registry.find("gla", "xla")[0]
    def off(*args, cfg=None, **options):
        output, state = xla.gla(*args, cfg=cfg, **options)
        return output * 1.01, state
    kernel_registry.unregister(row)
    kernel_registry.register("gla", "xla", frameworks=("jax",))(replace(xla.gla, fn=off))
default_executor().chain.tuner = Tuner(warmup=0, iters=1, budget=120)
q = jnp.ones((1, 16, 1, 16))
platform = "tritom" if sys.argv[1] == "unknown platform" else "xla"
gates = jnp.full((1, 16, 1), -0.1)
output = keraunos.gla_attention(q, q, q, gates, platform=platform)
choice = keraunos.explain(keraunos.gla_attention, q, q, q, gates, platform=platform)
print("result", output.shape, "by tier", choice.tier)
"""


def run(fault, folder):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "KERAUNOS_CACHE_DIR": str(folder)}
    environment["KERAUNOS_AUTOTUNE_POLICY"] = "autotune"
    done = subprocess.run(
        [sys.executable, "-c", CALL, fault], env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(("Traceback", "  "))]
    print(f"{fault} (exit {done.returncode})")
    for line in lines:
        print(f"    {line.replace(str(folder), '<cache>')}")
    found = sorted(p.name for p in Path(folder).rglob("*") if p.is_file() and not p.name.endswith(".lock"))
    print(f"    files: {', '.join(found) or 'none'}")


@contextlib.contextmanager
def mounted(folder, *options):
    subprocess.run(["mount", *options, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for fault, content in (
        ("nothing is wrong", None),
        ("corrupt JSON", b'{"schema": 1, "entries": \x00}'),
        ("truncated JSON", b'{\n "schema": 1,\n "device": "cpu",\n "entries": {\n  "cpu | xla'),
        ("wrong schema version", b'{"schema": 99, "entries": {}}'),
        ("unknown platform", None),
        ("all candidates fail", None),
    ):
        with tempfile.TemporaryDirectory() as folder:
            if content is not None:
                Path(folder, "configurations").mkdir()
                Path(folder, "configurations", "cpu.json").write_bytes(content)
            run(fault, folder)
    with tempfile.TemporaryDirectory() as folder:
        with mounted(folder, "-t", "tmpfs", "-o", "ro", "none"):
            run("read-only directory", folder)
        with mounted(folder, "-t", "tmpfs", "-o", "size=64k", "none"):
            with contextlib.suppress(OSError):
                Path(folder, "filler").write_bytes(bytes(1 << 20))
            run("disk full", folder)


if __name__ == "__main__":
    main()
