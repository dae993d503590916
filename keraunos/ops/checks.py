"""Values that cannot be right: decays above 0, offsets that do not rise, slots that are not in the pool.

Values that are known on the host are checked in every call: numbers, NumPy arrays, and tensors and arrays on the CPU,
but not what is traced or transformed. A device's values are read only if the environment variable ``KERAUNOS_CHECK`` is
1 when keraunos is imported: then they are copied to the host and checked there, also by JAX's compiled programs, which
call back. The graphs of ``torch.compile`` and CUDA graphs are not checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array

EVERYWHERE = os.environ.get("KERAUNOS_CHECK", "0") not in ("", "0")
OFFSETS = ("int32", "int64")


class Rule(NamedTuple):
    """A rule for the values of an array."""

    argument: str  # its name in the public function
    wrong: Callable[..., np.ndarray]  # which are wrong; is also given the arrays of ``beside``
    wanted: str
    beside: tuple[str, ...] = ()
    fine: Callable[[np.ndarray], bool] | None = None  # whether all are right, if that is faster to tell


def decay(argument: str, live: Callable[..., np.ndarray] | None = None, beside: tuple[str, ...] = ()) -> Rule:
    """The rule of the log of a decay; only of rows that are ``live``, which follows from the arrays ``beside``."""

    def wrong(x: np.ndarray, *others: np.ndarray) -> np.ndarray:
        above = ~(x <= 0)
        return above if live is None else above & live(*others).reshape(-1, *(1,) * (x.ndim - 1))

    return Rule(argument, wrong, "<= 0, it is the log of a decay", beside, _decays)


def _decays(x: np.ndarray) -> bool:
    if x.size == 0:
        return True
    if x.dtype.itemsize == 2:
        # NumPy is slow with floats of 16 bits. Their order is that of the bits: below 0 up to -inf, then NaN.
        bits, infinity = x.view(np.int16), 0xFC00 if x.dtype == np.float16 else 0xFF80
        return bool(bits.max() <= 0 and bits.view(np.uint16).max() <= infinity)
    return bool(x.max() <= 0)


def offsets(T: int | None, whole: bool = True) -> Rule:
    """The rule of ``cu_seqlens``: offsets of sequences that are T tokens together; T at most if not ``whole``."""

    def wrong(x: np.ndarray) -> np.ndarray:
        found = np.concatenate([x[:1] != 0, x[1:] < x[:-1]])
        found[-1:] |= T is not None and (x[-1:] > T or (whole and x[-1:] != T))
        return found

    end = "" if T is None else f" to {'' if whole else 'at most '}T = {T}"
    return Rule("cu_seqlens", wrong, f"offsets that rise from 0{end}, sums of lengths")


def placed(function: str, cu_seqlens: Array | None, like: Array, T: int | None, whole: bool = True) -> Array | None:
    """NumPy offsets, checked, as a constant of the framework and on the device of ``like``; others as they are.

    Args:
        function: the public function.
        cu_seqlens: what a user gave.
        like: an array.
        T, whole: see :func:`offsets`.

    Raises:
        ValueError: an offset is wrong.
    """
    framework = frontends.framework_of(like)
    if framework is None or not isinstance(cu_seqlens, np.ndarray):
        return cu_seqlens
    if cu_seqlens.ndim == 1 and cu_seqlens.dtype.kind in "iu":
        _looker(function, offsets(T, whole))(cu_seqlens)
        cu_seqlens = cu_seqlens.astype(np.int64 if cu_seqlens.max(initial=0) >= 2**31 else np.int32)
    return frontends.get(framework).constant(cu_seqlens, like)


def slots(argument: str, size: int, once: bool) -> Rule:
    """The rule of slots of a pool of this size; once: none is given twice, as those that are written."""

    def wrong(x: np.ndarray) -> np.ndarray:
        outside = (x < -1) | (x >= size)
        return outside | _repeated(x) if once else outside

    def fine(x: np.ndarray) -> bool:
        # Each step of decoding asks this: Python's own sets are faster than NumPy with as few numbers.
        slots = x.tolist()
        live = set(slots) - {-1}
        return len(live) == len(slots) - slots.count(-1) and (not live or (min(live) >= 0 and max(live) < size))

    wanted = f"a slot below {size}{', each once' if once else ''}, or -1 for padding"
    return Rule(argument, wrong, wanted, fine=fine if once else None)


def _repeated(x: np.ndarray) -> np.ndarray:
    """Which values are there before, but for those below 0."""
    found, flat = np.zeros(x.size, bool), x.ravel()
    order = np.argsort(flat, kind="stable")
    found[order[1:]] = (np.diff(flat[order]) == 0) & (flat[order[1:]] >= 0)
    return found.reshape(x.shape)


def counts(argument: str, most: int) -> Rule:
    """The rule of numbers of drafts that were accepted, of ``most``; padding slots may have any number."""

    def wrong(x: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return ((x < 0) | (x > most)) & (slots >= 0)

    return Rule(argument, wrong, f"a number of drafts from 0 to {most}", ("slots",))


def checker(function: str, rules: Mapping[str, Rule], args: NamedTuple) -> Callable[[NamedTuple], None] | None:
    """Make the check of the values of arrays like these, in the name of a function; None: nothing is to be read.

    Args:
        function: the public function.
        rules: by the names of arrays.
        args: a NamedTuple of arrays.

    Raises:
        ValueError: a NumPy array, which calls are told apart by, has a wrong value.
    """
    checks = []
    for name, rule in rules.items():
        x = getattr(args, name)
        look = _looker(function, rule)
        if isinstance(x, np.ndarray):
            look(x)
        elif frontends.framework_of(x):
            names = name, *(y for y in rule.beside if getattr(args, y) is not None)
            checks.append((list(map(args._fields.index, names)), look))
    framework = frontends.framework_of(args[0])
    if not checks or framework is None:
        return None
    frontend = frontends.get(framework)
    if not frontend.readable(args, EVERYWHERE):
        return None

    def check(args: NamedTuple) -> None:
        for places, look in checks:
            frontend.read(list(map(args.__getitem__, places)), look, EVERYWHERE)

    return check


class _One(NamedTuple):
    x: Array


def values(function: str, rule: Rule, x: Any) -> None:
    """Check the values of one array or list in the name of a function, if they may be read.

    Raises:
        ValueError: a value is wrong.
    """
    if frontends.compiling():
        return  # traced arrays have no values
    one = _One(x if frontends.framework_of(x) else np.asarray(x))
    check = checker(function, {"x": rule}, one)
    if check is not None:
        check(one)


def _padding(x: np.ndarray) -> np.ndarray:
    """Which floats are wrong in a mask of padding."""
    if (x == 1).any():
        return (x != 0) & (x != 1)
    return ~((x == 0) | (x <= -1000)) | ~(x < 0).any()


_PADDING = Rule(
    "attention_mask", _padding,
    "floats that are 1 for tokens and 0 for padding, or 0 for tokens and -1000 or less for padding; "
    "all zeros could mean either: pass booleans, True for tokens",
)


def tokens(function: str, mask: Array, x: Array) -> Any:
    """Which tokens of ``x``, ``[B, T, ...]``, are no padding: booleans, ``[B, T]``.

    Args:
        function: the public function or the layer.
        mask: ``[B, T]``. Booleans and integers are 0 for padding. Floats are too, if one of them is 1; else they are a
            mask that is added to logits: 0 for tokens, -1000 or less for padding.
        x: an array of the mask's framework.

    Raises:
        ValueError: the shape is wrong, or a float that may be read is neither.
    """
    if tuple(mask.shape) != tuple(x.shape[:2]):
        raise ValueError(
            f"{function}: attention_mask has shape {tuple(mask.shape)}; expected {tuple(x.shape[:2])}, "
            "[B, T]: 1 for each token of the call, 0 for padding"
        )
    if "float" not in str(mask.dtype):
        return mask != 0
    values(function, _PADDING, mask)
    # A device's values are not read: the program itself looks for a 1.
    return (mask == 0) != (mask == 1).any()


def _looker(function: str, rule: Rule) -> Callable[..., None]:
    """Refuses the first wrong value of an array."""

    def look(x: np.ndarray, *beside: np.ndarray) -> None:
        if rule.fine(x) if rule.fine else not rule.wrong(x, *beside).any():
            return
        with np.errstate(invalid="ignore"):
            found = np.argwhere(rule.wrong(x, *beside))
        if len(found):
            index = tuple(map(int, found[0]))
            raise ValueError(
                f"{function}: {rule.argument} has a value {x[index]} at {list(index)}; expected {rule.wanted}"
            )

    return look
