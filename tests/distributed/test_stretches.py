"""Stretches of a sequence, one after the other, leave the state of the whole, and its gradient."""

import dataclasses

import numpy as np
import pytest

from keraunos.kernels.linear_attention import stretches
from tests.linear_attention.cases import GPU, INTERPRETED, Case, platforms
from tests.numerics import assert_within_rule

FRAMEWORKS = sorted({framework for _, framework in platforms()})
# The interpreter's arithmetic warns of factors of closed gates, which a chunk that is halved does not use.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
# Several pieces and chunks, an empty stretch, and one token.
LENGTHS = (0, 1, 130, 0, 1200 if GPU else 130)


@pytest.fixture(autouse=True)
def pieces_of_a_chunk(monkeypatch):
    """On GPUs: so that there are some that gates forget, or do not."""
    if GPU or INTERPRETED:
        from keraunos.kernels.linear_attention.triton import call
        from keraunos.kernels.linear_attention.triton.stretches import call_of_stretch

        monkeypatch.setattr(call, "_MIN_PIECE", 64)
        call_of_stretch.cache_clear()
        yield
        call_of_stretch.cache_clear()
    else:
        yield


def to(framework, x):
    if x is None:
        return None
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    import torch

    x = torch.from_numpy(x.astype(np.float32)).bfloat16() if x.dtype.name == "bfloat16" else torch.from_numpy(x)
    return x.cuda() if GPU else x


def stack(framework, rows):
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.stack(rows)
    import torch

    return torch.stack(rows)


def after_all(framework, key, value, args, start, way, lengths=LENGTHS):
    """The state after all stretches."""
    rows, n, B = [], len(lengths), key.shape[0]
    for i, (begin, end) in enumerate(zip(np.cumsum([0, *lengths]), np.cumsum(lengths), strict=False)):
        place = i if way.right else n - 1 - i
        own = (x if x is None else np.ascontiguousarray(x[:, begin:end]) for x in (key, value, args.g))
        stretch = stretches.Stretch(*(to(framework, x) for x in (*own, args.g_gamma)))
        plan = to(framework, np.array([0, end - begin, place == 0, place], np.int32))
        rows.append(stretches.leave(stretch, to(framework, start), plan, way)[0])
        K, V, vector = key.shape[-1], value.shape[-1], args.g is not None and args.g.ndim == 4
        assert rows[-1].shape == (B * way.heads * (K * V + (K if vector else 1)),)
        if 0 < end - begin < 100 and stretches.is_for_gpu(stretch.key):
            twice = stretches.leave(stretch, to(framework, start), plan, way, copies=2)[0].reshape(2, -1)
            assert (twice == rows[-1]).all()
    plan, sizes = to(framework, np.array([0, 0, 0, n], np.int32)), (B, way.heads, key.shape[-1], value.shape[-1])
    state = stretches.arrive(stack(framework, rows), None, plan, way, sizes)
    return np.asarray(state.cpu() if hasattr(state, "cpu") else state)


GATES = [{"gamma": 1}, {"gate": "scalar", "gamma": 2}, {"gate": "vector"}, {"gate": "vector", "gamma": 1}]
HEADS = dict(H=4, HQ=2, G=1, HV=4, HG=2)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("reverse", "dtype"), [(False, "bfloat16"), (True, "float32")])
@pytest.mark.parametrize("gates", [*({"G": 1, **x} for x in GATES), HEADS | GATES[1], HEADS | GATES[2]], ids=str)
def test_a_state_and_its_gradient(framework, gates, reverse, dtype):
    case = Case(**gates, B=2 if GPU else 1, T=sum(LENGTHS), V=40, state=True, reverse=reverse, dtype=dtype,
                decay="weak" if reverse else "infinite")
    args, doutput, dstate = case.arrays
    way = stretches.Way(case.H, not reverse, False)
    state = after_all(framework, args.key, args.value, args, args.initial_state, way)
    back = way.adjoint._replace(scale=args.query.shape[-1] ** -0.5)
    dinitial = after_all(framework, args.query, doutput, args, dstate, back)
    (truth, _), (in_dtype, _) = case.reference(), case.reference(np.float32)
    assert_within_rule(["state", "dinitial"], [state, dinitial], [truth[1], truth[7]], [in_dtype[1], in_dtype[7]],
                       [dtype] * 2)


