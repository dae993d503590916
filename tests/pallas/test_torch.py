"""The platform's host code with PyTorch's tensors, on the CPU: the kernels run in JAX's interpreter."""

import contextlib
import dataclasses
import functools
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import keraunos
from keraunos.kernels.linear_attention.reference import linear_attention
from keraunos.kernels.linear_attention.reference_vjp import linear_attention_vjp
from keraunos.ops.invocation import UnsupportedError
from keraunos.ops.registry import kernel_registry
from tests.linear_attention.cases import GPU, run_torch
from tests.pallas.cases import NEEDS_JAX, case, check, jax

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")


def to_jax(x):
    if isinstance(x, np.ndarray):
        return x
    if x.dtype == torch.bfloat16:
        return jax.numpy.asarray(x.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return jax.numpy.asarray(x.detach().numpy())


def to_torch(x):
    x = np.array(x)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == ml_dtypes.bfloat16 else torch.tensor(x)


def longer(x, row):
    x = x.reshape(1, -1, *x.shape[2:])
    assert row.lead >= 0
    assert row.lead + x.shape[1] == row.length
    return torch.nn.functional.pad(x, (0, 0, 0, 0, row.lead, 0), value=float("nan"))


@contextlib.contextmanager
def interpreted(launched):
    """Within it, kernels run in the interpreter; ``launched`` gets the names and compile-time values of them."""
    from keraunos.frontends.torch import pallas
    from tests.pallas import interpreter

    def launch(fn, arrays, static, row):
        launched.append((fn.__name__, static))
        if row is not None:
            # What lies before the tokens is not there: nothing may come of it.
            some = next(arrays[name] for name in row.arrays if name in arrays) if "b" in arrays else None
            arrays = arrays | {
                name: longer(x, row) for name, x in arrays.items() if name in row.arrays and x is not None
            }
        leaves, structure = jax.tree.flatten(arrays)
        hash((structure, tuple(static.items())))

        @jax.jit
        def call(leaves):
            return fn(**jax.tree.unflatten(structure, leaves), **static)

        with interpreter.interpreted():
            outputs = jax.tree.map(to_torch, call([to_jax(x) for x in leaves]))
        if row is not None and fn.__name__ == "scan":
            output, *more = outputs
            return output[:, row.lead :].reshape(*some.shape[:2], *output.shape[2:]), *more
        return outputs

    with mock.patch.object(pallas, "launch", launch):
        yield


def function(args, case, platform):
    from keraunos.kernels.linear_attention.pallas.passes import gla
    from keraunos.ops import Config

    query, key, value, g, gamma, state, offsets = args
    return gla(query, key, value, g, gamma, case.scale, state, case.reverse, offsets, cfg=Config(num_stages=2))


@NEEDS_JAX
@pytest.mark.parametrize(
    ("case", "segmentation"),
    [
        (case(T=130, H=1, B=2, state=True, gamma=0), None),
        (case(T=1100, H=1, gate="scalar", state=True), (8, 2)),
        (case(T=70, B=2, H=2, G=1, reverse=True, scale=-0.3, gate="scalar", gamma=0), None),
        (case(lengths=(5, 0, 70, 13), H=1, gate="scalar", gamma=1, state=True), None),
        (case(lengths=(5, 0, 600, 1, 150), H=1, gamma=0, state=True, reverse=True), (8, 1)),
        (case(T=500, B=2, H=1, gamma=2, state=True), None),
        # Of a length that kernels are compiled for, and of others: at the end of a longer row.
        (case(T=128, B=2, H=1, state=True), None),
        (case(T=75, B=3, H=2, G=1, gate="scalar", gamma=1, state=True), None),
        (case(T=1100, H=1, state=True), (2, 2)),
        # Gates per dimension: kernels of their own, for each length.
        (case(T=75, H=2, G=1, gate="vector", gamma=1, state=True), None),
        (case(T=130, H=1, gate="vector", gate_dtype="bfloat16"), (1, 1)),
        (case(lengths=(5, 0, 200, 13), H=1, gate="vector", gate_dtype="bfloat16", decay="infinite"), (2, 2)),
    ],
    ids=str,
)
def test_values_and_gradients(case, segmentation, monkeypatch):
    from keraunos.kernels.linear_attention.pallas import passes as platform

    if segmentation:
        monkeypatch.setattr(platform, "segmentation", lambda *_: segmentation)
    launched = []
    with interpreted(launched):
        case.check(functools.partial(run_torch, "pallas", function))
    if case.gate == "vector":
        # Of two segments, the other kernels make the second's state.
        expected = {"scan", "states", "gradients", "add_pairs"} | ({"combine"} if segmentation == (1, 1) else set())
    else:
        expected = {"scan", "local_states", "combine"} if segmentation else {"scan"}
    assert {name for name, _ in launched} == expected


@NEEDS_JAX
@pytest.mark.parametrize("reverse", [False, True])
def test_segments_start_from_what_they_are_given(reverse, monkeypatch):
    from keraunos.kernels.linear_attention.contract import Options
    from keraunos.kernels.linear_attention.pallas import passes as platform
    from keraunos.ops import Config

    monkeypatch.setattr(platform, "segmentation", lambda *_: (2, 1))
    some = case(T=256, H=1, state=True, reverse=reverse)
    (query, key, value, _, gamma, state, _), doutput, dstate = some.arrays
    first, last = (slice(128, 256), slice(128)) if reverse else (slice(128), slice(128, 256))
    q, k, v, do = ({part: x[:, part] for part in (first, last)} for x in (query, key, value, doutput))
    middle = linear_attention(q[first], k[first], v[first], None, gamma, state, reverse=reverse)[1]
    dmiddle = linear_attention_vjp(
        q[last], k[last], v[last], None, gamma, middle, None, do[last], dstate, reverse=reverse
    )[5]

    def tensor(x):
        x = np.array(x)
        return to_torch(x.astype(np.float32) if x.dtype == np.float64 else x)

    def call(args, doutput, dfinal):
        opts = Options(64**-0.5, reverse, Config(num_stages=2), ("g_gamma",), started=True)
        forward, backward = platform.gla.passes("torch")
        own = args._replace(**{name: tensor(getattr(args, name)) for name in ("query", "key", "value", "g_gamma")})
        assert platform.segment(own._replace(initial_state=None), opts) == (128, True)
        own = own._replace(initial_state=tensor(np.concatenate([state, middle])))
        results, residuals = forward(own, opts)
        ends = tensor(np.concatenate([dstate, dmiddle]))
        grads = backward(own, residuals, (tensor(doutput), ends), opts)
        return [x if x is None else x.float().numpy() for x in (*results, *grads[:6])]

    launched = []
    with interpreted(launched):
        check(some, call)
    assert {name for name, _ in launched} == {"scan"}


@NEEDS_JAX
@pytest.mark.parametrize("lengths", [None, (0, 0)])
def test_an_empty_sequence_keeps_its_state(lengths):
    some = case(T=0, lengths=lengths, state=True, gamma=1)
    with interpreted(launched := []):
        output, state, *gradients = run_torch("pallas", function, some, True)
    assert not launched
    assert output.shape == gradients[0].shape == (1, 0, 2, 64)
    np.testing.assert_array_equal(state, some.arrays[0].initial_state)
    np.testing.assert_array_equal(gradients[-1], some.arrays[2])
    assert not gradients[4].any()


@NEEDS_JAX
@pytest.mark.parametrize(
    ("case", "segmentation"),
    [
        (case(T=128, B=2, H=2, state=True, gamma=0), None),
        (case(T=1100, H=1, gamma=1), (8, 2)),
        (case(lengths=(5, 600, 400), H=2, G=1, gate="scalar", state=True), (8, 1)),
    ],
    ids=str,
)
def test_every_kernel_is_handed_over_with_its_arrays(case, segmentation, monkeypatch):
    pytest.importorskip("jax_cuda13_plugin")
    from keraunos.frontends.torch import pallas
    from keraunos.kernels.linear_attention.pallas import passes as platform

    if segmentation:
        monkeypatch.setattr(platform, "segmentation", lambda *_: segmentation)
    launched, modules = [], []

    def build(module):
        modules.append(module)
        launch_c, function = lambda *_: launched.append(module), 7
        return (lambda: (launch_c, function)), None

    monkeypatch.setattr(pallas, "_build", build)
    monkeypatch.setattr(pallas, "_make_current", lambda index: None)
    monkeypatch.setattr(pallas._Program, "__call__", lambda self, addresses: self.start(addresses))
    made = run_torch("pallas", function, case, True)
    assert {x.shape for x in made if x is not None} >= {case.arrays[0].query.shape}
    # How segments' starts are put together may be the same for the walks of both directions.
    assert all(b"attention_combine" in module for module in set(modules) if modules.count(module) > 1)
    assert set(launched) == set(modules)
    names = [name for name in (b"scan", b"states", b"combine") if any(b"attention_" + name in m for m in modules)]
    assert len(names) == (3 if segmentation else 1)


@NEEDS_JAX
def test_what_a_kernel_changes_in_place_is_a_result(monkeypatch):
    pytest.importorskip("jax_cuda13_plugin")
    from keraunos.frontends.torch import pallas
    from keraunos.kernels.linear_attention.pallas.gates import Decay
    from keraunos.kernels.linear_attention.pallas.gates_strong import add_pairs
    from keraunos.kernels.linear_attention.pallas.walk import Walk

    monkeypatch.setattr(pallas, "_build", lambda module: (lambda: (launch_c, function), None))
    launch_c, function, seen = None, None, []
    monkeypatch.setattr(pallas, "_make_current", lambda index: None)
    monkeypatch.setattr(pallas._Program, "__call__", lambda self, addresses: seen.append(addresses))
    q, k, v, g, do, dq, dk, dv, dg = (torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16) for _ in range(9))
    given = dict(q=q, k=k, v=v, decay=Decay((g,)), do=do, strong=torch.zeros(1, 1, 1, 2, dtype=torch.int32), plan=None)
    static = dict(H=1, walk=Walk(64, True, True, 1, 1), scale=1.0)
    results = pallas.launch(add_pairs, given | dict(dq=dq, dk=dk, dv=dv, terms=[dg]), static)
    assert all(a is b for a, b in zip(results, (dq, dk, dv, dg), strict=True))
    changed = [x.data_ptr() for x in results]
    assert [addresses[-8:] for addresses in seen] == [changed * 2]


