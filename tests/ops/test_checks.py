"""Values that cannot be right raise in every call where they are known on the host, and are not read elsewhere."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keraunos
from keraunos import distributed, frontends, serving
from keraunos.kernels import kernel_registry
from keraunos.kernels.linear_attention import contract

T, H, K, N = 30, 4, 8, 3
FRAMEWORKS = ["jax", "torch"]
POSITIVE = [-0.25, -0.06, 0.016, -0.004]


@pytest.fixture(params=FRAMEWORKS)
def array(request):
    """Makes a framework's array on the CPU."""
    pytest.importorskip(request.param)
    measure = frontends.get(f"{request.param}.measure")
    return lambda x, dtype="float32": measure.array(np.asarray(x), dtype, "cpu")


def ones(array, *lead):
    return [array(np.ones((*lead, H, K))) for _ in range(3)]


def test_decays_of_heads_and_of_layers(array):
    q = ones(array, 1, T)
    for name, run in (
        ("log_decay", keraunos.lightning_attention),
        ("g_gamma", keraunos.gla_attention),
        ("log_decay", kernel_registry.get("lightning_attn", "xla" if isinstance(q[0], jax.Array) else "torch")),
    ):
        # Calls that are alike are remembered: the second is checked, too.
        for wrong in (POSITIVE, array(POSITIVE), np.array(POSITIVE)):
            run(*q, **{name: array([-1.0, -2.0, 0.0, -np.inf])})
            with pytest.raises(
                ValueError, match=rf"_attention: {name} has a value 0.016.* at \[2\]; expected <= 0, it is"
            ):
                run(*q, **{name: wrong})
        q2 = ones(array, 2, T)
        with pytest.raises(ValueError, match=rf"{name} has a value nan at \[1, 3\]; expected <= 0"):
            run(*q2, **{name: array([[0.0] * 4, [-1.0, -1.0, -1.0, np.nan]])})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("wrong", [0.5, np.nan, np.inf, -np.nan, 1e-7])
def test_gates_of_every_dtype(array, dtype, wrong):
    with jax.enable_x64(True):
        q, gate = ones(array, 1, T), np.zeros((1, T, H))
        gate[0, 1], gate[0, 2], gate[0, 3] = -np.inf, -0.0, -1e-30
        keraunos.gla_attention(*q, array(gate, dtype))
        gate[0, 7, 3] = wrong
        with pytest.raises(ValueError, match=r"^gla_attention: g has a value .* at \[0, 7, 3\]; expected <= 0"):
            keraunos.gla_attention(*q, array(gate, dtype))


@pytest.mark.parametrize(("offsets", "value", "at"), [
    ([0, 10, 50], 50, 2), ([0, 10, 5, 30], 5, 2), ([10, 20], 10, 0), ([0, 10, 20], 20, 2), ([-1, 30], -1, 0),
])
def test_offsets(array, offsets, value, at):
    q = ones(array, 1, T)
    message = rf"gla_attention: cu_seqlens has a value {value} at \[{at}\]; expected offsets that rise from 0 to T = 30"
    right = np.linspace(0, T, len(offsets)).astype(int)
    dtypes = ["int32"] if isinstance(q[0], jax.Array) else ["int32", "int64"]
    for made in (*(array(offsets, x) for x in dtypes), np.array(offsets), np.array(offsets, np.int32)):
        keraunos.gla_attention(*q, cu_seqlens=array(right, "int32"))
        with pytest.raises(ValueError, match=message):
            keraunos.gla_attention(*q, cu_seqlens=made)
    with pytest.raises(ValueError, match=f"lightning_attention: cu_seqlens has a value {value}"):
        keraunos.lightning_attention(*q, cu_seqlens=array(offsets, "int32"), layer_idx=0, num_layers=1)


def test_the_steps_of_serving(array):
    pool = array(np.zeros((5, H, K, K)))
    q, draft = ones(array, N), ones(array, N, 2)
    right, padding = array([0, 4, 2], "int32"), array([0, -1, 2], "int32")
    for slots, value, at in (([0, 5, 2], 5, 1), ([0, 1, -2], -2, 2)):
        message = rf"has a value {value} at \[{at}\]; expected a slot below 5(, each once)?, or -1 for padding"
        wrong = array(slots, "int32")
        serving.decode(*q, array(np.zeros((5, H, K, K))), right)
        with pytest.raises(ValueError, match="^decode: slots " + message):
            serving.decode(*q, pool, wrong)
        with pytest.raises(ValueError, match="^verify: slots " + message):
            serving.verify(*draft, pool, wrong)
        with pytest.raises(ValueError, match="^commit: slots " + message):
            serving.commit(*draft[1:], pool, wrong, array([1, 1, 1], "int32"))
    with pytest.raises(
        ValueError, match=r"^decode: g_gamma \(or log_decay\) has a value 0.016.* at \[2\]; expected <= 0"
    ):
        serving.decode(*q, pool, right, log_decay=array(POSITIVE))
    gate = np.zeros((N, H, K))
    gate[1, 2, 3] = 1.0
    with pytest.raises(ValueError, match=r"^decode: g has a value 1.0 at \[1, 2, 3\]; expected <= 0"):
        serving.decode(*q, pool, right, g=array(gate))
    # Gates of padding are any.
    serving.decode(*q, pool, padding, g=array(gate))


