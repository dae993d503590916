"""The serving functions in Triton, for JAX and PyTorch on NVIDIA GPUs from sm_80.

decode, verify and commit are one kernel, which moves states and little else; prefill is the walk over sequences of
``linear_attention/triton.py``, which reads the states that requests come with from the pool and leaves theirs there.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from keraunos.kernels.linear_attention import triton as linear
from keraunos.kernels.state_pool import interface, triton_steps
from keraunos.kernels.state_pool.interface import Args, Options

STEP_FIELDS = ("block_d", "num_warps")
PREFILL_FIELDS = ("block_q", "block_d", "num_warps", "num_stages")

# A state that long has left the cache before it is read again: its bytes should not push out what is.
_CACHE = 1 << 25

_remember = functools.lru_cache(maxsize=4096)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _axes(x: Any, name: str, unit: int, axes: str) -> dict[str, int]:
    """``stride_<name><axis>`` over requests, tokens and heads, in units; 0 for an axis that the array does not have."""
    places = {axis: i for i, axis in enumerate(axes)} if x else {}
    return {f"stride_{name}{axis}": x.strides[places[axis]] // unit if axis in places else 0 for axis in "nth"}


def _step_plan(specs: Args, opts: Options) -> linear._Plan:
    """The launch of decode, verify or commit."""
    q, k, states, out = specs.query, specs.key, specs.states, specs.out
    axes, N = ("nh" if opts.op_id == "decode" else "nth"), specs.slots.shape[0]
    T = k.shape[1] if axes == "nth" else 1
    made = None
    if opts.reads:
        shape = (*q.shape[:-1], states.shape[-1])
        made = out or linear._Spec(shape, _contiguous(shape), q.dtype)
    targets = dict(o=None if made is None else "room" if out else (made.shape, made.dtype),
                   pool="states" if opts.writes else None)  # fmt: skip
    return step_launch(specs, opts, axes, made, targets, programs=N, T=T, N=N, many=axes == "nth")


def step_launch(specs: Args, opts: Options, axes: str, made, targets, *, programs: int, T: int, N: int, many: bool,
                chunk: int = 0) -> linear._Plan:  # fmt: skip
    """The launch of ``step_kernel`` for so many requests, or exported states (chunk > 0), of tokens with these axes."""
    q, k, v, g, states = specs.query, specs.key, specs.value, specs.g, specs.states
    if chunk:
        q = made = None
    _, H, K, V = states.shape
    gate = 0 if g is None else len(g.shape) - len(k.shape) + 2
    vectors = [(q, "q"), (k, "k"), (v, "v"), (g if gate == 2 else None, "g"), (made, "o")]
    unit = functools.reduce(math.gcd, (s for x, _ in vectors if x for s in x.strides[:-1]), 16)
    numbers: dict[str, Any] = {}
    for x, name in vectors:
        numbers |= _axes(g, "g", 1, axes) if name == "g" and gate == 1 else _axes(x, name, unit, axes)
    numbers |= dict(scale=opts.softmax_scale, T=T, N=N if chunk else 0)
    BV = min(opts.cfg.block_d or 32, linear._tile(V))
    constants = dict(
        H=H, K=K, V=V, RK=H // k.shape[-2], UNIT=unit,
        **{f"stride_s{axis}": stride for axis, stride in zip("shkv", states.strides, strict=True)},
        BK=linear._tile(K), BV=BV, BN=linear._pow2(N) if chunk else 1, BT=chunk, GATE=gate,
        GAMMA=specs.g_gamma is not None, MANY=many, COUNTED=specs.counts is not None, OUTPUT=made is not None,
        STORE=targets["pool"] is not None, STREAM=linear._pow2(programs) * H * K * V >= _CACHE,
    )  # fmt: skip
    grid = (programs * H * -(-V // BV),)
    return linear._Plan(triton_steps.step_kernel, grid, numbers, targets, constants, opts.cfg.num_warps or 4, 1)


_plan = _remember(_step_plan)


def _steps(args: Args, opts: Options):
    """``(output, pool)`` of decode, verify or commit."""
    plan = _plan(Args(*map(linear._spec, args)), opts)
    return plan.launch(
        q=args.key if args.query is None else args.query, k=args.key, v=args.value, g=args.g, gamma=args.g_gamma,
        slots=args.slots, counts=args.counts,
        cu_seqlens=None, tokens=None, states=args.states, room=args.out,
    )  # fmt: skip


def _prefill(args: Args, opts: Options):
    raise NotImplementedError


def unsupported(inv) -> str | None:
    """Why Triton cannot run the call, or None."""
    if inv.op_id == "prefill":
        return "has no prefill yet"
    return linear.unsupported(replace(inv, arrays={"query": inv.arrays["key"]}))


def heuristic(inv, cfg):
    """Steps: enough programs for the smallest batch. Prefill: as for the attention that it is."""
    if inv.op_id != "prefill":
        return replace(cfg, block_d=32, num_warps=4)
    return linear.heuristic(replace(inv, arrays={**inv.arrays, "query": inv.arrays["key"]}), cfg)


decode, verify, commit, prefill = interface.kernels(
    __file__,
    _steps,
    _prefill,
    unsupported=unsupported,
    step_fields=STEP_FIELDS,
    prefill_fields=PREFILL_FIELDS,
    heuristic=heuristic,
)
