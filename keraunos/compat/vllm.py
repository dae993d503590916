"""vLLM's functions for lightning attention, as drop-ins: ``docs/engines.md`` shows how, and what is different.

The layout is vLLM's, ``[B, H, T, D]``, there is no softmax scale, and decays are slopes s >= 0, of which a step back is
``exp(-s)``. The formula is ``S_t = exp(-s) S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t`` for every token.
"""

from __future__ import annotations

import functools

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

from keraunos import serving
from keraunos.modules.gla_attention import gla_attention

# Slopes are a model's constants: their negatives are made once, and again when ``_version`` says that they changed. It
# does not see writes through ``.data``, except when ``.data`` is assigned a new tensor.
_negatives: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def lightning_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ed: torch.Tensor,
    block_size: int = 256,
    kv_history: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lightning attention over whole prompts, which keeps the state before each block of tokens.

    Args:
        q: ``[B, H, T, D]``, bfloat16, float16 or float32.
        k: ``[B, H, T, D]``.
        v: ``[B, H, T, E]``.
        ed: the slopes, >= 0: ``[H]``, ``[H, 1, 1]`` or ``[1, H, 1, 1]``. Their negatives are kept: change them by
            operations on the tensor, or pass another tensor. Writes through ``.data`` are not seen.
        block_size: tokens per block.
        kv_history: ``[B, H, D, E]``, the state before the first token; zeros if None. It is not changed.

    Returns:
        The output ``[B, H, T, E]`` in q's dtype, and ``[B, H, ceil(T / block_size) + 1, D, E]`` in float32: the state
        before each block, then the last state. Both have gradients for q, k, v, ed and kv_history.

    Raises:
        ValueError: a shape does not fit.
        TypeError: an argument is no tensor or has a wrong dtype.

    Example:
        >>> import torch
        >>> from keraunos.compat.vllm import lightning_attention
        >>> q = torch.ones(1, 2, 600, 16)
        >>> output, kv = lightning_attention(q, q, q, torch.tensor([0.5, 1.0]))
        >>> tuple(output.shape), tuple(kv.shape)
        ((1, 2, 600, 16), (1, 2, 4, 16, 16))
    """
    _check("lightning_attention", q, k, v)
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"lightning_attention: block_size is {block_size!r}; expected an integer >= 1")
    B, H, T, D = q.shape
    E = v.shape[-1]
    gamma = log_decay("lightning_attention", ed, H)
    state = q.new_zeros(B, H, D, E, dtype=torch.float32) if kv_history is None else kv_history.float()
    if state.shape != (B, H, D, E):
        raise ValueError(
            f"lightning_attention: kv_history has shape {tuple(state.shape)}; expected [B, H, D, E] = {(B, H, D, E)}"
        )
    if B == 1 and T and not _differentiated(q, k, v, ed, state):
        output, kv = _in_one_pass(q[0], k[0], v[0], gamma, block_size, state[0])
        return output[None], kv[None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    whole = T // block_size
    end = whole * block_size
    outputs, states = [], [state[:, None]]
    if whole:
        # A block's own state, then the one before it, then the outputs: all blocks at once.
        query, key, value = (x[:, :end].reshape(B * whole, block_size, H, x.shape[-1]) for x in (q, k, v))
        _, own = gla_attention(query, key, value, None, gamma, softmax_scale=1.0, return_state=True)
        states = [_carry(state, own.unflatten(0, (B, whole)), gamma * block_size)]
        before = states[0][:, :-1].flatten(0, 1)
        output = gla_attention(query, key, value, None, gamma, before, softmax_scale=1.0)
        outputs = [output.reshape(B, end, H, E)]
    if end < T or not T:
        query, key, value = (x[:, end:] for x in (q, k, v))
        output, last = gla_attention(
            query, key, value, None, gamma, states[-1][:, -1], softmax_scale=1.0, return_state=True
        )
        outputs.append(output)
        if T:
            states.append(last[:, None])
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    kv = states[0] if len(states) == 1 else torch.cat(states, 1)
    return output.transpose(1, 2), kv.transpose(1, 2)


def _differentiated(*tensors: torch.Tensor) -> bool:
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _in_one_pass(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gamma: torch.Tensor, block_size: int,
                 state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[H, T, E]`` and the states ``[H, blocks + 1, D, E]``, which prefill exports: they are the slots of its pool."""
    (H, T, D), E = q.shape, v.shape[-1]
    blocks = -(-T // block_size)
    kv = torch.empty(H, blocks + 1, D, E, dtype=torch.float32, device=q.device)
    kv[:, 0] = kv[:, blocks] = state
    places = _places.__wrapped__ if _traced() else _places
    slots, offsets, boundaries = places(T, block_size, q.device)
    output, _ = serving.prefill(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), kv.transpose(0, 1), slots, offsets, g_gamma=gamma,
        boundaries=boundaries, softmax_scale=1.0,
    )
    return output.transpose(0, 1), kv


