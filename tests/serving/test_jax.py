"""The serving functions under JAX's transformations: what becomes of the pool's memory, references, loops, lowering."""

import dataclasses
import functools
import importlib.util

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from keraunos import serving  # noqa: E402
from keraunos.kernels.linear_attention.reference import linear_attention  # noqa: E402
from tests.linear_attention.cases import GPU, INTERPRETED  # noqa: E402
from tests.numerics import assert_within_rule  # noqa: E402
from tests.serving.cases import Case, arguments, require, results, run_jax  # noqa: E402

TRITON = GPU and importlib.util.find_spec("jax_triton") is not None
pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="JAX takes no kernels that are interpreted"),
    pytest.mark.parametrize("platform", ["xla", "triton"] if TRITON else ["xla"]),
]

# The pool is much larger than all else.
SIZES = dict(slots=(7, -1, 60), size=64, K=32, V=32)
CASES = {
    "decode": Case(**SIZES),
    "verify": Case(op="verify", **SIZES),
    "commit": Case(op="commit", counts=(1, 3, 0), **SIZES),
    "prefill": Case(op="prefill", lengths=(30, 2, 5), fresh=(2,), tail=3, **SIZES),
}
DELTA = {f"{op}, delta": dataclasses.replace(case, delta=True, gate="scalar") for op, case in CASES.items()}
WRITING = [op for op in CASES if op != "verify"]


def given(case):
    return {name: None if x is None else jnp.asarray(x) for name, x in case.arrays.items()}


def call(op, platform, arrays):
    """``(output, pool)``."""
    args, gates = arguments(op, arrays)
    return results(op, arrays, getattr(serving, op)(*args, **gates, platform=platform))


