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

CALLS = {
    "lightning": dict(H=64, B=2, T=16384),
    "few heads, from a state, in a mesh": dict(H=4, T=65536, state=True, in_mesh=True),
    "float16, shared keys, K < V, reverse": dict(dtype="float16", K=64, H=8, G=2, T=3001, state=True, reverse=True),
    "packed": dict(H=64, T=65601, packed=32, state=True),
    "few heads, packed, shared keys": dict(K=64, H=4, G=1, T=65536, packed=3, reverse=True),
    "gates": dict(H=64, T=16384, gate="scalar", gamma="constant"),
    "few heads, gates, packed, shared keys": dict(H=4, G=1, T=65601, packed=3, gate="scalar", gamma=None, state=True),
    "vector gates": dict(H=64, T=16384, gate="vector", gamma=None),
    "vector gates, nothing kept": dict(H=64, T=16384, gate="vector", gamma=None, kept=False),
    "vector gates, packed": dict(H=64, T=65601, packed=32, gate="vector", gamma=None),
    "few heads, vector gates, packed, K < V": dict(
        K=64, H=4, G=1, T=65601, packed=3, gate="vector", gamma="learned", state=True
    ),
    "learned decay": dict(H=64, T=16384, gamma="learned", reverse=True),
    "256": dict(K=256, V=256, H=16, T=16384),
    "256, few heads, gates, shared keys": dict(K=256, V=256, H=4, G=1, T=16384, gate="scalar"),
    "256 and 128, packed": dict(K=128, V=256, H=32, T=16384, packed=16, state=True),
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


def measure(dump: Path, *, dtype="bfloat16", K=128, V=128, H, G=None, B=1, T, packed=None, gate=None, kept=True,
            gamma="constant", state=False, reverse=False, in_mesh=False) -> dict[str, dict[str, int]]:  # fmt: skip
    """The most that any of a call's launches of a kernel needs, forward and backward.

    ``packed``: sequences; ``gate``: "scalar", "vector" or None; ``gamma``: "constant", "learned" or None; ``kept``: the
    backward is given states.
    """
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
    G = G or H

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    final = array(packed or B, H, K, V, dtype="float32")
    gates = {None: None, "scalar": array(B, T, H), "vector": array(B, T, H, K)}
    args = Args(
        array(B, T, H, K), array(B, T, G, K), array(B, T, G, V), gates[gate],
        array(H, dtype="float32") if gamma else None, final if state else None,
        array(packed + 1, dtype="int32") if packed else None,
    )  # fmt: skip
    opts = Options(K**-0.5, reverse, Config(num_stages=2), gamma == "constant", kept=kept)

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


def main(*names: str) -> None:
    """Print the resources of all calls, or of those that are named, as JSON."""
    with tempfile.TemporaryDirectory() as dump:
        os.environ |= environment(dump)
        chosen = {call: sizes for call, sizes in CALLS.items() if not names or call in names}
        print(json.dumps({call: measure(Path(dump), **sizes) for call, sizes in chosen.items()}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--print"]:
        main(*sys.argv[2:])
    else:
        import contextlib
        import io

        with contextlib.redirect_stdout(io.StringIO()) as text:
            main()
        BUDGETS.write_text(text.getvalue())
