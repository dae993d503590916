"""Linear attention on a GPU where calls have more than queries, keys, values and constant decays, or other sizes.

    PYTHONPATH=. python3 benchmarks/variants.py [--platforms cuda,triton] [--seconds 150] [--out FILE]

Packed sequences, gates, learned decays, head dims of 256, from JAX, forward and with gradients: the device's own times,
and times the floor, the fewest bytes that memory must move over the bandwidth of a large copy in the same run. Results
go to benchmarks/results/variants/<gpu>.json after every call; one that failed is there with its reason.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np

import keraunos
from keraunos import decay
from keraunos.frontends.jax import measure as jax_measure

ROUNDS = 5
# Of 32 sequences, with a fixed seed.
LENGTHS = np.random.default_rng(0).integers(16, 4097, 32)
PACKED = int(LENGTHS.sum())


class Call(NamedTuple):
    """One call.

    Attributes:
        name: what is special in it.
        B, T, H, D: its sizes; K and V are D.
        gate: none, or gates per token ``"scalar"``, or per token and dimension of the key ``"vector"``.
        gamma: the decay per head: ``"constant"`` lightning's, ``"learned"`` the same with a gradient, or "".
        lengths: of packed sequences.
    """

    name: str
    B: int
    T: int
    H: int = 64
    D: int = 128
    gate: str = ""
    gamma: str = "constant"
    lengths: Any = None

    @property
    def units(self) -> int:
        """Arrays of the size of q that the forward must move: q, k, v, o, and gates if they are as large."""
        return 4 + (self.gate == "vector")

    def bytes_moved(self, backward: bool) -> int:
        """As ``Workload.bytes_moved``: with gradients the inputs and do are read again, and the gradients written."""
        return self.B * self.T * self.H * self.D * 2 * (3 * self.units - 1 if backward else self.units)

    def make(self) -> tuple[list[jax.Array], Callable]:
        """The arrays that have gradients, and the call as a function of them and a platform."""
        shape = self.B, self.T, self.H, self.D
        arrays = [jax_measure.normal(shape, "bfloat16", seed, "gpu") for seed in range(3)]
        if self.gate:
            gates = jax_measure.normal(shape if self.gate == "vector" else shape[:3], "float32", 3, "gpu")
            arrays.append((jax.nn.log_sigmoid(gates) / 16).astype(jnp.bfloat16))
        gamma = decay.lightning(self.H, 16, 32) if self.gamma else None
        if self.gamma == "learned":
            arrays.append(jnp.asarray(gamma))
        cu = None if self.lengths is None else jnp.asarray(np.cumsum([0, *self.lengths]), jnp.int32)

        def call(platform, q, k, v, *more):
            more = list(more)
            g = more.pop(0) if self.gate else None
            g_gamma = more.pop(0) if more else gamma
            return keraunos.gla_attention(q, k, v, g, g_gamma, None, cu, platform=platform)

        return arrays, call


CALLS = (
    Call("lightning", 2, 16384),
    Call("a learned decay", 2, 16384, gamma="learned"),
    Call("gates per token", 2, 16384, gate="scalar", gamma=""),
    Call("lightning", 1, 8192),
    Call("gates per token", 1, 8192, gate="scalar", gamma=""),
    Call("lightning, K = V = 256", 1, 8192, H=32, D=256),
    Call("lightning, one row", 1, PACKED),
    Call("lightning, 32 packed sequences", 1, PACKED, lengths=LENGTHS),
    Call("GLA, one row", 1, PACKED, gate="vector", gamma=""),
    Call("GLA, 32 packed sequences", 1, PACKED, gate="vector", gamma="", lengths=LENGTHS),
)


def measure(call: Call, platforms: list[str], backward: bool, bandwidth: float) -> dict[str, Any]:
    """Milliseconds of each platform, taken in turns, and times the floor."""
    arrays, run = call.make()
    cotangents = [jax_measure.normal((call.B, call.T, call.H, call.D), "bfloat16", 9, "gpu")] if backward else None
    programs, found = {}, {}
    for platform in platforms:
        try:
            programs[platform] = jax_measure.program(lambda *x, p=platform: run(p, *x), arrays, cotangents)
        # The others are still worth knowing.
        except Exception as error:
            found[platform] = {"failed": harness.failure(error)}
    clock = jax_measure.clock(list(programs.values()), "gpu")
    times = harness.in_turns({name: partial(clock, program) for name, program in programs.items()}, ROUNDS)
    floor = call.bytes_moved(backward) / bandwidth
    for name, seconds in times.items():
        median = statistics.median(seconds[1:])
        found[name] = {"milliseconds": round(1e3 * median, 4), "times the floor": round(median / floor, 3)}
    return found


def main() -> None:
    """Measure each call, write after each."""
    parser = harness.parser(__doc__, "variants", seconds=150)
    parser.add_argument("--platforms", default="cuda,triton")
    options = parser.parse_args()
    run = harness.Run(options, "jax")
    about = run.measured()
    run.results = {"about": about, "calls": []}
    # Packed sequences come first.
    for call in sorted(CALLS, key=lambda call: call.lengths is None):
        row = {"name": call.name, "B, T, H, K = V": [call.B, call.T, call.H, call.D]}
        for backward in (False, True):
            given = {"left out": "the time was over"} if run.late else measure(
                call, options.platforms.split(","), backward, about["copy_bandwidth"])
            row["forward and backward" if backward else "forward"] = given
        run.results["calls"].append(row)
        harness.say(json.dumps(row))
        run.save()


if __name__ == "__main__":
    main()
