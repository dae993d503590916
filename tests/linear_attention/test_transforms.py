"""The operations under JAX's transformations give what they give without."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import keraunos
from keraunos.kernels import kernel_registry
from keraunos.kernels.linear_attention import contract, xla
from keraunos.kernels.recurrent.xla import VectorDecay
from tests.linear_attention.cases import GPU, Case, run_jax
from tests.numerics import assert_within_rule

# Two chunks, which are as long on all kinds of devices: others would be traced for each.
B, T, H, K = 2, 48, 8, 16
PLATFORMS = ["xla"] + (["triton"] if GPU else [])


@pytest.fixture(params=PLATFORMS)
def gla(request):
    return functools.partial(keraunos.gla_attention, return_state=True, platform=request.param)


@pytest.fixture(params=PLATFORMS)
def lightning(request):
    return functools.partial(keraunos.lightning_attention, return_state=True, platform=request.param)


def arrays(gate="vector", **options):
    case = Case(B=B, T=T, H=H, K=K, V=K, gate=gate, gamma=1, state=True, **options)
    return [jnp.asarray(x) for x in case.arrays[0] if x is not None]


def close(got, want):
    """Equal up to twice the difference that float32 makes: another order of summation, not another result."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_within_rule(["result"], [a], [b], [b], ["float32"], [np.abs(b) + np.abs(b).max()])


def test_jit_compiles_once_and_equals_eager(gla):
    traced = []

    @jax.jit
    def f(*x):
        traced.append(1)
        return gla(*x)

    x = arrays()
    close(f(*x), gla(*x))
    f(*arrays(seed=1))
    assert len(traced) == 1


def test_grad_and_checkpoint(gla):
    def loss(*x):
        output, state = gla(*x)
        return (output**2).sum() + (state**2).sum()

    # JAX sees one call, whatever is inside of it.
    x = arrays("scalar")
    plain = jax.grad(loss, argnums=range(6))(*x)
    close(jax.grad(jax.checkpoint(loss), argnums=range(6))(*x), plain)
    close(jax.jit(jax.grad(loss, argnums=range(6)))(*x), plain)


@pytest.mark.parametrize(("axis", "gate"), [(0, "vector"), (2, "scalar")])
def test_vmap_equals_a_loop(gla, axis, gate):
    pairs = zip(arrays(gate), arrays(gate, seed=1), strict=True)
    x = [jnp.stack([a, b], axis if a.ndim > axis else 0) for a, b in pairs]
    axes = [axis if a.ndim > axis + 1 else 0 for a in x]

    def grads(*x):
        return jax.grad(lambda *x: (gla(*x)[0] ** 2).sum(), argnums=range(6))(*x)

    for f in (gla, grads):
        mapped = jax.vmap(f, axes)(*x)
        for n, seed in enumerate((0, 1)):
            close(jax.tree.map(lambda y, n=n: y[n], mapped), f(*arrays(gate, seed=seed)))


def test_vmap_over_one_argument_only(gla):
    q, *rest = arrays()
    mapped = jax.vmap(lambda q: gla(q, *rest))(jnp.stack([q, 2 * q]))
    close(jax.tree.map(lambda y: y[1], mapped), gla(2 * q, *rest))


def test_scan_over_layers_with_a_traced_layer(lightning):
    q, k, v = arrays()[:3]
    layers = 4

    def layer(x, i):
        return x + lightning(x, k, v, layer_idx=i, num_layers=layers)[0], None

    def scanned(q):
        return jax.lax.scan(layer, q, jnp.arange(layers))[0]

    def unrolled(q):
        for i in range(layers):
            q = q + lightning(q, k, v, layer_idx=i, num_layers=layers)[0]
        return q

    close(jax.jit(scanned)(q), unrolled(q))
    close(jax.grad(lambda q: scanned(q).sum())(q), jax.grad(lambda q: unrolled(q).sum())(q))