@NEEDS_JAX
def test_only_a_kernel_is_handed_over():
    pytest.importorskip("jax_cuda13_plugin")
    from keraunos.frontends.torch import pallas

    lowered = jax.jit(lambda x: x + 1).trace(np.zeros(3, np.float32)).lower(lowering_platforms=("cuda",))
    with pytest.raises(NotImplementedError, match="not only a kernel"):
        pallas._module(lowered.compiler_ir(), 1, 1)


@NEEDS_JAX
def test_one_compilation_serves_many_lengths():
    from keraunos.kernels.linear_attention.pallas.passes import bucket

    tokens = range(1, 70000, 7)
    lengths = [bucket(n) for n in tokens]
    assert all(n <= length and length % 64 == 0 for n, length in zip(tokens, lengths, strict=True))
    assert all(length <= max(n * 9 / 8, n + 63) for n, length in zip(tokens, lengths, strict=True))
    assert [bucket(n) for n in set(lengths)] == list(set(lengths))
    assert len(set(lengths)) == 8 + 8 * 7 + 1
    shapes = []
    for T in (135, 150, 160):
        with interpreted(launched := []):
            some = case(T=T, B=2, H=1, state=True, gamma=1, seed=T)
            some.check(functools.partial(run_torch, "pallas", function), gradients=False)
        shapes.append(launched)
    assert shapes[0] == shapes[1] == shapes[2]


