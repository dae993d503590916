"""Softmax attention: the public function, its operation and its configuration."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array, DType
from keraunos.kernels.softmax_attention import contract, reference
from keraunos.kernels.softmax_attention.arguments import Arrangement
from keraunos.kernels.softmax_attention.arguments import softmax_dtype as as_softmax_dtype
from keraunos.kernels.softmax_attention.contract import Args
from keraunos.ops.arguments import FLOATS, truth
from keraunos.ops.executor import default_executor
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.kernel import Kernel
from keraunos.types import MaskInfo, as_offset, as_window, narrower

if TYPE_CHECKING:
    import jax
    import torch

# Of samples: what models have.
_CAP = 30.0


@dataclass(frozen=True)
class AttentionConfig(Config):
    """Launch configuration of softmax attention; see :class:`keraunos.ops.Config`."""


class Attention(Kernel):
    """The operation ``"attention"``: softmax attention, returning ``(output, weights or None)``."""

    op_id = "attention"
    config = AttentionConfig
    arguments = (*Args._fields, "key_lengths")

    def bind(self, *args: Array | None, **options: Any) -> Invocation:
        """See :meth:`Kernel.bind`; the option ``dtype``: what query, key and value are cast to first."""
        arrange, options = self.arranged(*args, **options)
        return contract.describe(arrange(*args), **options)

    def arranged(self, *args: Array | None, dtype: DType | None = None, softmax_dtype: DType | None = None,
                 **options: Any) -> tuple[Callable, dict[str, Any]]:
        """See :meth:`Kernel.arranged`."""
        arranged = Arrangement(args, dtype)
        softmax = as_softmax_dtype(arranged.dtype, softmax_dtype)
        return arranged.converter, {"return_weights": False, **options, "softmax_dtype": softmax}

    def invocation(self, framework: str, dtype: str = "bfloat16", *, B: int = 1, T: int, H: int, K: int,
                   S: int | None = None, G: int | None = None, V: int | None = None, causal: bool = False,
                   window: int | tuple[int, int] | None = None, soft_cap: bool = False, sinks: int = 0,
                   segments: bool = False) -> Invocation:
        """The description of a call from its sizes, for tuning ahead.

        Args:
            framework: "jax" or "torch".
            dtype: of query, key and value.
            B, T, H, K, S, G, V: sizes; S defaults to T, G to H and V to K.
            causal, window: as for :func:`attention`.
            soft_cap: logits are capped; sinks: number of sinks of each head; segments: there are segment ids.

        Raises:
            ValueError: a size or name is wrong.
        """
        S, G, V = S or T, G or H, V or K
        if dtype not in FLOATS:
            raise ValueError(f"attention: dtype is {dtype!r}; expected one of {list(FLOATS)}")
        if min(B, T, S, H, G, K, V) < 1 or H % G:
            raise ValueError(
                f"attention: sizes B={B} T={T} S={S} H={H} G={G} K={K} V={V}; expected at least 1, G a divisor of H"
            )
        device = frontends.get(framework).default_device()
        dims = dict(zip("BTSHGKV", (B, T, S, H, G, K, V), strict=True))
        options = {"causal": causal, "window": as_window(window), "shifted": False, "soft_cap": bool(soft_cap),
                   "dropout": False, "softmax_dtype": as_softmax_dtype(dtype, None), "return_weights": False,
                   "positive_scale": True}
        arrays: dict[str, tuple[str, int]] = dict.fromkeys(("query", "key", "value"), (dtype, 4))
        arrays |= {"sinks": ("float32", 2)} if sinks else {}
        arrays |= dict.fromkeys(("query_segments", "key_segments"), ("int32", 2)) if segments else {}
        # A NumPy array stands for sinks of the same shape.
        arguments = {"sinks": np.zeros((H, sinks))} if sinks else {}
        return Invocation(self.op_id, framework, device.backend, device.kind, dims, frozenset("BTS"), arrays, options,
                          arguments=arguments, shared_memory=device.shared_memory)

    def extras(self, inv: Invocation) -> dict[str, Any]:
        """Sinks, segment ids and offsets of a call: normal ones, one segment, of which no block can be left out, and
        queries at the end of the keys.
        """
        measure = frontends.get(f"{inv.framework}.measure")
        made = {}
        if "sinks" in inv.arrays:
            heads = (inv.dims["H"],) if inv.arrays["sinks"][1] == 2 else ()
            shape = (*heads, inv.arguments["sinks"].shape[-1])
            made["sinks"] = measure.normal(shape, inv.arrays["sinks"][0], 7, inv.backend)
        if "query_segments" in inv.arrays:
            for name, length in (("query_segments", "T"), ("key_segments", "S")):
                made[name] = measure.array(np.zeros((inv.dims["B"], inv.dims[length])), "int32", inv.backend)
        if "query_offset" in inv.arrays:
            offsets = np.full(inv.dims["B"], inv.dims["S"] - inv.dims["T"])
            made["query_offset"] = measure.array(offsets, inv.arrays["query_offset"][0], inv.backend)
        return made

    def sample_options(self, inv: Invocation) -> dict[str, Any]:
        """Options of ``run`` for a call like this."""
        kwargs = {name: inv.options[name] for name in ("causal", "window", "softmax_dtype")}
        return {**kwargs, "soft_cap": _CAP if inv.options["soft_cap"] else None,
                "softmax_scale": None if inv.options["positive_scale"] else -(inv.dims["K"] ** -0.5),
                "shift": inv.dims["S"] - inv.dims["T"] if inv.options["shifted"] else 0}

    def sample(self, inv: Invocation, seed: int) -> tuple[tuple, dict]:
        """See :meth:`Kernel.sample`."""
        measure = frontends.get(f"{inv.framework}.measure")
        shapes = {"query": "BTHK", "key": "BSGK", "value": "BSGV"}
        made = {
            name: measure.normal(tuple(inv.dims[d] for d in letters), inv.arrays[name][0], 100 * seed + i, inv.backend)
            for i, (name, letters) in enumerate(shapes.items())
        }
        return (*Args(**made, **self.extras(inv)), None), self.sample_options(inv)

    def check_calls(self, inv: Invocation, cfgs: Sequence[Config]) -> list[Invocation]:
        """More queries and keys than the largest candidate's blocks have; and lengths that no block divides."""
        size = max([cfg.block_q or 64 for cfg in cfgs])
        ratio = min(inv.dims["H"] // inv.dims["G"], 2)
        small = {**inv.dims, "B": 1, "H": ratio, "G": 1}
        return [replace(inv, dims={**small, "T": T, "S": S}) for T, S in ((2 * size, 2 * size), (size + 33, size + 5))]

    def reference(self, args: Sequence[np.ndarray | None], kwargs: dict, dtype: type) -> tuple:
        """The output."""
        return reference.attention(*Args(*args[:-1]), **_options(kwargs), dtype=dtype)[:1]

    def reference_vjp(self, args: Sequence[np.ndarray | None], kwargs: dict, cotangents: Sequence[np.ndarray],
                      dtype: type) -> tuple:
        """The gradients of query, key and value."""
        found = reference.attention(*Args(*args[:-1]), **_options(kwargs), doutput=cotangents[0], dtype=dtype)
        return (*found[:3], *(None,) * (len(args) - 3))


def _options(kwargs: dict) -> dict:
    """The options of :meth:`Attention.sample` that the reference takes."""
    return {name: kwargs[name] for name in ("causal", "window", "soft_cap", "softmax_scale", "shift")}


_OPERATION = Attention()


def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    dropout_rng: jax.Array | torch.Generator | None = None,
    softmax_aux: Array | None = None,
    *,
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
    query_offset: int | Array | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
    return_weights: bool = False,
) -> Any:
    """Softmax attention, with what models add to it.

    For query t and the keys s that it sees, after query, key and value have been cast to ``dtype``::

        x_s = logits_soft_cap * tanh(softmax_scale * q_t . k_s / logits_soft_cap) + bias_ts
        p_s = exp(x_s) / (sum_s exp(x_s) + sum_n exp(softmax_aux_n))
        o_t = sum_s p_s v_s

    A query that sees no key gives zeros.

    Args:
        query: ``[B, T, H, K]``, bfloat16, float16, float32 or float64; a ``jax.Array`` or a ``torch.Tensor``.
        key: ``[B, S, G, K]``, the query's dtype. Query head h reads key/value head ``h // (H // G)``.
        value: ``[B, S, G, V]``, the query's dtype.
        bias: ``[1 or B, 1 or G or H, T, S]``, added to the logits; it replaces the mask and the segment ids of
            ``mask_info``, but not its lengths, causality and window. May be ``-inf``.
        dropout_rng: a key of ``jax.random`` or a ``torch.Generator``. The same key, or the same state of the generator,
            drops the same weights; a call moves the generator on. ``torch.utils.checkpoint`` does not restore a
            generator: make it from a seed inside the function that is checkpointed.
        softmax_aux: attention sinks, ``[sinks]`` or ``[1 or G or H, sinks]``: logits that are in the sum of the softmax
            and have no value. One sink for each head is ``[H, 1]``; H sinks that all heads share are ``[1, H]``.
            ``[H]`` could mean either and is refused.
        mask_info: which keys are visible, a :class:`keraunos.types.MaskInfo`.
        init_bias: makes a bias; called only if there is no bias, no mask and no segment ids.
        deterministic: no dropout, whatever dropout_prob is.
        softmax_scale: factor of the logits; ``K ** -0.5`` if None.
        logits_soft_cap: bound of the logits' magnitude, before the bias; None: none.
        dtype: the dtype to which query, key and value are cast, and the output's. The default is bfloat16, for float32
            arrays too; None keeps the query's.
        softmax_dtype: the dtype of the softmax: float32 if None (float64 for float64). A platform may take a wider one.
        dropout_prob: the probability of dropping a weight; the others are divided by one minus it.
        causal: query t sees keys 0 to ``query_offset + t``, also where T and S differ.
        sliding_window: ``(left, right)``, or one number for both: query t sees keys ``query_offset + t - left`` to
            ``query_offset + t + right``.
        query_offset: the position of the first query among the keys, for ``causal`` and all windows: an int, or
            integers ``[B]``, one for each sequence; None: 0. One token on a cache with ``length`` valid keys has the
            offset ``length - 1``; with ``causal`` kernels skip the other keys. Another int compiles the program again;
            an array may change from call to call. If the offset is below 0, the first queries see no key.
        platform: ``"triton"``, ``"cuda"``, ``"xla"``, ``"torch"``, or on TPUs ``"pallas"``: that one or an error.
            ``"auto"`` or None: the best that can run the call.
        cfg: launch configuration; wins over every cache and is never stored.
        return_weights: return the weights too, after dropout: ``B H T S`` values.

    Returns:
        The output ``[B, T, H, V]``, or ``(output, weights [B, H, T, S])``. There are gradients for query, key, value,
        bias and softmax_aux.

    Raises:
        ValueError: a shape, range or name is wrong, or no platform can run the call (:class:`UnsupportedError`).
        TypeError: an argument is of a wrong type or dtype.

    Example:
        >>> import jax, jax.numpy as jnp, keraunos
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 100, 2, 16)) for i in range(3))
        >>> keraunos.attention(q, k, v, causal=True, dtype=jnp.float32).shape
        (1, 100, 2, 16)

    Source: Attention Is All You Need (arXiv:1706.03762); blocks of keys as in FlashAttention (arXiv:2205.14135).
    """
    if mask_info is not None and not isinstance(mask_info, MaskInfo):
        raise TypeError(f"attention: mask_info is a {type(mask_info).__name__}; expected a keraunos.types.MaskInfo")
    if init_bias is not None and bias is None and not _has_mask(mask_info):
        bias = init_bias()
    dropout = 0.0 if truth("attention", "deterministic", deterministic) else dropout_prob
    seed = None
    if dropout and dropout_rng is not None and frontends.framework_of(query):
        seed = _seed(dropout_rng, query)
    return _attention(
        query, key, value, bias, softmax_aux, seed, mask_info=mask_info, softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap, dtype=dtype, softmax_dtype=softmax_dtype, dropout=dropout, causal=causal,
        sliding_window=sliding_window, query_offset=query_offset, platform=platform, cfg=cfg,
        return_weights=return_weights,
    )


