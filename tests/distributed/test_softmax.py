"""Softmax attention over shards is what it is over the whole sequence: output and gradients, against float64."""

import dataclasses
import functools
import importlib.util

import numpy as np
import pytest

from keraunos import UnsupportedError
from keraunos.kernels.softmax_attention.reference import attention as reference
from tests.distributed.worlds import worlds
from tests.linear_attention.cases import DTYPES, GPU
from tests.numerics import assert_within_rule

HAS_TORCH = importlib.util.find_spec("torch") is not None
T = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One call over the whole sequence. sinks: for so many heads, each of them; -1: for all.

    views: heads lie before tokens in memory.
    """

    causal: bool = False
    window: tuple[int, int] | None = None
    sinks: int = 0
    each: int = 3
    soft_cap: float | None = None
    segments: bool = False
    lengths: bool = False
    G: int = 2
    dtype: str = "float32"
    scale: float | None = None
    views: bool = False

    @functools.cached_property
    def arrays(self):
        """``((query, key, value, sinks), ids, lengths, gradient of the output)``."""
        rng = np.random.default_rng(0)

        def normal(*shape):
            return rng.standard_normal(shape).astype(DTYPES[self.dtype])

        q, k, v, do = normal(2, T, 4, 16), normal(2, T, self.G, 16), normal(2, T, self.G, 8), normal(2, T, 4, 8)
        sinks = None if not self.sinks else normal(2) if self.sinks < 0 else normal(self.sinks, self.each)
        ids = np.sort(rng.integers(-1, 4, (2, T)), 1).astype(np.int32) if self.segments else None
        # Lengths of a type without numbers below 0, which is what is left of them on later ranks.
        return (q, k, v, sinks), ids, np.array([T - 5, T // 3], np.uint8) if self.lengths else None, do

    @property
    def options(self):
        """Keyword arguments of the public function, but for the mask."""
        return dict(causal=self.causal, sliding_window=self.window, logits_soft_cap=self.soft_cap, dtype=self.dtype,
                    softmax_scale=self.scale)

    @staticmethod
    def mask_info(ids, lengths):
        """The arguments that hide keys."""
        from keraunos.types import MaskInfo

        info = MaskInfo() if ids is None else MaskInfo.from_segments(ids)
        return info if lengths is None else info.apply_kv_lengths(lengths)

    def check(self, got):
        """Hold ``[output, dquery, dkey, dvalue, dsinks]`` of the whole sequence to the tolerance rule."""
        (q, k, v, sinks), ids, lengths, do = self.arrays
        own, other = ids, ids
        if lengths is not None:
            own = np.zeros((2, T), np.int32) if ids is None else ids
            other = np.where(np.arange(T) < lengths[:, None], own, -1)
        options = dict(softmax_scale=self.scale, soft_cap=self.soft_cap, causal=self.causal, window=self.window,
                       sinks=sinks, query_segments=own, key_segments=other)
        found, scales = [], []
        for dtype in (np.float64, np.float32):
            output, _ = reference(q, k, v, **options, dtype=dtype)
            *grads, _, dsinks = reference(q, k, v, **options, doutput=do, dtype=dtype)
            found.append([output, *grads, self.shared(dsinks)])
            # A sum over queries has terms of both signs.
            scales.append([output, *grads, self.shared(np.abs(dsinks))])
        names = ("output", "dquery", "dkey", "dvalue", "dsinks")
        assert_within_rule(names, got, *found, [self.dtype] * 5, scales[0])

    def shared(self, dsinks):
        """The sums over what shares a sink."""
        sinks = self.arrays[0][3]
        if sinks is None:
            return None
        heads = 1 if sinks.ndim == 1 else len(sinks)
        return dsinks.sum((0, 2)).reshape(heads, 4 // heads, sinks.shape[-1]).sum(1).reshape(sinks.shape)


CASES = [
    Case(causal=True, sinks=4, soft_cap=5.0, segments=True), Case(lengths=True, sinks=-1, scale=-0.5),
    Case(causal=True, dtype="bfloat16", lengths=True, G=4), Case(window=(9, 1), sinks=1, G=1),
    Case(window=(40, 17), soft_cap=3.0, lengths=True), Case(window=(0, 0), sinks=-1),
]
MORE = [
    Case(), Case(causal=True, views=True), Case(causal=True, window=(20, 3)), Case(window=(3, 25)),
    Case(window=(0, 40)), Case(causal=True, lengths=True, segments=True), Case(sinks=4, each=0),
    Case(causal=True, window=(20, 0), dtype="bfloat16"),
]


def on_jax(case, size, axes=("tokens",), spec=(None, "tokens"), **options):
    """``[output, gradients]`` over so many devices along the tokens, and the program's text."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from keraunos.distributed import attention

    (q, k, v, sinks), ids, lengths, do = jax.tree.map(jnp.asarray, case.arrays)
    shape = (size,) if len(axes) == 1 else (2, size)
    mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    rows, batch = P(*spec), P(spec[0])

    def local(q, k, v, sinks, ids, lengths):
        info = case.mask_info(ids, lengths)
        return attention(q, k, v, None, None, sinks, axis_name="tokens", mask_info=info, **case.options)

    over = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows, P(), rows, batch), out_specs=rows, **options)

    def run(q, k, v, sinks, do):
        output, pull = jax.vjp(lambda *x: over(*x, ids, lengths), q, k, v, sinks)
        return output, *pull(do)

    compiled = jax.jit(run).lower(q, k, v, sinks, do).compile()
    return [None if x is None else np.asarray(x) for x in compiled(q, k, v, sinks, do)], compiled.as_text()