class Noted:
    """Stands for a compiled kernel that doubles; notes the addresses that it is given."""

    def __init__(self, outputs, structure, order):
        self.outputs, self.structure, self.order, self.changed, self.calls = outputs, structure, order, {}, []

    def __call__(self, addresses):
        self.calls.append(addresses)


@NEEDS_JAX
def test_a_row_stands_for_the_end_of_a_longer_one():
    from keraunos.frontends.torch import pallas

    a, starts = torch.zeros(2, 12, 3, 4, dtype=torch.bfloat16), torch.zeros(2, 3)
    outputs = [((1, 64, 3, 8), torch.float32), ((5,), torch.float32)]
    program, asked = Noted(outputs, jax.tree.structure((0, 0)), [0, 2, 1, 3, 4]), []
    row = pallas.Row(40, 64, ("a", "b"))

    def compile(fn, structure, kinds, static, device):
        asked.append(kinds)
        return program

    with mock.patch.object(pallas, "_program", compile):
        arrays = dict(starts=starts, plan=np.arange(3, dtype=np.int32), a=a, b=None)
        o, more = pallas.launch(None, arrays, {}, row)
        strided = torch.zeros(2, 12, 4, 3, dtype=torch.bfloat16).transpose(2, 3)
        pallas.launch(None, arrays | {"a": strided}, {}, row)
    assert asked[0] == asked[1] == (((1, 64, 3, 4), "bfloat16"), ((3,), "int32"), ((2, 3), "float32"))
    assert o.shape == (2, 12, 3, 8)
    assert more.shape == (5,)
    first, second = program.calls
    wanted = [a.data_ptr() - 40 * 12 * 2, starts.data_ptr(), o.data_ptr() - 40 * 24 * 4, more.data_ptr()]
    assert [*first[:2], *first[3:]] == wanted
    # The constant is there once; what is not contiguous is copied.
    assert first[2] == second[2]
    assert second[0] not in (first[0], strided.data_ptr() - 40 * 12 * 2)