def same(a, b):
    return all(x is y or np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("op", CASES)
def test_the_pool_is_given_up_where_it_changes(platform, op):
    arrays = given(CASES[op])
    states = arrays["states"]
    call(op, platform, arrays)
    assert states.is_deleted() == (op in WRITING)


def compiled(op, platform, arrays):
    """The call, compiled as part of a user's own jitted function, which gives the pool up."""

    def step(states, rest):
        output, pool = call(op, platform, rest | {"states": states})
        return output, pool

    rest = {name: x for name, x in arrays.items() if name != "states"}
    return jax.jit(step, donate_argnums=0).lower(arrays["states"], rest).compile(), rest


@pytest.mark.parametrize("name", [x for x in CASES | DELTA if "verify" not in x])
def test_the_pool_is_not_copied(platform, name):
    case = (CASES | DELTA)[name]
    op = case.op
    require(case, platform)
    arrays = given(case)
    want = call(op, platform, given(case))
    function, rest = compiled(op, platform, arrays)
    memory, pool = function.memory_analysis(), arrays["states"].nbytes
    assert memory.alias_size_in_bytes >= pool, "the pool that comes back is another one"
    assert memory.temp_size_in_bytes < pool / 2, f"{memory.temp_size_in_bytes} temporary bytes, pool {pool}"
    assert same(function(arrays["states"], rest), want)


@pytest.mark.parametrize("op", WRITING)
def test_the_pool_may_be_a_reference(platform, op):
    want = call(op, platform, given(CASES[op]))
    arrays = given(CASES[op])
    pool = jax.new_ref(arrays["states"])
    rest = {name: x for name, x in arrays.items() if name != "states"}

    @jax.jit
    def step(pool, rest):
        return call(op, platform, rest | {"states": pool})[0]

    function = step.lower(pool, rest).compile()
    memory = function.memory_analysis()
    assert memory.alias_size_in_bytes >= arrays["states"].nbytes
    assert memory.temp_size_in_bytes < arrays["states"].nbytes / 2
    output = step(pool, rest)
    assert same((output, pool[...]), want)
    eager = given(CASES[op])
    pool = jax.new_ref(eager["states"])
    output, returned = call(op, platform, eager | {"states": pool})
    assert returned is pool
    assert same((output, pool[...]), want)


def test_a_loop_of_steps_keeps_one_pool(platform):
    """Generation in one ``lax.scan``: each step's output is the next one's query."""
    case = Case(**SIZES)
    arrays = given(case)

    @functools.partial(jax.jit, donate_argnums=0)
    def generate(states, query, key, value, slots, gamma):
        def step(carry, _):
            states, query = carry
            output, states = serving.decode(query, key, value, states, slots, g_gamma=gamma, platform=platform)
            return (states, output), output

        (states, _), outputs = jax.lax.scan(step, (states, query), None, 5)
        return states, outputs

    args = [arrays[x] for x in ("states", "query", "key", "value", "slots", "g_gamma")]
    memory = generate.lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < args[0].nbytes / 2
    made, found = map(np.asarray, generate(*args))

    def expected(dtype):
        """The last states of the slots that are used, and all outputs."""
        a, outputs = case.arrays, np.zeros((5, *case.arrays["query"].shape), dtype)
        states = {n: a["states"][slot][None].astype(dtype) for n, slot in enumerate(case.slots) if slot >= 0}
        for n in states:
            query, key, value = (a[name][n][None, None] for name in ("query", "key", "value"))
            for i in range(5):
                query, states[n] = linear_attention(query, key, value, None, a["g_gamma"], states[n], dtype=dtype)
                outputs[i, n] = query[0, 0]
        return np.concatenate(list(states.values())), outputs

    used = [slot for slot in case.slots if slot >= 0]
    got = made[used], found
    assert_within_rule(("states", "outputs"), got, expected(np.float64), expected(np.float32), ["float32"] * 2)


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_layers_in_a_scan_share_one_pool(platform, op):
    """Each layer has its slots in one array, of which no copy is made."""
    layers, size = 3, CASES[op].size
    each = [given(dataclasses.replace(CASES[op], seed=seed)) for seed in range(layers)]
    moving = ("query", "key", "value", "g_gamma")
    stacked = {name: jnp.stack([x[name] for x in each]) for name in moving}
    rest = {name: x for name, x in each[0].items() if name not in (*moving, "states")}

    def one(pool, i, own, rest):
        slots = jnp.where(rest["slots"] < 0, -1, rest["slots"] + i * size)
        return call(op, platform, rest | own | {"states": pool, "slots": slots})

    @functools.partial(jax.jit, donate_argnums=0)
    def model(pool, stacked, rest):
        def layer(pool, xs):
            output, pool = one(pool, *xs, rest)
            return pool, output

        return jax.lax.scan(layer, pool, (jnp.arange(layers), stacked))

    pool = jnp.concatenate([x["states"] for x in each])
    function = model.lower(pool, stacked, rest).compile()
    memory = function.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < each[0]["states"].nbytes / 2
    got = function(pool, stacked, rest)

    def run(i):
        return lambda case: (np.asarray(got[1][i]), np.asarray(got[0][i * size :][:size]))

    for seed in range(layers):
        dataclasses.replace(CASES[op], seed=seed).check(run(seed))


@pytest.mark.skipif(GPU, reason="needs several devices")
@pytest.mark.parametrize("name", CASES | DELTA)
def test_heads_may_be_on_several_devices(platform, name):
    """Tensor parallelism: each device has its heads of the tokens and of the pool."""
    case = (CASES | DELTA)[name]
    op = case.op
    require(case, platform)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))

    def spec(name, x):
        if name == "g_gamma":
            return P("heads")
        if name == "states":
            return P(None, "heads")
        if name in ("g", "beta"):
            return P(*[None] * (x.ndim - 1), "heads")
        tokens = name in ("query", "key", "value")
        return P(*[None] * (x.ndim - 2), "heads") if tokens else P()

    def run(case):
        arrays = {name: x for name, x in given(case).items() if x is not None}
        specs = {name: spec(name, x) for name, x in arrays.items()}
        absent = dict.fromkeys(case.arrays.keys() - arrays.keys())
        outs = (None if op == "commit" else specs["value"], None if op == "verify" else specs["states"])

        def step(arrays):
            output, pool = call(op, platform, arrays | absent)
            return output, None if op == "verify" else pool

        output, pool = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=outs))(arrays)
        return None if output is None else np.asarray(output), np.asarray(arrays["states"] if pool is None else pool)

    case.check(run)


@pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")
@pytest.mark.parametrize("name", CASES | DELTA)
def test_triton_lowers_for_cuda_and_aliases_the_pool(platform, name, monkeypatch):
    from keraunos.kernels import kernel_registry
    from keraunos.kernels.state_pool.contract import Args
    from keraunos.ops import Config
    from tests.triton.lowering import build_each_once, on_hopper

    build_each_once(on_hopper(monkeypatch), monkeypatch)
    case = (CASES | DELTA)[name]
    op = case.op
    require(case, "triton")
    cfg = Config(block_q=64, block_d=32, num_warps=4, num_stages=2)
    # What the kernels of steps take in either layout.
    options = {"state_v_first": True} if case.delta and op != "prefill" else {}
    run = functools.partial(kernel_registry.get(op, "triton"), cfg=cfg, **options)
    arrays = given(case)
    args = Args(**{name: arrays[name] for name in Args._fields if name in arrays} | {"out": None})
    rest = {name: x for name, x in args._asdict().items() if name != "states"}
    given_up = (0,) if op in WRITING else ()
    step = jax.jit(lambda states, rest: run(*Args(states=states, **rest)), donate_argnums=given_up)
    traced = step.trace(args.states, rest)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call" in text
    assert ("output_operand_alias" in text) == (op in WRITING)


@pytest.mark.parametrize("boundaries", [False, True])
@pytest.mark.parametrize("name", CASES | DELTA)
def test_where_64_bits_are_the_default(platform, name, boundaries):
    """Numbers without a dtype of their own are float64 there; states are float32."""
    case = (CASES | DELTA)[name]
    require(case, platform)
    if boundaries:
        if case.op != "prefill":
            pytest.skip("only prefill has boundaries")
        case = dataclasses.replace(case, tokens=(11, 29), targets=(2, 3))
    with jax.enable_x64(True):
        case.check(functools.partial(run_jax, platform))


def test_a_pool_with_v_first_is_not_copied(platform):
    arrays = given(dataclasses.replace(DELTA["decode, delta"], V=64))
    arrays["states"] = jnp.swapaxes(arrays["states"], -1, -2)
    args, gates = arguments("decode", arrays)

    def step(states, slots):
        return serving.decode(*args[:3], states, slots, **gates, state_v_first=True, platform=platform)

    memory = jax.jit(step, donate_argnums=0).lower(*args[3:]).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= arrays["states"].nbytes
    assert memory.temp_size_in_bytes < arrays["states"].nbytes / 2
    with pytest.raises(TypeError, match="state_v_first is 1; expected True or False"):
        serving.decode(*args, **gates, state_v_first=1, platform=platform)
    with pytest.raises(ValueError, match=r"states has shape .*; expected \[slots, H, V, K\] with K = 32, like key"):
        serving.decode(*args[:3], jnp.swapaxes(args[3], -1, -2), args[4], **gates, state_v_first=True)


def test_errors(platform):
    arrays = given(CASES["decode"])
    args, gates = arguments("decode", arrays)
    with pytest.raises(TypeError, match="out is given; expected None, JAX returns new arrays"):
        serving.decode(*args, **gates, out=arrays["query"])
    with pytest.raises(TypeError, match=r"states is of type numpy.ndarray; expected an array of jax"):
        serving.decode(*args[:3], np.zeros((4, 4, 32, 32), np.float32), args[4], **gates)
