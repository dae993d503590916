"""Mamba-2 as a call of gated linear attention, against its own recurrence."""

import numpy as np
import pytest

import keraunos
from keraunos import serving
from tests.linear_attention.cases import GPU, platforms
from tests.numerics import assert_within_rule

torch = pytest.importorskip("torch")

BATCH, T, HEADS, GROUPS, DIM, STATE = 2, 70, 6, 2, 24, 16


def recurrence(x, dt, A, B, C, state):
    """``h = exp(dt A) h + dt B x^T`` and ``y = h^T C`` for each head, token by token; states are ``[dim, state]``.

    x: ``[batch, T, heads, dim]``; dt: ``[batch, T, heads]``; A: ``[heads]``; B, C: ``[batch, T, groups, state]``, each
    for as many heads that follow each other.
    """
    rows = []
    for b in range(BATCH):
        heads = []
        for head in range(HEADS):
            group, h, outputs = head // (HEADS // GROUPS), state[b, head], []
            for t in range(T):
                h = torch.exp(dt[b, t, head] * A[head]) * h
                h = h + dt[b, t, head] * torch.outer(x[b, t, head], B[b, t, group])
                outputs.append(h @ C[b, t, group])
            heads.append((torch.stack(outputs), h))
        rows.append((torch.stack([y for y, _ in heads], 1), torch.stack([h for _, h in heads])))
    return torch.stack([y for y, _ in rows]), torch.stack([h for _, h in rows])


def ours(x, dt, A, B, C, state, platform):
    return keraunos.gla_attention(
        C, B, x * dt[..., None], dt * A, None, state, softmax_scale=1.0, return_state=True, state_v_first=True,
        platform=platform,
    )


def arrays():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    dt = np.log1p(np.exp(normal(BATCH, T, HEADS) - 2))
    given = (normal(BATCH, T, HEADS, DIM), dt, -np.exp(normal(HEADS)), normal(BATCH, T, GROUPS, STATE),
             normal(BATCH, T, GROUPS, STATE), normal(BATCH, HEADS, DIM, STATE))
    return given, normal(BATCH, T, HEADS, DIM), normal(BATCH, HEADS, DIM, STATE)


def results(run, dtype, device="cpu"):
    """Output, state and six gradients, through PyTorch."""
    given, doutput, dstate = arrays()
    given = [torch.from_numpy(x).to(device, dtype).requires_grad_() for x in given]
    doutput, dstate = (torch.from_numpy(x).to(device, dtype) for x in (doutput, dstate))
    outputs = run(*given)
    grads = torch.autograd.grad(outputs, given, (doutput, dstate))
    return [x.detach().cpu().numpy() for x in (*outputs, *grads)]


@pytest.mark.parametrize(("platform", "framework"), platforms())
def test_it_is_gated_linear_attention(platform, framework):
    truth, in_dtype = (results(recurrence, dtype) for dtype in (torch.float64, torch.float32))
    if framework == "jax":
        import jax

        given, *grads = arrays()
        outputs, pull = jax.vjp(lambda *x: ours(*x, platform), *map(jax.numpy.asarray, given))
        got = [*outputs, *pull(tuple(map(jax.numpy.asarray, grads)))]
    else:
        got = results(lambda *x: ours(*x, platform), torch.float32, "cuda" if GPU else "cpu")
    names = ["y", "state", "dx", "ddt", "dA", "dB", "dC", "dstate"]
    assert_within_rule(names, list(map(np.asarray, got)), truth, in_dtype, ["float32"] * 8)


def test_a_step_continues_a_cache_of_its_layout():
    (x, dt, A, B, C, state), *_ = (map(torch.from_numpy, y) if isinstance(y, tuple) else y for y in arrays())
    truth, final = recurrence(*(y.double() for y in (x, dt, A, B, C, state)))
    in_dtype, _ = recurrence(x, dt, A, B, C, state)
    made = []
    for t in range(T):
        output, _ = serving.decode(
            C[:, t], B[:, t], x[:, t] * dt[:, t, :, None], state.mT, torch.arange(BATCH), g=dt[:, t] * A,
            softmax_scale=1.0,
        )
        made.append(output)
    assert_within_rule(["y", "state"], [torch.stack(made, 1).numpy(), state.numpy()], [truth.numpy(), final.numpy()],
                       [in_dtype.numpy(), final.float().numpy()], ["float32"] * 2)