def test_traced_cu_seqlens_do_not_recompile(gla):
    q, k, v, g, _, state = (x[:1] for x in arrays())
    traced = []

    @jax.jit
    def f(cu):
        traced.append(1)
        return gla(q, k, v, g, None, jnp.concatenate([state, state]), cu)

    for split in (0, 3, 32, T):
        close(f(jnp.array([0, split, T])), gla(q, k, v, g, None, jnp.concatenate([state, state]),
                                               jnp.array([0, split, T])))
    assert len(traced) == 1


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices: the CPU run forces 8 host devices")
def test_shard_map_over_batch_and_heads(gla):
    mesh = jax.make_mesh((2, 4), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = arrays()
    specs = (*[P("batch", None, "heads")] * 4, P("heads"), P("batch", "heads"))
    outputs = (P("batch", None, "heads"), P("batch", "heads"))
    sharded = jax.shard_map(gla, mesh=mesh, in_specs=specs, out_specs=outputs)
    close(jax.jit(sharded)(*x), gla(*x))

    def loss(f):
        return lambda *x: sum((y**2).sum() for y in f(*x))

    close(jax.jit(jax.grad(loss(sharded), range(6)))(*x), jax.grad(loss(gla), range(6))(*x))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices: the CPU run forces 8 host devices")
def test_named_sharding_is_kept_and_gathers_nothing():
    mesh = jax.make_mesh((2, 4), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = [jax.device_put(x, NamedSharding(mesh, P("batch", None, "heads"))) for x in arrays()[:4]]
    f = jax.jit(lambda *x: keraunos.gla_attention(*x, platform="xla"))
    compiled = f.lower(*put).compile()
    assert "all-gather" not in compiled.as_text()
    output = f(*put)
    assert output.sharding.is_equivalent_to(put[0].sharding, 4)
    close(output, keraunos.gla_attention(*arrays()[:4], platform="xla"))


def test_gradient_reaches_log_decay(lightning):
    q, k, v = arrays()[:3]
    log_decay = -jnp.linspace(0.1, 1, H)
    got = jax.grad(lambda d: (lightning(q, k, v, log_decay=d)[0] ** 2).sum())(log_decay)
    want = jax.grad(lambda d: (keraunos.gla_attention(q, k, v, None, d, platform="xla") ** 2).sum())(log_decay)
    close(got, want)
    assert np.all(np.asarray(got))


def test_float64():
    with jax.enable_x64(True):
        case = Case(gate="vector", gamma=1, state=True, dtype="float64", gate_dtype="float64", T=90)
        args = [None if x is None else jnp.asarray(x) for x in case.arrays[0]]
        got = keraunos.gla_attention(*args, return_state=True, platform="xla")
        assert {x.dtype for x in got} == {jnp.dtype("float64")}
        truth, in_dtype = (case.reference(dtype)[0][:2] for dtype in (np.longdouble, np.float64))
        assert_within_rule(("output", "final_state"), got, truth, in_dtype, ("float64", "float64"))


# Of batching alone, whatever the device; what XLA compiles for them would take it minutes on a GPU.
of_batching = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")


def folded():
    """The XLA platform as if it had no batching rules, so that calls under vmap become one with a larger batch."""
    return contract.kernels(
        "xla",
        xla.__file__,
        xla.forward,
        xla.backward,
        fields=xla.FIELDS,
        heuristic=xla.heuristic,
        candidates=xla.candidates,
    )


GATED = Case(gate="vector", gamma=1, state=True, T=40)
PACKED = Case(gate="vector", lengths=(3, 0, 20), state=True, B=1)


@of_batching
@pytest.mark.parametrize(("case", "mapped"), [
    (GATED, "all"), (dataclasses.replace(GATED, gate="scalar"), "twice"),
    (dataclasses.replace(PACKED, gate="scalar"), "some"), (PACKED, "twice"),
    (Case(gate="scalar", gamma=2, G=1, reverse=True, T=40), "all"),
    (Case(gate="scalar", gamma=2, H=4, HQ=1, G=2, HV=4, HG=2, T=40, state=True), "all"),
    (Case(gamma=1, lengths=(9, 14), B=1), "twice"), (Case(V=8, T=40), "some"),
], ids=str)
def test_folding_into_the_batch_is_right(case, mapped):
    call = functools.partial(folded()[0], reverse=case.reverse, cfg=keraunos.Config(block_q=16, platform="xla"))

    def results(arrays, doutput, dstate):
        def outputs(floats):
            args = contract.Args(*floats, arrays[6])
            return call(*args[:5], initial_state=args.initial_state, cu_seqlens=args.cu_seqlens)

        found, pull = jax.vjp(outputs, arrays[:6])
        return found, pull((doutput, dstate))[0]

    # Other values in every call, and other lengths; or query and value alone, and the others shared.
    cases = [dataclasses.replace(case, seed=seed, lengths=case.lengths and case.lengths[:: 1 - 2 * (seed % 2)])
             for seed in range(4)]
    shared = range(7) if mapped == "some" else ()
    for one in cases:
        args = [cases[0].arrays[0][i] if i in shared and i not in (0, 2) else x for i, x in enumerate(one.arrays[0])]
        one.__dict__["arrays"] = (contract.Args(*args), *one.arrays[1:])
    axes = [None if x is None or (i in shared and i not in (0, 2)) else 0 for i, x in enumerate(args)]
    rows = zip(*(one.arrays[0] for one in cases), strict=True)
    stacked = tuple(jnp.stack(x) if axis == 0 else x[0] for x, axis in zip(rows, axes, strict=True))
    grads = [jnp.stack(x) for x in zip(*(one.arrays[1:] for one in cases), strict=True)]
    if mapped == "twice":
        pairs = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), (stacked, *grads))
        got = jax.vmap(jax.vmap(results, (tuple(axes), 0, 0)), (tuple(axes), 0, 0))(*pairs)
        got = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), got)
    else:
        got = jax.jit(jax.vmap(results, (tuple(axes), 0, 0)))(stacked, *grads)
    for n, one in enumerate(cases):
        outputs, gradients = jax.tree.map(lambda x, n=n: np.asarray(x[n]), got)
        one.check(lambda case, _, found=(*outputs, *gradients): found)


