"""Compile the kernels for TPUs without one: ``python -m tests.pallas.compile`` prints what the compiler made for a v5e.

It needs ``libtpu``, which ``make test-tpu-compile`` puts into a folder of its own.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from keraunos.frontends.jax import partition
from keraunos.kernels import kernel_registry
from keraunos.kernels.device import pallas
from keraunos.kernels.linear_attention.contract import Args, Options
from keraunos.kernels.linear_attention.pallas import decays, passes
from keraunos.kernels.softmax_attention import contract as softmax_contract
from keraunos.kernels.softmax_attention.pallas import passes as softmax_passes
from keraunos.kernels.state_pool import contract as pool_contract
from keraunos.ops import Config

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
# A v5e: cycles and bytes of memory a second.
CLOCK, BANDWIDTH = 1.5e9, 819e9


def arrays(kind, B=1, T=8192, H=16, G=None, K=128, V=128, dtype="bfloat16", N=None, state=False):
    """The arguments of a call: ``constant``, ``scalar`` or ``vector`` decays."""
    x, G = jax.ShapeDtypeStruct, G or H
    g = {"constant": None, "scalar": x((B, T, H), "float32"), "vector": x((B, T, H, K), dtype)}[kind]
    return Args(
        x((B, T, H, K), dtype), x((B, T, G, K), dtype), x((B, T, G, V), dtype), g,
        x((H,), "float32") if kind == "constant" else None, x((N or B, H, K, V), "float32") if state else None,
        x((N + 1,), "int32") if N else None,
    )


def compiled(args: Args, gradients: bool, chip: str = "v5e", block_q: int = 128, vmem: int = pallas.VMEM >> 20):
    """A call, with ``vmem`` MiB of fast memory at most; what does not fit is an error of the compiler's."""
    state = args.initial_state is not None
    constant = ("g_gamma",) if args.g is None else ()
    opts = Options(args.query.shape[3] ** -0.5, False, Config(block_q=block_q), constant, state, gradients)

    def call(args, doutput):
        outputs, kept = passes.forward(args, opts)
        dfinal = outputs[1] if state else None
        return outputs, passes.backward(args, kept, (doutput, dfinal), opts) if gradients else None

    doutput = jax.ShapeDtypeStruct((*args.query.shape[:2], args.heads, args.value.shape[3]), args.query.dtype)
    with mock.patch.object(pallas, "VMEM", vmem << 20):
        return on_chip(chip, call, args, doutput)


def on_chip(chip: str, call, *given, **options):
    """A function of arrays on one device, compiled for a chip."""
    device = topologies.get_topology_desc(CHIPS[chip], platform="tpu").devices[0]
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device)), given
    )
    with mock.patch.object(partition, "is_settled", return_value=True):
        return jax.jit(call, **options).lower(*given).compile()


def softmax(chip: str = "v5e", B=1, T=1024, S=None, H=8, G=None, K=128, V=None, dtype="bfloat16", segments=False,
            soft_cap=None, left=None, right=None):
    """Softmax attention and its gradients by JAX's kernel."""
    x, S, G, V = jax.ShapeDtypeStruct, S or T, G or H, V or K
    ids = (x((B, T), "int32"), x((B, S), "int32")) if segments else (None, None)
    args = softmax_contract.Args(x((B, T, H, K), dtype), x((B, S, G, K), dtype), x((B, S, G, V), dtype),
                                 query_segments=ids[0], key_segments=ids[1])
    cfg = softmax_passes.heuristic(None, Config())
    opts = softmax_contract.Options(K**-0.5, soft_cap, left, right, 0.0, "float32", False, cfg)

    def call(args, doutput):
        outputs, kept = softmax_passes.forward(args, opts)
        return outputs[0], softmax_passes.backward(args, kept, (doutput, None), opts)[:3]

    return on_chip(chip, call, args, x((B, T, H, V), dtype))


def sharded(shape: tuple[int, ...]):
    """The gradients of a call with gates per dimension, its batch and heads shared out among four chips."""
    topology = topologies.get_topology_desc(CHIPS["v5e"], platform="tpu")
    mesh, spec = Mesh(np.array(topology.devices).reshape(2, 2), ("b", "h")), P("b", None, "h")
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    fn = kernel_registry.get("gla", "pallas", "tpu")

    def total(*args):
        return fn(*args, cfg=Config(block_q=128, platform="pallas"))[0].astype(jnp.float32).sum()

    gradients = jax.grad(total, argnums=(0, 1, 2, 3))
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4)
    return jax.jit(mapped).lower(x, x, x, x).compile()


