"""The serving functions on a GPU, against the time in which it copies as many bytes.

    PYTHONPATH=. python3 benchmarks/serving.py      prints, and writes benchmarks/results/serving/<gpu>.json

Every figure is checked first: a wrong function is not timed. Steps are timed as launches in a CUDA graph, each on other
slots of a pool that no cache holds, so that what counts is the device's time, launch to launch. The floor of a step is
the time in which the device copies the bytes of the states that must be read and written; that of a prefill counts the
tokens' arrays too. Bandwidth is measured in the same run.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from torch.nn.functional import logsigmoid

from keraunos import decay, serving
from keraunos.ops.invocation import Config, UnsupportedError

EXAMPLE = Path(__file__).parents[1] / "examples" / "continuous_batching.py"
K = V = 128
# Bytes of a pool: more than the device's cache holds, several times.
POOL = 1 << 31
DRAFTS = 4


class Pool:
    """A pool of random states, and requests that use its slots in turn."""

    def __init__(self, heads: int, dtype: torch.dtype = torch.float32, transposed: bool = False):
        size = max(POOL // (heads * K * V * dtype.itemsize), 1)
        self.heads, self.itemsize = heads, dtype.itemsize
        states = torch.empty(size, heads, K, V, device="cuda", dtype=dtype)
        for part in states:
            part.normal_(std=0.1)
        self.states = states.transpose(-1, -2) if transposed else states
        self.order = torch.randperm(size, device="cuda").int()
        self.log_decay = torch.from_numpy(decay.minimax(heads, 5, 32)).cuda()

    def slots(self, n: int, turn: int) -> torch.Tensor:
        """n slots, others in every turn as far as there are others."""
        start = turn * n % (len(self.order) // n * n)
        return self.order[start : start + n]

    def tokens(self, *rows: int) -> list[torch.Tensor]:
        """q, k and v as slices of one projection."""
        fused = torch.randn(*rows, 3 * self.heads, K, device="cuda", dtype=torch.bfloat16)
        return list(fused.split(self.heads, -2))

    def gates(self, tokens: int) -> torch.Tensor:
        """A gate for each token and head, ``logsigmoid(normal) / 16``."""
        return (logsigmoid(torch.randn(tokens, self.heads, device="cuda")) / 16).bfloat16()

    def bytes(self, n: int) -> int:
        """Bytes of n requests' states."""
        return n * self.heads * K * V * self.itemsize


def device_seconds(call: Callable[[int], object], turns: int, rounds: int = 9) -> float:
    """Seconds of one of ``turns`` calls in a graph: the median over its replays."""

    def all_turns():
        for turn in range(turns):
            call(turn)

    replay = harness.captured(all_turns)
    # The first are for the clocks to rise.
    times = [harness.events(replay, cycles=200_000) for _ in range(2 * rounds)]
    return statistics.median(times[rounds:]) / turns


def host_seconds(call: Callable[[int], object], calls: int = 30) -> float:
    """Seconds for which a call keeps the host."""
    times = []
    for turn in range(calls):
        if turn % 10 == 0:
            torch.cuda.synchronize()
        times.append(harness.wall(lambda turn=turn: call(turn)))
    torch.cuda.synchronize()
    return statistics.median(times)


def check_steps(pool: Pool, cfg: Config | None = None) -> None:
    """Three requests' drafts, decoded one by one, verified and committed, against float64.

    Raises:
        AssertionError: one is wrong, or verify and decode differ in a bit.
    """
    q, k, v = pool.tokens(3, DRAFTS)
    slots = pool.slots(3, 1).clone()
    slots[1] = -1
    live = slots[[0, 2]].long()
    before = pool.states[live]
    state, truth = before.double(), []
    for t in range(DRAFTS):
        a, b, c = (x[[0, 2], t].double() for x in (q, k, v))
        state = pool.log_decay.double().exp()[:, None, None] * state + b[..., None] * c[..., None, :]
        truth.append((state * a[..., None]).sum(-2) * K**-0.5)
    options = dict(log_decay=pool.log_decay, cfg=cfg)
    verified = serving.verify(q, k, v, pool.states, slots, **options)
    assert torch.equal(pool.states[live], before), "verify changed the pool"
    counts = torch.full((3,), DRAFTS, device="cuda", dtype=torch.int32)
    serving.commit(k, v, pool.states, slots, counts, **options)
    committed = pool.states[live]
    pool.states[live] = before
    decoded = torch.stack(
        [serving.decode(q[:, t], k[:, t], v[:, t], pool.states, slots, **options)[0] for t in range(DRAFTS)], 1
    )
    assert not verified[1].any(), "a row of padding is not zero"
    rounding = 2.0**-7 if pool.itemsize == 2 else 2.0**-22
    for name, got, want, allowed in (
        ("verify", verified[[0, 2]], torch.stack(truth, 1), 2.0**-7), ("commit", committed, state, rounding),
        ("decode", decoded[[0, 2]], torch.stack(truth, 1), 2.0**-6), ("state", pool.states[live], state, 2 * rounding),
    ):
        error = harness.distance(got, want)
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
    if pool.itemsize == 4:
        assert torch.equal(verified, decoded), "verify and decode differ in a bit"
        assert torch.equal(committed, pool.states[live]), "commit and decode differ in a bit"


