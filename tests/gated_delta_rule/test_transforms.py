"""The gated delta rule under the transformations of both frameworks."""

import importlib.util

import numpy as np
import pytest

import keraunos
from tests.gated_delta_rule.cases import Case
from tests.linear_attention.cases import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="has no kernels of Triton")
needs_jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is not installed")
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed")
CASE = Case(B=2, T=40, H=2, K=8, V=8, state=True)


@needs_jax
@pytest.mark.parametrize("lengths", [None, (13, 0, 27)])
def test_vmap_equals_a_loop(lengths):
    import jax
    import jax.numpy as jnp

    given = [[jnp.asarray(x) * (1 if n else 0.5) for x in Case(B=1, T=40, H=1, K=8, V=8, lengths=lengths).arrays[0][:5]]
             for n in range(2)]
    offsets = None if lengths is None else jnp.cumsum(jnp.array([0, *lengths]))

    def loss(*args):
        return (keraunos.gated_delta_rule(*args, None, offsets) ** 2).sum()

    grad = jax.grad(loss, argnums=tuple(range(5)))
    found = jax.vmap(grad)(*map(jnp.stack, zip(*given, strict=True)))
    wanted = list(map(jnp.stack, zip(*(grad(*args) for args in given), strict=True)))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@needs_jax
def test_export_with_symbols():
    import jax
    import jax.numpy as jnp

    b, t = jax.export.symbolic_shape("b, t")
    shapes = [(b, t, 2, 8), (b, t, 2, 8), (b, t, 2, 8), (b, t, 2), (b, t, 2)]
    exported = jax.export.export(jax.jit(keraunos.gated_delta_rule))(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    )
    args = [jnp.asarray(x) for x in CASE.arrays[0][:5]]
    np.testing.assert_allclose(exported.call(*args), keraunos.gated_delta_rule(*args), rtol=1e-5, atol=1e-6)


@needs_jax
def test_shard_map_over_batch():
    import jax
    import jax.numpy as jnp

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    args = [jnp.asarray(x) for x in CASE.arrays[0][:5]]
    found = jax.shard_map(keraunos.gated_delta_rule, mesh=mesh, in_specs=spec, out_specs=spec)(*args)
    np.testing.assert_allclose(found, keraunos.gated_delta_rule(*args), rtol=1e-5, atol=1e-6)


@needs_jax
def test_second_derivatives():
    import jax
    import jax.numpy as jnp

    args = [jnp.asarray(x) for x in Case(B=1, T=5, H=1, K=2, V=2, dtype="float32").arrays[0][:5]]
    v = args[2]

    def loss(v):
        return (keraunos.gated_delta_rule(*args[:2], v, *args[3:], platform="xla") ** 2).sum()

    # The output is linear in v.
    flat = jax.hessian(loss)(v).reshape(v.size, v.size)
    np.testing.assert_allclose(jax.grad(loss)(v).ravel(), flat @ v.ravel(), rtol=1e-4, atol=1e-5)


@needs_torch
def test_compile_makes_one_graph():
    import torch

    args = [torch.from_numpy(np.array(x)).requires_grad_() for x in CASE.arrays[0][:6]]

    def loss(*args):
        output, state = keraunos.gated_delta_rule(*args, return_state=True)
        return (output**2).sum() + state.sum()

    loss(*args).backward()
    wanted = [x.grad.clone() for x in args]
    for x in args:
        x.grad = None
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*args).backward()
    for x, grad in zip(args, wanted, strict=True):
        torch.testing.assert_close(x.grad, grad)


@needs_torch
def test_export_keeps_the_operator():
    import torch

    class Model(torch.nn.Module):
        def forward(self, *args):
            return keraunos.gated_delta_rule(*args)

    args = tuple(torch.from_numpy(np.array(x)) for x in CASE.arrays[0][:5])
    program = torch.export.export(Model(), args)
    assert any("keraunos" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*args), keraunos.gated_delta_rule(*args))


@needs_torch
def test_floating_point_operations_are_counted():
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    args = [torch.from_numpy(np.array(x)) for x in CASE.arrays[0][:5]]
    with FlopCounterMode(display=False) as counter:
        keraunos.gated_delta_rule(*(x.requires_grad_() for x in args)).sum().backward()
    assert counter.get_total_flops() == (3 + 8) * 2 * 2 * 40 * 2 * 8 * 8


@needs_torch
@pytest.mark.parametrize("lengths", [None, (13, 0, 27)])
def test_functional_transformations_of_torch(lengths):
    import torch

    offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    args = [torch.from_numpy(np.array(x)) for x in Case(B=1, T=40, H=2, K=8, V=8, lengths=lengths).arrays[0][:5]]

    def loss(*args):
        return (keraunos.gated_delta_rule(*args, None, offsets) ** 2).sum()

    gradients = torch.func.grad(loss, argnums=tuple(range(5)))
    stacked = [torch.stack([x, 0.5 * x]) for x in args[:4]]
    found = torch.vmap(gradients, in_dims=(0, 0, 0, 0, None))(*stacked, args[4])
    for n in range(2):
        for a, b in zip(found, gradients(*(x[n] for x in stacked), args[4]), strict=True):
            torch.testing.assert_close(a[n], b)


@needs_torch
def test_torch_has_no_second_derivatives_and_says_so():
    import torch

    args = [torch.from_numpy(np.array(x)).requires_grad_() for x in CASE.arrays[0][:5]]
    (first,) = torch.autograd.grad((keraunos.gated_delta_rule(*args) ** 2).sum(), args[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"gated_delta_rule.*double backward"):
        first.sum().backward()


@needs_torch
def test_autocast_casts_what_it_casts_elsewhere():
    import torch

    args = [torch.from_numpy(np.array(x)) for x in CASE.arrays[0][:5]]
    with torch.autocast("cpu", torch.bfloat16):
        assert keraunos.gated_delta_rule(*args).dtype == torch.bfloat16
