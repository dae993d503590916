"""Queries that stand further on than the keys begin: chunks of a prompt, and one token on a cache of keys."""

import functools
import importlib.util

import numpy as np
import pytest

import keraunos
from keraunos.kernels.softmax_attention.reference import attention as reference
from keraunos.types import MaskInfo
from tests.linear_attention.cases import GPU
from tests.numerics import assert_within_rule

B, T, H, G, K = 2, 48, 4, 2, 16
FRAMEWORKS = [name for name in ("jax", "torch") if importlib.util.find_spec(name)]
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.standard_normal((B, T, heads, K)).astype(np.float32) for heads in (H, G, G))
LENGTHS = np.array([41, 7])
OPTIONS = [{}, {"sliding_window": (9, 0)}]


def array(framework, x):
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    import torch

    return torch.from_numpy(np.array(x)).to("cuda" if GPU else "cpu")


def numpy(x):
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def assert_right(got, queries=QUERY, offsets=None, window=None, segments=None):
    """Hold causal attention of these queries on all keys to the tolerance rule."""
    options = dict(causal=True, window=window, query_offset=offsets)
    if segments:
        options |= dict(zip(("query_segments", "key_segments"), segments, strict=True))
    found = (reference(queries, KEY, VALUE, **options, dtype=dtype)[:1] for dtype in (np.float64, np.float32))
    assert_within_rule(["output"], [numpy(got)], *found, ["float32"])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_prompt_in_chunks_is_the_whole_prompt(framework, options):
    q, k, v = (array(framework, x) for x in (QUERY, KEY, VALUE))
    # Chunks on a cache with room for the whole, which hides what has not come yet; a number, and an array.
    for offset in (int, lambda first: array(framework, np.array(first, np.int32)), lambda first: np.full(B, first)):
        parts = [
            keraunos.attention(q[:, first : first + 16], k, v, causal=True, query_offset=offset(first), dtype=None,
                               **options)
            for first in range(0, T, 16)
        ]
        assert_right(np.concatenate([numpy(x) for x in parts], 1), window=options.get("sliding_window"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_token_on_a_cache_is_the_last_row(framework, options):
    k, v = (array(framework, x) for x in (KEY, VALUE))
    last = QUERY[np.arange(B), LENGTHS - 1][:, None]
    lengths = array(framework, LENGTHS.astype(np.int32))
    got = keraunos.attention(array(framework, last), k, v, causal=True, query_offset=lengths - 1, dtype=None,
                             mask_info=MaskInfo().apply_kv_lengths(lengths), **options)
    window = options.get("sliding_window")
    assert_right(got, last, LENGTHS - 1, window)
    for b, length in enumerate(LENGTHS):
        whole = [array(framework, x[b : b + 1, :length]) for x in (QUERY, KEY, VALUE)]
        row = numpy(keraunos.attention(*whole, causal=True, dtype=None, **options))[:, -1:]
        found = [reference(last[b : b + 1], *(x[b : b + 1, :length] for x in (KEY, VALUE)), causal=True,
                           query_offset=[length - 1], window=window, dtype=dtype)[:1]
                 for dtype in (np.float64, np.float32)]
        assert_within_rule(["output"], [row], *found, ["float32"])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_mask_info_says_it_too(framework):
    q, k, v = (array(framework, x) for x in (QUERY[:, :16], KEY, VALUE))
    offsets = array(framework, np.array([5, -3], np.int32))
    ids = array(framework, np.sort(RNG.integers(-1, 3, (B, T)), 1).astype(np.int32))
    info = MaskInfo.from_segments(ids[:, 5:21], ids)
    want = keraunos.attention(q, k, v, mask_info=info, causal=True, query_offset=offsets, sliding_window=(9, 4),
                              dtype=None)
    info = info.apply_sliding_window((9, 4)).apply_causal(offsets)
    assert_right(want, QUERY[:, :16], numpy(offsets), (9, 0), (numpy(ids[:, 5:21]), numpy(ids)))
    np.testing.assert_array_equal(numpy(keraunos.attention(q, k, v, mask_info=info, dtype=None)), numpy(want))
    mask = MaskInfo.from_attention_mask(info.get_or_compute_attention_mask())
    assert_right(keraunos.attention(q, k, v, mask_info=mask, dtype=None), QUERY[:, :16], numpy(offsets), (9, 0),
                 (numpy(ids[:, 5:21]), numpy(ids)))
    # What neither causality nor a window asks for.
    np.testing.assert_array_equal(
        *(numpy(keraunos.attention(q, k, v, dtype=None, **more)) for more in ({}, {"query_offset": offsets}))
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_masks_may_be_of_numpy(framework):
    q, k, v = (array(framework, x) for x in (QUERY, KEY, VALUE))
    ids = np.sort(RNG.integers(-1, 3, (B, T)), 1)
    ids.flags.writeable = False
    mask = RNG.random((B, 1, T, T)) < 0.5
    infos = [
        [MaskInfo.from_segments(of(ids)), MaskInfo.from_segments(of(ids)).apply_kv_lengths(of(LENGTHS)),
         MaskInfo.from_attention_mask(of(mask)), MaskInfo().apply_kv_lengths(of(LENGTHS)).apply_causal(of(LENGTHS))]
        for of in (lambda x: x, functools.partial(array, framework))
    ]
    # Some of each.
    infos[0].append(MaskInfo.from_segments(array(framework, ids)).apply_kv_lengths(LENGTHS))
    infos[1].append(infos[1][1])
    for own, same in zip(*infos, strict=True):
        got, want = (numpy(keraunos.attention(q, k, v, mask_info=info, dtype=None)) for info in (own, same))
        np.testing.assert_array_equal(got, want)
        got, want = (numpy(info.get_or_compute_attention_mask(T, T)) for info in (own, same))
        np.testing.assert_array_equal(got, want)


def test_jax_traces_offsets_once():
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    traced, cfg = [], keraunos.AttentionConfig(block_q=16, block_k=16)

    def call(q, offset, cfg=None):
        traced.append(offset)
        return keraunos.attention(q, KEY_, VALUE_, causal=True, query_offset=offset, dtype=None, cfg=cfg)

    KEY_, VALUE_, q = map(jnp.asarray, (KEY, VALUE, QUERY[:, :20]))
    step = jax.jit(call)
    for offset in (0, 9, 28):
        # One for all rows, as a loop's counter is.
        assert_right(step(q, jnp.int32(offset)), QUERY[:, :20], np.full(B, offset))
    assert len(traced) == 1
    offsets = np.array([[3, 20], [28, -4]], np.int32)
    for got in (
        jax.vmap(lambda o: call(q, o))(jnp.asarray(offsets)), jax.vmap(lambda o: call(q, o, cfg))(jnp.asarray(offsets)),
        jax.lax.scan(lambda c, o: (c, call(q, o, cfg)), 0, jnp.asarray(offsets))[1],
    ):
        for own, row in zip(got, offsets, strict=True):
            assert_right(own, QUERY[:, :20], row)


def test_jax_takes_a_mask_info_with_an_offset_as_a_pytree():
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    @jax.jit
    def run(info):
        return keraunos.attention(*map(jnp.asarray, (QUERY, KEY, VALUE)), mask_info=info, dtype=None)

    for offset in (-3, jnp.array([-3, -3])):
        info = MaskInfo().apply_causal(offset)
        assert_right(run(info), offsets=np.full(B, -3))
        assert type(jax.tree.map(lambda x: x, info).query_offset) is type(offset)


def test_torch_compiles_once_for_all_offsets_and_folds():
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in (QUERY[:, :20], KEY, VALUE))

    def run(q, k, v, offsets):
        info = MaskInfo().apply_causal(offsets).apply_kv_lengths(offsets + 20)
        return keraunos.attention(q, k, v, mask_info=info, sliding_window=(30, 3), dtype=None)

    compiled, found = torch.compile(run, fullgraph=True, backend="aot_eager"), []
    for offsets in ([3, 20], [28, -4], [0, 0]):
        offsets = torch.tensor(offsets, dtype=torch.int32)
        with torch._dynamo.config.patch(error_on_recompile=True):
            got = compiled(q, k, v, offsets)
        want = run(q, k, v, offsets)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        found.append((offsets, want.detach()))
    offsets, want = (torch.stack(x) for x in zip(*found, strict=True))
    got = torch.vmap(lambda offsets: run(q, k, v, offsets))(offsets)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    # A number is a part of the graph.
    number = torch.compile(lambda n: keraunos.attention(q, k, v, causal=True, query_offset=n, dtype=None),
                           fullgraph=True, backend="eager")
    for n in (4, 5):
        assert_right(number(n).detach(), QUERY[:, :20], np.full(B, n))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_vendors_kernels_get_no_offsets_and_no_scales_below_zero(framework):
    from keraunos.kernels.softmax_attention import contract

    q = array(framework, QUERY)
    for options, wanted in (
        ({}, True), ({"softmax_scale": 0.1}, True), ({"softmax_scale": 0.0}, False), ({"softmax_scale": -1.0}, False),
        ({"shift": 3}, False),
    ):
        inv = contract.describe(contract.Args(q, q, q), causal=True, **options)
        arrays = {name: ("bfloat16", ndim) for name, (_, ndim) in inv.arrays.items()}
        assert contract.is_for_libraries(arrays, "bfloat16", inv.dims, inv.options) == wanted
        sides = contract.sides(True, None, options.get("shift", 0))
        opts = contract.Options(options.get("softmax_scale", 1.0), None, *sides, 0.0, "float32", False, None)
        assert contract.is_for_libraries(arrays, "bfloat16", inv.dims, contract.traits(opts)) == wanted
