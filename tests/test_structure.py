"""The package's structure: which module may import which, and what docstrings and the map of the package must have.

Each check is a function of a package's folder. The package must pass it, and it must find a fault planted in a small
package: a check that finds nothing anywhere would pass, too.
"""

import ast
import functools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "keraunos"
MAP = ROOT / "docs" / "architecture.md"

# What lies side by side in the package, lowest first. A module imports from its own room and from lower layers only.
LAYERS = (
    ("version", "text", "numerics", "tuned"),
    ("frontends",),  # all that knows a framework; what it needs to know of an operation is handed in
    ("decay", "types"),
    ("ops",),
    ("kernels",),
    ("modules", "torch_ops"),
    ("serving", "distributed"),
    ("compat", "layers"),
    ("__init__",),  # the public names
    ("cli",),
    ("__main__",),
)
# In one room, folders of these names do not import each other.
FRAMEWORKS = ("jax", "torch")
# A module or a folder of one of these names, in a folder of ``kernels/``, is a platform.
PLATFORMS = ("xla", "torch", "triton", "cuda", "pallas")
UNREADABLE = re.compile(
    r"^(The same|Those|And|Whose|Also|As \w+ does|That of|Theirs?|As (there|above))\b|(^|[.:]\s+)What\b"
)
MINUS = re.compile(r"(?:[,`)\d]|\bis|\bare)\s+less\s+(?!than\b|of\b)")


def modules(package: Path) -> dict[str, Path]:
    """The package's modules, by their full names."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def _nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a module's syntax tree: several checks look through the same ones."""
    return _nodes(path.read_text())


@functools.cache
def imports(package: Path) -> tuple[tuple[str, str, str, str], ...]:
    """All that :func:`_imports` finds, for checks of one package that nobody changes meanwhile."""
    return tuple(_imports(package))


