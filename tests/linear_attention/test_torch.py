"""The linear operations as part of PyTorch: its transformations, its compiler, its settings; and the torch platform.

In Triton's interpreter, those of its tests that concern every platform run on triton instead.
"""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import keraunos  # noqa: E402
from keraunos.frontends.torch import operators as operators  # noqa: E402
from keraunos.kernels.linear_attention import contract  # noqa: E402
from keraunos.kernels.linear_attention import torch as platform  # noqa: E402
from keraunos.kernels.recurrent import torch as shared  # noqa: E402
from keraunos.types import MaskInfo  # noqa: E402
from tests.linear_attention.cases import INTERPRETED, Case, runner  # noqa: E402
from tests.linear_attention.test_values import GATES, gla  # noqa: E402
from tests.numerics import assert_within_rule  # noqa: E402

run = runner("torch", "torch", gla)


PLATFORM = "triton" if INTERPRETED else "torch"


def call(*args, **options):
    return keraunos.gla_attention(*args, platform=PLATFORM, return_state=True, **options)


def arguments(grad=True, **case):
    """The arguments of a case as tensors; absent ones are None."""
    made = [None if x is None else torch.from_numpy(np.array(x)) for x in Case(**{"T": 20, "B": 1, **case}).arrays[0]]
    return [x.requires_grad_(grad) if x is not None and x.is_floating_point() else x for x in made]


def gradients(outputs, args):
    wanted = [x for x in args if x is not None and x.requires_grad]
    return torch.autograd.grad([x.sum() for x in outputs], wanted)


def same(a, b):
    return all(map(torch.equal, a, b))


SMALL = {"dtype": "float64", "gate_dtype": "float64", "K": 3, "V": 2, "T": 5, "state": True}


@pytest.mark.parametrize(
    "case", [*GATES.values(), {"gate": "vector", "reverse": True}, {"gate": "vector", "lengths": (3, 0, 2)}], ids=str
)
def test_gradcheck(case):
    *args, cu_seqlens = arguments(**{**SMALL, **case, "G": 1})
    options = {"reverse": case.get("reverse", False), "cfg": keraunos.Config(block_q=2, platform="torch")}
    args = [x if x is None else x.detach().double().requires_grad_() for x in args]
    given = [x for x in args if x is not None]

    def function(*floats):
        floats = iter(floats)
        return call(*(None if x is None else next(floats) for x in args), cu_seqlens, **options)

    assert torch.autograd.gradcheck(function, given)


