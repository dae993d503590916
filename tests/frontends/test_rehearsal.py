"""Kernels that are built side by side before a call launches them."""

import threading
import time
import warnings

from keraunos.frontends.rehearsal import Rehearsal, current, was_read


def test_what_fails_in_a_rehearsal_does_not_end_the_call():
    def fail():
        current().build(lambda: 1 / 0)
        raise ValueError

    Rehearsal(fail)
    assert current() is None


def test_filters_of_warnings_stay_as_they_were():
    """Triton changes them for a while in each thread, and one thread's while ends within another's."""
    changed, kept, back, ended = (threading.Event() for _ in range(4))

    def first():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            changed.set()
            was_read()
            assert kept.wait(10)
        back.set()

    def second():
        was_read()
        assert changed.wait(10)
        with warnings.catch_warnings():
            kept.set()
            assert back.wait(10)
        ended.set()

    before = warnings.filters[:]
    Rehearsal(lambda: [current().build(fn) for fn in (first, second)])
    assert ended.is_set()
    assert warnings.filters == before


def test_kernels_are_read_one_by_one_and_those_of_gradients_first():
    """Python reads them, one at a time: the longest builds, of what is launched last, need not wait for others."""
    names, seen, compiled = ("forward", "first", "second"), [], threading.Barrier(6)

    def build(name):
        seen.append(f"reads {name}")
        time.sleep(0.01)
        seen.append(f"has read {name}")
        was_read(lambda: compiled.wait(10))
        compiled.wait(10)

    Rehearsal(lambda: [current().build(build, name) for name in names])
    assert seen == [f"{does} {name}" for name in reversed(names) for does in ("reads", "has read")]
    assert not compiled.broken


def test_a_build_that_reads_nothing_does_not_stop_the_next_one():
    """It was built before, or fails."""
    seen = []
    Rehearsal(lambda: [current().build(fn) for fn in (lambda: 1 / 0, lambda: None, lambda: seen.append("next"))])
    assert seen == ["next"]
