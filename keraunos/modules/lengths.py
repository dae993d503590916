"""Calls of many lengths from a few compiled programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.linear_attention.contract import Decay, constant_decay, per_head, placed
from keraunos.kernels.recurrent.contract import most_heads
from keraunos.modules.gla_attention import gla_attention
from keraunos.modules.lightning_attention import lightning_attention


def rounded_up(n: int) -> int:
    """The length that calls of ``n`` tokens are made with: four to an octave, and multiples of 32."""
    step = max(32, (1 << max(n - 1, 0).bit_length()) // 8)
    return -(-n // step) * step


def bucketed(operation: Callable) -> Callable:
    """Make a function for JAX that pads calls of ``operation`` to a few lengths, so that XLA compiles few programs.

    XLA compiles a program for each shape: eager calls with lengths that vary take seconds each on a CPU, and memory
    that is kept. The function pads the number of tokens to one of four lengths in an octave (160, 192, 224, 256,
    320, ...), and the number of packed sequences to a power of two. Padding has keys and values of zero and gates
    of zero, so outputs, final states and gradients are those of the call as given.

    Up to a quarter of the tokens is padding, a tenth on average. Constant decays become gates per token, which take
    longer, unless sequences are packed. Inside ``jax.jit`` the function saves nothing: the program around the call is
    compiled for its length anyway.

    Args:
        operation: :func:`keraunos.gla_attention` or :func:`keraunos.lightning_attention`.

    Returns:
        A function with the operation's arguments and results.

    Raises:
        ValueError: it is another function.
        TypeError: (of what is returned) the arrays are not JAX's.

    Example:
        >>> import jax.numpy as jnp, keraunos
        >>> attention = keraunos.bucketed(keraunos.gla_attention)
        >>> [attention(x, x, x).shape for x in (jnp.ones((1, T, 2, 16)) for T in (70, 90))]  # compiled for 96
        [(1, 70, 2, 16), (1, 90, 2, 16)]
    """
    if operation is gla_attention:
        return functools.wraps(operation)(_gla)
    if operation is lightning_attention:
        return functools.wraps(operation)(_lightning)
    raise ValueError(f"bucketed: got {operation!r}; expected keraunos.gla_attention or keraunos.lightning_attention")


def _lightning(query: Array, key: Array, value: Array, initial_state: Array | None = None,
               cu_seqlens: Array | None = None, *, layer_idx: int | Array | None = None, num_layers: int | None = None,
               log_decay: Decay | None = None, **options: Any) -> Any:
    heads = most_heads(query, key, value)
    gamma = constant_decay("lightning_attention", query, heads, layer_idx, num_layers, log_decay)
    return _gla(query, key, value, None, gamma, initial_state, cu_seqlens, **options)


def _gla(query: Array, key: Array, value: Array, g: Array | None = None,
         g_gamma: Decay | None = None, initial_state: Array | None = None,
         cu_seqlens: Array | None = None, **options: Any) -> Any:
    if frontends.framework_of(query) != "jax":
        raise TypeError(f"bucketed: query is of type {type(query).__qualname__}; expected a jax.Array")
    gamma = per_head("gla_attention", query, "g_gamma", g_gamma)
    cu_seqlens = placed("gla_attention", cu_seqlens, query)
    T = query.shape[1] if query.ndim > 1 else 0
    padded = rounded_up(T)
    if any(x is not None and x.shape[1:2] != (T,) for x in (query, key, value, g)) or (
        padded == T and cu_seqlens is None
    ):
        # What does not fit is left to the checks.
        return gla_attention(query, key, value, g, gamma, initial_state, cu_seqlens, **options)
    frontend = frontends.get("jax.lengths")

    def grown(x: Array | None) -> Any:
        return x if x is None else frontend.grow(x, 1, padded)

    query, key, value, g = map(grown, (query, key, value, g))
    N, heads = None, most_heads(query, key, value, g)
    if gamma is not None and cu_seqlens is None and gamma.shape in ((heads,), (query.shape[0], heads)):
        g, gamma = frontend.as_gates(g, gamma, query, T, heads), None
    if cu_seqlens is not None:
        # One sequence for the padding, and empty ones.
        N = cu_seqlens.shape[0] - 1
        sequences = 1 << N.bit_length()
        cu_seqlens = frontend.longer(cu_seqlens, 0, sequences + 1, padded)
        if initial_state is not None:
            initial_state = frontend.grow(initial_state, 0, sequences)
    found = gla_attention(query, key, value, g, gamma, initial_state, cu_seqlens, **options)
    output, state = found if options.get("return_state") else (found, None)
    output = frontend.cut(output, 1, T)
    if state is None:
        return output
    return output, state if N is None else frontend.cut(state, 0, N)
