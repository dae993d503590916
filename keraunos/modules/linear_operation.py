"""Answers to the tuner for operations of the linear recurrence: random inputs, and the right results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from keraunos import frontends
from keraunos.frontends.array_types import Array
from keraunos.kernels.linear_attention.contract import Args
from keraunos.kernels.linear_attention.reference import linear_attention
from keraunos.kernels.linear_attention.reference_vjp import linear_attention_vjp
from keraunos.kernels.recurrent.contract import Recurrence, head_counts
from keraunos.ops.arguments import FLOATS
from keraunos.ops.invocation import Config, Invocation
from keraunos.ops.kernel import Kernel

# Of arrays of tokens, the third is the array's own number of heads.
_SHAPES = {
    "query": "BT.K", "key": "BT.K", "value": "BT.V", "g": "BT.K", "beta": "BT.", "g_gamma": "BH",
    "initial_state": "NHKV",
}


def _gate(x: Any) -> Any:
    """A memory of about ten tokens, from normal numbers."""
    return -0.1 * x * x


class LinearOperation(Kernel):
    """An operation of a recurrence with a state.

    Attributes:
        recurrence: its contract.
        pack: the arrays that ``run`` takes, by their names in the recurrence.
        drawn: samples of arrays, from normal numbers; others are normal.
    """

    recurrence: ClassVar[Recurrence]
    pack: Any = Args
    drawn: ClassVar[dict[str, Callable[[Any], Any]]] = {"g": _gate, "g_gamma": _gate}

    def bind(self, *args: Array | None, return_state: bool = True, **options: Any) -> Invocation:
        return self.recurrence.describe(self.pack(*args), **options)

    def unpack(self, args: Any) -> tuple:
        """The inverse of :meth:`pack`."""
        return tuple(args)

    def invocation(self, framework: str, dtype: str = "bfloat16", *, B: int = 1, T: int, H: int, K: int,
                   G: int | None = None, V: int | None = None, N: int | None = None, HQ: int | None = None,
                   HV: int | None = None, HG: int | None = None, gate: str | None = None, state: bool = False,
                   reverse: bool = False) -> Invocation:
        """The description of a call from its sizes, for tuning ahead.

        Args:
            framework: "jax" or "torch".
            dtype: of query, key and value.
            B, T, H, K, V: sizes; H: heads of the recurrence; V defaults to K.
            G, HQ, HV, HG: heads of key, query, value and g; G, HQ and HG default to H, HV to G.
            N: number of packed sequences; None: not packed.
            gate: "vector", "scalar", "constant" or "none"; None: what the operation usually has.
            state: an initial state is given.
            reverse: run from the last token to the first.

        Raises:
            ValueError: a size or name is wrong.
        """
        gates = {"none": (), "constant": (("g_gamma", "float32", 1),)}
        if "g" in self.arguments:
            gates |= {"scalar": (("g", dtype, 3),), "vector": (("g", dtype, 4),)}
        gate = gate or ("vector" if "g" in self.arguments else "constant")
        if gate not in gates or (gate == "none" and "g" not in self.arguments):
            raise ValueError(f"{self.op_id}: gate is {gate!r}; expected one of {sorted(gates)}")
        if dtype not in FLOATS:
            raise ValueError(f"{self.op_id}: dtype is {dtype!r}; expected one of {list(FLOATS)}")
        G, V = G or H, V or K
        dims = {"B": B, "T": T, "H": H, "G": G, "K": K, "V": V, "N": N or B}
        own = {"HQ": (HQ, H), "HV": (HV, G), "HG": (HG, H)}
        dims |= {name: n for name, (n, usual) in own.items() if n not in (None, usual)}
        given = dict.fromkeys(("query", "key", "value"), (dtype, 4))
        given |= {name: (of, ndim) for name, of, ndim in gates[gate]}
        heads = {n for name, n in head_counts(dims).items() if name in given}
        if min(dims.values()) < 1 or any(H % n for n in heads) or H not in heads or (N is not None and B != 1):
            raise ValueError(
                f"{self.op_id}: sizes {' '.join(f'{name}={n}' for name, n in dims.items())}; expected at least 1, "
                "each of HQ, HV, HG and G a divisor of H, one of them H itself, and B = 1 with N"
            )
        given |= {"initial_state": ("float32", 4)} if state else {}
        given |= {"cu_seqlens": ("int32", 1)} if N is not None else {}
        device = frontends.get(framework).default_device()
        constants = frozenset(("g_gamma",) if gate == "constant" else ())
        arrays = {name: given[name] for name in Args._fields if name in given}
        return Invocation(self.op_id, framework, device.backend, device.kind, dims, frozenset("BTN"), arrays,
                          {"reverse": reverse}, constants, shared_memory=device.shared_memory)

    def checker(self, *args: Array | None, whole: bool = True, **kwargs: Any) -> Callable | None:
        """See :meth:`Kernel.checker`; not ``whole``: the tokens are those of one of several shards of the sequences."""
        check, pack = self.recurrence.checker(self.pack(*args), whole), self.pack
        return check and (lambda *args: check(pack(*args)))

    def arranged(self, *args: Array | None, state_v_first: bool = False,
                 **options: Any) -> tuple[Callable, dict[str, Any]]:
        """See :meth:`Kernel.arranged`; ``state_v_first``: states are ``[N, H, V, K]``."""
        if not state_v_first:
            return self.pack, options

        def packed(*args: Array | None) -> Any:
            given = self.pack(*args)
            return given._replace(initial_state=turned(given.initial_state))

        return packed, options

    def prepare(self, *args: Array | None, cfg: Config, state_v_first: bool = False, **options: Any) -> Callable:
        """See :meth:`Kernel.prepare`."""
        run = super().prepare(*args, cfg=cfg, state_v_first=state_v_first, **options)
        if not state_v_first:
            return run

        def turned_back(*args: Array | None) -> tuple[Array, Array | None]:
            output, state = run(*args)
            return output, turned(state)

        return turned_back

    def sample(self, inv: Invocation, seed: int) -> tuple[tuple, dict]:
        """Random arguments of a call's shapes and dtypes, as ``drawn`` says; packed sequences have random lengths."""
        measure = frontends.get(f"{inv.framework}.measure")
        rng = np.random.default_rng(seed)
        made, heads = {}, head_counts(inv.dims)
        for i, (name, (dtype, ndim)) in enumerate(inv.arrays.items()):
            if name == "cu_seqlens":
                cuts = np.sort(rng.integers(0, inv.dims["T"] + 1, inv.dims["N"] - 1))
                made[name] = measure.array(np.array([0, *cuts, inv.dims["T"]]), dtype, inv.backend)
                continue
            letters = _SHAPES[name][-ndim:] if name == "g_gamma" else _SHAPES[name][:ndim]
            shape, draw = tuple(heads[name] if d == "." else inv.dims[d] for d in letters), self.drawn.get(name)
            if name in inv.constants:
                x = rng.normal(size=shape).astype(dtype)
            else:
                x = measure.normal(shape, dtype, 100 * seed + i, inv.backend)
            made[name] = draw(x) if draw else x
        return self.unpack(self.recurrence.args(**made)), dict(inv.options)

    def check_calls(self, inv: Invocation, cfgs: Sequence[Config]) -> list[Invocation]:
        """Two chunks of the longest candidate, so several of the others; and a length that no chunk divides."""
        chunk = max([cfg.block_q or 64 for cfg in cfgs])
        # Two heads, or one of an array whose heads are shared.
        H, own = inv.dims["H"], [name for name in ("G", "HQ", "HV", "HG") if name in inv.dims]
        most = min(H, 2)
        heads = {name: most if inv.dims[name] == H else 1 for name in own}
        B, N = min(inv.dims["B"], 2), min(inv.dims["N"], 3)
        small = {**inv.dims, "B": B, "N": N if "cu_seqlens" in inv.arrays else B, "H": most, **heads}
        return [replace(inv, dims={**small, "T": T}) for T in (2 * chunk, chunk + chunk // 2 + 1)]

    def reference(self, args: Sequence[np.ndarray | None], kwargs: dict, dtype: type) -> tuple:
        """Output and final state."""
        return linear_attention(*self.pack(*args), **kwargs, dtype=dtype)

    def reference_vjp(self, args: Sequence[np.ndarray | None], kwargs: dict, cotangents: Sequence[np.ndarray],
                      dtype: type) -> tuple:
        """A gradient for each float argument."""
        found = linear_attention_vjp(*self.pack(*args), *cotangents, **kwargs, dtype=dtype)
        return self.unpack(Args(*found))  # none for the offsets, the last argument


def turned(state: Array | None) -> Array | None:
    """States ``[N, H, V, K]`` as ``[N, H, K, V]``, or the other way."""
    return state if state is None else state.mT
