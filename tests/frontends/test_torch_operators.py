"""Operators have names and arguments that last: a saved program runs in another process, and nothing in it is code."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import keraunos  # noqa: E402
from keraunos import UnsupportedError, serving, torch_ops  # noqa: E402
from keraunos.kernels.linear_attention import contract  # noqa: E402
from keraunos.types import MaskInfo  # noqa: E402

# Also where Triton is interpreted, which other processes here do not know how to.
PLATFORM = "torch"


class Model(torch.nn.Module):
    """All three operations and a step of decoding."""

    def forward(self, q, k, v, g, states, slots, ids):
        linear, final = keraunos.gla_attention(q, k, v, g, platform=PLATFORM, return_state=True)
        lightning = keraunos.lightning_attention(q, k, v, layer_idx=1, num_layers=4, reverse=True, platform=PLATFORM)
        info = MaskInfo.from_segments(ids)
        options = dict(mask_info=info, logits_soft_cap=20.0, sliding_window=(5, 0), dtype=None, platform=PLATFORM)
        softmax = keraunos.attention(q, k, v, **options)
        token, states = serving.decode(
            q[:, 0], k[:, 0], v[:, 0], states, slots, g_gamma=[-0.1, -0.3], platform=PLATFORM
        )
        return linear, final, lightning, softmax, token, states


def inputs():
    made = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, 20, 2, 16, generator=made) for _ in range(4))
    ids = torch.tensor([[0] * 12 + [1] * 8] * 2)
    return q, k, v, -g.abs(), torch.randn(4, 2, 16, 16, generator=made), torch.tensor([3, -1], dtype=torch.int32), ids


def calls(graph):
    """The names of our operators in a graph."""
    return [n.target._opname for n in graph.nodes if getattr(n.target, "namespace", "") == "keraunos"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A program in a file, and what it should give."""
    folder = tmp_path_factory.mktemp("program")
    with torch.no_grad():
        program = torch.export.export(Model(), inputs())
    assert set(calls(program.graph)) == {"gla", "lightning_attn", "attention", "decode"}
    torch.export.save(program, folder / "model.pt2")
    torch.save([inputs(), Model()(*inputs())], folder / "expected.pt")
    return folder


