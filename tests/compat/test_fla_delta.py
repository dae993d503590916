"""keraunos.compat.fla: flash-linear-attention's functions of the delta rule, held to a loop over tokens in float64."""

import inspect
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from keraunos.compat import fla  # noqa: E402
from tests.numerics import assert_within_rule  # noqa: E402

B, T, H, HV, K, V = 2, 70, 2, 4, 32, 24
STATE = "scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False"
# As fla 0.6.0 has them, without annotations; after the star what fla takes as **kwargs without naming it.
SIGNATURES = {
    "chunk_gated_delta_rule": f"q, k, v, g, beta, {STATE}, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
    "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, *, "
    "use_gate_in_kernel=False, A_log=None, dt_bias=None, chunk_size=64, **kwargs",
    "fused_recurrent_gated_delta_rule": f"q, k, v, g=None, gk=None, gv=None, beta=None, {STATE}, "
    "use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
    "state_v_first=False, cu_seqlens=None, **kwargs",
    "chunk_delta_rule": f"q, k, v, beta, {STATE}, cu_seqlens=None, cu_seqlens_cpu=None, *, chunk_size=64, **kwargs",
    "fused_recurrent_delta_rule": f"q, k, v, beta=None, {STATE}, cu_seqlens=None",
    "chunk_kda": f"q, k, v, g, beta, {STATE}, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
    "allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False, "
    "return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, "
    "use_graph=False, max_num_seqs=None, *, A_log=None, dt_bias=None, chunk_size=64, **kwargs",
    "fused_recurrent_kda": "q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, "
    "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
    "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False, "
    "cu_seqlens=None, **kwargs",
}
KERNEL = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
DELTANET = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
KIMI = ["chunk_kda", "fused_recurrent_kda"]
# The arrays that a plain call gives a function in addition to q, k, v and the state.
PLAIN = {**dict.fromkeys(DELTANET, ("g", "beta")), **dict.fromkeys(KIMI, ("gk", "beta")),
         **dict.fromkeys(("chunk_delta_rule", "fused_recurrent_delta_rule"), ("beta",))}
# Function, the arrays it is given in addition to q, k, v and the state, and its other arguments.
CASES = [
    *((name, ["g", "beta"], {}) for name in DELTANET),
    *((name, ["a", "b", "A_log", "dt_bias"], {**KERNEL, "allow_neg_eigval": True}) for name in DELTANET),
    *((name, ["a", "b", "A_log"], {**KERNEL, "use_qk_l2norm_in_kernel": True}) for name in DELTANET),
    ("fused_recurrent_gated_delta_rule", ["g", "gk"], {}),
    ("fused_recurrent_gated_delta_rule", [], {}),
    ("chunk_delta_rule", ["beta"], {"use_qk_l2norm_in_kernel": True}),
    ("fused_recurrent_delta_rule", ["beta"], {}),
    ("fused_recurrent_delta_rule", [], {"scale": 0.5}),
    *((name, ["gk", "beta"], {}) for name in KIMI),
    *((name, ["ak", "b", "A_log", "dt_bias_k"], {**KERNEL, "scale": 0.5}) for name in KIMI),
    *((name, ["ak", "b", "A_log", "dt_bias_k"], {**KERNEL, "lower_bound": -5.0}) for name in KIMI),
    *((name, ["ak", "beta"], {"use_gate_in_kernel": True, "lower_bound": -4.0}) for name in KIMI),
    ("chunk_kda", ["ak", "beta", "A_log"], {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0}),
]


def arrays(B=B, T=T):
    rng = np.random.default_rng(0)
    made = {
        "q": rng.normal(size=(B, T, H, K)), "k": rng.normal(size=(B, T, H, K)),
        "v": rng.normal(size=(B, T, HV, V)), "state": rng.normal(size=(B, HV, K, V)),
        "g": -rng.random((B, T, HV)) / 4, "gk": -rng.random((B, T, HV, K)) / 4, "beta": rng.random((B, T, HV)),
        "a": rng.normal(size=(B, T, HV)), "ak": rng.normal(size=(B, T, HV, K)), "b": rng.normal(size=(B, T, HV)),
        "A_log": rng.normal(size=HV), "dt_bias": rng.normal(size=HV), "dt_bias_k": rng.normal(size=HV * K),
    }
    made["k"] /= np.linalg.norm(made["k"], axis=-1, keepdims=True)
    return {name: x.astype(np.float32) for name, x in made.items()}


