"""The tables of softmax attention on a GPU: the vendor's kernels, who routes to them, and ours; and decoding.

    PYTHONPATH=. python3 benchmarks/attention.py        into benchmarks/results/<gpu>.json, section "attention"

Written after every workload; what was left out, for the time or for another reason, is there with its reason.

Decoding is a few queries for each of some sequences on their keys, 8 heads of keys for 32 of queries, in CUDA graphs.
All queries see all keys, or each sequence has a length of its own, evenly from S / B to S.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import harness
import measuring
import torch
from contestants import find, label
from torch.nn.functional import scaled_dot_product_attention
from workloads import Shape, Workload

import keraunos

VENDORS = ("cudnn (jax)", "sdpa (torch)")
ROUTED = ("xla (jax)", "torch (torch)")
OURS = ("cuda (torch)", "triton (torch)")
# Variant, shape, contestants; in the order of importance, for a run that ends early.
CASES = (
    ("special", "1,8192,64", OURS),
    ("causal", "1,8192,64", (*VENDORS, *ROUTED, *OURS)),
    ("special", "1,32768,16", OURS),
    ("causal", "1,32768,16", (*VENDORS, *ROUTED, *OURS)),
)
# B, S, T.
DECODING = ((64, 16384, 1), (64, 16384, 4), (1, 131072, 1), (1, 131072, 16))
HEADS, KEY_HEADS, DIM = 32, 8, 128


def decoding(B: int, S: int, T: int, device: str = "cuda") -> tuple[list[torch.Tensor], dict[str, Callable]]:
    """The arrays of a call and, last, the position of each sequence's first query; and who computes it."""
    torch.manual_seed(0)
    sizes = ((T, HEADS), (S, KEY_HEADS), (S, KEY_HEADS))
    q, k, v = (torch.randn(B, *size, DIM, device=device, dtype=torch.bfloat16) for size in sizes)
    offset = torch.arange(1, B + 1, device=device, dtype=torch.int32) * (S // B) - T
    platform = "cuda" if device == "cuda" else "torch"

    def ours(**options: Any) -> torch.Tensor:
        return keraunos.attention(q, k, v, dtype=None, platform=platform, **options)

    def sdpa() -> torch.Tensor:
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True).transpose(1, 2)

    calls = {platform: ours, "sdpa": sdpa, f"{platform}, lengths": lambda: ours(causal=True, query_offset=offset)}
    return [q, k, v, offset], calls


def check_decoding(arrays: list[torch.Tensor], calls: dict[str, Callable]) -> None:
    """The first and the last sequence against float64.

    Raises:
        AssertionError: one is wrong.
    """
    q, k, v, offset = arrays
    T, S = q.shape[1], k.shape[1]
    place = torch.arange(S, device=q.device)
    for row in {0, len(q) - 1}:
        of_heads = q[row].double().unflatten(1, (KEY_HEADS, -1))
        scores = torch.einsum("tgnd,sgd->gnts", of_heads, k[row].double()) * DIM**-0.5
        for name, call in calls.items():
            last = offset[row] + torch.arange(T, device=q.device) if "lengths" in name else place.new_full((T,), S - 1)
            weights = scores.masked_fill(place > last[:, None], -torch.inf).softmax(-1)
            truth = torch.einsum("gnts,sgd->tgnd", weights, v[row].double()).flatten(1, 2)
            error = harness.distance(call()[row], truth)
            assert error < 2.0**-7, f"decoding, {name}: error {error:.2e}"


def measure_decoding(B: int, S: int, T: int, bandwidth: float) -> dict[str, Any]:
    """Seconds of each, and of copying as many bytes as the keys and values have."""
    arrays, calls = decoding(B, S, T)
    check_decoding(arrays, calls)
    replays = {name: harness.captured(call) for name, call in calls.items()}
    timers = {name: lambda run=run: harness.events(run, 10, cycles=200_000) for name, run in replays.items()}
    found = {name: statistics.median(times[1:]) for name, times in harness.in_turns(timers, 10).items()}
    return {"B": B, "S": S, "T": T, "copy_s": sum(x.nbytes for x in arrays[1:3]) / bandwidth, "seconds": found}


def _build(size: tuple[int, int, int]) -> None:
    for call in decoding(*size)[1].values():
        call()
    torch.cuda.synchronize()


def main() -> None:
    parser = harness.parser(__doc__ or "", seconds=180.0)
    options = parser.parse_args()
    harness.require_gpu(parser)
    run = harness.Run(options, keep=True)
    work = [
        (Workload("attention", Shape.parse(shape), backward=backward, variant=variant), names)
        for variant, shape, names in CASES for backward in (False, True)
    ]
    harness.build(workload for workload, _ in work)
    harness.side_by_side(_build, DECODING)
    section = run.section("attention", product_rate=measuring.product_rate("bfloat16"))
    known = {label(c): c for c in find("attention", [], ["cudnn", "sdpa"])}
    calls = ((workload, [known[name] for name in names]) for workload, names in work)
    run.compare(section, calls, measuring.Effort(rounds=20, seconds=1.5))
    section["decoding"] = []
    for size in DECODING:
        try:
            row = measure_decoding(*size, section["about"]["copy_bandwidth"])
        except Exception as error:
            # The figures above stay, whatever happens here.
            section["left_out"].append({"workload": f"decoding {size}", "reason": harness.failure(error)})
        else:
            section["decoding"].append(row)
            harness.say(str(row))
        torch.cuda.empty_cache()
        run.save()
    harness.say(f"{section['left_out']}\nwritten: {run.path}")


if __name__ == "__main__":
    main()
