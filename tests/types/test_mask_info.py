"""MaskInfo: what it refuses, masks as segments, and limits on top of each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keraunos
from keraunos.types import MaskInfo


def test_what_masks_refuse():
    with pytest.raises(TypeError, match=r"key_lengths is a list; expected an array of integers"):
        MaskInfo().apply_kv_lengths([1, 2])
    with pytest.raises(TypeError, match=r"key_lengths is a .* of float32; expected an array of integers"):
        MaskInfo().apply_kv_lengths(jnp.ones(2))
    with pytest.raises(ValueError, match=r"key_lengths has shape \(\); expected \[B\]"):
        MaskInfo().apply_kv_lengths(jnp.array(3))
    with pytest.raises(TypeError, match="causal is 'no'; expected True or False"):
        MaskInfo(causal="no")
    with pytest.raises(TypeError, match="apply_causal: query_offset is a str; expected an int or an array of integers"):
        MaskInfo().apply_causal("2")
    with pytest.raises(ValueError, match="apply_causal: there is a query_offset already"):
        MaskInfo().apply_causal(2).apply_causal(2)
    with pytest.raises(ValueError, match="MaskInfo: sliding_window is -2"):
        MaskInfo(sliding_window=-2)


def test_masks_become_segments_and_back():
    ids = jnp.array([[0, 0, 1, -1, 2], [3, 3, 3, 1, 1]])
    mask = MaskInfo.from_segments(ids).get_or_compute_attention_mask()
    assert mask.shape == (2, 1, 5, 5)
    again = MaskInfo.from_segments(*MaskInfo.from_attention_mask(mask).get_or_compute_segment_ids())
    np.testing.assert_array_equal(again.get_or_compute_attention_mask(), mask)
    with pytest.raises(ValueError, match="not made of segments"):
        MaskInfo.from_attention_mask(jnp.tril(jnp.ones((4, 4), bool))).get_or_compute_segment_ids()


def test_segments_of_masks_whose_values_cannot_be_looked_at():
    torch = pytest.importorskip("torch")

    def segments(mask):
        return MaskInfo.from_attention_mask(mask).get_or_compute_segment_ids()

    ids = torch.arange(12) // 5
    mask = (ids[:, None] == ids)[None]
    compiled = torch.compile(segments, fullgraph=True, backend="eager")
    for got, want in zip(compiled(mask), segments(mask), strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(torch.vmap(segments)(mask[None]), segments(mask), strict=True):
        torch.testing.assert_close(got[0], want)
    assert segments(mask.to("meta"))[0].shape == (1, 12)


def test_limits_are_composed():
    info = MaskInfo.from_segments(jnp.zeros((1, 6), int)).apply_causal().apply_sliding_window((2, 9))
    info = info.apply_sliding_window((4, 0)).apply_kv_lengths(jnp.array([5]))
    t, s = np.mgrid[:6, :6]
    want = (s <= t) & (s >= t - 2) & (s < 5)
    np.testing.assert_array_equal(info.get_or_compute_attention_mask()[0, 0], want)
    given = [jax.random.normal(jax.random.key(i), (1, 6, 2, 8)) for i in range(3)]
    _, weights = keraunos.attention(*given, mask_info=info, dtype="float32", return_weights=True)
    np.testing.assert_array_equal(np.asarray(weights[0, 0]) > 0, want)
    only = MaskInfo().apply_kv_lengths(jnp.array([4]))
    _, weights = keraunos.attention(*given, mask_info=only, dtype="float32", return_weights=True)
    np.testing.assert_array_equal(np.asarray(weights[0, 0]) > 0, np.broadcast_to(s < 4, (6, 6)))
    np.testing.assert_array_equal(only.get_or_compute_attention_mask(6, 6)[0, 0], np.broadcast_to(s < 4, (6, 6)))
    with pytest.raises(ValueError, match="neither a mask nor segment ids are there; give T and S"):
        only.get_or_compute_attention_mask(6)
