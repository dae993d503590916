"""Kernels that are built side by side before a call launches them."""

import threading
import warnings

from keraunos.frontends.rehearsal import Rehearsal, current


def test_what_fails_in_a_rehearsal_does_not_end_the_call():
    def fail():
        current().build(lambda: 1 / 0)
        raise ValueError

    Rehearsal(fail)
    assert current() is None


def test_filters_of_warnings_stay_as_they_were():
    """Triton changes them for a while in each thread, and one thread's while ends within another's."""
    changed, kept, back = threading.Event(), threading.Event(), threading.Event()

    def first():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            changed.set()
            kept.wait(10)
        back.set()

    def second():
        changed.wait(10)
        with warnings.catch_warnings():
            kept.set()
            back.wait(10)

    before = warnings.filters[:]
    Rehearsal(lambda: [current().build(fn) for fn in (first, second)])
    assert warnings.filters == before