@pytest.mark.skipif(GPU or INTERPRETED, reason="Triton's kernels do not select")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_queries_without_a_gradient_leave_none(framework):
    case = Case(gate="scalar", B=1, G=1, T=sum(LENGTHS))
    args, doutput, dstate = case.arrays
    doutput[:, 100:] = 0
    back = stretches.Way(case.H, True, False).adjoint
    clean = after_all(framework, args.query, doutput, args, dstate, back)
    for bad in (np.nan, np.inf, 3e38):
        args.query[:, 100:] = bad
        np.testing.assert_array_equal(after_all(framework, args.query, doutput, args, dstate, back), clean)


# The gradient of the state is as small as the decays, so the relative error of these is all of its.
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", [
    Case(gamma=1, seed=703), Case(gate="scalar", seed=1182), Case(gate="vector", gamma=1, seed=1182),
], ids=str)
def test_strong_decays(framework, case):
    case = dataclasses.replace(case, B=1, T=2, H=1, decay="strong", state=True)
    args, doutput, dstate = case.arrays
    args.query[:, 0] = 0.0
    way = stretches.Way(1, False, True, args.query.shape[-1] ** -0.5)
    dinitial = after_all(framework, args.query, doutput, args, dstate, way, (1, 1))
    (truth, _), (in_dtype, _) = case.reference(), case.reference(np.float32)
    assert_within_rule(["dinitial"], [dinitial], [truth[7]], [in_dtype[7]], ["float32"])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_only_some_tokens_count_and_what_is_before_a_beginning_does_not(framework):
    case = Case(gate="vector", T=90, state=True)
    args = case.arrays[0]
    inner = case.arrays[0]._replace(query=args.query[:, 20:70], key=args.key[:, 20:70], value=args.value[:, 20:70])
    inner = inner._replace(g=args.g[:, 20:70])
    part = Case(gate="vector", T=50, state=True)
    part.__dict__["arrays"] = (inner, case.arrays[1][:, 20:70], case.arrays[2])
    for x in (args.key, args.value):
        x[:, :20] = x[:, 70:] = np.nan
    way, plan = stretches.Way(2, True, False), to(framework, np.array([20, 70, 1, 0], np.int32))
    stretch = stretches.Stretch(*(to(framework, x) for x in (args.key, args.value, args.g)), None)
    (left,) = stretches.leave(stretch, to(framework, args.initial_state), plan, way)
    before = left * 0 + float("nan")
    plan = to(framework, np.array([0, 0, 0, 2], np.int32))
    state = stretches.arrive(stack(framework, [before, left]), None, plan, way, (2, 2, 16, 16))
    got = np.asarray(state.cpu() if hasattr(state, "cpu") else state)
    assert_within_rule(["state"], [got], [part.reference()[0][1]], [part.reference(np.float32)[0][1]], ["float32"])


@pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs the Triton kernels")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("gates", "right"), [({"gamma": 1}, True), ({"gamma": 1}, False), ({"gate": "vector"}, False)])
def test_segments_start_from_what_all_before_them_leave(framework, gates, right):
    B = 2 if GPU or right else 1
    case, segment = Case(**gates, B=B, T=600, G=1, V=40, state=True, reverse=not right, decay="weak"), 128
    args, way, made = case.arrays[0], stretches.Way(2, right, False), []
    for begin in (0, 300):
        own = (x if x is None else np.ascontiguousarray(x[:, begin : begin + 300]) for x in (*args[1:3], args.g))
        place = begin // 300 if right else 1 - begin // 300
        plan = to(framework, np.array([0, 300, place == 0, place], np.int32))
        stretch = stretches.Stretch(*(to(framework, x) for x in (*own, args.g_gamma)))
        start = to(framework, args.initial_state)
        made.append((stretches.leave(stretch, start, plan, way, segment=segment), start, plan))
    left = stack(framework, [pieces[0] for pieces, _, _ in made])
    for shard, ((_, *pieces), start, plan) in enumerate(made):
        state = stretches.arrive(left, start, plan, way, (B, 2, 16, 40), pieces, segment)
        got = np.asarray(state.cpu() if hasattr(state, "cpu") else state).reshape(B, 3, 2, 16, 40)
        for i in range(3):
            begin, end = 300 * shard + segment * i, 300 * shard + min(segment * (i + 1), 300)
            before = slice(0, begin) if right else slice(end, 600)
            if before.start < before.stop:
                cut = args._replace(**{name: getattr(args, name)[:, before] for name in ("query", "key", "value")})
                part = dataclasses.replace(case, T=before.stop - before.start)
                cut = cut._replace(g=None if args.g is None else args.g[:, before])
                part.__dict__["arrays"] = (cut, case.arrays[1][:, before], case.arrays[2])
                assert_within_rule(["start"], [got[:, i]], [part.reference()[0][1]],
                                   [part.reference(np.float32)[0][1]], ["float32"])
