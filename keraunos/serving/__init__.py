"""Linear attention in an inference engine: every request's state lives in a slot of a pool.

A request's whole past is one state ``[H, K, V]`` per layer. An engine keeps the states of all its requests in one
array, the pool, and tells each call which slots its rows use. Four functions do everything on the pool:

- :func:`prefill`: the tokens of any number of prompts, or parts of prompts, packed into one row;
- :func:`decode`: one token for each request;
- :func:`verify` and :func:`commit`: the outputs for several draft tokens of each request, without changing the pool;
  then the drafts that were accepted.

Each computes ``S_t = diag(exp(g_t + g_gamma)) S_{t-1} + k_t v_t^T`` and ``o_t = softmax_scale * S_t^T q_t``, or with
``beta`` the gated delta rule, ``S~ = diag(exp(g_t + g_gamma)) S_{t-1}``, ``u_t = beta_t (v_t - S~^T k_t)``, ``S_t = S~
+ k_t u_t^T``. It is one sequence of launches for all requests. Nothing is read on the host, so calls can be captured in
CUDA graphs and replayed with other slots, lengths and padding.

The pool, ``states``: ``[slots, H, K, V]``, float32 or bfloat16. PyTorch changes it in place, and its strides are free:
``pool.transpose(-1, -2)`` is the view of a pool that is stored as ``[slots, H, V, K]``, which ``state_v_first=True``
takes too. In JAX the memory of the pool that is given goes to the one that is returned, as with ``jax.jit``'s
``donate_argnums``; or pass a ``jax.Ref``, which is changed in place. Values are computed in float32 and rounded when
they are stored.

``slots``: one per request. -1 is padding: no slot is touched, and its rows of the output are zero. Two requests of one
call must not share a slot, and a slot must be below the pool's size. Both are checked on a CPU; on other devices values
are read only if ``KERAUNOS_CHECK=1`` (:mod:`keraunos.ops.checks`). Slots, counts, offsets and boundaries may also be
NumPy arrays, which each call copies to the device.

Under ``torch.autocast`` query, key and value are cast to its dtype, gates, decays and the pool are not; ``out`` then
has that dtype.

There are no gradients: training uses :func:`keraunos.gla_attention`, :func:`keraunos.lightning_attention` and
:func:`keraunos.gated_delta_rule`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.linear_attention.contract import Decay, per_head
from keraunos.kernels.state_pool.contract import INDICES, Args, check_room
from keraunos.ops.arguments import truth
from keraunos.ops.checks import placed
from keraunos.ops.executor import default_executor
from keraunos.ops.invocation import Config, is_number
from keraunos.serving.pool_operation import COMMIT, DECODE, DELTA_PREFILL, PREFILL, VERIFY, PoolOperation

if TYPE_CHECKING:
    import jax

__all__ = ["commit", "decode", "prefill", "verify"]


def _gates(operation: PoolOperation, key: Array, log_decay: Decay | None, g: Array | None, g_gamma: Decay | None,
           beta: Array | None = None, a: Array | None = None, b: Array | None = None, A_log: Array | None = None,
           dt_bias: Array | None = None, lower_bound: float | None = None,
           use_qk_l2norm: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The decays and corrections of states: arrays by their names in the contract, and options."""
    name = operation.op_id
    if log_decay is not None and g_gamma is not None:
        raise ValueError(f"{name}: got log_decay and g_gamma, which are the same; expected one of them")
    constant, gamma = ("g_gamma", g_gamma) if log_decay is None else ("log_decay", log_decay)
    gamma = gamma if gamma is None else per_head(name, key, constant, gamma)
    if beta is a is b is A_log is dt_bias is None and lower_bound is None and use_qk_l2norm is False:
        return {"g": g, "g_gamma": gamma}, {}
    given = {"g": g, "a": a, "beta": beta, "b": b, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound,
             "use_qk_l2norm": use_qk_l2norm or None}
    known = {x for x, value in given.items() if value is not None}
    for one, other in (("g", "a"), ("beta", "b")):
        if known >= {one, other}:
            raise ValueError(f"{name}: got {one} and {other}, which say the same; expected one of them")
    # Linear attention takes gates as they are.
    needs = [("a", "A_log"), ("A_log", "a"), ("dt_bias", "a"), ("lower_bound", "a")]
    for one, needed in (*needs, ("a", "beta or b"), ("use_qk_l2norm", "beta or b")):
        if one in known and not known & {*needed.split(" or ")}:
            raise TypeError(f"{name}: got {one} without {needed}; expected both, or neither")
    if lower_bound is not None and not (is_number(lower_bound) and lower_bound < 0):
        raise ValueError(f"{name}: lower_bound is {lower_bound!r}; expected a number below 0")
    options: dict[str, Any] = {"use_qk_l2norm": use_qk_l2norm}
    options |= {"raw_beta": True} if b is not None else {}
    options |= {"lower_bound": float(lower_bound)} if lower_bound is not None else {}
    return {"g": g if a is None else a, "g_gamma": gamma, "A_log": A_log, "dt_bias": dt_bias,
            "beta": b if beta is None else beta}, options


