"""The platform's host code with PyTorch's tensors, on the CPU: the kernels run in JAX's interpreter."""

import contextlib
import dataclasses
import functools
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import keraunos
from keraunos.kernels.registry import UnsupportedError, kernel_registry
from tests.linear_attention.cases import GPU, run_torch
from tests.pallas.cases import NEEDS_JAX, case, jax

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")


def to_jax(x):
    if x.dtype == torch.bfloat16:
        return jax.numpy.asarray(x.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return jax.numpy.asarray(x.detach().numpy())


def to_torch(x):
    x = np.array(x)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == ml_dtypes.bfloat16 else torch.tensor(x)


@contextlib.contextmanager
def interpreted(launched):
    """Within it, kernels run in the interpreter; ``launched`` gets the names and compile-time values of them."""
    from keraunos.frontends import torch_pallas
    from tests.pallas import interpreter

    def launch(fn, arrays, static):
        launched.append((fn.__name__, static))
        leaves, structure = jax.tree.flatten(arrays)
        hash((structure, tuple(static.items())))

        @jax.jit
        def call(leaves):
            return fn(**jax.tree.unflatten(structure, leaves), **static)

        with interpreter.interpreted():
            return jax.tree.map(to_torch, call([to_jax(x) for x in leaves]))

    with mock.patch.object(torch_pallas, "launch", launch):
        yield


def function(args, case, platform):
    from keraunos.kernels.linear_attention.pallas import gla
    from keraunos.ops import Config

    query, key, value, g, gamma, state, offsets = args
    return gla.fn(query, key, value, g, gamma, case.scale, state, case.reverse, offsets, cfg=Config(num_stages=2))


@NEEDS_JAX
@pytest.mark.parametrize(
    ("case", "segmentation"),
    [
        (case(T=130, H=1, B=2, state=True, gamma=0), None),
        (case(T=1100, H=1, gate="scalar", state=True), (8, 2)),
        (case(T=70, B=2, H=2, G=1, reverse=True, scale=-0.3, gate="scalar", gamma=0), None),
        (case(lengths=(5, 0, 70, 13), H=1, gate="scalar", gamma=1, state=True), None),
        (case(lengths=(5, 0, 600, 1, 150), H=1, gamma=0, state=True, reverse=True), (8, 1)),
        (case(T=500, B=2, H=1, gamma=2, state=True), None),
    ],
    ids=str,
)
def test_values_and_gradients(case, segmentation, monkeypatch):
    from keraunos.kernels.linear_attention import pallas as platform

    if segmentation:
        monkeypatch.setattr(platform, "segmentation", lambda *_: segmentation)
    launched = []
    with interpreted(launched):
        case.check(functools.partial(run_torch, "pallas", function))
    assert {name for name, _ in launched} == ({"scan", "local_states", "combine"} if segmentation else {"scan"})


@NEEDS_JAX
@pytest.mark.parametrize("lengths", [None, (0, 0)])
def test_an_empty_sequence_keeps_its_state(lengths):
    some = case(T=0, lengths=lengths, state=True, gamma=1)
    with interpreted(launched := []):
        output, state, *gradients = run_torch("pallas", function, some, True)
    assert not launched
    assert output.shape == gradients[0].shape == (1, 0, 2, 64)
    np.testing.assert_array_equal(state, some.arrays[0].initial_state)
    np.testing.assert_array_equal(gradients[-1], some.arrays[2])
    assert not gradients[4].any()


@NEEDS_JAX
def test_a_kernel_is_one_launch_of_all_its_arrays_in_order():
    pytest.importorskip("jax_cuda13_plugin")
    from keraunos.frontends import torch_pallas
    from keraunos.kernels.linear_attention import pallas_kernels as kernels

    struct = jax.ShapeDtypeStruct
    x, state = struct((2, 200, 2, 64), "bfloat16"), struct((2, 2, 64, 64), "float32")
    walk = kernels.Walk(200, False, False, 4, 1)

    def call(a, b, c, gamma, starts):
        return kernels.scan(a, b, c, kernels.Decay(gamma), starts, H=2, walk=walk, plan=None, scale_in=1.0,
                            scale_out=1.0, output=None, final=True, transposed=False, stages=2)  # fmt: skip

    lowered = jax.jit(call).trace(x, x, x, struct((2,), "float32"), state).lower(lowering_platforms=("cuda",))
    assert torch_pallas._module(lowered.compiler_ir(), 5, 2)
    more = jax.jit(lambda *args: call(*args)[0] + 1).trace(x, x, x, struct((2,), "float32"), state)
    with pytest.raises((NotImplementedError, ValueError)):
        torch_pallas._module(more.lower(lowering_platforms=("cuda",)).compiler_ir(), 5, 1)


def test_it_is_refused_with_a_reason():
    q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"pallas: needs a gpu device"):
        keraunos.lightning_attention(q, q, q, layer_idx=0, num_layers=2, platform="pallas")
    with pytest.raises(UnsupportedError, match=r"pallas: needs a gpu device"):
        keraunos.gla_attention(q, q, q, platform="pallas")


def on_hopper(operation, change):
    inv = operation.invocation("torch", "bfloat16", **{"B": 2, "T": 8192, "H": 64, "K": 128, "V": 128, **change})
    return dataclasses.replace(inv, backend="gpu", device="NVIDIA H200")


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="needs a jax before 0.11")
def test_an_older_jax_is_the_reason():
    inv = on_hopper(keraunos.LightningAttention(), {})
    with pytest.raises(UnsupportedError, match=r"pallas: cannot be imported: needs jax 0\.11"):
        kernel_registry.choose(inv, "pallas")
