"""Softmax attention over shards of the tokens: the public function and its checks.

Every rank keeps its queries. Keys and values come from the ranks whose shards these queries may see, one shard at a
time, and each shard's output and sums are merged into those of the ones before. The backward fetches the shards
again, computes the weights from the whole sum, and returns to each rank the gradients of its keys and
values. Memory stays that of a shard; what is not visible is neither sent (where the framework lets ranks differ) nor
computed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from keraunos import frontends
from keraunos.distributed.ring import PLATFORMS, Ring
from keraunos.frontends.array_types import Array, DType
from keraunos.kernels.softmax_attention.arguments import dtype_name
from keraunos.kernels.softmax_attention.arguments import softmax_dtype as as_softmax_dtype
from keraunos.kernels.softmax_attention.contract import Args, Options, sides
from keraunos.modules.attention import Attention
from keraunos.ops.arguments import truth
from keraunos.ops.executor import default_executor
from keraunos.ops.invocation import Config, Platform, UnsupportedError
from keraunos.types import MaskInfo, as_window, narrower

if TYPE_CHECKING:
    import jax
    import torch
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P
    from torch.distributed import ProcessGroup

_OPERATION = Attention()


def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    dropout_rng: jax.Array | torch.Generator | None = None,
    softmax_aux: Array | None = None,
    *,
    axis_name: Hashable | None = None,
    group: ProcessGroup | None = None,
    mesh: Mesh | None = None,
    spec: P | None = None,
    mask_info: MaskInfo | None = None,
    init_bias: Callable[[], Array] | None = None,
    deterministic: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dtype: DType | None = "bfloat16",
    softmax_dtype: DType | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
    return_weights: bool = False,
) -> Array:
    """:func:`keraunos.attention` of sequences whose tokens are shared out among ranks, in their order.

    Rank i of P has tokens ``i T`` to ``(i + 1) T - 1`` of queries, keys and values, and gets the output of its own
    queries. Causality and window count over the whole sequence.

    Args:
        query, key, value: this rank's ``[B, T, H, K]``, ``[B, S, G, K]`` and ``[B, S, G, V]``; T and S are the same on
            all ranks, and equal with ``causal`` or a window. Pad the last shard, and hide the padding by lengths or
            ids.
        softmax_aux: sinks, the same on all ranks. In PyTorch their gradient is of this rank's queries, as for any
            parameter that ranks share: sum it over the group. In JAX it is summed.
        axis_name: JAX: the mesh axis over which the tokens are sharded; the call is inside ``jax.shard_map``.
        group: PyTorch: the process group of the shards; None: the default one.
        mesh, spec: JAX, outside of ``shard_map``: the arrays are whole then, any T and S, and are sharded over the mesh
            as ``spec`` says, the query's ``P(batch, tokens, heads)``. Segment ids are those of all tokens.
        mask_info: segment ids are this rank's, ``[B, T]`` and ``[B, S]``; ``key_lengths`` count over the whole
            sequence.
        softmax_scale, logits_soft_cap, dtype, softmax_dtype, causal, sliding_window, platform, cfg: as there; the
            platform runs on a shard of queries and one of keys.
        bias, dropout_rng, init_bias, deterministic, dropout_prob, return_weights: cannot be had over shards: a bias and
            the weights have a value for each query and key, and the dropout follows from their places.

    Returns:
        The output ``[B, T, H, V]`` of this rank's queries (with ``mesh``: of all). There are gradients for query, key,
        value and softmax_aux.

    Raises:
        UnsupportedError: an option that cannot be had over shards, or no platform can run the call.
        DisagreementError, RankFailedError: see :mod:`keraunos.distributed.agreement`.
        ValueError, TypeError: as for :func:`keraunos.attention`.

    Source: Ring Attention with Blockwise Transformers (arXiv:2310.01889).
    """
    limits = mask_info or MaskInfo()
    for name, given in (("bias", bias is not None or init_bias is not None),
                        ("dropout_prob", dropout_prob and not deterministic), ("return_weights", return_weights),
                        ("a boolean mask", limits.attention_mask is not None)):
        if given:
            raise UnsupportedError(f"attention: {name} cannot be had over shards of the tokens: it has a value for each"
                                   " query and key")
    if limits.query_offset is not None:
        raise UnsupportedError("attention: query_offset cannot be had over shards of the tokens, whose queries and keys"
                               " count from the same place")
    framework = frontends.framework_of(query)
    if framework is None:
        raise TypeError(f"attention: query is a {type(query).__name__}; expected {frontends.arrays()}")
    mine, others = (group, (axis_name, mesh)) if framework == "torch" else (axis_name, (group,))
    if any(x is not None for x in others) or (framework == "jax" and (axis_name is None) == (mesh is None)):
        names = {"torch": "group=, or none for all ranks", "jax": "axis_name= inside shard_map, or mesh= and spec="}
        raise ValueError(f"attention: axis_name is {axis_name!r}, group {group!r}, mesh {mesh!r}; expected"
                         f" {names[framework]} with arrays of {framework}")
    frontend = frontends.get(framework)
    wanted = dtype_name(dtype) or frontend.dtype_name(query)
    query, key, value = (x if frontends.framework_of(x) != framework else frontend.cast(x, wanted)
                         for x in (query, key, value))
    window = narrower(as_window(sliding_window), limits.sliding_window)
    limits = limits.placed(query)
    causal = truth("attention", "causal", causal) or limits.causal
    options = dict(softmax_scale=softmax_scale, soft_cap=logits_soft_cap, causal=causal, window=window,
                   softmax_dtype=as_softmax_dtype(wanted, softmax_dtype))
    args = Args(query, key, value, None, softmax_aux, None, limits.query_segments, limits.key_segments)
    if mesh is not None:
        mine = axis = _tokens(spec)
    home = importlib.import_module(f"keraunos.distributed.{framework}.softmax")
    run = functools.partial(home.attention, settle=lambda own, size: ring(own, size, mine, platform, cfg, options))
    if mesh is not None:
        return home.over_mesh(run, args, limits.key_lengths, mesh, spec, axis)
    return run(args, limits.key_lengths, place=mine)


def _tokens(spec: P | None) -> Any:
    """The mesh axis of the tokens in ``P(batch, tokens, heads)``."""
    axes = (*(spec or ()), None, None, None, None)
    if axes[1] is None or any(axes[3:]):
        raise ValueError(
            f"attention: spec is {spec!r}; expected P(batch, tokens, heads), tokens being an axis of the mesh"
        )
    return axes[1]


def ring(args: Args, size: int, axis_name: Hashable, platform: str | None, cfg: Config | None, options: dict) -> Ring:
    """Check the arguments of one rank and settle what depends on shapes, dtypes and options only."""
    inv = _OPERATION.bind(*args, None, **options)
    limited = options["causal"] or options["window"] is not None
    if size > 1 and limited and inv.dims["T"] != inv.dims["S"]:
        raise ValueError(f"attention: shards have T = {inv.dims['T']} queries and S = {inv.dims['S']} keys; expected as"
                         " many of both, to tell what causality or a window hides")
    if platform in (None, Platform.AUTO):
        platform = None if cfg is None or cfg.platform == Platform.AUTO else cfg.platform
    reasons = []
    for name in PLATFORMS if platform is None else (platform,):
        if name not in PLATFORMS:
            raise UnsupportedError(f"attention: platform {name!r} gives no sums, which shards are merged with;"
                                   f" expected one of {[str(p) for p in PLATFORMS]}")
        try:
            chosen = default_executor().chain.choose(_OPERATION, inv, cfg, name, measure=False)
            break
        except UnsupportedError as error:
            reasons.append(str(error))
    else:
        raise UnsupportedError("; ".join(reasons))
    scale = options["softmax_scale"]
    scale = float(inv.dims["K"] ** -0.5 if scale is None else scale)
    cap = options["soft_cap"]
    opts = Options(scale, None if cap is None else float(cap), None, None, 0.0, options["softmax_dtype"], False,
                   chosen.cfg)
    left, right = sides(options["causal"], options["window"])
    return Ring(size, axis_name, left, right, str(name), opts)
