"""Compile Gluon kernels ahead of time for Hopper, without a GPU, and report their resources."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import io
import json
import re
import sys
from pathlib import Path

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from keraunos.frontends import build_options
from tests.cuda.addresses import unset
from tests.cuda.liveness import reused
from tests.triton.usage import usage

HOPPER = GPUTarget("cuda", 90, 32)
# What was found when it was built; ``record.py`` writes it.
RECORD, RECORDED_WITH = Path(__file__).with_name("record.json"), "3.6.0"


def descriptor(dtype: str, block_shape, layout) -> str:
    """A host tensor descriptor in a signature; ``dtype`` as Triton writes it ("bf16")."""
    return f"tensordesc<{dtype}{list(block_shape)},{layout!r}>"


def source_of(kernel, signature: dict[str, str], constants: dict) -> GluonASTSource:
    """The source that Triton builds; see :func:`resources`."""
    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    return GluonASTSource(kernel, types, fixed, attrs)


def resources(kernel, signature: dict[str, str], constants: dict, num_warps: int = 4) -> dict[str, int]:
    """Registers, bytes of stack (spills) and of shared memory, warps and waits of a kernel built for sm_90.

    Waits: how often the assembler waits for products where the kernel does not. A kernel whose products may read what
    was overwritten, or at addresses that nothing has set, raises an AssertionError: see :mod:`tests.cuda.liveness`
    and :mod:`tests.cuda.addresses`.

    ``signature`` has the types of the arguments of run time ("*bf16", "i32", "fp32", `descriptor`); pointers are
    taken to be of 16 bytes.
    """
    source, said = source_of(kernel, signature, constants), io.StringIO()
    knobs = triton.knobs
    # What was built before says nothing.
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        built = triton.compile(source, target=HOPPER, options=dict(num_warps=num_warps, **build_options(constants)))
    assert re.search(r"ptxas[\w-]* info", said.getvalue())
    found = reused(built.asm["ttgir"])
    assert not found, f"{kernel.fn.__name__}: products read what may be overwritten: {found}"
    found = unset(built.asm["cubin"])
    assert not found, f"{kernel.fn.__name__}: registers of addresses that nothing may have set: {found}"
    return {**usage(built), "warps": built.metadata.num_warps, "waits": _waits(said.getvalue())}


def _waits(said: str) -> int:
    # A wait that the assembler put in; products that it put in turn.
    return len(re.findall(r"\(C7510\)|\(C7511\)|\(C7512\)|\(C7514\)|\(C7517\)", said))


def identity(kernel, signature: dict[str, str], constants: dict) -> str:
    """The identity of a build: a hash of the compiler's version and of the program that it begins with.

    Its front end makes that program of the kernel and of all that this calls, without places in files; functions have
    their names here without those of their modules.
    """
    source, backend, context = source_of(kernel, signature, constants), make_backend(HOPPER), ir.context()
    options = backend.parse_options({"num_warps": 4, **build_options(constants), **source.parse_options()})
    ir.load_dialects(context)
    backend.load_dialects(context)
    generators, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    program = source.make_ir(HOPPER, options, generators, modules, context).str_nodebug()
    for name in sorted((name for name in sys.modules if name.startswith("keraunos.")), key=len, reverse=True):
        program = program.replace(f"{name}.", "")
    # Libraries come with the compiler, wherever that is installed.
    chosen = sorted((name, str(x)) for name, x in vars(options).items() if name != "extern_libs")
    return hashlib.sha256(f"{triton.__version__} {chosen} {program}".encode()).hexdigest()[:16]


def source(kernel, signature: dict[str, str], constants: dict) -> str:
    """A hash of all that the program of a build is made of; of the same the compiler makes the same program."""
    given = kernel.fn.__name__, sorted(signature.items()), sorted((name, repr(x)) for name, x in constants.items())
    parts = triton.__version__, sorted(code_of(kernel.fn.__module__)), given
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@functools.cache
def code_of(module: str) -> frozenset[str]:
    """The code, without comments and docstrings, of a module and of all modules of kernels that it imports."""
    tree, imported = ast.parse(Path(sys.modules[module].__file__).read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {x.name for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {node.module, *(f"{node.module}.{x.name}" for x in node.names)}
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    ours = (name for name in imported if name.startswith("keraunos.kernels.") and name in sys.modules)
    return frozenset({ast.unparse(tree)}).union(*map(code_of, ours))


@functools.cache
def recorded() -> dict[str, dict]:
    """The recorded resources, by the identities of builds."""
    return json.loads(RECORD.read_text())


@functools.cache
def _by_source() -> dict[str, dict]:
    return {row["source"]: row for row in recorded().values()}


def known(kernel, signature: dict[str, str], constants: dict) -> dict[str, int]:
    """Like :func:`resources`, but as was recorded of the same build; with other versions of Triton it is built.

    Where the code is another than when it was recorded, it is seen whether the compiler still begins with the same.
    """
    if triton.__version__ != RECORDED_WITH:
        return resources(kernel, signature, constants)
    build = kernel, signature, constants
    found = _by_source().get(source(*build)) or recorded().get(identity(*build))
    assert found is not None, f"{kernel.fn.__name__} has changed: run python -m tests.cuda.record"
    return {name: used for name, used in found.items() if name not in ("kernel", "source")}