def test_slots_that_are_written_twice_and_numbers_of_drafts(array):
    q, draft = ones(array, N), ones(array, N, 2)

    def pool():
        return array(np.zeros((5, H, K, K)))

    twice, padding = array([3, 1, 3], "int32"), array([-1, 2, -1], "int32")
    message = r" slots has a value 3 at \[2\]; expected a slot below 5, each once, or -1 for padding"
    with pytest.raises(ValueError, match="^decode:" + message):
        serving.decode(*q, pool(), twice)
    with pytest.raises(ValueError, match="^commit:" + message):
        serving.commit(*draft[1:], pool(), twice, array([1, 1, 1], "int32"))
    with pytest.raises(ValueError, match="^prefill:" + message):
        serving.prefill(*ones(array, T), pool(), twice, array([0, 10, 20, 30], "int32"))
    # What is only read may be read twice, and padding may stand anywhere.
    serving.verify(*draft, pool(), twice)
    serving.decode(*q, pool(), padding)
    for counts, value, at in (([1, -1, 0], -1, 1), ([3, 0, 0], 3, 0)):
        message = rf"^commit: counts has a value {value} at \[{at}\]; expected a number of drafts from 0 to 2"
        with pytest.raises(ValueError, match=message):
            serving.commit(*draft[1:], pool(), array([0, 1, 2], "int32"), array(counts, "int32"))
    serving.commit(*draft[1:], pool(), padding, array([-7, 2, 9], "int32"))


def test_prefill(array):
    q = ones(array, T)

    def prefill(slots=(0, 3), offsets=(0, 10, 20), targets=None, **options):
        boundaries = None if targets is None else (array([3, 12], "int32"), array(targets, "int32"))
        pool = array(np.zeros((5, H, K, K)))
        offsets = offsets if isinstance(offsets, np.ndarray) else array(offsets, "int32")
        return serving.prefill(*q, pool, array(slots, "int32"), offsets, boundaries=boundaries, **options)

    prefill()
    prefill(offsets=np.array([0, 10, 20]))
    for wrong, value, at in (([0, 10, 31], 31, 2), ([0, 20, 10], 10, 2), ([1, 2, 3], 1, 0)):
        message = rf"^prefill: cu_seqlens has a value {value} at \[{at}\]; expected offsets .* from 0 to at most T = 30"
        for made in (wrong, np.array(wrong)):
            with pytest.raises(ValueError, match=message):
                prefill(offsets=made)
    with pytest.raises(ValueError, match=r"^prefill: slots has a value 9 at \[1\]"):
        prefill(slots=(0, 9))
    with pytest.raises(ValueError, match=r"^prefill: boundaries' targets has a value 7 at \[1\]"):
        prefill(targets=[-1, 7])
    gate = np.zeros((T, H))
    gate[20:] = np.nan  # of padding
    prefill(g=array(gate))
    gate[12, 1] = 0.5
    prefill(g=array(gate), slots=(0, -1))
    with pytest.raises(ValueError, match=r"^prefill: g has a value 0.5 at \[12, 1\]; expected <= 0"):
        prefill(g=array(gate))


@pytest.mark.parametrize("lengths", [(10, 20), (0, 30), (30,)])
def test_numpy_offsets_are_constants(array, lengths):
    q, offsets = ones(array, 1, T), np.cumsum([0, *lengths])
    gate = array(-np.ones((1, T, H)))
    want = keraunos.gla_attention(*q, gate, cu_seqlens=array(offsets, "int32"), return_state=True)
    for dtype in ("int32", "int64", "uint8"):
        got = keraunos.gla_attention(*q, gate, cu_seqlens=offsets.astype(dtype), return_state=True)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    for function in (keraunos.lightning_attention, distributed.lightning_attention):
        where = {}
        if function is distributed.lightning_attention:
            if not isinstance(q[0], jax.Array):
                continue
            where = dict(mesh=jax.make_mesh((1,), ("tokens",)), spec=jax.P(None, "tokens"))
        layer = dict(layer_idx=1, num_layers=4, **where)
        np.testing.assert_array_equal(
            np.asarray(function(*q, cu_seqlens=offsets, **layer)),
            np.asarray(function(*q, cu_seqlens=array(offsets, "int32"), **layer)),
        )
    with pytest.raises(TypeError, match=r"cu_seqlens has dtype float.*; expected int32 or int64"):
        keraunos.gla_attention(*q, cu_seqlens=offsets.astype(float))
    with pytest.raises(ValueError, match=r"cu_seqlens has shape \(1, .\); expected \[N \+ 1\]"):
        keraunos.gla_attention(*q, cu_seqlens=offsets[None])


