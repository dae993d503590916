"""Both linear operations on every platform that runs here: values and gradients against the float64 recurrence."""

import dataclasses
import functools
import itertools
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keraunos
from keraunos.kernels.linear_attention import contract
from tests.linear_attention.cases import GPU, INTERPRETED, Case, platforms, runner
from tests.numerics import assert_within_rule

# In the interpreter: see tests/triton/interpreter.py.
IS_CUT = any(os.environ.get(f"KERAUNOS_TEST_{name}") for name in ("SEGMENT", "PARTS"))
# Small shapes where every operation is slow; the GPU takes the large ones too.
CHUNK = 64
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


# The chunk that XLA takes here: a call that names none is traced for every kind of device. Lightning's calls name none.
XLA = keraunos.Config(block_q=64 if GPU else 32, platform="xla")


def gla(args, case, platform, return_state=True, **options):
    cfg = XLA if platform == "xla" else None
    return keraunos.gla_attention(
        *args, softmax_scale=case.scale, reverse=case.reverse, return_state=return_state, platform=platform, cfg=cfg,
        **options,
    )


def gla_in_two(args, case, platform):
    """The output of a call that is not asked for the state, and the state of one that is."""
    return gla(args, case, platform, return_state=False), gla(args, case, platform)[1]


def lightning(args, case, platform, **options):
    query, key, value, g, g_gamma, state, cu_seqlens = args
    assert g is None
    return keraunos.lightning_attention(
        query, key, value, state, cu_seqlens, log_decay=g_gamma, softmax_scale=case.scale, reverse=case.reverse,
        return_state=True, platform=platform, **options,
    )


def values_first(function):
    """A call of ``function`` with states ``[N, H, V, K]``."""

    def call(args, case, platform):
        args = list(args)
        if args[5] is not None:
            # In memory too.
            args[5] = args[5].mT.contiguous() if hasattr(args[5], "contiguous") else args[5].mT
        output, state = function(args, case, platform, state_v_first=True)
        assert state.shape[2:] == (case.V, case.K)
        return output, state.mT

    return call


@pytest.fixture(params=platforms(), ids="-".join)
def run_gla(request):
    return runner(*request.param, gla)


@pytest.fixture(params=platforms(), ids="-".join)
def run_gla_in_two(request):
    return runner(*request.param, gla_in_two)


@pytest.fixture(params=platforms(), ids="-".join)
def run_lightning(request):
    return runner(*request.param, lightning)


@pytest.fixture(params=platforms(), ids="-".join)
def run_lightning_in_chunks(request):
    """On XLA with the chunks of a CPU."""
    cfg = XLA if request.param[0] == "xla" else None
    return runner(*request.param, functools.partial(lightning, cfg=cfg))


def tiled(*cases):
    """Cases for kernels with tiles, which neither XLA nor PyTorch has."""
    return list(cases) if GPU or INTERPRETED else []


def slow(*cases):
    """Large cases for kernels with tiles, which the interpreter would take minutes for."""
    return list(cases) if GPU else []


def crossed(first, second, cut=False):
    """Every pair of two values on every platform; on XLA, which compiles a program for each, every value once.

    ``cut``: in the interpreter, which runs them with whole sequences and again with such as are cut into segments or
    parts, every second pair with those, and the others with these.
    """
    pairs = list(itertools.product(first, second))
    n = max(len(first), len(second))
    some = [(list(first)[i % len(first)], list(second)[i % len(second)]) for i in range(n)]
    if cut and INTERPRETED:
        pairs = [(a, b) for (i, a), (j, b) in itertools.product(enumerate(first), enumerate(second))
                 if (i + j) % 2 == IS_CUT]
    return [
        pytest.param(where, first[a], second[b], id="-".join([*where, a, b]))
        for where in platforms() for a, b in (some if where[0] == "xla" else pairs)
    ]


def named(*values):
    return {str(x): x for x in values}


GATES = {
    "none": {},
    "gamma": {"gamma": 1},
    "gamma2": {"gamma": 2},
    "scalar": {"gate": "scalar"},
    "vector": {"gate": "vector"},
    "scalar+gamma": {"gate": "scalar", "gamma": 1},
    "vector+gamma2": {"gate": "vector", "gamma": 2},
}


def some_gates(*names):
    return {name: GATES[name] for name in names}


def usual(gates, **options):
    """A call with shared keys and a scale of its own; of one shape, for which XLA has one program."""
    sizes = dict(B=2, H=4, G=2)
    if INTERPRETED:
        # Where each head of each sequence has programs of its own.
        sizes = dict(B=2 if gates.get("gamma") == 2 else 1, H=2, G=1)
    return Case(**{**sizes, **gates, **options}, T=130, V=32, state=True, scale=-0.3)


