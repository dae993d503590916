"""Lightning attention: the public function, its operation and its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.linear_attention import contract
from keraunos.kernels.recurrent.contract import most_heads
from keraunos.modules.linear_operation import LinearOperation
from keraunos.ops.executor import default_executor
from keraunos.ops.invocation import Config


@dataclass(frozen=True)
class LightningAttentionConfig(Config):
    """Launch configuration of lightning attention; see :class:`keraunos.ops.Config`."""


class LightningAttention(LinearOperation):
    """The operation ``"lightning_attn"``: linear attention with a fixed decay per head, ``(output, final_state)``."""

    op_id = "lightning_attn"
    config = LightningAttentionConfig
    recurrence = contract.LIGHTNING
    arguments = ("query", "key", "value", "log_decay", "initial_state", "cu_seqlens")

    def pack(self, query: Array, key: Array, value: Array, log_decay: Array | None,
             initial_state: Array | None = None, cu_seqlens: Array | None = None) -> contract.Args:
        return contract.Args(query, key, value, None, log_decay, initial_state, cu_seqlens)

    def unpack(self, args: contract.Args) -> tuple:
        return (*args[:3], *args[4:])

    def low_level(self, query: Array, key: Array, value: Array, layer_idx: int | Array | None = None,
                  num_layers: int | None = None, softmax_scale: float | None = None, initial_state: Array | None = None,
                  reverse: bool = False, cu_seqlens: Array | None = None,
                  *, log_decay: contract.Decay | None = None) -> tuple[tuple, dict[str, Any]]:
        """See :meth:`Kernel.low_level`."""
        heads = most_heads(query, key, value)
        gamma = contract.constant_decay("lightning_attention", query, heads, layer_idx, num_layers, log_decay)
        arrays = query, key, value, gamma, initial_state, cu_seqlens
        return arrays, dict(softmax_scale=softmax_scale, reverse=reverse)

    def call(self, fn: Callable, args: contract.Args, *, cfg: Config, softmax_scale: float | None = None,
             reverse: bool = False, **options: Any) -> Any:
        """See :meth:`Kernel.call`."""
        return fn(*args[:3], None, None, softmax_scale, args.initial_state, reverse, args.cu_seqlens,
                  log_decay=args.g_gamma, cfg=cfg)


_OPERATION = LightningAttention()


@frontends.operation
def lightning_attention(
    query: Array,
    key: Array,
    value: Array,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    *,
    layer_idx: int | Array | None = None,
    num_layers: int | None = None,
    log_decay: contract.Decay | None = None,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    state_v_first: bool = False,
    platform: str | None = None,
    cfg: Config | None = None,
) -> Any:
    """Lightning attention: linear attention whose state decays by a fixed factor per head.

    For every sequence and head h, with ``S_0 = initial_state`` or zeros::

        g_gamma[h] = -(8 / H) * (1 - layer_idx / num_layers) * h
        S_t = exp(g_gamma[h]) S_{t-1} + k_t v_t^T
        o_t = softmax_scale * S_t^T q_t

    The recurrence has H heads. Each of query, key and value may have any number of heads that divides H, the largest of
    their numbers: head h reads head ``h // (H // n)`` of an array with n heads.

    Args:
        query: ``[B, T, heads, K]``, bfloat16, float16, float32 or float64; a ``jax.Array`` or a ``torch.Tensor``.
        key: ``[B, T, heads, K]``, the query's dtype.
        value: ``[B, T, heads, V]``, the query's dtype.
        initial_state: ``[N, H, K, V]``, one state per sequence; N is B, or the number of packed sequences.
        cu_seqlens: ``[N + 1]``, int32 or int64, offsets ``[0, l1, l1 + l2, ..., T]`` of sequences packed into one row
            (B = 1). Make padding at the end a last sequence: tokens after the last offset have undefined results and
            gradients. A NumPy array is a constant of the call. Offsets on a device are not read on the host.
        layer_idx: the layer, from 0: an integer, or an integer array with one element, such as a tracer in a loop over
            layers. Its range is checked if the host knows its value.
        num_layers: the number of layers.
        log_decay: ``[H]`` or ``[B, H]``, in place of ``layer_idx`` and ``num_layers``: the decay of one step back,
            natural log, <= 0. Other models' formulas are in :mod:`keraunos.decay`. Heads sharded over devices need it
            too: each device passes its own heads' part.
        softmax_scale: factor of the output; ``K ** -0.5`` if None.
        reverse: run from the last token to the first; ``initial_state`` enters after the last token.
        return_state: return the final state too.
        state_v_first: initial_state and the returned state are ``[N, H, V, K]``, as some libraries have them.
        platform: ``"triton"``, ``"xla"``, ``"torch"``, on Hopper GPUs ``"cuda"`` (kernels in Gluon), or on TPUs
            ``"pallas"``: that one or an error. ``"auto"`` or None: the best that can run the call.
        cfg: launch configuration; wins over every cache and is never stored.

    Returns:
        The output ``[B, T, H, V]`` in the query's dtype, or ``(output, final_state)`` with the state
        ``[N, H, K, V]`` in float32 (float64 for float64 inputs). There are gradients for query, key, value,
        initial_state and, if it is an array, log_decay, also through the final state.

    Raises:
        ValueError: a shape, range or name is wrong; or a value of a decay or an offset that the host knows
            (:mod:`keraunos.ops.checks`); or no platform can run the call (:class:`UnsupportedError`).
        TypeError: an argument is of a wrong type or dtype.

    Example:
        >>> import jax, keraunos
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 100, 2, 16)) for i in range(3))
        >>> keraunos.lightning_attention(q, k, v, layer_idx=0, num_layers=4).shape
        (1, 100, 2, 16)

    Source: Lightning Attention-2 (arXiv:2401.04658).
    """
    heads = most_heads(query, key, value)
    gamma = contract.constant_decay("lightning_attention", query, heads, layer_idx, num_layers, log_decay)
    if cu_seqlens is not None:
        cu_seqlens = contract.placed("lightning_attention", cu_seqlens, query)
    output, state = default_executor()(
        _OPERATION, query, key, value, gamma, initial_state, cu_seqlens,
        softmax_scale=softmax_scale, reverse=reverse, return_state=bool(return_state), state_v_first=state_v_first,
        platform=platform, _cfg=cfg,
    )
    return (output, state) if return_state else output
