"""Compile the Pallas kernels ahead of time for Hopper, without a GPU, and report their resources.

``python -m tests.pallas.compile`` writes what it finds to ``budgets.json``, which ``test_compile.py`` holds builds to.
Needs the packages jax-cuda13-plugin and jax-cuda13-pjrt (without what they require) and ptxas.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BUDGETS = HERE / "budgets.json"

# Name -> (dtype, K, V, heads of q, heads of k, batch, tokens, initial state, reverse, inside shard_map)
CALLS = {
    "lightning": ("bfloat16", 128, 128, 64, 64, 2, 16384, False, False, False),
    "few heads, from a state, in a mesh": ("bfloat16", 128, 128, 4, 4, 1, 65536, True, False, True),
    "float16, shared keys, K < V, reverse": ("float16", 64, 128, 8, 2, 1, 3001, True, True, False),
}


def missing() -> str | None:
    """What is not there that compiling needs."""
    import jax

    if jax.__version_info__ < (0, 11):
        return f"needs jax 0.11; this is {jax.__version__}"
    if any(importlib.util.find_spec(f"jax_{name}") is None for name in ("cuda13_plugin", "plugins")):
        return "needs jax-cuda13-plugin and jax-cuda13-pjrt"
    return None if shutil.which("ptxas") else "needs ptxas"


def environment(dump: str) -> dict[str, str]:
    """What must be set before jax is imported."""
    cuda = Path(shutil.which("ptxas") or "").resolve().parent.parent
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={cuda} --xla_gpu_autotune_level=0",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_TO": dump,
    }


def measure(call: str, dump: Path) -> dict[str, dict[str, int]]:
    """The most that any of a call's launches of a kernel needs, forward and backward."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from keraunos.kernels.linear_attention import pallas as platform
    from keraunos.kernels.linear_attention.interface import Args, Options
    from keraunos.ops import Config

    target = (HERE / "h200_target.txtpb").read_text()
    topology = topologies.get_topology_desc(
        topology_name="1x1x1", platform="cuda", target_config=target, topology="1x1x1"
    )
    # Named like something that kernels may have a name for, too: it must not be taken for that.
    mesh = Mesh(np.array(topology.devices), "batch")
    sharding = NamedSharding(mesh, PartitionSpec())
    dtype, K, V, H, G, B, T, state, reverse, in_mesh = CALLS[call]

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    final = array(B, H, K, V, dtype="float32")
    args = Args(
        array(B, T, H, K), array(B, T, G, K), array(B, T, G, V), None, array(H, dtype="float32"),
        final if state else None,
    )  # fmt: skip
    opts = Options(K**-0.5, reverse, Config(num_stages=2), True)

    def both(args, doutput, dfinal):
        outputs, residuals = platform.forward(args, opts)
        return outputs, platform.backward(args, residuals, (doutput, dfinal), opts)

    given = args, array(B, T, H, V), final
    if in_mesh:
        specs = jax.tree.map(lambda x: PartitionSpec(*["batch"] if x.ndim == 4 else []), given)
        both = jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("batch"))
    jax.jit(both).lower(*given).compile()
    found: dict[str, dict[str, int]] = {}
    for report in sorted(dump.glob("*.ptxas")):
        text, kernel = report.read_text(), report.stem.rsplit("_", 1)[0]
        asked = report.with_suffix(".resources.txt").read_text()
        used = {
            "registers": int(re.findall(r"Used (\d+) registers", text)[-1]),
            "spills": sum(map(int, re.findall(r"(\d+) bytes spill", text))),
            "shared": int(re.findall(r"smem_scratch_bytes=(\d+)", asked)[-1]),
        }
        most = found.setdefault(kernel, used)
        found[kernel] = {what: max(n, used[what]) for what, n in most.items()}
        report.unlink()
    return found


def main() -> None:
    """Print the resources of all calls, as JSON."""
    with tempfile.TemporaryDirectory() as dump:
        os.environ |= environment(dump)
        print(json.dumps({call: measure(call, Path(dump)) for call in CALLS}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        main()
    else:
        import contextlib
        import io

        with contextlib.redirect_stdout(io.StringIO()) as text:
            main()
        BUDGETS.write_text(text.getvalue())
