"""The serving functions as an engine calls them in PyTorch: views, out=, drafts, resumed prompts, graphs, errors."""

import dataclasses
import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from keraunos import UnsupportedError, serving  # noqa: E402
from tests.linear_attention.cases import GPU, INTERPRETED  # noqa: E402
from tests.numerics import assert_within_rule  # noqa: E402
from tests.serving.cases import Case, arguments, array, require, results, run_torch, tensor  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
PLATFORMS = ["triton"] if INTERPRETED else ["torch", "triton"] if GPU else ["torch"]
pytestmark = pytest.mark.parametrize("platform", PLATFORMS)

CASES = {
    "decode": Case(gate="vector"),
    "verify": Case(op="verify", gate="scalar"),
    "commit": Case(op="commit", counts=(1, 3, 0, 2)),
    "prefill": Case(op="prefill", lengths=(3, 70, 2, 1), fresh=(2,), tail=3, tokens=(1, 72), targets=(5, 2)),
}
# The delta rule's too.
ALL = CASES | {
    f"{op}, delta": dataclasses.replace(
        case, delta=True, **{"raw": "softplus", "gate": "scalar", "gamma": False} if op != "prefill" else {}
    ) for op, case in CASES.items()
}


def whole(case):
    return {name: tensor(x) for name, x in case.arrays.items()}


def call(case, given, platform, **options):
    """``(output, pool)``, bit for bit."""
    args, gates = arguments(case.op, given)
    made = getattr(serving, case.op)(*args, **gates, **options, platform=platform)
    return tuple(map(array, results(case.op, given, made)))


