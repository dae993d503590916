"""Compile the Triton kernels ahead of time, as the host code would launch them on a GPU, and report their resources.

``python -m tests.triton.compile`` writes what it finds to ``chips/*.json``: one to ten seconds of a processor for each
of some 1,500 builds, of which it makes those that have changed since; with names of chips it writes theirs only. After
a change of a kernel, or of what is chosen for a chip, that is all there is to do: ``test_compile.py`` says when.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources

from keraunos import frontends
from keraunos.distributed.torch import peers as torch_peers
from keraunos.kernels.gated_delta_rule import contract as delta_contract
from keraunos.kernels.gated_delta_rule.triton import passes as delta_platform
from keraunos.kernels.linear_attention import contract, stretches
from keraunos.kernels.linear_attention.triton import passes as platform
from keraunos.kernels.softmax_attention import contract as softmax_contract
from keraunos.kernels.softmax_attention.triton import passes as softmax_platform
from keraunos.kernels.state_pool import contract as pool_contract
from keraunos.kernels.state_pool.triton import passes as pool_platform
from keraunos.ops import Config
from tests.triton.usage import usage

RECORDS, RECORDED_WITH = Path(__file__).with_name("chips"), "3.6.0"
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int64": "i64", "int32": "i32", "int8": "i8",
         "bool": "i1"}

# Name -> (dtype, K, V, heads of q, heads of k, gate, gamma, batch, tokens, packed)
CALLS = {
    "lightning": ("bfloat16", 128, 128, 64, 64, None, True, 2, 16384, False),
    "lightning, few heads, shared keys, packed": ("bfloat16", 128, 128, 8, 2, None, True, 1, 65536, True),
    "lightning, wide": ("bfloat16", 256, 256, 32, 32, None, True, 1, 4096, False),
    "lightning, float32": ("float32", 128, 128, 64, 64, None, True, 1, 4096, False),
    "lightning, float32, wide": ("float32", 256, 64, 4, 4, None, True, 1, 4096, False),
    "scalar gates": ("bfloat16", 128, 128, 64, 64, "scalar", False, 2, 16384, False),
    "vector gates": ("bfloat16", 128, 128, 64, 64, "vector", False, 2, 16384, False),
    "vector gates, few heads": ("bfloat16", 128, 128, 8, 8, "vector", False, 1, 32768, False),
    "vector gates, no tokens": ("bfloat16", 128, 128, 2, 2, "vector", False, 2, 0, False),
    "vector gates, float16, wide": ("float16", 256, 96, 32, 32, "vector", True, 1, 4096, False),
}
# Name -> (function, dtype, dtype of the pool, K, V, heads of q, heads of k, gate, requests, tokens or drafts, exports)
SERVING = {
    "decode": ("decode", "bfloat16", "float32", 128, 128, 64, 64, None, 64, 1, 0),
    "decode, bfloat16 pool, vector gates": ("decode", "bfloat16", "bfloat16", 128, 128, 64, 8, "vector", 256, 1, 0),
    "verify": ("verify", "bfloat16", "float32", 128, 128, 64, 64, None, 64, 4, 0),
    "verify, exports": ("verify", "bfloat16", "bfloat16", 128, 128, 64, 64, None, 64, 4, 1),
    "decode, delta rule": ("decode", "bfloat16", "float32", 128, 128, 32, 16, "delta", 64, 1, 0),
    "verify, delta rule, vector gates": ("verify", "bfloat16", "bfloat16", 128, 128, 32, 32, "delta, vector", 64, 4, 1),
    "commit, wide": ("commit", "float16", "float32", 256, 256, 16, 16, "scalar", 64, 4, 0),
    "prefill": ("prefill", "bfloat16", "float32", 128, 128, 64, 64, None, 32, 65536, 0),
    "prefill, exports": ("prefill", "bfloat16", "float32", 128, 128, 64, 64, None, 32, 65536, 100),
    "prefill, few heads": ("prefill", "bfloat16", "float32", 128, 128, 8, 8, None, 2, 65536, 0),
    "prefill, vector gates": ("prefill", "bfloat16", "bfloat16", 128, 128, 64, 64, "vector", 32, 65536, 100),
}
# Name -> (dtype, K, V, heads of q, heads of k, heads of a bias, a mask, sinks, segment ids, options); "offset" is one
# of them that stands for an array.
SOFTMAX = {
    "attention, causal, soft cap, sinks, segments": (
        "bfloat16", 128, 128, 16, 16, 0, 0, 4, True, {"causal": True, "soft_cap": 30.0}),
    "attention, causal, shared keys": ("bfloat16", 128, 128, 64, 8, 0, 0, 0, False, {"causal": True}),
    "attention, soft cap, shared keys, segments": ("bfloat16", 128, 128, 64, 8, 0, 0, 0, True, {"soft_cap": 30.0}),
    "attention, wide, shared keys, mask, window": ("float16", 256, 192, 16, 2, 0, 1, 0, False, {"window": (1023, 0)}),
    "attention, bias, dropout": ("bfloat16", 128, 128, 16, 16, 1, 0, 0, False, {"dropout": 0.1}),
    "attention, float32, wide, bias": ("float32", 256, 256, 16, 16, 16, 0, 0, False, {"causal": True}),
    "attention, causal, offsets, shared keys, window": (
        "bfloat16", 128, 128, 64, 8, 0, 0, 0, False, {"causal": True, "window": (1023, 0), "offset": True}),
    "attention, causal, offsets, bias": (
        "bfloat16", 128, 128, 16, 16, 1, 0, 0, False, {"causal": True, "offset": True}),
}

# Name -> (dtype, K, V, heads of q, heads of k, gate, gamma): what devices that share a sequence tell each other.
ENDS = {
    "ends, lightning": ("bfloat16", 128, 128, 16, 16, None, True),
    "ends, scalar gates, wide": ("float16", 256, 256, 16, 2, "scalar", True),
    "ends, vector gates": ("bfloat16", 128, 128, 16, 16, "vector", False),
    "ends, vector gates, float32": ("float32", 128, 64, 16, 16, "vector", False),
}

# Name -> (dtype, K, V, heads of q and k, of v, gate, norm, batch, tokens, packed)
DELTA = {
    "delta rule": ("bfloat16", 128, 128, 16, 32, "scalar", True, 4, 8192, False),
    "delta rule, few heads, packed": ("bfloat16", 128, 128, 4, 8, "scalar", False, 1, 32768, True),
    "delta rule, vector gates": ("bfloat16", 128, 128, 32, 32, "vector", False, 4, 4096, False),
    "delta rule, float16, wide": ("float16", 256, 256, 16, 16, None, False, 1, 4096, False),
    "delta rule, float32, vector gates": ("float32", 128, 64, 16, 16, "vector", False, 1, 4096, False),
}

# Name -> (ranks, this one): GPUs of one host that write into each other's memory.
PEERS = {"exchange, the first of 4": (4, 0), "exchange, in the middle of 8": (8, 3)}

# Further calls: the largest tiles, and what comes with them.
CALLS_ON_CHIPS = {
    "vector gates, float32": ("float32", 128, 128, 8, 8, "vector", True, 1, 4096, False),
    "scalar gates, float32, wide": ("float32", 256, 256, 4, 4, "scalar", False, 1, 4096, False),
}
SERVING_ON_CHIPS = {
    "prefill, float32, wide, vector gates": ("prefill", "float32", "float32", 256, 256, 16, 16, "vector", 2, 4096, 9),
}
SOFTMAX_ON_CHIPS = {
    "attention, wide, bias, dropout": ("bfloat16", 256, 256, 16, 16, 1, 0, 0, False, {"dropout": 0.1}),
    "attention, float32, shared keys, soft cap, sinks, segments": (
        "float32", 128, 128, 16, 4, 0, 0, 4, True, {"causal": True, "soft_cap": 30.0}),
}
ON_CHIPS = (*CALLS, *SERVING, *SOFTMAX, *ENDS, *DELTA, *CALLS_ON_CHIPS, *SERVING_ON_CHIPS, *SOFTMAX_ON_CHIPS)


class Chip(NamedTuple):
    """The properties of a GPU."""

    kind: str  # as the frameworks name it
    target: GPUTarget
    shared: int  # bytes of shared memory that a program may have

    @property
    def overlaps(self) -> bool:
        """Whether a launch can begin before the one before it has ended."""
        return self.target.backend == "cuda" and self.target.arch >= 90


CHIPS = {
    "sm_90": Chip("NVIDIA H200", GPUTarget("cuda", 90, 32), 232448),
    "sm_80": Chip("NVIDIA A100", GPUTarget("cuda", 80, 32), 166912),
    "sm_86": Chip("NVIDIA GeForce RTX 3090", GPUTarget("cuda", 86, 32), 101376),
    "sm_89": Chip("NVIDIA GeForce RTX 4090", GPUTarget("cuda", 89, 32), 101376),
    "sm_100": Chip("NVIDIA B200", GPUTarget("cuda", 100, 32), 232448),
    "sm_120": Chip("NVIDIA GeForce RTX 5090", GPUTarget("cuda", 120, 32), 101376),
    "gfx942": Chip("AMD Instinct MI300X", GPUTarget("hip", "gfx942", 64), 65536),
}


HOPPER = CHIPS["sm_90"]


def calls_of(name: str) -> tuple[str, ...]:
    """The calls that are recorded for a chip: GPUs write into each other's memory on Hopper only."""
    return (*ON_CHIPS, *PEERS) if name == "sm_90" else ON_CHIPS