@pytest.mark.skipif(GPU, reason="runs on the host's devices")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_jax(case):
    got, text = on_jax(case, 4)
    case.check(got)
    # What moves are shards, from one device to another.
    assert "all-gather" not in text
    assert ("collective-permute" in text) == (case.window != (0, 0))


@pytest.mark.skipif(GPU, reason="runs on the host's devices")
def test_jax_beside_a_sharded_batch_and_without_its_checks():
    case = CASES[0]
    case.check(on_jax(case, 4, ("batch", "tokens"), ("batch", "tokens"))[0])
    CASES[1].check(on_jax(CASES[1], 2, check_vma=False)[0])


@pytest.mark.skipif(GPU, reason="runs on the host's devices")
def test_memory_and_program_do_not_grow_with_the_ring():
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from keraunos.distributed import attention

    found = []
    for size in (4, 8):
        mesh = jax.make_mesh((size,), ("tokens",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = P(None, "tokens")
        call = jax.shard_map(lambda q: attention(q, q, q, axis_name="tokens", causal=True), mesh=mesh, in_specs=spec,
                             out_specs=spec)
        sharding = jax.sharding.NamedSharding(mesh, spec)
        shape = jax.ShapeDtypeStruct((1, 128 * size, 2, 32), jnp.bfloat16, sharding=sharding)
        compiled = jax.jit(jax.grad(lambda q, call=call: call(q).astype(jnp.float32).sum())).lower(shape).compile()
        found.append((compiled.memory_analysis().temp_size_in_bytes, compiled.as_text().count("collective-permute(")))
    assert found[0] == found[1]


@pytest.mark.skipif(GPU, reason="runs on the host's devices")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_jax_over_a_mesh(kind):
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from keraunos.distributed import attention

    case = CASES[0]
    types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((5, 1) if kind == "Auto" else (4, 2), ("tokens", "heads"), axis_types=types)
    (q, k, v, sinks), ids, _, do = jax.tree.map(jnp.asarray, case.arrays)

    def run(q, k, v, sinks):
        spec = P(None, "tokens", "heads")
        return attention(q, k, v, None, None, sinks, mesh=mesh, spec=spec, mask_info=case.mask_info(ids, None),
                         **case.options)

    output, pull = jax.vjp(jax.jit(run), q, k, v, sinks)
    case.check([np.asarray(x) for x in (output, *pull(do))])


def on_torch(rank, size, cases, platform=None, device="cpu"):
    """For each case the shards of what :func:`on_jax` returns, as lists of float64 arrays."""
    import ml_dtypes
    import torch
    import torch.distributed as dist

    from keraunos.distributed import attention

    def tensor(x):
        if x is None or x.dtype != ml_dtypes.bfloat16:
            return None if x is None else torch.from_numpy(x.copy()).to(device)
        return torch.from_numpy(x.astype(np.float32)).to(device, torch.bfloat16)

    def shard(x):
        n = T // size
        x = None if x is None else tensor(x[:, rank * n : (rank + 1) * n])
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x is not None and case.views else x

    found = []
    for case in cases:
        (q, k, v, sinks), ids, lengths, do = case.arrays
        given = [x if x is None else x.requires_grad_() for x in (*map(shard, (q, k, v)), tensor(sinks))]
        info = case.mask_info(shard(ids), tensor(lengths))
        output = attention(*given[:3], None, None, given[3], mask_info=info, platform=platform, **case.options)
        output.backward(shard(do))
        if sinks is not None:
            dist.all_reduce(given[3].grad)
        found.append([None if x is None else x.double().cpu().numpy()
                      for x in (output.detach(), *(x if x is None else x.grad for x in given))])
    return found


@pytest.fixture(scope="module")
def world():
    with worlds() as world:
        yield world


@pytest.mark.skipif(GPU or not HAS_TORCH, reason="runs on the host's processes")
@pytest.mark.parametrize("size", [2, 4])
def test_torch(world, size):
    cases = CASES + MORE if size == 4 else CASES[:2]
    ranks = world(size).run(on_torch, cases)
    for i, case in enumerate(cases):
        *rows, sinks = zip(*(found[i] for found in ranks), strict=True)
        case.check([*(np.concatenate(x, 1) for x in rows), sinks[0]])


def mismatched(rank, size):
    """The last rank's shard is shorter, and in the second call of another dtype."""
    import torch

    from keraunos.distributed import attention
    from keraunos.types import MaskInfo

    found = []
    for last in (torch.ones(1, 6, 2, 8), torch.ones(1, 8, 2, 8).double()):
        q = last if rank == size - 1 else torch.ones(1, 8, 2, 8)
        try:
            attention(q, q, q, dtype=None)
        except ValueError as error:
            found.append(f"{type(error).__name__}: {error}")
    q, info = torch.ones(1, 8, 2, 8), MaskInfo()
    try:
        attention(q, q, q, dtype=None, mask_info=info.apply_kv_lengths(torch.tensor([3])) if rank else info)
    except ValueError as error:
        found.append(str(error))
    return found


@pytest.mark.skipif(GPU or not HAS_TORCH, reason="runs on the host's processes")
def test_shards_that_do_not_fit_raise_on_all_ranks(world):
    ranks = world(2).run(mismatched)
    assert ranks[0] == ranks[1]
    length, dtype, absent = ranks[0]
    assert "key_lengths is None on rank 0, ((1,), torch.int64) on rank 1" in absent
    assert "key is ((1, 8, 2, 8), torch.float32) on rank 0, ((1, 6, 2, 8), torch.float32) on rank 1" in length
    assert "torch.float64" in dtype


@pytest.mark.parametrize(("options", "error", "message"), [
    (dict(bias=True), UnsupportedError, "bias cannot be had over shards"),
    (dict(return_weights=True), UnsupportedError, "return_weights"),
    (dict(dropout_prob=0.5, deterministic=False), UnsupportedError, "dropout_prob"),
    (dict(mask=True), UnsupportedError, "boolean mask"),
    (dict(offset=True), UnsupportedError, "query_offset"), (dict(causal="no"), TypeError, "causal is 'no'"),
    (dict(axis_name=None), ValueError, "expected axis_name="),
    (dict(axis_name="rows"), ValueError, "no axis of a shard_map"),
    (dict(S=8, causal=True), ValueError, "T = 4 queries and S = 2 keys"),
    (dict(platform="pallas"), UnsupportedError, "gives no sums"),
], ids=str)
def test_what_is_refused(options, error, message):
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from keraunos.distributed import attention
    from keraunos.types import MaskInfo

    S = options.pop("S", 16)
    q, k = jnp.ones((1, 16, 2, 8)), jnp.ones((1, S, 2, 8))
    bias = jnp.zeros((1, 1, 4, 4)) if options.pop("bias", False) else None
    info = MaskInfo.from_attention_mask(jnp.ones((4, 4), bool)) if options.pop("mask", False) else None
    info = MaskInfo().apply_causal(3) if options.pop("offset", False) else info
    options = dict(axis_name="tokens", mask_info=info, dtype=None) | options
    n = min(4, jax.device_count())
    if n < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.make_mesh((4,), ("tokens",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P(None, "tokens")
    with pytest.raises(error, match=message):
        jax.shard_map(lambda q, k: attention(q, k, k, bias, **options), mesh=mesh, in_specs=(spec, spec),
                      out_specs=spec)(q, k)