@of_batching
def test_shared_arguments_get_the_sum_of_the_gradients():
    call = folded()[0]
    q, k, v, g, gamma, state = map(jnp.asarray, Case(T=20, gate="scalar", gamma=1, state=True).arrays[0][:6])

    def loss(q, k, gamma, call):
        return (call(q, k, v, g, gamma, initial_state=state)[0] ** 2).sum()

    def mapped(call):
        return lambda q, k, gamma: jax.vmap(lambda q: loss(q, k, gamma, call))(jnp.stack([q, 2 * q, -q])).sum()

    native = kernel_registry.get("gla", "xla")
    close(jax.grad(mapped(call), (0, 1, 2))(q, k, gamma), jax.grad(mapped(native), (0, 1, 2))(q, k, gamma))


def on_one_device(f):
    """The function where it is known that no array is shared out: else rows with strong gates are not gathered."""
    mesh = jax.make_mesh((1,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())


def rows_computed(monkeypatch, *arrays, mapped=False):
    """How many rows are computed in the way for strong gates, in each chunk where any is."""
    counts, made = [], VectorDecay.__init__

    def counted(self, walker, a):
        jax.debug.callback(lambda: counts.append(a.shape[0] * a.shape[1]))
        made(self, walker, a)

    # Implementations of its own, which have traced nothing yet.
    kernels = contract.kernels(
        "xla", xla.__file__, xla.forward, xla.backward, fields=xla.FIELDS, heuristic=xla.heuristic,
        candidates=xla.candidates, has_vmap=True,
    )
    call = on_one_device(functools.partial(kernels[0], cfg=keraunos.Config(block_q=32, platform="xla")))
    with monkeypatch.context() as patch:
        patch.setattr(VectorDecay, "__init__", counted)
        jax.block_until_ready(jax.jit(jax.vmap(call) if mapped else call)(*arrays))
        jax.effects_barrier()
    return counts


def strong_in_one_head(dtype):
    """Arguments of many rows with mild gates; and with strong ones in a few tokens of one head of one sequence."""
    case = Case(B=3, T=60, H=8, K=16, V=16, gate="vector", dtype=dtype, G=4)
    q, k, v, g = map(jnp.asarray, case.arrays[0][:4])
    return (q, k, v, g), (q, k, v, g.at[1, 40:43, 5].set(-50.0).at[1, 50, 5].set(-jnp.inf))


@of_batching
def test_only_rows_with_strong_gates_are_computed_in_the_way_for_them(monkeypatch):
    mild, strong = strong_in_one_head("float32")
    assert not rows_computed(monkeypatch, *mild)
    # One of the two chunks has some.
    assert rows_computed(monkeypatch, *strong) == [8]
    pairs = [jnp.stack(x) for x in zip(mild, mild, strict=True)]
    assert not rows_computed(monkeypatch, *pairs, mapped=True)
    several = [jnp.stack(x) for x in zip(mild, strong, mild, strong, strong, strict=True)]
    assert rows_computed(monkeypatch, *several, mapped=True) == [8]


@of_batching
@pytest.mark.parametrize(("place", "dtype"), [(on_one_device, "bfloat16"), (lambda f: f, "float32")],
                         ids=["one device", "any"])
def test_strong_gates_of_a_head_leave_the_bits_of_the_others(gla, dtype, place):
    def results(q, k, v, g):
        output, pull = jax.vjp(lambda *x: gla(*x)[0], q, k, v, g)
        return output, *pull(output)

    results, pair = jax.jit(place(results)), strong_in_one_head(dtype)
    for usual, other in zip(*(results(*x) for x in pair), strict=True):
        # What key heads 4 and 5 share is of head 2 there.
        usual, other = (
            np.delete(np.asarray(x).astype(np.float32), 5 * x.shape[2] // 8, axis=2) for x in (usual, other)
        )
        assert usual.tobytes() == other.tobytes()


def by_tokens(q, k, v, g, gamma=None):
    """Token by token, with gates per dimension or per token."""
    g = g if g.ndim == 4 else g[..., None]
    g = g if gamma is None else g + gamma[:, None]

    def step(state, x):
        q, k, v, g = x
        state = jnp.exp(g)[..., None] * state + k[..., None] * v[..., None, :]
        return state, (state * q[..., None]).sum(-2) * 0.5

    xs = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g)]
    state = jnp.zeros((*q.shape[::2], 4, 4), q.dtype)
    return jnp.moveaxis(jax.lax.scan(step, state, xs)[1], 0, 1)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def small(decay="weak", gate="vector", T=3):
    """Float64, in which sums of squares of gradients are as near as float32 asks for."""
    case = Case(B=1, T=T, H=1, K=4, V=4, gate=gate, gamma=1, decay=decay, dtype="float64", gate_dtype="float64")
    return [jnp.asarray(x) for x in case.arrays[0][:5]]