@pytest.mark.parametrize(
    ("run_gla", "gates", "reverse"), crossed(GATES, {"forward": False, "reverse": True}, cut=True), indirect=["run_gla"]
)
def test_every_gate(run_gla, gates, reverse):
    usual(gates, reverse=reverse).check(run_gla)


FEW_HEADS = dict(H=1, G=1) if INTERPRETED else {}


@pytest.mark.parametrize("decay", ["zero", "weak", "strong", "infinite"])
@pytest.mark.parametrize("gates", [GATES["scalar"], GATES["vector"], GATES["vector+gamma2"]], ids=str)
def test_every_strength_of_decay(run_gla, gates, decay):
    usual(gates, decay=decay, **FEW_HEADS).check(run_gla)


# On XLA the state has no gradient then, whatever the gates are.
@pytest.mark.parametrize(("run_gla_in_two", "gates"), [
    pytest.param(where, GATES[name], id=f"{'-'.join(where)}-{name}")
    for where in platforms() for name in (("vector",) if where[0] == "xla" else ("gamma", "scalar", "vector"))
], indirect=["run_gla_in_two"])
def test_without_the_state(run_gla_in_two, gates):
    usual(gates, **FEW_HEADS).check(run_gla_in_two)


@pytest.mark.parametrize("gates", [GATES["gamma"], GATES["scalar"], GATES["vector"]], ids=str)
def test_the_same_bits_on_a_rerun(run_gla, gates):
    case = usual(gates)
    first = run_gla(case, True)
    for _ in range(20 if GPU else 2):
        for a, b in zip(first, run_gla(case, True), strict=True):
            assert a is b is None or np.array_equal(a, b)


# Some results are as small as the decay, so the relative error of that is all of theirs.
@pytest.mark.parametrize("case", [
    Case(gamma=1, seed=3697), Case(gate="scalar", seed=3697), Case(gate="vector", gamma=1, K=64, seed=160),
], ids=str)
def test_one_token_and_a_strong_decay(run_gla, case):
    dataclasses.replace(case, B=1, T=1, H=1, decay="strong", state=True).check(run_gla)


# What a token reads of itself, which no gate touches, must not leave its rounding in them.
@pytest.mark.parametrize("case", [
    Case(gate="vector", lengths=(3, 2), seed=2080), Case(gate="scalar", T=200, state=True),
    Case(gate="scalar", lengths=(130, 5, 70), state=True, reverse=True),
], ids=str)
def test_gradients_of_gates_that_are_next_to_nothing(run_gla, case):
    case = dataclasses.replace(case, B=1, H=1, K=64, V=64, gamma=1, decay="strong", dtype="bfloat16")
    case.check(run_gla)


# They decay nothing.
@pytest.mark.parametrize("gates", [GATES["scalar"], GATES["vector"]], ids=str)
def test_gates_of_single_tokens_without_a_state_have_no_gradient(run_gla, gates):
    Case(**gates, lengths=(1, 0, 1), B=1, H=1, K=64, V=64, dtype="bfloat16").check(run_gla)


@pytest.mark.parametrize(("platform", "framework"), platforms())
@pytest.mark.parametrize("case", [
    Case(gate="scalar", T=40, V=24, state=True), Case(gate="scalar", lengths=(20, 0, 9), V=24, B=1, state=True),
    Case(gamma=1, T=40, V=24, G=1), Case(gamma=1, T=40, V=24, state=True, reverse=True),
], ids=str)
def test_states_with_values_first(platform, framework, case):
    case.check(runner(platform, framework, values_first(gla if case.gate != "none" else lightning)))


@pytest.mark.parametrize(
    ("run_gla", "gates", "T"), crossed(some_gates("scalar", "vector"), named(*LENGTHS)), indirect=["run_gla"]
)
def test_every_length(run_gla, gates, T):
    Case(**gates, T=T, B=1, H=1 if INTERPRETED else 2, state=True).check(run_gla)


MANY = [
    Case(gamma=1, T=544, B=1, state=True), Case(gate="scalar", K=32, V=32, T=650 if INTERPRETED else 1100, H=1),
    Case(gate="vector", gamma=1, T=300, B=1, reverse=True),
    Case(gate="vector", K=32, V=32, T=544, B=1, H=1, decay="strong", state=True),
]


