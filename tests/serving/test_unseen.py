"""Values of no request reach no result, whatever they are: padding, other slots, states of fresh requests."""

import dataclasses

import numpy as np
import pytest

from tests.serving.cases import PLATFORMS, Case, require, runner

pytestmark = [
    pytest.mark.parametrize(("platform", "framework"), PLATFORMS),
    # Triton's interpreter compares NaN.
    pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value", "ignore:overflow"),
]

PREFILL = Case(op="prefill", lengths=(70, 5, 0, 65), slots=(3, -1, 0, 4), fresh=(0, 2), tail=7)
CALLS = {
    "decode": Case(slots=(3, -1, 0, 4)),
    "decode, gates": Case(slots=(3, -1, 0, 4), gate="vector"),
    "verify": Case(op="verify", T=4, slots=(-1, 3, 0, 4)),
    "commit": Case(op="commit", T=4, counts=(2, 3, 0, 4), slots=(3, 0, 4, -1), gate="scalar"),
    "prefill": PREFILL,
    "prefill, gates": Case(op="prefill", lengths=(70, 5, 0, 65), slots=(3, -1, 0, 4), fresh=(0, 2), tail=7,
                           gate="vector"),
    "prefill, exported": Case(op="prefill", lengths=(70, 5, 0, 65), slots=(3, -1, 0, 4), fresh=(0, 2), tail=7,
                              tokens=(0, 63, 69, 72, 80, 139, 142), targets=(1, 2, 5, 6, 7, 8, 9), size=12),
}
CALLS |= {
    f"{name}, delta": dataclasses.replace(CALLS[name], delta=True, gate="scalar")
    for name in ("decode", "verify", "commit", "prefill", "prefill, exported")
}


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_what_no_request_has(platform, framework, name, garbage):
    case = CALLS[name]
    require(case, platform)
    arrays, slots = case.arrays, np.array(case.slots)
    padding = slots < 0
    rows = np.zeros(arrays["key"].shape[:1], bool)
    if case.op == "prefill":
        cu = arrays["cu_seqlens"]
        rows[cu[-1] :] = True
        for n in np.flatnonzero(padding):
            rows[cu[n] : cu[n + 1]] = True
    else:
        rows = padding
    if case.op == "commit":
        # Drafts that were rejected, too.
        rows = padding[:, None] | (np.arange(case.T) >= np.array(case.counts)[:, None])
    for field in ("query", "key", "value", "g", "beta"):
        if arrays[field] is not None:
            x = np.array(arrays[field])
            # Gates of requests are checked, of padding they are not.
            x[rows if field != "g" or case.op == "prefill" else padding] = np.nan if field == "g" else garbage
            arrays[field] = x
    states = np.array(arrays["states"])
    unused = np.setdiff1d(np.arange(len(states)), slots)
    fresh = [slots[n] for n in case.fresh or ()]
    states[[*unused, *fresh]] = garbage
    arrays["states"] = states
    case.check(runner(platform, framework))