@NEEDS_JAX
def test_launches_are_repeated_without_host_code(monkeypatch):
    from keraunos.frontends.torch import launch as torch_launch
    from keraunos.frontends.torch import pallas

    program = Noted([((4,), torch.float32)], jax.tree.structure(0), range(3))
    monkeypatch.setattr(pallas, "_program", lambda *_: program)
    monkeypatch.setattr(torch_launch, "INTERPRETED", True)
    ran = []

    def host(tensors):
        ran.append(tensors)
        return (pallas.launch(None, dict(a=tensors[0], b=np.zeros(2, np.float32)), {}),)

    call = torch_launch.remembered(host)
    made = [call([torch.full((4,), float(i))]) for i in range(3)]
    assert len(ran) == 1
    assert [len(addresses) for addresses in program.calls] == [3, 3, 3]
    assert [addresses[-1] for addresses in program.calls] == [x.data_ptr() for (x,) in made]
    call([torch.zeros(8)[::2]])
    call([torch.zeros(8)[::2]])
    assert len(ran) == 3


def test_it_is_refused_with_a_reason():
    q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"pallas: needs a gpu device"):
        keraunos.lightning_attention(q, q, q, layer_idx=0, num_layers=2, platform="pallas")
    with pytest.raises(UnsupportedError, match=r"pallas: needs a gpu device"):
        keraunos.gla_attention(q, q, q, platform="pallas")


def on_hopper(operation, change):
    inv = operation.invocation("torch", "bfloat16", **{"B": 2, "T": 8192, "H": 64, "K": 128, "V": 128, **change})
    return dataclasses.replace(inv, backend="gpu", device="NVIDIA H200")


@NEEDS_JAX
def test_what_compiling_needs_is_named(monkeypatch):
    from keraunos.frontends.torch import pallas
    from keraunos.kernels.linear_attention.pallas.passes import unsupported

    inv = on_hopper(keraunos.LightningAttention(), {})
    monkeypatch.setattr(pallas.importlib.util, "find_spec", lambda name: object())
    assert unsupported(inv) is None
    monkeypatch.setattr(pallas.importlib.util, "find_spec", lambda name: None)
    assert "needs JAX's compiler for NVIDIA GPUs" in unsupported(inv)
    monkeypatch.setattr(pallas, "_build", lambda module: None)
    assert f"does not know how jax {jax.__version__}" in unsupported(inv)


@NEEDS_JAX
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"B": 1}, None),
        ({"B": 1, "T": 4096}, "compiled for every size"),
        ({"T": 8200}, "a length that it compiles for"),
        ({"N": 2, "B": 1, "T": 16384}, "not packed"),
        ({"g_gamma": "a tensor"}, "at its best without"),
        ({"gate": "vector"}, "at its best without"),
        ({"K": 96}, "head dims"),
    ],
    ids=str,
)
def test_auto_takes_it_where_it_was_measured_to_be_faster(change, reason):
    from keraunos.kernels.linear_attention.pallas.passes import loses

    sizes = {name: n for name, n in change.items() if name != "g_gamma"}
    inv = on_hopper(keraunos.GLAttention() if "gate" in sizes else keraunos.LightningAttention(), sizes)
    gamma = change.get("g_gamma", np.zeros(64, np.float32))
    constants = {"g_gamma"} if isinstance(gamma, np.ndarray) else {}
    with mock.patch("keraunos.frontends.torch.pallas.unsupported", return_value=None):
        said = loses(dataclasses.replace(inv, arguments={"g_gamma": gamma}, constants=frozenset(constants)))
    assert said is None if reason is None else reason in said


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="needs a jax before 0.11")
def test_an_older_jax_is_the_reason():
    inv = on_hopper(keraunos.LightningAttention(), {})
    with pytest.raises(UnsupportedError, match=r"pallas: cannot be imported: needs jax 0\.11"):
        kernel_registry.choose(inv, "pallas")