def same(a, b):
    return all(x is y or x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_views_are_as_good_as_arrays(platform, name):
    """Slices of a fused projection, indices out of a longer array, a pool of several layers."""
    case = ALL[name]
    require(case, platform)
    given, views = whole(case), whole(case)
    tokens = [x for x in ("query", "key", "value") if views[x] is not None]
    fused = torch.cat([views[x] for x in tokens], -2)
    views |= dict(zip(tokens, fused.split(case.H, -2), strict=True))
    for index in ("slots", "counts", "cu_seqlens", "has_initial", "tokens", "targets"):
        if views[index] is not None:
            views[index] = torch.cat([views[index][:1], views[index]])[1:]
    layers = torch.stack([torch.zeros_like(views["states"]), views["states"]], 1)
    views["states"] = layers[:, 1]
    assert same(call(case, given, platform), call(case, views, platform))
    assert not layers[:, 0].any()


@pytest.mark.parametrize("name", ALL)
def test_the_pool_may_be_stored_the_other_way_round(platform, name):
    """``[slots, H, V, K]``."""
    case = dataclasses.replace(ALL[name], V=24)
    require(case, platform)

    def transposed(given):
        return given | {"states": given["states"].mT.contiguous().mT}

    case.check(lambda case: run_torch(platform, case, transposed))


@pytest.mark.parametrize("op", ["decode", "verify", "prefill"])
def test_outputs_go_where_they_are_wanted(platform, op):
    case = CASES[op]
    want = call(case, whole(case), platform)
    room = torch.full((*case.rows, case.H, case.V), float("nan"), device=DEVICE)
    given = whole(case)
    args, gates = arguments(op, given)
    made = getattr(serving, op)(*args, **gates, out=room, platform=platform)
    assert (made if op == "verify" else made[0]) is room
    assert same(want, (array(room), array(given["states"])))
    if op != "prefill":
        wide = torch.full((*case.rows, 2 * case.H, case.V), float("nan"), device=DEVICE)
        given = whole(case)
        args, gates = arguments(op, given)
        getattr(serving, op)(*args, **gates, out=wide[..., case.H :, :], platform=platform)
        assert same(want[:1], (array(wide[..., case.H :, :]),))
        assert wide[..., : case.H, :].isnan().all()


@pytest.mark.parametrize(("gate", "family"), [
    ("none", {}), ("vector", {}), ("none", dict(delta=True)), ("scalar", dict(delta=True, raw="softplus", HB=2)),
])
def test_drafts_are_decoded_one_by_one(platform, gate, family):
    """Bit for bit: what is verified and committed is what would have been decoded."""
    case = Case(op="commit", slots=(3, -1, 6, 0, 2), T=4, counts=(4, 2, 0, 1, 3), gate=gate, V=40, dtype="bfloat16",
                **family)
    given = whole(case)
    decoded, outputs = given["states"].clone(), []
    args, gates = [given[x] for x in ("query", "key", "value")], arguments(case.op, given)[1]
    verified = serving.verify(*args, given["states"], given["slots"], **gates, platform=platform)
    for t in range(case.T):
        one = {x: gates[x][:, t] for x in ("g", "beta", "a", "b") if gates.get(x) is not None}
        slots = torch.where(t < given["counts"], given["slots"], -1)
        step = serving.decode(*(x[:, t] for x in args), decoded, slots, **gates | one, platform=platform)
        outputs.append(step[0])
        live = (slots >= 0).cpu().numpy()
        assert array(verified[:, t])[live].tobytes() == array(step[0])[live].tobytes()
    _, pool = call(case, given, platform)
    assert pool.tobytes() == array(decoded).tobytes()


@pytest.mark.parametrize(("where", "delta"), [
    ("in the pool", False), ("in another pool", False), ("in the pool", True),
])
def test_the_states_after_drafts_may_be_kept(platform, where, delta):
    """Bit for bit what commit leaves, also where a request's own slot is among its targets; no other slot changes."""
    case = Case(op="verify", slots=(3, -1, 6, 0), size=12, T=3, gate="scalar", V=40, dtype="bfloat16", delta=delta)
    targets = np.array([[4, 3, -1], [11, 11, 11], [7, 8, 6], [0, -1, 9]], np.int32)
    given = whole(case)
    args, gates = arguments("verify", given)
    start = given["states"].clone()
    want = serving.verify(*args, **gates, platform=platform)
    pool = given["states"]
    if where == "in another pool":
        pool = torch.full((12, 2, case.H, 40, 16), 7.0, dtype=torch.bfloat16, device=DEVICE)[:, 1].mT
    before = pool.clone()
    # Of a wider table.
    exports = pool, tensor(np.pad(targets, ((0, 0), (0, 2))))[:, :3]
    assert same([array(want)], [array(serving.verify(*args, **gates, exports=exports, platform=platform))])
    for t in range(case.T):
        states = start.clone()
        counts = torch.full_like(given["slots"], t + 1)
        serving.commit(*args[1:3], states, given["slots"], counts, **gates, platform=platform)
        for n, target in enumerate(targets[:, t]):
            if target >= 0 and case.slots[n] >= 0:
                assert torch.equal(pool[target], states[case.slots[n]].to(pool.dtype))
                before[target] = pool[target]
    torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)
    if where == "in another pool":
        assert torch.equal(given["states"].nan_to_num(7.0), start.nan_to_num(7.0))
        # As an operator, too.
        pool.zero_()
        torch._dynamo.reset()
        compiled = torch.compile(serving.verify, fullgraph=True, backend="aot_eager")
        assert same([array(want)], [array(compiled(*args, **gates, exports=exports, platform=platform))])
        assert torch.equal(pool[6], before[6])


def test_bad_exports(platform):
    given = whole(CASES["verify"])
    args, gates = arguments("verify", given)
    pool, targets = given["states"], torch.full((4, 3), -1, device=DEVICE)
    for exports, error, message in (
        (pool, TypeError, r"verify: exports is of type Tensor; expected a pair \(pool, targets\)"),
        ((pool, None), TypeError, "expected a pair"),
        ((pool[:, :2], targets), ValueError, r"exports has a pool of shape \(8, 2, 16, 16\); expected \[slots, 4, 16"),
        ((pool, targets[:, :2]), ValueError, r"targets has shape \(4, 2\); expected \[N, T\] = \(4, 3\)"),
        ((pool.double(), targets), TypeError, "exports has dtype float64"),
    ):
        with pytest.raises(error, match=message):
            serving.verify(*args, **gates, exports=exports, platform=platform)
    if not GPU:
        with pytest.raises(ValueError, match="exports' targets has a value 8"):
            serving.verify(*args, **gates, exports=(pool, targets.fill_(8)), platform=platform)


