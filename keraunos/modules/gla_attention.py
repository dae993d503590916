"""Gated linear attention: the public function, its operation and its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.linear_attention import contract
from keraunos.modules.linear_operation import LinearOperation
from keraunos.ops.executor import default_executor
from keraunos.ops.invocation import Config


@dataclass(frozen=True)
class GLAttentionConfig(Config):
    """Launch configuration of gated linear attention; see :class:`keraunos.ops.Config`."""


class GLAttention(LinearOperation):
    """The operation ``"gla"``: gated linear attention, returning ``(output, final_state)``."""

    op_id = "gla"
    config = GLAttentionConfig
    recurrence = contract.GLA
    arguments = contract.Args._fields

    def low_level(self, query: Array, key: Array, value: Array, g: Array | None = None, g_gamma: Array | None = None,
                  softmax_scale: float | None = None, initial_state: Array | None = None, reverse: bool = False,
                  cu_seqlens: Array | None = None) -> tuple[tuple, dict[str, Any]]:
        """See :meth:`Kernel.low_level`."""
        arrays = query, key, value, g, g_gamma, initial_state, cu_seqlens
        return arrays, dict(softmax_scale=softmax_scale, reverse=reverse)

    def call(self, fn: Callable, args: contract.Args, *, cfg: Config, softmax_scale: float | None = None,
             reverse: bool = False, **options: Any) -> Any:
        """See :meth:`Kernel.call`."""
        return fn(*args[:5], softmax_scale, args.initial_state, reverse, args.cu_seqlens, cfg=cfg)


_OPERATION = GLAttention()


@frontends.operation
def gla_attention(
    query: Array,
    key: Array,
    value: Array,
    g: Array | None = None,
    g_gamma: contract.Decay | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    state_v_first: bool = False,
    platform: str | None = None,
    cfg: Config | None = None,
) -> Any:
    """Gated linear attention: linear attention whose state decays by a learned factor per token and key dimension.

    For every sequence and head, with ``S_0 = initial_state`` or zeros::

        S_t = diag(exp(g_t + g_gamma)) S_{t-1} + k_t v_t^T
        o_t = softmax_scale * S_t^T q_t

    The recurrence has H heads. Each of query, key, value and g may have any number of heads that divides H, the largest
    of their numbers: head h reads head ``h // (H // n)`` of an array with n heads. So queries may share keys (GQA),
    values may share queries and keys (as in Mamba-2), and gates may be those of key heads.

    Args:
        query: ``[B, T, heads, K]``, bfloat16, float16, float32 or float64; a ``jax.Array`` or a ``torch.Tensor``.
        key: ``[B, T, heads, K]``, the query's dtype.
        value: ``[B, T, heads, V]``, the query's dtype.
        g: ``[B, T, heads, K]``, one gate per token and key dimension, or ``[B, T, heads]``, one per token and head
            (RetNet, Mamba-2, simple GLA). Natural log, <= 0; ``-inf`` forgets everything before the token.
        g_gamma: ``[H]`` or ``[B, H]``, a constant gate per head, natural log, <= 0. Added to ``g``.
        initial_state: ``[N, H, K, V]``, one state per sequence; N is B, or the number of packed sequences.
        cu_seqlens: ``[N + 1]``, int32 or int64, offsets ``[0, l1, l1 + l2, ..., T]`` of sequences packed into one row
            (B = 1). Make padding at the end a last sequence: tokens after the last offset have undefined results and
            gradients. A NumPy array is a constant of the call. Offsets on a device are not read on the host.
        softmax_scale: factor of the output; ``K ** -0.5`` if None.
        reverse: run from the last token to the first; ``initial_state`` enters after the last token.
        return_state: return the final state too.
        state_v_first: initial_state and the returned state are ``[N, H, V, K]``, as some libraries have them.
        platform: ``"triton"``, ``"xla"``, ``"torch"``, on Hopper GPUs ``"cuda"`` (kernels in Gluon), or on TPUs
            ``"pallas"``: that one or an error. ``"auto"`` or None: the best that can run the call.
        cfg: launch configuration; wins over every cache and is never stored.

    Returns:
        The output ``[B, T, H, V]`` in the query's dtype, or ``(output, final_state)`` with the state
        ``[N, H, K, V]`` in float32 (float64 for float64 inputs). There are gradients for query, key, value, g, g_gamma
        and initial_state, also through the final state.

    Raises:
        ValueError: a shape, range or name is wrong; or a value of a decay or an offset that the host knows
            (:mod:`keraunos.ops.checks`); or no platform can run the call (:class:`UnsupportedError`).
        TypeError: an argument is of a wrong type or dtype.

    Example:
        >>> import jax, jax.numpy as jnp, keraunos
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 100, 2, 16)) for i in range(3))
        >>> g = -jax.nn.softplus(jax.random.normal(jax.random.key(3), (1, 100, 2, 16)))
        >>> output, state = keraunos.gla_attention(q, k, v, g, return_state=True)
        >>> output.shape, state.shape
        ((1, 100, 2, 16), (1, 2, 16, 16))

    Source: Gated Linear Attention Transformers with Hardware-Efficient Training (arXiv:2312.06635).
    """
    gamma = None
    if g_gamma is not None:
        gamma = contract.per_head("gla_attention", query, "g_gamma", g_gamma)
    if cu_seqlens is not None:
        cu_seqlens = contract.placed("gla_attention", cu_seqlens, query)
    output, state = default_executor()(
        _OPERATION, query, key, value, g, gamma, initial_state, cu_seqlens,
        softmax_scale=softmax_scale, reverse=reverse, return_state=bool(return_state), state_v_first=state_v_first,
        platform=platform, _cfg=cfg,
    )
    return (output, state) if return_state else output