@contextlib.contextmanager
def on(chip):
    """Arrays are on such a GPU."""
    device = frontends.Device("gpu", chip.kind, chip.shared)
    with mock.patch.object(frontends.get("torch"), "device_of", return_value=device):
        yield


class Build(NamedTuple):
    """The source that Triton builds."""

    source: ASTSource
    options: dict[str, int]

    def identity(self, chip) -> str:
        """Its identity: a hash, also of the compiler and all functions that the kernel calls."""
        source, functions = self.source, sorted(functions_of(self.source.fn))
        parts = [source.signature, sorted(source.constants.items()), sorted(source.attrs.items()), self.options]
        parts.append(triton.__version__)
        return hashlib.sha256(repr((functions, parts, chip.target)).encode()).hexdigest()[:12]

    def resources(self, chip) -> dict[str, int]:
        """Registers, bytes of stack (spills) and of shared memory."""
        return usage(triton.compile(self.source, target=chip.target, options=self.options))


@functools.cache
def functions_of(fn) -> frozenset[str]:
    """The source, without comments and docstrings, of a kernel and of all that it calls; their constants."""
    tree, names = ast.parse(fn.src), fn.fn.__code__.co_names
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    known = {name: fn.fn.__globals__[name] for name in names if name in fn.fn.__globals__}
    constants = {f"{name} = {x}" for name, x in known.items() if isinstance(x, triton.language.constexpr)}
    called = [functions_of(x) for x in known.values() if isinstance(x, triton.JITFunction)]
    return frozenset(constants | {ast.unparse(tree)}).union(*called)


