"""keraunos.compat.fla: the formulas, results and errors of flash-linear-attention's functions."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from keraunos.compat import fla  # noqa: E402
from keraunos.kernels.linear_attention.reference import linear_attention  # noqa: E402
from keraunos.kernels.linear_attention.reference_vjp import linear_attention_vjp  # noqa: E402
from tests.numerics import assert_within_rule  # noqa: E402

B, T, H, K, V = 2, 37, 3, 16, 24
STATE = "initial_state=None, output_final_state=False"
# As fla 0.6.0 has them, without annotations.
SIGNATURES = {
    "chunk_simple_gla": f"q, k, v, g=None, g_gamma=None, scale=None, {STATE}, state_v_first=False, cu_seqlens=None, "
    "cu_seqlens_cpu=None, **kwargs",
    "fused_chunk_simple_gla": f"q, k, v, g=None, g_gamma=None, scale=None, {STATE}, cu_seqlens=None",
    "fused_recurrent_simple_gla": f"q, k, v, g=None, g_gamma=None, scale=None, {STATE}, reverse=False, "
    "state_v_first=False, cu_seqlens=None, **kwargs",
    "chunk_gla": f"q, k, v, g, scale=None, {STATE}, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None",
    "fused_recurrent_gla": f"q, k, v, gk=None, gv=None, scale=None, {STATE}, reverse=False, state_v_first=False, "
    "cu_seqlens=None, **kwargs",
    "chunk_lightning_attn": f"q, k, v, layer_idx, num_layers, scale=None, {STATE}, cu_seqlens=None, **kwargs",
    "fused_recurrent_lightning_attn": f"q, k, v, layer_idx, num_layers, scale=None, {STATE}, reverse=False, "
    "cu_seqlens=None",
    "chunk_retention": f"q, k, v, scale=None, {STATE}, cu_seqlens=None, **kwargs",
    "fused_recurrent_retention": f"q, k, v, scale=None, {STATE}, reverse=False, state_v_first=False, cu_seqlens=None, "
    "**kwargs",
}


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(B, T, H, K)) for _ in range(2))
    made = q, k, rng.normal(size=(B, T, H, V)), -rng.random((B, T, H, K)), rng.normal(size=(B, H, K, V))
    return [x.astype(np.float32) for x in made]


def tensors(*given):
    return [torch.tensor(x, requires_grad=True) for x in given]


def check(got, *args, **options):
    """Hold an output and a final state, and with six results their gradients too, to the reference."""
    truth, in_dtype = (
        [*linear_attention(*args, **options, dtype=dtype), *_gradients(*args, **options, dtype=dtype)]
        for dtype in (np.float64, np.float32)
    )
    names = ["output", "final_state", "dq", "dk", "dv", "dstate"][: len(got)]
    got = [x.detach().numpy() for x in got]
    assert_within_rule(names, got, truth[: len(got)], in_dtype[: len(got)], ["float32"] * len(got))


def _gradients(q, k, v, g, g_gamma, state, cu_seqlens=None, **options):
    """For those of the sums of output and final state."""
    if state is None:
        return ()
    ones = np.ones((*q.shape[:3], v.shape[3])), np.ones_like(state)
    found = linear_attention_vjp(q, k, v, g, g_gamma, state, cu_seqlens, *ones, **options)
    return *found[:3], found[5]


# Function, its own arguments, and what the recurrence is given for them.
q, k, v, g, state = arrays()
LIGHTNING = np.float32(-8 / H * (1 - 1 / 4) * np.arange(H))
RETENTION = np.float32(np.log(1 - 2.0 ** (-5 - np.arange(H))))
CASES = [
    ("chunk_gla", {"g": g}, {"g": g}),
    ("fused_recurrent_gla", {"gk": g}, {"g": g}),
    ("chunk_simple_gla", {"g": g[..., 0], "g_gamma": RETENTION}, {"g": g[..., 0], "g_gamma": RETENTION}),
    ("fused_chunk_simple_gla", {"g_gamma": RETENTION}, {"g_gamma": RETENTION}),
    ("fused_recurrent_simple_gla", {"g": g[..., 0]}, {"g": g[..., 0]}),
    ("chunk_lightning_attn", {"layer_idx": 1, "num_layers": 4}, {"g_gamma": LIGHTNING}),
    ("fused_recurrent_lightning_attn", {"layer_idx": 1, "num_layers": 4}, {"g_gamma": LIGHTNING}),
    ("chunk_retention", {}, {"g_gamma": RETENTION}),
    ("fused_chunk_retention", {}, {"g_gamma": RETENTION}),
    ("fused_recurrent_retention", {}, {"g_gamma": RETENTION}),
]


def called(own):
    return {name: torch.tensor(x) if isinstance(x, np.ndarray) else x for name, x in own.items()}


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize(("name", "own", "gates"), CASES, ids=[case[0] for case in CASES])
def test_each_function_is_its_recurrence(name, own, gates, scale):
    x = tensors(q, k, v, state)
    call = dict(scale=scale, initial_state=x[3], output_final_state=True, **called(own))
    output, last = getattr(fla, name)(*x[:3], **call)
    (output.sum() + last.sum()).backward()
    given = q, k, v, gates.get("g"), gates.get("g_gamma"), state
    check([output, last, *(y.grad for y in x)], *given, softmax_scale=scale)
    assert getattr(fla, name)(*x[:3], **{**call, "output_final_state": False})[1] is None


@pytest.mark.parametrize("name", [name for name, text in SIGNATURES.items() if "reverse" in text])
def test_reverse(name):
    own, gates = next((own, gates) for case, own, gates in CASES if case == name)
    output, last = getattr(fla, name)(*tensors(q, k, v), **called(own), reverse=True, output_final_state=True)
    check([output, last], q, k, v, gates.get("g"), gates.get("g_gamma"), None, reverse=True)


@pytest.mark.parametrize("name", [name for name, text in SIGNATURES.items() if "state_v_first" in text])
def test_states_with_values_first(name):
    own = next(own for case, own, _ in CASES if case == name)
    x = tensors(q, k, v, state)
    call = dict(output_final_state=True, **called(own))
    output, last = getattr(fla, name)(*x[:3], initial_state=x[3], **call)
    other, turned = getattr(fla, name)(*x[:3], initial_state=x[3].mT, state_v_first=True, **call)
    assert torch.equal(output, other)
    assert torch.equal(last, turned.mT)
    if "kwargs" in SIGNATURES[name]:
        with pytest.warns(DeprecationWarning, match="old name of state_v_first"):
            old = getattr(fla, name)(*x[:3], initial_state=x[3].mT, transpose_state_layout=True, **call)
        assert torch.equal(old[1], turned)
        with pytest.raises(ValueError, match=f"^{name}: got state_v_first and transpose_state_layout"):
            getattr(fla, name)(*x[:3], state_v_first=True, transpose_state_layout=True, **call)


def test_packed_sequences():
    lengths, given = np.array([0, 30, 30, 37], np.int32), [y[:1] for y in (q, k, v)]
    cu = torch.tensor(lengths)
    options = dict(output_final_state=True, cu_seqlens=cu, cu_seqlens_cpu=cu)
    found = fla.chunk_gla(*tensors(*given), torch.tensor(g[:1]), **options)
    assert found[1].shape == (3, H, K, V)
    check(found, *given, g[:1], None, None, lengths)


def test_weights_are_of_whole_float32(rounded_products):
    x = tensors(q, k, v)
    with torch.autocast("cpu"):
        _, weights = fla.parallel_retention(*x, output_attentions=True)
    check([torch.einsum("bhij,bjhv->bihv", weights.double(), x[2].double())], q, k, v, None, RETENTION, None)


@pytest.mark.parametrize("name", ["parallel_simple_gla", "parallel_retention"])
@pytest.mark.parametrize("strong", [False, True])
def test_weights_give_the_output(name, strong):
    x = tensors(q, k, v)
    gates = torch.tensor(g[..., 0] if not strong else np.where(g[..., 0] < -0.8, -np.inf, g[..., 0]))
    own = {"g": gates} if name == "parallel_simple_gla" else {}
    output, weights = getattr(fla, name)(*x, **own, output_attentions=True)
    assert weights.shape == (B, H, T, T)
    assert not weights.triu(1).any()
    decay = {"g": gates.numpy(), "g_gamma": None} if own else {"g": None, "g_gamma": RETENTION}
    for found in (output, torch.einsum("bhij,bjhv->bihv", weights, x[2])):
        check([found], q, k, v, *decay.values(), None)
    assert getattr(fla, name)(*x, **own)[1] is None
    with pytest.raises(ValueError, match=f"^{name}: output_attentions is True with cu_seqlens"):
        getattr(fla, name)(*x, **own, output_attentions=True, cu_seqlens=torch.tensor([0, T]))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_fla(name):
    found = inspect.signature(getattr(fla, name))
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[name]})"


def test_errors():
    x = tensors(q, k, v)
    with pytest.raises(DeprecationWarning, match=r"^chunk_retention: head_first"):
        fla.chunk_retention(*x, head_first=True)
    few = torch.ones(1, 3, 4, 8)
    with pytest.warns(UserWarning, match=r"^chunk_gla: q has fewer tokens than heads, 3 < 4; expected \[B, T, H, K\]"):
        fla.chunk_gla(few, few, few, -few)
    fla.chunk_gla(*[few[:, :1]] * 3, -few[:, :1])  # a step of decoding
    with pytest.raises(ValueError, match=r"^chunk_simple_gla: chunk_size is 48; expected a power of two"):
        fla.chunk_simple_gla(*x, chunk_size=48)
    assert fla.chunk_simple_gla(*x, chunk_size=32)[1] is None
    with pytest.raises(TypeError, match=r"^chunk_simple_gla: got an unexpected argument 'scales'"):
        fla.chunk_simple_gla(*x, scales=1.0)
    with pytest.raises(NotImplementedError, match=r"^fused_recurrent_gla: gv is given"):
        fla.fused_recurrent_gla(*x, torch.tensor(g), torch.tensor(v))
    with pytest.raises(NotImplementedError, match="expected chunk_gla"):
        fla.fused_chunk_gla()
    with pytest.raises(ValueError, match="B = 1 with cu_seqlens"):
        fla.chunk_retention(*x, cu_seqlens=torch.tensor([0, T]))
    with pytest.raises(ValueError, match="initial_state has shape"):
        fla.chunk_retention(
            *(y[:1] for y in x), initial_state=x[0].new_zeros(2, H, K, V), cu_seqlens=torch.tensor([0, T])
        )


def test_everything_compiles_whole():
    x = [y.detach().float() for y in tensors(q, k, v)]
    call = torch.compile(lambda *x: fla.chunk_retention(*x, output_final_state=True), backend="eager", fullgraph=True)
    assert torch.equal(call(*x)[0], fla.chunk_retention(*x)[0])