def steps(report: Callable, bandwidth: float, late: Callable[[], bool]) -> None:
    """decode, verify and commit."""
    pools: dict[object, Pool] = {}

    def pool_of(*kind):
        if kind not in pools:
            pools.clear()
            torch.cuda.empty_cache()
            pools[kind] = Pool(*kind)
            check_steps(pools[kind])
        return pools[kind]

    def one(name, kind, batch, bytes_moved, call, bar):
        if late():
            return None
        turns = max(min(64, (1 << 30) // max(bytes_moved, 1)), 4)
        seconds = device_seconds(call, turns)
        floor = bytes_moved / bandwidth
        report(name, heads=kind[0], pool=str(kind[1]).removeprefix("torch."), batch=batch, microseconds=seconds * 1e6,
               floor_microseconds=floor * 1e6, times_floor=seconds / floor, bar=bar)
        return seconds

    found = {}
    for kind, batch, bar in (
        ((64, torch.float32), 1, "6 µs"), ((64, torch.float32), 64, "1.12 x floor"),
        ((64, torch.float32), 256, "1.12 x floor"), ((64, torch.bfloat16), 256, "0.60 x float32"),
        ((8, torch.float32), 64, "1.3 x floor"), ((64, torch.float32, True), 64, "like [slots, H, K, V]"),
    ):
        pool = pool_of(*kind)
        q, k, v = pool.tokens(batch)
        slots = [pool.slots(batch, turn) for turn in range(64)]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)

        def call(turn, q=q, k=k, v=v, pool=pool, slots=slots, out=out):
            serving.decode(q, k, v, pool.states, slots[turn], log_decay=pool.log_decay, out=out)

        name = "decode" + (", [slots, H, V, K]" if len(kind) == 3 else "")
        found[kind, batch] = one(name, kind, batch, 2 * pool.bytes(batch), call, bar)
        if kind == (64, torch.float32) and batch == 64:
            report("decode, host", heads=64, batch=batch, microseconds=host_seconds(lambda turn: call(turn % 64)) * 1e6)
            drafts(one, kind, pool, found[kind, batch], slots, report)
    half, whole = found.get(((64, torch.bfloat16), 256)), found.get(((64, torch.float32), 256))
    if half and whole:
        report("decode, bfloat16 / float32 pool, batch 256", ratio=half / whole, bar="0.60")


def drafts(one, kind, pool, decode, slots, report) -> None:
    """verify and commit of DRAFTS tokens at batch 64."""
    q, k, v = pool.tokens(64, DRAFTS)
    counts = torch.full((64,), DRAFTS, device="cuda", dtype=torch.int32)

    def verify(turn):
        serving.verify(q, k, v, pool.states, slots[turn], log_decay=pool.log_decay)

    def commit(turn):
        serving.commit(k, v, pool.states, slots[turn], counts, log_decay=pool.log_decay)

    for name, call, moved, bar in (("verify", verify, 1, "1.6 x decode"), ("commit", commit, 2, "1.2 x decode")):
        seconds = one(f"{name}, {DRAFTS} drafts", kind, 64, moved * pool.bytes(64), call, bar)
        if seconds and decode:
            report(f"{name}, {DRAFTS} drafts / decode", ratio=seconds / decode, bar=bar)


def lengths() -> list[int]:
    """32 lengths from 16 to 4,096."""
    return torch.randint(16, 4097, (32,), generator=torch.Generator().manual_seed(0)).tolist()


def gates_of(pool: Pool, kind: str, tokens: int) -> dict[str, torch.Tensor | bool]:
    """The arguments of a call beside queries, keys and values: by a constant decay, gates per token, the delta rule."""
    if kind == "constant":
        return dict(log_decay=pool.log_decay)
    delta = dict(beta=torch.rand(tokens, pool.heads, device="cuda").bfloat16(), use_qk_l2norm=True)
    return dict(g=pool.gates(tokens)) | (delta if kind == "delta rule" else {})


def check_prefill(pool: Pool, kind: str, platform: str) -> None:
    """Two short prompts, one resumed, against the tokens decoded one by one.

    Raises:
        AssertionError: the results differ by more than rounding.
    """
    sizes = [130, 70]
    q, k, v = pool.tokens(sum(sizes))
    gates = gates_of(pool, kind, sum(sizes))
    cu = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], device="cuda", dtype=torch.int32)
    slots, other = pool.slots(2, 1), pool.slots(2, 2)
    has = torch.tensor([False, True], device="cuda")
    pool.states[slots[0].item()] = float("nan")
    pool.states[other.long()] = pool.states[slots.long()]
    pool.states[other[0].item()] = 0
    output, _ = serving.prefill(q, k, v, pool.states, slots, cu, **gates, has_initial=has, platform=platform)
    for n, (begin, size) in enumerate(zip(cu.tolist(), sizes, strict=False)):
        for t in range(begin, begin + size):
            one = slice(t, t + 1)
            own = gates | {name: gates[name][one] for name in ("g", "beta") if name in gates}
            want, _ = serving.decode(q[one], k[one], v[one], pool.states, other[n : n + 1], **own)
            if t >= begin + size - 3:
                error = harness.distance(output[t], want[0])
                assert error < 2.0**-6, f"prefill: token {t} of request {n} differs by {error:.2e}"
    error = harness.distance(pool.states[slots.long()], pool.states[other.long()])
    assert error < 2.0**-6, f"prefill: states differ by {error:.2e}"


