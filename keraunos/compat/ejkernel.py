"""ejKernel's functions and masks, computed by keraunos: names, arguments and results of ejkernel 0.0.80.3.

Only what means the same is here: what does not, raises and says what to use. Arrays are those of JAX.

Differences from ejkernel:

- A query that sees no key gives zeros; there, the mean of all values.
- A bias with a mask raises ValueError; there, the mask is not used. Put ``-inf`` in the bias.
- Dropout draws each weight by itself and raises ValueError without a key; there, one draw serves all rows and heads.
- Causality and window have one offset for both, or raise ValueError.
- ``apply_kv_lengths`` with fewer queries raises: :func:`keraunos.attention` has ``query_offset``.
- ``g_gamma`` is ``[H]`` or ``[B, H]``; there, also ``[1, H]``, and ``[N, H]`` with ``cu_seqlens``.
- Linear attention gives the query's dtype; there, float32 on ``xla`` for bfloat16.
- Positive gates raise ValueError on a CPU, or with ``KERAUNOS_CHECK=1``.
- ``gv``, paged and sparse attention, ``ring_attention`` and ``flash_attention`` raise NotImplementedError, or are not
  here.
- Fields of configurations are None, the platform's choice; an unknown one raises. An explicit ``cfg`` is never stored.
- :class:`Executor` runs :class:`GLAttention` and :class:`LightningAttention`; :func:`attention` takes ``cfg`` and
  ``platform``. A :class:`ConfigSelectorChain` without a tuner tunes nothing. ``policy_override``, ``overlay_cache`` and
  ``PersistentCache`` are :mod:`keraunos`'s own.

Three things are as in ejkernel here, and not in :func:`keraunos.attention`: ``softmax_aux`` of ``[H]`` or ``[G]`` is a
sink for each head (there ``[H, 1]``, ``[G, 1]``); ``dtype=None`` is float32 (there the query's); and
``from_attention_mask`` of ``[B, T]`` marks tokens that are not padding (:class:`keraunos.types.MaskInfo` takes
``[T, S]``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from keraunos import ops, types
from keraunos.frontends.array_types import DType
from keraunos.modules.attention import Attention, AttentionConfig
from keraunos.modules.attention import attention as softmax_attention
from keraunos.modules.gla_attention import GLAttention, GLAttentionConfig, gla_attention
from keraunos.modules.lightning_attention import LightningAttention, LightningAttentionConfig, lightning_attention
from keraunos.ops import ConfigCache, ConfigSelectorChain, Tuner
from keraunos.ops.invocation import Backend, Config, Platform

__all__ = [
    "Attention",
    "AttentionConfig",
    "AutotunePolicy",
    "Backend",
    "ConfigCache",
    "ConfigSelectorChain",
    "Executor",
    "GLAttention",
    "GLAttentionConfig",
    "LightningAttention",
    "LightningAttentionConfig",
    "MaskInfo",
    "Platform",
    "Tuner",
    "attention",
    "create_default_executor",
    "gla_attention",
    "lightning_attention",
    "recurrent_attention",
]

_PAGED = "there is no softmax attention on paged keys; keraunos.attention takes query_offset for a cache [B, S, G, K]"
_SPARSE = "there is no sparse attention; keraunos.attention takes windows, segments and masks"
_PLAIN = "use keraunos.attention(..., dtype=None), which takes its bias, mask_info, causality, window, cap and sinks"
_CUT = "it cuts keys or queries out, which a mask here does not; use keraunos.types.MaskInfo.apply_causal(query_offset)"
_SHARDED = "no axes are named here: a call follows its arrays' shardings; keraunos.distributed is for shards of tokens"
_WITHOUT = {
    "flash_attention": _PLAIN,
    "scaled_dot_product_attention": _PLAIN,
    "ring_attention": "use keraunos.distributed.attention",
    **dict.fromkeys(("page_attention", "prefill_page_attention", "ragged_page_attention_v2",
                     "ragged_page_attention_v3", "ragged_decode_attention", "unified_attention"), _PAGED),
    **dict.fromkeys(("blocksparse_attention", "native_sparse_attention"), _SPARSE),
    **dict.fromkeys(("q_positions", "kv_positions"), "places are counted here; use MaskInfo.apply_causal(offset)"),
    **dict.fromkeys(("batch_axis_name", "qheads_axis_name", "kvheads_axis_name", "sequence_axis_name", "method", "mesh",
                     "in_specs", "out_specs", "check_vma"), _SHARDED),
    "stamp": "calls are not labelled here; keraunos.explain says what a call gets",
    **dict.fromkeys(("mode", "index"), _CUT),
}


def _refuse(name: str, given: Iterable[str]) -> None:
    for argument in given:
        raise TypeError(f"{name}: got {argument}: {_WITHOUT.get(argument, 'expected no such argument')}")


def __getattr__(name: str) -> Callable:
    # Functions, so that a list of imports with one of them works until it is called.
    if name not in _WITHOUT or "attention" not in name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name}: {_WITHOUT[name]}")

    return refused


@functools.partial(jax.tree_util.register_dataclass, data_fields=["limits"], meta_fields=[])
@dataclass(frozen=True)
class MaskInfo:
    """Which keys a query may see, as a :class:`keraunos.types.MaskInfo`, under ejKernel's names.

    Attributes:
        limits: the mask, which ``keraunos.attention`` takes. No array ``[T, S]`` is made of segments and limits until
            it is asked for.
    """

    limits: types.MaskInfo

    @classmethod
    def from_attention_mask(cls, attention_mask: Any, *, mask_is_valid: bool = True, **unknown: Any) -> MaskInfo:
        """From ``[B, T]``, the tokens that are no padding, or ``[B, T, S]`` or ``[B, heads, T, S]``, pairs.

        Args:
            attention_mask: booleans, or numbers, of which all but 0 are true.
            mask_is_valid: if False, true marks what must not be seen.

        Raises:
            TypeError, ValueError: it is something else.
        """
        _refuse("MaskInfo.from_attention_mask", unknown)
        mask = _true(attention_mask) if mask_is_valid else ~_true(attention_mask)
        if mask.ndim == 2:
            return cls(types.MaskInfo.from_segments(_ids(mask)))
        return cls(types.MaskInfo.from_attention_mask(mask))

    @classmethod
    def from_segments(cls, q_segment_ids: Any, kv_segment_ids: Any = None, *, is_attn_mask: bool = False,
                      **unknown: Any) -> MaskInfo:
        """From segment ids, ``[B, T]`` and ``[B, S]``; with ``is_attn_mask``, from masks of tokens, 0 where padding.

        Raises:
            TypeError, ValueError: they are something else.
        """
        _refuse("MaskInfo.from_segments", unknown)
        pair = q_segment_ids, q_segment_ids if kv_segment_ids is None else kv_segment_ids
        ids = (_ids(_true(x)) if is_attn_mask else jnp.asarray(x, jnp.int32) for x in pair)
        return cls(types.MaskInfo.from_segments(*ids))

    def apply_causal(self, offset: Any = 0) -> MaskInfo:
        """This mask, with no key after place ``offset + t``: an int, or integers ``[B]``.

        Raises:
            ValueError: causality or a window has another offset already.
        """
        return MaskInfo(replace(self._from("apply_causal", offset), causal=True))

    def apply_sliding_window(self, sliding_window: int | tuple[int, int], *, offset: Any = 0,
                             **unknown: Any) -> MaskInfo:
        """This mask, where query t sees keys ``offset + t - left`` to ``offset + t + right``; one number is both.

        Raises:
            ValueError: it is no window, or causality or a window has another offset already.
        """
        _refuse("MaskInfo.apply_sliding_window", unknown)
        return MaskInfo(self._from("apply_sliding_window", offset).apply_sliding_window(sliding_window))

    def _from(self, name: str, offset: Any) -> types.MaskInfo:
        """The limits with this offset."""
        limits, offset = self.limits, types.as_offset(offset, f"MaskInfo.{name}")
        own = limits.query_offset
        same = own is offset or (isinstance(own, int) and isinstance(offset, int) and own == offset)
        if (limits.causal or limits.sliding_window) and not same:
            raise ValueError(f"MaskInfo.{name}: offset is {offset}, after {own}; expected one for all limits")
        return replace(limits, query_offset=offset)

    def apply_kv_lengths(self, kv_lengths: Any, *, q_len: int | None = None, end_index: Any = None,
                         sliding_window: int | None = None) -> MaskInfo:
        """This mask, with no key from ``kv_lengths[b]`` on.

        Args:
            kv_lengths: ``[B]``, integers.
            q_len, end_index: the queries that stay, which must be all.

        Raises:
            NotImplementedError: queries or keys are to be cut out.
        """
        if q_len not in (None, self.q_len) or sliding_window is not None:
            raise NotImplementedError(f"MaskInfo.apply_kv_lengths: {_CUT}")
        return MaskInfo(self.limits.apply_kv_lengths(jnp.asarray(kv_lengths, jnp.int32)))

    def get_or_compute_attention_mask(self, dtype: Any = jnp.bool_) -> jax.Array:
        """All of it as one mask ``[1 or B, heads, T, S]``."""
        return jnp.asarray(self.limits.get_or_compute_attention_mask(), dtype)

    def get_or_compute_segment_ids(self) -> tuple[jax.Array, jax.Array]:
        """``[B, T]`` and ``[B, S]``, without causality and windows. Ids of a mask are 0, and -1 for padding."""
        limits, mask = self.limits, self.limits.attention_mask
        own, other = limits.query_segments, limits.key_segments
        if mask is not None:
            own, other = _ids(mask.any((1, 3))), _ids(mask.any((1, 2)))
        if limits.key_lengths is not None:
            other = jnp.where(jnp.arange(other.shape[1]) < limits.key_lengths[:, None], other, -1)
        return own, other

    def create_bias(self, dtype: Any = jnp.float32) -> jax.Array:
        """0 where a key is visible, the dtype's lowest number elsewhere."""
        return jnp.where(self.attention_mask, 0, jnp.finfo(dtype).min).astype(dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(batch_size, q_len, kv_len)``."""
        if (mask := self.limits.attention_mask) is not None:
            return mask.shape[0], *mask.shape[2:]
        return *self.limits.query_segments.shape, self.limits.key_segments.shape[1]

    attention_mask = property(get_or_compute_attention_mask)
    bias = property(create_bias)
    q_segment_ids = property(lambda self: self.get_or_compute_segment_ids()[0])
    kv_segment_ids = property(lambda self: self.get_or_compute_segment_ids()[1])
    batch_size = property(lambda self: self.shape[0])
    q_len = property(lambda self: self.shape[1])
    kv_len = property(lambda self: self.shape[2])


def _true(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x if x.dtype == jnp.bool_ else x != 0


def _ids(seen: jax.Array) -> jax.Array:
    return jnp.where(seen, 0, -1).astype(jnp.int32)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    dropout_rng: jax.Array | None = None,
    softmax_aux: jax.Array | None = None,
    /,
    *,
    mask_info: MaskInfo | types.MaskInfo | None = None,
    dtype: DType | None = jnp.bfloat16,
    attention_mask: Any = None,
    return_weights: bool = True,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Softmax attention with its weights; :func:`keraunos.attention` says what the other arguments mean.

    Args:
        query, key, value: ``[B, T, H, K]``, ``[B, S, G, K]``, ``[B, S, G, V]``.
        bias: added to the logits; no mask may be given with it.
        dropout_rng: a key, which dropout needs.
        softmax_aux: sinks: ``[H]`` or ``[G]``, one for each head; ``[sinks]`` of another number, or ``[1, sinks]``, for
            all heads; ``[H or G, sinks]``.
        mask_info: which keys are visible.
        dtype: of the computation, the output and the weights; None: JAX's default.
        attention_mask: in place of mask_info: ``[B, S]``, keys that are no padding, or pairs ``[B, T, S]`` or
            ``[B, heads, T, S]``; booleans, or numbers.
        return_weights: if False, return None for the weights, so that kernels that never form them can run.
        options: those of :func:`keraunos.attention`, by name.

    Returns:
        The output ``[B, T, H, V]``, and the weights ``[B, H, T, S]`` or None.

    Raises:
        ValueError: a shape, range or name is wrong, or a mask is given with another one or with a bias.
        TypeError: an argument is of a wrong type or dtype.

    Example:
        >>> import jax
        >>> from keraunos.compat.ejkernel import attention
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 20, 2, 16)) for i in range(3))
        >>> output, weights = attention(q, k, v, causal=True)
        >>> output.shape, weights.shape
        ((1, 20, 2, 16), (1, 2, 20, 20))
    """
    if sum(x is not None for x in (bias, mask_info, attention_mask)) > 1:
        raise ValueError(
            "attention: got two of bias, mask_info and attention_mask, of which ejKernel would use one; expected one"
        )
    limits = mask_info.limits if isinstance(mask_info, MaskInfo) else mask_info
    if attention_mask is not None:
        mask = _true(attention_mask)
        if mask.ndim == 2:
            limits = types.MaskInfo.from_segments(jnp.zeros(query.shape[:2], jnp.int32), _ids(mask))
        else:
            limits = types.MaskInfo.from_attention_mask(mask)
    if softmax_aux is not None:
        if softmax_aux.ndim == 1 and softmax_aux.shape[0] in (query.shape[2], key.shape[2]):
            softmax_aux = softmax_aux[:, None]
        elif softmax_aux.ndim == 2 and softmax_aux.shape[0] == 1:
            softmax_aux = softmax_aux[0]
    dtype = jax.dtypes.canonicalize_dtype(float) if dtype is None else dtype
    found = softmax_attention(query, key, value, bias, dropout_rng, softmax_aux, mask_info=limits, dtype=dtype,
                              return_weights=return_weights, **options)
    return (found[0], found[1].astype(found[0].dtype)) if return_weights else (found, None)


def recurrent_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    gk: jax.Array | None = None,
    gv: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    /,
    **options: Any,
) -> Any:
    """:func:`keraunos.gla_attention` with the sum of two gates per key dimension, ``g`` and ``gk``.

    Raises:
        NotImplementedError: ``gv`` is given.
    """
    if gv is not None:
        raise NotImplementedError(
            "recurrent_attention: gv is given, gates per value dimension; keraunos.gla_attention has none"
        )
    gates = [x for x in (g, gk) if x is not None]
    total = sum(gates[1:], gates[0]) if gates else None
    return gla_attention(query, key, value, total, g_gamma, initial_state, cu_seqlens, **options)