def test_numpy_offsets_in_programs():
    q, offsets = ones(jnp.asarray, 1, T), np.array([0, 10, T])
    want = keraunos.gla_attention(*q, cu_seqlens=jnp.asarray(offsets))
    np.testing.assert_allclose(jax.jit(lambda q: keraunos.gla_attention(*q, cu_seqlens=offsets))(q), want, rtol=1e-6)
    torch = pytest.importorskip("torch")
    q = [torch.ones(1, T, H, K)] * 3
    run = torch.compile(lambda q: keraunos.gla_attention(*q, cu_seqlens=offsets), backend="eager", fullgraph=True)
    np.testing.assert_allclose(run(q), want, rtol=1e-6)


def test_over_shards():
    q, mesh = ones(jnp.asarray, 1, T), jax.make_mesh((2,), ("tokens",))
    where = dict(mesh=mesh, spec=jax.P(None, "tokens"))
    with pytest.raises(ValueError, match=r"^gla_attention: g has a value 1.0 at \[0, 20, 3\]; expected <= 0"):
        distributed.gla_attention(*q, jnp.zeros((1, T, H)).at[0, 20, 3].set(1), **where)
    with pytest.raises(ValueError, match=r"^lightning_attention: log_decay has a value 0.01.* at \[2\]"):
        distributed.lightning_attention(*q, log_decay=POSITIVE, **where)
    with pytest.raises(ValueError, match=r"^gla_attention: cu_seqlens has a value 20 at \[1\]; expected .* to T = 30"):
        distributed.gla_attention(*q, cu_seqlens=jnp.array([0, 20]), **where)
    # A shard has offsets of whole sequences, whose end it does not know.
    args = contract.Args(*q, cu_seqlens=jnp.array([0, 50, 40]))
    with pytest.raises(
        ValueError, match=r"cu_seqlens has a value 40 at \[2\]; expected offsets that rise from 0, sums"
    ):
        contract.GLA.checker(args, whole=False)(args)


def test_arrays_that_are_sharded():
    mesh = jax.make_mesh((4,), ("heads",))
    gate = jax.device_put(
        jnp.zeros((1, T, H)).at[0, 3, 2].set(0.5), jax.NamedSharding(mesh, jax.P(None, None, "heads"))
    )
    with pytest.raises(ValueError, match=r"g has a value 0.5 at \[0, 3, 2\]"):
        keraunos.gla_attention(*ones(jnp.asarray, 1, T), gate)


def test_an_array_that_was_checked_can_be_given_up():
    gate = jnp.zeros((1, T, H))
    place = gate.unsafe_buffer_pointer()
    keraunos.gla_attention(*ones(jnp.asarray, 1, T), gate)
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(gate).unsafe_buffer_pointer() == place


def test_what_is_traced_or_transformed_is_not_read():
    q, wrong = ones(jnp.asarray, 1, T), jnp.ones((1, T, H))
    jax.jit(keraunos.gla_attention)(*q, wrong)
    jax.grad(lambda g: keraunos.gla_attention(*q, g).sum())(wrong)
    jax.vmap(lambda g: keraunos.gla_attention(*q, g))(wrong[None])
    torch = pytest.importorskip("torch")
    q, wrong = [torch.ones(1, T, H, K)] * 3, torch.ones(1, T, H)
    torch.compile(keraunos.gla_attention, backend="aot_eager")(*q, wrong)
    torch.func.grad(lambda g: keraunos.gla_attention(*q, g).sum())(wrong)
    torch.vmap(lambda g: keraunos.gla_attention(*q, g))(wrong[None])
    keraunos.gla_attention(*(x.to("meta") for x in q), wrong.to("meta"))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        keraunos.gla_attention(*[torch.ones(1, T, H, K)] * 3, torch.ones(1, T, H))
    # What gradients follow is.
    with pytest.raises(ValueError, match=r"g has a value 1.0 at \[0, 0, 0\]"):
        keraunos.gla_attention(*q, wrong.requires_grad_())


def python(code):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True,
                          env={**__import__("os").environ, "KERAUNOS_CHECK": "1"})
    return done.stdout + done.stderr


def test_keraunos_check_looks_into_programs():
    said = python(
        """
        import jax, jax.numpy as jnp, keraunos
        q, g = jnp.ones((1, 30, 4, 8)), jnp.zeros((1, 30, 4))
        run = jax.jit(jax.grad(lambda g: keraunos.gla_attention(q, q, q, g).sum()))
        jax.block_until_ready(run(g))
        print("right", flush=True)
        jax.block_until_ready(run(g.at[0, 7, 3].set(0.5)))
        jax.effects_barrier()
        """
    )
    assert "right" in said
    assert "gla_attention: g has a value 0.5 at [0, 7, 3]; expected <= 0" in said
