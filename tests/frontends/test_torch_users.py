"""Expectations of PyTorch's users of any operator: autocast, vmap, counted operations, and no gradient unasked for."""

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.utils import flop_counter  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import keraunos  # noqa: E402
from keraunos import serving  # noqa: E402
from keraunos.kernels.recurrent.torch import ScalarDecay, VectorDecay  # noqa: E402
from keraunos.types import MaskInfo  # noqa: E402
from tests.linear_attention.cases import GPU  # noqa: E402
from tests.numerics import assert_within_rule  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
B, T, H, K = 2, 20, 2, 16


def normal(*shape, seed=0, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, **options)


def qkv(*lead, grad=True):
    return [normal(*(lead or (B, T)), H, K, seed=i).requires_grad_(grad) for i in range(3)]


def gates(*lead):
    return -normal(*(lead or (B, T)), H, K, seed=3).abs()


GATES = gates()
OPERATIONS = {
    "gla": lambda q, k, v: keraunos.gla_attention(q, k, v, GATES, return_state=True),
    "lightning": lambda q, k, v: keraunos.lightning_attention(q, k, v, layer_idx=1, num_layers=3, return_state=True),
    "attention": lambda q, k, v: (keraunos.attention(q, k, v, dtype=None, causal=True),),
    "soft cap": lambda q, k, v: (keraunos.attention(q, k, v, dtype=None, logits_soft_cap=4.0),),
}


