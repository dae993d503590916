"""PyTorch: ranks whose GPUs are in one host write states straight into each other's memory.

A collective of NCCL's takes tens of microseconds, whatever it moves; states of a few megabytes take less. Here it is
one kernel (:mod:`keraunos.distributed.torch.exchange`), on memory that PyTorch maps into the processes of all ranks.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import socket
import warnings
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from keraunos import frontends
from keraunos.distributed import agreement
from keraunos.frontends import interpreter
from keraunos.frontends.torch.launch import fixed, recorded, remembered

# Values of a vector at most: each rank has room for two of every rank's.
_VALUES = 1 << 22
# Values that a program has at a time, and its warps.
_BLOCK, _WARPS = 2048, 8
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# Of the driver's attributes of two devices: one can do atomic operations in the memory of the other.
_ATOMIC = 3

_log = logging.getLogger("keraunos")


class _Memory(NamedTuple):
    """The memory that ranks share, as :mod:`keraunos.distributed.torch.exchange` wants it."""

    own: torch.Tensor
    addresses: torch.Tensor
    counts: torch.Tensor
    seen: list[torch.Tensor]  # that of all ranks


class Peers:
    """The memory that the ranks of a group share.

    Attributes:
        reason: why they share none; empty if they do. The same on all ranks, which find it out together.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.store = dist.PrefixStore("keraunos/peers", group.get_group_store())
        self.asked = 0
        self.memory: dict[int, _Memory | None] = {}  # by the room for a vector; None: there is none to share
        self.stream: Any = None
        # What the device writes, and the host looks at without waiting for it.
        self.late = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.patience = agreement.timeout(group)
        self.gather = functools.cache(lambda right: remembered(functools.partial(self._gather, right)))
        every = self._all(_facts(device))
        hosts, gpus, programs, refusals = zip(*every, strict=True)
        self.programs = min(programs)
        reason = "the ranks are on several hosts" if len({*hosts}) > 1 else _unreachable(device, gpus)
        self.reason = self._agree("KERAUNOS_PEERS is 0" if any(refusals) else reason)
        _log.info("states of %d ranks go %s", self.size, f"through NCCL: {self.reason}" if self.reason else "directly")

    def _all(self, own: Any) -> list[Any]:
        """Gather an object from every rank."""
        self.asked += 1
        self.store.set(f"{self.asked}/{self.rank}", json.dumps(own))
        return [json.loads(self.store.get(f"{self.asked}/{rank}")) for rank in range(self.size)]

    def _agree(self, reason: str) -> str:
        """One rank's reason is everybody's."""
        return next(filter(None, self._all(reason)), "")

    def place(self, n: int) -> int:
        """The room for the values of a vector that a program has: vectors of like lengths share memory."""
        return 1 << (max(-(-n // self.programs), _BLOCK) - 1).bit_length()

    def ready(self, n: int) -> bool:
        """Whether vectors of so many values go this way, for which memory is made; all ranks ask together."""
        if self.reason or n > _VALUES:
            return False
        place = self.place(n)
        if place not in self.memory:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # It must not go another way: ranks to which this call is no new one do not ask.
                raise RuntimeError("keraunos.distributed: make such a call once before one that a CUDA graph captures")
            self.memory[place] = self._share(place)
        return self.memory[place] is not None

    def _share(self, place: int) -> _Memory | None:
        """Memory in which each program has that much room for a vector."""
        numbers, reason = -(-self.size * self.programs // 16) * 16, ""
        try:
            own, seen = _shared(numbers + 2 * self.size * self.programs * place, self.device, self.group)
            addresses = torch.tensor([x.data_ptr() for x in seen], dtype=torch.int64).to(self.device)
            counts = torch.zeros(2, self.programs, dtype=torch.int32, device=self.device)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            memory = _Memory(own, addresses, counts, seen)
        except Exception as error:  # whatever it is, the others have to hear of it
            reason = f"rank {self.rank} cannot share memory: {error}"
        # Nobody writes before all are ready.
        if reason := self._agree(reason):
            warnings.warn(f"keraunos.distributed: states go through NCCL: {reason}", stacklevel=2)
            return None
        return memory

    def _gather(self, right: bool, flat: list[torch.Tensor]) -> tuple[torch.Tensor]:
        """The ranks' vectors ``[size, n]``, of those before this one, or after it if not ``right``."""
        from keraunos.distributed.torch.exchange import exchange_kernel

        (x,), n = flat, len(flat[0])
        place, memory = self.place(n), cast(Any, self.memory[self.place(n)])
        own, addresses, counts = map(fixed, memory[:3])
        recorded(self._turn, [x], [])
        part, patience = -(-n // (16 * self.programs)) * 16, int(self.patience * 1e9)
        inputs = dict(x=x, own=own, peers=addresses, counts=counts, late=fixed(self.late), n=n, part=part, place=place,
                      patience=patience)
        constants = dict(SIZE=self.size, RANKS=1 << (self.size - 1).bit_length(), RANK=self.rank,
                         PROGRAMS=self.programs, BLOCK=_BLOCK, RIGHT=right, TIMED=not interpreter.ON)
        return frontends.launch(exchange_kernel, (self.programs,), inputs, dict(made=((self.size, n), "float32")),
                                constants, num_warps=_WARPS, num_stages=1)

    def _turn(self, x: torch.Tensor) -> None:
        """Exchanges come one after the other on the device, whatever their streams; none after one that failed."""
        stream: Any = torch.cuda.current_stream(x.device) if x.is_cuda else None
        # While a graph is captured nothing runs: its replays are in the order of who replays it.
        if stream != self.stream and not torch.cuda.is_current_stream_capturing():
            if self.stream is not None:
                stream.wait_stream(self.stream)
            self.stream = stream
        if ranks := int(self.late.item()):
            raise agreement.late(self.group, [rank for rank in range(self.size) if ranks >> rank & 1])


def _facts(device: torch.device) -> tuple[str, str, int, bool]:
    """The facts that others need of a rank: its host, its GPU, the programs that run there at once, its refusal."""
    properties, boot = torch.cuda.get_device_properties(device), Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
    return host, str(properties.uuid), properties.multi_processor_count, _refused()


def _refused() -> bool:
    """Whether the user wants no memory to be shared."""
    return _refuses(os.environ.get("KERAUNOS_PEERS", ""))


@functools.cache
def _refuses(value: str) -> bool:
    """Whether it is 0; others than 0 and 1 get a warning, once. An error on one rank would leave the others waiting."""
    if value not in ("", "0", "1"):
        _log.warning("KERAUNOS_PEERS is %r; expected 0 or 1: it counts as not set", value)
    return value == "0"


def _without_atomics(device: int, others: set[int]) -> str:
    """Why a GPU cannot write, and count, in the memory of others, all by CUDA's numbers; empty if it can."""
    driver, able = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    for other in others - {device}:
        if driver.cuDeviceGetP2PAttribute(ctypes.byref(able), _ATOMIC, device, other) or not able.value:
            return "the GPUs have no atomic operations in each other's memory"
    return ""


def _unreachable(device: torch.device, gpus: tuple[str, ...]) -> str:
    """Why the ranks' GPUs cannot be written from this one; empty if they can."""
    if torch.version.hip is not None:
        return "the GPUs are not NVIDIA's"
    if len({*gpus}) < len(gpus):
        return "ranks share a GPU"
    found = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if unseen := {*gpus} - {*found}:
        return f"a rank does not see {len(unseen)} of the {len(gpus)} GPUs"
    return _without_atomics(device.index, {found[gpu] for gpu in gpus})


def _shared(values: int, device: torch.device, group: dist.ProcessGroup) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Zeros that the other ranks can write, and theirs."""
    from torch.distributed import _symmetric_memory

    own = _symmetric_memory.empty(values, dtype=torch.float32, device=device).zero_()
    # PyTorch would make it for multicast, too, which is not wanted here, and fails on some hosts.
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        handle = _symmetric_memory.rendezvous(own, group)
    finally:
        del os.environ[_NO_MULTICAST]
        if before is not None:
            os.environ[_NO_MULTICAST] = before
    return own, [handle.get_buffer(rank, own.shape, own.dtype) for rank in range(handle.world_size)]


@functools.cache
def peers(group: dist.ProcessGroup, device: torch.device) -> Peers:
    """The memory that the ranks of a group share on ``device``; all ranks ask together."""
    return Peers(group, device)
