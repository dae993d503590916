"""The gated delta rule on a GPU: forward, gradients and decoding, against the time in which it copies as many bytes.

    PYTHONPATH=. python3 benchmarks/delta_rule.py      into benchmarks/results/delta_rule/<gpu>.json

A shape is batch, tokens, heads of queries and keys, heads of values; ``v`` after it: gates per dimension. ``packed`` in
place of batch and tokens: 32 sequences of 16 to 4,096 tokens. All is bfloat16, K = V = 128, gates are
``logsigmoid / 16``, beta a sigmoid, keys of length 1. Each is checked first, on 300 tokens in float64: what is wrong is
not timed. Times are medians of calls that follow each other, all contestants in turn; last, of calls that have loaded
the GPU for a minute ("hot"). The floor counts what must be read and written once: query, key, value, g, beta and
output, and for gradients these, the output's gradient and the five that come of it. Decoding is one launch from raw
gates on a pool of float32 states; its floor is that of reading and writing the states. It is compared with the kernel
of an engine, SGLang, where its package is there.
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from torch.nn.functional import logsigmoid, normalize

import keraunos
from keraunos import serving

K = V = 128
SHAPES = ("2,16384,64,64", "8,4096,32,32", "4,8192,16,32", "1,32768,16,64", "1,8192,16,32", "packed,16,32",
          "2,16384,64,64,v", "4,4096,32,32,v", "1,8192,64,64,v")
# Of these: with fla, which compiles for minutes; hot; and in JAX.
FLA, HOT, JAX = ("2,16384,64,64", "4,8192,16,32", "4,4096,32,32,v"), SHAPES[:1], ("2,16384,64,64", "4,8192,16,32")
STAGES = ("forward", False), ("forward + backward", True)
NAMES = ("query", "key", "value", "g", "beta")


def sizes(shape: str) -> tuple[int, int, int, int, bool, torch.Tensor | None]:
    """Batch, tokens, heads of queries and keys, of values, whether gates are per dimension, and ``cu_seqlens``."""
    *numbers, H, HV = shape.removesuffix(",v").split(",")
    ends = None
    if numbers == ["packed"]:
        lengths = torch.linspace(16, 4096, 32, device="cuda").int()
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        numbers = [1, int(lengths.sum())]
    B, T = map(int, numbers)
    return B, T, int(H), int(HV), shape.endswith("v"), ends


def inputs(B: int, T: int, H: int, HV: int, vector: bool) -> list[torch.Tensor]:
    """Query, key, value, g and beta."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, h, n, device="cuda", dtype=torch.bfloat16) for h, n in ((H, K), (H, K), (HV, V)))
    g = logsigmoid(torch.randn(*(B, T, HV, K)[: 3 + vector], device="cuda")) / 16
    return [q, normalize(k.float(), dim=-1).bfloat16(), v, g, torch.rand(B, T, HV, device="cuda").bfloat16()]


def fla() -> Callable:
    """The functions of flash-linear-attention, by the kind of gates."""
    scalar = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    vector = importlib.import_module("fla.ops.kda").chunk_kda
    return lambda *arrays, **more: (vector if arrays[3].ndim == 4 else scalar)(*arrays, **more)[0]


def contestant(name: str) -> Callable:
    """``(query, key, value, g, beta, cu_seqlens=) -> output`` of a platform of ours, or of fla."""
    return fla() if name == "fla" else partial(keraunos.gated_delta_rule, platform=name)


def contestants(platforms: list[str], with_fla: bool) -> list[str]:
    """The platforms, and fla where it is wanted and there."""
    return [*platforms, *(["fla"] if with_fla and importlib.util.find_spec("fla") else [])]


