"""The arithmetic of the delta rule's layers, as :mod:`keraunos.layers.mixers` has that of the others."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

from keraunos import decay
from keraunos.frontends.array_types import Array
from keraunos.layers.mixers import Cache, Layer, Tokens
from keraunos.modules.gated_delta_rule import GatedDeltaRuleConfig, gated_delta_rule

_CONV = (("qkv", "conv1d"),)


class DeltaNames(NamedTuple):
    """Names of the parts of :class:`GatedDeltaNet` and :class:`KimiDeltaAttention`, so that published weights load.

    A letter is what a part makes: q, k and v; z, the output's gate; a and b, of which the log gates and beta are made.
    Several letters are one fused part, whose columns have them in this order. A name may have dots, for parts of parts.

    Attributes:
        projections: of letters to one name, or to two names of a product of two.
        convs: of letters to names.
        biased: the letter of a projection that has a bias.
        by_head: fused columns are in the order of query heads: all that belongs to one head, then the next.
        norm, out: the output's norm and projection.
        A_log, dt_bias: the gates' parameters.
        axes: 1: A_log has shape ``[heads]``; 4: ``[1, 1, heads, 1]``.
    """

    projections: tuple[tuple[str, str | tuple[str, str]], ...]
    convs: tuple[tuple[str, str], ...] = _CONV
    biased: str = ""
    by_head: bool = False
    norm: str = "o_norm"
    out: str = "o_proj"
    A_log: str = "A_log"
    dt_bias: str = "dt_bias"
    axes: int = 1


_QKV = (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"))
_CONVS = (("q", "q_conv1d"), ("k", "k_conv1d"), ("v", "v_conv1d"))
_GATED_DELTANET = DeltaNames((*_QKV, ("z", "g_proj"), ("a", "a_proj"), ("b", "b_proj")), _CONVS)
_KIMI = DeltaNames(
    (*_QKV, ("z", ("g_proj.0", "g_proj.1")), ("a", ("f_proj.0", "f_proj.1")), ("b", "b_proj")), _CONVS, "z",
)


class GatedDeltaNet(Layer):
    """Gated DeltaNet, the layer of flash-linear-attention, Qwen3-Next, Qwen3.5 and OLMo Hybrid: it loads their weights.

    For each head of K = head_dim key and V = expand_v * head_dim value dimensions, with ``q, k, v = W_q x, W_k x,
    W_v x`` through convolutions and silu, and then q and k divided by their norms::

        g_t = -exp(A_log) * softplus(W_a x_t + dt_bias)
        S~ = exp(g_t) S_{t-1}
        S_t = S~ + sigmoid(W_b x_t) k_t (v_t - S~^T k_t)^T
        y_t = W_o (RMSNorm(K ** -0.5 * S_t^T q_t) * output_gate_activation(W_z x_t))

    :meth:`qwen3_next`, :meth:`qwen3_5` and :meth:`olmo_hybrid` make the published layers, with their parameters' names.

    Args:
        hidden_size: of the residual stream.
        expand_v: a head's value dimensions over its key dimensions; head_dim: its key dimensions.
        num_heads: of queries and keys; num_v_heads: of values, gates and states, a multiple of it; None: as many.
        use_gate: without, the last factor of y is left out; output_gate_activation: ``"silu"`` (or ``"swish"``) or
            ``"sigmoid"``.
        use_short_conv: without, q, k and v go through silu only. The convolutions are causal, over conv_size tokens,
            each channel by itself; conv_bias: with a bias.
        allow_neg_eigval: twice the sigmoid of W_b x is taken.
        norm_eps: of the output's norm, over each head's V dimensions.
        names: what the parts are called, and which are fused.
        platform, cfg: as for :func:`keraunos.gated_delta_rule`.
        parameters: as for :class:`GatedLinearAttention`. A_log and dt_bias are float32 at least.

    Raises:
        ValueError: a size does not fit another, or a name is not known.

    Source: Gated Delta Networks (arXiv:2412.06464).
    """

    # Whether each key dimension has a gate of its own, and between what exp(A_log) lies at first.
    _by_dimension: ClassVar[bool] = False
    _rates: ClassVar[tuple[float, float]] = (0.01, 16.0)

    def __init__(self, hidden_size: int = 2048, *, expand_v: float = 2.0, head_dim: int = 256, num_heads: int = 6,
                 num_v_heads: int | None = None, use_gate: bool = True, use_short_conv: bool = True,
                 allow_neg_eigval: bool = False, conv_size: int = 4, conv_bias: bool = False, norm_eps: float = 1e-5,
                 output_gate_activation: str = "swish", names: DeltaNames = _GATED_DELTANET,
                 platform: str | None = None, cfg: GatedDeltaRuleConfig | None = None, **parameters: Any) -> None:
        super().__init__()
        make, name, xp = self.make(**parameters), type(self).__name__, self.xp
        H, K, V = num_heads if num_v_heads is None else num_v_heads, head_dim, round(head_dim * expand_v)
        if num_heads < 1 or H < 1 or H % num_heads:
            raise ValueError(f"{name}: num_v_heads is {H}; expected a multiple of num_heads = {num_heads}")
        if min(K, V) < 1 or abs(V - head_dim * expand_v) > 1e-5 * V:
            raise ValueError(f"{name}: head_dim * expand_v is {head_dim * expand_v}; expected an integer >= 1")
        if output_gate_activation not in ("silu", "swish", "sigmoid"):
            raise ValueError(f"{name}: output_gate_activation is {output_gate_activation!r}; "
                             "expected 'silu', 'swish' or 'sigmoid'")
        self.hidden_size, self.state_shape, self.platform, self.cfg = hidden_size, (H, K, V), platform, cfg
        self.num_heads, self.names, self.allow_neg_eigval = num_heads, names, allow_neg_eigval
        self.use_gate, self.output_gate_activation = use_gate, output_gate_activation
        widths = self._widths()
        self.projections = tuple(each for each in names.projections if use_gate or each[0] != "z")
        for letters, part in self.projections:
            width, bias = sum(widths[letter] for letter in letters), letters in names.biased
            if isinstance(part, str):
                self._put(part, make.linear(hidden_size, width, bias=bias))
            else:
                for each, module in zip(part, make.low_rank(hidden_size, V, width, bias=bias), strict=True):
                    self._put(each, module)
        self.convs = names.convs if use_short_conv else ()
        sizes = [sum(widths[letter] for letter in letters) for letters, _ in self.convs]
        self.conv_shapes = tuple((conv_size - 1, size) for size in sizes)
        for (_, part), size in zip(self.convs, sizes, strict=True):
            self._put(part, make.conv(size, conv_size, conv_bias))
        self._put(names.A_log, make.parameter((H,) if names.axes == 1 else (1, 1, H, 1), *self._rates, xp.log))
        # At first, softplus of it is a step size between 0.001 and 0.1.
        self._put(names.dt_bias, make.parameter((widths["a"],), math.log(1e-3), math.log(0.1),
                                                lambda steps: xp.log(xp.expm1(xp.exp(steps)))))
        self._put(names.norm, make.norm(V, norm_eps))
        self._put(names.out, make.linear(H * V, hidden_size, inward=True))

    @classmethod
    def qwen3_next(cls, hidden_size: int, num_heads: int, num_v_heads: int, **options: Any) -> Any:
        """The layer of Qwen3-Next in Hugging Face transformers, whose projections are fused by head.

        Of a model's configuration, ``num_heads`` is ``linear_num_key_heads``, ``num_v_heads`` is
        ``linear_num_value_heads``, ``head_dim`` is ``linear_key_head_dim``, which ``expand_v`` multiplies to
        ``linear_value_head_dim``, ``conv_size`` is ``linear_conv_kernel_dim``, ``norm_eps`` is ``rms_norm_eps``.
        """
        names = DeltaNames((("qkvz", "in_proj_qkvz"), ("ba", "in_proj_ba")), by_head=True, norm="norm", out="out_proj")
        return cls._published(hidden_size, num_heads, num_v_heads, names, options)

    @classmethod
    def qwen3_5(cls, hidden_size: int, num_heads: int, num_v_heads: int, **options: Any) -> Any:
        """The layer of Qwen3.5, dense and with experts, in Hugging Face transformers; arguments as for Qwen3-Next."""
        parts = ("qkv", "in_proj_qkv"), ("z", "in_proj_z"), ("b", "in_proj_b"), ("a", "in_proj_a")
        return cls._published(hidden_size, num_heads, num_v_heads, DeltaNames(parts, norm="norm", out="out_proj"),
                              options)

    @classmethod
    def olmo_hybrid(cls, hidden_size: int, num_heads: int, num_v_heads: int, **options: Any) -> Any:
        """The layer of OLMo Hybrid in Hugging Face transformers; arguments as for Qwen3-Next.

        Its ``norm_eps`` is 1e-5, whatever the configuration has; ``allow_neg_eigval`` is ``linear_allow_neg_eigval``.
        """
        return cls._published(hidden_size, num_heads, num_v_heads, _GATED_DELTANET._replace(convs=_CONV),
                              {"norm_eps": 1e-5, "allow_neg_eigval": True, **options})

    @classmethod
    def _published(cls, hidden_size: int, num_heads: int, num_v_heads: int, names: DeltaNames, options: dict) -> Any:
        given = dict(num_heads=num_heads, num_v_heads=num_v_heads, head_dim=128, expand_v=1.0, norm_eps=1e-6)
        return cls(hidden_size, names=names, **{**given, **options})

    def _put(self, path: str, part: Any) -> None:
        *groups, name = path.split(".")
        owner: Any = self
        for group in groups:
            if not hasattr(owner, group):
                setattr(owner, group, self.make.group())
            owner = getattr(owner, group)
        setattr(owner, name, part)

    def _part(self, path: str) -> Any:
        part = self
        for name in path.split("."):
            part = getattr(part, name)
        return part

    def _widths(self) -> dict[str, int]:
        """How many columns of the projections are q's, and so on."""
        H, K, V = self.state_shape
        keys = self.num_heads * K
        return {"q": keys, "k": keys, "v": H * V, "z": H * V, "b": H, "a": H * K if self._by_dimension else H}

    def _split(self, letters: str, x: Array, groups: int) -> dict[str, Array]:
        """The columns of each letter, which in each of the groups follow each other."""
        if len(letters) == 1:
            return {letters: x}
        widths, start, found = self._widths(), 0, {}
        grouped = x.reshape(*x.shape[:2], groups, x.shape[2] // groups)
        for letter in letters:
            width = widths[letter] // groups
            found[letter] = grouped[..., start : start + width].reshape(*x.shape[:2], widths[letter])
            start += width
        return found

    def _log_gates(self, a: Array) -> Array:
        """``[B, T, H]``, of W_a x."""
        # A variable of NNX is an array from here on.
        return decay.gated_deltanet(a, self._part(self.names.A_log)[...], self._part(self.names.dt_bias)[...])

    def _mixed(self, x: Array, cache: Cache | None, tokens: Tokens) -> Any:
        (H, K, V), xp, silu = self.state_shape, self.xp, self.activations["silu"]
        parts: dict[str, Array] = {}
        for letters, path in self.projections:
            y = x
            for each in [path] if isinstance(path, str) else path:
                y = self._part(each)(y)
            parts |= {letters: y} | self._split(letters, y, self.num_heads if self.names.by_head else 1)
        convs = []
        for i, (letters, path) in enumerate(self.convs):
            y = parts[letters] if letters in parts else xp.concatenate([parts[each] for each in letters], axis=-1)
            tail = None if cache is None else cache.conv[i]
            y, after = self._convolved(self._part(path), y, tail, tokens, self.conv_shapes[i][0])
            parts |= self._split(letters, y, 1)
            convs.append(after)
        if not self.convs:
            parts |= {each: silu(parts[each]) for each in "qkv"}
        g, b = self._log_gates(parts["a"]), parts["b"]
        beta = self.activations["sigmoid"](self.cast(b, xp.promote_types(b.dtype, xp.float32)))
        beta = 2 * beta if self.allow_neg_eigval else beta
        if tokens.valid is not None:
            # Nothing decays at padding, and nothing is corrected.
            valid = tokens.valid[..., None]
            g, beta = xp.where(valid if g.ndim == 3 else valid[..., None], g, 0), xp.where(valid, beta, 0)
        q, k, v = (self._heads(parts[each], dim) for each, dim in (("q", K), ("k", K), ("v", V)))
        o, state = self._in_parts(gated_delta_rule, self.cfg, cache, tokens, q, k, v, g, beta, use_qk_l2norm=True)
        o = self._part(self.names.norm)(o)
        if self.use_gate:
            o = o * self.activations[self.output_gate_activation](self._heads(parts["z"], V))
        return self._result(self._part(self.names.out)(o.reshape(*x.shape[:2], H * V)), cache, state, convs, tokens)


class KimiDeltaAttention(GatedDeltaNet):
    """Kimi Delta Attention, the layer of flash-linear-attention and Kimi Linear: it loads their weights.

    The formula of :class:`GatedDeltaNet`, in which each key dimension has a gate, and W_a and W_z are products of two
    matrices with V columns and rows between them::

        g_t = -exp(A_log) * softplus(W_a x_t + dt_bias)
        g_t = lower_bound * sigmoid(exp(A_log) * (W_a x_t + dt_bias)), if a bound is given
        S~ = diag(exp(g_t)) S_{t-1}

    :meth:`kimi_linear` makes the layer of Hugging Face transformers, with its parameters' names.

    Args:
        hidden_size: of the residual stream.
        expand_v, head_dim, num_heads, output_gate_activation: as there; the defaults differ.
        lower_bound: of the gates, below 0; None: none.
        options: the other arguments of :class:`GatedDeltaNet`.

    Raises:
        ValueError: a size does not fit another, a name is not known, or the bound is not below 0.

    Source: Kimi Linear (arXiv:2510.26692).
    """

    _by_dimension = True
    _rates = (1.0, 16.0)

    def __init__(self, hidden_size: int = 2048, *, expand_v: float = 1.0, head_dim: int = 128, num_heads: int = 16,
                 output_gate_activation: str = "sigmoid", lower_bound: float | None = None, names: DeltaNames = _KIMI,
                 **options: Any) -> None:
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"{type(self).__name__}: lower_bound is {lower_bound}; expected a number below 0")
        super().__init__(hidden_size, expand_v=expand_v, head_dim=head_dim, num_heads=num_heads,
                         output_gate_activation=output_gate_activation, names=names, **options)
        self.lower_bound = lower_bound

    @classmethod
    def kimi_linear(cls, hidden_size: int, num_heads: int, **options: Any) -> Any:
        """The layer of Kimi Linear in Hugging Face transformers.

        Of a model's configuration, ``num_heads`` is ``linear_num_heads``, ``head_dim`` is ``linear_head_dim``,
        ``conv_size`` is ``linear_conv_kernel_dim``, ``norm_eps`` is ``rms_norm_eps``.
        """
        gates = ("z", ("g_a_proj", "g_b_proj")), ("a", ("forget_gate.f_a_proj", "forget_gate.f_b_proj"))
        names = DeltaNames((*_QKV, *gates, ("b", "b_proj")), A_log="forget_gate.A_log", dt_bias="forget_gate.dt_bias",
                           axes=4)
        return cls(hidden_size, num_heads=num_heads, names=names, **options)

    def _log_gates(self, a: Array) -> Array:
        """``[B, T, H, K]``, of W_a x."""
        A_log, dt_bias = self._part(self.names.A_log)[...], self._part(self.names.dt_bias)[...]
        return decay.kimi(self._heads(a, self.state_shape[1]), A_log, dt_bias, self.lower_bound)
