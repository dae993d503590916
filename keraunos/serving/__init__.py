"""Linear attention in an inference engine: every request's state lives in a slot of a pool.

A request's whole past is one state ``[H, K, V]`` per layer. An engine keeps the states of all its requests in one
array, the pool, and tells each call which slots its rows use. Four functions do everything on the pool:

- :func:`prefill`: the tokens of any number of prompts, or parts of prompts, packed into one row;
- :func:`decode`: one token for each request;
- :func:`verify` and :func:`commit`: the outputs for several draft tokens of each request, without changing the pool;
  then the drafts that were accepted.

Each computes ``S_t = diag(exp(g_t + g_gamma)) S_{t-1} + k_t v_t^T`` and ``o_t = softmax_scale * S_t^T q_t``, and is one
sequence of launches for all requests. Nothing is read on the host, so calls can be captured in CUDA graphs and replayed
with other slots, lengths and padding.

The pool, ``states``: ``[slots, H, K, V]``, float32 or bfloat16. PyTorch changes it in place, and its strides are free:
``pool.transpose(-1, -2)`` is the view of a pool that is stored as ``[slots, H, V, K]``. In JAX the memory of the pool
that is given goes to the one that is returned, as with ``jax.jit``'s ``donate_argnums``; or pass a ``jax.Ref``, which
is changed in place. Values are computed in float32 and rounded when they are stored.

``slots``: one per request; -1 is padding: no slot is touched, and its rows of the output are zero. Two requests of one
call must not share a slot, and slots must be below the pool's size, which is checked on the CPU only: a device's values
are not read (but see :mod:`keraunos.ops.checks`). Slots, counts, offsets and boundaries may also be NumPy arrays,
which each call copies to the device.

Under ``torch.autocast`` query, key and value are cast to its dtype, gates, decays and the pool are not; ``out`` then
has that dtype.

There are no gradients: training uses :func:`keraunos.gla_attention` and :func:`keraunos.lightning_attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.linear_attention.contract import Decay, per_head
from keraunos.kernels.state_pool.contract import INDICES, Args, check_room
from keraunos.ops.checks import placed
from keraunos.ops.executor import default_executor
from keraunos.ops.invocation import Config
from keraunos.serving.pool_operation import COMMIT, DECODE, PREFILL, VERIFY, PoolOperation

if TYPE_CHECKING:
    import jax

__all__ = ["commit", "decode", "prefill", "verify"]


def _decay(operation: PoolOperation, key: Array, log_decay: Decay | None, g_gamma: Decay | None) -> Array | None:
    """The one of them that is given."""
    if log_decay is None:
        return g_gamma if g_gamma is None else per_head(operation.op_id, key, "g_gamma", g_gamma)
    if g_gamma is not None:
        raise ValueError(f"{operation.op_id}: got log_decay and g_gamma, which are the same; expected one of them")
    return per_head(operation.op_id, key, "log_decay", log_decay)


def _call(operation: PoolOperation, args: Args, softmax_scale: float | None, platform: str | None,
          cfg: Config | None) -> tuple[Any, Any]:
    """``(output, pool)``: what is changed in place is what was given."""
    if framework := frontends.framework_of(args.key):
        # What varies from call to call, unlike decays, and so is no constant.
        array = frontends.get(framework).array
        for name in INDICES:
            if isinstance(x := getattr(args, name), np.ndarray):
                args = args._replace(**{name: array(x, args.key)})
        args = _per_token(args) if operation is PREFILL else args
    states, out = args.states, args.out
    if out is not None:
        # Strides are not always among what calls are told apart by.
        check_room(operation.op_id, out)
    output, pool = default_executor()(operation, *args, softmax_scale=softmax_scale, platform=platform, _cfg=cfg)
    output = output if out is None else out
    return output, states if pool is None or framework == "torch" else pool


def _per_token(args: Args) -> Args:
    """Decays per request and head as gates per token and head; what does not fit is left to the checks."""
    gamma, slots, cu = args.g_gamma, args.slots, args.cu_seqlens
    if gamma is None or gamma.ndim != 2 or any(getattr(x, "ndim", 0) != 1 for x in (slots, cu)):
        return args
    if gamma.shape[0] != slots.shape[0] or cu.shape[0] != slots.shape[0] + 1 or gamma.shape[1] != args.states.shape[1]:
        return args
    if isinstance(gamma, np.ndarray) and not (gamma <= 0).all():
        return args
    H, heads = gamma.shape[1], 0 if args.g is None else args.g.shape[1]
    if args.g is not None and (args.g.ndim not in (2, 3) or not heads or H % heads):
        return args
    frontend = frontends.of(args.key)
    gamma = frontend.array(gamma, args.key) if isinstance(gamma, np.ndarray) else gamma
    ends, token = frontend.cast(cu, "int32")[1:], frontend.numbers(args.key.shape[0], args.key)
    request = frontend.xp.searchsorted(ends, token, side="right")
    gate = frontend.cast(gamma, "float32")[frontend.xp.clip(request, 0, slots.shape[0] - 1)]
    if args.g is not None:
        head = frontend.array(np.arange(H) // (H // heads), args.key)
        g = frontend.cast(args.g, "float32")[:, head]
        gate = g + (gate if g.ndim == 2 else gate[..., None])
    return args._replace(g=gate, g_gamma=None)


@frontends.operation
def decode(
    query: Array,
    key: Array,
    value: Array,
    states: Array | jax.Ref,
    slots: Array,
    *,
    log_decay: Decay | None = None,
    g: Array | None = None,
    g_gamma: Decay | None = None,
    softmax_scale: float | None = None,
    out: Array | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
) -> tuple[Any, Any]:
    """One token for each request: ``S = diag(exp(g + g_gamma)) S + k v^T``, ``o = softmax_scale * S^T q``.

    Args:
        query: ``[N, heads, K]``, bfloat16, float16 or float32; like key and value possibly a slice of a fused
            projection.
        key: ``[N, heads, K]``; value: ``[N, heads, V]``. Each of query, key, value and g may have any number of heads
            that divides H, the largest of their numbers: head h reads head ``h // (H // n)`` of an array with n heads.
        states: ``[slots, H, K, V]``, the pool; see :mod:`keraunos.serving`.
        slots: ``[N]``, int32 or int64; -1: padding.
        log_decay: another name of g_gamma; give one of them at most.
        g: ``[N, heads, K]`` or ``[N, heads]``, the token's gates, natural log, <= 0.
        g_gamma: ``[H]``, a constant gate per head, or ``[N, H]``, per request and head; natural log, <= 0. Added to
            ``g``. (In :func:`prefill` one per request and head becomes a gate per token and head.)
        softmax_scale: factor of the output; ``K ** -0.5`` if None.
        out: ``[N, H, V]``, where the output goes (PyTorch).
        platform: ``"triton"``, ``"xla"``, ``"torch"``, on TPUs ``"pallas"``, or for :func:`prefill` on Hopper GPUs
            ``"cuda"``: that one or an error. ``"auto"`` or None: the best that can.
        cfg: launch configuration.

    Returns:
        The output ``[N, H, V]`` in the query's dtype, and the pool.

    Raises:
        ValueError: a shape, range or name is wrong, or no platform can run the call.
        TypeError: an argument is of a wrong type or dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from keraunos import serving
        >>> q = jnp.ones((2, 4, 16))
        >>> output, states = serving.decode(q, q, q, jnp.zeros((8, 4, 16, 16)), jnp.array([5, -1]), g_gamma=[-0.5] * 4)
        >>> output.shape, float(output[0, 0, 0]), float(output[1].sum())
        ((2, 4, 16), 4.0, 0.0)
    """
    gamma = _decay(DECODE, key, log_decay, g_gamma)
    args = Args(key, value, query, g, gamma, states, slots, out=out)
    return _call(DECODE, args, softmax_scale, platform, cfg)


@frontends.operation
def verify(
    query: Array,
    key: Array,
    value: Array,
    states: Array | jax.Ref,
    slots: Array,
    *,
    log_decay: Decay | None = None,
    g: Array | None = None,
    g_gamma: Decay | None = None,
    exports: tuple[Array, Array] | None = None,
    softmax_scale: float | None = None,
    out: Array | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
) -> Any:
    """The outputs for draft tokens, one after the other, from each request's state, which stays as it is.

    On one platform they are bit for bit those that :func:`decode` would give for a float32 pool.

    Args:
        query: ``[N, T, heads, K]``: T drafts for each request.
        key, value: ``[N, T, heads, K]``, ``[N, T, heads, V]``.
        states, slots: as for :func:`decode`.
        g: ``[N, T, heads, K]`` or ``[N, T, heads]``.
        log_decay, g_gamma, softmax_scale, platform, cfg: as for :func:`decode`.
        exports: ``(pool, targets)``, platform torch: the state after draft t of request n goes to that pool too, to
            slot ``targets[n, t]``, for engines that keep one for each draft and go on from that of the last accepted
            one. ``pool``: ``[slots, H, K, V]``, possibly ``states``; ``targets``: ``[N, T]``, int32 or int64; -1:
            nowhere. A request's own slot may be among its targets, another request's slots may not.
        out: ``[N, T, H, V]``.

    Returns:
        The output ``[N, T, H, V]``.

    Raises:
        ValueError, TypeError: as :func:`decode`.
    """
    pair = (None, None) if exports is None else exports
    if not isinstance(pair, tuple | list) or len(pair) != 2 or (pair[0] is None) != (pair[1] is None):
        raise TypeError(f"verify: exports is of type {type(exports).__qualname__}; expected a pair (pool, targets)")
    gamma = _decay(VERIFY, key, log_decay, g_gamma)
    args = Args(key, value, query, g, gamma, states, slots, targets=pair[1], out=out, exports=pair[0])
    return _call(VERIFY, args, softmax_scale, platform, cfg)[0]


@frontends.operation
def commit(
    key: Array,
    value: Array,
    states: Array | jax.Ref,
    slots: Array,
    counts: Array,
    *,
    log_decay: Decay | None = None,
    g: Array | None = None,
    g_gamma: Decay | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
) -> Any:
    """Take each request's state past the first ``counts`` of its drafts, as if these had been decoded.

    Args:
        key, value, states, slots, log_decay, g, g_gamma, platform, cfg: as :func:`verify` got them.
        counts: ``[N]``, int32 or int64: how many drafts were accepted, 0 to T; 0 leaves the slot untouched.

    Returns:
        The pool.

    Raises:
        ValueError, TypeError: as :func:`decode`.
    """
    args = Args(key, value, None, g, _decay(COMMIT, key, log_decay, g_gamma), states, slots, counts)
    return _call(COMMIT, args, None, platform, cfg)[1]


@frontends.operation
def prefill(
    query: Array,
    key: Array,
    value: Array,
    states: Array | jax.Ref,
    slots: Array,
    cu_seqlens: Array,
    *,
    log_decay: Decay | None = None,
    g: Array | None = None,
    g_gamma: Decay | None = None,
    has_initial: Array | None = None,
    boundaries: tuple[Array, Array] | None = None,
    softmax_scale: float | None = None,
    out: Array | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
) -> tuple[Any, Any]:
    """Prompts, or parts of prompts, of any lengths, packed into one row: each continues the state in its slot.

    Args:
        query, key, value: ``[T, heads, K]``, ``[T, heads, K]``, ``[T, heads, V]``.
        states, slots: as for :func:`decode`; slots are ``[N]``, one per request.
        cu_seqlens: ``[N + 1]``, int32 or int64: request n has the tokens from ``cu_seqlens[n]`` to
            ``cu_seqlens[n + 1]``; it may have none. Offsets rise from 0 to T at most; tokens after the last
            offset are padding. A NumPy array is a constant of the call.
        g: ``[T, heads, K]`` or ``[T, heads]``.
        has_initial: ``[N]``, bool: False for a request that starts from zeros, whatever its slot holds, NaN included.
            None: all continue.
        boundaries: ``(tokens, targets)``, both ``[M]``: the state after the packed token ``tokens[m]`` goes to slot
            ``targets[m]`` as well, for other requests with the same prefix. Tokens in ascending order; a target of -1,
            and a token of padding, exports nothing. Targets must be no request's slot.
        log_decay, g_gamma, softmax_scale, platform, cfg: as for :func:`decode`.
        out: ``[T, H, V]``, contiguous.

    Returns:
        The output ``[T, H, V]``, zeros for padding, and the pool.

    Raises:
        ValueError, TypeError: as :func:`decode`.
    """
    pair = (None, None) if boundaries is None else boundaries
    if not isinstance(pair, tuple | list) or len(pair) != 2 or (pair[0] is None) != (pair[1] is None):
        raise TypeError(f"prefill: boundaries is {boundaries!r}; expected a pair (tokens, targets)")
    tokens, targets = pair
    gamma = _decay(PREFILL, key, log_decay, g_gamma)
    T = query.shape[0] if getattr(query, "ndim", 0) == 3 else None
    offsets = placed("prefill", cu_seqlens, query, T, whole=False)
    args = Args(key, value, query, g, gamma, states, slots, None, offsets, has_initial, tokens, targets, out)
    return _call(PREFILL, args, softmax_scale, platform, cfg)
