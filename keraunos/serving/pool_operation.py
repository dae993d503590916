"""The operations behind the serving functions, as the executor and the registry know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keraunos.kernels.state_pool import contract
from keraunos.ops.invocation import Invocation
from keraunos.ops.kernel import Kernel


class PoolOperation(Kernel):
    """One of ``"decode"``, ``"verify"``, ``"commit"``, ``"prefill"``: returns ``(output or None, pool or None)``.

    Prompts of the delta rule are an operation of their own, ``"delta_prefill"``.
    """

    arguments = contract.Args._fields

    def __init__(self, op_id: str):
        self.op_id = op_id  # type: ignore[misc]

    def bind(self, *args: Any, **options: Any) -> Invocation:
        """Check the arguments, in the order of :class:`contract.Args`, and describe the call."""
        return contract.describe(self.op_id, contract.Args(*args), **options)

    def checker(self, *args: Any, **options: Any) -> Callable | None:
        """See :meth:`Kernel.checker`."""
        check = contract.checker(self.op_id, contract.Args(*args))
        return check and (lambda *args: check(contract.Args(*args)))

    def arranged(self, *args: Any, **options: Any) -> tuple[Callable, dict[str, Any]]:
        """See :meth:`Kernel.arranged`."""
        return contract.Args, options


DECODE, VERIFY, COMMIT, PREFILL, DELTA_PREFILL = map(
    PoolOperation, ("decode", "verify", "commit", "prefill", "delta_prefill")
)
