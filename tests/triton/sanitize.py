"""Run every Triton kernel in every tile size that can be selected, on small shapes, for compute-sanitizer to watch.

``python -m tests.triton.sanitize build`` builds them, in parallel; ``run`` runs them, forward and backward, in one
process; ``planted`` runs a kernel with faults of both kinds, which the tools must find.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import torch
import triton
import triton.language as tl

from keraunos import frontends, serving
from keraunos.kernels.device import sums
from keraunos.kernels.linear_attention import contract, stretches
from keraunos.kernels.linear_attention.triton import call as triton_call
from keraunos.kernels.linear_attention.triton import chunks
from keraunos.kernels.linear_attention.triton import passes as platform
from keraunos.kernels.linear_attention.triton import scan as triton_kernels
from keraunos.kernels.linear_attention.triton import stretches as triton_stretches
from keraunos.kernels.state_pool.triton import steps
from keraunos.ops import Config
from tests.sanitizer import limit_time

# dtype, T, K, V, gate, packed, every tile (or the heuristic's only). Two chunks of the longest, and a shorter one; the
# long ones are cut into segments, and of one gradients walk these in pairs.
CALLS = [
    ("bfloat16", 150, 128, 128, None, True, True),
    ("bfloat16", 150, 128, 128, "scalar", False, True),
    ("bfloat16", 150, 128, 128, "vector", False, True),
    ("bfloat16", 1100, 64, 64, "scalar", True, False),
    ("bfloat16", 1100, 64, 64, "vector", False, False),
    ("bfloat16", 1100, 128, 128, "vector", False, False),
    ("float16", 150, 192, 256, "vector", True, False),
    ("float32", 150, 64, 64, "scalar", True, False),
    ("float32", 150, 64, 64, "vector", False, False),
]
# Of the serving functions: function, dtype, dtype of the pool, K, V, gate.
SERVING = [
    (op, *kinds)
    for op in ("decode", "verify", "commit", "prefill")
    for kinds in (
        ("bfloat16", "float32", 128, 128, None), ("float16", "bfloat16", 48, 80, "vector"),
        ("float32", "float32", 64, 32, "scalar"),
    )
]
# Of what devices that share a sequence tell each other: dtype, K, V, gate.
ENDS = [("bfloat16", 128, 128, None), ("float16", 256, 256, "scalar"), ("float32", 128, 64, "vector")]
H, DEVICE = 2, "cuda"
FILES = chunks, triton_kernels, steps, sums
KERNELS = {name for file in FILES for name in vars(file) if name.endswith("_kernel")}


def arguments(dtype, T, K, V, gate, packed, _) -> contract.Args:
    def normal(*shape):
        return torch.randn(shape, device=DEVICE).to(getattr(torch, dtype))

    g = {None: None, "scalar": (1, T, H), "vector": (1, T, H, K)}[gate]
    offsets = torch.tensor([0, 40, T], dtype=torch.int32, device=DEVICE) if packed else None
    return contract.Args(
        normal(1, T, H, K), normal(1, T, 1, K), normal(1, T, 1, V), None if g is None else -normal(*g).abs(),
        torch.full((H,), -0.1, device=DEVICE), torch.randn(2 if packed else 1, H, K, V, device=DEVICE), offsets,
    )


def configurations(call) -> list[Config]:
    """One configuration for each tile size that a call can have: the heuristic's, and the shallowest of the others."""
    inv = contract.GLA.describe(arguments(*call))
    heuristic = platform.heuristic(inv, Config())
    found = [heuristic, *(platform.candidates(inv, heuristic) if call[-1] else ())]
    return list({(cfg.block_q, cfg.block_d, cfg.num_warps): cfg for cfg in reversed(found)}.values())


@contextlib.contextmanager
def launches():
    """The names of the kernels that are launched."""
    real, launched = frontends.launch, set()

    def launch(kernel, *args, **options):
        launched.add(kernel.__name__)
        return real(kernel, *args, **options)

    with mock.patch.object(frontends, "launch", launch):
        yield launched


