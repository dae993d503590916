"""How stretches of tokens join, one after the other: what devices tell each other which share a sequence.

A stretch takes the state before it, ``[K, V]`` for each head, to ``operator(state) + local``. Towards the last token
that is the state itself, towards the first one its gradient; a token of whatever way is a stretch, too. So each device
sends ``local`` and the operator, and makes of what it gets the state that arrives at its own tokens.

Families differ in the operator: decays, or a matrix. The table of a family names its ``Transition``, which the
distributed functions (:mod:`keraunos.distributed.linear`) use without knowing more of the family::

    of(implementation, args, opts)     -> a hashable object for all calls that are alike; the others are its methods
    ways(args, opts)                   -> the way of the state, and that of its gradient; right: to the last token
    arrays(args, doutput, own)         -> what a pass reads, a tuple; forward without the last two
    leave(x, start, plan, way, copies) -> (local, then the operator, flat; what `arrive` needs of this pass...)
    arrive(left, start, plan, way, sizes, pieces) -> the states that the call starts from
    copies, started, kept              -> whether it can leave several copies; `arrive` makes states of segments; the
                                          backward reads `own`, what the forward left

``x`` are the arrays. ``plan`` is four integers on the device: the first token of the stretch that counts,
one past the last, whether the sequence begins there (then ``start`` enters, and nothing older passes), and how many
stretches lie before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keraunos import frontends
from keraunos.frontends.array_types import Array


def arrive(left: Any, start: Array | None, plan: Array, right: bool, sizes: tuple[int, ...],
           passed: Callable[[Array, Array], Any]) -> Any:
    """The state ``[B, H, K, V]`` after the stretches before this one; ``start``, or zeros, if there are none.

    Args:
        left: ``[stretches, n]``, what each left, in the order of their tokens.
        start, plan: see above.
        right: the stretches before this one are those to the left of it.
        sizes: B, H, K, V.
        passed: ``(operator [B, H, any], state) ->`` the state that the operator makes of it.
    """
    frontend = frontends.of(left)
    xp, (B, H, K, V), values = frontend.xp, sizes, sizes[0] * sizes[1] * sizes[2] * sizes[3]
    state = xp.zeros_like(left[0, :values]).reshape(B, H, K, V)
    stretches = range(left.shape[0])
    for place, i in enumerate(stretches if right else reversed(stretches)):
        local, operator = left[i, :values].reshape(B, H, K, V), left[i, values:].reshape(B, H, -1)
        # What others than those before have left may be anything.
        state = xp.where(place < plan[3], local + passed(operator, state), state)
    if start is None:
        return state
    return xp.where(plan[3] == 0, frontend.cast(start, frontend.dtype_name(state)), state)