@pytest.mark.parametrize("split", [1, 16, 17, 63, 64, 65, 127, 128, 129])
def test_a_prompt_may_come_in_parts(platform, split):
    """Prefix and rest in two calls, the first with another request in the batch, as good as the whole."""
    case = Case(op="prefill", slots=(2,), size=3, lengths=(130,), fresh=(0,), gate="scalar", H=2)
    truth, changed = case.truth()
    near, changed_near = case.truth(np.float32)
    given = whole(case)
    gamma, slot = given["g_gamma"], given["slots"]

    def part(where, has, slots, lengths):
        tokens = [given[x][where] for x in ("query", "key", "value", "g")]
        cu = torch.tensor([0, *np.cumsum(lengths)], device=DEVICE)
        return serving.prefill(*tokens[:3], given["states"], slots, cu, g=tokens[3], g_gamma=gamma,
                               has_initial=torch.tensor(has, device=DEVICE), platform=platform)[0]

    both = torch.tensor([2, 0], device=DEVICE)
    first = part(slice(0, split), [False, False], both, [split - 1, 1])
    again = part(slice(split - 1, 130), [True], slot, [131 - split])
    output = np.concatenate([array(first)[:-1], array(again)])
    assert_within_rule(("output", "state"), [output, array(given["states"])[2]], [truth, changed[2]],
                       [near, changed_near[2]], ["float32"] * 2)


@pytest.mark.parametrize("decodes_first", [True, False])
def test_mixed_batches_are_two_calls(platform, decodes_first):
    """Decodes and prompts of one step, in either order, on slices of the same arrays; the pool is one."""
    n, lengths = 3, (5, 70)
    lengths = (*[1] * n, *lengths) if decodes_first else (*lengths, *[1] * n)
    case = Case(op="prefill", slots=(5, 0, 3, 1, 6), lengths=lengths)

    def run(case):
        given = whole(case)
        T, cu = case.rows[0], given["cu_seqlens"]
        out = torch.empty(T, case.H, case.V, device=DEVICE)
        tokens = slice(0, n) if decodes_first else slice(T - n, T)
        rest = slice(n, T) if decodes_first else slice(0, T - n)
        slots, offsets = given["slots"], cu[n:] - n if decodes_first else cu[:-n]
        ours, others = (slots[:n], slots[n:]) if decodes_first else (slots[-n:], slots[:-n])
        q, k, v = (given[x] for x in ("query", "key", "value"))
        options = dict(g_gamma=given["g_gamma"], platform=platform)
        serving.decode(q[tokens], k[tokens], v[tokens], given["states"], ours, out=out[tokens], **options)
        serving.prefill(q[rest], k[rest], v[rest], given["states"], others, offsets, out=out[rest], **options)
        return array(out), array(given["states"])

    case.check(run)


# The interpreter warns where a factor that no chunk with strong gates uses is infinite.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_long_prompts_with_strong_decays(platform):
    sizes = dict(slots=(1, 0), size=2, H=1) if not INTERPRETED else dict(slots=(1, 0), size=2, H=1, K=16)
    lengths = (5000, 37) if not INTERPRETED else (300, 37)
    case = Case(op="prefill", lengths=lengths, gate="vector", decay=8.0, dtype="bfloat16", **sizes)
    case.check(lambda case: run_torch(platform, case))


