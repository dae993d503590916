"""How many Python functions a warm call runs before its platform computes: what a decode step pays for each layer."""

import re
import sys

import pytest

import keraunos
from keraunos import serving

torch = pytest.importorskip("torch")
Q = torch.randn(1, 64, 2, 16)
TOKEN, POOL, SLOTS = torch.randn(2, 2, 16), torch.zeros(4, 2, 16, 16), torch.tensor([0, 1], dtype=torch.int32)
# The most that each may run.
CALLS = {
    "gla_attention": (20, lambda: keraunos.gla_attention(Q, Q, Q)),
    "lightning_attention": (23, lambda: keraunos.lightning_attention(Q, Q, Q, layer_idx=1, num_layers=4)),
    "attention, which casts": (24, lambda: keraunos.attention(Q, Q, Q, causal=True)),
    "attention": (20, lambda: keraunos.attention(Q, Q, Q, causal=True, dtype=None)),
    "decode": (34, lambda: serving.decode(TOKEN, TOKEN, TOKEN, POOL, SLOTS, g_gamma=[-0.1, -0.2])),
}


def calls(fn):
    """The Python functions that ``fn`` runs before the first one of a platform's module, or of ``torch.no_grad``."""
    seen = []

    def note(frame, event, arg):
        if event == "call":
            seen.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
    first = next(i for i, name in enumerate(seen) if re.search("(kernels/.*/torch|_contextlib).py:", name))
    return seen[1:first]


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_runs_few_functions(name):
    most, call = CALLS[name]
    for _ in range(3):
        call()
    seen = calls(call)
    assert len(seen) <= most, "\n".join(seen)
