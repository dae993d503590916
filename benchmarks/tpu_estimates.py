"""Estimates of the compiler for TPUs: the time of linear attention on ``xla`` on a v5e; no TPU runs anything.

    make build/libtpu
    PYTHONPATH=build/libtpu JAX_PLATFORMS=cpu python benchmarks/tpu_estimates.py            every row
    PYTHONPATH=build/libtpu JAX_PLATFORMS=cpu python benchmarks/tpu_estimates.py lightning  rows of that name, and the
                                                                                         operations that take most

An estimate is the cycles that the compiler expects of each operation, times the runs of the loops that it is in. Of
conditions, which look for strong gates here, it takes the side for none.
"""

from __future__ import annotations

import argparse
import os
import re

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import keraunos

CLOCK = 1.5e9
B, T, H, K = 1, 8192, 16, 128
SHAPES = {"lightning": None, "scalar": (B, T, H), "vector": (B, T, H, K)}


def computations(text: str) -> dict[str, list[str]]:
    """The operations of each computation of a compiled program."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.-]+) \(", line):
            name = "ENTRY" if head[1] else head[2]
            found[name] = []
        elif line.startswith("  "):
            found[name].append(line.strip())
    return found


def costs(text: str) -> list[tuple[float, int, str]]:
    """``(cycles, runs, operation)`` of all that a program does."""
    program, rows = computations(text), []

    def walk(name: str, runs: int) -> None:
        for line in program[name]:
            cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
            if cycles:
                rows.append((float(cycles[1]), runs, line))
            if loop := re.search(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)", line):
                bounds = [int(n) for n in re.findall(r"constant\((\d+)\)", "\n".join(program[loop[1]]))]
                walk(loop[2], runs * max(bounds, default=1))
            elif branch := re.search(r" conditional\(.*(?:false_computation=|branch_computations=\{)%([\w.-]+)", line):
                walk(branch[1], runs)

    walk("ENTRY", 1)
    return rows


def compiled(name: str, gradients: bool) -> str:
    """The program for a v5e, as text."""
    device = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]

    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *g: jax.Array) -> jax.Array:
        if g:
            return keraunos.gla_attention(q, k, v, *g, platform="xla")
        return keraunos.lightning_attention(q, k, v, layer_idx=5, num_layers=32, platform="xla")

    def call_and_gradients(doutput: jax.Array, *given: jax.Array) -> tuple:
        output, pull = jax.vjp(call, *given)
        return output, pull(doutput)

    x, gates = array(B, T, H, K), SHAPES[name]
    given = [x, x, x] + ([] if gates is None else [array(*gates, dtype="float32" if len(gates) == 3 else "bfloat16")])
    fn, given = (call_and_gradients, [x, *given]) if gradients else (call, given)
    return jax.jit(fn).lower(*given).compile().as_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*SHAPES, []], help="rows, whose operations are listed too")
    options = parser.parse_args()
    for name in options.names or SHAPES:
        for gradients in (False, True):
            rows = costs(compiled(name, gradients))
            total = sum(cycles * runs for cycles, runs, _ in rows)
            what = "forward + backward" if gradients else "forward"
            print(f"{name}, {what}: {1e3 * total / CLOCK:.2f} ms", flush=True)
            for cycles, runs, line in sorted(rows, key=lambda row: -row[0] * row[1])[: 30 if options.names else 0]:
                what = line.split(", metadata")[0].removeprefix("ROOT ")
                source = re.search(r'op_name="([^"]*)"', line)
                where = source[1].rsplit("closed_call", 1)[-1] if source else ""
                print(f"  {1e3 * cycles * runs / CLOCK:7.3f} ms {runs:5} x {cycles:8.0f}  {what[:110]}  {where[-60:]}")


if __name__ == "__main__":
    main()