def run(call, cfg: Config) -> set[str]:
    """Forward and backward; the kernels that they launched."""
    args, opts = arguments(*call), contract.Options(0.1, False, cfg)
    # Gradients in parts, and in pairs of segments, which longer calls have.
    least = dict(_MIN_PART=1, _MIN_SEGMENT_PART=2)
    with launches() as launched, mock.patch.multiple(triton_call, **least):
        outputs, residuals = platform.forward(args, opts)
        platform.backward(args, residuals, outputs, opts)
    return launched


def serve(op, dtype, pool, K, V, gate) -> set[str]:
    """A serving function on the first and the last slot of a pool and on padding; the kernels that it launched."""
    def normal(*shape, dtype=dtype):
        return torch.randn(shape, device=DEVICE).to(getattr(torch, dtype))

    def indices(*values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    rows = {"decode": (3,), "prefill": (150,)}.get(op, (3, 4))
    g = {None: None, "scalar": (*rows, H), "vector": (*rows, H, K)}[gate]
    tokens = normal(*rows, H, K), normal(*rows, 1, K), normal(*rows, 1, V)
    pool, slots = (normal(5, H, K, V, dtype=pool), indices(0, -1, 4))
    options = dict(g=None if g is None else -normal(*g).abs(), g_gamma=[-0.1] * H, platform="triton")
    with launches() as launched:
        if op == "commit":
            serving.commit(*tokens[1:], pool, slots, indices(4, 2, 1), **options)
        elif op == "prefill":
            boundaries = indices(3, 66, 149), indices(1, 2, 3)
            has_initial = torch.tensor([True, True, False], device=DEVICE)
            serving.prefill(*tokens, pool, slots, indices(0, 70, 80, 144), has_initial=has_initial,
                            boundaries=boundaries, **options)
        else:
            getattr(serving, op)(*tokens, pool, slots, **options)
    return launched


def leave(dtype, K, V, gate) -> set[str]:
    """The states that a stretch leaves, either way, and those that its segments start from; the kernels."""
    args = arguments(dtype, 300, K, V, gate, False, False)
    x, plan = (
        stretches.Stretch(args.key, args.value, args.g, args.g_gamma),
        torch.tensor([0, 300, 1, 1], dtype=torch.int32),
    )
    way, plan = stretches.Way(H, True, False), plan.to(DEVICE)
    with launches() as launched, mock.patch.multiple(triton_call, _MIN_PIECE=64):
        for to in (way, way.adjoint):
            triton_stretches.call_of_stretch.cache_clear()
            stretches.leave(x, args.initial_state, plan, to)
            left, *pieces = stretches.leave(x, args.initial_state, plan, to, segment=128)
            sizes = (*args.initial_state.shape,)
            stretches.arrive(torch.stack([left, left]), args.initial_state, plan, to, sizes, pieces, 128)
    return launched


@triton.jit
def planted_kernel(x, n: tl.constexpr):
    """Writes past the end of x, and lets two warps write different values to one place in shared memory."""
    o = tl.arange(0, n)
    values = tl.load(x + o)
    tl.store(x + o + n, values)
    address = tl.sum(tl.full([n], 0, tl.int32))
    asm: tl.constexpr = "st.shared.u32 [$1], $2; mov.u32 $0, $2;"
    tl.inline_asm_elementwise(asm, "=r,r,r", [address + o * 0, o], tl.int32, is_pure=False, pack=1)


def main(what: str) -> None:
    if what == "planted":
        planted_kernel[(1,)](torch.zeros(128, device="cuda", dtype=torch.int32), 128)
        torch.cuda.synchronize()
        return
    pairs = [(call, cfg) for call in CALLS for cfg in configurations(call)]
    if what == "build":
        with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
            others = [*pool.map(serve, *zip(*SERVING, strict=True)), *pool.map(leave, *zip(*ENDS, strict=True))]
            launched = set().union(*pool.map(run, *zip(*pairs, strict=True)), *others)
    else:
        others = [*(serve(*call) for call in SERVING), *(leave(*call) for call in ENDS)]
        launched = set().union(*(run(*pair) for pair in pairs), *others)
        torch.cuda.synchronize()
    print(f"{len(pairs) + len(SERVING) + len(ENDS)} configurations of {sorted(launched)}")
    if launched != KERNELS:
        raise SystemExit(f"launched {sorted(launched)}; there are {sorted(KERNELS)}")


if __name__ == "__main__":
    limit_time()
    main(sys.argv[1])
