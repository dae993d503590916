"""The contract of the gated delta rule: the arrays of a call, its operation; see :class:`Recurrence`."""

from __future__ import annotations

from typing import Any, NamedTuple

from keraunos.kernels.recurrent.contract import Options as Options
from keraunos.kernels.recurrent.contract import Recurrence, folded, most_heads


class Args(NamedTuple):
    """The arrays of one call; absent ones are ``None``.

    The recurrence has H heads, the most that any of the first five has. Head h reads head ``h // (H // n)`` of an array
    with n heads; n divides H.
    """

    query: Any  # [B, T, heads, K]
    key: Any  # [B, T, heads, K]
    value: Any  # [B, T, heads, V]
    g: Any = None  # [B, T, heads, K] or [B, T, heads], log, <= 0
    beta: Any = None  # [B, T, heads]
    initial_state: Any = None  # [N, H, K, V]
    cu_seqlens: Any = None  # [N + 1], int

    @property
    def tokens(self) -> tuple:
        """The arrays of tokens."""
        return self[:5]

    @property
    def heads(self) -> int:
        """H, the heads of the recurrence."""
        return most_heads(*self[:5])


def fold(args: Args, size: int) -> Args:
    """``size`` calls at once as one; see :func:`folded`."""
    return Args(**folded(args, size))


# Forward one product reads the error, one changes the state, and one reads it; backward two make the states again.
GATED_DELTA_RULE = Recurrence("gated_delta_rule", "gated_delta_rule", Args, Args._fields, (3, 8), fold,
                              flags=("reverse", "use_qk_l2norm"))
kernel = GATED_DELTA_RULE.implementation
