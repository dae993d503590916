"""The gated delta rule: the public function, its operation and its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.gated_delta_rule import reference
from keraunos.kernels.gated_delta_rule.contract import GATED_DELTA_RULE, Args
from keraunos.kernels.gated_delta_rule.reference_vjp import gated_delta_rule_vjp
from keraunos.modules.linear_operation import LinearOperation
from keraunos.ops import checks
from keraunos.ops.executor import default_executor
from keraunos.ops.invocation import Config, Invocation


@dataclass(frozen=True)
class GatedDeltaRuleConfig(Config):
    """Launch configuration of the gated delta rule; see :class:`keraunos.ops.Config`."""


class GatedDeltaRule(LinearOperation):
    """The operation ``"gated_delta_rule"``, returning ``(output, final_state)``."""

    op_id = "gated_delta_rule"
    config = GatedDeltaRuleConfig
    recurrence = GATED_DELTA_RULE
    arguments, pack = Args._fields, Args
    drawn: ClassVar[dict[str, Callable[[Any], Any]]] = {
        **LinearOperation.drawn, "key": lambda x: x * x.shape[-1] ** -0.5, "beta": lambda x: 1 / (1 + abs(x)),
    }

    def invocation(self, framework: str, dtype: str = "bfloat16", *, B: int = 1, T: int, H: int, K: int,
                   G: int | None = None, V: int | None = None, N: int | None = None, HQ: int | None = None,
                   HV: int | None = None, HG: int | None = None, gate: str | None = None, state: bool = False,
                   reverse: bool = False) -> Invocation:
        """See :meth:`LinearOperation.invocation`; gate: "scalar", the usual, "vector" or "none". beta has H heads."""
        gates = {"none": (), "scalar": (("g", 3),), "vector": (("g", 4),)}
        gate = gate or "scalar"
        if gate not in gates:
            raise ValueError(f"{self.op_id}: gate is {gate!r}; expected one of {sorted(gates)}")
        inv = super().invocation(framework, dtype, B=B, T=T, H=H, K=K, G=G, V=V, N=N, HQ=HQ, HV=HV, HG=HG,
                                 gate="none", state=state, reverse=reverse)
        arrays = dict(inv.arrays) | {name: ("float32", ndim) for name, ndim in gates[gate]} | {"beta": (dtype, 3)}
        return replace(inv, arrays={name: arrays[name] for name in Args._fields if name in arrays},
                       options={**inv.options, "use_qk_l2norm": False})

    def reference(self, args: Sequence[Any], kwargs: dict, dtype: type) -> tuple:
        """Output and final state."""
        return reference.gated_delta_rule(*args, **kwargs, dtype=dtype)

    def reference_vjp(self, args: Sequence[Any], kwargs: dict, cotangents: Sequence[np.ndarray],
                      dtype: type) -> tuple:
        """A gradient for each float argument."""
        return (*gated_delta_rule_vjp(*args, *cotangents, **kwargs, dtype=dtype), None)


_OPERATION = GatedDeltaRule()


@frontends.operation
def gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    g: Array | None = None,
    beta: Array | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    *,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
    reverse: bool = False,
    return_state: bool = False,
    state_v_first: bool = False,
    platform: str | None = None,
    cfg: Config | None = None,
) -> Any:
    """The gated delta rule: linear attention whose state is corrected by each token, not only added to.

    For every sequence and head, with ``S_0 = initial_state`` or zeros::

        S~ = diag(exp(g_t)) S_{t-1}
        u_t = beta_t (v_t - S~^T k_t)
        S_t = S~ + k_t u_t^T
        o_t = softmax_scale * S_t^T q_t

    With one gate per token and head it is Gated DeltaNet (Qwen3-Next, Qwen3.5), with one per key dimension Kimi Delta
    Attention, without gates DeltaNet.

    The recurrence has H heads. Each of query, key, value, g and beta may have any number of heads that divides H, the
    largest of their numbers: head h reads head ``h // (H // n)`` of an array with n heads.

    Args:
        query: ``[B, T, heads, K]``, bfloat16, float16, float32 or float64; a ``jax.Array`` or a ``torch.Tensor``.
        key: ``[B, T, heads, K]``, the query's dtype. The state grows without end where ``beta * |k|^2`` is above 2.
        value: ``[B, T, heads, V]``, the query's dtype.
        g: ``[B, T, heads]``, one gate per token and head, or ``[B, T, heads, K]``, one per key dimension. Natural log,
            <= 0; ``-inf`` forgets everything before the token. None: no gates.
        beta: ``[B, T, heads]``, how much of the error is corrected, from 0 to 1, or 2 for negative eigenvalues. None:
            ones.
        initial_state: ``[N, H, K, V]``, one state per sequence; N is B, or the number of packed sequences.
        cu_seqlens: ``[N + 1]``, int32 or int64, offsets ``[0, l1, l1 + l2, ..., T]`` of sequences packed into one row
            (B = 1). Make padding at the end a last sequence: tokens after the last offset have undefined results and
            gradients. A NumPy array is a constant of the call. Offsets on a device are not read on the host.
        softmax_scale: factor of the output; ``K ** -0.5`` if None.
        use_qk_l2norm: divide query and key by ``sqrt(sum x^2 + 1e-6)`` first, in float32.
        reverse: run from the last token to the first; ``initial_state`` enters after the last token.
        return_state: return the final state too.
        state_v_first: initial_state and the returned state are ``[N, H, V, K]``, as some libraries have them.
        platform: ``"triton"``, ``"xla"``, ``"torch"`` or, on Hopper GPUs, ``"cuda"``: that one or an error. ``"auto"``
            or None: the best that can run the call.
        cfg: launch configuration; wins over every cache and is never stored.

    Returns:
        The output ``[B, T, H, V]`` in the query's dtype, or ``(output, final_state)`` with the state
        ``[N, H, K, V]`` in float32 (float64 for float64 inputs). There are gradients for query, key, value, g, beta
        and initial_state, also through the final state.

    Raises:
        ValueError: a shape, range or name is wrong; or a value of a gate or an offset that the host knows
            (:mod:`keraunos.ops.checks`); or no platform can run the call (:class:`UnsupportedError`).
        TypeError: an argument is of a wrong type or dtype.

    Example:
        >>> import jax, jax.numpy as jnp, keraunos
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 100, 2, 16)) for i in range(3))
        >>> g, beta = -jnp.ones((1, 100, 2)) / 8, jnp.ones((1, 100, 2)) / 2
        >>> output, state = keraunos.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True, return_state=True)
        >>> output.shape, state.shape
        ((1, 100, 2, 16), (1, 2, 16, 16))

    Source: Gated Delta Networks (arXiv:2412.06464); chunks as in Parallelizing Linear Transformers with the Delta Rule
    (arXiv:2406.06484); gates per dimension: Kimi Linear (arXiv:2510.26692).
    """
    if cu_seqlens is not None:
        T = query.shape[1] if getattr(query, "ndim", 0) == 4 else None
        cu_seqlens = checks.placed("gated_delta_rule", cu_seqlens, query, T)
    output, state = default_executor()(
        _OPERATION, query, key, value, g, beta, initial_state, cu_seqlens,
        softmax_scale=softmax_scale, use_qk_l2norm=use_qk_l2norm, reverse=reverse, return_state=bool(return_state),
        state_v_first=state_v_first, platform=platform, _cfg=cfg,
    )
    return (output, state) if return_state else output