def gradients(outputs, given):
    return torch.autograd.grad([x.float().square().sum() for x in outputs], given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_autocast_casts_query_key_and_value(name, compiled, dtype):
    torch._dynamo.reset()
    call, given = OPERATIONS[name], qkv()
    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with torch.autocast(DEVICE, dtype):
        outputs = function(*given)
        got = gradients(outputs, given)
    expected = call(*(x.to(dtype) for x in given))
    want = gradients(expected, given)
    assert outputs[0].dtype == dtype
    assert [x.dtype for x in outputs[1:]] == [torch.float32] * len(outputs[1:])
    for a, b in zip((*outputs, *got), (*expected, *want), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert {x.dtype for x in got} == {torch.float32}


@pytest.mark.parametrize("name", OPERATIONS)
def test_autocast_takes_mixed_dtypes(name):
    q, k, v = qkv(grad=False)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = [OPERATIONS[name](q.to(a), k.to(b), v.to(a)) for a, b in (
            (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)
        )]
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_autocast_casts_nothing_else():
    q, k, v = qkv(grad=False)
    g, state, gamma = gates(), normal(B, H, K, K, seed=4), -normal(H, seed=5).abs()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = keraunos.gla_attention(q, k, v, g=g, g_gamma=gamma, initial_state=state, return_state=True)
    narrow = [x.to(torch.bfloat16) for x in (q, k, v)]
    assert all(map(torch.equal, found, keraunos.gla_attention(*narrow, g, gamma, state, return_state=True)))
    wide = [x.double() for x in (q, k, v)]
    with torch.autocast(DEVICE, torch.bfloat16):
        # As PyTorch's own: float64 is not cast; what the call says itself, is as it says.
        assert keraunos.gla_attention(*wide, platform="torch").dtype == torch.float64
        assert keraunos.attention(q, k, v, dtype=torch.float32, logits_soft_cap=4.0).dtype == torch.float32
    with torch.autocast(DEVICE, enabled=False):
        assert keraunos.gla_attention(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("op", ["decode", "verify", "commit", "prefill"])
def test_serving_follows_autocast(op):
    lead = dict(decode=(3,), verify=(3, 2), commit=(3, 2), prefill=(5,))[op]
    q, k, v = (normal(*lead, H, K, seed=i) for i in range(3))
    slots, offsets = torch.tensor([2, 0, 1], device=DEVICE), torch.tensor([0, 2, 2, 5], device=DEVICE)
    rest = dict(commit=[torch.tensor([1, 2, 0], device=DEVICE)], prefill=[offsets]).get(op, [])
    pools = [normal(4, H, K, K, seed=7) for _ in range(2)]

    def call(states, *tokens):
        made = getattr(serving, op)(*(tokens[1:] if op == "commit" else tokens), states, slots, *rest)
        return made if isinstance(made, torch.Tensor) else made[0]

    with torch.autocast(DEVICE, torch.bfloat16):
        got = call(pools[0], q, k, v.bfloat16())
    want = call(pools[1], *(x.bfloat16() for x in (q, k, v)))
    assert got.dtype == (torch.float32 if op == "commit" else torch.bfloat16)
    assert torch.equal(got, want)
    assert torch.equal(*pools)
    assert pools[0].dtype == torch.float32


def counted(name, fn):
    """How often one of our operators is called while ``fn()`` runs, and the result."""
    seen = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Calls():
        made = fn()
    packet = getattr(torch.ops.keraunos, name)
    return sum(x.overloadpacket is packet for x in seen), made


VMAPPED = {
    "gates": lambda q, k, v, x: keraunos.gla_attention(q, k, v, x),
    "state": lambda q, k, v, x: sum(y.sum() for y in keraunos.gla_attention(q, k, v, x, return_state=True)),
    "decays": lambda q, k, v, x: keraunos.gla_attention(q, k, v, None, x[0, 0, :, 0]),
    "lightning": lambda q, k, v, x: keraunos.lightning_attention(q, k, v, layer_idx=0, num_layers=2, reverse=True),
    "packed": lambda q, k, v, x: keraunos.gla_attention(q[:1], k[:1], v[:1], x[:1], None, None, OFFSETS),
    "packed with decays": lambda q, k, v, x: keraunos.gla_attention(
        q[:1], k[:1], v[:1], None, x[0, 0, :, 0], None, OFFSETS
    ),
    "attention": lambda q, k, v, x: keraunos.attention(q, k, v, dtype=None, logits_soft_cap=4.0, causal=True),
    "bias": lambda q, k, v, x: keraunos.attention(q, k, v, _bias(x), dtype=None),
    "segments": lambda q, k, v, x: keraunos.attention(q, k, v, dtype=None, mask_info=MaskInfo.from_segments(IDS)),
}
OFFSETS = torch.tensor([0, 3, 3, T], device=DEVICE)
IDS = torch.tensor([[0] * 12 + [1] * 8] * B, device=DEVICE)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared keys"])
@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_is_one_call_with_a_larger_batch(name, shared):
    n, one_by_one, call = 3, name == "packed with decays", VMAPPED[name]
    q, k, v, x = [*(normal(n, B, T, H, K, seed=i) for i in range(3)), gates(n, B, T)]
    k, dims = (k[0], (0, None, 0, 0)) if shared else (k, (0, 0, 0, 0))

    def loss(*args):
        return call(*args).square().sum()

    def element(i):
        return [y if d is None else y[i] for y, d in zip((q, k, v, x), dims, strict=True)]

    op = (
        "attention" if name in ("attention", "bias", "segments") else "lightning_attn" if name == "lightning" else "gla"
    )
    calls, outputs = counted(op, lambda: torch.vmap(call, in_dims=dims)(q, k, v, x))
    assert calls == (n if one_by_one else 1)
    grad = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    calls, each = counted(f"{op}_backward", lambda: torch.vmap(grad, in_dims=dims)(q, k, v, x))
    assert calls == (n if one_by_one else 1)
    # The gradient of the sum over calls.
    calls, total = counted(
        f"{op}_backward", lambda: torch.func.grad(
            lambda *args: torch.vmap(loss, in_dims=dims)(*args).sum(), argnums=(0, 1, 2, 3)
        )(q, k, v, x)
    )
    assert calls == (n if one_by_one else 1)
    singles = [(call(*element(i)), *grad(*element(i))) for i in range(n)]
    exact = [(call(*(y.double() for y in element(i))), *grad(*(y.double() for y in element(i)))) for i in range(n)]
    want, truth = ([torch.stack(y) for y in zip(*z, strict=True)] for z in (singles, exact))
    names, dtypes = ("output", "dq", "dk", "dv", "dx"), ["float32"] * 5
    hosts = [[y.detach().cpu().numpy() for y in z] for z in ((outputs, *each), truth, want)]
    assert_within_rule(names, *hosts, dtypes)
    if not shared:
        hosts[0][1:] = [y.detach().cpu().numpy() for y in total]
        assert_within_rule(names, *hosts, dtypes)


def _bias(x):
    """``[1, H, T, T]``."""
    return (x[:1, :, :, :1] * torch.ones(T, device=DEVICE)).permute(0, 2, 1, 3)


def test_vmap_over_cotangents():
    """As ``torch.func.jacrev`` does it: only the backward is mapped."""
    q, k, v = qkv(1, 4, grad=False)

    def call(q):
        return keraunos.gla_attention(q, k, v, gates(1, 4))[0, -1]

    got = torch.func.jacrev(call)(q)
    want = torch.autograd.functional.jacobian(call, q)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["gla", "lightning_attn", "attention"])
def test_operations_are_counted(name):
    """As PyTorch counts its own: a multiply and an add are two, masks take nothing off."""
    calls = {
        "gla": lambda q, k, v: keraunos.gla_attention(q, k[:, :, :1], v, gates()),
        "lightning_attn": lambda q, k, v: keraunos.lightning_attention(q, k, v, layer_idx=0, num_layers=2),
        "attention": lambda q, k, v: keraunos.attention(q, k, v, dtype=None, logits_soft_cap=4.0, causal=True),
    }
    q, k, v = qkv()
    with FlopCounterMode(display=False) as counter:
        calls[name](q, k, v).sum().backward()
    found = {str(x): n for x, n in counter.get_flop_counts()["Global"].items()}
    product = 2 * B * H * T * (T * K if name == "attention" else K * K)
    assert found == {f"keraunos.{name}": 2 * product, f"keraunos.{name}_backward": 5 * product}
    if name == "attention":
        shape = q.transpose(1, 2).shape
        own = [flop_counter.sdpa_flop_count(*[shape] * 3), flop_counter.sdpa_backward_flop_count(*[shape] * 4)]
        assert own == [*found.values()]


def test_operations_of_serving_are_counted():
    q, k, v = qkv(3, grad=False)
    states, slots = normal(4, H, K, K), torch.tensor([2, 0, 1], device=DEVICE)
    with FlopCounterMode(display=False) as counter:
        serving.decode(q, k, v, states, slots)
    assert counter.get_total_flops() == 2 * 2 * 3 * H * K * K


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("name", ["gla", "lightning", "attention", "decode", "prefill"])
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_tensors_are_refused(name, layout):
    x = torch.nested.nested_tensor([torch.ones(n, H, K) for n in (3, 5)], layout=layout, device=DEVICE)
    states, slots = normal(4, H, K, K), torch.tensor([2, 0], device=DEVICE)
    call, function, wanted = {
        "gla": (lambda: keraunos.gla_attention(x, x, x), "gla_attention", "as cu_seqlens"),
        "lightning": (lambda: keraunos.lightning_attention(x, x, x, layer_idx=0, num_layers=1),
                      "lightning_attention", "as cu_seqlens"),
        "attention": (lambda: keraunos.attention(x, x, x), "attention", "from_segments"),
        "decode": (lambda: serving.decode(x, x, x, states, slots), "decode", "a dense one"),
        "prefill": (lambda: serving.prefill(x, x, x, states, slots, OFFSETS), "prefill", "as cu_seqlens"),
    }[name]
    with pytest.raises(TypeError, match=f"^{function}: query is a nested tensor; expected .*{wanted}"):
        call()


def test_what_is_said_of_nested_tensors_is_right():
    parts = [normal(n, H, K, seed=n) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    x = jagged.values()[None]
    got = keraunos.gla_attention(x, x, x, None, None, None, jagged.offsets())
    want = torch.cat([keraunos.gla_attention(*(y[None],) * 3) for y in parts], 1)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layout", ["sparse", "mkldnn"])
def test_tensors_of_other_layouts_are_refused(layout):
    x = torch.ones(1, 4, H, K)
    other = x.to_sparse() if layout == "sparse" else x.to_mkldnn()
    states, slots = torch.zeros(4, H, K, K), torch.tensor([2])
    calls = {
        "gla_attention: key": lambda: keraunos.gla_attention(x, other, x),
        "gla_attention: g": lambda: keraunos.gla_attention(x, x, x, g=other),
        "lightning_attention: query": lambda: keraunos.lightning_attention(other, x, x, layer_idx=0, num_layers=1),
        "attention: bias": lambda: keraunos.attention(x, x, x, bias=other),
        "decode: query": lambda: serving.decode(other[0] if layout == "sparse" else other, x[0], x[0], states, slots),
        "decode: states": lambda: serving.decode(x[0, :1], x[0, :1], x[0, :1], other, slots),
    }
    for given, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{given} is a tensor of layout {other.layout}; expected .*to_dense"):
            call()


@pytest.mark.parametrize("name", ["gla_attention", "lightning_attention", "attention"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_is_refused_by_name(name):
    options = {"lightning_attention": dict(layer_idx=0, num_layers=1), "attention": dict(dtype=torch.float32)}
    x, wanted = normal(1, 4, H, K), f"^{name}: has no forward-mode derivative .*; expected reverse mode"

    def call(x):
        return getattr(keraunos, name)(x, x, x, **options.get(name, {}))

    for transform in (torch.func.jacfwd, torch.func.hessian):
        with pytest.raises(NotImplementedError, match=wanted):
            transform(lambda x: call(x).sum())(x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=wanted):
        call(forward_ad.make_dual(x, x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_steps_of_serving_have_no_forward_mode():
    x, states, slots = normal(2, H, K), normal(4, H, K, K), torch.tensor([2, 0], device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"^decode: has no forward-mode derivative"):
        torch.func.jvp(lambda x: serving.decode(x, x, x, states, slots), (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"^decode: has no forward-mode"):
        serving.decode(forward_ad.make_dual(x, x), x, x, states, slots)


GRADIENTS = ("query", "key", "value", "g", "g_gamma", "initial_state")


@pytest.mark.parametrize("platform", ["torch"] if not GPU else ["torch", "triton"])
@pytest.mark.parametrize("gate", [3, 4], ids=["scalar", "vector"])
@pytest.mark.parametrize(
    "wanted", [("query",), ("key", "value"), ("g",), ("g_gamma",), ("g", "initial_state")], ids=str
)
def test_any_gradients_may_be_wanted(platform, gate, wanted):
    """A gradient that is wanted is what it is where all are wanted."""
    given = [*qkv(grad=False), gates() if gate == 4 else gates()[..., 0], -normal(H, seed=5).abs(),
             normal(B, H, K, K, seed=4)]
    both = []
    for names in (GRADIENTS, wanted):
        args = [x.clone().requires_grad_(name in names) for name, x in zip(GRADIENTS, given, strict=True)]
        outputs = keraunos.gla_attention(*args, return_state=True, platform=platform)
        both.append(gradients(outputs, [args[GRADIENTS.index(name)] for name in wanted]))
    truth = [x.double().requires_grad_() for x in given]
    exact = gradients([x.double() for x in keraunos.gla_attention(*truth, return_state=True, platform="torch")],
                      [truth[GRADIENTS.index(name)] for name in wanted])
    hosts = [[x.cpu().numpy() for x in y] for y in (both[1], exact, both[0])]
    assert_within_rule(wanted, *hosts, ["float32"] * len(wanted))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_that_nobody_wants_are_not_made(monkeypatch, compiled):
    """Neither of gates and decays, nor of a bias: what makes these does not run."""
    torch._dynamo.reset()

    def refuse(*args):
        raise AssertionError("a gradient that nobody wants")

    for kind in (ScalarDecay, VectorDecay):
        monkeypatch.setattr(kind, "across_backward", refuse)
    monkeypatch.setattr(torch.Tensor, "sum_to_size", refuse)
    q, k, v = qkv()
    bias, gamma = normal(1, H, T, T, seed=6), -normal(H, seed=5).abs()
    calls = (
        lambda q: keraunos.gla_attention(q, k, v, GATES, gamma, platform="torch"),
        lambda q: keraunos.lightning_attention(q, k, v, log_decay=gamma, platform="torch"),
        lambda q: keraunos.attention(q, k, v, bias, dtype=None, platform="torch"),
    )
    for call in calls:
        function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
        (got,) = torch.autograd.grad(function(q).square().sum(), q)
        assert got.isfinite().all()
    for wanted, call in ((GATES, calls[0]), (gamma, calls[1]), (bias, calls[2])):
        wanted.requires_grad_()
        with pytest.raises(AssertionError, match="nobody wants"):
            call(q.detach()).square().sum().backward()
        wanted.requires_grad_(False)
