"""Do all ranks mean the same call? Asked before a call's first exchange, so that a mismatch raises and nothing hangs.

In PyTorch every rank numbers its calls of a group. A call whose description (shapes, dtypes, options) was agreed on
before only posts its number to the group's store, which takes microseconds and waits for nobody. Any other description
is written to the store, and the rank waits for those of the others, at most the group's timeout.

Which descriptions are agreed on is the same on every rank, since agreeing takes all of them. So, if some ranks bring a
new description to a call and others an old one, they differ. The first find the posts of the others, raise, and leave
their verdict in the store. The others are in a collective that cannot succeed; when the backend gives it up, at the
latest at its timeout, :func:`exchange` raises the verdict in place of the backend's error. If there is none, it names
the ranks of which nothing comes any more. NCCL's collectives return before they are done: there the watchdog ends the
processes, and the verdict is in the message of those that brought the new description.

In JAX one program runs everywhere, and only the mesh can be wrong: :func:`axis_size`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from torch.distributed import ProcessGroup

# Seconds between two looks at the store: at first, and at most.
_SHORTEST, _LONGEST = 0.0005, 0.02
# Seconds, the timeout's at most, in which ranks say that an exchange failed there, after the backend's own timeout.
_GRACE = 10
# Calls back to which an exchange may belong that is found to have failed.
_RECENT = 100


class DisagreementError(ValueError):
    """The ranks of a group called with different arguments; the message, the same on all ranks, says which."""


class RankFailedError(RuntimeError):
    """Ranks of a group are missing, or died in the middle of a call; the message names them."""


def check(group: ProcessGroup | None, **what: Hashable) -> None:
    """Make sure that all ranks of a group are at the same call.

    Args:
        group: a ``torch.distributed.ProcessGroup``; None: the default one.
        what: what has to be the same everywhere: hashable values whose texts say enough.

    Raises:
        DisagreementError: some ranks bring something else.
        RankFailedError: some ranks do not come within the group's timeout.
        ValueError: there is no such group, or this process is not in it.
    """
    checker(group, **what)()


def checker(group: ProcessGroup | None, **what: Hashable) -> Callable[[], None]:
    """:func:`check`, for calls that are alike."""
    ledger, signature = _ledger(group), tuple(what.items())
    return functools.partial(ledger.check, signature) if ledger.size > 1 else lambda: None


@contextlib.contextmanager
def arguments(group: ProcessGroup | None) -> Iterator[None]:
    """Around the checks of a rank's own arguments: if they are refused, the other ranks raise too."""
    try:
        yield
    except (TypeError, ValueError) as error:
        check(group, refused=str(error))
        # All ranks say the same.
        raise


def timeout(group: ProcessGroup | None) -> float:
    """Seconds that ranks wait for each other."""
    return _ledger(group).timeout.total_seconds()


def late(group: ProcessGroup | None, ranks: list[int]) -> Exception:
    """The error where an exchange has not seen the ranks of these numbers within the timeout."""
    return _ledger(group).late(ranks)


@contextlib.contextmanager
def exchange(group: ProcessGroup | None) -> Iterator[None]:
    """Around a call's collectives: if they fail, the error says which ranks differ or are missing.

    Raises:
        DisagreementError: some ranks found that they were called with other arguments.
        RankFailedError: some ranks are missing.
    """
    try:
        yield
    except RuntimeError as error:
        raise _ledger(group).failure(error) from error