def build_of(kernel, inputs, made, constants, num_warps, num_stages) -> Build:
    """The build of a launch."""
    names = kernel.arg_names
    signature, fixed, attrs = dict.fromkeys(names, "constexpr"), dict(constants), {}
    for i, (name, x) in enumerate(zip(names, [*inputs.values(), *made], strict=False)):
        if isinstance(x, torch.Tensor):
            signature[name] = "*" + TYPES[str(x.dtype).removeprefix("torch.")]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(x, float):
            signature[name] = "fp32"
        elif x is None or x == 1:
            fixed[name] = x
        else:
            signature[name] = "i32" if x < 2**31 else "i64"
            if x % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {(names.index(name),): x for name, x in fixed.items()}, attrs)
    return Build(source, dict(num_warps=num_warps, num_stages=num_stages))


class Recorded:
    """The resources of kernels on a chip, with as many stages as it has shared memory for."""

    def __init__(self, chip, record, building=True):
        # What has been built before, by its identity.
        self.chip, self.building = chip, building
        self.known = {row["build"]: row for kernels in record.values() for row in kernels.values()}

    def __call__(self, *launched) -> dict[str, int]:
        """Of what was built before, those that were found then; of other builds none, unless they are to be made."""
        build = build_of(*launched)
        identity = build.identity(self.chip)
        if identity in self.known or not self.building:
            return self.known.get(identity, {"build": identity})

        def fitting(num_stages):
            found = build._replace(options={**build.options, "num_stages": num_stages}).resources(self.chip)
            if found["shared"] > self.chip.shared:
                raise OutOfResources(found["shared"], self.chip.shared, "shared memory")
            return {"build": identity, **build.options, "num_stages": num_stages, **found}

        kernel, _, _, _, _, num_stages = launched
        self.known[identity] = frontends.in_shared_memory(fitting, kernel.__name__, num_stages)
        return self.known[identity]


