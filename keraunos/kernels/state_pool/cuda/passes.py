"""Prefill on Hopper GPUs, for JAX and PyTorch: the walk over sequences of ``linear_attention/cuda``.

It reads the states that requests come with from the pool and leaves theirs there. Each request has one walk for each
head, however long it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keraunos.kernels.linear_attention import contract as linear_contract
from keraunos.kernels.linear_attention.cuda import passes as linear
from keraunos.kernels.linear_attention.triton.call import Pool
from keraunos.kernels.state_pool import contract
from keraunos.kernels.state_pool.contract import Args, Options
from keraunos.ops.invocation import Invocation


def _prefill(args: Args, opts: Options) -> tuple[Any, Any]:
    """``(output, pool)``: the packed tokens of all requests."""
    row = linear_contract.Args(args.query, args.key, args.value, args.g, args.g_gamma, None, args.cu_seqlens)
    options = linear_contract.Options(opts.softmax_scale, False, opts.cfg, ("g_gamma",), kept=False)
    return linear.prefill(row, options, Pool(args.states, args.slots, args.has_initial, into=args.out))


def _of_attention(inv: Invocation) -> Invocation:
    """The call as one of linear attention, whose arrays have an axis for the batch."""
    dtype, ndim = inv.arrays.get("g", ("", 0))
    return replace(inv, arrays={**inv.arrays, "g": (dtype, ndim + 1)}) if dtype else inv


def unsupported(inv: Invocation) -> str | None:
    """Why these kernels cannot run the call, or None."""
    if reason := linear.cannot_walk(_of_attention(inv)):
        return reason
    if inv.arrays.get("g", ("", 0))[1] == 3:
        return "takes gates per token [T, H]; the call has gates per token and dimension"
    return "takes no boundaries: it exports no states" if "tokens" in inv.arrays else None


def loses(inv: Invocation) -> str | None:
    """Why ``"auto"`` should prefer others, or None: what packed sequences were not measured to be faster with."""
    return linear.loses(_of_attention(inv))


prefill = contract.implementation(
    "prefill", _prefill, linear.FIELDS, platform="cuda", source=__file__, unsupported=unsupported,
    heuristic=linear.heuristic,
)
preferred_prefill = replace(prefill, loses=loses)