def _call(operation: PoolOperation, args: Args, options: dict[str, Any], softmax_scale: float | None,
          platform: str | None, cfg: Config | None, state_v_first: bool) -> tuple[Any, Any]:
    """``(output, pool)``: what is changed in place is what was given."""
    states, out = args.states, args.out
    if framework := frontends.framework_of(args.key):
        # What varies from call to call, unlike decays, and so is no constant.
        array = frontends.get(framework).array
        for name in INDICES:
            if isinstance(x := getattr(args, name), np.ndarray):
                args = args._replace(**{name: array(x, args.key)})
        args = _per_token(args) if operation is PREFILL else args
    if operation is PREFILL and args.beta is not None:
        operation = DELTA_PREFILL
    if state_v_first is not False and truth(operation.op_id, "state_v_first", state_v_first):
        if framework == "torch":
            views = {name: getattr(args, name) for name in ("states", "exports")}
            args = args._replace(**{name: x.mT for name, x in views.items() if getattr(x, "ndim", 0) == 4})
        else:
            options = options | {"state_v_first": True}
    if out is not None:
        # Strides are not always among what calls are told apart by.
        check_room(operation.op_id, out)
    output, pool = default_executor()(operation, *args, softmax_scale=softmax_scale, platform=platform, _cfg=cfg,
                                      **options)
    output = output if out is None else out
    return output, states if pool is None or framework == "torch" else pool