class NoValue(TorchDispatchMode):
    """Refuses whatever reads a value of a tensor on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ALL)
def test_no_value_is_read_on_the_host(platform, name):
    case = ALL[name]
    require(case, platform)
    call(case, whole(case), platform)
    given = whole(case)
    args, gates = arguments(case.op, given)
    with NoValue():
        getattr(serving, case.op)(*args, **gates, platform=platform)


@pytest.mark.parametrize("op", CASES)
def test_nothing_is_kept_for_a_gradient(platform, op):
    case = CASES[op]
    given = whole(case)
    for name in ("key", "value"):
        given[name].requires_grad_()
    args, gates = arguments(op, given)
    output, pool = results(op, given, getattr(serving, op)(*args, **gates, platform=platform))
    assert not pool.requires_grad
    assert output is None or not output.requires_grad


BAD = {
    "states of another K": (lambda a: a | {"states": a["states"][:, :, :8]}, ValueError, "states has shape"),
    "states of float64": (lambda a: a | {"states": a["states"].double()}, TypeError, "states has dtype float64"),
    "slots as floats": (lambda a: a | {"slots": a["slots"].float()}, TypeError, "slots has dtype float32"),
    "slots of two axes": (lambda a: a | {"slots": a["slots"][None]}, ValueError, "slots has shape|expected"),
    "an array of NumPy": (lambda a: a | {"value": np.zeros(3)}, TypeError, "value is of type numpy.ndarray"),
    "a key of another dtype": (lambda a: a | {"value": a["value"].half()}, TypeError, "value has dtype float16"),
    "a value too few": (lambda a: a | {"value": a["value"][1:]}, ValueError, "value has shape"),
    "heads that divide no others": (
        lambda a: a | {"value": a["value"].repeat_interleave(3, -2)[..., :3, :]},
        ValueError,
        "value has 3 heads; expected a divisor of H = 4, the heads of states",
    ),
    "decays of two axes": (lambda a: a | {"g_gamma": a["g_gamma"][None]}, ValueError, r"expected \[H\]"),
    "a gate that grows": (lambda a: a | {"g_gamma": [1.0] * 4}, ValueError, "<= 0"),
    "a gate too wide": (lambda a: a | {"g": a["key"][..., None]}, ValueError, "g has shape"),
}


@pytest.mark.parametrize("op", ["decode", "verify", "prefill"])
def test_states_have_as_many_heads_as_the_array_with_most(platform, op):
    given = whole(CASES[op])
    given |= {name: given[name][..., :2, :] for name in ("query", "key", "value")}
    args, gates = arguments(op, given | {"g": None})
    with pytest.raises(ValueError, match=f"{op}: states has H = 4 heads; expected 2, the most that query"):
        getattr(serving, op)(*args, **gates, platform=platform)


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("bad", BAD)
def test_errors_come_before_anything_changes(platform, op, bad):
    change, error, message = BAD[bad]
    case = CASES[op]
    given = change(whole(case))
    before = given["states"].clone() if isinstance(given["states"], torch.Tensor) else None
    args, gates = arguments(op, given)
    with pytest.raises(error, match=message) as raised:
        getattr(serving, op)(*args, **gates, platform=platform)
    assert str(raised.value).startswith(op)
    assert torch.equal(before.nan_to_num(7.0), given["states"].nan_to_num(7.0))


def test_more_errors(platform):
    given = whole(CASES["decode"])
    args, gates = arguments("decode", given)
    with pytest.raises(ValueError, match="got log_decay and g_gamma"):
        serving.decode(*args, **gates, log_decay=gates["g_gamma"])
    with pytest.raises(UnsupportedError, match="decode: platform 'cuda' does not have it; expected one of"):
        serving.decode(*args, **gates, platform="cuda")
    for scale in ("x", True, float("nan")):
        with pytest.raises(TypeError, match=f"softmax_scale is {scale!r}; expected a finite number"):
            serving.decode(*args, **gates, softmax_scale=scale)
    given = whole(CASES["prefill"])
    args, gates = arguments("prefill", given)
    with pytest.raises(TypeError, match="expected a pair"):
        serving.prefill(*args, **gates | {"boundaries": given["tokens"]})
    for one in ((given["slots"], None), (None, given["slots"])):
        with pytest.raises(TypeError, match=r"boundaries is .*None.*; expected a pair"):
            serving.prefill(*args, **gates | {"boundaries": one})
    with pytest.raises(ValueError, match="cu_seqlens has shape"):
        serving.prefill(*args[:-1], args[-1][1:], **gates)
    room = torch.empty(*CASES["prefill"].rows, 8, 16, device=DEVICE)[:, :4]
    with pytest.raises(ValueError, match="out has strides"):
        serving.prefill(*args, **gates, out=room, platform=platform)
    assert list(inspect.signature(serving.decode).parameters)[:5] == ["query", "key", "value", "states", "slots"]


def test_errors_of_the_delta_rule(platform):
    case = ALL["decode, delta"]
    given = whole(case)
    args, gates = arguments("decode", given)
    g, beta = gates["a"], gates["b"]
    for changes, error, message in (
        (dict(a=None), TypeError, "got A_log without a; expected both, or neither"),
        (dict(A_log=None), TypeError, "got a without A_log"),
        (dict(a=None, A_log=None), TypeError, "got dt_bias without a"),
        (dict(a=None, A_log=None, dt_bias=None, lower_bound=-5.0), TypeError, "got lower_bound without a"),
        (dict(b=None), TypeError, "got a without beta or b"),
        (dict(g=g), ValueError, "got g and a, which say the same"),
        (dict(beta=beta), ValueError, "got beta and b, which say the same"),
        (dict(lower_bound=1.0), ValueError, r"lower_bound is 1\.0; expected a number below 0"),
        (dict(use_qk_l2norm=1), TypeError, "use_qk_l2norm is 1; expected True or False"),
        (dict(b=beta[:, :3]), ValueError, "b has 3 heads; expected a divisor of H = 4, the heads of states"),
        (dict(a=g[..., None]), ValueError, r"a has shape \(4, 4, 1\); expected \[N, heads, K\]"),
        (dict(A_log=gates["A_log"][:2]), ValueError, r"A_log has shape \(2,\); expected \[heads of a\] = \(4,\)"),
        (dict(dt_bias=given["key"][0]), ValueError, r"dt_bias has shape \(4, 16\); expected \[heads of a\]"),
    ):
        with pytest.raises(error, match=f"^decode: {message}"):
            serving.decode(*args, **{**gates, **changes}, platform=platform)
    with pytest.raises(TypeError, match="got use_qk_l2norm without beta or b"):
        serving.decode(*args, use_qk_l2norm=True, platform=platform)


@pytest.mark.parametrize("name", ["prefill", "prefill, delta"])
def test_states_every_few_tokens(platform, name):
    """As if each were a boundary; what a request has no tokens for goes nowhere."""
    case = dataclasses.replace(ALL[name], slots=(3, 0, 6, -1), lengths=(0, 70, 32, 3), fresh=None, tail=4, size=12)
    require(case, platform)
    targets = np.array([[7] * 5, [1, -1, 2, 4, 5], [8, 9, 10, 7, 7], [11] * 5], np.int32)
    case = dataclasses.replace(case, tokens=(15, 47, 63, 85, 101), targets=(1, 2, 4, 8, 9))
    given = whole(case)
    args, gates = arguments("prefill", given)
    gates |= {"boundaries": None, "every": (16, tensor(targets))}
    case.check(lambda case: tuple(map(array, serving.prefill(*args, **gates, platform=platform))))
    for every, error, message in (
        (16, TypeError, "every is 16; expected a pair"), ((0, args[4]), ValueError, "every has n = 0"),
        ((16, args[4]), ValueError, r"every has targets of shape \(4,\); expected \[N, M\] with N = 4"),
    ):
        with pytest.raises(error, match=message):
            serving.prefill(*args, **gates | {"every": every}, platform=platform)
    with pytest.raises(ValueError, match="got boundaries and every"):
        serving.prefill(*args, **gates | {"boundaries": (given["tokens"], given["targets"])}, platform=platform)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", ALL)
def test_a_captured_call_serves_other_requests(platform, name):
    """Replayed with other slots, lengths, counts and padding, a graph gives what a new call gives."""
    if platform != "triton":
        pytest.skip("graphs are Triton's")
    case = dataclasses.replace(ALL[name], size=9)
    require(case, platform)
    given = whole(case)
    args, gates = arguments(case.op, given)
    function = getattr(serving, case.op)
    start = given["states"].clone()
    function(*args, **gates, platform=platform)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = function(*args, **gates, platform=platform)
    other = dict(slots=(-1, 8, 4, 7), counts=(3, 0, 2, 3)) if case.op != "prefill" else dict(
        slots=(8, -1, 7, 4), lengths=(64, 0, 5, 3), tail=7, fresh=(0, 3), tokens=(63, 66), targets=(-1, 1)
    )
    if case.op in ("decode", "verify"):
        other.pop("counts")
    second = whole(dataclasses.replace(case, **other, seed=1))
    for name, x in given.items():
        if x is not None:
            x.copy_(second[name])
    graph.replay()
    got = tuple(array(x) for x in results(case.op, given, made))
    assert same(got, call(dataclasses.replace(case, **other, seed=1), second, platform))
    assert not torch.equal(start.nan_to_num(), given["states"].nan_to_num())


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_steps_that_follow_at_once_wait_for_one_another(platform):
    """A launch may begin before the one before it has ended: the bits are those of one launch for all tokens."""
    if platform != "triton":
        pytest.skip("graphs are Triton's")
    T, N, H, K = 16, 64, 8, 128
    q, k, v = tokens = [torch.randn(N, T, H, K, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    states = torch.randn(N + 6, H, K, K, device=DEVICE)
    slots = torch.randperm(N + 6, device=DEVICE)[:N].int()
    options = dict(log_decay=-torch.rand(H, device=DEVICE), platform=platform)

    def decode():
        return [serving.decode(*(x[:, t] for x in tokens), states, slots, **options)[0] for t in range(T)]

    start, last = states.clone(), states.clone()
    want = serving.verify(q, k, v, states, slots, **options)
    serving.commit(k, v, last, slots, torch.full_like(slots, T), **options)
    decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = decode()
    for _ in range(5):
        states.copy_(start)
        graph.replay()
        assert torch.equal(torch.stack(made, 1), want)
        assert torch.equal(states, last)


def test_requests_do_not_depend_on_their_batch(platform):
    """A request's bits are the same alone and among others."""
    case = Case(slots=(3, 1, 6, 0, 2), K=40, dtype="bfloat16")
    together = call(case, whole(case), platform)
    for n, slot in enumerate(case.slots):
        given = whole(case)
        for name in ("query", "key", "value", "slots"):
            given[name] = given[name][n : n + 1]
        output, pool = call(case, given, platform)
        assert output[0].tobytes() == together[0][n].tobytes()
        assert pool[slot].tobytes() == together[1][slot].tobytes()


