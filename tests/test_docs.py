"""Every Python snippet of README and docs runs, top to bottom; every example in a docstring gives what it says."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import keraunos

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"\bkeraunos ([a-z]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAUNOS_CACHE_DIR", str(tmp_path / "cache"))
    names = {"__name__": "snippet"}
    text = page.read_text()
    rows = keraunos.kernel_registry.rows()
    try:
        for found in SNIPPET.finditer(text):
            line = text[: found.start(1)].count("\n")
            exec(compile("\n" * line + found.group(1), str(page), "exec"), names)
    finally:
        # A page may register a kernel of its own: it goes again.
        for row in keraunos.kernel_registry.rows():
            if row not in rows:
                keraunos.kernel_registry.unregister(row)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page):
    from typer.main import get_command

    from keraunos.cli.main import app

    known = set(get_command(app).commands)
    blocks = re.findall(r"^```(?:sh|console|bash)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for name in COMMAND.findall("\n".join(blocks)):
        assert name in known, f"{page.name} shows `keraunos {name}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_raw_result_is_explained():
    results = ROOT / "benchmarks" / "results"
    named = re.findall(r"`([\w/.-]+\.(?:json|txt))`", (results / "README.md").read_text())
    assert sorted(named) == sorted(
        str(x.relative_to(results)) for x in results.rglob("*") if x.suffix in (".json", ".txt")
    )


def modules():
    found = pkgutil.walk_packages(keraunos.__path__, "keraunos.")
    return [m.name for m in found if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"cannot be imported here: {error}")
    result = doctest.testmod(module)
    assert result.failed == 0