def _per_token(args: Args) -> Args:
    """Decays per request and head as gates per token and head, with ``beta`` also those per head.

    An argument that does not fit is left to the checks.
    """
    gamma, slots, cu = args.g_gamma, args.slots, args.cu_seqlens
    fits = [getattr(x, "ndim", 0) for x in (slots, cu, args.states)] == [1, 1, 4]
    if gamma is None or not fits or cu.shape[0] != slots.shape[0] + 1:
        return args
    H = args.states.shape[1]
    if gamma.shape != (slots.shape[0], H) and (args.beta is None or gamma.shape != (H,)):
        return args
    if isinstance(gamma, np.ndarray) and not (gamma <= 0).all():
        return args
    heads = 0 if args.g is None else args.g.shape[1]
    if args.g is not None and (args.g.ndim not in (2, 3) or not heads or H % heads):
        return args
    frontend = frontends.of(args.key)
    gamma = frontend.array(gamma, args.key) if isinstance(gamma, np.ndarray) else gamma
    gate = frontend.cast(gamma, "float32")
    if gamma.ndim == 2:
        ends, token = frontend.cast(cu, "int32")[1:], frontend.numbers(args.key.shape[0], args.key)
        request = frontend.xp.searchsorted(ends, token, side="right")
        gate = gate[frontend.xp.clip(request, 0, slots.shape[0] - 1)]
    gate = frontend.xp.broadcast_to(gate, (args.key.shape[0], H))
    if args.g is not None:
        head = frontend.array(np.arange(H) // (H // heads), args.key)
        g = frontend.cast(args.g, "float32")[:, head]
        gate = g + (gate if g.ndim == 2 else gate[..., None])
    return args._replace(g=gate, g_gamma=None)


def _boundaries(every: tuple[int, Array], cu_seqlens: Array, like: Array) -> tuple[Array, Array]:
    """``every`` as boundaries: those beyond a request's end are its last token, and go nowhere."""
    if not isinstance(every, tuple | list) or len(every) != 2:
        raise TypeError(f"prefill: every is {every!r}; expected a pair (n, targets)")
    n, targets = every
    if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1:
        raise ValueError(f"prefill: every has n = {n!r}; expected a whole number of tokens above 0")
    shape, N = tuple(getattr(targets, "shape", ())), cu_seqlens.shape[0] - 1
    if len(shape) != 2 or shape[0] != N:
        raise ValueError(f"prefill: every has targets of shape {shape}; expected [N, M] with N = {N}, like cu_seqlens")
    frontend = frontends.of(like)
    targets = frontend.array(targets, like) if isinstance(targets, np.ndarray) else targets
    ends = cu_seqlens[:-1, None] + n * (frontend.numbers(shape[1], cu_seqlens) + 1)
    tokens = frontend.xp.minimum(ends, cu_seqlens[1:, None]) - 1
    return tokens.reshape(-1), frontend.xp.where(ends <= cu_seqlens[1:, None], targets, -1).reshape(-1)


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
    beta: Array | None = None,
    a: Array | None = None,
    b: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = False,
    softmax_scale: float | None = None,
    state_v_first: bool = False,
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
        beta: ``[N, heads]``, how much of a value's error is corrected: then it is the gated delta rule, as
            :func:`keraunos.gated_delta_rule` has it.
        a, A_log, dt_bias: with beta, in place of ``g``: what a model's gates are made of, in the same launch. The gate
            is ``-exp(A_log) * softplus(a + dt_bias)``, ``a`` having the shapes of ``g``; A_log: ``[heads]``, those of
            ``a``; dt_bias: ``[heads]``, or ``[heads, K]`` where ``a`` has K; or None.
        lower_bound: below 0: then the gate is ``lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``.
        b: in place of beta, which is its sigmoid.
        use_qk_l2norm: with beta: divide query and key by ``sqrt(sum x^2 + 1e-6)`` first.
        softmax_scale: factor of the output; ``K ** -0.5`` if None.
        state_v_first: the pool is ``[slots, H, V, K]``. JAX has that on ``"xla"`` and, but for :func:`prefill`, on
            ``"triton"``.
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
    gates, options = _gates(DECODE, key, log_decay, g, g_gamma, beta, a, b, A_log, dt_bias, lower_bound,
                            use_qk_l2norm)
    args = Args(key, value, query, states=states, slots=slots, out=out, **gates)
    return _call(DECODE, args, options, softmax_scale, platform, cfg, state_v_first)


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
    beta: Array | None = None,
    a: Array | None = None,
    b: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = False,
    exports: tuple[Array, Array] | None = None,
    softmax_scale: float | None = None,
    state_v_first: bool = False,
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
        g, beta, a, b: ``[N, T, heads]``; g and a also ``[N, T, heads, K]``.
        log_decay, g_gamma, A_log, dt_bias, lower_bound, use_qk_l2norm, softmax_scale, state_v_first, platform, cfg: as
            for :func:`decode`.
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
    gates, options = _gates(VERIFY, key, log_decay, g, g_gamma, beta, a, b, A_log, dt_bias, lower_bound,
                            use_qk_l2norm)
    args = Args(key, value, query, states=states, slots=slots, targets=pair[1], out=out, exports=pair[0], **gates)
    return _call(VERIFY, args, options, softmax_scale, platform, cfg, state_v_first)[0]


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
    beta: Array | None = None,
    a: Array | None = None,
    b: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = False,
    state_v_first: bool = False,
    platform: str | None = None,
    cfg: Config | None = None,
) -> Any:
    """Take each request's state past the first ``counts`` of its drafts, as if these had been decoded.

    Args:
        key, value, states, slots, gates and options: as :func:`verify` got them.
        counts: ``[N]``, int32 or int64: how many drafts were accepted, 0 to T; 0 leaves the slot untouched.

    Returns:
        The pool.

    Raises:
        ValueError, TypeError: as :func:`decode`.
    """
    gates, options = _gates(COMMIT, key, log_decay, g, g_gamma, beta, a, b, A_log, dt_bias, lower_bound,
                            use_qk_l2norm)
    args = Args(key, value, states=states, slots=slots, counts=counts, **gates)
    return _call(COMMIT, args, options, None, platform, cfg, state_v_first)[1]


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
    beta: Array | None = None,
    use_qk_l2norm: bool = False,
    has_initial: Array | None = None,
    boundaries: tuple[Array, Array] | None = None,
    every: tuple[int, Array] | None = None,
    softmax_scale: float | None = None,
    state_v_first: bool = False,
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
        g: ``[T, heads, K]`` or ``[T, heads]``; beta: ``[T, heads]``. :mod:`keraunos.decay` makes gates of ``a``.
        has_initial: ``[N]``, bool: False for a request that starts from zeros, whatever its slot holds, NaN included.
            None: all continue.
        boundaries: ``(tokens, targets)``, both ``[M]``: the state after the packed token ``tokens[m]`` goes to slot
            ``targets[m]`` as well, for other requests with the same prefix. Tokens in ascending order; a target of -1,
            and a token of padding, exports nothing. Targets must be no request's slot.
        every: ``(n, targets)``, in place of boundaries: the state after each n tokens of request i, counted from its
            first of this call, goes to the slots ``targets[i]``, ``[N, M]``, one after the other; -1: nowhere.
        log_decay, g_gamma, use_qk_l2norm, softmax_scale, state_v_first, platform, cfg: as for :func:`decode`.
        out: ``[T, H, V]``, contiguous.

    Returns:
        The output ``[T, H, V]``, zeros for padding, and the pool.

    Raises:
        ValueError, TypeError: as :func:`decode`.
    """
    pair = (None, None) if boundaries is None else boundaries
    if not isinstance(pair, tuple | list) or len(pair) != 2 or (pair[0] is None) != (pair[1] is None):
        raise TypeError(f"prefill: boundaries is {boundaries!r}; expected a pair (tokens, targets)")
    T = query.shape[0] if getattr(query, "ndim", 0) == 3 else None
    offsets = placed("prefill", cu_seqlens, query, T, whole=False)
    if every is not None and offsets is not None and getattr(offsets, "ndim", 0) == 1 and frontends.framework_of(query):
        if boundaries is not None:
            raise ValueError("prefill: got boundaries and every, which are the same; expected one of them")
        pair = _boundaries(every, offsets, query)
    gates, options = _gates(PREFILL, key, log_decay, g, g_gamma, beta, use_qk_l2norm=use_qk_l2norm)
    args = Args(key, value, query, states=states, slots=slots, cu_seqlens=offsets, has_initial=has_initial,
                tokens=pair[0], targets=pair[1], out=out, **gates)
    return _call(PREFILL, args, options, softmax_scale, platform, cfg, state_v_first)