def _traced() -> bool:
    """Whether tensors made now belong to a graph, or are without values, and must not outlive the call."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


@functools.lru_cache(maxsize=1024)
def _places(
    T: int, block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The slot of the last state, the offsets of the one prompt, and the ends of blocks with their slots."""
    blocks = -(-T // block_size)
    ends = torch.arange(1, blocks, dtype=torch.int32, device=device)
    slots, offsets = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([blocks], [0, T]))
    return slots, offsets, (ends * block_size - 1, ends) if blocks > 1 else None


def _carry(state: torch.Tensor, own: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """The states before and after n blocks ``[B, n + 1, H, D, E]``, from the first one and the blocks' own."""
    states = torch.cat([state[:, None], own], 1)
    reach = 1
    while reach < states.shape[1]:
        # Each has what its own and the blocks up to ``reach`` - 1 before it add; take as many blocks more.
        earlier = (gamma * reach).exp()[:, None, None] * states[:, :-reach]
        states = torch.cat([states[:, :reach], states[:, reach:] + earlier], 1)
        reach *= 2
    return states


def linear_decode_forward_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_caches: torch.Tensor,
    slope_rate: torch.Tensor,
    slot_idx: torch.Tensor,
    BLOCK_SIZE: int = 32,
) -> torch.Tensor:
    """One token for each request, whose states are updated in place.

    Args:
        q: ``[B, H, 1, D]``, bfloat16, float16 or float32; likewise k and v.
        k: the keys.
        v: the values.
        kv_caches: ``[slots, H, D, D]``, float32 or bfloat16.
        slope_rate: the slopes, >= 0: ``[H]``, ``[H, 1, 1]`` or ``[1, H, 1, 1]``.
        slot_idx: ``[B]``, int32 or int64, where each request's state is; -1: padding, nothing is touched.
        BLOCK_SIZE: taken and not needed.

    Returns:
        ``[B, H * D]`` in q's dtype, zeros for padding.

    Raises:
        ValueError: a shape does not fit.
        TypeError: an argument is no tensor or has a wrong dtype.
    """
    _check("linear_decode_forward_triton", q, k, v)
    _, H, T, _ = q.shape
    if T != 1:
        raise ValueError(f"linear_decode_forward_triton: q has shape {tuple(q.shape)}; expected one token per request")
    gamma = log_decay("linear_decode_forward_triton", slope_rate, H)
    q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    output, _ = serving.decode(q, k, v, kv_caches, slot_idx, g_gamma=gamma, softmax_scale=1.0)
    return output.flatten(1)


def _check(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for label, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: {label} is of type {type(x).__qualname__}; expected a torch.Tensor")
        if x.ndim != 4 or x.shape[:3] != q.shape[:3]:
            raise ValueError(f"{name}: {label} has shape {tuple(x.shape)}; expected [B, H, T, D], like q")


def log_decay(name: str, slopes: torch.Tensor, H: int) -> torch.Tensor:
    """The log of the decay ``[H]`` of slopes ``[H]``, ``[H, 1, 1]`` or ``[1, H, 1, 1]``; ``name``: whom errors name."""
    if not isinstance(slopes, torch.Tensor):
        raise TypeError(f"{name}: slopes are of type {type(slopes).__qualname__}; expected a torch.Tensor")
    if tuple(slopes.shape) not in ((H,), (H, 1, 1), (1, H, 1, 1)):
        raise ValueError(
            f"{name}: slopes have shape {tuple(slopes.shape)}; expected [H], [H, 1, 1] or [1, H, 1, 1] with H = {H}"
        )
    # What is traced, or captured in a CUDA graph, has no values yet; of what inference mode made, nobody knows whether
    # it has changed.
    if (
        _traced()
        or slopes.requires_grad
        or slopes.is_inference()
        or (slopes.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return -slopes.float().reshape(H)
    made, now = _negatives.get(slopes), (slopes._version, slopes.device, slopes.data_ptr())
    if made is None or made[0] != now:
        # Kept for calls that gradients follow, too.
        with torch.inference_mode(False):
            made = _negatives[slopes] = now, -slopes.detach().float().reshape(H)
    return made[1]
