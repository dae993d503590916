"""Softmax attention: the public function, its operation and its configuration."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keraunos import frontends
from keraunos.kernels.softmax_attention import contract, reference
from keraunos.kernels.softmax_attention.contract import Args
from keraunos.ops.executor import default_executor
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.kernel import Kernel
from keraunos.types import MaskInfo, as_offset, as_window, narrower

# Of samples: what models have.
_CAP = 30.0


@dataclass(frozen=True)
class AttentionConfig(Config):
    """Launch configuration of softmax attention; see :class:`keraunos.ops.Config`."""


class Attention(Kernel):
    """The operation ``"attention"``: softmax attention, returning ``(output, weights or None)``."""

    op_id = "attention"
    config = AttentionConfig
    arguments = Args._fields

    def bind(self, *args, **kwargs) -> Invocation:
        return contract.describe(Args(*args), **kwargs)

    def run(self, *args, cfg, **kwargs):
        return self.get_impl(cfg).fn(*args, cfg=cfg, **{"return_weights": False, **kwargs})

    def prepare(self, *args: Any, cfg: Config, **kwargs: Any) -> Callable:
        """See :meth:`Kernel.prepare`."""
        prepare = self.get_impl(cfg).prepare
        if prepare is None:
            return super().prepare(*args, cfg=cfg, **kwargs)
        run = prepare(Args(*args), cfg=cfg, **kwargs)
        return lambda *args: run(Args(*args))

    def invocation(self, framework: str, dtype: str = "bfloat16", *, B: int = 1, T: int, H: int, K: int,
                   S: int | None = None, G: int | None = None, V: int | None = None, causal: bool = False,
                   window: int | tuple[int, int] | None = None, soft_cap: bool = False, sinks: int = 0,
                   segments: bool = False) -> Invocation:  # fmt: skip
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
        if dtype not in contract.FLOATS:
            raise ValueError(f"attention: dtype is {dtype!r}; expected one of {list(contract.FLOATS)}")
        if min(B, T, S, H, G, K, V) < 1 or H % G:
            raise ValueError(
                f"attention: sizes B={B} T={T} S={S} H={H} G={G} K={K} V={V}; expected at least 1, G a divisor of H"
            )
        device = frontends.get(framework).default_device()
        dims = dict(zip("BTSHGKV", (B, T, S, H, G, K, V), strict=True))
        options = {"causal": causal, "window": as_window(window), "shifted": False, "soft_cap": bool(soft_cap),
                   "dropout": False, "softmax_dtype": _softmax_dtype(dtype, None), "return_weights": False,
                   "positive_scale": True}  # fmt: skip
        arrays: dict[str, tuple[str, int]] = dict.fromkeys(("query", "key", "value"), (dtype, 4))
        arrays |= {"sinks": ("float32", 2)} if sinks else {}
        arrays |= dict.fromkeys(("query_segments", "key_segments"), ("int32", 2)) if segments else {}
        # A NumPy array stands for sinks of the same shape.
        arguments = {"sinks": np.zeros((H, sinks))} if sinks else {}
        return Invocation(self.op_id, framework, device.backend, device.kind, dims, frozenset("BTS"), arrays, options,
                          arguments, device.shared_memory)  # fmt: skip

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
                "shift": inv.dims["S"] - inv.dims["T"] if inv.options["shifted"] else 0}  # fmt: skip

    def sample(self, inv: Invocation, seed: int) -> tuple[tuple, dict]:
        """See :meth:`Kernel.sample`."""
        measure = frontends.get(f"{inv.framework}.measure")
        shapes = {"query": "BTHK", "key": "BSGK", "value": "BSGV"}
        made = {
            name: measure.normal(tuple(inv.dims[d] for d in letters), inv.arrays[name][0], 100 * seed + i, inv.backend)
            for i, (name, letters) in enumerate(shapes.items())
        }
        return tuple(Args(**made, **self.extras(inv))), self.sample_options(inv)

    def check_calls(self, inv: Invocation, cfgs: Sequence[Config]) -> list[Invocation]:
        """More queries and keys than the largest candidate's blocks have; and lengths that no block divides."""
        size = max([cfg.block_q or 64 for cfg in cfgs])
        ratio = min(inv.dims["H"] // inv.dims["G"], 2)
        small = {**inv.dims, "B": 1, "H": ratio, "G": 1}
        return [replace(inv, dims={**small, "T": T, "S": S}) for T, S in ((2 * size, 2 * size), (size + 33, size + 5))]

    def reference(self, args: Sequence[Any], kwargs: dict, dtype: Any) -> tuple:
        """The output."""
        return reference.attention(*args, **_options(kwargs), dtype=dtype)[:1]

    def reference_vjp(self, args: Sequence[Any], kwargs: dict, cotangents: Sequence[Any], dtype: Any) -> tuple:
        """The gradients of query, key and value."""
        found = reference.attention(*args, **_options(kwargs), doutput=cotangents[0], dtype=dtype)
        return (*found[:3], *(None,) * (len(args) - 3))


def _options(kwargs: dict) -> dict:
    """What the reference takes of :meth:`Attention.sample`'s options."""
    return {name: kwargs[name] for name in ("causal", "window", "soft_cap", "softmax_scale", "shift")}


_OPERATION = Attention()


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    dropout_rng: Any = None,
    softmax_aux: Any = None,
    *,
    mask_info: MaskInfo | None = None,
    init_bias: Callable[[], Any] | None = None,
    deterministic: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dtype: Any = "bfloat16",
    softmax_dtype: Any = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    query_offset: Any = None,
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
        bias: ``[1 or B, 1 or G or H, T, S]``, added to the logits; where it is given, only the causality and the
            window of ``mask_info`` are used: no mask, segment ids or lengths. May be ``-inf``.
        dropout_rng: a key of ``jax.random``, or a ``torch.Generator``, which each call draws from: the same key, or
            state, drops the same weights. ``torch.utils.checkpoint`` sets no such generator back: make it, from a seed,
            within the function that runs again.
        softmax_aux: attention sinks, ``[sinks]`` or ``[G or H, sinks]``: logits that take probability, for no value.
            One sink for each head is ``[H, 1]``; ``[H]`` would be H sinks that all heads share.
        mask_info: which keys are visible, a :class:`keraunos.types.MaskInfo`.
        init_bias: makes a bias; called only if there is neither a bias nor a mask, segment ids or lengths.
        deterministic: without dropout.
        softmax_scale: factor of the logits; ``K ** -0.5`` if None.
        logits_soft_cap: bound of the logits' magnitude, before the bias; None: none.
        dtype: of the computation and of the output: bfloat16 if not given, also where the arrays are float32; None: the
            query's.
        softmax_dtype: of the softmax: float32 if None (float64 for float64). A platform may take a wider one.
        dropout_prob: the probability of dropping a weight; the others are divided by one minus it.
        causal: query t sees keys 0 to ``query_offset + t``, also where T and S differ.
        sliding_window: ``(left, right)``, or one number for both: query t sees keys ``query_offset + t - left`` to
            ``query_offset + t + right``.
        query_offset: the place of the first query among the keys, for ``causal`` and windows, those of ``mask_info``
            too: an int, or an array of integers ``[B]``, one for each sequence; None: 0. One token on a cache of keys
            of which ``length`` are valid has ``length - 1``. An int is a constant of the compiled program, so that
            another one compiles again; an array may change from call to call. Below 0, the first queries see no key.
        platform: ``"triton"``, ``"xla"`` or ``"torch"``: that one or an error. ``"auto"`` or None: the best that can
            run the call.
        cfg: launch configuration; wins over every cache and is never stored.
        return_weights: return the weights too, as they multiply the values; they take memory for ``B H T S`` values.

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
    limits = mask_info or MaskInfo()
    hidden = (limits.attention_mask, limits.query_segments, limits.key_lengths)
    if init_bias is not None and all(x is None for x in (bias, *hidden)):
        bias = init_bias()
    dropout = 0.0 if contract.truth("deterministic", deterministic) else dropout_prob
    seed = None
    if dropout and dropout_rng is not None and frontends.framework_of(query):
        seed = _seed(dropout_rng, query)
    return _attention(
        query, key, value, bias, softmax_aux, seed, limits=limits, softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap, dtype=dtype, softmax_dtype=softmax_dtype, dropout=dropout, causal=causal,
        sliding_window=sliding_window, query_offset=query_offset, platform=platform, cfg=cfg,
        return_weights=return_weights,
    )  # fmt: skip


@frontends.apart
def _seed(dropout_rng, query):
    """Of a key or a generator, which is no part of PyTorch's graphs."""
    return frontends.get(frontends.framework_of(query)).seed(dropout_rng, query)


@frontends.operation
def _attention(
    query, key, value, bias, softmax_aux, seed, *, limits, softmax_scale, logits_soft_cap, dtype, softmax_dtype,
    dropout, causal, sliding_window, query_offset, platform, cfg, return_weights,
):  # fmt: skip
    """:func:`attention` without what ``torch.compile`` cannot make a node of: a function, and a generator."""
    framework = frontends.framework_of(query)
    causal, return_weights = (contract.truth(*x) for x in (("causal", causal), ("return_weights", return_weights)))
    causal, window = causal or limits.causal, narrower(as_window(sliding_window), limits.sliding_window)
    if query_offset is not None:
        if limits.query_offset is not None:
            raise ValueError("attention: query_offset is given twice, also in mask_info; expected it once")
        limits = replace(limits, query_offset=as_offset(query_offset))
    if framework:
        limits = limits.placed(query)
    mask, segments = limits.attention_mask, _segments(limits, query, key)
    if bias is not None:
        # A bias wins over a mask.
        if mask is not None or segments[0] is not None:
            _warn_of_bias()
        mask, segments = None, (None, None)
    wanted = None if framework is None else _name(dtype) or frontends.get(framework).dtype_name(query)
    if dtype is not None and wanted and wanted not in contract.FLOATS:
        raise TypeError(f"attention: dtype is {dtype!r}; expected {' or '.join(contract.FLOATS)}, or None")
    if wanted:
        frontend = frontends.get(framework)
        # What is none of these arrays stays as it is, and is refused.
        query, key, value = (
            frontend.cast(x, wanted)
            if frontends.framework_of(x) == framework and frontend.dtype_name(x) in contract.FLOATS
            else x
            for x in (query, key, value)
        )
    offset, shift = _offset(limits.query_offset, query) if causal or window else (None, 0)
    output, weights = default_executor()(
        _OPERATION, query, key, value, bias, softmax_aux, mask, *segments, seed, offset,
        softmax_scale=softmax_scale, soft_cap=logits_soft_cap, causal=causal, window=window, shift=shift,
        dropout=dropout, softmax_dtype=_softmax_dtype(wanted, softmax_dtype), return_weights=return_weights,
        platform=platform, _cfg=cfg,
    )  # fmt: skip
    return (output, weights) if return_weights else output


@functools.cache
def _warn_of_bias() -> None:
    """Once; cached, as what raises is not, where warnings are errors."""
    message = (
        "attention: a bias is given, so the mask, segment ids and lengths of mask_info are not used: put -inf in it"
    )
    warnings.warn(message, stacklevel=5)


def _offset(query_offset: Any, query: Any) -> tuple[Any, int]:
    """``(array [B] or None, int)`` of which one says where the queries stand."""
    if query_offset is None or isinstance(query_offset, int):
        return None, query_offset or 0
    framework = frontends.framework_of(query)
    if framework is None or frontends.framework_of(query_offset) != framework or query.ndim != 4:
        return query_offset, 0  # the call is refused
    frontend = frontends.get(framework)
    if frontend.dtype_name(query_offset) not in ("int32", "int64"):
        query_offset = frontend.cast(query_offset, "int32")
    one = query_offset.ndim == 0
    return frontend.xp.broadcast_to(query_offset, query.shape[:1]) if one else query_offset, 0


def _segments(limits: MaskInfo, query: Any, key: Any, first: Any = 0) -> tuple[Any, Any]:
    """Segment ids of queries and keys; lengths of keys are ids too. ``first`` is the place of the first key."""
    framework = frontends.framework_of(query)
    own, other = limits.query_segments, limits.key_segments
    if framework is None or query.ndim != 4 or getattr(key, "ndim", 0) != 4:
        return own, other  # the call is refused
    frontend = frontends.get(framework)

    # What holds them and has numbers below 0; PyTorch has no comparisons of its larger unsigned numbers.
    wider = {"uint8": "int32", "uint16": "int32", **({"uint32": "int64"} if framework == "torch" else {})}

    def signed(ids):
        """Ids of a type that has numbers below 0, where it must; what is no array of the framework is refused."""
        if frontends.framework_of(ids) != framework:
            return ids
        name = frontend.dtype_name(ids)
        if framework == "torch" and name == "uint64":
            raise TypeError("attention: segment ids have dtype uint64; expected int64 or narrower integers")
        return frontend.cast(ids, wider[name]) if name in wider else ids

    own, other = signed(own), signed(other)
    if limits.key_lengths is None:
        return own, other
    (B, T), S = query.shape[:2], key.shape[1]
    if frontends.framework_of(limits.key_lengths) != framework:
        kind = type(limits.key_lengths).__name__
        raise TypeError(f"attention: key_lengths is a {kind}; expected an array of {framework}, like query")
    if tuple(limits.key_lengths.shape) != (B,):
        raise ValueError(f"attention: key_lengths has shape {tuple(limits.key_lengths.shape)}; expected [B] = {(B,)}")
    if own is None:
        own, other = (frontend.zeros((B, n), "int32", query) for n in (T, S))
    within = (frontend.numbers(S, query) + first)[None] < limits.key_lengths[:, None]
    # What is past the end has an id that no query has.
    return own, frontend.xp.where(within, other, -1)


def _name(dtype: Any) -> str | None:
    """A dtype of JAX, NumPy or PyTorch, or a name, as a name."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    if str(dtype).startswith("torch."):
        return str(dtype).removeprefix("torch.")
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype)


def _softmax_dtype(dtype: str | None, softmax_dtype: Any) -> str:
    return _name(softmax_dtype) or ("float64" if dtype == "float64" else "float32")
