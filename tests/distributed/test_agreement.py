"""Errors of ranks that were called with different arguments, or miss one of them: the same everywhere, in time."""

import os
import threading
import time

import pytest

from tests.distributed.worlds import World, run_world, worlds

pytest.importorskip("torch.distributed")


def outcome(fn):
    """``(name of the error, message)``, or None."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def calls(rank, size):
    """One call after the other, of which some are wrong on one rank."""
    import torch
    import torch.distributed as dist

    from keraunos.distributed import agreement

    def check(**what):
        return outcome(lambda: agreement.check(None, op="attention", **what))

    def refused(text):
        def run():
            with agreement.arguments(None):
                if text:
                    raise TypeError(text)
            agreement.check(None, op="attention", shape=(9,))

        return outcome(run)

    last = size - 1
    found = [check(shape=(2, 64), dtype=torch.float32) for _ in range(3)]
    found.append(check(shape=(2, 48 if rank == last else 64), dtype=torch.float64))
    found.append(check(shape=(2, 64), dtype=torch.float32))
    found.append(refused("query is wrong" if rank == last else None))
    found.append(refused("query is wrong"))
    found.append(check(shape=(5,)))
    # Late, but not too late.
    time.sleep(0.3 * (rank == 0))
    found.append(check(shape=(6,)))
    # An old description on most ranks, a new one on the last: the others are in a collective that it never joins.
    found.append(check(shape=(7,) if rank == last else (6,)))
    if found[-1] is None:

        def collective():
            with agreement.exchange(None):
                dist.all_reduce(torch.ones(3))

        found.append(outcome(collective))
    return found


def test_every_rank_raises_the_same():
    size, last, others = 3, 2, "ranks 0, 1"
    ranks = run_world(calls, size, timeout=2)
    assert ranks[0][:3] == [None] * 3
    different = (
        "DisagreementError",
        (f"keraunos.distributed: the ranks differ: shape is (2, 64) on {others}, (2, 48) on rank {last}"),
    )
    assert [found[3] for found in ranks] == [different] * size
    assert ranks[0][4] is None
    own = "DisagreementError", f"keraunos.distributed: rank {last}: query is wrong"
    assert [found[5] for found in ranks] == [own] * size
    assert [found[6] for found in ranks] == [("TypeError", "query is wrong")] * size
    assert [found[7:9] for found in ranks] == [[None, None]] * size
    newer = (
        "DisagreementError",
        (f"keraunos.distributed: the ranks differ: shape is (6,) on {others}, (7,) on rank {last}"),
    )
    assert [found[-1] for found in ranks] == [newer] * size


def late(rank, size):
    """Errors of ranks that miss the last one in an exchange on the device: after a call in which all differed, and
    after one in which only that one found out."""
    import torch.distributed as dist

    from keraunos.distributed import agreement

    def raising():
        raise agreement.late(None, [size - 1])

    found = []
    for theirs, its in ((1, 1), (2, 3), (1, 1), (1, 4)):
        checked = outcome(lambda theirs=theirs, its=its: agreement.check(None, x=its if rank == size - 1 else theirs))
        dist.barrier()
        found.append((checked, outcome(raising)))
    return found


@pytest.fixture(scope="module")
def three():
    with worlds(timeout=5) as world:
        yield world(3)


def test_a_rank_that_an_exchange_misses_is_named_or_what_it_raised_is(three):
    found = three.run(late)[0]
    missed = "RankFailedError", "keraunos.distributed: rank 2 did not come to an exchange within 5 s"
    differ = "DisagreementError", "keraunos.distributed: the ranks differ: x is {} on ranks 0, 1, {} on rank 2"
    assert found[0] == (None, missed)
    assert found[1] == ((differ[0], differ[1].format(2, 3)), missed)
    assert found[2] == (None, missed)
    assert found[3] == (None, (differ[0], differ[1].format(1, 4)))


def in_a_part_of_the_world(rank, size):
    """The last two ranks are a group of their own."""
    import torch.distributed as dist

    from keraunos.distributed import agreement

    group = dist.new_group([size - 2, size - 1])
    return outcome(lambda: agreement.check(group, op="gla", heads=rank))


def test_ranks_have_the_names_of_the_whole_world(three):
    outside, *inside = three.run(in_a_part_of_the_world)
    assert (
        inside
        == [("DisagreementError", "keraunos.distributed: the ranks differ: heads is 1 on rank 1, 2 on rank 2")] * 2
    )
    assert outside[0] == "ValueError"
    assert "that this process is in" in outside[1]


def leaving(rank, size):
    """The last rank dies before the others exchange anything, or never comes."""
    import torch
    import torch.distributed as dist

    from keraunos.distributed import agreement

    def collective():
        agreement.check(None, op="attention", shape=(1,))
        if rank == size - 1:
            os._exit(0)
        with agreement.exchange(None):
            dist.all_reduce(torch.ones(3))

    def missing():
        agreement.check(None, op="gla", shape=(2,))

    start = time.monotonic()
    found = outcome(collective), outcome(missing)
    return *found, time.monotonic() - start


def test_a_rank_that_dies_is_named():
    size = 3
    ranks = run_world(leaving, size, timeout=2)
    assert ranks[-1] is None
    for died, missing, seconds in ranks[:-1]:
        assert died[0] == missing[0] == "RankFailedError"
        assert f"rank {size - 1} left the exchange" in died[1]
        assert f"rank {size - 1} did not come to gla within 2 s" in missing[1]
        assert seconds < 30
    assert len({found[:2] for found in ranks[:-1]}) == 1


def silent(rank, size, seconds):
    time.sleep(seconds if rank else 0)


def test_a_world_that_hangs_is_ended():
    with World(2, timeout=2) as world:
        # Processes take seconds to begin.
        world.run(silent, 0)
        with pytest.raises(TimeoutError, match="rank 1 does not answer"):
            world.run(silent, 1000, patience=2)


def lingering(rank, size):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return rank


def test_a_rank_that_has_answered_and_does_not_end_is_ended():
    assert run_world(lingering, 2, timeout=2) == [0, 1]


def test_without_a_group():
    from keraunos.distributed import agreement

    with pytest.raises(ValueError, match="init_process_group"):
        agreement.check(None, op="attention")


def test_an_axis_that_is_not_there():
    jax = pytest.importorskip("jax")
    from keraunos.distributed import agreement

    with pytest.raises(ValueError, match="axis_name is 'tokens', no axis of a shard_map"):
        agreement.axis_size("attention", "tokens")
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("seq")
    sizes = []

    def f(x):
        sizes.append(agreement.axis_size("attention", "seq"))
        return x

    jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)(jax.numpy.ones(4))
    assert sizes == [1]
