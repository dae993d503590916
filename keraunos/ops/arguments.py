"""The arguments of one call: arrays that belong together, with shapes by letters, and options of the right types.

A layout is the text of a shape, such as ``"B, T, heads, K"``. A capital letter is a size of the call: the first array
that has it sets it, and later arrays must agree. A word in small letters is any size. ``"1 or H"`` is one of several.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from keraunos import frontends
from keraunos.ops.invocation import Invocation, is_number

FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int32", "int64", "int8", "int16", "uint8", "uint16", "uint32", "uint64")


class Arguments:
    """Checks the arguments of one call in the name of a function. Looks at shapes and dtypes, never at values.

    Args:
        function: the public function.
        args: a NamedTuple of arrays.
        required: those that must be there; the framework and the place of the first are those of all.
        allowed: the dtypes that each may have.
        like: those that have the dtype of the first.
        constants: those that may be NumPy arrays.
        names: what the function calls some of them.

    Attributes:
        framework: the name of the arrays' framework.
        frontend: its front end.
        dtypes: the dtypes of the arrays that are given.
        constants: the names of those that are NumPy arrays.
        sizes: the sizes by their letters, as far as they are known.

    Raises:
        TypeError, ValueError: an array is missing, or of another framework, place or dtype.
    """

    def __init__(self, function: str, args: NamedTuple, required: tuple[str, ...],
                 allowed: Mapping[str, tuple[str, ...]], *, like: tuple[str, ...] = ("key", "value"),
                 constants: tuple[str, ...] = (), names: Mapping[str, str] = MappingProxyType({})):
        self.function, self.args, self.names, self.first = function, args, names, required[0]
        self.sizes: dict[str, int] = {}
        self.dtypes: dict[str, str] = {}
        self.constants: list[str] = []
        one = getattr(args, self.first)
        framework = frontends.framework_of(one)
        if framework is None:
            self.fail(TypeError, self.first, f"is {_kind(one)}", frontends.arrays())
        self.framework, self.frontend = framework, frontends.get(framework)
        place, place_of, dtype_name = self.frontend.place_of(one), self.frontend.place_of, self.frontend.dtype_name
        for name, x in zip(args._fields, args, strict=True):
            if x is None:
                if name in required:
                    self.fail(TypeError, name, "is None", "an array")
                continue
            if isinstance(x, np.ndarray) and name in constants:
                dtype = x.dtype.name
                self.constants.append(name)
            elif frontends.framework_of(x) != framework:
                self.fail(TypeError, name, f"is {_kind(x)}", f"an array of {framework}, like {self.first}")
            elif (other := place_of(x)) != place:
                self.fail(ValueError, name, f"is on {other}", f"{place}, like {self.first}")
            else:
                dtype = dtype_name(x)
            self.dtypes[name] = dtype
            if dtype not in allowed[name]:
                wanted = "integers" if allowed[name] == INTEGERS else " or ".join(allowed[name])
                why = "token offsets" if name == "cu_seqlens" else ""
                self.fail(TypeError, name, f"has dtype {dtype}", wanted, why)
            if name in like and dtype != self.dtypes[self.first]:
                self.fail(TypeError, name, f"has dtype {dtype}", self.dtypes[self.first], f"like {self.first}")

    def fail(self, error: type[Exception], name: str, got: str, wanted: object, why: str = "") -> NoReturn:
        """Raise an error that says what came, what was wanted, and why."""
        name = self.names.get(name, name)
        raise error(f"{self.function}: {name} {got}; expected {wanted}{', ' + why if why else ''}")

    def wrong(self, name: str, wanted: str, why: str = "") -> NoReturn:
        """Refuse the shape of an array."""
        self.fail(ValueError, name, f"has shape {tuple(getattr(self.args, name).shape)}", wanted, why)

    def shape(self, name: str, *layouts: str, why: str = "", wanted: str = "") -> None:
        """Check that an array, where it is given, has one of some layouts, and set the sizes that it has first.

        Args:
            name: the array.
            layouts: see the top of this page.
            why: the reason, for the error.
            wanted: the layouts in the error's words; usually they are made of ``layouts``.
        """
        x = getattr(self.args, name)
        if x is None:
            return
        shape, sizes = x.shape, self.sizes
        for layout in layouts:
            labels, letters, choices = _parsed(layout)
            # An unknown size is the array's own.
            if len(labels) == len(shape) and tuple(map(sizes.get, labels, shape)) == shape:
                if choices and not self._is_chosen(shape, choices):
                    continue
                for i, letter in letters:
                    if letter not in sizes:
                        sizes[letter] = shape[i]
                return
        self.wrong(name, wanted or self._wanted(layouts), why)

    def _is_chosen(self, shape: tuple[int, ...], choices: list[tuple[int, list[str]]]) -> bool:
        return all(shape[i] in [self.sizes[x] if x in self.sizes else int(x) for x in some] for i, some in choices)

    def _wanted(self, layouts: tuple[str, ...]) -> str:
        """Say what layouts are, with the sizes that are known."""
        texts, sizes = [f"[{layout}]" for layout in layouts], self.sizes
        if any(" or " in layout for layout in layouts):
            letters = dict.fromkeys(", ".join(layouts).replace(" or ", ", ").split(", "))
            known = ", ".join(f"{x} = {sizes[x]}" for x in letters if x in sizes)
            return f"{' or '.join(texts)} with {known}"
        for i, layout in enumerate(layouts):
            labels, _, _ = _parsed(layout)
            if not sizes.keys().isdisjoint(labels):
                shape = ", ".join(str(sizes.get(label, label)) for label in labels)
                texts[i] += f" = ({shape}{',' if len(labels) == 1 else ''})"
        return " or ".join(texts)

    def shared_heads(self, name: str, n: int, why: str) -> None:
        """Check that the n heads of an array divide the call's, H."""
        H = self.sizes["H"]
        if n < 1 or H % n:
            self.fail(ValueError, name, f"has {n} heads", f"a divisor of H = {H}", why)

    def sequences(self) -> None:
        """Set N, the number of sequences: those of ``cu_seqlens``, which are packed into one row, or B."""
        offsets, B = self.args._asdict()["cu_seqlens"], self.sizes["B"]
        if offsets is None:
            self.sizes["N"] = B
            return
        if offsets.ndim != 1 or offsets.shape[0] < 2:
            self.wrong("cu_seqlens", "[N + 1] with N >= 1")
        if B != 1:
            why = "packed sequences lie in one row"
            self.fail(ValueError, self.first, f"has B = {B}", "B = 1 with cu_seqlens", why)
        self.sizes["N"] = offsets.shape[0] - 1

    def number(self, name: str, x: object, *, positive: bool = False, why: str = "") -> None:
        """Check that an option, where it is given, is a finite number."""
        if x is not None and not (is_number(x) and (not positive or x > 0)):  # type: ignore[operator]
            wanted = f"a finite number{' above 0' if positive else ''}"
            self.fail(TypeError, name, f"is {reprlib.repr(x)}", wanted, why)

    def truth(self, name: str, x: object) -> bool:
        """See :func:`truth`."""
        return truth(self.function, name, x)

    def invocation(self, op_id: str, dims: Mapping[str, int], lengths: str, **fields: Any) -> Invocation:
        """Describe the call: its sizes, the letters of those that vary from call to call, and more of its fields."""
        device = self.frontend.device_of(getattr(self.args, self.first))
        given = self.args._asdict()
        return Invocation(
            op_id=op_id,
            framework=self.framework,
            backend=device.backend,
            device=device.kind,
            shared_memory=device.shared_memory,
            dims=dims,
            lengths=frozenset(lengths),
            arrays={name: (dtype, given[name].ndim) for name, dtype in self.dtypes.items()},
            constants=frozenset(self.constants),
            arguments=given,
            traced=device.traced,
            **fields,
        )


@functools.cache
def _parsed(layout: str) -> tuple[tuple[str, ...], list[tuple[int, str]], list[tuple[int, list[str]]]]:
    """A layout's labels, and with their places those that are letters of sizes, and those that are choices."""
    labels = tuple(layout.split(", "))
    letters = [(i, label) for i, label in enumerate(labels) if label.isupper()]
    return labels, letters, [(i, label.split(" or ")) for i, label in enumerate(labels) if " or " in label]


def _kind(x: object) -> str:
    return f"of type {type(x).__module__}.{type(x).__qualname__}" if x is not None else "None"


def truth(function: str, name: str, x: object) -> bool:
    """An option that is True or False, and nothing that only counts as such.

    Raises:
        TypeError: it is something else.
    """
    if type(x).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{function}: {name} is {x!r}; expected True or False")
    return bool(x)
