"""The accuracy of a bfloat16 pool: errors of 10,000 steps of decoding against float64, next to a float32 pool's.

    PYTHONPATH=. python3 benchmarks/pools.py                            into benchmarks/results/pools/<device>.json

Each head has a constant gate: a memory of so many tokens, 0 for no gate. Tokens have values of bfloat16, but are given
in float32, so that nothing but the pool rounds outputs; keys of the delta rule have length 1, beta is the sigmoid of a
normal number. An error is that of the outputs of 50 steps, relative in the Frobenius norm (keraunos/numerics.py).
"""

from __future__ import annotations

from typing import Any

import harness
import torch

from keraunos import serving

MEMORIES, K, STEPS, MEASURED, WINDOW = (10, 100, 1000, 0), 128, 10_000, (100, 1000, 10_000), 50


def inputs(delta: bool, steps: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Query, key and value ``[steps, 1, H, K]``, and the gates."""
    torch.manual_seed(0)
    H = len(MEMORIES)
    q, k, v = (torch.randn(steps, 1, H, K) for _ in range(3))
    gates = {"g_gamma": torch.tensor([-1 / n if n else 0.0 for n in MEMORIES])}
    if delta:
        k = torch.nn.functional.normalize(k, dim=-1)
        gates["beta"] = torch.randn(steps, 1, H).sigmoid()
    return [x.bfloat16().float() for x in (q, k, v)], gates


def truth(tokens: list[torch.Tensor], gates: dict[str, torch.Tensor]) -> torch.Tensor:
    """The outputs in float64, ``[steps, 1, H, K]``."""
    decay, beta = gates["g_gamma"].double().exp()[:, None, None], gates.get("beta")
    state, outputs = torch.zeros(len(MEMORIES), K, K, dtype=torch.float64), []
    for t, (q, k, v) in enumerate(zip(*(x[:, 0].double() for x in tokens), strict=True)):
        state = decay * state
        if beta is not None:
            v = beta[t, 0, :, None].double() * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[..., None] * v[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q) * K**-0.5)
    return torch.stack(outputs)[:, None]


def measure(delta: bool, dtype: torch.dtype, steps: int) -> dict[str, list[float]]:
    """The errors of each head after some steps."""
    tokens, gates = inputs(delta, steps)
    states, slots, outputs = torch.zeros(1, len(MEMORIES), K, K, dtype=dtype), torch.zeros(1, dtype=torch.int32), []
    for t in range(steps):
        given = {name: x if name == "g_gamma" else x[t] for name, x in gates.items()}
        outputs.append(serving.decode(*(x[t] for x in tokens), states, slots, **given, platform="torch")[0])
    true, got = truth(tokens, gates), torch.stack(outputs)
    windows = {str(n): slice(n - WINDOW, n) for n in MEASURED if n <= steps}
    return {n: [harness.distance(got[w, :, h], true[w, :, h]) for h in range(len(MEMORIES))]
            for n, w in windows.items()}


def main() -> None:
    parser = harness.parser(__doc__, "pools")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"fewer than {STEPS}, to try it")
    options = parser.parse_args()
    run = harness.Run(options, "torch")
    found: dict[str, Any] = {"about": run.about, "memories": MEMORIES, "errors": {}}
    for family in ("linear attention", "delta rule"):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{family}, {str(dtype).removeprefix('torch.')} pool"
            found["errors"][name] = measure(family == "delta rule", dtype, options.steps)
            harness.say(f"{name}: {found['errors'][name]}")
    run.results.update(found)
    run.save()


if __name__ == "__main__":
    main()
