"""The pool of slots that the states of packed sequences come from and go to."""

from __future__ import annotations

from typing import Any, NamedTuple

from keraunos.kernels.host.arrays import spec_of, state_strides

# Where the states of sequences are in no pool, the kernels' flags for one.
NO_POOL = dict(POOL=False, MAY_START=False, **state_strides(None))


class Pool(NamedTuple):
    """The states of packed sequences: the arrays, or their properties."""

    states: Any  # [slots, H, K, V], any strides
    slots: Any  # [N]; -1: no sequence
    has_initial: Any = None  # [N], bool
    exports: Any = None  # for each chunk the slot that the state before it goes to as well; -1: none
    T: int = 0  # tokens of the row
    call: Any = None  # what is known of the call's arrays, which may say more tokens
    into: Any = None  # where the output goes

    def specs(self) -> Pool:
        """The properties of the arrays."""
        states, slots, has_initial, exports = map(spec_of, self[:4])
        return Pool(states, slots, has_initial, exports, self.T, self.call, spec_of(self.into))

    def arrays(self) -> dict[str, Any]:
        """The kernels' arguments."""
        return dict(pool=self.states, slots=self.slots, has_initial=self.has_initial, exports=self.exports)

    def flags(self) -> dict[str, Any]:
        """The kernels' constants."""
        return dict(POOL=True, MAY_START=self.has_initial is not None, **state_strides(self.states))


NO_STATES = Pool(None, None)
