"""A family is added by its table alone: the registry, errors, the command line and `explain` know its operations."""

import sys
import types

import pytest
import typer

import keraunos
from keraunos.cli import calls
from keraunos.kernels import FAMILIES, kernel_registry
from keraunos.ops import Executor, Invocation, Kernel
from keraunos.ops.cache import ConfigCache
from keraunos.ops.family import Family, Operation, PlatformRow
from keraunos.ops.registry import Implementation, public_name
from keraunos.ops.selection import ConfigSelectorChain


class Doubled(Kernel):
    op_id = "doubled"
    arguments = ("x",)

    def bind(self, x):
        return self.invocation("torch", T=len(x))

    def invocation(self, framework, dtype="float32", *, B=1, T, H=1, K=1):
        return Invocation(self.op_id, framework, "cpu", "toy cpu", {"T": T}, frozenset("T"), {"x": (dtype, 1)})


@pytest.fixture
def family(monkeypatch):
    """A toy family, whose folder is made of modules."""
    home = types.ModuleType("keraunos.kernels.toys.python")
    home.doubled = Implementation("doubled", lambda args, *, cfg: lambda args: [2 * x for x in args[0]])
    monkeypatch.setitem(sys.modules, "keraunos.kernels.toys.python", home)
    operation = Operation("doubled", "doubled_twice", None, f"{__name__}:Doubled", cases={"of a model": {"T": 7}})
    made = Family("toys", (operation,), (PlatformRow("python", "python", 3, frameworks=("torch",)),))
    monkeypatch.setattr(kernel_registry, "_rows", list(kernel_registry._rows))
    monkeypatch.setattr(kernel_registry, "operations", dict(kernel_registry.operations))
    kernel_registry.add(made)
    return made


def test_it_runs_and_explains_itself(family):
    executor = Executor(ConfigSelectorChain(ConfigCache()))
    assert executor(Doubled(), [1, 2]) == [2, 4]
    assert executor(Doubled(), [1, 2], platform="python") == [2, 4]
    with pytest.raises(ValueError, match=r"doubled_twice: unknown platform 'fortran'; expected one of \['python'"):
        executor(Doubled(), [1, 2], platform="fortran")
    assert kernel_registry.get("doubled", "python")([3]) == [6]


def test_its_names_are_known(family):
    assert public_name("doubled") == "doubled_twice"
    assert keraunos.detect_platform("doubled", "python") == "python"
    for name in ("doubled", "doubled_twice"):
        assert calls.find_operation(name).cases == {"of a model": {"T": 7}}
    with pytest.raises(typer.BadParameter, match=r"'tripled' is none of lightning_attention, .*, doubled_twice"):
        calls.find_operation("tripled")


@pytest.mark.parametrize("operation", [x for family in FAMILIES for x in family.operations], ids=lambda x: x.name)
def test_every_table_leads_to_what_it_names(operation):
    kernel = operation.kernel
    assert kernel.op_id == operation.name
    assert hasattr(kernel, "invocation") == (not operation.like)
    assert operation.cases or operation.like
    if operation.distributed:
        assert callable(getattr(keraunos.distributed, operation.function))