def measure(call: str, chip: Chip, find: Callable) -> dict[str, dict[str, int]]:
    """The resources of every kernel that a call's forward and backward launch; several builds of one are numbered."""
    found: dict[str, dict[str, int]] = {}
    known = set()

    def launch(kernel, grid, inputs, outputs, constants, *, num_warps, num_stages):
        made = [empty(*o[0], dtype=o[1]) if isinstance(o, tuple) else o and inputs[o] for o in outputs.values()]
        if 0 in grid:
            return tuple(made)
        kinds = [x.dtype if isinstance(x, torch.Tensor) else x for x in (*inputs.values(), *made)]
        kinds = [(x == 1, x % 16 == 0) if isinstance(x, int) else x for x in kinds]
        if not chip.overlaps and "OVERLAP" in constants:
            constants = {**constants, "OVERLAP": 0}
        build = str((kernel.__name__, kinds, constants, num_warps, num_stages))
        if build in known:
            return tuple(made)
        known.add(build)
        number = sum(name.startswith(kernel.__name__) for name in found)
        found[f"{kernel.__name__} {number}"] = find(kernel, inputs, made, constants, num_warps, num_stages)
        return tuple(made)

    kinds = [(serve, SERVING), (soften, SOFTMAX), (leave, ENDS), (exchange, PEERS), (correct, DELTA), (attend, CALLS)]
    kinds += [(serve, SERVING_ON_CHIPS), (soften, SOFTMAX_ON_CHIPS), (attend, CALLS_ON_CHIPS)]
    make, sizes = next((fn, calls[call]) for fn, calls in kinds if call in calls)
    with launching(launch), on(chip):
        make(*sizes)
    return found


def recorded(name) -> dict[str, dict[str, dict]]:
    """The recorded resources of a chip."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def record(names) -> None:
    """Build what is not in the records of these chips yet, on all processors, and write them."""
    calls = [(name, call) for name in names for call in calls_of(name)]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(calls, pool.map(rebuild, *zip(*calls, strict=True)), strict=True))
    for name in names:
        write(name, {call: found[name, call] for call in calls_of(name)})


def rebuild(name, call) -> dict[str, dict[str, int]]:
    """The resources of a call's kernels on a chip, those that have changed since they were recorded."""
    return measure(call, CHIPS[name], Recorded(CHIPS[name], recorded(name)))


def write(name, found) -> None:
    """The record of a chip, a line for each kernel."""
    calls = []
    for call, kernels in found.items():
        rows = [f"  {json.dumps(kernel)}: {json.dumps(used)}" for kernel, used in kernels.items()]
        calls.append(f" {json.dumps(call)}: {{\n" + ",\n".join(rows) + "\n }")
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{name}.json").write_text("{\n" + ",\n".join(calls) + "\n}\n")


@contextlib.contextmanager
def launching(launch):
    """Kernels are launched by this function."""
    with mock.patch.object(frontends, "launch", launch):
        yield


def empty(*shape, dtype):
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def attend(dtype, K, V, H, G, gate, gamma, B, T, packed) -> None:
    """A call of linear attention, forward and backward."""
    args = contract.Args(
        empty(B, T, H, K, dtype=dtype), empty(B, T, G, K, dtype=dtype), empty(B, T, G, V, dtype=dtype),
        {None: None, "scalar": empty(B, T, H, dtype=dtype), "vector": empty(B, T, H, K, dtype=dtype)}[gate],
        empty(H, dtype="float32") if gamma else None,
        None, empty(9, dtype="int32") if packed else None,
    )
    cfg = platform.heuristic(contract.GLA.describe(args), Config())
    opts = contract.Options(K**-0.5, False, cfg, ("g_gamma",) if gate is None else ())
    _, residuals = platform.forward(args, opts)
    platform.backward(args, residuals, (empty(B, T, H, V, dtype=dtype), None), opts)


def correct(dtype, K, V, G, H, gate, norm, B, T, packed) -> None:
    """A call of the gated delta rule, forward and backward."""
    args = delta_contract.Args(
        empty(B, T, G, K, dtype=dtype), empty(B, T, G, K, dtype=dtype), empty(B, T, H, V, dtype=dtype),
        {None: None, "scalar": empty(B, T, H, dtype="float32"), "vector": empty(B, T, H, K, dtype="float32")}[gate],
        empty(B, T, H, dtype=dtype), None, empty(9, dtype="int32") if packed else None,
    )
    cfg = delta_platform.heuristic(delta_contract.GATED_DELTA_RULE.describe(args), Config())
    opts = delta_contract.Options(K**-0.5, False, cfg, use_qk_l2norm=norm)
    delta_platform.forward(args, opts)
    delta_platform.backward(args, (), (empty(B, T, H, V, dtype=dtype), None), opts)