def both(call: Callable, arrays: list[torch.Tensor], do: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output and the gradients of all arrays."""
    given = [x.detach().requires_grad_() for x in arrays]
    output = call(*given)
    return output, *torch.autograd.grad(output, given, do)


def errors(call: Callable, H: int, HV: int, vector: bool, gradients: bool) -> dict[str, float]:
    """Relative errors on few tokens against the reference in float64."""
    arrays = inputs(1, 300, H, HV, vector)
    do = torch.randn(1, 300, HV, V, device="cuda", dtype=torch.bfloat16)
    wide = [x.double() for x in arrays]
    truth = both(lambda *x: keraunos.gated_delta_rule(*x, platform="torch"), wide, do.double())
    got = both(call, arrays, do) if gradients else (call(*arrays),)
    return dict(zip(("output", *NAMES), map(harness.distance, got, truth), strict=False))


def seconds(call: Callable, calls: int) -> float:
    """Seconds of one of some calls in a row."""
    return harness.events(call, calls, cycles=20_000_000)


def bytes_of(arrays: list[torch.Tensor], output: int, gradients: bool) -> int:
    """The bytes that must be read and written."""
    tokens = sum(x.nbytes for x in arrays)
    return tokens + output + (2 * tokens + output if gradients else 0)


def ready(name: str, shape: str, gradients: bool) -> tuple[Callable[[], Any], dict[str, float]]:
    """A call that has run once, and its errors on few tokens; raises if it was wrong."""
    B, T, H, HV, vector, ends = sizes(shape)
    call = contestant(name)
    off = errors(call, H, HV, vector, gradients)
    if not max(off.values()) < 2e-2:
        raise ValueError(f"errors {off}")
    arrays = inputs(B, T, H, HV, vector)
    do = torch.randn(B, T, HV, V, device="cuda", dtype=torch.bfloat16)
    whole = partial(call, cu_seqlens=ends)
    run = partial(both, whole, arrays, do) if gradients else partial(whole, *arrays)
    run()
    return run, off


def _ready(question: tuple[str, str, bool]) -> None:
    ready(*question)


def floor_of(shape: str, gradients: bool, bandwidth: float) -> float:
    """Seconds in which the GPU copies the bytes that must be read and written."""
    B, T, H, HV, vector, _ = sizes(shape)
    return bytes_of(inputs(B, T, H, HV, vector), B * T * HV * V * 2, gradients) / bandwidth


def one(report: Callable, shape: str, names: list[str], bandwidth: float, rounds: int) -> None:
    """Check and time a shape."""
    for stage, gradients in STAGES:
        calls, errors_of = {}, {}
        for name in names:
            try:
                calls[name], errors_of[name] = ready(name, shape, gradients)
            except Exception as error:  # what a peer or a platform says
                report(f"{shape}, {stage}, {name}", reason=harness.failure(error))
        torch.cuda.empty_cache()
        timers = {name: lambda run=run: seconds(run, 5) for name, run in calls.items()}
        floor = floor_of(shape, gradients, bandwidth)
        for name, found in harness.in_turns(timers, rounds).items():
            median = statistics.median(found)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            calls[name]()
            peak = torch.cuda.max_memory_allocated() - before
            report(f"{shape}, {stage}, {name}", milliseconds=median * 1e3, floor_milliseconds=floor * 1e3,
                   times_floor=median / floor, peak_bytes_beside_inputs=peak,
                   errors={of: float(f"{x:.2g}") for of, x in errors_of[name].items()})


def loaded(report: Callable, shape: str, name: str, bandwidth: float, rounds: int, load: float) -> None:
    """Time a shape at the end of seconds of load."""
    for stage, gradients in STAGES:
        (run, _), floor = ready(name, shape, gradients), floor_of(shape, gradients, bandwidth)
        begin, found = time.monotonic(), []
        while time.monotonic() - begin < load or len(found) < rounds:
            found.append(seconds(run, 100))
        median = statistics.median(found[-rounds:])
        report(f"{shape}, {stage}, {name}, hot", milliseconds=median * 1e3, times_floor=median / floor)


def with_jax(report: Callable, shape: str, platforms: list[str], bandwidth: float) -> None:
    """Time a shape in JAX, of which the values are those that the tests hold to the reference."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.mosaic.gpu import profiler

    B, T, H, HV, vector, ends = sizes(shape)
    given = inputs(B, T, H, HV, vector)
    floors = [floor_of(shape, gradients, bandwidth) for gradients in (False, True)]
    ends = None if ends is None else jnp.asarray(ends.cpu().numpy())
    arrays = [jnp.asarray(x.float().cpu().numpy()).astype(str(x.dtype).removeprefix("torch.")) for x in given]
    del given
    torch.cuda.empty_cache()
    for name in platforms:
        def forward(*arrays, name=name):
            return keraunos.gated_delta_rule(*arrays, cu_seqlens=ends, platform=name)

        def gradients(*arrays, forward=forward):
            output, pull = jax.vjp(forward, *arrays)
            return output, pull(output)

        for (stage, _), call, floor in zip(STAGES, (forward, gradients), floors, strict=True):
            try:
                _, found = profiler.measure(jax.jit(call), iterations=10)(*arrays)
                median = statistics.median(found)
                report(f"{shape}, {stage}, {name} (jax)", milliseconds=median, floor_milliseconds=floor * 1e3,
                       times_floor=median / floor / 1e3)
            except Exception as error:
                report(f"{shape}, {stage}, {name} (jax)", reason=harness.failure(error))


def engine() -> Callable | None:
    """SGLang's decoding step of packed projections, if its package is there."""
    try:
        return importlib.import_module("sglang.kernels.ops.attention.fla.fused_recurrent"
                                       ).fused_recurrent_gated_delta_rule_packed_decode
    except ImportError:
        return None


def decoding(report: Callable, batch: int, bandwidth: float, H: int = 16, HV: int = 32) -> None:
    """One token of each of a batch of requests, from raw gates, on other slots of the pool in every turn."""
    size = max(2 * batch, (1 << 31) // (HV * K * V * 4))
    states = torch.randn(size, HV, V, K, device="cuda") / 10
    order = torch.randperm(size, device="cuda").int()
    fused = torch.randn(batch, 2 * H * K + HV * V, device="cuda", dtype=torch.bfloat16)
    q, k, v = fused.split([H * K, H * K, HV * V], -1)
    q, k, v = (x.unflatten(-1, (-1, K)) for x in (q, k, v))
    a, b = (torch.randn(batch, HV, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    A_log, dt_bias = torch.rand(HV, device="cuda"), torch.randn(HV, device="cuda")
    turns = size // batch
    slots = [order[n * batch : (n + 1) * batch] for n in range(turns)]
    out = torch.empty(batch, HV, V, device="cuda", dtype=torch.bfloat16)

    def ours(turn):
        serving.decode(q, k, v, states, slots[turn], a=a, b=b, A_log=A_log, dt_bias=dt_bias, use_qk_l2norm=True,
                       state_v_first=True, out=out)

    calls: dict[str, Callable] = {"keraunos": ours}
    other = engine()
    if other:
        theirs = torch.empty(batch, 1, HV, V, device="cuda", dtype=torch.bfloat16)
        calls["sglang"] = lambda turn: other(fused, a, b, A_log, dt_bias, K**-0.5, states, theirs, slots[turn], True)
        before = states.clone()
        ours(0)
        ended = states[slots[0].long()]
        states.copy_(before)
        del before
        calls["sglang"](0)
        off = harness.distance(out, theirs[:, 0]), harness.distance(ended, states[slots[0].long()])
        report(f"decode, batch {batch}, difference from sglang", output=off[0], state=off[1])
    replays = {}
    for name, call in calls.items():
        replays[name] = harness.captured(lambda call=call: [call(turn) for turn in range(turns)])
    timers = {name: lambda replay=replay: harness.events(replay, cycles=200_000) / turns
              for name, replay in replays.items()}
    harness.in_turns(timers, 5)
    floor = 2 * batch * HV * K * V * 4 / bandwidth
    for name, found in harness.in_turns(timers, 9).items():
        median = statistics.median(found)
        report(f"decode, batch {batch}, {name}", microseconds=median * 1e6, floor_microseconds=floor * 1e6,
               times_floor=median / floor)


def main() -> None:
    parser = harness.parser(__doc__, "delta_rule", seconds=math.inf)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), metavar="B,T,H,HV[,v]")
    parser.add_argument("--platforms", nargs="+", default=["cuda", "triton"], metavar="NAME", help="of ours")
    parser.add_argument("--fla", nargs="*", default=list(FLA), metavar="SHAPE", help="fla")
    parser.add_argument("--hot", nargs="*", default=list(HOT), metavar="SHAPE", help="the first platform after load")
    parser.add_argument("--jax", nargs="*", default=list(JAX), metavar="SHAPE", help="the first platform in JAX")
    parser.add_argument("--decode", nargs="*", type=int, default=[64, 256], metavar="BATCH")
    parser.add_argument("--rounds", type=int, default=9, help="times that each is timed")
    parser.add_argument("--load", type=float, default=60.0, help="seconds of load for what is hot")
    options = parser.parse_args()
    harness.require_gpu(parser)
    run = harness.Run(options, "torch")
    names = {shape: contestants(options.platforms, shape in options.fla) for shape in options.shapes}
    harness.side_by_side(_ready, [(name, shape, gradients) for shape in options.shapes for gradients in (False, True)
                                  for name in names[shape]])
    about = run.measured()
    run.results = {"about": about, "rows": []}

    def report(name: str, **figures: Any) -> None:
        run.results["rows"].append(dict(name=name, **figures))
        harness.say(f"{name}: " + ", ".join(f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}"
                                            for key, x in figures.items()))
        run.save()

    bandwidth = about["copy_bandwidth"]
    for batch in options.decode:
        decoding(report, batch, bandwidth)
        torch.cuda.empty_cache()
    for shape in options.shapes:
        if not run.late:
            one(report, shape, names[shape], bandwidth, options.rounds)
    for shape in options.jax:
        if not run.late:
            with_jax(report, shape, options.platforms[:1], bandwidth)
    # Last: it heats the GPU.
    for shape in options.hot:
        if not run.late:
            loaded(report, shape, options.platforms[0], bandwidth, options.rounds, options.load)


if __name__ == "__main__":
    main()
