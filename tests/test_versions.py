"""docs/installation.md, constraints.txt and the extras of pyproject.toml tell of the same versions."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "installation.md").read_text().split("## Versions")[1].split("\n## ")[0]
ROWS = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
RUN = {name: versions for name, *versions in ROWS[2:]}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = [Requirement(text) for texts in PROJECT["optional-dependencies"].values() for text in texts]


def test_the_first_column_is_what_ci_installs():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name: versions[0] for name, versions in RUN.items()} == {name: pinned[name] for name in RUN}
    assert pinned["jaxlib"] == pinned["jax"]


def test_the_second_column_is_what_was_measured_on_a_gpu():
    results = json.loads((ROOT / "benchmarks" / "results" / "nvidia-h200.json").read_text())
    measured = [section["about"] for section in results.values()]
    assert measured
    for about in measured:
        assert {name: about[name] for name in RUN} == {name: versions[1] for name, versions in RUN.items()}
        assert ROWS[0][2].endswith(f"Python {'.'.join(about['python'].split('.')[:2])}")


@pytest.mark.parametrize("name", [name for name in RUN if name != "numpy"])
def test_extras_allow_what_was_run_and_nothing_newer(name):
    newest = max(map(Version, RUN[name]))
    found = [requirement for requirement in REQUIRED if requirement.name == name]
    assert found
    for requirement in found:
        assert all(version in requirement.specifier for version in RUN[name])
        assert f"{newest.major}.{newest.minor + 1}.0" not in requirement.specifier
    assert len({str(requirement.specifier) for requirement in found}) == 1
    (bound,) = (part.version for part in found[0].specifier if part.operator == "<")
    (lowest,) = (part.version for part in found[0].specifier if part.operator == ">=")
    assert re.search(rf"\b{name} {re.escape(bound)}\b", PAGE)
    if Version(lowest) < min(map(Version, RUN[name])):
        assert re.search(rf"\b{name} from {re.escape(lowest)}\b", PAGE)


def test_torch_for_cuda_comes_with_the_triton_that_was_run():
    extra = [Requirement(text) for text in PROJECT["optional-dependencies"]["torch"]]
    assert {requirement.name for requirement in extra} == {"torch", "triton"}


def test_the_tritons_that_are_compiled_with_are_those_that_are_known():
    names = pytest.importorskip("keraunos.kernels.gluon")
    (listed,) = re.findall(r"^TRITONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tuple(listed.split()) == names.KNOWN
    (newer,) = re.findall(r"\*\*Triton (.*?)\*\*", PAGE)
    assert {"3.6", *re.findall(r"\d+\.\d+", newer)} == set(names.KNOWN)
