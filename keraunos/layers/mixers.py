"""The arithmetic of the layers, written once for both frameworks, which add the methods that :class:`Layer` names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from keraunos import decay
from keraunos.frontends.array_types import Array
from keraunos.modules.gla_attention import GLAttentionConfig, gla_attention
from keraunos.modules.lightning_attention import LightningAttentionConfig, lightning_attention
from keraunos.ops import checks


class Cache(NamedTuple):
    """The state of a layer after the tokens so far, for N sequences: a pytree that ``layer.init_cache(N)`` makes.

    Attributes:
        state: ``[N, H, K, V]``, the recurrence's state, float32 (float64 in layers of float64).
        conv: the last inputs of the convolutions, ``[N, conv_size - 1, channels]`` each: of query, key and value, or of
            all three at once; empty without convolutions. float32 unless ``init_cache`` is given a dtype.
        length: ``[N]``, int32, the number of tokens; rotary positions go on from it.
    """

    state: Array
    conv: tuple[Array, ...]
    length: Array


class Names(NamedTuple):
    """Names of the parts of :class:`LightningAttention`: those of published models, so that their weights load."""

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    qkv: str = "qkv_proj"  # in place of these three, if it is fused
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    norm: str = "g_norm"
    gate: str = "g_proj"
    out: str = "o_proj"


_NAMES = Names()
# Value dimensions of a head that kernels for GPUs take.
_WIDEST = 256


class Tokens(NamedTuple):
    """Where the tokens of a call stand: in rows of a batch whose padding comes last, or packed into one row."""

    valid: Any = None  # [B, T], False for padding
    lengths: Any = None  # [N], the number of tokens of each sequence
    offsets: Any = None  # cu_seqlens, [N + 1]
    sequence: Any = None  # [T], the packed sequence that a token is of


class Layer:
    """A layer of no framework yet: what is annotated here, a framework's class adds.

    Attributes:
        xp: the framework's functions that have NumPy's names; arrays: the types of its arrays.
        take, cast, arange, zeros, asarray: functions whose names differ. activations: functions by their names.
        make: ``**parameters -> a maker`` of modules: ``linear``, ``low_rank``, ``conv``, ``norm``, ``group``; and of a
            ``parameter``.
        known_dtypes, known_device: those of the layer's weights and modules; the device is None if no weight has one.
        moved: ``(cache, an array) -> the cache`` on the array's device.
    """

    xp: Any
    arrays: Any
    take: Callable  # (x, indices, axis), as take_along_axis
    cast: Callable  # (x, dtype)
    arange: Callable  # (n, an array on the same device)
    zeros: Callable  # (shape, an array on the same device, dtype: the array's if None)
    asarray: Callable  # (numbers, an array on the same device, dtype: the numbers' if None)
    activations: ClassVar[Any]
    make: Any
    known_dtypes: list
    known_device: Any
    moved: Callable

    hidden_size: int
    state_shape: tuple[int, int, int]
    conv_shapes: tuple[tuple[int, int], ...] = ()
    platform: str | None
    cfg: Any

    def init_cache(self, batch: int, *, dtype: Any = None, device: Any = None) -> Cache:
        """The cache before the first token, for ``batch`` sequences: the rows, or those packed into one row.

        Args:
            batch: N.
            dtype: of the convolutions' last inputs: the one in which the layer computes. None: float32, which holds all
                values of narrower ones, in whatever dtype weights are stored; float64 in layers of float64.
            device: PyTorch's device, or JAX's device or sharding. None: that of the weights. In PyTorch, a layer takes
                a cache to the device of its input.
        """
        xp = self.xp
        wide = xp.float32
        if any(known == xp.float64 for known in (self.known_dtypes if dtype is None else [dtype])):
            wide = xp.float64
        device = self.known_device if device is None else device

        def zeros(dtype: Any, *shape: int) -> Array:
            return xp.zeros((batch, *shape), dtype=dtype, device=device)

        convs = tuple(zeros(wide if dtype is None else dtype, *shape) for shape in self.conv_shapes)
        return Cache(zeros(wide, *self.state_shape), convs, zeros(xp.int32))

    def forward(self, x: Array, cache: Cache | None = None, *, attention_mask: Array | None = None,
                cu_seqlens: Array | None = None) -> Any:
        """Mix the tokens of each sequence: every token sees itself and those before it.

        Args:
            x: ``[B, T, hidden_size]``, T from 1 on: a prompt, a part of one, or one token.
            cache: what the calls before left; ``layer.init_cache(N)`` at first.
            attention_mask: ``[B, T]``, 0 or False for padding, on any side. Padding leaves no trace, whatever x is
                there: not in other tokens' results, not in the cache, not in gradients. Its own results are zeros.
                Floats of which none is 1 are read as a mask that is added to logits: 0 for tokens, and the dtype's
                minimum or ``-inf`` for padding. Floats that are all 0 could mean either: they are refused where their
                values are known, and are all tokens elsewhere.
            cu_seqlens: ``[N + 1]``, offsets from 0 to T of N sequences packed into one row (B = 1): an array of the
                layer's framework, a NumPy array, a list or a tuple.

        Returns:
            The output ``[B, T, hidden_size]``; with a cache ``(output, the next cache)``.

        Raises:
            ValueError: a shape is wrong, both a mask and offsets are given, or one of them has wrong values that are
                known on the host.
            TypeError: x is no array of the layer's framework, cache is no :class:`Cache`, or offsets are no integers.
        """
        name = type(self).__name__
        self._check_input(name, x)
        if attention_mask is not None and cu_seqlens is not None:
            raise ValueError(f"{name}: got attention_mask and cu_seqlens; expected one of both")
        offsets = None if cu_seqlens is None else self._offsets(name, cu_seqlens, x)
        if cache is not None:
            self._check_cache(name, cache, x.shape[0] if offsets is None else offsets.shape[0] - 1)
            cache = self.moved(cache, x)
        if attention_mask is None:
            return self._mixed(x, cache, self._packed(x, offsets))
        # Padding moves to the end of its row: convolutions and positions then meet tokens only.
        xp, given = self.xp, checks.tokens(name, self.asarray(attention_mask, x), x)
        order = xp.argsort(xp.where(given, 0, 1), stable=True)
        # Not zeros: there, a feature map that divides by a norm is not finite, nor are its gradients.
        x = self.take(xp.where(given[..., None], x, 1), order[..., None], 1)
        lengths = given.sum(1)
        found = self._mixed(x, cache, Tokens(self.arange(x.shape[1], x) < lengths[:, None], lengths))
        y, after = (found, None) if cache is None else found
        y = xp.where(given[..., None], self.take(y, xp.argsort(order)[..., None], 1), 0)
        return y if cache is None else (y, after)

    def _check_input(self, name: str, x: Array) -> None:
        if not isinstance(x, self.arrays):
            raise TypeError(f"{name}: x is of type {type(x).__qualname__}; expected an array of the layer's framework")
        if x.ndim != 3 or x.shape[1] < 1 or x.shape[2] != self.hidden_size:
            raise ValueError(f"{name}: x has shape {tuple(x.shape)}; expected [B, T, {self.hidden_size}], T >= 1")

    def _check_cache(self, name: str, cache: Cache, N: int) -> None:
        if not isinstance(cache, Cache):
            raise TypeError(f"{name}: cache is of type {type(cache).__qualname__}; expected init_cache's")
        wanted = N, *self.state_shape
        if cache.state.shape != wanted:
            raise ValueError(f"{name}: cache.state has shape {tuple(cache.state.shape)}; expected {wanted}")

    def _offsets(self, name: str, cu_seqlens: Any, x: Array) -> Array:
        """Checked, as an array of the framework."""
        offsets: Any = self.asarray(cu_seqlens, x)
        if offsets.ndim != 1 or offsets.shape[0] < 2 or x.shape[0] != 1:
            raise ValueError(f"{name}: cu_seqlens has shape {tuple(offsets.shape)}, x {tuple(x.shape)}; "
                             "expected [N + 1] for N sequences, and B = 1")
        if (dtype := str(offsets.dtype).rpartition(".")[2]) not in checks.OFFSETS:
            raise TypeError(f"{name}: cu_seqlens has dtype {dtype}; expected {' or '.join(checks.OFFSETS)}")
        checks.values(name, checks.offsets(x.shape[1]), cu_seqlens)
        return offsets

    def _packed(self, x: Array, offsets: Any) -> Tokens:
        if offsets is None:
            return Tokens()
        sequence = self.xp.searchsorted(offsets[1:-1], self.arange(x.shape[1], x), side="right")
        return Tokens(None, offsets[1:] - offsets[:-1], offsets, sequence)

    def _mixed(self, x: Array, cache: Cache | None, tokens: Tokens) -> Any:
        raise NotImplementedError

    def _heads(self, x: Array, dim: int) -> Array:
        return x.reshape(*x.shape[:2], x.shape[2] // dim, dim)

    def _result(self, y: Array, cache: Cache | None, state: Array, convs: list, tokens: Tokens) -> Any:
        if cache is None:
            return y

        def kept(x: Array, old: Array) -> Array:
            # Loops of JAX keep the dtypes that they began with; one that is too narrow would round.
            return self.cast(x, self.xp.promote_types(x.dtype, old.dtype))

        length = cache.length + (y.shape[1] if tokens.lengths is None else tokens.lengths)
        after = tuple(map(kept, convs, cache.conv))
        return y, Cache(kept(state, cache.state), after, self.cast(length, cache.length.dtype))

    def _run(self, operation: Callable, cfg: Any, cache: Cache | None, tokens: Tokens, *arrays: Array,
             **options: Any) -> tuple[Array, Any]:
        """The operation's output and state: None, and none is computed, where no cache takes it."""
        state = None if cache is None else cache.state
        found = operation(*arrays, initial_state=state, cu_seqlens=tokens.offsets, return_state=cache is not None,
                          platform=self.platform, cfg=cfg, **options)
        return (found, None) if cache is None else found

    def _gla(self, cfg: Any, cache: Cache | None, tokens: Tokens, q: Array, k: Array, v: Array, g: Array,
             **options: Any) -> tuple[Array, Any]:
        if tokens.valid is not None:
            # Padding adds nothing to the state, and nothing decays at it.
            valid = tokens.valid[..., None]
            k = self.xp.where(valid[..., None], k, 0)
            g = self.xp.where(valid if g.ndim == 3 else valid[..., None], g, 0)
        return self._in_parts(gla_attention, cfg, cache, tokens, q, k, v, g, **options)

    def _in_parts(self, operation: Callable, cfg: Any, cache: Cache | None, tokens: Tokens, q: Array, k: Array,
                  v: Array, *gates: Array, **options: Any) -> tuple[Array, Any]:
        """:meth:`_run`, in which wide values are those of several heads."""
        H, K, V = self.state_shape
        width = next(V // n for n in range(1, V + 1) if V % n == 0 and V // n <= _WIDEST)
        if width == V or v.shape[2] < H:
            return self._run(operation, cfg, cache, tokens, q, k, v, *gates, **options)
        # Parts of a head's values are heads that have the rest in common.
        if cache is not None:
            N = cache.state.shape[0]
            state = self.xp.moveaxis(cache.state.reshape(N, H, K, V // width, width), 3, 2)
            cache = cache._replace(state=state.reshape(N, H * V // width, K, width))
        v = v.reshape(*v.shape[:2], H * V // width, width)
        o, state = self._run(operation, cfg, cache, tokens, q, k, v, *gates, **options)
        if cache is not None:
            state = self.xp.moveaxis(state.reshape(N, H, V // width, K, width), 2, 3).reshape(N, H, K, V)
        return o.reshape(*o.shape[:2], H, V), state

    def _convolved(self, conv: Any, x: Array, tail: Array | None, tokens: Tokens, width: int) -> tuple[Array, Array]:
        """``silu`` of a convolution over each sequence, after the call before; and the last inputs.

        ``width``: how many of the last inputs the next call needs, and what ``tail`` has of the call before.
        """
        xp, (B, T, D), silu = self.xp, x.shape, self.activations["silu"]
        N = B if tokens.offsets is None else tokens.offsets.shape[0] - 1
        tail = self.zeros((N, width, D), x) if tail is None else self.cast(tail, x.dtype)
        near = self.arange(width, x)
        if tokens.offsets is None:
            inputs = xp.concatenate([tail, x], axis=1)
            if tokens.lengths is None:
                return silu(conv(inputs)), inputs[:, T:]
            return silu(conv(inputs)), self.take(inputs, (tokens.lengths[:, None] + near)[..., None], 1)
        # In one row, the inputs before each sequence stand in front of it.
        shift = self.arange(N, x) * width
        of_tail = ((tokens.offsets[:-1] + shift)[:, None] + near).reshape(-1)
        of_x = self.arange(T, x) + tokens.sequence * width + width
        order = xp.argsort(xp.concatenate([of_tail, of_x]))
        inputs = xp.concatenate([tail.reshape(1, -1, D), x], axis=1)[:, order]
        after = (tokens.offsets[1:] + shift)[:, None] + near
        return silu(conv(inputs))[:, of_x - width], inputs[0][after]


class GatedLinearAttention(Layer):
    """Gated linear attention, the layer of flash-linear-attention: it loads that layer's weights.

    For each head of K = expand_k * hidden_size / num_heads key and V = expand_v * hidden_size / num_heads value
    dimensions, with ``q, k, v = W_q x, W_k x, W_v x`` (through feature_map, for q and k)::

        g_t = log_sigmoid(W_2 W_1 x_t + b) / gate_logit_normalizer
        S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T
        y_t = W_o (RMSNorm(K ** -0.5 * S_t^T q_t) * gate_fn(W_g x_t))

    Args:
        hidden_size: of the residual stream.
        expand_k, expand_v: the width of all heads' keys, and of their values, divided by hidden_size.
        num_heads: of queries; num_kv_heads: of keys, values and gates, a divisor of it.
        feature_map: of queries and keys: ``"relu"``, ``"silu"`` (or ``"swish"``), ``"sigmoid"``, ``"gelu"``; or a
            function of ``[B, T, heads, K]``, which keeps the shape.
        use_short_conv: q, k and v go through causal convolutions over conv_size tokens, each channel by itself, and
            silu; conv_bias: with a bias.
        use_output_gate: whether y has its last factor; gate_fn: the gate's function, as feature_map, of
            ``[B, T, heads, V]``.
        elementwise_affine, norm_eps: of the norm, over each head's V dimensions.
        gate_logit_normalizer, gate_low_rank_dim: of the formula: the larger the first, the longer the memory.
        clamp_min: the lower bound of g; None: none.
        fuse_norm: whether the norm is called ``g_norm_swish_gate``, as in flash-linear-attention, or ``g_norm``.
        platform, cfg: as for :func:`keraunos.gla_attention`.
        parameters: PyTorch: ``device``, ``dtype``. NNX: ``rngs``; ``dtype``, ``param_dtype``; ``heads``, the axis of a
            mesh over which heads are sharded.

    Kernels of linear attention take up to 256 value dimensions of a head; more go to them in parts, unless heads share
    their values.

    Raises:
        ValueError: a size does not divide another, or a name is not known.

    Source: Gated Linear Attention Transformers with Hardware-Efficient Training (arXiv:2312.06635).
    """

    def __init__(self, hidden_size: int = 1024, *, expand_k: float = 0.5, expand_v: float = 1.0, num_heads: int = 4,
                 num_kv_heads: int | None = None, feature_map: str | Callable | None = None,
                 use_short_conv: bool = False, conv_size: int = 4, conv_bias: bool = False,
                 use_output_gate: bool = True, gate_fn: str | Callable = "swish", elementwise_affine: bool = True,
                 norm_eps: float = 1e-5, gate_logit_normalizer: float = 16, gate_low_rank_dim: int | None = 16,
                 clamp_min: float | None = None, fuse_norm: bool = True, platform: str | None = None,
                 cfg: GLAttentionConfig | None = None, **parameters: Any) -> None:
        super().__init__()
        make, name = self.make(**parameters), type(self).__name__
        key_dim, value_dim = int(hidden_size * expand_k), int(hidden_size * expand_v)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for what, size, divisor in (("key width", key_dim, num_heads), ("value width", value_dim, num_heads),
                                    ("num_heads", num_heads, kv_heads)):
            if divisor < 1 or size < 1 or size % divisor:
                raise ValueError(f"{name}: {what} is {size}; expected a multiple of {divisor}")
        K, V = key_dim // num_heads, value_dim // num_heads
        self.hidden_size, self.state_shape, self.platform, self.cfg = hidden_size, (num_heads, K, V), platform, cfg
        self.feature_map = self._activation(feature_map) if feature_map is not None else None
        self.gate_fn = self._activation(gate_fn)
        self.gate_logit_normalizer, self.clamp_min = gate_logit_normalizer, clamp_min
        self.q_proj = make.linear(hidden_size, key_dim)
        self.k_proj = make.linear(hidden_size, kv_heads * K)
        self.v_proj = make.linear(hidden_size, kv_heads * V)
        self.g_proj = make.linear(hidden_size, value_dim) if use_output_gate else None
        if use_short_conv:
            self.conv_shapes = tuple((conv_size - 1, dim) for dim in (key_dim, kv_heads * K, kv_heads * V))
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (
                make.conv(dim, conv_size, conv_bias) for _, dim in self.conv_shapes
            )
        rank = gate_low_rank_dim
        self.gk_proj = (make.linear(hidden_size, num_heads, bias=True) if rank is None else
                        make.low_rank(hidden_size, rank, kv_heads * K))
        self.norm = "g_norm_swish_gate" if fuse_norm and use_output_gate and gate_fn == "swish" else "g_norm"
        setattr(self, self.norm, make.norm(V, norm_eps, affine=elementwise_affine))
        self.o_proj = make.linear(value_dim, hidden_size, inward=True)

    def _activation(self, given: str | Callable) -> str | Callable:
        """The name of a known function, as JAX's own functions cannot be pickled; or another function."""
        known = self.activations
        if callable(given):
            return next((name for name, fn in known.items() if fn is given), given)
        if given not in known:
            raise ValueError(f"{type(self).__name__}: got {given!r}; expected a function or one of {[*known]}")
        return given

    def _activated(self, activation: str | Callable, x: Array) -> Array:
        y = (activation if callable(activation) else self.activations[activation])(x)
        if y.shape != x.shape:
            raise ValueError(f"{type(self).__name__}: {activation} makes {tuple(y.shape)} of {tuple(x.shape)}, "
                             "[B, T, heads, dimensions]; expected the same shape")
        return y

    def _log_gates(self, x: Array) -> Array:
        """``[B, T, kv_heads, K]``, before log_sigmoid."""
        for part in self.gk_proj:
            x = part(x)
        return self._heads(x, self.state_shape[1])

    def _mixed(self, x: Array, cache: Cache | None, tokens: Tokens) -> Any:
        parts, convs = [self.q_proj(x), self.k_proj(x), self.v_proj(x)], []
        if self.conv_shapes:
            tails = (None,) * 3 if cache is None else cache.conv
            modules = self.q_conv1d, self.k_conv1d, self.v_conv1d
            width = self.conv_shapes[0][0]
            found = [self._convolved(*each, tokens, width) for each in zip(modules, parts, tails, strict=True)]
            parts, convs = [y for y, _ in found], [after for _, after in found]
        g = self.activations["log_sigmoid"](self._log_gates(x)) / self.gate_logit_normalizer
        if self.clamp_min is not None:
            g = self.xp.clip(g, min=self.clamp_min)
        H, K, V = self.state_shape
        q, k, v = map(self._heads, parts, (K, K, V))
        if self.feature_map is not None:
            q, k = (self._activated(self.feature_map, part) for part in (q, k))
        o, state = self._gla(self.cfg, cache, tokens, q, k, v, g)
        o = getattr(self, self.norm)(o)
        if self.g_proj is not None:
            o = o * self._activated(self.gate_fn, self._heads(self.g_proj(x), V))
        return self._result(self.o_proj(o.reshape(*x.shape[:2], H * V)), cache, state, convs, tokens)


class SimpleGatedLinearAttention(GatedLinearAttention):
    """Linear attention with one gate per token and head, the layer of flash-linear-attention: it loads its weights.

    The formula of :class:`GatedLinearAttention`, in which g has one value per head::

        g_t = log_sigmoid(W_gk x_t + b) / gate_logit_normalizer

    Args:
        hidden_size: of the residual stream.
        expand_k, use_short_conv: as there; the defaults differ.
        options: the other arguments of :class:`GatedLinearAttention`, but for gate_low_rank_dim.

    Raises:
        ValueError: a size does not divide another, or a name is not known.

    Source: Gated Linear Attention Transformers with Hardware-Efficient Training (arXiv:2312.06635).
    """

    def __init__(self, hidden_size: int = 1024, *, expand_k: float = 1.0, use_short_conv: bool = True,
                 **options: Any) -> None:
        super().__init__(hidden_size, expand_k=expand_k, use_short_conv=use_short_conv, gate_low_rank_dim=None,
                         **options)

    def _log_gates(self, x: Array) -> Array:
        """``[B, T, H]``, before log_sigmoid."""
        return self.gk_proj(x)


class LightningAttention(Layer):
    """Lightning attention, with the options of MiniMax's, Ring's and Ling's, and MiniCPM-SALA's layers.

    For each head of D dimensions, with ``q, k, v = W_q x, W_k x, W_v x`` (through silu, or RMSNorm and rotary positions
    for q and k, if asked for)::

        S_t = exp(log_decay) S_{t-1} + k_t v_t^T
        y_t = W_o (RMSNorm(softmax_scale * S_t^T q_t) * sigmoid(W_g x_t))

    :meth:`minimax`, :meth:`bailing` and :meth:`minicpm_sala` make the published layers, with their parameters' names.

    Args:
        hidden_size: of the residual stream.
        num_heads: H; head_dim: D, ``hidden_size / num_heads`` if None.
        log_decay: H numbers, natural logs, <= 0: :mod:`keraunos.decay` has those of models.
        fused: one projection for q, k and v: ``"whole"``, all of q before all of k, or ``"by_head"``, q, k and v of one
            head after the other; None: three projections.
        qkv_silu: q, k and v go through silu.
        qk_norm: q and k go through an RMSNorm over each head.
        rotary_dim: how many of D dimensions have rotary positions, the first ones; even. rope_theta: their base.
        norm_groups: the output's norm is over each of as many groups of heads; 1: over all.
        norm_eps: of all norms.
        softmax_scale: of the formula; ``D ** -0.5`` if None.
        names: what the parts are called.
        platform, cfg: as for :func:`keraunos.lightning_attention`.
        parameters: as for :class:`GatedLinearAttention`.

    Raises:
        ValueError: a size does not fit another.

    Source: Lightning Attention-2 (arXiv:2401.04658), MiniMax-01 (arXiv:2501.08313).
    """

    def __init__(self, hidden_size: int, num_heads: int, log_decay: Any, *, head_dim: int | None = None,
                 fused: str | None = None, qkv_silu: bool = False, qk_norm: bool = False, rotary_dim: int = 0,
                 rope_theta: float = 10000.0, norm_groups: int = 1, norm_eps: float = 1e-6,
                 softmax_scale: float | None = None, names: Names = _NAMES, platform: str | None = None,
                 cfg: LightningAttentionConfig | None = None, **parameters: Any) -> None:
        super().__init__()
        make, name = self.make(**parameters), type(self).__name__
        # Plain numbers: no cast of a module's parameters to another dtype reaches them.
        self.log_decay = tuple(float(x) for x in np.asarray(log_decay).reshape(-1))
        if num_heads < 1 or len(self.log_decay) != num_heads or max(self.log_decay) > 0:
            raise ValueError(f"{name}: log_decay is {log_decay}; expected num_heads = {num_heads} numbers <= 0")
        D = hidden_size // num_heads if head_dim is None else head_dim
        width = num_heads * D
        if fused not in (None, "whole", "by_head"):
            raise ValueError(f"{name}: fused is {fused!r}; expected None, 'whole' or 'by_head'")
        if rotary_dim % 2 or not 0 <= rotary_dim <= D:
            raise ValueError(f"{name}: rotary_dim is {rotary_dim}; expected an even number up to head_dim = {D}")
        if norm_groups < 1 or num_heads % norm_groups:
            raise ValueError(f"{name}: norm_groups is {norm_groups}; expected a divisor of num_heads = {num_heads}")
        self.hidden_size, self.state_shape, self.platform, self.cfg = hidden_size, (num_heads, D, D), platform, cfg
        self.fused, self.qkv_silu, self.qk_norm, self.names = fused, qkv_silu, qk_norm, names
        self.rotary_dim, self.rope_theta = rotary_dim, rope_theta
        self.softmax_scale, self.norm_groups = softmax_scale, norm_groups
        if fused is None:
            for part in names[:3]:
                setattr(self, part, make.linear(hidden_size, width))
        else:
            setattr(self, names.qkv, make.linear(hidden_size, 3 * width))
        for part in (names.q_norm, names.k_norm) if qk_norm else ():
            setattr(self, part, make.norm(D, norm_eps))
        setattr(self, names.norm, make.norm(width, norm_eps, groups=norm_groups))
        setattr(self, names.gate, make.linear(hidden_size, width))
        setattr(self, names.out, make.linear(width, hidden_size, inward=True))

    @classmethod
    def minimax(cls, hidden_size: int, num_heads: int, layer_idx: int, num_layers: int, **options: Any) -> Any:
        """The layer of MiniMax-Text-01 in Hugging Face transformers, with the decays of :func:`keraunos.decay.minimax`.

        Source: MiniMax-01 (arXiv:2501.08313).
        """
        given = dict(log_decay=decay.minimax(num_heads, layer_idx, num_layers), fused="by_head", qkv_silu=True,
                     softmax_scale=1.0, names=Names(norm="norm", gate="output_gate", out="out_proj"))
        return cls(hidden_size, num_heads, **{**given, **options})

    @classmethod
    def bailing(cls, hidden_size: int, num_heads: int, layer_idx: int, num_layers: int, **options: Any) -> Any:
        """The layer of Ring linear and Ling linear, with the decays of :func:`keraunos.decay.bailing`.

        Of a model's configuration, ``norm_groups`` is ``group_norm_size``, ``norm_eps`` is ``rms_norm_eps``,
        ``rotary_dim`` is ``partial_rotary_factor * head_dim``.

        Source: Every Attention Matters (arXiv:2510.19338).
        """
        names = Names(qkv="query_key_value", q_norm="query_layernorm", k_norm="key_layernorm", out="dense")
        given = dict(log_decay=decay.bailing(num_heads, layer_idx, num_layers), fused="whole",
                     qk_norm=True, names=names)
        return cls(hidden_size, num_heads, **{**given, **options})

    @classmethod
    def minicpm_sala(cls, hidden_size: int, num_heads: int, **options: Any) -> Any:
        """The lightning layer of MiniCPM-SALA, with the decays of :func:`keraunos.decay.minicpm_sala`.

        Of a model's configuration, ``num_heads`` is ``lightning_nh`` and ``head_dim`` is ``lightning_head_dim``.
        """
        D = options.get("head_dim") or hidden_size // num_heads
        given = dict(log_decay=decay.minicpm_sala(num_heads), qk_norm=True, rotary_dim=D,
                     names=Names(norm="o_norm", gate="z_proj"))
        return cls(hidden_size, num_heads, **{**given, **options})

    def _rotated(self, x: Array, angles: Array) -> Array:
        """The first dimensions turned, in pairs of one from each half; computed in float32."""
        n = self.rotary_dim // 2
        cos, sin = self.xp.cos(angles), self.xp.sin(angles)
        first, second = x[..., :n], x[..., n : 2 * n]
        turned = [self.cast(first * cos - second * sin, x.dtype), self.cast(second * cos + first * sin, x.dtype)]
        return self.xp.concatenate([*turned, x[..., 2 * n :]], axis=-1)

    def _angles(self, x: Array, cache: Cache | None, tokens: Tokens) -> Array:
        """``[B, T, 1, rotary_dim / 2]``, float32."""
        places = self.arange(x.shape[1], x)
        if tokens.sequence is not None:
            places = places - tokens.offsets[tokens.sequence]
        if cache is not None:
            places = places + (cache.length[:, None] if tokens.sequence is None else cache.length[tokens.sequence])
        n = self.rotary_dim // 2
        speeds = self.rope_theta ** -(self.cast(self.arange(n, x), self.xp.float32) / n)
        return places[..., None, None] * speeds

    def _mixed(self, x: Array, cache: Cache | None, tokens: Tokens) -> Any:
        (H, D, _), names = self.state_shape, self.names
        if self.fused is None:
            q, k, v = (getattr(self, part)(x).reshape(*x.shape[:2], H, D) for part in names[:3])
        else:
            whole = self.fused == "whole"
            qkv = getattr(self, names.qkv)(x).reshape(*x.shape[:2], *((3, H, D) if whole else (H, 3, D)))
            q, k, v = (qkv[:, :, i] if whole else qkv[:, :, :, i] for i in range(3))
        if self.qkv_silu:
            q, k, v = map(self.activations["silu"], (q, k, v))
        if self.qk_norm:
            q, k = getattr(self, names.q_norm)(q), getattr(self, names.k_norm)(k)
        if self.rotary_dim:
            angles = self._angles(x, cache, tokens)
            q, k = self._rotated(q, angles), self._rotated(k, angles)
        if tokens.valid is None or cache is None:
            # Padding comes last: it changes the last state only.
            o, state = self._run(lightning_attention, self.cfg, cache, tokens, q, k, v, log_decay=self.log_decay,
                                 softmax_scale=self.softmax_scale)
        else:
            g = self.asarray(self.log_decay, x, self.xp.float32) + self.zeros((*x.shape[:2], 1), x, self.xp.float32)
            cfg = self.cfg and GLAttentionConfig(**dataclasses.asdict(self.cfg))
            o, state = self._gla(cfg, cache, tokens, q, k, v, g, softmax_scale=self.softmax_scale)
        o = getattr(self, names.norm)(o.reshape(*x.shape[:2], self.norm_groups, H * D // self.norm_groups))
        o = o.reshape(*x.shape[:2], H * D) * self.activations["sigmoid"](getattr(self, names.gate)(x))
        return self._result(getattr(self, names.out)(o), cache, state, [], tokens)