def _imports(package: Path) -> Iterator[tuple[str, str, str, str]]:
    """Each import of one of the package's modules by another: who, where, which module, and the name taken from it.

    Imports inside functions count, and modules that ``import_module`` is given by name.
    """
    known = modules(package)

    def module_of(name: str) -> str:
        while name not in known:
            name = name.rpartition(".")[0]
        return name

    for name, path in known.items():
        home = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in nodes(path):
            taken: list[tuple[str, str]] = []
            if isinstance(node, ast.ImportFrom):
                up = home.split(".")[: len(home.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*up, *([node.module] if node.module else [])])
                taken = [(base, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                taken = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
                # A name that is a variable is from a table: the registry's rows lead upwards, for it is they that are
                # asked for.
                pattern = _pattern(node.args[0])
                taken = [(other, "") for other in known if pattern != r"\w+" and re.fullmatch(pattern, other)]
                # A package that hands out its own modules by name is their door, and not made of them.
                taken = [] if taken and path.name == "__init__.py" and taken[0][0].startswith(f"{name}.") else taken
            for base, what in taken:
                if base.split(".")[0] == package.name and (target := module_of(f"{base}.{what}".rstrip("."))) != name:
                    yield name, f"{path.relative_to(package.parent)}:{node.lineno}", target, what


def _pattern(name: ast.expr) -> str:
    """The pattern of the name of a module that code puts together."""
    if isinstance(name, ast.JoinedStr):
        return "".join(map(_pattern, name.values))
    return re.escape(str(name.value)) if isinstance(name, ast.Constant) else r"\w+"


def circles(package: Path) -> list[list[str]]:
    """Modules that import each other, directly or through others."""
    edges: dict[str, set[str]] = {name: set() for name in modules(package)}
    for name, _, target, _ in imports(package):
        edges[name].add(target)

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        todo = [*edges[name]]
        while todo:
            if (one := todo.pop()) not in seen:
                seen.add(one)
                todo += edges[one]
        return seen

    ways = {name: reached(name) for name in edges}
    found = {tuple(sorted(x for x in ways[name] if name in ways[x])) for name in ways if name in ways[name]}
    return [list(names) for names in sorted(found)]


def upward(package: Path) -> list[str]:
    """Imports from a layer that is not below the module's own, and rooms that no layer has."""
    layer = {room: i for i, rooms in enumerate(LAYERS) for room in rooms}

    def room(name: str) -> str:
        return (name.split(".")[1:] or ["__init__"])[0]

    found = [f"{name} is in no layer" for name in modules(package) if room(name) not in layer]
    for name, where, target, _ in imports(package):
        own, other = room(name), room(target)
        if own in layer and other in layer and own != other and layer[own] <= layer[other]:
            found.append(f"{where} {own} imports {target}")
    return found


def across_frameworks(package: Path) -> list[str]:
    """Imports of a folder for one framework by one for another."""
    return [
        f"{where} imports {target}"
        for name, where, target, _ in imports(package)
        if {*FRAMEWORKS} <= {*name.split(".")[1:3], *target.split(".")[1:3]}
        and name.split(".")[1] == target.split(".")[1]
    ]


def across_platforms(package: Path) -> list[str]:
    """Imports of one platform by another, and of a family's platform by what is not of that family.

    A family is a folder of ``kernels/`` with a reference. A platform of a family may import its own platform of a
    folder that is no family, which all families share.
    """

    def place(name: str) -> tuple[str, str]:
        """The folder of ``kernels/`` that a module is in, and its platform."""
        room, folder, platform = [*name.split(".")[1:4], "", "", ""][:3]
        return (folder, platform if platform in PLATFORMS else "") if room == "kernels" else ("", "")

    found = []
    for name, where, target, _ in imports(package):
        (own, at), (other, platform) = place(name), place(target)
        is_family = (package / "kernels" / other / "reference.py").exists()
        if platform and (platform != at or (is_family and own != other)):
            found.append(f"{where} imports {target}")
    return found


def private(package: Path) -> list[str]:
    """Names with a leading underscore that are used outside of their module."""

    def hidden(name: str) -> bool:
        return name.startswith("_") and not name.startswith("__")

    found = [f"{where} {what} of {target}" for _, where, target, what in imports(package) if hidden(what)]
    known = modules(package)
    for name, path in known.items():
        # What an import binds that is a module of the package, by its name here.
        bound = {}
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if f"{node.module}.{alias.name}" in known:
                        bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(call := node.value, ast.Call):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if ast.unparse(call.func).endswith("import_module") and isinstance(target, ast.Name):
                    bound[target.id] = ast.unparse(call.args[0])
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
                home = bound[node.value.id]
                if hidden(node.attr) and home != name:
                    found.append(f"{path.relative_to(package.parent)}:{node.lineno} {node.attr} of {home}")
    return found


def docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """Where each docstring is, and its text."""
    for path in sorted(folder.rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(folder.parent)}:{getattr(node, 'lineno', 1)}", text


def unreadable(folder: Path) -> list[str]:
    """Docstrings that begin with a word that stands for something above them, and sentences that begin with "What"."""
    return [
        f"{where} {text.splitlines()[0]}" for where, text in docstrings(folder)
        if UNREADABLE.search(text)
    ]


def comments(folder: Path) -> Iterator[tuple[str, str]]:
    """Where each comment is, and its text: lines of comments that follow each other are one."""
    for path in sorted(folder.rglob("*.py")):
        found: list[tuple[int, str]] = []
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.COMMENT:
                    above, text = found[-1] if found else (-1, "")
                    if above + text.count("\n") + 1 == token.start[0]:
                        found[-1] = above, f"{text}\n{token.string.lstrip('# ')}"
                    else:
                        found.append((token.start[0], token.string.lstrip("# ")))
        yield from ((f"{path.relative_to(folder.parent)}:{line}", text) for line, text in found)


def less_for_minus(package: Path) -> list[str]:
    """Docstrings and comments in which "less" stands for minus."""
    return [
        f"{where} {' '.join(match[0].split())}" for sentences in (docstrings, comments)
        for where, text in sentences(package) if (match := MINUS.search(text))
    ]


def unexplained(package: Path) -> list[str]:
    """Folders of modules that do not begin by saying, in one sentence and line, what belongs there."""
    found = []
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        own = folder / "__init__.py"
        text = ast.get_docstring(ast.parse(own.read_text())) if own.exists() else None
        first = (text or "").splitlines()[0:1]
        if not first or not re.fullmatch(r"[A-Z`].{8,}[.:]", first[0]):
            found.append(str(folder.relative_to(package.parent)))
    return found


def missing(text: str, root: Path) -> list[str]:
    """Paths and modules that a page names, and that are not there.

    A path begins at the root, in the package, or in a folder that the same line names.
    """
    found = []
    for line in text.splitlines():
        paths = re.findall(r"(?<![\w/.:([-])[\w.-]+(?:/[\w.-]+)*(?:/(?!\w)|\.(?:py|md|json|toml)\b)", line)
        folders = [root, root / "keraunos"]
        folders += [folder / path for path in paths if path.endswith("/") for folder in folders[:2]]
        found += [path for path in paths if not any((folder / path).exists() for folder in folders)]
        found += [name for name in re.findall(r"\bkeraunos(?:\.\w+)+", line) if not _is_there(root, name.split("."))]
    return found


def _is_there(root: Path, parts: list[str]) -> bool:
    """Whether the parts name a module, or something that a module or the package's table of public names has."""
    for i in range(len(parts), 0, -1):
        home = root.joinpath(*parts[:i])
        path = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
        if path.exists():
            return all(re.search(rf"\b{part}\b", path.read_text()) for part in parts[i : i + 1])
    return False


def asks_for_none(package: Path) -> list[str]:
    """Triton kernels that ask whether an argument is None: launched from JAX, an absent array is another one.

    Functions that kernels call may have parameters that are None if left out: they are no arguments of a launch.
    """
    found = []
    for path in sorted(package.rglob("*.py")):
        for function in nodes(path):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not any(ast.unparse(x).startswith("triton.jit") for x in function.decorator_list):
                continue
            own = function.args.args[: len(function.args.args) - len(function.args.defaults)]
            arguments = {x.arg for x in own if x.annotation is None}
            for node in ast.walk(function):
                is_asked = isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "None"
                if is_asked and ast.unparse(node.left) in arguments:
                    found.append(f"{path.relative_to(package.parent)}:{node.lineno} {ast.unparse(node)}")
    return found


def plant(folder: Path, files: dict[str, str]) -> Path:
    """A small package with these modules."""
    package = folder / "keraunos"
    for name, text in {"__init__": "", **files}.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


CHECKS = {
    check.__name__: check
    for check in (circles, upward, across_frameworks, across_platforms, private, unreadable, less_for_minus,
                  unexplained, asks_for_none)
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_package_has_none(name):
    assert CHECKS[name](PACKAGE) == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_every_docstring_can_be_read_alone(folder):
    assert unreadable(ROOT / folder) == []


def test_the_map_names_what_is_there():
    text = MAP.read_text()
    assert missing(text, ROOT) == []
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    assert [str(x) for x in sorted(folders) if f"{x.relative_to(PACKAGE)}/" not in text] == []
    assert len(text.splitlines()) < 120


PLANTED = {
    "a kernel that asks whether an argument is there": (
        "asks_for_none",
        {"kernels/a": "@triton.jit\ndef run(x, y, z=None):\n    if z is not None and y is not None:\n        x += 1"},
        ["keraunos/kernels/a.py:3 y is not None"],
    ),
    "a circle": (
        "circles",
        {"ops/a": "from keraunos.ops import b", "ops/b": "from . import c", "ops/c": "import keraunos.ops.a"},
        [["keraunos.ops.a", "keraunos.ops.b", "keraunos.ops.c"]],
    ),
    "a circle through a function": (
        "circles",
        {"ops/a": "from .b import x", "ops/b": "def x():\n    from keraunos.ops.a import y"},
        [["keraunos.ops.a", "keraunos.ops.b"]],
    ),
    "an import upwards": (
        "upward",
        {"frontends/a": "from keraunos.ops.b import x", "ops/b": "from keraunos.frontends import a"},
        ["keraunos/frontends/a.py:1 frontends imports keraunos.ops.b"],
    ),
    "an import upwards by name": (
        "upward",
        {"ops/a": "import importlib\nimportlib.import_module(f'keraunos.kernels.{family}.x')", "kernels/b/x": ""},
        ["keraunos/ops/a.py:2 ops imports keraunos.kernels.b.x"],
    ),
    "an import of the public names": (
        "upward",
        {"ops/a": "import keraunos"},
        ["keraunos/ops/a.py:1 ops imports keraunos"],
    ),
    "an import in one layer": (
        "upward",
        {"serving/a": "from keraunos.distributed.b import x", "distributed/b": ""},
        ["keraunos/serving/a.py:1 serving imports keraunos.distributed.b"],
    ),
    "a room without a layer": ("upward", {"utils": ""}, ["keraunos.utils is in no layer"]),
    "one framework's folder in the other's": (
        "across_frameworks",
        {"frontends/jax/a": "", "frontends/torch/b": "from keraunos.frontends.jax.a import x"},
        ["keraunos/frontends/torch/b.py:1 imports keraunos.frontends.jax.a"],
    ),
    "a platform that imports another": (
        "across_platforms",
        {"kernels/a/cuda/b": "from keraunos.kernels.a.triton.c import x", "kernels/a/triton/c": ""},
        ["keraunos/kernels/a/cuda/b.py:1 imports keraunos.kernels.a.triton.c"],
    ),
    "a family that imports the platform of another": (
        "across_platforms",
        {"kernels/a/xla": "from keraunos.kernels.b import contract, xla", "kernels/b/contract": "", "kernels/b/xla": "",
         "kernels/b/reference": ""},
        ["keraunos/kernels/a/xla.py:1 imports keraunos.kernels.b.xla"],
    ),
    "what families share imports a platform": (
        "across_platforms",
        {"kernels/host/a": "from keraunos.kernels.b.xla import x", "kernels/b/xla": "", "kernels/b/reference": ""},
        ["keraunos/kernels/host/a.py:1 imports keraunos.kernels.b.xla"],
    ),
    "a platform imported from outside": (
        "across_platforms",
        {"modules/a": "import keraunos.kernels.b.xla", "kernels/b/xla": ""},
        ["keraunos/modules/a.py:1 imports keraunos.kernels.b.xla"],
    ),
    "a platform of what families share": (
        "across_platforms",
        {"kernels/a/xla": "from keraunos.kernels.pool import xla", "kernels/a/reference": "", "kernels/pool/xla": "",
         "kernels/a/torch": "from keraunos.kernels.pool import xla"},
        ["keraunos/kernels/a/torch.py:1 imports keraunos.kernels.pool.xla"],
    ),
    "a private name": (
        "private",
        {"ops/a": "from keraunos.ops.b import _x, y, __version__", "ops/b": ""},
        ["keraunos/ops/a.py:1 _x of keraunos.ops.b"],
    ),
    "a private name of a module": (
        "private",
        {"ops/a": "from keraunos.ops import b as c\nc._x\nc.y\nself._z", "ops/b": ""},
        ["keraunos/ops/a.py:2 _x of keraunos.ops.b"],
    ),
    "a private name of a module by its name": (
        "private",
        {"ops/a": "b: Any = importlib.import_module('keraunos.ops.b')\nb._x\nb.y", "ops/b": ""},
        ["keraunos/ops/a.py:2 _x of 'keraunos.ops.b'"],
    ),
    "a docstring that needs another": (
        "unreadable",
        {"ops/a": 'class A:\n    def f():\n        """The same, for b."""\n    def g():\n        """Whole."""'},
        ["keraunos/ops/a.py:2 The same, for b."],
    ),
    "a docstring that names nothing": (
        "unreadable",
        {"ops/a": '"""What a call gets."""\ndef f():\n    """Whatever it is."""\ndef g():\n    """A. What?"""'},
        ["keraunos/ops/a.py:1 What a call gets.", "keraunos/ops/a.py:4 A. What?"],
    ),
    "a less that stands for minus": (
        "less_for_minus",
        {"ops/a": '"""The length, less\n1."""\nx = 1  # 2 or less\n# the sum of ``y``\n# less ``x``, once'},
        ["keraunos/ops/a.py:1 , less", "keraunos/ops/a.py:3 ` less"],
    ),
    "a folder without a sentence": (
        "unexplained",
        {
            "__init__": '"""The names that users call."""',
            "ops/a": "",
            "cli/b": "",
            "cli/__init__": '"""The command line."""',
        },
        ["keraunos/ops"],
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault, tmp_path):
    check, files, found = PLANTED[fault]
    assert CHECKS[check](plant(tmp_path, files)) == found


def test_a_page_that_names_what_is_not_there_is_found(tmp_path):
    plant(tmp_path, {"__init__": "_HOME = ['run']", "ops/__init__": "", "ops/a": "def run(): ..."})
    right = "`ops/a.py`, `keraunos/ops/` has `a.py`; [a link](ops.md#a), `keraunos.ops.a.run`, `keraunos.run`, and/or"
    assert missing(right, tmp_path) == []
    wrong = "├ ops/b.py  `keraunos/kernels/`, `a.py`; `keraunos.ops.c`, `keraunos.ops.a.walk`\n`ops/` has `b.py`"
    assert missing(wrong, tmp_path) == [
        "ops/b.py", "keraunos/kernels/", "a.py", "keraunos.ops.c", "keraunos.ops.a.walk", "b.py",
    ]