@frontends.outside_graphs
def _seed(dropout_rng: jax.Array | torch.Generator, query: Array) -> Array:
    """Of a key or a generator, which is no part of PyTorch's graphs."""
    return frontends.of(query).seed(dropout_rng, query)


@frontends.operation
def _attention(query: Array, key: Array, value: Array, bias: Array | None, softmax_aux: Array | None,
               seed: Array | None, *, mask_info: MaskInfo | None, softmax_scale: float | None,
               logits_soft_cap: float | None, dtype: DType | None, softmax_dtype: DType | None, dropout: float,
               causal: bool, sliding_window: int | tuple[int, int] | None, query_offset: int | Array | None,
               platform: str | None, cfg: Config | None, return_weights: bool) -> Any:
    """:func:`attention` without what ``torch.compile`` cannot make a node of: a function, and a generator.

    Limits are taken apart here: their arrays are the operation's. The operation settles the work on arrays, once for
    all calls that are alike.
    """
    window = as_window(sliding_window)
    mask = own = other = lengths = offset = None
    shift = 0
    if mask_info is not None or query_offset is not None:
        limits = _limits(mask_info, query_offset, query)
        causal, window = truth("attention", "causal", causal) or limits.causal, narrower(window, limits.sliding_window)
        lengths = limits.key_lengths
        if bias is None:
            mask, own, other = limits.attention_mask, limits.query_segments, limits.key_segments
        elif _has_mask(limits):
            _warn_of_bias()
        if isinstance(limits.query_offset, int):
            shift = limits.query_offset if causal or window else 0
        elif causal or window:
            offset = limits.query_offset
    output, weights = default_executor()(
        _OPERATION, query, key, value, bias, softmax_aux, mask, own, other, seed, offset, lengths,
        softmax_scale=softmax_scale, soft_cap=logits_soft_cap, causal=causal, window=window, shift=shift,
        dropout=dropout, dtype=dtype, softmax_dtype=softmax_dtype, return_weights=return_weights,
        platform=platform, _cfg=cfg,
    )
    return (output, weights) if return_weights else output


def _limits(mask_info: MaskInfo | None, query_offset: int | Array | None, query: Array) -> MaskInfo:
    """Both as one, on the query's device."""
    limits = mask_info or MaskInfo()
    if query_offset is not None:
        if limits.query_offset is not None:
            raise ValueError("attention: query_offset is given twice, also in mask_info; expected it once")
        limits = replace(limits, query_offset=as_offset(query_offset))
    return limits.placed(query)


def _has_mask(limits: MaskInfo | None) -> bool:
    """Whether there is what a bias replaces: a mask or segment ids, but not lengths or causality."""
    return limits is not None and (limits.attention_mask is not None or limits.query_segments is not None)


@functools.cache
def _warn_of_bias() -> None:
    """Once; cached, as what raises is not, where warnings are errors."""
    message = (
        "attention: a bias is given, so the mask and segment ids of mask_info are not used: put -inf in the bias"
    )
    warnings.warn(message, stacklevel=5)