@of_batching
def test_second_derivatives(gla, x64):
    """Second derivatives of the operation are those of a pass token by token."""

    def second(f):
        def size(*x):
            return sum(((y + 1) ** 2).sum() for y in jax.grad(lambda *x: (f(*x) ** 2).sum(), range(4))(*x))

        return jax.jit(jax.grad(size, range(4)))

    got, want = second(lambda *x: gla(*x)[0]), second(by_tokens)
    for decay in ("weak", "strong"):
        q, k, value, g = small(decay, T=5)[:4]
        # With values of 0 the output's gradient is 0, whose own gradient is not.
        for v in (value, 0 * value):
            close(got(q, k, v, g), want(q, k, v, g))


MODES = {
    "hessian": jax.hessian, "jacfwd(grad)": lambda f, n: jax.jacfwd(jax.grad(f, n), n),
    "jacrev(jacrev)": lambda f, n: jax.jacrev(jax.jacrev(f, n), n),
}


@of_batching
@pytest.mark.parametrize(("mode", "call", "gate"), [
    ("hessian", "gla", "vector"), ("jacfwd(grad)", "lightning", "scalar"), ("jacrev(jacrev)", "gla", "scalar"),
])
def test_second_derivatives_in_every_mode(x64, mode, call, gate):
    q, k, _, g, gamma = small(gate=gate)

    def ours(q, g, gamma):
        if call == "lightning":
            return keraunos.lightning_attention(q, k, q, log_decay=gamma)
        return keraunos.gla_attention(q, k, q, g, gamma)

    def loop(q, g, gamma):
        return by_tokens(q, k, q, g * (call == "gla"), gamma)

    def second(f):
        return jax.jit(MODES[mode](lambda *x: (f(*x) ** 2).sum(), (0, 1, 2)))(q, g, gamma)

    close(second(ours), second(loop))


@of_batching
@pytest.mark.parametrize(("gate", "mapped", "anywhere"), [
    ("vector", "q", False), ("vector", "k g", True),
])
def test_derivatives_of_gradients_of_which_some_arguments_are_mapped(x64, gate, mapped, anywhere, monkeypatch):
    if anywhere:
        # As where arrays lie on several devices.
        monkeypatch.setattr(xla.frontend, "is_local", lambda: False)
    axes = [0 if name in mapped.split() else None for name in ("q", "k", "v", "g", "gamma")]
    args = [x if axis is None else jnp.stack([x, x / 2]) for x, axis in zip(small(gate=gate), axes, strict=True)]

    def second(f):
        def size(*x):
            each = jax.vmap(jax.grad(lambda *x: (f(*x) ** 2).sum(), range(5)), axes)(*x)
            return sum((y**2).sum() for y in each)

        return jax.jit(jax.grad(size, range(5)))(*args)

    close(second(lambda *x: kernel_registry.get("gla", "xla")(*x)[0]), second(by_tokens))