class _Ledger:
    """The calls of a group, as one rank knows them."""

    def __init__(self, group: ProcessGroup):
        import torch.distributed as dist

        self.ranks = dist.get_process_group_ranks(group)
        self.size, self.me = len(self.ranks), dist.get_rank(group)
        self.store = dist.PrefixStore("keraunos", group.get_group_store())
        backends = [group._get_backend(device) for device in group._device_types]
        self.timeout = max((backend.options._timeout for backend in backends), default=timedelta(minutes=30))
        self.calls = 0
        self.agreed: dict[tuple, int] = {}  # descriptions and their numbers, in the same order on all ranks
        self.texts: list[dict[str, str]] = []
        self.last = ""  # the key of this rank's last description
        self.reported = 0  # the last call of which this rank has said what was wrong

    def check(self, signature: tuple[tuple[str, Any], ...]) -> None:
        """See :func:`check`."""
        self.calls += 1
        number = self.agreed.get(signature)
        if number is None:
            number = self.agree({name: str(x) for name, x in signature})
            if signature[0][0] == "refused":
                return
            self.agreed[signature] = number
        self.store.set(f"at/{self.me}", f"{self.calls} {number}")

    def agree(self, own: dict[str, str]) -> int:
        """Exchange descriptions; the number of this one."""
        self.store.set(self.key(self.me), json.dumps(own))
        found: dict[int, dict[str, str] | None] = {self.me: own}
        deadline, pause = time.monotonic() + self.timeout.total_seconds(), _SHORTEST
        while len(found) < self.size and time.monotonic() < deadline:
            for rank in set(range(self.size)) - set(found):
                # In this order: a rank that is at this call, or past it, has posted its description if it has one.
                at, number = self.place(rank)
                if self.store.check([self.key(rank)]):
                    found[rank] = json.loads(self.store.get(self.key(rank)))
                elif at >= self.calls:
                    found[rank] = self.texts[number] if at == self.calls else None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        if len(found) < self.size:
            silent = sorted(set(range(self.size)) - set(found))
            call, seconds = own.get("op", "this call"), self.timeout.total_seconds()
            raise self.verdict(RankFailedError, f"{self.names(silent)} did not come to {call} within {seconds:g} s")
        if any(x != own for x in found.values()):
            raise self.verdict(DisagreementError, self.difference(found))
        if self.store.check([f"{self.calls}/verdict"]):
            # Of a rank that gave up waiting just before the last one came.
            self.reported = self.calls
            raise _error(self.store.get(f"{self.calls}/verdict"))
        # All have read what came before this.
        if self.last:
            self.store.delete_key(self.last)
        self.last = self.key(self.me)
        self.texts.append(own)
        return len(self.texts) - 1

    def key(self, rank: int) -> str:
        """Where a rank's description of this call is."""
        return f"{self.calls}/{rank}"

    def place(self, rank: int) -> tuple[int, int]:
        """The last call of a rank that was agreed on, and the number of its description."""
        if not self.store.check([f"at/{rank}"]):
            return 0, 0
        at, number = self.store.get(f"at/{rank}").split()
        return int(at), int(number)

    def names(self, ranks: list[int]) -> str:
        """The ranks in words, by their global numbers."""
        ranks = sorted(self.ranks[rank] for rank in ranks)
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    def verdict(self, error: type[Exception], message: str) -> Exception:
        """The error of the first rank that had one for this call."""
        self.reported = self.calls
        own = f"{error.__name__} keraunos.distributed: {message}"
        return _error(self.store.compare_set(f"{self.calls}/verdict", "", own))

    def difference(self, found: dict[int, dict[str, str] | None]) -> str:
        """The difference between the ranks' descriptions; None: another call, of which nothing is known."""
        refused: dict[str, list[int]] = {}
        for rank, x in sorted(found.items()):
            if x and "refused" in x:
                refused.setdefault(x["refused"], []).append(rank)
        if refused:
            return "; ".join(f"{self.names(ranks)}: {text}" for text, ranks in refused.items())
        ahead = [rank for rank, x in found.items() if x is None]
        known = {rank: x for rank, x in sorted(found.items()) if x is not None}
        parts = [f"{self.names(ahead)} went on with a call agreed on before"] if ahead else []
        for name in dict.fromkeys(name for x in known.values() for name in x):
            values: dict[str, list[int]] = {}
            for rank, x in known.items():
                values.setdefault(x.get(name, "absent"), []).append(rank)
            if len(values) > 1:
                parts.append(f"{name} is " + ", ".join(f"{v} on {self.names(ranks)}" for v, ranks in values.items()))
        return f"the ranks differ: {'; '.join(parts)}"

    def late(self, ranks: list[int]) -> Exception:
        """The error for ranks that did not come to an exchange: those that found a mismatch never do."""
        for call in range(self.calls, max(self.calls - _RECENT, self.reported), -1):
            if self.store.check([f"{call}/verdict"]):
                return _error(self.store.get(f"{call}/verdict"))
        seconds = self.timeout.total_seconds()
        return RankFailedError(
            f"keraunos.distributed: {self.names(ranks)} did not come to an exchange within {seconds:g} s"
        )

    def failure(self, error: RuntimeError) -> Exception:
        """The error for a failed collective. Living ranks fail too, at the latest at the timeout, and say so."""
        failed, verdict = f"{self.calls}/failed/{{}}".format, f"{self.calls}/verdict"
        try:
            self.store.set(failed(self.me), "1")
            silent = set(range(self.size))
            seconds = self.timeout.total_seconds()
            deadline = time.monotonic() + seconds + min(seconds, _GRACE)
            while not self.store.check([verdict]):
                silent -= {rank for rank in silent if self.store.check([failed(rank)])}
                if not silent:
                    return self.verdict(RankFailedError, f"the exchange failed on all ranks: {error}")
                if time.monotonic() > deadline:
                    return self.verdict(RankFailedError, f"{self.names(sorted(silent))} left the exchange: {error}")
                time.sleep(_LONGEST)
            return _error(self.store.get(verdict))
        except RuntimeError:
            return RankFailedError(f"keraunos.distributed: the rank that keeps the group's store is gone: {error}")


def _error(verdict: bytes) -> Exception:
    name, _, message = verdict.decode().partition(" ")
    return {kind.__name__: kind for kind in (DisagreementError, RankFailedError)}[name](message)


_ledgers: weakref.WeakKeyDictionary[Any, _Ledger] = weakref.WeakKeyDictionary()


def _ledger(group: ProcessGroup | None) -> _Ledger:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("keraunos.distributed: no process group; call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"keraunos.distributed: group is {group!r}; expected a ProcessGroup that this process is in")
    found = _ledgers.get(group)
    if found is None:
        found = _ledgers[group] = _Ledger(group)
    return found


def axis_size(op: str, axis_name: Hashable) -> int:
    """The number of shards along a mesh axis, inside ``shard_map``.

    Raises:
        ValueError: the call is not inside a ``shard_map`` over that axis.
    """
    import jax

    try:
        return int(jax.lax.axis_size(axis_name))
    except NameError:
        raise ValueError(f"{op}: axis_name is {axis_name!r}, no axis of a shard_map that this call is in") from None


def mesh_size(op: str, mesh: Mesh, axis: Hashable) -> int:
    """The number of shards along an axis, or several, of a mesh.

    Raises:
        ValueError: the mesh has no such axis.
    """
    names = axis if isinstance(axis, tuple) else (axis,)
    if missing := [name for name in names if name not in mesh.shape]:
        raise ValueError(f"{op}: the mesh has axes {tuple(mesh.shape)}; expected {missing[0]!r} among them")
    return math.prod(mesh.shape[name] for name in names)