@dataclass(frozen=True)
class AutotunePolicy(ops.AutotunePolicy):
    """:class:`keraunos.AutotunePolicy` with ejKernel's default: what no cache knows is tuned."""

    cache_miss_fallback: str = "autotune"


class Executor(ops.Executor):
    """A :class:`keraunos.Executor` that takes the linear operations' arguments, in order or by name, as ejKernel's."""

    def __call__(self, kernel: ops.Kernel, *args: Any, cfg: Config | None = None, _cfg: Config | None = None,
                 platform: str | None = None, return_state: bool = False, **kwargs: Any) -> Any:
        """The output, or ``(output, final_state)`` with ``return_state``.

        Args:
            kernel: :class:`GLAttention` or :class:`LightningAttention`.
            args, kwargs: its arguments.
            cfg, _cfg: the launch configuration, under either name; it is never stored.
            platform: the platform asked for.
            return_state: return the final state too.

        Raises:
            NotImplementedError: another operation is given.
            TypeError: an argument is not there.
        """
        if not isinstance(kernel, GLAttention | LightningAttention):
            raise NotImplementedError(
                f"Executor: got {type(kernel).__name__}; expected GLAttention or LightningAttention, whose arguments "
                "are ejKernel's; keraunos.attention takes cfg and platform itself"
            )
        _refuse("Executor", kwargs.keys() & _WITHOUT.keys())
        arrays, options = kernel.low_level(*args, **kwargs)
        cfg = _cfg if cfg is None else cfg
        found = super().__call__(kernel, *arrays, _cfg=cfg, platform=platform, return_state=return_state, **options)
        return found if return_state else found[0]


def create_default_executor(persistent_cache_path: None = None, enable_autotuning: bool = True,
                            warmup_iterations: int = 2, timing_iterations: int = 5) -> Executor:
    """An executor with a memory cache and a tuner.

    Raises:
        NotImplementedError: a path is given.
    """
    if persistent_cache_path is not None:
        raise NotImplementedError(
            "create_default_executor: got persistent_cache_path; expected None: files here are another kind, "
            "which keraunos.PersistentCache keeps in a folder"
        )
    policy = AutotunePolicy(allow_autotune=enable_autotuning)
    return Executor(ConfigSelectorChain(ConfigCache(), policy, Tuner(warmup_iterations, timing_iterations)))
