"""Every Python snippet of README and docs runs, top to bottom; every example in a docstring gives what it says."""

import doctest
import importlib
import pkgutil
import re
import shlex
import textwrap
from pathlib import Path

import pytest

import keraunos

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?: {4})?(keraunos [a-z].*)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAUNOS_CACHE_DIR", str(tmp_path / "cache"))
    names = {"__name__": "snippet"}
    text = page.read_text()
    rows = keraunos.kernel_registry.rows()
    try:
        for found in SNIPPET.finditer(text):
            line = text[: found.start(2)].count("\n")
            exec(compile("\n" * line + textwrap.dedent(found.group(2)), str(page), "exec"), names)
    finally:
        # A page may register a kernel of its own: it goes again.
        for row in keraunos.kernel_registry.rows():
            if row not in rows:
                keraunos.kernel_registry.unregister(row)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_are_understood(page):
    from typer.main import get_command

    from keraunos.cli.main import app

    text = page.read_text()
    blocks = re.findall(r"^```(?:sh|console|bash)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4}keraunos .*", text, re.MULTILINE)
    for line in COMMAND.findall("\n".join(blocks)):
        command, words = get_command(app), shlex.split(line, comments=True)[1:]
        while hasattr(command, "commands"):
            assert words, f"{page.name} shows `{line}`, which names no command"
            assert words[0] in command.commands, f"{page.name} shows `{line}`"
            command = command.commands[words.pop(0)]
        if "--help" not in words:
            command.make_context(line, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_pages_stay_short():
    pages = [*ROOT.glob("[RC]*.md"), *(ROOT / "docs").glob("*.md")]
    assert len(pages) <= 18
    assert sum(len(page.read_text().split()) for page in pages) <= 14_000, "CONTRIBUTING.md has the command"


def test_every_raw_result_is_explained():
    results = ROOT / "benchmarks" / "results"
    named = re.findall(r"`([\w/.-]+\.(?:json|txt))`", (results / "README.md").read_text())
    assert sorted(named) == sorted(
        str(x.relative_to(results)) for x in results.rglob("*") if x.suffix in (".json", ".txt")
    )


def test_every_raw_result_is_cited():
    results = ROOT / "benchmarks" / "results"
    cited = re.findall(r"benchmarks/results/([\w/.-]+)\)", "".join(page.read_text() for page in PAGES))
    assert set(cited) == {str(file.relative_to(results)) for file in results.rglob("*") if file.is_file()}


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
