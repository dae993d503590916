"""Wrong arguments of the gated delta rule: what came, what was expected, and the function's name."""

import numpy as np
import pytest

import keraunos

torch = pytest.importorskip("torch")

Q, KEY, V = torch.ones(2, 9, 2, 4), torch.ones(2, 9, 2, 4), torch.ones(2, 9, 4, 3)
G, BETA = -torch.ones(2, 9, 4), torch.ones(2, 9, 4)
ERRORS = [
    ((Q[0], KEY, V), {}, ValueError, r"query has shape \(9, 2, 4\); expected \[B, T, H, K\]"),
    ((Q, KEY[:, :5], V), {}, ValueError, r"key has shape \(2, 5, 2, 4\); expected \[B, T, heads, K\] = \(2, 9, heads"),
    ((Q, KEY, V, G[..., None]), {}, ValueError, r"g has shape \(2, 9, 4, 1\); expected \[B, T, heads, K\]"),
    ((Q, KEY, V, G, BETA[:, :5]), {}, ValueError, r"beta has shape \(2, 5, 4\); expected \[B, T, heads\] = \(2, 9"),
    ((Q, KEY, V, G, torch.ones(2, 9, 3)), {}, ValueError,
     r"beta has 3 heads; expected a divisor of H = 4, the most that query, key, value, g or beta has"),
    ((Q, KEY, V, G, BETA.int()), {}, TypeError, "beta has dtype int32; expected bfloat16 or float16 or float32"),
    ((Q, KEY.half(), V), {}, TypeError, "key has dtype float16; expected float32, like query"),
    ((Q, KEY, V, G, BETA, torch.ones(2, 4, 3, 4)), {}, ValueError,
     r"initial_state has shape \(2, 4, 3, 4\); expected \[N, H, K, V\] = \(2, 4, 4, 3\)"),
    ((Q, KEY, V), {"use_qk_l2norm": 1}, TypeError, "use_qk_l2norm is 1; expected True or False"),
    ((Q, KEY, V), {"softmax_scale": float("nan")}, TypeError, "softmax_scale is nan; expected a finite number"),
    ((Q, KEY, V), {"platform": "pallas"}, keraunos.UnsupportedError,
     "platform 'pallas' does not have it; expected one of"),
    ((Q, KEY, V, -G), {}, ValueError, r"g has a value 1.0 at \[0, 0, 0\]; expected <= 0, it is the log of a decay"),
    ((Q, KEY, V, None, None, None, torch.tensor([0, 9])), {}, ValueError, "query has B = 2; expected B = 1 with"),
    ((Q[:1], KEY[:1], V[:1], None, None, None, np.array([0, 5])), {}, ValueError, "cu_seqlens has a value 5 at"),
]


@pytest.mark.parametrize(("args", "options", "error", "words"), ERRORS)
def test_what_came_and_what_was_expected(args, options, error, words):
    with pytest.raises(error, match=f"^gated_delta_rule: {words}"):
        keraunos.gated_delta_rule(*args, **options)
