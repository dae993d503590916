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
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
BUDGETS = HERE / "budgets.json"

CALLS: dict[str, dict[str, Any]] = {
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
    "vector gates, packed, nothing kept": dict(H=64, T=65601, packed=32, gate="vector", gamma=None, kept=False),
    "few heads, vector gates, packed, K < V": dict(
        K=64, H=4, G=1, T=65601, packed=3, gate="vector", gamma="learned", state=True
    ),
    "learned decay": dict(H=64, T=16384, gamma="learned", reverse=True),
    "256": dict(K=256, V=256, H=16, T=16384),
    "256, few heads, gates, shared keys": dict(K=256, V=256, H=4, G=1, T=16384, gate="scalar"),
    "256 and 128, packed": dict(K=128, V=256, H=32, T=16384, packed=16, state=True),
    "an exchange between four GPUs": dict(H=16, pieces=32, segment=4),
    "an exchange between four GPUs, constant decays": dict(H=16, pieces=32, segment=4, tokens=1024),
    "an exchange between eight GPUs, leftwards, packed": dict(H=4, pieces=64, segment=None, size=8, right=False),
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
        "MOSAIC_GPU_DUMP_HOST_LLVM": "1",
        "MOSAIC_GPU_DUMP_TO": dump,
    }


def measure(dump: Path, *, dtype="bfloat16", K=128, V=128, H, G=None, B=1, T, packed=None, gate=None, kept=True,
            gamma="constant", state=False, reverse=False, in_mesh=False) -> dict[str, dict[str, int]]:
    """The most that any of a call's launches of a kernel needs, forward and backward.

    ``packed``: sequences; ``gate``: "scalar", "vector" or None; ``gamma``: "constant", "learned" or None; ``kept``: the
    backward is given states.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from keraunos.kernels.linear_attention.contract import Args, Options
    from keraunos.kernels.linear_attention.pallas import passes as platform
    from keraunos.ops import Config

    # Named like something that kernels may have a name for, too: it must not be taken for that.
    mesh = gpus(1, "batch")
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
    )
    opts = Options(K**-0.5, reverse, Config(num_stages=2), ("g_gamma",) if gamma == "constant" else (), kept=kept)

    def both(args, doutput, dfinal):
        outputs, residuals = platform.forward(args, opts)
        return outputs, platform.backward(args, residuals, (doutput, dfinal), opts)

    given = args, array(B, T, H, V), final
    if in_mesh:
        specs = jax.tree.map(lambda x: PartitionSpec(*["batch"] if x.ndim == 4 else []), given)
        both = jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("batch"))
    jax.jit(both).lower(*given).compile()
    return reported(dump)


def measure_exchange(dump: Path, *, H, K=128, V=128, pieces, segment, size=4, right=True,
                     tokens=0) -> dict[str, dict[str, int]]:
    """The most that the kernel needs in which ``size`` GPUs hand over states.

    ``segment``: its pieces, None if packed; ``tokens``: of a piece, with constant decays.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental.mosaic.gpu import core
    from jax.sharding import NamedSharding, PartitionSpec

    from keraunos.distributed.jax.exchange import hand_over

    mesh, spec = gpus(size, "tokens"), PartitionSpec("tokens")

    def array(*shape, dtype="float32"):
        shape = (size * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    def call(local, total, seen, start, plan):
        total, seen = (total[:, 0], None) if tokens else (total, seen)
        return hand_over(local, total, seen, start, None if segment else plan, axis="tokens", size=size, right=right,
                         pieces=segment, walked=True, same=bool(segment), tokens=tokens)

    given = (array(1, pieces, H, K, V), array(1, pieces, H), array(1, pieces, H, dtype="int32"), array(1, H, K, V),
             array(4, dtype="int32"))
    call = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 5, out_specs=spec)
    # As in a process that has these devices.
    with mock.patch.object(core, "is_single_process_multi_device_topology", return_value=True):
        program = jax.jit(call).lower(*given).compile().as_text()
    assert "uses_xla_collective_metadata = true" in program
    # Memory that XLA would have to share by other means, such as multicast.
    assert "symmetric_memory_parameters" not in program
    return reported(dump)


def gpus(size: int, axis: str) -> Any:
    """A mesh of GPUs that are not there."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    target, name = (HERE / "h200_target.txtpb").read_text(), f"1x1x{size}"
    topology = topologies.get_topology_desc(topology_name=name, platform="cuda", target_config=target, topology=name)
    return Mesh(np.array(topology.devices), axis)


def reported(dump: Path) -> dict[str, dict[str, int]]:
    """What ptxas has said of each kernel, which is forgotten."""
    found: dict[str, dict[str, int]] = {}
    for report in sorted(dump.glob("*.ptxas")):
        text, kernel = report.read_text(), report.stem.rsplit("_", 1)[0]
        asked = report.with_suffix(".resources.txt").read_text()
        host = report.with_suffix(".ll").read_text()
        descriptors = host.count("call void @mosaic_gpu_init_tma_desc")
        passed = re.findall(r"load \[(\d+ x i\d+)\]", host)
        assert passed == ([f"{16 * descriptors} x i64"] if descriptors else []), f"{kernel} is passed {passed}"
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
        found: dict[str, Any] = {}
        for call, sizes in chosen.items():
            run: Any = measure_exchange if "pieces" in sizes else measure
            found[call] = run(Path(dump), **sizes)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--print"]:
        main(*sys.argv[2:])
    else:
        import contextlib
        import io

        with contextlib.redirect_stdout(io.StringIO()) as text:
            main()
        BUDGETS.write_text(text.getvalue())