def prefills(report: Callable, bandwidth: float, late: Callable[[], bool]) -> None:
    """Many prompts at once, with constant decays, gates per token, the delta rule, and one of as many tokens."""
    pool = Pool(64)
    total = sum(lengths())
    q, k, v = pool.tokens(total)
    out = torch.empty(total, pool.heads, V, device="cuda", dtype=q.dtype)
    kinds = {"32 requests": "constant", "32 requests, gates per token": "gates",
             "32 requests, delta rule": "delta rule"}
    for name, kind, sizes, platform in (
        *((name, kind, lengths(), platform) for name, kind in kinds.items() for platform in ("cuda", "triton")),
        ("1 request", "constant", [total], "auto"), ("1 request, delta rule", "delta rule", [total], "auto"),
    ):
        if late():
            return
        try:
            check_prefill(pool, kind, platform)
        except UnsupportedError as error:
            report(f"prefill, {name}", platform=platform, reason=harness.failure(error))
            continue
        cu = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], device="cuda", dtype=torch.int32)
        has = torch.ones(len(sizes), device="cuda", dtype=torch.bool)
        gates = gates_of(pool, kind, total)
        options = gates | dict(has_initial=has, out=out, platform=platform)

        def call(turn, cu=cu, has=has, options=options):
            serving.prefill(q, k, v, pool.states, pool.slots(len(has), turn), cu, **options)

        seconds = device_seconds(call, 4)
        moved = 4 * total * pool.heads * K * q.itemsize + 2 * pool.bytes(len(sizes))
        moved += sum(x.nbytes for name, x in gates.items() if name in ("g", "beta"))
        floor = moved / bandwidth
        report(f"prefill, {name}", heads=64, pool="float32", tokens=total, platform=platform,
               microseconds=seconds * 1e6, floor_microseconds=floor * 1e6, times_floor=seconds / floor)
        report(f"prefill, {name}, host", heads=64, platform=platform, microseconds=host_seconds(call) * 1e6)


def batching(report: Callable, late: Callable[[], bool], heads: int = 32, dim: int = K, longest: int = 2048) -> None:
    """The engine of examples/continuous_batching.py, host and all: 64 requests that come and go.

    Raises:
        AssertionError: replayed from a graph, its steps give other outputs.
    """
    found = importlib.util.spec_from_file_location("continuous_batching", EXAMPLE)
    example = sys.modules["continuous_batching"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    requests = example.random_requests(64, longest, heads, dim, device, dtype)
    log_decay, outputs = torch.from_numpy(decay.minimax(heads, 5, 32)), []
    for graph in (False, True) if device == "cuda" else (False,):
        if late():
            return
        engine = example.Engine(32, longest, 8, log_decay, dim, device, dtype, graph)
        tokens, steps, seconds = example.measure(engine, requests)
        outputs.append([torch.cat(request.outputs) for request in requests])
        assert all(map(torch.equal, outputs[0], outputs[-1])), "a graph's steps give other outputs"
        figures = dict(tokens_per_second=tokens / seconds, milliseconds_per_step=seconds / steps * 1e3)
        name = "continuous batching" + (", graph" if graph else "")
        report(name, heads=heads, requests=len(requests), tokens=tokens, steps=steps, **figures)


def main() -> None:
    options = harness.parser(__doc__, "serving", seconds=math.inf).parse_args()
    run = harness.Run(options, "torch")
    about = run.measured()
    run.results = {"about": about, "rows": []}

    def report(name, **figures):
        run.results["rows"].append(dict(name=name, **figures))
        shown = (
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
        )
        harness.say(f"{name}: {', '.join(shown)}")
        run.save()

    steps(report, about["copy_bandwidth"], lambda: run.late)
    prefills(report, about["copy_bandwidth"], lambda: run.late)
    batching(report, lambda: run.late)


if __name__ == "__main__":
    main()