def test_the_choice_of_a_platform_is_told(platform):
    import keraunos

    args, gates = arguments("decode", whole(CASES["decode"]))
    choice = keraunos.explain(keraunos.serving.decode, *args, **gates, platform=platform)
    assert choice.platform == platform
    assert keraunos.compat.vllm.lightning_attention


def test_arrays_elsewhere_are_refused(platform):
    given = whole(CASES["decode"])
    args, gates = arguments("decode", given | {"slots": given["slots"].to("meta")})
    with pytest.raises(ValueError, match=r"decode: slots is on meta; expected (cpu|cuda:0), like key"):
        serving.decode(*args, **gates, platform=platform)


@pytest.mark.parametrize("name", ALL)
def test_torch_compile_takes_it_as_one_step(platform, name):
    case = ALL[name]
    require(case, platform)
    want = call(case, whole(case), platform)
    gates = arguments(case.op, whole(case))[1]
    torch.compiler.reset()  # PyTorch counts what it compiled of one function, here of all cases
    compiled = torch.compile(
        lambda *args: getattr(serving, case.op)(*args, **gates, platform=platform), fullgraph=True, backend="aot_eager"
    )
    # The second time as what the first has left behind says.
    for _ in range(2):
        given = whole(case)
        assert same(want, map(array, results(case.op, given, compiled(*arguments(case.op, given)[0]))))
        assert same(want[1:], [array(given["states"])])


def test_a_step_may_have_no_requests(platform):
    """Decodes and drafts of nobody, and prompts of padding only; a row of prompts has one request at least."""
    states = torch.randn(3, 2, 16, 16, device=DEVICE)
    before, nobody = states.clone(), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    token, drafts = torch.zeros(0, 2, 16, device=DEVICE), torch.zeros(0, 4, 2, 16, device=DEVICE)
    assert serving.decode(token, token, token, states, nobody, platform=platform)[0].shape == token.shape
    assert serving.verify(drafts, drafts, drafts, states, nobody, platform=platform).shape == drafts.shape
    serving.commit(drafts, drafts, states, nobody, nobody, platform=platform)
    padding, offsets = nobody.new_full((1,), -1), nobody.new_zeros(2)
    assert serving.prefill(token, token, token, states, padding, offsets, platform=platform)[0].shape == token.shape
    with pytest.raises(ValueError, match="N >= 1"):
        serving.prefill(token, token, token, states, nobody, offsets[:1], platform=platform)
    assert torch.equal(states, before)
