"""The blocks that the Triton platform's walks skip, and the views that they take: in the interpreter, and on GPUs.

Keys and values of blocks that nobody may see are NaN: a program that loads them shows it, since 0 * NaN is NaN.
"""

import numpy as np
import pytest

import keraunos
from keraunos.types import MaskInfo
from tests.linear_attention.cases import GPU, INTERPRETED

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU (--gpu) or Triton's interpreter"),
    # Of NumPy, in the programs whose own blocks are NaN.
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning"),
]

DEVICE = "cuda" if GPU else "cpu"
CFG = keraunos.AttentionConfig(block_q=16, block_k=16, num_warps=4, num_stages=2)
T = 48


def arrays(*shape):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=gen).to(DEVICE) for _ in range(4)]


def run(q, k, v, do, **options):
    """Output and gradients."""
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    o = keraunos.attention(*given, dtype=None, platform="triton", cfg=CFG, **options)
    return [o.detach(), *torch.autograd.grad(o, given, do)]


def spoiled(x, *places):
    x = x.clone()
    for place in places:
        x[:, place] = torch.nan
    return x


def test_a_window_visits_no_block_outside_of_it():
    q, k, v, do = arrays(1, 64, 2, 16)
    window = dict(sliding_window=(12, 0), causal=True)
    whole = run(q, k, v, do, **window)
    # The last queries see from 48 - 12 on.
    tail, far = slice(48, 64), slice(0, 32)
    output = run(q, spoiled(k, far), spoiled(v, far), do, **window)[0]
    torch.testing.assert_close(output[:, tail], whole[0][:, tail], rtol=0, atol=0)
    # And the first keys are seen by queries up to 15 + 12.
    head, late = slice(0, 16), slice(32, 64)
    grads = run(spoiled(q, late), k, v, spoiled(do, late), **window)[2:]
    for got, want in zip(grads, whole[2:], strict=True):
        torch.testing.assert_close(got[:, head], want[:, head], rtol=0, atol=0)


def test_offsets_visit_no_block_outside_of_what_they_make_visible():
    q, k, v, do = arrays(2, 64, 2, 16)
    q, do = q[:, :16], do[:, :16]
    # The rows' queries see keys up to 31 and up to 15; the keys from 16 on are seen by the first row only.
    options = dict(sliding_window=(12, 0), query_offset=torch.tensor([16, 0], device=DEVICE, dtype=torch.int32))
    whole = run(q, k, v, do, **options)
    far = [x.clone() for x in (k, v)]
    for x in far:
        x[0, 32:], x[1, 16:] = torch.nan, torch.nan
    output, dq, _, _ = run(q, *far, do, **options)
    for got, want in ((output, whole[0]), (dq, whole[1])):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    hidden = [x.clone() for x in (q, do)]
    for x in hidden:
        x[1] = torch.nan
    grads = run(hidden[0], k, v, hidden[1], **options)[2:]
    for got, want in zip(grads, whole[2:], strict=True):
        torch.testing.assert_close(got[0], want[0], rtol=0, atol=0)
        torch.testing.assert_close(got[1, 16:], want[1, 16:], rtol=0, atol=0)


@pytest.mark.parametrize("ids", [(0, 1, 2), (2, -1, 0)], ids=str)
def test_segments_visit_no_block_of_others(ids):
    q, k, v, do = arrays(1, T, 2, 16)
    info = MaskInfo.from_segments(torch.tensor([ids], device=DEVICE).repeat_interleave(T // 3, 1))
    whole = run(q, k, v, do, mask_info=info)
    last, others = slice(32, T), slice(0, 32)
    output, dq, _, _ = run(q, spoiled(k, others), spoiled(v, others), do, mask_info=info)
    for got, want in ((output, whole[0]), (dq, whole[1])):
        torch.testing.assert_close(got[:, last], want[:, last], rtol=0, atol=0)
    grads = run(spoiled(q, others), k, v, spoiled(do, others), mask_info=info)[2:]
    for got, want in zip(grads, whole[2:], strict=True):
        torch.testing.assert_close(got[:, last], want[:, last], rtol=0, atol=0)


def test_a_mask_visits_no_block_that_it_hides():
    q, k, v, do = arrays(1, T, 2, 16)
    mask = torch.zeros(1, 2, T, T, dtype=torch.bool, device=DEVICE)
    # Of two heads; a whole block, parts of one, and queries that see nothing.
    mask[:, 0, :16, 16:32], mask[:, 1, 32:38, 20:32] = True, True
    info = MaskInfo.from_attention_mask(mask)
    whole = run(q, k, v, do, mask_info=info)
    hidden = [slice(0, 16), slice(32, T)]
    found = run(q, spoiled(k, *hidden), spoiled(v, *hidden), do, mask_info=info)
    for got, want in zip(found[:2], whole[:2], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    hidden = [slice(16, 32)]
    grads = run(spoiled(q, *hidden), k, v, spoiled(do, *hidden), mask_info=info)[2:]
    for got, want in zip(grads, whole[2:], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_ids_in_any_order():
    q, k, v, do = arrays(1, T, 2, 16)
    ids = torch.from_numpy(np.random.default_rng(0).integers(-1, 3, (1, T))).to(DEVICE)
    mask = MaskInfo.from_segments(ids).get_or_compute_attention_mask()
    by_ids, by_mask = (
        run(q, k, v, do, mask_info=info) for info in (MaskInfo.from_segments(ids), MaskInfo.from_attention_mask(mask))
    )
    for got, want in zip(by_ids, by_mask, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_views_are_not_copied():
    q, k, v, do = arrays(2, 20, 2, 16)
    fused = torch.stack([q, k, v], 2).reshape(2, 20, 6, 16)
    whole = run(q, k, v, do, causal=True)
    parts = run(fused[:, :, :2], fused[:, :, 2:4], fused[:, :, 4:], do, causal=True)
    turned = run(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do)), causal=True)
    for want, *others in zip(whole, parts, turned, strict=True):
        for got in others:
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_what_traces_and_transforms_a_call_gets_the_same():
    q, k, v, do = arrays(1, 20, 2, 16)
    bias = torch.randn(1, 2, 20, 20, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    sinks = torch.zeros(2, 1, device=DEVICE)

    def call(q, k, v, bias, sinks):
        return keraunos.attention(q, k, v, bias, None, sinks, dtype=None, platform="triton", cfg=CFG, causal=True)

    def loss(*given):
        return (call(*given) * do).sum()

    def gradients(f):
        given = [x.detach().requires_grad_() for x in (q, k, v, bias, sinks)]
        return torch.autograd.grad((f(*given) * do).sum(), given)

    want = gradients(call)
    compiled = gradients(torch.compile(call, fullgraph=True, backend="aot_eager"))
    transformed = torch.func.grad(loss, argnums=tuple(range(5)))(q, k, v, bias, sinks)
    checkpointed = gradients(lambda *x: torch.utils.checkpoint.checkpoint(call, *x, use_reentrant=False))
    for others in (compiled, transformed, checkpointed):
        for a, b in zip(others, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_tile_too_small_is_refused():
    q, k, v, _ = arrays(1, 20, 2, 16)
    with pytest.raises(ValueError, match="block_q = 8, block_k = 16; expected at least 16"):
        keraunos.attention(q, k, v, dtype=None, platform="triton", cfg=keraunos.AttentionConfig(block_q=8, block_k=16))
