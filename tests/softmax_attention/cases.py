"""Calls of softmax attention as NumPy arrays, their truth in float64, and the platforms that run them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re

import ml_dtypes
import numpy as np

import keraunos
from keraunos.kernels.softmax_attention.contract import Args
from keraunos.kernels.softmax_attention.reference import attention
from keraunos.numerics import working_dtype
from keraunos.ops.family import HOPPER
from tests.linear_attention.cases import DTYPES, GPU, INTERPRETED
from tests.numerics import assert_within_rule

NAMES = ("output", "dquery", "dkey", "dvalue", "dbias", "dsinks")


def platforms() -> list[tuple[str, str]]:
    """The (platform, framework) pairs that run here."""
    if INTERPRETED:
        return [("triton", "torch")]
    pairs = [("xla", "jax"), ("torch", "torch")]
    if GPU:
        pairs += [(platform, framework) for platform in ("triton", "cuda") for framework in ("jax", "torch")]
    return [pair for pair in pairs if importlib.util.find_spec(pair[1])]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; the defaults are small and ordinary. bias, mask and sinks: for how many heads, 0: none."""

    B: int = 2
    T: int = 50
    S: int | None = None
    H: int = 4
    G: int | None = None
    K: int = 16
    V: int | None = None
    bias: int = 0
    bias_batch: int | None = None
    bias_size: float = 1.0
    closed: bool = False  # some of the bias is -inf, and all of it for some queries
    mask: int = 0
    sinks: int = 0  # -1: [2], for all heads; 1 with several heads: [1, 3], likewise
    sink_size: float = 1.0
    sink_mean: float = 0.0
    segments: bool = False
    lengths: tuple[int, ...] | None = None  # of the keys of each of the B rows
    soft_cap: float | None = None
    causal: bool = False
    window: int | tuple[int, int] | None = None
    offset: int | tuple[int, ...] | None = None  # a number, or an array with one for each of the first B rows
    dropout: float = 0.0
    dtype: str = "float32"
    scale: float | None = None
    block: int | None = None

    @functools.cached_property
    def arrays(self) -> tuple[Args, np.ndarray]:
        """The arguments without the seed, and a gradient for the output."""
        rng = np.random.default_rng(0)
        B, T, H, K = self.B, self.T, self.H, self.K
        S = T if self.S is None else self.S
        G, V = self.G or H, self.V or K

        def normal(*shape):
            return rng.standard_normal(shape).astype(DTYPES[self.dtype])

        bias = normal(self.bias_batch or B, self.bias, T, S) if self.bias else None
        if self.bias:
            bias *= bias.dtype.type(self.bias_size)
        if self.closed:
            bias[..., rng.random(S) < 0.3] = -np.inf
            bias[:, :, rng.random(T) < 0.2] = -np.inf
        mask = rng.random((B, self.mask, T, S)) < 0.5 if self.mask else None
        if self.mask:
            mask[:, :, T // 3] = False
        sinks = {0: None, -1: normal(2)}.get(self.sinks) if self.sinks <= 0 else normal(self.sinks, 3)
        if sinks is not None:
            sinks = (sinks * self.sink_size + self.sink_mean).astype(sinks.dtype)
        # Padding on both sides, and ids that the other side has not.
        own, other = (np.sort(rng.integers(-1, 4, (B, n)), 1).astype(np.int32) for n in (T, S))
        segments = (own, other) if self.segments else (None, None)
        if self.lengths is not None:
            seen = np.arange(S) < np.array(self.lengths[: self.B])[:, None]
            segments = np.zeros((B, T), np.int32), np.where(seen, 0, -1).astype(np.int32)
        args = Args(normal(B, T, H, K), normal(B, S, G, K), normal(B, S, G, V), bias, sinks, mask, *segments)
        return args, normal(B, T, H, V)

    def options(self, platform: str, array=None) -> dict:
        """Keyword arguments of the public function, but for arrays; ``array`` makes those of the framework."""
        # PyTorch's blocks are of queries only.
        keys = None if platform == "torch" else self.block
        cfg = keraunos.AttentionConfig(block_q=self.block, block_k=keys) if self.block else None
        offset = self.offset
        if isinstance(offset, tuple):
            offset = array(np.array(offset[: self.B], np.int32))
        return dict(
            logits_soft_cap=self.soft_cap, causal=self.causal, sliding_window=self.window, softmax_scale=self.scale,
            query_offset=offset, dropout_prob=self.dropout, deterministic=not self.dropout, dtype=self.dtype,
            platform=platform, cfg=cfg,
        )

    def check(self, platform: str, framework: str) -> None:
        """Hold output and gradients to the tolerance rule."""
        got, seed = {"jax": self.run_jax, "torch": self.run_torch}[framework](platform)
        args, doutput = self.arrays
        window = self.window if self.window is None or isinstance(self.window, tuple) else (self.window,) * 2
        options = dict(softmax_scale=self.scale, soft_cap=self.soft_cap, causal=self.causal, window=window,
                       dropout=self.dropout)
        found, scales = [], []
        for dtype in (np.float64, working_dtype(self.dtype)):
            given = args._replace(seed=seed, query_offset=np.resize(self.offset or 0, self.B))
            output, _ = attention(*given, **options, dtype=dtype)
            *grads, dbias, dsinks = attention(*given, **options, doutput=doutput, dtype=dtype)
            found.append([output, *grads, *self.shared(args, dbias, dsinks)])
            # Sums over those that share a bias or a sink have terms of both signs.
            scales.append([output, *grads, *self.shared(args, np.abs(dbias), np.abs(dsinks))])
        if args.key.shape[1] == 1:
            # The only key has all the weight, whatever the query is: differences of equal terms.
            terms = np.einsum("bthv,bshv->bth", doutput, args.value, dtype=np.float64)[..., None]
            scales[0][1:3] = terms * args.key, (terms * args.query).sum(1, keepdims=True)
        assert_within_rule(NAMES, got, *found, [self.dtype] * 6, scales[0])

    def shared(self, args: Args, dbias, dsinks):
        """The sums over all that share a bias or a sink; None where there is none."""
        H = self.H
        if args.bias is not None:
            B, heads = args.bias.shape[:2]
            dbias = dbias.reshape(B, self.B // max(B, 1), heads, H // heads, *dbias.shape[2:]).sum((1, 3))
        if args.sinks is not None:
            heads = 1 if args.sinks.ndim == 1 else len(args.sinks)
            shape = heads, H // heads, args.sinks.shape[-1]
            dsinks = dsinks.sum((0, 2)).reshape(shape).sum(1).reshape(args.sinks.shape)
        return None if args.bias is None else dbias, None if args.sinks is None else dsinks

    def run_jax(self, platform):
        """``(output and gradients, the dropout's seed)``."""
        import jax
        import jax.numpy as jnp

        args, doutput = self.arrays
        key = jax.random.key(3)
        args = Args(*(None if x is None else jnp.asarray(x) for x in args))

        def call(query, key_, value, bias, sinks):
            return keraunos.attention(
                query, key_, value, bias, key, sinks, mask_info=self.mask_info(args, jnp.asarray),
                **self.options(platform, jnp.asarray),
            )

        output, pull = jax.vjp(call, *args[:5])
        got = [None if x is None else np.asarray(x) for x in (output, *pull(jnp.asarray(doutput)))]
        return got, np.asarray(jax.random.bits(key, (2,), jnp.uint32))

    def run_torch(self, platform):
        """``(output and gradients, the dropout's seed)``."""
        import torch

        device = "cuda" if GPU else "cpu"

        def tensor(x):
            if x is None or x.dtype != ml_dtypes.bfloat16:
                return None if x is None else torch.from_numpy(x.copy()).to(device)
            return torch.from_numpy(x.astype(np.float32)).to(device, torch.bfloat16)

        args, doutput = self.arrays
        args = Args(*map(tensor, args))
        given = [x if x is None else x.requires_grad_() for x in args[:5]]
        rng, again = (torch.Generator().manual_seed(3) for _ in range(2))
        output = keraunos.attention(*given[:4], rng, given[4], mask_info=self.mask_info(args, tensor),
                                    **self.options(platform, tensor))
        output.backward(tensor(doutput))
        got = [output.detach(), *(x if x is None else x.grad for x in given)]
        seed = torch.randint(1 << 32, (2,), generator=again).numpy()
        return [x if x is None else x.double().cpu().numpy() for x in got], seed

    def mask_info(self, args, array):
        """The mask, the segments or the lengths of the call; ``array`` makes arrays of the framework."""
        from keraunos.types import MaskInfo

        if args.mask is not None:
            return MaskInfo.from_attention_mask(args.mask)
        if self.lengths is not None:
            return MaskInfo().apply_kv_lengths(array(np.array(self.lengths[: self.B])))
        return None if args.query_segments is None else MaskInfo.from_segments(args.query_segments, args.key_segments)


def is_hopper() -> bool:
    """Whether the GPU is one that the platform ``cuda`` is for."""
    import torch

    return bool(re.search(HOPPER[1], torch.cuda.get_device_name()))