LOAD = """
import pickle
import keraunos.torch_ops
def refuse(*args, **kwargs):
    raise AssertionError("something was unpickled")
pickle.loads = pickle.load = refuse
pickle.Unpickler = type("Unpickler", (pickle.Unpickler,), {"__init__": refuse})
program = torch.export.load(folder + "/model.pt2")
given, expected = torch.load(folder + "/expected.pt", weights_only=True)
for got, want in zip(program.module()(*given), expected, strict=True):
    assert torch.equal(got, want), (got - want).abs().max()
"""
OTHERS_FIRST = """
import keraunos
q = torch.ones(1, 4, 1, 8)
torch.compile(lambda q: keraunos.attention(q, q, q, logits_soft_cap=2.0), backend='eager', fullgraph=True)(q)
"""
# The first call of a process may be counted.
COUNT = """
import keraunos
q = torch.ones(1, 4, 1, 8)
with FlopCounterMode(display=False) as counter:
    keraunos.gla_attention(q, q, q)
assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 8, counter.get_total_flops()
"""
# What PyTorch takes seconds to import, each begins with.
EACH = """
import os, sys, torch, torch._dynamo, torch.export
from torch.utils.flop_counter import FlopCounterMode
folder, *scripts = sys.argv[1:]
for script in scripts:
    if not (child := os.fork()):
        exec(script)
        print("as expected", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_in_other_processes_a_saved_program_runs_and_a_first_call_is_counted(saved):
    scripts = LOAD, OTHERS_FIRST + LOAD, COUNT
    found = subprocess.run([sys.executable, "-c", EACH, saved, *scripts], capture_output=True, text=True)
    assert found.stdout.splitlines() == ["as expected"] * len(scripts), found.stderr


def test_a_saved_program_holds_plain_arguments(saved):
    """The file says in readable text what its operators are given."""
    with zipfile.ZipFile(saved / "model.pt2") as file:
        (name,) = (x for x in file.namelist() if x.endswith("models/model.json"))
        text = file.read(name).decode()
        # What PyTorch pickles, tensors, knows nothing of us.
        assert not [x for x in file.namelist() if x != name and b"keraunos" in file.read(x)]
    for word in ("torch.ops.keraunos.gla.default", "softmax_scale", f'"as_string": "{PLATFORM}"', "block_q="):
        assert word in text


def test_every_operator_is_registered_by_one_module():
    both = ("gla", "lightning_attn", "attention")
    for name in (*both, *(f"{x}_backward" for x in both), "decode", "verify", "commit", "prefill"):
        (schema,) = torch._C._jit_get_schemas_for_operator(f"keraunos::{name}")
        kinds = {str(x.type) for x in schema.arguments}
        tensors = {"Tensor", "Optional[Tensor]", "List[Tensor]"}
        plain = {*tensors, "float", "Optional[float]", "Optional[int]", "bool", "str"}
        assert kinds <= plain
    assert torch_ops.__doc__


def options(**changed):
    """The options of ``keraunos::gla``, in their order."""
    given = dict(softmax_scale=0.25, reverse=False, platform="torch", launch="block_q=16", constant="", state=True,
                 kept=True)
    return given | changed


BAD = {
    "a program for a launch": (dict(launch="__import__('os')"), ValueError, "launch is .* expected such as"),
    "an unknown field": (dict(launch="block_z=16"), ValueError, "launch is 'block_z=16'"),
    "a field twice": (dict(launch="block_q=16 block_q=32"), ValueError, "launch is"),
    "no number": (dict(launch="block_q=²"), ValueError, "launch is"),
    "a number out of range": (dict(launch="block_q=3"), ValueError, "block_q is 3"),
    "a field too few": (dict(launch=""), ValueError, "the configuration has no block_q"),
    "an unknown platform": (dict(platform="os"), ValueError, "unknown platform 'os'"),
    "another framework's": (dict(platform="xla"), UnsupportedError, "takes jax arrays"),
    "an unknown array": (dict(constant="nothing"), ValueError, "constant is 'nothing'"),
    "no number for a scale": (dict(softmax_scale=float("nan")), TypeError, "softmax_scale is nan"),
}


@pytest.mark.parametrize("bad", BAD)
def test_arguments_are_checked_whoever_made_them(bad):
    changed, error, message = BAD[bad]
    q = torch.ones(1, 20, 2, 16)
    with pytest.raises(error, match=message):
        torch.ops.keraunos.gla(q, q, q, None, None, None, None, **options(**changed))


def test_tensors_are_checked_whoever_gives_them():
    q, values = torch.ones(1, 20, 2, 16), options().values()
    none = [None] * 4
    with pytest.raises(ValueError, match="key has shape"):
        torch.ops.keraunos.gla(q, q[:, :10], q, *none, *values)
    output, state, residuals = torch.ops.keraunos.gla(q, q, q, *none, *values)
    backward = torch.ops.keraunos.gla_backward
    assert len(backward(q, q, q, *none, residuals, output, state, *values)) == 6
    for grads in ((residuals, output[:, :10], state), (residuals, output, state[:, :1]), ([q], output, state)):
        with pytest.raises(ValueError, match="gla_backward: got"):
            backward(q, q, q, *none, *grads, *values)
    states = torch.zeros(3, 2, 16, 16)
    with pytest.raises(ValueError, match="out has strides"):
        torch.ops.keraunos.prefill(q[0], q[0], q[0], states, torch.tensor([0]), torch.tensor([0, 20]),
                                   torch.empty(20, 2, 32)[..., ::2], None, None, None, None, None, 1.0, "torch",
                                   "block_q=16")


def test_strides_need_not_be_those_of_the_graph():
    """A graph that was made for one layout is right for others."""
    q = torch.randn(1, 20, 2, 16)
    with torch.no_grad():
        module = torch.export.export(Gla(), (q,)).module()
    other = torch.randn(16, 2, 20, 1).permute(3, 2, 1, 0)
    assert torch.equal(module(other), Gla()(other))


class Gla(torch.nn.Module):
    def forward(self, q):
        return keraunos.gla_attention(q, q, q, platform=PLATFORM)


def test_a_graph_without_gradients_says_so_where_one_is_wanted():
    q = torch.randn(1, 20, 2, 16)
    with torch.no_grad():
        module = torch.export.export(Gla(), (q,)).module()
    with pytest.raises(RuntimeError, match="query requires a gradient; the graph was made for one that does not"):
        module(q.requires_grad_())


def test_a_graph_with_gradients_gives_them():
    q = torch.randn(1, 20, 2, 16, requires_grad=True)
    module = torch.export.export(Gla(), (q,)).module()
    got, want = (torch.autograd.grad(f(q).square().sum(), q)[0] for f in (module, Gla()))
    assert torch.equal(got, want)


def test_options_are_read_as_they_were_written():
    node = keraunos.frontends.get("torch").operators.differentiable(contract.GLA.operator)
    for opts in (
        contract.Options(0.3, True, keraunos.Config(block_q=16, num_warps=4, platform="torch")),
        contract.Options(-1e-7, False, keraunos.Config(platform="x"), ("g", "g_gamma"), False, False),
    ):
        assert node.plain.read(node.plain.of(opts, opts.cfg.platform)) == opts


def test_platforms_share_an_operator():
    """A platform's residuals are no part of the schema."""
    names = [x for x in dir(torch.ops.keraunos) if not x.startswith("_")]
    assert not [x for x in names if "triton" in x or "torch" in x]
    assert np.all([x in names for x in ("gla", "attention")])
