"""The sequences of one call of a recurrence: its sizes, which heads share an array, how segments are cut."""

from __future__ import annotations

from typing import Any

from keraunos.kernels.host.arrays import Spec


class Sizes:
    """The sizes of one call; one object for all calls that are alike.

    Args:
        specs: the properties of ``query``, ``key``, ``value`` [B, T, heads, dim], of the gates ``g``, the decays
            ``g_gamma`` and ``cu_seqlens``; and ``heads``.
        heads: of the recurrence, if more than any of these arrays has.
        opts: ``softmax_scale``, ``reverse``, ``cfg`` and ``needs``, which says what has a gradient.
    """

    def __init__(self, specs: Any, opts: Any, heads: int = 0):
        self.specs, self.opts = specs, opts
        # Complete by the contract, whatever its declared type allows.
        self.cfg: Any = opts.cfg
        self.scale, self.reverse = opts.softmax_scale, opts.reverse
        self.B, self.T, _, self.K = specs.query.shape
        self.H, self.V = heads or specs.heads, specs.value.shape[3]
        self.dtype = specs.query.dtype
        self.packed, self.N = specs.cu_seqlens is not None, sequence_count(specs)
        # Gates: 0 none, 1 per token, 2 per token and dimension.
        self.gate = 0 if specs.g is None else len(specs.g.shape) - 2
        gamma = getattr(specs, "g_gamma", None)
        self.has_gamma = gamma is not None
        self.stride_gamma_b = self.H if gamma and len(gamma.shape) == 2 else 0
        self.need_gamma = gamma is not None and opts.needs(specs, "g_gamma")

    def ratio(self, x: Spec | None) -> int:
        """How many heads share each of an array's; 1 for an absent one."""
        return self.H // x.shape[2] if x else 1

    def ratios(self, **arrays: Spec | None) -> dict[str, int]:
        """``R<NAME>``, the :meth:`ratio` of each array, by the names of its strides."""
        return {f"R{name.upper()}": self.ratio(x) for name, x in arrays.items()}

    def dtype_of_each(self, x: Spec) -> str:
        """The dtype of a head's gradient of an array: wide where it is still to be summed over those that share."""
        return "float32" if self.ratio(x) > 1 else x.dtype


def sequence_count(specs: Any) -> int:
    """How many sequences a call has."""
    return specs.query.shape[0] if specs.cu_seqlens is None else specs.cu_seqlens.shape[0] - 1


def cut(T: int, count: int, most: int, least: int, chunk: int) -> tuple[int, int]:
    """``(tokens per segment, pieces per segment)`` of a sequence that is cut into ``count`` segments of whole chunks.

    Args:
        T: tokens of the sequence. most: pieces of a segment, at most; least: tokens that make one worth its while.
    """
    pieces = max(min(T // count // least, most), 1)
    return -(-T // (count * pieces * chunk)) * pieces * chunk, pieces
