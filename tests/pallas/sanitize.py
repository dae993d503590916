"""Run every Pallas kernel in every shape of its program, on small arrays, for compute-sanitizer to watch.

``compute-sanitizer --tool memcheck python -m tests.pallas.sanitize``; ``--tool racecheck`` watches shared memory. With
two numbers, such as ``1 4``, only a part: the second of four. ``planted`` runs a kernel with faults of both kinds,
which the tools must find. ``test_gpu.py`` says what the tools need in the environment.
"""

from __future__ import annotations

import sys
from unittest import mock

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from keraunos.kernels.linear_attention.contract import Options
from keraunos.kernels.linear_attention.pallas import gates_gradients, gates_scan, gates_starts, gates_strong, starts
from keraunos.kernels.linear_attention.pallas import kernels as pallas_kernels
from keraunos.kernels.linear_attention.pallas import passes as platform
from keraunos.ops import Config
from tests.pallas.cases import case
from tests.sanitizer import limit_time

GATES = dict(gate="scalar", gamma=0, state=True)
# And how sequences are cut.
CALLS = [
    (case(T=200, K=128, V=128, state=True), None),
    (case(T=333, H=4, G=2, V=128, state=True, reverse=True), (2, 2)),
    (case(lengths=(5, 0, 150, 70), K=128, V=128, state=True), None),
    (case(lengths=(5, 0, 333, 70), K=128, state=True, reverse=True), (2, 1)),
    (case(T=200, K=128, V=128, **GATES), None),
    (case(T=1100, **GATES), (8, 2)),
    (case(lengths=(5, 0, 600, 70), K=128, V=128, H=4, G=2, **GATES), (8, 2)),
    (case(T=200, K=256, V=256, state=True), None),
    (case(lengths=(5, 150), K=256, V=128, **GATES), None),
    (case(T=200, K=128, V=128, gate="vector", state=True), None),
    (case(T=333, V=128, gate="vector", decay="infinite", reverse=True), (2, 1)),
    (case(lengths=(5, 0, 333, 70), K=128, gate="vector", gate_dtype="bfloat16", decay="strong"), (2, 1)),
]
KERNELS = {"scan", "states", "combine", "gates_scan", "gates_states", "gates_combine", "gates_gradients",
           "gates_strong"}


def planted():
    """Two warpgroups write different values to one place in shared memory; the second program, past the array's end."""

    N = 512

    def body(out, tile):
        me, program = lax.axis_index("warpgroup"), lax.axis_index("program")
        tile[...] = jax.numpy.full(N, me, "int32")
        rows = plgpu.load(tile, layout=plgpu.Layout.WG_STRIDED((N,), 4))
        out.at[pl.ds(program * (1 << 26) * 8, N)][...] = rows

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((N,), "int32"), scratch_types=[plgpu.SMEM((N,), "int32")], grid=(2,),
        grid_names=("program",), num_threads=2, thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    jax.block_until_ready(jax.jit(kernel)())


def main(part: int = 0, parts: int = 1) -> None:
    """Forward and backward of each."""
    launched = set()
    launch = pallas_kernels.launch_kernel

    def noted(*args, name, **options):
        launched.add(name)
        return launch(*args, name=name, **options)

    for some, segmentation in CALLS[part::parts]:
        learned = some.gate != "none"
        opts = Options(some.K**-0.5, some.reverse, Config(num_stages=2), () if learned else ("g_gamma",))

        def both(args, doutput, dfinal, opts=opts):
            outputs, residuals = platform.forward(args, opts)
            return outputs, platform.backward(args, residuals, (doutput, dfinal), opts)

        cut = (lambda *_, cut=segmentation: cut) if segmentation else platform.segmentation
        with (
            mock.patch.object(platform, "segmentation", cut),
            mock.patch.object(pallas_kernels, "launch_kernel", noted),
            mock.patch.object(starts, "launch_kernel", noted),
            mock.patch.object(gates_scan, "launch_kernel", noted),
            mock.patch.object(gates_starts, "launch_kernel", noted),
            mock.patch.object(gates_gradients, "launch_kernel", noted),
            mock.patch.object(gates_strong, "launch_kernel", noted),
        ):
            results = jax.tree.leaves(jax.jit(both)(*some.arrays))
        finite = all(np.isfinite(np.asarray(x).astype(np.float32)).all() for x in results)
        print(some, flush=True)
        if not finite:
            raise SystemExit("not finite")
    if parts == 1 and launched != KERNELS:
        raise SystemExit(f"launched {sorted(launched)}; there are {sorted(KERNELS)}")


if __name__ == "__main__":
    limit_time()
    planted() if sys.argv[1:] == ["planted"] else main(*map(int, sys.argv[1:]))