def per_dimension(gates):
    return gates if gates.ndim == 4 else gates[..., None]


def loop(x, options):
    """Output and final state, token by token, of what a case is given."""
    q, k, v, state = x["q"], x["k"], x["v"], x["state"]
    gate, beta = torch.zeros_like(v[..., :1]), x.get("beta", torch.ones_like(v[..., 0]))
    for name in ("g", "gk"):
        gate = gate + (per_dimension(x[name]) if name in x else 0)
    if "b" in x:
        beta = torch.sigmoid(x["b"]) * (1 + options.get("allow_neg_eigval", False))
    if raw := {"a", "ak"} & x.keys():
        gate = per_dimension(x[raw.pop()])
        for bias in ("dt_bias", "dt_bias_k"):
            gate = gate + (x[bias].reshape(HV, -1) if bias in x else 0)
        rate = x["A_log"].exp()[:, None] if "A_log" in x else 1
        bound = options.get("lower_bound")
        gate = bound * torch.sigmoid(rate * gate) if bound else -rate * torch.log1p(gate.exp())
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(HV // H, 2) for y in (q, k))
    outputs = []
    for t in range(v.shape[1]):
        state = gate[:, t].exp()[..., None] * state
        error = v[:, t] - (state * k[:, t][..., None]).sum(-2)
        state = state + k[:, t][..., None] * (beta[:, t][..., None] * error)[..., None, :]
        outputs.append((state * q[:, t][..., None]).sum(-2) * options.get("scale", K**-0.5))
    return torch.stack(outputs, 1) if outputs else v, state


def given(names, dtype=torch.float32, **sizes):
    made = arrays(**sizes)
    names = ["q", "k", "v", "state", *names]
    return {name: torch.tensor(made[name], dtype=dtype, requires_grad=True) for name in names}


def call(name, x, options, output_final_state=True):
    """A function of fla with the arrays of a case under the names that it has for them."""
    kimi = "kda" in name
    own = {"a": "g", "ak": "g", "gk": "g" if kimi else "gk", "b": "beta", "dt_bias_k": "dt_bias"}
    tensors = {own.get(key, key): y for key, y in x.items() if key != "state"}
    return getattr(fla, name)(**tensors, initial_state=x["state"], output_final_state=output_final_state,
                              **options)


def differentiated(output, state, x):
    rng = np.random.default_rng(1)
    weights = [torch.tensor(rng.normal(size=y.shape)) for y in (output, state)]
    ((output * weights[0]).sum() + (state * weights[1]).sum()).backward()
    return [y.detach().double().numpy() for y in (output, state, *(y.grad for y in x.values()))]


def truths(names, options, **sizes):
    for dtype in (torch.float64, torch.float32):
        x = given(names, dtype, **sizes)
        yield differentiated(*loop(x, options), x)


@pytest.mark.parametrize(("name", "names", "options"), CASES, ids=lambda x: x if isinstance(x, str) else None)
def test_each_function_is_its_recurrence(name, names, options):
    x = given(names)
    got = differentiated(*call(name, x, options), x)
    labels = ["output", "final_state", *(f"d{key}" for key in x)]
    truth, in_dtype = truths(names, options)
    scales = dict(zip(labels, truth, strict=True))
    for key in {"A_log", "dt_bias", "dt_bias_k"} & x.keys():
        # The sum of what all tokens add, which may cancel.
        scales[f"d{key}"] = abs(scales["da" if "a" in x else "dak"]).sum((0, 1))
    assert_within_rule(labels, got, truth, in_dtype, ["float32"] * len(got), [*scales.values()])
    assert call(name, x, options, output_final_state=False)[1] is None


@pytest.mark.parametrize("name", [name for name, text in SIGNATURES.items() if "state_v_first" in text])
def test_states_with_values_first(name):
    x = given(PLAIN[name])
    output, last = call(name, x, {})
    x["state"] = x["state"].mT
    other, turned = call(name, x, {"state_v_first": True})
    assert torch.equal(output, other)
    assert torch.equal(last, turned.mT)
    with pytest.warns(DeprecationWarning, match="old name of state_v_first") as warned:
        assert torch.equal(call(name, x, {"transpose_state_layout": True})[1], turned)
    with pytest.raises(ValueError, match=f"^{name}: got state_v_first and transpose_state_layout"):
        call(name, x, {"state_v_first": True, "transpose_state_layout": True})
    assert warned[0].filename == __file__


def packed(names, cuts):
    """The arrays of a call with packed sequences, and for each sequence its tokens and the arrays of a call for it."""
    x = {key: y.detach() for key, y in given(names, B=1, T=cuts[-1]).items()}
    state = torch.tensor(np.random.default_rng(2).normal(size=(len(cuts) - 1, HV, K, V)), dtype=torch.float32)
    own = [(slice(*ends), {key: y[:, slice(*ends)] for key, y in x.items()} | {"state": state[n:n + 1]})
           for n, ends in enumerate(itertools.pairwise(cuts))]
    return {**x, "state": state}, own


def check(labels, got, own):
    """Hold results of one sequence, of which the last is its state, to what ``loop`` gives for it."""
    truth, in_dtype = (
        [y.double().numpy() for y in loop({key: y.to(dtype) for key, y in own.items()}, {})[-len(got):]]
        for dtype in (torch.float64, torch.float32)
    )
    assert_within_rule(labels, [y.numpy() for y in got], truth, in_dtype, ["float32"] * len(got))


@pytest.mark.parametrize("name", PLAIN)
def test_packed_sequences(name):
    cuts = [0, 30, 30, 70]
    x, sequences = packed(PLAIN[name], cuts)
    output, last = call(name, x, {"cu_seqlens": torch.tensor(cuts)})
    for n, (tokens, own) in enumerate(sequences):
        check(["output", "final_state"], [output[:, tokens], last[n:n + 1]], own)


@pytest.mark.parametrize("state_v_first", [False, True])
def test_states_before_each_chunk(state_v_first):
    cuts = [0, 70, 70, 102, 103, 140]
    x, sequences = packed(PLAIN["chunk_kda"], cuts)
    options = {"return_intermediate_states": True, "chunk_size": 32, "state_v_first": state_v_first,
               "cu_seqlens": torch.tensor(cuts)}
    if state_v_first:
        x["state"] = x["state"].mT.contiguous()
    with torch.inference_mode():
        output, last, states = call("chunk_kda", x, options)
        assert call("chunk_kda", x, options, output_final_state=False)[1] is None
    if state_v_first:
        last, states = last.mT, states.mT
    assert states.shape == (1, 3 + 0 + 1 + 1 + 2, HV, K, V)
    first = 0
    for n, (tokens, own) in enumerate(sequences):
        chunks = range(0, tokens.stop - tokens.start, 32)
        check(["output", "final_state"], [output[:, tokens], last[n:n + 1]], own)
        for i, start in enumerate(chunks):
            before = {key: y if key == "state" else y[:, :start] for key, y in own.items()}
            check(["final_state"], [states[:, first + i]], before)
        first += len(chunks)


def test_states_before_each_chunk_of_a_batch():
    x = {key: y.detach() for key, y in given(PLAIN["chunk_kda"]).items()}
    with torch.inference_mode():
        output, last, states = call("chunk_kda", x, {"return_intermediate_states": True})
    assert states.shape == (B, 2, HV, K, V)
    for n in range(B):
        own = {key: y[n:n + 1] for key, y in x.items()}
        check(["output", "final_state"], [output[n:n + 1], last[n:n + 1]], own)
        assert torch.equal(states[n, 0], x["state"][n])
        check(["final_state"], [states[n:n + 1, 1]],
              {key: y if key == "state" else y[:, :64] for key, y in own.items()})
    with pytest.raises(ValueError, match=r"^chunk_kda: return_intermediate_states .* torch.inference_mode"):
        call("chunk_kda", x, {"return_intermediate_states": True})


@pytest.mark.parametrize("name", ["fused_recurrent_gated_delta_rule", "fused_recurrent_kda"])
def test_queries_may_be_wider_than_values(name):
    x = given(PLAIN[name])
    narrow = {**x, "v": x["v"].detach().half()}
    output, _ = call(name, narrow, {})
    assert output.dtype == torch.float16
    assert torch.equal(output, call(name, {**x, "v": narrow["v"].float()}, {})[0].half())


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_fla(name):
    found = inspect.signature(getattr(fla, name))
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[name]})"