# On XLA all kinds of gates have the same groups, of 1024 tokens.
@pytest.mark.parametrize(("run_gla", "case"), [
    pytest.param(where, case, id=f"{'-'.join(where)}-{case}")
    for where in platforms() for case in MANY if where[0] != "xla" or case.gate != "vector"
], indirect=["run_gla"])
def test_more_chunks_than_a_group_has(run_gla, case):
    case.check(run_gla)


PACKINGS = named(((5,), False), ((0, 70, 1, 0, 64, 13), False), ((0, 70, 1, 0, 64, 13), True), ((0, 0, 4), False))


@pytest.mark.parametrize(
    ("run_gla", "gates", "packing"), crossed(some_gates("gamma", "scalar", "vector+gamma2"), PACKINGS, cut=True),
    indirect=["run_gla"],
)
def test_packed_sequences(run_gla, gates, packing):
    lengths, reverse = packing
    Case(**gates, lengths=lengths, B=1, state=True, reverse=reverse, decay="infinite").check(run_gla)


HEAD_DIMS = named(
    (16, 64), (96, 32), *tiled((64, 16), (48, 80)), *slow((128, 128), (192, 96), (256, 64), (64, 256))
)


@pytest.mark.parametrize(
    ("run_gla", "gates", "dims"), crossed(some_gates("gamma", "vector"), HEAD_DIMS), indirect=["run_gla"]
)
def test_every_head_dim(run_gla, gates, dims):
    Case(**gates, K=dims[0], V=dims[1], T=70, B=1, H=1, state=True).check(run_gla)


DTYPES = named(("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"))


@pytest.mark.parametrize(
    ("run_gla", "gates", "dtypes"), crossed(some_gates("gamma", "scalar", "vector"), DTYPES), indirect=["run_gla"]
)
def test_every_dtype(run_gla, gates, dtypes):
    Case(**gates, dtype=dtypes[0], gate_dtype=dtypes[1], T=150, B=1, state=True, K=32, V=32).check(run_gla)


# Which arrays have fewer heads than the recurrence, and how many: those of query, key, value and gates.
HEADS = {
    "value has more, as in Mamba-2": dict(H=4, HQ=1, G=1, HV=4),
    "each has its own number": dict(H=4, HQ=2, G=1, HV=4, HG=2, reverse=True),
    "gate per key head": dict(H=2, G=1, HG=1),
    "key and gate have most": dict(H=4, HQ=1, G=4, HV=2),
    "numbers that do not divide each other": dict(H=6, HQ=3, G=2, HV=6, HG=3),
}


# Every arrangement with every kind of gate, and one with the sums of two kinds.
OWN_HEADS = crossed(HEADS, some_gates("gamma", "scalar", "vector"), cut=True)
LAST = "numbers that do not divide each other"
OWN_HEADS += crossed({LAST: HEADS[LAST]}, some_gates("scalar+gamma", "vector+gamma2"))


@pytest.mark.parametrize(("run_gla", "heads", "gates"), OWN_HEADS, indirect=["run_gla"])
def test_every_array_has_heads_of_its_own(run_gla, heads, gates):
    Case(**gates, **heads, T=40, B=1 if INTERPRETED else 2, V=24, state=True).check(run_gla)


@pytest.mark.parametrize(
    ("run_gla", "gates", "packing"),
    crossed(some_gates("gamma", "scalar", "vector"), named(((70, 0, 13), "weak"), ((3, 2), "strong"))),
    indirect=["run_gla"],
)
def test_heads_of_its_own_packed_and_in_16_bits(run_gla, gates, packing):
    lengths, decay = packing
    heads = HEADS["each has its own number"]
    # A seed whose gates sum to more than -128, base 2: below, the interpreter takes what is never read for an error.
    Case(**gates, **heads, lengths=lengths, B=1, V=24, state=True, decay=decay, dtype="bfloat16", seed=2).check(run_gla)


def test_lightning_with_heads_of_its_own(run_lightning):
    Case(gamma=1, **HEADS["each has its own number"], K=64, V=64, T=135, state=True, dtype="bfloat16").check(
        run_lightning
    )


