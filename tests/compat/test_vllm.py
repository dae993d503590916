"""The drop-ins for vLLM's functions, against the float64 recurrence."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from keraunos.compat import vllm  # noqa: E402
from keraunos.kernels.linear_attention.reference import linear_attention  # noqa: E402
from keraunos.kernels.linear_attention.reference_vjp import linear_attention_vjp  # noqa: E402
from keraunos.numerics import coarser  # noqa: E402
from tests.linear_attention.cases import GPU  # noqa: E402
from tests.numerics import assert_within_rule  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def normal(*shape, dtype="float32", seed=0):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.to(DEVICE, DTYPES[dtype])


def array(x):
    return x.detach().double().cpu().numpy()


def tokens_first(x):
    return np.swapaxes(x, 1, 2)


def truth(q, k, v, slopes, block, history, dtype):
    """Output and the states before each block and at the end, with the reference."""
    q, k, v = (tokens_first(array(x)) for x in (q, k, v))
    state = array(history)
    outputs, states = [], [state]
    for begin in range(0, q.shape[1], block):
        part = np.s_[:, begin : begin + block]
        o, state = linear_attention(
            q[part], k[part], v[part], None, -slopes, state, softmax_scale=1.0, dtype=dtype
        )
        outputs.append(o)
        states.append(state)
    return tokens_first(np.concatenate(outputs, 1)), np.stack(states, 2)


@pytest.mark.parametrize(("B", "T", "D", "E", "block", "dtype"), [
    (2, 70, 16, 16, 32, "float32"), (1, 600, 32, 32, 256, "bfloat16"), (1, 64, 24, 40, 32, "float16"),
    (1, 20, 192, 192, 256, "bfloat16"), (1, 33, 256, 64, 16, "float32"), (2, 1, 16, 16, 256, "float32"),
    (1, 128, 16, 16, 64, "float32"),
])
def test_lightning_attention(B, T, D, E, block, dtype):
    slopes = np.array([0.0, 0.05, 2.0], np.float32)
    q, k = normal(B, 3, T, D, dtype=dtype), normal(B, 3, T, D, dtype=dtype, seed=1)
    v, history = normal(B, 3, T, E, dtype=dtype, seed=2), normal(B, 3, D, E, seed=3)
    before = history.clone()
    output, kv = vllm.lightning_attention(q, k, v, torch.tensor(slopes, device=DEVICE), block, history)
    assert torch.equal(history, before)
    assert output.dtype == q.dtype
    assert kv.dtype == torch.float32
    assert kv.shape == (B, 3, -(-T // block) + 1, D, E)
    args = q, k, v, slopes, block, history
    assert_within_rule(("output", "kv"), [array(output), array(kv)], truth(*args, np.float64),
                       truth(*args, np.float32), [dtype, coarser(dtype, "float32")])


def test_no_tokens():
    q, history = normal(1, 3, 0, 16), normal(1, 3, 16, 16)
    output, kv = vllm.lightning_attention(q, q, q, torch.ones(3, device=DEVICE), 16, history)
    assert output.shape == q.shape
    assert torch.equal(kv, history[:, :, None])


def test_no_prompts():
    """Of whole blocks, of parts of one, of both."""
    for T in (16, 3, 20):
        q, history = normal(0, 3, T, 16), normal(0, 3, 16, 16)
        output, kv = vllm.lightning_attention(q, q, q, torch.ones(3, device=DEVICE), 16, history)
        assert output.shape == q.shape
        assert kv.shape == (0, 3, -(-T // 16) + 1, 16, 16)


def test_compile_without_breaks():
    torch._dynamo.reset()
    slopes, slots = torch.tensor([0.1, 0.2, 0.3], device=DEVICE), torch.tensor([2, -1], device=DEVICE)
    prompt = torch.compile(vllm.lightning_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (40, 70):
        q = normal(1, 3, T, 16)
        assert all(map(torch.equal, prompt(q, q, q, slopes, 16), vllm.lightning_attention(q, q, q, slopes, 16)))
    decode = torch.compile(vllm.linear_decode_forward_triton, fullgraph=True, backend="aot_eager")
    functions = decode, vllm.linear_decode_forward_triton
    q, caches = normal(2, 3, 1, 16), [normal(3, 3, 16, 16) for _ in range(2)]
    found = [f(q, q, q, x, slopes, slots) for f, x in zip(functions, caches, strict=True)]
    assert torch.equal(*found)
    assert torch.equal(*caches)


def test_what_is_traced_leaves_nothing_behind():
    from torch.fx.experimental.proxy_tensor import make_fx

    # A length of its own, of which nothing is known.
    q, slopes = normal(1, 2, 611, 8), torch.tensor([0.5, 1.0], device=DEVICE)
    want = vllm.lightning_attention(q, q, q, slopes.clone(), 64)

    def run(q, slopes):
        return vllm.lightning_attention(q, q, q, slopes, 256)

    make_fx(run, tracing_mode="fake")(q, slopes)
    make_fx(lambda q: run(q, slopes), tracing_mode="fake", _allow_non_fake_inputs=True)(q)
    output, kv = run(q, slopes)
    torch.testing.assert_close(output, want[0])
    torch.testing.assert_close(kv[:, :, -1], want[1][:, :, -1])


def test_a_batch_is_as_good_as_its_prompts():
    """With and without gradients, alone and not, states and outputs are within the rule of one another."""
    q, k, v = (normal(2, 3, 70, 16, seed=i) for i in range(3))
    slopes = torch.tensor([0.0, 0.05, 2.0], device=DEVICE)
    both = vllm.lightning_attention(q, k, v, slopes, 32)
    for n in range(2):
        one = [x[n : n + 1] for x in (q, k, v)]
        alone = vllm.lightning_attention(*one, slopes, 32)
        learned = vllm.lightning_attention(one[0].clone().requires_grad_(), *one[1:], slopes, 32)
        for got in (alone, learned):
            want = [array(x[n : n + 1]) for x in both]
            assert_within_rule(("output", "kv"), [array(x) for x in got], want, want, ["bfloat16"] * 2)


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (1, 3, 1, 1)])
def test_slopes_of_every_shape(shape):
    q = normal(1, 3, 40, 16)
    slopes = torch.tensor([0.1, 0.2, 0.3], device=DEVICE)
    output, kv = vllm.lightning_attention(q, q, q, slopes.view(shape), 16)
    again, kv_again = vllm.lightning_attention(q, q, q, slopes, 16, q.new_zeros(1, 3, 16, 16))
    assert torch.equal(output, again)
    assert torch.equal(kv, kv_again)
    slopes *= 2
    changed = vllm.lightning_attention(q, q, q, slopes, 16)[0]
    assert not torch.equal(changed, output), "changed slopes went unseen"
    slopes.data = slopes / 2
    assert torch.equal(vllm.lightning_attention(q, q, q, slopes, 16)[0], output), "other slopes went unseen"


def test_gradients():
    B, H, T, D, block = 2, 2, 50, 16, 16
    slopes = np.array([0.3, 0.01], np.float32)
    q, k, v = (normal(B, H, T, D, seed=i).requires_grad_() for i in range(3))
    history, doutput = normal(B, H, D, D, seed=4).requires_grad_(), normal(B, H, T, D, seed=5)
    ed = torch.tensor(slopes, device=DEVICE, requires_grad=True)
    output, kv = vllm.lightning_attention(q, k, v, ed, block, history)
    dlast = normal(B, H, D, D, seed=6)
    got = torch.autograd.grad([output, kv[:, :, -1]], [q, k, v, ed, history], [doutput, dlast])
    arrays = [tokens_first(array(x)) for x in (q, k, v)]
    (want, near) = (
        linear_attention_vjp(*arrays, None, -slopes, array(history), None, tokens_first(array(doutput)), array(dlast),
                             softmax_scale=1.0, dtype=dtype)
        for dtype in (np.float64, np.float32)
    )
    results = [tokens_first(array(x)) for x in got[:3]] + [-array(got[3]), array(got[4])]
    assert_within_rule(("dq", "dk", "dv", "ded", "dhistory"), results, [*want[:3], *want[4:]], [*near[:3], *near[4:]],
                       ["float32"] * 5)


def test_gradients_through_the_history():
    """The state before the third block is that of a call with two blocks only."""
    q, k, v = (normal(1, 2, 48, 16, seed=i).requires_grad_() for i in range(3))
    slopes, given = torch.tensor([0.3, 0.01], device=DEVICE), normal(1, 2, 16, 16, seed=9)
    kv = vllm.lightning_attention(q, k, v, slopes, 16)[1]
    got = torch.autograd.grad(kv[:, :, 2], [k, v], given)
    last = vllm.lightning_attention(*(x[:, :, :32] for x in (q, k, v)), slopes, 32)[1][:, :, -1]
    want = torch.autograd.grad(last, [k, v], given)
    for a, b in zip(got, want, strict=True):
        assert_within_rule(("gradient",), [array(a)], [array(b)], [array(b)], ["bfloat16"])
        assert not a[:, :, 32:].any()


@pytest.mark.parametrize(("D", "dtype", "cache"), [(16, "float32", "float32"), (192, "bfloat16", "float32"),
                                                   (256, "float16", "bfloat16")])
def test_decode(D, dtype, cache):
    slopes, slots = np.array([0.0, 0.5], np.float32), [4, -1, 0]
    q, k, v = (normal(3, 2, 1, D, dtype=dtype, seed=i) for i in range(3))
    caches = normal(6, 2, D, D, dtype=cache)
    caches[[1, 2, 3, 5]] = float("nan")
    before = caches.clone()
    output = vllm.linear_decode_forward_triton(
        q, k, v, caches, torch.tensor(slopes, device=DEVICE).view(2, 1, 1), torch.tensor(slots, device=DEVICE)
    )
    assert output.shape == (3, 2 * D)
    assert not output[1].any()
    assert np.array_equal(array(caches[[1, 2, 3, 5]]), array(before[[1, 2, 3, 5]]), equal_nan=True)
    live = [0, 2]
    arrays = [tokens_first(array(x[live])) for x in (q, k, v)]
    (want, near) = (
        linear_attention(*arrays, None, -slopes, array(before[[4, 0]]), softmax_scale=1.0, dtype=dtype)
        for dtype in (np.float64, np.float32)
    )
    got = [array(output[live]).reshape(2, 1, 2, D), array(caches[[4, 0]])]
    assert_within_rule(("output", "caches"), got, want, near, [dtype, coarser(dtype, cache)])


def test_prefill_then_decode_is_the_whole():
    q, k, v = (normal(1, 2, 100, 16, seed=i) for i in range(3))
    slopes = torch.tensor([0.5, 0.01], device=DEVICE)
    whole, kv = vllm.lightning_attention(q, k, v, slopes, 32)
    _, first = vllm.lightning_attention(*(x[:, :, :99] for x in (q, k, v)), slopes, 32)
    caches = first[:, :, -1].contiguous()
    last = [x[:, :, 99:] for x in (q, k, v)]
    output = vllm.linear_decode_forward_triton(*last, caches, slopes, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    args = [array(x) for x in (q, k, v)], np.array([0.5, 0.01], np.float32)
    want, near = (
        linear_attention(*map(tokens_first, args[0]), None, -args[1], softmax_scale=1.0, dtype=dtype)
        for dtype in (np.float64, np.float32)
    )
    got = [array(output).reshape(1, 2, 16), array(caches), array(whole[:, :, 99]), array(kv[:, :, -1])]
    assert_within_rule(("decoded", "cache", "whole", "kv"), got, [want[0][:, 99], want[1]] * 2,
                       [near[0][:, 99], near[1]] * 2, ["float32"] * 4)


def test_inference_mode():
    """Where vLLM runs; slopes of both kinds, and gradients after it."""
    q, caches, slots = normal(2, 2, 1, 16), normal(3, 2, 16, 16, seed=1), torch.tensor([2, 0], device=DEVICE)
    slopes = torch.tensor([0.5, 0.25], device=DEVICE)
    want = vllm.linear_decode_forward_triton(q, q, q, caches.clone(), slopes.clone(), slots)
    prompt = normal(1, 2, 70, 16, seed=2)
    whole = vllm.lightning_attention(prompt, prompt, prompt, slopes.clone(), 32)[0]
    with torch.inference_mode():
        for own in (slopes, slopes.clone()):
            assert torch.equal(vllm.linear_decode_forward_triton(q, q, q, caches.clone(), own, slots), want)
            assert torch.equal(vllm.lightning_attention(prompt, prompt, prompt, own, 32)[0], whole)
    learned = prompt.clone().requires_grad_()
    output = vllm.lightning_attention(learned, prompt, prompt, slopes, 32)[0]
    assert torch.autograd.grad(output.sum(), learned)[0].isfinite().all()


def test_no_requests():
    q, slots = normal(0, 2, 1, 16), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    caches, slopes = normal(3, 2, 16, 16), torch.ones(2, device=DEVICE)
    assert vllm.linear_decode_forward_triton(q, q, q, caches, slopes, slots).shape == (0, 32)


def test_errors():
    q, slopes = normal(1, 2, 4, 16), torch.ones(2, device=DEVICE)
    with pytest.raises(ValueError, match=r"k has shape \(1, 2, 3, 16\); expected \[B, H, T, D\]"):
        vllm.lightning_attention(q, q[:, :, :3], q, slopes)
    with pytest.raises(ValueError, match=r"slopes have shape \(3,\)"):
        vllm.lightning_attention(q, q, q, torch.ones(3, device=DEVICE))
    with pytest.raises(TypeError, match="slopes are of type list; expected a torch"):
        vllm.lightning_attention(q, q, q, [0.5, 0.25])
    with pytest.raises(ValueError, match="block_size is 0"):
        vllm.lightning_attention(q, q, q, slopes, 0)
    with pytest.raises(ValueError, match="kv_history has shape"):
        vllm.lightning_attention(q, q, q, slopes, 256, q)
    with pytest.raises(TypeError, match="q is of type list"):
        vllm.lightning_attention([1.0], q, q, slopes)
    with pytest.raises(ValueError, match="expected one token per request"):
        vllm.linear_decode_forward_triton(q, q, q, q.new_zeros(1, 2, 16, 16), slopes, torch.zeros(1, device=DEVICE))