def leave(dtype, K, V, H, G, gate, gamma, B=1, T=32768) -> None:
    """The state that a stretch of a sequence leaves, and the one that arrives from others."""
    x = stretches.Stretch(
        empty(B, T, G, K, dtype=dtype), empty(B, T, G, V, dtype=dtype),
        {None: None, "scalar": empty(B, T, H, dtype=dtype), "vector": empty(B, T, H, K, dtype=dtype)}[gate],
        empty(H, dtype="float32") if gamma else None,
    )
    start, plan, way = empty(B, H, K, V, dtype="float32"), empty(4, dtype="int32"), stretches.Way(H, True, False)
    for to in (way, way.adjoint):
        platform.leave(x, start, plan, to, 0, 1)
        left = empty(8, B * H * (K * V + (K if gate == "vector" else 1)), dtype="float32")
        platform.arrive(left, start, plan, to, (B, H, K, V))
        _, *pieces = platform.leave(x, start, plan, to, 4096, 1)
        platform.arrive(left, start, plan, to, (B, H, K, V), *pieces, 4096)


def exchange(size, rank) -> None:
    """The exchanges of ranks without a collective."""
    peers = object.__new__(torch_peers.Peers)
    peers.size, peers.rank = size, rank
    peers.programs, peers.patience, peers.stream, peers.late = 132, 600, None, torch.zeros(1).int()
    x = empty(16 * (128 * 128 + 1), dtype="float32")
    own, addresses = empty(1 << 24, dtype="float32"), empty(peers.size, dtype="int64")
    peers.memory = {peers.place(len(x)): (own, addresses, empty(2, peers.programs, dtype="int32"))}
    for right in (True, False):
        peers._gather(right, [x])


def soften(dtype, K, V, H, G, bias, mask, sinks, segments, options, B=2, T=8192, S=4096) -> None:
    """A call of softmax attention, forward and backward."""

    def array(*shape, wanted=1, dtype=dtype):
        return empty(*shape, dtype=dtype) if wanted else None

    args = softmax_contract.Args(
        array(B, T, H, K), array(B, S, G, K), array(B, S, G, V), array(B, bias, T, S, wanted=bias),
        array(H, sinks, wanted=sinks, dtype="float32"), array(B, mask, T, S, wanted=mask, dtype="bool"),
        array(B, T, wanted=segments, dtype="int32"), array(B, S, wanted=segments, dtype="int32"),
        array(2, wanted="dropout" in options, dtype="int32"), array(B, wanted="offset" in options, dtype="int32"),
    )
    given = {"soft_cap": None, "causal": False, "window": None, "dropout": 0.0, **options}
    given.pop("offset", None)
    inv = softmax_contract.describe(args, **given)
    if softmax_platform.unsupported(inv):
        return
    cfg = softmax_platform.heuristic(inv, Config())
    sides = softmax_contract.sides(given["causal"], given["window"])
    opts = softmax_contract.Options(K**-0.5, given["soft_cap"], *sides, given["dropout"], "float32", False, cfg)
    _, residuals = softmax_platform.forward(args, opts)
    softmax_platform.backward(args, residuals, (array(B, T, H, V), None), opts)


def serve(op_id, dtype, pool, K, V, H, G, gate, N, T, exports, slots=512) -> None:
    """A call of a serving function."""
    rows = {"decode": (N,), "prefill": (T,)}.get(op_id, (N, T))
    prefill, indices = op_id == "prefill", empty(N, dtype="int32")
    boundaries = empty(*((exports,) if prefill else rows), dtype="int32") if exports else None
    states = empty(slots, H, K, V, dtype=pool)
    delta, gate = str(gate).startswith("delta"), {"delta": "scalar", "delta, vector": "vector"}.get(gate, gate)
    args = pool_contract.Args(
        empty(*rows, G, K, dtype=dtype), empty(*rows, G, V, dtype=dtype),
        None if op_id == "commit" else empty(*rows, H, K, dtype=dtype),
        {None: None, "scalar": empty(*rows, H, dtype=dtype), "vector": empty(*rows, H, K, dtype=dtype)}[gate],
        None if gate else empty(H, dtype="float32"), states, indices,
        indices if op_id == "commit" else None, empty(N + 1, dtype="int32") if prefill else None,
        empty(N, dtype="bool") if prefill else None, boundaries if prefill else None, boundaries,
        exports=states if exports and not prefill else None,
    )
    raw = {}
    if delta:
        heads = args.g.shape[len(rows):]
        args = args._replace(beta=empty(*rows, H, dtype=dtype), A_log=empty(H, dtype="float32"),
                             dt_bias=empty(*heads, dtype="float32"))
        raw = dict(use_qk_l2norm=True, raw_beta=True)
    implementation = platform.prefill if prefill else pool_platform.decode
    cfg = implementation.heuristic(pool_contract.describe(op_id, args, **raw), Config())
    (run,) = implementation.passes("torch")
    run(args, pool_contract.Options(op_id, K**-0.5, cfg, **raw))


if __name__ == "__main__":
    record(sys.argv[1:] or CHIPS)