def test_aliases():
    assert fla.chunk_gdn is fla.chunk_gated_delta_rule
    assert fla.fused_recurrent_gdn is fla.fused_recurrent_gated_delta_rule


GATED = {"use_gate_in_kernel": True}
ERRORS = [
    ("chunk_gated_delta_rule", {"chunk_size": 128}, ValueError, r"chunk_size is 128; expected one of \(16, 32, 64\)"),
    ("chunk_delta_rule", {"chunk_size": 8}, ValueError, r"chunk_size is 8; expected one of \(16, 32, 64\)"),
    ("chunk_kda", {"chunk_size": 16}, ValueError, r"chunk_size is 16; expected one of \(32, 64\)"),
    *((name, GATED, ValueError, "expected g and A_log") for name in DELTANET),
    *((name, GATED, ValueError, "expected A_log or lower_bound") for name in KIMI),
    *((name, {"allow_neg_eigval": True}, ValueError, "expected use_beta_sigmoid_in_kernel=True")
      for name in (*DELTANET, *KIMI)),
    ("chunk_kda", {**GATED, "safe_gate": True}, ValueError, "lower_bound is None with safe_gate"),
    ("chunk_kda", {**GATED, "safe_gate": True, "lower_bound": -6.0}, ValueError, "lower_bound is -6.0 with safe_gate"),
    ("chunk_kda", {"use_graph": True, "max_num_seqs": 3, "cu_seqlens": torch.tensor([0, T])}, ValueError,
     "cu_seqlens has 1 sequences; expected max_num_seqs = 3"),
    *((name, {"cp_context": object()}, NotImplementedError, "cp_context is given")
      for name in ("chunk_gated_delta_rule", "chunk_kda")),
    ("fused_recurrent_gated_delta_rule", {"gv": torch.zeros(B, T, HV, V)}, NotImplementedError, "gv is given"),
    ("fused_recurrent_gated_delta_rule", {"beta": None, "use_beta_sigmoid_in_kernel": True}, ValueError,
     "expected beta"),
    *((name, {"head_first": True}, DeprecationWarning, "head_first belongs to older versions")
      for name in SIGNATURES if "kwargs" in SIGNATURES[name]),
    *((name, {"scales": 1.0}, TypeError, "got an unexpected argument 'scales'")
      for name in SIGNATURES if "kwargs" in SIGNATURES[name]),
]


