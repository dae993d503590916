"""Ranks that write into each other's memory: here processes, and the memory is files that all have mapped."""

import random
import time
import warnings

import pytest

pytest.importorskip("torch")

import torch

from tests.distributed.worlds import run_world, worlds
from tests.linear_attention.cases import GPU, INTERPRETED

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: test_gpu.py has the exchange on GPUs")
PROGRAMS = 3


def over_files(folder, rank, size):
    """Peers as if each process had a GPU of one host."""
    import torch.distributed as dist

    from keraunos.distributed.torch import peers as torch_peers

    made = []

    def shared(values, device, group):
        made.append(values)
        paths = [f"{folder}/{len(made)}-{r}" for r in range(size)]
        own = map_file(paths[rank], values)
        dist.barrier()
        seen = [own if r == rank else map_file(path, values) for r, path in enumerate(paths)]
        return own, seen

    def map_file(path, values):
        return torch.from_file(str(path), shared=True, size=values, dtype=torch.float32)

    torch_peers._facts = lambda device: ("host", str(rank), PROGRAMS + rank, False)
    torch_peers._unreachable = lambda device, gpus: ""
    torch_peers._shared = shared
    torch_peers._BLOCK = 16
    return torch_peers.Peers(dist.group.WORLD, torch.device("cpu"))


def exchanges(rank, size, folder):
    """How often what came was wrong: both ways, of many lengths, by ranks that are late."""
    import tests.triton.interpreter  # noqa: F401

    peers = over_files(folder, rank, size)
    same, own = random.Random(0), random.Random(rank)
    wrong = 0
    for i, n in enumerate([40, 90, 700, *same.choices([5, 40, 90, 700], k=36)]):
        right = same.random() < 0.5
        assert peers.ready(n)

        def vector(r, n=n, i=i):
            return torch.arange(n, dtype=torch.float32) + 1e3 * r + 1e4 * i

        if own.random() < 0.1:
            time.sleep(0.02)
        made = peers.gather(right)([vector(rank)])[0]
        wrong += sum(not torch.equal(made[r], vector(r)) for r in (range(rank) if right else range(rank + 1, size)))
    return wrong, peers.programs, len(peers.memory)


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter: tests/triton/test_interpreter.py")
def test_what_comes_is_what_was_sent_in_this_exchange(tmp_path):
    # Programs are those that the smallest GPU has; 40, 90 and 700 values need more and more memory.
    assert run_world(exchanges, 3, tmp_path) == [(0, PROGRAMS, 3)] * 3


def reasons(rank, size, facts, failing):
    """Why ranks with such facts share no memory, and what warns of it."""
    import torch.distributed as dist

    from keraunos.distributed.torch import peers as torch_peers

    def shared(values, device, group):
        if rank in failing:
            raise OSError("not permitted")
        return torch.zeros(values), [torch.zeros(values)] * size

    torch_peers._facts = lambda device: facts[rank]
    torch_peers._shared = shared
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unreachable = torch_peers._unreachable
        torch_peers._unreachable = lambda device, gpus: unreachable(device, gpus) if len({*gpus}) < size else ""
        # Ranks ask each other once in a group.
        found = torch_peers.Peers(dist.new_group(), torch.device("cpu"))
        ready = found.ready(10), found.ready(torch_peers._VALUES + 1)
    return found.reason, ready, [str(x.message) for x in caught]


def test_what_the_user_wants_is_0_or_1(monkeypatch, caplog):
    from keraunos.distributed.torch import peers

    peers._refuses.cache_clear()
    for value, found in (("0", True), ("1", False), ("off", False), ("off", False)):
        monkeypatch.setenv("KERAUNOS_PEERS", value)
        assert peers._refused() == found
    monkeypatch.delenv("KERAUNOS_PEERS")
    assert not peers._refused()
    assert [x.getMessage() for x in caplog.records] == [
        "KERAUNOS_PEERS is 'off'; expected 0 or 1: it counts as not set"
    ]


@pytest.fixture(scope="module")
def pair():
    with worlds() as world:
        yield world(2)


@pytest.mark.parametrize(("facts", "failing", "reason"), [
    ([("a", "0", 8, False), ("b", "1", 8, False)], (), "the ranks are on several hosts"),
    ([("a", "0", 8, False), ("a", "0", 8, False)], (), "ranks share a GPU"),
    ([("a", "0", 8, False), ("a", "1", 8, True)], (), "KERAUNOS_PEERS is 0"),
    ([("a", "0", 8, False), ("a", "1", 8, False)], (1,), "rank 1 cannot share memory: not permitted"),
    ([("a", "0", 8, False), ("a", "1", 8, False)], (), ""),
], ids=["hosts", "gpu", "refused", "failed", "able"])
def test_all_ranks_agree_on_the_way(pair, facts, failing, reason):
    for found, ready, warned in pair.run(reasons, facts, failing):
        assert found == ("" if failing else reason)
        assert ready == (not reason, False)
        assert warned == ([f"keraunos.distributed: states go through NCCL: {reason}"] if failing else [])