@of_batching
def test_kernels_say_that_they_have_no_second_derivatives():
    q = small()[0]

    def loss(q):
        return (folded()[0](q, q, q)[0] ** 2).sum()

    for second in (jax.hessian(loss), jax.grad(lambda q: jax.grad(loss)(q).sum())):
        with pytest.raises(NotImplementedError, match=r"^gla_attention: platform 'xla' has no second derivatives"):
            second(q)


@of_batching
@pytest.mark.parametrize("name", ["gla_attention", "lightning_attention", "attention"])
def test_forward_mode_says_what_there_is(name):
    options = {"lightning_attention": dict(log_decay=[-0.5]),
               "attention": dict(dtype=None, cfg=keraunos.AttentionConfig(block_q=16, block_k=16))}
    q = jnp.ones((1, 20, 1, 4))
    with pytest.raises(TypeError, match=f"^{name}: has no forward-mode derivative; expected a gradient first"):
        jax.jvp(lambda q: getattr(keraunos, name)(q, q, q, **options.get(name, {})), (q,), (q,))


def as_on_a_tpu(monkeypatch):
    """Give products of float32 numbers the digits that they have on a TPU."""
    einsum, bfloat16 = jnp.einsum, functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)

    def product(equation, a, b, precision=None):
        exact = functools.partial(einsum, equation, precision=jax.lax.Precision.HIGHEST)
        if precision == jax.lax.Precision.HIGHEST or a.dtype == jnp.float64:
            return exact(a, b)
        high = bfloat16(a), bfloat16(b)
        low = bfloat16(a - high[0]), bfloat16(b - high[1])
        once = exact(*high)
        if precision == jax.lax.Precision.HIGH:
            return once + exact(high[0], low[1]) + exact(low[0], high[1])
        return once

    monkeypatch.setattr(jnp, "einsum", product)


DIGITS = [
    Case(gate="vector", T=70, H=1),
    Case(gate="scalar", gamma=1, T=70, H=1),
    Case(gate="vector", T=70, H=1, decay="infinite"),
    Case(gate="vector", T=70, H=1, seed=4),
]
# Products of float32 keep all digits there, too, which a case of each kind of gates shows.
DIGITS_OF = [("bfloat16", case) for case in DIGITS]
DIGITS_OF += [("float16", DIGITS[-1]), ("float32", DIGITS[0]), ("float32", DIGITS[1])]


@functools.cache
def with_digits_of_a_tpu(block_q):
    """Traced where products have these digits only: calls of the same shapes share a program."""
    fn = functools.partial(folded()[0], cfg=keraunos.Config(block_q=block_q, platform="xla"))
    return jax.jit(on_one_device(lambda *floats: fn(*floats[:5], initial_state=floats[5])))


@of_batching
@pytest.mark.parametrize(("dtype", "case"), DIGITS_OF, ids=str)
def test_the_digits_of_a_tpu_are_enough(monkeypatch, dtype, case):
    as_on_a_tpu(monkeypatch)
    # With few tokens per chunk gates may be strong that count as mild.
    call = with_digits_of_a_tpu(8 if case.seed else 32)
    case = dataclasses.replace(case, dtype=dtype, state=True, K=32, V=32)
    if case.seed:
        args, doutput, dstate = case.arrays
        case.__dict__["arrays"] = args._replace(g=np.maximum(args.g - 3.4, -3.9)), doutput, dstate
    case.check(functools.partial(run_jax, "xla", lambda args, case, platform: call(*args[:6])))


@of_batching
@pytest.mark.parametrize("case", [
    Case(gate="vector", gamma=1, T=192, H=4, G=2, state=True), Case(gamma=2, T=256, state=True, reverse=True),
    Case(gate="scalar", T=1200, H=1, reverse=True),
], ids=str)
def test_several_chunks_at_once(case):
    """As on GPUs and TPUs: less than one group of chunks, a whole one, more, and rows with strong gates."""
    fn = functools.partial(keraunos.gla_attention, reverse=case.reverse, return_state=True,
                           cfg=keraunos.Config(block_q=64, platform="xla"))
    call = jax.jit(lambda *floats: fn(*floats[:5], initial_state=floats[5]))
    for decay in ("weak", "infinite") if case.gate == "vector" else ("weak",):
        one = dataclasses.replace(case, decay=decay)
        one.check(functools.partial(run_jax, "xla", lambda args, case, platform: call(*args[:6])))