@pytest.mark.parametrize("case", [{}, {"lengths": (9, 0, 11)}], ids=str)
def test_results_may_be_changed_in_place(case):
    args = arguments(gate="scalar", state=True, **case)
    outputs, changed = call(*args), call(*args)
    for x in changed:
        x.mul_(2)
    for got, want in zip(gradients(changed, args), gradients(outputs, args), strict=True):
        torch.testing.assert_close(got, 2 * want, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("operation", [keraunos.gla_attention, keraunos.attention])
def test_what_cannot_be_traced_says_so(operation):
    with pytest.raises(TypeError, match=rf"^{operation.__name__}: torch.jit.trace .*; use torch.export"):
        torch.jit.trace(lambda q: operation(q, q, q), (torch.ones(1, 4, 1, 8),))


class Recorder(TorchDispatchMode):
    """Keeps the calls of our operators, and refuses whatever reads a value of a tensor."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        if func.namespace == "keraunos":
            self.calls.append((func, [*tree_map_only(torch.Tensor, torch.Tensor.detach, args)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's own check reads it
@pytest.mark.parametrize("case", [{"gate": "vector", "gamma": 1}, {"lengths": (9, 0, 3), "reverse": True}], ids=str)
def test_operators_keep_their_promises_and_read_no_value(case, monkeypatch):
    # Room for states that no launch writes holds anything, but here the outputs of several runs are compared.
    allocate = operators.allocate
    monkeypatch.setattr(operators, "allocate", lambda made, like: allocate(made, like).zero_())
    args = arguments(**case, state=True)
    with Recorder() as recorder:
        gradients(call(*args, reverse=case.get("reverse", False)), args)
    (forward, inputs), (backward, its_inputs) = recorder.calls
    torch.library.opcheck(backward, its_inputs)
    inputs = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    torch.library.opcheck(forward, inputs)


def test_nothing_inside_reads_a_value_but_on_a_cpu(monkeypatch):
    args = contract.Args(*arguments(grad=False, gate="vector", gamma=1, lengths=(70, 0, 30), state=True))
    monkeypatch.setattr(shared.Walker, "look_at", lambda *_: None)
    opts = contract.Options(1.0, False, keraunos.Config(block_q=16))
    with Recorder():
        outputs, residuals = platform.forward(args, opts)
        platform.backward(args, residuals, outputs, opts)


@pytest.mark.parametrize("gates", ["gamma", "scalar", "vector"])
def test_where_no_value_is_read(monkeypatch, gates):
    monkeypatch.setattr(shared.Walker, "look_at", lambda *_: None)
    Case(**GATES[gates], T=75, B=1, state=True, decay="infinite").check(run)


@pytest.mark.parametrize(
    "case",
    [GATES["gamma"], GATES["vector"], {"gamma": 1, "lengths": (3, 0, 17)}, "lightning"],
    ids=str,
)
def test_compile_without_breaks_and_once_for_all_lengths(case):
    """One graph forward and one backward, however long sequences are; in the interpreter the longer ones are cut."""
    # Take seconds to import, in each of the processes that share the tests.
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    def function(*args):
        if case == "lightning":
            return keraunos.lightning_attention(*args, layer_idx=1, num_layers=3, platform=PLATFORM, return_state=True)
        return call(*args)

    compiled = torch.compile(
        function, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=count, bw_compiler=count)
    )
    for T in (20, 40, 70):
        if case == "lightning":
            args = arguments(T=T)[:3]
        elif "lengths" in case:
            args = arguments(**{**case, "lengths": (3, 0, T)}, state=True)
        else:
            args = arguments(**case, T=T, state=True)
        outputs, expected = compiled(*args), function(*args)
        assert same(outputs, expected)
        assert same(gradients(outputs, args), gradients(expected, args))
    assert len(graphs) == 2


@pytest.mark.parametrize("cfg", [None, keraunos.LightningAttentionConfig(block_q=16)], ids=str)
def test_compile_gradients(cfg):
    def function(*args):
        return keraunos.lightning_attention(*args, layer_idx=1, num_layers=3, return_state=True, cfg=cfg)

    args = arguments(H=4, T=40)[:3]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    outputs, expected = compiled(*args), function(*args)
    assert same(outputs, expected)
    assert same(gradients(outputs, args), gradients(expected, args))


def test_compile_takes_numbers_as_arguments():
    """PyTorch makes symbols of numbers that change from call to call; they are options of the call all the same."""
    torch._dynamo.reset()
    q, k, v = arguments(H=4, T=40, grad=False)[:3]
    ids = torch.zeros(q.shape[:2], dtype=torch.int32)
    calls = [
        lambda n: keraunos.lightning_attention(q, k, v, layer_idx=n, num_layers=8, platform=PLATFORM),
        lambda n: keraunos.gla_attention(q, k, v, softmax_scale=n / 4, platform=PLATFORM),
        lambda n: keraunos.attention(q, k, v, sliding_window=(n, 1), mask_info=MaskInfo.from_segments(ids)),
        lambda n: keraunos.attention(q, k, v, mask_info=MaskInfo.from_segments(ids).apply_sliding_window((n, 1))),
        lambda n: keraunos.gla_attention(q, k, v, cfg=keraunos.GLAttentionConfig(block_q=16 * 2**n)),
        lambda n: keraunos.lightning_attention(q, k, v, log_decay=-n * np.ones(4, np.float32)),
    ]
    for function in calls:
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        for n in (1, 2, 3):
            assert torch.equal(compiled(n), function(n))


def test_compile_takes_lengths_that_follow_from_values():
    torch._dynamo.reset()
    q, k, v = arguments(T=40, grad=False)[:3]

    def function(kept):
        where = kept.nonzero().squeeze(1)
        return keraunos.gla_attention(*(x[:, where] for x in (q, k, v)), platform=PLATFORM)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for n in (2, 3):
            kept = torch.arange(40) % n == 0
            assert torch.equal(compiled(kept), function(kept))


def test_explain_within_a_compiled_function_leaves_later_calls_alone():
    q = arguments(grad=False)[0]

    def function(q):
        tier = keraunos.explain(keraunos.gla_attention, q, q, q, platform=PLATFORM).tier
        return keraunos.gla_attention(q, q, q, platform=PLATFORM), tier

    output, tier = torch.compile(function, backend="eager")(q)
    assert tier == "heuristic"
    assert torch.equal(output, function(q)[0])


@pytest.mark.parametrize("name", ["key", "g", "initial_state"])
def test_arrays_elsewhere_are_refused(name):
    args = arguments(gate="vector", state=True)
    place = contract.Args._fields.index(name)
    args[place] = args[place].to("meta")
    with pytest.raises(ValueError, match=f"gla_attention: {name} is on meta; expected cpu, like query"):
        call(*args)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    args = arguments(gate="vector", gamma=1, state=True)
    for x in args[:6]:
        x.grad = None
    sum(x.sum() for x in checkpoint(call, *args, use_reentrant=reentrant)).backward()
    assert same([x.grad for x in args[:6]], gradients(call(*args), args))


def test_functional_transformations():
    args = arguments(grad=False, gate="vector")

    def loss(query, key):
        return call(query, key, *args[2:])[0].square().sum()

    expected = torch.func.grad(loss, argnums=(0, 1))(*args[:2])
    wanted = [x.clone().requires_grad_() for x in args[:2]]
    assert same(expected, torch.autograd.grad(loss(*wanted), wanted))
    stacked = torch.stack([args[0], 2 * args[0]])
    got = torch.vmap(torch.func.grad(loss), in_dims=(0, None))(stacked, args[1])
    assert torch.equal(got[1], torch.func.grad(loss)(stacked[1], args[1]))
    # Alike but for strides, which a transformation hides.
    strided = stacked.mT.contiguous().mT
    assert torch.equal(torch.vmap(torch.func.grad(loss), in_dims=(0, None))(strided, args[1]), got)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # PyTorch's own, where it loads forward mode
def test_what_has_no_gradient_says_so():
    args = arguments(gate="vector")
    (dquery,) = torch.autograd.grad(call(*args)[0].sum(), args[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dquery.square().sum().backward()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward"):
        call(forward_ad.make_dual(args[0].detach(), args[0].detach()), *args[1:])


def test_one_gradient_may_be_missing():
    args = arguments(gate="vector", state=True)
    output, state = call(*args)
    both = torch.autograd.grad(output.sum() + state.sum(), args[0])[0]
    assert torch.equal(torch.autograd.grad(call(*args)[0].sum(), args[0])[0], both)
    assert not torch.autograd.grad(call(*args)[1].sum(), args[0])[0].any()


def test_rounded_products_are_not_used(rounded_products):
    Case(gate="vector", K=64, V=64, T=100).check(run)
    assert torch.get_float32_matmul_precision() == rounded_products


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        *({**gates, "reverse": reverse} for gates in GATES.values() for reverse in (False, True)),
        {"gate": "vector", "gamma": 1, "lengths": (130, 0, 70, 9), "B": 1},
        {"gamma": 1, "lengths": (130, 0, 70, 9), "B": 1, "reverse": True},
    ],
    ids=str,
)
def test_many_groups_of_chunks(monkeypatch, chunks, case):
    case = Case(**{"T": 330, "H": 1, "state": True, "decay": "infinite", **case})
    monkeypatch.setitem(shared._GROUP, "cpu", chunks * (1 if case.lengths else case.B) * 64 * 64)
    case.check(run)


@pytest.mark.parametrize("case", [Case(T=64, B=1, H=1), Case(lengths=(64,), H=1)], ids=str)
def test_inputs_stay_as_they_are(case):
    case = dataclasses.replace(case, gate="vector", gamma=1, state=True)
    args = [torch.from_numpy(np.array(x)) if x is not None else None for x in case.arrays[0]]
    before = [x.clone() for x in args if x is not None]
    floats = [x.requires_grad_() for x in args if x is not None and x.is_floating_point()]
    outputs = call(*args)
    kept = [x.clone() for x in outputs]
    torch.autograd.grad([x.sum() for x in outputs], floats)
    assert same(before, [x for x in args if x is not None])
    assert same(kept, outputs)


def test_slices_of_a_fused_projection():
    fused = torch.randn(2, 70, 3, 4, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    parts = fused.unbind(2)
    copies = [x.detach().clone().requires_grad_() for x in parts]
    transposed = [x.detach().mT.contiguous().mT.requires_grad_() for x in parts]
    expected = call(*copies)
    want = gradients(expected, copies)
    assert same(call(*parts), expected)
    assert same(call(*transposed), expected)
    assert same(gradients(call(*parts), [fused])[0].unbind(2), want)
    assert same(gradients(call(*transposed), transposed), want)


@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_gates_that_heads_share_need_no_gradient(gate):
    """Where nobody wants it, the others are right without it."""
    case = Case(B=1, T=20, HG=1, gate=gate)
    args = arguments(B=1, T=20, HG=1, gate=gate)
    args[3].requires_grad_(False)
    got = torch.autograd.grad(call(*args), args[:3], list(map(torch.from_numpy, case.arrays[1:])))
    (truth, scale), (rounded, _) = case.reference(), case.reference(np.float32)
    names = ["dquery", "dkey", "dvalue"]
    assert_within_rule(names, [x.numpy() for x in got], truth[2:5], rounded[2:5], ["float32"] * 3, scale[2:5])


def test_packed_without_tokens():
    args = arguments(gate="vector", lengths=(0, 0), state=True)
    output, state = call(*args)
    assert output.shape == (1, 0, 2, 16)
    assert torch.equal(state, args[5])
    assert torch.equal(gradients((output, state), [args[5]])[0], torch.ones_like(state))


def test_training_after_inference():
    """A constant's tensor that inference made first serves gradients."""
    q = torch.randn(1, 20, 2, 16, generator=torch.Generator().manual_seed(0))
    options = dict(log_decay=[-0.1234, -0.4321], platform=PLATFORM)
    with torch.inference_mode():
        expected = keraunos.lightning_attention(q, q, q, **options)
    output = keraunos.lightning_attention(q.requires_grad_(), q, q, **options)
    assert torch.equal(output, expected)
    assert torch.autograd.grad(output.sum(), q)[0].isfinite().all()


def test_meta_tensors_give_shapes():
    args = [None if x is None else x.to("meta") for x in arguments(gate="vector", V=8)]
    output, state = call(*(x if x is None else x.to(torch.bfloat16) for x in args))
    assert (output.shape, output.dtype) == ((1, 20, 2, 8), torch.bfloat16)
    assert (state.shape, state.dtype) == ((1, 2, 16, 8), torch.float32)


def test_slices_of_fused_states_and_decays():
    """Arrays without a token axis may be views, too."""
    q, k, v, *_ = arguments(False, B=2, gamma=2)
    states, decays = torch.randn(2, 3, *q.shape[2:], q.shape[-1]), -torch.rand(2, 2, 2)
    want = call(q, k, v, None, decays[:, 1].contiguous(), states[:, 1].contiguous())
    assert same(call(q, k, v, None, decays[:, 1], states[:, 1]), want)