def pool(op: str, chip: str = "v5e", N=64, T=4, slots=256, H=16, G=None, K=128, V=128, dtype="bfloat16",
         states="float32", gate="constant", steps=0, delta=False):
    """A call on a pool that is given up; ``steps``: as many in a loop, on one pool; delta: of the delta rule."""
    x, G, rows = jax.ShapeDtypeStruct, G or H, {"decode": (N,), "prefill": (T,)}.get(op, (N, T))
    g = {"constant": None, "scalar": x((*rows, H), "float32"), "vector": x((*rows, H, K), dtype)}[gate]
    args = pool_contract.Args(
        x((*rows, G, K), dtype), x((*rows, G, V), dtype), None if op == "commit" else x((*rows, H, K), dtype), g,
        x((H,), "float32") if gate == "constant" else None, None, x((N,), "int32"),
        x((N,), "int32") if op == "commit" else None, *(x((n,), d) for n, d in ((N + 1, "int32"), (N, "bool"))),
    )
    args = args if op == "prefill" else args._replace(cu_seqlens=None, has_initial=None)
    args = args._replace(beta=x((*rows, H), dtype)) if delta else args
    fn = kernel_registry.get(op, "pallas")
    opts = pool_contract.Options(op, K**-0.5, Config(block_q=128))

    def call(pool, args):
        return fn.passes("jax")[0](args._replace(states=pool), opts)

    def loop(pool, args):
        return jax.lax.scan(lambda pool, _: call(pool, args)[::-1], pool, None, steps)

    given_up = {} if op == "verify" else {"donate_argnums": 0}
    return on_chip(chip, loop if steps else call, x((slots, H, K, V), states), args, **given_up)


def moved(args: Args, gradients: bool) -> tuple[int, int]:
    """Bytes that must move, each array once; and those that these kernels move, with the states that are kept."""
    inputs = sum(x.size * x.dtype.itemsize for x in args[:4] if x is not None)
    (B, T, H, K), V, size = args.query.shape, args.value.shape[3], args.query.dtype.itemsize
    output = B * T * H * V * size
    if not gradients:
        return inputs + output, inputs + output
    least = 3 * inputs + 2 * output
    return least, least + 2 * B * -(-T // 128) * H * K * V * size


def instructions(folder: str) -> int:
    """How many instructions the kernels take for one step, as the compiler wrote them.

    Each line of its dump is one, and begins with a mark for each loop that it is in: there is the one over steps.
    """
    total = 0
    for path in Path(folder).glob("*linear_attention_*[0-9]-final_bundles.txt"):
        marks = [m[1].count(">") for line in path.open() if (m := re.match(r"\s*0x[0-9a-f]+[^:]*:\s*(>*)", line))]
        assert max(marks) == 1, path
        total += marks.count(1)
    return total


def main() -> None:
    """Print, for each kind of decay: the floor, bytes and instructions of a forward and of a forward and backward."""
    folder = os.environ["KERAUNOS_TPU_DUMP"]
    steps = 8192 // 128 * 2  # chunks, times groups of heads
    print("| decay | pass | floor ms | memory ms | instructions ms |\n| --- | --- | --- | --- | --- |")
    for kind in ("constant", "scalar", "vector"):
        for gradients in (False, True):
            for path in Path(folder).iterdir():
                path.unlink()
            args = arrays(kind)
            # Chunks are mild or strong: each branch is as long as a mild one, and one of them runs.
            with mock.patch.object(decays, "Strong", decays.Mild):
                compiled(args, gradients)
            count = instructions(folder) / (2 if kind == "vector" else 1)
            least, some = (1e3 * x / BANDWIDTH for x in moved(args, gradients))
            name = "forward + backward" if gradients else "forward"
            print(f"| {kind} | {name} | {least:.2f} | {some:.2f} | {1e3 * count * steps / CLOCK:.2f} |")


if __name__ == "__main__":
    if "KERAUNOS_TPU_DUMP" not in os.environ:
        # What the compiler is told it reads when it is loaded.
        with tempfile.TemporaryDirectory() as folder:
            options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"
            os.environ |= {"KERAUNOS_TPU_DUMP": folder, "LIBTPU_INIT_ARGS": options}
            os.execv(sys.executable, [sys.executable, "-m", "tests.pallas.compile"])
    main()
