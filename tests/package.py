"""Build the distributions, look into them, and install the wheel into empty environments: ``make package``.

    python -m tests.package dist [--extras "" jax torch ...]

Each environment has the wheel and one extra; what is run there needs nothing of the working tree. One row each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What a user would try first with each extra; the empty one has no framework.
FIRST = {
    "": "import keraunos; print(keraunos.__version__, len(keraunos.__all__))",
    "jax": "import jax.numpy as jnp, keraunos; x = jnp.ones((1, 9, 2, 16)); "
    "print(keraunos.lightning_attention(x, x, x, layer_idx=0, num_layers=2).sum())",
    "torch": "import torch, keraunos; x = torch.ones(1, 9, 2, 16, requires_grad=True); "
    "keraunos.lightning_attention(x, x, x, layer_idx=0, num_layers=2).sum().backward(); print(x.grad.sum())",
    "flax": "from flax import nnx; from keraunos.layers import flax; import jax.numpy as jnp; "
    "print(flax.GatedLinearAttention(32, num_heads=2, rngs=nnx.Rngs(0))(jnp.ones((1, 9, 32))).shape)",
    "cli": "import subprocess, sys; subprocess.run([sys.executable, '-m', 'keraunos', 'doctor'], check=True)",
}


def build(folder: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is made of it."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir()], check=True)
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def look(source: Path, wheel: Path) -> None:
    """Every module is in both, what only the repository needs is in neither."""
    modules = {str(x.relative_to(ROOT)) for x in (ROOT / "keraunos").rglob("*.py")} | {"keraunos/py.typed"}
    with zipfile.ZipFile(wheel) as file:
        inside = {x for x in file.namelist() if ".dist-info/" not in x}
    tuned = {x for x in inside if x.endswith(".json")}
    assert inside - tuned == modules, sorted((inside - tuned) ^ modules)
    with tarfile.open(source) as file:
        names = {x.name.partition("/")[2] for x in file.getmembers() if x.isfile()}
    assert modules <= names, sorted(modules - names)
    assert {"README.md", "LICENSE", "CHANGELOG.md", "tests/test_docs.py", "docs/concepts.md"} <= names
    assert not [x for x in names if x.startswith(("benchmarks/results/", "."))]
    print(f"{source.name}: {source.stat().st_size / 1e3:.0f} kB; {wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB")


def install(wheel: Path, extra: str) -> str:
    """The output of the first program of an extra, in an environment that has the wheel with it and nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted], check=True)
        run = subprocess.run([python, "-c", FIRST[extra]], check=True, capture_output=True, text=True, cwd=folder)
        return run.stdout.strip().splitlines()[-1]


def main() -> None:
    """Build, look, install."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extras", nargs="*", default=[*FIRST])
    options = parser.parse_args()
    source, wheel = build(options.folder)
    look(source, wheel)
    for extra in options.extras:
        print(f"Python {sys.version.split()[0]}, extra {extra or '(none)'}: {install(wheel, extra)}", flush=True)


if __name__ == "__main__":
    main()