@pytest.mark.parametrize("dstate", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_lightning(run_lightning, state, dstate):
    Case(gamma=1, H=4, T=135, state=state, dstate=dstate).check(run_lightning)


@pytest.mark.parametrize("case", [
    Case(gamma=1, T=1), Case(gamma=1, lengths=(70, 0, 3), state=True, B=1), Case(gamma=1, reverse=True, G=1, T=90),
    Case(gamma=1, dtype="bfloat16", K=64, V=64, T=200), Case(gamma=1, dtype="float16", K=128, V=64, T=130, state=True),
    Case(gamma=1, dtype="bfloat16", K=64, V=128, H=4, G=2, T=65, reverse=True, decay="strong"),
    Case(gamma=1, decay="infinite", T=80),
], ids=str)
def test_lightning_options(run_lightning_in_chunks, case):
    case.check(run_lightning_in_chunks)


sizes = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "T": st.integers(1, 140),
        "K": st.sampled_from([16, 24, 64]),
        "V": st.sampled_from([16, 40, 64]),
        "gamma": st.integers(0, 2),
        "decay": st.sampled_from(["zero", "weak", "strong", "infinite"]),
        "state": st.booleans(),
        "reverse": st.booleans(),
        "seed": st.integers(0, 2**16),
    }
)


# Kernels of every example are compiled; on a GPU that is worth it only where the CPU's tests do not run them.
NEW_HERE = [pair for pair in platforms() if not GPU or pair[0] not in ("xla", "torch")]


@pytest.fixture(params=NEW_HERE, ids="-".join)
def run_new(request):
    return runner(*request.param, gla)


# In parts, which workers can share.
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@given(sizes=sizes, heads=st.sampled_from([(1, 1), (2, 1), (6, 3)]))
@settings(
    max_examples=10 if GPU else 2,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_shape(run_new, gate, sizes, heads):
    Case(H=heads[0], G=heads[1], gate=gate, **sizes).check(run_new)


# Of as many sequences and tokens: one program on XLA.
@given(ends=st.lists(st.integers(0, 150), min_size=4, max_size=4), seed=st.integers(0, 99))
@settings(
    max_examples=40 if GPU else 5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_packing(run_new, ends, seed):
    lengths = np.diff(np.sort([0, *ends, 150])).tolist()
    Case(lengths=tuple(lengths), B=1, gate="vector", state=True, seed=seed).check(run_new)


def part(case, tokens, state):
    """Some tokens of an unpacked case, from a state."""
    args, doutput, dstate = case.arrays
    cut = [None if x is None else x[:, tokens] for x in args[:4]]
    piece = dataclasses.replace(case)
    piece.__dict__["arrays"] = (contract.Args(*cut, args.g_gamma, state), doutput, dstate)
    return piece


@pytest.mark.parametrize(
    ("run_gla", "gates", "split"), crossed(some_gates("gamma", "vector"), named(1, 64, 101)), indirect=["run_gla"]
)
def test_prefix_and_rest_with_the_state_equal_the_whole(run_gla, gates, split):
    case = Case(**gates, B=1, T=130)
    first = run_gla(part(case, slice(0, split), None), False)
    second = run_gla(part(case, slice(split, None), first[1]), False)
    (truth, _), (in_dtype, _) = case.reference(), case.reference(np.float32)
    joined = [np.concatenate([first[0], second[0]], 1), second[1]]
    assert_within_rule(["output", "final_state"], joined, truth[:2], in_dtype[:2], ["float32"] * 2)


def test_nothing_leaks_between_packed_sequences(run_gla):
    lengths = (40, 30, 50)
    case = Case(gate="vector", B=1, lengths=lengths, state=True)
    args = case.arrays[0]
    clean = run_gla(case, False)
    for x in args[:3]:
        x[:, 40:70] = np.nan
    args.initial_state[1] = np.nan
    output, states = run_gla(case, False)
    for got, want in ((output[:, :40], clean[0][:, :40]), (output[:, 70:], clean[0][:, 70:]),
                      (states[[0, 2]], clean[1][[0, 2]])):
        np.testing.assert_array_equal(got, want)
    assert np.isnan(output[:, 40:70]).all()


def test_no_tokens(run_gla):
    case = Case(gate="vector", T=0, state=True)
    output, state, *grads = run_gla(case, True)
    assert output.shape == (2, 0, 2, 16)
    np.testing.assert_array_equal(state, case.arrays[0].initial_state)
    np.testing.assert_array_equal(grads[5], case.arrays[2])


@pytest.mark.parametrize("gates", [GATES["gamma"], GATES["scalar"], GATES["vector"]], ids=str)
def test_no_sequences(run_gla, gates):
    # Long ones would be cut into segments, and their gradients made in parts.
    case = Case(**gates, B=0, T=2100, state=True)
    for got, like in zip(run_gla(case, True), [*case.arrays[1:], *case.arrays[0]], strict=False):
        assert got is like is None or (got.shape == like.shape and not got.any())