def chunk_lengths(text):
    """How many tokens the chunks of a program have, by its matrices of pairs of tokens."""
    return {int(n) for n in re.findall(r"tensor<\d+x1x(\d+)x\1xf32>", text)} - {1}


@of_batching
def test_chunks_are_those_of_the_device_that_a_program_is_lowered_for():
    q, v, g = jnp.ones((2, 512, 1, 8)), jnp.ones((2, 512, 1, 4)), -jnp.ones((2, 512, 1))

    def loss(q, g, **options):
        return (keraunos.gla_attention(q, q, v, g, platform="xla", **options) ** 2).sum()

    # Forward and backward.
    f = jax.grad(loss)
    traced = jax.jit(f).trace(q, g)
    for platform, tokens in (("cpu", 32), ("cuda", 128), ("tpu", 128)):
        assert chunk_lengths(traced.lower(lowering_platforms=(platform,)).as_text()) == {tokens}
    several = jax.export.export(jax.jit(f), platforms=["cpu", "tpu"])(q, g)
    assert chunk_lengths(several.mlir_module()) == {32, 128}
    close(several.call(q, g), f(q, g))
    # What is asked for is taken everywhere.
    chosen = jax.jit(functools.partial(f, cfg=keraunos.Config(block_q=16))).trace(q, g)
    assert chunk_lengths(chosen.lower(lowering_platforms=("tpu",)).as_text()) == {16}


@of_batching
@pytest.mark.parametrize(("tokens", "kinds"), [(40, 1), (70, 2), (130, 2)])
def test_devices_whose_chunks_are_as_long_share_a_program(tokens, kinds):
    def writes(**options):
        traced = jax.make_jaxpr(lambda x: keraunos.gla_attention(x, x, x, platform="xla", **options))
        return len(re.findall(r"= dynamic_update_slice\b", str(traced(jnp.ones((1, tokens, 1, 8))))))

    assert writes() == kinds * writes(cfg=keraunos.Config(block_q=16)) > 0


@of_batching
@pytest.mark.parametrize("case", [
    Case(gate="vector", gamma=1, state=True, decay="infinite"), Case(gamma=2, G=1, reverse=True),
    Case(gate="scalar", B=1, lengths=(1, 0, 1), state=True),
], ids=str)
def test_one_exported_program_for_all_batches_and_lengths(case):
    """Of packed calls for all lengths together."""
    made = []

    def export(args):
        b, t = jax.export.symbolic_shape("b, t")
        b = 1 if case.lengths else b
        sizes = dict(query=(b, t), key=(b, t), value=(b, t), g=(b, t), initial_state=() if case.lengths else (b,))
        sizes |= dict(cu_seqlens=(), g_gamma=(b,) if case.gamma == 2 else ())
        specs = {name: jax.ShapeDtypeStruct((*sizes[name], *x.shape[len(sizes[name]):]), x.dtype)
                 for name, x in args._asdict().items() if x is not None}
        # Gates per dimension with one kind of chunks, as those of other devices are longer only.
        cfg = keraunos.Config(block_q=32, platform="xla") if case.gate == "vector" else None
        call = functools.partial(
            keraunos.gla_attention, reverse=case.reverse, return_state=True, platform="xla", cfg=cfg
        )
        return jax.export.export(jax.jit(lambda x: call(**x)))(specs).serialize(vjp_order=1)

    def function(args, case, platform):
        args = contract.Args(*args)
        if not made:
            made.append(jax.export.deserialize(export(args)))
        return made[0].call({name: x for name, x in args._asdict().items() if x is not None})

    for size in (dict(T=1, B=1), dict(T=33), dict(T=600, B=3))[:: 2 if case.gate == "vector" else 1]:
        # More sequences than a group of chunks has room for.
        lengths = case.lengths and (size["T"], 0, 5, *[1] * 37)
        one = dataclasses.replace(case, **size, lengths=lengths)
        one.check(functools.partial(run_jax, "xla", function))
