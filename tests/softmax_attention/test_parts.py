"""A platform's results for parts of the keys, merged as the ranks of ``keraunos.distributed`` do, on one device."""

import numpy as np
import pytest

from keraunos.distributed import softmax
from keraunos.distributed.ring import merged, of_part, sinks_gradient, whole, with_sinks
from keraunos.kernels.softmax_attention.contract import Args
from tests.distributed.test_softmax import CASES, MORE, T
from tests.linear_attention.cases import DTYPES, GPU
from tests.softmax_attention.cases import platforms

SHARDS = 4
# The other platforms' parts are in the tests of ``tests/distributed/test_softmax.py``.
PLATFORMS = [pair for pair in platforms() if pair[0] == "triton"]
WHOLE = [case for case in CASES + MORE if not case.lengths]


def arrays_of(framework):
    """``(namespace, NumPy -> array, array -> NumPy)``."""
    if framework == "jax":
        import jax.numpy as jnp

        return jnp, jnp.asarray, np.asarray
    import torch

    def tensor(x):
        wide = x.astype(np.float32) if x.dtype == DTYPES["bfloat16"] else x
        y = torch.from_numpy(wide.copy()).to("cuda" if GPU else "cpu")
        return y.bfloat16() if wide is not x else y

    return torch, tensor, lambda x: x.double().cpu().numpy()


@pytest.mark.skipif(not PLATFORMS, reason="needs a GPU, or Triton's interpreter")
@pytest.mark.parametrize(("platform", "framework"), PLATFORMS)
@pytest.mark.parametrize("case", WHOLE if GPU else WHOLE[:2] + WHOLE[-3:], ids=str)
def test_parts_give_what_the_whole_gives(case, platform, framework):
    xp, array, numpy = arrays_of(framework)
    (q, k, v, sinks), ids, _, do = case.arrays
    n = T // SHARDS
    *shards, gradients = (None if x is None else [array(x[:, i * n : (i + 1) * n]) for i in range(SHARDS)]
                          for x in (q, k, v, ids, do))
    sinks = None if sinks is None else array(sinks)
    shards = [x or [None] * SHARDS for x in shards]
    options = dict(softmax_scale=case.scale, soft_cap=case.soft_cap, causal=case.causal, window=case.window,
                   softmax_dtype="float32")

    def call(i, j):
        query, key, value, ids = shards
        return Args(query[i], key[j], value[j], query_segments=ids[i], key_segments=ids[j])

    ring = softmax.ring(call(0, 0), SHARDS, None, platform, None, options)
    rows = []
    for i in range(SHARDS):
        seen = [j for j in range(SHARDS) if i == j or ring.sees(i - j, n)]
        parts = [of_part(xp, ring.parts[0](call(i, j), ring.part(i - j, n))) for j in seen]
        found = parts[0]
        for part in parts[1:]:
            found = merged(xp, found, part)
        found = with_sinks(xp, found, sinks)
        known = found._replace(output=xp.asarray(found.output, dtype=shards[0][i].dtype))
        grads = {j: ring.parts[1](call(i, j), whole(xp, known), gradients[i],
                                  ring.part(i - j, n)) for j in seen}
        means = (numpy(known.output) * numpy(gradients[i])).sum(-1).swapaxes(1, 2)
        dsinks = sinks_gradient(xp, sinks, known, xp.asarray(array(means), dtype=found.top.dtype))
        rows.append((known.output, grads, dsinks))
    summed = [[sum(numpy(grads[j][x]).astype(np.float64) for _, grads, _ in rows if j in grads)
               for j in range(SHARDS)] for x in (1, 2)]
    dq = [sum(numpy(own[0]).astype(np.float64) for own in grads.values()) for _, grads, _ in rows]
    got = [np.concatenate(x, 1) for x in ([numpy(row[0]) for row in rows], dq, *summed)]
    case.check([*got, None if sinks is None else sum(numpy(row[2]).astype(np.float64) for row in rows)])
