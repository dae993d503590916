"""keraunos.compat.fla: the formulas, results and errors of flash-linear-attention's functions."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from keraunos.compat import fla  # noqa: E402
from keraunos.kernels.linear_attention.reference import linear_attention  # noqa: E402

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
    return q, k, rng.normal(size=(B, T, H, V)), -rng.random((B, T, H, K)), rng.normal(size=(B, H, K, V))


def tensors(*given):
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in given]


# Function, its own arguments, and what the recurrence is given for them.
q, k, v, g, state = arrays()
LIGHTNING = -8 / H * (1 - 1 / 4) * np.arange(H)
RETENTION = np.log(1 - 2.0 ** (-5 - np.arange(H)))
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
    want, final = linear_attention(q, k, v, **gates, initial_state=state, softmax_scale=scale)
    x = tensors(q, k, v, state)
    call = dict(scale=scale, initial_state=x[3], output_final_state=True, **called(own))
    output, last = getattr(fla, name)(*x[:3], **call)
    # Decays of layers and of heads are constants in float32, as fla has them.
    np.testing.assert_allclose(output.detach(), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last.detach(), final, rtol=1e-5, atol=1e-6)
    (output.sum() + last.sum()).backward()
    assert all(y.grad is not None and y.grad.abs().sum() > 0 for y in x)
    output, last = getattr(fla, name)(*x[:3], **{**call, "output_final_state": False})
    assert last is None


@pytest.mark.parametrize("name", [name for name, text in SIGNATURES.items() if "reverse" in text])
def test_reverse(name):
    own = next(own for case, own, _ in CASES if case == name)
    x, flipped = tensors(q, k, v), tensors(*(y[:, ::-1].copy() for y in (q, k, v)))
    turned = {n: y[:, ::-1].copy() if getattr(y, "ndim", 0) > 2 else y for n, y in own.items()}
    output, _ = getattr(fla, name)(*x, **called(own), reverse=True)
    other, _ = getattr(fla, name)(*flipped, **called(turned))
    np.testing.assert_allclose(output.detach(), other.flip(1).detach(), rtol=1e-9)


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
    lengths, x = torch.tensor([0, 30, 30, 37]), tensors(*(y[:1] for y in (q, k, v)))
    gates = torch.tensor(g[:1])
    output, states = fla.chunk_gla(*x, gates, output_final_state=True, cu_seqlens=lengths, cu_seqlens_cpu=lengths)
    assert states.shape == (3, H, K, V)
    alone, _ = fla.chunk_gla(*(y[:, 30:] for y in x), gates[:, 30:])
    np.testing.assert_allclose(output[:, 30:].detach(), alone.detach(), rtol=1e-9)


@pytest.mark.parametrize("name", ["parallel_simple_gla", "parallel_retention"])
@pytest.mark.parametrize("strong", [False, True])
def test_weights_give_the_output(name, strong):
    x = tensors(q, k, v)
    gates = torch.tensor(g[..., 0] if not strong else np.where(g[..., 0] < -0.8, -np.inf, g[..., 0]))
    own = {"g": gates} if name == "parallel_simple_gla" else {}
    output, weights = getattr(fla, name)(*x, **own, output_attentions=True)
    assert weights.shape == (B, H, T, T)
    assert not weights.triu(1).any()
    np.testing.assert_allclose(torch.einsum("bhij,bjhv->bihv", weights, x[2]).detach(), output.detach(), atol=1e-5)
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