@pytest.mark.parametrize(("name", "options", "error", "message"), ERRORS)
def test_errors(name, options, error, message):
    x = given(PLAIN[name])
    with pytest.raises(error, match=f"^{name}: .*{message}"):
        call(name, {key: y for key, y in x.items() if key not in options}, options)


@pytest.mark.parametrize("name", PLAIN)
def test_shapes_are_checked(name):
    x = given(PLAIN[name])
    with pytest.raises(ValueError, match="B = 1 with cu_seqlens"):
        call(name, x, {"cu_seqlens": torch.tensor([0, T])})
    with pytest.raises(ValueError, match="initial_state has shape"):
        call(name, {**x, "state": x["state"][:1]}, {})


def test_lists_for_graphs_change_nothing():
    cuts = torch.tensor([0, 30, 70, 70])
    x, _ = packed(PLAIN["chunk_kda"], cuts.tolist())
    found = call("chunk_kda", x, {"cu_seqlens": cuts, "use_graph": True, "max_num_seqs": 3, "cu_seqlens_cpu": cuts})
    assert all(map(torch.equal, found, call("chunk_kda", x, {"cu_seqlens": cuts})))


def test_everything_compiles_whole():
    x = given(["ak", "b", "A_log", "dt_bias_k"])
    options = {**KERNEL, "lower_bound": -5.0}
    whole = torch.compile(lambda: call("chunk_kda", x, options), backend="eager", fullgraph=True)
    assert torch.equal(whole()[0], call("chunk_kda", x, options)[0])
